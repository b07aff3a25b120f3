"""Nodes that learn from one another's rollouts, with liars among them: the product's learning half in one process.

In a round every honest node samples and publishes, the liars hear that and publish what they like, and every honest
node learns from its own groups and the others'. What travels is the map that a message would hold. Undefended is SAPO
as published: no gate, no cap on an author; and its nodes believe rewards where a group says what it earned.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from adversaries.rollouts import Liar, RolloutLie, Sent
from workedtask import WORKED

from swarmnode.testing.learners import start_from
from swarmnode.training.rl.defence import TokenGate
from swarmnode.training.rl.groups import RolloutGroup, Scored
from swarmnode.training.rl.grpo import BatchLimits, Split
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.tasks import DEFAULT_BASE, Question, TaskRef, regenerate, well_formed

SPLIT = Split(4, 4)
POLICY = PolicySpec("gpt", layers=1, width=48, heads=4)
DEFENDED = Settings(split=SPLIT, limits=BatchLimits(share=0.25), gate=TokenGate(), correction="taper")
UNDEFENDED = Settings(split=SPLIT, limits=BatchLimits(share=1.0))


@dataclass(frozen=True)
class Size:
    nodes: int
    liars: int
    rounds: int
    seed: int = 1
    warm_up: int = 120  # supervised steps that teach the form of an answer and nothing of the tasks; as in a run file
    worked: bool = False  # the task whose answers show their working, which a judge reads and the checkpoint knows


FULL = Size(nodes=8, liars=2, rounds=50)  # a quarter, as in the paper


@dataclass
class Course:
    """What a run came to. Answers of honest nodes are those of the last tenth of its rounds."""

    texts: list[tuple[Question, str]] = field(default_factory=list)  # of honest nodes
    tokens: list[int] = field(default_factory=list)  # of each of them
    reward: float = 0.0  # mean of honest nodes' own answers over all rounds
    offered: int = 0  # groups of liars, at every honest node that was given them
    accepted: int = 0  # of these, groups from which something was to be learned after all checks, the gate's included
    honest_checked: int = 0  # answers of other honest nodes that were read
    honest_refused: int = 0

    @property
    def length(self) -> float:
        return float(np.mean(self.tokens))

    @property
    def rejected(self) -> float:
        """Share of liars' groups from which nothing was learned because of what they are."""
        return 1 - self.accepted / self.offered if self.offered else 0.0

    @property
    def honest_lost(self) -> float:
        return self.honest_refused / max(1, self.honest_checked)


class Watched(Learner):
    """A node that remembers of whom its last update could have learned, by group."""

    def _gated(self, fit, refused):  # type: ignore[no-untyped-def]
        found = super()._gated(fit, refused)
        self.passed = [scored.author for scored in found[0] if scored.informative]
        return found


class Believing(Learner):
    """A node that believes the rewards that a group claims."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self.claims: dict[RolloutGroup, list[float]] = {}

    def scored(self, pool, refused):  # type: ignore[no-untyped-def]
        for scored in super().scored(pool, refused):
            claimed = self.claims.get(scored.group)
            rewards = scored.rewards if claimed is None else np.array(claimed, np.float32)
            yield Scored(
                scored.author, scored.group, scored.question, scored.texts, rewards, scored.kept, scored.vocabulary
            )


@cache
def beginning(seed: int, warm_up: int, worked: bool) -> Learner:
    """The checkpoint from which all nodes start: it knows the form of an answer, and sums where these are asked for."""
    learner = Learner("", build(POLICY, seed=seed), _settings(DEFENDED, worked), seed=seed)
    learner.warm_up(_summed if worked else well_formed, steps=warm_up)
    return learner


def _settings(settings: Settings, worked: bool) -> Settings:
    if not worked:
        return settings
    return replace(settings, tasks=((WORKED, DEFAULT_BASE),), judged=settings.gate is not None)


def _summed(ref: TaskRef, rng: np.random.Generator) -> str:
    """A random answer of the right form, with a right working."""
    return regenerate(ref).key[:2] + well_formed(ref, rng)[2:]


def run(lie: RolloutLie | None, size: Size, *, defended: bool = True) -> Course:
    """Learn for `size.rounds`; without a lie everybody is honest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny policies are slower on more
    try:
        return _run(lie, size, defended)
    finally:
        torch.set_num_threads(threads)


def _run(lie: RolloutLie | None, size: Size, defended: bool) -> Course:
    kind, settings = (Watched, DEFENDED) if defended else (Believing, UNDEFENDED)
    settings = _settings(settings, size.worked)
    liars = [f"liar{number}" for number in range(size.liars if lie else 0)]
    honest = []
    for number in range(size.nodes - len(liars)):
        start = beginning(size.seed, size.warm_up, size.worked)
        policy = copy.deepcopy(start.policy)
        honest.append(kind(f"node{number}", policy, settings, seed=1000 * size.seed + number))
        start_from(honest[-1], start)
    rng, course = np.random.default_rng([size.seed, 9]), Course()
    for round in range(size.rounds):
        own = [node.sample() for node in honest]
        pool = [(node.author, group) for node, mine in zip(honest, own, strict=True) for group in node.shareable(mine)]
        heard = [group for _, group in pool]
        lies = [(name, map) for name in liars if lie for map in lie.published(Liar(rng, heard))]
        false = [(name, RolloutGroup.from_map(map)) for name, map in lies]
        for node, mine in zip(honest, own, strict=True):
            course.offered += len(false)
            if isinstance(node, Believing):
                node.claims = _claims(lies, false)
            report = node.learn(mine, [*pool, *false])
            if isinstance(node, Watched):
                course.accepted += sum(author in liars for author in node.passed)
            course.reward += report.reward / len(honest) / size.rounds
            course.honest_checked += sum(n for author, n in report.read_answers.items() if author not in liars)
            course.honest_refused += sum(n for author, n in report.refused_answers.items() if author not in liars)
            if round >= size.rounds - max(1, size.rounds // 10):
                course.texts += [(scored.question, text) for scored in mine for text in scored.texts]
                course.tokens += [len(answer) for scored in mine for answer in scored.group.answers]
    return course


def _claims(lies: Sequence[tuple[str, Sent]], groups: Sequence[tuple[str, RolloutGroup]]) -> dict[RolloutGroup, list]:
    pairs = zip(lies, groups, strict=True)
    return {group: map["rewards"] for (_, map), (_, group) in pairs if "rewards" in map}
