"""The trainer as a daemon sees it: something that moves one flat vector of parameters and measures its loss.

Implementations: `node.trainer.TrainerProcess` (a child process that owns torch) and in-process ones for simulation.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.protocols.network import PeerId
from swarmnode.protocols.wire import Message, within
from swarmnode.training.outer import Layout
from swarmnode.training.rl.groups import Learned, RolloutGroup
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.sections import InnerSection
from swarmnode.training.verify.replay import Distance
from swarmnode.training.verify.trace import Stretch

Vector = NDArray[np.float32]
Groups = Sequence[tuple[PeerId, RolloutGroup]]  # each with its author

MOST = 1 << 53  # steps, samples, tokens or seconds that a trainer is believed
ASK_AGAIN = 1.0  # seconds after which a trainer that goes on is asked once more to let go

logger = logging.getLogger(__name__)


class TrainerDied(Exception):
    """The trainer ended during a call and has been, or is being, restarted; its last parameters are kept."""


class TrainerHeld(TrainerDied):
    """The trainer computes nothing for now, as its owner wants: by `Trainer.hold`, or other caps."""


@dataclass(frozen=True)
class TrainStats(Message):
    steps: Annotated[int, within(0, MOST)]  # inner steps completed
    samples: Annotated[int, within(0, MOST)]  # sequences seen, steps × batch
    tokens: Annotated[int, within(0, MOST)]
    loss: float  # mean training loss over the steps, bits per byte; nan when steps == 0
    seconds: Annotated[float, within(0, MOST)]  # wall time inside inner steps
    told: bytes = b""  # one of each step in a run by seeds, whose steps leave the parameters as they are

    def __add__(self, other: TrainStats) -> TrainStats:
        """What two calls did together."""
        steps = self.steps + other.steps
        losses = [each.steps * each.loss for each in (self, other) if each.steps]
        return replace(
            self,
            steps=steps,
            samples=self.samples + other.samples,
            tokens=self.tokens + other.tokens,
            loss=sum(losses) / steps if steps else math.nan,
            seconds=self.seconds + other.seconds,
            told=self.told + other.told,
        )


NOTHING = TrainStats(steps=0, samples=0, tokens=0, loss=float("nan"), seconds=0.0)


@dataclass(frozen=True)
class Answered:
    """Groups for whoever trains the policy that wrote them."""

    groups: Sequence[RolloutGroup]  # with proofs
    reward: float  # mean over their answers, 0 to 1
    seconds: float


@dataclass(frozen=True)
class Sampled:
    """One batch that a node wrote for another's policy, and what came of all of its groups so far."""

    trainer: PeerId
    version: int  # updates that the policy had seen
    groups: int  # in this batch
    reward: float  # mean over its answers, 0 to 1
    given: int  # groups, in all
    accepted: int  # of these, by the trainer's word
    refused: Mapping[str, int]  # by reason, by the trainer's word


@dataclass(frozen=True)
class Batches:
    """What somebody trains on in some steps of a round, and the text that these are drawn from."""

    author: PeerId
    round: int
    steps: tuple[int, ...]
    size: int = 0  # bytes of that text; 0: the task reads none
    pieces: tuple[tuple[int, bytes], ...] = ()  # of it, by offset: what `places` names


@dataclass(frozen=True)
class Marked:
    """What was trained between two marks. Another `life` than before: what came before it cannot be shown."""

    life: bytes
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Slice:
    """Steps of somebody's to repeat, from a state to another in `Trainer.states`, and the text that they drew from."""

    author: PeerId
    stretch: Stretch
    size: int = 0  # bytes of that text; 0: the task reads none
    pieces: tuple[tuple[int, bytes], ...] = ()  # of it, by offset: what `places` names


@dataclass(frozen=True)
class Replayed(Message):
    """How far a replay ended from what was claimed; no distance where nothing was repeated."""

    distances: Annotated[tuple[Distance, ...], within(0, 1)]
    seconds: Annotated[float, within(0, MOST)]


