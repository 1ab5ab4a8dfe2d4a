"""Draws the pictures of docs/streams.md: python docs/runs/streams.py, in the project's folder."""

from __future__ import annotations

from pathlib import Path

from everfed import config as configs
from everfed.report.stream import picture
from everfed.streams.drift import look

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples" / "streams"


def main() -> None:
    place = HERE.parent / "streams"
    place.mkdir(exist_ok=True)
    for name in ("drifting", "day_and_night", "join_and_leave", "regions"):
        config = configs.read(EXAMPLES / f"{name}.toml")
        stream = configs.experiment(config).stream.seeded(config.seed)
        picture(stream, look(stream, config.seed), place / f"{name}.png", shown=3)


if __name__ == "__main__":
    main()
