"""A disk that gives nothing for a while ends nobody who follows the state: it is read once it can be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from swarmnode.crdt.record import Element
from swarmnode.node.succession import KEY as SUCCESSION
from swarmnode.node.succession import LOOK_EVERY, SuccessorWatch
from swarmnode.protocols.methods.known.population import KEY as TRIAL
from swarmnode.protocols.methods.known.population import Population
from swarmnode.protocols.methods.seed import Seed
from swarmnode.protocols.methods.steering import KEY as STEERING
from swarmnode.protocols.methods.steering import SteeringWatch
from swarmnode.protocols.state.backend import WAITING, Unwritable
from swarmnode.testing.memorystate import MemoryState, clocks_of
from swarmnode.testing.simnet import run_with_nursery
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sections import RunSection

ME = "12D3KooW" + "A" * 44
SPEC = RunSpec(RunSection(name="run", owner=ME)).resolved(heldout_sha256="ab" * 32, index="cd" * 32)


class FailingState(MemoryState):
    """Its disk gives nothing when it is first asked, and at second."""

    def __init__(self) -> None:
        super().__init__(
            SPEC.run_id, me=ME, sign=lambda message: bytes(64), clocks=clocks_of(lambda: 1_700_000_000_000)
        )
        self.failures = 2

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise Unwritable("disk I/O error")

    async def get(self, author: str, key: str) -> Element | None:
        self._fail()
        return await super().get(author, key)

    async def select(self, prefix: str = "", *, author: str | None = None, limit: int) -> list[Element]:
        self._fail()
        return await super().select(prefix, author=author, limit=limit)


def context(state: FailingState) -> Any:
    network = SimpleNamespace(verify=lambda *_: True)
    return SimpleNamespace(me=ME, run_id=SPEC.run_id, spec=SPEC, state=state, network=network)


def following(body: Callable[[FailingState, trio.Nursery], Awaitable[None]]) -> None:
    """Run `body`, which starts who follows the state, in simulated time."""

    async def main(nursery: trio.Nursery) -> None:
        state = FailingState()
        await nursery.start(state.run)
        await body(state, nursery)

    run_with_nursery(main)


def test_what_the_owner_says_of_the_run_is_heard_later() -> None:
    async def body(state: FailingState, nursery: trio.Nursery) -> None:
        await state.write(SUCCESSION, {"run": "", "round": 4, "reason": "done"})
        watch = SuccessorWatch(state, SPEC)
        await nursery.start(watch.run)
        await trio.sleep(3 * LOOK_EVERY)
        assert watch.warning is not None and not state.failures

    following(body)


def test_what_the_owner_changes_is_heard_later() -> None:
    async def body(state: FailingState, nursery: trio.Nursery) -> None:
        await state.write(STEERING, {"changes": ((3, "inner.lr", 0.5),)})
        watch = SteeringWatch(context(state))
        nursery.start_soon(watch.watch)
        await trio.sleep(30)
        assert watch.heard.at(3).values == {"inner.lr": 0.5} and not state.failures

    following(body)


def test_what_the_owner_changes_is_heard_where_the_feed_lost_it() -> None:
    """Whoever may write floods it by notes of the same name, while this node is busy."""

    async def body(state: FailingState, nursery: trio.Nursery) -> None:
        state.failures = 0
        watch = SteeringWatch(context(state))
        nursery.start_soon(watch.watch)
        await trio.sleep(1)
        stranger = cast(Element, SimpleNamespace(author="stranger", key=STEERING))
        with pytest.MonkeyPatch.context() as silent:
            silent.setattr(state, "_notify", lambda stored: None)
            said = await state.write(STEERING, {"changes": ((3, "inner.lr", 0.5),)})
        state._notify([*[stranger] * (WAITING + 1), said])  # that many fit
        await trio.sleep(1)
        state._notify([stranger])
        await trio.sleep(1)
        assert watch.heard.at(3).values == {"inner.lr": 0.5}

    following(body)


def test_records_of_a_run_by_seeds_are_looked_at_later() -> None:
    async def body(state: FailingState, nursery: trio.Nursery) -> None:
        seed = Seed.__new__(Seed)
        seed._records = state
        nursery.start_soon(seed.watch)
        await trio.sleep(30)
        assert not state.failures

    following(body)


def test_a_rate_that_cannot_be_read_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    async def body(state: FailingState, nursery: trio.Nursery) -> None:
        await state.write(TRIAL, {"period": 0, "factor": 2.0, "loss": 3.0})
        population = Population(context(state))
        assert [trial and trial.factor for trial in [await population._heard(ME) for _ in range(3)]] == [None, None, 2]

    following(body)
    assert "disk I/O error" in caplog.text
