"""How much each peer may ask of this node: amounts that refill with time, and for which it waits its turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

K = TypeVar("K", bound=Hashable)

MAX_HOLDERS = 4096  # told apart; who was idle longest is forgotten first, and is then given its burst anew


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
        self._purses: OrderedDict[K, _Purse] = OrderedDict()

    def wait(self, holder: K, amount: float) -> float:
        """Seconds until `take` would take that much, up to the burst; 0 where it would now."""
        return max(0.0, amount - self._purse(holder).left) / self._allowance.rate

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
        purse = self._purses.pop(holder, None)
        if purse is None:
            purse = _Purse(self._allowance.burst, now)
            while len(self._purses) >= MAX_HOLDERS:
                self._purses.popitem(last=False)
        self._purses[holder] = purse
        purse.left = min(self._allowance.burst, purse.left + (now - purse.at) * self._allowance.rate)
        purse.at = now
        return purse
