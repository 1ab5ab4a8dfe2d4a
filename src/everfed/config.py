"""Configurations: TOML, checked whole before any work starts.

A mistake gives one line that names the key, what is allowed and the nearest spelling.
"""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    create_model,
)

from everfed import data, loggers, methods, models, streams
from everfed.boundaries import Boundaries
from everfed.data.table import Data
from everfed.engines.terms import Terms
from everfed.errors import EverfedError, near, unknown, wrong
from everfed.late import Late
from everfed.local import Local
from everfed.method import Method
from everfed.runs import Grouping, Precision, Run, check, run
from everfed.streams.stream import Stream


class ConfigError(EverfedError):
    """A mistake in a configuration."""

    exit_code = 2


# what a configuration may name --------------------------------------------------------------
def _mlp(d: Data, hidden: Sequence[PositiveInt] = (128,)) -> models.Recipe:
    """Dense layers with ReLU.

    Args:
        hidden: widths of the layers between inputs and outputs.
    """
    return models.mlp(d.x[0].numel(), *hidden, d.classes)


def _lenet(d: Data) -> models.Recipe:
    """LeNet5 (images of at least 16 pixels)."""
    return models.lenet(*_image(d), d.classes)


def _cnn(d: Data, width: PositiveInt = 16, norm: models.Norm = "none") -> models.Recipe:
    """Two 3x3 convolutions with pooling and a hidden dense layer.

    Args:
        width: channels of the first convolution; the second has twice as many.
        norm: after each convolution, "none", "batch" or "group".
    """
    return models.cnn(*_image(d), d.classes, width, norm)


def _resnet18(d: Data) -> models.Recipe:
    """ResNet-18 for small images, with GroupNorm."""
    return models.resnet18(_image(d)[0], d.classes)


def _transformer(
    d: Data,
    folder: str | None = None,
    path: str | None = None,
    width: PositiveInt = 64,
    layers: PositiveInt = 2,
    heads: PositiveInt = 2,
) -> models.Recipe:
    """A text classifier of Hugging Face's Transformers (pip install 'everfed[text]').

    Args:
        path: a folder with config.json and weights, as DistilBERT's, in the data folder if it is
            relative; left out: a small one whose first weights are drawn from the seed.
        width: of a token's vector, without a path.
        layers: how many, without a path.
        heads: of attention, without a path.
    """
    if d.x.is_floating_point() or d.x.dim() != 2:
        raise ConfigError(
            f"model.name: transformer needs rows of token ids, as glue's; not {d.name}"
        )
    place = None if path is None else data.data_folder(folder) / path
    size, length = int(d.x.max()) + 1, d.x.shape[1]
    return models.transformer(
        size, d.classes, width=width, layers=layers, heads=heads, length=length, path=place
    )


def _din(
    d: Data,
    width: PositiveInt = 16,
    hidden: tuple[PositiveInt, PositiveInt] = (80, 40),
    activation: Literal["dice", "prelu"] = "dice",
) -> models.Recipe:
    """DIN, a click predictor with attention over the user's history (MovieLens).

    Args:
        width: of an item's vector.
        hidden: widths of the dense layers.
        activation: "dice" (DIN's own, with running statistics) or "prelu".
    """
    if d.x.is_floating_point() or d.x.dim() != 2 or d.classes != 2:
        raise ConfigError(
            f"model.name: din needs rows of item numbers and clicks, as movielens's; not {d.name}"
        )
    return models.din(int(d.x.max()), width=width, hidden=hidden, activation=activation)


def _lstm(d: Data, width: PositiveInt = 128, layers: PositiveInt = 2) -> models.Recipe:
    """An LSTM that predicts a text's next character.

    Args:
        width: units of a layer.
        layers: how many.
    """
    if d.x.is_floating_point() or d.x.dim() != 2:
        raise ConfigError(
            f"model.name: lstm needs rows of characters, as shakespeare's; not {d.name}"
        )
    size = max(d.classes, int(d.x.max()) + 1)
    return models.lstm(size, d.classes, width=width, layers=layers)


