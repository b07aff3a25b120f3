"""What the exchange methods promise whose nodes never share one state: `test_exchange_conformance.py` for those.

The contract of `protocols/methods/method.py` holds as it stands there; two things have another form. Where members of
one history hold the same bits, these are near one another: CLOSE. And where work is in *the* shared state, here it is
spread over the states of all nodes, and their sum is what accounts for it: a meeting moves work between two of them and
neither makes nor loses any.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from hypothesis import settings
from signature import AXES, STRIDE, SignatureModel
from simswarm import Body, SimSwarm
from tripwire import Struck, strike

from swarmnode.protocols.calls.rpc import CallError, Refuse
from swarmnode.protocols.methods.gossip.meeting import Meeting, MeetReply, MeetRequest, SettleRequest, Stand
from swarmnode.protocols.methods.gossip.method import Gossip
from swarmnode.protocols.methods.known.messages import MAX_ROUND
from swarmnode.protocols.wire import RunQuery
from swarmnode.testing.consensus import consensus_distance
from swarmnode.training.outer import state_hash

NAMES = ("a", "b", "c", "d", "e")
STEPS = 5
STEP = 0.4  # seconds
ROUND_OF_WORK = STEPS * STRIDE
FLOOR = 5.0  # seconds; how long somebody who answers and does not come is waited for
SUSPECTED = 4.0  # seconds until somebody who answers nothing is given up
SWEPT = 2  # the round in which something happens
FEW = 6 if settings.default.max_examples < 1000 else 40  # messages of a round that are tried
CLOSE = 0.1  # consensus distance of nodes that meet in each round
ROUNDING = 0.05  # rounds of work
ONE_ANSWER = 0.6  # rounds of work: what is between two, where the last answer of a meeting is lost, and rounding

SLOW = partial(pytest.param, marks=pytest.mark.slow)


def simulate(body: Body, **options: Any) -> None:
    simswarm.simulate(body, method="gossip", steps=STEPS, seconds_per_step=STEP, floor=FLOOR, **options)


async def begin(swarm: SimSwarm, names: tuple[str, ...]) -> None:
    """All these nodes in one run, about to do round SWEPT."""
    await swarm.begin(names)
    await swarm.past(SWEPT - 1, *names)


def distance(swarm: SimSwarm, *names: str) -> float:
    return consensus_distance([swarm.nodes[name].method.saved().state.parameters for name in names])


def at_messages(
    names: tuple[str, ...], most: int, struck: Struck, *, first: Body | None = None, **options: Any
) -> None:
    """`struck(swarm, victim, at)` at `most` of the messages of round SWEPT; the victim is each of `names` in turn.

    `first`: in place of `begin`.
    """

    async def done(swarm: SimSwarm) -> None:
        await swarm.past(SWEPT, *names)

    strike(partial(simulate, **options), first or partial(begin, names=names), done, names, most, struck)


def assert_no_long_waits(swarm: SimSwarm, names: tuple[str, ...], context: object) -> None:
    """No round took longer than its steps, one wait for one peer, and some messages."""
    for name in names:
        longest = max(told["seconds"] for told in swarm.nodes[name].rounds.values() if told["round"] > 0)
        assert longest <= (STEPS + 1) * STEP + max(FLOOR, SUSPECTED) + 2.0, (context, name, longest)


# --- learning ---------------------------------------------------------------------------------------------------------


def final_loss(names: tuple[str, ...], rounds: int) -> float:
    losses: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, names)
        await swarm.past(rounds, *names)
        losses.extend(swarm.nodes[name].rounds[max(swarm.nodes[name].rounds)]["loss"] for name in names)
        swarm.assert_equal_hashes_are_equal_bits()
        assert distance(swarm, *names) < CLOSE

    simulate(body)
    return max(losses)


@pytest.mark.parametrize("size", [4, 5])
def test_every_node_of_a_swarm_learns_more_than_a_node_alone(size: int) -> None:
    assert final_loss(NAMES[:size], 20) < 0.9 * final_loss(NAMES[:1], 20)


def test_each_meets_each() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES)
        await swarm.past(30, *NAMES)
        for name in NAMES:
            met = {peer for told in swarm.nodes[name].rounds.values() for peer in told["counted"]}
            alone = [r for r, told in swarm.nodes[name].rounds.items() if r >= SWEPT and told["members"] == 1]
            assert met == {swarm.peer(n) for n in NAMES}
            assert 0 < len(alone) < 15, name  # of five, one is left over in each round

    simulate(body)


# --- who takes part ---------------------------------------------------------------------------------------------------


def test_who_is_not_admitted_is_met_by_nobody() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        met, stranger = swarm.nodes["a"].method, swarm.world.node("stranger")
        assert isinstance(met, Gossip)
        met._parts = replace(met._parts, admits=lambda peer: peer != stranger.me)
        for ask in (
            met._on_stand(stranger.me, RunQuery(simswarm.RUN)),
            met._on_meet(stranger.me, MeetRequest(simswarm.RUN, 10**6)),
            met._on_settle(stranger.me, SettleRequest(simswarm.RUN, SWEPT, False)),
        ):
            with pytest.raises(Refuse, match="lists its members"):
                await ask
        await swarm.past(SWEPT + 2, *NAMES[:2])

    simulate(body)


def test_a_member_that_is_furthest_and_gives_no_state_keeps_no_newcomer_out() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        liar = swarm.nodes["b"].method
        assert isinstance(liar, Gossip)
        served = liar._parts.rpc._server.methods
        honest = served["gossip.stand"]

        async def lie(peer: str, query: RunQuery) -> Stand:
            stand: Stand = await honest.handler(peer, query)
            return replace(stand, round=stand.round + 1000)

        served["gossip.stand"] = replace(honest, handler=lie)
        del served["catchup.state"]
        await swarm.start("c", join="b")
        await swarm.until(lambda: len(swarm.nodes["c"].rounds) > 1, within=60)

    simulate(body)


@pytest.mark.parametrize("claimed", [10**6, MAX_ROUND])
def test_a_member_that_says_again_and_again_how_far_it_is_holds_nobody_up(claimed: int) -> None:
    """One is at no such round, the other at one from which nobody could count on."""

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        liar = swarm.nodes["c"].method
        assert isinstance(liar, Gossip)
        served = liar._parts.rpc._server.methods
        state = liar.state
        hash = state_hash(claimed, swarm.nodes["c"].trainer.layout, state)

        async def lie(peer: str, query: RunQuery) -> Stand:
            return Stand(claimed, hash)

        if claimed == MAX_ROUND:
            served["gossip.stand"] = replace(served["gossip.stand"], handler=lie)
            liar.catch_up.serve_state(claimed, hash, state)
        began = swarm.nodes["a"].done
        for _ in range(120):
            for name in NAMES[:2]:
                with suppress(CallError):
                    request = MeetRequest(simswarm.RUN, claimed)
                    await liar._parts.rpc.call(swarm.peer(name), "gossip.meet", request, MeetReply, timeout=1)
            await trio.sleep(0.5)
        for name in NAMES[:2]:
            assert began + 15 < swarm.nodes[name].done < 1000
            taken = [told["steps"] for round, told in swarm.nodes[name].rounds.items() if round > began]
            assert sum(taken) > 0.8 * STEPS * len(taken)

    simulate(body)


# --- nobody's end stops the others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SLOW(2), 3, 4])
def test_survivors_go_on_whichever_message_a_member_died_at(size: int) -> None:
    """All work is there once; but for a meeting whose last answer was lost, which one of two counted alone."""
    names = NAMES[:size]
    looked: list[np.ndarray] = []  # shares, and work, as the round begins

    async def look(swarm: SimSwarm) -> None:
        await begin(swarm, names)
        looked[:] = shares(swarm, names), work_of(swarm, names)

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.kill(victim)
        before = looked[0] + np.diag(work_of(swarm, names) - looked[1])  # as each would come to its meeting
        survivors = tuple(n for n in names if n != victim)
        await swarm.past(SWEPT + 3, *survivors, within=60)
        assert_no_long_waits(swarm, survivors, (size, victim, at))
        off = shares(swarm, names).sum(axis=0) - work_of(swarm, names)
        between = [(row - before[names.index(victim)]) / 2 for row in before]  # nothing, of the victim itself
        least = min(float(np.abs(off - sign * each).max()) for each in between for sign in (1, -1))
        assert least <= ROUNDING, (size, victim, at, off)

    at_messages(names, FEW, struck, first=look, model=signature)


def test_who_goes_on_alone_tells_nobody_that_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who asked in that moment waited for a minute."""
    said: list[bool] = []
    run = Meeting.run

    async def asked_as_it_ends(meeting: Meeting) -> None:
        try:
            await run(meeting)
        finally:
            said.append(meeting.be_met("somebody", meeting.round))

    monkeypatch.setattr(Meeting, "run", asked_as_it_ends)
    simulate(partial(begin, names=NAMES[:1]))
    assert said[:SWEPT] == [False] * SWEPT  # rounds that ended; then the swarm does


