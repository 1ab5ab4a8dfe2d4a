"""Engines: the same method anywhere."""

from everfed.engines.local import LocalEngine

__all__ = ["LocalEngine"]
