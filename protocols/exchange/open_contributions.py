"""The contributions of an open run that this node holds and serves: encoded pseudo-gradients, by shard id.

They are shards in name and hash, and travel by `bulk` from memory: a contribution is wanted once by everybody within
seconds, and the way over a disk, a manifest and a question to every neighbour would take longer than the bytes.
Whoever has fetched one serves it, so that an author gives it to a few, and these to others.

Bounded by `budget` bytes; the oldest rounds go first. What no encoder makes is remembered as malformed, without bytes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from swarmnode.protocols.bulk import Bulk, Key
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.shard_tree import CHUNK, Manifest, leaf
from swarmnode.training.codecs import CodecError
from swarmnode.training.open_step import exact_norm

logger = logging.getLogger(__name__)

MALFORMED_REMEMBERED = 1024
OFFERED_WITHIN = 1.0  # seconds that a source may take to have what it is about to have
FETCH_WITHIN = 120.0  # seconds of one attempt at one source


class Missing(Exception):
    """None of the peers that were asked has the contribution."""


@dataclass(frozen=True)
class Contribution:
    """One encoded pseudo-gradient."""

    raw: bytes
    norm: float  # Euclidean, exact
    round: int


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
        """Have it here, or know it as malformed. Raises Missing. Asks `sources` one after the other."""
        for peer in sources:
            try:
                raw = await self._fetch_from(peer, id)
            except NetworkError as error:
                logger.debug("contribution %s not from %s: %s", id.hex()[:12], peer, error)
                continue
            found = await self._runner(lambda raw=raw: id_of(raw))  # type: ignore[misc]
            if found != id:
                logger.warning("%s sent another contribution than the one asked for", peer)
                continue
            try:
                norm = await self._runner(lambda raw=raw: exact_norm(raw, self._elements, codec_name=self._codec))  # type: ignore[misc]
            except CodecError:
                self._malformed[id] = None
                if len(self._malformed) > MALFORMED_REMEMBERED:
                    self._malformed.popitem(last=False)
                return
            self.fetched += 1
            self._put(id, Contribution(raw, norm, round))
            self.serve(id)
            return
        raise Missing(f"contribution {id.hex()[:12]} is with none of {len(sources)} peers")

    def forget(self, before: int) -> None:
        """Let go of rounds before this one, and of the oldest beyond the budget."""
        while self._held:
            id, oldest = next(iter(self._held.items()))
            if oldest.round >= before and len(self._held) * self.size <= self._budget:
                return
            del self._held[id]
            self._bulk.withdraw(self._key(id))

    async def _fetch_from(self, peer: PeerId, id: bytes) -> bytes:
        raw: bytes | memoryview | None = None
        with trio.move_on_after(FETCH_WITHIN):
            raw = await self._bulk.fetch(peer, self._key(id), max_size=self.size, wait=OFFERED_WITHIN)
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
    return Manifest(len(raw), b"".join(leaf(view[at : at + CHUNK]) for at in range(0, len(raw), CHUNK))).id
