"""Deadlines follow what was seen, between floor and ceiling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.peers.liveness import HISTORY, AdaptiveDeadline


@given(st.lists(st.floats(0, 1e6), max_size=40))
def test_a_deadline_stays_between_floor_and_ceiling(seen: list[float]) -> None:
    deadline = AdaptiveDeadline(floor=2.0, ceiling=60.0)
    for seconds in seen:
        deadline.observe(seconds)
    assert 2.0 <= deadline.seconds() <= 60.0


def test_the_first_time_is_allowed_the_ceiling() -> None:
    assert AdaptiveDeadline(floor=2.0, ceiling=60.0).seconds() == 60.0
    assert AdaptiveDeadline(floor=2.0, ceiling=60.0).usual is None


def test_a_steady_phase_may_take_twice_its_usual_time() -> None:
    deadline = AdaptiveDeadline(floor=2.0, ceiling=60.0)
    for _ in range(5):
        deadline.observe(10.0)
    assert deadline.usual == 10.0
    assert deadline.seconds() == 20.0


def test_noise_widens_the_deadline() -> None:
    deadline = AdaptiveDeadline(floor=2.0, ceiling=600.0)
    for seconds in (10.0, 20.0, 30.0, 40.0, 50.0):
        deadline.observe(seconds)
    assert deadline.seconds() == 30.0 + 5 * 10.0


def test_one_outlier_hardly_moves_it_and_a_changed_link_does() -> None:
    deadline = AdaptiveDeadline(floor=1.0, ceiling=600.0)
    for _ in range(HISTORY):
        deadline.observe(3.0)
    deadline.observe(500.0)
    assert deadline.seconds() == 6.0
    for _ in range(HISTORY):
        deadline.observe(30.0)
    assert deadline.seconds() == 60.0
