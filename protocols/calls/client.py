"""The caller's side of one stream of calls: `ClientConnection` holds the stream and the calls that wait for answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import trio

from swarmnode.protocols.calls.frames import (
    CALL,
    CANCEL,
    FAIL,
    MAX_TEXT,
    PROTOCOL,
    REPLY,
    DeadlineExceeded,
    Frame,
    Outbox,
    PeerGone,
    Refused,
    RpcLimits,
)
from swarmnode.protocols.frames import FrameReader, close
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream
from swarmnode.protocols.peers.scoring import Violations
from swarmnode.protocols.wire import WireError, decode

log = logging.getLogger(__name__)

A = TypeVar("A")


@dataclass(eq=False)
class _WaitingCall:
    deadline: float
    done: trio.Event
    answer: Frame | None = None  # None after `done`: the stream broke


class ClientConnection:
    """The caller's stream to one peer, from its opening to its end."""

    def __init__(self, network: Network, peer: PeerId, limits: RpcLimits, violations: Violations) -> None:
        self.peer = peer
        self._limits = limits
        self._violations = violations
        self._outbox = Outbox()
        self._slots = trio.Semaphore(limits.calls)
        self._network = network
        self._waiting: dict[int, _WaitingCall] = {}
        self._next_id = 1
        self._patience: trio.CancelScope | None = None  # around an opening or a write while it may block
        self._over = False
        self._retired = False  # it takes no further calls
        self._scope = trio.CancelScope()  # around the stream's reading and writing
        self._why = "this node is stopping"

    def retire(self) -> None:
        """Answer the calls that are made or wait for a slot, and then close; the owner makes no others."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and self._slots.value == self._limits.calls:  # a slot that is waited for is never free
            self._why = "the peer moved to another path"
            self._scope.cancel()

    def _gone(self, method: str) -> PeerGone:
        return PeerGone(f"{method} to {self.peer}: {self._why}")

    async def call(self, method: str, body: bytes, reply: type[A], deadline: float) -> A:
        """The answer to one call; the deadline is the caller's to keep. Raises as `Rpc.call` does."""
        try:
            self._slots.acquire_nowait()
        except trio.WouldBlock:
            await self._slots.acquire()
        try:
            if self._over:
                raise self._gone(method)
            number, waiting = self._next_id, _WaitingCall(deadline, trio.Event())
            self._next_id += 1
            timeout = max(deadline - trio.current_time(), 1e-3)
            key = self._outbox.put(Frame(CALL, number, method, timeout, body), alone=not self._waiting)
            self._waiting[number] = waiting
            self._be_patient()
            try:
                await waiting.done.wait()
            finally:
                del self._waiting[number]
                self._be_patient()
                # A peer whose answer has not come is told that nobody waits, unless its own clock tells it.
                if not waiting.done.is_set() and not self._outbox.take_back(key) and trio.current_time() < deadline:
                    self._outbox.put(Frame(CANCEL, number))
        finally:
            self._slots.release()
            self._close_if_done()
        answer = waiting.answer
        if answer is None:
            raise self._gone(method)
        if answer.kind == FAIL and answer.code == "deadline":
            raise DeadlineExceeded(f"{self.peer} ran out of time over {method}")
        if answer.kind == FAIL:
            code = answer.code[:80]
            raise Refused(code, f"{self.peer} refused {method}: {code}: {answer.text[:MAX_TEXT]}")
        try:
            return decode(reply, answer.body)
        except WireError as error:
            raise Refused("bad-reply", f"{self.peer} answered {method} with something else: {error}") from None

    async def run(self) -> None:
        """Open the stream, write calls and read answers until it breaks; then every call here has failed."""
        stream: Stream | None = None
        try:
            with self._until_broken():
                with self._patient() as scope:
                    stream = await self._network.open_stream(self.peer, PROTOCOL, timeout=self._limits.open)
                if stream is None or scope.cancelled_caught:
                    self._why = "it could not be connected in time"
                    return
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._read, stream)
                        nursery.start_soon(self._write, stream)
        finally:
            self._over = True
            for waiting in self._waiting.values():
                waiting.done.set()
            if stream is not None:
                await close(stream)

    @contextmanager
    def _until_broken(self) -> Iterator[None]:
        """With the block the stream ends, and what fails in it, which must not end the daemon's nursery, is why."""
        try:
            yield
        except WireError as error:
            self._violations.note(self.peer, str(error))
            self._why = f"it broke the rules of {PROTOCOL}: {error}"
        except NetworkError as error:
            self._why = str(error)
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"
            log.exception("a stream of calls to %s failed", self.peer)
        finally:
            self._scope.cancel()

    async def _write(self, stream: Stream) -> None:
        self._outbox.write_to(stream)
        with self._until_broken():
            while True:
                batch = await self._outbox.batch()
                with self._patient() as scope:
                    await stream.send_all(batch)
                self._patience = None
                if scope.cancelled_caught:
                    self._why = "it takes no more bytes"
                    return

    async def _read(self, stream: Stream) -> None:
        reader = FrameReader(stream, limit=self._limits.frame)
        with self._until_broken():
            await reader.each(self._take)
            self._why = "it ended the stream"

    def _take(self, raw: bytes) -> bool:
        """One frame of the callee's, for the call that it belongs to."""
        message = decode(Frame, raw, limit=self._limits.frame)
        if message.kind not in (REPLY, FAIL) or not 0 < message.id < self._next_id:
            raise WireError(f"frame of kind {message.kind} for call {message.id}, which was never made")
        waiting = self._waiting.get(message.id)
        if waiting is not None and not waiting.done.is_set():  # else late: its caller has gone
            waiting.answer = message
            waiting.done.set()
        return True

    def _patient(self) -> trio.CancelScope:
        """A scope that lives as long as some call waits; `_be_patient` moves its end as calls come and go."""
        self._patience = trio.CancelScope()
        self._be_patient()
        return self._patience

    def _be_patient(self) -> None:
        if self._patience is not None:
            last = max((waiting.deadline for waiting in self._waiting.values()), default=0.0)
            self._patience.deadline = max(last, trio.current_time()) + self._limits.write_grace
