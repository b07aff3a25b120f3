"""`swarmnode top`: what the node does, on one screen that follows it (docs/top.svg)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import Any

from swarmnode.cli.history import STAGES, measured
from swarmnode.cli.terminal import IntervalOption, ask, called, colours, curve, live, number_of, plain, style, table
from swarmnode.cli.views import head_of, labelled, path_of, warning_lines

KEPT = 2000  # rounds of the curve
BAR = 24  # characters of a round's bar
TOLD = 10  # rounds in a snapshot of --json
LOW = 40  # lines; a lower terminal shows ESSENTIAL of the status only
ESSENTIAL = ("run", "round", "next", "loss", "reward", "traffic", "trainer")
_PARTS = (("█", "green", STAGES[:1]), ("▓", "cyan", STAGES[1:-1]), ("░", "dim", STAGES[-1:]))


def top(interval: IntervalOption = 1.0) -> None:
    """Watch the node: curve, rounds, peers, traffic and warnings.

    q or Ctrl-C leaves.

    Of a round's bar, █ is training, ▓ the exchange (in an open run commit, reveal and judging), ░ waiting. --json
    prints a snapshot a line: time, status, peers, and the newest rounds. Example: swarmnode top --interval 5
    """
    drawn = ((each, screen(each, *get_terminal_size(), colour=colours())) for each in _snapshots())
    live((({**each, "rounds": each["rounds"][-TOLD:]}, text) for each, text in drawn), interval)


def _snapshots() -> Iterator[dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    while True:
        status = ask("status", timeout=10.0)
        done = (status["run"] or {}).get("round") or 0
        newest = rounds[-1]["round"] + 1 if rounds else 0
        if done < newest:  # on another history
            rounds, newest = [], 0
        if done > newest:
            rounds = [*rounds, *ask("history", since=newest, timeout=10.0)["rounds"]][-KEPT:]
        peers = ask("peers", timeout=10.0)["peers"]
        yield {"time": time.time(), "status": status, "peers": peers, "rounds": rounds}


def screen(snapshot: dict[str, Any], width: int, height: int, *, colour: bool = False) -> str:
    """A snapshot as at most `height` lines, of at most `width` characters where there are no colours."""
    status, rounds, peers = snapshot["status"], snapshot["rounds"], snapshot["peers"]
    only = ESSENTIAL if height < LOW else None
    lines = [head_of(status, colour, width), *labelled(status, colour, width, only)]
    warned = warning_lines(status.get("warnings", []), max(4, height // 5), colour, width)
    room = height - 1 - len(lines) - len(warned)
    points = [value for _, value in measured(rounds)]
    if len(points) > 1 and room >= 4:
        drawn = curve(points, max(10, width - 11), min(10, room // 3 + 1))
        lines += [style(line, "cyan", on=colour) for line in drawn]
        room -= len(drawn)
    listed = _peers(peers)[: max(0, min(len(peers) + 2, room // 2 + 1))]
    last = rounds[-max(0, room - len(listed)) :] if room > len(listed) else []
    lines += [*_rounds(last, colour), *listed, *warned]
    return "\n".join(lines[:height] if colour else [plain(line, width) for line in lines[:height]])


def _rounds(rounds: Sequence[dict[str, Any]], colour: bool) -> list[str]:
    """A line each: how long it took, as a bar of its parts; who was missing, or what became of this node's work."""
    longest = max((each.get("seconds", 0.0) for each in rounds), default=0.0) or 1.0
    lines = []
    for each in rounds:
        seconds, drawn = each.get("seconds", 0.0), ""
        spent = [sum(each.get(name, 0.0) for name in names) for _, _, names in _PARTS]
        whole = BAR * seconds / longest / max(seconds, sum(spent), 1e-9)  # parts overlap in an open run
        for (mark, name, _), part in zip(_PARTS, spent, strict=True):
            drawn += style(mark * round(whole * part), name, on=colour)
        drawn += " " * (BAR - sum(round(whole * part) for part in spent))
        missing = ", ".join(f"…{plain(p[-6:])} {plain(each['why'][p], 30)}" for p in each.get("missing", ())[:2])
        told = f"missing: {missing}" if missing else f"own work {plain(each.get('own', '-'), 30)}"
        members = number_of(each.get("members", 0), "member")
        lines.append(f"{each['round']:>6} {seconds:>8.2f} s  {drawn}  {members:<9}  {told}")
    return lines


def _peers(peers: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (
            called(peer),
            path_of(peer),
            "-" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.0f} ms",
            "-" if peer["round"] is None else str(peer["round"]),
            plain(peer["standing"], 24),
        )
        for peer in sorted(peers, key=lambda one: (not one["member"], one["peer_id"]))
    ]
    return table(("PEER", "PATH", "RTT", "ROUND", "STANDING"), rows, right=frozenset({2, 3})).splitlines()
