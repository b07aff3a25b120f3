"""`swarmnode init`: a run file with comments, by a few questions on a terminal or by flags."""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from swarmnode.cli.configure import check_run
from swarmnode.cli.terminal import UsageMistake, as_json, say, show
from swarmnode.node.storage.datadir import explaining
from swarmnode.training.options import as_toml, describe, read_toml
from swarmnode.training.rl.section import asks_questions
from swarmnode.training.runspec import BASE_TASK, BUILT_IN, BUILT_IN_RUNS, ROLLOUT_TASKS, SECTIONS, TEXT_TASKS
from swarmnode.training.sections import FILLED_IN

Tables = dict[str, dict[str, Any]]

# By name: layers, heads, width and context of a GPT, the vocabulary where it trains on tokens, sequences, steps.
SIZES = {
    "tiny": (4, 4, 128, 128, 4096, 4, 80),  # 0.85 M parameters on bytes: rounds of some seconds on two CPU cores
    "small": (6, 6, 384, 256, 8192, 8, 100),  # 11 M
    "medium": (12, 12, 768, 1024, 32768, 8, 200),  # 85 M: for GPUs
}
SIZE_WORDS = "tiny (0.85 M parameters, for CPUs), small (11 M), medium (85 M, for GPUs)"
STANDARD = "python-stdlib"
TASKS = f"{', '.join(BUILT_IN)}, gym:NAME of reasoning-gym, text:FILE.jsonl, or FILE.py:CLASS"
ABOUT = {  # what stands above each table
    "run": "Who may take part, and who owns the run. Its creator does unless `owner` says otherwise.",
    "task": "What is learned.",
    "data": "The text. The creator's --corpus names it, and its members fetch it from one another.",
    "model": "The model. Parameters: about 12 x layers x width^2, and two vectors of `width` for each token.",
    "inner": "What each node does alone between two exchanges.",
    "outer": "How the mean of all nodes' progress is applied.",
    "exchange": "How nodes exchange what they learned.",
    "trust": "Who judges in an open run.",
    "rollouts": "How policies learn from answers.",
}


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The run file to write.")] = Path("run.toml"),
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the run. [default: that of FILE]")] = "",
    task: Annotated[str, typer.Option(metavar="TASK", help=f"{TASKS}. [default: byte-lm]")] = "",
    data: Annotated[
        str, typer.Option(metavar="PATH", help="Text to train on, as --corpus names it. [default: Python's sources]")
    ] = "",
    size: Annotated[str, typer.Option(metavar="SIZE", help=f"{SIZE_WORDS}. [default: tiny]")] = "",
    base: Annotated[
        str, typer.Option(metavar="MODEL", help="Of hf-lm: a folder or hub name to begin from. [default: none]")
    ] = "",
    method: Annotated[
        str, typer.Option(metavar="METHOD", help="How nodes exchange what they learned. [default: auto]")
    ] = "",
    trust: Annotated[
        str, typer.Option(metavar="TRUST", help="known or open: who may take part. [default: known]")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE. [default: never]")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing. [default: ask on a terminal]")] = False,
) -> None:
    """Write a run file with every setting explained, and check it.

    What no flag says is asked for on a terminal, and has its default elsewhere. Example: swarmnode init my-run.toml
    --task gpt --data ~/books --size small --yes
    """
    if file.exists() and not force:
        raise UsageMistake(f"{file} is there already; name another file, or replace it with --force")
    asks = sys.stdin.isatty() and not yes and not as_json()
    task = task or _asked(asks, "task", f"What is learned? {TASKS}", "byte-lm")
    if task == BASE_TASK:
        base = base or _asked(asks, "base", "Which model to begin from, a folder or a name", "")
    if task in TEXT_TASKS:
        data = data or _asked(asks, "data", "Which text, a file or a folder?", STANDARD)
    if task not in (BASE_TASK, *ROLLOUT_TASKS) and not _asked_by(task):
        size = size or _asked(asks, "size", f"How large? {SIZE_WORDS}", "tiny")
    trust = trust or _asked(asks, "trust", "Who takes part: known (people whom you trust) or open (anybody)?", "known")
    tables = tables_of(task, name=name or file.stem.lower(), data=data, size=size or "tiny")
    tables["run"]["trust"] = trust
    tables["model"] |= {"base": base} if base else {}
    tables["exchange"]["method"] = method or "auto"
    suits: Tables = {"demo": {"optimizer": "sgd", "lr": 4e-3, "steps": 1}, "seed": {"lr": 1e-4, "clip": 2.0}}
    if method in suits:  # they refuse what others have by default, and AdamW's eps means nothing to them
        tables["inner"] = {key: value for key, value in tables["inner"].items() if key != "eps"} | suits[method]
    text = "\n".join(_written(tables))
    answer = check_run(tomllib.loads(text), file)
    with explaining(file):
        file.write_text(text, encoding="utf-8")
    answer["next"] = "swarmnode run " + quote(str(file))
    answer["next"] += f" --corpus {quote(data)}" if data not in ("", STANDARD) else ""
    answer["next"] += f" --task {quote(task)}" if is_brought(task) else ""
    show(answer, f"{file}: written. Begin the run with: {answer['next']}")


