"""Five nodes join a swarm of four at once, with a model of 50 M parameters: who is in step when, and who pays for it.

    python bench/joiners.py [--method diloco|open] [--joiners 5] [--members 4] [--parameters 50] [--seconds 30]

Real nodes on loopback. Their task (tests/support/wide_task.py) has large matrices and sleeps through most of a step, as
a node does whose accelerator computes: on two cores, nine nodes that train in earnest would slow one another whatever
the protocol does. Memory: about 2 GB a node at 25 M parameters, 18 GB in all. After `--before` rounds all joiners start
at the same moment; the rounds that end from then until the last of them has ended a round are those `during` which they
join.

Lines: `begun`; `round` for each member and round; `joined` for each joiner; last `summary`: `rounds_to_step`, the
rounds that members ended without a joiner from the moment at which it was ready (its trainer had started), the median
time of members' rounds before and during, `slower`, and the most memory that a daemon and a trainer had. The target is
2 rounds and 0.15; `failed` names what was missed, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path += [str(SUPPORT), str(SUPPORT.parent / "netlab")]

from realnodes import Node, agree, peak_mib  # noqa: E402 (found in the folders above)
from realswarm import Site, node_at, peer_id_at, run_file, write_text  # noqa: E402

TASK = f"{SUPPORT / 'wide_task.py'}:Wide"
WIDTH = 2048  # parameters of a matrix: its square
STEPS = 4  # a round
TEXT = 100_000  # bytes; a run has a held-out part, though this task reads none
PATIENCE = 600.0  # s for anything
CODECS = {"diloco": "int8", "open": "topk"}


def when(node: Node, kind: str) -> float:
    """The time.monotonic() at which the first event of a kind came."""
    node.wait_for(kind, within=PATIENCE)
    return node.timed(kind)[0][0]


def tables(options: argparse.Namespace, validators: list[str]) -> dict[str, dict[str, Any]]:
    """The run: layers × width² parameters, and steps that sleep."""
    trust = {"trust": {"validators": validators}} if options.method == "open" else {}
    layers = max(1, round(1e6 * options.parameters / WIDTH**2))
    return {
        "run": {"name": "joiners", "seed": 1, "trust": "open" if options.method == "open" else "known"},
        "task": {"name": "wide"},
        "data": {"source": "local"},
        "model": {"layers": layers, "heads": 1, "width": WIDTH, "context": round(1000 * options.seconds / STEPS)},
        "inner": {"batch": 1, "steps": STEPS},
        "exchange": {"method": options.method, "codec": CODECS[options.method]},
        **trust,
    }


def say(what: str, **more: Any) -> None:
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in more.items()}
    print(json.dumps({"bench": "joiners", "what": what, **rounded}), flush=True)


def note(began: float, text: str) -> None:
    """For people."""
    print(f"{(time.monotonic() - began) / 60:5.1f} min  {text}", file=sys.stderr, flush=True)


def summary(members: list[Node], joiners: list[Node], started: float, options: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    in_step = max(when(joiner, "round") for joiner in joiners)
    rounds = {
        part: [
            event["seconds"]
            for member in members
            for at, event in member.timed("round")
            if event["round"] > 0 and began < at <= ended
        ]
        for part, began, ended in (("before", 0.0, started), ("during", started, in_step))
    }
    told = [timed for member in members for timed in member.timed("round")]
    ends = {r: min(at for at, event in told if event["round"] == r) for r in _told(members)}
    waits = []
    for number, joiner in enumerate(joiners):
        ready, first = when(joiner, "ready"), when(joiner, "round")
        waits.append(sum(end > ready for r, end in ends.items() if r < joiner.timed("round")[0][1]["round"]))
        fetched = [at - started for at, _ in joiner.timed("caught_up")]
        say(
            "joined",
            node=number,
            caught_up_s=[round(at, 3) for at in fetched],
            ready_s=ready - started,
            in_step_s=first - started,
        )
    before, during = median(rounds["before"]), median(rounds["during"])
    shared = agree(*members, *joiners)
    checks = {"rounds_to_step": max(waits) <= 2, "slower": during / before <= 1.15, "parity": shared > 0}
    return {
        "method": options.method,
        "members": len(members),
        "joiners": len(joiners),
        "parameters": members[0].ready["parameters"],
        "rounds_to_step": waits,
        "in_step_s": in_step - started,
        "before_s": before,
        "during_s": during,
        "slowest_during_s": max(rounds["during"]),
        "rounds_before": len(rounds["before"]),
        "rounds_during": len(rounds["during"]),
        "slower": during / before - 1,
        "shared_states": shared,
        "daemon_peak_mib": max(peak_mib(each.ready["pid"]) for each in (*members, *joiners)),
        "trainer_peak_mib": max(peak_mib(each.ready["trainer_pid"]) for each in (*members, *joiners)),
        "load": [round(load, 1) for load in os.getloadavg()],
        "failed": [name for name, held in checks.items() if not held],
    }


def _told(nodes: list[Node]) -> set[int]:
    return {event["round"] for node in nodes for _, event in node.timed("round")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Nodes join a swarm at once; when they are in step, and who pays.")
    parser.add_argument("--method", choices=tuple(CODECS), default="diloco")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--joiners", type=int, default=5)
    parser.add_argument("--parameters", type=float, default=50.0, help="millions")
    parser.add_argument("--seconds", type=float, default=30.0, help="training of a round")
    parser.add_argument("--before", type=int, default=4, help="rounds before they join; the first does not count")
    parser.add_argument("--nice", type=int, default=10, help="of the trainers, as a node has it by default")
    parser.add_argument("--after", type=int, default=1, help="rounds after all are in step")
    parser.add_argument("--keep", type=Path, help="folder below which logs and data directories stay")
    options = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as stack:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="joiners-", dir=options.keep))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarmnode-joiners-")))
        homes = [folder / f"node-{number}" for number in range(options.members + options.joiners)]
        sites = [Site.here() for _ in homes]
        peers = [peer_id_at(home) for home in homes]
        text = write_text(folder / "text", TEXT)
        run = run_file(folder / "run.toml", tables(options, peers[: options.members]))
        join = sites[0].multiaddr(peers[0])

        def node(number: int) -> Node:
            first = (run, "--wait-peers", str(options.members - 1), "--wait-seconds", "120")
            what = ("--join", join) if number else first
            what = (*what, "--task", TASK, "--data", "local", "--nice", str(options.nice))
            return stack.enter_context(node_at(sites[number], homes[number], *what, corpus=text))

        members = [node(0)]
        when(members[0], "ready")
        members += [node(number) for number in range(1, options.members)]
        for member in members:
            when(member, "ready")
        say("begun", folder=str(folder), parameters=members[0].ready["parameters"])
        note(began, f"{options.members} members are ready")
        for member in members:
            last = options.before
            member.wait_for("round", lambda event, last=last: event["round"] >= last, within=PATIENCE)
        note(began, f"{options.before} rounds done; {options.joiners} nodes join")
        started = time.monotonic()
        joiners = [node(options.members + number) for number in range(options.joiners)]
        for joiner in joiners:
            when(joiner, "round")
        note(began, "all are in step")
        last = max(_told(members)) + options.after
        for each in (*members, *joiners):
            each.wait_for("round", lambda event: event["round"] >= last, within=PATIENCE)
        for number, member in enumerate(members):
            for at, event in member.timed("round"):
                kept = {key: event[key] for key in ("round", "seconds", "compute_seconds", "members", "outcome")}
                say("round", node=number, at=at - started, **kept)
        told = summary(members, joiners, started, options)
        say("summary", **told)
    return 1 if told["failed"] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything that was started, as Ctrl-C does
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
