"""What the quoted records make of a round. The leader chooses which cuts and scores to quote; the rest follows here.

1. Every commit in more than a third of the quoted cuts is in the roster, accepted or refused with its reason.
2. Found by most judges, and with a median gain above the floor: accepted. A judge's word about itself counts only where
   fewer than IMPARTIAL judges are quoted. Of several who reveal the same bytes the lowest commit counts.
3. Weights are audited work: an accepted contribution counts as much as its gain, and no more than the median one, times
   the median of the judges' opinion of its author (`Score.standing`: the seam for reputation). Probationers together
   hold at most their share.
4. Clip factors bring every norm down to the median norm (SparseLoCo 2508.15706; METHODS, "Aggregation rules").
5. Where the median judge found that the last roster worsened the loss, the round goes back by it and adds nothing.

All of it is in integers, but for the norms, which every machine computes alike (`training.open_step.exact_norm`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median_low

from swarmnode.protocols.chain.chainstate import ChainRules, ChainState
from swarmnode.protocols.chain.electorate import participates, probation_share
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    FULL_STANDING,
    JUDGED,
    MALFORMED,
    ONE,
    PREFIX,
    REFUSED_DUPLICATE,
    REFUSED_EQUIVOCATED,
    REFUSED_MALFORMED,
    REFUSED_MISSING,
    REFUSED_NO_GAIN,
    REFUSED_NO_STANDING,
    REFUSED_REVERTED,
    REFUSED_UNINVITED,
    Commit,
    Cut,
    Entry,
    Reveal,
    Said,
    Score,
    Scores,
)

IMPARTIAL = 3  # judges from which on a judge's score of its own contribution does not count
UNITS = 1000  # of work: the median gain of a round, or more
SCALE = 1 << 10  # weights are units times this, so that shares of probationers can be fine
REVERT_EVERY = 8  # rounds between two reverts, at least


@dataclass(frozen=True)
class Quoted:
    """What a roster quotes, and what is needed to check it. Others' records may be in it: they are passed over."""

    cuts: tuple[Said[Cut], ...]
    scores: tuple[Said[Scores], ...]
    commits: Mapping[bytes, Said[Commit]]  # by id
    reveals: Mapping[bytes, Reveal]  # by id of the commit that each opens (`statements.opens` was asked)
    norms: Mapping[bytes, float]  # by id of the commit: of each contribution held here, finite


@dataclass(frozen=True)
class Derived:
    """What follows: the fields of a roster that its leader cannot choose."""

    entries: tuple[Entry, ...]
    total: int
    revert: bool
    window: int


class NotHeld(Exception):
    """Something that is needed to derive a round is not here: a commit, a reveal, or a contribution's norm."""

    def __init__(self, commit: bytes) -> None:
        super().__init__(f"commit {commit.hex()[:12]} or what it opens to is not held")
        self.commit = commit


def derive(chain: ChainState, rules: ChainRules, quoted: Quoted) -> Derived:
    """What the quoted cuts and scores make of this round. Raises NotHeld."""
    revert = _reverts(chain, rules, quoted.scores)
    listed = listed_commits(quoted.cuts)
    for id in listed:
        if id not in quoted.commits:
            raise NotHeld(id)
    per_author = Counter(quoted.commits[id].author for id in listed)
    verdicts: dict[bytes, int] = {}
    gains: dict[bytes, int] = {}
    standings: dict[bytes, int] = {}
    roots: set[bytes] = set()
    for id in listed:
        author = quoted.commits[id].author
        if revert:
            verdicts[id] = REFUSED_REVERTED
        elif per_author[author] > 1:
            verdicts[id] = REFUSED_EQUIVOCATED
        elif not participates(chain, author):
            verdicts[id] = REFUSED_UNINVITED
        else:
            given = _scores_of(id, author, quoted.scores)
            verdicts[id], gains[id], standings[id] = _judge(given, rules)
        if verdicts[id] == ACCEPTED:
            if id not in quoted.reveals:
                raise NotHeld(id)
            root = quoted.reveals[id].root
            if root in roots:
                verdicts[id] = REFUSED_DUPLICATE
            roots.add(root)
    accepted = [id for id in listed if verdicts[id] == ACCEPTED]
    for id in accepted:
        if id not in quoted.norms:
            raise NotHeld(id)
    weights, total = _weights(chain, accepted, gains, standings, quoted.commits)
    clips = dict(zip(accepted, clip_units([quoted.norms[id] for id in accepted]), strict=True))
    entries = tuple(Entry(id, verdicts[id], weights.get(id, 0), clips.get(id, 0)) for id in listed)
    return Derived(entries, total, revert, _next_window(chain, rules, quoted.cuts))


