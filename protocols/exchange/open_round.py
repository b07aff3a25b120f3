"""One round of the open exchange as this node takes part in it. What to do when is said by `protocols.chain.duty`.

`OpenRounds.run_round` is the whole of it: train, and whenever something was heard or a wait is over, do what an honest
node does next, until most electors stand behind a roster; then move there.

    train      inner steps from φ, until H are done or the window closes, and on while the rest goes on
    commit     bind oneself to the encoded pseudo-gradient
    cut        (judges) list the commits that are here
    reveal     open the commit once a quorum has cut
    judge      (judges) measure what was revealed; seal; open once a quorum has sealed
    lead       (the leader of the attempt) make the roster
    follow     (electors) sign the head; everybody moves when enough of them stand behind it

How long each wait is follows from what this swarm was seen to need (`deadlines`), and nobody waits for who is dead,
away or paused. Who may fail when, and what is then true: a node that says nothing is left out; a leader that is gone
makes the next attempt begin; too few judges end the round empty, at once where they are known to be gone, and after
some empty rounds fewer are enough. A node that cannot say a thing, as it said another before a restart, says nothing in
that part of the round.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import trio

from swarmnode.protocols.chain.beacon import HashChain
from swarmnode.protocols.chain.chainstate import ChainState
from swarmnode.protocols.chain.derive import NotHeld
from swarmnode.protocols.chain.duty import (
    Action,
    Fetch,
    Judge,
    Own,
    Timers,
    View,
    WriteCommit,
    WriteCut,
    WriteReveal,
    WriteRoster,
    WriteScores,
    WriteSeal,
    duties,
    follow,
)
from swarmnode.protocols.chain.electorate import leaders, participates, quorum
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    HASH,
    ONE,
    SALT,
    Commit,
    Cut,
    Entry,
    Head,
    Reveal,
    Roster,
    Said,
    Score,
    Scores,
    Seal,
    binding_of,
    nonce_hash,
    read,
)
from swarmnode.protocols.chain.validity import compose
from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.exchange.method import Overtaken, RoundResult
from swarmnode.protocols.exchange.open_book import Book
from swarmnode.protocols.exchange.open_keeper import BURST, Keeper, Lost
from swarmnode.protocols.exchange.open_scoring import Bench, batch_seed
from swarmnode.protocols.exchange.open_work import Work
from swarmnode.protocols.exchange.outcomes import Completed, Partial
from swarmnode.protocols.liveness import Liveness
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.statebackend import Said as SaidBefore
from swarmnode.protocols.statebackend import StateError
from swarmnode.protocols.statesync import StateSync
from swarmnode.protocols.trainer import TrainerDied

logger = logging.getLogger(__name__)

S = TypeVar("S", Commit, Cut, Reveal, Seal, Scores, Roster, Head)

WINDOW_SLACK = 2.0  # a round's training may take this multiple of what the median author needed in the last
QUIET = 0.3  # seconds in which what is waited for usually comes; only then are its authors pinged
SHORTEST_EMPTY = 1.0  # seconds of a round that ends empty as too few judges are there: they may come back
FETCH_AGAIN = 1.0  # seconds
WATCHED = 16  # electors of whom one must be there for those who are none to wait


@dataclass(frozen=True)
class RoundSettings:
    """From the RunSpec."""

    outer_lr: float
    codec: str
    floor: float  # seconds, of adaptive deadlines
    ceiling: float


@dataclass
class Turn:
    """This node's part in the round on one block, while it lasts."""

    block: Block
    book: Book
    began: float  # trio time
    bench: Bench
    ready: bool = False
    timers: Timers = field(default_factory=Timers)
    own: Own = field(default_factory=Own)
    judged: dict[bytes, Score] = field(default_factory=dict)
    waited_for: tuple[float, bytes] = (0.0, b"")  # since when others are waited for to stand behind a block, and which
    measuring: bool = False
    fetching: bool = False

    @property
    def chain(self) -> ChainState:
        return self.block.chain

    @property
    def follows_nothing(self) -> bool:
        """Whether the round before ended empty: its contributions wait to be offered again."""
        return self.block.roster is None and self.chain.empties > 0


