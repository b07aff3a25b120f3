"""How the replicated state converges, as a function of nodes, records and differences; JSON lines, and plots in docs/.

    python bench/state_sim.py [--plots docs] [--quick]

`repair`: replicas as plain objects, no network. All hold the same records and `differences` more are at one replica
each; in a round each replica repairs with one of its neighbours, drawn at random, and both then hold what either held.
Told: rounds until all are equal, bytes and CPU seconds a replica (frames of reconciliation, without the elements).
The baseline is what one would do without reconciliation: send the ids of all records to the neighbour, 32 bytes each.

`push`: nodes on the simulated network with real calls, of which 5 % vanish when they push. Told: seconds until a
record is with half of the nodes, 99 % and all, and what each node sent for it.

Fits: rounds = a + b·log2(nodes); bytes = a·records^b and a·differences^b; seconds to 99 % = a + b·log2(nodes).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import trio

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from conversing import converse
from simnodes import connect
from statenodes import ring_and_chords, start

from swarmnode.crdt.ranges import RANK, RankSet
from swarmnode.crdt.reconcile import Initiator, Responder
from swarmnode.crdt.reconcile_frames import NONCE_SIZE
from swarmnode.protocols.state.push import COLLECT
from swarmnode.testing.simnet import SimWorld, run_with_nursery

DEGREE = 10  # neighbours of a replica
LATENCY = 0.05  # seconds
LOSS = 0.05  # of pushes
SAMPLE = 0.025  # seconds between two looks at who has a record
PUSHED = 5  # records whose spread is averaged
CUTOFF = 1  # ms; what is simulated here does not expire


@dataclass(frozen=True)
class Repair:
    """What it took until all replicas were equal."""

    nodes: int
    records: int
    differences: int
    rounds: int
    bytes_per_node: float
    cpu_seconds_per_node: float
    sessions_per_node: float
    all_ids_bytes_per_node: float  # the baseline, in as many sessions


@dataclass(frozen=True)
class Spread:
    """How a record reached the nodes of a simulated network."""

    nodes: int
    half_seconds: float
    most_seconds: float  # 99 %
    all_seconds: float
    hops_to_most: float  # `most_seconds` in hops: what news waits, and the way
    bytes_per_node: float  # sent for one record, calls included
    cpu_seconds_per_node: float


def ranks(count: int, rng: random.Random) -> list[bytes]:
    """Scattered in time, so that differences are not all at one end."""
    return sorted(rng.randbytes(RANK) for _ in range(count))


def repair(nodes: int, records: int, differences: int, *, seed: int = 0) -> Repair:
    """Rounds of repair until all replicas are equal."""
    rng = random.Random(seed)
    base = RankSet(ranks(records, rng))
    replicas = [base] * nodes
    for rank in ranks(differences, rng):
        who = rng.randrange(nodes)
        replicas[who] = replicas[who].changed([rank])
    neighbours = [
        [(i - 1) % nodes, (i + 1) % nodes, *rng.sample(range(nodes), min(nodes, DEGREE - 2))] for i in range(nodes)
    ]
    size = sessions = rounds = baseline = 0
    began = time.process_time()
    while any(len(replica) < records + differences for replica in replicas):
        rounds += 1
        for number in rng.sample(range(nodes), nodes):
            partner = rng.choice(neighbours[number])
            if partner == number:
                continue
            one, other = replicas[number], replicas[partner]
            initiator = Initiator(one, cutoff=CUTOFF, nonce=rng.randbytes(NONCE_SIZE))
            responder = Responder(other, cutoff=CUTOFF, nonce=rng.randbytes(NONCE_SIZE))
            size += converse(initiator, responder).size
            baseline += 32 * len(one)
            sessions += 1
            replicas[number], replicas[partner] = one.changed(initiator.need), other.changed(initiator.have)
    cpu = time.process_time() - began
    return Repair(
        nodes=nodes,
        records=records,
        differences=differences,
        rounds=rounds,
        bytes_per_node=round(size / nodes, 1),
        cpu_seconds_per_node=round(cpu / nodes, 6),
        sessions_per_node=round(sessions / nodes, 2),
        all_ids_bytes_per_node=round(baseline / nodes, 1),
    )


def spread(nodes: int) -> Spread:
    """Push some records, one after another, and look who has them."""

    async def main(nursery: trio.Nursery) -> Spread:
        rng = random.Random(nodes)
        members = await start(nursery, SimWorld(latency=LATENCY), nodes, loss=LOSS)
        await connect(ring_and_chords(members, DEGREE, rng))
        await trio.sleep(15.0)
        sent, cpu = sum(node.network.bytes_out for node in members), time.process_time()
        times: list[list[float]] = []
        for number in range(PUSHED):
            record = await rng.choice(members).sync.write(f"note/{number}", "x" * 200)
            began, rank, reached = trio.current_time(), record.rank, list[float]()
            while len(reached) < nodes:
                await trio.sleep(SAMPLE)
                have = sum(node.state.has(rank) for node in members)
                reached += [trio.current_time() - began] * (have - len(reached))
            times.append(reached)
        sent, cpu = sum(node.network.bytes_out for node in members) - sent, time.process_time() - cpu
        half, most, last = (
            sum(reached[max(0, -int(-nodes * share) - 1)] for reached in times) / PUSHED for share in (0.5, 0.99, 1.0)
        )
        return Spread(
            nodes=nodes,
            half_seconds=round(half, 3),
            most_seconds=round(most, 3),
            all_seconds=round(last, 3),
            hops_to_most=round(most / (COLLECT + LATENCY), 2),
            bytes_per_node=round(sent / nodes / PUSHED, 1),
            cpu_seconds_per_node=round(cpu / nodes / PUSHED, 6),
        )

    return run_with_nursery(main)


def logarithm(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """a and b of y = a + b·log2(x)."""
    b, a = np.polyfit(np.log2(xs), ys, 1)
    return float(a), float(b)


def power(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """a and b of y = a·x^b."""
    b, a = np.polyfit(np.log(xs), np.log(ys), 1)
    return float(np.exp(a)), float(b)


def say(kind: str, results: Iterable[Repair | Spread]) -> None:
    for result in results:
        print(json.dumps({"bench": kind, **asdict(result)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plots", type=Path, help="folder to draw into")
    parser.add_argument("--quick", action="store_true", help="the two smallest of each, for a look")
    options = parser.parse_args()
    most = 1 if options.quick else 5
    by_nodes = [repair(n, 1_000, 100) for n in (60, 125, 250, 500, 1_000, 2_000)[: most + 1]]
    say("repair by nodes", by_nodes)
    by_records = [repair(32, r, 100) for r in (1_000, 3_000, 10_000, 30_000, 100_000)[: most + 1]]
    say("repair by records", by_records)
    by_differences = [repair(32, 10_000, d) for d in (10, 30, 100, 300, 1_000)[: most + 1]]
    say("repair by differences", by_differences)
    spreads = [spread(n) for n in (25, 50, 100, 200, 400)[: most + 1]]
    say("push by nodes", spreads)
    fits = {
        "rounds by nodes": logarithm([r.nodes for r in by_nodes], [r.rounds for r in by_nodes]),
        "cpu by nodes": power([r.nodes for r in by_nodes], [r.cpu_seconds_per_node for r in by_nodes]),
        "bytes by nodes": power([r.nodes for r in by_nodes], [r.bytes_per_node for r in by_nodes]),
        "bytes by records": power([r.records for r in by_records], [r.bytes_per_node for r in by_records]),
        "cpu by records": power([r.records for r in by_records], [r.cpu_seconds_per_node for r in by_records]),
        "bytes by differences": power(
            [r.differences for r in by_differences], [r.bytes_per_node for r in by_differences]
        ),
        "seconds to 99 % by nodes": logarithm([s.nodes for s in spreads], [s.most_seconds for s in spreads]),
    }
    print(json.dumps({"bench": "fits", **{name: [round(v, 4) for v in fit] for name, fit in fits.items()}}))
    if options.plots is not None:
        draw(options.plots / "state-convergence.svg", by_nodes, by_records, by_differences, spreads, fits)


def draw(
    file: Path,
    by_nodes: Sequence[Repair],
    by_records: Sequence[Repair],
    by_differences: Sequence[Repair],
    spreads: Sequence[Spread],
    fits: dict[str, tuple[float, float]],
) -> None:
    """Six plots with what was measured, as dots, and the fitted growth, as lines."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "state-convergence"}):
        figure = Figure(figsize=(14, 7.5), layout="constrained")
        ((first, second, third), (fourth, fifth, sixth)) = figure.subplots(2, 3)
        xs = np.geomspace(by_nodes[0].nodes, by_nodes[-1].nodes)
        a, b = fits["rounds by nodes"]
        first.semilogx([r.nodes for r in by_nodes], [r.rounds for r in by_nodes], "o", base=2)
        first.semilogx(xs, a + b * np.log2(xs), "-", base=2, label=f"{a:.1f} + {b:.2f} log2 n")
        first.set(title="Repair alone: rounds until all are equal", xlabel="nodes", ylabel="rounds")
        for axes, results, name, label in (
            (second, by_records, "bytes by records", "records"),
            (third, by_differences, "bytes by differences", "differences"),
        ):
            sizes = [getattr(r, label) for r in results]
            a, b = fits[name]
            xs = np.geomspace(sizes[0], sizes[-1])
            axes.loglog(sizes, [r.bytes_per_node / 1024 for r in results], "o")
            axes.loglog(xs, a * xs**b / 1024, "-", label=f"grows as {label}^{b:.2f}")
            baseline = [r.all_ids_bytes_per_node / 1024 for r in results]
            axes.loglog(sizes, baseline, "x--", color="grey", label="all ids, each time")
            axes.set(title="Repair: bytes a node until all are equal", xlabel=label, ylabel="KiB a node")
        xs = np.geomspace(spreads[0].nodes, spreads[-1].nodes)
        a, b = fits["seconds to 99 % by nodes"]
        for label, values in (
            ("half of the nodes", [s.half_seconds for s in spreads]),
            ("99 %", [s.most_seconds for s in spreads]),
            ("all", [s.all_seconds for s in spreads]),
        ):
            fourth.semilogx([s.nodes for s in spreads], values, "o", base=2, label=label)
        fourth.semilogx(xs, a + b * np.log2(xs), "-", base=2, label=f"99 %: {a:.2f} + {b:.2f} log2 n")
        fourth.set(title="Push, 5 % lost: seconds until a record is there", xlabel="nodes", ylabel="seconds")
        for axes, results, label in ((fifth, by_nodes, "nodes"), (sixth, by_records, "records")):
            sizes = [getattr(r, label) for r in results]
            a, b = fits[f"cpu by {label}"]
            xs = np.geomspace(sizes[0], sizes[-1])
            axes.loglog(sizes, [1000 * r.cpu_seconds_per_node for r in results], "o")
            axes.loglog(xs, 1000 * a * xs**b, "-", label=f"grows as {label}^{b:.2f}")
            axes.set(title="Repair: CPU a node until all are equal", xlabel=label, ylabel="ms a node")
        for axes in (first, second, third, fourth, fifth, sixth):
            axes.grid(alpha=0.3)
            axes.legend()
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)


if __name__ == "__main__":
    main()
