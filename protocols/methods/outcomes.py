"""How a round, or an attempt at one, can end for a node."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.protocols.methods.known.messages import Head
from swarmnode.protocols.network import PeerId


@dataclass(frozen=True)
class Completed:
    """Every voter of the round took part and this node's work is in the result."""

    members: int


@dataclass(frozen=True)
class Partial:
    """The round counts, and somebody's work is not in it: that of `missing`, which may include this node."""

    members: int
    missing: tuple[PeerId, ...]


@dataclass(frozen=True)
class Abandoned:
    """No result reached this node. Its local work waits in the error feedback for a later round."""

    reason: str


Outcome = Completed | Partial | Abandoned


class Behind(Exception):
    """The round was decided elsewhere, or others stand on another state: catch up with `head` before going on."""

    def __init__(self, head: Head, source: PeerId) -> None:
        super().__init__(f"{source} is at round {head.round}")
        self.head = head
        self.source = source


class LeftOut(Exception):
    """This node is no candidate of the round, and none of the candidates answers it."""


class PartsMissing(Exception):
    """A reduction could not be completed because of these peers."""

    def __init__(self, peers: tuple[PeerId, ...]) -> None:
        super().__init__("no parts from " + ", ".join(peers))
        self.peers = peers
