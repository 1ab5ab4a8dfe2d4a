"""Which everfed a run's folder names."""

from __future__ import annotations

import subprocess

import pytest

from everfed import __version__
from everfed import version as module


def git(*words, cwd):
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *name, *words], cwd=cwd, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("place", "told"),
    [("src/everfed", ", commit"), ("venv/lib/python3.11/site-packages/everfed", "")],
)
def test_the_commit_is_everfeds_own_or_none(place, told, tmp_path, monkeypatch):
    """Installed below somebody's repository, its commits say nothing of everfed."""
    package = tmp_path / place
    package.mkdir(parents=True)
    (package / "version.py").write_text("")
    git("init", cwd=tmp_path)
    git("add", "-A", cwd=tmp_path)
    git("commit", "-m", "one", cwd=tmp_path)
    monkeypatch.setattr(module, "HERE", package)
    clean = module.version.__wrapped__()
    assert clean.startswith(__version__ + told)
    assert (clean == __version__) == (not told)
    (package / "version.py").write_text("changed")
    assert module.version.__wrapped__() == clean + ("+" if told else "")
