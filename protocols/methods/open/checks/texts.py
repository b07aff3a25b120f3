"""The text that nodes train on, as far as others look at their work: whose it is, and where in it a step read.

    texts.assigned(author)                        # shards that somebody is to train on; nobody hands them out
    text = TrainingText(texts, shards)            # how they stand in its trainer's text: in order of their ids
    await text.pieces(author, places)             # what a few steps read of it, from here or from the author

Places are offsets in bytes, and may reach over the end of a shard into the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.shard_wire import ShardError


class Texts:
    """The run's data; as they stand here, those of a task that reads none."""

    @property
    def shared(self) -> bool:
        """Whether nodes train on shards that everybody can have; False where a task reads none."""
        return False

    def given(self) -> tuple[bytes, ...]:
        """Shards that the trainer was given, in that order; none where it trains on text of its own."""
        return ()

    def assigned(self, author: PeerId) -> tuple[bytes, ...]:
        """Shards that a node is to train on; none where everybody brings text of its own, or before they are known."""
        return ()

    def size(self, shard: bytes) -> int | None:
        """Bytes of a shard of the run's data; None for any other."""
        return None

    async def read(self, holder: PeerId, shard: bytes, start: int, stop: int) -> bytes:
        """A part of a shard, verified: from here, or from who must hold it. Raises ShardError."""
        raise ShardError("this run has no text")


NO_TEXTS = Texts()


class TrainingText:
    """Shards as they stand in a trainer's text. Raises ValueError for what is none of the run's, or twice there."""

    def __init__(self, texts: Texts, shards: Iterable[bytes]) -> None:
        self._texts, self._shards = texts, sorted(shards)
        sizes = [texts.size(shard) for shard in self._shards]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or len(set(self._shards)) < len(self._shards):
            raise ValueError("text that is not the run's")
        self._starts = list(accumulate(known, initial=0))

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return self._starts[-1]

    async def pieces(self, holder: PeerId, places: Sequence[tuple[int, int]]) -> tuple[tuple[int, bytes], ...]:
        """What stands at these places, (start, stop) each, by offset. Raises ShardError."""
        found = []
        for start, stop in places:
            at = start
            while at < min(stop, self.size):
                number = bisect_right(self._starts, at) - 1
                first, until = self._starts[number], min(stop, self._starts[number + 1])
                found.append((at, await self._texts.read(holder, self._shards[number], at - first, until - first)))
                at = until
        return tuple(found)
