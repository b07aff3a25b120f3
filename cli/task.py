"""`swarmnode task check FILE.py:CLASS`: whether a task of one's own trains here, before others join its run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swarmnode.cli.terminal import duration, group, loaded, plain, show, table, waiting
from swarmnode.training.rl.section import asks_questions

GIVES = {  # what a task may leave out, and what a run then has with it and without it
    "needs_text": ("its creator publishes the text", "the task brings its data along"),
    "sample": ("swarmnode sample asks it", "swarmnode sample is refused"),
    "skeleton": ("memory is told before it trains", "memory is known when it trains"),
    "heldout": ("judged cheaply in open runs", "judged in open runs at several times the cost"),
    "places": ("audited in open runs", "nobody's steps are repeated in open runs"),
}

task = group("Check a task of your own.")


@task.command("check")
def check(
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
    from swarmnode.node.plan import STEPS_FOR, check_questions, check_task

    config = loaded().config
    if task_file.startswith("text:") or asks_questions(task_file):
        with waiting(f"asking {task_file} some questions, once torch has started"):
            told = check_questions(task_file, run_file, config)
        lines = [f"{task_file} asks questions, {1000 * told.seconds:.0f} ms for one with two answers"]
        for each in told.asked:
            lines += [
                f"  {plain(each['question'], 100)}",
                f"    key {plain(each['key'], 80)!r} earns {each['earns']:g}",
            ]
        lines.append(f"Everybody who joins needs this very file (sha-256 {told.code_sha256[:16]}…): --task {task_file}")
        show({"task": told.name, **asdict(told)}, lines)
        return
    with waiting(f"trying {task_file}: {STEPS_FOR:g} s of steps, once torch has started"):
        found = check_task(task_file, run_file, config)
    pace = found.pace
    rows = [(name, "yes" if found.has[name] else "no", GIVES[name][not found.has[name]]) for name in GIVES]
    text = (
        f"{task_file} trains: {pace.weight.parameters:,} parameters, {pace.step:.3g} s a step, "
        f"{duration(pace.loss)} for the held-out loss",
        table(("IT HAS", "", "SO THAT"), rows),
        f"Everybody who joins needs this very file (sha-256 {found.code_sha256[:16]}…): --task {task_file}",
    )
    answer = {
        "task": found.name,
        "parameters": pace.weight.parameters,
        "step_seconds": pace.step,
        "loss_seconds": pace.loss,
        "weight": asdict(pace.weight),
        "code_sha256": found.code_sha256,
        "has": found.has,
    }
    show(answer, text)
