"""How much of others' groups may come in: by author, by who brings them, and in all, in groups and in bytes a second.

A group counts against its author's allowance by 1 / standing, once it has the author's signature: nobody uses up
another's. When less than half is left of what may come in at all, each peer that brings groups has an equal share of
what refills, and less of it the less is left: so a few that send all they may do not crowd out those that send little.

Authors on probation (pool.py) have a part of it all together, however many identities they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.methods.rollouts.pool import ESTABLISHED
from swarmnode.protocols.network import PeerId

WINDOW = 10.0  # seconds over which shares are equal
ALL = ""  # the holder of what may come in at all
PROBATION = 0.125  # of what may come in at all, for all authors together that are on probation


@dataclass(frozen=True)
class Rates:
    """Groups and bytes a second; `burst` may come at once after a pause, and has room for the largest group twice."""

    groups: Allowance
    bytes: Allowance

    def part(self, share: float, *, least: float) -> Rates:
        """This share of it; `least` bytes may come at once all the same."""
        groups, size = self.groups, self.bytes
        return Rates(
            Allowance(share * groups.rate, max(1.0, share * groups.burst)),
            Allowance(share * size.rate, max(least, share * size.burst)),
        )


class _Purses:
    """Groups and bytes of each holder."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._groups, self._bytes = Budget[PeerId](rates.groups), Budget[PeerId](rates.bytes)

    def wait(self, holder: PeerId, groups: float, size: float) -> float:
        """Seconds until so much is there."""
        return max(self._groups.wait(holder, groups), self._bytes.wait(holder, size))

    def left(self, holder: PeerId) -> float:
        """The part of the burst that is there, 0 to 1."""
        groups, size = self._rates.groups, self._rates.bytes
        return 1.0 - max(
            self._groups.wait(holder, groups.burst) * groups.rate / groups.burst,
            self._bytes.wait(holder, size.burst) * size.rate / size.burst,
        )

    def seconds(self, size: int) -> float:
        """That a group of so many bytes takes to refill."""
        return max(1.0 / self._rates.groups.rate, size / self._rates.bytes.rate)

    def take(self, holder: PeerId, groups: float, size: float) -> None:
        """Take what is there."""
        self._groups.take(holder, groups)
        self._bytes.take(holder, size)


class _Shares:
    """Who took how much in this window of time, in seconds of what refills, and how many ask for some."""

    def __init__(self) -> None:
        self._window = -1
        self._before: frozenset[PeerId] = frozenset()  # who asked in the last window
        self._taken: dict[PeerId, float] = {}  # in this one

    def left(self, sender: PeerId, part: float) -> float:
        """What is left to the sender of that part of an equal share."""
        window = int(trio.current_time() / WINDOW)
        if window != self._window:
            self._before = frozenset(self._taken) if window == self._window + 1 else frozenset()
            self._window, self._taken = window, {}
        taken = self._taken.setdefault(sender, 0.0)
        return part * WINDOW / len(self._before | self._taken.keys()) - taken

    def take(self, sender: PeerId, cost: float) -> None:
        self._taken[sender] += cost


class Gate:
    """The allowances of one node."""

    def __init__(self, *, author: Rates, sender: Rates, total: Rates) -> None:
        self._author, self._sender, self._total = _Purses(author), _Purses(sender), _Purses(total)
        self._probation = _Purses(total.part(PROBATION, least=author.bytes.burst))
        self._shares = _Shares()

    def wait_for_author(self, author: PeerId, groups: int, size: int, standing: float) -> float:
        """Seconds until so many groups of that author's, and so many bytes, may come; 0 where they may now."""
        wait = self._author.wait(author, groups / standing, size / standing)
        return wait if standing >= ESTABLISHED else max(wait, self._probation.wait(ALL, groups, size))

    def wait(self, size: int) -> float:
        """Seconds until a group of anybody's may come."""
        return self._total.wait(ALL, 1.0, size)

    def take_from(self, sender: PeerId, size: int) -> bool:
        """Take a group's worth of its sender's allowance and of all; where one lacks it, False and nothing is taken."""
        cost = self._total.seconds(size)
        left = 2.0 * self._total.left(ALL)
        crowded_out = self._shares.left(sender, left) < cost and left < 1.0
        if crowded_out or self._sender.wait(sender, 1.0, size) or self._total.wait(ALL, 1.0, size):
            return False
        self._shares.take(sender, cost)
        self._sender.take(sender, 1.0, size)
        self._total.take(ALL, 1.0, size)
        return True

    def take_of(self, author: PeerId, size: int, standing: float) -> bool:
        """Take a group's worth of its author's allowance, once it is known to be the author's."""
        if self.wait_for_author(author, 1, size, standing):
            return False
        self._author.take(author, 1.0 / standing, size / standing)
        if standing < ESTABLISHED:
            self._probation.take(ALL, 1.0, size)
        return True
