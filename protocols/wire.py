"""Control messages: frozen dataclasses, on the wire as msgpack maps from field name to value.

Field types: int, float, str, bytes, bool, `X | None`, unions of scalars, `tuple[T, ...]`, `tuple[A, B]`,
`dict[str, T]` and nested message dataclasses. A field that equals its default is left out, so a message may gain
fields with defaults later, and older peers ignore what they do not know.

A peer chose the bytes, so they are walked once before anything is built from them: size, nesting, number of values
and every stated length are checked against what is really there. Only then does msgpack decode them, and only values of
exactly the stated types become a message. Whatever is wrong is a `WireError` that names the message and the field.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

import msgpack

M = TypeVar("M")

MAX_BYTES = 1 << 20  # one control message; larger things go by bulk
MAX_DEPTH = 16  # maps and arrays inside one another; our deepest message needs 5
MAX_VALUES = 1 << 16  # values in one message: bounds the Python objects that one frame can become, to about 8 MiB

BEYOND = "states a length beyond its end"


class WireError(ValueError):
    """Bytes that are no such message, or a message that cannot be sent."""


@dataclass(frozen=True)
class _Codec:
    """How one annotated type goes to msgpack's values and back; both raise WireError."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


@dataclass(frozen=True)
class _Field:
    name: str
    codec: _Codec
    default: Any  # MISSING where the field must be there
    where: str  # "Message.field", for errors


def encode(message: Any) -> bytes:
    """The bytes of a message dataclass. Raises WireError where a value does not fit its field's type."""
    raw: bytes = msgpack.packb(_pack_message(message), use_bin_type=True)
    return raw


def plain(message: Any) -> dict[str, Any]:
    """What `encode` packs: the fields that do not equal their defaults, as plain values; for what is signed, see
    `crdt.envelope`. Raises WireError where a value does not fit its field's type."""
    return _pack_message(message)


def decode(kind: type[M], raw: bytes | bytearray | memoryview, *, limit: int = MAX_BYTES) -> M:
    """The `kind` that `raw` holds; `limit` is the most bytes that it may have. Raises WireError."""
    if isinstance(raw, memoryview):
        raw = raw.cast("B")
    if len(raw) > limit:
        raise WireError(f"{kind.__name__}: {len(raw)} bytes, at most {limit} allowed")
    _check_shape(raw, kind.__name__)
    try:
        value = msgpack.unpackb(raw, raw=False, strict_map_key=True, use_list=False)
    except (
        ValueError,
        msgpack.UnpackException,
    ) as error:  # ValueError includes bad UTF-8 and keys that are not strings
        raise WireError(f"{kind.__name__}: not msgpack: {error}") from None
    return typing.cast(M, _unpack_message(kind, value))


# -- the walk before decoding

_STRINGS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # first byte -> width of the length behind it
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


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


def _check_shape(raw: bytes | bytearray | memoryview, name: str) -> None:
    """Raise WireError unless `raw` is exactly one msgpack value of honest lengths within the caps."""
    position, end = 0, len(raw)
    values = left = 1  # values in all, and still to come in the innermost open container
    outer: list[int] = []  # the same in those around it
    while True:
        while left:
            if position >= end:
                raise WireError(f"{name}: ends in the middle" if position == end else f"{name}: {BEYOND}")
            left -= 1
            first = raw[position]
            step = _STEPS[first]
            if step:
                position += step
                continue
            position, children = _look(raw, position, first, name)
            if position > end or children > end - position:
                raise WireError(f"{name}: {BEYOND}")
            if children >= 0:
                values += children
                if values > MAX_VALUES:
                    raise WireError(f"{name}: more than {MAX_VALUES} values")
                if len(outer) >= MAX_DEPTH:
                    raise WireError(f"{name}: nested deeper than {MAX_DEPTH}")
                outer.append(left)
                left = children
        if not outer:
            break
        left = outer.pop()
    if position != end:
        raise WireError(f"{name}: {BEYOND}" if position > end else f"{name}: {end - position} bytes after its end")


def _look(raw: bytes | bytearray | memoryview, position: int, first: int, name: str) -> tuple[int, int]:
    """Where the value at `position` ends, or for a container where its values begin, and how many; -1 for others."""
    position += 1
    if first < 0x90:
        return position, 2 * (first & 0x0F)
    if first < 0xA0:
        return position, first & 0x0F
    width = _STRINGS.get(first) or _ARRAYS.get(first) or _MAPS.get(first)
    if width is None:
        raise WireError(f"{name}: type byte {first:#04x} is not allowed")
    length = int.from_bytes(raw[position : position + width], "big")
    position += width
    if first in _STRINGS:
        return position + length, -1
    return position, 2 * length if first in _MAPS else length


# -- messages


def _pack_message(message: Any) -> dict[str, Any]:
    packed = {}
    for field in _fields_of(type(message)).values():
        value = getattr(message, field.name)
        if value is field.default:
            continue
        value_packed = field.codec.pack(value)
        if field.default is MISSING or type(value) is not type(field.default) or value != field.default:
            packed[field.name] = value_packed
    return packed


