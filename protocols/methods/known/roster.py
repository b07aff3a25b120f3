"""The roster of a round: who counts, with which weight, and who reduces which part. Pure.

Every function here is deterministic in its arguments, so that members who know the same facts build the same roster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low

from swarmnode.protocols import wire
from swarmnode.protocols.methods.known.bounds import (
    MAX_ROUND,
    MAX_SEATS,
    MAX_SHARE,
    MAX_WEIGHT,
    check_hash,
    check_peers,
    check_range,
    check_seconds,
)
from swarmnode.protocols.network import PeerId

PART_ALIGNMENT = 1024  # elements; parts start at whole codec blocks, so that encoding a part equals encoding the whole


@dataclass(frozen=True)
class Seat:
    """One member's place in a round."""

    peer: PeerId
    weight: int  # of its pseudo-gradient in the mean; samples, capped
    share: int  # of the parameters that it reduces, relative to the other seats; 0 owns nothing


@dataclass(frozen=True)
class Owner:
    """Somebody by whom the vector was cut in an earlier attempt at the round."""

    peer: PeerId
    share: int


@dataclass(frozen=True)
class Roster:
    """What a round's result rests on. Two rosters with equal `roster_id` are equal."""

    run_id: str
    round: int
    ballot: int
    parent: str  # state hash that all seats start from
    seats: tuple[Seat, ...]  # in the order in which contributions are summed
    joiners: tuple[PeerId, ...]  # may take part from the next round on, without a vote in it
    window: float  # seconds that members should train in the next round at the most
    cut_by: tuple[Owner, ...] = ()  # those of an earlier attempt whose cut stays (`recut.py`); none in a first one

    def __post_init__(self) -> None:
        check_range("Roster.round", self.round, 0, MAX_ROUND)
        check_range("Roster.ballot", self.ballot, 0, MAX_ROUND)
        check_hash("Roster.parent", self.parent)
        check_peers("Roster.seats", self.peers)
        check_peers("Roster.joiners", self.joiners)
        check_seconds("Roster.window", self.window)
        for seat in self.seats:
            check_range("Seat.weight", seat.weight, 0, MAX_WEIGHT)
            check_range("Seat.share", seat.share, 0, MAX_SHARE)
        if not any(seat.share for seat in self.seats):
            raise wire.WireError("Roster.seats has nobody who reduces a part")
        check_peers("Roster.cut_by", tuple(owner.peer for owner in self.cut_by))
        check_range("Roster.cut_by", len(self.cut_by), 0, MAX_SEATS)
        for owner in self.cut_by:
            check_range("Owner.share", owner.share, 1, MAX_SHARE)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(seat.peer for seat in self.seats)

    @property
    def cutters(self) -> tuple[Owner, ...]:
        """The owners by whom the vector is cut: those of the first attempt at the round, where their cut stays."""
        return self.cut_by or owners_of(self.seats)

    @property
    def roster_id(self) -> str:
        """sha-256 of the encoding, 64 hex digits."""
        return hashlib.sha256(wire.encode(self)).hexdigest()


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of the flat vector, reduced by `owner`."""

    owner: PeerId
    start: int
    stop: int


def leader_order(
    run_id: str, round: int, voters: Iterable[PeerId], joiners: Iterable[PeerId] = ()
) -> tuple[PeerId, ...]:
    """Who leads attempt 0, 1, 2, … of a round: by sha-256(run ‖ round ‖ peer), joiners behind those who have a vote.

    A joiner may still be fetching the parameters, so it leads only where no voter is left.
    """

    def rank(peer: PeerId) -> bytes:
        return hashlib.sha256(f"{run_id}/{round}/{peer}".encode()).digest()

    old = sorted(set(voters), key=rank)
    return (*old, *sorted(set(joiners) - set(old), key=rank))


def majority(voters: Sequence[PeerId]) -> int:
    """How many voters are more than half."""
    return len(voters) // 2 + 1


def capped_weights(samples: Mapping[PeerId, int], cap: float) -> dict[PeerId, int]:
    """Weights by samples, none above `cap` times the median (of two, the lower) of those who did work.

    What a peer says it did is bounded by what the others did: a claim of 1e9 samples earns `cap` fair shares.
    """
    working = [n for n in samples.values() if n > 0]
    if not working:
        return dict.fromkeys(samples, 0)
    limit = max(1, int(cap * median_low(working)))
    return {peer: min(max(n, 0), limit) for peer, n in samples.items()}


def shares_by_rate(rates: Mapping[PeerId, float | None]) -> dict[PeerId, int]:
    """Relative part sizes from measured bytes per second: 1, 2, 4, 8 or 16, with 4 for the median and the unmeasured.

    Powers of two, so that noise does not move parts (a moved part drops its owner's residual); a node is given less
    or more only when it is at least twice as slow or fast as the median.
    """
    known = [r for r in rates.values() if r]
    middle = median(known) if known else 0.0

    def share(rate: float | None) -> int:
        if not rate or not middle:
            return 4
        steps = 0
        while steps < 2 and rate >= middle * 2 ** (steps + 1):
            steps += 1
        while steps > -2 and rate <= middle * 2.0 ** (steps - 1):
            steps -= 1
        return int(4 * 2.0**steps)

    return {peer: share(rate) for peer, rate in rates.items()}


def parts(roster: Roster, parameters: int) -> tuple[Part, ...]:
    """Cut `parameters` elements into one part per seat that owns any, sized by share, at multiples of PART_ALIGNMENT.

    Parts follow the order of peer ids, not of seats, so that they stay where they are while membership does. What was
    cut in an earlier attempt plays no part here, but in `recut.py`.
    """
    return cut(owners_of(roster.seats), 0, parameters)


def owners_of(seats: Iterable[Seat]) -> tuple[Owner, ...]:
    """Those who reduce something, in the order in which parts follow."""
    return tuple(Owner(seat.peer, seat.share) for seat in sorted(seats, key=lambda s: s.peer) if seat.share > 0)


def cut(owners: Sequence[Seat | Owner], start: int, stop: int) -> tuple[Part, ...]:
    """Elements `start` to `stop`, a part for each owner, sized by share, at multiples of PART_ALIGNMENT from `start`.

    An owner has none where there are fewer blocks than owners.
    """
    blocks = -(-(stop - start) // PART_ALIGNMENT)
    total = sum(seat.share for seat in owners)
    edges, taken = [start], 0
    for seat in owners:
        taken += seat.share
        edges.append(min(stop, start + blocks * taken // total * PART_ALIGNMENT))
    edges[-1] = stop
    return tuple(Part(seat.peer, a, b) for seat, (a, b) in zip(owners, pairwise(edges), strict=True) if b > a)
