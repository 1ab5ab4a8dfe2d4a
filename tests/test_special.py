"""SPECIAL: its bounds as formulas and on real runs, lam = "auto", the paper's own sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import everfed as ef
from everfed import config
from everfed.cli import app
from everfed.errors import EverfedError
from everfed.method import Reduced
from everfed.methods.special import MovedRate, moved
from everfed.reproduce import preset
from everfed.theory import special
from everfed.theory.special import Constants
from everfed.vector import Layout


@pytest.mark.parametrize(
    ("lam", "rounds", "steps"), [(0.25, 20, 3.954), (0.05, 20, 12.462), (0.05, 30, 15.372)]
)
def test_travel_in_per_round_steps(lam, rounds, steps):
    assert special.travel(lam, rounds) == pytest.approx(steps, abs=5e-4)
    # equal steps u, pulled each round: what the formula sums
    at = 0.0
    for _ in range(rounds):
        at = (at + 1) / (1 + lam)
    assert special.travel(lam, rounds) == pytest.approx(at)


def test_theorem_4_7_is_what_the_largest_rates_leave():
    """The theorem's last step: (K-1)/2 L (gamma_G gamma_L E)^2 sigma_L^2 t / (lambda^2 + 2 lambda),
    with both rates as large as it allows."""
    k = Constants(lam=0.4, task=3, clients=6, sample=2, rounds=7, steps=4, bound=1.5, smooth=2.0,
                  noise=0.3, past=2.5, cosine=0.2)  # fmt: skip
    local, server = special.rise_rates(k)
    left = (k.task - 1) / 2 * k.smooth * (server * local * k.steps) ** 2 * k.noise * k.rounds
    assert special.rise(k) == pytest.approx(left / (k.lam**2 + 2 * k.lam))


@pytest.mark.parametrize(("task", "vacuous"), [(2, True), (3, True), (4, False), (9, False)])
def test_theorem_4_10_says_nothing_of_up_to_three_tasks(task, vacuous):
    """2K/(K-1) K B^2 is in Psi whatever the rates; K^2 B^2 is the trivial bound."""
    still = Constants(task=task, lr=1e-9, noise=0, client=0, between=0, past=0)
    psi = sum(special.residue(still).values())
    assert psi == pytest.approx(2 * task**2 / (task - 1))
    assert (psi >= special.stationary_at_most(still)) == vacuous


def test_full_participation_drops_the_terms_of_sampling():
    """Corollary D.3 is Theorem 4.10 with N = M."""
    k = Constants(sample=8, task=4, lr=0.01)
    psi = special.residue(k)
    turn = k.rate * k.lr / (1 + k.lam)
    assert psi["client drift"] == 0
    assert psi["bounded gradients"] == pytest.approx(8 / 3 * ((k.lr * 5 / k.lam) ** 2 + 4))
    assert psi["local steps"] == pytest.approx(8 / 3 * 5 * k.lr**2 * 4 * 5 * (1 + 6 * 5))
    assert psi["noise"] == pytest.approx(8 / 3 * 1.5 * turn / 8)
    assert psi["task drift"] == pytest.approx(8 / 3 * 9 * 5 / 4 * 1.5 * turn)
    assert special.falling(replace(k, rounds=40)) == pytest.approx(special.falling(k) / 2)


def test_bounds_on_the_command_line():
    told = CliRunner().invoke(app, ["theory", "special", "--task", "2"])
    assert "at most 3.954 of its largest per-round steps" in told.output
    assert "VACUOUS" in told.output
    more = CliRunner().invoke(app, ["theory", "special", "--task", "9", "--rounds", "1000000"])
    assert "says more than the 81 " in more.output
    wrong = CliRunner().invoke(app, ["theory", "special", "--task", "1"])
    assert isinstance(wrong.exception, EverfedError)
    assert "the first has no anchor" in str(wrong.exception)


@pytest.mark.parametrize("lam", [0.05, 0.5])
def test_a_real_run_keeps_the_bounds(lam):
    """Gradients clipped to norm 1 make B = 1, so Lemma 4.9's cap holds for certain."""
    stream = ef.streams.domains(ef.data.digits(["plain", "inverted", "rotated"]), rounds=8)
    local = ef.Local(lr=0.2, steps=20, clip=1.0)
    run = ef.run(ef.methods.special(lam), stream, ef.models.mlp(64, 64, 10), local=local, sample=4)
    for task in (1, 2):
        seen = {name: np.array([r["value"] for r in run.records
                                if r["metric"] == name and r["task"] == task])
                for name in ("anchor_distance", "anchor_step")}  # fmt: skip
        distance, step = seen["anchor_distance"], seen["anchor_step"]
        assert len(distance) == len(step) == 8
        # sum_tau (1 + lam)^-(t - tau) of the steps, then of the largest
        reach = np.array([sum(step[: t + 1] * (1 + lam) ** -np.arange(t + 1, 0.0, -1))
                          for t in range(8)])  # fmt: skip
        assert (distance <= reach * (1 + 1e-5)).all()
        largest = step.max() * np.array([special.travel(lam, t + 1) for t in range(8)])
        assert (reach <= largest * (1 + 1e-5)).all()
        cap = special.cap(Constants(lam=lam, task=task + 1, steps=20, lr=0.2, bound=1.0))
        assert 0 < distance.max() <= cap


