"""A trainer takes groups only for questions that their author could not choose, for weights that are out, and once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from rolloutnodes import RUN, group

from swarmnode.crdt.envelope import Envelope
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.rollouts.messages import SignedGroup, seal
from swarmnode.protocols.methods.rollouts.samplers import AUTHORS, MOST, REFUND, SKIPS, Samplers, SamplerTally
from swarmnode.protocols.methods.rollouts.sapo import Sapo
from swarmnode.protocols.methods.rollouts.weights import (
    MAX_PATCHES,
    OFFERS,
    Newest,
    NoWeights,
    Patch,
    Weights,
    WeightsBroadcast,
    hash_of,
    open_weights,
)
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.protocols.wire import WireError, decode, plain
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.section import RolloutsSection, hf_model
from swarmnode.training.rl.tasks import assigned_task, regenerate, tasks_of_run
from swarmnode.training.rl.vocabulary import DIGITS

WORLD = SimWorld()
TRAINER, ALICE, BOB = WORLD.node("trainer"), WORLD.node("alice"), WORLD.node("bob")
TASKS = tasks_of_run(RolloutsSection())
STALENESS = 4
SIZE = 1000  # parameters of weights that are put out


def policy(version: int) -> str:
    """The hash of the weights of a version."""
    return f"{version:064x}"


def samplers(*, newest: int = 10) -> Samplers:
    found = Samplers(TRAINER.me, run_id=RUN, settings=RolloutsSection(answers=8, staleness=STALENESS))
    for version in range(newest + 1):
        found.know(policy(version), version)
    return found


def written(
    counter: int, *, version: int = 10, by: SimNetwork = ALICE, trainer: str = TRAINER.me, **changed: Any
) -> SignedGroup:
    """A group as an honest sampler seals it, but for what is changed."""
    task = assigned_task(RUN, by.me, counter, version=version, policy=policy(version), tasks=TASKS)
    answered = replace(group(counter, logprobs=True), task=task, version=version, policy=policy(version))
    sealed = replace(answered, **changed)
    return seal(sealed, run_id=RUN, author=by.me, counter=counter, made_at=1, sign=by.sign, trainer=trainer)


def test_honest_groups_are_kept_and_drawn_the_newest_first_by_turns() -> None:
    found = samplers()
    for counter, version in enumerate((8, 9, 10)):
        assert found.insert(written(counter, version=version)) == ""
        assert found.insert(written(counter, version=version, by=BOB)) == ""
    drawn = found.drawn(3, version=10)
    assert [each.packed.version for each in drawn] == [10, 10, 9]
    assert {each.author for each in drawn[:2]} == {ALICE.me, BOB.me}
    found.settle(drawn, caught={}, checked={})
    assert found.tally(ALICE.me).accepted + found.tally(BOB.me).accepted == 3
    assert len(found.drawn(9, version=10)) == 3 and not found.drawn(9, version=10)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"trainer": BOB.me}, "for-another"),
        ({"task": assigned_task(RUN, ALICE.me, 1, version=10, policy=policy(10), tasks=TASKS)}, "cherry-picked"),
        ({"version": 9, "policy": policy(10)}, "other-version"),
        ({"policy": "ff" * 32, "version": 11}, "unknown-weights"),
        ({"logprobs": None}, "no-logprobs"),
        ({"answers": ((1, 2),), "logprobs": ((-1.0, -1.0),)}, "other-size"),
    ],
)
def test_nothing_else_passes(changed: dict[str, Any], reason: str) -> None:
    found = samplers()
    trainer = changed.pop("trainer", TRAINER.me)
    assert found.insert(written(0, trainer=trainer, **changed)) == reason
    assert found.tally(ALICE.me).refused == {reason: 1} and not found.drawn(9, version=10)
    lied = reason == "cherry-picked"
    assert found.standing(ALICE.me) == (0.0 if lied else 1.0)
    assert found.insert(written(1)) == ("no-standing" if lied else "")


def test_another_samplers_group_signed_anew_is_cherry_picked() -> None:
    found = samplers()
    stolen = written(0).group
    copied = seal(stolen, run_id=RUN, author=BOB.me, counter=0, made_at=1, sign=BOB.sign, trainer=TRAINER.me)
    assert found.insert(copied) == "cherry-picked" and found.standing(BOB.me) == 0


def test_what_was_written_with_old_weights_is_refused_and_let_go() -> None:
    found = samplers()
    assert found.insert(written(0, version=10 - STALENESS)) == ""
    assert found.insert(written(1, version=9 - STALENESS)) == "stale"
    assert found.drawn(9, version=11) == ()
    assert found.tally(ALICE.me).refused == {"stale": 2} and found.standing(ALICE.me) == 1


def test_weights_that_an_update_did_not_change_are_as_fresh_as_their_last_version() -> None:
    found = samplers(newest=3)
    for version in range(4, 12):
        found.know(policy(3), version)  # updates without anything to learn from
    for counter, version in enumerate((3, 7, 11)):
        task = assigned_task(RUN, ALICE.me, counter, version=version, policy=policy(3), tasks=TASKS)
        assert found.insert(written(counter, version=version, policy=policy(3), task=task)) == ""
    assert len(found.drawn(9, version=11)) == 3
    task = assigned_task(RUN, ALICE.me, 3, version=12, policy=policy(3), tasks=TASKS)
    assert found.insert(written(3, version=12, policy=policy(3), task=task)) == "other-version"


def test_who_wrote_with_weights_that_came_back_with_a_checkpoint_told_no_lie() -> None:
    found = samplers(newest=3)
    found.know(policy(4), 4)
    found.know(policy(3), 5)
    task = assigned_task(RUN, ALICE.me, 0, version=3, policy=policy(3), tasks=TASKS)
    assert found.insert(written(0, version=3, policy=policy(3), task=task)) == ""
    found.know(policy(3), 2)  # the checkpoint is older than all that was out
    task = assigned_task(RUN, ALICE.me, 1, version=2, policy=policy(3), tasks=TASKS)
    assert found.insert(written(1, version=2, policy=policy(3), task=task)) == ""
    assert len(found.drawn(9, version=2)) == 2


def test_a_counter_counts_once_in_any_order() -> None:
    found = samplers()
    assert [found.insert(written(counter)) for counter in (5, 7, 6)] == ["", "", ""]
    assert found.insert(written(6, version=9)) == "counter" and found.tally(ALICE.me).expected == 8


def test_who_leaves_out_most_of_its_groups_is_soon_refused_and_who_loses_some_is_not() -> None:
    found = samplers()
    picked = [found.insert(written(10 * n)) for n in range(40)]
    assert picked.count("") < 12 and set(picked) == {"", "skips"}
    lossy = [found.insert(written(n, by=BOB)) for n in range(400) if n % 8]
    assert set(lossy) == {""}
    assert found.tally(BOB.me).refused == {"full": len(lossy) - MOST}


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_however_counters_come_the_missing_are_bounded(counters: list[int]) -> None:
    found = samplers()
    kept = [counter for counter in counters if found.insert(written(counter)) == ""]
    assert len(kept) == len(set(kept))
    if kept:
        missing = max(kept) - min(kept) + 1 - len(kept)
        assert missing <= 2 * SKIPS + REFUND * len(kept), "as many before the first as may be late, then what is borne"


def test_who_is_caught_loses_what_waits_and_everybody_else_nothing() -> None:
    found = samplers()
    for counter in range(4):
        found.insert(written(counter))
        found.insert(written(counter, by=BOB))
    drawn = found.drawn(2, version=10)
    found.settle(drawn, caught={ALICE.me: "not-drawn"}, checked={})
    assert {each.author for each in found.drawn(9, version=10)} == {BOB.me}
    tally = found.tally(ALICE.me)
    assert tally.caught == "not-drawn" and tally.refused == {"not-drawn": 1, "no-standing": 3}
    assert tally.accepted == 0 and found.standing(ALICE.me) == 0 and found.standing(BOB.me) == 1


def test_questions_follow_from_who_asks_when_and_with_which_weights() -> None:
    told = {"version": 1, "policy": policy(1), "tasks": TASKS}
    first = assigned_task(RUN, ALICE.me, 0, **told)  # type: ignore[arg-type]
    assert first == assigned_task(RUN, ALICE.me, 0, **told)  # type: ignore[arg-type]
    others = {
        assigned_task(RUN, BOB.me, 0, **told),  # type: ignore[arg-type]
        assigned_task(RUN, ALICE.me, 1, **told),  # type: ignore[arg-type]
        assigned_task(RUN, ALICE.me, 0, version=2, policy=policy(1), tasks=TASKS),
        assigned_task(RUN, ALICE.me, 0, version=1, policy=policy(2), tasks=TASKS),
        assigned_task("cd" * 32, ALICE.me, 0, **told),  # type: ignore[arg-type]
    }
    assert len(others) == 5 and first not in others
    drawn = [assigned_task(RUN, ALICE.me, counter, **told) for counter in range(900)]  # type: ignore[arg-type]
    assert {task.name for task in drawn} == {name for name, _ in TASKS}
    assert all(regenerate(task) for task in drawn)


PATCHES = (Patch(b"\1" * 32, b"\2" * 32), Patch(b"\3" * 32, b"\4" * 32))
WEIGHTS = Weights(TRAINER.me, 7, 3, "ab" * 32, "gpt:2x48", bytes(32), 400, PATCHES)


def test_patches_lead_from_any_version_that_one_begins_at() -> None:
    assert WEIGHTS.since("01" * 32) == PATCHES and WEIGHTS.since("03" * 32) == PATCHES[1:]
    assert not WEIGHTS.since("ab" * 32) and not WEIGHTS.since("02" * 32)
    assert WEIGHTS.shards == {bytes(32), b"\2" * 32, b"\4" * 32}


def test_weights_of_a_model_with_the_longest_name_can_be_signed() -> None:
    shape, patches = f"hf-full:{'é' * 256}", tuple(Patch(bytes([n]) * 32, bytes(32)) for n in range(MAX_PATCHES))
    assert hf_model(shape) is not None
    weights = replace(WEIGHTS, trainer=TRAINER.me, shape=shape, counter=1 << 52, version=1 << 52, patches=patches)
    envelope = OFFERS.seal(plain(weights), TRAINER.sign, RUN)
    assert open_weights(envelope, run_id=RUN, trainer=TRAINER.me, verify=ALICE.verify) == weights


@pytest.mark.parametrize(
    "said",
    [
        {"shape": "g" * 300},
        {"tally": {"refused": {str(n): 1 for n in range(65)}}},
        {"tally": {"refused": {"w" * 65: 1}}},
        {"tally": {"caught": "w" * 65}},
    ],
)
def test_a_trainer_says_no_more_than_a_sampler_can_keep(said: dict[str, Any]) -> None:
    honest = msgpack.packb({"tally": {"refused": {"stale": 3}}})
    assert decode(Newest, honest).tally == SamplerTally(refused={"stale": 3})
    with pytest.raises(WireError):
        decode(Newest, msgpack.packb(said))


def test_weights_are_their_trainers_alone() -> None:
    payload, signature = OFFERS.seal(plain(WEIGHTS), TRAINER.sign, RUN)

    def opened(payload: bytes, signature: bytes, *, run_id: str = RUN, trainer: str = TRAINER.me) -> Weights:
        return open_weights(Envelope(payload, signature), run_id=run_id, trainer=trainer, verify=ALICE.verify)

    assert opened(payload, signature) == WEIGHTS
    forged, by_bob = OFFERS.seal(plain(WEIGHTS), BOB.sign, RUN)
    for bad in ((forged, by_bob), (payload, bytes(64)), (payload[:-1], signature), (b"", b"")):
        with pytest.raises(NoWeights):
            opened(*bad)
    with pytest.raises(NoWeights):
        opened(payload, signature, run_id="cd" * 32)
    with pytest.raises(NoWeights):
        opened(payload, signature, trainer=BOB.me)


@given(st.binary(max_size=300))
def test_bytes_of_strangers_are_no_weights(raw: bytes) -> None:
    with pytest.raises(NoWeights):
        open_weights(Envelope(raw, bytes(64)), run_id=RUN, trainer=TRAINER.me, verify=ALICE.verify)


def test_only_what_an_audit_looked_at_is_proved_and_a_liar_proves_nothing() -> None:
    found = samplers()
    for counter in range(4):
        assert found.insert(written(counter)) == ""
    drawn = found.drawn(9, version=10)
    found.settle(drawn, caught={}, checked={})
    assert not found.proved(ALICE.me), "nobody looked"
    found.settle(drawn, caught={}, checked={ALICE.me: 1})
    assert found.proved(ALICE.me)
    assert (found.tally(ALICE.me).accepted, found.tally(ALICE.me).proved) == (8, 1)
    found.settle((), caught={ALICE.me: "logprobs"}, checked={ALICE.me: 1})
    assert found.tally(ALICE.me).proved == 1 and not found.proved(ALICE.me)


def test_many_who_were_caught_crowd_nobody_out() -> None:
    found = samplers()
    for number in range(AUTHORS):
        found.settle([], caught={f"liar {number}": "cherry-picked"}, checked={})
    for number in range(3):
        for author in (ALICE, BOB):
            assert found.insert(written(number, by=author)) == ""
    assert sorted(each.author for each in found.drawn(9, version=10)) == sorted(3 * [ALICE.me, BOB.me])
    assert len(found.tallies()) == AUTHORS


def test_strangers_of_whom_nothing_is_kept_crowd_out_nobody_who_samples() -> None:
    found = samplers()
    assert found.insert(written(0)) == "" and found.insert(written(0, by=BOB)) == ""
    found.settle(found.drawn(1, version=10), caught={}, checked={})
    before = {peer: found.tally(peer).accepted for peer in (ALICE.me, BOB.me)}
    assert sorted(before.values()) == [0, 1], "one was learned from, the other's group waits"
    for number in range(AUTHORS):
        stranger = WORLD.node(f"stranger {number}")
        assert found.insert(written(0, by=stranger, trainer=BOB.me)) == "for-another"
    assert {peer: found.tally(peer).accepted for peer in before} == before
    assert len(found.drawn(9, version=10)) == 1 and len(found.tallies()) == AUTHORS


@pytest.mark.parametrize("back", [False, True])
def test_weights_whose_patch_finds_no_room_leave_no_shard_behind(back: bool) -> None:
    kept: set[bytes] = set()
    full = False

    class Shelf:
        async def put(self, source: memoryview, *, announce: bool) -> bytes:
            if full and len(source) < 2 * SIZE:
                raise ShardError("no room")
            kept.add(shard := hashlib.sha256(source).digest())
            return shard

        async def drop(self, shard: bytes) -> None:
            await trio.lowlevel.checkpoint()
            kept.remove(shard)

    parts = SimpleNamespace(
        **{"shards": Shelf(), "runner": in_thread, "policy": "digits", "now": lambda: 0, "run_id": RUN},
        **{"network": TRAINER, "me": TRAINER.me, "rpc": SimpleNamespace(serve=lambda *_: None)},
        spec=SimpleNamespace(rollouts=RolloutsSection()),
    )
    broadcast = WeightsBroadcast(cast(Context, parts), samplers())

    async def publish() -> None:
        nonlocal full
        versions = [np.full(SIZE, value, np.uint16) for value in (1, 2, 1 if back else 3)]
        for version, words in enumerate(versions[:2]):
            await broadcast.publish(words, version=version, policy=hash_of(words))
        full, before = True, set(kept)
        for cancelled in (False, True):
            with trio.CancelScope() as scope, nullcontext() if cancelled else pytest.raises(ShardError):
                if cancelled:
                    scope.cancel()
                await broadcast.publish(versions[2], version=2, policy=hash_of(versions[2]))
            assert kept == before

    trio.run(publish)


@pytest.mark.parametrize(("answers", "reason"), [(2, "uninformative"), (8, "uninformative"), (9, "other-size")])
def test_more_answers_than_the_run_asks_for_are_no_group_of_it(answers: int, reason: str) -> None:
    """The loss weighs tokens, so that a group of 64 answers would weigh as much as eight."""
    method, settings = Sapo.__new__(Sapo), RolloutsSection(answers=8)
    method._tasks, method._settings, method._judged = frozenset(tasks_of_run(settings)), settings, False
    made = replace(group(1), answers=((1, 2, DIGITS.end),) * answers, vocabulary=DIGITS.id)
    sealed = seal(made, run_id=RUN, author=ALICE.me, counter=0, made_at=0, sign=ALICE.sign)
    assert method.check(sealed) == reason


def test_groups_of_others_are_unpacked_in_a_thread_before_they_are_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    unpack = RolloutGroup.from_map

    def noted(sent: Mapping[str, Any]) -> RolloutGroup:
        threads.append(threading.current_thread())
        return unpack(sent)

    class Scores:
        async def score(self, groups: Sequence[tuple[str, RolloutGroup]], *, texts: bool) -> list[dict[str, Any]]:
            return [{"refused": "", "why": author} for author, _ in groups]

    method = Sapo.__new__(Sapo)
    method._parts, method._trainer = cast(Context, SimpleNamespace(runner=in_thread)), cast(Trainer, Scores())
    signed = written(0)
    monkeypatch.setattr(RolloutGroup, "from_map", noted)
    assert trio.run(method.score, [signed]) == [{"refused": "", "why": ALICE.me}]
    assert samplers().insert(signed) == "", "what is asked of a group as it comes needs no tokens"
    assert len(threads) == 1 and threading.main_thread() not in threads
