"""How a roster that was heard of comes into the tree: have all that it rests on, check it, compute the state after it.

    a roster that was told        what it quotes, by id --> its rules --> contributions that it accepts --> its state
    an elector's head             the way to it from here, then each roster on that way

So whatever is in the tree is here with every byte. Each roster is one task, of which there are at most two per attempt,
as a book takes no more. Where something cannot be had, the task tries again, at longer and longer intervals, while the
roster may matter; a roster that breaks a rule is counted and never looked at again. After GIVE_UP tries in vain at what
one elector leads or follows, of one roster or of as many, this node may be too far from the others to replay rosters
(`Held.astray`), and has to catch up from a state of theirs.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import trio

from swarmnode.crdt.record import Element
from swarmnode.protocols.chain.forks import Block, empty_block
from swarmnode.protocols.chain.rules import InvalidRoster, NotHeld, advance, check, empty_id
from swarmnode.protocols.chain.statements import Head, Roster, Said
from swarmnode.protocols.methods.open.roundlog import Book
from swarmnode.protocols.methods.open.sources import Lost, Sources
from swarmnode.protocols.methods.open.states import NoState
from swarmnode.protocols.methods.open.store import Held
from swarmnode.protocols.methods.open.wire import MAX_ASKED
from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)

PUSH_TAKES = 0.5  # seconds in which what is missing usually comes by itself; then it is asked for
TRY_AGAIN = (0.5, 15.0)  # seconds between two attempts at what nobody has: at first, and at most
GIVE_UP = 3  # tries in vain at what an elector leads or follows after which a node may be too far away to replay
RECENT = 8  # rounds before the tip of which a roster is examined unasked


class Examiner:
    """Brings rosters into the tree of one node."""

    def __init__(
        self,
        *,
        me: PeerId,
        held: Held,
        sources: Sources,
        rng: random.Random,
        hear: Callable[[Element], None],
        open_round: Callable[[Block], Awaitable[None]],
    ) -> None:
        """`hear` takes in a record that was asked for; `open_round` opens the book of the round on a block."""
        self._me, self._held, self._sources, self._rng = me, held, sources, rng
        self._hear, self._open_round = hear, open_round
        self._examining: set[bytes] = set()  # rosters, and heads that are looked for
        self._invalid: set[bytes] = set()
        self._in_vain = Counter[PeerId]()  # tries since the last that brought something, by elector

    # --- what was heard of, in the background -----------------------------------------------------------------------

    def begin_roster(self, said: Said[Roster], nursery: trio.Nursery) -> None:
        """Bring a roster that was told into the tree, unless its round is long past."""
        book = self._held.books[said.what.parent]
        if book.chain.round >= self._held.block.chain.round - RECENT:
            self._begin(said.id, said.author, partial(self._examine, book, said), nursery)

    def begin_head(self, said: Said[Head], nursery: trio.Nursery) -> None:
        """Find the way to the roster that somebody follows, where it is an elector."""
        if said.author in self._held.block.chain.electors:
            self._begin(said.what.roster, said.author, partial(self._look_for_head, said), nursery)

    def _begin(self, id: bytes, elector: PeerId, work: Callable[[], Awaitable[None]], nursery: trio.Nursery) -> None:
        if id not in self._examining and id not in self._invalid and id not in self._held.tree:
            self._examining.add(id)
            nursery.start_soon(self._keep_trying, id, elector, work)

    async def _keep_trying(self, id: bytes, elector: PeerId, work: Callable[[], Awaitable[None]]) -> None:
        wait, most = TRY_AGAIN
        try:
            while id not in self._held.tree and id not in self._invalid:
                try:
                    await work()
                    del self._in_vain[elector]
                    return
                except Lost as error:
                    logger.debug("roster %s: %s; trying again", id.hex()[:12], error)
                    self._held.counts["lacking"] += 1
                    self._in_vain[elector] += 1
                    if self._in_vain[elector] >= GIVE_UP:
                        self._consider_astray()
                await trio.sleep(wait * self._rng.uniform(0.8, 1.2))
                wait = min(2 * wait, most)
                if not self._is_wanted(id):
                    return
        finally:
            self._examining.discard(id)

    def _consider_astray(self) -> None:
        """Most electors who are heard of follow what cannot be had: catching up from a state of theirs may help."""
        held = self._held
        heads = held.heads()
        heard = heads.keys() - held.apart - {self._me}
        electors = [peer for peer in held.block.chain.electors if peer in heard]
        unknown = sum(heads[peer] not in held.tree for peer in electors)
        if 2 * unknown > len(electors):
            held.astray = True
            held.ring()

    def _is_wanted(self, id: bytes) -> bool:
        """Whether a roster that could not be had may still matter."""
        held = self._held
        oldest = held.block.chain.round - RECENT
        recent = (book for book in held.books.values() if book.chain.round >= oldest)
        return id in held.heads().values() or any(id in book.rosters for book in recent)

    # --- one roster -------------------------------------------------------------------------------------------------

    async def _examine(self, book: Book, said: Said[Roster]) -> None:
        """Have all that a roster rests on, check it, and put it into the tree. Raises Lost."""
        held = self._held
        while held.books.get(book.chain.tip) is book:  # not let go of meanwhile
            lacking = _lacking(book, said.what)
            if lacking:
                await self._obtain_records(book, said, lacking)
                continue
            quotes = said.what.cuts, said.what.scores
            quoted = book.quoted(said.what.cuts, said.what.scores, held.norms(book))
            try:
                hash = await held.hash_at(book.chain.tip)
                derived = check(
                    book.chain, held.rules, said, quoted, state=bytes.fromhex(hash), derived=book.derived.get(quotes)
                )
                book.derived[quotes] = derived
                chain = advance(book.chain, held.rules, said, quoted, derived)
                await self._add(Block(said.id, book.chain.tip, chain, said.what))
                return
            except NotHeld as error:
                await self._obtain(book, said, error.commit)
            except NoState as error:
                raise Lost(str(error)) from None
            except InvalidRoster as error:
                logger.warning("a roster of round %d by %s is not valid: %s", said.what.round, said.author, error)
                held.counts["rosters_refused"] += 1
                self._invalid.add(said.id)
                return

    async def _add(self, block: Block) -> None:
        """Put a valid block into the tree, once the state after it is computed. Raises Lost."""
        held = self._held
        if block.id in held.tree:
            return
        try:
            await held.states.after(block, held.tree)
        except NoState as error:
            raise Lost(str(error)) from None
        if block.parent not in held.tree:
            raise Lost("the round was let go of")
        held.tree.add(block)
        await self._open_round(block)

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
                    nursery.start_soon(self._sources.fetch, book, entry.commit, said.author)
        await self._held.until(lambda: not self._sources.is_fetching(root))
        if root not in self._held.contributions:
            raise Lost("a contribution is with nobody who was asked, or no encoder makes it")

    async def _obtain_records(
        self, book: Book, said: Said[Roster], ids: list[bytes], *, reveals: Iterable[bytes] = ()
    ) -> None:
        """Have records by id. They usually come by themselves; else who should hold them is asked. Raises Lost."""
        reveals = [id for id in reveals if id not in book.reveals]

        def here() -> bool:
            return all(id in book.sealed for id in ids) and all(id in book.reveals for id in reveals)

        if await self._held.until(here, deadline=trio.current_time() + PUSH_TAKES):
            return
        for peer in self._sources.who_holds(said):
            wanted = [id for id in ids if id not in book.sealed][:MAX_ASKED]
            opened = [id for id in reveals if id not in book.reveals][: MAX_ASKED - len(wanted)]
            for element in await self._sources.records(peer, wanted, opened):
                self._hear(element)
            if here():
                return
        raise Lost(f"{len(ids)} records and {len(reveals)} reveals are with nobody who was asked")

    # --- the way to a roster that somebody follows --------------------------------------------------------------------

    async def look_for(self, id: bytes, peer: PeerId) -> None:
        """Have a roster that a peer follows in the tree; tries until it is, or until cancelled."""
        wait, most = TRY_AGAIN
        while id not in self._held.tree:
            try:
                await self._walk(id, peer)
            except Lost as error:
                logger.debug("on the way to %s: %s; trying again", id.hex()[:12], error)
            if id not in self._held.tree:
                await trio.sleep(wait)
                wait = min(2 * wait, most)

    async def _look_for_head(self, head: Said[Head]) -> None:
        """Find the way to the roster that an elector follows. Raises Lost."""
        id = head.what.roster
        if self._held.tree.add_empties(head.what):
            await self.settle_in(self._held.tree[id])
            return
        await self._walk(id, head.author)

    async def _walk(self, id: bytes, author: PeerId) -> None:
        """Take the way to a roster, from where it leaves what is known here. Raises Lost."""
        path = await self._sources.path(id, author)
        known = [number for number, step in enumerate(path.ids) if step in self._held.tree]
        for number in range(known[-1] + 1 if known else 0, len(path.ids)):
            await self._take_step(path.ids[number], path.empty[number], author)
            if path.ids[number] not in self._held.tree:  # nor will any be that builds on it
                raise Lost("no way leads there from here")

    async def _take_step(self, id: bytes, is_empty: bool, author: PeerId) -> None:
        held = self._held
        if is_empty:
            for block in [held.tree[parent] for parent in held.books]:
                if empty_id(block.chain) == id:
                    await self.have(id, block.id)
            return
        if not self._was_told(id):
            for peer in self._sources.who_is_near(author):
                for element in await self._sources.records(peer, (id,)):
                    self._hear(element)
                if self._was_told(id):
                    break
        for book in list(held.books.values()):
            if id in book.rosters and id not in held.tree:
                await self._examine(book, book.rosters[id])

    def _was_told(self, id: bytes) -> bool:
        return any(id in book.rosters for book in self._held.books.values())

    # --- blocks of the tree -----------------------------------------------------------------------------------------

    async def have(self, id: bytes, parent: bytes) -> Block:
        """The block that `duty.follow` named, with the state after it: in the tree, or the empty one. Raises Lost."""
        tree = self._held.tree
        if id not in tree:
            tree.add(empty_block(tree[parent].chain))
        block = tree[id]
        await self.settle_in(block)
        return block

    async def settle_in(self, block: Block) -> None:
        """Compute the states up to a block of the tree, and open the rounds on the way. Raises Lost."""
        held = self._held
        try:
            for each in held.tree.path(block.id):
                if each.id not in held.books and each.id in held.tree:
                    await held.states.after(each, held.tree)
                    await self._open_round(each)
            await held.states.after(block, held.tree)
        except NoState as error:
            raise Lost(str(error)) from None


def _lacking(book: Book, roster: Roster) -> list[bytes]:
    """Ids of quoted records that are not here."""
    lacking = [id for id in roster.cuts if id not in book.cuts]
    lacking += [id for id in roster.scores if id not in book.scores]
    return lacking + [entry.commit for entry in roster.entries if entry.commit not in book.commits]
