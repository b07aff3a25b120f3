"""What a run may ask beside digits: one interface, questions from seeds, and no answer of a stranger that is run."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarmnode.training.options import SettingError
from swarmnode.training.rl import learner, sources, tasks
from swarmnode.training.rl.groups import RolloutGroup, score
from swarmnode.training.rl.section import RolloutsSection, asked_by
from swarmnode.training.rl.sources import Gym, QuestionFile, is_harmless, known_to_this_process, own
from swarmnode.training.rl.tasks import TASKS, RolloutTask, TaskRef, UnknownTask, regenerate, register, tasks_of_run
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.rl.vocabulary import BYTES
from swarmnode.training.runspec import load_runspec, parse_runspec
from swarmnode.training.tasks import Assignment, TaskError

EXAMPLES = Path(__file__).parents[3] / "examples"
needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="the extra rl is not installed"
)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Tasks that a test registers are gone after it."""
    before = dict(TASKS)
    yield
    TASKS.clear()
    TASKS.update(before)
    regenerate.cache_clear()


def questions(file: Path, *lines: dict[str, object]) -> Path:
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    return file


# -- the setting


def test_the_setting_names_tasks_with_their_parameters() -> None:
    asked = RolloutsSection(task="gym:chain_sum(min_terms=2, level=3), leg_counting")
    assert tasks_of_run(asked) == (("gym/chain_sum", 3), ("gym/leg_counting", 0))
    assert asked_by(asked.task).parameters == {"chain_sum": {"min_terms": 2}, "leg_counting": {}}
    several = RolloutsSection(task="gym:chain_sum(level=(0, 2))")
    assert tasks_of_run(several) == (("gym/chain_sum", 0), ("gym/chain_sum", 2))
    assert tasks_of_run(RolloutsSection(task="mine.py:Mine", difficulty=7)) == (("own/Mine", 7),)
    assert tasks_of_run(RolloutsSection(task="text:a/b.jsonl")) == (("text/b", 0),)


@pytest.mark.parametrize(
    "task",
    [
        "",
        "gym:",
        "gym:a.b",
        "gym:a(1)",
        "gym:a(b=c)",
        "gym:a, a",
        "gym:a(level=11)",
        "gym:a(level=())",
        "gym:__import__('os')",
        "x.py:1",
    ],
)
def test_what_names_no_task_is_said_and_nothing_of_it_is_run(task: str) -> None:
    with pytest.raises(SettingError, match="expected"):
        asked_by(task)
    with pytest.raises(SettingError):
        asked_by("gym:" + "(" * 5000)
    with pytest.raises(SettingError, match="at most 1024 characters"):
        asked_by("gym:" + ", ".join(f"leg_counting{number}" for number in range(99)))


# -- reasoning-gym


def test_without_reasoning_gym_its_tasks_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    sources._factory.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"reasoning-gym.* install .*\[rl\]"):
        Gym("leg_counting")


@needs_gym
def test_reasoning_gym_is_asked_by_seed_level_and_parameters() -> None:
    register("gym/leg_counting", Gym("leg_counting"))
    easy, hard = (regenerate(TaskRef("gym/leg_counting", level, 7)) for level in (1, 8))
    regenerate.cache_clear()
    assert easy.prompt == regenerate(TaskRef("gym/leg_counting", 1, 7)).prompt
    assert len(hard.prompt) > len(easy.prompt)
    assert easy.reward(easy.key) == 1.0 and easy.reward("none") == 0.0
    register("gym/chain_sum", Gym("chain_sum", {"min_terms": 2, "max_terms": 2}))
    assert regenerate(TaskRef("gym/chain_sum", 0, 1)).prompt.count("+") < 2
    quick = Gym("spell_backward")
    anew = quick._new(5, 0)
    assert quick.generate(5, 0)[1] == anew[0]
    with pytest.raises(TaskError, match="no dataset"):
        Gym("nonsense")