@pytest.mark.parametrize("size", [SLOW(2), 3])
def test_all_are_near_again_whichever_message_a_member_froze_at(size: int) -> None:
    names = NAMES[:size]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.world.freeze(swarm.peer(victim))
        others = tuple(n for n in names if n != victim)
        await swarm.past(SWEPT + 3, *others, within=60)
        assert_no_long_waits(swarm, others, (size, victim, at))
        swarm.world.thaw(swarm.peer(victim))
        thawed_in = max(node.done for node in swarm.nodes.values())
        await swarm.past(thawed_in + 25, *names, within=300)
        assert distance(swarm, *names) < CLOSE

    at_messages(names, FEW, struck)


def test_one_that_leaves_in_order_holds_nobody_up() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await swarm.past(7, *NAMES[:3])
        await trio.sleep(0.5)
        swarm.nodes["c"].session.stop()  # its process lives on and answers pings
        with trio.fail_after(10):
            await swarm.nodes["c"].session.finished.wait()
        left_in = swarm.nodes["a"].done
        await swarm.past(left_in + 6, "a", "b")
        for name in "ab":
            after = [t["seconds"] for r, t in swarm.nodes[name].rounds.items() if r > left_in]
            assert max(after) <= 1.5 * STEPS * STEP + 0.5

    simulate(body)


