"""Letting go of a relay: once there is a direct connection to a peer, its circuits are closed when nothing uses them.

Protocols move by themselves (`PeerEvent.moved`): new streams are direct, and those on the circuit end with what is
under way on them. The other end hears of the direct connection at another moment, so a circuit counts as unused only
after a while without streams. After `BOUND` seconds it is closed with what it carries: transfers go on over the direct
connection from their last whole chunk, and calls raise PeerGone, which every caller expects.
"""

from __future__ import annotations

import logging

import trio

from swarmnode.node.connections import Connection
from swarmnode.node.host import Libp2pNetwork
from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)

BOUND = 60.0  # s from the move on; a relay's bytes are somebody's gift
UNUSED = 3.0  # s without a stream: many round trips through a relay
LOOK = 0.5  # s between looks: streams have no event


async def let_go_of_circuits(
    network: Libp2pNetwork, peer: PeerId, *, bound: float = BOUND, unused: float = UNUSED
) -> None:
    """Close the circuits to `peer` after `unused` s without a stream, or `bound` s; stop where it is direct no more."""
    give_up = trio.current_time() + bound
    unused_since = trio.current_time()
    while (circuits := _circuits(network, peer)) and network.is_direct(peer):
        now = trio.current_time()
        if any(circuit.session.open_streams for circuit in circuits):
            unused_since = now
        if now - unused_since >= unused or now >= give_up:
            carried = sum(circuit.session.open_streams for circuit in circuits)
            logger.info("connected directly to %s; the relayed connection is closed (%d streams)", peer, carried)
            for circuit in circuits:
                await circuit.conn.close()
            return
        await trio.sleep(min(LOOK, unused))


def _circuits(network: Libp2pNetwork, peer: PeerId) -> tuple[Connection, ...]:
    return tuple(c for c in network.connections_of(peer) if not c.direct and not c.session.is_closed)
