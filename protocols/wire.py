"""Control messages: frozen dataclasses, on the wire as msgpack maps from field name to value.

Field types: int, float, str, bytes, bool, `X | None`, unions of scalars, `tuple[T, ...]`, `tuple[A, B]`,
`dict[str, T]`, `Mapping[str, T]` and nested message dataclasses. A field that equals its default is left out, so a
message may gain fields with defaults later, and older peers ignore what they do not know.

A peer chose the bytes, so they are walked once before anything is built from them: size, nesting, number of values
and every stated length are checked against what is really there. Only then does msgpack decode them, and only values of
exactly the stated types become a message. Whatever is wrong is a `WireError` that names the message and the field.

Each annotation is read once, into a `_Form` for each way: it knows the types whose values travel as they are, so that a
message of scalars is checked in one loop, without a call for each of its fields.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Annotated, Any, TypeVar

import msgpack

from swarmnode.crdt.encoding import EncodingError, walk

M = TypeVar("M")

MAX_BYTES = 1 << 20  # one control message; larger things go by bulk
MAX_DEPTH = 16  # maps and arrays inside one another; our deepest message needs 5
MAX_VALUES = 1 << 16  # values in one message: bounds the Python objects that one frame can become, to about 8 MiB


class WireError(ValueError):
    """Bytes that are no such message, or a message that cannot be sent."""


def encode(message: Any) -> bytes:
    """The bytes of a message dataclass. Raises WireError where a value does not fit its field's type."""
    packed = plain(message)
    try:
        raw: bytes = msgpack.packb(packed, use_bin_type=True)
    except OverflowError:
        raise WireError(f"{type(message).__name__}: an int that does not fit 64 bits") from None
    return raw


def plain(message: Any) -> dict[str, Any]:
    """What `encode` packs: the fields that do not equal their defaults, as plain values; for what is signed, see
    `crdt.envelope`. Raises WireError where a value does not fit its field's type."""
    packed: dict[str, Any] = _message(message.__class__, True).convert(message)
    return packed


def decode(kind: type[M], raw: bytes, *, limit: int = MAX_BYTES) -> M:
    """The `kind` that `raw` holds; `limit` is the most bytes that it may have. Raises WireError."""
    if len(raw) > limit:
        raise WireError(f"{kind.__name__}: {len(raw)} bytes, at most {limit} allowed")
    message: M = _message(typing.cast(Any, kind), False).convert(unpacked(raw, kind.__name__))
    return message


def received(kind: type[M], value: Any) -> M:
    """The `kind` that `unpacked` has made of its bytes. Raises WireError."""
    message: M = _message(typing.cast(Any, kind), False).convert(value)
    return message


def unpacked(raw: bytes, name: str, *, most: int = MAX_VALUES) -> Any:
    """What msgpack makes of `raw`, arrays as tuples. Raises WireError, which begins with `name`.

    It must be exactly one value of honest lengths within the caps, with at most so many values in it.
    """
    try:
        walk(raw, values=most, depth=MAX_DEPTH)
        return msgpack.unpackb(raw, raw=False, strict_map_key=True, use_list=False)
    except EncodingError as error:
        raise WireError(f"{name}: {error}") from None
    except (ValueError, msgpack.UnpackException) as error:  # for bad UTF-8 and keys that are not strings as well
        raise WireError(f"{name}: not msgpack: {error}") from None


# -- what an annotation allows

Check = Callable[[str, Any], None]  # raises WireError, with what it is told the value is


def check_range(what: str, value: float, low: float, high: float) -> None:
    """Raise WireError unless `low <= value <= high`; NaN never is."""
    if not low <= value <= high:
        raise WireError(f"{what} is {value}, allowed are {low} to {high}")


def within(low: float, high: float) -> Check:
    """A check that a number lies there, or a length does."""

    def check(what: str, value: Any) -> None:
        if not low <= (size := value if isinstance(value, int | float) else len(value)) <= high:
            check_range(what, size, low, high)

    return check


@cache
def _checks_of(kind: type[Any]) -> tuple[tuple[str, str, Check], ...]:
    """The checks of a dataclass, each behind its field and what that is called in errors."""
    return tuple(
        (name, f"{kind.__name__}.{name}", check)
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        for option in (hint, *typing.get_args(hint))  # the type of a field that may be None is one of two options
        if typing.get_origin(option) is Annotated
        for check in option.__metadata__
    )


def check_fields(message: Any) -> None:
    """Raise what the checks in the annotations of a dataclass do; None passes them all."""
    for name, what, check in _checks_of(message.__class__):
        value = getattr(message, name)
        if value is not None:
            check(what, value)


class Message:
    """A dataclass none of whose fields is what no honest node sends: each is checked as its type is annotated."""

    __post_init__ = check_fields  # raises WireError


@dataclass(frozen=True)
class RunQuery:
    run_id: str  # of which is asked what the call's name says


@dataclass(frozen=True)
class Empty:
    """What says all by being sent."""


class _Form:
    """One annotated type on one way, to msgpack's values or from them.

    Values of the exact types in `same` stay as they are: whoever holds the form converts only the others.
    """

    def __init__(self, where: str, expected: str, *same: type[Any]) -> None:
        self._where = where  # "Message.field", for errors
        self._expected = expected
        self.same = frozenset(same)  # not what isinstance says: a bool is no int here

    def convert(self, value: Any) -> Any:
        """What becomes of a value whose type is not in `same`. Raises WireError."""
        raise WireError(f"{self._where}: a {type(value).__name__} where {self._expected} was due")


