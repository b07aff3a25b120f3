"""python bench/catchup.py [--joiners 3] [--repeats 3] [--momentum] [--hivemind-python VENV/bin/python]

Joiners that begin at the same moment fetch a whole state from four members, every node a process of its own on
loopback, as JSON lines: `seconds` until the last of them held it, verified, `mean` over them, `copies` of the state
that each member gave away and each joiner (`joiners_copies`), and `cpu_s`, the CPU seconds of all of them, which says
more than `seconds` where the machine is busy. The state is that of --parameters (50 million) in float32; without
--momentum the outer momentum is zero, as in a run with the default outer optimizer, and does not travel.

The baseline in the same run is hivemind 1.1.12, `load_state_from_peers` of its averager, with tensors of the same size;
it is not verified there. It needs a Python of its own: pip install hivemind==1.1.12 in another venv. The systems take
turns, and at the end come the medians and the ratio of `seconds` within each turn. The exit code is 1 where a state did
not arrive.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pair

MEMBERS = 4
RUN, ROUND = "ab" * 32, 7
SEED = 1


# -- nodes


def swarmnode_node(chosen: argparse.Namespace) -> None:
    """Serve the state, or fetch it when told to, and then go on serving until standard input ends."""
    import numpy as np
    import trio

    from swarmnode.node.process import rest_what_stays
    from swarmnode.protocols.calls.rpc import Rpc
    from swarmnode.protocols.peers.liveness import Liveness
    from swarmnode.protocols.runner import in_thread
    from swarmnode.protocols.transfer.catchup import CatchUp
    from swarmnode.protocols.transfer.shard_memory import MemoryShards
    from swarmnode.protocols.transfer.shards import Shards
    from swarmnode.training.outer import Layout, OuterState, state_hash

    layout = Layout.of([("weights", (chosen.parameters,))])

    async def main() -> None:
        network = pair.swarmnode_network()
        rpc = Rpc(network)
        shards = Shards(network, rpc, MemoryShards(), runner=in_thread)
        liveness = Liveness(rpc)
        common = {"run_id": RUN, "runner": in_thread, "trainer": SimpleNamespace(layout=layout)}
        parts: Any = SimpleNamespace(rpc=rpc, shards=shards, liveness=liveness, **common)
        catch_up = CatchUp(parts)
        async with trio.open_nursery() as nursery:
            for part in (network, rpc, shards, liveness):
                await nursery.start(part.run)
            hash = ""
            if chosen.role == "member":
                generator = np.random.default_rng(SEED)
                parameters = generator.standard_normal(chosen.parameters, np.float32)
                momentum = np.zeros_like(parameters)
                if chosen.momentum:
                    momentum = generator.standard_normal(chosen.parameters, np.float32)
                state = OuterState(parameters, momentum)
                hash = state_hash(ROUND, layout, state)
                catch_up.serve_state(ROUND, hash, state)
            rest_what_stays()  # as the daemon does
            pair.emit(peer=network.me, addresses=network.addresses, hash=hash)
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                told = json.loads(line)
                if told["what"] == "meet":
                    for peer, addresses in told["peers"].items():
                        network.learn(peer, tuple(addresses))
                        if peer in told["members"]:
                            await network.connect(peer)
                    pair.emit(met=len(told["peers"]))
                elif told["what"] == "fetch":
                    began = time.perf_counter()
                    _, hash, _ = await catch_up.fetch(told["members"], state_hash=told["hash"])
                    pair.emit(seconds=time.perf_counter() - began, right=hash == told["hash"])
                else:
                    pair.emit(sent=network.traffic().bytes_out)
            nursery.cancel_scope.cancel()

    trio.run(main)


def hivemind_node(chosen: argparse.Namespace) -> None:
    """The same with hivemind's averager."""
    import hivemind
    import torch

    generator = torch.Generator().manual_seed(SEED)
    member = chosen.role == "member"
    tensors = [
        torch.randn(chosen.parameters, generator=generator) if member else torch.zeros(chosen.parameters)
        for _ in range(2 if chosen.momentum else 1)
    ]

    def digest(tensors: list[torch.Tensor]) -> str:
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()

    dht = hivemind.DHT(initial_peers=chosen.peers, host_maddrs=[pair.LOOPBACK], start=True)
    averager = hivemind.DecentralizedAverager(
        tensors, dht, prefix="bench", start=True, allow_state_sharing=member, target_group_size=MEMBERS
    )
    pair.emit(peer=str(dht.peer_id), addresses=[str(a) for a in dht.get_visible_maddrs()], hash=digest(tensors))
    for line in sys.stdin:
        told = json.loads(line)
        if told["what"] == "meet":
            pair.emit(met=0)
        elif told["what"] == "fetch":
            began = time.perf_counter()
            loaded = averager.load_state_from_peers()  # with a timeout it gives 3 s to each message, too few here
            spent = time.perf_counter() - began
            pair.emit(seconds=spent, right=loaded is not None and digest(loaded[1]) == told["hash"])
        else:
            pair.emit(sent=0)
    averager.shutdown()
    dht.shutdown()


# -- the trial


