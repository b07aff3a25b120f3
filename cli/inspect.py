"""Commands that look at a daemon or its machine and change nothing: status, health, doctor, open, netcheck, metrics,
logs; and sample, which has its model write.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import (
    IntervalOption,
    as_json,
    ask,
    colours,
    directory,
    duration,
    live,
    loaded,
    number_of,
    plain,
    print_json,
    say,
    show,
    style,
    why_held,
)
from swarmnode.cli.views import CHOOSE, render_netcheck, render_status, render_trace
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.exitcodes import DEGRADED, OK
from swarmnode.node.storage.datadir import DataDir, write_atomic

SECONDS_A_TOKEN = 0.5  # s; patience with a slow machine, beside BUSY
BUSY = 300.0  # s; the trainer answers between two rounds' work
LOG_LINES = 50
TRACE_TIMEOUT = 60.0  # s
SERVED_WITHIN = 120.0  # s for a node that was started to serve its page


_VERDICTS = {"ok": "green", "warn": "yellow", "bad": "red"}


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C. [default: print once]")] = False,
    interval: IntervalOption = 2.0,
) -> None:
    """Show what the node is doing: run, loss, peers, traffic.

    Example: swarmnode status --watch
    """
    answers = iter(lambda: ask("status", timeout=10.0), None)
    screens = ((answer, render_status(answer, colour=colours())) for answer in answers)
    if watch:
        live(screens, interval)
    else:
        show(*next(screens))


def health(
    live: Annotated[
        bool, typer.Option("--live", help="Exit with 0 wherever the node answers. [default: only where it is healthy]")
    ] = False,
) -> None:
    """Tell whether the node does its work, and what to do if not.

    Exit code 0: healthy; 11: degraded, or not ready yet; 9: not running; 1: it runs and does not answer. With --live it
    is the question of whoever would end the node and start it anew, which mends no full disk.

    Example: swarmnode health --live
    """
    status = ask("status", timeout=10.0)
    run, problems = status["run"] or {}, status["problems"]
    answer: dict[str, Any] = {
        "healthy": status["ready"] and not problems,
        "ready": status["ready"],
        "problems": problems,
        "notices": [warning for warning in status["warnings"] if warning not in problems],
        "phase": "paused" if status["paused"] else run.get("phase"),
        "holds": status["holds"],
        "round": run.get("round"),
        "round_age_s": run.get("round_age_s"),
        "members": run.get("members"),
        "peers": status["peers"]["connected"],
    }
    facts = [
        plain(run.get("name") or (CHOOSE if status.get("choosing") else f"no run, role {status['role']}"), 64),
        f"round {answer['round']}" if answer["round"] is not None else "",
        answer["phase"] or "",
        f"last result {duration(answer['round_age_s'])} ago" if answer["round_age_s"] is not None else "",
        number_of(answer["peers"], "peer"),
    ]
    word = "degraded" if problems else "healthy" if answer["healthy"] else "starting"
    lines = [f"{word}: {', '.join(filter(None, facts))}"]
    lines += [f"- paused: {why_held(hold)}" for hold in answer["holds"]]
    lines += [f"! {plain(problem)}" for problem in problems] + [f"- {plain(notice)}" for notice in answer["notices"]]
    show(answer, lines)
    raise typer.Exit(OK if live or answer["healthy"] else DEGRADED)


def open_page(
    print_only: Annotated[bool, typer.Option("--print", help="Open no browser. [default: open one]")] = False,
) -> None:
    """Open the node's page in a browser, and print its address.

    Whoever has the address can steer the node: it contains the page's token. Give it to nobody.

    Where no node runs, it offers on a terminal to start one, whose run is then chosen on the page: one to join by a
    link or from those that want members, one to begin, or one to go on with. Ctrl-C ends that node in order.

    Example: swarmnode open --print
    """
    home = DataDir(directory())
    try:
        page = ask("status", timeout=10.0)["dashboard"]
    except NotRunning:
        if print_only or as_json() or not sys.stdin.isatty():
            raise
        raise typer.Exit(_start(home.path)) from None
    if not page:
        raise ControlError("the node serves no page: it is a seed or has --no-dashboard, or swarmnode logs says why")
    address = f"{page}#{home.dashboard_token.read_text(encoding='ascii').strip()}"
    show({"address": address}, address)
    shows = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if shows and not print_only and not as_json():
        import webbrowser

        # By way of a file that nobody else may read: everybody sees the arguments of a browser that is started.
        go = home.path / "dashboard.html"
        write_atomic(go, f'<meta http-equiv="refresh" content="0; url={address}">'.encode())
        webbrowser.open(go.as_uri())


def _start(home: Path) -> int:
    """Start a node whose run is chosen on its page, and open that; what the node ends with."""
    say(f"No node is running on {home}.")
    typer.confirm("Start one, and choose its run in the browser", default=True, abort=True, err=True)
    program = [sys.executable, "-P", "-m", "swarmnode"]
    node = subprocess.Popen([*program, "run", "--choose", "--data-dir", str(home)])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node hears Ctrl-C too, and leaves in order
    signal.signal(signal.SIGTERM, lambda *_: node.terminate())
    give_up = time.monotonic() + SERVED_WITHIN
    while node.poll() is None and time.monotonic() < give_up:
        with suppress(NotRunning, ControlError):
            if ask("status", timeout=10.0)["choosing"]:
                subprocess.run([*program, "open", "--data-dir", str(home)], check=False)
                break
        time.sleep(0.2)
    else:
        say(f"No page was served within {SERVED_WITHIN:.0f} s. The node goes on; try again with: swarmnode open")
    return node.wait()


def doctor() -> None:
    """Check this machine, and say what to do about each problem.

    Looked at are versions, clock, disk, memory, port, sending, network, device and sandbox.

    Works with and without a running node; takes some seconds, as it starts torch once. Exit code 0: nothing is bad;
    11: something is. Example: swarmnode doctor --json
    """
    from swarmnode.node.doctor import diagnose

    status: dict[str, Any] | None = None
    netcheck: dict[str, Any] | None = None
    silent = ""
    try:
        status = ask("status", timeout=10.0)
        netcheck = ask("netcheck", timeout=10.0)
    except NotRunning:
        pass
    except ControlError as error:
        silent = str(error)
    found = []
    for each in diagnose(loaded().config, status, netcheck, silent):
        found.append(asdict(each))
        if as_json():
            continue
        mark = style(f"{each.verdict:<4}", _VERDICTS[each.verdict], on=colours())
        print(f"{mark}  {each.what:<9} {plain(each.says)}", flush=True)
        if each.do:
            print(f"{'':15} -> {plain(each.do)}", flush=True)
        if each.what == "network" and sys.stderr.isatty():
            print("      torch     starting it …", end="\r", file=sys.stderr, flush=True)
    bad = any(each["verdict"] == "bad" for each in found)
    if as_json():
        print_json({"healthy": not bad, "found": found})
    raise typer.Exit(DEGRADED if bad else OK)


def netcheck(
    peer: Annotated[
        str | None,
        typer.Argument(metavar="[PEER]", help="Try every way to this peer, a peer id. [default: how others reach us]"),
    ] = None,
) -> None:
    """Tell how peers reach this node, or why one cannot be reached.

    Each problem comes with what to do. About itself the running node has found that out already; to reach PEER, it
    tries each way anew, some 25 s at most.

    Example: swarmnode netcheck zNgh7
    """
    if peer is not None:
        answer = ask("netcheck", timeout=TRACE_TIMEOUT, peer=peer)
        show(answer, render_trace(answer, colour=colours()))
        return
    answer = ask("netcheck", timeout=10.0)
    show(answer, render_netcheck(answer, colour=colours()))


def sample(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='How the text begins, such as "def main(".')],
    length: Annotated[
        int, typer.Option(min=1, max=4096, metavar="TOKENS", help="Tokens to write; bytes, for byte-lm.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=10.0, metavar="T", help="0 takes the likeliest token; higher is more varied.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Same seed, same model: same text.")] = 0,
) -> None:
    """Let the model that the node is training continue PROMPT.

    Example: swarmnode sample "Once upon a time" --length 200
    """
    patience = BUSY + SECONDS_A_TOKEN * length
    chosen = {"prompt": prompt, "length": length, "temperature": temperature, "seed": seed}
    answer = ask("sample", timeout=patience, **chosen)
    show(answer, "\n".join(plain(line.replace("\t", "    ")) for line in answer["text"].split("\n")))


def metrics() -> None:
    """Print the node's metrics, as Prometheus reads them.

    docs/metrics.md lists them and says how to collect them.

    Example: swarmnode metrics
    """
    answer = ask("metrics", timeout=10.0)
    show(answer["metrics"], answer["text"].rstrip("\n"))


def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=2000, metavar="LINES", help="Begin with the newest so many.")
    ] = LOG_LINES,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C. [default: end there]")] = False,
) -> None:
    """Print the node's log.

    Without a running node, this is the end of the log file that it left.

    Example: swarmnode logs --follow
    """
    home, came = directory(), False
    try:
        for line in ControlClient(home).stream("logs", timeout=None if follow else 10.0, lines=lines, follow=follow):
            came = True
            _print_line(line)
    except KeyboardInterrupt:
        return
    except NotRunning:
        _print_left_behind(home, lines, "no daemon is running; this is the end of the log it left")
        if follow:
            raise
    except ControlError:
        if came:
            raise
        _print_left_behind(home, lines, "the daemon does not answer; this is the end of its log file")


def _print_left_behind(home: Path, lines: int, why: str) -> None:
    """The log file of a daemon that tells nothing. Raises NotRunning where there is none."""
    from swarmnode.node.logs import read_tail

    found = read_tail(DataDir(home).logs, lines)
    for line in found:
        _print_line(line)
    if not found:
        raise NotRunning(home)
    say(f"({why})")


def _print_line(line: dict[str, Any]) -> None:
    if as_json():
        print_json(line)
        return
    colour = {"WARNING": ("yellow",), "ERROR": ("red",), "CRITICAL": ("red", "bold")}.get(line["level"], ())
    head = f"{line['time'].replace('T', ' ')} {line['level']:<7} {line['logger'].removeprefix('swarmnode.')}: "
    body = "\n    ".join(plain(part) for part in line["message"].split("\n"))
    print(style(head, *colour, on=bool(colour) and colours()) + body, flush=True)
