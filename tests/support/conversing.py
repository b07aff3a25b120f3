"""A session of reconciliation between two sides in one place."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.crdt.reconcile import Initiator, Responder


@dataclass(frozen=True)
class Transcript:
    """Bytes of the frames of a session, in turn; the initiator's come first."""

    frames: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.frames)

    @property
    def half_rounds(self) -> int:
        return len(self.frames)


def converse(initiator: Initiator, responder: Responder) -> Transcript:
    """Run a session between two sides in one place. Raises what either side raises."""
    sizes = []
    frame: bytes | None = initiator.open()
    while frame is not None:
        reply = responder.receive(frame)
        sizes += [len(frame), len(reply)]
        frame = initiator.receive(reply)
    return Transcript(tuple(sizes))
