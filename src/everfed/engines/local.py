"""The local engine: a cohort split over one-thread workers on this machine.

The calling process is the first worker; more are forked when a round is worth it. Clients of known
sequences are trained together, as batched products and grouped convolutions, others one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed import metrics
from everfed.client import Ask, ClientProgram, Job
from everfed.compute.base import Seen
from everfed.engines import pool
from everfed.errors import EverfedError
from everfed.method import Part, State
from everfed.reduce import Reducer, reducer

#: seconds of estimated work in a round from which forked workers pay
WORTH = 0.015

ClientStates = dict[int, list[State]]


@dataclass
class Answer:
    """A cohort's reduced reply."""

    reducer: Reducer
    mine: ClientStates  #: new client states
    losses: list[float] = field(default_factory=list)
    empty: int = 0  #: clients without samples
    sent_up: int = 0  #: bytes of uploads
    late: list[State] = field(default_factory=list)  #: replies to earlier rounds, see late.py
    late_mine: ClientStates = field(default_factory=dict)  #: the states that they leave behind


class LocalEngine:
    """Asks clients on this machine."""

    def __init__(self, program: ClientProgram, workers: int) -> None:
        self.program = program
        self.count = workers if pool.available() else 1
        self.workers: list[pool.Worker] = []

    def name(self, client: int) -> str:
        return f"client {client}"

    def describe(self) -> str:
        where = self.program.compute
        plural = "worker" if self.count == 1 else "workers"
        grouping = where.name
        if where.width > 1 and self.program.width == 1:
            grouping = "one client at a time"
        return f"{self.count} {plural} on {where.device.type}, {grouping}"

    def ask(
        self,
        ask: Ask,
        cohort: list[int],
        states: Mapping[int, list[State]],
        again: Callable[[], None] | None = None,
    ) -> Answer:
        """Have every client of the cohort answer, at once, and reduce what they send."""
        make = self.program.job
        jobs = [make(client, ask.round, states.get(client), ask.start) for client in cohort]
        held = [job for job in jobs if len(job.ids)]
        shares = self._shares(held)
        total, *others = self._spread("ask", [(ask, share) for share in shares])
        for other in others:
            total.reducer.merge(other.reducer)
            # what came through shared memory is overwritten by the next request
            total.mine |= {
                client: [{key: value.clone() for key, value in s.items()} for s in own]
                for client, own in other.mine.items()
            }
            total.losses += other.losses
            total.sent_up += other.sent_up
        total.empty = len(jobs) - len(held)
        answer: Answer = total
        return answer

    def online(self, round_: int) -> np.ndarray | None:
        stream = self.program.stream
        found = stream.online(round_)
        if found is not None and len(found):
            low, high = np.min(found), np.max(found)
            if not 0 <= low <= high < stream.clients:
                raise EverfedError(
                    f"{type(stream).__name__}.online gave clients {low} to {high}, and there are "
                    f"{stream.clients}, from 0"
                )
        return found

    def evaluate(
        self,
        w: Tensor,
        buffers: Tensor,
        sets: list[np.ndarray],
        task: int,
        states: Sequence[State] = (),
    ) -> list[dict[str, float]]:
        """Accuracy (share of right answers; NaN without classes) or how well candidates are ranked,
        and the mean loss, on each set."""
        k = max(1, self.count)
        pieces = [[np.array_split(ids, k)[i] for ids in sets] for i in range(k)]
        # only a part that predicts needs its state
        own = {i: states[i] for i in self.program.method.using("predict")}
        results = self._spread("test", [(w, buffers, piece, task, own) for piece in pieces])
        sums = torch.stack([own for own, _ in results]).sum(0).tolist()
        means = [
            (right / len(ids), loss / len(ids))
            for (right, loss), ids in zip(sums, sets, strict=True)
        ]
        lists, y = self.program.data.lists, self.program.data.y
        if lists is None:
            return [{"accuracy": right, "loss": loss} for right, loss in means]
        out = []
        for k, ids in enumerate(sets):
            scores = torch.cat([own[k] for _, own in results]).numpy()
            labels = y[torch.from_numpy(ids)].cpu().numpy()
            out.append(metrics.ranking(scores, labels, lists[ids]) | {"loss": means[k][1]})
        return out

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []

    def _shares(self, jobs: list[Job]) -> list[list[Job]]:
        """Clients to workers, the largest first to the one that would be done first; of equals to
        the last, because the first also has the server's work. Where clients train together, a
        step costs about as much again as one of its clients, however few there are: the longest
        phase of a share, its first, counts twice."""
        shares: list[list[Job]] = [[] for _ in range(self.count)]
        load = [0] * self.count
        together = self.program.width > 1
        for job in sorted(jobs, key=lambda job: (-len(job.ids), job.client)):
            more = [len(job.ids) * (1 + (together and not own)) for own in shares]
            least = min(reversed(range(self.count)), key=lambda k: load[k] + more[k])
            shares[least].append(job)
            load[least] += more[least]
        return shares

    def _spread(self, what: str, requests: list[Any]) -> list[Any]:
        """One request a worker; the first is answered in this process."""
        while len(self.workers) < self.count - 1:
            self.workers.append(pool.Worker(self._answer, self.workers))
        busy = list(zip(self.workers, requests[1:], strict=True))
        for worker, request in busy:
            worker.request((what, request))
        first = self._answer((what, requests[0]))
        return [first] + [worker.result() for worker, _ in busy]

    def _answer(self, message: tuple[str, Any]) -> Any:
        what, request = message
        return self._ask(*request) if what == "ask" else self._test(*request)

    def _ask(self, ask: Ask, jobs: list[Job]) -> Answer:
        method, compute = self.program.method, self.program.compute
        shapes: dict[str, tuple[int, ...]] = {
            "update": (compute.layout.d,),
            "buffers": (compute.buffer_layout.d,),
        }
        answer = Answer(reducer(method, ask.exchange, shapes, compute.layout), {})
        for reply in self.program.run(ask, jobs):
            clients = [job.client for job in reply.jobs]
            rows = answer.reducer.add(clients, method.screen(reply.uploads), reply.weights)
            losses = reply.loss.tolist()
            for row in rows:
                answer.mine[clients[row]] = reply.mine[row]
                answer.losses += [losses[row]] if losses[row] == losses[row] else []
            answer.sent_up += sum(4 * value.numel() for value in reply.uploads.values())
        return answer

    def _test(
        self,
        w: Tensor,
        buffers: Tensor,
        sets: list[np.ndarray],
        task: int,
        states: Mapping[int, State],
    ) -> tuple[Tensor, list[Tensor]]:
        """Right answers and summed losses, (sets, 2); and where candidates are ranked, the scores
        of each set's samples."""
        p = self.program
        p.compute.load_buffers(buffers)
        # without a way back twice as many samples fit
        objective, batch = p.objective(task, new=False), 2 * p.at_once
        out = torch.zeros(len(sets), 2, dtype=torch.float64)
        scores = [torch.zeros(len(ids)) for ids in sets if p.data.lists is not None]
        for row, ids in enumerate(sets):
            for k in range(0, len(ids), batch):
                x, y = p.data.take(torch.from_numpy(ids[k : k + batch]), w.dtype)
                z = p.compute.logits(w, x)
                out[row, 1] += objective(z[None], x[None], y[None]).sum().double().cpu()
                if scores:  # of label 1 beside label 0, or of the only output
                    score = z[..., -1] - z[..., 0] if z.shape[-1] > 1 else z[..., 0]
                    scores[row][k : k + len(y)] = score.cpu()
                if y.is_floating_point() or z.shape[:-1] != y.shape or z.shape[-1] < 2:
                    out[row, 0] = torch.nan  # not a choice among classes
                    continue
                for i, state in states.items():
                    z = self._predicted(p.method.parts[i], state, w, x)
                mask = p.stream.mask(y, task)
                z = z if mask is None else z.masked_fill(~mask, -torch.inf)
                right = z.argmax(-1) == y
                out[row, 0] += right.view(len(y), -1).double().mean(1).sum().cpu()
        return out, scores

    @torch.no_grad()
    def _predicted(self, part: Part, state: State, w: Tensor, x: Tensor) -> Tensor:
        def forward(v: Tensor) -> Seen:
            return self.program.compute.forward(v, x, train=False)

        return part.predict(state, forward(w), forward)


def workers_for(program: ClientProgram, cohort: int) -> int:
    """How many workers a round is worth: a fixed estimate, so that a run repeats exactly."""
    if not pool.available() or program.compute.device.type != "cpu" or cohort < 2:
        return 1
    stream, local = program.stream, program.local
    some = np.linspace(0, stream.clients - 1, min(stream.clients, 8)).astype(int)
    size = float(np.mean([len(stream.samples(int(client), 0)) for client in some]))
    steps = local.steps or local.epochs * max(1.0, size / local.batch)
    samples = min(steps * local.batch, steps * size)
    per_step = 3e-4 / program.width + samples / max(steps, 1) * _flops(program) / 3e10
    return min(pool.cores(), cohort) if cohort * steps * per_step > WORTH else 1


def _flops(program: ClientProgram) -> float:
    """Floating-point operations of training on one sample."""
    from torch.utils.flop_counter import FlopCounterMode

    x, _ = program.data.take(torch.as_tensor(program.data.train[:1]), program.compute.dtype)
    with FlopCounterMode(display=False) as counter:
        program.compute.logits(program.compute.weights(), x)
    return 3.0 * float(counter.get_total_flops())
