"""The ranks of a state, in order, with the count and the LtHash sum of any range of them.

A rank is 40 bytes: hlc as u64 big-endian, then the id of an element, so that ranks compare as (hlc, id) do. A
`RangeTree` is a B+ tree whose nodes never change: an insertion makes new nodes on the path to one leaf, some 8 µs among
100 000 ranks, and shares all others. So a snapshot costs nothing and stays as it is, also in another thread, while the
tree goes on. Many at once go down together, each node made anew once: some 3 µs a rank.

    leaf    up to 128 ranks, packed into one bytes object, and their sum
    branch  up to 64 children, what separates them, and the count and sum of all below

A *bound* is where a range begins or ends: any bytes, compared with ranks as bytes are; `START` lies below all ranks and
`END` above. The prefix of a rank is a bound below it and above whatever sorts before that prefix.

Memory is some 75 bytes a rank: 40 of its own and its part of a sum. There is no form on disk: building anew from
sorted ranks takes 0.1 s for 100 000, and then the tree cannot disagree with what it was built from.

A session of repair, and a state hash, speak of what expires after some time T. Among elements of one ttl these are the
ranks above a bound, as expiry = time of hlc + ttl. So `Lifetimes` has one tree for each ttl (four, for the kinds of
`kinds`), and what expires after T is their union, each from its own bound on. Sums of LtHash add up across trees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from math import ceil
from typing import TypeAlias, TypeVar

import numpy as np

from swarmnode.crdt import lthash
from swarmnode.crdt.hlc import COUNTER_BITS, MAX_TIME
from swarmnode.crdt.kinds import ElementKind
from swarmnode.crdt.lthash import Sum

RANK = 40  # bytes
START = b""
END = b"\xff" * (RANK + 1)
T = TypeVar("T")

MAX_LEAF = 128  # ranks; a range that ends inside a leaf hashes up to half of it anew
MAX_CHILDREN = 64
_FILL = 0.75  # of a node, when many are built at once: room for insertions


class _Leaf:
    __slots__ = ("ranks", "sum")

    def __init__(self, ranks: bytes, total: Sum) -> None:
        self.ranks = ranks  # packed, ascending
        self.sum = total

    @property
    def count(self) -> int:
        return len(self.ranks) // RANK

    @property
    def size(self) -> float:
        """How full, from 0 to 1."""
        return self.count / MAX_LEAF


class _Branch:
    __slots__ = ("children", "count", "separators", "sum")

    def __init__(self, children: tuple[_Node, ...], separators: tuple[bytes, ...], count: int, total: Sum) -> None:
        self.children = children
        self.separators = separators  # one fewer: ranks below separators[i] are in children[: i + 1], others behind
        self.count = count
        self.sum = total

    @property
    def size(self) -> float:
        return len(self.children) / MAX_CHILDREN


_Node: TypeAlias = _Leaf | _Branch


class RangeTree:
    """A set of ranks, see the module's first lines. Not for two threads at once, but its snapshots are."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: _Node = _Leaf(b"", lthash.zero())

    @classmethod
    def from_sorted(cls, ranks: Iterable[bytes]) -> RangeTree:
        """The set of strictly ascending ranks; much faster than inserting them. Raises ValueError for other order."""
        packed = b"".join(ranks)
        every = _unpack(packed)
        if len(packed) % RANK or any(a >= b for a, b in pairwise(every)):
            raise ValueError(f"ranks must be strictly ascending, and have {RANK} bytes each")
        tree = cls()
        if every:
            parts = _parts(every, MAX_LEAF)
            tree._root = _above([_leaf(part) for part in parts], [part[0] for part in parts[1:]])
        return tree

    def snapshot(self) -> RangeTree:
        """A tree of its own with what is in this one now, at no cost; changes of either do not show in the other."""
        twin = RangeTree()
        twin._root = self._root
        return twin

    def __len__(self) -> int:
        return self._root.count

    def __contains__(self, rank: bytes) -> bool:
        node = self._root
        while isinstance(node, _Branch):
            node = node.children[bisect_right(node.separators, rank)]
        at = _find(node.ranks, rank) * RANK
        return node.ranks[at : at + RANK] == rank

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys())

    def insert(self, rank: bytes) -> bool:
        """Add a rank; False where it is here already. Raises ValueError unless it has 40 bytes."""
        return self.insert_all((rank,)) == 1

    def remove(self, rank: bytes) -> bool:
        """Take a rank out; False where it is not here."""
        return self.remove_all((rank,)) == 1

    def insert_all(self, ranks: Iterable[bytes]) -> int:
        """Add ranks; returns how many were not here already. Raises ValueError unless all have 40 bytes."""
        new = sorted(set(ranks))
        if wrong := [rank for rank in new if len(rank) != RANK]:
            raise ValueError(f"a rank has {RANK} bytes, not {len(wrong[0])}")
        before = len(self)
        if new:
            nodes, separators, _ = _insert(self._root, new, last=True)
            self._root = _above(nodes, separators)
        return len(self) - before

    def remove_all(self, ranks: Iterable[bytes]) -> int:
        """Take ranks out; returns how many were here."""
        if not (gone := sorted({rank for rank in ranks if rank in self})):
            return 0
        root, _ = _remove(self._root, gone)
        while isinstance(root, _Branch) and len(root.children) == 1:
            root = root.children[0]
        self._root = root
        return len(gone)

    def index(self, bound: bytes) -> int:
        """How many ranks lie below `bound`."""
        node, below = self._root, 0
        while isinstance(node, _Branch):
            at = bisect_right(node.separators, bound)
            below += sum([child.count for child in node.children[:at]])
            node = node.children[at]
        return below + _find(node.ranks, bound)

    def at(self, index: int) -> bytes:
        """The rank that has `index` ranks below it. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} ranks, none at {index}")
        node = self._root
        while isinstance(node, _Branch):
            for child in node.children:
                if index < child.count:
                    node = child
                    break
                index -= child.count
        return node.ranks[index * RANK : (index + 1) * RANK]

    def count(self, lo: bytes = START, hi: bytes = END) -> int:
        """How many ranks are at or above `lo` and below `hi`."""
        return max(0, self.index(hi) - self.index(lo))

    def keys(self, lo: bytes = START, hi: bytes = END, limit: int | None = None) -> list[bytes]:
        """The ranks of a range, ascending; with `limit`, only so many of the lowest."""
        found: list[bytes] = []
        for packed in _packed(self._root, lo, hi):
            found += _unpack(packed)
            if limit is not None and len(found) >= limit:
                return found[:limit]
        return found

    def sum(self, lo: bytes = START, hi: bytes = END) -> tuple[Sum, int]:
        """The LtHash sum of a range, and its count."""
        total = lthash.zero()
        return total, _add_range(self._root, lo, hi, total)

    def fingerprint(self, lo: bytes, hi: bytes, salt: bytes) -> bytes:
        """16 bytes that stand for a range, under a salt of 32 bytes; see `lthash.fingerprint`."""
        total, count = self.sum(lo, hi)
        return lthash.fingerprint(total, count, salt)

    def split(self, lo: bytes, hi: bytes, parts: int) -> list[bytes]:
        """Ascending bounds inside a range that divide its ranks evenly; `parts` - 1, or as many as there are ranks less
        one. Each is as short as separates its neighbours."""
        first, behind = self.index(lo), self.index(hi)
        parts = min(parts, behind - first)
        cuts = [first + (behind - first) * part // parts for part in range(1, parts)]
        return [separator(self.at(cut - 1), self.at(cut)) for cut in cuts]


def separator(below: bytes, above: bytes) -> bytes:
    """The shortest prefix of `above` that is greater than `below`; `below` < `above`."""
    length = 0
    while below[length : length + 1] == above[length : length + 1]:
        length += 1
    return above[: length + 1]


def _insert(node: _Node, new: list[bytes], last: bool) -> tuple[list[_Node], list[bytes], Sum | None]:
    """`node` with ascending ranks, as one or several and what separates them; and the sum of those that it lacked.

    The sum is None where it lacked none. `last`: nothing lies behind `node`.
    """
    if isinstance(node, _Leaf):
        appended = last and new[0] > node.ranks[-RANK:]
        return _append_to_leaf(node, new) if appended else _insert_in_leaf(node, new)
    children, separators, count = list(node.children), list(node.separators), node.count
    total: Sum | None = None
    for at, part in _by_child(node, new):
        made, cuts, added = _insert(children[at], part, last and at == len(node.separators))
        if added is not None:
            count += sum([child.count for child in made]) - children[at].count
            children[at : at + 1], separators[at:at] = made, cuts
            total = added if total is None else total + added
    if total is None:
        return [node], [], None
    if len(children) <= MAX_CHILDREN:
        return [_Branch(tuple(children), tuple(separators), count, node.sum + total)], [], total
    return *_grouped(children, separators), total


def _append_to_leaf(node: _Leaf, new: list[bytes]) -> tuple[list[_Node], list[bytes], Sum]:
    """Ranks mostly arrive in order: leaves at the end are filled, as nothing will come in between."""
    room = MAX_LEAF - node.count
    total = _sum(new[:room]) if room else lthash.zero()
    leaves: list[_Node] = [_Leaf(node.ranks + b"".join(new[:room]), node.sum + total)]
    for at in range(room, len(new), MAX_LEAF):
        leaves.append(_leaf(new[at : at + MAX_LEAF]))
        total = total + leaves[-1].sum
    return leaves, new[room::MAX_LEAF], total


def _insert_in_leaf(node: _Leaf, new: list[bytes]) -> tuple[list[_Node], list[bytes], Sum | None]:
    pieces: list[bytes] = []
    lacked: list[bytes] = []
    begin = 0
    for rank in new:
        at = _find(node.ranks, rank) * RANK
        if node.ranks[at : at + RANK] != rank:
            pieces += (node.ranks[begin:at], rank)
            lacked.append(rank)
            begin = at
    if not lacked:
        return [node], [], None
    total, packed = _sum(lacked), b"".join((*pieces, node.ranks[begin:]))
    if len(packed) <= MAX_LEAF * RANK:
        return [_Leaf(packed, node.sum + total)], [], total
    first, *rest = _parts(_unpack(packed), MAX_LEAF)
    behind = [_leaf(part) for part in rest]
    before = _Leaf(b"".join(first), reduce(np.subtract, [leaf.sum for leaf in behind], node.sum + total))
    return [before, *behind], [part[0] for part in rest], total


def _remove(node: _Node, gone: list[bytes]) -> tuple[_Node, Sum]:
    """`node` without ascending ranks that are in it, and their sum. Neighbours join that fit into one."""
    if isinstance(node, _Leaf):
        cuts = [_find(node.ranks, rank) * RANK for rank in gone]
        kept = [node.ranks[a:b] for a, b in zip([0, *[cut + RANK for cut in cuts]], [*cuts, None], strict=True)]
        total = _sum(gone)
        return _Leaf(b"".join(kept), node.sum - total), total
    children, separators = list(node.children), list(node.separators)
    taken: list[Sum] = []
    for at, part in _by_child(node, gone):
        children[at], lost = _remove(children[at], part)
        taken.append(lost)
        for left in (at - 1, at):  # parts that fit with room to spare: the next change need not split them again
            if 0 <= left < len(separators) and children[left].size + children[left + 1].size <= _FILL:
                children[left : left + 2] = [_joined(children[left], separators.pop(left), children[left + 1])]
                break
    total = reduce(np.add, taken)
    return _Branch(tuple(children), tuple(separators), node.count - len(gone), node.sum - total), total


def _by_child(node: _Branch, ranks: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Ascending ranks by the child that they belong in, last first: what becomes of one moves none that follows."""
    behind = len(ranks)
    while behind:
        at = bisect_right(node.separators, ranks[behind - 1])
        first = bisect_left(ranks, node.separators[at - 1], 0, behind) if at else 0
        yield at, ranks[first:behind]
        behind = first


