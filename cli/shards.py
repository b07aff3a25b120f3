"""`swarmnode shards …`: look at, fetch, add, pin and delete shards of a running daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import absolute, age, ask, group, number_of, show, size, table

GET_TIMEOUT = 3600.0  # s that a fetch may take; what has arrived is kept
PUT_TIMEOUT = 600.0  # s; the largest shard, 4 GiB, is hashed and copied in less on a slow disk
ASK_TIMEOUT = 60.0  # s; looking for providers takes some
GRACE = 10.0  # s that the daemon has beyond its own time limit to say so

ShardArgument = Annotated[
    str, typer.Argument(metavar="SHARD", help="The shard's id, 64 hex digits; its beginning where it is here.")
]
PinOption = Annotated[bool, typer.Option("--pin", help="Keep it whatever room is needed. [default: do not pin]")]

shards = group("List, add, fetch, pin and delete shards of data.")


@shards.command("ls")
def ls() -> None:
    """List the shards that are here, the one used last first.

    Example: swarmnode shards ls
    """
    answer = ask("shards_ls")
    rows = [[one["id"], size(one["size"]), _state(one), f"{age(one['used'])} ago"] for one in answer["shards"]]
    listed = table(["SHARD", "SIZE", "STATE", "LAST USED"], rows, right=frozenset({1}))
    total = f"{number_of(len(rows), 'shard')}, {size(answer['bytes'])} of {size(answer['cap'])}"
    show(answer, [listed, total])


def _state(found: dict[str, Any]) -> str:
    if found["complete"]:
        return "pinned" if found["pinned"] else "complete"
    doing = "fetching" if found["fetching"] else "unfinished"
    return f"{doing}, {found['chunks']} of {found['chunks_in_all']} chunks"


@shards.command("get")
def get(
    shard: ShardArgument,
    to: Annotated[
        Path | None,
        typer.Option("--to", "-o", metavar="FILE", help="Copy it there as well. [default: only into the store]"),
    ] = None,
    pin: PinOption = False,
    providers: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PEER", help="Ask this peer too; may be repeated. [default: who is found]"),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=86400, metavar="SECONDS", help="Longest time to wait.")
    ] = GET_TIMEOUT,
) -> None:
    """Fetch a shard from whoever has it.

    Every chunk is verified. What arrived before an interruption is kept, and the next get goes on from there.

    Example: swarmnode shards get 3fa9c1… --to books.txt
    """
    copy = None if to is None else absolute(to)
    wanted = {"shard": shard, "to": copy, "pin": pin, "from": providers or [], "within": timeout}
    answer = ask("shards_get", timeout=timeout + GRACE, **wanted)
    place = f", copied to {answer['path']}" if answer["path"] else ""
    show(answer, f"{answer['id']}: {size(answer['size'])} in {answer['seconds']:.1f} s{place}")


@shards.command("put")
def put(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file; it is copied, up to 4 GiB.")],
    pin: PinOption = False,
) -> None:
    """Add a file as a shard and offer it to peers. Prints the shard's id.

    Example: swarmnode shards put books.txt --pin
    """
    answer = ask("shards_put", timeout=PUT_TIMEOUT, path=absolute(file), pin=pin)
    show(answer, answer["id"])


@shards.command("pin")
def pin(
    shard: ShardArgument,
    remove: Annotated[bool, typer.Option("--remove", help="Unpin it instead. [default: pin]")] = False,
) -> None:
    """Keep a shard that is here, whatever room is needed.

    Example: swarmnode shards pin 3fa9c1…
    """
    answer = ask("shards_pin", shard=shard, pinned=not remove)
    show(answer, f"{answer['id']} is {'pinned' if answer['pinned'] else 'no longer pinned'}")


@shards.command("gc")
def gc(
    unpinned: Annotated[
        bool, typer.Option("--all", help="Delete all that is not pinned. [default: unfinished ones and excess]")
    ] = False,
) -> None:
    """Delete unfinished shards that nobody fetches, and excess.

    Excess is what is over the cap; the shards used longest ago go first, pinned ones never.

    Example: swarmnode shards gc --all
    """
    answer = ask("shards_gc", timeout=ASK_TIMEOUT, unpinned=unpinned)
    show(answer, f"{number_of(len(answer['deleted']), 'shard')} deleted, {size(answer['bytes'])} freed")


@shards.command("providers")
def providers(shard: ShardArgument) -> None:
    """List the peers that have a shard, or a part of it.

    Example: swarmnode shards providers 3fa9c1…
    """
    answer = ask("shards_providers", timeout=ASK_TIMEOUT, shard=shard)
    found = answer["providers"]
    rows = [[peer["peer_id"], "all" if peer["complete"] else f"{peer['chunks']} chunks"] for peer in found]
    show(answer, table(["PEER", "HAS"], rows) or "nobody who can be reached has it")
