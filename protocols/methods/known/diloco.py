"""The exchange method `diloco`: known peers train apart and take the mean of how far they moved (arXiv 2311.08105).

    diloco_place.py   finding a place among the members, and noticing that others have a better history
    diloco_round.py   train, agree, reduce, step
    agreement.py      one result per round, though any member may die or freeze at any moment
    allreduce.py      the mean of all pseudo-gradients, bit-identical on all members

What it promises: members that end a round with one hash hold the same bits; while a majority of the last roster is
connected all go through the same states; a member that falls behind or onto a side branch finds back. What it does not:
everybody's work is believed, so a member that lies can spoil the model.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

import trio

from swarmnode.protocols.methods.known.agreement import Agreement, AgreementSettings, Behind, LeftOut
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.place import DilocoPlace
from swarmnode.protocols.methods.known.reduction import Reducer
from swarmnode.protocols.methods.known.round import DilocoRounds, DilocoSettings
from swarmnode.protocols.methods.method import Begin, LostPlace, Method, Overtaken, Parts, Place, RoundResult, Saved
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.transfer.catchup import CatchUp, CatchUpFailed
from swarmnode.training.codecs import codec

FIRST_WINDOW = 10.0  # times the deadlines' ceiling: the first round's training, before anything was measured


def build(parts: Parts) -> Diloco:
    """The method of one node, from the run's `[exchange]`, `[inner]` and `[outer]`."""
    return Diloco(parts)


class Diloco(Method):
    """Its parts are public, for tests that look at what DiLoCo alone promises."""

    name = "diloco"

    def __init__(self, parts: Parts) -> None:
        spec, exchange = parts.spec, parts.spec.exchange
        self._trainer = parts.trainer
        self.agreement = Agreement(
            me=parts.me,
            run_id=parts.run_id,
            rpc=parts.rpc,
            liveness=parts.liveness,
            settings=AgreementSettings(
                weight_cap=exchange.weight_cap,
                floor=exchange.deadline_floor,
                ceiling=exchange.deadline_ceiling,
            ),
            admits=parts.admits,
            relayed=parts.relayed,
        )
        self.allreduce = self._reducer(parts)
        self.rounds = DilocoRounds(
            me=parts.me,
            settings=DilocoSettings(
                steps=spec.inner.steps,
                outer_lr=spec.outer.lr,
                outer_momentum=spec.outer.momentum,
                first_window=FIRST_WINDOW * exchange.deadline_ceiling,
            ),
            trainer=parts.trainer,
            agreement=self.agreement,
            allreduce=self.allreduce,
            catch_up=CatchUp(
                run_id=parts.run_id,
                rpc=parts.rpc,
                bulk=parts.bulk,
                liveness=parts.liveness,
                runner=parts.runner,
                layout=parts.trainer.layout,
            ),
            runner=parts.runner,
        )
        self.places = DilocoPlace(
            run_id=parts.run_id,
            network=parts.network,
            membership=parts.membership,
            trainer=parts.trainer,
            agreement=self.agreement,
            rounds=self.rounds,
            observer=parts.observer,
            rng=parts.rng,
        )
        self._better: Behind | None = None  # another history that this node should follow instead of its own
        self._round = trio.CancelScope()  # of the round in hand

    def _reducer(self, parts: Parts) -> Reducer:
        """What brings the members' work to one vector; other methods have another."""
        exchange = parts.spec.exchange
        return AllReduce(
            me=parts.me,
            run_id=parts.run_id,
            bulk=parts.bulk,
            liveness=parts.liveness,
            runner=parts.runner,
            codec=codec(exchange.codec),
            parameters=parts.trainer.layout.parameters,
            patience=exchange.deadline_ceiling,
            group_size=exchange.group_size,
        )

    @property
    def phase(self) -> str:
        return self.places.phase or self.rounds.phase

    @property
    def place(self) -> Place | None:
        if not self.rounds.stands:
            return None
        head = self.agreement.head()
        return Place(head.round, head.state_hash, head.voters, head.joiners, head.elapsed)

    @property
    def paused(self) -> bool:
        return self.agreement.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self.agreement.paused = paused

    async def find_place(self, begin: Begin) -> None:
        if begin.saved is not None:
            self.allreduce.sent.restore(begin.saved.residual)
        await self.places.find(begin)

    async def run_round(self) -> RoundResult:
        if self._better is None:
            with trio.CancelScope() as self._round:
                try:
                    return await self.rounds.run_round()
                except Behind as error:
                    self._better = error
                except (CatchUpFailed, LeftOut) as error:
                    raise LostPlace(str(error)) from error
        raise Overtaken(str(self._better))

    async def regain_place(self) -> None:
        better, self._better = self._better, None
        await self.places.regain(better)
        self._better = None

    async def watch(self) -> None:
        while True:
            self._better = await self.places.find_better()
            if self.phase == "training":
                self._round.cancel()

    async def leave(self) -> None:
        if self.rounds.stands:
            await self.agreement.say_goodbye()
            await self.rounds.return_local_work()

    def lent(self) -> AbstractAsyncContextManager[Trainer]:
        return nullcontext(self._trainer)

    def saved(self) -> Saved:
        here = self.agreement.position
        return Saved(here.round, self.rounds.state, self.allreduce.sent.export(), here.voters, method=self.name)
