"""Views: what the swarm knows, as folds over the elements of all authors.

Each takes elements that have not expired (`State.live`), in any order, and is a function of their set, so replicas with
equal states have equal views. Values are their authors' words: what does not have the form that a view reads is passed
over, and nothing is added up that one author could raise without limit.

    kind          key                          value
    member        member                       {"addresses": (text, …), "lasts": seconds}
    counter       counter/NAME                 integer, 0 to 2^53
    shard         shard/SHARD                  anything; to have the record is to serve the shard
    commit        commit/ROUND/ATTEMPT         anything
    attestation   attestation/ROUND/SUBJECT    {"score": number}
    evidence      evidence/KIND                -
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from swarmnode.crdt.elements import Element
from swarmnode.crdt.evidence import Evidence
from swarmnode.crdt.hlc import time_of
from swarmnode.crdt.kinds import KINDS, SECOND, kind_of
from swarmnode.crdt.record import Record

SHORTEST_LEASE = 60  # seconds
MAX_COUNT = 1 << 53  # of one author; sums stay integers for whoever reads them as floats


@dataclass(frozen=True)
class Member:
    """Somebody whose lease has not run out."""

    peer: str
    addresses: tuple[str, ...]
    renewed: int  # ms since the epoch, by the member's clock
    expiry: int  # ms; see `lease_end`


@dataclass(frozen=True)
class Counter:
    """What authors count under one name. Each adds to its own count only."""

    name: str
    by_author: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_author.values())


@dataclass(frozen=True)
class Place:
    """A row of the leaderboard."""

    subject: str
    score: float  # median over attesters
    attesters: int


def lease_end(record: Record) -> int:
    """The first ms at which a lease has run out: as long after it was signed as it says, and no later than its ttl.

    One that says nothing of the kind lasts SHORTEST_LEASE.
    """
    lasts = record.value.get("lasts") if isinstance(record.value, Mapping) else None
    seconds = lasts if isinstance(lasts, int) and not isinstance(lasts, bool) and lasts > 0 else SHORTEST_LEASE
    return min(record.expiry, time_of(record.hlc) + seconds * SECOND)


def members(elements: Iterable[Element], now: int) -> tuple[Member, ...]:
    """Everybody with a lease that has not run out at `now`, ms, in order of peer id."""
    found = []
    for record in _records(elements, "member"):
        match record.value:
            case {"addresses": (*addresses,)}:
                texts = tuple(a for a in addresses if isinstance(a, str))
                if (end := lease_end(record)) > now:
                    found.append(Member(record.author, texts, time_of(record.hlc), end))
    return tuple(sorted(found, key=lambda member: member.peer))


def counters(elements: Iterable[Element]) -> tuple[Counter, ...]:
    """All counters, in order of name. A count that its author no longer renews expires and is not in them."""
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for record in _records(elements, "counter"):
        count = record.value
        if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MAX_COUNT:
            counts[_after(record.key)][record.author] = count
    return tuple(Counter(name, dict(sorted(counts[name].items()))) for name in sorted(counts))


def leaderboard(elements: Iterable[Element]) -> tuple[Place, ...]:
    """Subjects by the median of their scores, the best first, then in order of subject.

    An attester has one score for a subject: that of its latest round; none for itself; and none at all where it
    equivocated about attestations. So while more than half of a subject's attesters are honest, its score lies
    between two honest ones. Who may attest is decided by admission.
    """
    every = tuple(elements)
    liars = {author for author, kinds in equivocators(every).items() if "attestation" in kinds}
    latest: dict[tuple[str, str], Record] = {}  # (subject, attester) -> its attestation of the latest round
    for record in _records(every, "attestation"):
        slot = (_after(_after(record.key)), record.author)
        standing = latest.get(slot)
        if record.author not in liars and slot[0] != record.author and _score(record) is not None:
            latest[slot] = record if standing is None else max(standing, record, key=lambda r: r.key)
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for (subject, _), record in latest.items():
        score = _score(record)
        assert score is not None
        scores[subject].append(score)
    places = (Place(subject, statistics.median(given), len(given)) for subject, given in scores.items())
    return tuple(sorted(places, key=lambda place: (-place.score, place.subject)))


def shards(elements: Iterable[Element]) -> dict[str, tuple[str, ...]]:
    """For each shard, in order of its id, who says that it serves it, in order of peer id."""
    holders: defaultdict[str, set[str]] = defaultdict(set)
    for record in _records(elements, "shard"):
        holders[_after(record.key)].add(record.author)
    return {shard: tuple(sorted(holders[shard])) for shard in sorted(holders)}


def commits(elements: Iterable[Element], round: int) -> dict[str, tuple[Record, ...]]:
    """What each author, in order of peer id, committed to in a round, in order of key and (hlc, id).

    Two under one key are an equivocation; which of them counts is for a roster to say, not for a view.
    """
    prefix = f"commit/{round:08d}/"
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for record in _records(elements, "commit"):
        if record.key.startswith(prefix):
            found[record.author].append(record)
    return {author: tuple(sorted(found[author], key=lambda r: (r.key, *r.order))) for author in sorted(found)}


def equivocators(elements: Iterable[Element]) -> dict[str, frozenset[str]]:
    """Who equivocated, in order of peer id, and about which kinds: by evidence, or by two records that stand."""
    guilty: defaultdict[str, set[str]] = defaultdict(set)
    said: set[tuple[str, str]] = set()  # (author, write-once key)
    for element in elements:
        if isinstance(element, Evidence):
            guilty[element.author].add(_after(element.key))
        elif (kind := KINDS.get(element.kind)) is not None and kind.write_once:
            if (element.author, element.key) in said:
                guilty[element.author].add(kind_of(element.key))
            said.add((element.author, element.key))
    return {author: frozenset(guilty[author]) for author in sorted(guilty)}


def _records(elements: Iterable[Element], kind: str) -> Iterator[Record]:
    """Records of a kind that say something."""
    for element in elements:
        if isinstance(element, Record) and element.kind == kind and not element.tombstone:
            yield element


def _after(key: str) -> str:
    """What follows the first "/" of a key."""
    return key.partition("/")[2]


def _score(record: Record) -> float | None:
    """The score in an attestation; None where there is none that can be ordered."""
    match record.value:
        case {"score": int() | float() as score} if not isinstance(score, bool) and math.isfinite(score):
            return float(score)
    return None
