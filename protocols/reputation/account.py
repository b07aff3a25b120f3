"""What one node has seen of one peer: how good its work is, how much of it was verified, and how it behaves.

All of it is pure. Work is measured relative to a round's median gain, in [-1, 1]: 0 is no work at all, below it harm.

- *rating*: an OpenSkill rating, from matches against the player that does nothing;
- *score*, 0 to 1: how sure it is that the peer's work is better than none, times how well it behaves. Nothing is known
  of a newcomer, which has 0, and nothing of a peer whose work is as good as none;
- *work*, 0 to 1: verified work in the last rounds in which it took part, as a moving mean. It is linear in what was
  verified and 1 at the most, so ten identities with a tenth of the work each have together what one would have. Gains
  and losses by chance cancel: a thousand identities that do nothing do not add up to somebody;
- *weight* = score × work.

Harm takes from what was earned (docs/reputation.md); rounds in which a peer takes no part count for nearly nothing
(ABSENT), so that an outage slashes nobody, and leaving does not reset what is bad.

The rating is the Plackett–Luce update of Weng & Lin (JMLR 12, 2011, algorithm 4) for two players, with OpenSkill's
numbers (25, 25/3, 25/6) and its γ = σ/c; tests hold it to the package `openskill`. Not all contributions of a round
play one game, as in Gauntlet (2505.21684): there ten identities that contribute rubbish lift an eleventh. The idle
player's skill is known, so the scale has a point that means something, and a swarm of liars cannot shift it. Floats of
two machines may differ in their last bits: a rating is one node's view, and no part of what all nodes compute alike.

How much a judge's voice weighs (`judge_voice`), and why: docs/reputation.md, "Where scores come from".

Bytes that no encoder makes, and two commits in one round, are violations. What came too late, could not be retrieved or
was not asked for says nothing. Bytes that another revealed earlier count as no work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from swarmnode.protocols.chain.rules import UNITS, Quoted
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import ACCEPTED, JUDGED, PREFIX, Refusal, Roster
from swarmnode.protocols.limits import Recent

MU, SIGMA = 25.0, 25.0 / 3  # of who was never seen
BETA = 25.0 / 6  # spread of one performance about the skill
TAU = 0.1  # what a skill may have moved since the match before, so that no rating is ever certain (Gauntlet)
KAPPA = 1e-4  # a variance never falls to less than this share of itself at once
IDLE_MU, IDLE_SIGMA = MU, 0.5  # of the player that does nothing; they never change


@dataclass(frozen=True)
class Rating:
    """A skill as a normal distribution."""

    mu: float = MU
    sigma: float = SIGMA


NEW = Rating()


def match(rating: Rating, points: float) -> Rating:
    """The rating after one more match against the idle player: 1 point where it was won, 0.5 drawn, 0 lost."""
    variance = rating.sigma**2 + TAU**2
    c = math.sqrt(variance + IDLE_SIGMA**2 + TAU**2 + 2 * BETA**2)
    p = 1.0 / (1.0 + math.exp((IDLE_MU - rating.mu) / c))  # of winning
    omega = points - p
    gamma = math.sqrt(variance) / c
    delta = gamma * variance / c**2 * p * (1.0 - p)
    return Rating(rating.mu + omega * variance / c, math.sqrt(variance * max(1.0 - delta, KAPPA)))


def better_than_idle(rating: Rating, *, sigmas: float = 0.0) -> float:
    """Probability that the peer's next work is better than none: Φ((μ − μ₀) / √(2β² + σ² + σ₀²)), in [0, 1].

    Doubt pulls it to 1/2. `sigmas`: ask this of a skill so many standard deviations beside the rating's.
    """
    apart = rating.mu + sigmas * rating.sigma - IDLE_MU
    spread = math.sqrt(2 * BETA**2 + rating.sigma**2 + IDLE_SIGMA**2)
    return 0.5 * (1.0 + math.erf(apart / (spread * math.sqrt(2.0))))


def unseen(rating: Rating, rounds: int) -> Rating:
    """A rating after so many rounds without a match: as good as before, less certain, never less than a newcomer's."""
    return Rating(rating.mu, min(SIGMA, math.sqrt(rating.sigma**2 + rounds * TAU**2)))


