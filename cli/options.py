"""Options and output that the commands share: --data-dir, --json, and how a result is printed.

Nothing here costs import time: one small function a question.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.node.config import Loaded, load_config

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        show_default=False,
        help="The node's data directory. [default: SWARMNODE_DATA_DIR, else ~/.local/share/swarmnode]",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print JSON on standard output. [default: text]", show_default=False),
]

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration file. [default: config.toml in the data directory]"),
]


def loaded(data_dir: Path | None) -> Loaded:
    """The configuration that a command without settings of its own works with."""
    return load_config(None, os.environ, {} if data_dir is None else {"data_dir": str(data_dir)})


def directory(data_dir: Path | None) -> Path:
    """The data directory that --data-dir, the environment or the default names; its files are not read."""
    if data_dir is not None:
        return data_dir.expanduser().absolute()
    from swarmnode.node.config import default_data_dir

    return Path(os.environ.get("SWARMNODE_DATA_DIR") or default_data_dir(os.environ)).expanduser().absolute()


def print_json(value: Any) -> None:
    """One JSON value on one line, at once, so that a program that reads a pipe gets it when it happens."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def say(text: str) -> None:
    """A remark that is no result: on standard error."""
    print(text, file=sys.stderr)