def _joined(left: _Node, separator: bytes, right: _Node) -> _Node:
    """Two neighbours of one level as one node."""
    if isinstance(left, _Leaf) and isinstance(right, _Leaf):
        return _Leaf(left.ranks + right.ranks, left.sum + right.sum)
    assert isinstance(left, _Branch) and isinstance(right, _Branch)
    separators = (*left.separators, separator, *right.separators)
    return _Branch(left.children + right.children, separators, left.count + right.count, left.sum + right.sum)


def _add_range(node: _Node, lo: bytes, hi: bytes, total: Sum) -> int:
    """Add the sum of a range to `total`; returns its count."""
    if isinstance(node, _Leaf):
        first, behind, count = _find(node.ranks, lo), _find(node.ranks, hi), node.count
        if behind - first > count // 2:  # less to hash outside than inside
            total += node.sum
            if behind - first < count:
                total -= lthash.sum_of(_unpack(node.ranks[: first * RANK] + node.ranks[behind * RANK :]))
        elif behind > first:
            total += lthash.sum_of(_unpack(node.ranks[first * RANK : behind * RANK]))
        return max(0, behind - first)
    first, last = bisect_right(node.separators, lo), bisect_right(node.separators, hi)
    if first >= last:
        return _add_range(node.children[first], lo, hi, total)
    count = _add_range(node.children[first], lo, END, total) + _add_range(node.children[last], START, hi, total)
    for child in node.children[first + 1 : last]:
        np.add(total, child.sum, out=total)
        count += child.count
    return count


