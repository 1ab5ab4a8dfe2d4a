"""The life of a round and of a task's end, the same on every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from everfed import meters
from everfed.boundaries import Boundaries
from everfed.chance import rng, torch_seed
from everfed.client import Ask, ClientProgram, Exchange
from everfed.engines.local import Answer, ClientStates
from everfed.errors import EverfedError
from everfed.late import Late, count, follow, held
from everfed.ledger import Ledger
from everfed.local import Local
from everfed.memory import held_bytes
from everfed.method import Method, Reduced, State, check_state
from everfed.reduce import cohort_spread, reducer
from everfed.server import AtServer
from everfed.streams.sites import Sites
from everfed.streams.stream import Stream
from everfed.vector import folded


class Engine(Protocol):
    """Where clients are asked."""

    program: ClientProgram  #: what they do

    def ask(
        self,
        ask: Ask,
        cohort: list[int],
        states: Mapping[int, list[State]],
        again: Callable[[], None],
    ) -> Answer:
        """Have every client of the cohort answer, and reduce what they send; `again` is called
        before any of them is asked once more."""
        ...

    def online(self, round_: int) -> np.ndarray | None:
        """Clients that can be sampled; None: all."""
        ...

    def evaluate(
        self,
        w: Tensor,
        buffers: Tensor,
        sets: list[np.ndarray],
        task: int,
        states: Sequence[State] = (),
    ) -> list[dict[str, float]]:
        """The measures of each set: accuracy (the share of right answers; NaN without classes) or,
        where candidates are ranked, those of `metrics.ranking`, and the mean loss. The parts'
        states are for those that predict."""
        ...

    def name(self, client: int) -> str:
        """A client, for people."""
        ...

    def describe(self) -> str:
        """Where and how clients are asked, for people."""
        ...

    def close(self) -> None:
        """Let go of workers and connections."""
        ...


@dataclass
class Federation:
    """Everything a run needs to go on: the server's model and states, the clients' states."""

    w: Tensor
    buffers: Tensor
    parts: list[State]
    clients: ClientStates = field(default_factory=dict)
    #: clients that hold this task's extras already
    informed: set[int] = field(default_factory=set)
    #: replies that are under way
    late: list[State] = field(default_factory=list)
    #: what the search for boundaries knows, and the rounds in which it found tasks to begin
    seen: State = field(default_factory=dict)
    found: list[int] = field(default_factory=list)
    round: int = 0  #: rounds done
    asked: int = 0  #: exchanges done
    last: Tensor | None = None  #: the last mean update, folded, for the drift meters

    def copy(self) -> Federation:
        """As it is now, whatever a round does to it."""
        return replace(
            self,
            parts=list(self.parts),
            clients=dict(self.clients),
            informed=set(self.informed),
            late=list(self.late),
        )

    def restore(self, earlier: Federation) -> None:
        """Go back to an earlier state, in place."""
        vars(self).update(vars(earlier))


@dataclass
class Events:
    """What happened in a round."""

    values: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)  #: clients whose state is new
    cohort: list[int] = field(default_factory=list)  #: clients that were asked


@dataclass(frozen=True)
class Asked:
    """A round's exchanges with its cohort."""

    answer: Answer
    start: Tensor  #: the model that clients began with, (d,)
    down: list[State]  #: what came with it, part by part
    values: State = field(default_factory=dict)  #: the replies, reduced; none: too few


def draw_cohort(
    stream: Stream, online: np.ndarray | None, round_: int, sample: int | None, seed: int
) -> tuple[list[int], int]:
    """The round's clients, uniformly without replacement among those online (None: all), and how
    many are missing from `sample`."""
    population = stream.clients if online is None else len(online)
    size = population if sample is None else min(sample, population)
    if size == population:
        chosen = np.arange(population)
    else:
        chosen = rng(seed, "cohort", round_).choice(population, size, replace=False)
    if online is not None and np.asarray(online).dtype.kind not in "iu" and population:
        kind = np.asarray(online).dtype
        raise EverfedError(f"{type(stream).__name__}.online must give client ids, and gave {kind}")
    ids = chosen if online is None else np.asarray(online)[chosen]
    return sorted(int(i) for i in ids), (sample or size) - size


