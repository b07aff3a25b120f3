"""Swarms on simnet whose judges measure one another's figures again: who lies is removed, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import simswarm
from simswarm import Body, SimSwarm

from swarmnode.protocols.chain.statements import JUDGED, Score
from swarmnode.protocols.methods.open import recheck
from swarmnode.protocols.methods.open.recheck import CHECKED
from swarmnode.protocols.methods.open.round import RoundContext
from swarmnode.testing.simnet import SimWorld

NAMES = ("a", "b", "c", "d", "e")
LIAR = "e"
Lie = Callable[[tuple[Score, ...]], tuple[Score, ...]]


def simulate(body: Body) -> None:
    """`body` with a swarm of validators who have all begun."""
    simswarm.simulate(body, *NAMES, world=SimWorld(latency=0.05), method="open", validators=NAMES)


def lies(swarm: SimSwarm, name: str, lie: Lie) -> None:
    """From now on this judge says what the lie makes of its figures."""
    rounds = swarm.nodes[name].open.rounds
    honest = rounds.seal

    async def seal(context: RoundContext, scores: tuple[Score, ...]) -> None:
        await honest(context, lie(scores))

    rounds.seal = seal  # type: ignore[method-assign]


def counted(swarm: SimSwarm, outcome: str) -> int:
    """How often honest nodes came to this."""
    return sum(swarm.nodes[name].open.rechecks.counts[outcome] for name in NAMES if name != LIAR)


def test_honest_judges_find_one_another_s_figures_right() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(16, *NAMES)
        assert counted(swarm, "right") >= 8
        assert counted(swarm, "false") == 0
        assert all(not swarm.nodes[name].open.rechecks.slanderers for name in NAMES)
        chain = swarm.nodes["a"].open.store.block.chain
        assert len(chain.validators) == len(NAMES) and chain.expelled == {}

    simulate(body)


def test_where_the_window_has_no_room_for_it_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "CHECKED", 1.0)
    monkeypatch.setattr(recheck, "sequences_for", lambda trained: 1_000_000)

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(8, *NAMES)
        assert counted(swarm, "right") <= len(NAMES) < counted(swarm, "untold")  # before anything was trained at most

    simulate(body)


def one_figure(scores: tuple[Score, ...]) -> tuple[Score, ...]:
    """One figure is a tenth more than it was."""
    place = next(place for place, score in enumerate(scores) if score.found == JUDGED)
    told = replace(scores[place], gain=scores[place].gain * 11 // 10 + 100)
    return (*scores[:place], told, *scores[place + 1 :])


def test_a_judge_that_lies_is_removed_and_loses_what_it_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "CHECKED", 1.0)

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        lies(swarm, LIAR, one_figure)
        await swarm.round_done(12, *NAMES)
        chain = swarm.nodes["a"].open.store.block.chain
        assert set(chain.expelled) == {swarm.peer(LIAR)}
        assert len(chain.validators) == len(NAMES) - 1
        lies_until = chain.expelled[swarm.peer(LIAR)]
        assert all(one.author != swarm.peer(LIAR) for worked in chain.history[:lies_until] for one in worked)
        assert counted(swarm, "false") >= 3

    simulate(body)


def test_slander_removes_nobody_and_costs_everybody_one_measurement() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        store, chain = swarm.nodes[LIAR].open.store, swarm.nodes[LIAR].open.store.block.chain

        def everybody() -> tuple[tuple[int, int], ...]:
            now = store.block.chain
            return tuple((place, now.round - 1) for place in range(len(now.validators)))

        store.accusations = everybody  # type: ignore[method-assign]
        began, measured = store.block.chain.round, counted(swarm, "right")
        await swarm.round_done(began + 12, *NAMES)
        honest = [swarm.nodes[name].open.rechecks for name in NAMES if name != LIAR]
        assert all(set(one.slanderers) == {swarm.peer(LIAR)} for one in honest)
        assert swarm.nodes["a"].open.store.block.chain.validators == chain.validators
        assert counted(swarm, "false") == 0 and not any(swarm.nodes[name].open.store.disproved for name in NAMES[:-1])
        assert counted(swarm, "right") - measured < 2 * CHECKED * len(honest) * 12 + len(honest)

    simulate(body)


def test_figures_that_rest_on_what_others_do_not_have_are_not_said_to_be_false() -> None:
    """An author whose work reaches one judge alone."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(2, *NAMES)
        author, judge = swarm.nodes["b"].open, swarm.nodes["c"].open

        def slip(id: bytes) -> None:
            judge.contributions._held[id] = author.contributions[id]

        author.contributions.serve = slip  # type: ignore[method-assign]
        await swarm.round_done(16, *NAMES)
        assert swarm.nodes["a"].open.store.block.chain.expelled == {}
        assert counted(swarm, "false") == 0 < counted(swarm, "untold")

    simulate(body)
