"""Methods by name: each function builds a `Method` from its parts.

>>> special(lam=0.25).name
'special'
"""

from everfed.methods.agem import Projection, agem
from everfed.methods.cfl_coreset import CoreSet, cfl_coreset
from everfed.methods.cfl_generative import Generated, cfl_generative
from everfed.methods.cfl_regularization import Taylor, cfl_regularization
from everfed.methods.cflag import CFlag, Track, cflag, fedtrack
from everfed.methods.cflag_code import Released, cflag_code
from everfed.methods.derpp import DarkReplay, derpp
from everfed.methods.er import Rehearsal, Replay, er
from everfed.methods.ewc import Elastic, ewc
from everfed.methods.fedavg import ServerRate, fedavg
from everfed.methods.fedavgm import ServerMomentum, fedavgm
from everfed.methods.fedcil import AcGan, fedcil
from everfed.methods.fedcurv import Curv, fedcurv
from everfed.methods.fedeve import FedEve, fedeve
from everfed.methods.fednova import Nova, fednova
from everfed.methods.fedopt import ServerAdaptive, fedadagrad, fedadam, fedyogi
from everfed.methods.fedproto import Prototypes, fedproto
from everfed.methods.fedprox import Prox, fedprox
from everfed.methods.flwf2t import TwoTeachers, flwf2t
from everfed.methods.icarl import Exemplars, NearestMean, Teacher, icarl
from everfed.methods.lwf import Distil, lwf
from everfed.methods.mfcl import DataFree, mfcl
from everfed.methods.mimelite import MimeLite, mimelite
from everfed.methods.nccl import AdaptiveSteps, nccl
from everfed.methods.pfeddil import Bank, pfeddil
from everfed.methods.privacy import Privacy, privacy
from everfed.methods.refed import Informative, refed, sr_fdil
from everfed.methods.registry import METHODS, Entry, register
from everfed.methods.robust import Bound, Krum, Trimmed, krum, median, norm_bound, trimmed_mean
from everfed.methods.scaffold import Scaffold, scaffold
from everfed.methods.special import Anchor, ClientAnchor, MovedRate, special, special_c
from everfed.methods.target import Synthesis, target

__all__ = [
    "METHODS", "AcGan", "AdaptiveSteps", "Anchor", "Bank", "Bound", "CFlag", "ClientAnchor",
    "CoreSet", "Curv", "DarkReplay", "DataFree", "Distil", "Elastic", "Entry", "Exemplars",
    "FedEve", "Generated", "Informative", "Krum", "MimeLite", "MovedRate", "NearestMean", "Nova",
    "Privacy", "Projection", "Prototypes", "Prox", "Rehearsal", "Released", "Replay", "Scaffold",
    "ServerAdaptive", "ServerMomentum", "ServerRate", "Synthesis", "Taylor", "Teacher", "Track",
    "Trimmed", "TwoTeachers", "agem", "cfl_coreset", "cfl_generative", "cfl_regularization",
    "cflag", "cflag_code", "derpp", "er", "ewc", "fedadagrad", "fedadam", "fedavg", "fedavgm",
    "fedcil", "fedcurv", "fedeve", "fednova", "fedproto", "fedprox", "fedtrack", "fedyogi",
    "flwf2t", "icarl", "krum", "lwf", "median", "mfcl", "mimelite", "nccl", "norm_bound",
    "pfeddil", "privacy", "refed", "register", "scaffold", "special", "special_c", "sr_fdil",
    "target", "trimmed_mean",
]  # fmt: skip
