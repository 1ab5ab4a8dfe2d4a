"""How gradients are computed: any module by autograd, or sequences of known layers written out."""

from everfed.compute.base import Compute, Objective, choose
from everfed.compute.layers import layers_of
from everfed.compute.module import ModuleCompute
from everfed.compute.sequence import SequenceCompute

__all__ = ["Compute", "ModuleCompute", "Objective", "SequenceCompute", "choose", "layers_of"]
