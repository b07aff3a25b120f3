"""One node's learning: sample its own groups, take in those of others, choose, update, evaluate. No network.

    learner = Learner("me", build(PolicySpec(), seed=1), Settings(), seed=1)
    learner.warm_up(well_formed)                                     # optional: what an answer looks like
    own = learner.sample()                                           # what this node asks itself, and answers
    send(learner.shareable(own))
    report = learner.learn(own, pool)                                # pool: pairs of author and group
    learner.heldout(512)                                             # expected reward on fresh questions

Everything follows from seeds and from what came in: two learners with equal seeds and pools have equal parameters on
the same build of torch. A reward that counts for a node is that of its own fresh answers (`Learned.reward`); what
it takes from others never does.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnode.training.optimizer import Adam
from swarmnode.training.options import SettingError
from swarmnode.training.rl.curriculum import Curriculum, Level
from swarmnode.training.rl.defence import Suspects, TokenGate, gate
from swarmnode.training.rl.groups import Learned, RefusedGroup, RolloutGroup, Scored, mean_reward, reward_by_task, score
from swarmnode.training.rl.grpo import (
    AdaptiveSplit,
    Batch,
    BatchLimits,
    Split,
    choose,
    grpo_loss,
    pack,
    supervised_loss,
    token_logprobs,
)
from swarmnode.training.rl.noise import noise_seed
from swarmnode.training.rl.policies import parameter_hash
from swarmnode.training.rl.sampling import Sampler, Sampling, prompt_of, read, sample
from swarmnode.training.rl.tasks import DEFAULT_BASE, NAMES, Question, TaskRef, UnknownTask, checked_here, regenerate
from swarmnode.training.rl.vocabulary import translate

EXAMPLES = 256  # of the form of an answer, of tasks whose questions may take long to make
STRANGERS_SECONDS = 0.5  # of CPU for checking one answer of another's
STRANGERS_SHARE = 0.5  # of all time, for checking the groups of one author …
STRANGERS_BURST = 20.0  # … as seen over so many seconds
LONGER = 4  # times as many tokens as it writes does a policy read of an answer, as other vocabularies have shorter ones
TRIED = 64  # questions that are made to see how long they are, or for one that can be made

External = tuple[str, RolloutGroup]  # the author, as the signature says, and the group


@dataclass(frozen=True)
class Settings:
    """How a node learns. Two nodes may differ in every one of these."""

    tasks: tuple[tuple[str, int], ...] = tuple((name, DEFAULT_BASE) for name in NAMES)  # names and difficulties
    answers: int = 8  # G, to each question
    split: Split | AdaptiveSplit = field(default_factory=Split)
    limits: BatchLimits = field(default_factory=BatchLimits)
    sampling: Sampling = field(default_factory=Sampling)
    learning_rate: float = 1e-3  # Adam's
    clip_norm: float = 1.0  # of the gradient at the most; 0 is no limit
    correction: str = "none"  # of what others wrote, as in `grpo_loss`; none is SAPO as published
    gate: TokenGate | None = None  # refuse what neither this policy nor its reference would write
    judged: bool = False  # reward × judge
    curriculum: float = 0.0  # of the questions, that are drawn by how often their task is solved; as in `Curriculum`
    trial_questions: int = 128  # held-out questions of a trial of `AdaptiveSplit`


class Learner:
    """A policy, its optimizer, and the chance of one node. Nothing to close."""

    def __init__(
        self, author: str, policy: torch.nn.Module, settings: Settings, *, seed: int, sampler: Sampler = sample
    ) -> None:
        self.author = author
        self.policy = policy
        self.settings = settings
        self.split = settings.split
        self._sampler = sampler
        self.version = 0
        self.optimizer = Adam(policy.parameters(), settings.learning_rate)
        self.reference: torch.nn.Module | None = None  # the policy before reinforcement, for the gate
        self._suspects = Suspects()
        self._used_until: dict[str, float] = {}  # by author: monotonic time up to which its share is used
        self.seed = seed
        self.curriculum = Curriculum(settings.tasks, settings.curriculum)
        self._chosen: set[TaskRef] = set()  # of the questions asked since the last update, those that it drew
        self._rng = np.random.default_rng([seed, 1])
        self._heldout = np.random.default_rng([seed, 2])

    def warm_up(
        self, form: Callable[[TaskRef, np.random.Generator], str], *, steps: int = 120, batch: int = 64
    ) -> float:
        """Teach the form of answers to random questions, which `form` makes up; the last loss in nats a token.

        Supervised, with an optimizer of its own. What is learned becomes the gate's reference.
        """
        rng = np.random.default_rng([self.seed, 3])
        optimizer = Adam(self.policy.parameters(), 3e-3)
        loss = 0.0

        def examples(count: int) -> list[tuple[list[int], list[int]]]:
            """Prompts and answers; none where nobody knows what an answer looks like, or it is too long."""
            asked = [self._question(rng) for _ in range(count)]
            made = [(self._prompt(each), self._ended(form(each.ref, rng))) for each in asked]
            return [each for each in made if 1 < len(each[1]) <= self.settings.sampling.max_tokens]

        # Some tasks take a tenth of a second for a question: so many of these are made, and drawn again and again.
        quick = all(checked_here(name) for name, _ in self.settings.tasks)
        few = [] if quick else examples(min(EXAMPLES, steps * batch))
        for _ in range(steps if quick or few else 0):
            chosen = examples(batch) if quick else [few[each] for each in rng.integers(len(few), size=batch)]
            packed = pack([prompt for prompt, _ in chosen], [answer for _, answer in chosen], [0.0] * len(chosen))
            loss = 0.0
            for part, share in packed.passes(self.policy):
                value = share * supervised_loss(token_logprobs(self.policy, part.tokens), part)
                value.backward()
                loss += float(value.detach())
            optimizer.step()
        self.reference = copy.deepcopy(self.policy)
        return loss

    def go_on_at(self, version: int) -> None:
        """The parameters have seen so many updates, in another process: ask other questions than that one did."""
        if version != self.version:
            self.version = version
            self._rng = np.random.default_rng([self.seed, 1, version])

    def sample(self, count: int | None = None) -> list[Scored]:
        """Answer `count` fresh questions; None: I of them, as the split says."""
        count = self.split.own if count is None else count
        chosen = [self._question(self._rng, [level]) for level in self.curriculum.drawn(count, self._rng)]
        self._chosen.update(question.ref for question in chosen)
        others = [self._question(self._rng) for _ in range(count - len(chosen))]
        return self._answered([*others, *chosen], self.settings.answers)

    def answer(self, tasks: Sequence[TaskRef], *, policy: str) -> list[RolloutGroup]:
        """Answers to these questions, up to one that cannot be made, for the trainer of the policy called `policy`."""
        questions = []
        with suppress(UnknownTask):
            for ref in tasks:
                questions.append(regenerate(ref))
        return self._groups(questions, self.settings.answers, policy) if questions else []

    def shareable(self, own: Sequence[Scored]) -> list[RolloutGroup]:
        """What others can use of these groups of its own: without the answers that its own gate refuses.

        Where policies are warmed up from one checkpoint, theirs refuses the same. A policy that draws from all of its
        vocabulary writes something strange now and then; it is learned from here, and of no use elsewhere. Groups that
        teach nothing are not read.
        """
        if self.settings.gate is None:
            return [scored.group for scored in own]
        worth = [scored for scored in own if scored.informative]
        kept = zip(worth, self._kept(worth, self.settings.gate), strict=True)
        passed = [scored.group.only(which) for scored, which in kept if which.any()]
        return [*passed, *(scored.group for scored in own if not scored.informative)]

    def learn(
        self,
        own: Sequence[Scored],
        pool: Sequence[External],
        sampled: Sequence[Scored] = (),
        *,
        probation: Collection[str] = (),
    ) -> Learned:
        """Take in what others sent, choose, and take the steps of policy gradient that the split asks for.

        `sampled`: groups that others wrote with earlier weights of this policy, as is proved; all of them are learned
        from, by decoupled PPO. `probation`: as in `choose`.
        """
        refused: Counter[str] = Counter()
        fit = self._readable(self.scored(pool, refused), refused)
        sampled = self._readable(sampled, refused)
        read_answers, refused_answers = Counter[str](), Counter[str]()
        if self.settings.gate is not None:
            fit, read_answers, refused_answers = self._gated(fit, refused)
        if isinstance(self.split, AdaptiveSplit) and self.split.due(self.version) and any(g.informative for g in fit):
            self.split = self.split.observe(self._trials(own, fit, self.split, probation))
        self.curriculum.saw([*own, *sampled])
        taken, left_out = self._taken(own, fit, self.split.external, probation)
        refused += left_out
        informative = [scored for scored in sampled if scored.informative]
        refused["uninformative"] += len(sampled) - len(informative)
        loss = self._step_by_step([*own, *taken], informative)
        self.version += 1
        alike = [scored for scored in own if scored.group.task not in self._chosen]
        self._chosen.clear()
        return Learned(
            reward=mean_reward(alike),
            own=len(own),
            informative=sum(scored.informative for scored in own),
            taken=len(taken),
            authors=len({scored.author for scored in taken}),
            by_task=reward_by_task(alike),
            taken_of=dict(Counter(scored.author for scored in taken)),
            external=self.split.room(own, self.split.external).external,
            refused=dict(+refused),
            refused_answers=dict(refused_answers),
            tokens=sum(len(answer) for scored in own for answer in scored.group.answers),
            read_answers=dict(read_answers),
            sampled=len(informative),
            loss=loss,
        )

    def heldout(self, questions: int, *, seed: int | None = None, written: bool = True) -> float:
        """Mean reward on fresh questions that nobody learns from; with `seed`, on the same ones each time.

        Where a question has one exact answer, that is the chance of writing it, which is the mean over all samples;
        else one sampled answer is verified, or, where none is to be `written`, the chance of the key alone counts.
        """
        rng = self._heldout if seed is None else np.random.default_rng([seed, 4])
        asked = [self._question(rng) for _ in range(questions)]
        exact = [question for question in asked if question.task.exact or (question.key and not written)]
        total = float(self._chances(exact).sum())
        open_ended = [question for question in asked if written and not question.task.exact]
        if open_ended:
            total += float(sum(group.rewards.sum() for group in self._answered(open_ended, 1)))
        return total / questions

    def check_room(self) -> None:
        """Raises SettingError where questions and answers are too long for the policy."""
        most = self.settings.sampling.max_tokens
        rng = np.random.default_rng([self.seed, 5])
        asked = [self._question(rng) for _ in range(TRIED)]
        longest = max(len(self.policy.vocabulary.prompt(question.prompt)) for question in asked)
        if longest > self.policy.context - most:
            raise SettingError(
                f"[rollouts]: a question of {longest} tokens and an answer of {most} do "
                f"not fit into the policy's context of {self.policy.context}: raise context, or ask shorter questions"
            )
        longest = max((len(self._ended(question.key)) for question in asked if question.task.exact), default=0)
        if longest > most:
            raise SettingError(
                f"[rollouts]: a right answer has {longest} tokens with its end, the policy writes {most}: raise tokens"
            )

    def _question(self, rng: np.random.Generator, levels: Sequence[Level] = ()) -> Question:
        """A fresh one of one of these tasks at their levels, drawn alike; of all that are asked where none is named."""
        levels = levels or self.settings.tasks
        for _ in range(TRIED):
            name, difficulty = levels[int(rng.integers(len(levels)))]
            with suppress(UnknownTask):  # a task of somebody's own may fail at a seed
                return regenerate(TaskRef(name, difficulty, int(rng.integers(1 << 53))))
        return regenerate(TaskRef(name, difficulty, 0))

    def _prompt(self, question: Question) -> list[int]:
        return prompt_of(self.policy, question, self.settings.sampling)

    def _answered(self, questions: Sequence[Question], copies: int) -> list[Scored]:
        groups = self._groups(questions, copies, parameter_hash(self.policy))
        return [self.score(self.author, group) for group in groups]

    def _groups(self, questions: Sequence[Question], copies: int, policy: str) -> list[RolloutGroup]:
        """So many answers to each, by the policy called `policy`; what is drawn follows from question and author."""
        prompts = [self._prompt(question) for question in questions]
        seeds = [noise_seed(self.author, question.ref) for question in questions]
        written = self._sampler(self.policy, prompts, replace(self.settings.sampling, copies=copies), seeds)
        vocabulary = self.policy.vocabulary.id
        return [
            RolloutGroup(
                question.ref,
                tuple(answer.tokens for answer in answers),
                self.version,
                policy,
                vocabulary,
                tuple(answer.logprobs for answer in answers),
            )
            for question, answers in zip(questions, zip(*[iter(written)] * copies, strict=True), strict=True)
        ]

    def _chances(self, questions: Sequence[Question]) -> torch.Tensor:
        """The chances (≤ N,) of writing exactly the key and then ending; keys too long to be written are left out."""
        keys = [(question, self._ended(question.key)) for question in questions]
        fit = [(self._prompt(question), key) for question, key in keys if len(key) <= self.settings.sampling.max_tokens]
        if not fit:
            return torch.zeros(0)
        batch = pack([prompt for prompt, _ in fit], [key for _, key in fit], [0.0] * len(fit))
        with torch.no_grad():
            found = [token_logprobs(self.policy, part.tokens) for part, _ in batch.passes(self.policy)]
        return (torch.cat(found) * batch.mask).sum(dim=1).exp()

    def _ended(self, answer: str) -> list[int]:
        return [*self.policy.vocabulary.encode(answer), self.policy.vocabulary.end]

    def score(self, author: str, group: RolloutGroup) -> Scored:
        """As `groups.score`, in bounded time where another wrote it; RefusedGroup may then also be a flood."""
        if author == self.author:
            return score(author, group, judged=self.settings.judged)
        now, began = time.monotonic(), time.thread_time()
        self._used_until = {who: until for who, until in self._used_until.items() if until > now}
        until = self._used_until.get(author, now)
        if until > now + STRANGERS_BURST:
            raise RefusedGroup("flood", "checking the groups of this author takes too long")
        try:
            return score(author, group, judged=self.settings.judged, seconds=STRANGERS_SECONDS)
        finally:
            self._used_until[author] = until + (time.thread_time() - began) / STRANGERS_SHARE

    def scored(self, pool: Sequence[External], refused: Counter[str]) -> list[Scored]:
        """Groups with their rewards; why one has none goes into `refused`."""
        fit = []
        for author, group in pool:
            try:
                fit.append(self.score(author, group))
            except RefusedGroup as refusal:
                refused[refusal.reason] += 1
        return fit

    def _readable(self, groups: Iterable[Scored], refused: Counter[str]) -> list[Scored]:
        """Those of which this policy has tokens for the text, and room; how many are not goes into `refused`."""
        vocabulary, fit = self.policy.vocabulary, []
        for scored in groups:
            try:
                longest = max(len(translate(answer, scored.vocabulary, vocabulary)) for answer in scored.group.answers)
                prompt = self._prompt(scored.question)
            except ValueError:
                refused["unreadable"] += 1
                continue
            most = min(LONGER * self.settings.sampling.max_tokens, self.policy.context - len(prompt))
            if not 0 < longest <= most:
                refused["too-long"] += 1
            else:
                fit.append(scored)
        return fit

    def _gated(self, fit: Sequence[Scored], refused: Counter[str]) -> tuple[list[Scored], Counter[str], Counter[str]]:
        """What the gate lets through; only groups that could be chosen are read, since reading is the cost.

        An author's groups are seen in the order in which they came, and what a suspect sends counts as refused.
        """
        assert self.settings.gate is not None
        worth = [scored for scored in fit if scored.informative and scored.author != self.author]
        rest = [scored for scored in fit if not scored.informative and scored.author != self.author]
        passed: list[Scored] = []
        read_answers, refused_answers = Counter[str](), Counter[str]()
        for scored, kept in zip(worth, self._kept(worth, self.settings.gate), strict=True):
            read_answers[scored.author] += len(kept)
            refused_answers[scored.author] += int((~kept).sum())
            self._suspects.saw(scored.author, refused=not kept.any())
            if kept.any():
                passed.append(replace(scored, kept=scored.kept & kept))
            else:
                refused["unlikely"] += 1
        for scored in passed:
            if scored.author in self._suspects:
                refused["suspect"] += 1
                refused_answers[scored.author] += int(scored.kept.sum())
        trusted = [scored for scored in passed if scored.author not in self._suspects]
        return [*trusted, *rest], read_answers, refused_answers

    def _kept(self, groups: Sequence[Scored], limits: TokenGate) -> list[NDArray[np.bool_]]:
        """Which answers (G,) of each group the gate lets pass."""
        if not groups:
            return []
        readers = [self.policy] if self.reference is None else [self.policy, self.reference]
        seen = [read(reader, groups) for reader in readers]
        return [gate(of_group, limits) for of_group in zip(*seen, strict=True)]

    def _batch(self, groups: Sequence[Scored], sampled: Sequence[Scored]) -> Batch | None:
        """Answers with an advantage, in this policy's own tokens; None where there are none."""
        prompts, answers, advantages, behaviour, stale = [], [], [], [], []
        vocabulary = self.policy.vocabulary
        for number, scored in enumerate((*groups, *sampled)):
            older = number >= len(groups)
            source = scored.vocabulary
            prompt = self._prompt(scored.question)
            for index, advantage in enumerate(scored.advantages.tolist()):
                if not advantage:
                    continue
                logprobs = scored.group.logprobs if source.id == vocabulary.id else None
                prompts.append(prompt)
                answers.append(translate(scored.group.answers[index], source, vocabulary))
                advantages.append(advantage)
                behaviour.append(None if logprobs is None else logprobs[index])
                stale.append(older)
        return pack(prompts, answers, advantages, behaviour, stale) if prompts else None

    def _update(self, groups: Sequence[Scored], sampled: Sequence[Scored] = ()) -> float:
        batch = self._batch(groups, sampled)
        if batch is None:
            return 0.0
        loss = 0.0
        for part, share in batch.passes(self.policy):
            now = token_logprobs(self.policy, part.tokens)
            value = share * grpo_loss(now, part, correction=self.settings.correction)
            value.backward()
            loss += float(value.detach())
        if self.settings.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        return loss

    def _step_by_step(self, groups: Sequence[Scored], sampled: Sequence[Scored] = ()) -> float:
        """Learn from the groups in as many updates as the split asks for; the mean of their losses."""
        parts = self.split.updates(groups, self._rng)
        return sum(self._update(part, () if number else sampled) for number, part in enumerate(parts)) / len(parts)

    def _taken(
        self, own: Sequence[Scored], fit: Sequence[Scored], external: int, probation: Collection[str]
    ) -> tuple[list[Scored], Counter[str]]:
        """At most `external` of others' groups, for which there is room beside own ones; the rest by reason."""
        room, limits = self.split.room(own, external), self.settings.limits
        return choose(fit, room, limits, self._rng, author=self.author, probation=probation)

    def _trials(
        self, own: Sequence[Scored], fit: Sequence[Scored], adaptive: AdaptiveSplit, probation: Collection[str]
    ) -> Mapping[int, float]:
        """What a step with each candidate J would gain on held-out questions; leaves the learner as it was."""
        before = [parameter.detach().clone() for parameter in self.policy.parameters()]
        moments = self.optimizer.state
        seed = int(self._heldout.integers(1 << 53))
        start = self.heldout(self.settings.trial_questions, seed=seed, written=False)
        gained = {}
        for external in adaptive.candidates:
            self.optimizer.state = copy.deepcopy(moments)
            self._step_by_step([*own, *self._taken(own, fit, external, probation)[0]])
            gained[external] = self.heldout(self.settings.trial_questions, seed=seed, written=False) - start
            with torch.no_grad():
                torch._foreach_copy_(list(self.policy.parameters()), before)
        self.optimizer.state = moments
        return gained
