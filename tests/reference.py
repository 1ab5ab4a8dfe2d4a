"""Plain numpy float64 reference of the federated methods on separable quadratic problems.

Written from METHODS.md alone, to check the library against. Every method returns the server model
after every round; `cohorts[task][round]` lists the client indices that take part. All local steps
are full-batch gradient steps, but for C-FLAG with `picks` (one stored gradient per sample).
Where METHODS.md leaves a choice:
- SCAFFOLD: travel by `average`, control variates always by the uniform mean.
- MimeLite: model and momentum both by `average`.
- C-FLAG worst case: c is the cohort size (the number of summed terms; N when all take part).
- C-FLAG guard alpha_i <= 1/L acts under interference only; `alpha_cap` replaces 1/L.
- A client's C-FLAG memory holds all its earlier tasks' samples, whether it took part or not.
- FedNova: local momentum starts at zero every round; rho and mu together are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Vec = npt.NDArray[np.float64]
Cohorts = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Client:
    """Samples j of loss 0.5 * sum_k a[j, k] * (w_k - c[j, k])**2; the client loss is their mean."""

    a: Vec
    c: Vec

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return int(self.a.shape[0])

    def loss(self, w: Vec) -> float:
        """Return the mean loss."""
        return float((0.5 * self.a * (w - self.c) ** 2).sum(axis=1).mean())

    def sample_grads(self, w: Vec) -> Vec:
        """Return the gradient of every sample, one per row."""
        return self.a * (w - self.c)

    def grad(self, w: Vec) -> Vec:
        """Return the gradient of the mean loss."""
        return np.asarray(self.sample_grads(w).mean(axis=0))

    def hessian(self) -> Vec:
        """Return the diagonal of the Hessian of the mean loss."""
        return np.asarray(self.a.mean(axis=0))

    def fisher(self, w: Vec) -> Vec:
        """Return the mean over the samples of the squared per-sample gradient."""
        return np.asarray((self.sample_grads(w) ** 2).mean(axis=0))


Tasks = Sequence[Sequence[Client]]


def weights(clients: Sequence[Client], cohort: Sequence[int], average: str) -> list[float]:
    """Return the aggregation weights of the cohort, in its order."""
    if average == "uniform":
        return [1.0 / len(cohort)] * len(cohort)
    if average != "samples":
        raise ValueError(average)
    total = sum(clients[i].n for i in cohort)
    return [clients[i].n / total for i in cohort]


def mix(p: Sequence[float], vectors: Sequence[Vec]) -> Vec:
    """Return sum_i p_i v_i."""
    total = np.zeros_like(vectors[0])
    for weight, vector in zip(p, vectors, strict=True):
        total = total + weight * vector
    return total


def local(
    client: Client,
    w: Vec,
    steps: int,
    lr: float,
    *,
    scale: float = 1.0,
    lin: Vec | float = 0.0,
    const: Vec | float = 0.0,
) -> Vec:
    """Run y <- y - lr * (scale * grad(y) + lin * y + const) from w."""
    y = w
    for _ in range(steps):
        y = y - lr * (scale * client.grad(y) + lin * y + const)
    return y


# --- standard optimisers (METHODS 3) ---


def fedavg(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    server_lr: float = 1.0,
) -> list[Vec]:
    """Run FedAvg."""
    w, out = w0, []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            travel = mix(p, [local(clients[i], w, steps, lr) - w for i in cohort])
            w = w + server_lr * travel
            out.append(w)
    return out


def fedprox(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    mu: float,
) -> list[Vec]:
    """Run FedProx: local gradient + mu * (y - w)."""
    w, out = w0, []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            w = mix(p, [local(clients[i], w, steps, lr, lin=mu, const=-mu * w) for i in cohort])
            out.append(w)
    return out


def fedavgm(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    beta: float,
    server_lr: float,
    nesterov: bool = False,
) -> list[Vec]:
    """Run FedAvgM: server momentum on the pseudo-gradient."""
    w, v, out = w0, np.zeros_like(w0), []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            g = w - mix(p, [local(clients[i], w, steps, lr) for i in cohort])
            v = beta * v + g
            w = w - server_lr * (g + beta * v if nesterov else v)
            out.append(w)
    return out


def fedopt(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    kind: str,
    server_lr: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> list[Vec]:
    """Run FedAdagrad, FedAdam or FedYogi without bias correction; v starts at tau**2."""
    w, m, v, out = w0, np.zeros_like(w0), np.full_like(w0, tau**2), []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            d = mix(p, [local(clients[i], w, steps, lr) - w for i in cohort])
            m = beta1 * m + (1 - beta1) * d
            if kind == "adagrad":
                v = v + d**2
            elif kind == "adam":
                v = beta2 * v + (1 - beta2) * d**2
            elif kind == "yogi":
                v = v - (1 - beta2) * d**2 * np.sign(v - d**2)
            else:
                raise ValueError(kind)
            w = w + server_lr * m / (np.sqrt(v) + tau)
            out.append(w)
    return out


def scaffold_states(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    option: int = 2,
    server_lr: float = 1.0,
    reset: bool = False,
) -> list[tuple[Vec, Vec, list[Vec]]]:
    """Run SCAFFOLD and return (w, c, all c_i) after every round."""
    if option not in (1, 2):
        raise ValueError(option)
    w, out = w0, []
    c, own = np.zeros_like(w0), [np.zeros_like(w0) for _ in tasks[0]]
    for clients, rounds in zip(tasks, cohorts, strict=True):
        if reset:
            c, own = np.zeros_like(w0), [np.zeros_like(w0) for _ in clients]
        for cohort in rounds:
            p = weights(clients, cohort, average)
            finals = [local(clients[i], w, steps, lr, const=c - own[i]) for i in cohort]
            if option == 1:
                fresh = [clients[i].grad(w) for i in cohort]
            else:
                fresh = [
                    own[i] - c + (w - y) / (steps * lr) for i, y in zip(cohort, finals, strict=True)
                ]
            change = sum(
                (new - own[i] for i, new in zip(cohort, fresh, strict=True)), np.zeros_like(w0)
            )
            w = w + server_lr * mix(p, [y - w for y in finals])
            c = c + change / len(clients)  # (S/N) * uniform mean over the cohort
            own = list(own)
            for i, new in zip(cohort, fresh, strict=True):
                own[i] = new
            out.append((w, c, own))
    return out


def scaffold(tasks: Tasks, w0: Vec, cohorts: Cohorts, **hyper: Any) -> list[Vec]:
    """Run SCAFFOLD; keywords as for scaffold_states."""
    return [state[0] for state in scaffold_states(tasks, w0, cohorts, **hyper)]


def mimelite_states(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    beta: float,
) -> list[tuple[Vec, Vec]]:
    """Run MimeLite with SGD momentum and return (w, m) after every round."""
    w, m, out = w0, np.zeros_like(w0), []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            finals = [
                local(clients[i], w, steps, lr, scale=1 - beta, const=beta * m) for i in cohort
            ]
            m = (1 - beta) * mix(p, [clients[i].grad(w) for i in cohort]) + beta * m
            w = mix(p, finals)
            out.append((w, m))
    return out


def mimelite(tasks: Tasks, w0: Vec, cohorts: Cohorts, **hyper: Any) -> list[Vec]:
    """Run MimeLite; keywords as for mimelite_states."""
    return [state[0] for state in mimelite_states(tasks, w0, cohorts, **hyper)]


def nova_norm(tau: int, lr: float, rho: float, mu: float) -> float:
    """Return the 1-norm of FedNova's accumulation vector."""
    if rho and mu:
        raise ValueError("rho and mu together are not specified")
    if rho:
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    if mu:
        return (1 - (1 - lr * mu) ** tau) / (lr * mu)
    return float(tau)


