"""What was said in a round, and what an honest node does next, given that and which of its waits are over. Pure.

    log.insert(said, sealed, now)   a statement into the log of its round, if it belongs there
    duties(view, norms)             statements to make and contributions to get, for the round after `view.chain.tip`
    follow(tree, rules, heads, …)   the roster to stand on

A node asks both whenever something arrives, a wait ends or an action was carried out, until nothing is left to do. An
action that cannot be carried out yet is offered again. Nothing here knows a clock: `Timers` say which waits are over.

    commit   once, when its contribution is there, unless a quorum of cuts is: that is too late for this round
    cut      once, when the wait for commits is over; at once when a quorum of others has cut, as authors open commits
             then, and what is committed from then on may be a copy. Who opens its own before that ends nobody's wait
    reveal   when a quorum has cut, and one of them lists the commit
    judge    the contributions that the cuts list, together, once all are here or the wait for them is over: what is not
             here then is said to be missing
    seal     when all of them are judged
    open     when a quorum has sealed. A liar may open later: that moves a median no further than any lie (`derive`)
    lead     when its attempt runs and all judges have opened, or the wait for them is over and a quorum has. It quotes
             all that it holds: every cut whose commits are all here, every opened score that was sealed
    follow   a validator follows the heads of others, unless it is locked; where there are none, the roster of the
             earliest attempt, and when all attempts are over the empty one. It passes over rosters of attempts that
             have not begun here, unless most validators follow them, so that the last leader cannot be the first; and
             likewise over rosters that leave out whose scores it held, so that a leader cannot choose who judges.
             Others follow the heads; where no validator is there, when their attempts are over, the empty roster
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from swarmnode.protocols.chain.forks import Tree
from swarmnode.protocols.chain.rules import Derived, NotHeld, Quoted, derive, empty_id, listed_commits
from swarmnode.protocols.chain.state import (
    SMALL,
    ChainRules,
    ChainState,
    judges,
    leaders,
    majority,
    participates,
    quorum,
    ticket,
)
from swarmnode.protocols.chain.statements import (
    MAX_COMMITS,
    AvailabilityVote,
    Commit,
    Reveal,
    Roster,
    Said,
    Score,
    Scores,
    Seal,
    nonce_hash,
    opens,
)

MAX_AUTHORS = 2048  # who commit in one round, beside validators; far more than take part, and 1 MiB of memory
PER_AUTHOR = 2  # records of one author that a log takes by itself. Who says more says other things to others: then …
NAMED = 8  # … it takes so many that anybody's cuts and rosters name, or nodes that heard others first would never agree


@dataclass
class RoundLog:
    """What was said in the round that builds on `chain.tip`, bounded and indexed.

    It takes what honest nodes may say of that round and passes over the rest: what is said by who is no judge or leader
    of it, or uninvited, or too much.
    """

    chain: ChainState
    rules: ChainRules
    commits: dict[bytes, Said[Commit]] = field(default_factory=dict)  # by id
    cuts: dict[bytes, Said[AvailabilityVote]] = field(default_factory=dict)
    cut_by: dict[str, Said[AvailabilityVote]] = field(default_factory=dict)  # one of each judge that made one
    reveals: dict[bytes, Said[Reveal]] = field(default_factory=dict)  # by commit; each opens it
    seals: dict[str, Said[Seal]] = field(default_factory=dict)  # by judge
    scores: dict[bytes, Said[Scores]] = field(default_factory=dict)
    rosters: dict[bytes, Said[Roster]] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)  # author of a commit -> trio time of the first
    sealed: dict[bytes, bytes] = field(default_factory=dict)  # id -> the record's bytes, for peers
    derived: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], Derived] = field(default_factory=dict)  # by the quotes
    _listed: tuple[int, tuple[bytes, ...]] = (0, ())  # `listed` of so many cuts
    _named: Counter[tuple[str, str]] = field(default_factory=Counter)  # taken since somebody names it: by whom, of whom
    _loose: dict[bytes, list[Said[Reveal]]] = field(default_factory=dict)  # by commit, which is not here yet

    def __post_init__(self) -> None:
        self.judges = judges(self.chain)
        self.leaders = leaders(self.chain)
        self.quorum = quorum(self.chain)

    def insert(self, said: Said[Any], sealed: bytes, now: float, *, namer: str = "") -> bool:
        """Insert a statement; whether it is new and belongs to this round. `namer`: whose cut or roster names it."""
        what = said.what
        if said.id in self.sealed or (what.round, what.parent) != (self.chain.round, self.chain.tip):
            return False
        match what:
            case Commit():
                inserted = self._insert_commit(said, now, namer)
            case Reveal():
                inserted = self._insert_reveal(said)
            case AvailabilityVote():
                inserted = said.author in self.judges and self._put(self.cuts, said, namer)
                if inserted:
                    self.cut_by.setdefault(said.author, said)
            case Seal():
                inserted = said.author in self.judges and self.seals.setdefault(said.author, said) is said
            case Scores():
                inserted = said.author in self.judges and self._put(self.scores, said, namer)
            case Roster():
                leads = said.author in self.leaders[what.attempt : what.attempt + 1]
                inserted = leads and self._put(self.rosters, said, namer)
            case _:
                inserted = False
        if inserted:
            self.sealed[said.id] = sealed
        return inserted

    def _insert_commit(self, said: Said[Commit], now: float, namer: str) -> bool:
        known = (
            bool(namer)
            or said.author in self.chain.validators
            or any(said.author == worked.author for roster in self.chain.history[-2:] for worked in roster)
        )
        room = known or len(self.commits) < MAX_AUTHORS
        if not room or not participates(self.chain, said.author) or not self._put(self.commits, said, namer):
            return False
        self.arrived.setdefault(said.author, now)
        for reveal in self._loose.pop(said.id, ()):
            self._insert_reveal(reveal)
        return True

    def _put(self, kept: dict[bytes, Any], said: Said[Any], namer: str) -> bool:
        """Keep it unless as many of its author's are here; then as many as each namer may have."""
        if sum(said.author == other.author for other in kept.values()) >= PER_AUTHOR:
            if not namer or self._named[namer, said.author] >= NAMED:
                return False
            self._named[namer, said.author] += 1
        kept[said.id] = said
        return True

    def _insert_reveal(self, said: Said[Reveal]) -> bool:
        commit = self.commits.get(said.what.commit)
        if commit is None:
            loose = self._loose.get(said.what.commit, [])
            if len(loose) >= PER_AUTHOR or (not loose and len(self._loose) >= MAX_AUTHORS):
                return False
            self._loose[said.what.commit] = [*loose, said]
            return True
        if said.author != commit.author or not opens(said.what, commit, self.chain.run_id):
            return False
        return self.reveals.setdefault(commit.id, said) is said

    def scores_by_judge(self) -> dict[str, Said[Scores]]:
        """One list of opened scores of each judge whose cut is here and has the hash of its nonce."""
        return {
            said.author: said
            for said in self.scores.values()
            if said.author in self.cut_by and self.cut_by[said.author].what.nonce_hash == nonce_hash(said.what.nonce)
        }

    def listed(self) -> tuple[bytes, ...]:
        """Ids of commits that are in more than a third of the cuts that are here."""
        if self._listed[0] != len(self.cuts):  # it only grows
            self._listed = len(self.cuts), listed_commits(list(self.cut_by.values()))
        return self._listed[1]

    def own_commit(self, author: str) -> Said[Commit] | None:
        return next((said for said in self.commits.values() if said.author == author), None)

    def records_of(self, id: bytes) -> list[bytes]:
        """As far as they are here: a roster, its quotes and what opens what it accepts; or a cut and its commits."""
        ids = [id]
        if id in self.rosters:
            roster = self.rosters[id].what
            ids += [*roster.cuts, *roster.scores, *(entry.commit for entry in roster.entries)]
            ids += [self.reveals[entry.commit].id for entry in roster.accepted if entry.commit in self.reveals]
        elif id in self.cuts:
            ids += self.cuts[id].what.commits
        return [self.sealed[id] for id in ids if id in self.sealed]

    def lacking(self, what: Roster | AvailabilityVote) -> list[bytes]:
        """Ids of records that a roster quotes, or of commits that a cut lists, and that are not here."""
        if isinstance(what, AvailabilityVote):
            return [id for id in what.commits if id not in self.commits]
        lacking = [id for id in what.cuts if id not in self.cuts]
        lacking += [id for id in what.scores if id not in self.scores]
        return lacking + [entry.commit for entry in what.entries if entry.commit not in self.commits]

    def quoted(self, roster: Roster, norms: Mapping[bytes, float]) -> Quoted:
        """What a roster is checked against. Raises KeyError where a record that it quotes is not here."""
        cuts, scores = [self.cuts[id] for id in roster.cuts], [self.scores[id] for id in roster.scores]
        return self._quote(cuts, scores, norms)

    def quotable(self, norms: Mapping[bytes, float]) -> Quoted:
        """All cuts and scores that a leader may quote with what it holds. They may be too few.

        `norms`: by id of the commit, of contributions held here.
        """
        by_nonce = {
            (said.author, nonce_hash(said.what.nonce)): said
            for said in sorted(self.scores.values(), key=lambda said: said.id, reverse=True)
            if said.author in self.seals and self.seals[said.author].what.seal == said.what.seal
        }
        cuts: dict[str, Said[AvailabilityVote]] = {}
        for cut in sorted(
            self.cuts.values(), key=lambda cut: ((cut.author, cut.what.nonce_hash) not in by_nonce, cut.id)
        ):
            if all(id in self.commits for id in cut.what.commits):
                cuts.setdefault(cut.author, cut)
        keys = [(cut.author, cut.what.nonce_hash) for cut in cuts.values()]
        return self._quote(cuts.values(), [by_nonce[key] for key in keys if key in by_nonce], norms)

    def _quote(
        self, cuts: Iterable[Said[AvailabilityVote]], scores: Iterable[Said[Scores]], norms: Mapping[bytes, float]
    ) -> Quoted:
        reveals = {id: said.what for id, said in self.reveals.items()}
        return Quoted(tuple(cuts), tuple(scores), self.commits, reveals, norms)


