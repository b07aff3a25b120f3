"""Whole swarms of strangers on simnet: whoever dies, freezes, comes or is cut off, one chain of rosters goes on."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simswarm
import trio
from simswarm import Body, SimSwarm

from swarmnode.crdt.hlc import COUNTER_BITS
from swarmnode.crdt.record import write
from swarmnode.protocols.chain.forks import Block, empty_block
from swarmnode.protocols.chain.statements import (
    SALT,
    Commit,
    ForkChoiceVote,
    Reveal,
    Roster,
    Said,
    Score,
    binding_of,
)
from swarmnode.protocols.methods.open import store as open_store
from swarmnode.protocols.methods.open import sync as open_sync
from swarmnode.protocols.methods.open.round import RoundContext
from swarmnode.protocols.methods.open.store import Lost
from swarmnode.protocols.methods.open.sync import RECENT
from swarmnode.protocols.peers.liveness import AdaptiveDeadline
from swarmnode.testing.simnet import SimWorld
from swarmnode.training.outer import OuterState

NAMES = ("a", "b", "c", "d")


def simulate(body: Body, *, names: tuple[str, ...] = NAMES, validators: tuple[str, ...] | None = None) -> None:
    """`body` with a swarm whose nodes have all begun; by default all of them are validators."""
    world = SimWorld(latency=0.05)
    simswarm.simulate(body, *names, world=world, method="open", validators=validators or names)


def assert_one_chain(swarm: SimSwarm, *names: str) -> None:
    """Whoever told a round told the same hash of it."""
    for round in range(max(max(swarm.nodes[name].rounds) for name in names) + 1):
        told = {swarm.nodes[name].rounds[round]["state_hash"] for name in names if round in swarm.nodes[name].rounds}
        assert len(told) <= 1, round


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_nodes_go_through_the_same_states(size: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        names = NAMES[:size]
        await swarm.round_done(5, *names)
        assert all(len(swarm.hashes(round)) == 1 for round in range(6))
        first, last = swarm.nodes["a"].rounds[0], swarm.nodes["a"].rounds[5]
        assert last["loss"] < first["loss"]

    simulate(body, names=NAMES[:size])


def test_who_is_no_validator_contributes_and_follows() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(4, *NAMES)
        assert all(len(swarm.hashes(round)) == 1 for round in range(5))
        chain = swarm.nodes["d"].open.store.block.chain
        assert {worked.author for roster in chain.history for worked in roster} >= {swarm.peer(n) for n in "bcd"}
        assert chain.validators == (swarm.peer("a"),)

    simulate(body, validators=("a",))


def test_training_goes_on_while_contributions_are_exchanged() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(6, *NAMES)
        rounds = swarm.nodes["b"].rounds
        seconds = sum(rounds[round]["seconds"] for round in range(2, 7))
        assert sum(rounds[round]["compute_seconds"] for round in range(2, 7)) > 0.8 * seconds

    simulate(body)


def test_work_that_a_node_may_not_offer_is_offered_once_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        method, returned = swarm.nodes["b"].open, []
        local, tip = method.local, method.store.tip
        method.signer.silent_after = tip
        monkeypatch.setattr(local.feedback, "give_back", lambda work, *norm: returned.append(work))
        await swarm.until(lambda: method.store.tip != tip)
        assert not returned  # to the residual: it is in the local parameters
        assert local.since_offer.steps >= swarm.spec.inner.steps
        silent = max(swarm.nodes["b"].rounds)
        await swarm.round_done(silent + 1, *NAMES)
        here = [swarm.nodes["a"].rounds[round]["verdicts"].get(swarm.peer("b")) for round in (silent, silent + 1)]
        assert here == [None, "accepted"]

    simulate(body)


@pytest.mark.parametrize("victim", NAMES)
def test_the_death_of_any_validator_holds_the_others_up_for_seconds(victim: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        swarm.kill(victim)
        rest = [name for name in NAMES if name != victim]
        await swarm.round_done(7, *rest, within=60)
        assert_one_chain(swarm, *NAMES)
        assert max(swarm.nodes[rest[0]].rounds[round]["seconds"] for round in range(3, 8)) < 8.0

    simulate(body)


def test_a_dead_validator_leaves_within_some_rounds_and_is_one_again_when_it_works() -> None:
    async def body(swarm: SimSwarm) -> None:
        def validators() -> set[str]:
            return {name for name in names if swarm.peer(name) in swarm.nodes["a"].open.store.block.chain.validators}

        await swarm.round_done(2, *names)
        assert validators() == set(names)
        swarm.kill("f")
        await swarm.round_done(7, *"abcde", within=90)
        assert validators() == set("abcde")
        assert all(swarm.nodes["a"].rounds[round]["members"] for round in range(8))
        await swarm.start("f", join="b")
        await swarm.round_done(12, *names, within=120)
        assert validators() == set(names)
        assert_one_chain(swarm, *"abcde")

    names = tuple("abcdef")
    simulate(body, names=names)


def test_a_validator_that_follows_what_nobody_has_leads_a_slow_node_astray_in_no_round() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *names)
        slow, liar = (swarm.nodes[name].open for name in "de")
        examine = slow.sync._examine

        async def slowly(said: Said[Roster]) -> None:
            await trio.sleep(1.0)
            await examine(said)

        async def lie() -> None:
            for number in itertools.count():
                made_up = hashlib.sha256(bytes([number % 256])).digest()
                await liar.signer.publish(ForkChoiceVote(made_up, liar.store.block.chain.round + 1, made_up))
                await trio.sleep(0.2)

        slow.sync._examine = slowly  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lie)
            await swarm.round_done(7, *names, within=60)
            nursery.cancel_scope.cancel()
        assert all(swarm.nodes["d"].rounds[round]["state_hash"] for round in range(8))

    names = tuple("abcde")
    simulate(body, names=names)


def test_who_opens_its_own_commit_at_once_ends_no_wait_for_the_work_of_others() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        method, liar, salt = swarm.nodes["d"].open, swarm.peer("d"), bytes(SALT)

        def has_moved(tip: bytes) -> bool:
            return method.store.tip != tip

        async def open_at_once() -> None:
            while True:
                chain, root = method.store.block.chain, hashlib.sha256(method.store.tip).digest()
                binding = binding_of(chain.run_id, chain.round, liar, chain.tip, salt, root)
                said = await method.signer.publish(Commit(chain.round, chain.tip, binding, method.signer.beacon.anchor))
                if said is not None:
                    await method.signer.publish(Reveal(chain.round, chain.tip, said.id, salt, root))
                await method.store.until(partial(has_moved, chain.tip))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_at_once)
            await swarm.round_done(6, *"abc", within=120)
            nursery.cancel_scope.cancel()
        for round in range(4, 7):
            verdicts = swarm.nodes["a"].rounds[round]["verdicts"]
            assert len(verdicts) == 4, "whoever is waited for is judged"
            assert [peer for peer, what in verdicts.items() if what == "not retrieved by most judges"] == [liar]

    simulate(body)


def test_a_cut_is_completed_also_where_a_head_names_its_id_as_a_roster() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        sync = swarm.nodes["a"].open.sync
        await swarm.until(lambda: bool(sync.store.log.cuts))
        cut = next(iter(sync.store.log.cuts.values()))
        lacking = replace(cut, id=hashlib.sha256(b"cut").digest(), what=replace(cut.what, commits=(bytes(32),)))
        head = ForkChoiceVote(lacking.id, sync.store.block.chain.round, bytes(32))
        sync._begin(lacking.id, Said(swarm.peer("b"), bytes(32), head))
        sync._complete(sync.store.log, lacking)
        assert lacking.id in sync._examining and lacking.id in sync._completing

    simulate(body)


def test_a_judge_who_seals_late_costs_no_round_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        duties = swarm.nodes["b"].open.rounds
        seal = duties.seal

        async def late(turn: RoundContext, scores: tuple[Score, ...]) -> None:
            await trio.sleep(7.0)  # longer than the others' wait for scores, the floor of 5 s
            await seal(turn, scores)

        swarm.kill("d")
        await swarm.round_done(3, *"abc", within=60)
        monkeypatch.setattr(duties, "seal", late)
        await swarm.round_done(6, *"abc", within=120)
        assert all(swarm.nodes["a"].rounds[round]["members"] for round in (5, 6))

    simulate(body)


def test_who_finds_nobody_is_silent_in_the_round_of_its_checkpoint_and_then_goes_on(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.start("c", join="a")
        await swarm.round_done(6, *"abc")
        for name in "abc":
            swarm.kill(name)
        node = await swarm.start("c")
        await swarm.until(lambda: any(event["members"] for event in node.rounds.values()), within=300)
        first = min(node.rounds)
        said = await swarm.nodes["c"].open.sync._state.select(author=swarm.peer("c"), limit=1000)
        rounds = {
            int(element.key.split("/")[1]) for element in said if element.key.startswith(("commit", "availability"))
        }
        assert rounds and first not in rounds

    simulate(body, names=NAMES[:2], validators=NAMES[:3])


def test_a_run_outlives_its_only_validator() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        swarm.kill("a")
        await swarm.round_done(14, *"bcd", within=300)
        assert_one_chain(swarm, *NAMES)
        assert swarm.nodes["b"].open.store.block.chain.validators == tuple(sorted(map(swarm.peer, NAMES)))
        first, last = swarm.nodes["b"].rounds[2], swarm.nodes["b"].rounds[14]
        assert last["loss"] < first["loss"]

    simulate(body, validators=("a",))


def test_a_run_outlives_an_only_validator_that_is_there_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(statement: object) -> None:
        return None

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        monkeypatch.setattr(swarm.nodes["a"].open.signer, "publish", silence)
        await swarm.round_done(14, *"bcd", within=1000)
        assert len(swarm.hashes(14)) == 1
        first, last = swarm.nodes["b"].rounds[2], swarm.nodes["b"].rounds[14]
        assert last["loss"] < first["loss"]

    simulate(body, validators=("a",))


def test_one_of_two_goes_on_when_the_other_dies() -> None:
    """It waits for nobody any more, and work counts. Not all of it: alone near the bowl's floor, a step often does harm
    and is refused. In which rounds depends on last bits of the bowl's products, and so on the machine's BLAS: five to
    seven of these fifteen count, by seven of OpenBLAS's kernels."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, "a", "b")
        swarm.kill("a")
        await swarm.round_done(20, "b", within=60)
        alone = [swarm.nodes["b"].rounds[round] for round in range(6, 21)]
        assert max(round["seconds"] for round in alone) < 4, "rounds of steps, without a wait for judges"
        assert sum(round["members"] for round in alone) >= 5

    simulate(body, names=NAMES[:2])


