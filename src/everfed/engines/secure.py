"""An exchange in which the server sees sums only: Flower's SecAgg+ around a request.

Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020. Clients add
masks to their uploads that cancel in the sum; shares of the masks' seeds lie with other clients, so
that the sum is found although some drop out. Flower's workflow plays the four stages (keys, shares,
masked uploads, unmasking). It is made for Flower's older strategies: `Collector` stands in for one,
and `Masking` puts everfed's request into the stage in which clients answer.

Uploads are rounded at random to 2^22 steps of [-R, R]: a mean is exact to about R / 2^21. One that
does not fit into the range is refused at the site. Clients count the same, so that no weights are
told. For the cohort's spread (drift meters, FedEve) a client adds |u|^2, and |u|^2 / 1024 if that
does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid
from torch import Tensor

from everfed.engines.site import Answered
from everfed.engines.terms import Terms
from everfed.errors import EverfedError
from everfed.method import Method
from everfed.reduce import Reducer
from everfed.vector import squares

COARSE = 1024.0
#: clients of a sum at most: the sum of their weights is told in 2^32 steps, of 2^22 each
MOST = 1023


def check(method: Method) -> None:
    """Raise EverfedError where a method cannot work with sums of equal clients."""
    if not method.needs.secure_aggregation:
        raise EverfedError(f"{method.name} looks at single uploads: flower.secure must be false")
    if method.average != "uniform":
        raise EverfedError("secure aggregation needs clients that count the same: "
                           "method.average = 'uniform'")  # fmt: skip


# at a site -----------------------------------------------------------------------------------
def wrap_masked(
    answered: Answered, pieces: Sequence[int], limit: float, needed: bool
) -> RecordDict:
    """A site's answer in the form in which Flower's mod masks it, with the squares of the update's
    pieces; where they are not `needed`, those that do not fit are told as too large."""
    if answered.reply is None:
        raise EverfedError("the site has no samples now: it drops out of the masked sum")
    uploads = {key: value[0] for key, value in answered.reply.uploads.items()}
    if "update" in uploads and pieces:
        own = torch.stack([squares(part) for part in torch.split(uploads["update"], list(pieces))])
        coarse = own / COARSE
        coarse = coarse if needed else coarse.clamp(max=limit)
        uploads["squares"] = torch.cat([own.clamp(max=limit), coarse])
    uploads = {key: value for key, value in sorted(uploads.items()) if value.numel()}
    for key, value in uploads.items():
        if not bool((value.abs() <= limit).all()):  # NaN does not either
            raise EverfedError(f"upload {key} does not fit into flower.range = {limit:g}")
    said: dict[str, Any] = {"token": answered.token, "lost": answered.lost}
    said["keys"] = ",".join(uploads)
    arrays = [value.double().cpu().numpy() for value in uploads.values()]
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), 1, said)
    return fitres_to_recorddict(result, keep_input=False)


# at the server -------------------------------------------------------------------------------
@dataclass
class Collector:
    """What the workflow takes for a strategy: asks these nodes, keeps what comes of it."""

    nodes: Iterable[int]
    results: list[tuple[Any, FitRes]] = field(default_factory=list)

    def configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=n), FitIns(Parameters([], ""), {})) for n in self.nodes]

    def aggregate_fit(
        self, _: int, results: list[tuple[Any, FitRes]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        self.results = results
        return None, {}


@dataclass
class Masking:
    """A grid that adds to the messages of the third stage what clients are asked."""

    grid: Grid
    contents: Mapping[int, RecordDict]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        for message in messages:
            stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            if stage == Stage.COLLECT_MASKED_VECTORS:
                for name, record in self.contents[message.metadata.dst_node_id].items():
                    message.content[name] = record
        return self.grid.send_and_receive(messages, timeout=timeout)


class Workflow(SecAggPlusWorkflow):
    """Flower's, in which clients may also drop out before their keys are shared: nobody has masked
    anything with them, and nobody holds shares that would take their masks out."""

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        enough = super().share_keys_stage(grid, context, state)
        there = state.sampled_node_ids = set(state.active_node_ids)
        neighbours = state.nid_to_neighbours
        state.nid_to_neighbours = {node: neighbours[node] & there for node in there}
        return enough


def play(
    grid: Grid, contents: Mapping[int, RecordDict], round_: int, terms: Terms
) -> dict[int, FitRes]:
    """One masked exchange: node -> what it told openly, with the mean of all uploads; empty where
    too few answered. Fewer than the quorum are never unmasked: the difference to a second try
    would be the uploads of those who were missing."""
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: round_}),
            MAIN_PARAMS_RECORD: ArrayRecord(),
        }
    )
    collector = Collector(contents)
    context = LegacyContext(Context(0, 0, {}, state, {}), strategy=cast(Any, collector))
    play_stages = Workflow(
        1.0, max(terms.quorum, 0.51), max_weight=1.0, clipping_range=terms.range,
        timeout=terms.deadline,
    )  # fmt: skip
    play_stages(cast(Grid, Masking(grid, contents)), context)
    return {proxy.node_id: result for proxy, result in collector.results}


def fill(reducer: Reducer, results: Mapping[int, FitRes], like: Tensor, limit: float) -> None:
    """Put the mean of all uploads into a reducer, as if it had added them up itself."""
    first, *_ = results.values()
    keys = [key for key in str(first.metrics["keys"]).split(",") if key]
    means = dict(zip(keys, parameters_to_ndarrays(first.parameters), strict=True))
    reducer.n, reducer.weight = len(results), float(len(results))
    reducer.weight_sq = reducer.weight
    for key in {*means, *reducer.shapes} & {*reducer.kinds, "squares"}:
        mean = means.get(key, np.zeros(0))
        if key in reducer.shapes and mean.shape != reducer.shapes[key]:
            raise EverfedError(f"masked uploads of {key} have shape {mean.shape}")
        reducer.sums[key] = reducer.n * torch.from_numpy(np.asarray(mean)).to(like)
    if reducer.pieces:
        fine, coarse = reducer.sums.pop("squares").double().view(2, -1)
        # a sum below what one client may say is of clients that all told the truth
        own = torch.where(COARSE * coarse < limit, fine, COARSE * coarse)
        reducer.lengths = float(own.sum()) if bool((coarse < limit).all()) else math.inf
        if reducer.spread:
            reducer.sums |= {"squares": own, "plain": reducer.sums["update"].clone()}
