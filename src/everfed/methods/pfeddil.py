"""pFedDIL. Li et al., Personalized Federated Domain-Incremental Learning based on Adaptive
Knowledge Matching, 2024. Reconstructed: the paper's text was not at hand.

The federation keeps a bank of models w_j, each with a head h_j on its features that says how much
an input is of the kind the model was trained on. When a task begins, a client matches its data,

    s_j = mean_x sigmoid h_j(x)

and goes on with the best model where s_j >= threshold, else with the task's new one, which begins
at the server's newest model. It descends, with s~ = s / sum s over the bank of before the task,

    CE + kappa sum_j s~_j |w - w_j|^2

and then fits the head to tell its inputs from spoiled copies (ours: pixels shuffled, or noise
added; features are not changed by it). The server averages each model over the clients that trained
it. Tests mix the models' probabilities, weighed by softmax_j h_j(x).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, where
from torch.nn import functional as F

from everfed.chance import rng
from everfed.compute.base import Seen
from everfed.errors import EverfedError
from everfed.generators import spoiled
from everfed.local import Affine
from everfed.method import Average, Context, Method, Part, Reduced, State
from everfed.methods.registry import register
from everfed.vector import Layout

Share = Annotated[float, Field(ge=0, le=1)]


def belongs(head: Tensor, features: Tensor) -> Tensor:
    """h(x): a head (width + 1,) on features (n, width) -> (n,)."""
    return features @ head[:-1] + head[-1]


def features(w: Tensor, x: Tensor, c: Context) -> Tensor:
    """What the last layer of the model w is fed with, (n, width)."""
    pieces = (c.forward(w, some, train=False).features for some in torch.split(x, 512))
    return torch.cat([*pieces])


def matched(scores: Tensor, threshold: float) -> int | None:
    """The model to go on with; None: a new one."""
    if not len(scores) or scores.max() < threshold:
        return None
    return int(scores.argmax())


@dataclass(frozen=True)
class Bank(Part):
    """Several models, of which a client trains the one that fits its data."""

    reduces = {"slot": "mean", "head": "mean"}  # by model, in `aggregate`
    noisy = False  # which model a client trained must be known
    threshold: Share = 0.8
    kappa: NonNegativeFloat = 0.01
    steps: PositiveInt = 50

    @property
    def batched(self) -> bool:
        return False

    def check_beside(self, parts: tuple[Part, ...], average: Average) -> None:
        hooks = ("aggregate", "fold", "probe", "close")
        for part in parts:
            # privacy says itself what it goes with
            if part is not self and not part.has("seal") and any(map(part.has, hooks)):
                raise EverfedError(
                    f"pfeddil's server has several models, and {type(part).__name__} knows of one: "
                    "beside it only what changes the clients' training"
                )

    def init(self, w: Tensor, layout: Layout) -> State:
        return {"bank": w.new_zeros(0, len(w)), "heads": w.new_zeros(0, 0), "open": w.new_zeros(1)}

    def client_init(self, w: Tensor) -> State:
        return {"task": w.new_full((1,), -1), "slot": w.new_zeros(1), "scores": w.new_zeros(0)}

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        return w, s

    def begin(self, c: Context) -> Tensor:
        slot, bank = int(self.choice(c)["slot"]), c.down["bank"]
        return (bank[slot] if slot < len(bank) else c.start).unsqueeze(0)

    def choice(self, c: Context) -> State:
        """The client's state in this task: which model it trains, and how all before it match."""
        if "own" not in c.scratch:
            c.scratch["own"] = {key: value[0] for key, value in c.mine.items()}
            if int(c.scratch["own"]["task"]) != c.task:
                x, count = c.samples(c.ids)[0], int(c.down["open"])
                models = zip(c.down["bank"][:count], c.down["heads"][:count], strict=True)
                found = [belongs(h, features(v, x, c)).sigmoid().mean() for v, h in models]
                scores = torch.stack(found) if found else x.new_zeros(0)
                slot = matched(scores, self.threshold)
                new = {"task": c.task, "slot": count if slot is None else slot}
                state = {key: scores.new_tensor([value]) for key, value in new.items()}
                c.scratch["own"] = state | {"scores": scores}
        own: State = c.scratch["own"]
        return own

    def affine(self, c: Context) -> Affine | None:
        scores = self.choice(c)["scores"]
        if not len(scores):
            return None
        near = (scores / scores.sum()) @ c.down["bank"][: len(scores)]
        return Affine(-2 * self.kappa * near, pull=2 * self.kappa)

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        own = self.choice(c)
        head = self.fit(w[0].clone(), int(own["slot"]), c)
        state = {key: value.unsqueeze(0) for key, value in own.items()}
        # a row of all models, of a length that the server knows, and not a number without bounds
        slot = F.one_hot(state["slot"][:, 0].long(), len(c.down["bank"]) + 1).to(w)
        return update, {"slot": slot, "head": head.unsqueeze(0)}, state

    @torch.enable_grad()
    def fit(self, w: Tensor, slot: int, c: Context) -> Tensor:
        """The head that tells the client's inputs from spoiled ones, on fixed features."""
        x = c.samples(c.ids)[0]
        if not x.is_floating_point():
            raise EverfedError("pfeddil spoils inputs, so they must be floats, not tokens or rows")
        others = spoiled(x, rng(c.seed, "spoiled", c.round, c.client))
        with torch.no_grad():
            real, bad = (features(w, some, c) for some in (x, others))
        known = slot < len(c.down["heads"])
        first = c.down["heads"][slot].clone() if known else real.new_zeros(real.shape[1] + 1)
        head = first.requires_grad_()
        descent = torch.optim.Adam([head], lr=0.05)
        for _ in range(self.steps):
            # log(1 + exp(-h)) on real inputs, log(1 + exp(h)) on the others
            loss = F.softplus(-belongs(head, real)).mean() + F.softplus(belongs(head, bad)).mean()
            descent.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
        return head.detach()

    def aggregate(self, uploads: State, weights: Tensor, means: frozenset[str]) -> State:
        """All means and sums, and means of each model over the clients that trained it."""
        share = weights / weights.sum()
        out = {
            k: torch.tensordot(share, v, 1) if k in means else v.sum(0) for k, v in uploads.items()
        }
        (i,) = (key.partition(".")[0] for key in uploads if key.endswith(".slot"))
        trained = uploads[f"{i}.slot"].T * weights  # (models, clients)
        share = trained / trained.sum(1, keepdim=True).clamp(min=1e-12)
        each = {"mass": trained.sum(1), "updates": share @ uploads["update"]}
        each["heads"] = share @ uploads[f"{i}.head"]
        return out | {f"{i}.{key}": value for key, value in each.items()}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        bank, mass, updates = s["bank"], r["mass"], r["updates"]
        if len(mass) <= len(bank):  # late replies alone, from before the bank grew
            grown = len(bank) + 1 - len(mass)
            mass, updates = F.pad(mass, (0, grown)), F.pad(updates, (0, 0, 0, grown))
        heads = s["heads"] if len(bank) else s["heads"].new_zeros(0, r["heads"].shape[1])
        if mass[-1] > 0:  # the task's new model, which began at the server's
            bank = torch.cat([bank, r.w.unsqueeze(0)])
            heads = torch.cat([heads, r["heads"][-1:]])
        count = len(bank)
        bank = bank + updates[:count]
        fitted = F.pad(r["heads"], (0, 0, 0, max(0, count - len(r["heads"]))))[:count]
        heads = where((mass[:count] > 0).unsqueeze(1), fitted, heads)
        newest = int(mass.argmax())
        return bank[newest] - r.w, s | {"bank": bank, "heads": heads}

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        return s | {"open": s["open"].new_tensor([len(s["bank"])])}

    def predict(self, s: State, seen: Seen, forward: Callable[[Tensor], Seen]) -> Tensor:
        if not len(s["bank"]):
            return seen.z
        all_seen = [forward(w) for w in s["bank"]]
        pairs = zip(s["heads"], all_seen, strict=True)
        weights = torch.stack([belongs(h, own.features) for h, own in pairs]).log_softmax(0)
        mixed = torch.stack([own.z.log_softmax(-1) for own in all_seen]) + weights.unsqueeze(-1)
        return mixed.logsumexp(0)

    def metrics(self, s: State) -> dict[str, float]:
        return {"models": float(len(s["bank"]))}


@register("Li et al. 2024")
def pfeddil(
    threshold: Share = 0.8,
    kappa: NonNegativeFloat = 0.01,
    steps: PositiveInt = 50,
    average: Average = "samples",
) -> Method:
    """A bank of models: clients train the one that fits their data, or a new one (reconstructed).

    Args:
        threshold: how well a model must match a client's data, from 0 to 1, to be gone on with.
        kappa: weight of the pull to the models of earlier tasks.
        steps: of the heads that match, in a round.
        average: "samples" weighs clients by their samples, "uniform" counts them alike.
    """
    return Method(Bank(threshold, kappa, steps), average=average, name="pfeddil")
