"""Something happens when the n-th message of a simulated swarm is sent: a sweep that reaches every moment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio
from simswarm import Body, SimSwarm

from swarmnode.testing.simnet import SimWorld

Struck = Callable[[SimSwarm, str, int], Awaitable[None]]


class Tripwire:
    """Counts the messages of a world, and tells when a given one is sent."""

    def __init__(self, world: SimWorld) -> None:
        self.sent = 0
        self._at: int | None = None
        self._reached = trio.Event()
        original = world.send

        def send(*args: object) -> None:
            self.sent += 1
            if self.sent == self._at:
                self._reached.set()
            original(*args)  # type: ignore[arg-type]

        world.send = send  # type: ignore[method-assign]

    async def reached(self, number: int) -> None:
        """Wait until that many messages have been sent from now on; the last of them is still under way."""
        self._at = self.sent + number
        await self._reached.wait()


def spread(total: int, most: int) -> list[int]:
    """The numbers 1 to `total`, or `most` of them, evenly apart and with an offset that meets odd and even ones."""
    if total <= most:
        return list(range(1, total + 1))
    return sorted({1 + (i * total + i % 2) // most for i in range(most)})


def strike(
    simulate: Callable[[Body], None],
    begin: Body,
    end: Body,
    names: Sequence[str],
    most: int,
    struck: Struck,
) -> None:
    """Have something happen at `most` of the messages that a swarm sends from `begin` to `end`, each in a new swarm.

    `struck(swarm, victim, message)` does it to one of `names`, each in its turn, and looks at what comes of it.
    """
    sent: list[int] = []

    async def count(swarm: SimSwarm) -> None:
        tripwire = Tripwire(swarm.world)
        await begin(swarm)
        before = tripwire.sent
        await end(swarm)
        sent.append(tripwire.sent - before)

    simulate(count)
    for turn, number in enumerate(spread(sent[0], most)):

        async def body(swarm: SimSwarm, victim: str = names[turn % len(names)], at: int = number) -> None:
            tripwire = Tripwire(swarm.world)
            await begin(swarm)
            await tripwire.reached(at)
            await struck(swarm, victim, at)

        simulate(body)
