"""What groups cost and spare in one all-reduce of many members, on the simulated network, as JSON lines.

    python bench/groups.py [--members 32] [--groups 32,16,8] [--parameters 2M] [--latency 0.025]

Between any two members lies `--latency` each way, and no limit on bandwidth: `seconds`, on virtual time, is what the
protocol waits for. `peers` is with how many others a member exchanges parts, `bytes` what it sends for each parameter,
all of them the most of any member; `calls` counts what all of them fetch, `cpu` the CPU seconds of all in one process.
`spread` is the largest difference between two members' means: 0 where they are bit-identical; `error` that to the exact
mean. The second of two rounds is shown; in the first, members take memory.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import trio

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.messages import RoundRoster, Seat
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.testing.parts import context_of
from swarmnode.testing.simnet import SimNetwork, SimWorld, run_with_nursery
from swarmnode.training.sections import ExchangeSection

RUN, PARENT = "ab" * 32, "00" * 32


class Member:
    """A node that knows how to reduce, and counts."""

    def __init__(self, network: SimNetwork, number: int, parameters: int, group_size: int) -> None:
        self.network = network
        self.rpc = Rpc(network)
        self.bulk, self.liveness = Bulk(network), Liveness(self.rpc)
        exchange = ExchangeSection(codec="int8", group_size=group_size)
        parts = context_of(RUN, network, self.rpc, self.liveness, exchange, bulk=self.bulk, parameters=parameters)
        self.allreduce = AllReduce(parts)
        self.values = np.random.default_rng(number).standard_normal(parameters, np.float32)
        self.peers: set[str] = set()
        self.calls = 0
        fetch = self.bulk.fetch

        async def counted(peer: str, *args: Any, **options: Any) -> Any:
            self.peers.add(peer)
            self.calls += 1
            return await fetch(peer, *args, **options)

        self.bulk.fetch = counted  # type: ignore[method-assign]


async def measure(
    count: int, group_size: int, parameters: int, latency: float, nursery: trio.Nursery
) -> dict[str, Any]:
    world = SimWorld(latency=latency)
    members = [Member(world.node(number), number, parameters, group_size) for number in range(count)]
    for member in members:
        for part in (member.network.run, member.rpc.run, member.bulk.run, member.liveness.run):
            await nursery.start(part)
    seats = tuple(Seat(member.network.me, 1, 4) for member in members)
    for turn in range(2):
        roster = RoundRoster(RUN, turn, 0, PARENT, seats, (), 1.0)
        before = [member.network.traffic().bytes_out for member in members]
        for member in members:
            member.peers.clear()
            member.calls = 0
        means: list[Any] = []
        cpu, began = time.process_time(), trio.current_time()

        async def reduce(member: Member, roster: RoundRoster = roster, means: list[Any] = means) -> None:
            means.append(await member.allreduce.reduce(roster, member.values))

        async with trio.open_nursery() as reducing:
            for member in members:
                reducing.start_soon(reduce, member)
        seconds, cpu = trio.current_time() - began, time.process_time() - cpu
        for member in members:
            member.allreduce.commit(roster)
    exact = np.mean([member.values for member in members], axis=0)
    sent = [m.network.traffic().bytes_out - b for m, b in zip(members, before, strict=True)]
    return {
        "members": count,
        "group_size": group_size,
        "parameters": parameters,
        "seconds": round(seconds, 3),
        "peers": max(len(member.peers) for member in members),
        "calls": sum(member.calls for member in members),
        "bytes": round(max(sent) / parameters, 3),
        "cpu": round(cpu, 2),
        "spread": float(max(np.abs(mean - means[0]).max() for mean in means)),
        "error": round(float(np.abs(means[0] - exact).mean()), 5),
    }


def count(text: str) -> int:
    """50M, 1M, 200k or a plain number."""
    return int(float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1))


def main() -> None:
    options = argparse.ArgumentParser(description="What groups cost and spare in one all-reduce, as JSON lines.")
    options.add_argument("--members", type=int, default=32)
    options.add_argument("--groups", default="32,16,8", help="sizes of groups")
    options.add_argument("--parameters", default="2M")
    options.add_argument("--latency", type=float, default=0.025, help="seconds each way")
    chosen = options.parse_args()
    for size in map(int, chosen.groups.split(",")):
        found = run_with_nursery(measure, chosen.members, size, count(chosen.parameters), chosen.latency)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
