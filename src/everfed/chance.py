"""One rule about chance: every random choice is a function of (seed, purpose, ids).

No generator is carried through the code, so a result does not depend on the engine, on the number
of workers, or on whether a run was resumed.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from everfed.errors import EverfedError


def rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A fresh generator for one purpose.

    >>> int(rng(0, "cohort", 3).integers(100)) == int(rng(0, "cohort", 3).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key_sequence(seed, purpose, *ids)))


def torch_seed(seed: int, purpose: str, *ids: int) -> int:
    """A seed for torch's global generator (dropout, initial weights)."""
    return int(key_sequence(seed, purpose, *ids).generate_state(1, np.uint32)[0])


def key_sequence(seed: int, purpose: str, *ids: int) -> np.random.SeedSequence:
    if seed < 0:
        raise EverfedError(f"a seed must be 0 or more, not {seed}")
    return np.random.SeedSequence([seed, crc32(purpose.encode()), *map(int, ids)])
