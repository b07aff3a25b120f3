"""What a round came to by the records that a roster quotes, and whether its leader may have made that roster.

    derived = derive(chain, rules, quoted)                                 once for each roster, by leader and follower
    roster  = compose(chain, quoted, derived, attempt=..., ...)            the leader
    derived = check(chain, rules, roster, quoted, state=...)               whoever follows
    chain   = advance(chain, rules, roster, quoted, derived)               the chain after it

A roster is valid for a chain or it is not, whatever the clock says and whoever asks: `check` needs only what the roster
quotes. That all nodes which hold the same things agree about it is what the open round rests on. The leader chooses
which cuts and scores to quote; the rest follows here:

1. Every commit in more than a third of the quoted cuts is in the roster, accepted or refused with its reason; of more
   than MAX_COMMITS those in most cuts.
2. Accepted is what a *quorum of the judges* retrieved and what is not seen to do harm. A judge says what share of the
   gain of the whole step is a contribution's (`methods/open/judge.py`). The median of the judges counts. Its standard
   error s follows from how far they lie apart, or where few judge, from how far they lie apart usually. Weight falls
   from 1 at a harm of s to a tenth at 3 s. Refused is only what harms by more than 4 s and is an outlier among the
   other validators' contributions as well, or of which none harms by more than its own s. A judge's word about its own
   contribution counts for nothing; only where it is the one judge, it is believed.
3. Accepted is only what a quorum of judges cut. Judges cut before anything is revealed, so whoever copies what was
   revealed comes too late, whichever cuts a leader quotes. Of several who reveal the same bytes nonetheless, the one in
   most cuts counts, then the lower id. Who committed twice is refused.
4. That weight is multiplied with the judges' opinion of the author (`Score.standing`: the seam for reputation).
   Probationers together hold at most their share; nothing that an author says of itself is read.
5. Clip factors bring norms down to CLIP_AT times the usual norm, which is the median (SparseLoCo 2508.15706 clips to
   the median itself). Both medians are those of the validators' contributions, where any is accepted. The usual norm
   lies between three quarters of and twice the median of those of the last sixteen rosters.
6. Where a quorum measured that the last roster worsened the loss, the round goes back by it and adds nothing.
7. The next window is the median of the quoted proposals; who is not quoted proposes the present one.

All of it is in integers, but for the norms, which every machine computes alike (`training.open_step.norm_of`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from statistics import median_low

from swarmnode.protocols.chain.state import (
    EVERYBODY,
    MILLION,
    REMEMBERED,
    SMALL,
    SUCCESSION,
    ChainRules,
    ChainState,
    Worked,
    disproved,
    judges,
    leaders,
    majority,
    next_participation,
    next_silent,
    participates,
    quorum,
    reseated,
    step,
    successors,
    without,
)
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    FULL_STANDING,
    JUDGED,
    MALFORMED,
    MAX_COMMITS,
    PREFIX,
    AvailabilityVote,
    Commit,
    Entry,
    Refusal,
    Reveal,
    Roster,
    Said,
    Score,
    Scores,
    nonce_hash,
    opens,
)
from swarmnode.training.open_step import clip_units, median_norm

UNITS = 1000  # of work that is not seen to do harm …
LEAST_UNITS = 100  # … and of work that harms by 3 standard errors or more, but is not refused
# millionths: (1.2533 * 1.4826)^2, the variance of a median of n normal values times n, by their MAD^2
MEDIAN_ERROR = 3_452_714
NORMAL_MAD = 2_198_103  # millionths: 1.4826^2, the variance of normal values by their MAD^2
FEW_JUDGES = 4  # may be close to one another by chance: as far apart as over other contributions they are taken for
HARMFUL = 4  # standard errors of harm from which on an outlier is refused
OUTLIER = 3  # deviations from the median of the other contributions that make an outlier
SCALE = 1 << 10  # weights are units times this, so that shares of probationers can be fine
PROBATION = 125_000  # millionths of a roster's weight that all who are no validators hold together …
PROBATION_SMALL = 500_000  # … and while there are fewer than SMALL validators
REVERT_EVERY = 8  # rounds from one revert to the next
NORMS = 16  # rosters that bound the usual norm of the next one, by which it clips …
NORMS_LEAST = 4  # … where there are so many
NORM_GROWTH = 2  # times the median of theirs at the most …
NORM_FALL = 750_000  # … and at least these millionths of it


@dataclass(frozen=True)
class Quoted:
    """What a roster quotes, and what is needed to check it. Others' records may be in it: they are passed over."""

    cuts: tuple[Said[AvailabilityVote], ...]
    scores: tuple[Said[Scores], ...]
    commits: Mapping[bytes, Said[Commit]]  # by id
    reveals: Mapping[bytes, Reveal]  # by id of the commit; one that does not open it counts as not held
    norms: Mapping[bytes, float]  # by id of the commit: of each contribution held here, finite


