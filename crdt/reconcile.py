"""Range-based set reconciliation: two replicas find what each lacks, in bytes that grow with the difference.

After Meyer 2022 (arXiv 2212.13567); negentropy is its best-known form. The initiator asks about ranges of ranks
(`ranges`), the responder answers; ranges whose fingerprints differ are cut into smaller ones until what differs is
listed. The responder keeps nothing between frames but its snapshot and its budget. In the end the initiator knows
`need`, what only the responder has, and `have`, what only it has itself; fetching and offering these is not done here.

    I -> R   hello: the cut-off, a nonce, the fingerprint of everything
    R -> I   equal; or a nonce, the fingerprint of everything, and its parts
    I -> R   asks: parts of what differs, or lists of short ids where little is left
    R -> I   answers: parts of what differs; ranks that the initiator lacks, and places in its lists of what R lacks

Cut-off: only what expires after a time T is compared, so that a replica that has swept and one that has not agree. T
is the later of what both sides hold, and the first answer says it; a peer more than a minute off is refused.

Salt: everything after the hello is salted by a hash of T and both nonces, so the nonce of one honest side suffices
that nobody knew the salt while the elements were made, and marks of 8 bytes and short ids of 6 err in some 10^-10 of
sessions with 100 differences. The fingerprint of everything tells: then `agreed` is False. A peer that lies gets what
it asks for, hides what it likes, and cannot make this side go on: each side counts frames, bytes and work and raises
`Exhausted` beyond its budget; what the initiator learned until then is of use.

Ranges are cut into at most 16 parts and listed at 32 ranks: 100 000 ranks take 6 half rounds, 16 times as many take 2
more. `bench/reconcile.py` measures bytes and time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from blake3 import blake3

from swarmnode.crdt import lthash
from swarmnode.crdt.hlc import MAX_AHEAD, MAX_TIME
from swarmnode.crdt.lthash import FINGERPRINT_SIZE
from swarmnode.crdt.ranges import END, START, RankSet, separator
from swarmnode.crdt.reconcile_frames import (
    ANSWERS,
    ASKS,
    DIFFER,
    EQUAL,
    HELLO,
    MARK_SIZE,
    MAX_FRAME,
    NONCE_SIZE,
    SETTLED,
    SHORT_SIZE,
    Answer,
    Ask,
    Compare,
    Difference,
    Listing,
    ListIt,
    Malformed,
    RangeParts,
    RangeReader,
    RangeWriter,
    ReconcileError,
    Settled,
    Whole,
    answers_frame,
)

MIN_PARTS, MAX_PARTS = 2, 16
LIST_AT = 32  # own ranks of a range at or below which they are listed rather than cut
LIST_ASKED = 128  # at most MAX_LISTING; the same where the responder has so little that it asked for a list
WHOLE_AT = 1  # ranks at or below which the responder tells all at once
WINDOW = 2048  # ranks of its own that the responder looks at for one answer to a listing
_COMPARE_WORK = 64  # ranks hashed for one mark, on average at most
_TAG = b"swarmnode/reconcile/1\0"


class Exhausted(ReconcileError):
    """The peer wanted more of this side than its budget; a lie, or so much that it takes several sessions."""


class CutoffRefused(ReconcileError):
    """The peer's cut-off lies so far from this side's that a clock must be wrong, and much would be left out."""


@dataclass(frozen=True)
class SessionLimits:
    """What one session may cost this side at most. What it holds in memory is a small multiple of `size`."""

    frames: int = 512  # received
    size: int = 8 << 20  # bytes, received and sent
    work: int = 4_000_000  # ranks hashed, about; some 1 µs each


class _Side:
    """What both sides have.

    ranks: of all that this side holds
    cutoff: ms since the epoch
    nonce: 8 random bytes, fresh for each session
    """

    def __init__(self, ranks: RankSet, *, cutoff: int, nonce: bytes, limits: SessionLimits | None = None) -> None:
        if not 0 <= cutoff <= MAX_TIME or len(nonce) != NONCE_SIZE:
            raise ValueError(f"cut-off {cutoff}, nonce of {len(nonce)} bytes; expected 48 bits and {NONCE_SIZE} bytes")
        self.cutoff = cutoff  # the session's, once both have said theirs
        self._limits = limits or SessionLimits()
        self._spent = Counter[str]()
        self._ranks = ranks
        self._nonce = nonce
        self._salt = b""  # until both nonces are known

    def _spend(self, amount: int, what: str) -> None:
        """Raises Exhausted beyond the budget."""
        most = {"frames": self._limits.frames, "bytes": self._limits.size}.get(what, self._limits.work)
        self._spent[what] += amount
        if self._spent[what] > most:
            raise Exhausted(f"more than {most} {what} in one session")

    def _mark(self, lo: bytes, hi: bytes) -> bytes:
        return self._ranks.fingerprint(lo, hi, self._salt)[:MARK_SIZE]

    def _shorts(self, ranks: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(blake3(rank, key=self._salt).digest(length=SHORT_SIZE) for rank in ranks)


class Initiator(_Side):
    """The side that asks. Send `open()`, then what `receive` returns for each frame that comes, until it is None."""

    def __init__(self, ranks: RankSet, *, cutoff: int, nonce: bytes, limits: SessionLimits | None = None) -> None:
        super().__init__(ranks.after(cutoff), cutoff=cutoff, nonce=nonce, limits=limits)
        self.need: set[bytes] = set()  # ranks that only the responder has
        self.have: set[bytes] = set()  # ranks that only this side has
        self.agreed = False  # at the end: the responder's set is exactly this one with `need` and without `have`
        self._theirs = b""  # fingerprint of all that the responder has
        self._open: list[Ask] = []  # about ranges of which too little is known, ascending
        self._put = 0  # how many of them, the first, were put
        self._expected: tuple[int, ...] = ()  # kinds of the next frame

    def open(self) -> bytes:
        self._expected = (EQUAL, DIFFER)
        ours = self._ranks.fingerprint(START, END, _salt(self.cutoff, self._nonce))
        frame = bytes([HELLO]) + self.cutoff.to_bytes(6, "big") + self._nonce + ours
        self._spend(len(frame), "bytes")
        return frame

    def receive(self, frame: bytes) -> bytes | None:
        """The next frame for the responder; None at the end. Raises Malformed, Exhausted and CutoffRefused."""
        self._spend(1, "frames")
        self._spend(len(frame), "bytes")
        reader = RangeReader(frame)
        kind = reader.raw(1)[0]
        if kind not in self._expected:
            raise Malformed(f"a frame of kind {kind} out of turn")
        self._expected = ()
        if kind == ANSWERS:
            self._learn(reader.answers(self._open[: self._put]))
        else:
            self._begin(reader, kind)
        if reader:
            raise Malformed("a frame goes on behind its end")
        if not self._open:
            self.agreed = kind == EQUAL or self._is_explained()
            return None
        reply = self._ask()
        self._spend(len(reply), "bytes")
        self._expected = (ANSWERS,)
        return reply

    def _begin(self, reader: RangeReader, kind: int) -> None:
        later = reader.number(MAX_TIME)
        if later > MAX_AHEAD:
            raise CutoffRefused(f"the responder's cut-off is {later} ms ahead; at most {MAX_AHEAD}")
        self.cutoff += later
        if kind == EQUAL:
            return
        if later:
            self._ranks = self._ranks.after(self.cutoff)
        nonce = reader.raw(NONCE_SIZE)
        self._salt = _salt(self.cutoff, self._nonce + nonce)
        self._theirs = reader.raw(FINGERPRINT_SIZE)
        everything = Compare(START, END, b"")
        self._open = [everything]
        self._learn([reader.answer(everything)])

    def _learn(self, answers: Sequence[Answer]) -> None:
        """Take in answers to the first of what is open."""
        found: list[Ask] = []
        for ask, answer in zip(self._open[: len(answers)], answers, strict=True):
            if isinstance(answer, ListIt):
                found += self._asks_about(ask.lo, ask.hi, list_at=LIST_ASKED)
            elif isinstance(answer, RangeParts):
                self._spend(_COMPARE_WORK * len(answer.marks), "ranks hashed")
                cuts = [ask.lo, *answer.bounds, ask.hi]
                for (lo, hi), mark in zip(pairwise(cuts), answer.marks, strict=True):
                    if self._mark(lo, hi) != mark:
                        found += self._asks_about(lo, hi)
            elif isinstance(answer, Whole):
                own = self._ranks.keys(ask.lo, ask.hi)
                self.have.update(set(own).difference(answer.ranks))
                self.need.update(set(answer.ranks).difference(own))
            elif isinstance(answer, Difference):
                assert isinstance(ask, Listing)
                hi = answer.below or ask.hi
                own = self._ranks.keys(ask.lo, ask.hi)
                self.have.update(own[place] for place in answer.positions if own[place] < hi)
                self.need.update(rank for rank in answer.ranks if rank not in self._ranks)
                if answer.below:
                    found += self._asks_about(answer.below, ask.hi)
        self._open[: len(answers)] = found

    def _asks_about(self, lo: bytes, hi: bytes, list_at: int = LIST_AT) -> list[Ask]:
        """What to ask about a range that differs."""
        count = self._ranks.count(lo, hi)
        if count <= list_at:
            self._spend(count, "ranks hashed")
            return [Listing(lo, hi, self._shorts(self._ranks.keys(lo, hi)))]
        cuts = [lo, *self._ranks.split(lo, hi, fan_out(count)), hi]
        self._spend(_COMPARE_WORK * (len(cuts) - 1), "ranks hashed")
        return [Compare(a, b, self._mark(a, b)) for a, b in pairwise(cuts)]

    def _ask(self) -> bytes:
        """Ask about as much of what is open, from the low end, as a frame holds."""
        sizes = accumulate(map(_size, self._open), initial=1)
        self._put = max(1, sum(size <= MAX_FRAME for size in sizes) - 1)
        out = RangeWriter(bytes([ASKS]))
        out.asks(self._open[: self._put])
        return out.frame()

    def _is_explained(self) -> bool:
        """Whether what was learned turns the own set into the responder's."""
        total, count = self._ranks.sum()
        total = total + lthash.sum_of(self.need) - lthash.sum_of(self.have)
        count += len(self.need) - len(self.have)
        return lthash.fingerprint(total, count, self._salt) == self._theirs


