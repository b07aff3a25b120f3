"""What must be mended in py-libp2p 0.8.1 before a host may face strangers: one module for each class that breaks.

Each says where upstream breaks and which test notices that upstream no longer does.
"""

from __future__ import annotations

import sys
from types import ModuleType

AUTOTLS = {"acme": ("ACMEClient", "compute_b36_peer_id"), "broker": ("BrokerClient",)}  # which `basic_host` imports

_applied = False


def leave_out_autotls() -> None:
    """Put nothing in the place of a client of ACME that no node uses; before the first import of libp2p.

    Upstream (`host/basic_host.py:102`) so loads two HTTP libraries and what these load: 220 modules, and 10 MB in each
    process. No longer needed when `test_stock_libp2p_still_loads_http_clients` fails.
    """
    for module, names in AUTOTLS.items():
        name = f"libp2p.security.tls.autotls.{module}"
        vars(sys.modules.setdefault(name, ModuleType(name))).update(dict.fromkeys(names))


def mend_libp2p() -> None:
    """Mend the installed py-libp2p, once per process: call it before the first host is made, for it changes classes."""
    global _applied
    if not _applied:
        from swarmnode.node.host.patches import basic_host, swarm, yamux_session  # which load libp2p

        _applied = True
        for patch in (basic_host, swarm, yamux_session):
            patch.apply()
