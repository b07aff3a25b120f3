"""The caller's side of one stream of calls: `Line` holds the stream, `Feed` and `Upload` are calls that carry items."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import trio

from swarmnode.protocols.frames import FrameReader
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream
from swarmnode.protocols.offences import Offences
from swarmnode.protocols.rpc_errors import DeadlineExceeded, PeerGone, Refused
from swarmnode.protocols.rpc_flows import WINDOW, Inflow, Outflow
from swarmnode.protocols.rpc_frames import (
    CALL,
    CANCEL,
    CREDIT,
    END,
    FAIL,
    FEED,
    ITEM,
    MAX_TEXT,
    PROTOCOL,
    REPLY,
    UNARY,
    UPLOAD,
    Frame,
    Outbox,
    RpcLimits,
    close,
)
from swarmnode.protocols.wire import WireError, decode, encode

log = logging.getLogger(__name__)

A = TypeVar("A")
I = TypeVar("I")  # noqa: E741 (an item)


@dataclass(eq=False)
class Waiting:
    """A call without its answer."""

    deadline: float
    done: trio.Event
    answer: Frame | None = None  # None after `done`: the line broke
    inflow: Inflow | None = None
    outflow: Outflow | None = None


class Line:
    """The caller's stream to one peer, from its opening to its end."""

    def __init__(self, network: Network, peer: PeerId, limits: RpcLimits, offences: Offences) -> None:
        self.peer = peer
        self.limits = limits
        self.offences = offences
        self.outbox = Outbox()
        self.slots = trio.Semaphore(limits.calls)
        self._network = network
        self._waiting: dict[int, Waiting] = {}
        self._next_id = 1
        self._patience: trio.CancelScope | None = None  # around an opening or a write while it may block
        self._over = False
        self._retired = False  # it takes no further calls
        self._scope = trio.CancelScope()  # around the stream's reading and writing
        self._why = "this node is stopping"

    def begin(self, style: int, method: str, body: bytes, deadline: float) -> tuple[int, int, Waiting]:
        """Queue a call; the caller holds a slot. Returns its id, the outbox's key of its frame, and what to wait on."""
        if self._over:
            raise self.gone(method)
        number, waiting = self._next_id, Waiting(deadline, trio.Event())
        self._next_id += 1
        if style == FEED:
            waiting.inflow = Inflow(lambda credit: self.outbox.put(Frame(CREDIT, number, credit=credit)))
        elif style == UPLOAD:
            waiting.outflow = Outflow(self.outbox, number, 0, self.limits.queued)
        timeout = max(deadline - trio.current_time(), 1e-3)
        credit = WINDOW if style == FEED else 0
        key = self.outbox.put(
            Frame(CALL, number, method, timeout, body, style=style, credit=credit), alone=not self._waiting
        )
        self._waiting[number] = waiting
        self._be_patient()
        return number, key, waiting

    def end(self, number: int, key: int) -> None:
        """Forget a call. Where it is not answered, the peer is told, unless its own clock tells it."""
        waiting = self._waiting.pop(number)
        self._be_patient()
        if not waiting.done.is_set():
            unsent = self.outbox.take_back(key)
            if not unsent and trio.current_time() < waiting.deadline:
                self.outbox.put(Frame(CANCEL, number))

    def release(self) -> None:
        """Give back the slot of a call that ended."""
        self.slots.release()
        self._close_if_done()

    def retire(self) -> None:
        """Answer the calls that are made or wait for a slot, and then close; the owner makes no others."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and self.slots.value == self.limits.calls:  # a slot that is waited for is never free
            self._why = "the peer moved to another path"
            self._scope.cancel()

    def gone(self, method: str) -> PeerGone:
        return PeerGone(f"{method} to {self.peer}: {self._why}")

    async def call(self, method: str, body: bytes, deadline: float) -> Frame:
        """The answer to one call; the deadline is the caller's to keep."""
        try:
            self.slots.acquire_nowait()
        except trio.WouldBlock:
            await self.slots.acquire()
        try:
            number, key, waiting = self.begin(UNARY, method, body, deadline)
            try:
                await waiting.done.wait()
            finally:
                self.end(number, key)
        finally:
            self.release()
        if waiting.answer is None:
            raise self.gone(method)
        return waiting.answer

    async def run(self) -> None:
        """Open the stream, write calls and read answers until it breaks; then every call here has failed."""
        stream: Stream | None = None
        try:
            with self._patient() as scope:
                stream = await self._network.open_stream(self.peer, PROTOCOL, timeout=self.limits.open)
            if stream is None or scope.cancelled_caught:
                self._why = "it could not be connected in time"
                return
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._until_broken, self._read, stream, nursery.cancel_scope)
                    nursery.start_soon(self._until_broken, self._write, stream, nursery.cancel_scope)
        except NetworkError as error:
            self._why = str(error)
        except Exception as error:  # a fault of the transport must not end the daemon's nursery
            self._why = f"{type(error).__name__}: {error}"
            log.exception("opening a stream to %s failed", self.peer)
        finally:
            self._over = True
            for waiting in self._waiting.values():
                _finish(waiting, waiting.answer)
            if stream is not None:
                await close(stream)

    async def _until_broken(
        self, job: Callable[[Stream], Awaitable[None]], stream: Stream, scope: trio.CancelScope
    ) -> None:
        try:
            await job(stream)
        except WireError as error:
            self.offences.note(self.peer, str(error))
            self._why = f"it broke the rules of {PROTOCOL}: {error}"
        except NetworkError as error:
            self._why = str(error)
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"
            log.exception("a stream of calls to %s failed", self.peer)
        finally:
            scope.cancel()

    async def _write(self, stream: Stream) -> None:
        self.outbox.write_to(stream)
        while True:
            batch = await self.outbox.batch()
            with self._patient() as scope:
                await stream.send_all(batch)
            self._patience = None
            if scope.cancelled_caught:
                self._why = "it takes no more bytes"
                return

    async def _read(self, stream: Stream) -> None:
        reader = FrameReader(stream, limit=self.limits.frame)
        await reader.each(self._take)
        self._why = "it ended the stream"

    def _take(self, raw: bytes) -> bool:
        """One frame of the callee's, for the call that it belongs to."""
        message = decode(Frame, raw, limit=self.limits.frame)
        if message.kind not in (REPLY, FAIL, ITEM, CREDIT) or not 0 < message.id < self._next_id:
            raise WireError(f"frame of kind {message.kind} for call {message.id}, which was never made")
        waiting = self._waiting.get(message.id)
        if waiting is None or waiting.done.is_set():
            return True  # late: its caller has gone
        if message.kind == ITEM:
            if waiting.inflow is None:
                raise WireError(f"an item for call {message.id}, which takes none")
            waiting.inflow.feed(message.body)
        elif message.kind == CREDIT:
            if waiting.outflow is None:
                raise WireError(f"credit for call {message.id}, which sends no items")
            waiting.outflow.grant(message.credit)
        else:
            _finish(waiting, message)
        return True

    def _patient(self) -> trio.CancelScope:
        """A scope that lives as long as some call waits; `_be_patient` moves its end as calls come and go."""
        self._patience = trio.CancelScope()
        self._be_patient()
        return self._patience

    def _be_patient(self) -> None:
        if self._patience is not None:
            last = max((waiting.deadline for waiting in self._waiting.values()), default=0.0)
            self._patience.deadline = max(last, trio.current_time()) + self.limits.write_grace


