"""What a run may ask beside digits: reasoning-gym, questions in a file, a task of one's own. In the trainer alone.

    for name, task in tasks_from(spec.rollouts, "questions.py:Questions").items():
        register(name, task)

**`gym/NAME`** are procedural tasks of reasoning-gym, with the extra `rl`. The difficulty is the level of the dataset's
curriculum, applied to all of its attributes; 0 is its default configuration, and parameters of the run file come on top
of either. Its verifiers read answers of strangers, and some of them `eval` what they read (countdown, puzzle24,
n_queens, spiral_matrix, the integrals and others, seen in 0.1.25). Where the module of a verifier does such a thing, it
is given an answer only if this is an expression of numbers and single letters (`is_harmless`); any other answer earns
something if it is the key to the letter.

**`text/NAME`** are the lines of a file, {"question": …, "answer": …, "match": "exact", "number" or "regex"}. The seed
draws one.

**`own/CLASS`** is a class of a file on this machine.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from swarmnode.training.options import SettingError, lacking
from swarmnode.training.rl.section import MAX_LEVEL, RolloutsSection, asked_by
from swarmnode.training.rl.tasks import MAX_QUESTION, RolloutTask, TaskRef, UnknownTask, regenerate, register
from swarmnode.training.tasks import TaskError, class_in, task_file

MAX_FILE = 256 << 20  # bytes of a file of questions
CLOSE = 1e-6  # how far a number may be from the right one, relative to it or to 1
TRIED = 8  # questions of each task that are made before a run begins
RUNS = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
MAX_EXPRESSION = 256  # characters
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")
# Numbers; a letter by itself, perhaps with a small power; functions of integrals; operators, but no power of a number,
# which may be huge; no quote, no dot behind a letter, no two letters: nothing in it can name what could do harm. What
# matched is not tried otherwise (`*+`): a long number can be cut in more ways than there is time for.
_HARMLESS = re.compile(
    r"(?:\d{1,12}(?:\.\d{1,12})?|(?<![A-Za-z_0-9])[A-Za-z](?![A-Za-z_0-9.])(?:\s*(?:\*\*|\^)\s*\d{1,2}(?!\d))?"
    r"|(?<![A-Za-z_0-9])(?:sin|cos|tan|exp|log|sqrt|pi)(?![A-Za-z_0-9.])|\*(?!\s*\*)|[-+/()\[\],=\s])*+"
)


def tasks_from(rollouts: RolloutsSection, local: str) -> dict[str, RolloutTask]:
    """The tasks that a run asks beside those of this program, by name; `local`: the node's own --task.

    Raises TaskError, SettingError.
    """
    asked = asked_by(rollouts.task)
    if asked.kind == "gym":
        return {f"gym/{name}": Gym(name, parameters) for name, parameters in asked.parameters.items()}
    if not asked.needs_file:
        return {}
    if not local:
        raise TaskError(f"the run asks {rollouts.task!r}, a file that each node brings: start with --task")
    brought = asked_by(local)
    if brought.kind != asked.kind:
        raise TaskError(f"--task {local!r} is no file such as the run asks, {rollouts.task!r}")
    ((name, _),) = asked.names
    return {name: QuestionFile(task_file(local)) if asked.kind == "text" else own(local)}


def known_to_this_process(rollouts: RolloutsSection, local: str, asked: tuple[tuple[str, int], ...]) -> None:
    """Register what a run asks, and make some questions of each task. Raises TaskError, SettingError."""
    for name, task in tasks_from(rollouts, local).items():
        register(name, task)
    for name, difficulty in asked:
        for seed in range(TRIED):
            try:
                regenerate(TaskRef(name, difficulty, seed))
            except UnknownTask as error:
                raise TaskError(str(error)) from error


# -- reasoning-gym


class Gym(RolloutTask):
    """The questions of one dataset of reasoning-gym. A problem is a dataset of one entry, and the entry."""

    def __init__(self, dataset: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Raises TaskError where reasoning-gym is missing, or has no such dataset or parameters."""
        self._factory, self._name, self._parameters = _factory(), dataset, dict(parameters or {})
        if dataset not in self._factory.DATASETS:
            raise TaskError(f"reasoning-gym has no dataset {dataset!r}: its README lists them")
        self._dataset, self._config = self._factory.DATASETS[dataset]
        self._runs = _runs_answers(self._dataset)
        self.difficulties = range(MAX_LEVEL + 1) if self._factory.has_curriculum(dataset) else range(1)
        self._made: dict[int, Any] = {}  # a dataset by difficulty, where its seed can be changed; else None

    def generate(self, seed: int, difficulty: int) -> tuple[Any, dict[str, Any]]:
        if difficulty not in self._made:
            self._made[difficulty] = self._reseedable(difficulty)
        made = self._made[difficulty]
        dataset = self._new(seed, difficulty) if made is None else _reseeded(made, seed)
        return dataset, dataset[0]

    def _reseedable(self, difficulty: int) -> Any:
        """A dataset that need not be made anew for each question, which may take the reading of a list of words.

        Most draw an entry from seed and place when it is asked for; None for one that draws all in the beginning.
        """
        made = self._new(0, difficulty)
        for seed in (1, 2, 3):
            if _reseeded(made, seed)[0] != self._new(seed, difficulty)[0]:
                return None
        return made

    def _new(self, seed: int, difficulty: int) -> Any:
        settings = {**self._parameters, "seed": seed, "size": 1}
        if difficulty:
            curriculum = self._factory.create_curriculum(self._name)
            curriculum.set_global_level(difficulty)
            config = curriculum.generate_configuration(settings)
        else:
            config = self._config(**settings)
        return self._dataset(config)

    def prompt(self, problem: tuple[Any, dict[str, Any]]) -> str:
        return str(problem[1]["question"])

    def key(self, problem: tuple[Any, dict[str, Any]]) -> str:
        return str(problem[1]["answer"] or "")

    def verify(self, problem: tuple[Any, dict[str, Any]], answer: str) -> float:
        dataset, entry = problem
        text = answer.strip()
        if self._runs and not is_harmless(text):
            return float(text == self.key(problem))
        return float(dataset.score_answer(text, entry))


