"""Validators of whom two or three of eight are away at any time, each for seconds, as on machines that people use."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import trio
from simswarm import SimSwarm, simulate

from swarmnode.testing.simnet import SimWorld

NAMES = tuple("abcdefgh")
AFTER = 2.0  # s from one strike to the next, on average
LASTS = 310.0  # s
SEED = 1


class Strikes:
    """Nodes are frozen, cut off or killed, and back after some seconds; at most `most` of them at a time."""

    def __init__(self, swarm: SimSwarm, most: int) -> None:
        self._swarm, self._most = swarm, most
        self._rng = random.Random(SEED)
        self._away, self._cut = set[str](), set[str]()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(self._rng.expovariate(1 / AFTER))
                if len(self._away) < self._most:
                    name = self._rng.choice([name for name in NAMES if name not in self._away])
                    self._away.add(name)
                    nursery.start_soon(self._strike, name)

    async def _strike(self, name: str) -> None:
        swarm, rng, lot = self._swarm, self._rng, self._rng.random()
        if lot < 0.4:
            swarm.world.freeze(swarm.peer(name))
            await trio.sleep(rng.uniform(1, 12))
            swarm.world.thaw(swarm.peer(name))
        elif lot < 0.7:
            self._cut_off({*self._cut, name})
            await trio.sleep(rng.uniform(1, 15))
            self._cut_off(self._cut - {name})
        else:
            swarm.kill(name)
            await trio.sleep(rng.uniform(8, 30))
            await swarm.start(name, join=rng.choice([other for other in NAMES if other not in self._away]))
            await trio.sleep(2)
        self._away.discard(name)

    def _cut_off(self, names: set[str]) -> None:
        self._cut = names
        rest = [name for name in NAMES if name not in names]
        self._swarm.world.partition([[self._swarm.peer(name) for name in side] for side in (rest, *sorted(names))])


@pytest.mark.slow
@pytest.mark.parametrize(("away", "rounds"), [(2, 25), (3, 12)])
def test_rounds_end_with_work_and_in_one_state_while_validators_come_and_go(away: int, rounds: int) -> None:
    """A round takes 8 s where nobody is away. Where nobody waited for validators that were behind, two rounds of the
    first swarm and one of the second had two rosters. Where judges waited for one another in turn, few rounds ended.
    """

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, *NAMES)
        before = len(swarm.told)
        with trio.move_on_after(LASTS):
            await Strikes(swarm, away).run()
        states: dict[int, set[str]] = defaultdict(set)
        for _, event in swarm.told[before:]:
            if event["members"] > 1:
                states[event["round"]].add(event["state_hash"])
        assert len(states) >= rounds
        assert not {round: hashes for round, hashes in states.items() if len(hashes) > 1}

    simulate(
        body, *NAMES, world=SimWorld(latency=0.05), method="open", validators=NAMES, seconds_per_step=1.0, seed=SEED
    )
