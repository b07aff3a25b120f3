"""What the records of the open round prove about everybody's work. Pure: whoever holds them computes the same.

    work = proved(chain, id, roster, quoted)           # the chain before a valid roster, and what the roster quotes
    accounts = after_roster(accounts, work, me=me)

Every quoted score is a signed statement with its evidence: the judge's nonce draws the batch, the contribution is a
shard, the state follows from the chain, so anyone can measure again. A roster says which of them counted (`derive.py`);
here they are read again, so that a judge's voice weighs as much as the work that was verified of it, and this node's
own measurement more than anybody's (`opinions.py`).

What became of a commit otherwise: bytes that no encoder makes, and two commits in one round, are offences. What came
too late, could not be retrieved or was not asked for says nothing: it happens to the honest, and earns nothing anyway.
Bytes that another revealed earlier count as no work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from swarmnode.protocols.chain.chainstate import ChainState
from swarmnode.protocols.chain.derive import UNITS, Quoted
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    JUDGED,
    PREFIX,
    REFUSED_DUPLICATE,
    REFUSED_EQUIVOCATED,
    REFUSED_MALFORMED,
    REFUSED_NO_GAIN,
    REFUSED_NO_STANDING,
    Roster,
)
from swarmnode.protocols.reputation.account import NEWCOMER, Account, after_conduct, after_work, weight
from swarmnode.protocols.reputation.opinions import OWN_AMONG_JUDGES, judge_voice, weighted_median

MEASURED = frozenset({ACCEPTED, REFUSED_NO_GAIN, REFUSED_NO_STANDING})
OFFENCES = {REFUSED_MALFORMED: 1.0, REFUSED_EQUIVOCATED: 2.0}


@dataclass(frozen=True)
class Judged:
    """One listed commit as the quoted judges found it."""

    author: str
    commit: bytes  # id of the record
    verdict: int  # see statements.VERDICTS
    elector: bool  # whether its author was one
    gains: Mapping[str, int]  # micro-bits per byte, by judge; its author's own word only where there is no other


@dataclass(frozen=True)
class RoundWork:
    """Everybody's work in one round."""

    round: int
    roster: bytes  # id of the record: what all this rests on
    works: tuple[Judged, ...]


def proved(chain: ChainState, id: bytes, roster: Roster, quoted: Quoted) -> RoundWork:
    """What a valid roster after `chain` says of its commits. Raises KeyError where a listed commit is not in it."""
    rows = {said.author: {score.commit: score for score in said.what.scores} for said in quoted.scores}
    works = []
    for entry in roster.entries:
        author = quoted.commits[entry.commit].author
        given = {judge: row.get(entry.commit[:PREFIX]) for judge, row in rows.items()}
        gains = {judge: score.gain for judge, score in given.items() if score is not None and score.found == JUDGED}
        others = {judge: gain for judge, gain in gains.items() if judge != author}
        works.append(Judged(author, entry.commit, entry.verdict, author in chain.electors, others or gains))
    return RoundWork(chain.round, id, tuple(works))


def relative_gains(work: RoundWork, voices: Mapping[str, float], *, me: str = "") -> dict[str, float]:
    """By author, what each contribution gained in units of the median gain of the round's work that helped, in [-1, 1].

    `voices` are the judges' weights, 0 for others; `me`: whose measurements are this node's own. What lies within
    the judges' noise is 0, and that much is taken from every gain: else doing nothing would pay by chance. Empty where
    nothing helped: a round in which nobody gains tells a bad round, not bad work.
    """
    found: dict[str, float] = {}
    doubts = []
    for one in work.works:
        if one.verdict == REFUSED_DUPLICATE:
            found.setdefault(one.author, 0.0)
        elif one.verdict in MEASURED:
            heard = _heard(one, voices, me)
            gain = weighted_median(heard)
            if gain is not None:
                found[one.author] = gain
                doubts.append(standard_error(heard, gain))
    noise = median(doubts) if doubts else 0.0
    found = {author: math.copysign(max(0.0, abs(gain) - noise), gain) for author, gain in found.items()}
    electors = {one.author for one in work.works if one.elector}
    helped = [gain for author, gain in found.items() if gain > 0 and author in electors]
    helped = helped or [gain for gain in found.values() if gain > 0]
    if not helped:
        return {}
    middle = median(helped)
    return {author: max(-1.0, min(1.0, gain / middle)) for author, gain in found.items()}


def standard_error(heard: Sequence[tuple[float, float]], middle: float) -> float:
    """Of a weighted median, from the (value, weight) pairs' own spread about it; 0 where fewer than three speak.

    Median absolute deviation, as liars may be among them: σ ≈ 1.4826 MAD, and √(π/2) σ/√n for the median of n.
    """
    spread = weighted_median((abs(value - middle), weight) for value, weight in heard) if len(heard) > 2 else None
    if spread is None:
        return 0.0
    total = sum(weight for _, weight in heard)
    count = total**2 / sum(weight**2 for _, weight in heard)  # Kish: as many equal voices
    return math.sqrt(math.pi / 2) * 1.4826 * spread / math.sqrt(count)


def _heard(one: Judged, voices: Mapping[str, float], me: str) -> list[tuple[float, float]]:
    others = [(float(gain), judge_voice(voices.get(judge, 0.0))) for judge, gain in one.gains.items() if judge != me]
    if me in one.gains:
        own = OWN_AMONG_JUDGES * sum(voice for _, voice in others) or 1.0
        others.append((float(one.gains[me]), own))
    return others


def after_roster(accounts: Mapping[str, Account], work: RoundWork, *, me: str = "") -> dict[str, Account]:
    """Everybody's account after one more round."""
    voices = {judge: weight(account, work.round) for judge, account in accounts.items()}
    after = dict(accounts)
    for author, gain in relative_gains(work, voices, me=me).items():
        after[author] = after_work(after.get(author, NEWCOMER), gain, round=work.round)
    for one in work.works:
        if bad := OFFENCES.get(one.verdict, 0.0):
            after[one.author] = after_conduct(after.get(one.author, NEWCOMER), bad=bad, round=work.round)
    return after


def at_joining(chain: ChainState) -> dict[str, Account]:
    """What a chain state alone tells who comes to it: the accepted work of the rosters that it remembers.

    Refusals are not in it, so who was refused begins as a newcomer here, and is seen for what it is in the next rounds.
    Rounds are counted back from the present one; empty ones among them are left out.
    """
    accounts: dict[str, Account] = {}
    first = max(0, chain.round - len(chain.history))
    for round, worked in enumerate(chain.history, first):
        for one in worked:
            gain = one.units / UNITS
            accounts[one.author] = after_work(accounts.get(one.author, NEWCOMER), gain, round=round)
    return accounts
