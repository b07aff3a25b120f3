"""The open exchange in simulated swarms of many nodes, with churn: whether every round ends, and what it costs.

    python bench/open_sim.py --nodes 64 --rounds 100 --churn 0.2 [--seed 0]
    python bench/open_sim.py --nodes 64 --rounds 100 --churn 0

JSON lines: one a round, then a summary. All nodes are whole sessions on the simulated network, on virtual time; what is
not real is the model (a quadratic bowl), the frames of calls, and that what follows from the same bytes alone is
computed once for all nodes of the process (`tests/support/churn.py`, `straightcalls.py`). `churn` is the share of nodes
to which something happens in each round: two fifths of it join, half of whom come back with the identity that they had,
and a fifth each leaves, dies, and freezes for two rounds.

`bytes` are those that the average node sent in the round, by what they carry. Contributions grow with the model and all
else does not: `bytes_at_10M` has them as they would be with ten million parameters. `hashes` counts different hashes of
the round among nodes that run and are not frozen, `told` those of these nodes that told its end; `late_hashes` in the
summary are rounds of which different hashes were told by those who are there at the end of the run. Frozen nodes here
are cut off rather than stopped, and end rounds by themselves meanwhile: what they told of these stays told.
`late_histories` are the rounds that ended by different rosters in the histories on which those who are there stand.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import trio

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from churn import Churn, ChurnSwarm, one_answer_for_all
from straightcalls import Counts, straight_calls

from swarmnode.testing.simnet import run_with_nursery
from swarmnode.training.codecs import codec

MODEL = 10_000_000  # parameters for which bytes are told as well
STALLED = 600.0  # virtual seconds after which a round is said not to end
GARBAGE_AFTER = 100_000  # objects; a swarm has millions, and looking at all of them often takes most of the time


async def simulate(options: argparse.Namespace, counts: Counts, nursery: trio.Nursery) -> dict[str, Any]:
    """All rounds, told as they end; the summary."""
    swarm = ChurnSwarm(
        nursery,
        options.nodes,
        options.validators or min(16, options.nodes),
        options.parameters,
        seed=options.seed,
        participants=options.participants,
        window=options.window,
    )
    share = codec("topk").encoded_size(MODEL) / codec("topk").encoded_size(options.parameters)
    began = time.process_time()
    await swarm.begin()
    print(json.dumps({"bench": "begun", "cpu_seconds": round(time.process_time() - began, 1)}), flush=True)
    churn, told = Churn.of(options.churn), list[dict[str, Any]]()
    ended = True
    for _ in range(options.rounds):
        before, began = Counter(counts), time.process_time()
        sent = swarm.sent()
        try:
            found = await swarm.next_round(within=STALLED)
        except trio.TooSlowError:
            ended = False
            break
        carried = {name: (size - before[name]) / found.living for name, size in counts.items()}
        total = (swarm.sent() - sent) / found.living
        carried["rest"] = total - sum(carried.values())
        contributions = carried.get("contributions", 0.0)
        told.append(
            {
                **asdict(found),
                "validators": swarm.validators_there(),
                "bytes": {name: round(size) for name, size in sorted(carried.items()) if round(size)},
                "bytes_total": round(total),
                "bytes_at_10M": round(total + (share - 1) * contributions),
                "cpu_seconds": round(time.process_time() - began, 2),
            }
        )
        print(json.dumps({"bench": "round", "nodes": options.nodes, **told[-1]}), flush=True)
        await swarm.churn(churn)
    summary = summarised(options, swarm, told, ended)
    return summary


def summarised(
    options: argparse.Namespace, swarm: ChurnSwarm, told: list[dict[str, Any]], ended: bool
) -> dict[str, Any]:
    rounds = [each["round"] for each in told]
    steady = told[len(told) // 4 :] or told
    names = sorted({name for each in steady for name in each["bytes"]})
    return {
        "bench": "open_sim",
        **{name: getattr(options, name) for name in ("nodes", "rounds", "churn", "seed", "parameters", "participants")},
        "every_round_ended": ended,
        "rounds_told": len(told),
        "empty_rounds": sum(each["members"] == 0 for each in told),
        "forked_when_told": sum(each["hashes"] > 1 for each in told),
        "late_hashes": [round for round in rounds if swarm.look_at(round).hashes > 1],
        "late_histories": [round for round in rounds if swarm.histories(round) > 1],
        "loss": round(told[-1]["loss"], 5) if told else math.nan,
        "seconds_median": round(median(each["seconds"] for each in told), 2) if told else math.nan,
        "seconds_most": round(max(each["seconds"] for each in told), 2) if told else math.nan,
        "members_mean": round(mean(each["members"] for each in told), 1) if told else math.nan,
        "happened": swarm.happened,
        "bytes": {name: round(mean(each["bytes"].get(name, 0) for each in steady)) for name in names},
        "bytes_total": round(mean(each["bytes_total"] for each in steady)) if steady else 0,
        "bytes_at_10M": round(mean(each["bytes_at_10M"] for each in steady)) if steady else 0,
        "cpu_seconds_a_round": round(mean(each["cpu_seconds"] for each in told), 2) if told else math.nan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the open exchange in simulated swarms")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--churn", type=float, default=0.0, help="share of the nodes in each round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validators", type=int, default=0, help="genesis validators; by default 16, or all if fewer")
    parser.add_argument("--participants", type=int, default=64, help="contributions aimed at in a round")
    parser.add_argument("--parameters", type=int, default=16_384)
    parser.add_argument("--window", type=float, default=2.0, help="virtual seconds of a round's training")
    options = parser.parse_args()
    gc.set_threshold(GARBAGE_AFTER, 50, 50)
    with one_answer_for_all(), straight_calls() as counts:
        summary = run_with_nursery(simulate, options, counts, seed=options.seed)
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
