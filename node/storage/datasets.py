"""The data of one run on one node: which shards it needs, and how it comes by them while it already trains.

1. The index that the RunSpec names is here, or is made from this node's own corpus where that is the run's, or is
   fetched. It names the held-out part, which everybody needs, and the shards, of which a node wants the first quarter
   by its own ranking (`training.dataset`).
2. What is in the store is hashed again; what the own corpus contains is taken from there.
3. Who has the rest is asked of connected peers, then of those that announced the index in the DHT; what somebody has
   is fetched, several shards at once, and each is fed to the trainer when it is complete and verified.
4. Training begins when an eighth of what is wanted is here, or all that anybody had at the first look.
5. Where nobody has a shard, the search goes on, and after a while further down the ranking: any quarter of the data
   is better than less. A warning says so until it is complete.

All that is fetched is pinned and served onwards, so the data outlive their creator as far as members hold them.

The functions after the class are what the creator, a member and `swarmnode leave` do with a data set in the store: they
block, and whatever they keep for a run is pinned, so that nothing that the owner or another run fetches displaces it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import trio

from swarmnode.node.exitcodes import RUN_UNAVAILABLE, ExpectedError
from swarmnode.node.storage.datadir import NoSpace
from swarmnode.node.storage.runs import RunStore
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.methods.open.checks.texts import Texts
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardId, ShardManifest, parse_id
from swarmnode.protocols.transfer.shard_wire import (
    LIMITS,
    NoRoom,
    ShardError,
    ShardNotHeld,
    parts_of,
)
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.training.corpus import MIN_CHUNKS, Chunk, CorpusError, corpus_for_run, divide, read_chunks
from swarmnode.training.dataset import (
    MAX_INDEX,
    BadIndex,
    CutCorpus,
    DataEntry,
    Index,
    cut,
    decode,
    encode,
    ranking,
    share,
    texts_of,
)
from swarmnode.training.runspec import RunSpec

logger = logging.getLogger(__name__)

ENOUGH = 1 / 8  # of the wanted shards: with them training begins
LOOK_AGAIN = 5.0  # seconds between looks for shards that nobody had
OWN_FIRST = 15.0  # seconds in which only shards of this node's own quarter are looked for: members arrive meanwhile
PATIENCE = 30.0  # seconds after which a node that found no text at all gives up
ASKED = 256  # shards asked for in one look: peers bear 64 questions a second in vain
REPORT_EVERY = 1.0  # seconds between two events

Emit = Callable[[dict[str, Any]], None]

MB = 1_000_000


class DataUnavailable(ExpectedError):
    """The run's data cannot be had: nobody who can be reached has them, or they are not what the run says."""

    exit_code = RUN_UNAVAILABLE


