"""Bounds of SPECIAL: Server-Proximal Aggregation for Federated Domain-Incremental Learning.

Lemma 4.9 bounds how far a task can move the model from where it found it (gamma_G = 1/K here):

    |theta^t - theta^0| <= gamma_G gamma_L E B / lambda

Theorem 4.7 bounds what the earlier tasks' loss f_{1:K-1} can rise by t rounds of task K, where the
new gradients make an angle with that loss's gradient g whose cosine is at least epsilon:

    f_{1:K-1}(theta^t) - f_{1:K-1}(theta^0) <= 2 epsilon^2 sigma_L^2 |g|^2 / ((K-1) t E M N L B^2)

Theorem 4.10 bounds min_t |grad f_{1:K}|^2 by a term that falls with the rounds T, and Psi, which
does not. E are the local steps of a round (the paper has one step an epoch).

What they say is limited. By the bounded gradients alone |grad f_{1:K}|^2 <= K^2 B^2, and Psi is
never below 2 K^2 B^2 / (K-1): up to three tasks Theorem 4.10 says nothing, and for more it never
comes below that, however many the rounds; the rate of Corollary 4.12 does not follow from it.
Theorem 4.7 falls with t because it asks for a learning rate that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from everfed.errors import EverfedError


@dataclass(frozen=True)
class Constants:
    """What the bounds depend on; the defaults are the paper's protocol for Digit-10."""

    lam: float = 0.25  #: lambda
    task: int = 2  #: K, counted from 1
    clients: int = 8  #: M
    sample: int = 4  #: N, in a round
    rounds: int = 20  #: t and T
    steps: int = 5  #: E, of a client in a round
    lr: float = 1e-3  #: gamma_L
    server_lr: float | None = None  #: gamma_G; None: 1 / K
    bound: float = 1.0  #: B, the largest norm of a stochastic gradient
    smooth: float = 1.0  #: L
    noise: float = 1.0  #: sigma_L^2 of a stochastic gradient
    client: float = 1.0  #: sigma_G^2, between clients
    between: float = 1.0  #: sigma_T^2, between tasks
    past: float = 1.0  #: |g|, the norm of the earlier tasks' gradient when the task begins
    gap: float = 1.0  #: f_{1:K} when the task begins, above its optimum
    cosine: float = 0.1  #: epsilon

    def __post_init__(self) -> None:
        for name in ("lam", "lr", "bound", "smooth", "cosine"):
            if not getattr(self, name) > 0:
                raise EverfedError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("noise", "client", "between", "past", "gap"):
            if not getattr(self, name) >= 0:
                raise EverfedError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.task < 2:
            raise EverfedError(
                "the bounds are of the second task and later ones: the first has no anchor"
            )
        if not 1 <= self.sample <= self.clients:
            raise EverfedError(
                f"sample must be from 1 to the {self.clients} clients, not {self.sample}"
            )
        if min(self.rounds, self.steps) < 1:
            raise EverfedError("rounds and steps must be at least 1")
        if self.past > (self.task - 1) * self.bound:
            raise EverfedError("past is at most (task - 1) times the bound of a gradient")

    @property
    def rate(self) -> float:
        """gamma_G."""
        return 1 / self.task if self.server_lr is None else self.server_lr

    @property
    def left_out(self) -> float:
        """(M - N) / (N (M - 1)): what sampling clients adds."""
        return (self.clients - self.sample) / (self.sample * max(1, self.clients - 1))


def travel(lam: float, rounds: int) -> float:
    """How many of the largest per-round steps a task can move the model, at most 1 / lam.

    >>> round(travel(0.25, 20), 3), round(travel(0.05, 30), 3)
    (3.954, 15.372)
    """
    return (1 - (1 + lam) ** -rounds) / lam


def cap(k: Constants) -> float:
    """Lemma 4.9: the distance from the model that the task began with.

    >>> round(cap(Constants(lam=0.25, lr=0.1, steps=5, bound=2.0)), 6)
    2.0
    """
    return k.rate * k.lr * k.steps * k.bound / k.lam


def rise(k: Constants) -> float:
    """Theorem 4.7: by how much the earlier tasks' loss can have risen, if `rise_rates` hold."""
    below = (k.task - 1) * k.rounds * k.steps * k.clients * k.sample * k.smooth * k.bound**2
    return 2 * (k.cosine * k.past) ** 2 * k.noise / below


