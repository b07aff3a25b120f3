"""The trainer process: what the daemon can rely on when its child works, is killed, or never comes up."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import trio
import trio.lowlevel
import trio.testing
from sometext import HELDOUT_SHA256, some_text
from trainers import running_trainer

from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.trainer import child as trainerchild
from swarmnode.node.trainer import supervisor as trainer_module
from swarmnode.node.trainer.child import TrainerChild, TrainerFailed, TrainerSettings
from swarmnode.node.trainer.replies import RolloutsReply
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.methods.trainer import TrainerDied, TrainerHeld
from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.memory import Machine, needs
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.options import SettingError
from swarmnode.training.outer import OuterState
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.sandbox import Rules, landlock
from swarmnode.training.tasks import Assignment
from swarmnode.training.weigh import weigh

SPEC = parse_runspec(
    {
        "run": {"name": "tiny"},
        "task": {"heldout_sha256": HELDOUT_SHA256},
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 16},
        "inner": {"batch": 2, "warmup": 0},
    },
    source="test",
)
FOREVER = 10**9


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(threads=1, nice=0, device="cpu", **some_text(tmp_path))


def _with_trainer(
    settings: TrainerSettings, use: Callable[[TrainerProcess], Awaitable[None]], spec: RunSpec = SPEC
) -> None:
    async def main() -> None:
        async with running_trainer(spec, settings) as trainer:
            await use(trainer)

    trio.run(main)


async def _until_training(trainer: TrainerProcess, start: np.ndarray) -> None:
    """Wait until the first inner step has changed the parameters."""
    while np.array_equal(trainer.parameters(), start):  # noqa: ASYNC110 (another process changes them: there is no event)
        await trio.sleep(0.005)


def test_seconds_of_a_cancelled_call_are_counted(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        start = trainer.parameters()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_train_forever, trainer)
            await _until_training(trainer, start)
            nursery.cancel_scope.cancel()
        assert trainer.spent["train"] > 0

    _with_trainer(settings, use)


def test_in_a_run_by_seeds_steps_tell_bytes_and_move_nothing(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        before = trainer.parameters()
        one, two = [await trainer.train(round=0, steps=2, seconds=60) for _ in range(2)]
        assert np.array_equal(trainer.parameters(), before)
        assert len(one.told) == len(two.told) == 2 and (one + two).told == one.told + two.told != 2 * one.told
        assert trainer.moments()[1] == 0

    _with_trainer(settings, use, SPEC.updated(exchange={"method": "seed"}, inner={"lr": 1e-5}))


def _cpu_seconds(trainer: TrainerProcess) -> float:
    fields = Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_held_trainer_uses_no_cpu_in_the_middle_of_a_long_step_and_goes_on_with_what_was_loaded(
    settings: TrainerSettings,
) -> None:
    # A step of 300 GFLOP, on one thread: no CPU ends it within HOLD_GRACE.
    spec = SPEC.updated(model={"layers": 4, "width": 256, "context": 128}, inner={"batch": 128})

    async def use(trainer: TrainerProcess) -> None:
        async with trio.open_nursery() as nursery:
            before = _cpu_seconds(trainer)
            nursery.start_soon(_train_forever, trainer)
            while _cpu_seconds(trainer) < before + 0.2:  # noqa: ASYNC110 (another process's)
                await trio.sleep(0.05)
            asked = trio.current_time()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trainer.hold()
        assert trio.current_time() - asked < 2.0
        await trio.sleep_until(asked + 2.0)
        used = _cpu_seconds(trainer)
        await trio.sleep(1.0)
        assert _cpu_seconds(trainer) == used
        with pytest.raises(TrainerHeld):
            await trainer.mark()
        trainer.load(np.zeros_like(trainer.parameters()))
        assert not trainer.go_on(), "the step in hand has to end first"
        await trainer.release()
        assert not trainer.parameters().any()
        assert await trainer.evaluate(thorough=False) == pytest.approx(
            8, abs=0.01
        )  # bits per byte of who knows nothing
        assert trainer.restarts == 0

    _with_trainer(replace(settings, micro_batch=32), use, spec)


# It answers in time, and computes on in a thread of its own.
BUSY = """
import threading, torch
def compute():
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)
class Task:
    tokens_per_sample = 1
    def __init__(self, spec, assignment, device="cpu"):
        self.model = torch.nn.Linear(2, 2)
        threading.Thread(target=compute, daemon=True).start()
    def evaluate(self, *, thorough, seed=None):
        return 1.0
