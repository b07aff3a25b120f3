"""What is asked: a task is (name, difficulty, seed), and everything else about it is regenerated from these, locally.

    question = regenerate(TaskRef("digits/swap", 5, 7))
    question.prompt, question.key                         # 'a304=', '40'
    question.reward("40"), question.reward("#40"), question.reward("04")       # 1.0, 1.0, 0.0

Nobody's answer key or reward is ever believed: a rollout of a peer names its TaskRef, and the receiver makes the
question and the check itself. Code never comes from a peer either: names are looked up in TASKS, where there are the
digit tasks, and in a trainer process what its run asks besides (`sources.py`). One interface, `RolloutTask`, has all.

**`digits/*`** are tasks that a tiny policy learns on a CPU in a minute: three digits in, two digits out. The difficulty
is the base, 2 to 10; a guess that is well-formed is right with chance base⁻². In `worked`, the answer stands behind a
colon, after a digit of working that the verifier does not look at, as verifiers that extract a tagged answer do: that
is how text is smuggled into right answers ("Hail to the Thief", 2511.09780).

Torch-free: the daemon checks strangers' answers to digit tasks with this. All other tasks are checked in the trainer's
sandbox, since they run code that is not this program's.
"""

from __future__ import annotations

import hashlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from swarmnode.training.rl.section import RolloutsSection, asked_by

MAX_NAME = 64  # characters
MAX_SEED = 2**53 - 1  # survives every encoding of integers
MAX_QUESTION = 1 << 16  # characters
MAX_ANSWER = 4096  # characters that a check is given; longer answers earn nothing
CHECK_SECONDS = 1.0  # for checking an answer of a stranger; what takes longer earns nothing
MAKE_SECONDS = 10.0  # for making a question whose seed a stranger may have chosen
TRIED = 64  # texts of the form of an answer, for one that a task of somebody's own can make
ALPHABET = "0123456789abcdefghij=:#!"  # of the digit tasks
DEFAULT_BASE = RolloutsSection.difficulty
ASSIGNED = b"swarmnode/work/1\0"  # what is hashed to assign a question begins so


class UnknownTask(Exception):
    """There is no such task, difficulty or seed here. The message says which and what to do."""


@dataclass(frozen=True, order=True)
class TaskRef:
    """The name of one question: what travels instead of it."""

    name: str
    difficulty: int
    seed: int


class RolloutTask(Protocol):
    """Questions of one kind, and the check of their answers.

    A task of one's own is a class with `generate`, `prompt` and `verify`, made without arguments; what else it has not
    is as here (docs/rollouts.md). Whatever these raise costs the answer in hand its reward, or the question its use.
    """

    difficulties: range = range(1 << 20)  # what may stand as difficulty
    exact: bool = False  # whether `key`, and then nothing, is what a policy should learn to write

    def generate(self, seed: int, difficulty: int) -> Any:
        """A problem that follows from these two, the same on every machine; what the other methods are given."""

    def prompt(self, problem: Any) -> str:
        """What a policy is asked, at most MAX_QUESTION characters."""

    def verify(self, problem: Any, answer: str) -> float:
        """How right the text `answer` is, 0 to 1. A stranger may have written it: it is to be read, never run."""

    def key(self, problem: Any) -> str:
        """A right answer; empty where none is known. People are shown it."""
        return ""

    def judge(self, problem: Any, answer: str) -> float:
        """How good all of the text is, 0 to 1; multiplies the reward where the run says judge = "task"."""
        return 1.0

    def form(self, difficulty: int, rng: np.random.Generator) -> str:
        """A text of the form of an answer, right by chance only: what policies are warmed up on; empty for none."""
        return self.key(self.generate(int(rng.integers(MAX_SEED)), difficulty))


@dataclass(frozen=True)
class Question:
    """What a policy is asked, and how its answers are judged."""

    ref: TaskRef
    prompt: str
    key: str
    task: RolloutTask = field(repr=False, compare=False)
    problem: Any = field(repr=False, compare=False)

    def reward(self, answer: str) -> float:
        """In [0, 1]: how right the final answer in the text `answer` is. Never raises, whatever the text."""
        return self._checked("verify", answer)

    def judged_reward(self, answer: str) -> float:
        """reward × judge: what stands beside the final answer counts too ("Hail to the Thief", 2511.09780)."""
        reward = self.reward(answer)
        return reward * self._checked("judge", answer) if reward else 0.0

    def _checked(self, method: str, answer: str) -> float:
        check = getattr(self.task, method)
        if checked_here(self.ref.name):
            return float(check(self.problem, answer))
        if len(answer) > MAX_ANSWER:
            return 0.0
        try:
            with within(CHECK_SECONDS):
                found = float(check(self.problem, answer))
        except (Exception, SystemExit):  # somebody's code on a stranger's text
            return 0.0
        return min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so long, or behind it where it caught that; in a main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    late: list[TimeoutError] = []

    def stop(*_: object) -> None:
        late.append(TimeoutError(f"it took longer than {seconds:g} s"))
        raise late[-1]

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if late:
        raise late[-1]


