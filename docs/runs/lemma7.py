"""Lemma 7 of the C-FLAG paper on the server's step: the forgetting term with adaptive rates beside
that of the same round with constant ones. Clients upload their travel as well for that.

Needs EVERFED_DATA. Prints a line for each split of permuted MNIST.
"""

from __future__ import annotations

from importlib import import_module

from pydantic.dataclasses import dataclass
from torch import Tensor

from everfed import config
from everfed.method import Context, Method, Reduced, State
from everfed.reproduce import preset
from everfed.vector import dot, sq

CFlag = import_module("everfed.methods.cflag").CFlag


@dataclass(frozen=True)
class Both(CFlag):  # type: ignore[misc, valid-type]
    """C-FLAG that records what constant rates would have made of the round."""

    reduces = CFlag.reduces | {"travel": "mean", "along_travel": "mean"}

    def step(self, f: Tensor, w: Tensor, c: Context) -> tuple[Tensor, State]:
        update, about = super().step(f, w, c)
        travel = c.start - w
        return update, about | {"travel": travel, "along_travel": dot(f, travel)}

    def fold(self, s: State, update: Tensor, r: Reduced) -> tuple[Tensor, State]:
        update, state = super().fold(s, update, r)
        if state:
            less = 1 - self.lipschitz * self.alpha
            state["plain"] = self.lipschitz / 2 * sq(r["travel"]) - less * r["along_travel"]
        return update, state

    def metrics(self, s: State) -> dict[str, float]:
        return super().metrics(s) | ({"plain": float(s["plain"])} if s else {})


def main() -> None:
    for name in ("cflag-permuted-mnist-iid", "cflag-permuted-mnist-noniid"):
        made = config.experiment(preset.read(name).settings(None), "cflag", 1234)
        part = made.method.parts[0]
        own = {key: getattr(part, key) for key in part.__dataclass_fields__}
        result = config.run(Method(Both(**own)), made.stream, made.model, **made.options)
        by = {
            metric: [r["value"] for r in result.records if r["metric"] == metric]
            for metric in ("gamma", "plain", "gamma_rates", "gamma_constant")
        }
        pairs = list(zip(by["gamma"], by["plain"], strict=True))
        lower = sum(a <= b + 1e-6 for a, b in pairs)
        parts = sum(
            a <= b + 1e-6 for a, b in zip(by["gamma_rates"], by["gamma_constant"], strict=True)
        )
        means = [sum(values) / len(values) for values in zip(*pairs, strict=True)]
        print(
            f"{name}: ACC {100 * result.acc:.1f}, Fgt {100 * result.forgetting:.1f}; lower or "
            f"equal in {lower} of {len(pairs)} rounds (clients' parts: {parts}); "
            f"mean {means[0]:.3f}, with constant rates {means[1]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
