"""Letting go of relays: where there is a direct connection to a peer, its circuits are closed when nothing uses them.

Protocols move by themselves (`PeerEvent.moved`): new streams are direct, and those on a circuit end with what is under
way on them. The other end hears of the direct connection at another moment, so a circuit counts as unused only after a
while without streams. After `BOUND` seconds it is closed with what it carries: transfers go on over the direct
connection from their last whole chunk, and calls raise PeerGone, which every caller expects.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from swarmnode.node.host.connections import Connection
from swarmnode.node.host.network import Libp2pNetwork

logger = logging.getLogger(__name__)

BOUND = 60.0  # s that a circuit may outlive the coming of a direct connection; a relay's bytes are somebody's gift
UNUSED = 3.0  # s without a stream: many round trips through a relay
LOOK = 1.0  # s between looks: streams have no event


@dataclass
class _Replaced:
    """A circuit beside a direct connection; trio times."""

    since: float
    used: float


async def let_go_of_circuits(
    network: Libp2pNetwork, *, bound: float = BOUND, unused: float = UNUSED, look: float = LOOK
) -> None:
    """Until cancelled: close each replaced circuit after `unused` s without a stream, or `bound` s."""
    known: dict[Connection, _Replaced] = {}
    while True:
        now = trio.current_time()
        known = {circuit: known.get(circuit, _Replaced(now, now)) for circuit in _replaced(network)}
        for circuit, seen in known.items():
            if circuit.session.open_streams:
                seen.used = now
            if now - seen.used >= unused or now - seen.since >= bound:
                logger.info("a direct connection to %s takes the place of a relayed one", circuit.session.peer_id)
                await circuit.conn.close()
        await trio.sleep(look)


def _replaced(network: Libp2pNetwork) -> list[Connection]:
    """Circuits of peers that are connected directly too."""
    peers = [view.peer for view in network.peers() if view.path == "direct"]
    circuits = (circuit for peer in peers for circuit in network.connections_of(peer) if not circuit.direct)
    return [circuit for circuit in circuits if not circuit.session.is_closed]
