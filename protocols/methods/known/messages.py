"""What members of a run say to one another about rounds: the roster of a round, requests, replies and decisions.

All travel as `protocols.calls.rpc` calls named `round.<verb>`; `agreement.py` tells the order in which they are sent. A
message whose numbers or lengths no honest node sends is never built: the types of its fields refuse it, so that neither
`wire.decode` nor this node's own code can make one. What follows from the facts in a message is computed here and in
`agreement.py` by pure functions: members who know the same facts build the same roster.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from statistics import median, median_low
from typing import Annotated

from swarmnode.crdt.envelope import SEAL
from swarmnode.crdt.kinds import MAX_RECORD
from swarmnode.crdt.record import MAX_AUTHOR
from swarmnode.protocols import wire
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.wire import Message, WireError, check_range, within

MAX_PEERS = 1024  # in any list of peers in a message
MAX_SEATS = 256  # in a roster: its leader waits for all of them, and everybody holds its bytes
MAX_ROUND = 1 << 48  # rounds and ballots: far from the end of wire integers, however they are added to
MAX_SAMPLES = 1 << 53  # more would not be exact in a float64
MAX_SHARE = 16
MAX_SECONDS = 1e9  # of any duration; thirty years
LONGEST_WINDOW = 24 * 3600.0  # seconds; no leader can make a node train longer in one round

_HASH = re.compile("[0-9a-f]{64}")


def check_hash(what: str, value: str) -> None:
    """Raise WireError unless `value` is 64 lower-case hex digits."""
    if not _HASH.fullmatch(value):
        raise WireError(f"{what} is not a sha-256 in 64 hex digits")


def check_peers(what: str, peers: Sequence[PeerId]) -> None:
    """Raise WireError where there are too many peers, one twice, or one that no peer id can be."""
    if len(peers) > MAX_PEERS or len(set(peers)) != len(peers):
        raise WireError(f"{what} has {len(peers)} peers, one of them twice or more than {MAX_PEERS}")
    if not all(0 < len(peer) <= MAX_AUTHOR for peer in peers):
        raise WireError(f"{what} names a peer whose id is empty or above {MAX_AUTHOR} characters")


Counter = Annotated[int, within(0, MAX_ROUND)]  # a round or a ballot
Hash = Annotated[str, check_hash]
Sealed = Annotated[bytes, within(0, MAX_RECORD + SEAL)]  # the owner's word on the run's values; empty: there is none
Peers = Annotated[tuple[PeerId, ...], check_peers]
Seconds = Annotated[float, within(0.0, MAX_SECONDS)]  # seconds; what is negative, NaN or absurd is refused


PART_ALIGNMENT = 1024  # elements; parts start at whole codec blocks, so that encoding a part equals encoding the whole


@dataclass(frozen=True)
class Seat(Message):
    peer: PeerId
    weight: Annotated[int, within(0, MAX_SAMPLES)]  # of its pseudo-gradient in the mean; samples, capped
    share: Annotated[int, within(0, MAX_SHARE)]  # of the parameters that it reduces, relative to others; 0 owns nothing


@dataclass(frozen=True)
class Owner(Message):
    """Somebody by whom the vector was cut in an earlier attempt at the round."""

    peer: PeerId
    share: Annotated[int, within(1, MAX_SHARE)]


@dataclass(frozen=True)
class RoundRoster(Message):
    """What a round's result rests on. Two rosters with equal `roster_id` are equal."""

    run_id: str
    round: Counter
    ballot: Counter
    parent: Hash  # state hash that all seats start from
    seats: Annotated[tuple[Seat, ...], within(0, MAX_SEATS)]  # in the order in which contributions are summed
    joiners: Peers  # may take part from the next round on, without a vote in it
    window: Seconds  # that members should train in the next round at the most
    # those of an earlier attempt whose cut stays (`partition.py`); none in a first one
    cut_by: Annotated[tuple[Owner, ...], within(0, MAX_SEATS)] = ()
    steering: Sealed = b""  # by which to go in the next round (`steering.py`)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_peers("RoundRoster.seats", self.peers)
        check_peers("RoundRoster.cut_by", tuple(owner.peer for owner in self.cut_by))
        if not any(seat.share for seat in self.seats):
            raise WireError("RoundRoster.seats has nobody who reduces a part")

    @property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(seat.peer for seat in self.seats)

    def weight_of(self, peer: PeerId) -> int:
        """Of its pseudo-gradient in the mean; 0 for one without a seat."""
        return sum(seat.weight for seat in self.seats if seat.peer == peer)

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
        steps = sum(rate >= middle * times for times in (2, 4)) - sum(rate <= middle / times for times in (2, 4))
        return int(4 * 2.0**steps)

    return {peer: share(rate) for peer, rate in rates.items()}


def owners_of(seats: Iterable[Seat]) -> tuple[Owner, ...]:
    """Those who reduce something, in the order in which parts follow."""
    return tuple(Owner(seat.peer, seat.share) for seat in sorted(seats, key=attrgetter("peer")) if seat.share > 0)


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


