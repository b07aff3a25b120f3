"""`swarmnode runs …`: the runs that this machine knows, from the disk, whether or not the node is running."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.history import measured, run_on_disk
from swarmnode.cli.provenance import export
from swarmnode.cli.steer import STOP_TIMEOUT
from swarmnode.cli.terminal import (
    YesOption,
    as_json,
    be_sure,
    current_run,
    directory,
    group,
    plain,
    run_meant,
    short_peer,
    show,
    size,
    spec_of,
    table,
)
from swarmnode.node.control.client import ControlClient, NotRunning
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.storage.datadir import DataDir, explain, weigh
from swarmnode.training.options import as_toml, describe
from swarmnode.training.runspec import SECTIONS, RunSpec, to_toml

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or how its id begins.")]

runs = group("List, compare, export and delete this machine's runs.")
runs.command("export")(export)


@runs.command("ls")
def list_runs() -> None:
    """List the runs that this machine knows, the newest first.

    Example: swarmnode runs ls
    """
    home = DataDir(directory())
    found = sorted((_told(home, run) for run in home.known_runs()), key=lambda one: -one["time"])
    current = current_run(home.path)
    rows = [
        [
            plain(one["name"] or "(damaged)", 32),
            one["run_id"][:12],
            str(one["rounds"]),
            _measured(one),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one["time"])),
            size(one["bytes"]),
            short_peer(one["owner"]) or "nobody",
            "running" if one["run_id"] == current else "",
        ]
        for one in found
    ]
    heads = ("NAME", "ID", "ROUNDS", "LAST RESULT", "LAST USED", "SIZE", "OWNER", "")
    nothing = f"{home.path}: no run is known here; swarmnode run begins or joins one"
    text = table(heads, rows, right=frozenset({2, 5})) or nothing
    show({"runs": found, "running": current}, text)


@runs.command("show")
def show_run(
    run: RunArgument,
    toml: Annotated[bool, typer.Option("--toml", help="Print the whole run as a run file. [default: summary]")] = False,
) -> None:
    """Show where a run stands, and which of its settings are unusual.

    Example: swarmnode runs show byte-lm
    """
    home = DataDir(directory())
    run_id = run_meant(home, run)
    spec, told = _spec(home, run_id), _told(home, run_id)
    settings = _settings(spec, unusual=True)
    if toml and not as_json():
        print(to_toml(spec), end="")
        return
    text = (
        f"{plain(spec.run.name)}  {run_id}",
        f"{told['rounds']} rounds, last result {_measured(told)}, {size(told['bytes'])} in {home.run(run_id)}",
        f"owner {plain(spec.owner) or 'nobody'}; newest checkpoint "
        + ("none" if told["checkpoint"] is None else f"after {told['checkpoint']} rounds"),
        table(("SETTING", "VALUE"), [(key, plain(as_toml(value), 80)) for key, value in settings.items()]),
    )
    show({**told, "settings": _settings(spec)}, text)


@runs.command("compare")
def compare(first: RunArgument, second: RunArgument) -> None:
    """Compare two runs: settings that differ, and ends of curves.

    Example: swarmnode runs compare byte-lm 3f9c21
    """
    home = DataDir(directory())
    ids = [run_meant(home, name) for name in (first, second)]
    one, other = (_settings(_spec(home, run_id)) for run_id in ids)
    differing = {key: [value, other[key]] for key, value in one.items() if value != other[key]}
    ends = [_end(run_on_disk(home, run_id)) for run_id in ids]
    rows = [(key, *(plain(as_toml(value), 40) for value in values)) for key, values in differing.items()]
    rows += [(what.replace("_", " "), *(_shown(end[what]) for end in ends)) for what in ends[0]]
    heads = ("", *(f"{plain(_spec(home, run_id).run.name, 24)} {run_id[:8]}" for run_id in ids))
    show({"runs": ids, "settings": differing, "ends": ends}, table(heads, rows))


@runs.command("rm")
def leave(
    run_id: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Its name, or how its id begins. [default: the node's, or the only one]"),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Forget a run and delete its checkpoints on this machine.

    A node that is running it is stopped first. swarmnode leave and swarmnode runs rm are the same. Example: swarmnode
    runs rm byte-lm
    """
    home = DataDir(directory())
    chosen = run_meant(home, run_id)
    question = (
        f"Leave run {chosen[:12]} and delete {home.run(chosen)}? Its checkpoints on this machine are lost, and a node "
        "that runs it is stopped."
    )
    be_sure(question, "Delete it", yes)
    try:
        answer = ControlClient(home.path).call("leave", timeout=STOP_TIMEOUT, run_id=chosen)
    except NotRunning:
        answer = {"run_id": chosen, "deleted": _delete(home, chosen)}
    show(answer, f"left {answer['run_id'][:12]}; deleted {', '.join(answer['deleted']) or 'nothing'}")


def _delete(home: DataDir, run_id: str) -> list[str]:
    """Delete a run's directory while holding the lock, so that no daemon starts on it meanwhile."""
    path = home.run(run_id)
    with home:
        if not path.exists():
            return []
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise explain(error, Path(error.filename or path)) from error
        return [str(path)]


def _spec(home: DataDir, run_id: str) -> RunSpec:
    spec = spec_of(home, run_id)
    if spec is None:
        raise ExpectedError(f"{home.run(run_id)}: its run.spec is damaged or missing; nothing more is known of the run")
    return spec


def _told(home: DataDir, run_id: str) -> dict[str, Any]:
    """What there is of a run; `time` is that of its last round, or when it came here, in s since 1970."""
    folder, spec = home.run(run_id), spec_of(home, run_id)
    known = run_on_disk(home, run_id)
    rounds = known["rounds"]
    last = rounds[-1] if rounds else {}
    saved = [
        int(p.stem[6:14])  # what may follow tells one that is being saved again
        for p in folder.glob("checkpoints/round-*.json")
        if p.with_suffix(".safetensors").exists()
    ]
    return {
        "run_id": run_id,
        "name": known["name"],
        "owner": spec.owner if spec is not None else "",
        "rounds": max([last.get("round", -1) + 1, *saved]),
        "checkpoint": max(saved, default=None),
        "last": ([None] + [value for _, value in measured(rounds)])[-1],
        "unit": known["unit"],
        "time": last.get("time", folder.stat().st_mtime),
        "bytes": weigh(folder),
    }


def _end(known: dict[str, Any]) -> dict[str, Any]:
    rounds = known["rounds"]
    values = [value for _, value in measured(rounds)]
    best = max if any("reward" in each for each in rounds) else min
    return {
        "unit": known["unit"],
        "rounds": rounds[-1]["round"] + 1 if rounds else 0,
        "last": values[-1] if values else None,
        "best": best(values, default=None),
        "hours": round((rounds[-1]["time"] - rounds[0]["time"]) / 3600, 3) if rounds else None,
        "tokens_here": sum(each.get("tokens", 0) for each in rounds),
    }


def _settings(spec: RunSpec, *, unusual: bool = False) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, section in SECTIONS.items()
        for key, (field, _) in describe(section).items()
        if (value := getattr(getattr(spec, name), key)) != field.default or not unusual
    }


def _measured(told: dict[str, Any]) -> str:
    return "-" if told["last"] is None else f"{told['last']:.4f} {told['unit']}".rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
