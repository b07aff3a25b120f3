"""How a node looks at others' work: at one author after each roster, within a share of what it computes itself."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

import trio

from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.training.verify.replay import AuditBudget, whom

logger = logging.getLogger(__name__)


class Looks(ABC):
    """One node's looks at others, after each roster. One that comes while it looks is passed over."""

    def __init__(self, parts: Context, store: ChainStore, local: LocalTrainer) -> None:
        self._parts, self._store, self._local = parts, store, local
        self._followed, self._blocks = trio.open_memory_channel[Block](0)

    def consider(self, block: Block) -> None:
        """A roster was followed: somebody in it may be looked at. Returns at once."""
        try:
            self._followed.send_nowait(block)
        except trio.WouldBlock:
            logger.debug("round %d: the look before is not over", block.chain.round)

    async def run(self) -> None:
        """Look until cancelled."""
        async for block in self._blocks:
            await self._follow(block)

    @abstractmethod
    async def _follow(self, block: Block) -> None: ...

    @abstractmethod
    def measure(self, metrics: Metrics) -> None:
        """Show what came of it, and what it took."""


class WorkCheck(Looks):
    """Looks at others' work. A node that takes part looks at others, and nobody else: others' names cost nothing."""

    def __init__(self, parts: Context, store: ChainStore, local: LocalTrainer, share: float) -> None:
        """`share`: of the seconds that this node trains, for this."""
        super().__init__(parts, store, local)
        self._trainer, self.budget = parts.trainer, AuditBudget(share)
        self._earned = 0.0  # seconds of training that the budget knows of

    async def _follow(self, block: Block) -> None:
        me, seconds = self._parts.me, self._local.trained.seconds
        self.budget.earn(seconds - self._earned)
        self._earned = seconds
        measured = self._store.measured(block)
        author = whom(self._store.checks_seed(block), me, measured)
        if author is not None and me in measured:
            await self._look(block, author, measured)

    @abstractmethod
    async def _look(self, block: Block, author: PeerId, measured: Mapping[PeerId, bytes]) -> None:
        """Look at the work of `author` in the round that a block ended, if the budget allows it.

        `measured`: the commits of that round whose contributions were measured, by author.
        """
