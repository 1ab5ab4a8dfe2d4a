"""What an operator reads in Flower's log when a run fails for a reason of ours: one line.

Flower logs an app's exception with its traceback, then a general text on the process's exit code.
For an EverfedError, which says itself what is wrong and what to do, both are left out; the run is
marked as failed all the same. Other exceptions are bugs and are logged as Flower does it.
"""

from __future__ import annotations

import logging
import re

from flwr.app import Error
from flwr.common.constant import ErrorCode
from flwr.common.logger import FLOWER_LOGGER

from everfed.errors import EverfedError


class OneLine(logging.Filter):
    """Turns the log of an EverfedError into its text."""

    failed = False  #: whether the last exception was one

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None:
            self.failed = isinstance(error, EverfedError)
        if error is not None and self.failed:
            record.msg, record.args, record.exc_info = f"error: {error}", (), None
        return not (self.failed and record.getMessage().startswith("Exit Code"))


def one_line() -> None:
    """Have this process's log so."""
    if not any(isinstance(known, OneLine) for known in FLOWER_LOGGER.filters):
        FLOWER_LOGGER.addFilter(OneLine())


#: Flower's paragraphs on a message that has expired and on a node without a heartbeat
SHORT = {
    ErrorCode.MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.NODE_UNAVAILABLE: "is not connected",
}


def reason(error: Error) -> str:
    """Why there is no reply; of our errors without the Python type that Flower puts around them."""
    text = SHORT.get(error.code) or error.reason or f"error {error.code}"
    return re.sub(r"^<class 'everfed\.[\w.]+'>:<'(.*)'>$", r"\1", text, flags=re.DOTALL)