class _SentScalar(_Form):
    def convert(self, value: Any) -> Any:
        (kind,) = self.same
        return kind(value) if type(value) in _ALSO_SENT.get(kind, ()) else super().convert(value)


class _Union(_Form):
    """`A | B`: the first that fits. Scalars among them fit by their types."""

    def __init__(self, where: str, options: list[_Form]) -> None:
        super().__init__(where, "", *(each for option in options for each in option.same))
        self._options = options

    def convert(self, value: Any) -> Any:
        problem = None
        for option in self._options:
            try:
                return option.convert(value)
            except WireError as error:
                problem = problem or error
        raise problem or WireError(f"{self._where}: nothing fits")


class _Sequence(_Form):
    """`tuple[T, ...]`."""

    def __init__(self, where: str, item: _Form) -> None:
        super().__init__(where, "a tuple")
        self._item = item

    def convert(self, value: Any) -> Any:
        same, convert = self._item.same, self._item.convert
        if type(value) is not tuple:
            return super().convert(value)
        if same.issuperset(map(type, value)):
            return value
        return tuple(part if type(part) in same else convert(part) for part in value)


class _Row(_Form):
    """`tuple[A, B]`."""

    def __init__(self, where: str, items: list[_Form]) -> None:
        super().__init__(where, f"a tuple of {len(items)}")
        self._items = items

    def convert(self, value: Any) -> Any:
        if type(value) is not tuple or len(value) != len(self._items):
            return super().convert(value)
        pairs = zip(self._items, value, strict=True)
        return tuple(part if type(part) in item.same else item.convert(part) for item, part in pairs)


class _Mapping(_Form):
    """`dict[str, T]`."""

    def __init__(self, where: str, item: _Form) -> None:
        super().__init__(where, "a map")
        self._item, self._key = item, _Form(where, "a str as key", str)

    def convert(self, value: Any) -> Any:
        if type(value) is not dict:
            return super().convert(value)
        for key in value:
            if type(key) is not str:
                self._key.convert(key)
        same, convert = self._item.same, self._item.convert
        return {key: part if type(part) in same else convert(part) for key, part in value.items()}


class _Message(_Form):
    """A message dataclass; its fields are looked at when the first message comes, as it may hold others of its kind."""

    def __init__(self, kind: type[Any], sent: bool) -> None:
        if not is_dataclass(kind):
            raise TypeError(f"{kind.__name__} is not a message dataclass")
        super().__init__(kind.__name__, kind.__name__ if sent else "a map")
        self._kind = kind
        self._sent = sent

    @cached_property
    def _forms(self) -> dict[str, _Form]:
        hints, name = typing.get_type_hints(self._kind), self._kind.__name__
        return {each.name: _form(hints[each.name], f"{name}.{each.name}", self._sent) for each in fields(self._kind)}

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        """MISSING for a field that must be there."""
        return {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for each in fields(self._kind)
        }


class _SentMessage(_Message):
    def convert(self, value: Any) -> Any:
        if type(value) is not self._kind:
            return super().convert(value)
        packed, defaults = {}, self._defaults
        for name, form in self._forms.items():
            part, default = getattr(value, name), defaults[name]
            if part is default:
                continue
            sent = part if type(part) in form.same else form.convert(part)
            if default is MISSING or type(part) is not type(default) or part != default:
                packed[name] = sent
        return packed


class _ReceivedMessage(_Message):
    def convert(self, value: Any) -> Any:
        if type(value) is not dict:
            return super().convert(value)
        forms, arguments = self._forms, {}
        for name, part in value.items():
            form = forms.get(name)
            if form is not None:  # else a later version's
                arguments[name] = part if type(part) in form.same else form.convert(part)
        for name, default in self._defaults.items():
            if default is MISSING and name not in arguments:
                raise WireError(f"{self._kind.__name__}.{name}: missing")
        try:
            return self._kind(**arguments)
        except (ValueError, TypeError) as error:  # a message may refuse values in __post_init__
            raise WireError(f"{self._kind.__name__}: {error}") from None


@cache  # a program has few message kinds
def _message(kind: type[Any], sent: bool) -> _Message:
    return _SentMessage(kind, sent) if sent else _ReceivedMessage(kind, sent)


def _form(annotation: Any, where: str, sent: bool) -> _Form:
    """The form of a field on its way out (`sent`) or in. Raises TypeError for what has none."""
    if annotation in _SCALARS:
        return (_SentScalar if sent else _Form)(where, _SCALARS[annotation], annotation)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _message(annotation, sent)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _Union(where, [_form(option, where, sent) for option in arguments])
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _Sequence(where, _form(arguments[0], where, sent))
    if origin is tuple:
        return _Row(where, [_form(option, where, sent) for option in arguments])
    if origin in (dict, Mapping) and arguments[0] is str:
        return _Mapping(where, _form(arguments[1], where, sent))
    raise TypeError(f"{where}: fields of type {annotation!r} have no form on the wire")


_SCALARS: dict[Any, str] = {
    int: "an int",
    float: "a float",
    bytes: "bytes",
    str: "a str",
    bool: "a bool",
    type(None): "nothing",
}
_ALSO_SENT: dict[Any, tuple[type[Any], ...]] = {float: (int,), bytes: (bytearray, memoryview)}
