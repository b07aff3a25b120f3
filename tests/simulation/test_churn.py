"""Many things go wrong at once, and for long: members of one roster agree, all end on one history, nothing grows."""

from __future__ import annotations

import random

import pytest
import trio
from simswarm import SimSwarm, simulate

pytestmark = pytest.mark.slow

NAMES = tuple("abcdefgh")
ROUNDS = 40


async def churn(swarm: SimSwarm, rng: random.Random) -> None:
    """One fault after another, each undone some rounds later; `a` stays, for somebody must."""
    down: set[str] = set()
    for step in range(14):
        await trio.sleep(rng.uniform(1.0, 9.0))
        up = [n for n in NAMES if n not in down and n in swarm.nodes]
        match rng.choice(("kill", "leave", "freeze", "partition", "return", "return")):
            case "kill" if len(up) > 3:
                victim = rng.choice(up[1:])
                swarm.kill(victim)
                down.add(victim)
            case "leave" if len(up) > 3:
                victim = rng.choice(up[1:])
                await swarm.leave(victim)
                down.add(victim)
            case "freeze":
                victim = rng.choice(up)
                swarm.world.freeze(swarm.peer(victim))
                await trio.sleep(rng.uniform(0.5, 12.0))
                swarm.world.thaw(swarm.peer(victim))
            case "partition":
                apart = rng.sample(up, len(up) // 3)
                swarm.world.partition([[swarm.peer(n) for n in apart]])
                await trio.sleep(rng.uniform(0.5, 25.0))
                swarm.world.heal()
            case _ if down:
                name = sorted(down)[step % len(down)]
                down.remove(name)
                await swarm.start(name, join="a")
    for name in sorted(down):
        await swarm.start(name, join="a")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
def test_members_of_one_roster_agree_through_random_churn(seed: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, *NAMES)
        await churn(swarm, random.Random(seed))
        await swarm.until(lambda: max(swarm.nodes["a"].rounds) >= ROUNDS and swarm.all_stand_together(), within=600)
        by_round: dict[tuple[int, str], set[str]] = {}
        for _, result in swarm.told:
            by_round.setdefault((result["round"], result["roster"]), set()).add(result["state_hash"])
        assert all(len(hashes) == 1 for hashes in by_round.values())

    simulate(body, *NAMES, seed=seed)


def test_nothing_grows_over_fifty_rounds() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(("a", "b", "c", "d"))
        await swarm.round_done(8, "a", "b", "c", "d")
        before = swarm.held()
        for round in range(10, 50, 8):  # also through ballots that fail
            await swarm.until(lambda round=round: max(swarm.nodes["a"].rounds) >= round)  # type: ignore[misc]
            swarm.world.freeze(swarm.peer("c"))
            await trio.sleep(6.0)
            swarm.world.thaw(swarm.peer("c"))
            await swarm.until(swarm.all_stand_together)
        last = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: max(swarm.nodes["a"].rounds) >= last + 8)
        after = swarm.held()
        assert after.offers <= before.offers + 4
        assert after.boxes <= before.boxes + 4
        assert after.tasks <= before.tasks + 16  # a few more idle streams between busy peers

    simulate(body, steps=2, seconds_per_step=0.1)
