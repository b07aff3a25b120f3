"""Getting rid of a relay: DCUtR over TCP simultaneous open (https://github.com/libp2p/specs/blob/master/relay/DCUtR.md).

    B, who was dialled through the relay      A, who dialled
    CONNECT (B's addresses)            ->
                                       <-     CONNECT (A's addresses)          B measures the round trip
    SYNC                               ->
    waits half a round trip, then dials A     dials B as soon as SYNC arrives

Both dial from their listening ports, so both NATs have seen a packet go out when the other's comes in. Where the two
dials meet in one TCP connection neither was accepted by a listener: then A speaks first and B answers. B dials once
more from another port, speaking first: where nothing keeps strangers from A, that reaches A's listener. From the second
attempt on B speaks first in both: where the dials did not meet, its own may have reached A's listener, which waits for
that. Many a go-libp2p has B speak first and A answer (its issue 3171): so A listens for a round trip before it speaks.
Tried at most `ATTEMPTS` times; a failure is remembered, so that symmetric pairs stay relayed without trying for ever.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from functools import partial
from typing import Any

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import parse, without_peer
from swarmnode.node.host.connections import NO_PATH
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import GREETING, BadMessage, multiaddrs_of, places_in, receive, send
from swarmnode.node.nat.reachability import Reachability, local_network
from swarmnode.node.nat.udp import WITHIN, UdpPuncher
from swarmnode.protocols.limits import Allowance, Budget, Recent, counted
from swarmnode.protocols.network import Address, NetworkError, PeerId, Stream

logger = logging.getLogger(__name__)

DCUTR = "/libp2p/dcutr"
ATTEMPTS = 3  # 97.6 % of the punches that succeed in the wild do so at the first (2510.27500)
MAX_ADDRESSES = 16  # of the other side that are dialled at once, half of them over UDP
DIAL_WITHIN = 3.0  # s; a SYN is sent again after 1 s, so this spans two
LOOK_WITHIN = 1.0  # s for a peer more to say where it sees the UDP port, where fewer than two did
GRACE = 0.6  # s for TCP to come beside a connection over UDP
RETRY_AFTER = 600.0  # s after a failure, doubled each time
RETRY_AT_MOST = 6 * 3600.0  # s
ANSWERS_AT_ONCE = 2  # with one peer: its next attempt may begin while the last one ends here
ANSWERED_AT_ONCE, PUNCHED_AT_ONCE = (32, 16)  # with all, of whom each may name 16 places of anybody
ANSWERS = Allowance(rate=1 / 60, burst=6)  # of one peer: each sends a thousand packets to wherever the peer says it is
MAX_REMEMBERED = 1024  # peers that could not be punched through to


class HolePuncher:
    """Tries to replace relayed connections by direct ones, at the places where the two may be met."""

    def __init__(self, network: Libp2pNetwork, reachability: Reachability, udp: UdpPuncher) -> None:
        self._network = network
        self._reachability = reachability
        self._udp = udp
        self._failures = Recent[PeerId, tuple[int, float]](MAX_REMEMBERED)  # how many, and until when it is left
        self._under_way: set[PeerId] = set()  # peers to which this node is punching, as B
        self._asked = Budget[PeerId](ANSWERS)
        self._answering: Counter[PeerId] = Counter()  # how many times at once it takes part, as A
        self._turns = trio.CapacityLimiter(PUNCHED_AT_ONCE)  # as B
        self.succeeded = 0
        self.failed = 0
        network.serve(DCUTR, self._on_dcutr)

    def worth_trying(self, peer: PeerId) -> bool:
        """False while it is being tried, and for a while after a failure, longer each time."""
        _, until = self._failures.get(peer, (0, 0.0))
        return peer not in self._under_way and trio.current_time() >= until

    def forget_failures(self) -> None:
        """Try all peers again: this node's own network changed."""
        self._failures.clear()

    async def punch(self, peer: PeerId) -> bool:
        """As B: get a direct connection to `peer`, which is connected through a relay; whether there is one."""
        if peer in self._under_way:
            return self._network.is_direct(peer)
        self._under_way.add(peer)
        try:
            async with self._turns:
                return self._network.connections.path(peer) != NO_PATH and await self._punch(peer)
        finally:
            self._under_way.discard(peer)

    async def _punch(self, peer: PeerId) -> bool:
        why = f"{ATTEMPTS} attempts met nobody"
        for attempt in range(1, ATTEMPTS + 1):
            if self._network.is_direct(peer):
                return True
            try:
                if await self._attempt(peer, listens=math.inf if attempt == 1 else 0.0):
                    logger.info("direct connection to %s at attempt %d", peer, attempt)
                    self.succeeded += 1
                    self._failures.pop(peer, None)
                    return True
            except NetworkError as error:
                logger.debug("no hole punched to %s: %s", peer, error)
                if self._network.is_direct(peer):
                    return True
                why = str(error)
                break  # it does not take part; trying again would change nothing
        self.failed += 1
        later = f"tried again in {self._remember(peer):.0f} s, or by swarmnode ping"
        self._network.connections.note(peer, f"no hole was punched: {why}; {later}")
        return False

    async def _attempt(self, peer: PeerId, *, listens: float) -> bool:
        stream = await self._network.open_stream(peer, DCUTR)
        try:
            answer, round_trip = await self._introduced(stream, pb.HolePunch.CONNECT)
            await send(stream, pb.HolePunch(type=pb.HolePunch.SYNC))
            await trio.sleep(round_trip / 2)
            return await self._dial(peer, self._unpacked(answer), listens=listens, answers=False)
        finally:
            await stream.aclose()

    async def _on_dcutr(self, stream: Stream) -> None:
        """As A."""
        peer = stream.peer
        many = self._answering[peer] >= ANSWERS_AT_ONCE or self._answering.total() >= ANSWERED_AT_ONCE
        if many or not self._asked.take(peer, 1.0):
            raise BadMessage(f"{peer} wants too many holes")
        with counted(self._answering, peer):
            await self._take_part(stream, peer)

    async def _take_part(self, stream: Stream, peer: PeerId) -> None:
        request = await receive(stream, pb.HolePunch)
        if request.type != pb.HolePunch.CONNECT:
            raise BadMessage(f"{peer} began hole punching with no CONNECT")
        _, round_trip = await self._introduced(stream, pb.HolePunch.SYNC)
        places = self._unpacked(request)  # dialled for want of a connection only: anybody may name any
        listens = min(round_trip, DIAL_WITHIN / 3)
        if self._network.is_direct(peer) or await self._dial(peer, places, listens=listens, answers=True):
            self._failures.pop(peer, None)

    async def _introduced(self, stream: Stream, expected: pb.HolePunch.Type.ValueType) -> tuple[pb.HolePunch, float]:
        """Say where this node may be met; what the other side answers, and after how many seconds."""
        with trio.move_on_after(LOOK_WITHIN):
            await self._udp.look_around()  # how the router treats UDP, where too few have told
        began = trio.current_time()
        await send(stream, pb.HolePunch(type=pb.HolePunch.CONNECT, ObsAddrs=self._packed()))
        answer = await receive(stream, pb.HolePunch)
        if answer.type != expected:
            raise BadMessage(f"{stream.peer} answered no {pb.HolePunch.Type.Name(expected)}")
        return answer, trio.current_time() - began

    async def _dial(self, peer: PeerId, places: tuple[Address, ...], *, listens: float, answers: bool) -> bool:
        """Dial all `places` at once; True as soon as there is a direct connection, also one that came in.

        Where UDP was first, TCP has `GRACE` seconds more. `listens`: as `_meet`; `answers`: this side is A.
        """
        udp = self._udp if any("/quic-v1" in place for place in places) else None

        async def dial(place: Address, done: trio.CancelScope, *, punches: bool = True) -> None:
            try:
                source = self._network.dial_source(place.split("/")[2]) if punches else None
                await self._meet(peer, Multiaddr(place), source, listens if punches else 0.0)
            except Exception as error:  # whatever answers there may say anything
                logger.debug("dial of %s at %s failed: %r", peer, place, error)
            else:
                done.cancel()

        async def came_in(done: trio.CancelScope) -> None:
            with self._network.watch_peers() as events:
                while not self._network.is_direct(peer):
                    with trio.move_on_after(0.1):  # a second connection of a connected peer is no event
                        await events.receive()
            with trio.move_on_after(GRACE):
                while udp and (best := self._network.connections.best(peer)) and best.is_quic:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            done.cancel()

        with trio.move_on_after(WITHIN if udp and udp.probes(places) else DIAL_WITHIN):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(came_in, nursery.cancel_scope)
                for endpoint in map(parse, places):
                    if endpoint is not None:
                        self._reachability.contacted(endpoint.host)
                for place in places:
                    if "/tcp/" in place:
                        nursery.start_soon(dial, place, nursery.cancel_scope)
                        if listens == math.inf:  # to the other's listener, where its router lets everybody in
                            nursery.start_soon(partial(dial, place, nursery.cancel_scope, punches=False))
                if udp:
                    nursery.start_soon(partial(udp.punch, peer, places, dials=answers, speaks=listens < math.inf))
        return self._network.is_direct(peer)

    async def _meet(self, peer: PeerId, place: Multiaddr, source: tuple[str, int] | None, listens: float) -> None:
        """Dial; speak, but answer a side that is heard to speak within `listens` s. Infinite: answer in any case."""
        swarm = self._network.swarm
        transport: Any = swarm.transport_manager.transport_for_dialing(place)
        raw = await transport.dial_with_source(place, source)
        try:
            if 0.0 < listens < math.inf:
                with trio.move_on_after(listens):
                    await raw.stream.speaks()
            if listens == math.inf or raw.stream.waiting() > len(GREETING):  # who speaks first says what it proposes
                await swarm.upgrade_inbound_raw_conn(raw, place)
            else:
                await swarm.upgrade_outbound_raw_conn(raw, ID.from_string(peer))
        except BaseException:
            raw.stream.abort()
            raise

    def _packed(self) -> list[bytes]:
        places = self._reachability.places(self._network.own_addresses)
        over_tcp = [place for place in places if "/quic-v1" not in place][: MAX_ADDRESSES // 2]
        over_udp = self._udp.places(self._reachability.mapped_udp)[: MAX_ADDRESSES // 2]
        return [place.to_bytes() for place in multiaddrs_of(map(without_peer, (*over_tcp, *over_udp)))]

    def _remember(self, peer: PeerId) -> float:
        """A failure; for how many seconds the peer is left alone."""
        before, _ = self._failures.get(peer, (0, 0.0))
        wait = min(RETRY_AFTER * 2**before, RETRY_AT_MOST)
        self._failures[peer] = (before + 1, trio.current_time() + wait)
        return wait

    def _unpacked(self, message: pb.HolePunch) -> tuple[Address, ...]:
        """The addresses in a CONNECT that this node dials: local ones only where it has one of that network itself."""
        own = [at for at in map(parse, self._network.own_addresses) if at is not None and not at.is_name]
        here = {None, *(local_network(at.host) for at in own)}
        endpoints = ((place, parse(place)) for place in places_in(message.ObsAddrs[:MAX_ADDRESSES]))
        return tuple(place for place, at in endpoints if at and not at.is_name and local_network(at.host) in here)
