"""What a node says of another in the replicated state: a score, and what it saw, each with what it rests on.

    key      attestation/ROUND/SUBJECT          round: of the attester; subject: a peer id
    value    {"score": 0..1000, "work": 0..1000, "rounds": n, "found": ((kind, good, bad, evidence), …)}

Write-once: who says two things of one peer in one round convicts itself. `evidence` is the first EVIDENCE bytes of the
id of what the newest finding of its kind rests on, or empty. How far a third party can check a finding:

    kind       what was seen                                          evidence          checked by
    gain       contributions measured on random held-out data         roster            its quoted scores, or measuring
    assigned   the same on data that the author was to work on        roster            measuring again
    audit      work replayed from its seed                            commit            replaying again
    sync       state hashes that follow from the chain, or do not     roster            the head's signature, replaying
    timely     commits that most judges had in time, or not           roster            its quoted cuts
    form       well-formed contributions, or malformed and double     roster            its verdict; the bytes
    proof      rollouts whose answers held up, or were refused        rollout group     scoring the group again
    kept       promised shards that could be had, or not              shard             nobody afterwards

`check` says whether one agrees with the signed records that it names. A contradicted one was not a mistake: who attests
quotes a roster that says otherwise in front of everybody, so a node that finds it out hears none of its author's
attestations any more. What a roster does not settle stays UNKNOWN, and counts for as much as its author.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import time_of
from swarmnode.crdt.kinds import key_of
from swarmnode.crdt.record import InvalidRecord, Record
from swarmnode.protocols.chain.statements import Refusal
from swarmnode.protocols.reputation.account import Judged, RoundWork

EVIDENCE = 16  # bytes of an id
FULL = 1000  # of score and work
MAX_COUNT = 1_000_000
MAX_FINDINGS = 6  # more do not fit beside two peer ids and a run id


class Saw(Enum):
    """What a finding is about. The values are on the wire."""

    GAIN = 0
    ASSIGNED = 1
    AUDIT = 2
    SYNC = 3
    TIMELY = 4
    FORM = 5
    PROOF = 6
    KEPT = 7

    @property
    def word(self) -> str:
        return self.name.lower()


CHANCE = frozenset({Saw.ASSIGNED})  # of which a single finding says nothing, good or bad


@dataclass(frozen=True)
class Finding:
    """So often good and so often bad, lately; `evidence` of the newest."""

    saw: Saw
    good: int
    bad: int
    evidence: bytes = b""


@dataclass(frozen=True)
class Attestation:
    round: int
    subject: str
    score: int  # thousandths
    work: int  # thousandths
    rounds: int  # of the subject's work that the attester looked at
    found: tuple[Finding, ...] = ()

    @property
    def key(self) -> str:
        return key_of("attestation", self.round, self.subject)

    @property
    def value(self) -> Value:
        return {
            "found": tuple((f.saw.value, f.good, f.bad, f.evidence) for f in self.found),
            "rounds": self.rounds,
            "score": self.score,
            "work": self.work,
        }


@dataclass(frozen=True)
class Attested:
    attester: str
    id: bytes
    at: int  # ms since the epoch, by the attester's clock
    what: Attestation


def read(record: Record) -> Attested:
    """The attestation in a record of that kind. Raises InvalidRecord."""
    if record.kind != "attestation" or not isinstance(record.value, Mapping):
        raise InvalidRecord(f"{record.key!r} is no attestation")
    _, _, moment = record.key.partition("/")
    round, _, subject = moment.partition("/")
    try:
        what = _parse(int(round), subject, record.value)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRecord(f"{record.key!r}: {error}") from error
    if what.key != record.key or what.value != record.value:
        raise InvalidRecord(f"{record.key!r} is not the key of what it says, or says more")
    if subject == record.author:
        raise InvalidRecord(f"{record.author} attests its own work")
    return Attested(record.author, record.id, time_of(record.hlc), what)


def _parse(round: int, subject: str, value: Mapping[str, Any]) -> Attestation:
    rows = value["found"]
    found = tuple(Finding(Saw(saw), good, bad, evidence) for saw, good, bad, evidence in rows)
    what = Attestation(round, subject, value["score"], value["work"], value["rounds"], found)
    numbers = [(what.score, FULL), (what.work, FULL), (what.rounds, MAX_COUNT)]
    numbers += [(number, MAX_COUNT) for row in rows for number in row[:3]]
    if any(type(number) is not int or not 0 <= number <= most for number, most in numbers):  # nor is a bool a number
        raise ValueError(f"a number lies beyond 0 to {FULL}, or {MAX_COUNT}")
    if any(type(one.evidence) is not bytes or len(one.evidence) not in (0, EVIDENCE) for one in found):
        raise ValueError(f"evidence has {EVIDENCE} bytes, or none")
    if len(found) > MAX_FINDINGS or len({one.saw for one in found}) != len(found):
        raise ValueError(f"more than {MAX_FINDINGS} findings, or two of one kind")
    return what


IN_ROSTERS = (Saw.GAIN, Saw.FORM, Saw.TIMELY)  # of what else was seen a roster lists nothing


class Checked(Enum):
    CONFIRMED = "confirmed"
    CONTRADICTED = "contradicted"
    UNKNOWN = "unknown"


def named(works: Iterable[RoundWork]) -> dict[bytes, RoundWork]:
    """Rounds by what attestations name them by."""
    return {work.roster[:EVIDENCE]: work for work in works}


def check(attested: Attested, finding: Finding, works: Mapping[bytes, RoundWork]) -> Checked:
    """Compare one finding with the round that is its evidence, where that is among `works`."""
    work = works.get(finding.evidence)
    if work is None or finding.saw not in IN_ROSTERS:
        return Checked.UNKNOWN
    entries = [one for one in work.works if one.author == attested.what.subject]
    if not entries:
        return Checked.CONTRADICTED  # the roster does not know of any such work
    agrees = [_agrees(one, attested, finding) for one in entries]
    if None in agrees:
        return Checked.UNKNOWN
    return Checked.CONFIRMED if any(agrees) else Checked.CONTRADICTED


def disproved(attested: Iterable[Attested], works: Iterable[RoundWork]) -> frozenset[str]:
    """Whose attestations these rounds contradict."""
    rounds = named(works)
    return frozenset(
        one.attester
        for one in attested
        if any(check(one, finding, rounds) is Checked.CONTRADICTED for finding in one.what.found)
    )


def _agrees(one: Judged, attested: Attested, finding: Finding) -> bool | None:
    """Whether the newest finding can be what that commit came to; None where the roster cannot tell."""
    if finding.saw is Saw.GAIN:
        gain = one.gains.get(attested.attester)
        if gain is None:
            return None
        was_good = gain > 0
    elif finding.saw is Saw.FORM:
        was_good = one.verdict not in (Refusal.MALFORMED, Refusal.EQUIVOCATED)
    else:
        was_good = one.verdict != Refusal.LATE
    return (finding.good if was_good else finding.bad) > 0
