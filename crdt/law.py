"""The merge law: which elements of an author stand, whatever the order in which a replica hears of them.

For each (author, kind), over everything heard so far:

    replaceable: for each key the greatest (hlc, id); of these the `slots` greatest
    write-once:  the `slots` greatest (hlc, id), where a key may occur more than once

Both are functions of the set that was heard, and merging element by element computes them, so replicas that heard the
same agree. What is displaced is always less than what displaces it, and as a kind has one ttl, it expires no later:
forgetting what expired commutes with merging, and nothing comes back. (Keeping the lowest ids under a write-once key,
rather than the greatest stamps, would commute neither with expiry nor with slots.)

The law looks at key, hlc and id only, so a store need not load what it compares.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from swarmnode.crdt.hlc import is_ahead
from swarmnode.crdt.kinds import Kind

MAX_STEP_BACK = 3_600_000  # ms; a clock that steps back further was wrong before, rather than corrected a little
_STATE_TAG = b"swarmnode/state/1\0"


class Merged(enum.Enum):
    """What became of an element. Only `STORED` is news that is worth passing on."""

    STORED = "stored"
    KNOWN = "known"  # this very element is here
    OLDER = "older"  # a greater one stands under its key
    EXPIRED = "expired"
    AHEAD = "ahead"  # dated too far in the future; repair offers it again later
    QUOTA = "quota"  # its author's slots of this kind hold greater elements
    POOLED = "pooled"  # its author is not admitted: kept for a while, outside the state that is shared


class Ordered(Protocol):
    """All that the law looks at: elements have it, and so has `Order`."""

    @property
    def key(self) -> str: ...
    @property
    def hlc(self) -> int: ...
    @property
    def id(self) -> bytes: ...


class Order(NamedTuple):
    """The place of an element among those of its author and kind."""

    key: str
    hlc: int
    id: bytes


O = TypeVar("O", bound=Ordered)  # noqa: E741


class Ruling(NamedTuple, Generic[O]):
    """What the law says about a new element: its verdict, which standing one leaves, and whom it contradicts."""

    verdict: Merged
    gone: O | None = None  # leaves as the new one comes; only with STORED
    rival: O | None = None  # another one under the same write-once key: together they are evidence, stored or not


def everybody(author: str) -> bool:
    """Admits all authors."""
    return True


def judge(kind: Kind, standing: Iterable[O], new: Ordered) -> Ruling[O]:
    """What becomes of `new`, where `standing` is all that stands of its author and `kind`, in any order.

    The caller first asks `untimely`. It may pass elements or `Order`s; `gone` and `rival` are among those passed.
    """
    order, held = (new.hlc, new.id), 0
    least: O | None = None
    rival: O | None = None  # the greatest under the key
    least_order = rival_order = order
    for one in standing:
        here = (one.hlc, one.id)
        if here == order:
            return Ruling(Merged.KNOWN)
        held += 1
        if least is None or here < least_order:
            least, least_order = one, here
        if one.key == new.key and (rival is None or here > rival_order):
            rival, rival_order = one, here
    if rival is not None and not kind.write_once:
        return Ruling(Merged.OLDER) if rival_order > order else Ruling(Merged.STORED, gone=rival)
    if held < kind.slots or least is None:
        return Ruling(Merged.STORED, rival=rival)
    if least_order > order:
        return Ruling(Merged.QUOTA, rival=rival)
    return Ruling(Merged.STORED, gone=least, rival=rival)


def untimely(hlc: int, expiry: int, *, now: int, horizon: int) -> Merged | None:
    """EXPIRED or AHEAD for an element that does not count at this time; None for one that the law judges.

    `now` is this node's time in ms, `horizon` that of `advance`. Such an element accuses nobody either.
    """
    if expiry <= horizon:
        return Merged.EXPIRED
    return Merged.AHEAD if is_ahead(hlc, now) else None


def advance(horizon: int, now: int) -> int:
    """The time until which a replica that may have forgotten all that expired by `horizon` forgets at `now`.

    It does not follow a clock that is corrected backwards, so what expired does not come back; but a clock that had
    run far ahead would make it refuse everything for as long, so it does follow a step of more than MAX_STEP_BACK.
    """
    return now if now > horizon or horizon - now > MAX_STEP_BACK else horizon


def state_hash(cutoff: int, ids: Iterable[bytes]) -> str:
    """sha-256 of a state, 64 hex digits; quoted together with the cut-off, in ms.

    `ids` are those of all elements that expire after `cutoff`, tombstones included, in order of (hlc, id).
    Over: tag "swarmnode/state/1" and a zero byte ‖ cut-off as u64 little-endian ‖ ids.
    """
    digest = hashlib.sha256(_STATE_TAG + cutoff.to_bytes(8, "little"))
    for id in ids:
        digest.update(id)
    return digest.hexdigest()
