"""What a member computes in an all-reduce (`allreduce.py`), a batch of chunks at a time, in threads.

Every chunk goes through it while a core's cache holds it, and no step takes new memory.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.protocols.methods.known.messages import PartsMissing, RoundRoster
from swarmnode.protocols.methods.known.partition import BATCH, CHUNK, Chunks
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.bulk_client import StreamingBuffer
from swarmnode.training.codecs import Codec, CodecError
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.outer import fold_in

RATE_FROM = 1 << 20  # bytes; fewer measure the round trip, not the link
SILENT_SHARE = 0.3  # of the usual time of a reduction: what is lost when a frozen peer is noticed
SILENT_LEAST = 0.5  # seconds that a peer may be silent in any case: a lost packet is sent again after half of it


def silence_allowed(usual: float | None, failed: int) -> float | None:
    """Seconds of silence in a reduction that usually takes `usual` seconds; None before that is known.

    For `Liveness.watching`, which knows what silences are like a peer. A frozen peer costs a round a part of its usual
    time, then; where rounds take long, unanswered pings come first. Each of the attempts of the round that `failed`
    doubles it: what these had under way still fills the links.
    """
    return None if usual is None else max(SILENT_LEAST, SILENT_SHARE * usual) * 2**failed


class Arrivals:
    """The flow of one fetch of `size` bytes. Pass `moving` as its `progress`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._first: tuple[float, int] | None = None  # when the first bytes came (trio time), and how many

    def moving(self, done: int) -> None:
        """`done` bytes are in hand."""
        if self._first is None:
            self._first = trio.current_time(), done  # the wait for the offer says nothing about the link

    def rate(self) -> float | None:
        """Bytes a second up to now; None where too little came to tell."""
        if self._first is None:
            return None
        began, there = self._first
        seconds, moved = trio.current_time() - began, self._size - there
        return moved / seconds if moved >= RATE_FROM and seconds > 0 else None


logger = logging.getLogger(__name__)


async def next_batch(chunks: Chunks, done: int, sources: Sequence[StreamingBuffer], *, at: int = 0) -> range:
    """The chunks after the first `done` that all sources have, BATCH of them or the rest, as soon as they do.

    The part begins `at` bytes into each of the sources.
    """
    goal = at + chunks.bytes_until(min(done + BATCH, chunks.count))
    for source in sources:
        await source.reach(goal)
    return range(done, min(chunks.whole_in(source.ready - at) for source in sources))


async def pass_on(pieces: Sequence[StreamingBuffer], whole: StreamingBuffer, *, step: int) -> None:
    """Let `whole` grow as the pieces do that its memory consists of, in their order, some `step` bytes at a time."""
    before = 0
    for piece in pieces:
        while piece.ready < piece.size:
            await piece.reach(min(piece.ready + step, piece.size))
            whole.grow(before + piece.ready)
        before += piece.size
        whole.grow(before)


