"""Every command explains itself: a line of help, every option with help, default or meaning, and --json everywhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import typer.main

from swarmnode.cli.main import COMMANDS, app
from swarmnode.node import exitcodes
from swarmnode.node.config import NodeConfig, flag_name
from swarmnode.training.options import describe

CLI_PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, groups opened."""
    root: Any = typer.main.get_command(app)
    for name in COMMANDS:
        command = root.get_command(None, name)
        if hasattr(command, "commands"):
            for inner, found in command.commands.items():
                yield f"{name} {inner}", found
        else:
            yield name, command


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_command_and_option_is_explained(name: str, command: Any) -> None:
    assert command.help and len(command.help) > 15, f"{name} has no help text"
    options = {flag: parameter for parameter in command.params for flag in parameter.opts}
    assert "--json" in options and "--data-dir" in options, name
    for flag, parameter in options.items():
        if flag == "--help":
            continue
        assert parameter.help and len(parameter.help) > 8, f"{name} {flag} has no help text"


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_command_has_an_example_that_it_understands(name: str, command: Any) -> None:
    [example] = re.findall(r"xample: swarmnode (.+?)(?:\. |$)", " ".join(command.help.split()))
    words = shlex.split(example.partition(" > ")[0])
    known = dict(commands())
    called = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
    assert unwrap(known[called].callback) is unwrap(command.callback), f"{name} has an example of {called}"
    known[called].make_context(called, words[len(called.split()) :])


def test_every_setting_of_the_node_is_a_flag_of_run() -> None:
    run = dict(commands())["run"]
    flags = {flag for parameter in run.params for flag in parameter.opts}
    assert {flag_name(key) for key in describe(NodeConfig)} <= flags


def test_the_page_lists_every_command_and_exit_code() -> None:
    page = CLI_PAGE.read_text(encoding="utf-8")
    for name, command in commands():
        rows = re.findall(rf"^\| `swarmnode {re.escape(name)}[` \[].*$", page, re.MULTILINE)
        assert rows, f"docs/cli.md has no row of swarmnode {name}"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        named = {option for row in rows for option in re.findall(r"`(--[a-z-]+)", row)}
        assert named <= known, f"docs/cli.md, swarmnode {name}: no {named - known}"
    codes = {label: code for label, code in vars(exitcodes).items() if isinstance(code, int)}
    assert len(codes) == len(re.findall(r"^\| \d+ \| `[A-Z_]+` \| .{10,} \|$", page, re.MULTILINE))
    for label, code in codes.items():
        assert f"| {code} | `{label}` | " in page


def test_the_programs_own_help_names_every_command(swarmnode: Any) -> None:
    shown = swarmnode("--help")
    assert shown.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in shown.stdout


def test_no_summary_in_a_list_of_commands_is_cut(swarmnode: Any) -> None:
    groups = sorted({name.split()[0] for name, _ in commands() if " " in name})
    for arguments in ([], *([name] for name in groups)):
        listed = swarmnode(*arguments, "--help").stdout.partition("\nCommands:\n")[2]
        assert listed and not re.findall(r"^.*\.\.\.$", listed, re.MULTILINE), arguments
        assert max(map(len, listed.splitlines())) <= 80
