"""Puts a lie into an honest node: the exchange method is the product's own, with one of its parts replaced.

A liar does all else as honest nodes do: it trains, judges, leads and keeps the state. `methods_with` gives the builders
of exchange methods for such a node, `trainer_with` the trainer where the lie is told there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.cli.local.attack import LIES, THROWAWAY
from swarmnode.node.exitcodes import USAGE, ExpectedError
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.chain.statements import MAX_GAIN, MISSING, PREFIX, Score
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.method import Build, Method
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.open.round import RoundContext
from swarmnode.protocols.methods.open.store import id_of
from swarmnode.protocols.network import PeerId
from swarmnode.testing.adversary.lies import ANSWER_LIES, OFFER_LIES, AnswerLie, Lie, Seen
from swarmnode.training.rl.groups import RolloutGroup

NOT_A_NUMBER = b"\xff\xff\xff\xff"  # as float32, and twice as float16 or bfloat16: all codecs begin with one of these


class Refused(ExpectedError):
    """An adversary that would leave its local swarm, or has nothing to do in it."""

    exit_code = USAGE


def methods_with(name: str, methods: dict[str, Build]) -> dict[str, Build]:
    """The builders of exchange methods, each with the lie `name` in what it builds. Building raises Refused."""

    def lying(honest: Build) -> Build:
        def build(parts: Context) -> Method:
            run = parts.spec.run.name
            if not re.fullmatch(THROWAWAY, run):
                raise Refused(f"the run {run!r} was not made to be attacked; adversaries take part in no other")
            if parts.spec.exchange.method not in LIES[name].methods:
                raise Refused(f"{name} has no meaning in a run with [exchange] method = {parts.spec.exchange.method!r}")
            method = honest(parts)
            if isinstance(method, Open):
                lie_in_open(method, name, me=parts.me)
            elif isinstance(method, Diloco) and name in OFFER_LIES:
                lie_in_diloco(method, OFFER_LIES[name])
            return method

        return build

    return {method: lying(build) for method, build in methods.items()}


def lie_in_open(method: Open, name: str, *, me: PeerId) -> None:
    """Replace what an open round's author says, or its judge. `me` is the liar."""
    if name in OFFER_LIES:
        _offer_in_open(method, OFFER_LIES[name])
    if name == "nan":
        _offer_nan(method)
    if name == "copy":
        _copy(method, me)
    if name == "withhold":
        _withhold(method)
    if name == "slander":
        _slander(method)


def _offer_in_open(method: Open, lie: Lie) -> None:
    work, rng = method.local, np.random.default_rng()
    feedback, elements = work.feedback, work.feedback.size
    contribute, move = work.contribute, work.move
    moved: list[np.ndarray] = []

    async def lying_contribute(parent: bytes, round: int) -> bytes | None:
        raw = await contribute(parent, round)
        if raw is None:
            return None
        own = feedback.codec.decode(raw, elements)
        told = lie(Seen(own, moved[-1] if moved else None, rng))
        return bytes(feedback.codec.encode(np.nan_to_num(told)))

    async def noting_move(state: Any) -> float:
        if work.base is not None:
            moved[:] = [work.base.parameters - state.parameters]
        return await move(state)

    work.contribute, work.move = lying_contribute, noting_move  # type: ignore[method-assign]


def _offer_nan(method: Open) -> None:
    contributions, contribute = method.contributions, method.local.contribute

    async def lying_contribute(parent: bytes, round: int) -> bytes | None:
        raw = await contribute(parent, round)
        return None if raw is None else NOT_A_NUMBER + raw[len(NOT_A_NUMBER) :]

    async def keep(raw: bytes, round: int) -> bytes:
        """As honest nodes keep what they made, which cannot be measured here."""
        id = id_of(raw)
        contributions._malformed[id] = None
        contributions._bulk.offer(contributions._key(id), raw)
        return id

    method.local.contribute = lying_contribute  # type: ignore[method-assign]
    contributions.keep = keep  # type: ignore[method-assign]


def _copy(method: Open, me: PeerId) -> None:
    """Wait for what somebody reveals; commit to the same bytes then."""
    duties, contributions, contribute = method.rounds, method.contributions, method.local.contribute
    commit = duties.commit
    copied: list[bytes] = []

    async def late_commit(context: RoundContext) -> None:
        roots = [said.what.root for said in context.log.reveals.values() if said.author != me]
        here = [root for root in roots if root in contributions]
        if here:  # until then this is asked for again whenever something is heard
            copied[:] = [contributions[here[0]].raw]
            await commit(context)

    async def copying_contribute(parent: bytes, round: int) -> bytes | None:
        return copied[0] if await contribute(parent, round) is not None else None

    duties.commit = late_commit  # type: ignore[method-assign]
    method.local.contribute = copying_contribute  # type: ignore[method-assign]


def _withhold(method: Open) -> None:
    async def reveal(context: RoundContext) -> None:
        context.own.revealed = True

    method.rounds.reveal = reveal  # type: ignore[method-assign]


def _slander(method: Open) -> None:
    seal = method.rounds.seal

    async def lying_seal(context: RoundContext, scores: tuple[Score, ...]) -> None:
        mine = context.own.commit.id[:PREFIX] if context.own.commit is not None else b""
        await seal(context, tuple(_told(score, mine) for score in scores))

    method.rounds.seal = lying_seal  # type: ignore[method-assign]


def _told(score: Score, mine: bytes) -> Score:
    return replace(score, gain=MAX_GAIN) if score.commit == mine else replace(score, found=MISSING, gain=0)


def lie_in_diloco(method: Diloco, lie: Lie) -> None:
    """Give the all-reduce something else than what was trained."""
    allreduce, rounds, rng = method.allreduce, method.rounds, np.random.default_rng()
    reduce = allreduce.reduce
    stood: list[np.ndarray] = []  # the parameters of the rounds' starts, the last two

    async def lying_reduce(roster: Any, values: Any, **how: Any) -> Any:
        now = rounds.state.parameters
        if not stood or stood[-1] is not now:
            stood[:] = [*stood[-1:], now]
        moved = stood[0] - stood[1] if len(stood) == 2 else None
        return await reduce(roster, np.nan_to_num(lie(Seen(values, moved, rng))), **how)

    allreduce.reduce = lying_reduce  # type: ignore[method-assign]


def trainer_with(name: str, make: Callable[..., TrainerProcess]) -> Callable[..., TrainerProcess]:
    """`assembly.make_trainer`, for a liar whose lie is told by its trainer."""

    def make_lying(chosen: Any, config: Any, **more: Any) -> TrainerProcess:
        if name == "label-flip":
            path = Path(__file__).with_name("mislabelled.py")
            return make(chosen, replace(config, task=f"{path}:MislabelledByteLM"), **more)
        trainer = make(chosen, config, **more)
        if name in ANSWER_LIES:
            _lie_in_answers(trainer, ANSWER_LIES[name])
        return trainer

    return make_lying


def _lie_in_answers(trainer: TrainerProcess, lie: AnswerLie) -> None:
    answer, rng = trainer.rollouts, np.random.default_rng()

    async def lying_rollouts(**asked: Any) -> tuple[list[RolloutGroup], float]:
        groups, seconds = await answer(**asked)
        return [lie(group, rng) for group in groups], seconds

    trainer.rollouts = lying_rollouts  # type: ignore[method-assign]
