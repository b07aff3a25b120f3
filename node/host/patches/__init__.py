"""What must be mended in py-libp2p 0.8.1 before a host may face strangers: one module a defect, applied at start.

Each module says where upstream breaks and which test notices that upstream no longer does. `apply()` may be called
again and again; it changes classes of the installed package, so it must run before the first host is made.
"""

from __future__ import annotations

from swarmnode.node.host.patches import (
    agent_versions,
    circuit_addresses,
    denied_connections,
    inbound_slots,
    stream_handlers,
    yamux_session,
)

_applied = False


def apply() -> None:
    """Mend the installed py-libp2p once per process."""
    global _applied
    if not _applied:
        _applied = True
        for patch in (
            stream_handlers,
            inbound_slots,
            denied_connections,
            yamux_session,
            agent_versions,
            circuit_addresses,
        ):
            patch.apply()