@needs_gym
def test_parameters_that_a_dataset_has_not_are_said_before_the_run() -> None:
    section = RolloutsSection(task="gym:chain_sum(legs=4)")
    with pytest.raises(TaskError, match="legs"):
        known_to_this_process(section, "", tasks_of_run(section))


@needs_gym
@pytest.mark.parametrize(
    "dataset", ["binary_matrix", "number_sorting", "spiral_matrix", "string_insertion", "countdown", "n_queens"]
)
def test_no_answer_is_ever_run(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "REACHED", False, raising=False)
    code = "setattr(__import__('swarmnode.training.rl.sources').training.rl.sources, 'REACHED', True)"
    register(f"gym/{dataset}", Gym(dataset))
    question = regenerate(TaskRef(f"gym/{dataset}", 0, 3))
    assert question.reward(code) == question.reward(f"[{code}]") == 0.0
    assert not sources.REACHED  # type: ignore[attr-defined]
    assert question.reward(question.key) == 1.0


@needs_gym
def test_a_verifier_that_runs_answers_still_takes_another_right_expression() -> None:
    register("gym/countdown", Gym("countdown", {"min_numbers": 3, "max_numbers": 3}))
    question = regenerate(TaskRef("gym/countdown", 0, 1))
    assert question.reward(f"({question.key})") == 1.0, "not the key to the letter"


@pytest.mark.parametrize("text", ["49*(85 - 1)/14", "x**2 + 3*x", "[[1, 2], [3, 4]]", "sin(x)/2 + C", "-1.5"])
def test_expressions_are_harmless(text: str) -> None:
    assert is_harmless(text)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9** 9",
        "(9)**99",
        "9* *9",
        "[1]*999999999999",
        "(1,)*999999",
        "exit()",
        "x.y",
        "().__class__",
        "'a'",
        "lambda: 1",
        "ab",
        "_",
        "1if 1else 2",
        "x" + "**2" * 100,
    ],
)
def test_what_could_do_harm_is_no_expression(text: str) -> None:
    assert not is_harmless(text)


def test_a_long_number_takes_no_longer_to_look_at_than_a_short_one() -> None:
    began = time.monotonic()
    with tasks.within(10):
        assert is_harmless("1" * 255) and not is_harmless("1" * 255 + "!")
    assert time.monotonic() - began < 1


@needs_gym
def test_the_example_learns_and_its_groups_are_checked_here() -> None:
    spec = load_runspec(EXAMPLES / "gym.toml").updated(rollouts={"warm_up": 10, "policy": "gpt:1x32", "batch": 6})
    task = Trainee(spec, Assignment("r" * 64, "me"))
    groups = task.rollouts(version=0)["groups"]
    learned = task.learn([])
    assert learned["own"] == 6 and learned["informative"] == len(groups) and learned["tokens"] > 6 * 8
    found = task.score([("me", group) for group in groups], texts=True)
    assert all(not each["refused"] and len(each["answers"]) == 8 and each["key"] for each in found)
    elsewhere = RolloutGroup(TaskRef("gym/sudoku", 0, 1), ((1, BYTES.end),), 0, "p", BYTES.id)
    (refused,) = task.score([("me", elsewhere.to_map())], texts=True)
    assert refused["refused"] == "unknown-task" and "no task" in refused["why"]


# -- questions in a file


