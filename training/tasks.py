"""What can be learned: the interface of a task, and how one is found.

A task owns the model, its data and the measure of success; the inner loop and the daemon know only what stands here.
Built in are those of `runspec.BUILT_IN`; any other is a local file, `--task my_task.py:MyTask`. No code is a peer's.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarmnode.training.options import SettingError
from swarmnode.training.runspec import BUILT_IN, ROLLOUT_TASKS, TEXT_TASKS, RunSpec

if TYPE_CHECKING:
    import torch


MAY_LACK = ("sample", "skeleton", "heldout", "places", "feed", "on")  # methods of a task


class TaskError(Exception):
    """The task cannot be loaded, or not be trained here. The message says which and what to do."""


@dataclass(frozen=True)
class Assignment:
    """Who trains, and on what: the part of a task's setting that differs between nodes."""

    run_id: str
    peer_id: str
    heldout: str = ""  # file with the run's held-out part
    texts: tuple[str, ...] = ()  # files to train on: shards of the run's data, or made of this node's own corpus
    tokenizer: str = ""  # file with the tokenizer.json of the run's data; empty where tokens are bytes, or it has none
    base: str = ""  # folder of the run's base model
    policy: str = ""  # kind and shape of this node's policy, in a run by rollouts; empty takes the run's
    sampling: str = "auto"  # what writes the answers of an hf policy: auto, torch or vllm
    task: str = ""  # text:FILE.jsonl or FILE.py:CLASS that a run by rollouts asks, on this machine


class Task(Protocol):
    """Something to learn. Built as `Task(spec, assignment, device)`; docs/tasks.md says what each part is.

    `feed`, `skeleton`, `places`, `on`, `heldout` and `sample` may be left out.
    """

    needs_text: bool  # whether the run's creator publishes its corpus for it; a constant in the body of the class
    model: torch.nn.Module
    tokens_per_sample: int
    # and perhaps accuracy: float, what share of its sample `evaluate` predicted

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None: ...

    def feed(self, texts: Sequence[str]) -> None: ...  # between steps, only where the assignment has `texts`

    @classmethod
    def skeleton(cls, spec: RunSpec, assignment: Assignment) -> torch.nn.Module: ...  # in `with torch.device("meta")`

    def draw(self, samples: int, generator: torch.Generator) -> torch.Tensor: ...  # on its device, by a CPU generator

    def places(self, samples: int, generator: torch.Generator, size: int) -> list[tuple[int, int]]: ...  # start, stop

    def on(self, size: int, pieces: Sequence[tuple[int, bytes]]) -> AbstractContextManager[None]: ...

    def loss(self, batch: torch.Tensor) -> torch.Tensor: ...

    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float: ...  # a larger sample if `thorough`

    def heldout(self, seed: int) -> torch.Tensor: ...  # SEQUENCES of them (`training.open_step`)

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes: ...


def needs_text(name: str, local: str) -> bool:
    """Whether the task trains on text that the run's creator publishes; `name` and `local` as of `load_task`.

    A class in a local file says so by `needs_text = True` in its body, which is read and not run: the daemon runs no
    code of a task. One that says nothing brings its data along. Raises SettingError.
    """
    if not local or local.startswith("text:"):
        return name in TEXT_TASKS and not local
    named = local.rpartition(":")[2]
    try:
        module = ast.parse(task_source(local))
    except (SyntaxError, ValueError) as error:
        raise SettingError(f"--task {local!r} cannot be read: {error}") from error
    bodies = (each.body for each in module.body if isinstance(each, ast.ClassDef) and each.name == named)
    said = [ast.unparse(line).replace(": bool", "") for body in bodies for line in body]
    return "needs_text = True" in said


def task_file(local: str) -> Path:
    """The file of `file.py:Class`, or of `text:file.jsonl`."""
    kind, _, path = local.partition(":")
    return Path(path if kind == "text" else local.rpartition(":")[0]).expanduser()


def task_source(local: str) -> bytes:
    """The file that defines the task `file.py:Class`, or has the questions of text:FILE. Raises SettingError."""
    path = task_file(local)
    if ":" not in local:
        raise SettingError(f"--task {local!r} is not valid; expected file.py:Class")
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"--task {local!r}: {path} cannot be read: {error.strerror}") from error


def load_task(name: str, local: str) -> type[Any]:
    """The class of the task called `name` in the RunSpec; `local` is `file.py:Class` for one that is not built in.

    Raises TaskError.
    """
    if local and name not in ROLLOUT_TASKS:
        return class_in(local)
    if name in BUILT_IN:
        module, _, found = BUILT_IN[name][0].partition(":")
        return getattr(importlib.import_module(module), found)
    raise TaskError(
        f"task {name!r} is not built in; the run needs a local file that defines it: --task my_task.py:MyTask"
    )


def class_in(local: str) -> type[Any]:
    """The class of FILE.py:CLASS. Raises TaskError."""
    path, _, name = local.rpartition(":")
    if not path or not name.isidentifier():
        raise TaskError(f"--task {local!r} is not valid; expected file.py:Class")
    found = importlib.util.spec_from_file_location("swarmnode_local_task", Path(path).expanduser())
    if found is None or found.loader is None or not Path(path).expanduser().is_file():
        raise TaskError(f"--task {local!r}: {path} is not a Python file on this machine")
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)  # dataclasses look there
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise TaskError(f"--task {local!r}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    task = getattr(module, name, None)
    if not isinstance(task, type):
        raise TaskError(f"--task {local!r}: {path} defines no class {name}")
    return task
