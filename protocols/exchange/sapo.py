"""The exchange method `sapo`: policies of any size learn from one another's rollouts (Swarm sAmpling Policy
Optimization, arXiv 2509.08721).

    ask       fresh questions, and answers to each by the policy as it is
    share     the answers, with whoever is connected; what others shared meanwhile is in the pool
    learn     when the round's time is over: one update from own groups and from others', scored here

Every node has a policy of its own and rounds of its own: `state_hash` is that policy's, and nobody agrees on anything.
So nothing is waited for. Who is alone learns from its own answers and goes on learning from others' when they are back;
whoever dies, freezes or lies costs nobody a round. A trainer that dies costs the round in hand.
"""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import trio

from swarmnode.protocols.exchange.method import Begin, LostPlace, Parts, Place, RoundResult, Saved
from swarmnode.protocols.exchange.outcomes import Completed
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.rollouts import Rollouts, SignedGroup
from swarmnode.protocols.rollouts.checks import informative
from swarmnode.protocols.trainer import Learned, RolloutTrainer, TrainerDied, Vector, Worked
from swarmnode.training.outer import OuterState
from swarmnode.training.rl.groups import score

CANDIDATES = 8  # others' groups that a trainer is given, as a multiple of what it takes: many teach nothing


def build(parts: Parts) -> Sapo:
    """The method of one node. Raises TypeError where its trainer trains no policy."""
    return Sapo(parts)


class Sapo:
    """Implements `Method`. `rollouts` is public, to be looked at."""

    name = "sapo"

    def __init__(self, parts: Parts) -> None:
        if not isinstance(parts.trainer, RolloutTrainer):
            raise TypeError(f"{type(parts.trainer).__name__} trains no policy")
        self._me, self._runner = parts.me, parts.runner
        self._trainer: RolloutTrainer = parts.trainer
        self._pace = parts.spec.rollouts.pace
        self._wanted = CANDIDATES * parts.spec.rollouts.batch
        self._rng = parts.rng
        self.rollouts = Rollouts(
            me=parts.me,
            run_id=parts.run_id,
            rpc=parts.rpc,
            bulk=parts.bulk,
            peers=parts.membership.connected,
            sign=parts.sign,
            verify=parts.network.verify,
            runner=parts.runner,
            now=parts.now,
            rng=parts.rng,
            admits=parts.admits,
            check=partial(_check, parts.spec.rollouts.difficulty),
        )
        self.paused = False
        self.phase = "waiting"
        self._place: Place | None = None
        self._began = trio.current_time()

    def measure(self, metrics: Metrics) -> None:
        self.rollouts.measure(metrics)

    @property
    def place(self) -> Place | None:
        return self._place

    async def find_place(self, begin: Begin) -> None:
        """From the newest checkpoint, or from the beginning: a policy is nobody else's."""
        if begin.saved is not None:
            self._trainer.load(begin.saved.state.parameters)
        await self._stand(begin.saved.round if begin.saved is not None else 0)

    async def run_round(self) -> RoundResult:
        place, began = self._stands(), self._began
        self.phase = "training"
        try:
            groups, sampling = await self._trainer.rollouts(version=place.round)
            await self.rollouts.publish([group for group in groups if score(self._me, group).informative])
            self.phase = "exchanging"
            await trio.sleep_until(began + self._pace)
            learned = await self._learn()
        except TrainerDied as error:
            raise LostPlace(f"the trainer died and is restarted: {error}") from error
        finally:
            self.phase = "waiting"
        stands = await self._stand(place.round + 1)
        return RoundResult(
            round=place.round,
            outcome=Completed(1 + learned.authors),
            state_hash=stands.state_hash,
            loss=float("nan"),
            worked=_worked(learned, sampling),
            seconds=self._began - began,
            members=1 + learned.authors,
            counted=(self._me,),
            learned=learned,
        )

    async def regain_place(self) -> None:
        """There is no place to be lost: the next round begins from the parameters that are there."""

    async def watch(self) -> None:
        await self.rollouts.watch()

    async def leave(self) -> None:
        """Nobody waits for this node, and no work is in hand that it could lose."""

    def saved(self) -> Saved:
        place = self._stands()
        parameters = self._trainer.parameters()
        return Saved(
            round=place.round,
            state=OuterState.start(parameters),
            residual=np.zeros(parameters.size, np.float32),
            members=(self._me,),
            method=self.name,
        )

    async def _learn(self) -> Learned:
        """Give the trainer what others shared and it has not seen yet; note what it made of that."""
        pool = self.rollouts.pool
        drawn = pool.candidates(self._wanted, self._rng)
        learned = await self._trainer.learn([(signed.author, signed.group) for signed in drawn])
        pool.used(signed.id for signed in drawn)
        for author, count in learned.refused_answers.items():
            if count:
                pool.note(author, "strange-answer", count)
        return learned

    async def _stand(self, round: int) -> Place:
        """Having done so many rounds, with the parameters that the trainer has."""
        parameters = self._trainer.parameters()
        state_hash = await self._runner(lambda: _hash(parameters))
        self._began = trio.current_time()
        self._place = Place(round, state_hash, members=(self._me,))
        return self._place

    def _stands(self) -> Place:
        if self._place is None:
            raise RuntimeError("this node has no place yet")
        return self._place


def _check(difficulty: int, signed: SignedGroup) -> str:
    """Why a group would teach nothing, before it is kept or passed on; "" where it may."""
    return informative(signed) if signed.group.task.difficulty == difficulty else "other-difficulty"


def _hash(parameters: Vector) -> str:
    """sha-256 of a policy's parameters (P,) in hex, little-endian."""
    return hashlib.sha256(parameters.astype("<f4").tobytes()).hexdigest()


def _worked(learned: Learned, sampling: float) -> Worked:
    return Worked(
        steps=1,
        samples=learned.own + learned.taken,
        tokens=learned.tokens,
        loss=float("nan"),
        seconds=sampling + learned.seconds,
    )
