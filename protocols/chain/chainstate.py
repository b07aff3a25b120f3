"""What follows from a chain of rosters, as far as later rounds need it. A fold: `validity.advance` makes the next one.

`digest` is in every roster that builds on this state, so whoever trusts a roster can take this state from anybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value
from swarmnode.training.runsections import TrustSection

MILLION = 1_000_000
EVERYBODY = MILLION  # participation in millionths: all take part
MAX_ENCODED = 1 << 20  # bytes; 22 rounds of 96 authors who all differ take 350 kB


@dataclass(frozen=True)
class ChainRules:
    """The numbers of a run's chain. Gains in micro-bits per byte, shares in millionths, times in ms.

    The first five are in a run's `[trust]` table (`rules_of`), the others are the same in all runs.
    """

    participants: int = 64  # contributions a round that are aimed at
    gain_floor: int = 0  # a contribution must gain more than this
    revert_above: int = 50_000  # a roster that worsened the held-out loss by more is undone
    shortest_window: int = 1_000
    longest_window: int = 24 * 3_600_000
    earn_rounds: int = 8  # of earn_window rosters with accepted work make an elector
    earn_window: int = 16  # rosters looked at, and from one change of the electorate to the next
    earn_lag: int = 6  # the last rosters, which do not count yet
    growth: int = 125_000  # share by which the electors may grow at a change; one may always come
    committee: int = 33  # judges of a round, where there are more electors
    probation: int = 125_000  # share of a roster's weight that all who are no electors hold together …
    probation_small: int = 500_000  # … and while there are fewer than electorate.SMALL electors
    revert_every: int = 8  # rounds from one revert to the next
    norms: int = 16  # rosters that bound the norm to which the next one clips …
    norms_least: int = 4  # … where there are so many
    norm_growth: int = 2  # times the median of theirs at the most …
    norm_fall: int = 750_000  # … and at least this share of it

    @property
    def remembered(self) -> int:
        """Rosters that a ChainState remembers."""
        return self.earn_window + self.earn_lag


def rules_of(trust: TrustSection) -> ChainRules:
    """The rules that a RunSpec gives its chain, in integers: they are part of what all nodes compute alike."""
    return ChainRules(
        participants=trust.participants,
        gain_floor=round(trust.gain_floor * MILLION),
        revert_above=round(trust.revert_above * MILLION),
        shortest_window=round(trust.shortest_window * 1000),
        longest_window=round(trust.longest_window * 1000),
    )


@dataclass(frozen=True)
class Worked:
    """Accepted work of one author in one roster."""

    author: str
    units: int  # audited: 1000 is the median gain of the round or more


@dataclass(frozen=True)
class ChainState:
    """After `round` rounds, about to do the round of that number."""

    run_id: str
    round: int
    tip: bytes  # id of the last roster; that of the genesis before round 0
    seed: bytes  # of this round: orders leaders, draws judges
    cohort: bytes  # seed of the first round since the electorate last changed: draws participants
    electors: tuple[str, ...]  # ascending
    genesis: tuple[str, ...]  # those of them that the RunSpec names; they stay for GENESIS_EPOCHS without proof of work
    made: int  # rosters up to here that are not empty: the electorate changes with these
    history: tuple[tuple[Worked, ...], ...]  # of the last of them, oldest first
    anchors: Mapping[str, bytes]  # of each author who may lead: the value whose preimage is next
    participation: int  # millionths of those who are no electors that are drawn for this round
    empties: int  # empty rosters since the last that a majority of its judges scored
    reverted: int  # round of the last revert; -1: none
    undoable: bool  # whether the last roster moved the parameters, so that it can be undone
    window: int  # ms of this round's training
    norms: tuple[float, ...] = ()  # to which the last rosters that accepted something clipped, oldest first
    seats: int = 0  # electors that there may be before the electorate next changes: see `seats`
    silent: Mapping[str, int] = field(default_factory=dict)  # of electors missed: rosters since they were last quoted

    def encode(self) -> bytes:
        """Canonical bytes, for `decode`."""
        value: Value = {
            "anchors": dict(self.anchors),
            "cohort": self.cohort,
            "electors": self.electors,
            "empties": self.empties,
            "genesis": self.genesis,
            "history": tuple(tuple((w.author, w.units) for w in worked) for worked in self.history),
            "made": self.made,
            "norms": self.norms,
            "participation": self.participation,
            "reverted": self.reverted,
            "round": self.round,
            "run": self.run_id,
            "seats": self.seats,
            "seed": self.seed,
            "silent": dict(self.silent),
            "tip": self.tip,
            "undoable": self.undoable,
            "window": self.window,
        }
        return encoding.encode(value, max_size=MAX_ENCODED)

    @property
    def digest(self) -> bytes:
        """sha-256 over `encode`, 32 bytes."""
        return hashlib.sha256(b"swarmnode/chain/1\0" + self.encode()).digest()


def genesis_id(run_id: str) -> bytes:
    """What the first roster of a run has as its parent."""
    return hashlib.sha256(b"swarmnode/genesis/1\0" + run_id.encode()).digest()


def genesis(run_id: str, electors: tuple[str, ...], *, window: int) -> ChainState:
    """The chain of a run before round 0. `electors`: those of the RunSpec, at least one."""
    if not electors:
        raise ValueError("a run has at least one genesis elector")
    named = tuple(sorted(set(electors)))
    start = genesis_id(run_id)
    seed = hashlib.sha256(b"swarmnode/seed/1\0" + start).digest()
    first = ChainState(run_id, 0, start, seed, seed, named, named, 0, (), {}, EVERYBODY, 0, -1, False, window)
    return replace(first, seats=len(named))


def decode(raw: bytes) -> ChainState:
    """The state in bytes from a peer, to be compared with a digest that is trusted. Raises ValueError."""
    try:
        value: Any = encoding.decode(raw, max_size=MAX_ENCODED)
        history = tuple(tuple(Worked(author, units) for author, units in worked) for worked in value["history"])
        state = ChainState(
            value["run"],
            value["round"],
            value["tip"],
            value["seed"],
            value["cohort"],
            value["electors"],
            value["genesis"],
            value["made"],
            history,
            value["anchors"],
            value["participation"],
            value["empties"],
            value["reverted"],
            value["undoable"],
            value["window"],
            value["norms"],
            value["seats"],
            value["silent"],
        )
        if state.encode() != raw:
            raise ValueError("it holds more, or has a field of another type")
        return state
    except (EncodingError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"these bytes are no chain state: {error}") from error
