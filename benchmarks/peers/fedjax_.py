"""FedJAX: its federated averaging with models in Haiku, on its default (jit) backend.

FedJAX fills a client's last batch with samples drawn once more; these are counted, being trained
on, though other simulators train on the rest alone.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fedjax
import haiku as hk
import jax
import numpy as np
from clock import Clock, arguments
from fedjax.algorithms import fed_avg
from workloads import LR, WORKLOADS, block, data

jax.tree_map = jax.tree_util.tree_map  # its old name, which FedJAX 0.0.17 still uses
Forward = Callable[[jax.Array], jax.Array]


def lenet5(x: jax.Array) -> jax.Array:
    """Two 5x5 convolutions with pooling, then three dense layers."""
    for channels in (6, 16):
        x = jax.nn.relu(hk.Conv2D(channels, 5, padding="VALID")(x))
        x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return hk.nets.MLP([120, 84, 62])(hk.Flatten()(x))


def mlp(x: jax.Array) -> jax.Array:
    """One hidden layer."""
    return hk.nets.MLP([200, 10])(x)


def resnet18(x: jax.Array) -> jax.Array:
    """ResNet-18 for 32x32 images with GroupNorm."""

    def conv(x: jax.Array, width: int, size: int = 3, stride: int = 1) -> jax.Array:
        x = hk.Conv2D(width, size, stride, with_bias=False)(x)
        return hk.GroupNorm(2)(x)

    x = jax.nn.relu(conv(x, 64))
    for width, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for stride in (first, 1):
            y = conv(jax.nn.relu(conv(x, width, 3, stride)), width)
            same = x.shape == y.shape
            x = jax.nn.relu(y + (x if same else conv(x, width, 1, stride)))
    return hk.Linear(10)(x.mean((1, 2)))


MODELS: dict[str, Forward] = {"lenet5": lenet5, "mlp": mlp, "resnet18": resnet18}


def build(model: str, x: np.ndarray, y: np.ndarray) -> fedjax.Model:
    """FedJAX's container of a Haiku model with the cross entropy."""
    return fedjax.create_model_from_haiku(
        transformed_forward_pass=hk.transform(lambda batch: MODELS[model](batch["x"])),
        sample_batch={"x": x[:1], "y": y[:1]},
        train_loss=lambda batch, out: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], out),
    )


def main() -> None:
    workload, seconds, threads = arguments()
    # what the size of XLA's pool of threads comes from
    os.environ["NPROC"] = os.environ["PJRT_NPROC"] = str(threads)
    w, clock = WORKLOADS[workload], Clock(seconds)
    x, y, _ = data(workload)
    if x.ndim == 4:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    blocks = {f"{i:04}": block(workload, i) for i in range(w.clients)}
    clients = fedjax.InMemoryFederatedData(
        {i: {"x": x[own], "y": y[own]} for i, own in blocks.items()}
    )
    model = build(w.model, x, y)
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=w.batch),
    )
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    sampler = fedjax.client_samplers.UniformGetClientSampler(clients, w.cohort, seed=0)
    done = False
    while not done:
        cohort = sampler.sample()
        state, _ = algorithm.apply(state, cohort)
        jax.block_until_ready(state.params)
        batches = sum(ceil(len(dataset) / w.batch) for _, dataset, _ in cohort)
        done = clock.tick(batches * w.batch)
    clock.report("fedjax", version("fedjax"), workload, threads)


if __name__ == "__main__":
    main()
