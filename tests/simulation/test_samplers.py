"""Swarms on simnet in which some nodes only sample for policies that others train."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from simpolicy import Groups, SimPolicy
from simswarm import SimSwarm

from swarmnode.protocols.methods.rollouts import sapo
from swarmnode.protocols.methods.rollouts.samplers import SamplerTally
from swarmnode.protocols.methods.rollouts.sapo import IDLE_AFTER, LOOK_AGAIN, Sapo, SapoSampler
from swarmnode.protocols.methods.rollouts.weights import MAX_PATCHES, WEIGHTS, Newest
from swarmnode.protocols.methods.trainer import Answered, TrainerDied, TrainerHeld, Vector
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.shard_wire import NoRoom
from swarmnode.testing.simnet import SimWorld
from swarmnode.training.codecs.floats import from_bf16
from swarmnode.training.outer import Layout
from swarmnode.training.rl.groups import Learned
from swarmnode.training.rl.tasks import NAMES, TaskRef

STALENESS = 4  # the run's bound, by default
BATCH = 8  # questions of a batch, by default
Body = Callable[[SimSwarm], Awaitable[None]]
Make = Callable[[str], SimPolicy]


class OtherWeights(SimPolicy):
    """Samples with its own shares, whatever weights it is given."""

    def load(self, vector: Vector) -> None:
        assert np.isfinite(vector).all()


class PicksQuestions(SimPolicy):
    """Answers questions of its own choice."""

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        easy = [TaskRef("digits/swap", 5, seed) for seed in range(len(tasks))]
        return await super().answer(easy, version=version, policy=policy)


class CannotAskAll(SimPolicy):
    """Answers what comes before the first question that it cannot make: every eighth, by its seed."""

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        first = next((place for place, task in enumerate(tasks) if not task.seed % 8), len(tasks))
        return await super().answer(tasks[:first], version=version, policy=policy)


def simulate(
    body: Body,
    *,
    trainers: str,
    samplers: str,
    odd: dict[str, type[SimPolicy]] | None = None,
    world: SimWorld | None = None,
    **rollouts: Any,
) -> None:
    """`body` with a swarm whose nodes have all begun; `odd` nodes have such a policy."""

    kinds, world = odd or {}, world or SimWorld(latency=0.05)

    async def begun(swarm: SimSwarm) -> None:
        for name in trainers + samplers:
            await swarm.start(name, join=None if name == "a" else "a", samples=name in samplers)
        await body(swarm)

    def policy(name: str, peer: str) -> SimPolicy:
        return kinds.get(name, SimPolicy)(peer, knows=0.5 if name in kinds else 0.2)

    simswarm.simulate(begun, world=world, method="sapo", trainer=policy, rollouts=rollouts)


def trainer_of(swarm: SimSwarm, name: str) -> Sapo:
    method = swarm.nodes[name].method
    assert isinstance(method, Sapo)
    return method


def sampler_of(swarm: SimSwarm, name: str) -> SapoSampler:
    method = swarm.nodes[name].method
    assert isinstance(method, SapoSampler)
    return method


def tally(swarm: SimSwarm, name: str, *, by: str = "a") -> SamplerTally:
    return trainer_of(swarm, by).samplers.tally(swarm.peer(name))


def learned(swarm: SimSwarm, name: str) -> list[dict[str, Any]]:
    return [event["learned"] for event in swarm.nodes[name].rounds.values()]


def test_trainers_learn_from_what_others_sample_for_them() -> None:
    async def body(swarm: SimSwarm) -> None:
        def chosen() -> list[str]:
            return sorted(
                name for name in "ab" for each in "cdef" if sampler_of(swarm, each).trainer == swarm.peer(name)
            )

        await swarm.until(lambda: chosen() == [*"aabb"])  # those who looked at one moment part again
        first = max(swarm.nodes["a"].rounds) + 5
        await swarm.round_done(first + 10, *"ab")
        for name in "ab":
            told = [swarm.nodes[name].rounds[round]["learned"] for round in range(first, first + 10)]
            assert all(each["sampled"] > 0 for each in told)
            assert max(each["staleness"] for each in told) <= STALENESS
            assert all(each["own"] == 1 for each in told), "who is sampled for asks itself little"
            assert not any(each["caught"] for each in learned(swarm, name))
        for name in "cdef":
            told = swarm.nodes[name].rounds[max(swarm.nodes[name].rounds)]["sampled"]
            assert told["given"] >= told["accepted"] > 0 and not told["refused"]
        assert all(len(trainer_of(swarm, name).rollouts.pool) for name in "ab"), "trainers still share"

    simulate(body, trainers="ab", samplers="cdef")


def test_a_policy_that_learns_nothing_more_is_sampled_for_on() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(10, "a", "c")
        trainer = swarm.nodes["a"].trainer
        trainer.load(trainer.parameters() * 0 + 1)  # all of its answers are right: there is nothing to learn from
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 30, "a")
        told = tally(swarm, "c")
        assert told.came - told.accepted < 30 and not told.caught
        assert all(each["checked"] for each in learned(swarm, "a")[-10:])

    simulate(body, trainers="a", samplers="c")


def test_who_samples_with_other_weights_is_caught_in_three_rounds_and_alone_pays() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.until(lambda: tally(swarm, "d").came > 0)
        first = max(swarm.nodes["a"].rounds, default=-1) + 1
        await swarm.round_done(first + 3, "a")
        assert tally(swarm, "d").caught == "logprobs"
        assert tally(swarm, "d").accepted == 0
        assert trainer_of(swarm, "a").samplers.standing(swarm.peer("d")) == 0
        assert tally(swarm, "c").accepted > 0 and not tally(swarm, "c").caught
        await swarm.round_done(first + 12, "a")
        assert tally(swarm, "d").accepted == 0, "nothing of a liar's is learned from any more"
        assert any("what this node samples is refused" in text for text in swarm.nodes["d"].session.warnings.values())

    simulate(body, trainers="a", samplers="cd", odd={"d": OtherWeights})


def test_who_picks_its_questions_is_refused_before_anybody_looks_at_its_answers() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.until(lambda: tally(swarm, "d").came > 0)
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 2, "a")
        assert tally(swarm, "d").caught == "cherry-picked" and tally(swarm, "d").accepted == 0
        assert tally(swarm, "c").accepted > 0

    simulate(body, trainers="a", samplers="cd", odd={"d": PicksQuestions})


class HeldAsItLearns(SimPolicy):
    """The first time that it is to learn from what others sampled, its owner pauses it, or it dies."""

    error: type[TrainerDied] = TrainerHeld

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        self.given = [*getattr(self, "given", ()), *([sampled] if sampled else ())]
        if len(self.given) == 1 and sampled:
            raise self.error("the simulation says so")
        return await super().learn(pool, sampled, probation)


class DiesAsItLearns(HeldAsItLearns):
    error = TrainerDied


@pytest.mark.parametrize("kind", [HeldAsItLearns, DiesAsItLearns])
def test_what_others_sampled_is_learned_from_after_a_pause_and_given_once_to_what_dies(
    kind: type[HeldAsItLearns],
) -> None:
    async def body(swarm: SimSwarm) -> None:
        policy = swarm.nodes["a"].trainer
        assert isinstance(policy, HeldAsItLearns)
        await swarm.until(lambda: len(getattr(policy, "given", ())) > 2)
        first, *later = policy.given
        again = [group for group in first if any(group in groups for groups in later)]
        assert len(again) == (len(first) if kind is HeldAsItLearns else 0)

    simulate(body, trainers="a", samplers="bc", odd={"a": kind})


class DiesLate(SimPolicy):
    """Dies once, when its update is done and before it says so."""

    died = False

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        told = await super().learn(pool, sampled, probation)
        if not self.died and told.sampled:
            self.died = True
            raise TrainerDied("the simulation says so")
        return told


def test_an_update_that_a_dying_trainer_process_left_behind_makes_nobody_a_liar() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(15, "a")
        assert [event["event"] for event in swarm.nodes["a"].events].count("abandoned") == 1
        assert not tally(swarm, "c").caught and tally(swarm, "c").accepted > 50

    simulate(body, trainers="a", samplers="c", odd={"a": DiesLate})


class EverybodyIsNew:
    """A ledger in which nobody has done any work that counts."""

    def standing(self, peer: str) -> float:
        return 0.25


def test_who_passed_the_audits_of_a_trainer_is_no_newcomer_to_it() -> None:
    async def body(swarm: SimSwarm) -> None:
        method = trainer_of(swarm, "a")
        method._parts = replace(method._parts, ledger=EverybodyIsNew())  # type: ignore[arg-type]
        await swarm.round_done(60, "a")
        assert tally(swarm, "c").came > 400, "eight groups a round, and not a newcomer's two a second"

    simulate(body, trainers="a", samplers="c")


def test_samplers_fetch_weights_from_one_another_and_keep_the_newest_only() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(12, *"acdef")
        newest = trainer_of(swarm, "a").broadcast
        assert newest is not None and newest.newest is not None
        weights = [sampler_of(swarm, name).weights for name in "cdef"]
        assert all(each is not None and each.trainer == swarm.peer("a") for each in weights)
        assert all(newest.newest.version - each.version <= STALENESS for each in weights if each is not None)
        shelves = [sampler_of(swarm, name)._weights._shards for name in "cdef"]
        assert sum(shelf.counts["chunks_served"] for shelf in shelves) > 4, "not all of them from the trainer"
        assert all(len(shelf._store.recent(99)) <= 2 for shelf in shelves)
        assert len(newest._shards._store.recent(99)) == STALENESS + 1

    simulate(body, trainers="a", samplers="cdef")


class LargePolicy(SimPolicy):
    """With parameters that no update changes, so that patches are small."""

    IDLE = 4000

    @property
    def layout(self) -> Layout:
        return Layout.of([("shares", (len(NAMES),)), ("idle", (self.IDLE,))])

    def parameters(self) -> Vector:
        return np.concatenate((super().parameters(), np.full(self.IDLE, 0.5, np.float32)))

    def load(self, vector: Vector) -> None:
        super().load(vector[: len(NAMES)])


@pytest.mark.parametrize("lost", [False, True])
def test_what_changed_is_fetched_as_patches_and_all_of_it_where_one_is_lost(lost: bool) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(10, *"ac")
        trainer, sampler = trainer_of(swarm, "a"), sampler_of(swarm, "c")
        assert trainer.broadcast.newest is not None and len(trainer.broadcast.newest.patches) == MAX_PATCHES
        fetch, served = sampler._weights, trainer.broadcast._shards.counts["bytes_served"]
        before = fetch.patched
        assert before >= 5, "all but the first"
        if lost:  # what the trainer puts out from now on are patches that it forgets, or has not right
            put = trainer.broadcast._shards.put

            async def put_and_forget(content: Path | memoryview, *, announce: bool = True) -> bytes:
                assert isinstance(content, memoryview)
                return await put(content if len(content) > LargePolicy.IDLE else memoryview(b"no patch"))

            trainer.broadcast._shards.put = put_and_forget  # type: ignore[method-assign]
        await swarm.round_done(20, *"ac")
        assert sampler.weights is not None and trainer.broadcast.newest.version - sampler.weights.version <= 1
        assert np.array_equal(swarm.nodes["c"].trainer.parameters(), from_bf16(fetch._held[1]))
        whole = 2 * (LargePolicy.IDLE + len(NAMES))
        sent = trainer.broadcast._shards.counts["bytes_served"] - served
        assert fetch.patched - before <= 1 if lost else fetch.patched - before >= 8
        assert sent > 8 * whole if lost else sent < whole
        assert learned(swarm, "a")[19]["sampled"] > 0, "they are the weights that their groups are audited by"

    simulate(body, trainers="a", samplers="c", odd={"a": LargePolicy, "c": LargePolicy})


def test_who_writes_a_batch_for_a_minute_is_still_one_that_samples_and_gets_new_weights() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(10, "a", within=1200)
        newest, has = trainer_of(swarm, "a").broadcast.newest, sampler_of(swarm, "c").weights
        assert newest is not None and has is not None and newest.version - has.version <= 1
        assert tally(swarm, "c").accepted > 40 and not tally(swarm, "c").refused

    simulate(body, trainers="a", samplers="c", pace=60)


def test_who_is_paused_counts_no_more_as_one_that_samples() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, *"ac")
        assert trainer_of(swarm, "a").broadcast.askers()
        await swarm.nodes["c"].session.pause()
        await trio.sleep(60)
        assert not trainer_of(swarm, "a").broadcast.askers()

    simulate(body, trainers="a", samplers="c")


def test_an_answer_that_is_lost_after_a_long_batch_is_no_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sapo, "LOOK_AGAIN", 1000.0)  # nothing is asked meanwhile

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(3, "c")
        sampler, lost = sampler_of(swarm, "c"), list[PeerId]()
        query = sampler._query

        async def once(peer: PeerId, *, samples: bool) -> Newest | None:
            if not lost:
                lost.append(peer)
                return None
            return await query(peer, samples=samples)

        sampler._query = once  # type: ignore[method-assign]
        await swarm.round_done(max(swarm.nodes["c"].rounds) + 2, "c")
        assert lost and "does not answer any more" not in caplog.text

    simulate(body, trainers="a", samplers="c", pace=60)


class Quick(SimPolicy):
    """Writes a batch in 5 ms."""

    def __init__(self, peer_id: str, *, seconds: float = 0.005, knows: float = 0.2) -> None:
        super().__init__(peer_id, seconds=seconds, knows=knows)


class Slow(SimPolicy):
    """Takes 2 s for what it asks itself, so that its weights stay as they are for many batches."""

    def __init__(self, peer_id: str, *, seconds: float = 2.0, knows: float = 0.2) -> None:
        super().__init__(peer_id, seconds=seconds, knows=knows)


def test_who_writes_a_batch_in_no_time_asks_its_trainer_no_more_than_it_may() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(8, "a")
        assert tally(swarm, "c").accepted > 0
        assert not trainer_of(swarm, "a").broadcast.violations.totals.total()

    simulate(body, trainers="a", samplers="c", odd={"a": Slow, "c": Quick}, pace=0)


class TakesNoSamples(SimPolicy):
    """Learns from nothing that others sampled for it, as where each check of theirs takes too long."""

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        return replace(await super().learn(pool, (), probation), sampled=0)


def test_who_learns_from_nothing_that_others_sample_asks_itself_as_much_as_alone() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(10, "a", "c")
        assert tally(swarm, "c").came and all(each["own"] > 1 for each in learned(swarm, "a"))

    simulate(body, trainers="a", samplers="c", odd={"a": TakesNoSamples})


def test_a_batch_on_its_way_is_not_written_again_however_large_it_is() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(3, "c")
        told = tally(swarm, "c")
        assert told.came > 64 and "counter" not in told.refused

    simulate(body, trainers="a", samplers="c", batch=64, pace=0.1)


def test_a_trainer_that_dies_is_left_for_another_and_without_any_a_sampler_waits() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, "c")
        first = next(name for name in "ab" if swarm.peer(name) == sampler_of(swarm, "c").trainer)
        other = "b" if first == "a" else "a"
        swarm.kill(first)
        await swarm.until(lambda: sampler_of(swarm, "c").trainer == swarm.peer(other))
        came = tally(swarm, "c", by=other).came
        await swarm.until(lambda: tally(swarm, "c", by=other).came > came)
        swarm.kill(other)
        await trio.sleep(60)
        batches = len(swarm.nodes["c"].rounds)
        await trio.sleep(60)
        assert len(swarm.nodes["c"].rounds) == batches, "nobody samples for nobody"
        assert any("waits for one to sample for" in text for text in swarm.nodes["c"].session.warnings.values())

    simulate(body, trainers="ab", samplers="c")


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "no room"])
def test_a_trainer_that_answers_and_takes_nothing_is_left_for_another(paused: bool) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise NoRoom("the simulation says so")

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, "c")
        sampler = sampler_of(swarm, "c")
        first = next(name for name in "ab" if swarm.peer(name) == sampler.trainer)
        other = "b" if first == "a" else "a"
        if paused:
            await swarm.nodes[first].session.pause()
        else:
            trainer_of(swarm, first).broadcast.publish = full  # type: ignore[method-assign]
        await trio.sleep(IDLE_AFTER + LOOK_AGAIN + 10)
        came = tally(swarm, "c", by=other).came
        await trio.sleep(100)
        assert sampler.trainer == swarm.peer(other) and tally(swarm, "c", by=other).came - came > 90 * BATCH
        assert "sampling" not in swarm.nodes["c"].session.warnings

    simulate(body, trainers="ab", samplers="c")


def test_where_no_trainer_takes_anything_a_sampler_stays_and_says_so_until_one_does() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, "c")
        sampler, warnings = sampler_of(swarm, "c"), swarm.nodes["c"].session.warnings
        first = sampler.trainer
        for name in "ab":
            await swarm.nodes[name].session.pause()
        await trio.sleep(3 * (IDLE_AFTER + LOOK_AGAIN))
        assert "no newer weights come from" in warnings["sampling"] and sampler.trainer not in (None, first)
        for name in "ab":
            swarm.nodes[name].session.resume()
        await trio.sleep(LOOK_AGAIN + 5)
        assert "sampling" not in warnings

    simulate(body, trainers="ab", samplers="c")


class MendsItself(OtherWeights):
    """Samples with its own shares until its owner has had a look at it."""

    mended = False

    def load(self, vector: Vector) -> None:
        (SimPolicy if self.mended else OtherWeights).load(self, vector)


def test_who_was_caught_hears_no_more_of_it_once_another_trainer_takes_its_groups() -> None:
    async def body(swarm: SimSwarm) -> None:
        warnings, policy = swarm.nodes["c"].session.warnings, swarm.nodes["c"].trainer
        assert isinstance(policy, MendsItself)
        await swarm.until(lambda: "caught" in warnings)
        policy.mended = True
        await swarm.until(lambda: any(tally(swarm, "c", by=name).accepted for name in "ab"))
        await trio.sleep(5)
        assert "caught" not in warnings

    simulate(body, trainers="ab", samplers="c", odd={"c": MendsItself})


def test_a_member_that_answers_no_question_about_weights_costs_no_samplers_time() -> None:
    async def silent(peer: PeerId, query: Any) -> Any:
        await trio.sleep_forever()

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, "c")
        other = next(name for name in "ab" if swarm.peer(name) != sampler_of(swarm, "c").trainer)
        served = trainer_of(swarm, other)._parts.rpc._server.methods
        served[WEIGHTS] = replace(served[WEIGHTS], handler=silent)
        await trio.sleep(30)
        batches = len(swarm.nodes["c"].rounds)
        await trio.sleep(100)
        assert len(swarm.nodes["c"].rounds) - batches >= 95, "one a second"

    simulate(body, trainers="ab", samplers="c")


def test_a_trainer_that_lies_about_counters_and_samplers_ends_nobody_who_samples_for_it() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(5, "c")
        sampler = sampler_of(swarm, "c")
        ask = sampler._query

        async def lied_to(peer: PeerId, **how: Any) -> Newest | None:
            answer = await ask(peer, **how)
            return answer and replace(answer, samplers=-1, tally=replace(answer.tally, expected=1 << 60))

        sampler._query = lied_to  # type: ignore[method-assign]
        await swarm.round_done(25, "c")
        assert sampler._others("liar", Newest(samplers=-1)) >= sampler._others("liar", Newest(samplers=0))

    simulate(body, trainers="a", samplers="c")


def test_a_sampler_that_is_cut_off_comes_back_with_new_weights_and_counters_that_are_borne() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(8, "a", "c")
        swarm.world.partition([[swarm.peer("a")], [swarm.peer("c")]])
        await trio.sleep(30)
        swarm.world.heal()
        await trio.sleep(30)
        accepted = tally(swarm, "c").accepted
        await trio.sleep(20)
        assert tally(swarm, "c").accepted > accepted
        assert not tally(swarm, "c").caught

    simulate(body, trainers="a", samplers="c")


def test_a_question_that_cannot_be_made_is_left_out_by_who_samples() -> None:
    """That one and no other: of every eighth as many are borne as are missing, however long it goes on."""

    async def body(swarm: SimSwarm) -> None:
        sampler = sampler_of(swarm, "c")
        await swarm.round_done(1, "c")
        first = sampler.rollouts.counter
        await swarm.round_done(81, "c")
        found = tally(swarm, "c")
        assert 3 * 80 < found.accepted < sampler.rollouts.counter - first < 80 * BATCH
        assert not found.caught and not found.refused

    simulate(body, trainers="a", samplers="c", odd={"c": CannotAskAll})
