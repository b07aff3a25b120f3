"""A member is lost at each message of an exchange in turn: whatever had been sent by then, the others agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from simswarm import SimSwarm

from swarmnode.node.simnet import run_simulation

NAMES = ("a", "b", "c", "d", "e")
SWEPT = 2  # the round in whose exchange somebody is lost
TRAINING = 5 * 0.4  # seconds


class Tripwire:
    """Calls `action` when the n-th message since `arm` is sent; counts them all."""

    def __init__(self, swarm: SimSwarm) -> None:
        self.sent = 0
        self._at: int | None = None
        self._reached = trio.Event()
        original = swarm.world.send

        def send(*args: object) -> None:
            self.sent += 1
            if self.sent == self._at:
                self._reached.set()
            original(*args)  # type: ignore[arg-type]

        swarm.world.send = send  # type: ignore[method-assign]

    async def reached(self, number: int) -> None:
        """Wait until that many messages have been sent from now on; the last of them is still under way."""
        self._at = self.sent + number
        await self._reached.wait()


async def until_exchange(swarm: SimSwarm, names: tuple[str, ...]) -> None:
    first, *others = names
    await swarm.start(first, wait_peers=len(others))
    for name in others:
        await swarm.start(name, join=first)
    await swarm.round_done(SWEPT - 1, *names)
    await trio.sleep(TRAINING - 0.01)


def simulate(names: tuple[str, ...], body: Callable[[SimSwarm, Tripwire], object]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery)
            tripwire = Tripwire(swarm)
            await until_exchange(swarm, names)
            await body(swarm, tripwire)  # type: ignore[misc]
            nursery.cancel_scope.cancel()

    run_simulation(main)


def messages_of_an_exchange(names: tuple[str, ...]) -> int:
    counted: list[int] = []

    async def count(swarm: SimSwarm, tripwire: Tripwire) -> None:
        before = tripwire.sent
        await swarm.round_done(SWEPT, *names)
        counted.append(tripwire.sent - before)

    simulate(names, count)
    return counted[0]


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (3, 4), (4, 13), (5, 19)])
def test_survivors_agree_whichever_message_a_member_died_at(size: int, stride: int) -> None:
    names = NAMES[:size]
    total = messages_of_an_exchange(names)
    for turn, number in enumerate(range(1, total, stride)):
        for victim in names if size == 2 else [names[turn % size]]:

            async def body(swarm: SimSwarm, tripwire: Tripwire, at: int = number, victim: str = victim) -> None:
                await tripwire.reached(at)
                swarm.kill(victim)
                survivors = [n for n in names if n != victim]
                await swarm.round_done(SWEPT + 1, *survivors, within=60)
                for round in range(SWEPT + 2):
                    assert len(swarm.hashes(round)) == 1, (size, victim, at, round)

            simulate(names, body)


@pytest.mark.parametrize(("size", "stride"), [(2, 4), (3, 11), (4, 29), (5, 41)])
def test_all_return_to_one_history_whichever_message_a_member_froze_at(size: int, stride: int) -> None:
    names = NAMES[:size]
    total = messages_of_an_exchange(names)
    for turn, number in enumerate(range(1, total, stride)):
        victim = names[turn % size]

        async def body(swarm: SimSwarm, tripwire: Tripwire, at: int = number, victim: str = victim) -> None:
            await tripwire.reached(at)
            swarm.world.freeze(swarm.peer(victim))
            others = [n for n in names if n != victim]
            await swarm.round_done(SWEPT + 2, *others, within=60)
            for round in range(SWEPT + 3):
                assert len({swarm.nodes[n].rounds[round]["state_hash"] for n in others}) == 1, (size, victim, at)
            swarm.world.thaw(swarm.peer(victim))
            await swarm.until(swarm.all_stand_together, within=120)

        simulate(names, body)
