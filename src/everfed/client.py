"""The client program: what one client, or a group of them, does with what the server asks.

The same code runs in every worker of every engine. Three exchanges: `probe` (before training),
`train`, and `close` (at the end of a task).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from everfed import curvature
from everfed.chance import rng, torch_seed
from everfed.compute import Compute, Objective
from everfed.compute.base import LossFunction, Seen, cross_entropy
from everfed.data.table import Beside, Data
from everfed.errors import EverfedError
from everfed.local import Affine, Local, Optimiser, Plan, batches
from everfed.memory import held_bytes
from everfed.method import Context, Method, State
from everfed.reduce import Uploads
from everfed.streams.stream import Stream
from everfed.vector import Layout

Exchange = Literal["probe", "train", "close"]
#: (gradients, models), (clients, d) each -> the changed gradients
Change = Callable[[Tensor, Tensor], Tensor]
#: floats of input that are gathered at once
GATHER = 2**24
#: and of one group's models and gradients of pieces
ROOM = 2**25
#: samples of one slice when a gradient over all of a client's data is taken: at most, and of which
#: it is a multiple, because a library of convolutions gets ready for every new shape
SLICE, UNIT = 512, 16
#: and floats of its inputs at most, which counts for large images
SLICE_FLOATS = 2**21
#: a client trains on its own rows of a table alone where they are at most one in so many
FEW = 4


@dataclass(frozen=True)
class Ask:
    """What the server sends to every client of a cohort."""

    exchange: Exchange
    round: int
    task: int
    lr: float
    start: Tensor  #: the model, (d,)
    buffers: Tensor  #: running statistics, (b,)
    down: list[State]  #: extras, part by part


@dataclass(frozen=True)
class Job:
    """One client's turn: who it is, what it holds, what it remembers (part by part)."""

    client: int
    ids: np.ndarray
    mine: list[State]
    #: what it trains on: its samples and what is replayed
    trains_on: np.ndarray


@dataclass(frozen=True)
class Reply:
    """What a group of clients sends back, rows in the order of `jobs`."""

    jobs: list[Job]
    uploads: Uploads
    weights: Tensor
    mine: list[list[State]]  #: client by client, part by part
    loss: Tensor  #: mean training loss of each client


class Rows(Mapping[str, Tensor]):
    """Client states of a group, stacked when they are read: key -> (clients, ...)."""

    def __init__(self, states: list[State], rows: int) -> None:
        self.states, self.rows = states, rows
        self._stacked: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._stacked:
            self._stacked[key] = torch.stack([state[key] for state in self.states])
        return self._stacked[key][: self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.states[0])

    def __len__(self) -> int:
        return len(self.states[0])


