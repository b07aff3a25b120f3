"""A connection that is denied at registration gives its resource-manager slot back.

Upstream (py-libp2p 0.8.1, `network/swarm.py:2204`) opens a connection scope during the upgrade and forgets it when
`add_conn` then refuses: with max_connections = 30, 60 dials by one peer left the counter at 29 with 3 connections open.

No longer needed when `test_stock_denied_connection_still_leaks` in tests/node/host/test_libp2p_patches.py fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from libp2p.abc import IMuxedConn
from libp2p.network.swarm import Swarm


def release_when_denied(upstream: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`upstream`, which also closes the scope of a connection that it refuses."""

    @wraps(upstream)
    async def add(self: Swarm, connection: IMuxedConn, direction: str = "unknown") -> Any:
        try:
            return await upstream(self, connection, direction=direction)
        except BaseException:
            scope = getattr(connection, "_resource_scope", None)
            if scope is not None:
                scope.close()  # closing twice is harmless
            raise

    return add


def apply() -> None:
    Swarm.add_conn = release_when_denied(Swarm.add_conn)  # type: ignore[method-assign,assignment]