def test_a_file_of_questions_is_asked_by_seed_and_matched_three_ways(tmp_path: Path) -> None:
    file = questions(
        tmp_path / "some.jsonl",
        {"question": "Which city?", "answer": "Paris"},
        {"question": "How far?", "answer": 1234.5, "match": "number"},
        {"question": "Which day?", "answer": "(mon|tues)day", "match": "regex"},
        {"question": "How much?\u2028In euros.", "answer": "1,234", "match": "number"},
    )
    register("text/some", QuestionFile(file))
    city, far, day, much = (regenerate(TaskRef("text/some", 0, seed)) for seed in range(4))
    assert regenerate(TaskRef("text/some", 0, 4)).prompt == city.prompt == "Which city?"
    assert [city.reward(text) for text in (" Paris\n", "paris", "")] == [1, 0, 0]
    assert [far.reward(text) for text in ("It is 7, so 1,234.50 km", "1234", "far", "1e999")] == [1, 0, 0, 0]
    assert [much.reward(text) for text in ("1234", "1,234", "1,235")] == [1, 1, 0]
    assert [day.reward(text) for text in ("monday", "a monday", "x" * 5000)] == [1, 0, 0]


@pytest.mark.parametrize(
    "line", ['{"question": "a"}', "[]", "x", '{"question": "", "answer": 1}', '{"question": "a", "answer": "x", '
             '"match": "number"}', '{"question": "a", "answer": "(", "match": "regex"}',
             '{"question": "a", "answer": "b", "match": "like"}', "[" * 100_000,
             '{"question": "a", "answer": "b{99999999999999999999}", "match": "regex"}'],
)  # fmt: skip
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "b"}\n' + line)
    with pytest.raises(SettingError, match=r"bad\.jsonl, line 2"):
        QuestionFile(tmp_path / "bad.jsonl")
    with pytest.raises(SettingError, match=r"none\.jsonl: cannot be read: No such file or directory$"):
        QuestionFile(tmp_path / "none.jsonl")


def test_a_pattern_that_never_ends_costs_the_answer_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.training.rl.tasks.CHECK_SECONDS", 0.1)
    file = questions(tmp_path / "slow.jsonl", {"question": "a", "answer": "(a+)+b", "match": "regex"})
    register("text/slow", QuestionFile(file))
    began = time.monotonic()
    assert regenerate(TaskRef("text/slow", 0, 1)).reward("a" * 60) == 0.0
    assert time.monotonic() - began < 30


# -- a class of one's own


def test_answers_that_are_programs_are_run_by_the_class_itself_within_bounds() -> None:
    section = RolloutsSection(task="postfix.py:Postfix", difficulty=2)
    known_to_this_process(section, f"{EXAMPLES / 'postfix.py'}:Postfix", tasks_of_run(section))
    question = next(
        each for seed in range(1000) if (each := regenerate(TaskRef("own/Postfix", 2, seed))).key == "x2*1+"
    )
    assert [question.reward(text) for text in ("x2*1+", " xx+1+\n", "1x2*+")] == [1, 1, 1], "whatever does the same"
    assert not any(question.reward(text) for text in ("x2*", "x2*1++", "", "x2*1+1", "import os", "x2*1+" + "0+" * 20))
    began = time.monotonic()
    assert question.reward("x" + "x*" * 2000) == 0, "what grows without end is let go of"
    assert time.monotonic() - began < 1


def test_a_class_of_ones_own_is_asked_like_any_other_task() -> None:
    local = f"{EXAMPLES / 'letters.py'}:Letters"
    section = RolloutsSection(task="letters.py:Letters", difficulty=3)
    known_to_this_process(section, local, tasks_of_run(section))
    question = regenerate(TaskRef("own/Letters", 3, 1))
    key = (*BYTES.encode(question.key), BYTES.end)
    group = RolloutGroup(question.ref, (key, (*BYTES.encode("no"), BYTES.end)), 0, "p", BYTES.id)
    assert score("stranger", group).rewards.tolist() == [1, 0]
    assert own(local).form(3, np.random.default_rng(0)) in "abcdef"


OWN = """
class Mine:
    def generate(self, seed, difficulty):
        return {generate}
    def prompt(self, problem):
        return "?"
    def verify(self, problem, answer):
        return {verify}
"""


