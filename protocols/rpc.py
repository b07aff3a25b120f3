"""Calls between peers: many in flight on one stream, each with a deadline, answered in any order.

Protocol `/swarmnode/rpc/1`. Who wants to call opens one stream to the peer and keeps it; the callee answers on the same
stream. For calls in the other direction the other node opens a stream of its own.

Messages, each a `Frame` behind its varint length, at most `RpcLimits.frame` bytes:
- caller: CALL(id, method, timeout, body), and CANCEL(id) when the caller no longer wants the answer;
- callee: REPLY(id, body) or FAIL(id, code, text), exactly one for each CALL that was not cancelled.

Order: ids grow by one; calls are started in the order of sending and answered when they are done. The timeout travels
as seconds left, so clocks need not agree; each side ends the call by its own clock.

Who may fail when, and what is then true:
- the stream breaks or the peer goes: every call on it raises PeerGone at once; whether it was carried out is unknown.
  The next call opens a new stream;
- the peer is frozen or slow: each call ends at its own deadline, and calls to other peers notice nothing. A write that
  blocks is given up when no call waits for it, and the stream with it; the next call opens a new one;
- the caller is cancelled: the handler is cancelled when CANCEL arrives;
- the handler raises Refuse: the caller gets Refused with its code; anything else it raises is logged here and is
  Refused(code="internal") there;
- a peer breaks the rules (no msgpack, false lengths, answers to calls never made, too many streams): its stream is
  closed and it is counted. One that calls too much is refused as "busy"; one that does not read its answers is not
  read from, and after `write_stall` loses the stream.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import Network, NetworkError, PeerId, Stream
from swarmnode.protocols.offences import Offences
from swarmnode.protocols.wire import WireError, decode, encode

PROTOCOL = "/swarmnode/rpc/1"
PING = "ping"  # the method that every Rpc serves
CALL, CANCEL, REPLY, FAIL = range(4)
TOGETHER = 64 * 1024  # bytes of small frames that are written at once: one yamux frame
HEADROOM = 1024  # bytes of a frame beside its body: method, code, text and field names
MAX_TEXT = 500  # characters of a failure's text

log = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")


class CallError(Exception):
    """A call brought no answer. The text is fit for a log line."""


class PeerGone(CallError):
    """No stream to the peer could be opened, or it broke during the call."""


class DeadlineExceeded(CallError):
    """The peer is connected, or was being connected, and the time is up."""


class Refused(CallError):
    """The peer answered that it will not: by its handler's own code, or one of

    "unknown-method", "malformed" (it could not read the request), "busy" (over its limits), "internal" (its handler
    failed), "bad-reply" (its answer could not be read here).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Refuse(Exception):
    """Raised by a handler: the caller gets Refused with this code and text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True)
class RpcLimits:
    """What calls may take of this node."""

    frame: int = 1 << 20  # bytes; larger things go by bulk
    calls: int = 64  # calls in flight to one peer; more wait, on their own time
    serves: int = 128  # calls of one peer carried out here; more are refused. Twice `calls`, for those given up there
    streams: int = 4  # streams of one peer; one is enough, and the old may outlive its successor's opening
    queued: int = 4 << 20  # bytes of answers that wait for one peer; above, it is not read from
    longest: float = 600.0  # seconds that a handler may take, whatever the caller asked for
    open: float = 10.0  # seconds to open a stream
    write_stall: float = 60.0  # seconds that answers may wait for a peer that does not read: a suspended laptop's nap
    write_grace: float = 2.0  # seconds that a blocked write goes on when no call waits for it any more


@dataclass(frozen=True)
class Frame:
    """The one envelope; which fields count depends on `kind`."""

    kind: int
    id: int
    method: str = ""
    timeout: float = 0.0  # seconds left
    body: bytes = b""
    code: str = ""
    text: str = ""


@dataclass(frozen=True)
class Ping:
    """Asks for a Pong."""


@dataclass(frozen=True)
class Pong:
    """Says that the peer's event loop is alive."""


Handler = Callable[[PeerId, Any], Awaitable[Any]]


