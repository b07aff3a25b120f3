"""What sharing rollouts costs a node, and how far groups come, as a function of nodes; JSON lines.

    python bench/rollouts_sim.py [--nodes 16 64 500] [--groups 8] [--tokens 6] [--rounds 3] [--logprobs] [--verify]

Nodes on the simulated network, each connected to about ten others, publish `groups` groups of eight answers at the
beginning of each round of 10 s, at moments of their own. Told for each number of nodes, in the rounds after the first:
kB a second that a node receives and sends, all of its calls included, as the mean, the busiest node's and what of it
are groups; groups that reached a node in a round, the least and the mean, and from how many authors; the time in which
a group reached its last node; and the CPU of a node in a round. Signatures are believed unless `--verify`: checking
them costs the same CPU in every swarm, here about 0.2 ms a group, and would be most of what the bench takes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import trio

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from rolloutnodes import RolloutNode, group, ring_and_chords, start
from simnodes import connect, now

from swarmnode.testing.simnet import SimWorld, run_with_nursery

DEGREE = 10  # neighbours of a node
LATENCY = 0.05  # seconds
ROUND = 10.0  # seconds


@dataclass(frozen=True)
class Shared:
    """What sharing came to in one swarm."""

    nodes: int
    groups: int  # of a node in a round
    tokens: int  # of an answer
    rounds: int
    in_kB_per_second: float
    in_kB_per_second_busiest: float
    out_kB_per_second: float
    out_kB_per_second_busiest: float
    groups_kB_per_second: float  # of what comes in
    came_per_round: float
    came_per_round_least: float
    authors_per_round: float
    copies: float  # nodes that held a group in the end, its author included
    seconds_to_last: float  # from publishing until the last of them had it, mean
    cpu_ms_per_node_and_round: float


async def one_round(members: list[RolloutNode], number: int, groups: int, tokens: int, logprobs: bool) -> None:
    """Everybody publishes once, at a moment of its own in the first half of the round."""
    rng = random.Random(number)

    async def publish(index: int, node: RolloutNode) -> None:
        await trio.sleep(rng.uniform(0, ROUND / 2))
        seeds = range(1000 * (number * len(members) + index), 1000 * (number * len(members) + index) + groups)
        await node.rollouts.publish([group(seed, tokens=tokens, logprobs=logprobs) for seed in seeds])

    async with trio.open_nursery() as nursery:
        for index, node in enumerate(members):
            nursery.start_soon(publish, index, node)
        await trio.sleep(ROUND)


def share(nodes: int, *, groups: int, tokens: int, rounds: int, logprobs: bool, verify: bool) -> Shared:
    """Rounds of sharing in a swarm of `nodes`."""

    async def main(nursery: trio.Nursery) -> Shared:
        rng = random.Random(nodes)
        options = {} if verify else {"verify": lambda *_: True}
        members = await start(nursery, SimWorld(latency=LATENCY), nodes, **options)
        await connect(ring_and_chords(members, DEGREE, rng))
        await trio.sleep(3.0)
        await one_round(members, 0, groups, tokens, logprobs)  # streams are opened, what is recent is asked
        began, cpu = now(), time.process_time()
        before = [(node.network.bytes_in, node.network.bytes_out) for node in members]
        bodies = [node.rollouts.counts["received_bytes"] for node in members]
        for number in range(1, 1 + rounds):
            await one_round(members, number, groups, tokens, logprobs)
        seconds, cpu = rounds * ROUND, time.process_time() - cpu
        ins = [(node.network.bytes_in - was[0]) / seconds / 1000 for node, was in zip(members, before, strict=True)]
        outs = [(node.network.bytes_out - was[1]) / seconds / 1000 for node, was in zip(members, before, strict=True)]
        body = sum(node.rollouts.counts["received_bytes"] for node in members) - sum(bodies)
        held = [[kept for kept in node.rollouts.pool if kept.signed.packed.made_at >= began] for node in members]
        last: dict[bytes, int] = {}
        for kept in (kept for each in held for kept in each):
            last[kept.signed.id] = max(last.get(kept.signed.id, 0), kept.came_at - kept.signed.packed.made_at)
        return Shared(
            nodes=nodes,
            groups=groups,
            tokens=tokens,
            rounds=rounds,
            in_kB_per_second=round(fmean(ins), 3),
            in_kB_per_second_busiest=round(max(ins), 3),
            out_kB_per_second=round(fmean(outs), 3),
            out_kB_per_second_busiest=round(max(outs), 3),
            groups_kB_per_second=round(body / nodes / seconds / 1000, 3),
            came_per_round=round(fmean(map(len, held)) / rounds, 2),
            came_per_round_least=round(min(map(len, held)) / rounds, 2),
            authors_per_round=round(fmean(len({kept.signed.author for kept in each}) for each in held), 1),
            copies=round(1 + sum(map(len, held)) / (rounds * nodes * groups), 2),
            seconds_to_last=round(fmean(last.values()) / 1000, 2) if last else 0.0,
            cpu_ms_per_node_and_round=round(1000 * cpu / nodes / rounds, 2),
        )

    return run_with_nursery(main)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What sharing rollouts costs a node.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 500])
    parser.add_argument("--groups", type=int, default=8, help="that a node publishes in a round")
    parser.add_argument("--tokens", type=int, default=6, help="of an answer, eight in a group")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logprobs", action="store_true", help="send log-probabilities along")
    parser.add_argument("--verify", action="store_true", help="verify signatures")
    args = parser.parse_args(argv)
    for nodes in args.nodes:
        found = share(
            nodes,
            groups=args.groups,
            tokens=args.tokens,
            rounds=args.rounds,
            logprobs=args.logprobs,
            verify=args.verify,
        )
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
