"""What nodes say to one another about rollout groups, as calls of `protocols.rpc`.

    rollouts.offer    these I have for you: ids, authors, sizes     Answer: send these, I have those
    rollouts.give     the groups that were asked for                Thanks
    rollouts.recent   I have too few: what is recent?               Recent: the ids of some, of many authors
    rollouts.get      send me these                                 Got

Content that does not fit a header is offered by `protocols.bulk` under `content_key`, by whoever passes the group on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnode.protocols.methods.rollouts.signed import MAX_AUTHOR, MAX_CONTENT, MAX_HEADER, SIGNATURE
from swarmnode.protocols.transfer.bulk import Key
from swarmnode.protocols.wire import WireError

OFFER, GIVE, RECENT, GET = "rollouts.offer", "rollouts.give", "rollouts.recent", "rollouts.get"
MAX_OFFERED = 64  # groups in one offer
MAX_COPIES = 1024  # that may be spoken of; each node allows far fewer
MAX_GIVEN = 512 * 1024  # bytes of headers in one message
TIMEOUT = 5.0  # seconds for an answer
LONGEST_WAIT = 60.0  # seconds that a peer may ask to be left alone

Sealed = tuple[bytes, bytes]  # a header's bytes and its signature


@dataclass(frozen=True)
class Offered:
    """One group. `size` is that of header and content; `copies` is for how many nodes it would be handed over."""

    id: bytes
    author: str
    size: int
    copies: int

    def __post_init__(self) -> None:
        if len(self.id) != 32 or not 0 < len(self.author) <= MAX_AUTHOR:
            raise WireError("Offered: no id and author of a group")
        if not 0 < self.size <= MAX_CONTENT + MAX_HEADER + SIGNATURE or not 0 < self.copies <= MAX_COPIES:
            raise WireError(f"Offered: {self.copies} copies of {self.size} bytes")


@dataclass(frozen=True)
class Offer:
    run_id: str
    groups: tuple[Offered, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= MAX_OFFERED:
            raise WireError(f"Offer: {len(self.groups)} groups, 1 to {MAX_OFFERED} allowed")


@dataclass(frozen=True)
class Answer:
    """Indices into the offer: `wants` to be given now, `has` here already; all others it has no room for.

    `wait`: seconds after which it has room again; until then it is left alone.
    """

    wants: tuple[int, ...] = ()
    has: tuple[int, ...] = ()
    wait: float = 0.0

    def __post_init__(self) -> None:
        both = self.wants + self.has
        if len(both) > MAX_OFFERED or len(set(both)) != len(both) or any(not 0 <= i < MAX_OFFERED for i in both):
            raise WireError("Answer: not indices of an offer")
        if not math.isfinite(self.wait) or not 0 <= self.wait <= LONGEST_WAIT:
            raise WireError(f"Answer: a wait of {self.wait} s")


@dataclass(frozen=True)
class Give:
    run_id: str
    groups: tuple[Sealed, ...]

    def __post_init__(self) -> None:
        _check_given(self.groups)


@dataclass(frozen=True)
class Thanks:
    pass


@dataclass(frozen=True)
class RecentQuery:
    run_id: str
    count: int = MAX_OFFERED

    def __post_init__(self) -> None:
        if not 0 < self.count <= MAX_OFFERED:
            raise WireError(f"RecentQuery: {self.count} groups, 1 to {MAX_OFFERED} allowed")


@dataclass(frozen=True)
class Recent:
    ids: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_ids(self.ids)


@dataclass(frozen=True)
class Get:
    run_id: str
    ids: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_ids(self.ids)


@dataclass(frozen=True)
class Got:
    """As many of those as are here and fit."""

    groups: tuple[Sealed, ...]

    def __post_init__(self) -> None:
        _check_given(self.groups)


def content_key(run_id: str, id: bytes) -> Key:
    """Where the content of a group is offered."""
    return ("rollout", run_id, id.hex())


def _check_ids(ids: tuple[bytes, ...]) -> None:
    if len(ids) > MAX_OFFERED or any(len(id) != 32 for id in ids):
        raise WireError(f"{len(ids)} ids, or such as are none; at most {MAX_OFFERED} of 32 bytes")


def _check_given(groups: tuple[Sealed, ...]) -> None:
    size = sum(len(payload) + len(signature) for payload, signature in groups)
    if len(groups) > MAX_OFFERED or size > MAX_GIVEN:
        raise WireError(f"{len(groups)} groups of {size} bytes in one message")
