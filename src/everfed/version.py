"""Which everfed this is, for runs' folders."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from everfed import __version__

HERE = Path(__file__).parent


@cache
def version() -> str:
    """The version; where it is run from a repository also the package's commit, with a + if it has
    been changed since: '0.1.0, commit 599952e+'."""
    if not (HERE.parents[1] / ".git").exists():  # installed, maybe below somebody else's repository
        return __version__
    commit = _git("log", "-1", "--format=%h", "--", ".")
    changed = "+" if _git("status", "--porcelain", "--", ".") else ""
    return f"{__version__}, commit {commit}{changed}" if commit else __version__


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
