"""The replicated state in memory, for simulations and tests: `crdt.state.State` behind the seam `StateBackend`.

Nothing is durable: it is gone with the process, and so is its clock. Everything runs inline.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

import trio

from swarmnode.crdt.envelope import Sign
from swarmnode.crdt.hlc import HybridClock
from swarmnode.crdt.law import EVERYBODY, Judgement, Merged
from swarmnode.crdt.ranges import RankSet
from swarmnode.crdt.record import Element
from swarmnode.protocols.state.backend import Rank, StateBackend, Stats
from swarmnode.testing.state import State

SWEEP_EVERY = 30.0  # seconds between two looks at what has expired


class MemoryState(StateBackend):
    """The state of one run, in memory."""

    def __init__(
        self,
        run_id: str,
        *,
        me: str,
        sign: Sign,
        now: Callable[[], int],
        admitted: Container[str] = EVERYBODY,
    ) -> None:
        """`now` gives real time in ms; `admitted` are those whose elements are shared."""
        super().__init__(run_id, me=me, sign=sign, now=now, admitted=admitted)
        self._state = State(run_id, admitted=admitted)
        self._clock = HybridClock()
        self._ranks = RankSet()
        self._elements: dict[Rank, Element] = {}
        self._keys: list[tuple[str, str, Rank]] = []  # key, author and rank of each, ascending

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Expire until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(SWEEP_EVERY)
            await self.sweep()

    async def merge(self, elements: Sequence[Element]) -> list[Merged]:
        """Join verified elements into the state, or into the pool; see StateBackend."""
        await trio.lowlevel.checkpoint()
        self._check_belongs(elements)
        now = self.now()
        outcomes = [(element, self._state.merge(element, now)) for element in elements]
        self._follow([*outcomes, *self._state.convict(now)], now)
        return [ruling.verdict for _, ruling in outcomes]

    async def _tick(self, now: int) -> int:
        return self._clock.tick(now)

    def has(self, rank: Rank) -> bool:
        return rank in self._elements

    async def get(self, author: str, key: str) -> Element | None:
        """The greatest element under a key that has not expired; see StateBackend."""
        await trio.lowlevel.checkpoint()
        return self._state.get(author, key, self.now())

    async def select(self, prefix: str = "", *, author: str | None = None, limit: int) -> list[Element]:
        """Elements whose keys begin with `prefix`, in order of (key, author, rank); see StateBackend."""
        await trio.lowlevel.checkpoint()
        now, found = self.now(), list[Element]()
        for at in range(bisect_left(self._keys, (prefix,)), len(self._keys)):
            key, by, rank = self._keys[at]
            if not key.startswith(prefix) or len(found) >= limit:
                break
            element = self._elements[rank]
            if element.expiry > now and author in (None, by):
                found.append(element)
        return found

    async def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        """The bytes of those elements that are here, in the order asked for."""
        await trio.lowlevel.checkpoint()
        found = [self._elements.get(rank) for rank in ranks]
        return [element.sealed for element in found if element is not None]

    def snapshot(self, cutoff: int) -> RankSet:
        """The ranks of all that expires after `cutoff` ms, as they are now."""
        return self._ranks.after(cutoff)

    def state_hash(self, cutoff: int) -> str:
        """`law.state_hash` of what expires after `cutoff` ms. Raises ValueError for a cut-off in the past."""
        return self._state.state_hash(cutoff)

    async def stats(self) -> Stats:
        await trio.lowlevel.checkpoint()
        elements = self._elements.values()
        return Stats(
            elements=len(elements),
            authors=len({element.author for element in elements}),
            size=sum(len(element.sealed) for element in elements),
            kinds=dict(sorted(Counter(element.kind for element in elements).items())),
            pooled=len(self._state.pool),
            disk=0,
            clock=self._clock.last,
            warning="",
        )

    async def sweep(self) -> int:
        """Forget what has expired; returns how many elements that were."""
        await trio.lowlevel.checkpoint()
        forgotten = self._state.sweep(self.now())
        self._drop(forgotten)
        return len(forgotten)

    def _follow(self, outcomes: Iterable[tuple[Element, Judgement[Element]]], now: int) -> None:
        """Keep ranks, clock and feeds in step with what the state stored."""
        stored = [(element, ruling) for element, ruling in outcomes if ruling.verdict is Merged.STORED]
        for element, ruling in stored:
            if ruling.gone is not None:
                self._drop([ruling.gone])
            self._elements[element.rank] = element
            insort(self._keys, (element.key, element.author, element.rank))
            self._clock.observe(element.hlc, now)
        self._ranks = self._ranks.changed([e.rank for e, _ in stored if e.rank in self._elements])
        self._notify(element for element, _ in stored)

    def _drop(self, gone: Sequence[Element]) -> None:
        self._ranks = self._ranks.changed(removed=[element.rank for element in gone])
        for element in gone:
            if self._elements.pop(element.rank, None) is not None:
                del self._keys[bisect_left(self._keys, (element.key, element.author, element.rank))]
