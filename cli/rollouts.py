"""`swarmnode rollouts …`: look at the answers that policies share with one another."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import age, ask, group, number_of, plain, short_peer, show, size, sparkline, table
from swarmnode.cli.views import learned, reasons, sampled

SHORT = 60  # characters of a text that stands in a table
LONG, MOST_LINES, INDENT = 4000, 60, "    "
WHY = {  # by the word that groups or answers are counted under
    "bad-token": "a token that its vocabulary has not, or something behind the end of an answer",
    "capped": "its author has its share of the update already",
    "check-failed": "the check of its answers failed here",
    "flood": "more than its author may send, or have checked",
    "no-standing": "its author was caught lying, or is not listened to",
    "not-drawn": "there was no place left in the update",
    "old": "written too long ago",
    "other-size": "another number of answers than this run has to a question",
    "other-task": "a question that this run does not ask",
    "probation": "authors without standing have their part of the update already",
    "stale": "written too many updates ago",
    "strange-answer": "an answer that neither this policy nor the one that it began as would give",
    "suspect": "several of its author's last groups were refused, so that none of them is learned from",
    "too-large": "larger than its author may have here",
    "too-long": "an answer too long for this policy",
    "too-slow": "an answer whose check takes too long",
    "uninformative": "all of its answers are equally right, so that they teach nothing",
    "unknown-task": "a question that cannot be made here",
    "unknown-vocabulary": "tokens that are not known here",
    "unlikely": "too many strange answers",
    "unreadable": "a text that this policy has no tokens for",
}

rollouts = group("Look at the answers that policies share with one another.")


@rollouts.command("ls")
def ls(
    author: Annotated[
        str | None,
        typer.Option(
            "--author", metavar="PEER", help="This peer's, by its id or as listed; me is this node. [default: all]"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="COUNT", help="How many at most.")] = 20,
) -> None:
    """List the groups of answers that are here, the newest first.

    Example: swarmnode rollouts ls --limit 5
    """
    answer = ask("rollouts_ls", author=author, limit=limit)
    rows = [
        [
            group["id"][:12],
            short_peer(group["author"]),
            plain(group["task"], 24),
            str(group["answers"]),
            str(group["version"]),
            age(group["made_at_ms"] / 1000),
            {None: "own", True: "looked at", False: ""}[group["used"]],
        ]
        for group in answer["groups"]
    ]
    more = f"; there are more (--limit {limit})" if answer["more"] else ""
    listed = table(["ID", "AUTHOR", "TASK", "ANSWERS", "VERSION", "AGE", ""], rows)
    show(answer, [listed, number_of(len(rows), "group") + more])


@rollouts.command("show")
def show_group(
    group: Annotated[str, typer.Argument(metavar="ID", help="The id of a group, or how it begins.")],
) -> None:
    """Show a group: question, answers, and what they earn.

    Example: swarmnode rollouts show 8c1f
    """
    answer = ask("rollouts_show", id=group)
    lines = [
        answer["id"],
        f"by {answer['author']}, policy {plain(answer['policy'], 12)} at version {answer['version']}",
        f"{plain(answer['task'])}, difficulty {answer['difficulty']}, seed {answer['seed']}",
        *_answers(answer),
    ]
    show(answer, lines)


def _answers(answer: dict[str, Any]) -> list[str]:
    """Question, key and answers: a table where all of them are short, else each text below what it earned."""
    texts = [answer["question"], answer["key"], *(each["text"] for each in answer["answers"])]
    if all(len(text) <= SHORT and "\n" not in text.strip() for text in texts):
        rows = [
            [plain(each["text"], SHORT), f"{each['reward']:.2f}", f"{each['advantage']:+.2f}", str(each["tokens"])]
            for each in answer["answers"]
        ]
        head = f"question  {plain(answer['question'])}\nkey       {plain(answer['key'])}\n"
        return [head, table(["ANSWER", "REWARD", "ADVANTAGE", "TOKENS"], rows)]
    lines = ["question", *_paragraphs(answer["question"]), "key", *_paragraphs(answer["key"])]
    for number, each in enumerate(answer["answers"], 1):
        earned = f"reward {each['reward']:.2f}, advantage {each['advantage']:+.2f}, {each['tokens']} tokens"
        lines += [f"answer {number}: {earned}", *_paragraphs(each["text"])]
    return lines


def _paragraphs(text: str) -> list[str]:
    """The lines of a text that a stranger may have written, broken and indented; a very long one is cut."""
    shown = text.strip() if len(text) <= LONG else f"{text[:LONG].strip()} …"
    lines = [plain(line) for line in shown.split("\n")[:MOST_LINES]]
    return [part for line in lines for part in textwrap.wrap(line, 96, initial_indent=INDENT, subsequent_indent=INDENT)]


@rollouts.command("pool")
def pool() -> None:
    """Show what is held of whom, and what of each was refused.

    Example: swarmnode rollouts pool
    """
    answer = ask("rollouts_pool")
    rows = []
    for author in answer["authors"]:
        counts = (str(author[name]) for name in ("came", "used", "learned", "version"))
        here = str(author["groups"]), size(author["bytes"])
        rows.append([short_peer(author["author"]), *here, *counts, reasons(author["refused"])])
    held = answer["pool"]
    lines = [
        table(["AUTHOR", "HERE", "SIZE", "CAME", "LOOKED AT", "LEARNED FROM", "VERSION", "REFUSED"], rows),
        f"others' groups: {held['groups']} of {held['authors']} authors, {size(held['bytes'])}, {held['unused']} new",
        f"own groups: {held['own_groups']}, {size(held['own_bytes'])}",
        *_explained({reason for author in answer["authors"] for reason in author["refused"]}),
    ]
    show(answer, lines)


@rollouts.command("stats")
def stats() -> None:
    """Show what sharing came to, and the course of the reward.

    Example: swarmnode rollouts stats
    """
    answer = ask("rollouts_stats")
    rewards = [reward for _, reward in answer["reward_history"]]
    recent, pool = rewards[-10:], answer["pool"]
    lines = [
        f"reward    {sum(recent) / len(recent):.3f} of 1   {sparkline(rewards, 40)}" if rewards else "",
        *_by_task(answer["reward_by_task"]),
        f"learned   {learned(answer['learned'])}" if answer["learned"] else "",
        f"samples   {sampled(answer['sampled'])}" if answer["sampled"] else "",
        f"alone     {'yes: no other member is connected' if answer['alone'] else 'no'}",
        *map(_sampler, answer["samplers"]),
        f"refused   {reasons(pool['refused']) or 'nothing'}",
        *_explained({*pool["refused"], *(answer["learned"] or {"refused": ()})["refused"]}),
        f"let go    {reasons(pool['dropped']) or 'nothing'}",
        *(f"          {number} {plain(name)}" for name, number in sorted(answer["events"].items())),
    ]
    show(answer, lines)


def _by_task(courses: dict[str, list[list[float]]]) -> list[str]:
    rewards = {plain(task, 32): [reward for _, reward in course] for task, course in sorted(courses.items())}
    wide = max(map(len, rewards), default=0)
    return [
        f"  {task:<{wide}}  {sum(course[-10:]) / len(course[-10:]):.3f}   {sparkline(course, 40)}"
        for task, course in rewards.items()
        if len(rewards) > 1 and course
    ]


def _sampler(each: dict[str, Any]) -> str:
    caught = f", not listened to any more: {plain(each['caught'], 24)}" if each["caught"] else ""
    came = f"{each['came']} groups, {each['accepted']} accepted, version {each['version']}"
    refused = f", refused: {reasons(each['refused'])}" if each["refused"] else ""
    return f"sampler   {short_peer(each['sampler'])}  {came}{refused}{caught}"


def _explained(reasons: set[str]) -> list[str]:
    return [f"  {reason}: {WHY[reason]}" for reason in sorted(reasons) if reason in WHY]
