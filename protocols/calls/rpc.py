"""Calls between peers: many in flight on one stream, each with a deadline, answered in any order.

Protocol `/swarmnode/rpc/2`. Who wants to call opens one stream to the peer and keeps it; the callee answers on the same
stream. For calls in the other direction the other node opens a stream of its own.

Messages, each a `Frame` behind its varint length, at most `RpcLimits.frame` bytes:
- caller: CALL(id, method, timeout, body), and CANCEL(id) when the caller no longer wants the answer;
- callee: REPLY(id, body) or FAIL(id, code, text), exactly one for each CALL that was not cancelled.

Order: ids grow by one; calls are started in the order of sending and answered when they are done. The timeout travels
as seconds left, so clocks need not agree; each side ends the call by its own clock.

Who may fail when, and what is then true:
- the stream breaks or the peer goes: every call on it raises PeerGone at once; whether it was carried out is unknown.
  The next call opens a new stream;
- the peer is frozen or slow: each call ends at its own deadline, and calls to other peers notice nothing. A write that
  blocks is given up when no call waits for it, and the stream with it; the next call opens a new one;
- the peer moves to a better path: calls from then on go over a new stream; those in flight are answered on the old
  one, which is closed after the last;
- the caller is cancelled: the handler is cancelled when CANCEL arrives;
- the handler raises Refuse: the caller gets Refused with its code; anything else it raises is logged here and is
  Refused(code="internal") there;
- a peer breaks the rules (no msgpack, false lengths, answers to calls never made, too many streams): its stream is
  closed and it is counted. One that calls too much is refused as "busy"; one that does not read its answers is not read
  from, and after `write_stall` loses the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from math import inf
from typing import Any, TypeVar

import trio

from swarmnode.protocols.calls.client import ClientConnection
from swarmnode.protocols.calls.frames import HEADROOM
from swarmnode.protocols.calls.frames import PROTOCOL as PROTOCOL
from swarmnode.protocols.calls.frames import CallError as CallError
from swarmnode.protocols.calls.frames import DeadlineExceeded as DeadlineExceeded
from swarmnode.protocols.calls.frames import PeerGone as PeerGone
from swarmnode.protocols.calls.frames import Refuse as Refuse
from swarmnode.protocols.calls.frames import Refused as Refused
from swarmnode.protocols.calls.frames import RpcLimits as RpcLimits
from swarmnode.protocols.calls.server import CallServer, ServedMethod, ServerConnection
from swarmnode.protocols.calls.server import LifecycleGuard as LifecycleGuard
from swarmnode.protocols.frames import close
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import Network, PeerId, Stream
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.wire import Empty, encode

logger = logging.getLogger(__name__)

PING = "ping"  # the method that every Rpc serves
NORMAL = RpcLimits()

CALLS = Metric("swarmnode_calls", GAUGE, "calls of peers that are carried out here now")
REFUSED = Metric("swarmnode_calls_refused_total", COUNTER, 'calls of peers that were answered "busy"', "why")
STREAMS = Metric("swarmnode_call_streams", GAUGE, "streams that carry calls", "direction")

Q = TypeVar("Q")
A = TypeVar("A")


class Rpc:
    """Both sides of calls: serve methods before or during `run`, call during it."""

    def __init__(self, network: Network, *, limits: RpcLimits = NORMAL) -> None:
        self._network = network
        self._limits = limits
        self._connections: dict[PeerId, ClientConnection] = {}
        self._nursery: trio.Nursery | None = None
        self._served: dict[ServerConnection, None] = {}
        self.violations = Violations(PROTOCOL)
        self._server = CallServer(limits, self.violations)
        self.serve(PING, Empty, _pong)
        network.serve(PROTOCOL, self._serve_stream)

    def serve(
        self,
        method: str,
        request: type[Q],
        handler: Callable[[PeerId, Q], Awaitable[Any]],
        *,
        guard: LifecycleGuard | None = None,
    ) -> None:
        """Answer calls of `method` with `handler(peer, request)`, whose result is a message; while `guard` is open."""
        if method in self._server.methods:
            raise ValueError(f"{method} is served already")
        self._server.methods[method] = ServedMethod(request, handler, guard)

    async def call(self, peer: PeerId, method: str, request: Any, reply: type[A], *, timeout: float) -> A:
        """The peer's answer, within `timeout` seconds from now, connecting included.

        Raises PeerGone, DeadlineExceeded or Refused; a plain CallError where the request does not fit a frame.
        """
        body = encode(request)
        if len(body) > self._limits.frame - HEADROOM:
            raise CallError(f"a request of {len(body)} bytes does not fit a frame of {self._limits.frame}")
        deadline = trio.current_time() + timeout
        with trio.CancelScope(deadline=deadline):
            if self._nursery is None:
                await trio.lowlevel.checkpoint()
                raise PeerGone(f"{method} to {peer}: this node makes no calls before it started or after it stopped")
            connection = self._connections.get(peer)
            if connection is None:
                connection = ClientConnection(self._network, peer, self._limits, self.violations)
                self._connections[peer] = connection
                self._nursery.start_soon(self._hold, connection)
            return await connection.call(method, body, reply, deadline)
        raise DeadlineExceeded(f"{peer} did not answer {method} within {timeout:g} s")

    async def ask(self, peer: PeerId, method: str, request: Any, reply: type[A], *, timeout: float) -> A | None:
        """As `call`, of somebody who need not answer: None where it does not."""
        try:
            return await self.call(peer, method, request, reply, timeout=timeout)
        except CallError as error:
            logger.debug("%s does not answer %s: %s", peer, method, error)
            return None

    async def call_all(
        self, peers: Collection[PeerId], method: str, request: Any, reply: type[A], *, timeout: float, rest: float = inf
    ) -> list[tuple[PeerId, A]]:
        """Who of these answers, and what, in the order of their answers; all are asked at once, as `call` does. Once
        half of them answered, the others have `rest` seconds.
        """
        answers: list[tuple[PeerId, A]] = []

        async def ask(peer: PeerId) -> None:
            if (answer := await self.ask(peer, method, request, reply, timeout=timeout)) is not None:
                answers.append((peer, answer))
            if 2 * len(answers) >= len(peers):
                nursery.cancel_scope.deadline = min(nursery.cancel_scope.deadline, trio.current_time() + rest)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
        return answers

    async def ping(self, peer: PeerId, *, timeout: float) -> float:
        """Seconds from asking to the answer. Raises as `call` does."""
        began = trio.current_time()
        await self.call(peer, PING, Empty(), Empty, timeout=timeout)
        return trio.current_time() - began

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the streams of both directions until cancelled; calls in flight then raise PeerGone."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                with self._network.watch_peers() as events:
                    task_status.started()
                    async for event in events:
                        if event.moved and event.peer in self._connections:
                            self._connections.pop(event.peer).retire()
            finally:
                self._nursery = None  # before it closes: another task may call in the same turn
                for connection in list(self._served):
                    connection.scope.cancel()

    def measure(self, metrics: Metrics) -> None:
        server = self._server
        metrics.show(CALLS, server.carried_out.total)
        metrics.show(REFUSED, lambda: {why: server.refused[why] for why in ("closed", "over its limits")})
        metrics.show(STREAMS, lambda: {"in": len(self._served), "out": len(self._connections)})
        self.violations.measure(metrics)

    async def _hold(self, connection: ClientConnection) -> None:
        try:
            await connection.run()
        finally:
            if self._connections.get(connection.peer) is connection:
                del self._connections[connection.peer]

    async def _serve_stream(self, stream: Stream) -> None:
        held = sum(connection.peer == stream.peer for connection in self._served)
        connection = ServerConnection(self._server, stream)
        try:
            if held >= self._limits.streams:
                self.violations.note(stream.peer, f"more than {self._limits.streams} streams", Kind.LOAD)
            elif self._nursery is not None:
                self._served[connection] = None
                await connection.run()
        finally:
            self._served.pop(connection, None)
            await close(stream)


async def _pong(_peer: PeerId, _request: Empty) -> Empty:
    return Empty()
