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
from swarmnode.node.config import CAPS, NodeConfig, flag_name
from swarmnode.training.options import as_toml, describe

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLI_PAGE = DOCS / "cli.md"
EVERYWHERE = {"--data-dir", "--json", "--help"}  # of which the head of the page says that every command has them
SHARED = re.compile(r"(?:options of|the same as) `swarmnode ([a-z ]+)`(?: but (`--[^;|]*))?")
UNITS = {  # by which --help calls the number that an option takes
    *("BITS", "CHECKPOINTS", "COUNT", "GB", "HOURS", "LINES", "MBIT/S", "MINUTES", "MS", "NODES", "PEERS", "PERCENT"),
    *("PORT", "DEGREES", "PROCESSES", "ROUND", "ROUNDS", "SECONDS", "SEQUENCES", "THREADS", "TOKENS"),
}
WITHOUT_UNIT = {"run --nice", "join --nice", "sample --seed", "sample --temperature"}


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


def options_of(command: Any) -> dict[str, Any]:
    """By its first name, each option of a command but --help."""
    options = (each for each in command.params if each.param_type_name == "option" and each.name != "help")
    return {parameter.opts[0]: parameter for parameter in options}


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_command_and_option_is_explained(name: str, command: Any) -> None:
    assert command.help and len(command.help) > 15, f"{name} has no help text"
    options = options_of(command)
    assert "--json" in options and "--data-dir" in options, name
    for flag, parameter in options.items():
        assert parameter.help and len(parameter.help.partition("[default")[0]) > 4, f"{name} {flag} has no help text"


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_option_shows_its_default_and_every_number_its_unit(name: str, command: Any) -> None:
    context = command.make_context(name, [], resilient_parsing=True)
    for flag, parameter in options_of(command).items():
        shown = parameter.get_help_record(context)[1]
        assert "[default: " in shown, f"{name} {flag} shows no default: {shown}"
        if parameter.type.name.partition(" ")[0] in ("integer", "float"):
            has = parameter.metavar in UNITS or f"{name} {flag}" in WITHOUT_UNIT
            assert has, f"{name} {flag} {parameter.metavar} names no unit"


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
    for name, _ in commands():
        assert row_of(name), f"docs/cli.md has no row of swarmnode {name}"
    codes = {label: code for label, code in vars(exitcodes).items() if isinstance(code, int)}
    assert len(codes) == len(re.findall(r"^\| \d+ \| `[A-Z_]+` \| .{10,} \|$", page, re.MULTILINE))
    for label, code in codes.items():
        assert f"| {code} | `{label}` | " in page


def row_of(name: str) -> str:
    """What docs/cli.md says of a command; of some it has two rows."""
    page = CLI_PAGE.read_text(encoding="utf-8")
    return "".join(re.findall(rf"^\| `swarmnode {re.escape(name)}[` \[].*$", page, re.MULTILINE))


def flags_in(text: str) -> set[str]:
    return set(re.findall("--[a-z-]+", " ".join(re.findall("`(--[^`]*)`", text))))


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_the_page_names_every_option_of_a_command_in_its_row_and_no_other(name: str, command: Any) -> None:
    row, has = row_of(name), options_of(command)
    told = flags_in(row)
    if shared := SHARED.search(row):
        lacks = flags_in(shared[2] or "")
        assert not lacks & set(has), f"docs/cli.md, swarmnode {name}: it has {lacks & set(has)}"
        told = flags_in(row.replace(shared[0], "")) | set(options_of(dict(commands())[shared[1]])) - lacks
    if "configuration.md#the-node" in row:
        told |= {flag_name(key) for key in describe(NodeConfig)}
    known = {flag: {*option.opts, *option.secondary_opts} for flag, option in has.items()}
    unnamed = [flag for flag, names in known.items() if flag not in EVERYWHERE and not names & told]
    assert not unnamed, f"docs/cli.md, swarmnode {name}: its row does not name {unnamed}"
    none = told - EVERYWHERE - set().union(*known.values())
    assert not none, f"docs/cli.md, swarmnode {name}: it has no {none}"


def test_the_page_for_volunteers_has_every_cap_with_unit_and_default() -> None:
    page = (DOCS / "volunteers.md").read_text(encoding="utf-8")
    rows = {}
    for line in re.findall(r"^\| `.*$", page.split("## How much it takes")[1].split("\n\n`python")[0], re.MULTILINE):
        cells = line.split(" | ")
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells)
    assert set(rows) == set(CAPS)
    for key, cells in rows.items():
        field, described = describe(NodeConfig)[key]
        default = as_toml(field.default).removesuffix(".0") if field.default != "" else "empty"
        assert described.unit in cells[1] and re.search(rf"\b{default}\b", cells[1]), f"{key}: {cells[1]}"
    not_counted = re.search(r"Not counted: (.*?)\.", describe(NodeConfig)["memory"][1].help)
    assert not_counted and not_counted[1] in rows["memory"][3], "two pages say what the cap on memory leaves out"


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
