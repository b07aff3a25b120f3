"""Reconciliation: two replicas learn exactly what each lacks, in few bytes, when both keep to the protocol."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import pytest
from conversing import Transcript, converse
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt import reconcile
from swarmnode.crdt.hlc import MAX_AHEAD, stamp_at
from swarmnode.crdt.ranges import RankSet
from swarmnode.crdt.reconcile import CutoffRefused, Initiator, Responder, SessionLimits
from swarmnode.crdt.reconcile_frames import MAX_FRAME

T = 1_700_000_000_000  # ms
NONCES = (b"initiate", b"responds")
MOST = 72  # bytes a difference and bit of n: 68 of two elements, where fixed costs prevail; below 45 from 1000 on


def some_ranks(rng: random.Random, count: int, spread: int) -> list[bytes]:
    """Distinct ranks within `spread` ms, ascending: with 1, all have the same time and close counters."""
    stamps = [stamp_at(T + 1 + rng.randrange(spread), rng.randrange(2)) for _ in range(count)]
    return sorted(stamp.to_bytes(8, "big") + rng.randbytes(32) for stamp in stamps)


def replicas(shared: list[bytes], ours: list[bytes], theirs: list[bytes]) -> tuple[RankSet, RankSet]:
    return RankSet(sorted(shared + ours)), RankSet(sorted(shared + theirs))


def session(a: RankSet, b: RankSet, limits: SessionLimits | None = None) -> tuple[Initiator, Transcript]:
    initiator = Initiator(a, cutoff=T, nonce=NONCES[0], limits=limits)
    responder = Responder(b, cutoff=T, nonce=NONCES[1], limits=limits)
    return initiator, converse(initiator, responder)


@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 30, 300, 1000]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([1, 1000, 10**8]),
    st.sampled_from([4096, MAX_FRAME]),
)
def test_the_initiator_learns_exactly_what_each_side_lacks_in_few_bytes(
    seed: int, shared: int, ours: int, theirs: int, spread: int, frame: int
) -> None:
    rng = random.Random(seed)
    every = some_ranks(rng, shared + ours + theirs, spread)
    rng.shuffle(every)
    mine, yours, both = every[:ours], every[ours : ours + theirs], every[ours + theirs :]
    with mock.patch.object(reconcile, "MAX_FRAME", frame):
        initiator, transcript = session(*replicas(both, mine, yours))
    assert (initiator.need, initiator.have, initiator.agreed) == (set(yours), set(mine), True)
    assert transcript.frames[0] <= 48
    assert max(transcript.frames) <= frame
    if ours + theirs:
        assert transcript.size <= 48 + MOST * (ours + theirs) * math.log2(max(2, len(every)))
    else:
        assert transcript.size <= 64


def scattered(n: int, d: int, recent: bool) -> tuple[RankSet, RankSet]:
    rng = random.Random(n + d)
    every = some_ranks(rng, n, 10**8)
    differ = every[-d:] if recent else rng.sample(every, d)
    mine, yours = set(differ[::2]), set(differ[1::2])
    return (
        RankSet(rank for rank in every if rank not in yours),
        RankSet(rank for rank in every if rank not in mine),
    )


def test_a_hundred_scattered_differences_in_a_hundred_thousand_take_six_half_rounds() -> None:
    initiator, transcript = session(*scattered(100_000, 100, recent=False))
    assert initiator.agreed
    assert len(initiator.need) + len(initiator.have) == 100
    assert transcript.size <= 40_000
    assert transcript.half_rounds <= 6


def test_a_hundred_recent_differences_in_a_hundred_thousand_take_four_kilobytes() -> None:
    initiator, transcript = session(*scattered(100_000, 100, recent=True))
    assert initiator.agreed
    assert len(initiator.need) + len(initiator.have) == 100
    assert transcript.size <= 4_000
    assert transcript.half_rounds <= 6


@pytest.mark.parametrize(
    ("shared", "ours", "theirs"),
    [(0, 0, 5000), (0, 5000, 0), (0, 20, 5000), (0, 5000, 20), (30, 0, 5000), (30, 5000, 0), (20, 10, 5000)],
)
@pytest.mark.parametrize("frame", [4096, MAX_FRAME])
def test_replicas_that_differ_in_almost_everything_send_little_more_than_what_is_new(
    shared: int, ours: int, theirs: int, frame: int
) -> None:
    rng = random.Random(3)
    every = some_ranks(rng, shared + ours + theirs, 10**8)
    rng.shuffle(every)
    mine, yours, both = every[:ours], every[ours : ours + theirs], every[ours + theirs :]
    with mock.patch.object(reconcile, "MAX_FRAME", frame):
        initiator, transcript = session(*replicas(both, mine, yours))
    assert (initiator.have, initiator.need) == (set(mine), set(yours))
    assert initiator.agreed
    assert max(transcript.frames) <= frame
    assert transcript.size <= 5000 * 50


def test_a_listing_that_is_matched_in_part_says_nothing_about_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What both have lies far apart in the much larger set of the responder."""
    monkeypatch.setattr(reconcile, "WINDOW", 8)
    rng = random.Random(7)
    every = some_ranks(rng, 800, 10**8)
    both, mine = every[::40], every[20::400]
    yours = [rank for rank in every if rank not in both and rank not in mine]
    initiator, _ = session(*replicas(both, mine, yours))
    assert (initiator.have, initiator.need, initiator.agreed) == (set(mine), set(yours), True)


