"""Provider lookups in a DHT of 32 nodes on loopback, and again after 8 of them were killed, as JSON lines.

    python bench/dht.py [--nodes 32] [--kill 8] [--keys 20] [--baseline libp2p]

Nodes live in processes of four hosts; those killed die with theirs, by SIGKILL. Each key has two providers, of which
one is killed. A lookup asks for both, from a node that was told of neither, so that it has to ask others; `found` is
the share that named the provider that lives, and `holders` the nodes that were told of a key, on average.
`--baseline libp2p` does the same with py-libp2p's own lookups on the same hosts, in the same run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NEIGHBOURS = 8  # that each node dials: tables stay incomplete, as in a larger swarm
READERS = 3  # lookups of each key in each phase
LIMIT = 20.0  # seconds for one lookup of the baseline; ours ends by itself


class Peer:
    """One host, ours or with upstream's lookups on top."""

    def __init__(self, stock: bool) -> None:
        from libp2p.kad_dht.kad_dht import DHTMode, KadDHT

        from swarmnode.node.host.network import HostSettings, Libp2pNetwork
        from swarmnode.node.identity import Identity

        identity = Identity(Ed25519PrivateKey.generate())
        self.network = Libp2pNetwork(identity, HostSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
        self.stock = KadDHT(self.network._host, DHTMode.SERVER) if stock else None

    async def meet(self) -> None:
        """Put everyone connected into upstream's table."""
        if self.stock is not None:
            for peer in self.network._host.get_connected_peers():
                await self.stock.add_peer(peer, skip_server_mode_check=True)

    async def provide(self, key: bytes) -> None:
        if self.stock is None:
            await self.network.provide(key)
        else:
            await self.stock.provider_store.provide(key)

    def told(self, key: bytes) -> bool:
        """Whether this node keeps a provider record of `key`."""
        table = self.network.kademlia if self.stock is None else self.stock
        return bool(table.provider_store.get_providers(key))

    async def find(self, key: bytes) -> list[str]:
        if self.stock is None:
            return list(await self.network.find_providers(key, limit=2))
        with trio.move_on_after(LIMIT):
            return [str(found.peer_id) for found in await self.stock.provider_store.find_providers(key, count=2)]
        return []


async def serve_hosts(count: int, stock: bool) -> None:
    """A child: runs hosts and carries out the commands that come as JSON lines."""
    peers = [Peer(stock) for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for peer in peers:
            await nursery.start(peer.network.run)
        print(json.dumps([[peer.network.me, peer.network.addresses[0]] for peer in peers]), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            command, index, argument = json.loads(line)
            peer = peers[index]
            started = trio.current_time()
            answer: Any = None
            if command == "connect":
                await peer.network.connect(argument)
            elif command == "meet":
                await trio.sleep(argument)
                await peer.meet()
            elif command == "provide":
                await peer.provide(bytes.fromhex(argument))
            elif command == "told":
                answer = peer.told(bytes.fromhex(argument))
            elif command == "find":
                answer = await peer.find(bytes.fromhex(argument))
            print(json.dumps([answer, 1000 * (trio.current_time() - started)]), flush=True)
        nursery.cancel_scope.cancel()


class Child:
    """A process of several hosts."""

    def __init__(self, hosts: int, stock: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(hosts), *(["--stock"] if stock else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hosts = hosts

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, command: str, index: int, argument: Any) -> tuple[Any, float]:
        """The command's answer and the milliseconds it took in the child."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, index, argument]) + "\n")
        self.process.stdin.flush()
        answer, milliseconds = self.read()
        return answer, milliseconds

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def run(nodes: int, kill: int, keys: int, stock: bool) -> None:
    per_process = 4
    children = [Child(per_process, stock) for _ in range(nodes // per_process)]
    try:
        names = [name for child in children for name in child.read()]
        places = [(child, index) for child in children for index in range(per_process)]
        for number, (child, index) in enumerate(places):
            for step in range(1, NEIGHBOURS + 1):
                child.do("connect", index, names[(number + step) % len(names)][1])
        for number, (child, index) in enumerate(places):
            child.do("meet", index, 3.0 if number == 0 else 0.0)  # identify takes a moment
        doomed = kill // per_process
        wanted = [hashlib.sha256(f"key {number}".encode()).digest().hex() for number in range(keys)]
        survivor: dict[str, str] = {}  # of the two providers of each key
        for number, key in enumerate(wanted):
            chosen = (number % kill, kill + number % (nodes - kill))  # one that dies, one that lives
            survivor[key] = names[chosen[1]][0]
            for place in chosen:
                child, index = places[place]
                child.do("provide", index, key)
        for phase in ("all alive", f"{kill} of {nodes} killed"):
            taken, found, holders = [], 0, 0
            for key in wanted:
                told = [place for place in range(kill, nodes) if places[place][0].do("told", places[place][1], key)[0]]
                holders += len(told)
                for place in sorted(set(range(kill, nodes)) - set(told))[:READERS]:
                    child, index = places[place]
                    answer, milliseconds = child.do("find", index, key)
                    taken.append(milliseconds)
                    found += survivor[key] in answer
            line = {
                "bench": "dht",
                "lookups": "py-libp2p" if stock else "swarmnode",
                "phase": phase,
                "holders": round(holders / keys, 1),
                "count": len(taken),
                "found": round(found / len(taken), 4),
                "p50_ms": round(statistics.median(taken), 1),
                "p99_ms": round(sorted(taken)[int(0.99 * len(taken))], 1),
            }
            print(json.dumps(line), flush=True)
            if phase == "all alive":
                for child in children[:doomed]:
                    child.kill()
    finally:
        for child in children:
            child.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description="Provider lookups with nodes alive and killed, as JSON lines.")
    parser.add_argument("--nodes", type=int, default=32, help="hosts in all, a multiple of 4")
    parser.add_argument("--kill", type=int, default=8, help="of these, killed halfway; a multiple of 4")
    parser.add_argument("--keys", type=int, default=20, help="keys that are provided and looked up")
    parser.add_argument("--baseline", choices=["libp2p"], help="also measure py-libp2p's own lookups")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        trio.run(serve_hosts, chosen.serve, chosen.stock)
        return
    for stock in (False, True) if chosen.baseline else (False,):
        run(chosen.nodes, chosen.kill, chosen.keys, stock)


if __name__ == "__main__":
    main()
