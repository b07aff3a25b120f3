"""`swarmnode config` and `swarmnode task`: check a file of settings, or a task of one's own; show what is in force."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import ConfigOption, duration, flags, group, loaded, plain, show, table, waits
from swarmnode.node.config import load_config, parse_node_table
from swarmnode.training.options import as_toml, read_toml
from swarmnode.training.rl.section import asks_questions
from swarmnode.training.runspec import BUILT_IN, parse_runspec

GIVES = {  # what a task may leave out, and what a run then has with it and without it
    "needs_text": ("its creator publishes the text", "the task brings its data along"),
    "sample": ("swarmnode sample asks it", "swarmnode sample is refused"),
    "skeleton": ("memory is told before it trains", "memory is known when it trains"),
    "heldout": ("judged cheaply in open runs", "judged in open runs at several times the cost"),
    "places": ("audited in open runs", "nobody's steps are repeated in open runs"),
}

config = group("Check a file of settings, or show those of the next start.")


@config.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A run file or a node configuration file, in TOML.")],
) -> None:
    """Say what kind of file FILE is, and whether it can be used.

    Example: swarmnode config check config.toml
    """
    tables = read_toml(file)
    if any(isinstance(value, dict) for value in tables.values()):
        answer = check_run(tables, file)
        text = f"{file}: a run file, in order. Run {answer['name']!r}, run id {answer['run_id']}"
        if not answer["final"]:
            text += " (its creator adds a nonce and the hash of the held-out text, which change it)"
        if answer["own_task"]:
            text += f". Its task {answer['task']!r} is none of the built-in ones, {', '.join(answer['built_in'])}: "
            text += "every member needs the file that defines it (--task FILE.py:CLASS)"
    else:
        values = parse_node_table(tables, source=str(file))
        answer = {"kind": "node", "file": str(file), "values": values}
        text = f"{file}: a node configuration, in order. It sets {', '.join(values) or 'nothing'}"
    show(answer, text)


def check_run(tables: dict[str, Any], file: Path) -> dict[str, Any]:
    """What kind of run file the tables of `file` are. Raises SettingError."""
    spec = parse_runspec(tables, source=str(file))
    return {
        "kind": "run",
        "file": str(file),
        "name": spec.run.name,
        "task": spec.task.name,
        "own_task": spec.task.name not in BUILT_IN,
        "built_in": tuple(BUILT_IN),
        "run_id": spec.run_id,
        "final": bool(spec.task.heldout_sha256 and spec.run.nonce),
    }


@config.command("show")
def show_settings(file: ConfigOption = None) -> None:
    """Show each setting as a start here would have it.

    And where it comes from: the default, a file, the environment or a flag. What a node that runs was started with
    besides (swarmnode run --port …) is not known here.

    Example: swarmnode config show
    """
    found = load_config(file, os.environ, flags())
    rows = [(key, as_toml(each["value"]), each["origin"]) for key, each in found.settings.items()]
    show({"settings": found.settings}, table(("KEY", "VALUE", "FROM"), rows))


# -- a task of one's own

task = group("Check a task of your own.")


@task.command("check")
def check_task(
    task_file: Annotated[str, typer.Argument(metavar="FILE.py:CLASS", help="The task, or text:FILE.jsonl: questions.")],
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="A run of it. [default: all settings as they are usual]")
    ] = None,
) -> None:
    """Try a task of your own in the trainer's sandbox.

    It says what would harm a swarm, or takes some steps, on data by chance where it trains on text.

    Then it says parameters, time of a step, and what a run of it will have; of questions for a run by rollouts some,
    and what their keys earn. Example: swarmnode task check sine.py:Sine
    """
    from swarmnode.node import plan

    config = loaded().config
    if task_file.startswith("text:") or asks_questions(task_file):
        with waits(f"asking {task_file} some questions, once torch has started"):
            told = plan.check_questions(task_file, run_file, config)
        lines = [f"{task_file} asks questions, {1000 * told['seconds']:.0f} ms for one with two answers"]
        for each in told["asked"]:
            earns = f"    key {plain(each['key'], 80)!r} earns {each['earns']:g}" if each["key"] else "    no key"
            lines += [f"  {plain(each['question'], 100)}", earns]
    else:
        with waits(f"trying {task_file}: {plan.STEPS_FOR:g} s of steps, once torch has started"):
            told = plan.check_task(task_file, run_file, config)
        rows = [(name, "yes" if told["has"][name] else "no", GIVES[name][not told["has"][name]]) for name in GIVES]
        trains = f"{task_file} trains: {told['parameters']:,} parameters, {told['step_seconds']:.3g} s a step, "
        trains += f"{duration(told['loss_seconds'])} for the held-out loss"
        lines = [trains, table(("IT HAS", "", "SO THAT"), rows)]
    same = f"Everybody who joins needs this very file (sha-256 {told['code_sha256'][:16]}…): --task {task_file}"
    show(told, [*lines, same])
