"""A trainer of several ranks: it trains what one process trains, and ends as a whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
from realnodes import children
from sometext import HELDOUT_SHA256, some_text
from trainers import running_trainer

from swarmnode.node.trainer import child
from swarmnode.node.trainer.child import TrainerFailed, TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.methods.trainer import TrainerDied
from swarmnode.training.runspec import RunSpec, parse_runspec

FOREVER = 10**9


def _spec(**inner: float | str) -> RunSpec:
    model = {"layers": 1, "heads": 2, "width": 16, "context": 16}
    task = {"heldout_sha256": HELDOUT_SHA256}
    tables = {"run": {"name": "t"}, "task": task, "model": model, "inner": {"warmup": 0, **inner}}
    return parse_runspec(tables, source="test")


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(threads=1, nice=0, device="cpu", ranks=2, **some_text(tmp_path))


def _with_trainer(
    settings: TrainerSettings, use: Callable[[TrainerProcess], Awaitable[None]], spec: RunSpec | None = None
) -> None:
    async def main() -> None:
        async with running_trainer(spec or _spec(batch=5), settings) as trainer:
            await use(trainer)

    trio.run(main)


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(settings: TrainerSettings) -> None:
    seen: list[tuple[np.ndarray, np.ndarray, list[float]]] = []

    async def use(trainer: TrainerProcess) -> None:
        await trainer.train(round=0, steps=3, seconds=60)
        trainer.load(trainer.parameters() * np.float32(0.9))  # as an exchange does
        worked = await trainer.train(round=1, steps=3, seconds=60)
        assert (worked.steps, worked.samples, worked.tokens) == (3, 15, 240)
        slope = await trainer.gradient(seed=7, first=0, last=3)
        assert slope is not None
        losses = [worked.loss, slope[0], await trainer.evaluate(thorough=False)]
        trained = trainer.parameters()
        trainer.load(3 * np.roll(trained, 99))
        losses.append(await trainer.evaluate(thorough=False))  # of these, not of those that were gathered before
        seen.append((trained, slope[1], losses))

    for ranks, sharded in ((1, False), (2, False), (2, True)):  # of five sequences in a batch, three and two
        micro_batch = 1 + sharded  # the three are two and one
        _with_trainer(replace(settings, ranks=ranks, sharded=sharded, micro_batch=micro_batch), use)
    for several in (1, 2):
        for one, other in zip(seen[0][:2], seen[several][:2], strict=True):
            assert np.abs(one - other).max() < 2e-6
        assert seen[0][2] == pytest.approx(seen[several][2], abs=1e-5)
        assert seen[0][2][2] != pytest.approx(seen[0][2][3], abs=1e-4)


@pytest.mark.thorough
@pytest.mark.slow  # four processes
def test_ranks_with_some_rows_each_orthogonalise_whole_matrices(settings: TrainerSettings) -> None:
    moved: list[np.ndarray] = []

    async def use(trainer: TrainerProcess) -> None:
        start = trainer.parameters()
        await trainer.train(round=0, steps=3, seconds=60)
        moved.append(trainer.parameters() - start)

    for ranks in (1, 3):  # of sixteen rows, six, six and four
        chosen = replace(settings, ranks=ranks, sharded=True)
        _with_trainer(chosen, use, _spec(batch=5, optimizer="muon", muon_lr=0.02))
    # In bfloat16, where what is rounded otherwise shows; matrices of six rows would be as far off as they moved.
    assert np.linalg.norm(moved[0] - moved[1]) < 0.05 * np.linalg.norm(moved[0])


async def _train_forever(trainer: TrainerProcess) -> None:
    await trainer.train(round=1, steps=FOREVER, seconds=FOREVER)


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_ranks_stop_as_asked_and_end_with_any_of_them_and_others_go_on(settings: TrainerSettings, first: bool) -> None:
    async def use(trainer: TrainerProcess) -> None:
        assert 0 < (await trainer.train(round=0, steps=FOREVER, seconds=0.2)).steps < FOREVER
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_train_forever, trainer)
            await trio.sleep(0.1)
            await trainer.evaluate(thorough=False)  # between two steps
            await trainer.interrupt()
        assert trainer.pid is not None
        before = trainer.pid, *children(trainer.pid)
        assert len(before) == 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_kill_soon, before[0] if first else before[1])
            with pytest.raises(TrainerDied):
                await _train_forever(trainer)
        with trio.fail_after(2):
            while any(_runs(pid) for pid in before):  # noqa: ASYNC110 (other processes end: there is no event)
                await trio.sleep(0.01)
        assert (await trainer.train(round=1, steps=2, seconds=60)).steps == 2
        assert trainer.restarts == 1

    _with_trainer(settings, use)


async def _kill_soon(pid: int) -> None:
    await trio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (_spec(batch=1), "1 sequences.*--ranks 1"),
        pytest.param(
            parse_runspec({"run": {"name": "t"}, "task": {"name": "digits-rl"}}, source="test"),
            "by rollouts.*--ranks 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            parse_runspec(
                {"run": {"name": "t"}, "exchange": {"method": "seed"}, "inner": {"lr": 1e-4, "clip": 2.0}},
                source="test",
            ),
            "by seeds.*--ranks 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            parse_runspec({"run": {"name": "t", "trust": "open"}, "trust": {"audit_share": 0.1}}, source="test"),
            "audits.*--sharded",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_ranks_cannot_share_is_refused(settings: TrainerSettings, spec: RunSpec, message: str) -> None:
    async def main() -> None:
        told = replace(settings, sharded=True)
        trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="alice", settings=told)
        with trio.fail_after(30):
            await trainer.run()

    with pytest.raises(TrainerFailed, match=message):
        trio.run(main)


def test_gpus_are_counted_where_torch_can_use_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(child, "glob", lambda _: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.setattr(child, "find_spec", lambda _: type("Spec", (), {"origin": str(tmp_path / "__init__.py")}))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert child.gpus() == 1
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    assert child.gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert child.gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert child.gpus() == 1
