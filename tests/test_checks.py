"""Hand-derived numbers of every method on the two quadratics, through the real engine.

f_A = 1/2 (w-1)^2 with 1 sample, f_B = 1/2 2 (w-4)^2 with 3; w_0 = 0, rate 0.1, 2 local steps. The
first steps can be followed by hand: A goes 0 -> 0.1 -> 0.19, B goes 0 -> 0.8 -> 1.44; weighted by
samples that is 0.1175... = 0.25 * 0.19 + 0.75 * 1.44 = 1.1275.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from everfed import memory, methods
from everfed.curvature import hutchinson
from everfed.local import Local
from everfed.method import Reduced
from everfed.methods.cfl_regularization import Taylor
from everfed.methods.cflag import Rates
from everfed.methods.fedeve import FedEve
from everfed.methods.fednova import Nova
from everfed.methods.lwf import distillation
from everfed.methods.special import pull
from everfed.theory.gain import by_chance
from everfed.theory.weights import independent
from everfed.vector import Layout, squares
from quadratics import Q2, Game, q2

FIRST_ROUNDS = [
    (methods.fedavg(), [1.1275, 1.897019]),
    (methods.fedavg(average="uniform"), [0.815]),
    (methods.fedprox(1.0), [1.065]),
    (methods.fedavgm(), [1.1275, 2.911769]),
    (methods.fedavgm(nesterov=True), [2.14225, 3.905463]),
    (methods.fedadagrad(0.1), [0.099911, 0.169562]),
    (methods.fedadam(0.1), [0.099117, 0.232845]),
    (methods.fedyogi(0.1), [0.099117, 0.232503]),
    (methods.scaffold(), [0.815, 1.4215, 1.860653]),
    (methods.mimelite(0.9), [0.08915, 0.25604]),
    (methods.mimelite(0.01), [0.807692, 1.403538]),
    (methods.fedeve(average="uniform"), [0.513195, 1.035382, 1.505504]),
    (methods.fedeve(q_mode="update", average="uniform"), [0.513195, 1.039035, 1.482911]),
    (methods.fedtrack(iag=False, average="uniform"), [0.8325, 1.433981]),
]


@pytest.mark.parametrize(
    ("method", "expected"), FIRST_ROUNDS, ids=[f"{m.name}-{m.average}" for m, _ in FIRST_ROUNDS]
)
def test_first_rounds(method, expected):
    assert q2(method, len(expected)) == pytest.approx(expected, abs=1e-6)


LIMITS = [
    # one round is w -> 0.75 * (0.64 w + 1.44) + 0.25 * (0.81 w + 0.19), whose fixed point is this
    (methods.fedavg(), 3.551181),
    (methods.fedavg(average="uniform"), 2.963636),
    # free of client drift: the minimiser of the mean objective, (1 + 8) / 3
    (methods.scaffold(), 3.0),
    (methods.fedtrack(iag=False, average="uniform"), 3.0),
    (methods.fedtrack(iag=True, average="uniform"), 3.0),
    # a server optimiser does not move FedAvg's fixed point
    (methods.fedavgm(average="uniform"), 2.963636),
]


@pytest.mark.parametrize(
    ("method", "limit"), LIMITS, ids=[f"{m.name}-{m.average}-{v}" for m, v in LIMITS]
)
def test_fixed_points(method, limit):
    assert q2(method, 300)[-1] == pytest.approx(limit, abs=1e-5)


def test_scaffold_control_variates():
    """A wrong sign of c survives a single-step golden test; two rounds and the limit do not."""
    game = Game(methods.scaffold(), [Q2], rounds=400, local=Local(lr=0.1, steps=2, batch=8))
    game.play()
    assert game.fed.parts[0]["c"].item() == pytest.approx(-4.075)
    assert [game.fed.clients[i][0]["c"].item() for i in (0, 1)] == pytest.approx([-0.95, -7.2])
    for _ in range(398):
        game.play()
    assert game.fed.parts[0]["c"].item() == pytest.approx(0, abs=1e-6)
    assert [game.fed.clients[i][0]["c"].item() for i in (0, 1)] == pytest.approx([2, -2])


def test_mimelite_momentum_is_the_gradient_at_the_old_model():
    game = Game(methods.mimelite(0.9), [Q2], rounds=2, local=Local(lr=0.1, steps=2, batch=8))
    game.play()
    assert game.fed.parts[0]["m"].item() == pytest.approx(-0.45)  # 0.1 * mean(-1, -8)
    game.play()
    assert game.fed.parts[0]["m"].item() == pytest.approx(-0.841627, abs=1e-6)


def test_fedeve_gain_and_variance():
    game = Game(
        methods.fedeve(average="uniform"), [Q2], rounds=3, local=Local(lr=0.1, steps=2, batch=8)
    )
    gains, predicted = [], []
    for _ in range(3):
        game.play()
        gains.append(game.fed.parts[0]["gain"].item())
        predicted.append((game.fed.w + game.fed.parts[0]["m"]).item())
    assert gains == pytest.approx([0.629687, 0.460013, 0.384193], abs=1e-6)
    assert predicted[0] == pytest.approx(1.026389, abs=1e-6)
    local = Local(lr=0.1, steps=2, batch=8)
    game = Game(methods.fedeve(q_mode="update", average="uniform"), [Q2], rounds=3, local=local)
    gains = [game.play() is not None and game.fed.parts[0]["gain"].item() for _ in range(3)]
    assert gains[1:] == pytest.approx([0.646894, 0.580563], abs=1e-6)


def eve(var, m, updates, **settings):
    """A step of FedEve's server on updates of equal clients, (clients, d)."""
    u = torch.tensor(updates, dtype=torch.float64)
    part, d = FedEve(**settings), u.shape[1]
    s = part.init(torch.zeros(d, dtype=u.dtype), Layout(()))
    s |= {"var": torch.tensor([var]), "m": torch.tensor(m, dtype=u.dtype)}
    spread = (u - u.mean(0)).square().mean().view(1)
    r = Reduced({}, torch.zeros(d), len(u), len(u), 99, 0, 0, spread)
    return part.fold(s, u.mean(0), r)[1]