def nova_local(client: Client, w: Vec, tau: int, lr: float, rho: float, mu: float) -> Vec:
    """Run FedNova's local phase: heavy-ball momentum rho, or prox mu."""
    y, v = w, np.zeros_like(w)
    for _ in range(tau):
        v = rho * v + client.grad(y) + mu * (y - w)
        y = y - lr * v
    return y


def fednova(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int | None = None,
    lr: float,
    average: str = "samples",
    taus: Sequence[int],
    rho: float = 0.0,
    mu: float = 0.0,
) -> list[Vec]:
    """Run FedNova; client i takes taus[i] steps and `steps` is ignored."""
    w, out = w0, []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            norms = [nova_norm(taus[i], lr, rho, mu) for i in cohort]
            finals = [nova_local(clients[i], w, taus[i], lr, rho, mu) for i in cohort]
            d = [(w - y) / (lr * norm) for y, norm in zip(finals, norms, strict=True)]
            tau_eff = sum(weight * norm for weight, norm in zip(p, norms, strict=True))
            w = w - tau_eff * lr * mix(p, d)
            out.append(w)
    return out


def fedtrack(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
) -> list[Vec]:
    """Run FedTrack with exact local gradients."""
    w, out = w0, []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            g = mix(p, [clients[i].grad(w) for i in cohort])
            w = mix(
                p, [local(clients[i], w, steps, lr, const=g - clients[i].grad(w)) for i in cohort]
            )
            out.append(w)
    return out


# --- CFL regularisation (METHODS 4) ---


@dataclass(frozen=True)
class Entry:
    """Second-order surrogate of one client's loss in one round."""

    round: int
    at: Vec
    g: Vec
    h: Vec

    def grad(self, w: Vec) -> Vec:
        """Return the surrogate's gradient."""
        return self.g + self.h * (w - self.at)


def theorem41(t: int, D2: float, R2: float) -> tuple[float, float]:
    """Return (weight of each past round, weight of the current round)."""
    if t == 1:
        return 0.0, 1.0
    den = t * D2 + (t - 1) * R2
    return D2 / den, (D2 + (t - 1) * R2) / den


def make_entry(client: Client, w: Vec, round_: int, curvature: str) -> Entry:
    """Return the surrogate of the client's loss at its final local model w."""
    if curvature not in ("fisher", "exact"):
        raise ValueError(curvature)
    h = client.fisher(w) if curvature == "fisher" else client.hessian()
    return Entry(round_, w, client.grad(w), h)


def cfl_local(
    client: Client,
    w: Vec,
    steps: int,
    lr: float,
    p_now: float,
    past: Sequence[tuple[Vec | float, Entry]],
    mu: float = 0.0,
) -> Vec:
    """Run local steps on p_now * f + sum_b weight_b * surrogate_b + prox."""
    y = w
    for _ in range(steps):
        g = p_now * client.grad(y) + mu * (y - w)
        for weight, entry in past:
            g = g + weight * entry.grad(y)
        y = y - lr * g
    return y


def cfl_reg(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    curvature: str,
    beta: Vec,
    buffer: int = 40,
    mu: float = 0.0,
) -> list[Vec]:
    """Run CFL-Regularization with weights=beta: f + beta * mean of the buffered surrogates."""
    w = w0
    out: list[Vec] = []
    entries: list[Entry] = []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            past = [(beta / len(entries), entry) for entry in entries]
            finals = [cfl_local(clients[i], w, steps, lr, 1.0, past, mu) for i in cohort]
            w = mix(p, finals)
            for i, y in zip(cohort, finals, strict=True):
                entries = [*entries, make_entry(clients[i], y, len(out), curvature)][-buffer:]
            out.append(w)
    return out


def cfl_reg_theory(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    D2: float,
    R2: float,
    curvature: str,
    buffer: int = 40,
) -> list[Vec]:
    """Run CFL-Regularization with weights=theory: the weights of Theorem 4.1 per past round."""
    w = w0
    out: list[Vec] = []
    entries: list[Entry] = []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            left = Counter(entry.round for entry in entries)
            p_past, p_now = theorem41(len(left) + 1, D2, R2)
            past = [(p_past / left[entry.round], entry) for entry in entries]
            finals = [cfl_local(clients[i], w, steps, lr, p_now, past) for i in cohort]
            w = mix(p, finals)
            for i, y in zip(cohort, finals, strict=True):
                entries = [*entries, make_entry(clients[i], y, len(out), curvature)][-buffer:]
            out.append(w)
    return out


