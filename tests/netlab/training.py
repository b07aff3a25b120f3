"""A swarm behind NATs trains as it does on loopback: the same held-out loss at equal rounds, and one state everywhere.

One public node that creates the run, two behind cones, two behind symmetric NATs, one behind two NATs, and a relay that
takes no part and is killed in the middle of a round. All have the keys that the nodes on loopback had.

And two nodes of which one is behind a router that opens its port, and restarts at another address between two rounds.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path

from agents import FLAGS, PORT, Agent, Relay
from lab import Host, Lab, Link
from promises import Finding
from realnodes import PROGRAM, Event, Node, agree

from swarmnode.training.runspec import load_runspec, to_toml

RUN = Path(__file__).parents[2] / "examples" / "byte-lm.toml"
NODES = 6
ROUNDS = 6  # compared
AFTER = 3  # rounds after the relay was killed
LINK = Link(delay=0.01, rate=100)
PATIENCE = 600.0  # s for a round; six trainers share the machine
CLOSE = 0.03  # of the loss: the order in which text arrives is not the same twice
RECOVERED = 10.0  # s
REACHABLE_AGAIN = 60.0  # s after a router is back with another address
CARRIED = 1e6  # bytes; more than identifying itself and holding places takes


def machines(lab: Lab) -> list[Host]:
    """Where the six nodes are; the first is public."""
    carrier = lab.nat("carrier", link=LINK)
    routers = [
        lab.nat(f"router{n}", kind, link=LINK) for n, kind in enumerate(("cone", "cone", "symmetric", "symmetric"))
    ]
    routers.append(lab.nat("inner", behind=carrier))
    return [lab.public("public", LINK), *(lab.private(f"node{n}", router) for n, router in enumerate(routers, 1))]


def losses(node: Node) -> dict[int, float]:
    """Held-out loss by round."""
    return {event["round"]: event["loss"] for event in list(node.events) if event["event"] == "round"}


def on_loopback(folder: Path, run: Path) -> list[dict[int, float]]:
    """The reference: the same nodes without a network between them."""
    with ExitStack() as stack:
        nodes: list[Node] = []
        for number in range(NODES):
            join = ("--join", nodes[0].ready["multiaddr"], "--run", nodes[0].ready["run_id"]) if nodes else ()
            more = join or (run, "--wait-peers", str(NODES - 1), "--wait-seconds", "120")
            nodes.append(Node(folder / f"loopback{number}", *more, "--rounds", str(ROUNDS), "--stay", corpus=None))
            stack.enter_context(nodes[-1])
        for node in nodes:
            node.wait_for("finished", within=PATIENCE)
        return [losses(node) for node in nodes]


def findings(lab: Lab, folder: Path) -> list[Finding]:
    folder.mkdir()
    run = folder / "run.toml"
    # one run, so that each node has the same text in both
    run.write_text(to_toml(load_runspec(RUN).updated(run={"nonce": "00"})))
    reference = on_loopback(folder, run)
    with ExitStack() as stack:
        hosts = machines(lab)
        relay = Relay(lab.public("helper"), folder / "helper")
        nodes: list[Node] = []
        for number, host in enumerate(hosts):
            home = folder / f"node{number}"
            home.mkdir(mode=0o700)
            shutil.copy2(folder / f"loopback{number}" / "identity.key", home)
            if nodes:
                join = f"/ip4/{hosts[0].address}/tcp/{PORT}/p2p/{nodes[0].ready['peer_id']}"
                more: tuple[str | Path, ...] = ("--join", join, "--run", nodes[0].ready["run_id"])
            else:
                stack.enter_context(relay.node)
                more = (run, "--join", relay.address, "--wait-peers", str(NODES - 1), "--wait-seconds", "180")
            more = (*more, "--rounds", str(ROUNDS + AFTER), "--stay")
            program = (*host.enter, str(PROGRAM))
            nodes.append(Node(home, *more, corpus=None, port=PORT, program=program, flags=(*FLAGS, "--no-mdns")))
            stack.enter_context(nodes[-1])
        for node in nodes:
            node.wait_for("round", lambda event: event["round"] == ROUNDS - 1, within=PATIENCE)
        kinds = [node.command_line("status")["reachability"] for node in nodes]
        paths = [peer["path"] for node in nodes for peer in node.command_line("peers")["peers"] if peer["member"]]
        carried = sum(relay.host.bytes_through()) / 2  # since its start; it comes in and goes out
        result = [_same(nodes, reference, kinds, paths), _relay_killed(nodes, relay, carried)]
    lab.take_down(*(name for name in lab.machines() if _ours(name)))
    return result


def router_restarts(lab: Lab, folder: Path) -> Finding:
    """Of two members one is behind a router that restarts; somebody new dials it, and the run goes on to its end."""
    folder.mkdir()
    run = folder / "run.toml"
    run.write_text(to_toml(load_runspec(RUN).updated(run={"nonce": "01"})))
    router = lab.nat("router", link=LINK)
    lab.upnp(router)
    hosts = [lab.public("public", LINK), lab.private("node", router)]
    with ExitStack() as stack:
        relay = Relay(lab.public("helper", LINK), folder / "helper")
        stack.enter_context(relay.node)
        nodes: list[Node] = []
        for number, host in enumerate(hosts):
            more: tuple[str | Path, ...] = (run, "--wait-peers", "1", "--wait-seconds", "120")
            if nodes:
                ready = nodes[0].wait_for("ready", within=PATIENCE)
                first = f"/ip4/{hosts[0].address}/tcp/{PORT}/p2p/{ready['peer_id']}"
                more = ("--join", first, "--run", ready["run_id"])
            more = (*more, "--join", relay.address, "--rounds", str(ROUNDS + AFTER), "--stay")
            program, flags = (*host.enter, str(PROGRAM)), (*FLAGS, "--no-mdns")
            nodes.append(Node(folder / f"node{number}", *more, corpus=None, port=PORT, program=program, flags=flags))
            stack.enter_context(nodes[-1])
        for node in nodes:
            node.wait_for("round", lambda event: event["round"] >= 1, within=PATIENCE)
        mapped = _announced(nodes[1], router.address, REACHABLE_AGAIN)
        seen = len(nodes[1].events)
        lab.restart(router)
        lab.upnp(router)
        began = time.monotonic()
        places = _announced(nodes[1], router.address, 2 * REACHABLE_AGAIN)
        told = time.monotonic() - began
        stranger = stack.enter_context(Agent(lab.public("helper-too", LINK), folder / "stranger.log"))
        stranger.start([])
        came = stranger.do("connect", to=places, direct_within=5.0) if places else {"path": None}
        dialled = time.monotonic() - began
        for node in nodes:
            node.wait_for("finished", within=PATIENCE)
        shared = agree(*nodes)
        ended = [event for event in nodes[1].events[seen:] if event["event"] == "round"]
    lab.take_down(*(name for name in lab.machines() if _ours(name)))
    missing = sum(len(event["missing"]) for event in ended)
    return Finding(
        "a router restarts at another address: its node is dialled anew in 60 s, and rounds go on",
        f"{'mapped before; ' if mapped else 'NOT MAPPED before; '}announced after {told:.1f} s, dialled by a stranger "
        f"after {dialled:.1f} s ({came['path']}); {len(ended)} rounds ended since, {missing} shares of work missing in "
        f"them, {shared} states told by both, all equal",
        bool(mapped) and came["path"] == "direct" and dialled <= REACHABLE_AGAIN and len(ended) >= AFTER,
    )


def _announced(node: Node, address: str, within: float) -> list[str]:
    """What the node tells others once that is at `address`; nothing where that does not come."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if there := [place for place in node.command_line("status")["addresses"] if address in place]:
            return there
        time.sleep(0.2)
    return []


