"""py-libp2p 0.8.1 loads a client of ACME for AutoTLS, which no node uses; here nothing stands in its place.

Upstream (`host/basic_host.py:102`) so loads two HTTP libraries and what these load: 220 modules, and 10 MB in each
process. No longer needed when `test_stock_libp2p_still_loads_http_clients` fails.
"""

from __future__ import annotations

import sys
from types import ModuleType

UNUSED = {"acme": ("ACMEClient", "compute_b36_peer_id"), "broker": ("BrokerClient",)}  # what `basic_host` takes of each


def apply() -> None:
    """Before the first import of libp2p; needs nothing of it."""
    for module, names in UNUSED.items():
        name = f"libp2p.security.tls.autotls.{module}"
        vars(sys.modules.setdefault(name, ModuleType(name))).update(dict.fromkeys(names))
