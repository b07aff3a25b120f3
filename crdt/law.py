"""The merge law: which elements of an author stand, whatever the order in which a replica hears of them.

For each (author, kind), over everything heard so far:

    replaceable: for each key the greatest rank; of these the `slots` greatest
    write-once:  the `slots` greatest ranks, where a key may occur more than once

A rank is when the element expires, then its id (see `record`): as a kind has one ttl, ranks of a kind compare as
(hlc, id) do.

Both are functions of the set that was heard, and merging element by element computes them, so replicas that heard the
same agree. What is displaced is always less than what displaces it, so it expires no later, and forgetting what expired
commutes with merging (docs/architecture.md, "One merge law").

The law looks at key and rank only, so a store need not load what it compares.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable
from typing import Generic, NamedTuple, TypeVar

from swarmnode.crdt.hlc import is_ahead
from swarmnode.crdt.kinds import ElementKind
from swarmnode.crdt.record import Element

# ms; a clock that steps back further was wrong before, rather than corrected a little. Less than anything lives: what
# is written right after a smaller step must not count as expired.
MAX_STEP_BACK = 300_000


class Merged(enum.Enum):
    """What became of an element. Only `STORED` is news that is worth passing on."""

    STORED = "stored"
    KNOWN = "known"  # this very element is here
    OLDER = "older"  # a greater one stands under its key
    EXPIRED = "expired"
    AHEAD = "ahead"  # dated too far in the future; repair offers it again later
    QUOTA = "quota"  # its author's slots of this kind hold greater elements
    STRANGER = "stranger"  # its author is not admitted


class Order(NamedTuple):
    """The place of an element among those of its author and kind: all that the law looks at, also of an element."""

    key: str
    rank: bytes


O = TypeVar("O", bound=Order | Element)  # noqa: E741


class Judgement(NamedTuple, Generic[O]):
    """What the law says about a new element: its verdict, which standing one leaves, and whom it contradicts."""

    verdict: Merged
    gone: O | None = None  # leaves as the new one comes; only with STORED
    rival: O | None = None  # another one under the same write-once key: together they are evidence, stored or not


class _Everybody:
    def __contains__(self, author: object) -> bool:
        return True


EVERYBODY: Container[str] = _Everybody()  # where all authors are admitted


def judge(kind: ElementKind, standing: Iterable[O], new: Order | Element) -> Judgement[O]:
    """What becomes of `new`, where `standing` is all that stands of its author and `kind`, in any order.

    The caller first asks `untimely`. It may pass elements or `Order`s; `gone` and `rival` are among those passed.
    """
    held = 0
    least: O | None = None
    rival: O | None = None  # the greatest under the key
    for one in standing:
        if one.rank == new.rank:
            return Judgement(Merged.KNOWN)
        held += 1
        if least is None or one.rank < least.rank:
            least = one
        if one.key == new.key and (rival is None or one.rank > rival.rank):
            rival = one
    if rival is not None and not kind.write_once:
        return Judgement(Merged.OLDER) if rival.rank > new.rank else Judgement(Merged.STORED, gone=rival)
    if held < kind.slots or least is None:
        return Judgement(Merged.STORED, rival=rival)
    if least.rank > new.rank:
        return Judgement(Merged.QUOTA, rival=rival)
    return Judgement(Merged.STORED, gone=least, rival=rival)


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
