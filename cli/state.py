"""`swarmnode state …`: look at, write, follow and copy what the swarm knows together."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import absolute, age, ask, directory, duration, group, number_of, plain, show, size, table
from swarmnode.node.control.client import ControlClient

FILE_TIMEOUT = 600.0  # s; importing verifies some 10 000 elements a second
VALUE_WIDTH = 60  # characters of a value that a table shows

PrefixArgument = Annotated[str, typer.Argument(metavar="[PREFIX]", help="What keys begin with, such as note/.")]
AuthorOption = Annotated[
    str | None, typer.Option("--author", metavar="PEER", help="Only this peer's; me is this node. [default: all]")
]

state = group("Look at, write, follow and copy what the swarm knows together.")


@state.command("ls")
def ls(
    prefix: PrefixArgument = "",
    author: AuthorOption = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, metavar="COUNT", help="How many at most.")] = 100,
) -> None:
    """List what is there, in order of key and author.

    Deleted keys are shown until they expire.

    Example: swarmnode state ls note/ --limit 20
    """
    answer = ask("state_ls", prefix=prefix, author=author, limit=limit)
    rows = [
        [plain(each["key"]), each["author"], f"{age(each['written'])} ago", plain(_value_of(each), VALUE_WIDTH)]
        for each in answer["elements"]
    ]
    more = f"; there are more (--limit {limit})" if answer["more"] else ""
    listed = table(["KEY", "AUTHOR", "WRITTEN", "VALUE"], rows)
    show(answer, [listed, number_of(len(rows), "element") + more])


@state.command("get")
def get(key: Annotated[str, typer.Argument(metavar="KEY", help="The whole key.")], author: AuthorOption = None) -> None:
    """Print the value under a key, of one author or of all.

    Example: swarmnode state get note/today
    """
    answer = ask("state_get", key=key, author=author)
    told = [(element["author"], plain(_value_of(element))) for element in answer["elements"]]
    lines = [value if len(told) == 1 else f"{author}  {value}" for author, value in told]
    show(answer, "\n".join(lines))


@state.command("put")
def put(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key; it begins with note/.")],
    value: Annotated[
        str | None, typer.Argument(metavar="[VALUE]", help="JSON where it is JSON, otherwise text.", show_default=False)
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the key instead. [default: write it]")] = False,
) -> None:
    """Write a small signed note for every node of the run to read.

    It lasts a week, or until it is written again. A node has 64 notes of up to 2 kB; a 65th displaces the oldest.

    Example: swarmnode state put note/today '"sunny"'
    """
    if (value is None) != delete:
        raise typer.BadParameter("give a VALUE, or --delete, and not both", param_hint="VALUE")
    answer = ask("state_put", key=key, value=_parsed(value), delete=delete)
    said = "deleted" if delete else f"written, for {duration(answer['expires'] - time.time())}"
    show(answer, f"{key}: {said}")


@state.command("watch")
def watch(prefix: PrefixArgument = "") -> None:
    """Print what is stored from now on, until Ctrl-C.

    That is this node's own and what comes from others.

    Example: swarmnode state watch note/
    """
    with suppress(KeyboardInterrupt):
        for element in ControlClient(directory()).stream("state_watch", prefix=prefix):
            lost = f"({element['lost']} changes came too fast to be shown)" if element["lost"] else ""
            show(element, [lost, f"{plain(element['key'])}  {element['author']}  {plain(_value_of(element))}"])


@state.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; one that is there is replaced.")],
) -> None:
    """Write everything into a file, signatures included.

    Example: swarmnode state export state.bin
    """
    answer = ask("state_export", timeout=FILE_TIMEOUT, path=absolute(file))
    show(answer, f"{number_of(answer['elements'], 'element')} in {answer['path']}")


@state.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that state export wrote, of this run.")],
) -> None:
    """Take in such a file. Every element is verified, so the file need not be trusted.

    Example: swarmnode state import state.bin
    """
    answer = ask("state_import", timeout=FILE_TIMEOUT, path=absolute(file))
    others = ", ".join(f"{count} {what}" for what, count in sorted(answer["verdicts"].items()) if what != "stored")
    new = number_of(answer["stored"], "new element")
    show(answer, f"{new}{f'; {others}' if others else ''}")


@state.command("stats")
def stats(
    cutoff: Annotated[
        int | None,
        typer.Option("--cutoff", min=0, metavar="MS", help="Hash what expires after it, ms since 1970. [default: now]"),
    ] = None,
) -> None:
    """Print how much there is of what, and a hash of it.

    Nodes that hold the same print the same hash for the same --cutoff.

    Example: swarmnode state stats
    """
    answer = ask("state_stats", cutoff=cutoff)
    kinds = [[kind, str(number)] for kind, number in answer["kinds"].items()]
    held = f"{number_of(answer['elements'], 'element')} of {number_of(answer['authors'], 'author')}"
    ahead = f"the clock of records is {answer['clock_ahead_s']:.0f} s ahead of this machine's"
    lines = [
        table(["KIND", "ELEMENTS"], kinds, right=frozenset({1})),
        f"{held}, {size(answer['size'])}",
        f"on disk {size(answer['disk'])}",
        f"state hash {answer['state_hash']} of what expires after {answer['cutoff']}",
        ahead if answer["clock_ahead_s"] > 1 else "",
        f"warning: {answer['warning']}" if answer["warning"] else "",
    ]
    show(answer, lines)


def _value_of(element: dict[str, Any]) -> str:
    """A value for a person: text as it is, anything else as JSON."""
    if element["deleted"]:
        return "(deleted)"
    value = element["value"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(value: str | None) -> Any:
    try:
        return None if value is None else json.loads(value)
    except ValueError:
        return value
