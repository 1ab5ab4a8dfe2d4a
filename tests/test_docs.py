"""The documentation: what it tells a reader to type works, and it names what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from everfed.config import Config, parse
from everfed.methods import METHODS

NUMBER = re.compile(r"[-+]?\d+\.?\d*")
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@dataclass
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str


def blocks(page: str) -> list[Block]:
    out = []
    for info, text in re.findall(r"^```(.*)\n([\s\S]*?)^```$", (DOCS / page).read_text(), re.M):
        title = re.search(r'title="(.*?)"', info)
        language = info.split()[0] if info else ""
        out.append(Block(language, title and title[1], text))
    return out


def words(text: str) -> set[str]:
    """Without numbers, which may differ in the last digit or in seconds."""
    return {word for word in re.split(r"\s+", text) if not re.search(r"\d", word)} - {"±"}


def play(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a page tells to type, in order; Python blocks go on from one another."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    session, said = {"__name__": "__main__"}, ""
    for block, after in pairwise([*blocks(page), Block("", None, "")]):
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "sh":
            done = subprocess.run(
                ["bash", "-ec", block.text], capture_output=True, text=True, timeout=300
            )
            said = done.stdout + done.stderr
            wanted = after.text.startswith("error:")  # the page shows how a mistake is told
            assert (done.returncode != 0) == wanted, f"{block.text}\n{said}"
        elif block.language == "python":
            with redirect_stdout(StringIO()) as out:
                exec(compile(block.text, page, "exec"), session)
            said = out.getvalue()
            if (
                after.language == "text"
            ):  # results are those shown, up to another machine's rounding
                shown, got = (np.array(NUMBER.findall(t), float) for t in (after.text, said))
                np.testing.assert_allclose(got, shown, atol=0.04, err_msg=f"{page}\n{said}")
        elif block.language == "text":
            missing = words(block.text) - words(said)
            assert not missing, f"{page} shows {missing}, which is not in\n{said}"


@pytest.mark.parametrize("page", ["tutorial.md", "own_method.md", "drift.md"])
def test_what_a_page_tells_to_type_works(page, tmp_path, monkeypatch):
    play(page, tmp_path, monkeypatch)


def test_configurations_shown_for_own_data_are_valid():
    shown = [block for block in blocks("own_data.md") if block.language == "toml"]
    assert len(shown) == 6
    for block in shown:
        assert isinstance(parse(tomllib.loads(block.text)), Config)


def test_every_method_has_a_page_and_every_page_a_method():
    pages = {path.stem for path in (DOCS / "methods").glob("*.md")}
    assert pages == set(METHODS), "docs/methods/NAME.md, one for each method of everfed list"


@pytest.mark.parametrize("path", sorted((DOCS / "runs").glob("*.toml")), ids=lambda path: path.stem)
def test_configurations_behind_the_figures_are_valid(path):
    parse(tomllib.loads(path.read_text()))
