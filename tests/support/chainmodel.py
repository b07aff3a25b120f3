"""A small model of the open round: every order of deliveries, deaths and ends of waits, or as many as one tries.

Each node decides with the very functions of `protocols.chain`. A state of the model is what each node has said, how
much of what each other one said has reached it, where it stands, where it last heard that each other one stands, and
which attempt it believes to run. From every state:

    deliver   the next statement of one node reaches another one, or where it stands now: its head
    wait      a wait ends at a node: for commits, for contributions, for scores, or for the attempt
    die       one node stops for good; what it said may still arrive, or not

What keeps the number of states small, without leaving out an outcome:

- a node does at once all that it can: acting later is what hearing later is;
- the end of a wait counts at the moment at which it makes a difference, as nothing is decided by it before;
- so does the end of an attempt; and where a leader gives up its own;
- what one author said arrives in its order, and with what it refers to: scores without the cut before them, or a head
  without its roster, are of no use until that came too;
- a head replaces the one before it, so one that was replaced never arrives later, and nobody's heads are counted: a
  node moves where it follows, and nobody is locked (`timeouts.is_settled`);
- a statement that cannot make a difference to its receiver any more has arrived.

A liar says one thing to some and another to the others: what it says is then a different record for each receiver.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from chains import RULES, STATE, Offer, chain_of, cut, nonce_of, offer, row, say, start

from swarmnode.protocols.chain.duty import (
    Action,
    Judge,
    Own,
    RoundLog,
    RoundView,
    Timers,
    Write,
    WriteAvailabilityVote,
    WriteRoster,
    WriteSeal,
    duties,
    follow,
)
from swarmnode.protocols.chain.forks import Block, Tree, empty_block
from swarmnode.protocols.chain.rules import Derived, Quoted, advance, check, compose, derive
from swarmnode.protocols.chain.state import ChainState, leaders, quorum
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    JUDGED,
    MISSING,
    AvailabilityVote,
    Commit,
    ForkChoiceVote,
    Reveal,
    Roster,
    Said,
    Scores,
    Seal,
)

EXCHANGES = 12  # of everything in a round: each kind of statement, a roster, heads until they agree, and some more
NOTHING = 0  # the log of who has said nothing
WAITS = (Timers(commits=True), Timers(contributions=True), Timers(scores=True))

Spoken = tuple[
    bytes, ...
]  # one statement as each node hears it, by the node's number: ids, alike unless its author lies


class Node(NamedTuple):
    """One node in one state of the model. Logs are numbers, see `Logs`."""

    number: int
    tip: bytes
    attempt: int
    dead: bool
    said: int  # its log
    heard: tuple[int, ...]  # of each node's log, by its number, what arrived here
    heads: tuple[bytes, ...]  # of each node, by its number, where it was last heard to stand; empty: nowhere yet


State = tuple[Node, ...]


class Broken(AssertionError):
    """A promise does not hold; says which, and how the model got there."""


class Logs:
    """All sequences of statements, as a tree: a log is the number of its last statement's place in it."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Spoken], int] = {}
        self._whole: list[tuple[Spoken, ...]] = [()]
        self._at: list[tuple[int, ...]] = [(NOTHING,)]  # by log: itself and those that it continues, shortest first

    def add(self, log: int, spoken: Spoken) -> int:
        place = self._places.setdefault((log, spoken), len(self._whole))
        if place == len(self._whole):
            self._whole.append((*self._whole[log], spoken))
            self._at.append((*self._at[log], place))
        return place

    def __getitem__(self, log: int) -> tuple[Spoken, ...]:
        return self._whole[log]

    def next(self, log: int, heard: int) -> tuple[int, Spoken]:
        """What of `log` comes after `heard`, and what is heard then."""
        count = len(self._whole[heard])
        return self._at[log][count + 1], self._whole[log][count]


