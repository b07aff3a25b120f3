"""Iterative Kademlia lookups that dead, slow and lying routers can delay but not decide.

After S/Kademlia (Baumgart and Mies 2007): the peers known at first hand are dealt out to `paths` disjoint paths, which
go on apart and never ask a peer twice, so that a lie spoils one path. What else is different from the textbook:

- every first-hand peer is asked, whatever closer peers others speak of: 1000 identities ground to be near the key crowd
  out hearsay, not acquaintance;
- of one answer only the `per_answer` closest new peers are taken, so that one liar cannot fill a path's list;
- a path is done when the nearest peers it heard of, its share of `closest`, have been asked; one that fails does not
  count, so invented peers keep nobody from being asked;
- each path has one question in flight, and after `hurry` seconds one more, up to `width`: a lookup that is over sooner
  asks few, and a frozen peer holds up one of them, for `patience` seconds.

The caller's `Query` speaks to one peer; the lookup ends by itself, after `seconds`, or once the query has `enough`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import base58
import trio

from swarmnode.protocols.network import PeerId


class Query(Protocol):
    """What a lookup asks each peer."""

    async def ask(self, peer: PeerId) -> Iterable[PeerId] | None:
        """The closer peers that `peer` knows; None where it failed."""

    @property
    def enough(self) -> bool:
        """Whether nobody else need be asked."""


@dataclass(frozen=True)
class LookupLimits:
    paths: int = 4  # with a fifth of all routers lying, one path in three of two hops stays clean; four seldom all fail
    width: int = 3  # questions in flight on each path
    hurry: float = 0.1  # seconds until a path has one more of them in flight: most lookups are over before
    closest: int = 32  # nearest peers by hearsay asked before a lookup is done, over all its paths: more than k = 20
    per_answer: int = 6  # new peers taken from one answer
    most: int = 96  # peers by hearsay asked in all; those known at first hand are asked besides
    patience: float = 2.0  # seconds for one answer, dialling included
    seconds: float = 5.0  # for the whole lookup


@lru_cache(maxsize=8192)
def place(peer: PeerId) -> int:
    """Where a peer is in Kademlia's space: sha-256 of its multihash."""
    return int.from_bytes(hashlib.sha256(base58.b58decode(peer)).digest(), "big")


def sorted_by_distance(key: bytes, peers: Iterable[PeerId]) -> list[PeerId]:
    """`peers` without repetitions, closest to `key` first."""
    target = int.from_bytes(hashlib.sha256(key).digest(), "big")
    return sorted(dict.fromkeys(peers), key=lambda peer: place(peer) ^ target)


async def lookup(
    key: bytes, first_hand: Sequence[PeerId], query: Query, *, me: PeerId, limits: LookupLimits = LookupLimits()
) -> list[PeerId]:
    """Ask ever closer peers; returns those that answered, closest to `key` first. What `ask` raises passes through."""
    search = _Search(key, query, me, limits)
    dealt = sorted_by_distance(key, (peer for peer in first_hand if peer != me))
    with search.scope:
        async with trio.open_nursery() as nursery:
            paths = max(1, min(limits.paths, len(dealt)))
            for number in range(paths):
                path = _Path(search, dealt[number::paths])
                search.live += 1
                for turn in range(limits.width):
                    nursery.start_soon(path.work, turn * limits.hurry)
    return sorted_by_distance(key, search.answered)


class _Search:
    def __init__(self, key: bytes, query: Query, me: PeerId, limits: LookupLimits) -> None:
        self.key, self.query, self.limits = key, query, limits
        self.taken: set[PeerId] = {me}  # asked or being asked by some path
        self.answered: list[PeerId] = []
        self.live = 0  # paths, but for those whose first-hand peers all failed
        self.scope = trio.move_on_after(limits.seconds)  # around all that is asked
        self.target = int.from_bytes(hashlib.sha256(key).digest(), "big")


class _Path:
    """One of the disjoint paths; `width` tasks work on it."""

    def __init__(self, search: _Search, known: list[PeerId]) -> None:
        self._search = search
        self._known = known  # first-hand, closest first
        self._heard: dict[PeerId, bool] = {}  # peers that others spoke of on this path: asked yet?
        self._hearsay = 0  # peers asked that others spoke of
        self._in_flight = 0
        self._answers = 0
        self._over = trio.Event()
        self._news = trio.lowlevel.ParkingLot()
        search.taken.update(known)  # ours to ask: no other path may take them from hearsay

    async def work(self, after: float) -> None:
        with trio.move_on_after(after):
            await self._over.wait()
        while True:
            peer = self._next()
            if peer is None:
                if not self._in_flight:
                    self._end()
                    return
                await self._news.park()
                continue
            self._in_flight += 1
            try:
                await self._ask(peer)
            finally:
                self._in_flight -= 1
                self._news.unpark_all()

    def _end(self) -> None:
        if not self._answers and not self._over.is_set():
            self._search.live -= 1  # all its peers are dead: the others take its share
        self._over.set()
        self._news.unpark_all()

    def _share(self, of_all: int) -> int:
        return of_all // max(1, self._search.live)

    def _next(self) -> PeerId | None:
        """The peer to ask next: the nearest that was not asked, first-hand or by hearsay."""
        heard = self._nearest_heard() if self._hearsay < self._share(self._search.limits.most) else None
        if self._known and (heard is None or self._distance(self._known[0]) <= self._distance(heard)):
            return self._known.pop(0)
        if heard is not None:
            self._heard[heard] = True
            self._hearsay += 1
            self._search.taken.add(heard)
        return heard

    def _nearest_heard(self) -> PeerId | None:
        usable = [peer for peer, asked in self._heard.items() if asked or peer not in self._search.taken]
        usable.sort(key=self._distance)
        near = usable[: self._share(self._search.limits.closest)]
        return next((peer for peer in near if not self._heard[peer]), None)

    async def _ask(self, peer: PeerId) -> None:
        search = self._search
        closer: Iterable[PeerId] | None = None
        with trio.move_on_after(search.limits.patience):
            closer = await search.query.ask(peer)
        if closer is None:
            self._heard.pop(peer, None)
            return
        search.answered.append(peer)
        self._answers += 1
        new = [heard for heard in closer if heard not in search.taken and heard not in self._heard]
        for heard in sorted_by_distance(search.key, new)[: search.limits.per_answer]:
            self._heard[heard] = False
        if search.query.enough:
            search.scope.cancel()

    def _distance(self, peer: PeerId) -> int:
        return place(peer) ^ self._search.target
