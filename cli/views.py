"""How `swarmnode status` looks: the daemon's answer as at most 24 lines of at most 80 characters.

And how `swarmnode netcheck` looks. Built from plain values, so that a test reads it; `inspect` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from swarmnode.cli.terminal import (
    LEARNS_BY,
    bar,
    called,
    count,
    duration,
    number_of,
    plain,
    short_peer,
    size,
    sparkline,
    style,
    why_held,
)

WIDTH = 80
HEIGHT = 24
CHOOSE = "no run yet, choose one on its page: swarmnode open"
LABEL = 10  # characters of a line's label
WIDE_LABEL = 14  # of a line of netcheck
SPARK = 32  # characters of the loss's course

_PHASE_STYLE = {"training": "green", "exchanging": "cyan", "finished": "green"}  # all others are yellow
REACHABILITY = {
    "public": "public: peers can dial this node",
    "private": "private: this node dials, peers cannot (swarmnode netcheck)",
    "relayed": "relayed: peers reach this node through relays",
    "unknown": "not known yet: no peer has tried to dial this node",
}
CLASSES = {
    "no NAT": "no NAT: who dials this machine's own address gets through",
    "firewall": "no NAT, but a firewall: only answers to what this node sent come in",
    "mapped": "a NAT that passes one port on to this node: who dials it gets through",
    "full cone": "full cone NAT: one outer port for everybody, and who dials it gets through",
    "address-restricted": "address-restricted NAT (or a full cone that nobody tried yet): one outer port for all; "
    "in comes only who is at an address to which this node sent something",
    "port-restricted": "port-restricted NAT: one outer port for everybody; only answers from the very port to which "
    "this node sent something come in",
    "symmetric": "symmetric NAT: another outer port for each that this node speaks with, which nobody else can foresee",
    "unknown": "not known yet: fewer than two peers outside have looked, or none has dialled back",
}
PATHS = {
    "direct": "direct at once",
    "punched": "direct, by a punched hole",
    "probed": "direct, by guessed ports",
    "relayed": "through a relay",
}


def render_status(status: dict[str, Any], *, colour: bool = False) -> str:
    """The screen for a `status` answer, without a closing newline."""
    lines = [head_of(status, colour), "", *labelled(status, colour)]
    return "\n".join([*lines, *warning_lines(status.get("warnings", []), HEIGHT - len(lines), colour)])


def labelled(
    status: dict[str, Any], colour: bool, width: int = WIDTH, only: Sequence[str] | None = None
) -> Iterator[str]:
    """The lines of a `status` answer with their labels: all, or those with the labels `only`."""
    for label, text in _rows(status, colour):
        shown = text if colour else plain(text, width - LABEL)
        if only is None or label in only:
            yield style(label.ljust(LABEL), "dim", on=colour) + shown if label else ""


def _rows(status: dict[str, Any], colour: bool) -> Iterator[tuple[str, str]]:
    run, role = status.get("run"), status.get("role", "train")
    if run is not None:
        yield from _run(run, status, colour)
    elif role == "train":
        yield "run", CHOOSE if status.get("choosing") else "none joined yet"
    else:
        yield "run", f"none: with role {plain(role, 8)} this node does not train"
    yield "", ""
    peers, traffic = status["peers"], status["traffic"]
    yield "peers", f"{peers['connected']} connected: {peers['direct']} direct, {peers['relayed']} relayed"
    yield "reach", REACHABILITY.get(status["reachability"], plain(status["reachability"]))
    came = f"in {size(traffic['bytes_in'])} ({size(traffic['rate_in'])}/s)"
    yield "traffic", f"{came}   out {size(traffic['bytes_out'])} ({size(traffic['rate_out'])}/s)"
    if not peers["connected"] and status.get("join") and not status.get("choosing"):
        yield "invite", "swarmnode id --join prints the line for another machine"
    trainer = status.get("trainer")
    if trainer is not None:
        again = f", restarted {number_of(trainer['restarts'], 'time')}" if trainer["restarts"] else ""
        threads = number_of(trainer["threads"], "thread")
        held = sandboxed(trainer.get("sandbox"))
        device = f"{trainer['ranks']} ranks on {trainer['device']}" if trainer["ranks"] > 1 else trainer["device"]
        process = f"pid {trainer['pid']}" if trainer["pid"] else "being started"
        yield "trainer", f"{device}, {threads}, {held}, {process}{again}"


def sandboxed(told: dict[str, Any] | None) -> str:
    """In how far the kernel confines the trainer; what is missing is among the warnings."""
    if told is None:
        return "sandbox not known yet"
    if not told["enforced"]:
        return "no sandbox"
    return "sandboxed in part" if told["missing"] else "sandboxed"


def head_of(status: dict[str, Any], colour: bool, width: int = WIDTH) -> str:
    left = f"swarmnode {plain(status['version'], 16)}"
    right = f"up {duration(status['uptime_s'])}"
    middle = f"   {called(status)}   {plain(status['role'], 8)}"
    gap = " " * max(2, width - len(left) - len(middle) - len(right))
    return style(left, "bold", on=colour) + style(middle, "dim", on=colour) + gap + right


def _run(run: dict[str, Any], status: dict[str, Any], colour: bool) -> Iterator[tuple[str, str]]:
    phase = "paused" if status.get("paused") else run["phase"]
    shown = style(phase, _PHASE_STYLE.get(phase, "yellow"), on=colour)
    model = "the trainer is starting"
    if run["parameters"] is not None:
        model = f"{count(run['parameters'])} parameters, {plain(run['codec'], 8)}"
    yield "run", f"{plain(run['name'], 24)}  {run['run_id'][:12]}   {model}"
    number = "not known yet" if run["round"] is None else str(run["round"])
    if run["rounds"] and run["round"] is not None:
        number = f"{run['round']} of {run['rounds']}   {bar(run['round'] / run['rounds'], 28)}"
    yield "round", f"{number}   {shown}"
    steering = run.get("steering") or {"now": None, "coming": []}
    for said in filter(None, (steering["now"], *steering["coming"])):
        values = ", ".join(f"{key} {value}" for key, value in said["values"].items()) or "as in the run's file"
        yield "steered", f"from round {said['from_round']} on: {plain(values)}"
    if population := run.get("population"):
        yield "tries", f"{population['factor']:.3g} times the run's learning rate"
    for hold in status.get("holds", []):
        yield "paused", why_held(hold)
    if run.get("arriving"):
        here, whole = run["arriving"]
        yield "state", f"{size(here)} of {size(whole)} fetched from members"
    elif run.get("next_round_s") is not None:
        took, due = run.get("round_seconds") or 0.0, run["next_round_s"]
        usual = f"   (a round takes {duration(took)})" if took else ""
        yield "next", (f"in {duration(due)}" if due >= 1 else "in under 1 s" if due else "later than usual") + usual
    if run.get("learned") or run.get("sampled"):
        yield "reward", _reward(run, colour)
        yield ("learned", learned(run["learned"])) if run.get("learned") else ("samples", sampled(run["sampled"]))
    else:
        yield "loss", _loss(run, colour)
    members = f"{run['members']} in this round" if run.get("members") else "none yet"
    missing = run.get("missing", ())
    if others := [peer for peer in missing if peer != status["peer_id"]]:
        members += f", missing: {', '.join(map(short_peer, others[:2]))}"
        members += f" and {len(others) - 2} more" if len(others) > 2 else ""
    members += ", own work not counted" if len(others) < len(missing) else ""
    yield "members", members
    speed = f"{count(run['tokens_per_second'])} tokens/s" if run.get("tokens_per_second") else "no speed yet"
    if run.get("compute_share") is not None:
        speed += f", {run['compute_share']:.0%} of the time computing"
    yield "speed", speed
    if run.get("data"):
        yield "data", _data(run["data"])
    if run.get("state_hash"):
        outcome = f"   last round {run['outcome'].lower()}" if run.get("outcome") else ""
        apart = "" if run.get("apart") is None else f", its own: {run['apart']:.1%} from that of the last member it met"
        yield "state", f"{run['state_hash'][:16]}{apart}{outcome}"


def _data(data: dict[str, Any]) -> str:
    if data["source"] == "local":
        return "this node's own text"
    fetched = f", {size(data['fetched'])} fetched" if data["fetched"] else ""
    told = f"{data['shards']} of {data['wanted']} shards here, of {data['in_run']} in the run"
    return f"{told}; {size(data['bytes'])}{fetched}"


def _reward(run: dict[str, Any], colour: bool) -> str:
    history = [reward for _, reward in run["reward_history"]]
    recent = history[-10:]
    mean = sum(recent) / len(recent)
    if (run["round"] or 0) < LEARNS_BY and (chance := run.get("reward_by_chance")):
        return f"{mean:.3f} of 1 lately, {chance:.2g} by chance; learning shows by round {LEARNS_BY} or so"
    text = f"{mean:.3f} of 1 in the last {len(recent)} rounds"
    return text + (f"   {style(sparkline(history, SPARK), 'cyan', on=colour)}" if len(history) > 1 else "")


def learned(told: dict[str, Any]) -> str:
    """What the last update was made of: one sentence for a person."""
    peers = number_of(told["authors"], "peer")
    if told.get("sampled"):
        text = f"from {told['sampled']} groups of its samplers, {told['staleness']:.1f} updates old"
        text += f", and {told['taken']} of {peers}" if told["taken"] else ""
    elif told["taken"]:
        text = f"from {told['taken']} groups of {peers} in the last round"
    else:
        text = "from itself in the last round"
    return text + (f"; left out: {reasons(told['refused'])}" if told["refused"] else "")


def sampled(told: dict[str, Any]) -> str:
    """For whom a node samples, and what came of it: one sentence for a person."""
    text = f"version {told['version']} of {short_peer(told['trainer'])}: {told['given']} given, "
    return f"{text}{told['accepted']} accepted" + (f"; refused: {reasons(told['refused'])}" if told["refused"] else "")


def reasons(counted: dict[str, Any]) -> str:
    return ", ".join(f"{number} {plain(reason, 24)}" for reason, number in sorted(counted.items()))


def _loss(run: dict[str, Any], colour: bool) -> str:
    if run.get("loss") is None:
        return "not measured yet"
    history = [loss for _, loss in run.get("loss_history", []) if loss is not None]
    text = f"{run['loss']:{'.3f' if abs(run['loss']) < 1e4 else '.3g'}} {plain(run['loss_unit'], 24)}"
    if len(history) > 1:
        change = history[-1] - history[-2]
        trend = style(f"{change:+.3f}", "green" if change <= 0 else "yellow", on=colour)
        text += f"   {style(sparkline(history, SPARK), 'cyan', on=colour)}   {trend}"
    return text


def warning_lines(warnings: list[str], room: int, colour: bool, width: int = WIDTH) -> list[str]:
    """Whole, below an empty line, in so many lines as there is `room` for; `swarmnode health` has all of them."""
    lines = [line for each in warnings for line in wrap(plain(f"! {each}"), width, subsequent_indent="  ")]
    if len(lines) >= room:
        lines = [*lines[: max(0, room - 2)], "  and more: swarmnode health"]
    return [style(line, "yellow", on=colour) for line in ["", *lines]] if lines else []


# -- netcheck


def render_netcheck(answer: dict[str, Any], *, colour: bool = False) -> str:
    """The text for a `netcheck` answer, without a closing newline."""
    lines = []
    for label, texts in _facts(answer):
        for number, text in enumerate(texts or ["none"]):
            lines.append(style(("" if number else label).ljust(WIDE_LABEL), "dim", on=colour) + plain(text, 240))
    if not answer["problems"]:
        return "\n".join([*lines, "", style("nothing to mend", "green", on=colour)])
    for problem in answer["problems"]:
        lines += ["", style(plain(f"! {problem['problem']}", 240), "yellow", on=colour)]
        lines.append(f"  {plain(problem['advice'], 240)}")
    return "\n".join(lines)


def _facts(answer: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    reached, failed = answer["reached_by"], answer["failed_for"]
    tried = f"{number_of(reached + failed, 'host')} tried to dial in lately, {reached} got through"
    yield "reachability", [REACHABILITY.get(answer["reachability"], answer["reachability"]), tried]
    yield "listens on", [_place(address) for address in answer["listens"]]
    yield "announces", [_place(address) for address in answer["announces"]]
    yield "seen at", [_place(place) for place in answer["observed"]] or ["not known yet"]
    yield "NAT", [CLASSES.get(answer["class"], answer["class"])]
    yield "IPv6", [_ipv6(answer["ipv6"])]
    if answer["class"] != "unknown":
        yield "works with", [*_works(answer["works_with"])]
    mapping = answer["port_mapping"]
    mapped = f"{mapping['address']}, by {mapping['way']}" if mapping["way"] else f"none: {mapping['state']}"
    hole = [f"{mapping['pinhole']}, through the IPv6 firewall"] if mapping.get("pinhole") else []
    yield "port mapping", [mapped, *hole]
    timed = ((r["peer_id"], r["rtt_ms"]) for r in answer["relays"])
    yield "relays", [f"{short_peer(it)}  {'not measured yet' if rtt is None else f'{rtt:.0f} ms'}" for it, rtt in timed]
    peers = answer["peers"]
    punched = f"; {answer['punched']} of {answer['punched'] + answer['not_punched']} holes punched"
    yield "peers", [f"{peers['connected']} connected: {peers['direct']} direct, {peers['relayed']} relayed{punched}"]
    rates = answer["rates"]
    most = f"at the most in {size(rates['most_in'])}/s, out {size(rates['most_out'])}/s"
    yield "rate", [f"now in {size(rates['in'])}/s, out {size(rates['out'])}/s; {most}"]
    serves = answer["serves"]
    serving = f"{serves['reservations']} peers, {serves['circuits']} circuits now"
    yield "relays for", [f"{serving}, {size(serves['bytes'])} so far"]


def _ipv6(told: dict[str, Any]) -> str:
    if not told["addresses"]:
        return "this machine has no address of it on the internet"
    reached = ", ".join(_place(at) for at in told["reached_at"])
    return (
        f"who dials gets through at {reached}" if reached else f"{_place(told['addresses'][0])}; nobody got through yet"
    )


def _works(works: list[dict[str, str]]) -> Iterator[str]:
    """How this node comes together with others, a line a way: those of the other side's kinds that have it."""
    for path, words in PATHS.items():
        kinds = [each["class"] for each in works if each["path"] == path]
        if kinds:
            yield f"{words:<26} {'everybody' if len(kinds) == len(works) else ', '.join(kinds)}"


def render_trace(answer: dict[str, Any], *, colour: bool = False) -> str:
    """The text for a `netcheck` answer about a peer, without a closing newline."""
    marks = {True: style("ok", "green", on=colour), False: style("no", "yellow", on=colour)}
    steps = [
        f"{marks[each['ok']]}  {plain(each['step'], 160)}: {plain(each['result'], 240)}" for each in answer["steps"]
    ]
    return "\n".join([*steps, f"-> {plain(answer['advice'], 300)}"])


def path_of(peer: dict[str, Any]) -> str:
    return f"via {short_peer(peer['relay'])}" if peer["relay"] else plain(peer["path"], 12)


def _place(address: str) -> str:
    """An address short enough to read: the relay's name for one through a relay."""
    place, circuit, _ = address.partition("/p2p-circuit")
    place, _, relay = place.partition("/p2p/")
    return f"{place} through {short_peer(relay)}" if circuit else place
