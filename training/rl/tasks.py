"""What is asked: a task is (name, difficulty, seed), and everything else about it is regenerated from these, locally.

    question = regenerate(TaskRef("digits/swap", 5, 7))
    question.prompt, question.key                         # 'a304=', '40'
    question.reward("40"), question.reward("#40"), question.reward("04")       # 1.0, 1.0, 0.0

Nobody's answer key or reward is ever believed: a rollout of a peer names its TaskRef, and the receiver makes the
question and the verifier itself. Code never comes from a peer either: names are looked up in what is built in here.

**`digits/*`** are tasks that a tiny policy learns on a CPU in a minute: three digits in, two digits out. The difficulty
is the base, 2 to 10; a guess that is well-formed is right with chance base⁻². In `worked`, the answer stands behind a
colon, after a digit of working that the verifier does not look at, as verifiers that extract a tagged answer do: that
is how text is smuggled into right answers ("Hail to the Thief", 2511.09780).

**`gym/*`** are reasoning-gym's procedural tasks, with the extra `rl`: pip install "swarmnode[rl]". The difficulty is
the level of the dataset's curriculum, applied to all of its attributes; 0 is its default configuration. Questions
differ between versions of reasoning-gym. Some of its verifiers `eval` the answer that they are given, and answers come
from strangers here. So a
dataset's own verifier is used only where it is the base class's comparison or stands in READ_AND_SAFE; elsewhere the
answer must be the key, to the letter.

Torch-free: the daemon checks rollouts of strangers with this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

MAX_NAME = 64  # characters
MAX_SEED = 2**53 - 1  # survives every encoding of integers
ALPHABET = "0123456789abcdefghij=:#!"  # of the digit tasks
DEFAULT_BASE = 5
WORKED = "worked"
MAX_LEVEL = 10  # of a curriculum
MAX_ANSWER = 4096  # characters that a verifier of reasoning-gym is given; longer answers earn nothing
READ_AND_SAFE = frozenset({"calendar_arithmetic", "decimal_arithmetic", "fraction_simplification"})
ASSIGNED = b"swarmnode/work/1\0"  # what is hashed to assign a question begins so


class UnknownTask(Exception):
    """There is no such task, difficulty or seed here. The message says which and what to do."""


@dataclass(frozen=True, order=True)
class TaskRef:
    """The name of one question: what travels instead of it."""

    name: str
    difficulty: int
    seed: int


@dataclass(frozen=True)
class Question:
    """What a policy is asked, and how its answers are judged.

    `exact` says that `key` followed by the end of the answer is what a policy should learn to write; then the chance of
    writing it is the expected reward of a policy that writes nothing around its answers.
    """

    ref: TaskRef
    prompt: str
    key: str
    verify: Callable[[str], float]
    judge: Callable[[str], float]
    exact: bool = True

    def reward(self, answer: str) -> float:
        """In [0, 1]: how right the final answer in the text `answer` is. Never raises, whatever the text."""
        return self.verify(answer)

    def judged_reward(self, answer: str) -> float:
        """reward × judge: what stands beside the final answer counts too ("Hail to the Thief", 2511.09780)."""
        reward = self.verify(answer)
        return reward * self.judge(answer) if reward else 0.0


class Generator(Protocol):
    def difficulties(self) -> range:
        """What may stand as difficulty."""

    def question(self, ref: TaskRef) -> Question:
        """The question of `ref`, the same on every machine. Its difficulty and seed are in range."""


@lru_cache(maxsize=4096)
def regenerate(ref: TaskRef) -> Question:
    """The question that `ref` names. Raises UnknownTask where there is none here."""
    if not 0 <= ref.seed <= MAX_SEED:
        raise UnknownTask(f"task {ref.name!r}: seed {ref.seed} is not in 0 to {MAX_SEED}")
    generator = find(ref.name)
    allowed = generator.difficulties()
    if ref.difficulty not in allowed:
        raise UnknownTask(
            f"task {ref.name!r}: difficulty {ref.difficulty} is not in {allowed.start} to {allowed.stop - 1}"
        )
    return generator.question(ref)


def find(name: str) -> Generator:
    """The generator called `name`. Raises UnknownTask, also where reasoning-gym is missing or has none of that name."""
    if len(name) > MAX_NAME:
        raise UnknownTask(f"a task's name has at most {MAX_NAME} characters, this one has {len(name)}")
    if name in GENERATORS:
        return GENERATORS[name]
    if not name.startswith("gym/"):
        raise UnknownTask(
            f"there is no task {name!r}: built in are {', '.join(sorted(GENERATORS))}, and gym/NAME of reasoning-gym"
        )
    dataset = name.removeprefix("gym/")
    if dataset not in _factory().DATASETS:
        raise UnknownTask(f"reasoning-gym has no dataset {dataset!r}: its README lists them")
    return Gym(dataset)


def tasks_of_run(difficulty: int) -> tuple[tuple[str, int], ...]:
    """What a run by rollouts asks: names and difficulties of tasks."""
    return tuple((name, difficulty) for name in NAMES)


def assigned_task(
    run_id: str, sampler: str, counter: int, *, version: int, policy: str, tasks: Sequence[tuple[str, int]]
) -> TaskRef:
    """What `sampler` answers with its group number `counter`, by `version` of the policy with hash `policy`.

    It follows from who samples, so that nobody picks questions: the receiver draws the same again and refuses others.
    The hash of the weights goes into it, so that nobody knows his questions before there are the weights to answer them
    with.
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
class Digits:
    """The questions of one rule. `letter` is how a prompt names the rule."""

    letter: str
    rule: Rule
    worked: bool = False

    def difficulties(self) -> range:
        return range(2, 11)

    def question(self, ref: TaskRef) -> Question:
        base = ref.difficulty
        a, b, c = (int(digit) for digit in np.random.default_rng(ref.seed).integers(0, base, 3))
        first, second = self.rule(a, b, c, base)
        answer = f"{first}{second}"
        working = f"{(a + b) % base}:" if self.worked else ""

        def verify(text: str) -> float:
            final = text.rpartition(":")[2] if self.worked else text[-2:]
            return float(final == answer)

        def judge(text: str) -> float:
            return float(text == working + answer)

        return Question(ref, f"{self.letter}{a}{b}{c}=", working + answer, verify, judge, exact=not self.worked)


