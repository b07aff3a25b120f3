"""The callee's side of one stream of calls: reads them, carries each out in a task, writes answers.

A call never waits for another's handler: for each there is a task that rested, or a new one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import trio

from swarmnode.protocols.calls.frames import (
    CALL,
    CANCEL,
    FAIL,
    HEADROOM,
    MAX_TEXT,
    REPLY,
    Frame,
    Outbox,
    Refuse,
    RpcLimits,
)
from swarmnode.protocols.frames import FrameReader
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.network import PeerId, Stream
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.wire import WireError, decode, encode

log = logging.getLogger(__name__)

RESTING = 4  # tasks of one stream that wait for calls
STRETCH = 0.005  # s for which calls of one stream are carried out before other tasks have their turn


class LifecycleGuard:
    """Answers the calls of one part only while `open`.

    Methods are served from the moment a part is made, and for as long as calls run, which is longer than the part
    runs. The guard refuses a call that comes before or after, and ends the calls in hand when the part ends: so no
    handler looks at what is not open yet, or is closed already.
    """

    def __init__(self, closed: str) -> None:
        """Callers read `closed` as the reason why they are refused."""
        self._closed = closed
        self._open = False
        self._in_hand: set[trio.CancelScope] = set()
        self._empty = trio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer within the block; at its end, end what is in hand and wait until it has ended."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self._empty = trio.Event()
            for scope in self._in_hand:
                scope.cancel()
            if self._in_hand:
                with trio.CancelScope(shield=True):
                    await self._empty.wait()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around the answer to one call. Raises Refuse where the part is not open, or closes meanwhile."""
        if not self._open:
            raise Refuse("busy", self._closed)
        with trio.CancelScope() as scope:
            self._in_hand.add(scope)
            try:
                yield
            finally:
                self._in_hand.discard(scope)
                if not self._in_hand:
                    self._empty.set()
        if scope.cancelled_caught:
            raise Refuse("busy", self._closed)


@dataclass(frozen=True)
class ServedMethod:
    request: type[Any]
    handler: Callable[[PeerId, Any], Awaitable[Any]]
    guard: LifecycleGuard | None


class CallServer:
    """What all connections of a node's callers share."""

    def __init__(self, limits: RpcLimits, violations: Violations) -> None:
        self.limits, self.violations = limits, violations
        self.methods: dict[str, ServedMethod] = {}
        self.carried_out = Counter[PeerId]()  # calls of each peer in progress here
        self.held = Counter[PeerId]()  # bytes of their requests and of answers without room
        self.refused = Counter[str]()  # calls, by why
        self.failures_logged = set[tuple[str, type[Exception]]]()
        self.turned_away = Budget[PeerId](Allowance(limits.calls, limits.calls))

    def closed(self, peer: PeerId, call: Frame) -> str | None:
        """Why one more call is not carried out, whoever's it were or because of what the peer did before; else None."""
        limits = self.limits
        refusal = self.violations.refuses(peer)
        if refusal is not None:
            return refusal
        if self.carried_out.total() >= limits.serves_in_all:
            return f"more than {limits.serves_in_all} calls of all peers at once"
        if self.held.total() + len(call.body) > limits.held_in_all:
            return f"requests of all peers in progress of more than {limits.held_in_all} bytes"
        return None

    def over(self, peer: PeerId, call: Frame) -> str | None:
        """Which limit of its own the peer would break by one more call, None where none."""
        limits = self.limits
        if self.carried_out[peer] >= limits.serves:
            return f"more than {limits.serves} calls at once"
        if self.held[peer] + len(call.body) > limits.held:
            return f"requests in progress of more than {limits.held} bytes"
        return None

    def hammers(self, peer: PeerId) -> str | None:
        """A call was turned away; whether the peer goes on as if none had been."""
        if self.turned_away.take(peer, 1):
            return None
        return f"more than {self.limits.calls} calls in a second while none are taken"

    def admit(self, peer: PeerId, call: Frame, sign: int = 1) -> None:
        """Account for a call that begins (`sign` 1) or has ended (-1)."""
        for account, amount in ((self.carried_out, 1), (self.held, len(call.body))):
            account[peer] += sign * amount
            if not account[peer]:
                del account[peer]


@dataclass(eq=False)
class _Job:
    scope: trio.CancelScope
    cancelled: bool = False  # by the caller, who waits for nothing