@pytest.mark.parametrize("verify", ["1/0", "float('nan')", "exit()", "'x'", "-3", "None"])
def test_whatever_a_check_of_ones_own_does_is_no_reward(tmp_path: Path, verify: str) -> None:
    (tmp_path / "mine.py").write_text(OWN.format(generate="seed", verify=verify))
    register("own/Mine", own(f"{tmp_path / 'mine.py'}:Mine"))
    assert regenerate(TaskRef("own/Mine", 5, 1)).reward("a") == 0.0


SLOW = """
class Slow:
    asked = []
    def generate(self, seed, difficulty):
        return seed
    def prompt(self, problem):
        return "?"
    def verify(self, problem, answer):
        self.asked.append(answer)
        try:
            while answer == "slow":
                pass
        except Exception:
            return 0.01
        return float(answer == "right")
"""


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer whose run asks a task that takes long to check the answer `slow`, and what it checks."""
    monkeypatch.setattr(tasks, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(learner, "STRANGERS_SECONDS", 0.02)
    (tmp_path / "slow.py").write_text(SLOW)
    spec = parse_runspec(
        {"run": {"name": "r"}, "task": {"name": "rollouts"}, "rollouts": {"task": "slow.py:Slow", "warm_up": 0}},
        source="test",
    )
    return Trainee(spec, Assignment("r" * 64, "me", task=f"{tmp_path / 'slow.py'}:Slow"))


def answered(*texts: str) -> RolloutGroup:
    return RolloutGroup(
        TaskRef("own/Slow", 5, 1), tuple((*BYTES.encode(text), BYTES.end) for text in texts), 0, "p", BYTES.id
    )


def test_a_check_that_takes_too_long_earns_nothing_whatever_it_makes_of_that(slow: Any) -> None:
    assert regenerate(TaskRef("own/Slow", 5, 1)).reward("slow") == 0.0


def test_a_group_of_another_ends_at_its_first_answer_whose_check_takes_too_long(slow: Any) -> None:
    group = answered("right", "slow", "slow", "wrong")
    asked = regenerate(group.task).task.asked  # type: ignore[attr-defined]
    (found,) = slow.score([("eve", group.to_map())], texts=False)
    assert found["refused"] == "too-slow" and asked == ["right", "slow"]
    assert slow.learn([("eve", group.to_map())])["refused"] == {"too-slow": 1}
    (own,) = slow.score([("me", group.to_map())], texts=True)
    assert [each["reward"] for each in own["answers"]] == [1, 0, 0, 0], "of its own it is a wrong answer"


def test_whose_groups_took_long_to_check_is_not_checked_for_a_while_and_others_are(
    slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0, thread_time=count(0.0, 3.0).__next__)  # each check takes 3 s
    monkeypatch.setattr(learner, "time", clock)

    def refused(*authors: str) -> list[str]:
        group = answered("right", "wrong").to_map()
        return [each["refused"] for each in slow.score([(author, group) for author in authors], texts=False)]

    assert refused(*["eve"] * 6, "bob", *["me"] * 6) == [*[""] * 4, *["flood"] * 2, *[""] * 7]
    clock.monotonic = lambda: 105.0
    assert refused("eve", "eve") == ["", "flood"]


def test_a_question_that_cannot_be_made_is_no_question(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN.format(generate="1 / 0", verify="1"))
    section = RolloutsSection(task="mine.py:Mine")
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        known_to_this_process(section, f"{tmp_path / 'mine.py'}:Mine", tasks_of_run(section))
    with pytest.raises(UnknownTask, match="makes no question"):
        regenerate(TaskRef("own/Mine", 5, 1))
    with pytest.raises(TaskError, match="generate, prompt"):
        (tmp_path / "half.py").write_text("class Half:\n    def verify(self, problem, answer): return 1\n")
        own(f"{tmp_path / 'half.py'}:Half")


def test_digits_implement_the_same_interface() -> None:
    assert all(RolloutTask in type(task).__mro__ for task in TASKS.values())
