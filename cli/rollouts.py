"""`swarmnode rollouts …`: look at the answers that policies share with one another."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from swarmnode.cli.options import DataDirOption, JsonOption, directory, print_json
from swarmnode.cli.status_view import learned, sampled, short_peer
from swarmnode.cli.text import duration, plain, size, sparkline, table
from swarmnode.node.control.client import ControlClient

rollouts = typer.Typer(
    help="Look at the answers that policies share with one another.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@rollouts.command("ls")
def ls(
    author: Annotated[
        str | None, typer.Option("--author", metavar="PEER", help="Only this peer's; me is this node. [default: all]")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="COUNT", help="How many at most.")] = 20,
    data_dir: DataDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """List the groups of answers that are here, own ones and others', the newest first."""
    answer = ControlClient(directory(data_dir)).call("rollouts_ls", author=author, limit=limit)
    if json_output:
        print_json(answer)
        return
    rows = [
        [
            group["id"][:12],
            short_peer(group["author"]),
            plain(group["task"], 24),
            str(group["answers"]),
            str(group["version"]),
            _age(group["made_at_ms"]),
            {None: "own", True: "looked at", False: ""}[group["used"]],
        ]
        for group in answer["groups"]
    ]
    if rows:
        print(table(["id", "author", "task", "answers", "version", "age", ""], rows))
    more = f"; there are more (--limit {limit})" if answer["more"] else ""
    print(f"{len(rows)} group{'' if len(rows) == 1 else 's'}{more}")


@rollouts.command("show")
def show(
    group: Annotated[str, typer.Argument(metavar="ID", help="The id of a group, or how it begins.")],
    data_dir: DataDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show a group: the question, the answers, and what they earn by this node's own check."""
    answer = ControlClient(directory(data_dir)).call("rollouts_show", id=group)
    if json_output:
        print_json(answer)
        return
    print(f"{answer['id']}")
    print(f"by {answer['author']}, policy {plain(answer['policy'], 12)} at version {answer['version']}")
    print(f"{plain(answer['task'])}, difficulty {answer['difficulty']}, seed {answer['seed']}")
    print(f"question  {plain(answer['question'], 200)}\nkey       {plain(answer['key'], 200)}\n")
    rows = [
        [plain(each["text"], 60), f"{each['reward']:.2f}", f"{each['advantage']:+.2f}", str(each["tokens"])]
        for each in answer["answers"]
    ]
    print(table(["answer", "reward", "advantage", "tokens"], rows))


@rollouts.command("pool")
def pool(data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Show what is held of whom, and what of each was refused."""
    answer = ControlClient(directory(data_dir)).call("rollouts_pool")
    if json_output:
        print_json(answer)
        return
    rows = [
        [
            short_peer(author["author"]),
            str(author["groups"]),
            size(author["bytes"]),
            str(author["came"]),
            str(author["used"]),
            str(author["version"]),
            _reasons(author["refused"]),
        ]
        for author in answer["authors"]
    ]
    if rows:
        print(table(["author", "here", "size", "came", "looked at", "version", "refused"], rows))
    held = answer["pool"]
    print(f"others' groups: {held['groups']} of {held['authors']} authors, {size(held['bytes'])}, {held['unused']} new")
    print(f"own groups: {held['own_groups']}, {size(held['own_bytes'])}")


@rollouts.command("stats")
def stats(data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """Show what sharing came to since the node started, and the course of the reward."""
    answer = ControlClient(directory(data_dir)).call("rollouts_stats")
    if json_output:
        print_json(answer)
        return
    rewards = [reward for _, reward in answer["reward_history"]]
    if rewards:
        print(f"reward    {sum(rewards[-10:]) / len(rewards[-10:]):.3f} of 1   {sparkline(rewards, 40)}")
    if answer["learned"]:
        print(f"learned   {learned(answer['learned'])}")
    if answer["sampled"]:
        print(f"samples   {sampled(answer['sampled'])}")
    print(f"alone     {'yes: no other member is connected' if answer['alone'] else 'no'}")
    for each in answer["samplers"]:
        caught = f", not listened to any more: {plain(each['caught'], 24)}" if each["caught"] else ""
        came = f"{each['came']} groups, {each['accepted']} accepted, version {each['version']}"
        refused = f", refused: {_reasons(each['refused'])}" if each["refused"] else ""
        print(f"sampler   {short_peer(each['sampler'])}  {came}{refused}{caught}")
    print(f"refused   {_reasons(answer['pool']['refused']) or 'nothing'}")
    print(f"let go    {_reasons(answer['pool']['dropped']) or 'nothing'}")
    for name, number in sorted(answer["events"].items()):
        print(f"          {number} {plain(name)}")


def _age(made_at: int) -> str:
    return duration(max(0.0, time.time() - made_at / 1000))


def _reasons(counted: dict[str, Any]) -> str:
    return ", ".join(f"{number} {plain(reason, 24)}" for reason, number in sorted(counted.items()))
