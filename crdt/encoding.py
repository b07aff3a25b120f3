"""Canonical msgpack: one value, one byte string, so that a hash of the bytes names the value.

Maps have text keys, sorted by code point; integers and lengths take their shortest form, floats are finite and 64 bits
wide; there are no extension types. `decode` accepts exactly what `encode` makes: it encodes again and compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgpack

Value: TypeAlias = bool | int | float | str | bytes | tuple["Value", ...] | Mapping[str, "Value"] | None

MAX_SIZE = 4096  # bytes; state of which every node holds a copy must be small
MAX_DEPTH = 6  # containers inside one another
FEW = 16  # bytes that may begin a container of a long length: so many times 8 bytes for each byte that is there
_LONG = re.compile(b"[\xdc-\xdf]")
_LEAVES = frozenset((int, str, bytes, bool, type(None)))
BEYOND = "states a length beyond its end"


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

    Size is checked first, and then what long containers state of their length: msgpack takes memory for that. A few
    that are not there take little, so that hardly anything is walked through which peers really send.
    """
    if len(raw) > max_size:
        raise EncodingError(f"{len(raw)} bytes to decode; at most {max_size}")
    try:
        if len(_LONG.findall(raw)) > FEW:
            walk(raw, values=max_size, depth=MAX_DEPTH)
        value: Value = msgpack.unpackb(raw, use_list=False, strict_map_key=True)
    except EncodingError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        raise EncodingError(f"malformed: {str(error) or type(error).__name__}") from error
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


# -- the walk before decoding

_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # strings: first byte -> width of the length behind it
_WIDTHS |= {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # arrays and maps
_FIRST_ARRAY, _FIRST_MAP = 0xDC, 0xDE


def _step(first: int) -> int:
    """Bytes of a value whose first byte says how many it has; 0 where that takes a closer look."""
    if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
        return 1
    if 0xA0 <= first < 0xC0:
        return 1 + (first & 0x1F)
    if 0xCC <= first <= 0xD3:
        return 1 + (1 << (first & 3))
    return {0xCA: 5, 0xCB: 9}.get(first, 0)


_STEPS = tuple(_step(first) for first in range(256))


def walk(raw: bytes, *, values: int, depth: int) -> None:
    """Look that `raw` is one msgpack value, with at most so many `values` in it, nested at most `depth` deep.

    All lengths must be honest, so that decoding takes memory for what is there. Raises EncodingError.
    """
    position, end = 0, len(raw)
    count = left = 1  # values in all, and still to come in the innermost open container
    outer: list[int] = []  # the same in those around it
    while True:
        while left:
            if position >= end:
                raise EncodingError("ends in the middle" if position == end else BEYOND)
            left -= 1
            first = raw[position]
            step = _STEPS[first]
            if step:
                position += step
                continue
            position += 1
            if first < 0xA0:  # a short map or array
                children = 2 * (first & 0x0F) if first < 0x90 else first & 0x0F
            else:
                width = _WIDTHS.get(first)
                if width is None:
                    raise EncodingError(f"type byte {first:#04x} is not allowed")
                length = int.from_bytes(raw[position : position + width], "big")
                position += width
                if first < _FIRST_ARRAY:
                    position += length
                    continue  # beyond the end is noticed at the next value, or behind the last
                children = 2 * length if first >= _FIRST_MAP else length
            if children > end - position:
                raise EncodingError(BEYOND)
            count += children
            if count > values:
                raise EncodingError(f"more than {values} values")
            if len(outer) >= depth:
                raise EncodingError(f"nested deeper than {depth}")
            outer.append(left)
            left = children
        if not outer:
            break
        left = outer.pop()
    if position != end:
        raise EncodingError(BEYOND if position > end else f"{end - position} bytes after its end")