@pytest.mark.parametrize(
    ("var", "noise", "gain", "fused", "mean"),
    [(1, 1, 0.5, 0.5, 1.5), (3, 1, 0.75, 0.75, 1.75), (0.2, 0.8, 0.2, 0.16, 1.2)],
)
def test_fedeve_fuses_a_prediction_of_1_with_an_observation_of_2(var, noise, gain, fused, mean):
    """Ten clients 2 +- sqrt(10 noise): sigma_R^2 is noise, and sigma_Q^2 is (2 - 1)^2 / 10."""
    away = (10 * noise) ** 0.5
    s = eve(var - 0.1, [1.0], [[2 + away], [2 - away]] * 5)
    found = [s["gain"].item(), s["var"].item(), s["m"].item()]
    assert found == pytest.approx([gain, fused, mean])


def test_fedeve_on_two_clients_of_two_parameters():
    s = eve(0.0, [0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])
    assert [s[k].item() for k in ("period", "client", "gain")] == [0.125, 0.125, 0.5]
    assert s["m"].tolist() == [0.25, 0.25]
    assert s["var"].item() == 0.0625
    s = eve(0.0625, [0.25, 0.25], [[1.0, 1.0], [0.0, 1.0]])
    assert [s[k].item() for k in ("period", "client")] == [0.15625, 0.0625]
    assert s["gain"].item() == pytest.approx(7 / 9)
    assert s["m"].tolist() == pytest.approx([0.444444, 0.833333], abs=1e-6)
    assert s["var"].item() == pytest.approx(0.048611, abs=1e-6)
    s = eve(0.0625, [0.25, 0.25], [[1.0, 1.0], [0.0, 1.0]], q_mode="update")
    assert s["period"].item() == 0.3125  # |u|^2 / (S d) = 1.25 / 4


@pytest.mark.parametrize("sizes", [[1.0] * 10, [1.0] * 40, [20.0] + [1.0] * 9])
def test_fedeves_gain_is_that_of_chance_where_clients_are_drawn_at_random(sizes):
    """Gaussian updates, whose scale must not matter; 200 rounds to come to rest, 200 counted."""
    random, d, part = torch.Generator().manual_seed(0), 500, FedEve()
    p = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    s = part.init(torch.zeros(d, dtype=p.dtype), Layout(()))
    gains = []
    for _ in range(400):
        u = 7 * torch.randn(len(p), d, generator=random, dtype=p.dtype)
        mean = p @ u
        spread = (u - mean).square().mean().view(1)
        r = Reduced({}, torch.zeros(d), len(p), len(p), 99, 0, 0, spread)
        s = part.fold(s, mean, r)[1]
        gains.append(s["gain"].item())
    effective = 1 / p.square().sum().item()
    assert np.mean(gains[200:]) == pytest.approx(by_chance(len(p), effective), rel=0.02)


