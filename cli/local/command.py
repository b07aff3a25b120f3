"""The command line of `swarmnode local`; what it does is in `run.py`.

    swarmnode local --nodes 4 --rounds 12 --solo
    swarmnode local --task questions.py:Questions --rounds 100

This module is imported for `swarmnode --help` as well, so what takes long is imported when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarmnode.node.config import OFF, NodeConfig

PAGE = NodeConfig().dashboard
DEFAULT_ROUNDS = 20  # of 80 inner steps: about as long as the default model learns quickly


def local(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="The run; without it a small GPT on Python's sources.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, metavar="NODES", help="Nodes to start.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, metavar="ROUNDS", help="Rounds to train.")] = DEFAULT_ROUNDS,
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            help="What is learned, in place of a run file or with one that asks it: a built-in task, gym:NAME, "
            "text:FILE.jsonl, or a task of your own, FILE.py:CLASS. [default: as RUN.toml says]",
        ),
    ] = "",
    solo: Annotated[bool, typer.Option("--solo", help="Then train one node alone as well. [default: no]")] = False,
    attack: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:COUNT]",
            help="Let COUNT nodes, the last ones, lie in every round; help: which lies. [default: nobody; COUNT 1]",
        ),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON, an object a line. [default: text]")] = False,
    threads: Annotated[int, typer.Option(min=1, metavar="THREADS", help="CPU threads of each node's trainer.")] = 1,
    report: Annotated[Path, typer.Option(file_okay=False, metavar="DIR", help="For the report.")] = Path("report"),
    dashboard: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the page is that shows the nodes; any free port if taken.")
    ] = PAGE,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="As --dashboard off. [default: a page]")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the nodes' data. [default: only after an error]")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(file_okay=False, metavar="DIR", help="For the nodes' data. [default: temporary]")
    ] = None,
) -> None:
    """Train with several real nodes on this machine, and report.

    With --attack some of them lie, in a run of its own that is thrown away: without RUN.toml it is an open one.

    Example: swarmnode local --nodes 3 --rounds 5
    """
    from swarmnode.cli.local.attack import listing, parse_attack
    from swarmnode.cli.local.run import run_local
    from swarmnode.cli.local.swarm import LocalOptions
    from swarmnode.node.exitcodes import UsageMistake

    if attack == "help":
        print(listing())
        raise typer.Exit()
    if attack is not None and solo:
        raise UsageMistake("--solo and --attack were both given; nobody attacks a node that is alone")
    options = LocalOptions(
        nodes=nodes,
        run_file=run_file,
        rounds=rounds,
        task=task,
        solo=solo,
        json=json_lines,
        threads=threads,
        report=report,
        dashboard=OFF if no_dashboard else dashboard,
        keep=keep,
        data_dir=data_dir,
        attack=None if attack is None else parse_attack(attack, nodes),
    )
    raise typer.Exit(run_local(options))
