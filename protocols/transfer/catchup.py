"""Catch-up: the whole shared state of a round, fetched from several members at once, and from others who fetch it.

A node offers the states of its last rounds in chunks. Whoever needs one asks members for a manifest (round, state hash,
chunk hashes), takes the state that is asked for, or the one that most of them stand on, and fetches its chunks from all
members who gave the same manifest: each free fetcher takes the next chunk, a chunk that fails goes to another source,
and every chunk is checked against its hash as it arrives. At the end the state hash is recomputed: no head count
replaces it.

Many may join at once and not choke the members: every source tells who else asked for the state of late, each joiner
offers the chunks that it has verified, and takes from members first what no other joiner has (`catchup_fetch`). And
whoever serves states serves a bounded number of chunks at a time, joiner by joiner in a circle (`protocols.turns`), and
few of them while its own exchange of a round is under way (`eased`).

Messages:
- `catchup.manifest`: ManifestQuery -> StateManifest; refused where the state is not here whole;
- `catchup.held`: HeldQuery -> Held, which chunks are here and who asked for them; refused where none is;
- the chunks, as `Bulk` offers under ("state", run id, state hash, index).

Who may fail when, and what is then true: a source that dies, lies or stops serving costs its chunks another try,
nothing else. An attempt that ends early is taken up again when the same state is asked for, as long as the process
lives: in the next one the swarm stands on another state, of which no chunk is the same, and members serve a state for
STATES_KEPT rounds only. A manifest whose chunks do not make up the state costs one fetch of it and is not used again.

A state is no shard: members know it by its state hash before anybody has hashed it as a shard, it lives in memory for
some rounds, and on disk as a checkpoint; a shard of it would be hashed, written and synced once more in every round.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio
from blake3 import blake3
from numpy.typing import NDArray

from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.methods.known.messages import MAX_ROUND
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk import Bulk, Key
from swarmnode.protocols.transfer.catchup_fetch import CHUNK, Attempt, Errand, Holding, News, fetch_chunks
from swarmnode.protocols.transfer.scheduler import Turns
from swarmnode.training.outer import Layout, OuterState, state_hash

logger = logging.getLogger(__name__)

STATES_KEPT = 4  # rounds that a node serves: late comers and this round's missers find theirs
CHUNK_WITHIN = 120.0  # seconds; a source that trickles, or has many to serve, may take so long for a chunk
MANIFEST_TIMEOUT = 5.0  # seconds
SERVED_AT_ONCE = 8  # chunks; a round's own exchange finds the line and the processor half free
SERVED_EACH = 4  # chunks of those for one joiner
TURN = 20.0  # seconds after which a joiner that reads slowly keeps nobody else out
ASKED_LATELY = 60.0  # seconds for which one that asked for a state is told to others
ASKERS_KEPT, ASKERS_TOLD = 64, 16


@dataclass(frozen=True)
class ManifestQuery:
    run_id: str
    state_hash: str | None  # None: the newest state


@dataclass(frozen=True)
class StateManifest:
    """`catchup.manifest`: what a member offers."""

    run_id: str
    round: int  # rounds that are in this state
    state_hash: str
    layout: str  # digest of the layout table
    size: int  # bytes of parameters ‖ momentum
    chunks: tuple[bytes, ...]  # blake3 of each chunk

    @property
    def digest(self) -> bytes:
        """What two manifests of the same chunks have in common."""
        return blake3(b"".join(self.chunks)).digest()


@dataclass(frozen=True)
class HeldQuery:
    run_id: str
    state_hash: str
    manifest: bytes  # digest of the asker's manifest


@dataclass(frozen=True)
class Held:
    """`catchup.held`: what is here of a state."""

    chunks: bytes  # a bit for each chunk, the lowest of the first byte first; empty: all
    askers: tuple[str, ...]  # peers that asked for it of late, some of them


class CatchUpFailed(Exception):
    """No complete state could be fetched now; trying again later may help."""


@dataclass
class _Served:
    """A state that is here whole."""

    round: int
    state: OuterState
    manifest: StateManifest | None = None


@dataclass(frozen=True)
class _Fetched:
    """A state that is on its way here, or was."""

    manifest: StateManifest
    attempt: Attempt


class CatchUp:
    """Serves and fetches the states of one run."""

    def __init__(
        self,
        *,
        run_id: str,
        rpc: Rpc,
        bulk: Bulk,
        liveness: Liveness,
        runner: Runner,
        layout: Layout,
    ) -> None:
        self._run_id = run_id
        self._rpc = rpc
        self._bulk = bulk
        self._liveness = liveness
        self._runner = runner
        self._layout = layout
        self._random = random.Random(f"{run_id} {bulk.me}")  # another on each node, the same in each simulation
        self._served: OrderedDict[str, _Served] = OrderedDict()
        self._unfinished: _Fetched | None = None
        self._fetching = trio.Lock()
        self._hashing = trio.Lock()
        self._turns = Turns(SERVED_AT_ONCE, SERVED_EACH, longest=TURN)
        self._askers: OrderedDict[tuple[str, PeerId], float] = OrderedDict()  # (state hash, peer): when, trio time
        rpc.serve("catchup.manifest", ManifestQuery, self._on_manifest)
        rpc.serve("catchup.held", HeldQuery, self._on_held)

    # --- serving ----------------------------------------------------------------------------------------------------

    def serve_state(self, round: int, hash: str, state: OuterState) -> None:
        """Offer the state after `round` rounds; the oldest of more than STATES_KEPT is withdrawn."""
        if hash in self._served:
            return
        self._keep(hash, _Served(round, state))
        for index, chunk in enumerate(_chunks(state)):
            self._bulk.offer(self._key(hash, index), chunk, turns=self._turns)

    def _keep(self, hash: str, served: _Served) -> None:
        self._served[hash] = served
        while len(self._served) > STATES_KEPT:
            self.withdraw(next(iter(self._served)))

    def withdraw(self, hash: str) -> None:
        """Serve this state no longer."""
        if self._served.pop(hash, None) is not None:
            self._bulk.withdraw(("state", self._run_id, hash))

    def eased(self) -> AbstractContextManager[None]:
        """While in the block this node has something to exchange itself: it serves little, for some seconds."""
        return self._turns.eased()

    async def _on_manifest(self, peer: PeerId, query: ManifestQuery) -> StateManifest:
        if query.run_id != self._run_id or not self._served:
            raise Refuse("unknown-run", "this node has no state of that run")
        newest = next(reversed(self._served))
        wanted = query.state_hash or newest
        served = self._served.get(wanted)
        if served is None:
            raise Refuse("unknown-state", f"this node no longer has state {wanted[:12]}")
        self._note_asker(wanted, peer)
        async with self._hashing:  # once, however many ask at the same time
            if served.manifest is None:
                chunks = _chunks(served.state)
                digests = await self._runner(lambda: tuple(blake3(chunk).digest() for chunk in chunks))
                size = sum(len(chunk) for chunk in chunks)
                served.manifest = StateManifest(self._run_id, served.round, wanted, self._layout.digest, size, digests)
        return served.manifest

    async def _on_held(self, peer: PeerId, query: HeldQuery) -> Held:
        served, fetched = self._served.get(query.state_hash), self._unfinished
        chunks: bytes | None = None
        if served is not None and served.manifest is not None and served.manifest.digest == query.manifest:
            chunks = b""
        elif fetched is not None and fetched.manifest.digest == query.manifest:
            chunks = np.packbits(fetched.attempt.have, bitorder="little").tobytes()
        if query.run_id != self._run_id or chunks is None:
            raise Refuse("unknown-state", f"this node has nothing of state {query.state_hash[:12]}")
        self._note_asker(query.state_hash, peer)
        return Held(chunks, self._lately(query.state_hash, peer))

    def _note_asker(self, hash: str, peer: PeerId) -> None:
        self._askers[hash, peer] = trio.current_time()
        self._askers.move_to_end((hash, peer))
        while len(self._askers) > ASKERS_KEPT:
            self._askers.popitem(last=False)

    def _lately(self, hash: str, asker: PeerId) -> tuple[PeerId, ...]:
        since = trio.current_time() - ASKED_LATELY
        others = [p for (h, p), at in self._askers.items() if h == hash and p != asker and at > since]
        return tuple(self._random.sample(others, min(ASKERS_TOLD, len(others))))

    # --- fetching ---------------------------------------------------------------------------------------------------

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
        self, manifest: StateManifest, members: list[PeerId], progress: Callable[[int, int], None] | None
    ) -> tuple[int, str, OuterState]:
        async with self._fetching:
            attempt = self._take_up(manifest)
            logger.info(
                "fetching the state of round %d: %d bytes, chunks that are missing: %d of %d, sources: %d",
                manifest.round,
                manifest.size,
                attempt.missing,
                len(manifest.chunks),
                len(members),
            )

            def arrived(index: int) -> None:
                digest = manifest.chunks[index]
                key = self._key(manifest.state_hash, index)
                self._bulk.offer(key, attempt.part(index), digest=digest, turns=self._turns)
                if progress is not None:
                    progress(attempt.done, manifest.size)

            errand = Errand(partial(self._ask_held, manifest), partial(self._fetch_chunk, manifest))
            await fetch_chunks(attempt, members, errand, me=self._bulk.me, arrived=arrived, rng=self._random)
            if attempt.missing:
                total = len(manifest.chunks)
                raise CatchUpFailed(f"{attempt.missing} of {total} chunks of the state could not be fetched")
            try:
                state = await self._runner(lambda: self._restore(manifest, attempt.buffer))
            except CatchUpFailed:
                self._give_up()
                raise
            self._unfinished = None
            if manifest.state_hash not in self._served:  # the chunks are on offer, from the memory of the state
                self._keep(manifest.state_hash, _Served(manifest.round, state, manifest))
            return manifest.round, manifest.state_hash, state

    def _take_up(self, manifest: StateManifest) -> Attempt:
        """The attempt at this state that ended early, or a new one; memory for one state at a time."""
        if self._unfinished is not None and self._unfinished.manifest == manifest:
            return self._unfinished.attempt
        self._give_up()
        self._unfinished = _Fetched(manifest, Attempt(manifest.size, manifest.chunks))
        return self._unfinished.attempt

    def _give_up(self) -> None:
        if self._unfinished is not None:
            hash, self._unfinished = self._unfinished.manifest.state_hash, None
            if hash not in self._served:
                self._bulk.withdraw(("state", self._run_id, hash))

    async def _ask_manifests(self, peers: list[PeerId], wanted: str | None) -> dict[PeerId, StateManifest]:
        manifests: dict[PeerId, StateManifest] = {}

        async def ask(peer: PeerId) -> None:
            query = ManifestQuery(self._run_id, wanted)
            try:
                manifests[peer] = await self._rpc.call(
                    peer, "catchup.manifest", query, StateManifest, timeout=MANIFEST_TIMEOUT
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

    def _fits(self, manifest: StateManifest) -> bool:
        size = 2 * 4 * self._layout.parameters
        return (
            manifest.run_id == self._run_id
            and 0 <= manifest.round <= MAX_ROUND
            and manifest.layout == self._layout.digest
            and manifest.size == size
            and len(manifest.chunks) == -(-size // CHUNK)
            and all(len(digest) == 32 for digest in manifest.chunks)
        )

    async def _ask_held(self, manifest: StateManifest, peer: PeerId) -> News:
        query = HeldQuery(self._run_id, manifest.state_hash, manifest.digest)
        try:
            held = await self._rpc.call(peer, "catchup.held", query, Held, timeout=MANIFEST_TIMEOUT)
        except CallError as error:
            raise NetworkError(str(error)) from error
        count = len(manifest.chunks)
        if (held.chunks and len(held.chunks) != -(-count // 8)) or len(held.askers) > ASKERS_TOLD:
            raise NetworkError(f"{peer} tells of another number of chunks, or of too many peers")
        bits = np.unpackbits(np.frombuffer(held.chunks, np.uint8), count=count, bitorder="little")
        holds: Holding = bits.astype(np.bool_) if held.chunks else np.ones(count, np.bool_)
        return News(holds, held.askers)

    async def _fetch_chunk(self, manifest: StateManifest, peer: PeerId, index: int, room: memoryview) -> None:
        key, digest = self._key(manifest.state_hash, index), manifest.chunks[index]
        fetch = partial(self._bulk.fetch, peer, key, into=room, max_size=len(room), digest=digest, stall=CHUNK_WITHIN)
        with trio.move_on_after(CHUNK_WITHIN) as scope:
            try:
                await self._liveness.unless_gone(peer, fetch)
            except PeerGoneSilent as error:
                raise NetworkError(str(error)) from error
        if scope.cancelled_caught:
            raise NetworkError(f"{peer} took more than {CHUNK_WITHIN:.0f} s for a chunk")

    def _restore(self, manifest: StateManifest, buffer: NDArray[np.uint8]) -> OuterState:
        vector = buffer.view("<f4").astype(np.float32, copy=False)
        vector.flags.writeable = False
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