class Trainer(ABC):
    """One model that trains. Where it has no more than the abstract methods, the others raise NotImplementedError.

    Judging, drawing and replaying use the local parameters and moments: no `train` may run meanwhile.
    """

    accuracy = math.nan  # share of the small fixed sample of `evaluate` that was predicted, when it was last measured

    @property
    @abstractmethod
    def layout(self) -> Layout: ...

    @property
    def pid(self) -> int | None:
        """Process id of the child; None in process."""
        return None

    @abstractmethod
    def parameters(self) -> Vector:
        """A copy of the local parameters, shape (P,). Not while `train` runs."""

    @abstractmethod
    def load(self, vector: Vector) -> None:
        """Overwrite the local parameters, shape (P,). The inner optimizer keeps its state. Not while `train` runs."""

    def moments(self) -> tuple[Vector, int]:
        """What the inner optimizer remembers, and of how many updates, 0 of none. The very memory: steps change it."""
        return np.zeros(0, np.float32), 0

    async def remember(self, moments: Vector, updates: int) -> None:
        """Go on with these, of this run and an earlier life. Not while `train` runs. Raises TrainerDied, ValueError."""
        raise NotImplementedError

    @abstractmethod
    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
        """Run inner steps until `steps` are done or `seconds` of wall time have passed, whichever is first.

        Cancelling stops after the step in hand. Raises TrainerDied; the parameters then are those of the last step.
        """

    def steer(self, inner: InnerSection) -> None:  # noqa: B027 (what trains a toy has rates of its own)
        """Take the learning rates and H of `inner` from the next `train` on, in place of those of the run's file."""

    @abstractmethod
    async def interrupt(self) -> None:
        """Have the `train` that runs, if one does, end after the step in hand and return what it did."""

    async def hold(self) -> None:  # noqa: B027 (what trains in this process ends its step when told)
        """Compute nothing from within two seconds on, in the middle of a step where that takes longer.

        Until `release`, `train` waits and other calls raise TrainerHeld; but for `evaluate`, `sample` and `remember`,
        where no step was in hand. Parameters may be read and loaded; `release` leaves those that were loaded.
        """

    async def release(self) -> bool:
        """Compute again. Returns when the step in hand has ended; False where `hold` was called meanwhile."""
        return True

    def go_on(self) -> bool:
        """Compute again at once; False where a step in hand has to end first, for which there is `release`."""
        return True

    @abstractmethod
    async def evaluate(self, *, thorough: bool, wait: bool = True) -> float:
        """Held-out loss of the local parameters in bits per byte; on a small fixed sample unless `thorough`.

        Raises TrainerDied; without `wait` also where it died before and is not back yet.
        """

    @abstractmethod
    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        """Let the model continue `prompt` by `length` bytes. Raises TrainerDied, and ValueError where it cannot."""

    # --- judging: held-out sequences that a seed draws, the same ones on every node -----------------------------------

    async def heldout(self, *, seed: int, sequences: int) -> float:
        """Held-out loss of the local parameters, bits per byte, on the first so many. Raises TrainerDied."""
        raise NotImplementedError

    async def gradient(self, *, seed: int, first: int, last: int) -> tuple[float, Vector] | None:
        """Loss and its gradient (P,) on the sequences from `first` to before `last`. Raises TrainerDied.

        None where the task gives no gradient. The local parameters are afterwards what they were.
        """
        raise NotImplementedError

    # --- drawing the batches of others, which follow from who trains and when -----------------------------------------

    async def places(self, batches: Batches) -> list[tuple[int, int]]:
        """Which bytes of a text of `size` these are drawn from, (start, stop) each. Raises TrainerDied."""
        raise NotImplementedError

    async def drawn(self, batches: Batches) -> float | None:
        """Loss of the local parameters on them, in the unit of training; None where this trainer draws none of others.

        Raises TrainerDied.
        """
        raise NotImplementedError

    # --- audits: others repeat this trainer's work, and it repeats theirs ---------------------------------------------

    async def mark(self) -> Marked:
        """The stretches since the last mark. To be called before the parameters are touched. Raises TrainerDied."""
        raise NotImplementedError

    @property
    def states(self) -> tuple[Path, Path, Path]:
        """Folders of vectors (training/verify/vectors): its own states, what it offered, and others' states."""
        raise NotImplementedError

    async def replay(self, slice: Slice) -> Replayed:
        """Repeat somebody's steps: none where a state of theirs is not there, as after a restart. Own parameters and
        moments are afterwards what they were. Raises TrainerDied."""
        raise NotImplementedError

    async def calibrate(self) -> Replayed:
        """Repeat the newest own stretch, as other machines might: none where it is kept no more. Raises TrainerDied."""
        raise NotImplementedError

    # --- a policy, in a run by rollouts -------------------------------------------------------------------------------

    async def rollouts(
        self, *, version: int, count: int | None = None, policy: str = ""
    ) -> tuple[list[RolloutGroup], float]:
        """Answers to fresh questions by the present policy, to be learned from and shared; seconds that it took.

        `version`: updates that the policy has seen. `count`: so many questions, None: as the run says. With `policy`,
        the hash of the parameters, they are remembered for audits. Raises TrainerDied.
        """
        raise NotImplementedError

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        """Answers with proofs to these questions, up to one that cannot be made, for whoever trains the policy.

        Raises TrainerDied.
        """
        raise NotImplementedError

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        """One update from the rollouts asked last, and from others' groups. Raises TrainerDied.

        `sampled`: groups that others wrote with remembered weights; a share of each author's is audited. `probation`:
        authors in the pool who have a part of the update together, however many they are.
        """
        raise NotImplementedError

    async def score(self, groups: Groups, *, texts: bool = False) -> list[dict[str, Any]]:
        """What there is to learn from these, for tasks whose answers the daemon cannot check.

        Of each, `refused`: the word for why nothing, empty where there is something; `why` in words; with `texts` the
        question, its key and the answers with what they earn, None where there are none. Raises TrainerDied.
        """
        raise NotImplementedError


