"""Writes runs/data/elec2.npz: the Elec2 table with the quarter and the hours of every row."""

from pathlib import Path

import numpy as np

from everfed.data.files import data_folder


def main() -> None:
    source = np.load(data_folder(None) / "drift_elec2_weather_outdoor.npz", allow_pickle=False)
    rows = source["elec2_x"]
    x = rows[:, [1, 2, 4, 5, 6, 7]]  # without the date and the price itself
    x = (x - x.mean(0)) / x.std(0)
    row = np.arange(len(x))
    half_hour = np.rint(rows[:, 2] * 47).astype(int)
    place = Path("runs/data")
    place.mkdir(parents=True, exist_ok=True)
    columns = {"quarter": row * 10 // len(row), "hours": half_hour // 6}
    np.savez(place / "elec2.npz", x=x, y=source["elec2_y"], **columns)


if __name__ == "__main__":
    main()
