"""The command line. Heavy imports wait until a command needs them, so that --help is quick."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.text import Text

from everfed import __version__
from everfed.errors import EverfedError

if TYPE_CHECKING:
    from everfed.compare import Entry
    from everfed.data import Data
    from everfed.reproduce import Outcome
    from everfed.runs import Progress as RoundProgress

typer.core.HAS_RICH = False  # help is plain text, in which rich's escapes would be seen
app = typer.Typer(
    name="everfed",
    help="Train one model across many clients whose data keep changing.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(markup=False)  # texts hold brackets of their own, as 'everfed[flower]'
err = Console(stderr=True, markup=False)

ConfigFile = Annotated[
    Path | None, typer.Argument(help="A TOML file; without one, the default (the demo's) is used.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. local.lr=0.1."),
]
Folder = Annotated[
    Path | None, typer.Option(help="Where to keep the run (default: a new one in runs/).")
]
RunPaths = Annotated[list[Path], typer.Argument(help="Folders of runs or comparisons.")]


def main() -> None:
    """The entry point: a user's mistake is one line, never a traceback."""
    for stream_ in (sys.stdout, sys.stderr):
        if isinstance(stream_, io.TextIOWrapper):
            stream_.reconfigure(errors="replace")  # a terminal that has no ±
    try:
        app()
    except EverfedError as error:
        mistake = error.exit_code != 130  # 130: stopped on request
        text, style = (f"error: {error}", "red") if mistake else (str(error), None)
        err.print(text, style=style, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        size = re.search(r"allocate (\d+) bytes", str(error))
        what = f": {int(size[1]) / 1e9:,.0f} GB were asked for" if size else f" ({error})"
        err.print(f"error: there is not enough memory{what}", style="red", soft_wrap=True)
        sys.exit(1)


@app.command()
def run(
    config: ConfigFile = None,
    changes: Changes = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="Method by name.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s", help="Another seed.")] = None,
    folder: Folder = None,
) -> None:
    """Train with one method."""
    from everfed import config as configs

    changed = [*(changes or []), *([] if seed is None else [f"seed={seed}"])]
    made = configs.experiment(configs.read(config, changed, method))
    made.check()
    place = folder or _new_folder(made.method.name)
    with _bars() as bars:
        finished = made.go(folder=place, on_round=_follow(bars, made.method.name))
    out.print(f"engine: {finished.engine}", highlight=False)
    _notes(finished.notes)
    _show([place])


@app.command()
def compare(
    config: ConfigFile = None,
    changes: Changes = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Comma-separated, e.g. fedavg,special.")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", "-s", help="E.g. 0,1,2 or 0-2.")] = None,
    folder: Folder = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time.")] = None,
) -> None:
    """Compare methods over seeds: a table and a figure."""
    from everfed import compare as comparing
    from everfed import config as configs

    more = list(changes or [])
    for change in more:
        if change.startswith("method."):
            raise configs.ConfigError(f"compare has no single method: use methods.NAME{change[6:]}")
    if methods is not None:
        if not methods.strip():
            raise configs.ConfigError("-m is empty: name methods, for example fedavg,special")
        more.append(f"compare.methods={[m.strip() for m in methods.split(',')]}")
    if seeds is not None:
        more.append(f"compare.seeds={_seeds(seeds)}")
    settings = configs.read(config, more)
    read = comparing.prepare(settings)
    place = folder or _new_folder("compare")
    comparing.create(settings, place)
    _compare(settings, place, jobs, read)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or a comparison.")],
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time.")] = None,
) -> None:
    """Go on with a run or a comparison where it was."""
    from everfed import compare as comparing
    from everfed import config as configs
    from everfed.records import members, read_config

    if all(comparing.finished(member) for member in members(folder)):
        out.print("already finished: nothing to do", highlight=False)
        _show([folder])
        return
    if (folder / "compare.json").exists():
        _compare(comparing.opened(folder), folder, jobs)
        return
    kept = read_config(folder).get("config")
    if kept is None:
        raise EverfedError(
            f"{folder} was begun from Python: go on with everfed.run(..., folder={str(folder)!r}, "
            "resume=True) and the same arguments"
        )
    made = configs.experiment(configs.parse(kept))
    with _bars() as bars:
        finished = made.go(folder=folder, resume=True, on_round=_follow(bars, made.method.name))
    _notes(finished.notes)
    _show([folder])


