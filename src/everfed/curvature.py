"""Diagonal curvature of a loss: per-sample gradients for Fisher, Hutchinson's Hessian diagonal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

if TYPE_CHECKING:
    from everfed.compute.base import Compute, Objective

#: numbers in all per-sample gradients that are held at once
ROOM = 2**24


def losses(compute: Compute, w: Tensor, x: Tensor, y: Tensor, objective: Objective) -> Tensor:
    """Each sample's loss as a function of the flat vector w, (d,), and the inputs: (batch,)."""
    z = functional_call(compute.module, compute.layout.unflatten(w), (x,))
    return objective(z.unsqueeze(0), x.unsqueeze(0), y.unsqueeze(0))[0]


def mean_loss(compute: Compute, w: Tensor, x: Tensor, y: Tensor, objective: Objective) -> Tensor:
    """The mean loss of a batch."""
    return losses(compute, w, x, y, objective).mean()


def sample_gradients(
    compute: Compute, w: Tensor, x: Tensor, y: Tensor, objective: Objective
) -> Tensor:
    """One gradient a sample, (batch, d). The square of a batch's mean gradient is not a Fisher."""

    def one(vector: Tensor, xi: Tensor, yi: Tensor) -> Tensor:
        return mean_loss(compute, vector, xi.unsqueeze(0), yi.unsqueeze(0), objective)

    try:
        out: Tensor = vmap(grad(one), in_dims=(None, 0, 0))(w, x, y)
        return out
    except RuntimeError:  # a module that vmap cannot follow
        return torch.stack([grad(one)(w, xi, yi) for xi, yi in zip(x, y, strict=True)])


def sample_norms(compute: Compute, w: Tensor, x: Tensor, y: Tensor, objective: Objective) -> Tensor:
    """The norm of each sample's gradient, (batch,)."""
    compute.module.eval()
    chunk = max(1, ROOM // compute.layout.d)
    pieces = zip(torch.split(x, chunk), torch.split(y, chunk), strict=True)
    return torch.cat([sample_gradients(compute, w, *own, objective).norm(dim=1) for own in pieces])


def hutchinson(
    compute: Compute, w: Tensor, x: Tensor, y: Tensor, objective: Objective, signs: Tensor
) -> Tensor:
    """mean over probes z of z * (H z), an unbiased estimate of diag(H): signs (probes, d) -> (d,).

    H z is the derivative of the gradient along z (forward over reverse).
    """
    compute.module.eval()

    def slope(vector: Tensor) -> Tensor:
        out: Tensor = grad(lambda v: mean_loss(compute, v, x, y, objective))(vector)
        return out

    total = torch.zeros_like(w)
    for z in signs:
        total += z * jvp(slope, (w,), (z,))[1]
    return total / len(signs)
