"""Answers to calls for as long as what they are about is there.

Methods are served from the moment a part is made, and for as long as calls run, which is longer than the part. A call
that comes before or after is refused, and one in hand when the part ends is ended with it: so no answer looks at what
is not open yet, or is closed already.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.network import PeerId

Q = TypeVar("Q")
R = TypeVar("R")


class Reception:
    """The calls that one part answers; closed until `open`."""

    def __init__(self, closed: str) -> None:
        """`closed` is what callers are told while it is."""
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

    def while_open(self, answer: Callable[[PeerId, Q], Awaitable[R]]) -> Callable[[PeerId, Q], Awaitable[R]]:
        """`answer`, which otherwise raises Refuse."""

        async def guarded(peer: PeerId, request: Q) -> R:
            if not self._open:
                raise Refuse("busy", self._closed)
            with trio.CancelScope() as scope:
                self._in_hand.add(scope)
                try:
                    return await answer(peer, request)
                finally:
                    self._in_hand.discard(scope)
                    if not self._in_hand:
                        self._empty.set()
            raise Refuse("busy", self._closed)

        return guarded
