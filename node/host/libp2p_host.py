"""How the py-libp2p host is made: what it offers, what it limits, and what it leaves to us.

Only Noise and Yamux over TCP are offered and accepted, and QUIC. What a peer may have is counted here (`Handshakes`,
`Connections`, `MuxedSession`) and not by upstream's resource manager, which forgets what it counted where a connection
ends early. Upstream's own re-dialling of known peers and its retries are off: `node.discovery` decides whom to dial,
and when.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.envelope import Envelope
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

from swarmnode.node.exitcodes import CONFIG, PORT_TAKEN, ExpectedError
from swarmnode.node.host.allowances import HostAllowance
from swarmnode.node.host.handshakes import Handshakes
from swarmnode.node.host.limits import ConnectionLimits, Limits
from swarmnode.node.host.patches.basic_host import MAX_PLACE, MAX_PLACES, MAX_RECORD
from swarmnode.node.host.quic_transport import QuicTransport
from swarmnode.node.host.tcp import MeteredTCP
from swarmnode.node.identity import Identity

log = logging.getLogger(__name__)

UPGRADE = ConnectionLimits().handshake  # seconds for the handshakes of a connection


@dataclass(frozen=True)
class HostSettings:
    listen: tuple[str, ...]  # multiaddrs, "/ip4/0.0.0.0/tcp/4077"; port 0 takes any free one
    announce: tuple[str, ...] = ()  # multiaddrs told to others instead of those of the interfaces
    mdns: bool = False  # find peers on the local network
    up: float = 0.0  # bytes per second at the sockets, all peers together; 0 = no cap
    down: float = 0.0
    quic: bool = False  # listen and dial over UDP as well, at the same port numbers
    agent: str = "swarmnode"
    limits: Limits = field(default_factory=Limits)


def make_host(
    identity: Identity, settings: HostSettings, allowance: HostAllowance, handshakes: Handshakes
) -> tuple[BasicHost, Swarm, QuicTransport]:
    """A host that does not listen yet, what makes its connections, and its transport over UDP."""
    for name in ("libp2p", "quic"):  # what peers do wrong they log as errors with tracebacks; here it is, with the peer
        upstream = logging.getLogger(name)
        upstream.handlers.clear()  # `import libp2p` cuts itself off
        upstream.propagate = True
        upstream.setLevel(logging.WARNING if log.isEnabledFor(logging.DEBUG) else logging.CRITICAL)
    identify.AGENT_VERSION = settings.agent
    keys = create_new_key_pair(identity.private_key.private_bytes_raw())
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)
    limits = settings.limits.connections
    most = 3 * limits.peers + limits.handshakes  # `Connections` keeps fewer: some were only let in to know their peer
    quic = QuicTransport(identity.private_key, allowance, handshakes)
    store = _PeerStore(ID.from_pubkey(keys.public_key))
    host = new_host(
        key_pair=keys,
        peerstore_opt=store,
        transports=[MeteredTCP(allowance, handshakes), quic],
        sec_opt={NOISE: noise},  # nothing weaker is offered or accepted
        muxer_preference="YAMUX",
        negotiate_timeout=math.ceil(UPGRADE),
        connection_config=ConnectionConfig(
            max_connections=most,
            min_connections=0,
            low_watermark=0,
            high_watermark=most,
            max_connections_per_peer=most,
            inbound_upgrade_timeout=limits.handshake,
            outbound_upgrade_timeout=limits.handshake,
        ),
    )
    swarm = host.get_network()
    assert isinstance(swarm, Swarm) and isinstance(host, BasicHost)
    store.connected = swarm.connections
    swarm.retry_config = RetryConfig(max_retries=0)
    swarm.set_resource_manager(None)
    swarm.auto_connector = _NoAutoConnector(swarm)
    return host, swarm, quic


def check_free(place: str) -> None:
    """Raises ExpectedError where someone listens: upstream binds with SO_REUSEPORT and would share it in silence."""
    _, family, host, transport, port = place.split("/")[:5]
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    if port == "0":
        return
    with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(transport == "tcp"))
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                told = (
                    f"cannot listen on {host} port {port}: {error.strerror}. Name an address of this machine with "
                    "--listen (:: is all that it has), and a --port above 1023"
                )
                raise ExpectedError(told, exit_code=CONFIG) from error
            raise ExpectedError(
                f"port {port} is in use by another program, perhaps another swarmnode; "
                f"choose another with --port, or --port 0 for any free one "
                f"(`ss -ltnp 'sport = :{port}'` shows who has it)",
                exit_code=PORT_TAKEN,
            ) from error


class _PeerStore(PeerStore):
    """Forgets neither this node nor who is connected to it, and keeps few addresses of each.

    Upstream (`peer/peerstore.py:201`) forgets first who has no address, which is how it keeps this node's own key, and
    then whom it knew first. After hearing of a thousand peers a host can no longer say who it is, nor what its oldest
    connections speak; and an address that was told once is kept for good.
    No longer needed when `test_stock_peer_store_still_forgets_its_own_key` fails.
    """

    def __init__(self, me: ID) -> None:
        super().__init__()
        self._me = me
        self.connected: Mapping[ID, object] = {}

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        """Pass over a larger one: answers about the closest peers, who send it, would be too large for who asked."""
        return len(envelope.raw_payload) > MAX_RECORD or super().consume_peer_record(envelope, ttl)

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        """Upstream compares each with all others, and the text of a long one takes the square of its length."""
        super().add_addrs(peer_id, [at for at in addrs if len(at.to_bytes()) <= MAX_PLACE][-MAX_PLACES:], ttl)
        if (known := self.peer_data_map.get(peer_id)) is not None:  # else it was the oldest, and made room just now
            del known.addrs[:-MAX_PLACES]

    def _enforce_peer_limit(self) -> None:
        strangers = (p for p in self.peer_data_map if p != self._me and p not in self.connected)
        for peer in list(islice(strangers, max(0, len(self.peer_data_map) - self.max_peers))):
            self.clear_peerdata(peer)


class _NoAutoConnector(AutoConnector):
    """Never starts py-libp2p's own re-dialling of known peers, which `node.discovery` decides here."""

    async def start(self) -> None: ...

    def record_disconnect(self, peer_id: ID) -> None: ...  # who comes and goes is not remembered
