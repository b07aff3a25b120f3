"""What nodes of an open run ask one another about its chain; all else travels as records of the replicated state.

    chain.tip       where do you stand?                 Tip: its id, and a chain from a few rounds before to start from
    chain.path      how do I get to this roster?        Path: the ids of the rosters up to it
    chain.records   send me these records               Records: as many as are held, in no order
    chain.before    what was the chain before this one? Before: the chain that a roster builds on

Every answer can be checked: rosters by their rules, a chain by its digest in the roster that follows, records by their
signatures. Who lies costs its caller one call.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.protocols.methods.known.messages import MAX_ROUND, check_hash, check_range, check_seconds
from swarmnode.protocols.wire import WireError

TIP, PATH, RECORDS, BEFORE = "chain.tip", "chain.path", "chain.records", "chain.before"
MAX_ASKED = 256  # ids in one question
MAX_PATH = 160  # rosters in one path; more than the rounds that can be gone back
MAX_BYTES = 900_000  # of records in one answer
TIMEOUT = 5.0  # seconds for an answer


@dataclass(frozen=True)
class TipQuery:
    run_id: str
    joins: bool = True  # the asker is about to take part, and may be waited for


@dataclass(frozen=True)
class Tip:
    """The roster that a node follows, and a state some rounds before it that the node serves."""

    tip: bytes
    round: int  # rounds done at the tip
    elapsed: float  # seconds since the node came there
    base: bytes  # an encoded ChainState
    base_state: str  # the state hash there

    def __post_init__(self) -> None:
        _check_id(self.tip)
        check_range("round", self.round, 0, MAX_ROUND)
        check_seconds("elapsed", self.elapsed)
        check_hash("base_state", self.base_state)


@dataclass(frozen=True)
class PathQuery:
    run_id: str
    tip: bytes


@dataclass(frozen=True)
class Path:
    """Ids of rosters, each on the one before, the last being the one asked for; `empty` says which are empty."""

    ids: tuple[bytes, ...]
    empty: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.empty) or len(self.ids) > MAX_PATH:
            raise WireError(f"a path of {len(self.ids)} rosters with {len(self.empty)} marks")
        for id in self.ids:
            _check_id(id)


@dataclass(frozen=True)
class RecordsQuery:
    """`reveals`: ids of commits whose reveals are wanted."""

    run_id: str
    ids: tuple[bytes, ...] = ()
    reveals: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if len(self.ids) + len(self.reveals) > MAX_ASKED:
            raise WireError(f"more than {MAX_ASKED} records asked for")


@dataclass(frozen=True)
class Records:
    sealed: tuple[bytes, ...]


@dataclass(frozen=True)
class BeforeQuery:
    run_id: str
    roster: bytes

    def __post_init__(self) -> None:
        _check_id(self.roster)


@dataclass(frozen=True)
class Before:
    """An encoded ChainState; the roster that was asked about has its digest."""

    chain: bytes


def _check_id(id: bytes) -> None:
    if len(id) != 32:
        raise WireError(f"an id of {len(id)} bytes")
