"""Runs survive: kills at any moment, damaged files, full disks, Ctrl-C."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import everfed as ef
from conformance import ROWS
from everfed.disk import unpack
from everfed.errors import EverfedError
from everfed.folder import RunFolder
from test_conformance import run, small, timeless

FORK = mp.get_context("fork")


def killed_after(seconds, target):
    """Run `target` in a process of its own and SIGKILL it; whether it was still alive."""
    process = FORK.Process(target=target)
    process.start()
    process.join(seconds)
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return alive


@pytest.mark.parametrize("name", list(ROWS))
def test_kill_at_random_moments(name, digits, tmp_path):
    """Real processes, killed three times wherever they happen to be, then finished."""
    options = {"folder": tmp_path / "run", "checkpoint_seconds": 0}
    began = time.perf_counter()
    whole = run(small(name), digits)
    duration = time.perf_counter() - began
    chance = random.Random()
    for _ in range(3):
        begun = (tmp_path / "run" / "config.json").exists()
        go = lambda begun=begun: run(small(name), digits, resume=begun, **options)  # noqa: E731
        if not killed_after(chance.uniform(0.02, 0.6 * duration + 0.05), go):
            break
    begun = (tmp_path / "run" / "config.json").exists()
    again = run(small(name), digits, resume=begun, **options)
    assert torch.equal(again.vector, whole.vector)
    assert timeless(again.records) == timeless(whole.records)
    assert timeless(RunFolder(tmp_path / "run").records()) == timeless(whole.records)
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_kill_with_two_workers(digits, tmp_path):
    """The workers of a killed run end too, and the folder can be taken up again."""
    method = ef.methods.scaffold()
    options = {"folder": tmp_path / "run", "checkpoint_seconds": 0, "workers": 2, "rounds": 40}

    def die(progress):
        if progress.round == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=lambda: run(method, digits, on_round=die, **options))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again = run(method, digits, resume=True, **options)
    whole = run(method, digits, workers=2, rounds=40)
    assert torch.equal(again.vector, whole.vector)


def stopped_half_way(digits, folder, method=None):
    """A run that crashed after its fourth round, with a checkpoint of every round."""

    def crash(progress):
        if progress.round == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run(
            method or ef.methods.scaffold(), digits, folder=folder, checkpoint_seconds=0,
            on_round=crash,
        )  # fmt: skip
    return sorted((folder / "checkpoints").iterdir())


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
@pytest.mark.parametrize("what", ["server", "client"])
def test_a_damaged_checkpoint_falls_back(digits, tmp_path, damage, what):
    checkpoints = stopped_half_way(digits, tmp_path)
    assert [path.stem for path in checkpoints] == ["00000003", "00000004"]
    path = checkpoints[-1] if what == "server" else next((tmp_path / "clients").glob("*-4.*"))
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[-5] ^= 0xFF
    path.write_bytes(raw[: {"truncate": len(raw) // 2, "flip": len(raw), "empty": 0}[damage]])
    again = run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True)
    assert any("00000004" in note and "damaged" in note for note in again.notes)
    whole = run(ef.methods.scaffold(), digits)
    assert torch.equal(again.vector, whole.vector)
    assert timeless(again.records) == timeless(whole.records)


def test_beginning_anew_is_told_at_once_and_keeps_the_old_records(digits, tmp_path):
    """Killed before its first checkpoint, twice."""
    for path in stopped_half_way(digits, tmp_path):
        path.unlink()
    before, told = (tmp_path / "records.jsonl").read_text(), []
    options = {"folder": tmp_path, "resume": True, "on_round": told.append}
    run(ef.methods.scaffold(), digits, **options)
    assert any("starting from the first round" in warning for warning in told[0].warnings)
    assert not told[1].warnings
    assert (tmp_path / "records.jsonl.before").read_text() == before


def test_a_damaged_client_state_costs_that_client_only(digits, tmp_path):
    """One that both checkpoints refer to: the run goes on where it was, and once more after that."""
    metas = [unpack(p.read_bytes())[1] for p in stopped_half_way(digits, tmp_path)]
    client, round_ = min(set(metas[0]["clients"].items()) & set(metas[1]["clients"].items()))
    (tmp_path / "clients" / f"{client}-{round_}.safetensors").write_bytes(b"")
    told = []

    def crash(progress):
        told.append((progress.round, progress.warnings))
        if progress.round == 5:
            raise RuntimeError

    options = {"folder": tmp_path, "resume": True, "checkpoint_seconds": 0, "on_round": crash}
    with pytest.raises(RuntimeError):
        run(ef.methods.scaffold(), digits, **options)
    again = run(ef.methods.scaffold(), digits, **options)
    anew = f"the state of client {client} is damaged: it begins anew"
    assert told == [(5, (anew,)), (6, ())]
    whole = run(ef.methods.scaffold(), digits)
    assert timeless(again.records)[:20] == timeless(whole.records)[:20]


def test_fallback_after_two_saves_in_one_round(digits, tmp_path):
    """The last round is saved by the clock and at the end: the older checkpoint stays whole."""
    run(ef.methods.scaffold(), digits, folder=tmp_path, checkpoint_seconds=0)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    again = run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True)
    assert len(again.notes) == 1
    assert "00000006" in again.notes[0]
    assert torch.equal(again.vector, run(ef.methods.scaffold(), digits).vector)
    assert newest.with_suffix(".damaged").exists()  # set aside, not thrown away


def test_looking_changes_nothing(digits, tmp_path):
    stopped_half_way(digits, tmp_path)
    before = sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    assert not RunFolder(tmp_path).done()
    assert sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def test_other_data_or_workers_are_noticed(digits, tmp_path):
    stopped_half_way(digits, tmp_path)
    other = ef.data.digits(["plain", "inverted"])
    other.y[:50] = 0
    with pytest.raises(EverfedError, match="another data"):
        run(ef.methods.scaffold(), other, folder=tmp_path, resume=True)
    again = run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True, workers=2)
    assert "begun with 1 worker" in again.notes[0]


def test_a_foreign_folder_is_refused(digits, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(EverfedError, match="holds other files"):
        run(ef.methods.fedavg(), digits, folder=tmp_path)


def test_without_any_whole_checkpoint_nothing_is_thrown_away(digits, tmp_path):
    """Months of a run are not begun anew for two damaged files: it says so, again and again."""
    for path in stopped_half_way(digits, tmp_path):
        path.write_bytes(b"nonsense")
    before = sorted((p.name, p.stat().st_size) for p in tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(EverfedError, match=r"no checkpoint of .* is whole"):
            run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True)
    assert sorted((p.name, p.stat().st_size) for p in tmp_path.rglob("*")) == before


def test_deleted_checkpoints_are_begun_anew(digits, tmp_path):
    stopped_half_way(digits, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    again = run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True)
    assert timeless(again.records) == timeless(run(ef.methods.scaffold(), digits).records)
    assert (tmp_path / "records.jsonl.before").read_text()


def test_half_written_records_are_cut(digits, tmp_path):
    stopped_half_way(digits, tmp_path)
    with open(tmp_path / "records.jsonl", "a") as file:
        file.write('{"round": 4, "metric": "acc')
    again = run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True)
    assert timeless(again.records) == timeless(run(ef.methods.scaffold(), digits).records)
    for line in (tmp_path / "records.jsonl").read_text().splitlines():
        json.loads(line)


def test_old_client_states_are_removed(digits, tmp_path):
    run(ef.methods.scaffold(), digits, rounds=12, folder=tmp_path, checkpoint_seconds=0)
    assert len(list((tmp_path / "clients").iterdir())) <= 2 * 5
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_records_say_what_clients_held(digits, tmp_path):
    """Label counts of each round's cohort are those of the stream."""
    stream = ef.streams.domains(digits, clients=5, alpha=0.5, rounds=3, seed=1)
    model = ef.models.mlp(64, 8, 10)
    result = ef.run(ef.methods.fedavg(), stream, model, sample=2, seed=3)
    found = [r for r in result.records if r["metric"] == "labels"]
    assert [r["round"] for r in found] == list(range(6))
    for r in found:
        clients, whole = r["value"]["clients"], r["value"]["all"]
        assert len(clients) == 2
        for client, counts in clients.items():
            ids = stream.samples(int(client), r["round"])
            assert sum(counts.values()) == len(ids)
            assert counts == {str(c): int((digits.y[ids] == c).sum()) for c in map(int, counts)}
        for c in whole:
            assert whole[c] == sum(own.get(c, 0) for own in clients.values())


