"""The command line and configurations, as a user meets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed import compare as comparing
from everfed import config as configs
from everfed.cli import _seeds, app
from everfed.methods import METHODS
from everfed.metrics import matrix, summarise


def everfed(*words, cwd=None, expect=0, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "everfed", *map(str, words)],
        capture_output=True, text=True, cwd=cwd, timeout=120,
        env=os.environ | {"COLUMNS": "150"} | environment,
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


MISTAKES = [
    ({"sampel": 3}, "unknown key sampel; did you mean 'sample'?"),
    ({"method": {"name": "specal"}}, "method.name: no 'specal'; did you mean 'special'?"),
    ({"method": {"name": "special", "lamb": 1}}, "unknown key method.lamb; did you mean 'lam'?"),
    ({"method": {"name": "special", "lam": -1}}, "method.lam should be greater than or equal to 0"),
    ({"method": {"name": "special", "lam": "x"}}, "method.lam should be a valid number or 'auto', not 'x'"),
    ({"method": {"name": "scaffold", "option": 3}}, "method.option should be 1 or 2, not 3"),
    ({"method": {"name": "special+fedprox"}}, "add methods up as methods.special.plus = [{name = 'fedprox'}]"),
    ({"method": {}}, "method.name is missing"),
    ({"present": {"leav": 0.1}}, "unknown key present.leav; did you mean 'leave'?"),
    ({"present": {"schedule": {"x": [[0, 3]]}}}, "present.schedule should be a valid integer"),
    ({"present": {"schedule": {"1": [3]}}}, "present.schedule should be a valid tuple"),
    ({"stream": {"name": "periodic", "shape": "round"}}, "stream.shape should be 'smooth' or 'abrupt'"),
    ({"method": {"name": "fedavg", "plus": [{"name": "fedprox", "mo": 1}]}},
     "unknown key method.plus.mo (there are mu, average)"),
    ({"method": {"name": "fedavg", "local": {"lr": 0}}}, "method.local.lr should be greater than 0"),
    ({"method": {"name": "fedavg", "stream": {"alfa": 1}}}, "unknown key method.stream.alfa"),
    ({"local": {"lr": "fast"}}, "local.lr should be a valid number, not 'fast'"),
    ({"local": {"optimiser": "sgd"}}, "unknown key local.optimiser; did you mean 'optimizer'?"),
    ({"local": {"momentum": 1.0}}, "local.momentum should be less than 1, not 1.0"),
    ({"stream": {"name": "domains", "clients": 2.5}}, "stream.clients should be a valid integer"),
    ({"stream": {"name": "domain"}}, "stream.name: no 'domain'; did you mean 'domains'?"),
    ({"data": {"name": "digits", "domain": []}}, "unknown key data.domain; did you mean 'domains'?"),
    ({"model": {"name": "mlp", "hidden": [0]}}, "model.hidden should be greater than 0"),
    ({"compare": {"seeds": []}}, "compare.seeds should"),
    ({"compare": {"methods": ["fedavgg"]}}, "compare.methods: no 'fedavgg'; did you mean 'fedavg'?"),
    ({"methods": {"ewk": {}}}, "methods.ewk.name: no 'ewk'; did you mean 'ewc'?"),
    ({"methods": {"weak": {"name": "specal"}}}, "methods.weak.name: no 'specal'; did you mean 'special'"),
    ({"methods": {"weak": {"name": "special", "lan": 1}}}, "unknown key methods.weak.lan"),
    ({"workers": 0}, "workers should be greater than 0 or 'auto', not 0"),
    ({"method": {"name": "foo"}}, "method.name: no 'foo' (there are "),
    ({"method": {"name": "fedavg,special"}}, "'everfed compare' takes several methods"),
    ({"methods": {"fedavg": {"name": "lwf"}}}, "'fedavg' is another method than 'lwf'; choose a name"),
    ({"epochs": 2}, "unknown key epochs; did you mean 'local.epochs'?"),
    ({"rounds": 2}, "did you mean 'late.rounds' or 'stream.rounds'?"),
    ({"data": {"name": "csv"}}, "data.name: no 'csv'; did you mean 'series'?"),
    ({"data": {"name": ["digits"]}}, "data.name: no ['digits']"),
    ({"data": {"name": "digits", "domains": "plain"}}, 'data.domains takes a list, such as ["plain"], not'),
    ({"data": {"name": "series", "file": "a.csv", "drop": "[a, b]"}}, 'such as ["a", "b"], not'),
    ({"compare": {"seeds": "0-2"}}, "compare.seeds takes a list, such as [0, 1], not '0-2'"),
    ({"local": {"lr": 0, "epochs": 2.5}}, "local.lr should be greater than 0, not 0"),
    ({"local": {"nesterov": True}}, "local.nesterov needs local.momentum"),
    ({"local": {"lr": float("inf")}}, "local.lr should be a finite number"),
    ({"local": {"lr": 1e308}}, "local.lr should be less than or equal to 100000000"),
    ({"compare": {"seeds": [0, 0]}}, "compare.seeds has 0 twice"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_mistakes_in_a_configuration(values, said):
    with pytest.raises(configs.ConfigError) as caught:
        configs.parse(values)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_the_methods_that_are_run_have_to_go_with_the_local_settings():
    """SCAFFOLD's option 2 takes plain SGD; FedAvg beside it takes any."""
    both = {"local": {"momentum": 0.9}, "compare": {"methods": ["fedavg"]}, "methods": {"nccl": {}}}
    scaffold = configs.parse(both | {"method": {"name": "scaffold"}})
    with pytest.raises(configs.ConfigError, match="SCAFFOLD's option 2"):
        configs.experiment(scaffold)
    assert comparing.prepare(scaffold).name == "digits"
    several = configs.parse(both | {"compare": {"methods": ["fedavg", "scaffold"]}})
    assert configs.experiment(several).method.name == "fedavg"
    with pytest.raises(configs.ConfigError, match="SCAFFOLD's option 2"):
        comparing.prepare(several)