@dataclass(frozen=True)
class Timers:
    """Which waits of this round are over at this node."""

    commits: bool = False  # everybody who was expected has committed, or had the time to
    contributions: bool = False  # what was revealed could be fetched and measured, or will not be
    scores: bool = False  # judges had the time to seal and to open
    heads: bool = False  # validators had the time to stand behind one roster
    locks: bool = False  # they had the time to hear of one another's locks: these end
    attempt: int = 0  # the attempt that runs; from the number of leaders on: all are over


@dataclass
class Own:
    """What this node itself has said in this round."""

    commit: Said[Commit] | None = None
    revealed: bool = False
    cut: AvailabilityVote | None = None
    sealed: Scores | None = None  # what its seal is the hash of
    opened: bool = False
    led: frozenset[int] = frozenset()  # attempts for which it made a roster


@dataclass
class RoundView:
    """One node's part in one round: what was said there, as it is here, what it said itself, which waits are over.

    It begins when the node comes to a block, also after a restart in the middle of a round.
    """

    me: str
    log: RoundLog
    began: float = 0.0  # trio time
    follows_nothing: bool = False  # the round before ended empty: its contributions wait to be offered again
    ready: bool = False  # this node has a contribution to offer
    timers: Timers = field(default_factory=Timers)
    scored_since: float = float("inf")  # trio time from which on a quorum of opened scores was here
    heard: frozenset[str] = frozenset()  # judges whose opened scores were here when the wait for scores was over
    awaited: tuple[float, bytes] = 0.0, b""  # since when others are waited for to follow a block, and which block
    lockable: bytes = b""  # the block that all had a moment to follow: who sees that most do may be locked on it
    lacking: list[str] = field(default_factory=list)  # who is waited for to follow it, or to be locked on it
    had_time: bool = False  # they had the time to
    own: Own = field(default_factory=Own)
    judged: dict[bytes, Score] = field(default_factory=dict)  # by id of the commit: as this node found it

    @property
    def chain(self) -> ChainState:
        """That the round builds on."""
        return self.log.chain

    def omitting(self) -> frozenset[bytes]:
        """Rosters of this round that leave out judges who were heard; before the wait for them is over, any judge.

        None below SMALL validators, nor while fewer than most judges are enough: there most may never stand behind one.
        """
        log, chain = self.log, self.chain
        if len(chain.validators) < SMALL or log.quorum < majority(chain) or not log.rosters:
            return frozenset()
        due = set(self.heard if self.timers.scores else log.judges)
        scores, rosters = log.scores, log.rosters.items()
        quoted = {id: {scores[one].author for one in said.what.scores if one in scores} for id, said in rosters}
        return frozenset(id for id, authors in quoted.items() if not due <= authors)