def _finish(waiting: Waiting, answer: Frame | None) -> None:
    waiting.answer = answer
    waiting.done.set()
    if waiting.inflow is not None:
        waiting.inflow.end()
    if waiting.outflow is not None:
        waiting.outflow.end()


def check_answer(answer: Frame, peer: PeerId, method: str) -> None:
    """Raise what the peer's answer says, where it is a failure."""
    if answer.kind == FAIL:
        if answer.code == "deadline":
            raise DeadlineExceeded(f"{peer} ran out of time over {method}")
        raise Refused(answer.code, f"{peer} refused {method}: {answer.code}: {answer.text[:MAX_TEXT]}")


def read_body(body: bytes, peer: PeerId, method: str, kind: type[A]) -> A:
    try:
        return decode(kind, body)
    except WireError as error:
        raise Refused("bad-reply", f"{peer} answered {method} with something else: {error}") from None


class _ItemCall(AbstractAsyncContextManager[Any]):
    """A call that carries items: begun when its context is entered, cancelled where that is left before the end."""

    _style: int

    def __init__(self, line: Callable[[], Line], method: str, body: bytes, timeout: float) -> None:
        self._line_of = line
        self._method = method
        self._body = body
        self._timeout = timeout

    async def __aenter__(self) -> Any:
        self._deadline = trio.current_time() + self._timeout
        self._line = self._line_of()
        self._peer = self._line.peer
        await self._in_time(self._line.slots.acquire)
        try:
            self._number, self._key, self._waiting = self._line.begin(
                self._style, self._method, self._body, self._deadline
            )
        except BaseException:
            self._line.release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.end(self._number, self._key)
        self._line.release()
        await trio.lowlevel.checkpoint()

    async def _in_time(self, wait: Callable[[], Awaitable[A]]) -> A:
        with trio.move_on_at(self._deadline):
            return await wait()
        raise DeadlineExceeded(f"{self._peer} did not finish {self._method} within {self._timeout:g} s")

    def _answer(self) -> Frame:
        if self._waiting.answer is None:
            raise self._line.gone(self._method)
        check_answer(self._waiting.answer, self._peer, self._method)
        return self._waiting.answer