def test_own_names_for_methods_with_settings():
    """One method with several settings in a comparison; what a name says can still be changed."""
    config = configs.parse({
        "methods": {"weak": {"name": "special", "lam": 0.1}, "special": {"lam": 0.5},
                    "both": {"name": "special", "plus": [{"name": "fedprox", "mu": 2.0}]}},
        "compare": {"methods": ["weak", "special", "both"]},
    })  # fmt: skip

    def built(**section):
        return configs.method_of(section, config)[0]

    assert (built(name="weak").name, built(name="weak").parts[-1].lam) == ("weak", 0.1)
    assert (built(name="special").name, built(name="special").parts[-1].lam) == ("special", 0.5)
    assert built(name="weak", lam=0.3).parts[-1].lam == 0.3
    assert [type(part).__name__ for part in built(name="both").parts] == [
        "Prox",
        "ServerRate",
        "Anchor",
    ]
    assert built(name="both").name == "both"


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "a.toml").write_text("[local]\nlr = 0.1\nepoch = 2\n")
    done = everfed("run", "a.toml", cwd=tmp_path, expect=2)
    assert done.stderr.startswith("error: unknown key local.epoch; did you mean 'epochs'?")
    assert len(done.stderr.strip().splitlines()) == 1
    large = everfed("run", "--set", f"model.hidden=[{10**15}]", cwd=tmp_path, expect=1)
    assert "error: there is not enough memory: 256,000,000 GB" in large.stderr
    (tmp_path / "b.toml").write_text("seed = = 1")
    assert "not valid TOML" in everfed("run", "b.toml", cwd=tmp_path, expect=2).stderr
    assert "does not exist" in everfed("run", "c.toml", cwd=tmp_path, expect=2).stderr
    assert "Did you mean 'run'" in everfed("runn", expect=2).stderr
    assert "data_dir" in everfed("run", "--set", "data.name=mnist", cwd=tmp_path, expect=2,
                                 EVERFED_DATA="").stderr  # fmt: skip
    for change in (
        "stream.alpha=-1", "stream.clients=5000", "data.domains=[]", "stream.rounds=0",
        "present.leave=2", "present.schedule.99=[[0, 1]]", "stream.name=blocks",
    ):  # fmt: skip
        everfed("run", "--set", change, cwd=tmp_path, expect=2)
    assert "methods.NAME.lam" in everfed("compare", "--set", "method.lam=1", expect=2).stderr
    assert "-m is empty: name" in everfed("compare", "-m", "", cwd=tmp_path, expect=2).stderr
    assert "-s takes seeds" in everfed("compare", "-s", "", cwd=tmp_path, expect=2).stderr
    tight = ["--set", "local.lr=1", "-m", "fedavg,nccl"]  # nccl needs less
    assert "NCCL's adaptive" in everfed("compare", *tight, cwd=tmp_path, expect=2).stderr
    assert not (tmp_path / "runs").exists()  # nothing was begun


