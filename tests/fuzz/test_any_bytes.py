"""Decoders survive any bytes: what comes out is sound, or they refuse in their own words; memory follows the size."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from anybytes import TARGETS, Target, all_seeds, choose
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.training.codecs import CODECS, Codec, CodecError

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
EDGES = (0x00, 0x01, 0x04, 0x3F, 0x40, 0x77, 0x7E, 0x7F, 0x80, 0x81, 0xC0, 0xFE, 0xFF)


@every_target
def test_every_seed_is_taken(target: Target) -> None:
    """A refused seed would leave most of the decoder untried."""
    assert all(target.takes(seed) for seed in target.seeds)
    for raw in all_seeds():
        chosen, rest = choose(raw)
        assert rest in chosen.seeds


@every_target
@settings(deadline=None)
@given(raw=st.binary(max_size=400))
def test_any_bytes_are_taken_or_refused(target: Target, raw: bytes) -> None:
    target.takes(raw)


@every_codec
@settings(deadline=None)
@given(data=st.data(), elements=st.integers(0, 30))
def test_any_bytes_of_the_right_size_are_decoded_or_refused(codec: Codec, data: st.DataObject, elements: int) -> None:
    """Short vectors and bytes at the edges: scales and levels that are zero, subnormal, negative, huge or no number."""
    size = codec.encoded_size(elements)
    byte = st.sampled_from(EDGES) | st.integers(0, 255)
    raw = bytes(data.draw(st.lists(byte, min_size=size, max_size=size)))
    TARGETS[f"codec {codec.name}"].takes(elements.to_bytes(2, "little") + raw)


@every_target
@settings(deadline=None)
@given(data=st.data())
def test_valid_bytes_with_some_changed_cut_or_doubled_are_taken_or_refused(target: Target, data: st.DataObject) -> None:
    """Nearly valid bytes go deepest."""
    raw = bytearray(data.draw(st.sampled_from(target.seeds)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        match data.draw(st.sampled_from(["set", "flip", "cut", "insert", "double"])):
            case "set":
                raw[place : place + 1] = bytes([data.draw(st.sampled_from(EDGES))])
            case "flip":
                raw[place : place + 1] = bytes(
                    byte ^ 1 << data.draw(st.integers(0, 7)) for byte in raw[place : place + 1]
                )
            case "cut":
                del raw[place : place + data.draw(st.integers(1, 8))]
            case "insert":
                raw[place:place] = data.draw(st.binary(min_size=1, max_size=8))
            case "double":
                raw[place:place] = raw[place : place + data.draw(st.integers(1, 40))]
    target.takes(bytes(raw))


@every_codec
@pytest.mark.parametrize("content", ["valid", "random", "zeros", "ones"])
def test_memory_of_decoding_is_bounded_by_what_goes_in_and_comes_out(codec: Codec, content: str) -> None:
    elements = (1 << 20) + 77
    size = codec.encoded_size(elements)
    rng = np.random.default_rng(0)
    raw = {
        "valid": lambda: bytes(codec.encode(rng.standard_normal(elements).astype(np.float32))),
        "random": lambda: rng.bytes(size),
        "zeros": lambda: bytes(size),
        "ones": lambda: b"\xff" * size,
    }[content]()
    tracemalloc.start()
    try:
        with suppress(CodecError):
            codec.decode(raw, elements)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 4 * elements + size + (3 << 20)
