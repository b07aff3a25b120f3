"""bench/learning.py in miniature: the methods train, resume, and are written up.

Sizes are so small that nothing is learned from the losses; what is checked is the machinery and its arithmetic.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import learning
from learned.methods import Arm, Factored, Outcome, spec_of, train
from learned.report import described, put, simulated_seconds
from learned.workers import DataParallel, Size, Workers

from swarmnode.node.storage.cutting import publish
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.training.codecs import codec
from swarmnode.training.inner import layout_of
from swarmnode.training.lowrank import LowRank
from swarmnode.training.sections import ModelSection
from swarmnode.training.seed import Tally
from swarmnode.training.tokens import CorpusError

MODEL = ModelSection(layers=1, heads=1, width=16, context=16)


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> Size:
    text = tmp_path_factory.mktemp("corpus") / "text"
    text.write_bytes(np.random.default_rng(0).integers(32, 127, 100_000, np.uint8).tobytes())
    return Size(workers=4, batch=2, model=MODEL, corpus=str(text))


@pytest.fixture(scope="module")
def workers(size: Size) -> Iterator[Workers]:
    made = Workers(size, seed=1)
    yield made
    made.close()


def _run(arm: Arm, workers: Workers, every: int = 0) -> Outcome:
    return train(
        arm, workers, start=workers.initial, stream="test", every=every or arm.steps, say=lambda step, loss: None
    )


def test_a_synchronous_batch_is_that_of_all_workers_windows_together(workers: Workers) -> None:
    together = DataParallel(workers)
    batch = together.draw(2, torch.Generator().manual_seed(1))
    one_by_one, generator = [], torch.Generator().manual_seed(1)
    for task in workers.tasks:
        one_by_one.append(task.loss(task.draw(2, generator)))
    together.model.load_state_dict(workers.tasks[0].model.state_dict())
    torch.testing.assert_close(together.loss(batch), torch.stack(one_by_one).mean())


def test_daemons_hold_out_the_text_that_workers_are_measured_on(workers: Workers, size: Size, tmp_path: Path) -> None:
    wanted = workers.text.spec.task.heldout_sha256
    for arm in learning.Plan().methods[1:3]:
        spec = spec_of(arm, size, workers.seed).begun_by("creator")
        made = publish(spec, size.corpus, ShardStore(tmp_path / arm.method, cap=1 << 30))
        assert made.task.heldout_sha256 == wanted and made.run_id != workers.text.spec.run_id
    with pytest.raises(CorpusError, match="not the run's"):
        other = spec_of(arm, size, workers.seed + 1).updated(task={"heldout_sha256": wanted})
        publish(other, size.corpus, ShardStore(tmp_path / "other", cap=1 << 30))


def test_one_step_of_diloco_without_loss_moves_like_the_mean_of_the_workers(workers: Workers) -> None:
    arm = Arm("diloco", steps=1, lr=1e-2, codec="fp32")
    workers.begin(workers.size.spec(seed=1, lr=1e-2, steps=1), stream="test")
    deltas = workers.train([workers.initial] * len(workers.peers), round=0, steps=1)
    np.testing.assert_allclose(_run(arm, workers).parameters, workers.initial - np.mean(deltas, axis=0), atol=1e-6)


def test_open_moves_only_where_an_accepted_contribution_says(workers: Workers) -> None:
    outcome = _run(Arm("open", steps=2, lr=1e-2, interval=2, codec="topk", decay=0.95), workers)
    moved = np.flatnonzero(outcome.parameters != workers.initial)
    kept = codec("topk").decode_sparse(codec("topk").encode(workers.initial), workers.parameters)[0].size
    assert 0 < moved.size <= len(workers.peers) * kept
    assert 0 < outcome.accepted <= 1


@pytest.mark.parametrize("method, name, times", [("synchronous", "fp32", 2 * 3), ("open", "topk", 4 * 3)])
def test_bytes_are_those_of_what_was_encoded(workers: Workers, method: str, name: str, times: int) -> None:
    outcome = _run(Arm(method, steps=4, lr=1e-3, interval=1, codec=name), workers)
    assert outcome.bytes_per_node == 4 * times / 4 * codec(name).encoded_size(workers.parameters)


def test_diloco_sends_each_parameter_twice_but_for_a_nodes_own(workers: Workers) -> None:
    outcome = _run(Arm("diloco", steps=4, lr=1e-3, interval=2, codec="int8"), workers)
    once = codec("int8").encoded_size(workers.parameters)
    assert outcome.bytes_per_node == pytest.approx(2 * 2 * 3 / 4 * once, rel=0.01)


def test_all_steps_are_taken_where_rounds_grow(workers: Workers) -> None:
    outcome = _run(
        Arm("diloco", steps=75, lr=1e-3, optimizer="muon", interval=2, grows=True, codec="sign"), workers, 70
    )
    measured = [step for step, *_ in outcome.curve]
    assert measured[0] == 0 and 70 <= measured[1] < 75 and measured[2] == 75
    assert 75 / 2 < outcome.rounds < 75


@pytest.mark.thorough
@pytest.mark.slow
def test_finished_runs_are_kept_and_written_up(size: Size, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shrunk(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        return tuple(replace(arm, steps=4, interval=min(2, arm.interval)) for arm in arms)

    made = learning.Plan()
    plan = replace(
        made,
        size=size,
        every=2,
        rates=shrunk(made.rates[-1:]),
        methods=shrunk(made.methods),
        curves=shrunk(made.curves[:2]),
        menu=shrunk((*made.menu[:3], next(arm for arm in made.menu if arm.method == "seed"))),
        from_scratch=shrunk(made.from_scratch[:1]),
        from_checkpoint=shrunk(made.from_checkpoint),
        menu_size=replace(size, workers=2),
    )
    page = tmp_path / "results.md"
    names = ("methods", "seeds", "curves", "daemons", "rates", "menu", "checkpoint")
    page.write_text("".join(f"<!-- {name} -->\nof {name}\n<!-- /{name} -->\n" for name in names), encoding="utf-8")
    arguments = ["--seeds", "2", "--out", str(tmp_path / "out"), "--docs", str(tmp_path)]
    arguments += [f"--only={part}" for part in ("rates", "methods", "curves", "menu", "checkpoint")]
    learning.main([*arguments, "--most", "3"], plan)
    first = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(first) == 3
    learning.main(arguments, plan)
    first += [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # of the curves, those with the usual batch are among the methods already
    parts = Counter(line["part"] for line in first)
    assert parts == {
        "rates": 1,
        "methods": 8,
        "curves": 2,
        "menu": 2 * len((*plan.menu, *plan.from_scratch)),
        "checkpoint": 2 * len((*plan.menu, *plan.from_checkpoint)),
    }
    written = page.read_text(encoding="utf-8")
    assert written.count("| diloco | `sign`, H grows to 2,") == 1
    assert [name for name in names if f"\nof {name}\n" in written] == ["daemons"]  # which were not run
    assert "| alone | AdamW 0.002 | 2 |" in written
    assert (tmp_path / "learning.svg").exists() and "continued" in (tmp_path / "menu.svg").read_text()
    scratch, further = (
        {
            line["seed"]: line
            for line in first
            if (line["part"], line["arm"]["method"], line["arm"]["eps"]) == (part, "synchronous", Arm.eps)
        }
        for part in ("menu", "checkpoint")
    )
    for seed, line in further.items():  # from where the run from scratch ended, on other windows
        assert line["curve"][0][1] == scratch[seed]["loss"]
    assert len(list((tmp_path / "out" / "starts").iterdir())) == 2
    learning.main(arguments, plan)
    assert capsys.readouterr().out == ""
    assert page.read_text(encoding="utf-8") == written


def test_a_line_on_other_text_is_not_taken_for_finished_and_is_marked_beside_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = learning.Results(tmp_path / "results.jsonl")
    cell, beside, *_ = learning.Plan().cells()
    monkeypatch.setattr(learning, "run_of", lambda size, seed: "before")
    results.add(cell, {"loss": 1.0})
    assert results.find(cell, cell.run) == results.find(cell)
    monkeypatch.setattr(learning, "run_of", lambda size, seed: "now")
    assert results.find(cell, cell.run) is None
    results.add(beside, {"loss": 2.0})
    shown, new = results.find(cell), results.find(beside, beside.run)
    assert shown is not None and (shown["loss"], shown["older"]) == (1.0, True)
    assert new is not None and (new["loss"], new["older"]) == (2.0, False)


def test_one_worker_alone_sends_nothing_and_moves_as_far_as_it_offers(workers: Workers) -> None:
    outcome = _run(Arm("alone", steps=2, lr=1e-2), workers)
    workers.begin(workers.size.spec(seed=1, lr=1e-2, steps=2), stream="test")
    first = workers.train([workers.initial], round=0, steps=2)
    assert len(first) == 1 and outcome.bytes_per_node == 0
    np.testing.assert_array_equal(outcome.parameters, workers.initial - first[0])


def test_pairs_move_like_their_mean_and_end_merged(workers: Workers) -> None:
    arm = Arm("gossip", steps=1, lr=1e-2, codec="fp32")
    workers.begin(workers.size.spec(seed=1, lr=1e-2, steps=1), stream="test")
    deltas = workers.train([workers.initial] * len(workers.peers), round=0, steps=1)
    outcome = _run(arm, workers)
    apart = max(float(np.abs(delta - np.mean(deltas, axis=0)).max()) for delta in deltas)
    merged = np.abs(outcome.parameters - (workers.initial - np.mean(deltas, axis=0))).max()
    assert merged < apart / 4  # after nine meetings of four
    once = codec("fp32").encoded_size(workers.parameters)
    assert outcome.bytes_per_node == 9 * 2 * once
    assert outcome.wire == ((once, 0, 1), (once, 1, 1), (2 * once, 0, 8))  # a round's weights, in its step


def test_by_seeds_all_move_along_what_each_tells_in_records(workers: Workers) -> None:
    outcome = _run(Arm("seed", steps=4, lr=1e-4, clip=2.0, interval=2), workers)
    assert outcome.rounds == 2 and 3 * 2 * 250 < outcome.bytes_per_node < 3 * 2 * 350
    workers.begin(spec_of(Arm("seed", steps=4, lr=1e-4, clip=2.0, interval=2), workers.size, 1), stream="test")
    tally = Tally(workers.initial)
    for round in range(2):
        told = workers.probe(tally.parameters(lr=1e-4, clip=2.0), round=round, steps=2)
        for peer, each in zip(workers.peers, told, strict=True):
            tally.add(1, f"{peer}/test", round, each)
    assert tally.sums.any() and np.array_equal(outcome.parameters, tally.parameters(lr=1e-4, clip=2.0))


def test_merging_is_one_round_as_long_as_the_run(workers: Workers) -> None:
    outcome = _run(Arm("merge", steps=4, lr=1e-3, interval=4, codec="int8"), workers)
    assert outcome.rounds == 1 and outcome.bytes_per_node > 0


def test_the_wall_clock_counts_what_no_step_hides() -> None:
    line = {"arm": {"steps": 100}, "wire": [[2_500_000, 0, 2], [250_000, 0, 10], [250_000, 5, 10]]}
    assert simulated_seconds(line, 20) == pytest.approx(10 + 2 * 1.0 + 10 * 0.1)
    assert simulated_seconds(line, 2) == pytest.approx(10 + 2 * 10 + 10 * 1.0 + 10 * 0.5)


def test_a_page_without_room_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="methods"):
        put("nothing here", "methods", "| a |")


@pytest.mark.parametrize("eager", [False, True])
def test_streaming_sends_a_fragment_a_round_and_moves_along_the_mean_of_all_work(workers: Workers, eager: bool) -> None:
    arm = Arm("streaming", steps=2, lr=1e-2, interval=2, codec="fp32", fragments=1, tau=1, alpha=0.0, eager=eager)
    outcome = _run(arm, workers)
    workers.begin(workers.size.spec(seed=1, lr=1e-2, steps=2), stream="test")
    first = workers.train([workers.initial] * len(workers.peers), round=0, steps=1)
    np.testing.assert_allclose(outcome.parameters, workers.initial - np.mean(first, axis=0), atol=1e-6)
    ((sent, overlap, times),) = outcome.wire
    assert (overlap, times) == (1, 1) and sent == 2 * 3 / 4 * codec("fp32").encoded_size(workers.parameters)


def test_factors_move_by_the_mean_of_all_work_as_far_as_their_rank_goes(workers: Workers) -> None:
    arm = Arm("lowrank", steps=2, lr=1e-2, interval=2, codec="fp32", tau=1, rank=7)
    outcome = _run(arm, workers)
    workers.begin(workers.size.spec(seed=1, lr=1e-2, steps=2), stream="test")
    mean = np.mean(workers.train([workers.initial] * len(workers.peers), round=0, steps=1), axis=0)
    left = outcome.parameters - (workers.initial - mean)
    assert 0 < np.linalg.norm(left) < 0.6 * np.linalg.norm(mean)
    ((sent, overlap, times),) = outcome.wire
    factors = LowRank(layout_of(workers.tasks[0].model), 7)
    most = factors.left + sum(matrix.m * matrix.rank for matrix in factors.matrices)
    rest = workers.parameters - sum(matrix.slot.size for matrix in factors.matrices)
    assert (overlap, times) == (1, 1) and sent <= 2 * 3 / 4 * 4 * (most + rest) < 2 * 3 / 4 * 4 * workers.parameters


def test_what_factors_leave_over_is_sent_later(workers: Workers) -> None:
    """Of values that stay the same, the means add up to as many times them, but for what is left over at the end."""
    factored = Factored(workers, Arm("lowrank", steps=1, lr=1e-2, codec="int4", rank=4))
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(workers.parameters).astype(np.float32) for _ in workers.peers]
    wanted, done, off = np.mean(values, axis=0), np.zeros(workers.parameters), []
    for times in range(1, 25):
        done += factored.mean(values)
        off.append(np.linalg.norm(times * wanted - done) / np.linalg.norm(wanted))
        np.testing.assert_allclose(done + np.mean(factored.left, axis=0), times * wanted, atol=1e-3 * times)
    assert max(off[12:]) < 1.3 * max(off[:12])


def test_momentum_is_exchanged_after_each_step_and_moves_by_signs(workers: Workers) -> None:
    arm = Arm("demo", steps=3, lr=1e-2, optimizer="sgd", codec="topk")
    outcome = _run(arm, workers)
    ((sent, overlap, times),) = outcome.wire
    assert (sent, overlap, times) == (3 * codec("topk").encoded_size(workers.parameters), 0, 3)
    moved = np.abs(outcome.parameters - workers.initial)
    # warming up over 20 steps, and matrices fade by a tenth of that
    assert 0 < moved.max() <= 1e-2 * (1 + 2 + 3) / 20 * (1 + 0.1 * np.abs(workers.initial).max()) + 1e-6


def test_async_is_diloco_where_all_are_equally_fast(workers: Workers) -> None:
    arm = Arm("diloco", steps=4, lr=1e-2, interval=2, codec="fp32")
    together, apart = _run(arm, workers), _run(replace(arm, method="async", speeds="3"), workers)
    np.testing.assert_allclose(apart.parameters, together.parameters, atol=1e-6)
    assert apart.rounds == 2 and apart.clock == 4 / 3
    assert apart.bytes_per_node == together.bytes_per_node


def test_async_takes_as_many_steps_in_the_time_of_fewer_of_the_slowest(workers: Workers) -> None:
    arm = Arm("async", steps=12, lr=1e-3, interval=4, codec="int8", tau=2, speeds="1:2:4")
    outcome, before = _run(arm, workers), [loop.optimizer.updates for loop in workers._loops]
    # of four workers the last is one of the slow: a round has 1 + 2 + 4 + 1 steps, and lasts one of theirs
    assert outcome.rounds == 6 and outcome.clock == 6
    assert before == [6, 12, 24, 6]
    assert [step for step, *_ in outcome.curve][-1] == 12
    assert {overlap for _, overlap, _ in outcome.wire} == {0.5}
    line = {"arm": asdict(arm), "clock": outcome.clock, "wire": [list(exchange) for exchange in outcome.wire]}
    assert simulated_seconds(line, 1e9) == pytest.approx(0.6)
    assert "H 4 of the fastest, tau 2, speeds 1:2:4" in described(asdict(arm))