def test_seeds_of_the_command_line():
    assert _seeds("0,2") == [0, 2]
    assert _seeds("7") == [7]
    assert _seeds("0-2, 5") == [0, 1, 2, 5]
    for text in ("", "x", "2-0", "1-", "-1", "0,,1"):
        with pytest.raises(configs.ConfigError, match="-s takes seeds, for example 0,1,2 or 0-2"):
            _seeds(text)


def test_default_and_changes():
    config = configs.read(None, ["method.name=special", "method.lam=0.5", "stream.rounds=3"])
    assert config.method == {"name": "special", "lam": 0.5}
    assert config.stream["rounds"] == 3
    assert configs.read(None, method="ewc").method == {"name": "ewc"}
    with pytest.raises(configs.ConfigError, match="key=value"):
        configs.read(None, ["seed"])


def test_every_method_can_be_configured():
    for name in METHODS:
        config = configs.parse({"method": {"name": name}, "local": {"lr": 0.01}})
        assert configs.method_of(config.method, config)[0].name == name


def test_methods_add_up_in_a_configuration():
    section = {"name": "special", "lam": 0.1, "plus": [{"name": "fedprox", "mu": 0.3}]}
    method, _ = configs.method_of(section, configs.parse({"method": section}))
    assert method.name == "special+fedprox"
    assert [type(part).__name__ for part in method.parts] == ["Prox", "ServerRate", "Anchor"]


def test_local_settings_of_one_method():
    config = configs.parse(
        {"local": {"lr": 0.2, "epochs": 3}, "methods": {"ewc": {"lam": 2, "local": {"lr": 0.01}}}}
    )
    method, local = configs.method_of({"name": "ewc"}, config)
    assert (local.lr, local.epochs, method.parts[-1].lam) == (0.01, 3, 2)
    assert configs.method_of({"name": "fedavg"}, config)[1].lr == 0.2


def test_a_method_may_have_a_stream_of_its_own():
    """Settings of the stream change for it alone; another stream begins with none of the first's."""
    own = {"skewed": {"name": "fedavg", "stream": {"alpha": 0.01}},
           "still": {"name": "fedavg", "stream": {"name": "static", "clients": 3}}}  # fmt: skip
    stream = {"name": "domains", "clients": 5, "rounds": 2}
    config = configs.parse({"stream": stream, "methods": own})
    made = {name: configs.experiment(config, name).stream for name in ("fedavg", *own)}
    assert [made[name].clients for name in made] == [5, 5, 3]
    assert [made[name].alpha for name in made] == [0.3, 0.01, 0.3]
    assert [len(made[name].tasks) for name in made] == [4, 4, 1]