def test_a_frozen_validator_finds_back_and_its_own_history_is_left() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        swarm.world.freeze(swarm.peer("a"))
        await swarm.round_done(6, "b", "c", "d", within=60)
        swarm.world.thaw(swarm.peer("a"))
        thawed_in = max(swarm.nodes["b"].rounds)
        await swarm.until(lambda: swarm.all_agree(after=thawed_in + 1), within=60)
        assert_one_chain(swarm, "b", "c", "d")

    simulate(body)


@pytest.mark.parametrize("sides", [("abc", "d"), ("ab", "cd")])
def test_after_a_partition_all_follow_one_chain(sides: tuple[str, str]) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        swarm.world.partition([[swarm.peer(name) for name in side] for side in sides])
        await trio.sleep(40)
        heights = [max(swarm.nodes[side[0]].rounds) for side in sides]
        assert min(heights) > 4  # both went on
        swarm.world.heal()
        await swarm.until(lambda: swarm.all_agree(after=max(heights) + 3), within=120)

    simulate(body)


def test_one_of_many_who_is_there_and_silent_teaches_nobody_to_wait_longer() -> None:
    """As is who comes back under its old name, and is expected for two rounds before it is in step."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, *NAMES)
        waits = swarm.nodes["a"].open.rounds._timeouts
        usual = waits._deadlines["tried"] = AdaptiveDeadline(floor=3.0, ceiling=60.0)
        b, c, d = (swarm.peer(name) for name in "bcd")
        for _ in range(5):
            began = trio.current_time()
            await waits._wait_for("tried", lambda began=began: {b, c, d} if trio.current_time() < began + 1 else {d})
        assert usual.usual is not None and usual.usual < 3

    simulate(body, validators=("a",))


def test_a_late_joiner_is_in_step_within_two_rounds() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(6, *NAMES)
        await swarm.start("late", join="b")
        await swarm.round_done(8, *NAMES, "late", within=60)
        await swarm.until(lambda: swarm.all_agree(after=10), within=60)
        assert_one_chain(swarm, *NAMES, "late")
        chain = swarm.nodes["a"].open.store.block.chain
        assert swarm.peer("late") in {worked.author for roster in chain.history for worked in roster}

    simulate(body)


def test_a_node_that_no_longer_has_the_state_from_which_to_follow_the_others_gets_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where heads go back to a fork that is here, and so old that of a large model no state before it is kept.

    It does not wait until the others are some long rounds further.
    """
    monkeypatch.setattr(open_sync, "RECENT", 1000)

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        held = swarm.nodes["d"].open.store
        forgetful, state_after = held.tree, held.state_after

        async def gone(block: Block) -> OuterState:
            if held.tree is forgetful and block.id in forgetful and block.id != held.tip:
                raise Lost("none before it is kept")
            return await state_after(block)

        held.state_after = gone  # type: ignore[method-assign]
        done = max(swarm.nodes["d"].rounds)
        await swarm.until(lambda: max(swarm.nodes["d"].rounds) > done + 3, within=120)
        assert held.tree is not forgetful
        assert_one_chain(swarm, *NAMES)

    simulate(body)


