"""The server's side of the bulk protocol (`bulk.py`): what is offered, and one stream on which a peer fetches it."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio
from blake3 import blake3

from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import NetworkError, PeerId, Stream, StreamBroken
from swarmnode.protocols.peers.violations import Offences
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.bulk_wire import CHUNK, MAX_KEY, MAX_MESSAGE, BulkLimits, Header, Key, Want
from swarmnode.protocols.transfer.scheduler import Turns
from swarmnode.protocols.transfer.streaming import Growing
from swarmnode.protocols.wire import WireError, decode, encode

log = logging.getLogger(__name__)

Find = Callable[[Key, PeerId, float], Awaitable["Offer | None"]]


@dataclass(eq=False)
class Offer:
    """A buffer that peers may fetch."""

    buffer: memoryview
    dtype: str
    to: frozenset[PeerId] | None  # None: any
    growing: Growing | None = None  # whose `buffer` it is; what is not ready yet is waited for
    digest: bytes | None = None
    turns: Turns | None = None
    hashing: trio.Lock | None = None
    stands: bool = True

    def withdraw(self) -> None:
        """Not one byte is read from now on."""
        self.stands = False
        if self.growing is not None:
            self.growing.end()

    async def hash(self, runner: Runner) -> bytes:
        """The blake3, computed once; of what grows, its name."""
        if self.growing is not None:
            return self.growing.name
        self.hashing = self.hashing or trio.Lock()
        async with self.hashing:
            if self.digest is None:
                self.digest = await runner(lambda: blake3(self.buffer).digest())
        return self.digest


class Desk:
    """One stream of a peer: one request at a time."""

    def __init__(self, stream: Stream, *, find: Find, runner: Runner, limits: BulkLimits, offences: Offences) -> None:
        """`find(key, peer, wait)` is the offer of a key to a peer, as soon as there is one within `wait` seconds."""
        self.peer = stream.peer
        self.scope = trio.CancelScope()
        self._stream = stream
        self._find = find
        self._runner = runner
        self._limits = limits
        self._offences = offences
        self._busy = False

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._or_end, self._read, nursery)

    async def _or_end(self, job: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run `job`; where the peer or the stream fails in it, end the desk."""
        try:
            await job(*args)
        except WireError as error:
            self._offences.note(self.peer, str(error))
            self.scope.cancel()
        except NetworkError as error:
            log.debug("serving %s ended: %s", self.peer, error)
            self.scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        """Read on while serving, to notice a fetcher that goes away."""
        reader = FrameReader(self._stream, limit=MAX_MESSAGE)
        while (raw := await reader.frame()) is not None:
            want = decode(Want, raw, limit=MAX_MESSAGE)
            if self._busy:
                raise WireError("Want: sent before the last was served")
            if want.offset < 0 or not 0 <= want.wait < math.inf or len(want.key) > MAX_KEY:
                raise WireError(f"Want: offset {want.offset}, wait {want.wait}, {len(want.key)} parts of a key")
            self._busy = True
            nursery.start_soon(self._or_end, self._serve, want)
        self.scope.cancel()

    async def _serve(self, want: Want) -> None:
        offer = await self._find(want.key, self.peer, min(want.wait, self._limits.longest_wait))
        if offer is None or offer.turns is None:
            await self._answer(want, offer)
            return
        async with offer.turns.turn(self.peer):
            await self._answer(want, offer)

    async def _answer(self, want: Want, offer: Offer | None) -> None:
        digest = b"" if offer is None else await offer.hash(self._runner)
        if offer is None or not offer.stands:
            await self._send(frame(encode(Header(found=False))), last=True)
            return
        size = offer.buffer.nbytes
        if want.offset > size:
            raise WireError(f"Want: offset {want.offset} in {size} bytes")
        header = frame(encode(Header(True, size, digest, offer.dtype)))
        await self._send(header, last=want.offset == size)
        for start in range(want.offset, size, CHUNK):
            stop = min(start + CHUNK, size)
            if offer.growing is not None:
                await offer.growing.reach(stop)
            if not offer.stands:
                raise StreamBroken("the offer was withdrawn")
            await self._send(bytes(offer.buffer[start:stop]), last=stop == size)

    async def _send(self, piece: bytes, *, last: bool) -> None:
        self._busy = not last  # the fetcher may ask again as soon as it has the last byte
        with trio.move_on_after(self._limits.serve_stall) as scope:
            await self._stream.send_all(piece)
        if scope.cancelled_caught:
            raise StreamBroken(f"it took nothing for {self._limits.serve_stall:g} s")