class ServerConnection:
    def __init__(self, server: CallServer, stream: Stream) -> None:
        self.peer = stream.peer
        self.scope = trio.CancelScope()
        self._server = server
        self._limits = server.limits
        self._stream = stream
        self._outbox = Outbox()
        self._taken = 0  # frames
        self._jobs: dict[int, _Job] = {}
        self._due: deque[tuple[Frame, _Job]] = deque()  # calls for which a task was woken or made
        self._resting = trio.lowlevel.ParkingLot()  # tasks that wait for calls
        self._turn, self._ahead = 0, 0.0  # turns left to others, and s that calls took since, with their waits

    async def run(self) -> None:
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._read, nursery)
        finally:
            for call, _ in self._due:
                self._server.admit(self.peer, call, -1)

    async def _read(self, nursery: trio.Nursery) -> None:
        reader = FrameReader(self._stream, limit=self._limits.frame)
        with self._server.violations.serving(self.peer, self.scope):
            while await reader.each(lambda raw: self._take(raw, nursery)):
                await trio.lowlevel.checkpoint()
                await self._outbox.below(self._limits.queued)
        self.scope.cancel()

    def _take(self, raw: bytes, nursery: trio.Nursery) -> bool:
        """One frame of the caller's. False where others have their turn first, or its answers fill their queue."""
        self._taken += 1
        message = decode(Frame, raw, limit=self._limits.frame)
        job = self._jobs.get(message.id)
        if message.kind == CALL and message.id > 0 and job is None:
            self._start(message, nursery)
        elif message.kind != CANCEL:
            raise WireError(f"frame of kind {message.kind} for call {message.id}")
        elif job is not None:  # else late: it was answered already
            job.cancelled = True
            job.scope.cancel()
        return self._outbox.size < self._limits.queued and self._taken % self._limits.calls > 0

    def _start(self, call: Frame, nursery: trio.Nursery) -> None:
        closed = self._server.closed(self.peer, call)
        excess = self._server.over(self.peer, call) if closed is None else self._server.hammers(self.peer)
        if excess is not None:
            self._complain(excess, Kind.LOAD)
        if closed is not None or excess is not None:
            self._server.refused["closed" if closed is not None else "over its limits"] += 1
            self._outbox.put(Frame(FAIL, call.id, code="busy", text=closed or excess or ""))
            return
        if not (call.timeout > 0 and math.isfinite(call.timeout)):
            raise WireError(f"call {call.id} has a timeout of {call.timeout} s")
        self._server.admit(self.peer, call)
        job = self._jobs[call.id] = _Job(trio.CancelScope())
        job.scope.deadline = trio.current_time() + min(call.timeout, self._limits.longest)
        self._due.append((call, job))
        if self._resting:
            self._resting.unpark()
        else:
            nursery.start_soon(self._work)

    async def _work(self) -> None:
        """Carry out what is due, and rest: waking a task that rests costs less than making one for each call."""
        while True:
            while self._due:
                if self._ahead > STRETCH:
                    await self._others_turn()
                    continue
                began = trio.current_time()
                await self._carry_out(*self._due.popleft())
                self._ahead += trio.current_time() - began
            self._ahead = 0.0
            if len(self._resting) >= RESTING:
                return
            await self._resting.park()

    async def _others_turn(self) -> None:
        """All tasks here wait for one turn of the loop; the first to be back tells that it is over."""
        turn = self._turn
        await trio.lowlevel.checkpoint()
        if turn == self._turn:
            self._turn, self._ahead = turn + 1, 0.0

    async def _carry_out(self, call: Frame, job: _Job) -> None:
        try:
            answer = Frame(FAIL, call.id, code="deadline", text="the time is up")
            with job.scope:
                answer = await self._result(call)
            if job.cancelled:
                return
            if self._outbox.size >= self._limits.queued:
                answer = await self._kept_back(answer)
            self._outbox.put(answer, alone=len(self._jobs) == 1)
        finally:
            del self._jobs[call.id]
            self._server.admit(self.peer, call, -1)

    async def _kept_back(self, answer: Frame) -> Frame:
        """Wait until the peer reads its answers; where it leaves too many of them, this one is not kept."""
        held, size = self._server.held, len(answer.body)
        if held[self.peer] + size > self._limits.held:
            self._complain(f"answers of more than {self._limits.held} bytes not read", Kind.LOAD)
            answer, size = Frame(FAIL, answer.id, code="busy", text="earlier answers are not read"), 0
        held[self.peer] += size
        try:
            await self._outbox.below(self._limits.queued)
        finally:
            held[self.peer] -= size
            if not held[self.peer]:
                del held[self.peer]
        return answer

    async def _result(self, call: Frame) -> Frame:
        method = self._server.methods.get(call.method)
        if method is None:
            return Frame(FAIL, call.id, code="unknown-method", text=f"no method {call.method[:80]!r}")
        try:
            request = decode(method.request, call.body)
        except WireError as error:
            self._complain(f"{call.method}: {error}")
            return Frame(FAIL, call.id, code="malformed", text=str(error)[:MAX_TEXT])
        try:
            with method.guard.call() if method.guard is not None else nullcontext():
                body = encode(await method.handler(self.peer, request))
            if len(body) > self._limits.frame - HEADROOM:
                raise ValueError(f"an answer of {len(body)} bytes does not fit a frame")
        except Refuse as refusal:
            return Frame(FAIL, call.id, code=refusal.code[:80], text=refusal.text[:MAX_TEXT])
        except Exception as error:
            # With its trace the first time, for a peer chooses how often it happens.
            seen = (call.method, type(error))
            first = seen not in self._server.failures_logged
            self._server.failures_logged.add(seen)
            level, trace = (logging.ERROR, error) if first else (logging.DEBUG, None)
            log.log(level, "the handler of %s failed for %s: %r", call.method, self.peer, error, exc_info=trace)
            return Frame(FAIL, call.id, code="internal", text="the handler failed")
        return Frame(REPLY, call.id, body=body)

    def _complain(self, what: str, kind: Kind = Kind.BREACH) -> None:
        self._server.violations.note(self.peer, what, kind)

    async def _write(self) -> None:
        self._outbox.write_to(self._stream)
        with self._server.violations.serving(self.peer, self.scope):
            while True:
                batch = await self._outbox.batch()
                with trio.move_on_after(self._limits.write_stall) as scope:
                    await self._stream.send_all(batch)
                if scope.cancelled_caught:
                    self._complain(f"did not read its answers for {self._limits.write_stall:g} s", Kind.LOAD)
                    self.scope.cancel()