@lru_cache(maxsize=4096)
def regenerate(ref: TaskRef) -> Question:
    """The question that `ref` names. Raises UnknownTask where there is none here."""
    if not 0 <= ref.seed <= MAX_SEED:
        raise UnknownTask(f"task {ref.name!r}: seed {ref.seed} is not in 0 to {MAX_SEED}")
    task = find(ref.name)
    allowed = task.difficulties
    if ref.difficulty not in allowed:
        raise UnknownTask(
            f"task {ref.name!r}: difficulty {ref.difficulty} is not in {allowed.start} to {allowed.stop - 1}"
        )
    if checked_here(ref.name):
        problem = task.generate(ref.seed, ref.difficulty)
        return Question(ref, task.prompt(problem), task.key(problem), task, problem)
    try:
        with within(MAKE_SECONDS):
            problem = task.generate(ref.seed, ref.difficulty)
            prompt, key = task.prompt(problem), task.key(problem)
            _ = prompt.encode(), key.encode()  # half of a character can be told to nobody
    except (Exception, SystemExit) as error:
        raise UnknownTask(
            f"task {ref.name!r} makes no question of difficulty {ref.difficulty} and seed {ref.seed}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(prompt, str) or not isinstance(key, str) or not 0 < len(prompt) <= MAX_QUESTION:
        raise UnknownTask(f"task {ref.name!r}: question and key are texts, the first of 1 to {MAX_QUESTION} characters")
    return Question(ref, prompt, key, task, problem)


def find(name: str) -> RolloutTask:
    """The task called `name`. Raises UnknownTask."""
    if name not in TASKS:
        raise UnknownTask(f"there is no task {name!r} here: there are {', '.join(sorted(TASKS))}")
    return TASKS[name]


def register(name: str, task: RolloutTask) -> None:
    """Make a task known to this process, which asks it in its run."""
    TASKS[name] = task
    regenerate.cache_clear()


def checked_here(name: str) -> bool:
    """Whether the daemon checks answers to this task by itself, and not its trainer in the sandbox."""
    return name.startswith("digits/")


def tasks_of_run(rollouts: RolloutsSection) -> tuple[tuple[str, int], ...]:
    """What a run by rollouts asks: names and difficulties of tasks."""
    asked = asked_by(rollouts.task)
    if asked.kind == "digits":
        return tuple((name, rollouts.difficulty) for name in NAMES)
    return tuple((name, rollouts.difficulty if level is None else level) for name, level in asked.names)


def well_formed(ref: TaskRef, rng: np.random.Generator) -> str:
    """A random answer of the right form: what a policy is warmed up on, which teaches it the form and nothing else."""
    task, failure = find(ref.name), None
    for _ in range(TRIED):
        try:
            return task.form(ref.difficulty, rng)
        except (Exception, SystemExit) as error:  # a task of somebody's own may fail at a seed
            failure = error
    raise UnknownTask(f"in {TRIED} tries no answer in the form of task {ref.name!r} was made: {failure}") from failure


def assigned_task(
    run_id: str, sampler: str, counter: int, *, version: int, policy: str, tasks: Sequence[tuple[str, int]]
) -> TaskRef:
    """What `sampler` answers with its group number `counter`, by `version` of the policy with hash `policy`.

    It follows from who samples, so that nobody picks questions: the receiver draws the same again and refuses others.
    The hash of the weights goes into it, so that nobody knows his questions before the weights to answer them.
    """
    said = "\0".join((run_id, sampler, str(counter), str(version), policy))
    drawn = int.from_bytes(hashlib.sha256(ASSIGNED + said.encode()).digest(), "big")
    name, difficulty = tasks[drawn % len(tasks)]
    return TaskRef(name, difficulty, (drawn >> 64) & MAX_SEED)


# -- digits

Rule = Callable[[int, int, int, int], tuple[int, int]]  # three digits and the base to two digits

RULES: dict[str, Rule] = {
    "swap": lambda a, b, c, base: (c, a),
    "increment": lambda a, b, c, base: ((a + 1) % base, (b + 1) % base),
    "sort": lambda a, b, c, base: (min(a, b, c), sorted((a, b, c))[1]),
    "complement": lambda a, b, c, base: (base - 1 - b, base - 1 - c),
    "extremes": lambda a, b, c, base: (max(a, b, c), min(a, b, c)),
    "sum": lambda a, b, c, base: ((a + b) % base, c),
    "difference": lambda a, b, c, base: (a, (b - c) % base),
    "larger": lambda a, b, c, base: (max(a, b), max(b, c)),
    "double": lambda a, b, c, base: (b, 2 * c % base),
}


@dataclass(frozen=True)
class Digits(RolloutTask):
    """The questions of one rule. `letter` is how a prompt names the rule. A problem is three digits and their base."""

    letter: str
    rule: Rule
    exact: bool = True
    difficulties: range = range(2, 11)

    def generate(self, seed: int, difficulty: int) -> tuple[int, int, int, int]:
        a, b, c = (int(digit) for digit in np.random.default_rng(seed).integers(0, difficulty, 3))
        return a, b, c, difficulty

    def prompt(self, problem: tuple[int, int, int, int]) -> str:
        a, b, c, _ = problem
        return f"{self.letter}{a}{b}{c}="

    def key(self, problem: tuple[int, int, int, int]) -> str:
        return "".join(map(str, self.rule(*problem)))

    def verify(self, problem: tuple[int, int, int, int], answer: str) -> float:
        return float(answer[-2:] == self.key(problem))

    def judge(self, problem: tuple[int, int, int, int], answer: str) -> float:
        return float(answer == self.key(problem))

    def form(self, difficulty: int, rng: np.random.Generator) -> str:
        digits = rng.integers(0, difficulty, 3)
        return f"{digits[0]}{digits[1]}"


TASKS: dict[str, RolloutTask] = {
    f"digits/{name}": Digits(letter, rule) for letter, (name, rule) in zip("abcdefghi", RULES.items(), strict=True)
}
NAMES = tuple(TASKS)  # the nine of the SAPO table
