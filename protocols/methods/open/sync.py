"""How a node of an open run follows its chain: it hears what is said, and gets what that rests on and is not here.

    state feed --> logs (what was said in each round) --> rosters whose rules hold --> tree, states      (`store.py`)
                                   ^                            ^
        records that are missing, asked for by id     contributions, from whoever has them

A roster comes into the tree when all that it rests on is here: what it quotes, by id; its rules; the contributions that
it accepts; the state after it. A validator's head leads to a roster by the way to it from here, each roster on that way
in turn. So whatever is in the tree is here with every byte. Each roster is one task, of AT_ONCE that a validator leads
or follows. Where something cannot be had, it tries again, at longer and longer intervals, while the roster may matter;
a roster that breaks a rule is never looked at again. After GIVE_UP tries in vain at what one validator leads or follows
this node may be too far from the others to replay rosters (`ChainStore.out_of_sync`), and catches up from a state.

Records usually come by themselves, with the replicated state; what did not come is asked for from whoever should have
it, each once, one after the other: the leader that quotes it, validators that follow the roster, neighbours. A feed
that was too fast for this node is made up for by reading the last rounds again.

What nodes ask one another about the chain; all else travels as records of the replicated state:

    chain.path      how do I get to this roster?        Path: the ids of the rosters up to it, and the chain before one
    chain.records   what do these rosters rest on?      Records: they, what they quote, what opens what they accept
                    or these cuts?                      they, and the commits that they list
    chain.tip       where do you stand?                 see `join.py`

Every answer can be checked, by rules, digests or signatures. So a liar costs its caller one call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import trio

from swarmnode.crdt.record import Element, InvalidRecord, Record, open_element
from swarmnode.protocols.calls.rpc import CallError, Refuse
from swarmnode.protocols.chain.duty import RoundLog
from swarmnode.protocols.chain.forks import Block, empty_block
from swarmnode.protocols.chain.rules import InvalidRoster, NotHeld, advance, check, empty_id
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import HASH, AvailabilityVote, ForkChoiceVote, Reveal, Roster, Said, subject
from swarmnode.protocols.methods.context import Context, admit
from swarmnode.protocols.methods.open.store import (
    AWAY,
    LOOKED_FOR,
    NOTHING_NAMED,
    ROUND_KINDS,
    VOTE_KIND,
    ChainStore,
    Lost,
)
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.catchup import CatchUp
from swarmnode.protocols.wire import Message, WireError, within
from swarmnode.training.outer import OuterState

logger = logging.getLogger(__name__)

SAID = "what is said in rounds"
SELECTED = 8192  # records of one kind that are read of one round
IN_A_TURN = 32  # records inserted before others have their turn: of rosters 10 ms
REREAD = 2  # rounds before the tip that are read again where this node was too slow to follow what was said
SOURCES = 6  # peers asked for a thing, one after the other
FETCHES = 16  # contributions on their way at once, but for those that take long
PUSH_TAKES = 0.5  # seconds in which what is missing usually comes by itself; then it is asked for
TRY_AGAIN = (0.5, 15.0)  # seconds between two attempts at what nobody has: at first, and at most
AT_ONCE = 16  # of one validator's words that are looked into at a time: the others wait till this node moves
GIVE_UP = 3  # tries in vain at what a validator leads or follows after which a node may be too far away to replay
RECENT = 8  # rounds from where this node stands up to which a roster is examined

PATH, RECORDS = "chain.path", "chain.records"
MAX_PATH = 160  # rosters in one path, or asked about at once; more than the rounds that can be gone back
MAX_BYTES = 900_000  # of records in one answer
TIMEOUT = 5.0  # seconds for an answer


@dataclass(frozen=True)
class PathQuery:
    """`since`: a roster on the way; the chain that it builds on is wanted as well."""

    run_id: str
    tip: bytes
    since: bytes = b""


@dataclass(frozen=True)
class Path:
    """Ids of rosters, each on the one before, the last being the one asked for; `empty` says which are empty."""

    ids: tuple[bytes, ...]
    empty: tuple[bool, ...]
    before: bytes = b""  # an encoded ChainState, of which the roster asked about has the digest; empty: it is not here

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.empty) or len(self.ids) > MAX_PATH:
            raise WireError(f"a path of {len(self.ids)} rosters with {len(self.empty)} marks")
        if any(len(id) != HASH for id in self.ids):
            raise WireError("a path over what is no id of a roster")


@dataclass(frozen=True)
class RecordsQuery(Message):
    run_id: str
    ids: Annotated[tuple[bytes, ...], within(0, MAX_PATH)]  # of rosters, or of cuts


@dataclass(frozen=True)
class Records:
    """The first of what was asked about, as many as there is room for, each with what is held of what it rests on."""

    sealed: tuple[bytes, ...]


class ChainSync:
    """Keeps what one node holds in step with what is said. `begin` first; `run` while it should follow."""

    def __init__(self, parts: Context, store: ChainStore) -> None:
        self._parts, self.store, self.catch_up = parts, store, CatchUp(parts)
        self._state = parts.state
        self._run_id, self._network, self._rpc, self._rng = parts.run_id, parts.network, parts.rpc, parts.rng
        self._runner = parts.runner
        self._examining = Counter[bytes]()  # tries in vain at rosters, and at heads that are looked for
        self._completing: set[bytes] = set()  # cuts; apart, as a head may name anything
        self._invalid: set[bytes] = set()
        self._in_hand = Counter[PeerId]()  # of them, by who said so
        self._in_vain = Counter[PeerId]()  # tries since the last that brought something, by validator
        self._fetching: set[bytes] = set()  # contributions
        self._limit = trio.CapacityLimiter(FETCHES)
        self._own: set[bytes] = set()  # records of this node that are inserted, and that the feed will bring once more
        self._called = -1  # the RECENT rounds in which those with whom it judged long ago last called it to them
        self._nursery: trio.Nursery | None = None
        parts.rpc.serve(PATH, PathQuery, self._on_path)
        parts.rpc.serve(RECORDS, RecordsQuery, self._on_records)

    # --- where this node stands -------------------------------------------------------------------------------------

    async def begin(self, chain: ChainState, state: OuterState) -> None:
        """Follow the chain from here on, and forget any other."""
        await self.store.begin(chain, state)
        await self._read_words()
        await self._open_round(self.store.block)
        self._serve_state()

    async def move(self, to: Block) -> None:
        """Stand on a block, of which the state is kept; let go of what is long past."""
        await self._open_round(to)  # it may have come into the tree with other empty ones, and no round be open yet
        self.store.move(to)
        self._invalid &= {id for log in self.store.logs.values() for id in log.rosters}
        self._in_hand = +self._in_hand  # without those of whom nothing is
        self._serve_state()
        self._follow_up()
        self.store.notify()

    def _serve_state(self) -> None:
        block, state = self.store.block, self.store.state(self.store.tip)
        assert state is not None, "the state on which a node stands is kept"
        self.catch_up.serve_state(block.chain.round, self.store.hashes[block.id], state)

    async def _open_round(self, block: Block) -> None:
        """Open the log of the round on a block, with what the state holds of it; not of one that was let go of."""
        if block.id in self.store.logs or block.id not in self.store.tree:
            return
        log = self.store.logs[block.id] = RoundLog(block.chain, self.store.rules)
        await self._read_round(log)
        self._follow_up()
        self.store.notify()

    # --- hearing ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow what is said, until cancelled; a second call while one runs waits until cancelled."""
        if self._nursery is not None:
            await trio.sleep_forever()
        with self._state.watch() as changes:
            async with trio.open_nursery() as self._nursery:
                try:
                    await self._read_all()
                    async for change in changes:
                        element = change.element
                        if isinstance(element, Record) and element.id in self._own:
                            self._own.discard(element.id)
                        else:
                            self.insert(element)
                        if change.lost:
                            await self._read_all()
                finally:
                    self._nursery = None

    def insert(self, element: Element, named: Mapping[bytes, PeerId] = NOTHING_NAMED) -> None:
        if (said := self.store.insert(element, named)) is not None:
            self._follow_up_on(said)

    def insert_own(self, record: Record) -> Said[Any] | None:
        """Insert what this node has just signed; the statement, where it is new. The feed brings it once more."""
        if (said := self.store.insert(record)) is not None:
            if self._nursery is not None:
                self._own.add(record.id)
            self._follow_up_on(said)
        return said

    async def _read_all(self) -> None:
        self._own.clear()  # the feed may not bring them any more
        await self._read_words()
        if self.store.stands:
            oldest = self.store.block.chain.round - REREAD
            for log in [log for log in self.store.logs.values() if log.chain.round >= oldest]:
                await self._read_round(log)
        self._follow_up()

    async def _read_words(self) -> None:
        """Votes and absences; those of validators and of this node, however many strangers said something as well."""
        known = {*self.store.block.chain.validators, self._network.me} if self.store.stands else ()
        for key in (VOTE_KIND, AWAY):
            await self._read(key, LOOKED_FOR)
            for author in known:
                await self._read(key, 1, author)

    async def _read_round(self, log: RoundLog) -> None:
        for kind in ROUND_KINDS:
            await self._read(f"{kind}/{log.chain.round:08d}/{subject(log.chain.tip)}", SELECTED)

    async def _read(self, prefix: str, most: int, author: PeerId | None = None) -> None:
        for number, element in enumerate(await self._state.readable(prefix, most, SAID, author=author), 1):
            self.insert(element)
            if number % IN_A_TURN == 0:
                await trio.lowlevel.checkpoint()

    # --- what follows from what was heard ---------------------------------------------------------------------------

    def _follow_up(self) -> None:
        """Begin what can be done with all that is here now."""
        if not self.store.stands or self._nursery is None:
            return
        for log in list(self.store.logs.values()):
            for roster in log.rosters.values():
                self._follow_up_on(roster)
        for _, head in list(self.store.last_heads.values()):
            self._follow_up_on(head)
        if (here := self.store.logs.get(self.store.tip)) is not None:
            for cut in list(here.cuts.values()):
                self._complete(here, cut)
            self.fetch_listed(here)

    def _follow_up_on(self, said: Said[Any]) -> None:
        """Begin what can be done with what was just heard."""
        store = self.store
        if not store.stands or self._nursery is None:
            return
        match said.what:
            case Roster():
                log = store.logs[said.what.parent]
                if abs(log.chain.round - store.block.chain.round) <= RECENT:
                    self._begin(said.id, said)
            case ForkChoiceVote() if (
                said.author in store.block.chain.validators + store.tree[store.tree.root].chain.validators
                or said.author in store.gone_on()
            ):
                if said.what.round <= store.block.chain.round + RECENT:  # a paused node keeps no more than that
                    self._begin(said.what.roster, said)
                else:
                    self._consider_out_of_sync()
            case AvailabilityVote() | Reveal() if said.what.parent == store.tip:
                if isinstance(said.what, AvailabilityVote):
                    self._complete(store.log, said)
                self.fetch_listed(store.log)

    def _begin(self, id: bytes, said: Said[Roster] | Said[ForkChoiceVote]) -> None:
        """Have this roster, which was said or is followed, in the tree."""
        known = id in self._examining or id in self._invalid or id in self.store.tree
        if not known and self._nursery is not None and self._in_hand[said.author] < AT_ONCE:
            self._examining[id] = 0
            self._in_hand[said.author] += 1
            self._nursery.start_soon(self._keep_trying, id, said)

    async def _keep_trying(self, id: bytes, said: Said[Any]) -> None:
        wait, most = TRY_AGAIN
        try:
            while id not in self.store.tree and id not in self._invalid:
                try:
                    if isinstance(said.what, Roster):
                        await self._examine(said)
                    else:
                        await self._look_for_head(said)
                    del self._in_vain[said.author]
                    return
                except Lost as error:
                    logger.debug("roster %s: %s; trying again", id.hex()[:12], error)
                    self.store.counts["lacking"] += 1
                    self._examining[id] += 1
                    self._in_vain[said.author] += 1
                    if self._in_vain[said.author] >= GIVE_UP:
                        self._consider_out_of_sync()
                await trio.sleep(wait * self._rng.uniform(0.8, 1.2))
                wait = min(2 * wait, most)
                if not self._is_wanted(id):
                    return
        finally:
            del self._examining[id]
            self._in_hand[said.author] -= 1

    def _consider_out_of_sync(self) -> None:
        """Most validators, of now or before a cut, or who call, follow what cannot be had: their state may help."""
        store, heads = self.store, self.store.signed_heads()
        heard = heads.keys() - store.diverged - {self._network.me}
        # One that is looked for the first time tells nothing: else a single liar has slow nodes catch up all the time.
        vain = {peer for peer in heard if heads[peer] not in store.tree and self._examining.get(heads[peer], 1) > 0}
        now, before = heard.intersection(store.block.chain.validators), {*store.tree[store.tree.root].chain.validators}
        span = store.block.chain.round // RECENT  # in each, this node is called once: they may have left since then
        called = self._called != span and 2 * len(vain & store.gone_on()) > len(store.company)
        if called or 2 * len(vain & now) > len(now) or 2 * len(vain & before) > len(before):  # also of those not heard
            self._called = span if called else self._called
            store.out_of_sync = True
            store.notify()

    def _is_wanted(self, id: bytes) -> bool:
        """Whether a roster that could not be had may still matter."""
        oldest = self.store.block.chain.round - RECENT
        recent = (log for log in self.store.logs.values() if log.chain.round >= oldest)
        return id in self.store.signed_heads().values() or any(id in log.rosters for log in recent)

    # --- one roster -------------------------------------------------------------------------------------------------

    async def _examine(self, said: Said[Roster]) -> None:
        """Have all that a roster rests on, check it, and put it into the tree. Raises Lost."""
        store, roster, quotes = self.store, said.what, (said.what.cuts, said.what.scores)
        while (log := store.logs.get(roster.parent)) is not None:  # not let go of meanwhile
            if log.lacking(roster):
                await self._obtain_records(log, said)
            quoted, known = log.quoted(roster, store.norms(log)), log.derived.get(quotes)
            try:
                state = bytes.fromhex(await store.hash_at(log.chain.tip))
                derived = check(log.chain, store.rules, said, quoted, state=state, derived=known)
                log.derived[quotes] = derived
                chain = advance(log.chain, store.rules, said, quoted, derived)
                await self._add(Block(said.id, log.chain.tip, chain, roster))
                return
            except NotHeld as error:
                await self._obtain(log, said, error.commit)
            except InvalidRoster as error:
                logger.warning("a roster of round %d by %s is not valid: %s", roster.round, said.author, error)
                store.counts["rosters_refused"] += 1
                self._invalid.add(said.id)
                return

    async def _add(self, block: Block) -> None:
        """Put a valid block into the tree, once the state after it is computed. Raises Lost."""
        store = self.store
        if block.id in store.tree:
            return
        await store.state_after(block)
        if block.parent not in store.tree:
            raise Lost("the round was let go of")
        store.tree.add(block)
        await self._open_round(block)

    async def _obtain(self, log: RoundLog, said: Said[Roster], commit: bytes) -> None:
        """Have what a commit opens to: its reveal and its contribution. Raises Lost."""
        if commit not in log.reveals:
            await self._obtain_records(log, said, reveal_of=commit)
        root = log.reveals[commit].what.root
        async with trio.open_nursery() as nursery:  # all of them at once: the others will be needed next
            for entry in said.what.accepted:
                if entry.commit in log.reveals:
                    nursery.start_soon(self._fetch, log, entry.commit, said.author)
        await self.store.until(lambda: root not in self._fetching)
        if root not in self.store.contributions:
            raise Lost("a contribution is with nobody who was asked, or no encoder makes it")

    async def _obtain_records(
        self, log: RoundLog, said: Said[Roster] | Said[AvailabilityVote], *, reveal_of: bytes = b""
    ) -> None:
        """Have the records that a roster quotes or a cut lists, or what opens a commit that it accepts. Raises Lost."""

        def here() -> bool:
            return reveal_of in log.reveals if reveal_of else not log.lacking(said.what)

        if await self.store.until(here, deadline=trio.current_time() + PUSH_TAKES):
            return
        for peer in self._who_holds(said):
            await self._insert_from(peer, said.id, log.lacking(said.what), said.author)
            if here():
                return
        raise Lost("a reveal" if reveal_of else f"{len(log.lacking(said.what))} records are with nobody who was asked")

    def _complete(self, log: RoundLog, cut: Said[AvailabilityVote]) -> None:
        if log.lacking(cut.what) and cut.id not in self._completing and self._nursery is not None:
            self._completing.add(cut.id)
            self._nursery.start_soon(self._obtain_listed, log, cut)

    async def _obtain_listed(self, log: RoundLog, cut: Said[AvailabilityVote]) -> None:
        """Have the commits that a cut lists: it cannot be quoted without; and of one author a log takes few unasked."""
        wait, most = TRY_AGAIN
        try:
            while log.chain.tip == self.store.tip:
                with suppress(Lost):
                    return await self._obtain_records(log, cut)
                await trio.sleep(wait)
                wait = min(2 * wait, most)
        finally:
            self._completing.discard(cut.id)

    async def _insert_from(self, peer: PeerId, id: bytes, named: Iterable[bytes], by: PeerId) -> None:
        """Insert what a peer gives of a roster or a cut; `named`: ids that are needed, as `by` names them."""
        needed = dict.fromkeys(named, by)
        for element in await self.ask_records(peer, [id]):
            self.insert(element, needed)

    # --- the way to a roster that somebody follows --------------------------------------------------------------------

    async def look_for(self, id: bytes, peer: PeerId) -> None:
        """Have a roster that a peer follows in the tree; tries until it is, or until cancelled."""
        wait, most = TRY_AGAIN
        while id not in self.store.tree:
            try:
                await self._walk(id, peer)
            except Lost as error:
                logger.debug("on the way to %s: %s; trying again", id.hex()[:12], error)
            if id not in self.store.tree:
                await trio.sleep(wait)
                wait = min(2 * wait, most)

    async def _look_for_head(self, head: Said[ForkChoiceVote]) -> None:
        """Find the way to the roster that a validator follows. Raises Lost."""
        id = head.what.roster
        if self.store.tree.add_empties(head.what):
            await self._compute(self.store.tree[id])
        else:
            await self._walk(id, head.author)

    async def _walk(self, id: bytes, author: PeerId) -> None:
        """Take the way to a roster, from where it leaves what is known here. Raises Lost."""
        tree, path = self.store.tree, await self._ask_path(id, author)
        known = [number for number, step in enumerate(path.ids) if step in tree]
        for number in range(known[-1] + 1 if known else 0, len(path.ids)):
            before = tree[path.ids[number - 1]].chain.round if number and path.ids[number - 1] in tree else 0
            if before >= self.store.block.chain.round + RECENT:
                self._consider_out_of_sync()
                raise Lost("it is too far from here to be replayed")
            await self._take_step(path.ids[number], path.empty[number], author)
            if path.ids[number] not in tree:  # nor will any be that builds on it
                raise Lost("no way leads there from here")

    async def _take_step(self, id: bytes, is_empty: bool, author: PeerId) -> None:
        store = self.store
        if is_empty:
            for block in [store.tree[parent] for parent in store.logs]:
                if empty_id(block.chain) == id:
                    await self.have(id, block.id)
            return
        for peer in self._others([author, *self._neighbours()])[:SOURCES]:
            if any(id in log.rosters for log in store.logs.values()):
                break
            await self._insert_from(peer, id, [id], author)
        for log in list(store.logs.values()):
            if id in log.rosters and id not in store.tree:
                await self._examine(log.rosters[id])

    async def have(self, id: bytes, parent: bytes) -> Block:
        """The block that `duty.follow` named, with the state after it: in the tree, or the empty one. Raises Lost."""
        tree = self.store.tree
        if id not in tree:
            tree.add(empty_block(tree[parent].chain))
        block = tree[id]
        await self._compute(block)  # it may be let go of meanwhile
        return block

    async def _compute(self, block: Block) -> None:
        """Compute the states up to a block of the tree, and open the rounds on the way. Raises Lost."""
        store = self.store
        for each in store.tree.path(block.id):
            if each.id not in store.logs and each.id in store.tree:
                await store.state_after(each)
                await self._open_round(each)
        await store.state_after(block)

    # --- contributions ----------------------------------------------------------------------------------------------

    def fetch_listed(self, log: RoundLog) -> None:
        """Fetch contributions that the cuts of a round list, as soon as they are revealed."""
        if self._nursery is not None:
            for id in log.listed():
                if id in log.reveals and self._may_fetch(log.reveals[id]):
                    self._nursery.start_soon(self._fetch, log, id, "")

    async def _fetch(self, log: RoundLog, commit: bytes, also: PeerId) -> None:
        """Have a contribution here, unless nobody who is asked has it; `also` is asked second, where one is named."""
        said = log.reveals[commit]
        if not self._may_fetch(said):
            return
        root = said.what.root
        self._fetching.add(root)
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self._take_turn)
                if also or log.chain.round >= self.store.block.chain.round:  # else only a roster may need it
                    some = self._rng.sample(near := self._neighbours(), min(len(near), SOURCES))
                    sources = self._others([said.author, *([also] if also else []), *some])
                    await self.store.contributions.fetch(root, log.chain.round, sources)
                    self.store.counts["contributions"] += 1
            except Lost as error:
                logger.debug("%s", error)
            finally:
                nursery.cancel_scope.cancel()
                self._fetching.discard(root)
                self.store.notify()

    async def _take_turn(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be one of FETCHES, for as long as an honest source takes: what a liar sends may never end."""
        async with self._limit:
            task_status.started()
            await trio.sleep(self.store.contributions.ends_within)

    def _may_fetch(self, reveal: Said[Reveal]) -> bool:
        contributions, root = self.store.contributions, reveal.what.root
        known = root in contributions or contributions.is_malformed(root)
        return not known and root not in self._fetching

    # --- questions --------------------------------------------------------------------------------------------------

    def _who_holds(self, said: Said[Roster] | Said[AvailabilityVote]) -> list[PeerId]:
        """Who should hold what a roster or a cut rests on: its author, who follows it, and neighbours."""
        followers, neighbours = self.store.followers(said.id), self._neighbours()
        self._rng.shuffle(followers)
        self._rng.shuffle(neighbours)
        return self._others([said.author, *followers[:SOURCES], *neighbours])[:SOURCES]

    def _others(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return [peer for peer in dict.fromkeys(peers) if peer != self._network.me]

    def _neighbours(self) -> list[PeerId]:
        return [view.peer for view in self._network.peers()]

    async def ask_records(self, peer: PeerId, ids: Iterable[bytes]) -> list[Element]:
        """Records of this run on which these rosters or cuts rest, as far as a peer holds them, signatures checked.

        It gives them one by one, and perhaps not all at once; nothing where it does not answer.
        """
        query, verify = RecordsQuery(self._run_id, tuple(ids)), self._network.verify
        answer = await self._rpc.ask(peer, RECORDS, query, Records, timeout=TIMEOUT)
        sealed = answer.sealed if answer is not None else ()
        try:
            elements = await self._runner(lambda: [open_element(raw, verify) for raw in sealed])
        except InvalidRecord as error:
            logger.warning("%s sent a record that nobody signed: %s", peer, error)
            return []
        self.store.counts["asked_for"] += len(elements)
        return [element for element in elements if element.run == self._run_id]

    async def _ask_path(self, id: bytes, author: PeerId) -> Path:
        """The rosters that lead to one, by who follows it or a neighbour. Raises Lost."""
        for peer in self._others([author, *self.store.followers(id), *self._neighbours()])[:SOURCES]:
            try:
                return await self.path_of(peer, id)
            except Lost as error:
                logger.debug("%s", error)
        raise Lost("nobody who was asked knows the way to it")

    async def path_of(self, peer: PeerId, id: bytes, *, since: bytes = b"") -> Path:
        """The rosters that lead to one, as a peer tells them, and the chain before `since`. Raises Lost."""
        try:
            path = await self._rpc.call(peer, PATH, PathQuery(self._run_id, id, since), Path, timeout=TIMEOUT)
        except CallError as error:
            raise Lost(f"{peer} does not know the way to a roster: {error}") from None
        if not path.ids or path.ids[-1] != id:
            raise Lost(f"{peer} tells the way to another roster")
        return path

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _on_path(self, peer: PeerId, query: PathQuery) -> Path:
        admit(self._parts, None, query.run_id, stands=self.store.stands)
        if query.tip not in self.store.tree:
            raise Refuse("unknown-roster", "this node does not know that roster")
        tree = self.store.tree
        path, parent = tree.path(query.tip)[-MAX_PATH:], tree[query.since].parent if query.since in tree else b""
        before = tree[parent].chain.encode() if parent in tree else b""
        return Path(tuple(block.id for block in path), tuple(block.roster is None for block in path), before)

    async def _on_records(self, peer: PeerId, query: RecordsQuery) -> Records:
        admit(self._parts, None, query.run_id, stands=self.store.stands)
        found, room = list[bytes](), MAX_BYTES
        for id in query.ids:
            log = next((log for log in self.store.logs.values() if id in log.rosters or id in log.cuts), None)
            more = log.records_of(id) if log is not None else []
            room -= sum(map(len, more))
            if room < 0:
                break
            found += more
        return Records(tuple(found))
