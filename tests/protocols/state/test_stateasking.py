"""What is offered is asked for once, and again of another where it does not come."""

from __future__ import annotations

from collections.abc import Callable

import trio
from statenodes import RUN, now

from swarmnode.protocols.peers.scoring import Violations
from swarmnode.protocols.runner import inline
from swarmnode.protocols.state.intake import ASKED_FOR, OTHERS, PROTOCOL, StateIntake
from swarmnode.testing.memorystate import MemoryState, clocks_of
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]


class Asking(StateIntake):
    """An intake that lacks what `lacks` says."""

    def __init__(self, lacks: Callable[[bytes], bool]) -> None:
        state = MemoryState(RUN, me="me", sign=lambda message: bytes(64), clocks=clocks_of(now))
        violations = Violations(PROTOCOL)
        super().__init__(state, verify=lambda *of: True, runner=inline, violations=violations)
        self.lacks = lacks  # type: ignore[method-assign]


def test_one_peer_is_asked_and_another_that_offered_it_when_it_does_not_come(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        asking = Asking(lambda rank: rank in (b"a", b"b"))
        assert asking.asks("first", b"a") and not asking.asks("second", b"a") and not asking.asks("first", b"known")
        assert asking.asks("first", b"b")
        assert not asking.overdue()
        await trio.sleep(ASKED_FOR)
        assert asking.overdue() == {"second": [b"a"]}  # nobody else offered b
        await trio.sleep(ASKED_FOR)
        assert not asking.overdue()
        assert asking.asks("third", b"a")  # a later offer is taken up

    simulated(main)


def test_what_came_meanwhile_is_not_asked_for_again(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        lacking = {b"a"}
        asking = Asking(lambda rank: rank in lacking)
        assert asking.asks("first", b"a") and not asking.asks("second", b"a")
        lacking.clear()
        await trio.sleep(2 * ASKED_FOR)
        assert not asking.overdue()

    simulated(main)


def test_of_many_who_offer_one_thing_few_are_remembered_and_each_is_asked_once(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        asking = Asking(lambda rank: True)
        for number in range(100):
            assert asking.asks(f"peer {number}", b"a") is (number == 0)
        asked = []
        for _ in range(10):
            await trio.sleep(ASKED_FOR)
            asked += list(asking.overdue())
        assert asked == [f"peer {number}" for number in range(1, OTHERS + 1)]

    simulated(main)
