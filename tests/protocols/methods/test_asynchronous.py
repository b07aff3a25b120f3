"""What `async` promises beside what every method does: nobody waits for who is slow, and the slow one's work counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from signature import STRIDE, SignatureModel, origin_of
from simswarm import Body, SimSwarm

from swarmnode.protocols.methods.asynchronous import Aged
from swarmnode.testing.simnet import SimWorld
from swarmnode.testing.toytrainer import SimTrainer

NAMES = ("a", "b", "c", "d", "e")
STEPS = 20
SECONDS = 0.1  # a step of the fastest
ROUND = STEPS * SECONDS


class Clocked(SimTrainer):
    """A trainer whose next step may last longer than the others."""

    toy: SignatureModel
    stall = 0.0  # seconds that the next call of `train` is held up for
    late = 0.0  # seconds by which the one in hand ends late

    async def train(self, *, round: int, steps: int, seconds: float) -> Any:
        held, self.stall = self.stall, 0.0
        await trio.sleep(held)
        taken = await super().train(round=round, steps=steps, seconds=seconds)
        held, self.late = self.late, 0.0
        await trio.sleep(held)
        return taken


def simulate(
    body: Body,
    *,
    method: str = "async",
    speeds: tuple[int, ...] = (4, 4, 4, 4, 4),
    steps: int = STEPS,
    scale: float = 1.0,
    world: SimWorld | None = None,
    **exchange: Any,
) -> None:
    """Nodes whose steps take 4 / speed times SECONDS, times `scale`; one for each speed."""
    names = NAMES[: len(speeds)]

    def trainer(name: str, peer: str) -> Clocked:
        model = SignatureModel(axis=NAMES.index(name), peer_id=peer)
        return Clocked(model, seconds_per_step=scale * 4 * SECONDS / speeds[names.index(name)])

    async def begun(swarm: SimSwarm) -> None:
        await swarm.round_done(1, *names)
        await body(swarm)

    options = {"method": method, "steps": steps, "trainer": trainer, "world": world, "exchange": exchange}
    simswarm.simulate(begun, *names, **options)


def clocked(swarm: SimSwarm, name: str) -> Clocked:
    trainer = swarm.nodes[name].trainer
    assert isinstance(trainer, Clocked)
    return trainer


def last(swarm: SimSwarm, name: str) -> int:
    return max(swarm.nodes[name].rounds)


def missed(swarm: SimSwarm, name: str) -> list[int]:
    """Rounds whose result is without a node's work, as another tells them."""
    other = swarm.nodes["b" if name != "b" else "a"]
    return [round for round, event in other.rounds.items() if swarm.peer(name) in event["missing"]]


def pace_of(method: str, speeds: tuple[int, ...]) -> tuple[int, list[float]]:
    """Rounds, and steps of each node, in a hundred seconds."""
    found: list[tuple[int, list[float]]] = []

    async def body(swarm: SimSwarm) -> None:
        names = NAMES[: len(speeds)]
        before = last(swarm, "a"), [clocked(swarm, name).toy.work for name in names]
        await trio.sleep(100)
        work = [clocked(swarm, name).toy.work - had for name, had in zip(names, before[1], strict=True)]
        found.append((last(swarm, "a") - before[0], [each / STRIDE for each in work]))
        assert len(swarm.hashes(last(swarm, "a") - 1)) == 1

    simulate(body, method=method, speeds=speeds)
    return found[0]


def test_nobody_waits_where_one_is_twice_and_one_four_times_as_fast() -> None:
    speeds = (1, 2, 4)
    (rounds, steps), (slow_rounds, slow_steps) = pace_of("async", speeds), pace_of("diloco", speeds)
    assert rounds > 3 * slow_rounds
    assert sum(steps) > 2 * sum(slow_steps)
    assert steps == pytest.approx([speed * sum(steps) / sum(speeds) for speed in speeds], rel=0.05)


def work_in(swarm: SimSwarm, name: str, members: int) -> tuple[float, float, float, float]:
    """What a node did; of it, what is in the shared state, if results are means of so many; local alone; residual."""
    model, saved = clocked(swarm, name).toy, swarm.nodes[name].method.saved()
    shared, residual = float(saved.state.parameters[model.axis]), float(saved.residual[model.axis])
    origin = float(origin_of(swarm.nodes[name].method)[model.axis])
    return model.work, members * shared, float(model.vector[model.axis]) - origin - residual, residual


@pytest.mark.parametrize("rounds", [4, 10])
def test_a_learner_that_stalls_is_passed_over_and_its_work_counts_later(rounds: int) -> None:
    """A learner that was away for few rounds goes from result to result; one that was for more fetches the state."""

    async def body(swarm: SimSwarm) -> None:
        began, held = last(swarm, "a"), rounds * ROUND
        clocked(swarm, "c").stall = held
        await trio.sleep(held)
        # less a grace in two rounds, and what the rounds last beside steps
        assert last(swarm, "a") >= began + rounds - 2
        assert last(swarm, "c") <= began + 1
        await swarm.round_done(last(swarm, "a") + 5, *NAMES)
        assert len(missed(swarm, "c")) == 1  # then it has no vote, and nobody waits for it
        caught_up = [event for event in swarm.nodes["c"].events if event["event"] == "caught_up"]
        assert len(caught_up) == 1 + (rounds > 4)  # one of them when it joined
        done, counted, local, residual = work_in(swarm, "c", len(NAMES))
        assert abs(residual) < STRIDE
        # the part that waited counts by the weight that it had left
        assert 0.85 * done < counted + local < 1.1 * done

    simulate(body)


