"""The two ways to agree on a round, side by side: ballots of known members, and the chain of rosters of strangers.

    python bench/consensus.py [--nodes 4] [--rounds 8] [--latency 0.02]

One JSON line for each method. Nodes are whole sessions on the simulated network, on virtual time, with a toy model of
64 parameters whose steps take no time, so what is left is agreement. `round_s` is virtual seconds a round
(latency and the method's own waits; computing takes none), `cpu_s` the real seconds of this process a round and node,
`bytes` what a node sends in a round. `open` judges besides, which a chain without scores would not; its commits, votes
and rosters are what that chain would keep.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import trio

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from simswarm import SimSwarm

from swarmnode.testing.simnet import SimWorld, run_with_nursery

BEFORE = 3  # rounds that are not counted: the swarm meets, and windows settle


def measure(method: str, options: argparse.Namespace) -> dict[str, object]:
    """Rounds BEFORE to BEFORE + `options.rounds` of one swarm."""
    names = [f"n{i}" if i else "a" for i in range(options.nodes)]

    async def simulate(nursery: trio.Nursery) -> dict[str, object]:
        judges = {"validators": tuple(names)} if method == "open" else {}
        world = SimWorld(latency=options.latency)
        swarm = SimSwarm(nursery, world=world, method=method, seconds_per_step=0.0, **judges)
        await swarm.start("a", wait_peers=len(names) - 1)
        for name in names[1:]:
            await swarm.start(name, join="a")
        await swarm.round_done(BEFORE, *names)
        began, cpu, sent = trio.current_time(), time.process_time(), traffic(swarm)
        await swarm.round_done(BEFORE + options.rounds, *names, within=3600.0)
        rounds = options.rounds
        result = {
            "method": method,
            "nodes": options.nodes,
            "round_s": round((trio.current_time() - began) / rounds, 2),
            "cpu_s": round((time.process_time() - cpu) / rounds / options.nodes, 4),
            "bytes": round((traffic(swarm) - sent) / rounds / options.nodes),
            "one_hash": len(swarm.hashes(BEFORE + rounds)) == 1,
        }
        return result

    return run_with_nursery(simulate)


def traffic(swarm: SimSwarm) -> int:
    return sum(node.network.bytes_out for node in swarm.nodes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8, help="rounds that are measured")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds, each way")
    options = parser.parse_args()
    for method in ("diloco", "open"):
        print(json.dumps(measure(method, options)), flush=True)


if __name__ == "__main__":
    main()
