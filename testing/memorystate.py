"""The replicated state in memory, for simulations and tests: `testing.state.State` behind the seam `StateBackend`.

Nothing is durable: it is gone with the process, and so is its clock. Everything runs inline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence

import trio

from swarmnode.crdt.envelope import Sign
from swarmnode.crdt.hlc import HybridClock, PeerClocks
from swarmnode.crdt.law import EVERYBODY, Merged
from swarmnode.crdt.ranges import RankSet
from swarmnode.crdt.record import Element, Record
from swarmnode.protocols.state.backend import Rank, StateBackend, Stats
from swarmnode.testing.state import State

SWEEP_EVERY = 30.0  # seconds between two looks at what has expired


class MemoryState(StateBackend):
    """The state of one run, in memory; see StateBackend."""

    def __init__(
        self, run_id: str, *, me: str, sign: Sign, clocks: PeerClocks, admitted: Container[str] = EVERYBODY
    ) -> None:
        super().__init__(run_id, me=me, sign=sign, clocks=clocks, admitted=admitted)
        self._state = State(run_id, admitted=admitted)
        self._clock = HybridClock()
        self._ranks = RankSet()
        self._elements: dict[Rank, Element] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await trio.sleep(SWEEP_EVERY)
            await self.sweep()

    async def merge(self, elements: Sequence[Element]) -> list[Merged]:
        await trio.lowlevel.checkpoint()
        now = self.now()
        outcomes = [(element, self._state.merge(element, now)) for element in elements]
        every = [*outcomes, *self._state.convict(now)]
        gone = [ruling.gone.rank for _, ruling in every if ruling.gone is not None]
        stored = {element.rank: element for element, ruling in every if ruling.verdict is Merged.STORED}
        self._elements |= stored
        for rank in gone:  # which may have come in this very batch
            del self._elements[rank]
        self._ranks = self._ranks.changed(stored.keys() - gone, gone)
        for element in stored.values():
            self._clock.observe(element.hlc, now)
        self._notify(stored.values())
        return [ruling.verdict for _, ruling in outcomes]

    async def _tick(self, now: int) -> int:
        return self._clock.tick(now)

    def has(self, rank: Rank) -> bool:
        return rank in self._elements

    async def get(self, author: str, key: str) -> Element | None:
        await trio.lowlevel.checkpoint()
        return self._state.get(author, key, self.now())

    async def select(self, prefix: str = "", *, author: str | None = None, limit: int) -> list[Element]:
        await trio.lowlevel.checkpoint()
        now, every = self.now(), self._elements.values()
        found = [e for e in every if e.key.startswith(prefix) and author in (None, e.author) and e.expiry > now]
        return sorted(found, key=lambda e: (e.key, e.author, e.rank))[:limit]

    async def authors(self, prefix: str) -> frozenset[str]:
        await trio.lowlevel.checkpoint()
        now, every = self.now(), self._elements.values()
        return frozenset(e.author for e in every if e.key.startswith(prefix) and e.expiry > now)

    async def newest(self, author: str, limit: int) -> list[Rank]:
        await trio.lowlevel.checkpoint()
        signed = [e for e in self._elements.values() if e.author == author and isinstance(e, Record)]
        return [e.rank for e in sorted(signed, key=lambda e: (e.hlc, e.rank), reverse=True)[:limit]]

    async def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        found = [self._elements.get(rank) for rank in ranks]
        return [element.sealed for element in found if element is not None]

    def snapshot(self, cutoff: int) -> RankSet:
        return self._ranks.after(cutoff)

    async def stats(self) -> Stats:
        await trio.lowlevel.checkpoint()
        elements = self._elements.values()
        return Stats(
            elements=len(elements),
            authors=len({element.author for element in elements}),
            size=sum(len(element.sealed) for element in elements),
            kinds=dict(sorted(Counter(element.kind for element in elements).items())),
            disk=0,
            clock=self._clock.last,
            warning="",
        )

    async def sweep(self) -> int:
        await trio.lowlevel.checkpoint()
        forgotten = [element.rank for element in self._state.sweep(self.now())]
        self._ranks = self._ranks.changed(removed=forgotten)
        for rank in forgotten:
            del self._elements[rank]
        return len(forgotten)


def clocks_of(now: Callable[[], int]) -> PeerClocks:
    """The clocks of a node whose own shows `now` ms, beside trio's."""
    return PeerClocks(now, trio.current_time)