@dataclass
class Rounds:
    """Plays the rounds of one run."""

    method: Method
    stream: Stream
    local: Local
    engine: Engine
    sample: int | None
    seed: int
    ledger: Ledger = field(default_factory=Ledger)
    late: Late = field(default_factory=Late)
    boundaries: Boundaries = field(default_factory=Boundaries)

    def play(self, fed: Federation) -> Events:
        """One round, in place. If no client's reply counts, the model stays as it was. One in which
        a task is found to have begun is played again, as if the task had been announced."""
        events = Events()
        for i in self.method.using("prepare") if fed.round == 0 else ():
            fed.parts[i] = self.method.parts[i].prepare(fed.parts[i], fed.w, self._server(fed))
        before = fed.copy() if self.boundaries.found else fed
        asked = self._exchanges(fed, events)
        if self.boundaries.found and asked.values:
            surprise = self._surprise(fed, asked.values, events)
            if surprise > 1:
                fed.restore(replace(before, seen=fed.seen))
                asked, events = self._begin_task(fed, events)
            events.values["surprise"] = surprise
        if asked.values:
            self._fold(fed, asked.answer, asked.values, events)
        self._count_held(fed, asked, events)
        fed.round += 1
        return events

    def _exchanges(self, fed: Federation, events: Events) -> Asked:
        """A round's cohort is drawn and asked."""
        cohort, short = self.draw(fed.round, self.sample, [int(r["at"][0]) for r in fed.late])
        online, events.cohort = len(cohort), cohort
        if short:
            events.warnings.append(
                f"{short} fewer clients online than the sample of {self.sample} asks for"
            )
        start, down = self._send(fed)
        if cohort:
            self._count_down(fed, cohort, start, down, events)
        if cohort and self.method.using("probe"):
            cohort, down = self._probe(fed, cohort, start, down, events)
        answer = self._train(fed, start, down, cohort, events)
        if answer.reducer.n >= self.method.least:
            return Asked(answer, start, down, self._values(fed, answer, "train"))
        events.values["lost_round"] = 1
        few = "no client's update could be used"
        if answer.reducer.n:
            few = f"{answer.reducer.n} updates, and the method needs {self.method.least}"
        why = few if online else "no client was online"
        events.warnings.append(f"{why}: the model stays as it was")
        return Asked(answer, start, down)

    def draw(
        self, round_: int, sample: int | None, busy: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        """A round's clients, none of the busy ones; see `draw_cohort`."""
        online = self.engine.online(round_)
        if busy:
            everyone = np.arange(self.stream.clients) if online is None else online
            online = np.setdiff1d(everyone, busy)
        return draw_cohort(self.stream, online, round_, sample, self.seed)

    def _train(
        self, fed: Federation, start: Tensor, down: list[State], cohort: list[int], events: Events
    ) -> Answer:
        """The cohort's replies that come in time, and those of earlier rounds that come now."""
        by = self.late.draw(cohort, self.seed, fed.round)
        prompt = [client for client in cohort if by[client] == 0]
        for client, rounds in by.items():
            if rounds:
                own = self._ask("train", fed, start, down, [client], events)
                if own.reducer.n:
                    at = (client, fed.round, fed.round + rounds, self._task(fed))
                    fed.late.append(held(*at, own.reducer))
                    self._keep(fed, own.mine, events)
        events.values.pop("train_loss", None)  # of those whose replies are still to come
        if prompt:
            answer = self._ask("train", fed, start, down, prompt, events)
        else:
            shapes = {"update": tuple(fed.w.shape), "buffers": tuple(fed.buffers.shape)}
            layout = self.engine.program.compute.layout
            answer = Answer(reducer(self.method, "train", shapes, layout), {})
        lost = sum(rounds is None for rounds in by.values())
        if lost:
            events.values["lost_replies"] = lost
        self._take_late(fed, answer, events)
        return answer

    def _take_late(self, fed: Federation, answer: Answer, events: Events) -> None:
        """Replies to earlier rounds of the task that come in this one. Those of a task that is over
        are lost: they go with states that have been closed."""
        come = [reply for reply in fed.late if reply["at"][2] <= fed.round] + answer.late
        fed.late = [reply for reply in fed.late if reply["at"][2] > fed.round]
        over = [reply for reply in come if reply["at"][3] != self._task(fed)]
        counted = []
        for reply in come:
            client, sent, _, task = reply["at"].tolist()
            if task != self._task(fed):
                continue
            told = self.boundaries.unsaid(self.method, reply)
            why = count(told, answer.reducer, self.late.factor(fed.round - sent))
            if why:
                _add(events.values, "dropped_updates")
                events.warnings.append(f"dropped a late update: {self.engine.name(client)}: {why}")
                continue
            counted.append(reply)
            known = fed.clients.get(client) or [{} for _ in self.method.parts]
            answer.mine.setdefault(client, answer.late_mine.get(client, known))
        if answer.reducer.n < self.method.least:  # a lost round would lose them altogether
            fed.late += over + counted
            self._keep(fed, answer.late_mine, events)
            return
        if counted:
            events.values["late_updates"] = len(counted)
        for reply in over:
            follow(reply, answer.reducer, self.method)
            _add(events.values, "lost_replies")

    def _probe(
        self, fed: Federation, cohort: list[int], start: Tensor, down: list[State], events: Events
    ) -> tuple[list[int], list[State]]:
        """The exchange before training: who goes on (those whose probe counts), and all extras."""
        answer = self._ask("probe", fed, start, down, cohort, events)
        if answer.reducer.n < self.method.least:
            return [], down
        self._keep(fed, answer.mine, events)
        reduced = self._reduced(fed, answer, self._values(fed, answer, "probe"))
        extras = [
            part.answer(fed.parts[i], reduced[i]) if part.has("probe") else {}
            for i, part in enumerate(self.method.parts)
        ]
        going = sorted(answer.mine)
        events.values["mb_down"] += _megabytes(extras) * len(going)
        return going, [own | more for own, more in zip(down, extras, strict=True)]

    def _keep(self, fed: Federation, new: dict[int, list[State]], events: Events) -> None:
        """Take over the clients' new states."""
        fed.clients |= new
        events.changed |= set(new)

    def end_task(self, fed: Federation) -> Events:
        """The boundary after a task's last round (which is `fed.round` - 1), in place."""
        events = Events()
        ended = replace(fed, round=fed.round - 1)
        empty = Reduced(
            {}, fed.w, 0, 0.0, self.stream.clients, ended.round, self._task(ended),
            server=self._server(ended),
        )  # fmt: skip
        reduced = [empty] * len(self.method.parts)
        cohort, _ = self.draw(ended.round, None) if self.method.using("close") else ([], 0)
        if cohort:
            down: list[State] = [{} for _ in self.method.parts]
            answer = self._ask("close", ended, fed.w, down, cohort, events)
            fed.asked = ended.asked
            events.values["mb_down"] = _megabytes([{"w": fed.w}]) * len(cohort)
            self._keep(fed, answer.mine, events)
            if answer.reducer.n >= self.method.least:
                reduced = self._reduced(ended, answer, self._values(ended, answer, "close"))
        for i, part in enumerate(self.method.parts):
            fed.parts[i] = part.task_end(fed.parts[i], fed.w, reduced[i])
        fed.informed = set()
        return events

    def _surprise(self, fed: Federation, values: State, events: Events) -> float:
        """How much the replies look like those of a new task: above 1, they are."""
        loss = events.values.get("train_loss")
        if loss is None and not self.method.using("seal"):
            return 0.0  # of this round, only late replies
        told = self.boundaries.told(self.method, values)
        if told is not None:
            return told
        way = float(values["update"].norm()) / self.local.rate(*self._schedule(fed))
        fed.seen, surprise = self.boundaries.watch(fed.seen, loss, way)
        return surprise

    def _begin_task(self, fed: Federation, tried: Events) -> tuple[Asked, Events]:
        """The round once more, as the first of a task; what was sent for nothing is counted."""
        self.end_task(fed)
        fed.found.append(fed.round)
        events = Events()
        asked = self._exchanges(fed, events)
        for key in ("mb_up", "mb_down"):
            events.values[key] = events.values.get(key, 0.0) + tried.values.get(key, 0.0)
        events.values["found_task"] = len(fed.found) + 1
        return asked, events

    def _task(self, fed: Federation) -> int:
        """The task of the next round as the method knows it."""
        if self.boundaries.found:
            return sum(begun <= fed.round for begun in fed.found)
        return self.stream.task(fed.round)

    def _schedule(self, fed: Federation) -> tuple[int, int]:
        """Where the schedule of learning rates is, and its length."""
        stream, at = self.stream, fed.round
        if not self.local.reset:
            return at, stream.rounds
        if self.boundaries.found:  # a task may last until the end
            begun = fed.found[-1] if fed.found else 0
            return at - begun, stream.rounds - begun
        return stream.round_in_task(at), stream.length(stream.task(at))

    def _server(self, fed: Federation) -> AtServer:
        return AtServer(self.engine.program, fed.buffers, fed.round)

    def _send(self, fed: Federation) -> tuple[Tensor, list[State]]:
        start, down = fed.w, []
        for part, state in zip(self.method.parts, fed.parts, strict=True):
            start, extras = part.send(state, start)
            down.append(extras)
        return start, down

    def _ask(
        self,
        exchange: Exchange,
        fed: Federation,
        start: Tensor,
        down: list[State],
        cohort: list[int],
        events: Events,
    ) -> Answer:
        task, rate = self._task(fed), self.local.rate(*self._schedule(fed))
        ask = Ask(exchange, fed.round, task, rate, start, fed.buffers, down)
        self.ledger.begin()
        fed.asked += 1
        answer = self.engine.ask(ask, cohort, fed.clients, self.ledger.repeat)
        values = events.values
        values["mb_up"] = values.get("mb_up", 0.0) + answer.sent_up / 1e6
        if answer.empty:
            _add(values, "empty_clients", answer.empty)
        if answer.reducer.dropped:
            dropped = answer.reducer.dropped
            _add(values, "dropped_updates", len(dropped))
            client, why = next(iter(sorted(dropped.items())))
            who = self.engine.name(client)
            events.warnings.append(f"dropped {len(dropped)} update(s): {who}: {why}")
        if answer.losses:
            values["train_loss"] = float(np.mean(answer.losses))
        return answer

    def _count_down(
        self, fed: Federation, cohort: list[int], start: Tensor, down: list[State], events: Events
    ) -> None:
        """The model and the extras to everyone; what a task sends once, to those without it."""
        each = [{"w": start, "b": fed.buffers}]
        once: list[State] = []
        for part, extras in zip(self.method.parts, down, strict=True):
            each.append({k: v for k, v in extras.items() if k not in part.once})
            once.append({k: v for k, v in extras.items() if k in part.once})
        new = [client for client in cohort if client not in fed.informed]
        events.values["mb_down"] = len(cohort) * _megabytes(each) + len(new) * _megabytes(once)
        if any(once):
            fed.informed |= set(new)

    def _count_held(self, fed: Federation, asked: Asked, events: Events) -> None:
        """Memory of the client that holds most: the model it trains, what comes with it, what it
        keeps. Of states that live at sites nothing is known."""
        cohort = events.cohort
        if not cohort or (isinstance(self.stream, Sites) and self.method.needs.client_state):
            return
        sample, parts = self.stream.data.sample_bytes, self.method.parts

        def samples(own: list[State]) -> float:
            return sum(held_bytes(*item, sample) for item in zip(parts, own, strict=True)) / 1e6

        def others(own: list[State]) -> float:
            pairs = zip(parts, own, strict=True)
            return _megabytes(
                [{k: state[k] for k in set(state) - set(p.remembers)} for p, state in pairs]
            )

        known = [fed.clients[i] for i in cohort if i in fed.clients]
        sent = _megabytes([{"w": asked.start, "b": fed.buffers}, *asked.down])
        events.values["client_mb"] = sent + max((samples(o) + others(o) for o in known), default=0)
        if any(part.remembers for part in parts):
            events.values["memory_mb"] = max(map(samples, known), default=0.0)

    def _values(self, fed: Federation, answer: Answer, exchange: Exchange) -> State:
        """The cohort's uploads, reduced as the parts want it."""
        values, reducer, parts = answer.reducer.values(), answer.reducer, self.method.parts
        means = frozenset(key for key, kind in reducer.kinds.items() if kind == "mean")
        for i in self.method.using("aggregate") if reducer.n else ():
            weights = torch.tensor([reducer.weights[client] for client in sorted(reducer.weights)])
            kept = {key: v for key, v in values.items() if reducer.kinds[key] == "stack"}
            single = {key: v for key, v in values.items() if key not in kept}
            values = kept | parts[i].aggregate(single, weights.to(fed.w), means)
        for i in self.method.using("receive") if reducer.n else ():
            chance = torch_seed(self.seed, f"received {exchange}", fed.round)
            values = parts[i].receive(values, reducer.n, means, chance)
        return values

    def _reduced(self, fed: Federation, answer: Answer, values: State) -> list[Reduced]:
        """What each part sees of the cohort's replies."""
        reducer = answer.reducer
        layers = cohort_spread(values, reducer.n, reducer.pieces)
        whole = None if layers is None else (layers @ _shares(reducer.pieces).to(layers)).view(1)
        server = self._server(fed)
        # of sites there may be more than were expected
        new = sum(client not in fed.clients for client in answer.mine)
        population = max(self.stream.clients, len(fed.clients) + new)
        out = []
        for i, part in enumerate(self.method.parts):
            own = {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{i}.")}
            out.append(
                Reduced(
                    own,
                    fed.w,
                    reducer.n,
                    reducer.weight,
                    population,
                    fed.round,
                    self._task(fed),
                    layers if part.layered else whole,
                    values.get("update"),
                    self.method.needs.exchanges,
                    tuple(sorted(answer.mine)),
                    self.ledger.begun - fed.asked,
                    self.ledger.again,
                    server,
                )
            )
        return out

    def _fold(self, fed: Federation, answer: Answer, values: State, events: Events) -> None:
        asked = len(events.cohort) - int(events.values.get("empty_clients", 0))
        step, parts = self.late.step(values["update"], answer.reducer.n, asked), []
        reduced = self._reduced(fed, answer, values)
        for part, state, own in zip(self.method.parts, fed.parts, reduced, strict=True):
            try:
                found = part.fold(state, step, own)
            except EverfedError:
                raise
            except Exception as error:
                raise EverfedError(
                    f"{type(part).__name__}.fold failed in round {fed.round + 1}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if not isinstance(found, tuple) or len(found) != 2 or found[0].shape != step.shape:
                raise EverfedError(
                    f"{type(part).__name__}.fold must give a step, {tuple(step.shape)}, and a state"
                )
            step, state = found
            check_state(part, "fold", state)
            parts.append(state)
        w = fed.w + step
        measured, last = self._meters(fed, answer, values)
        if not torch.isfinite(w.sum()):
            events.values["lost_round"] = 1
            events.warnings.append(
                "the server's step is not finite: the model stays as it was "
                "(a smaller learning rate helps)"
            )
            return
        fed.w, fed.parts, fed.buffers, fed.last = w, parts, values["buffers"], last
        self._keep(fed, answer.late_mine | answer.mine, events)
        events.values |= {"clients": answer.reducer.n} | measured
        for part, state in zip(self.method.parts, parts, strict=True):
            for key, value in part.metrics(state).items():
                if not isinstance(value, Real):
                    raise EverfedError(
                        f"{type(part).__name__}.metrics must give numbers, and {key!r} is {value!r}"
                    )
                events.values[key] = float(value)

    def _meters(
        self, fed: Federation, answer: Answer, values: State
    ) -> tuple[dict[str, float], Tensor]:
        """The round's drift meters, and the mean update that the next round is compared with."""
        reducer, mean = answer.reducer, values["update"]
        if reducer.whole:  # what the clients say, not what a part makes of it
            mean = reducer.mean_of("update").to(fed.w)
        # beside a mean with noise the lengths would say nothing of the spread, or too much
        told = reducer.pieces and reducer.weight and not self.method.using("receive")
        length = reducer.lengths / reducer.weight if told else None
        last = folded(mean.float() if mean.dtype == torch.bfloat16 else mean)
        effective = reducer.weight**2 / reducer.weight_sq if reducer.weight_sq else 0.0
        return meters.of_cohort(mean, length, effective) | meters.turn(last, fed.last), last


def _add(values: dict[str, float], key: str, number: float = 1) -> None:
    values[key] = values.get(key, 0) + number


def _shares(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes, dtype=torch.float64) / sum(sizes)


def _megabytes(states: list[State]) -> float:
    """Size on the wire, as 32-bit numbers."""
    return sum(4 * value.numel() for state in states for value in state.values()) / 1e6