@pytest.mark.parametrize(
    ("first", "anchor", "lam"),
    [
        ([3.0, 4.0], [3.0, 9.0], 1 / 3 / 10),  # moved by 5, its length
        ([3.0, 4.0], [0.0, 0.0], 1 / 3 / 10),
        ([3.0, 4.0], [3.0, 6.5], 1 / 24 / 10),
        ([3.0, 4.0], [3.0, 44.0], 2 / 10),
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([0.0, 0.0], [0.1, 0.0], 2 / 10),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_auto_grows_with_how_far_the_first_task_moved_the_model(first, anchor, lam):
    found = moved(torch.tensor(first), torch.tensor(anchor)) / 10
    assert found.item() == pytest.approx(lam)


def test_auto_is_settled_by_the_first_task():
    domains = ef.data.digits(["plain", "inverted", "rotated"])
    model = ef.models.mlp(64, 16, 10)

    def play(lam, data=domains, **settings):
        stream = ef.streams.domains(data, rounds=5)
        return ef.run(ef.methods.special(lam, **settings), stream, model, sample=4)

    auto = play("auto")
    seen = [r["value"] for r in auto.records if r["metric"] == "anchor_lam"]
    assert seen == seen[:1] * 10
    first = ef.data.digits(["plain"])
    begin, end = play(0.0, first, server_lr=1e-30).vector, play(0.0, first).vector
    m = min(((end - begin).norm() / begin.norm()).item() ** 3 / 3, 2)
    assert seen[0] == pytest.approx(m / 5)
    # with the same rates a run with that number in its place is the same
    fixed = play(seen[0], server_lr="1/task")
    assert torch.allclose(play("auto", server_lr="1/task").vector, fixed.vector, rtol=0, atol=1e-6)


def test_the_servers_rate_goes_by_how_far_the_first_task_moved_the_model():
    """r = 1/2: m = 1/24; r = 2: 8/3, cut to 1, which is 1/task."""
    part, one = MovedRate(), torch.ones(2)
    for end, rate in (([3.0, 6.5], 3 ** (-1 / 24)), ([3.0, 14.0], 1 / 3)):
        s = part.init(torch.tensor([3.0, 4.0]), Layout(()))
        first = Reduced({}, one, 1, 1.0, 1, 5, 0)
        assert part.fold(s, one, first)[0].tolist() == [1, 1]
        s = part.task_end(s, torch.tensor(end), first)
        assert part.task_end(s, one, first) == s  # only the first task's end counts
        assert part.fold(s, one, Reduced({}, one, 1, 1.0, 1, 12, 2))[0][0] == pytest.approx(rate)


@pytest.mark.parametrize("name", ["special-digits", "special-pacs", "special-cifar100"])
def test_the_papers_network_takes_the_data(name, tmp_path):
    """--full parses, and its network is built on images of its size."""
    settings = preset.read(name).settings("full")
    size = settings.data.get("size", 32)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "few.npz", x=rng.integers(0, 255, (40, size, size, 3), dtype=np.uint8),
             y=np.arange(40) % 10, domain=np.arange(40) % 2)  # fmt: skip
    few = {"name": "npz", "file": str(tmp_path / "few.npz"), "task": "domain"}
    stream = (
        settings.stream | {"clients": 2} | ({} if "tasks" in settings.stream else {"alpha": None})
    )
    stream.pop("order", None)
    changed = {"data": few, "stream": stream, "sample": 2, "device": "cpu"}
    made = config.experiment(settings.model_copy(update=changed))
    assert made.options["local"].lr == 0.001
    with torch.no_grad():
        z = made.model()(torch.zeros(1, 3, size, size))
    assert z.shape == (1, 10)
