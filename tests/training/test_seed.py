"""Training by seeds: the arithmetic that all nodes share, and what a step tells."""

from __future__ import annotations

import hashlib
import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from swarmnode.training.inner import Probes, flatten_into, layout_of
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.seed import Tally, bits_of, blocks, byte_of

P = 70_001  # not a multiple of eight, nor of the elements worked on at a time
CLIP = 2.0


def signs_of(author: str, round: int, step: int, size: int = P) -> np.ndarray:
    signs = np.zeros(size, np.int64)
    for part, ones in blocks(bits_of(7, author, round, step, size), size):
        signs[part] = 2 * ones.astype(np.int64) - 1
    return signs


def test_directions_are_the_bits_of_shake128_of_who_draws_them_and_when() -> None:
    raw = hashlib.shake_128(b"direction 7 alice 3 2").digest(P // 8 + 1)
    bits = [raw[element // 8] >> element % 8 & 1 for element in range(P)]
    assert np.array_equal(signs_of("alice", 3, 2), 2 * np.array(bits) - 1)
    others = (signs_of("bob", 3, 2), signs_of("alice", 2, 2), signs_of("alice", 3, 1))
    assert all(abs(np.mean(signs_of("alice", 3, 2) * other)) < 0.02 for other in others)


def test_the_sum_is_of_each_byte_times_its_direction() -> None:
    tally = Tally(np.zeros(P, np.float32))
    told = {("alice", 0): [127, -127, 0, 5], ("bob", 4): [-1, 64]}
    exact = np.zeros(P, np.int64)
    for (author, round), values in told.items():
        tally.add(7, author, round, np.array(values, np.int8).tobytes())
        exact += sum(value * signs_of(author, round, step) for step, value in enumerate(values))
    assert np.array_equal(tally.sums, exact) and np.array_equal(tally.whole(), exact)


def test_any_order_leads_to_the_same_bits() -> None:
    start = np.random.default_rng(0).standard_normal(P).astype(np.float32)
    told = [("alice", 0, bytes([200, 3])), ("alice", 1, bytes([255])), ("bob", 0, bytes([7, 9, 129]))]
    ends = set()
    for order in permutations(told):
        tally = Tally(start)
        for author, round, values in order:
            tally.add(7, author, round, values)
        ends.add(tally.parameters(lr=1e-3, clip=CLIP).tobytes())
    assert len(ends) == 1


def test_parameters_are_where_the_run_began_less_the_rate_times_the_sum() -> None:
    start = np.random.default_rng(0).standard_normal(P).astype(np.float32)
    tally = Tally(start)
    tally.add(7, "alice", 0, bytes([127]))
    np.testing.assert_allclose(
        tally.parameters(lr=1e-2, clip=CLIP), start - 1e-2 * CLIP * signs_of("alice", 0, 0), rtol=1e-6, atol=1e-7
    )
    again = Tally(start, tally.whole().astype(np.int32))
    assert np.array_equal(again.parameters(lr=1e-2, clip=CLIP), tally.parameters(lr=1e-2, clip=CLIP))


@pytest.mark.parametrize(
    ("slope", "byte"),
    [(0.0, 0), (2.0, 127), (-2.0, -127), (1e9, 127), (-1e9, -127), (1.0, 64), (math.nan, 0), (math.inf, 0)],
)
def test_a_slope_is_clipped_and_rounded_to_a_byte(slope: float, byte: int) -> None:
    assert byte_of(slope, CLIP) == byte.to_bytes(signed=True)


# --- what a step tells ------------------------------------------------------------------------------------------------


class Quadratic:
    """Loss |theta - 1|² / 2 + the batch's mean: the slope along z is (theta - 1) z."""

    tokens_per_sample = 1

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(40, 3)
        self.drawn: list[Tensor] = []

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        self.drawn.append(torch.rand(samples, generator=generator))
        return self.drawn[-1]

    def loss(self, batch: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return sum(((p - 1) ** 2).sum() / 2 for p in self.model.parameters()) + batch.mean()  # type: ignore[return-value]


def spec_of(**inner: Any) -> RunSpec:
    given = {"lr": 1e-5, "clip": 40.0, "warmup": 0, "batch": 4, **inner}
    return parse_runspec(
        {"run": {"name": "r", "seed": 7}, "exchange": {"method": "seed"}, "inner": given}, source="test"
    )


def probes(**inner: Any) -> tuple[Probes, Quadratic, Tensor]:
    task = Quadratic()
    vector = torch.empty(layout_of(task.model).parameters)
    flatten_into(task.model, vector, keep=False)
    return Probes(spec_of(**inner), task, peer_id="alice", vector=vector, keep=False), task, vector  # type: ignore[arg-type]


def told_in(loop: Probes, round: int, steps: int) -> np.ndarray:
    progress = loop.train(round=round, steps=steps, seconds=math.inf, between=lambda: False)
    assert progress.steps == len(progress.told) == steps
    return np.frombuffer(progress.told, np.int8)


def test_a_step_tells_the_slope_and_leaves_the_parameters_bit_for_bit() -> None:
    loop, _, vector = probes()
    before = vector.clone()
    told = told_in(loop, 3, 5)
    assert torch.equal(vector, before)
    slopes = [float((before.double().numpy() - 1) @ signs_of("alice", 3, step, len(before))) for step in range(5)]
    np.testing.assert_allclose(told * 40.0 / 127, slopes, atol=0.5)
    assert np.array_equal(told_in(loop, 4, 1), told_in(probes()[0], 4, 1)) and len(set(told)) > 2


def test_steps_of_a_round_go_on_where_the_last_call_ended() -> None:
    whole, parts = probes()[0], probes()[0]
    assert told_in(whole, 2, 4).tolist() == [*told_in(parts, 2, 1), *told_in(parts, 2, 3)]


def test_both_sides_are_measured_on_the_batch_of_any_inner_step_and_in_parts_where_memory_is_short() -> None:
    loop, task, _ = probes()
    told_in(loop, 0, 2)
    assert len(task.drawn) == 2 and not torch.equal(*task.drawn)
    small, _, _ = probes()
    small.micro_batch = 1
    assert abs(int(told_in(small, 0, 1)[0]) - int(told_in(probes()[0], 0, 1)[0])) <= 1


def test_the_warm_up_scales_what_is_told() -> None:
    full, half = (told_in(probes(clip=6.0, warmup=warmup)[0], 0, 1)[0] for warmup in (0, 2))
    assert 8 < abs(int(full)) < 127 and abs(int(half) - int(full) / 2) <= 1


def test_what_is_told_leads_down() -> None:
    loop, task, vector = probes()
    tally = Tally(vector.numpy().copy())
    with torch.no_grad():
        began = float(task.loss(torch.zeros(1)))
    for round in range(40):
        tally.add(7, "alice", round, told_in(loop, round, 5).tobytes())
        vector.copy_(torch.from_numpy(tally.parameters(lr=4e-3, clip=40.0)))
    with torch.no_grad():
        assert float(task.loss(torch.zeros(1))) < 0.5 * began


@pytest.mark.parametrize("inner", [{"clip": 0}, {"lr": 1e-3}, {"lr": 1e-4, "clip": 10}])
def test_rates_that_move_nothing_or_too_much_are_named(inner: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"lr \* clip"):
        parse_runspec({"run": {"name": "r"}, "exchange": {"method": "seed"}, "inner": inner}, source="test")
