"""Asking peers for what a chain rests on, and answering them: records by id, the way to a roster, contributions.

Records usually come by themselves, with the replicated state; what did not come is asked for from whoever should have
it: the leader that quotes it, electors that follow the roster, neighbours. Each source is asked once, one after the
other; to try again is the caller's business. Every answer can be checked (`open_wire`), so a liar costs one call.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

import trio

from swarmnode.crdt.record import Element, InvalidRecord, open_element
from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.chain.statements import Reveal, Roster, Said
from swarmnode.protocols.methods.open.contributions import Missing
from swarmnode.protocols.methods.open.roundlog import Book
from swarmnode.protocols.methods.open.store import Held
from swarmnode.protocols.methods.open.wire import (
    BEFORE,
    MAX_BYTES,
    MAX_PATH,
    PATH,
    RECORDS,
    TIMEOUT,
    Before,
    BeforeQuery,
    Path,
    PathQuery,
    Records,
    RecordsQuery,
)
from swarmnode.protocols.network import Network, PeerId

logger = logging.getLogger(__name__)

SOURCES = 6  # peers asked for a thing, one after the other
FETCHES = 16  # contributions on their way at once


class Lost(Exception):
    """What is needed to follow a roster cannot be had now. The message says what."""


class Sources:
    """The peers of one node, as sources of what its chain rests on; and this node as a source of theirs."""

    def __init__(self, *, run_id: str, held: Held, network: Network, rpc: Rpc, rng: random.Random) -> None:
        self._run_id, self._held, self._network, self._rpc, self._rng = run_id, held, network, rpc, rng
        self._fetching: set[bytes] = set()  # contributions
        self._limit = trio.CapacityLimiter(FETCHES)
        rpc.serve(PATH, PathQuery, self._on_path)
        rpc.serve(RECORDS, RecordsQuery, self._on_records)
        rpc.serve(BEFORE, BeforeQuery, self._on_before)

    def who_holds(self, said: Said[Roster]) -> list[PeerId]:
        """Who should hold what a roster rests on: its leader, who follows it, and neighbours."""
        followers, neighbours = self._held.followers(said.id), self._neighbours()
        self._rng.shuffle(followers)
        self._rng.shuffle(neighbours)
        return self._others([said.author, *followers[:SOURCES], *neighbours])[:SOURCES]

    def who_is_near(self, first: PeerId) -> list[PeerId]:
        """A peer, and neighbours."""
        return self._others([first, *self._neighbours()])[:SOURCES]

    def _others(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in dict.fromkeys(peers) if peer != self._network.me]

    def _neighbours(self) -> list[PeerId]:
        return [view.peer for view in self._network.peers()]

    # --- questions --------------------------------------------------------------------------------------------------

    async def records(self, peer: PeerId, ids: Iterable[bytes], reveals: Iterable[bytes] = ()) -> list[Element]:
        """Records of this run that a peer holds of these, signatures checked; nothing where it does not answer."""
        query = RecordsQuery(self._run_id, tuple(ids), tuple(reveals))
        try:
            answer = await self._rpc.call(peer, RECORDS, query, Records, timeout=TIMEOUT)
            elements = [open_element(raw, self._network.verify) for raw in answer.sealed]
        except CallError as error:
            logger.debug("no records from %s: %s", peer, error)
            return []
        except InvalidRecord as error:
            logger.warning("%s sent a record that nobody signed: %s", peer, error)
            return []
        self._held.counts["asked_for"] += len(elements)
        return [element for element in elements if element.run == self._run_id]

    async def path(self, id: bytes, author: PeerId) -> Path:
        """The rosters that lead to one, by who follows it or a neighbour. Raises Lost."""
        for peer in self._others([author, *self._held.followers(id), *self._neighbours()])[:SOURCES]:
            try:
                return await self.path_of(peer, id)
            except Lost as error:
                logger.debug("%s", error)
        raise Lost("nobody who was asked knows the way to it")

    async def path_of(self, peer: PeerId, id: bytes) -> Path:
        """The rosters that lead to one, as a peer tells them. Raises Lost."""
        try:
            path = await self._rpc.call(peer, PATH, PathQuery(self._run_id, id), Path, timeout=TIMEOUT)
        except CallError as error:
            raise Lost(f"{peer} does not know the way to a roster: {error}") from None
        if not path.ids or path.ids[-1] != id:
            raise Lost(f"{peer} tells the way to another roster")
        return path

    async def chain_before(self, peer: PeerId, roster: bytes) -> bytes:
        """The encoded chain that a roster builds on, as a peer tells it. Raises Lost."""
        try:
            answer = await self._rpc.call(peer, BEFORE, BeforeQuery(self._run_id, roster), Before, timeout=TIMEOUT)
        except CallError as error:
            raise Lost(f"{peer} does not tell the chain before a roster: {error}") from None
        return answer.chain

    # --- contributions ----------------------------------------------------------------------------------------------

    def fetch_listed(self, book: Book, nursery: trio.Nursery) -> None:
        """Begin to fetch the contributions that the cuts list, as soon as they are revealed."""
        for id in book.listed():
            if id in book.reveals and self._may_fetch(book.reveals[id]):
                nursery.start_soon(self.fetch, book, id, "")

    def is_fetching(self, root: bytes) -> bool:
        """Whether a contribution is on its way."""
        return root in self._fetching

    async def fetch(self, book: Book, commit: bytes, also: PeerId) -> None:
        """Have a contribution here, unless nobody who is asked has it; `also` is asked second, where one is named."""
        said = book.reveals[commit]
        if not self._may_fetch(said):
            return
        root = said.what.root
        self._fetching.add(root)
        try:
            async with self._limit:
                neighbours = self._neighbours()
                some = self._rng.sample(neighbours, min(len(neighbours), SOURCES))
                sources = self._others([said.author, *([also] if also else []), *some])
                await self._held.contributions.fetch(root, book.chain.round, sources)
                self._held.counts["contributions"] += 1
        except Missing as error:
            logger.debug("%s", error)
        finally:
            self._fetching.discard(root)
            self._held.ring()

    def _may_fetch(self, reveal: Said[Reveal]) -> bool:
        contributions, root = self._held.contributions, reveal.what.root
        known = root in contributions or contributions.is_malformed(root)
        return not known and root not in self._fetching and reveal.what.size == contributions.size

    # --- answers ----------------------------------------------------------------------------------------------------

    def _admit(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if not self._held.stands:
            raise Refuse("starting", "this node does not know the state of the run yet; ask again later")

    async def _on_path(self, peer: PeerId, query: PathQuery) -> Path:
        self._admit(query.run_id)
        if query.tip not in self._held.tree:
            raise Refuse("unknown-roster", "this node does not know that roster")
        path = self._held.tree.path(query.tip)[-MAX_PATH:]
        return Path(tuple(block.id for block in path), tuple(block.roster is None for block in path))

    async def _on_before(self, peer: PeerId, query: BeforeQuery) -> Before:
        self._admit(query.run_id)
        tree = self._held.tree
        if query.roster not in tree or tree[query.roster].parent not in tree:
            raise Refuse("unknown-roster", "this node does not know that roster, or not what it builds on")
        return Before(tree[tree[query.roster].parent].chain.encode())

    async def _on_records(self, peer: PeerId, query: RecordsQuery) -> Records:
        self._admit(query.run_id)
        found: list[bytes] = []
        wanted, opened = set(query.ids), set(query.reveals)
        for book in self._held.books.values():
            found += [book.sealed[id] for id in wanted & book.sealed.keys()]
            found += [book.sealed[book.reveals[id].id] for id in opened & book.reveals.keys()]
        while sum(map(len, found)) > MAX_BYTES:
            found.pop()
        return Records(tuple(found))
