"""The report's data, tables, figures, the watcher and the look at streams, without a browser."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import everfed as ef
from everfed.errors import EverfedError
from everfed.folder import RunFolder
from everfed.metrics import summarise
from everfed.records import Loaded, by_method, collect, differences, differing, not_begun
from everfed.report import stream
from everfed.report.page import gather, render
from everfed.report.table import cells, latex, markdown, table
from everfed.report.watch import Tail
from everfed.streams import drift
from test_cli import everfed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real runs of four methods, two seeds of each."""
    folder = tmp_path_factory.mktemp("runs")
    stream = ef.streams.domains(ef.data.digits(["plain", "inverted"]), clients=5, rounds=3)
    methods = {
        "fedavg": ef.methods.fedavg(),
        "special": ef.methods.special(0.1),
        "fedeve": ef.methods.fedeve(),
        "cflag": ef.methods.cflag(lipschitz=1.0),
    }
    for name, method in methods.items():
        for seed in (0, 1):
            place = folder / f"{name}-{seed}"
            ef.run(method, stream, ef.models.mlp(64, 16, 10), sample=3, seed=seed, folder=place)
    return folder


def lines(*accuracies, task_rounds=2):
    """Records of a run whose accuracy on task j after round t is accuracies[j][t]."""
    out = []
    for j, curve in enumerate(accuracies):
        for t, value in enumerate(curve):
            task = t // task_rounds
            if value is None:
                continue
            out.append({"round": t, "task": task, "metric": "accuracy", "on": j, "value": value})
            if t % task_rounds == task_rounds - 1:
                out.append(out[-1] | {"end": True})
    return sorted(out, key=lambda r: r["round"])


def made(records, name="fedavg", seed=0, folder="run", **more):
    method = {"name": name, "average": "samples", "parts": more.pop("parts", [])}
    about = {"method": method, "seed": seed, "data": "digits: 3", "tasks": ["a", "b"]} | more
    return Loaded(Path(folder), about, records)


# what the page shows --------------------------------------------------------------------------
def test_curves_matrices_and_forgetting_by_hand():
    """Two seeds: means, deviations of a sample of two, edges, and what was lost of task 1."""
    one = made(lines([0.5, 0.9, 0.8, 0.6], [None, None, 0.3, 0.7]))
    two = made(lines([0.7, 0.7, 0.6, 0.5], [None, None, 0.5, 0.9]), seed=1)
    page = gather(by_method([one, two]))
    assert page.edges == [2]
    first = page.tests[0][0]
    assert first.x == [1, 2, 3, 4]
    assert first.y == pytest.approx([60, 80, 70, 55])
    assert first.s[0] == pytest.approx(100 * np.std([0.5, 0.7], ddof=1), rel=1e-3)
    assert page.tests[1][0].x == [3, 4]
    assert page.average[0].y == pytest.approx([60, 80, (55 + 55) / 2, (65 + 70) / 2])
    assert page.matrices[0][1] == pytest.approx([55, 80])
    lost = [90 - 60, 70 - 50]
    assert page.forgetting[0][0] == pytest.approx((25, np.std(lost, ddof=1)), rel=1e-3)
    assert page.trade[0] == [[65, -30], [70, -20]]


def test_methods_own_measures_have_their_charts(runs):
    page = gather(collect(sorted(runs.iterdir())))
    titles = [panel.title for panel in page.panels]
    for title in (
        "Traffic", "Time", "Period drift", "Client drift", "Signal to noise", "Update",
        "Kalman gain", "Drift variances", "Distance to the anchor",
        "Forgetting term Γ", "Transference and interference",
    ):  # fmt: skip
        assert title in titles
    turn = page.panels[titles.index("Period drift")]
    assert turn.labels[0] == "measured"
    assert all(curve.x == [2, 3, 4, 5, 6] for curve in turn.lines[0])
    assert all(max(curve.y) <= 1 for curve in turn.lines[1])
    gain = page.panels[titles.index("Kalman gain")]
    assert [curve is not None for curve in gain.lines[0]] == [m == "fedeve" for m in page.methods]
    assert page.stream.classes == [str(c) for c in range(10)]
    assert len(page.stream.rounds) == 6
    held = sum(n for moment, _, n in page.stream.whole if moment == 0)
    assert held == sum(n for own in page.stream.clients.values() for m, _, n in own if m == 0)


