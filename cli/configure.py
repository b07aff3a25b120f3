"""`swarmnode config`: check a file, show what is in force."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import ConfigOption, flags, group, show, table
from swarmnode.node.config import load_config, parse_node_table
from swarmnode.training.options import as_toml, read_toml

config = group("Check a file of settings, or show those in force.")


@config.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A run file or a node configuration file, in TOML.")],
) -> None:
    """Say what kind of file FILE is, and whether it can be used.

    Example: swarmnode config check config.toml
    """
    tables = read_toml(file)
    if any(isinstance(value, dict) for value in tables.values()):
        answer = check_run(tables, file)
        text = f"{file}: a run file, in order. Run {answer['name']!r}, run id {answer['run_id']}"
        if not answer["final"]:
            text += " (its creator adds a nonce and the hash of the held-out text, which change it)"
        if answer["own_task"]:
            text += f". Its task {answer['task']!r} is none of the built-in ones, {', '.join(answer['built_in'])}: "
            text += "every member needs the file that defines it (--task FILE.py:CLASS)"
    else:
        values = parse_node_table(tables, source=str(file))
        answer = {"kind": "node", "file": str(file), "values": values}
        text = f"{file}: a node configuration, in order. It sets {', '.join(values) or 'nothing'}"
    show(answer, text)


def check_run(tables: dict[str, Any], file: Path) -> dict[str, Any]:
    """What kind of run file the tables of `file` are. Raises SettingError."""
    from swarmnode.training.runspec import BUILT_IN_TASKS, parse_runspec

    spec = parse_runspec(tables, source=str(file))
    return {
        "kind": "run",
        "file": str(file),
        "name": spec.run.name,
        "task": spec.task.name,
        "own_task": spec.task.name not in BUILT_IN_TASKS,
        "built_in": BUILT_IN_TASKS,
        "run_id": spec.run_id,
        "final": bool(spec.task.heldout_sha256 and spec.run.nonce),
    }


@config.command("show")
def show_settings(file: ConfigOption = None) -> None:
    """Show each setting in force and where it came from.

    That is the default, the file, the environment or a flag.

    Example: swarmnode config show
    """
    found = load_config(file, os.environ, flags())
    rows = [(key, as_toml(each["value"]), each["origin"]) for key, each in found.settings.items()]
    show({"settings": found.settings}, table(("KEY", "VALUE", "FROM"), rows))
