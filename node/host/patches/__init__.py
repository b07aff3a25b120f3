"""What must be mended in py-libp2p 0.8.1 before a host may face strangers: one module for each class that breaks.

Each says where upstream breaks and which test notices that upstream no longer does.
"""

from __future__ import annotations

import sys
from types import ModuleType

UNUSED = {  # what libp2p imports of modules, and no node uses
    "libp2p.security.tls.autotls.acme": ("ACMEClient", "compute_b36_peer_id"),
    "libp2p.security.tls.autotls.broker": ("BrokerClient",),
    "libp2p.transport.websocket.transport": ("WebsocketTransport",),
    "multiaddr.resolvers": ("DNSResolver",),  # names are resolved before libp2p sees an address (`dialling.py`)
}

_applied = False


def leave_out_unused() -> None:
    """Put empty classes in the place of what no node uses, unless it is loaded; before the first import of libp2p.

    Upstream (`host/basic_host.py:102`, `network/swarm.py:19`, `transport/__init__.py:7`) so loads three HTTP libraries,
    one of DNS and one of web sockets. No longer needed when `test_stock_libp2p_still_loads_what_no_node_uses` fails.
    """
    for module, names in UNUSED.items():
        if module not in sys.modules:  # by a program that a node is part of
            sys.modules[module] = empty = ModuleType(module)
            vars(empty).update({name: type(name, (), {}) for name in names})


def mend_libp2p() -> None:
    """Mend the installed py-libp2p, once per process: call it before the first host is made, for it changes classes."""
    global _applied
    if not _applied:
        from swarmnode.node.host.patches import basic_host, yamux_session  # which load libp2p

        _applied = True
        for patch in (basic_host, yamux_session):
            patch.apply()
