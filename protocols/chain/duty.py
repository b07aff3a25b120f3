"""What an honest node does next in a round, given what it holds and which of its waits are over. Pure functions.

    duties(chain, rules, view)      statements to make and contributions to get, for the round after `chain.tip`
    follow(tree, rules, heads, …)   the roster to stand on

A node asks both whenever something arrives, a wait ends or an action was carried out, until nothing is left to do. An
action that cannot be carried out yet is offered again. Nothing here knows a clock: the caller says by `Timers` which
waits are over, and chooses how long they are.

    commit   once, when its contribution is there, unless a quorum of cuts is: that is too late for this round
    cut      once, when the wait for commits is over; at once when a quorum of others has cut or a commit was opened, as
             what is committed from then on may be a copy
    reveal   when a quorum has cut, and one of them lists the commit
    judge    every opened contribution that the cuts list
    seal     when all of them are measured, or the wait for them is over: what is not here is said to be missing
    open     when a quorum has sealed. `rules.check` cannot see in which order judges spoke: a liar may open after it
             read the others, which gains it nothing while a quorum has to vouch (`derive`)
    lead     when its attempt runs and all judges have opened, or the wait for them is over and a quorum has. It quotes
             all that it holds: every cut whose commits are all here, every opened score that was sealed
    follow   a validator follows the heads of others; where there are none, the roster of the earliest attempt, and when
             all attempts are over the empty one. It passes over rosters of attempts that have not begun here, unless
             most validators follow them, so that the last leader cannot be the first. Others follow the heads; where no
             validator is there, which is when their attempts are over, the empty roster
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarmnode.protocols.chain.forks import Tree
from swarmnode.protocols.chain.rules import Derived, NotHeld, Quoted, derive, empty_id, listed_commits
from swarmnode.protocols.chain.state import ChainRules, ChainState, judges, leaders, participates, quorum, ticket
from swarmnode.protocols.chain.statements import (
    MAX_COMMITS,
    MISSING,
    PREFIX,
    AvailabilityVote,
    Commit,
    Reveal,
    Said,
    Score,
    Scores,
    nonce_hash,
    opens,
)


@dataclass(frozen=True)
class Timers:
    """Which waits of this round are over at this node."""

    commits: bool = False  # everybody who was expected has committed, or had the time to
    contributions: bool = False  # what was revealed could be fetched and measured, or will not be
    scores: bool = False  # judges had the time to seal and to open
    attempt: int = 0  # the attempt that runs; from the number of leaders on: all are over


@dataclass(frozen=True)
class Own:
    """What this node itself has said in this round."""

    commit: Said[Commit] | None = None
    revealed: bool = False
    cut: AvailabilityVote | None = None
    sealed: Scores | None = None  # what its seal is the hash of
    opened: bool = False
    led: frozenset[int] = frozenset()  # attempts for which it made a roster


@dataclass(frozen=True)
class View:
    """What one node holds of one round. What it should not have been told, as of another parent, does no harm."""

    me: str
    ready: bool  # this node has a contribution to offer
    timers: Timers = field(default_factory=Timers)
    own: Own = field(default_factory=Own)
    commits: Mapping[bytes, Said[Commit]] = field(default_factory=dict)  # by id
    cuts: tuple[Said[AvailabilityVote], ...] = ()
    reveals: Mapping[bytes, Reveal] = field(default_factory=dict)  # by id of the commit
    judged: Mapping[bytes, Score] = field(default_factory=dict)  # by id of the commit: as this node found it
    seals: Mapping[str, bytes] = field(default_factory=dict)  # by judge
    scores: tuple[Said[Scores], ...] = ()
    norms: Mapping[bytes, float] = field(default_factory=dict)  # by id of the commit: contributions held here


@dataclass(frozen=True)
class WriteCommit:
    """Commit to the contribution that is ready."""


@dataclass(frozen=True)
class WriteAvailabilityVote:
    """Say which commits are here; the caller adds the hash of a fresh nonce and the window that it proposes."""

    commits: tuple[bytes, ...]  # ascending


@dataclass(frozen=True)
class WriteReveal:
    """Open the own commit, and serve the contribution."""


@dataclass(frozen=True)
class Judge:
    """Get these contributions and measure them, in any order."""

    commits: tuple[bytes, ...]  # ids, not yet in `View.judged`


@dataclass(frozen=True)
class WriteSeal:
    """Seal these scores; the caller adds nonce, salt and what it measured of the last roster, and keeps all of it."""

    scores: tuple[Score, ...]  # ascending by commit


@dataclass(frozen=True)
class WriteScores:
    """Open what was sealed."""


@dataclass(frozen=True)
class Fetch:
    """Get what this commit opens to: it is accepted, and this node needs it to lead."""

    commit: bytes


@dataclass(frozen=True)
class WriteRoster:
    """Lead: make the roster of these quotes with `rules.compose`."""

    attempt: int
    quoted: Quoted
    derived: Derived  # what the quotes make of the round


Action = WriteCommit | WriteAvailabilityVote | WriteReveal | Judge | WriteSeal | WriteScores | Fetch | WriteRoster


def duties(chain: ChainState, rules: ChainRules, view: View) -> tuple[Action, ...]:
    """All that this node can do now for the round after `chain.tip`. No two of them exclude each other."""
    mine, needed = judges(chain, rules), quorum(chain, rules)
    cuts = _cuts(chain, mine, view)
    actions: list[Action] = []
    own, enough = view.own, len({cut.author for cut in cuts}) >= needed
    if view.ready and own.commit is None and not enough and participates(chain, view.me):
        actions.append(WriteCommit())
    listed = own.commit is not None and any(own.commit.id in cut.what.commits for cut in cuts)
    if listed and enough and not own.revealed:
        actions.append(WriteReveal())
    if view.me in mine:
        actions.extend(_judging(chain, view, cuts, len(mine), needed))
    if (attempt := view.timers.attempt) not in own.led and view.me in leaders(chain, rules)[attempt : attempt + 1]:
        actions.extend(_leading(chain, rules, view, len(mine), needed))
    return tuple(actions)


def commits_to_cut(chain: ChainState, commits: Iterable[Said[Commit]]) -> tuple[bytes, ...]:
    """The commits that a judge lists of those it holds: well-formed, of this round, of authors who take part in it.

    Of too many those of validators, then in the order that the cohort's seed gives: all judges leave out the same.
    """
    mine = [
        said
        for said in commits
        if (said.what.round, said.what.parent) == (chain.round, chain.tip) and participates(chain, said.author)
    ]
    mine.sort(key=lambda said: (said.author not in chain.validators, ticket(chain, said.author), said.id))
    return tuple(sorted(said.id for said in mine[:MAX_COMMITS]))


def quotable(chain: ChainState, rules: ChainRules, view: View) -> Quoted:
    """All cuts and scores that a leader may quote with what it holds. They may be too few."""
    cuts: dict[str, Said[AvailabilityVote]] = {}
    by_nonce = {
        (said.author, nonce_hash(said.what.nonce)): said
        for said in sorted(view.scores, key=lambda said: said.id, reverse=True)
        if (said.what.round, said.what.parent) == (chain.round, chain.tip)
        and view.seals.get(said.author) == said.what.seal
    }
    for cut in sorted(
        _cuts(chain, judges(chain, rules), view),
        key=lambda cut: ((cut.author, cut.what.nonce_hash) not in by_nonce, cut.id),
    ):
        if all(id in view.commits for id in cut.what.commits):
            cuts.setdefault(cut.author, cut)
    scores = tuple(by_nonce[key] for cut in cuts.values() if (key := (cut.author, cut.what.nonce_hash)) in by_nonce)
    return Quoted(tuple(cuts.values()), scores, view.commits, view.reveals, view.norms)


def follow(tree: Tree, rules: ChainRules, heads: Mapping[str, bytes], *, me: str, tip: bytes, attempt: int) -> bytes:
    """The id of the roster to stand on, `tip` where it is the present one.

    It is in the tree, or the empty one after `tip` (`forks.empty_block`). `tree`: valid rosters of which every byte is
    here. `heads`: of the validators, this node's own among them, by id of a roster. `attempt`: as in Timers.
    """
    chain = tree[tip].chain
    attempts = {child: _attempt_of(tree, rules, child) for child in tree.children(tip)}
    over = attempt >= len(leaders(chain, rules))
    if me not in chain.validators:
        best = _forward(tree, tip, tree.best(heads))
        return empty_id(chain) if best == tip and over else best
    early = {child for child, its in attempts.items() if its > attempt}
    early = {child for child in early if 2 * tree.support(child, heads) <= len(chain.validators)}
    if early:
        heads = {peer: head for peer, head in heads.items() if early.isdisjoint(tree.ancestry(head))}
    best = _forward(tree, tip, tree.best(heads))
    if best != tip:
        return best
    begun = sorted((its, child) for child, its in attempts.items() if its <= attempt)
    if begun:
        return begun[0][1]
    return empty_id(chain) if over else tip


def _forward(tree: Tree, tip: bytes, best: bytes) -> bytes:
    """`best`, but where `tip` builds on it: that heads end before where a node stands is no reason to go back."""
    return tip if best == tip or best in tree.ancestry(tip) else best


def _judging(
    chain: ChainState, view: View, cuts: tuple[Said[AvailabilityVote], ...], judges: int, needed: int
) -> Iterable[Action]:
    """`judges` there are, of whom so many are `needed`."""
    own, timers, authors = view.own, view.timers, {cut.author for cut in cuts}
    enough = len(authors) >= needed
    if own.cut is None:
        if timers.commits or enough or any(_opened(chain, view, id) for id in view.reveals):
            yield WriteAvailabilityVote(commits_to_cut(chain, view.commits.values()))
        return
    if own.sealed is not None:
        if not own.opened and len(authors.intersection(view.seals)) >= needed:
            yield WriteScores()
        return
    if not enough:
        return
    listed = _to_score(cuts)
    left = [id for id in listed if id not in view.judged]
    if timers.contributions or (not left and len(authors) == judges):
        yield WriteSeal(tuple(_score(view, id) for id in listed))
    elif wanted := tuple(id for id in left if _opened(chain, view, id)):
        yield Judge(wanted)


def _leading(chain: ChainState, rules: ChainRules, view: View, judges: int, needed: int) -> Iterable[Action]:
    """`judges` there are, of whom so many are `needed`."""
    quoted = quotable(chain, rules, view)
    if len(quoted.scores) < needed:
        return
    if len(quoted.scores) < judges and not view.timers.scores:
        return
    try:
        yield WriteRoster(view.timers.attempt, quoted, derive(chain, rules, quoted))
    except NotHeld as error:
        yield Fetch(error.commit)


def _cuts(chain: ChainState, judges: tuple[str, ...], view: View) -> tuple[Said[AvailabilityVote], ...]:
    """Cuts of this round by those who judge it; two of one judge are both here."""
    round, parent = chain.round, chain.tip
    mine = [cut for cut in view.cuts if (cut.what.round, cut.what.parent) == (round, parent)]
    return tuple(cut for cut in mine if cut.author in judges)


def _opened(chain: ChainState, view: View, id: bytes) -> bool:
    commit, reveal = view.commits.get(id), view.reveals.get(id)
    return commit is not None and reveal is not None and opens(reveal, commit, chain.run_id)


def _to_score(cuts: tuple[Said[AvailabilityVote], ...]) -> tuple[bytes, ...]:
    """Commits that a roster may list, ascending: what these cuts make it list, then others while there is room."""
    listed = listed_commits(cuts)
    others = sorted({id for cut in cuts for id in cut.what.commits}.difference(listed))
    return tuple(sorted([*listed, *others][:MAX_COMMITS]))


def _score(view: View, id: bytes) -> Score:
    return view.judged.get(id, Score(id[:PREFIX], MISSING, 0))


def _attempt_of(tree: Tree, rules: ChainRules, id: bytes) -> int:
    """The attempt of a roster; the empty one comes after all."""
    block = tree[id]
    return block.roster.attempt if block.roster is not None else len(leaders(tree[block.parent].chain, rules))
