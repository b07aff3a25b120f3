"""Commands of first contact: look for runs, join one; be a seed, through which others find one another.

`join` is `run` under the name that a person looks for: what it takes says where, and every option of `run` holds.
"""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.run import run, taking
from swarmnode.cli.terminal import UsageMistake, age, ask, count, flags, heed, plain, say, short_peer, show, size, table
from swarmnode.node.config import load_config
from swarmnode.node.control.client import NotRunning
from swarmnode.node.exitcodes import RUN_UNAVAILABLE, ExpectedError
from swarmnode.node.invite import is_link
from swarmnode.node.storage.datadir import DataDir
from swarmnode.training.options import number_of

_PLACE = ("port", "listen", "quic", "announce", "bootstrap", "mdns", "upnp", "up", "down")
_OF_A_SEED = (*_PLACE, "config_file", "data_dir", "log_level", "log_format", "passphrase_file", "json_output")
_SEARCH = ("data_dir", "listen", "bootstrap", "mdns", "passphrase_file")  # that a search heeds
_SORTED = {"name": "name", "members": "members", "parameters": "parameters", "round": "round"}
_SORTED |= {"memory": "memory", "rate": "rate", "age": "age_s"}
_HEADS = ["RUN", "ID", "TASK", "METHOD", "TRUST", "SIZE", "MEMBERS", "ROUND", "MEMORY", "RATE", "SIGNED BY"]
SEARCH = 20.0  # seconds
SEED_PEERS = 256  # of a seed, where everybody comes first


_OF_RUN = inspect.signature(run, eval_str=True).parameters


@taking(each for name, each in _OF_RUN.items() if name not in ("runspec", "weights", "join", "choose"))
def join(
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE",
            help="A link (swarm1...), the multiaddr of a node of the run, or the run's name or the beginning of its id "
            "as swarmnode discover shows it.",
        ),
    ],
    **options: Any,
) -> None:
    """Join a run by a link or by its name, and train.

    A link comes from a member: swarmnode id --join prints it there. A name is looked up as swarmnode discover does;
    where several runs have it, none is joined. All options of swarmnode run hold but --join, --weights and --choose.

    Example: swarmnode join swarm1qy3… --cpu 50
    """
    if is_link(where) or where.startswith("/"):
        run(join=[where], **options)
        return
    heed(options["data_dir"], options["json_output"])
    given = {key: options[key] for key in _SEARCH if options[key] is not None}
    DataDir(load_config(options["config_file"], os.environ, given).config.directory).check_free()
    answer = _found(where, SEARCH, options["config_file"], given)
    fitting = [each for each in answer["runs"] if each["name"] == where or each["run_id"].startswith(where)]
    if not fitting:
        why = _why_none(answer, SEARCH)
        raise ExpectedError(f"no run has the name {where!r}, or an id that begins so: {why}", exit_code=RUN_UNAVAILABLE)
    if len(fitting) > 1:
        listed = "\n".join(f"  swarmnode join {each['run_id'][:16]}  {_whose(each)}" for each in fitting)
        raise UsageMistake(f"{len(fitting)} runs are called {where!r}; say which:\n{listed}")
    (chosen,) = fitting
    told = {key: chosen[key] for key in ("name", "run_id", "signed_by", "by_owner")}
    show({"event": "joining", **told}, f"joining {chosen['name']} ({chosen['run_id'][:12]}…): {_whose(chosen)}")
    run(**{**options, "join": chosen["addresses"], "run_id": chosen["run_id"]})