def test_fedeve_beside_parts_that_scale_updates():
    """With equal steps FedNova is FedAvg, and so is each of them under FedEve. A server rate of 1/2
    halves every update, so that its first round goes half as far at the same gain."""
    alone = q2(methods.fedeve(average="uniform"), 3)
    beside = methods.fednova(average="uniform") + methods.fedeve(average="uniform")
    assert q2(beside, 3) == pytest.approx(alone)
    half = methods.fedavg(server_lr=0.5, average="uniform") + methods.fedeve(average="uniform")
    assert q2(half, 1) == pytest.approx([alone[0] / 2])


def test_fedeve_settles_at_fedavgs_fixed_point():
    """Slowly: the gain falls as the prediction gets better."""
    path = q2(methods.fedeve(average="uniform"), 300)
    away = np.abs(np.array(path) - 2.963636)
    assert away[-50:].max() < 0.02
    assert away[-50:].max() < 0.2 * away[:50].max()


def test_fednova_with_one_and_three_steps():
    """batch 1 over copies of one sample: client A takes 1 step, client B 3 full ones."""
    game = Game(methods.fednova(), [Q2], rounds=1, local=Local(lr=0.1, epochs=1, batch=1))
    assert game.play()[0] == pytest.approx(1.2825)
    plain = Game(methods.fedavg(), [Q2], rounds=1, local=Local(lr=0.1, epochs=1, batch=1))
    assert plain.play()[0] == pytest.approx(1.489)


def test_fednova_norms():
    steps = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert Nova().norm(steps, 0.1, 0.9).tolist() == pytest.approx([1, 2.9, 5.61])
    assert Nova(mu=1.0).norm(steps, 0.1, 0.0)[2].item() == pytest.approx(2.71)


# SPECIAL ------------------------------------------------------------------------------------------
IDLE = [(np.ones((1, 1)), np.zeros((1, 1))), (np.ones((3, 1)), np.zeros((3, 1)))]


def second_task(method, rounds):
    """Q2 as the second task after one that leaves the model (and so the anchor) at 0."""
    local = Local(lr=0.1, steps=2, batch=8)
    game = Game(method, [IDLE, Q2], rounds=rounds, local=local)
    return [float(w[0]) for w in game.play_all()[rounds:]]


def test_special():
    assert pull(torch.tensor(2.0), torch.tensor(1.0), 0.25).item() == pytest.approx(1.8)
    # gamma_G is 1/2 in the second task
    path = second_task(methods.special(0.25), 60)
    assert path[:3] == pytest.approx([0.326, 0.55094, 0.706149], abs=1e-6)
    assert path[-1] == pytest.approx(0.5 * 0.815 / (0.5 * 0.275 + 0.25), abs=1e-6)


def test_special_c():
    assert pull(torch.tensor(2.0), torch.tensor(1.0), 0.5).item() == pytest.approx(1.666667)
    assert second_task(methods.special_c(0.2, server_lr=1.0), 1) == pytest.approx(
        [0.507653], abs=1e-6
    )


def test_squares_of_many_updates_are_summed_carefully():
    """The spread is a small difference of large sums, so they may not be rounded as floats are."""
    v = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0))
    assert squares(v).tolist() == pytest.approx(v.double().square().sum(1).tolist(), rel=1e-8)


# CFL ----------------------------------------------------------------------------------------------
def test_taylor_compression_is_exact():
    state = {
        "h0": torch.tensor([[2.0, 1.0]]),
        "h1": torch.tensor([[1.0, 4.0]]),
        # c = g - h * w^ for (w^, g) = ((1,0), (.5,-.5)) and ((0,2), (1,0))
        "c0": torch.tensor([[0.5 - 2, -0.5]]),
        "c1": torch.tensor([[1.0, -8.0]]),
    }
    # Theorem 4.1 with D^2 = 1, R^2 = 1/2, t = 3 weighs both past rounds with 1/4
    assert independent(3, 1.0, 0.5) == pytest.approx((0.25, 0.5))
    _, down = Taylor(weights="theory", d2=1.0, r2=0.5).send(state, torch.zeros(2))
    assert down["h"].tolist() == pytest.approx([0.75, 1.25])
    assert down["c"].tolist() == pytest.approx([-0.125, -2.125])
    w = torch.tensor([0.5, 0.5])
    assert (down["h"] * w + down["c"]).tolist() == pytest.approx([0.25, -1.5])


