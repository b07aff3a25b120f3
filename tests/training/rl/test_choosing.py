"""What is asked, and what is learned from: levels solved half of the time, groups that teach, no peer's batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.training.rl.curriculum import Curriculum
from swarmnode.training.rl.groups import RolloutGroup, Scored, score
from swarmnode.training.rl.grpo import AdaptiveSplit, BatchLimits, Split, choose
from swarmnode.training.rl.tasks import TaskRef, regenerate
from swarmnode.training.rl.vocabulary import DIGITS

UP_TO_EIGHT = AdaptiveSplit(candidates=(0, 4, 8), external=8)
LIMITS = BatchLimits()


def scored(
    author: str, seed: int, right: int = 1, *, answers: int = 8, version: int = 0, length: int = 3, base: int = 5
) -> Scored:
    ref = TaskRef("digits/swap", base, seed)
    padding = DIGITS.encode("#" * (length - 3))
    key = (*padding, *DIGITS.encode(regenerate(ref).key), DIGITS.end)
    wrong = (*padding, *DIGITS.encode("99"), DIGITS.end)
    group = RolloutGroup(ref, (key,) * right + (wrong,) * (answers - right), version, "", DIGITS.id)
    return score(author, group)


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_j_external_groups_are_drawn() -> None:
    taken, refused = choose([scored(f"peer{s}", s) for s in range(10)], Split(4, 4), LIMITS, rng(), author="me")
    assert len(taken) == 4 == len({group.author for group in taken})
    assert refused == Counter({"not-drawn": 6})


@pytest.mark.parametrize("right", [0, 8])
def test_groups_without_advantage_are_dropped(right: int) -> None:
    pool = [scored("a", 1, right), scored("b", 2, 3)]
    taken, refused = choose(pool, Split(0, 4), LIMITS, rng())
    assert [group.author for group in taken] == ["b"]
    assert refused["uninformative"] == 1
    assert len(choose(pool, Split(0, 4), replace(LIMITS, filtered=False), rng())[0]) == 2


@pytest.mark.parametrize("flood", [10, 90, 900])
def test_a_peer_that_floods_the_pool_has_no_more_than_the_cap(flood: int) -> None:
    pool = [scored("flood", s) for s in range(flood)] + [scored(f"peer{s}", s) for s in range(4)]
    taken, _ = choose(pool, Split(2, 6), LIMITS, rng())
    shares = Counter(group.author for group in taken)
    assert shares["flood"] <= 2 == LIMITS.share * 8
    assert len(taken) == 6


def test_what_we_wrote_ourselves_does_not_come_back_as_external() -> None:
    assert choose([scored("me", 1)], Split(4, 4), LIMITS, rng(), author="me") == ([], Counter({"own": 1}))


def test_the_draw_is_uniform_and_follows_from_the_seed() -> None:
    pool = [scored(f"peer{s}", s) for s in range(8)]
    draws = Counter(
        group.author
        for seed in range(400)
        for group in choose(pool, Split(0, 2), LIMITS, np.random.default_rng(seed))[0]
    )
    assert all(60 < count < 145 for count in draws.values())  # 100 expected
    assert choose(pool, Split(0, 2), LIMITS, rng()) == choose(pool, Split(0, 2), LIMITS, rng())


def test_an_author_on_probation_has_a_quarter_of_the_share_of_another() -> None:
    limits = replace(LIMITS, share=0.5, probation=1.0)
    pool = [scored(author, seed) for author in ("new", "known") for seed in range(16)]
    for batch, of_new in ((16, 2), (4, 1)):
        taken, refused = choose(pool, Split(0, batch), limits, rng(), probation={"new"})
        assert Counter(group.author for group in taken) == {"new": of_new, "known": batch // 2}
        assert refused == {"capped": 32 - of_new - batch // 2}


def test_adaptive_j_falls_to_none_where_others_hurt_and_rises_when_they_do_no_more() -> None:
    def after(trials: int, gained: dict[int, float], split: AdaptiveSplit) -> AdaptiveSplit:
        for _ in range(trials):
            split = split.observe(gained)
        return split

    hurt = after(5, {0: 0.01, 4: 0.0, 8: -0.02}, UP_TO_EIGHT)
    assert hurt.external == 0
    assert after(20, {0: 0.01, 4: 0.02, 8: 0.03}, hurt).external == 8
    assert after(20, {0: 0.01, 4: 0.03, 8: 0.01}, hurt).external == 4


def test_one_unlucky_trial_does_not_turn_adaptive_j() -> None:
    split = UP_TO_EIGHT
    for gain in (0.03, 0.02, 0.03, 0.02, 0.03):
        split = split.observe({0: 0.01, 4: 0.02, 8: gain})
    assert split.observe({0: 0.01, 4: 0.02, 8: 0.0}).external == 8


def test_noise_alone_seldom_lowers_adaptive_j_and_harm_beyond_it_does() -> None:
    rng = np.random.default_rng(1)

    def bounds(harm: float) -> float:
        """Mean of the bound in the last of 30 trials, over 50 nodes."""
        last = []
        for _ in range(50):
            split = UP_TO_EIGHT
            for _ in range(30):
                zero, four, eight = rng.normal(0, 0.01, 3)
                split = split.observe({0: zero, 4: four - harm / 2, 8: eight - harm})
            last.append(split.external)
        return float(np.mean(last))

    assert bounds(0.0) > 7
    assert bounds(0.03) < 1


def test_an_adaptive_round_has_an_update_for_every_few_groups_that_teach() -> None:
    own = [scored("me", 1), scored("me", 2, right=0), scored("me", 3)]
    others = [scored("other", seed) for seed in range(7)]
    split = AdaptiveSplit(step=4)
    assert split.room(own, 8) == Split(2, 8, 8) and Split(4, 4).room(own, 4) == Split(3, 4)
    updates = split.updates([*own, *others], rng())
    assert [len(groups) for groups in updates] == [3, 3, 3]
    teaching = [own[0], own[2], *others]
    assert sorted(map(id, teaching)) == sorted(id(each) for groups in updates for each in groups)
    assert updates != [teaching[:3], teaching[3:6], teaching[6:]], "own ones would come first in every round"
    assert split.updates(own[1:2], rng()) == [[]] and Split(4, 4).updates(own, rng()) == [own]


def test_an_author_has_its_share_of_what_there_is_and_not_of_all_that_might_be_taken() -> None:
    pool = [scored("liar", seed) for seed in range(8)]
    pool += [scored(f"peer{peer}", seed) for peer in range(6) for seed in range(2)]
    taken, refused = choose(pool, Split(2, 24, 8), LIMITS, rng())
    assert Counter(group.author for group in taken)["liar"] == 4 == (2 + 12 + 4) // 4
    assert len(taken) == 16 and refused == {"capped": 4}


@pytest.mark.parametrize(("honest", "most"), [(0, 2), (3, 2), (12, 6)])
def test_a_flood_of_groups_widens_neither_its_authors_share_nor_that_of_newcomers(honest: int, most: int) -> None:
    known = [scored(f"peer{peer}", seed) for peer in range(honest) for seed in range(2)]
    flood = [scored("liar", seed) for seed in range(200)]
    taken, _ = choose([*flood, *known], Split(2, 24, 8), LIMITS, rng())
    assert Counter(group.author for group in taken)["liar"] <= most
    sybils = [scored(f"sybil{number}", 1) for number in range(200)]
    taken, _ = choose([*sybils, *known], Split(2, 24, 8), LIMITS, rng(), probation={each.author for each in sybils})
    assert sum(group.author.startswith("sybil") for group in taken) <= max(1, (2 + len(known)) // 8)


def test_authors_on_probation_have_one_eighth_of_a_batch_together_however_many_they_are() -> None:
    limits = replace(LIMITS, share=0.5)
    sybils = [scored(f"new{number}", number) for number in range(20)]
    honest = [scored(f"good{number}", 100 + number) for number in range(3)]
    for batch in (8, 16):
        new = {group.author for group in sybils}
        taken, refused = choose([*sybils, *honest], Split(batch - 6, 6), limits, rng(), probation=new)
        authors = [group.author for group in taken]
        assert sum(author.startswith("new") for author in authors) == batch // 8
        assert sum(author.startswith("good") for author in authors) == 3
        assert refused["probation"] > 10


LEVELS = (("digits/swap", 2), ("digits/swap", 3), ("digits/swap", 4))


def a_round(*right: int) -> list[Scored]:
    """Two groups of each level, in each of which so many of eight answers are right."""
    return [scored("me", seed, n, base=base) for n, (_, base) in zip(right, LEVELS, strict=True) for seed in (1, 2)]


def drawn_of(curriculum: Curriculum, count: int = 9) -> Counter[int]:
    """How often each level is drawn in 200 rounds, by its base."""
    chance = rng()
    return Counter(base for _ in range(200) for _, base in curriculum.drawn(count, chance))


def test_what_is_solved_half_of_the_time_is_asked_most_and_what_always_or_never_is_hardly() -> None:
    curriculum = Curriculum(LEVELS, 0.5)
    for _ in range(30):
        curriculum.saw(a_round(8, 4, 0))
    asked = drawn_of(curriculum)
    assert asked[3] > 0.9 * sum(asked.values())
    for _ in range(30):
        curriculum.saw(a_round(8, 7, 4))  # the second was learned, and the third is no longer too hard
    later = drawn_of(curriculum)
    assert later[4] > 1.5 * later[3] > 0 and later[2] < 0.1 * later[4]


def test_levels_are_drawn_alike_before_anything_was_seen() -> None:
    assert all(200 < count < 340 for count in drawn_of(Curriculum(LEVELS, 0.5)).values())  # 267 expected


@pytest.mark.parametrize(("count", "part", "chosen"), [(8, 0.5, 4), (8, 1.0, 7), (8, 0.0, 0), (1, 1.0, 0), (0, 1.0, 0)])
def test_some_questions_are_always_left_to_chance(count: int, part: float, chosen: int) -> None:
    assert len(Curriculum(LEVELS, part).drawn(count, rng())) == chosen


def test_groups_of_levels_that_the_run_does_not_ask_move_nothing() -> None:
    curriculum = Curriculum(LEVELS, 0.5)
    before = curriculum.scores.tolist()
    curriculum.saw([scored("stranger", seed, 4, base=10) for seed in range(50)])
    assert curriculum.scores.tolist() == before
