"""Turns are shared fairly, and nobody who is slow, greedy or gone keeps them from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import trio

from swarmnode.protocols.limits import BREATH, EASED_FOR, LOOK_EVERY, FairScheduler
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]


def test_no_more_than_so_many_at_once_and_each_has_its_share(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        turns, having, served = FairScheduler(4, 2, longest=20.0), Counter[str](), Counter[str]()

        async def want(peer: str) -> None:
            async with turns.turn(peer):
                having[peer] += 1
                assert having.total() <= 4 and having[peer] <= 2
                await trio.sleep(1.0)
                having[peer] -= 1
                served[peer] += 1

        for peer, wishes in (("greedy", 100), ("a", 10), ("b", 10)):
            for _ in range(wishes):
                nursery.start_soon(want, peer)
        await trio.sleep(8.5)  # 4 a second
        assert served.total() == 32 and served["a"] == served["b"] == 10
        await trio.sleep(60)
        assert served.total() == 120 and having.total() == 0

    simulated(main)


def test_one_that_is_slow_keeps_others_out_for_a_while_only(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        turns = FairScheduler(2, 2, longest=20.0)

        async def never_ends(peer: str) -> None:
            async with turns.turn(peer):
                await trio.sleep_forever()

        for _ in range(5):
            nursery.start_soon(never_ends, "slow")
        await trio.sleep(1.0)
        with trio.fail_after(25):
            async with turns.turn("other"):
                pass
        with trio.move_on_after(60) as scope:
            async with turns.turn("slow"):  # its own places stay taken
                pass
        assert scope.cancelled_caught

    simulated(main)


def test_who_gives_up_waiting_or_dies_with_its_turn_leaves_it_to_the_next(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        turns, scope = FairScheduler(1, 1, longest=1000.0), trio.CancelScope()

        async def hold() -> None:
            with scope:
                async with turns.turn("first"):
                    await trio.sleep_forever()

        nursery.start_soon(hold)
        await trio.sleep(0.1)
        with trio.move_on_after(1.0):
            async with turns.turn("impatient"):
                raise AssertionError("there is no turn")
        scope.cancel()
        with trio.fail_after(0.1):
            async with turns.turn("next"):
                pass
        assert not turns._waiting and not turns._having

    simulated(main)


def test_turns_are_few_while_something_goes_before_them_and_not_for_long(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        turns, ended, having = FairScheduler(8, 4, longest=20.0), Counter[str](), Counter[str]()

        async def want(peer: str) -> None:
            async with turns.turn(peer):
                having[peer] += 1
                assert having.total() == 1 or trio.current_time() - began >= eased
                await trio.sleep(0.01)
                having[peer] -= 1
                ended[peer] += 1

        def start() -> None:
            for number in range(400):
                nursery.start_soon(want, f"peer {number % 2}")

        began, eased = trio.current_time(), 5.0
        with turns.eased():
            start()
            await trio.sleep(eased)
            assert 5 <= ended.total() <= eased / BREATH + 1
        alone: list[float] = []
        await trio.sleep(2)

        async def one_after_the_other() -> None:
            while True:
                async with turns.turn("alone"):
                    alone.append(trio.current_time())

        with turns.eased(), trio.move_on_after(5.0):
            await one_after_the_other()
        assert len(alone) >= 0.8 * 5.0 / BREATH, "who comes alone waits no longer than others would make it"
        await trio.sleep(2)
        assert ended.total() == 400  # what waited goes on at once
        began, eased = trio.current_time(), EASED_FOR
        with turns.eased():
            start()
            await trio.sleep(EASED_FOR + 2 * LOOK_EVERY)
            assert ended.total() == 800

    simulated(main)
