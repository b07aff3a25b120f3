"""`swarmnode metrics`: what a running daemon counts, for Prometheus or for a program."""

from __future__ import annotations

from swarmnode.cli.options import DataDirOption, JsonOption, directory, print_json
from swarmnode.node.control.client import ControlClient


def metrics(data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Print the node's metrics, as Prometheus reads them.

    docs/metrics.md lists them and says how to collect them.
    """
    answer = ControlClient(directory(data_dir)).call("metrics", timeout=10.0)
    if json_output:
        print_json(answer["metrics"])
    else:
        print(answer["text"], end="")
