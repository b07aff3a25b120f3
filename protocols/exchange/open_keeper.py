"""What a node of an open run knows of its chain: it hears what is said, checks it, and says which roster is best.

    state feed --> books (what was said in each round) --> rosters whose rules hold --> tree, states --> best
                                   ^                            ^
        records that are missing, asked for by id     contributions, from whoever has them

A roster enters the tree when everything that it quotes is here, its rules hold, and the state after it was computed:
so a head that this node signs names what it holds with every byte and serves. What follows from the tree is for
`protocols.chain`; how this node takes part is in `open.py`.

Who may fail when, and what is then true: a record that does not come is asked for from whoever should have it, again
and again while its roster may matter; a roster that breaks a rule is counted and never looked at again; a leader that
quotes what nobody has costs a task per roster, of which there are at most two per attempt. Books, contributions, states
and blocks of rounds long past are let go.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import trio

from swarmnode.crdt.elements import Element, open_element
from swarmnode.crdt.record import InvalidRecord, Record
from swarmnode.protocols.chain.chainstate import ChainRules, ChainState
from swarmnode.protocols.chain.derive import NotHeld
from swarmnode.protocols.chain.forks import DEPTH, Block, Tree, empty_block
from swarmnode.protocols.chain.statements import Cut, Head, InvalidStatement, Reveal, Roster, Said, read, subject
from swarmnode.protocols.chain.validity import InvalidRoster, advance, check, empty_id
from swarmnode.protocols.exchange.open_book import Book
from swarmnode.protocols.exchange.open_contributions import Contributions, Missing
from swarmnode.protocols.exchange.open_states import NoState, States
from swarmnode.protocols.exchange.open_wire import (
    MAX_ASKED,
    MAX_BYTES,
    MAX_PATH,
    PATH,
    RECORDS,
    TIMEOUT,
    Path,
    PathQuery,
    Records,
    RecordsQuery,
)
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import Network, PeerId
from swarmnode.protocols.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.statebackend import StateBackend, StateError
from swarmnode.training.outer import OuterState

logger = logging.getLogger(__name__)

AWAY = "note/away"  # key of the record by which a node says that it takes no part for now
SPOKEN = ("commit", "cut", "reveal", "score", "roster")  # kinds of what is said in a round
SELECTED = 8192  # records of one kind that are read of one round
LOOKED_FOR = 4096  # heads read when this node starts or was too slow to follow
PUSH_TAKES = 0.5  # seconds in which what is missing usually comes by itself; then it is asked for
TRY_AGAIN = (0.5, 15.0)  # seconds between two attempts at what nobody has: at first, and at most
GIVE_UP = 3  # attempts at a roster after which a node may be too far from the others to replay
SOURCES = 6  # peers asked for a thing, one after the other
FETCHES = 16  # contributions on their way at once
REREAD = 2  # rounds before the tip that are read again where this node was too slow to follow what was said
BURST = 0.02  # seconds that who waits for news gives it to come: what is pushed comes many at a time
RECENT = 8  # rounds before the tip of which a roster is examined unasked

STATEMENTS = Metric("swarmnode_open_statements_total", COUNTER, "statements of rounds that were heard", "what")
BLOCKS = Metric("swarmnode_open_blocks", GAUGE, "rosters of the chain that are held, forks included")


def show(metrics: Metrics, statements: Callable[[], Counter[str]], blocks: Callable[[], int]) -> None:
    """Declare the metrics of a chain."""
    metrics.show(STATEMENTS, statements)
    metrics.show(BLOCKS, blocks)


class Lost(Exception):
    """What is needed to follow a roster cannot be had now. The message says what."""


class Keeper:
    """One node's view of the chain of one run. `begin` first; `run` while it should follow."""

    def __init__(
        self,
        *,
        run_id: str,
        rules: ChainRules,
        network: Network,
        rpc: Rpc,
        state: StateBackend,
        contributions: Contributions,
        states: Callable[[Callable[[bytes, bytes], bytes]], States],
        rng: random.Random,
    ) -> None:
        self._run_id, self.rules = run_id, rules
        self._network, self._rpc, self._state = network, rpc, state
        self.contributions = contributions
        self.states = states(self._contribution)
        self._rng = rng
        self._tree: Tree | None = None
        self.books: dict[bytes, Book] = {}  # by the block that the round builds on
        self._heads: dict[str, tuple[tuple[int, bytes], Said[Head]]] = {}  # by author, with the order of its record
        self._examining: set[bytes] = set()  # rosters, and heads that are looked for
        self._invalid: set[bytes] = set()
        self._nursery: trio.Nursery | None = None
        self._fetching: set[bytes] = set()  # contributions
        self._limit = trio.CapacityLimiter(FETCHES)
        self._away: OrderedDict[PeerId, tuple[tuple[int, bytes], bool]] = OrderedDict()  # with the order of the record
        self._news = trio.Event()
        self.tip = b""  # where this node stands
        self.astray = False  # electors follow what cannot be reached from here by replaying rosters
        self.counts: Counter[str] = Counter()
        rpc.serve(PATH, PathQuery, self._on_path)
        rpc.serve(RECORDS, RecordsQuery, self._on_records)

    def measure(self, metrics: Metrics) -> None:
        """Show what is heard and held."""
        show(metrics, lambda: self.counts, lambda: len(self._tree) if self._tree is not None else 0)

    # --- where the chain stands -------------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """Whether `begin` was called."""
        return self._tree is not None

    @property
    def tree(self) -> Tree:
        if self._tree is None:
            raise RuntimeError("Keeper.begin was never called")
        return self._tree

    @property
    def block(self) -> Block:
        """Where this node stands."""
        return self.tree[self.tip]

    @property
    def book(self) -> Book:
        """The round that this node takes part in."""
        return self.books[self.tip]

    async def begin(self, chain: ChainState, state: OuterState) -> str:
        """Follow the chain from here on, and forget any other; the state hash there."""
        hash = await self.states.put(chain.tip, chain.round, state)
        self._tree = Tree(chain)
        self.books, self.astray = {}, False
        self.states.forget(self.tree)
        self.tip = chain.tip
        await self._open(self.block)
        return hash

    def heads(self) -> dict[str, bytes]:
        """The roster that each elector follows, as far as this node heard."""
        return {author: said.what.roster for author, (_, said) in self._heads.items()}

    def best(self) -> Block:
        """The block to follow."""
        return self.tree[self.tree.best(self.heads())]

    def support(self, id: bytes) -> int:
        """How many electors follow a block or what builds on it."""
        return self.tree.support(id, self.heads())

    def valid_rosters(self, parent: bytes) -> list[Block]:
        """Rosters on a block whose rules hold, that of the lowest attempt first."""
        book = self.books.get(parent)
        found = [self.tree[id] for id in (book.rosters if book is not None else ()) if id in self.tree]
        return sorted(found, key=lambda block: (block.roster.attempt if block.roster else 0, block.id))

    async def move(self, to: Block) -> None:
        """Stand on a block; let go of what is long past."""
        await self._open(to)  # a block that came with other empty ones may be in the tree before its round is open
        self.tip = to.id
        self.tree.prune(to.id)
        self.states.forget(self.tree)
        for gone in [id for id in self.books if id not in self.tree]:
            del self.books[gone]
        self.contributions.forget(to.chain.round - DEPTH)
        self._follow_up()
        self.ring()

    async def have(self, id: bytes, parent: bytes) -> Block:
        """The block that `duty.follow` named, with the state after it: in the tree, or the empty one. Raises Lost."""
        if id not in self.tree:
            self.tree.add(empty_block(self.tree[parent].chain))
        block = self.tree[id]
        await self._settle_in(block)
        return block

    def before(self, block: Block) -> OuterState | None:
        """The state before a block's roster, where it is kept."""
        try:
            return self.states[block.parent]
        except KeyError:
            return None

    # --- waiting ----------------------------------------------------------------------------------------------------

    @property
    def news(self) -> trio.Event:
        """Set when something changes after now."""
        return self._news

    def ring(self) -> None:
        """Something changed: who waits looks again."""
        self._news.set()
        self._news = trio.Event()

    async def until(self, true: Callable[[], bool], *, deadline: float = float("inf")) -> bool:
        """Wait until `true()`, asked whenever something changed, or the deadline in trio time; whether it is true."""
        with trio.move_on_at(deadline):
            while not true():
                await self._news.wait()
                await trio.sleep(BURST)
            return True
        return true()

    def is_away(self, peer: PeerId) -> bool:
        """Whether a node said that it takes no part for now."""
        return peer in self._away and self._away[peer][1]

    # --- hearing ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow what is said, until cancelled; a second call while one runs waits until cancelled."""
        if self._nursery is not None:
            await trio.sleep_forever()
        with self._state.watch() as changes:
            async with trio.open_nursery() as self._nursery:
                try:
                    await self._look_at_all()
                    async for change in changes:
                        self.hear(change.element)
                        if change.lost:
                            await self._look_at_all()
                finally:
                    self._nursery = None
                    self._examining.clear()
                    self._fetching.clear()

    async def _look_at_all(self) -> None:
        for prefix in ("head", AWAY):
            for element in await self._select(prefix, LOOKED_FOR):
                self.hear(element)
        if self.stands:
            oldest = self.block.chain.round - REREAD
            for book in [book for book in self.books.values() if book.chain.round >= oldest]:
                await self._read_round(book)
        self._follow_up()

    async def _select(self, prefix: str, limit: int) -> list[Element]:
        try:
            return await self._state.select(prefix, limit=limit)
        except StateError as error:
            logger.warning("what is said in rounds could not be read: %s", error)
            return []

    def hear(self, element: Element) -> None:
        """Take in a record of the state, whatever it is."""
        if not isinstance(element, Record):
            return
        if element.key == AWAY and element.order > self._away.get(element.author, ((0, b""), False))[0]:
            self._away[element.author] = (element.order, not element.tombstone)
            self._away.move_to_end(element.author)
            if len(self._away) > LOOKED_FOR:
                self._away.popitem(last=False)
            self.ring()
        if element.tombstone or element.kind not in (*SPOKEN, "head"):
            return
        try:
            said = read(element)
        except InvalidStatement as error:
            self.counts["invalid"] += 1
            logger.debug("%s says what nobody may say: %s", element.author, error)
            return
        if isinstance(said.what, Head):
            before = self._heads.get(said.author)
            if before is not None and before[0] >= element.order:
                return
            if before is None and len(self._heads) >= LOOKED_FOR and not self._may_matter(said.author):
                return
            self._heads[said.author] = (element.order, said)
        else:
            book = self.books.get(said.what.parent)
            if book is None or not book.take(said, element.sealed, trio.current_time()):
                return
        self.counts["heard"] += 1
        self._follow_up_on(said)
        self.ring()

    def _may_matter(self, author: str) -> bool:
        return self.stands and author in self.block.chain.electors

    async def _open(self, block: Block) -> None:
        """Open the book of the round on a block, with what the state holds of it."""
        if block.id in self.books:
            return
        book = self.books[block.id] = Book(block.chain, self.rules)
        await self._read_round(book)
        self._follow_up()
        self.ring()

    async def _read_round(self, book: Book) -> None:
        chain = book.chain
        for kind in SPOKEN:
            for element in await self._select(f"{kind}/{chain.round:08d}/{subject(chain.tip)}", SELECTED):
                self.hear(element)

    # --- what follows from what was heard ---------------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Begin what can be done with all that is here now."""
        if self._tree is None or self._nursery is None:
            return
        for book in list(self.books.values()):
            for roster in book.rosters.values():
                self._follow_up_on(roster)
        for _, head in list(self._heads.values()):
            self._follow_up_on(head)
        self.fetch_listed(self.books.get(self.tip))

    def _follow_up_on(self, said: Said[Any]) -> None:
        """Begin what can be done with what was just heard."""
        if self._tree is None or self._nursery is None:
            return
        match said.what:
            case Roster() as roster:
                book = self.books[roster.parent]
                if book.chain.round >= self.block.chain.round - RECENT:
                    self._begin(said.id, partial(self._examine, book, said))
            case Head() as head:
                if said.author in self.block.chain.electors:
                    self._begin(head.roster, partial(self._look_for, said))
            case Cut() | Reveal() if said.what.parent == self.tip:
                self.fetch_listed(self.book)

    def _begin(self, id: bytes, work: Callable[[], Awaitable[None]]) -> None:
        if id in self._examining or id in self._invalid or id in self.tree or self._nursery is None:
            return
        self._examining.add(id)
        self._nursery.start_soon(self._carry_out, id, work)

    async def _carry_out(self, id: bytes, work: Callable[[], Awaitable[None]]) -> None:
        wait, most = TRY_AGAIN
        tries = 0
        try:
            while id not in self.tree and id not in self._invalid:
                try:
                    await work()
                    return
                except Lost as error:
                    logger.debug("roster %s: %s; trying again", id.hex()[:12], error)
                    self.counts["lacking"] += 1
                    tries += 1
                    if tries >= GIVE_UP:
                        self._consider_astray()
                await trio.sleep(wait * self._rng.uniform(0.8, 1.2))
                wait = min(2 * wait, most)
                if not self._is_wanted(id):
                    return
        finally:
            self._examining.discard(id)

    def _consider_astray(self) -> None:
        """Most electors who are heard of follow what cannot be had: catching up from a state of theirs may help."""
        electors = [peer for peer in self.block.chain.electors if peer in self._heads and peer != self._network.me]
        unknown = sum(self._heads[peer][1].what.roster not in self.tree for peer in electors)
        if 2 * unknown > len(electors):
            self.astray = True
            self.ring()

    def _is_wanted(self, id: bytes) -> bool:
        """Whether a roster that could not be had may still matter."""
        if id in self.heads().values():
            return True
        oldest = self.block.chain.round - RECENT
        return any(id in book.rosters and book.chain.round >= oldest for book in self.books.values())

    # --- rosters ----------------------------------------------------------------------------------------------------

    async def _examine(self, book: Book, said: Said[Roster]) -> None:
        """Have all that a roster rests on, check it, and put it into the tree. Raises Lost."""
        while self.books.get(book.chain.tip) is book:  # not let go of meanwhile
            lacking = self._lacking(book, said.what)
            if lacking:
                await self._obtain_records(book, said, lacking)
                continue
            norms = self.norms(book)
            quoted = book.quoted(said.what.cuts, said.what.scores, norms)
            try:
                hash = await self._hash_at(book.chain.tip)
                check(book.chain, self.rules, said, quoted, state=bytes.fromhex(hash))
                chain = advance(book.chain, self.rules, said.id, said.what, quoted)
                block = Block(said.id, book.chain.tip, chain, said.what)
                await self._add(block)
                return
            except NotHeld as error:
                await self._obtain(book, said, error.commit)
            except NoState as error:
                raise Lost(str(error)) from None
            except InvalidRoster as error:
                logger.warning("a roster of round %d by %s is not valid: %s", said.what.round, said.author, error)
                self.counts["rosters_refused"] += 1
                self._invalid.add(said.id)
                return

    async def _hash_at(self, id: bytes) -> str:
        """The state hash at a block of the tree. Raises NoState."""
        if id not in self.states.hashes:
            if id not in self.tree:
                raise NoState("the round was let go of")
            await self.states.after(self.tree[id], self.tree)
        return self.states.hashes[id]

    async def _add(self, block: Block) -> None:
        """Put a valid block into the tree, once the state after it is computed. Raises Lost."""
        if block.id in self.tree:
            return
        try:
            await self.states.after(block, self.tree)
        except NoState as error:
            raise Lost(str(error)) from None
        if block.parent not in self.tree:
            raise Lost("the round was let go of")
        self.tree.add(block)
        await self._open(block)

    async def _settle_in(self, block: Block) -> None:
        """Compute the states up to a block of the tree, and open the rounds on the way. Raises Lost."""
        try:
            for each in self.tree.path(block.id):
                if each.id not in self.books and each.id in self.tree:
                    await self.states.after(each, self.tree)
                    await self._open(each)
            await self.states.after(block, self.tree)
        except NoState as error:
            raise Lost(str(error)) from None

    def _lacking(self, book: Book, roster: Roster) -> list[bytes]:
        """Ids of quoted records that are not here."""
        lacking = [id for id in roster.cuts if id not in book.cuts]
        lacking += [id for id in roster.scores if id not in book.scores]
        return lacking + [entry.commit for entry in roster.entries if entry.commit not in book.commits]

    async def _obtain(self, book: Book, said: Said[Roster], commit: bytes) -> None:
        """Have what a commit opens to: its reveal and its contribution. Raises Lost."""
        if commit not in book.commits:
            await self._obtain_records(book, said, [commit])
        if commit not in book.reveals:
            await self._obtain_records(book, said, [], reveals=[entry.commit for entry in said.what.accepted])
        if commit not in book.reveals:
            raise Lost("a reveal is with nobody who was asked")
        root = book.reveals[commit].what.root
        async with trio.open_nursery() as nursery:  # all of them at once: the others will be needed next
            for entry in said.what.accepted:
                if entry.commit in book.reveals:
                    nursery.start_soon(self._fetch, book, entry.commit, said.author)
        await self.until(lambda: root not in self._fetching)
        if root not in self.contributions:
            raise Lost("a contribution is with nobody who was asked, or no encoder makes it")

    async def _obtain_records(
        self, book: Book, said: Said[Roster], ids: list[bytes], *, reveals: Iterable[bytes] = ()
    ) -> None:
        """Have records by id. They usually come by themselves; else who should hold them is asked. Raises Lost."""
        reveals = [id for id in reveals if id not in book.reveals]

        def here() -> bool:
            return all(id in book.sealed for id in ids) and all(id in book.reveals for id in reveals)

        if await self.until(here, deadline=trio.current_time() + PUSH_TAKES):
            return
        for peer in self._who_holds(said):
            wanted = tuple(id for id in ids if id not in book.sealed)[:MAX_ASKED]
            opened = tuple(id for id in reveals if id not in book.reveals)[: MAX_ASKED - len(wanted)]
            for element in await self._ask_records(peer, RecordsQuery(self._run_id, wanted, opened)):
                self.hear(element)
            if here():
                return
        raise Lost(f"{len(ids)} records and {len(reveals)} reveals are with nobody who was asked")

    async def _ask_records(self, peer: PeerId, query: RecordsQuery) -> list[Element]:
        try:
            answer = await self._rpc.call(peer, RECORDS, query, Records, timeout=TIMEOUT)
            elements = [open_element(raw, self._network.verify) for raw in answer.sealed]
        except CallError as error:
            logger.debug("no records from %s: %s", peer, error)
            return []
        except InvalidRecord as error:
            logger.warning("%s sent a record that nobody signed: %s", peer, error)
            return []
        self.counts["asked_for"] += len(elements)
        return [element for element in elements if element.run == self._run_id]

    def _who_holds(self, said: Said[Roster]) -> list[PeerId]:
        """Who should hold what a roster rests on: its leader, who follows it, and neighbours."""
        followers = [author for author, (_, head) in self._heads.items() if head.what.roster == said.id]
        neighbours = [view.peer for view in self._network.peers()]
        self._rng.shuffle(followers)
        self._rng.shuffle(neighbours)
        return self._others([said.author, *followers[:SOURCES], *neighbours])[:SOURCES]

    def _others(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in dict.fromkeys(peers) if peer != self._network.me]

    # --- contributions ----------------------------------------------------------------------------------------------

    def _contribution(self, parent: bytes, commit: bytes) -> bytes:
        """The bytes that a commit of a round opened to. Raises KeyError."""
        return self.contributions[self.books[parent].reveals[commit].what.root].raw

    def norms(self, book: Book) -> dict[bytes, float]:
        """Norm by commit of every contribution to a round that is here."""
        return {
            id: self.contributions[said.what.root].norm
            for id, said in book.reveals.items()
            if said.what.root in self.contributions
        }

    def fetch_listed(self, book: Book | None) -> None:
        """Fetch contributions that the cuts list, as soon as they are revealed."""
        if book is None or self._nursery is None:
            return
        for id in book.listed():
            if id in book.reveals and self._may_fetch(book.reveals[id]):
                self._nursery.start_soon(self._fetch, book, id, "")

    def _may_fetch(self, reveal: Said[Reveal]) -> bool:
        root = reveal.what.root
        known = root in self.contributions or self.contributions.is_malformed(root)
        return not known and root not in self._fetching and reveal.what.size == self.contributions.size

    async def _fetch(self, book: Book, commit: bytes, also: PeerId) -> None:
        """Have a contribution here, unless nobody who is asked has it; `also` is asked second."""
        said = book.reveals[commit]
        if not self._may_fetch(said):
            return
        root = said.what.root
        self._fetching.add(root)
        try:
            async with self._limit:
                neighbours = [view.peer for view in self._network.peers()]
                some = self._rng.sample(neighbours, min(len(neighbours), SOURCES))
                sources = self._others([said.author, *([also] if also else []), *some])
                await self.contributions.fetch(root, book.chain.round, sources)
                self.counts["contributions"] += 1
        except Missing as error:
            logger.debug("%s", error)
        finally:
            self._fetching.discard(root)
            self.ring()

    # --- heads that are not in the tree -----------------------------------------------------------------------------

    async def _look_for(self, head: Said[Head]) -> None:
        """Find the way to the roster that an elector follows. Raises Lost."""
        id = head.what.roster
        if self.tree.add_empties(head.what):
            await self._settle_in(self.tree[id])
            return
        path = await self._ask_path(id, head.author)
        for step, is_empty in zip(path.ids, path.empty, strict=True):
            if step not in self.tree:
                await self._take_step(step, is_empty, head.author)
        if id not in self.tree:
            raise Lost("no way leads there from here")

    async def look_for(self, id: bytes, peer: PeerId) -> None:
        """Have a roster that a peer follows in the tree, where that can be done now."""
        wait, most = TRY_AGAIN
        while id not in self.tree:
            try:
                path = await self._ask_path(id, peer)
                for step, is_empty in zip(path.ids, path.empty, strict=True):
                    if step not in self.tree:
                        await self._take_step(step, is_empty, peer)
            except Lost as error:
                logger.debug("on the way to %s: %s; trying again", id.hex()[:12], error)
            if id not in self.tree:
                await trio.sleep(wait)
                wait = min(2 * wait, most)

    async def _take_step(self, id: bytes, is_empty: bool, author: PeerId) -> None:
        if is_empty:
            for block in [self.tree[parent] for parent in self.books]:
                if empty_id(block.chain) == id:
                    await self.have(id, block.id)
            return
        if not any(id in book.rosters for book in self.books.values()):
            for peer in self._others([author, *(view.peer for view in self._network.peers())])[:SOURCES]:
                for element in await self._ask_records(peer, RecordsQuery(self._run_id, (id,))):
                    self.hear(element)
                if any(id in book.rosters for book in self.books.values()):
                    break
        for book in list(self.books.values()):
            if id in book.rosters and id not in self.tree:
                await self._examine(book, book.rosters[id])

    async def _ask_path(self, id: bytes, author: PeerId) -> Path:
        followers = [peer for peer, (_, said) in self._heads.items() if said.what.roster == id]
        neighbours = [view.peer for view in self._network.peers()]
        for peer in self._others([author, *followers, *neighbours])[:SOURCES]:
            try:
                path = await self._rpc.call(peer, PATH, PathQuery(self._run_id, id), Path, timeout=TIMEOUT)
            except CallError as error:
                logger.debug("%s does not know the way to a roster: %s", peer, error)
                continue
            if path.ids and path.ids[-1] == id:
                return path
        raise Lost("nobody who was asked knows the way to it")

    # --- answers ----------------------------------------------------------------------------------------------------

    def _admit(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if self._tree is None:
            raise Refuse("starting", "this node does not know the state of the run yet; ask again later")

    async def _on_path(self, peer: PeerId, query: PathQuery) -> Path:
        self._admit(query.run_id)
        if query.tip not in self.tree:
            raise Refuse("unknown-roster", "this node does not know that roster")
        path = self.tree.path(query.tip)[-MAX_PATH:]
        return Path(tuple(block.id for block in path), tuple(block.roster is None for block in path))

    async def _on_records(self, peer: PeerId, query: RecordsQuery) -> Records:
        self._admit(query.run_id)
        found: list[bytes] = []
        wanted, opened = set(query.ids), set(query.reveals)
        for book in self.books.values():
            found += [book.sealed[id] for id in wanted & book.sealed.keys()]
            found += [book.sealed[book.reveals[id].id] for id in opened & book.reveals.keys()]
        while sum(map(len, found)) > MAX_BYTES:
            found.pop()
        return Records(tuple(found))
