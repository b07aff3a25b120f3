"""One life of the trainer's process: what it may do, its socket, the commands in hand, what it printed, how it ended.

The owner's settings make the rules of its sandbox, its environment and its one directory. The sandbox itself is
`training/sandbox`, entered by the trainer. What has to be fetched from outside this machine is fetched here, before
there is a trainer, in a process that hears nothing from peers.

Commands and answers are msgpack maps, each answer behind its length; methods `do_OP` of `training/worker.py` answer.
The child is started in the daemon's own thread and dies with it. Whatever happens to it, who waits for an answer learns
that none will come; what fails to end in order is killed. `supervisor.py` decides what follows.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import trio

from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.storage.datadir import remove
from swarmnode.node.trainer.replies import MOST_BYTES, MOST_VALUES
from swarmnode.protocols.methods.trainer import TrainerDied, TrainerHeld
from swarmnode.protocols.wire import Empty, received, unpacked
from swarmnode.training import hub
from swarmnode.training.rl.section import hf_folder, hf_model
from swarmnode.training.runspec import RunSpec
from swarmnode.training.sandbox import Rules
from swarmnode.training.tasks import task_file
from swarmnode.training.tokens import BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Words of the names of variables that hold what a trainer has no use for: SWARMNODE_PASSPHRASE, HF_TOKEN, ...
SECRETS = {"AUTH", "CREDENTIALS", "KEY", "PASSPHRASE", "PASSWORD", "PAT", "PGPASSWORD", "SECRET", "SOCK", "TOKEN"}
IN_A_URL = re.compile("://[^/@]*:[^/@]*@")  # a password
SCRATCH = "trainer"  # in the data directory
STDERR_TAIL = 4 << 10  # bytes of the child's last words that an error quotes
QUIT_GRACE = 3.0  # s that a child has to end when asked, before it is killed
REAP_GRACE = 2.0  # s that a killed child has to end, before it is left to the kernel
STOP_GRACE = 60.0  # s that the step in hand may take after `stop`, before the child is killed as stuck
HOLD_GRACE = 1.0  # s that a command in hand may take after `freeze`, before the process is stopped in the middle of it
HELD = "the trainer stands still in the middle of a step, until swarmnode resume or the end of the node"
WORDS_GRACE = 1.0  # s for its last words to come through after its end; a process that it started may hold the pipe
CAPPED = "the trainer is started again, for caps that were changed"
STARTING = ("weigh", "init", "feed")  # commands that a stopped process answers once it goes on
BRAKE_EVERY = 0.05  # s between two looks at the CPU time of a capped trainer; of one without a cap UNCAPPED_EVERY
UNCAPPED_EVERY = 1.0
BURST, DEBT = 0.2, 60.0  # s of the cap that may be caught up on, and that may have to be waited for
SEND_PATIENCE = 10.0  # s for a command to be taken off our hands
TAKEN_AT_ONCE = 64 << 10  # bytes of a command that a socket takes though nobody reads; Linux gives it 208 KiB
LENGTH = 4  # bytes before an answer that say how many it has


class TrainerFailed(ExpectedError):
    """The trainer cannot work here. The message says why and what to do."""


@dataclass(frozen=True)
class TrainerSettings:
    """How this node's trainer runs; none of it is part of the run."""

    threads: int = 0  # of torch; 0 means one for each core
    micro_batch: int = 0  # samples that are computed at once; 0: as many as there is memory for
    nice: int = 10
    device: str = "auto"  # auto, cpu or cuda
    ranks: int = 1  # processes that train, each with a device and its part of the batch
    sharded: bool = False  # whether these divide the model as well
    heldout: str = ""  # file with the run's held-out part
    texts: tuple[str, ...] = ()  # files to train on; `feed` adds to them
    shared: bool = True  # whether others can have these files, so that they can repeat what was done with them
    tokenizer: str = ""  # file with the tokenizer.json of the run's data; empty where tokens are bytes
    task: str = ""  # file.py:Class of a task that is not built in
    check: bool = False  # whether what would harm a swarm is looked for in it first (training/trial.py)
    base: str = ""  # where the run's base model lies, or its name; empty takes the run's
    policy: str = ""  # of this node in a run by rollouts; empty takes the run's
    sampling: str = "auto"  # what writes the answers of an hf policy: auto, torch or vllm
    sandbox: str = "auto"  # auto, require or off
    scratch: str = ""  # directory of the trainer's own, emptied before each start; empty: it can write nowhere
    readable: tuple[str, ...] = ()  # files and directories that it may read beside those above
    memory: int = 0  # bytes of its own at the most; 0 is no cap
    device_memory: int = 0  # bytes of each GPU at the most; 0 is no cap
    disk: int = 0  # bytes that the node may have of it, of which states that auditors may ask for get half; 0 is no cap