# --- SPECIAL (METHODS 5) ---


def pull(x: Vec, anchor: Vec, strength: float) -> Vec:
    """Return the proximal point (x + strength * anchor) / (1 + strength)."""
    return (x + strength * anchor) / (1 + strength)


def special(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    lam: float,
    server_lr: float | str = "1/task",
) -> list[Vec]:
    """Run SPECIAL: from task 2 on the server pulls every round's model to the last task's."""
    w, anchor, out = w0, w0, []
    for number, (clients, rounds) in enumerate(zip(tasks, cohorts, strict=True), start=1):
        rate = 1.0 / number if server_lr == "1/task" else float(server_lr)
        for cohort in rounds:
            p = weights(clients, cohort, average)
            w = w + rate * mix(p, [local(clients[i], w, steps, lr) - w for i in cohort])
            if number > 1:
                w = pull(w, anchor, lam)
            out.append(w)
        anchor = w
    return out


def special_c(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    lam: float,
    server_lr: float = 1.0,
) -> list[Vec]:
    """Run SPECIAL-C: from task 2 on clients pull by 2 * lam after every local step."""
    w, anchor, out = w0, w0, []
    for number, (clients, rounds) in enumerate(zip(tasks, cohorts, strict=True), start=1):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            finals = []
            for i in cohort:
                y = w
                for _ in range(steps):
                    y = local(clients[i], y, 1, lr)
                    if number > 1:
                        y = pull(y, anchor, 2 * lam)
                finals.append(y)
            w = w + server_lr * mix(p, [y - w for y in finals])
            out.append(w)
        anchor = w
    return out


# --- FedEve (METHODS 6) ---


@dataclass(frozen=True)
class Eve:
    """Server state of FedEve and the gain of its latest round."""

    w: Vec
    m: Vec
    var: float
    gain: float


def fedeve_server(
    state: Eve, deltas: Sequence[Vec], p: Sequence[float], q_mode: str, server_lr: float
) -> Eve:
    """Fuse the pseudo-gradients of one round, taken from w - server_lr * m."""
    if q_mode not in ("innovation", "update"):
        raise ValueError(q_mode)
    s, d = len(deltas), state.w.size
    seen = mix(p, deltas)
    shift = state.m - seen if q_mode == "innovation" else seen
    var_q = float(shift @ shift) / (s * d)
    var_r = sum(float((x - seen) @ (x - seen)) for x in deltas) / (s**2 * d)
    var = state.var + var_q
    gain = var / (var + var_r) if var + var_r > 0 else 1.0
    m = state.m + gain * (seen - state.m)
    return Eve(state.w - server_lr * m, m, (1 - gain) * var, gain)


def fedeve_states(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    q_mode: str = "innovation",
    server_lr: float = 1.0,
) -> list[Eve]:
    """Run FedEve and return the server state after every round."""
    state, out = Eve(w0, np.zeros_like(w0), 0.0, 0.0), []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            start = state.w - server_lr * state.m
            deltas = [start - local(clients[i], start, steps, lr) for i in cohort]
            state = fedeve_server(state, deltas, p, q_mode, server_lr)
            out.append(state)
    return out


def fedeve(tasks: Tasks, w0: Vec, cohorts: Cohorts, **hyper: Any) -> list[Vec]:
    """Run FedEve; keywords as for fedeve_states."""
    return [state.w for state in fedeve_states(tasks, w0, cohorts, **hyper)]


# --- C-FLAG (METHODS 7) ---


def adaptive_rates(
    f: Vec,
    a: Vec,
    p: float,
    n: int,
    *,
    alpha: float,
    beta: float,
    L: float,
    adaptive: str,
    clip: float = 10.0,
    alpha_cap: float | None = None,
) -> tuple[float, float]:
    """Return (alpha_i, beta_i) from the memory gradient f and the summed local gradients a."""
    if adaptive not in ("off", "average", "worst"):
        raise ValueError(adaptive)
    if adaptive == "off" or np.linalg.norm(f) < 1e-12 or np.linalg.norm(a) < 1e-12:
        return alpha, beta
    inner = float(f @ a)
    if inner > 0:
        c = n if adaptive == "worst" else 1
        return alpha, min((1 - L * alpha) * inner / (L * p * c * float(a @ a)), clip * beta)
    cap = 1.0 / L if alpha_cap is None else alpha_cap
    return min(alpha - beta * inner / float(f @ f), cap), beta


def flag_local(
    client: Client, x: Vec, steps: int, beta: float, shift: Vec, picks: Sequence[int] | None
) -> Vec:
    """Run y <- y - beta * (shift + g') with exact gradients, or with IAG when picks are given."""
    if picks is None:
        return local(client, x, steps, beta, const=shift)
    table, y = client.sample_grads(x), x
    for k in range(steps):
        if k > 0:
            j = picks[k - 1]
            table[j] = client.sample_grads(y)[j]
        y = y - beta * (shift + table.mean(axis=0))
    return y


