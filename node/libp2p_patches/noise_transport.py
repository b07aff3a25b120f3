"""Noise messages of an established connection, many of them in one write and one read.

What is slow upstream (py-libp2p 0.8.1): every message is its own write to the socket (`security/noise/io.py:71`), and
is read in two exact reads through five layers of coroutines (`io/msgio.py:56`), each with its own copy.

Here all messages of a batch go in one write, and one read of the socket yields every whole message in it. The handshake
stays upstream's, and so do the bytes on the wire: 2 bytes of length, big endian, then at most 65,535 bytes of
ChaCha20-Poly1305 ciphertext whose nonce counts the messages (https://github.com/libp2p/specs/tree/master/noise).

No longer needed when `test_stock_noise_still_writes_every_message_alone` in tests/node/test_noise_transport.py fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.secure_session import SecureSession

MAX_PLAINTEXT = 65535 - 16  # bytes of one message without its tag
TAG = 16  # bytes


class NoiseTransport:
    """Both directions of a connection after its handshake. `raw` reads whatever is there and writes all."""

    def __init__(self, raw: Any, encrypting: Any, decrypting: Any, ahead: bytes = b"") -> None:
        self._raw = raw
        self._encrypt, self._sent = encrypting.cipher.cipher.encrypt, encrypting.n
        self._decrypt, self._taken = decrypting.cipher.cipher.decrypt, decrypting.n
        self._ahead = ahead  # decrypted during the handshake and not read yet
        self._received = b""  # a message that has not arrived whole
        self._raw_write_now = getattr(raw, "write_now", None)
        self._left = b""  # of messages sealed by `write_now`, what the socket did not take

    async def write(self, frames: Sequence[bytes]) -> None:
        """Send the frames in order, as few messages, in one write, after what `write_now` left."""
        out = [self._left] if self._left else []
        self._left = b""
        together: list[bytes] = []
        room = MAX_PLAINTEXT
        for frame in frames:
            if len(frame) > room and together:
                self._seal(b"".join(together), out)
                together, room = [], MAX_PLAINTEXT
            together.append(frame)
            room -= len(frame)
        if together:
            self._seal(together[0] if len(together) == 1 else b"".join(together), out)
        if out:
            await self._raw.write(b"".join(out))

    def write_now(self, frame: bytes) -> bool | None:
        """Send one frame without waiting, while nobody writes. None: not possible here; nothing was sent.

        False: a part was sent, and the next `write`, be it of nothing, sends the rest.
        """
        if self._raw_write_now is None or self._left:
            return None
        out: list[bytes] = []
        self._seal(frame, out)
        self._left = b"".join(out)
        self._left = self._left[self._raw_write_now(self._left) :]
        return not self._left

    def _seal(self, plain: bytes, out: list[bytes]) -> None:
        for start in range(0, len(plain), MAX_PLAINTEXT):
            piece = plain if len(plain) <= MAX_PLAINTEXT else plain[start : start + MAX_PLAINTEXT]
            out.append((len(piece) + TAG).to_bytes(2, "big"))
            out.append(self._encrypt(_nonce(self._sent), piece, None))
            self._sent += 1

    async def read(self) -> bytes:
        """What has arrived, in whole messages; b"" at the end. Raises InvalidTag for what the peer did not encrypt."""
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        while True:
            plain = self._opened()
            if plain:
                return plain
            chunk = await self._raw.read(None)
            if not chunk:
                return b""
            self._received = self._received + chunk if self._received else chunk

    def _opened(self) -> bytes:
        received = self._received
        end = len(received)
        at = 0
        plain: list[bytes] = []
        with memoryview(received) as view:
            while end - at >= 2:
                stop = at + 2 + int.from_bytes(view[at : at + 2], "big")
                if stop > end:
                    break
                plain.append(self._decrypt(_nonce(self._taken), view[at + 2 : stop], None))
                self._taken += 1
                at = stop
        if at:
            self._received = received[at:]
        return plain[0] if len(plain) == 1 else b"".join(plain)


def _nonce(count: int) -> bytes:
    return b"\0\0\0\0" + count.to_bytes(8, "little")


class Plain:
    """A secured connection that is no Noise, read and written as it offers."""

    def __init__(self, secured: Any) -> None:
        self._secured = secured

    async def read(self) -> bytes:
        return bytes(await self._secured.read(None))

    async def write(self, frames: Sequence[bytes]) -> None:
        if frames:
            await self._secured.write(b"".join(frames))

    def write_now(self, frame: bytes) -> bool | None:
        return None


def over(secured: Any) -> NoiseTransport | Plain:
    """What reads and writes a secured connection."""
    if isinstance(secured, SecureSession) and isinstance(secured.conn, NoiseTransportReadWriter):
        protocol = secured.conn.noise_state.noise_protocol
        raw = secured.conn.read_writer.read_write_closer
        return NoiseTransport(
            raw.stream if isinstance(raw, RawConnection) else raw,
            protocol.cipher_state_encrypt,
            protocol.cipher_state_decrypt,
            secured._drain(None),
        )
    return Plain(secured)
