"""A federation that learns on: see everfed.toml and data.py."""