class Format(StrEnum):
    text = "text"
    latex = "latex"
    markdown = "markdown"


@app.command()
def show(
    runs: RunPaths,
    format_: Annotated[Format, typer.Option("--format", help="Of the table.")] = Format.text,
) -> None:
    """Tables of finished or unfinished runs."""
    if format_ is Format.text:
        _show(runs)
        return
    from everfed.records import collect, differences, not_begun
    from everfed.report import table
    from everfed.report.page import notes

    found = collect(runs)
    summaries = {m: [r.summary for r in own] for m, own in found.items()}
    print(table.latex(summaries) if format_ is Format.latex else table.markdown(summaries))
    told = [*not_begun(runs), *differences(found), *notes(found), *table.trouble(summaries)]
    _notes(told)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    file: Annotated[Path, typer.Argument(help="Where to, ending in .safetensors.")],
) -> None:
    """Write the model of a run as a file of named tensors; the run may go on meanwhile."""
    from everfed.export import export as write_weights

    rounds = write_weights(run, file)
    print(f"model after {rounds} rounds: {file}")


@app.command()
def report(
    runs: RunPaths,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page (default: report.html in the first folder)."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also save every chart there, as PDF and PNG.")
    ] = None,
) -> None:
    """One page with tables and charts, which works offline; from the records alone."""
    from everfed.records import collect, not_begun
    from everfed.report.page import gather, render

    page = gather(collect(runs))
    place = output or runs[0] / "report.html"
    content = render(page).encode("utf-8", "replace")
    try:
        place.write_bytes(content)
    except OSError as error:
        raise EverfedError(f"{place} cannot be written: {error.strerror}") from None
    _notes([*not_begun(runs), *page.notes])
    said = f"report: {place} ({len(content) / 1e6:.1f} MB)"
    if figures:
        from everfed.report.figure import save_all

        said += f"\nfigures: {len(save_all(page, figures))} files in {figures}"
    out.print(said, highlight=False, soft_wrap=True)


@app.command()
def watch(
    runs: RunPaths,
    once: Annotated[bool, typer.Option("--once", help="Print the state and leave.")] = False,
) -> None:
    """Watch running runs from their records; leaving does not disturb them."""
    from everfed.report import watch as watching

    try:
        watching.watch(runs, out, once)
    except KeyboardInterrupt:
        raise typer.Exit from None


@app.command()
def stream(
    config: ConfigFile = None,
    changes: Changes = None,
    picture: Annotated[
        Path, typer.Option("--picture", "-p", help="Where to save the bubble plot.")
    ] = Path("stream.png"),
) -> None:
    """Look at a stream before training: sizes, label skew, drift."""
    from everfed import config as configs
    from everfed.report import stream as seeing
    from everfed.streams.drift import cohorts, look

    settings = configs.read(config, changes or [])
    made = configs.experiment(settings).stream.seeded(settings.seed)
    seen = look(made, settings.seed)
    said = f"{made.data.name}: {made.clients} clients, {made.rounds} rounds, seed {settings.seed}"
    out.print(said, highlight=False, soft_wrap=True)
    _notes(made.data.notes)
    table, explained = seeing.table(seen, out.width)
    out.print(table)
    out.print(explained, style="dim", highlight=False)
    if seen.online != (len(seen.clients),) * 2:
        out.print("Online: {} to {} clients in a round.".format(*seen.online), highlight=False)
    if len(seen.clients) < made.clients:
        out.print(f"Looked at {len(seen.clients)} of {made.clients} clients.", highlight=False)
    drawn = cohorts(made, settings.sample, settings.seed)
    if drawn is not None:
        out.print(f"{drawn} What that does to training: everfed advise.", highlight=False)
    seeing.picture(made, seen, picture)
    out.print(f"picture: {picture}", highlight=False, soft_wrap=True)


