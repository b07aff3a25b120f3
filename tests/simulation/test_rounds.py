"""Rounds of a whole swarm on virtual time: agreement while members die, freeze, join and are cut off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from simswarm import SimSwarm

from swarmnode.node.simnet import run_simulation

NAMES = ("a", "b", "c", "d", "e")


def simulate(body: Callable[[SimSwarm], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await body(SimSwarm(nursery))
            nursery.cancel_scope.cancel()

    run_simulation(main)


async def start_all(swarm: SimSwarm, names: tuple[str, ...] = NAMES) -> None:
    first, *others = names
    await swarm.start(first, wait_peers=len(others))
    for name in others:
        await swarm.start(name, join=first)


def test_members_agree_in_every_round_and_learn() -> None:
    async def body(swarm: SimSwarm) -> None:
        await start_all(swarm)
        await swarm.round_done(7, *NAMES)
        for round in range(8):
            assert len(swarm.hashes(round)) == 1
            assert all(swarm.nodes[n].rounds[round]["outcome"] == "Completed" for n in NAMES)
            assert all(swarm.nodes[n].rounds[round]["members"] == 5 for n in NAMES)
        losses = [swarm.nodes["a"].rounds[r]["loss"] for r in range(8)]
        assert losses[-1] < losses[0]

    simulate(body)


@pytest.mark.parametrize("victim", NAMES)
def test_survivors_finish_every_round_after_a_kill(victim: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await start_all(swarm)
        await swarm.round_done(2, *NAMES)
        await trio.sleep(0.5)
        swarm.kill(victim)
        survivors = [n for n in NAMES if n != victim]
        await swarm.round_done(6, *survivors)
        for round in range(7):
            assert len(swarm.hashes(round)) == 1
        usual = swarm.nodes[survivors[0]].rounds[2]["seconds"]
        assert swarm.nodes[survivors[0]].rounds[3]["seconds"] <= 2 * usual + 5.0

    simulate(body)
