"""Exchanges that were begun, on disk before any client is asked.

A crash may fall between an exchange and the checkpoint that knows of it. The exchange is then
repeated, on other noise and maybe with other clients or data. What was sent the first time may have
been seen, and so may what was made of it: privacy has to answer for both.
"""

from __future__ import annotations

import os
from pathlib import Path

from everfed.disk import failed, sync
from everfed.errors import EverfedError


class Ledger:
    """Counts exchanges: one letter each in a file, which a crash cannot tear; None: in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        raw = path.read_bytes() if path and path.exists() else b""
        self.begun = raw.count(b"b")  #: exchanges
        self.again = raw.count(b"a")  #: times that clients were asked once more in one of them

    def begin(self) -> None:
        """An exchange begins."""
        self._write(b"b")
        self.begun += 1

    def repeat(self) -> None:
        """Clients are asked once more."""
        self._write(b"a")
        self.again += 1

    def go_on(self, asked: int) -> None:
        """A run is resumed that knows of so many exchanges; more have been begun since."""
        if self.path is None:
            self.begun = asked
        elif self.begun < asked:
            raise EverfedError(
                f"{self.path} counts {self.begun} exchanges, and the run has had {asked}: put back "
                "the file that belongs to the run, or epsilon would be too small"
            )

    def _write(self, letter: bytes) -> None:
        if self.path is None:
            return
        new = not self.path.exists()
        try:
            with open(self.path, "ab") as file:
                file.write(letter)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync(self.path.parent)
        except OSError as error:
            raise failed(error, self.path.parent) from error
