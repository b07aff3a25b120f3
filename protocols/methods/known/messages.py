"""What members of a run say to one another about rounds: requests, replies and decisions.

All travel as `protocols.rpc` calls named `round.<verb>`; `agreement.py` tells the order in which they are sent. A
message whose numbers or lengths no honest node sends is never built: `wire.decode` refuses it where it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.protocols.methods.known.bounds import (
    MAX_PEERS,
    MAX_ROUND,
    check_hash,
    check_peers,
    check_range,
    check_seconds,
)
from swarmnode.protocols.methods.known.roster import Roster
from swarmnode.protocols.network import PeerId

MAX_HISTORY = 64  # steps in a Head
MAX_SAMPLES = 1 << 53  # more would not be exact in a float64
MAX_RATE = 1e15  # bytes per second


@dataclass(frozen=True)
class Step:
    """One link of a node's recent history: the state hash after `round`."""

    round: int
    state_hash: str

    def __post_init__(self) -> None:
        check_range("Step.round", self.round, -1, MAX_ROUND)
        check_hash("Step.state_hash", self.state_hash)


@dataclass(frozen=True)
class Head:
    """Where a node stands in a run. What a joiner needs to take part in `round`."""

    run_id: str
    round: int  # the round that the node works on
    state_hash: str  # of the state at its start
    voters: tuple[PeerId, ...]  # the seats of the last roster
    joiners: tuple[PeerId, ...]  # those admitted by it
    history: tuple[Step, ...]  # recent rounds, oldest first
    elapsed: float  # seconds since the round began on this node
    window: float  # seconds that members train in it at the most
    paused: bool

    def __post_init__(self) -> None:
        check_range("Head.round", self.round, 0, MAX_ROUND)
        check_hash("Head.state_hash", self.state_hash)
        check_peers("Head.voters", self.voters)
        check_peers("Head.joiners", self.joiners)
        check_range("Head.history", len(self.history), 0, MAX_HISTORY)
        check_seconds("Head.elapsed", self.elapsed)
        check_seconds("Head.window", self.window)


@dataclass(frozen=True)
class HeadQuery:
    run_id: str


@dataclass(frozen=True)
class Join:
    """`round.join`: name me in the next roster. Repeated every second until it happened; answered with a Head."""

    run_id: str


@dataclass(frozen=True)
class Accepted:
    """A result that a member computed and holds: it must survive if a majority holds it."""

    ballot: int
    state_hash: str
    roster: Roster

    def __post_init__(self) -> None:
        check_range("Accepted.ballot", self.ballot, 0, MAX_ROUND)
        check_hash("Accepted.state_hash", self.state_hash)


@dataclass(frozen=True)
class Ready:
    """`round.ready`, member to leader: I have trained. Answered with a Verdict when the roster is closed."""

    run_id: str
    round: int
    ballot: int
    parent: str  # state hash that I trained from
    samples: int
    train_seconds: float
    rates: dict[str, float]  # bytes per second that I measured when fetching from others
    joiners: tuple[PeerId, ...]  # who asked me to be named
    accepted: Accepted | None  # what I hold from an earlier ballot of this round
    relayed: tuple[PeerId, ...] = ()  # those of the candidates that I reach through a relay only

    def __post_init__(self) -> None:
        check_range("Ready.round", self.round, 0, MAX_ROUND)
        check_range("Ready.ballot", self.ballot, 0, MAX_ROUND)
        check_hash("Ready.parent", self.parent)
        check_range("Ready.samples", self.samples, 0, MAX_SAMPLES)
        check_seconds("Ready.train_seconds", self.train_seconds)
        check_range("Ready.rates", len(self.rates), 0, MAX_PEERS)
        for rate in self.rates.values():
            check_range("Ready.rates", rate, 0.0, MAX_RATE)
        check_peers("Ready.joiners", self.joiners)
        check_peers("Ready.relayed", self.relayed)


@dataclass(frozen=True)
class Decision:
    """The outcome of a round: final as soon as a majority of the voters holds the state."""

    run_id: str
    round: int
    state_hash: str  # after the round
    roster: Roster
    missing: tuple[PeerId, ...]  # voters without a seat, or seats that had not reported

    def __post_init__(self) -> None:
        check_range("Decision.round", self.round, 0, MAX_ROUND)
        check_hash("Decision.state_hash", self.state_hash)
        check_peers("Decision.missing", self.missing)


@dataclass(frozen=True)
class Verdict:
    """The leader's answer to a Ready, and the member's guide to what to do next.

    `roster`: exchange with these, or wait for the decision when not among them; `adopt`: an earlier ballot's result
    may have been decided: hold it and report; `late`: the roster was closed before, wait for the decision;
    `again`: go to `ballot`; `ahead`: the round is over, `decision` tells how; `elsewhere`: the leader stands somewhere
    else, see `head`.
    """

    kind: str
    ballot: int = 0
    roster: Roster | None = None
    accepted: Accepted | None = None
    holders: tuple[PeerId, ...] = ()
    decision: Decision | None = None
    head: Head | None = None

    def __post_init__(self) -> None:
        check_range("Verdict.ballot", self.ballot, 0, MAX_ROUND)
        check_peers("Verdict.holders", self.holders)


@dataclass(frozen=True)
class Report:
    """`round.report`, member to leader: the state I hold now, or whom I missed. Answered with a Ruling."""

    run_id: str
    round: int
    ballot: int
    state_hash: str | None
    missing: tuple[PeerId, ...]

    def __post_init__(self) -> None:
        check_range("Report.round", self.round, 0, MAX_ROUND)
        check_range("Report.ballot", self.ballot, 0, MAX_ROUND)
        if self.state_hash is not None:
            check_hash("Report.state_hash", self.state_hash)
        check_peers("Report.missing", self.missing)


@dataclass(frozen=True)
class Ruling:
    """`decided` with the decision, or `again` with the ballot to go to."""

    kind: str
    ballot: int = 0
    decision: Decision | None = None

    def __post_init__(self) -> None:
        check_range("Ruling.ballot", self.ballot, 0, MAX_ROUND)


@dataclass(frozen=True)
class Summon:
    """`round.summon`, leader to all candidates: I lead this ballot now. Answered with a Head."""

    run_id: str
    round: int
    ballot: int

    def __post_init__(self) -> None:
        check_range("Summon.round", self.round, 0, MAX_ROUND)
        check_range("Summon.ballot", self.ballot, 0, MAX_ROUND)


@dataclass(frozen=True)
class Goodbye:
    """`round.goodbye`, to all candidates: do not wait for me in this round (leaving or paused)."""

    run_id: str
    round: int

    def __post_init__(self) -> None:
        check_range("Goodbye.round", self.round, 0, MAX_ROUND)


@dataclass(frozen=True)
class Noted:
    """An empty reply."""