class Rpc:
    """Both sides of calls: `serve` methods before or during `run`, `call` during it."""

    def __init__(self, network: Network, *, limits: RpcLimits = RpcLimits()) -> None:
        self._network = network
        self._limits = limits
        self._methods: dict[str, tuple[type[Any], Handler]] = {}
        self._lines: dict[PeerId, _Line] = {}
        self._nursery: trio.Nursery | None = None
        self._serving: dict[_Desk, None] = {}
        self._carried_out: Counter[PeerId] = Counter()  # calls of each peer in progress here
        self._failures_logged: set[tuple[str, type[Exception]]] = set()
        self.offences = Offences(PROTOCOL)
        self.serve(PING, Ping, _pong)
        network.serve(PROTOCOL, self._serve_stream)

    def serve(self, method: str, request: type[Q], handler: Callable[[PeerId, Q], Awaitable[Any]]) -> None:
        """Answer calls of `method` with `handler(peer, request)`, whose result is a message dataclass."""
        if method in self._methods:
            raise ValueError(f"{method} is served already")
        self._methods[method] = (request, handler)

    async def call(self, peer: PeerId, method: str, request: Any, reply: type[A], *, timeout: float) -> A:
        """The peer's answer, within `timeout` seconds from now, connecting included.

        Raises PeerGone, DeadlineExceeded or Refused; ValueError where the request does not fit a frame.
        """
        body = encode(request)
        if len(body) > self._limits.frame - HEADROOM:
            raise ValueError(f"a request of {len(body)} bytes does not fit a frame of {self._limits.frame}")
        deadline = trio.current_time() + timeout
        with trio.move_on_at(deadline):
            answer = await self._answer(peer, method, body, deadline)
            return _read_answer(answer, peer, method, reply)
        raise DeadlineExceeded(f"{peer} did not answer {method} within {timeout:g} s")

    async def ping(self, peer: PeerId, *, timeout: float) -> float:
        """Seconds from asking to the answer. Raises as `call` does."""
        began = trio.current_time()
        await self.call(peer, PING, Ping(), Pong, timeout=timeout)
        return trio.current_time() - began

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the streams of both directions until cancelled; calls in flight then raise PeerGone."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for desk in list(self._serving):
                desk.scope.cancel()

    async def _answer(self, peer: PeerId, method: str, body: bytes, deadline: float) -> Frame:
        if self._nursery is None:
            await trio.lowlevel.checkpoint()
            raise PeerGone(
                f"{method} to {peer}: this node makes no calls before it has started or after it has stopped"
            )
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _Line(self._network, peer, self._limits, self.offences)
            self._nursery.start_soon(self._hold, line)
        return await line.call(method, body, deadline)

    async def _hold(self, line: _Line) -> None:
        try:
            await line.run()
        finally:
            if self._lines.get(line.peer) is line:
                del self._lines[line.peer]

    async def _serve_stream(self, stream: Stream) -> None:
        held = sum(desk.peer == stream.peer for desk in self._serving)
        desk = _Desk(self, stream)
        try:
            if held >= self._limits.streams:
                self.offences.note(stream.peer, f"more than {self._limits.streams} streams")
            elif self._nursery is not None:
                self._serving[desk] = None
                await desk.run()
        finally:
            self._serving.pop(desk, None)
            await _close(stream)


async def _pong(_peer: PeerId, _request: Ping) -> Pong:
    return Pong()


def _read_answer(answer: Frame, peer: PeerId, method: str, reply: type[A]) -> A:
    if answer.kind == FAIL:
        if answer.code == "deadline":
            raise DeadlineExceeded(f"{peer} ran out of time over {method}")
        raise Refused(answer.code, f"{peer} refused {method}: {answer.code}: {answer.text[:MAX_TEXT]}")
    try:
        return decode(reply, answer.body)
    except WireError as error:
        raise Refused("bad-reply", f"{peer} answered {method} with something else: {error}") from None


class _Outbox:
    """Frames that wait to be written to one stream, by a key under which they can be taken back."""

    def __init__(self) -> None:
        self._frames: dict[int, bytes] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self.size = 0  # bytes waiting

    def put(self, key: int, message: Frame) -> None:
        framed = frame(encode(message))
        self._frames[key] = framed
        self.size += len(framed)
        self._changed.unpark_all()

    def take_back(self, key: int) -> bool:
        """Whether the frame was still here; it will not be sent."""
        framed = self._frames.pop(key, None)
        self.size -= len(framed or b"")
        self._changed.unpark_all()
        return framed is not None

    async def batch(self) -> bytes:
        """The next frame, with what fits beside it; waits for one."""
        while not self._frames:
            await self._changed.park()
        parts: list[bytes] = []
        room = TOGETHER
        for key in list(self._frames):
            room -= len(self._frames[key])
            if parts and room < 0:
                break
            parts.append(self._frames.pop(key))
        batch = b"".join(parts)
        self.size -= len(batch)
        self._changed.unpark_all()
        return batch

    async def below(self, size: int) -> None:
        """Wait until fewer than `size` bytes wait."""
        while self.size >= size:
            await self._changed.park()