def test_the_sides_of_a_partition_both_go_on_and_their_work_comes_together() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES)
        sides = NAMES[:3], NAMES[3:]
        swarm.world.partition([[swarm.peer(n) for n in side] for side in sides])
        await swarm.past(SWEPT + 8, *NAMES, within=300)
        apart = distance(swarm, *NAMES)
        swarm.world.heal()
        healed_in = max(node.done for node in swarm.nodes.values())
        await swarm.past(healed_in + 40, *NAMES, within=400)
        assert distance(swarm, *NAMES) < apart
        assert_work_is_there_once(swarm, NAMES, "healed", slack=2 * ONE_ANSWER)
        for name in NAMES:  # what each did while they were apart is in everybody's state
            model = swarm.nodes[name].trainer.toy
            held = [float(swarm.nodes[n].method.saved().state.parameters[model.axis]) for n in NAMES]
            assert min(held) > 0.5 * model.work / len(NAMES)

    simulate(body, model=signature)


# --- coming and going -------------------------------------------------------------------------------------------------


def test_one_that_joins_late_is_met_in_the_next_rounds() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await swarm.past(8, *NAMES[:3])
        late = await swarm.start("late", join="b")
        assert late.method.place is None
        await swarm.until(lambda: bool(late.rounds), within=60)
        joined_in = late.done
        assert joined_in >= 8
        await swarm.past(joined_in + 6, "late", within=60)
        assert any(told["members"] > 1 for told in late.rounds.values())
        assert any(e["event"] == "caught_up" for e in late.events)
        assert distance(swarm, *NAMES[:3], "late") < CLOSE

    simulate(body)


def test_a_paused_node_holds_nobody_up_and_comes_back() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await trio.sleep(0.5)
        await swarm.nodes["c"].session.pause()
        paused_in = swarm.nodes["a"].done
        await swarm.past(paused_in + 8, "a", "b", within=120)
        assert swarm.nodes["c"].session.phase == "paused"
        for name in "ab":
            after = [told["seconds"] for r, told in swarm.nodes[name].rounds.items() if r > paused_in]
            assert max(after) <= 1.5 * STEPS * STEP + 0.5
        swarm.nodes["c"].session.resume()
        resumed_in = max(node.done for node in swarm.nodes.values())
        await swarm.past(resumed_in + 20, *NAMES[:3], within=300)
        assert swarm.nodes["c"].method.place.round >= swarm.nodes["a"].done - 2
        assert distance(swarm, *NAMES[:3]) < CLOSE

    simulate(body)


