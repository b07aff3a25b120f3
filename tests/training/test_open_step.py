"""The arithmetic of an open round: the formula's bits, in the roster's order, from integers, whatever is sent."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from swarmnode.testing.consensus import weighted_sum
from swarmnode.training.codecs import CODECS, CodecError, codec, codec_in
from swarmnode.training.codecs.topk import CHUNK
from swarmnode.training.open_step import (
    CLIP_AT,
    CLIP_UNIT,
    Factor,
    apply_contributions,
    clip_units,
    norm_of,
    opened,
)
from swarmnode.training.outer import OuterState, outer_step

SIZE = 2 * CHUNK + 100
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def normal(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def contributions(name: str, count: int = 4) -> list[bytes]:
    return [bytes(codec(name).encode(normal(seed))) for seed in range(1, count + 1)]


STATE = OuterState.start(normal(0))
FACTORS = [Factor(3, CLIP_UNIT, 16), Factor(5, 700_001, 16), Factor(1, 12_345, 16), Factor(7, CLIP_UNIT - 1, 16)]


def bits(state: OuterState) -> bytes:
    return state.parameters.tobytes() + state.momentum.tobytes()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_sparse_and_dense_contributions_give_the_bits_of_the_written_formula(name: str, momentum: float) -> None:
    raws = contributions(name)
    total = np.zeros(SIZE, np.float32)
    for raw, factor in zip(raws, FACTORS, strict=True):
        share = np.float32(float(Fraction(factor.weight * factor.clip, factor.total << 20)))
        total = total + share * codec(name).decode(raw, SIZE)
    expected = outer_step(STATE, total, lr=0.7, momentum=momentum, resting=True)
    assert bits(expected) != bits(STATE)
    got = apply_contributions(STATE, raws, FACTORS, lr=0.7, momentum=momentum, codec_name=name)
    assert bits(got) == bits(expected)


def test_topk_gives_the_bits_that_its_dense_vectors_give_with_fp32() -> None:
    raws = contributions("topk")
    dense = [codec("fp32").encode(codec("topk").decode(raw, SIZE)) for raw in raws]
    sparse = apply_contributions(STATE, raws, FACTORS, lr=1.0)
    assert bits(sparse) == bits(apply_contributions(STATE, dense, FACTORS, lr=1.0, codec_name="fp32"))


def test_unclipped_contributions_are_the_weighted_sum_of_known_peers() -> None:
    raws, weights = contributions("int8"), [3, 5, 1, 7]
    mean = weighted_sum([codec("int8").decode(raw, SIZE) for raw in raws], weights)
    factors = [Factor(weight, CLIP_UNIT, 16) for weight in weights]
    got = apply_contributions(STATE, raws, factors, lr=0.7, momentum=0.6, codec_name="int8")
    assert bits(got) == bits(outer_step(STATE, mean, lr=0.7, momentum=0.6))


def test_the_order_of_the_roster_is_part_of_the_result() -> None:
    """Sums round: permutations of one roster are near one another and not alike, so the order must be agreed on."""
    pairs = list(zip(contributions("int8"), FACTORS, strict=True))
    results = [
        apply_contributions(STATE, [raw for raw, _ in order], [f for _, f in order], lr=1.0, codec_name="int8")
        for order in itertools.permutations(pairs)
    ]
    assert len({bits(result) for result in results}) > 1
    for result in results:
        assert np.allclose(result.parameters, results[0].parameters, atol=1e-6)


def test_two_contributions_commute() -> None:
    """The one case in which the order makes no difference: 0 + a + b."""
    raws = contributions("topk", 2)
    one = apply_contributions(STATE, raws, FACTORS[:2], lr=1.0)
    assert bits(one) == bits(apply_contributions(STATE, raws[::-1], FACTORS[:2][::-1], lr=1.0))


def test_an_empty_roster_and_one_of_no_weight_change_nothing() -> None:
    moving = apply_contributions(STATE, contributions("topk"), FACTORS, lr=0.7, momentum=0.9)
    assert moving.momentum.any()
    for state, momentum in ((STATE, 0.0), (moving, 0.9)):
        assert bits(apply_contributions(state, [], [], lr=1.0, momentum=momentum)) == bits(state)
    nothing = [Factor(0, CLIP_UNIT, 1), Factor(1, 0, 1)]
    assert bits(apply_contributions(STATE, contributions("topk", 2), nothing, lr=1.0)) == bits(STATE)


def test_an_element_rests_with_its_momentum_until_its_turn() -> None:
    """Three rounds in which each element has one turn are one round in which all have it."""
    values, factor = [normal(1), normal(2)], [Factor(1, CLIP_UNIT, 1)]
    in_turns = at_once = STATE
    for cycle, gradient in enumerate(values):
        turns = [bytes(codec_in(3 * cycle + turn, "sign3").encode(gradient)) for turn in range(3)]
        for raw in turns:
            in_turns = apply_contributions(in_turns, [raw], factor, lr=0.7, momentum=0.8, codec_name="sign3")
        whole = sum(codec("sign3").decode(raw, SIZE) for raw in turns)
        at_once = outer_step(at_once, whole, lr=0.7, momentum=0.8)
    assert bits(in_turns) == bits(at_once)


def test_a_factor_is_rounded_once_from_integers_of_any_size() -> None:
    assert Factor(1, CLIP_UNIT, 3).rounded == np.float32(1 / 3)
    assert Factor(10**30, CLIP_UNIT // 2, 4 * 10**30).rounded == np.float32(0.125)
    assert Factor(1, 1, 10**40).rounded == np.float32(1 / (10**40 << 20))
    assert Factor(7, 333_333, 11).rounded == np.float32(float(Fraction(7 * 333_333, 11 << 20)))
    for weight, clip, total in ((-1, 0, 1), (2, 0, 1), (0, 0, 0), (1, -1, 1), (1, CLIP_UNIT + 1, 1)):
        with pytest.raises(ValueError, match="clip factors between"):
            Factor(weight, clip, total)


def test_what_no_encoder_makes_is_refused_with_its_place() -> None:
    good, bad = contributions("topk", 1)[0], bytearray(contributions("topk", 1)[0])
    bad[0:4] = b"\xff\xff\xff\xff"
    with pytest.raises(CodecError, match="contribution 1 of the roster"):
        apply_contributions(STATE, [good, bad], FACTORS[:2], lr=1.0)
    with pytest.raises(CodecError, match="contribution 0 of the roster"):
        apply_contributions(STATE, [good[:-1], good], FACTORS[:2], lr=1.0)
    with pytest.raises(CodecError):
        opened(bad, SIZE)
    with pytest.raises(ValueError, match="one factor for each"):
        apply_contributions(STATE, [good], FACTORS, lr=1.0)


def test_a_sum_beyond_float32_is_refused_and_leaves_the_state() -> None:
    before = bits(STATE)
    huge = codec("fp32").encode(np.full(SIZE, 3e38, np.float32))
    with pytest.raises(ValueError, match="NaN or infinity"):
        apply_contributions(STATE, [huge, huge], [Factor(1, CLIP_UNIT, 1)] * 2, lr=1.0, codec_name="fp32")
    assert bits(STATE) == before


@settings(max_examples=200, deadline=None)
@given(npst.arrays(np.float32, st.integers(0, 50), elements=finite))
def test_norms_are_those_of_exact_rational_arithmetic(x: np.ndarray) -> None:
    exact = sum((Fraction(float(value)) ** 2 for value in x), Fraction(0))
    assert norm_of(x) == math.sqrt(float(exact)) == norm_of(x[::-1])


def test_a_norm_does_not_depend_on_the_order_of_elements_nor_on_the_steps_they_are_taken_in() -> None:
    x = normal(1, 200_003) * np.exp2(np.random.default_rng(2).integers(-60, 60, 200_003)).astype(np.float32)
    assert norm_of(x) == norm_of(x[::-1]) == norm_of(np.sort(x)) == math.sqrt(math.fsum(x.astype(np.float64) ** 2))


@pytest.mark.parametrize("name", CODECS)
def test_the_norm_of_a_contribution_is_that_of_the_decoded_vector(name: str) -> None:
    raw = codec(name).encode(normal(3))
    norm = norm_of(opened(raw, SIZE, codec_name=name))
    assert norm == norm_of(codec(name).decode(raw, SIZE)) > 0


def test_clip_factors_bring_norms_to_a_quarter_above_the_lower_median() -> None:
    assert clip_units([1.0, 2.0, 2.5, 5.0]) == [CLIP_UNIT] * 3 + [CLIP_UNIT // 2]
    assert clip_units([5.0, 1.0, 2.0, 10.0]) == [CLIP_UNIT // 2, CLIP_UNIT, CLIP_UNIT, CLIP_UNIT // 4]
    assert clip_units([3.0]) == [CLIP_UNIT] and clip_units([]) == []
    assert clip_units([1.0, 1.0, 3.0]) == [CLIP_UNIT, CLIP_UNIT, 5 * CLIP_UNIT // 12]
    assert clip_units([1e-30, 1e-30, 1e300]) == [CLIP_UNIT, CLIP_UNIT, 0]


def test_the_median_may_be_that_of_some_only() -> None:
    """So that many newcomers with small norms do not shrink the work of validators, nor large ones let it grow."""
    assert clip_units([1.0, 2.5, 0.1, 0.1, 0.1], 1.0) == [CLIP_UNIT, CLIP_UNIT // 2] + 3 * [CLIP_UNIT]
    assert clip_units([4.0, 8.0], 0.0) == clip_units([4.0, 8.0], 8.0) == [CLIP_UNIT, CLIP_UNIT]


def test_zero_norms_clip_nobody() -> None:
    assert clip_units([0.0, 0.0, 0.0, 5.0]) == [CLIP_UNIT] * 4
    assert clip_units([0.0, 0.0]) == [CLIP_UNIT, CLIP_UNIT]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_norms_that_are_no_norms_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        clip_units([1.0, wrong])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=9), st.randoms())
def test_clip_units_are_exact_rounded_down_and_follow_their_norm_in_any_order(norms: list[float], random) -> None:  # type: ignore[no-untyped-def]
    units = clip_units(norms)
    positive = sorted(norm for norm in norms if norm)
    for norm, unit in zip(norms, units, strict=True):
        quotient = (
            min(Fraction(1), Fraction(CLIP_AT * positive[(len(positive) - 1) // 2]) / Fraction(norm)) if norm else 1
        )
        assert unit == math.floor(quotient * CLIP_UNIT)
    order = list(range(len(norms)))
    random.shuffle(order)
    assert clip_units([norms[i] for i in order]) == [units[i] for i in order]
