"""python tests/netlab [NAME ...]: everything in full, some 30 minutes; prints and writes the tables of docs/nat.md.

NAME is matrix, the beginning of a topology's name, or one of upgrade, relay, flood, idle, forgets, memory, training,
restart; without any, all are run and the page is written. Needs root and the packages that `lab.py` names.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import matrix
import promises
from agents import Relay, relays
from lab import Lab, why_not
from promises import Finding
from topologies import HOME_LINK, TOPOLOGIES, Row, Topology, middle, most, placed, rate, try_to_meet

import training

PAGE = Path(__file__).parents[2] / "docs" / "nat.md"
MARK = "<!-- written by make netlab -->"
PAIRS = 4  # that settle at the same time, each with fresh identities and ports
ATTEMPTS = 4  # in a topology
PASSES = 3  # of the matrix: attempts of each kind against each, either way
RELAYED_WITHIN = 3.0  # s
RATED = 8_000_000  # bytes

HEAD = "| A–B | attempts | connected | direct | over UDP | punching packets | s to connect | s to direct | Mbit/s | |\n"
HEAD += 10 * "|---" + "|\n"


def row(lab: Lab, known: list[Relay], topology: Topology, folder: Path) -> Row:
    """All attempts in a topology, then the rate of its last pair."""
    found = Row(topology)
    pairs = PAIRS if topology.many else 1
    with placed(lab, topology, folder, HOME_LINK, pairs) as agents:
        while len(found.attempts) < ATTEMPTS:
            found.attempts += try_to_meet(topology, agents, known)
        if found.attempts[-1].path:
            found.rate = rate(*agents[-1], size=RATED)
    return found


def verdict(found: Row) -> str:
    """Whether the row is what it must be, and if not, why."""
    wrong = [a.why for a in found.attempts if a.why]
    attempts = len(found.attempts)
    if found.connected < attempts:
        wrong.append(f"{attempts - found.connected} did not connect")
    if found.topology.direct and found.went_direct < attempts:
        wrong.append(f"{attempts - found.went_direct} are not direct")
    if not found.topology.direct and (most([a.connected for a in found.attempts]) or 0.0) > RELAYED_WITHIN:
        wrong.append(f"relayed after more than {RELAYED_WITHIN:g} s")
    return "FAILS: " + "; ".join(dict.fromkeys(wrong)) if wrong else "passes"


def line(found: Row) -> str:
    """A line of the table."""
    connect, direct = [a.connected for a in found.attempts], [a.direct for a in found.attempts]
    cells = [
        found.topology.name,
        str(len(found.attempts)),
        str(found.connected),
        str(found.went_direct),
        str(found.over_udp),
        str(max(a.packets for a in found.attempts)),
        _times(connect),
        _times(direct),
        f"{found.rate:.0f}" if found.rate is not None else "–",
        verdict(found),
    ]
    return f"| {' | '.join(cells)} |\n"


def _times(values: Sequence[float | None]) -> str:
    """Median and worst."""
    usual, worst = middle(values), most(values)
    return f"{usual:.2f}, at most {worst:.2f}" if usual is not None and worst is not None else "–"


def main(names: list[str]) -> int:
    if (reason := why_not()) is not None:
        print(f"no network laboratory here: {reason}", file=sys.stderr)
        return 1
    failed = False
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="netlab-")))
        lab = stack.enter_context(Lab())
        known = stack.enter_context(relays(lab, folder))

        def fresh(name: str) -> Path:
            place = folder / name.replace(" ", "-")
            place.mkdir()
            return place

        def chosen(name: str) -> bool:
            return not names or any(name.startswith(wanted) for wanted in names)

        pairs = ""
        if chosen("matrix"):
            shifts = PASSES * tuple(range(len(matrix.KINDS)))
            found_of = matrix.collect(matrix.rounds(lab, fresh("matrix"), known, shifts))
            pairs = matrix.page(found_of)
            failed |= not matrix.holds(found_of)
            print(pairs, flush=True)

        table = HEAD
        print(table, end="", flush=True)
        for topology in filter(lambda topology: chosen(topology.name), TOPOLOGIES):
            if (reason := why_not(*topology.programs)) is not None:
                table += f"| {topology.name} | 0 | – | – | – | – | – | not tried: {reason} |\n"
            else:
                found = row(lab, known, topology, fresh(topology.name))
                failed |= verdict(found) != "passes"
                table += line(found)
            print(table.splitlines()[-1], flush=True)

        promised: dict[str, Callable[[], list[Finding]]] = {
            "upgrade": lambda: [promises.upgrade(lab, fresh("upgrade"), known)],
            "relay": lambda: [promises.lost_relay(lab, fresh(how), silently=how == "cut") for how in ("kill", "cut")],
            "flood": lambda: [promises.flood(lab, fresh("flood"), known)],
            "idle": lambda: [promises.idle(lab, fresh("idle"), known)],
            "forgets": lambda: [promises.forgotten(lab, fresh("forgets"), known)],
            "memory": lambda: [promises.memory(known)],
            "training": partial(training.findings, lab, folder / "training"),
            "restart": lambda: [training.router_restarts(lab, folder / "restart")],
        }
        told = "\n| promise | measured | |\n|---|---|---|\n"
        print(told, end="", flush=True)
        for name, find in promised.items():
            for finding in find() if chosen(name) else ():
                failed |= not finding.holds
                told += f"| {finding.promise} | {finding.measured} | {'passes' if finding.holds else 'FAILS'} |\n"
                print(told.splitlines()[-1], flush=True)
    if not names:
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        before, _, rest = PAGE.read_text().partition(f"{MARK}\n")
        after = rest.partition(f"{MARK}\n")[2]
        machine = f"\n{os.cpu_count()} cores shared by everything; load {load} at the end.\n"
        PAGE.write_text(f"{before}{MARK}\n{pairs}\n{table}{told}{machine}{MARK}\n{after}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
