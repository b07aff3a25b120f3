"""What `swarmnode plan` predicts: that it follows from link, machine and members as it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from realnodes import swarmnode

from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.plan import Link, Pace, measure, predict, recommend, ways
from swarmnode.node.trainer.child import TrainerFailed, TrainerSettings
from swarmnode.training.memory import Machine, Weight
from swarmnode.training.runspec import RunSpec, parse_runspec

GB = 10**9
HOME = Link(2.5e6, 12.5e6, 0.04)
PLENTY = Machine(1000 * GB, 10_000 * GB)
CODECS = dict.fromkeys(("int8", "fp16", "topk", "sign3"), 1e-9)
PACE = Pace(Weight(100_000_000), 1.0, 2.0, 5e-9, CODECS, CODECS, 50e-9, 100e-9)


def spec(**exchange: Any) -> RunSpec:
    tables = {"run": {"name": "p"}, "inner": {"steps": 100}, "exchange": {"group_size": 16, **exchange}}
    return parse_runspec(tables, source="test")


def test_an_all_reduce_takes_what_the_link_takes_for_its_bytes() -> None:
    (way, *_) = ways(spec())
    there = predict(way, PACE, HOME, 4, PLENTY)
    wire = 2 * 3 / 4 * 100e6 / 2.5e6  # 1 byte for each parameter, by the slower direction
    assert there.round_seconds == pytest.approx(100 + 2.0 + 0.5 + wire, rel=0.03)
    assert there.computing == pytest.approx(100 / there.round_seconds)
    assert there.sent * there.round_seconds / 86_400 == pytest.approx(150e6, rel=0.03)


def test_a_fragments_exchange_takes_no_time_while_there_are_steps_to_take() -> None:
    (way, *_) = ways(spec(method="streaming", codec="int8", fragments=4))
    there = predict(way, PACE, HOME, 4, PLENTY)
    assert there.computing == pytest.approx(1 - 2.5 / there.round_seconds)  # all but the loss and the settling
    assert there.round_seconds == pytest.approx(95 + 15 + 2.5, rel=0.03)  # five steps and more beside 15 s of bytes
    assert there.sent * there.round_seconds / 86_400 == pytest.approx(150e6 / 4, rel=0.03)
    slow = predict(way, PACE, Link(1e5, 1e5, 0.04), 4, PLENTY)
    assert slow.round_seconds == pytest.approx(95 + 375 + 2.5, rel=0.03)
    assert slow.computing == pytest.approx(200 / slow.round_seconds, rel=0.03)  # as many steps again, then it waits


def test_steps_are_taken_beside_an_exchange_of_learners_on_their_own_clocks() -> None:
    (way, *_) = ways(spec(method="async"))
    there = predict(way, PACE, HOME, 4, PLENTY)
    assert there.round_seconds == pytest.approx(100 + 60 + 2.5, rel=0.03)
    assert there.computing == pytest.approx(1 - 2.5 / there.round_seconds)


def test_factors_take_the_share_of_a_matrix_that_their_rank_is() -> None:
    (way, *_) = ways(spec(method="lowrank", codec="int8", rank=8))
    there = predict(way, PACE, HOME, 4, PLENTY)
    assert there.sent * there.round_seconds / 86_400 == pytest.approx(150e6 * 2 * 8 / way.model.width, rel=0.03)


def test_everybody_fetches_everybodys_momentum() -> None:
    tables = {"run": {"name": "p"}, "inner": {"steps": 1, "optimizer": "sgd"}, "exchange": {"method": "demo"}}
    (way, *_) = ways(parse_runspec(tables, source="test"))
    there = predict(way, PACE, HOME, 4, PLENTY)
    wire = 3 * 100e6 * 0.0205
    assert there.sent * there.round_seconds / 86_400 == pytest.approx(wire, rel=0.03)
    assert there.round_seconds == pytest.approx(1 + 2.5 + wire / 2.5e6 + 0.5 + 0.24, rel=0.03)


@pytest.mark.parametrize("number", range(len(ways(spec()))))
def test_a_faster_link_never_takes_longer(number: int) -> None:
    way = ways(spec())[number]
    seconds = [
        predict(way, PACE, Link(rate, rate, trip), 4, PLENTY).round_seconds
        for rate, trip in ((1e5, 0.2), (1e6, 0.2), (1e6, 0.02), (1e8, 0.02))
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_strangers_sends_little_and_computes_more() -> None:
    found = {(way.method, way.codec): way for way in (predict(s, PACE, HOME, 4, PLENTY) for s in ways(spec()))}
    assert found["open", "topk"].computing > found["diloco", "int8"].computing > found["diloco", "fp16"].computing
    assert found["open", "topk"].sent < found["diloco", "int8"].sent / 5


def test_what_does_not_fit_is_not_recommended() -> None:
    small = Machine(GB, 10_000 * GB)
    found = [predict(way, PACE, HOME, 4, small) for way in ways(spec())]
    chosen, why = recommend(found, spec())
    assert chosen is None
    assert "Close other programs" in why
    fits, why = recommend([predict(way, PACE, HOME, 4, PLENTY) for way in ways(spec())], spec())
    assert fits is not None
    assert fits.method in ("diloco", "btard")
    assert "open" in why


def test_a_base_model_that_cannot_be_had_is_told_to_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object) -> None:
        raise TrainerFailed("the model 'nobody/nothing' cannot be fetched")

    monkeypatch.setattr("swarmnode.node.plan.with_base", failing)
    with pytest.raises(ExpectedError, match="cannot be fetched"):
        measure(spec(), TrainerSettings())


@pytest.mark.slow
def test_the_command_measures_and_recommends(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        '[run]\nname = "p"\n[model]\nlayers = 1\nheads = 1\nwidth = 16\ncontext = 16\n[inner]\nbatch = 1\nsteps = 9\n'
    )
    done = swarmnode("plan", run, "--threads", "1", "--data-dir", tmp_path / "home", "--json", "--up", "10")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {way["method"] for way in told["ways"]} == {"diloco", "btard", "open"}
    assert told["recommended"][0] in ("diloco", "btard")
    assert told["step_seconds"] > 0
