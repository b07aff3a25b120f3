"""What one node has seen of one peer: how good its work is, how much of it was verified, and how it behaves.

    account = after_work(Account(), 0.9, round=12)     # helped 0.9 times as much as the median contribution
    account = after_conduct(account, bad=1, round=12)  # sent something malformed
    score(account), work(account, 13), weight(account, 13)

Work is measured relative to a round's median gain, in [-1, 1]: 0 is no work at all, below it harm. Then

- *score*, 0 to 1: how sure it is that the peer's work is better than none, times how well it behaves. Nothing is known
  of a newcomer, which has 0, and nothing of a peer whose work is as good as none;
- *work*, 0 to 1: verified work in the last rounds in which it took part, as a moving mean. It is linear in what was
  verified and 1 at the most, so ten identities with a tenth of the work each have together what one would have. Gains
  and losses by chance cancel: a thousand identities that do nothing do not add up to somebody;
- *weight* = score × work.

Harm takes from what was earned: a contribution as harmful as others help leaves a quarter, and lesser harm takes ever
more while it goes on. So whoever works for the sake of one strike loses the weight of some rounds by it, and four
strikes in a row leave less than 1 %.

Rounds in which a peer takes no part count for nearly nothing (ABSENT): an outage slashes nobody, and leaving does not
reset what is bad.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarmnode.protocols.reputation.rating import NEW, Match, Rating, better_than_idle, match, unseen

DECAY = 0.8  # of the moving mean of work, in a round in which the peer takes part: an honest newcomer has 0.89 after 10
ABSENT = 0.998  # of the same, in a round in which it does not: half in 346 rounds
SURE = 0.75  # probability of being better than idle at which the score is full; three matches won in a row
HARM_FROM, HARM_FULL = 0.1, 1.0  # relative harm from which on work is taken, and at which KEPT is left
KEPT = 0.25
TOLERATED = 4.0  # offences, decayed, that halve the score
CONDUCT_DECAY = 0.9  # of offences, in a round in which the peer takes part
CONTAINED_AFTER = 3  # rounds with harm in a row after which a peer without score is contained


@dataclass(frozen=True)
class Account:
    """One peer as one node saw it. Made by `after_work` and `after_conduct`; the default is a newcomer."""

    rating: Rating = NEW
    earned: float = 0.0  # moving mean of what its work gained, -1 to 1, as of `last`
    offences: float = 0.0  # decayed, as of `last`
    rounds: int = 0  # in which work of this peer was looked at
    helped: int = 0  # of them, with a gain
    strikes: int = 0  # of them, in a row until now, with harm
    last: int = -1  # the round that was looked at last


NEWCOMER = Account()


def after_work(account: Account, gain: float, *, round: int) -> Account:
    """After a contribution that gained so much relative to the median of its round, in [-1, 1]."""
    now = _at(account, round)
    gain = max(-1.0, min(1.0, gain))
    outcome = Match.WON if gain > 0 else Match.LOST if gain < 0 else Match.DRAWN
    harm = max(0.0, min(1.0, (-gain - HARM_FROM) / (HARM_FULL - HARM_FROM)))
    strikes = now.strikes + 1 if harm else 0
    earned = DECAY * now.earned + (1.0 - DECAY) * gain
    if earned > 0:
        earned *= 1.0 - min(1.0, harm * strikes**2) * (1.0 - KEPT)
    return replace(
        now,
        rating=match(now.rating, outcome),
        earned=earned,
        offences=now.offences * CONDUCT_DECAY,
        rounds=now.rounds + 1,
        helped=now.helped + (gain > 0),
        strikes=strikes,
        last=max(now.last, round),
    )


def after_conduct(account: Account, *, bad: float, round: int) -> Account:
    """After so many offences: something malformed, a promise not kept, a state that does not follow from the chain."""
    now = _at(account, round)
    return replace(now, offences=now.offences + max(0.0, bad), last=max(now.last, round))


def score(account: Account, *, sigmas: float = 0.0) -> float:
    """0 to 1; `sigmas`: of the rating beside it, for a range."""
    sure = better_than_idle(account.rating, sigmas=sigmas)
    return max(0.0, min(1.0, (sure - 0.5) / (SURE - 0.5))) * conduct(account)


def conduct(account: Account) -> float:
    """1 for who never offended, half after TOLERATED offences."""
    return TOLERATED / (TOLERATED + account.offences)


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
