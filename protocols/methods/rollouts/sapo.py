"""The exchange method `sapo`: policies of any size learn from one another's rollouts (Swarm sAmpling Policy
Optimization, arXiv 2509.08721).

    ask       fresh questions, and answers to each by the policy as it is
    share     the answers, with whoever is connected; what others shared meanwhile is in the pool
    learn     when the round's time is over: one update from own groups and from others', scored here

Every node has a policy of its own and rounds of its own: `state_hash` is that policy's, and nobody agrees on anything.
So nothing is waited for. Who is alone learns from its own answers and goes on learning from others' when they are back;
whoever dies, freezes or lies costs nobody a round. A trainer process that dies costs the round in hand.

A node may also only sample: it writes answers for a policy that another node trains (Echo, arXiv 2508.05387;
INTELLECT-2, 2505.07291). Its `Method` is `SapoSampler`, whatever role others have:

    weights   the newest of the trainer's, after each batch
    sample    answers to the questions that follow from this node's identity, its counter and the weights, with proofs
    give      to the trainer alone, which checks them and says what became of them

While some ask, a trainer broadcasts its weights after each round (`samplers.py`), and learns from what they write like
from its own answers, which are then few. A sampling node chooses its trainer among members whose policy has this node's
shape: the one for which fewest sample, now and then anew. A round is one batch. Who may fail when, and what is then
true: a trainer that is silent for PATIENCE is left for another one, and so is one that answers and has no newer weights
for long, if another is here; weights that cannot be had are done without as long as those in hand are at most
`staleness` updates old; without any, this node waits. What it wrote with older weights and could not hand over is
dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from math import inf, nan
from typing import Any

import numpy as np
import trio

from swarmnode.crdt.envelope import Envelope
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.method import Begin, LostPlace, Method, Place, RoundResult, Saved
from swarmnode.protocols.methods.rollouts.intake import informative
from swarmnode.protocols.methods.rollouts.messages import MAX_COUNTER, TIMEOUT, SignedGroup
from swarmnode.protocols.methods.rollouts.pool import RolloutLimits, SharingRules
from swarmnode.protocols.methods.rollouts.samplers import Samplers, SamplerTally
from swarmnode.protocols.methods.rollouts.sharing import Rollouts
from swarmnode.protocols.methods.rollouts.weights import (
    WEIGHTS,
    Newest,
    NoWeights,
    Weights,
    WeightsBroadcast,
    WeightsFetch,
    WeightsQuery,
    hash_of,
    open_weights,
)
from swarmnode.protocols.methods.trainer import Answered, Groups, Sampled, TrainerDied, TrainerHeld, TrainStats
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.observations import RolloutWork
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.training.outer import OuterState
from swarmnode.training.rl.groups import Learned, RolloutGroup, score
from swarmnode.training.rl.patches import Words, rounded
from swarmnode.training.rl.tasks import assigned_task, checked_here, tasks_of_run

log = logging.getLogger(__name__)

ASKED_ITSELF = 1  # questions of a round while others sample: for the course of the reward
CANDIDATES = 8  # others' groups that a trainer is given, as a multiple of what it takes: many teach nothing
LOOK_EVERY = 1.0  # seconds between looks for a trainer, or for weights that are to come
LOOK_AGAIN = 20.0  # seconds between looks whether another trainer needs this node more
PATIENCE = 15.0  # seconds for which a trainer may be silent
IDLE_AFTER = 60.0  # seconds without newer weights, or thrice the longest that they took, after which a trainer is idle
IDLE_FOR = 600.0  # seconds for which it is then passed over
LEAST_BETWEEN = 0.5  # seconds between two questions to a trainer
AGAIN = 32  # counters, or a batch of more, that its trainer may not have from this node yet: groups on their way


class _ByRollouts(Method, SharingRules):
    """What both roles have alike."""

    name = "sapo"
    phase = "waiting"
    place: Place | None = None
    rollouts: Rollouts

    def __init__(self, parts: Context, *, limits: RolloutLimits, takes: bool) -> None:
        self._parts, self._settings, self._trainer = parts, parts.spec.rollouts, parts.trainer
        self.rollouts = Rollouts(parts, self, limits=limits, takes=takes)
        self.violations = (self.rollouts.violations,)
        self._began = trio.current_time()

    def measure(self, metrics: Metrics) -> None:
        self.rollouts.measure(metrics)

    async def regain_place(self) -> None:
        """There is no place to be lost."""

    async def watch(self) -> None:
        await self.rollouts.watch()

    async def leave(self) -> None:
        """Nobody waits for this node, and no work is in hand that it could lose."""

    def saved(self) -> Saved:
        place, parameters = self._stands(), self._trainer.parameters()
        residual = np.zeros(parameters.size, np.float32)
        return Saved(place.round, OuterState.start(parameters), residual, place.members, self.name)

    def peers(self) -> Sequence[PeerId]:
        return self._parts.membership.connected()

    async def score(self, groups: Sequence[SignedGroup], *, texts: bool = False) -> list[dict[str, Any]]:
        return await self._trainer.score(await self._unpacked(groups), texts=texts)

    async def _unpacked(self, groups: Sequence[SignedGroup]) -> Groups:
        """Those of a full pool take a second, and not this thread's."""
        return await self._parts.runner(lambda: [(signed.author, signed.group) for signed in groups])

    def _stand(self, round: int, state_hash: str) -> Place:
        """Having done so many rounds, with the policy of this hash."""
        self._began = trio.current_time()
        self.place = Place(round, state_hash, members=(self._parts.me,))
        return self.place

    def _stands(self) -> Place:
        if self.place is None:
            raise RuntimeError("this node has no place yet")
        return self.place


