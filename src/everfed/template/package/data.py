"""What the federation learns from. As it is, a rehearsal on the stream of everfed.toml."""

from __future__ import annotations

# At a site: inputs and labels that the site holds now. Called for every request, so they may change
# while training runs; `round` counts from 0. Read a folder, a table, a camera:
#
#   def samples(site: str, round: int) -> tuple[np.ndarray, np.ndarray]:
#       files = sorted(Path("/data/scans").glob("*.npz"))[-20:]
#       ...
#       return x, y          # (samples, *shape) floats or bytes, (samples,) classes from 0
samples = None

# At the server, if it has anything to test on: (x, y) of the first task, of the second, ...
#
#   def tests() -> list[tuple[np.ndarray, np.ndarray]]:
tests = None