def test_cflag_counts_transference_and_interference(digits):
    result = run(ef.methods.cflag(lipschitz=1.0), digits)
    by = {}
    for r in result.records:
        by.setdefault(r["metric"], {})[r["round"]] = r["value"]
    memory = [t for t in by["clients"] if t >= 3]  # from the second task on
    assert sorted(by["gamma"]) == sorted(by["transference"]) == memory
    for t in memory:
        assert by["transference"][t] + by["interference"][t] == by["clients"][t]


def test_a_folder_is_never_written_over(digits, tmp_path):
    run(ef.methods.fedavg(), digits, folder=tmp_path)
    with pytest.raises(EverfedError, match="holds a run already"):
        run(ef.methods.fedavg(), digits, folder=tmp_path)
    with pytest.raises(EverfedError, match="another method"):
        run(ef.methods.fedprox(), digits, folder=tmp_path, resume=True)
    with pytest.raises(EverfedError, match="another seed"):
        run(ef.methods.fedavg(), digits, folder=tmp_path, resume=True, seed=1)
    with pytest.raises(EverfedError, match="not a run's folder"):
        run(ef.methods.fedavg(), digits, folder=tmp_path / "none", resume=True)


def test_a_folder_that_cannot_be_made(digits, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EverfedError, match="cannot be written"):
        run(ef.methods.fedavg(), digits, folder=tmp_path / "file" / "run")


