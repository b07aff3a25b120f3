"""A peer that does not keep to the protocol ends its own session: within the limits, with a typed error, in little
memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.ranges import END, START, RankSet
from swarmnode.crdt.reconcile import Exhausted, Initiator, Malformed, ReconcileError, Responder, SessionLimits
from swarmnode.crdt.reconcile_frames import (
    ANSWERS,
    ASKS,
    DIFFER,
    EQUAL,
    HELLO,
    MAX_FRAME,
    SETTLED,
    Answer,
    Ask,
    Compare,
    Difference,
    Listing,
    ListIt,
    RangeParts,
    RangeReader,
    RangeWriter,
    Settled,
    Whole,
    answers_frame,
)

T = 1_700_000_000_000  # ms
SMALL = SessionLimits(frames=40, size=200_000, work=100_000)
rng = random.Random(6)
RANKS = sorted(stamp_at(T + 1 + rng.randrange(10**6)).to_bytes(8, "big") + rng.randbytes(32) for _ in range(1500))
OURS = RankSet(sorted(RANKS[::2] + RANKS[1:1400:2]))
THEIRS = RankSet(RANKS[40:])


def initiator(limits: SessionLimits = SMALL) -> Initiator:
    return Initiator(OURS, cutoff=T, nonce=b"initiate", limits=limits)


def responder(limits: SessionLimits = SMALL) -> Responder:
    return Responder(THEIRS, cutoff=T, nonce=b"responds", limits=limits)


begun = st.sampled_from([bytes([kind]) for kind in (HELLO, EQUAL, DIFFER, ASKS, ANSWERS)])
frames = st.one_of(
    st.binary(max_size=200),
    st.builds(bytes.__add__, begun, st.binary(max_size=200)),
    # as far as the first answer a frame that is right
    st.binary(max_size=100).map(lambda rest: bytes([DIFFER, 0]) + bytes(24) + rest),
    st.builds(lambda low, rest: bytes([ASKS, 0]) + bytes([low]) + rest, st.integers(1, 9), st.binary(max_size=200)),
    st.builds(lambda n, rest: bytes([ANSWERS, n]) + rest, st.integers(1, 20), st.binary(max_size=200)),
)


@given(st.lists(frames, max_size=6))
def test_an_initiator_meets_any_bytes_with_a_typed_error_or_an_end(heard: list[bytes]) -> None:
    side = initiator()
    side.open()
    try:
        for frame in heard:
            reply = side.receive(frame)
            assert reply is None or len(reply) <= MAX_FRAME
    except ReconcileError:
        return


@given(st.booleans(), st.lists(frames, max_size=6))
def test_a_responder_meets_any_bytes_with_a_typed_error_or_an_answer(greeted: bool, heard: list[bytes]) -> None:
    side = responder()
    try:
        for frame in [initiator().open()] * greeted + heard:
            assert len(side.receive(frame)) <= MAX_FRAME
    except ReconcileError:
        return


def spoiled(frame: bytes, how: int, place: int, byte: int) -> bytes:
    """A frame with one thing wrong, or two."""
    at = place % (len(frame) + 1)
    return (
        frame[:at] + bytes([byte]) + frame[at + 1 :],
        frame[:at] + bytes([byte]) + frame[at:],
        frame[:at],
        frame[:at] + frame[at + 1 + byte % 16 :],
        frame + frame[at:],
        frame[:1] + frame[at:],
        frame[:at] + frame[max(0, at - 1 - byte) :],
    )[how]


faults = st.tuples(st.integers(0, 6), st.integers(0, MAX_FRAME), st.integers(0, 255))


@given(st.lists(st.none() | faults, max_size=8))
def test_a_session_with_spoiled_frames_ends_within_the_budget(wrong: list[tuple[int, int, int] | None]) -> None:
    asks, answers = initiator(), responder()
    trouble = iter(wrong)

    def passed(frame: bytes) -> bytes:
        fault = next(trouble, None)
        return frame if fault is None else spoiled(frame, *fault)

    frame: bytes | None = asks.open()
    try:
        for _ in range(SMALL.frames + 1):
            if frame is None:
                break
            frame = asks.receive(passed(answers.receive(passed(frame))))
        assert frame is None
    except ReconcileError:
        return
    assert asks.have <= set(OURS)
    assert not asks.need & set(OURS.after(asks.cutoff))  # which what was spoiled may have moved


Liar = Callable[[Ask], Answer]


def ask_of(frame: bytes) -> list[Ask]:
    reader = RangeReader(frame)
    assert reader.raw(1)[0] == ASKS
    try:
        return reader.asks()
    except Malformed as error:
        raise AssertionError("the initiator itself sent what is malformed") from error


def answered(asks: Sequence[Ask], lie: Liar) -> bytes:
    """What the liar says to as many asks as fit into a frame."""
    body, settled = RangeWriter(), []
    for ask in asks:
        place, answer = body.place(), lie(ask)
        settled.append(isinstance(answer, Settled))
        body.answer(answer)
        if len(body) > MAX_FRAME - 2000:
            body.back(place)
            settled.pop()
            break
    return answers_frame(settled, body)


def lied_to(lie: Liar, limits: SessionLimits, tree: RankSet) -> Initiator:
    """An initiator after a session with a responder that answers everything by `lie`."""
    side = Initiator(tree, cutoff=T, nonce=b"initiate", limits=limits)
    side.open()
    first = RangeWriter(bytes([DIFFER, 0]) + bytes(24))
    first.answer(lie(Compare(START, END, b"")))
    frame = side.receive(first.frame())
    while frame is not None:
        frame = side.receive(answered(ask_of(frame), lie))
    return side


def splits_on(ask: Ask) -> Answer:
    """Everything differs, and in many parts, wherever that is."""
    if isinstance(ask, Listing):
        return SETTLED
    cuts = sorted({rng.randbytes(40) for _ in range(60)} | set(rng.sample(RANKS, 60)))
    bounds = tuple(cut for cut in cuts if ask.lo < cut < ask.hi) or (between(ask.lo, ask.hi),)
    return RangeParts(bounds, tuple(rng.randbytes(8) for _ in range(len(bounds) + 1)))


def between(lo: bytes, hi: bytes) -> bytes:
    low, high = (int.from_bytes(bound.ljust(41, b"\0")[:40], "big") for bound in (lo, hi))
    return ((low + high + 1) // 2).to_bytes(40, "big")


def never_gets_there(ask: Ask) -> Answer:
    """Every listing is dealt with as far as the next possible bound."""
    if isinstance(ask, Listing):
        bound = (ask.lo + b"\0") if len(ask.lo) < 40 else between(ask.lo, ask.hi)
        return Difference((), (), bound)
    return ListIt()


def invents(ask: Ask) -> Answer:
    """There is ever more that the initiator lacks."""
    if isinstance(ask, Compare):
        return ListIt()
    low = int.from_bytes(ask.lo.ljust(40, b"\0")[:40], "big") + 1
    many = tuple(sorted({(low + rng.randrange(1 << 200)).to_bytes(40, "big") for _ in range(1500)}))
    many = tuple(rank for rank in many if rank < ask.hi)
    end = (int.from_bytes(many[-1], "big") + 1).to_bytes(40, "big") if many else END
    return Difference(many, (), end) if end < ask.hi else SETTLED


@pytest.mark.parametrize("lie", [never_gets_there, invents])
def test_a_responder_that_never_ends_exhausts_its_session(lie: Liar) -> None:
    with pytest.raises(Exhausted):
        lied_to(lie, SMALL, OURS)


def test_endless_splits_come_to_an_end_because_the_initiator_lists_what_gets_small() -> None:
    side = lied_to(splits_on, SessionLimits(frames=12), OURS)
    assert not side.agreed


@pytest.mark.parametrize("lie", [splits_on, never_gets_there, invents])
def test_a_responder_that_never_ends_takes_little_memory(lie: Liar) -> None:
    limits = SessionLimits(size=1 << 19, work=200_000)
    tracemalloc.start()
    try:
        with suppress(Exhausted):
            lied_to(lie, limits, OURS)
        assert tracemalloc.get_traced_memory()[1] <= 12 * limits.size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "answer",
    [lambda _: SETTLED, lambda ask: Whole(()) if isinstance(ask, Compare) else SETTLED],
    ids=["nothing differs", "nothing there"],
)
def test_a_responder_that_contradicts_its_own_fingerprint_is_not_agreed_with(answer: Liar) -> None:
    def lie(ask: Ask) -> Answer:
        return RangeParts((RANKS[700],), (bytes(8), bytes(8))) if ask == Compare(START, END, b"") else answer(ask)

    side = lied_to(lie, SMALL, OURS)
    assert not side.agreed
    assert side.need == set()


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda ask: RangeParts((START,), (bytes(8),) * 2), "ascend"),
        (lambda ask: RangeParts((ask.hi,), (bytes(8),) * 2), "empty part"),
        (lambda ask: RangeParts((b"\2", b"\1"), (bytes(8),) * 3), "ascend"),
        (lambda ask: RangeParts((), (bytes(8),)), "fewer than 2"),
        (lambda ask: Whole((RANKS[1], RANKS[0])), "ascend"),
        (lambda ask: Whole((RANKS[0], RANKS[0])), "ascend"),
        (lambda ask: Difference((), ()), "kind 3"),
    ],
)
def test_answers_that_fit_no_ask_are_malformed(lie: Liar, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        lied_to(lie, SMALL, OURS)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda ask: Difference((RANKS[0],), ()), "outside the range"),
        (lambda ask: Difference((RANKS[-1],), ()), "outside the range"),
        (lambda ask: Difference((), (len(ask.shorts),)), "at most|behind the end"),
        (lambda ask: Difference((), (1, 1)), "positions do not ascend"),
        (lambda ask: Difference((), (), ask.hi), "does not fit"),
        (lambda ask: Difference((), (), END), "outside the range"),
        (lambda ask: ListIt(), "kind 0"),
        (lambda ask: Whole(()), "kind 2"),
    ],
)
def test_answers_outside_what_was_listed_are_malformed(lie: Callable[[Listing], Answer], why: str) -> None:
    """The initiator lists the middle of five parts."""
    cuts = tuple(RANKS[at] for at in (700, 720))

    def from_the_middle(ask: Ask) -> Answer:
        if ask == Compare(START, END, b""):
            return RangeParts(cuts, tuple(rng.randbytes(8) for _ in range(3)))
        return lie(ask) if isinstance(ask, Listing) and ask.lo >= cuts[0] and ask.hi <= cuts[1] else SETTLED

    with pytest.raises(Malformed, match=why):
        lied_to(from_the_middle, SMALL, OURS)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (b"\0", "without an answer"),
        (b"\1\1\0", "more answers"),
        (b"\1\3", "more answers"),
        (b"\1\0\2\2" + b"\0" + RANKS[0] + b"\x09" + RANKS[1][9:], "more than an hlc"),
        (b"\x7f", "at most"),
    ],
    ids=["none", "bytes left", "bits left", "ranks that take too few bytes", "to what was not asked"],
)
def test_answers_that_are_not_what_the_frame_says_are_malformed(answers: bytes, why: str) -> None:
    side = initiator()
    side.open()
    first = RangeWriter(bytes([DIFFER, 0]) + bytes(24))
    first.answer(ListIt())
    assert side.receive(first.frame()) is not None
    with pytest.raises(Malformed, match=why):
        side.receive(bytes([ANSWERS]) + answers)


def asking(*asks: Ask) -> bytes:
    out = RangeWriter(bytes([ASKS]))
    for ask in asks:
        out.asks([ask])
    return out.frame()


def test_an_initiator_that_never_ends_exhausts_its_session() -> None:
    many = [Compare(lo, hi, rng.randbytes(8)) for lo, hi in zip(RANKS[::4], RANKS[4::4], strict=False)]
    wide = zip(RANKS[::20], RANKS[20::20], strict=False)
    lists = [Listing(lo, hi, tuple(rng.randbytes(6) for _ in range(20))) for lo, hi in wide]
    full = [Listing(lo, hi, ()) for lo, hi in zip(RANKS[::2], RANKS[2::2], strict=False)]  # answers fill a frame
    for asks in (many, lists, full, [Compare(START, END, bytes(8))], [Listing(START, END, ())]):
        side = responder()
        side.receive(initiator().open())
        with pytest.raises(Exhausted):
            for _ in range(SMALL.frames):
                assert len(side.receive(asking(*asks))) <= MAX_FRAME


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (asking(Compare(RANKS[5], RANKS[9], bytes(8)), Compare(RANKS[7], RANKS[11], bytes(8))), "overlap"),
        (asking(Compare(RANKS[5], RANKS[5], bytes(8))), "ascend"),
        (asking(Compare(RANKS[5], RANKS[4], bytes(8))), "ascend"),
        (asking(Listing(START, END, (bytes(6),) * 257)), "at most 256"),
        (bytes([ASKS]), "without an ask"),
        (bytes([ASKS, 0, 0]), "there are none"),
        (bytes([ASKS, 0x10, 1]), "shares more"),
        (bytes([ASKS, 0x0F, 41]) + bytes(41), "at most 40"),
        (bytes([ASKS, 0]) + b"\xff" * 5, "more than 5 bytes"),
        (bytes([ANSWERS, 1, 1]), "out of turn"),
        (b"", "early"),
        (bytes([ASKS]) + bytes(MAX_FRAME), "at most 65536"),
    ],
)
def test_asks_that_no_initiator_makes_are_malformed(frame: bytes, why: str) -> None:
    side = responder()
    side.receive(initiator().open())
    with pytest.raises(Malformed, match=why):
        side.receive(frame)


def test_frames_out_of_turn_are_malformed() -> None:
    hello = initiator().open()
    twice = responder()
    twice.receive(hello)
    with pytest.raises(Malformed, match="out of turn"):
        twice.receive(hello)
    with pytest.raises(Malformed, match="out of turn"):
        responder().receive(asking(Compare(START, END, bytes(8))))
    equal = Responder(OURS, cutoff=T, nonce=b"responds")
    assert equal.receive(hello)[0] == EQUAL
    with pytest.raises(Malformed, match="out of turn"):
        equal.receive(asking(Compare(START, END, bytes(8))))
    side = initiator()
    with pytest.raises(Malformed, match="out of turn"):
        side.receive(bytes([EQUAL, 0]))
    side.open()
    side.receive(bytes([EQUAL, 0]))
    with pytest.raises(Malformed, match="out of turn"):
        side.receive(bytes([EQUAL, 0]))
    with pytest.raises(Malformed, match="behind its end"):
        late = initiator()
        late.open()
        late.receive(bytes([EQUAL, 0, 0]))
