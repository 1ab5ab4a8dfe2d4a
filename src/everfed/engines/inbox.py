"""Replies as they become whole.

Once a reply has begun to come in, Flower's grid waits until all of it is there: as long as a site
with a slow line takes, and for minutes where a node died while it was sending. Here it waits in a
thread, so that neither the other replies nor the deadline have to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from threading import Thread

from flwr.app import Message
from flwr.serverapp import Grid

#: requests of a look; Flower gives the replies of one request together, so one that is not whole
#: keeps back its portion's, and they are asked for again as if they had not come
PORTIONS = 16


class Inbox:
    """Pulls replies from a grid without being held up by any of them."""

    def __init__(self, grid: Grid, patience: float) -> None:
        self.grid, self.patience = grid, patience  #: seconds that a look takes at most
        self.found: SimpleQueue[Message | Exception] = SimpleQueue()
        self.threads: list[Thread] = []

    def look(self, ids: Iterable[str]) -> list[Message]:
        """Replies to these messages that are whole; some may be to messages of earlier looks."""
        asked = list(ids)
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        if asked and len(self.threads) <= len(asked):  # more only wait for a link that is away
            thread = Thread(target=self._pull, args=(asked,), daemon=True)
            self.threads.append(thread)
            thread.start()
            thread.join(self.patience)
        return self._whole()

    def _pull(self, ids: list[str]) -> None:
        size = math.ceil(len(ids) / PORTIONS)
        try:
            for at in range(0, len(ids), size):
                for reply in self.grid.pull_messages(ids[at : at + size]):
                    self.found.put(reply)
        except Exception as error:
            self.found.put(error)

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