class Sapo(_ByRollouts):
    """A node that trains a policy. Its `samplers` are public, to be looked at."""

    judges = True

    def __init__(self, parts: Context) -> None:
        super().__init__(parts, limits=parts.rollouts, takes=True)
        self._judged = self._settings.judge != "none"
        self._tasks = frozenset(tasks_of_run(self._settings))
        self._is_sampled_for = False  # others wrote for this policy in the round before
        self.samplers = Samplers(parts.me, run_id=parts.run_id, settings=self._settings)
        self.broadcast = WeightsBroadcast(parts, self.samplers)
        self.violations = (*self.violations, self.broadcast.violations)
        self._work = RolloutWork(self.rollouts.pool, self.samplers)

    def tell_ledger(self, ledger: Ledger) -> None:
        self._work.tell(ledger)

    def status(self) -> Mapping[str, Any]:
        return {"samplers": [asdict(tally) for tally in self.samplers.tallies()]}

    # -- rules of sharing

    def standing(self, author: PeerId) -> float:
        """How much of its share an author has here: nothing once it was caught lying, or while it is contained.

        Who samples for this node and passed its audits is no newcomer to it.
        """
        standing = self._parts.ledger.standing(author) if self._parts.ledger is not None else 1.0
        if standing > 0 and self.samplers.proved(author):
            standing = 1.0
        return min(standing, self.samplers.standing(author))

    def check(self, group: SignedGroup) -> str:
        name, difficulty, _ = group.packed.task
        if (name, difficulty) not in self._tasks:
            return "other-task"
        if len(group.packed.lengths) > self._settings.answers:
            return "other-size"
        return informative(group, judged=self._judged) if checked_here(name) else ""

    def insert_sampled(self, group: SignedGroup) -> str:
        return self.samplers.insert(group)

    # -- rounds

    async def find_place(self, begin: Begin) -> None:
        """From the newest checkpoint, or from the beginning: a policy is nobody else's."""
        if begin.saved is not None:
            self._trainer.load(begin.saved.state.parameters)
        await self._stand_after(begin.saved.round if begin.saved is not None else 0)

    async def run_round(self) -> RoundResult:
        place, began = self._stands(), self._began
        self.phase = "training"
        try:
            broadcast = self.broadcast.newest is not None
            groups, sampling = await self._trainer.rollouts(
                version=place.round,
                count=ASKED_ITSELF if self._is_sampled_for else None,
                policy=place.state_hash if broadcast else "",
            )
            teaching = await self._parts.runner(lambda: [group for group in groups if self._teaches(group)])
            await self.rollouts.publish(teaching)
            self.phase = "exchanging"
            await trio.sleep_until(began + self._settings.pace)
            learned = await self._learn(place.round)
        except TrainerDied as error:
            raise LostPlace(str(error)) from error
        finally:
            self.phase = "waiting"
        words = await self._stand_after(place.round + 1)
        stands = self._stands()
        await self._broadcast_weights(stands, words)
        samples = learned.own + learned.taken + learned.sampled
        worked = TrainStats(1, samples, learned.tokens, nan, sampling + learned.seconds)
        ended = place.round, stands.state_hash, nan, worked, self._began - began
        return RoundResult(*ended, 1 + learned.authors, counted=(self._parts.me,), learned=learned)

    async def regain_place(self) -> None:
        """There is no place to be lost: the next round begins from the parameters that are there.

        A trainer process that died may have left others than its last answer told: those who sample for them are judged
        by their hash.
        """
        if self.place is not None:
            await self._stand_after(self.place.round)

    def _teaches(self, group: RolloutGroup) -> bool:
        return not checked_here(group.task.name) or score(self._parts.me, group, judged=self._judged).informative

    async def _learn(self, version: int) -> Learned:
        """Give the trainer what others shared and it has not seen yet; note what it made of that."""
        pool = self.rollouts.pool
        drawn = pool.candidates(CANDIDATES * self._settings.batch, self._parts.rng)
        sampled = self.samplers.drawn(self._settings.sampled, version=version)
        try:
            learned = await self._trainer.learn(
                await self._unpacked(drawn),
                await self._unpacked(sampled),
                probation={signed.author for signed in drawn if pool.on_probation(signed.author)},
            )
        except (TrainerHeld, trio.Cancelled):  # as by a pause
            self.samplers.put_back(sampled)
            raise
        except TrainerDied:  # and what it died of is not given to it again
            pool.used(signed.id for signed in drawn)
            raise
        self._is_sampled_for = learned.sampled > 0
        pool.used(signed.id for signed in drawn)
        pool.learned(learned.taken_of)
        self.samplers.settle(sampled, caught=learned.caught, checked=learned.checked)
        for author, reason in learned.caught.items():
            pool.note(author, reason)
            log.warning("%s did not sample with this node's weights (%s): it is heard no more", author, reason)
        if sampled:
            learned = replace(learned, staleness=sum(version - each.packed.version for each in sampled) / len(sampled))
        for author, count in learned.refused_answers.items():
            if count:
                pool.note(author, "strange-answer", count)
        return learned

    async def _broadcast_weights(self, place: Place, words: Words) -> None:
        """Put out the policy of this place, if somebody samples with it."""
        if not self.broadcast.askers():
            return
        try:
            await self.broadcast.publish(words, version=place.round, policy=place.state_hash)
        except ShardError as error:
            self._parts.observer.warn("weights", f"those who sample for this node get no new weights: {error}")
        else:
            self._parts.observer.warn("weights", None)

    async def _stand_after(self, round: int) -> Words:
        """Having done so many rounds, with the parameters that the trainer has: these, as others sample with them."""

        def work() -> tuple[Words, str]:
            words = rounded(self._trainer.parameters())
            return words, hash_of(words)

        words, state_hash = await self._parts.runner(work)
        self._stand(round, state_hash)
        return words


