"""The product's task by rollouts as a `Trainer` of this process, for nodes of the simulated network.

trainer = InProcess(Trainee(spec, Assignment("", peer)), sampling=0.5, update=0.2)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import trio
from simpolicy import Groups, PolicyTrainer

from swarmnode.protocols.methods.trainer import Answered, Vector
from swarmnode.training.inner import layout_of
from swarmnode.training.outer import Layout
from swarmnode.training.rl.groups import Learned, RolloutGroup
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.trainee import Trainee

BATCH = 8  # questions that take `sampling` seconds


class InProcess(PolicyTrainer):
    """Calls take virtual time."""

    def __init__(self, task: Trainee, *, sampling: float, update: float, cheats: bool = False) -> None:
        self.task, self._sampling, self._update, self._cheats = task, sampling, update, cheats
        self.learned: list[Learned] = []

    @property
    def layout(self) -> Layout:
        return layout_of(self.task.model)

    def parameters(self) -> Vector:
        with torch.no_grad():
            vector: Vector = torch.nn.utils.parameters_to_vector(self.task.model.parameters()).numpy().copy()
        return vector

    def load(self, vector: Vector) -> None:
        if not self._cheats:
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), self.task.model.parameters())

    async def rollouts(
        self, *, version: int, count: int | None = None, policy: str = ""
    ) -> tuple[list[RolloutGroup], float]:
        answer = self.task.rollouts(version=version, count=count, policy=policy)
        await trio.sleep(self._sampling * len(answer["groups"]) / BATCH)
        return [RolloutGroup.from_map(group) for group in answer["groups"]], self._sampling

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        asked = [(task.name, task.difficulty, task.seed) for task in tasks]
        answer = self.task.answer(asked, version=version, policy=policy)
        await trio.sleep(self._sampling)
        groups = [RolloutGroup.from_map(group) for group in answer["groups"]]
        return Answered(groups, answer["reward"], self._sampling)

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        await trio.sleep(self._update)
        others, own = ([(author, group.to_map()) for author, group in groups] for groups in (pool, sampled))
        told = self.task.learn(others, own, sorted(probation))
        self.learned.append(Learned(**told))
        return self.learned[-1]

    async def evaluate(self, *, thorough: bool, wait: bool = True) -> float:
        await trio.lowlevel.checkpoint()
        return self.task.evaluate(thorough=thorough)