class Feed(_ItemCall, Generic[I]):
    """Items that a peer sends: `async with rpc.feed(…) as items: async for item in items: …`.

    Iterating raises PeerGone, DeadlineExceeded or Refused, after the items that came before.
    """

    _style = FEED

    def __init__(self, line: Callable[[], Line], method: str, body: bytes, item: type[I], timeout: float) -> None:
        super().__init__(line, method, body, timeout)
        self._item = item

    async def __aenter__(self) -> Feed[I]:
        await super().__aenter__()
        return self

    def __aiter__(self) -> Feed[I]:
        return self

    async def __anext__(self) -> I:
        assert self._waiting.inflow is not None
        body = await self._in_time(self._waiting.inflow.receive)
        if body is None:
            self._answer()
            raise StopAsyncIteration
        return read_body(body, self._peer, self._method, self._item)


class Upload(_ItemCall, Generic[I, A]):
    """Items for a peer and its one answer: `async with rpc.upload(…) as upload: await upload.send(item); …`.

    Left without `finish`, the peer's handler is cancelled.
    """

    _style = UPLOAD

    def __init__(
        self, line: Callable[[], Line], method: str, body: bytes, item: type[I], reply: type[A], timeout: float
    ) -> None:
        super().__init__(line, method, body, timeout)
        self._item = item
        self._reply = reply

    async def __aenter__(self) -> Upload[I, A]:
        await super().__aenter__()
        return self

    async def send(self, item: I) -> bool:
        """Send one item; waits while the peer has a window full of them. False where it has answered already.

        Raises PeerGone, DeadlineExceeded or Refused; ValueError for an item over MAX_ITEM bytes.
        """
        if type(item) is not self._item:
            raise TypeError(f"{self._method} takes items of {self._item.__name__}, not {type(item).__name__}")
        outflow, body = self._waiting.outflow, encode(item)
        assert outflow is not None
        sent = await self._in_time(lambda: outflow.send(body))
        if not sent:
            self._answer()
        return sent

    async def finish(self) -> A:
        """Say that there are no more items; the peer's answer to them all. Raises as `send` does."""
        if not self._waiting.done.is_set():
            self._line.outbox.put_item(Frame(END, self._number))
        await self._in_time(self._waiting.done.wait)
        return read_body(self._answer().body, self._peer, self._method, self._reply)