class OpenRounds:
    """One node's rounds. The keeper stands on a block before the first."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        settings: RoundSettings,
        keeper: Keeper,
        work: Work,
        sync: StateSync,
        liveness: Liveness,
        newcomers: Callable[[], set[PeerId]],
        runner: Runner,
        secret: bytes,
        moved: Callable[[Block], None],
    ) -> None:
        """`secret`: 32 bytes that this identity has in this run, in every life. `moved` is told every move."""
        self._me, self._run_id, self._settings = me, run_id, settings
        self._keeper, self._work, self._sync = keeper, work, sync
        self._liveness, self._newcomers, self._runner = liveness, newcomers, runner
        self._secret, self._moved = secret, moved
        self._beacon = HashChain(secret)
        self._waits = {
            phase: AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)
            for phase in ("commits", "cuts", "reveals", "scores", "roster", "heads")
        }
        self._counted: dict[bytes, tuple[bytes, bytes]] = {}  # block -> own commit in it and its contribution
        self._nursery: trio.Nursery | None = None
        self.began = trio.current_time()  # when this node came to where it stands
        self.ended = trio.current_time()  # when its last round ended
        self.phase = "waiting"
        liveness.on_suspicion(keeper.ring)

    # --- the round --------------------------------------------------------------------------------------------------

    async def run_round(self) -> RoundResult | None:
        """Take part until most electors stand behind a roster, and move there; None where that is no later round."""
        turn = self._begin()
        self.phase = "training"
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._work.run, turn.chain.round, self._keeper.ring)
            self._nursery.start_soon(self._train_until_due, turn)
            self._nursery.start_soon(self._keep_time, turn)
            self._nursery.start_soon(self._look_for_electors, turn)
            while (found := await self._followed(turn)) is None:
                news = self._keeper.news
                if self._keeper.astray:
                    break
                for action in duties(turn.chain, self._keeper.rules, self._view(turn)):
                    await self._carry_out(turn, action)
                await news.wait()
                await trio.sleep(BURST)
            self._nursery.cancel_scope.cancel()
        if found is None:
            self._keeper.astray = False
            raise Overtaken("others are further than rosters can be replayed")
        return await self._move(turn, found)

    def _begin(self) -> Turn:
        """Take up the round on the present block, with what this node has already said in it."""
        block, book = self._keeper.block, self._keeper.book
        before = self._keeper.before(block)
        bench = Bench(
            self._work,
            self._runner,
            state=self._keeper.states[block.id],
            before=before if block.chain.undoable else None,
            seed=batch_seed(self._derive("nonce", block.chain), block.chain.seed),
            lr=self._settings.outer_lr,
            codec_name=self._settings.codec,
        )
        turn = Turn(block, book, self.began, bench)
        turn.own = Own(
            commit=book.own_commit(self._me),
            cut=next((said.what for said in book.cuts.values() if said.author == self._me), None),
            revealed=book.own_commit(self._me) is not None and not self._offered(turn),
        )
        if self._me in book.seals:  # what it sealed is known no more: it says nothing else
            turn.own = replace(turn.own, sealed=self._no_scores(turn.chain), opened=True)
        return turn

    def _view(self, turn: Turn) -> View:
        book = turn.book
        return View(
            me=self._me,
            ready=turn.ready,
            timers=turn.timers,
            own=turn.own,
            commits=book.commits,
            cuts=tuple(book.cuts.values()),
            reveals={id: said.what for id, said in book.reveals.items()},
            judged=turn.judged,
            seals={judge: said.what.seal for judge, said in book.seals.items()},
            scores=tuple(book.scores.values()),
            norms=self._keeper.norms(book),
        )

    async def _carry_out(self, turn: Turn, action: Action) -> None:
        match action:
            case WriteCommit():
                await self._commit(turn)
            case WriteCut(commits):
                await self._cut(turn, commits)
            case WriteReveal():
                await self._reveal(turn)
            case Judge(commits) if not turn.measuring and self._nursery is not None:
                turn.measuring = True
                self._nursery.start_soon(self._judge, turn, commits)
            case WriteSeal(scores):
                await self._seal(turn, scores)
            case WriteScores() if (sealed := turn.own.sealed) is not None:
                turn.own = replace(turn.own, opened=True)
                await self._say(sealed)
            case Fetch(commit) if not turn.fetching and self._nursery is not None:
                turn.fetching = True
                self._nursery.start_soon(self._fetch, turn, commit)
            case WriteRoster():
                await self._lead(turn, action)

    # --- what an author does ----------------------------------------------------------------------------------------

    async def _train_until_due(self, turn: Turn) -> None:
        """H inner steps, or until the window closes; after an empty round at once, as the work is there already."""
        closes = turn.began + turn.chain.window / 1000
        if not turn.follows_nothing:
            await self._keeper.until(lambda: self._work.enough, deadline=closes)
        turn.ready = participates(turn.chain, self._me) and turn.own.commit is None
        self.phase = "exchanging"
        self._keeper.ring()

    async def _commit(self, turn: Turn) -> None:
        turn.ready = False
        chain = turn.chain
        encoded = await self._work.contribute(chain.tip)
        if encoded is None:
            return
        root = await self._keeper.contributions.keep(encoded, chain.round)
        self._work.offered(root)
        salt = self._derive("salt", chain)[:SALT]
        binding = binding_of(self._run_id, chain.round, self._me, chain.tip, salt, root)
        said = await self._say(Commit(chain.round, chain.tip, binding, self._beacon.anchor))
        if said is None:
            await self._work.settle(accepted=False)
        else:
            turn.own = replace(turn.own, commit=said)

    async def _reveal(self, turn: Turn) -> None:
        turn.own = replace(turn.own, revealed=True)
        offer, commit = self._work.offer, turn.own.commit
        if offer is None or commit is None or not self._offered(turn):
            return
        self._keeper.contributions.serve(offer.root)
        salt = self._derive("salt", turn.chain)[:SALT]
        size = self._keeper.contributions.size
        await self._say(Reveal(turn.chain.round, turn.chain.tip, commit.id, salt, offer.root, size))

    def _offered(self, turn: Turn) -> bool:
        """Whether this node has a contribution to this round in hand."""
        offer = self._work.offer
        return offer is not None and offer.parent == turn.chain.tip and bool(offer.root)

    # --- what a judge does ------------------------------------------------------------------------------------------

    async def _cut(self, turn: Turn, commits: tuple[bytes, ...]) -> None:
        chain = turn.chain
        cut = Cut(chain.round, chain.tip, commits, nonce_hash(self._derive("nonce", chain)), self._proposal(turn))
        turn.own = replace(turn.own, cut=cut)
        await self._say(cut)

    def _proposal(self, turn: Turn) -> int:
        """The window that this judge proposes for the next round, ms: twice what the median author needed in this."""
        took = sorted(at - turn.began for at in turn.book.arrived.values())
        if not took or turn.follows_nothing:
            return turn.chain.window
        rules = self._keeper.rules
        wanted = int(1000 * WINDOW_SLACK * took[(len(took) - 1) // 2])
        return min(max(wanted, rules.shortest_window), rules.longest_window)

    async def _judge(self, turn: Turn, commits: tuple[bytes, ...]) -> None:
        """Measure those of these contributions that are here; the others are being fetched."""
        contributions, reveals = self._keeper.contributions, turn.book.reveals
        roots = {id: reveals[id].what.root for id in commits if id in reveals}
        for id, root in roots.items():
            if contributions.is_malformed(root) or reveals[id].what.size != contributions.size:
                turn.judged[id] = turn.bench.malformed(id)
        raws = {id: contributions[root].raw for id, root in roots.items() if root in contributions}
        try:
            turn.judged.update(await turn.bench.measure(raws, {id: turn.book.commits[id].author for id in raws}))
        except TrainerDied as error:
            logger.warning("round %d: the trainer died while judging: %s", turn.chain.round, error)
            await trio.sleep(FETCH_AGAIN)
        left = [id for id in roots if id not in turn.judged]
        if left:  # some are not here yet
            self._keeper.fetch_listed(turn.book)
            await self._keeper.until(
                lambda: any(roots[id] in contributions or contributions.is_malformed(roots[id]) for id in left),
                deadline=trio.current_time() + FETCH_AGAIN,
            )
        turn.measuring = False
        self._keeper.ring()

    async def _seal(self, turn: Turn, scores: tuple[Score, ...]) -> None:
        chain = turn.chain
        nonce, salt = self._derive("nonce", chain), self._derive("seal", chain)[:SALT]
        sealed = Scores(chain.round, chain.tip, nonce, salt, turn.bench.undo, scores)
        turn.own = replace(turn.own, sealed=sealed)
        if await self._say(Seal(chain.round, chain.tip, sealed.seal)) is None:
            turn.own = replace(turn.own, opened=True)

    def _no_scores(self, chain: ChainState) -> Scores:
        return Scores(chain.round, chain.tip, bytes(HASH), bytes(SALT), None, ())

    # --- what a leader does -----------------------------------------------------------------------------------------

    async def _lead(self, turn: Turn, action: WriteRoster) -> None:
        chain = turn.chain
        turn.own = replace(turn.own, led=turn.own.led | {action.attempt})
        anchor = chain.anchors.get(self._me)
        preimage = self._beacon.preimage(anchor) if anchor is not None else b""
        state = bytes.fromhex(self._keeper.states.hashes[chain.tip])
        try:
            roster = await self._runner(
                lambda: compose(
                    chain, self._keeper.rules, action.quoted, attempt=action.attempt, preimage=preimage, state=state
                )
            )
        except NotHeld as error:
            logger.warning("round %d cannot be led from here: %s", chain.round, error)
            return
        await self._say(roster)

    async def _fetch(self, turn: Turn, commit: bytes) -> None:
        self._keeper.fetch_listed(turn.book)
        await trio.sleep(FETCH_AGAIN)
        turn.fetching = False
        self._keeper.ring()

    # --- what everybody does ----------------------------------------------------------------------------------------

    async def _say(self, statement: S) -> Said[S] | None:
        """Sign a statement and pass it on; None where this node said something else before, or may not sign now."""
        try:
            record = await self._sync.write(statement.key, statement.value)
        except SaidBefore:
            logger.info("%s was said in an earlier life, with another value; nothing else is said", statement.key)
            return None
        except StateError as error:
            logger.warning("%s could not be said: %s", statement.key, error)
            return None
        self._keeper.hear(record)
        self._sync.hurry()
        said: Said[S] = read(record)
        return said

    async def _followed(self, turn: Turn) -> Block | None:
        """The block to move to, once enough electors stand behind it. Electors sign the head that they follow."""
        keeper = self._keeper
        chain = turn.chain
        wanted = follow(
            keeper.tree,
            keeper.rules,
            keeper.heads(),
            me=self._me,
            tip=chain.tip,
            attempt=turn.timers.attempt,
        )
        if wanted == chain.tip:
            return None
        try:
            block = await keeper.have(wanted, chain.tip)
        except Lost as error:
            logger.warning("round %d: a roster cannot be followed: %s", chain.round, error)
            return None
        if self._me in chain.electors and keeper.heads().get(self._me) != wanted:
            state = bytes.fromhex(keeper.states.hashes[wanted])
            if await self._say(Head(wanted, block.chain.round, state)) is not None:
                logger.debug("follows %s of round %d", wanted.hex()[:12], block.chain.round)
        return block if self._is_settled(turn, wanted) else None

    def _is_settled(self, turn: Turn, wanted: bytes) -> bool:
        """Whether enough electors stand behind what this node follows, or those that do not will not soon."""
        keeper, tip = self._keeper, turn.chain.tip
        fork = keeper.tree.fork_point(tip, wanted)
        first = keeper.tree.path(wanted)[len(keeper.tree.path(fork))]
        at = keeper.tree[fork].chain
        heads, now = keeper.heads(), trio.current_time()
        since, waiting = turn.waited_for
        if keeper.tree.support(first.id, heads) >= quorum(at, keeper.rules):
            self._waits["heads"].observe(now - since if waiting == first.id else 0.0)
            return True
        elsewhere = [peer for peer in at.electors if first.id not in keeper.tree.ancestry(heads.get(peer, b""))]
        if not any(self._is_there(peer) for peer in elsewhere):
            return True
        if waiting != first.id:
            turn.waited_for = since, waiting = now, first.id
            if self._nursery is not None:
                self._nursery.start_soon(self._await_heads, elsewhere, self._waits["heads"].seconds())
        return now - since >= self._waits["heads"].seconds()

    async def _await_heads(self, electors: list[PeerId], seconds: float) -> None:
        """Notice when electors that are waited for are gone, or when they had their time."""
        with self._liveness.watching([peer for peer in electors if peer != self._me]):
            await trio.sleep(seconds)
        self._keeper.ring()

    async def _move(self, turn: Turn, to: Block) -> RoundResult | None:
        """Stand on another block; work that it counts is settled, work that it leaves out returns to the residual."""
        keeper, tree = self._keeper, self._keeper.tree
        state = await keeper.states.after(to, tree)
        fork = tree.fork_point(turn.chain.tip, to.id)
        path = tree.path(to.id)
        new = path[len(tree.path(fork)) :]
        first = new[0] if fork == turn.chain.tip else None
        mine = turn.own.commit
        entries = first.roster.entries if first is not None and first.roster is not None else ()
        entry = next((entry for entry in entries if mine is not None and entry.commit == mine.id), None)
        counted = entry is not None and entry.verdict == ACCEPTED and self._offered(turn)
        if counted and mine is not None and first is not None and self._work.offer is not None:
            self._counted[first.id] = (mine.id, self._work.offer.root)
        worked = self._work.offered_work
        await self._settle(turn, entry, counted)
        await self._return_what_is_undone(path)
        loss = await self._work.move(state)
        await keeper.move(to)
        self._moved(to)
        self._counted = {id: kept for id, kept in self._counted.items() if id in keeper.tree}
        self.began = now = trio.current_time()
        seconds, self.ended = now - self.ended, now
        self.phase = "waiting"
        if to.chain.round <= turn.chain.round:
            return None
        outcome = self._outcome(turn, new[-1], counted)
        return RoundResult(
            to.chain.round - 1,
            outcome,
            keeper.states.hashes[to.id],
            loss,
            worked,
            seconds,
            outcome.members,
            counted=tuple(sorted(self.accepted_in(new[-1]))),
            roster=to.id.hex(),
        )

    async def _settle(self, turn: Turn, entry: Entry | None, counted: bool) -> None:
        """What the round made of this node's contribution."""
        if entry is None:
            self._work.take_back()
            return
        root = self._work.offer.root if self._work.offer is not None else b""
        await self._work.settle(accepted=counted)
        if counted and entry.clip < ONE:
            await self._work.return_encoded(self._keeper.contributions[root].raw, 1 - entry.clip / ONE)

    async def _return_what_is_undone(self, path: list[Block]) -> None:
        """Work of this node's that a switch or a revert left out goes back to the residual."""
        kept = {block.id for block in path}
        reverted = {block.parent for block in path if block.roster is not None and block.roster.revert}
        for id in [id for id in self._counted if id not in kept or id in reverted]:
            _, root = self._counted.pop(id)
            if root in self._keeper.contributions:
                await self._work.return_encoded(self._keeper.contributions[root].raw)

    def _outcome(self, turn: Turn, block: Block, counted: bool) -> Completed | Partial:
        before = {worked.author for worked in turn.chain.history[-1]} if turn.chain.history else set()
        accepted = self.accepted_in(block)
        missing = (before - accepted) if block.roster is not None else set()
        if not counted and participates(turn.chain, self._me):
            missing.add(self._me)
        members = len(accepted)
        return Partial(members, tuple(sorted(missing))) if missing else Completed(members)

    def accepted_in(self, block: Block) -> set[PeerId]:
        """Authors whose work a roster accepted."""
        if block.roster is None or not block.chain.history or not block.roster.accepted:
            return set()
        return {worked.author for worked in block.chain.history[-1]}

    # --- time -------------------------------------------------------------------------------------------------------

    async def _keep_time(self, turn: Turn) -> None:
        """Say which waits of the round are over; see `duty.Timers`. Only electors need to know."""
        if self._me not in turn.chain.electors:
            return
        book, chain = turn.book, turn.chain
        needed, order = quorum(chain, self._keeper.rules), leaders(chain, self._keeper.rules)
        closes = turn.began + chain.window / 1000 + self._settings.floor
        expected, judges = self._expected(turn), set(book.judges)
        await self._wait_for("commits", lambda: expected - book.arrived.keys(), since=turn.began, until=closes)
        self._set(turn, commits=True)
        cut = trio.current_time()
        await self._wait_for("cuts", lambda: judges - book.cuts_by_judge().keys())
        if len(book.cuts_by_judge()) >= needed:
            await self._wait_for("reveals", lambda: self._unjudged(turn))
            self._set(turn, contributions=True)
            await self._wait_for("scores", lambda: book.cuts_by_judge().keys() - book.scores_by_judge().keys())
            if len(book.scores_by_judge()) < needed <= len(book.seals):  # who sealed opens now: all that is late
                await self._wait_for("scores", lambda: book.seals.keys() - book.scores_by_judge().keys())
            self._set(turn, scores=True)
        if len(book.scores_by_judge()) >= needed:
            for attempt, leader in enumerate(order):
                self._set(turn, attempt=attempt)
                await self._wait_for("roster", partial(self._without_roster, turn, leader))
                if not self._is_open(turn):
                    await trio.sleep(self._waits["heads"].seconds())  # for heads; the round ends meanwhile
        else:
            logger.info("round %d: too few judges are there", chain.round)
            await trio.sleep_until(cut + SHORTEST_EMPTY)
        self._set(turn, attempt=len(order))

    def _without_roster(self, turn: Turn, leader: PeerId) -> set[PeerId]:
        """The leader, while no roster of this round is here whose rules hold."""
        return {leader} if self._is_open(turn) else set()

    def _is_open(self, turn: Turn) -> bool:
        """Whether no roster of this round is here whose rules hold."""
        return not self._keeper.tree.children(turn.chain.tip)

    async def _look_for_electors(self, turn: Turn) -> None:
        """Notice that nobody is there who could end the round."""
        electors = turn.chain.electors
        if self._me in electors:
            return
        floor = self._settings.floor
        patience = floor if turn.follows_nothing else turn.chain.window / 1000 + 2 * floor
        await trio.sleep_until(turn.began + patience)
        with self._liveness.watching(electors[:WATCHED]):
            await self._keeper.until(lambda: not any(self._is_there(peer) for peer in electors[:WATCHED]))
        logger.warning("round %d: no elector is there, so it ends empty", turn.chain.round)
        self._set(turn, attempt=len(leaders(turn.chain, self._keeper.rules)))

    def _set(self, turn: Turn, **timers: bool | int) -> None:
        turn.timers = replace(turn.timers, **timers)  # type: ignore[arg-type]
        self._keeper.ring()

    def _expected(self, turn: Turn) -> set[PeerId]:
        """Whose commits are worth waiting for: who had work accepted lately; where nobody had, who may begin."""
        lately = {worked.author for roster in turn.chain.history[-2:] for worked in roster}
        if not lately:
            lately = {self._me, *turn.chain.electors, *self._newcomers()}
        return {peer for peer in lately if participates(turn.chain, peer)}

    def _unjudged(self, turn: Turn) -> set[PeerId]:
        """Authors of listed commits that this judge has no score for, and judges without a cut."""
        book = turn.book
        lacking = {book.commits[id].author for id in book.listed() if id not in turn.judged and id in book.commits}
        return lacking if self._me in book.judges else set()

    async def _wait_for(
        self,
        phase: str,
        lacking: Callable[[], set[PeerId]],
        *,
        since: float | None = None,
        until: float = float("inf"),
    ) -> None:
        """Wait until nobody is lacking who is there, or as long as the phase may take; learn how long it took.

        A wait that ran out is learned from where many are lacking: the network is slower than it was. A few who keep
        silent and are there would else make every round longer than the last. A roster has one who is lacking.

        `since`: when it began, in trio time; `until`: it ends then in any case.
        """
        began = trio.current_time() if since is None else since
        deadline = min(began + self._waits[phase].seconds(), until)
        whole = await self._keeper.until(lambda: not lacking(), deadline=min(deadline, trio.current_time() + QUIET))
        if not whole:
            with self._liveness.watching(peer for peer in lacking() if peer != self._me):
                await self._keeper.until(lambda: not any(self._is_there(peer) for peer in lacking()), deadline=deadline)
        few = phase != "roster" and 2 * len(lacking()) < len(self._keeper.block.chain.electors)
        if not lacking() or (trio.current_time() >= deadline and not few):  # else who is gone made it short
            self._waits[phase].observe(trio.current_time() - began)

    def _is_there(self, peer: PeerId) -> bool:
        return peer == self._me or not (self._liveness.is_suspected(peer) or self._keeper.is_away(peer))

    def _derive(self, purpose: str, chain: ChainState) -> bytes:
        """32 secret bytes of this identity for one purpose in one round, the same after a restart."""
        text = f"swarmnode/open/{purpose}/1\0{chain.round:08d}".encode()
        return hashlib.sha256(self._secret + text + chain.tip).digest()