class Node:
    """A node's process."""

    def __init__(self, system: str, role: str, chosen: argparse.Namespace, peers: list[str]) -> None:
        python = chosen.hivemind_python if system == "hivemind" else sys.executable
        command = [python, __file__, "--system", system, "--role", role, "--parameters", str(chosen.parameters)]
        command += ["--momentum"] * chosen.momentum + [f"--peers={peer}" for peer in peers]
        quiet = None if chosen.verbose else subprocess.DEVNULL
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=quiet,
            text=True,
            env={**os.environ, "HIVEMIND_LOGLEVEL": "ERROR"},
        )
        self.said: dict[str, Any] = {}

    def hear(self) -> dict[str, Any]:
        """The next line that it says. Raises EOFError where it ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        raise EOFError("a node ended")

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def trial(system: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Members, and joiners who fetch at the same moment."""
    nodes: list[Node] = []
    try:
        peers: list[str] = []
        for number in range(MEMBERS + chosen.joiners):
            nodes.append(Node(system, "member" if number < MEMBERS else "joiner", chosen, peers))
            if number == 0:
                nodes[0].said = nodes[0].hear()
                peers = nodes[0].said["addresses"] if system == "hivemind" else []
        for node in nodes[1:]:
            node.said = node.hear()
        members, joiners = nodes[:MEMBERS], nodes[MEMBERS:]
        known = {node.said["peer"]: node.said["addresses"] for node in nodes}
        named = [node.said["peer"] for node in members]
        for joiner in joiners:
            joiner.tell(what="meet", members=named, peers=known)
            joiner.hear()
        if system == "hivemind":
            time.sleep(3.0)  # members declare in the DHT that they share their state
        before = [_spent(node) for node in nodes]
        for joiner in joiners:
            joiner.tell(what="fetch", members=named, hash=members[0].said["hash"])
        results = [joiner.hear() for joiner in joiners]
        after = [_spent(node) for node in nodes]
    finally:
        for node in nodes:
            node.end()
    size = 4 * chosen.parameters * (2 if chosen.momentum else 1)
    seconds = [result["seconds"] for result in results]
    copies = [round((b["sent"] - a["sent"]) / size, 2) for a, b in zip(before, after, strict=True)]
    figures = {
        "system": system,
        "joiners": chosen.joiners,
        "mb": size / 1e6,
        "seconds": round(max(seconds), 2),
        "mean": round(statistics.mean(seconds), 2),
        "cpu_s": round(sum(b["cpu"] - a["cpu"] for a, b in zip(before, after, strict=True)), 1),
        "right": all(result["right"] for result in results),
        "load": round(os.getloadavg()[0], 1),
    }
    if system == "swarmnode":
        figures["copies"], figures["joiners_copies"] = copies[:MEMBERS], copies[MEMBERS:]
    return figures


def _spent(node: Node) -> dict[str, Any]:
    node.tell(what="figures")
    return {**node.hear(), "cpu": _cpu_of_family(node.process.pid)}


def _cpu_of_family(pid: int) -> float:
    """CPU seconds of a process and all that it started and that live."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    family = [int(child) for listed in children for child in listed.read_text().split()]
    return pair.cpu_seconds(pid) + sum(_cpu_of_family(child) for child in family)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2])
    parser.add_argument("--parameters", type=int, default=50_000_000, help="of the model")
    parser.add_argument("--momentum", action="store_true", help="the outer momentum is not zero")
    parser.add_argument("--joiners", type=int, default=3, help="at once")
    parser.add_argument("--repeats", type=int, default=1, help="turns of each system")
    parser.add_argument("--hivemind-python", default="", help="interpreter of a venv that has hivemind")
    parser.add_argument("--verbose", action="store_true", help="show what the nodes write on standard error")
    parser.add_argument("--system", choices=("swarmnode", "hivemind"), help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("member", "joiner"), help=argparse.SUPPRESS)
    parser.add_argument("--peers", action="append", default=[], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.role:
        {"swarmnode": swarmnode_node, "hivemind": hivemind_node}[chosen.system](chosen)
        return 0
    systems = ["swarmnode"] + ["hivemind"] * bool(chosen.hivemind_python)
    turns: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for turn in range(chosen.repeats):
        for system in systems:
            turns[system].append(trial(system, chosen))
            pair.emit(turn=turn, **turns[system][-1])
    for system in systems:
        medians = {name: statistics.median(line[name] for line in turns[system]) for name in ("seconds", "cpu_s")}
        pair.emit(summary=system, joiners=chosen.joiners, turns=chosen.repeats, **medians)
    for name in ("seconds", "cpu_s") if len(systems) == 2 else ():
        ratios = [ours[name] / theirs[name] for ours, theirs in zip(*turns.values(), strict=True)]
        pair.emit(
            summary="swarmnode / hivemind",
            figure=name,
            median=round(statistics.median(ratios), 2),
            least=round(min(ratios), 2),
            most=round(max(ratios), 2),
        )
    return 0 if all(figures["right"] for system in systems for figures in turns[system]) else 1


if __name__ == "__main__":
    sys.exit(main())