def test_a_swarm_that_restarts_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await begin(swarm, NAMES[:3])
        await swarm.past(8, *NAMES[:3])
        for name in NAMES[:3]:
            await swarm.leave(name)
        stood = min(max(swarm.nodes[name].rounds) for name in NAMES[:3])
        loss = swarm.nodes["a"].rounds[0]["loss"]
        for name, join in (("a", None), ("b", "a"), ("c", "a")):
            await swarm.start(name, join=join)
        await swarm.past(stood + 6, *NAMES[:3], within=300)
        assert min(min(swarm.nodes[name].rounds) for name in NAMES[:3]) >= stood - 1
        assert swarm.nodes["a"].rounds[max(swarm.nodes["a"].rounds)]["loss"] < loss
        assert_work_is_there_once(swarm, NAMES[:3], "restarted", slack=2 * ONE_ANSWER, done=swarm_work)

    swarm_work: dict[str, float] = {}

    def remembered(name: str, peer: str) -> SignatureModel:
        model = signature(name, peer)
        model.work = swarm_work.get(name, 0.0)
        step = model.step

        def noted(*, round: int, steps: int) -> float:
            loss = step(round=round, steps=steps)
            swarm_work[name] = model.work
            return loss

        model.step = noted  # type: ignore[method-assign]
        return model

    simulate(body, model=remembered)


def test_what_is_saved_is_where_the_node_stands_and_stays_as_it_is() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        node = swarm.nodes["b"].method
        saved, place = node.saved(), node.place
        assert place is not None
        assert (saved.round, saved.method) == (place.round, "gossip")
        assert saved.state.parameters.shape == saved.residual.shape == (swarm.nodes["b"].trainer.layout.parameters,)
        before = saved.state.parameters.copy(), saved.residual.copy()
        await swarm.past(SWEPT + 1, *NAMES[:2])
        assert np.array_equal(saved.state.parameters, before[0]) and np.array_equal(saved.residual, before[1])

    simulate(body)


# --- work is not lost -------------------------------------------------------------------------------------------------


def signature(name: str, peer: str) -> SignatureModel:
    return SignatureModel(axis=NAMES.index(name), peer_id=peer)


def shares(swarm: SimSwarm, names: tuple[str, ...]) -> np.ndarray:
    """How many rounds of each one's work (columns) are in each one's parameters (rows), but for its residual."""
    nodes = [swarm.nodes[name] for name in names]
    axes = [node.trainer.toy.axis for node in nodes]
    held = [node.trainer.parameters()[axes] - node.method.saved().residual[axes] for node in nodes]
    return np.array(held, dtype=np.float64) / ROUND_OF_WORK


def work_of(swarm: SimSwarm, names: tuple[str, ...]) -> np.ndarray:
    """Rounds of work that each did."""
    return np.array([swarm.nodes[name].trainer.toy.work / ROUND_OF_WORK for name in names])


def assert_work_is_there_once(
    swarm: SimSwarm, names: tuple[str, ...], context: object, *, slack: float, done: dict[str, float] | None = None
) -> None:
    """What each did is in the states, residuals and local parameters of all, of the dead as well, and there once."""
    work = work_of(swarm, names) if done is None else np.array([done[name] / ROUND_OF_WORK for name in names])
    held = shares(swarm, names).sum(axis=0)
    assert np.abs(held - work).max() <= slack, (context, held, work)


@pytest.mark.parametrize("size", [4, 5])
def test_all_work_is_in_the_states_of_all(size: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:size])
        await swarm.past(12, *NAMES[:size])
        await trio.sleep(1.0)  # in the middle of training, so that nobody is between two halves of a meeting
        assert_work_is_there_once(swarm, NAMES[:size], "undisturbed", slack=ROUNDING)

    assert len(NAMES) <= AXES
    simulate(body, model=signature)


def test_work_of_a_round_that_a_node_missed_counts_later() -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await trio.sleep(1.5)  # in the middle of training
        await swarm.nodes["c"].session.pause()
        await swarm.past(SWEPT + 2, "a", "b")
        residual = swarm.nodes["c"].method.saved().residual[NAMES.index("c")]
        assert -residual / ROUND_OF_WORK > 0.3
        swarm.nodes["c"].session.resume()
        resumed_in = swarm.nodes["a"].done
        await swarm.past(resumed_in + 12, *NAMES[:3], within=300)
        await trio.sleep(1.0)
        assert_work_is_there_once(swarm, NAMES[:3], "paused", slack=ONE_ANSWER)

    simulate(body, model=signature)


@pytest.mark.parametrize("size", [SLOW(2), 3])
def test_a_round_can_be_cancelled_at_any_message(size: int) -> None:
    names = NAMES[:size]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.nodes[victim].session._training.cancel()
        await swarm.past(SWEPT + 6, *names, within=100)
        await trio.sleep(1.0)
        assert_no_long_waits(swarm, names, (size, victim, at))
        assert_work_is_there_once(swarm, names, (size, victim, at), slack=ONE_ANSWER)

    at_messages(names, 2 * FEW, struck, model=signature)
