"""Who meets whom in a round: a function of the run, the round and a set of members, which nobody has to send.

    partner(run_id, 12, me, members)        # a peer, or None where this node is the one left over

Every member gets 64 bits from (run, round, peer). They are the leaves of a binary trie, and it is paired from below: in
each subtree those left over on the left and on the right meet, so that one is left over exactly where a subtree has an
odd number. In a round every member so has one partner, but for one of an odd number, and all pairs are as likely.

Nodes never know quite the same members. If they simply stood in a row, one member more would give everybody behind it
another partner. In the trie it changes the pairs on its way to the root alone, some log2(n) of n/2. Who finds that the
other expected somebody else goes on alone in that round.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from swarmnode.protocols.network import PeerId

BITS = 64


def partner(run_id: str, round: int, me: PeerId, members: Collection[PeerId]) -> PeerId | None:
    """Whom `me` meets in a round, by a view of the members; None: nobody. `me` counts whether it is named or not."""
    peers = list(dict.fromkeys((me, *members)))
    places = _mixed(np.fromiter(map(_bits, peers), np.uint64, len(peers)), _bits(f"{run_id} {round}"))
    order = np.argsort(places, kind="stable")
    leaves = places[order].tolist()
    mine = int(np.flatnonzero(order == 0)[0])
    low, high, bit = 0, len(leaves), BITS
    while high - low > 1 and bit:
        bit -= 1
        middle = bisect_left(leaves, (leaves[low] >> bit | 1) << bit, low, high)
        left, right = _left_over(leaves, low, middle, bit), _left_over(leaves, middle, high, bit)
        if left is not None and right is not None and mine in (left, right):
            return peers[int(order[left + right - mine])]
        low, high = (low, middle) if mine < middle else (middle, high)
    return None


def _left_over(leaves: list[int], low: int, high: int, bit: int) -> int | None:
    """Which leaf from `low` to before `high`, alike above `bit`, meets none of the others; None of an even number."""
    if (high - low) % 2 == 0:
        return None
    while high - low > 1 and bit:
        bit -= 1
        middle = bisect_left(leaves, (leaves[low] >> bit | 1) << bit, low, high)
        low, high = (low, middle) if (middle - low) % 2 else (middle, high)
    return low


@lru_cache(1 << 16)
def _bits(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _mixed(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Other 64 bits for each, by those of the round: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        mixed = values ^ np.uint64(seed)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))
