"""The handlers of the protocols that this node serves, each stream in a task of its own: which run, and ending them.

A handler that waits for ever for something that another one holds is wedged, and its peers hear nothing: `answering`
finds that out, and has the protocol's handlers ended here. What ends them gives back what they hold, locks and places.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import StreamHandlerFn

from swarmnode.node.host.muxed import MuxedStream
from swarmnode.node.host.stream import HANDSHAKE
from swarmnode.protocols.network import PeerId


@dataclass(eq=False)
class _Running:
    stream: MuxedStream
    since: float  # trio time
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Handlers:
    def __init__(self) -> None:
        self._running: dict[str, set[_Running]] = {}

    @property
    def protocols(self) -> tuple[str, ...]:
        return tuple(self._running)

    def watched(self, protocol: str, handler: StreamHandlerFn) -> StreamHandlerFn:
        """`handler`, known here while it runs."""
        every = self._running.setdefault(protocol, set())

        async def handle(stream: INetStream) -> None:
            running = _Running(stream.muxed_stream, trio.current_time())  # type: ignore[attr-defined]
            every.add(running)
            try:
                with running.scope:
                    await handler(stream)
                if running.scope.cancelled_caught:
                    running.stream.abort()
            finally:
                every.discard(running)

        return handle

    def waits(self, protocol: str, peer: PeerId, since: float) -> bool:
        """Whether a stream waits that `peer` opened after `since` (trio time) and finished without a request."""
        recent = (each.stream for each in self._running.get(protocol, ()) if each.since >= since)
        asked_for = len(HANDSHAKE) + len(protocol) + 2  # bytes that `agree` sends
        return any(each.peer == peer and each.finished and each.received <= asked_for for each in recent)

    def cancel(self, protocol: str) -> None:
        """End all handlers of a protocol; their streams are reset."""
        for running in tuple(self._running.get(protocol, ())):
            running.scope.cancel()