def test_a_node_can_stand_on_an_empty_roster_that_came_with_others() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, "a")
        method = swarm.nodes["a"].open
        held = method.store
        block = empty_block(held.block.chain)
        held.tree.add(block)  # as where a validator names the last of several empty rosters
        await held.state_after(block)
        await method.sync.move(block)
        assert held.log.chain == block.chain

    simulate(body, names=("a",))


def test_a_node_that_restarts_says_nothing_twice(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(4, *NAMES)
        for _ in range(3):
            swarm.kill("c")
            await trio.sleep(1.0)
            await swarm.start("c", join="b")
            await trio.sleep(4.0)
        await swarm.until(lambda: swarm.all_agree(after=12), within=120)
        evidence = await swarm_state(swarm, "a")
        assert evidence == []

    simulate(body)


async def swarm_state(swarm: SimSwarm, name: str) -> list[object]:
    """The evidence of equivocation that a node holds."""
    return list(await swarm.nodes[name].open.sync._state.select("evidence", limit=16))


@pytest.mark.parametrize("kept", [True, False], ids=["in the state", "only in logs"])
def test_who_commits_something_else_to_each_validator_has_no_round_end_empty(kept: bool) -> None:
    """A stranger signs three commits under one key. Each validator hears others of them first, or one of them alone."""
    heard = {"a": (0, 1), "b": (1, 2), "c": (2, 0), "d": (0, 1)}
    if not kept:
        heard = {name: numbers[:1] for name, numbers in heard.items()}

    async def body(swarm: SimSwarm) -> None:
        stranger = swarm.world.node("stranger")
        await swarm.round_done(1, *NAMES)
        for round in range(2, 6):
            chain = swarm.nodes["a"].open.store.block.chain
            said = [Commit(chain.round, chain.tip, bytes([number] * 32), bytes(32)) for number in range(3)]
            hlc = simswarm.now() << COUNTER_BITS
            records = [
                write(simswarm.RUN, stranger.me, one.key, one.value, hlc=hlc, sign=stranger.sign) for one in said
            ]
            for name, numbers in heard.items():
                method = swarm.nodes[name].open
                for number in numbers:
                    if kept:
                        await swarm.nodes[name].session._context.state.merge([records[number]])
                    else:
                        method.sync.insert(records[number])
            await swarm.round_done(round, *NAMES)
            assert all(len(swarm.hashes(each)) == 1 for each in range(round + 1))
        assert swarm.nodes["a"].open.store.block.chain.made >= 6, "a round ended empty"

    simulate(body)


def test_a_paused_node_keeps_no_more_than_the_last_rounds_and_comes_back() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(1, *NAMES)
        session, store = swarm.nodes["d"].session, swarm.nodes["d"].open.store
        await session.pause()
        stood = store.block.chain.round
        await swarm.round_done(stood + 3 * RECENT, *NAMES[:3])
        assert max(log.chain.round for log in store.logs.values()) <= stood + RECENT + 1
        assert all(one.round <= stood + RECENT + 1 for one in store.contributions._held.values())
        assert store.state(store.tip) is not None
        session.resume()
        await swarm.until(lambda: swarm.all_agree(after=stood + 3 * RECENT), within=300)

    simulate(body)


def test_a_node_that_was_told_nothing_of_what_it_signed_before_ends_when_it_is_asked() -> None:
    """Work is committed where nothing can be cancelled, and must not wait there for somebody to tell."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        session = swarm.nodes["c"].session
        never: Any = SimpleNamespace(is_set=lambda: False, set=lambda: None, wait=trio.sleep_forever)
        session._context.sync._recovered = never
        await trio.sleep(20)
        session.stop()
        with trio.fail_after(20):
            await session.finished.wait()

    simulate(body)


@pytest.mark.parametrize("strangers", [False, True])
def test_who_left_in_order_is_waited_for_again_once_it_is_back(
    strangers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where strangers said so much that they have all the room for what strangers say."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        me, state = swarm.peer("c"), swarm.nodes["c"].session._context.state
        await swarm.leave("c")
        assert all(swarm.nodes[name].open.store.is_away(me) for name in "abd")
        if strangers:
            for module in (open_store, open_sync):
                monkeypatch.setattr(module, "LOOKED_FOR", 0)
        await swarm.start("c", join="a", holds=await state.select("note/", limit=64))
        await swarm.until(lambda: len(swarm.nodes["c"].rounds) > 1)
        assert not any(swarm.nodes[name].open.store.is_away(me) for name in NAMES)

    simulate(body)


def test_who_is_killed_before_its_first_checkpoint_was_due_goes_on_alone(tmp_path: Path) -> None:
    """Started again it is no creator any more, as the run's file is not named; it would wait for others for ever."""

    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.start("a")
        await swarm.until(lambda: any((tmp_path / "a").rglob("round-*.json")), within=60)
        assert max(swarm.nodes["a"].rounds, default=-1) < 1
        swarm.kill("a")
        await trio.sleep(1.0)
        again = await swarm.start("a", creator=False)
        await swarm.until(lambda: len(again.rounds) > 0, within=60)

    simulate(body, names=(), validators=("a",))