def cflag(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    alpha: float,
    L: float,
    adaptive: str = "off",
    printed: bool = False,
    clip: float = 10.0,
    picks: Sequence[Sequence[Any]] | None = None,
    alpha_cap: float | None = None,
) -> list[Vec]:
    """Run C-FLAG with beta = lr; picks[task][round][client id] names the refreshed samples."""
    x, out = w0, []
    for number, (clients, rounds) in enumerate(zip(tasks, cohorts, strict=True)):
        memory = [
            Client(
                np.concatenate([task[i].a for task in tasks[:number]]),
                np.concatenate([task[i].c for task in tasks[:number]]),
            )
            for i in range(len(clients) if number else 0)
        ]
        for index, cohort in enumerate(rounds):
            p = weights(clients, cohort, average)
            own = [clients[i].grad(x) for i in cohort]
            g = mix(p, own)
            f = mix(p, [memory[i].grad(x) for i in cohort]) if number else np.zeros_like(x)
            moves = []
            for i, p_i, g_i in zip(cohort, p, own, strict=True):
                chosen = None if picks is None else picks[number][index][i]
                y = flag_local(clients[i], x, steps, lr, g - g_i, chosen)
                a = (x - y) / lr - steps * (g - g_i)
                alpha_i, beta_i = adaptive_rates(
                    f,
                    a,
                    p_i,
                    len(cohort),
                    alpha=alpha,
                    beta=lr,
                    L=L,
                    adaptive=adaptive,
                    clip=clip,
                    alpha_cap=alpha_cap,
                )
                last = beta_i if printed else lr
                moves.append(alpha_i * f + beta_i * a + last * steps * (g - g_i))
            x = x - mix(p, moves)
            out.append(x)
    return out


# --- EWC (METHODS 8) ---


def ewc(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    lam: float,
    decay: float,
) -> list[Vec]:
    """Run EWC-FL: local gradient + lam * F * (y - w_star) from task 2 on."""
    w, star, fisher, out = w0, np.zeros_like(w0), np.zeros_like(w0), []
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            p = weights(clients, cohort, average)
            pull_lin, pull_const = lam * fisher, -lam * fisher * star
            w = mix(
                p,
                [local(clients[i], w, steps, lr, lin=pull_lin, const=pull_const) for i in cohort],
            )
            out.append(w)
        everyone = weights(clients, range(len(clients)), average)
        fisher = decay * fisher + mix(everyone, [client.fisher(w) for client in clients])
        star = w
    return out


# --- FedCurv (METHODS 3) ---


def fedcurv(
    tasks: Tasks,
    w0: Vec,
    cohorts: Cohorts,
    *,
    steps: int,
    lr: float,
    average: str = "samples",
    lam: float,
) -> list[Vec]:
    """Run FedCurv with every other client's latest (F, model) kept as it is."""
    w, out = w0, []
    latest: dict[int, tuple[Vec, Vec]] = {}
    for clients, rounds in zip(tasks, cohorts, strict=True):
        for cohort in rounds:
            finals: dict[int, Vec] = {}
            for s in cohort:
                y = w
                for _ in range(steps):
                    g = clients[s].grad(y)
                    for j, (fisher, at) in latest.items():
                        if j != s:
                            g = g + 2 * lam * fisher * (y - at)
                    y = y - lr * g
                finals[s] = y
            w = mix(weights(clients, cohort, average), [finals[s] for s in cohort])
            latest = latest | {s: (clients[s].fisher(y), y) for s, y in finals.items()}
            out.append(w)
    return out


# --- the numeric checks of METHODS.md ---


def quadratic(a: Sequence[float], c: Sequence[float]) -> Client:
    """Return a one-parameter client with the given samples."""
    return Client(np.array(a, dtype=float)[:, None], np.array(c, dtype=float)[:, None])


def q2() -> list[Client]:
    """Return the two clients of fixture Q2."""
    return [quadratic([1], [1]), quadratic([2, 2, 2], [4, 4, 4])]


def check(name: str, got: Any, want: Any, tol: float = 1e-6) -> None:
    """Compare, print one line, and fail on a difference above tol."""
    got = np.asarray(got, dtype=float).ravel()
    want = np.asarray(want, dtype=float).ravel()
    assert got.shape == want.shape, (name, got.shape, want.shape)
    assert np.all(np.abs(got - want) <= tol), (name, got, want)
    print(f"ok  {name}: {np.array2string(got, precision=6, separator=', ')}")


