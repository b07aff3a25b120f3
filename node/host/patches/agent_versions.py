"""What a peer says of itself in identify is kept: its agent, under "agent" in the peer store.

Upstream (py-libp2p 0.8.1, `host/basic_host.py:1284`) hands the message to `update_peerstore_from_identify`, which
stores addresses, protocols and key and forgets the agent version, so a host cannot say which software a peer runs.

No longer needed when `test_stock_identify_still_forgets_the_agent` in tests/node/host/test_libp2p_patches.py fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from libp2p.abc import IPeerStore
from libp2p.host import basic_host
from libp2p.peer.id import ID

KEY = "agent"
MAX_AGENT = 128  # characters


def keep_agent(upstream: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """`upstream`, followed by storing the agent version, cut to a bounded printable text."""

    @wraps(upstream)
    async def update(peerstore: IPeerStore, peer: ID, message: Any) -> None:
        await upstream(peerstore, peer, message)
        agent = "".join(char for char in message.agent_version[:MAX_AGENT] if char.isprintable())
        peerstore.put(peer, KEY, agent)

    return update


def apply() -> None:
    upstream = basic_host.update_peerstore_from_identify
    basic_host.update_peerstore_from_identify = keep_agent(upstream)  # type: ignore[assignment]