def _image(d: Data) -> tuple[int, int]:
    if d.x.dim() != 4:
        shape = "x".join(map(str, d.x.shape[1:]))
        raise ConfigError(f"model.name: a convolutional model needs images, {d.name} is {shape}")
    return d.x.shape[1], d.x.shape[2]


Builders = Mapping[str, Callable[..., Any]]
MODELS: Builders = {
    "mlp": _mlp,
    "lenet": _lenet,
    "cnn": _cnn,
    "resnet18": _resnet18,
    "transformer": _transformer,
    "din": _din,
    "lstm": _lstm,
}
STREAMS: Builders = {
    "domains": streams.domains,
    "classes": streams.classes,
    "static": streams.static,
    "evolving": streams.evolving,
    "drifting": streams.drifting,
    "periodic": streams.periodic,
    "blocks": streams.blocks,
    "given": streams.given,
    "regimes": streams.regimes,
    "sites": streams.sites,
}
DATASETS: Builders = {
    "digits": data.digits,
    "fashion_mnist": data.fashion_mnist,
    "mnist": data.mnist,
    "cifar10": data.cifar10,
    "cifar100": data.cifar100,
    "tiny_imagenet": data.tiny_imagenet,
    "permuted": data.permuted,
    "npz": data.npz,
    "npy": data.npy,
    "parquet": data.parquet,
    "series": data.series,
    "elec2": data.elec2,
    "weather": data.weather,
    "join": data.join_files,
    "digit10": data.digit10,
    "emnist_digits": data.emnist_digits,
    "mnist_m": data.mnist_m,
    "svhn": data.svhn,
    "usps": data.usps,
    "folders": data.folders,
    "pacs": data.pacs,
    "vlcs": data.vlcs,
    "dn4il": data.dn4il,
    "glue": data.glue,
    "femnist": data.femnist,
    "shakespeare": data.shakespeare,
    "movielens": data.movielens,
    "sites": data.sites,
}


#: not a stream of its own: it goes with each of them
PRESENT: Builders = {"present": streams.present}


class Compare(BaseModel):
    """What `everfed compare` runs."""

    model_config = ConfigDict(extra="forbid")
    methods: list[str] = Field(["fedavg", "special"], min_length=1)  #: methods by name
    seeds: list[NonNegativeInt] = Field([0, 1, 2], min_length=1)  #: each method runs once a seed


#: sections with keys of their own, whatever is named in them
SECTIONS: dict[str, type] = {
    "local": Local,
    "late": Late,
    "boundaries": Boundaries,
    "compare": Compare,
    "flower": Terms,
}
#: what else a data set may be called
ALIKE = {"csv": "series", "arff": "series"}


class Config(BaseModel):
    """A whole configuration."""

    model_config = ConfigDict(extra="forbid")
    #: decides every random choice: first weights, splits, cohorts, batches
    seed: NonNegativeInt = 0
    #: clients drawn each round; left out: all that are online
    sample: PositiveInt | None = None
    #: rounds from test to test (the last round of a task is always tested)
    test_every: PositiveInt = 1
    #: record how far a method's approximations of past objectives are from them (CFL; costly)
    information_loss: bool = False
    #: processes that train clients; a comparison gives every run one
    workers: PositiveInt | Literal["auto"] = "auto"
    #: train clients one by one or many at a time; the results are equal up to rounding
    grouping: Grouping = "auto"
    #: of the model's numbers
    precision: Precision = "float32"
    #: as torch names it ("cpu", "cuda:0"); "auto" takes an accelerator where there is one
    device: str = "auto"
    #: shortest time between two checkpoints
    checkpoint_seconds: float = Field(5.0, ge=0)
    #: folder of data files; left out: the environment's EVERFED_DATA
    data_dir: str | None = None
    #: bring inputs to mean 0 and deviation 1 over the training data, channel by channel
    standardise: bool = False
    #: where records are copied to: tensorboard, mlflow, wandb
    log: list[loggers.Name] = []
    data: dict[str, Any] = {"name": "digits"}
    stream: dict[str, Any] = {"name": "domains"}
    #: which of the stream's clients are there
    present: dict[str, Any] = {}
    model: dict[str, Any] = {"name": "mlp"}
    local: Local = Local()
    #: replies that come late, or never
    late: Late = Late()
    #: whether the method is told when tasks begin, or finds it
    boundaries: Boundaries = Boundaries()
    method: dict[str, Any] = {"name": "fedavg"}
    #: settings of methods that are named without any; with a `name` in them, the section's name is
    #: one's own for that method with these settings
    methods: dict[str, dict[str, Any]] = {}
    compare: Compare = Compare()
    #: the terms of a real federation
    flower: Terms = Terms()


