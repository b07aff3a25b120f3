"""The exchange method `seed`: a byte a step, and parameters travel only to who comes very late (training/seed.py).

A node's round is H steps, each a byte of its own, and one signed record of them in the replicated state:

    probe/ROUND/0 -> [round of the record before, bytes]

The state's gossip and repair carry records to everybody. Nodes add what came in between two steps, and wait for nobody.
The records of an author are a chain, added in their order; those of different authors commute. So what a node stands on
is a set of records, and *nodes that hold the same records hold the same bits*. `state_hash` is over theta_0 and the
authors' chains. A round ends for each node by itself, whoever else dies, freezes or leaves; the sides of a partition go
on, and hold the same once their states are repaired. A step that was cut short is lost, and nothing else.

Rounds are counted by each node, from the one that half of the members have come to, so that schedules run alike
everywhere. Where a run has a last round and half have come to it, all end, tell what they have, and wait a little.

A late comer repairs its state with a member and adds up all records, or fetches theta_0 and S. Members trust one
another; who fails, and what is then true: docs/seed.md.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter as Count
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Annotated, Any

import msgpack
import numpy as np
import trio

from swarmnode.crdt.kinds import KINDS, key_of
from swarmnode.crdt.record import Element, InvalidRecord, Record
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.methods.context import Context, admit
from swarmnode.protocols.methods.known.messages import Counter, Hash
from swarmnode.protocols.methods.method import NOTICE_MEMBERS_FOR, Begin, LostPlace, Method, Place, RoundResult, Saved
from swarmnode.protocols.methods.trainer import NOTHING, TrainerDied, TrainStats, loss_of
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.state.backend import READ_AGAIN, AlreadyWritten, StateError
from swarmnode.protocols.transfer.catchup import CatchUp, CatchUpFailed
from swarmnode.protocols.wire import Message, RunQuery, within
from swarmnode.training.outer import OuterState, state_hash
from swarmnode.training.seed import Tally

logger = logging.getLogger(__name__)

KIND = "probe"
MOST = 1024  # bytes of one record; longer rounds are cut to so many steps
MANY = 1 << 40  # records; nobody has so many
FIRST = -1  # stands for the round before an author's first record
LAST = 10**8 - 1  # a key has eight digits of its round
LOOKED_AT = 1 << 18  # records that are read at once
UNSAID = 64  # records that wait to be signed, where the clock or the disk is wrong
ASK_EVERY = 0.5  # seconds between looks for members, or at where they are
ASK_AT_ONCE = 8  # members asked at the same time
TIMEOUT = 3.0  # seconds for a peer to say where it stands
END_WITHIN = 10.0  # seconds that a node which is done waits for the last records of others
OFFERED_FOR = 10.0  # seconds in which whoever asks is offered the same state
LACKING_FOR = 60.0  # seconds after which a node looks at members for a record that others build on …
LONGEST_LACKING = 1920.0  # … and twice as long after each look, up to so long, until a member gave its state

RECORDS = Metric("swarmnode_seed_records", GAUGE, "records of all authors that this node's parameters are the sum of")


@dataclass(frozen=True)
class SeedStand(Message):
    """Where a node is: its round, what it began at, and how many records it has added to that."""

    round: Counter
    state_hash: Hash
    initial: Hash
    records: Annotated[int, within(0, MANY)]


@dataclass(frozen=True)
class Offer(Message):
    """A state to fetch, of theta_0 and S, and the chains that S is of."""

    state_hash: Hash
    chains: bytes


@dataclass(frozen=True)
class Chain:
    """The records of one author that are in S."""

    round: int = FIRST  # of the last one
    records: int = 0
    digest: bytes = b""  # over all, sha-256

    def then(self, round: int, told: bytes) -> Chain:
        digest = hashlib.sha256(self.digest + round.to_bytes(8, "little") + told).digest()
        return Chain(round, self.records + 1, digest)


class Seed(Method):
    """One node's part in a run by seeds."""

    name = "seed"
    phase = "waiting"

    def __init__(self, parts: Context) -> None:
        self._parts, self._spec, self._trainer = parts, parts.spec, parts.trainer
        self._records, self._sync = parts.state, parts.sync
        self.catch_up = CatchUp(parts)
        self.lies = Violations("seed")
        self.violations = (self.lies,)
        self._last_round: int | None = None
        self._initial = self._hash = ""
        self._chains: dict[PeerId, Chain] = {}
        self._waiting: dict[PeerId, dict[int, tuple[int, bytes]]] = {}  # to be added: by author and the round before
        self._lacking = math.inf  # trio's time since which a record is lacking that others build on
        self._lacking_for = LACKING_FOR  # anybody may say that he builds on what there is not
        self._unsaid: dict[int, bytes] = {}  # own, by round
        self._counted = Count[PeerId]()  # whose records were added since the last result
        self._adding = trio.Lock()  # S and the chains belong together
        self._offering = trio.Lock()  # one copy of them is made at a time, however many ask …
        self._offered: tuple[float, Offer] | None = None  # … and given for a while: trio time, the last one
        self._round = 0
        self._begun = FIRST  # the last round that the trainer took a step of
        self._parameters = parts.trainer.parameters()  # theta, as the trainer has it between two steps
        self._tally = Tally(self._parameters)
        self._asked: set[PeerId] = set()  # who looked for a place here, while this node waits for such
        self._news = trio.lowlevel.ParkingLot()  # there is another one
        self._ended = trio.current_time()
        parts.rpc.serve("seed.stand", RunQuery, self._on_stand)
        parts.rpc.serve("seed.offer", RunQuery, self._on_offer)

    # --- what others ask --------------------------------------------------------------------------------------------

    async def _on_stand(self, peer: PeerId, query: RunQuery) -> SeedStand:
        admit(self._parts, peer, query.run_id)
        if len(self._asked) < ASK_AT_ONCE * ASK_AT_ONCE:
            self._asked.add(peer)
            self._news.unpark_all()
        admit(self._parts, peer, query.run_id, stands=bool(self._hash))
        return SeedStand(self._round, self._hash, self._initial, self._added)

    async def _on_offer(self, peer: PeerId, query: RunQuery) -> Offer:
        layout = self._trainer.layout
        async with self._offering:
            admit(self._parts, peer, query.run_id, stands=bool(self._hash))
            if self._offered is not None and trio.current_time() < self._offered[0] + OFFERED_FOR:
                return self._offered[1]  # what came since travels as records
            async with self._adding:
                admit(self._parts, peer, query.run_id, stands=bool(self._hash))
                tally = self._tally
                round, chains, state = self._round, self._packed(), OuterState(tally.initial, tally.whole())
            hash = await self._parts.runner(lambda: state_hash(round, layout, state))
            self.catch_up.serve_state(round, hash, state)
            self._offered = trio.current_time(), Offer(hash, chains)
            return self._offered[1]

    # --- records ----------------------------------------------------------------------------------------------------

    @property
    def _added(self) -> int:
        return sum(chain.records for chain in self._chains.values())

    def _take(self, element: Element) -> None:
        """Have a record of the state added, once those before it are. What is no such record is counted."""
        if not isinstance(element, Record):
            return
        author, (before, told) = element.author, (FIRST, b"")
        round = int(element.key.split("/")[1])
        value = element.value if element.key == key_of(KIND, round, 0) else None  # under two keys, two are no evidence
        match value:
            case (int() as before, bytes() as told) if FIRST <= before < round < LAST and 0 < len(told) <= MOST:
                if before >= self._chains.get(author, Chain()).round:
                    waiting = self._waiting.setdefault(author, {})
                    if before in waiting or len(waiting) < KINDS[KIND].slots:
                        waiting[before] = (round, told)
            case _:
                self.lies.note(author, f"signed a record that tells nothing: {element.key}", Kind.BREACH)

    async def _look_at_all(self) -> None:
        for element in await self._kept():
            self._take(element)

    async def _kept(self, author: PeerId | None = None) -> list[Element]:
        """The records that are here, once the disk gives them."""
        while True:
            try:
                return await self._records.select(f"{KIND}/", author=author, limit=LOOKED_AT)
            except StateError as error:
                logger.warning("the records of the run cannot be read now: %s", error)
                await trio.sleep(READ_AGAIN)

    async def _add(self) -> None:
        """Add what came in, as far as nobody cancels it, and have the trainer stand where that leads in any case."""
        tally, seed, moved = self._tally, self._spec.run.seed, False
        try:
            for author in sorted(self._waiting):
                waiting = self._waiting[author]
                while (next := waiting.get((chain := self._chains.get(author, Chain())).round)) is not None:
                    await trio.lowlevel.checkpoint()
                    round, told = next
                    # A record is in S and in its chain, or in neither.
                    with trio.CancelScope(shield=True):
                        async with self._adding:
                            await self._parts.runner(partial(tally.add, seed, author, round, told))
                            self._chains[author] = chain.then(round, told)
                    del waiting[chain.round]
                    self._counted[author] += 1
                    moved = True
                if not waiting:
                    del self._waiting[author]
        finally:
            self._lacking = min(self._lacking, trio.current_time()) if self._waiting else math.inf
            if moved or not self._hash:
                with trio.CancelScope(shield=True):
                    self._count_on()
                    await self._stand()

    def _count_on(self) -> None:
        """Be in the round that half of the members have come to, where that is further: one alone moves nobody."""
        own = self._chains.get(self._parts.me, Chain()).round
        told = [self._chains[peer].round for peer in self._parts.membership.members() if peer in self._chains]
        self._round = max(self._round, own + 1, median_high([own, *told]) + 1)

    async def _stand(self) -> None:
        inner, tally = self._spec.inner, self._tally
        self._parameters = await self._parts.runner(lambda: tally.parameters(lr=inner.lr, clip=inner.clip))
        self._parameters.flags.writeable = False
        self._trainer.load(self._parameters)
        digest = hashlib.sha256(self._initial.encode())
        for author, chain in sorted(self._chains.items()):
            digest.update(msgpack.packb([author, chain.round, chain.digest]))
        self._hash = digest.hexdigest()

    async def _say(self) -> None:
        """Sign what this node has to tell, in order; what cannot be signed now is told later."""
        for round in sorted(self._unsaid):
            try:
                before = self._chains.get(self._parts.me, Chain()).round
                record = await self._sync.write(key_of(KIND, round, 0), (before, self._unsaid[round]))
            except (AlreadyWritten, InvalidRecord) as error:  # in an earlier life, as peers remember; or after LAST
                logger.warning("the steps of round %d cannot be told, and are dropped: %s", round, error)
            except StateError as error:
                logger.warning("round %d is told later: %s", round, error)
                return
            else:
                self._take(record)
                await self._add()
            del self._unsaid[round]

    # --- rounds -----------------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place | None:
        if not self._hash:
            return None
        members = (self._parts.me, *self._parts.membership.members())
        return Place(self._round, self._hash, members, elapsed=trio.current_time() - self._ended)

    def _is_over(self) -> bool:
        return self._last_round is not None and self._round >= self._last_round

    async def run_round(self) -> RoundResult:
        await self._say()
        await self._add()
        if trio.current_time() > self._lacking + self._lacking_for:
            self._lacking_for = min(2 * self._lacking_for, LONGEST_LACKING)
            raise LostPlace("others build on records that are kept no more")
        round = self._begun = max(self._round, self._begun + 1)  # of one begun before, the trainer counts on
        worked = await self._probe(round, min(self._spec.inner.steps_in(round), MOST))
        self.phase = "exchanging"
        try:
            await self._say()
            await self._add()
            if self._is_over():
                await self._hear_the_last()
        finally:
            self.phase = "waiting"
        loss = await loss_of(self._trainer) if self._spec.inner.measured_after(round) else math.nan
        seconds, self._ended = trio.current_time() - self._ended, trio.current_time()
        counted, self._counted = tuple(sorted(self._counted)), Count()
        return RoundResult(round, self._hash, loss, worked, seconds, len(counted), counted=counted)

    async def _probe(self, round: int, steps: int) -> TrainStats:
        """Take these steps, unless the run is over before; their bytes are then unsaid."""
        worked, self.phase = NOTHING, "training"
        try:
            while worked.steps < steps and not self._is_over():
                one = await self._trainer.train(round=round, steps=1, seconds=math.inf)
                if not one.steps:
                    break
                worked += one
                await self._add()
        except TrainerDied:  # its successor counts its steps anew
            self._trainer.load(self._parameters)
        finally:
            self.phase = "waiting"
            if worked.told and len(self._unsaid) < UNSAID:
                self._unsaid[round] = worked.told
        return worked

    async def _hear_the_last(self) -> None:
        """Wait for what others say last, so that all end at the same parameters where nobody is in the way."""
        assert self._last_round is not None
        with trio.move_on_after(END_WITHIN):
            while True:
                await self._add()
                stands = [stand for _, stand in await self._stands()]
                if all(s.round >= self._last_round and s.state_hash == self._hash for s in stands):
                    break
                await trio.sleep(ASK_EVERY)

    # --- finding a place, and leaving -------------------------------------------------------------------------------

    async def find_place(self, begin: Begin) -> None:
        self.phase, self._last_round = "waiting", begin.last_round
        initial, saved = self._trainer.parameters(), begin.saved
        self._initial = await self._parts.runner(lambda: hashlib.sha256(initial.data).hexdigest())
        self._tally = Tally(initial)
        own = saved is not None and saved.method == self.name  # else it is of the run before this one
        if saved is not None and own and len(saved.extra) > initial.nbytes:
            initial = np.frombuffer(saved.extra, np.float32, initial.size)  # the trainer may not begin where others did
            told = msgpack.unpackb(memoryview(saved.extra)[initial.nbytes :])
            self._initial, self._tally = told["initial"], Tally(initial, saved.state.momentum.astype(np.int32))
            self._chains, self._round = _chains(told["chains"]), saved.round
        await self._look_at_all()
        found = await self._join(within=begin.patience)
        await self._add()
        with trio.move_on_after(0 if found else begin.wait_seconds):
            while len(self._asked) < begin.wait_peers:
                await self._news.park()
        self._ended = trio.current_time()

    async def _join(self, *, within: float) -> bool:
        """Have all that a member has; False where none answers within so many seconds."""
        began = trio.current_time()
        try:
            while trio.current_time() < began + within:
                stands = sorted(await self._stands(), key=lambda each: each[1].records, reverse=True)
                for peer, stand in stands:  # who tells of more records than it has keeps nobody from the others
                    if await self._reach(peer, stand):
                        self._parts.observer.caught_up(self._round, self._hash, trio.current_time() - began)
                        return True
                await self._parts.look_again(began, every=ASK_EVERY)
        finally:
            self._parts.observer.warn("alone", None)
        return False

    async def _stands(self) -> list[tuple[PeerId, SeedStand]]:
        """Where some members stand."""
        asked, query = self._parts.nearby(ASK_AT_ONCE), RunQuery(self._parts.run_id)
        return await self._parts.rpc.call_all(asked, "seed.stand", query, SeedStand, timeout=TIMEOUT)

    async def _reach(self, peer: PeerId, stand: SeedStand) -> bool:
        """Have the records of a member that stands there, or fetch what they come to."""
        self.phase = "catching-up"
        try:
            if stand.initial == self._initial:
                if self._added < stand.records:
                    await self._sync.repair_with(peer)
                    await self._look_at_all()
                await self._add()
                if self._added >= stand.records or not self._waiting:
                    return self._added >= stand.records
            return await self._fetch(peer)
        finally:
            self.phase = "waiting"

    async def _fetch(self, peer: PeerId) -> bool:
        """Take theta_0, S and the chains of a member in place of the own, unless own work would be lost by that."""
        query, me = RunQuery(self._parts.run_id), self._parts.me
        try:
            offer = await self._parts.rpc.call(peer, "seed.offer", query, Offer, timeout=TIMEOUT)
            chains = _chains(offer.chains)
            _, _, state = await self.catch_up.fetch([peer], state_hash=offer.state_hash, observer=self._parts.observer)
        except (CallError, CatchUpFailed, ValueError, TypeError, KeyError) as error:
            logger.warning("the state of %s could not be fetched, trying again: %s", peer, error)
            return False
        own = [element.value for element in await self._kept(me) if isinstance(element, Record)]
        built_on = {value[0] for value in own if isinstance(value, tuple)}
        mine, theirs = self._chains.get(me, Chain()), chains.get(me, Chain())
        if theirs.round < mine.round and theirs.round not in built_on:
            text = "others lack records of this node that are kept no more, and it lacks theirs: it goes on apart"
            self._parts.observer.warn("apart", text)
            return True
        initial = await self._parts.runner(lambda: hashlib.sha256(state.parameters.data).hexdigest())
        self._tally = Tally(state.parameters.copy(), state.momentum.astype(np.int32))
        self._initial, self._chains, self._waiting, self._hash, self._offered = initial, chains, {}, "", None
        self._lacking_for = LACKING_FOR
        self._parts.observer.warn("apart", None)
        self._count_on()
        await self._look_at_all()
        await self._add()
        return True

    async def regain_place(self) -> None:
        if self._initial:
            await self._join(within=NOTICE_MEMBERS_FOR)
        self._lacking = math.inf  # what nobody had is waited for anew, and trained meanwhile

    async def watch(self) -> None:
        with self._records.watch(f"{KIND}/") as changes:
            await self._look_at_all()
            async for change in changes:
                if change.lost:
                    await self._look_at_all()
                self._take(change.element)

    async def leave(self) -> None:
        if self._hash:
            await self._say()
            await self._sync.flush()
            self._trainer.load(self._parameters)

    # --- what is shown and kept -------------------------------------------------------------------------------------

    def _packed(self) -> bytes:
        rows = [[author, chain.round, chain.records, chain.digest] for author, chain in sorted(self._chains.items())]
        return bytes(msgpack.packb(rows))

    def saved(self) -> Saved:
        """Of the moment; momentum is S, whole numbers."""
        place = self.place
        if place is None:
            raise RuntimeError("this node stands nowhere yet")
        state = OuterState(self._parameters, self._tally.whole())
        extra = self._tally.initial.tobytes() + msgpack.packb({"initial": self._initial, "chains": self._packed()})
        return Saved(place.round, state, np.zeros_like(self._parameters), place.members, self.name, extra)

    def status(self) -> Mapping[str, Any]:
        return {"records": self._added}

    def measure(self, metrics: Metrics) -> None:
        metrics.show(RECORDS, lambda: self._added)
        self.lies.measure(metrics)


def _chains(packed: bytes) -> dict[PeerId, Chain]:
    """Raises ValueError, TypeError."""
    found = {}
    for row in msgpack.unpackb(packed):
        match row:
            case [str() as author, int() as round, int() as records, bytes() as digest] if (
                FIRST <= round < LAST and 0 <= records < MANY
            ):
                found[author] = Chain(round, records, digest)
            case _:
                raise ValueError("a chain of records has another form")
    return found
