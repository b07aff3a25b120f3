"""What must be mended in py-libp2p 0.8.1 before a host may face strangers: one module for each class that breaks.

Each says where upstream breaks and which test notices that upstream no longer does. `autotls` is applied before libp2p
is imported, the others by `mend_libp2p`.
"""

from __future__ import annotations

_applied = False


def mend_libp2p() -> None:
    """Mend the installed py-libp2p, once per process: call it before the first host is made, for it changes classes."""
    global _applied
    if not _applied:
        from swarmnode.node.host.patches import basic_host, swarm, yamux_session  # which load libp2p

        _applied = True
        for patch in (basic_host, swarm, yamux_session):
            patch.apply()
