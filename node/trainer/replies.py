"""What the trainer's process may answer to each command; whatever else it sends ends it (`child.TrainerChild`).

It reads strangers' bytes and may have been taken over by them, so a reply is checked like a peer's message: types and
ranges as they are stated here, and what the daemon makes of it must be possible. Whether it is true nobody can see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from swarmnode.protocols.methods.rollouts.messages import PackedAnswers
from swarmnode.protocols.methods.trainer import MOST, Marked
from swarmnode.protocols.wire import Message, WireError, within
from swarmnode.training.memory import Weight
from swarmnode.training.outer import Layout
from swarmnode.training.rl.groups import MAX_ANSWERS, MAX_TOKENS, RolloutGroup
from swarmnode.training.rl.section import RolloutsSection
from swarmnode.training.sandbox import SandboxReport
from swarmnode.training.verify.trace import stretches_of

LARGEST = 1 << 48  # elements that are believed of a vector
MOST_BYTES = 16 << 20  # of an answer, beside a round's groups
MOST_VALUES = 1 << 20  # in an answer: as Python objects they take up to 80 MB
Bytes = int | float
PointRow = tuple[bytes, bytes, int]


def most_bytes(rollouts: RolloutsSection) -> int:
    """Bytes that an answer may have in a run with these groups, each of whose answers travels as tokens or as text."""
    return MOST_BYTES + rollouts.batch * rollouts.answers * (MAX_TOKENS + 5 * rollouts.tokens)


@dataclass(frozen=True)
class WeighReply:
    weight: Weight | None  # None where the task does not tell
    free: Bytes | None  # of the device, where it has memory of its own


@dataclass(frozen=True)
class StateRoom:
    wanted: Bytes
    free: Bytes


@dataclass(frozen=True)
class InitReply(Message):
    layout: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes
    moments: Annotated[int, within(0, LARGEST)]  # float32 numbers behind parameters, gradient and count of updates
    device: str
    why: str  # it is not another device, for people; empty where nothing is amiss
    sandbox: SandboxReport
    states: StateRoom | None  # None where none are kept
    has: tuple[str, ...]  # of what its task may lack

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(axis < 0 for _, shape in self.layout for axis in shape) or self.table.parameters > LARGEST:
            raise WireError("InitReply.layout has shapes that no tensor has")

    @cached_property
    def table(self) -> Layout:
        return Layout.of(list(self.layout))


@dataclass(frozen=True)
class EvaluateReply:
    loss: float
    accuracy: float = math.nan  # where the task tells one


@dataclass(frozen=True)
class LossReply:
    loss: float | None  # None where the task cannot tell


@dataclass(frozen=True)
class SampleReply:
    text: bytes


@dataclass(frozen=True)
class RolloutsReply(Message):
    groups: tuple[PackedAnswers, ...]
    seconds: Annotated[float, within(0, MOST)]

    def __post_init__(self) -> None:
        """Raises GroupError."""
        super().__post_init__()
        _ = self.unpacked

    @cached_property
    def unpacked(self) -> tuple[RolloutGroup, ...]:
        return tuple(RolloutGroup.from_map(vars(group)) for group in self.groups)


@dataclass(frozen=True)
class AnswerReply(RolloutsReply):
    reward: Annotated[float, within(0, 1)]


@dataclass(frozen=True)
class ScoredAnswer(Message):
    text: str
    reward: Annotated[float, within(0, 1)]
    advantage: Annotated[float, within(-MAX_ANSWERS, MAX_ANSWERS)]
    tokens: int


@dataclass(frozen=True)
class ScoreOfGroup:
    refused: str
    why: str
    question: str = ""  # this and what follows where texts are asked for
    key: str = ""
    answers: tuple[ScoredAnswer, ...] | None = None


@dataclass(frozen=True)
class ScoreReply:
    scores: tuple[ScoreOfGroup, ...]  # of each group that was asked about


@dataclass(frozen=True)
class MarkReply:
    life: bytes
    stretches: tuple[tuple[PointRow, PointRow, int, int, int, int], ...]  # as `trace.row_of` has them

    def __post_init__(self) -> None:
        """Raises BadTrace."""
        _ = self.marked

    @cached_property
    def marked(self) -> Marked:
        return Marked(self.life, stretches_of(self.stretches))


@dataclass(frozen=True)
class PlacesReply:
    places: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not all(0 <= start <= stop for start, stop in self.places):
            raise WireError("PlacesReply.places are none of any text")
