"""The table [rollouts] of a run file: how policies learn from answers, which policies, and what is asked. Torch-free.

[rollouts]
policy = "gpt:2x48"
correction = "taper"
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from swarmnode.training.options import SettingError, option

POLICY_HEADS = 2  # of a gpt policy
MAX_LEVEL = 10  # of a curriculum of reasoning-gym
_MODEL = re.compile(r"(hf|hf-full):([^\s:]{1,256})")
_POLICY = re.compile(r"(gpt|gru):([1-9][0-9]?)x([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class RolloutsSection:
    """How policies learn from rollouts (SAPO, 2509.08721). Each node may choose a policy of its own."""

    task: str = option(
        "digits",
        "what is asked: digits; gym:NAME, tasks of reasoning-gym with commas between, each perhaps with parameters, as "
        "in chain_sum(min_terms=2, level=1); text:FILE.jsonl, questions with answers; or FILE.py:CLASS. A file is on "
        "each node's own machine, where --task says (docs/rollouts.md)",
    )
    gym: str = option(
        "",
        "version of reasoning-gym, the same for all; filled in when the run is created",
        form=("[0-9A-Za-z.+-]{0,32}", "a version such as 0.1.25; leave it out"),
    )
    policy: str = option(
        "gpt:2x48",
        "policy of a node that names no other: gpt or gru, layers x width; or hf:MODEL, a model of transformers that "
        "is on the machine already (hf-full:MODEL trains all of its parameters)",
    )
    answers: int = option(8, "answers to a question, which are compared with one another (G)", between=(2, 64))
    batch: int = option(8, "questions with their answers in a round (I + J); if adaptive, own ones", between=(1, 256))
    external: int = option(
        4, "of these, how many are others' rollouts where that is not adaptive (J)", between=(0, 256)
    )
    adaptive: bool = option(
        True,
        "ask itself a whole batch, and learn from up to three times as many of others' rollouts on top, three eighths "
        "of a batch an update; fewer or none where they hurt on held-out questions",
    )
    correction: str = option(
        "taper",
        "how others' answers weigh: none, as own ones (SAPO as published); taper, wrong ones only as far as this "
        "policy is as likely to give them (TOPR, 2503.14286); decoupled, each token by how much likelier it is here "
        "than where it was written, at most four times (decoupled PPO)",
        choices=("none", "taper", "decoupled"),
    )
    judge: str = option(
        "none",
        "what rewards are multiplied by: none; or task, what the question's own judge finds of the whole answer (1 "
        "where it has none), so that text beside a right answer earns nothing",
        choices=("none", "task"),
    )
    share: float = option(
        0.25, "part of what is learned from in a round that one peer's rollouts may have", between=(0, 1)
    )
    sampled: int = option(
        32,
        "groups in an update, at the most, that nodes which only sample wrote for the policy; they come on top",
        between=(0, 1024),
    )
    staleness: int = option(
        4, "updates that a policy may be ahead of the weights such groups were written with", between=(0, 64)
    )
    audit: float = option(
        0.25, "part of each sampling node's groups that are looked at, one at the least", between=(0, 1)
    )
    difficulty: int = option(
        5, "of the questions: the base of the digits, and what a task of one's own makes of it", between=(2, 10)
    )
    tokens: int = option(
        0,
        "of an answer at the most, its end included; 0: 8 of digits, 64 of other tasks, 16 of digits by hf policies",
        unit="tokens",
        between=(0, 4096),
    )
    context: int = option(
        0,
        "of a question and its answer together, of gpt and gru policies; 0: 16 of digits, 512 of other tasks",
        unit="tokens",
        between=(0, 65536),
    )
    curriculum: float = option(
        0.0,
        "part of the questions that a node asks itself whose task and level are drawn by how often they are solved of "
        "late, most of all those solved half of the time; the rest is drawn alike of all, and is what rewards are told "
        "of; 0: all are drawn alike",
        between=(0, 1),
    )
    pace: float = option(
        1.0,
        "time of a round at the least: what others share meanwhile is learned from in the same round",
        unit="s",
        between=(0, 3600),
    )
    warm_up: int = option(
        120, "supervised steps before, which teach the form of an answer", unit="steps", between=(0, 10**5)
    )


USUAL = RolloutsSection()


def wrong_in(rollouts: RolloutsSection) -> Iterator[str]:
    """What no single key can tell, a text for each mistake."""
    if rollouts.external > rollouts.batch:
        yield (
            f"[rollouts]: external = {rollouts.external} is above batch = {rollouts.batch}, of which it is a part; "
            "lower the first or raise the second"
        )
    try:
        asked_by(rollouts.task)
    except SettingError as error:
        yield f"[rollouts]: {error}"
    if hf_model(rollouts.policy) is None:
        try:
            policy_shape(rollouts.policy, where="[rollouts]")
        except SettingError as error:
            yield str(error)


def hf_model(policy: str) -> tuple[str, str] | None:
    """How it is trained (hf, hf-full) and the name or folder of the model, in a policy such as hf:Qwen/Qwen2.5-0.5B."""
    found = _MODEL.fullmatch(policy)
    return (found[1], found[2]) if found is not None else None


def hf_folder(policy: str) -> str:
    """The folder with the model of this machine that a policy is; empty where it is another one."""
    named = hf_model(policy)
    return named[1] if named is not None and Path(named[1], "config.json").expanduser().is_file() else ""


def policy_shape(policy: str, *, where: str) -> tuple[str, int, int]:
    """Kind, layers and width of a policy such as gpt:2x48. Raises SettingError."""
    found = _POLICY.fullmatch(policy)
    if found is None:
        raise SettingError(
            f"{where}: policy = {policy!r} is not valid; expected gpt:LAYERSxWIDTH or gru:LAYERSxWIDTH, as in "
            "gpt:2x48, or hf:MODEL"
        )
    kind, layers, width = found[1], int(found[2]), int(found[3])
    if kind == "gpt" and width % POLICY_HEADS:
        raise SettingError(f"{where}: policy = {policy!r} is not valid; the width is a multiple of {POLICY_HEADS}")
    return kind, layers, width


@dataclass(frozen=True)
class Asked:
    kind: str  # digits, gym, text or own
    names: tuple[tuple[str, int | None], ...] = ()  # of tasks with their difficulty, None: that of the run
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of reasoning-gym's, by dataset

    @property
    def needs_file(self) -> bool:
        """Whether each node brings a file, which its --task names."""
        return self.kind in ("text", "own")


def asked_by(task: str) -> Asked:
    """What a run asks whose `[rollouts] task` is this, or a node's --task. Raises SettingError."""
    kind, _, rest = task.partition(":")
    if task == "digits":
        return Asked("digits")
    if kind == "gym":
        return _gym(task, rest)
    if kind == "text" and rest:
        return Asked("text", ((f"text/{PurePath(rest).stem[:48]}", 0),))
    file, _, named = task.rpartition(":")
    if file.endswith(".py") and named.isidentifier():
        return Asked("own", ((f"own/{named[:48]}", None),))
    raise SettingError(
        f"task = {task!r} is not valid; expected digits, gym:NAME, text:FILE.jsonl or FILE.py:CLASS, as in "
        "gym:leg_counting or questions.py:Questions"
    )


