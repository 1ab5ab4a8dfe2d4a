"""A method is a tuple of parts: all that a method's author reads.

FedAvg is `Method()`; everything else is `Method(part, ...)`. A part is a frozen dataclass of
hyper-parameters whose hooks are pure functions: state comes in as a value and goes out as a value.
Override only what the method changes.

Signs: an *update* is travel, w_i - start (the papers' pseudo-gradient is its negative).
Shapes: server vectors are (d,). In client hooks a vector's last dimension is d and a dimension of
clients stands before it, (clients, d), because an engine may train several clients at once; so
write element-wise formulas, and `dot` and `sq` of `everfed.vector` for inner products. Hooks called
client by client (data, generated, replay, probe, remember, close) see plain (d,) vectors and their
own state.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, get_args

import numpy as np
from torch import Tensor

from everfed.compute.base import Seen
from everfed.data.table import Inputs
from everfed.errors import EverfedError
from everfed.local import Affine, Components, Local
from everfed.vector import Layout

#: A part's server state, client state, extras for clients or uploads: named tensors.
State = dict[str, Tensor]
Average = Literal["samples", "uniform"]
Reduction = Literal["mean", "sum", "stack"]


class Context(Protocol):
    """What a client hook may read. `down` and `mine` are those of the part that is called."""

    start: Tensor  #: the model received, (d,)
    down: Mapping[str, Tensor]  #: the extras this part sent
    mine: Mapping[str, Tensor]  #: this part's own client state, (clients, ...) in a group
    scratch: dict[str, Any]  #: kept for one local phase of the group
    round: int  #: from 0
    task: int  #: from 0
    seed: int  #: the run's; for `everfed.chance.rng`
    client: int  #: the client's id; only in hooks called client by client
    clients: list[int]  #: the ids of the group's clients, in the order of rows
    part: int  #: the part's place in the method
    block: int  #: which of its local data sets the client holds in this round
    ids: np.ndarray  #: its current samples, without anything replayed; client by client
    n: Tensor  #: number of current samples, (clients, 1)
    weight: Tensor  #: weight in the mean (n, or 1 if uniform), (clients, 1)
    local: Local  #: how clients train
    lr: float  #: the round's learning rate
    step: int  #: local steps done so far
    steps: Tensor  #: local steps of the whole phase, (clients, 1)
    epoch_ends: Tensor  #: whether this step was an epoch's last, (clients, 1)
    #: where batches are components (`Part.components`): each client's pieces of its data, and
    #: which of them its steps take
    pieces: list[list[np.ndarray]]
    picks: list[list[int]]
    layout: Layout  #: which slice of the vector each parameter is
    known: Tensor | None  #: classes of earlier tasks (bool, (classes,)); None: all of them
    seen: Tensor | None  #: those of this task as well
    inputs: Inputs  #: what one input looks like
    #: the step's inputs (clients, batch, ...), labels, and weights of samples, 0 for padding
    batch: tuple[Tensor, Tensor, Tensor]

    def each(self) -> list[Context]:
        """One context for each client of the group, as hooks called client by client have it."""
        ...

    def gradient(
        self,
        w: Tensor,
        ids: np.ndarray | list[np.ndarray] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        targets: list[Tensor] | None = None,
        train: bool = True,
    ) -> Tensor:
        """The mean loss's gradient at w over all the client trains on, or over `ids`: a list of
        samples for each row of w gives (len(ids), d), 0 where a row has none; or that of another
        loss, which takes outputs and these targets, one a sample of each list. Without `train`
        with running statistics in the place of the batch's own."""
        ...

    def fisher(self, w: Tensor, since: int = 0) -> tuple[Tensor, Tensor]:
        """Diagonal Fisher at w (the mean of per-sample squared gradients), and the mean gradient;
        what lies before coordinate `since` may be left 0, which is cheaper."""
        ...

    def norms(self, w: Tensor, ids: np.ndarray) -> Tensor:
        """The norm of each sample's own gradient at w, (len(ids),)."""
        ...

    def hutchinson(self, w: Tensor, probes: int, since: int = 0) -> Tensor:
        """Hutchinson's estimate of the Hessian's diagonal at w; what lies before coordinate `since`
        is left 0, and adds no variance."""
        ...

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs of another model w, (d,), or of one for each client, (clients, d), on a batch;
        no gradient, evaluation mode."""
        ...

    def forward(self, w: Tensor, x: Tensor, train: bool, buffers: Tensor | None = None) -> Seen:
        """A batch's way through the model w, (d,), with gradients in both, and with other running
        statistics than the current ones if given. These stay as they are in any case."""
        ...

    def outputs(self, w: Tensor, ids: np.ndarray) -> Tensor:
        """Outputs of model w on samples, (len(ids), ...); no gradient, evaluation mode."""
        ...

    def features(self, w: Tensor, ids: np.ndarray) -> Tensor:
        """What the last layer of model w is fed with, (len(ids), width)."""
        ...

    def samples(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples, (len(ids), ...) each."""
        ...

    def losses(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of model w on each of some samples, with a gradient in x; evaluation mode."""
        ...

    def fits(self, size: int) -> int:
        """`size`, or the fewer samples that a memory has room for in `local.memory_bytes`."""
        ...

    def labels(self, ids: np.ndarray) -> np.ndarray:
        """Classes of samples; all 0 where labels are not classes."""
        ...


class Recall(Protocol):
    """The past, where all data are at hand: in simulation."""

    w: Tensor  #: the server's model, at which gradients are taken, (d,)
    layout: Layout  #: which slice of the vector each parameter is

    def samples(self, client: int, round_: int) -> np.ndarray:
        """Indices of what the client held in a round."""
        ...

    def replayed(
        self, client: int, block: int, kept: np.ndarray | tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients over a data set that the client has met, and over what it kept of it."""
        ...

    def gradient(self, samples: np.ndarray | tuple[Tensor, Tensor], round_: int) -> Tensor:
        """Of that round's loss over these samples (indices, or inputs and labels), (d,)."""
        ...


class Server(Protocol):
    """What the server has to work with between rounds: the model as a function, and no data."""

    seed: int  #: the run's; for `everfed.chance.rng`
    round: int  #: from 0
    inputs: Inputs  #: what one input looks like
    classifies: bool  #: whether inputs are floats or bytes, with one class a sample
    seen: Tensor  #: the classes of this task and of earlier ones, (classes,) whole numbers
    buffers: Tensor  #: the model's running statistics
    layout: Layout  #: which slice of the vector each parameter is

    def forward(self, w: Tensor, x: Tensor, train: bool) -> Seen:
        """A batch's way through the model w, (d,), with gradients in both."""
        ...

    def fresh(self) -> Tensor:
        """First weights of the model, drawn anew, (d,)."""
        ...


@dataclass(frozen=True)
class Reduced:
    """The cohort's uploads, reduced; `r["key"]` is the part's own upload of that name."""

    values: Mapping[str, Tensor]  #: the part's uploads
    w: Tensor  #: the server's model before the round, (d,)
    n: int  #: clients whose replies count
    weight: float  #: the sum of their weights
    population: int  #: clients there are
    round: int  #: from 0
    task: int  #: from 0
    #: mean over coordinates of the cohort's variance around the (weighted) mean update: (1,), or
    #: (layers,) where a part is `layered`
    spread: Tensor | None = None
    mean: Tensor | None = None  #: the mean update, before any part has folded it, (d,)
    exchanges: int = 1  #: of which the round was made
    clients: tuple[int, ...] = ()  #: whose replies count, in the order of stacked uploads
    repeated: int = 0  #: exchanges of the run that a crash had repeated
    again: int = 0  #: times that some of an exchange's clients were asked once more
    server: Server | None = None  #: for parts that train at the server

    def __getitem__(self, key: str) -> Tensor:
        return self.values[key]

    def spread_beside(self, update: Tensor) -> Tensor:
        """The spread of updates as long as this one is, which earlier parts (a server's rate,
        FedNova) made of the mean."""
        assert self.spread is not None
        if self.mean is None or update is self.mean:
            return self.spread
        length = self.mean.square().sum()
        return self.spread * (update.square().sum() / length).item() if length else self.spread


@dataclass(frozen=True)
class Part:
    """One change of the round. Hyper-parameters are the dataclass's fields."""

    #: how each own upload is reduced; only `stack` keeps single clients apart
    reduces: ClassVar[Mapping[str, Reduction]] = {}
    #: whether `fold` reads `r.spread`
    spread: ClassVar[bool] = False
    #: parts act in the order of their stages: -1 keeps plain gradients, 0 replaces or scales the
    #: gradient, 1 adds to it (or to the data or the loss), 2 normalises updates, 3 scales them,
    #: 4 is a server optimiser, 5 an anchor
    stage: ClassVar[int] = 1
    #: whether its uploads are of use when they are cut to a norm together with the update and
    #: noise is added: numbers of samples, say, are not
    noisy: ClassVar[bool] = True
    #: extras that change only at a task's end, so that a client needs them once a task
    once: ClassVar[tuple[str, ...]] = ()
    #: entries of the client state that are indices of samples; they are as many as `Context.fits`
    #: says at most
    remembers: ClassVar[tuple[str, ...]] = ()

    @property
    def least(self) -> int:
        """How many clients' replies an exchange needs; with fewer the round is lost."""
        return 1

    @property
    def batched(self) -> bool:
        """Whether the client hooks may see several clients at once."""
        return True

    @property
    def components(self) -> Components:
        """Whether batches are components of a fixed cut, drawn with replacement; "samples": they
        are single samples."""
        return False

    @property
    def new_slice(self) -> bool:
        """Whether, where classes arrive task by task, only the new ones compete in the loss."""
        return False

    # server ----------------------------------------------------------------------------------
    def init(self, w: Tensor, layout: Layout) -> State:
        """The part's first server state."""
        return {}

    def prepare(self, s: State, w: Tensor, server: Server) -> State:
        """The same, before the first round, where it needs more than the model's vector."""
        return s

    def send(self, s: State, w: Tensor) -> tuple[Tensor, State]:
        """The model clients start from, and extras for them."""
        return w, {}

    def answer(self, s: State, r: Reduced) -> State:
        """Extras made of the reduced probe, sent with the model."""
        return dict(r.values)

    def screen(self, uploads: State) -> State:
        """What the server takes of single clients' uploads, (clients, ...) each, as they come in;
        'update' is the update, what parts upload is 'index.key'."""
        return uploads

    def aggregate(self, uploads: State, weights: Tensor, means: frozenset[str]) -> State:
        """All clients' uploads reduced by the part instead of by mean and sum: (clients, ...) each
        -> (...), with the clients' weights (clients,); `means` are the keys to be averaged."""
        raise NotImplementedError

    def receive(self, values: State, n: int, means: frozenset[str], chance: int) -> State:
        """A change of the reduced uploads of `n` clients before any part sees them; `chance` is a
        seed. Beside means and sums there are `plain` and `squares` where a part reads the spread.
        """
        return values

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        """The mean update becomes the server's step (w <- w + step) and the next state."""
        return update, s

    def predict(self, s: State, seen: Seen, forward: Callable[[Tensor], Seen]) -> Tensor:
        """Scores of classes in tests, where not the outputs: those and the features of the server's
        model, and what gives them of another model w, (d,) -> (samples, classes)."""
        return seen.z

    def task_end(self, s: State, w: Tensor, r: Reduced) -> State:
        """The server's side of a task boundary; `r` holds what `close` uploaded."""
        return s

    def metrics(self, s: State) -> dict[str, float]:
        """Numbers worth a line in the records each round."""
        return {}

    def recall(
        self, s: State, mine: Mapping[int, State], past: Recall
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For measuring the information loss: gradients of past objectives, each with that of what
        the part keeps of it. `mine` are the states of the round's clients."""
        return iter(())

    def check(self, local: Local) -> None:
        """Raise EverfedError where the part cannot work with these local settings."""

    def check_beside(self, parts: tuple[Part, ...], average: Average) -> None:
        """Raise EverfedError where the part cannot work beside the method's other parts."""

    # client ----------------------------------------------------------------------------------
    def client_init(self, w: Tensor) -> State:
        """A new client's state (w: the model it first receives)."""
        return {}

    def begin(self, c: Context) -> Tensor:
        """The models that clients train from, where not the one received: (clients, d). Updates
        are travel from there."""
        raise NotImplementedError

    def data(self, ids: np.ndarray, c: Context) -> np.ndarray:
        """The samples to train on, given the current ones. Client by client."""
        return ids

    def generated(self, c: Context) -> tuple[Tensor, Tensor]:
        """Inputs and labels to train on beside the client's data. Running statistics are renewed on
        the client's data afterwards. Client by client."""
        raise NotImplementedError

    def replay(self, batch: np.ndarray, c: Context) -> np.ndarray:
        """The samples of a step, given those of the batch. Client by client."""
        return batch

    def probe(self, w: Tensor, c: Context) -> tuple[State, State]:
        """An exchange before training: uploads, changes of the state. Client by client."""
        return {}, {}

    def weigh(self, c: Context) -> float:
        """How much the client's own loss counts beside the terms that parts add."""
        return 1.0

    def loss(self, z: Tensor, x: Tensor, y: Tensor, c: Context) -> Tensor:
        """A term for each sample's loss: outputs (clients, batch, classes) -> (clients, batch)."""
        raise NotImplementedError

    def feature_loss(self, features: Tensor, y: Tensor, c: Context) -> Tensor:
        """A term of the same kind from what the last layer is fed with, (clients, batch, width)."""
        raise NotImplementedError

    def affine(self, c: Context) -> Affine | None:
        """A change of the gradient that stays the same for a local phase: the cheapest kind."""
        return None

    def grad(self, g: Tensor, w: Tensor, c: Context) -> Tensor:
        """Any other change of the gradient, where `affine` gives None. May change `g` in place."""
        return g

    def after(self, w: Tensor, c: Context) -> Tensor:
        """A change of the model after an optimiser step."""
        return w

    def finish(self, update: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State, State]:
        """After training, w the client's model: the update to upload, other uploads, changes of
        the client's state."""
        return update, {}, {}

    def remember(self, w: Tensor, c: Context) -> State:
        """After training: changes of a state that is made of samples. Client by client."""
        return {}

    def close(self, w: Tensor, c: Context) -> tuple[State, State]:
        """The client's side of a task boundary: uploads, changes of the state. Client by client."""
        return {}, {}

    def seal(self, uploads: State, c: Context) -> State:
        """A change of all that leaves a client in an exchange, (clients, ...) each."""
        return uploads

    # what follows from the above -------------------------------------------------------------
    @property
    def layered(self) -> bool:
        """Whether `fold` reads the spread of each layer."""
        return False

    @property
    def lasting(self) -> bool:
        """Whether its summed uploads are changes of what clients keep, of which the server must not
        miss one: they count even where the update comes too late to."""
        return False

    @property
    def stateful(self) -> bool:
        """Whether a client must remember something from round to round."""
        return self.has("client_init")

    @property
    def bounded(self) -> bool:
        """Whether the part must be told where a task ends."""
        return self.has("task_end") or self.has("close")

    @classmethod
    def check_written(cls) -> None:
        """Raise EverfedError for slips of a part's author that would pass unseen."""
        name = cls.__name__
        for key, kind in cls.reduces.items():
            if kind not in get_args(Reduction):
                raise EverfedError(
                    f"{name}: reduces[{key!r}] must be 'mean', 'sum' or 'stack', not {kind!r}"
                )
        own = vars(cls)
        if "__dataclass_fields__" not in own and ("__init__" in own or own.get("__annotations__")):
            raise EverfedError(f"{name} has settings: write @dataclass(frozen=True) above it")
        hooks = [hook for hook in vars(Part) if not hook.startswith("_")]
        for other in own:
            if other.startswith("_") or other in hooks or not callable(own[other]):
                continue
            # letters in another order, or one too few or too many
            close = difflib.get_close_matches(other, hooks, 3, 0.85)
            same = [hook for hook in hooks if sorted(hook) == sorted(other)]
            for near in same + [hook for hook in close if abs(len(hook) - len(other)) == 1]:
                raise EverfedError(
                    f"{name}.{other} is no hook; did you mean {near}? (What is your own may begin "
                    "with _)"
                )

    @classmethod
    def has(cls, hook: str) -> bool:
        """Whether the part overrides a hook."""
        return getattr(cls, hook) is not getattr(Part, hook)


@dataclass(frozen=True)
class Needs:
    """What a method asks of a federation."""

    client_state: bool  #: clients must remember something from round to round
    exchanges: int  #: in a round
    boundaries: bool  #: it must be told where a task ends
    secure_aggregation: bool  #: sums over clients are enough


@dataclass(frozen=True, init=False)
class Method:
    """Parts, which act in the order of their stages, and how clients are averaged.

    >>> Method().name
    'fedavg'
    """

    parts: tuple[Part, ...] = ()  #: in the order in which they act
    average: Average = "samples"  #: weights of clients: by their samples, or "uniform"
    name: str = field(default="fedavg", compare=False)

    def __init__(self, *parts: Part, average: Average = "samples", name: str | None = None) -> None:
        for part in parts:
            if not isinstance(part, Part):
                raise EverfedError(f"a method is made of parts, and {part!r} is not a Part")
            part.check_written()
        if average not in ("samples", "uniform"):
            raise EverfedError(f"average must be 'samples' or 'uniform', not {average!r}")
        parts = tuple(sorted(parts, key=lambda part: part.stage))
        for part in parts:
            part.check_beside(parts, average)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "average", average)
        own = "+".join(type(p).__name__.lower() for p in parts) or "fedavg"
        object.__setattr__(self, "name", name or own)

    def __add__(self, other: Method) -> Method:
        """Both methods' parts; clients are averaged as in the first."""
        names = [m.name for m in (self, other) if m.parts] or ["fedavg"]
        return Method(*self.parts, *other.parts, average=self.average, name="+".join(names))

    def screen(self, uploads: State) -> State:
        """What the server takes of single clients' uploads."""
        for i in self.using("screen"):
            uploads = self.parts[i].screen(uploads)
        return uploads

    def using(self, hook: str) -> list[int]:
        """Which parts override a hook."""
        return [i for i, part in enumerate(self.parts) if part.has(hook)]

    @cached_property
    def least(self) -> int:
        return max((part.least for part in self.parts), default=1)

    @cached_property
    def batched(self) -> bool:
        """Whether clients may be trained several at once."""
        return all(part.batched for part in self.parts)

    @cached_property
    def components(self) -> Components:
        """Whether batches are components of a fixed cut."""
        return next((part.components for part in self.parts if part.components), False)

    @property
    def needs(self) -> Needs:
        """What the method asks of a federation."""
        reductions = [kind for part in self.parts for kind in part.reduces.values()]
        return Needs(
            client_state=any(part.stateful for part in self.parts),
            exchanges=2 if self.using("probe") else 1,
            boundaries=any(part.bounded for part in self.parts),
            secure_aggregation="stack" not in reductions
            and not any(part.has("screen") or part.has("aggregate") for part in self.parts),
        )

    def describe(self) -> dict[str, Any]:
        """The method as plain values, for a run's folder."""
        parts = [{"part": type(p).__name__, **dataclasses.asdict(p)} for p in self.parts]
        return {"name": self.name, "average": self.average, "parts": parts}


def check_state(part: Part, hook: str, state: State) -> None:
    """Raise EverfedError where a hook gives what cannot be kept or sent: a state is tensors."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise EverfedError(
                f"{type(part).__name__}.{hook} must give a state of tensors, and {key!r} is "
                f"{value!r}: make it torch.tensor(...)"
            )