def _unpack_message(kind: type[Any], value: Any) -> Any:
    if type(value) is not dict:
        raise WireError(f"{kind.__name__}: a {type(value).__name__} where a map was due")
    known, arguments = _fields_of(kind), {}
    for name, part in value.items():
        if name in known:
            arguments[name] = known[name].codec.unpack(part)
    if len(arguments) < len(known):
        for name, field in known.items():
            if field.default is MISSING and name not in arguments:
                raise WireError(f"{field.where}: missing")
    try:
        return kind(**arguments)
    except (ValueError, TypeError) as error:  # a message may refuse values in __post_init__
        raise WireError(f"{kind.__name__}: {error}") from None


_known: dict[type[Any], dict[str, _Field]] = {}  # what `_fields_of` found: a program has few message kinds


def _fields_of(kind: type[Any]) -> dict[str, _Field]:
    if kind in _known:
        return _known[kind]
    name, hints = kind.__name__, typing.get_type_hints(kind)
    if not is_dataclass(kind):
        raise TypeError(f"{name} is not a message dataclass")
    found = {}
    for field in fields(kind):
        where = f"{name}.{field.name}"
        default = field.default if field.default_factory is MISSING else field.default_factory()
        found[field.name] = _Field(field.name, _codec(hints[field.name], where), default, where)
    _known[kind] = found
    return _known[kind]


# -- field types


def _wrong(where: str, expected: str, value: Any) -> WireError:
    return WireError(f"{where}: a {type(value).__name__} where {expected} was due")


def _codec(annotation: Any, where: str) -> _Codec:
    if annotation in _SCALARS:
        return _SCALARS[annotation](where)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _nested(annotation, where)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union(tuple(_codec(option, where) for option in arguments), where)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_codec(arguments[0], where), where)
    if origin is tuple:
        return _fixed_tuple(tuple(_codec(option, where) for option in arguments), where)
    if origin is dict and arguments[0] is str:
        return _mapping(_codec(arguments[1], where), where)
    raise TypeError(f"{where}: fields of type {annotation!r} have no form on the wire")


def _exactly(kind: type[Any], expected: str) -> Callable[[str], _Codec]:
    def codec(where: str) -> _Codec:
        def check(value: Any) -> Any:
            if type(value) is not kind:  # not isinstance: a bool is no int here
                raise _wrong(where, expected, value)
            return value

        return _Codec(check, check)

    return codec


def _integer(where: str) -> _Codec:
    def check(value: Any) -> int:
        if type(value) is not int:
            raise _wrong(where, "an int", value)
        if not -(1 << 63) <= value < 1 << 64:
            raise WireError(f"{where}: {value.bit_length()} bits do not fit 64")
        return value

    return _Codec(check, check)


def _float(where: str) -> _Codec:
    def pack(value: Any) -> float:
        if type(value) is int:
            return float(value)
        return unpack(value)

    def unpack(value: Any) -> float:
        if type(value) is not float:
            raise _wrong(where, "a float", value)
        return value

    return _Codec(pack, unpack)


def _bytes(where: str) -> _Codec:
    def pack(value: Any) -> bytes:
        return bytes(value) if type(value) in (bytearray, memoryview) else unpack(value)

    def unpack(value: Any) -> bytes:
        if type(value) is not bytes:
            raise _wrong(where, "bytes", value)
        return value

    return _Codec(pack, unpack)


_SCALARS: dict[Any, Callable[[str], _Codec]] = {
    int: _integer,
    float: _float,
    bytes: _bytes,
    str: _exactly(str, "a str"),
    bool: _exactly(bool, "a bool"),
    type(None): _exactly(type(None), "nothing"),
}


def _nested(kind: type[Any], where: str) -> _Codec:
    def pack(value: Any) -> dict[str, Any]:
        if type(value) is not kind:
            raise _wrong(where, kind.__name__, value)
        return _pack_message(value)

    return _Codec(pack, lambda value: _unpack_message(kind, value))


def _union(options: tuple[_Codec, ...], where: str) -> _Codec:
    def first_fit(convert: Callable[[_Codec], Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def attempt(value: Any) -> Any:
            problem = None
            for option in options:
                try:
                    return convert(option)(value)
                except WireError as error:
                    problem = problem or error
            raise problem or WireError(f"{where}: nothing fits")

        return attempt

    return _Codec(first_fit(lambda option: option.pack), first_fit(lambda option: option.unpack))


def _sequence(item: _Codec, where: str) -> _Codec:
    def each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def whole(value: Any) -> tuple[Any, ...]:
            if type(value) is not tuple:
                raise _wrong(where, "a tuple", value)
            return tuple(convert(part) for part in value)

        return whole

    return _Codec(each(item.pack), each(item.unpack))


def _fixed_tuple(items: tuple[_Codec, ...], where: str) -> _Codec:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple or len(value) != len(items):
            raise _wrong(where, f"a tuple of {len(items)}", value)
        return value

    return _Codec(
        lambda value: tuple(item.pack(part) for item, part in zip(items, check(value), strict=True)),
        lambda value: tuple(item.unpack(part) for item, part in zip(items, check(value), strict=True)),
    )


def _mapping(item: _Codec, where: str) -> _Codec:
    def each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def whole(value: Any) -> dict[str, Any]:
            if type(value) is not dict:
                raise _wrong(where, "a map", value)
            for key in value:
                if type(key) is not str:
                    raise _wrong(where, "a str as key", key)
            return {key: convert(part) for key, part in value.items()}

        return whole

    return _Codec(each(item.pack), each(item.unpack))
