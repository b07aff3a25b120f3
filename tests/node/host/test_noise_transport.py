"""The batching Noise transport speaks upstream's bytes, whatever pieces they come in, and needs fewer writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from libp2p.security.noise.io import NoiseTransportReadWriter
from noise.connection import NoiseConnection

from swarmnode.node.host.allowances import HostAllowance
from swarmnode.node.host.patches import noise_transport
from swarmnode.node.host.patches.noise_transport import AT_ONCE, MAX_PLAINTEXT, NoiseTransport
from swarmnode.node.host.tcp import ExactReader

FRAMES = [
    b"small",
    b"\0" * 40,
    bytes(MAX_PLAINTEXT),
    b"x" * (MAX_PLAINTEXT - 1),
    b"y",
    bytes(range(256)) * 1000,
    b"end",
]


class Pipe(ExactReader):
    """What was written, to be read in pieces of `piece` bytes."""

    def __init__(self, piece: int = 1 << 30) -> None:
        super().__init__(HostAllowance())
        self.written: list[bytes] = []
        self.piece = piece
        self.taken = 0

    async def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    async def close(self) -> None: ...

    def get_remote_address(self) -> None: ...

    async def read(self, n: int | None = None) -> bytes:
        size = self.piece if n is None else n
        part = b"".join(self.written)[self.taken : self.taken + size]
        self.taken += len(part)
        return part


class Socket(Pipe):
    """The same, which takes pieces without putting them together and at most `piece` bytes of them without waiting.

    What it read lies in memory that it uses again.
    """

    def __init__(self, piece: int) -> None:
        super().__init__(piece)
        self.scratch = bytearray(1 << 20)

    async def write_each(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.written += map(bytes, pieces)

    def write_now_each(self, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        everything = b"".join(pieces)
        self.written.append(everything[: self.piece])
        return [rest] if (rest := everything[self.piece :]) else []

    async def read_after(self, head: bytes) -> memoryview:
        came = head + await self.read(None)
        self.scratch[:] = bytes(len(self.scratch))
        self.scratch[: len(came)] = came
        return memoryview(self.scratch)[: len(came)]


def states() -> tuple[NoiseConnection, NoiseConnection]:
    """Two ends of a finished handshake."""
    one, two = (NoiseConnection.from_name(b"Noise_NN_25519_ChaChaPoly_SHA256") for _ in range(2))
    one.set_as_initiator()
    two.set_as_responder()
    one.start_handshake()
    two.start_handshake()
    two.read_message(bytes(one.write_message()))
    one.read_message(bytes(two.write_message()))
    return one, two


def ours(pipe: Pipe, state: NoiseConnection) -> NoiseTransport:
    protocol: Any = state.noise_protocol
    return NoiseTransport(pipe, protocol.cipher_state_encrypt, protocol.cipher_state_decrypt)


async def everything(transport: NoiseTransport) -> bytes:
    messages: list[bytes] = []
    while more := await transport.read():
        messages += more
    return b"".join(messages)


@pytest.mark.parametrize("piece", [1, 2, 17, 1000, 65536, 1 << 30])
async def test_all_bytes_arrive_whatever_pieces_the_socket_gives(piece: int) -> None:
    frames = FRAMES if piece > 100 else FRAMES[:2]
    (one, two), pipe = states(), Pipe(piece)
    sender = ours(pipe, one)
    for _ in range(2):
        await sender.write(frames)
    assert await everything(ours(pipe, two)) == b"".join(frames) * 2


@pytest.mark.parametrize("piece", [1000, 65537, 1 << 19])
async def test_all_bytes_arrive_whatever_the_socket_takes_at_once(piece: int) -> None:
    (one, two), pipe = states(), Socket(piece)
    sender = ours(pipe, one)
    for frame in FRAMES:
        if not sender.write_now([b"head", memoryview(frame)]):
            await sender.write([])
    await sender.write(FRAMES)
    expected = b"".join(b"head" + frame for frame in FRAMES) + b"".join(FRAMES)
    assert await everything(ours(pipe, two)) == expected


@pytest.mark.parametrize("piece", [1000, 1 << 19])
async def test_of_many_small_messages_some_are_opened_at_a_time_and_all_arrive_in_order(piece: int) -> None:
    (one, two), pipe = states(), Socket(piece)
    sender, reader = ours(pipe, one), ours(pipe, two)
    sealed: list[bytes | memoryview] = []
    for number in range(5 * AT_ONCE):
        sender._seal(number.to_bytes(2, "big") if number % 3 else b"", sealed)
    await pipe.write(b"".join(sealed))
    batches = []
    while more := await reader.read():
        batches.append(more)
    assert max(map(len, batches)) <= AT_ONCE
    expected = [number.to_bytes(2, "big") if number % 3 else b"" for number in range(5 * AT_ONCE)]
    assert [message for batch in batches for message in batch] == expected


async def test_upstream_reads_what_is_written_here_and_the_other_way_round() -> None:
    (one, two), pipe, back = states(), Pipe(), Pipe()
    await ours(pipe, one).write(FRAMES)
    stock = NoiseTransportReadWriter(pipe, two)  # type: ignore[arg-type]
    expected, received = b"".join(FRAMES), b""
    while len(received) < len(expected):
        received += await stock.read_msg()
    assert received == expected
    stock_writer = NoiseTransportReadWriter(back, two)  # type: ignore[arg-type]
    for frame in FRAMES:
        await stock_writer.write_msg(frame)
    assert await everything(ours(back, one)) == expected


async def test_a_batch_is_one_write() -> None:
    (one, _), pipe = states(), Pipe()
    await ours(pipe, one).write(FRAMES)
    assert len(pipe.written) == 1
    assert len(pipe.written[0]) < sum(map(len, FRAMES)) + 10 * 18  # few messages, each with 18 bytes of its own


async def test_stock_noise_still_writes_every_message_alone() -> None:
    (one, _), pipe = states(), Pipe()
    await NoiseTransportReadWriter(pipe, one).write_msg(bytes(4 * MAX_PLAINTEXT))  # type: ignore[arg-type]
    gone = f"upstream no longer shows this defect: remove {noise_transport.__name__}"
    assert len(pipe.written) == 4, gone


@pytest.mark.parametrize("flipped", [0, 2, 10, -1])
async def test_what_was_changed_on_the_way_is_never_read(flipped: int) -> None:
    (one, two), pipe = states(), Pipe()
    await ours(pipe, one).write([b"first"])
    damaged = bytearray(pipe.written[0])
    damaged[flipped] ^= 1
    pipe.written[0] = bytes(damaged) + bytes(300)
    with pytest.raises(InvalidTag):
        await everything(ours(pipe, two))
