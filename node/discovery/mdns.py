"""Peers on the local network by multicast DNS, under a service name of our own: other libp2p software is left alone.

py-libp2p's mDNS runs on zeroconf's threads, and writes what it hears into a peer store. It is given one of its own, as
that of the host is the event loop's. It advertises the addresses that it is given, so it is given real ones.
"""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any, Protocol

import trio
from libp2p.discovery.events.peerDiscovery import peerDiscovery
from libp2p.discovery.mdns.mdns import MDNSDiscovery, create_mdns_discovery
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore

from swarmnode.protocols.network import Address, Network, NetworkError, PeerId

log = logging.getLogger(__name__)

FINGERPRINT = "swarmnode"  # the service is _p2p-swarmnode._udp.local
HEARD = 64  # peers heard that wait to be dialled
LOOK_EVERY = 5.0  # seconds, at the addresses of this machine
GOODBYE = 1.0  # seconds that leaving may take


class ListeningNetwork(Network, Protocol):
    @property
    def own_addresses(self) -> tuple[Address, ...]: ...


async def advertise_and_listen(network: ListeningNetwork, most: int) -> None:
    """Until cancelled: advertise this node, and connect to each peer that is heard, up to `most` with dials under way.

    Addresses that change are advertised anew. Where multicast is not possible (containers), that is logged for each.
    """
    token = trio.lowlevel.current_trio_token()
    peers, found = trio.open_memory_channel[PeerInfo](HEARD)

    def here() -> list[Address]:
        return [address for address in network.own_addresses if "/tcp/" in address]

    def heard(peer: PeerInfo) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # zeroconf's thread may outlive the node
            token.run_sync_soon(pass_on, peer)

    def pass_on(peer: PeerInfo) -> None:
        with contextlib.suppress(trio.WouldBlock):  # it is heard again
            peers.send_nowait(peer)

    def start(addresses: list[Address]) -> MDNSDiscovery:
        port = int(addresses[0].split("/tcp/")[1].split("/")[0])
        listen = [address.partition("/p2p/")[0] for address in addresses]
        own: Any = SimpleNamespace(get_peer_id=lambda: network.me, peerstore=PeerStore())
        service = create_mdns_discovery(own, port=port, listen_addrs=listen, private_network_fingerprint=FINGERPRINT)
        service.broadcaster.register()
        return service

    def stop(service: MDNSDiscovery) -> None:
        service.broadcaster.unregister()
        service.listener.stop()
        service.zeroconf.close()

    peerDiscovery.register_peer_discovered_handler(heard)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_connect_to_each, found, network, most)
            while True:
                service, addresses = None, here()
                try:
                    if addresses:
                        service = await trio.to_thread.run_sync(start, addresses, abandon_on_cancel=True)
                except (OSError, ValueError) as error:  # ValueError: an address is too long for a record
                    log.warning("no discovery on the local network: %s", error)
                try:
                    while here() == addresses:  # noqa: ASYNC110
                        await trio.sleep(LOOK_EVERY)
                finally:
                    if service is not None:
                        with trio.move_on_after(GOODBYE, shield=True):
                            await trio.to_thread.run_sync(stop, service, abandon_on_cancel=True)
    finally:
        peerDiscovery.unregister_peer_discovered_handler(heard)


async def _connect_to_each(found: trio.MemoryReceiveChannel[PeerInfo], network: Network, most: int) -> None:
    async with trio.open_nursery() as nursery:
        async for heard in found:
            peer = str(heard.peer_id)
            connected = {view.peer for view in network.peers()}
            if peer != network.me:
                network.learn(peer, tuple(str(address) for address in heard.addrs[:16]), hearsay=True)
                if peer not in connected and len(connected) + len(nursery.child_tasks) < most:
                    nursery.start_soon(_connect, network, peer)


async def _connect(network: Network, peer: PeerId) -> None:
    try:
        await network.connect(peer)
    except NetworkError as error:
        log.debug("heard of %s on the local network: %s", peer, error)