@app.command()
def advise(
    what: Annotated[
        Path | None,
        typer.Argument(
            help="The folder of a run or a comparison, or a TOML file; without one, the default's."
        ),
    ] = None,
    changes: Changes = None,
    rounds: Annotated[int, typer.Option(min=4, help="Of the pilot run.")] = 24,
    keep: Annotated[bool, typer.Option(help="Whether clients may keep samples.")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the configuration.")
    ] = None,
) -> None:
    """Recommend a method by the drift in a run, or in a short pilot run of a configuration."""
    from everfed import advise as advising
    from everfed import config as configs

    settings: configs.Config | None
    if what is not None and what.is_dir():
        if changes:
            raise EverfedError("--set changes a configuration, and this is a run's folder")
        found = advising.chosen(what)
        kept = found[0].about.get("config")
        settings = configs.parse(kept) if kept else None
        said = f"{found[0].method}, {found[0].rounds_done} rounds in {what}"
        said += f", {len(found)} seeds" if len(found) > 1 else ""
    else:
        settings = configs.read(what, changes or [])
        made = configs.experiment(settings, "fedavg")
        with _bars() as bars:
            found = [advising.pilot(made, rounds, _follow(bars, "pilot"))]
        said = f"a pilot of {found[0].rounds_done} rounds with fedavg"
    advice = advising.advise(advising.read(*found), keep)
    out.print(f"From {said}:", highlight=False, soft_wrap=True)
    for reason in advice.reasons:
        out.print(f"  - {reason}", highlight=False, soft_wrap=True)
    _notes(advice.doubts)
    text = advice.toml(settings)
    out.print(f"Try: {advice}\n", style="bold", highlight=False, soft_wrap=True)
    if output is None:
        print(text, end="")
        return
    if output.exists():
        raise EverfedError(f"{output} is there already, and is left as it is: give another name")
    try:
        output.write_text(text)
    except OSError as error:
        raise EverfedError(f"{output} cannot be written: {error.strerror}") from None
    out.print(f"everfed compare {output}", highlight=False, soft_wrap=True)


@app.command("list")
def list_(
    what: Annotated[
        str, typer.Argument(help="methods, streams, datasets, models or reproductions.")
    ] = "methods",
) -> None:
    """What there is to choose from, with settings."""
    from everfed import listing

    out.print(listing.table(what))


@app.command()
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(help="W1 (LeNet5), W2 (MLP), W3 (ResNet-18); default: all."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for each.")] = 5.0,
    precision: Annotated[str, typer.Option(help="float32 or bf16.")] = "float32",
    method: Annotated[str, typer.Option("--method", "-m", help="Method by name.")] = "fedavg",
    workers: Annotated[int | None, typer.Option(min=1, help="Default: as a run chooses.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object a workload.")] = False,
) -> None:
    """Measure this machine: training samples per second on fixed workloads."""
    from everfed import bench as benching

    for row in benching.rows(workloads, seconds, precision, method, workers):
        if json_:
            print(json.dumps(row))
        else:
            out.print(benching.sentence(row), highlight=False, soft_wrap=True)


@app.command("config")
def config_() -> None:
    """Print the default configuration, to start one's own from."""
    from everfed.config import default_text

    print(default_text(), end="")


@app.command()
def reproduce(
    name: Annotated[
        str, typer.Argument(help="What to reproduce; 'everfed list reproductions' has them all.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and rounds.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's network and rounds, for a GPU.")
    ] = False,
    folder: Folder = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time.")] = None,
) -> None:
    """Run a paper's experiment anew and print ours beside the paper's figures.

    A folder that holds a part of it already is gone on with. Beside the runs, which
    'everfed report' takes, it gets reproduction.md.
    """
    from everfed.report.table import split
    from everfed.reproduce import cfl_nqm, check

    check(name)
    began = time.perf_counter()
    if name == cfl_nqm.REPRODUCTION.name:
        outcome = cfl_nqm.REPRODUCTION.go(quick)
    else:
        size = "quick" if quick else "full" if full else None
        outcome = _compare_with_paper(name, size, folder or _new_folder(name), jobs)
    for table in outcome.tables:
        for piece in split(table, out.width):
            out.print(piece)
    for finding in outcome.findings:
        out.print(f"{'yes' if finding.holds else 'no ':3}  {finding.title}: {finding.found}",
                  highlight=False, soft_wrap=True)  # fmt: skip
    out.print(Text(outcome.verdict, "bold"), f"({time.perf_counter() - began:.0f} s)")