def test_auto_finds_the_drift_of_a_noisy_quadratic():
    """Gradients w - c_ti with c_ti = delta_i + xi_ti: D^2 = |xi|^2 = 4, G^2 = 1; curvature is
    constant, so Hutchinson's series are exact, nothing is lost and all rounds weigh alike."""
    random = np.random.default_rng(0)
    clients, rounds, d = 10, 20, 20
    delta = random.normal(0, np.sqrt(1 / d), (clients, 1, d))
    tasks = [
        [(np.ones((1, d)), own + random.normal(0, np.sqrt(4 / d), (1, d))) for own in delta]
        for _ in range(rounds)
    ]
    method = methods.cfl_regularization("hutchinson", "all", buffer=10**4, weights="auto")
    game = Game(method, tasks, rounds=1, local=Local(lr=0.1, steps=2, batch=8))
    game.play_all()
    d2, r2 = game.fed.parts[0]["drifts"].tolist()
    assert d2 == pytest.approx(4, rel=0.1)  # a standard error is 0.025: 19 * 10 * 20 residuals
    assert r2 == pytest.approx(0, abs=1e-10)
    _, down = method.parts[0].send(game.fed.parts[0], game.fed.w)
    assert float(down["now"]) == pytest.approx(1 / (rounds + 1))


def test_auto_measures_what_a_series_loses():
    """f = (w - 4)^2 / 2 from 0 with one step of 0.1: w^ = 0.4, g = -3.6, Fisher h = 12.96. At 0
    the series says g - 0.4 h = -8.784, and the gradient is -4."""
    one = [[(np.ones((1, 1)), np.full((1, 1), 4.0))]]
    method = methods.cfl_regularization(layers="all", weights="auto")
    game = Game(method, one, rounds=1, local=Local(lr=0.1, steps=1, batch=8))
    game.play()
    assert game.fed.parts[0]["l0"].item() == pytest.approx((8.784 - 4) ** 2)


def test_fisher_is_the_mean_of_squares():
    """The square of the mean gradient, a common bug, would be (0.44, 0)."""
    # gradients a (w - c) at w = 0 are (1,-2), (-1,2), (2,0)
    clients = [(np.ones((3, 2)), -np.array([[1.0, -2.0], [-1.0, 2.0], [2.0, 0.0]]))]
    game = Game(methods.ewc(), [clients, clients], rounds=1, local=Local(lr=1e-9, steps=1, batch=8))
    game.play()
    fisher = game.fed.parts[0]["fisher"]
    assert fisher.tolist() == pytest.approx([2.0, 2.666667], abs=1e-5)


def test_ewc_with_far_too_large_a_pull_stays_where_it_was():
    """lambda F lr is far above the 2 that plain steps bear. Cut to 1, each step leads from w* to
    w* - lr g(w), w where the step before has led."""
    game = Game(methods.ewc(lam=1e4), [Q2, Q2], rounds=4, local=Local(lr=0.1, steps=5, batch=8))
    path = game.play_all()
    star = float(path[3][0])  # the end of the first task
    a = b = star
    for _ in range(5):
        a, b = star - 0.1 * (a - 1), star - 0.1 * 2 * (b - 4)
    assert float(path[4][0]) == pytest.approx(0.25 * a + 0.75 * b, abs=1e-6)


def test_hutchinson_is_exact_over_all_signs():
    hessian = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)

    class Saddle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            return (0.5 * self.w @ hessian @ self.w).expand(len(x), 1)

    from everfed.compute import ModuleCompute, Objective

    compute = ModuleCompute(Saddle(), torch.device("cpu"), "float32")
    objective = Objective(loss=lambda z, y: z[:, 0])
    signs = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    x = torch.zeros(1, 1, dtype=torch.float64)
    got = hutchinson(compute, compute.weights(), x, x[:, 0], objective, signs)
    assert got.tolist() == pytest.approx([2, 3])


def test_theorem_41():
    assert independent(4, 4, 1) == pytest.approx((0.210526, 0.368421), abs=1e-6)
    assert independent(10, 1, 0.25) == pytest.approx((0.081633, 0.265306), abs=1e-6)
    assert independent(5, 1, 0) == pytest.approx((0.2, 0.2))  # no information loss: a plain mean
    assert independent(5, 1, 1e12)[1] == pytest.approx(1)  # all lost: FedAvg


def test_herding_never_repeats():
    features = torch.tensor([[0.0], [1.0], [2.0], [3.0], [10.0]])
    assert memory.herding_order(features, 3) == [3, 2, 1]
    assert sorted(memory.herding_order(features, 9)) == [0, 1, 2, 3, 4]
    # of two, both are equally far from their mean: rounding must not choose
    pairs = torch.rand(100, 2, 8, generator=torch.Generator().manual_seed(0))
    assert all(memory.herding_order(pair, 1) == [0] for pair in pairs)