@dataclass(frozen=True)
class Experiment:
    """A configuration made real: what `everfed.run` takes."""

    method: Method
    stream: Stream
    model: models.Recipe
    options: dict[str, Any]
    terms: Terms

    def check(self) -> None:
        """Raise ConfigError where it cannot be run, as far as that is known beforehand."""
        try:
            check(self.method, self.stream, **self.options)
        except EverfedError as error:
            raise ConfigError(str(error)) from None

    def go(self, **more: Any) -> Run:
        """Run it."""
        return run(self.method, self.stream, self.model, **(self.options | more))


# reading ------------------------------------------------------------------------------------
def default_text() -> str:
    """The configuration that is used when none is given: the demo's."""
    return resources.files("everfed").joinpath("default.toml").read_text()


def read(path: Path | None, changes: Sequence[str] = (), method: str | None = None) -> Config:
    """A configuration from a file (None: the default) with `key=value` changes."""
    if path is None:
        values = tomllib.loads(default_text())
    else:
        try:
            values = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    if method is not None:
        values["method"] = {"name": method}
    for change in changes:
        _apply(values, change)
    return parse(values)


def parse(values: Mapping[str, Any]) -> Config:
    """A checked configuration from plain values; data files are not touched yet."""
    try:
        config = Config.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_say(error, "", _fields(Config))) from None
    except EverfedError as error:  # settings that do not go together
        raise ConfigError(str(error)) from None
    for name in ("methods", "seeds"):
        chosen = getattr(config.compare, name)
        twice = next((item for item in chosen if chosen.count(item) > 1), None)
        if twice is not None:
            raise ConfigError(f"compare.{name} has {twice!r} twice")
    names = {"data": DATASETS, "stream": STREAMS, "model": MODELS}
    for section, builders in names.items():
        _arguments(section, builders, getattr(config, section))
    _arguments("present", PRESENT, config.present | {"name": "present"})
    named: list[tuple[str, Mapping[str, Any]]] = [("method", config.method)]
    named += [(f"methods.{name}", {"name": name}) for name in config.methods]
    named += [("compare.methods", {"name": name}) for name in config.compare.methods]
    for where, own in named:
        method_of(own, config, where)
        stream_of(own, config, where)
    return config


