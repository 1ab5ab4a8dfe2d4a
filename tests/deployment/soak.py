"""`make soak`: a long run in which processes are killed at random, from a seed.

All three sites must have answered in every round, so that however much is killed, the model must be
that of the undisturbed run to the last bit, and every round recorded once. This program is also the
operator: it submits the run again when the ServerApp is dead, and restarts a site's node when the
site has been silent for long.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deployment.federation import Federation, Run, model
from deployment.sites import CONFIG, DATA, reference
from everfed.records import read_records

SITES = ("0", "1", "2")
KINDS = ("node", "ClientApp", "ServerApp", "link")
#: rounds between two kills, and seconds into a round at which the next one comes
ROUNDS, SECONDS = (3, 8), (0.0, 6.0)
#: seconds in which a site's ClientApp is waited for, to be killed
CHANCE = 5.0
#: seconds without a new round after which the operator restarts the nodes
SILENCE = 180.0
#: seconds in which a submitted run begins, unless what should launch it was killed
LAUNCH = 60.0


class Soak:
    """One federation, one run, and what was done to it."""

    def __init__(self, federation: Federation, rounds: int, seed: int) -> None:
        self.federation, self.random = federation.start(*SITES), random.Random(seed)
        self.changes = (f"stream.rounds=[{rounds}]", "flower.deadline=60", "flower.retries=20")
        self.app = self.federation.app("sites", CONFIG, DATA)
        self.rounds, self.runs = rounds, list[Run]()
        self.kills: Counter[str] = Counter()
        self.deck = list[str]()  #: what is killed next, the last first
        self.restarts = 0  #: of nodes, by the operator
        self.submit()

    def submit(self) -> None:
        self.runs.append(self.app.submit("soak", *self.changes))
        self.submitted = time.monotonic()

    @property
    def run(self) -> Run:
        return self.runs[-1]

    def kill(self) -> str:
        """Kill something; what it was."""
        if not self.deck:
            self.deck = self.random.sample(KINDS, len(KINDS))
        what, site = self.deck[-1], self.random.choice(SITES)
        if what == "node":
            self.federation.kill_node(site)
        elif what == "ClientApp" and not self.kill_client_app(site):
            return ""
        elif what == "ServerApp":
            self.federation.kill_server_app()
        elif what == "link":
            self.federation.kill_link()
        self.kills[self.deck.pop()] += 1
        return f"{what} {site}" if what in ("node", "ClientApp") else what

    def kill_client_app(self, site: str) -> bool:
        """Kill a site's next ClientApp: it lives for a second or two."""
        until = time.monotonic() + CHANCE
        while time.monotonic() < until:
            if self.federation.kill_client_app(site):
                return True
            time.sleep(0.05)
        return False

    def play(self, minutes: float) -> None:
        """Kill until the rounds are done or the time is up."""
        began = moved = time.monotonic()
        done, strikes, after = 0, 1, 0.0
        while not self.run.done() and time.monotonic() < began + 60 * minutes:
            time.sleep(1)
            now = time.monotonic()
            if (rounds := self.run.rounds()) != done:
                done, moved = rounds, now
                self.tell(began, f"round {done} of {self.rounds}")
            if done >= strikes and now > moved + after and (what := self.kill()):
                self.tell(began, f"killed: {what}")
                strikes = done + self.random.randint(*ROUNDS)
                after = self.random.uniform(*SECONDS)
            if self.dead():
                self.submit()
                self.tell(began, "submitted again")
            if now > moved + SILENCE:
                for site in SITES:
                    self.federation.kill_node(site)
                self.restarts, moved = self.restarts + len(SITES), now
                self.tell(began, f"no new round for {SILENCE:g} s: all nodes restarted")

    def dead(self) -> bool:
        """Whether there is no ServerApp, and none will come."""
        if self.federation.pids("flwr-serverapp") or self.run.done():
            return False
        return self.run.began() or time.monotonic() > self.submitted + LAUNCH

    def tell(self, began: float, text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    def verdict(self) -> list[str]:
        """What is wrong with the run; nothing, if all is well."""
        self.federation.kill_server_app()
        place = self.run.place
        newest = max((place / "checkpoints").glob("*.safetensors"))
        rounds = int(newest.stem)
        wrong = []
        recorded = [r["round"] for r in read_records(place)[0] if r["metric"] == "seconds"]
        if recorded[:rounds] != list(range(rounds)):
            wrong.append(f"rounds are lost or doubled: {recorded}")
        if set(self.run.values("clients")) != {float(len(SITES))}:
            wrong.append(f"not all clients in every round: {self.run.values('clients')}")
        expected = reference(self.app, self.federation.folder, *self.changes, rounds=rounds)
        if not np.array_equal(model(place), expected):
            wrong.append("the model is not that of the undisturbed run")
        said = " ".join(run.said() for run in self.runs)
        kills = ", ".join(f"{count} {what}" for what, count in sorted(self.kills.items()))
        print(
            f"{rounds} of {self.rounds} rounds; killed: {kills or 'nothing'}; "
            f"{len(self.runs)} submissions; {said.count('; again')} exchanges asked again; "
            f"{self.restarts} nodes restarted by hand; "
            f"{sum(self.run.values('dropped_updates')):g} replies dropped"
        )
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)  # of the reference in this process
    with tempfile.TemporaryDirectory(prefix="everfed-soak-") as folder:
        federation = Federation(Path(folder), warmed=True)
        try:
            soak = Soak(federation, options.rounds, options.seed)
            soak.play(options.minutes)
            wrong = soak.verdict()
        finally:
            federation.stop()
    print("\n".join(wrong) or "the model is that of the undisturbed run, every round recorded once")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
