"""Three defects of `BasicHost` (py-libp2p 0.8.1, `host/basic_host.py`), each mended by a wrapper of its own.

Each says where upstream breaks, and which test in tests/node/host/test_libp2p_patches.py fails once upstream is mended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from libp2p.abc import INetStream, IPeerStore
from libp2p.host import basic_host
from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from multiaddr import Multiaddr

log = logging.getLogger(__name__)

CIRCUIT = "/p2p-circuit"
AGENT = "agent"  # the key in the peer store
MAX_AGENT = 128  # characters


def contain(upstream: Callable[[BasicHost, INetStream], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """An exception out of a stream handler, or out of its negotiation, ends that stream and nothing else.

    Upstream (line 1554) lets it climb into the nursery of the whole host. An anonymous peer can cause one at will: a
    multistream message that is not UTF-8 raises UnicodeDecodeError (`protocol_muxer/multiselect_communicator.py:58`),
    26 bytes that end the daemon. No longer needed when `test_stock_handler_exception_still_escapes` fails.
    """

    @wraps(upstream)
    async def contained(self: BasicHost, stream: INetStream) -> None:
        try:
            await upstream(self, stream)
        except Exception as error:
            log.info("peer %s: stream failed: %r", stream.muxed_conn.peer_id, error)
            await stream.reset()

    return contained


def keep_relays(upstream: Callable[[BasicHost], list[Multiaddr]]) -> Callable[[BasicHost], list[Multiaddr]]:
    """A host whose own addresses go through relays tells them whole.

    Upstream (line 536) takes any /p2p/ in an address for the host's own and cuts it off with all that follows:
    "/ip4/…/tcp/…/p2p/RELAY/p2p-circuit" becomes "/ip4/…/tcp/…/p2p/ME", which is the relay's place under the host's
    name. Peers that identify told so dial the relay and find another peer than they expect.
    No longer needed when `test_stock_hosts_still_cut_the_relay_from_their_addresses` fails.
    """

    @wraps(upstream)
    def get_addrs(self: BasicHost) -> list[Multiaddr]:
        factory = self._addrs_factory
        told = list(factory(list(self.get_transport_addrs()))) if factory is not None else []
        if not any(str(address).endswith(CIRCUIT) for address in told):
            return upstream(self)
        return [Multiaddr(f"{address}/p2p/{self.get_id()}") for address in told]

    return get_addrs


def keep_agent(upstream: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """What a peer says of itself in identify is kept: its agent, under AGENT in the peer store, cut to printable text.

    Upstream (line 1284) hands the message to `update_peerstore_from_identify`, which stores addresses, protocols and
    key and forgets the agent version, so a host cannot say which software a peer runs.
    No longer needed when `test_stock_identify_still_forgets_the_agent` fails.
    """

    @wraps(upstream)
    async def update(peerstore: IPeerStore, peer: ID, message: Any) -> None:
        await upstream(peerstore, peer, message)
        agent = "".join(char for char in message.agent_version[:MAX_AGENT] if char.isprintable())
        peerstore.put(peer, AGENT, agent)

    return update


def apply() -> None:
    BasicHost._swarm_stream_handler = contain(BasicHost._swarm_stream_handler)  # type: ignore[method-assign,assignment]
    BasicHost.get_addrs = keep_relays(BasicHost.get_addrs)  # type: ignore[method-assign]
    upstream = basic_host.update_peerstore_from_identify
    basic_host.update_peerstore_from_identify = keep_agent(upstream)  # type: ignore[assignment]
