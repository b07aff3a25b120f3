"""Control messages survive the trip, and nothing else passes for one."""

from __future__ import annotations

import math
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.wire import MAX_DEPTH, MAX_VALUES, WireError, decode, encode


@dataclass(frozen=True)
class Part:
    index: int
    digest: bytes = b""


@dataclass(frozen=True)
class Letter:
    number: int
    ratio: float
    text: str
    flag: bool
    maybe: int | None = None
    key: tuple[str | int, ...] = ()
    pair: tuple[int, str] = (0, "")
    parts: tuple[Part, ...] = ()
    shares: dict[str, float] | None = None


@dataclass(frozen=True)
class Chain:
    next: Chain | None = None


letters = st.builds(
    Letter,
    number=st.integers(-(2**63), 2**64 - 1),
    ratio=st.floats(allow_nan=False),
    text=st.text(),
    flag=st.booleans(),
    maybe=st.none() | st.integers(0, 9),
    key=st.lists(st.text(max_size=3) | st.integers(0, 5)).map(tuple),
    pair=st.tuples(st.integers(0, 9), st.text(max_size=3)),
    parts=st.lists(st.builds(Part, index=st.integers(0, 9), digest=st.binary(max_size=5))).map(tuple),
    shares=st.none() | st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False)),
)


@given(letters)
def test_a_message_comes_back_equal(letter: Letter) -> None:
    assert decode(Letter, encode(letter)) == letter


@given(st.binary(max_size=200))
def test_bytes_of_strangers_raise_nothing_but_wire_errors(raw: bytes) -> None:
    with suppress(WireError):
        decode(Letter, raw)


@given(letters, st.data())
def test_a_mangled_message_raises_nothing_but_wire_errors(letter: Letter, data: st.DataObject) -> None:
    raw = bytearray(encode(letter))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        decode(Letter, bytes(raw))


def test_defaults_stay_home_and_unknown_fields_are_ignored() -> None:
    assert msgpack.unpackb(encode(Part(3))) == {"index": 3}
    assert decode(Part, msgpack.packb({"index": 3, "colour": "red"})) == Part(3)


def test_floats_keep_infinity_and_nan_and_take_ints_when_sending() -> None:
    assert math.isnan(decode(Letter, encode(Letter(1, math.nan, "", False))).ratio)
    assert decode(Letter, encode(Letter(1, math.inf, "", False))).ratio == math.inf
    assert decode(Letter, encode(Letter(1, 2, "", False))).ratio == 2.0


GOOD = {"number": 1, "ratio": 1.0, "text": "", "flag": True}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"number": True}, "Letter.number"),
        ({"number": 1.0}, "Letter.number"),
        ({"flag": 1}, "Letter.flag"),
        ({"ratio": 1}, "Letter.ratio"),
        ({"text": b"x"}, "Letter.text"),
        ({"key": [None]}, "Letter.key"),
        ({"pair": [1]}, "Letter.pair"),
        ({"parts": [{"index": "0"}]}, "Part.index"),
        ({"parts": [{}]}, "Part.index: missing"),
        ({"shares": {"a": 1}}, "Letter.shares"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(WireError, match=named):
        decode(Letter, msgpack.packb(GOOD | change))


def test_what_does_not_fit_is_not_sent() -> None:
    with pytest.raises(WireError, match=r"Part\.index"):
        encode(Part(True))
    with pytest.raises(WireError, match="Part: an int"):
        encode(Part(2**64))


def test_size_is_checked_first() -> None:
    with pytest.raises(WireError, match="at most 10"):
        decode(Part, b"\xc1" * 11, limit=10)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x91" * 1000 + b"\xc0", "nested deeper"),
        (b"\xdd\xff\xff\xff\xff", "beyond its end"),
        (b"\xdf\xff\xff\xff\xff\xc0", "beyond its end"),
        (b"\xc6\xff\xff\xff\xffx", "beyond its end"),
        (b"\xc7\x01\x05x", "not allowed"),
        (b"\xd4\x05x", "not allowed"),
        (b"\xc1", "not allowed"),
        (b"\x80\x80", "after its end"),
        (b"", "in the middle"),
        (b"\x81\xa1\xff\xc0", "not msgpack"),
        (b"\x81\x01\xc0", "not msgpack"),
    ],
)
def test_bad_shapes_are_refused(raw: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode(Part, raw)


def test_false_lengths_take_no_memory() -> None:
    # Each level claims as many items as bytes remain: built naively, every level would allocate a list of that size.
    raw = b"".join(b"\xdd" + struct.pack(">I", 900_000) for _ in range(MAX_DEPTH)) + b"\xc0" * 1_000_000
    tracemalloc.start()
    with pytest.raises(WireError):
        decode(Part, raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_the_number_of_values_is_bounded() -> None:
    with pytest.raises(WireError, match="more than"):
        decode(Part, msgpack.packb({"x": [0] * MAX_VALUES}))


def test_recursive_messages_stop_at_the_depth() -> None:
    chain = Chain()
    for _ in range(MAX_DEPTH - 1):
        chain = Chain(chain)
    assert decode(Chain, encode(chain)) == chain
    with pytest.raises(WireError, match="nested deeper"):
        decode(Chain, encode(Chain(chain)))
