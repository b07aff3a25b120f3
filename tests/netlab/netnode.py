"""A small node for the laboratory: the host and its way through NATs, without a run. Told what to do on standard input.

    ip netns exec NAMESPACE python tests/netlab/netnode.py

One JSON object a line, answered by one. `start` makes a node with a fresh identity on a port, so that one process can
try many times; the others act on that node. `Agent` in `agents.py` drives it.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.node.host.addresses import listening
from swarmnode.node.host.limits import Limits
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity
from swarmnode.node.nat.netcheck import report
from swarmnode.node.nat.relay import RelayRefused
from swarmnode.node.nat.traversal import NatTraversal
from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.network import NetworkError
from swarmnode.protocols.peers.hello import serve_hello
from swarmnode.protocols.transfer.bulk import Bulk

LOOK_EVERY = 0.01  # s between looks at what has no event
MIB = 1 << 20

Command = dict[str, Any]


@dataclass(frozen=True)
class Count:
    """A call that is answered with itself."""

    number: int


class Node:
    """One life of the node, from `start` to the next one."""

    def __init__(self, port: int, *, mdns: bool) -> None:
        identity = Identity(Ed25519PrivateKey.generate())
        limits = Limits()
        settings = HostSettings(listen=listening("::", port), mdns=mdns, quic=True, agent="netlab", limits=limits)
        self.network = Libp2pNetwork(identity, settings)
        self.nat = NatTraversal(self.network, limits=limits.relay)
        self.rpc = Rpc(self.network, limits=limits.rpc)
        self.bulk = Bulk(self.network, limits=limits.bulk)
        self.calls = 0  # answered
        self.rpc.serve("netlab/count", Count, self._count)
        serve_hello(self.network, "netlab")  # relays serve nodes of our kind only

    async def _count(self, peer: str, count: Count) -> Count:
        self.calls += 1
        return count

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            for part in (self.network.run, self.rpc.run, self.bulk.run, self.nat.run):
                await nursery.start(part)
            task_status.started()

    def path(self, peer: str) -> str | None:
        return next((view.path for view in self.network.peers() if view.peer == peer), None)

    def _is_over_quic(self, peer: str) -> bool:
        best = self.network.connections.best(peer)
        return best is not None and best.is_quic

    # --- commands; each returns what is answered --------------------------------------------------------------------

    async def status(self) -> Command:
        nat, reach = self.nat, self.nat.reachability
        traffic = self.network.traffic()
        return {
            "peer": self.network.me,
            "addresses": list(self.network.addresses),
            "peers": {view.peer: view.path for view in self.network.peers()},
            "bytes_in": traffic.bytes_in,
            "bytes_out": traffic.bytes_out,
            "reachability": nat.how_reached,
            "observed": reach.observed(),
            "endpoint_independent": reach.endpoint_independent(),
            "punched": nat.puncher.succeeded,
            "not_punched": nat.puncher.failed,
            "udp": {"seen": nat.udp.seen(), "symmetric": nat.udp.is_symmetric, "packets": dict(nat.udp.packets)},
            "over_quic": [view.peer for view in self.network.peers() if self._is_over_quic(view.peer)],
            "relays": self.network.relay_client.relays,
            "mapped": {family: mapping.way for family, mapping in reach.mappings.items()},
            "over_ipv6": reach.open_at(trio.current_time(), "ip6"),
        }

    async def netcheck(self) -> Command:
        """What `swarmnode netcheck --json` prints."""
        await trio.lowlevel.checkpoint()
        return report(self.network, self.nat, {})

    async def join(self, to: list[str]) -> Command:
        """Connect to nodes that are there already."""
        began = trio.current_time()
        for address in to:
            await self.network.connect(address)
        return {"seconds": trio.current_time() - began}

    async def settle(self, states: list[str], relays: int = 0, without: str = "", within: float = 20.0) -> Command:
        """Wait until the node knows how it can be reached, and holds places at so many relays, but not at one."""
        began = trio.current_time()

        def settled() -> bool:
            now = self.network.relay_client.relays
            return self.nat.how_reached in states and len(now) >= relays and without not in now

        await _seen(settled, within)
        return {"seconds": trio.current_time() - began, **await self.status()}

    async def connect(self, to: list[str], direct_within: float) -> Command:
        """Connect to the peer at one of its addresses, and wait for the connection to be direct."""
        peer = to[0].rpartition("/")[2]
        self.network.learn(peer, tuple(to))
        began = trio.current_time()
        try:
            await self.network.connect(peer)
        except NetworkError as error:
            return {"path": None, "why": str(error)}
        connected, first = trio.current_time() - began, self.path(peer)
        await _seen(lambda: self.path(peer) == "direct", direct_within)
        path = self.path(peer)
        direct = trio.current_time() - began if path == "direct" else None
        return {"connected": connected, "first": first, "direct": direct, "path": path, "peer": peer}

    async def meet(self, peer: str, within: float) -> Command:
        """Wait for a peer to be connected that nobody told this node about."""
        began = trio.current_time()
        await _seen(lambda: self.path(peer) is not None, within)
        return {"connected": trio.current_time() - began, "path": self.path(peer)}

    async def offer(self, size: int) -> Command:
        """Offer `size` pseudo-random bytes."""
        content = random.Random(size).randbytes(size)
        self.bulk.offer(("netlab", size), content)
        return {"digest": blake3(content).hexdigest()}

    async def fetch(self, peer: str, size: int) -> Command:
        """Fetch what the peer offers, and tell which bytes were there when, and over which path."""
        began = trio.current_time()
        seen: list[tuple[float, int, str | None]] = []

        def progress(done: int) -> None:
            seen.append((trio.current_time() - began, done, self.path(peer)))

        before = self.network.traffic().bytes_in
        content = await self.bulk.fetch(peer, ("netlab", size), max_size=size, progress=progress)
        seconds = trio.current_time() - began
        return {
            "digest": blake3(content).hexdigest(),
            "size": len(content),
            "seconds": seconds,
            "progress": seen,
            "bytes_in": self.network.traffic().bytes_in - before,
        }

    async def call(self, peer: str, within: float) -> Command:
        """Call the peer until it answers."""
        began = trio.current_time()
        failures: list[str] = []
        while trio.current_time() < began + within:
            try:
                await self.rpc.call(peer, "netlab/count", Count(1), Count, timeout=2.0)
                return {"seconds": trio.current_time() - began, "path": self.path(peer), "failures": failures}
            except CallError as error:
                failures.append(str(error))
                await trio.sleep(0.1)
        return {"seconds": None, "path": self.path(peer), "failures": failures}

    async def calls_while(self, peer: str, seconds: float) -> Command:
        """Call the peer one time after another, and tell how many calls there were, and which failed."""
        until = trio.current_time() + seconds
        asked, failures = 0, []
        while trio.current_time() < until:
            asked += 1
            try:
                await self.rpc.call(peer, "netlab/count", Count(asked), Count, timeout=10.0)
            except CallError as error:
                failures.append(str(error))
        return {"asked": asked, "failures": failures}

    async def called(self) -> Command:
        return {"calls": self.calls}

    async def flood(self, relay: str, target: str, times: int) -> Command:
        """Ask a relay for places and circuits without end; how often it did what it was asked, and why not."""
        answers: Counter[str] = Counter()
        for number in range(times):
            try:
                if number % 2:
                    await self.network.relay_client.reserve(relay)
                else:
                    await self.network.relay_client.dial(relay, target)
                answers["OK"] += 1
            except RelayRefused as error:
                answers[str(error).partition(" refuses: ")[2]] += 1
            except NetworkError as error:
                answers[type(error).__name__] += 1
        return {"answers": dict(answers)}


async def _seen(condition: Callable[[], bool], within: float) -> None:
    """Wait for what has no event, at most `within` seconds."""
    with trio.move_on_after(within):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(LOOK_EVERY)


async def _read_lines(each: Callable[[Command], Awaitable[None]]) -> None:
    received = bytearray()
    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stream:
        async for piece in stream:
            received += piece
            while b"\n" in received:
                line, _, rest = received.partition(b"\n")
                received = bytearray(rest)
                await each(json.loads(line))


async def main() -> None:
    node: Node | None = None
    life: trio.CancelScope | None = None

    async def live(fresh: Node, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                await inner.start(fresh.run)
                task_status.started(scope)

    async with trio.open_nursery() as nursery:

        async def answer(number: int, work: Callable[[], Awaitable[Command]]) -> None:
            try:
                told = await work()
            except NetworkError as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"number": number, **told}), flush=True)

        async def obey(command: Command) -> None:
            nonlocal node, life
            number, do = command.pop("number"), command.pop("do")
            if do == "start":
                if life is not None:
                    life.cancel()
                node = Node(command["port"], mdns=command["mdns"])
                life = await nursery.start(live, node)
                print(json.dumps({"number": number, "peer": node.network.me}), flush=True)
            else:
                assert node is not None, "no node was started"
                nursery.start_soon(answer, number, partial(getattr(node, do), **command))

        await _read_lines(obey)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    level = logging.DEBUG if "-v" in sys.argv else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(relativeCreated)d %(name)s %(message)s")
    for noisy in ("trio", "multiaddr", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    trio.run(main)
