"""The table [rollouts] of a run file: how policies learn from answers, which policies, and what is asked. Torch-free.

[rollouts]
policy = "gpt:2x48"
correction = "taper"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from swarmnode.training.options import SettingError, option

POLICY_HEADS = 2  # of a gpt policy
_MODEL = re.compile(r"(hf|hf-full):([^\s:]{1,256})")
_POLICY = re.compile(r"(gpt|gru):([1-9][0-9]?)x([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class RolloutsSection:
    """How policies learn from rollouts (SAPO, 2509.08721). Each node may choose a policy of its own."""

    policy: str = option(
        "gpt:2x48",
        "policy of a node that names no other: gpt or gru, layers x width; or hf:MODEL, a model of transformers that "
        "is on the machine already (hf-full:MODEL trains all of its parameters)",
    )
    answers: int = option(8, "answers to a question, which are compared with one another (G)", between=(2, 64))
    batch: int = option(8, "questions with their answers in an update (I + J)", between=(1, 256))
    external: int = option(
        4, "of these, how many are others' rollouts where that is not adaptive (J)", between=(0, 256)
    )
    adaptive: bool = option(
        True,
        "ask itself a whole batch, and put others' rollouts in the places of own ones that teach nothing; none where "
        "they hurt on held-out questions",
    )
    correction: str = option(
        "taper",
        "how others' answers weigh: none, as own ones (SAPO as published); taper, wrong ones only as far as this "
        "policy is as likely to give them (TOPR, 2503.14286); decoupled, each token by how much likelier it is here "
        "than where it was written, at most four times (decoupled PPO)",
        choices=("none", "taper", "decoupled"),
        later=True,
    )
    judge: str = option(
        "none",
        "what rewards are multiplied by: none; or task, what each question's own judge, which is part of this program, "
        "finds of the whole answer, so that text beside a right answer earns nothing",
        choices=("none", "task"),
    )
    share: float = option(0.25, "part of an update that one peer's rollouts may have", between=(0, 1))
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
    weights: str = option(
        "pull",
        "how sampling nodes come to new weights: pull, they ask after each batch; push, they are told, and fetch them "
        "while they sample with those before",
        choices=("pull", "push"),
    )
    difficulty: int = option(5, "of the questions: the base of the digits", between=(2, 10))
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


def wrong_in(rollouts: RolloutsSection, where: str) -> Iterator[str]:
    """What no single key can tell, a text for each mistake; `where` names file and table."""
    if rollouts.external > rollouts.batch:
        yield (
            f"{where}: external = {rollouts.external} is above batch = {rollouts.batch}, of which it is a part; lower "
            "the first or raise the second"
        )
    if hf_model(rollouts.policy) is None:
        try:
            policy_shape(rollouts.policy, where=where)
        except SettingError as error:
            yield str(error)


def hf_model(policy: str) -> tuple[str, str] | None:
    """How it is trained (hf, hf-full) and the name or folder of the model, in a policy such as hf:Qwen/Qwen2.5-0.5B."""
    found = _MODEL.fullmatch(policy)
    return (found[1], found[2]) if found is not None else None


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
