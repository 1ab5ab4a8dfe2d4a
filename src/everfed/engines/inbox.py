"""Replies as they become whole.

Once a reply has begun to come in, Flower's grid waits until all of it is there: as long as a site
with a slow line takes, and for minutes where a node died while it was sending. Here it waits in a
thread, so that neither the other replies nor the deadline have to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from threading import Thread

from flwr.app import Message
from flwr.serverapp import Grid

#: requests of a look; Flower gives the replies of one request together, so one that is not whole
#: keeps back those of its portion
PORTIONS = 16


class Inbox:
    """Pulls replies from a grid without being held up by any of them."""

    def __init__(self, grid: Grid, patience: float) -> None:
        self.grid, self.patience = grid, patience  #: seconds that a look takes at most
        self.found: SimpleQueue[Message | Exception] = SimpleQueue()
        #: messages whose reply a thread is waiting for; asked for twice, Flower says it is missing
        self.pulling: set[str] = set()

    def look(self, ids: Iterable[str]) -> list[Message]:
        """Replies to these messages that are whole; some may be to messages of earlier looks."""
        free = [number for number in ids if number not in self.pulling]
        size = max(1, math.ceil(len(free) / PORTIONS))
        portions = [free[at : at + size] for at in range(0, len(free), size)]
        threads = [Thread(target=self._pull, args=(own,), daemon=True) for own in portions]
        self.pulling.update(free)
        for thread in threads:
            thread.start()
        until = time.monotonic() + self.patience
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return self._whole()

    def _pull(self, ids: list[str]) -> None:
        try:
            for reply in self.grid.pull_messages(ids):
                self.found.put(reply)
        except Exception as error:
            self.found.put(error)
        finally:
            self.pulling.difference_update(ids)

    def _whole(self) -> list[Message]:
        out: list[Message] = []
        while True:
            try:
                reply = self.found.get_nowait()
            except Empty:
                return out
            if isinstance(reply, Exception):
                raise reply
            out.append(reply)
