"""`swarmnode successor …`: a run's owner ends it, or publishes the run that continues it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.options import DataDirOption, JsonOption, directory, print_json
from swarmnode.cli.text import plain
from swarmnode.node.control.client import ControlClient

TIMEOUT = 120.0  # s; a state is written to disk
ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Told to everybody, at most 400 characters. [default: none]")
]

successor = typer.Typer(
    help="For a run's owner: end the run, or publish the one that continues it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@successor.command("show")
def show(data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Print what the owner of this node's run said about how it goes on."""
    _told(ControlClient(directory(data_dir)).call("successor_show"), json_output)


@successor.command("publish")
def publish(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file, with other settings than now.")],
    reason: ReasonOption = "",
    data_dir: DataDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Publish the run that continues this node's run, from the state that it has now.

    [model] and [task] must be the same, the data are where the file names none; everything else may change. Every node
    is told in its status and goes over when its owner says so: swarmnode run --run ID. The word lasts a week; publish
    again to renew it, which begins from the state of then.
    """
    path = str(file.expanduser().absolute())
    answer = ControlClient(directory(data_dir)).call("successor_publish", timeout=TIMEOUT, path=path, reason=reason)
    _told(answer, json_output)


@successor.command("end")
def end(reason: ReasonOption = "", data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Tell every node that the run has ended; each goes on until its owner stops it. The word lasts a week."""
    _told(ControlClient(directory(data_dir)).call("successor_end", reason=reason), json_output)


def _told(answer: dict[str, Any], json_output: bool) -> None:
    if json_output:
        print_json(answer)
        return
    why = f" ({plain(answer['reason'])})" if answer["reason"] else ""
    if answer["successor"]:
        print(f"continued after round {answer['round']}{why}: swarmnode run --run {plain(answer['successor'])}")
    elif answer["ended"]:
        print(f"ended after round {answer['round']}{why}")
    else:
        owner = answer["owner"]
        print(f"nothing said by the owner, {plain(owner)}" if owner else "the run has no owner who could say anything")
