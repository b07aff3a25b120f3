"""A peer's standing as one node sees it: score with its uncertainty, weight, and the reasons. Pure.

Own observation first, others' words where it is short (`with_own`). A node hears who has verified work in its *own*
eyes, and nobody about itself; nobody at all who equivocated about attestations or whose attestations are disproved by
what they quote. Words fade: each HALF_LIFE halves them.

Words are weighed by weighted medians, with the speakers' own verified work as weight: where liars hold less than half
of it, the median lies between two honest values. One's own observation is one more voice, with as much weight as all
others together once FEW rounds were seen, twice that after twice as many.

Tests of whether a peer works on its own data (`methods/open/checks/unique.py`) say little one by one, so a node also
takes the words of those with verified work, each for its voice and at most HEARD tests, and the median (`of_own_data`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from swarmnode.protocols.reputation.account import (
    HARM_FROM,
    NEWCOMER,
    Account,
    behaviour,
    contained,
    score,
    weight,
    weighted_median,
    work,
)
from swarmnode.protocols.reputation.attestation import CHANCE, FULL, Attested
from swarmnode.training.options import number_of

FEW = 4.0  # rounds of own observation that weigh as much as all others' words together
DOUBT = 0.5  # weight of having seen nothing, in full voices: one weak voice convinces nobody


def with_own(own: float, rounds: int, others: Iterable[tuple[float, float]]) -> float:
    """What a node believes that saw `own` in so many rounds, and hears these (value, weight) pairs of others."""
    heard = [(value, weight) for value, weight in others if weight > 0]
    total = sum(weight for _, weight in heard)
    if not total:
        return own
    believed = weighted_median([*heard, (own, max(DOUBT, max(1.0, total) * rounds / FEW))])
    assert believed is not None  # somebody has weight
    return believed


ENOUGH = 12  # tests, of three voices at the least; before that nothing is taken
HEARD = 4  # of one voice
LATELY = 64  # of a peer's that a node remembers
LEAST = 0.5  # of the standing that is left to who passes by chance: some train honestly on text that nobody else has
BY_NONE, BY_ALL = 0.5, 0.65  # share passed by who does none of its work; from the other on nothing is taken


def of_own_data(tests: Iterable[tuple[int, int, float]]) -> float:
    """What share of its standing a peer keeps, from LEAST to all of it: where it works on its data, or little is known.

    `tests`: passed, failed, and the voice of who says so, 0 to 1.
    """
    told = [(good, good + bad, voice) for good, bad, voice in tests if good + bad and voice > 0]
    passed = weighted_median((good / count, voice * min(HEARD, count)) for good, count, voice in told)
    if passed is None or sum(min(HEARD, count) for _, count, _ in told) < ENOUGH:
        return 1.0
    shown = max(0.0, min(1.0, (passed - BY_NONE) / (BY_ALL - BY_NONE)))
    return LEAST + (1.0 - LEAST) * shown


HALF_LIFE = 86_400_000  # ms


@dataclass(frozen=True)
class Word:
    """What one attester says, and how much its voice weighs here."""

    attested: Attested
    voice: float

    @property
    def counts(self) -> bool:
        """Whether it is heard, and says how good the subject is: kept promises and single tests do not."""
        what = self.attested.what
        bad = any(finding.bad for finding in what.found if finding.saw not in CHANCE)
        return self.voice > 0 and (what.rounds > 0 or bad)


@dataclass(frozen=True)
class PeerScore:
    peer: str
    score: float  # 0 to 1
    low: float  # one standard deviation of the rating below …
    high: float  # … and above
    work: float  # verified, 0 to 1
    probation: bool  # nothing of it was verified yet
    contained: bool
    account: Account  # what was seen here
    words: tuple[Word, ...]  # the loudest first
    unheard: int  # attestations that count for nothing here

    @property
    def weight(self) -> float:
        return self.score * self.work


def standings(
    accounts: Mapping[str, Account],
    attested: Iterable[Attested] = (),
    *,
    me: str = "",
    round: int,
    now: int = 0,
    liars: Set[str] = frozenset(),
) -> dict[str, PeerScore]:
    """Everybody of whom something is known, in order of peer id.

    `attested`: what each attester said last of each subject, as `Ledger` keeps it. `liars` are not heard: who
    equivocated about attestations, and whom its evidence disproves (`disproved`). `now`: ms.
    """
    said: dict[str, list[Attested]] = {}
    for one in attested:
        said.setdefault(one.what.subject, []).append(one)
    silent = {me, *liars}
    voices = {peer: weight(account, round) for peer, account in accounts.items() if peer not in silent}
    found = {}
    for peer in sorted(set(accounts) | set(said)):
        about = [one for one in said.get(peer, ()) if one.attester != peer]
        words = [Word(it, voices.get(it.attester, 0.0) * math.exp2(-max(0, now - it.at) / HALF_LIFE)) for it in about]
        found[peer] = _standing(peer, accounts.get(peer, NEWCOMER), words, round)
    return found


def reasons(standing: PeerScore, *, unique: float = 1.0, owed: int = 0) -> tuple[str, ...]:
    """Why a peer stands where it does, for a person; the evidence itself is in `account` and `words`.

    `unique`: the share of its standing that tests of its work on its own data leave it (`of_own_data`); `owed`: audits
    that must hold up before it counts again.
    """
    own, lines = standing.account, []
    if own.rounds:
        lines.append(f"its work was looked at in {number_of(own.rounds, 'round')} and helped in {own.helped}")
    else:
        lines.append("no work of it was looked at here yet")
    if own.strikes and not owed:
        last = "its last contribution" if own.strikes == 1 else f"each of its last {own.strikes} contributions"
        lines.append(f"{last} did harm, more than {100 * HARM_FROM:.0f} % of what others' help")
    if own.violations > 0.05:
        lines.append(f"it broke rules: that takes {100 * (1 - behaviour(own)):.0f} % of its score")
    if owed:
        lines.append(f"it lied about its work: nothing of it counts here until {number_of(owed, 'audit')} held up")
    if unique < 1.0:
        lines.append(
            "its work is hardly better on the data it is to work on than on their like, as if it were not its own: "
            f"a judge here says {100 * unique:.0f} % of its standing"
        )
    heard = [word for word in standing.words if word.counts]
    if heard:
        outvoted = ", outvoted by what was seen here" if own.rounds >= FEW else ""
        lines.append(f"{number_of(len(heard), 'peer')} with verified work spoke for or against it{outvoted}")
    if standing.unheard:
        unheard = number_of(standing.unheard, "attestation")
        lines.append(f"{unheard} not heard: no work of who says so was verified here")
    if standing.contained and not owed:
        lines.append("it is contained: it did harm round after round and has no score left")
    elif standing.probation:
        lines.append("it is on probation until some of its work was verified")
    return tuple(lines)


def _standing(peer: str, own: Account, words: list[Word], round: int) -> PeerScore:
    heard = [word for word in words if word.counts]
    scores = [(word.attested.what.score / FULL, word.voice) for word in heard]
    middle = with_own(score(own), own.rounds, scores)
    apart = max(score(own, sigmas=1.0) - score(own, sigmas=-1.0), 0.0) / 2
    if not own.rounds and heard:
        apart = max(value for value, _ in scores) - min(value for value, _ in scores)
    vouched = with_own(0.0, 0, [(float(word.attested.what.rounds), word.voice) for word in heard])
    return PeerScore(
        peer,
        middle,
        max(0.0, middle - apart),
        min(1.0, middle + apart),
        with_own(work(own, round), own.rounds, [(word.attested.what.work / FULL, word.voice) for word in heard]),
        not own.helped and not vouched,
        contained(own),
        own,
        tuple(sorted(words, key=lambda word: (-word.voice, word.attested.attester))),
        sum(word.voice <= 0 for word in words),
    )
