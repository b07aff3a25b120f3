"""`swarmnode plan RUN.toml`: what a run would come to on this machine and its link, by each method, beforehand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.terminal import ask, duration, loaded, show, size, table, waits
from swarmnode.node.config import MEGABIT

UP, DOWN, ROUND_TRIP = 20.0, 100.0, 40.0  # Mbit/s, Mbit/s and ms of a home, where nothing else is known


def plan(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run, as its creator would write it.")],
    nodes: Annotated[int, typer.Option(min=2, max=4096, metavar="NODES", help="Members that the run would have.")] = 4,
    up: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="MBIT/S", help=f"Upload of each member. [default: setting up, else {UP:g}]"),
    ] = None,
    down: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="MBIT/S", help=f"Download of each. [default: setting down, else {DOWN:g}]"),
    ] = None,
    round_trip: Annotated[
        float | None,
        typer.Option(min=0, metavar="MS", help=f"From member to member and back. [default: {ROUND_TRIP:g}]"),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(metavar="PEER", help="Have the daemon here measure the round trip to this one. [default: none]"),
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="Task of your own. [default: setting task]")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Device to measure on. [default: setting device]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=0, metavar="THREADS", help="CPU threads to use. [default: setting threads]")
    ] = None,
) -> None:
    """Say what a run would take, by some steps on this machine.

    Of its own method, and of diloco, btard and open: memory, time of a round, share of the
    time in inner steps, bytes a day. One is recommended.

    Example: swarmnode plan my-run.toml --nodes 16 --up 20 --down 100
    """
    from swarmnode.node.plan import STEPS_FOR, planned

    config = loaded().config
    given = {k: v for k, v in (("task", task), ("device", device), ("threads", threads)) if v is not None}
    if peer is not None:
        round_trip = min(ask("ping", timeout=40.0, peer=peer)["rtt_ms"] for _ in range(3))
    up, down = (mine or setting or usual for mine, setting, usual in ((up, config.up, UP), (down, config.down, DOWN)))
    link = (up * MEGABIT, down * MEGABIT, (ROUND_TRIP if round_trip is None else round_trip) / 1000)
    with waits(f"measuring {run_file}: {STEPS_FOR:g} s of steps, twice the held-out loss, once torch has started"):
        found = planned(run_file, config, given, link=link, members=nodes)
    rows = []
    for way in found.ways:
        sizes, fits = map(size, (way.sent, way.memory, way.disk)), "does not fit" if way.refused else ""
        rows.append([way.method, way.codec, duration(way.round_seconds), f"{way.computing:.0%}", *sizes, fits])
    heads = ["method", "codec", "round", "computing", "a day, each way", "memory", "disk", ""]
    text = (
        f"{found.pace.weight.parameters:,} parameters, {found.pace.step:.3g} s a step; {nodes} members with "
        f"{up:g} Mbit/s up, {down:g} down, {1000 * link[2]:g} ms",
        table(heads, rows, right=frozenset({2, 3, 4, 5, 6})),
        f"Recommended: {found.why}.",
    )
    answer = {
        "parameters": found.pace.weight.parameters,
        "step_seconds": found.pace.step,
        "members": nodes,
        "ways": [asdict(way) for way in found.ways],
        "recommended": None if found.chosen is None else [found.chosen.method, found.chosen.codec],
        "why": found.why,
    }
    show(answer, text)
