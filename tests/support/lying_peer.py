"""A node that offers runs and sends, for each run id, whatever specification it was given: for end-to-end tests.

with LyingPeer({run_id: encoded}) as peer:
    swarmnode run --join peer.address --run run_id
"""

from __future__ import annotations

import threading
from types import TracebackType

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.peers.hello import serve_hello
from swarmnode.protocols.state.membership import RunListing, serve_runs


class LyingPeer:
    """Lives in a thread of its own for as long as the block."""

    def __init__(self, specifications: dict[str, bytes]) -> None:
        self._specifications = specifications
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: trio.run(self._main), daemon=True)
        self.address = ""

    def __enter__(self) -> LyingPeer:
        self._thread.start()
        assert self._listening.wait(20)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._token.run_sync_soon(self._over.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._token, self._over = trio.lowlevel.current_trio_token(), trio.Event()
        identity = Identity(Ed25519PrivateKey.generate())
        network = Libp2pNetwork(identity, HostSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
        rpc = Rpc(network)
        listings = tuple(RunListing(run_id, "tiny", 0, 1) for run_id in self._specifications)
        serve_hello(network, "swarmnode/0")
        serve_runs(rpc, lambda: listings, self._specifications.get)
        async with trio.open_nursery() as nursery:
            await nursery.start(network.run)
            await nursery.start(rpc.run)
            self.address = network.addresses[0]
            self._listening.set()
            await self._over.wait()
            nursery.cancel_scope.cancel()