class Turns:
    """Whose turn it is with a trainer: one task trains by it again and again, others have it in between."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._line = trio.Lock()  # of those who wait, all but the first
        self._hands = trio.Semaphore(1)  # of the one who has the trainer
        self._wanted = 0
        self._free = trio.Event()  # nobody wants it but who trains
        self._free.set()
        self._training = False  # who trains has it

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Have the trainer for oneself, after its step in hand; training goes on afterwards."""
        self._free = self._free if self._wanted else trio.Event()
        self._wanted += 1
        try:
            async with self._line:
                while True:
                    await self._trainer.interrupt()
                    with trio.move_on_after(ASK_AGAIN):
                        await self._hands.acquire()
                        break
            try:
                yield
            finally:
                self._hands.release()
        finally:
            self._wanted -= 1
            if not self._wanted:
                self._free.set()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Have the trainer to train by, when nobody else wants it; between two calls of `train`, `give_way`."""
        await self._take()
        try:
            yield
        finally:
            if self._training:
                self._let_go()

    async def give_way(self) -> bool:
        """Let those have the trainer who want it, and have it again after them. Whether there were any."""
        if not self._wanted:
            return False
        self._let_go()
        await self._take()
        return True

    async def _take(self) -> None:
        while True:
            await self._free.wait()
            await self._hands.acquire()
            if not self._wanted:
                self._training = True
                return
            self._hands.release()

    def _let_go(self) -> None:
        self._training = False
        self._hands.release()


async def loss_of(trainer: Trainer) -> float:
    """Held-out loss of the local parameters, bits per byte; nan where there is no trainer to ask now."""
    try:
        return await trainer.evaluate(thorough=False, wait=False)
    except TrainerDied as error:
        logger.info("the loss is not measured: %s", error)
        return float("nan")
