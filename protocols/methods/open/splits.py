"""Members whose history of the run parted from this node's so long ago that nobody goes over by itself: a split.

A fork is healed by where the electors' heads lie (`chain/forks.py`), as long as the rosters since it are kept. Two
parts of a swarm that were cut off from one another for more than DEPTH rounds have different electors, and no roster in
common that is still kept: then no rule says which history is right, and each part goes on with its own. What remains is
to tell the owners, who can have a node go over: `swarmnode run --roster ROUND:ID`, with a roster of the other history.

So now and then, and before it goes over to another's state, a node asks members where they stand. Who stands in its
tree, or on a way that leads from there, is in step. Who is not, and keeps rosters of the same rounds as this node, all
of them others, has parted from it before the oldest of these. A member can lie about that, and thereby have a line of
text shown. A node in whose rosters since then nobody's work counts but its own, as on a machine that was asleep or
offline, has nobody to part from and goes over.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.chain import forks
from swarmnode.protocols.methods.context import Observer
from swarmnode.protocols.methods.open.sources import Lost, Sources
from swarmnode.protocols.methods.open.store import Held
from swarmnode.protocols.methods.open.wire import TIMEOUT, TIP, Tip, TipQuery
from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)

LOOK_EVERY = 60.0  # seconds
ASKED = 3  # members at a time
SETTLED = 4  # rounds: of so many a fork may still be on its way to be healed, or a roster to be left


@dataclass(frozen=True)
class Apart:
    """Where a member on another history stands."""

    round: int  # rounds done
    roster: str  # ROUND:ID, of its history


class Splits:
    """What one node sees of other histories of its run."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        held: Held,
        sources: Sources,
        rpc: Rpc,
        members: Callable[[], Sequence[PeerId]],
        observer: Observer,
        rng: random.Random,
    ) -> None:
        """`members`: those who can be asked."""
        self._me, self._run_id, self._held, self._sources, self._rpc = me, run_id, held, sources, rpc
        self._members, self._observer, self._rng = members, observer, rng
        self._apart: dict[PeerId, Apart] = {}

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await trio.sleep(LOOK_EVERY * self._rng.uniform(0.8, 1.2))
            if self._held.stands:
                await self._look()

    async def _look(self) -> None:
        members = sorted(self._members())
        for peer in self._apart.keys() - set(members):
            self._note(peer, None)
        for peer in self._rng.sample(members, min(ASKED, len(members))):
            try:
                query = TipQuery(self._run_id, joins=False)
                tip = await self._rpc.call(peer, TIP, query, Tip, timeout=TIMEOUT)
            except CallError as error:
                logger.debug("%s does not say where it stands: %s", peer, error)
            else:
                await self.is_apart(peer, tip)

    async def is_apart(self, peer: PeerId, tip: Tip) -> bool:
        """Whether a member that stands there is on a history of its own; False where it does not show it."""
        try:
            apart = await self._apart_at(peer, tip)
        except Lost as error:
            logger.debug("%s does not show its history: %s", peer, error)
            return False
        self._note(peer, apart)
        return apart is not None

    def _note(self, peer: PeerId, apart: Apart | None) -> None:
        if apart is not None:
            self._apart[peer] = apart
        else:
            self._apart.pop(peer, None)
        self._held.apart = frozenset(self._apart)
        self._observer.warn("split", self._told() if self._apart else None)

    async def _apart_at(self, peer: PeerId, tip: Tip) -> Apart | None:
        """Where a member stands, if what it keeps and what this node keeps have no roster in common. Raises Lost."""
        if tip.tip in self._held.tree:
            return None
        path = await self._sources.path_of(peer, tip.tip)
        tree = self._held.tree
        if any(id in tree for id in path.ids):
            return None
        theirs = range(tip.round - len(path.ids), tip.round)  # the rounds that these rosters ended
        mine = tree.path(self._held.tip)
        parted = [block for block in mine if block.chain.round - 1 in theirs]  # since then, all rosters are others
        if len(parted) <= SETTLED or max(len(mine), len(path.ids)) < forks.DEPTH:
            return None
        worked = {one.author for block in parted if block.roster is not None for one in block.chain.history[-1]}
        if worked <= {self._me}:
            return None
        named = max((number for number, empty in enumerate(path.empty[:-SETTLED]) if not empty), default=None)
        if named is None:  # it went through empty rounds alone, and will find the others
            return None
        return Apart(tip.round, f"{theirs[named]}:{path.ids[named].hex()}")

    def _told(self) -> str:
        furthest = max(self._apart.values(), key=lambda apart: apart.round)
        return (
            f"{len(self._apart)} members follow another history of this run, which parted from this node's more than "
            f"{forks.DEPTH} rounds ago, as happens after a long cut through the swarm; no rule says which is right. "
            f"This node stays with its own, at round {self._held.block.chain.round}. To go over to theirs, at round "
            f"{furthest.round}, stop it and start it again with --roster {furthest.roster}"
        )
