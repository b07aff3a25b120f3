"""A closed inbound connection gives its slot back.

Upstream (py-libp2p 0.8.1, `network/swarm.py:2060`) keeps the accepting task until the whole swarm ends, and with it one
of the `max_connections - min_connections` inbound slots: after that many connections in its lifetime a host is deaf.

No longer needed when `test_stock_inbound_slot_is_still_lost` in tests/node/host/test_libp2p_patches.py fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.swarm import Swarm


def release_when_closed(upstream: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """`upstream`, ended when the raw connection is closed by whoever."""

    @wraps(upstream)
    async def handle(self: Swarm, connection: ReadWriteCloser, *rest: Any) -> None:
        close = connection.close
        with trio.CancelScope() as accepting:

            async def close_and_release() -> None:
                try:
                    await close()
                finally:
                    accepting.cancel()

            connection.close = close_and_release  # type: ignore[method-assign,assignment]
            await upstream(self, connection, *rest)

    return handle


def apply() -> None:
    upstream = Swarm._do_handle_inbound_connection
    Swarm._do_handle_inbound_connection = release_when_closed(upstream)  # type: ignore[method-assign,assignment]
