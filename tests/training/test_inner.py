"""The inner loop: trains the shared vector itself, warms up over global steps, stops when told."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from swarmnode.training.inner import InnerLoop, flatten_into, layout_of
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import TaskError


class Line:
    """The task of fitting y = 2x + 1, as small as a task can be."""

    tokens_per_sample = 3

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.drawn: list[Tensor] = []

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        self.drawn.append(torch.randn(samples, 2, generator=generator))
        return self.drawn[-1]

    def loss(self, batch: Tensor) -> Tensor:
        return (self.model(batch)[:, 0] - 2 * batch[:, 0] - 1).square().mean()

    def evaluate(self, *, thorough: bool) -> float:
        return 0.0

    def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        return b""


def _spec(**inner: float) -> RunSpec:
    return parse_runspec(
        {"run": {"name": "t"}, "inner": {"batch": 4, "steps": 10, "warmup": 0, **inner}}, source="test"
    )


def _loop(task: Line, *, peer_id: str = "p", **inner: float) -> tuple[InnerLoop, Tensor]:
    vector = torch.zeros(layout_of(task.model).parameters)
    return InnerLoop(_spec(**inner), task, peer_id=peer_id, vector=vector, keep=False), vector


def _never() -> bool:
    return False


def _after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


def test_the_vector_is_the_model() -> None:
    task = Line()
    weights = torch.cat([p.detach().flatten().clone() for p in task.model.parameters()])
    loop, vector = _loop(task)
    assert torch.equal(vector, weights)
    loop.train(round=0, steps=5, seconds=60, between=_never)
    assert not torch.equal(vector, weights)
    assert torch.equal(vector[:2], task.model.weight.detach().flatten())
    vector.zero_()
    assert float(task.model(torch.ones(1, 2))) == 0.0


def test_kept_parameters_are_not_overwritten() -> None:
    model = nn.Linear(2, 1)
    vector = torch.tensor([1.0, 2.0, 3.0])
    flatten_into(model, vector, keep=True)
    assert model.weight.tolist() == [[1.0, 2.0]]
    assert model.bias.tolist() == [3.0]


def test_training_lowers_the_loss_and_counts_its_work() -> None:
    loop, _ = _loop(Line(), lr=0.1)
    first = loop.train(round=0, steps=10, seconds=60, between=_never)
    for number in range(1, 10):
        last = loop.train(round=number, steps=10, seconds=60, between=_never)
    assert last.loss < first.loss / 20
    assert (first.steps, first.samples, first.tokens) == (10, 40, 120)
    assert first.seconds > 0


def test_stops_when_told_and_goes_on_in_the_same_round() -> None:
    task, whole = Line(), Line()
    loop, vector = _loop(task)
    assert loop.train(round=3, steps=10, seconds=60, between=_after(4)).steps == 4
    assert loop.train(round=3, steps=6, seconds=60, between=_never).steps == 6
    other, expected = _loop(whole)
    other.train(round=3, steps=10, seconds=60, between=_never)
    assert torch.equal(vector, expected)


def test_time_runs_out() -> None:
    assert _loop(Line())[0].train(round=0, steps=10**9, seconds=0.02, between=_never).steps > 0
    nothing = _loop(Line())[0].train(round=0, steps=5, seconds=0.0, between=_never)
    assert nothing.steps == 0
    assert math.isnan(nothing.loss)


def test_nodes_and_rounds_see_different_batches_and_a_repeated_run_the_same() -> None:
    def batches(peer_id: str) -> list[Tensor]:
        task = Line()
        loop, _ = _loop(task, peer_id=peer_id)
        for number in (0, 1):
            loop.train(round=number, steps=1, seconds=60, between=_never)
        return task.drawn

    alice, again, bob = batches("alice"), batches("alice"), batches("bob")
    assert all(torch.equal(a, b) for a, b in zip(alice, again, strict=True))
    assert not torch.equal(alice[0], alice[1])
    assert not torch.equal(alice[0], bob[0])


@pytest.mark.parametrize(("round", "share"), [(0, 1 / 20), (1, 11 / 20), (2, 1.0)])
def test_warm_up_counts_steps_of_the_run_not_of_the_node(round: int, share: float) -> None:
    warm, warm_vector = _loop(Line(), warmup=20, weight_decay=0)
    hot, hot_vector = _loop(Line(), warmup=0, weight_decay=0)
    before = warm_vector.clone()
    warm.train(round=round, steps=1, seconds=60, between=_never)
    hot.train(round=round, steps=1, seconds=60, between=_never)
    torch.testing.assert_close(warm_vector - before, share * (hot_vector - before), rtol=1e-3, atol=1e-7)


def test_other_values_of_inner_hold_from_the_next_step_on() -> None:
    task = Line()
    loop, vector = _loop(task, lr=0.1, weight_decay=0.0)
    moved = []
    for rate in (0.1, 1e-6, 0.1):
        before = vector.clone()
        loop.steer({"lr": rate})
        loop.train(round=0, steps=1, seconds=60, between=_never)
        moved.append(float((vector - before).abs().max()))
    assert moved[0] > 1e-2 and moved[2] > 1e-2 and moved[1] < 1e-5


def test_gradients_are_clipped_to_the_norm() -> None:
    task = Line()
    loop, _ = _loop(task, clip=0.01)
    loop.train(round=0, steps=1, seconds=60, between=_never)
    norm = torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_eps_is_added_to_the_root_of_the_second_moments() -> None:
    """A first step is then lr g / (|g| + eps)."""
    task = Line()
    loop, vector = _loop(task, lr=0.1, warmup=0, weight_decay=0, eps=0.5)
    before = vector.clone()
    loop.train(round=0, steps=1, seconds=60, between=_never)
    gradient = torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None])
    torch.testing.assert_close(before - vector, 0.1 * gradient / (gradient.abs() + 0.5))


def test_decay_pulls_on_matrices_only() -> None:
    decayed, with_decay = _loop(Line(), weight_decay=5.0)
    plain, without = _loop(Line(), weight_decay=0)
    decayed.train(round=0, steps=1, seconds=60, between=_never)
    plain.train(round=0, steps=1, seconds=60, between=_never)
    assert not torch.allclose(with_decay[:2], without[:2], rtol=1e-4)
    assert torch.equal(with_decay[2:], without[2:])


class Crowded(Line):
    """A device with room for two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def loss(self, batch: Tensor) -> Tensor:
        self.sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return super().loss(batch)


