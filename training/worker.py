"""The trainer process: owns torch and the device, and does what the daemon's commands say.

Commands and replies are msgpack maps behind a 4-byte big-endian length, on a socket pair. A command is {id, op, ...};
its reply is {id, ok: {...}} or {id, error: text, fault: bool}, where a fault is one that trying again cannot mend.

    init      spec, run_id, peer_id, ... -> layout     first of all; with keep, the parameters in memory stay
    train     round, steps, seconds -> ..., spent      replies when done or stopped
    feed      texts                                    train on these files as well; also between two steps
    stop      -> nothing                               ends `train` after the step in hand
    evaluate  thorough, seed -> loss, spent            also between two steps of `train`
    heldout   seed, sequences -> loss, spent           on the first of those that the seed draws
    slope     seed, first, last -> loss, spent         on some; the gradient is in the memory. No loss: none either
    sample    prompt, length, temperature, seed -> text    also between two steps
    rollouts  version, count, policy -> groups, seconds, spent    a task of rollouts: ask and answer
    answer    tasks, version, policy -> groups, reward, seconds, spent    the same, asked by others
    learn     pool, sampled, probation -> reward, ..., spent      a task of rollouts: one update from those and these
    mark      -> life, stretches                       before the parameters are touched: what was trained since then
    kept      vector, its id -> vector                 of a state between two stretches; also between two steps
    places    peer, round, step, steps, size -> places     where another's steps read in a text of that many bytes
    replay    state, claimed, ... -> distance, seconds, spent      repeat another's steps, and compare
    calibrate -> distances, seconds, spent             the same of the own newest steps, on one thread and on two
    ping      -> nothing
    quit      -> nothing                               and the process ends

Parameters never pass through the socket: they lie in the shared memory MEMORY_FD as one float32 vector, and behind them
there is room for a gradient, which takes no memory before there is one. On a CPU it is the very memory that is trained;
a GPU trains a copy, written back at least every few seconds and after `train`. The process, which begins in
`confined.py`, ends with its parent, also when the socket closes.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import msgpack

from swarmnode.training import sandbox
from swarmnode.training.corpus import CorpusError
from swarmnode.training.verify.recorder import Recorder, room, stretch_steps
from swarmnode.training.verify.replay import Distance, distance
from swarmnode.training.verify.trace import State, Stretch, row_of, state_of

_LENGTH = struct.Struct(">I")
WRITE_BACK_SECONDS = 5.0  # what a killed trainer on a GPU loses at the most


class Closed(Exception):
    """The daemon closed the socket: there is nobody left to work for."""


class SandboxError(Exception):
    """The sandbox lacks a part, and this node's owner wants all of it."""

    def __init__(self, report: sandbox.SandboxReport) -> None:
        lacking = "; ".join(f"{part.part}: {part.why}" for part in report.missing)
        super().__init__(
            f"sandbox = 'require', and this machine cannot enforce all of the trainer's sandbox ({lacking}). Run on a "
            "newer kernel, or with sandbox = 'auto' to train with what there is"
        )


