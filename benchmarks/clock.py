"""What the peers' scripts share: the command line, the timing of rounds, the line of results."""

import json
import os
import sys
import time
from dataclasses import dataclass

from workloads import WORKLOADS

LEAST_ROUNDS, WARM_ROUNDS, WARM_SECONDS = 1, 1, 1.0


def arguments() -> tuple[str, float, int]:
    """The workload, the seconds and the threads asked for; threads also go to the environment."""
    if len(sys.argv) != 4 or sys.argv[1] not in WORKLOADS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(WORKLOADS)} SECONDS THREADS")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = sys.argv[3]
    return sys.argv[1], float(sys.argv[2]), int(sys.argv[3])


@dataclass
class Clock:
    """Counts rounds and samples after a warm-up, until the time is up."""

    seconds: float
    rounds: int = 0
    samples: int = 0
    spent: float = 0.0
    warm: int = 0
    timing: bool = False
    began: float = 0.0

    def tick(self, samples: int) -> bool:
        """To be called after every round with its training samples; true when time is up."""
        now = time.perf_counter()
        if self.timing:
            self.rounds, self.samples = self.rounds + 1, self.samples + samples
            self.spent = now - self.began
            return self.spent >= self.seconds and self.rounds >= LEAST_ROUNDS
        self.warm += 1
        self.began = self.began or now
        if self.warm >= WARM_ROUNDS and now - self.began >= WARM_SECONDS:
            self.timing, self.began = True, time.perf_counter()
        return False

    def report(self, peer: str, version: str, workload: str, threads: int) -> None:
        """Print the results as the last line."""
        line = {
            "peer": peer,
            "version": version,
            "workload": workload,
            "threads": threads,
            "samples_per_second": round(self.samples / self.spent, 1),
            "rounds": self.rounds,
        }
        print(json.dumps(line), flush=True)