def test_a_session_sees_the_sets_as_they_were_when_it_began() -> None:
    rng = random.Random(4)
    a, b = scattered(2000, 60, recent=False)
    only_a, only_b = set(a) - set(b), set(b) - set(a)
    initiator = Initiator(a, cutoff=T, nonce=NONCES[0])
    responder = Responder(b, cutoff=T, nonce=NONCES[1])
    frame: bytes | None = initiator.open()
    while frame is not None:
        frame = initiator.receive(responder.receive(frame))
        a, b = (one.changed(some_ranks(rng, 1, 10**8), [rng.choice(one.keys())]) for one in (a, b))
    assert (initiator.have, initiator.need) == (only_a, only_b)
    assert initiator.agreed


@pytest.mark.parametrize("skew", [-MAX_AHEAD, -1000, 0, 1, 1000, MAX_AHEAD])
def test_replicas_whose_clocks_are_a_minute_apart_compare_after_the_later_cutoff(skew: int) -> None:
    rng = random.Random(5)
    expiries = sorted(T + rng.randrange(-MAX_AHEAD, 3 * MAX_AHEAD) for _ in range(400))
    every = RankSet(stamp_at(expiry, number).to_bytes(8, "big") + bytes(32) for number, expiry in enumerate(expiries))
    later = T + max(0, skew)
    mine, yours = every.after(T), every.after(T + skew)  # swept, each at its own time
    extra = mine.after(later).at(0)
    initiator = Initiator(mine.changed(removed=[extra]), cutoff=T, nonce=NONCES[0])
    responder = Responder(yours, cutoff=T + skew, nonce=NONCES[1])
    converse(initiator, responder)
    assert initiator.cutoff == responder.cutoff == later
    assert (initiator.need, initiator.have, initiator.agreed) == ({extra}, set(), True)

    again = Initiator(mine, cutoff=T, nonce=NONCES[0])
    converse(again, Responder(yours, cutoff=T + skew, nonce=NONCES[1]))
    assert (again.need, again.have, again.agreed) == (set(), set(), True)


@pytest.mark.parametrize("skew", [-MAX_AHEAD - 1, MAX_AHEAD + 1, 10**9])
def test_a_responder_refuses_a_cutoff_that_no_working_clock_gives(skew: int) -> None:
    hello = Initiator(RankSet(), cutoff=T + skew, nonce=NONCES[0]).open()
    with pytest.raises(CutoffRefused):
        Responder(RankSet(), cutoff=T, nonce=NONCES[1]).receive(hello)


def test_an_initiator_refuses_a_cutoff_that_no_working_clock_gives() -> None:
    """Or a responder could have nothing compared at all."""
    initiator = Initiator(RankSet(), cutoff=T, nonce=NONCES[0])
    initiator.open()
    later = MAX_AHEAD + 1
    with pytest.raises(CutoffRefused):
        initiator.receive(bytes([2, later & 0x7F | 0x80, later >> 7 & 0x7F | 0x80, later >> 14]))


def test_every_session_salts_what_it_sends() -> None:
    """Else somebody could look for elements whose marks are those of others."""
    tree, other = scattered(500, 10, recent=False)
    frames = []
    for nonce in (b"nonce--1", b"nonce--2"):
        initiator = Initiator(tree, cutoff=T, nonce=NONCES[0])
        reply = Responder(other, cutoff=T, nonce=nonce).receive(initiator.open())
        asks = initiator.receive(reply)
        assert asks is not None
        frames.append((reply[2 + 8 :], asks))
    assert frames[0][0] != frames[1][0]
    assert frames[0][1] != frames[1][1]
    hellos = [Initiator(tree, cutoff=T, nonce=nonce).open()[15:] for nonce in NONCES]
    assert hellos[0] != hellos[1]


@pytest.mark.parametrize("broken", ["_shorts", "_mark"])
def test_ids_or_marks_that_collide_are_told_in_the_end(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, other = scattered(500, 10, recent=False)
    alike: dict[str, Any] = {"_shorts": lambda _, ranks: (bytes(6),) * len(ranks), "_mark": lambda *_: bytes(8)}
    monkeypatch.setattr(reconcile._Side, broken, alike[broken])
    initiator, _ = session(tree, other)
    assert not initiator.agreed


def test_a_budget_ends_a_session_that_takes_more_and_what_was_learned_stands() -> None:
    a, b = RankSet(), scattered(20_000, 2, recent=False)[1]
    for limits in (SessionLimits(frames=4), SessionLimits(size=200_000), SessionLimits(work=12_000)):
        initiator = Initiator(a, cutoff=T, nonce=NONCES[0], limits=limits)
        with pytest.raises(reconcile.Exhausted):
            converse(initiator, Responder(b, cutoff=T, nonce=NONCES[1], limits=limits))
        assert 0 < len(initiator.need) < len(b)
        assert initiator.need <= set(b)
        assert not initiator.agreed


@pytest.mark.parametrize(("cutoff", "nonce"), [(-1, NONCES[0]), (1 << 48, NONCES[0]), (T, b"short")])
def test_a_session_begins_with_a_time_and_eight_random_bytes(cutoff: int, nonce: bytes) -> None:
    with pytest.raises(ValueError, match="cut-off"):
        Initiator(RankSet(), cutoff=cutoff, nonce=nonce)
    with pytest.raises(ValueError, match="cut-off"):
        Responder(RankSet(), cutoff=cutoff, nonce=nonce)
