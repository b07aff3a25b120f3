"""Groups travel bounded and checked, and what they are worth is found by the receiver alone."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from swarmnode.training.rl.groups import GroupError, RefusedGroup, RolloutGroup, group_advantages, score
from swarmnode.training.rl.tasks import TaskRef, regenerate
from swarmnode.training.rl.vocabulary import BYTES, DIGITS, translate

REF = TaskRef("digits/swap", 5, 7)
KEY = [*DIGITS.encode(regenerate(REF).key), DIGITS.end]
WRONG = [*DIGITS.encode("99"), DIGITS.end]


def a_group(*answers: list[int], **changed: Any) -> RolloutGroup:
    made = RolloutGroup(REF, tuple(map(tuple, answers or (KEY, WRONG, WRONG, WRONG))), 3, "ab" * 32, DIGITS.id)
    return replace(made, **changed)


def test_a_group_comes_out_of_msgpack_as_it_went_in() -> None:
    for group in (a_group(), a_group([70_000], [3, 300])):
        assert RolloutGroup.from_map(msgpack.unpackb(msgpack.packb(group.to_map()))) == group


@pytest.mark.parametrize(
    "key, value",
    [
        ("task", ["digits/swap", 5]),
        ("task", ["digits/swap", 5, -1]),
        ("task", ["digits/swap", 5.0, 1]),
        ("task", ["", 5, 1]),
        ("task", 7),
        ("lengths", []),
        ("lengths", [0, 12]),
        ("lengths", [-3, 3, 3, 3]),
        ("lengths", [-1, 13]),  # slices that end before the last token
        ("lengths", [3, "3"]),
        ("lengths", [13]),
        ("lengths", [1 << 60]),
        ("lengths", None),
        ("width", 0),
        ("width", 4),
        ("width", "1"),
        ("logprobs", True),
        ("content", b""),
        ("content", bytes(13)),
        ("content", "tokens"),
        ("content", None),
        ("version", -1),
        ("policy", "x" * 129),
        ("policy", 7),
        ("vocabulary", None),
    ],
)
def test_what_is_no_group_is_refused_with_one_kind_of_error(key: str, value: object) -> None:
    with pytest.raises(GroupError):
        RolloutGroup.from_map({**a_group().to_map(), key: value})


@pytest.mark.parametrize(
    "changed",
    [
        {"answers": ()},
        {"answers": ((),)},
        {"answers": ((1, "2"),)},
        {"answers": ((True, 2),)},
        {"answers": ((-1,),)},
        {"answers": ((1 << 24,),)},
        {"answers": ((1,),) * 65},
        {"answers": ((1,) * 4097,)},
        {"logprobs": ((-1.0,),)},
        {"logprobs": ((0.5,) * 3,) * 4},
        {"logprobs": ((float("nan"),) * 3,) * 4},
        {"logprobs": ((float("-inf"),) * 3,) * 4},
        {"logprobs": (("a",) * 3,) * 4},
    ],
    ids=str,
)
def test_a_group_beyond_its_limits_is_not_made(changed: dict[str, Any]) -> None:
    with pytest.raises(GroupError):
        a_group(**changed)


def test_a_missing_field_is_a_group_error() -> None:
    for key in a_group().to_map():
        sent = a_group().to_map()
        del sent[key]
        with pytest.raises(GroupError):
            RolloutGroup.from_map(sent)


def test_rewards_are_recomputed_and_claimed_ones_are_not_even_read() -> None:
    sent = {**a_group().to_map(), "rewards": [0.0, 1.0, 1.0, 1.0], "key": "99"}
    np.testing.assert_array_equal(score("peer", RolloutGroup.from_map(sent)).rewards, [1, 0, 0, 0])


def test_text_in_bytes_earns_what_it_earns_in_digits() -> None:
    as_text = [translate(answer, DIGITS, BYTES) for answer in (KEY, WRONG)]
    np.testing.assert_array_equal(score("peer", a_group(*as_text, vocabulary=BYTES.id)).rewards, [1, 0])


def test_an_answer_that_did_not_end_earns_nothing() -> None:
    np.testing.assert_array_equal(score("peer", a_group(KEY[:-1], KEY)).rewards, [0, 1])


@pytest.mark.parametrize(
    "group, reason",
    [
        (a_group(task=TaskRef("digits/none", 5, 1)), "unknown-task"),
        (a_group(task=TaskRef("digits/swap", 99, 1)), "unknown-task"),
        (a_group(vocabulary="gpt-9"), "unknown-vocabulary"),
        (a_group([DIGITS.size]), "bad-token"),
        (a_group([*KEY, DIGITS.end]), "bad-token"),
    ],
)
def test_groups_of_no_use_are_refused_with_a_reason_to_count(group: RolloutGroup, reason: str) -> None:
    with pytest.raises(RefusedGroup) as refused:
        score("peer", group)
    assert refused.value.reason == reason


def test_advantages_are_rewards_against_their_group() -> None:
    # One right of four: mean 1/4, deviation sqrt(3)/4.
    np.testing.assert_allclose(
        group_advantages(np.array([1, 0, 0, 0], np.float32), np.ones(4, bool)), [3**0.5] + [-(3**-0.5)] * 3, rtol=1e-6
    )
    assert not group_advantages(np.ones(8, np.float32), np.ones(8, bool)).any()
    assert not group_advantages(np.zeros(8, np.float32), np.ones(8, bool)).any()


def test_an_answer_that_a_defence_refused_does_not_count_in_its_group() -> None:
    scored = score("peer", a_group())
    assert scored.informative
    without_right = replace(scored, kept=np.array([False, True, True, True]))
    assert not without_right.informative and not without_right.advantages.any()
    without_one = replace(scored, kept=np.array([True, True, True, False]))
    np.testing.assert_allclose(without_one.advantages, [2**0.5, -(2**-0.5), -(2**-0.5), 0], rtol=1e-6)


def test_a_group_with_fewer_answers_keeps_their_chances() -> None:
    whole = RolloutGroup(
        TaskRef("digits/swap", 5, 3),
        ((1, 2), (3,), (4, 5)),
        0,
        "",
        DIGITS.id,
        ((-1.0, -2.0), (-3.0,), (-4.0, -5.0)),
    )
    fewer = whole.only(np.array([True, False, True]))
    assert fewer.answers == ((1, 2), (4, 5)) and fewer.logprobs == ((-1.0, -2.0), (-4.0, -5.0))
    assert whole.only(np.array([True, True, True])) is whole


def test_more_tokens_than_a_group_may_have_are_refused_before_they_are_read() -> None:
    """Each byte of 2^25 would become a number of Python's: hundreds of MB of whoever decodes it."""
    many = 1 << 25
    tracemalloc.start()
    with pytest.raises(GroupError, match="the number of tokens"):
        RolloutGroup.from_map({**a_group().to_map(), "lengths": [many], "content": bytes(many)})
    assert tracemalloc.get_traced_memory()[1] < 2 * many
    tracemalloc.stop()
