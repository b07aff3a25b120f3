"""Canonical msgpack: one value, one byte string, so that a hash of the bytes names the value.

Maps have text keys, sorted by code point; integers and lengths take their shortest form, floats are finite and 64 bits
wide; there are no extension types. `decode` accepts exactly what `encode` makes: it encodes again and compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgpack

Value: TypeAlias = bool | int | float | str | bytes | tuple["Value", ...] | Mapping[str, "Value"] | None

MAX_SIZE = 4096  # bytes; state of which every node holds a copy must be small
MAX_DEPTH = 6  # containers inside one another
_LEAVES = frozenset((int, str, bytes, bool, type(None)))


class EncodingError(ValueError):
    """A value that has no canonical form, or bytes that are not in it."""


def encode(value: Value, *, max_size: int = MAX_SIZE) -> bytes:
    """The canonical bytes of `value`; lists count as tuples. Raises EncodingError."""
    try:
        packed: bytes = msgpack.packb(_sorted(value, MAX_DEPTH), use_single_float=False)
    except (OverflowError, UnicodeEncodeError) as error:
        raise EncodingError(f"value cannot be encoded: {error}") from error
    if len(packed) > max_size:
        raise EncodingError(f"value takes {len(packed)} bytes; at most {max_size}")
    return packed


def decode(raw: bytes, *, max_size: int = MAX_SIZE) -> Value:
    """The value of canonical bytes; arrays become tuples. Raises EncodingError.

    Size is checked first, and bounds the memory that decoding may take: every container states its length, and msgpack
    refuses lengths beyond the bytes that are there.
    """
    if len(raw) > max_size:
        raise EncodingError(f"{len(raw)} bytes to decode; at most {max_size}")
    try:
        value: Value = msgpack.unpackb(raw, use_list=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise EncodingError(f"malformed: {error or type(error).__name__}") from error
    if not _is_sorted(value, MAX_DEPTH) or msgpack.packb(value, use_single_float=False) != raw:
        raise EncodingError("not in canonical form")
    return value


def _is_sorted(value: Any, depth: int) -> bool:
    """Whether a decoded value is as `_sorted` leaves it; that makes no copy, since peers have much decoded here."""
    kind = type(value)
    if kind is dict:
        items, before = value.values(), ""
        for key in value:
            if type(key) is not str or key < before:
                return False
            before = key
    elif kind is tuple:
        items = value
    else:
        return kind in _LEAVES or (kind is float and math.isfinite(value))  # which leaves out extension types
    if depth == 0:
        return False
    for item in items:  # no call for leaves, which most are, nor for a generator  # noqa: SIM110
        if type(item) not in _LEAVES and not _is_sorted(item, depth - 1):
            return False
    return True


def _sorted(value: Any, depth: int) -> Any:
    """`value` with the keys of all maps in order, refusing what has no canonical form."""
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise EncodingError(f"{value} has no canonical form")
        return value
    if depth == 0:
        raise EncodingError(f"containers nested deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        return [_sorted(item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise EncodingError("keys of a map must be text")
        return {key: _sorted(value[key], depth - 1) for key in sorted(value)}
    raise EncodingError(f"{type(value).__name__} has no canonical form")
