"""Nodes that are honest but for one lie: a method of a part does something else than in an honest node.

A liar does all else as honest nodes do: it trains, judges, leads and keeps the state. `methods_with` gives the builders
of exchange methods for such a node, `trainer_with` what makes its trainer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from swarmnode.cli.local.attack import LIES, OF_TRAINERS
from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.chain.statements import MAX_GAIN, MISSING, PREFIX, Score
from swarmnode.protocols.methods.btard.method import Btard
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.method import Build, Method
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.open.round import OpenRounds, RoundContext, Signer
from swarmnode.protocols.methods.open.store import Contributions, id_of
from swarmnode.protocols.methods.open.sync import ChainSync
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.testing.adversary.lies import ANSWER_LIES, OFFER_LIES, AnswerLie, Lie, Seen, sign_flip
from swarmnode.training.codecs.base import CodecError
from swarmnode.training.open_step import Raw
from swarmnode.training.outer import Vector
from swarmnode.training.rl.groups import RolloutGroup

THROWAWAY = r"[a-z0-9._-]*-attacked-[0-9a-f]{8}"  # names of runs that are made for one local swarm
LIES_FROM = int(os.environ.get("LIES_FROM_ROUND", "0"))  # what liars offer before that round is honest
NOT_A_NUMBER = b"\xff\xff\xff\xff"  # as float32, and twice as float16 or bfloat16: all codecs begin with one of these


def methods_with(name: str, methods: dict[str, Build]) -> dict[str, Build]:
    """The builders of exchange methods, each with the lie `name` in what it builds. Building raises UsageMistake."""

    def lying(honest: Build) -> Build:
        def build(parts: Context) -> Method:
            run, method = parts.spec.run.name, parts.spec.exchange.method
            if not re.fullmatch(THROWAWAY, run):
                raise UsageMistake(f"the run {run!r} was not made to be attacked; adversaries take part in no other")
            if method not in LIES[name].methods:
                raise UsageMistake(f"{name} has no meaning in a run with [exchange] method = {method!r}")
            if name in ANSWER_LIES:
                return honest(replace(parts, trainer=cast(Trainer, LyingTrainer(parts.trainer, ANSWER_LIES[name]))))
            if method == "open":
                return lying_open(name)(parts)
            if name in OFFER_LIES:
                return lying_diloco(Btard if method == "btard" else Diloco, OFFER_LIES[name])(parts)
            return honest(parts)

        return build

    return {method: lying(build) for method, build in methods.items()}


def trainer_with(name: str, honest: Callable[..., TrainerProcess]) -> Callable[..., TrainerProcess]:
    """What makes the trainer of a node, with the task that tells the lie `name`, if it is a trainer's."""

    def make(*chosen: Any, **whose: Any) -> TrainerProcess:
        made = honest(*chosen, **whose)
        made._settings = replace(made._settings, task=task_with(name))
        return made

    return make if name in OF_TRAINERS else honest


def task_with(name: str) -> str:
    return f"{Path(__file__).with_name('tasks.py')}:{OF_TRAINERS[name]}"


# --- in open runs -----------------------------------------------------------------------------------------------------


class LyingRounds(OpenRounds):
    """Rounds of an author or judge who lies. This one does not."""

    def __init__(self, parts: Context, sync: ChainSync, local: LocalTrainer, signer: Signer) -> None:
        super().__init__(parts, sync, local, signer)
        self.me, self.store, self.feedback = parts.me, sync.store, local.feedback
        self.rng = np.random.default_rng()


class OtherWork(LyingRounds):
    """Offers what a lie makes of its own work; the record that it shows is that of its own work."""

    first: Vector | None = None  # that it offered

    @staticmethod
    def lie(seen: Seen) -> Vector:
        raise NotImplementedError

    async def contribution(self, context: RoundContext) -> bytes | None:
        raw = await super().contribution(context)
        if raw is None:
            return None
        own = self._decoded(raw)
        self.first = own if self.first is None else self.first
        if context.chain.round < LIES_FROM:
            return raw
        told = self.lie(Seen(own, self._moved(context), self.rng, self.first, self._of_another(context)))
        return bytes(self.feedback.codec.encode(np.nan_to_num(told)))

    def _decoded(self, raw: Raw) -> Vector:
        return self.feedback.codec.decode(raw, self.feedback.size)

    def _of_another(self, context: RoundContext) -> Vector | None:
        log = self.store.logs.get(self.store.tree[context.chain.tip].parent)
        roots = sorted(said.what.root for said in log.reveals.values() if said.author != self.me) if log else []
        here = [root for root in roots if root in self.store.contributions]
        return self._decoded(self.store.contributions[here[0]].raw) if here else None

    def _moved(self, context: RoundContext) -> Vector | None:
        block = self.store.tree[context.chain.tip]
        now, before = self.store.state(block.id), self.store.state(block.parent)
        return None if now is None or before is None else before.parameters - now.parameters


