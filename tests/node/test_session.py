"""A node's life in a run: it finds a place, leaves in order, pauses, resumes, and keeps its work."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families
from simpolicy import SimPolicy
from simswarm import RUN, SimSwarm, simulate

from swarmnode.node.control.api import stands_still
from swarmnode.node.session import LEAVE_WITHIN, RunSession
from swarmnode.node.storage.checkpoints import Checkpoints, newest_round
from swarmnode.node.storage.datadir import NoSpace
from swarmnode.node.storage.history import HISTORY, figures
from swarmnode.protocols.methods.known.messages import Behind, RoundHead
from swarmnode.protocols.methods.method import FIND_MEMBERS_FOR, LostPlace
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer

PARTS = {
    "diloco": ("trained_s", "exchange_s", "waited_s"),
    "gossip": ("trained_s", "exchange_s", "waited_s"),
    "open": ("trained_s", "commit_s", "reveal_s", "judge_s", "waited_s"),
    "sapo": ("trained_s", "waited_s"),
}


async def three(swarm: SimSwarm) -> None:
    await swarm.begin("abc")
    await swarm.round_done(1, "a", "b", "c")


def residual(swarm: SimSwarm, name: str) -> float:
    return float(np.linalg.norm(swarm.nodes[name].method.saved().residual))


def test_others_do_not_wait_for_one_that_stops_and_its_work_is_kept() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        before = residual(swarm, "c")
        await trio.sleep(1.0)  # in the middle of training
        swarm.nodes["c"].session.stop()
        with trio.fail_after(2.0):
            await swarm.nodes["c"].session.finished.wait()
        assert residual(swarm, "c") > before
        swarm.nodes["c"].scope.cancel()
        asked = trio.current_time()
        await swarm.round_done(2, "a", "b")
        assert trio.current_time() - asked < 3.0
        assert swarm.nodes["a"].rounds[2]["members"] == 2

    simulate(body)


def test_one_that_stops_while_waiting_for_members_stops_at_once() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        for name in ("a", "b"):
            swarm.world.freeze(swarm.peer(name))
        await swarm.start("late", join="c")
        await trio.sleep(1.0)
        swarm.nodes["late"].session.stop()
        with trio.fail_after(5.0):
            await swarm.nodes["late"].session.finished.wait()

    simulate(body)


def test_a_pause_that_is_over_before_the_exchange_does_not_end_that() -> None:
    def paced(name: str, peer: PeerId) -> Trainer:
        toy = ToyModel(dimension=64, seed=0, peer_id=peer)
        return SimTrainer(toy, seconds_per_step=0.4 if name == "a" else 1.6)

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(3, "a", "b")
        node = swarm.nodes["a"]

        async def next_exchange() -> None:
            for phase in ("training", "exchanging"):
                while node.session.phase != phase:  # noqa: ASYNC110 (it has no event)
                    await trio.sleep(0.01)

        await next_exchange()
        await node.session.pause()
        await trio.sleep(0.3)
        node.session.resume()
        exchanging = trio.current_time()
        while 4 not in node.rounds:  # b takes its steps
            assert node.session.phase == "exchanging"
            await trio.sleep(0.1)
        assert trio.current_time() > exchanging + LEAVE_WITHIN and node.rounds[4]["members"] == 2
        await next_exchange()
        await node.session.pause()
        node.session.stop()
        node.session.resume()  # too late
        with trio.fail_after(LEAVE_WITHIN + 1):
            await node.session.finished.wait()

    simulate(body, "a", "b", steps=10, trainer=paced)


def test_no_round_begins_while_the_trainer_is_held_again() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        await swarm.round_done(0, "a", "b", "c")
        session, trainer, tried = swarm.nodes["c"].session, swarm.nodes["c"].trainer, 0
        begin = session._one_round

        async def release() -> bool:
            nonlocal tried
            tried += 1
            await trio.sleep(0.1)
            return tried > 5

        async def one_round() -> None:
            assert tried > 5
            await begin()

        trainer.release, session._one_round = release, one_round  # type: ignore[method-assign]
        await swarm.round_done(4, "c")

    simulate(body)


@pytest.mark.parametrize("part, times", [("run_round", 2), ("regain_place", 1), ("leave", 1), ("find_place", 2)])
def test_a_defect_that_a_peer_may_find_ends_a_round_and_not_the_node(
    part: str, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        session, failed = swarm.nodes["c"].session, 0
        monkeypatch.delattr(session, "_kept")  # a simulation has none, so that defects fail tests
        works = getattr(session.method, part)

        async def fails(*arguments: Any) -> Any:
            nonlocal failed
            failed += 1
            if failed > times:
                return await works(*arguments)
            async with trio.open_nursery():
                raise OverflowError("int too large to convert to float")

        monkeypatch.setattr(session.method, part, fails)
        if part == "find_place":
            session._search = trio.CancelScope()
            await session._find_place()
        elif part != "run_round":
            await session.pause()
            await trio.sleep(1.0)
            session.resume()
        await swarm.until(lambda: failed >= times and bool(session.defects.warning))
        assert "OverflowError" in session.defects.warning and "swarmnode diag" in session.defects.warning
        metrics = Metrics()
        session.defects.measure(metrics)
        assert f"swarmnode_defects_total {times}" in metrics.text()
        await swarm.round_done(8, "a", "b", "c")
        await swarm.until(swarm.all_stand_together)
        assert "OverflowError: int too large" in caplog.text  # with its traceback

    simulate(body)


def test_a_defect_in_what_runs_beside_rounds_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        session, begun = swarm.nodes["c"].session, 0
        monkeypatch.delattr(session, "_kept")

        async def watch() -> None:
            nonlocal begun
            begun += 1
            if begun < 3:
                raise KeyError("peer")
            await trio.sleep_forever()

        monkeypatch.setattr(session.method, "watch", watch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session._watch)
            await swarm.until(lambda: begun == 3)
            nursery.cancel_scope.cancel()

    simulate(body)


def test_what_a_person_can_mend_still_ends_the_node() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        session = swarm.nodes["c"].session
        with pytest.raises(NoSpace, match="disk is full"):
            await RunSession._kept(session, fails())

    async def fails() -> None:
        raise NoSpace("the disk is full")

    simulate(body)


def test_a_node_that_fails_keeps_the_rounds_since_its_last_checkpoint(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        session = (await swarm.start("a")).session
        await swarm.round_done(7, "a")  # one is written every fifth round
        with trio.CancelScope() as failed:
            failed.cancel()  # as where the trainer has failed
            await session.keep()
        rounds = newest_round(tmp_path / "a")
        assert rounds is not None and rounds >= 8

    simulate(body)


def test_a_round_that_a_stop_cuts_short_is_not_said_to_have_failed() -> None:
    async def body(swarm: SimSwarm) -> None:
        session = (await swarm.start("a")).session
        await swarm.round_done(1, "a")

        async def cut_short() -> None:
            session.stop()
            raise LostPlace("training is paused")

        session.method.run_round = cut_short  # type: ignore[method-assign, assignment]
        await session.finished.wait()
        assert session.outcome == "Completed"

    simulate(body)


def test_metrics_follow_the_run_and_say_nothing_before_they_are_known(tmp_path: Path) -> None:
    def read(metrics: Metrics) -> dict[str, float]:
        families = text_string_to_metric_families(metrics.text())
        return {family.name.removeprefix("swarmnode_"): family.samples[0].value for family in families}

    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.start("a", wait_peers=1)
        session, metrics = swarm.nodes["a"].session, Metrics()
        session.measure(metrics)
        assert not {"loss", "round_age_seconds", "tokens_per_second"} & read(metrics).keys()
        await swarm.start("b", join="a")
        await swarm.round_done(2, "a", "b")
        found = read(metrics)
        assert found["round"] == 3 and found["members"] == 2 and found["paused"] == 0
        assert found["loss"] == swarm.nodes["a"].rounds[2]["loss"]
        assert found["round_age_seconds"] < 1 and found["tokens_per_second"] > 0 and "reward" not in found
        await session.pause()
        await trio.sleep(30)
        found = read(metrics)
        assert found["paused"] == 1 and 30 <= found["round_age_seconds"] < 40
        assert 20 < found["checkpoint_age_seconds"] < 40  # it is saved where training is paused
        session.finished.set()
        assert "round_age_seconds" not in read(metrics)

    simulate(body)


@pytest.mark.parametrize("method", ["diloco", "gossip", "open", "sapo"])
def test_the_history_tells_what_each_round_took_and_came_to(tmp_path: Path, method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.start("a", wait_peers=1)
        await swarm.start("b", join="a")
        await swarm.round_done(3, "a", "b")
        await trio.sleep(0.1)
        told = figures(tmp_path / "a" / HISTORY, since=2)
        assert [each["round"] for each in told][:2] == [2, 3]
        for each in told:
            parts = [each[name] for name in PARTS[method] if name in each]
            overlap = min(each["trained_s"], each["seconds"]) if method == "open" else 0.0  # training goes on
            assert len(parts) >= len(PARTS[method]) - 1 and sum(parts) <= each["seconds"] + overlap + 0.01
            assert method == "open" or sum(parts) == pytest.approx(each["seconds"], abs=0.01)
            assert each["bytes_in"] > 0 and each["bytes_out"] > 0
            assert each["own"] == "accepted" or (method == "open" and "harm" in each["own"]), "it knows all by then"
            assert ("apart" in each) == (method == "gossip")
            assert ("reward" in each) == (method == "sapo") and ("loss" in each) == (method != "sapo")

    options: dict[str, Any] = {
        "diloco": {},
        "gossip": {},
        "open": {"validators": ("a", "b")},
        "sapo": {"trainer": lambda name, peer: SimPolicy(peer)},
    }
    simulate(body, method=method, **options[method])


def test_who_was_missing_and_why_and_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await three(swarm)
        (tmp_path / "b" / HISTORY).unlink()
        (tmp_path / "b" / HISTORY).mkdir()
        c = swarm.peer("c")
        swarm.world.freeze(c)
        await swarm.round_done(4, "a", "b")
        await trio.sleep(0.1)
        assert "missing in the run's history" in swarm.nodes["b"].session.warnings["history"]
        missing = [each["why"] for each in figures(tmp_path / "a" / HISTORY) if "missing" in each]
        assert missing and {c} == {*missing[0]} and set(missing[0].values()) <= {"late", "not connected"}

    simulate(body)


def test_a_node_whose_own_work_is_not_in_a_result_is_not_called_missing(caplog: pytest.LogCaptureFixture) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", creator=True)
        await swarm.round_done(1, "a")
        session = swarm.nodes["a"].session
        assert session.last is not None
        late = replace(session.last, counted=(), missing=(swarm.peer("a"),))
        session._tell(late)
        told = session._figures(late)
        assert told["own"] == "late" and "missing" not in told and "why" not in told, "its history says so as well"

    with caplog.at_level(logging.INFO):
        simulate(body)
    said = r"round 1: held-out loss [\d.]+ bits per byte, alone, own work not counted, [\d.]+ s"
    assert re.fullmatch(said, caplog.messages[-1]) and "missing" not in caplog.text
    assert "ahead" in vars(caplog.records[-1]), "on a terminal it takes the place of the round before"


def test_what_goes_on_is_told_with_when_it_ends() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", wait_peers=1)
        session = swarm.nodes["a"].session
        assert session.doing() in ("looking for the run's other members", "round 0: waiting for the others")
        await swarm.start("b", join="a")
        while session.phase != "training":  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert session.doing() == "round 0: step 0 of 5"
        swarm.nodes["a"].trainer.remembered = (swarm.nodes["a"].trainer.remembered[0], 2)
        assert re.fullmatch(r"round 0: step 2 of 5, ends in 0:00:0\d", session.doing())
        usual, steered = session.method.steering, session._context.spec.updated(inner={"steps": 9})
        session.method.steering = SimpleNamespace(stage=SimpleNamespace(spec=steered))  # type: ignore[assignment]
        assert "step 2 of 9" in session.doing()
        session.method.steering = usual
        await swarm.round_done(2, "a", "b")
        assert re.fullmatch(r"round [23]: .+, ends in 0:00:0\d", session.doing())
        session.progress(0, 40_000_000)
        await trio.sleep(0.1)
        session.progress(30_000_000, 40_000_000)
        session._override = "catching-up"
        assert re.fullmatch(r"catching up: the run's state, 30.0 of 40.0 MB, .* MB/s", session.doing())
        await trio.sleep(100)
        session.progress(0, 40_000_000)  # it begins anew, from somebody else: the time before says nothing of him
        await trio.sleep(1)
        session.progress(5_000_000, 40_000_000)
        assert "5.0 of 40.0 MB" in session.doing() and "5.0 MB/s" in session.doing(), session.doing()
        await session.pause()
        session._override = None
        await swarm.until(lambda: session.phase == "paused")
        assert session.doing() == ""
        session.stop()
        assert session.phase == "stopping" and session.doing() == ""
        await session.finished.wait()
        assert session.phase == "stopping", "it is told to stop, and has not done all its rounds"

    simulate(body)


def test_a_node_alone_says_nothing_of_others_and_none_that_a_round_ends_which_just_began() -> None:
    async def body(swarm: SimSwarm) -> None:
        session = (await swarm.start("a")).session
        await swarm.round_done(0, "a")
        session._override = "exchanging"  # as until the first step, while the round before is measured
        assert re.fullmatch(r"round 1: beginning, ends in 0:00:\d\d", session.doing())
        await trio.sleep(45.0)
        assert re.fullmatch(r"round 1: ending, ends in 0:00:0\d", session.doing())
        await swarm.start("b", join="a")
        session._override = None
        await swarm.round_done(3, "a", "b")
        await trio.sleep(45.0)
        session._override = "exchanging"
        assert re.fullmatch(r"round 4: exchanging with the others, ends in 0:00:0\d", session.doing())

    simulate(body, seconds_per_step=10.0)


def test_who_has_a_last_round_is_told_when_all_are_done() -> None:
    async def body(swarm: SimSwarm) -> None:
        session = (await swarm.start("a", rounds=12)).session
        await swarm.round_done(1, "a")
        usual, told = session.usual_seconds, re.fullmatch(r"round 2: .+, all 12 in 0:(\d\d):(\d\d)", session.doing())
        assert usual is not None and told is not None, session.doing()
        assert 60 * int(told[1]) + int(told[2]) == pytest.approx(10 * usual, abs=usual)

    simulate(body)


def test_a_first_round_that_was_joined_in_the_middle_ends_by_the_pace_of_this_node() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a")
        await trio.sleep(20.0)
        late = await swarm.start("late", join="a")
        while late.session.phase != "training":  # noqa: ASYNC110
            await trio.sleep(0.01)
        await trio.sleep(10.0)
        late.trainer.remembered = (late.trainer.remembered[0], 2)
        assert late.session.doing() == "round 0: step 2 of 5, ends in 0:00:15"

    simulate(body, seconds_per_step=10.0)


def test_who_is_cut_off_is_told_within_two_minutes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", wait_peers=1)
        await swarm.start("b", join="a")
        await swarm.round_done(1, "a", "b")
        session = swarm.nodes["a"].session
        name = f"…{swarm.peer('b')[-6:]}"
        assert f"{name} came; other members connected: 1" in caplog.messages
        swarm.world.partition([[swarm.peer("a")], [swarm.peer("b")]])
        await trio.sleep(45)
        assert "cut off" not in session.warnings
        await trio.sleep(75)
        assert "nobody else has taken part" in session.warnings["cut off"]
        assert f"{name} went; other members connected: 0" in caplog.messages
        swarm.world.heal()
        await swarm.until(swarm.all_stand_together)
        await trio.sleep(10)
        assert "cut off" not in session.warnings

    simulate(body)
    assert sum("nobody else has taken part" in told for told in caplog.messages) == 2
    assert any("rounds made apart from it are given up" in told for told in caplog.messages)


def test_work_of_a_round_without_this_node_is_returned_once() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        rounds, trainer = swarm.nodes["c"].diloco_rounds, swarm.nodes["c"].trainer
        await trio.sleep(1.9)
        swarm.nodes["c"].session.stop()
        await swarm.nodes["c"].session.finished.wait()
        once = residual(swarm, "c")
        assert once > 0
        await rounds.return_local_work()
        assert residual(swarm, "c") == once
        trainer.load(rounds.state.parameters * np.float32(np.nan))
        await rounds.return_local_work()
        assert residual(swarm, "c") == once  # what is not finite is worth nothing and ends nobody
        assert np.array_equal(trainer.parameters(), rounds.state.parameters)

    simulate(body)


def test_a_catch_up_that_fails_leaves_the_work_with_the_trainer() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        node = swarm.nodes["c"]
        await node.session.pause()
        await trio.sleep(2.0)
        node.trainer.load(node.diloco_rounds.state.parameters + np.float32(0.1))  # work in hand
        swarm.world.partition([[swarm.peer("c")]])
        before = residual(swarm, "c")
        here = node.agreement.acceptor.position
        for _ in range(5):
            lie = RoundHead(here.round + 9, "ee" * 32, (swarm.peer("a"),), (swarm.peer("c"),), 1.0, RUN, (), 0.0, False)
            assert not await node.diloco.go_to(lie, swarm.peer("a"))
        assert residual(swarm, "c") == before

    simulate(body)


@pytest.mark.parametrize("after", [1, 6])
def test_the_first_round_after_a_pause_is_saved_as_it_takes_the_work_that_the_pause_saved(
    tmp_path: Path, after: int
) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await three(swarm)
        await swarm.round_done(after, "c")
        session = swarm.nodes["c"].session
        await trio.sleep(1.0)  # in the middle of training
        await session.pause()
        await trio.sleep(1.0)
        place = session.place
        assert place is not None and session._saved_at == place.round
        session.resume()
        await swarm.until(lambda: session.place is not None and session.place.round > place.round)
        await trio.sleep(0.1)
        assert session.place is not None and session._saved_at == session.place.round

    simulate(body)


def test_who_is_told_to_stop_while_its_trainer_is_started_again_waits_for_no_trainer() -> None:
    """It is held from then on, so it would never be ready: such a node took 20 s to end."""
    session = RunSession.__new__(RunSession)
    saved = SimpleNamespace(moments=np.zeros(1, np.float32), updates=1)

    async def runner(work: Callable[[], Any]) -> Any:
        return work()

    async def remember(moments: Any, updates: int) -> None:
        await trio.sleep_forever()

    trainer = SimpleNamespace(moments=lambda: (saved.moments, 0), remember=remember)
    session._context = SimpleNamespace(runner=runner, trainer=trainer)  # type: ignore[assignment]
    session._checkpoints, session._search = SimpleNamespace(newest=lambda: saved), trio.CancelScope()  # type: ignore[assignment]

    async def main() -> None:
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session._find_place)
                await trio.testing.wait_all_tasks_blocked()
                session._search.cancel()  # as `stop` does

    trio.run(main)


def test_who_went_over_to_a_history_of_fewer_rounds_saves_it_at_once(tmp_path: Path) -> None:
    """Else what it left is the newest checkpoint until the others come as far: a crash would bring it back."""

    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await three(swarm)
        session = swarm.nodes["c"].session
        session._saved_at = 5000
        await swarm.round_done(swarm.nodes["c"].done, "c")
        await trio.sleep(0.1)
        assert session.place is not None and session._saved_at <= session.place.round

    simulate(body)


def test_who_goes_on_after_a_long_pause_does_not_stand_still() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        session = swarm.nodes["c"].session
        await session.pause()
        await trio.sleep(1000)
        session.resume()
        assert (session.round_age or 0) > 900 and not stands_still(session)

    simulate(body)


def test_two_nodes_that_wait_for_one_another_go_on() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", wait_peers=1)
        await swarm.start("b", join="a")
        await swarm.round_done(1, "a", "b")
        swarm.world.partition([[swarm.peer("a")], [swarm.peer("b")]])
        await swarm.round_done(3, "a", "b")  # each alone, on a history of its own
        for name, other in (("a", "b"), ("b", "a")):
            node = swarm.nodes[name]
            node.diloco._better = Behind(swarm.nodes[other].agreement.acceptor.head(), swarm.peer(other))
            node.diloco._round.cancel()
        swarm.world.heal()
        await swarm.until(swarm.all_stand_together, within=120)

    simulate(body)


def test_a_whole_swarm_restarts_from_its_checkpoints(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await three(swarm)
        await swarm.round_done(6, "a", "b", "c")
        for name in ("a", "b", "c"):
            await swarm.leave(name)
        saved = {name: residual(swarm, name) for name in ("a", "b", "c")}
        stood = swarm.nodes["a"].agreement.acceptor.position.round
        for name, join in (("a", None), ("b", "a"), ("c", "a")):
            await swarm.start(name, join=join)
        assert all(saved.values())
        began = trio.current_time()
        await swarm.until(swarm.all_stand_together, within=120)
        assert trio.current_time() < began + FIND_MEMBERS_FOR, "they saw that all of them look for members"
        assert min(swarm.nodes["a"].rounds) >= stood > 6
        layout = swarm.nodes["a"].trainer.layout
        newest = Checkpoints(tmp_path / "a", run_id=RUN, layout=layout, keep=3).newest()
        assert newest is not None and newest.round >= stood

    simulate(body)


@pytest.mark.parametrize("method", ["btard", "diloco", "gossip"])
def test_who_comes_after_a_members_last_round_and_has_more_to_do_goes_on_alone(method: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", rounds=3)
        await swarm.nodes["a"].session.finished.wait()
        await swarm.start("late", join="a")
        await swarm.until(lambda: len(swarm.nodes["late"].rounds) > 3, within=60)

    simulate(body, method=method)


def test_a_run_ends_after_its_last_round_and_late_comers_still_get_its_state(caplog: pytest.LogCaptureFixture) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.start("a", wait_peers=1, rounds=4)
        await swarm.start("b", join="a", rounds=4)
        await swarm.round_done(3, "a", "b")
        await swarm.nodes["a"].session.finished.wait()
        assert "nothing is left to train" not in caplog.text
        await swarm.start("late", join="a", rounds=4)
        with trio.fail_after(60):
            await swarm.nodes["late"].session.finished.wait()
        (caught_up,) = [e for e in swarm.nodes["late"].events if e["event"] == "caught_up"]
        assert caught_up["state_hash"] == swarm.nodes["a"].rounds[3]["state_hash"]
        assert max(swarm.nodes["a"].rounds) == 3
        assert "the run has its 4 rounds (--rounds): nothing is left to train" in caplog.text

    simulate(body)


def test_a_better_history_is_followed_and_a_worse_one_is_not() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        swarm.world.partition([[swarm.peer("c")]])
        await swarm.round_done(6, "a", "b", "c")
        assert len(swarm.hashes(6)) == 2
        swarm.world.heal()
        await swarm.until(swarm.all_stand_together, within=120)
        assert not any(e["event"] == "caught_up" for e in swarm.nodes["a"].events)
        assert any(e["event"] == "caught_up" and e["round"] > 3 for e in swarm.nodes["c"].events)

    simulate(body)


def test_a_joiner_holds_what_members_hold_long_before_it_is_named() -> None:
    async def body(swarm: SimSwarm) -> None:
        await three(swarm)
        late = await swarm.start("late", join="c")
        asked = trio.current_time()
        await swarm.until(lambda: any(e["event"] == "caught_up" for e in late.events), within=5.0)
        assert trio.current_time() - asked < 3.0  # rounds take 40 s here
        assert late.agreement.acceptor.position.parent == swarm.nodes["a"].agreement.acceptor.position.parent
        await swarm.until(lambda: bool(late.rounds))
        (first, *_) = late.rounds
        await swarm.round_done(first, "a", "b", "c", "late")
        assert len(swarm.hashes(first)) == 1

    simulate(body, seconds_per_step=8.0)


def test_checkpoints_that_cannot_be_read_are_not_swept_away_by_a_first_one(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        unreadable = tmp_path / "a" / "round-00000040.json"
        unreadable.parent.mkdir()
        unreadable.write_text("{}")
        await swarm.start("a")
        await swarm.round_done(2, "a")
        assert unreadable.exists() and not list(unreadable.parent.glob("round-00000000*"))

    simulate(body)
