"""Codecs of two bytes and less: their error bounds, golden bytes, and what each refuses to decode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from swarmnode.training.codecs import CODECS, CodecError, codec, codec_in
from swarmnode.training.codecs.base import STEP
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.codecs.int4 import BLOCK
from swarmnode.training.codecs.topk import CHUNK, KEEP, TopK, kept_of

moderate = st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-99)
vectors = npst.arrays(np.float32, st.integers(1, 3 * BLOCK), elements=moderate)


def there_and_back(name: str, x: np.ndarray) -> np.ndarray:
    return codec(name).decode(codec(name).encode(x), x.size)


def normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def half(value: float, name: str) -> bytes:
    """`value` as two bytes of bf16."""
    return (int(np.array([value], np.float32).view(np.uint32)[0]) >> 16).to_bytes(2, "little")


def test_bf16_rounds_half_to_even_and_never_to_infinity() -> None:
    x = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 3.4028235e38, -3.4028235e38], np.float32)
    largest = 2.0**127 * (2 - 2.0**-7)
    assert there_and_back("bf16", x).tolist() == [1.0, 1.0, 1 + 2.0**-6, -1.0, largest, -largest]
    for bits in (0x7F80, 0xFF80, 0x7FC0):
        with pytest.raises(CodecError):
            codec("bf16").decode(bits.to_bytes(2, "little"), 1)


@settings(max_examples=100, deadline=None)
@given(vectors)
def test_int4_errs_by_half_a_step_of_its_block_at_most(x: np.ndarray) -> None:
    y = there_and_back("int4", x)
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK].astype(np.float64)
        assert np.abs(block - y[start : start + BLOCK]).max() <= np.abs(block).max() / 14 * 1.01


@settings(max_examples=100, deadline=None)
@given(vectors)
def test_e3m0_errs_by_a_third_of_an_element_or_a_128th_of_its_block(x: np.ndarray) -> None:
    y = there_and_back("e3m0", x)
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK].astype(np.float64)
        bound = np.maximum(np.abs(block) / 3, np.abs(block).max() / 128) * 1.01
        assert (np.abs(block - y[start : start + BLOCK]) <= bound).all()


def test_four_bit_golden_bytes() -> None:
    x = np.array([1.0, -1.0, 0.5, -0.25, 0.1, 0.0, -0.01], np.float32)
    assert bytes(codec("int4").encode(x)).hex() == "133e97e30100"
    assert bytes(codec("e3m0").encode(x)).hex() == "803f" + "f7" + "d6" + "04" + "09"


@pytest.mark.parametrize("name", ["int4", "e3m0"])
def test_four_bit_codes_and_scales_that_no_encoder_makes_are_refused(name: str) -> None:
    good = half(1.0, name)
    assert codec(name).decode(good + b"\x21", 2).any()
    for raw, elements in ((good + b"\x80", 2), (good + b"\x08", 2), (good + b"\x11", 1)):
        with pytest.raises(CodecError, match="code"):
            codec(name).decode(raw, elements)
    for scale in (b"\x80\xff", b"\x80\x7f", b"\x00\x80", b"\x01\x00", half(-1.0, name)):
        with pytest.raises(CodecError, match="scale"):
            codec(name).decode(scale + b"\x11", 2)


def test_four_bit_scales_whose_multiples_would_be_infinite_are_refused() -> None:
    largest, beyond = np.finfo(np.float32).max / np.float32(7), half(2.0**126, "int4")
    assert np.isfinite(codec("int4").decode(half(float(largest), "int4") + b"\x77", 2)).all()
    with pytest.raises(CodecError, match="scale"):
        codec("int4").decode(beyond + b"\x77", 2)
    assert codec("e3m0").decode(beyond + b"\x77", 2).tolist() == [2.0**126] * 2  # the top of e3m0 is its scale


@pytest.mark.parametrize("name", ["int4", "e3m0", "sign", "topk"])
def test_vectors_longer_than_a_step_decode_like_their_parts(name: str) -> None:
    """Steps, blocks and chunks divide one another, so a cut at a whole step changes no value."""
    x = normal(8 * STEP + 3 * CHUNK + 77)
    whole = there_and_back(name, x)
    for start in range(0, x.size, 2 * STEP):
        part = slice(start, start + 2 * STEP)
        assert (there_and_back(name, x[part]) == whole[part]).all()


def test_sign_keeps_the_sum_of_magnitudes() -> None:
    x = normal(5000)
    y = there_and_back("sign", x)
    assert (np.sign(y) == np.sign(x)).all()
    for start in range(0, x.size, 1024):
        block = slice(start, start + 1024)
        assert np.abs(y[block]).sum() == pytest.approx(np.abs(x[block]).sum(), rel=1e-5)


def test_sign_refuses_magnitudes_and_bits_that_no_encoder_makes() -> None:
    for magnitude in (-1.0, np.nan, np.inf, 1e-40, -0.0):
        with pytest.raises(CodecError, match="magnitude"):
            codec("sign").decode(np.array([magnitude], "<f4").tobytes() + b"\x00", 3)
    with pytest.raises(CodecError, match="beyond"):
        codec("sign").decode(np.array([1.0], "<f4").tobytes() + b"\x08", 3)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1023, 3071, 3072, 3073, 10_000, STEP + 5])
def test_three_turns_of_sign3_send_everything_as_sign_does_a_third_at_a_time(size: int) -> None:
    x = normal(size)
    turns = [codec("sign3").decode(codec_in(round, "sign3").encode(x), size) for round in (6, 7, 8)]
    assert (np.sign(sum(turns)) == np.sign(x)).all()
    assert (np.count_nonzero(turns, axis=0) == 1).all()
    if size >= 3 * 1024:
        assert (turns[1][1024:2048] == there_and_back("sign", x[1024:2048])).all()
        assert all(np.count_nonzero(turn) == pytest.approx(size / 3, abs=1024) for turn in turns)


def test_sign3_refuses_turns_and_bits_that_no_encoder_makes() -> None:
    raw = bytes(codec_in(1, "sign3").encode(normal(4000)))
    assert raw[0] == 1 and raw[-1] == 0  # the last piece is of the first turn
    for wrong, what in ((b"\x03" + raw[1:], "turns"), (raw[:-1] + b"\x01", "beyond"), (raw[1:], "expected")):
        with pytest.raises(CodecError, match=what):
            codec("sign3").decode(wrong, 4000)
    with pytest.raises(CodecError, match="NaN or infinity"):
        codec_in(0, "sign3").encode(np.array([1, 2, np.nan], np.float32))  # though another's turn


def test_only_sign3_takes_turns() -> None:
    assert [name for name in CODECS if codec_in(1, name) is not codec(name)] == ["sign3"]


def test_topk_keeps_the_greatest_of_every_chunk_in_their_places() -> None:
    x = normal(3 * CHUNK + 100)
    places, values = TopK().decode_sparse(codec("topk").encode(x), x.size)
    assert places.size == values.size == kept_of(x.size) == 3 * KEEP + 2
    for chunk in range(3):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        greatest = np.sort(np.argsort(-np.abs(x[part]), kind="stable")[:KEEP]) + chunk * CHUNK
        assert places[chunk * KEEP : (chunk + 1) * KEEP].tolist() == greatest.tolist()
    assert (np.sign(values) == np.sign(x[places])).all()
    assert np.abs(values - x[places]).max() < 0.9 and np.sqrt(np.mean((values - x[places]) ** 2)) < 0.25
    dense = there_and_back("topk", x)
    assert (dense[places] == values).all() and np.count_nonzero(dense) == np.count_nonzero(values)


def test_topk_of_equal_magnitudes_keeps_the_first() -> None:
    x = np.full(CHUNK, -2.0, np.float32)
    places, values = TopK().decode_sparse(codec("topk").encode(x), CHUNK)
    assert places.tolist() == list(range(KEEP)) and (values == -2).all()


def test_topk_with_feedback_sends_everything_in_time() -> None:
    """Each of 128 equal elements is sent in one of two rounds, and nothing is sent twice."""
    x = np.zeros(CHUNK, np.float32)
    x[:128] = 1.0
    feedback, sent = ErrorFeedback(codec("topk"), CHUNK, decay=1.0), np.zeros(CHUNK)
    for step in range(2):
        sent += codec("topk").decode(feedback.encode(x if step == 0 else np.zeros_like(x)), CHUNK)
        feedback.commit()
    assert (sent == x).all() and not feedback.export().any()


def test_a_decaying_residual_fades() -> None:
    feedback = ErrorFeedback(codec("topk"), CHUNK, decay=0.5)
    feedback.give_back(np.full(CHUNK, 1.0, np.float32))
    feedback.encode(np.zeros(CHUNK, np.float32))
    feedback.commit()
    assert set(feedback.export().tolist()) == {0.0, 0.5}


def test_topk_golden_bytes() -> None:
    """Of 200 elements the 4 greatest: levels, codes, lows (6 bits each), and the bitmap of highs."""
    x = np.zeros(200, np.float32)
    x[[3, 70, 131, 199]] = [1.0, -2.0, 2.0, -1.0]
    levels, codes = "803f0040", 0b10 << 6 | 0b01 << 4 | 0b11 << 2 | 0b00
    lows, highs = 3 | 6 << 6 | 3 << 12 | 7 << 18, 1 << 0 | 1 << 2 | 1 << 4 | 1 << 6
    raw = bytes(codec("topk").encode(x))
    assert raw.hex() == levels + f"{codes:02x}" + lows.to_bytes(3, "little").hex() + f"{highs:02x}"
    assert (codec("topk").decode(raw, 200) == x).all()


@pytest.mark.parametrize(
    ("index", "value"),
    [
        pytest.param(1, 0xC0, id="a level below zero"),
        pytest.param(1, 0x7F, id="a level that is infinite"),
        pytest.param(3, 0x00, id="levels in the wrong order"),
        pytest.param(7, 0b11111111, id="a last place beyond the vector"),
        pytest.param(8, 0b01010001, id="too few places"),
        pytest.param(8, 0b01010111, id="too many places"),
        pytest.param(8, 0b00001111, id="places that are not in order"),
        pytest.param(8, 0b10010101, id="a place beyond the chunk"),
    ],
)
def test_topk_refuses_what_no_encoder_makes(index: int, value: int) -> None:
    x = np.zeros(200, np.float32)
    x[[3, 70, 131, 199]] = [1.0, -2.0, 2.0, -1.0]
    raw = bytearray(codec("topk").encode(x))
    raw[index] = value
    with pytest.raises(CodecError):
        codec("topk").decode(bytes(raw), x.size)


@pytest.mark.parametrize("index", [4, 5])
def test_topk_refuses_bits_beyond_the_last_place_and_value(index: int) -> None:
    raw = bytearray(codec("topk").encode(normal(64)))  # one element: 2 bits of its code, 6 of its place
    raw[index] |= 0x40
    with pytest.raises(CodecError, match="beyond the last"):
        codec("topk").decode(bytes(raw), 64)


def test_topk_refuses_chunks_that_lend_each_other_places() -> None:
    """Two whole chunks with 63 and 65 places: as many as there should be, in order, and still not what is made."""
    raw = bytearray(codec("topk").encode(np.full(2 * CHUNK, 1.0, np.float32)))
    first, second = len(raw) - 32, len(raw) - 16  # bitmaps: the first 64 of each chunk are kept, so 64 ones each
    assert raw[first : first + 8] == raw[second : second + 8] == b"\xff" * 8
    raw[first + 7] &= 0x7F
    raw[second + 8] |= 0x01
    with pytest.raises(CodecError, match="more than 64"):
        codec("topk").decode(bytes(raw), 2 * CHUNK)