def runnable(section: Mapping[str, Any], config: Config) -> tuple[Method, Local]:
    """`method_of`, for one that is to be run: ConfigError where it cannot be, with its settings."""
    method, local = method_of(section, config)
    try:
        for part in method.parts:
            part.check(local)
    except EverfedError as error:
        raise ConfigError(str(error)) from None
    return method, local


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes key=value, for example local.lr=0.1, not {change!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    at = values
    for step in path:
        at = at.setdefault(step, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {change}: {step} is a value, not a section")
    if last == "name" and at.get("name") != value:
        at.clear()  # settings of the one that was named before do not fit
    at[last] = value


# building -----------------------------------------------------------------------------------
def method_of(
    section: Mapping[str, Any], config: Config, where: str = "method"
) -> tuple[Method, Local]:
    """A method from its section, and the local settings it is run with.

    What [methods.NAME] says is taken where the section is silent; where it has a `name`, NAME is a
    name of the user's for that method with these settings. `plus` lists methods whose parts are
    added, `local` changes local settings for this method alone; `stream` is for `stream_of`.
    """
    builders = _methods()
    own = _settled(section, config)
    name = _name(where, builders, own)
    if section["name"] != name and section["name"] in builders:
        raise ConfigError(
            f"methods.{section['name']}.name: {section['name']!r} is another method than {name!r}; "
            "choose a name of your own for the section"
        )
    plus, changes = own.pop("plus", []), own.pop("local", {})
    own.pop("stream", None)
    if not isinstance(plus, list) or not all(isinstance(item, dict) for item in plus):
        raise ConfigError(f"{where}.plus must be a list of tables, each with a name")
    if not isinstance(changes, dict):
        raise ConfigError(f"{where}.local must be a table")
    method: Method = builders[name](**_arguments(where, builders, own))
    for item in plus:
        method = method + method_of(item, config, f"{where}.plus")[0]
    if section["name"] != name:
        method = Method(*method.parts, average=method.average, name=section["name"])
    return method, _local(config.local, changes, f"{where}.local.")


def _methods() -> Builders:
    return {name: entry.build for name, entry in sorted(methods.METHODS.items())}


def _settled(section: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """A method's section with what [methods.NAME] says where it is silent."""
    base = config.methods.get(str(section.get("name")), {})
    return base | {key: value for key, value in section.items() if key not in base or key != "name"}


def stream_of(section: Mapping[str, Any], config: Config, where: str = "method") -> dict[str, Any]:
    """The section of the stream that a method is run on: [stream], with the changes that `stream`
    in the method's own section makes for it alone."""
    changes = _settled(section, config).get("stream", {})
    if not isinstance(changes, dict):
        raise ConfigError(f"{where}.stream must be a table")
    other = changes.get("name", config.stream["name"]) != config.stream["name"]
    whole = changes if other else config.stream | changes
    _arguments(f"{where}.stream" if changes else "stream", STREAMS, whole)
    return whole


def _local(base: Local, changes: Mapping[str, Any], where: str) -> Local:
    values = {name: getattr(base, name) for name in Local.__annotations__}
    try:
        return TypeAdapter(Local).validate_python(values | dict(changes))
    except ValidationError as error:
        raise ConfigError(_say(error, where, list(values))) from None
    except EverfedError as error:
        raise ConfigError(str(error)) from None


def table(config: Config) -> Data:
    """Read the data."""
    made: Data = _build("data", DATASETS, config.data, folder=config.data_dir)
    if made.y.is_floating_point():
        raise ConfigError(
            f"data: the labels of {made.name} are {made.y.dtype}: save classes as integers or "
            "text; other targets need a loss of yours, in Python"
        )
    if not config.standardise:
        return made
    if config.data["name"] == "sites":
        raise ConfigError("standardise: sites have to agree on it; do it in the data function")
    return data.standardised(made)


def experiment(
    config: Config, method: str | None = None, seed: int | None = None, read: Data | None = None
) -> Experiment:
    """Build everything a run needs (of another method or seed, if given); the data are read, unless
    they have been."""
    section = {"name": method} if method else config.method
    chosen, local = runnable(section, config)
    samples = read or table(config)
    stream = _build("stream", STREAMS, stream_of(section, config), samples)
    if config.present:
        stream = _build("present", PRESENT, config.present | {"name": "present"}, stream)
    if config.sample and config.sample > stream.clients:
        raise ConfigError(f"sample is {config.sample}, but the stream has {stream.clients} clients")
    model = _build("model", MODELS, config.model, samples, folder=config.data_dir)
    options = {
        "local": local,
        "sample": config.sample,
        "late": config.late,
        "boundaries": config.boundaries,
        "seed": config.seed if seed is None else seed,
        "test_every": config.test_every,
        "information_loss": config.information_loss,
        "workers": config.workers,
        "grouping": config.grouping,
        "precision": config.precision,
        "device": config.device,
        "checkpoint_seconds": config.checkpoint_seconds,
        "loggers": [loggers.named(name) for name in config.log],
        "config": config.model_dump(exclude_none=True)
        | {"method": dict(section), "seed": config.seed if seed is None else seed},
    }
    return Experiment(chosen, stream, model, options, config.flower)


def _build(
    where: str,
    builders: Builders,
    section: Mapping[str, Any],
    *given: Any,
    folder: str | None = None,
) -> Any:
    """Call a section's builder; what it finds impossible is a mistake in the configuration."""
    arguments, build = _arguments(where, builders, section), builders[section["name"]]
    if "folder" in inspect.signature(build).parameters:
        arguments["folder"] = folder
    try:
        return build(*given, **arguments)
    except EverfedError as error:
        raise ConfigError(f"{where}: {error}") from None


def settings(builder: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What a configuration may set of a builder: all but the data or stream it is given, and the
    data's folder."""
    given = inspect.signature(builder).parameters.items()
    skipped = ("d", "data", "folder", "stream")
    return {name: parameter for name, parameter in given if name not in skipped}


def _name(where: str, builders: Builders, section: Mapping[str, Any]) -> str:
    name = section.get("name")
    if not isinstance(name, str) or name not in builders:
        key = where if where == "compare.methods" else f"{where}.name"
        if name is None:
            raise ConfigError(f"{key} is missing; there are {', '.join(builders)}")
        first, plus, second = str(name).partition("+")
        if plus and first in builders:
            how = f"methods.{first}.plus = [{{name = {second!r}}}]"
            raise ConfigError(f"{key}: no {name!r}; add methods up as {how}")
        if "," in str(name) and where == "method":
            raise ConfigError(f"{key}: no {name!r}; 'everfed compare' takes several methods")
        meant = [other for word, other in ALIKE.items() if where == "data" and word == name]
        raise ConfigError(f"{key}: no {name!r}{near(str(name), builders, meant)}")
    return name


def _arguments(where: str, builders: Builders, section: Mapping[str, Any]) -> dict[str, Any]:
    """A section's settings, checked against its builder's signature."""
    builder = builders[_name(where, builders, section)]
    hints = typing.get_type_hints(builder, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], ... if p.default is inspect.Parameter.empty else p.default)
        for name, p in settings(builder).items()
    }
    model = create_model("Settings", __config__=ConfigDict(extra="forbid"), **fields)
    own = {key: value for key, value in section.items() if key != "name"}
    try:
        checked = model.model_validate(own)
    except ValidationError as error:
        raise ConfigError(_say(error, f"{where}.", list(fields))) from None
    return {name: getattr(checked, name) for name in own}


def _fields(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def _homes(word: str) -> list[str]:
    """Where a key is known that is not one of the first level: epochs is local.epochs."""
    keys = {section: set(kind.__annotations__) for section, kind in SECTIONS.items()}
    built = {"data": DATASETS, "stream": STREAMS, "present": PRESENT, "model": MODELS}
    for section, builders in (built | {"method": _methods()}).items():
        keys[section] = {key for build in builders.values() for key in settings(build)}
    return [f"{section}.{word}" for section, known in keys.items() if word in known]


def _say(error: ValidationError, prefix: str, known: Sequence[str]) -> str:
    """A pydantic error in one line."""
    first = error.errors()[0]
    # where a value may be of several types, pydantic adds "constrained-float[...]" to the place
    place = [str(p) for p in first["loc"] if "[" not in str(p)]
    if unknown(first):
        inside = list(SECTIONS.get(place[0], Local).__annotations__)
        options = known if len(place) == 1 else inside
        homes = _homes(place[0]) if len(place) == 1 and not prefix else []
        return f"unknown key {prefix}{'.'.join(place)}{near(place[-1], options, homes)}"
    if first["type"] == "missing":
        return f"{prefix}{'.'.join(place)} is missing"
    key = next((k for k in range(len(place), 0, -1) if place[k - 1] in known or k == 1), 1)
    if place[0] in SECTIONS:
        key = min(2, len(place))
    return f"{prefix}{'.'.join(place[:key])} {wrong(error)}"