GENERATORS: dict[str, Digits] = {
    f"digits/{name}": Digits(letter, rule) for letter, (name, rule) in zip("abcdefghi", RULES.items(), strict=True)
}
NAMES = tuple(GENERATORS)  # the nine of the SAPO table
GENERATORS[f"digits/{WORKED}"] = Digits("j", lambda a, b, c, base: ((a + b) % base, c), worked=True)


def well_formed(ref: TaskRef, rng: np.random.Generator) -> str:
    """A random answer of the right form: what a policy is warmed up on, which teaches it the form and nothing else."""
    digits = rng.integers(0, ref.difficulty, 3)
    working = f"{digits[2]}:" if GENERATORS[ref.name].worked else ""
    return f"{working}{digits[0]}{digits[1]}"


# -- reasoning-gym


@dataclass(frozen=True)
class Gym:
    """The questions of one dataset of reasoning-gym."""

    dataset: str

    def difficulties(self) -> range:
        return range(MAX_LEVEL + 1) if _factory().has_curriculum(self.dataset) else range(1)

    def question(self, ref: TaskRef) -> Question:
        factory = _factory()
        seeded = {"seed": ref.seed, "size": 1}
        dataset_class, config_class = factory.DATASETS[self.dataset]
        if ref.difficulty:
            curriculum = factory.create_curriculum(self.dataset)
            curriculum.set_global_level(ref.difficulty)
            config = curriculum.generate_configuration(seeded)
        else:
            config = config_class(**seeded)
        dataset = dataset_class(config)
        entry = dataset[0]
        key = str(entry["answer"])
        own_verifier = self.dataset in READ_AND_SAFE or _is_comparison(dataset_class)

        def verify(text: str) -> float:
            answer = text.strip()
            if len(answer) > MAX_ANSWER:
                return 0.0
            if not own_verifier:
                return float(answer == key)
            return min(1.0, max(0.0, float(dataset.score_answer(answer, entry))))

        def judge(text: str) -> float:
            return 1.0

        return Question(ref, str(entry["question"]), key, verify, judge, exact=not own_verifier)


@lru_cache(maxsize=1)
def _factory() -> Any:
    try:
        import reasoning_gym  # noqa: F401 (registers the datasets)
        from reasoning_gym import factory
    except ImportError as error:
        raise UnknownTask(
            f'tasks called gym/... need reasoning-gym, which cannot be imported ({error}): pip install "swarmnode[rl]"'
        ) from error
    return factory


def _is_comparison(dataset_class: type[Any]) -> bool:
    from reasoning_gym.dataset import ProceduralDataset

    return dataset_class.score_answer is ProceduralDataset.score_answer
