"""What every exchange method promises, whatever it does: the contract of `protocols/methods/method.py`, held.

A method that is put into `OF_ONE_HISTORY` runs through all of this. The swarms are real sessions on a simulated network
with virtual time, so nothing here waits; the time limits are for a swarm that would never end, not for a slow one. Of
the messages of a round some are tried; `make thorough` tries all of them in swarms of two, more in swarms of three, and
larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from hypothesis import settings
from signature import AXES, STRIDE, SignatureModel, origin_of
from simswarm import Body, SimSwarm
from tripwire import Struck, Tripwire, spread, strike

from swarmnode.testing.toy import ToyModel
from swarmnode.training.outer import Layout

# Methods whose members go through the same states; with sapo each has a policy of its own.
OF_ONE_HISTORY = ("async", "btard", "demo", "diloco", "lowrank", "open", "streaming")
BY_SIGNS = ("demo",)  # how far parameters moved does not tell how much work moved them: test_demo.py has the accounts
NAMES = ("a", "b", "c", "d", "e")
STEPS = 5
ROUND_OF_WORK = STEPS * STRIDE
FLOOR = 5.0  # seconds; the shortest time that a phase of the exchange is given
SWEPT = 2  # the round in which something happens
PHASES = {"waiting", "catching-up", "training", "exchanging"}
QUICK = settings.default.max_examples < 1000
MANY = 6 if QUICK else 400  # messages of a round, spread over it, that are tried: in `make thorough` each
FEW = 3 if QUICK else 40  # of them are tried elsewhere

SLOW = partial(pytest.param, marks=pytest.mark.slow)
LARGER = [] if QUICK else [SLOW(4, FEW), SLOW(5, FEW)]

pytestmark = pytest.mark.parametrize("method", sorted(OF_ONE_HISTORY))
Model = Callable[[str, str], ToyModel]


def toy(name: str, peer: str) -> ToyModel:
    return ToyModel(dimension=64, seed=0, peer_id=peer)


def squared(model: Model) -> Model:
    """The same with a matrix in the place of the weights."""

    def made(name: str, peer: str) -> ToyModel:
        one = model(name, peer)
        side = math.isqrt(one.vector.size)
        one.layout = Layout.of([("weight", (side, side)), ("bias", (1,))])
        assert one.layout.parameters == one.vector.size
        return one

    return made


def simulate(
    method: str, body: Body, *, validators: tuple[str, ...] = NAMES, model: Model = toy, **options: Any
) -> None:
    if method == "lowrank":  # vectors have no rank
        options["exchange"] = {"rank": 1}
        model = squared(model)
    given = {"method": method, "validators": validators, "steps": STEPS, "floor": FLOOR, **options}
    simswarm.simulate(body, model=model, **given)


async def begin(swarm: SimSwarm, names: tuple[str, ...]) -> None:
    """All these nodes in one run, about to do round SWEPT."""
    await swarm.begin(names)
    await swarm.round_done(SWEPT - 1, *names)


def at_messages(method: str, names: tuple[str, ...], most: int, struck: Struck, **options: Any) -> None:
    """`struck(swarm, victim, at)` at `most` of the messages of round SWEPT; the victim is each of `names` in turn."""

    async def done(swarm: SimSwarm) -> None:
        await swarm.round_done(SWEPT, *names)

    strike(partial(simulate, method, **options), partial(begin, names=names), done, names, most, struck)


def assert_one_result_a_round(swarm: SimSwarm, names: tuple[str, ...], context: object) -> None:
    """Equal hashes for equal rounds, and equal bits for equal hashes."""
    by_round: dict[int, set[str]] = {}
    for name, told in swarm.told:
        if name in names:
            by_round.setdefault(told["round"], set()).add(told["state_hash"])
    assert all(len(hashes) == 1 for hashes in by_round.values()), (context, by_round)
    swarm.assert_equal_hashes_are_equal_bits()


# --- learning ---------------------------------------------------------------------------------------------------------


def final_loss(method: str, names: tuple[str, ...], rounds: int) -> float:
    losses: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, names)
        await swarm.round_done(rounds, *names)
        assert_one_result_a_round(swarm, names, "learning")
        losses.append(swarm.nodes[names[0]].rounds[rounds]["loss"])

    simulate(method, body, validators=names)
    return losses[0]


def test_a_swarm_learns_more_than_a_node_alone(method: str) -> None:
    assert final_loss(method, NAMES[:4], 40) < 0.9 * final_loss(method, NAMES[:1], 40)


# --- nobody's end stops the others ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "most"), [SLOW(2, MANY), (3, FEW), *LARGER])
def test_survivors_agree_whichever_message_a_member_died_at(method: str, size: int, most: int) -> None:
    names = NAMES[:size]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.kill(victim)
        survivors = tuple(n for n in names if n != victim)
        await swarm.round_done(SWEPT + 2, *survivors, within=300)
        assert_one_result_a_round(swarm, names, (size, victim, at))

    at_messages(method, names, most, struck)


@pytest.mark.parametrize(("size", "most"), [SLOW(2, MANY), (3, FEW), *LARGER[:1]])
def test_all_return_to_one_history_whichever_message_a_member_froze_at(method: str, size: int, most: int) -> None:
    names = NAMES[:size]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.world.freeze(swarm.peer(victim))
        others = tuple(n for n in names if n != victim)
        await swarm.round_done(SWEPT + 2, *others, within=300)
        assert_one_result_a_round(swarm, others, (size, victim, at))
        swarm.world.thaw(swarm.peer(victim))
        thawed_in = max(swarm.nodes[others[0]].rounds)
        await swarm.until(lambda: swarm.all_agree(after=thawed_in), within=300)

    at_messages(method, names, most, struck)


@pytest.mark.parametrize("size", [2, 3])
def test_one_that_leaves_in_order_holds_nobody_up(method: str, size: int) -> None:
    *others, leaver = names = NAMES[:size]

    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, names)
        await swarm.round_done(7, *names)
        await trio.sleep(0.5)
        swarm.nodes[leaver].session.stop()  # its process lives on and answers pings
        with trio.fail_after(10):
            await swarm.nodes[leaver].session.finished.wait()
        await swarm.round_done(10, *others)
        seconds = [swarm.nodes["a"].rounds[r]["seconds"] for r in range(11)]
        assert max(seconds[8:]) <= 1.5 * max(seconds[4:8]) + 0.5
        assert_one_result_a_round(swarm, tuple(others), "left")

    simulate(method, body)


def test_a_swarm_that_was_cut_in_two_becomes_one_history_again(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES)
        swarm.world.partition([[swarm.peer(n) for n in NAMES[:3]], [swarm.peer(n) for n in NAMES[3:]]])
        await swarm.round_done(SWEPT + 5, *NAMES[:3], within=300)
        assert_one_result_a_round(swarm, NAMES[:3], "majority")
        assert swarm.nodes["a"].rounds[SWEPT + 5]["members"] == 3
        assert (max(swarm.nodes["d"].rounds) > SWEPT) == (method != "open")  # which needs most validators
        swarm.world.heal()
        healed_in = max(max(node.rounds) for node in swarm.nodes.values())
        await swarm.until(lambda: swarm.all_agree(after=healed_in), within=600)
        a = swarm.nodes["a"]
        await swarm.until(lambda: any(r > healed_in and e["members"] == 5 for r, e in a.rounds.items()), within=300)

    simulate(method, body)


# --- coming and going -------------------------------------------------------------------------------------------------


def test_one_that_joins_late_stands_with_the_others(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        late = await swarm.start("late", join="b")
        assert late.method.place is None
        assert late.method.phase in PHASES
        joined_in = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: swarm.all_agree(after=joined_in), within=300)
        assert_one_result_a_round(swarm, (*NAMES[:3], "late"), "joined")
        mine = swarm.peer("late")
        await swarm.until(lambda: any(mine not in told["missing"] for told in late.rounds.values()), within=300)
        assert any(e["event"] == "caught_up" for e in late.events)

    simulate(method, body)


def test_a_paused_node_holds_nobody_up_and_comes_back(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await trio.sleep(0.5)
        await swarm.nodes["c"].session.pause()
        usual = swarm.nodes["a"].rounds[SWEPT - 1]["seconds"]
        await swarm.round_done(SWEPT + 3, "a", "b", within=4 * usual + FLOOR / 2)
        assert swarm.nodes["c"].session.phase == "paused"
        assert SWEPT + 3 not in swarm.nodes["c"].rounds
        swarm.nodes["c"].session.resume()
        resumed_in = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: swarm.all_agree(after=resumed_in), within=300)
        assert_one_result_a_round(swarm, NAMES[:3], "paused")

    simulate(method, body)


def test_a_swarm_that_restarts_goes_on_from_what_was_saved(method: str, tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await begin(swarm, NAMES[:3])
        await swarm.round_done(5, *NAMES[:3])
        for name in NAMES[:3]:
            await swarm.leave(name)
        stood = min(max(swarm.nodes[name].rounds) for name in NAMES[:3])
        loss = swarm.nodes["a"].rounds[0]["loss"]
        for name, join in (("a", None), ("b", "a"), ("c", "a")):
            await swarm.start(name, join=join)
        await swarm.until(lambda: swarm.all_agree(after=stood), within=300)
        assert swarm.nodes["a"].rounds[max(swarm.nodes["a"].rounds)]["loss"] < loss

    simulate(method, body)


def test_what_is_saved_is_where_the_node_stands_and_stays_as_it_is(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        node = swarm.nodes["b"].method
        saved, place = node.saved(), node.place
        assert place is not None
        assert (saved.round, saved.method) == (place.round, method)
        assert saved.state.parameters.shape == saved.residual.shape == (swarm.nodes["b"].trainer.layout.parameters,)
        before = saved.state.parameters.copy(), saved.residual.copy()
        await swarm.round_done(SWEPT + 1, *NAMES[:2])
        assert np.array_equal(saved.state.parameters, before[0]) and np.array_equal(saved.residual, before[1])

    simulate(method, body)


# --- work is not lost -------------------------------------------------------------------------------------------------


def signature(name: str, peer: str) -> SignatureModel:
    return SignatureModel(axis=NAMES.index(name), peer_id=peer)


def accounts(swarm: SimSwarm, name: str, members: int) -> tuple[float, float, float]:
    """What this node did; what of it is in the shared state if each round was a mean of so many; what else it holds.

    In units of one round's work.
    """
    node = swarm.nodes[name]
    model = node.trainer.toy
    assert isinstance(model, SignatureModel)
    saved = node.method.saved()
    shared = float(saved.state.parameters[model.axis])
    local = float(node.trainer.parameters()[model.axis]) - float(origin_of(node.method)[model.axis])
    own = local - float(saved.residual[model.axis])
    return model.work / ROUND_OF_WORK, members * shared / ROUND_OF_WORK, own / ROUND_OF_WORK


def assert_nothing_lost(
    swarm: SimSwarm, names: tuple[str, ...], context: object, *, fewest: int, slack: float = 0.5
) -> None:
    """All that was done is in results, in the residual or in the local parameters, and is there once.

    Rounds are means over `fewest` to all of `names`, which bounds what a share of the state stands for. `slack`, in
    rounds of work, is for residuals that fade while they wait.
    """
    for name in () if swarm.spec.exchange.method in BY_SIGNS else names:
        done, shared, own = accounts(swarm, name, len(names))
        _, least, _ = accounts(swarm, name, fewest)
        assert shared + own >= done - slack, (context, name, done, shared, own)
        assert least + own <= done + slack, (context, name, done, least, own)


def test_all_work_is_in_results_residuals_or_local_parameters(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:4])
        await swarm.round_done(9, *NAMES[:4])
        told = [swarm.nodes[name].rounds[round] for name in NAMES[:4] for round in range(SWEPT, 10)]
        assert {(each["outcome"], each["members"]) for each in told} == {("Completed", 4)}
        assert_nothing_lost(swarm, NAMES[:4], "undisturbed", fewest=4)

    assert len(NAMES) <= AXES
    simulate(method, body, model=signature)


def test_work_of_a_round_that_a_node_missed_counts_later(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await trio.sleep(1.5)  # in the middle of training
        await swarm.nodes["c"].session.pause()
        await swarm.round_done(SWEPT + 1, "a", "b")
        done, _, own = accounts(swarm, "c", 3)
        assert own > 0.3 and done > SWEPT
        swarm.nodes["c"].session.resume()
        resumed_in = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: swarm.all_agree(after=resumed_in + 2), within=300)
        assert_nothing_lost(swarm, NAMES[:3], "paused", fewest=2)

    simulate(method, body, model=signature)


def test_what_counted_before_a_long_pause_is_not_sent_again(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:3])
        await trio.sleep(1.5)
        await swarm.nodes["c"].session.pause()
        await swarm.round_done(SWEPT + 12, "a", "b")
        swarm.nodes["c"].session.resume()
        resumed_in = max(swarm.nodes["a"].rounds)
        await swarm.until(lambda: swarm.all_agree(after=resumed_in + 2), within=300)
        for name in () if method in BY_SIGNS else NAMES[:3]:
            done, least, own = accounts(swarm, name, 2)
            assert least + own <= done + 0.5, (name, done, least, own)

    simulate(method, body, model=signature)


@pytest.mark.parametrize(("size", "most"), [SLOW(2, 2 * FEW), (3, FEW)])
def test_a_round_can_be_cancelled_at_any_message(method: str, size: int, most: int) -> None:
    names = NAMES[:size]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        swarm.nodes[victim].session._training.cancel()
        await swarm.until(lambda: swarm.all_agree(after=SWEPT + 1), within=300)
        assert_one_result_a_round(swarm, names, (size, victim, at))
        # who begins a round anew comes late and weighs less in it, and so does what it had held back till then:
        # with lowrank, whose rank here is less than there are members, the work of three rounds
        slack = 1.25 if method == "lowrank" else 0.95
        assert_nothing_lost(swarm, names, (size, victim, at), fewest=size - 1, slack=slack)

    at_messages(method, names, most, struck, model=signature)


@pytest.mark.parametrize(("size", "most"), [(2, 1), *([] if QUICK else [SLOW(2, FEW), SLOW(3, FEW)])])
def test_whose_round_ends_by_a_defect_at_any_message_finds_its_place_again(method: str, size: int, most: int) -> None:
    names = NAMES[:size]

    async def struck(swarm: SimSwarm, victim: str, at: int) -> None:
        session = swarm.nodes[victim].session
        works, failed = session.method.run_round, trio.Event()

        async def fails() -> Any:
            session.method.run_round = works  # type: ignore[method-assign]
            failed.set()
            raise OverflowError("int too large to convert to float")

        session._kept = partial(type(session)._kept, session)  # type: ignore[method-assign]
        session.method.run_round = fails  # type: ignore[method-assign]
        session._training.cancel()
        await failed.wait()
        failed_in = session.place.round if session.place is not None else 0
        await swarm.until(lambda: swarm.all_agree(after=failed_in + 1), within=300)
        assert_one_result_a_round(swarm, names, (size, victim, at))

    at_messages(method, names, most, struck, model=signature)


@pytest.mark.slow
def test_the_search_for_a_place_can_be_cancelled_at_any_message(method: str) -> None:
    total: list[int] = []

    async def count(swarm: SimSwarm) -> None:
        await begin(swarm, NAMES[:2])
        late = await swarm.start("late", join="a")
        tripwire = Tripwire(swarm.world)
        await swarm.until(lambda: bool(late.rounds))
        total.append(tripwire.sent)

    simulate(method, count)
    for number in spread(total[0], 2 * FEW):

        async def body(swarm: SimSwarm, at: int = number) -> None:
            await begin(swarm, NAMES[:2])
            late = await swarm.start("late", join="a")
            await Tripwire(swarm.world).reached(at)
            late.session.stop()
            with trio.fail_after(20):
                await late.session.finished.wait()
            swarm.kill("late")
            again = await swarm.start("late", join="a")
            await swarm.until(lambda: bool(again.rounds) and swarm.all_agree(), within=300)

        simulate(method, body)