def test_an_unknown_measure_gets_a_chart_of_its_own():
    more = [{"round": t, "task": 0, "metric": "my_norm", "value": t * 1.5} for t in range(4)]
    page = gather(by_method([made(lines([0.5] * 4, []) + more)]))
    assert [panel.title for panel in page.panels] == ["my_norm"]
    assert page.panels[0].lines[0][0].y == [0, 1.5, 3, 4.5]


def test_settings_that_differ_keep_runs_apart():
    """The same method with two strengths is two rows, never one mean."""
    strong, weak = [[{"part": "Anchor", "lam": lam}] for lam in (0.5, 0.1)]
    own = [
        made(lines([0.5] * 4, []), "special", seed, parts=parts)
        for seed in (0, 1)
        for parts in (strong, weak)
    ]
    found = by_method(own)
    assert {name: len(group) for name, group in found.items()} == {
        "special lam=0.5": 2,
        "special lam=0.1": 2,
    }
    assert differing([run.settings for run in own]) == ["Anchor.lam"]


def test_runs_on_other_ground_are_marked():
    """Methods may differ in their own settings; streams, data or samples that differ are told."""
    one = made(lines([0.5] * 4, []), "special", parts=[{"part": "Anchor", "lam": 1}], sample=4)
    same = made(lines([0.5] * 4, []), sample=4)
    other = made(lines([0.5] * 4, []), sample=8, stream={"alpha": 0.1, "seed": 3})
    lossy = made(lines([0.5] * 4, []), sample=4, late={"lost": 0.8})
    assert gather(by_method([one, same])).notes == []
    assert {len(group) for group in by_method([same, lossy]).values()} == {1}
    assert gather(by_method([one, lossy])).notes == [
        "the runs differ in late.lost: compare with care"
    ]
    assert gather(by_method([one, other])).notes == [
        "the runs differ in sample, stream.alpha: compare with care"
    ]


def test_runs_on_different_tasks_are_not_mixed():
    short = made(lines([0.5] * 2), name="b", tasks=["a"])
    with pytest.raises(EverfedError, match=r"2 task\(s\), run has 1: make a report of each"):
        gather(by_method([made(lines([0.5] * 4, [])), short]))


def test_losses_are_shown_where_there_is_no_accuracy():
    records = [
        {"round": t, "task": 0, "metric": "loss", "on": 0, "value": 1 / (1 + t)} for t in range(4)
    ]
    page = gather(by_method([made(records, tasks=["all"])]))
    assert page.measure == "loss"
    assert page.tests[0][0].y == pytest.approx([1, 0.5, 1 / 3, 0.25], rel=1e-3)


def test_an_unfinished_run_says_so():
    page = gather(by_method([made(lines([0.5, 0.6]), task_rounds=[2, 2])]))
    assert page.notes == ["fedavg, seed 0: unfinished, 2 of 4 rounds"]


def test_only_what_is_at_its_end_is_marked_as_best():
    """Few rounds to the best, few bytes: because there have been few."""
    half, whole = lines([0.9], [0.1]), lines([0.5, 0.6, 0.7, 0.8], [0.1, 0.1, 0.5, 0.6])
    runs = by_method([made(half, "fedeve"), made(whole), made(whole, "fedprox")])
    rows = cells({m: [summarise(r.records) for r in own] for m, own in runs.items()})
    assert not any(cell.best for cell in rows["fedeve"])
    assert any(cell.best for cell in rows["fedavg"])


def test_seeds_that_differ_or_come_twice_are_told():
    whole = lines([0.5, 0.6, 0.7, 0.8], [0.1, 0.1, 0.5, 0.6])
    runs = [
        made(whole, seed=0, folder="a"),
        made(whole, seed=0, folder="b"),
        made(whole, "fedprox", 1),
    ]
    told = gather(by_method(runs)).notes
    assert "the methods have been run with different seeds: fedavg 0, 0; fedprox 1" in told
    assert "fedavg: some of its 2 runs have the same seed" in told