def listed_commits(cuts: Sequence[Said[Cut]]) -> tuple[bytes, ...]:
    """Ids of the commits that are in more than a third of these cuts, ascending."""
    count = Counter(id for cut in cuts for id in cut.what.commits)
    return tuple(sorted(id for id, times in count.items() if 3 * times > len(cuts)))


def clip_units(norms: Sequence[float]) -> list[int]:
    """floor(ONE · min(1, median / norm)) for finite norms; the median of an even number is the lower one. Exact."""
    if not norms:
        return []
    middle = median_low(norms)
    return [ONE if norm <= middle else int(ONE * Fraction(middle) / Fraction(norm)) for norm in norms]


def units_of(weight: int) -> int:
    """Audited work behind a weight, before probation."""
    return max(1, weight // SCALE)


def _scores_of(id: bytes, author: str, scores: Sequence[Said[Scores]]) -> list[Score]:
    """What the judges say of one commit; who says nothing of it did not find it."""
    impartial = len(scores) >= IMPARTIAL
    given = []
    for said in scores:
        if said.author == author and impartial:
            continue
        found = next((score for score in said.what.scores if score.commit == id[:PREFIX]), None)
        given.append(found if found is not None else Score(id[:PREFIX], 1, 0))
    return given


def _judge(given: Sequence[Score], rules: ChainRules) -> tuple[int, int, int]:
    """Verdict, median gain and median standing."""
    judged = [score for score in given if score.found == JUDGED]
    if 2 * len(judged) <= len(given):
        malformed = sum(score.found == MALFORMED for score in given)
        missing = len(given) - len(judged) - malformed
        return (REFUSED_MALFORMED if malformed > missing else REFUSED_MISSING), 0, 0
    gain = median_low(score.gain for score in judged)
    standing = median_low(score.standing for score in judged)
    if gain <= rules.gain_floor:
        return REFUSED_NO_GAIN, gain, standing
    return (ACCEPTED if standing else REFUSED_NO_STANDING), gain, standing


def _weights(
    chain: ChainState,
    accepted: Sequence[bytes],
    gains: Mapping[bytes, int],
    standings: Mapping[bytes, int],
    commits: Mapping[bytes, Said[Commit]],
) -> tuple[dict[bytes, int], int]:
    """Weight of each accepted commit, and what weights are divided by."""
    if not accepted:
        return {}, 0
    median = max(1, median_low(gains[id] for id in accepted))
    weights = {}
    for id in accepted:
        units = min(UNITS, max(1, UNITS * max(gains[id], 0) // median))
        weights[id] = max(1, units * SCALE * standings[id] // FULL_STANDING)
    trial = [id for id in accepted if commits[id].author not in chain.electors]
    on_trial = sum(weights[id] for id in trial)
    proven = sum(weights.values()) - on_trial
    share = probation_share(chain)
    if not proven:
        return weights, share * on_trial
    room = proven // (share - 1)
    if on_trial > room:
        weights.update({id: weights[id] * room // on_trial for id in trial})
    return weights, sum(weights.values())


def _reverts(chain: ChainState, rules: ChainRules, scores: Sequence[Said[Scores]]) -> bool:
    if not chain.undoable or (chain.reverted >= 0 and chain.round - chain.reverted < REVERT_EVERY):
        return False
    measured = [said.what.undo for said in scores if said.what.undo is not None]
    return 2 * len(measured) > len(scores) and median_low(measured) > rules.revert_above


def _next_window(chain: ChainState, rules: ChainRules, cuts: Sequence[Said[Cut]]) -> int:
    """The median of what the judges propose, at most twice the present window and at least half of it."""
    proposed = median_low(cut.what.window for cut in cuts)
    near = min(max(proposed, chain.window // 2), 2 * chain.window)
    return min(max(near, rules.shortest_window), rules.longest_window)
