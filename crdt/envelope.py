"""The signed envelope: what a node signs, for whatever purpose, has one form.

    payload   = a value in canonical msgpack (`encoding`), of a bounded size
    message   = "swarmnode/<purpose>/<version>" ‖ 0 ‖ payload, or … ‖ 0 ‖ about ‖ 0 ‖ payload
    signature = Ed25519 by the author over the message; beside it, so that signing again names nothing anew
    sealed    = canonical msgpack of the pair (payload, signature)

The tag before the payload separates domains: no signature for one purpose, or one version of it, passes for another.
`about` is what the payload is bound to though it does not travel in it, such as the run or the key that it is stored
under. Every purpose has one `Domain`. Keys and curves are elsewhere: who calls passes what signs and what verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value

SIGNATURE_SIZE = 64  # bytes, Ed25519
SEAL = 80  # bytes, at most, that a signature and its framing add to a payload

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]  # (author, message, signature)


class InvalidEnvelope(ValueError):
    """Bytes that no correct node signs. `forged`: well-formed, and not signed by whom they name."""

    def __init__(self, text: str, *, forged: bool = False) -> None:
        super().__init__(text)
        self.forged = forged


class Envelope(NamedTuple):
    payload: bytes
    signature: bytes

    @property
    def sealed(self) -> bytes:
        """Both as bytes, for a peer or a disk; `unsealed` gives them back."""
        return encoding.encode((self.payload, self.signature), max_size=len(self.payload) + SEAL)


def unsealed(raw: bytes, *, max_size: int) -> Envelope | None:
    """The envelope in sealed bytes, of a payload of at most `max_size` bytes; None for any other bytes."""
    try:
        value = encoding.decode(raw, max_size=max_size + SEAL)
    except EncodingError:
        return None
    match value:
        case (bytes() as payload, bytes() as signature) if len(payload) <= max_size:
            return Envelope(payload, signature)
    return None


@dataclass(frozen=True)
class Domain:
    """One purpose for which nodes sign."""

    purpose: str
    version: int
    max_size: int  # bytes of payload

    @cached_property
    def tag(self) -> bytes:
        return f"swarmnode/{self.purpose}/{self.version}".encode() + b"\0"

    def message(self, payload: bytes, about: str = "") -> bytes:
        return self.tag + about.encode() + b"\0" + payload if about else self.tag + payload

    def seal(self, value: Value, sign: Sign, about: str = "") -> Envelope:
        """Sign a value. Raises EncodingError where it has no canonical form, or is too large."""
        payload = encoding.encode(value, max_size=self.max_size)
        return Envelope(payload, sign(self.message(payload, about)))

    def open(self, envelope: Envelope, author: str, verify: Verify, about: str = "") -> Value:
        """The value that `author` signed. Raises InvalidEnvelope."""
        try:
            value = encoding.decode(envelope.payload, max_size=self.max_size)
        except EncodingError as error:
            raise InvalidEnvelope(f"the payload is malformed: {error}") from error
        if not self.is_signed(envelope, author, verify, about):
            raise InvalidEnvelope(f"it is not signed by {author}", forged=True)
        return value

    def is_signed(self, envelope: Envelope, author: str, verify: Verify, about: str = "") -> bool:
        """Whether the signature is `author`'s. For payloads that are known to be in canonical form."""
        message = self.message(envelope.payload, about)
        return len(envelope.signature) == SIGNATURE_SIZE and verify(author, message, envelope.signature)
