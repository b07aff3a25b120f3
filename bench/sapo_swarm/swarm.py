"""Eight learners of one process that share rollouts in step: the product's learning half without its network.

    outcome = train(Arm("4/4", own=4, external=4), seed=1, say=print)

In a round every node samples, publishes all of its groups, and then learns from its own and from those that the
others published in the same round. Nothing is shared between nodes but groups, which travel as the map that a message
would hold; each node regenerates, verifies and chooses for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sapo_swarm.attackers import ATTACKS, poisoned_groups, summed
from swarmnode.testing.learners import start_from
from swarmnode.training.rl.defence import TokenGate
from swarmnode.training.rl.groups import RolloutGroup, Scored
from swarmnode.training.rl.grpo import AdaptiveSplit, BatchLimits, Split
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.sampling import Sampling
from swarmnode.training.rl.section import RolloutsSection
from swarmnode.training.rl.sources import known_to_this_process
from swarmnode.training.rl.tasks import DEFAULT_BASE, WORKED, tasks_of_run, well_formed
from swarmnode.training.rl.vocabulary import BYTES

NODES = 8
EQUAL = PolicySpec("gpt", layers=1, width=48, heads=4)
# Reads bytes, and of a long question its last twenty, where reasoning-gym has the numbers.
TEXT = PolicySpec("gpt", layers=1, width=48, heads=2, context=24, vocabulary=BYTES.id)
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
    attack: str = ""
    malicious: int = 0  # of the eight nodes
    defended: bool = False
    worked: bool = False  # the task with working instead of the nine
    rounds: int = 300
    learning_rate: float = 1e-3
    warm_up: int = 120  # supervised steps on random answers of the right form
    max_tokens: int = 4  # of an answer, the end included; more where attackers want room
    task: str = "digits"  # as in [rollouts] task
    curriculum: float = 0.0  # as in [rollouts]


@dataclass(frozen=True)
class Outcome:
    """What came of it. Rewards and tokens are of honest nodes' own fresh answers alone."""

    reward: float  # mean reward of a round, summed over rounds and honest nodes
    per_node: tuple[float, ...]
    curve: tuple[tuple[int, float, float], ...]  # rounds done, mean reward since the last point, tokens a node since 0
    informative: float  # own informative groups a node and round
    taken: float  # external groups a node and round
    external: float  # J, mean over rounds and nodes
    heldout: float  # expected reward on 512 fresh questions at the end, mean of honest nodes
    poison: dict[str, float]  # by attack: share of honest answers of the last tenth that carry what it smuggles in
    poison_curve: tuple[tuple[int, float], ...]  # of this arm's own attack: rounds done, share since the last point
    length: float  # mean tokens of honest answers in the last tenth of the rounds
    rejected_honest: float  # share of honest external answers that the gate refused
    rejected_malicious: float
    refused: dict[str, int]


def train(arm: Arm, seed: int, say: Callable[[int, float], None]) -> Outcome:
    """Run `arm`. All chance comes from `seed`."""
    learners = _learners(arm, seed)
    honest = learners[arm.malicious :]
    rng = np.random.default_rng([seed, 9])
    attack = ATTACKS.get(arm.attack)
    per_node = np.zeros(len(honest))
    every = max(1, arm.rounds // 30)
    curve, poison = [], []
    since, tokens, poisoned = 0.0, 0, 0.0
    informative = taken = external = 0
    late: dict[str, list[float]] = {name: [] for name in ATTACKS}
    lengths: list[float] = []
    checked, lost = Counter[bool](), Counter[bool]()
    refused: Counter[str] = Counter()
    evil = {learner.author for learner in learners[: arm.malicious]}
    for round in range(arm.rounds):
        own = [sampled(learner, arm.oversample) for learner in honest]
        published = [
            (node.author, group) for node, groups in zip(honest, own, strict=True) for group in node.shareable(groups)
        ]
        for learner in learners[: arm.malicious]:
            lies = poisoned_groups(arm.attack, learner.settings, rng)
            published += [(learner.author, group) for group in lies]
        sent = [(author, RolloutGroup.from_map(group.to_map())) for author, group in published]
        for node, (learner, groups) in enumerate(zip(honest, own, strict=True)):
            pool = [(author, group) for author, group in sent if author != learner.author]
            report = learner.learn(groups, pool if arm.external or arm.adaptive else [])
            per_node[node] += report.reward
            since += report.reward
            tokens += report.tokens
            informative += report.informative
            taken += report.taken
            external += report.external
            refused += report.refused
            for bad in (False, True):
                checked[bad] += sum(n for author, n in report.read_answers.items() if (author in evil) == bad)
                lost[bad] += sum(n for author, n in report.refused_answers.items() if (author in evil) == bad)
            if attack is not None:
                poisoned += attack.carried(groups)
            if round >= arm.rounds - max(1, arm.rounds // 10):
                lengths += [len(answer) for scored in groups for answer in scored.group.answers]
                for name, other in ATTACKS.items():
                    late[name].append(other.carried(groups))
        if (round + 1) % every == 0 or round + 1 == arm.rounds:
            done = (round + 1) - (curve[-1][0] if curve else 0)
            curve.append((round + 1, since / done / len(honest), tokens / len(honest)))
            poison.append((round + 1, poisoned / done / len(honest)))
            since = poisoned = 0.0
            say(round + 1, float(per_node.sum()))
    steps = arm.rounds * len(honest)
    return Outcome(
        reward=float(per_node.sum()),
        per_node=tuple(per_node.tolist()),
        curve=tuple(curve),
        informative=informative / steps,
        taken=taken / steps,
        external=external / steps,
        heldout=float(np.mean([learner.heldout(512, seed=seed) for learner in honest])),
        poison={name: float(np.mean(shares)) for name, shares in late.items()},
        poison_curve=tuple(poison) if attack is not None else (),
        length=float(np.mean(lengths)),
        rejected_honest=lost[False] / max(1, checked[False]),
        rejected_malicious=lost[True] / max(1, checked[True]),
        refused=dict(refused),
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
        tasks=((f"digits/{WORKED}", DEFAULT_BASE),) if arm.worked else tasks_of_run(RolloutsSection(task=arm.task)),
        split=AdaptiveSplit() if arm.adaptive else Split(arm.own, arm.external),
        # Undefended is SAPO as published: no cap on an author.
        limits=BatchLimits(filtered=arm.filtered, share=0.25 if arm.defended or not arm.malicious else 1.0),
        sampling=Sampling(max_tokens=arm.max_tokens),
        learning_rate=arm.learning_rate,
        correction=arm.correction,
        curriculum=arm.curriculum,
        gate=TokenGate() if arm.defended else None,
        judged=arm.defended and arm.worked,
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
        learners[0].warm_up(summed if arm.worked else well_formed, steps=arm.warm_up)
        for learner in learners[1:]:
            start_from(learner, learners[0])
    return learners


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


def parameters(spec: PolicySpec) -> int:
    """How many parameters a policy of this shape has."""
    policy: torch.nn.Module = build(spec, seed=0)
    return sum(parameter.numel() for parameter in policy.parameters())
