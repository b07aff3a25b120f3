"""A second attempt at a round uses what the first one brought, and comes to what it would have come to without it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from reducing import Peer, a_roster, peers, reduce_all
from tripwire import Tripwire, spread

from swarmnode.protocols.methods.known.messages import PartsMissing, RoundRoster
from swarmnode.protocols.methods.known.partition import CHUNK, BufferPool, Chunks, grid_of
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.testing.consensus import weighted_sum
from swarmnode.testing.simnet import SimWorld
from swarmnode.training.codecs import codec

Simulated = Callable[..., None]
SIZE = 13 * CHUNK + 4321  # four parts of some chunks each, the last shorter
BANDWIDTH = 10_000_000
WEIGHTS = (1, 2, 4, 3)


def through(values: Vector, codec_name: str) -> Vector:
    chosen = codec(codec_name)
    return chosen.decode(chosen.encode(values), values.size)


def mean_by_definition(members: list[Peer], roster: RoundRoster, codec_name: str) -> Vector:
    """What a swarm without residuals comes to by `roster`, chunk by chunk."""
    weights, exact = [seat.weight for seat in roster.seats], np.empty(SIZE, np.float32)
    for column in grid_of(roster, SIZE, 16).columns:
        chunks = Chunks(column.parts, codec(codec_name))
        for place in map(chunks.elements, range(chunks.count)):
            exact[place] = through(
                weighted_sum([through(m.values[place], codec_name) for m in members], weights), codec_name
            )
    return exact


def outcome(members: list[Peer], results: dict[str, Vector | PartsMissing], roster: RoundRoster) -> list[bytes]:
    """The mean, and what each member carries into the next round; all are at the end of the round."""
    means = [np.asarray(results[m.me]).tobytes() for m in members]
    assert len(set(means)) == 1
    assert [m.allreduce.commit(roster) for m in members] == [seat.weight > 0 for seat in roster.seats]
    left = [(m.allreduce.sent, m.allreduce._means.residual) for m in members]
    return [means[0], *(residual.export().tobytes() for both in left for residual in both)]


async def until_message(world: SimWorld, number: int, work: Callable[[], Awaitable[object]]) -> None:
    """Do `work` until so many messages have been sent."""
    wire = Tripwire(world)
    async with trio.open_nursery() as nursery:

        async def stop() -> None:
            await wire.reached(number)
            nursery.cancel_scope.cancel()

        nursery.start_soon(stop)
        await work()
        nursery.cancel_scope.cancel()


def sent_by(members: list[Peer]) -> int:
    return sum(m.network.traffic().bytes_out for m in members)


def messages_of_an_attempt(simulated: Simulated, codec_name: str) -> int:
    sent = 0

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nonlocal sent
        members = await peers(world, nursery, 4, codec_name, SIZE)
        wire = Tripwire(world)
        await reduce_all(members, a_roster(members, weights=WEIGHTS))
        sent = wire.sent

    simulated(main, bandwidth=BANDWIDTH)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("codec_name", ["int8", "topk"])
def test_wherever_an_attempt_ends_the_next_comes_to_the_same_bits_as_one_alone(
    simulated: Simulated, codec_name: str
) -> None:
    """The mean, and all residuals, are those of a swarm in which the first attempt never was."""
    found: list[list[bytes]] = []

    async def main(world: SimWorld, nursery: trio.Nursery, at: int) -> None:
        members = await peers(world, nursery, 4, codec_name, SIZE)
        warm = a_roster(members, weights=WEIGHTS)
        await reduce_all(members, warm)
        assert all(m.allreduce.commit(warm) for m in members)
        first = a_roster(members, round=1, weights=WEIGHTS)
        if at:
            await until_message(world, at, lambda: reduce_all(members, first))
        world.kill(members[1].me)
        rest = [m for m in members if m is not members[1]]
        again = a_roster(rest, round=1, ballot=1, weights=(1, 4, 3), cut_by=first.cutters)
        found.append(outcome(rest, await reduce_all(rest, again), again))

    total = messages_of_an_attempt(simulated, codec_name)
    for at in (0, *spread(total, 6), 2 * total):
        simulated(lambda world, nursery, at=at: main(world, nursery, at), bandwidth=BANDWIDTH)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(("moment", "most"), [(0.5, 0.75), (0.9, 0.63), (2.0, 0.63)])
def test_what_has_arrived_is_not_sent_again(simulated: Simulated, moment: float, most: float) -> None:
    """Of a whole attempt of three, half are the means; of the values, a quarter had gone to the one that froze."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 4, "int8", SIZE)
        rest = members[:3]
        began, before = trio.current_time(), sent_by(rest)
        alone = a_roster(rest)
        await reduce_all(rest, alone)
        whole, usual = sent_by(rest) - before, trio.current_time() - began
        assert all(m.allreduce.commit(alone) for m in rest)
        first = a_roster(members, round=1)
        with trio.move_on_after(moment * usual):
            await reduce_all(members, first)
        world.freeze(members[3].me)
        began, before = trio.current_time(), sent_by(rest)
        results = await reduce_all(rest, a_roster(rest, round=1, ballot=1, cut_by=first.cutters))
        assert sent_by(rest) - before < most * whole
        assert trio.current_time() - began < 0.9 * usual
        assert len({np.asarray(r).tobytes() for r in results.values()}) == 1

    simulated(main, bandwidth=BANDWIDTH)


