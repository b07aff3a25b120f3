"""Which chunk to ask of which provider next: rarest first, and in the end the late ones a second time.

Pure bookkeeping of one fetch; `shard_fetch` moves the bytes.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.liveness import AdaptiveDeadline
from swarmnode.protocols.transfer.shard_manifest import ShardManifest, run_length
from swarmnode.protocols.transfer.shard_wire import RUN, Holding, ShardLimits
from swarmnode.protocols.wire import WireError

GUESS = 1.0  # seconds that a chunk is thought to take at a provider not yet measured
OVERDUE = 2.0  # times its usual time after which a provider's next chunk is thought never to come
WORTH = 0.1  # seconds: what asking for a chunk twice must save, and by what a fast provider may be late

Chunks = npt.NDArray[np.bool_]  # one value for each chunk of the shard


class Source:
    def __init__(self, peer: PeerId, has: Chunks, limits: ShardLimits) -> None:
        self.peer = peer
        self.has = has
        self.complete = bool(has.all())
        self.asked: deque[range] = deque()  # chunks under way, in the order in which they will come
        self.pace = AdaptiveDeadline(floor=limits.least_wait, ceiling=limits.first_chunk)  # of one chunk
        self.moved_at = trio.current_time()  # when it last delivered, or was asked while it had nothing to do
        self.broken_promises = 0
        self.delivered = False  # whether a chunk of it was verified
        self.work = trio.Event()  # something was asked of it
        self.look = trio.Event()  # there is a reason to ask it for more
        self.failure: WireError | NetworkError | None = None  # why it was given up
        self._limits = limits

    def window(self) -> int:
        """Chunks to have under way: what it delivers in `ahead` seconds."""
        least, most = self._limits.window
        usual = self.pace.usual
        return least if usual is None else min(most, max(least, math.ceil(self._limits.ahead / max(usual, 1e-6))))

    @property
    def under_way(self) -> int:
        """Chunks that it was asked for and has not answered for."""
        return sum(map(len, self.asked))

    def run_length(self) -> int:
        """Chunks to ask for at once: what it delivers in `answer` seconds, so a slow one is asked for single ones."""
        usual = self.pace.usual
        return 1 if usual is None else min(RUN, max(1, int(self._limits.answer / max(usual, 1e-6))))

    def expected(self, position: int, now: float) -> float:
        """Seconds until the chunk at `position` in its queue comes; infinite where it is overdue."""
        usual = self.pace.usual or GUESS
        if self.asked and now - self.moved_at > OVERDUE * usual * len(self.asked[0]) + WORTH:
            return math.inf
        return usual * (position + 1)


class Plan:
    def __init__(self, manifest: ShardManifest, here: int, seed: int, *, spare: bool = False) -> None:
        """With `spare`, who has all is asked for what others will not have soon, and for the rest one run at a time."""
        self.manifest = manifest
        self._spare = spare
        self.here = _unpacked(here, manifest.chunks)
        self.in_hand = sum(run_length(manifest.size, int(i)) for i in np.flatnonzero(self.here))  # bytes
        self.sources: dict[PeerId, Source] = {}
        self._asked = np.zeros(manifest.chunks, np.int8)  # how many providers were asked for each chunk
        self._rarity = np.zeros(manifest.chunks, np.int32)  # how many providers have it
        groups = np.random.default_rng(seed).permutation(-(-manifest.chunks // RUN)).repeat(RUN)[: manifest.chunks]
        places = np.arange(manifest.chunks) % RUN
        # in [0, 1): decides between equally rare chunks; RUN neighbours stay together, to be asked for at once
        self._order = (groups * RUN + places) / (len(groups) + RUN)

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
        for run in source.asked:
            self._asked[run.start : run.stop] -= 1
        self._rarity -= source.has
        self._look_again()

    def refresh(self, source: Source, holding: Holding) -> None:
        has = self.chunks_of(holding)
        self._rarity += has.astype(np.int32) - source.has
        source.has, source.complete = has, holding.complete
        self._look_again()

    def answered(self, source: Source, given: int) -> None:
        """The provider answered what is at the head of its queue with `given` chunks; the one after them it lacks."""
        run = source.asked.popleft()
        self._asked[run.start : run.stop] -= 1
        if given < len(run):
            lacking = run[given]
            self._rarity[lacking] -= source.has[lacking]
            source.has[lacking] = source.complete = False
            self._look_again()
        elif source.under_way <= source.window() // 2:
            source.look.set()

    def arrived(self, run: range) -> int:
        """Chunks are written; how many of them were not here yet."""
        new = [index for index in run if not self.here[index]]
        self.here[new] = True
        self.in_hand += sum(run_length(self.manifest.size, index) for index in new)
        return len(new)

    def next_for(self, source: Source, now: float) -> list[range]:
        """Chunks to ask of the provider now, noted as asked: none while more than half of its window is used.

        So a write carries several requests, and wakes the provider once for them.
        """
        window, chosen, under_way = source.window(), [], source.under_way
        if under_way <= window // 2:
            while under_way < window and (run := self._pick(source, now, under_way, window)) is not None:
                if not source.asked:
                    source.moved_at = now
                source.asked.append(run)
                self._asked[run.start : run.stop] += 1
                under_way += len(run)
                chosen.append(run)
        return chosen

    def _pick(self, source: Source, now: float, under_way: int, window: int) -> range | None:
        """The rarest chunk that the provider has and nobody was asked for, with neighbours that are just as rare; else
        one to take from a slower provider."""
        free = source.has & ~self.here & (self._asked == 0)
        if free.any():
            first = int(np.where(free, self._rarity + self._order, np.inf).argmin())
            whole = sum(other.complete for other in self.sources.values())
            if self._spare and source.complete and source.asked and self._rarity[first] > whole:
                return None
            count, most = 1, min(source.run_length(), window - under_way, len(free) - first)
            while count < most and free[first + count] and self._rarity[first + count] == self._rarity[first]:
                count += 1
            return range(first, first + count)
        latest, chosen = 2 * source.expected(under_way, now) + WORTH, None
        for other in self.sources.values():
            if other is source:
                continue
            for position, index in enumerate(index for run in other.asked for index in run):
                due = other.expected(position, now)
                if due > latest and source.has[index] and self._asked[index] == 1 and not self.here[index]:
                    latest, chosen = due, range(index, index + 1)
        return chosen

    def _look_again(self) -> None:
        for source in self.sources.values():
            source.look.set()


def _unpacked(bits: int, count: int) -> Chunks:
    packed = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)