class Slander(OtherWork):
    """As a judge, praises its own work and calls that of others missing."""

    lie = staticmethod(sign_flip)

    async def seal(self, context: RoundContext, scores: tuple[Score, ...]) -> None:
        mine = context.own.commit.id[:PREFIX] if context.own.commit is not None else b""
        await super().seal(
            context,
            tuple(
                replace(score, gain=MAX_GAIN) if score.commit == mine else replace(score, found=MISSING, gain=0)
                for score in scores
            ),
        )


class NotNumbers(LyingRounds):
    async def contribution(self, context: RoundContext) -> bytes | None:
        raw = await super().contribution(context)
        return None if raw is None else NOT_A_NUMBER + raw[len(NOT_A_NUMBER) :]


class Unmeasured(Contributions):
    """Serves what no encoder makes as well, though it cannot measure that itself."""

    async def keep(self, raw: Raw, round: int) -> bytes:
        try:
            return await super().keep(raw, round)
        except CodecError:
            id = id_of(raw)
            self._malformed[id] = None
            self.offer(id, raw)
            return id


class Copy(LyingRounds):
    """Waits for what somebody reveals, and commits to the same bytes then."""

    copied = b""

    async def commit(self, context: RoundContext) -> None:
        roots = [reveal.what.root for reveal in context.log.reveals.values() if reveal.author != self.me]
        here = [root for root in roots if root in self.store.contributions]
        if here:  # until then this is asked for again whenever something is heard
            self.copied = bytes(self.store.contributions[here[0]].raw)
            await super().commit(context)

    async def contribution(self, context: RoundContext) -> bytes | None:
        return None if await super().contribution(context) is None else self.copied


class Withhold(LyingRounds):
    async def reveal(self, context: RoundContext) -> None:
        context.own.revealed = True


OPEN_LIARS: dict[str, type[OpenRounds]] = {
    "nan": NotNumbers,
    "copy": Copy,
    "withhold": Withhold,
    **{name: type(name, (OtherWork,), {"lie": staticmethod(lie)}) for name, lie in OFFER_LIES.items()},
    "slander": Slander,  # it offers a lie, and judges by one
}


def lying_open(name: str) -> type[Open]:
    """The open exchange of a node that tells this lie; of an honest one where its trainer tells it."""

    class LyingOpen(Open):
        rounds_class = OPEN_LIARS.get(name, OpenRounds)
        contributions_class = Unmeasured if name == "nan" else Contributions

    return LyingOpen


# --- among known peers, and in answers --------------------------------------------------------------------------------


class Disguised:
    """An honest part of a node, but for what a subclass does otherwise."""

    def __init__(self, honest: Any) -> None:
        self.honest = honest
        self.rng = np.random.default_rng()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)


class LyingReducer(Disguised):
    """Gives the all-reduce something else than what was trained."""

    def __init__(self, honest: Any, lie: Lie) -> None:
        super().__init__(honest)
        self.lie = lie
        self.moved: Vector | None = None  # by the last round

    async def reduce(self, roster: Any, values: Vector, **how: Any) -> Vector:
        told = self.lie(Seen(values, self.moved, self.rng))
        mean: Vector = await self.honest.reduce(roster, np.nan_to_num(told), **how)
        self.moved = mean.copy()
        return mean


def lying_diloco(honest: type[Diloco], lie: Lie) -> type[Diloco]:
    """A method that reduces, of a node that tells this lie."""

    class LyingDiloco(honest):  # type: ignore[valid-type, misc]
        reducer_class = staticmethod(lambda parts: LyingReducer(honest.reducer_class(parts), lie))

    return LyingDiloco


class LyingTrainer(Disguised):
    """Shares other answers than it wrote."""

    def __init__(self, honest: Trainer, lie: AnswerLie) -> None:
        super().__init__(honest)
        self.lie = lie

    async def rollouts(self, **asked: Any) -> tuple[list[RolloutGroup], float]:
        groups, seconds = await self.honest.rollouts(**asked)
        return [self.lie(group, self.rng) for group in groups], seconds
