"""Canonical msgpack: one value has one form, and nothing else decodes."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt.encoding import EncodingError, decode, encode

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8)
    | st.binary(max_size=8)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, tuple) else 0


@given(values.filter(lambda value: depth(value) <= 6))
def test_values_come_back_equal_and_of_the_same_types(value: object) -> None:
    assert repr(_by_key(decode(encode(value)))) == repr(_by_key(value))  # type: ignore[arg-type]


def _by_key(value: object) -> object:
    if isinstance(value, dict):
        return {key: _by_key(value[key]) for key in sorted(value)}
    return tuple(map(_by_key, value)) if isinstance(value, tuple) else value


def test_the_order_in_which_a_map_was_built_does_not_matter() -> None:
    assert encode({"b": 1, "a": {"d": 2, "c": 3}}) == encode({"a": {"c": 3, "d": 2}, "b": 1})
    assert encode({"b": 1, "a": 2.5}).hex() == "82a161cb4004000000000000a16201"


@given(st.binary(max_size=40))
def test_arbitrary_bytes_either_are_canonical_or_are_refused(raw: bytes) -> None:
    try:
        value = decode(raw)
    except EncodingError:
        return
    assert encode(value) == raw


@pytest.mark.parametrize(
    "raw",
    [
        msgpack.packb(1.5, use_single_float=True),
        b"\xcd\x00\x01",  # 1 in three bytes
        b"\x82\xa1b\x01\xa1a\x02",  # keys out of order
        b"\x82\xa1a\x01\xa1a\x02",  # one key twice
        b"\x81\x01\x02",  # a key that is no text
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.ExtType(5, b"")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb(float("nan")),
        msgpack.packb(float("inf")),
        b"\xa1\xff",  # not UTF-8
        b"\x01\x02",  # two values
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion elements that are not there
        b"\x91" * 7 + b"\x01",  # seven deep
        b"\x91" * 4000 + b"\x01",
        b"",
    ],
)
def test_other_forms_of_a_value_are_refused(raw: bytes) -> None:
    with pytest.raises(EncodingError):
        decode(raw)


@pytest.mark.parametrize(
    "value", [{1: 2}, {"a": {1, 2}}, 2**64, float("nan"), "\ud800", b"x" * 5000, ((((((((),),),),),),),)]
)
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    with pytest.raises(EncodingError):
        encode(value)  # type: ignore[arg-type]


def test_size_is_checked_before_decoding() -> None:
    with pytest.raises(EncodingError, match="at most 4096"):
        decode(b"\x01" * 4097)


def test_arrays_that_state_great_lengths_inside_one_another_take_little_memory() -> None:
    size = 16_384
    nested = (b"\xdc" + size.to_bytes(2, "big")) * 1020  # each as long as all that is there, before any element came
    tracemalloc.start()
    with pytest.raises(EncodingError):
        decode(nested.ljust(size, b"\xc0"), max_size=size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
