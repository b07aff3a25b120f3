"""Calls on the simulated network without frames, for swarms of which the calls would take most of the time.

`straight_calls()` hands requests and answers over as they are: after the link's time, to the handler at the other
end, with the size that they have when encoded. Nothing is parsed, no limit of `rpc` holds, and a caller who gives up
lets a handler that has begun go on. Contributions of open runs are asked for and handed over in the same way, from who
offers them. What travels is counted by what it is. A task that offers others a turn, without anything to wait for,
goes on at once: a third of all turns were such. And handlers of AT_ONCE, which then have nothing to wait for, run as
the request arrives, without a task of their own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import trio

from swarmnode.crdt.record import parse
from swarmnode.protocols.calls.rpc import DeadlineExceeded, PeerGone, Refuse, Refused, Rpc
from swarmnode.protocols.calls.server import ServedMethod
from swarmnode.protocols.chain.statements import HASH
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.store import FETCH_WITHIN, OFFERED_WITHIN, Contributions
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.state.intake import CHUNK
from swarmnode.protocols.state.wire import Push
from swarmnode.protocols.wire import encode
from swarmnode.testing.simnode import OVERHEAD, Answer, Connection, SimNetwork

logger = logging.getLogger(__name__)

FRAME = 30  # bytes of a frame beside its body, roughly
Arrival = Callable[[], None]
CONTRIBUTION = "contribution"  # the method by which contributions are asked for here
AT_ONCE = ("state.push", "ping")
LOOK_AGAIN = 0.05  # seconds, for what a peer is about to offer
LISTED = 3  # bytes that each element of a push takes beside its own


@lru_cache(1 << 16)
def kind_of(sealed: bytes) -> str:
    """The kind of the element in these bytes."""
    return parse(sealed).kind


def _size(message: Any) -> int:
    if isinstance(message, Push):
        return 80 + len(message.ranks) + sum(len(raw) + LISTED for raw in message.sealed)
    return len(message) if isinstance(message, bytes) else len(encode(message))


async def answer(method: ServedMethod, peer: PeerId, request: Any) -> Any:
    with method.guard.call() if method.guard is not None else nullcontext():
        return await method.handler(peer, request)


class Pending(Answer):
    """What a call is waiting for."""

    reply: Any = None

    def end(self, reply: Any, error: Refused | None) -> None:
        self.reply, self.error = reply, self.error or error
        self.came.set()


class Counts(Counter[str]):
    """Bytes by what they carry."""

    def add(self, method: str, message: Any, size: int) -> None:
        """A request or an answer of `method`, with its frame."""
        if method == CONTRIBUTION:
            self["contributions"] += len(message) if message is not None and len(message) != HASH else 0
            return
        if not isinstance(message, Push):
            self["offers" if method == "state.push" else method] += size
            return
        for raw in message.sealed:
            self[f"record {kind_of(raw)}"] += len(raw) + LISTED
        self["offers"] += size - sum(len(raw) + LISTED for raw in message.sealed)


@contextmanager
def straight_calls() -> Iterator[Counts]:
    """Within it, `Rpc.call` of nodes of one SimWorld is what the module says."""
    counts, served, shelves = Counts(), dict[SimNetwork, Rpc](), dict[SimNetwork, Contributions]()
    init, hold = Rpc.__init__, Contributions.__init__

    def remember(self: Rpc, network: SimNetwork, **options: Any) -> None:
        init(self, network, **options)
        served[network] = self

    def shelve(self: Contributions, parts: Context) -> None:
        hold(self, parts)
        assert isinstance(parts.network, SimNetwork)
        shelves[parts.network] = self

    async def call(self: Rpc, peer: PeerId, method: str, request: Any, reply: type[Any], *, timeout: float) -> Any:
        assert isinstance(self._network, SimNetwork)
        with trio.move_on_after(timeout):
            try:
                return await answered(self._network, peer, method, request)
            except NetworkError as error:
                raise PeerGone(str(error)) from None
        raise DeadlineExceeded(f"{peer} did not answer {method} within {timeout:g} s")

    async def answered(network: SimNetwork, peer: PeerId, method: str, request: Any) -> Any:
        connection = await network._connected(peer)
        pending = Pending()
        connection.openings.append(pending)
        try:
            put(network, connection, method, request, lambda: begin(network, connection, method, request, pending))
            await pending.came.wait()
        finally:
            connection.openings.remove(pending)
            pending.abandoned = True
        if pending.error is not None:
            raise pending.error
        return pending.reply

    def put(source: SimNetwork, connection: Connection, method: str, message: Any, arrival: Arrival) -> None:
        size = OVERHEAD + FRAME + (_size(message) if message is not None else 0)
        counts.add(method, message, size)
        source._world.send(source, connection.other(source.me), size, arrival)

    def begin(caller: SimNetwork, connection: Connection, method: str, request: Any, pending: Pending) -> None:
        target = connection.other(caller.me)
        if not connection.alive or pending.abandoned or target._nursery is None:
            return
        if method in AT_ONCE and served_at_once(caller, target, connection, method, request, pending):
            return
        if method == CONTRIBUTION:
            target._nursery.start_soon(hand_over, target, connection, request, pending)
        else:
            target._nursery.start_soon(serve, caller, target, connection, method, request, pending)

    def served_at_once(
        caller: SimNetwork, target: SimNetwork, connection: Connection, method: str, request: Any, pending: Pending
    ) -> bool:
        """Whether the request was handled here and now. Raises RuntimeError where that has to wait after all."""
        if isinstance(request, Push) and len(request.sealed) > CHUNK:  # verified in several tasks
            return False
        handler = answer(served[target]._server.methods[method], caller.me, request)
        reply, error = None, None
        try:
            handler.send(None)
        except StopIteration as done:
            reply = done.value
        except Refuse as refusal:
            error = Refused(refusal.code, refusal.text)
        else:
            raise RuntimeError(f"the handler of {method} waits for something")
        put(target, connection, method, reply, lambda: pending.end(reply, error))
        return True

    async def serve(
        caller: SimNetwork, target: SimNetwork, connection: Connection, method: str, request: Any, pending: Pending
    ) -> None:
        server, reply = served[target]._server, None
        error: Refused | None = None
        try:
            if method in server.methods:
                reply = await answer(server.methods[method], caller.me, request)
            else:
                error = Refused("unknown-method", f"no method {method!r}")
        except Refuse as refusal:
            error = Refused(refusal.code, refusal.text)
        except Exception:
            logger.exception("the handler of %s failed", method)
            error = Refused("internal", "the handler failed")
        if connection.alive:
            put(target, connection, method, reply, lambda: pending.end(reply, error))

    async def hand_over(target: SimNetwork, connection: Connection, id: bytes, pending: Pending) -> None:
        shelf = shelves[target]
        with trio.move_on_after(OFFERED_WITHIN):
            while shelf._key(id) not in shelf._bulk._offers:  # noqa: ASYNC110 - offers ring no bell
                await trio.sleep(LOOK_AGAIN)
        raw = shelf[id].raw if shelf._key(id) in shelf._bulk._offers else None
        error = None if raw is not None else Refused("not-here", "the contribution is not offered")
        if connection.alive:
            put(target, connection, CONTRIBUTION, raw, lambda: pending.end(raw, error))

    async def go_on() -> None:
        pass

    async def fetch(self: Contributions, peer: PeerId, id: bytes, heard: Callable[[int], None]) -> bytes:
        network = self._bulk._channels._network
        assert isinstance(network, SimNetwork)
        with trio.move_on_after(FETCH_WITHIN):
            try:
                raw: bytes = await answered(network, peer, CONTRIBUTION, id)
            except Refused as error:
                raise NetworkError(str(error)) from None
            return raw
        raise NetworkError(f"{peer} took more than {FETCH_WITHIN:.0f} s")

    with (
        patch.object(Rpc, "__init__", remember),
        patch.object(Rpc, "call", call),
        patch.object(trio.lowlevel, "checkpoint", go_on),
        patch.object(Contributions, "__init__", shelve),
        patch.object(Contributions, "_fetch_from", fetch),
    ):
        yield counts