def test_runs_that_have_not_begun_are_counted(tmp_path):
    chosen = {"compare": {"methods": ["fedavg", "special"], "seeds": [0, 1]}}
    (tmp_path / "compare.json").write_text(json.dumps(chosen))
    (tmp_path / "fedavg-seed0").mkdir()
    (tmp_path / "fedavg-seed0" / "records.jsonl").write_text("")
    assert not_begun([tmp_path]) == [f"{tmp_path}: 3 of 4 runs have not begun"]


def test_thirty_long_runs_stay_small():
    """30 methods of 500 rounds on 10 tasks: below 5 MB, thinned, task ends kept, and said so."""
    rounds, tasks = 500, 10
    chance = np.random.default_rng(0)
    own = []
    for k in range(30):
        records = []
        for t in range(rounds):
            task = t // 50
            own_metrics = ("seconds", "mb_up", "mb_down", "train_loss", "clients", "kalman_gain")
            values = chance.random(len(own_metrics) + task + 1)
            for metric, value in zip(own_metrics, values, strict=False):
                records.append({"round": t, "task": task, "metric": metric, "value": value})
            for j in range(task + 1):
                test = {"metric": "accuracy", "on": j, "value": values[-1 - j]}
                records.append({"round": t, "task": task} | test)
            held = {str(c): {str(y): 1000 + y for y in range(10)} for c in range(32)}
            labels = {"all": {str(y): 32000 for y in range(10)}, "clients": held}
            records.append({"round": t, "task": task, "metric": "labels", "value": labels})
        own.append(made(records, f"method {k}", tasks=[f"task {j}" for j in range(tasks)]))
    page = gather(by_method(own))
    assert page.every == 2
    shown = page.tests[0][0].x
    assert len(shown) < 300
    assert set(page.edges) <= set(shown)
    assert page.stream.every == 9
    assert len(render(page)) < 5e6


def test_the_page_without_torch(runs, tmp_path):
    """`everfed report` reads records: no torch, no data, no network."""
    code = (
        "import sys; from everfed.cli import main; sys.argv = ['everfed', 'report', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules"
    )
    page = tmp_path / "page.html"
    command = [sys.executable, "-c", code, *map(str, sorted(runs.iterdir())), "-o", str(page)]
    subprocess.run(command, check=True, timeout=60)
    assert re.findall(r'(?:src|href)="?(?!data:)', page.read_text().split("<script")[0]) == []


def test_half_written_lines_are_skipped_with_a_note(runs, tmp_path):
    for path in (runs / "fedavg-0").iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with open(tmp_path / "records.jsonl", "a") as file:
        file.write('{"round": 5, "task": 1, "metric": "accu')
    said = everfed("report", tmp_path)
    assert "skipped 1 half-written" in said.stderr
    assert "skipped 1 half-written" in (tmp_path / "report.html").read_text()
    assert "skipped 1 half-written" in everfed("show", tmp_path, "--format", "latex").stderr
    other = {"round": "x", "task": 0, "metric": "accuracy", "value": 1}
    with open(tmp_path / "records.jsonl", "a") as file:
        file.write(f"\n{json.dumps(other)}\n[1]\nNaN\n")
    assert "skipped 4 half-written" in everfed("report", tmp_path).stderr


def test_names_that_no_terminal_should_see(runs, tmp_path):
    """Escape sequences and broken unicode in names do no harm on any way out."""
    about = json.loads((runs / "fedavg-0" / "config.json").read_text())
    about["method"]["name"] = "\x1b[31mred \ud800\nend"
    about["tasks"] = ["\x1b]0;title\x07", "\ud800"]
    (tmp_path / "config.json").write_text(json.dumps(about))
    records = (runs / "fedavg-0" / "records.jsonl").read_text()
    own = {"round": 1, "task": 0, "metric": "\ud800\x1b[2J", "value": 1.0}
    (tmp_path / "records.jsonl").write_text(records + json.dumps(own) + "\n")
    for words in (
        ["show", tmp_path], ["show", tmp_path, "--format", "latex"], ["watch", tmp_path, "--once"],
        ["report", tmp_path, "--figures", tmp_path / "figures"],
    ):  # fmt: skip
        said = everfed(*words)
        assert "\x1b" not in said.stdout + said.stderr
        if words[0] != "report":
            assert "[31mred" in said.stdout


