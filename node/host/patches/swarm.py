"""Two defects of `Swarm` (py-libp2p 0.8.1, `network/swarm.py`), which keeps what a connection took after its end.

Each says where upstream breaks, and which test in tests/node/host/test_libp2p_patches.py fails once upstream is mended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import trio
from libp2p.abc import IMuxedConn
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.swarm import Swarm


def release_when_closed(upstream: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A closed inbound connection gives its slot back.

    Upstream (line 2060) keeps the accepting task until the whole swarm ends, and with it one of the
    `max_connections - min_connections` inbound slots: after that many connections in its lifetime a host is deaf.
    No longer needed when `test_stock_inbound_slot_is_still_lost` fails.
    """

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


def release_when_denied(upstream: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A connection that is denied at registration gives its resource-manager slot back.

    Upstream (line 2204) opens a connection scope during the upgrade and forgets it when `add_conn` then refuses: with
    max_connections = 30, 60 dials by one peer left the counter at 29 with 3 connections open.
    No longer needed when `test_stock_denied_connection_still_leaks` fails.
    """

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
    upstream = Swarm._do_handle_inbound_connection
    Swarm._do_handle_inbound_connection = release_when_closed(upstream)  # type: ignore[method-assign,assignment]
    Swarm.add_conn = release_when_denied(Swarm.add_conn)  # type: ignore[method-assign,assignment]