def test_two_processes_cannot_run_one_folder(digits, tmp_path):
    stopped_half_way(digits, tmp_path)
    held = RunFolder.open(tmp_path)
    with pytest.raises(EverfedError, match="another process"):
        run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True)
    held.close()
    run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True)


def test_a_disk_that_fills_up(digits, tmp_path):
    """A limit on file sizes stands in for the disk: it fails in the same call in the same way."""

    def go():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        try:
            run(ef.methods.scaffold(), digits, folder=tmp_path / "run", checkpoint_seconds=0)
        except EverfedError as error:
            (tmp_path / "said").write_text(str(error))

    process = FORK.Process(target=go)
    process.start()
    process.join()
    assert "is full" in (tmp_path / "said").read_text()
    assert not list((tmp_path / "run").rglob("*.tmp"))
    again = run(ef.methods.scaffold(), digits, folder=tmp_path / "run", resume=True)
    assert torch.equal(again.vector, run(ef.methods.scaffold(), digits).vector)


def test_results_do_not_depend_on_workers_after_a_resume(digits, tmp_path):
    """A run keeps the number of workers it was begun with."""
    stopped_half_way(digits, tmp_path)
    again = run(ef.methods.scaffold(), digits, folder=tmp_path, resume=True, workers="auto")
    assert again.engine.startswith("1 worker")


# the command line ---------------------------------------------------------------------------------
def everfed(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "everfed", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def wait_for(path, lines):
    for _ in range(600):
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not grow")


LONG = ["--set", "stream.rounds=60", "--set", "checkpoint_seconds=0.2", "--set", "workers=1"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed_from_the_command_line(tmp_path, how):
    command = ["run", "-m", "scaffold", *LONG, "--set", "local.lr=0.05"]
    whole = everfed(*command, "--folder", tmp_path / "whole")
    part = everfed(*command, "--folder", tmp_path / "part")
    wait_for(tmp_path / "part" / "records.jsonl", 200)
    part.send_signal(how)
    _, said = part.communicate(timeout=60)
    if how != signal.SIGKILL:
        assert f"everfed resume {tmp_path / 'part'}" in said
        assert part.returncode == 130
    again = everfed("resume", tmp_path / "part")
    out, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert "scaffold" in out
    assert whole.wait(120) == 0
    models = [RunFolder(tmp_path / name).load()[0].fed for name in ("whole", "part")]
    assert torch.equal(models[0].w, models[1].w)
    records = [timeless(RunFolder(tmp_path / name).records()) for name in ("whole", "part")]
    assert records[0] == records[1]


def test_a_killed_comparison_goes_on(tmp_path):
    """What was finished stays, what was begun is resumed, what is missing is run."""
    config = ["-m", "fedavg,scaffold", "-s", "0,1", *LONG, "--set", "local.lr=0.05"]
    first = everfed("compare", *config, "--folder", tmp_path / "all", start_new_session=True)
    wait_for(tmp_path / "all" / "scaffold-seed0" / "records.jsonl", 100)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    again = everfed("resume", tmp_path / "all")
    out, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert "over 2 seeds" in out
    assert (tmp_path / "all" / "figure.png").stat().st_size > 10_000
    for method in ("fedavg", "scaffold"):
        for seed in (0, 1):
            records = RunFolder(tmp_path / "all" / f"{method}-seed{seed}").records()
            assert max(r["round"] for r in records) == 239


def test_a_run_from_python_says_how_to_resume(digits, tmp_path):
    stopped_half_way(digits, tmp_path)
    process = everfed("resume", tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "resume=True" in said
    assert "Traceback" not in said