DECAY = 0.8  # of the moving mean of work, in a round in which the peer takes part: an honest newcomer has 0.89 after 10
ABSENT = 0.998  # of the same, in a round in which it does not: half in 346 rounds
SURE = 0.75  # probability of being better than idle at which the score is full; three matches won in a row
HARM_FROM, HARM_FULL = 0.1, 1.0  # relative harm from which on work is taken, and at which KEPT is left
KEPT = 0.25
TOLERATED = 4.0  # violations, decayed, that halve the score
VIOLATION_DECAY = 0.9  # of violations, in a round in which the peer takes part
CONTAINED_AFTER = 3  # rounds with harm in a row after which a peer without score is contained


@dataclass(frozen=True)
class Account:
    """One peer as one node saw it. Made by `after_work` and `after_violations`; the default is a newcomer."""

    rating: Rating = NEW
    earned: float = 0.0  # moving mean of what its work gained, -1 to 1, as of `last`
    violations: float = 0.0  # decayed, as of `last`
    rounds: int = 0  # in which work of this peer was looked at
    helped: int = 0  # of them, with a gain
    strikes: int = 0  # of them, in a row until now, with harm
    last: int = -1  # the round that was looked at last


NEWCOMER = Account()
MAX_PEERS = 4096  # that have an account; who was seen longest ago is forgotten first


def after_work(account: Account, gain: float, *, round: int) -> Account:
    """After a contribution that gained so much relative to the median of its round, in [-1, 1]."""
    now = _at(account, round)
    gain = max(-1.0, min(1.0, gain))
    points = 1.0 if gain > 0 else 0.0 if gain < 0 else 0.5
    harm = max(0.0, min(1.0, (-gain - HARM_FROM) / (HARM_FULL - HARM_FROM)))
    strikes = now.strikes + 1 if harm else 0
    earned = DECAY * now.earned + (1.0 - DECAY) * gain
    if earned > 0:
        earned *= 1.0 - min(1.0, harm * strikes**2) * (1.0 - KEPT)
    return replace(
        now,
        rating=match(now.rating, points),
        earned=earned,
        violations=now.violations * VIOLATION_DECAY,
        rounds=now.rounds + 1,
        helped=now.helped + (gain > 0),
        strikes=strikes,
        last=max(now.last, round),
    )


def after_violations(account: Account, *, bad: float, round: int) -> Account:
    """After so many violations: something malformed, a promise not kept, a state that does not follow the chain."""
    now = _at(account, round)
    return replace(now, violations=now.violations + max(0.0, bad), last=max(now.last, round))


def score(account: Account, *, sigmas: float = 0.0) -> float:
    """0 to 1; `sigmas`: of the rating beside it, for a range."""
    sure = better_than_idle(account.rating, sigmas=sigmas)
    return max(0.0, min(1.0, (sure - 0.5) / (SURE - 0.5))) * behaviour(account)


def behaviour(account: Account) -> float:
    """1 for who never offended, half after TOLERATED violations."""
    return TOLERATED / (TOLERATED + account.violations)


def work(account: Account, round: int) -> float:
    """Verified work, 0 to 1, as of `round`."""
    return max(0.0, _at(account, round).earned)


def weight(account: Account, round: int) -> float:
    """What the peer counts for at `round`, where 1 is somebody who always does as much as the median."""
    return score(account) * work(account, round)


def contained(account: Account) -> bool:
    """Whether the peer did harm for some rounds in a row and has no score left."""
    return account.strikes >= CONTAINED_AFTER and score(account) == 0.0


def _at(account: Account, round: int) -> Account:
    """The account as of `round`, before anything of that round."""
    missed = round - account.last - 1
    if account.last < 0 or missed <= 0:
        return account
    return replace(account, rating=unseen(account.rating, missed), earned=account.earned * ABSENT**missed)


