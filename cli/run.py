"""`swarmnode run`: start the daemon in the foreground.

Every setting of the node is a flag here, with the help, unit and range that `node/config.py` states. A flag that is not
given stays None, so that `config show` and the daemon can tell a default from a choice.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from swarmnode.cli.terminal import ConfigOption, JsonOption, UsageMistake, declare, directory, heed, one_run, say
from swarmnode.node.config import OFF, NodeConfig, load_config
from swarmnode.node.invite import check_named, decode, is_link
from swarmnode.node.storage.datadir import DataDir
from swarmnode.training.options import as_toml, describe, types_of
from swarmnode.training.runspec import BUILT_IN_RUNS, load_runspec

_KNOWN = describe(NodeConfig)
_NAME = re.compile(r"[a-z][a-z0-9-]*")


# What a flag's value is called in --help, by its unit where nothing is said; of a switch, its other name, else --no-
_VALUES = {"data_dir": "DIR", "port": "PORT", "listen": "IP", "announce": "MULTIADDR", "join": "LINK"}
_VALUES |= {"bootstrap": "MULTIADDR", "role": "ROLE", "device": "DEVICE", "cpu": "PERCENT", "sandbox": "MODE"}
_VALUES |= {"sandbox_read": "PATH", "corpus": "PATH", "tokenizer": "FILE", "weights": "FILE", "data": "WHICH"}
_VALUES |= {"base": "MODEL", "policy": "POLICY", "sampling": "WHICH", "checkpoint_hours": "HOURS", "hours": "SPANS"}
_VALUES |= {"only_when_idle": "MINUTES", "temperature": "DEGREES", "wait_seconds": "SECONDS", "log_level": "LEVEL"}
_VALUES |= {"dashboard": "HOST:PORT", "log_format": "FORMAT", "passphrase_file": "FILE", "unlisted": "--listed"}
_VALUES |= {"not_on_battery": "--on-battery"}


def _flag(key: str) -> inspect.Parameter:
    """The typer option of a setting: help, unit, range and default from its description."""
    field, described = _KNOWN[key]
    allowed = described.allowed()
    limits = f" ({allowed})" if described.choices or described.between else ""
    default = "none" if field.default in ((), "") else as_toml(field.default).strip('"')
    unit = f" {described.unit}" if described.unit and default != "none" else ""
    text = f"{described.help[0].upper()}{described.help[1:]}{limits}. [default: {default}{unit}]"
    kind, name = types_of(NodeConfig)[key], key.replace("_", "-")
    if kind is bool:
        shown = typer.Option(f"--{name}/{_VALUES.get(key, f'--no-{name}')}", show_default=False, help=text)
    else:
        value = _VALUES.get(key) or described.unit.upper() or "N"
        shown = typer.Option(f"--{name}", metavar=value, show_default=False, help=text)
    kind = Annotated[(list[str] if get_origin(kind) is tuple else kind) | None, shown]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def taking(others: Iterable[inspect.Parameter]) -> Callable[[Any], Any]:
    """Gives a command these options behind its own, in the place of its last parameter, `**options`."""

    def decorate(command: Any) -> Any:
        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        names = {each.name for each in own}
        return declare(command, [*own, *(each for each in others if each.name not in names)])

    return decorate


@taking(map(_flag, _KNOWN))
def run(
    runspec: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.toml",
            help="The run to create or go on with: a file, or name or beginning of the id of a run that is known here; "
            "see above for leaving it out.",
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN_ID", help="The run to join or go on with. [default: the only one there is]"),
    ] = None,
    roster: Annotated[
        str | None,
        typer.Option(metavar="ROUND:ID", help="Join only a history of the run with this roster. [default: any]"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="ROUNDS", help="Stop when the run has so many. [default: no limit]")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Serve on after the last round, until Ctrl-C. [default: end]")
    ] = False,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose",
            help="Wait until a run is chosen on the node's page. [default: go on with the only run there is]",
        ),
    ] = False,
    config_file: ConfigOption = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            show_default=False,
            help=f"A built-in run in place of a run file ({', '.join(BUILT_IN_RUNS)}), a task of your own, "
            "FILE.py:CLASS, or questions, text:FILE.jsonl; code is only ever taken from this machine. [default: none]",
        ),
    ] = None,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="As --dashboard off. [default: a page]")] = False,
    json_output: JsonOption = False,
    **settings: Any,
) -> None:
    """Start the node: join or create a run, and train.

    The first Ctrl-C leaves the swarm in order; a second one ends the node at once.

    swarmnode run RUN.toml creates a run or goes on with it; swarmnode join LINK joins one, as does --join MULTIADDR
    --run RUN_ID; swarmnode run alone goes on with the only run in the data directory; swarmnode run --task
    digits-rl begins or joins the swarm in which policies learn from one another's answers.

    Example: swarmnode run my-run.toml --cpu 50
    """
    heed(settings.get("data_dir"), json_output)
    if task is not None and (built_in := _built_in(task)) is not None:
        if runspec is not None or run_id is not None:
            raise UsageMistake(f"--task {task} is a run by itself; leave out the run file and --run")
        runspec, task = built_in, None
    settings |= {"task": task} | ({"dashboard": OFF} if no_dashboard else {})
    if runspec is not None and run_id is None and not runspec.exists() and runspec.suffix != ".toml":
        home = DataDir(directory())
        if (known := home.known_runs()) or is_link(str(runspec)):
            runspec, run_id = None, one_run(known, str(runspec), home.path, "swarmnode run ")
    if join := settings.get("join"):
        settings["join"], run_id, roster = _invited(join, run_id, roster)
    given = {key: value for key, value in settings.items() if value is not None}
    check_named(run_id, roster)
    if choose and (runspec is not None or run_id is not None or join):
        raise UsageMistake("--choose waits for a run to be chosen, and one was named; leave out one of the two")
    if run_id is not None and runspec is not None:
        raise UsageMistake("a run file and --run were both given; leave out --run, the file says which run it is")
    if runspec is not None:
        load_runspec(runspec)  # a mistake in it is said before anything starts
    loaded = load_config(config_file, os.environ, given)
    DataDir(loaded.config.directory).check_free()
    if loaded.config.log_format != "json":
        say(f"swarmnode starts, with its data in {loaded.config.directory}; some seconds")
    gc.disable()  # while modules are imported, which stay
    from swarmnode.node.daemon import RunOptions, run_daemon

    gc.freeze()
    gc.enable()
    options = RunOptions(runspec, run_id, rounds, stay, json_events=json_output, roster=roster or "", choose=choose)
    raise typer.Exit(run_daemon(loaded, options))


def _invited(join: list[str], run_id: str | None, roster: str | None) -> tuple[list[str], str | None, str | None]:
    """Addresses, run and roster, with those of links. Raises UsageMistake."""
    addresses: list[str] = []
    for place in join:
        if not is_link(place):
            addresses.append(place)
            continue
        found = decode(place)
        if run_id and not run_id.startswith(found.run_id):
            raise UsageMistake(f"{run_id} and {found.run_id} are two runs, by --run or the links; name one")
        addresses += found.addresses
        run_id, roster = run_id or found.run_id or None, roster or found.roster or None
    return addresses, run_id, roster


def _built_in(task: str) -> Path | None:
    """The run file of a built-in run; None where the task is of another kind. Raises UsageMistake."""
    if not _NAME.fullmatch(task):
        return None
    if task not in BUILT_IN_RUNS:
        raise UsageMistake(f"--task {task}: built in is {', '.join(BUILT_IN_RUNS)}; your own is FILE.py:CLASS")
    return BUILT_IN_RUNS[task]
