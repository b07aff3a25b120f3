"""`swarmnode doctor`: whether this machine has what a node needs, and what to do where it has not."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import typer

from swarmnode.cli.terminal import DataDirOption, JsonOption, ask, colours, loaded, plain, print_json, style
from swarmnode.node.control.client import ControlError, NotRunning
from swarmnode.node.exitcodes import DEGRADED, OK

COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


def doctor(data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Check clock, disk, memory, port, network, device and sandbox, and say what to do about each problem.

    Works with and without a running node; takes some seconds, as it starts torch once. Exit code 0: nothing is bad;
    11: something is. Example: swarmnode doctor --json
    """
    from swarmnode.node.doctor import diagnose

    status: dict[str, Any] | None = None
    netcheck: dict[str, Any] | None = None
    with suppress(NotRunning, ControlError):
        status, netcheck = ask(data_dir, "status", timeout=10.0), ask(data_dir, "netcheck", timeout=10.0)
    found = []
    for each in diagnose(loaded(data_dir).config, status, netcheck):
        found.append(asdict(each))
        if json_output:
            continue
        mark = style(f"{each.verdict:<4}", COLOURS[each.verdict], on=colours())
        print(f"{mark}  {each.what:<9} {plain(each.says)}", flush=True)
        if each.do:
            print(f"{'':15} -> {plain(each.do)}", flush=True)
        if each.what == "network" and sys.stderr.isatty():
            print("      torch     starting it …", end="\r", file=sys.stderr, flush=True)
    bad = any(each["verdict"] == "bad" for each in found)
    if json_output:
        print_json({"healthy": not bad, "found": found})
    raise typer.Exit(DEGRADED if bad else OK)
