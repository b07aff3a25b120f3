"""Three defects of `BasicHost` (py-libp2p 0.8.1, `host/basic_host.py`), each mended by a function around upstream's.

Each says where upstream breaks, and which test in tests/node/host/test_libp2p_patches.py fails once upstream is mended.
Beside them, a connection over QUIC is told as one (`tell_transport`), and what upstream agrees on for a stream is told
to that stream, which counts its bytes by it.
"""

from __future__ import annotations

import logging
from functools import partial, wraps
from typing import Any

from libp2p.abc import INetStream, IPeerStore
from libp2p.custom_types import TProtocol
from libp2p.host import basic_host
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify
from libp2p.identity.identify_push import identify_push
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.utils.varint import read_length_prefixed_protobuf
from multiaddr import Multiaddr

from swarmnode.node.host.muxed import UdpAddress

log = logging.getLogger(__name__)

AGENT = "agent"  # the key in the peer store
MAX_AGENT = 128  # characters
MAX_IDENTIFY = 64 << 10  # bytes of what a peer says of itself, of which are kept …
MAX_PLACES, MAX_PLACE = 32, 512  # … addresses, of so many bytes, and …
MAX_PROTOCOLS, MAX_PROTOCOL = 256, 126  # … protocols, of so many bytes, as `stream.agree` can ask for, and …
MAX_RECORD = 1 << 10  # … a signed record of addresses, of so many bytes


_handle_stream = BasicHost._swarm_stream_handler
_set_protocol = NetStream.set_protocol
_to_multiaddr = identify._remote_address_to_multiaddr
_update_peerstore = basic_host.update_peerstore_from_identify


@wraps(_handle_stream)
async def contain(self: BasicHost, stream: INetStream) -> None:
    """An exception out of a stream handler, or out of its negotiation, ends that stream and nothing else.

    Upstream (line 1554) lets it climb into the nursery of the whole host. An anonymous peer can cause one at will: a
    multistream message that is not UTF-8 raises UnicodeDecodeError (`protocol_muxer/multiselect_communicator.py:58`),
    26 bytes that end the daemon. No longer needed when `test_stock_handler_exception_still_escapes` fails.
    """
    try:
        await _handle_stream(self, stream)
    except Exception as error:
        log.debug("peer %s: stream failed: %r", stream.muxed_conn.peer_id, error)
        await stream.reset()


@wraps(_update_peerstore)
async def keep_agent(peerstore: IPeerStore, peer: ID, message: Any) -> None:
    """What a peer says of itself in identify is kept: its agent, under AGENT in the peer store, cut to printable text.

    Upstream (line 1284) hands the message to `update_peerstore_from_identify`, which stores addresses, protocols and
    key and forgets the agent version, so a host cannot say which software a peer runs.
    No longer needed when `test_stock_identify_still_forgets_the_agent` fails.

    And what it says is bounded, also where it is pushed. Upstream takes 1 MiB at a time from anybody: it compares each
    of a thousand addresses with all the others in one turn of the loop, remembers a thousand of up to 1 MiB for good,
    and keeps any number of protocols. Go's limit is 8 KiB.
    No longer needed when `test_stock_identify_still_takes_a_thousand_addresses` fails.
    """
    places = [raw for raw in message.listen_addrs[:MAX_PLACES] if len(raw) <= MAX_PLACE]
    protocols = [name for name in message.protocols[:MAX_PROTOCOLS] if len(name.encode()) <= MAX_PROTOCOL]
    message.listen_addrs[:], message.protocols[:] = places, protocols
    if len(message.observed_addr) > MAX_PLACE:  # its text takes the square of that: 2.5 s for 64 KiB
        message.ClearField("observed_addr")
    if len(message.signedPeerRecord) > MAX_RECORD:
        message.ClearField("signedPeerRecord")
    await _update_peerstore(peerstore, peer, message)
    agent = "".join(char for char in message.agent_version[:MAX_AGENT] if char.isprintable())
    peerstore.put(peer, AGENT, agent)


@wraps(_to_multiaddr)
def tell_transport(remote: tuple[str, int] | None) -> Multiaddr | None:
    """Identify tells a peer that came by QUIC from which UDP port it came.

    Upstream (`identity/identify/identify.py:63`) calls every port one of TCP: who learned so where its router shows it
    would have others dial a port that leads nowhere.
    No longer needed when `test_stock_identify_still_calls_every_port_one_of_tcp` fails.
    """
    return remote.multiaddr if isinstance(remote, UdpAddress) else _to_multiaddr(remote)


def tell_stream(self: NetStream, protocol: TProtocol) -> None:
    self.muxed_stream.protocol = str(protocol)  # type: ignore[attr-defined]
    _set_protocol(self, protocol)


def apply() -> None:
    identify._remote_address_to_multiaddr = tell_transport
    NetStream.set_protocol = tell_stream  # type: ignore[method-assign]
    BasicHost._swarm_stream_handler = contain  # type: ignore[method-assign]
    for module in (basic_host, identify_push):
        module.update_peerstore_from_identify = keep_agent  # type: ignore[attr-defined]
        module.read_length_prefixed_protobuf = partial(  # type: ignore[attr-defined]
            read_length_prefixed_protobuf, max_length=MAX_IDENTIFY
        )
