"""A population of learning rates in a known run: better rates win, states stay equal, whoever comes and goes."""

from __future__ import annotations

import math
import random
from functools import cached_property

import pytest
import trio
from simswarm import SimNode, SimSwarm, simulate

from swarmnode.protocols.methods.known.population import LEAST, MOST, STEPS, Population, Trial, next_factor
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.wire import WireError, received
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.sections import InnerSection

NAMES = ("a", "b", "c", "d", "e")
PERIOD = 2  # rounds
SMALL = 0.002  # a rate of the toy; it learns best by some 0.02


class Learner(SimTrainer):
    """Its rate is the toy's beginning one times what the member says of the run's."""

    def steer(self, inner: InnerSection) -> None:
        super().steer(inner)
        self.toy._lr = SMALL * inner.lr / InnerSection().lr


class TryingSwarm(SimSwarm):
    period = PERIOD

    @cached_property
    def spec(self) -> RunSpec:
        return super().spec.updated(inner={"population": self.period})


class PlainSwarm(TryingSwarm):
    period = 0


def learner(name: str, peer: PeerId) -> Learner:
    return Learner(ToyModel(dimension=64, seed=0, peer_id=peer, lr=SMALL), seconds_per_step=0.4)


def population(node: SimNode) -> Population | None:
    return node.diloco.rounds.population


def loss_after(kind: type[SimSwarm], rounds: int) -> float:
    """Held-out, of the state after so many rounds; all of them had equal states."""
    found: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(rounds, *NAMES)
        assert all(len(swarm.hashes(round)) == 1 for round in range(rounds))
        found.append(swarm.nodes["a"].rounds[rounds]["loss"])
        tried = [population(node) for node in swarm.nodes.values()]
        assert all(each.factor > 1.5 for each in tried if each) and all(tried) == (kind is TryingSwarm)

    simulate(body, *NAMES, swarm=kind, trainer=learner)
    return found[0]


def test_a_population_that_begins_with_a_small_rate_learns_faster_than_without() -> None:
    assert loss_after(TryingSwarm, 30) < 0.8 * loss_after(PlainSwarm, 30)


def test_who_joins_takes_over_and_who_comes_back_goes_on_with_what_it_tried() -> None:
    async def body(swarm: TryingSwarm) -> None:
        await swarm.round_done(15, *NAMES)
        swarm.kill("c")
        await trio.sleep(1.0)
        await swarm.start("c", join="a")
        await swarm.start("f", join="a")
        late = swarm.nodes["c"], swarm.nodes["f"]
        await swarm.until(lambda: all(len(node.rounds) > 2 * PERIOD + 1 for node in late))
        for node in late:
            assert population(node).factor > 1.25, "it is as the others', and not what one step from 1 gives"
        for round in range(max(swarm.nodes["a"].rounds)):
            assert len(swarm.hashes(round)) == 1
            assert node.session.last is not None and node.session.last.steered["inner.lr"] > InnerSection().lr

    simulate(body, *NAMES, swarm=TryingSwarm, trainer=learner)


def test_who_is_alone_and_who_hears_nothing_but_nonsense() -> None:
    async def body(swarm: TryingSwarm) -> None:
        await swarm.start("a")
        await swarm.round_done(5, "a")
        assert population(swarm.nodes["a"]).factor == 1.0

    simulate(body, swarm=TryingSwarm, trainer=learner)
    for factor, loss in ((1e6, 1.0), (1.0, "x"), (1.0, math.nan)):
        with pytest.raises(WireError):
            received(Trial, {"period": 1, "factor": factor, "loss": loss})
    for value in (None, 3, {}):
        with pytest.raises(WireError):
            received(Trial, value)


def test_who_is_cut_short_while_it_compares_compares_when_it_takes_up_the_round_again() -> None:
    async def body(swarm: TryingSwarm) -> None:
        await swarm.round_done(6, *NAMES)
        here, me = Population(swarm.nodes["c"].session._context), swarm.peer("c")
        members, hear, scope = [swarm.peer(name) for name in NAMES], here._heard, trio.CancelScope()
        told = await hear(me)
        assert told is not None
        first = (told.period + 1) * PERIOD + 1  # round of the next period

        async def heard(peer: PeerId) -> Trial | None:
            if peer != me:
                scope.cancel()
                await trio.lowlevel.checkpoint()
            return await hear(peer)

        here._heard = heard  # type: ignore[method-assign]
        with scope:
            await here.begin(first, members)
        assert scope.cancelled_caught and here.factor == told.factor
        here._heard = hear  # type: ignore[method-assign]
        await here.begin(first, members)
        assert here.factor != told.factor

    simulate(body, *NAMES, swarm=TryingSwarm, trainer=learner)


def test_the_worst_quarter_takes_over_the_best_and_all_stay_in_bounds() -> None:
    trials = {f"p{n}": Trial(3, factor=1.0 + n, loss=10.0 - n) for n in range(8)}  # p7 and p6 are the best
    following = {peer: next_factor(peer, trial.factor, trials, random.Random(peer)) for peer, trial in trials.items()}
    for peer, trial in trials.items():
        from_ = {7.0, 8.0} if peer in ("p0", "p1") else {trial.factor}
        assert any(following[peer] == pytest.approx(own * step) for own in from_ for step in STEPS), peer
    newcomer = next_factor("new", 1.0, trials, random.Random(1))
    assert newcomer / STEPS[0] in (7.0, 8.0) or newcomer / STEPS[1] in (7.0, 8.0)
    assert next_factor("p", MOST, {}, random.Random(3)) in (MOST, MOST * STEPS[0])
    assert next_factor("p", LEAST, {}, random.Random(3)) in (LEAST, LEAST * STEPS[1])


@pytest.mark.parametrize(("inner", "method"), [(1, "diloco"), (4, "btard"), (4, "open")])
def test_a_run_file_that_wants_a_population_where_there_is_none_is_refused(inner: int, method: str) -> None:
    tables = {
        "run": {"name": "t", "trust": "open" if method == "open" else "known"},
        "inner": {"population": inner},
        "exchange": {"method": method},
    }
    with pytest.raises(SettingError, match=r"population = .* does not fit"):
        parse_runspec(tables, source="t.toml")
