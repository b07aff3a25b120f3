"""Frames of a reconciliation session: what the two sides of `reconcile` write, and how few bytes it takes.

    hello   1 ‖ cut-off u48 ‖ nonce 8 ‖ fingerprint 16                   the initiator's first, 31 bytes
    equal   2 ‖ later                                                    the sets are one; the session is over
    differ  3 ‖ later ‖ nonce 8 ‖ fingerprint 16 ‖ answer                what the responder has instead
    asks    4 ‖ { bound lo ‖ 2·n + listing ‖ n × { bound hi ‖ (mark | count ‖ count × short id) } }
    answers 5 ‖ n ‖ n bits "settled" ‖ one answer for each bit that is 0

    answer: 0                                                            list the range to me
          | 1 ‖ n ‖ mark ‖ (n - 1) × { bound ‖ mark }                    my n parts of the range
          | 2 ‖ ranks                                                    all that I have of the range
          | 3 ‖ ranks ‖ positions                                        of a listing: you lack these ‖ I lack those
          | 4 ‖ ranks ‖ positions ‖ bound                                the same, but only below the bound

`later` is how many ms the responder's cut-off lies behind the initiator's. Numbers are LEB128. A mark is a fingerprint
cut to 8 bytes. Positions are ascending places in the listing, each less the one before. A bound is the length of what
it shares with the bound before (4 bits), the length of the rest (4 bits, 15 = a byte follows), the rest; 255 is END. A
rank is the length of what its hlc shares with that of the rank before, the rest of the hlc, the id: never fewer than 33
bytes, so that what a frame unfolds to is bounded by its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from swarmnode.crdt.ranges import END, RANK, START, common

MAX_FRAME = 1 << 16  # bytes; larger ones are refused
NONCE_SIZE = 8  # bytes
MARK_SIZE = 8  # bytes; that of the whole set, 16, tells in the end whether one of these erred
SHORT_SIZE = 6  # bytes
MAX_LISTING = 256  # short ids

HELLO, EQUAL, DIFFER, ASKS, ANSWERS = range(1, 6)
_LIST, _PARTS, _WHOLE, _DIFFERENCE, _DIFFERENCE_BELOW = range(5)
_HLC = 8  # bytes


class ReconcileError(Exception):
    """The session is over before its end; what the initiator learned so far stands."""


class Malformed(ReconcileError):
    """A frame that no correct peer sends. The message says why."""


@dataclass(frozen=True)
class Compare:
    """An ask: is what you have of the range marked the same?"""

    lo: bytes
    hi: bytes
    mark: bytes


@dataclass(frozen=True)
class Listing:
    """An ask: these I have of the range, in order; what of it do you have, and what do you lack?"""

    lo: bytes
    hi: bytes
    shorts: tuple[bytes, ...]


Ask: TypeAlias = Compare | Listing


@dataclass(frozen=True)
class Settled:
    """An answer: nothing differs here."""


@dataclass(frozen=True)
class ListIt:
    """An answer: it differs, and I have so little there that you should list yours."""


@dataclass(frozen=True)
class RangeParts:
    """An answer: it differs; `bounds` cut it into one part more than there are bounds, marked so at my side."""

    bounds: tuple[bytes, ...]
    marks: tuple[bytes, ...]


@dataclass(frozen=True)
class Whole:
    """An answer: it differs; this is all that I have there."""

    ranks: tuple[bytes, ...]


@dataclass(frozen=True)
class Difference:
    """An answer to a listing, as far as `below`, which is the end of the range unless much differs."""

    ranks: tuple[bytes, ...]  # that you lack
    positions: tuple[int, ...]  # in your list, of what I lack
    below: bytes | None = None


SETTLED = Settled()
Answer: TypeAlias = Settled | ListIt | RangeParts | Whole | Difference


class RangeWriter:
    """Bytes of one frame. Bounds and ranks are written relative to those before."""

    def __init__(self, start: bytes = b"") -> None:
        self._out = bytearray(start)
        self._bound = START
        self._rank = bytes(RANK)

    def __len__(self) -> int:
        return len(self._out)

    def frame(self) -> bytes:
        return bytes(self._out)

    def place(self) -> tuple[int, bytes, bytes]:
        """Where the frame stands, for `back`."""
        return len(self._out), self._bound, self._rank

    def back(self, place: tuple[int, bytes, bytes]) -> None:
        length, self._bound, self._rank = place
        del self._out[length:]

    def number(self, value: int) -> None:
        while value >= 0x80:
            self._out.append(value & 0x7F | 0x80)
            value >>= 7
        self._out.append(value)

    def raw(self, piece: bytes) -> None:
        self._out += piece

    def bound(self, bound: bytes) -> None:
        if bound == END:
            self._out.append(0xFF)
            return
        shared = min(common(self._bound, bound), 14)
        rest = bound[shared:]
        self._out.append(shared << 4 | min(len(rest), 15))
        if len(rest) >= 15:
            self._out.append(len(rest))
        self._out += rest
        self._bound = bound

    def ranks(self, ranks: Sequence[bytes]) -> None:
        self.number(len(ranks))
        for rank in ranks:
            shared = min(common(self._rank, rank), _HLC)
            self._out.append(shared)
            self._out += rank[shared:]
            self._rank = rank

    def asks(self, asks: Sequence[Ask]) -> None:
        """Ascending asks; those that adjoin and are of one kind in one group."""
        parted = [(one.hi, type(one)) != (other.lo, type(other)) for one, other in pairwise(asks)]
        first = [at for at in range(len(asks)) if not at or parted[at - 1]]
        for begin, behind in pairwise([*first, len(asks)]):
            self.bound(asks[begin].lo)
            self.number(2 * (behind - begin) + isinstance(asks[begin], Listing))
            for ask in asks[begin:behind]:
                self.bound(ask.hi)
                if isinstance(ask, Compare):
                    self.raw(ask.mark)
                else:
                    self.number(len(ask.shorts))
                    self.raw(b"".join(ask.shorts))

    def answer(self, answer: Answer) -> None:
        """Any but Settled, which is a bit elsewhere."""
        if isinstance(answer, ListIt):
            self.number(_LIST)
        elif isinstance(answer, RangeParts):
            self.number(_PARTS)
            self.number(len(answer.marks))
            self.raw(answer.marks[0])
            for bound, mark in zip(answer.bounds, answer.marks[1:], strict=True):
                self.bound(bound)
                self.raw(mark)
        elif isinstance(answer, Whole):
            self.number(_WHOLE)
            self.ranks(answer.ranks)
        elif isinstance(answer, Difference):
            self.number(_DIFFERENCE if answer.below is None else _DIFFERENCE_BELOW)
            self.ranks(answer.ranks)
            self.number(len(answer.positions))
            last = 0
            for position in answer.positions:
                self.number(position - last)
                last = position
            if answer.below is not None:
                self.bound(answer.below)


class RangeReader:
    """Reads one frame. Every method raises Malformed where the bytes do not go on as they must."""

    def __init__(self, frame: bytes) -> None:
        if len(frame) > MAX_FRAME:
            raise Malformed(f"a frame of {len(frame)} bytes; at most {MAX_FRAME}")
        self._frame = frame
        self._at = 0
        self._bound = START
        self._rank = bytes(RANK)

    def __bool__(self) -> bool:
        """Whether something is left."""
        return self._at < len(self._frame)

    def raw(self, size: int) -> bytes:
        piece = self._frame[self._at : self._at + size]
        if len(piece) < size:
            raise Malformed(f"the frame ends {size - len(piece)} bytes early")
        self._at += size
        return piece

    def number(self, limit: int) -> int:
        value = shift = 0
        while shift < 35:
            byte = self.raw(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        else:
            raise Malformed("a number of more than 5 bytes")
        if value > limit:
            raise Malformed(f"a number is {value}; at most {limit}")
        return value

    def bound(self) -> bytes:
        head = self.raw(1)[0]
        if head == 0xFF:
            return END
        shared, length = head >> 4, head & 0xF
        if shared > len(self._bound):
            raise Malformed("a bound shares more than the one before has")
        length = length if length < 15 else self.raw(1)[0]
        self._bound = self._bound[:shared] + self.raw(length)
        if len(self._bound) > RANK:
            raise Malformed(f"a bound of {len(self._bound)} bytes; at most {RANK}")
        return self._bound

    def bound_in(self, lo: bytes, hi: bytes) -> bytes:
        """A bound above `lo` and not above `hi`."""
        bound = self.bound()
        if not lo < bound <= hi:
            raise Malformed("bounds do not ascend, or lie outside the range that was asked about")
        return bound

    def ranks(self, lo: bytes, hi: bytes) -> tuple[bytes, ...]:
        found: list[bytes] = []
        for _ in range(self.number(MAX_FRAME)):
            shared = self.raw(1)[0]
            if shared > _HLC:
                raise Malformed("a rank shares more than an hlc")
            rank = self._rank = self._rank[:shared] + self.raw(RANK - shared)
            if not (found[-1] < rank if found else lo <= rank) or rank >= hi:
                raise Malformed("ranks do not ascend, or lie outside the range that was asked about")
            found.append(rank)
        return tuple(found)

    def asks(self) -> list[Ask]:
        """All asks of the rest of a frame: ascending, none overlapping."""
        asks: list[Ask] = []
        end = START
        while self:
            lo = self.bound()
            head = self.number(2 * MAX_FRAME)
            if lo < end or head < 2:
                raise Malformed("asks overlap, or there are none")
            for _ in range(head // 2):
                end = self.bound_in(lo, END)
                if head % 2:
                    packed = self.raw(self.number(MAX_LISTING) * SHORT_SIZE)
                    shorts = (packed[at : at + SHORT_SIZE] for at in range(0, len(packed), SHORT_SIZE))
                    asks.append(Listing(lo, end, tuple(shorts)))
                else:
                    asks.append(Compare(lo, end, self.raw(MARK_SIZE)))
                lo = end
        if not asks:
            raise Malformed("a frame without an ask")
        return asks

    def answers(self, asks: Sequence[Ask]) -> list[Answer]:
        """The rest of a frame: answers to the first of `asks`, at least to one."""
        count = self.number(len(asks))
        if count == 0:
            raise Malformed("a frame without an answer")
        bits = int.from_bytes(self.raw((count + 7) // 8), "little")
        answers = [SETTLED if bits >> place & 1 else self.answer(ask) for place, ask in enumerate(asks[:count])]
        if self or bits >> count:
            raise Malformed("more answers than the frame says")
        return answers

    def answer(self, ask: Ask) -> Answer:
        """The answer to an ask that is not settled."""
        kind = self.number(_DIFFERENCE_BELOW)
        if kind >= _DIFFERENCE and isinstance(ask, Listing):
            ranks = self.ranks(ask.lo, ask.hi)
            positions: list[int] = []
            for _ in range(self.number(len(ask.shorts))):
                step = self.number(len(ask.shorts))
                if positions and step == 0:
                    raise Malformed("positions do not ascend")
                positions.append((positions[-1] if positions else 0) + step)
            if positions and positions[-1] >= len(ask.shorts):
                raise Malformed("a position behind the end of the listing")
            below = self.bound_in(ask.lo, ask.hi) if kind == _DIFFERENCE_BELOW else None
            if below is not None and (below == ask.hi or (ranks and ranks[-1] >= below)):
                raise Malformed("an answer as far as a bound that does not fit it")
            return Difference(ranks, tuple(positions), below)
        if kind == _LIST and isinstance(ask, Compare):
            return ListIt()
        if kind == _WHOLE and isinstance(ask, Compare):
            return Whole(self.ranks(ask.lo, ask.hi))
        if kind == _PARTS and isinstance(ask, Compare):
            count = self.number(MAX_FRAME)
            if count < 2:
                raise Malformed("a range in fewer than 2 parts")
            bounds: list[bytes] = []
            marks = [self.raw(MARK_SIZE)]
            for _ in range(count - 1):
                bounds.append(self.bound_in(bounds[-1] if bounds else ask.lo, ask.hi))
                marks.append(self.raw(MARK_SIZE))
            if bounds[-1] == ask.hi:
                raise Malformed("an empty part")
            return RangeParts(tuple(bounds), tuple(marks))
        raise Malformed(f"an answer of kind {kind} to a {type(ask).__name__}")


def answers_frame(settled: Sequence[bool], body: RangeWriter) -> bytes:
    """A frame of answers: which of them are `settled`, and what a writer holds of the others."""
    out = RangeWriter(bytes([ANSWERS]))
    out.number(len(settled))
    out.raw(sum(1 << place for place, bit in enumerate(settled) if bit).to_bytes((len(settled) + 7) // 8, "little"))
    return out.frame() + body.frame()