class SapoSampler(_ByRollouts):
    """A node that only samples. `trainer` and `weights` are public, to be looked at."""

    def __init__(self, parts: Context) -> None:
        self.trainer: PeerId | None = None
        super().__init__(parts, limits=replace(parts.rollouts, copies=2), takes=False)  # this node's and the trainer's
        self._weights = WeightsFetch(parts.shards, parts.runner)
        self._shape = parts.policy or self._settings.policy
        self._tasks = tasks_of_run(self._settings)
        self.weights: Weights | None = None  # that the policy has now
        self.answer: Newest | None = None  # the trainer's last
        self._newest: Weights | None = None  # that the trainer named
        self._answered_at = -PATIENCE  # trio time
        self._silent_since = inf  # likewise: when it was first asked since what it did not answer
        self._newer_at = -PATIENCE  # likewise: when it named newer weights …
        self._patience = IDLE_AFTER  # … for which it may take so many seconds
        self._idle_until: dict[PeerId, float] = {}  # trio time, of trainers that are passed over
        self._found: dict[PeerId, Newest] | None = None  # what others said of theirs since the last batch
        self._given = 0
        self._expected = -1  # counter that the trainer said it expects next; -1 where it said nothing since

    def peers(self) -> Sequence[PeerId]:
        """Whom groups are given to, while it is connected."""
        return [peer for peer in self._parts.membership.connected() if peer == self.trainer]

    async def find_place(self, begin: Begin) -> None:
        """There is nothing to stand on: what this node samples with is the trainer's."""
        self._stand(0, "")
        await trio.lowlevel.checkpoint()

    async def run_round(self) -> RoundResult:
        place, began = self._stands(), self._began
        try:
            weights = await self._fit_weights()
            self.phase = "training"
            answered = await self._sample(weights)
            self.phase = "exchanging"
            await self.rollouts.publish(answered.groups, trainer=weights.trainer)
            self.rollouts.counter += len(answered.groups) < self._settings.batch  # past a question that cannot be made
            self._given += len(answered.groups)
            await trio.sleep_until(began + self._settings.pace)
        except TrainerDied as error:
            self.weights = None  # its successor has the parameters, but perhaps not all of them
            raise LostPlace(str(error)) from error
        finally:
            self.phase = "waiting"
        stands = self._stand(place.round + 1, self.weights.policy if self.weights is not None else "")
        tokens = sum(len(answer) for group in answered.groups for answer in group.answers)
        worked = TrainStats(1, len(answered.groups), tokens, nan, answered.seconds)
        ended = place.round, stands.state_hash, nan, worked, self._began - began
        return RoundResult(*ended, members=2, sampled=self._sampled(weights, answered))

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.rollouts.watch)
            nursery.start_soon(self._look)

    # -- weights

    async def _fit_weights(self) -> Weights:
        """Have weights in the policy that are of use, the newest that can be had; waits until there are some."""
        while True:
            if self.trainer is None:
                self._found = await self._others_say()
            if self._found is not None:
                await self._choose_trainer(self._found)
            if self.trainer is None:
                await trio.sleep(LOOK_EVERY)
                continue
            if self.weights is None or trio.current_time() - self._answered_at >= LEAST_BETWEEN:
                await self._ask()
            await self._fetch()
            if self.weights is not None and not self._is_stale(self.weights):
                return self.weights
            await trio.sleep(LOOK_EVERY)

    def _is_stale(self, weights: Weights) -> bool:
        newest, most = self._newest, self._settings.staleness
        return newest is None or weights.trainer != self.trainer or newest.version - weights.version > most

    async def _look(self) -> None:
        """See now and then, beside sampling, whether another trainer needs this node more; let one's own know of it."""
        while True:
            await trio.sleep(LOOK_AGAIN * self._parts.rng.uniform(0.2, 1.0))
            if self.trainer is not None and not self.paused:
                await self._ask()
            if self.trainer is not None:
                self._found = await self._others_say()

    async def _others_say(self) -> dict[PeerId, Newest]:
        """What other members that are here say of their weights."""
        others = [peer for peer in self._parts.membership.connected() if peer != self.trainer]
        query = WeightsQuery(self._parts.run_id)
        said = await self._parts.rpc.call_all(others, WEIGHTS, query, Newest, timeout=TIMEOUT, rest=LOOK_EVERY)
        return dict(said)

    async def _choose_trainer(self, found: dict[PeerId, Newest]) -> None:
        """Take one of these as a trainer; leave the present one only for one that needs this node more."""
        self._found = None
        if self.trainer is not None and self.answer is not None:
            found[self.trainer] = self.answer
            if self._answered_at - self._newer_at > self._patience:
                self._idle_until[self.trainer] = trio.current_time() + IDLE_FOR
        alike = [peer for peer, newest in found.items() if newest.shape == self._shape and not newest.tally.caught]
        busy = [peer for peer in alike if self._idle_until.get(peer, 0.0) <= trio.current_time()]
        self._warn_of(found, alike, busy)
        if self.trainer in found or (self.trainer is None and alike):
            before, fit = self.trainer, busy or [peer for peer in alike if self.trainer in (None, peer)]
            needs = min(fit, key=lambda peer: self._others(peer, found[peer]), default=None)
            self._go_to(needs)
            if before not in (None, needs):
                await self._query(before, samples=False)  # so that it counts this node no more

    def _others(self, peer: PeerId, newest: Newest) -> tuple[int, bool, bytes]:
        """What decides between trainers: how many others sample for it, and then by lot."""
        moves = self.trainer not in (None, peer)
        return max(0, newest.samplers), moves, sha256(f"{self._parts.me} {peer}".encode()).digest()

    def _go_to(self, trainer: PeerId | None) -> None:
        if trainer != self.trainer:
            self.trainer, self._answered_at, self._silent_since = trainer, trio.current_time(), inf
            self._expected, self._given = -1, 0
            self._newer_at, self._patience = self._answered_at, max(IDLE_AFTER, 3 * self._settings.pace)
            self._newest = self.weights = self.answer = None
            self.rollouts.forget_before(MAX_COUNTER)  # what was for the one before

    async def _ask(self) -> None:
        """Have the trainer say what is newest, and what became of this node's groups."""
        asked, asked_at = self.trainer, trio.current_time()
        assert asked is not None
        answer = await self._query(asked, samples=True)
        if self.trainer != asked:  # meanwhile this node went to another
            return
        self._silent_since = min(self._silent_since, asked_at) if answer is None else inf
        if answer is not None:
            if self.answer is not None and answer.tally.accepted > self.answer.tally.accepted:
                self._parts.observer.warn("caught", None)
            waited, self._answered_at, self.answer = self._answered_at - self._newer_at, trio.current_time(), answer
            self._expected = answer.tally.expected if answer.tally.expected <= MAX_COUNTER // 2 else -1
            weights = self._opened(asked, Envelope(answer.payload, answer.signature))
            if weights is not None and (self._newest is None or weights.counter > self._newest.counter):
                self._newest = weights
                self._newer_at, self._patience = self._answered_at, max(self._patience, 3 * waited)
                self._idle_until.pop(asked, None)
                self.rollouts.forget_before(weights.version - self._settings.staleness)
        if answer is not None and answer.tally.caught:
            self._parts.observer.warn(
                "caught",
                f"what this node samples is refused ({answer.tally.caught}): have a look at its memory and disk; the "
                f"trainer {asked} found groups that were not written with the weights that they name",
            )
            self._go_to(None)
        elif trio.current_time() - self._silent_since > PATIENCE:
            log.warning("%s does not answer any more; looking for another trainer", asked)
            self._go_to(None)

    async def _query(self, peer: PeerId, *, samples: bool) -> Newest | None:
        """What a peer says of its weights; None where it does not answer, or trains nothing."""
        query = WeightsQuery(self._parts.run_id, samples)
        return await self._parts.rpc.ask(peer, WEIGHTS, query, Newest, timeout=TIMEOUT)

    def _warn_of(self, found: Mapping[PeerId, Newest], alike: Sequence[PeerId], busy: Sequence[PeerId]) -> None:
        shapes = sorted({newest.shape for newest in found.values()})
        text = None
        if not found:
            text = "no connected member trains a policy: this node waits for one to sample for"
        elif not alike and self._shape not in shapes:
            text = f"no {self._shape} is trained here, only {', '.join(shapes)}: start with --policy {shapes[0]}"
        elif alike and not busy:
            text = f"no newer weights come from {', '.join(alike)}: a trainer may be paused, or have no room for them"
        self._parts.observer.warn("sampling", text)

    def _opened(self, peer: PeerId, envelope: Envelope) -> Weights | None:
        if not envelope.payload:
            return None
        try:
            return open_weights(envelope, run_id=self._parts.run_id, trainer=peer, verify=self._parts.network.verify)
        except NoWeights as error:
            log.warning("%s", error)
            return None

    async def _fetch(self) -> None:
        """Have the newest weights that the trainer named in the policy, unless they are there already."""
        newest = self._newest
        if newest is None:
            return
        if self.weights is not None and self.weights.policy == newest.policy:
            self.weights = newest  # of an update that changed nothing
            return
        if newest.size != 2 * self._trainer.layout.parameters or newest.shape != self._shape:
            log.warning("the weights of %s are not of a policy %s", newest.trainer, self._shape)
            return
        try:
            parameters = await self._weights.fetch(newest)
        except (ShardError, NoWeights) as error:
            log.info("weights of version %d do not come: %s", newest.version, error)
            return
        self.weights = newest
        self._trainer.load(parameters)

    # -- sampling

    async def _sample(self, weights: Weights) -> Answered:
        counter = self.rollouts.counter
        if self._expected > counter or 0 <= self._expected < counter - max(AGAIN, self._settings.batch):
            self.rollouts.counter = counter = self._expected
        self._expected = -1
        run_id, me, version, policy = self._parts.run_id, self._parts.me, weights.version, weights.policy
        asked = [
            assigned_task(run_id, me, each, version=version, policy=policy, tasks=self._tasks)
            for each in range(counter, counter + self._settings.batch)
        ]
        return await self._trainer.answer(asked, version=version, policy=policy)

    def _sampled(self, weights: Weights, answered: Answered) -> Sampled:
        tally = self.answer.tally if self.answer is not None else SamplerTally()
        return Sampled(
            trainer=weights.trainer,
            version=weights.version,
            groups=len(answered.groups),
            reward=answered.reward,
            given=self._given,
            accepted=tally.accepted,
            refused=dict(tally.refused),
        )