class Responder(_Side):
    """The side that answers: `receive` makes the one frame that goes back for each that comes.

    The session ends when the initiator asks no more, or with `done`: the sets are equal.
    """

    done = False

    def receive(self, frame: bytes) -> bytes:
        """The answer to a frame. Raises Malformed, Exhausted and CutoffRefused."""
        self._spend(1, "frames")
        self._spend(len(frame), "bytes")
        reader = RangeReader(frame)
        kind = reader.raw(1)[0]
        if kind == HELLO and not self._salt:
            reply = self._begin(reader)
        elif kind == ASKS and self._salt and not self.done:
            reply = self._answer_all(reader.asks())
        else:
            raise Malformed(f"a frame of kind {kind} out of turn")
        self._spend(len(reply), "bytes")
        return reply

    def _begin(self, reader: RangeReader) -> bytes:
        asked = int.from_bytes(reader.raw(6), "big")
        nonce, theirs = reader.raw(NONCE_SIZE), reader.raw(FINGERPRINT_SIZE)
        if reader:
            raise Malformed("a hello goes on behind its end")
        if abs(asked - self.cutoff) > MAX_AHEAD:
            raise CutoffRefused(f"the initiator's cut-off is {asked - self.cutoff} ms ahead; at most ±{MAX_AHEAD}")
        self.cutoff = max(asked, self.cutoff)
        self._ranks = self._ranks.after(self.cutoff)
        self._salt = _salt(self.cutoff, nonce + self._nonce)
        self.done = self._ranks.fingerprint(START, END, _salt(asked, nonce)) == theirs
        out = RangeWriter(bytes([EQUAL if self.done else DIFFER]))
        out.number(self.cutoff - asked)
        if not self.done:
            out.raw(self._nonce)
            out.raw(self._ranks.fingerprint(START, END, self._salt))
            out.answer(self._differs(START, END))
        return out.frame()

    def _answer_all(self, asks: Sequence[Ask]) -> bytes:
        """Answers to as many asks as fit."""
        body = RangeWriter()
        settled: list[bool] = []
        room = MAX_FRAME - len(asks) // 8 - 8
        for ask in asks:
            before = body.place()
            answer = self._compare(ask) if isinstance(ask, Compare) else self._match(ask, room - len(body))
            if answer is None:
                break
            settled.append(isinstance(answer, Settled))
            body.answer(answer)
            if len(body) > room:
                body.back(before)
                settled.pop()
                break
        return answers_frame(settled, body)

    def _compare(self, ask: Compare) -> Answer:
        self._spend(_COMPARE_WORK, "ranks hashed")
        return SETTLED if self._mark(ask.lo, ask.hi) == ask.mark else self._differs(ask.lo, ask.hi)

    def _differs(self, lo: bytes, hi: bytes) -> Answer:
        count = self._ranks.count(lo, hi)
        if count <= WHOLE_AT:
            return Whole(tuple(self._ranks.keys(lo, hi)))
        if count <= LIST_AT:
            return ListIt()
        bounds = self._ranks.split(lo, hi, fan_out(count))
        cuts = [lo, *bounds, hi]
        self._spend(_COMPARE_WORK * len(bounds), "ranks hashed")
        return RangeParts(tuple(bounds), tuple(self._mark(a, b) for a, b in pairwise(cuts)))

    def _match(self, ask: Listing, room: int) -> Answer | None:
        """What is told of a listing in at most `room` bytes; None where that is nothing."""
        own = self._ranks.keys(ask.lo, ask.hi, WINDOW + 1)
        self._spend(len(own) + len(ask.shorts), "ranks hashed")
        below = None
        if len(own) > WINDOW:
            below = separator(own[-2], own[-1])
            own.pop()
        shorts = self._shorts(own)
        known, listed = set(shorts), set(ask.shorts)
        lacking = [rank for rank, short in zip(own, shorts, strict=True) if short not in listed]
        positions = tuple(place for place, short in enumerate(ask.shorts) if short not in known)
        if not lacking and not positions and below is None:
            return SETTLED
        fit = (room - 3 * len(positions) - 60) // 41
        if fit < len(lacking):
            if fit < 1:
                return None
            below = separator(lacking[fit - 1], lacking[fit])
            del lacking[fit:]
        return Difference(tuple(lacking), positions, below)


def fan_out(count: int) -> int:
    """Into how many parts to cut a range of `count` ranks.

    With one difference in it, k parts cost about 11 k bytes and listing the one that differs 6 count / k: least at
    sqrt(0.55 count).
    """
    return max(MIN_PARTS, min(MAX_PARTS, round(math.sqrt(0.55 * count))))


def _salt(cutoff: int, nonces: bytes) -> bytes:
    """Of a hello, by the initiator's nonce; of all that follows, by both nonces."""
    return blake3(_TAG + cutoff.to_bytes(6, "big") + nonces).digest()


def _size(ask: Ask) -> int:
    """Bytes that an ask takes at most, with the head of a group."""
    return len(ask.lo) + len(ask.hi) + 12 + (MARK_SIZE if isinstance(ask, Compare) else SHORT_SIZE * len(ask.shorts))