@dataclass(frozen=True)
class Derived:
    """What follows: the fields of a roster that its leader cannot choose, and the work behind them."""

    entries: tuple[Entry, ...]
    total: int
    revert: bool
    window: int
    worked: tuple[Worked, ...]  # by author: delivered work, before standing and probation
    norm: float  # the usual one, CLIP_AT times which all are clipped to; 0: nothing was accepted that moves anything


class NotHeld(Exception):
    """Something that is needed to derive a round is not here: a commit, a reveal, or a contribution's norm."""

    def __init__(self, commit: bytes) -> None:
        super().__init__(f"commit {commit.hex()[:12]} or what it opens to is not held")
        self.commit = commit


@dataclass(frozen=True)
class _Verdict:
    """What the judges make of one commit."""

    verdict: int
    gains: tuple[int, ...] = ()  # as each judge measured it, micro-bits per byte
    standing: int = 0


def derive(chain: ChainState, rules: ChainRules, quoted: Quoted) -> Derived:
    """What the quoted cuts and scores make of this round. Raises NotHeld."""
    revert, needed = _reverts(chain, rules, quoted.scores), quorum(chain)
    times = _times_cut(quoted.cuts)
    listed = listed_commits(quoted.cuts)
    for id in listed:
        if id not in quoted.commits:
            raise NotHeld(id)
    per_author = Counter(quoted.commits[id].author for id in listed)
    rows = {said.author: {score.commit: score for score in said.what.scores} for said in quoted.scores}
    found: dict[bytes, _Verdict] = {}
    for id in listed:
        author, commit = quoted.commits[id].author, quoted.commits[id].what
        if (commit.round, commit.parent) != (chain.round, chain.tip):
            found[id] = _Verdict(Refusal.FOREIGN)
        elif revert:
            found[id] = _Verdict(Refusal.REVERTED)
        elif per_author[author] > 1:
            found[id] = _Verdict(Refusal.EQUIVOCATED)
        elif not participates(chain, author):
            found[id] = _Verdict(Refusal.UNINVITED)
        elif times[id] < needed:
            found[id] = _Verdict(Refusal.LATE)
        else:
            found[id] = _judge(chain, id, author, rows)
    solid = [id for id in listed if found[id].gains and quoted.commits[id].author in chain.validators]
    units = work_units({id: found[id].gains for id in listed if found[id].gains}, solid)
    found.update({id: _Verdict(Refusal.HARMFUL) for id in units if not units[id]})
    roots: set[bytes] = set()
    for id in sorted((id for id in listed if found[id].verdict == ACCEPTED), key=lambda id: (-times[id], id)):
        reveal = quoted.reveals.get(id)
        if reveal is None or not opens(reveal, quoted.commits[id], chain.run_id):
            raise NotHeld(id)
        if reveal.root in roots:
            found[id] = _Verdict(Refusal.DUPLICATE)
        roots.add(reveal.root)
    accepted = [id for id in listed if found[id].verdict == ACCEPTED]
    for id in accepted:
        if id not in quoted.norms:
            raise NotHeld(id)
    proven = [id for id in accepted if quoted.commits[id].author in chain.validators]
    share = PROBATION_SMALL if len(chain.validators) < SMALL else PROBATION
    weights, total = _weights(found, {id: units[id] for id in accepted}, set(proven), share)
    norm = _near(median_norm([quoted.norms[id] for id in proven or accepted]), chain)
    clips = dict(zip(accepted, clip_units([quoted.norms[id] for id in accepted], norm), strict=True))
    entries = tuple(Entry(id, found[id].verdict, weights.get(id, 0), clips.get(id, 0)) for id in listed)
    delivered = [id for id in listed if found[id].verdict in (ACCEPTED, Refusal.HARMFUL)]
    worked = sorted((Worked(quoted.commits[id].author, units[id]) for id in delivered), key=lambda one: one.author)
    return Derived(entries, total, revert, _next_window(chain, rules, quoted.cuts), tuple(worked), norm)


def longest_norm(chain: ChainState) -> float:
    """What a roster of this round clips to at the most; infinite while too few rosters tell."""
    return _near(math.inf, chain)


