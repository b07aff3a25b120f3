"""`swarmnode sample`: the running node's model continues a text."""

from __future__ import annotations

from typing import Annotated

import typer

from swarmnode.cli.options import DataDirOption, JsonOption, directory, print_json
from swarmnode.cli.text import plain
from swarmnode.node.control.client import ControlClient

SECONDS_A_TOKEN = 0.5  # s; patience with a slow machine, beside BUSY
BUSY = 300.0  # s; the trainer answers between two rounds' work


def sample(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='How the text begins, such as "def main(".')],
    length: Annotated[int, typer.Option(min=1, max=65536, help="Tokens to write; bytes, for byte-lm.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="0 takes the likeliest token; higher is more varied.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed: the same seed and model write the same text.")] = 0,
    data_dir: DataDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Let the model that the node is training continue PROMPT."""
    answer = ControlClient(directory(data_dir)).call(
        "sample",
        timeout=BUSY + SECONDS_A_TOKEN * length,
        prompt=prompt,
        length=length,
        temperature=temperature,
        seed=seed,
    )
    if json_output:
        print_json(answer)
    else:
        print("\n".join(plain(line.replace("\t", "    ")) for line in answer["text"].split("\n")))
