"""A trainer of a policy for simulations: a policy that knows, for each rule about digits, a share of the answers.

trainer = SimPolicy(peer_id, seconds=0.2)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import trio

from swarmnode.protocols.methods.trainer import (
    Answered,
    Groups,
    Trainer,
    TrainerDied,
    TrainStats,
    Vector,
)
from swarmnode.training.codecs.floats import from_bf16
from swarmnode.training.outer import Layout
from swarmnode.training.rl.groups import Learned, RolloutGroup, mean_reward, score
from swarmnode.training.rl.patches import rounded
from swarmnode.training.rl.tasks import DEFAULT_BASE, NAMES, TaskRef, regenerate
from swarmnode.training.rl.vocabulary import DIGITS

OWN, EXTERNAL, ANSWERS = 4, 4, 8
STEP = 0.01  # of a rule's share, for each informative group


def _logprob(shares: Vector) -> float:
    return -1.0 - float(shares.sum())


class PolicyTrainer(Trainer):
    """What every trainer of a policy has: no batches, and nobody who asks it for text."""

    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
        raise AssertionError("a policy has no batches")

    async def interrupt(self) -> None:
        await trio.lowlevel.checkpoint()

    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        raise AssertionError("nobody asks a policy of a simulation")


class SimPolicy(PolicyTrainer):
    """Asking takes `seconds` of virtual time, learning none. `dies` makes the next call raise TrainerDied."""

    def __init__(self, peer_id: str, *, seconds: float = 0.2, knows: float = 0.2) -> None:
        self._peer_id, self._seconds = peer_id, seconds
        self._shares = np.full(len(NAMES), knows, np.float32)  # of right answers, by rule
        self._own: list[RolloutGroup] = []
        self._remembered: dict[str, Vector] = {}  # shares by their hash; the log-probability of every token tells them
        self.dies = False

    @property
    def layout(self) -> Layout:
        return Layout.of([("shares", (len(NAMES),))])

    def parameters(self) -> Vector:
        return self._shares.copy()

    def load(self, vector: Vector) -> None:
        np.copyto(self._shares, vector)

    async def rollouts(
        self, *, version: int, count: int | None = None, policy: str = ""
    ) -> tuple[list[RolloutGroup], float]:
        await self._work()
        if policy:
            self._remembered[policy] = from_bf16(rounded(self._shares))
        rng = np.random.default_rng([version, *self._peer_id.encode()])
        policy = f"shares of {self._peer_id[-8:]}"
        tasks = [
            TaskRef(NAMES[int(rng.integers(len(NAMES)))], DEFAULT_BASE, int(rng.integers(1 << 40))) for _ in range(OWN)
        ]
        self._own = [self._group(rng, task, version, policy) for task in tasks[:count]]
        return self._own, self._seconds

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        await self._work()
        rng = np.random.default_rng([version, len(tasks), *self._peer_id.encode()])
        groups = [self._group(rng, task, version, policy) for task in tasks]
        logprob = _logprob(self._shares)
        proved = [replace(group, logprobs=tuple((logprob,) * len(a) for a in group.answers)) for group in groups]
        reward = mean_reward([score(self._peer_id, group) for group in groups])
        return Answered(proved, reward, self._seconds)

    def _group(self, rng: np.random.Generator, task: TaskRef, version: int, policy: str) -> RolloutGroup:
        rule = NAMES.index(task.name)
        key = regenerate(task).key
        answers = [key if rng.random() < self._shares[rule] else "ii" for _ in range(ANSWERS)]
        tokens = tuple((*DIGITS.encode(answer), DIGITS.end) for answer in answers)
        return RolloutGroup(task, tokens, version, policy, DIGITS.id)

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        if self.dies:
            await self._work()
        scored = [score(author, group) for author, group in pool]
        taken = [each for each in scored if each.informative][:EXTERNAL]
        own = [score(self._peer_id, group) for group in self._own]
        caught = {
            author: "logprobs"
            for author, group in sampled
            if group.logprobs is None or abs(group.logprobs[0][0] - _logprob(self._remembered[group.policy])) > STEP / 4
        }
        proved = [score(author, group) for author, group in sampled if author not in caught]
        for each in (*own, *taken, *proved):
            if each.informative:
                self._shares[NAMES.index(each.group.task.name)] += STEP
        return Learned(
            reward=float(np.mean([each.rewards.mean() for each in own])),
            heldout=float(self._shares.mean()),
            own=len(own),
            informative=sum(each.informative for each in own),
            taken=len(taken),
            authors=len({each.author for each in taken}),
            external=EXTERNAL,
            refused={},
            refused_answers={},
            tokens=3 * OWN * ANSWERS,
            seconds=0.0,
            sampled=sum(each.informative for each in proved),
            checked=dict(Counter(author for author, _ in sampled)),
            caught=caught,
        )

    async def _work(self) -> None:
        await trio.sleep(self._seconds)
        if self.dies:
            self.dies = False
            raise TrainerDied("the simulation says so")

    async def evaluate(self, *, thorough: bool, wait: bool = True) -> float:
        await trio.lowlevel.checkpoint()
        return 1.0 - float(self._shares.mean())
