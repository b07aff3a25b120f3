"""The tree of valid rosters, and which of them to follow (DESIGN.md, "Forks").

From the oldest roster that is kept, follow at each fork the child under which most heads of the electorate *at the
fork* lie; at a tie the lower id. A child under which no head lies is not followed. Heads are what electors signed last,
so a node that hears what the others heard goes where the others go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from swarmnode.protocols.chain.chainstate import ChainState
from swarmnode.protocols.chain.statements import Roster

DEPTH = 64  # rounds kept: a fork that is older is a split, which people decide


@dataclass(frozen=True)
class Block:
    """A valid roster, or an empty one, with the chain after it."""

    id: bytes
    parent: bytes
    chain: ChainState
    roster: Roster | None  # None: empty, or the root


class Tree:
    """Valid rosters of the last rounds. The root is where this node began to follow the chain, or DEPTH rounds back."""

    def __init__(self, root: ChainState) -> None:
        self._root = root.tip
        self._blocks = {root.tip: Block(root.tip, b"", root, None)}
        self._children: dict[bytes, list[bytes]] = {root.tip: []}

    def __contains__(self, id: bytes) -> bool:
        return id in self._blocks

    def __getitem__(self, id: bytes) -> Block:
        return self._blocks[id]

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: Block) -> None:
        """Take in a block whose parent is here; again is no harm. Raises KeyError where its parent is not."""
        if block.id not in self._blocks:
            self._children[block.parent].append(block.id)
            self._blocks[block.id] = block
            self._children[block.id] = []

    def best(self, heads: Mapping[str, bytes]) -> bytes:
        """The id of the roster to follow, given what each elector follows; heads that are not here do not count."""
        at = self._root
        while True:
            votes = self._votes(at, heads)
            if not votes:
                return at
            most = max(votes.values())
            at = min(child for child, count in votes.items() if count == most)

    def support(self, id: bytes, heads: Mapping[str, bytes]) -> int:
        """How many electors of the round that made this block follow it or what builds on it."""
        return self._votes(self._blocks[id].parent, heads)[id]

    def path(self, id: bytes) -> list[Block]:
        """From the root's child to the block, oldest first."""
        return list(self._upwards(id))[::-1]

    def fork_point(self, one: bytes, other: bytes) -> bytes:
        """The last roster that both build on."""
        mine = {one, self._root, *(block.parent for block in self._upwards(one))}
        at = other
        while at not in mine:
            at = self._blocks[at].parent
        return at

    def prune(self, tip: bytes) -> None:
        """Forget what is not needed to decide forks of the last DEPTH rounds of `tip`."""
        path = self.path(tip)
        if len(path) <= DEPTH:
            return
        self._root = path[-DEPTH - 1].id
        keep: set[bytes] = set()
        left = [self._root]
        while left:
            id = left.pop()
            keep.add(id)
            left.extend(self._children[id])
        self._blocks = {id: block for id, block in self._blocks.items() if id in keep}
        self._children = {id: children for id, children in self._children.items() if id in keep}

    def _votes(self, at: bytes, heads: Mapping[str, bytes]) -> Counter[bytes]:
        """Heads of the electors at `at` under each of its children."""
        votes: Counter[bytes] = Counter()
        for elector in self._blocks[at].chain.electors:
            head = heads.get(elector)
            if head is not None and head in self._blocks and (child := self._child_towards(at, head)) is not None:
                votes[child] += 1
        return votes

    def _child_towards(self, at: bytes, id: bytes) -> bytes | None:
        """The child of `at` that `id` is, or builds on."""
        for block in self._upwards(id):
            if block.parent == at:
                return block.id
        return None

    def _upwards(self, id: bytes) -> Iterator[Block]:
        """The block and those before it, without the root."""
        while id != self._root:
            block = self._blocks[id]
            yield block
            id = block.parent
