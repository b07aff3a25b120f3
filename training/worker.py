"""The trainer process: owns torch and the device, and does what the daemon's commands say.

Commands and replies are msgpack maps on a socket pair, each reply behind its length in 4 bytes. A command is {id, op,
...}, which the method `do_OP` answers with these arguments; its reply is {id, ok: {...}, spent, sampling}, or {id,
error: text, harmless}: one that is not harmless leaves the process unfit, and of `weigh` and `init` any is final.
`spent`: seconds since the process began, by what for; `sampling`: what writes answers in a task of rollouts. `init`
comes first, but for `weigh`, and `quit` last; but for `train` and what learns, all others may come between two steps of
`train` as well.

Parameters never pass through the socket: they lie in the shared memory MEMORY_FD as one float32 vector, and behind them
there is room for a gradient, which takes no memory before there is one, for the number of updates, and for the
optimizer's moments. On a CPU it is the very memory that is trained; a GPU trains a copy, written back at least every
few seconds, the moments after `train` only, and so do ranks that divide the model. So whoever starts the trainer again
loses none of it. States from which steps are repeated lie in files of its directory (training/verify/vectors): its own,
and others' that the daemon fetched. The process, which begins in `confined.py`, ends with its parent, also when the
socket closes.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import select
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from swarmnode.training import sandbox
from swarmnode.training.mapped import keep_in
from swarmnode.training.options import SettingError
from swarmnode.training.ranks import ALONE, Ranks
from swarmnode.training.rl.section import hf_model
from swarmnode.training.runspec import RunSpec, decode
from swarmnode.training.tasks import MAY_LACK, Assignment, TaskError, load_task
from swarmnode.training.tokens import CorpusError
from swarmnode.training.verify.recorder import Recorder, room, stretch_steps
from swarmnode.training.verify.replay import Distance, distance
from swarmnode.training.verify.trace import Point, State, Stretch, point_of, row_of
from swarmnode.training.verify.vectors import FREE_SHARE, Vectors, states_in

WRITE_BACK_SECONDS = 5.0  # what a killed trainer on a GPU loses at the most
READ_SIZE = 1 << 20  # bytes
NO_ROOM = "; the GPU has no more memory for this: train on the CPU by --device cpu, or something smaller"
DENIED = (
    ". The trainer is in a sandbox: beside the folder of its task it reads what --sandbox-read PATH names, and it "
    "writes temporary files only"
)
SAY_FIRST = 5.0  # s for rank 0 to say what went wrong, before another rank ends everything


class Closed(Exception):
    """The daemon closed the socket: there is nobody left to work for."""


# Whose message alone says what happened and what to do, without the name of the exception.
FOR_PEOPLE = (CorpusError, SettingError, TaskError)


class Worker:
    """One task, its inner loop, and the answers to commands."""

    def __init__(
        self, commands: socket.socket, memory_fd: int, confined: sandbox.SandboxReport, ranks: Ranks = ALONE
    ) -> None:
        self._socket = commands
        self._ranks = ranks
        self._arrived = msgpack.Unpacker(max_buffer_size=0)  # 0: without a limit
        self._confined = confined
        self._memory_fd = memory_fd
        self._spent = {"train": 0.0, "evaluate": 0.0, "audit": 0.0}  # seconds, since the process began
        self._task: Any = None
        self._recorder: Recorder | None = None
        self._texts = 0  # that were given

    def serve(self) -> None:
        """Answer commands until `quit`. Raises Closed."""
        while (command := self._next(wait=True))["op"] != "quit":
            if command["op"] not in ("init", "push", "weigh"):
                self._pull()  # not between steps: the vector on the device is then the newer one
            self.reply(command)
        self.reply(command)

    def do_weigh(self, *, spec: bytes, run_id: str, peer_id: str, **settings: Any) -> dict[str, Any]:
        """What the model will take, nothing of which is taken yet; None where the task does not tell.

        `free`: bytes of the device's memory, where it has its own.
        """
        self._check_confined()
        import torch

        from swarmnode.training.weigh import weigh

        run = decode(spec)
        assignment = Assignment(
            run_id, peer_id, **{name: settings[name] for name in ("tokenizer", "base", "policy", "task")}
        )
        try:
            weight = weigh(load_task(run.task.name, settings["task"]), run, assignment, settings["micro_batch"])
        except Exception as error:  # `init` says what is wrong, if anything is; to weigh is not needed to train
            print(f"the model's memory is not known: {_bug(error)}", flush=True)
            weight = None
        on_device = _wanted_device(run, settings) != "cpu" and torch.cuda.is_available()
        free = min(torch.cuda.mem_get_info()[0], settings["device_memory"] or math.inf) if on_device else None
        return {"weight": None if weight is None else asdict(weight), "free": free}

    def do_init(self, *, spec: bytes, run_id: str, peer_id: str, keep: bool, **settings: Any) -> dict[str, Any]:
        """Build the task and put its parameters into the shared memory, or take them from there.

        `settings` are the TrainerSettings of node/trainer/child, by name.
        """
        self._check_confined()
        os.nice(settings["nice"])
        gc.disable()  # what is imported stays: to look through it again and again takes a seventh of the time
        import torch

        from swarmnode.training.inner import InnerLoop, Probes, layout_of, trained
        from swarmnode.training.optimizer import with_moments

        self._torch, self._peer_id = torch, peer_id
        torch.set_flush_denormal(True)
        run = decode(spec)
        keep_in(Path(settings["scratch"]) if settings["scratch"] else None)
        is_large = run.needs_data or _is_language_model(run, settings)
        threads = settings["threads"] or (os.cpu_count() if is_large else 1) or 1
        torch.set_num_threads(max(1, threads // self._ranks.count))
        self._device, why = _device(_wanted_device(run, settings))
        self._check_ranks(run, sharded=settings["sharded"])
        if self._device == "cuda":
            torch.cuda.set_device(self._ranks.rank)
            torch.backends.cudnn.allow_tf32 = False  # float32 as the run says: others repeat it elsewhere
            if settings["device_memory"]:
                has = torch.cuda.get_device_properties(self._ranks.rank).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, settings["device_memory"] / has))
        self._ranks.connect(settings["scratch"], self._device)
        same = ("heldout", "tokenizer", "base", "policy", "sampling", "task")
        given = {name: settings[name] for name in same}
        assignment = Assignment(run_id, peer_id, texts=tuple(settings["texts"]), **given)
        if settings["check"]:
            from swarmnode.training.trial import look

            look(run, assignment, settings["task"], self._device)
        self._task = load_task(run.task.name, settings["task"])(run, assignment, self._device)
        gc.freeze()
        gc.enable()
        if settings["sharded"] and self._ranks.count > 1:
            from swarmnode.training.sharded import Sharded

            self._ranks = Sharded(self._ranks, self._device, self._task.model)
        layout = layout_of(self._task.model)
        size = 4 * layout.parameters
        moments = sum(parameter.numel() for parameter in with_moments(self._task.model, run))
        if not keep:
            os.ftruncate(self._memory_fd, 2 * size + 8 + 4 * moments)
        if self._confined.enforced:
            sandbox.cap_files(2 * size if run.audited else 0)
        mapped = mmap.mmap(self._memory_fd, 2 * size + 8 + 4 * moments)
        self._shared, self._gradient = torch.frombuffer(mapped, dtype=torch.float32, count=size // 2).chunk(2)  # (P,)
        self._updates = np.frombuffer(mapped, np.int64, 1, 2 * size)
        kept = np.frombuffer(mapped, np.float32, moments, 2 * size + 8)  # torch's refuses an empty one
        self._kept = torch.from_numpy(kept)  # (P + A,)
        if self._device == "cuda":
            _pin(self._shared)
        owned = sum(parameter.numel() for _, parameter in trained(self._ranks.own(self._task.model)))
        # Where the model is whole, the other ranks must not write what rank 0 writes.
        in_place = self._device == "cpu" and not self._ranks.rank and not self._ranks.sharded
        self._vector = self._shared if in_place else torch.empty(owned, device=self._device)  # (P,), or this rank's
        if keep:
            self._pull()
        own: dict[str, Any] = {"vector": self._vector, "moments": self._kept if in_place else None}
        loop = Probes if run.exchange.method == "seed" else InnerLoop
        self._loop = loop(run, self._task, peer_id=peer_id, keep=keep, ranks=self._ranks, **own)
        self._loop.micro_batch = min(settings["micro_batch"] or run.inner.batch, run.inner.batch)
        if keep:
            self.do_remember()
        self._texts = len(assignment.texts)
        self._states = [Vectors(folder) for folder in states_in(settings["scratch"])]
        told: dict[str, float] | None = None
        shows = run.audited and settings["shared"] and not self._ranks.rank
        has_same = self._texts or not getattr(self._task, "needs_text", False)  # else nobody has what it trains on
        if shows and has_same and hasattr(self._task, "places"):
            left = min(shutil.disk_usage(settings["scratch"]).free, settings["disk"] or math.inf)
            told = {"wanted": room(run.inner.steps, layout.parameters), "free": left}
            most = min(told["wanted"], FREE_SHARE * (settings["disk"] or math.inf))
            self._states[0] = Vectors(self._states[0].folder, budget=most, share=FREE_SHARE)
            every = stretch_steps(run.inner.steps, layout.parameters)  # in short rounds as well: who waits trains on
            self._recorder = Recorder(self._loop.view, self._states[0], every=every)
        self._left = self._vector.clone() if self._recorder is not None else None  # where the last `train` ended
        self._push()
        shape = [[slot.name, list(slot.shape)] for slot in layout.slots]
        here = {"device": self._device, "why": why, "sandbox": asdict(self._confined), "states": told}
        has = [name for name in MAY_LACK if hasattr(self._task, name)]
        return {"layout": shape, "moments": moments, **here, "has": has}

    def do_remember(self) -> None:
        """Go on with the moments in the memory; with fresh ones where it died in an audit of others, or diverged."""
        optimizer, updates = self._loop.optimizer, int(self._updates[0])
        unfit = updates <= 0 or not bool(self._kept.isfinite().all())
        if bool(self._ranks.sum(self._torch.tensor(float(unfit)))):  # all have looked before one of them writes there
            optimizer.moments.zero_()
            updates = 0
        elif optimizer.moments is not self._kept:
            for whole, own in optimizer.pieces:
                optimizer.moments[own].copy_(self._kept[whole])
        optimizer.count(updates)
        if self._recorder is not None:
            self._recorder.lose()

    @contextmanager
    def _of_others(self) -> Iterator[None]:
        """While the block lasts, the moments in the memory are not this node's."""
        self._updates[0] = -1
        try:
            yield
        finally:
            self._count()

    def _count(self) -> None:
        """The moments in the memory are the present ones."""
        self._updates[0] = self._loop.optimizer.updates

    def do_train(
        self, *, round: int, steps: int, seconds: float, inner: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self._loop.steer(inner or {})
        recorder = self._recorder
        if recorder is not None and recorder.is_open and not self._vector.equal(self._left):
            recorder.lose()
        self._written_back = time.monotonic()
        progress = self._loop.train(round=round, steps=steps, seconds=seconds, between=self._between_steps)
        self._ranks.tell({"op": "stop"})
        if self._loop.mend() and recorder is not None:
            recorder.lose()
        self._push(moments=True)
        self._count()
        if self._left is not None:
            self._left.copy_(self._vector)
        self._spent["train"] += progress.seconds
        return asdict(progress)

    def _between_steps(self) -> bool:
        """Answer what has come in meanwhile; whether to stop training."""
        if self._vector is self._shared:
            self._count()
        if time.monotonic() - self._written_back > WRITE_BACK_SECONDS:
            self._push()
            self._written_back = time.monotonic()
        while command := self._next(wait=False):
            if command["op"] == "quit":
                self._push()
                raise Closed
            self.reply(command)
            if command["op"] == "stop":
                return True
        if self._recorder is not None:
            self._recorder.before(*self._loop.place, self._texts)
        self._ranks.tell({"op": "step"})
        return False

    def _check_confined(self) -> None:
        """Raises TaskError where the sandbox lacks a part, and this node's owner wants all of it."""
        if self._confined.mode == "require" and self._confined.missing:
            lacking = "; ".join(f"{part.part}: {part.why}" for part in self._confined.missing)
            raise TaskError(
                f"sandbox = 'require', and this machine cannot enforce all of the trainer's sandbox ({lacking}). Run "
                "on a newer kernel, or with sandbox = 'auto' to train with what there is"
            )

    def _check_ranks(self, run: RunSpec, *, sharded: bool) -> None:
        """Raises TaskError where the ranks cannot share this run's steps."""
        count = self._ranks.count
        if count == 1:
            return
        if not run.needs_data:
            raise TaskError(f"ranks = {count}: a run by rollouts trains on one device; start the node with --ranks 1")
        if run.exchange.method == "seed":
            raise TaskError("a run by seeds needs no gradients to share: start the node with --ranks 1")
        if run.inner.batch < count:
            raise TaskError(
                f"ranks = {count}: a step of this run has {run.inner.batch} sequences, too few for each rank to have "
                f"one; start the node with --ranks {run.inner.batch}"
            )
        if sharded and run.audited:
            raise TaskError(
                "a run with audits has each node show states of its whole model, which ranks that divide it have not; "
                "start the node without --sharded, or without --ranks"
            )
        if self._device == "cuda" and (there := self._torch.cuda.device_count()) < count:
            raise TaskError(f"ranks = {count}: torch finds {there} CUDA devices here; use --ranks {there}")

    def do_feed(self, *, texts: Sequence[str]) -> None:
        self._task.feed(texts)
        self._texts += len(texts)

    def do_evaluate(self, *, thorough: bool, seed: int | None = None) -> dict[str, Any]:
        drawn = {} if seed is None else {"seed": seed}
        with self._timed("evaluate"):
            loss = float(self._task.evaluate(thorough=thorough, **drawn))
            return {"loss": loss, "accuracy": float(getattr(self._task, "accuracy", math.nan))}

    def do_heldout(self, *, seed: int, sequences: int) -> dict[str, Any]:
        if not hasattr(self._task, "heldout"):
            return self.do_evaluate(thorough=False, seed=seed)
        with self._timed("evaluate"), self._torch.no_grad():
            return {"loss": float(self._task.loss(self._task.heldout(seed)[:sequences]))}

    def do_slope(self, *, seed: int, first: int, last: int) -> dict[str, Any]:
        if not hasattr(self._task, "heldout"):
            return {"loss": None}
        with self._timed("evaluate"):
            loss, gradient = self._loop.slope(self._task.heldout(seed)[first:last])
            for whole, own in self._ranks.pieces:
                self._gradient[whole].copy_(gradient[own])
            self._ranks.meet()
        return {"loss": loss}

    def do_sample(self, *, prompt: bytes, length: int, temperature: float, seed: int) -> dict[str, Any]:
        text = self._task.sample(prompt, length=length, temperature=temperature, seed=seed)
        if not isinstance(text, bytes):
            raise TaskError(f"sample of the task gives a {type(text).__name__}: give bytes")
        return {"text": text}

    def do_stop(self) -> None:
        """Whoever reads the command knows what follows."""

    do_quit = do_stop

    # --- a task of rollouts -------------------------------------------------------------------------------------------

    def do_rollouts(self, *, version: int, count: int | None, policy: str) -> dict[str, Any]:
        return self._trained(self._task.rollouts(version=version, count=count, policy=policy))

    def do_answer(self, *, tasks: Sequence[Any], version: int, policy: str) -> dict[str, Any]:
        return self._trained(self._task.answer(tasks, version=version, policy=policy))

    def do_learn(self, *, pool: Sequence[Any], sampled: Sequence[Any], probation: Sequence[str]) -> dict[str, Any]:
        return self._trained(self._task.learn(pool, sampled, probation))

    def do_score(self, *, groups: Sequence[Any], texts: bool) -> dict[str, Any]:
        return {"scores": self._task.score(groups, texts=texts)}

    def _trained(self, did: dict[str, Any]) -> dict[str, Any]:
        """What a task of rollouts did, as seconds of training."""
        self._push()
        self._spent["train"] += did["seconds"]
        return did

    def _sampling(self) -> dict[str, str] | None:
        """What writes answers now, and why it is not what it was to be; None in a task that writes none."""
        engine = getattr(self._task, "engine", None) if hasattr(self._task, "rollouts") else None
        return None if engine is None else asdict(engine.status)

    # --- what others may repeat (training/verify) ---------------------------------------------------------------------

    def do_mark(self) -> dict[str, Any]:
        if self._recorder is None:
            return {"life": b"", "stretches": []}
        stretches = self._recorder.mark(*self._loop.place)
        return {"life": self._recorder.life, "stretches": [row_of(stretch) for stretch in stretches]}

    def do_places(self, *, peer: str, round: int, steps: Sequence[int], size: int) -> dict[str, Any]:
        """No places where steps cannot be drawn from so little text, or the task cannot tell."""
        with suppress(CorpusError):
            if hasattr(self._task, "places"):
                return {"places": self._loop.places(peer, round, steps, size=size)}
        return {"places": []}

    def do_drawn(
        self, *, peer: str, round: int, steps: Sequence[int], size: int, pieces: Sequence[Any]
    ) -> dict[str, Any]:
        if not hasattr(self._task, "places") or not size:
            return {"loss": None}
        loss = math.nan  # where nothing can be drawn from such text
        with suppress(CorpusError), self._timed("evaluate"), self._task.on(size, pieces):
            loss = self._loop.drawn(peer, round, steps)
        return {"loss": loss}

    def do_replay(
        self, *, peer: str, start: Any, claimed: Any, size: int, pieces: Sequence[Any], **whose: int
    ) -> dict[str, Any]:
        """`whose`: the round, the first of its steps, and how many."""
        before = self._spent["audit"]
        found = Distance(math.inf, math.inf, math.inf)
        with self._timed("audit"):
            first, last = self._state(point_of(start)), self._state(point_of(claimed))
            if first is None or last is None:
                return self._compared([], 0.0)
            if self._loop.fits(first):
                text = self._task.on(size, pieces) if size else nullcontext()
                again = self._loop.replayed(first, peer_id=peer, **whose)
                with suppress(CorpusError), self._of_others(), text, again as replayed:  # nobody trains on such text
                    found = distance(first, last, replayed)
        return self._compared([found], self._spent["audit"] - before)

    def _state(self, point: Point) -> State | None:
        """What the daemon put there, or this trainer; None where both happened before this process was started."""
        found = [next((v for kept in self._states if (v := kept.get(id)) is not None), None) for id in point.vectors]
        return State(found[0], found[1], point.updates) if found[0] is not None and found[1] is not None else None

    def do_calibrate(self) -> dict[str, Any]:
        before, found = self._spent["audit"], []
        recorder = self._recorder
        with self._timed("audit"):
            if recorder is not None and (last := recorder.last) is not None and last.texts == self._texts:
                start, end = self._state(last.start), self._state(last.end)
                if start is not None and end is not None:
                    found = [self._repeated(last, start, end, 1 if self._torch.get_num_threads() > 1 else 2)]
        return self._compared(found, self._spent["audit"] - before)

    def _repeated(self, own: Stretch, start: State, end: State, threads: int) -> Distance:
        """How far this node's own steps end from where they did, on so many threads."""
        usual = self._torch.get_num_threads()
        self._torch.set_num_threads(threads)
        try:
            whose = {"round": own.round, "step": own.step, "steps": own.steps}
            with self._of_others(), self._loop.replayed(start, peer_id=self._peer_id, **whose) as replayed:
                return distance(start, end, replayed)
        finally:
            self._torch.set_num_threads(usual)

    def _compared(self, found: list[Distance], seconds: float) -> dict[str, Any]:
        return {"distances": [asdict(each) for each in found], "seconds": seconds}

    # --- the memory, the clock and the socket -------------------------------------------------------------------------

    def _pull(self) -> None:
        if self._vector is not self._shared:
            for whole, own in self._ranks.pieces:
                self._vector[own].copy_(self._shared[whole])
            self._ranks.publish()

    def _push(self, *, moments: bool = False) -> None:
        """Give the device's parameters to the daemon, and perhaps the optimizer's moments."""
        if self._ranks.sharded:
            self._ranks.tell({"op": "push", "moments": moments})
        self.do_push(moments=moments)

    def do_push(self, *, moments: bool) -> None:
        """Give what this rank has of them; told by rank 0, and by nobody where the model is whole."""
        if self._vector is not self._shared:
            for whole, own in self._ranks.pieces:
                self._shared[whole].copy_(self._vector[own])
            for whole, own in self._loop.optimizer.pieces if moments else ():
                self._kept[whole].copy_(self._loop.optimizer.moments[own])
            self._ranks.meet()

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._spent[what] += time.perf_counter() - began

    def reply(self, command: dict[str, Any]) -> None:
        """Do what a command says and send what came of it; an error in one is not the end of the process."""
        number, op = command["id"], command["op"]
        if op in self._ranks.shared:
            self._ranks.tell(command)
        try:
            done = self._obey(command)
            message = {"id": number, "ok": done, "spent": self._spent, "sampling": self._sampling()}
        except (Closed, MemoryError):
            raise
        except Exception as error:
            text = str(error) if isinstance(error, FOR_PEOPLE) else _bug(error)
            text += DENIED if self._confined.enforced and _was_denied(error) else ""
            text += NO_ROOM if type(error).__name__ == "OutOfMemoryError" else ""  # torch's, which may not be here yet
            # A sample changed nothing, and what was asked may be at fault; but ranks that share it may wait for one.
            harmless = op == "sample" and op not in self._ranks.shared
            message = {"id": number, "error": text, "harmless": harmless}
        try:
            packed = msgpack.packb(message)
            self._socket.sendall(len(packed).to_bytes(4, "big") + packed)
        except OSError as error:
            raise Closed from error

    def _obey(self, command: dict[str, Any]) -> Any:
        arguments = {name: value for name, value in command.items() if name not in ("id", "op")}
        return getattr(self, f"do_{command['op']}")(**arguments)

    def _next(self, *, wait: bool) -> dict[str, Any]:
        """The next command; an empty one where none has come yet and nobody waits. Raises Closed."""
        command: dict[str, Any]
        while not (command := next(self._arrived, {})):
            if not wait and not select.select([self._socket], [], [], 0)[0]:
                break
            try:
                more = self._socket.recv(READ_SIZE)
            except OSError as error:
                raise Closed from error
            if not more:
                raise Closed
            self._arrived.feed(more)
        return command


class Follower(Worker):
    def reply(self, command: dict[str, Any]) -> None:
        try:
            self._obey(command)
        except Closed:
            raise
        except Exception:
            time.sleep(SAY_FIRST)
            raise

    def do_train(self, *, round: int, inner: dict[str, Any] | None = None, **until: float) -> None:  # type: ignore
        self._loop.steer(inner or {})
        self._loop.train(round=round, steps=sys.maxsize, seconds=math.inf, between=self._between_steps)
        self._loop.mend()

    def _between_steps(self) -> bool:
        while (command := self._next(wait=True))["op"] not in ("step", "stop"):
            self.reply(command)
        return bool(command["op"] == "stop")

    def _push(self, *, moments: bool = False) -> None:
        """Rank 0 says when."""


def _bug(error: Exception) -> str:
    """An error that nobody foresaw, perhaps one of a task's author, with the place where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno}, in {place.name})"


def _was_denied(error: BaseException | None) -> bool:
    """Whether the system refused to open something, which is what a sandbox does."""
    return error is not None and (isinstance(error, PermissionError) or _was_denied(error.__cause__))


def _pin(vector: Any) -> None:
    """Have a GPU copy to and from this memory by itself: 649 MB in 12 ms, of pageable memory in 51 (an H100).

    In a round of minutes that is not worth overlapping with steps. Where the driver refuses, copies are slower.
    """
    import torch

    size = vector.numel() * vector.element_size()
    if int(torch.cuda.cudart().cudaHostRegister(vector.data_ptr(), size, 0)):
        print("the GPU's driver does not pin the parameters' memory, so that copies take longer", file=sys.stderr)
        with suppress(RuntimeError):  # the error would be found by whoever looks next
            torch.zeros(1, device="cuda")


def _is_language_model(run: RunSpec, settings: dict[str, Any]) -> bool:  # that is the policy of a run by rollouts
    return not run.needs_data and hf_model(settings["policy"] or run.rollouts.policy) is not None


def _wanted_device(run: RunSpec, settings: dict[str, Any]) -> str:  # small policies stay on the CPU, and vLLM does
    may_leave_cpu = run.needs_data or (_is_language_model(run, settings) and settings["sampling"] != "vllm")
    return "cpu" if settings["device"] == "auto" and not may_leave_cpu else settings["device"]


def _device(wanted: str) -> tuple[str, str]:  # what trains, and what an owner should hear of that
    import torch

    if wanted == "cpu" or torch.cuda.is_available():
        return ("cpu" if wanted == "cpu" else "cuda"), ""
    if wanted == "cuda":
        raise TaskError("--device cuda: torch finds no CUDA device here (swarmnode doctor); use --device auto or cpu")
    idle = torch.version.cuda and sandbox.landlock.cuda_devices()
    return "cpu", "the CPU trains, as CUDA does not start on this GPU: swarmnode doctor says more" if idle else ""


def serve(socket_fd: int, memory_fd: int, confined: sandbox.SandboxReport, ranks: Ranks) -> None:
    """Answer the daemon on the socket, or in another rank than the first do as told, until there is no more to do."""
    ranks.end_with_others()
    commands = socket.socket(fileno=socket_fd)
    commands.setblocking(True)  # the daemon's end of the pair is trio's, which made both non-blocking
    with suppress(Closed):
        (Follower if ranks.rank else Worker)(commands, memory_fd, confined, ranks).serve()
    os._exit(0)  # to take torch apart again takes half a second
