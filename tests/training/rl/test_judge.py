"""With `judge = "task"` a right answer earns nothing where something stands beside it, for whoever wrote it."""

from __future__ import annotations

import pytest

from swarmnode.protocols.methods.rollouts.intake import informative
from swarmnode.protocols.methods.rollouts.messages import seal
from swarmnode.training.options import SettingError
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.learner import Settings
from swarmnode.training.rl.tasks import TaskRef, regenerate
from swarmnode.training.rl.trainee import Trainee
from swarmnode.training.rl.vocabulary import DIGITS
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment

TASK = TaskRef("digits/swap", 5, 7)


def spec(**rollouts: str | int) -> RunSpec:
    return parse_runspec({"run": {"name": "r"}, "task": {"name": "digits-rl"}, "rollouts": rollouts}, source="test")


def smuggled(beside: str) -> RolloutGroup:
    """Half of the answers right, with something before; half wrong. The verifier looks at the end only."""
    key = regenerate(TASK).key
    answers = tuple((*DIGITS.encode(text), DIGITS.end) for text in (beside + key, "99") * 4)
    return RolloutGroup(TASK, answers, 0, "", DIGITS.id)


@pytest.mark.parametrize(("judge", "taken"), [("none", 1), ("task", 0)])
def test_what_stands_beside_a_right_answer_teaches_nothing(judge: str, taken: int) -> None:
    task = Trainee(spec(judge=judge, warm_up=0), Assignment("r" * 64, "me"))
    task.learner.settings = Settings(judged=task.learner.settings.judged)  # without the gate
    task.rollouts(version=0)
    told = task.learn([("eve", smuggled("4").to_map())])
    assert told["taken"] == taken and told["refused"].get("uninformative", 0) == 1 - taken


def test_a_judged_group_that_teaches_nothing_ends_at_the_first_node() -> None:
    sealed = [
        seal(smuggled(beside), run_id="ab" * 32, author="eve", counter=1, made_at=1, sign=lambda payload: b"s" * 64)
        for beside in ("4", "")
    ]
    assert [informative(group) for group in sealed] == ["", ""]
    assert [informative(group, judged=True) for group in sealed] == ["uninformative", ""]


def test_a_judge_is_one_that_this_program_has() -> None:
    assert spec().run_id == spec(judge="none").run_id != spec(judge="task").run_id
    with pytest.raises(SettingError, match="task"):
        spec(judge="http://judge.example")
