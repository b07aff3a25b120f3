"""A host whose own addresses go through relays tells them whole.

Upstream (py-libp2p 0.8.1, `host/basic_host.py:536`) takes any /p2p/ in an address for the host's own and cuts
it off with all that follows: "/ip4/…/tcp/…/p2p/RELAY/p2p-circuit" becomes "/ip4/…/tcp/…/p2p/ME", which is the relay's
place under the host's name. Peers that identify told so dial the relay and find another peer than they expect.

No longer needed when `test_stock_hosts_still_cut_the_relay_from_their_addresses` in
tests/node/host/test_libp2p_patches.py
fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from libp2p.host.basic_host import BasicHost
from multiaddr import Multiaddr

CIRCUIT = "/p2p-circuit"


def keep_relays(upstream: Callable[[BasicHost], list[Multiaddr]]) -> Callable[[BasicHost], list[Multiaddr]]:
    """`upstream` where no relay is among the host's addresses, else all that its address factory gives."""

    @wraps(upstream)
    def get_addrs(self: BasicHost) -> list[Multiaddr]:
        factory = self._addrs_factory
        told = list(factory(list(self.get_transport_addrs()))) if factory is not None else []
        if not any(str(address).endswith(CIRCUIT) for address in told):
            return upstream(self)
        return [Multiaddr(f"{address}/p2p/{self.get_id()}") for address in told]

    return get_addrs


def apply() -> None:
    BasicHost.get_addrs = keep_relays(BasicHost.get_addrs)  # type: ignore[method-assign]
