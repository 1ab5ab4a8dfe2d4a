"""A site's side of the Flower app."""

from pathlib import Path

from everfed.engines.flower import client_app

from .data import samples

app = client_app(Path(__file__).with_name("everfed.toml"), samples)
