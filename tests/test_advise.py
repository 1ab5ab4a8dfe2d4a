"""The adviser: what it says of real runs, and that its advice is worth taking."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest

import everfed as ef
from everfed import advise
from everfed import config as configs
from everfed.engines.terms import Terms
from everfed.errors import EverfedError
from everfed.metrics import Drift
from everfed.records import load
from everfed.streams.pilot import Pilot
from test_cli import everfed


def experiment(stream, method=None, **options):
    local = ef.Local(lr=0.2, epochs=3, batch=8)
    options = {"local": local, "sample": 5, "seed": 0, "workers": 1} | options
    return configs.Experiment(
        method or ef.methods.fedavg(), stream, ef.models.mlp(64, 32, 10), options, Terms()
    )


def score(stream, method, seed):
    """Mean accuracy of the last ten rounds, in which single rounds count for little."""
    done = experiment(stream, method, seed=seed).go()
    tests = [r["value"] for r in done.records if r["metric"] == "accuracy" and not r.get("end")]
    return float(np.mean(tests[-10:]))


@pytest.mark.parametrize("kind", ["iid", "period", "client", "both"])
def test_advice_is_better_than_fedavg_in_every_regime(kind):
    """FedEve's four regimes on real digits: the pilot sees 24 rounds, the runs have 40."""
    stream = ef.streams.regimes(
        ef.data.digits(["plain"]),
        drift=kind,
        clients=100,
        cohort=5,
        rounds=40,
        alpha=0.05,
        prior=False,
    )
    advice = advise.advise(advise.read(advise.pilot(experiment(stream))))
    method = ef.methods.METHODS[advice.method].build(**advice.settings)
    gain = [score(stream, method, s) - score(stream, ef.methods.fedavg(), s) for s in (1, 2)]
    assert np.mean(gain) > (0.0 if kind == "iid" else 0.005)
    whole = "whole rounds" in advice.reasons[0]
    assert whole == (kind == "period")
    apart = any("different directions" in reason for reason in advice.reasons)
    assert apart == (kind in ("client", "both"))


def test_advice_on_a_sequence_of_domains(tmp_path):
    """The demo's stream, on the command line: the configuration that is written does better."""
    done = everfed("advise", "-o", tmp_path / "advised.toml")
    assert done.returncode == 0, done.stderr
    assert "must be kept" in done.stdout
    advised = configs.read(tmp_path / "advised.toml")
    assert advised.compare.methods == ["fedavg", "cfl_coreset"]
    found = {m: configs.experiment(advised, m).go(workers=1).acc for m in advised.compare.methods}
    assert found["cfl_coreset"] > found["fedavg"] + 0.1


def signs(**more):
    steady = Drift(0.3, 0.3, 0.5, 3.0, 5.0, 1.0)
    plain = {"method": "fedavg", "drift": steady, "lost": math.nan, "changed": math.nan}
    plain |= {"growing": False, "stateless": False, "present": 0.5}
    return advise.Signs(**(plain | more))


@pytest.mark.parametrize(
    ("given", "keep", "method"),
    [
        ({}, True, "fedavgm"),
        ({"lost": 0.3}, True, "cfl_coreset"),
        ({"lost": 0.3}, False, "lwf"),
        ({"lost": 0.3, "growing": True}, False, "ewc"),
        ({"lost": 0.3, "stateless": True}, True, "lwf"),
        ({"lost": 0.3, "present": 0.01}, True, "lwf"),
        ({"lost": 0.01, "changed": 0.5}, True, "cfl_coreset"),
        ({"changed": 0.5}, False, "fedavgm"),
        ({"changed": 0.5, "present": 0.01}, True, "fedavgm"),
        ({"changed": 0.05}, True, "fedavgm"),
    ],
)
def test_what_may_be_kept_decides(given, keep, method):
    assert advise.advise(signs(**given), keep).method == method


def test_rounds_that_agree_get_a_longer_momentum():
    seen = [Drift(turn, 0.9, 0.8, 1.1, 5.0, 1.0) for turn in (0.3, 1.0, 1.3)]
    advised = [advise.advise(signs(drift=own)) for own in seen]
    assert [advice.settings["beta"] for advice in advised] == [0.9, 0.7, 0.5]
    assert ["turn back" in " ".join(a.reasons) for a in advised] == [False, False, True]


def test_a_short_pilot_says_how_little_it_saw(digits):
    """What was lost, and in how many rounds a task, is told whatever the advice; few are doubted,
    unless the tasks themselves are as short."""
    stream = ef.streams.domains(digits, clients=6, alpha=0.3, rounds=8)
    short, long = (advise.read(advise.pilot(experiment(stream), n)) for n in (4, 16))
    assert (short.rounds, short.few) == (2, True)
    assert (long.rounds, long.few) == (8, False)
    for seen in (short, long):
        said = "\n".join(advise.advise(seen).reasons)
        assert re.search(
            rf"accuracy on earlier tasks w.*lost.*, in {seen.rounds} rounds a task", said
        )
    little = advise.advise(replace(short, lost=0.01))
    assert "1 points of accuracy on earlier tasks were lost" in " ".join(little.reasons)
    assert "2 rounds a task are few" in little.doubts[0]
    assert "1 rounds a task say little" in advise.advise(replace(long, rounds=1)).doubts[0]
    assert "--rounds 12" in little.doubts[0]
    whole = ef.streams.domains(digits, clients=6, rounds=2)
    assert not advise.read(advise.pilot(experiment(whole))).few


