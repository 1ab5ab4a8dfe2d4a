"""The server's side of the Flower app."""

from pathlib import Path

from everfed.engines.flower import server_app

from .data import tests

app = server_app(Path(__file__).with_name("everfed.toml"), tests)