def test_what_is_encoded_is_not_encoded_again(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 4, "int8", SIZE)
        first = a_roster(members)
        await reduce_all(members, first)
        rest = members[:3]
        for member in rest:
            member.allreduce.sent.encode_range = refused  # type: ignore[method-assign, assignment]
        again = a_roster(rest, ballot=1, cut_by=first.cutters)
        results = await reduce_all(rest, again)
        exact = mean_by_definition(rest, again, "int8")
        assert all(np.asarray(r).tobytes() == exact.tobytes() for r in results.values())

    simulated(main)


def refused(*_: object) -> None:
    raise AssertionError("nothing was to be encoded")


def test_one_after_another_may_fail(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 5, "fp16", SIZE)
        first = a_roster(members)
        second = a_roster(members[1:], ballot=1, cut_by=first.cutters)
        third = a_roster(members[1:4], ballot=2, cut_by=second.cutters)
        for roster, number, lost in ((first, 300, members[0]), (second, 150, members[4])):
            seated = [m for m in members if m.me in roster.peers]
            await until_message(world, number, lambda roster=roster, seated=seated: reduce_all(seated, roster))  # type: ignore[misc]
            world.kill(lost.me)
        results = await reduce_all(members[1:4], third)
        exact = mean_by_definition(members[1:4], third, "fp16")
        assert all(np.asarray(r).tobytes() == exact.tobytes() for r in results.values())
        assert all(m.allreduce.commit(third) for m in members[1:4])

    simulated(main, bandwidth=BANDWIDTH)


