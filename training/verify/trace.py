"""The record of the work behind one contribution: the trainer's states between stretches of steps, by their digests.

    trace = Trace(origin, previous, base, residual, legs, texts)
    trace.root                                     # what the commit binds its author to
    Trace.decode(raw)                              # of a stranger; raises BadTrace

A *point* is the whole of what the next step depends on besides the data: parameters, the moments of the optimizer and
its count of updates. A *stretch* is some steps of one round's stream of data, from a point to a point. A *leg* is
stretches in a row between which nobody touched the parameters. Between two legs the node took over a new φ:

    x ← φ + (x - s)                                x: the parameters; s: where it offered last, or the φ before

and the contribution encodes φ - x. So whoever has the ends of the legs can compute the contribution again
(`replay.py`), and whoever has both ends of a stretch can repeat it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3

from swarmnode.training.mapped import Vector

VERSION = 2
ID = 32  # bytes of ids
MAX_TRACE = 1 << 20  # bytes
MAX_LEGS = 16
MAX_STRETCHES = 256
MAX_TEXTS = 1 << 14
MAX_NUMBER = 1 << 53


class BadTrace(ValueError):
    """What should be the record of somebody's work is none."""


class Origin(IntEnum):
    """Where the first leg begins."""

    UNLINKED = 0  # with what cannot be shown: after a restart, or a history that was given up
    FRESH = 1  # at the shared state `base`, with new moments and nothing left over
    AFTER = 2  # where the contribution with the trace `previous` ended


@dataclass(frozen=True)
class State:
    """What the next step depends on besides the data."""

    parameters: Vector  # (P,)
    moments: Vector  # (P + A,): first ones, then the second ones that A parameters have; (0,) without updates
    updates: int  # of the moments


@dataclass(frozen=True)
class Point:
    """A state by the ids of its vectors."""

    parameters: bytes
    moments: bytes
    updates: int

    @property
    def vectors(self) -> tuple[bytes, bytes]:
        return self.parameters, self.moments


@dataclass(frozen=True)
class Stretch:
    """Steps `step` to `step + steps` of the stream of a round, on the first `texts` texts of the trace."""

    start: Point
    end: Point
    round: int
    step: int
    steps: int
    texts: int


@dataclass(frozen=True)
class Leg:
    """Stretches in a row, or none; `base` is the roster whose state was taken over before, empty for the first leg.

    `since_offer`: whether what was kept then is the movement since the offer before, and not since the shared state.
    """

    base: bytes
    since_offer: bool
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Trace:
    """All legs since the contribution before; `start`, `end` and `residual` are ids of vectors (P,)."""

    origin: Origin
    previous: bytes  # root of the trace before, where the origin is AFTER
    base: bytes  # roster of the shared state at the beginning
    start: bytes  # the parameters then
    end: bytes  # the parameters that were offered
    residual: bytes  # what error feedback had kept from the rounds before
    legs: tuple[Leg, ...]
    texts: tuple[bytes, ...] = ()  # shards of the run's data, in the order in which they were trained on

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        return tuple(stretch for leg in self.legs for stretch in leg.stretches)

    @property
    def steps(self) -> int:
        return sum(stretch.steps for stretch in self.stretches)

    @property
    def root(self) -> bytes:
        """sha-256 of the canonical encoding."""
        return root_of(self.encode())

    def encode(self) -> bytes:
        """Canonical msgpack: vectors by their ids, and everything else."""
        legs = [[leg.base, leg.since_offer, [row_of(stretch) for stretch in leg.stretches]] for leg in self.legs]
        ids = [self.previous, self.base, self.start, self.end, self.residual]
        return msgpack.packb([VERSION, int(self.origin), ids, legs, list(self.texts)])

    @classmethod
    def decode(cls, raw: bytes) -> Trace:
        """The record in these bytes, whose stretches follow one another. Raises BadTrace."""
        if len(raw) > MAX_TRACE:
            raise BadTrace(f"{len(raw)} bytes; at most {MAX_TRACE} are allowed")
        try:
            row = msgpack.unpackb(raw, max_array_len=MAX_TEXTS, max_map_len=0, max_str_len=0, max_ext_len=0)
            trace = _parse(row)
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            raise BadTrace(f"it is malformed: {error}") from error
        if trace.encode() != raw:
            raise BadTrace("it is not in canonical form")
        wrong = gap(trace)
        if wrong:
            raise BadTrace(wrong)
        return trace


