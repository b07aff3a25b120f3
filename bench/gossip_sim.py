"""Training in pairs in simulated swarms of many nodes: what a node pays in a round, and how far nodes get apart.

    python bench/gossip_sim.py --nodes 64 1000 --rounds 20
    python bench/gossip_sim.py --plot gossip.svg < lines.jsonl      # of what the first command printed

JSON lines: one a round of a swarm, then its summary. Every node is a whole `Gossip` with its calls, transfers and
liveness on the simulated network, on virtual time, with links of 20 ms. What is not real are the model (a quadratic
bowl, with gradients of each node's own noise), and that nodes are told the members at once, by nobody: what membership
costs in swarms of this size is measured by bench/state_sim.py.

Of a node and round, mean over nodes and the rounds after the first: `messages` and `bytes` that it sent, `cpu` seconds
of this process. `grows` are these as multiples of those of the first swarm. `apart` is the consensus distance after a
round, by the norm of the mean; `alone` the share of rounds in which a node met nobody.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from churn import Bowl
from memoryshards import UnboundedShards
from simnodes import EPOCH, RUN
from simswarm import _running
from tripwire import Tripwire

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.gossip.method import Gossip
from swarmnode.protocols.methods.method import Begin
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.runner import inline
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.testing.consensus import consensus_distance
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.testing.simnode import SimNetwork
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.runspec import parse_runspec

GARBAGE_AFTER = 100_000  # objects; a swarm has millions, and looking at all of them often takes most of the time
STEPS, STEP = 5, 0.4  # inner steps of a round, and seconds of each
SLOWEST = 1.2  # times the seconds of a step that the slowest node takes


@dataclass
class Everybody:
    """The members, as one node is told them: all others."""

    me: PeerId
    peers: Sequence[PeerId]
    network: SimNetwork

    def members(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer in self.peers if peer != self.me)

    def connected(self) -> tuple[PeerId, ...]:
        return tuple(view.peer for view in self.network.peers())


class PairSwarm:
    """`begin`, then `rounds` of all nodes, each at its own pace."""

    def __init__(self, nodes: int, parameters: int, seed: int) -> None:
        self.world = SimWorld(seed=seed, latency=0.02)
        self.counter = Tripwire(self.world)
        self.networks = [self.world.node(f"n{number}") for number in range(nodes)]
        tables = {
            "run": {"name": "pairs"},
            "inner": {"steps": STEPS},
            "exchange": {"method": "gossip", "deadline_ceiling": 60.0},
        }
        self.spec, self.parameters, self.seed = parse_runspec(tables, source="bench"), parameters, seed
        self.methods: list[Gossip] = []
        self.states: list[list[Any]] = []  # by round, each node's parameters after it
        self.met: list[int] = []  # members of each round of each node

    async def live(self, number: int, rounds: int, *, task_status: trio.TaskStatus[None]) -> None:
        network, draw = self.networks[number], random.Random(f"{self.seed} {number}")
        rpc, bulk = Rpc(network), Bulk(network)
        liveness = Liveness(rpc)
        shards = Shards(network, rpc, UnboundedShards(), runner=inline, seed=number)
        model = Bowl(parameters=self.parameters, seed=self.seed, peer_id=network.me)
        context = Context(
            run_id=RUN,
            spec=self.spec,
            network=network,
            rpc=rpc,
            bulk=bulk,
            liveness=liveness,
            runner=inline,
            trainer=SimTrainer(model, seconds_per_step=STEP * draw.uniform(1.0, SLOWEST)),
            membership=Everybody(network.me, [each.me for each in self.networks], network),  # type: ignore[arg-type]
            state=None,  # type: ignore[arg-type]  # gossip keeps no records
            sync=None,  # type: ignore[arg-type]
            shards=shards,
            admits=lambda peer: True,
            now=lambda: EPOCH + int(1000 * trio.current_time()),
            rng=draw,
        )
        async with _running(network.run), _running(rpc.run), _running(bulk.run), _running(liveness.run):
            method = Gossip(context)
            self.methods.append(method)
            await method.find_place(Begin(True, False, 0, 0.0, None))
            task_status.started()
            await trio.sleep_until(1.0)
            for round in range(rounds):
                result = await method.run_round()
                self.states[round].append(method.state.parameters)
                self.met.append(result.members)
            await trio.sleep_forever()


async def simulate(nodes: int, options: argparse.Namespace, nursery: trio.Nursery) -> dict[str, Any]:
    """All rounds of one swarm, told as they end; the summary."""
    swarm = PairSwarm(nodes, options.parameters, options.seed)
    swarm.states = [[] for _ in range(options.rounds)]
    apart, began = [], time.monotonic()
    for number in range(nodes):
        await nursery.start(swarm.live, number, options.rounds)
    first: dict[str, float] = {}
    for index in range(options.rounds):
        while len(swarm.states[index]) < nodes:  # noqa: ASYNC110 (virtual time)
            await trio.sleep(0.2)
        apart.append(consensus_distance(swarm.states[index]))
        swarm.states[index] = []
        spent = {
            "messages": float(swarm.counter.sent),
            "bytes": float(sum(network.bytes_out for network in swarm.networks)),
            "cpu": time.process_time(),
        }
        first = first or spent
        each = {name: round_to((spent[name] - first[name]) / nodes) for name in spent}
        print(json.dumps({"nodes": nodes, "round": index, "apart": round_to(apart[-1]), "so_far": each}), flush=True)
    share = nodes * (options.rounds - 1)
    loss = sum(method._trainer.toy.heldout_loss() for method in swarm.methods) / nodes  # type: ignore[attr-defined]
    return {
        "nodes": nodes,
        "rounds": options.rounds,
        "parameters": options.parameters,
        "apart_greatest": round_to(max(apart)),
        "apart_last": round_to(apart[-1]),
        "alone": round_to(sum(members == 1 for members in swarm.met) / len(swarm.met)),
        "loss": round_to(loss),
        **{name: round_to((spent[name] - first[name]) / share) for name in spent},
        "seconds": round(time.monotonic() - began, 1),
    }


def round_to(value: float) -> float:
    return float(f"{value:.4g}")


def plot(lines: Sequence[dict[str, Any]], file: Path) -> None:
    """Consensus distance over rounds, a line for each swarm."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gossip"}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for nodes in sorted({line["nodes"] for line in lines}):
            rounds = [line for line in lines if line["nodes"] == nodes and "round" in line]
            axes.plot(
                [line["round"] + 1 for line in rounds], [line["apart"] for line in rounds], label=f"{nodes} nodes"
            )
        axes.set(xlabel="rounds", ylabel="distance of nodes from their mean, by its norm", ylim=(0, None))
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 1000], help="swarms, one after another")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parameters", type=int, default=1000, help="of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw this file from lines on standard input, and simulate nothing")
    options = parser.parse_args()
    if options.plot is not None:
        plot([json.loads(line) for line in sys.stdin], options.plot)
        return
    gc.set_threshold(GARBAGE_AFTER, 50, 1000)
    first: dict[str, Any] | None = None
    for nodes in options.nodes:
        found = run_with_nursery(simulate, nodes, options)
        first = first or found
        grows = {name: round_to(found[name] / first[name]) for name in ("messages", "bytes", "cpu")}
        print(json.dumps({**found, "grows": grows}), flush=True)


if __name__ == "__main__":
    main()
