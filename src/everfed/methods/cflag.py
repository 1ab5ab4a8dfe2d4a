"""C-FLAG and FedTrack. On the Convergence of Continual Federated Learning Using Incrementally
Aggregated Gradients.

Two exchanges a round. (a) clients upload grad g_i(x) over their current data and grad f_i(x) over a
sample of their memory; (b) the server sends the means grad g and grad f, and clients step

    y <- y - beta (grad g - grad g_i + g')

g' the mean of a table of component gradients, one entry renewed a step (IAG), or the plain batch
gradient. FedTrack averages y. C-FLAG uploads (Eq. 25's form; a_i = sum of g', without beta)

    dx_i = alpha_i grad f + beta_i a_i + beta E (grad g - grad g_i),   x <- x - sum p_i dx_i
    a_i = (x - y_E) / beta - E (grad g - grad g_i),    Lambda_i = <grad f, a_i>
    adaptive, Lambda_i > 0:   alpha_i = alpha,  beta_i = (1 - L alpha) Lambda_i / (L p_i c |a_i|^2)
    adaptive, Lambda_i <= 0:  alpha_i = alpha - beta Lambda_i / |grad f|^2,  beta_i = beta

c = 1 (average case) or the cohort's size (worst). Guards: beta_i <= clip * beta (the rate of the
transference case can be a thousand times beta) and alpha_i <= 1/L; clip = inf is without guards.
The paper scales the last term of dx_i by beta_i, after which corrections no longer cancel:
`printed` does that.

Where steps are not plain SGD's (Adam, as in the paper's experiments), travel is no sum of
gradients: a_i is all of (x - y_E) / beta then, and the last term is part of it.

Recorded where there is a memory: Lambda = sum_i p_i Lambda_i, clients in transference and in
interference, the forgetting term of the step taken (Lemma 1; v its part along current data)

    Gamma = L/2 |v|^2 - (1 - L alpha) <grad f, v>,   v = sum_i p_i dx_i - alpha grad f,
    alpha = sum_i p_i alpha_i

and the sum of its clients' parts that the rates make small, with their rates and with constant ones

    sum_i p_i (L/2 p_i c beta_i^2 |a_i|^2 - beta_i (1 - L alpha_i) Lambda_i)

One exchange (not in the paper): see `Once`.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, where, zeros_like

from everfed import memory
from everfed.chance import rng
from everfed.errors import EverfedError
from everfed.local import Affine, Components, Local
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import dot, sq

#: of gradients: one entry a batch, one a sample, or none
Table = Components
#: what is recorded, and the state's names for it
METRICS = {
    "gamma": "gamma", "rates": "gamma_rates", "constant": "gamma_constant", "lambda": "lambda",
    "helps": "transference", "hurts": "interference",
}  # fmt: skip


@dataclass(frozen=True)
class Track(Part):
    """Local steps along the global gradient, corrected by the change of the own one."""

    reduces = {"g": "mean"}
    stage = -1  # a table's entries are plain gradients, and must be renewed by such
    iag: Table = True

    @property
    def components(self) -> Table:
        return self.iag

    def check_beside(self, parts: tuple[Part, ...], average: Average) -> None:
        terms = ("loss", "feature_loss", "weigh")
        if self.iag and any(part.has(hook) for part in parts for hook in terms):
            raise EverfedError("a part adds to the loss, and a table of gradients is of the plain "
                               "one: set iag = false")  # fmt: skip

    @property
    def stateful(self) -> bool:
        return False  # what the probe leaves behind lives until the round's end

    def probe(self, w: Tensor, c: Context) -> tuple[State, State]:
        g = c.gradient(w)
        return {"g": g}, {"g": g}

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        return update, {}, {"g": c.mine["g"][:, :0]}

    def shift(self, c: Context) -> Tensor:
        """grad g - grad g_i, (clients, d)."""
        return c.down["g"] - c.mine["g"]

    def first(self, c: Context) -> Tensor:
        """The first step's direction, with every entry at x: grad g, (clients, d)."""
        return c.down["g"].expand_as(c.mine["g"]).clone()

    def affine(self, c: Context) -> Affine | None:
        return None if self.iag else Affine(self.shift(c))

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        if c.step == 0:  # every entry at x: the table's mean is grad g_i
            c.scratch["table"] = self._table(c)
            c.scratch["direction"] = self.first(c)
            return g.copy_(c.scratch["direction"])
        for row, new in enumerate(g):
            j = c.picks[row][c.step]
            share = len(c.pieces[row][j]) / sum(map(len, c.pieces[row]))
            old = c.scratch["table"][row, j]
            c.scratch["direction"][row].add_(new - old, alpha=share)
            old.copy_(new)
        return g.copy_(c.scratch["direction"][: len(g)])

    def _table(self, c: Context) -> dict[tuple[int, int], Tensor]:
        """Those entries that will be renewed, by client and piece."""
        later = {(row, j) for row, picks in enumerate(c.picks) for j in picks[1:]}
        keys = sorted(later, key=lambda key: (-len(c.pieces[key[0]][key[1]]), key))
        found = c.gradient(c.start, [c.pieces[row][j] for row, j in keys]) if keys else ()
        return dict(zip(keys, found, strict=True))


