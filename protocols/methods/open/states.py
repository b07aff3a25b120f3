"""The shared states along the chain: what each block makes of the parameters, computed here and nowhere believed.

The states of the last blocks are kept within a budget of bytes; an earlier one, or one of another fork, is made again
by replaying rosters from the nearest state that is kept. The same chain gives the same bits (`training.open_step`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from swarmnode.protocols.chain.forks import Block, Tree
from swarmnode.protocols.runner import Runner
from swarmnode.training.layout import Layout
from swarmnode.training.open_step import Factor, apply_contributions
from swarmnode.training.outer import OuterState, state_hash

logger = logging.getLogger(__name__)

FEWEST = 3  # states kept whatever they take: the present one, the one before, and one to go back to


class NoState(Exception):
    """A state cannot be made here: no state before it is kept, or a contribution is gone."""


class States:
    """States by the id of their block, with their hashes."""

    def __init__(
        self,
        *,
        layout: Layout,
        runner: Runner,
        lr: float,
        momentum: float,
        codec: str,
        budget: int,
        contribution: Callable[[bytes, bytes], bytes],
    ) -> None:
        """`contribution(parent block, commit)` gives the bytes of an accepted contribution, or raises KeyError."""
        self._layout, self._runner = layout, runner
        self._lr, self._momentum, self._codec = lr, momentum, codec
        self._budget = budget
        self._contribution = contribution
        self._states: OrderedDict[bytes, OuterState] = OrderedDict()  # the one used longest ago first
        self.hashes: dict[bytes, str] = {}

    def __getitem__(self, id: bytes) -> OuterState:
        """The state after a block, where it is kept. Raises KeyError."""
        state = self._states[id]
        self._states.move_to_end(id)
        return state

    async def put(self, id: bytes, round: int, state: OuterState) -> str:
        """Keep a state, after so many rounds; its hash."""
        hash = await self._runner(lambda: state_hash(round, self._layout, state))
        self._states[id] = state
        self._states.move_to_end(id)
        self.hashes[id] = hash
        while len(self._states) > FEWEST and len(self._states) * 8 * self._layout.parameters > self._budget:
            self._states.popitem(last=False)
        return hash

    async def after(self, block: Block, tree: Tree) -> OuterState:
        """The state after a block of the tree. Raises NoState."""
        missing = []
        at = block
        while at.id not in self._states:
            missing.append(at)
            if at.parent not in tree:
                raise NoState(f"no state before round {at.chain.round} is kept")
            at = tree[at.parent]
        for at in reversed(missing):
            await self._make(at, tree)
        return self[block.id]

    async def _make(self, block: Block, tree: Tree) -> None:
        state = self[block.parent]
        roster = block.roster
        if roster is not None and roster.revert:
            before = tree[block.parent].parent
            if before not in tree:
                raise NoState(f"round {roster.round} goes back to a state before this node's first one")
            state = await self.after(tree[before], tree)
        elif roster is not None and roster.accepted:
            try:
                raws = [self._contribution(roster.parent, entry.commit) for entry in roster.accepted]
            except KeyError:
                raise NoState(f"a contribution to round {roster.round} is not kept") from None
            factors = [Factor(entry.weight, entry.clip, roster.total) for entry in roster.accepted]
            state = await self._runner(lambda: self._applied(state, raws, factors, roster.round))
        await self.put(block.id, block.chain.round, state)

    def _applied(self, state: OuterState, raws: Sequence[bytes], factors: Sequence[Factor], round: int) -> OuterState:
        try:
            return apply_contributions(
                state, raws, factors, lr=self._lr, momentum=self._momentum, codec_name=self._codec
            )
        except ValueError as error:  # from the arguments alone: who holds the roster comes to the same conclusion
            logger.error("round %d moves nothing: %s", round, error)
            return state

    def forget(self, tree: Tree) -> None:
        """Let go of blocks that the tree has forgotten."""
        for id in [id for id in self.hashes if id not in tree]:
            del self.hashes[id]
            self._states.pop(id, None)
