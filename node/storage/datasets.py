"""The data of one run on one node: which shards it needs, and how it comes by them while it already trains.

The steps are those of docs/shards.md (Data sets).
All that is fetched is pinned and served onwards, so the data outlive their creator as far as members hold them.
`cutting.py` is what a creator and a node with text of its own do.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import trio

from swarmnode.node.storage import cutting
from swarmnode.node.storage.datadir import NoSpace, RunUnavailable
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.methods.open.checks.texts import Texts
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardId, parse_id
from swarmnode.protocols.transfer.shard_wire import LIMITS, NoRoom, ShardError
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.training.dataset import MAX_INDEX, BadIndex, DataEntry, Index, ranking, share
from swarmnode.training.documents import Meter, Stopped
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import TaskSection
from swarmnode.training.tokens import MAX_TOKENIZER, CorpusError

logger = logging.getLogger(__name__)

ENOUGH = 1 / 8  # of the wanted shards: with them training begins,
ENOUGH_BYTES = 16 << 20  # or with so many bytes of them,
ENOUGH_WAITING = 20.0  # or so many seconds after the first: text is fed as it comes
CHECKED = 16  # shards that are hashed again at a time, when a node starts
LOOK_AGAIN = 5.0  # seconds between looks for shards that nobody had
OWN_FIRST = 15.0  # seconds in which only shards of this node's own quarter are looked for: members arrive meanwhile
PATIENCE = 30.0  # seconds after which a node that found no text at all gives up
ASKED = 256  # shards asked for in one look: peers bear 64 questions a second in vain
REPORT_EVERY = 1.0  # seconds between two events

Emit = Callable[[dict[str, Any]], None]

MB = 1_000_000
GB = 1_000_000_000


class DataSet(Texts):
    """`run` gets what is wanted and keeps looking for what is missing; the other methods may be called meanwhile."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        shards: Shards,
        store: ShardStore,
        runner: Runner,
        corpus: str,
        own_text: bool,
        emit: Emit,
    ) -> None:
        self._spec = spec
        self._shards = shards
        self._store = store
        self._runner = runner
        self._corpus = corpus
        self.own_text = own_text or spec.data.source == "local"  # nobody else can have it
        self._emit = emit
        self._index_id = bytes.fromhex(spec.data.index)
        self._index: Index | None = None
        self._own: tuple[Path, ...] = ()  # files of this node's own text
        self._ranked: tuple[DataEntry, ...] = ()
        self._sizes: dict[ShardId, int] = {}
        self._wanted = 0
        self._here: dict[ShardId, DataEntry] = {}  # complete, verified and pinned, in the order of their arrival
        self._given = 0  # of these, how many the trainer was told of
        self._arrived = trio.lowlevel.ParkingLot()
        self._looked = 0  # times
        self._began = 0.0  # when shards were first looked for
        self._fetched_bytes = 0
        self._reported_at = -REPORT_EVERY
        self.warnings: dict[str, str] = {}

    # -- what others see

    @property
    def room(self) -> int:
        """Bytes of text at the most, whichever shards will be found."""
        if self._own:
            return sum(file.stat().st_size for file in self._own)
        return sum(sorted((entry.size for entry in self._ranked), reverse=True)[: self._wanted])

    @property
    def heldout(self) -> str:
        """The file with the run's held-out part. `run` must have started."""
        assert self._index is not None  # `run` has read it
        return str(self._store.path(self._index.heldout.shard))

    @property
    def tokenizer(self) -> str:
        """The file with the tokenizer of the run's data; empty where it names none."""
        return str(self._store.path(parse_id(self._spec.data.tokenizer))) if self._spec.data.tokenizer else ""

    def take(self) -> tuple[str, ...]:
        """Files to train on that were not taken before."""
        if self._own:
            first, self._given = not self._given, len(self._own)
            return tuple(map(str, self._own)) if first else ()
        fresh = list(self._here)[self._given :]
        self._given = len(self._here)
        return tuple(str(self._store.path(shard)) for shard in fresh)

    # -- what who looks at others' work asks for (`Texts`)

    @property
    def shared(self) -> bool:
        return self._spec.data.source == "shards"

    def given(self) -> tuple[ShardId, ...]:
        return tuple(self._here)[: self._given]

    def assigned(self, author: PeerId) -> tuple[ShardId, ...]:
        if self._index is None:
            return ()
        return tuple(entry.shard for entry in ranking(self._index, self._spec.run_id, author)[: share(self._index)])

    def size(self, shard: ShardId) -> int | None:
        return self._sizes.get(shard)

    async def read(self, holder: PeerId, shard: ShardId, start: int, stop: int) -> bytes:
        if self._store.holding(shard).complete:
            return (await self._shards.content(shard))[start:stop]
        first, last = start // CHUNK, (stop - 1) // CHUNK
        chunks = await self._shards.read(holder, shard, first, last - first + 1)
        return chunks[start - first * CHUNK : stop - first * CHUNK]

    def status(self) -> dict[str, Any]:
        """For `swarmnode status` and the event `data`."""
        here = list(self._here.values())
        return {
            "source": "local" if self.own_text else "shards",
            "shards": len(here),
            "wanted": self._wanted,
            "in_run": len(self._ranked),
            "bytes": sum(entry.size for entry in here),
            "of": self.room,
            "fetched": self._fetched_bytes,
        }

    # -- the life of it

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started when there is enough to train on; goes on until all that is wanted is here, then announces on.

        Raises RunUnavailable, NoSpace or CorpusError.
        """
        async with trio.open_nursery() as nursery:
            index = await self._open()
            nursery.start_soon(self._shards.network.provide, self._index_id)  # by which all of the run's data are found
            self._sizes = {entry.shard: entry.size for entry in index.shards}
            if self.own_text:
                self._own = await self._text_of_its_own(index)
                task_status.started()
                return
            self._ranked = ranking(index, self._spec.run_id, self._shards.network.me)
            self._wanted = self._affordable(share(index))
            await self._complete(index, task_status)

    def _affordable(self, most: int) -> int:
        """How many shards, from the first of the ranking, the store has room for beside what is pinned for others."""
        ours = {entry.shard for entry in self._ranked}
        room = self._store.cap - sum(kept.size for kept in self._store.kept() if kept.pinned and kept.shard not in ours)
        count = size = 0
        for entry in self._ranked[:most]:
            if size + entry.size > room:
                break
            count, size = count + 1, size + entry.size
        if count < most:
            whole = sum(entry.size for entry in self._ranked[:most])
            self._warn(
                "share",
                f"shards_cap (--shards-cap GB) leaves room for {size / GB:.3g} of the {whole / GB:.3g} GB of the run's "
                "data that this node would train on, so it trains on these",
            )
        return max(1, count)

    async def pass_on(
        self, trainer: TrainerProcess, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Give to the trainer what arrives, until cancelled."""
        task_status.started()
        while True:
            if texts := self.take():
                await trainer.feed(texts)
            else:
                await self._arrived.park()

    # -- index and held-out part

    async def _open(self) -> Index:
        """Have the index, the tokenizer and the held-out part."""
        if not await self._runner(lambda: cutting.intact(self._index_id, self._store)):
            await self._index_from_somewhere()
        try:
            index = await self._runner(lambda: cutting.read_index(self._index_id, self._store))
        except BadIndex as error:
            raise RunUnavailable(
                f"the run names data whose index is none: {error}. Ask whoever made the run."
            ) from error
        if (self._spec.data.source == "shards") != bool(index.shards):
            raise RunUnavailable("the run's data are not of the kind that it says. Ask whoever made the run.")
        needed = [self._index_id]
        if self._spec.data.tokenizer:
            needed.append(tokenizer := parse_id(self._spec.data.tokenizer))
            if not await self._runner(lambda: cutting.intact(tokenizer, self._store)):
                await self._need("tokenizer", tokenizer, range(1, MAX_TOKENIZER + 1))
        heldout = index.heldout
        needed.append(heldout.shard)
        if not await self._runner(lambda: cutting.intact(heldout.shard, self._store)):
            logger.info("fetching the held-out text of the run")
            await self._need("held-out text", heldout.shard, range(heldout.size, heldout.size + 1))
        await self._runner(lambda: cutting.pin_all(needed, self._store))
        self._index = index
        return index

    async def _index_from_somewhere(self) -> None:
        """From a peer; where nobody has it, it may be that of this node's own corpus, which is then kept whole."""
        logger.info("fetching the index of the run's data")
        try:
            await self._need("index", self._index_id, range(MAX_INDEX + 1))
        except RunUnavailable:
            if self.own_text and self._spec.data.source == "shards":  # text that is not the run's
                raise
            async with shown(self._emit) as meter:
                try:
                    with cutting.finishing(self._store):
                        await self._runner(lambda: cutting.publish(self._spec, self._corpus, self._store, meter=meter))
                except CorpusError as error:
                    logger.info("nor can it be made here: %s", error)
            if not self._store.holding(self._index_id).complete:
                raise

    async def _text_of_its_own(self, index: Index) -> tuple[Path, ...]:
        spec, me = self._spec, self._shards.network.me
        async with shown(self._emit) as meter:
            return await self._runner(lambda: cutting.own_text(spec, me, index, self._corpus, self._store, meter))

    async def _need(self, what: str, shard: ShardId, sizes: range) -> None:
        try:
            await self._shards.fetch(shard, providers=await self._announcers(), sizes=sizes, announce=False)
        except NoRoom as error:
            raise _no_space(error) from error
        except ShardError as error:
            raise RunUnavailable(
                f"the {what} of the run's data cannot be had: {error}. The corpus here is not the one that the run "
                "began with: join a member of the run that has it (--join), or name the run's corpus (--corpus)."
            ) from error

    # -- the shards

    async def _complete(self, index: Index, task_status: trio.TaskStatus[None]) -> None:
        """Find or fetch as many as are wanted; started when training can begin."""
        started = False
        usual = self.room / self._wanted

        def start_with(least: float) -> None:
            nonlocal started
            if not started and len(self._here) >= max(1, least):
                started = True
                task_status.started()

        async def get(entry: DataEntry, peers: Sequence[PeerId], slots: trio.Semaphore) -> None:
            async with slots:
                if await self._get(entry, peers):
                    start_with(enough)

        async def wait_no_longer() -> None:
            while not self._here:
                await self._arrived.park()
            await trio.sleep(ENOUGH_WAITING)
            start_with(1)

        enough = min(ENOUGH * self._wanted, ENOUGH_BYTES / usual)
        async with trio.open_nursery() as waiting:
            waiting.start_soon(wait_no_longer)
            await self._find_here(index)
            self._began = trio.current_time()
            start_with(enough)
            while len(self._here) < self._wanted:
                before = len(self._here)
                stand_ins = trio.current_time() - self._began >= OWN_FIRST
                holders = await self._who_has(self._ranked if stand_ins else self._ranked[: self._wanted])
                slots = trio.Semaphore(LIMITS.fetches)
                async with trio.open_nursery() as nursery:
                    for entry, peers in list(holders.items())[: self._wanted - before]:
                        nursery.start_soon(get, entry, peers, slots)
                start_with(1)
                if len(self._here) == before:
                    if not self._here and trio.current_time() - self._began >= PATIENCE:
                        self._give_up()
                    missing = f"{self._wanted - len(self._here)} of the {self._wanted} shards of text for this node"
                    self._warn("data", f"{missing} are not to be found; still looking")
                    await trio.sleep(LOOK_AGAIN)
            waiting.cancel_scope.cancel()
        start_with(1)
        self.warnings.pop("data", None)
        self._report(finished=True)
        told = "all of this node's part of the text is here: %d of the run's %d shards, %.1f MB of them fetched"
        logger.info(told, self._wanted, len(self._ranked), self._fetched_bytes / MB)

    async def _find_here(self, index: Index) -> None:
        """What the store has of the wanted shards, hashed again; then what this node's own corpus contains of them."""
        wanted = self._ranked[: self._wanted]
        for at in range(0, len(wanted), CHECKED):
            await self._pin_found(wanted[at : at + CHECKED])
        lacking = [entry for entry in wanted if entry.shard not in self._here]
        if lacking and (self._corpus or self._spec.task.corpus == TaskSection.corpus):  # else its text is no run's
            spec = self._spec
            async with shown(self._emit) as meter:
                with nullcontext() if self._corpus else suppress(CorpusError):  # the default one may be of no use
                    await self._runner(lambda: cutting.take_own(spec, lacking, index, self._corpus, self._store, meter))
            await self._pin_found(lacking)

    async def _pin_found(self, wanted: Sequence[DataEntry]) -> None:
        def find() -> list[DataEntry]:
            found = [entry for entry in wanted if cutting.intact(entry.shard, self._store)]
            cutting.pin_all([entry.shard for entry in found], self._store)
            return found

        for entry in await self._runner(find):
            self._arrive(entry)

    async def _get(self, entry: DataEntry, peers: Sequence[PeerId]) -> bool:
        try:
            sizes = range(entry.size, entry.size + 1)
            await self._shards.fetch(entry.shard, providers=peers, sizes=sizes, announce=False)
            await self._runner(lambda: self._store.pin(entry.shard))
        except NoRoom as error:
            self._warn("room", str(_no_space(error)))
            return False
        except ShardError as error:
            logger.info("a shard of the run's data did not come: %s", error)
            return False
        self.warnings.pop("room", None)
        self._fetched_bytes += entry.size
        self._arrive(entry)
        self._report()
        return True

    async def _who_has(self, entries: Sequence[DataEntry]) -> dict[DataEntry, list[PeerId]]:
        """Peers that say they have a shard, or a part of it, for those that are not here, in their order."""
        lacking = [entry for entry in entries if entry.shard not in self._here]
        first = self._looked * ASKED % max(1, len(lacking))  # each time others, where they are many
        lacking, self._looked = (lacking[first:] + lacking[:first])[:ASKED], self._looked + (len(lacking) > ASKED)
        holders: defaultdict[DataEntry, list[PeerId]] = defaultdict(list)
        asked: set[PeerId] = set()

        async def ask(peer: PeerId) -> None:
            for at in range(0, len(lacking), LIMITS.asked):
                batch = lacking[at : at + LIMITS.asked]
                holdings = await self._shards.ask_holdings(peer, *(entry.shard for entry in batch))
                for entry, holding in zip(batch, holdings, strict=True):
                    if holding.bits() and holding.size == entry.size:
                        holders[entry].append(peer)

        async def ask_all(peers: Sequence[PeerId]) -> None:
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    if peer not in asked and peer != self._shards.network.me:
                        asked.add(peer)
                        nursery.start_soon(ask, peer)

        await ask_all([view.peer for view in self._shards.network.peers()])
        if len(holders) < len(lacking):
            await ask_all(await self._announcers())
        return {entry: holders[entry] for entry in lacking if entry in holders}

    async def _announcers(self) -> tuple[PeerId, ...]:
        """Peers that announced the index, and so hold some of the data."""
        with trio.move_on_after(LIMITS.call):
            return await self._shards.network.find_providers(self._index_id)
        return ()

    def _arrive(self, entry: DataEntry) -> None:
        self._here[entry.shard] = entry
        self._arrived.unpark_all()

    def _give_up(self) -> None:
        if "room" in self.warnings:
            raise NoSpace(self.warnings["room"])
        raise RunUnavailable(
            f"no text to train on: nobody who could be reached within {PATIENCE:.0f} s has a shard of the run's data. "
            "Join a member that has (--join), name the run's corpus (--corpus), or train on text of your own (--data "
            "local)."
        )

    def _warn(self, cause: str, text: str) -> None:
        if self.warnings.get(cause) != text:
            logger.warning("%s", text)
        self.warnings[cause] = text

    def _report(self, *, finished: bool = False) -> None:
        now = trio.current_time()
        if finished or now - self._reported_at >= REPORT_EVERY:
            self._reported_at = now
            told = self.status()
            rate = self._fetched_bytes / max(1e-9, now - self._began)
            left = max(0, told["of"] - told["bytes"]) / rate if rate else 0.0
            self._emit({"event": "data", **told, "rate": round(rate), "left": round(left, 1)})