def rules_of(settings: TrainerSettings) -> Rules:
    """The sandbox of a trainer with these settings. Paths may begin with ~ and be relative to this process."""
    files = [settings.heldout, settings.tokenizer, settings.base, hf_folder(settings.policy), *settings.readable]
    files.extend(str(Path(text).parent) for text in settings.texts)
    if settings.task:
        files.append(str(task_file(settings.task).parent))
    files.append(str(hub.cache()))  # a run file may name a model that is on this machine already
    absolute = dict.fromkeys(str(Path(file).expanduser().absolute()) for file in files if file)
    return Rules(
        mode=settings.sandbox,
        scratch=settings.scratch,
        readable=tuple(absolute),
        memory=settings.memory,
        ranks=settings.ranks,
        gpu=settings.device != "cpu",
    )


def gpus() -> int:
    """CUDA GPUs that torch here may use, found without torch; 1 where there is none."""
    torch = find_spec("torch")
    if torch is None or not torch.origin or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return 1
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return max(1, len(glob("/dev/nvidia[0-9]*") if named is None else [n for n in named.split(",") if n.strip()]))


def exposed(told: Rules, directory: Path) -> str:
    """What the trainer may read that contains the node's own directory, and so its key; empty where nothing does."""
    own = directory.resolve()
    return next((path for path in told.readable if (named := Path(path).resolve()) == own or named in own.parents), "")