def _near(norm: float, chain: ChainState) -> float:
    """The usual norm of this round, near those of the last rosters; `norm` itself while too few tell.

    It is compared with the median of theirs, the upper of two in the middle. Where norms grow evenly from nothing, as
    with a warm-up of the learning rate, that is half of the present norm or more, which twice the median lets in.
    """
    known = sorted(before for before in chain.norms if before > 0)
    if len(known) < NORMS_LEAST or not norm:
        return norm
    middle = known[len(known) // 2]
    return min(max(norm, middle * NORM_FALL / MILLION), middle * NORM_GROWTH)


def listed_commits(cuts: Sequence[Said[AvailabilityVote]]) -> tuple[bytes, ...]:
    """Ids of the commits that are in more than a third of these cuts, ascending; of too many those in most of them."""
    times = _times_cut(cuts)
    enough = sorted((id for id, count in times.items() if 3 * count > len(cuts)), key=lambda id: (-times[id], id))
    return tuple(sorted(enough[:MAX_COMMITS]))


def _times_cut(cuts: Sequence[Said[AvailabilityVote]]) -> Counter[bytes]:
    return Counter(id for cut in cuts for id in cut.what.commits)


def _judge(chain: ChainState, id: bytes, author: str, rows: Mapping[str, Mapping[bytes, Score]]) -> _Verdict:
    needed, others = quorum(chain), {peer: row for peer, row in rows.items() if peer != author}
    if author in judges(chain):
        needed -= 1
        if not needed:  # it is the one judge, or all others have long been silent
            needed, others = 1, dict(rows)
    given = [row.get(id[:PREFIX]) for row in others.values()]
    judged = [score for score in given if score is not None and score.found == JUDGED]
    if len(judged) < needed:
        malformed = sum(score is not None and score.found == MALFORMED for score in given)
        return _Verdict(Refusal.MALFORMED if 2 * malformed > len(given) - len(judged) else Refusal.MISSING)
    standing = _vouched((score.standing for score in judged), needed)
    gains = tuple(score.gain for score in judged)
    return _Verdict(ACCEPTED, gains, standing) if standing else _Verdict(Refusal.NO_STANDING)


def _vouched(values: Iterable[int], needed: int) -> int:
    """The most that `needed` of these say, at least; there are as many."""
    return sorted(values, reverse=True)[needed - 1]


def work_units(gains: Mapping[bytes, Sequence[int]], solid: Sequence[bytes]) -> dict[bytes, int]:
    """Work of each contribution by what judges measured of it: UNITS, less for likely harm, 0 for what is refused.

    `solid`: those by which outliers are told, where there are any.
    """
    gain = {id: _median(values) for id, values in gains.items()}
    apart = {id: _median(abs(value - gain[id]) for value in values) for id, values in gains.items()}
    if not gains:
        return {}
    usual = _median(apart[id] for id in solid or gains)
    variance = {}
    for id, values in gains.items():
        least = usual * FEW_JUDGES // max(FEW_JUDGES, len(values))
        variance[id] = MEDIAN_ERROR * max(apart[id], least) ** 2 // (MILLION * len(values))
    units = {}
    for id in gains:
        harm, error = max(0, -gain[id]), isqrt(variance[id])
        excess = min(max(0, harm - error), 2 * error) if error else harm
        units[id] = UNITS - (UNITS - LEAST_UNITS) * excess // max(1, 2 * error if error else excess)
        others = [other for other in solid or gains if other != id]
        if harm > HARMFUL * error and (
            all(-gain[other] <= isqrt(variance[other]) for other in others)  # however far those that help lie apart
            or _is_outlier(gain[id], [gain[other] for other in others], variance[id])
        ):
            units[id] = 0
    return units


def _is_outlier(gain: int, others: Sequence[int], variance: int) -> bool:
    """Whether a gain of this variance lies below those of the others; of fewer than three nothing can be told."""
    if len(others) < SMALL - 1:
        return True
    middle = _median(others)
    spread = NORMAL_MAD * _median(abs(other - middle) for other in others) ** 2 // MILLION
    return middle - gain > OUTLIER * isqrt(spread + variance)


def _median(values: Iterable[int]) -> int:
    """Of an even count the mean of the two in the middle, rounded down."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def _weights(
    found: Mapping[bytes, _Verdict], units: Mapping[bytes, int], proven: set[bytes], share: int
) -> tuple[dict[bytes, int], int]:
    """Weight of each accepted commit, and what weights are divided by. `share`: millionths, of all not `proven`."""
    weights = {id: max(1, work * SCALE * found[id].standing // FULL_STANDING) for id, work in units.items()}
    solid = sum(weights[id] for id in proven)
    on_trial = sum(weights.values()) - solid
    if not proven:
        # Rounded up, so that their share is never more; where it is nothing, nobody's work counts.
        return (weights, -(-on_trial * MILLION // share)) if share else (dict.fromkeys(weights, 0), int(bool(weights)))
    room = solid * share // (MILLION - share) if share < MILLION else on_trial
    if on_trial > room:
        weights.update({id: weight * room // on_trial for id, weight in weights.items() if id not in proven})
    return weights, sum(weights.values())


def _reverts(chain: ChainState, rules: ChainRules, scores: Sequence[Said[Scores]]) -> bool:
    """Whether a quorum measured that the last roster did harm, and a revert is permitted."""
    if not chain.undoable or (chain.reverted >= 0 and chain.round - chain.reverted < REVERT_EVERY):
        return False
    harmed = sum(said.what.undo is not None and said.what.undo > rules.revert_above for said in scores)
    return harmed >= quorum(chain)


def _next_window(chain: ChainState, rules: ChainRules, cuts: Sequence[Said[AvailabilityVote]]) -> int:
    """The median proposal, at most twice the present window and at least half of it."""
    proposed = [cut.what.window for cut in cuts]
    silent = max(0, 2 * quorum(chain) - 1 - len(proposed))
    middle = median_low([*proposed, *[chain.window] * silent])
    near = min(max(middle, chain.window // 2), 2 * chain.window)
    return min(max(near, rules.shortest_window), rules.longest_window)


class InvalidRoster(ValueError):
    """A roster that breaks a rule of the chain. The message says which."""


def empty_id(chain: ChainState) -> bytes:
    """The id of the empty roster of this round, which everyone derives alike."""
    return empty_id_after(chain.round, chain.tip)


def empty_id_after(round: int, parent: bytes) -> bytes:
    """The id of the empty roster that ends `round` after `parent`."""
    return hashlib.sha256(b"swarmnode/empty/1\0" + round.to_bytes(8, "big") + parent).digest()


def compose(
    chain: ChainState, quoted: Quoted, derived: Derived, *, attempt: int, preimage: bytes, state: bytes
) -> Roster:
    """The roster that the leader of `attempt` makes of these cuts and scores, and of what `derive` made of them."""
    cuts, scores = (tuple(sorted(said.id for said in told)) for told in (quoted.cuts, quoted.scores))
    found = derived.entries, derived.total, derived.revert, derived.window
    return Roster(chain.round, chain.tip, attempt, preimage, cuts, scores, *found, state, chain.digest)


def check(
    chain: ChainState,
    rules: ChainRules,
    roster: Said[Roster],
    quoted: Quoted,
    *,
    state: bytes,
    derived: Derived | None = None,
) -> Derived:
    """What a roster came to. Raises InvalidRoster where a rule is broken, or NotHeld where that cannot be told.

    `quoted` has exactly the cuts and scores that the roster quotes; `state` is the state hash at its parent. `derived`:
    what `derive` makes of these quotes, where this node did that before.
    """
    made = roster.what
    check_quotes(chain, roster, quoted)
    if made.state != state or made.chain != chain.digest:
        raise InvalidRoster("its leader derived another state from the same chain")
    derived = derived or derive(chain, rules, quoted)
    check_derived(made, derived)
    return derived


def check_derived(made: Roster, derived: Derived) -> None:
    """Raises InvalidRoster unless a roster says what follows from its quotes."""
    if any(getattr(made, name) != getattr(derived, name) for name in ("entries", "total", "revert", "window")):
        raise InvalidRoster("its entries are not what the quoted cuts and scores make of the round")


def check_quotes(chain: ChainState, roster: Said[Roster], quoted: Quoted) -> None:
    """Raises InvalidRoster unless a roster builds on this chain, is its leader's, and quotes enough of the judges."""
    made = roster.what
    if (made.round, made.parent) != (chain.round, chain.tip):
        raise InvalidRoster("it does not build on this chain")
    order = leaders(chain)
    if made.attempt >= len(order) or order[made.attempt] != roster.author:
        raise InvalidRoster(f"attempt {made.attempt} belongs to another leader")
    _check_preimage(chain, roster.author, made.preimage)
    needed, may_judge = quorum(chain), set(judges(chain))
    for name, ids, said in (("cuts", made.cuts, quoted.cuts), ("scores", made.scores, quoted.scores)):
        if tuple(sorted(one.id for one in said)) != ids:
            raise InvalidRoster(f"other {name} are here than it quotes")
        authors = {one.author for one in said}
        if len(authors) != len(said) or not authors <= may_judge:
            raise InvalidRoster(f"its {name} are not by different judges of the round")
        if len(said) < needed:
            raise InvalidRoster(f"it quotes {len(said)} {name}; at least {needed} are needed")
        if any((one.what.round, one.what.parent) != (chain.round, chain.tip) for one in said):
            raise InvalidRoster(f"its {name} are of another round")
    nonces = {cut.author: cut.what.nonce_hash for cut in quoted.cuts}
    for scores in quoted.scores:
        if nonces.get(scores.author) != nonce_hash(scores.what.nonce):
            raise InvalidRoster(f"{scores.author} scored without a quoted cut, or with another nonce than it said")


def advance(chain: ChainState, rules: ChainRules, said: Said[Roster], quoted: Quoted, derived: Derived) -> ChainState:
    """The chain after a valid roster, which came to what `check` gave back."""
    roster, worked = said.what, derived.worked
    before = chain.history[:-1] if roster.revert else chain.history  # what was undone earned nobody anything …
    norms = chain.norms[:-1] if roster.revert else chain.norms  # … and says nothing of how far steps go
    if roster.accepted:
        norms = (*norms, derived.norm)[-NORMS:]
    anchors = dict(chain.anchors)
    if roster.preimage:
        anchors[leaders(chain)[roster.attempt]] = roster.preimage
    authors = [quoted.commits[entry.commit].author for entry in roster.entries]
    for author, entry in zip(authors, roster.entries, strict=True):
        anchors.setdefault(author, quoted.commits[entry.commit].what.anchor)
    strangers = [author for author in authors if author not in chain.validators]
    after = replace(
        chain,
        round=chain.round + 1,
        tip=said.id,
        seed=_next_seed(chain, roster.preimage),
        made=chain.made + 1,
        history=(*before, worked)[-REMEMBERED:],
        participation=next_participation(chain, rules, strangers),
        empties=0 if len(roster.scores) >= majority(chain) else chain.empties,
        reverted=chain.round if roster.revert else chain.reverted,
        undoable=bool(roster.accepted),
        window=roster.window,
        norms=norms,
    )
    after = without(after, disproved(chain, quoted.cuts))
    after = reseated(replace(after, silent=next_silent(chain, quoted.cuts)), rules)
    known = {one.author for worked in after.history for one in worked}.union(after.validators)
    return replace(after, anchors={author: anchors[author] for author in sorted(known) if author in anchors})


def advance_empty(chain: ChainState) -> ChainState:
    """The chain after a round that ended empty: nobody loses its place, and work and window stay."""
    forsaken = chain.empties + 1 >= SUCCESSION
    validators = successors(chain) if forsaken else chain.validators
    return replace(
        chain,
        round=chain.round + 1,
        tip=empty_id(chain),
        seed=_next_seed(chain, b""),
        validators=validators,
        seats=max(chain.seats, len(validators)),
        participation=min(EVERYBODY, 2 * chain.participation),
        empties=0 if forsaken else chain.empties + 1,
        undoable=False,
    )


def _next_seed(chain: ChainState, preimage: bytes) -> bytes:
    return hashlib.sha256(b"swarmnode/seed/1\0" + chain.seed + preimage).digest()


def checks_seed(chain: ChainState, after: bytes, leader: str, scores: Iterable[Said[Scores]]) -> bytes:
    """What draws who looks at whose work of a round, once a roster that quotes `scores` ended it.

    `after`: the seed that this made, which its leader knew before anybody committed work. So the nonce of another judge
    is mixed in, the first in the order of leaders who is quoted: a leader cannot choose it, as nobody follows one who
    leaves out a judge whom others heard. Only where the leader and that judge tell each other is the draw known early.
    """
    nonces = {said.author: said.what.nonce for said in scores if said.author != leader}
    first = next((nonces[judge] for judge in leaders(chain) if judge in nonces), b"")
    return hashlib.sha256(b"swarmnode/checks/1\0" + after + first).digest()


def _check_preimage(chain: ChainState, leader: str, offered: bytes) -> None:
    """A leader that registered an anchor gives the next preimage, or another leads: else it chose between two seeds.

    Below SMALL validators it may give none, so that who has used up its chain does not end a run that it leads alone.
    """
    anchor = chain.anchors.get(leader)
    if offered:
        if anchor is None or step(offered) != anchor:
            raise InvalidRoster("its preimage is not the next one of the leader's hash chain")
    elif anchor is not None and len(chain.validators) >= SMALL:
        raise InvalidRoster("its leader withholds the next value of its hash chain")
