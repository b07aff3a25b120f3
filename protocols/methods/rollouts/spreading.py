"""How groups travel: each has a budget of copies, of which whoever holds it hands half to a neighbour.

Spray and wait in its binary form (Spyropoulos et al., WDTN 2005): a group with c copies is handed over c − 1 times in
all and is with its last holder after log2(c) hops, however large the swarm. What a node sends in a turn goes to at most
FAN peers, each group to one of them, so that calls do not grow with neighbours either. Neighbours have their turns in
an order drawn anew each time: pure chance would leave some with a third of what others hear.

A group is offered before it is given, so one that a peer has already costs a hundred bytes. A peer that says that it
has no room is left alone for as long as it says. A copy that peers with room declined TRIES times is let go.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import trio

from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.methods.rollouts.messages import (
    GIVE,
    MAX_GIVEN,
    MAX_OFFERED,
    OFFER,
    TIMEOUT,
    Answer,
    Give,
    Offer,
    Offered,
    Thanks,
)
from swarmnode.protocols.methods.rollouts.signed import SignedGroup
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.violations import Offences

log = logging.getLogger(__name__)

FAN = 2  # peers told in one turn
TRIES = 8  # offers of one copy that may be declined
WAITING = 1024  # groups to hand on; the oldest are let go
LATER = 5.0  # seconds that a peer which did not answer is left alone


@dataclass
class _Load:
    """A group on its way."""

    group: SignedGroup
    copies: int  # this node's own included
    known: set[PeerId]  # who has it, as far as is known
    tries: int = TRIES
    offered: bool = False  # to somebody just now: half of its copies are spoken for


class Spreader:
    """What one node has to hand on."""

    def __init__(self, *, run_id: str, rpc: Rpc, rng: random.Random, offences: Offences, counts: Counter[str]) -> None:
        self._run_id, self._rpc, self._rng = run_id, rpc, rng
        self._offences, self._counts = offences, counts
        self._loads: OrderedDict[bytes, _Load] = OrderedDict()
        self._deck: list[PeerId] = []  # whose turn is still to come, before everybody's comes again
        self._busy: set[PeerId] = set()
        self._until: dict[PeerId, float] = {}  # peer -> trio time until which it is left alone

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, group: SignedGroup, copies: int, known: Iterable[PeerId]) -> None:
        """Hand on `copies` − 1 of a group, beside what is on its way already; not to those who know it."""
        load = self._loads.get(group.id)
        if load is not None:
            load.copies += copies
            load.known.update(known)
        elif copies > 1:
            self._loads[group.id] = _Load(group, copies, set(known))
            while len(self._loads) > WAITING:
                self._loads.popitem(last=False)
                self._counts["not_handed_on"] += 1

    def forget(self, id: bytes) -> None:
        """The group is here no more."""
        self._loads.pop(id, None)

    def turn(self, here: Sequence[PeerId], nursery: trio.Nursery) -> None:
        """Start to tell some of the peers that are here."""
        now = trio.current_time()
        self._until = {peer: until for peer, until in self._until.items() if until > now}
        everybody = set(here)
        for id in [id for id, load in self._loads.items() if everybody <= load.known]:
            del self._loads[id]  # in a small swarm, before its copies are used up
        batches: dict[PeerId, list[_Load]] = {peer: [] for peer in self._next(everybody)} if self._loads else {}
        for load in self._loads.values():
            if load.offered:
                continue
            open_to = [batch for peer, batch in batches.items() if peer not in load.known and len(batch) < MAX_OFFERED]
            if open_to:
                min(open_to, key=len).append(load)
        for peer, batch in batches.items():
            if batch:
                self._busy.add(peer)
                for load in batch:
                    load.offered = True
                nursery.start_soon(self._tell, peer, batch)

    def _next(self, here: set[PeerId]) -> list[PeerId]:
        """The next peers in turn, at most FAN: everybody once, in an order drawn anew each time."""
        self._deck = [peer for peer in self._deck if peer in here]
        chosen: list[PeerId] = []
        for fresh in (False, True):
            if fresh and len(chosen) < FAN:
                self._deck = sorted(here.difference(chosen))
                self._rng.shuffle(self._deck)
            for peer in [peer for peer in self._deck if self._may_be_told(peer)][: FAN - len(chosen)]:
                self._deck.remove(peer)
                chosen.append(peer)
        return chosen

    def _may_be_told(self, peer: PeerId) -> bool:
        return peer not in self._busy and peer not in self._until and self._offences.refuses(peer) is None

    async def _tell(self, peer: PeerId, batch: list[_Load]) -> None:
        try:
            offer = Offer(
                self._run_id,
                tuple(Offered(load.group.id, load.group.author, load.group.size, load.copies // 2) for load in batch),
            )
            self._counts["offered"] += len(batch)
            answer = await self._rpc.call(peer, OFFER, offer, Answer, timeout=TIMEOUT)
            if answer.wait:
                self._until[peer] = trio.current_time() + answer.wait
            for index in answer.has:
                if index < len(batch):
                    batch[index].known.add(peer)
            wanted = [batch[index] for index in answer.wants if index < len(batch)]
            if not answer.wait:  # else it may take them later
                self._decline(batch[i] for i in set(range(len(batch))) - {*answer.wants, *answer.has})
            while wanted:
                wanted = await self._give(peer, wanted)
        except CallError as error:
            self._until[peer] = trio.current_time() + LATER
            log.debug("%s takes no rollouts for a while: %s", peer, error)
        finally:
            self._busy.discard(peer)
            for load in batch:
                load.offered = False

    async def _give(self, peer: PeerId, wanted: list[_Load]) -> list[_Load]:
        """Give as many as fit one message; the rest."""
        room, count = MAX_GIVEN, 0
        for load in wanted:
            room -= len(load.group.signed.payload) + len(load.group.signed.signature)
            if room < 0:
                break
            count += 1
        given = wanted[:count]
        sealed = tuple((load.group.signed.payload, load.group.signed.signature) for load in given)
        handed = [(load, load.copies // 2) for load in given]
        await self._rpc.call(peer, GIVE, Give(self._run_id, sealed), Thanks, timeout=TIMEOUT)
        for load, copies in handed:
            load.known.add(peer)
            load.copies -= copies
            if load.copies <= 1:
                self._loads.pop(load.group.id, None)
            self._counts["given"] += 1
            self._counts["given_bytes"] += load.group.size
        return wanted[count:]

    def _decline(self, loads: Iterable[_Load]) -> None:
        for load in loads:
            load.tries -= 1
            if load.tries <= 0 and self._loads.pop(load.group.id, None) is not None:
                self._counts["not_handed_on"] += 1
