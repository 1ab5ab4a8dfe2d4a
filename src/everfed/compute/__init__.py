"""How gradients are computed: one module by autograd, or many small dense ones as matrices."""

from everfed.compute.base import Compute, Objective, choose
from everfed.compute.dense import DenseCompute
from everfed.compute.module import ModuleCompute

__all__ = ["Compute", "DenseCompute", "ModuleCompute", "Objective", "choose"]
