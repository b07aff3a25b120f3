"""reasoning-gym's procedural tasks as `gym/NAME`, with the extra `rl`: pip install "swarmnode[rl]".

    regenerate(TaskRef("gym/leg_counting", 0, 7)).prompt  # 'Your task is to count how many legs ...'

Difficulty is the level of the dataset's curriculum, applied to all of its attributes; 0 is its default configuration.
Questions differ between versions of reasoning-gym, so a run should name one (`version()`).

Some of its verifiers `eval` the answer that they are given (binary_matrix, number_sorting, spiral_matrix, countdown and
others, seen in 0.1.25), and answers come from strangers here. So a dataset's own verifier is used only where it is the
base class's comparison or stands in READ_AND_SAFE; elsewhere the answer must be the key, to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from swarmnode.training.rl.tasks import Question, TaskError, TaskRef

MAX_LEVEL = 10
MAX_ANSWER = 4096  # characters that a verifier is given; longer answers earn nothing
READ_AND_SAFE = frozenset({"calendar_arithmetic", "decimal_arithmetic", "fraction_simplification"})


@dataclass(frozen=True)
class Gym:
    """The questions of one dataset of reasoning-gym."""

    dataset: str

    def difficulties(self) -> range:
        return range(MAX_LEVEL + 1) if _factory().has_curriculum(self.dataset) else range(1)

    def question(self, ref: TaskRef) -> Question:
        factory = _factory()
        seeded = {"seed": ref.seed, "size": 1}
        dataset_class, config_class = factory.DATASETS[self.dataset]
        if ref.difficulty:
            curriculum = factory.create_curriculum(self.dataset)
            curriculum.set_global_level(ref.difficulty)
            config = curriculum.generate_configuration(seeded)
        else:
            config = config_class(**seeded)
        dataset = dataset_class(config)
        entry = dataset[0]
        key = str(entry["answer"])
        own_verifier = self.dataset in READ_AND_SAFE or _is_comparison(dataset_class)

        def verify(text: str) -> float:
            answer = text.strip()
            if len(answer) > MAX_ANSWER:
                return 0.0
            if not own_verifier:
                return float(answer == key)
            return min(1.0, max(0.0, float(dataset.score_answer(answer, entry))))

        def judge(text: str) -> float:
            return 1.0

        return Question(ref, str(entry["question"]), key, verify, judge, exact=not own_verifier)


@lru_cache(maxsize=1)
def _factory() -> Any:
    try:
        import reasoning_gym  # noqa: F401 (registers the datasets)
        from reasoning_gym import factory
    except ImportError as error:
        raise TaskError(
            f'tasks called gym/... need reasoning-gym, which cannot be imported ({error}): pip install "swarmnode[rl]"'
        ) from error
    return factory


def _is_comparison(dataset_class: type[Any]) -> bool:
    from reasoning_gym.dataset import ProceduralDataset

    return dataset_class.score_answer is ProceduralDataset.score_answer


def find(dataset: str) -> Gym:
    """The generator of a dataset. Raises TaskError where reasoning-gym is missing or has none of that name."""
    if dataset not in _factory().DATASETS:
        raise TaskError(f"reasoning-gym has no dataset {dataset!r}: its README lists them")
    return Gym(dataset)


def version() -> str:
    """The version of reasoning-gym that is installed. Raises TaskError where there is none."""
    from importlib.metadata import version as installed

    _factory()
    return installed("reasoning-gym")
