"""Which site is at which node: a Flower federation knows its nodes by numbers of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from everfed.engines.inbox import Inbox
from everfed.engines.log import reason
from everfed.engines.site import client_of
from everfed.engines.terms import Terms

HELLO = "query.hello"


@dataclass
class Roll:
    """Asks nodes who they are."""

    grid: Grid
    terms: Terms
    nodes: dict[int, int] = field(default_factory=dict)  #: client -> the node it is at
    greeted: dict[int, str] = field(default_factory=dict)  #: node -> message, not yet answered
    met: set[int] = field(default_factory=set)  #: nodes that have said who they are
    names: dict[int, str] = field(default_factory=dict)  #: client -> the name of its site

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.grid, self.terms.poll)

    def name(self, client: int) -> str:
        """A client, for people: the site's name, if it has one that is no number."""
        named = self.names.get(client, str(client))
        return f"client {named}" if named.isdecimal() else f"site {named}"

    def greet(self) -> set[int]:
        """Ask nodes that are new who they are; the clients that are connected."""
        here = set(self.grid.get_node_ids())
        self.met &= here  # who comes back may be another site, or a site that has been elsewhere
        for node in here - self.met - set(self.greeted):
            message = Message(RecordDict(), node, HELLO, ttl=self.terms.deadline)
            for sent in self.grid.push_messages([message]):
                self.greeted[node] = sent
        self.hear(here)
        return {client for client, node in self.nodes.items() if node in here}

    def hear(self, here: set[int]) -> None:
        """Take the answers of nodes that were asked who they are."""
        asked = {sent: node for node, sent in self.greeted.items()}
        for reply in self.inbox.look(asked):
            node = asked.get(reply.metadata.reply_to_message_id)
            if node is None or self.greeted.pop(node, None) is None:
                continue
            if reply.has_error():
                log(WARNING, f"node {node} does not say who it is: {reason(reply.error)}")
                continue
            try:
                name = str(reply.content.config_records["site"]["name"])
            except KeyError:
                log(WARNING, f"node {node} does not say who it is")
                continue
            client = client_of(name)
            self.names[client] = name
            if self.nodes.get(client, node) in here - {node}:
                log(WARNING, f"two nodes say that they are {self.name(client)}: the newer counts")
            log(INFO, f"{self.name(client)} is here")
            self.nodes[client] = node
            self.met.add(node)