def test_a_step_in_parts_is_that_of_the_whole_batch() -> None:
    ends = []
    for size in (4, 3, 1):
        task = Line()
        loop, vector = _loop(task)
        loop.micro_batch = size
        worked = loop.train(round=0, steps=5, seconds=60, between=_never)
        ends.append((vector.clone(), worked.loss, worked.samples))
    for vector, loss, samples in ends[1:]:
        torch.testing.assert_close(vector, ends[0][0], rtol=1e-5, atol=1e-6)
        assert (loss, samples) == (pytest.approx(ends[0][1], rel=1e-5), 20)


def test_where_memory_is_short_fewer_samples_are_computed_at_once_from_then_on() -> None:
    task = Crowded()
    loop, vector = _loop(task)
    other, expected = _loop(Line())
    loop.train(round=0, steps=2, seconds=60, between=_never)
    other.train(round=0, steps=2, seconds=60, between=_never)
    assert task.sizes == [4, 2, 2, 2, 2]
    torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-6)


class Hungry(Line):
    def loss(self, batch: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("out of memory")


def test_a_device_that_has_no_room_for_one_sample_says_so() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        _loop(Hungry())[0].train(round=0, steps=1, seconds=60, between=_never)


def test_in_bf16_parameters_stay_float32_and_the_loss_comes_near() -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        loop, vector = _loop(Line(), precision=precision, lr=0.1)  # type: ignore[arg-type]
        losses.append([loop.train(round=r, steps=10, seconds=60, between=_never).loss for r in range(4)])
        assert vector.dtype == torch.float32
    assert losses[0] != losses[1]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.05)
    assert losses[1][-1] < losses[1][0] / 3


def test_a_model_that_cannot_drop_its_activations_is_refused_and_one_that_can_does() -> None:
    with pytest.raises(TaskError, match="checkpointing"):
        _loop(Line(), checkpointing=True)
    task = Line()
    task.model.checkpointing = False  # type: ignore[assignment]
    _loop(task, checkpointing=True)
    assert task.model.checkpointing is True


class Watched(Line):
    """Knows its own batches again, as those of `testing/adversary` do."""

    def loss(self, batch: Tensor) -> Tensor:
        assert batch is self.drawn[-1]
        return super().loss(batch)


def test_a_batch_for_which_there_is_memory_is_given_to_the_task_as_it_drew_it() -> None:
    assert _loop(Watched())[0].train(round=0, steps=2, seconds=60, between=_never).steps == 2


def test_one_step_that_diverges_spoils_no_later_one() -> None:
    loop, vector = _loop(Line(), lr=0.1)
    loop.train(round=0, steps=2, seconds=60, between=_never)
    before = vector.clone()
    loop.optimizer.moments.fill_(math.nan)  # as after a gradient beyond float32
    loop.train(round=1, steps=1, seconds=60, between=_never)
    assert loop.mend() and not loop.mend()  # so that the recorder links nothing across it
    assert not vector.isfinite().all() and loop.optimizer.updates == 0
    vector.copy_(before)  # its work was dropped
    loop.train(round=2, steps=3, seconds=60, between=_never)
    assert vector.isfinite().all() and loop.optimizer.updates == 3
