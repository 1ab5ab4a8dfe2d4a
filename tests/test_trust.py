"""Privacy and robust aggregation: exact numbers, composition with methods, and attackers.

As a program it prints the table of attackers in docs/trust.md: `python tests/test_trust.py`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import everfed as ef
from everfed.engines.local import LocalEngine
from everfed.method import Method, Part
from everfed.methods import METHODS
from everfed.methods.privacy import epsilon
from everfed.methods.robust import Bound, Krum, Trimmed
from everfed.round import Rounds
from quadratics import Game


def quadratic(method, rounds=1, clients=4, seed=0, sample=None):
    random = np.random.default_rng(seed)
    tasks = [
        [(np.ones((3, 5)), random.standard_normal((3, 5))) for _ in range(clients)]
        for _ in range(2)
    ]
    local = ef.Local(lr=0.1, steps=2, batch=64)
    return Game(method, tasks, rounds=rounds, local=local, sample=sample)


# privacy ----------------------------------------------------------------------------------------
def test_updates_are_cut_and_averaged():
    """Without noise: the mean of updates of norm at most 0.2."""
    game, plain = (
        quadratic(m)
        for m in (ef.methods.privacy(clip=0.2, noise=0.0), ef.methods.fedavg(average="uniform"))
    )
    updates = []
    for client in range(4):
        alone = quadratic(ef.methods.fedavg(average="uniform"))
        alone.rounds.engine = Only(alone.rounds.engine, client)
        updates.append(alone.play())
    cut = [u * min(1, 0.2 / np.linalg.norm(u)) for u in updates]
    assert game.play() == pytest.approx(np.mean(cut, 0), abs=1e-6)
    assert plain.play() == pytest.approx(np.mean(updates, 0), abs=1e-6)


class Only:
    """An engine with a single client online."""

    def __init__(self, engine: LocalEngine, client: int) -> None:
        self.engine, self.client = engine, client

    def online(self, round_):
        return np.array([self.client])

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.parametrize("where", ["central", "local"])
def test_noise_has_the_right_size(where):
    """The mean of n = 4 clients: z C / n from the server, z C / sqrt(n) from clients."""
    noise, clip, found = 2.0, 0.5, []
    quiet = quadratic(ef.methods.privacy(clip=clip, noise=0.0)).play()
    for seed in range(400):
        method = ef.methods.privacy(clip=clip, noise=noise, where=where, secret=False)
        game = quadratic(method)
        game.rounds.seed = seed
        game.rounds.engine.program.seed = seed
        found.append(game.play() - quiet)
    expected = noise * clip / (4 if where == "central" else 2)
    # 2000 draws: the standard deviation's own is 1.6 % of it
    assert np.std(found) == pytest.approx(expected, rel=0.08)
    assert abs(np.mean(found)) < 5 * expected / math.sqrt(2000)


def test_secret_noise_does_not_follow_the_seed():
    first, second = (quadratic(ef.methods.privacy()).play() for _ in range(2))
    assert not np.array_equal(first, second)


def test_epsilon_against_the_gaussian_mechanisms_bound():
    """Renyi: T releases at z give a T / (2 z^2) at order a, so that for every a > 1
    epsilon <= a T / (2 z^2) + log(1/delta) / (a - 1); the accountant is no worse, nor far off."""
    for noise, releases, delta in ((1.0, 1, 1e-5), (2.0, 100, 1e-6), (10.0, 1000, 1e-5)):
        orders = np.linspace(1.01, 200, 100_000)
        classic = (orders * releases / (2 * noise**2) + np.log(1 / delta) / (orders - 1)).min()
        assert 0.6 * classic < epsilon(noise, releases, delta) <= classic * 1.001


def test_epsilon_is_recorded_for_every_exchange(digits):
    stream = ef.streams.domains(digits, clients=3, rounds=2)
    both = {}
    for base in (ef.methods.fedavg(average="uniform"), ef.methods.fedtrack(average="uniform")):
        method = base + ef.methods.privacy(noise=3.0)
        run = ef.run(method, stream, ef.models.mlp(64, 8, 10))
        both[base.name] = [r["value"] for r in run.records if r["metric"] == "epsilon"]
        assert not [r for r in run.records if r["metric"] == "train_loss"]
    assert both["fedavg"] == pytest.approx([epsilon(3.0, k, 1e-5) for k in (1, 2, 3, 4)])
    assert both["fedtrack"] == pytest.approx([epsilon(3.0, k, 1e-5) for k in (2, 4, 6, 8)])


class Crash(Exception):
    pass


def test_a_release_that_a_crash_repeats_counts_twice(digits, tmp_path):
    """Killed after two rounds and before any checkpoint: both are played again, on other noise."""

    def die(progress):
        if progress.round == 2:
            raise Crash

    def spent(secret, **more):
        method = ef.methods.fedavg(average="uniform") + ef.methods.privacy(noise=3.0, secret=secret)
        stream = ef.streams.domains(digits, clients=3, rounds=2)
        folder = tmp_path / str(secret)
        run = ef.run(method, stream, ef.models.mlp(64, 8, 10), folder=folder, workers=1, **more)
        return [r["value"] for r in run.records if r["metric"] == "epsilon"]

    for secret, releases in ((True, (3, 4, 5, 6)), (False, (1, 2, 3, 4))):
        with pytest.raises(Crash):
            spent(secret, checkpoint_seconds=1e9, on_round=die)
        # on noise from the seed, the repeat is the same release to the last bit
        expected = [epsilon(3.0, k, 1e-5) for k in releases]
        assert spent(secret, resume=True) == pytest.approx(expected)
    (tmp_path / "True" / "asked").unlink()
    with pytest.raises(ef.EverfedError, match="counts 0 exchanges, and the run has had 4"):
        spent(True, resume=True)


def test_privacy_beside_every_method(digits):
    """Central noise goes with all that needs sums only; local noise with single uploads as well."""
    for name, entry in METHODS.items():
        if name == "privacy":
            continue
        base = entry.build(average="uniform")
        if not all(part.noisy for part in base.parts):
            for where in ("local", "central"):
                with pytest.raises(ef.EverfedError, match="does not go with this method"):
                    base + ef.methods.privacy(where=where)
            continue
        wheres = ["local"]
        if base.needs.secure_aggregation:
            wheres.append("central")
        else:
            with pytest.raises(ef.EverfedError, match="where = 'local'"):
                base + ef.methods.privacy(clip=0.5, noise=0.1)
        for where in wheres:
            private = ef.methods.privacy(clip=0.5, noise=0.1, where=where)
            stream = ef.streams.domains(digits, clients=5, rounds=1)
            run = ef.run(base + private, stream, ef.models.mlp(64, 4, 10), workers=1)
            assert [r["value"] for r in run.records if r["metric"] == "clients"] == [5, 5], name
    with pytest.raises(ef.EverfedError, match="average = 'uniform'"):
        ef.methods.fedavg() + ef.methods.privacy()


@pytest.mark.parametrize("name", ["fedavg", "ewc", "mimelite", "fedtrack", "fedeve", "special"])
def test_a_method_still_learns_from_uploads_that_are_cut(digits, name):
    """A number beside the update that is larger than it would take all of the norm."""
    method = METHODS[name].build(average="uniform") + ef.methods.privacy(clip=1.0, noise=0.0)
    stream = ef.streams.domains(digits, clients=5, alpha=None, rounds=15)
    run = ef.run(method, stream, ef.models.mlp(64, 16, 10), local=ef.Local(lr=0.1), workers=1)
    assert run.matrix[0][0] > 0.6  # 0.76 with FedAvg


def test_the_spread_is_private_too():
    """FedEve's sigma_R^2 from a noised sum of |u|^2: of the right size on average, and one more
    release a round. S = sum |u|^2 - n |u|^2 at noise 0."""
    method = ef.methods.fedeve(average="uniform")
    exact = quadratic(method + ef.methods.privacy(clip=5.0, noise=0.0))
    exact.play()
    true = float(exact.fed.parts[-1]["client"])
    found = []
    for seed in range(300):
        noisy = quadratic(method + ef.methods.privacy(clip=5.0, noise=1e-3, secret=False))
        noisy.rounds.seed = seed
        noisy.play()
        found.append(float(noisy.fed.parts[-1]["client"]))
        assert int(noisy.fed.parts[0]["releases"]) == 2
    # z C^2 / (n^2 d) on sigma_R^2, n = 4, d = 5
    size = 1e-3 * 5**2 / (16 * 5)
    assert np.std(found) == pytest.approx(size, rel=0.2)
    assert np.mean(found) == pytest.approx(true, abs=4 * size / math.sqrt(300))


def test_running_statistics_are_refused():
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10)
    )
    stream = ef.streams.static(ef.data.digits(["plain"]), clients=2, rounds=1)
    with pytest.raises(ef.EverfedError, match="GroupNorm"):
        ef.run(ef.methods.privacy(), stream, model)


def test_krum_with_too_few_clients_loses_the_round():
    game = quadratic(ef.methods.krum(bad=1), clients=4)
    events = game.rounds.play(game.fed)
    assert events.values["lost_round"] == 1
    assert "4 updates, and the method needs 5" in events.warnings[-1]


# robust aggregation -----------------------------------------------------------------------------
def test_median_and_trimmed_mean_by_hand():
    values = torch.tensor([[1.0, 9.0], [2.0, 8.0], [3.0, 7.0], [4.0, 60.0], [500.0, 5.0]])
    weights, means = torch.ones(5), frozenset({"update"})
    uploads = {"update": values, "0.dc": values}
    got = Trimmed(0.5).aggregate(uploads, weights, means)
    assert got["update"].tolist() == [3.0, 8.0]
    assert got["0.dc"].tolist() == [15.0, 40.0]  # a sum: n times
    got = Trimmed(0.2).aggregate(uploads, weights, means)
    assert got["update"].tolist() == [3.0, 8.0]  # (2 + 3 + 4) / 3, (7 + 8 + 9) / 3
    got = Trimmed(0.0).aggregate(uploads, weights, means)
    assert got["update"].tolist() == pytest.approx([102.0, 17.8])
    even = Trimmed(0.5).aggregate({"update": values[:4]}, weights[:4], means)
    assert even["update"].tolist() == [2.5, 8.5]


def test_krum_by_hand():
    """n = 5, f = 1: the two nearest of each count. 0: 1 + 4, 1: 1 + 1, 2: 1 + 4, 3: 9 + 16, ..."""
    values = torch.tensor([[0.0], [1.0], [2.0], [5.0], [100.0]])
    assert Krum(1, 1).chosen(values).tolist() == [1]
    assert sorted(Krum(1, 3).chosen(values).tolist()) == [0, 1, 2]
    uploads = {"update": values, "1.dc": values}
    got = Krum(1, 3).aggregate(
        uploads, torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]), frozenset({"update"})
    )
    assert got["update"].tolist() == [1.0]
    assert got["1.dc"].tolist() == [5.0]


def test_a_bounded_update():
    got = Bound(1.0).screen({"update": torch.tensor([[3.0, 4.0], [0.3, 0.4]])})["update"]
    assert got.flatten().tolist() == pytest.approx([0.6, 0.8, 0.3, 0.4])


@dataclasses.dataclass(frozen=True)
class Attack(Part):
    """The first clients send something else than they should."""

    stage = 9
    kind: str = "sign"
    bad: int = 2

    @property
    def batched(self):
        return False

    def seal(self, uploads, c):
        if c.clients[0] >= self.bad or "update" not in uploads:
            return uploads
        factor = {"sign": -4.0, "scaled": 50.0, "none": 1.0}[self.kind]
        return uploads | {"update": factor * uploads["update"]}


def label_flipped(data, owners, bad):
    y = data.y.clone()
    for client in range(bad):
        mine = torch.from_numpy(owners[client])
        y[mine] = 9 - y[mine]
    return dataclasses.replace(data, y=y)


def accuracy(method, data, kind, bad=2):
    stream = ef.streams.static(data, clients=10, alpha=None, rounds=12, seed=0)
    if kind == "labels":
        owners = [stream.samples(client, 0) for client in range(bad)]
        flipped = label_flipped(data, owners, bad)
        stream = dataclasses.replace(stream, data=flipped)
        kind = "none"
    method = Method(*method.parts, Attack(kind, bad), average=method.average)
    local = ef.Local(lr=0.2, epochs=2)
    return ef.run(method, stream, ef.models.mlp(64, 32, 10), local=local).acc


DEFENCES = {
    "median": ef.methods.median(),
    "trimmed_mean": ef.methods.trimmed_mean(share=0.2),
    "krum": ef.methods.krum(bad=2, keep=5),
    "norm_bound": ef.methods.norm_bound(clip=1.0),
}


@pytest.mark.parametrize("kind", ["sign", "scaled", "labels"])
def test_attackers_are_held_off(kind):
    """Two of ten clients attack: the mean suffers, each defence stays near the run without."""
    digits = ef.data.digits(["plain"])
    clean = accuracy(ef.methods.fedavg(), digits, "none")
    hurt = accuracy(ef.methods.fedavg(), digits, kind)
    held = {name: accuracy(method, digits, kind) for name, method in DEFENCES.items()}
    assert clean > 0.9
    if kind != "labels":  # flipped labels of two in ten hardly hurt a mean
        assert hurt < 0.6
    for name, got in held.items():
        assert got > clean - 0.1, (name, got, clean, hurt)


def test_robust_aggregation_beside_other_methods():
    for base in (
        ef.methods.scaffold(),
        ef.methods.special(),
        ef.methods.cfl_coreset(),
        ef.methods.fedadam(),
    ):
        game = quadratic(base + ef.methods.median(), rounds=2)
        assert np.isfinite(game.play()).all()
        assert isinstance(game.rounds, Rounds)
    digits = ef.data.digits(["plain", "inverted"])
    for base in (ef.methods.icarl(memory=50), ef.methods.cflag(iag=False), ef.methods.ewc(lam=1.0)):
        stream = ef.streams.domains(digits, clients=6, alpha=None, rounds=8)
        options = {"local": ef.Local(lr=0.1), "workers": 1}
        run = ef.run(base + ef.methods.krum(), stream, ef.models.mlp(64, 16, 10), **options)
        assert run.matrix[0][0] > 0.3, base.name
    with pytest.raises(ef.EverfedError, match="does not go with FedEve"):
        ef.methods.fedeve() + ef.methods.median()


def table() -> str:
    """Markdown: accuracy in % under each attack, of the mean and of each defence."""
    digits = ef.data.digits(["plain"])
    methods = {"fedavg": ef.methods.fedavg(), **DEFENCES}
    lines = ["| attack | " + " | ".join(f"`{name}`" for name in methods) + " |"]
    lines.append("|---|" + "---:|" * len(methods))
    for kind in ("none", "sign", "scaled", "labels"):
        cells = [f"{100 * accuracy(method, digits, kind):.1f}" for method in methods.values()]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