def test_mistakes_are_one_line(tmp_path):
    assert "is not a run's folder" in everfed("report", tmp_path, expect=1).stderr
    (tmp_path / "config.json").write_text("[]")
    assert "is not a run's configuration" in everfed("report", tmp_path, expect=1).stderr
    (tmp_path / "config.json").write_text('{"task_rounds": [5, "x"]}')
    assert "is damaged: task_rounds is" in everfed("report", tmp_path, expect=1).stderr
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "records.jsonl").write_text("")
    assert "has no records yet" in everfed("report", tmp_path, expect=1).stderr
    (tmp_path / "records.jsonl").write_text(json.dumps(lines([0.5])[0]) + "\n")
    missing = everfed("report", tmp_path, "-o", tmp_path / "no" / "page.html", expect=1)
    assert "cannot be written" in missing.stderr


# figures --------------------------------------------------------------------------------------
def test_every_chart_as_a_figure(runs, tmp_path):
    everfed(
        "report", *sorted(runs.iterdir()), "-o", tmp_path / "p.html", "--figures", tmp_path / "f"
    )
    names = {path.stem for path in (tmp_path / "f").iterdir()}
    assert {"accuracy", "matrices", "trade-off", "forgetting", "stream", "kalman-gain"} <= names
    for path in (tmp_path / "f").iterdir():
        start = path.read_bytes()[:5]
        assert start.startswith(b"%PDF" if path.suffix == ".pdf" else b"\x89PNG")
    assert len(names) * 2 == len(list((tmp_path / "f").iterdir()))


# tables ---------------------------------------------------------------------------------------
def test_tables_for_papers():
    name = r"a_b & 50% <b>\x|$y$"
    good = summarise(lines([0.9, 0.9, 0.8, 0.8], [None, None, 0.7, 0.7]))
    bad = summarise(lines([0.9, 0.9, 0.4, 0.4], [None, None, 0.5, 0.5]))
    found = {name: [good, good], "plain": [bad]}
    text = latex(found)
    assert r"a\_b \& 50\% \textless{}b\textgreater{}\textbackslash{}x\textbar{}\$y\$ &" in text
    assert r"\textbf{75.0 $\pm$ 0.0}" in text
    assert "& 45.0 &" in text
    rows = markdown(found).splitlines()
    assert rows[0].startswith("| method | ACC % | BWT |")
    assert rows[2].startswith(r"| a\_b \& 50% \<b\>\\x\|\$y\$ | **75.0 ± 0.0** | **-10.0 ± 0.0** |")
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows[:4]}) == 1
    best = [cell.best for cell in cells(found)["plain"]]
    assert not any(best[:4])  # the other is better at everything but ties


def test_what_lies_within_the_deviation_of_the_best_is_bold_too():
    """Over three seeds 70 ± 5 is no better than 66 ± 1, and better than 64; the caption says so."""
    own = {"wide": (65, 70, 75), "near": (65, 66, 67), "far": (63, 64, 65)}
    found = {
        name: [summarise(lines([share / 100] * 2)) for share in shares]
        for name, shares in own.items()
    }
    assert [row[0].best for row in cells(found).values()] == [True, True, False]
    text = markdown(found)
    assert "| near | **66.0 ± 1.0** |" in text
    assert "| far | 64.0 ± 1.0 |" in text
    said = "Bold: the best of a column, and all that lie within its ±."
    assert text.endswith(said)
    assert latex(found).endswith("% Mean " + r"$\pm$ standard deviation over seeds. "
                                 + said.replace("±", r"$\pm$"))  # fmt: skip
    page = gather({name: [made(lines([0.7] * 2))] * 2 for name in own})
    assert page.caption.endswith(said)
    assert "Bold" not in latex({"far": found["far"]})