"""


def test_a_held_trainer_computes_in_no_thread_of_its_own_either(settings: TrainerSettings, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(BUSY)

    async def computes(trainer: TrainerProcess) -> bool:
        used = _cpu_seconds(trainer)
        await trio.sleep(0.5)
        return _cpu_seconds(trainer) > used

    async def use(trainer: TrainerProcess) -> None:
        assert await computes(trainer)
        await trainer.hold()
        assert not await computes(trainer)
        assert await trainer.evaluate(thorough=False) == 1.0, "its owner is answered"
        assert not await computes(trainer)
        assert trainer.go_on() and await computes(trainer)
        await trainer.hold()  # and is ended so

    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": "task"}}, source="test")
    _with_trainer(replace(settings, task=f"{task}:Task", texts=()), use, spec)


def test_whose_trainer_ended_while_it_is_held_is_told_so_at_once(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        async def asks() -> None:
            with pytest.raises(TrainerHeld):
                await trainer.gradient(seed=1, first=0, last=1)

        process = trainer.pid
        await trainer.hold()
        assert process is not None
        os.kill(process, signal.SIGKILL)
        while trainer.pid is not None:  # noqa: ASYNC110 (another process's end)
            await trio.sleep(0.05)
        with trio.fail_after(2):
            with pytest.raises(TrainerHeld, match="resume starts it again"):
                await trainer.sample(b"a", length=1, temperature=1.0, seed=0)
            with pytest.raises(TrainerHeld):
                await trainer.evaluate(thorough=False)
            await asks()
        await trainer.release()
        await trio.lowlevel.checkpoint()
        assert await trainer.evaluate(thorough=False) > 0

    _with_trainer(settings, use)


def test_who_asks_for_a_trainer_that_is_never_started_again_is_told_so(settings: TrainerSettings) -> None:
    """Also behind a shield: else the node would never end."""

    async def main() -> None:
        trainer = TrainerProcess(SPEC, run_id=SPEC.run_id, peer_id="alice", settings=settings)

        async def asks() -> None:
            with (
                trio.CancelScope(shield=True),
                trio.fail_after(30),
                pytest.raises(TrainerDied, match="not started again"),
            ):
                await trainer.calibrate()

        async with trio.open_nursery() as nursery:
            await nursery.start(trainer.run)
            trainer._child = None  # as while it is being started again
            nursery.start_soon(asks)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_held_trainer_waits_with_training_and_still_answers_its_owner(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        await trainer.hold()
        with trio.move_on_after(0.3) as waited:
            await trainer.train(round=0, steps=1, seconds=60)
        assert waited.cancelled_caught
        assert await trainer.evaluate(thorough=False) > 0 and 0 <= trainer.accuracy < 0.5
        with pytest.raises(TrainerHeld):
            await trainer.gradient(seed=1, first=0, last=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trainer.train, round=0, steps=1, seconds=60))
            await trio.sleep(0.1)
            assert trainer.go_on()
        assert trainer.spent["train"] > 0

    _with_trainer(settings, use)


@pytest.mark.slow
def test_a_trainer_that_is_released_while_it_is_being_held_goes_on(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainerchild, "HOLD_GRACE", 0.4)

    async def use(trainer: TrainerProcess) -> None:
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGSTOP)  # so that on any machine it has a step in hand until SIGCONT
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trainer.train, round=0, steps=1, seconds=60))
            await trio.sleep(0.1)
            nursery.start_soon(trainer.hold)
            await trio.sleep(0.1)
            await trainer.release()
            await trio.sleep(0.5)  # longer than the hold would have waited for the step
            os.kill(trainer.pid, signal.SIGCONT)
        with trio.fail_after(60):
            assert await trainer.evaluate(thorough=False) > 0
            await trainer.train(round=0, steps=1, seconds=60)

    _with_trainer(settings, use)


@pytest.mark.slow
def test_other_settings_while_it_starts_are_no_failure_of_the_trainer(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        for threads in (2, 1, 2, 1):
            before = trainer._process
            trainer.change(threads=threads)
            while trainer._process in (None, before):  # noqa: ASYNC110 (another process)
                await trio.sleep(0.05)
        with trio.fail_after(60):
            await trainer.train(round=0, steps=1, seconds=60)

    _with_trainer(settings, use)


@pytest.mark.slow
def test_a_trainer_takes_the_cpu_time_that_it_may(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_train_forever, trainer)
            await trio.sleep(2.5)
            for cores in (0.1, 0.3):
                trainer.cap_cpu(cores)
                await trio.sleep(1.5)
                before, began = _cpu_seconds(trainer) + time.process_time(), trio.current_time()
                await trio.sleep(5.0)
                share = (_cpu_seconds(trainer) + time.process_time() - before) / (trio.current_time() - began)
                # Other tests may have the CPU; but what was taken without a cap is not made up for under one.
                assert 0.2 * cores < share < 1.1 * cores + 0.01
            trainer.cap_cpu(0)
            nursery.cancel_scope.cancel()
        assert trainer.restarts == 0

    _with_trainer(settings, use)


@pytest.mark.slow
def test_the_cpu_time_of_a_trainer_that_proc_hides_counts(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with hidepid, where a process that may leave no core is hidden from its own user."""

    read = Path.read_text

    def hidden(path: Path, *given: Any, **named: Any) -> str:
        if path.name == "children":
            raise FileNotFoundError(path)
        return read(path, *given, **named)

    async def use(trainer: TrainerProcess) -> None:
        assert trainer._process is not None
        before = trainer._process._cpu_used()
        await trainer.train(round=0, steps=3, seconds=60)
        assert trainer._process._cpu_used() > before and trainer.cpu_seconds > 0

    monkeypatch.setattr(Path, "read_text", hidden)
    _with_trainer(settings, use)