@dataclass
class Model:
    """Nodes, who of them contribute and lie, and what may happen to them."""

    names: tuple[str, ...]  # all are validators
    authors: frozenset[str]
    rounds: int = 1
    liar: str = ""  # leads with two rosters, and tells each of them to half of the others
    may_die: frozenset[str] = frozenset()
    sealing: bool = True  # else seals arrive with the cuts of their judges
    at_once: tuple[type, ...] = ()  # kinds of statements that reach everybody who lives as soon as they are made
    patient: frozenset[str] = frozenset()  # whose waits end only where nothing is left to arrive anywhere
    states: int = 0
    _logs: Logs = field(default_factory=Logs)
    _said: dict[bytes, Said[Any]] = field(default_factory=dict)
    _scores: dict[bytes, Said[Scores]] = field(default_factory=dict)  # by seal
    _blocks: dict[bytes, Block] = field(default_factory=dict)
    _offers: dict[bytes, Offer] = field(default_factory=dict)  # by commit
    _settled: dict[tuple[Node, Timers | None], Node] = field(default_factory=dict)
    _indifferent: dict[tuple[Node, bytes], bool] = field(default_factory=dict)
    _rounds: dict[bytes, RoundLog] = field(default_factory=dict)  # by tip, of which nothing was said
    _ending: set[State] = field(default_factory=set)  # states that end well, apart from what was heard

    def __post_init__(self) -> None:
        self.root = start(self.names)
        self._blocks[self.root.tip] = Block(self.root.tip, b"", self.root, None)

    @property
    def rosters(self) -> int:
        """Different rosters that were made."""
        return sum(isinstance(said.what, Roster) for said in self._said.values())

    # --- exploring --------------------------------------------------------------------------------------------------

    def explore(self, most: int) -> None:
        """Visit every state that can be reached, and check what is promised in each. Raises Broken.

        `most`: states, more than which are not visited; then it raises Broken as well.
        """
        first = self._first()
        came_from: dict[State, State | None] = {first: None}
        left, state = deque([first]), first
        try:
            while left:
                state = left.popleft()
                self.states += 1
                self._check_state(state)
                for after in self._successors(state):
                    if after not in came_from:
                        came_from[after] = state
                        left.append(after)
                        if len(came_from) > most:
                            raise Broken(f"more than {most} states")
        except Broken as error:
            raise Broken(f"{error}\n{self._story(came_from, state)}") from None

    def walk(self, rng: random.Random) -> None:
        """Visit states at random until nothing can happen any more, and check what is promised in each. Raises Broken.

        For as many nodes as `explore` could not end with.
        """
        state: State | None = self._first()
        came_from: dict[State, State | None] = {}
        before = None
        try:
            while state is not None:
                came_from[state], before = before, state
                self.states += 1
                self._check_state(state)
                # what was visited leads in circles only where liars flip, and there it is left
                after = [one for one in self._successors(state) if one not in came_from]
                state = rng.choice(after) if after else None
        except Broken as error:
            raise Broken(f"{error}\n{self._story(came_from, before)}") from None

    def _first(self) -> State:
        nothing, nowhere = (NOTHING,) * len(self.names), (b"",) * len(self.names)
        begun = (Node(j, self.root.tip, 0, False, NOTHING, nothing, nowhere) for j in range(len(self.names)))
        return self._normal(tuple(begun))

    def _successors(self, state: State) -> Iterator[State]:
        arriving = any(
            not node.dead and (node.heard[i] != other.said or node.heads[i] != self._head(other))
            for node in state
            for i, other in enumerate(state)
            if i != node.number
        )
        for j, node in enumerate(state):
            if node.dead:
                continue
            for i, other in enumerate(state):
                if i != j and node.heard[i] != other.said:
                    more, _ = self._logs.next(other.said, node.heard[i])
                    yield self._with(state, node._replace(heard=(*node.heard[:i], more, *node.heard[i + 1 :])))
                if i != j and node.heads[i] != self._head(other):
                    yield self._with(state, self._see(node, other))
            if not (arriving and self.names[j] in self.patient):
                for after in self._waits(node):
                    yield self._with(state, after)
            if self.names[j] in self.may_die and not any(one.dead for one in state):
                yield self._with(state, node._replace(dead=True))

    def _waits(self, node: Node) -> Iterator[Node]:
        """The node after each wait whose end makes a difference to it."""
        if not self._in_round(node):
            return
        for timers in WAITS:
            after = self._settle(node, replace(timers, attempt=node.attempt))
            if after != node:
                yield after
        order = leaders(self._chain(node))
        led = self._own(node).led
        for attempt in range(node.attempt + 1, len(order) + 1):
            later = node._replace(attempt=attempt)
            after = self._settle(later)
            gives_up = order[attempt - 1] == self.names[node.number] and attempt - 1 not in led
            if after != later or gives_up:
                yield after

    def _with(self, state: State, node: Node) -> State:
        return self._normal((*state[: node.number], self._settle(node), *state[node.number + 1 :]))

    def _normal(self, state: State) -> State:
        """The state after everybody did what it can, and what makes no difference arrived."""
        again = True
        while again:
            again = False
            for j, node in enumerate(state):
                if node.dead:
                    continue
                after = self._settle(self._hear_idle(state, node))
                if after != node:
                    state, again = (*state[:j], after, *state[j + 1 :]), True
        return state

    def _head(self, node: Node) -> bytes:
        """What it has said of where it stands."""
        return node.tip if node.tip != self.root.tip else b""

    def _see(self, node: Node, other: Node) -> Node:
        i = other.number
        return node._replace(heads=(*node.heads[:i], self._head(other), *node.heads[i + 1 :]))

    def _hear_idle(self, state: State, node: Node) -> Node:
        for i, other in enumerate(state):
            if ForkChoiceVote in self.at_once and i != node.number:
                node = self._see(node, other)
            while i != node.number and node.heard[i] != other.said:
                more, spoken = self._logs.next(other.said, node.heard[i])
                at_once = isinstance(self._said[spoken[node.number]].what, self.at_once)
                if not at_once and not self._is_idle(node, spoken[node.number]):
                    break
                node = node._replace(heard=(*node.heard[:i], more, *node.heard[i + 1 :]))
        return node

    def _is_idle(self, node: Node, id: bytes) -> bool:
        """Whether a statement can make no difference to this node any more."""
        if (node, id) not in self._indifferent:
            self._indifferent[node, id] = self._cannot_matter(node, id)
        return self._indifferent[node, id]

    def _cannot_matter(self, node: Node, id: bytes) -> bool:
        what, chain, own = self._said[id].what, self._chain(node), self._own(node)
        if not self._in_round(node) or what.round < chain.round:
            return True
        if (what.round, what.parent) != (chain.round, chain.tip):
            return False  # this node may go there yet
        order = enumerate(leaders(chain))
        me = self.names[node.number]
        leads = any(leader == me and a not in own.led and a >= node.attempt for a, leader in order)
        match what:
            case Commit():
                return own.cut is not None
            case AvailabilityVote():
                may_open = own.commit is not None and not own.revealed
                return own.sealed is not None and not may_open and not leads
            case Reveal():
                return own.sealed is not None
            case Seal():
                return own.opened or not self.sealing
            case Scores():
                return not leads
        return False

    # --- what a node does -------------------------------------------------------------------------------------------

    def _settle(self, node: Node, timers: Timers | None = None) -> Node:
        """The node after it did all that it can with what it heard; `timers` end for its first action only."""
        key = (node, timers)
        if key not in self._settled:
            self._settled[key] = self._act(node, timers)
        return self._settled[key]

    def _act(self, node: Node, timers: Timers | None) -> Node:
        while not node.dead:
            before = node
            node = self._follow(node)
            if self._in_round(node):
                for action in duties(*self._view(node, timers)):
                    node, timers = self._carry_out(node, action), None
                    break
            if node == before:
                break
        return node

    def _known(self, node: Node) -> list[Said[Any]]:
        """What it heard and what it said, once each, in an order that says nothing."""
        logs = [self._logs[log] for log in (*node.heard, node.said)]
        return [self._said[id] for id in sorted({spoken[node.number] for log in logs for spoken in log})]

    def _follow(self, node: Node) -> Node:
        heads = dict(zip(self.names, node.heads, strict=True))
        me = self.names[node.number]
        heads[me] = self._head(node)
        heads = {name: head for name, head in heads.items() if head}
        tree = Tree(self.root)
        for id in (
            node.tip,
            *heads.values(),
            *(said.id for said in self._known(node) if isinstance(said.what, Roster)),
        ):
            self._grow(tree, id)
        if node.tip not in self._rounds:
            self._rounds[node.tip] = RoundLog(self._chain(node), RULES)
        to = follow(RoundView(me, self._rounds[node.tip], timers=Timers(attempt=node.attempt)), tree, heads, {})
        if to == node.tip:
            return node
        if to not in self._blocks:
            self._add(empty_block(self._chain(node)))
        return node._replace(tip=to, attempt=0)

    def _grow(self, tree: Tree, id: bytes) -> None:
        """Have a roster in the tree, with all before it: who tells of it serves it."""
        path = []
        while id not in tree:
            path.append(self._blocks[id])
            id = path[-1].parent
        for block in reversed(path):
            tree.add(block)

    def _view(self, node: Node, timers: Timers | None) -> tuple[RoundView, dict[bytes, float]]:
        """What the node holds of its round, with the norms of contributions."""
        chain, me = self._chain(node), self.names[node.number]
        log = RoundLog(chain, RULES)
        here = [said for said in self._known(node) if self._is_of(chain, said)]
        # What a cut lists is fetched from its author, and what was measured from who measured it.
        listed = {id for said in here if isinstance(said.what, AvailabilityVote) for id in said.what.commits}
        found = {
            one.commit
            for said in here
            if isinstance(said.what, Scores)
            for one in said.what.scores
            if one.found == JUDGED
        }
        commits = listed | {said.id for said in here if isinstance(said.what, Commit)}
        revealed = {said.what.commit for said in here if isinstance(said.what, Reveal)}
        revealed |= {id for id in commits if id[:16] in found}
        opened = [say(self._said[id].author, self._offers[id].reveal) for id in sorted(revealed)]
        for said in (*(self._said[id] for id in sorted(commits)), *opened, *here):
            log.insert(said, b"", 0.0)
        timers = timers or Timers(attempt=node.attempt)
        judged = {id: row(id, self._offers[id].gain) for id in log.reveals}
        if timers.contributions:
            judged |= {id: row(id, 0, found=MISSING) for id in log.commits if id not in log.reveals}
        view = RoundView(me, log, ready=me in self.authors, timers=timers, own=self._own(node), judged=judged)
        return view, {id: self._offers[id].norm for id in log.reveals}

    def _own(self, node: Node) -> Own:
        mine = [self._said[spoken[node.number]] for spoken in self._logs[node.said]]
        mine = [said for said in mine if self._is_of(self._chain(node), said)]
        by_kind = {type(said.what): said for said in mine}
        return Own(
            commit=by_kind.get(Commit),
            revealed=Reveal in by_kind,
            cut=by_kind[AvailabilityVote].what if AvailabilityVote in by_kind else None,
            sealed=self._scores[by_kind[Seal].what.seal].what if Seal in by_kind else None,
            opened=Scores in by_kind,
            led=frozenset(said.what.attempt for said in mine if isinstance(said.what, Roster)),
        )

    def _is_of(self, chain: ChainState, said: Said[Any]) -> bool:
        return (said.what.round, said.what.parent) == (chain.round, chain.tip)

    def _carry_out(self, node: Node, action: Action) -> Node:
        chain, me, own = self._chain(node), self.names[node.number], self._own(node)
        match action:
            case Write.COMMIT:
                made = offer(chain, me)
                self._offers[made.id] = made
                return self._speak(node, made.commit)
            case WriteAvailabilityVote(commits):
                return self._speak(node, cut(chain, me, commits))
            case Write.REVEAL if own.commit is not None:
                return self._speak(node, say(me, self._offers[own.commit.id].reveal))
            case WriteSeal(rows):
                scores = say(me, Scores(chain.round, chain.tip, nonce_of(chain, me), bytes(16), 0, rows))
                self._scores[scores.what.seal] = scores
                return self._speak(node, say(me, Seal(chain.round, chain.tip, scores.what.seal)))
            case Write.SCORES if own.sealed is not None:
                return self._speak(node, self._scores[own.sealed.seal])
            case WriteRoster(attempt, quoted, derived):
                return self._lead(node, attempt, quoted, derived)
            case Judge() | Write.FETCH:
                raise Broken(f"{me} lacks what is fetched and measured at once here")
        raise Broken(f"{me} is to do {action}, and cannot")

    def _lead(self, node: Node, attempt: int, quoted: Quoted, derived: Derived) -> Node:
        honest = self._roster(node, attempt, quoted, derived)
        if self.names[node.number] != self.liar:
            self._check_fair(honest.what, quoted)
            return self._speak(node, honest)
        needed = quorum(self._chain(node))
        scores = sorted(quoted.scores, key=lambda said: said.id)[:needed]
        authors = {said.author for said in scores}
        cuts = [said for said in quoted.cuts if said.author in authors]
        few = replace(quoted, cuts=tuple(cuts), scores=tuple(scores))
        least = self._roster(node, attempt, few, derive(self._chain(node), RULES, few))
        told = tuple(honest.id if j % 2 else least.id for j in range(len(self.names)))
        return node._replace(said=self._logs.add(node.said, told))

    def _roster(self, node: Node, attempt: int, quoted: Quoted, derived: Derived) -> Said[Roster]:
        """What a leader makes of these quotes, which everybody finds valid."""
        chain = self._chain(node)
        me = self.names[node.number]
        preimage = chain_of(me).preimage(chain.anchors[me]) if me in chain.anchors else b""
        made = compose(chain, quoted, derived, attempt=attempt, preimage=preimage, state=STATE)
        roster = say(me, made)
        if check(chain, RULES, roster, quoted, state=STATE) != derived:
            raise Broken("a leader and who follows it make different things of the same quotes")
        self._said[roster.id] = roster
        self._add(Block(roster.id, chain.tip, advance(chain, RULES, roster, quoted, derived), made))
        return roster

    def _add(self, block: Block) -> None:
        if self._blocks.setdefault(block.id, block).chain.digest != block.chain.digest:
            raise Broken("two nodes on one roster have different chains")

    def _speak(self, node: Node, said: Said[Any]) -> Node:
        self._said[said.id] = said
        return node._replace(said=self._logs.add(node.said, (said.id,) * len(self.names)))

    def _chain(self, node: Node) -> ChainState:
        return self._blocks[node.tip].chain

    def _in_round(self, node: Node) -> bool:
        return self._chain(node).round < self.rounds

    # --- what is promised -------------------------------------------------------------------------------------------

    def _check_fair(self, roster: Roster, quoted: Quoted) -> None:
        """An honest leader's roster accepts every commit that enough cuts list and enough judges found to help."""
        entries = {entry.commit: entry.verdict for entry in roster.entries}
        half = len(self.names) // 2
        for id, commit in quoted.commits.items():
            others = [said for said in quoted.scores if said.author != commit.author]
            helped = sum((id[:16], JUDGED) in {(one.commit, one.found) for one in said.what.scores} for said in others)
            listed = sum(id in said.what.commits for said in quoted.cuts) > half
            needed = half if commit.author in self.names else half + 1
            if listed and helped >= needed and entries.get(id) != ACCEPTED:
                raise Broken("an honest leader leaves out what judges found to help")

    def _check_state(self, state: State) -> None:
        for node in state:
            keys: dict[str, bytes] = {}
            for spoken in self._logs[node.said]:
                said = self._said[spoken[node.number]]
                if keys.setdefault(said.what.key, said.id) != said.id:
                    raise Broken(f"{self.names[node.number]} says two things under {said.what.key}")
        if (apart := self._apart(state)) not in self._ending:
            self._check_end(state)
            self._ending.add(apart)

    def _apart(self, state: State) -> State:
        """The state without what was heard: all that matters once everything has arrived."""
        return tuple(node._replace(heard=(), heads=()) for node in state)

    def _check_end(self, state: State) -> None:
        """Once everything has arrived and all waits have ended, all who live ended their rounds on the same roster."""
        while True:
            for _ in range(EXCHANGES * self.rounds):
                before = state
                state = self._exchanged(state)
                if state == before:
                    break
            else:
                raise Broken("nodes that hear all of one another are never done")
            after = self._waited(state)
            if after == state:
                break
            state = after
        honest = [node for node in state if not node.dead and self.names[node.number] != self.liar]
        if any(self._in_round(node) for node in honest):
            raise Broken("a node cannot end its round")
        if len({node.tip for node in honest}) > 1:
            raise Broken("nodes that heard the same stand on different rosters")

    def _exchanged(self, state: State) -> State:
        """Everybody has heard all that was said until now, and then did what it can."""
        said, heads = tuple(node.said for node in state), tuple(self._head(node) for node in state)
        return tuple(node if node.dead else self._settle(node._replace(heard=said, heads=heads)) for node in state)

    def _waited(self, state: State) -> State:
        """The next wait has ended, everywhere."""
        for timers in WAITS:
            after = tuple(
                self._settle(node, replace(timers, attempt=node.attempt)) if self._in_round(node) else node
                for node in state
            )
            if after != state:
                return after
        return tuple(
            self._settle(node._replace(attempt=node.attempt + 1))
            if self._in_round(node) and not node.dead and node.attempt < len(leaders(self._chain(node)))
            else node
            for node in state
        )

    # --- telling what happened --------------------------------------------------------------------------------------

    def _story(self, came_from: dict[State, State | None], state: State | None) -> str:
        states = []
        while state is not None:
            states.append(state)
            state = came_from[state]
        states.reverse()
        return "\n".join(self._step(before, after) for before, after in pairwise(states))

    def _step(self, before: State, after: State) -> str:
        told = []
        for j, (one, other) in enumerate(zip(before, after, strict=True)):
            for was, now in zip((*one.heard, one.said), (*other.heard, other.said), strict=True):
                for spoken in self._logs[now][len(self._logs[was]) :]:
                    told.append(f"{self.names[j]}: {self._name(spoken[j])}")
            if other.tip != one.tip:
                told.append(f"{self.names[j]} stands on {other.tip.hex()[:6]}")
            for i, (was, now) in enumerate(zip(one.heads, other.heads, strict=True)):
                if was != now:
                    told.append(f"{self.names[j]} sees {self.names[i]} on {now.hex()[:6]}")
            if other.attempt != one.attempt:
                told.append(f"{self.names[j]} is in attempt {other.attempt}")
            if other.dead and not one.dead:
                told.append(f"{self.names[j]} dies")
        return "; ".join(told)

    def _name(self, id: bytes) -> str:
        said = self._said[id]
        return f"{said.author}'s {type(said.what).__name__.lower()} {id.hex()[:6]}"
