"""Swarms of policies on simnet: each learns from the others' answers while they are there, and waits for nobody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

import simswarm
from simpolicy import Groups, SimPolicy
from simswarm import SimSwarm

from swarmnode.protocols.methods.rollouts.sapo import Sapo
from swarmnode.protocols.methods.trainer import TrainerDied
from swarmnode.testing.simnet import SimWorld
from swarmnode.training.rl.groups import Learned

PACE = 1.0  # s of a round, by default
Body = Callable[[SimSwarm], Awaitable[None]]


class DiesOfOthers(SimPolicy):
    """The first time that it is to learn from what others shared, it dies."""

    def __init__(self, peer_id: str) -> None:
        super().__init__(peer_id)
        self.given: list[Groups] = []

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        self.given += [pool] if pool else []
        if len(self.given) == 1 and pool:
            raise TrainerDied("the simulation says so")
        return await super().learn(pool, sampled, probation)


def simulate(
    body: Body, *names: str, checkpoints: Path | None = None, odd: Mapping[str, type[SimPolicy]] | None = None
) -> None:
    """`body` with a swarm whose nodes have all begun; `odd`: policies of another kind, by the node's name."""

    async def begun(swarm: SimSwarm) -> None:
        swarm.checkpoints = checkpoints
        first, *others = names
        await swarm.start(first)
        for name in others:
            await swarm.start(name, join=first)
        await body(swarm)

    def policy(name: str, peer: str) -> SimPolicy:
        return (odd or {}).get(name, SimPolicy)(peer)

    simswarm.simulate(begun, world=SimWorld(latency=0.05), method="sapo", trainer=policy)


def policy_of(swarm: SimSwarm, name: str) -> SimPolicy:
    trainer = swarm.nodes[name].trainer
    assert isinstance(trainer, SimPolicy)
    return trainer


def taken(swarm: SimSwarm, name: str, rounds: range) -> list[int]:
    """Others' groups that a node learned from in these rounds."""
    return [swarm.nodes[name].rounds[round]["learned"]["taken"] for round in rounds]


def test_what_a_policy_died_of_is_not_given_to_it_again() -> None:
    async def body(swarm: SimSwarm) -> None:
        policy = policy_of(swarm, "a")
        assert isinstance(policy, DiesOfOthers)
        await swarm.until(lambda: len(policy.given) > 3)
        first, *later = policy.given
        assert not [group for group in first if any(group in groups for groups in later)]

    simulate(body, *"ab", odd={"a": DiesOfOthers})


def test_policies_learn_from_one_another_and_stay_their_own() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(20, *"abcd")
        for name in "abcd":
            assert (
                sum(map(bool, taken(swarm, name, range(5, 20)))) > 10
            )  # now and then nobody has anything that teaches
            assert policy_of(swarm, name).parameters().mean() > 0.3
        assert len(swarm.hashes(20)) == 4
        assert max(event["authors"] for event in learned(swarm, "a")) > 1

    simulate(body, *"abcd")


def learned(swarm: SimSwarm, name: str) -> list[dict[str, int]]:
    return [event["learned"] for event in swarm.nodes[name].rounds.values()]


def test_a_node_alone_learns_from_itself_and_from_others_once_they_are_there() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, "a")
        assert taken(swarm, "a", range(6)) == [0] * 6
        assert all(swarm.nodes["a"].rounds[round]["members"] == 1 for round in range(6))
        await swarm.start("b", join="a")
        await swarm.until(lambda: swarm.nodes["a"].rounds[max(swarm.nodes["a"].rounds)]["learned"]["taken"] > 0)
        assert max(swarm.nodes["a"].rounds) < 15

    simulate(body, "a")


def test_who_dies_or_freezes_costs_nobody_any_time() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, *"abcd")
        swarm.kill("a")
        swarm.world.freeze(swarm.peer("b"))
        await swarm.round_done(25, "c", "d")
        for name in "cd":
            assert max(swarm.nodes[name].rounds[round]["seconds"] for round in range(6, 26)) < 1.2 * PACE
            assert sum(map(bool, taken(swarm, name, range(8, 25)))) > 8

    simulate(body, *"abcd")


def test_a_trainer_that_dies_costs_the_round_in_hand() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(3, "a", "b")
        policy_of(swarm, "a").dies = True
        await swarm.round_done(8, "a", "b")
        assert [event["event"] for event in swarm.nodes["a"].events].count("abandoned") == 1
        assert sorted(swarm.nodes["a"].rounds) == list(range(max(swarm.nodes["a"].rounds) + 1))

    simulate(body, "a", "b")


def test_a_node_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(7, "a", "b")
        await swarm.leave("b")
        reached, knew = max(swarm.nodes["b"].rounds), policy_of(swarm, "b").parameters()
        again = await swarm.start("b", join="a")
        await swarm.until(lambda: bool(again.rounds))
        assert min(again.rounds) == reached + 1
        assert (policy_of(swarm, "b").parameters() >= knew).all()

    simulate(body, "a", "b", checkpoints=tmp_path)


def test_what_teaches_nothing_is_neither_shared_nor_kept() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(3, "a", "b")
        policy_of(swarm, "a").load(policy_of(swarm, "a").parameters() * 0 + 1)  # all of its answers are right now
        method = swarm.nodes["a"].method
        assert isinstance(method, Sapo)
        published = method.rollouts.stats()["events"]["published"]
        assert published > 0
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 5, "a")
        assert method.rollouts.stats()["events"]["published"] == published

    simulate(body, "a", "b")
