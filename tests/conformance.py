"""One row a method for the conformance suite: how to build it small, and its numpy reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import reference
from everfed import methods
from everfed.method import Method


@dataclass(frozen=True)
class Row:
    """A method with settings that make a difference on small problems."""

    build: Callable[..., Method]
    settings: dict[str, Any] = field(default_factory=dict)
    #: the reference and its settings; None: the maths is checked elsewhere
    reference: Callable[..., Any] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    #: settings under which the method is FedAvg with the same averaging
    off: dict[str, Any] | None = None

    def method(self, **more: Any) -> Method:
        return self.build(**(self.settings | more))


ADAPTIVE = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
FLAG = {"alpha": 0.1, "lipschitz": 2.0, "clip": 10.0, "memory": 10**6, "draw": 10**6}
FLAG_REFERENCE = {"alpha": 0.1, "L": 2.0, "clip": 10.0}
MADE = {"batches": 2, "size": 16, "steps": 2, "warmup": 1, "student": 2, "latent": 8, "width": 2}
FREE = {"size": 16, "iterations": 3, "latent": 8, "width": 2}
TAYLOR = {"layers": {"": 0.3}, "buffer": 5}

ROWS = {
    "fedavg": Row(methods.fedavg, {"server_lr": 0.7}, reference.fedavg, {"server_lr": 0.7},
                  off={"server_lr": 1.0}),
    "fedprox": Row(methods.fedprox, {"mu": 0.5}, reference.fedprox, {"mu": 0.5}, off={"mu": 0.0}),
    "fedavgm": Row(methods.fedavgm, {"beta": 0.6, "server_lr": 0.8}, reference.fedavgm,
                   {"beta": 0.6, "server_lr": 0.8}, off={"beta": 0.0, "server_lr": 1.0}),
    "fedavgm nesterov": Row(methods.fedavgm, {"nesterov": True}, reference.fedavgm,
                            {"beta": 0.9, "server_lr": 1.0, "nesterov": True}),
    "fedadagrad": Row(methods.fedadagrad, {"server_lr": 0.1}, reference.fedopt,
                      ADAPTIVE | {"kind": "adagrad", "beta1": 0.0}),
    "fedadam": Row(methods.fedadam, {"server_lr": 0.1}, reference.fedopt, ADAPTIVE | {"kind": "adam"}),
    "fedyogi": Row(methods.fedyogi, {"server_lr": 0.1}, reference.fedopt, ADAPTIVE | {"kind": "yogi"}),
    "scaffold": Row(methods.scaffold, {}, reference.scaffold, {"option": 2, "reset": True}),
    "scaffold option 1": Row(methods.scaffold, {"option": 1, "reset": False}, reference.scaffold,
                             {"option": 1, "reset": False}),
    "mimelite": Row(methods.mimelite, {"beta": 0.3}, reference.mimelite, {"beta": 0.3},
                    off={"beta": 0.0}),
    "fednova": Row(methods.fednova, {"mu": 0.5}),
    "fedtrack": Row(methods.fedtrack, {"iag": False}, reference.fedtrack),
    "fedtrack iag": Row(methods.fedtrack),
    "special": Row(methods.special, {}, reference.special, {"lam": 0.25, "server_lr": "1/task"},
                   off={"lam": 0.0, "server_lr": 1.0}),
    "special auto": Row(methods.special, {"lam": "auto"}),
    "special_c": Row(methods.special_c, {"server_lr": 1.0}, reference.special_c, {"lam": 0.2},
                     off={"lam": 0.0}),
    "fedeve": Row(methods.fedeve, {}, reference.fedeve, {"q_mode": "innovation"}),
    "fedeve update": Row(methods.fedeve, {"q_mode": "update"}, reference.fedeve,
                         {"q_mode": "update"}),
    "fedeve layer": Row(methods.fedeve, {"gain": "layer"}),
    "ewc": Row(methods.ewc, {"lam": 0.5, "decay": 0.9}, reference.ewc, {"lam": 0.5, "decay": 0.9},
               off={"lam": 0.0}),
    "fedcurv": Row(methods.fedcurv, {"lam": 0.02}, reference.fedcurv, {"lam": 0.02}, off={"lam": 0.0}),
    "lwf": Row(methods.lwf, off={"lam": 0.0}),
    "flwf2t": Row(methods.flwf2t, off={"alpha": 1.0, "beta": 0.0}),
    "er": Row(methods.er, {"memory": 30}),
    "agem": Row(methods.agem, {"memory": 30}),
    "cflag_code": Row(methods.cflag_code, {"memory": 10}),
    "derpp": Row(methods.derpp, {"memory": 30}, off={"alpha": 0.0, "beta": 0.0}),
    "icarl": Row(methods.icarl, {"memory": 30}),
    "icarl means": Row(methods.icarl, {"memory": 30, "predict": "means"}),
    "nccl": Row(methods.nccl, {"memory": 30, "lipschitz": 2.0}),
    "fedproto": Row(methods.fedproto, off={"lam": 0.0}),
    "refed": Row(methods.refed, {"memory": 20, "steps": 3}),
    "sr_fdil": Row(methods.sr_fdil, {"memory": 20, "steps": 3}),
    "cfl_coreset": Row(methods.cfl_coreset, {"size": 5}),
    "cfl_coreset herding": Row(methods.cfl_coreset, {"size": 5, "choice": "herding"}),
    "cfl_generative": Row(methods.cfl_generative, {"count": 5, "steps": 3, "budget": 8}),
    "target": Row(methods.target, MADE, off={"kd": 0.0}),
    "mfcl": Row(methods.mfcl, FREE, off={"ft": 0.0, "kd": 0.0}),
    "pfeddil": Row(methods.pfeddil, {"steps": 5}, off={"threshold": 0.0, "kappa": 0.0}),
    "fedcil": Row(methods.fedcil, {"iterations": 3, "size": 8, "latent": 12, "width": 2}),
    "cfl_regularization": Row(methods.cfl_regularization, TAYLOR, reference.cfl_reg,
                              {"curvature": "fisher", "beta": 0.3, "buffer": 5},
                              off={"layers": {"": 0.0}}),
    "cfl_regularization hutchinson": Row(methods.cfl_regularization,
                                         TAYLOR | {"curvature": "hutchinson", "probes": 2, "mu": 0.2},
                                         reference.cfl_reg,
                                         {"curvature": "exact", "beta": 0.3, "buffer": 5, "mu": 0.2}),
    "cfl_regularization theory": Row(methods.cfl_regularization,
                                     {"layers": "all", "buffer": 5, "weights": "theory",
                                      "d2": 2.0, "r2": 0.5}, reference.cfl_reg_theory,
                                     {"curvature": "fisher", "D2": 2.0, "R2": 0.5, "buffer": 5}),
    "cfl_regularization auto": Row(methods.cfl_regularization, {"buffer": 9, "weights": "auto"}),
    "cflag": Row(methods.cflag, FLAG | {"iag": False, "printed": False}, reference.cflag,
                 FLAG_REFERENCE | {"adaptive": "average"}),
    "cflag off": Row(methods.cflag, FLAG | {"iag": False, "adaptive": "off"}, reference.cflag,
                     FLAG_REFERENCE | {"adaptive": "off"}),
    "cflag worst printed": Row(methods.cflag, FLAG | {"iag": False, "adaptive": "worst"},
                               reference.cflag,
                               FLAG_REFERENCE | {"adaptive": "worst", "printed": True}),
    "privacy": Row(methods.privacy, {"clip": 0.5, "noise": 0.01, "secret": False}),
    "privacy local": Row(methods.privacy, {"clip": 0.5, "noise": 0.01, "where": "local",
                                           "secret": False}),
    "median": Row(methods.median),
    "trimmed_mean": Row(methods.trimmed_mean, {"share": 0.3}),
    "krum": Row(methods.krum, {"bad": 0, "keep": 2}, off={"keep": 100}),
    "norm_bound": Row(methods.norm_bound, {"clip": 0.1}, off={"clip": 1e9}),
    "cflag iag": Row(methods.cflag, {"lipschitz": 2.0}),
    "cflag samples": Row(methods.cflag, {"lipschitz": 2.0, "iag": "samples"}),
    "cflag once": Row(methods.cflag, {"lipschitz": 2.0, "iag": False, "exchanges": 1}),
    "cflag once iag": Row(methods.cflag, {"lipschitz": 2.0, "exchanges": 1}),
}  # fmt: skip