class Write(Enum):
    """What is done without anything that has to be told here."""

    COMMIT = "commit to the contribution that is ready"
    REVEAL = "open the own commit, and serve the contribution"
    SCORES = "open what was sealed"
    FETCH = "get what commits open to that are accepted: this node needs that to lead"


@dataclass(frozen=True)
class WriteAvailabilityVote:
    """Say which commits are here; the caller adds the hash of a fresh nonce and the window that it proposes."""

    commits: tuple[bytes, ...]  # ascending


@dataclass(frozen=True)
class Judge:
    """Get these contributions, and measure them once `complete`: what is not here then is missing."""

    commits: tuple[bytes, ...]  # ids, not yet in `RoundView.judged`
    complete: bool  # all are here, or the wait for them is over


@dataclass(frozen=True)
class WriteSeal:
    """Seal these scores; the caller adds nonce, salt and what it measured of the last roster, and keeps all of it."""

    scores: tuple[Score, ...]  # ascending by commit


@dataclass(frozen=True)
class WriteRoster:
    """Lead: make the roster of these quotes with `rules.compose`."""

    attempt: int
    quoted: Quoted
    derived: Derived  # what the quotes make of the round


Action = Write | WriteAvailabilityVote | Judge | WriteSeal | WriteRoster


def duties(view: RoundView, norms: Mapping[bytes, float]) -> tuple[Action, ...]:
    """All that this node can do now for the round after `view.chain.tip`. No two of them exclude each other.

    `norms`: by id of the commit, of contributions held here.
    """
    log, own = view.log, view.own
    actions: list[Action] = []
    enough = len(log.cut_by) >= log.quorum
    if view.ready and own.commit is None and not enough and participates(log.chain, view.me):
        actions.append(Write.COMMIT)
    listed = own.commit is not None and any(own.commit.id in cut.what.commits for cut in log.cuts.values())
    if listed and enough and not own.revealed:
        actions.append(Write.REVEAL)
    if view.me in log.judges:
        actions.extend(_judging(view, norms))
    if (attempt := view.timers.attempt) not in own.led and view.me in log.leaders[attempt : attempt + 1]:
        actions.extend(_leading(view, norms))
    return tuple(actions)


