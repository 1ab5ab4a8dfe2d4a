"""The model of a run, taken out of its folder; nothing in the folder is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from everfed.disk import unpack, write
from everfed.errors import EverfedError
from everfed.records import read_config
from everfed.vector import Layout


def weights(folder: str | Path) -> tuple[dict[str, Tensor], int]:
    """A run's weights and running statistics by name, and after how many rounds."""
    path = Path(folder).expanduser()
    if (path / "compare.json").exists():
        runs = sorted(found.parent.name for found in path.glob("*/config.json"))
        raise EverfedError(f"{path} holds several runs: name one of {', '.join(runs)} in it")
    known = read_config(path).get("layout")
    if not known:
        raise EverfedError(f"{path} was run by an older everfed, which did not keep the names")
    for place in sorted((path / "checkpoints").glob("*.safetensors"), reverse=True):
        try:
            tensors, meta = unpack(place.read_bytes())
        except (ValueError, KeyError, OSError):
            continue  # damaged, or just replaced by a newer one
        out: dict[str, Tensor] = {}
        for kind, vector in (("weights", "w"), ("buffers", "buffers")):
            out |= Layout.from_names(known[kind]).unflatten(tensors[vector])
        return out, int(meta["round"])
    raise EverfedError(f"{path} has no checkpoint yet")


def load_model(folder: str | Path, model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The model with the weights of a run's newest checkpoint, ready to predict.

    >>> import everfed as ef, tempfile
    >>> model, folder = ef.models.mlp(64, 8, 10), tempfile.mkdtemp()
    >>> stream = ef.streams.static(ef.data.digits(["plain"]), rounds=1)
    >>> run = ef.run(ef.methods.fedavg(), stream, model, folder=folder)
    >>> bool((load_model(folder, model)[1].weight == run.model[1].weight).all())
    True

    Args:
        folder: of the run.
        model: a module like the one that was trained, or what builds one.
    """
    found, _ = weights(folder)
    module = model if isinstance(model, nn.Module) else model()
    own = module.state_dict()
    for name, value in found.items():
        if name not in own or own[name].shape != value.shape:
            there = tuple(own[name].shape) if name in own else "nothing"
            raise EverfedError(
                f"{folder} has {name} of shape {tuple(value.shape)}, and the model {there}: "
                "it is another model"
            )
    module.load_state_dict(found, strict=False)  # counters of batches are not among them
    return module.eval()


def export(folder: Path, file: Path) -> int:
    """Write a run's weights as a safetensors file; after how many rounds they are."""
    if file.suffix != ".safetensors":
        raise EverfedError(f"{file}: the file's name has to end in .safetensors")
    found, rounds = weights(folder)
    try:
        write(file, save({name: value.contiguous() for name, value in found.items()}))
    except OSError as error:
        raise EverfedError(f"{file} cannot be written: {error.strerror}") from None
    return rounds