@asynccontextmanager
async def all_or_missing() -> AsyncIterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    """A nursery for tasks that may raise PartsMissing: the first to do so ends the others, and all are named."""
    failed: list[PeerId] = []
    async with trio.open_nursery() as nursery:

        async def run(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except PartsMissing as error:
                logger.debug("%s: %r", error, error.__cause__)
                failed.extend(error.peers)
                nursery.cancel_scope.cancel()

        yield lambda work: nursery.start_soon(run, work)
    if failed:
        raise PartsMissing(tuple(sorted(set(failed))))


Vector = NDArray[np.float32]


class Reducer(Protocol):
    """What a round needs of whatever brings the work of all seats to one vector."""

    sent: ErrorFeedback  # the residual of this node's own work
    rates: dict[PeerId, float]  # bytes per second measured when fetching from each peer

    async def reduce(self, roster: RoundRoster, values: Vector, *, within: float | None = None) -> Vector:
        """Of all seats' `values`, float32 (P,): bit-identical on every seat that gets it. Raises PartsMissing.

        Until `commit(roster)`, the attempt has left no trace but offers to others.
        """

    def commit(self, roster: RoundRoster) -> bool:
        """The round of `roster` was decided; whether this node's values are in that result."""

    def rollback(self) -> None:
        """Forget the pending residuals of an attempt that did not count."""


class Undecodable(Exception):
    """The contribution with this index is no encoding."""

    def __init__(self, index: int) -> None:
        super().__init__(f"contribution {index} is no encoding")
        self.index = index


class Summing:
    """Adds up what others sent of a part, and encodes the sum: with a residual of its own, that of the part it owns.

    One thread at a time.
    """

    def __init__(self, codec: Codec, parameters: int) -> None:
        self._codec = codec
        self.residual = ErrorFeedback(codec, parameters)  # what the encodings of sums left out
        self._owned: tuple[tuple[int, int], ...] = ()  # ranges that it belongs to
        self._scratch = np.empty((2, min(CHUNK, parameters)), np.float32)

    def own(self, *ranges: tuple[int, int]) -> None:
        """This node sums these elements now: of its residual, what lies elsewhere is dropped."""
        owned = tuple(sorted(ranges))
        if self._owned != owned:
            self.residual.keep_only(*owned)
            self._owned = owned

    def sum(
        self,
        chunks: Chunks,
        batch: range,
        contributions: Sequence[memoryview],
        shares: Sequence[np.float32],
        out: memoryview,
        into: Vector | None = None,
    ) -> int:
        """Encode the sum of share · contribution, in their order, into the part's bytes `out`; decode it `into` (P,).

        Returns how many chunks have a sum that cannot be encoded and counts as zeros. Raises Undecodable.
        """
        lost = 0
        for chunk in batch:
            place = chunks.elements(chunk)
            size = place.stop - place.start
            total, decoded = self._scratch[:, :size]
            total.fill(0)
            for index, (share, raw) in enumerate(zip(shares, contributions, strict=True)):
                try:
                    self._codec.decode(chunks.raw(chunk, raw), size, decoded)
                except CodecError as error:
                    raise Undecodable(index) from error
                fold_in(total, share, decoded, decoded)
            lost += not encoded(self._codec, self.residual, place, total, chunks.raw(chunk, out))
            if into is not None:
                self._codec.decode(chunks.raw(chunk, out), size, into[place])
        return lost


class Reduction:
    """The arithmetic of one node, with the residuals that live across rounds.

    `encode`, `decode` and what each of the two sums computes may run at the same time, each in one thread.
    """

    def __init__(self, codec: Codec, parameters: int) -> None:
        self._codec = codec
        self.sent = ErrorFeedback(codec, parameters)  # what this node's own encoded parts left out
        self.sums = Summing(codec, parameters)  # of a group's values
        self.means = Summing(codec, parameters)  # of all values, or of the sums of groups

    def encode(self, chunks: Chunks, batch: range, values: Vector, out: memoryview) -> int:
        """Encode this node's `values`, float32 (P,), into the part's bytes `out`.

        Returns how many chunks could not be encoded and are sent as zeros.
        """
        lost = 0
        for chunk in batch:
            place = chunks.elements(chunk)
            lost += not encoded(self._codec, self.sent, place, values[place], chunks.raw(chunk, out))
        return lost

    def decode(self, chunks: Chunks, batch: range, raw: memoryview, mean: Vector) -> None:
        """Decode chunks of a part into `mean` (P,). Raises CodecError."""
        for chunk in batch:
            place = chunks.elements(chunk)
            self._codec.decode(chunks.raw(chunk, raw), place.stop - place.start, mean[place])

    def commit(self) -> None:
        """The round counted: what its encodings left out is sent with the next."""
        for residual in (self.sent, self.sums.residual, self.means.residual):
            residual.commit()

    def rollback(self, *, also_sent: bool = True) -> None:
        """The attempt did not count: its encodings never happened; those of this node's values only if `also_sent`."""
        for residual in (self.sums.residual, self.means.residual, *((self.sent,) if also_sent else ())):
            residual.rollback()


def encoded(codec: Codec, feedback: ErrorFeedback, place: slice, values: Vector, out: memoryview) -> bool:
    """Encode `values`, which stand at `place`, into `out`; zeros, and False, where that is not possible."""
    try:
        feedback.encode_range(place.start, place.stop, values, out)
    except CodecError:
        feedback.drop_range(place.start, place.stop)
        codec.encode(np.zeros(values.size, np.float32), out)
        return False
    return True
