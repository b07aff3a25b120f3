"""The hybrid logical clock: monotone whatever real time does, and never led far astray by others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt.hlc import MAX_AHEAD, HybridClock, stamp_at, time_of

NOW = 1_700_000_000_000
times = st.integers(0, 2**48 - 2**20)


@given(st.lists(st.tuples(st.sampled_from(["tick", "observe", "restart"]), times, times)))
def test_stamps_grow_when_real_time_steps_back_stamps_arrive_and_the_clock_starts_again(
    steps: list[tuple[str, int, int]],
) -> None:
    """A restart begins from the high-water mark."""
    clock, last = HybridClock(), -1
    for step, now, heard in steps:
        if step == "tick":
            stamp = clock.tick(now)
            assert stamp > last
            last = stamp
        elif step == "restart":
            clock = HybridClock(clock.last)
        elif time_of(stamp_at(heard)) <= now + MAX_AHEAD:
            clock.observe(stamp_at(heard), now)
            last = max(last, stamp_at(heard))


def test_a_stamp_far_ahead_is_refused_and_leaves_the_clock_alone() -> None:
    clock = HybridClock()
    before = clock.tick(NOW)
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
