"""The trainer's supervisor: the daemon's side of the child process that owns torch.

What fails, and what is then true: the child may be killed, run out of memory or crash at any moment. The call in
flight raises TrainerDied; the parameters stay, because they lie in a memfd that the daemon holds too (a child killed
in the middle of an optimizer step leaves some tensors one step ahead of others, which training does not mind), and
so do the inner optimizer's moments. A new child is started from them after a back-off and calls wait for it. A child
that cannot be started three times in a row, or says why it never will, ends `run` with TrainerFailed.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import trio

from swarmnode.node.exitcodes import CONFIG
from swarmnode.node.storage.datadir import remove
from swarmnode.node.trainer import replies
from swarmnode.node.trainer.child import (
    CAPPED,
    TrainerChild,
    TrainerFailed,
    TrainerSettings,
    empty,
    environment,
    rules_of,
    with_models,
)
from swarmnode.protocols.methods.trainer import (
    NOTHING,
    Answered,
    Batches,
    Groups,
    Marked,
    Replayed,
    Slice,
    Trainer,
    TrainerDied,
    TrainerHeld,
    TrainStats,
    Vector,
)
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.wire import Empty
from swarmnode.training import mapped
from swarmnode.training.memory import Keeping, Machine, Needs, Weight, in_words, needs, refusal
from swarmnode.training.options import SettingError
from swarmnode.training.outer import Layout
from swarmnode.training.rl.groups import Learned, RolloutGroup
from swarmnode.training.rl.section import hf_model
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.runspec import RunSpec, encode
from swarmnode.training.sandbox import Rules
from swarmnode.training.sections import InnerSection
from swarmnode.training.verify.trace import point_row
from swarmnode.training.verify.vectors import FREE_SHARE, states_in

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_BACK_OFF = 0.5  # s before a dead child is replaced; doubles each time until a command succeeds
LAST_BACK_OFF = 60.0  # s
MAX_FAILED_STARTS = 3  # in a row
OWNERS = ("evaluate", "remember", "sample")  # commands that a paused trainer does, where it is not frozen
MAX_SAMPLE = 4096  # bytes; a longer one would hold up training for too long

RESTARTS = Metric("swarmnode_trainer_restarts_total", COUNTER, "times that the trainer ended by itself")
SPENT = Metric("swarmnode_trainer_seconds_total", COUNTER, "seconds of the trainer in steps, or measuring", "what")

# What Python, numpy, torch, C++ and the loader say of memory that they do not get.
NO_MEMORY = re.compile(r"MemoryError|allocate memory|bad_alloc|map segment|[Tt]hread creation failed|start new thread")
USUAL, KEEPING = TrainerSettings(), Keeping()


class TrainerProcess(Trainer):
    """A trainer in a child process. Its other methods work once `run` has said that it started."""

    def __init__(
        self, spec: RunSpec, *, run_id: str, peer_id: str, settings: TrainerSettings = USUAL, keeping: Keeping = KEEPING
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._peer_id = peer_id
        self._settings, self._keeping = settings, keeping
        self.weight: Weight | None = None  # of the model, where its task tells
        self.free: float | None = None  # bytes of its device, if that is not the CPU
        self.needs: Needs | None = None  # what the run takes here, likewise
        self._layout: Layout | None = None
        self._vector: Vector | None = None  # (P,), the shared memory itself
        self._gradient: Vector | None = None  # (P,), behind it
        self._updates = np.zeros(1, np.int64)  # of the inner optimizer; -1: its moments are of whom it audits
        self._moments: Vector = np.zeros(0, np.float32)  # likewise in the memory
        self._child: TrainerChild | None = None
        self._steered: dict[str, Any] = {}  # what `train` is told of [inner], once it is not as in the run's file
        self._interrupted = False
        self._process: TrainerChild | None = None  # the child, also while it is not ready
        self._cores = 0.0
        self._cpu_before = 0.0  # seconds, of children that ended
        self._is_over = False  # no child is started again
        self._held = self._to_hold = False  # whether it computes nothing; and whether that shall last
        self._holding = trio.CancelScope()  # of `hold`, until the child stands
        self._backing_off = trio.CancelScope()  # of the wait until a child is started again
        self._changed = trio.lowlevel.ParkingLot()  # a child is ready, or what was asked of it changed
        self.restarts = 0  # of children that ended by themselves
        self.ended = ""  # why the last one did, until the next is ready or has other caps
        self._least = 0  # bytes of its own that one with these caps had when it was ready
        self.device, self.ranks = settings.device, settings.ranks
        self.has: tuple[str, ...] = ()  # of what its task may lack
        self.sandbox: dict[str, Any] | None = None  # what of it holds the child, a `SandboxReport`
        self.sampling: dict[str, str] | None = None  # what writes answers, an `EngineStatus`; None where nobody does
        self._spent_before = {"train": 0.0, "evaluate": 0.0, "audit": 0.0}  # seconds, of children that ended

    def measure(self, metrics: Metrics) -> None:
        metrics.show(SPENT, lambda: self.spent)
        metrics.show(RESTARTS, lambda: self.restarts)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of all children so far, by what for."""
        now = {} if self._child is None else self._child.spent
        return {what: seconds + now.get(what, 0.0) for what, seconds in self._spent_before.items()}

    @property
    def cpu_seconds(self) -> float:
        return self._cpu_before + (self._process.cpu_seconds if self._process is not None else 0.0)

    def cap_cpu(self, cores: float) -> None:
        """From now on have trainer and daemon take no more than so many CPU seconds a second; 0: no cap."""
        self._cores = cores
        if self._process is not None:
            self._process.cores = cores

    def change(self, **caps: int) -> None:
        """Go on with other caps, in a new child where one of them is another.

        Raises SettingError, with nothing changed, where it is known that no child could start with them.
        """
        changed, least = replace(self._settings, **caps), self._least / 1e9  # type: ignore[arg-type]
        if 0 < changed.memory / 1e9 < least and changed.threads == self._settings.threads:
            raise SettingError(
                f"memory = {changed.memory / 1e9:g} GB is less than the {least:.2f} GB that this run's trainer has "
                f"when it is ready, so nothing was changed; name more, such as memory={max(1.0, 2 * least):.2g}"
            )
        if changed != self._settings:
            self._settings, self.ended, self._least = changed, "", 0
            self._backing_off.cancel()
            if self._process is not None:
                self._process.replaced = True
                self._process.end(CAPPED)

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise RuntimeError("the trainer has not started yet")
        return self._layout

    @property
    def rules(self) -> Rules:
        return rules_of(self._settings)

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    def parameters(self) -> Vector:
        return mapped.copied(self._shared())

    def load(self, vector: Vector) -> None:
        np.copyto(self._shared(), vector, casting="no")

    def moments(self) -> tuple[Vector, int]:
        return self._moments, max(0, int(self._updates[0]))

    async def remember(self, moments: Vector, updates: int) -> None:
        if moments.size != self._moments.size:
            raise ValueError("they are of another optimizer")
        np.copyto(self._moments, moments)
        self._updates[0] = updates
        await self._ask("remember", Empty)

    async def train(self, *, round: int, steps: int, seconds: float) -> TrainStats:
        self._interrupted, until = False, trio.current_time() + seconds
        while (child := self._living()) is None or self._held:
            with trio.move_on_at(until) as patience:
                await self._changed.park()
            if self._interrupted or patience.cancelled_caught:
                return NOTHING
        left = until - trio.current_time()
        try:
            return await child.call("train", TrainStats, round=round, steps=steps, seconds=left, **self._steered)
        except TrainerHeld:
            if child.replaced:
                raise
            return NOTHING

    def steer(self, inner: InnerSection) -> None:
        self._steered = {"inner": {key: getattr(inner, key) for key in ("lr", "muon_lr", "steps")}}

    async def interrupt(self) -> None:
        self._interrupted = True
        if self._child is not None and not self._held:
            await self._child.interrupt()
        else:
            self._changed.unpark_all()  # `train`, which waits, ends
            await trio.lowlevel.checkpoint()

    async def hold(self) -> None:
        self._held = self._to_hold = True
        self._changed.unpark_all()  # who waits for a child, which does not come now
        if self._process is not None:
            with trio.CancelScope() as self._holding:
                await self._process.freeze()

    async def release(self) -> bool:
        if not self.go_on() and (child := self._process) is not None:
            loaded = self.parameters() if self._vector is not None else None
            await child.thaw()
            if loaded is not None:
                self.load(loaded)  # over what the rest of the step made of them
        return not self._to_hold and self.go_on()

    def go_on(self) -> bool:
        self._to_hold = False
        self._holding.cancel()
        if self._process is None or not self._process.frozen:
            self._held = False
            if self._process is not None:
                self._process.rest(False)
            self._changed.unpark_all()
        return not self._held

    async def evaluate(self, *, thorough: bool, wait: bool = True) -> float:
        if self._child is None and not wait:
            raise TrainerDied("the trainer is being started again")
        answer = await self._ask("evaluate", replies.EvaluateReply, thorough=thorough)
        if not thorough:
            self.accuracy = answer.accuracy
        return answer.loss

    async def heldout(self, *, seed: int, sequences: int) -> float:
        return (await self._ask("heldout", replies.EvaluateReply, seed=seed, sequences=sequences)).loss

    async def gradient(self, *, seed: int, first: int, last: int) -> tuple[float, Vector] | None:
        loss = (await self._ask("slope", replies.LossReply, seed=seed, first=first, last=last)).loss
        if loss is None:
            return None
        assert self._gradient is not None
        return loss, self._gradient.copy()

    async def rollouts(
        self, *, version: int, count: int | None = None, policy: str = ""
    ) -> tuple[list[RolloutGroup], float]:
        answer = await self._ask("rollouts", replies.RolloutsReply, version=version, count=count, policy=policy)
        return list(answer.unpacked), answer.seconds

    async def answer(self, tasks: Sequence[TaskRef], *, version: int, policy: str) -> Answered:
        asked = [[task.name, task.difficulty, task.seed] for task in tasks]
        answer = await self._ask("answer", replies.AnswerReply, tasks=asked, version=version, policy=policy)
        return Answered(answer.unpacked, answer.reward, answer.seconds)

    async def learn(self, pool: Groups, sampled: Groups = (), probation: Collection[str] = ()) -> Learned:
        others = {"pool": await _maps(pool), "sampled": await _maps(sampled), "probation": list(probation)}
        return await self._ask("learn", Learned, **others)

    async def score(self, groups: Groups, *, texts: bool = False) -> list[dict[str, Any]]:
        scores = (await self._ask("score", replies.ScoreReply, groups=await _maps(groups), texts=texts)).scores
        if len(scores) != len(groups):
            raise self._unfit(f"answered nonsense: {len(scores)} scores of {len(groups)} groups")
        return list(map(asdict, scores))

    async def mark(self) -> Marked:
        if self._child is None:  # of its successor there is nothing to ask yet
            raise TrainerDied("the trainer is being started again")
        return (await self._child.call("mark", replies.MarkReply)).marked

    @property
    def states(self) -> tuple[Path, Path, Path]:
        return states_in(self._settings.scratch)

    async def places(self, batches: Batches) -> list[tuple[int, int]]:
        return list((await self._ask("places", replies.PlacesReply, size=batches.size, **_whose(batches))).places)

    async def drawn(self, batches: Batches) -> float | None:
        asked = {"size": batches.size, "pieces": list(batches.pieces), **_whose(batches)}
        return (await self._ask("drawn", replies.LossReply, **asked)).loss

    async def replay(self, slice: Slice) -> Replayed:
        stretch = slice.stretch
        whose = {"peer": slice.author, "round": stretch.round, "step": stretch.step, "steps": stretch.steps}
        ends = {"start": point_row(stretch.start), "claimed": point_row(stretch.end)}
        return await self._ask("replay", Replayed, size=slice.size, pieces=list(slice.pieces), **whose, **ends)

    async def calibrate(self) -> Replayed:
        return await self._ask("calibrate", Replayed)

    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        if not 0 <= length <= MAX_SAMPLE:
            raise ValueError(f"length = {length} is not valid; expected 0 to {MAX_SAMPLE} bytes")
        how = {"length": length, "temperature": temperature, "seed": seed}
        return (await self._ask("sample", replies.SampleReply, prompt=prompt, **how)).text

    async def feed(self, texts: Sequence[str]) -> None:
        """Train on these files as well, from the next step on, and after a restart."""
        self._settings = replace(self._settings, texts=(*self._settings.texts, *texts))
        if self._child is not None:
            with suppress(TrainerDied):  # its successor is told of all
                await self._child.call("feed", Empty, texts=list(texts))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a child running until cancelled; started once its layout is known. Raises TrainerFailed."""
        if not hasattr(os, "memfd_create"):
            raise TrainerFailed("training needs Linux (memfd_create); on this system run with --role relay or watch")
        named = self._settings.scratch
        with nullcontext(named) if named else tempfile.TemporaryDirectory(prefix="swarmnode-trainer-") as scratch:
            self._settings = replace(self._settings, scratch=scratch)
            memory_fd = os.memfd_create("swarmnode-parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                found = await with_models(self._spec, self._settings)
                self._settings = replace(self._settings, base=found.base)  # its caps may have changed meanwhile
                await self._keep_running(memory_fd, task_status)
            finally:
                self._is_over = True
                self._changed.unpark_all()
                remove(self.states[0].parent)
                os.close(memory_fd)  # the mapping keeps the memory for whoever still reads parameters()

    async def _keep_running(self, memory_fd: int, task_status: trio.TaskStatus[None]) -> None:
        failed_starts, back_off, started = 0, FIRST_BACK_OFF, False
        while True:
            await trio.to_thread.run_sync(empty, self._settings.scratch)
            while self._held:
                await self._changed.park()
            # What libraries print is of no use to most; what the author of a task prints is meant to be read.
            level = logging.INFO if self._settings.task else logging.DEBUG
            child = TrainerChild(level, replies.most_bytes(self._spec.rollouts))
            failure: TrainerFailed | None = None
            introduced = -1  # answers until it was ready; 0: it never was; -1: there was no process
            with suppress(OSError):  # it could not be started, for want of memory or descriptors
                async with child.running(memory_fd, self.rules, environment(self._settings)):
                    self._process, child.cores, introduced = child, self._cores, 0
                    try:
                        await self._introduce(child, memory_fd)
                        introduced = child.answered
                        if not started:
                            task_status.started()
                            started = True
                        await child.ended.wait()
                    except TrainerFailed as error:
                        failure = error  # raised below, outside the nursery, which would wrap it in a group
                    except TrainerDied:
                        pass  # before it was ready; counted below
                    finally:
                        self._spent_before = self.spent
                        self._cpu_before = self.cpu_seconds
                        self._child = self._process = None
            if child.replaced:
                logger.info("%s", CAPPED)
                continue
            told = self._of_memory(f"{failure or child.cause()}\n{child.last_words()}") if introduced >= 0 else ""
            if told and not started:
                raise TrainerFailed(f"the trainer cannot start: {told}", exit_code=CONFIG)
            if failure is not None and not told:
                raise failure
            failed_starts = failed_starts + 1 if not told and (introduced == 0 or not started) else 0
            if failed_starts and self._may_take_vllm():
                # Whatever made for another processor or more memory does to a process, it must not cost the training.
                self._settings = replace(self._settings, sampling="torch")
                logger.warning(
                    "the trainer ended as it started (%s), perhaps by vLLM, which is installed here: from now on "
                    "answers are sampled in torch, which is slower; sampling = 'torch' does so from the start",
                    child.cause(),
                )
            if failed_starts == MAX_FAILED_STARTS:
                raise TrainerFailed(
                    f"the trainer ended {failed_starts} times before it was ready ({child.cause()}); "
                    f"its last words: {child.last_words() or 'none'}. What was reached is on the disk: look at "
                    "swarmnode doctor, then start the node again"
                )
            if child.answered > introduced > 0:  # it was fit for work
                back_off = FIRST_BACK_OFF
            self.restarts, self.ended = self.restarts + 1, told or child.cause()
            logger.warning("trainer ended (%s); starting it again in %.1f s", self.ended, back_off)
            with trio.CancelScope() as self._backing_off:
                await trio.sleep(back_off)
            back_off = min(2 * back_off, LAST_BACK_OFF)

    def _of_memory(self, said: str) -> str:
        """That the owner's cap on memory ended a child which `said` that; empty where nothing speaks for it."""
        cap = self._settings.memory / 1e9
        if not cap or NO_MEMORY.search(said) is None:
            return ""
        more = max(1.0, 2 * cap)
        return (
            f"memory = {cap:g} GB, its cap, is too little: swarmnode caps memory={more:g} gives it more, or --memory "
            f"{more:g} where the node is started with that option"
        )

    def _may_take_vllm(self) -> bool:
        policy = self._settings.policy or self._spec.rollouts.policy
        on_cpu, wanted = self.free is None, self._settings.sampling == "auto"
        return on_cpu and wanted and hf_model(policy) is not None and find_spec("vllm") is not None

    def _tell_sampling(self, told: dict[str, str] | None) -> None:
        """Say what samples; once, unless it changes."""
        if told == self.sampling:
            return
        self.sampling = told
        if told is not None and told["why"]:
            logger.warning("%s", told["why"])
        elif told is not None and told["by"] != "torch":
            logger.info("answers are sampled by %s", told["by"])

    async def _introduce(self, child: TrainerChild, memory_fd: int) -> None:
        """Tell a new child its work and learn its layout. Raises TrainerFailed, TrainerDied."""
        told = self._settings.texts
        run = {"spec": encode(self._spec), "run_id": self._run_id, "peer_id": self._peer_id}
        if self._vector is None:
            await self._weigh(child, run)
        keep = self._vector is not None
        answer = await child.call("init", replies.InitReply, **run, keep=keep, **asdict(self._settings))
        layout = answer.table
        if self._vector is None:
            size, moments = layout.parameters, answer.moments
            memory = self._mapped(memory_fd, 8 * size + 8 + 4 * moments)
            self._layout = layout
            self._vector, self._gradient = np.frombuffer(memory, "<f4", 2 * size).reshape(2, size)
            self._updates = np.frombuffer(memory, "<i8", 1, 8 * size)
            self._moments = np.frombuffer(memory, "<f4", moments, 8 * size + 8)
        elif layout != self._layout:
            raise TrainerFailed("the trainer came back with another layout; were its files changed? restart the node")
        while len(told) < len(self._settings.texts):  # more have come meanwhile
            more, told = self._settings.texts[len(told) :], self._settings.texts
            await child.call("feed", Empty, texts=list(more))
        if answer.why and answer.device != self.device:  # told once
            logger.warning("%s", answer.why)
        self.device, self.has = answer.device, answer.has
        if (sandbox := asdict(answer.sandbox)) != self.sandbox:  # told once, unless it changes
            self.sandbox = sandbox
            if answer.sandbox.enforced:
                logger.info("the trainer's sandbox holds: %s", ", ".join(answer.sandbox.enforced))
            for lacking in answer.sandbox.missing:
                logger.warning("the trainer's sandbox lacks %s: %s", lacking.part, lacking.why)
        if (disk := answer.states) is not None and disk.free * FREE_SHARE < disk.wanted:
            logger.warning(
                "audits need %.1f GB of disk for states of this node's work, and may have half of the %.1f GB that are "
                "free; what it cannot show counts as a lie. Make room on the disk of %s",
                disk.wanted / 1e9,
                disk.free / 1e9,
                self._settings.scratch,
            )
        self._tell_sampling(child.sampling)
        self._child, self.ended, self._least = child, "", self.ranks * child.own_memory()
        self._changed.unpark_all()

    def _mapped(self, memory_fd: int, size: int) -> mmap.mmap:
        """The memory that a trainer says it filled. Sealed first: of what it cut off later, a look would end us."""
        if os.fstat(memory_fd).st_size != size:
            raise self._unfit(f"answered nonsense: its memory has not the {size} bytes of its layout")
        try:
            fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return mmap.mmap(memory_fd, size)
        except (OSError, ValueError) as error:
            raise self._unfit(f"answered nonsense: its memory is not what it was: {error}") from error

    def _unfit(self, reason: str) -> TrainerDied:
        """End the child; what is to be raised then."""
        if self._process is not None:
            self._process.end(reason)
        return TrainerDied(f"the trainer {reason}")

    async def _weigh(self, child: TrainerChild, run: dict[str, Any]) -> None:
        """Say what the run will take here, with as many of a step's samples at once as there is memory for.

        Raises TrainerFailed where one of them needs more than there is.
        """
        batch = self._spec.inner.batch
        keeping = replace(self._keeping, ranks=self._settings.ranks, sharded=self._settings.sharded)
        at_once = min(self._settings.micro_batch or batch, batch)
        while True:
            settings = replace(self._settings, micro_batch=at_once)
            answer = await child.call("weigh", replies.WeighReply, **run, **asdict(settings))
            self.free = free = answer.free
            if answer.weight is None or self._spec.exchange.method == "sapo":
                return
            machine = Machine.here(self._settings.scratch, free)
            self.weight = answer.weight
            self.needs = needs(self._spec, self.weight, keeping, on_device=free is not None)
            if at_once == 1 or (self.needs.memory <= machine.memory and self.needs.device <= machine.device):
                break
            at_once //= 2
        self._settings = settings
        if at_once < batch:
            logger.info("%d of a step's %d sequences are computed at once", at_once, batch)
        logger.info("%s", in_words(self.needs, machine))
        if why := refusal(self.needs, machine):
            raise TrainerFailed(why)

    def _living(self) -> TrainerChild | None:
        """The child, where it can be asked; it may have failed a moment ago."""
        return None if self._child is None or self._child.ended.is_set() else self._child

    async def _ask(self, op: str, kind: type[T], **arguments: Any) -> T:
        """What the child answers, a `kind`; waits for one where it is being started again. Raises TrainerDied."""
        while (child := self._living()) is None or self._held:
            if self._is_over:
                raise TrainerDied("the trainer is not started again")
            if self._held and op not in OWNERS:
                raise TrainerHeld("training is paused")
            if self._held and child is None and op != "remember":
                raise TrainerHeld("training is paused, and its trainer has ended; swarmnode resume starts it again")
            if child is not None:
                break
            await self._changed.park()
        answer = await child.call(op, kind, **arguments)
        self._tell_sampling(child.sampling)
        return answer

    def _shared(self) -> Vector:
        if self._vector is None:
            raise RuntimeError("the trainer has not started yet")
        return self._vector


def _whose(batches: Batches) -> dict[str, Any]:
    return {"peer": batches.author, "round": batches.round, "steps": list(batches.steps)}


async def _maps(groups: Groups) -> list[tuple[str, dict[str, Any]]]:
    """As they cross the socket. Those of a full pool take half a second, and not the daemon's own thread's."""
    return await trio.to_thread.run_sync(lambda: [(author, group.to_map()) for author, group in groups])