@dataclass
class Phase(Context):
    """The context of one group in one exchange; see `everfed.method.Context`."""

    program: ClientProgram
    ask: Ask
    jobs: list[Job]
    #: a hook called client by client sees its state as it is, not as a row of a group's
    alone: bool = False
    scratches: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    pieces: list[list[np.ndarray]] = field(default_factory=list)
    picks: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        p, rows = self.program, len(self.jobs)
        self.local: Local = p.local
        self.layout: Layout = p.compute.layout
        self.seed: int = p.seed
        self.start, self.lr = self.ask.start, self.ask.lr
        self.round, self.task = self.ask.round, self.ask.task
        self.inputs = p.data.inputs
        self.known, self.seen = p.stream.known(self.task), p.stream.known(self.task + 1)
        self.n_all = torch.tensor([[float(len(job.ids))] for job in self.jobs]).to(self.start)
        self.weight_all = torch.ones_like(self.n_all) if p.uniform else self.n_all
        self.steps_all = torch.zeros_like(self.n_all)
        self.ends_all = torch.zeros(0, rows, dtype=torch.bool)
        self.batch = (self.n_all[:0],) * 3
        self.scratches = [{} for _ in p.method.parts]
        parts = range(len(p.method.parts))
        self.groups = [Rows([job.mine[i] for job in self.jobs], rows) for i in parts]
        self.first(rows)

    def first(self, rows: int) -> None:
        """Narrow to the first clients of the group, those that still train."""
        self.rows = rows
        self.n, self.weight = self.n_all[:rows], self.weight_all[:rows]
        self.steps = self.steps_all[:rows]
        for group in self.groups:
            group.rows = rows

    def enter(self, part: int) -> Phase:
        """The view of one part."""
        self.part = part
        self.down = self.ask.down[part]
        self.mine = self.jobs[0].mine[part] if self.alone else self.groups[part]
        self.scratch = self.scratches[part]
        return self

    @property
    def epoch_ends(self) -> Tensor:  # type: ignore[override]
        return self.ends_all[self.step, : self.rows].unsqueeze(1).to(self.start.device)

    @property
    def clients(self) -> list[int]:  # type: ignore[override]
        return [job.client for job in self.jobs]

    # client by client ------------------------------------------------------------------------
    @property
    def client(self) -> int:  # type: ignore[override]
        return self._single().client

    @property
    def ids(self) -> np.ndarray:  # type: ignore[override]
        return self._single().ids

    @property
    def block(self) -> int:  # type: ignore[override]
        if not self.program.announced:  # what is known of data sets is what was found
            return self.task
        return self.program.stream.block(self.client, self.round)

    def each(self) -> list[Context]:
        alone = self._alone[: self.rows]
        for phase in alone:
            phase.step = self.step
        return [phase.enter(self.part) for phase in alone]

    @cached_property
    def _alone(self) -> list[Phase]:
        return [Phase(self.program, self.ask, [job], alone=True) for job in self.jobs]

    def _single(self) -> Job:
        assert len(self.jobs) == 1, "only hooks called client by client may read this"
        return self.jobs[0]

    # computing -------------------------------------------------------------------------------
    def gradient(
        self,
        w: Tensor,
        ids: np.ndarray | list[np.ndarray] | None = None,
        loss: LossFunction | None = None,
        targets: list[Tensor] | None = None,
        train: bool = True,
    ) -> Tensor:
        def grad(w: Tensor, x: Tensor, y: Tensor, scale: Tensor, objective: Objective) -> Tensor:
            return self.program.compute.grad(w, x, y, scale, objective, train)[0]

        objective = Objective(loss) if loss else None
        if not isinstance(ids, list):
            return self._over(w, ids, grad, objective)
        order = sorted((k for k, own in enumerate(ids) if len(own)), key=lambda k: -len(ids[k]))
        if order == [*range(len(ids))]:
            return self._over(w, ids, grad, objective, targets)
        out = w.new_zeros(len(ids), self.layout.d)
        if order:
            held, rows = [ids[k] for k in order], w.reshape(-1, self.layout.d).expand_as(out)
            wanted = targets and [targets[k] for k in order]
            out[order] = self._over(rows[order], held, grad, objective, wanted)
        return out

    def fisher(self, w: Tensor, since: int = 0) -> tuple[Tensor, Tensor]:
        squares, means = self._over(w, None, partial(self.program.compute.fisher, since=since))
        return squares, means

    def _over(
        self,
        w: Tensor,
        ids: np.ndarray | list[np.ndarray] | None,
        what: Callable[..., Tensor],
        objective: Objective | None = None,
        targets: list[Tensor] | None = None,
    ) -> Tensor:
        """The mean over each client's samples of what `compute` gives, (..., clients, d); who has
        most samples first, so that a slice of them takes a prefix."""
        held = [job.trains_on for job in self.jobs] if ids is None else ids
        held = held if isinstance(held, list) else [held]
        rows, width = w.reshape(-1, self.layout.d).expand(len(held), -1), self.program.compute.width
        objective = objective or self.program.objective(self.task)
        with self.program.compute.kept_buffers():  # a measurement leaves running statistics alone
            groups = [
                self._mean(
                    rows[k : k + width],
                    held[k : k + width],
                    what,
                    objective,
                    targets and targets[k : k + width],
                )
                for k in range(0, len(held), width)
            ]
        found = groups[0] if len(groups) == 1 else torch.cat(groups, -2)
        return found[..., 0, :] if self.alone and not isinstance(ids, list) else found

    def _mean(
        self,
        w: Tensor,
        held: list[np.ndarray],
        what: Callable[..., Tensor],
        objective: Objective,
        targets: list[Tensor] | None,
    ) -> Tensor:
        total = torch.empty(0)
        sizes = [len(own) for own in held]
        for begin, end in self.program.slices(sizes):
            active = sum(size > begin for size in sizes)
            # who has fewer samples repeats them, with weight 0
            at = [np.resize(np.arange(begin, min(end, n)), end - begin) for n in sizes[:active]]
            ids = np.stack([own[rows] for own, rows in zip(held, at, strict=False)])
            x, y = self.program.table.take(torch.from_numpy(ids), w.dtype)
            if targets:
                y = torch.stack([own[rows] for own, rows in zip(targets, at, strict=False)])
            counts = torch.tensor(sizes[:active]).unsqueeze(1)
            each = ((torch.arange(begin, end) < counts) / counts).to(w)
            own_part = what(w[:active], x, y, each, objective)
            if begin == 0:
                total = own_part.clone()  # what `compute` gives is lent
            else:
                total[..., :active, :] += own_part
        return total

    def norms(self, w: Tensor, ids: np.ndarray) -> Tensor:
        p = self.program
        x, y = p.data.take(torch.from_numpy(ids), w.dtype)
        return curvature.sample_norms(p.compute, w, x, y, p.objective(self.task))

    def hutchinson(self, w: Tensor, probes: int, since: int = 0) -> Tensor:
        p = self.program
        out = torch.zeros(len(self.jobs), self.layout.d, device=w.device, dtype=w.dtype)
        for row, (job, vector) in enumerate(zip(self.jobs, w, strict=True)):
            random = rng(self.seed, "hutchinson", self.round, job.client)
            signs = torch.from_numpy(random.integers(0, 2, (probes, self.layout.d)) * 2 - 1).to(w)
            signs[:, :since] = 0
            for begin, end in p.slices([len(job.trains_on)]):
                ids = torch.from_numpy(job.trains_on[begin:end])
                own = (*p.table.take(ids, w.dtype), p.objective(self.task), signs)
                share = len(ids) / len(job.trains_on)
                out[row] += share * curvature.hutchinson(p.compute, vector.clone(), *own)
        return out

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        if w.dim() == 2:
            return torch.stack(
                [self.program.compute.logits(*row) for row in zip(w, x, strict=True)]
            )
        z = self.program.compute.logits(w, x.flatten(0, 1))
        return z.view(*x.shape[:2], *z.shape[1:])

    def forward(self, w: Tensor, x: Tensor, train: bool, buffers: Tensor | None = None) -> Seen:
        return self.program.compute.forward(w, x, train, buffers)

    def outputs(self, w: Tensor, ids: np.ndarray) -> Tensor:
        x, _ = self.program.data.take(torch.from_numpy(ids), w.dtype)
        return self.program.compute.logits(w, x)

    def features(self, w: Tensor, ids: np.ndarray) -> Tensor:
        x, _ = self.program.data.take(torch.from_numpy(ids), w.dtype)
        return self.program.compute.features(w, x)

    def samples(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.program.data.take(torch.from_numpy(ids), self.start.dtype)

    def losses(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p = self.program
        p.compute.module.eval()
        return curvature.losses(p.compute, w, x, y, p.objective(self.task))

    def fits(self, size: int) -> int:
        most, sample = self.local.memory_bytes, self.program.stream.data.sample_bytes
        if most is None:
            return size
        memories = sum(bool(part.remembers) for part in self.program.method.parts)
        room = most // max(1, memories) // sample
        if not room:
            raise EverfedError(
                f"local.memory_bytes = {most} has no room for a sample of {sample} bytes in each "
                f"of the method's memories ({memories}): raise it"
            )
        return min(size, room)

    def labels(self, ids: np.ndarray) -> np.ndarray:
        y = self.program.data.y
        if y.is_floating_point() or y.dim() > 1:
            return np.zeros(len(ids), dtype=np.int64)
        out: np.ndarray = y[torch.from_numpy(ids)].cpu().numpy()
        return out


@dataclass
class ClientProgram:
    """A method's client side on one model and one stream."""

    method: Method
    compute: Compute
    stream: Stream
    data: Data  #: the stream's data on the compute device
    local: Local
    seed: int
    loss: LossFunction = cross_entropy
    announced: bool = True  #: whether the stream tells where tasks begin

    def __post_init__(self) -> None:
        self.uniform = self.method.average == "uniform"
        self.width = self.compute.width if self.method.batched else 1
        #: what indices of samples refer to: the data, and what clients have generated
        self.table: Data | Beside = self.data
        self.hooks = {
            hook: self.method.using(hook)
            for hook in (
                "begin",
                "data",
                "generated",
                "replay",
                "probe",
                "weigh",
                "loss",
                "feature_loss",
                "affine",
                "grad",
                "after",
                "seal",
                "finish",
                "remember",
                "close",
            )
        }

    def objective(self, task: int, new: bool = True) -> Objective:
        """The loss without what parts add; with `new`, among new classes only if a part says so."""
        if self.stream.head == "shared":
            return Objective(self.loss)
        slice_ = new and any(part.new_slice for part in self.method.parts)
        return Objective(self.loss, lambda y: self.stream.mask(y, task, slice_))

    def job(self, client: int, round_: int, mine: list[State] | None, start: Tensor) -> Job:
        """A client's turn; a client that is met first gets its first state."""
        state = mine or [part.client_init(start) for part in self.method.parts]
        ids = np.asarray(self.stream.samples(client, round_))
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise EverfedError(
                f"{type(self.stream).__name__}.samples must give indices of samples, and gave "
                f"{ids.dtype} of shape {ids.shape} for client {client} in round {round_ + 1}"
            )
        ids = ids.astype(np.int64, copy=False)
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self.data.y):
            raise EverfedError(
                f"{type(self.stream).__name__}.samples gave indices from {ids.min()} to "
                f"{ids.max()}, but there are {len(self.data.y)} samples"
            )
        if self._held_out[ids].any():
            raise EverfedError(
                f"{type(self.stream).__name__}.samples gave test samples to client {client} in "
                f"round {round_ + 1}: it must give row numbers of the whole table, taken from "
                "data.train"
            )
        return Job(client, ids, state, ids)

    @cached_property
    def _held_out(self) -> np.ndarray:
        """Which rows are only tested on; none where a stream has tests of its own, in which what is
        tested today may be trained on tomorrow."""
        out = np.zeros(len(self.data.y), dtype=bool)
        if type(self.stream).test is not Stream.test:
            return out
        out[self.data.test] = True
        out[self.data.train] = False
        return out

    @cached_property
    def at_once(self) -> int:
        """Samples that go through the model at once when a client's gradient is measured."""
        fit = SLICE_FLOATS // max(1, math.prod(self.data.x.shape[1:]))
        return max(UNIT, min(SLICE, fit) // UNIT * UNIT)

    def slices(self, sizes: list[int]) -> Iterator[tuple[int, int]]:
        """Ranges of clients' samples; a client's end in the last UNIT of one."""
        begin = 0
        for size in sorted({min(-(-size // UNIT) * UNIT, max(sizes)) for size in sizes}):
            while begin < size:
                end = min(size, begin + self.at_once)
                yield begin, end
                begin = end

    def run(self, ask: Ask, jobs: list[Job]) -> Iterator[Reply]:
        """Answer for all these clients, in groups that fit."""
        self.table = self.data
        if ask.exchange != "close" and self.hooks["data"]:
            jobs = [self._with_data(ask, job) for job in jobs]
        if ask.exchange != "close" and self.hooks["generated"]:
            jobs = self._with_generated(ask, jobs)
        if ask.exchange != "train":
            for job in jobs:
                yield self._exchange(ask, job)
            return
        args = (self.local, self.seed, ask.round)
        components = self.method.components
        planned = [(job, batches(job.trains_on, *args, job.client, components)) for job in jobs]
        if self.hooks["replay"]:
            planned = [(job, self._with_replay(ask, job, plan)) for job, plan in planned]
        # the largest first: shorter phases drop out at the end
        planned.sort(key=lambda item: (-len(item[1].steps), -len(item[0].trains_on)))
        # there may be a gradient for each piece that is drawn
        most = max((min(len(p.pieces), len(p.steps)) for _, p in planned), default=0)
        width = max(1, min(self.width, ROOM // (self.compute.layout.d * (1 + most))))
        groups = -(-len(planned) // width)  # of like size: a small rest would cost as many steps
        for first, end in pairwise(len(planned) * k // max(1, groups) for k in range(groups + 1)):
            group = planned[first:end]
            yield self._train(ask, [job for job, _ in group], [plan for _, plan in group])

    def _hook(self, name: str, part: int, phase: Phase) -> Any:
        """A part's hook; an exception in it is named with the part, the clients and the round."""
        hook = getattr(self.method.parts[part], name)

        def call(*args: Any) -> Any:
            try:
                found = hook(*args, phase.enter(part))
            except EverfedError:
                raise
            except Exception as error:
                kind = type(self.method.parts[part]).__name__
                who = ", ".join(str(job.client) for job in phase.jobs)
                raise EverfedError(
                    f"{kind}.{name} failed for client {who} in round {phase.round + 1}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if name in ("grad", "after") and getattr(found, "shape", None) != args[0].shape:
                kind, shape = type(self.method.parts[part]).__name__, tuple(args[0].shape)
                gave = getattr(found, "shape", type(found).__name__)
                raise EverfedError(
                    f"{kind}.{name} must give a tensor of shape {shape}, and gave {gave}"
                )
            return found

        return call

    def _named(self, part: int, uploads: State) -> Uploads:
        """A part's uploads under the names they have on the wire."""
        known = self.method.parts[part].reduces
        for key in uploads:
            if key not in known:
                kind = type(self.method.parts[part]).__name__
                raise EverfedError(f"{kind} uploads {key!r}, but its `reduces` does not say how")
        return {f"{part}.{key}": value for key, value in uploads.items()}

    def _kept(self, part: int, state: State) -> State:
        """A part's new state, if its samples are within the budget."""
        own, most = self.method.parts[part], self.local.memory_bytes
        if (
            most is not None
            and (held := held_bytes(own, state, self.stream.data.sample_bytes)) > most
        ):
            raise EverfedError(
                f"{type(own).__name__} keeps {held} bytes of samples, and local.memory_bytes is "
                f"{most}: it must ask `Context.fits`"
            )
        return state

    def _with_data(self, ask: Ask, job: Job) -> Job:
        """The job with all that the parts add to its data."""
        ids = job.ids
        for i in self.hooks["data"]:
            ids = self._hook("data", i, Phase(self, ask, [job], alone=True))(ids)
        return replace(job, trains_on=ids)

    def _with_generated(self, ask: Ask, jobs: list[Job]) -> list[Job]:
        """The jobs with all that the parts generate."""
        made = []
        for job in jobs:
            phase = Phase(self, ask, [job], alone=True)
            own = [self._hook("generated", i, phase)() for i in self.hooks["generated"]]
            made.append((torch.cat([x for x, _ in own]), torch.cat([y for _, y in own])))
        return [
            replace(job, trains_on=np.concatenate([job.trains_on, ids]))
            for job, ids in zip(jobs, self.lay_beside(made), strict=True)
        ]

    def lay_beside(self, made: list[tuple[Tensor, Tensor]]) -> list[np.ndarray]:
        """Put samples beside the table; their indices there."""
        some = [(x, y) for x, y in made if len(y)]
        if some:
            self.table = Beside(self.data, *(torch.cat(own) for own in zip(*some, strict=True)))
        ends = len(self.data.y) + np.cumsum([0] + [len(y) for _, y in made])
        return [np.arange(*range_) for range_ in pairwise(ends.tolist())]

    def _with_replay(self, ask: Ask, job: Job, plan: Plan) -> Plan:
        """The plan with all that the parts add to its batches."""
        phase, steps = Phase(self, ask, [job], alone=True), []
        for phase.step, batch in enumerate(plan.steps):
            for i in self.hooks["replay"]:
                batch = self._hook("replay", i, phase)(batch)
            steps.append(batch)
        return replace(plan, steps=steps)

    def _exchange(self, ask: Ask, job: Job) -> Reply:
        """Probe or close, one client."""
        phase = Phase(self, ask, [job], alone=True)
        w = self.compute.space(1)[0]
        w.copy_(ask.start)
        self.compute.load_buffers(ask.buffers)
        self.compute.seed(torch_seed(self.seed, ask.exchange, ask.round, job.client))
        uploads: Uploads = {}
        mine = list(job.mine)
        for i in self.hooks[ask.exchange]:
            own, changes = self._hook(ask.exchange, i, phase)(w)
            mine[i] = self._kept(i, mine[i] | _apart(changes, w))
            uploads |= self._named(i, {key: value.unsqueeze(0) for key, value in own.items()})
        for i in self.hooks["seal"]:
            uploads = self._hook("seal", i, phase)(uploads)
        return Reply([job], uploads, phase.weight[:, 0], [mine], torch.full((1,), torch.nan))

    def _train(self, ask: Ask, jobs: list[Job], plans: list[Plan]) -> Reply:
        phase = Phase(self, ask, jobs)
        phase.steps_all[:, 0] = torch.tensor([len(plan.steps) for plan in plans])
        phase.ends_all = _epoch_ends(plans)
        phase.pieces, phase.picks = [p.pieces for p in plans], [p.picks for p in plans]
        self.compute.load_buffers(ask.buffers)
        begun = ask.start
        for i in self.hooks["begin"]:
            begun = self._hook("begin", i, phase)()
        self.compute.seed(torch_seed(self.seed, "training", ask.round, jobs[0].client))
        changes = self._changes(phase)
        rows = self._rows(plans, changes, begun)
        if rows is None:
            w = self.compute.space(len(jobs))
            w.copy_(begun)
            losses = self._descend(ask, phase, w, plans, changes)
        else:
            with self.compute.narrowed(begun, rows) as few:
                pulls = [change.to(few[0]) for change in changes if isinstance(change, Affine)]
                losses = self._descend(ask, phase, few, plans, pulls, rows)
            w = self.compute.space(1)
        phase.first(len(jobs))
        real = len(self.data.y)
        if (
            len(jobs) == 1 and jobs[0].trains_on.max() >= real
        ):  # only single clients have statistics
            ids = torch.from_numpy(jobs[0].ids)
            pieces = (ids[slice(*cut)] for cut in self.slices([len(ids)]))
            self.compute.renew(w, (self.data.take(own, w.dtype)[0] for own in pieces))
        return self._finish(ask, phase, w, w - begun, losses)

    def _rows(self, plans: list[Plan], changes: Sequence[Change], start: Tensor) -> Tensor | None:
        """The rows of the model's table that the client's samples name, if no step can change any
        other, and leaving those out pays."""
        slot = self.compute.table
        bends = ("begin", "after", "loss", "feature_loss", "weigh")
        if slot is None or self.local.weight_decay or any(self.hooks[hook] for hook in bends):
            return None
        if not all(isinstance(change, Affine) and change.rests(start) for change in changes):
            return None
        assert len(plans) == 1  # modules are trained one client at a time
        ids = np.unique(np.concatenate(plans[0].steps))
        x, _ = self.table.take(torch.from_numpy(ids), self.compute.dtype)
        rows = torch.unique(torch.cat([x.new_zeros(1), x.flatten()]))
        return rows if len(rows) <= slot.shape[0] // FEW else None

    def _descend(
        self,
        ask: Ask,
        phase: Phase,
        w: Tensor,
        plans: list[Plan],
        changes: Sequence[Change],
        rows: Tensor | None = None,
    ) -> Tensor:
        """All local steps with these changes of gradients; the mean loss of each client. With
        `rows`, w has only these of its table."""
        objective = self.objective(ask.task)
        if any(self.hooks[hook] for hook in ("loss", "feature_loss", "weigh")):
            objective = replace(
                objective,
                extra=self._sum_of("loss", phase),
                features=self._sum_of("feature_loss", phase),
                weight=math.prod(self._hook("weigh", i, phase)() for i in self.hooks["weigh"]),
            )
        optimiser = Optimiser(self.local)
        rate, bend = self._fused(changes, ask.lr)
        total = torch.zeros(len(plans), device=w.device, dtype=w.dtype)
        own = w
        for k, x, y, scale in self._batches([plan.steps for plan in plans], w.dtype):
            if len(x) != len(own):
                own = w[: len(x)]
                phase.first(len(x))
            phase.step, phase.batch = k, (x, y, scale)
            x = x if rows is None else torch.searchsorted(rows, x)
            if rate is not None:
                loss = self.compute.descend(own, x, y, scale, objective, rate)
                if bend is not None:
                    bend(own)
            else:
                g, loss = self.compute.grad(own, x, y, scale, objective)
                for change in changes:
                    g = change(g, own)
                optimiser.step(own, g, ask.lr)
            total[: len(x)] += loss
            for i in self.hooks["after"]:
                own.copy_(self._hook("after", i, phase)(own))
        return total / phase.steps_all[:, 0]

    def _changes(self, phase: Phase) -> list[Change]:
        """What the parts do to every gradient, in their order."""
        out: list[Change] = []
        for i in sorted({*self.hooks["affine"], *self.hooks["grad"]}):
            affine = self._hook("affine", i, phase)()
            if affine is not None:
                out.append(affine)
            elif i in self.hooks["grad"]:
                out.append(self._hook("grad", i, phase))
        return out

    def _fused(
        self, changes: Sequence[Change], lr: float
    ) -> tuple[float | None, Callable[[Tensor], Tensor] | None]:
        """The rate of one plain step, which is cheapest, and what finishes it; no rate: no way."""
        if not self.local.plain:
            return None, None
        whole: Affine | None = None
        for change in changes:
            if not isinstance(change, Affine):
                return None, None
            whole = change if whole is None else change.after(whole)
        return (lr, None) if whole is None else whole.fuse(lr) or (None, None)

    def _sum_of(self, hook: str, phase: Phase) -> Callable[..., Tensor] | None:
        """What the parts add to the loss by a hook; None: nothing."""
        if not self.hooks[hook]:
            return None
        return lambda *a: torch.stack(
            [self._hook(hook, i, phase)(*a) for i in self.hooks[hook]]
        ).sum(0)

    def _batches(
        self, plans: list[list[np.ndarray]], dtype: torch.dtype
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Step, inputs (clients, batch, ...), labels and sample weights; gathered many at once."""
        width = max(len(batch) for plan in plans for batch in plan)
        per_step = len(plans) * width * math.prod(self.data.x.shape[1:])
        chunk = max(1, GATHER // max(1, per_step))
        for begin in range(0, len(plans[0]), chunk):
            end = min(begin + chunk, len(plans[0]))
            ids = np.zeros((end - begin, len(plans), width), dtype=np.int64)
            sizes = np.zeros((end - begin, len(plans)), dtype=np.int64)
            for row, plan in enumerate(plans):
                for k, batch in enumerate(plan[begin:end]):
                    ids[k, row] = batch[0]  # padding is a sample of one's own, with weight 0
                    ids[k, row, : len(batch)] = batch
                    sizes[k, row] = len(batch)
            x, y = self.table.take(torch.from_numpy(ids), dtype)
            counts = torch.from_numpy(sizes).to(x.device)
            inside = torch.arange(width, device=x.device) < counts.unsqueeze(-1)
            scale = inside / counts.unsqueeze(-1).clamp(min=1).to(dtype)
            active, longest = (sizes > 0).sum(1).tolist(), sizes.max(1).tolist()
            for k, (xs, ys, scales) in enumerate(zip(x, y, scale, strict=True)):
                if active[k] == len(plans) and longest[k] == width:
                    yield begin + k, xs, ys, scales
                else:
                    cut = (slice(active[k]), slice(longest[k]))
                    yield begin + k, xs[cut], ys[cut], scales[cut]

    def _finish(self, ask: Ask, phase: Phase, w: Tensor, update: Tensor, losses: Tensor) -> Reply:
        jobs = phase.jobs
        mine = [list(job.mine) for job in jobs]
        uploads: Uploads = {}
        uploads["buffers"] = self.compute.read_buffers().expand(len(jobs), -1)
        for i in self.hooks["finish"]:
            update, own, state = self._hook("finish", i, phase)(update, w)
            uploads |= self._named(i, own)
            for row in range(len(jobs)):
                changes = {key: value[row].clone() for key, value in state.items()}
                mine[row][i] = mine[row][i] | changes
        uploads["update"] = update
        for i in self.hooks["remember"]:
            for row, job in enumerate(jobs):
                alone = Phase(self, ask, [replace(job, mine=mine[row])], alone=True)
                new = _apart(self._hook("remember", i, alone)(w[row]), w)
                mine[row][i] = self._kept(i, mine[row][i] | new)
        for i in self.hooks["seal"]:
            uploads = self._hook("seal", i, phase)(uploads)
            losses = torch.full_like(losses, torch.nan)  # a loss is not among what is sealed
        return Reply(jobs, uploads, phase.weight[:, 0], mine, losses)


def _apart(state: State, w: Tensor) -> State:
    """A state without views of w, whose room the next clients are trained in."""
    room = w.untyped_storage().data_ptr()
    return {
        key: value.clone() if value.untyped_storage().data_ptr() == room else value
        for key, value in state.items()
    }


def _epoch_ends(plans: list[Plan]) -> Tensor:
    """Whether a client's epoch (or its phase) ends with a step: (steps, clients)."""
    out = np.zeros((len(plans[0].steps), len(plans)), dtype=bool)
    for row, plan in enumerate(plans):
        count = len(plan.steps)
        out[plan.per_epoch - 1 : count : plan.per_epoch, row] = True
        out[count - 1, row] = True
    return torch.from_numpy(out)
