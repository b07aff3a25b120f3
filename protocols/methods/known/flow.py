"""How what is in the making moves on cell by cell, and how tasks that need one another's peers fail together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from swarmnode.protocols.methods.known.chunks import BATCH, Cells
from swarmnode.protocols.methods.outcomes import PartsMissing
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.bulk_client import StreamingBuffer

logger = logging.getLogger(__name__)


async def next_batch(cells: Cells, done: int, sources: Sequence[StreamingBuffer], *, at: int = 0) -> range:
    """The cells after the first `done` that all sources have, BATCH of them or the rest, as soon as they do.

    The part begins `at` bytes into each of the sources.
    """
    goal = at + cells.bytes_until(min(done + BATCH, cells.count))
    for source in sources:
        await source.reach(goal)
    return range(done, min(cells.whole_in(source.ready - at) for source in sources))


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
