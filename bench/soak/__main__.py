"""Eight real nodes train for two hours while something goes wrong every 2 s; JSON lines, and exit code 1 on a fault.

    python bench/soak [--minutes 120] [--method diloco|open] [--nodes 8] [--every 2] [--cpu 100] [--seed 0] [--keep DIR]

As root on Linux with iproute2, nftables, conntrack and ethtool each node has a network namespace and a file system of
its own, so that links can be cut and disks filled, and with libfaketime a clock; without, those strikes are left out,
which is said. Nodes 0 and 1 are frozen, cut and filled as all others, but never killed or restarted: on them growth is
measured, between the second quarter of the time and the last. At the end all is repaired, and all nodes must come into
step.

Lines: `begun`, `strike`, `repaired`, `died` (a node ended by itself), `look` every 10 s, and last `summary`, whose
`failed` names what did not hold. Standard error has a line for people every 10 s. What is checked:

- parity      all who tell a state of the same number tell the same hash; a node that is cut off and goes on alone until
              it is back is counted in `alone` and is no contradiction
- progress    the time in which no round of two nodes or more ended, and that in which a standing node told none
- growth      memory, descriptors, threads and tasks of daemons, and of their trainers
- logs        no traceback, no audit that finds a liar, no node that ends by itself or is too slow to end when asked
- the end     all nodes tell one common state after the last repair
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE), *(str(HERE.parents[1] / "tests" / folder) for folder in ("support", "netlab"))]

from faults import KINDS, Strike, schedule  # noqa: E402 (found in the folders above)
from history import History  # noqa: E402
from lab import Lab, why_not  # noqa: E402
from member import FAKETIME, Member, with_clock  # noqa: E402
from realnodes import Node  # noqa: E402
from realswarm import Site, node_at, peer_id_at, run_file, write_text  # noqa: E402
from resources import Held, grown, growth, look, peaks  # noqa: E402

SPARED = 2  # nodes that are never killed or restarted
DISK = {"diloco": 160, "open": 2400}  # MB of a node's file system: what a node asks for, and some
TEXT = 500_000  # bytes to train on
LOOK_EVERY = 10.0  # s
TICK = 0.2  # s
START_WITHIN = 600.0  # s until all nodes are ready
END_WITHIN = 20.0  # s for a node to leave in order
STAND_AGAIN = 2.0  # s until a node that ended by itself is started again
SETTLE_WITHIN = 120.0  # s after the last repair until all are in step
STALL = 60.0  # s without a round of the swarm, at the most
SILENCE = 90.0  # s without a round of a node that stands, at the most
AT_ONCE = 3  # nodes that are struck at a time, at the most; in `open` no third of all, or there is no quorum

MODEL = {"layers": 2, "heads": 2, "width": 64, "context": 64}
INNER = {"batch": 4, "steps": 60}


def run_tables(method: str, validators: list[str]) -> dict[str, dict[str, Any]]:
    """A small model; rounds of some seconds where six nodes share two cores."""
    trust = {"trust": {"validators": validators}} if method == "open" else {}
    return {
        "run": {"name": "soak", "seed": 1, "trust": "open" if method == "open" else "known"},
        "model": MODEL,
        "inner": INNER,
        "exchange": {"method": method, "deadline_floor": 3.0, "deadline_ceiling": 20.0},
        **trust,
    }


def say(event: str, began: float, **more: Any) -> None:
    print(json.dumps({"bench": "soak", "event": event, "at": round(time.monotonic() - began, 1), **more}), flush=True)


def disk(stack: ExitStack, home: Path, size: int) -> bool:
    """Give a node a small file system of its own, of `size` MB; False where that cannot be."""
    home.mkdir(mode=0o700, parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}m,mode=700", "swarmnode-soak", str(home)]
    if subprocess.run(command, capture_output=True).returncode:
        return False
    stack.callback(subprocess.run, ["umount", "-l", str(home)], capture_output=True)
    return True


def build(stack: ExitStack, folder: Path, options: argparse.Namespace, lab: Lab | None) -> list[Member]:
    """All nodes, none started."""
    sites = [Site.on(lab.public(f"n{n}")) if lab else Site.here() for n in range(options.nodes)]
    homes = [folder / f"node-{number}" for number in range(options.nodes)]
    mounted = [disk(stack, home, DISK[options.method]) for home in homes]
    peers = [peer_id_at(home) for home in homes]
    text = write_text(folder / "text", TEXT)
    run = run_file(folder / "run.toml", run_tables(options.method, peers))
    join, cpu = sites[0].multiaddr(peers[0]), str(options.cpu)

    def member(number: int) -> Member:
        def new_node() -> Node:
            first = (run, "--wait-peers", str(options.nodes - 1), "--wait-seconds", "120")
            what = ("--join", join) if number else first
            wrapper = with_clock(homes[number].with_suffix(".clock")) if FAKETIME.exists() else ()
            source = None if number else text
            return node_at(sites[number], homes[number], *what, "--cpu", cpu, corpus=source, wrapper=wrapper)

        return Member(number, sites[number], homes[number], new_node, mounted=mounted[number])

    return [member(number) for number in range(options.nodes)]


class Soak:
    """The time in which things go wrong; `run` and then `settle`."""

    def __init__(self, members: list[Member], lab: Lab | None, options: argparse.Namespace) -> None:
        self.members = members
        self.history = History()
        self.samples: list[list[Held]] = []
        self.strikes: Counter[str] = Counter()
        self.skipped = 0  # strikes that found nobody to meet
        self.died: list[dict[str, Any]] = []
        self.too_slow_to_end = 0
        self.longest_silence = 0.0  # s of a node that stands, without a round
        self.silent: dict[str, Any] = {}  # who that was
        self.began = time.monotonic()
        self._at_once = min(AT_ONCE, (len(members) - 1) // 3) if options.method == "open" else AT_ONCE
        self._lab = lab
        self._options = options
        self._read = [0] * len(members)  # events of the present life that were taken
        self._heard = [0.0] * len(members)  # when each was ready, or ended a round
        self._looked = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> None:
        """Strike, repair, listen and look, until the time is over."""
        kinds = [kind for kind in KINDS if kind != "cut" or self._lab is not None]
        if not any(member.mounted for member in self.members):
            kinds.remove("full")
        if not FAKETIME.exists():
            kinds.remove("clock")
        strikes = schedule(self._options.seed, len(self.members), kinds, self._options.every)
        coming = next(strikes)
        while self.now < 60 * self._options.minutes:
            if self.now >= coming.at:
                self._strike(coming)
                coming = next(strikes)
            self._tick()

    def settle(self) -> float | None:
        """Repair all, and wait until all are in step; how long that took, None where it was too long."""
        for member in self.members:
            member.repair_at = min(member.repair_at, time.monotonic())  # whoever leaves still has END_WITHIN for it
        self._tick()
        repaired = self.now
        settled = None
        while settled is None and self.now < repaired + SETTLE_WITHIN:
            self._tick()
            if self.history.in_step(len(self.members), repaired) is not None:
                settled = self.now - repaired
        self.history.end(self.now)
        return settled

    def _tick(self) -> None:
        self._repair()
        self._listen()
        if self.now >= self._looked + LOOK_EVERY:
            self._looked = self.now
            self._look()
        time.sleep(TICK)

    def _strike(self, strike: Strike) -> None:
        spared = range(SPARED)
        struck = sum(not member.stands for member in self.members)
        order = (self.members[number] for number in strike.order)
        fitting = (member for member in order if member.may_be(strike.kind, spared=member.number in spared))
        victim = next(fitting, None) if struck < self._at_once else None
        if victim is None:
            self.skipped += 1
            return
        victim.hit(strike, self._lab)
        self.strikes[strike.kind] += 1
        say("strike", self.began, kind=strike.kind, node=victim.number, seconds=round(strike.seconds, 1))

    def _repair(self) -> None:
        for member in self.members:
            if member.strike is None and not member.alive:
                code, tail = member.exit_code, member.tail()
                self.died.append({"node": member.number, "code": code, "at": round(self.now, 1), "log": tail})
                say("died", self.began, node=member.number, code=code, log=tail)
                member.strike = Strike(self.now, "died", (), 0.0)
                member.repair_at = time.monotonic() + STAND_AGAIN
            elif member.strike is not None and time.monotonic() >= member.repair_at:
                kind = member.strike.kind
                if kind == "restart" and member.alive:
                    if time.monotonic() < member.repair_at + END_WITHIN:
                        continue
                    member.wait(0.0)
                    self.too_slow_to_end += 1
                    say("slow", self.began, node=member.number, log=member.tail())
                life = member.lives
                member.repair(self._lab)
                if member.lives != life:
                    self._read[member.number] = 0
                say("repaired", self.began, kind=kind, node=member.number)

    def _listen(self) -> None:
        for number, member in enumerate(self.members):
            events = list(member.events)
            for event in events[self._read[number] :]:
                self.history.add(number, event, self.now)
                if event["event"] in ("ready", "round"):
                    self._heard[number] = self.now
            self._read[number] = len(events)
            last = max(self._heard[number], member.repaired - self.began)
            if member.stands and self.now - last > self.longest_silence:
                self.longest_silence = self.now - last
                self.silent = {"node": number, "at": round(self.now, 1)}

    def _look(self) -> None:
        held = look(self.members)
        self.samples.append(held)
        newest = {n: self.history.newest.get(n, (0, "", 0.0)) for n in range(len(self.members))}
        states = [f"{newest[n][0]}:{newest[n][1][:4]}" for n in newest]
        struck = {m.number: m.strike.kind for m in self.members if m.strike is not None}
        say(
            "look",
            self.began,
            furthest=self.history.furthest,
            states=states,
            struck=struck,
            held=[{k: round(v, 1) for k, v in asdict(h).items() if v is not None} for h in held],
        )
        memory = "/".join("-" if h.memory_mb is None else f"{h.memory_mb:.0f}" for h in held)
        print(
            f"{self.now / 60:5.1f} min  state {self.history.furthest:<5} {sum(self.strikes.values()):>4} strikes  "
            f"{len(self.history.contradictions())} contradictions  {len(self.died)} died  MB {memory}  {struck or ''}",
            file=sys.stderr,
            flush=True,
        )


def summary(soak: Soak, settled: float | None, codes: list[int | None], options: argparse.Namespace) -> dict[str, Any]:
    """The figures, and in `failed` what did not hold."""
    history = soak.history
    forks, contradictions = history.forks(), history.contradictions()
    elders = {n: growth([held[n] for held in soak.samples]) for n in range(SPARED)}
    tracebacks = [found for member in soak.members for found in member.tracebacks()]
    accusations = [found for member in soak.members for found in member.accusations()]
    checks = {
        "parity": not contradictions,
        "progress": history.longest_stall <= STALL and history.furthest > 0,
        "every node takes part": soak.longest_silence <= SILENCE,
        "no growth": not any(grown(elder) for elder in elders.values()),
        "no tracebacks": not tracebacks,
        "nobody is called a liar": not accusations,
        "nobody ends unasked": not soak.died,
        "all end when asked": not soak.too_slow_to_end and all(code == 0 for code in codes),
        "all in step at the end": settled is not None,
    }
    return {
        "minutes": options.minutes,
        "method": options.method,
        "nodes": options.nodes,
        "cpu": options.cpu,
        "seed": options.seed,
        "strikes": dict(sorted(soak.strikes.items())),
        "strikes_skipped": soak.skipped,
        "lives": [member.lives for member in soak.members],
        "states": history.furthest,
        "shared_states": history.shared(),
        "outcomes": history.outcomes,
        "alone": [number for number in forks if number not in contradictions],
        "contradictions": {
            str(number): {hash[:8]: [asdict(told) for told in by] for hash, by in forks[number].items()}
            for number in contradictions
        },
        "median_round_s": round(median(history.seconds), 2) if history.seconds else None,
        "longest_stall_s": round(history.longest_stall, 1),
        "stalled_at": history.stalled_at,
        "longest_silence_s": round(soak.longest_silence, 1),
        "silent": soak.silent,
        "growth": elders,
        "peaks": [peaks([held[n] for held in soak.samples]) for n in range(options.nodes)],
        "tracebacks": tracebacks[:20],
        "accusations": accusations[:20],
        "died": soak.died,
        "exit_codes": codes,
        "settled_s": round(settled, 1) if settled is not None else None,
        "load": [round(load, 1) for load in os.getloadavg()],
        "failed": [name for name, held in checks.items() if not held],
    }


def start_all(members: list[Member]) -> None:
    """Until all are ready and the first state was told."""
    members[0].start()
    give_up = time.monotonic() + START_WITHIN
    for member in members:
        if member.number:
            if member.number == 1:
                _wait(lambda: members[0].stands, members, give_up)
            member.start()
    _wait(lambda: all(member.stands for member in members), members, give_up)


def _wait(condition: Any, members: list[Member], give_up: float) -> None:
    while not condition():
        dead = next((member for member in members if member.lives and not member.alive), None)
        if dead is not None or time.monotonic() > give_up:
            who = dead or next(member for member in members if not member.stands)
            raise SystemExit(f"node {who.number} did not start:\n" + "\n".join(who.tail(12)))
        time.sleep(TICK)


@contextlib.contextmanager
def place(keep: Path | None) -> Iterator[Path]:
    """Where everything lies: below `keep`, or in a folder that is deleted afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="soak-", dir=keep))
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-soak-") as name:
        yield Path(name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Real nodes train while something goes wrong all the time.")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--method", choices=("diloco", "open"), default="diloco")
    parser.add_argument("--nodes", type=int, default=8, help="at least 4")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from strike to strike")
    parser.add_argument("--cpu", type=float, default=100.0, help="cap of each node, percent of all cores")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 31), help="of the strikes; drawn if not given"
    )
    parser.add_argument("--keep", type=Path, help="folder below which logs and data directories stay")
    options = parser.parse_args()
    if options.nodes < 4:
        parser.error("--nodes: at least 4, so that some stand while others are struck")
    with place(options.keep) as folder, ExitStack() as stack:
        reason = why_not()
        lab = stack.enter_context(Lab()) if reason is None else None
        if reason is not None:
            print(f"no links are cut, for no network laboratory can be built: {reason}", file=sys.stderr)
        members = build(stack, folder, options, lab)
        if not all(member.mounted for member in members):
            print("no disks are filled: file systems for it cannot be mounted (are you root?)", file=sys.stderr)
        if not FAKETIME.exists():
            print("no clocks are stepped: Debian's package libfaketime is not installed", file=sys.stderr)
        stack.callback(_end_all, members)
        start_all(members)
        soak = Soak(members, lab, options)
        say("begun", soak.began, folder=str(folder), seed=options.seed, method=options.method)
        soak.run()
        settled = soak.settle()
        codes = [member.end(END_WITHIN) for member in members]
        told = summary(soak, settled, codes, options)
        say("summary", soak.began, **told)
    return 1 if told["failed"] else 0


def _end_all(members: list[Member]) -> None:
    """After an error or Ctrl-C: nobody is left."""
    for member in members:
        if member.lives and member.alive:
            member.wait(0.0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything that was started, as Ctrl-C does
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
