"""`rollouts`, the task of a run by rollouts, as the trainer process holds it: a policy and its learner.

    task = Trainee(spec, assignment)
    sampled = task.rollouts(version=0)                    # {"groups": [...], "reward": 0.04, ...}, to be shared
    learned = task.learn([("12D3…", group_map), ...])     # from those and these; {"reward": ..., "taken": 3, ...}

What it is asked and answers are numbers, texts and lists, as they go through the trainer's socket. All chance comes
from the run's seed, who trains, and the version, so that a trainer that is started again asks other questions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from swarmnode.training.inner import seed_of
from swarmnode.training.rl.defence import TokenGate
from swarmnode.training.rl.engine import Engine
from swarmnode.training.rl.groups import (
    GroupError,
    RefusedGroup,
    RolloutGroup,
    Scored,
    as_text,
    mean_reward,
    score,
    told,
)
from swarmnode.training.rl.grpo import AdaptiveSplit, BatchLimits, Split
from swarmnode.training.rl.hf import HFPolicy, load
from swarmnode.training.rl.learner import STRANGERS_SECONDS, Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, TinyGPT, TinyGRU, build
from swarmnode.training.rl.proofs import BF16, FP32, RolloutAudit
from swarmnode.training.rl.sampling import Sampling
from swarmnode.training.rl.section import POLICY_HEADS, RolloutsSection, hf_model, policy_shape
from swarmnode.training.rl.sources import known_to_this_process
from swarmnode.training.rl.tasks import TaskRef, regenerate, tasks_of_run, well_formed
from swarmnode.training.rl.vocabulary import BYTES, COMMON, DIGITS
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment, TaskError

# Of language models; set by reasoning, not measured: who draws among the likeliest 50 seldom leaves a reader's 256.
TEXT_SAMPLING = Sampling(max_tokens=16, top_k=50)
TEXT_GATE = TokenGate(top_k=256, floor=1e-5, tokens=0.02)
OTHER_SAMPLING = Sampling(max_tokens=64)
HELDOUT = 128  # fresh questions of a quick measurement
THOROUGH = 2048


class Trainee:
    """A task with rollouts in place of batches."""

    needs_text = False

    def __init__(self, spec: RunSpec, assignment: Assignment, device: str = "cpu") -> None:
        rollouts = spec.rollouts
        where = "--policy" if assignment.policy else "[rollouts]"
        asked = tasks_of_run(rollouts)
        known_to_this_process(rollouts, assignment.task, asked)
        policy = _policy(assignment.policy or rollouts.policy, rollouts, where=where, seed=spec.run.seed).to(device)
        is_small = isinstance(policy, TinyGPT | TinyGRU)
        self._here = rollouts.task == "digits"  # whether the daemon sees by itself what teaches
        usual = (Sampling() if is_small else TEXT_SAMPLING) if self._here else OTHER_SAMPLING
        batch, own = rollouts.batch, rollouts.batch - rollouts.external
        adaptive = AdaptiveSplit(batch, (0, batch, 3 * batch), step=-(-3 * batch // 8), external=3 * batch)
        split = adaptive if rollouts.adaptive else Split(own, rollouts.external)
        settings = Settings(
            tasks=asked,
            answers=rollouts.answers,
            split=split,
            limits=BatchLimits(share=rollouts.share),
            learning_rate=spec.inner.lr,
            clip_norm=spec.inner.clip,
            gate=TokenGate() if is_small and self._here else TEXT_GATE,
            sampling=replace(usual, max_tokens=rollouts.tokens or usual.max_tokens),
            correction=rollouts.correction,
            judged=rollouts.judge != "none",
            curriculum=rollouts.curriculum,
        )
        # Policies of one shape begin from one checkpoint, as in SAPO: apart, they learn less from one another.
        beginning = Learner("", policy, settings, seed=spec.run.seed)
        beginning.check_room()
        beginning.warm_up(well_formed, steps=rollouts.warm_up)
        self.engine = Engine(policy, assignment.sampling)
        own_seed = seed_of(spec.run.seed, assignment.peer_id)
        self.learner = Learner(assignment.peer_id, policy, settings, seed=own_seed, sampler=self.engine)
        self.learner.reference = beginning.reference
        keep, limits = rollouts.staleness + 1, BF16 if spec.inner.precision == "bf16" else FP32
        self.audit = RolloutAudit(policy, share=rollouts.audit, how=settings.sampling, keep=keep, limits=limits)
        self.model = policy
        self._own: list[Scored] = []
        self._example = regenerate(TaskRef(*asked[0], 0)).prompt[:80]

    def rollouts(self, *, version: int, count: int | None = None, policy: str = "") -> dict[str, Any]:
        """Ask itself fresh questions and answer each several times; what comes of it is learned from by `learn`.

        `version`: updates that the parameters have seen; `count`: so many questions, None: as many as usual. With
        `policy`, the hash of the parameters, they are remembered, for an audit of what others sample with them.
        """
        began = time.perf_counter()
        self.learner.go_on_at(version)
        if policy:
            self.audit.remember(policy)
        self._own = self.learner.sample(count)
        groups = []
        for group in self.learner.shareable(self._own):
            with suppress(GroupError, RefusedGroup):  # as text it is too long for others, or its check is
                shared = group if group.vocabulary in COMMON else as_text(group, self.model.vocabulary)  # for others
                judged = self.learner.settings.judged
                if self._here or score("", shared, judged=judged, seconds=STRANGERS_SECONDS).informative:
                    groups.append(shared.to_map())
        return {"groups": groups, "seconds": time.perf_counter() - began}

    def score(self, groups: Sequence[tuple[str, Mapping[str, Any]]], *, texts: bool) -> list[dict[str, Any]]:
        """Of each group, `refused`, the word for why nobody can learn from it, and `why` in words; both empty where one
        can. With `texts`, also what people are shown of it (`told`)."""
        found = []
        for author, group in groups:
            try:
                scored = self.learner.score(author, RolloutGroup.from_map(group))
            except RefusedGroup as refusal:
                found.append({"refused": refusal.reason, "why": str(refusal)})
            else:
                word = "" if scored.informative else "uninformative"
                found.append({"refused": word, "why": "", **(told(scored) if texts else {})})
        return found

    def answer(self, tasks: Sequence[tuple[str, int, int]], *, version: int, policy: str) -> dict[str, Any]:
        """Answers to these questions (name, difficulty, seed), for whoever trains this policy."""
        began = time.perf_counter()
        self.learner.go_on_at(version)
        groups = self.learner.answer([TaskRef(*task) for task in tasks], policy=policy)
        reward = mean_reward([self.learner.score(self.learner.author, group) for group in groups])
        sent = [group.to_map() for group in groups]
        return {"groups": sent, "reward": reward, "seconds": time.perf_counter() - began}

    def learn(
        self,
        pool: Sequence[tuple[str, Mapping[str, Any]]],
        sampled: Sequence[tuple[str, Mapping[str, Any]]] = (),
        probation: Sequence[str] = (),
    ) -> dict[str, Any]:
        """One update from the rollouts asked last and those of others, pairs of author and group; a `Learned`.

        `sampled`: groups that others wrote with remembered weights of this policy; some of them are looked at.
        `probation`: authors in the pool who have a part of the update together, however many they are.
        """
        began = time.perf_counter()
        external, proved = ([(who, RolloutGroup.from_map(group)) for who, group in given] for given in (pool, sampled))
        unread: Counter[str] = Counter()
        audited = self.audit.check(self.learner.scored(proved, unread))
        learned = self.learner.learn(self._own, external, audited.passed, probation=frozenset(probation))
        self._own = []
        return vars(learned) | {
            "refused": dict(unread + audited.refused + Counter(learned.refused)),
            "checked": dict(audited.checked),
            "caught": dict(audited.caught),
            "heldout": self.learner.heldout(self._questions(HELDOUT)),
            "seconds": time.perf_counter() - began,
        }

    def evaluate(self, *, thorough: bool, seed: int | None = None) -> float:
        """Share of fresh questions that are answered wrong, 0 to 1."""
        questions = self._questions(THOROUGH if thorough else HELDOUT)
        return 1.0 - self.learner.heldout(questions, seed=0 if seed is None else seed)

    def _questions(self, count: int) -> int:
        """How many to ask where answers have to be written, which takes longer than to find the chance of a key."""
        return count if self._here else count // 4

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """What the policy answers to a question; of digits such as `a304=`, the rule a and the digits 3, 0, 4."""
        vocabulary = self.model.vocabulary
        try:
            asked = vocabulary.prompt(prompt.decode())
            how = replace(self.learner.settings.sampling, temperature=temperature)
            (answer,) = self.engine(self.model, [asked], how, [seed])
        except ValueError as error:
            text = prompt.decode(errors="replace")
            raise TaskError(f"the policy cannot read {text!r}: {error}; it is asked as in {self._example!r}") from error
        return vocabulary.decode(answer.tokens).encode()[:length]


def _policy(named: str, rollouts: RolloutsSection, *, where: str, seed: int) -> TinyGPT | TinyGRU | HFPolicy:
    """The policy called that, with the parameters that all of its kind begin from. Raises SettingError, TaskError."""
    model = hf_model(named)
    if model is not None:
        return load(model[1], seed=seed, lora=model[0] == "hf")
    kind, layers, width = policy_shape(named, where=where)
    usual, vocabulary = (16, DIGITS.id) if rollouts.task == "digits" else (512, BYTES.id)
    context = rollouts.context or usual
    return build(PolicySpec(kind, layers, width, POLICY_HEADS, context, vocabulary), seed=seed)
