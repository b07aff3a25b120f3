"""What a node holds of the chain of its run: books, rosters whose rules hold, heads, states, contributions; and a bell.

    block         where this node stands         tree, states     rosters whose every byte is here, and what they make
    book, books   what was said in each round    heads, is_away   what each node said of itself last

`Held` takes in what is told to it and asks nobody (`open_keeper` listens and `open_examine` asks). The bell rings when
something changes: whoever waits for a thing looks again then, instead of at the clock.

What strangers can make it hold is bounded: books by `open_book`, heads and absences by LOOKED_FOR, all else by rules
that hold and by rounds long past being let go of.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import trio

from swarmnode.crdt.record import Element, Record
from swarmnode.protocols.chain.forks import DEPTH, Block, Tree
from swarmnode.protocols.chain.state import ChainRules, ChainState
from swarmnode.protocols.chain.statements import Head, InvalidStatement, Said, read
from swarmnode.protocols.methods.open.contributions import Contributions
from swarmnode.protocols.methods.open.roundlog import Book
from swarmnode.protocols.methods.open.states import NoState, States
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.reputation.account import MEASURED
from swarmnode.training.outer import OuterState

logger = logging.getLogger(__name__)

AWAY = "note/away"  # key of the record by which a node says that it takes no part for now
SPOKEN = ("commit", "cut", "reveal", "score", "roster")  # kinds of what is said in a round
LOOKED_FOR = 4096  # authors of heads that are kept, and of absences
BURST = 0.02  # seconds that who waits for news gives it to come: what is pushed comes many at a time

STATEMENTS = Metric("swarmnode_open_statements_total", COUNTER, "statements of rounds that were heard", "what")
BLOCKS = Metric("swarmnode_open_blocks", GAUGE, "rosters of the chain that are held, forks included")


def show(metrics: Metrics, statements: Callable[[], Counter[str]], blocks: Callable[[], int]) -> None:
    """Declare the metrics of a chain."""
    metrics.show(STATEMENTS, statements)
    metrics.show(BLOCKS, blocks)


class Held:
    """One node's holdings of the chain of one run. Nothing but `take` may be used before `begin`."""

    def __init__(
        self,
        rules: ChainRules,
        contributions: Contributions,
        states: Callable[[Callable[[bytes, bytes], bytes]], States],
        *,
        admits: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        """`states` makes the states, given where an accepted contribution's bytes are: see `States`.

        `admits` tells whose statements count, also where a roster quotes them.
        """
        self._admits = admits
        self.rules = rules
        self.contributions = contributions
        self.states = states(self._contribution)
        self.books: dict[bytes, Book] = {}  # by the block that the round builds on
        self.last_heads: dict[str, tuple[tuple[int, bytes], Said[Head]]] = {}  # by author, with its record's order
        self.tip = b""  # where this node stands
        self.astray = False  # electors follow what cannot be reached from here by replaying rosters
        self.apart = frozenset[PeerId]()  # members whose history parted from this node's for good (`open_splits`)
        self.counts: Counter[str] = Counter()
        self._tree: Tree | None = None
        self._away: OrderedDict[PeerId, tuple[tuple[int, bytes], bool]] = OrderedDict()  # with the record's order
        self._news = trio.Event()

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
            raise RuntimeError("Held.begin was never called")
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
        """Hold this chain from here on, and forget any other; the state hash there."""
        hash = await self.states.put(chain.tip, chain.round, state)
        self._tree = Tree(chain)
        self.books, self.astray = {}, False
        self.states.forget(self.tree)
        self.tip = chain.tip
        return hash

    def move(self, to: Block) -> None:
        """Stand on a block whose book is open; let go of what is long past."""
        self.tip = to.id
        self.tree.prune(to.id)
        self.states.forget(self.tree)
        for gone in [id for id in self.books if id not in self.tree]:
            del self.books[gone]
        self.contributions.forget(to.chain.round - DEPTH)

    def before(self, block: Block) -> OuterState | None:
        """The state before a block's roster, where it is kept."""
        try:
            return self.states[block.parent]
        except KeyError:
            return None

    async def hash_at(self, id: bytes) -> str:
        """The state hash at a block of the tree. Raises NoState."""
        if id not in self.states.hashes:
            if id not in self.tree:
                raise NoState("the round was let go of")
            await self.states.after(self.tree[id], self.tree)
        return self.states.hashes[id]

    def measured(self, block: Block) -> dict[PeerId, bytes]:
        """Commits by author whose contributions were measured in the round that a block ended, and are here."""
        book = self.books.get(block.parent)
        if book is None or block.roster is None:
            return {}
        listed = [entry.commit for entry in block.roster.entries if entry.verdict in MEASURED]
        return {book.commits[commit].author: commit for commit in listed if commit in book.reveals}

    def norms(self, book: Book) -> dict[bytes, float]:
        """Norm by commit of every contribution to a round that is here."""
        return {
            id: self.contributions[said.what.root].norm
            for id, said in book.reveals.items()
            if said.what.root in self.contributions
        }

    def _contribution(self, parent: bytes, commit: bytes) -> bytes:
        """The bytes that a commit of a round opened to. Raises KeyError."""
        return self.contributions[self.books[parent].reveals[commit].what.root].raw

    # --- who said what ----------------------------------------------------------------------------------------------

    def heads(self) -> dict[str, bytes]:
        """The roster that each elector follows, as far as this node heard."""
        return {author: said.what.roster for author, (_, said) in self.last_heads.items()}

    def followers(self, roster: bytes) -> list[PeerId]:
        """Whose head is this roster."""
        return [author for author, (_, head) in self.last_heads.items() if head.what.roster == roster]

    def is_away(self, peer: PeerId) -> bool:
        """Whether a node said that it takes no part for now."""
        return peer in self._away and self._away[peer][1]

    def take(self, element: Element) -> Said[Any] | None:
        """Take in a record of the replicated state, whatever it is; the statement that is new by it, if one is."""
        if not isinstance(element, Record) or not self._admits(element.author):
            return None
        if element.key == AWAY:
            self._take_absence(element)
        if element.tombstone or element.kind not in (*SPOKEN, "head"):
            return None
        try:
            said = read(element)
        except InvalidStatement as error:
            self.counts["invalid"] += 1
            logger.debug("%s says what nobody may say: %s", element.author, error)
            return None
        if isinstance(said.what, Head):
            taken = self._take_head(element, said)
        else:
            book = self.books.get(said.what.parent)
            taken = book is not None and book.take(said, element.sealed, trio.current_time())
        if not taken:
            return None
        self.counts["heard"] += 1
        self.ring()
        return said

    def _take_absence(self, record: Record) -> None:
        if record.order > self._away.get(record.author, ((0, b""), False))[0]:
            self._away[record.author] = (record.order, not record.tombstone)
            self._away.move_to_end(record.author)
            if len(self._away) > LOOKED_FOR:
                self._away.popitem(last=False)
            self.ring()

    def _take_head(self, record: Record, said: Said[Head]) -> bool:
        before = self.last_heads.get(said.author)
        if before is not None and before[0] >= record.order:
            return False
        elector = self.stands and said.author in self.block.chain.electors
        if before is None and len(self.last_heads) >= LOOKED_FOR and not elector:
            return False
        self.last_heads[said.author] = (record.order, said)
        return True

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