def is_brought(task: str) -> bool:
    """Whether a task is a file that each node brings, by --task."""
    return ":" in task and not task.startswith("gym:")


def tables_of(task: str, *, name: str, data: str = "", size: str = "tiny") -> Tables:
    """The settings of a run that learns `task`, whichever kind it is of. Raises UsageMistake."""
    if asked := _asked_by(task):
        task = "rollouts"
    for option, value in (("size", size), ("data", data), ("task", task)):
        _check(option, value)
    layers, heads, width, context, vocabulary, batch, steps = SIZES[size]
    tables: Tables = {table: {} for table in SECTIONS}
    tables["run"] = {"name": name, "seed": 1}
    named = task.rpartition(":")[2].lower() if ":" in task else task
    tables["task"] = {"name": f"my-{named}" if ":" in task and named in BUILT_IN else named}
    if task in TEXT_TASKS:
        tables["task"]["corpus"] = Path(data).name if data else STANDARD
    if task in ROLLOUT_TASKS:
        tables["rollouts"] = {"task": asked} if asked else {}
        return tables
    if task == BASE_TASK:
        tables["model"] = {"lora_rank": 16, "context": 256}
        tables["inner"] = {"lr": 2e-4, "weight_decay": 0.0, "batch": 4, "steps": 40}
        return tables
    tables["model"] = {"layers": layers, "heads": heads, "width": width, "context": context}
    tables["inner"] = {"batch": batch, "steps": steps}
    if (task, size) == ("byte-lm", "tiny"):
        built_in = read_toml(BUILT_IN_RUNS[task])
        tables |= {table: built_in[table] for table in ("model", "inner")}
    if task == "gpt":
        tables["data"] = {"vocabulary": vocabulary}
        tables["model"]["tied"] = True
        tables["inner"]["optimizer"] = "muon"
    return tables


def _asked_by(task: str) -> str:
    """`[rollouts] task` of a run that asks questions: gym:, text:, or a class with `generate` and `verify`; else ""."""
    kind, _, rest = task.partition(":")
    if kind in ("gym", "text"):
        return task if kind == "gym" else f"text:{Path(rest).name}"
    file, _, named = task.rpartition(":")
    return f"{Path(file).name}:{named}" if asks_questions(task) else ""


def _asked(asks: bool, option: str, question: str, usual: str) -> str:
    """What a person answers, asked again until it makes a run; the usual one elsewhere. Raises UsageMistake."""
    while True:
        answer = typer.prompt(question, default=usual or None, err=True).strip() if asks else usual
        try:
            _check(option, answer)
            return str(answer)
        except UsageMistake as error:
            if not asks:
                raise
            say(str(error))


def _check(option: str, value: str) -> None:
    """Raises UsageMistake where it makes no run."""
    match option:
        case "base" if not value:
            raise UsageMistake(f"--task {BASE_TASK} begins from a model: name it with --base MODEL")
        case "data" if value not in ("", STANDARD) and not value.startswith("datasets:"):
            if not Path(value).expanduser().exists():
                raise UsageMistake(f"--data {value}: there is no such file or folder")
        case "size" if value not in SIZES:
            raise UsageMistake(f"--size {value}: is none of {', '.join(SIZES)}")
        case "task" if ":" not in value and value not in BUILT_IN:
            raise UsageMistake(f"--task {value}: is none of {TASKS}")
        case "trust" if value not in ("known", "open"):
            raise UsageMistake(f"--trust {value}: is neither known nor open")


def _written(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The file's lines: what was chosen, and behind a # all else at its default."""
    yield "# A run of swarmnode. `swarmnode config check FILE` checks it; docs/configuration.md has every setting."
    yield "# Keys behind a # have the value that they would have without it."
    for table, section in SECTIONS.items():
        chosen = tables[table]
        yield f"\n# {ABOUT[table]}\n[{table}]"
        for key, (field, described) in describe(section).items():
            if "filled in" in described.help or described.form == FILLED_IN:
                continue
            allowed = f" ({described.allowed()})" if described.between else ""
            yield from textwrap.wrap(described.help + allowed, 100, initial_indent="# ", subsequent_indent="# ")
            value = as_toml(chosen.get(key, field.default))
            yield f"{'' if key in chosen else '# '}{key} = {value}"
    yield ""
