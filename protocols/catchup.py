"""Catch-up: the whole shared state of a round, fetched from several members at once.

A node offers the states of its last rounds in chunks. Whoever needs one asks members for a manifest (round, state hash,
chunk hashes), takes the state that is asked for, or the one that most of them stand on, and fetches its chunks from all
members who gave the same manifest: each free fetcher takes the next chunk, a chunk that fails goes to another member,
and every chunk is checked against its hash as it arrives. At the end the state hash is recomputed: no head count
replaces it. A member that dies or lies costs its chunks another try, nothing else. An attempt that ends early is taken
up again when the same state is asked for.

A state is no shard: members know it by its state hash before anybody has hashed it as a shard, it lives in memory for
some rounds, and on disk as a checkpoint; a shard of it would be hashed, written and synced once more in every round.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import trio
from blake3 import blake3

from swarmnode.protocols.bulk import Bulk, Key
from swarmnode.protocols.exchange.bounds import MAX_ROUND
from swarmnode.protocols.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.runner import Runner
from swarmnode.training.layout import Layout
from swarmnode.training.outer import OuterState, state_hash

logger = logging.getLogger(__name__)

CHUNK = 1 << 20  # bytes; small enough to spread over members, large enough that requests do not matter
STATES_KEPT = 4  # rounds that a node serves: late comers and this round's missers find theirs
FETCHERS = 4  # chunks in flight per member
CHUNK_WITHIN = 120.0  # seconds; a member that trickles holds up a chunk for this long, then others fetch it
MANIFEST_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class ManifestQuery:
    run_id: str
    state_hash: str | None  # None: the newest state


@dataclass(frozen=True)
class Manifest:
    """`catchup.manifest`: what a member offers."""

    run_id: str
    round: int  # rounds that are in this state
    state_hash: str
    layout: str  # digest of the layout table
    size: int  # bytes of parameters ‖ momentum
    chunks: tuple[bytes, ...]  # blake3 of each chunk


class CatchUpFailed(Exception):
    """No complete state could be fetched now; trying again later may help."""


@dataclass
class _Served:
    round: int
    state: OuterState
    manifest: Manifest | None = None


@dataclass
class _Attempt:
    """A state of which some chunks are here, each verified; memory that nobody else holds."""

    manifest: Manifest
    buffer: bytearray
    missing: set[int]


class CatchUp:
    """Serves and fetches the states of one run."""

    def __init__(
        self, *, run_id: str, rpc: Rpc, bulk: Bulk, liveness: Liveness, runner: Runner, layout: Layout
    ) -> None:
        self._run_id = run_id
        self._rpc = rpc
        self._bulk = bulk
        self._liveness = liveness
        self._runner = runner
        self._layout = layout
        self._served: OrderedDict[str, _Served] = OrderedDict()
        self._unfinished: _Attempt | None = None
        self._hashing = trio.Lock()
        rpc.serve("catchup.manifest", ManifestQuery, self._on_manifest)

    def serve_state(self, round: int, hash: str, state: OuterState) -> None:
        """Offer the state after `round` rounds; the oldest of more than STATES_KEPT is withdrawn."""
        if hash in self._served:
            return
        self._served[hash] = _Served(round, state)
        for index, chunk in enumerate(_chunks(state)):
            self._bulk.offer(self._key(hash, index), chunk)
        while len(self._served) > STATES_KEPT:
            self.withdraw(next(iter(self._served)))

    def withdraw(self, hash: str) -> None:
        """Serve this state no longer."""
        if self._served.pop(hash, None) is not None:
            self._bulk.withdraw(("state", self._run_id, hash))

    async def _on_manifest(self, peer: PeerId, query: ManifestQuery) -> Manifest:
        if query.run_id != self._run_id or not self._served:
            raise Refuse("unknown-run", "this node has no state of that run")
        newest = next(reversed(self._served))
        wanted = query.state_hash or newest
        served = self._served.get(wanted)
        if served is None:
            raise Refuse("unknown-state", f"this node no longer has state {wanted[:12]}")
        async with self._hashing:  # once, however many ask at the same time
            if served.manifest is None:
                chunks = _chunks(served.state)
                digests = await self._runner(lambda: tuple(blake3(chunk).digest() for chunk in chunks))
                size = sum(len(chunk) for chunk in chunks)
                served.manifest = Manifest(self._run_id, served.round, wanted, self._layout.digest, size, digests)
        return served.manifest

    async def fetch(
        self,
        peers: Iterable[PeerId],
        *,
        state_hash: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[int, str, OuterState]:
        """Fetch a state from `peers`: the one with this hash, or the one that most of them stand on.

        `progress(done, size)` in bytes. Returns (rounds, state hash, state). Raises CatchUpFailed.
        """
        manifests = await self._ask_manifests(list(peers), state_hash)
        usable = {p: m for p, m in manifests.items() if self._fits(m)}
        if not usable:
            raise CatchUpFailed("no member that answered has the state" if manifests else "no member answered")
        votes = Counter(usable.values())
        failures: list[str] = []
        for chosen in sorted(votes, key=lambda m: (votes[m], m.round, m.state_hash), reverse=True):
            try:
                return await self._fetch_by(chosen, [p for p, m in usable.items() if m == chosen], progress)
            except CatchUpFailed as error:  # a manifest that lies must not stand in the way of one that does not
                failures.append(str(error))
        raise CatchUpFailed("; ".join(failures))

    async def _fetch_by(
        self, manifest: Manifest, sources: list[PeerId], progress: Callable[[int, int], None] | None
    ) -> tuple[int, str, OuterState]:
        attempt, self._unfinished = self._unfinished, None
        if attempt is None or attempt.manifest != manifest:
            attempt = _Attempt(manifest, bytearray(manifest.size), set(range(len(manifest.chunks))))
        logger.info(
            "fetching the state of round %d: %d bytes, chunks that are missing: %d of %d, sources: %d",
            manifest.round,
            manifest.size,
            len(attempt.missing),
            len(manifest.chunks),
            len(sources),
        )
        try:
            await self._fetch_chunks(attempt, sources, progress)
        except BaseException:
            self._unfinished = attempt
            raise
        state = await self._runner(lambda: self._restore(manifest, attempt.buffer))
        return manifest.round, manifest.state_hash, state

    async def _ask_manifests(self, peers: list[PeerId], wanted: str | None) -> dict[PeerId, Manifest]:
        manifests: dict[PeerId, Manifest] = {}

        async def ask(peer: PeerId) -> None:
            query = ManifestQuery(self._run_id, wanted)
            try:
                manifests[peer] = await self._rpc.call(
                    peer, "catchup.manifest", query, Manifest, timeout=MANIFEST_TIMEOUT
                )
                self._liveness.heard_from(peer)
            except CallError as error:
                logger.info("no manifest from %s: %s", peer, error)

        with trio.move_on_after(MANIFEST_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(ask, peer)
        if wanted is not None:
            return {p: m for p, m in manifests.items() if m.state_hash == wanted}
        return manifests

    def _fits(self, manifest: Manifest) -> bool:
        size = 2 * 4 * self._layout.parameters
        return (
            manifest.run_id == self._run_id
            and 0 <= manifest.round <= MAX_ROUND
            and manifest.layout == self._layout.digest
            and manifest.size == size
            and len(manifest.chunks) == -(-size // CHUNK)
            and all(len(digest) == 32 for digest in manifest.chunks)
        )

    async def _fetch_chunks(
        self, attempt: _Attempt, sources: list[PeerId], progress: Callable[[int, int], None] | None
    ) -> None:
        manifest, missing = attempt.manifest, attempt.missing
        if not missing:
            return
        buffer = memoryview(attempt.buffer)
        waiting = deque(sorted(missing))
        finished = trio.Event()

        async def fetcher(peer: PeerId) -> None:
            while not finished.is_set():
                if not waiting:
                    # another member's chunk may still fail and come back
                    with trio.move_on_after(0.1):
                        await finished.wait()
                    continue
                index = waiting.popleft()
                part = buffer[index * CHUNK : (index + 1) * CHUNK]
                try:
                    await self._fetch_chunk(peer, manifest, index, part)
                except (NetworkError, PeerGoneSilent) as error:
                    logger.info("chunk %d of the state from %s: %s", index, peer, error)
                    waiting.append(index)
                    return  # this member is of no use now; the others take its chunks
                missing.remove(index)
                if progress is not None:
                    left = sum(min(CHUNK, manifest.size - i * CHUNK) for i in missing)
                    progress(manifest.size - left, manifest.size)
                if not missing:
                    finished.set()

        async with trio.open_nursery() as nursery:
            for peer in sources:
                for _ in range(FETCHERS):
                    nursery.start_soon(fetcher, peer)
        if missing:
            raise CatchUpFailed(f"{len(missing)} of {len(manifest.chunks)} chunks of the state could not be fetched")

    async def _fetch_chunk(self, peer: PeerId, manifest: Manifest, index: int, part: memoryview) -> None:
        digest = manifest.chunks[index]
        if digest == blake3(bytes(len(part))).digest():
            part[:] = bytes(len(part))  # an outer momentum that is not used need not travel
            return
        key = self._key(manifest.state_hash, index)
        with trio.move_on_after(CHUNK_WITHIN) as scope:
            await self._liveness.unless_gone(
                peer, lambda: self._bulk.fetch(peer, key, into=part, max_size=len(part), digest=digest)
            )
        if scope.cancelled_caught:
            raise NetworkError(f"{peer} took more than {CHUNK_WITHIN:.0f} s for a chunk")

    def _restore(self, manifest: Manifest, buffer: bytearray) -> OuterState:
        vector = np.frombuffer(buffer, np.dtype("<f4")).astype(np.float32, copy=False)
        half = self._layout.parameters
        state = OuterState(vector[:half], vector[half:])
        computed = state_hash(manifest.round, self._layout, state)
        if computed != manifest.state_hash:
            raise CatchUpFailed(f"the state fetched hashes to {computed[:12]}, not to {manifest.state_hash[:12]}")
        if not np.isfinite(vector).all():
            raise CatchUpFailed("the state fetched contains NaN or infinity")
        return state

    def _key(self, hash: str, index: int) -> Key:
        return ("state", self._run_id, hash, index)


def _chunks(state: OuterState) -> list[memoryview]:
    """Chunks of parameters ‖ momentum, as views; a chunk that spans both is copied."""
    first = np.ascontiguousarray(state.parameters, "<f4").data.cast("B")
    second = np.ascontiguousarray(state.momentum, "<f4").data.cast("B")
    edge = len(first)
    chunks = []
    for start in range(0, 2 * edge, CHUNK):
        stop = min(start + CHUNK, 2 * edge)
        if stop <= edge:
            chunks.append(first[start:stop])
        elif start >= edge:
            chunks.append(second[start - edge : stop - edge])
        else:
            chunks.append(memoryview(bytes(first[start:]) + bytes(second[: stop - edge])))
    return chunks