def _packed(node: _Node, lo: bytes, hi: bytes) -> Iterator[bytes]:
    """The ranks of a range, leaf by leaf."""
    if isinstance(node, _Leaf):
        yield node.ranks[_find(node.ranks, lo) * RANK : _find(node.ranks, hi) * RANK]
        return
    for child in node.children[bisect_right(node.separators, lo) : bisect_right(node.separators, hi) + 1]:
        yield from _packed(child, lo, hi)


def _find(packed: bytes, bound: bytes) -> int:
    """How many of packed ranks lie below `bound`."""
    low, high = 0, len(packed) // RANK
    while low < high:
        middle = (low + high) // 2
        if packed[middle * RANK : middle * RANK + RANK] < bound:
            low = middle + 1
        else:
            high = middle
    return low


def _unpack(packed: bytes) -> list[bytes]:
    return [packed[at : at + RANK] for at in range(0, len(packed), RANK)]


def _sum(ranks: Sequence[bytes]) -> Sum:
    return lthash.vector(ranks[0]) if len(ranks) == 1 else lthash.sum_of(ranks)


def _leaf(ranks: Sequence[bytes]) -> _Leaf:
    return _Leaf(b"".join(ranks), _sum(ranks))


def _branch(children: tuple[_Node, ...], separators: tuple[bytes, ...]) -> _Branch:
    total = lthash.zero()
    for child in children:
        total += child.sum
    return _Branch(children, separators, sum(child.count for child in children), total)


