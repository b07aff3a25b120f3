"""Which chunk to ask of which provider next: rarest first, and in the end the late ones a second time.

Pure bookkeeping of one fetch; `protocols.shard_fetch` moves the bytes.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.shard_tree import Manifest, chunk_length
from swarmnode.protocols.shard_wire import Holding, ShardLimits
from swarmnode.protocols.wire import WireError

GUESS = 1.0  # seconds that a chunk is thought to take at a provider not yet measured
OVERDUE = 2.0  # times its usual time after which a provider's next chunk is thought never to come
WORTH = 0.1  # seconds: what asking for a chunk twice must save, and by what a fast provider may be late

Chunks = npt.NDArray[np.bool_]  # one value for each chunk of the shard


class Source:
    """One provider in one fetch."""

    def __init__(self, peer: PeerId, has: Chunks, limits: ShardLimits) -> None:
        self.peer = peer
        self.has = has
        self.complete = bool(has.all())
        self.asked: deque[int] = deque()  # chunks under way, in the order in which they will come
        self.pace = AdaptiveDeadline(floor=limits.least_wait, ceiling=limits.first_chunk)
        self.moved_at = trio.current_time()  # when it last delivered, or was asked while it had nothing to do
        self.broken_promises = 0
        self.work = trio.Event()  # something was asked of it
        self.look = trio.Event()  # there is a reason to ask it for more
        self.failure: WireError | NetworkError | None = None  # why it was given up
        self._limits = limits

    def window(self) -> int:
        """Chunks to have under way: what it delivers in `ahead` seconds."""
        least, most = self._limits.window
        usual = self.pace.usual
        return least if usual is None else min(most, max(least, math.ceil(self._limits.ahead / max(usual, 1e-6))))

    def expected(self, position: int, now: float) -> float:
        """Seconds until the chunk at `position` in its queue comes; infinite where it is overdue."""
        usual = self.pace.usual or GUESS
        if self.asked and now - self.moved_at > OVERDUE * usual + WORTH:
            return math.inf
        return usual * (position + 1)


class Plan:
    """What is here, who has what, and who was asked for it."""

    def __init__(self, manifest: Manifest, here: int, seed: int) -> None:
        self.manifest = manifest
        self.here = _unpacked(here, manifest.chunks)
        self.in_hand = sum(chunk_length(manifest.size, int(i)) for i in np.flatnonzero(self.here))  # bytes
        self.sources: dict[PeerId, Source] = {}
        self._asked = np.zeros(manifest.chunks, np.int8)  # how many providers were asked for each chunk
        self._rarity = np.zeros(manifest.chunks, np.int32)  # how many providers have it
        self._order = np.random.default_rng(seed).random(
            manifest.chunks
        )  # in [0, 1): decides between equally rare ones

    @property
    def complete(self) -> bool:
        return bool(self.here.all())

    def chunks_of(self, holding: Holding) -> Chunks:
        return _unpacked(holding.bits(), self.manifest.chunks)

    def add(self, source: Source) -> None:
        self.sources[source.peer] = source
        self._rarity += source.has

    def remove(self, source: Source) -> None:
        """The provider is gone: what it was asked for is free again."""
        del self.sources[source.peer]
        for index in source.asked:
            self._asked[index] -= 1
        self._rarity -= source.has
        self._look_again()

    def refresh(self, source: Source, holding: Holding) -> None:
        """The provider says anew what it has."""
        has = self.chunks_of(holding)
        self._rarity += has.astype(np.int32) - source.has
        source.has, source.complete = has, holding.complete
        self._look_again()

    def answered(self, source: Source, *, lacks: bool = False) -> None:
        """The provider answered for the chunk at the head of its queue; `lacks`: it does not have it after all."""
        index = source.asked.popleft()
        self._asked[index] -= 1
        if lacks:
            self._rarity[index] -= source.has[index]
            source.has[index] = source.complete = False
            self._look_again()
        elif len(source.asked) <= source.window() // 2:
            source.look.set()

    def arrived(self, index: int, size: int) -> bool:
        """A chunk is written; False where another provider's copy was, in the same moment."""
        if self.here[index]:
            return False
        self.here[index] = True
        self.in_hand += size
        return True

    def next_for(self, source: Source, now: float) -> list[int]:
        """The chunks to ask of the provider now, noted as asked: none while more than half of its window is used.

        So a write carries several requests, and wakes the provider once for them.
        """
        window, chosen = source.window(), []
        if len(source.asked) <= window // 2:
            while len(source.asked) < window and (index := self._pick(source, now)) is not None:
                if not source.asked:
                    source.moved_at = now
                source.asked.append(index)
                self._asked[index] += 1
                chosen.append(index)
        return chosen

    def _pick(self, source: Source, now: float) -> int | None:
        """The rarest chunk that the provider has and nobody was asked for; else one to take from a slower provider."""
        free = source.has & ~self.here & (self._asked == 0)
        if free.any():
            return int(np.where(free, self._rarity + self._order, np.inf).argmin())
        latest, chosen = 2 * source.expected(len(source.asked), now) + WORTH, None
        for other in self.sources.values():
            if other is source:
                continue
            for position, index in enumerate(other.asked):
                due = other.expected(position, now)
                if due > latest and source.has[index] and self._asked[index] == 1 and not self.here[index]:
                    latest, chosen = due, index
        return chosen

    def _look_again(self) -> None:
        for source in self.sources.values():
            source.look.set()


def _unpacked(bits: int, count: int) -> Chunks:
    packed = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)
