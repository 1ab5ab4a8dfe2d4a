"""Any method on Flower: the same rounds in a ServerApp, the same client program in a ClientApp."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from everfed import config as configs
from everfed.client import Ask, ClientProgram
from everfed.engines import secure
from everfed.engines.inbox import Inbox
from everfed.engines.local import Answer, LocalEngine
from everfed.engines.log import one_line, reason
from everfed.engines.roll import Roll
from everfed.engines.site import (
    NONE,
    STAGES,
    Samples,
    Site,
    Store,
    rehearsed,
    run_folder,
    run_name,
)
from everfed.engines.terms import Pace, Terms
from everfed.engines.wire import Opened, open_reply, unwrap, vectors, whole, wrap, wrap_reply
from everfed.errors import EverfedError
from everfed.late import held
from everfed.method import Method, State
from everfed.reduce import Reducer, kinds, pieces, reducer
from everfed.runs import Progress, run, surroundings
from everfed.streams.sites import tested


# the server ----------------------------------------------------------------------------------
@dataclass
class FlowerEngine:
    """Asks the sites of a Flower federation; tests on the server's own samples."""

    program: ClientProgram
    grid: Grid
    terms: Terms
    run: str  #: the name of the run at the sites
    folder: Path
    #: messages whose answers missed the deadline and may still come: client and request
    owed: dict[str, tuple[int, Ask]] = field(default_factory=dict)
    #: such answers that have come, until a train exchange takes them: client -> what it was asked
    late: dict[int, tuple[Opened, Ask]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tester = LocalEngine(self.program, 1)
        self.roll = Roll(self.grid, self.terms)
        self.pace = Pace(self.terms.every, self.folder / "begun")
        self.replies = Inbox(self.grid, self.terms.poll)

    def name(self, client: int) -> str:
        return self.roll.name(client)

    def describe(self) -> str:
        return f"Flower, {len(self.roll.nodes)} sites"

    def close(self) -> None:
        self.tester.close()

    def evaluate(
        self,
        w: Tensor,
        buffers: Tensor,
        sets: list[np.ndarray],
        task: int,
        states: Sequence[State] = (),
    ) -> list[dict[str, float]]:
        return self.tester.evaluate(w, buffers, sets, task, states)

    # who is there ----------------------------------------------------------------------------
    def online(self, round_: int) -> np.ndarray:
        """The sites that are connected, once there are enough of them; of those, the ones that the
        stream has online and that do not owe an answer. Where all do, it is given up."""
        self.pace.wait(round_)
        oldest = round_ - self.terms.late
        self.owed = {sent: own for sent, own in self.owed.items() if own[1].round >= oldest}
        until = time.monotonic() + self.terms.wait
        told = False
        while True:
            here = self.roll.greet()
            if len(here) >= self.terms.sites:
                planned = self.program.stream.online(round_)
                there = here if planned is None else here & set(np.asarray(planned).tolist())
                free = there - {client for client, _ in self.owed.values()} - set(self.late)
                if there and not free:
                    self.owed, self.late, free = {}, {}, there
                return np.array(sorted(free), dtype=np.int64)
            if time.monotonic() > until:
                raise EverfedError(
                    f"round {round_ + 1}: {len(here)} of at least {self.terms.sites} sites are "
                    f"connected after {self.terms.wait:g} s; the run can be resumed"
                )
            if not told:
                log(INFO, f"waiting for sites: {len(here)} of at least {self.terms.sites}")
                told = True
            time.sleep(self.terms.poll)

    # asking ----------------------------------------------------------------------------------
    def ask(
        self,
        ask: Ask,
        cohort: list[int],
        states: Mapping[int, list[State]],
        again: Callable[[], None],
    ) -> Answer:
        """Ask until enough clients have answered; reduce in the order of their ids."""
        if self.terms.secure:
            return self._masked(ask, cohort, states)
        need = max(1, math.ceil(self.terms.quorum * len(cohort)))
        good: dict[int, Opened] = {}
        bad: dict[int, str] = {}
        silent: dict[int, str] = {}
        waiting: dict[str, int] = {}
        for attempt in range(self.terms.retries + 1):
            missing = [client for client in cohort if client not in good and client not in bad]
            if not missing or (attempt and len(good) >= need):
                break
            if attempt:
                log(WARNING, f"round {ask.round + 1}: {self._short(good, cohort, silent)}; again")
                self._await(missing, need - len(good))
                again()
            silent, waiting = self._exchange(ask, missing, states, good, bad)
        if len(good) < need:
            raise EverfedError(
                f"round {ask.round + 1}, {ask.exchange}: "
                f"{self._short(good, cohort, silent | bad)}, "
                f"and {need} are the quorum; the run can be resumed"
            )
        answer = self._reduced(ask, good, silent | bad)
        if self.terms.late and ask.exchange == "train":
            self.owed |= {sent: (client, ask) for sent, client in waiting.items()}
            for client, (reply, own) in sorted(self.late.items()):
                one = self._reduced(own, {client: reply}, {})
                if one.reducer.n:
                    at = (client, own.round, ask.round, own.task)
                    answer.late.append(held(*at, one.reducer))
                    answer.late_mine |= one.mine
            self.late = {}
        return answer

    def _await(self, clients: list[int], count: int) -> None:
        """Give clients that are away time to come back: a dead node's error comes at once."""
        until = time.monotonic() + self.terms.deadline
        while len(self.roll.greet() & set(clients)) < count and time.monotonic() < until:
            time.sleep(self.terms.poll)

    def _short(self, good: Mapping[int, Any], cohort: list[int], why: Mapping[int, str]) -> str:
        some = sorted(why.items())[:3]
        reasons = "; ".join(f"{self.name(client)}: {text}" for client, text in some)
        return f"{len(good)} of {len(cohort)} clients have answered ({reasons})"

    def _exchange(
        self,
        ask: Ask,
        clients: list[int],
        states: Mapping[int, list[State]],
        good: dict[int, Opened],
        bad: dict[int, str],
    ) -> tuple[dict[int, str], dict[str, int]]:
        """One request to each client; fills `good`, `bad` and, with answers to earlier rounds,
        `self.late`, and gives who did not answer, and the messages that have no answer yet."""
        waiting: dict[str, int] = {}
        silent: dict[int, str] = {}
        shared = vectors(ask)
        kind, group = f"train.{ask.exchange}", str(ask.round)
        messages = []
        for client in clients:
            content = wrap(ask, self.run, _token(states.get(client)), shared)
            messages.append(
                Message(content, self.roll.nodes[client], kind, ttl=self.terms.life, group_id=group)
            )
        # together, so that Flower hashes and sends what they share once
        for client, sent in zip(clients, self.grid.push_messages(messages), strict=True):
            if sent:
                waiting[sent] = client
            else:
                silent[client] = "is not connected"
        until = time.monotonic() + self.terms.deadline
        while waiting and time.monotonic() < until:
            for reply in self.replies.look({**waiting, **self.owed}):
                to = reply.metadata.reply_to_message_id
                if to in self.owed:
                    self._take_late(reply, *self.owed.pop(to))
                    continue
                client = waiting.pop(to, NONE)
                if client == NONE:
                    continue
                if reply.has_error():
                    silent[client] = reason(reply.error)
                    continue
                try:
                    good[client] = open_reply(reply.content, ask, *self._expected(ask))
                except ValueError as error:
                    bad[client] = f"its reply {error}"
            self.roll.hear(set(self.roll.nodes.values()))  # an answer expires like any other
            if waiting:
                time.sleep(self.terms.poll)
        none = f"no answer in {self.terms.deadline:g} s"
        return silent | dict.fromkeys(waiting.values(), none), waiting

    def _take_late(self, reply: Message, client: int, ask: Ask) -> None:
        """An answer to an earlier round; one that cannot be used is no more than one that never
        came."""
        if reply.has_error():
            log(WARNING, f"{self.name(client)}, late: {reason(reply.error)}")
            return
        try:
            self.late[client] = open_reply(reply.content, ask, *self._expected(ask)), ask
        except ValueError as error:
            log(WARNING, f"{self.name(client)}, late: its reply {error}")

    def _expected(self, ask: Ask) -> tuple[dict[str, int], set[str]]:
        shapes = {"update": len(ask.start), "buffers": len(ask.buffers)}
        return shapes, set(kinds(self.program.method, ask.exchange))

    def _reducer(self, ask: Ask) -> Reducer:
        shapes: dict[str, tuple[int, ...]] = {k: (n,) for k, n in self._expected(ask)[0].items()}
        return reducer(self.program.method, ask.exchange, shapes, self.program.compute.layout)

    def _reduced(self, ask: Ask, good: Mapping[int, Opened], lost: dict[int, str]) -> Answer:
        method = self.program.method
        answer = Answer(self._reducer(ask), {})
        forms = Counter(_form(reply) for reply in good.values() if not reply.empty)
        most = max(forms, key=lambda form: forms[form], default=())
        for client, reply in sorted(good.items()):
            self._tell_lost(client, reply.lost)
            if reply.empty:
                answer.empty += 1
                continue
            if _form(reply) != most:  # a mean over some of those that count would be none
                answer.reducer.dropped[client] = "its uploads are not those of the others"
                continue
            uploads = {key: value.to(ask.start)[None] for key, value in reply.uploads.items()}
            uploads = method.screen(uploads)
            weight = 1.0 if method.average == "uniform" else reply.weight
            if answer.reducer.add([client], uploads, torch.tensor([weight])):
                answer.mine[client] = _state(reply.token, method)
                answer.losses += [reply.loss] if math.isfinite(reply.loss) else []
            answer.sent_up += sum(4 * value.numel() for value in uploads.values())
        answer.reducer.dropped |= lost
        return answer

    def _tell_lost(self, client: int, lost: bool) -> None:
        if lost:
            log(WARNING, f"{self.name(client)} has lost its state and begins anew")

    def _masked(self, ask: Ask, cohort: list[int], states: Mapping[int, list[State]]) -> Answer:
        """Ask so that only the sum of all uploads is seen."""
        if len(cohort) > secure.MOST:
            raise EverfedError(
                f"a masked sum is of {secure.MOST} clients at most, and {len(cohort)} were drawn: "
                "lower sample"
            )
        shared = vectors(ask)
        answer = Answer(self._reducer(ask), {})
        for attempt in range(self.terms.retries + 1):
            if attempt:
                log(WARNING, f"round {ask.round + 1}: too few for a masked sum; again")
                self.roll.greet()  # a site may have come back as another node
            clients = {self.roll.nodes[client]: client for client in cohort}
            contents = {
                node: wrap(ask, self.run, _token(states.get(client)), shared)
                for node, client in clients.items()
            }
            results = secure.play(self.grid, contents, ask.round, self.terms)
            if results:
                break
        else:
            raise EverfedError(
                f"round {ask.round + 1}, {ask.exchange}: too few of {len(cohort)} clients for a "
                "masked sum; the sites' logs may say why, and the run can be resumed"
            )
        secure.fill(answer.reducer, results, ask.start, self.terms.range)
        for node, result in results.items():
            token = whole(result.metrics["token"])
            self._tell_lost(clients[node], result.metrics["lost"] is True)
            answer.mine[clients[node]] = _state(token, self.program.method)
        sent = sum(4 * value.numel() for value in answer.reducer.sums.values())
        answer.sent_up = sent * answer.reducer.n
        missing = set(cohort) - set(answer.mine)
        answer.reducer.dropped |= dict.fromkeys(missing, "is not in the masked sum")
        return answer


def _form(reply: Opened) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What a reply uploads, but for the numbers."""
    return tuple((key, tuple(value.shape)) for key, value in sorted(reply.uploads.items()))


def _token(state: list[State] | None) -> int:
    """What the server keeps of a client: the token of its state, in the place of the state."""
    return int(state[0]["token"]) if state and "token" in state[0] else NONE


def _state(token: int, method: Method) -> list[State]:
    out: list[State] = [{} for _ in method.parts]
    if out and token != NONE:
        out[0]["token"] = torch.tensor([token])
    return out


# the apps ------------------------------------------------------------------------------------
def _made(path: Path, context: Context) -> configs.Experiment:
    """The app's configuration, with what `flwr run --run-config 'set="..."'` changes."""
    changes = str(context.run_config.get("set", "")).split(";")
    return configs.experiment(configs.read(path, [c for c in changes if c.strip()]))


def _secret(path: Path, context: Context) -> bool:
    """Whether a site gives masked uploads only: by its app's file or its SuperNode, whatever the
    one who starts a run has set."""
    mine = context.node_config.get("secure", False)
    if not isinstance(mine, bool):
        raise EverfedError(f"--node-config: secure must be true or false, not {mine!r}")
    return mine or configs.read(path, []).flower.secure


def server_app(config: str | Path, tests: Callable[[], Any] | None = None) -> ServerApp:
    """A ServerApp that runs a configuration's method; `tests` gives inputs and labels of every
    task to test on, where the data live at the sites."""
    one_line()
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        made = _made(Path(config), context)
        terms = made.terms
        stream = made.stream if tests is None else tested(made.stream, tests())
        folder = Path(str(context.run_config.get("folder", terms.folder))).expanduser()

        if terms.secure:
            secure.check(made.method)
            if terms.late or made.options["late"].chance:
                raise EverfedError("a masked sum is of answers that come together: leave out late")

        def engine(program: ClientProgram) -> FlowerEngine:
            return FlowerEngine(program, grid, terms, run_name(folder), folder)

        def tell(p: Progress) -> None:
            accuracy = "" if p.accuracy is None else f", accuracy {100 * p.accuracy:.1f} %"
            log(INFO, f"round {p.round} of {p.rounds}, {p.task}{accuracy}")
            for text in p.warnings:
                log(WARNING, text)

        begun = (folder / "config.json").exists()
        if begun:
            log(INFO, f"going on with the run in {folder}")
        options = made.options | {"checkpoint_seconds": 0.0}
        done = run(
            made.method, stream, made.model, **options, folder=folder, resume=begun,
            on_round=tell, engine=engine,
        )  # fmt: skip
        log(INFO, f"finished after {stream.rounds} rounds; the run is in {folder}: {done.engine}")

    return app


def client_app(config: str | Path, samples: Samples | None = None) -> ClientApp:
    """A ClientApp that answers with what `samples` gives for its site; without it, a rehearsal on
    the configuration's own stream.

    A site's name is `site` in the SuperNode's --node-config (in simulations the partition's
    number); `store` there is the folder of its state, `store-key` a file with a key to encrypt it.
    """
    one_line()
    app = ClientApp(mods=[secaggplus_mod])

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        said = ConfigRecord({"name": _site(context)})
        return Message(RecordDict({"site": said}), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        made, name = _made(Path(config), context), _site(context)
        with surroundings():
            local, seed = made.options["local"], made.options["seed"]
            boundaries = made.options["boundaries"]
            method, announced = boundaries.watching(made.method), not boundaries.found
            ask, run, token = unwrap(message.content)
            stream, store = made.stream.seeded(seed), _store(context, made.terms, name, run)
            held = samples or partial(rehearsed, stream)
            site = Site(name, method, stream, made.model, local, seed, held, store, announced)
            answered, masked = site.answer(ask, token), message.metadata.message_type == "train"
            if masked:
                needed = any(part.spread for part in method.parts)
                cut = pieces(method, answered.layout) if ask.exchange == "train" else ()
                content = secure.wrap_masked(answered, cut, made.terms.range, needed)
            elif _secret(Path(config), context):
                raise EverfedError("uploads are only given masked: flower.secure is true")
            else:
                content = wrap_reply(ask, answered)
            return Message(content, reply_to=message)

    for exchange in STAGES:
        app.train(exchange)(answer)
    app.train()(answer)  # what Flower's mod masks
    return app


def _site(context: Context) -> str:
    known = context.node_config
    name = known.get("site", known.get("partition-id"))
    if name is None:
        raise EverfedError("start the SuperNode with --node-config 'site=\"name of the site\"'")
    return str(name)


def _store(context: Context, terms: Terms, name: str, run: str) -> Store:
    place = str(context.node_config.get("store", os.environ.get("EVERFED_STORE", terms.store)))
    key = context.node_config.get("store-key")
    text = Path(str(key)).expanduser().read_text().strip() if key is not None else None
    return Store(run_folder(Path(place).expanduser() / terms.name / name, run), text)
