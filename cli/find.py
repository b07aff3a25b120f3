"""Commands of first contact: join a run; be a seed, through which others find one another.

`join` is `run` under the name that a person looks for: what it takes says where, and every option of `run` holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from functools import wraps
from typing import Annotated, Any

import typer

from swarmnode.cli.run import run

_PLACE = ("port", "listen", "announce", "bootstrap", "mdns", "upnp", "up", "down")
_OF_A_SEED = (*_PLACE, "config_file", "data_dir", "log_level", "log_format", "passphrase_file", "json_output")
SEED_PEERS = 256  # of a seed, where everybody comes first


def _with_options_of_run(names: Container[str]) -> Callable[[Any], Any]:
    """Gives a command these options of `run` behind its own."""

    def decorate(command: Any) -> Any:
        @wraps(command)
        def whole(**given: Any) -> None:
            command(**given)

        own = inspect.signature(command, eval_str=True).parameters
        others = inspect.signature(run, eval_str=True).parameters
        parameters = [each for each in own.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [each for name, each in others.items() if name in names and name not in own]
        whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        whole.__annotations__ = {each.name: each.annotation for each in parameters}
        return whole

    return decorate


@_with_options_of_run(set(inspect.signature(run).parameters) - {"runspec", "weights", "join"})
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


@_with_options_of_run(_OF_A_SEED)
def seed(
    max_peers: Annotated[
        int,
        typer.Option(min=1, max=4096, metavar="N", help="Peers to be connected to at the most."),
    ] = SEED_PEERS,
    **options: Any,
) -> None:
    """Help others to find one another: a node of the DHT and a relay, in no run and without a trainer.

    It prints the setting and the DNS record by which nodes find the swarm through it. Anybody may run one; a machine
    with a public address serves best.
    """
    run(role="relay", no_dashboard=True, max_peers=max_peers, **options)