def discover(
    name: Annotated[str, typer.Argument(help="Only runs of this name, or whose id begins so. [default: all]")] = "",
    task: Annotated[str | None, typer.Option(metavar="TASK", help="Only runs of this task. [default: all]")] = None,
    trust: Annotated[str | None, typer.Option(metavar="TRUST", help="Only known, or only open. [default: all]")] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GB", help="Only runs that need at most so much. [default: all]")
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="BY", help=f"{', '.join(_SORTED)}. [default: the best proven first]")
    ] = "",
    within: Annotated[
        float, typer.Option(min=1, max=300, metavar="SECONDS", help="Look for so long at most.")
    ] = SEARCH,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MULTIADDR", help="Where to find other nodes, as of swarmnode run. [default: the setting]"
        ),
    ] = None,
) -> None:
    """List runs that want members.

    They are looked for in the DHT, in the local network and at seeds. A run is shown when one of its members answered
    and gave the run's specification: what the list says of name, task, method, trust and owner is certain, the rest
    is what members say. swarmnode join NAME joins one.

    Example: swarmnode discover --task byte-lm --memory 4
    """
    if sort and sort not in _SORTED:
        raise UsageMistake(f"--sort {sort} is none of {', '.join(_SORTED)}")
    given: dict[str, Any] = dict(flags())
    if bootstrap:
        given["bootstrap"] = bootstrap
    answer = _found(name, within, None, given)
    found = [
        each
        for each in answer["runs"]
        if (not name or each["name"] == name or each["run_id"].startswith(name))
        and task in (None, each["task"])
        and trust in (None, each["trust"])
        and (memory is None or (each["memory"] or 0) <= memory * 1e9)
    ]
    if sort:
        found.sort(key=lambda each: each[_SORTED[sort]] or 0, reverse=sort not in ("name", "memory", "age"))
    rows = [
        [
            plain(each["name"], 24),
            each["run_id"][:12],
            plain(each["task"], 12),
            each["method"] + (" (code)" if each["code_sha256"] else ""),
            each["trust"],
            count(each["parameters"]),
            str(each["members"]),
            str(each["round"]),
            size(each["memory"]) if each["memory"] else "-",
            f"{size(each['rate'])}/s" if each["rate"] else "-",
            _whose(each),
        ]
        for each in found
    ]
    text = table(_HEADS, rows, right=frozenset((5, 6, 7, 8, 9))) or _why_none(answer, within)
    show({**answer, "runs": found, "seen": len(answer["runs"])}, text)


def _why_none(answer: dict[str, Any], within: float) -> str:
    """Why a search found no run that fits, and what to do."""
    seen, peers, unreached = len(answer["runs"]), answer["peers"], answer["unreached"].items()
    link = "a run that is not listed is joined by a link from one of its members (swarmnode id --join)"
    if seen:
        return f"of {number_of(seen, 'run')} found, none fits. swarmnode discover alone lists all; {link}"
    if peers:
        return (
            f"{number_of(peers, 'node')} answered, but told of no run with a member that answers, in {within:g} s. "
            f"Look again later, or at other nodes with --bootstrap MULTIADDR; {link}"
        )
    tried = [f"\n  {plain(address)}: {plain(why.removeprefix(f'{address}: '))}" for address, why in unreached]
    return (
        f"no other node answered within {within:g} s, and runs are found through others. Name one that runs with "
        "--bootstrap MULTIADDR, or join by a link from a member (swarmnode id --join)" + "".join(tried)
    )


def _found(wanted: str, within: float, file: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """What the running daemon finds, or else a node for the moment."""
    try:
        return dict(ask("discover", timeout=within + 10, wanted=wanted, within=within))
    except NotRunning:
        from swarmnode.node.runfinder import look_around

        say(f"looking for runs, for {within:g} s at the most")
        return look_around(load_config(file, os.environ, given).config, wanted, within)


def _whose(run: dict[str, Any]) -> str:
    owner = run["owner"]
    signed = [peer for peer in run["signed_by"] if peer != owner] if owner else run["signed_by"]
    said = [f"its owner {short_peer(owner)}"] * run["by_owner"] + [short_peer(peer) for peer in signed]
    whose = f"; owned by {short_peer(owner)}" if owner and not run["by_owner"] else ""
    return f"signed by {', '.join(said)} {age(time.time() - run['age_s'])} ago{whose}"


@taking(each for name, each in _OF_RUN.items() if name in _OF_A_SEED)
def seed(
    max_peers: Annotated[
        int, typer.Option(min=1, max=4096, metavar="PEERS", help="Peers to be connected to at the most.")
    ] = SEED_PEERS,
    **options: Any,
) -> None:
    """Help others to find one another.

    It is a node of the DHT and a relay, in no run and without a trainer. It prints the option, setting and DNS record
    by which nodes find the swarm through it. Anybody may run one; a machine with a public address serves best.

    Example: swarmnode seed --max-peers 500
    """
    run(role="relay", no_dashboard=True, max_peers=max_peers, **options)