def check_standard() -> None:
    """Check METHODS 3 and FedTrack on Q2."""
    tasks, w0 = [q2()], np.zeros(1)
    few, many = [[[0, 1]] * 3], [[[0, 1]] * 2000]
    base: dict[str, Any] = {"steps": 2, "lr": 0.1}
    uni: dict[str, Any] = {**base, "average": "uniform"}
    a, b = tasks[0]

    check("Q2 minimisers", [(0.25 * 1 + 0.75 * 8) / 1.75, (1 + 8) / 3], [3.571429, 3])
    check("FedAvg locals", [local(a, w0, 2, 0.1), local(b, w0, 2, 0.1)], [0.19, 1.44])
    check("FedAvg wtd", fedavg(tasks, w0, few, **base)[:2], [1.1275, 1.897019])
    check("FedAvg wtd limit", fedavg(tasks, w0, many, **base)[-1], 3.551181)
    check("FedAvg uni", fedavg(tasks, w0, few, **uni)[0], 0.815)
    check("FedAvg uni limit", fedavg(tasks, w0, many, **uni)[-1], 2.963636)
    prox = [local(x, w0, 2, 0.1, lin=1.0, const=-1.0 * w0) for x in (a, b)]
    check("FedProx locals", prox, [0.18, 1.36])
    check("FedProx wtd", fedprox(tasks, w0, few, mu=1.0, **base)[0], 1.065)
    momentum: dict[str, Any] = {"beta": 0.9, "server_lr": 1.0, **base}
    check("FedAvgM", fedavgm(tasks, w0, few, **momentum)[:2], [1.1275, 2.911769])
    nesterov = fedavgm(tasks, w0, few, nesterov=True, **momentum)[:2]
    check("FedAvgM Nesterov", nesterov, [2.14225, 3.905463])
    plain = fedavg(tasks, w0, few, **base)
    same = fedavgm(tasks, w0, few, beta=0.0, server_lr=1.0, **base)
    check("FedAvgM beta=0 is FedAvg", same, plain, 1e-12)
    check("FedProx mu=0 is FedAvg", fedprox(tasks, w0, few, mu=0.0, **base), plain, 1e-12)
    for kind, beta1, want in (
        ("adagrad", 0.0, [0.099911, 0.169562]),
        ("adam", 0.9, [0.099117, 0.232845]),
        ("yogi", 0.9, [0.099117, 0.232503]),
    ):
        hyper: dict[str, Any] = {"server_lr": 0.1, "beta1": beta1, "beta2": 0.99, "tau": 1e-3}
        check(f"FedOpt {kind}", fedopt(tasks, w0, few, kind=kind, **hyper, **base)[:2], want)
    check("SCAFFOLD II uni", scaffold(tasks, w0, few, option=2, **uni), [0.815, 1.4215, 1.860653])
    for option in (1, 2):
        w, c, own = scaffold_states(tasks, w0, many, option=option, **uni)[-1]
        check(f"SCAFFOLD {option} limit w, c, c_i", [w, c, *own], [3, 0, 2, -2])
    first = scaffold(tasks, w0, few, option=2, **base)[0]
    check("SCAFFOLD round 1 is FedAvg", first, plain[0], 1e-12)
    _, c, own = scaffold_states(tasks, w0, few, option=2, **uni)[0]
    check("SCAFFOLD II round 1 c, c_i", [c, *own], [-4.075, -0.95, -7.2])
    mime = mimelite_states(tasks, w0, few, beta=0.9, **uni)[:2]
    check("MimeLite .9", [x for s in mime for x in s], [0.08915, -0.45, 0.25604, -0.841627])
    check("MimeLite .01", mimelite(tasks, w0, few, beta=0.01, **uni)[:2], [0.807692, 1.403538])
    check("MimeLite beta=0 is FedAvg", mimelite(tasks, w0, few, beta=0.0, **base), plain, 1e-12)
    finals = [nova_local(x, w0, t, 0.1, 0.0, 0.0) for x, t in ((a, 1), (b, 3))]
    check("FedNova locals", finals, [0.1, 1.952])
    check("FedNova d", [-finals[0] / 0.1, -finals[1] / 0.3], [-1, -6.506667])
    check("FedNova's FedAvg", mix([0.25, 0.75], finals), 1.489)
    check("FedNova w1", fednova(tasks, w0, few, taus=[1, 3], lr=0.1)[0], 1.2825)
    norms = [nova_norm(t, 0.1, 0.9, 0.0) for t in (1, 2, 3)] + [nova_norm(3, 0.1, 0.0, 1.0)]
    check("FedNova norms", norms, [1, 2.9, 5.61, 2.71])
    ramp = Client(np.full((1, 1), 1e-12), np.full((1, 1), -1e12))  # gradient 1 everywhere
    ran = [-nova_local(ramp, w0, t, 0.1, 0.9, 0.0) / 0.1 for t in (1, 2, 3)]
    ran.append(-nova_local(ramp, w0, 3, 0.1, 0.0, 1.0) / 0.1)
    check("FedNova norms by running", ran, norms)
    check("FedNova equal tau", fednova(tasks, w0, few, taus=[2, 2], lr=0.1), plain, 1e-12)
    ends = [local(x, w0, 2, 0.1, const=-4.5 - x.grad(w0)) for x in (a, b)]
    check("FedTrack locals", ends, [0.855, 0.81])
    once = fedtrack(tasks, w0, few, steps=1, lr=0.1)
    descent = fedavg(tasks, w0, few, steps=1, lr=0.1)
    check("FedTrack K=1 is gradient descent", once, descent, 1e-12)
    check("FedTrack", fedtrack(tasks, w0, few, **uni)[:2], [0.8325, 1.433981])
    check("FedTrack limit", fedtrack(tasks, w0, many, **uni)[-1], 3)