def _compare_with_paper(name: str, size: str | None, place: Path, jobs: int | None) -> Outcome:
    from everfed import compare as comparing
    from everfed.records import collect
    from everfed.reproduce import preset

    chosen = preset.read(name)
    settings = chosen.settings(size)
    read = comparing.prepare(settings)
    if not (place / "compare.json").exists():
        comparing.create(settings, place)
    elif comparing.opened(place) != settings:
        raise EverfedError(f"{place} holds another comparison; choose another folder")
    _run_all(settings, place, jobs, read)
    runs = collect([place])
    outcome = chosen.judge(runs, short=size == "quick")
    text = chosen.markdown(outcome, settings, runs)
    (place / "reproduction.md").write_text(text)
    return outcome


theory = typer.Typer(help="Tools from the papers' theory.", no_args_is_help=True)
app.add_typer(theory, name="theory", rich_help_panel=None)


@theory.command("weights")
def theory_weights(
    rounds: Annotated[int, typer.Argument(min=1, help="Rounds so far, t.")],
    drift: Annotated[float, typer.Option(min=0, help="D², the time drift's variance.")] = 1.0,
    loss: Annotated[float, typer.Option(min=0, help="R², the squared information loss.")] = 0.0,
    alpha: Annotated[
        float, typer.Option(min=0, max=0.999999, help="Correlation of successive rounds' drift.")
    ] = 0.0,
    negative: Annotated[bool, typer.Option(help="Whether weights may be negative.")] = True,
) -> None:
    """Optimal weights of past rounds (CFL, Theorems 4.1 and 4.9), the oldest first."""
    from everfed.theory.weights import correlated

    for p in correlated(rounds, drift, loss, alpha, negative):
        print(f"{p:.6f}")


@contextmanager
def _computable() -> Iterator[None]:
    try:
        yield
    except (ZeroDivisionError, OverflowError):
        raise EverfedError("some of these numbers are too large or too small") from None


@theory.command("rounds")
def theory_rounds(
    epsilon: Annotated[float, typer.Argument(help="The accuracy to reach.")],
    time: Annotated[float, typer.Option(help="D², the time drift's variance.")] = 0.0,
    client: Annotated[float, typer.Option(help="G², the client drift's variance.")] = 0.0,
    loss: Annotated[float, typer.Option(help="R², the squared information loss.")] = 0.0,
    correlation: Annotated[float, typer.Option(help="F², the time drift's correlation.")] = 0.0,
    noise: Annotated[float, typer.Option(help="Variance of stochastic gradients.")] = 0.0,
    clients: Annotated[int, typer.Option(help="In a round.")] = 1,
    steps: Annotated[int, typer.Option(help="Local steps of a client in a round.")] = 1,
    convex: Annotated[float, typer.Option(help="Strong convexity, mu; 0: only convex.")] = 0.0,
    smooth: Annotated[float, typer.Option(help="Smoothness, L.")] = 1.0,
    distance: Annotated[float, typer.Option(help="Squared distance to the optimum.")] = 1.0,
) -> None:
    """The order of rounds to reach an accuracy (CFL, Table 1), to compare methods with."""
    from everfed.theory import rates

    k = rates.Constants(epsilon, clients, steps, noise, client, time, loss, correlation,
                        smooth, convex, distance)  # fmt: skip
    with _computable():
        found = {name: rates.rounds(name, k) for name in rates.VARIANCE} | rates.earlier(k)
    for name, value in found.items():
        print(f"{name:30} {value:12.5g}")
    print(f"Orders, without constant factors; CFL up to a bias that grows with R². They hold for "
          f"local learning rates up to {rates.largest_rate(k):.3g}.")  # fmt: skip


@theory.command("special")
def theory_special(
    lam: Annotated[float, typer.Option(help="λ, the pull to the anchor.")] = 0.25,
    task: Annotated[int, typer.Option(help="K, which task, counted from 1.")] = 2,
    clients: Annotated[int, typer.Option(help="M, in all.")] = 8,
    sample: Annotated[int, typer.Option(help="N, in a round.")] = 4,
    rounds: Annotated[int, typer.Option(help="T, of the task.")] = 20,
    steps: Annotated[int, typer.Option(help="E, local steps of a client in a round.")] = 5,
    lr: Annotated[float, typer.Option(help="γ_L, of clients.")] = 1e-3,
    server_lr: Annotated[float | None, typer.Option(help="γ_G; default: 1 / K.")] = None,
    bound: Annotated[float, typer.Option(help="B, the largest norm of a gradient.")] = 1.0,
    smooth: Annotated[float, typer.Option(help="L, smoothness.")] = 1.0,
    noise: Annotated[float, typer.Option(help="σ_L², of stochastic gradients.")] = 1.0,
    client: Annotated[float, typer.Option(help="σ_G², between clients.")] = 1.0,
    between: Annotated[float, typer.Option(help="σ_T², between tasks.")] = 1.0,
    past: Annotated[float, typer.Option(help="Norm of the earlier tasks' gradient.")] = 1.0,
    gap: Annotated[float, typer.Option(help="Loss of all tasks above its optimum.")] = 1.0,
    cosine: Annotated[float, typer.Option(help="ε, least agreement of gradients.")] = 0.1,
) -> None:
    """SPECIAL's bounds (Lemma 4.9, Theorems 4.7 and 4.10), and where they say nothing."""
    from everfed.theory import special

    k = special.Constants(lam, task, clients, sample, rounds, steps, lr, server_lr, bound, smooth,
                          noise, client, between, past, gap, cosine)  # fmt: skip
    with _computable():
        told = list(special.told(k))
    for line in told:
        print(line)


