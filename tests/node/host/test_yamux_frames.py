"""What is small passes what is bulk, no stream's frames change their order, and bulk goes on."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.node.host.patches.yamux_session import (
    BATCH,
    HEADER,
    MAX_BODY,
    MAX_BULK,
    MAX_FRAME,
    MAX_SMALL,
    SMALL,
    FrameQueue,
)


def stream() -> Any:
    return SimpleNamespace(in_bulk=0)


def batches(outbox: FrameQueue) -> Iterator[list[bytes]]:
    while outbox:
        yield outbox.batch()


def test_answers_and_small_frames_pass_the_bulk_of_other_streams() -> None:
    outbox, bulk, calls = FrameQueue(), stream(), stream()
    for _ in range(3):
        outbox.put(bulk, bytes(MAX_FRAME))
    outbox.put(calls, b"call")
    outbox.answer(b"pong")
    assert outbox.batch()[:3] == [b"pong", b"call", bytes(MAX_FRAME)]


def test_frames_of_one_stream_keep_their_order_whatever_their_size() -> None:
    outbox, mixed, other = FrameQueue(), stream(), stream()
    frames = [bytes([n]) * (SMALL + 1 if n % 3 == 0 else 10) for n in range(30)]
    for frame in frames:
        outbox.put(mixed, frame)
        outbox.put(other, b"other")
    written = [frame for batch in batches(outbox) for frame in batch]
    assert [frame for frame in written if frame != b"other"] == frames
    assert mixed.in_bulk == 0


def test_bulk_goes_on_under_a_flood_of_small_frames() -> None:
    outbox, bulk, calls = FrameQueue(), stream(), stream()
    for _ in range(MAX_BULK // MAX_FRAME):
        outbox.put(bulk, bytes(MAX_FRAME))
    for _ in range(MAX_BULK // MAX_FRAME):
        for _ in range(2 * BATCH // SMALL):
            outbox.put(calls, bytes(SMALL))
        batch = outbox.batch()
        assert bytes(MAX_FRAME) in batch
        assert sum(map(len, batch)) <= BATCH


@pytest.mark.parametrize("size", [1, SMALL - HEADER.size, SMALL, MAX_BODY])
def test_senders_wait_for_what_their_own_frames_fill(size: int) -> None:
    outbox, full = FrameQueue(), stream()
    small = size + HEADER.size <= SMALL
    waiting = 0
    while outbox.has_room(full, size) and waiting < 1 << 20:
        outbox.put(full, bytes(HEADER.size + size))
        waiting += HEADER.size + size
    assert waiting <= (MAX_SMALL if small else MAX_BULK) + MAX_FRAME
    assert outbox.has_room(stream(), MAX_BODY if small else 1)  # the others go on
    list(batches(outbox))
    assert outbox.has_room(full, size)
