"""Hosts on loopback for tests that need no whole daemon, and what is done with them again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.node.host.allowances import PeerPolicy
from swarmnode.node.host.limits import ConnectionLimits, Limits
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity
from swarmnode.protocols.network import Stream

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


def network(
    *, policy: PeerPolicy | None = None, listen: tuple[str, ...] = LOOPBACK, max_peers: int = 64, **settings: Any
) -> Libp2pNetwork:
    """A host that does not run yet."""
    limits = Limits(connections=ConnectionLimits(peers=max_peers))
    return Libp2pNetwork(identity(), HostSettings(**{"listen": listen, "limits": limits, **settings}), policy)


@asynccontextmanager
async def running(*parts: Any) -> AsyncIterator[trio.Nursery]:
    """Hosts and whatever else has a `run`, started one after the other."""
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for part in parts:
                await nursery.start(part.run)
            yield nursery
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], object], *, within: float = 20.0) -> None:
    with trio.fail_after(within):
        while not condition():  # noqa: ASYNC110 (some states have no event)
            await trio.sleep(0.01)


async def echo(stream: Stream) -> None:
    while piece := await stream.receive_some(1 << 16):
        await stream.send_all(piece)
    await stream.send_eof()