@theory.command("drift")
def theory_drift(
    config: ConfigFile = None,
    changes: Changes = None,
    clients: Annotated[int, typer.Option(min=3, help="Clients to look at.")] = 10,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds to look at.")] = 50,
) -> None:
    """Measure a stream's D², G² and correlation α by its clients' gradients at the first model."""
    from everfed import config as configs
    from everfed.report import stream as seeing
    from everfed.theory.measure import measure

    made = configs.experiment(configs.read(config, changes or []))
    found = measure(
        made.stream, made.model, clients=clients, rounds=rounds, seed=made.options["seed"]
    )
    data = made.stream.data.name
    said = f"{data}: {found.clients} clients, rounds 1 to {found.rounds}, at the first model"
    out.print(said, highlight=False, soft_wrap=True)
    out.print(seeing.drifts(found))
    out.print(seeing.MEASURED, style="dim", highlight=False)


flower = typer.Typer(
    help="Real federations: a Flower app, and the keys of its sites.", no_args_is_help=True
)
app.add_typer(flower, name="flower", rich_help_panel=None)


@flower.command("new")
def flower_new(
    folder: Annotated[Path, typer.Argument(help="A new folder; its name is the app's.")],
) -> None:
    """Write a ready Flower app: configuration, data function, server, client, deployment."""
    from everfed import deploy

    for path in deploy.new(folder):
        out.print(f"  {path}", highlight=False, soft_wrap=True)
    out.print(
        f"\nA rehearsal on this machine: everfed run {next(folder.glob('*/everfed.toml'))}\n"
        "Your own data: everfed.toml and data.py. Real sites: docs/deployment.md",
        highlight=False,
        soft_wrap=True,
    )


@flower.command("keys")
def flower_keys(
    folder: Annotated[Path, typer.Argument(help="The app's folder.")] = Path(),
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of the server (TLS); repeatable.")
    ] = None,
    site: Annotated[list[str] | None, typer.Option(help="A site; repeatable.")] = None,
) -> None:
    """Make certificates for the server and a key pair for every site, in keys/."""
    if not host and not site:
        raise EverfedError("say for whom: --host for the server's certificates, --site for a site")
    try:
        from everfed import keys
    except ImportError:
        raise EverfedError("this needs: pip install 'everfed[flower]'") from None
    written = keys.certificates(folder / "keys", host) if host else []
    for name in site or []:
        written += keys.site(folder / "keys", name)
    for path in written:
        out.print(f"  {path}", highlight=False, soft_wrap=True)


@flower.command("store-key")
def flower_store_key() -> None:
    """Print a new key, with which a site encrypts its state."""
    try:
        from cryptography.fernet import Fernet
    except ImportError:
        raise EverfedError("this needs: pip install 'everfed[flower]'") from None
    print(Fernet.generate_key().decode())


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"everfed {__version__}")
        raise typer.Exit


# what the commands share --------------------------------------------------------------------
def _new_folder(name: str) -> Path:
    """runs/name-1, runs/name-2, ..."""
    number = 1
    while (Path("runs") / f"{name}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{number}"


#: seeds of a comparison at most; more are a slip
MOST = 10_000


def _seeds(text: str) -> list[int]:
    """0,1,2 or 0-2, as `compare -s` takes them."""
    from everfed.config import ConfigError

    found: list[int] = []
    try:
        for item in text.split(","):
            first, dash, last = item.partition("-")
            found += range(int(first), min(int(last if dash else first), int(first) + MOST) + 1)
    except ValueError:
        found = []
    if not found or len(found) > MOST:
        raise ConfigError(f"-s takes seeds, for example 0,1,2 or 0-2, not {text!r}")
    return found


@contextmanager
def _bars() -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeLeft(),
    )
    with Progress(*columns, console=err, transient=True, refresh_per_second=5) as bars:
        yield bars


