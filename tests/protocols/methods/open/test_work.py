"""What is trained for an open run is counted, and a trainer that is away holds up no round."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from openspec import open_spec, parts_of
from trio.testing import MockClock

from swarmnode.protocols.methods.context import Observer
from swarmnode.protocols.methods.open import local as open_work
from swarmnode.protocols.methods.open.local import LocalTrainer, TracedTrainer
from swarmnode.protocols.methods.trainer import NOTHING, Marked, TrainerDied, TrainStats, Vector
from swarmnode.protocols.runner import Runner, inline
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs import codec
from swarmnode.training.outer import OuterState
from swarmnode.training.verify.replay import check_follows, walk
from swarmnode.training.verify.trace import Origin, Trace

STEPS = 100  # of a round
SIGN3 = open_spec(codec="sign3", steps=STEPS, momentum=0.9)


def work_of(trainer: SimTrainer) -> LocalTrainer:
    work = LocalTrainer(parts_of(open_spec(steps=STEPS), trainer=trainer))
    parameters = trainer.parameters()
    work.base = OuterState(parameters, np.zeros_like(parameters))
    return work


def toy(**more: Any) -> SimTrainer:
    return SimTrainer(ToyModel(seed=0, peer_id="me"), seconds_per_step=1.0, **more)


def test_steps_of_the_call_that_a_round_cut_short_count() -> None:
    async def main() -> None:
        work = work_of(toy())
        for _ in range(2):
            with trio.move_on_after(10.5):
                await work.run(0)
        assert trio.current_time() == pytest.approx(22)  # the step in hand was taken to its end
        assert work.since_offer.steps == work.since_offer.samples // work._trainer.toy.batch == 22  # type: ignore[attr-defined]

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_while_h_grows_a_node_that_waits_trains_no_more() -> None:
    async def main() -> None:
        spec = open_spec(steps=STEPS)
        growing = replace(spec, inner=replace(spec.inner, interval="growing"))
        work = LocalTrainer(parts_of(growing, trainer=toy()))
        for round in (0, 60):  # of 1 and of 3 steps
            work.since_offer = NOTHING
            with trio.move_on_after(20):
                await work.run(round)
            assert work.since_offer.steps == growing.inner.steps_in(round) < 20

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Stuck(SimTrainer):
    """Its step never ends, until the call is cancelled."""

    async def interrupt(self) -> None:
        await trio.lowlevel.checkpoint()


def test_a_step_that_does_not_end_holds_up_no_round() -> None:
    async def main() -> None:
        trainer = Stuck(ToyModel(seed=0, peer_id="me"), seconds_per_step=1e6)
        with trio.move_on_after(5):
            await work_of(trainer).run(0)
        assert trio.current_time() == 5 + open_work.LET_GO

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_training_goes_on_after_several_who_had_the_trainer_at_once() -> None:
    async def main() -> None:
        work = work_of(toy())

        async def hold(after: float, seconds: float) -> None:
            await trio.sleep(after)
            async with work.held():
                await trio.sleep(seconds)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, 0.5, 10)
            nursery.start_soon(hold, 5.5, 1)  # who trains waits for the first by now
            with trio.move_on_after(30):
                await work.run(0)
        assert work.since_offer.steps == 1 + 18

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_the_owner_is_told_while_training_diverges_and_no_longer() -> None:
    warnings: dict[str, str | None] = {}

    class Told(Observer):
        def warn(self, cause: str, text: str | None) -> None:
            warnings[cause] = text

    async def main() -> None:
        trainer = toy()
        work = LocalTrainer(parts_of(open_spec(steps=STEPS), trainer=trainer, observer=Told()))
        work.base = OuterState(trainer.parameters(), np.zeros_like(trainer.parameters()))
        trainer.load(work.start * np.float32(np.nan))
        assert await work.contribute(b"", 0) is None
        assert "learning rate" in (warnings["diverged"] or "")
        assert np.array_equal(trainer.parameters(), work.start)
        trainer.load(work.start + np.float32(1))
        assert await work.contribute(b"", 0) and warnings == {"diverged": None}

    trio.run(main)


class Broken(SimTrainer):
    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
        raise ValueError("it cannot")


def test_what_a_trainer_cannot_do_is_raised_as_it_is() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="it cannot"):
            await work_of(Broken(ToyModel(seed=0, peer_id="me"))).run(0)

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("name, momentum, carried", [("sign3", 0.9, True), ("sign3", 0.0, True), ("topk", 0.0, False)])
def test_what_was_trained_and_not_sent_is_in_the_local_parameters_but_of_topk(
    name: str, momentum: float, carried: bool
) -> None:
    """Three rounds in which nothing is trained after the first: what it left over is sent once, not made again."""

    async def main() -> None:
        trainer = toy()
        work = LocalTrainer(parts_of(open_spec(codec=name, steps=STEPS, momentum=momentum), trainer=trainer))
        size = trainer.layout.parameters
        state = OuterState.start(np.zeros(size, np.float32))
        await work.stand_on(state)
        done = np.linspace(1, 2, size, dtype=np.float32)
        trainer.load(state.parameters - done)
        sent = np.zeros(size, np.float32)
        for round in range(3):
            raw = await work.contribute(bytes([round]) * 32, round)
            assert raw is not None
            sent += codec(name).decode(raw, size)
            work.offered(b"root")
            await work.settle(accepted=True)
            state = OuterState.start(-sent)  # as a roster of this one contribution moves it
            left = work.feedback.export()
            await work.move(state, 0)
            assert np.array_equal(trainer.parameters(), state.parameters - left if carried else state.parameters)
        if name == "sign3":
            assert (sent > 0).all() and np.allclose(sent + left, done, atol=0.2)  # residuals fade

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("offers", [True, False])
def test_a_round_that_passes_work_over_leaves_all_of_it_in_the_local_parameters(offers: bool) -> None:
    async def main() -> None:
        trainer = toy()
        work = LocalTrainer(parts_of(SIGN3, trainer=trainer))
        size = trainer.layout.parameters
        await work.stand_on(OuterState.start(np.zeros(size, np.float32)))
        work.feedback.give_back(np.full(size, 0.5, np.float32), 1e9)
        await work.stand_on(OuterState.start(np.zeros(size, np.float32)))
        assert np.allclose(trainer.parameters(), -0.5)
        trainer.load(trainer.parameters() - np.float32(0.25))
        if offers:
            await work.contribute(b"parent", 0)
        work.take_back()
        await work.move(OuterState.start(np.ones(size, np.float32)), 0)
        assert np.allclose(trainer.parameters(), 1 - 0.5 - 0.25)
        await work.leave()
        assert np.allclose(trainer.parameters(), 1)
        assert np.allclose(work.feedback.export(), 0.5)  # of 0.75: at most the norm of either
        again = await work.contribute(b"later", 0)
        assert again is not None and np.allclose(codec("sign3").decode(again, size)[:11], 0.95 * 0.5)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_refused_work_comes_back_without_what_was_left_over_before_it() -> None:
    async def main() -> None:
        trainer = toy()
        work = LocalTrainer(parts_of(SIGN3, trainer=trainer))
        size = trainer.layout.parameters
        zero = OuterState.start(np.zeros(size, np.float32))
        work.feedback.give_back(np.full(size, 0.25, np.float32), 1e9)
        await work.stand_on(zero)
        trainer.load(trainer.parameters() - np.float32(1))
        await work.contribute(b"parent", 0)
        await work.settle(accepted=False)
        assert np.allclose(work.feedback.export(), 1)  # of 1 and the faded quarter: at most one norm of the work
        await work.move(zero, 0)
        assert np.allclose(trainer.parameters(), -1)

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("offers, call", [*((True, call) for call in range(6)), (False, 0), (False, 1)])
def test_no_work_is_lost_where_a_call_is_cancelled_as_it_gives_work_to_a_thread(offers: bool, call: int) -> None:
    async def main() -> None:
        trainer, scope, left = toy(), trio.CancelScope(), -1

        async def threaded(work: Callable[[], Any]) -> Any:
            nonlocal left
            if not left:
                scope.cancel()
            left -= 1
            await trio.lowlevel.checkpoint()
            return work()

        work = LocalTrainer(parts_of(SIGN3, trainer=trainer, runner=threaded))
        size = trainer.layout.parameters
        await work.stand_on(OuterState.start(np.zeros(size, np.float32)))
        done = np.linspace(1, 2, size, dtype=np.float32)
        trainer.load(-done)
        left = call
        with scope:
            if offers:
                await work.contribute(b"parent", 0)
                await work.settle(accepted=False)
            await work.stand_on(OuterState.start(np.ones(size, np.float32)))
        assert scope.cancel_called
        await work.leave()
        assert work.base is not None and np.array_equal(trainer.parameters(), work.base.parameters)
        assert np.allclose(work.feedback.export(), done)

    trio.run(main)


class Away(SimTrainer):
    """Died, and is back in a minute."""

    async def evaluate(self, *, thorough: bool, wait: bool = True) -> float:
        if not wait:
            raise TrainerDied("it is being started again")
        await trio.sleep(60)
        return await super().evaluate(thorough=thorough)


def test_a_move_waits_for_no_trainer_that_is_being_started_again() -> None:
    async def main() -> None:
        trainer = Away(ToyModel(seed=0, peer_id="me"))
        work = work_of(trainer)
        moved = OuterState(trainer.parameters() + 1, np.zeros_like(trainer.parameters()))
        assert math.isnan(await work.move(moved, 0))
        assert trio.current_time() == 0
        assert work.base is moved
        assert np.array_equal(trainer.parameters(), moved.parameters)

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Recorded:
    """Traced work on the toy, on the states after three rosters, that is looked at as auditors do."""

    def __init__(self, trainer: SimTrainer, runner: Runner) -> None:
        trainer.record(3)
        self.work = TracedTrainer(parts_of(open_spec(steps=STEPS), trainer=trainer, runner=runner))
        size = trainer.layout.parameters
        self.rosters = [bytes([letter]) * 32 for letter in b"abc"]
        self.states = {one: OuterState.start(np.full(size, at, np.float32)) for at, one in enumerate(self.rosters)}

    async def begin(self) -> None:
        await self.work.stand_on(self.states[self.rosters[0]])
        self.work.stand(self.rosters[0])

    async def move(self, round: int) -> None:
        before, after = self.rosters[round : round + 2]
        await self.work.move(self.states[after], round)
        self.work.stand(after, after=before)

    async def check(self) -> Trace:
        """The record behind the offer, whose steps lead to what was offered."""
        trace = Trace.decode(bytes(await self.work.show(self.work.trace) or b""))
        ends = {leg.stretches[-1].end.parameters for leg in trace.legs if leg.stretches}
        found = {id: await self._vector(id) for id in ends}
        shared = {one: state.parameters for one, state in self.states.items()}
        offered = walk(trace, await self._vector(trace.start), ends=found, states=shared)
        assert self.work.offer is not None and np.array_equal(offered, self.work.offer.local)
        return trace

    async def _vector(self, id: bytes) -> Vector:
        shown = await self.work.show(id)
        assert shown is not None
        return np.frombuffer(shown, np.float32)


def test_a_record_ends_where_the_offer_does_whoever_has_the_trainer_while_that_is_encoded() -> None:
    """Otherwise the next steps are in it, and auditors call an honest author a liar."""

    async def slow(work: Callable[[], Any]) -> Any:
        await trio.sleep(3.0)
        return work()

    async def main() -> None:
        recorded = Recorded(toy(), slow)
        work = recorded.work

        async def look_again_and_again() -> None:
            while True:
                await trio.sleep(1.0)
                async with work.held():
                    pass

        await recorded.begin()
        for round in range(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look_again_and_again)
                nursery.start_soon(work.run, round)
                await trio.sleep(20)
                assert await work.contribute(recorded.rosters[round], round)
                assert (await recorded.check()).steps > 10
                await work.settle(True)
                await recorded.move(round)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_work_that_comes_back_after_the_trainer_lost_its_states_is_not_shown_as_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise steps are missing in the record, and auditors call an honest author a liar."""

    def full(vector: Vector) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def train(work: TracedTrainer, steps: int) -> None:
        with trio.move_on_after(steps + 0.5):
            await work.run(0)

    async def main() -> None:
        trainer = toy()
        recorded = Recorded(trainer, inline)
        work = recorded.work
        await recorded.begin()
        await train(work, 10)
        assert await work.contribute(recorded.rosters[0], 0)
        assert (await recorded.check()).origin is Origin.FRESH
        with monkeypatch.context() as disk:
            disk.setattr(trainer._recorder, "_vectors", SimpleNamespace(put=full, touch=lambda id: True))
            await train(work, 10)
            async with work.held():  # who judges, for example
                pass
        work.take_back()  # as the round ended empty
        assert await work.contribute(recorded.rosters[0], 0)
        lost = Trace.decode(bytes(await work.show(work.trace) or b""))
        assert lost.origin is Origin.UNLINKED and not lost.steps
        await work.settle(True)
        await recorded.move(0)
        await train(work, 10)
        assert await work.contribute(recorded.rosters[1], 1)
        again = await recorded.check()
        assert again.origin is Origin.AFTER and again.steps
        check_follows(again, lost, parent=recorded.rosters[0])

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("seconds", [5.0, 50.0])
def test_no_steps_are_missing_in_a_record_when_a_round_ends_while_the_trainer_tells_them(seconds: float) -> None:
    """Who had all steps of a round too late for it is asked for them as the round ends, and offers them in the next.

    A trainer may still measure for a judge that was cancelled, and tell them after that.
    """

    class SlowToTell(SimTrainer):
        async def mark(self) -> Marked:
            told = await super().mark()
            await trio.sleep(seconds)
            return told

    async def main() -> None:
        recorded = Recorded(SlowToTell(ToyModel(seed=0, peer_id="me"), seconds_per_step=1.0), inline)
        work = recorded.work
        await recorded.begin()
        with trio.move_on_after(STEPS + 2.5):  # when all are done, and the trainer tells them
            await work.run(0)
        done = work.since_offer.steps
        await recorded.move(0)
        assert await work.contribute(recorded.rosters[1], 1)
        assert (await recorded.check()).steps == done == STEPS

    trio.run(main, clock=MockClock(autojump_threshold=0))
