"""Fixtures: small real data, and the quadratic problems on which methods have known answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from everfed import data

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> data.Data:
    """Two domains of real digits."""
    return data.digits(["plain", "inverted"])


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of larger real data sets, where there is one."""
    folder = os.environ.get("EVERFED_DATA")
    if not folder:
        pytest.skip("EVERFED_DATA is not set: tests on larger real data are skipped")
    return Path(folder)
