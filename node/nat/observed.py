"""Where others see this node, as identify tells it, and what that says about the NAT in front of it.

Only connections that left from the listening port say where that port is mapped to. Two observers at different
addresses that see it at one place mean an endpoint-independent NAT ("cone"), which can be punched through; two that see
it at different places mean an address-dependent NAT ("symmetric"), which cannot (RFC 4787, section 4.1).

Observers may lie: one address counts once, most of them decide, and what they say is used for attempts to connect only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.stream_muxer.exceptions import MuxedStreamError
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import parse
from swarmnode.node.host.patches.yamux_session import YamuxSession
from swarmnode.node.host.stream import Libp2pStream, Refused, agree
from swarmnode.node.nat.messages import BadMessage, receive
from swarmnode.protocols.network import Address

IDENTIFY = "/ipfs/id/1.0.0"
MAX_IDENTIFY = 16 << 10  # bytes
MAX_OBSERVERS = 32  # the latest, by their own address


class ObservedAddresses:
    """The views of several observers on this node's listening port."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, Address] = OrderedDict()  # by host of the observer

    def record(self, observer: str, place: Address) -> None:
        """The observer at the IP address `observer` sees the listening port at `place`, /ip4/…/tcp/…."""
        self._seen.pop(observer, None)
        self._seen[observer] = place
        while len(self._seen) > MAX_OBSERVERS:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        """The network changed: what was seen before says nothing."""
        self._seen.clear()

    @property
    def observers(self) -> frozenset[str]:
        return frozenset(self._seen)

    def mappings(self) -> tuple[Address, ...]:
        """Where the listening port is seen, the most often seen first."""
        return tuple(place for place, _ in Counter(self._seen.values()).most_common())

    def endpoint_independent(self) -> bool | None:
        """Whether most see the listening port at one place; None where fewer than two observers know."""
        if len(self._seen) < 2:
            return None
        (_, most), *_rest = Counter(self._seen.values()).most_common(1)
        return most > len(self._seen) / 2


async def seen_by(session: YamuxSession) -> Address | None:
    """Where the other end of a connection sees it come from, /ip4/…/tcp/…; None where it does not say so usably.

    Raises NetworkError where it does not answer.
    """
    peer = str(session.peer_id)
    try:
        stream = await session.open_stream()
        try:
            await agree(stream, IDENTIFY)
            message = await receive(Libp2pStream(stream, peer), Identify, limit=MAX_IDENTIFY)
        finally:
            stream.abort()
    except (MuxedStreamError, Refused) as error:
        raise BadMessage(f"{peer} does not identify itself: {error}") from error
    try:
        place = str(Multiaddr(message.observed_addr)).partition("/p2p/")[0]
    except ValueError:
        return None
    endpoint = parse(place)
    return endpoint.place if endpoint is not None and not endpoint.is_name else None
