"""`swarmnode netcheck`: how peers reach this node, through what kind of NAT, and what to do about each problem."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swarmnode.cli.options import DataDirOption, JsonOption, directory, print_json
from swarmnode.cli.status_view import REACHABILITY, short_peer
from swarmnode.cli.text import colours, plain, size, style
from swarmnode.node.control.client import ControlClient

LABEL = 14  # characters of a line's label

NAT = {
    "none": "none: this machine's own address is seen from outside",
    "endpoint-independent": "endpoint-independent (a cone): holes can be punched through it",
    "address-dependent": "address-dependent (symmetric): holes cannot be punched to others like it",
    "unknown": "not known: fewer than two peers outside have looked",
}


FILTERING = {
    "open": "open: who dials this node gets through",
    "port-dependent": "port-dependent: only answers from where this node sent something come in",
    "unknown": "not known: nobody has dialled back yet",
}


def netcheck(data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Tell how peers reach this node, and what to do about each problem.

    The running node has found it out and goes on doing so; this asks nobody else.
    """
    answer = ControlClient(directory(data_dir)).call("netcheck", timeout=10.0)
    if json_output:
        print_json(answer)
    else:
        print(render(answer, colour=colours()))


def render(answer: dict[str, Any], *, colour: bool = False) -> str:
    """The text for a `netcheck` answer, without a closing newline."""
    lines = []
    for label, texts in _facts(answer):
        for number, text in enumerate(texts or ["none"]):
            lines.append(style(("" if number else label).ljust(LABEL), "dim", on=colour) + plain(text, 240))
    if not answer["problems"]:
        return "\n".join([*lines, "", style("nothing to mend", "green", on=colour)])
    for problem in answer["problems"]:
        lines += ["", style(plain(f"! {problem['problem']}", 240), "yellow", on=colour)]
        lines.append(f"  {plain(problem['advice'], 240)}")
    return "\n".join(lines)


def _facts(answer: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    reached, failed = answer["reached_by"], answer["failed_for"]
    tried = (
        f"{reached + failed} host{'' if reached + failed == 1 else 's'} tried to dial in lately, {reached} got through"
    )
    yield "reachability", [REACHABILITY.get(answer["reachability"], answer["reachability"]), tried]
    yield "listens on", [_place(address) for address in answer["listens"]]
    yield "announces", [_place(address) for address in answer["announces"]]
    yield "seen at", [_place(place) for place in answer["observed"]] or ["not known yet"]
    yield "NAT", [NAT.get(answer["nat"], answer["nat"])]
    yield "filtering", [FILTERING.get(answer["filtering"], answer["filtering"])]
    mapping = answer["port_mapping"]
    yield (
        "port mapping",
        [f"{mapping['address']}, by {mapping['way']}" if mapping["way"] else f"none: {mapping['state']}"],
    )
    yield "relays", [f"{short_peer(r['peer_id'])}  {_milliseconds(r['rtt_ms'])}" for r in answer["relays"]]
    peers = answer["peers"]
    punched = f"; {answer['punched']} of {answer['punched'] + answer['not_punched']} holes punched"
    yield "peers", [f"{peers['connected']} connected: {peers['direct']} direct, {peers['relayed']} relayed{punched}"]
    rates = answer["rates"]
    yield (
        "rate",
        [
            f"now in {size(rates['in'])}/s, out {size(rates['out'])}/s; "
            f"at the most in {size(rates['most_in'])}/s, out {size(rates['most_out'])}/s"
        ],
    )
    serves = answer["serves"]
    yield (
        "relays for",
        [f"{serves['reservations']} peers, {serves['circuits']} circuits now, {size(serves['bytes'])} so far"],
    )


def _place(address: str) -> str:
    """An address short enough to read: the relay's name for one through a relay."""
    place, circuit, _ = address.partition("/p2p-circuit")
    place, _, relay = place.partition("/p2p/")
    return f"{place} through {short_peer(relay)}" if circuit else place


def _milliseconds(rtt: float | None) -> str:
    return "not measured yet" if rtt is None else f"{rtt:.0f} ms"
