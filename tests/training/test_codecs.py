"""Codecs: exact sizes, bounded error, the same bytes everywhere, nothing non-finite either way; and error feedback."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from swarmnode.training.codecs import CODECS, Codec, CodecError, codec
from swarmnode.training.codecs.base import STEP
from swarmnode.training.codecs.feedback import ErrorFeedback, norm_in_float64
from swarmnode.training.codecs.int8 import BLOCK

SIZES = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, STEP, STEP + 1, 2 * STEP + BLOCK + 5)
every_codec = pytest.mark.parametrize("c", CODECS.values(), ids=CODECS)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = npst.arrays(np.float32, st.integers(0, 2 * BLOCK + 3), elements=finite)


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_the_registry_names_what_it_knows() -> None:
    names = ["fp32", "fp16", "bf16", "int8", "int4", "e3m0", "sign", "sign3", "topk"]
    assert [codec(name).name for name in names] == list(CODECS)
    with pytest.raises(ValueError, match="fp32, fp16, bf16, int8"):
        codec("int5")


@every_codec
@pytest.mark.parametrize("size", SIZES)
def test_encoded_size_is_exact_and_encoding_again_gives_the_same_bytes(c: Codec, size: int) -> None:
    raw = bytes(c.encode(normal(size)))
    assert len(raw) == c.encoded_size(size)
    values = c.decode(raw, size)
    assert values.dtype == np.float32 and values.shape == (size,)
    assert bytes(c.encode(values)) == raw


@every_codec
@settings(max_examples=50, deadline=None)
@given(vectors)
def test_any_finite_vector_decodes_to_a_finite_one_and_is_then_a_fixed_point(c: Codec, x: np.ndarray) -> None:
    raw = c.encode(x)
    y = c.decode(raw, x.size)
    assert np.isfinite(y).all()
    again = c.encode(y)
    assert (c.decode(again, x.size) == y).all()
    assert c.name == "topk" or bytes(again) == bytes(raw)  # which zeros topk sends along says nothing


def test_wire_sizes_of_a_large_vector() -> None:
    assert {name: codec(name).encoded_size(1 << 20) / (1 << 20) for name in CODECS} == {
        "fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.00390625, "int4": 0.53125, "e3m0": 0.53125,
        "sign": 0.12890625, "sign3": 0.043053627014160156, "topk": 0.0205078125,
    }  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(vectors)
def test_int8_errs_by_half_a_step_of_its_block_at_most(x: np.ndarray) -> None:
    y = codec("int8").decode(codec("int8").encode(x), x.size)
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK].astype(np.float64)
        half_step = np.abs(block).max() / 254
        bound = max(half_step * (1 + 2.0**-15), 127 * 2.0**-120)
        assert np.abs(block - y[start : start + BLOCK]).max() <= bound


def test_int8_products_are_exact_so_that_a_fused_multiply_add_changes_nothing() -> None:
    x = normal(8 * BLOCK) * np.float32(0.37)
    raw = codec("int8").encode(x)
    scales, integers = np.frombuffer(raw[:32], "<f4"), np.frombuffer(raw[32:], np.int8)
    exact = integers.reshape(8, BLOCK).astype(np.float64) * scales.astype(np.float64)[:, None]
    assert (exact.ravel() == codec("int8").decode(raw, x.size)).all()


def test_int8_golden_bytes() -> None:
    x = np.array([0.0, 1.0, -1.0, 0.5, -0.25, 0.0039370, 3.0e-5, -0.0], np.float32)
    raw = bytes(codec("int8").encode(x))
    assert raw.hex() == "8002013c007f813fe0000000"
    assert (
        codec("int8").decode(raw, 8).tobytes().hex()
        == "000000007b00803f7b0080bfecfcfd3e800281be000000000000000000000000"
    )
    assert bytes(codec("fp16").encode(x)).hex() == "0000003c00bc003800b4081cf7010080"


def test_int8_rounds_half_to_even_and_keeps_zero_blocks() -> None:
    raw = codec("int8").encode(np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5], np.float32))
    assert np.frombuffer(raw[4:], np.int8).tolist() == [127, 0, 2, 2, 0, -2]
    for zero in (0.0, -0.0):
        assert bytes(codec("int8").encode(np.full(5, zero, np.float32))) == bytes(9)
    tiny = np.full(3, 1e-40, np.float32)  # subnormal: some CPUs are told to take it for zero
    assert codec("int8").decode(codec("int8").encode(tiny), 3).tolist() == [0, 0, 0]


def test_int8_scales_each_block_by_itself() -> None:
    x = np.concatenate([np.full(BLOCK, 1e6, np.float32), np.full(5, 1e-6, np.float32)])
    assert np.allclose(codec("int8").decode(codec("int8").encode(x), x.size), x, rtol=1e-4)


def test_extremes_of_the_float32_range_survive() -> None:
    big = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    assert np.allclose(codec("int8").decode(codec("int8").encode(big), 2), big, rtol=1e-4)
    assert codec("fp16").decode(codec("fp16").encode(big), 2).tolist() == [65504, -65504]


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, STEP + 3, STEP + BLOCK + 4])
def test_values_that_are_not_finite_are_refused_wherever_they_stand(c: Codec, bad: float, position: int) -> None:
    x = normal(STEP + BLOCK + 5)
    x[position] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        c.encode(x)


@every_codec
def test_bytes_of_another_size_are_refused(c: Codec) -> None:
    raw = bytes(c.encode(normal(BLOCK + 1)))
    for wrong, elements in ((raw[:-1], BLOCK + 1), (raw + b"\0", BLOCK + 1), (raw, BLOCK), (raw, BLOCK + 2), (b"", 1)):
        if len(wrong) == c.encoded_size(elements):
            continue  # codes of less than a byte: one element more may need no byte more
        with pytest.raises(CodecError, match="expected"):
            c.decode(wrong, elements)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 3.0e38, 1e-40, 1e-37, 0.1])
def test_int8_scales_that_no_encoder_makes_are_refused(scale: float) -> None:
    with pytest.raises(CodecError, match="scale"):
        codec("int8").decode(np.array([scale], "<f4").tobytes() + b"\x01\x02", 2)


def test_int8_refuses_the_integer_below_its_range() -> None:
    with pytest.raises(CodecError, match="-128"):
        codec("int8").decode(np.array([1.0], "<f4").tobytes() + b"\x01\x80", 2)


@pytest.mark.parametrize("c", [codec("fp32"), codec("fp16"), codec("int8")], ids=["fp32", "fp16", "int8"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800000, 0xFF800000])
def test_encoded_nan_and_infinity_never_come_out(c: Codec, bits: int) -> None:
    if c.name == "fp16":
        raw = (bits >> 16 & 0x8000 | 0x7C00 | bits >> 13 & 0x3FF).to_bytes(2, "little")
    else:
        raw = bits.to_bytes(4, "little") + (b"\x01" if c.name == "int8" else b"")
    with pytest.raises(CodecError):
        c.decode(raw, 1)


@every_codec
def test_a_given_buffer_is_filled_and_must_be_large_enough(c: Codec) -> None:
    x = normal(100)
    buffer = bytearray(c.encoded_size(100) + 3)
    written = c.encode(x, memoryview(buffer))
    assert bytes(written) == bytes(c.encode(x)) == bytes(buffer[:-3]) and buffer[-3:] == bytes(3)
    with pytest.raises(ValueError, match="writable bytes"):
        c.encode(x, memoryview(buffer)[: c.encoded_size(100) - 1])
    with pytest.raises(ValueError, match="writable bytes"):
        c.encode(x, memoryview(bytes(buffer)))


@every_codec
@pytest.mark.parametrize("size", [0, 1, 63, BLOCK, STEP + BLOCK, STEP + 4096 + 77])
@pytest.mark.parametrize("stride", [1, 2])
def test_decoding_into_given_memory_writes_the_same_and_nothing_beside_it(c: Codec, size: int, stride: int) -> None:
    raw = c.encode(normal(size))
    memory = np.full(stride * size + 5, 7, np.float32)
    out = memory[: stride * size : stride]
    assert c.decode(raw, size, out) is out
    assert out.tobytes() == c.decode(raw, size).tobytes()
    out.fill(7)
    assert (memory == 7).all()


@every_codec
def test_strided_vectors_encode_like_their_copies_and_other_types_do_not(c: Codec) -> None:
    x = normal(2 * BLOCK)
    assert bytes(c.encode(x[::2])) == bytes(c.encode(x[::2].copy()))
    for wrong in (x.astype(np.float64), x.reshape(2, -1)):
        with pytest.raises(ValueError, match="float32 vector"):
            c.encode(wrong)


def test_with_feedback_the_sum_of_what_was_sent_follows_the_sum_of_what_was_meant() -> None:
    """Over rounds the error stays that of one round; without feedback a value below half a step never gets through."""
    x = np.full(BLOCK, 1e-3, np.float32)
    x[0] = 1.0  # a step of 1/127: the others round to zero each time
    feedback, sent, plain = ErrorFeedback(codec("int8"), BLOCK), np.zeros(BLOCK), np.zeros(BLOCK)
    for _ in range(100):
        sent += codec("int8").decode(feedback.encode(x), BLOCK)
        plain += codec("int8").decode(codec("int8").encode(x), BLOCK)
        feedback.commit()
    assert np.abs(sent - 100 * x.astype(np.float64)).max() < 1 / 127
    assert plain[1] == 0


@every_codec
def test_the_residual_is_what_the_encoding_left_out(c: Codec) -> None:
    feedback, x = ErrorFeedback(c, STEP + 100, decay=0.95), normal(STEP + 100)
    left = np.zeros_like(x)
    for _ in range(3):
        wanted = x + np.float32(0.95) * left
        left = wanted - c.decode(feedback.encode(x), x.size)
        feedback.commit()
        assert (feedback.export() == left).all()


def test_an_abandoned_round_leaves_the_residual_as_it_was() -> None:
    feedback = ErrorFeedback(codec("int8"), 64)
    feedback.encode(normal(64))
    feedback.commit()
    before = feedback.export()
    assert before.any()
    first = bytes(feedback.encode(normal(64, 1)))
    assert feedback.pending and (feedback.export() == before).all()
    feedback.rollback()
    assert not feedback.pending and (feedback.export() == before).all()
    assert bytes(feedback.encode(normal(64, 1))) == first


def test_ranges_commit_together_and_others_keep_their_residual() -> None:
    x, whole, parts = (
        normal(3 * BLOCK),
        ErrorFeedback(codec("int8"), 3 * BLOCK),
        ErrorFeedback(codec("int8"), 3 * BLOCK),
    )
    whole.encode(x)
    whole.commit()
    for start in (0, BLOCK, 2 * BLOCK):
        parts.encode_range(start, start + BLOCK, x[start : start + BLOCK])
    parts.commit()
    assert (whole.export() == parts.export()).all()
    before = parts.export()
    parts.encode_range(BLOCK, 2 * BLOCK, normal(BLOCK, 1))
    parts.encode_range(BLOCK, 2 * BLOCK, normal(BLOCK, 2))  # tried again in the same round: the last one counts
    parts.commit()
    after = parts.export()
    sent = codec("int8").decode(codec("int8").encode(before[BLOCK : 2 * BLOCK] + normal(BLOCK, 2)), BLOCK)
    assert (after[BLOCK : 2 * BLOCK] == before[BLOCK : 2 * BLOCK] + normal(BLOCK, 2) - sent).all()
    assert (after[:BLOCK] == before[:BLOCK]).all() and (after[2 * BLOCK :] == before[2 * BLOCK :]).all()


def test_ranges_that_overlap_or_do_not_fit_are_refused() -> None:
    feedback = ErrorFeedback(codec("int8"), 64)
    feedback.encode_range(0, 32, normal(32))
    with pytest.raises(ValueError, match="overlaps"):
        feedback.encode_range(16, 48, normal(32))
    for start, stop, size in ((32, 65, 33), (-1, 3, 4), (32, 64, 31)):
        with pytest.raises(ValueError, match="does not fit"):
            feedback.encode_range(start, stop, normal(size))


def test_work_that_did_not_count_returns_up_to_one_clipped_norm() -> None:
    feedback = ErrorFeedback(codec("int8"), 4)
    assert feedback.give_back(np.array([0.6, 0, 0, 0], np.float32), 1.0)
    assert feedback.export()[0] == np.float32(0.6)
    for _ in range(5):
        feedback.give_back(np.array([3, 4, 0, 0], np.float32), 1.0)
        assert np.linalg.norm(feedback.export()) == pytest.approx(1.0)
    assert not feedback.give_back(np.full(4, np.nan, np.float32), 1.0)
    assert np.linalg.norm(feedback.export()) == pytest.approx(1.0)
    feedback.encode(normal(4))
    with pytest.raises(RuntimeError, match="commit or roll back"):
        feedback.give_back(normal(4), 1.0)


def test_old_residual_fades_through_rounds_that_refuse_it() -> None:
    feedback = ErrorFeedback(codec("topk"), 4096, decay=0.95)
    rng = np.random.default_rng(5)
    feedback.restore(rng.standard_normal(4096).astype(np.float32))  # as after an outage
    small = np.float32(0.01) * rng.standard_normal(4096).astype(np.float32)
    for _ in range(100):
        feedback.encode(small)
        feedback.rollback()
        feedback.fade()
        feedback.give_back(small)
    assert norm_in_float64(feedback.export()) <= 1.01 * norm_in_float64(small)


def test_values_that_overflow_with_their_residual_are_refused_and_change_nothing() -> None:
    feedback = ErrorFeedback(codec("fp16"), 1)
    feedback.encode(np.array([3.4e38], np.float32))  # saturates: nearly all of it is left over
    feedback.commit()
    with pytest.raises(CodecError):
        feedback.encode(np.array([3.4e38], np.float32))
    assert not feedback.pending


def test_a_residual_goes_through_a_checkpoint_and_moves_with_ownership() -> None:
    feedback = ErrorFeedback(codec("int8"), 8)
    feedback.encode(normal(8))
    feedback.commit()
    other = ErrorFeedback(codec("int8"), 8)
    other.restore(feedback.export())
    assert bytes(other.encode(normal(8, 1))) == bytes(feedback.encode(normal(8, 1)))
    other.rollback()
    before = other.export()
    assert before.all()
    other.keep_only((0, 2), (3, 5), (7, 7))
    kept = other.export()
    assert (kept != 0).tolist() == [True, True, False, True, True, False, False, False]
    assert (kept[[0, 1, 3, 4]] == before[[0, 1, 3, 4]]).all()
    other.keep_only((1, 4))
    assert (other.export() != 0).tolist() == [False, True, False, True, False, False, False, False]
    other.keep_only((5, 8))
    assert other.is_zero() and not other.export().any()
    for wrong in (normal(7), np.full(8, np.nan, np.float32), np.zeros(8)):
        with pytest.raises(ValueError, match="residual must be"):
            other.restore(wrong)