OWN_AMONG_JUDGES = 0.5  # weight of a judge's own measurement of one round, as a share of that of all others together
FULL_VOICE = 0.5  # weight from which on a judge's voice is full
LEAST_VOICE = 0.05  # of a judge of whom no work was verified here: validators were, by the chain
MEASURED = frozenset({ACCEPTED, Refusal.HARMFUL, Refusal.NO_STANDING})
VIOLATIONS = {Refusal.MALFORMED: 1.0, Refusal.EQUIVOCATED: 2.0}


# --- what the records of an open run prove ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """One listed commit as the quoted judges found it."""

    author: str
    verdict: int  # see statements.VERDICTS
    validator: bool  # whether its author was one
    gains: Mapping[str, int]  # micro-bits per byte, by judge; its author's own word only where there is no other


@dataclass(frozen=True)
class RoundWork:
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
        works.append(Judged(author, entry.verdict, author in chain.validators, others or gains))
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
        if one.verdict == Refusal.DUPLICATE:
            found.setdefault(one.author, 0.0)
        elif one.verdict in MEASURED:
            heard = _weighed(one, voices, me)
            gain = weighted_median(heard)
            if gain is not None:
                found[one.author] = gain
                doubts.append(standard_error(heard, gain))
    noise = median(doubts) if doubts else 0.0
    found = {author: math.copysign(max(0.0, abs(gain) - noise), gain) for author, gain in found.items()}
    validators = {one.author for one in work.works if one.validator}
    helped = [gain for author, gain in found.items() if gain > 0 and author in validators]
    helped = helped or [gain for gain in found.values() if gain > 0]
    if not helped:
        return {}
    middle = median(helped)
    return {author: max(-1.0, min(1.0, gain / middle)) for author, gain in found.items()}


def judge_voice(weight: float) -> float:
    """How loud a judge of this weight is among the judges of a round, at most 1."""
    return max(LEAST_VOICE, min(1.0, weight / FULL_VOICE))


def weighted_median(voices: Iterable[tuple[float, float]]) -> float | None:
    """The value at which half of the weight is reached, from below; None where nobody has weight.

    Where exactly half is reached between two values, their mean.
    """
    heard = sorted((value, weight) for value, weight in voices if weight > 0)
    if not heard:
        return None
    half = sum(weight for _, weight in heard) / 2.0
    reached = 0.0
    for index, (value, weight) in enumerate(heard):
        reached += weight
        if reached > half * (1 + 1e-12):
            return value
        if reached >= half * (1 - 1e-12) and index + 1 < len(heard):
            return (value + heard[index + 1][0]) / 2.0
    return heard[-1][0]


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


def _weighed(one: Judged, voices: Mapping[str, float], me: str) -> list[tuple[float, float]]:
    others = [(float(gain), judge_voice(voices.get(judge, 0.0))) for judge, gain in one.gains.items() if judge != me]
    if me in one.gains:
        own = OWN_AMONG_JUDGES * sum(voice for _, voice in others) or 1.0
        others.append((float(one.gains[me]), own))
    return others


def after_roster(accounts: Mapping[str, Account], work: RoundWork, *, me: str = "") -> dict[str, Account]:
    voices = {judge: weight(account, work.round) for judge, account in accounts.items()}
    after = Recent[str, Account](MAX_PEERS)
    after.update(accounts)
    for author, gain in relative_gains(work, voices, me=me).items():
        after[author] = after_work(after.get(author, NEWCOMER), gain, round=work.round)
    for one in work.works:
        if bad := VIOLATIONS.get(one.verdict, 0.0):
            after[one.author] = after_violations(after.get(one.author, NEWCOMER), bad=bad, round=work.round)
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
            if one.units:
                gain = one.units / UNITS
                accounts[one.author] = after_work(accounts.get(one.author, NEWCOMER), gain, round=round)
    return accounts
