"""Fetching one state in chunks from all who have some of it; `protocols.catchup` says who they are and what is true.

Each source is asked for a few chunks at a time. Which: those that the fewest other joiners hold, at random among
equals; so joiners who begin together take different chunks from the members, and the rest from one another. Near the
end a chunk that takes much longer than chunks did is asked for a second time elsewhere. Chunks come into memory of
their own and are copied into the state when their hash is right: nothing that is late can touch what is verified.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
import trio
from blake3 import blake3
from numpy.typing import NDArray

from swarmnode.protocols.network import NetworkError, PeerId

logger = logging.getLogger(__name__)

CHUNK = 1 << 20  # bytes; small enough to spread over members, large enough that requests do not matter
FETCHERS = 2  # chunks asked of one source at a time: one comes while the next is asked for
IN_ALL = 24  # chunks asked of all sources at a time: what a slow line carries in half a minute
MATES = 8  # other joiners that are asked for chunks at a time
NEWS_EVERY = (0.25, 2.0)  # seconds between questions to a joiner, and to a member, about what is new
SILENT = (
    10.0  # seconds without an answer after which a joiner is asked no more; one that has just begun refuses at first
)
LATE = 3.0  # times the usual time of a chunk after which it is asked for elsewhere
IDLE = 0.1  # seconds after which a source without work looks again

Holding = NDArray[np.bool_]  # one value for each chunk


@dataclass(frozen=True)
class News:
    """What a source answers: which chunks it holds, and who else asked it for this state."""

    holds: Holding
    askers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Errand:
    """How to reach sources. Both raise NetworkError where a peer is of no use any more."""

    ask: Callable[[PeerId], Awaitable[News]]
    fetch: Callable[[PeerId, int, memoryview], Awaitable[None]]  # a chunk, verified, into memory


@dataclass(eq=False)
class _Source:
    peer: PeerId
    member: bool  # it holds the whole state
    holds: Holding
    busy: int = 0  # chunks that it was asked for
    gone: bool = False


@dataclass(eq=False)
class Attempt:
    """A state of which some chunks are here, each verified. `buffer` is written once in each place."""

    size: int  # bytes
    digests: tuple[bytes, ...]  # blake3 of each chunk
    buffer: NDArray[np.uint8] = field(init=False)
    have: Holding = field(init=False)
    done: int = 0  # bytes that are here

    def __post_init__(self) -> None:
        self.buffer = np.zeros(self.size, np.uint8)  # takes memory where it is written to
        self.have = np.zeros(len(self.digests), np.bool_)

    def part(self, index: int) -> memoryview:
        return self.buffer.data[index * CHUNK : (index + 1) * CHUNK]

    @property
    def missing(self) -> int:
        """Chunks."""
        return int((~self.have).sum())

    def put(self, index: int, content: memoryview | None) -> bool:
        """Keep a chunk that is right; None is zeros. False where it is here already."""
        if self.have[index]:
            return False
        part = self.part(index)
        if content is not None:
            part[:] = content
        self.have[index] = True
        self.done += len(part)
        return True


async def fetch_chunks(
    attempt: Attempt,
    members: list[PeerId],
    errand: Errand,
    *,
    me: PeerId,
    arrived: Callable[[int], None],
    rng: random.Random,
) -> None:
    """Fetch what is missing from `members`, and from joiners that they name; `arrived(index)` after each chunk.

    Returns when nothing is missing, or no source is left.
    """
    fetching = _Fetching(attempt, errand, me, arrived, rng)
    fetching.fill_in_zeros()
    async with trio.open_nursery() as nursery:
        for peer in members:
            fetching.add(peer, nursery, member=True)
        while attempt.missing and any(not source.gone for source in fetching.sources.values()):
            await fetching.news.wait()
        nursery.cancel_scope.cancel()


class _Fetching:
    def __init__(
        self, attempt: Attempt, errand: Errand, me: PeerId, arrived: Callable[[int], None], rng: random.Random
    ) -> None:
        self.sources: dict[PeerId, _Source] = {}
        self.news = trio.Event()
        self._attempt = attempt
        self._errand = errand
        self._me = me
        self._arrived = arrived
        self._random = rng
        self._under_way: dict[int, list[float]] = {}  # chunk -> when it was asked for, trio time
        self._room = trio.Semaphore(IN_ALL)
        self._usual = 0.0  # seconds that a chunk takes, a moving mean

    def add(self, peer: PeerId, nursery: trio.Nursery, *, member: bool) -> None:
        count = len(self._attempt.digests)
        source = _Source(peer, member, np.full(count, member))
        self.sources[peer] = source
        nursery.start_soon(self._ask, source, nursery)
        for _ in range(FETCHERS):
            nursery.start_soon(self._fetch_from, source)

    def fill_in_zeros(self) -> None:
        """An outer momentum that is not used need not travel."""
        zeros: dict[int, bytes] = {}
        for index, digest in enumerate(self._attempt.digests):
            part = self._attempt.part(index)
            if len(part) not in zeros:
                zeros[len(part)] = blake3(bytes(len(part))).digest()
            if digest == zeros[len(part)] and self._attempt.put(index, None):
                self._arrived(index)

    def _tell(self) -> None:
        self.news.set()
        self.news = trio.Event()

    async def _ask(self, source: _Source, nursery: trio.Nursery) -> None:
        """Ask what is new: chunks of a joiner, joiners that a source knows."""
        heard = trio.current_time()
        while not source.gone:
            try:
                news = await self._errand.ask(source.peer)
            except NetworkError as error:
                if (
                    not source.member and trio.current_time() > heard + SILENT
                ):  # a member may have the chunks all the same
                    self._give_up(source, error)
            else:
                heard = trio.current_time()
                if not source.member:
                    source.holds = news.holds
                self._meet(news.askers, nursery)
                self._tell()
            await trio.sleep(NEWS_EVERY[source.member] * self._random.uniform(0.8, 1.2))

    def _meet(self, askers: tuple[PeerId, ...], nursery: trio.Nursery) -> None:
        mates = sum(not source.member and not source.gone for source in self.sources.values())
        new = [peer for peer in askers if peer not in self.sources and peer != self._me]
        for peer in self._random.sample(new, min(len(new), max(0, MATES - mates))):
            self.add(peer, nursery, member=False)

    def _give_up(self, source: _Source, error: NetworkError) -> None:
        if not source.gone:
            logger.info("%s gives no more chunks of the state: %s", source.peer, error)
        source.gone = True
        self._tell()

    async def _fetch_from(self, source: _Source) -> None:
        room = bytearray(CHUNK)
        while not source.gone and self._attempt.missing:
            async with self._room:
                index = None if source.gone else self._next(source)
                if index is not None:
                    await self._fetch(source, index, memoryview(room)[: len(self._attempt.part(index))])
                    continue
            with trio.move_on_after(IDLE):
                await self.news.wait()

    async def _fetch(self, source: _Source, index: int, room: memoryview) -> None:
        began = trio.current_time()
        self._under_way.setdefault(index, []).append(began)
        source.busy += 1
        try:
            await self._errand.fetch(source.peer, index, room)
        except NetworkError as error:
            self._give_up(source, error)
        else:
            if self._attempt.put(index, room):
                self._arrived(index)
            spent = trio.current_time() - began
            self._usual = spent if not self._usual else 0.9 * self._usual + 0.1 * spent
        finally:
            source.busy -= 1
            self._under_way[index].remove(began)
            if not self._under_way[index]:
                del self._under_way[index]
            if not self._attempt.missing:
                self._tell()

    def _next(self, source: _Source) -> int | None:
        """The chunk to ask this source for: one that nobody was asked for, else one that is late elsewhere.

        A member gives what no other joiner has, and of the rest one chunk at a time.
        """
        wanted = source.holds & ~self._attempt.have
        free = wanted.copy()
        free[list(self._under_way)] = False
        chunks = np.flatnonzero(free)
        if chunks.size:
            rarity = np.zeros(len(free), np.int32)
            for other in self.sources.values():
                if not other.member and not other.gone:
                    rarity += other.holds
            least = rarity[chunks].min()
            if least and source.member and source.busy:
                return None
            rarest = chunks[rarity[chunks] == least]
            return int(rarest[self._random.randrange(rarest.size)])
        overdue = trio.current_time() - max(IDLE, LATE * self._usual)
        late = [(asked[0], i) for i, asked in self._under_way.items() if wanted[i] and len(asked) == 1]
        return min(late)[1] if late and min(late)[0] < overdue else None
