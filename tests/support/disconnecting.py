"""How a test ends the connections of a node to a peer, which no protocol asks of a network."""

from __future__ import annotations

from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.protocols.network import PeerId
from swarmnode.testing.simnet import SimNetwork


async def disconnect(network: Libp2pNetwork | SimNetwork, peer: PeerId) -> None:
    """Close all connections to `peer`, where there are any."""
    if isinstance(network, SimNetwork):
        if (connection := network._world.connection(network.me, peer)) is not None:
            network._world.end_connection(connection, "the connection was closed")
        return
    for connection in network.connections.of(peer):
        await connection.conn.close()
