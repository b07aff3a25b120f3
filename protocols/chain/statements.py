"""What nodes say in a round of the open chain, as values of write-once records (crdt/kinds.py).

    kind     key                               said by
    commit   commit/ROUND/PARENT               who offers a contribution
    cut      cut/ROUND/PARENT                  judges: the well-formed commits that I hold, and whom I missed before
    reveal   reveal/ROUND/PARENT               who committed, once more than half of the judges have cut
    score    score/ROUND/PARENT-seal, -open    judges: first the hash of their scores, then the scores
    roster   roster/ROUND/PARENT-ATTEMPT       the leader of the attempt
    head     head (replaceable)                validators: the roster that I follow

ROUND has 8 digits; PARENT is the first 16 hex digits of the id of the roster that the round builds on, so that a node
which changes to another fork may take part in the round there without contradicting itself.

`read` makes a statement of a record, or raises InvalidStatement: numbers and lists are within what honest nodes say,
and key and value agree. Signatures were checked when the record was stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, TypeVar

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import Value
from swarmnode.crdt.kinds import key_of
from swarmnode.crdt.record import Record

HASH = 32  # bytes of ids, hashes and nonces
SALT = 16  # bytes
PREFIX = 16  # bytes of a commit's id in scores
MAX_COMMITS = 96  # in one cut, one judge's scores, one roster; a record has no room for many more
MAX_JUDGES = 33  # quoted in one roster
MAX_VALIDATORS = 1 << 16  # whom a cut can name by their place
MAX_ROUND = 99_999_999  # eight digits
MAX_GAIN = 1 << 40  # micro-bits per byte
MAX_WINDOW = 24 * 3_600_000  # ms
MAX_SIZE = 1 << 36  # bytes of a contribution
FULL_STANDING = 1000
ONE = 1 << 20  # clip factor 1

# how a judge found a contribution
JUDGED, MISSING, MALFORMED = 0, 1, 2
# what a roster says of a commit
ACCEPTED, REFUSED_MISSING, REFUSED_MALFORMED, REFUSED_NO_GAIN, REFUSED_EQUIVOCATED, REFUSED_DUPLICATE = range(6)
REFUSED_NO_STANDING, REFUSED_UNINVITED, REFUSED_REVERTED, REFUSED_FOREIGN, REFUSED_LATE = 6, 7, 8, 9, 10
VERDICTS = (
    "accepted",
    "not retrieved by most judges",
    "malformed",
    "no gain on held-out text",
    "its author committed twice",
    "another revealed the same bytes",
    "its author has no standing with the judges",
    "its author was not drawn for this round",
    "the round went back by one roster instead",
    "committed to another round or history",
    "too late for most judges",
)


class InvalidStatement(ValueError):
    """A record that no honest node writes. The message says why."""


@dataclass(frozen=True)
class Commit:
    """I bound myself to a contribution; `binding` hides which one (`binding_of`)."""

    round: int
    parent: bytes
    binding: bytes
    anchor: bytes  # end of the author's hash chain, see `beacon`

    @property
    def key(self) -> str:
        return key_of("commit", self.round, subject(self.parent))

    @property
    def value(self) -> Value:
        return {"anchor": self.anchor, "binding": self.binding, "parent": self.parent}


@dataclass(frozen=True)
class AvailabilityVote:
    """The commits that a judge holds when it stops waiting, and the hash of the nonce that draws its batch.

    `absent` are those of this round's validators who judged the round before, which the parent ended, and of whom the
    author holds no cut of it: by their places in `ChainState.validators`, so that a cut has room for them.
    """

    round: int
    parent: bytes
    commits: tuple[bytes, ...]  # ids of records, ascending
    nonce_hash: bytes
    window: int  # ms that the judge proposes for the next round's training
    absent: tuple[int, ...] = ()  # ascending

    @property
    def key(self) -> str:
        return key_of("availability", self.round, subject(self.parent))

    @property
    def value(self) -> Value:
        return {
            "absent": self.absent,
            "commits": self.commits,
            "nonce_hash": self.nonce_hash,
            "parent": self.parent,
            "window": self.window,
        }


@dataclass(frozen=True)
class Reveal:
    """What opens a commit: the contribution is the shard `root`.

    `trace` is the root of the record of the work behind it, in runs with audits; the commit binds that as well.
    """

    round: int
    parent: bytes
    commit: bytes
    salt: bytes
    root: bytes
    size: int  # bytes of the contribution
    trace: bytes = b""

    @property
    def key(self) -> str:
        return key_of("reveal", self.round, subject(self.parent))

    @property
    def value(self) -> Value:
        value: dict[str, Value] = {
            "commit": self.commit,
            "parent": self.parent,
            "root": self.root,
            "salt": self.salt,
            "size": self.size,
        }
        return value | ({"trace": self.trace} if self.trace else {})


@dataclass(frozen=True)
class Seal:
    """The hash of the scores that follow."""

    round: int
    parent: bytes
    seal: bytes

    @property
    def key(self) -> str:
        return key_of("score", self.round, subject(self.parent) + "-seal")

    @property
    def value(self) -> Value:
        return {"parent": self.parent, "seal": self.seal}


@dataclass(frozen=True)
class Score:
    """One contribution as one judge found it."""

    commit: bytes  # the first PREFIX bytes of the commit's id
    found: int  # JUDGED, MISSING or MALFORMED
    gain: int  # held-out loss before minus after, in micro-bits per byte; 0 unless JUDGED
    standing: int = FULL_STANDING  # what the judge thinks of the author, in thousandths


@dataclass(frozen=True)
class Scores:
    """All that a judge found in a round. `nonce` opens the hash in its cut."""

    round: int
    parent: bytes
    nonce: bytes
    salt: bytes
    undo: int | None  # held-out loss now minus before the last roster, micro-bits per byte; None: not measured
    scores: tuple[Score, ...]  # ascending by commit

    @property
    def key(self) -> str:
        return key_of("score", self.round, subject(self.parent) + "-open")

    @property
    def value(self) -> Value:
        return {
            "nonce": self.nonce,
            "parent": self.parent,
            "salt": self.salt,
            "scores": tuple((s.commit, s.found, s.gain, s.standing) for s in self.scores),
            "undo": self.undo,
        }

    @property
    def seal(self) -> bytes:
        """What the judge signed before it opened its scores."""
        return hashlib.sha256(b"swarmnode/scores/1\0" + encoding.encode(self.value)).digest()


@dataclass(frozen=True)
class Entry:
    """What became of one commit."""

    commit: bytes  # id of the record
    verdict: int  # ACCEPTED or a reason for refusal; see VERDICTS
    weight: int  # of it in the mean, out of the roster's total; 0 unless accepted
    clip: int  # its values are scaled by clip / ONE; 0 unless accepted


@dataclass(frozen=True)
class Roster:
    """One link of the chain. All but the choice of quoted cuts and scores follows from these (`derive`)."""

    round: int
    parent: bytes  # id of the roster before, of the genesis, or of an empty roster
    attempt: int
    preimage: bytes  # next of the leader's hash chain; empty where it has registered none
    cuts: tuple[bytes, ...]  # ids of records, ascending
    scores: tuple[bytes, ...]  # ids of opened scores, ascending
    entries: tuple[Entry, ...]  # ascending by commit: the order in which contributions are added
    total: int  # weights are divided by this
    revert: bool  # go back to the state before the parent, and add nothing
    window: int  # ms of the next round's training
    state: bytes  # state hash at the parent: what this round trained from
    chain: bytes  # digest of the ChainState at the parent

    @property
    def key(self) -> str:
        return key_of("roster", self.round, f"{subject(self.parent)}-{self.attempt}")

    @property
    def value(self) -> Value:
        return {
            "attempt": self.attempt,
            "chain": self.chain,
            "cuts": self.cuts,
            "entries": tuple((e.commit, e.verdict, e.weight, e.clip) for e in self.entries),
            "parent": self.parent,
            "preimage": self.preimage,
            "revert": self.revert,
            "scores": self.scores,
            "state": self.state,
            "total": self.total,
            "window": self.window,
        }

    @property
    def accepted(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.verdict == ACCEPTED)


@dataclass(frozen=True)
class ForkChoiceVote:
    """The roster that a validator follows, which it holds with every byte and serves."""

    roster: bytes  # its id; that of an empty roster as well
    round: int  # rounds done: that of the roster plus one
    state: bytes  # state hash after the roster

    key = "vote"

    @property
    def value(self) -> Value:
        return {"roster": self.roster, "round": self.round, "state": self.state}


Statement = Commit | AvailabilityVote | Reveal | Seal | Scores | Roster | ForkChoiceVote
S = TypeVar("S", bound=Statement)


@dataclass(frozen=True)
class Said(Generic[S]):
    """A statement with who made it and the id of its record."""

    author: str
    id: bytes
    what: S


def subject(parent: bytes) -> str:
    """How a parent is named in keys."""
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
    """The statement of a record of one of the kinds above. Raises InvalidStatement."""
    reader = _READERS.get(record.kind)
    if reader is None:
        raise InvalidStatement(f"{record.key!r} is no statement of a round")
    value = record.value
    if not isinstance(value, Mapping):
        raise InvalidStatement(f"{record.key!r} has no fields")
    try:
        statement = reader(_round_of(record.key), value)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidStatement(f"{record.key!r}: {error}") from error
    if statement.key != record.key or statement.value != value:
        raise InvalidStatement(f"{record.key!r} is not the key of what it says, or says more")
    return Said(record.author, record.id, statement)


def _round_of(key: str) -> int:
    _, _, rest = key.partition("/")
    return int(rest[:8]) if rest else 0


def _bytes(value: Any, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        raise ValueError(f"{size} bytes expected")
    return value


def _integer(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"an integer from {low} to {high} expected")
    return value


def _ascending(values: Any, size: int, most: int) -> tuple[bytes, ...]:
    if not isinstance(values, tuple) or len(values) > most:
        raise ValueError(f"at most {most} ids expected")
    ids = tuple(_bytes(value, size) for value in values)
    if any(a >= b for a, b in pairwise(ids)):
        raise ValueError("ids are not in ascending order")
    return ids


def _places(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > MAX_JUDGES:
        raise ValueError(f"at most {MAX_JUDGES} places expected")
    places = tuple(_integer(value, 0, MAX_VALIDATORS - 1) for value in values)
    if any(a >= b for a, b in pairwise(places)):
        raise ValueError("places are not in ascending order")
    return places


def _commit(round: int, v: Mapping[str, Any]) -> Commit:
    return Commit(round, _bytes(v["parent"], HASH), _bytes(v["binding"], HASH), _bytes(v["anchor"], HASH))


def _availability_vote(round: int, v: Mapping[str, Any]) -> AvailabilityVote:
    commits = _ascending(v["commits"], HASH, MAX_COMMITS)
    return AvailabilityVote(
        round,
        _bytes(v["parent"], HASH),
        commits,
        _bytes(v["nonce_hash"], HASH),
        _integer(v["window"], 0, MAX_WINDOW),
        _places(v["absent"]),
    )


def _reveal(round: int, v: Mapping[str, Any]) -> Reveal:
    ids = (_bytes(v["parent"], HASH), _bytes(v["commit"], HASH))
    root, trace = _bytes(v["root"], HASH), _bytes(v["trace"], HASH) if "trace" in v else b""
    return Reveal(round, *ids, _bytes(v["salt"], SALT), root, _integer(v["size"], 1, MAX_SIZE), trace)


def _seal_or_scores(round: int, v: Mapping[str, Any]) -> Seal | Scores:
    parent = _bytes(v["parent"], HASH)
    if "seal" in v:
        return Seal(round, parent, _bytes(v["seal"], HASH))
    undo = v["undo"] if v["undo"] is None else _integer(v["undo"], -MAX_GAIN, MAX_GAIN)
    rows = v["scores"]
    if not isinstance(rows, tuple) or len(rows) > MAX_COMMITS:
        raise ValueError(f"at most {MAX_COMMITS} scores expected")
    scores = tuple(_score(*row) for row in rows)
    _ascending(tuple(score.commit for score in scores), PREFIX, MAX_COMMITS)
    return Scores(round, parent, _bytes(v["nonce"], HASH), _bytes(v["salt"], SALT), undo, scores)


def _score(commit: Any, found: Any, gain: Any, standing: Any) -> Score:
    found, gain = _integer(found, JUDGED, MALFORMED), _integer(gain, -MAX_GAIN, MAX_GAIN)
    if found != JUDGED and gain:
        raise ValueError("a gain of what was not judged")
    return Score(_bytes(commit, PREFIX), found, gain, _integer(standing, 0, FULL_STANDING))


def _roster(round: int, v: Mapping[str, Any]) -> Roster:
    rows = v["entries"]
    if not isinstance(rows, tuple) or len(rows) > MAX_COMMITS:
        raise ValueError("too many entries")
    entries = tuple(_entry(*row) for row in rows)
    _ascending(tuple(entry.commit for entry in entries), HASH, MAX_COMMITS)
    if not isinstance(v["revert"], bool):
        raise ValueError("revert is true or false")
    preimage = v["preimage"] if v["preimage"] == b"" else _bytes(v["preimage"], HASH)
    return Roster(
        round,
        _bytes(v["parent"], HASH),
        _integer(v["attempt"], 0, MAX_JUDGES),
        preimage,
        _ascending(v["cuts"], HASH, MAX_JUDGES),
        _ascending(v["scores"], HASH, MAX_JUDGES),
        entries,
        _integer(v["total"], 0, 1 << 53),
        v["revert"],
        _integer(v["window"], 0, MAX_WINDOW),
        _bytes(v["state"], HASH),
        _bytes(v["chain"], HASH),
    )


def _entry(commit: Any, verdict: Any, weight: Any, clip: Any) -> Entry:
    most = len(VERDICTS) - 1
    return Entry(_bytes(commit, HASH), _integer(verdict, 0, most), _integer(weight, 0, 1 << 40), _integer(clip, 0, ONE))


def _fork_choice_vote(round: int, v: Mapping[str, Any]) -> ForkChoiceVote:
    return ForkChoiceVote(_bytes(v["roster"], HASH), _integer(v["round"], 0, MAX_ROUND), _bytes(v["state"], HASH))


_READERS: dict[str, Callable[[int, Mapping[str, Any]], Statement]] = {
    "commit": _commit,
    "availability": _availability_vote,
    "reveal": _reveal,
    "score": _seal_or_scores,
    "roster": _roster,
    "vote": _fork_choice_vote,
}
