"""`everfed flower new`: a new Flower app from the template."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from everfed.errors import EverfedError


def new(folder: Path) -> list[Path]:
    """Write a Flower app into a new folder; the files that were written."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    package = name.replace("-", "_")
    if not package or not package.isidentifier():
        raise EverfedError(f"{folder.name!r} is no name for an app: use letters and numbers")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise EverfedError(f"{folder} is there already: choose a new or an empty folder")
    written: list[Path] = []

    def copy(source: Traversable, target: Path) -> None:
        if source.is_dir():
            for child in source.iterdir():
                if child.name != "__pycache__":
                    known = {"package": package, "gitignore": ".gitignore"}
                    copy(child, target / known.get(child.name, child.name))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text().replace("NAME", name).replace("PACKAGE", package)
        target.write_text(text)
        if target.suffix == ".sh":
            target.chmod(0o755)
        written.append(target)

    try:
        copy(resources.files("everfed").joinpath("template"), folder)
    except OSError as error:
        raise EverfedError(f"{folder} cannot be written: {error.strerror}") from None
    return sorted(written)