@pytest.mark.parametrize("at", [1, 100, 10_000])
def test_members_who_come_to_it_from_elsewhere_get_the_same_mean(simulated: Simulated, at: int) -> None:
    """A joiner, one that was in another attempt, one whose values are others now, and one that was started again."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 7, "int8", SIZE)
        lost, joiner, elsewhere, changed, restarted, *_ = members
        before = [m for m in members if m is not joiner and m is not elsewhere]
        first, other = a_roster(before), a_roster([elsewhere, changed])

        async def both() -> None:
            async with trio.open_nursery() as tasks:
                tasks.start_soon(reduce_all, before, first)
                tasks.start_soon(reduce_all, [elsewhere], other)

        await until_message(world, at, both)
        world.kill(lost.me)
        changed.values = changed.values[::-1].copy()
        restarted.start_again()
        restarted.values = restarted.values[::-1].copy()
        again = a_roster(members[1:], ballot=1, cut_by=first.cutters)
        results = await reduce_all(members[1:], again)
        exact = mean_by_definition(members[1:], again, "int8")
        assert all(np.asarray(r).tobytes() == exact.tobytes() for r in results.values())
        assert all(m.allreduce.commit(again) for m in members[1:])

    simulated(main, bandwidth=BANDWIDTH)


def test_work_without_weight_in_the_next_attempt_is_not_sent_and_not_settled(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 3, "int8", SIZE)
        first = a_roster(members)
        await reduce_all(members, first)
        again = a_roster(members, ballot=1, weights=(1, 0, 1), cut_by=first.cutters)
        results = await reduce_all(members, again)
        exact = mean_by_definition(members, again, "int8")
        assert all(np.asarray(r).tobytes() == exact.tobytes() for r in results.values())
        assert [m.allreduce.commit(again) for m in members] == [True, False, True]
        assert [m.allreduce.sent.is_zero() for m in members] == [False, True, False]

    simulated(main)


def test_residuals_that_work_returned_to_are_encoded_anew(simulated: Simulated) -> None:
    """As where a call was cancelled, and its work put into the residual, before the round is taken up again."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 2, "fp32", SIZE)
        first = a_roster(members)
        await reduce_all(members, first)
        allreduce = members[0].allreduce
        allreduce.rollback()
        allreduce.sent.give_back(members[1].values)
        again = a_roster(members, ballot=1, cut_by=first.cutters)
        results = await reduce_all(members, again)
        exact = (members[0].values + 2 * members[1].values) / 2
        assert all(np.allclose(np.asarray(r), exact, atol=1e-5) for r in results.values())

    simulated(main)


def test_several_groups_begin_anew(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 7, "fp32", SIZE, group_size=3)
        first = a_roster(members)
        await until_message(world, 400, lambda: reduce_all(members, first))
        world.kill(members[0].me)
        for seated in (members[1:], members[1:4]):  # two groups, and then one
            again = a_roster(seated, ballot=len(members) - len(seated), cut_by=first.cutters)
            results = await reduce_all(seated, again)
            exact = weighted_sum([m.values for m in seated], [1] * len(seated))
            assert len({np.asarray(r).tobytes() for r in results.values()}) == 1
            assert all(np.abs(np.asarray(r) - exact).max() < 1e-6 for r in results.values())
        assert all(m.allreduce.commit(again) for m in members[1:4])

    simulated(main, bandwidth=BANDWIDTH)


def test_rounds_that_are_tried_again_take_no_more_memory_from_round_to_round(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 4, "int8", SIZE)
        pools = [member.allreduce._pool for member in members]
        taken: list[int] = []
        for pool in pools:
            count_what_is_out(pool, taken)
        out = []
        for round in range(6):
            first = a_roster(members, round=round)
            await until_message(world, 150 * round + 1, lambda first=first: reduce_all(members, first))  # type: ignore[misc]
            again = a_roster(members[: 4 - round % 2], round=round, ballot=1, cut_by=first.cutters)
            await reduce_all(members[: 4 - round % 2], again)
            for member in members:
                member.allreduce.commit(again)
            out.append(len(taken))
        for member in members:
            member.allreduce.commit(a_roster(members, round=round + 1))
        assert max(out[2:]) <= max(out[:2])
        assert not taken

    simulated(main, bandwidth=BANDWIDTH)


def count_what_is_out(pool: BufferPool, taken: list[int]) -> None:
    """Keep in `taken` one entry for each piece of memory that the pool handed out and did not get back."""
    take, give = pool.take, pool.give

    def counted_take(size: int) -> memoryview:
        found = take(size)
        taken.append(id(found.obj))
        return found

    def counted_give(view: memoryview) -> None:
        taken.remove(id(view.obj))
        give(view)

    pool.take, pool.give = counted_take, counted_give  # type: ignore[method-assign]