def environment(settings: TrainerSettings) -> dict[str, str]:
    """The trainer's: this process's without secrets, with its caches and temporary files in `scratch`."""
    known = {name: value for name, value in os.environ.items() if IN_A_URL.search(value) is None}
    kept = {name: value for name, value in known.items() if SECRETS.isdisjoint(name.upper().split("_"))}
    if settings.threads:
        kept["OMP_NUM_THREADS"] = str(max(1, settings.threads // settings.ranks))
    if scratch := settings.scratch:  # torch does not start without a place for temporary files
        kept |= dict.fromkeys(("TMPDIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), scratch)
    # Threads that spin while they wait for one whose core another program has make a step 20 to 100 times as long.
    return {"OMP_WAIT_POLICY": "PASSIVE", **kept, "HF_HUB_OFFLINE": "1"}


def empty(scratch: str) -> None:
    """Make the trainer's directory anew. Blocking. Raises TrainerFailed."""
    remove(scratch)
    try:
        Path(scratch).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TrainerFailed(f"{scratch}: the trainer's own directory cannot be made: {error.strerror}") from error


async def with_models(spec: RunSpec, settings: TrainerSettings) -> TrainerSettings:
    """The settings with the models that they name on this machine, and the run's base model as the folder of it.

    A run's specification may come from a peer, so what it names is not fetched, and read only where it is what the run
    says: its hash is the run's. Raises TrainerFailed.
    """
    if (policy := hf_model(settings.policy)) is not None:
        await fetch_model(policy[1])
    wanted = spec.model.base_sha256
    if not spec.model.base:
        return replace(settings, base="")
    if not wanted:
        raise TrainerFailed("the run names a base model without its hash, so it could be any; begin it by a run file")
    try:
        folder = await fetch_model(settings.base or spec.model.base, offline=not settings.base)
    except TrainerFailed as error:
        hint = "" if settings.base else f"; the owner of this machine has it fetched by --base {spec.model.base}, or"
        hint += " --base FOLDER names where it lies" if hint else ""
        raise TrainerFailed(f"the run's base model is not here: {error}{hint}") from error
    found = await model_hash(folder)
    if found != wanted:
        raise TrainerFailed(
            f"the model in {folder} is not the base of the run: its weights and config.json hash to {found[:12]}…, the "
            f"run's to {wanted[:12]}…, so that what this node trains would not fit; name the run's with --base"
        )
    return replace(settings, base=str(folder))


async def with_base(spec: RunSpec, named: str) -> tuple[RunSpec, str]:
    """The specification in a run file of the owner's with its base's hash and vocabulary, and the base's tokenizer.

    `named` is what the owner calls the base here, if not as in the file. The tokenizer is a file; "" where there is no
    base, or tokens are bytes. Raises TrainerFailed.
    """
    if not spec.model.base:
        return spec, ""
    folder = await fetch_model(named or spec.model.base)
    spec = spec.updated(model={"base_sha256": spec.model.base_sha256 or await model_hash(folder)})
    try:
        tokenizer, rows = folder / "tokenizer.json", hub.vocabulary(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise TrainerFailed(f"{folder}: its config.json is none of a model of transformers: {error}") from error
    if tokenizer.exists():
        rows = rows or BYTES if spec.data.vocabulary == BYTES else spec.data.vocabulary
        return spec.updated(data={"vocabulary": rows}), str(tokenizer)
    if spec.data.vocabulary == BYTES != rows:
        raise TrainerFailed(
            f"{folder} has no tokenizer.json, so no text can be put into the tokens of that model. transformers writes "
            "one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return spec, ""


async def fetch_model(name: str, *, offline: bool = False) -> Path:
    """The folder of the model `name`, a folder or one of the hub, which is fetched unless `offline`.

    Raises TrainerFailed.
    """
    command = [sys.executable, "-P", "-m", "swarmnode.training.hub", name, *(["offline"] if offline else [])]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    line, last = b"", ""  # the last tells where it is, or what is wrong
    async with trio.open_nursery() as nursery:
        hub_process = await nursery.start(partial(trio.run_process, command, check=False, **pipes))
        async for piece in hub_process.stdout:
            *lines, line = (line + piece).split(b"\n")
            for said in (piece.decode(errors="replace") for piece in lines if piece):
                if said.startswith(hub.FETCHED):
                    logger.info("the model %s: %s", name, said)
                else:
                    last = said
    if hub_process.returncode or not last:
        raise TrainerFailed(last or f"the model {name!r} cannot be fetched")
    return Path(last)


async def model_hash(folder: Path) -> str:
    """What its files hash to. Raises TrainerFailed."""
    try:
        return await trio.to_thread.run_sync(hub.weights_hash, folder, abandon_on_cancel=True)
    except (OSError, ValueError) as error:
        raise TrainerFailed(f"the model in {folder} cannot be read: {error}") from error


class TrainerChild:
    """One life of the child process: its socket, the commands that it has in hand, and how it ended."""

    def __init__(self, level: int = logging.DEBUG, most_bytes: int = MOST_BYTES) -> None:
        """What it prints goes to the log with that `level`; its answers may have `most_bytes`."""
        self._level, self._most_bytes = level, most_bytes
        self.ended = trio.Event()
        self.answered = 0  # commands
        self.spent: dict[str, float] = {}  # seconds, by what for, as its last answer says; also one nobody awaited
        self.sampling: dict[str, str] | None = None  # what writes answers, likewise
        self._numbers = itertools.count()
        self._unanswered: dict[int, _Call] = {}  # also those that nobody awaits
        self._changed = trio.lowlevel.ParkingLot()  # one was answered, or the process was stopped
        self._freezes = 0  # times that it was to compute nothing
        self.replaced = False  # ended for other caps, which is no failure
        self.frozen = False  # stopped in the middle of a command, until `thaw`
        self._braked = self._stopped = False  # whether it is ahead of its cap on CPU time; whether its processes stand
        self._resting = False  # to stand whenever it has no command in hand: a task may have threads of its own
        self.cores = 0.0  # CPU seconds a second that it and this process may take; 0 is no cap
        self.cpu_seconds = 0.0  # that it took, all ranks together, at the last look
        self._sending = trio.Lock()
        self._words = b""
        self._heard = trio.Event()  # all of its words
        self._hearing = trio.CancelScope(shield=True)  # while the process lives, whatever becomes of who awaits it
        self._reason = ""

    @asynccontextmanager
    async def running(self, memory_fd: int, rules: Rules, environment: Mapping[str, str]) -> AsyncIterator[None]:
        """Start the process under `rules`, or raise OSError; at the end of the block have it quit, or kill it."""
        try:
            ours, theirs = trio.socket.socketpair()
            arguments = [str(theirs.fileno()), str(memory_fd), str(os.getpid()), json.dumps(asdict(rules))]
            # Started from this thread, not by trio.run_process: PDEATHSIG fires when the *thread* that started the
            # child ends, and trio's worker threads end when they are idle.
            self.process = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-P", "-u", "-m", "swarmnode.training.confined", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), memory_fd],
                env=environment,
                process_group=0,  # all ranks are stopped together
            )
            theirs.close()
            assert self.process.stdout is not None  # asked for above
            self._stream = trio.SocketStream(ours)
            words = trio.lowlevel.FdStream(os.dup(self.process.stdout.fileno()))
            self.process.stdout.close()
        except OSError as error:
            self._reason = f"no process could be started: {error}"
            raise
        async with self._stream, trio.open_nursery() as nursery:
            nursery.start_soon(self._hear, words)
            nursery.start_soon(self._keep_to_cap)
            try:
                yield
            finally:
                with trio.CancelScope(shield=True):
                    await self._quit()
                    with trio.move_on_after(WORDS_GRACE):
                        await self._heard.wait()
                nursery.cancel_scope.cancel()
                self._hearing.cancel()
        # Its successor gets the memory and the GPU that it had; a daemon that ends is cancelled here, and goes.
        await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)

    async def call(self, op: str, kind: type[T], **arguments: Any) -> T:
        """Send a command and wait for its answer, a `kind`; when cancelled, have it stopped and wait for that.

        Raises TrainerDied, TrainerFailed for an error that trying again cannot mend, and ValueError where `sample`
        cannot answer. Any other error, or answer, makes the child unfit: it is killed; its successor starts clean.
        """
        if self.frozen and op not in STARTING:
            raise TrainerHeld(HELD)
        call = await self._send(op, kind, **arguments)
        try:
            await call.done.wait()
        except trio.Cancelled:
            if op == "train":
                await self._stop(call)
            raise
        if call.answer is not None:
            self.answered += 1
            return call.answer
        if call.error is None and (self.frozen or self.replaced):
            raise TrainerHeld(CAPPED if self.replaced else HELD)
        if call.error is None:
            raise TrainerDied(f"the trainer ended ({self.cause()}) during {op}")
        if op in ("weigh", "init"):
            raise TrainerFailed(call.error)
        if op == "sample" and call.harmless:
            raise ValueError(call.error)
        self.end(f"{op} failed: {call.error}")
        raise TrainerDied(f"the trainer could not {op}: {call.error}")

    async def interrupt(self) -> None:
        """Have it end the `train` in hand, if there is one, after the present step; its answer comes as always."""
        if not self.frozen and any(call.op == "train" for call in self._unanswered.values()):
            await self._send("stop")

    async def freeze(self) -> None:
        """Have it compute nothing: what takes longer than HOLD_GRACE to end is stopped, and who awaits that is told."""
        self._freezes += 1
        await self.interrupt()
        with trio.move_on_after(HOLD_GRACE):
            await self._quiet()
        if self._unanswered and not self.ended.is_set():
            self.frozen = True
            self._stop_or_go()
            for call in self._unanswered.values():
                if call.op not in STARTING:
                    call.done.set()
            self._changed.unpark_all()
        self.rest(True)

    async def thaw(self) -> None:
        """Let it go on and end what it has in hand. Returns early where it is frozen again."""
        self.frozen = False
        self.rest(False)
        await self._quiet()

    def rest(self, on: bool) -> None:
        """Have its processes stand while it has no command in hand, or no longer."""
        self._resting = on
        self._stop_or_go()

    async def _quiet(self) -> None:
        while self._unanswered and not self.frozen and not self.ended.is_set():
            await self._changed.park()

    def _stop_or_go(self) -> None:
        stop = self.frozen or self._braked or (self._resting and not self._unanswered)
        if stop != self._stopped and not self.ended.is_set():
            self._stopped = stop
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGSTOP if stop else signal.SIGCONT)

    async def _keep_to_cap(self) -> None:
        """Have its processes stand while they and this one are ahead of `cores`, as cpulimit does.

        Whatever a step takes, so neither steps nor their results depend on it.
        """
        credit, used, at = 0.0, self._cpu_used(), trio.current_time()  # credit: CPU seconds
        while True:
            cores, before, then = self.cores, used, at  # what was taken before there was a cap counts for none
            await trio.sleep(BRAKE_EVERY if cores else UNCAPPED_EVERY)
            used, at = self._cpu_used(), trio.current_time()
            credit += cores * (at - then) - (used - before)
            credit = max(-DEBT * cores, min(BURST * cores, credit))
            self._braked = credit < 0 and self.cores > 0
            self._stop_or_go()

    def _cpu_used(self) -> float:
        ranks = [self.process.pid]
        with suppress(OSError):  # it has ended, or /proc hides it, as with hidepid
            ranks += map(int, Path(f"/proc/{ranks[0]}/task/{ranks[0]}/children").read_text().split())
        with suppress(OSError):  # it has ended
            # The clock of another process's CPU time, as clock_getcpuclockid(3) names it.
            self.cpu_seconds = sum(time.clock_gettime(~rank << 3 | 2) for rank in ranks)
        return self.cpu_seconds + time.process_time()

    def own_memory(self) -> int:
        """Bytes of the first rank's own, as its cap counts them (RLIMIT_DATA); 0 once it has ended."""
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            return 1024 * int(status.partition("VmData:")[2].split()[0])
        return 0

    def cause(self) -> str:
        """How it ended, in a few words."""
        if self._reason:
            return self._reason
        code = self.process.poll()
        if code is None:
            return "closed its socket"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def last_words(self) -> str:
        return self._words.decode(errors="replace").strip()

    async def _send(self, op: str, kind: type[Any] = Empty, **arguments: Any) -> _Call:
        """Send whole or not at all: half a command would garble what follows.

        What its socket may not take at once waits until it reads again, which it does between commands.
        """
        number = next(self._numbers)
        packed = msgpack.packb({"id": number, "op": op, **arguments})
        freezes = self._freezes
        while len(packed) > TAKEN_AT_ONCE and self._unanswered and not self.ended.is_set():
            await self._changed.park()
            if self._freezes != freezes and op not in STARTING:
                raise TrainerHeld(HELD)
        call = self._unanswered[number] = _Call(op, kind)
        self._stop_or_go()
        with trio.move_on_after(SEND_PATIENCE, shield=True) as patience:
            async with self._sending:
                try:
                    await self._stream.send_all(packed)
                except trio.BrokenResourceError:
                    self._finish()
        if patience.cancelled_caught:
            self.end("took no commands")
        return call

    async def _stop(self, call: _Call) -> None:
        slower = min(1.0, self.cores / (os.cpu_count() or 1)) if self.cores else 1.0
        with trio.move_on_after(STOP_GRACE / slower, shield=True) as patience:
            await self._send("stop")
            await call.done.wait()
        if patience.cancelled_caught:
            self.end("did not stop")

    async def _quit(self) -> None:
        """Reap the process, by force where it does not go."""
        self.cores, self._braked = 0.0, False
        self.rest(False)
        if not self.ended.is_set() and not self.frozen:
            with trio.move_on_after(QUIT_GRACE):
                await self._send("quit")
                await self.ended.wait()
        await self._reap()

    async def _hear(self, words: trio.lowlevel.FdStream) -> None:
        """Answers, words and the end: heard out also when the daemon is stopping, or its end would be waited for."""
        with self._hearing:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_answers)
                nursery.start_soon(self._listen, words)

    async def _read_answers(self) -> None:
        arrived = bytearray()
        try:
            async for piece in self._stream:
                arrived += piece
                while len(arrived) >= (end := LENGTH + int.from_bytes(arrived[:LENGTH], "big")):
                    raw = bytes(arrived[LENGTH:end])
                    del arrived[:end]
                    number = await trio.to_thread.run_sync(self._take, raw)  # groups of large batches take a while
                    if (call := self._unanswered.pop(number, None)) is not None:
                        call.done.set()
                    self._stop_or_go()
                    self._changed.unpark_all()
                if end > self._most_bytes:
                    raise ValueError("it has no end")
        except trio.BrokenResourceError:
            logger.debug("the trainer's socket broke")
        except Exception as error:  # whatever it makes of this program
            self._reason = self._reason or f"answered nonsense: {error}"
        # The kernel closes the socket only as the process ends, or the process has closed it and is of no use.
        await self._reap()

    async def _reap(self) -> None:
        """Kill what is left of it. What has little right to a core also ends slowly, and nobody waits for that."""
        self.end()
        with trio.move_on_after(REAP_GRACE):
            await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
        self._finish()

    def _take(self, raw: bytes) -> int:
        """Note what an answer says; the command's number. Raises ValueError where it is none."""
        match answer := unpacked(raw, "an answer", most=MOST_VALUES):  # others' bytes may have taken the process over
            case {"id": int(number), "error": str(), "harmless": bool()}:
                pass
            case {
                "id": int(number),
                "ok": dict() | None,
                "spent": {"train": float(), "evaluate": float(), "audit": float()} as spent,
                "sampling": ({"by": str(), "why": str()} | None) as sampling,
            } if "error" not in answer:
                self.spent = spent
                self.sampling = sampling and {key: text[:STDERR_TAIL] for key, text in sampling.items()}
            case _:
                raise ValueError("it is no answer")
        if (call := self._unanswered.get(number)) is not None:
            call.take(answer)
        return number

    async def _listen(self, words: trio.lowlevel.FdStream) -> None:
        line = b""
        async with words:
            async for piece in words:
                self._words = (self._words + piece)[-STDERR_TAIL:]
                *lines, line = (line + piece)[-STDERR_TAIL:].split(b"\n")
                for said in filter(None, lines):
                    logger.log(self._level, "the trainer says: %s", said.decode(errors="replace"))
        self._heard.set()

    def end(self, reason: str = "") -> None:
        """Kill all of its group, whose number is its own until the first of it is reaped. A successor starts clean."""
        self._reason = self._reason or reason
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _finish(self) -> None:
        self.ended.set()
        self._changed.unpark_all()
        for call in self._unanswered.values():
            call.done.set()


@dataclass(eq=False)
class _Call:
    """A command; `answer` and `error` stay None where the child ended."""

    op: str
    kind: type[Any]
    done: trio.Event = field(default_factory=trio.Event)
    answer: Any = None
    error: str | None = None
    harmless: bool = False

    def take(self, answer: dict[str, Any]) -> None:
        """Raises WireError where it is no answer to this command."""
        if "error" in answer:
            self.error, self.harmless = answer["error"], answer["harmless"]
        else:
            self.answer = received(self.kind, answer["ok"] or {})