def _grouped(nodes: Sequence[_Node], separators: Sequence[bytes]) -> tuple[list[_Node], list[bytes]]:
    """Neighbours below as few branches as hold them, and what separates these."""
    lows = [START, *separators]  # what lies before each
    groups = list(zip(_parts(nodes, MAX_CHILDREN), _parts(lows, MAX_CHILDREN), strict=True))
    return [_branch(tuple(part), tuple(before[1:])) for part, before in groups], [before[0] for _, before in groups[1:]]


def _above(nodes: list[_Node], separators: list[bytes]) -> _Node:
    """The one node above neighbours."""
    while len(nodes) > 1:
        nodes, separators = _grouped(nodes, separators)
    return nodes[0]


def _parts(items: Sequence[T], limit: int) -> list[Sequence[T]]:
    """`items` in order, in parts of about equal length that fill nodes of `limit` to `_FILL` at the most."""
    parts = ceil(len(items) / (limit * _FILL))
    cuts = [len(items) * part // parts for part in range(parts + 1)]
    return [items[a:b] for a, b in pairwise(cuts)]


LISTED = 1024  # ranks of several trees that are divided exactly; above that, about evenly


class Lifetimes:
    """The ranks of all elements of a state. `fork` is cheap; of what it returns, any thread may have one."""

    __slots__ = ("_trees", "_ttls")

    def __init__(self, kinds: Mapping[str, ElementKind]) -> None:
        self._ttls = {name: kind.ttl for name, kind in kinds.items()}
        self._trees = {ttl: RangeTree() for ttl in sorted(set(self._ttls.values()))}

    @classmethod
    def of(cls, kinds: Mapping[str, ElementKind], ranks: Mapping[str, Iterable[bytes]]) -> Lifetimes:
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
