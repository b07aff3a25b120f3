"""Trainer processes that repeat one another's steps: on other threads, from states and text that travelled."""

from __future__ import annotations

import hashlib
import math
import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from swarmnode.node.trainer.child import TrainerSettings
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.methods.trainer import Batches, Marked, Slice
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.verify.replay import LEAST
from swarmnode.training.verify.trace import Point, Stretch
from swarmnode.training.verify.vectors import Vectors

Use = Callable[[TrainerProcess, TrainerProcess], Awaitable[None]]


def _text(seed: int, size: int) -> bytes:
    words = [bytes(random.Random(number).choices(b"abcdefgh", k=4)) for number in range(50)]
    return b" ".join(random.Random(seed).choices(words, k=size // 5))


@pytest.fixture
def spec() -> RunSpec:
    heldout = hashlib.sha256(_text(0, 5_000)).hexdigest()
    return parse_runspec(
        {
            "run": {"name": "audited", "trust": "open"},
            "task": {"heldout_sha256": heldout},
            "model": {"layers": 2, "heads": 2, "width": 32, "context": 32},
            "inner": {"batch": 2, "steps": 40},
            "trust": {"audit_share": 0.05},
        },
        source="test",
    )


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Shards of the run's text."""
    (tmp_path / "heldout").write_bytes(_text(0, 5_000))
    paths = [tmp_path / f"shard{number}" for number in range(3)]
    for number, path in enumerate(paths, 1):
        path.write_bytes(_text(number, 20_000))
    return paths


def _with_trainers(
    spec: RunSpec, texts: list[Path], use: Use, *, threads: int = 1, ranks: tuple[int, int] = (1, 1)
) -> None:
    """`use` with an author who trains on the first two shards, and an auditor with the third and so many threads.

    `ranks`: of both.
    """

    async def main() -> None:
        settings = TrainerSettings(threads=1, nice=0, device="cpu")
        if texts:
            heldout = str(texts[0].parent / "heldout")
            settings = replace(settings, heldout=heldout, texts=(str(texts[0]),))
        other = replace(settings, threads=threads, texts=tuple(map(str, texts[2:])), ranks=ranks[1])
        settings = replace(settings, ranks=ranks[0])
        author = TrainerProcess(spec, run_id=spec.run_id, peer_id="author", settings=settings)
        auditor = TrainerProcess(spec, run_id=spec.run_id, peer_id="auditor", settings=other)
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                starting.start_soon(nursery.start, author.run)
                starting.start_soon(nursery.start, auditor.run)
            with trio.fail_after(100):
                await use(author, auditor)
            nursery.cancel_scope.cancel()

    trio.run(main)


def _show(author: TrainerProcess, auditor: TrainerProcess, point: Point) -> None:
    """Have a state of one where the other looks for what it is to repeat."""
    kept, fetched = Vectors(author.states[0]), Vectors(auditor.states[2])
    for id in point.vectors:
        vector = kept.get(id)
        assert vector is not None
        assert fetched.put(vector) == id


async def _slice(author: TrainerProcess, auditor: TrainerProcess, stretch: Stretch, texts: list[Path]) -> Slice:
    """A slice as an auditor makes it, with no more of the text than it needs."""
    text = b"".join(path.read_bytes() for path in texts[: stretch.texts])
    steps = tuple(range(stretch.step, stretch.step + stretch.steps))
    places = await auditor.places(Batches("author", stretch.round, steps, len(text)))
    assert len(places) == 2 * stretch.steps
    pieces = tuple((start, text[start:stop]) for start, stop in places)
    _show(author, auditor, stretch.start)
    _show(author, auditor, stretch.end)
    return Slice("author", stretch, len(text), pieces)


async def _worked(author: TrainerProcess, texts: list[Path]) -> Marked:
    """Twelve steps on one shard, and eight on two."""
    await author.train(round=0, steps=12, seconds=60)
    await author.feed([str(texts[1])])
    await author.train(round=0, steps=8, seconds=60)
    return await author.mark()


def test_other_process_measures_on_what_an_author_drew_from_its_text(spec: RunSpec, texts: list[Path]) -> None:
    async def use(author: TrainerProcess, auditor: TrainerProcess) -> None:
        text = texts[0].read_bytes()
        known = await author.train(round=0, steps=1, seconds=60)
        author.load(auditor.parameters())  # both the initial ones: nobody else trained
        own = Batches("author", 0, (0,), len(text))
        pieces = tuple((start, text[start:stop]) for start, stop in await auditor.places(own))
        before = auditor.parameters()
        assert await auditor.drawn(replace(own, pieces=pieces)) == pytest.approx(known.loss, rel=1e-5)
        assert np.array_equal(auditor.parameters(), before)
        never = replace(own, steps=(1 << 40,))
        pieces = tuple((start, text[start:stop]) for start, stop in await auditor.places(never))
        assert await auditor.drawn(replace(never, pieces=pieces)) != pytest.approx(known.loss, rel=1e-5)
        assert await auditor.drawn(replace(own, size=0)) is None  # who brings text of its own shows none
        assert math.isnan(await auditor.drawn(replace(own, size=5)))  # nobody trains on so little

    _with_trainers(spec, texts, use)


@pytest.mark.parametrize(
    ("threads", "ranks", "optimizer"),
    [
        (2, (1, 1), "adamw"),
        (1, (2, 1), "adamw"),
        pytest.param(1, (2, 1), "muon", marks=pytest.mark.slow),
        pytest.param(1, (1, 2), "muon", marks=pytest.mark.slow),
    ],
)
def test_another_process_repeats_the_steps_whatever_its_threads_and_ranks(
    spec: RunSpec, texts: list[Path], threads: int, ranks: tuple[int, int], optimizer: str
) -> None:
    async def use(author: TrainerProcess, auditor: TrainerProcess) -> None:
        marked = await _worked(author, texts)
        assert [(s.step, s.steps, s.texts) for s in marked.stretches] == [
            (0, 3, 1),
            (3, 3, 1),
            (6, 3, 1),
            (9, 3, 1),
            (12, 3, 2),
            (15, 3, 2),
            (18, 2, 2),
        ]
        await auditor.train(round=3, steps=4, seconds=60)
        before = auditor.parameters()
        for stretch in marked.stretches[3:5]:  # on one text, and on two
            (found,) = (await auditor.replay(await _slice(author, auditor, stretch, texts))).distances
            assert found.within(LEAST / 20), found
        assert np.array_equal(auditor.parameters(), before)
        calibrated = await author.calibrate()
        assert calibrated.distances
        assert all(found.within(LEAST / 20) for found in calibrated.distances)
        assert auditor.spent["audit"] > 0

    _with_trainers(spec.updated(inner={"optimizer": optimizer}), texts, use, threads=threads, ranks=ranks)


def test_steps_on_data_that_all_have_are_repeated_without_text(spec: RunSpec) -> None:
    pytest.importorskip("sklearn")

    async def use(author: TrainerProcess, auditor: TrainerProcess) -> None:
        await author.train(round=0, steps=20, seconds=60)
        stretch = (await author.mark()).stretches[2]
        _show(author, auditor, stretch.start)
        _show(author, auditor, stretch.end)
        for name, is_theirs in (("author", True), ("another", False)):
            (found,) = (await auditor.replay(Slice(name, stretch, 0, ()))).distances
            assert found.within(LEAST / 20) is is_theirs, found

    _with_trainers(spec.updated(task={"name": "image", "heldout_sha256": ""}), [], use)


def test_steps_on_other_data_or_of_another_node_are_far_away(spec: RunSpec, texts: list[Path]) -> None:
    async def use(author: TrainerProcess, auditor: TrainerProcess) -> None:
        stretch = (await _worked(author, texts)).stretches[1]
        honest = await _slice(author, auditor, stretch, texts)
        others = tuple((at, bytes(len(piece))) for at, piece in honest.pieces)
        for lie in (replace(honest, pieces=others), replace(honest, author="somebody")):
            (found,) = (await auditor.replay(lie)).distances
            assert not found.within(2 * LEAST)

    _with_trainers(spec, texts, use)


def test_tokens_that_the_run_has_not_are_far_away_and_no_reason_to_die(spec: RunSpec, texts: list[Path]) -> None:
    async def use(author: TrainerProcess, auditor: TrainerProcess) -> None:
        await author.train(round=0, steps=3, seconds=60)
        honest = await _slice(author, auditor, (await author.mark()).stretches[0], texts)
        beyond = tuple((at, b"\xff" * len(piece)) for at, piece in honest.pieces)  # tokens of two bytes
        (found,) = (await auditor.replay(replace(honest, pieces=beyond))).distances
        assert not found.within(2 * LEAST)
        assert auditor.restarts == 0

    _with_trainers(spec.updated(data={"vocabulary": 30_000}), texts, use)


def test_states_that_a_restart_took_are_no_reason_to_die(spec: RunSpec, texts: list[Path]) -> None:
    async def use(author: TrainerProcess, auditor: TrainerProcess) -> None:
        slice = await _slice(author, auditor, (await _worked(author, texts)).stretches[1], texts)
        shutil.rmtree(auditor.states[2])
        assert (await auditor.replay(slice)).distances == ()
        assert auditor.restarts == 0

    _with_trainers(spec, texts, use)


def test_audits_and_judging_leave_no_gap_in_what_is_recorded(spec: RunSpec, texts: list[Path]) -> None:
    async def use(author: TrainerProcess, auditor: TrainerProcess) -> None:
        first = await _worked(author, texts)
        slice = await _slice(author, auditor, first.stretches[0], texts)
        local = author.parameters()
        author.load(np.zeros_like(local))  # a judge tries something, and puts back what was there
        await author.heldout(seed=1, sequences=1)
        author.load(local)
        await author.replay(replace(slice, author="auditor"))
        await author.train(round=0, steps=3, seconds=60)
        second = await author.mark()
        assert second.life == first.life
        assert second.stretches[0].start == first.stretches[-1].end
        await author.train(round=0, steps=1, seconds=60)
        author.load(np.zeros_like(local))  # without a mark: nothing before can be shown
        await author.train(round=0, steps=1, seconds=60)
        assert (await author.mark()).life != first.life

    _with_trainers(spec, texts, use)
