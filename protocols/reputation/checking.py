"""Whether an attestation agrees with the signed records that it names.

    check(attested, finding, works)        # CONFIRMED, CONTRADICTED or UNKNOWN

A contradicted one was not a mistake: who attests quotes a roster that says otherwise in front of everybody, so a node
that finds it out hears none of its author's attestations any more. What a roster does not settle stays UNKNOWN, and
counts for as much as its author.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from swarmnode.protocols.chain.statements import REFUSED_EQUIVOCATED, REFUSED_LATE, REFUSED_MALFORMED
from swarmnode.protocols.reputation.attestation import EVIDENCE, Attested, Finding, Saw
from swarmnode.protocols.reputation.chainwork import Judged, RoundWork


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
    if work is None:
        return Checked.UNKNOWN
    entries = [one for one in work.works if one.author == attested.what.subject]
    if not entries:
        return Checked.CONTRADICTED  # the roster does not know of any such work
    agrees = [_agrees(one, attested, finding) for one in entries]
    if None in agrees:
        return Checked.UNKNOWN
    return Checked.CONFIRMED if any(agrees) else Checked.CONTRADICTED


def contradicted(attested: Attested, works: Mapping[bytes, RoundWork]) -> bool:
    """Whether something that it says is disproved."""
    return any(check(attested, finding, works) is Checked.CONTRADICTED for finding in attested.what.found)


def _agrees(one: Judged, attested: Attested, finding: Finding) -> bool | None:
    """Whether the newest finding can be what that commit came to; None where the roster cannot tell."""
    if finding.saw is Saw.GAIN:
        gain = one.gains.get(attested.attester)
        if gain is None:
            return None
        return finding.good > 0 if gain > 0 else finding.bad > 0
    if finding.saw is Saw.FORM:
        malformed = one.verdict in (REFUSED_MALFORMED, REFUSED_EQUIVOCATED)
        return finding.bad > 0 if malformed else finding.good > 0
    if finding.saw is Saw.TIMELY:
        return finding.bad > 0 if one.verdict == REFUSED_LATE else finding.good > 0
    return None