def _judging(view: RoundView, norms: Mapping[bytes, float]) -> Iterable[Action]:
    log, own, timers = view.log, view.own, view.timers
    enough = len(log.cut_by) >= log.quorum
    if own.cut is None:
        if timers.commits or enough:
            yield WriteAvailabilityVote(commits_to_cut(log.chain, log.commits.values()))
        return
    if own.sealed is not None:
        if not own.opened and len(log.cut_by.keys() & log.seals.keys()) >= log.quorum:
            yield Write.SCORES
        return
    if not enough:
        return
    listed = log.listed()  # what a few cuts name alone no roster accepts, and it would move where all is measured
    left = [id for id in listed if id not in view.judged]
    all_cut = len(log.cut_by) == len(log.judges)
    if not left and (timers.contributions or all_cut):
        yield WriteSeal(tuple(view.judged[id] for id in listed))
    elif timers.contributions or (left and all_cut and norms.keys() >= set(left)):
        yield Judge(tuple(left), complete=True)
    elif wanted := tuple(id for id in left if id in log.reveals and id not in norms):
        yield Judge(wanted, complete=False)


def _leading(view: RoundView, norms: Mapping[bytes, float]) -> Iterable[Action]:
    quoted = view.log.quotable(norms)
    if len(quoted.scores) < view.log.quorum:
        return
    if len(quoted.scores) < len(view.log.judges) and not view.timers.scores:
        return
    try:
        yield WriteRoster(view.timers.attempt, quoted, derive(view.chain, view.log.rules, quoted))
    except NotHeld:
        yield Write.FETCH