def check_cfl() -> None:
    """Check METHODS 4, 4.1 and 4.2."""
    for t, d2, r2, want, limit in (
        (4, 4.0, 1.0, [0.210526, 0.368421, 1.473684], 0.8),
        (10, 1.0, 0.25, [0.081633, 0.265306, 0.265306], 0.2),
    ):
        past, now = theorem41(t, d2, r2)
        low = d2 * ((t - 1) * past**2 + now**2) + r2 * (1 - now) ** 2
        check(f"Thm 4.1 t={t}", [past, now, low], want)
        past, now = theorem41(10**9, d2, r2)
        low = d2 * ((10**9 - 1) * past**2 + now**2) + r2 * (1 - now) ** 2
        check(f"Thm 4.1 t={t} limit", low, limit)
    for d2, f2, r2, want in (
        (4.0, 1.0, 1.0, [0.2, 0.4]),
        (1.0, 0.5, 1.0, [0.1, 0.7]),
        (1.0, 1.5, 1.0, [0.0, 1.0]),
    ):
        check(f"Thm 4.7 {d2, f2, r2}", theorem41(4, max(0.0, d2 - f2), r2), want)
    check("Table 2 row 1", theorem41(4, 2.0, 1.0), [0.1818, 0.4545], 5e-5)

    def vec(*x: float) -> Vec:
        return np.array(x)

    entries = [
        Entry(0, vec(1, 0), vec(0.5, -0.5), vec(2, 1)),
        Entry(0, vec(0, 2), vec(1, 0), vec(1, 4)),
    ]
    w, p = vec(0.5, 0.5), [0.25, 0.25]
    check("CFL-Reg gradient", mix(p, [e.grad(w) for e in entries]), [0.25, -1.5])
    flat, offset = mix(p, [e.h for e in entries]), mix(p, [e.g - e.h * e.at for e in entries])
    check("CFL-Reg compression", [flat, offset], [0.75, 1.25, -0.125, -2.125])
    samples = Client(np.ones((3, 2)), -np.array([[1.0, -2.0], [-1.0, 2.0], [2.0, 0.0]]))
    fisher = [samples.fisher(np.zeros(2)), samples.grad(np.zeros(2)) ** 2]
    check("Fisher, square of mean", fisher, [2, 2.666667, 0.444444, 0])
    new, old, zero = quadratic([1], [4]), quadratic([3], [1]), np.zeros(1)
    entry = make_entry(old, zero, 0, "exact")
    check("CFL-Reg entry g, h", [entry.g, entry.h], [-3, 3])
    path = [cfl_local(new, zero, k, 0.1, 0.75, [(0.25, entry)]) for k in (1, 2)]
    check("CFL-Reg local steps", path, [0.375, 0.69375])
    path = [cfl_local(new, zero, k, 0.1, 0.75, [(0.25, entry)], 0.1) for k in (1, 2)]
    check("CFL-Reg + FedProx local steps", path, [0.375, 0.69])
    past, present = theorem41(2, 1.0, 2.0)
    check("those weights from Thm 4.1, D2=1, R2=2", [present, past], [0.75, 0.25])
    rng = np.random.default_rng(0)
    client = Client(rng.uniform(1, 2, (5, 3)), rng.normal(size=(5, 3)))
    at, to = rng.normal(size=3), rng.normal(size=3)
    gap = make_entry(client, at, 0, "exact").grad(to) - client.grad(to)
    check("information loss of quadratics", gap, np.zeros(3), 1e-12)

    # Exact surrogates of A and B have gradients w - 1 and 2w - 8, so their mean is 1.5w - 4.5.
    tasks, w0, few = [q2()], np.zeros(1), [[[0, 1]] * 6]
    base: dict[str, Any] = {"steps": 2, "lr": 0.1}
    plain = fedavg(tasks, w0, few, **base)
    run = cfl_reg(tasks, w0, few, curvature="fisher", beta=np.zeros(1), **base)
    check("CFL-Reg beta=0 is FedAvg", run, plain, 1e-12)
    run = cfl_reg_theory(tasks, w0, few, D2=1.0, R2=1e15, curvature="fisher", **base)
    check("CFL-Reg theory R2=inf is FedAvg", run, plain, 1e-9)
    w1 = plain[0]
    blend = [local(x, w1, 2, 0.1, scale=0.75, lin=0.25 * 1.5, const=-0.25 * 4.5) for x in q2()]
    run = cfl_reg_theory(tasks, w0, few, D2=1.0, R2=2.0, curvature="exact", **base)
    check("CFL-Reg theory round 2 by hand", run[1], mix([0.25, 0.75], blend), 1e-12)
    only_b = cfl_reg_theory(tasks, w0, few, D2=1.0, R2=2.0, curvature="exact", buffer=1, **base)
    blend = [local(x, w1, 2, 0.1, scale=0.75, lin=0.25 * 2, const=-0.25 * 8) for x in q2()]
    check("CFL-Reg theory buffer of 1", only_b[1], mix([0.25, 0.75], blend), 1e-12)
    blend = [local(x, w1, 2, 0.1, lin=0.3 * 1.5, const=-0.3 * 4.5) for x in q2()]
    run = cfl_reg(tasks, w0, few, curvature="exact", beta=np.array([0.3]), **base)
    check("CFL-Reg beta round 2 by hand", run[1], mix([0.25, 0.75], blend), 1e-12)


def check_special() -> None:
    """Check METHODS 5."""
    one, two = np.ones(1), np.full(1, 2.0)
    w0, tasks = np.zeros(1), [q2(), q2()]
    few, many = [[], [[0, 1]] * 3], [[], [[0, 1]] * 2000]
    uni: dict[str, Any] = {"steps": 2, "lr": 0.1, "average": "uniform"}
    check("SPECIAL prox", pull(two, one, 0.25), 1.8)
    check("SPECIAL", special(tasks, w0, few, lam=0.25, **uni), [0.326, 0.55094, 0.706149])
    check("SPECIAL limit", special(tasks, w0, many, lam=0.25, **uni)[-1], 1.051613)
    check("SPECIAL limit formula", 0.5 * 0.815 / (0.5 * 0.275 + 0.25), 1.051613)
    path = [w0, *special(tasks, w0, few, lam=0.25, **uni)]
    travel = [0.5 * (0.815 - 0.275 * float(x[0])) for x in path[:3]]
    right = sum(1.25 ** -(3 - k) * x for k, x in enumerate(travel))
    wrong = sum(1.25 ** -(k + 1) * x for k, x in enumerate(travel))
    check("SPECIAL expansion, printed", [right, wrong], [0.706149, 0.727966])
    for lam, rounds, want in ((0.25, 20, 3.954), (0.05, 20, 12.462), (0.05, 30, 15.372)):
        x = w0
        for _ in range(rounds):
            x = pull(x + 1, w0, lam)
        check(f"SPECIAL travel lam={lam} rounds={rounds}", x, want, 5e-4)
    plain = fedavg(tasks, w0, few, **uni)
    run = special(tasks, w0, few, lam=0.0, server_lr=1.0, **uni)
    check("SPECIAL lam=0 is FedAvg", run, plain, 1e-12)
    check("SPECIAL-C prox", pull(two, one, 2 * 0.25), 1.666667)
    lone = [special_c([[x], [x]], w0, [[], [[0]]], lam=0.2, **uni)[0] for x in q2()]
    check("SPECIAL-C locals", lone, [0.117347, 0.897959])
    check("SPECIAL-C", special_c(tasks, w0, few, lam=0.2, **uni)[0], 0.507653)


