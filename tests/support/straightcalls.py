"""Calls on the simulated network without frames, for swarms of which the calls would take most of the time.

`straight_calls()` hands requests and answers over as they are: after the link's time, to the handler at the other
end, with the size that they have when encoded. Nothing is parsed, no limit of `rpc` holds, and a caller who gives up
lets a handler that has begun go on. Feeds and uploads go as ever. What travels is counted by what it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import trio

from swarmnode.crdt.elements import parse
from swarmnode.node.simnode import Answer, Connection, SimNetwork
from swarmnode.node.simstream import OVERHEAD
from swarmnode.protocols.exchange.open_contributions import Contributions
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.rpc import DeadlineExceeded, PeerGone, Refuse, Refused, Rpc
from swarmnode.protocols.statewire import Push
from swarmnode.protocols.wire import encode

logger = logging.getLogger(__name__)

FRAME = 30  # bytes of a frame beside its body, roughly
Arrival = Callable[[], None]
LISTED = 3  # bytes that each element of a push takes beside its own


@lru_cache(1 << 16)
def kind_of(sealed: bytes) -> str:
    """The kind of the element in these bytes."""
    return parse(sealed).kind


def _size(message: Any) -> int:
    if isinstance(message, Push):
        return 80 + len(message.ranks) + sum(len(raw) + LISTED for raw in message.sealed)
    return len(encode(message))


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
        if not isinstance(message, Push):
            self["offers" if method == "state.push" else method] += size
            return
        for raw in message.sealed:
            self[f"record {kind_of(raw)}"] += len(raw) + LISTED
        self["offers"] += size - sum(len(raw) + LISTED for raw in message.sealed)


@contextmanager
def straight_calls() -> Iterator[Counts]:
    """Within it, `Rpc.call` of nodes of one SimWorld is what the module says."""
    counts, served = Counts(), dict[SimNetwork, Rpc]()
    init, fetch_from = Rpc.__init__, Contributions._fetch_from

    def remember(self: Rpc, network: SimNetwork, **options: Any) -> None:
        init(self, network, **options)
        served[network] = self

    async def call(self: Rpc, peer: PeerId, method: str, request: Any, reply: type[Any], *, timeout: float) -> Any:
        network = self._network
        assert isinstance(network, SimNetwork)
        with trio.move_on_after(timeout):
            try:
                connection = await network._connected(peer)
            except NetworkError as error:
                raise PeerGone(str(error)) from None
            pending = Pending()
            connection.openings.append(pending)
            try:
                put(network, connection, method, request, lambda: begin(network, connection, method, request, pending))
                await pending.came.wait()
            finally:
                connection.openings.remove(pending)
                pending.abandoned = True
            if pending.error is not None:
                raise pending.error if isinstance(pending.error, Refused) else PeerGone(str(pending.error))
            return pending.reply
        raise DeadlineExceeded(f"{peer} did not answer {method} within {timeout:g} s")

    def put(source: SimNetwork, connection: Connection, method: str, message: Any, arrival: Arrival) -> None:
        size = OVERHEAD + FRAME + (_size(message) if message is not None else 0)
        counts.add(method, message, size)
        source._world.send(source, connection.other(source.me), size, arrival)

    def begin(caller: SimNetwork, connection: Connection, method: str, request: Any, pending: Pending) -> None:
        target = connection.other(caller.me)
        if connection.alive and not pending.abandoned and target._nursery is not None:
            target._nursery.start_soon(serve, caller, target, connection, method, request, pending)

    async def serve(
        caller: SimNetwork, target: SimNetwork, connection: Connection, method: str, request: Any, pending: Pending
    ) -> None:
        office, reply = served[target]._office, None
        error: Refused | None = None
        try:
            if method in office.methods:
                reply = await office.methods[method].handler(caller.me, request)
            else:
                error = Refused("unknown-method", f"no method {method!r}")
        except Refuse as refusal:
            error = Refused(refusal.code, refusal.text)
        except Exception:
            logger.exception("the handler of %s failed", method)
            error = Refused("internal", "the handler failed")
        if connection.alive:
            put(target, connection, method, reply, lambda: pending.end(reply, error))

    async def fetch(self: Contributions, peer: PeerId, id: bytes) -> bytes:
        raw = await fetch_from(self, peer, id)
        counts["contributions"] += len(raw)
        return raw

    with (
        patch.object(Rpc, "__init__", remember),
        patch.object(Rpc, "call", call),
        patch.object(Contributions, "_fetch_from", fetch),
    ):
        yield counts