def _ours(name: str) -> bool:
    return name.startswith(("carrier", "router", "inner", "public", "node", "helper"))


def _same(nodes: list[Node], reference: list[dict[int, float]], kinds: list[str], paths: list[str]) -> Finding:
    shared = agree(*nodes)
    here, there = losses(nodes[0]), reference[0]
    apart = max(abs(here[r] / there[r] - 1) for r in range(ROUNDS) if r in here and r in there)
    whole = sum(not event["missing"] for event in _rounds(nodes[0]) if event["round"] < ROUNDS)
    return Finding(
        "1 public and 5 NATed nodes train byte-lm as on loopback, all states equal",
        f"{', '.join(kinds)}; {paths.count('direct')} of {len(paths)} paths between members direct; loss after "
        f"{ROUNDS} rounds {here[ROUNDS - 1]:.3f}, on loopback {there[ROUNDS - 1]:.3f}, at most {100 * apart:.1f} % "
        f"apart in any; {shared} states told by several, all equal; nobody missing in {whole} of {ROUNDS} rounds",
        apart <= CLOSE and shared >= ROUNDS and kinds[0] == "public" and set(kinds[1:]) == {"relayed"},
    )


def _relay_killed(nodes: list[Node], relay: Relay, carried: float) -> Finding:
    """Kill the relay in the middle of a round; everybody must end it, and the next. It `carried` so many bytes before,
    without which its end would show nothing."""
    places = [relay.node.ready["peer_id"] in _peers(node) for node in nodes]
    seen = len(nodes[0].events)
    time.sleep(1.0)
    relay.node.process.kill()
    killed = time.monotonic()
    back: dict[int, float] = {}
    while time.monotonic() < killed + 3 * RECOVERED and len(back) < NODES:
        for number, node in enumerate(nodes):
            told = node.command_line("status")
            others = {other.ready["peer_id"] for other in nodes if other is not node}
            if number not in back and others <= _peers(node) and told["reachability"] != "private":
                back[number] = time.monotonic() - killed
    for node in nodes:
        node.wait_for("finished", within=PATIENCE)
    agree(*nodes)
    ended: list[Event] = [event for event in nodes[0].events[seen:] if event["event"] == "round"]
    missing = sum(len(event["missing"]) for event in ended)
    slowest = max(back.values(), default=0.0)
    return Finding(
        "the relay killed during a round: all members back in 10 s, the round completes, no work lost",
        f"it had carried {carried / 1e6:.1f} MB, and {sum(places)} members were connected to it; "
        f"{len(back)} of {NODES} connected to all others after at most {slowest:.1f} s; {len(ended)} rounds ended "
        f"since, {missing} shares of work missing in them",
        carried > CARRIED and len(back) == NODES and slowest <= RECOVERED and len(ended) >= AFTER and missing == 0,
    )


def _peers(node: Node) -> set[str]:
    """Whom it is connected to."""
    return {peer["peer_id"] for peer in node.command_line("peers")["peers"]}


def _rounds(node: Node) -> list[Event]:
    return [event for event in list(node.events) if event["event"] == "round"]
