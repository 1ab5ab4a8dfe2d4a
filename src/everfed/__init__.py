"""everfed: one model across many clients whose data keep changing.

>>> import everfed as ef
>>> stream = ef.streams.domains(ef.data.digits(), clients=8, alpha=0.3, rounds=2)
>>> result = ef.run(ef.methods.special(lam=0.25), stream, ef.models.mlp(64, 128, 10), sample=4)
>>> result.matrix.shape
(4, 4)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Boundaries", "Context", "EverfedError", "Late", "Local", "Method", "Part", "Reduced", "Run",
    "State", "Stream", "data", "dot", "load_model", "loggers", "methods", "metrics", "models",
    "run", "sq", "streams", "theory",
]  # fmt: skip

#: where each public name lives; imported when first used, so that `everfed --help` is quick
_NAMES = {
    "Boundaries": "boundaries",
    "Context": "method",
    "EverfedError": "errors",
    "Late": "late",
    "Local": "local",
    "Method": "method",
    "Part": "method",
    "Reduced": "method",
    "Run": "runs",
    "State": "method",
    "Stream": "streams",
    "dot": "vector",
    "load_model": "export",
    "run": "runs",
    "sq": "vector",
}

if TYPE_CHECKING:
    from everfed import data, loggers, methods, metrics, models, streams, theory
    from everfed.boundaries import Boundaries
    from everfed.errors import EverfedError
    from everfed.export import load_model
    from everfed.late import Late
    from everfed.local import Local
    from everfed.method import Context, Method, Part, Reduced, State
    from everfed.runs import Run, run
    from everfed.streams import Stream
    from everfed.vector import dot, sq


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(f"everfed.{_NAMES[name]}"), name)
    elif name in __all__:
        value = import_module(f"everfed.{name}")
    else:
        raise AttributeError(f"everfed has no {name!r}")
    globals()[name] = value
    return value
