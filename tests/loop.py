"""Flower without processes: a grid whose nodes are in this one."""

from __future__ import annotations

import itertools
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from everfed.errors import EverfedError

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as in a server's process


def over_the_wire(message: Message) -> Message:
    """Serialised and read again, as between processes."""
    raw = {key: thing.deflate() for key, thing in get_all_nested_objects(message).items()}
    again = inflate_object_from_contents(message.object_id, raw)
    again.metadata.__dict__["_message_id"] = message.metadata.message_id
    return again


class Loop(Grid):
    """A grid whose nodes answer at once, in this process; `spoil` may change or lose a reply."""

    def __init__(self, app, folder: Path, sites, run_config=None, spoil=None, node_config=None):
        self.app, self.sites, self.spoil = app, dict(enumerate(sites, 100)), spoil
        self.folder, self.run_config = folder, run_config or {}
        self.node_config = node_config or {}
        self.replies: dict[str, Message] = {}
        self.count = itertools.count()
        self.requests: list[Message] = []
        self.states: dict[int, RecordDict] = {}  #: what nodes keep from message to message

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self):
        return list(self.sites)

    def push_messages(self, messages):
        sent = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{next(self.count)}"
            self.requests.append(message)
            sent.append(message.metadata.message_id)
            site = self.sites[message.metadata.dst_node_id]
            known = {"site": site, "store": str(self.folder / "sites")} | self.node_config
            node = message.metadata.dst_node_id
            state = self.states.setdefault(node, RecordDict())
            try:
                answer = self.app(
                    over_the_wire(message), Context(1, node, known, state, self.run_config)
                )
            except EverfedError as error:  # as a ClientApp's process tells it
                answer = Message(Error(0, str(error)), reply_to=over_the_wire(message))
            reply = over_the_wire(answer)
            if self.spoil is not None and message.metadata.message_type != "query.hello":
                reply = self.spoil(site, message, reply)
            if reply is not None:
                self.replies[sent[-1]] = reply
        return sent

    def pull_messages(self, message_ids):
        taken = [self.replies.pop(i, None) for i in list(message_ids)]
        return [reply for reply in taken if reply is not None]