def test_what_is_said_of_clients_are_equal_ones():
    """Five clients of unequal weight count as 3.4 equal ones; nobody draws 3 clients."""
    apart = Drift(1.0, 0.9, 0.8, 1.1, 3.4, 1.0)
    assert "weigh as much as 3.4 equal ones" in advise.advise(signs(drift=apart)).reasons[0]


def test_labels_that_change_are_seen_in_the_records():
    """The stream of the CFL paper, where a client's labels change in every round, one in which they
    stay, and one in which they are drawn anew from the same ones."""
    data = ef.data.digits(["plain"])
    moving = ef.streams.evolving(data, clients=5, subsets=8, alpha=0.1, rounds=9)
    still = ef.streams.static(data, clients=5, alpha=0.1, rounds=9)
    chance = ef.streams.evolving(data, clients=5, subsets=8, alpha=1e6, rounds=9)
    for stream, low, high in ((moving, 0.5, 1.0), (still, 0.0, 0.0), (chance, 0.0, 0.1)):
        seen = advise.read(advise.pilot(experiment(stream, sample=None)))
        assert low <= seen.changed <= high
        assert seen.present == 1.0


def test_a_run_is_read_and_its_configuration_kept(tmp_path):
    """A run's own settings come back in the advice, and parse."""
    place = tmp_path / "run"
    everfed("run", "-m", "fedprox", "--folder", place, "--set", "local.lr=0.07",
            "--set", "stream.rounds=3")  # fmt: skip
    done = everfed("advise", place)
    assert done.returncode == 0, done.stderr
    assert "the signs are of fedprox" in done.stderr
    text = done.stdout.partition("\n\n")[2]
    assert tomllib.loads(text)["local"]["lr"] == 0.07
    (tmp_path / "advised.toml").write_text(text)
    assert configs.read(tmp_path / "advised.toml").stream["rounds"] == 3
    assert "--set changes" in everfed("advise", place, "--set", "seed=1", expect=1).stderr


def test_a_comparison_is_read_by_its_runs_of_fedavg(digits, tmp_path):
    stream = ef.streams.domains(digits, clients=4, rounds=3)
    for name, seed in (("fedavg", 0), ("ewc", 0), ("fedavg", 1)):
        ef.run(ef.methods.METHODS[name].build(), stream, ef.models.mlp(64, 8, 10), seed=seed,
               folder=tmp_path / f"{name}-seed{seed}")  # fmt: skip
    chosen = {"methods": ["fedavg", "ewc"], "seeds": [0, 1]}
    (tmp_path / "compare.json").write_text(json.dumps({"compare": chosen}))
    done = everfed("advise", tmp_path)
    assert f"From fedavg, 6 rounds in {tmp_path}, 2 seeds:" in done.stdout
    assert done.stderr == ""
    both = [load(tmp_path / f"fedavg-seed{seed}") for seed in (0, 1)]
    lost = np.mean([advise.read(run).lost for run in both])
    assert advise.read(*advise.chosen(tmp_path)).lost == pytest.approx(lost)
    (tmp_path / "compare.json").write_text(json.dumps({"compare": chosen | {"methods": ["ewc"]}}))
    with pytest.raises(EverfedError, match=rf"give one of its runs \({tmp_path}/ewc-seed0\)"):
        advise.chosen(tmp_path)


def test_a_run_without_meters_says_so(tmp_path):
    stream = ef.streams.static(ef.data.digits(["plain"]), rounds=1)
    ef.run(ef.methods.fedavg(), stream, ef.models.mlp(64, 8, 10), folder=tmp_path / "short")
    with pytest.raises(EverfedError, match="no drift meters"):
        advise.advise(advise.read(load(tmp_path / "short")))


def test_samples_at_sites_have_no_pilot(tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text(
        "[data]\nname = 'sites'\nshape = [64]\nclasses = 10\n[stream]\nname = 'sites'\n"
    )
    assert "live at the sites" in everfed("advise", path, expect=1).stderr


def test_a_pilot_is_the_beginning_of_each_task(digits):
    whole = ef.streams.domains(digits, clients=4, rounds=5).seeded(3)
    short = Pilot(whole, 2, 2)
    assert (short.rounds, short.task_rounds, short.tasks) == (4, (2, 2), whole.tasks)
    for at, there in enumerate((0, 1, 5, 6)):
        assert np.array_equal(short.samples(1, at), whole.samples(1, there))
        assert short.task(at) == whole.task(there)
    assert np.array_equal(short.test(1), whole.test(1))
    classes = ef.streams.classes(digits, tasks=5, clients=2, rounds=4).seeded(0)
    assert Pilot(classes, 3, 2).seeded(0).task_classes == classes.task_classes[:3]
