"""The owner changes values of a run while it is trained: all members do so in one round, or none does."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import simswarm
import trio
from simswarm import SimNode, SimSwarm

from swarmnode.crdt.kinds import DAY
from swarmnode.protocols.methods.steering import KEY, MOST, Steering, SteeringWatch, stages
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec

NAMES = ("a", "b", "c", "d")
STEPS = 5  # by the run's file


class OwnedSwarm(SimSwarm):
    """Its owner is the node called a."""

    @cached_property
    def spec(self) -> RunSpec:
        return super().spec.updated(run={"owner": self.world.node("a").me})


simulate = partial(simswarm.simulate, swarm=OwnedSwarm, steps=STEPS)


async def start_all(swarm: SimSwarm, *, deaf: tuple[str, ...] = ()) -> None:
    first, *others = NAMES
    await swarm.start(first, wait_peers=len(others))
    for name in others:
        await start(swarm, name, deaf=name in deaf)


async def start(swarm: SimSwarm, name: str, *, deaf: bool) -> None:
    """A node that joins; a deaf one never hears what the owner writes into the state."""
    node = await swarm.start(name, join="a")
    if deaf:
        node.diloco.steering.watch = trio.sleep_forever  # type: ignore[method-assign]


def watch_of(swarm: SimSwarm, name: str) -> SteeringWatch:
    return swarm.nodes[name].diloco.steering


def rate_of(node: SimNode) -> float | None:
    assert isinstance(node.trainer, SimTrainer)
    return node.trainer.steered.lr if node.trainer.steered is not None else None


def steps_by_round(swarm: SimSwarm, round: int) -> set[int]:
    return {node.rounds[round]["steps"] for node in swarm.nodes.values() if round in node.rounds}


@pytest.mark.parametrize(
    "deaf", [(), ("c",), ("b", "c", "d")], ids=["all hear", "one does not", "the owner alone knows"]
)
@pytest.mark.parametrize("method", ["diloco", "btard"])
def test_all_members_change_rate_steps_and_codec_in_the_round_that_the_owner_names(
    method: str, deaf: tuple[str, ...]
) -> None:
    async def body(swarm: SimSwarm) -> None:
        await start_all(swarm, deaf=deaf)
        await swarm.round_done(1, *NAMES)
        changes = {"inner.lr": "3e-4", "inner.steps": 3, "exchange.codec": "fp16"}
        await watch_of(swarm, "a").say(changes, since=5)
        await swarm.round_done(8, *NAMES)
        for round in range(9):
            assert len(swarm.hashes(round)) == 1
            assert steps_by_round(swarm, round) == {STEPS if round < 5 else 3}
            assert all(swarm.nodes[name].rounds[round]["outcome"] == "Completed" for name in NAMES)
        for name in NAMES:
            values = {"inner.lr": 3e-4, "inner.steps": 3, "exchange.codec": "fp16"}
            assert watch_of(swarm, name).stage.values == values
            assert rate_of(swarm.nodes[name]) == 3e-4
            assert swarm.nodes[name].allreduce._codec.name == "fp16"
            assert watch_of(swarm, name).refused.total() == 0

    simulate(body, method=method)


def test_the_file_s_values_hold_again_when_the_owner_takes_its_word_back() -> None:
    async def body(swarm: SimSwarm) -> None:
        await start_all(swarm)
        await swarm.round_done(0, *NAMES)
        await watch_of(swarm, "a").say({"inner.lr": 3e-4, "inner.steps": 3}, since=3)
        await swarm.round_done(4, *NAMES)
        await watch_of(swarm, "a").say({"inner.steps": None}, since=7)
        await swarm.round_done(8, *NAMES)
        assert [steps_by_round(swarm, round) for round in (2, 3, 6, 7, 8)] == [{5}, {3}, {3}, {5}, {5}]
        assert {rate_of(node) for node in swarm.nodes.values()} == {3e-4}
        assert swarm.nodes["b"].session.method.steering.told()["now"] == {"from_round": 7, "values": {"inner.lr": 3e-4}}

    simulate(body)


@pytest.mark.parametrize("deaf", [(), ("c",), ("b", "c", "d")], ids=["all hear", "one does not", "only the owner"])
def test_what_is_planned_keeps_its_round_when_other_values_are_changed(deaf: tuple[str, ...]) -> None:
    async def body(swarm: SimSwarm) -> None:
        await start_all(swarm, deaf=deaf)
        await swarm.round_done(0, *NAMES)
        owner = watch_of(swarm, "a")
        await owner.say({"inner.lr": 3e-4, "outer.lr": 0.5}, since=10)
        await owner.say({"inner.steps": 3}, since=4)  # another key, before the round of what is planned
        await swarm.round_done(5, *NAMES)
        await owner.say({"inner.steps": 2}, since=12)  # and after it
        await owner.say({"outer.lr": None}, since=8)  # the same key: back to what holds now
        planned = [(each["from_round"], each["values"]) for each in owner.told()["coming"]]
        assert planned == [(10, {"inner.lr": 3e-4, "inner.steps": 3}), (12, {"inner.lr": 3e-4, "inner.steps": 2})]
        await swarm.round_done(8, *NAMES)
        for name in NAMES:  # whoever was in a round since knows what is planned
            assert watch_of(swarm, name).told()["coming"] == owner.told()["coming"]
            assert rate_of(swarm.nodes[name]) == swarm.spec.inner.lr
        await swarm.round_done(13, *NAMES)
        assert [steps_by_round(swarm, round) for round in range(14)] == [{STEPS}] * 4 + [{3}] * 8 + [{2}] * 2
        assert {rate_of(node) for node in swarm.nodes.values()} == {3e-4}
        assert all(len(swarm.hashes(round)) == 1 for round in range(14))

    simulate(body)


def test_who_joins_later_and_who_comes_back_go_on_by_what_is_in_force(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await start_all(swarm)
        await swarm.round_done(0, *NAMES)
        await watch_of(swarm, "a").say({"inner.lr": 3e-4, "inner.steps": 3}, since=3)
        await swarm.round_done(4, *NAMES)
        await start(swarm, "e", deaf=True)
        await swarm.until(lambda: len(swarm.nodes["e"].rounds) > 1)
        swarm.kill("c")
        await trio.sleep(1.0)
        await start(swarm, "c", deaf=True)
        await swarm.until(lambda: len(swarm.nodes["c"].rounds) > 1)
        for name in ("c", "e"):
            assert rate_of(swarm.nodes[name]) == 3e-4
            assert swarm.nodes[name].rounds[max(swarm.nodes[name].rounds)]["steps"] == 3

    simulate(body)


def test_a_swarm_that_was_all_gone_goes_on_by_what_was_in_force(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await start_all(swarm)
        await swarm.round_done(0, *NAMES)
        await watch_of(swarm, "a").say({"inner.lr": 3e-4, "inner.steps": 3}, since=2)
        await swarm.round_done(6, *NAMES)
        for name in NAMES:
            await swarm.leave(name)
        await start_all(swarm, deaf=NAMES)  # and no state of the run is left to hear it from
        await swarm.until(lambda: all(len(node.rounds) > 2 for node in swarm.nodes.values()))
        for node in swarm.nodes.values():
            assert {event["steps"] for event in node.rounds.values()} == {3}
            assert rate_of(node) == 3e-4

    simulate(body)


def test_nobody_but_the_owner_changes_a_value_neither_by_a_record_nor_by_the_lead_of_a_round() -> None:
    async def body(swarm: SimSwarm) -> None:
        await start_all(swarm)
        await swarm.round_done(0, *NAMES)
        liar = watch_of(swarm, "b")
        changes = ((2, "inner.steps", 1),)
        record = await liar._parts.sync.write(KEY, {"changes": changes})  # type: ignore[union-attr]
        false = Steering(record.sealed, record.rank, record.expiry, changes, stages(swarm.spec, changes))
        read = liar.read
        liar.read = lambda raw: false if raw == false.raw else read(raw)  # type: ignore[method-assign]
        liar.heard = false
        await swarm.round_done(8, *NAMES)
        for round in range(9):
            assert len(swarm.hashes(round)) == 1
            assert steps_by_round(swarm, round) == {STEPS}
        for name in ("a", "c", "d"):
            watch = watch_of(swarm, name)
            assert watch.stage.values == {}
            assert watch.refused["stranger"] == 1
            assert watch.refused["forged"] > 0

    simulate(body)


def test_what_is_no_word_of_the_owner_s_or_not_due_or_older_or_expired_is_refused_and_counted() -> None:
    async def body(swarm: SimSwarm) -> None:
        node = await swarm.start("a")
        node.diloco.steering.watch = trio.sleep_forever  # type: ignore[method-assign]
        await swarm.round_done(0, "a")
        watch = watch_of(swarm, "a")
        parts = watch._parts

        async def said(value: Any) -> bytes:
            assert parts.sync is not None
            return (await parts.sync.write(KEY, value)).sealed

        wrong = ((9, "inner.lr", -1.0),), ((9, "run.seed", 1),), ((9, "run.seed", None),), ((9, "inner.lr"),)
        for value in (*({"changes": changes} for changes in (*wrong, 1)), {}, (1,)):
            assert watch.read(await said(value)) is None
        assert watch.refused["invalid"] == 7
        many = watch.read(await said({"changes": tuple((1, "inner.lr", 1e-4) for _ in range(50))}))
        assert many is not None and len(many.changes) == MOST
        first, second = [await said({"changes": ((50, "inner.lr", rate),)}) for rate in (1e-4, 2e-4)]
        assert watch.newest([first, second, b"noise"]).at(50).values == {"inner.lr": 2e-4}
        watch.take(second, 49)
        assert watch.stage.values == {}
        watch.take(second, 50)
        assert watch.stage.values == {"inner.lr": 2e-4}
        assert watch.allows(second) and not watch.allows(first)
        assert watch.refused["untimely"] == 1 and watch.refused["forged"] == 1
        third = await said({"changes": ((50, "inner.lr", 3e-4),)})
        assert watch.allows(third)
        watch._parts = replace(parts, now=lambda: parts.now() + 8 * DAY)
        assert not watch.allows(third)
        with pytest.raises(SettingError, match="cannot be changed"):
            await watch.say({"model.layers": 2}, since=90)
        with pytest.raises(SettingError, match=r"inner.*steps"):
            await watch.say({"inner.steps": "many"}, since=90)

    simulate(body)


def test_only_what_agrees_before_a_round_can_be_steered() -> None:
    async def body(swarm: SimSwarm) -> None:
        node = await swarm.start("a")
        assert node.method.steering is None

    simulate(body, method="open")