def check_fedeve() -> None:
    """Check METHODS 6."""
    for var, noise, gain, fused, mean in (
        (1.0, 1.0, 0.5, 0.5, 1.5),
        (3.0, 1.0, 0.75, 0.75, 1.75),
        (0.2, 0.8, 0.2, 0.16, 1.2),
    ):
        # d=1, S=10, m=1, deltas 2 -+ r: the prediction 1 meets 2, var_q = .1, var_r = r**2 / 10.
        r = np.sqrt(10 * noise)
        deltas = [np.array([2 - r]), np.array([2 + r])] * 5
        state = Eve(np.zeros(1), np.ones(1), var - 0.1, 0.0)
        out = fedeve_server(state, deltas, [0.1] * 10, "innovation", 1.0)
        check(f"FedEve gain {var, noise}", [out.gain, out.var, out.m[0]], [gain, fused, mean])
    state = Eve(np.zeros(2), np.zeros(2), 0.0, 0.0)
    for rows, gain, m, w, var in (
        ([[1, 0], [0, 1]], 0.5, [0.25, 0.25], [-0.25, -0.25], 0.0625),
        ([[1, 1], [0, 1]], 7 / 9, [0.444444, 0.833333], [-0.694444, -1.083333], 0.048611),
    ):
        deltas = [np.array(x, dtype=float) for x in rows]
        state = fedeve_server(state, deltas, [0.5, 0.5], "innovation", 1.0)
        got = [state.gain, *state.m, *state.w, state.var]
        check(f"FedEve d=2 deltas {rows}", got, [gain, *m, *w, var])
    tasks, w0, few = [q2()], np.zeros(1), [[[0, 1]] * 3]
    uni: dict[str, Any] = {"steps": 2, "lr": 0.1, "average": "uniform"}
    run = fedeve_states(tasks, w0, few, **uni)
    check("FedEve Q2 w", [s.w for s in run], [0.513195, 1.035382, 1.505504])
    check("FedEve Q2 gain", [s.gain for s in run], [0.629687, 0.460013, 0.384193])
    check("FedEve Q2 predicted", run[0].w - run[0].m, 1.026389)
    run = fedeve_states(tasks, w0, few, q_mode="update", **uni)
    check("FedEve update w", [s.w for s in run[1:]], [1.039035, 1.482911])
    check("FedEve update gain", [s.gain for s in run[1:]], [0.646894, 0.580563])
    twins, plain = [[q2()[0]] * 2], [[[0, 1]]]
    first = fedeve(twins, w0, plain, **uni)
    check("FedEve identical clients", first, fedavg(twins, w0, plain, **uni), 1e-12)


def gamma(f: Vec, a: Vec, scale: float, alpha: float, beta: float, L: float) -> float:
    """Return a client's term of Gamma; scale is p_i * c (1 at the server)."""
    return L / 2 * beta**2 * scale * float(a @ a) - beta * (1 - L * alpha) * float(f @ a)


def check_cflag() -> None:
    """Check METHODS 7 and NCCL's step."""
    w0 = np.zeros(1)
    toy = [quadratic([1, 2, 3], [1, 2, 3]), quadratic([1, 1, 4], [-1, 0, 2])]
    base: dict[str, Any] = {"lr": 0.1, "alpha": 0.1, "L": 5.0}
    path = [
        cflag([toy[:1]], w0, [[[0]]], steps=k, picks=[[{0: [0, 2]}]], **base)[0] for k in (1, 2, 3)
    ]
    check("IAG toy x", path, [0.466667, 0.917778, 1.277111])
    steps = np.diff([0.0, *(float(x[0]) for x in path)])
    check("IAG toy g'", -steps / 0.1, [-4.666667, -4.511111, -3.593333])
    table = toy[0].sample_grads(w0)
    check("IAG toy table 0", table, [-1, -4, -9])
    table[0] = toy[0].sample_grads(path[0])[0]
    check("IAG toy table 1", table, [-0.533333, -4, -9])
    table[2] = toy[0].sample_grads(path[1])[2]
    check("IAG toy table 2", table, [-0.533333, -4, -6.246667])
    own = [x.grad(w0) for x in toy]
    g, order = mix([0.5, 0.5], own), ([0, 2], [1, 0])
    check("IAG two clients gradients", [*own, g], [-4.666667, -2.333333, -3.5])
    ends = [flag_local(toy[i], w0, 3, 0.1, g - own[i], order[i]) for i in (0, 1)]
    check("IAG two clients y", ends, [0.957833, 1.003722])
    sums = [-ends[i] / 0.1 - 3 * (g - own[i]) for i in (0, 1)]
    check("IAG two clients a", sums, [-13.078333, -6.537222])
    run = cflag([toy], w0, [[[0, 1]]], steps=3, picks=[[list(order)]], **base)
    check("IAG two clients x", [*run[0], -0.1 * mix([0.5, 0.5], sums)[0]], [0.980778, 0.980778])

    f = np.array([1.0, 0.0])
    rates: dict[str, Any] = {"alpha": 0.1, "beta": 0.1, "L": 5.0}
    for mode, scale, want, before, after in (
        ("average", 0.5, 0.08, -0.0375, -0.04),
        ("worst", 1.0, 0.04, 0.025, -0.02),
    ):
        a = np.array([2.0, 1.0])
        rate = adaptive_rates(f, a, 0.5, 2, adaptive=mode, **rates)
        check(f"AdapLR {mode}", rate, [0.1, want])
        both = [gamma(f, a, scale, 0.1, b, 5.0) for b in (0.1, rate[1])]
        check(f"AdapLR {mode} Gamma", both, [before, after])
    rate = adaptive_rates(f, 0.1 * np.array([2.0, 1.0]), 0.5, 2, adaptive="worst", **rates)
    check("AdapLR printed a_i", rate[1], 0.4)
    a = np.array([-1.0, 2.0])
    alpha_i, beta_i = adaptive_rates(f, a, 0.5, 2, adaptive="average", **rates)
    check("AdapLR interference", [alpha_i, *(alpha_i * f + beta_i * a)], [0.2, 0.1, 0.2])
    both = [gamma(f, a, 0.5, x, 0.1, 5.0) for x in (0.1, alpha_i)]
    check("AdapLR interference Gamma", both, [0.1125, 0.0625])
    a = np.array([0.5, 1.5])
    beta_i = adaptive_rates(f, a, 1.0, 2, adaptive="average", **rates)[1]
    both = [gamma(f, a, 1.0, 0.1, b, 5.0) for b in (beta_i, 0.1)]
    check("AdapLR server level", [beta_i, *both], [0.02, -0.0025, 0.0375])
    small: dict[str, Any] = {"alpha": 1e-4, "beta": 1e-4, "L": 5.0, "adaptive": "average"}
    rate = adaptive_rates(f, 2 * f, 1.0, 1, clip=np.inf, **small)
    check("AdapLR aligned ratio (about 1000)", rate[1] / 1e-4, 999.5)
    check("AdapLR aligned clip", adaptive_rates(f, 2 * f, 1.0, 1, **small)[1] / 1e-4, 10)
    rate = adaptive_rates(f, np.array([2.0, 1.0]), 1.0, 1, adaptive="average", **rates)
    check("NCCL beta", rate[1], 0.04)

    uni: dict[str, Any] = {"steps": 2, "lr": 0.1, "average": "uniform", "alpha": 0.1, "L": 2.0}
    rounds = [[], [[0, 1]]]

    def memory(*m: float) -> list[list[Client]]:
        return [[quadratic([1], [x]) for x in m], q2()]

    kind, harsh = memory(-1, 3), memory(-3, 1)
    own = [x.grad(w0) for x in q2()]
    g = mix([0.5, 0.5], own)
    ends = [flag_local(x, w0, 2, 0.1, g - h, None) for x, h in zip(q2(), own, strict=True)]
    sums = [-y / 0.1 - 2 * (g - h) for y, h in zip(ends, own, strict=True)]
    check("C-FLAG a_i", sums, [-1.55, -15.1])
    rates = {"alpha": 0.1, "beta": 0.1, "L": 2.0, "adaptive": "average"}
    got = [adaptive_rates(-np.ones(1), x, 0.5, 2, **rates)[1] for x in sums]
    check("C-FLAG average beta_i", got, [0.516129, 0.052980])
    check("C-FLAG off", cflag(kind, w0, rounds, **uni)[0], 0.9325)
    for mode, printed, want in (
        ("average", False, 0.9),
        ("average", True, 2.521021),
        ("worst", False, 0.5),
        ("worst", True, 1.310511),
    ):
        run = cflag(kind, w0, rounds, adaptive=mode, printed=printed, **uni)
        check(f"C-FLAG {mode} printed={printed}", run[0], want)
    got = [adaptive_rates(np.ones(1), x, 0.5, 2, alpha_cap=np.inf, **rates)[0] for x in sums]
    check("C-FLAG interference alpha_i, no cap", got, [0.255, 1.61])
    run = cflag(harsh, w0, rounds, adaptive="average", alpha_cap=np.inf, **uni)
    check("C-FLAG interference, no cap", run[0], -0.1)
    # With the guard alpha_i <= 1/L = .5: x1 = -(.255 + .5) / 2 + .1 * (1.55 + 15.1) / 2.
    run = cflag(harsh, w0, rounds, adaptive="average", **uni)
    check("C-FLAG interference, alpha_i <= 1/L", run[0], 0.455)
    track = fedtrack([q2()], w0, [[[0, 1]] * 3], steps=2, lr=0.1)
    run = cflag([q2()], w0, [[[0, 1]] * 3], steps=2, lr=0.1, alpha=0.1, L=2.0, adaptive="worst")
    check("C-FLAG task 1 is FedTrack", run, track, 1e-12)
    single, again = [[quadratic([1], [1]), quadratic([2], [4])]], [[[[0], [0]]] * 3]
    run = cflag(single, w0, [[[0, 1]] * 3], picks=again, **uni)
    check(
        "IAG of one component is exact",
        run,
        fedtrack(single, w0, [[[0, 1]] * 3], steps=2, lr=0.1),
        1e-12,
    )