def test_run_show_and_list(tmp_path):
    quick = ["--set", "stream.rounds=2", "--set", "local.epochs=1"]
    done = everfed("run", *quick, "-m", "fedeve", cwd=tmp_path)
    assert "engine: 1 worker on cpu" in done.stdout
    folder = tmp_path / "runs" / "fedeve-1"
    config = json.loads((folder / "config.json").read_text())
    assert config["method"]["parts"][0]["part"] == "FedEve"
    assert (folder / "figure.png").stat().st_size > 10_000
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert {"kalman_gain", "accuracy", "mb_up", "seconds"} <= {r["metric"] for r in records}
    assert matrix(records).shape == (4, 4)
    shown = everfed("show", folder, cwd=tmp_path).stdout
    assert f"{100 * summarise(records).acc:.1f}" in shown
    assert "is not a run's folder" in everfed("show", tmp_path, expect=1).stderr
    again = everfed("run", *quick, "--folder", folder, cwd=tmp_path, expect=1)
    assert "holds a run already" in again.stderr


def test_compare(tmp_path):
    quick = ["--set", "stream.rounds=2", "--set", "local.epochs=1"]
    done = everfed("compare", *quick, "-m", "fedavg,cflag", "-s", "0,1", cwd=tmp_path)
    assert "mean ± std over 2 seeds" in done.stdout
    assert re.search(r"cflag +\d+\.\d ± \d+\.\d", done.stdout)
    for column in (
        "ACC",
        "BWT",
        "forgetting",
        "worst drop",
        "rounds to best",
        "s/round",
        "MB sent",
        "client MB",
        "peak MB",
    ):
        assert column in done.stdout
    assert (tmp_path / "runs" / "compare-1" / "figure.png").exists()
    # the same as single runs: other processes, same numbers
    everfed("run", *quick, "-m", "cflag", "--set", "seed=1", "--set", "workers=1", cwd=tmp_path)

    def lines(folder):
        raw = (tmp_path / "runs" / folder / "records.jsonl").read_text().splitlines()
        return [r for r in map(json.loads, raw) if r["metric"] != "seconds"]

    assert lines("compare-1/cflag-seed1") == lines("cflag-1")


def test_list():
    methods = everfed("list", "methods").stdout
    assert all(name in methods for name in METHODS)
    facts = re.sub(r"\s+", " ", methods)
    assert re.search(r"scaffold .*?client state: yes · exchanges: 1 .*?traffic: 2 P \+ 2 P", facts)
    assert re.search(r"cflag .*?exchanges: 2 · task boundaries: yes · traffic: 3 P \+ 3 P", facts)
    streams = everfed("list", "streams").stdout
    for name in (*configs.STREAMS, "[present]"):
        assert name in streams
    assert "digits" in everfed("list", "datasets").stdout
    models = re.sub(r"[\s│]+", " ", everfed("list", "models", COLUMNS="250").stdout)
    assert "lenet" in models
    assert "pip install 'everfed[text]'" in models  # brackets are no markup
    assert "no list of 'things'" in everfed("list", "things", expect=2).stderr


def test_bench():
    said = everfed("bench", "W2", "--seconds", "0.1", "--workers", "1", "-m", "fedeve", "--json")
    row = json.loads(said.stdout)
    assert row["samples_per_second"] * row["seconds_per_round"] == pytest.approx(7 * 285)
    assert "no workload 'W9'" in everfed("bench", "W9", expect=1).stderr


def test_the_printed_default_is_a_configuration(tmp_path):
    (tmp_path / "mine.toml").write_text(everfed("config").stdout)
    assert configs.read(tmp_path / "mine.toml") == configs.read(None)


