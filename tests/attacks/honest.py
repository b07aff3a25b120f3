"""An honest peer in a process of its own: calls `echo` with 128 bytes at a steady rate and reports how long each took.

    python honest.py ADDRESS

Each line on standard input ends a phase: the latencies (ms) since the last are printed as one JSON list; a call that
failed counts as `LOST` ms, and one that is not answered yet as long as it has waited. Ends with its input.
"""

from __future__ import annotations

import json
import sys

import trio
from victim import LISTEN, Blob, new_identity

from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.protocols.calls.rpc import CallError, Rpc
from swarmnode.protocols.network import NetworkError

PERIOD = 0.01  # seconds between calls
LOST = 5000.0  # ms; also the timeout of a call


async def main(address: str) -> None:
    network = Libp2pNetwork(new_identity(), HostSettings(listen=(LISTEN,)))
    rpc = Rpc(network)
    taken: list[float] = []
    waiting: set[float] = set()  # since when; no two calls begin at one time

    async def call(peer: str) -> None:
        started = trio.current_time()
        waiting.add(started)
        try:
            await rpc.call(peer, "echo", Blob(b"x" * 128), Blob, timeout=LOST / 1000)
            taken.append(1000 * (trio.current_time() - started))
        except (CallError, NetworkError):
            taken.append(LOST)
        finally:
            waiting.discard(started)

    async def call_steadily(peer: str) -> None:
        async with trio.open_nursery() as calls:
            while True:
                calls.start_soon(call, peer)
                await trio.sleep(PERIOD)

    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        await nursery.start(rpc.run)
        peer = await network.connect(address)
        nursery.start_soon(call_steadily, peer)
        print(json.dumps("ready"), flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            now = trio.current_time()
            print(json.dumps([*taken, *(1000 * (now - since) for since in waiting)]), flush=True)
            taken.clear()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