def rise_rates(k: Constants) -> tuple[float, float]:
    """The largest local and server rates for which Theorem 4.7 holds."""
    root = sqrt(k.clients * k.steps / (k.lam**2 + 2 * k.lam))
    local = 2 * k.cosine * k.past / (k.bound * k.smooth * k.steps * k.rounds * root)
    return local, 1 / (sqrt(k.sample) * (k.task - 1))


def rise_at_most(k: Constants) -> float:
    """What Lemma 4.9 and the bounded gradients give without Theorem 4.7."""
    return (k.task - 1) * k.bound * cap(k)


def falling(k: Constants) -> float:
    """Theorem 4.10: the term that falls with rounds, if `stationary_rates` hold."""
    progress = (1 - 1 / k.task) / (2 * (1 + k.lam)) * k.steps * k.rate * k.lr * k.rounds
    return k.gap / progress


def residue(k: Constants) -> dict[str, float]:
    """Theorem 4.10: Psi, term by term.

    >>> sum(residue(Constants(task=2)).values()) > 8  # of the trivial 4 B^2
    True
    """
    n, e, lr, smooth = k.task, k.steps, k.lr, k.smooth
    turn = k.rate * lr * smooth / (1 + k.lam)  # gamma_G gamma_L L / (1 + lambda)
    drift = (lr * e * smooth / k.lam) ** 2 + n + 3 * turn * k.left_out * e * n
    local = 5 * lr**2 * n * e * smooth**2 + 60 * turn * (lr * smooth * e) ** 2 * k.left_out * n
    return {name: 2 / (1 - 1 / n) * value for name, value in {
        "client drift": 12 * turn * k.left_out * e * n * k.client,
        "bounded gradients": drift * k.bound**2,
        "local steps": local * (k.noise + 6 * e * k.client),
        "noise": 1.5 * turn * k.noise / k.sample,
        "earlier tasks": k.past**2,
        "task drift": (n - 1) ** 2 * e / n * 3 * turn * (0.5 + 4 * k.left_out) * k.between,
    }.items()}  # fmt: skip


def stationary_rates(k: Constants) -> tuple[float, float, float]:
    """The largest local rate, server rate and their product for which Theorem 4.10 holds."""
    step = k.steps * k.smooth
    return 1 / (8 * step), 1 / (k.task - 1), (1 + k.lam) / (3 * step)


def stationary_at_most(k: Constants) -> float:
    """What the bounded gradients give without Theorem 4.10: K^2 B^2."""
    return (k.task * k.bound) ** 2


def told(k: Constants) -> list[str]:
    """All bounds in words."""
    local, server = rise_rates(k)
    small, global_, both = stationary_rates(k)
    psi = residue(k)
    whole = falling(k) + sum(psi.values())
    lines = [
        f"Travel of the task      at most {travel(k.lam, k.rounds):.4g} of its largest per-round "
        f"steps; {1 / k.lam:.4g} with any number of rounds",
        f"Lemma 4.9               distance from the anchor at most {cap(k):.4g}",
        f"Theorem 4.7             earlier tasks' loss rises by at most {rise(k):.4g}",
        f"                        {_rates(k, local, server)}",
        f"                        {_against(rise(k), rise_at_most(k), 'Lemma 4.9')}",
        f"Theorem 4.10            |grad f_1:{k.task}|^2 is somewhere at most {whole:.4g}: "
        f"{falling(k):.4g} that falls with rounds, and Psi",
        *(f"                          {name:20} {value:.4g}" for name, value in psi.items()),
        f"                        {_rates(k, small, global_, both)}",
        f"                        {_against(whole, stationary_at_most(k), 'bounded gradients')}",
    ]
    if sum(psi.values()) >= stationary_at_most(k):
        lines.append(
            "                        and more rounds do not change that: Psi alone is larger"
        )
    return lines


def _rates(k: Constants, local: float, server: float, both: float = float("inf")) -> str:
    held = k.lr <= local and k.rate <= server and k.lr * k.rate <= both
    product = "" if both == float("inf") else f", product up to {both:.3g}"
    return (
        f"{'holds' if held else 'DOES NOT HOLD'}: it asks for a local rate up to {local:.3g} (is "
        f"{k.lr:.3g}), a server rate up to {server:.3g} (is {k.rate:.3g}){product}"
    )


def _against(value: float, trivial: float, why: str) -> str:
    verdict = "says more than" if value < trivial else "VACUOUS: it says no more than"
    return f"{verdict} the {trivial:.4g} that follow from {why} alone"
