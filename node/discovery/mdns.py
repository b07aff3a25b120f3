"""Peers on the local network by multicast DNS, under a service name of our own: other libp2p software is left alone.

py-libp2p's mDNS runs on zeroconf's thread and only reports; it advertises the addresses that it is given, so it is
given real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio
from libp2p.abc import INetworkService
from libp2p.discovery.events.peerDiscovery import peerDiscovery
from libp2p.discovery.mdns.mdns import MDNSDiscovery, create_mdns_discovery
from libp2p.peer.peerinfo import PeerInfo

from swarmnode.protocols.network import Address, PeerId

log = logging.getLogger(__name__)

FINGERPRINT = "swarmnode"  # the service is _p2p-swarmnode._udp.local
GOODBYE = 1.0  # seconds that leaving may take


async def advertise_and_listen(
    network: INetworkService, addresses: tuple[Address, ...], found: Callable[[PeerId, tuple[str, ...]], None]
) -> None:
    """Until cancelled: advertise `addresses` and call `found` in trio's thread for each peer that is heard.

    Where multicast is not possible (no interface, containers) this logs once and returns.
    """
    token = trio.lowlevel.current_trio_token()

    def heard(peer: PeerInfo) -> None:
        addresses = tuple(str(address) for address in peer.addrs[:16])
        try:
            token.run_sync_soon(found, str(peer.peer_id), addresses)
        except trio.RunFinishedError:
            log.debug("heard of %s after the end", peer.peer_id)

    def start() -> MDNSDiscovery:
        port = int(addresses[0].split("/tcp/")[1].split("/")[0])
        listen = [address.partition("/p2p/")[0] for address in addresses]
        service = create_mdns_discovery(
            network, port=port, listen_addrs=listen, private_network_fingerprint=FINGERPRINT
        )
        service.broadcaster.register()
        return service

    def stop(service: MDNSDiscovery) -> None:
        service.broadcaster.unregister()
        service.listener.stop()
        service.zeroconf.close()

    peerDiscovery.register_peer_discovered_handler(heard)
    try:
        try:
            service = await trio.to_thread.run_sync(start, abandon_on_cancel=True)
        except OSError as error:
            log.warning("no discovery on the local network: %s", error)
            return
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(GOODBYE) as leaving:
                leaving.shield = True
                await trio.to_thread.run_sync(stop, service, abandon_on_cancel=True)
    finally:
        peerDiscovery.unregister_peer_discovered_handler(heard)
