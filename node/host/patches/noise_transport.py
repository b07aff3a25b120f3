"""Noise messages of an established connection, many of them in one write and one read.

What is slow upstream (py-libp2p 0.8.1): every message is its own write to the socket (`security/noise/io.py:71`), and
is read in two exact reads through five layers of coroutines (`io/msgio.py:56`), each with its own copy.

Here all messages of a batch go in one write, and one read of the socket yields every whole message in it. The handshake
stays upstream's, and so do the bytes on the wire: 2 bytes of length, big endian, then at most 65,535 bytes of
ChaCha20-Poly1305 ciphertext whose nonce counts the messages (https://github.com/libp2p/specs/tree/master/noise).

No longer needed when `test_stock_noise_still_writes_every_message_alone` in
tests/node/host/test_noise_transport.py fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libp2p.abc import ISecureConn
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.secure_session import SecureSession

from swarmnode.node.host.tcp import ExactReader, Piece

MAX_PLAINTEXT = 65535 - 16  # bytes of one message without its tag
TAG = 16  # bytes
ALONE = 16 * 1024  # bytes of a piece that is not copied together with others: a message of its own costs less
JOINED = 16 * 1024  # bytes that the system takes in one piece rather than in several
AT_ONCE = 256  # messages opened without a pause: half a ms of work where they are as small as can be


class NoiseTransport:
    """Both directions of a connection after its handshake."""

    def __init__(self, raw: ExactReader, encrypting: Any, decrypting: Any, ahead: bytes = b"") -> None:
        self.raw = raw
        self._encrypt, self._sent = encrypting.cipher.cipher.encrypt, encrypting.n
        self._decrypt, self._taken = decrypting.cipher.cipher.decrypt, decrypting.n
        self._ahead = ahead  # decrypted during the handshake and not read yet
        self._received = b""  # a message that has not arrived whole; before it others, where there were too many
        self._are_more = False  # there may be such
        self._left: list[Piece] = []  # of messages sealed by `write_now`, what the socket did not take

    async def write(self, pieces: Sequence[Piece]) -> None:
        """Send the pieces in order, as few messages, in one write, after what `write_now` left."""
        out, self._left = self._left, []
        out += self._sealed(pieces)
        if not out:
            return
        if sum(map(len, out)) <= JOINED:
            await self.raw.write(b"".join(out))
        else:
            await self.raw.write_each(out)

    def write_now(self, pieces: Sequence[Piece]) -> bool:
        """Send the pieces without waiting, while nobody writes.

        False: a part was sent, and the next `write`, be it of nothing, sends the rest.
        """
        assert not self._left
        self._left = self._sealed(pieces)
        if sum(map(len, self._left)) <= JOINED:
            self._left = [b"".join(self._left)]
        self._left = self.raw.write_now_each(self._left)
        return not self._left

    def _sealed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Messages with their lengths."""
        out: list[Piece] = []
        together: list[Piece] = []
        size = 0
        for piece in pieces:
            if together and (len(piece) >= ALONE or size + len(piece) > MAX_PLAINTEXT):
                self._seal(together[0] if len(together) == 1 else b"".join(together), out)
                together, size = [], 0
            if len(piece) > MAX_PLAINTEXT:
                piece = memoryview(piece)
            while len(piece) >= ALONE:
                self._seal(piece[:MAX_PLAINTEXT], out)
                piece = piece[MAX_PLAINTEXT:]
            if len(piece):
                together.append(piece)
                size += len(piece)
        if together:
            self._seal(together[0] if len(together) == 1 else b"".join(together), out)
        return out

    def _seal(self, plain: Piece, out: list[Piece]) -> None:
        out.append((len(plain) + TAG).to_bytes(2, "big"))
        out.append(self._encrypt(_nonce(self._sent), plain, None))
        self._sent += 1

    async def read(self) -> list[bytes]:
        """Whole messages that arrived, some; none at the end. Raises InvalidTag for what the peer did not encrypt."""
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return [ahead]
        plain = self._opened(memoryview(self._received)) if self._are_more else []
        while not plain:
            held = len(self._received)
            received = await self.raw.read_after(self._received)
            if len(received) == held:
                return []
            plain = self._opened(received)
        return plain

    def _opened(self, received: memoryview) -> list[bytes]:
        """The first whole messages in it; the rest is kept."""
        end = len(received)
        at = 0
        plain: list[bytes] = []
        while end - at >= 2 and len(plain) < AT_ONCE:
            stop = at + 2 + int.from_bytes(received[at : at + 2], "big")
            if stop > end:
                break
            plain.append(self._decrypt(_nonce(self._taken), received[at + 2 : stop], None))
            self._taken += 1
            at = stop
        self._received, self._are_more = bytes(received[at:]), len(plain) == AT_ONCE
        return plain


def _nonce(count: int) -> bytes:
    return b"\0\0\0\0" + count.to_bytes(8, "little")


def over(secured: ISecureConn) -> NoiseTransport:
    """What reads and writes a connection after its Noise handshake: a host of ours agrees on nothing else."""
    assert isinstance(secured, SecureSession) and isinstance(secured.conn, NoiseTransportReadWriter)
    protocol = secured.conn.noise_state.noise_protocol
    raw: Any = secured.conn.read_writer.read_write_closer
    return NoiseTransport(
        raw.stream if isinstance(raw, RawConnection) else raw,
        protocol.cipher_state_encrypt,
        protocol.cipher_state_decrypt,
        secured._drain(None),
    )
