"""What no honest node sends: numbers and lists beyond these bounds end a message where it arrives.

Called from `__post_init__` of messages, so that neither `wire.decode` nor this node's own code can build one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from swarmnode.protocols.network import PeerId
from swarmnode.protocols.wire import WireError

MAX_PEERS = 1024  # in any list of peers in a message
MAX_SEATS = 256  # in a roster: its leader waits for all of them, and everybody holds its bytes
MAX_PEER_ID = 128  # characters; that of an Ed25519 key has 52
MAX_ROUND = 1 << 48  # rounds and ballots: far from the end of wire integers, however they are added to
MAX_WEIGHT = 1 << 53
MAX_SHARE = 16
MAX_SECONDS = 1e9  # of any duration; thirty years

_HASH = re.compile("[0-9a-f]{64}")


def check_range(what: str, value: float, low: float, high: float) -> None:
    """Raise WireError unless `low <= value <= high`; NaN never is."""
    if not low <= value <= high:
        raise WireError(f"{what} is {value}, allowed are {low} to {high}")


def check_seconds(what: str, value: float) -> None:
    """Raise WireError for a duration that is negative, NaN or absurd."""
    check_range(what, value, 0.0, MAX_SECONDS)


def check_hash(what: str, value: str) -> None:
    """Raise WireError unless `value` is 64 lower-case hex digits."""
    if not _HASH.fullmatch(value):
        raise WireError(f"{what} is not a sha-256 in 64 hex digits")


def check_peers(what: str, peers: Sequence[PeerId]) -> None:
    """Raise WireError where there are too many peers, one twice, or one that no peer id can be."""
    if len(peers) > MAX_PEERS or len(set(peers)) != len(peers):
        raise WireError(f"{what} has {len(peers)} peers, one of them twice or more than {MAX_PEERS}")
    if not all(0 < len(peer) <= MAX_PEER_ID for peer in peers):
        raise WireError(f"{what} names a peer whose id is empty or above {MAX_PEER_ID} characters")