@asynccontextmanager
async def shown(emit: Emit) -> AsyncIterator[Meter]:
    """Tell how far work in a thread is while the block lasts; where the block is cancelled, the work ends early."""
    meter = Meter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_show, meter, emit)
        try:
            yield meter
        except Stopped:
            await trio.lowlevel.checkpoint()  # raises Cancelled
            raise
        nursery.cancel_scope.cancel()


async def _show(meter: Meter, emit: Emit) -> None:
    try:
        while True:
            await trio.sleep(REPORT_EVERY)
            if not meter.step:  # it has not begun
                continue
            told = {"step": meter.step, "bytes": meter.done, "of": meter.total, "rate": round(meter.rate)}
            left = round(meter.left, 1) if math.isfinite(meter.left) else None
            emit({"event": "corpus", **told, "left": left})
    finally:
        meter.stopped = True


def pace(done: int, total: int, rate: float) -> str:
    """How far it is, how fast, and how long it will take, for a line on a terminal."""
    if not done:
        return f"{total / MB:.1f} MB" if total else "…"
    left = max(0, total - done) / rate if rate else 0.0
    until = f", {left:.0f} s left" if left >= 1 else ""
    return f"{done / MB:.1f}" + (f" of {total / MB:.1f}" if total else "") + f" MB, {rate / MB:.1f} MB/s{until}"


def _no_space(error: NoRoom) -> NoSpace:
    return NoSpace(f"the run's data do not fit: {error}")
