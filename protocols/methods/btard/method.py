"""The exchange method `btard`: known peers who need not be honest (2106.11257). Places and agreement are DiLoCo's.

    btard_reduce.py   the all-reduce whose members check one another
    btard_talk.py     what they tell one another in it
    btard_rules.py    what they sign, and what proves a lie

What it promises beside what `diloco` does, while more than half of the members are honest: one member's work moves the
model by no more than honest members differ; an owner that hands out a wrong part, a member that sends something else
than it committed to, tells members different things or accuses falsely is convicted by a proof that others can check,
named out of the round and banned from the run; and no honest member is. What it does not: members that lie about their
own work, within what honest work looks like, are not convicted; nobody replays their training.

A ban is each member's own conclusion from a proof that it holds. It says so in a record, `note/btard/PEER`; who was not
there takes the word of more than half of the run's members. Records last for a week, and are renewed while nodes live.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

import trio

from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.methods.btard.reduce import BtardReduce
from swarmnode.protocols.methods.btard.rules import Evidence, convicts, is_banned
from swarmnode.protocols.methods.known.diloco import Diloco
from swarmnode.protocols.methods.known.messages import Noted
from swarmnode.protocols.methods.method import Parts
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.state.backend import StateError
from swarmnode.training.codecs import codec

logger = logging.getLogger(__name__)

PREFIX = "note/btard/"
LOOK_EVERY = 5.0  # seconds between two looks at what members say of one another
RENEW_EVERY = 86_400.0  # seconds; records of this kind last for a week
PROOF_WITHIN = 5.0  # seconds to give a peer a proof
LISTED = 4096  # records looked at
REASON = 120  # characters of a reason in a record


def build(parts: Parts) -> Btard:
    """The method of one node, from the run's `[exchange]`, `[inner]` and `[outer]`."""
    return Btard(parts)


@dataclass(frozen=True)
class Proof:
    """`btard.proof`, to members: somebody lied. Answered with Noted."""

    run_id: str
    evidence: Evidence


class Bans:
    """Who is out of the run for a lie, as this node knows."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.convicted: dict[PeerId, str] = {}  # by a proof that this node held, and of what
        self.told: set[PeerId] = set()  # by records of more than half of the members
        self._written: dict[PeerId, float] = {}  # trio time

    def __contains__(self, peer: PeerId) -> bool:
        return peer != self._parts.me and (peer in self.convicted or peer in self.told)

    def convict(self, peer: PeerId, why: str) -> None:
        """This node holds a proof."""
        if peer != self._parts.me:
            self.convicted.setdefault(peer, why)

    async def look(self, members: tuple[PeerId, ...]) -> None:
        """Write what this node found, and read what the others did. Raises StateError."""
        state, sync = self._parts.state, self._parts.sync
        if state is None or sync is None:
            return
        for peer, why in list(self.convicted.items()):
            if trio.current_time() - self._written.get(peer, float("-inf")) >= RENEW_EVERY:
                await sync.write(PREFIX + peer, why[:REASON])
                self._written[peer] = trio.current_time()
        accusers: dict[PeerId, set[PeerId]] = {}
        for element in await state.select(PREFIX, limit=LISTED):
            if element.value is not None:
                accusers.setdefault(element.key.removeprefix(PREFIX), set()).add(element.author)
        known = self._parts.spec.run.members or members
        self.told = {peer for peer, who in accusers.items() if is_banned(who - {peer}, known)}


class Btard(Diloco):
    """Implements `Method`."""

    name = "btard"

    def __init__(self, parts: Parts) -> None:
        self.bans = Bans(parts)
        self._parts = replace(parts, admits=lambda peer: parts.admits(peer) and peer not in self.bans)
        super().__init__(self._parts)
        parts.rpc.serve("btard.proof", Proof, self._take_proof)

    def _reducer(self, parts: Parts) -> BtardReduce:
        exchange = parts.spec.exchange
        self.reduction = BtardReduce(
            me=parts.me,
            run_id=parts.run_id,
            bulk=parts.bulk,
            liveness=parts.liveness,
            runner=parts.runner,
            codec=codec(exchange.codec),
            parameters=parts.trainer.layout.parameters,
            patience=exchange.deadline_ceiling,
            sign=parts.sign,
            verify=parts.network.verify,
            is_banned=lambda peer: peer in self.bans,
            convict=self._convict,
            publish=self._publish,
        )
        return self.reduction

    def _convict(self, peer: PeerId, why: str) -> None:
        if peer not in self.bans:
            logger.warning("%s is banned from the run: %s", peer, why)
        self.bans.convict(peer, why)

    async def _publish(self, evidence: Evidence, peers: tuple[PeerId, ...]) -> None:
        """Give a proof to these peers; who does not answer learns it from records."""

        async def tell(peer: PeerId) -> None:
            try:
                proof = Proof(self._parts.run_id, evidence)
                await self._parts.rpc.call(peer, "btard.proof", proof, Noted, timeout=PROOF_WITHIN)
            except CallError as error:
                logger.debug("a proof did not reach %s: %s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(tell, peer)

    async def _take_proof(self, peer: PeerId, proof: Proof) -> Noted:
        if proof.run_id == self._parts.run_id:
            liar = convicts(proof.evidence, self._parts.network.verify)
            if liar is not None and liar not in self.bans:
                self._convict(liar, "told contradictory things, as two statements prove")
                self.reduction.stop_with(liar)
        return Noted()

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().watch)
            nursery.start_soon(partial(self._watch_bans))

    async def _watch_bans(self) -> None:
        while True:
            try:
                await self.bans.look(self.agreement.position.voters if self.rounds.stands else ())
            except StateError as error:
                logger.warning("bans are neither written nor read: %s", error)
            await trio.sleep(LOOK_EVERY)