def test_where_the_one_that_is_to_lead_stalls_another_leads() -> None:
    async def body(swarm: SimSwarm) -> None:
        began = last(swarm, "a")
        await swarm.round_done(began + 1, *NAMES)
        acceptor = swarm.nodes["a"].agreement.acceptor
        leader = acceptor.candidates()[0]
        victim, *others = sorted(NAMES, key=lambda name: swarm.peer(name) != leader)
        clocked(swarm, victim).stall = 60.0
        await swarm.round_done(began + 4, *others, within=30.0)
        assert last(swarm, victim) < began + 4

    simulate(body)


@pytest.mark.parametrize("late, waited_for", [(0.4, True), (0.6, False)])
def test_a_round_waits_for_one_that_is_late_by_less_than_half_of_what_its_steps_take(
    late: float, waited_for: bool
) -> None:
    async def body(swarm: SimSwarm) -> None:
        while any(swarm.nodes[name].method.phase != "training" for name in NAMES):  # noqa: ASYNC110 (no event tells)
            await trio.sleep(SECONDS / 2)
        acceptor = swarm.nodes["a"].agreement.acceptor
        round, leader = acceptor.position.round, acceptor.candidates()[0]  # who is to lead is waited for anyway
        victim, *others = sorted(NAMES, key=lambda name: swarm.peer(name) == leader)
        clocked(swarm, victim).late = late * ROUND
        await swarm.round_done(round, *others)
        assert (round in missed(swarm, victim)) != waited_for

    simulate(body)


@pytest.mark.slow
def test_one_whose_every_step_lasts_for_rounds_takes_part_all_the_same() -> None:
    async def body(swarm: SimSwarm) -> None:
        before, (done, counted, *_) = last(swarm, "b"), work_in(swarm, "a", len(NAMES))
        await trio.sleep(60 * 10.0)
        rounds = [event for round, event in swarm.nodes["b"].rounds.items() if round > before]
        assert len(rounds) > 42  # of 10 s each, and a grace in some
        assert sum(event["members"] == len(NAMES) for event in rounds) >= 3
        now = work_in(swarm, "a", len(NAMES))
        assert now[0] - done >= 12 * STRIDE  # steps of 40 s each
        assert now[1] > counted

    simulate(body, speeds=(1, 64, 64, 64, 64), steps=16, scale=100.0)


def test_work_is_offered_as_it_was_and_trained_on_beside_a_slow_exchange() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(6, *NAMES[:3])
        for name in NAMES[:3]:
            events = [event for number, event in swarm.nodes[name].rounds.items() if number >= 2]
            assert sum(e["compute_seconds"] for e in events) > 0.97 * sum(e["seconds"] for e in events)
            done, counted, local, _ = work_in(swarm, name, 3)
            assert counted + local == pytest.approx(done, abs=3 * STRIDE), name

    simulate(body, speeds=(4, 4, 4), world=SimWorld(latency=0.2), codec="fp32")


def test_local_work_that_is_not_finite_is_dropped_and_the_node_goes_on() -> None:
    async def body(swarm: SimSwarm) -> None:
        clocked(swarm, "b").toy.vector[0] = math.nan
        began = last(swarm, "a")
        await swarm.until(lambda: swarm.all_agree(after=began + 2), within=300)
        assert np.isfinite(clocked(swarm, "b").toy.vector).all()
        assert np.isfinite(swarm.nodes["a"].method.saved().state.parameters).all()

    simulate(body, speeds=(4, 4, 4))


def test_samples_count_less_for_each_round_that_is_over_without_them() -> None:
    work = Aged()
    assert work.weigh() == 0
    work.add(12)
    assert work.weigh() == 12
    work.decided(counted=False)
    work.add(10)
    assert work.weigh() == 12 / 2 + 10
    work.decided(counted=False)
    assert work.weigh() == 12 / 3 + 10 / 2


def test_the_stalest_sample_counts_something() -> None:
    work = Aged()
    work.add(1)
    for _ in range(10):
        work.decided(counted=False)
    assert work.weigh() == 1


def test_what_counted_is_what_was_given_and_not_what_came_later() -> None:
    work = Aged()
    work.add(8)
    work.weigh()
    work.offer()
    work.add(6)  # beside the exchange
    work.weigh()  # in another call for the same round, which gives nothing to anybody
    work.decided(counted=True)
    assert work.weigh() == 6 / 2
    work.offer()
    work.decided(counted=True)
    assert work.weigh() == 0


def test_what_was_not_given_to_anybody_cannot_count() -> None:
    work = Aged()
    work.add(8)
    work.weigh()
    work.decided(counted=True)
    assert work.weigh() == 8 / 2