def root_of(raw: bytes) -> bytes:
    """What binds an author to the record with this encoding."""
    return hashlib.sha256(b"swarmnode/trace/1\0" + raw).digest()


def vector_id(vector: Vector) -> bytes:
    """The id of a float32 vector, of its bytes in little-endian order."""
    digest = blake3(b"swarmnode/vector/2\0")  # a quarter of the time of sha-256
    digest.update(np.ascontiguousarray(vector, dtype="<f4").view(np.uint8).data)
    return digest.digest()


def gap(trace: Trace) -> str:
    """Why its stretches do not follow one another, or are too many; "" where they do.

    Every stretch begins where the one before ended, in the stream of data as well, but that a leg has new parameters.
    """
    if len(trace.legs) > MAX_LEGS or len(trace.stretches) > MAX_STRETCHES:
        return "more legs or stretches than a record takes"
    if not trace.legs or trace.legs[0].base or not all(leg.base for leg in trace.legs[1:]):
        return "a leg that begins nowhere"
    texts, round, step = 0, -1, 0
    before: Point | None = None
    for leg in trace.legs:
        if before is not None and leg.stretches:
            before = replace(before, parameters=leg.stretches[0].start.parameters)
        for stretch in leg.stretches:
            if before is not None and stretch.start != before:
                return "a stretch that does not begin where the one before ended"
            if stretch.round == round and stretch.step != step:
                return "steps that were left out or repeated"
            if stretch.round < round or (round >= 0 and stretch.round > round and stretch.step):
                return "steps of a round that was over"
            if not texts <= stretch.texts <= len(trace.texts):
                return "texts that were not named"
            round, step, texts, before = stretch.round, stretch.step + stretch.steps, stretch.texts, stretch.end
    return ""


def row_of(stretch: Stretch) -> list[Any]:
    return [*map(point_row, (stretch.start, stretch.end)), stretch.round, stretch.step, stretch.steps, stretch.texts]


def point_row(point: Point) -> list[Any]:
    return [point.parameters, point.moments, point.updates]


def _parse(row: Any) -> Trace:
    version, origin, (previous, base, start, end, residual), legs, texts = row
    if version != VERSION:
        raise BadTrace("it has another form than this version knows")
    ids = _id(previous, empty=True), _id(base, empty=True), _id(start), _id(end), _id(residual)
    # What is no flag in these bytes becomes one here, and is found out as they are encoded again.
    told = tuple(Leg(_id(at, empty=True), bool(since), stretches_of(rows)) for at, since, rows in legs)
    return Trace(Origin(_number(origin)), *ids, told, tuple(map(_id, texts)))


def stretches_of(rows: Sequence[Any]) -> tuple[Stretch, ...]:
    """What `row_of` made. Raises BadTrace, TypeError or ValueError."""
    return tuple(
        Stretch(point_of(start), point_of(end), _number(round), _number(step), _number(steps, 1), _number(texts))
        for start, end, round, step, steps, texts in rows
    )


def point_of(row: Any) -> Point:
    """What `point_row` made. Raises BadTrace, TypeError or ValueError."""
    parameters, moments, updates = row
    return Point(_id(parameters), _id(moments), _number(updates))


def _id(value: Any, *, empty: bool = False) -> bytes:
    if not isinstance(value, bytes) or (len(value) != ID and not (empty and not value)):
        raise BadTrace(f"an id of {ID} bytes expected")
    return value


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        raise BadTrace(f"an integer of {least} or more expected")
    return value