def test_small_numbers_are_not_zeros():
    """A small model's traffic and memory have three digits, with a deviation in the same place."""
    small = [
        {"round": 0, "task": 0, "metric": "mb_up", "value": 0.01234},
        {"round": 0, "task": 0, "metric": "client_mb", "value": 0.00123},
        {"round": 0, "task": 0, "metric": "seconds", "value": 0.000456},
    ]
    large = [record | {"value": 10**6 * record["value"]} for record in small]
    text = markdown({"small": [summarise(small)] * 2, "large": [summarise(large)]})
    assert "| 0.000456 ± 0.000000 | 0.0123 ± 0.0000 | 0.00123 ± 0.00000 |" in text
    assert "| 456.000 | 12340.0 | 1230.00 |" in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_number_is_cut_in_any_terminal(width):
    """Runs of one method on two streams, with long names: what does not fit is left out as a
    whole, and named; what makes them differ stands below."""
    shares = [[0.122] * 4, [None, None, 0.456, 0.456]]
    own = [
        made(lines(*shares), f"a_method_with_a_long_name_{k}", seed, f"runs/try-{k}-{place}",
             data=f"digits: {place} samples", sample=place, stream={"alpha": 1 / place})
        for k in (1, 2)
        for seed, place in enumerate((100, 200))
    ]  # fmt: skip
    found = by_method(own)
    assert next(iter(found)) == "a_method_with_a_long_name_1 (try-1-100)"
    summaries = {name: [summarise(run.records) for run in runs] * 2 for name, runs in found.items()}
    console = Console(width=width, record=True, file=StringIO())
    console.print(table(summaries, "title", console.width))
    text = console.export_text()
    assert "…" not in text
    assert len(re.findall(r"\b28\.9\b", text)) == 4  # (12.2 + 45.6) / 2, of every run
    shown, _, away = " ".join(text.split()).partition("Left out, for want of room: ")
    for column in ("forgetting", "peak MB", "s/round"):
        assert (column.split()[0] in shown) != (column in away)
    assert differences(found)[0] == (
        "a_method_with_a_long_name_1 (try-1-100): stream.alpha = 0.01, "
        "data = digits: 100 samples, sample = 100"
    )


def test_runs_of_a_comparison_go_by_its_name():
    near, far = [
        made(lines([0.5] * 2), folder=f"runs/{place}", seed=3, sample=size, data="x" * size)
        for place, size in (("mine/fedavg-seed3", 20), ("alone", 30))
    ]
    assert list(by_method([near, far])) == ["fedavg (mine)", "fedavg (alone)"]
    twin = made(lines([0.5] * 2), folder="runs/b", seed=4, sample=20, data="x" * 20)
    assert "fedavg (mine and 1 more)" in by_method([near, far, twin])
    assert differences(by_method([near])) == []


def test_show_in_other_formats(runs):
    text = everfed("show", *sorted(runs.glob("fedavg-*")), "--format", "latex").stdout
    assert text.startswith(r"\begin{tabular}{lrrrrrrrrr}")
    assert len(re.findall(r"^fedavg & ", text, re.M)) == 1
    assert "| fedavg | " in everfed("show", runs / "fedavg-0", "--format", "markdown").stdout
    assert "Invalid value" in everfed("show", runs / "fedavg-0", "--format", "xml", expect=2).stderr


# watching -------------------------------------------------------------------------------------
def test_watching_reads_whole_lines_and_notices_a_resume(runs, tmp_path):
    whole = (runs / "fedavg-0" / "records.jsonl").read_text()
    (tmp_path / "config.json").write_text((runs / "fedavg-0" / "config.json").read_text())
    records = tmp_path / "records.jsonl"
    tail, half = Tail(tmp_path), len(whole) // 2
    records.write_text(whole[:half])
    tail.update()
    assert tail.skipped == 0  # a line that is being written is not a broken one
    assert len(tail.records) == whole[:half].count("\n")
    records.write_text(whole)
    tail.update()
    assert len(tail.records) == whole.count("\n")
    assert tail.finished
    first = whole.splitlines(keepends=True)[:9]
    records.write_text("".join(first))  # back to a checkpoint
    tail.update()
    assert len(tail.records) == 9
    assert not tail.finished


def test_watch_prints_where_runs_are(runs):
    said = everfed("watch", runs / "fedavg-0", runs / "cflag-1", "--once").stdout
    assert re.search(r"fedavg seed 0 +6/6 .*finished", said)
    assert re.search(r"cflag seed 1 +6/6 .*finished", said)
    for width in (50, 60, 80, 120, 160):
        said = everfed("watch", runs / "fedavg-0", "--once", COLUMNS=str(width)).stdout
        assert "…" not in said
        assert re.search(r"fedavg seed 0 +6/6 .* \d+\.\d .*finished", said)
    assert "is not a run's folder" in everfed("watch", runs, "--once", expect=1).stderr


