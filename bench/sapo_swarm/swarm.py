"""Eight learners of one process that share rollouts in step: the product's learning half without its network.

    outcome = train(Arm("4/4", own=4, external=4), seed=1, say=print)

In a round every node samples, publishes all of its groups, and then learns from its own and from those that the
others published in the same round. Nothing is shared between nodes but groups, which travel as the map that a message
would hold; each node regenerates, verifies and chooses for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.testing.learners import start_from
from swarmnode.training.rl.groups import RolloutGroup, Scored
from swarmnode.training.rl.grpo import AdaptiveSplit, BatchLimits, Split
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.sampling import Sampling
from swarmnode.training.rl.section import RolloutsSection
from swarmnode.training.rl.sources import known_to_this_process
from swarmnode.training.rl.tasks import tasks_of_run, well_formed
from swarmnode.training.rl.vocabulary import BYTES

NODES = 8
EQUAL = PolicySpec("gpt", layers=1, width=48, heads=4)
TEXT = PolicySpec("gpt", layers=1, width=48, heads=2, context=80, vocabulary=BYTES.id)  # reads bytes
UNEQUAL = {
    "gpt 1×24": PolicySpec("gpt", layers=1, width=24, heads=4),
    "gpt 1×48": EQUAL,
    "gpt 2×48": PolicySpec("gpt", layers=2, width=48, heads=4),
    "gru 1×48": PolicySpec("gru", layers=1, width=48),
}


@dataclass(frozen=True)
class Arm:
    """One way for a swarm to learn."""

    name: str
    own: int = 8
    external: int = 0
    adaptive: bool = False
    filtered: bool = True
    oversample: int = 0
    correction: str = "none"
    policies: str = (
        "equal"  # equal: one checkpoint for all; unequal: four kinds, two nodes each, of their own beginnings
    )
    rounds: int = 300
    learning_rate: float = 1e-3
    warm_up: int = 120  # supervised steps on random answers of the right form
    max_tokens: int = 4  # of an answer, the end included
    task: str = "digits"  # as in [rollouts] task
    curriculum: float = 0.0  # as in [rollouts]


@dataclass(frozen=True)
class Outcome:
    """What came of it. Rewards and tokens are of nodes' own fresh answers alone."""

    reward: float  # mean reward of a round, summed over rounds and nodes
    per_node: tuple[float, ...]
    curve: tuple[tuple[int, float, float], ...]  # rounds done, mean reward since the last point, tokens a node since 0
    informative: float  # own informative groups a node and round
    taken: float  # external groups a node and round
    external: float  # J, mean over rounds and nodes
    heldout: float  # expected reward on 512 fresh questions at the end, mean of nodes
    refused: dict[str, int]  # others' groups that nothing was learned from, by why
    by_task: dict[str, tuple[float, float]]  # mean reward in the first and in the last fifth of the rounds


def train(arm: Arm, seed: int, say: Callable[[int, float], None]) -> Outcome:
    """Run `arm`. All chance comes from `seed`."""
    learners = _learners(arm, seed)
    rewards: list[list[float]] = [[] for _ in learners]
    tokens: list[list[int]] = [[] for _ in learners]
    by_task: list[list[Mapping[str, float]]] = [[] for _ in learners]
    informative = taken = external = 0
    refused: Counter[str] = Counter()
    for round in range(arm.rounds):
        own = [sampled(learner, arm.oversample) for learner in learners]
        published = [
            (node.author, group) for node, groups in zip(learners, own, strict=True) for group in node.shareable(groups)
        ]
        sent = [(author, RolloutGroup.from_map(group.to_map())) for author, group in published]
        for node, (learner, groups) in enumerate(zip(learners, own, strict=True)):
            pool = [(author, group) for author, group in sent if author != learner.author]
            report = learner.learn(groups, pool if arm.external or arm.adaptive else [])
            rewards[node].append(report.reward)
            tokens[node].append(report.tokens)
            by_task[node].append(report.by_task)
            informative += report.informative
            taken += report.taken
            external += report.external
            refused += report.refused
        say(round + 1, sum(map(sum, rewards)))
    steps = arm.rounds * NODES
    return Outcome(
        reward=sum(map(sum, rewards)),
        per_node=tuple(map(sum, rewards)),
        curve=curve_of(rewards, tokens),
        informative=informative / steps,
        taken=taken / steps,
        external=external / steps,
        heldout=float(np.mean([learner.heldout(512, seed=seed) for learner in learners])),
        refused=dict(refused),
        by_task=reward_by_task(by_task),
    )


def sampled(learner: Learner, oversample: int) -> list[Scored]:
    """What a node asks itself in a round; with `oversample`, until so many groups are informative."""
    if not oversample:
        return learner.sample()
    asked: list[Scored] = []
    while sum(scored.informative for scored in asked) < oversample and len(asked) < 32 * oversample:
        asked += learner.sample(oversample)
    return asked


def settings_of(arm: Arm) -> Settings:
    """How the nodes of an arm learn."""
    return Settings(
        tasks=tasks_of_run(RolloutsSection(task=arm.task)),
        split=AdaptiveSplit() if arm.adaptive else Split(arm.own, arm.external),
        limits=BatchLimits(filtered=arm.filtered),
        sampling=Sampling(max_tokens=arm.max_tokens),
        learning_rate=arm.learning_rate,
        correction=arm.correction,
        curriculum=arm.curriculum,
    )


def _learners(arm: Arm, seed: int) -> list[Learner]:
    settings = settings_of(arm)
    known_to_this_process(RolloutsSection(task=arm.task), "", settings.tasks)
    one = EQUAL if arm.task == "digits" else TEXT
    kinds = [one] * NODES if arm.policies == "equal" else [spec for spec in UNEQUAL.values() for _ in range(2)]
    learners = [
        Learner(f"node{n}", build(spec, seed=1000 * seed + n), settings, seed=1000 * seed + n)
        for n, spec in enumerate(kinds)
    ]
    if arm.policies == "unequal":
        for learner in learners:
            learner.warm_up(well_formed, steps=arm.warm_up)
    else:
        learners[0].warm_up(well_formed, steps=arm.warm_up)
        for learner in learners[1:]:
            start_from(learner, learners[0])
    return learners


def reward_by_task(by_task: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, tuple[float, float]]:
    """`Outcome.by_task` from what each node earned by task in each round; not every round asks every task."""
    part = max(1, len(by_task[0]) // 5)
    found = {}
    for task in sorted({task for of_node in by_task for of_round in of_node for task in of_round}):
        first, last = (
            [of_round[task] for of_node in by_task for of_round in of_node[rounds] if task in of_round]
            for rounds in (slice(part), slice(-part, None))
        )
        found[task] = (float(np.mean(first or [0.0])), float(np.mean(last or [0.0])))
    return found


def curve_of(
    rewards: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]
) -> tuple[tuple[int, float, float], ...]:
    """`Outcome.curve` from each node's rewards and generated tokens by round."""
    rounds = len(rewards[0])
    every, points, before = max(1, rounds // 30), [], 0
    for done in range(1, rounds + 1):
        if done % every == 0 or done == rounds:
            reward = float(np.mean([of_node[before:done] for of_node in rewards]))
            points.append((done, reward, float(np.mean([sum(of_node[:done]) for of_node in tokens]))))
            before = done
    return tuple(points)
