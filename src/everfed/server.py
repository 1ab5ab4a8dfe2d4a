"""What the server works with between rounds: the model as a function, and no data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from everfed.chance import torch_seed
from everfed.client import ClientProgram
from everfed.compute.base import Seen
from everfed.data.table import Inputs
from everfed.vector import Layout


class AtServer:
    """The model at the end of a round; see `everfed.method.Server`."""

    def __init__(self, program: ClientProgram, buffers: Tensor, round_: int) -> None:
        self.program, self.buffers, self.round = program, buffers, round_
        self.seed: int = program.seed
        program.compute.seed(torch_seed(self.seed, "server", round_))  # for dropout in `forward`
        self.layout: Layout = program.compute.layout
        self.inputs: Inputs = program.data.inputs
        x, y = program.data.x, program.data.y
        plain = x.is_floating_point() or x.dtype == torch.uint8
        self.classifies: bool = plain and y.dim() == 1 and not y.is_floating_point()
        flags = program.stream.known(program.stream.task(round_) + 1)
        classes = torch.arange(program.data.classes) if flags is None else flags.nonzero()[:, 0]
        self.seen = classes.to(program.compute.device)

    def forward(self, w: Tensor, x: Tensor, train: bool) -> Seen:
        return self.program.compute.forward(w, x, train, self.buffers)

    def fresh(self) -> Tensor:
        module: Any = copy.deepcopy(self.program.compute.module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(self.seed, "fresh weights", self.round))
            for child in module.modules():
                if hasattr(child, "reset_parameters"):
                    child.reset_parameters()
        return self.layout.flatten(dict(module.named_parameters()))
