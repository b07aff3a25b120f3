"""Rounds of a model that trains in no time: none is too short, and who is far behind comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import simswarm
import trio
from simswarm import RUN, SimSwarm

from swarmnode.protocols.chain.state import decode
from swarmnode.protocols.methods.open.join import TipQuery
from swarmnode.protocols.methods.trainer import Trainer, TrainerHeld
from swarmnode.testing.simnet import SimWorld
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer

pytestmark = pytest.mark.slow

SHORTEST = 1.0  # seconds, by default


def simulate(body: Callable[[SimSwarm], Awaitable[None]], *names: str) -> None:
    """`body` with a swarm of one validator, the first, whose rounds need next to no training."""
    world = SimWorld(latency=0.02)
    simswarm.simulate(body, *names, world=world, method="open", validators=names[:1], seconds_per_step=0.01)


def test_rounds_are_not_shorter_than_the_shortest_window() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(10, "a", "b")
        assert sum(swarm.nodes["a"].rounds[round]["seconds"] for round in range(1, 10)) > 8 * SHORTEST

    simulate(body, "a", "b")


def test_who_was_cut_off_for_longer_than_others_remember_is_soon_where_they_are() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, "a", "b", "c")
        swarm.world.partition([[swarm.peer("a"), swarm.peer("b")], [swarm.peer("c")]])
        await swarm.round_done(75, "a", "b")
        swarm.world.heal()
        healed = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: max(swarm.nodes["c"].rounds) > healed, within=30)
        await swarm.until(lambda: swarm.all_agree(after=healed), within=30)

    simulate(body, "a", "b", "c")


def test_nobody_is_given_a_state_to_begin_with_whose_roster_the_next_one_undid() -> None:
    """As that takes the state before, which a newcomer has not."""

    async def body(swarm: SimSwarm) -> None:
        method = swarm.nodes["a"].open
        undone = 0
        for round in range(60):
            await swarm.round_done(round, "a")
            tip = await method.places._on_tip(swarm.peer("b"), TipQuery(RUN))
            way = method.store.tree.path(method.store.tip)
            rosters = {block.chain.round: block.roster for block in way}
            after = rosters.get(decode(tip.base).round + 1)
            assert after is None or not after.revert
            last = rosters.get(tip.round - 1)
            undone += last is not None and last.revert
        assert undone > 0

    simulate(body, "a", "b", "c")


class HeldTrainer(SimTrainer):
    """One that measures nothing while it is held, as a process that is stopped."""

    held = False
    measures = False

    async def hold(self) -> None:
        self.held = True

    async def release(self) -> bool:
        return self.go_on()

    def go_on(self) -> bool:
        self.held = False
        return True

    async def heldout(self, *, seed: int, sequences: int) -> float:
        self.measures = True
        await trio.sleep(0.1)
        self.measures = False
        if self.held:
            raise TrainerHeld("training is paused")
        return await super().heldout(seed=seed, sequences=sequences)


@pytest.mark.parametrize("by", ["stop", "pause"])
def test_a_judge_whose_owner_wants_it_idle_holds_nobody_up(by: str) -> None:
    names = "a", "b", "c", "d", "e"

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(6, *names)
        session, trainer = swarm.nodes["c"].session, swarm.nodes["c"].trainer
        assert isinstance(trainer, HeldTrainer)
        while session.phase != "exchanging" or not trainer.measures:  # noqa: ASYNC110
            await trio.sleep(0.01)
        judged, at = max(swarm.nodes["c"].rounds) + 1, trio.current_time()
        if by == "stop":
            session.stop()
        else:
            await session.pause()
        await swarm.round_done(judged, "a", "b", "d", "e")
        assert trio.current_time() - at < 2.0

    def trainer(name: str, peer: str) -> Trainer:
        return HeldTrainer(ToyModel(dimension=64, peer_id=peer), seconds_per_step=0.1)

    simswarm.simulate(body, *names, method="open", validators=names, floor=10.0, trainer=trainer)
