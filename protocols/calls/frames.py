"""What calls put on the wire, how they end badly, what they may take of a node, and the outbox of frames to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarmnode.protocols.frames import frame
from swarmnode.protocols.network import Stream
from swarmnode.protocols.wire import encode

PROTOCOL = "/swarmnode/rpc/2"
CALL, CANCEL, REPLY, FAIL = range(4)  # kinds of frames
TOGETHER = 64 * 1024  # bytes of small frames that are written at once: one yamux frame
HEADROOM = 1024  # bytes of a frame beside its body: method, code, text and field names
MAX_TEXT = 500  # characters of a failure's text


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
    frame: int = 1 << 20  # bytes; larger things go by bulk
    calls: int = 64  # calls in flight to one peer; more wait, on their own time
    serves: int = 128  # calls of one peer carried out here; more are refused. Twice `calls`, for those given up there
    serves_in_all: int = 1024  # calls of all peers together
    held: int = 12 << 20  # bytes of one peer's requests in progress, and of answers that find its queue full
    held_in_all: int = 128 << 20  # bytes of all peers' together: ten peers that do their worst
    streams: int = 2  # streams of one peer; one is enough, and the old may outlive its successor's opening
    queued: int = 4 << 20  # bytes of answers that wait for one peer; above, it is not read from
    longest: float = 600.0  # seconds that a handler may take, whatever the caller asked for
    open: float = 10.0  # seconds to open a stream
    write_stall: float = 60.0  # seconds that answers may wait for a peer that does not read: a suspended laptop's nap
    write_grace: float = 2.0  # seconds that a blocked write goes on when no call waits for it any more


@dataclass(frozen=True)
class Frame:
    """The one envelope; which fields count depends on `kind`."""

    kind: int  # CALL, CANCEL, REPLY or FAIL
    id: int  # of the call
    method: str = ""
    timeout: float = 0.0  # seconds left
    body: bytes = b""  # the message asked or answered with
    code: str = ""  # of a failure
    text: str = ""


class Outbox:
    """Frames that wait to be written to one stream."""

    def __init__(self) -> None:
        self.size = 0  # bytes waiting
        self._frames: dict[int, bytes] = {}
        self._next_key = 1
        self._idle = False  # nothing is being written
        self._nowait: Callable[[bytes], bool] | None = None
        self._filled = trio.lowlevel.ParkingLot()
        self._emptied = trio.lowlevel.ParkingLot()

    def write_to(self, stream: Stream) -> None:
        """Let `put` write by itself while nothing else does, where the stream has `send_nowait`.

        The caller's own task, which writes each `batch` there, is then not woken for a lone frame.
        """
        self._nowait = getattr(stream, "send_nowait", None)

    def put(self, message: Frame, *, alone: bool = False) -> int:
        """Queue a frame; the key is good for `take_back`. `alone` says that no others are expected beside it."""
        framed = frame(encode(message))
        key, self._next_key = self._next_key, self._next_key + 1
        if alone and self._idle and not self._frames and self._nowait and self._nowait(framed):
            return key
        self._frames[key] = framed
        self.size += len(framed)
        self._filled.unpark_all()
        return key

    def take_back(self, key: int) -> bool:
        """Whether the frame was still here; it will not be sent."""
        framed = self._frames.pop(key, None)
        if framed is None:
            return False
        self._shrink(len(framed))
        return True

    async def batch(self) -> bytes:
        """The next frame, with what fits beside it; waits for one."""
        self._idle = True
        while not self._frames:
            await self._filled.park()
        self._idle = False
        parts: list[bytes] = []
        room = TOGETHER
        while self._frames:
            key = next(iter(self._frames))
            room -= len(self._frames[key])
            if parts and room < 0:
                break
            parts.append(self._frames.pop(key))
        batch = parts[0] if len(parts) == 1 else b"".join(parts)
        self._shrink(len(batch))
        return batch

    async def below(self, size: int) -> None:
        """Wait until fewer than `size` bytes wait."""
        while self.size >= size:
            await self._emptied.park()

    def _shrink(self, size: int) -> None:
        self.size -= size
        self._emptied.unpark_all()