def commits_to_cut(chain: ChainState, commits: Iterable[Said[Commit]]) -> tuple[bytes, ...]:
    """The commits that a judge lists of those in the log of a round; none of an author who committed twice.

    Of too many those of validators, then in the order that the cohort's seed gives: all judges leave out the same.
    """
    commits = tuple(commits)
    count = Counter(said.author for said in commits)
    once = (said for said in commits if count[said.author] == 1)
    order = sorted(once, key=lambda said: (said.author not in chain.validators, ticket(chain, said.author), said.id))
    return tuple(sorted(said.id for said in order[:MAX_COMMITS]))


def follow(view: RoundView, tree: Tree, heads: Mapping[str, bytes], locked: Mapping[str, bytes]) -> bytes:
    """The id of the roster to stand on, `view.chain.tip` where it is the present one.

    It is in the tree, or the empty one after that (`forks.empty_block`). `tree`: valid rosters of which every byte is
    here. `heads`: of the validators, this node's own among them, by id of a roster. `locked`: what they are locked on,
    b"" of who moved. Once validators had the time to follow one roster (`Timers.heads`), more than a third suffice for
    one that is passed over, of whom one is honest, and who is not locked goes to the middle of few.
    """
    chain, tip, me = view.chain, view.chain.tip, view.me
    last = len(view.log.leaders)  # the empty roster comes after all attempts
    rosters = {child: tree[child].roster for child in tree.children(tip)}
    attempts = {child: roster.attempt if roster is not None else last for child, roster in rosters.items()}
    attempt, over, omitting = view.timers.attempt, view.timers.attempt >= last, view.omitting()
    if me not in chain.validators:
        best = _forward(tree, tip, tree.best(heads))
        return empty_id(chain) if best == tip and over else best
    passed = {child for child, its in attempts.items() if its > attempt or child in omitting}
    part = 3 if view.timers.heads else 2
    passed = {child for child in passed if part * tree.support(child, heads) <= len(chain.validators)}
    if passed:  # but for what it stands behind already, as before a restart
        passed.difference_update(tree.ancestry(heads.get(me, tip)))
    if passed:  # who follows one of them stands behind what it builds on as well
        heads = {peer: head if passed.isdisjoint(tree.ancestry(head)) else tip for peer, head in heads.items()}
    best = _forward(tree, tip, tree.best(heads))
    if best != tip:
        return _vote(view, tree, best, heads, locked)
    begun = (child for child, its in attempts.items() if its <= attempt and child not in passed)
    return next(begun, empty_id(chain) if over else tip)


def _vote(view: RoundView, tree: Tree, best: bytes, heads: Mapping[str, bytes], locked: Mapping[str, bytes]) -> bytes:
    """`best`, but what this node stands behind already in that round, while few stand behind any, or it is locked."""
    own, tip = heads.get(view.me, view.chain.tip), view.chain.tip
    fork = tree.fork_point(best, own) if own in tree else own
    if fork in (best, own) or tip not in tree.ancestry(fork):
        return best
    level = len(tree.ancestry(fork))
    mine, other = tree.ancestry(own)[level], tree.ancestry(best)[level]
    if view.me in tree.held(mine, heads, locked) and not view.timers.locks:
        return best if tree.is_decided(other, heads, locked) else own
    came = sum(tree.support(child, heads) for child in tree.children(fork))
    return best if view.timers.heads or 2 * came > len(tree[fork].chain.validators) else own


def _forward(tree: Tree, tip: bytes, best: bytes) -> bytes:
    """`best`, but where `tip` builds on it: that heads end before where a node stands is no reason to go back."""
    return tip if best == tip or best in tree.ancestry(tip) else best
