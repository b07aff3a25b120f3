"""A task is a name, a difficulty and a seed: everything else is made from these, and no answer of a stranger is run."""

from __future__ import annotations

import numpy as np
import pytest
from workedtask import WORKED

from swarmnode.training.rl.tasks import MAX_SEED, NAMES, TASKS, TaskRef, UnknownTask, regenerate, well_formed
from swarmnode.training.rl.vocabulary import BYTES, DIGITS, translate


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("base", [2, 5, 10])
def test_a_question_is_made_from_its_reference_alone(name: str, base: int) -> None:
    ref = TaskRef(name, base, 12345)
    first = regenerate(ref)
    regenerate.cache_clear()
    again = regenerate(ref)
    assert (first.prompt, first.key) == (again.prompt, again.key)
    assert again.reward(again.key) == again.judged_reward(again.key) == 1.0


@pytest.mark.parametrize(
    "name, key",
    [
        ("swap", "43"),
        ("increment", "40"),
        ("sort", "34"),
        ("complement", "00"),
        ("extremes", "43"),
        ("sum", "24"),
        ("difference", "30"),
        ("larger", "44"),
        ("double", "43"),
        ("worked", "2:24"),
    ],
)
def test_each_rule_is_the_one_that_its_name_says(name: str, key: str) -> None:
    seed = next(s for s in range(10_000) if regenerate(TaskRef("digits/swap", 5, s)).prompt == "a344=")
    question = regenerate(TaskRef(f"digits/{name}", 5, seed))
    assert question.prompt[1:] == "344="
    assert question.key == key


def test_the_nine_rules_have_nine_letters_and_chance_is_small() -> None:
    questions = [regenerate(TaskRef(name, 5, seed)) for name in NAMES for seed in range(200)]
    assert len({question.prompt[0] for question in questions}) == len(NAMES) == 9
    rng = np.random.default_rng(0)
    rewards = [question.reward(well_formed(question.ref, rng)) for question in questions for _ in range(4)]
    assert 0.03 < np.mean(rewards) < 0.06


def test_the_verifier_reads_the_end_and_the_judge_reads_all() -> None:
    question = regenerate(TaskRef("digits/swap", 5, 7))
    assert question.reward("#" + question.key) == 1.0
    assert question.judged_reward("#" + question.key) == 0.0
    assert question.reward(question.key + "#") == 0.0
    worked = regenerate(TaskRef(WORKED, 5, 7))
    working, answer = worked.key.split(":")
    wrong = f"{(int(working) + 1) % 5}:{answer}"
    assert worked.reward(wrong) == 1.0
    assert worked.judged_reward(wrong) == 0.0
    assert worked.judged_reward(worked.key) == 1.0


@pytest.mark.parametrize("text", ["", ":", "::", "\x00", "9" * 10_000, "é"])
def test_no_text_upsets_a_verifier(text: str) -> None:
    for name in TASKS:
        assert regenerate(TaskRef(name, 5, 1)).judged_reward(text) == 0.0


@pytest.mark.parametrize(
    "ref, said",
    [
        (TaskRef("digits/none", 5, 1), "there is no task"),
        (TaskRef("../../etc/passwd", 5, 1), "there is no task"),
        (TaskRef("digits/swap", 11, 1), "2 to 10"),
        (TaskRef("digits/swap", 5, -1), "seed -1"),
        (TaskRef("digits/swap", 5, MAX_SEED + 1), "seed"),
    ],
)
def test_what_is_not_there_is_said(ref: TaskRef, said: str) -> None:
    with pytest.raises(UnknownTask, match=said):
        regenerate(ref)


def test_vocabularies_write_what_they_read_and_carry_the_end_over() -> None:
    ids = [*DIGITS.encode("a304=40"), DIGITS.end]
    assert DIGITS.decode(ids) == "a304=40"
    as_bytes = translate(ids, DIGITS, BYTES)
    assert as_bytes[-1] == BYTES.end and BYTES.decode(as_bytes) == "a304=40"
    assert translate(as_bytes, BYTES, DIGITS) == ids
    assert translate(ids[:-1], DIGITS, BYTES)[-1] != BYTES.end
    with pytest.raises(ValueError, match="'x'"):
        translate(BYTES.encode("x"), BYTES, DIGITS)
    assert BYTES.decode([255, 254]) == "\ufffd\ufffd"
