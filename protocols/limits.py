"""How much each peer may ask of this node: amounts that refill with time, and turns at what is too little for all."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

from swarmnode.protocols.network import PeerId

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MAX_HOLDERS = 4096  # told apart; who was idle longest is forgotten first, and is then given its burst anew
LOOK_EVERY = 1.0  # seconds after which one that waits looks whether a turn has become old, or may be had again
EASED_FOR = 10.0  # seconds, at most, for which turns are held back: whatever goes before them, they go on
BREATH = 0.25  # seconds between two turns while they are held back


class Recent(OrderedDict[K, V]):
    """The `most` entries that were set last, the newest at the end: whoever sets one more forgets the oldest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


@contextmanager
def counted(counts: Counter[K], *keys: K) -> Iterator[None]:
    """In the block each of `keys` counts for one more; who has none is dropped afterwards."""
    counts.update(keys)
    try:
        yield
    finally:
        counts -= Counter(keys)


@dataclass(frozen=True)
class Allowance:
    """So much a second, of which `burst` may be taken at once after a pause."""

    rate: float
    burst: float


@dataclass
class _Purse:
    left: float  # below zero where it is overdrawn
    at: float  # trio time at which `left` was right


class Budget(Generic[K]):
    """One allowance for each holder: a peer, an author."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._purses = Recent[K, _Purse](MAX_HOLDERS)

    def wait(self, holder: K, amount: float) -> float:
        """Seconds until `take` would take that much, up to the burst; 0 where it would now. Asking displaces nobody."""
        left = self._purse(holder).left if holder in self._purses else self._allowance.burst
        return max(0.0, amount - left) / self._allowance.rate

    def take(self, holder: K, amount: float) -> bool:
        """Take `amount` where it is there; False, and nothing is taken, where it is not."""
        purse = self._purse(holder)
        if purse.left < amount:
            return False
        purse.left -= amount
        return True

    def overdraw(self, holder: K, amount: float) -> float:
        """Take `amount` whether it is there or not; the seconds after which it would have been."""
        purse = self._purse(holder)
        purse.left -= amount
        return max(0.0, -purse.left / self._allowance.rate)

    def _purse(self, holder: K) -> _Purse:
        now = trio.current_time()
        purse = self._purses[holder] = self._purses.get(holder) or _Purse(self._allowance.burst, now)
        purse.left = min(self._allowance.burst, purse.left + (now - purse.at) * self._allowance.rate)
        purse.at = now
        return purse


class FairScheduler:
    """At most `at_once` turns at a time, of which one peer has at most `each`; the callers bound how many wait.

    Peers that wait are served in a circle, and what one peer asks for in its own order: so a peer that asks for much
    waits longer, and does not make the others wait.

    A turn that is older than `longest` seconds takes nobody else's place any more, only one of its own peer's: those
    who are slow, or mean to be, do not keep the others out.
    """

    def __init__(self, at_once: int, each: int, *, longest: float) -> None:
        self._at_once, self._each, self._longest = at_once, each, longest
        self._waiting: OrderedDict[PeerId, deque[trio.Event]] = OrderedDict()  # who is next in the circle first
        self._having: dict[trio.Event, tuple[PeerId, float]] = {}  # and since when, trio time
        self._eased_until = self._last = -float("inf")  # trio time; `_last`: when a turn was given

    @asynccontextmanager
    async def turn(self, peer: PeerId) -> AsyncIterator[None]:
        """Wait for a turn of `peer` and hold it in the block. May be cancelled at any time."""
        mine = trio.Event()
        self._waiting.setdefault(peer, deque()).append(mine)
        try:
            self._hand_out()
            while not mine.is_set():
                with trio.move_on_after(BREATH if trio.current_time() < self._eased_until else LOOK_EVERY):
                    await mine.wait()
                self._hand_out()
            yield
        finally:
            if self._having.pop(mine, None) is None:
                self._waiting[peer].remove(mine)
                if not self._waiting[peer]:
                    del self._waiting[peer]
            self._hand_out()

    @contextmanager
    def eased(self) -> Iterator[None]:
        """In the block few turns, one at a time, as something goes before; for EASED_FOR seconds and no longer."""
        self._eased_until = trio.current_time() + EASED_FOR
        try:
            yield
        finally:
            self._eased_until = -float("inf")
            self._hand_out()

    def _hand_out(self) -> None:
        now = trio.current_time()
        at_once = self._at_once
        if now < self._eased_until:
            at_once = 1 if now >= self._last + BREATH else 0
        held = Counter(peer for peer, _ in self._having.values())
        taken = sum(now - since < self._longest for _, since in self._having.values())
        while taken < at_once:
            peer = next((peer for peer in self._waiting if held[peer] < self._each), None)
            if peer is None:
                return
            mine = self._waiting[peer].popleft()
            mine.set()
            self._having[mine] = peer, now
            self._last = now
            held[peer] += 1
            taken += 1
            self._waiting.move_to_end(peer)
            if not self._waiting[peer]:
                del self._waiting[peer]
