"""A site whose data grow while the federation trains: the newest rows of a database table.

Put `samples` into the data.py of an app made by `everfed flower new`. It is called at the site for
every request, so "the round" is simply now: rows that arrived since the last request take part, old
ones do not. Methods with a memory (cfl_coreset, cflag) keep copies of their own at the site.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

import numpy as np

DATABASE = os.environ.get("SITE_DATABASE", "/var/lib/site/measurements.db")
WINDOW = 500  # the newest rows, whatever their number in total


def samples(site: str, round: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (rows, 3) and classes (rows,) that the site holds now."""
    with sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True) as table:
        rows = table.execute(
            "SELECT temperature, pressure, vibration, failed FROM measurements "
            "WHERE failed IS NOT NULL ORDER BY time DESC LIMIT ?",
            (WINDOW,),
        ).fetchall()
    values = np.array(rows, dtype=np.float32).reshape(-1, 4)
    return values[:, :3], values[:, 3].astype(np.int64)


def main() -> None:
    """A database that grows between two requests."""
    global DATABASE
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        DATABASE = str(Path(folder) / "measurements.db")
        with sqlite3.connect(DATABASE) as table:
            table.execute(
                "CREATE TABLE measurements "
                "(time INTEGER, temperature REAL, pressure REAL, vibration REAL, failed INTEGER)"
            )
        for day in range(3):
            with sqlite3.connect(DATABASE) as table:
                for second in range(200):
                    x = random.standard_normal(3) + day  # the machine drifts
                    row = (86_400 * day + second, *x, int(x[2] > 1 + day))
                    table.execute("INSERT INTO measurements VALUES (?, ?, ?, ?, ?)", row)
            x, y = samples("press-4", day)
            print(f"day {day}: {len(x)} rows, mean {x.mean():.2f}, {100 * y.mean():.0f} % failures")


if __name__ == "__main__":
    main()