def check_ewc() -> None:
    """Check EWC-FL of METHODS 8."""
    # Penalty alone: a flat loss, F = 1e-4, w_star = 0, w = .5, one step of rate 1.
    flat, w0 = Client(np.zeros((1, 1)), np.zeros((1, 1))), np.full(1, 0.5)
    step = local(flat, w0, 1, 1.0, lin=1000 * 1e-4, const=0.0)
    check("EWC gradient", w0 - step, 0.05)
    check("EWC penalty", 1000 / 2 * 1e-4 * 0.5**2, 0.0125)
    tasks, w0, rounds = [q2(), q2()], np.zeros(1), [[[0, 1]], [[0, 1]]]
    base: dict[str, Any] = {"steps": 2, "lr": 0.1}
    plain = fedavg(tasks, w0, rounds, **base)
    check("EWC lam=0 is FedAvg", ewc(tasks, w0, rounds, lam=0.0, decay=1.0, **base), plain, 1e-12)
    # w1 = 1.1275: F_A = .1275**2, F_B = 5.745**2, F = (F_A + 3 F_B) / 4, w_star = w1.
    fisher = 0.25 * 0.1275**2 + 0.75 * 5.745**2
    ends = []
    for a, c in ((1.0, 1.0), (2.0, 4.0)):
        y = 1.1275
        for _ in range(2):
            y -= 0.1 * (a * (y - c) + 0.01 * fisher * (y - 1.1275))
        ends.append(y)
    run = ewc(tasks, w0, rounds, lam=0.01, decay=0.5, **base)
    check("EWC round 2 by hand", run[1], 0.25 * ends[0] + 0.75 * ends[1], 1e-12)


def check_fedcurv() -> None:
    """Check FedCurv of METHODS 3."""
    tasks, w0, rounds = [q2()], np.zeros(1), [[[0, 1], [0, 1]]]
    base: dict[str, Any] = {"steps": 2, "lr": 0.1}
    plain = fedavg(tasks, w0, rounds, **base)
    check("FedCurv lam=0 is FedAvg", fedcurv(tasks, w0, rounds, lam=0.0, **base), plain, 1e-12)
    # Round 1 is FedAvg's: A ends at .19, B at 1.44, so F_A = .81**2 and F_B = 5.12**2.
    ends = []
    for a, c, fisher, at in ((1.0, 1.0, 5.12**2, 1.44), (2.0, 4.0, 0.81**2, 0.19)):
        y = 1.1275
        for _ in range(2):
            y -= 0.1 * (a * (y - c) + 2 * 0.05 * fisher * (y - at))
        ends.append(y)
    run = fedcurv(tasks, w0, rounds, lam=0.05, **base)
    check("FedCurv round 2 by hand", run[1], 0.25 * ends[0] + 0.75 * ends[1], 1e-12)


if __name__ == "__main__":
    check_standard()
    check_cfl()
    check_special()
    check_fedeve()
    check_cflag()
    check_ewc()
    check_fedcurv()
