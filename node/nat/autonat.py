"""AutoNAT (https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md): ask a peer to dial this node back.

    asker -> helper   DIAL(addresses of the asker)
    helper           connects anew to those that are at the address from which the asker came, and to no others
    helper -> asker   OK(address), or why not

The helper never answers from a connection that exists (py-libp2p's does, and calls everybody public), and dials no
address but the asker's own, so that it cannot be used to attack a third. Whether the one who answers there holds the
asker's key is checked by the Noise handshake; then the connection is dropped.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

import trio
from libp2p.abc import IRawConnection
from libp2p.host.autonat.pb import autonat_pb2 as pb
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import parse
from swarmnode.node.nat.messages import BadMessage, peer_bytes, receive, send
from swarmnode.protocols.network import Address, Network, PeerId, Stream

logger = logging.getLogger(__name__)

AUTONAT = "/libp2p/autonat/1.0.0"
DIAL_WITHIN = 4.0  # s for the dial back; a SYN is sent again after 1 and 3 s
ANSWER_WITHIN = DIAL_WITHIN + 3.0  # s for the helper's answer
AT_ONCE = 8  # dials back under way, for all askers together
EVERY = 10.0  # s between two dials for one asker
MAX_ASKERS = 1024  # whose last dial is remembered
MAX_ADDRESSES = 4  # dialled for one question


@dataclass(frozen=True)
class DialBack:
    """What came of one question."""

    reached: bool | None  # None where the helper did not try
    place: Address | None = None  # where it got through, one of those asked about


class AutoNat:
    """Both sides of AutoNAT."""

    def __init__(self, network: Network, swarm: Swarm) -> None:
        self._network = network
        self._swarm = swarm
        self._under_way = 0
        self._asked: OrderedDict[PeerId, float] = OrderedDict()  # trio time of the last dial for each asker
        network.serve(AUTONAT, self._serve)

    async def ask(self, helper: PeerId, places: tuple[Address, ...]) -> DialBack:
        """Whether and where `helper` reached this node. Raises NetworkError where it does not answer sensibly."""
        asked = tuple(dict.fromkeys(place.partition("/p2p/")[0] for place in places))
        stream = await self._network.open_stream(helper, AUTONAT)
        try:
            packed = [Multiaddr(place).to_bytes() for place in asked]
            me = pb.Message.PeerInfo(id=peer_bytes(self._network.me), addrs=packed)
            await send(stream, pb.Message(type=pb.Message.DIAL, dial=pb.Message.Dial(peer=me)))
            answer = await receive(stream, pb.Message, within=ANSWER_WITHIN)
        finally:
            await stream.aclose()
        if answer.type != pb.Message.DIAL_RESPONSE:
            raise BadMessage(f"{helper} answered no DIAL_RESPONSE")
        status = answer.dialResponse.status
        if status != pb.Message.OK:
            return DialBack(False if status == pb.Message.E_DIAL_ERROR else None)
        try:
            reached = str(Multiaddr(answer.dialResponse.addr)).partition("/p2p/")[0]
        except ValueError as error:
            raise BadMessage(f"{helper} reached an address that is none: {error}") from error
        if reached not in asked:
            raise BadMessage(f"{helper} reached {reached}, where it was not asked to dial")
        return DialBack(True, reached)

    async def _serve(self, stream: Stream) -> None:
        request = await receive(stream, pb.Message)
        asker = stream.peer
        if request.type != pb.Message.DIAL:
            await self._answer(stream, pb.Message.E_BAD_REQUEST)
            return
        host = self._host_of(asker)
        places = _at(host, [bytes(raw) for raw in request.dial.peer.addrs]) if host else ()
        now = trio.current_time()
        if not places or self._under_way >= AT_ONCE or now < self._asked.get(asker, -EVERY) + EVERY:
            await self._answer(stream, pb.Message.E_DIAL_REFUSED)
            return
        self._asked[asker] = now
        self._asked.move_to_end(asker)
        while len(self._asked) > MAX_ASKERS:
            self._asked.popitem(last=False)
        self._under_way += 1
        try:
            reached = await self._reach(asker, places)
        finally:
            self._under_way -= 1
        if reached is None:
            await self._answer(stream, pb.Message.E_DIAL_ERROR)
        else:
            await self._answer(stream, pb.Message.OK, Multiaddr(reached).to_bytes())

    async def _answer(self, stream: Stream, status: pb.Message.ResponseStatus.ValueType, address: bytes = b"") -> None:
        response = pb.Message.DialResponse(status=status, addr=address)
        await send(stream, pb.Message(type=pb.Message.DIAL_RESPONSE, dialResponse=response))

    async def _reach(self, asker: PeerId, places: tuple[Address, ...]) -> Address | None:
        """The first of `places` at which `asker` answers a connection made for this."""
        found: list[Address] = []

        async def dial(place: Address, done: trio.CancelScope) -> None:
            if await self._answers(asker, place):
                found.append(place)
                done.cancel()

        with trio.move_on_after(DIAL_WITHIN):
            async with trio.open_nursery() as nursery:
                for place in places:
                    nursery.start_soon(dial, place, nursery.cancel_scope)
        return found[0] if found else None

    async def _answers(self, asker: PeerId, place: Address) -> bool:
        where = Multiaddr(place)
        transport = self._swarm.transport_manager.transport_for_dialing(where)
        if transport is None:
            return False
        try:
            raw = await transport.dial(where)
        except Exception as error:  # whatever a stranger's address does to a dial, it was not reached
            logger.debug("dial back to %s at %s failed: %s", asker, place, error)
            return False
        assert isinstance(raw, IRawConnection)
        try:
            secured = await self._swarm.upgrader.upgrade_security(raw, True, ID.from_string(asker))
            return str(secured.get_remote_peer()) == asker
        except Exception as error:
            logger.debug("whoever answers at %s is not %s: %s", place, asker, error)
            return False
        finally:
            with trio.move_on_after(1.0) as closing:
                closing.shield = True
                await raw.close()

    def _host_of(self, peer: PeerId) -> str | None:
        for conn in self._swarm.connections.get(ID.from_string(peer), ()):
            remote = conn.muxed_conn.get_remote_address()
            if remote is not None:
                return str(remote[0])
        return None


def _at(host: str, packed: list[bytes]) -> tuple[Address, ...]:
    """Those of the asker's addresses that are at `host`."""
    places = []
    for raw in packed[:16]:
        try:
            place = str(Multiaddr(raw)).partition("/p2p/")[0]
        except ValueError:
            continue
        endpoint = parse(place)
        if endpoint is not None and endpoint.host == host:
            places.append(place)
    return tuple(dict.fromkeys(places))[:MAX_ADDRESSES]
