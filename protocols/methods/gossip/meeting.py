"""One meeting of two nodes: each gets what the other has, and both count it or neither does.

Messages, all calls; `round` is that in which they meet:
- gossip.stand: RunQuery -> Stand        where a member stands, for who looks for a place
- gossip.meet: MeetRequest -> MeetReply    "my steps are done"; whether the other comes, who ends with the one in hand
- gossip.settle: SettleRequest -> SettleReply    "I have all of yours; have you mine?", by the one with the lesser id

and on `bulk`, under ("gossip", run id, round), for whoever asks: phi as soon as the round begins, then g, the steps of
the round, once they are done. So phi travels while both train, and only g is waited for.

Who may fail when, and what is then true. A peer that is gone, silent, busy with somebody else, or not there in time
costs this node that wait, and it goes on alone. The one with the greater id counts the meeting as it answers `settle`;
the other once it has the answer, for which it asks again, when that did not come, without waiting any more: whoever is
asked so and has not counted it never will. Only where that second answer is lost as well has one of the two counted
what the other has not. Nothing of a node's own is lost by it: the one that went on alone has all of its own work.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import trio

from swarmnode.protocols.calls.rpc import CallError, Refused
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.messages import Counter, Hash
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.liveness import PeerGoneSilent
from swarmnode.protocols.transfer.bulk import Corrupt, Key, NotOffered, StreamingBuffer
from swarmnode.protocols.wire import Message
from swarmnode.training.codecs import codec

logger = logging.getLogger(__name__)

AGAIN = 0.5  # seconds between two tries to fetch what is not offered yet, or broke off
IN_DOUBT = 1.5  # seconds for the answer of whoever did not say whether the meeting counts
AWAY = "away"  # the code by which a node refuses that takes no part
PAST = 64  # meetings whose end is remembered, for who asks again


@dataclass(frozen=True)
class Stand(Message):
    """What its state is after so many rounds."""

    round: Counter
    state_hash: Hash


@dataclass(frozen=True)
class MeetRequest(Message):
    run_id: str
    round: Counter


@dataclass(frozen=True)
class MeetReply(Message):
    round: Counter
    comes: bool


@dataclass(frozen=True)
class SettleRequest(Message):
    run_id: str
    round: Counter
    waits: bool  # until the other has all; else for what stands now


@dataclass(frozen=True)
class SettleReply(Message):
    counts: bool


class Meeting:
    """What one node offers and gets in one round. `run` fetches beside all else; `meet` is the meeting itself."""

    def __init__(self, parts: Context, round: int, peer: PeerId | None, *, size: int) -> None:
        """`peer`: whom this node expects to meet; `size`: bytes that each of two offers."""
        self._parts, self.round, self.peer = parts, round, peer
        self.bound = False  # it asked or was asked: in this round it meets nobody else
        self.wanted = False  # the other waits for the steps of this node to end
        self.counts = False  # both have all that there is, and the other knows or will
        self.absent = False  # the other was waited for in vain
        self.ahead = 0  # round of somebody who is past this one
        self.offered = bytearray(size)
        self.received: memoryview | None = None
        self._growing = StreamingBuffer(self.offered)
        self._closed = self._refused = False
        self._changed = trio.lowlevel.ParkingLot()
        self._fetch = trio.CancelScope()

    @property
    def key(self) -> Key:
        return ("gossip", self._parts.run_id, self.round)

    def grow(self, ready: int) -> None:
        """The first bytes of what is offered are there."""
        self._growing.grow(ready)
        self._changed.unpark_all()

    def open(self) -> None:
        """Offer what is there and what is to come, in place of what was offered in another round."""
        self._parts.bulk.withdraw(self.key[:2])
        ready, self._growing = self._growing.ready, StreamingBuffer(self.offered)
        self._growing.grow(ready)
        self._parts.bulk.offer(self.key, self._growing, packs=codec(self._parts.spec.exchange.codec).packs)

    def close(self) -> None:
        """Nobody gets anything more; who asks whether it counts is told."""
        self._closed = True
        self._parts.bulk.withdraw(self.key)
        self._fetch.cancel()
        self._changed.unpark_all()

    def be_met(self, peer: PeerId, round: int) -> bool:
        """Somebody's steps of `round` are done, this or a later one: whether this node comes."""
        if self._closed or (self.bound and (peer, round) != (self.peer, self.round)):
            return False
        if round != self.round:
            self.round, self.peer = round, None
            self.open()
        self._bind(peer)
        self.wanted = True
        return True

    def _bind(self, peer: PeerId) -> None:
        self.bound = True
        if peer != self.peer:
            self.peer, self.received = peer, None
            self._fetch.cancel()  # of who was expected

    async def run(self) -> None:
        """Fetch what the other offers, as it comes, whoever that is, until cancelled."""
        while not self._closed:
            with trio.CancelScope() as self._fetch:
                if self.peer is None or self.received is not None:
                    await trio.sleep_forever()
                await self._fetch_from(self.peer)
            self._changed.unpark_all()

    async def _fetch_from(self, peer: PeerId) -> None:
        room = StreamingBuffer(bytearray(len(self.offered)))
        try:
            # while it trains it sends nothing: who waits for it looks whether it is alive
            got = await self._parts.bulk.fetch(peer, self.key, into=room, max_size=room.size, wait=inf, stall=inf)
            if peer == self.peer:
                self.received = got
        except (NotOffered, Corrupt, NetworkError) as error:
            logger.debug("nothing of round %d from %s: %s", self.round, peer, error)
            await trio.sleep(AGAIN)

    async def meet(self, *, within: float) -> None:
        """Meet whom this node expects, or who came first. Ends within so many seconds, and some."""
        peer = self.peer
        if peer is None:
            return
        why: Exception | str = f"it did not come in {within:.1f} s"
        with trio.move_on_after(within) as scope:
            try:
                await self._parts.liveness.unless_gone(peer, lambda: self._meet(peer, within))
            except (PeerGoneSilent, CallError) as error:
                self.absent, why = not isinstance(error, Refused) or error.code == AWAY, error
        self.absent = (self.absent or scope.cancelled_caught) and not self.counts
        if self.absent:
            logger.info("round %d goes on without %s: %s", self.round, self.peer, why)

    async def give_up(self) -> None:
        """Wait no more, and have the other wait no more; it may have counted the meeting just before."""
        bound, self._closed = self.bound and not self.counts and not self.absent, True
        self._changed.unpark_all()
        if bound and self.peer is not None and not self._refused:
            with trio.move_on_after(IN_DOUBT, shield=True), suppress(CallError):
                await self._ask(self.peer, waits=False, timeout=IN_DOUBT)

    async def _meet(self, peer: PeerId, within: float) -> None:
        if not self.bound:
            self._bind(peer)
            request = MeetRequest(self._parts.run_id, self.round)
            reply = await self._parts.rpc.call(peer, "gossip.meet", request, MeetReply, timeout=within)
            if not reply.comes:
                self.ahead, self._refused = max(self.ahead, reply.round), True
                return
        while self.received is None and not self._closed:
            await self._changed.park()
        if self._parts.me < peer:
            await self._settle(peer, within)
            return
        while not (self.counts or self._closed):
            await self._changed.park()

    async def _settle(self, peer: PeerId, within: float) -> None:
        """Ask whether the other has all; where this node hears nothing or waits no more, once again for what stands."""
        try:
            self.counts = await self._ask(peer, waits=True, timeout=within)
        except BaseException:
            with trio.move_on_after(IN_DOUBT, shield=True):
                try:
                    self.counts = await self._ask(peer, waits=False, timeout=IN_DOUBT)
                except CallError as error:
                    logger.warning("round %d may count for %s and not here: %s", self.round, peer, error)
            raise

    async def _ask(self, peer: PeerId, *, waits: bool, timeout: float) -> bool:
        request = SettleRequest(self._parts.run_id, self.round, waits)
        return (await self._parts.rpc.call(peer, "gossip.settle", request, SettleReply, timeout=timeout)).counts

    async def settle(self, *, waits: bool) -> bool:
        """As the one with the greater id: whether the meeting counts. Where it does not by now, it never will."""
        if not self.bound:
            return False
        while waits and not self._closed and (self.received is None or self._growing.ready < len(self.offered)):
            await self._changed.park()
        if not self._closed:
            if self.received is not None and waits:
                self.counts = True
            elif not self.counts:
                self._closed = True
            self._changed.unpark_all()
        return self.counts
