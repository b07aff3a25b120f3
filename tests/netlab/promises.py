"""What has to hold behind NATs beside being connected: upgrades, lost relays, floods, silence, forgetting.

Each function builds what it needs in a laboratory with running relays, and returns what it measured.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents import Agent, Relay, relays
from lab import FORGETS_AFTER, Lab
from topologies import CONE_CONE, HOME_LINK, MIB, PUBLIC, SETTLE, SYMMETRIC, Topology, pair, placed, rate, try_to_meet

UPGRADED = 64_000_000  # bytes of the transfer during which the connection becomes direct
BACK = 10.0  # s after a relay was killed
BACK_UNTOLD = 20.0  # s after one was cut off: a connection is given up after 8 to 16 s of silence
IDLE = 60.0  # s
FLOODED = 400  # requests of one peer
QUIET = 45.0  # s without a word, longer than a forgetful NAT remembers


@dataclass(frozen=True)
class Finding:
    """One promise, and what was seen of it."""

    promise: str
    measured: str
    holds: bool


def upgrade(lab: Lab, folder: Path, known: list[Relay]) -> Finding:
    """A transfer that begins over a relay and ends directly, with calls beside it; and one between public nodes."""
    with placed(lab, PUBLIC, folder, HOME_LINK) as pairs:
        try_to_meet(PUBLIC, pairs, known)
        baseline = rate(*pairs[0], size=UPGRADED)
    with placed(lab, CONE_CONE, folder, HOME_LINK) as pairs:
        [(a, b)] = pairs
        attempt = _connected(CONE_CONE, a, b, known, direct_within=0.0)
        offered = a.do("offer", size=UPGRADED)
        before = sum(sum(relay.host.bytes_through()) for relay in known)
        calls = b.ask("calls_while", peer=a.peer, seconds=5.0)
        came = b.do("fetch", peer=a.peer, size=UPGRADED, patience=300.0)
        carried = (sum(sum(relay.host.bytes_through()) for relay in known) - before) / 2  # it comes in and goes out
        called = b.answer(calls)
        served = a.do("called")["calls"]
    began_relayed = attempt["first"] == "relayed"
    direct = [(at, done) for at, done, path in came["progress"] if path == "direct"]
    settled = [(at, done) for at, done in direct if at > direct[0][0] + 2.0] if direct else []
    after = 0.0
    if len(settled) > 1:
        after = 8e-6 * (settled[-1][1] - settled[0][1]) / (settled[-1][0] - settled[0][0])
    whole = came["digest"] == offered["digest"] and came["size"] == UPGRADED
    more = came["bytes_in"] / UPGRADED - 1
    return Finding(
        "64 MB across the upgrade: whole, at most 3 % more on the wire, no call lost, then 0.8 × a public pair",
        f"{'whole' if whole else 'NOT WHOLE'}, {carried / 1e6:.1f} MB through relays, {100 * more:.1f} % more "
        f"received than fetched, {called['asked']} calls, {len(called['failures'])} failed, {served} served; "
        f"{after:.1f} Mbit/s after it, {baseline:.1f} between public nodes: {after / baseline:.2f} ×",
        whole
        and began_relayed
        and carried < UPGRADED / 4
        and more < 0.03
        and not called["failures"]
        and served == called["asked"]
        and after >= 0.8 * baseline,
    )


def lost_relay(lab: Lab, folder: Path, *, silently: bool) -> Finding:
    """The relay that carries a circuit is killed, or its cable taken out; there are two more."""
    with relays(lab, folder, 3) as three, placed(lab, SYMMETRIC, folder) as pairs:
        [(a, b)] = pairs
        _connected(SYMMETRIC, a, b, three, direct_within=0.0)
        before = {relay.host.name: sum(relay.host.bytes_through()) for relay in three}
        rate(a, b, size=MIB)
        grown = {relay.host.name: sum(relay.host.bytes_through()) - before[relay.host.name] for relay in three}
        carrier = max(three, key=lambda relay: grown[relay.host.name])
        if silently:
            lab.cut(carrier.host)
        else:
            carrier.node.process.kill()
        again = b.ask("call", peer=a.peer, within=30.0)
        lost = carrier.node.ready["peer_id"]
        places = a.do("settle", states=["relayed"], relays=2, without=lost, within=30.0)
        answer = b.answer(again)
        lab.take_down(*(relay.host.name for relay in three))
    back, two = answer["seconds"], places["seconds"]
    told = f"{back:.1f} s" if back is not None else "not in 30 s"
    limit = BACK_UNTOLD if silently else BACK
    return Finding(
        f"a relay {'is cut off in silence' if silently else 'is killed'}: relayed nodes are back in {limit:g} s",
        f"called again after {told} and {len(answer['failures'])} failures, "
        f"{len(places['relays'])} places again after {two:.1f} s",
        back is not None and back <= limit and len(places["relays"]) == 2 and two <= limit,
    )


def flood(lab: Lab, folder: Path, known: list[Relay]) -> Finding:
    """One peer asks a relay for everything, while two others meet through that relay."""
    relay = known[0]
    name = relay.node.ready["peer_id"]
    with placed(lab, SYMMETRIC, folder) as pairs, Agent(lab.public("flooder"), folder / "flooder.log") as flooder:
        [(a, b)] = pairs
        flooder.start([relay.address])
        state = _prepare(SYMMETRIC, a, b, known)
        through = [address for address in state["addresses"] if name in address]
        flooding = flooder.ask("flood", relay=name, target=a.peer, times=FLOODED)
        time.sleep(0.5)
        came = b.do("connect", to=through, direct_within=0.0)
        fetched = rate(a, b, size=MIB) if came["path"] else 0.0
        answers = flooder.answer(flooding, within=120.0)["answers"]
        held = a.do("status")["relays"]
    refused = sum(count for status, count in answers.items() if status != "OK")
    connected = came.get("connected")
    return Finding(
        f"{FLOODED} requests of one peer for places and circuits: refused, and others are served",
        f"{refused} refused ({', '.join(f'{n} {status}' for status, n in sorted(answers.items()))}); meanwhile two "
        + (
            f"others met in {connected:.2f} s, {fetched:.0f} Mbit/s" if connected is not None else "others DID NOT MEET"
        ),
        refused >= 0.8 * FLOODED and connected is not None and connected <= 3.0 and name in held,
    )


def idle(lab: Lab, folder: Path, known: list[Relay]) -> Finding:
    """A private node with its places at relays and nothing to do."""
    with placed(lab, SYMMETRIC, folder) as pairs:
        [(a, _)] = pairs
        a.start([relay.address for relay in known])
        a.do("settle", states=["relayed"], relays=2, within=SETTLE)
        before = sum(a.host.bytes_through())
        time.sleep(IDLE)
        each = (sum(a.host.bytes_through()) - before) / IDLE
        held = len(a.do("status")["relays"])
    return Finding(
        "an idle private node sends and receives at most 1 kB/s",
        f"{each:.0f} B/s both ways together, with {held} places",
        each <= 1000 and held == 2,
    )


def forgotten(lab: Lab, folder: Path, known: list[Relay]) -> Finding:
    """Silence for longer than the NAT remembers."""
    topology = Topology("forgets", pair("forgetful", "forgetful"), direct=True)
    with placed(lab, topology, folder) as pairs:
        [(a, b)] = pairs
        came = _connected(topology, a, b, known, direct_within=8.0)
        time.sleep(QUIET)
        answer = b.do("call", peer=a.peer, within=30.0)
        held = len(a.do("status")["relays"])
    seconds = answer["seconds"]
    told = f"answered in {1000 * seconds:.0f} ms" if seconds is not None else "NOT ANSWERED in 30 s"
    return Finding(
        f"NATs that forget after {FORGETS_AFTER} s: after {QUIET:.0f} s of silence the connection still stands",
        f"{came['path']} before, {answer['path']} after, {told}, {len(answer['failures'])} failures, {held} places",
        seconds is not None and seconds < 1.0 and answer["path"] == came["path"] and held == 2,
    )


def memory(known: list[Relay]) -> Finding:
    """What relays have come to after everything before."""
    held = max(_resident(relay.node.process.pid) for relay in known)
    return Finding("`swarmnode run --role relay` takes at most 130 MB", f"{held / 1e6:.0f} MB", held <= 130e6)


def _prepare(topology: Topology, a: Agent, b: Agent, known: list[Relay]) -> dict[str, Any]:
    """Start both and let them settle; what A then is."""
    for agent in (a, b):
        agent.start([relay.address for relay in known])
    asked = [agent.ask("settle", states=list(topology.states), relays=2, within=SETTLE) for agent in (a, b)]
    state, _ = (agent.answer(number) for agent, number in zip((a, b), asked, strict=True))
    return state


def _connected(topology: Topology, a: Agent, b: Agent, known: list[Relay], *, direct_within: float) -> dict[str, Any]:
    """Both started, settled and connected; what came of connecting."""
    state = _prepare(topology, a, b, known)
    return b.do("connect", to=state["addresses"], direct_within=direct_within)


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    told = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert told is not None
    return 1024 * int(told[1])