@dataclass(eq=False)
class _Waiting:
    """A call without its answer."""

    deadline: float
    done: trio.Event
    answer: Frame | None = None


class _Line:
    """The caller's stream to one peer, from its opening to its end."""

    def __init__(self, network: Network, peer: PeerId, limits: RpcLimits, offences: Offences) -> None:
        self.peer = peer
        self._network = network
        self._limits = limits
        self._offences = offences
        self._slots = trio.Semaphore(limits.calls)
        self._waiting: dict[int, _Waiting] = {}
        self._next_id = 1
        self._outbox = _Outbox()
        self._patience: trio.CancelScope | None = None  # around an opening or a write that may block
        self._over = False
        self._why = "this node is stopping"

    async def call(self, method: str, body: bytes, deadline: float) -> Frame:
        """The answer to one call; the deadline is the caller's to keep."""
        async with self._slots:
            if self._over:
                raise PeerGone(f"{method} to {self.peer}: {self._why}")
            number, waiting = self._next_id, _Waiting(deadline, trio.Event())
            self._next_id += 1
            self._waiting[number] = waiting
            timeout = max(deadline - trio.current_time(), 1e-3)
            self._outbox.put(number, Frame(CALL, number, method, timeout, body))
            self._be_patient()
            try:
                await waiting.done.wait()
            except trio.Cancelled:
                unsent = self._outbox.take_back(number)
                if not unsent and not self._over and trio.current_time() < deadline:
                    self._outbox.put(-number, Frame(CANCEL, number))
                raise
            finally:
                del self._waiting[number]
                self._be_patient()
            if waiting.answer is None:
                raise PeerGone(f"{method} to {self.peer}: {self._why}")
            return waiting.answer

    async def run(self) -> None:
        """Open the stream, write calls and read answers until it breaks; then every call here has failed."""
        stream: Stream | None = None
        try:
            with self._patient() as scope:
                stream = await self._network.open_stream(self.peer, PROTOCOL, timeout=self._limits.open)
            if stream is None or scope.cancelled_caught:
                self._why = "it could not be connected in time"
                return
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
                waiting.done.set()
            if stream is not None:
                await _close(stream)

    async def _until_broken(
        self, job: Callable[[Stream], Awaitable[None]], stream: Stream, scope: trio.CancelScope
    ) -> None:
        try:
            await job(stream)
        except WireError as error:
            self._offences.note(self.peer, str(error))
            self._why = f"it broke the rules of {PROTOCOL}: {error}"
        except NetworkError as error:
            self._why = str(error)
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"
            log.exception("a stream of calls to %s failed", self.peer)
        finally:
            scope.cancel()

    async def _write(self, stream: Stream) -> None:
        while True:
            batch = await self._outbox.batch()
            with self._patient() as scope:
                await stream.send_all(batch)
            if scope.cancelled_caught:
                self._why = "it takes no more bytes"
                return

    async def _read(self, stream: Stream) -> None:
        reader = FrameReader(stream, limit=self._limits.frame)
        while (raw := await reader.frame()) is not None:
            message = decode(Frame, raw, limit=self._limits.frame)
            if message.kind not in (REPLY, FAIL) or not 0 < message.id < self._next_id:
                raise WireError(f"frame of kind {message.kind} for call {message.id}, which was never made")
            waiting = self._waiting.get(message.id)
            if waiting is not None and waiting.answer is None:  # else late: its caller has gone
                waiting.answer = message
                waiting.done.set()
        self._why = "it ended the stream"

    def _patient(self) -> trio.CancelScope:
        """A scope that lives as long as some call waits; `_be_patient` moves its end as calls come and go."""
        self._patience = trio.CancelScope()
        self._be_patient()
        return self._patience

    def _be_patient(self) -> None:
        if self._patience is not None:
            last = max((waiting.deadline for waiting in self._waiting.values()), default=0.0)
            self._patience.deadline = max(last, trio.current_time()) + self._limits.write_grace


