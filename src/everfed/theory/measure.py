"""The drift of a stream, measured by its clients' gradients at one model that stands still.

Client i's gradient in round t, over all samples it then holds, at a fixed w is taken as

    g_ti = g + c_t + delta_i + xi_ti + nu_ti

    delta  the client's own for good                    client drift, G^2 = E|delta|^2
    xi     the client's own in this round               time drift, D^2 = E|xi|^2, and
                                                        E<xi_si, xi_ti> = alpha^|s-t| D^2
    c      common to all clients in this round          common drift, C^2 = E|c|^2
    nu     of its samples being finitely many           chance, N^2 = E|nu|^2

N^2 is estimated by cutting a client's samples of a round into two random halves with n1 + n2 = n
samples and gradients a and b: E|a - b|^2 n1 n2 / n^2 = N^2. Rounds with the same data set share nu:
with the share o_l of rounds whose data set a client still holds l rounds later, products of
gradients less the mean over clients, in rounds that lie l apart, are

    (1 - 1/N) (G^2 + D^2 alpha^l + N^2 o_l),

and G^2, D^2 and alpha are what comes nearest to these for all l up to half of the rounds
(`drift.fitted`). C^2 is the mean product of two different clients' gradients in one round, each
less its own mean over rounds. The papers' D^2 is of the data sets as they are: D^2 + N^2 where
every round brings new samples. Standard errors leave out one client after another (jackknife), so
they say nothing of rounds that were too few: G^2, D^2 and alpha are three unknowns, and while a
client's data change fewer than `ENOUGH` times what stays cannot be told from what passes slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray
from torch import nn

from everfed.chance import rng
from everfed.client import Ask, ClientProgram, Phase
from everfed.compute.base import LossFunction, cross_entropy
from everfed.errors import EverfedError
from everfed.local import Local
from everfed.methods import fedavg
from everfed.runs import prepare, surroundings
from everfed.streams.sites import Sites
from everfed.streams.stream import Stream
from everfed.theory.drift import Drift, fitted, products
from everfed.vector import folded

#: changes of a client's data that tell G^2, D^2 and alpha apart
ENOUGH = 3


@dataclass(frozen=True)
class Measured:
    """What was found, as squared lengths of gradients."""

    drift: Drift  #: G^2, D^2, alpha
    error: Drift  #: their standard errors
    common: float  #: C^2
    chance: float  #: N^2
    length: float  #: squared length of the mean gradient over all clients and rounds
    clients: int  #: that were looked at
    rounds: int  #: that were looked at
    changes: int  #: of a client's data in these rounds, median


def measure(
    stream: Stream,
    model: nn.Module | Callable[[], nn.Module],
    *,
    clients: int = 10,
    rounds: int = 50,
    seed: int = 0,
    loss: LossFunction = cross_entropy,
) -> Measured:
    """Measure a stream's drift at the model's first weights, by the first rounds of some of its
    clients (whether they are online or not).

    Args:
        stream: who holds which samples in which round.
        model: a module, or what builds one (then its weights are drawn from the seed).
        clients: how many to look at, at the most.
        rounds: how many to look at, at the most.
        seed: of the stream, the weights and the halves.
        loss: one loss a sample.
    """
    stream = stream.seeded(seed)
    if isinstance(stream, Sites):
        raise EverfedError("the samples of this stream live at the sites: nothing to measure here")
    count = min(rounds, stream.rounds)
    able = (i for i in range(stream.clients) if _holds(stream, i, count))
    chosen = list(islice(able, clients))
    if count < 3 or len(chosen) < 3:
        raise EverfedError(
            f"drift shows in at least 3 rounds of 3 clients that hold samples in all of them, and "
            f"there are {count} rounds of {len(chosen)} such clients"
        )
    with surroundings():
        program = prepare(fedavg(), stream, model, Local(), seed, loss)
        found = [[_gradient(program, i, t) for i in chosen] for t in range(count)]
    g = np.array([[own[0] for own in row] for row in found], dtype=np.float64)
    noise = np.array([[own[1] for own in row] for row in found]).mean(0)
    lags = count // 2 + 1
    kept = np.array([_kept(stream, i, count, lags) for i in chosen])

    def solve(which: list[int]) -> Drift:
        shared = (noise[which, None] * kept[which]).mean(0)
        return fitted(products(g[:, which], lags) - shared, count)

    everyone = list(range(len(chosen)))
    parts = [solve([j for j in everyone if j != i]) for i in everyone]
    moved = g - g.mean(0)
    pairs = (moved.sum(1) ** 2).sum() - (moved**2).sum()
    size = len(chosen)
    common = float(pairs / ((count - 1) * size * (size - 1)))
    return Measured(
        solve(everyone),
        _jackknife(parts),
        common=max(common, 0.0),
        chance=float(noise.mean()),
        length=float((g.mean((0, 1)) ** 2).sum()),
        clients=size,
        rounds=count,
        changes=int(np.median([_changes(stream, i, count) for i in chosen])),
    )


def _holds(stream: Stream, client: int, rounds: int) -> bool:
    """Whether a client has samples, for two halves, in every round."""
    return all(len(stream.samples(client, t)) > 1 for t in range(rounds))


def _kept(stream: Stream, client: int, rounds: int, lags: int) -> list[float]:
    """The share of rounds whose data set a client still holds 0, 1, 2, ... rounds later."""
    held = np.array([stream.block(client, t) for t in range(rounds)])
    return [float((held[: rounds - lag] == held[lag:]).mean()) for lag in range(lags)]


def _changes(stream: Stream, client: int, rounds: int) -> int:
    """How often a client's data set is another one."""
    held = [stream.block(client, t) for t in range(rounds)]
    return sum(a != b for a, b in pairwise(held))


def _gradient(
    program: ClientProgram, client: int, round_: int
) -> tuple[NDArray[np.float32], float]:
    """A client's gradient in a round, folded if it is long, and the variance that chance gives."""
    w = program.compute.weights()
    job = program.job(client, round_, None, w)
    task = program.stream.task(round_)
    ask = Ask("probe", round_, task, 0.0, w, program.compute.read_buffers(), [{}])
    phase = Phase(program, ask, [job], alone=True)
    ids = rng(program.seed, "halves", round_, client).permutation(job.ids)
    n, half = len(ids), len(ids) // 2
    a, b = (phase.gradient(w, own, train=False).double() for own in (ids[:half], ids[half:]))
    share = half / n
    noise = float((a - b).square().sum()) * share * (1 - share)
    return folded(a * share + b * (1 - share)).float().cpu().numpy(), noise


def _jackknife(parts: list[Drift]) -> Drift:
    rows = np.array([(part.client, part.time, part.alpha) for part in parts])
    error = np.sqrt((len(rows) - 1) * rows.var(0))
    return Drift(*map(float, error))
