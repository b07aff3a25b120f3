"""Commands that say who and what this is: id, version. Both work without a running daemon."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.options import DataDirOption, JsonOption, directory, loaded, print_json
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning


def identify(
    join: Annotated[
        bool,
        typer.Option("--join", help="Print the line that joins this node elsewhere. [default: peer id]"),
    ] = False,
    passphrase_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the key's passphrase. [default: SWARMNODE_PASSPHRASE]"),
    ] = None,
    data_dir: DataDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Print the node's peer id; a key is made on first use."""
    if join:
        _print_join(directory(data_dir), json_output)
        return
    from swarmnode.node.datadir import DataDir
    from swarmnode.node.identity import load_or_create, read_passphrase

    config = loaded(data_dir).config
    home = DataDir(config.directory)
    home.prepare()
    named = config.passphrase_file if passphrase_file is None else str(passphrase_file)
    identity = load_or_create(home.identity, read_passphrase(named, os.environ))
    if json_output:
        print_json({"peer_id": identity.peer_id, "data_dir": str(home.path), "key": str(home.identity)})
    else:
        print(identity.peer_id)


def _print_join(home: Path, json_output: bool) -> None:
    answer = ControlClient(home).call("status", timeout=10.0)
    if not answer["join"]:
        raise ControlError(
            "the node has no address yet that others could dial. Wait a moment, or name one with --announce when it "
            "starts; swarmnode status says how it is reachable."
        )
    if json_output:
        run = answer["run"] or {}
        print_json(
            {
                "join": answer["join"],
                "addresses": answer["addresses"],
                "run_id": run.get("run_id"),
                "roster": run.get("roster"),
            }
        )
    else:
        print(answer["join"])


def version(data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Print the versions of swarmnode, Python and the running daemon."""
    from swarmnode import __version__

    try:
        daemon = ControlClient(directory(data_dir)).call("status", timeout=5.0)["version"]
    except (NotRunning, ControlError):
        daemon = None
    if json_output:
        print_json({"version": __version__, "python": platform.python_version(), "daemon": daemon})
        return
    print(f"swarmnode {__version__} (Python {platform.python_version()})")
    if daemon is not None and daemon != __version__:
        print(f"the running daemon is {daemon}; restart it to use {__version__}")
