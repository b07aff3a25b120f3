"""What a node holds of the chain of its run: what was said in each round, the tree of valid rosters, the shared states.

    store.insert(element)        a record of the replicated state; the statement that is new by it, if one is
    store.add(block)             a valid roster into the tree, of which every byte is here
    await store.state_after(b)   the shared state that a block makes: computed here, believed of nobody
    store.move(block)            stand there; let go of what is long past
    await store.until(…)         wait for what others say: whoever waits looks again when something changed

`ChainStore` asks nobody (`sync.py` does). What strangers can make it hold is bounded: a round's log by MAX_AUTHORS
and NAMED, votes and absences by LOOKED_FOR, contributions by bytes, all else by rules that hold and by rounds long past
being let go of. The states of the last blocks are kept within a budget; another is made again by replaying rosters from
the nearest one that is kept: the same chain gives the same bits (`training.open_step`).
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio

from swarmnode.crdt.record import Element, InvalidRecord, Record
from swarmnode.protocols.chain.duty import RoundLog
from swarmnode.protocols.chain.forks import DEPTH, Block, Tree
from swarmnode.protocols.chain.rules import checks_seed
from swarmnode.protocols.chain.state import ChainState, rules_of
from swarmnode.protocols.chain.statements import MAX_JUDGES, Entry, ForkChoiceVote, Reveal, Said, read
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.reputation.account import MEASURED
from swarmnode.protocols.transfer.bulk import Key, StreamingBuffer
from swarmnode.training import mapped
from swarmnode.training.codecs import CodecError, codec
from swarmnode.training.open_step import Factor, Raw, Sparse, apply_contributions, norm_of, opened
from swarmnode.training.outer import OuterState, state_hash

logger = logging.getLogger(__name__)

AWAY = "note/away"  # key of the record by which a node says that it takes no part for now
ROUND_KINDS = ("commit", "availability", "reveal", "score", "roster")  # kinds of what is said in a round
VOTE_KIND = "vote"
NOTHING_NAMED: Mapping[bytes, PeerId] = {}
LOOKED_FOR = 4096  # authors of heads that are kept, of absences, and of false words about judges
NEWCOMERS = 256  # peers about to join that are remembered …
LATELY = 60.0  # … for so many seconds
BURST = 0.02  # seconds that who waits for a change gives it to come: what is pushed comes many at a time
DISPUTED_FOR = 8  # rounds in which a node says whose scores of a round it found false
STATES_BUDGET = 1 << 29  # bytes of shared states of the last rounds; or, of large ones, which lie in mapped files, …
FEWEST = 8  # … so many: the present one, the one before, and some to go back to
CONTRIBUTIONS_BUDGET = 1 << 28  # bytes of contributions; or, of large ones, which lie in mapped files, …
MANY = 256  # … so many: four rounds of 64 authors
LARGE = CONTRIBUTIONS_BUDGET // MANY  # bytes of one
OPENED_BUDGET = 1 << 28  # bytes of what they hold, decoded; or, of a large model, …
OPENED_EACH = 4  # … so many for each parameter, as a vector has. What finds no room is decoded whenever it is read
MALFORMED_REMEMBERED = 1024
OFFERED_WITHIN = 1.0  # seconds that a source may take to have what it is about to have
ANSWERS_WITHIN = 3.0  # seconds without a byte after which the next source is asked as well …
ENDS_WITHIN = 10.0  # … or after so many, and its size at SLOWEST, where a source sends and does not come to an end
FETCH_WITHIN = 120.0  # seconds of one attempt at one source, and …
SLOWEST = 1e5  # … bytes a second at the least

STATEMENTS = Metric("swarmnode_open_statements_total", COUNTER, "statements of rounds that were heard", "what")


class Lost(Exception):
    """What is needed to follow a roster, or to make its state, cannot be had now. The message says what."""


# --- contributions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contribution:
    raw: Raw
    norm: float  # Euclidean, exact
    round: int
    sparse: Sparse | None = None  # what the bytes hold, while there is room for that

    @property
    def content(self) -> Raw | Sparse:
        """What it adds: decoded, where that is kept."""
        return self.raw if self.sparse is None else self.sparse


class Contributions:
    """The encoded pseudo-gradients of the last rounds that this node holds and serves, by id.

    They travel by `bulk` from memory, and not as shards: a contribution is wanted once by everybody within seconds, and
    the way over a manifest and a question to every neighbour would take longer than the bytes. Whoever
    has fetched one serves it, so that an author gives it to a few, and these to others.

    Bounded by CONTRIBUTIONS_BUDGET bytes; of large ones, which lie in mapped files, by MANY. The oldest rounds go
    first. What no encoder makes is remembered as malformed, without its bytes.
    """

    def __init__(self, parts: Context) -> None:
        self._run_id, self._bulk, self._runner = parts.run_id, parts.bulk, parts.runner
        self._codec_name, self._elements = parts.spec.exchange.codec, parts.trainer.layout.parameters
        self.size = codec(self._codec_name).encoded_size(self._elements)  # bytes of each
        self._within = FETCH_WITHIN + self.size / SLOWEST  # seconds
        self.ends_within = ENDS_WITHIN + self.size / SLOWEST  # seconds
        self._held: OrderedDict[bytes, Contribution] = OrderedDict()  # the oldest first
        self._malformed = Recent[bytes, None](MALFORMED_REMEMBERED)
        self._opening = trio.Lock()  # one at a time is decoded, whatever memory that takes

    def __contains__(self, id: bytes) -> bool:
        return id in self._held

    def __getitem__(self, id: bytes) -> Contribution:
        return self._held[id]

    def get(self, id: bytes) -> Contribution | None:
        return self._held.get(id)

    def is_malformed(self, id: bytes) -> bool:
        """Whether bytes with this id were here and no encoder makes them."""
        return id in self._malformed

    async def keep(self, raw: Raw, round: int) -> bytes:
        """Keep what this node made itself; its id. It is served from `serve` on. Raises CodecError."""
        if self.size >= LARGE:
            into = await self._runner(lambda: mapped.room(len(raw), large=LARGE))
            into[:] = raw
            raw = into
        async with self._opening:
            contribution = await self._runner(lambda: self._opened(raw, round))
        id = await self._runner(lambda: id_of(raw))
        self._hold(id, contribution)
        return id

    def _opened(self, raw: Raw, round: int) -> Contribution:
        """Raises CodecError."""
        held = opened(raw, self._elements, codec_name=self._codec_name)
        return Contribution(raw, norm_of(held), round, held if isinstance(held, tuple) else None)

    def _hold(self, id: bytes, contribution: Contribution) -> None:
        """Keep it, and of the newest ones also what they hold: the judge, its checks and the roster read that."""
        self._held[id] = contribution
        room = max(OPENED_BUDGET, OPENED_EACH * self._elements)
        for other, one in reversed(self._held.items()):
            if one.sparse is None:
                continue
            room -= sum(part.nbytes for part in one.sparse)
            if room < 0:
                self._held[other] = replace(one, sparse=None)

    def serve(self, id: bytes) -> None:
        if id in self._held:
            self.offer(id, self._held[id].raw)

    def offer(self, id: bytes, raw: Raw) -> None:
        """Let peers fetch these bytes under this id."""
        whole = StreamingBuffer(raw, name=id)  # so that a fetch goes on where they are offered again
        whole.grow(whole.size)
        self._bulk.offer(self._key(id), whole)

    async def fetch(self, id: bytes, round: int, sources: Sequence[PeerId]) -> None:
        """Have it here, or know it as malformed. Raises Lost.

        Asks `sources` one after the other: the next where one has nothing, or sends nothing for ANSWERS_WITHIN, as a
        frozen one does, or a byte now and then, as a liar may; what that sends after all still counts.
        """

        async def ask(peer: PeerId, answered: trio.Event, ended: trio.Event) -> None:
            try:
                await self._insert(id, round, peer, await self._fetch_from(peer, id, lambda size: answered.set()))
                asking.cancel_scope.cancel()
            except NetworkError as error:
                logger.debug("contribution %s not from %s: %s", id.hex()[:12], peer, error)
            finally:
                answered.set()
                ended.set()

        async with trio.open_nursery() as asking:
            for peer in sources:
                answered, ended = trio.Event(), trio.Event()
                asking.start_soon(ask, peer, answered, ended)
                with trio.move_on_after(ANSWERS_WITHIN):
                    await answered.wait()
                if answered.is_set():
                    with trio.move_on_after(self.ends_within):
                        await ended.wait()
        if id not in self._held and id not in self._malformed:
            raise Lost(f"contribution {id.hex()[:12]} is with none of {len(sources)} peers")

    async def _fetch_from(self, peer: PeerId, id: bytes, progress: Callable[[int], None]) -> Raw:
        """The bytes that one source sends, at most `size` of them. Raises NetworkError."""
        with trio.move_on_after(self._within):
            into = None
            if self.size >= LARGE:
                into = await self._runner(lambda: mapped.room(self.size, large=LARGE))
            came = await self._bulk.fetch(
                peer, self._key(id), into=into, max_size=self.size, wait=OFFERED_WITHIN, progress=progress
            )
            return bytes(came) if into is None else came
        raise NetworkError(f"{peer} took more than {self._within:.0f} s")

    async def _insert(self, id: bytes, round: int, peer: PeerId, raw: Raw) -> None:
        """Keep and serve what a peer sent, or know it as malformed. Raises NetworkError where it is something else."""
        if await self._runner(lambda: id_of(raw)) != id:
            logger.warning("%s sent another contribution than the one asked for", peer)
            raise NetworkError(f"{peer} sent something else")
        try:
            async with self._opening:
                contribution = await self._runner(lambda: self._opened(raw, round))
        except CodecError:
            self._malformed[id] = None
            return
        self._hold(id, contribution)
        self.serve(id)

    def forget(self, before: int) -> None:
        """Let go of rounds before this one, and of the oldest beyond the budget."""
        while self._held:
            id, oldest = next(iter(self._held.items()))
            if oldest.round >= before and len(self._held) * self.size <= max(CONTRIBUTIONS_BUDGET, MANY * self.size):
                return
            del self._held[id]
            self._bulk.withdraw(self._key(id))

    def _key(self, id: bytes) -> Key:
        return ("contribution", self._run_id, id.hex())


def id_of(raw: Raw) -> bytes:
    """What names a contribution with these bytes."""
    digest = hashlib.sha256(b"swarmnode/contribution/1\0")
    digest.update(raw)
    return digest.digest()


# --- the chain --------------------------------------------------------------------------------------------------------


class ChainStore:
    """One node's holdings of the chain of one run. Nothing but `insert` may be used before `begin`."""

    tree: Tree  # of valid rosters, from `begin` on
    tip: bytes = b""  # the block on which this node stands; empty before `begin`

    def __init__(self, parts: Context, contributions: Contributions) -> None:
        self._spec, self._layout, self._runner = parts.spec, parts.trainer.layout, parts.runner
        self._me = parts.me
        self._admits = parts.admits  # whose statements count, also where a roster quotes them
        self.rules = rules_of(parts.spec.trust)
        self.contributions = contributions
        self.logs: dict[bytes, RoundLog] = {}  # by the block that the round builds on
        self.last_heads: dict[str, tuple[bytes, Said[ForkChoiceVote]]] = {}  # by author, with its record's rank
        self._heads: dict[str, bytes] = {}  # by author: the last that was in the tree
        self._locked: dict[str, bytes] = {}  # by author: that, where it is locked on it; b"" where it moved there
        self._new_heads: dict[str, bytes] = {}  # by author: the newest, where nobody saw yet that it is
        self.hashes: dict[bytes, str] = {}  # of the shared state after each block
        self._states: OrderedDict[bytes, OuterState] = OrderedDict()  # by block; the one used longest ago first
        self._away: dict[PeerId, tuple[bytes, bool]] = {}  # with the record's rank
        self._newcomers = Recent[PeerId, float](NEWCOMERS)  # who asked where to begin -> trio time
        self.arrived = trio.current_time()  # when this node came to where it stands, or when others did
        self.out_of_sync = False  # validators follow what cannot be reached from here by replaying rosters
        self.diverged = frozenset[PeerId]()  # members whose history parted from this node's for good (`join.Splits`)
        self._together = 0  # rounds done when this node last judged with others, and …
        self.company = frozenset[PeerId]()  # … who the other validators were then
        self.counted: dict[bytes, bytes] = {}  # block -> own contribution that its roster counts
        self.disproved: dict[PeerId, Block] = {}  # judges, with the roster that quotes what this node found false
        self.counts: Counter[str] = Counter()
        self.changed = trio.Event()  # set by what changes next

    def measure(self, metrics: Metrics) -> None:
        metrics.show(STATEMENTS, lambda: self.counts)

    # --- where the chain stands ---------------------------------------------------------------------------------------

    @property
    def stands(self) -> bool:
        """Whether `begin` was called."""
        return bool(self.tip)

    @property
    def block(self) -> Block:
        """Where this node stands."""
        return self.tree[self.tip]

    @property
    def log(self) -> RoundLog:
        """The round that this node takes part in."""
        return self.logs[self.tip]

    async def begin(self, chain: ChainState, state: OuterState) -> None:
        """Hold this chain from here on, and forget any other."""
        await self._put_state(chain.tip, chain.round, state)
        self.tree, self.tip, self.arrived = Tree(chain), chain.tip, trio.current_time()
        self.logs, self.out_of_sync = {}, False
        self._note_company(chain)
        self._forget_states()

    def move(self, to: Block) -> None:
        """Stand on a block whose log is open; let go of what is long past."""
        self.tip, self.arrived = to.id, trio.current_time()
        if not self.company or (to.roster is not None and len(to.roster.scores) > 1):
            self._note_company(to.chain)
        self.tree.prune(to.id)
        self._forget_states()
        self.logs = {id: log for id, log in self.logs.items() if id in self.tree}
        self.contributions.forget(to.chain.round - DEPTH)

    def _note_company(self, chain: ChainState) -> None:
        if others := frozenset(chain.validators) - {self._me}:
            self._together, self.company = chain.round, others

    def gone_on(self) -> set[PeerId]:
        """Validators with whom this node last judged who signed later heads that never were here; once it was alone for
        so long that its own history knows them no more.
        """
        if not self.stands or self.block.chain.round <= self._together + DEPTH:
            return set()
        new = self.company & self._new_heads.keys()
        return {peer for peer in new if self.last_heads[peer][1].what.round > self._together}

    # --- shared states ------------------------------------------------------------------------------------------------

    def state(self, id: bytes) -> OuterState | None:
        """The shared state after a block, where it is kept."""
        if id in self._states:
            self._states.move_to_end(id)
        return self._states.get(id)

    async def state_after(self, block: Block) -> OuterState:
        """The shared state after a block of the tree, made where it is not kept. Raises Lost."""
        missing, at = [], block
        while at.id not in self._states:
            missing.append(at)
            if at.parent not in self.tree:
                raise Lost(f"no state before round {at.chain.round} is kept")
            at = self.tree[at.parent]
        state = self._states[at.id]
        self._states.move_to_end(at.id)
        for at in reversed(missing):
            state = await self._next_state(state, at)
            await self._put_state(at.id, at.chain.round, state)
        return state

    async def hash_at(self, id: bytes) -> str:
        """The state hash at a block of the tree. Raises Lost."""
        if id not in self.hashes:
            if id not in self.tree:
                raise Lost("the round was let go of")
            await self.state_after(self.tree[id])
        return self.hashes[id]

    async def _next_state(self, state: OuterState, block: Block) -> OuterState:
        """What a block makes of the state before it. Raises Lost."""
        roster = block.roster
        if roster is not None and roster.revert:
            before = self.tree[block.parent].parent if block.parent in self.tree else b""
            if before not in self.tree:
                raise Lost(f"round {roster.round} goes back to a state that is not kept")
            return await self.state_after(self.tree[before])
        if roster is None or not roster.accepted:
            return state
        try:
            reveals = self.logs[roster.parent].reveals
            raws = [self.contributions[reveals[entry.commit].what.root].content for entry in roster.accepted]
        except KeyError:
            raise Lost(f"a contribution to round {roster.round} is not kept") from None
        factors = [Factor(entry.weight, entry.clip, roster.total) for entry in roster.accepted]
        outer, name = self._spec.outer, self._spec.exchange.codec

        def applied() -> OuterState:
            try:
                return apply_contributions(state, raws, factors, lr=outer.lr, momentum=outer.momentum, codec_name=name)
            except ValueError as error:  # from the arguments alone: who holds the roster comes to the same conclusion
                logger.error("round %d moves nothing: %s", roster.round, error)
                return state

        return await self._runner(applied)

    async def _put_state(self, tip: bytes, round: int, state: OuterState) -> None:
        self.hashes[tip] = await self._runner(lambda: state_hash(round, self._layout, state))
        self._states[tip] = state
        self._states.move_to_end(tip)
        each = 8 * self._layout.parameters  # bytes; after empty rounds it is the same state
        while (kept := len({*map(id, self._states.values())})) > FEWEST and kept * each > STATES_BUDGET:
            del self._states[next(block for block in self._states if block != self.tip)]  # the longest unused

    def _forget_states(self) -> None:
        for id in [id for id in self.hashes if id not in self.tree]:
            del self.hashes[id]
            self._states.pop(id, None)

    # --- contributions of rounds --------------------------------------------------------------------------------------

    def norms(self, log: RoundLog) -> dict[bytes, float]:
        """Norm by commit of every contribution to a round that is here."""
        found = {id: self.contributions.get(said.what.root) for id, said in log.reveals.items()}
        return {id: contribution.norm for id, contribution in found.items() if contribution is not None}

    def measured(self, block: Block) -> dict[PeerId, bytes]:
        """Commits by author whose contributions were measured in the round that a block ended, and are here."""
        log = self.logs.get(block.parent)
        if log is None or block.roster is None:
            return {}
        listed = [entry.commit for entry in block.roster.entries if entry.verdict in MEASURED]
        return {log.commits[commit].author: commit for commit in listed if commit in log.reveals}

    def last_listed(self, tip: bytes, author: PeerId) -> tuple[bytes, Reveal, Entry] | None:
        """The last roster up to this one that lists work of an author, what was revealed, and what became of it."""
        for block in reversed(self.tree.path(tip)):
            reveals = log.reveals if (log := self.logs.get(block.parent)) is not None else {}
            for entry in block.roster.entries if block.roster is not None else ():
                if entry.commit in reveals and reveals[entry.commit].author == author:
                    return block.id, reveals[entry.commit].what, entry
        return None

    def checks_seed(self, block: Block) -> bytes:
        """What draws who looks at whose work of the round that a block ended; `measured` has something of it."""
        log, roster = self.logs.get(block.parent), block.roster
        if log is None or roster is None or block.id not in log.rosters:
            return block.chain.seed
        quoted = [log.scores[id] for id in roster.scores if id in log.scores]
        return checks_seed(log.chain, block.chain.seed, log.rosters[block.id].author, quoted)

    def accusations(self) -> tuple[tuple[int, int], ...]:
        """What this node says of judges in the round that it takes part in, as in `AvailabilityVote.disproved`."""
        chain, path = self.block.chain, self.tree.ancestry(self.tip)[-DISPUTED_FOR:]
        self.disproved = {judge: block for judge, block in self.disproved.items() if block.id in path}
        named = [(place, self.disproved.get(validator)) for place, validator in enumerate(chain.validators)]
        return tuple((place, block.chain.round - 1) for place, block in named if block is not None)[:MAX_JUDGES]

    # --- who said what ------------------------------------------------------------------------------------------------

    def insert(self, element: Element, named: Mapping[bytes, PeerId] = NOTHING_NAMED) -> Said[Any] | None:
        """Insert a record of the state; the statement that is new by it, if one is. `named`: ids, and by whom."""
        if not isinstance(element, Record) or not self._admits(element.author):
            return None
        if element.key == AWAY and self._is_newer(element, self._away):
            self._away[element.author] = (element.rank, not element.tombstone)
            self.notify()
        if element.tombstone or element.kind not in (*ROUND_KINDS, VOTE_KIND):
            return None
        try:
            said = read(element)
        except InvalidRecord as error:
            self.counts["invalid"] += 1
            logger.debug("%s says what nobody may say: %s", element.author, error)
            return None
        if isinstance(said.what, ForkChoiceVote):
            inserted = self._is_newer(element, self.last_heads)
            if inserted:
                self.last_heads[said.author] = (element.rank, said)
                self._new_heads[said.author] = said.what.roster
        else:
            log = self.logs.get(said.what.parent)
            now, namer = trio.current_time(), named.get(said.id, "")
            inserted = log is not None and log.insert(said, element.sealed, now, namer=namer)
        if not inserted:
            return None
        self.counts["heard"] += 1
        self.notify()
        return said

    def _is_newer(self, record: Record, kept: Mapping[PeerId, tuple[bytes, Any]]) -> bool:
        """Whether it is newer than what is kept of its author, or the first and there is room: for validators always,
        and for this node.
        """
        author = record.author
        if author in kept:
            return record.rank > kept[author][0]
        return len(kept) < LOOKED_FOR or author == self._me or (self.stands and author in self.block.chain.validators)

    def heads(self) -> dict[str, bytes]:
        """The roster that each validator follows; while that is not here, the last that was, as it may build on it."""
        if self._new_heads:
            for author in [author for author, id in self._new_heads.items() if id in self.tree]:
                vote = self.last_heads[author][1].what
                self._heads[author] = self._new_heads.pop(author)
                self._locked.pop(author, None)
                if vote.locked or vote.moved:
                    self._locked[author] = vote.roster if vote.locked else b""
        return self._heads.copy()

    def signed_heads(self) -> dict[str, bytes]:
        """The roster that each validator signed last, here or not."""
        return {author: said.what.roster for author, (_, said) in self.last_heads.items()}

    def locked(self) -> dict[str, bytes]:
        """By validator: the roster of `heads` that it is locked on, or b"" where it moved its vote, or is about to."""
        return dict.fromkeys(self._new_heads, b"") | self._locked

    def followers(self, roster: bytes) -> list[PeerId]:
        return [author for author, (_, head) in self.last_heads.items() if head.what.roster == roster]

    def is_away(self, peer: PeerId) -> bool:
        """Whether a node said that it takes no part for now."""
        return peer in self._away and self._away[peer][1]

    def note_newcomer(self, peer: PeerId) -> None:
        """A peer asks where this node stands, and so is about to take part."""
        self._newcomers[peer] = trio.current_time()

    def newcomers(self) -> set[PeerId]:
        """Who is about to take part for the first time."""
        since = trio.current_time() - LATELY
        return {peer for peer, at in self._newcomers.items() if at >= since}

    # --- waiting ------------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something changed: who waits looks again."""
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, true: Callable[[], bool], *, deadline: float = float("inf")) -> bool:
        """Wait until `true()`, asked whenever something changed, or the deadline in trio time; whether it is true."""
        with trio.move_on_at(deadline):
            while not true():
                with trio.move_on_after(1.0):  # some wait for a time as well
                    await self.changed.wait()
                await trio.sleep(BURST)
            return True
        return true()
