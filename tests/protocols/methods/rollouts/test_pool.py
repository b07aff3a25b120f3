"""The pool is bounded and fair: who floods displaces nobody but himself, what is old goes, nothing comes twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rolloutnodes import RUN, Rules, group

from swarmnode.protocols.methods.rollouts.intake import IntakeLimiter, informative
from swarmnode.protocols.methods.rollouts.messages import SignedGroup, seal
from swarmnode.protocols.methods.rollouts.pool import PoolLimits, RolloutLimits, RolloutPool
from swarmnode.testing.simnet import SimWorld
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import TaskRef, regenerate
from swarmnode.training.rl.vocabulary import DIGITS

START = 1_700_000_000_000


@dataclass
class Clock:
    ms: int = START

    def __call__(self) -> int:
        return self.ms


def by(author: str, seed: int, *, at: int = START, version: int = 0, tokens: int = 6) -> SignedGroup:
    return seal(
        group(seed, version=version, tokens=tokens),
        run_id=RUN,
        author=author,
        counter=seed,
        made_at=at,
        sign=lambda message: bytes(64),
    )


def rules(standing: Callable[[str], float] = lambda author: 1.0) -> Rules:
    return Rules(SimWorld().node("me"), standing, lambda group: "")


def pool(clock: Clock | None = None, **limits: float) -> RolloutPool:
    return RolloutPool("me", rules(), now=clock or Clock(), limits=PoolLimits(**limits))  # type: ignore[arg-type]


def authors(groups: tuple[SignedGroup, ...]) -> Counter[str]:
    return Counter(group.author for group in groups)


def test_who_sends_nine_tenths_of_the_groups_has_no_more_than_its_share_of_the_pool() -> None:
    held, rng = pool(groups=200, share=0.25, few=12), random.Random(1)
    for seed in range(700):
        author = "flooder" if rng.random() < 0.9 else f"honest {seed % 9}"
        held.add(by(author, seed))
        stats = {each.author: each.groups for each in held.by_author()}
        assert stats.get("flooder", 0) <= max(12, 0.25 * len(held))
    came = {each.author: (each.came, each.groups) for each in held.by_author()}
    assert all(came[f"honest {n}"][0] == came[f"honest {n}"][1] > 3 for n in range(9))  # nothing of theirs was lost
    assert held.dropped.keys() == {"quota"}


def test_a_full_pool_lets_go_of_the_oldest_of_whoever_has_most() -> None:
    held = pool(groups=12, share=0.5, few=8)
    for seed in range(8):
        held.add(by("one", seed))
    for seed in range(8, 14):
        held.add(by("two", seed))
    assert {each.author: each.groups for each in held.by_author()} == {"one": 6, "two": 6}
    assert sorted(kept.signed.packed.counter for kept in held) == list(range(2, 14))
    assert held.dropped == {"full": 2}


def test_the_pool_keeps_no_more_bytes_than_its_cap_and_of_an_author_no_more_than_its_share_of_it() -> None:
    size = by("one", 0).size
    held = pool(bytes=8 * size, share=0.5, few=100)
    for seed in range(10):
        held.add(by("one", seed))
    assert held.stats()["bytes"] <= 4 * size
    for seed in range(10, 40):
        held.add(by(f"other {seed % 5}", seed))
        assert held.stats()["bytes"] <= 8 * size
    assert held.add(by("third", 99, tokens=6 * size)) == "too-large"


def test_a_newcomer_is_heard_however_large_its_groups_are_and_pushes_out_nobody_by_their_size() -> None:
    size = by("new", 1).size
    newcomers = {"new", "small", "smaller"}
    standing = rules(lambda author: 0.25 if author in newcomers else 1.0)
    held = RolloutPool("me", standing, now=Clock(), limits=PoolLimits(bytes=64 * size, few=100))
    large = by("new", 1, tokens=480)
    assert 8 * size < large.size <= 16 * size, "above what all on probation have, within what one author has"
    assert held.add(large) == "" and large.id in held
    for seed, name in enumerate(("small", "smaller"), 2):
        held.add(by(name, seed))
    assert {kept.signed.author for kept in held} == {"small", "smaller"}


async def test_the_allowance_of_a_newcomer_has_room_for_the_largest_group_and_then_waits() -> None:
    limits = RolloutLimits()
    intake, size = IntakeLimiter(limits), int(limits.pool.share * limits.pool.bytes)
    assert intake.take_of("new", size, 0.25) and not intake.take_of("new", size, 0.25)
    assert 0 < intake.wait_for_author("new", [size], 0.25) <= limits.author.bytes.burst / limits.author.bytes.rate


def test_a_group_comes_once_even_when_it_is_gone_again() -> None:
    held = pool(few=1, share=0.001)
    first = by("one", 1)
    assert held.add(first) == "" and held.add(first) == "duplicate"
    assert held.add(by("one", 2)) == "" and first.id not in held
    assert held.add(first) == "duplicate" and held.saw(first.id)


def test_groups_that_are_too_old_by_their_date_or_by_their_arrival_are_gone() -> None:
    clock = Clock()
    held = pool(clock, seconds=100)
    assert held.add(by("one", 1, at=START - 101_000)) == "old"
    assert held.add(by("one", 2, at=START - 90_000)) == ""
    assert held.add(by("one", 3, at=START + 59_000)) == ""  # a date ahead gains nothing
    assert held.add(by("one", 4, at=START + 61_000)) == "ahead"
    clock.ms += 11_000
    held.expire()
    assert [kept.signed.packed.counter for kept in held] == [3]
    clock.ms += 90_000
    assert held.candidates(5, random.Random(1)) == () and len(held) == 0
    assert held.refused == {"old": 1, "ahead": 1} and held.dropped == {"old": 2}


def test_groups_far_behind_their_authors_newest_version_are_gone_and_others_versions_do_not_matter() -> None:
    held = pool(versions=4)
    held.add(by("one", 1, version=1))
    held.add(by("two", 2, version=1))
    held.add(by("one", 3, version=6))
    assert held.add(by("one", 4, version=1)) == "stale"
    held.expire()
    assert sorted(kept.signed.packed.counter for kept in held) == [2, 3]


def test_an_author_that_begins_anew_is_heard_once_nothing_of_before_is_held() -> None:
    clock = Clock()
    held = pool(clock, versions=4, seconds=100)
    held.add(by("one", 1, version=900))
    clock.ms += 60_000
    assert held.add(by("one", 2, at=clock.ms, version=0)) == "stale"
    clock.ms += 41_000
    held.expire()
    assert [held.add(by("one", seed, at=clock.ms, version=seed)) for seed in (3, 9, 4)] == ["", "", "stale"]


def test_own_groups_are_kept_apart_and_bounded() -> None:
    held = pool(own_groups=3)
    for seed in range(5):
        held.keep(by("me", seed))
    assert [own.packed.counter for own in held.own()] == [2, 3, 4] and len(held) == 0
    assert held.candidates(9, random.Random(1)) == ()
    assert held.add(by("me", 9)) == "own"


def test_candidates_take_turns_among_authors_and_are_drawn_once() -> None:
    held, rng = pool(few=100), random.Random(1)
    for seed in range(60):
        held.add(by("many", seed))
    for seed in range(60, 70):
        held.add(by(f"few {seed % 5}", seed))
    drawn = held.candidates(12, rng)
    assert authors(drawn) == {"many": 2} | {f"few {n}": 2 for n in range(5)}
    held.used(group.id for group in drawn)
    assert authors(held.candidates(99, rng)) == {"many": 58}
    assert {each.author: each.used for each in held.by_author()}["many"] == 2


def test_a_standing_of_nothing_lets_nothing_in_and_a_low_one_little() -> None:
    standings = {"none": 0.0, "low": 0.5}
    held = RolloutPool("me", rules(lambda author: standings.get(author, 1.0)), now=Clock(), limits=PoolLimits(few=8))
    for seed in range(10):
        held.add(by("low", seed))
    assert held.add(by("none", 20)) == "no-standing" and len(held) == 4
    standings["low"] = 0.0
    held.expire()
    assert len(held) == 0


def test_authors_on_probation_have_one_eighth_together_however_many_they_are() -> None:
    def standing(author: str) -> float:
        return 0.25 if author.startswith("new") else 1.0

    held = RolloutPool("me", rules(standing), now=Clock(), limits=PoolLimits(groups=200))
    for seed in range(100):
        held.add(by(f"good {seed % 10}", seed))
        for more in range(5):
            held.add(by(f"new {seed}", 1000 * seed + more))
            on_probation = sum(each.groups for each in held.by_author() if each.author.startswith("new"))
            assert on_probation <= max(2, len(held) / 8)
    assert held.dropped["probation"] > 300
    assert sum(each.groups for each in held.by_author() if each.author.startswith("good")) == 100
    for count in (8, 64):
        drawn = authors(held.candidates(count, random.Random(1)))
        assert 1 <= sum(n for author, n in drawn.items() if author.startswith("new")) <= count // 8
        assert drawn.total() == count
    fresh = RolloutPool("me", rules(standing), now=Clock())
    for seed in range(14):
        fresh.add(by("good", seed))
    for seed in range(14, 30):
        fresh.add(by(f"new {seed}", seed))
    assert sum(n for author, n in authors(fresh.candidates(64, random.Random(1))).items() if author != "good") == 2


def test_refusals_are_counted_by_reason_and_author_and_cost_bounded_memory() -> None:
    held = pool()
    held.note("one", "gated", 3)
    held.note("two", "gated")
    held.note("one", "too-long")
    assert held.refused == {"gated": 4, "too-long": 1}
    assert {each.author: each.refused for each in held.by_author()}["one"] == {"gated": 3, "too-long": 1}
    for number in range(3000):
        held.note(f"author {number}", f"reason {number}")
    assert len(held.by_author()) <= 1024 and len(held.refused) <= 65


def test_fresh_authors_do_not_displace_the_counts_of_those_who_were_of_use() -> None:
    clock = Clock()
    held = pool(clock, seconds=100)
    held.add(by("of use", 1))
    held.used(group.id for group in held.candidates(1, random.Random(1)))
    held.note("of use", "dishonest")
    clock.ms += 101_000
    held.expire()
    for number in range(3000):
        held.note(f"fresh {number}", "flood")
    stats = {each.author: each for each in held.by_author()}
    assert len(stats) == 1024 and "fresh 2999" in stats
    assert (stats["of use"].used, stats["of use"].refused) == (1, {"dishonest": 1})


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_shares_hold_after_groups_of_others_are_gone(share: float) -> None:
    clock = Clock()
    held = pool(clock, share=share, few=1, seconds=100)
    for seed in range(90):
        held.add(by(f"early {seed % 30}", seed))
    clock.ms += 60_000
    for seed in range(100, 200):
        held.add(by("late", seed, at=clock.ms))
    for seed in range(200, 220):
        held.add(by(f"steady {seed % 10}", seed, at=clock.ms))
    clock.ms += 60_000
    held.expire()
    assert held.stats()["groups"] > 0 and held.stats()["greatest_share"] <= max(share, 1 / len(held)) + 1e-9


def test_the_check_of_groups_lets_pass_what_somebody_can_learn_from() -> None:
    task = TaskRef("digits/swap", 5, 7)
    key = DIGITS.encode(regenerate(task).key)
    right, wrong = (*key, DIGITS.end), (*reversed(key), 0, DIGITS.end)

    def checked(answers: tuple[tuple[int, ...], ...], task: TaskRef = task, vocabulary: str = DIGITS.id) -> str:
        made = RolloutGroup(task, answers, 0, "", vocabulary)
        return informative(seal(made, run_id=RUN, author="one", counter=1, made_at=0, sign=lambda _: bytes(64)))

    assert checked((right, wrong)) == ""
    assert checked((right, right)) == checked((wrong, wrong)) == "uninformative"
    assert checked((right, wrong), task=TaskRef("no/such", 0, 0)) == "unknown-task"
    assert checked((right, wrong), vocabulary="no such") == "unknown-vocabulary"
    assert checked((right, (10_000,))) == "bad-token"