class _Desk:
    """The callee's side of one stream: reads calls, carries them out, writes answers."""

    def __init__(self, rpc: Rpc, stream: Stream) -> None:
        self.peer = stream.peer
        self.scope = trio.CancelScope()
        self._rpc = rpc
        self._limits = rpc._limits
        self._stream = stream
        self._outbox = _Outbox()
        self._running: dict[int, trio.CancelScope] = {}

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_over, self._write)
                nursery.start_soon(self._until_over, self._read, nursery)

    async def _until_over(self, job: Callable[..., Awaitable[None]], *args: Any) -> None:
        try:
            await job(*args)
        except WireError as error:
            self._rpc.offences.note(self.peer, str(error))
        except NetworkError as error:
            log.debug("the calls of %s ended: %s", self.peer, error)
        finally:
            self.scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        reader = FrameReader(self._stream, limit=self._limits.frame)
        while True:
            await self._outbox.below(self._limits.queued)
            raw = await reader.frame()
            if raw is None:
                return
            message = decode(Frame, raw, limit=self._limits.frame)
            if message.kind == CANCEL:
                if message.id in self._running:
                    self._running[message.id].cancel()
            elif message.kind == CALL and message.id > 0 and message.id not in self._running:
                self._start(message, nursery)
            else:
                raise WireError(f"frame of kind {message.kind} for call {message.id}")

    def _start(self, call: Frame, nursery: trio.Nursery) -> None:
        carried_out = self._rpc._carried_out
        if carried_out[self.peer] >= self._limits.serves:
            self._rpc.offences.note(self.peer, f"more than {self._limits.serves} calls at once")
            self._outbox.put(call.id, Frame(FAIL, call.id, code="busy", text="too many calls at once"))
            return
        if not (call.timeout > 0 and math.isfinite(call.timeout)):
            raise WireError(f"call {call.id} has a timeout of {call.timeout} s")
        carried_out[self.peer] += 1
        scope = self._running[call.id] = trio.CancelScope()
        scope.deadline = trio.current_time() + min(call.timeout, self._limits.longest)
        nursery.start_soon(self._carry_out, call, scope)

    async def _carry_out(self, call: Frame, scope: trio.CancelScope) -> None:
        try:
            answer = Frame(FAIL, call.id, code="deadline", text="the time is up")
            with scope:
                answer = await self._result(call)
            if scope.cancelled_caught and trio.current_time() < scope.deadline:
                return  # cancelled by the caller, who waits for nothing
            await self._outbox.below(self._limits.queued)
            self._outbox.put(call.id, answer)
        finally:
            del self._running[call.id]
            self._rpc._carried_out[self.peer] -= 1
            if not self._rpc._carried_out[self.peer]:
                del self._rpc._carried_out[self.peer]

    async def _result(self, call: Frame) -> Frame:
        known = self._rpc._methods.get(call.method)
        if known is None:
            return Frame(FAIL, call.id, code="unknown-method", text=f"no method {call.method[:80]!r}")
        kind, handler = known
        try:
            request = decode(kind, call.body)
        except WireError as error:
            self._rpc.offences.note(self.peer, f"{call.method}: {error}")
            return Frame(FAIL, call.id, code="malformed", text=str(error)[:MAX_TEXT])
        try:
            body = encode(await handler(self.peer, request))
            if len(body) > self._limits.frame - HEADROOM:
                raise ValueError(f"an answer of {len(body)} bytes does not fit a frame")
        except Refuse as refusal:
            return Frame(FAIL, call.id, code=refusal.code[:80], text=refusal.text[:MAX_TEXT])
        except Exception as error:
            self._log_failure(call.method, error)
            return Frame(FAIL, call.id, code="internal", text="the handler failed")
        return Frame(REPLY, call.id, body=body)

    def _log_failure(self, method: str, error: Exception) -> None:
        """With its trace the first time, for a peer chooses how often it happens."""
        seen = (method, type(error))
        first = seen not in self._rpc._failures_logged
        self._rpc._failures_logged.add(seen)
        level = logging.ERROR if first else logging.DEBUG
        log.log(
            level, "the handler of %s failed for %s: %r", method, self.peer, error, exc_info=error if first else None
        )

    async def _write(self) -> None:
        while True:
            batch = await self._outbox.batch()
            with trio.move_on_after(self._limits.write_stall) as scope:
                await self._stream.send_all(batch)
            if scope.cancelled_caught:
                raise WireError(f"did not read its answers for {self._limits.write_stall:g} s")


async def _close(stream: Stream) -> None:
    with trio.CancelScope(shield=True):  # a cancelled task still closes; aclose never waits long
        await stream.aclose()
