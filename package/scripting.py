"""`from swarmnode import Node`: a node in a script or a notebook.

    with Node("run.toml", data_dir="here", rounds=20) as node:
        for round in node.rounds():
            print(round["round"], round["loss"])

The node is a daemon in a process of its own, as `swarmnode run` starts it: the script may block for as long as it
likes, and the node is gone when the block ends, on Linux also where the script is killed. `Node.open` is the same for
trio. The kernel ends the node with the thread that started it, so begin the block in one that lives as long.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

import trio

from swarmnode.cli.local.swarm import NODE, tied_to_parent
from swarmnode.node.config import NodeConfig
from swarmnode.node.control.client import ControlClient
from swarmnode.node.exitcodes import ERROR, ExpectedError
from swarmnode.node.invite import is_link
from swarmnode.training.options import SettingError, describe
from swarmnode.training.runspec import RunSpec, to_toml

STOP_WITHIN = 60.0  # s for an exchange in hand to end and the state to be saved, before the process is killed
LOOK = 0.1  # s after which a wait for what happens next may be cancelled
WORDS = 2000  # characters of what a node said last, in the error of one that ended

Event = dict[str, Any]


class NodeEnded(ExpectedError):
    """The node ended by itself, or never started. The message is what it said; `exit_code` that of `swarmnode run`."""


class ScriptedNode:
    """One node, to be used in a `with` block, by one thread at a time. Every call blocks."""

    def __init__(
        self, run: str | Path | RunSpec = "", *, data_dir: str | Path, rounds: int | None = None, **settings: Any
    ) -> None:
        """`run`: a run file, a RunSpec, the name or id of a run that is known in `data_dir`, another node's join line,
        or "" for the only run that is known. After `rounds` it trains no more and serves others until the block ends.
        `settings` are those of docs/configuration.md, such as port=0 or corpus="books". Raises SettingError.
        """
        unknown = settings.keys() - describe(NodeConfig).keys()
        if unknown:
            raise SettingError(f"{', '.join(sorted(unknown))}: no such setting; swarmnode config show lists them")
        self.data_dir = Path(data_dir).expanduser().absolute()
        self.ready: Event = {}  # the event with which it said that it is: run_id, join line, peer_id, parameters
        self._run, self._rounds, self._settings = run, rounds, settings
        self._events: queue.Queue[Event | None] = queue.Queue()  # None: there will be no more
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None
        self._over = self._told = False  # it trained its last round; that it failed was raised

    @classmethod
    @asynccontextmanager
    async def open(
        cls, run: str | Path | RunSpec = "", *, data_dir: str | Path, rounds: int | None = None, **settings: Any
    ) -> AsyncIterator[TrioNode]:
        """The same for trio: `async with Node.open("run.toml", data_dir="here") as node`."""
        node = cls(run, data_dir=data_dir, rounds=rounds, **settings)
        node.start()
        try:
            await trio.to_thread.run_sync(node.wait_until_ready, abandon_on_cancel=True)
            yield TrioNode(node)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(node.stop)
        node._tell_failure()

    def __enter__(self) -> ScriptedNode:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Raises NodeEnded where it ended by itself, or its last state was not saved, and nobody was told so yet."""
        self.stop()
        if kind is None:
            self._tell_failure()

    # -- what a node tells and is asked

    def rounds(self) -> Iterator[Event]:
        """The rounds as they end, with `round`, `loss` and the others of `swarmnode run --json`; ends after the last.

        Those that ended before are told first; each is told once. Raises NodeEnded.
        """
        while not self._over and (event := next(self.events(), None)) is not None:
            if event["event"] == "round":
                yield event

    def events(self) -> Iterator[Event]:
        """Everything that happens, until the node ends in order. Raises NodeEnded."""
        for event in iter(self._next_event, None):
            self._over = self._over or event["event"] == "finished"
            yield event
        self._events.put(None)
        self._tell_failure()

    def _tell_failure(self) -> None:
        """Raise NodeEnded, once, where the process failed."""
        code = self._process.wait(STOP_WITHIN) if self._process is not None else 0
        if code and not self._told:
            self._told = True
            raise NodeEnded(self._said(), exit_code=max(code, ERROR))  # below 0: by a signal

    def call(self, method: str, **params: Any) -> Any:
        """What the node answers to a control method, as the commands ask it. Raises NotRunning or ControlError."""
        return ControlClient(self.data_dir).call(method, timeout=120.0, **params)

    def status(self) -> dict[str, Any]:
        """As `swarmnode status --json`."""
        return self.call("status")

    def sample(self, prompt: str, *, length: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
        """What the model writes after `prompt`."""
        return str(self.call("sample", prompt=prompt, length=length, temperature=temperature, seed=seed)["text"])

    # -- its life

    def start(self) -> None:
        """Start the process; returns at once. Raises RuntimeError where it was started before."""
        if self._process is not None:
            raise RuntimeError("this Node was used already; make another one, with the same data_dir to go on")
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the node)
        told = {f"SWARMNODE_{key.upper()}": _as_text(value) for key, value in self._settings.items()}
        self._process = subprocess.Popen(
            tied_to_parent([*NODE, "run", *self._arguments()]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=os.environ | told,
            start_new_session=True,  # Ctrl-C is for the script, which then stops the node in order
        )
        threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True).start()

    def wait_until_ready(self) -> None:
        """Raises NodeEnded where it ends before."""
        for event in self.events():
            if event["event"] == "ready":
                self.ready = event
                return
        raise NodeEnded(self._said())

    def stop(self) -> None:
        """End the node in order, by force after a minute."""
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGINT)  # to nobody, where it has ended
        try:
            process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _arguments(self) -> list[str]:
        run = self._run
        always = ["--json", "--stay", "--data-dir", str(self.data_dir)]
        always += ["--rounds", str(self._rounds)] if self._rounds is not None else []
        if isinstance(run, RunSpec):
            file = self.data_dir / ".script.toml"  # no name that a file of the user's, or a setting's, has
            file.write_text(to_toml(run), encoding="utf-8")
            return [str(file), *always]
        if isinstance(run, str) and (run.startswith("swarmnode join ") or is_link(run)):
            return ["--join", *shlex.split(run.removeprefix("swarmnode join ")), *always]
        return [str(run), *always] if run else always

    def _hear(self, output: IO[bytes]) -> None:
        """Take what the node tells as it comes, or a full pipe would hold it up."""
        with output:
            for line in output:
                with suppress(ValueError):  # the last line of a node that was killed may be half of one
                    self._events.put(json.loads(line))
        self._events.put(None)

    def _next_event(self) -> Event | None:
        """Raises trio.Cancelled where trio waits for it and is cancelled: the event is then for whoever asks next."""
        while True:
            with suppress(queue.Empty):
                return self._events.get(timeout=LOOK)
            with suppress(RuntimeError):  # a thread that trio did not start
                trio.from_thread.check_cancelled()

    def _said(self) -> str:
        assert self._words is not None
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip()
        with suppress(ValueError, TypeError, KeyError):
            return str(json.loads(said.rpartition("\n")[2])["error"]["message"])
        return said[-WORDS:] or "the node ended without a word"


class TrioNode:
    """A node for trio; its methods are those of `ScriptedNode`."""

    def __init__(self, node: ScriptedNode) -> None:
        self._node = node
        self.ready = node.ready

    async def rounds(self) -> AsyncIterator[Event]:
        rounds = self._node.rounds()
        while (found := await trio.to_thread.run_sync(next, rounds, None)) is not None:
            yield found

    async def call(self, method: str, **params: Any) -> Any:
        return await trio.to_thread.run_sync(lambda: self._node.call(method, **params), abandon_on_cancel=True)

    async def status(self) -> dict[str, Any]:
        return await trio.to_thread.run_sync(self._node.status, abandon_on_cancel=True)

    async def sample(self, prompt: str, *, length: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
        how = {"length": length, "temperature": temperature, "seed": seed}
        return str((await self.call("sample", prompt=prompt, **how))["text"])


def _as_text(value: Any) -> str:
    """A setting as the environment holds it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
