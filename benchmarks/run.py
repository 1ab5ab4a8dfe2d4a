"""`make bench`: everfed beside the simulators a user would pick instead, in one interleaved run.

Peers live in environments of their own under .bench/ (ignored by git), made on demand. A speed is
the median of the repeats, a ratio is against the best peer of the same run. Writes
docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import scaling

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
BENCH = Path(os.environ.get("EVERFED_BENCH", ROOT / ".bench"))
TORCH = "torch==2.13.0"
#: script, and what its environment installs beside torch
PEERS: dict[str, tuple[str, list[str]]] = {
    "plain PyTorch loop": ("raw.py", []),
    "FedLab": ("fedlab_.py", ["fedlab"]),
    "pfl-research": ("pfl_research.py", ["pfl[pytorch]"]),
    "FedJAX": ("fedjax_.py", ["fedjax"]),
    "Flower simulation": ("flower.py", ["flwr[simulation]>=1.41,<1.43"]),
}
#: seconds of a timed run
SECONDS = {"W1": 5.0, "W2": 4.0, "W3": 8.0}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

Result = dict[str, Any]


def environment(name: str, packages: list[str], loose: list[str] | None = None) -> Path | str:
    """The python of a peer's environment, or why there is none; `loose` packages come without what
    they ask for."""
    folder = BENCH / name.split()[0].lower()
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print(f"installing {name} into {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        wanted = [[TORCH, "numpy", *packages]] + ([["--no-deps", *loose]] if loose else [])
        for some in wanted:
            command = [str(python), "-m", "pip", "install", "-q", *some]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        (folder / ".ready").touch()
    return python


def timed(command: list[Any]) -> Result:
    """The last line of a command's output; if there is none, what went wrong."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env=os.environ | QUIET, timeout=600
        )
    except subprocess.TimeoutExpired:
        return {"skipped": "failed: no answer in 10 minutes"}
    try:
        result: Result = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"skipped": f"failed: {last[:200]}"}
    return result


def peer(name: str, workload: str, threads: int, seconds: float) -> Result:
    """One timed run of a peer."""
    script, packages = PEERS[name]
    python = environment(name, packages)
    if isinstance(python, str):
        return {"skipped": f"cannot be installed: {python}"}
    return timed([python, ROOT / "benchmarks" / "peers" / script, workload, seconds, threads])


def ours(workload: str, precision: str, seconds: float) -> Result:
    """One timed run of everfed, as its users have it."""
    command = [sys.executable, "-m", "everfed", "bench", workload, "--json"]
    return timed([*command, "--seconds", seconds, "--precision", precision])


def best_threads(name: str, workload: str) -> int:
    """The thread setting with which a peer is fastest here."""
    speeds = {
        threads: peer(name, workload, threads, SECONDS[workload] / 2).get("samples_per_second", 0)
        for threads in (1, 2)
    }
    print(f"threads: {name}, {workload}: {speeds}", flush=True)
    return max(speeds, key=lambda threads: speeds[threads])


def interleaved(repeats: int) -> dict[str, dict[str, list[Result]]]:
    """Every system on every workload, one after another, again and again."""
    threads = {(n, w): best_threads(n, w) for n in PEERS for w in SECONDS}

    def turn(workload: str) -> Iterator[tuple[str, Result]]:
        seconds = SECONDS[workload]
        yield "everfed", ours(workload, "float32", seconds)
        if workload == "W3":
            yield "everfed, bf16", ours(workload, "bf16", seconds)
        for name in PEERS:
            yield name, peer(name, workload, threads[name, workload], seconds)

    out: dict[str, dict[str, list[Result]]] = {}
    for repeat in range(repeats):
        for workload in SECONDS:
            for name, result in turn(workload):
                print(f"{repeat + 1}/{repeats} {workload} {name}: {result}", flush=True)
                out.setdefault(name, {}).setdefault(workload, []).append(result)
    return out


def speeds(results: list[Result]) -> list[float]:
    return [r["samples_per_second"] for r in results if "samples_per_second" in r]


def table(runs: dict[str, dict[str, list[Result]]]) -> str:
    """Markdown: medians with the smallest and largest, and the ratio to the best peer."""
    median = {
        (name, w): statistics.median(speeds(own))
        for name, by in runs.items()
        for w, own in by.items()
        if speeds(own)
    }
    best = {
        w: max((v for (n, x), v in median.items() if x == w and n in PEERS), default=float("nan"))
        for w in SECONDS
    }
    lines = ["| | " + " | ".join(SECONDS) + " |", "|---|" + "---:|" * len(SECONDS)]
    for name, by in runs.items():
        cells = []
        for w in SECONDS:
            if (name, w) not in median:
                cells.append("–")
                continue
            own = speeds(by[w])
            text = f"{median[name, w]:,.0f} ({min(own):,.0f}–{max(own):,.0f})"
            if name not in PEERS:
                text += f", **{median[name, w] / best[w]:.2f}x**"
            elif by[w][0].get("threads", 1) > 1:
                text += f", {by[w][0]['threads']} threads"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def missing(runs: dict[str, dict[str, list[Result]]]) -> str:
    """What could not be measured, and why."""
    failed = [
        (name, w, [r["skipped"] for r in own if "skipped" in r], len(own))
        for name, by in runs.items()
        for w, own in by.items()
    ]
    reasons = [
        f"- {name}, {w}, {len(why)} of {turns} turns: {why[0]}"
        for name, w, why, turns in failed
        if why
    ]
    return "\n".join(["Not measured:", "", *reasons]) if reasons else ""


def machine() -> str:
    """Processor, cores and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, {TORCH}"


def rest() -> str:
    """What scaling.py and flower_overhead.py have written on the page."""
    return PAGE.read_text().partition("\n### ")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    runs = interleaved(repeats)
    versions = {
        name: next((r["version"] for own in by.values() for r in own if "version" in r), None)
        for name, by in runs.items()
    }
    head = (ROOT / "benchmarks" / "head.md").read_text()
    text = head.format(
        date=date.today(),
        repeats=repeats,
        machine=machine(),
        versions=", ".join(f"{name} {v}" for name, v in versions.items() if v),
        table=table(runs),
        missing=missing(runs),
    )
    print(text)
    PAGE.write_text(f"{text.rstrip()}\n\n### {rest()}")
    scaling.main(list(scaling.SECTIONS))


if __name__ == "__main__":
    main()
