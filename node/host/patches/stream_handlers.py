"""An exception out of a stream handler, or out of its negotiation, ends that stream and nothing else.

Upstream (py-libp2p 0.8.1, `host/basic_host.py:1554`) lets it climb into the nursery of the whole host. An anonymous
peer can cause one at will: a multistream message that is not UTF-8 raises UnicodeDecodeError
(`protocol_muxer/multiselect_communicator.py:58`), 26 bytes that end the daemon.

No longer needed when `test_stock_handler_exception_still_escapes` in tests/node/host/test_libp2p_patches.py fails.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps

from libp2p.abc import INetStream
from libp2p.host.basic_host import BasicHost

log = logging.getLogger(__name__)


def contain(upstream: Callable[[BasicHost, INetStream], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """`upstream`, with every ordinary exception turned into a reset of the stream."""

    @wraps(upstream)
    async def contained(self: BasicHost, stream: INetStream) -> None:
        try:
            await upstream(self, stream)
        except Exception as error:
            log.info("peer %s: stream failed: %r", stream.muxed_conn.peer_id, error)
            await stream.reset()

    return contained


def apply() -> None:
    BasicHost._swarm_stream_handler = contain(BasicHost._swarm_stream_handler)  # type: ignore[method-assign,assignment]
