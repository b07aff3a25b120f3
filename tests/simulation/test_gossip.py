"""What training in pairs costs and promises beyond what every method does: bytes, waits, merging, nodes far behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import simswarm
import trio
from simswarm import SimSwarm

from swarmnode.node.storage.checkpoints import newest_round
from swarmnode.protocols.methods.gossip.method import BEHIND, MERGES, Gossip
from swarmnode.testing.consensus import consensus_distance
from swarmnode.testing.simnet import SimWorld
from swarmnode.testing.toy import ToyModel
from swarmnode.training.codecs import codec
from swarmnode.training.gossip import weights_codec

NAMES = ("a", "b", "c", "d")
STEPS, STEP = 5, 0.4


simulate = partial(simswarm.simulate, method="gossip", steps=STEPS, seconds_per_step=STEP)


def gossip(swarm: SimSwarm, name: str) -> Gossip:
    method = swarm.nodes[name].method
    assert isinstance(method, Gossip)
    return method


def distance(swarm: SimSwarm, *names: str) -> float:
    return consensus_distance([swarm.nodes[name].method.saved().state.parameters for name in names])


def test_a_round_sends_the_weights_in_16_bits_and_the_work_as_encoded_and_little_else() -> None:
    dimension, rounds = 100_000, 4

    async def body(swarm: SimSwarm) -> None:
        await swarm.begin("ab")
        await swarm.round_done(1, "a", "b")
        before = {name: swarm.nodes[name].network.bytes_out for name in "ab"}
        await swarm.round_done(1 + rounds, "a", "b")
        size = weights_codec("int8").encoded_size(dimension + 1) + codec("int8").encoded_size(dimension + 1)
        for name in "ab":
            sent = (swarm.nodes[name].network.bytes_out - before[name]) / rounds
            assert size <= sent < 1.02 * size + 3000, (name, sent, size)

    simulate(body, model=lambda name, peer: ToyModel(dimension=dimension, seed=0, peer_id=peer, lr=1e-6))


def test_weights_travel_while_steps_are_taken_and_only_the_work_is_waited_for() -> None:
    dimension = 200_000
    rate = 400_000.0  # bytes a second: weights take 1 s, int8 work 0.5 s
    world = SimWorld(latency=0.02, bandwidth=rate)

    async def body(swarm: SimSwarm) -> None:
        await swarm.begin("ab")
        await swarm.round_done(3, "a", "b")
        for name in "ab":
            seconds = [swarm.nodes[name].rounds[r]["exchange_seconds"] for r in (2, 3)]
            assert max(seconds) < codec("int8").encoded_size(dimension) / rate + 0.4, seconds

    simulate(body, world=world, model=lambda name, peer: ToyModel(dimension=dimension, peer_id=peer, lr=1e-6))


def test_behind_their_last_round_nodes_merge_and_stand_where_they_were_told_to() -> None:
    names = (*NAMES, "e")

    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(names, rounds=6)
        await swarm.round_done(4, *names)
        apart = distance(swarm, *names)
        with trio.fail_after(60):
            for name in names:
                await swarm.nodes[name].session.finished.wait()
        assert distance(swarm, *names) < apart / 5
        assert {swarm.nodes[name].method.place.round for name in names} == {6}
        assert {max(swarm.nodes[name].rounds) for name in names} == {5}
        late = await swarm.start("late", join="b", rounds=6)  # the run is over: it takes the end state of one
        with trio.fail_after(60):
            await late.session.finished.wait()
        assert distance(swarm, *names, "late") < apart / 5

    assert MERGES == 8
    simulate(body)


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_a_pause_in_the_merge_costs_a_node_neither_the_merge_nor_its_last_round(seconds: float, tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.begin(NAMES, rounds=8)
        await swarm.round_done(6, *NAMES)
        apart, paused = distance(swarm, *NAMES), swarm.nodes["a"]
        while gossip(swarm, "a")._round <= 8:  # noqa: ASYNC110 (nothing tells of a meeting)
            await trio.sleep(0.01)
        await paused.session.pause()
        await trio.sleep(seconds)
        assert paused.session.place is not None and paused.session.place.round == 7
        paused.session.resume()
        with trio.fail_after(60):
            for name in NAMES:
                await swarm.nodes[name].session.finished.wait()
        assert distance(swarm, *NAMES) < apart / 5
        assert max(paused.rounds) == 7 and newest_round(tmp_path / "a") == paused.method.place.round == 8

    simulate(body)


def test_one_that_is_far_behind_takes_a_members_state_and_drags_nobody_back() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES[:3])
        await swarm.round_done(2, *NAMES[:3])
        swarm.nodes["c"].trainer.seconds_per_step = 15 * BEHIND  # a step during which the others do many rounds
        await trio.sleep(2 * STEPS * STEP)  # by now it is in one
        stood = gossip(swarm, "c").place.round
        await swarm.until(lambda: gossip(swarm, "c").place.round > stood, within=200)
        swarm.nodes["c"].trainer.seconds_per_step = STEP
        ahead = gossip(swarm, "a").place.round
        assert ahead > 4 * BEHIND
        for name in "ab":  # each waited for it now and then, and never for its step
            assert max(told["seconds"] for told in swarm.nodes[name].rounds.values()) < STEPS * STEP + 10
        loss = swarm.nodes["a"].rounds[max(swarm.nodes["a"].rounds)]["loss"]
        await swarm.until(lambda: gossip(swarm, "c").place.round >= ahead + 3, within=60)
        assert any(event["event"] == "caught_up" for event in swarm.nodes["c"].events)
        assert all(told["loss"] < 1.2 * loss for r, told in swarm.nodes["a"].rounds.items() if r >= ahead)

    simulate(body)


def test_who_pauses_while_its_partner_waits_lets_it_go_on_at_once() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin("ab")
        await swarm.round_done(2, "a", "b")
        swarm.nodes["b"].trainer.seconds_per_step = 10.0
        with trio.fail_after(30):
            while (meeting := gossip(swarm, "b").meeting) is None or not meeting.wanted:  # noqa: ASYNC110
                await trio.sleep(0.05)
        alone_in = gossip(swarm, "a").place.round
        await swarm.nodes["b"].session.pause()
        with trio.fail_after(1.0):
            while gossip(swarm, "a").place.round == alone_in:  # noqa: ASYNC110
                await trio.sleep(0.05)

    simulate(body)


@pytest.mark.parametrize("speed", [2, 4])
def test_a_slow_node_ends_its_steps_when_its_partner_waits(speed: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES)
        swarm.nodes["d"].trainer.seconds_per_step = speed * STEP
        await swarm.until(lambda: all(gossip(swarm, name).place is not None for name in NAMES))
        await trio.sleep(60)
        for name in NAMES[:3]:
            seconds = [told["seconds"] for r, told in swarm.nodes[name].rounds.items() if r > 2]
            assert max(seconds) <= STEPS * STEP + speed * STEP + 0.5
        rounds = {name: gossip(swarm, name).place.round for name in NAMES}
        assert max(rounds.values()) - min(rounds.values()) <= 2, rounds  # counted alike, though steps are fewer

    simulate(body)


def test_bytes_that_no_encoder_makes_cost_the_pair_that_round_and_are_counted() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin("ab")
        await swarm.round_done(1, "a", "b")
        liar = gossip(swarm, "b")
        honest = liar._codec

        class Lying:
            name = honest.name
            encoded_size, decode, take_off = honest.encoded_size, honest.decode, honest.take_off

            def encode(self, values: Any, out: memoryview | None = None) -> memoryview:
                raw = honest.encode(values, out)
                raw[:4] = b"\xff" * 4  # a scale that is NaN
                return raw

        liar.feedback.codec = Lying()  # type: ignore[assignment]
        liar.feedback.codec.take_off = lambda *_: None  # type: ignore[method-assign]
        told = gossip(swarm, "a").lies
        await swarm.until(lambda: told.count(swarm.peer("b")) > 0, within=60)
        await swarm.round_done(8, "a", within=60)

    simulate(body)