def test_help_does_not_load_torch():
    code = (
        "import sys, everfed.cli; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "Train with one method" in everfed("--help").stdout


# measures -----------------------------------------------------------------------------------------
def ends(a):
    return [
        {"round": i, "task": i, "metric": "accuracy", "on": j, "value": v, "end": True}
        for i, row in enumerate(a)
        for j, v in enumerate(row)
    ]


def test_measures_by_hand():
    """A = [[.9], [.7, .8], [.6, .85, .7]]: ACC (.6+.85+.7)/3, BWT (-.3 + .05)/2."""
    s = summarise(ends([[0.9], [0.7, 0.8], [0.6, 0.85, 0.7]]))
    assert s.acc == pytest.approx(0.716667, abs=1e-6)
    assert (s.bwt, s.forgetting, s.worst_drop) == pytest.approx((-0.125, 0.125, -0.3))


def test_rounds_to_best_counts_rounds_within_tasks():
    """Two tasks of four rounds: 2 + 4; tested every second round only, 2 + 4 again."""
    records = [
        {"round": 4 * k + t, "task": k, "metric": "accuracy", "on": k, "value": v}
        for k, curve in enumerate([(0.5, 0.7, 0.7, 0.6), (0.2, 0.4, 0.3, 0.5)])
        for t, v in enumerate(curve)
    ]
    assert summarise(records).rounds_to_best == 6
    rare = [r for r in records if r["round"] % 2]
    rare += [{"round": t, "task": t // 4, "metric": "seconds", "value": 1.0} for t in range(8)]
    assert summarise(rare).rounds_to_best == 6


def test_unfinished_class_streams_are_shown(tmp_path):
    """Class orders differ between seeds and a run may have ended in its first task."""
    classes = ["--set", "stream.name=classes", "--set", "stream.rounds=1", "--set", "sample=2"]
    more = ["--set", "data.domains=['plain']", "-m", "fedavg", "-s", "0,1", "--folder", "all"]
    everfed("compare", *classes, *more, cwd=tmp_path)
    assert (tmp_path / "all" / "figure.png").exists()
    path = tmp_path / "all" / "fedavg-seed0" / "records.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]) + '{"half')
    shown = everfed("show", tmp_path / "all").stdout
    assert "skipped 1 half-written" in shown
    path.unlink()
    assert "cannot be read" in everfed("show", tmp_path / "all", expect=1).stderr


def test_infinity_survives_a_resume(tmp_path):
    change = ["--set", "stream.alpha=inf", "--set", "stream.rounds=1"]
    everfed("run", *change, "--folder", tmp_path / "a")
    more = ["-m", "cflag", "-s", "0", "--set", "methods.cflag.clip=inf"]
    everfed("compare", *change, *more, "--folder", tmp_path / "b")
    for folder in (tmp_path / "a", tmp_path / "b"):
        for checkpoint in folder.rglob("checkpoints/*"):
            checkpoint.unlink()
        assert "already finished" not in everfed("resume", folder).stdout
        again = CliRunner().invoke(app, ["resume", str(folder)])
        assert again.stdout.startswith("already finished: nothing to do\n")


# examples -----------------------------------------------------------------------------------------
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_run(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_what_cannot_be_compared_is_told_before_any_run(tmp_path):
    done = everfed(
        "compare", "-m", "fedavg,krum", "-s", "0", "--folder", tmp_path / "runs",
        "--set", "methods.krum.bad=2", expect=2,
    )  # fmt: skip
    assert done.stderr.startswith("error: krum needs 7 clients a round, and 4 take part")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_is_told_at_once_and_the_others_go_on(tmp_path):
    """What a generator makes samples of has to hold their labels."""
    done = everfed(
        "compare", "-m", "fedcil,fedavg", "-s", "0", "-j", "1", "--folder", tmp_path / "runs",
        "--set", "methods.fedcil.latent=4", "--set", "stream.rounds=1", expect=1,
    )  # fmt: skip
    said = done.stderr.split("\n")
    assert said[0].startswith("fedcil seed 0 failed: fedcil: 10 classes need latent = 10")
    assert "finished fedavg seed 0" in said
    assert "finished fedcil seed 0" not in said
    assert said[-2].startswith("error: fedcil seed 0:")
