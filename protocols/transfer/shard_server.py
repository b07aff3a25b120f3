"""Serving shards: what others are told of those that are here, and their chunks, read from disk when asked for.

Who may fail when, and what is then true:
- a chunk is checked against its leaf before it is served, where that was not done within the last minute: a rotten disk
  loses the shard, not this node's good name;
- a peer that asks on and on for what is not here uses up its `misses`; then calls are refused as "busy", streams are
  closed and it is counted. One that breaks the form loses its stream; one that does not read loses it after
  `serve_stall`;
- more peers come than are served at once: an idle stream ends, else that of the peer of the least standing, if whoever
  comes has `AHEAD` more.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from swarmnode.protocols.calls.rpc import Refuse, Rpc
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream
from swarmnode.protocols.peers.violations import Kind, Offences
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_tree import CHUNK, HASH, MAX_CHUNKS, ShardId, chunk_count
from swarmnode.protocols.transfer.shard_wire import (
    HAVE,
    MANIFEST,
    MAX_MESSAGE,
    PROTOCOL,
    RUN,
    RUN_BYTES,
    Have,
    Holdings,
    Leaves,
    NotHeld,
    Piece,
    ShardLimits,
    Store,
    Want,
    WantManifest,
)
from swarmnode.protocols.wire import WireError, decode, encode

MAX_PEERS = 1024  # whose misses are remembered; the longest silent is forgotten first
HEAD = MAX_MESSAGE + 8  # bytes before an answer's chunks: its message, with the length in front
AHEAD = 0.25  # of standing, by which a peer must be ahead to take the place of another that is being served
SPARE_ROOMS = 4  # answers' memory kept for the next ones: fresh memory costs more than reading into it

log = logging.getLogger(__name__)


class ShardDesk:
    """Answers questions about what the store holds, and serves chunks of it while `serving`."""

    def __init__(
        self,
        network: Network,
        rpc: Rpc,
        store: Store,
        *,
        runner: Runner,
        limits: ShardLimits,
        offences: Offences,
        counts: Counter[str],
        asked: Callable[[ShardId, PeerId], None],
    ) -> None:
        """`counts` gets chunks_served, bytes_served, misses; `asked` is told of each shard that a peer asks about."""
        self._store, self._runner, self._limits = store, runner, limits
        self._offences, self._counts, self._asked = offences, counts, asked
        self._allowance = _Allowance(limits)
        self._seats: OrderedDict[_Seat, None] = OrderedDict()  # the one used longest ago first
        self._rooms: list[memoryview] = []  # for answers, not in use now
        self._open = False
        self._standing: Callable[[PeerId], float] = lambda peer: 1.0
        rpc.serve(HAVE, Have, self._on_have)
        rpc.serve(MANIFEST, WantManifest, self._on_manifest)
        network.serve(PROTOCOL, self._serve_stream)

    @property
    def streams(self) -> int:
        """On which peers fetch chunks now."""
        return len(self._seats)

    def prefer(self, standing: Callable[[PeerId], float]) -> None:
        """Where not all can be served, serve those of more `standing` (0 to 1); until then all are equal."""
        self._standing = standing

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Take streams while the block runs; those that are left are ended with it."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            for seat in list(self._seats):
                seat.scope.cancel()

    async def _on_have(self, peer: PeerId, request: Have) -> Holdings:
        if len(request.shards) > self._limits.asked or any(len(shard) != HASH for shard in request.shards):
            self._offences.note(peer, f"asked for {len(request.shards)} shards, or for what is none")
            raise Refuse("malformed", f"at most {self._limits.asked} shard ids of {HASH} bytes")
        for shard in request.shards:
            self._asked(shard, peer)
        found = tuple(self._store.holding(shard) for shard in request.shards)
        missing = sum(not holding.size and not holding.complete for holding in found)
        if not self._may_miss(peer, missing):
            raise Refuse("busy", "asked too often for what is not here")
        return Holdings(found)

    async def _on_manifest(self, peer: PeerId, request: WantManifest) -> Leaves:
        if len(request.shard) == HASH:
            try:
                manifest = await self._runner(lambda: self._store.manifest(request.shard))
                return Leaves(manifest.size, manifest.leaves)
            except NotHeld:
                pass
        if not self._may_miss(peer, 1):
            raise Refuse("busy", "asked too often for what is not here")
        raise Refuse("not-held", "this node does not have that shard")

    def _may_miss(self, peer: PeerId, missing: int) -> bool:
        """Whether the peer may ask for that much more in vain."""
        self._counts["misses"] += missing
        if not missing or self._allowance.take(peer, missing, trio.current_time()):
            return True
        self._offences.note(peer, "asks on and on for shards that are not here", Kind.LOAD)
        return False

    async def _serve_stream(self, stream: Stream) -> None:
        if not self._open:
            return
        if sum(seat.stream.peer == stream.peer for seat in self._seats) >= self._limits.streams:
            self._offences.note(stream.peer, f"more than {self._limits.streams} streams", Kind.LOAD)
            return
        if len(self._seats) >= self._limits.streams_in_all:
            leaves = self._who_leaves_for(stream.peer)
            if leaves is None:
                return
            leaves.scope.cancel()
            del self._seats[leaves]
        seat = _Seat(stream)
        self._seats[seat] = None
        try:
            with seat.scope:
                await self._serve(seat)
        except WireError as error:
            self._offences.note(stream.peer, str(error))
        except NetworkError as error:
            log.debug("serving shards to %s ended: %s", stream.peer, error)
        finally:
            self._seats.pop(seat, None)

    def _who_leaves_for(self, peer: PeerId) -> _Seat | None:
        """Whose stream ends so that `peer` has one: the longest idle, else of the least standing, if that is less."""
        idle = next((seat for seat in self._seats if not seat.busy), None)
        if idle is not None:
            return idle
        served = {seat: self._standing(seat.stream.peer) for seat in self._seats}
        least = min(served, key=served.__getitem__, default=None)
        return least if least is not None and served[least] + AHEAD <= self._standing(peer) else None

    async def _serve(self, seat: _Seat) -> None:
        reader = FrameReader(seat.stream, limit=MAX_MESSAGE)
        while (raw := await reader.frame()) is not None:
            want = decode(Want, raw, limit=MAX_MESSAGE)
            if len(want.shard) != HASH or not 0 <= want.index < MAX_CHUNKS:
                raise WireError(f"Want: chunk {want.index} of an id of {len(want.shard)} bytes")
            if not 1 <= want.count <= (1 if want.prove else RUN):
                raise WireError(f"Want: {want.count} chunks at once")
            seat.busy = True
            self._seats.move_to_end(seat)
            room = self._rooms.pop() if self._rooms else memoryview(bytearray(HEAD + RUN_BYTES))
            try:
                answer = await self._answer(seat.stream.peer, want, room)
                with trio.move_on_after(self._limits.serve_stall) as scope:
                    await seat.stream.send_all(answer)
            finally:
                if len(self._rooms) < SPARE_ROOMS:
                    self._rooms.append(room)
            if scope.cancelled_caught:
                raise WireError(f"took nothing for {self._limits.serve_stall:g} s")
            seat.busy = False

    async def _answer(self, peer: PeerId, want: Want, room: memoryview) -> memoryview | bytes:
        """The bytes to send: read into `room`, with the message right before them, so that nothing is moved again."""
        chunks = room[HEAD : HEAD + want.count * CHUNK]
        size = 0 if want.prove else self._store.read_now(want.shard, want.index, chunks)
        try:
            piece = Piece(size) if size else await self._runner(lambda: self._piece(want, chunks))
        except NotHeld:
            if not self._may_miss(peer, 1):
                raise WireError("Want: too many in vain") from None
            return frame(encode(Piece()))
        self._counts["chunks_served"] += chunk_count(piece.size)
        self._counts["bytes_served"] += piece.size
        head = frame(encode(piece))
        room[HEAD - len(head) : HEAD] = head
        return room[HEAD - len(head) : HEAD + piece.size]

    def _piece(self, want: Want, room: memoryview) -> Piece:
        size = self._store.read(want.shard, want.index, room)
        if not want.prove:
            return Piece(size)
        manifest = self._store.manifest(want.shard)
        return Piece(size, manifest.size, manifest.proof(want.index))


@dataclass(eq=False)
class _Seat:
    """One peer's stream, on which chunks are served one after the other."""

    stream: Stream
    busy: bool = False

    def __post_init__(self) -> None:
        self.scope = trio.CancelScope()


class _Allowance:
    """How often each peer may still ask in vain: a bucket of `misses` that refills at `misses_refill` a second."""

    def __init__(self, limits: ShardLimits) -> None:
        self._limits = limits
        self._left: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # peer -> (left, as of when)

    def take(self, peer: PeerId, count: int, now: float) -> bool:
        most = float(self._limits.misses)
        left, since = self._left.pop(peer, (most, now))
        left = min(most, left + (now - since) * self._limits.misses_refill)
        granted = count <= left
        self._left[peer] = (left - count if granted else left, now)
        if len(self._left) > MAX_PEERS:
            self._left.popitem(last=False)
        return granted
