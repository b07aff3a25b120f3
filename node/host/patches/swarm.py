"""Three defects of `Swarm` (py-libp2p 0.8.1, `network/swarm.py`), which keeps what a connection took after its end.

Each says where upstream breaks, and which test in tests/node/host/test_libp2p_patches.py fails once upstream is mended.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IRawConnection
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.swarm import Swarm

_handle_inbound = Swarm._do_handle_inbound_connection
_upgrade_inbound = Swarm.upgrade_inbound_raw_conn
_add_conn = Swarm.add_conn


@wraps(_handle_inbound)
async def release_when_closed(self: Swarm, connection: ReadWriteCloser, *rest: Any) -> None:
    """A closed inbound connection gives its slot back.

    Upstream (line 2060) keeps the accepting task until the whole swarm ends, and with it one of the
    `max_connections - min_connections` inbound slots: after that many connections in its lifetime a host is deaf.
    No longer needed when `test_stock_inbound_slot_is_still_lost` fails.

    What fails in its upgrade ends by itself: cancelled in the middle of its clean-up, it would keep its place of the
    resource manager for good.
    """
    close, closed, upgraded = connection.close, False, isinstance(connection, IMuxedConn)  # QUIC's are from the start
    with trio.CancelScope() as accepting:

        async def close_and_release() -> None:
            nonlocal closed
            try:
                await close()
            finally:
                closed = True
                if upgraded:
                    accepting.cancel()

        def note_upgrade() -> None:
            nonlocal upgraded
            upgraded = True
            if closed:
                accepting.cancel()

        connection.close = close_and_release  # type: ignore[method-assign]
        connection.note_upgrade = note_upgrade  # type: ignore[attr-defined]
        await _handle_inbound(self, connection, *rest)


@wraps(_upgrade_inbound)
async def tell_upgrade(self: Swarm, raw_conn: IRawConnection, *rest: Any) -> IMuxedConn:
    """Tell `release_when_closed` that a connection's upgrade succeeded."""
    muxed = await _upgrade_inbound(self, raw_conn, *rest)
    getattr(getattr(raw_conn, "stream", None), "note_upgrade", lambda: None)()
    return muxed


@wraps(_add_conn)
async def release_when_denied(self: Swarm, connection: IMuxedConn, direction: str = "unknown") -> Any:
    """A connection that is denied at registration gives its resource-manager slot back; one that ended in it is let go.

    Upstream (line 2204) opens a connection scope during the upgrade and forgets it when `add_conn` then refuses: with
    max_connections = 30, 60 dials by one peer left the counter at 29 with 3 connections open.
    No longer needed when `test_stock_denied_connection_still_leaks` fails.

    Upstream (line 2667) keeps a connection whose peer hung up in the meantime, and nothing removes it: after
    `max_connections` of them a host is deaf.
    No longer needed when `test_stock_connection_that_ended_as_it_was_added_still_stays` fails.
    """
    try:
        return await _add_conn(self, connection, direction=direction)
    except BaseException:
        scope = getattr(connection, "_resource_scope", None)
        if scope is not None:
            scope.close()  # closing twice is harmless
        raise
    finally:
        for conn in self.get_connections(connection.peer_id):
            if conn.is_closed:
                self.remove_conn(conn)  # removing twice is harmless as well


def apply() -> None:
    Swarm._do_handle_inbound_connection = release_when_closed  # type: ignore[method-assign]
    Swarm.upgrade_inbound_raw_conn = tell_upgrade  # type: ignore[method-assign]
    Swarm.add_conn = release_when_denied  # type: ignore[method-assign]
