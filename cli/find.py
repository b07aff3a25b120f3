"""Commands of first contact: join a run.

`join` is `run` under the name that a person looks for: what it takes says where, and every option of `run` holds.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Annotated, Any

import typer

from swarmnode.cli.run import run

_LEFT_OUT = ("runspec", "join")  # of run's options: what is joined says both


def _with_options_of_run(command: Any) -> Any:
    """The command with the options of `run` behind its own."""

    @wraps(command)
    def whole(**given: Any) -> None:
        command(**given)

    own = inspect.signature(command, eval_str=True).parameters
    others = inspect.signature(run, eval_str=True).parameters
    parameters = [each for each in own.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [each for name, each in others.items() if name not in (*_LEFT_OUT, *own)]
    whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    whole.__annotations__ = {each.name: each.annotation for each in parameters}
    return whole


@_with_options_of_run
def join(
    where: Annotated[
        str, typer.Argument(metavar="LINK", help="A link (swarm1...), or the multiaddr of a node of the run.")
    ],
    **options: Any,
) -> None:
    """Join a run and train, by a link from whoever is in it.

    swarmnode id --join prints the link there. The options are those of swarmnode run.
    """
    run(join=[where], **options)