def _reseeded(dataset: Any, seed: int) -> Any:
    """The dataset with another seed; its lists are shared."""
    other = copy.copy(dataset)
    other.seed, other.config = seed, copy.copy(dataset.config)
    other.config.seed = seed
    return other


def is_harmless(text: str) -> bool:
    """Whether `text`, if Python evaluates it, can do nothing but make a number, or a list of some, or an error."""
    multiplies_a_list = "*" in text and ("[" in text or "," in text)
    return len(text) <= MAX_EXPRESSION and not multiplies_a_list and _HARMLESS.fullmatch(text) is not None


def _runs_answers(dataset: type[Any]) -> bool:
    """Whether a module of this class, other than the base class's, may evaluate an answer."""
    modules = {each.__module__ for each in dataset.__mro__ if each.__module__.startswith("reasoning_gym.")}
    modules.discard("reasoning_gym.dataset")
    return any(RUNS.search(inspect.getsource(sys.modules[name])) for name in modules)


@lru_cache(maxsize=1)
def _factory() -> Any:
    try:
        import reasoning_gym  # noqa: F401 (registers the datasets)
        from reasoning_gym import factory
    except ImportError as error:
        raise TaskError(lacking("tasks called gym:... need reasoning-gym", error, "swarmnode[rl]")) from error
    return factory


# -- questions in a file


@dataclass(frozen=True)
class FileQuestion:
    question: str
    answer: str
    match: str = "exact"  # exact, number or regex


class QuestionFile(RolloutTask):
    def __init__(self, file: Path) -> None:
        """Raises SettingError, which names the line that cannot be used."""
        try:
            if file.stat().st_size > MAX_FILE:
                raise SettingError(f"{file}: more than {MAX_FILE >> 20} MiB of questions")
            lines = file.read_text(encoding="utf-8").split("\n")  # a text may hold other ends of lines
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{file}: cannot be read: {getattr(error, 'strerror', error)}") from error
        self._lines = [_line(text, f"{file}, line {at}") for at, text in enumerate(lines, 1) if text.strip()]
        if not self._lines:
            raise SettingError(f"{file}: has no questions, which stand on a line each")
        self._shown = [line.answer for line in self._lines if line.match != "regex"]
        self.exact = all(line.match == "exact" for line in self._lines)

    def generate(self, seed: int, difficulty: int) -> FileQuestion:
        return self._lines[seed % len(self._lines)]

    def prompt(self, problem: FileQuestion) -> str:
        return problem.question

    def key(self, problem: FileQuestion) -> str:
        return problem.answer

    def verify(self, problem: FileQuestion, answer: str) -> float:
        text = answer.strip()
        if problem.match == "regex":
            return float(re.fullmatch(problem.answer, text) is not None)
        if problem.match == "exact":
            return float(text == problem.answer)
        found = _NUMBER.findall(text)
        right = _number(problem.answer)
        return float(bool(found) and abs(_number(found[-1]) - right) <= CLOSE * max(1.0, abs(right)))

    def form(self, difficulty: int, rng: Any) -> str:
        return self._shown[int(rng.integers(len(self._shown)))] if self._shown else ""


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _line(text: str, where: str) -> FileQuestion:
    """Raises SettingError."""
    try:
        told = json.loads(text)
        match = told.get("match", "exact")
        line = FileQuestion(told["question"], str(told["answer"]).strip(), match)
        if not isinstance(line.question, str) or not 0 < len(line.question) <= MAX_QUESTION:
            raise ValueError(f"a question is a text of 1 to {MAX_QUESTION} characters")
        _ = (line.question + line.answer).encode()  # raises ValueError for half of a character
        if match not in ("exact", "number", "regex"):
            raise ValueError(f"match = {match!r} is none of exact, number, regex")
        if match == "number":
            _number(line.answer)
        elif match == "regex":
            re.compile(line.answer)
    except (ValueError, KeyError, TypeError, AttributeError, re.error, OverflowError, RecursionError) as error:
        raise SettingError(
            f'{where}: is no question ({type(error).__name__}: {error}); expected {{"question": "…", "answer": "…"}}, '
            'perhaps with "match": "number" or "regex"'
        ) from error
    return line


# -- a class of one's own


def own(local: str) -> RolloutTask:
    """An instance of the class that `local`, FILE.py:CLASS, names. Raises TaskError."""
    found = class_in(local)
    missing = [name for name in ("generate", "prompt", "verify") if not callable(getattr(found, name, None))]
    if missing:
        raise TaskError(f"--task {local!r}: the class has no {', '.join(missing)}, which a task of rollouts has")
    complete = found if RolloutTask in found.__mro__ else types.new_class(found.__name__, (found, RolloutTask))
    try:
        return complete()
    except Exception as error:
        raise TaskError(f"--task {local!r}: cannot be made: {type(error).__name__}: {error}") from error
