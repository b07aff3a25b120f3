"""What nodes say in a round of the open chain, as values of write-once records (crdt/kinds.py).

    what     key                               said by
    commit   commit/ROUND/PARENT               who offers a contribution
    cut      availability/ROUND/PARENT         judges: the well-formed commits that I hold, whom I missed before, and
                                               whose scores of rounds before I found false
    reveal   reveal/ROUND/PARENT               who committed, once more than half of the judges have cut
    score    score/ROUND/PARENT-seal, -open    judges: first the hash of their scores, then the scores
    roster   roster/ROUND/PARENT-ATTEMPT       the leader of the attempt
    head     vote (replaceable)                validators: the roster that I follow, or am locked on

ROUND has 8 digits; PARENT is the first 16 hex digits of the id of the roster that the round builds on, so that a node
which changes to another fork may take part in the round there without contradicting itself.

`read` makes a statement of a record, or raises InvalidRecord: numbers and lists are within what honest nodes say,
and key and value agree. Signatures were checked when the record was stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import Value
from swarmnode.crdt.kinds import key_of
from swarmnode.crdt.record import InvalidRecord, Record
from swarmnode.protocols.wire import Check, check_fields, plain, within

HASH = 32  # bytes of ids, hashes and nonces
SALT = 16  # bytes
PREFIX = 16  # bytes of a commit's id in scores
MAX_COMMITS = 96  # in one cut, one judge's scores, one roster; a record has no room for many more
MAX_JUDGES = 33  # quoted in one roster
MAX_VALIDATORS = 1 << 16  # whom a cut can name by their place
MAX_ROUND = 99_999_999  # eight digits
MAX_GAIN = 1 << 40  # micro-bits per byte
MAX_WINDOW = 24 * 3_600_000  # ms
FULL_STANDING = 1000
ONE = 1 << 20  # clip factor 1

JUDGED, MISSING, MALFORMED = range(3)  # how a judge found a contribution
ACCEPTED = 0  # what a roster says of a commit, or of Refusal


class Refusal:
    """Why a roster does not count a commit."""

    MISSING, MALFORMED, HARMFUL, EQUIVOCATED, DUPLICATE = range(1, 6)
    NO_STANDING, UNINVITED, REVERTED, FOREIGN, LATE = range(6, 11)


VERDICTS = (
    "accepted",
    "not retrieved by most judges",
    "malformed",
    "does harm on held-out text",
    "its author committed twice",
    "another revealed the same bytes",
    "its author has no standing with the judges",
    "its author was not drawn for this round",
    "the round went back by one roster instead",
    "committed to another round or history",
    "too late for most judges",
)


# --- what a field may hold, besides its type: `read` asks these -------------------------------------------------------


def _sized(*sizes: int) -> Check:
    """That so many bytes are there."""

    def check(what: str, value: bytes) -> None:
        if len(value) not in sizes:
            raise ValueError(f"{what} has {len(value)} bytes")

    return check


def _ascending(most: int, item: Check | None = None) -> Check:
    """That values are at most so many, in ascending order, each as `item` has it."""

    def check(what: str, values: Sequence[Any]) -> None:
        if len(values) > most or any(a >= b for a, b in pairwise(values)):
            raise ValueError(f"{what} has more than {most} values, or they are not in ascending order")
        if item is not None:
            for value in values:
                item(what, value)

    return check


def _disproof(what: str, pair: tuple[int, int]) -> None:
    _PLACE(what, pair[0])
    _ROUND(what, pair[1])


def _rows(what: str, rows: Sequence[Any]) -> None:
    _ascending(MAX_COMMITS)(what, [row.commit for row in rows])
    for row in rows:
        check_fields(row)


_GAIN, _PLACE, _ROUND = within(-MAX_GAIN, MAX_GAIN), within(0, MAX_VALIDATORS - 1), within(0, MAX_ROUND)
Id: TypeAlias = Annotated[bytes, _sized(HASH)]
Salt: TypeAlias = Annotated[bytes, _sized(SALT)]
Window: TypeAlias = Annotated[int, within(0, MAX_WINDOW)]  # ms

# --- statements -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OfRound:
    """What is said in the round that builds on the roster `parent`, under one key of a kind."""

    round: int
    parent: Id

    kind: ClassVar[str]
    suffix: ClassVar[str] = ""  # of the key, where one author says several things of a kind

    @property
    def key(self) -> str:
        return key_of(self.kind, self.round, subject(self.parent) + self.suffix)

    @property
    def value(self) -> dict[str, Value]:
        """What the record holds: the fields but for the round, which is in the key, and of rows the columns."""
        held = {name: value for name, value in vars(self).items() if name != "round"}
        if (rows := _ROWS.get(type(self))) is not None:
            held[rows[0]] = tuple(tuple(vars(row).values()) for row in held[rows[0]])
        return held


@dataclass(frozen=True)
class Commit(_OfRound):
    """I bound myself to a contribution; `binding` hides which one (`binding_of`)."""

    kind = "commit"
    binding: Id
    anchor: Id  # end of the author's hash chain, see `state.HashChain`


@dataclass(frozen=True)
class AvailabilityVote(_OfRound):
    """The commits that a judge holds when it stops waiting, and the hash of the nonce that draws its batch.

    `absent` are those of this round's validators who judged the round before, which the parent ended, and of whom the
    author holds no cut of it: by their places in `ChainState.validators`, so that a cut has room for them. `disproved`
    are those whose scores of some round before the author recomputed, and found other figures: place and round.
    """

    kind = "availability"
    commits: Annotated[tuple[bytes, ...], _ascending(MAX_COMMITS, _sized(HASH))]  # ids of records, ascending
    nonce_hash: Id
    window: Window  # that the judge proposes for the next round's training
    absent: Annotated[tuple[int, ...], _ascending(MAX_JUDGES, _PLACE)] = ()  # ascending
    disproved: Annotated[tuple[tuple[int, int], ...], _ascending(MAX_JUDGES, _disproof)] = ()  # ascending


@dataclass(frozen=True)
class Reveal(_OfRound):
    """What opens a commit: the contribution is that with the id `root`."""

    kind = "reveal"
    commit: Id
    salt: Salt
    root: Id
    trace: Annotated[bytes, _sized(0, HASH)] = b""  # root of the record of the work, in runs with audits


@dataclass(frozen=True)
class Seal(_OfRound):
    """The hash of the scores that follow."""

    kind, suffix = "score", "-seal"
    seal: Id


@dataclass(frozen=True)
class Score:
    """One contribution as one judge found it."""

    commit: Annotated[bytes, _sized(PREFIX)]  # the first bytes of the commit's id
    found: Annotated[int, within(JUDGED, MALFORMED)]  # JUDGED, MISSING or MALFORMED
    gain: Annotated[int, _GAIN]  # micro-bits per byte of the held-out loss that the step takes off; 0 unless JUDGED
    standing: Annotated[int, within(0, FULL_STANDING)] = FULL_STANDING  # what the judge thinks of the author


@dataclass(frozen=True)
class Scores(_OfRound):
    """All that a judge found in a round. `nonce` opens the hash in its cut."""

    kind, suffix = "score", "-open"
    nonce: Id
    salt: Salt
    undo: Annotated[int | None, _GAIN]  # loss now minus before the last roster, micro-bits per byte; None: not measured
    scores: Annotated[tuple[Score, ...], _rows]  # ascending by commit

    @property
    def seal(self) -> bytes:
        """What the judge signed before it opened its scores."""
        return hashlib.sha256(b"swarmnode/scores/1\0" + encoding.encode(self.value)).digest()


@dataclass(frozen=True)
class Entry:
    commit: Id  # of the record
    verdict: Annotated[int, within(0, len(VERDICTS) - 1)]  # ACCEPTED or a reason for refusal
    weight: Annotated[int, within(0, 1 << 40)]  # of it in the mean, out of the roster's total; 0 unless accepted
    clip: Annotated[int, within(0, ONE)]  # its values are scaled by clip / ONE; 0 unless accepted


@dataclass(frozen=True)
class Roster(_OfRound):
    """One link of the chain. All but the choice of quoted cuts and scores follows from these (`rules.derive`).

    Its parent is the roster before, the genesis, or an empty roster.
    """

    kind = "roster"
    attempt: Annotated[int, within(0, MAX_JUDGES)]
    preimage: Annotated[bytes, _sized(0, HASH)]  # next of the leader's hash chain; empty where it has none
    cuts: Annotated[tuple[bytes, ...], _ascending(MAX_JUDGES, _sized(HASH))]  # ids of records, ascending
    scores: Annotated[tuple[bytes, ...], _ascending(MAX_JUDGES, _sized(HASH))]  # ids of opened scores, ascending
    entries: Annotated[tuple[Entry, ...], _rows]  # ascending by commit: so contributions are added
    total: Annotated[int, within(0, 1 << 53)]  # weights are divided by this
    revert: bool  # go back to the state before the parent, and add nothing
    window: Window  # of the next round's training
    state: Id  # state hash at the parent: what this round trained from
    chain: Id  # digest of the ChainState at the parent

    @property
    def suffix(self) -> str:  # type: ignore[override]
        return f"-{self.attempt}"

    @property
    def accepted(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.verdict == ACCEPTED)


@dataclass(frozen=True)
class ForkChoiceVote:
    """The roster that a validator follows, which it holds with every byte and serves."""

    roster: Id  # that of an empty roster as well
    round: Annotated[int, _ROUND]  # rounds done: that of the roster plus one
    state: Id  # state hash after the roster
    moved: bool = False  # it followed another roster of that round before
    locked: bool = False  # it saw most follow it, and until their time is over moves only where most are locked

    kind: ClassVar[str] = "vote"
    key: ClassVar[str] = "vote"

    @property
    def value(self) -> dict[str, Value]:
        return dict(vars(self))


Statement = Commit | AvailabilityVote | Reveal | Seal | Scores | Roster | ForkChoiceVote
S = TypeVar("S", bound=Statement)


@dataclass(frozen=True)
class Said(Generic[S]):
    """A statement with who made it and the id of its record."""

    author: str
    id: bytes
    what: S


def subject(parent: bytes) -> str:
    return parent.hex()[:16]


@lru_cache(4096)  # a judge looks again at whether a reveal opens its commit whenever something is said
def binding_of(
    run_id: str, round: int, author: str, parent: bytes, salt: bytes, root: bytes, trace: bytes = b""
) -> bytes:
    """What a commit binds its author to. As the author is in it, a copied commit opens to nothing."""
    parts = [run_id.encode(), round.to_bytes(8, "big"), author.encode(), parent, salt, root]
    parts += [trace] if trace else []
    digest = hashlib.sha256(b"swarmnode/commit/1\0")
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


def opens(reveal: Reveal, commit: Said[Commit], run_id: str) -> bool:
    """Whether `reveal` tells what `commit` was bound to."""
    made = commit.what
    told = (reveal.salt, reveal.root, reveal.trace)
    return (
        reveal.commit == commit.id
        and (reveal.round, reveal.parent) == (made.round, made.parent)
        and binding_of(run_id, made.round, commit.author, made.parent, *told) == made.binding
    )


def nonce_hash(nonce: bytes) -> bytes:
    """What a judge says of its nonce before contributions are revealed."""
    return hashlib.sha256(b"swarmnode/nonce/1\0" + nonce).digest()


def read(record: Record) -> Said[Any]:
    """The statement of a record of one of the kinds above. Raises InvalidRecord."""
    key, value = record.key, record.value
    if record.kind not in _BY_KIND:
        raise InvalidRecord(f"{key!r} is no statement of a round")
    if not isinstance(value, Mapping):
        raise InvalidRecord(f"{key!r} has no fields")
    kind: type[Any] = Seal if "seal" in value else _BY_KIND[record.kind]
    fields: dict[str, Any] = dict(value)
    try:
        if kind is not ForkChoiceVote:
            fields["round"] = int(key.partition("/")[2][:8])
        if kind in _ROWS:
            name, row = _ROWS[kind]
            fields[name] = tuple(row(*columns) for columns in fields[name])
        statement = kind(**fields)
        plain(statement)  # raises WireError for a value of another type
        check_fields(statement)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRecord(f"{key!r}: {error}") from error
    if statement.key != key or statement.value != value:
        raise InvalidRecord(f"{key!r} is not the key of what it says, or says less or more")
    if kind is Scores and any(score.gain and score.found != JUDGED for score in statement.scores):
        raise InvalidRecord(f"{key!r}: a gain of what was not judged")
    return Said(record.author, record.id, statement)


_BY_KIND: dict[str, type[Any]] = {
    kind.kind: kind for kind in (Commit, AvailabilityVote, Reveal, Scores, Roster, ForkChoiceVote)
}
_ROWS: dict[type[Any], tuple[str, type[Any]]] = {Scores: ("scores", Score), Roster: ("entries", Entry)}