def _state(progress: RoundProgress) -> str:
    accuracy = "" if progress.accuracy is None else f"  {100 * progress.accuracy:5.1f}%"
    return f"{progress.task:<12.12}{accuracy}"


def _follow(bars: Any, name: str) -> Callable[[RoundProgress], None]:
    """A bar for one run; warnings are printed above it."""
    bar = bars.add_task(name, total=None, state="starting")

    def tell(progress: RoundProgress) -> None:
        for warning in progress.warnings:
            err.print(f"warning: {warning}", style="yellow", highlight=False)
        bars.update(bar, total=progress.rounds, completed=progress.round, state=_state(progress))

    return tell


def _compare(settings: Any, folder: Path, jobs: int | None, read: Data | None = None) -> None:
    """All runs, and the table; if some fail, that of those that have not."""
    from everfed import compare as comparing
    from everfed.runs import Interrupted

    try:
        _run_all(settings, folder, jobs, read)
    except Interrupted:
        raise
    except EverfedError:
        if any(comparing.finished(entry.folder) for entry in comparing.plan(settings, folder)):
            _show([folder])
        raise
    _show([folder])


def _run_all(settings: Any, folder: Path, jobs: int | None, read: Data | None = None) -> None:
    from everfed import compare as comparing

    entries = comparing.plan(settings, folder)
    done = sum(comparing.finished(entry.folder) for entry in entries)
    with _bars() as bars:
        total = bars.add_task("all runs", total=len(entries), completed=done, state="")
        own: dict[str, Any] = {}

        def listener(entry: Entry, progress: RoundProgress | str | None) -> None:
            if isinstance(progress, str):
                err.print(f"{entry.name} failed: {progress}", style="red")
                return
            if progress is None:
                bars.remove_task(own.pop(entry.name)) if entry.name in own else None
                bars.advance(total)
                if not err.is_terminal and comparing.finished(entry.folder):
                    err.print(f"finished {entry.name}", highlight=False)
                return
            if entry.name not in own:
                own[entry.name] = bars.add_task(entry.name, total=progress.rounds, state="")
            bars.update(own[entry.name], completed=progress.round, state=_state(progress))

        notes = comparing.run_all(settings, folder, jobs, listener, read)
    _notes(notes)


def _notes(notes: Iterable[str]) -> None:
    for note in notes:
        err.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)


def _show(paths: list[Path]) -> None:
    from everfed.metrics import drift
    from everfed.records import collect, differences, not_begun
    from everfed.report.figure import comparison
    from everfed.report.page import gather, notes
    from everfed.report.table import table, trouble

    runs = collect(paths)
    summaries = {m: [r.summary for r in own] for m, own in runs.items()}
    count = max(len({str(run.seed) for run in own}) for own in runs.values())
    title = f"mean ± std over {count} seeds" if count > 1 else None
    out.print(table(summaries, title, out.width))
    for line in differences(runs):
        out.print(line, highlight=False, soft_wrap=True)
    for method, own in runs.items():
        seen = drift([record for run in own for record in run.records])
        if seen:
            out.print(Text.assemble(("drift: ", "cyan"), f"{method}: {seen}"), soft_wrap=True)
    for line in [*not_begun(paths), *notes(runs), *trouble(summaries)]:
        out.print(Text.assemble(("note: ", "yellow"), line), soft_wrap=True)
    try:
        page = gather(runs)
    except EverfedError as error:
        out.print(f"no figure: {error}", highlight=False, soft_wrap=True)
        return
    path = paths[0] / "figure.png"
    said = f"runs: {', '.join(map(str, paths))}\nfigure: "
    if len(paths) > 1:  # of none of them
        said += "everfed report draws runs of several folders"
    elif not os.access(paths[0], os.W_OK):
        said += f"none, {paths[0]} cannot be written to"
    else:
        comparison(page, path)
        said += str(path)
    out.print(said, highlight=False, soft_wrap=True)