@dataclass(frozen=True)
class Rates:
    """AdapLR: how far to step along the memory's gradient and along the own travel."""

    lipschitz: float
    adaptive: Literal["off", "average", "worst"]
    clip: float

    def check(self, who: str, alpha: float, otherwise: str = "") -> None:
        """Raise EverfedError where the rates would have no sense."""
        if self.adaptive != "off" and self.lipschitz * alpha >= 1:
            raise EverfedError(
                f"{who}'s adaptive rates need alpha < 1/lipschitz, but alpha = {alpha} (the "
                f"learning rate unless set) and lipschitz = {self.lipschitz}: lower one of "
                f"them{otherwise}"
            )

    def __call__(
        self, f: Tensor, a: Tensor, alpha: float, beta: float, p: Tensor, cohort: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(alpha_i, beta_i), each (clients, 1), for f (d,) and a (clients, d)."""
        agree, f2, a2 = dot(f, a), sq(f), sq(a)
        same = torch.ones_like(agree)
        if self.adaptive == "off":
            return alpha * same, beta * same
        many = cohort if self.adaptive == "worst" else torch.ones_like(cohort)
        room = self.lipschitz * p * many * a2
        faster = ((1 - self.lipschitz * alpha) * agree / room).clamp(max=self.clip * beta)
        firmer = (alpha - beta * agree / f2).clamp(max=max(alpha, self._alpha_limit))
        usable = (f2 > 1e-24) & (a2 > 1e-24)
        helps = agree > 0
        alpha_i = where(usable & ~helps, firmer, alpha * same)
        return alpha_i, where(usable & helps, faster, beta * same)

    def forgetting(
        self, f: Tensor, a: Tensor, alpha: Tensor, beta: Tensor, p: Tensor, cohort: Tensor
    ) -> Tensor:
        """Gamma_i of each client with its rates, (clients, 1)."""
        many = cohort if self.adaptive == "worst" else torch.ones_like(cohort)
        own = self.lipschitz / 2 * p * many * beta.square() * sq(a)
        return own - beta * (1 - self.lipschitz * alpha) * dot(f, a)

    @property
    def _alpha_limit(self) -> float:
        return 1 / self.lipschitz if math.isfinite(self.clip) else math.inf


def forgetting_of_step(
    dx: Tensor, along: Tensor, alpha: Tensor, f2: Tensor, lipschitz: float
) -> Tensor:
    """Gamma of the server's step x - dx, from <grad f, dx> and |grad f|^2."""
    v2 = sq(dx) - 2 * alpha * along + alpha.square() * f2
    return lipschitz / 2 * v2 - (1 - lipschitz * alpha) * (along - alpha * f2)


@dataclass(frozen=True)
class CFlag(Track):
    """Gradient tracking, a step along the memory's gradient, and rates against forgetting."""

    reduces = {
        "g": "mean", "f": "mean", "has": "mean", "alpha": "mean", "along": "mean", "f2": "mean",
        "lambda": "mean", "rates": "mean", "constant": "mean", "helps": "sum",
    }  # fmt: skip
    noisy = False
    remembers = ("ids",)
    alpha: PositiveFloat | None = None
    lipschitz: PositiveFloat = 5.0
    adaptive: Literal["off", "average", "worst"] = "average"
    clip: PositiveFloat = 1.0
    printed: bool = True
    memory: PositiveInt = 400
    draw: PositiveInt = 200

    def check(self, local: Local) -> None:
        rates = Rates(self.lipschitz, self.adaptive, self.clip)
        rates.check("C-FLAG", self.alpha or local.lr, " or set adaptive = 'off'")

    @property
    def stateful(self) -> bool:
        return True

    def client_init(self, w: Tensor) -> State:
        none = torch.zeros(0, dtype=torch.int64)
        return {"ids": none, "block": none}

    def probe(self, w: Tensor, c: Context) -> tuple[State, State]:
        up, mine = super().probe(w, c)
        return up | self.remembered(w, self.drawn(c.mine["ids"], c.round, c), c), mine

    def drawn(self, ids: Tensor, round_: int, c: Context) -> np.ndarray:
        """The samples of a memory that a round's gradient is over."""
        random = rng(c.seed, "memory draw", round_, c.client)
        return memory.uniform(ids.numpy(), self.draw, random)

    def remembered(self, w: Tensor, ids: np.ndarray, c: Context) -> State:
        """grad f_i over samples of the memory, and whether there are any."""
        f = c.gradient(w, ids) if len(ids) else zeros_like(w)
        return {"f": f, "has": w.new_full(w.shape[:-1], float(len(ids) > 0))}

    def answer(self, s: State, r: Reduced) -> State:
        if not r["has"]:
            return {"g": r["g"]}
        # the mean over those that have a memory
        total, cohort = torch.tensor(r.weight), torch.tensor(float(r.n))
        return {"g": r["g"], "f": r["f"] / r["has"], "total": total, "cohort": cohort}

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        _, _, mine = super().finish(update, w, c)
        if "f" not in c.down:
            return update, {}, mine
        return *self.step(c.down["f"], w, c), mine

    def travel(self, w: Tensor, c: Context) -> tuple[Tensor, Tensor]:
        """a_i, and the rest of the way to w."""
        drift = c.steps * c.lr * self.shift(c) if c.local.plain else zeros_like(w)
        return (c.start - w - drift) / c.lr, drift

    def step(self, f: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State]:
        """The update of a client that has reached w, f the memory's gradient; what is recorded."""
        beta, alpha = c.lr, self.alpha or c.lr
        a, drift = self.travel(w, c)
        rates = Rates(self.lipschitz, self.adaptive, self.clip)
        p = (c.weight / c.down["total"].to(w)).clamp(max=1)
        cohort, same = c.down["cohort"].to(w), torch.ones_like(p)
        alpha_i, beta_i = rates(f, a, alpha, beta, p, cohort)
        dx = alpha_i * f + beta_i * a + (beta_i / beta if self.printed else 1) * drift
        about = {
            "alpha": alpha_i,
            "along": dot(f, dx),
            "f2": sq(f) * same,
            "lambda": dot(f, a),
            "rates": rates.forgetting(f, a, alpha_i, beta_i, p, cohort),
            "constant": rates.forgetting(f, a, alpha * same, beta * same, p, cohort),
            "helps": (dot(f, a) > 0).to(w),
        }
        return -dx, about

    def close(self, w: Tensor, c: Context) -> tuple[State, State]:
        random = rng(c.seed, "memory", c.task, c.client)
        kept = memory.class_balanced(c.ids, c.labels(c.ids), self.memory, random)
        ids = np.concatenate([c.mine["ids"].numpy(), kept])
        block = np.concatenate([c.mine["block"].numpy(), np.full(len(kept), c.block)])
        if len(ids) > c.fits(len(ids)):  # as evenly over the tasks and their classes as it goes
            order, labels = random.permutation(len(ids)), c.labels(ids)
            groups = (block * (labels.max() + 1) + labels)[order]
            at = np.sort(order[memory.ring(groups, c.fits(len(ids)))])
            ids, block = ids[at], block[at]
        return {}, {"ids": torch.from_numpy(ids), "block": torch.from_numpy(block)}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        if "rates" not in r.values:  # no memory yet
            return update, {}
        along, f2 = self.beside_memory(update, r)
        gamma = forgetting_of_step(-update, along, r["alpha"], f2, self.lipschitz)
        known = {key: r[key] for key in ("lambda", "rates", "constant", "helps")}
        return update, known | {"gamma": gamma, "hurts": r.n - r["helps"]}

    def beside_memory(self, update: Tensor, r: Reduced) -> tuple[Tensor, Tensor]:
        """<grad f, dx> and |grad f|^2; grad f is at the clients, who sent these."""
        return r["along"], r["f2"]

    def metrics(self, s: State) -> dict[str, float]:
        return {name: float(s[key]) for key, name in METRICS.items()} if "gamma" in s else {}


@dataclass(frozen=True)
class Once(CFlag):
    """C-FLAG in one exchange: gradients of a round come with its update, and serve the next round.

    With its update client i uploads g_i', the mean of the g' that its steps took (so nothing is
    computed for it), and f_i', its memory's gradient at the model it began with. The server sends
    the means g', f' with the next model x. Each is corrected by the client's own change since:

        g' - g_i'  in the place of  grad g - grad g_i
        f' - f_i' + grad f_i(x)  in the place of  grad f

    Over a cohort that stays the same the first sum to 0, and the mean of the second is grad f(x).
    In a task's first round the first is 0; the new memory's gradient comes with the task's end. A
    client that is not among the means is not corrected. Where steps are not plain SGD's, g_i' is
    the gradient at the model that the client began with.
    """

    probe = Part.probe
    answer = Part.answer

    def client_init(self, w: Tensor) -> State:
        none = torch.tensor(-1, device=w.device)
        return super().client_init(w) | {"g": zeros_like(w), "f": zeros_like(w), "at": none}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, {key: s[key] for key in ("g", "f", "total", "cohort", "at") if key in s}

    def change(self, key: str, new: Tensor, c: Context) -> Tensor:
        """From the client's own gradient to `new`; 0 where it is not among those whose means were
        sent."""
        own = c.mine[key]
        if "at" not in c.down:
            return zeros_like(own)
        return where((c.mine["at"] == c.down["at"]).unsqueeze(-1), new - own, 0)

    def shift(self, c: Context) -> Tensor:
        return self.change("g", c.down["g"], c) if "g" in c.down else zeros_like(c.mine["g"])

    def first(self, c: Context) -> Tensor:
        return self.shift(c) + c.gradient(c.start)

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        drawn, about = [self.drawn(own.mine["ids"], c.round, own) for own in c.each()], State()
        g = self.travel(w, c)[0] / c.steps if c.local.plain else c.gradient(c.start)
        f = c.gradient(c.start, drawn)
        if "f" in c.down:
            update, about = self.step(c.down["f"] + self.change("f", f, c), w, c)
        has = torch.tensor([float(len(ids) > 0) for ids in drawn]).to(w)
        at = torch.full_like(c.mine["at"], c.round)
        return update, about | {"g": g, "f": f, "has": has}, {"g": g, "f": f, "at": at}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        return update, super().fold(s, update, r)[1] | {"g": r["g"]} | _memory_of(r, r.round)

    def beside_memory(self, update: Tensor, r: Reduced) -> tuple[Tensor, Tensor]:
        f = r["f"] / r["has"]  # at x; clients have stepped along estimates of it
        return dot(f, -update), sq(f)

    def close(self, w: Tensor, c: Context) -> tuple[State, State]:
        _, mine = super().close(w, c)
        up = self.remembered(w, self.drawn(mine["ids"], c.round + 1, c), c)
        at = torch.full_like(c.mine["at"], _closing(c.round))
        return up, mine | {"f": up["f"], "at": at}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        if not r.n:
            return {}
        kept = _memory_of(r, _closing(r.round))
        if "cohort" in s:  # all clients close a task, of whom as few as before will train
            kept["total"] = kept["total"] * s["cohort"] / kept["cohort"]
            kept["cohort"] = s["cohort"]
        return kept


def _closing(round_: int) -> int:
    """The time of a task's end after that round, which is not the round's own: a client may have
    trained and not closed."""
    return -2 - round_


def _memory_of(r: Reduced, at: int) -> State:
    """What the server keeps of the cohort's memories until the next round."""
    kept = {"at": torch.tensor(at), "total": torch.tensor(r.weight)}
    kept["cohort"] = torch.tensor(float(r.n))
    return kept | ({"f": r["f"] / r["has"]} if r["has"] else {})


@register("On the Convergence of Continual Federated Learning (FedLin with IAG)")
def fedtrack(iag: Table = True, average: Average = "samples") -> Method:
    """Gradient tracking: local steps along the global gradient, in two exchanges.

    Args:
        iag: true: a table of the batches' gradients, of which each step renews one; "samples": of
            the samples'; false: the gradient of the step's batch.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Track(iag), average=average, name="fedtrack")


@register("On the Convergence of Continual Federated Learning")
def cflag(
    alpha: PositiveFloat | None = None,
    lipschitz: PositiveFloat = 5.0,
    adaptive: Literal["off", "average", "worst"] = "average",
    clip: PositiveFloat = 1.0,
    printed: bool = True,
    iag: Table = True,
    memory: PositiveInt = 400,
    draw: PositiveInt = 200,
    exchanges: Literal[1, 2] = 2,
    average: Average = "samples",
) -> Method:
    """Replay memory with incremental aggregated gradients and adaptive rates.

    Args:
        alpha: the step along the memory's gradient; left out: the learning rate.
        lipschitz: the paper's L; adaptive rates need alpha < 1/lipschitz.
        adaptive: rates of the "average" case, of the "worst" case, or "off".
        clip: the largest adaptive rate, in learning rates; inf takes the guards away.
        printed: scale the drift correction by the adaptive rate, as the paper prints it.
        iag: true: a table of the batches' gradients, of which each step renews one; "samples": of
            the samples'; false: the gradient of the step's batch.
        memory: samples that a client keeps of each task.
        draw: samples of the memory for its gradient in a round.
        exchanges: 2 as in the paper; 1: gradients come with the update of the round before.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    kind = CFlag if exchanges == 2 else Once
    part = kind(iag, alpha, lipschitz, adaptive, clip, printed, memory, draw)
    return Method(part, average=average, name="cflag")
