"""The contributions of an open run that this node holds and serves: encoded pseudo-gradients, by shard id.

They are shards in name and hash, and travel by `bulk` from memory: a contribution is wanted once by everybody within
seconds, and the way over a disk, a manifest and a question to every neighbour would take longer than the bytes.
Whoever has fetched one serves it, so that an author gives it to a few, and these to others.

Bounded by `budget` bytes; the oldest rounds go first. What no encoder makes is remembered as malformed, without bytes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk import Bulk, Key
from swarmnode.protocols.transfer.shard_tree import CHUNK, ShardManifest, leaf
from swarmnode.training.codecs import CodecError
from swarmnode.training.open_step import exact_norm

logger = logging.getLogger(__name__)

MALFORMED_REMEMBERED = 1024
OFFERED_WITHIN = 1.0  # seconds that a source may take to have what it is about to have
ANSWERS_WITHIN = 3.0  # seconds without a byte after which the next source is asked as well
FETCH_WITHIN = 120.0  # seconds of one attempt at one source


class Missing(Exception):
    """None of the peers that were asked has the contribution."""


@dataclass(frozen=True)
class Contribution:
    """One encoded pseudo-gradient."""

    raw: bytes
    norm: float  # Euclidean, exact
    round: int


class _Source:
    """A peer that is asked for a contribution."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.heard = trio.Event()  # bytes come, or none will
        self.ended = trio.Event()


class Contributions:
    """Those of the last rounds, by id."""

    def __init__(
        self,
        *,
        run_id: str,
        bulk: Bulk,
        runner: Runner,
        codec: str,
        elements: int,
        size: int,
        budget: int,
    ) -> None:
        """`size` is what the codec makes of `elements` values, in bytes; `budget` bytes are kept at the most."""
        self._run_id = run_id
        self._bulk, self._runner = bulk, runner
        self._codec, self._elements, self.size = codec, elements, size
        self._budget = budget
        self._held: OrderedDict[bytes, Contribution] = OrderedDict()  # the oldest first
        self._malformed: OrderedDict[bytes, None] = OrderedDict()
        self.fetched = 0

    def __contains__(self, id: bytes) -> bool:
        return id in self._held

    def __getitem__(self, id: bytes) -> Contribution:
        return self._held[id]

    def is_malformed(self, id: bytes) -> bool:
        """Whether bytes with this id were here and no encoder makes them."""
        return id in self._malformed

    async def keep(self, raw: bytes, round: int) -> bytes:
        """Take in what this node made itself; its id. It is served from `serve` on."""
        id, norm = await self._runner(lambda: (id_of(raw), exact_norm(raw, self._elements, codec_name=self._codec)))
        self._put(id, Contribution(raw, norm, round))
        return id

    def serve(self, id: bytes) -> None:
        """Let peers fetch it."""
        if id in self._held:
            self._bulk.offer(self._key(id), self._held[id].raw)

    async def fetch(self, id: bytes, round: int, sources: Sequence[PeerId]) -> None:
        """Have it here, or know it as malformed. Raises Missing.

        Asks `sources` one after the other: the next where one has nothing, or sends nothing for ANSWERS_WITHIN, as a
        frozen one does; what that sends after all still counts.
        """
        async with trio.open_nursery() as nursery:
            for peer in sources:
                source = _Source(peer)
                nursery.start_soon(self._have_from, source, id, round, nursery.cancel_scope)
                with trio.move_on_after(ANSWERS_WITHIN):
                    await source.heard.wait()
                if source.heard.is_set():
                    await source.ended.wait()
        if id not in self._held and id not in self._malformed:
            raise Missing(f"contribution {id.hex()[:12]} is with none of {len(sources)} peers")

    async def _have_from(self, source: _Source, id: bytes, round: int, asking: trio.CancelScope) -> None:
        """Fetch it from one source; ends `asking` where it is here or known as malformed then."""
        try:
            if await self._take_from(source, id, round):
                asking.cancel()
        finally:
            source.heard.set()
            source.ended.set()

    async def _take_from(self, source: _Source, id: bytes, round: int) -> bool:
        """Whether it is here, or known as malformed, after this source was asked."""
        try:
            raw = await self._fetch_from(source.peer, id, lambda size: source.heard.set())
        except NetworkError as error:
            logger.debug("contribution %s not from %s: %s", id.hex()[:12], source.peer, error)
            return False
        found = await self._runner(lambda: id_of(raw))
        if found != id:
            logger.warning("%s sent another contribution than the one asked for", source.peer)
            return False
        try:
            norm = await self._runner(lambda: exact_norm(raw, self._elements, codec_name=self._codec))
        except CodecError:
            self._malformed[id] = None
            if len(self._malformed) > MALFORMED_REMEMBERED:
                self._malformed.popitem(last=False)
            return True
        self.fetched += 1
        self._put(id, Contribution(raw, norm, round))
        self.serve(id)
        return True

    def forget(self, before: int) -> None:
        """Let go of rounds before this one, and of the oldest beyond the budget."""
        while self._held:
            id, oldest = next(iter(self._held.items()))
            if oldest.round >= before and len(self._held) * self.size <= self._budget:
                return
            del self._held[id]
            self._bulk.withdraw(self._key(id))

    async def _fetch_from(self, peer: PeerId, id: bytes, heard: Callable[[int], None]) -> bytes:
        raw: bytes | memoryview | None = None
        with trio.move_on_after(FETCH_WITHIN):
            raw = await self._bulk.fetch(peer, self._key(id), max_size=self.size, wait=OFFERED_WITHIN, progress=heard)
        if raw is None:
            raise NetworkError(f"{peer} took more than {FETCH_WITHIN:.0f} s")
        return bytes(raw)

    def _put(self, id: bytes, contribution: Contribution) -> None:
        self._held[id] = contribution
        self._held.move_to_end(id)

    def _key(self, id: bytes) -> Key:
        return ("contribution", self._run_id, id.hex())


def id_of(raw: bytes) -> bytes:
    """The shard id of these bytes."""
    view = memoryview(raw)
    return ShardManifest(len(raw), b"".join(leaf(view[at : at + CHUNK]) for at in range(0, len(raw), CHUNK))).id
