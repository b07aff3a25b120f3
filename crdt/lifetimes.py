"""The ranks of a state, kept apart by how long their elements live, so that a cut-off costs nothing.

A session of repair, and a state hash, speak of what expires after some time T. Among elements of one ttl these are the
ranks above a bound, as expiry = time of hlc + ttl. So there is one `RangeTree` for each ttl (four, for the kinds of
`kinds`), and what expires after T is their union, each from its own bound on. Sums of LtHash add up across trees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from swarmnode.crdt import lthash
from swarmnode.crdt.hlc import COUNTER_BITS, MAX_TIME
from swarmnode.crdt.kinds import Kind
from swarmnode.crdt.lthash import Sum
from swarmnode.crdt.ranges import END, START, RangeTree, separator

LISTED = 1024  # ranks of several trees that are divided exactly; above that, about evenly


class Lifetimes:
    """The ranks of all elements of a state. `fork` is cheap; of what it returns, any thread may have one."""

    __slots__ = ("_trees", "_ttls")

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._ttls = {name: kind.ttl for name, kind in kinds.items()}
        self._trees = {ttl: RangeTree() for ttl in sorted(set(self._ttls.values()))}

    @classmethod
    def of(cls, kinds: Mapping[str, Kind], ranks: Mapping[str, Iterable[bytes]]) -> Lifetimes:
        """Built at once from distinct ranks by kind; much faster where each kind's are in order."""
        built = cls(kinds)
        for ttl in built._trees:
            every = [rank for name, found in ranks.items() if built._ttls[name] == ttl for rank in found]
            built._trees[ttl] = RangeTree.from_sorted(sorted(every))
        return built

    def fork(self) -> Lifetimes:
        """One of its own with what is in this one now; changes of either do not show in the other."""
        twin = object.__new__(Lifetimes)
        twin._ttls = self._ttls
        twin._trees = {ttl: tree.snapshot() for ttl, tree in self._trees.items()}
        return twin

    def __len__(self) -> int:
        return sum(map(len, self._trees.values()))

    def __contains__(self, rank: bytes) -> bool:
        return any(rank in tree for tree in self._trees.values())

    def insert(self, kind: str, rank: bytes) -> bool:
        """Add the rank of an element of `kind`; False where it is here already."""
        return self._trees[self._ttls[kind]].insert(rank)

    def remove(self, kind: str, rank: bytes) -> bool:
        """Take a rank out; False where it is not here."""
        return self._trees[self._ttls[kind]].remove(rank)

    def change(self, steps: Iterable[tuple[bool, str, bytes]]) -> None:
        """Take steps, each (added or else removed, kind, rank), in this order; much faster than one by one."""
        ends: dict[int, dict[bytes, bool]] = {}  # by ttl: each rank, and whether it is there at the end
        for added, kind, rank in steps:
            ends.setdefault(self._ttls[kind], {})[rank] = added
        for ttl, ranks in ends.items():
            self._trees[ttl].remove_all([rank for rank, added in ranks.items() if not added])
            self._trees[ttl].insert_all([rank for rank, added in ranks.items() if added])

    def discard(self, ranks: Sequence[bytes]) -> int:
        """Take ranks out, of whatever kinds; returns how many were here."""
        return sum(tree.remove_all(ranks) for tree in self._trees.values())

    def expired(self, horizon: int, limit: int) -> list[bytes]:
        """The ranks of elements that have expired by `horizon` ms, at most about `limit`."""
        found: list[bytes] = []
        for ttl, tree in self._trees.items():
            if len(found) < limit:
                found += tree.keys(START, _floor(ttl, horizon), limit)
        return found

    def after(self, cutoff: int) -> Union:
        """What expires after `cutoff` ms, as it is now."""
        return Union(tuple((tree.snapshot(), _floor(ttl, cutoff)) for ttl, tree in self._trees.items() if len(tree)))


class Union:
    """What is above a bound in each of several trees, read as one; methods are as those of `RangeTree`."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[tuple[RangeTree, bytes], ...]) -> None:
        self._parts = parts  # trees that have no rank in common, each with its lower bound

    def __len__(self) -> int:
        return self.count()

    def __contains__(self, rank: bytes) -> bool:
        return any(rank >= floor and rank in tree for tree, floor in self._parts)

    def count(self, lo: bytes = START, hi: bytes = END) -> int:
        return sum([tree.count(max(lo, floor), hi) for tree, floor in self._parts])

    def keys(self, lo: bytes = START, hi: bytes = END, limit: int | None = None) -> list[bytes]:
        found = [rank for tree, floor in self._parts for rank in tree.keys(max(lo, floor), hi, limit)]
        found.sort()
        return found if limit is None else found[:limit]

    def sum(self, lo: bytes = START, hi: bytes = END) -> tuple[Sum, int]:
        total, count = lthash.zero(), 0
        for tree, floor in self._parts:
            if (low := max(lo, floor)) < hi:
                part, inside = tree.sum(low, hi)
                total += part
                count += inside
        return total, count

    def fingerprint(self, lo: bytes, hi: bytes, salt: bytes) -> bytes:
        total, count = self.sum(lo, hi)
        return lthash.fingerprint(total, count, salt)

    def split(self, lo: bytes, hi: bytes, parts: int) -> list[bytes]:
        """As `RangeTree.split`, but above LISTED ranks of several trees the parts are only about even."""
        inside = [(tree, low, count) for tree, low in self._lows(lo) if (count := tree.count(low, hi))]
        if len(inside) == 1:
            tree, low, _ = inside[0]
            return tree.split(low, hi, parts)
        total = sum([count for _, _, count in inside])
        if total <= LISTED:
            ranks, parts = self.keys(lo, hi), min(parts, total)
            places = [total * part // parts for part in range(1, parts)]
            return [separator(ranks[place - 1], ranks[place]) for place in places]
        # Each tree's own cuts, each standing for the ranks below it; of all of them, those next above even shares.
        weighted = sorted(
            (cut, count / (len(cuts) + 1))
            for tree, low, count in inside
            if (cuts := tree.split(low, hi, 2 * parts))
            for cut in cuts
        )
        chosen: list[bytes] = []
        for (cut, _), below in zip(weighted, accumulate(weight for _, weight in weighted), strict=True):
            if below >= total * (len(chosen) + 1) / parts and (not chosen or cut > chosen[-1]):
                chosen.append(cut)
        return chosen[: parts - 1]

    def _lows(self, lo: bytes) -> list[tuple[RangeTree, bytes]]:
        return [(tree, max(lo, floor)) for tree, floor in self._parts]


def _floor(ttl: int, cutoff: int) -> bytes:
    """The bound at and above which ranks of this ttl expire after `cutoff` ms."""
    time = cutoff - ttl + 1
    if time <= 0:
        return START
    return (time << COUNTER_BITS).to_bytes(8, "big") if time <= MAX_TIME else END
