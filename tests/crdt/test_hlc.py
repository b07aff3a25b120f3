"""The hybrid logical clock: monotone whatever real time does, and never led far astray by others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt.hlc import MAX_AHEAD, HybridClock, StampAhead, stamp_at, time_of

NOW = 1_700_000_000_000
times = st.integers(0, 2**48 - 2**20)


@given(st.lists(st.tuples(st.booleans(), times, times)))
def test_stamps_grow_when_real_time_steps_back_and_stamps_arrive(steps: list[tuple[bool, int, int]]) -> None:
    clock, last = HybridClock(), -1
    for tick, now, heard in steps:
        if tick:
            stamp = clock.tick(now)
            assert stamp > last
            last = stamp
        elif time_of(stamp_at(heard)) <= now + MAX_AHEAD:
            clock.observe(stamp_at(heard), now)
            last = max(last, stamp_at(heard))


def test_a_stamp_far_ahead_is_refused_and_leaves_the_clock_alone() -> None:
    clock = HybridClock()
    before = clock.tick(NOW)
    with pytest.raises(StampAhead, match="60001 ms ahead"):
        clock.observe(stamp_at(NOW + MAX_AHEAD + 1), NOW)
    assert clock.last == before
    clock.observe(stamp_at(NOW + MAX_AHEAD), NOW)
    assert clock.last == stamp_at(NOW + MAX_AHEAD)


def test_a_full_counter_carries_into_the_milliseconds() -> None:
    clock = HybridClock(stamp_at(NOW, 0xFFFF))
    assert clock.tick(NOW) == stamp_at(NOW + 1, 0)


def test_a_clock_started_from_its_high_water_mark_goes_on_past_it() -> None:
    first = HybridClock()
    mark = first.tick(NOW)
    assert HybridClock(first.last).tick(NOW - 5_000) > mark


@pytest.mark.parametrize("time, counter", [(-1, 0), (2**48, 0), (0, -1), (0, 2**16)])
def test_no_stamp_outside_its_bits(time: int, counter: int) -> None:
    with pytest.raises(ValueError):
        stamp_at(time, counter)
