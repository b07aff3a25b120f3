"""Commands that change what a node does: pause, resume, stop; and what becomes of its run: `steer`, with which its
owner changes values while it is trained, and `successor …`, with which it ends, or is continued by another.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import (
    UsageMistake,
    YesOption,
    absolute,
    ask,
    be_sure,
    directory,
    group,
    loaded,
    plain,
    show,
    table,
    why_held,
)
from swarmnode.node.config import CAPS_FILE, NodeConfig, caps_told, changed_caps
from swarmnode.node.control.client import ControlError, NotRunning
from swarmnode.node.storage.datadir import DataDir, caps_with, write_atomic
from swarmnode.training.options import as_toml

STOP_TIMEOUT = 120.0  # s; a node ends the exchange in hand, saves and says goodbye
PUBLISH_TIMEOUT = 120.0  # s; a state is written to disk
POLL = 0.1  # s between two looks at the lock while a daemon ends


def pause() -> None:
    """Stop training and stay in the swarm, until resume.

    A pause lasts over restarts.

    Example: swarmnode pause
    """
    ask("pause")
    text = "paused: the node stays connected and trains no more. Go on with: swarmnode resume"
    show({"paused": True}, text)


def resume() -> None:
    """Train again after a pause.

    Example: swarmnode resume
    """
    answer = ask("resume")
    text = "resumed" if answer["was_paused"] else "it was not paused, and goes on"
    if answer["holds"]:
        text = "\n".join(["not paused by you any more", *map(why_held, answer["holds"])])
    show({"paused": bool(answer["holds"])}, text)


def caps(
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What to change; KEY= takes that back. [default: change nothing]"),
    ] = None,
) -> None:
    """Show or change what the node may take of this machine.

    Also when it trains. A change holds at once, and for later starts: it counts more than config.toml, until KEY= takes
    it back. Where no node runs, those of its next start are shown and changed.

    For example: swarmnode caps cpu=50 hours=22:00-07:00. docs/configuration.md says what each key means. The trainer is
    started again for other threads, nice, memory and device_memory.
    """
    params: dict[str, Any] = dict(change.partition("=")[::2] for change in changes or () if "=" in change)
    if len(params) < len(changes or ()):
        raise UsageMistake("a change is KEY=VALUE, each key once, such as cpu=50; swarmnode caps lists the keys")
    changed_caps(NodeConfig(), params, NodeConfig())  # what is none is refused here
    home = DataDir(directory())
    try:
        answer = ask("caps", **params)
    except NotRunning:
        if not home.path.is_dir():
            raise
        if params:
            with home:  # a node that starts meanwhile has read those before
                config, path = loaded().config, home.path / CAPS_FILE
                write_atomic(path, caps_with(path, changed_caps(config, params, config)[1]))
        answer = {"caps": caps_told(loaded().config), "holds": [], "disk_used": None}
    rows = [(key, *_cap(key, cap["value"], cap["unit"])) for key, cap in answer["caps"].items()]
    text = [table(("CAP", "VALUE", "UNIT"), rows), *(f"paused: {why_held(hold)}" for hold in answer["holds"])]
    show(answer, [*text, "no node runs here: these are for its next start" if answer["disk_used"] is None else ""])


def _cap(key: str, value: Any, unit: str) -> tuple[str, str]:
    """A cap for people: what caps nothing says so."""
    if key in ("nice", "shards_cap"):
        return f"{value:g}", unit
    if key == "threads" and not value:
        return "one for each core", ""
    if not value or (key == "cpu" and value == 100):
        return "no cap" if type(value) is float else "always" if key == "hours" else "no", ""
    return (value if isinstance(value, str) else "yes" if value is True else f"{value:g}"), unit


def stop(
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return only when the daemon has ended.")] = True,
    timeout: Annotated[float, typer.Option(min=1, max=3600, metavar="SECONDS", help="Longest wait.")] = STOP_TIMEOUT,
) -> None:
    """End the daemon in order.

    An exchange in hand may end; what was trained is saved; the peers are told not to wait for this node.

    Example: swarmnode stop --timeout 60
    """
    home, limit = DataDir(directory()), time.monotonic() + timeout
    pid = home.holder()
    ask("stop", timeout=timeout)
    while wait and pid is not None and home.holder() == pid:  # a supervisor may start another at once
        if time.monotonic() > limit:
            raise ControlError(
                f"the daemon (pid {pid}) has not ended within {timeout:g} s. It may wait for peers: look at swarmnode "
                f"logs, wait longer with --timeout, or force it with: kill -9 {pid}"
            )
        time.sleep(POLL)
    show({"stopped": wait}, "stopped" if wait else "stopping")


# -- the run's owner

ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Told to everybody, at most 400 characters. [default: none]")
]


def steer(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TABLE.KEY=VALUE", help="What to change; TABLE.KEY= takes the run file's value. [default: nothing]"
        ),
    ] = None,
    from_round: Annotated[
        int | None,
        typer.Option(min=1, metavar="ROUND", help="First round with these values. [default: the one after the next]"),
    ] = None,
) -> None:
    """Show or change a run's values while it is trained.

    Only its owner changes them, for all members.

    For example: swarmnode steer inner.lr=3e-4 inner.steps=50. Keys are those of the run file: inner.lr, inner.muon_lr,
    inner.steps, outer.lr, exchange.codec. All members change in the same round. What is planned keeps its round when
    another key is changed; a change of the same key replaces it.
    """
    given = dict(change.partition("=")[::2] for change in changes or () if "=" in change)
    if len(given) < len(changes or ()) or (from_round is not None and not given):
        raise UsageMistake("a change is TABLE.KEY=VALUE, each key once, such as inner.lr=3e-4")
    values: Any = {key: value or None for key, value in given.items()}
    answer = ask("steer", set=values, from_round=from_round)
    stages = [{} if answer["now"] is None else answer["now"]["values"], *(each["values"] for each in answer["coming"])]
    heads = ["VALUE", "RUN FILE", "NOW", *(f"FROM ROUND {each['from_round']}" for each in answer["coming"])]
    rows = [[key, *(as_toml(each.get(key, old)) for each in ({}, *stages))] for key, old in answer["file"].items()]
    now = {key: value for key, value in {**answer["file"], **stages[0]}.items() if not isinstance(value, str) and value}
    times = {key: float(given[key]) / now[key] for key in now if given.get(key)}
    warned = (
        f"{key} becomes {ratio:g} times what it is now. If that is not meant: swarmnode steer {key}={as_toml(now[key])}"
        for key, ratio in times.items()
        if not 0.1 <= ratio <= 10.0
    )
    show(answer, [table(heads, rows), *warned])


successor = group("End a run, or publish the one that continues it.")


@successor.command("show")
def show_successor() -> None:
    """Print what the run's owner said about how it goes on.

    Example: swarmnode successor show
    """
    _told(ask("successor_show"))


@successor.command("publish")
def publish(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file, with other settings than now.")],
    reason: ReasonOption = "",
) -> None:
    """Publish the run that continues this one from its present state.

    [model] and [task] must be the same, the data are where the file names none; everything else may change. Every node
    is told in its status and goes over when its owner says so: swarmnode run --run ID. The word lasts a week; publish
    again to renew it, which begins from the state of then.

    Example: swarmnode successor publish next.toml --reason "a larger model"
    """
    _told(ask("successor_publish", timeout=PUBLISH_TIMEOUT, path=absolute(file), reason=reason))


@successor.command("end")
def end(reason: ReasonOption = "", yes: YesOption = False) -> None:
    """Tell every node that the run has ended.

    Each goes on until its owner stops it. The word lasts a week.

    Example: swarmnode successor end --reason "it has converged"
    """
    run_id = ask("successor_show")["run_id"]
    be_sure(f"End run {run_id[:12]}? All of its members are told that it is over.", "End it", yes)
    _told(ask("successor_end", reason=reason))


def _told(answer: dict[str, Any]) -> None:
    why = f" ({plain(answer['reason'])})" if answer["reason"] else ""
    if answer["successor"]:
        text = f"continued after round {answer['round']}{why}: swarmnode run --run {plain(answer['successor'])}"
    elif answer["ended"]:
        text = f"ended after round {answer['round']}{why}"
    else:
        owner = answer["owner"]
        text = f"nothing said by the owner, {plain(owner)}" if owner else "the run has no owner who could say anything"
    show(answer, text)