def test_a_stopped_run_says_how_to_go_on(digits, tmp_path):
    """While a process holds the folder it runs; as soon as none does, it is stopped."""
    stream = ef.streams.domains(digits, clients=3, rounds=2)
    place, seen = tmp_path / "all" / "fedavg-seed0", []
    (tmp_path / "all").mkdir()
    chosen = {"compare": {"methods": ["fedavg", "ewc"], "seeds": [0]}}
    (tmp_path / "all" / "compare.json").write_text(json.dumps(chosen))

    def look(progress):
        seen.append(everfed("watch", tmp_path / "all", "--once").stdout)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ef.run(
            ef.methods.fedavg(), stream, ef.models.mlp(64, 8, 10), folder=place, on_round=look,
            config={"seed": 0},
        )  # fmt: skip
    assert "stopped" not in seen[0]
    assert "s left" in seen[0]
    tail = Tail(place)
    tail.update()
    assert tail.stopped
    again = RunFolder.open(place)  # as a resumed run does
    again.append([{"round": 0, "task": 0, "metric": "train_loss", "value": 1.0}])
    tail.update()
    assert not tail.stopped
    again.close()
    tail.update()
    assert tail.stopped
    told = everfed("watch", place, "--once", COLUMNS="60").stdout
    assert re.search(r"fedavg seed 0 +1/4 .*stopped", told)
    assert f"stopped after round 1 of 4; go on with: everfed resume {place}\n" in told
    both = everfed("watch", tmp_path / "all", "--once").stdout
    assert f"1 of 2 runs in {tmp_path / 'all'} stopped; go on with: everfed resume" in both
    assert "waiting" in both


def test_a_run_goes_on_when_its_viewer_is_killed(tmp_path):
    """A real viewer in a real terminal, killed in mid-run."""
    command = [sys.executable, "-m", "everfed"]
    changes = ["--set", "stream.rounds=40", "--set", "workers=1", "--folder", str(tmp_path / "run")]
    run = subprocess.Popen([*command, "run", *changes], stdout=subprocess.PIPE, text=True)
    records = tmp_path / "run" / "records.jsonl"
    while run.poll() is None and not (records.exists() and records.stat().st_size > 2000):
        time.sleep(0.05)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="100", TERM="xterm")
        os.execv(sys.executable, [*command, "watch", str(tmp_path / "run")])
    seen = b""
    while b"fedavg seed 0" not in seen:
        seen += os.read(terminal, 1000)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(terminal)
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert "fedavg" in out
    finished = everfed("watch", tmp_path / "run", "--once").stdout
    assert re.search(r"160/160 .*finished", finished)


# streams --------------------------------------------------------------------------------------
def test_domains_move_inputs_and_classes_move_labels(digits):
    seen = drift.look(ef.streams.domains(digits, clients=5, alpha=0.1, rounds=4), seed=0)
    first, second = seen.tasks
    assert (first.moments, first.samples) == (1, len(digits.train) / 2)
    assert second.labels.value < 0.01  # the same digits in another domain
    assert second.js < 0.01
    assert second.inputs > 1
    assert first.skew.value > 4 * first.skew.chance
    plain = ef.data.digits(["plain"])
    seen = drift.look(ef.streams.classes(plain, tasks=5, clients=3, rounds=2), seed=0)
    assert [task.labels.value for task in seen.tasks[1:]] == [1.0] * 4
    assert [task.js for task in seen.tasks[1:]] == pytest.approx([1.0] * 4)


def test_labels_that_move_inside_a_task_are_seen(digits):
    """Everyone holds zeros in even rounds and ones in odd ones: all of the labels move."""

    class Flip(ef.Stream):
        data, clients, rounds = digits, 3, 6

        def samples(self, client, round_):
            return digits.train[digits.y[digits.train].numpy() == round_ % 2][client::3]

        def block(self, client, round_):
            return round_ % 2

    (task,) = drift.look(Flip(), seed=0).tasks
    assert task.moments == 6
    assert task.round.value == task.client.value == 1.0
    assert task.round.chance < 0.1
    assert task.skew.value == 0


def test_without_skew_the_estimate_is_what_chance_gives(digits):
    seen = drift.look(ef.streams.static(digits, clients=10, alpha=None, rounds=4), seed=0)
    skew = seen.tasks[0].skew
    assert skew.value == pytest.approx(skew.chance, rel=0.25)


