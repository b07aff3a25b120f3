"""How a round can end for a node."""

from __future__ import annotations

from dataclasses import dataclass

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
