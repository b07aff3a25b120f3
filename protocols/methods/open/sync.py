"""How a node of an open run follows its chain: it listens to what is said and begins whatever follows from it.

    state feed --> books (what was said in each round) --> rosters whose rules hold --> tree, states
                                   ^                            ^
        records that are missing, asked for by id     contributions, from whoever has them

What is held is in `open_held.py`; a roster's way into the tree in `open_examine.py`; asking and answering peers in
`open_sources.py`. What follows from the tree is for `protocols.chain`; how this node takes part is in `open_round.py`.

Who may fail when, and what is then true: a feed that was too fast for this node is made up for by reading the last
rounds again; all that peers can do wrong is dealt with where they are asked. Books, contributions, states and blocks of
rounds long past are let go.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import trio

from swarmnode.crdt.record import Element
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import Cut, Head, Reveal, Roster, Said, subject
from swarmnode.protocols.methods.open.examine import Examiner
from swarmnode.protocols.methods.open.roundlog import Book
from swarmnode.protocols.methods.open.sources import Sources
from swarmnode.protocols.methods.open.store import AWAY, LOOKED_FOR, SPOKEN, Held
from swarmnode.protocols.network import Network, PeerId
from swarmnode.protocols.state.backend import StateBackend, StateError
from swarmnode.training.outer import OuterState

logger = logging.getLogger(__name__)

SELECTED = 8192  # records of one kind that are read of one round
REREAD = 2  # rounds before the tip that are read again where this node was too slow to follow what was said


class Keeper:
    """Keeps what one node holds in step with what is said. `begin` first; `run` while it should follow."""

    def __init__(
        self, *, run_id: str, held: Held, network: Network, rpc: Rpc, state: StateBackend, rng: random.Random
    ) -> None:
        self.held, self._state = held, state
        self.sources = Sources(run_id=run_id, held=held, network=network, rpc=rpc, rng=rng)
        self._examiner = Examiner(
            me=network.me, held=held, sources=self.sources, rng=rng, hear=self.hear, open_round=self._open
        )
        self._nursery: trio.Nursery | None = None

    # --- where this node stands -------------------------------------------------------------------------------------

    async def begin(self, chain: ChainState, state: OuterState) -> str:
        """Follow the chain from here on, and forget any other; the state hash there."""
        hash = await self.held.begin(chain, state)
        await self._open(self.held.block)
        return hash

    async def move(self, to: Block) -> None:
        """Stand on a block; let go of what is long past."""
        await self._open(to)  # a block that came with other empty ones may be in the tree before its round is open
        self.held.move(to)
        self._follow_up()
        self.held.ring()

    async def have(self, id: bytes, parent: bytes) -> Block:
        """The block that `duty.follow` named, with the state after it: in the tree, or the empty one. Raises Lost."""
        return await self._examiner.have(id, parent)

    async def look_for(self, id: bytes, peer: PeerId) -> None:
        """Have a roster that a peer follows in the tree; tries until it is, or until cancelled."""
        await self._examiner.look_for(id, peer)

    async def _open(self, block: Block) -> None:
        """Open the book of the round on a block, with what the state holds of it."""
        if block.id in self.held.books:
            return
        book = self.held.books[block.id] = Book(block.chain, self.held.rules)
        await self._read_round(book)
        self._follow_up()
        self.held.ring()

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

    def hear(self, element: Element) -> None:
        """Take in a record of the state, whatever it is, and begin what follows from it."""
        said = self.held.take(element)
        if said is not None:
            self._follow_up_on(said)

    async def _look_at_all(self) -> None:
        for prefix in ("head", AWAY):
            for element in await self._select(prefix, LOOKED_FOR):
                self.hear(element)
        if self.held.stands:
            oldest = self.held.block.chain.round - REREAD
            for book in [book for book in self.held.books.values() if book.chain.round >= oldest]:
                await self._read_round(book)
        self._follow_up()

    async def _read_round(self, book: Book) -> None:
        chain = book.chain
        for kind in SPOKEN:
            for element in await self._select(f"{kind}/{chain.round:08d}/{subject(chain.tip)}", SELECTED):
                self.hear(element)

    async def _select(self, prefix: str, limit: int) -> list[Element]:
        try:
            return await self._state.select(prefix, limit=limit)
        except StateError as error:
            logger.warning("what is said in rounds could not be read: %s", error)
            return []

    # --- what follows from what was heard ---------------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Begin what can be done with all that is here now."""
        if not self.held.stands or self._nursery is None:
            return
        for book in list(self.held.books.values()):
            for roster in book.rosters.values():
                self._follow_up_on(roster)
        for _, head in list(self.held.last_heads.values()):
            self._follow_up_on(head)
        self.fetch_listed(self.held.books.get(self.held.tip))

    def _follow_up_on(self, said: Said[Any]) -> None:
        """Begin what can be done with what was just heard."""
        if not self.held.stands or self._nursery is None:
            return
        match said.what:
            case Roster():
                self._examiner.begin_roster(said, self._nursery)
            case Head():
                self._examiner.begin_head(said, self._nursery)
            case Cut() | Reveal() if said.what.parent == self.held.tip:
                self.fetch_listed(self.held.book)

    def fetch_listed(self, book: Book | None) -> None:
        """Fetch contributions that the cuts of a round list, as soon as they are revealed."""
        if book is not None and self._nursery is not None:
            self.sources.fetch_listed(book, self._nursery)
