"""`digits-rl`, the task of a run by rollouts, as the trainer process holds it: a policy and its learner.

    task = DigitsRL(spec, assignment)
    sampled = task.rollouts(version=0)                    # {"groups": [...], "reward": 0.04, ...}, to be shared
    learned = task.learn([("12D3…", group_map), ...])     # from those and these; {"reward": ..., "taken": 3, ...}

What it is asked and answers are numbers, texts and lists, as they go through the trainer's socket. All chance comes
from the run's seed, who trains, and the version, so that a trainer that is started again asks other questions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from swarmnode.training.rl.choosing import AdaptiveSplit, Limits, Split
from swarmnode.training.rl.defence import Gate
from swarmnode.training.rl.groups import RolloutGroup, Scored
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.sampling import Sampling, sample
from swarmnode.training.rl.tasks.digits import NAMES, well_formed
from swarmnode.training.runspec import POLICY_HEADS, RunSpec, policy_shape
from swarmnode.training.tasks import Assignment, TaskError

HELDOUT = 128  # fresh questions of a quick measurement
THOROUGH = 2048


class DigitsRL:
    """Implements `Task`, with rollouts in place of batches."""

    tokens_per_sample = Sampling().max_tokens

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        if device != "cpu":
            raise TaskError(f"digits-rl trains tiny policies on the CPU, not on {device}; run with --device cpu")
        rollouts = spec.rollouts
        where = "--policy" if assignment.policy else "[rollouts]"
        kind, layers, width = policy_shape(assignment.policy or rollouts.policy, where=where)
        policy = build(PolicySpec(kind, layers=layers, width=width, heads=POLICY_HEADS), seed=spec.run.seed)
        settings = Settings(
            tasks=tuple((name, rollouts.difficulty) for name in NAMES),
            answers=rollouts.answers,
            split=_split(spec),
            limits=Limits(share=rollouts.share),
            learning_rate=spec.inner.lr,
            clip_norm=spec.inner.clip,
            gate=Gate(),
            correction="tapered",
        )
        # Policies of one shape begin from one checkpoint, as in SAPO: apart, they learn less from one another.
        beginning = Learner("", policy, settings, seed=spec.run.seed)
        beginning.warm_up(well_formed, steps=rollouts.warm_up)
        self.learner = Learner(
            assignment.peer_id, policy, settings, seed=_seed(f"{spec.run.seed} {assignment.peer_id}")
        )
        self.learner.start_from(beginning)
        self.model = policy
        self._own: list[Scored] = []

    def rollouts(self, *, version: int) -> dict[str, Any]:
        """Ask itself fresh questions and answer each several times; what comes of it is learned from by `learn`.

        `version`: updates that the parameters have seen.
        """
        began = time.perf_counter()
        self.learner.go_on_at(version)
        self._own = self.learner.sample()
        return {"groups": [scored.group.to_map() for scored in self._own], "seconds": time.perf_counter() - began}

    def learn(self, pool: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
        """One update from the rollouts asked last and those of others, pairs of author and group."""
        began = time.perf_counter()
        external = [(author, RolloutGroup.from_map(group)) for author, group in pool]
        report = self.learner.learn(self._own, external)
        self._own = []
        return {
            "reward": report.reward,
            "own": report.own,
            "informative": report.own_informative,
            "taken": report.taken,
            "authors": report.authors,
            "external": report.split.external,
            "refused": dict(report.refused),
            "refused_answers": dict(report.refused_answers),
            "tokens": report.tokens,
            "heldout": self.learner.heldout(HELDOUT),
            "seconds": time.perf_counter() - began,
        }

    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        """Share of fresh questions that are answered wrong, 0 to 1."""
        return 1.0 - self.learner.heldout(THOROUGH if thorough else HELDOUT, seed=0 if seed is None else seed)

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """What the policy answers; such as `a304=` for the rule a and the digits 3, 0, 4."""
        vocabulary = self.model.vocabulary
        try:
            asked = vocabulary.encode(prompt.decode())
            how = replace(self.learner.settings.sampling, temperature=temperature)
            generator = torch.Generator().manual_seed(seed)
            (answer,) = sample(self.model, [asked], copies=1, how=how, generator=generator)
        except ValueError as error:
            raise TaskError(f"the policy cannot read {prompt!r}: {error}; it is asked like a304=") from error
        return vocabulary.decode(answer.tokens).encode()[:length]

    def feed(self, texts: Sequence[str]) -> NoReturn:
        raise TaskError("digits-rl makes its own questions and reads no text")

    def draw(self, samples: int, generator: torch.Generator) -> NoReturn:
        raise TaskError("digits-rl learns from rollouts and has no batches")

    def loss(self, batch: torch.Tensor) -> NoReturn:
        raise TaskError("digits-rl learns from rollouts and has no batches")


def _split(spec: RunSpec) -> Split | AdaptiveSplit:
    rollouts = spec.rollouts
    if not rollouts.adaptive:
        return Split(rollouts.batch - rollouts.external, rollouts.external)
    candidates = sorted({0, *(rollouts.batch * quarter // 4 for quarter in (1, 2, 3)), rollouts.external})
    return AdaptiveSplit(rollouts.batch, tuple(candidates), external=rollouts.external)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
