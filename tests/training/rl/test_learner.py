"""One node's round: what it learns from, what it counts as its own, and that all of it follows from seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from workedtask import WORKED

from swarmnode.testing.learners import start_from
from swarmnode.training.options import SettingError
from swarmnode.training.rl import policies
from swarmnode.training.rl.defence import TokenGate
from swarmnode.training.rl.groups import RolloutGroup, score
from swarmnode.training.rl.grpo import AdaptiveSplit, BatchLimits, Split
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build, parameter_hash
from swarmnode.training.rl.sampling import Sampling
from swarmnode.training.rl.tasks import TASKS, RolloutTask, TaskRef, UnknownTask, regenerate, well_formed
from swarmnode.training.rl.vocabulary import BYTES, DIGITS

SPEC = PolicySpec(layers=1, width=32, heads=4)
SETTINGS = Settings(
    tasks=(("digits/swap", 2), ("digits/sort", 2)),  # base 2: a quarter of well-formed answers is right
    split=Split(2, 2),
    sampling=Sampling(max_tokens=4),
)
OTHERS = ("a", "b", "c", "d")


def a_learner(settings: Settings = SETTINGS, *, seed: int = 1, warm: bool = True) -> Learner:
    learner = Learner("me", build(SPEC, seed=1), settings, seed=seed)
    if warm:
        learner.warm_up(well_formed, steps=40)
    return learner


@pytest.fixture(scope="module")
def warm() -> Callable[..., Learner]:
    """Learners that begin from the same warmed-up parameters."""
    first = a_learner()

    def made(settings: Settings = SETTINGS, *, seed: int = 1, spec: PolicySpec = SPEC) -> Learner:
        learner = Learner("me", build(spec, seed=1), settings, seed=seed)
        start_from(learner, first)
        return learner

    return made


@pytest.mark.parametrize("correction", ["none", "taper", "decoupled"])
def test_what_one_pass_would_take_too_much_memory_for_is_learned_from_in_several(
    correction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, correction=correction)
    at_once, in_parts = a_learner(settings, warm=False), a_learner(settings, warm=False)
    at_once.warm_up(well_formed, steps=20)
    proved = [score("s", external(70 + n, "right", "99", "98", "97")) for n in range(2)]
    learned, told = at_once.learn(at_once.sample(), pool(), proved), at_once.heldout(50, seed=1)
    assert learned.loss and learned.sampled == 2
    monkeypatch.setattr(policies, "LOGITS", 7 * 9 * DIGITS.size)  # some seven texts
    in_parts.warm_up(well_formed, steps=20)
    again = in_parts.learn(in_parts.sample(), pool(), proved)
    assert again.loss == pytest.approx(learned.loss, abs=1e-5)
    assert in_parts.heldout(50, seed=1) == pytest.approx(told, abs=1e-4)
    for one, other in zip(at_once.policy.parameters(), in_parts.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_without_a_limit_of_the_gradient_a_step_is_that_of_one_that_no_gradient_exceeds(
    warm: Callable[..., Learner],
) -> None:
    unlimited, limited = (warm(replace(SETTINGS, clip_norm=most)) for most in (0.0, 1e6))
    before = parameter_hash(limited.policy)
    for learner in (unlimited, limited):
        learner.learn(learner.sample(), pool())
    assert parameter_hash(unlimited.policy) == parameter_hash(limited.policy) != before


def external(seed: int, *texts: str, base: int = 2) -> RolloutGroup:
    """Answers to `digits/swap`; "right" stands for the key."""
    ref = TaskRef("digits/swap", base, seed)
    written = [regenerate(ref).key if text == "right" else text for text in texts]
    return RolloutGroup(ref, tuple((*DIGITS.encode(text), DIGITS.end) for text in written), 0, "", DIGITS.id)


def pool() -> list[tuple[str, RolloutGroup]]:
    return [(author, external(n, "right", "99", "98", "97")) for n, author in enumerate(OTHERS)]


def test_equal_seeds_and_pools_give_equal_parameters(warm: Callable[..., Learner]) -> None:
    hashes, rewards = set(), set()
    for _ in range(2):
        learner = warm()
        reports = [learner.learn(learner.sample(), pool()) for _ in range(3)]
        hashes.add(parameter_hash(learner.policy))
        rewards.add(tuple(report.reward for report in reports))
    assert len(hashes) == len(rewards) == 1
    other = warm(seed=2)
    other.learn(other.sample(), pool())
    assert parameter_hash(other.policy) not in hashes


@pytest.mark.parametrize(("digits", "refused"), [(7, 0), (8, 1)])
def test_of_answers_that_are_far_longer_than_its_own_a_policy_learns_nothing(
    warm: Callable[..., Learner], digits: int, refused: int
) -> None:
    """The loss weighs tokens: one group of long answers would be most of an update."""
    learner = warm(replace(SETTINGS, sampling=Sampling(max_tokens=2)))
    longer = external(1, "right", "99", "98", "9" * digits)
    report = learner.learn(learner.sample(), [("other", longer)])
    assert report.refused.get("too-long", 0) == refused
    assert report.taken == 1 - refused


def test_a_reward_is_that_of_questions_that_were_not_chosen(warm: Callable[..., Learner]) -> None:
    learner = warm(replace(SETTINGS, split=Split(8, 0), curriculum=0.75))
    own = learner.sample()
    alike = own[:2]  # a quarter
    report = learner.learn(own, [])
    assert report.own == 8 and report.reward == pytest.approx(np.mean([scored.rewards.mean() for scored in alike]))
    assert set(report.by_task) == {scored.group.task.name for scored in alike}


def test_a_node_asks_itself_what_is_solved_half_of_the_time(warm: Callable[..., Learner]) -> None:
    learner = warm(replace(SETTINGS, split=Split(8, 0), curriculum=0.75))
    half, never = (external(1, *texts) for texts in (["right", "9"] * 4, ["9"] * 8))
    sort = replace(never, task=replace(never.task, name="digits/sort"))
    for _ in range(20):
        learner.learn([score("me", group) for group in [half, sort] * 6], [])
    asked = [scored.group.task.name for _ in range(5) for scored in learner.sample()[2:]]
    assert asked.count("digits/swap") > 0.8 * len(asked)


def test_warm_up_teaches_the_form_and_nothing_else() -> None:
    learner = a_learner(replace(SETTINGS, tasks=(("digits/swap", 5),)))
    texts = [text for scored in learner.sample() for text in scored.texts]
    assert np.mean([len(text) == 2 and set(text) <= set("01234") for text in texts]) > 0.8
    assert learner.heldout(500) < 0.1


def test_alone_a_node_learns_by_itself(warm: Callable[..., Learner]) -> None:
    learner = warm(replace(SETTINGS, split=Split(8, 0), learning_rate=3e-3))
    before = learner.heldout(300, seed=1)
    for _ in range(40):
        learner.learn(learner.sample(), [])
    assert learner.heldout(300, seed=1) > before + 0.08


def test_others_groups_teach_what_the_node_never_sampled(warm: Callable[..., Learner]) -> None:
    learner = warm(replace(SETTINGS, split=Split(0, 4), limits=BatchLimits(share=0.5), learning_rate=3e-3))
    asked = [(author, external(n, "right", "99", "98", "97")) for n, author in enumerate(OTHERS)]
    questions = [regenerate(group.task) for _, group in asked]
    before = learner._chances(questions).mean()
    for _ in range(20):
        report = learner.learn([], asked)
    assert report.taken == 4 and report.authors == 4
    assert learner._chances(questions).mean() > before + 0.04


def test_the_reward_is_that_of_own_fresh_answers_alone(warm: Callable[..., Learner]) -> None:
    learner = warm()
    own = learner.sample()
    report = learner.learn(own, [("a", external(1, "right", "right", "right", "99"))])
    assert report.reward == pytest.approx(np.mean([scored.rewards.mean() for scored in own]))
    asked = [scored.question.ref.name for scored in own]
    assert sum(report.by_task[name] for name in asked) == pytest.approx(len(own) * report.reward)
    assert report.taken == 1


def test_a_round_without_advantage_leaves_the_policy_as_it_is(warm: Callable[..., Learner]) -> None:
    learner = warm()
    before = parameter_hash(learner.policy)
    own = [score("me", external(1, "99", "98"))]
    report = learner.learn(own, [("a", external(2, "right", "right"))])
    assert report.refused["uninformative"] == 1 and report.loss == 0.0
    assert parameter_hash(learner.policy) == before


def test_useless_groups_are_counted_by_reason(warm: Callable[..., Learner]) -> None:
    learner = warm()
    good = external(1, "right", "99")
    sent = [
        ("a", replace(good, task=TaskRef("digits/none", 2, 1))),
        ("b", replace(good, vocabulary="gpt-9")),
        ("c", replace(good, answers=((999,),))),
        ("d", external(2, "right", "0" * 11)),
        ("e", external(3, "right", "0" * 12)),
        ("f", replace(good, vocabulary=BYTES.id, answers=((120, BYTES.end), (48, BYTES.end)))),
        ("me", good),
    ]
    report = learner.learn(learner.sample(), sent)
    assert report.refused == {
        "unknown-task": 1,
        "unknown-vocabulary": 1,
        "bad-token": 1,
        "too-long": 2,
        "unreadable": 1,
        "own": 1,
    }
    assert report.taken == 0


def test_the_gate_keeps_poison_out_and_lets_unknown_right_answers_in(warm: Callable[..., Learner]) -> None:
    learner = warm(replace(SETTINGS, gate=TokenGate(top_k=8, floor=0.01)))
    question = regenerate(TaskRef("digits/swap", 2, 5))
    poisoned = ["#" + question.key] * 4 + ["00", "01", "10", "11"]
    sent = [("evil", external(5, *poisoned)), ("good", external(6, "right", "00", "01", "10", "11"))]
    before = copy.deepcopy(learner.policy.state_dict())
    report = learner.learn([], sent)
    assert report.refused["unlikely"] == 1 and report.taken == 1 and report.taken_of == {"good": 1}
    assert report.refused_answers["evil"] == 8 and report.refused_answers["good"] == 0
    assert any(not torch.equal(before[name], value) for name, value in learner.policy.state_dict().items())


def test_of_an_author_whose_groups_are_mostly_poison_nothing_is_learned(warm: Callable[..., Learner]) -> None:
    learner = warm(replace(SETTINGS, gate=TokenGate(top_k=8, floor=0.01)))
    keys = [regenerate(TaskRef("digits/swap", 2, seed)).key for seed in (0, 1)]
    poison = [("evil", external(seed, *["#" + key] * 4, "00", "01", "10", "11")) for seed, key in enumerate(keys)]
    good = [(author, external(n, "right", "00", "01", "10")) for n, author in ((6, "evil"), (7, "good"))]
    assert learner.learn([], [*poison, *good]).taken == 2, "two refused groups condemn nobody"
    report = learner.learn([], [poison[0], *good])
    assert report.taken_of == {"good": 1} and report.refused["suspect"] == 1
    for _ in range(8):
        report = learner.learn([], good)
    assert report.taken_of == {"good": 1, "evil": 1}, "the last eight count"


def test_what_ones_own_gate_refuses_is_not_shared_and_what_is_shared_passes_the_gates_of_others(
    warm: Callable[..., Learner],
) -> None:
    settings = replace(SETTINGS, gate=TokenGate(top_k=8, floor=0.01))
    writer, reader = warm(settings), warm(settings, seed=2)
    strange, ordinary = external(1, "right", "00", "01", "#a", "10"), external(2, "right", "00", "01", "10")
    shared = writer.shareable([score("me", group) for group in (strange, ordinary)])
    assert [len(group.answers) for group in shared] == [4, 4]
    assert shared[0].answers == strange.answers[:3] + strange.answers[4:]
    report = reader.learn([], [("other", group) for group in shared])
    assert report.read_answers == {"other": 8} and report.refused_answers == {"other": 0}
    ungated = warm()
    assert ungated.shareable([score("me", strange)]) == [strange]


def test_the_gates_reference_does_not_learn(warm: Callable[..., Learner]) -> None:
    learner = warm()
    assert learner.reference is not None
    before = parameter_hash(learner.reference)
    learner.learn([], pool())
    assert parameter_hash(learner.reference) == before != parameter_hash(learner.policy)


def test_judged_rewards_count_what_stands_before_the_answer() -> None:
    ref = TaskRef(WORKED, 5, 3)
    key = regenerate(ref).key
    wrong = f"{(int(key[0]) + 1) % 5}{key[1:]}"
    group = RolloutGroup(ref, tuple((*DIGITS.encode(text), DIGITS.end) for text in (key, wrong)), 0, "", DIGITS.id)
    assert score("a", group).rewards.tolist() == [1, 1]
    assert score("a", group, judged=True).rewards.tolist() == [1, 0]


def test_trials_of_adaptive_j_leave_the_learner_as_it_was(warm: Callable[..., Learner]) -> None:
    adaptive = AdaptiveSplit(4, candidates=(0, 2), external=2, every=1)
    learner = warm(replace(SETTINGS, split=adaptive, trial_questions=64))
    own = learner.sample()
    before, optimizer = parameter_hash(learner.policy), str(learner.optimizer.state)
    fit = [score(author, group) for author, group in pool()]
    gained = learner._trials(own, fit, adaptive, ())
    assert set(gained) == {0, 2} and all(abs(gain) < 1 for gain in gained.values())
    assert parameter_hash(learner.policy) == before
    assert str(learner.optimizer.state) == optimizer


def test_an_adaptive_node_asks_itself_a_whole_batch_and_learns_from_what_teaches(warm: Callable[..., Learner]) -> None:
    learner = warm(replace(SETTINGS, split=AdaptiveSplit(4, candidates=(0, 4), external=4)))
    assert len(learner.sample()) == 4
    own = [score("me", external(seed, "99", "98")) for seed in (1, 2, 3)] + [score("me", external(4, "right", "99"))]
    report = learner.learn(own, pool())
    assert (report.informative, report.external, report.taken) == (1, 4, 4)
    alone = learner.learn(own, [])
    assert (alone.own, alone.taken) == (4, 0)


def test_a_gru_learns_from_text_that_a_transformer_wrote_in_another_vocabulary(warm: Callable[..., Learner]) -> None:
    reader = Learner("me", build(PolicySpec("gru", layers=1, vocabulary=BYTES.id), seed=1), SETTINGS, seed=1)
    before = parameter_hash(reader.policy)
    report = reader.learn([], pool())
    assert report.taken == 2
    assert parameter_hash(reader.policy) != before


def test_stale_rollouts_are_learned_from_with_a_correction(warm: Callable[..., Learner]) -> None:
    writer = warm(seed=3)
    groups = [("a", scored.group) for scored in writer.sample()]
    writer.learn(writer.sample(), pool())
    reader = warm(replace(SETTINGS, correction="taper", limits=BatchLimits(share=1.0)))
    report = reader.learn(reader.sample(), groups)
    assert np.isfinite(report.loss)


def test_heldout_is_measured_on_the_same_questions_where_a_seed_is_given(warm: Callable[..., Learner]) -> None:
    learner = warm()
    assert learner.heldout(50, seed=1) == learner.heldout(50, seed=1) != learner.heldout(50, seed=2)
    assert learner.heldout(50) != learner.heldout(50)
    worked = warm(replace(SETTINGS, tasks=((WORKED, 2),)))
    assert 0 <= worked.heldout(20, seed=1) == worked.heldout(20, seed=1) <= 1


class Even(RolloutTask):
    """Has no question of an odd seed."""

    def generate(self, seed: int, difficulty: int) -> int:
        if seed % 2:
            raise ValueError("that is odd")
        return seed

    def prompt(self, problem: int) -> str:
        return f"{problem}="

    def verify(self, problem: int, answer: str) -> float:
        return float(answer == "0")

    def key(self, problem: int) -> str:
        return "0"


class Long(RolloutTask):
    """A right answer of `length` digits, of every `rare`th question; of all others one of a digit."""

    exact = True
    length, rare = 9, 1

    def generate(self, seed: int, difficulty: int) -> int:
        return seed

    def prompt(self, problem: int) -> str:
        return f"{problem % 1000}="

    def verify(self, problem: int, answer: str) -> float:
        return float(answer == self.key(problem))

    def key(self, problem: int) -> str:
        return "0" * (self.length if problem % self.rare == 0 else 1)

    def form(self, difficulty: int, rng: np.random.Generator) -> str:
        return self.key(int(rng.integers(1000)))


def test_an_answer_that_cannot_be_written_is_refused_before_the_run_and_earns_nothing_where_it_is_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TASKS, "own/Long", Long())
    learner = a_learner(replace(SETTINGS, tasks=(("own/Long", 5),)), warm=False)
    with pytest.raises(SettingError, match=r"a right answer has 10 tokens with its end, the policy writes 4"):
        learner.check_room()
    assert learner.heldout(8) == 0
    monkeypatch.setattr(Long, "length", 99)  # more than the policy's context
    monkeypatch.setattr(Long, "rare", 3)
    learner.warm_up(well_formed, steps=8)
    assert learner.heldout(32) > 0


class Formless(Even):
    def generate(self, seed: int, difficulty: int) -> int:
        return seed

    def form(self, difficulty: int, rng: object) -> str:
        return ""


def test_a_task_without_a_form_is_not_warmed_up_and_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "own/Formless", Formless())
    learner = a_learner(replace(SETTINGS, tasks=(("own/Formless", 5),)), warm=False)
    before = parameter_hash(learner.policy)
    learner.warm_up(well_formed, steps=4)
    assert parameter_hash(learner.policy) == before
    for tasks in ((("own/Formless", 5), ("digits/sort", 2)), (("digits/sort", 2), ("own/Formless", 5))):
        learner = a_learner(replace(SETTINGS, tasks=tasks), warm=False)
        learner.warm_up(well_formed, steps=40)
        asked = [regenerate(TaskRef("own/Formless", 5, seed)) for seed in range(20)]
        empty = sum(len(answer) == 1 for scored in learner._answered(asked, 4) for answer in scored.group.answers)
        assert empty < 40


@pytest.mark.parametrize(("seeds", "answered"), [((2, 4, 3, 6), 2), ((1, 2), 0)])
def test_for_another_those_questions_are_answered_that_come_before_one_that_cannot_be_made(
    seeds: tuple[int, ...], answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "own/Even", Even())
    tasks = [TaskRef("own/Even", 5, seed) for seed in seeds]
    assert [group.task for group in a_learner(warm=False).answer(tasks, policy="p")] == tasks[:answered]


def test_a_task_of_which_some_questions_cannot_be_made_is_warmed_up_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TASKS, "own/Even", Even())
    learner = a_learner(replace(SETTINGS, tasks=(("own/Even", 5),)), warm=False)
    first = learner.warm_up(well_formed, steps=1)
    assert learner.warm_up(well_formed, steps=8) < first


def test_a_task_of_which_no_answer_can_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Even, difficulty: int, rng: object) -> str:
        raise ZeroDivisionError("never")

    monkeypatch.setattr(Even, "form", fail)
    monkeypatch.setitem(TASKS, "own/Even", Even())
    with pytest.raises(UnknownTask, match=r"'own/Even' was made: never"):
        well_formed(TaskRef("own/Even", 5, 1), np.random.default_rng(0))