def asks_questions(local: str) -> bool:
    """Whether the class of FILE.py:CLASS is a task of a run by rollouts, as it has `generate` and `verify`. Not run.

    False where there is no such file or class.
    """
    file, _, named = local.rpartition(":")
    try:
        bodies = ast.parse(Path(file).expanduser().read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    found = [each for each in bodies if isinstance(each, ast.ClassDef) and each.name == named]
    has = {line.name for each in found for line in each.body if isinstance(line, ast.FunctionDef)}
    return {"generate", "verify"} <= has


def _gym(task: str, text: str) -> Asked:
    """Datasets with their parameters, written as calls of Python are; nothing of it is run."""
    names: list[tuple[str, int | None]] = []
    parameters: dict[str, dict[str, Any]] = {}
    try:
        if len(text) > 1024:
            raise ValueError("at most 1024 characters can be read")
        parsed = ast.parse(f"({text},)", mode="eval").body
        for each in parsed.elts if isinstance(parsed, ast.Tuple) else ():
            called = each.func if isinstance(each, ast.Call) and not each.args else each
            if not isinstance(called, ast.Name) or called.id in parameters:
                raise ValueError("each name stands there once, with parameters as NAME(KEY=VALUE)")
            given = each.keywords if isinstance(each, ast.Call) else []
            values = {str(word.arg): ast.literal_eval(word.value) for word in given}
            level = values.pop("level", 0)
            levels = list(level) if isinstance(level, tuple | list) else [level]
            if not levels or not all(type(each) is int and 0 <= each <= MAX_LEVEL for each in levels):
                raise ValueError(f"level = {level!r}: expected 0 to {MAX_LEVEL}, or some of them, as in (0, 1, 2)")
            names += [(f"gym/{called.id[:48]}", each) for each in dict.fromkeys(levels)]
            parameters[called.id] = values
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise SettingError(
            f"task = {task!r} is not valid ({error}); expected names of reasoning-gym's datasets with commas between, "
            "as in gym:leg_counting, chain_sum(min_terms=2, level=1)"
        ) from error
    if not names:
        raise SettingError(f"task = {task!r} names no dataset of reasoning-gym, as in gym:leg_counting")
    return Asked("gym", tuple(names), parameters)