def test_cohorts_show_period_drift_and_client_drift(digits):
    """Few skewed clients make rounds and clients differ; all of them in every round, only clients;
    clients of equal random parts, neither beyond chance."""
    skewed = ef.streams.static(digits, clients=20, alpha=0.1, rounds=20)
    few, everyone = drift.cohorts(skewed, 4, 0), drift.cohorts(skewed, None, 0)
    assert few.size == 4
    assert few.period.value > 3 * few.period.chance
    assert (everyone.period.value, everyone.size) == (0, 20)
    assert min(few.client.value, everyone.client.value) > 0.4
    # of 7 pairs of rounds one is between the two tasks, of other classes
    tasks = ef.streams.classes(digits, tasks=2, clients=4, rounds=4)
    assert drift.cohorts(tasks, None, 0).period.value == pytest.approx(1 / 7)
    plain = drift.cohorts(ef.streams.static(digits, clients=20, alpha=None, rounds=20), 4, 0)
    assert plain.period.value < 1.5 * plain.period.chance
    assert plain.client.value < 1.5 * plain.client.chance


def test_input_drift_is_the_distance_of_means():
    """Unit Gaussians in 4 dimensions at a distance of 3: 3 / sqrt(4); none at a distance of 0."""
    random = np.random.default_rng(0)
    x = random.normal(size=(4000, 4))
    y = random.normal(size=(3000, 4))
    assert drift.shift(x, y + np.array([3, 0, 0, 0])) == pytest.approx(1.5, abs=0.05)
    assert drift.shift(x, y) < 0.05
    assert np.isnan(drift.shift(x, None))


@pytest.mark.parametrize("width", [60, 80, 150])
def test_a_stream_is_explained_as_it_is_shown(digits, width):
    """What is in the table is explained, nothing else is, and no number is cut."""
    seen = drift.look(ef.streams.domains(digits, clients=5, alpha=0.1, rounds=4), seed=0)
    shown, explained = stream.table(seen, width)
    console = Console(width=width, record=True, file=StringIO())
    console.print(shown)
    text = console.export_text()
    assert "…" not in text
    for task in seen.tasks:
        assert text.count(f"({task.skew.chance:.2f})") >= 1
    assert "Round TV" not in explained  # one data set a task: there is no such column
    assert "Client TV" in explained
    assert ("JS:" in explained) == (width == 150) == (" JS " in text)
    assert ("JS" in explained.partition("Left out")[2]) == (width < 150)


def test_stream_on_the_command_line(tmp_path):
    done = everfed("stream", cwd=tmp_path)
    assert "digits: 8 clients, 40 rounds, seed 0" in done.stdout
    assert re.search(r"inverted +10 +1 +1437 +\d+ – \d+ – \d+ +0\.\d\d \(0\.\d\d\)", done.stdout)
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")
    elsewhere = everfed("stream", "-p", tmp_path / "no" / "x.png", expect=1)
    assert "cannot be written" in elsewhere.stderr
    assert "did you mean 'rounds'" in everfed("stream", "--set", "stream.round=1", expect=2).stderr


def test_seeds_of_who_is_present_are_one_comparison(tmp_path):
    """Who comes and goes follows from the run's seed, as the split of the data does."""
    args = ("--set", "present.start=0.7", "--set", "present.join=0.2", "--set", "stream.rounds=1")
    everfed("compare", "-m", "fedavg", "-s", "0,1", *args, "--folder", str(tmp_path / "both"))
    assert list(collect([tmp_path / "both"])) == ["fedavg"]


def test_where_classes_arrive_an_unfinished_run_has_no_acc():
    """Tasks that are to come are not tested on: the mean over those met would be another number."""
    ends = [("accuracy", 0, 0, 0.9)]
    records = [
        {"metric": m, "task": t, "on": on, "value": v, "end": True, "round": 0}
        for m, t, on, v in ends
    ]
    assert summarise(records).acc == 0.9
    assert np.isnan(summarise(records, 5).acc)
    about = {"tasks": ["a", "b"], "task_rounds": [1, 1], "method": {"name": "fedavg"}}
    assert np.isnan(Loaded(Path("."), about, records).summary.acc)
