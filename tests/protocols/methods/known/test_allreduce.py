"""The all-reduce gives every seat the same bits, names who fails it, loses no work, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import trio
from reducing import P, a_roster, peers, reduce_all

from swarmnode.protocols.methods.known.messages import PartsMissing
from swarmnode.protocols.methods.known.partition import BATCH, CHUNK, BufferPool, Chunks, grid_of
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.testing.consensus import weighted_sum
from swarmnode.testing.parts import parts
from swarmnode.testing.simnet import SimWorld
from swarmnode.training.codecs import CODECS, codec

Simulated = Callable[..., None]


@pytest.mark.parametrize("codec_name", ["fp32", "fp16", "int8"])
def test_every_seat_gets_the_same_bits_of_the_weighted_mean(simulated: Simulated, codec_name: str) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 4, codec_name)
        weights = (1, 2, 3, 0)
        results = await reduce_all(members, a_roster(members, weights=weights))
        first, *others = results.values()
        assert isinstance(first, np.ndarray)
        assert all(isinstance(r, np.ndarray) and r.tobytes() == first.tobytes() for r in others)
        exact = sum(w * m.values for w, m in zip(weights, members, strict=True)) / 6
        assert np.abs(first - exact).max() < {"fp32": 1e-6, "fp16": 1e-2, "int8": 0.1}[codec_name]

    simulated(main)


@pytest.mark.parametrize(
    ("count", "group_size", "weights"),
    [
        (4, 2, (1, 2, 3, 4)),
        (7, 3, (3, 0, 1, 2, 2, 0, 5)),  # a column with a hole, and some who only listen
        (9, 2, (1, 2, 0, 0, 0, 0, 0, 0, 0)),  # groups in which nobody worked
        (5, 1, (1, 2, 3, 4, 5)),
    ],
)
@pytest.mark.parametrize("codec_name", ["fp32", "topk"])
def test_all_groups_get_the_same_bits_of_the_mean_of_all(
    simulated: Simulated, codec_name: str, count: int, group_size: int, weights: tuple[int, ...]
) -> None:
    size = 12_000

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, count, codec_name, size, group_size)
        for round in range(3):
            roster = a_roster(members, round=round, weights=weights)
            grid = grid_of(roster, size, group_size)
            assert len(grid.groups) == -(-count // group_size)
            results = list((await reduce_all(members, roster)).values())
            assert all(isinstance(r, np.ndarray) for r in results)
            assert len({np.asarray(r).tobytes() for r in results}) == 1
            if codec_name == "fp32":
                exact = weighted_sum([m.values for m in members], weights)
                assert np.abs(np.asarray(results[0]) - exact).max() < 1e-6
            assert [m.allreduce.commit(roster) for m in members] == [w > 0 for w in weights]

    simulated(main)


@pytest.mark.parametrize("codec_name", ["int8", "int4"])
def test_what_groups_leave_out_of_their_sums_comes_with_a_later_round(simulated: Simulated, codec_name: str) -> None:
    size, rounds = 16_384, 12

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 6, codec_name, size, 2)
        exact = np.mean([m.values for m in members], axis=0)
        total, errors = np.zeros(size), []
        for round in range(rounds):
            roster = a_roster(members, round=round)
            results = await reduce_all(members, roster)
            total += np.asarray(results[members[0].me])
            errors.append(float(np.abs(total / (round + 1) - exact).mean()))
            assert all(m.allreduce.commit(roster) for m in members)
        assert errors[-1] < errors[0] / 4

    simulated(main)


@pytest.mark.parametrize("victim", range(6))
def test_whoever_dies_in_a_grid_is_named_by_those_who_need_it(simulated: Simulated, victim: int) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 6, group_size=2)
        lost = members[victim]
        world.kill(lost.me)
        rest = [m for m in members if m is not lost]
        results: dict[str, Vector | PartsMissing] = {}
        with trio.move_on_after(9.0):  # those who have nothing to do with it are told by the leader
            await reduce_all(rest, a_roster(members), 60.0, results)
        named = {p for r in results.values() if isinstance(r, PartsMissing) for p in r.peers}
        assert named == {lost.me}

    simulated(main)


@pytest.mark.parametrize("codec_name", CODECS)
def test_a_vector_of_many_cells_is_reduced_as_the_definition_says(simulated: Simulated, codec_name: str) -> None:
    size, weights = 3 * CHUNK + 12_345, (1, 2, 4)
    chosen = codec(codec_name)

    def through(values: Vector) -> Vector:
        return chosen.decode(chosen.encode(values), values.size)

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 3, codec_name, size)
        roster = a_roster(members, weights=weights)
        exact = np.empty(size, np.float32)
        for part in parts(roster, size):
            chunks = Chunks((part,), chosen)
            for place in map(chunks.elements, range(chunks.count)):
                exact[place] = through(weighted_sum([through(m.values[place]) for m in members], weights))
        for result in (await reduce_all(members, roster)).values():
            assert isinstance(result, np.ndarray) and result.tobytes() == exact.tobytes()

    simulated(main)


def test_the_mean_of_the_first_cells_comes_back_while_the_last_are_sent(simulated: Simulated) -> None:
    size, bandwidth = 8 * BATCH * CHUNK, 10_000_000

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 2, "int8", size)
        roster = a_roster(members)
        (theirs,) = (part for part in parts(roster, size) if part.owner == members[1].me)
        mean = members[0].allreduce._mean = np.zeros(size, np.float32)
        (mine,) = (part for part in parts(roster, size) if part.owner == members[0].me)
        both = False

        async def look() -> None:
            nonlocal both
            while not both:
                await trio.sleep(0.02)
                both = mean[theirs.stop - 1] == 0 != mean[theirs.start] and mean[mine.stop - 1] == 0 != mean[mine.start]

        nursery.start_soon(look)
        await reduce_all(members, roster, within=60.0)
        assert both
        assert members[0].allreduce.rates.keys() == {members[1].me}

    simulated(main, bandwidth=bandwidth)


def test_rounds_use_the_memory_of_those_before_and_let_go_of_what_no_round_needs() -> None:
    pool = BufferPool()
    first = pool.take(1000)
    pool.give(first)
    assert pool.take(1400).obj is first.obj  # as when a part grows because its neighbour is gone
    pool.give(first)
    assert pool.take(100).obj is not first.obj
    for _ in range(2):
        pool.next_round()
    assert pool.take(1000).obj is first.obj
    pool.give(first)
    for _ in range(3):
        pool.next_round()
    assert pool.take(1000).obj is not first.obj


def test_what_an_encoding_left_out_comes_with_a_later_round(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 3)
        total = np.zeros(P)
        for round in range(20):
            roster = a_roster(members, round=round)
            results = await reduce_all(members, roster)
            total += results[members[0].me]
            assert all(m.allreduce.commit(roster) for m in members)
        exact = np.mean([m.values for m in members], axis=0)
        single = np.abs(results[members[0].me] - exact).max()
        assert np.abs(total / 20 - exact).max() < single / 4

    simulated(main)


def test_an_attempt_that_does_not_count_leaves_no_trace_in_the_residuals(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 3)
        failed, counted = a_roster(members), a_roster(members[:2], ballot=3)
        await reduce_all(members, failed)
        results = await reduce_all(members[:2], counted)
        assert not members[2].allreduce.commit(counted)  # its work is not in that result
        assert not members[2].allreduce.sent.export().any()
        assert all(m.allreduce.commit(counted) for m in members[:2])
        assert all(isinstance(r, np.ndarray) for r in results.values())

    simulated(main)


def test_a_dead_member_is_named_by_whoever_needs_its_part(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 4)
        world.kill(members[3].me)
        results = await reduce_all(members[:3], a_roster(members))
        assert all(isinstance(r, PartsMissing) and members[3].me in r.peers for r in results.values())

    simulated(main)


def test_the_first_complaint_names_the_living_member_that_sends_nothing(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 4)
        began = trio.current_time()
        results = await reduce_all(members[:3], a_roster(members), within=3.0)
        assert trio.current_time() - began < 3.5  # owners give up long before those who wait for owners
        assert all(isinstance(r, PartsMissing) and r.peers == (members[3].me,) for r in results.values())

    simulated(main)


def test_bytes_that_do_not_decode_are_their_senders_fault(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 2, "fp32")
        liar = members[1].allreduce
        encode = liar.sent.encode_range

        def poison(start: int, stop: int, values: Vector, out: memoryview) -> memoryview:
            encode(start, stop, values, out)
            out[:] = np.full(stop - start, np.nan, "f4").tobytes()
            return out

        liar.sent.encode_range = poison  # type: ignore[method-assign, assignment]
        results = await reduce_all(members, a_roster(members), within=2.0)
        honest = results[members[0].me]
        assert isinstance(honest, PartsMissing) and honest.peers == (members[1].me,)

    simulated(main)


def test_values_too_large_to_encode_count_as_nothing_and_crash_nobody(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 2, "fp32")
        huge = np.finfo(np.float32).max
        members[0].values = np.full(P, huge, "f4")
        members[0].allreduce.sent.restore(np.full(P, huge, "f4"))
        roster = a_roster(members)
        results = await reduce_all(members, roster)
        assert all(isinstance(r, np.ndarray) and np.isfinite(r).all() for r in results.values())
        assert np.allclose(results[members[0].me], members[1].values / 2)
        assert members[0].allreduce.commit(roster)
        assert not members[0].allreduce.sent.export().any()

    simulated(main)


def test_nobody_worked_so_nothing_moves(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 2)
        results = await reduce_all(members, a_roster(members, weights=(0, 0)))
        assert not any(np.asarray(r).any() for r in results.values())

    simulated(main)


def test_only_the_last_attempt_and_the_last_round_are_still_offered(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 2)
        for round in (0, 1, 2, 7, 8):  # rounds in between were skipped by a catch-up
            for ballot in range(5):
                roster = a_roster(members, round=round, ballot=ballot)
                await reduce_all(members, roster)
                assert all(len(m.bulk._offers) <= 4 for m in members)
            for member in members:
                member.allreduce.commit(roster)
                assert {key[2] for key in member.bulk._offers} == {roster.roster_id}

    simulated(main)


def test_rates_of_those_who_left_are_forgotten(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await peers(world, nursery, 2)
        members[0].allreduce.rates = {"gone": 1.0, members[1].me: 2.0}
        await reduce_all(members, a_roster(members))
        assert members[0].allreduce.rates == {members[1].me: 2.0}

    simulated(main)
