"""What runs by seeds promise: nodes that hold the same records hold the same bits, and nobody's end stops another.

The contract of `protocols/methods/method.py` in the form that it has here (`test_exchange_conformance.py` has it for
methods with a step of all): work is in records, so it is lost where a record is, and S says which are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import simswarm
import trio
from probing import ProbingTrainer
from simswarm import Body, SimNode, SimSwarm
from tripwire import Struck, strike

from swarmnode.crdt.kinds import KINDS, key_of
from swarmnode.crdt.record import Record
from swarmnode.node.storage.checkpoints import newest_round
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.methods.seed import END_WITHIN, KIND, LACKING_FOR, MANY, Chain, Seed, SeedStand, _chains
from swarmnode.protocols.wire import RunQuery
from swarmnode.training.outer import OuterState
from swarmnode.training.seed import Tally

NAMES = ("a", "b", "c", "d", "e")
STEPS = 5
STEP = 0.4  # seconds
LR = 0.02
SWEPT = 2  # the round in which something happens
FEW = 6  # messages of a round that are tried
OVERHEAD = 320  # bytes of a record beside its steps


def simulate(body: Body, **options: Any) -> None:
    given = {"trainer": lambda name, peer: ProbingTrainer(peer, seconds_per_step=STEP), **options}
    inner = {"lr": LR, "warmup": 0}
    simswarm.simulate(body, method="seed", steps=STEPS, seconds_per_step=STEP, inner=inner, **given)


def seed_of(node: SimNode) -> Seed:
    assert isinstance(node.method, Seed)
    return node.method


async def begin(swarm: SimSwarm, names: tuple[str, ...]) -> None:
    """All these nodes in one run, about to do round SWEPT."""
    await swarm.begin(names)
    await swarm.past(SWEPT - 1, *names)


async def records_of(node: SimNode, author: str = "") -> list[Record]:
    found = await seed_of(node)._records.select(f"{KIND}/", author=author or None, limit=10_000)
    return [element for element in found if isinstance(element, Record)]


async def assert_all_hold_the_sum(swarm: SimSwarm, *names: str) -> None:
    """Once all rest, each has theta_0 and the bytes of all records, in any order; the records of all are the same."""
    for name in names:
        await swarm.nodes[name].session.pause()
    await trio.sleep(40)  # a repair, where a push was lost
    held, bits = [], []
    for name in names:
        method = seed_of(swarm.nodes[name])
        await method._add()
        records = await records_of(swarm.nodes[name])
        tally = Tally(np.zeros(method.saved().state.parameters.size, np.float32))
        for record in reversed(records):
            tally.add(0, record.author, int(record.key.split("/")[1]), record.value[1])  # type: ignore[index]
        saved = method.saved()
        assert np.array_equal(saved.state.momentum, tally.sums)
        assert np.array_equal(saved.state.parameters, tally.parameters(lr=LR, clip=1.0))
        held.append({record.id for record in records})
        bits.append((saved.state.parameters.tobytes(), method._hash))
        trainer = swarm.nodes[name].trainer
        assert isinstance(trainer, ProbingTrainer)
        for record in await records_of(swarm.nodes[name], swarm.peer(name)):  # each byte stands where its direction is
            round, (_, told) = int(record.key.split("/")[1]), record.value  # type: ignore[misc]
            assert all(trainer.told.get((round, step), byte) == byte for step, byte in enumerate(told))  # type: ignore
            assert (round, len(told) - 1) in trainer.told or not trainer.told or round < min(trainer.told)[0]  # type: ignore
    assert len(set(bits)) == 1 and all(each == held[0] for each in held)


def assert_nobody_waited(swarm: SimSwarm, names: tuple[str, ...], context: object = "") -> None:
    for name in names:
        longest = max(told["seconds"] for told in swarm.nodes[name].rounds.values() if told["round"] > 0)
        assert longest <= (STEPS + 1) * STEP + 0.5, (context, name, longest)


def at_messages(names: tuple[str, ...], most: int, struck: Struck) -> None:
    """`struck(swarm, victim, at)` at `most` of the messages of round SWEPT; the victim is each of `names` in turn."""

    async def done(swarm: SimSwarm) -> None:
        await swarm.past(SWEPT, *names)

    strike(simulate, partial(begin, names=names), done, names, most, struck)


def final_loss(names: tuple[str, ...], rounds: int) -> float:
    losses: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, names)
        await swarm.past(rounds, *names)
        losses.extend(swarm.nodes[name].rounds[max(swarm.nodes[name].rounds)]["loss"] for name in names)
        swarm.assert_equal_hashes_are_equal_bits()
        assert_nobody_waited(swarm, names)

    simulate(body)
    return max(losses)


def test_nodes_together_learn_more_than_one_alone() -> None:
    assert final_loss(NAMES[:4], 8) < 0.8 * final_loss(NAMES[:1], 8)


def test_nodes_that_end_their_run_end_at_the_same_bits() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", rounds=6, wait_peers=2)
        for name in "bc":
            await swarm.start(name, join="a", rounds=6)
        with trio.fail_after(120):
            for name in "abc":
                await swarm.nodes[name].session.finished.wait()
        last = [told["state_hash"] for told in (n.rounds[max(n.rounds)] for n in swarm.nodes.values())]
        assert len(set(last)) == 1
        assert len({n.method.saved().state.parameters.tobytes() for n in swarm.nodes.values()}) == 1
        assert {node.done for node in swarm.nodes.values()} == {6}

    simulate(body)


def test_a_slow_node_ends_with_the_others_and_its_steps_count() -> None:
    def paced(name: str, peer: str) -> ProbingTrainer:
        return ProbingTrainer(peer, seconds_per_step=4 * STEP if name == "c" else STEP)

    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", rounds=8, wait_peers=2)
        for name in "bc":
            await swarm.start(name, join="a", rounds=8)
        with trio.fail_after(60):
            for name in "abc":
                await swarm.nodes[name].session.finished.wait()
        assert len({n.method.saved().state.parameters.tobytes() for n in swarm.nodes.values()}) == 1
        slow = await records_of(swarm.nodes["a"], swarm.peer("c"))
        assert 0 < sum(len(record.value[1]) for record in slow) < 4 * STEPS  # type: ignore[index]

    simulate(body, trainer=paced)


@pytest.mark.parametrize("size", [2, 3])
def test_survivors_go_on_whichever_message_a_member_died_at(size: int) -> None:
    names = NAMES[:size]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.kill(victim)
        survivors = tuple(n for n in names if n != victim)
        await swarm.past(SWEPT + 3, *survivors, within=60)
        assert_nobody_waited(swarm, survivors, (size, victim, at))
        await assert_all_hold_the_sum(swarm, *survivors)

    at_messages(names, FEW, struck)


def test_all_hold_the_same_again_whichever_message_a_member_froze_at() -> None:
    names = NAMES[:3]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.world.freeze(swarm.peer(victim))
        await swarm.past(SWEPT + 3, *(n for n in names if n != victim), within=60)
        swarm.world.thaw(swarm.peer(victim))
        await trio.sleep(5)
        await assert_all_hold_the_sum(swarm, *names)

    at_messages(names, FEW, struck)


def test_a_round_can_be_cancelled_at_any_message_and_tells_what_it_has() -> None:
    names = NAMES[:2]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.nodes[victim].session._training.cancel()
        await swarm.past(SWEPT + 4, *names, within=60)
        await assert_all_hold_the_sum(swarm, *names)
        told = [len(record.value[1]) for record in await records_of(swarm.nodes["a"])]  # type: ignore[index]
        assert sum(told) >= STEPS * len(names) * (SWEPT + 3) - 1  # the step that was cut short

    at_messages(names, 2 * FEW, struck)


def test_the_sides_of_a_partition_go_on_and_hold_the_same_when_it_heals() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES)
        swarm.world.partition([[swarm.peer(n) for n in side] for side in (NAMES[:3], NAMES[3:])])
        await swarm.past(SWEPT + 8, *NAMES)
        assert seed_of(swarm.nodes["a"])._hash != seed_of(swarm.nodes["e"])._hash
        swarm.world.heal()
        await trio.sleep(60)
        assert_nobody_waited(swarm, NAMES)
        await assert_all_hold_the_sum(swarm, *NAMES)

    simulate(body)


def test_who_joins_late_adds_up_what_was_told_and_fetches_nothing() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await swarm.past(8, *NAMES[:3])
        late = await swarm.start("late", join="b")
        await swarm.until(lambda: bool(late.rounds), within=60)
        assert min(late.rounds) >= 8 and any(e["event"] == "caught_up" for e in late.events)
        assert not seed_of(late).catch_up._served
        await assert_all_hold_the_sum(swarm, *NAMES[:3], "late")

    simulate(body)


@pytest.mark.parametrize("why", ["records are gone", "it began elsewhere"])
def test_who_cannot_add_up_all_fetches_the_sum(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "records are gone":
        monkeypatch.setitem(KINDS, KIND, replace(KINDS[KIND], slots=3))

    def other(name: str, peer: str) -> ProbingTrainer:
        trainer = ProbingTrainer(peer, seconds_per_step=STEP)
        if name == "late" and why != "records are gone":
            trainer.toy.vector += 1
        return trainer

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        await swarm.past(8, *NAMES[:2])
        late = await swarm.start("late", join="b")
        await swarm.until(lambda: len(late.rounds) > 2, within=60)
        assert min(late.rounds) >= 8
        for node in swarm.nodes.values():
            await node.session.pause()
        await trio.sleep(40)
        for node in swarm.nodes.values():
            await seed_of(node)._add()
        assert len({n.method.saved().state.parameters.tobytes() for n in swarm.nodes.values()}) == 1
        assert len({seed_of(n)._hash for n in swarm.nodes.values()}) == 1
        chain = seed_of(swarm.nodes["a"])._chains[swarm.peer("late")]
        assert chain.records > 2

    simulate(body, trainer=other)


def test_a_paused_node_tells_what_it_has_and_holds_nobody_up() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        await trio.sleep(2.5 * STEP)
        before = len(await records_of(swarm.nodes["a"], swarm.peer("b")))
        await swarm.nodes["b"].session.pause()
        paused_in = swarm.nodes["a"].done
        await swarm.past(paused_in + 4, "a", within=60)
        records = await records_of(swarm.nodes["a"], swarm.peer("b"))
        assert len(records) == before + 1 and 0 < len(records[-1].value[1]) < STEPS  # type: ignore[index]
        swarm.nodes["b"].session.resume()
        await swarm.past(swarm.nodes["a"].done + 3, "a", "b", within=60)
        assert_nobody_waited(swarm, ("a",))
        await assert_all_hold_the_sum(swarm, "a", "b")

    simulate(body)


def test_who_pauses_while_it_hears_the_last_has_what_it_heard_on_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.begin("ab", rounds=7)
        node = swarm.nodes["a"]
        monkeypatch.setattr(seed_of(node), "_hear_the_last", partial(trio.sleep, END_WITHIN))  # b says nothing
        while not (node.done == 7 and node.session.phase == "exchanging"):  # noqa: ASYNC110 (nothing tells)
            await trio.sleep(0.01)
        await node.session.pause()
        with trio.fail_after(60):
            await node.session.finished.wait()
        assert newest_round(tmp_path / "a") == 7

    simulate(body)


def test_a_swarm_that_restarts_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await begin(swarm, NAMES[:3])
        await swarm.past(8, *NAMES[:3])
        for name in NAMES[:3]:
            await swarm.leave(name)
        stood, saved = swarm.nodes["a"].done, seed_of(swarm.nodes["a"])._added
        for name, join in (("a", None), ("b", "a"), ("c", "a")):  # their states are gone, as they lay in memory
            await swarm.start(name, join=join)
        await swarm.past(stood + 3, *NAMES[:3])
        assert all(min(swarm.nodes[name].rounds) >= stood - 1 for name in NAMES[:3])
        assert all(seed_of(swarm.nodes[name])._added > saved for name in NAMES[:3])

    simulate(body)


def test_who_began_elsewhere_goes_on_from_what_was_saved_where_nobody_is_left(tmp_path: Path) -> None:
    """As all do but the creator, where a run begins from a file: their trainers begin at what the seed says."""

    def other(name: str, peer: str) -> ProbingTrainer:
        trainer = ProbingTrainer(peer, seconds_per_step=STEP)
        trainer.toy.vector += name == "late"
        return trainer

    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await begin(swarm, NAMES[:2])
        late = await swarm.start("late", join="b")
        await swarm.until(lambda: len(late.rounds) > 2, within=60)
        for name in ("a", "b", "late"):
            await swarm.leave(name)
        before = late.method.saved()
        again = await swarm.start("late")
        await swarm.until(lambda: seed_of(again).place is not None, within=60)
        initial, added = seed_of(again)._tally.initial, seed_of(again)._added
        assert initial.tobytes() == seed_of(late)._tally.initial.tobytes() and not initial.any()
        assert again.method.saved().round >= before.round and added >= seed_of(late)._added

    simulate(body, trainer=other)


def test_who_is_cancelled_while_it_adds_stands_where_what_it_added_leads() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        for node in swarm.nodes.values():
            await node.session.pause()
        method, author = seed_of(swarm.nodes["a"]), "stranger"
        usual = method._parts.runner

        async def slow(work: Callable[[], Any]) -> Any:
            await trio.sleep(1)
            return await usual(work)

        method._parts = replace(method._parts, runner=slow)
        method._waiting = {author: {before: (before + 1, b"x") for before in range(-1, 99)}}
        began = trio.current_time()
        with trio.move_on_after(1.5):
            await method._add()
        assert trio.current_time() - began < 4
        assert method._chains[author].records == 2 and len(method._waiting[author]) == 98
        assert np.array_equal(method._parameters, method._tally.parameters(lr=LR, clip=1.0))
        told = method._hash
        method._parts = replace(method._parts, runner=usual)
        await method._stand()
        assert method._hash == told

    simulate(body)


def test_a_successor_begins_from_the_state_of_the_run_before(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        layout = ProbingTrainer(swarm.world.node("x").me, seconds_per_step=STEP).layout
        zeros, sums = np.zeros(layout.parameters, np.float32), np.ones(layout.parameters, np.float32)
        checkpoints = swarm._checkpoints_of("a", layout)
        assert checkpoints is not None
        checkpoints.save(Saved(0, OuterState(zeros, sums), zeros, (), "seed"))  # as `keep_parent` has it
        await begin(swarm, NAMES[:2])
        await assert_all_hold_the_sum(swarm, *NAMES[:2])  # and not what the run before had

    simulate(body)


def test_nobody_is_offered_a_state_that_is_half_replaced() -> None:
    """Who fetched it would add the same records twice, and tell the hash of the others."""

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        node, seen = seed_of(swarm.nodes["b"]), []
        before = node._tally, node._chains

        async def watched(work: Callable[[], Any]) -> Any:
            result = work()
            seen.append((node._tally is before[0], node._chains is before[1]))
            return result

        node._parts = replace(node._parts, runner=watched)
        assert await node._fetch(swarm.peer("a"))
        assert seen and all(tally == chains for tally, chains in seen) and node._tally is not before[0]

    simulate(body)


def test_one_that_died_has_its_records_from_others_and_goes_on_with_its_chain() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await swarm.past(5, *NAMES[:3])
        swarm.kill("b")
        told = len(await records_of(swarm.nodes["a"], swarm.peer("b")))
        await trio.sleep(1)
        await swarm.start("b", join="a")
        await swarm.past(swarm.nodes["a"].done + 12, *NAMES[:3])
        await assert_all_hold_the_sum(swarm, *NAMES[:3])
        assert seed_of(swarm.nodes["c"])._chains[swarm.peer("b")].records > told + 2

    simulate(body)


def test_a_member_that_tells_of_records_that_nobody_has_keeps_no_newcomer_out() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        served = seed_of(swarm.nodes["b"])._parts.rpc._server.methods
        honest = served["seed.stand"]

        async def lie(peer: str, query: RunQuery) -> SeedStand:
            stand: SeedStand = await honest.handler(peer, query)
            return replace(stand, records=MANY)

        served["seed.stand"] = replace(honest, handler=lie)
        del served["seed.offer"]
        await swarm.start("c", join="b")
        await swarm.until(lambda: len(swarm.nodes["c"].rounds) > 1, within=60)

    simulate(body)


def test_what_tells_nothing_is_counted_and_moves_nothing() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        sync = seed_of(swarm.nodes["b"])._sync
        values: list[Any] = [b"", (-1, b""), (-1, b"x" * 1025), (90_000_000, b"x"), ("", b"x"), (-2, b"x"), (-1, 3)]
        for number, value in enumerate(values):
            await sync.write(key_of(KIND, 50_000_000 + number, 0), value)
        method = seed_of(swarm.nodes["a"])
        chain = method._chains[swarm.peer("b")].round
        for subject in (1, "b"):  # a second record of a round, which no evidence would tell of
            await sync.write(key_of(KIND, 60_000_000, subject), (chain, b"x"))
        await swarm.past(SWEPT + 2, *NAMES[:2])
        assert method.lies.count(swarm.peer("b")) >= len(values) + 2
        assert swarm.nodes["a"].done < 100
        await assert_sums_agree(swarm)

    async def assert_sums_agree(swarm: SimSwarm) -> None:
        for name in "ab":
            await swarm.nodes[name].session.pause()
        await trio.sleep(40)
        for name in "ab":
            await seed_of(swarm.nodes[name])._add()
        assert len({seed_of(n)._hash for n in swarm.nodes.values()}) == 1

    simulate(body)


def test_what_builds_on_nothing_waits_up_to_a_bound_and_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, KIND, replace(KINDS[KIND], slots=8))

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        method, liar = seed_of(swarm.nodes["a"]), swarm.peer("c")
        for number in range(20):
            await seed_of(swarm.nodes["c"])._sync.write(
                key_of(KIND, 50_000_001 + number, 0), (50_000_000 + number, b"x")
            )
        before = method._chains[swarm.peer("b")].records
        await swarm.past(SWEPT + 3, "a", "b")
        assert 0 < len(method._waiting[liar]) <= 8 and swarm.nodes["a"].done < 100
        assert method._chains[swarm.peer("b")].records > before

    simulate(body)


def test_a_record_that_builds_on_one_that_nobody_has_stops_no_training() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await seed_of(swarm.nodes["c"])._sync.write(key_of(KIND, 50_000_001, 0), (50_000_000, b"x"))
        await trio.sleep(8 * LACKING_FOR)
        for name in "ab":  # after one, two and four times so long
            assert 0 < sum(event["event"] == "abandoned" for event in swarm.nodes[name].events) <= 3
        before = swarm.nodes["a"].done
        await swarm.past(before + 10, "a", "b")

    simulate(body)


def test_one_copy_of_the_state_is_made_at_a_time_however_many_ask() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        method = seed_of(swarm.nodes["a"])
        usual, at_once, most = method._parts.runner, 0, 0

        async def slow(work: Any) -> Any:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await trio.sleep(1)
            at_once -= 1
            return await usual(work)

        method._trainer.load = lambda parameters: None  # type: ignore[method-assign]
        method._parts = replace(method._parts, runner=slow)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(method._on_offer, swarm.peer("b"), RunQuery(simswarm.RUN))
        assert most <= 2  # and one that adds records

    simulate(body)


@pytest.mark.parametrize("round", [10**8 - 2, 10**8 - 1])
def test_a_record_of_the_last_round_that_there_can_be_takes_nobody_there(round: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        liar = seed_of(swarm.nodes["c"])
        await liar._sync.write(key_of(KIND, round, 0), (liar._chains[swarm.peer("c")].round, b"x"))
        before = [swarm.nodes[name].done for name in NAMES[:2]]
        await trio.sleep(60)
        for name, done in zip(NAMES[:2], before, strict=True):
            method = seed_of(swarm.nodes[name])
            assert done + 5 < method._round < 200
            assert method._chains[swarm.peer(name)].round >= method._round - 2  # and what it does is told
            assert not any(method.lies.count(swarm.peer(other)) for other in NAMES[:2])

    simulate(body)


def test_chains_of_another_form_are_none() -> None:
    row = ["author", 3, 2, b"digest"]
    assert _chains(msgpack.packb([row])) == {"author": Chain(3, 2, b"digest")}
    for place, wrong in ((0, 7), (1, "3"), (1, 10**8), (2, None), (2, -1), (2, (1 << 64) - 1), (3, 5)):
        with pytest.raises(ValueError, match="another form"):
            _chains(msgpack.packb([[*row[:place], wrong, *row[place + 1 :]]]))


def test_a_step_costs_a_byte_and_its_share_of_a_record() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        for record in await records_of(swarm.nodes["a"]):
            told = len(record.value[1])  # type: ignore[index]
            assert told == STEPS and len(record.sealed) <= told + OVERHEAD

    simulate(body)


def test_the_longest_record_fits() -> None:
    assert KINDS[KIND].max_size >= 1024 + OVERHEAD