MAX_HISTORY = 64  # steps in a RoundHead
MAX_RATE = 1e15  # bytes per second


def check_rates(what: str, rates: Mapping[PeerId, float]) -> None:
    """Raise WireError where there are too many, or one that no link has."""
    check_range(what, len(rates), 0, MAX_PEERS)
    for rate in rates.values():
        check_range(what, rate, 0.0, MAX_RATE)


@dataclass(frozen=True)
class RoundStep(Message):
    """One link of a node's recent history: the state hash after `round`."""

    round: Annotated[int, within(-1, MAX_ROUND)]
    state_hash: Hash


@dataclass(frozen=True)
class Position(Message):
    """Where a node stands: about to do `round` from the state `parent`, with the last roster's consequences."""

    round: Counter
    parent: Hash  # of the state at its start
    voters: Peers  # the seats of the last roster
    joiners: Peers  # those admitted by it
    window: Seconds  # that members train in the round at the most
    missing: Peers = field(default=(), kw_only=True)  # voters who had not reported that they hold the state
    steering: Sealed = field(default=b"", kw_only=True)  # says what is in force in the round

    @property
    def instance(self) -> tuple[int, str, tuple[PeerId, ...]]:
        """What is agreed upon: promises made for one instance mean nothing in another."""
        return self.round, self.parent, self.voters


@dataclass(frozen=True)
class RoundHead(Position):
    """Where a node says that it stands. What a joiner needs to take part in `round`."""

    run_id: str
    history: Annotated[tuple[RoundStep, ...], within(0, MAX_HISTORY)]  # recent rounds, oldest first
    elapsed: Seconds  # since the round began on this node
    paused: bool


@dataclass(frozen=True)
class HeadQuery:
    """`round.head`: where do you stand? Answered with a RoundHead."""

    run_id: str
    join: bool = False  # and name me in the next roster: repeated every second until that happened


@dataclass(frozen=True)
class Accepted(Message):
    """A result that a member computed and holds (accepted, as in Paxos): it must survive if a majority holds it."""

    ballot: Counter
    state_hash: Hash
    roster: RoundRoster


@dataclass(frozen=True)
class Ready(Message):
    """`round.ready`, member to leader: I have trained (the promise of Paxos).

    Answered with a LeaderReply when the roster is closed.
    """

    run_id: str
    round: Counter
    ballot: Counter
    parent: Hash  # state hash that I trained from
    samples: Annotated[int, within(0, MAX_SAMPLES)]
    train_seconds: Seconds
    rates: Annotated[dict[str, float], check_rates]  # bytes per second that I measured when fetching from others
    joiners: Peers  # who asked me to be named
    accepted: Accepted | None  # what I hold from an earlier ballot of this round
    relayed: Peers = ()  # those of the candidates that I reach through a relay only
    steering: Sealed = b""  # a later one than that of my place


@dataclass(frozen=True)
class Decision(Message):
    """The outcome of the round of `roster`: final as soon as a majority of the voters holds the state."""

    state_hash: Hash  # after the round
    roster: RoundRoster
    missing: Peers  # voters without a seat, or seats that had not reported


@dataclass(frozen=True)
class LeaderReply(Message):
    """A leader's answer to a Ready (the accept request of Paxos) or a Report: what the member is to do next.

    To a Ready: `roster`: exchange with these, or wait for the decision when not among them; `adopt`: an earlier
    ballot's result may have been decided: hold it and report; `late`: the roster was closed before, wait for the
    decision; `elsewhere`: the leader stands somewhere else, see `head`. To both: `again`: go to `ballot`; `decided`:
    the round is over, `decision` tells how, where that is remembered.
    """

    kind: str
    ballot: Counter = 0
    roster: RoundRoster | None = None
    accepted: Accepted | None = None
    holders: Peers = ()
    decision: Decision | None = None
    head: RoundHead | None = None


@dataclass(frozen=True)
class Report(Message):
    """`round.report`, member to leader: the state I hold now, or whom I missed. Answered with a LeaderReply."""

    run_id: str
    round: Counter
    ballot: Counter
    state_hash: Hash | None
    missing: Peers


@dataclass(frozen=True)
class Summon(Message):
    """`round.summon`, leader to all candidates: I lead this ballot (Paxos: prepare). Answered with a RoundHead."""

    run_id: str
    round: Counter
    ballot: Counter


@dataclass(frozen=True)
class Goodbye(Message):
    """`round.goodbye`, to all candidates: do not wait for me in this round (leaving or paused)."""

    run_id: str
    round: Counter


class Behind(Exception):
    """The round was decided elsewhere, or others stand on another state: catch up with `head` before going on."""

    def __init__(self, head: RoundHead, source: PeerId) -> None:
        super().__init__(f"{source} is at round {head.round}")
        self.head = head
        self.source = source


class PartsMissing(Exception):
    """A reduction could not be completed because of these peers."""

    def __init__(self, peers: tuple[PeerId, ...]) -> None:
        super().__init__("no parts from " + ", ".join(peers))
        self.peers = peers