@pytest.mark.slow
def test_a_command_longer_than_its_socket_holds_waits_until_the_trainer_reads(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainerchild, "SEND_PATIENCE", 0.3)

    async def use(trainer: TrainerProcess) -> None:
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGSTOP)  # as where it samples
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trainer.evaluate, thorough=False))
            await trio.sleep(0.1)
            nursery.start_soon(partial(trainer.sample, bytes(400_000), length=1, temperature=1.0, seed=1))
            await trio.sleep(1.0)
            os.kill(trainer.pid, signal.SIGCONT)
        assert trainer.restarts == 0

    _with_trainer(settings, use)


@pytest.mark.slow
def test_a_round_waits_for_a_trainer_that_is_started_again_no_longer_than_its_window(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 30.0)

    async def use(trainer: TrainerProcess) -> None:
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        while trainer._living() is not None:  # noqa: ASYNC110 (another process's end)
            await trio.sleep(0.02)
        began = trio.current_time()
        assert not (await trainer.train(round=0, steps=10, seconds=0.5)).steps
        assert trio.current_time() - began < 5

    _with_trainer(settings, use)


def test_caps_that_change_while_models_are_looked_for_hold(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(spec: RunSpec, settings: TrainerSettings) -> TrainerSettings:
        await trio.sleep(0.2)
        return settings

    async def main() -> None:
        trainer = TrainerProcess(SPEC, run_id=SPEC.run_id, peer_id="alice", settings=settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await trio.sleep(0.1)
            trainer.change(nice=7)
            await trio.sleep(0.2)
            assert trainer._settings.nice == 7
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(trainer_module, "with_models", slowly)
    trio.run(main)


@pytest.mark.slow
@pytest.mark.skipif(
    os.cpu_count() != 2, reason="with more cores there is one for each thread, with one only one thread"
)
def test_threads_are_not_stuck_where_another_program_has_one_of_their_cores(settings: TrainerSettings) -> None:
    """It was 75 times as long for each step, at the priority that a trainer has by itself."""

    async def use(trainer: TrainerProcess) -> None:
        await trainer.train(round=0, steps=5, seconds=60)
        alone = await trainer.train(round=0, steps=30, seconds=60)
        busy = await trio.lowlevel.open_process([sys.executable, "-c", "while True: pass"])
        try:
            beside = await trainer.train(round=0, steps=30, seconds=40 * alone.seconds)
        finally:
            busy.kill()
        assert beside.steps == 30

    model = {"layers": 2, "heads": 2, "width": 32, "context": 64}
    _with_trainer(replace(settings, threads=2, nice=10), use, SPEC.updated(model=model))


def test_other_settings_start_the_trainer_again_with_its_parameters_and_are_told_as_no_death(
    settings: TrainerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(trainer: TrainerProcess) -> None:
        await trainer.train(round=0, steps=2, seconds=60)
        trained, pid = trainer.parameters(), trainer.pid
        trainer.change(threads=1, nice=0)
        assert trainer.pid == pid
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def in_hand() -> None:
                with pytest.raises(TrainerHeld, match="for caps that were changed"):
                    await _train_forever(trainer)

            await _until_training(trainer, trained)
            trainer.change(threads=1, nice=3)
        trained = trainer.parameters()
        while trainer.pid in (pid, None):
            assert not trainer.ended
            await trio.sleep(0.05)
        assert np.array_equal(trainer.parameters(), trained)
        assert not trainer.restarts and not [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert os.getpriority(os.PRIO_PROCESS, trainer.pid or 0) == 3 + os.getpriority(os.PRIO_PROCESS, 0)

    _with_trainer(settings, use)


def test_trains_evaluates_and_writes(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        start = trainer.parameters()
        assert start.shape == (trainer.layout.parameters,)
        assert start.dtype == np.float32
        before = await trainer.evaluate(thorough=False)
        worked = await trainer.train(round=0, steps=5, seconds=60)
        assert (worked.steps, worked.samples, worked.tokens) == (5, 10, 160)
        assert 0 < worked.seconds < 60
        assert trainer.spent["train"] == pytest.approx(worked.seconds)
        assert 0 < trainer.spent["evaluate"] < 60
        trained = trainer.parameters()
        assert not np.array_equal(trained, start)
        assert await trainer.evaluate(thorough=False) != before
        trainer.load(start)
        assert await trainer.evaluate(thorough=False) == before
        assert (await trainer.train(round=1, steps=FOREVER, seconds=0.05)).steps < FOREVER
        assert len(await trainer.sample(b"def ", length=9, temperature=1.0, seed=1)) == 9
        with pytest.raises(ValueError, match="4096"):
            await trainer.sample(b"", length=10**6, temperature=1.0, seed=1)
        assert (trainer.restarts, trainer.device) == (0, "cpu")

    _with_trainer(settings, use)


def test_measures_a_loss_and_its_gradient_on_some_of_the_sequences_that_a_seed_draws(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        start = trainer.parameters()
        whole = await trainer.heldout(seed=7, sequences=SEQUENCES)
        assert await trainer.heldout(seed=7, sequences=1) != whole
        parts = [await trainer.gradient(seed=7, first=first, last=last) for first, last in ((0, 3), (3, SEQUENCES))]
        assert parts[0] is not None
        assert parts[1] is not None
        assert (3 * parts[0][0] + (SEQUENCES - 3) * parts[1][0]) / SEQUENCES == pytest.approx(whole, rel=1e-5)
        assert np.array_equal(trainer.parameters(), start)
        gradient = parts[1][1]
        trainer.load(start - np.float32(0.01) * gradient / np.linalg.norm(gradient))
        assert await trainer.heldout(seed=7, sequences=SEQUENCES) < whole

    _with_trainer(settings, use)


def test_a_gradient_that_nobody_waits_for_any_more_leaves_the_parameters_alone(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        before = trainer.parameters()
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGSTOP)  # so that no machine is fast enough to answer before
        with trio.move_on_after(0.1) as cut:
            await trainer.gradient(seed=7, first=0, last=SEQUENCES)
        os.kill(trainer.pid, signal.SIGCONT)
        assert cut.cancelled_caught
        trainer.load(before + np.float32(0.01))
        await trainer.heldout(seed=7, sequences=1)  # comes after the gradient
        assert np.array_equal(trainer.parameters(), before + np.float32(0.01))

    _with_trainer(settings, use)


def test_cancelled_training_stops_and_keeps_its_steps(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        start = trainer.parameters()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_train_forever, trainer)
            await _until_training(trainer, start)
            nursery.cancel_scope.cancel()
        stopped = trainer.parameters()
        await trainer.evaluate(thorough=False)
        assert np.array_equal(trainer.parameters(), stopped)
        assert (await trainer.train(round=0, steps=2, seconds=60)).steps == 2

    _with_trainer(settings, use)


async def _train_forever(trainer: TrainerProcess) -> None:
    await trainer.train(round=0, steps=FOREVER, seconds=FOREVER)


def test_answers_between_steps(settings: TrainerSettings) -> None:
    async def use(trainer: TrainerProcess) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_train_forever, trainer)
            await _until_training(trainer, trainer.parameters())
            assert len(await trainer.sample(b"x", length=3, temperature=0.5, seed=0)) == 3
            assert await trainer.evaluate(thorough=False) > 0
            nursery.cancel_scope.cancel()

    _with_trainer(settings, use)


def test_killed_trainer_is_replaced_with_its_parameters(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.01)

    async def use(trainer: TrainerProcess) -> None:
        start, first = trainer.parameters(), trainer.pid

        async def victim() -> None:
            with pytest.raises(TrainerDied, match="SIGKILL"):
                await _train_forever(trainer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(victim)
            await _until_training(trainer, start)
            assert first is not None
            os.kill(first, signal.SIGKILL)
        kept = trainer.parameters()
        assert not np.array_equal(kept, start)
        await trainer.evaluate(thorough=False)
        assert np.array_equal(trainer.parameters(), kept)
        assert trainer.pid not in (None, first)
        assert trainer.restarts == 1
        assert (await trainer.train(round=1, steps=1, seconds=60)).steps == 1

    _with_trainer(settings, use)


@pytest.mark.slow
def test_who_waits_for_a_trainer_gets_the_next_that_is_ready_however_many_die_before(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.05)

    async def use(trainer: TrainerProcess) -> None:
        losses: list[float] = []
        others = _children() - {trainer.pid}

        async def evaluate() -> None:
            losses.append(await trainer.evaluate(thorough=False))

        os.kill(trainer.pid or 0, signal.SIGKILL)
        while trainer.restarts < 1:  # noqa: ASYNC110 (processes end: there is no event)
            await trio.sleep(0.005)
        with pytest.raises(TrainerDied, match="started again"):
            await trainer.evaluate(thorough=False, wait=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(evaluate)
            while not (starting := _children() - others):  # noqa: ASYNC110
                await trio.sleep(0.005)
            os.kill(starting.pop(), signal.SIGKILL)
        assert trainer.restarts == 2
        assert np.isfinite(losses).all()

    _with_trainer(settings, use)


def _children() -> set[int]:
    """Process ids of this process's children that have not ended."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid) for pid in listed if ") Z " not in Path(f"/proc/{pid}/stat").read_text()}


@pytest.mark.slow
def test_text_that_arrives_is_trained_on_at_once_and_after_a_restart(
    settings: TrainerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.01)
    few, many, heldout = tmp_path / "few", tmp_path / "many", tmp_path / "c"
    few.write_bytes(b"a" * 100)
    many.write_bytes(b"b" * 50_000)
    heldout.write_bytes(b"c" * 100)
    spec = SPEC.resolved(heldout_sha256=hashlib.sha256(heldout.read_bytes()).hexdigest(), index="")
    settings = replace(settings, heldout=str(heldout), texts=(str(few),))

    async def learned(trainer: TrainerProcess, start: np.ndarray, letter: bytes) -> bytes:
        trainer.load(start)
        await trainer.train(round=0, steps=100, seconds=60)
        return await trainer.sample(letter, length=3, temperature=0, seed=0)

    async def main() -> None:
        async with running_trainer(spec, settings) as trainer:
            start, first = trainer.parameters(), trainer.pid
            assert await learned(trainer, start, b"a") == b"aaa"
            async with trio.open_nursery() as training:
                training.start_soon(_train_forever, trainer)
                await _until_training(trainer, trainer.parameters())
                await trainer.feed([str(many)])
                training.cancel_scope.cancel()
            assert await learned(trainer, start, b"b") == b"bbb"
            assert first is not None
            os.kill(first, signal.SIGKILL)
            while trainer.pid in (first, None):  # noqa: ASYNC110 (the supervisor tells nobody)
                await trio.sleep(0.01)
            assert await learned(trainer, start, b"b") == b"bbb"
            assert trainer.restarts == 1

    trio.run(main)


@pytest.mark.slow
def test_same_seed_starts_from_the_same_bits(settings: TrainerSettings) -> None:
    starts: list[np.ndarray] = []

    async def use(trainer: TrainerProcess) -> None:
        starts.append(trainer.parameters())

    _with_trainer(settings, use)
    _with_trainer(replace(settings, threads=2), use)
    assert np.array_equal(starts[0], starts[1])


async def _use_not_at_all(trainer: TrainerProcess) -> None:
    """Only start it."""


def _failure(settings: TrainerSettings, spec: RunSpec = SPEC) -> str:
    with pytest.raises(ExceptionGroup) as raised:
        _with_trainer(settings, _use_not_at_all, spec)
    failure = raised.value
    while isinstance(failure, ExceptionGroup):
        (failure,) = failure.exceptions
    assert isinstance(failure, TrainerFailed)
    return str(failure)


def test_a_cap_on_memory_that_is_too_small_is_named_and_can_be_changed(settings: TrainerSettings) -> None:
    small = 100_000_000  # bytes
    assert "cannot start: memory = 0.1 GB, its cap, is too little" in _failure(replace(settings, memory=small))

    async def use(trainer: TrainerProcess) -> None:
        kept = trainer.parameters()
        with pytest.raises(SettingError, match=r"0\.1 GB is less than the 0\.[0-9]+ GB .* nothing was changed"):
            trainer.change(memory=small)
        trainer.change(memory=small, threads=2)  # of which nobody knows what it takes
        while not trainer.ended:  # noqa: ASYNC110 (another process)
            await trio.sleep(0.05)
        assert "swarmnode caps memory=1" in trainer.ended
        trainer.change(memory=0, threads=1)
        assert not trainer.ended
        await trainer.evaluate(thorough=False)
        assert np.array_equal(trainer.parameters(), kept)

    _with_trainer(settings, use)


def test_fault_that_trying_again_cannot_mend_is_told_at_once(settings: TrainerSettings, tmp_path: Path) -> None:
    assert "cannot be read" in _failure(replace(settings, heldout=str(tmp_path / "missing")))


def test_child_that_never_comes_up_fails_with_its_last_words(
    settings: TrainerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.01)
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nprint('no luck today')\nos._exit(7)\n")
    with caplog.at_level(logging.INFO):
        failure = _failure(replace(settings, task=f"{broken}:Task"))
    assert "the trainer says: no luck today" in caplog.messages  # what a task prints, its author reads in the log
    assert "3 times" in failure
    assert "exit code 7" in failure
    assert "no luck today" in failure


def test_a_machine_that_can_start_no_process_for_a_while_costs_neither_node_nor_parameters(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(trainer: TrainerProcess) -> None:
        refused = [OSError(errno.ENOMEM, "Cannot allocate memory") for _ in range(trainer_module.MAX_FAILED_STARTS + 1)]

        def short(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            if refused and "rm" not in arguments[0]:  # which empties its directory
                raise refused.pop()
            return start(*arguments, **options)

        monkeypatch.setattr(trainerchild.subprocess, "Popen", short)
        kept = trainer.parameters()
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        while trainer.restarts <= trainer_module.MAX_FAILED_STARTS + 1:  # noqa: ASYNC110 (there is no event)
            await trio.sleep(0.01)
        await trainer.evaluate(thorough=False)
        assert not refused and np.array_equal(trainer.parameters(), kept)

    start = subprocess.Popen
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.01)
    _with_trainer(settings, use)


def test_a_machine_that_can_start_no_process_at_all_is_told_so(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.01)
    monkeypatch.setattr(trainerchild.subprocess, "Popen", refused)
    failure = _failure(settings)
    assert "3 times" in failure and "Too many open files" in failure


@pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock, so nothing is out of reach")
def test_a_task_that_the_sandbox_keeps_from_a_file_says_how_it_may_read_it(
    settings: TrainerSettings, tmp_path: Path
) -> None:
    for folder in ("own", "elsewhere"):
        (tmp_path / folder).mkdir()
    numbers, task = tmp_path / "elsewhere" / "numbers", tmp_path / "own" / "task.py"
    numbers.write_text("1 2 3")
    task.write_text(f"open({str(numbers)!r})\n")
    failure = _failure(replace(settings, task=f"{task}:Task"))
    assert str(numbers) in failure and "--sandbox-read" in failure


def test_trainer_dies_with_its_daemon(settings: TrainerSettings) -> None:
    daemon = f"""
import trio
from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.training.runspec import parse_runspec
async def main():
    task = {{"heldout_sha256": "{HELDOUT_SHA256}"}}
    model = {{"width": 16, "context": 16}}
    spec = parse_runspec({{"run": {{"name": "tiny"}}, "task": task, "model": model}}, source="test")
    trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="alice", settings={settings!r})
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        print(trainer.pid, flush=True)
        await trainer.train(round=0, steps=10**9, seconds=1e9)
trio.run(main)
"""
    code = f"from swarmnode.node.trainer.child import TrainerSettings\n{daemon}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        gone = os.pidfd_open(pid)
        process.kill()
    trio.run(_readable_within, gone, 10.0)
    os.close(gone)


async def _readable_within(descriptor: int, seconds: float) -> None:
    with trio.fail_after(seconds):
        await trio.lowlevel.wait_readable(descriptor)


# A task that strangers' bytes have taken over: it says of its work what it likes.
TAKEN_OVER = """
import os, torch
from contextlib import suppress
class Task:
    tokens_per_sample = 1
    def __init__(self, spec, assignment, device="cpu"):
        self.model = torch.nn.Linear(2, 2)
    def evaluate(self, *, thorough, seed=None):
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
        return 1
    def rollouts(self, *, version, count, policy):
        return {"groups": [{"width": 7}], "seconds": 0.0}
    def score(self, groups, *, texts):
        return [{"refused": "", "why": ""}] * 2
"""


def test_a_trainer_that_says_what_cannot_be_is_replaced_and_the_node_goes_on(
    settings: TrainerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_module, "FIRST_BACK_OFF", 0.01)
    task = tmp_path / "task.py"
    task.write_text(TAKEN_OVER)
    group = RolloutGroup(TaskRef("x", 1, 0), ((1, 2),), 0, "", "bytes")

    async def use(trainer: TrainerProcess) -> None:
        with pytest.raises(TrainerDied, match=r"answered nonsense: PackedAnswers\.task: missing"):
            await trainer.rollouts(version=0)
        assert await trainer.evaluate(thorough=False) == 1.0, "the next is asked, at once"
        with pytest.raises(TrainerDied, match="answered nonsense: 2 scores of 1 groups"):
            await trainer.score([("bob", group)])

    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": "task"}}, source="test")
    _with_trainer(replace(settings, task=f"{task}:Task", texts=()), use, spec)
    assert any("trainer ended (answered nonsense: PackedAnswers.task: missing)" in said for said in caplog.messages)


def test_groups_are_packed_and_answers_unpacked_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large batch take a second, in which the daemon answers others."""
    threads: list[threading.Thread] = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def in_some_thread(*given: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*given)

        return in_some_thread

    group = RolloutGroup(TaskRef("x", 1, 0), ((1, 2),), 0, "", "bytes")
    sent = {"groups": [group.to_map()], "seconds": 0.0}
    answer = {"id": 0, "ok": sent, "spent": dict.fromkeys(("train", "evaluate", "audit"), 0.0), "sampling": None}
    monkeypatch.setattr(RolloutGroup, "to_map", noted(RolloutGroup.to_map))
    monkeypatch.setattr(RolloutGroup, "from_map", noted(RolloutGroup.from_map))

    async def main() -> None:
        assert len(await trainer_module._maps([("bob", group)])) == 1
        ours, theirs = trio.testing.memory_stream_pair()
        child, call = TrainerChild(), trainerchild._Call("rollouts", RolloutsReply)
        child._stream, child._unanswered[0] = ours, call  # type: ignore[assignment]
        child.process = SimpleNamespace(returncode=0, wait=lambda: None)  # type: ignore[assignment]
        packed = msgpack.packb(answer)
        await theirs.send_all(len(packed).to_bytes(trainerchild.LENGTH, "big") + packed)
        await theirs.aclose()
        await child._read_answers()
        assert call.done.is_set() and call.answer.unpacked == (group,)

    trio.run(main)
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_an_answer_that_a_defect_of_this_program_meets_ends_the_trainer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def meets(self: TrainerChild, raw: bytes) -> int:
        raise OverflowError("int too large to convert to float")

    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        child = TrainerChild()
        child._stream = ours  # type: ignore[assignment]
        child.process = SimpleNamespace(returncode=0, wait=lambda: None)  # type: ignore[assignment]
        await theirs.send_all(bytes(trainerchild.LENGTH))
        await child._read_answers()
        assert child.ended.is_set() and "int too large" in child.cause()

    monkeypatch.setattr(TrainerChild, "_take", meets)
    trio.run(main)


def test_a_trainer_cannot_take_the_parameters_memory_away(settings: TrainerSettings, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TAKEN_OVER)
    daemon = f"""
import trio
from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.training.runspec import parse_runspec
async def main():
    spec = parse_runspec({{"run": {{"name": "r"}}, "task": {{"name": "task"}}}}, source="test")
    settings = {replace(settings, task=f"{task}:Task", texts=())!r}
    trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="alice", settings=settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        await trainer.evaluate(thorough=False)
        assert trainer.parameters().any()
        nursery.cancel_scope.cancel()
trio.run(main)
"""
    assert subprocess.run([sys.executable, "-c", daemon], check=False, timeout=60).returncode == 0


def test_a_trainer_that_seals_the_parameters_memory_itself_is_one_that_died(
    settings: TrainerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "MAX_FAILED_STARTS", 1)
    sealing = "        for descriptor in range(3, 64):\n            with suppress(OSError):\n"
    sealing += "                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)\n"
    task, model = tmp_path / "task.py", "        self.model ="
    task.write_text("import fcntl" + TAKEN_OVER.replace(model, sealing + model))
    spec = parse_runspec({"run": {"name": "r"}, "task": {"name": "task"}}, source="test")
    assert "its memory is not what it was" in _failure(replace(settings, task=f"{task}:Task", texts=()), spec)


def test_nothing_is_left_behind(settings: TrainerSettings) -> None:
    pids: list[int] = []

    async def use(trainer: TrainerProcess) -> None:
        assert trainer.pid is not None
        pids.append(trainer.pid)

    before = len(os.listdir("/proc/self/fd"))
    _with_trainer(settings, use)
    with suppress(ProcessLookupError):
        os.kill(pids[0], 0)
        pytest.fail("the child is still there")
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the mapping, until it is collected


def test_processes_that_outlive_their_first_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, left = tmp_path / "program", tmp_path / "left"
    program.write_text(f"#!/bin/sh\nsleep 100 &\ntouch {left}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(trainerchild, "QUIT_GRACE", 0.1)
    child = TrainerChild()

    async def main() -> None:
        with (tmp_path / "memory").open("wb") as memory:
            async with child.running(memory.fileno(), Rules(), os.environ):
                while not left.exists():  # noqa: ASYNC110 (another process makes it)
                    await trio.sleep(0.01)

    trio.run(main)
    assert child._heard.is_set()  # nobody holds what it printed to


@pytest.mark.parametrize("ends", [True, False])
def test_only_a_successor_waits_for_a_killed_child_that_the_kernel_ends_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/cat")  # which ends at once: it cannot read its arguments
    over = threading.Event()
    monkeypatch.setattr(subprocess.Popen, "wait", lambda self: over.wait(30))
    monkeypatch.setattr(trainerchild, "REAP_GRACE", 0.1)

    async def main() -> None:
        with (tmp_path / "memory").open("wb") as memory, trio.CancelScope() as daemon:
            async with TrainerChild().running(memory.fileno(), Rules(), os.environ):
                await trio.sleep(0.1)
                if ends:
                    daemon.cancel()
                    await trio.sleep_forever()
                threading.Timer(0.5, over.set).start()

    trio.run(main)
    assert over.is_set() != ends
    over.set()


def test_stopping_takes_no_longer_than_the_child_needs_to_end(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainerchild, "QUIT_GRACE", 30.0)  # a slow machine may take some seconds

    async def main() -> None:
        async with running_trainer(SPEC, settings):
            asked = trio.current_time()
        assert trio.current_time() - asked < trainerchild.QUIT_GRACE

    trio.run(main)


def test_a_run_that_cannot_fit_is_refused_before_anything_is_taken(settings: TrainerSettings) -> None:
    async def start() -> None:
        huge = SPEC.updated(model={"layers": 8, "heads": 8, "width": 16384, "context": 16})
        trainer = TrainerProcess(huge, run_id=huge.run_id, peer_id="alice", settings=settings)
        with trio.fail_after(60):
            await trainer.run()

    with pytest.raises(TrainerFailed, match=r"needs [0-9.]+ GB of memory .* Close other programs"):
        trio.run(start)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_killed_trainer_loses_no_moments(settings: TrainerSettings, ranks: int) -> None:
    async def use(trainer: TrainerProcess) -> None:
        await trainer.train(round=0, steps=5, seconds=60)
        moments, updates = trainer.moments()
        before = moments.copy()
        assert trainer.pid is not None and before.any()
        os.kill(trainer.pid, signal.SIGKILL)
        while trainer.moments()[1] == updates:
            with suppress(TrainerDied):
                await trainer.train(round=1, steps=1, seconds=60)
            await trio.sleep(0.05)
        now, then = trainer.moments()
        assert (updates, then) == (5, 6)
        assert np.linalg.norm(now[: now.size // 2]) > 0.5 * np.linalg.norm(before[: before.size // 2])

    _with_trainer(replace(settings, ranks=ranks, sharded=ranks > 1), use)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        ("adamw", {}),
        pytest.param("muon", {}, marks=pytest.mark.thorough),
        pytest.param("muon", {"ranks": 2}, marks=pytest.mark.thorough),
        ("muon", {"ranks": 2, "sharded": True}),
    ],
)
def test_a_restart_in_the_middle_changes_nothing_that_follows(
    settings: TrainerSettings, tmp_path: Path, optimizer: str, how: dict[str, int]
) -> None:
    """From a checkpoint with its moments the same steps follow, to the last bit; with fresh moments others do."""
    settings = replace(settings, **how)
    spec = SPEC.updated(inner={"optimizer": optimizer})
    ends: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    kept: list[Checkpoints] = []

    async def rounds(trainer: TrainerProcess, *, first: int, last: int) -> None:
        for round in range(first, last):
            await trainer.train(round=round, steps=4, seconds=60)

    async def uninterrupted(trainer: TrainerProcess) -> None:
        await rounds(trainer, first=0, last=3)
        moments, updates = trainer.moments()
        state = OuterState.start(trainer.parameters())
        kept.append(Checkpoints(tmp_path, run_id=spec.run_id, layout=trainer.layout, keep=1))
        kept[0].save(Saved(3, state, np.zeros_like(state.parameters), (), moments=moments, updates=updates))
        await rounds(trainer, first=3, last=8)
        ends["whole"] = trainer.parameters(), trainer.moments()[0].copy()

    async def restarted(trainer: TrainerProcess, name: str) -> None:
        saved = kept[0].newest()
        assert saved is not None and saved.moments is not None
        trainer.load(saved.state.parameters)
        if name == "restarted":
            await trainer.remember(saved.moments, saved.updates)
        with pytest.raises(ValueError, match="another optimizer"):
            await trainer.remember(saved.moments[1:], saved.updates)
        await rounds(trainer, first=3, last=8)
        ends[name] = trainer.parameters(), trainer.moments()[0].copy()

    _with_trainer(settings, uninterrupted, spec)
    for name in ("restarted", "forgetful"):
        _with_trainer(settings, partial(restarted, name=name), spec)
    for whole, again, fresh in zip(*(ends[name] for name in ("whole", "restarted", "forgetful")), strict=True):
        np.testing.assert_array_equal(whole, again)
        assert not np.allclose(whole, fresh, rtol=1e-3)


def test_of_a_step_as_much_is_computed_at_once_as_there_is_memory_for(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spec = SPEC.updated(inner={"batch": 1024})
    assignment = Assignment(spec.run_id, "alice")
    half = weigh(ByteLM, spec, assignment, 512)
    assert half is not None
    free = needs(spec, half).memory + 1
    monkeypatch.setattr(trainer_module.Machine, "here", lambda folder, device: Machine(free, 1e18))

    async def use(trainer: TrainerProcess) -> None:
        assert trainer.needs is not None and trainer.needs.memory < free
        worked = await trainer.train(round=0, steps=1, seconds=60)
        assert worked.samples == 1024

    _with_trainer(settings, use, spec)
    assert "512 of a step's 1024" in caplog.text