# C-FLAG -------------------------------------------------------------------------------------------
def rates(a, adaptive, clip=float("inf")):
    f, p, n = torch.tensor([1.0, 0.0]), torch.tensor([[0.5]]), torch.tensor(2.0)
    alpha, beta = Rates(5.0, adaptive, clip)(f, torch.tensor([a]), 0.1, 0.1, p, n)
    return alpha.item(), beta.item()


@pytest.mark.parametrize(
    ("a", "adaptive", "plain", "adapted"),
    [
        # L/2 p c beta^2 |a|^2 - beta (1 - L alpha) <f, a>, before and after the rates adapt
        ([2.0, 1.0], "average", -0.0375, -0.04),
        ([2.0, 1.0], "worst", 0.025, -0.02),
        ([-1.0, 2.0], "average", 0.1125, 0.0625),
    ],
)
def test_adaptive_rates_lower_the_forgetting_term(a, adaptive, plain, adapted):
    f, p, n = torch.tensor([1.0, 0.0]), torch.tensor([[0.5]]), torch.tensor(2.0)

    def gamma(alpha, beta):
        given = Rates(5.0, adaptive, float("inf"))
        rate = torch.tensor([[alpha]]), torch.tensor([[beta]])
        return given.forgetting(f, torch.tensor([a]), *rate, p, n).item()

    assert gamma(0.1, 0.1) == pytest.approx(plain)
    assert gamma(*rates(a, adaptive)) == pytest.approx(adapted)


def test_adaptive_rates():
    assert rates([2.0, 1.0], "average") == pytest.approx((0.1, 0.08))
    assert rates([2.0, 1.0], "worst") == pytest.approx((0.1, 0.04))
    assert rates([-1.0, 2.0], "average") == pytest.approx((0.2, 0.1))
    assert rates([2.0, 1.0], "off") == pytest.approx((0.1, 0.1))
    assert rates([0.02, 0.0], "average", clip=1.0) == pytest.approx((0.1, 0.1))  # guarded
    assert rates([-9.0, 0.0], "average", clip=1.0) == pytest.approx((0.2, 0.1))  # 1/L


CFLAG_ROUNDS = [
    ({"adaptive": "off"}, (-1, 3), 0.9325),
    ({"adaptive": "average", "printed": False}, (-1, 3), 0.9),
    ({"adaptive": "average", "printed": True}, (-1, 3), 2.521021),
    ({"adaptive": "worst", "printed": False}, (-1, 3), 0.5),
    ({"adaptive": "worst", "printed": True}, (-1, 3), 1.310511),
    # interference: the step is -alpha grad f exactly, where alpha_i is not capped at 1/L
    ({"adaptive": "average", "printed": False}, (-3, 1), -0.1),
    # capped, alpha = (.255, .5): -(.255 + .5)/2 * 1 + .1 (1.55 + 15.1)/2 with grad f = 1
    ({"adaptive": "average", "printed": False, "clip": 10.0}, (-3, 1), 0.455),
]


@pytest.mark.parametrize(("options", "centres", "expected"), CFLAG_ROUNDS)
def test_cflag_round_with_memory(options, centres, expected):
    """Memories 1/2 (w - m)^2 from a first task in which the model does not move from 0."""
    remembered = [
        (np.ones((n, 1)), np.full((n, 1), float(m))) for n, m in zip((1, 3), centres, strict=True)
    ]
    settings = {"lipschitz": 2.0, "iag": False, "clip": float("inf")} | options
    method = methods.cflag(alpha=0.1, average="uniform", **settings)
    local = Local(lr=0.1, steps=2, batch=8)
    game = Game(method, [remembered, Q2], rounds=1, local=local)
    game.play()
    game.fed.w = torch.zeros(1, dtype=torch.float64)
    assert game.play()[0] == pytest.approx(expected, abs=1e-6)


def test_distillation():
    z, u = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0])
    assert distillation(z, u, 2.0).item() == pytest.approx(0.693147, abs=1e-6)
    assert distillation(torch.tensor([0.0, 1.0]), u, 2.0).item() == pytest.approx(
        0.839606, abs=1e-6
    )


@pytest.mark.parametrize(
    "check",
    [
        reference.check_standard,
        reference.check_cfl,
        reference.check_special,
        reference.check_fedeve,
        reference.check_cflag,
        reference.check_ewc,
        reference.check_fedcurv,
    ],
)
def test_the_reference_itself(check):
    """The numpy reference that the conformance suite compares with has the right numbers too."""
    check()