class TextReader(Protocol):
    """Who trains on the text."""

    async def feed(self, texts: Sequence[str]) -> None:
        """Take further files to train on."""


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
        self._own_text = own_text or spec.data.source == "local"
        self._emit = emit
        self._index_id = bytes.fromhex(spec.data.index)
        self._index: Index | None = None
        self._chunks: list[Chunk] | None = None  # of the own corpus, while it is searched
        self._ranked: tuple[DataEntry, ...] = ()
        self._sizes: dict[ShardId, int] = {}
        self._wanted = 0
        self._here: dict[ShardId, DataEntry] = {}  # complete, verified and pinned, in the order of their arrival
        self._given = 0  # of these, how many the trainer was told of
        self._arrived = trio.Event()
        self._looked = 0  # times
        self._fetched_bytes = 0
        self._reported_at = -REPORT_EVERY
        self.warnings: dict[str, str] = {}

    # -- what others see

    @property
    def room(self) -> int:
        """Bytes of text at the most, whichever shards will be found."""
        return sum(sorted((entry.size for entry in self._ranked), reverse=True)[: self._wanted])

    @property
    def heldout(self) -> str:
        """The file with the run's held-out part. `run` must have started."""
        assert self._index is not None  # `run` has read it
        return str(self._store.path(self._index.heldout.shard))

    def take(self) -> tuple[str, ...]:
        """Files to train on that were not taken before; none where the node brings its own text."""
        fresh = list(self._here)[self._given :]
        self._given = len(self._here)
        return tuple(str(self._store.path(shard)) for shard in fresh)

    # -- what who looks at others' work asks for (`Texts`)

    @property
    def shared(self) -> bool:
        """Whether the run's nodes train on shards of one text, so that everybody can have what another trained on."""
        return self._spec.data.source == "shards"

    def given(self) -> tuple[ShardId, ...]:
        """Shards that the trainer was given, in that order."""
        return tuple(self._here)[: self._given]

    def assigned(self, author: PeerId) -> tuple[ShardId, ...]:
        """Shards that a node is to train on, by its own ranking; none before the index is here."""
        if self._index is None:
            return ()
        return tuple(entry.shard for entry in ranking(self._index, self._spec.run_id, author)[: share(self._index)])

    def size(self, shard: ShardId) -> int | None:
        """Bytes of a shard of the run's text; None for any other."""
        return self._sizes.get(shard)

    async def read(self, holder: PeerId, shard: ShardId, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a shard, from here or in verified chunks from `holder`. Raises Unavailable."""
        if self._store.holding(shard).complete:
            return (await self._shards.content(shard))[start:stop]
        first, last = start // CHUNK, (stop - 1) // CHUNK
        chunks = await self._shards.read(holder, shard, first, last - first + 1)
        return chunks[start - first * CHUNK : stop - first * CHUNK]

    def status(self) -> dict[str, Any]:
        """For `swarmnode status` and the event `data`."""
        here = list(self._here.values())
        return {
            "source": "local" if self._own_text else "shards",
            "shards": len(here),
            "wanted": self._wanted,
            "bytes": sum(entry.size for entry in here),
            "fetched": self._fetched_bytes,
        }

    # -- the life of it

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Started when there is enough to train on; goes on until all that is wanted is here, then announces on.

        Raises DataUnavailable, NoSpace or CorpusError.
        """
        async with trio.open_nursery() as nursery:
            index = await self._open()
            nursery.start_soon(self._announce)
            self._sizes = {entry.shard: entry.size for entry in index.shards}
            if self._own_text:
                task_status.started()
                return
            self._ranked = ranking(index, self._spec.run_id, self._shards.network.me)
            self._wanted = share(index)
            for entry in await self._runner(lambda: self._found_here(self._ranked[: self._wanted], index)):
                self._arrive(entry)
            self._chunks = None
            await self._complete(task_status)

    async def pass_on(
        self, trainer: TextReader, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Give to the trainer what arrives, until cancelled."""
        task_status.started()
        while True:
            self._arrived = trio.Event()
            if texts := self.take():
                await trainer.feed(texts)
            else:
                await self._arrived.wait()

    async def _announce(self) -> None:
        """Let the DHT find this node for whoever looks for the run's data."""
        try:
            await self._shards.network.provide(self._index_id)
        except (NetworkError, ValueError) as error:  # ValueError: the network announces no more keys
            logger.info("the run's data are found only by connected peers: %s", error)

    # -- index and held-out part

    async def _open(self) -> Index:
        """Have the index and the held-out part."""
        if not await self._runner(self._index_here):
            logger.info("fetching the index of the run's data")
            await self._need("index", self._index_id, range(MAX_INDEX + 1))
        try:
            index = await self._runner(lambda: read_index(self._index_id, self._store))
        except BadIndex as error:
            raise DataUnavailable(
                f"the run names data whose index is none: {error}. Ask whoever made the run."
            ) from error
        heldout = index.heldout
        if (self._spec.data.source == "shards") != bool(index.shards):
            raise DataUnavailable("the run's data are not of the kind that it says. Ask whoever made the run.")
        if not await self._runner(lambda: self._found_here((heldout,), index)):
            logger.info("fetching the held-out text of the run")
            await self._need("held-out text", heldout.shard, range(heldout.size, heldout.size + 1))
        await self._runner(lambda: pin_all((self._index_id, heldout.shard), self._store))
        self._index = index
        return index

    def _index_here(self) -> bool:
        """Whether the index is in the store, or can be made from the own corpus. Blocks."""
        return intact(self._index_id, self._store) or make_index(self._spec, self._own_chunks(), self._store)

    def _found_here(self, wanted: Sequence[DataEntry], index: Index) -> list[DataEntry]:
        """Those that the store has, after what the own corpus contains was put there; pinned. Blocks."""
        lacking = [entry for entry in wanted if not intact(entry.shard, self._store)]
        if lacking:
            take_own(lacking, index, self._own_chunks(), self._store)
        found = [entry for entry in wanted if self._store.holding(entry.shard).complete]
        pin_all([entry.shard for entry in found], self._store)
        return found

    def _own_chunks(self) -> list[Chunk]:
        """The own corpus, read once. Blocks."""
        if self._chunks is None:
            self._chunks = own_chunks(self._corpus)
        return self._chunks

    async def _need(self, what: str, shard: ShardId, sizes: range) -> None:
        try:
            await self._shards.fetch(shard, providers=await self._announcers(), sizes=sizes)
        except NoRoom as error:
            raise _no_space(error) from error
        except ShardError as error:
            raise DataUnavailable(
                f"the {what} of the run's data cannot be had: {error}. The corpus here is not the one that the run "
                "began with: join a member of the run that has it (--join), or name the run's corpus (--corpus)."
            ) from error

    # -- the shards

    async def _complete(self, task_status: trio.TaskStatus[None]) -> None:
        """Fetch until as many as wanted are here; started when training can begin."""
        began, started = trio.current_time(), False

        def start_with(least: float) -> None:
            nonlocal started
            if not started and len(self._here) >= max(1, least):
                started = True
                task_status.started()

        async def get(entry: DataEntry, peers: Sequence[PeerId], slots: trio.Semaphore) -> None:
            async with slots:
                if await self._get(entry, peers):
                    start_with(ENOUGH * self._wanted)

        while len(self._here) < self._wanted:
            before = len(self._here)
            stand_ins = trio.current_time() - began >= OWN_FIRST
            holders = await self._who_has(self._ranked if stand_ins else self._ranked[: self._wanted])
            slots = trio.Semaphore(LIMITS.fetches)
            async with trio.open_nursery() as nursery:
                for entry, peers in list(holders.items())[: self._wanted - before]:
                    nursery.start_soon(get, entry, peers, slots)
            start_with(1)
            if len(self._here) == before:
                if not self._here and trio.current_time() - began >= PATIENCE:
                    self._give_up()
                self._warn()
                await trio.sleep(LOOK_AGAIN)
        start_with(1)
        self.warnings.pop("data", None)
        self._report(finished=True)
        logger.info("all %d shards of this node's text are here (%d bytes fetched)", self._wanted, self._fetched_bytes)

    async def _get(self, entry: DataEntry, peers: Sequence[PeerId]) -> bool:
        try:
            await self._shards.fetch(entry.shard, providers=peers, sizes=range(entry.size, entry.size + 1))
            await self._runner(lambda: self._store.pin(entry.shard))
        except NoRoom as error:
            self.warnings["room"] = str(_no_space(error))
            logger.warning("%s", self.warnings["room"])
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
        self._arrived.set()

    def _give_up(self) -> None:
        if "room" in self.warnings:
            raise NoSpace(self.warnings["room"])
        raise DataUnavailable(
            f"no text to train on: nobody who could be reached within {PATIENCE:.0f} s has a shard of the run's data. "
            "Join a member that has (--join), name the run's corpus (--corpus), or train on text of your own (--data "
            "local)."
        )

    def _warn(self) -> None:
        missing = self._wanted - len(self._here)
        text = f"{missing} of the {self._wanted} shards of text for this node are not to be found; still looking"
        if self.warnings.get("data") != text:
            logger.warning("%s", text)
        self.warnings["data"] = text

    def _report(self, *, finished: bool = False) -> None:
        now = trio.current_time()
        if finished or now - self._reported_at >= REPORT_EVERY:
            self._reported_at = now
            logger.info("%d of %d shards of text are here", len(self._here), self._wanted)
            self._emit({"event": "data", **self.status()})


def _no_space(error: NoRoom) -> NoSpace:
    return NoSpace(f"the run's data do not fit: {error} The cap is shards_cap (--shards-cap GB).")


def publish(spec: RunSpec, corpus: str, store: ShardStore) -> RunSpec:
    """CutCorpus the corpus of a run's creator into shards, keep them, and fill in what the specification then says.

    A specification that already has an index of another corpus comes back as it is: its data must come from peers.
    Raises CorpusError, NoSpace or ShardError.
    """
    held = "" if spec.data.index else spec.task.heldout_sha256
    text = corpus_for_run(corpus, heldout_sha256=held, heldout=None)
    shares_text = spec.data.source == "shards"
    parts = cut(text)
    texts = [parts.heldout[1], *(text for _, text in parts.shards)] if shares_text else [parts.heldout[1]]
    index = encode(_index_of(parts, shares_text))
    shard = ShardManifest.of(index).id
    if spec.data.index not in ("", shard.hex()):
        logger.info("the corpus here is not the one that the run file was made with; its data have to come from peers")
        return spec
    keep([*texts, index], store)
    return spec.resolved(heldout_sha256=text.heldout_sha256, index=shard.hex())


def keep(texts: Sequence[bytes], store: ShardStore) -> None:
    """Make each text a pinned shard. Raises NoSpace, with nothing pinned, where they do not fit; or ShardError."""
    manifests = [ShardManifest.of(text) for text in texts]
    pinned = {kept.shard: kept.size for kept in store.kept() if kept.pinned}
    size = sum(manifest.size for manifest in manifests if manifest.id not in pinned)
    if size + sum(pinned.values()) > store.cap:
        raise NoSpace(
            f"the run's data take {size / MB:.1f} MB as shards, which do not fit: shards_cap allows "
            f"{store.cap / MB:.1f} MB, and {sum(pinned.values()) / MB:.1f} MB of it are pinned. Raise it (--shards-cap "
            "GB), unpin shards of other runs (swarmnode shards ls), or name a smaller corpus."
        )
    try:
        for text, manifest in zip(texts, manifests, strict=True):
            if not intact(manifest.id, store):
                _write(text, manifest, store)
    except NoRoom as error:
        raise NoSpace(f"the run's data cannot be kept as shards: {error}") from error
    pin_all([manifest.id for manifest in manifests], store)


def pin_all(shards: Iterable[ShardId], store: ShardStore) -> None:
    """Raises ShardNotHeld, NoRoom or ShardError."""
    for shard in shards:
        store.pin(shard)


def intact(shard: ShardId, store: ShardStore) -> bool:
    """Whether a shard is here and the disk still has its bytes; one that is damaged counts as not held from now on."""
    if not store.holding(shard).complete:
        return False
    try:
        for _ in parts_of(store, shard):
            pass
    except ShardNotHeld as error:
        logger.warning("%s", error)
        return False
    return True


def read_index(shard: ShardId, store: ShardStore) -> Index:
    """The index of a data set that is here. Raises BadIndex, or ShardNotHeld."""
    manifest = store.manifest(shard)
    if manifest.size > MAX_INDEX:
        raise BadIndex(f"{manifest.size} bytes; at most {MAX_INDEX} are allowed")
    return decode(b"".join(map(bytes, parts_of(store, shard))))


def own_chunks(corpus: str) -> list[Chunk]:
    """The chunks of this node's corpus; none where the default one is not on this machine. Raises CorpusError."""
    try:
        return read_chunks(corpus)
    except CorpusError:
        if corpus:
            raise
        return []


def make_index(spec: RunSpec, chunks: list[Chunk], store: ShardStore) -> bool:
    """Whether these chunks are the run's corpus, so that its index could be made here. Raises NoSpace or ShardError."""
    if len(chunks) < MIN_CHUNKS:
        return False
    index = encode(_index_of(cut(divide(chunks)), spec.data.source == "shards"))
    if ShardManifest.of(index).id.hex() != spec.data.index:
        return False
    keep([index], store)
    return True


def take_own(wanted: Iterable[DataEntry], index: Index, chunks: list[Chunk], store: ShardStore) -> None:
    """Keep those shards that these chunks happen to make. Raises NoSpace or ShardError."""
    found = dict(zip((entry.shard for entry in index.shards), texts_of(chunks, index), strict=True))
    if chunks:
        found[index.heldout.shard] = divide(chunks).heldout
    texts = ((entry, found.get(entry.shard, b"")) for entry in wanted)
    keep([text for entry, text in texts if len(text) == entry.size and ShardManifest.of(text).id == entry.shard], store)


def release_forgotten(runs: RunStore, store: ShardStore) -> None:
    """Pin the data of runs that were left no longer: they go when their room is needed."""
    for name in runs.forgotten():
        try:
            shard = parse_id(name)
            index = read_index(shard, store)
            for one in (shard, index.heldout.shard, *(entry.shard for entry in index.shards)):
                if store.holding(one).size:
                    store.pin(one, False)
        except (ValueError, ShardError) as error:  # ValueError: BadIndex, or another file's name
            logger.warning("what was pinned for the data %s stays pinned: %s", name[:12], error)
        runs.forget(name)


def _index_of(parts: CutCorpus, shares_text: bool) -> Index:
    def entry(upto: int, text: bytes) -> DataEntry:
        return DataEntry(ShardManifest.of(text).id, len(text), upto)

    return Index(entry(*parts.heldout), tuple(entry(*part) for part in parts.shards) if shares_text else ())


def _write(text: bytes, manifest: ShardManifest, store: ShardStore) -> None:
    here = store.begin(manifest)
    try:
        for index in range(manifest.chunks):
            if not here >> index & 1:
                store.write(manifest.id, [(index, memoryview(text)[index * CHUNK : (index + 1) * CHUNK])])
        store.finish(manifest.id)
    except BaseException:
        store.suspend(manifest.id)
        raise