class Worker:
    """One task, its inner loop, and the answers to commands."""

    def __init__(self, commands: socket.socket, memory_fd: int, confined: sandbox.SandboxReport) -> None:
        self._socket = commands
        self._confined = confined
        self._memory_fd = memory_fd
        self._spent = {"train": 0.0, "evaluate": 0.0, "audit": 0.0}  # seconds, since the process began
        self._recorder: Recorder | None = None
        self._texts = 0  # that were given
        self._answers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "evaluate": self._evaluate,
            "heldout": self._heldout,
            "slope": self._slope,
            "sample": self._sample,
            "feed": self._feed,
            "rollouts": lambda command: self._timed(
                self._task.rollouts(version=command["version"], count=command["count"], policy=command["policy"])
            ),
            "answer": lambda command: self._timed(
                self._task.answer(command["tasks"], version=command["version"], policy=command["policy"])
            ),
            "learn": lambda command: self._timed(
                self._task.learn(command["pool"], command["sampled"], command["probation"])
            ),
            "mark": self._mark,
            "kept": self._kept,
            "places": self._places,
            "drawn": self._drawn,
            "replay": self._replay,
            "calibrate": self._calibrate,
            "ping": lambda command: None,
            "stop": lambda command: None,
        }

    def serve(self) -> None:
        """Answer commands until `quit`. Raises Closed."""
        while (command := self._receive())["op"] != "quit":
            if command["op"] == "init":
                self._reply(command, self._init)
            elif command["op"] == "train":
                self._reply(command, self._train)
            else:
                self._pull()  # not between steps: the vector on the device is then the newer one
                self._reply(command, self._answers[command["op"]])
        self._reply(command, lambda command: None)

    def _init(self, command: dict[str, Any]) -> dict[str, Any]:
        """Build the task and put its parameters into the shared memory, or take them from there."""
        if self._confined.falls_short:
            raise SandboxError(self._confined)
        os.nice(command["nice"])
        import torch

        from swarmnode.training.inner import InnerLoop, layout_of
        from swarmnode.training.runspec import decode
        from swarmnode.training.tasks import Assignment, load_task

        self._torch, self._peer_id = torch, command["peer_id"]
        torch.set_flush_denormal(True)
        spec = decode(command["spec"])
        torch.set_num_threads(command["threads"] or (os.cpu_count() if spec.needs_data else 1) or 1)
        has_use = torch.cuda.is_available() and (spec.needs_data or command["device"] != "auto")
        self._device = _device(command["device"], has_use)  # the policies of rollouts are tiny
        task_class = load_task(spec.task.name, command["task"])
        assignment = Assignment(
            command["run_id"],
            command["peer_id"],
            command["corpus"],
            command["heldout"],
            tuple(command["texts"]),
            command["room"],
            command["policy"],
            command["sampling"],
        )
        self._task = task_class(spec, assignment, self._device)
        layout = layout_of(self._task.model)
        size = 4 * layout.parameters
        if not command["keep"]:
            os.ftruncate(self._memory_fd, 2 * size)
        if self._confined.enforced:
            sandbox.cap_files()
        memory = torch.frombuffer(mmap.mmap(self._memory_fd, 2 * size), dtype=torch.float32)
        self._shared, self._gradient = memory[: layout.parameters], memory[layout.parameters :]  # (P,) each
        on_cpu = self._device == "cpu"
        self._vector = self._shared if on_cpu else self._shared.to(self._device)  # (P,)
        self._loop = InnerLoop(
            spec, self._task, peer_id=command["peer_id"], vector=self._vector, keep=bool(command["keep"])
        )
        self._texts = len(command["texts"])
        every = stretch_steps(spec.inner.steps, layout.parameters) if spec.trust.audit_share > 0 else 0
        if every and self._texts and hasattr(self._task, "places"):  # else nobody else has what it trains on
            self._recorder = Recorder(self._loop.state, every=every, budget=room(layout.parameters))
        self._left = self._vector.clone() if self._recorder is not None else None  # where the last `train` ended
        self._push()
        shape = [[slot.name, list(slot.shape)] for slot in layout.slots]
        held = {"sandbox": self._confined.to_map(), "sampling": self._sampling()}
        return {"layout": shape, "device": self._device, **held}

    def _sampling(self) -> dict[str, str] | None:
        """What writes answers now, and why it is not what it was to be; None in a task that writes none."""
        if not hasattr(self._task, "rollouts"):
            return None
        from swarmnode.training.rl.engine import Engine

        engine = getattr(self._task, "engine", None)
        return asdict(engine.status) if isinstance(engine, Engine) else None

    def _train(self, command: dict[str, Any]) -> dict[str, Any]:
        self._pull()
        recorder = self._recorder
        if recorder is not None and recorder.is_open and not self._vector.equal(self._left):
            recorder.lose()
        self._written_back = time.monotonic()
        progress = self._loop.train(
            round=command["round"], steps=command["steps"], seconds=command["seconds"], between=self._between_steps
        )
        self._push()
        if self._left is not None:
            self._left.copy_(self._vector)
        self._spent["train"] += progress.seconds
        return {**asdict(progress), "spent": self._spent}

    def _between_steps(self) -> bool:
        """Answer what has come in meanwhile; whether to stop training."""
        if time.monotonic() - self._written_back > WRITE_BACK_SECONDS:
            self._push()
            self._written_back = time.monotonic()
        while select.select([self._socket], [], [], 0)[0]:
            command = self._receive()
            if command["op"] == "quit":
                self._push()
                raise Closed
            self._reply(command, self._answers[command["op"]])
            if command["op"] == "stop":
                return True
        if self._recorder is not None:
            self._recorder.before(*self._loop.place, self._texts)
        return False

    # --- what others may repeat (training/verify) ---------------------------------------------------------------------

    def _mark(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._recorder is None:
            return {"life": b"", "stretches": []}
        stretches = self._recorder.mark(*self._loop.place)
        return {"life": self._recorder.life, "stretches": [row_of(stretch) for stretch in stretches]}

    def _kept(self, command: dict[str, Any]) -> dict[str, Any]:
        vector = self._recorder.kept(command["vector"]) if self._recorder is not None else None
        return {"vector": None if vector is None else vector.tobytes()}

    def _places(self, command: dict[str, Any]) -> dict[str, Any]:
        """None where steps cannot be drawn from so little text, or the task cannot tell."""
        if not hasattr(self._task, "places"):
            return {"places": []}
        try:
            return {"places": self._loop.places(*_whose(command), size=command["size"])}
        except CorpusError:
            return {"places": []}

    def _drawn(self, command: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self._task, "places") or not command["size"]:
            return {"loss": None, "spent": self._spent}
        began = time.perf_counter()
        with self._task.on(command["size"], command["pieces"]):
            loss = self._loop.drawn(*_whose(command))
        self._spent["evaluate"] += time.perf_counter() - began
        return {"loss": loss, "spent": self._spent}

    def _replay(self, command: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        start, claimed = (state_of(command[name]) for name in ("state", "claimed"))
        if not self._loop.fits(start):
            return self._compared([Distance(math.inf, math.inf, math.inf)], began)
        whose = {name: command[name] for name in ("round", "step", "steps")}
        text = self._task.on(command["size"], command["pieces"]) if command["size"] else nullcontext()
        with text:
            replayed = self._loop.replay(start, peer_id=command["peer"], **whose)
        return self._compared([distance(start, claimed, replayed)], began)

    def _calibrate(self, command: dict[str, Any]) -> dict[str, Any]:
        began, found = time.perf_counter(), []
        recorder = self._recorder
        if recorder is not None and (last := recorder.last) is not None and last.texts == self._texts:
            start, end = recorder.state(last.start), recorder.state(last.end)
            if start is not None and end is not None:
                found = [self._repeated(last, start, end, threads) for threads in (1, 2)]
        return self._compared(found, began)

    def _repeated(self, own: Stretch, start: State, end: State, threads: int) -> Distance:
        """How far this node's own steps end from where they did, on so many threads."""
        usual = self._torch.get_num_threads()
        self._torch.set_num_threads(threads)
        try:
            whose = {"round": own.round, "step": own.step, "steps": own.steps}
            return distance(start, end, self._loop.replay(start, peer_id=self._peer_id, **whose))
        finally:
            self._torch.set_num_threads(usual)

    def _compared(self, found: list[Distance], began: float) -> dict[str, Any]:
        seconds = time.perf_counter() - began
        self._spent["audit"] += seconds
        rows = [[each.parameters, each.first, each.second] for each in found]
        return {"distances": rows, "seconds": seconds, "spent": self._spent}

    def _evaluate(self, command: dict[str, Any]) -> dict[str, Any]:
        drawn = {} if command.get("seed") is None else {"seed": command["seed"]}
        began = time.perf_counter()
        loss = self._task.evaluate(thorough=command["thorough"], **drawn)
        self._spent["evaluate"] += time.perf_counter() - began
        return {"loss": loss, "spent": self._spent}

    def _heldout(self, command: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self._task, "heldout"):
            return self._evaluate({"thorough": False, "seed": command["seed"]})
        began = time.perf_counter()
        with self._torch.no_grad():
            loss = float(self._task.loss(self._task.heldout(command["seed"])[: command["sequences"]]))
        self._spent["evaluate"] += time.perf_counter() - began
        return {"loss": loss, "spent": self._spent}

    def _slope(self, command: dict[str, Any]) -> dict[str, Any]:
        if not hasattr(self._task, "heldout"):
            return {"loss": None, "spent": self._spent}
        began = time.perf_counter()
        batch = self._task.heldout(command["seed"])[command["first"] : command["last"]]
        loss, gradient = self._loop.slope(batch)
        self._gradient.copy_(gradient)
        self._spent["evaluate"] += time.perf_counter() - began
        return {"loss": loss, "spent": self._spent}

    def _timed(self, did: dict[str, Any]) -> dict[str, Any]:
        """What a task of rollouts did, as seconds of training."""
        self._push()
        self._spent["train"] += did["seconds"]
        return {**did, "spent": self._spent, "sampling": self._sampling()}

    def _sample(self, command: dict[str, Any]) -> dict[str, Any]:
        text = self._task.sample(
            command["prompt"], length=command["length"], temperature=command["temperature"], seed=command["seed"]
        )
        return {"text": text}

    def _feed(self, command: dict[str, Any]) -> None:
        self._task.feed(command["texts"])
        self._texts += len(command["texts"])

    def _pull(self) -> None:
        """Take the daemon's parameters onto the device."""
        if self._vector is not self._shared:
            self._vector.copy_(self._shared)

    def _push(self) -> None:
        """Give the device's parameters to the daemon."""
        if self._vector is not self._shared:
            self._shared.copy_(self._vector)

    def _reply(self, command: dict[str, Any], work: Callable[[dict[str, Any]], Any]) -> None:
        """Do the work and send what came of it; an error in one command is not the end of the process."""
        try:
            message = {"id": command["id"], "ok": work(command)}
        except (Closed, MemoryError):
            raise
        except Exception as error:
            text = str(error) if _is_for_people(error) else _bug(error)
            message = {"id": command["id"], "error": text, "fault": command["op"] == "init"}
        packed = msgpack.packb(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(packed)) + packed)
        except OSError as error:
            raise Closed from error

    def _receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        command: dict[str, Any] = msgpack.unpackb(self._read(length))
        return command

    def _read(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            try:
                more = self._socket.recv(count - len(received))
            except OSError as error:
                raise Closed from error
            if not more:
                raise Closed
            received += more
        return received


def _whose(command: dict[str, Any]) -> tuple[str, int, list[int]]:
    return command["peer"], command["round"], command["steps"]


def _bug(error: Exception) -> str:
    """An error that nobody foresaw, perhaps one of a task's author, with the place where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno}, in {place.name})"


def _is_for_people(error: Exception) -> bool:
    """Whether the message alone says what happened and what to do, without the name of the exception."""
    from swarmnode.training.options import SettingError
    from swarmnode.training.tasks import TaskError

    return isinstance(error, (CorpusError, SandboxError, SettingError, TaskError))


def _device(wanted: str, has_cuda: bool) -> str:
    from swarmnode.training.tasks import TaskError

    if wanted == "cuda" and not has_cuda:
        raise TaskError("--device cuda: torch finds no CUDA device here; use --device auto or cpu")
    return "cuda" if has_cuda and wanted != "cpu" else "cpu"


def serve(socket_fd: int, memory_fd: int, confined: sandbox.SandboxReport) -> None:
    """Answer the daemon on the socket until it has no more to say."""
    commands = socket.socket(fileno=socket_fd)
    commands.setblocking(True)  # the daemon's end of the pair is trio's, which made both non-blocking
    try:
        Worker(commands, memory_fd, confined).serve()
    except Closed:
        sys.exit(0)
