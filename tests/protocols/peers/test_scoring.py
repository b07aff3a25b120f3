"""The ladder of standings: violations lead down it, time leads back up."""

from __future__ import annotations

import logging

import pytest
import trio

from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.peers.scoring import Kind, PeerScoring, ScoringLimits, Standing, Violations

PEER, OTHER = "12D3KooWbad", "12D3KooWgood"
LIMITS = ScoringLimits()


class Clock:
    now = 1000.0


@pytest.fixture(autouse=True)
def time_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio's time is that of the test's clock."""
    monkeypatch.setattr(Clock, "now", 1000.0)
    monkeypatch.setattr(trio, "current_time", lambda: Clock.now)


def ladder(limits: ScoringLimits = LIMITS) -> tuple[PeerScoring, Violations, type[Clock], list[str]]:
    scoring, violations = PeerScoring(limits), Violations("/test/1")
    scoring.watch(violations)
    banned: list[str] = []
    scoring.on_ban = banned.append
    return scoring, violations, Clock, banned


def test_breaches_lead_down_rung_by_rung_and_only_who_commits_them() -> None:
    scoring, violations, _, banned = ladder()
    seen = []
    for _ in range(8):
        violations.note(PEER, "nonsense")
        seen.append(scoring.standing(PEER))
    assert seen == [
        *[Standing.GOOD] * 1,
        *[Standing.SLOWED] * 2,
        *[Standing.REFUSED] * 4,
        Standing.BANNED,
    ]
    assert banned == [PEER]
    assert scoring.standing(OTHER) is Standing.GOOD
    assert [(kept.peer, kept.seconds, kept.why) for kept in scoring.kept_out()] == [(PEER, 60.0, "nonsense")]


def test_a_refused_peer_is_told_and_a_slowed_one_is_not() -> None:
    _, violations, _, _ = ladder()
    violations.note(PEER, "lie", Kind.LIE)
    assert violations.refuses(PEER) is None
    violations.note(PEER, "lie", Kind.LIE)
    assert violations.refuses(PEER) is not None
    assert violations.refuses(OTHER) is None


def test_a_burst_of_overload_costs_no_more_than_one_call_too_many() -> None:
    scoring, violations, clock, banned = ladder()
    for _ in range(10_000):
        violations.note(PEER, "too many calls", Kind.LOAD)
    assert scoring.standing(PEER) is Standing.GOOD
    assert violations.count(PEER) == 10_000
    for _ in range(10):  # a burst a second for ten seconds
        clock.now += 1
        violations.note(PEER, "too many calls", Kind.LOAD)
    assert scoring.standing(PEER) is Standing.GOOD
    assert banned == []


def test_overload_without_end_is_slowed_then_refused_then_disconnected() -> None:
    scoring, violations, clock, banned = ladder()
    at: dict[Standing, int] = {}
    for second in range(600):
        violations.note(PEER, "too many calls", Kind.LOAD)
        at.setdefault(scoring.standing(PEER), second)
        if banned:
            break
        clock.now += 1
    assert list(at) == [Standing.GOOD, Standing.SLOWED, Standing.REFUSED, Standing.BANNED]
    assert 15 <= at[Standing.SLOWED] < at[Standing.REFUSED] < at[Standing.BANNED]
    assert at[Standing.REFUSED] > 40
    assert at[Standing.BANNED] > 160


def test_points_fade_and_the_peer_is_served_again() -> None:
    scoring, violations, clock, _ = ladder()
    for _ in range(4):
        violations.note(PEER, "nonsense")
    assert scoring.standing(PEER) is Standing.REFUSED
    clock.now += 0.5 * LIMITS.half_life
    assert scoring.standing(PEER) is Standing.SLOWED
    clock.now += LIMITS.half_life
    assert scoring.standing(PEER) is Standing.GOOD


def test_a_ban_ends_with_a_clean_sheet_and_the_next_is_twice_as_long_up_to_an_hour() -> None:
    scoring, violations, clock, banned = ladder()
    lasted = []
    for _ in range(9):
        for _ in range(4):
            violations.note(PEER, "lie", Kind.LIE)
        (kept,) = scoring.kept_out()
        lasted.append(kept.seconds)
        violations.note(PEER, "lie", Kind.LIE)  # what was under way makes no ban longer
        assert scoring.kept_out() == (kept,)
        clock.now += kept.seconds
        assert scoring.standing(PEER) is Standing.GOOD
    assert lasted == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert banned == [PEER] * 9
    clock.now += LIMITS.forgiven + 1
    for _ in range(4):
        violations.note(PEER, "lie", Kind.LIE)
    assert scoring.kept_out()[0].seconds == 60


def test_memory_does_not_grow_with_identities_and_the_latest_offenders_stay() -> None:
    scoring, violations, _, _ = ladder(ScoringLimits(peers=10))
    for number in range(1000):
        violations.note(f"peer {number}", "lie", Kind.LIE)
    assert len(scoring._records) == 10
    assert [peer for peer, _ in scoring.below_good()] == [f"peer {number}" for number in range(990, 1000)]


def test_each_fall_is_logged_once_with_what_led_to_it(caplog: pytest.LogCaptureFixture) -> None:
    scoring, violations, _, _ = ladder()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            violations.note(PEER, f"nonsense {number}")
    assert [record.message for record in caplog.records] == [
        f"peer {PEER} broke the rules of /test/1: nonsense 0 (further ones are only counted)",
        f"peer {PEER} is slowed after 2 offences, the last: nonsense 1",
        f"peer {PEER} is refused after 4 offences, the last: nonsense 3",
        f"peer {PEER} is banned for 60 s after 8 offences, the last: nonsense 7",
    ]
    assert scoring.standing(PEER) is Standing.BANNED


def test_falls_and_offences_are_counted_apart_for_each_node() -> None:
    nodes = [ladder() for _ in range(2)]
    texts = []
    for number, (scoring, violations, _, _) in enumerate(nodes):
        for _ in range(2 * number):
            violations.note(PEER, "nonsense")
        metrics = Metrics()
        scoring.measure(metrics)
        violations.measure(metrics)
        texts.append(metrics.text())
    for text, falls, breaches in zip(texts, (0, 1), (0, 2), strict=True):
        assert f'swarmnode_standing_falls_total{{standing="slowed"}} {falls}\n' in text
        assert f'swarmnode_peers_standing{{standing="slowed"}} {falls}\n' in text
        assert f'swarmnode_offences_total{{what="/test/1 breach"}} {breaches}\n' in text
        assert 'swarmnode_standing_falls_total{standing="banned"} 0\n' in text
