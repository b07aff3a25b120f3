"""What the bulk protocol (`bulk.py`) sends, what it may take of a node, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.protocols.network import NetworkError

PROTOCOL = "/swarmnode/bulk/1"
CHUNK = 256 * 1024  # bytes between two looks at whether the offer still stands, and the grain of a resumed fetch
MAX_MESSAGE = 4096  # bytes of a Want or a Header
MAX_KEY = 16  # parts of a key
DIGEST = 32  # bytes of a blake3

Key = tuple[str | int, ...]  # ("part", run id, round, ballot, index)


class NotOffered(NetworkError):
    """The peer does not offer the key, or not to this node."""


class Corrupt(NetworkError):
    """The peer's bytes are not what they should be: too many, of another kind, or with another hash."""


@dataclass(frozen=True)
class BulkLimits:
    """What fetching and serving may take of this node."""

    streams: int = 8  # fetches from one peer at once; more wait. One that waits for its key to be offered counts
    serves: int = 16  # streams of one peer served here: twice `streams`, for those given up there
    tries: int = 3  # streams in a row that may break without a chunk
    stall: float = 5.0  # seconds without a byte after which a fetch gives up
    serve_stall: float = 30.0  # seconds that a chunk may wait for a peer that does not read
    longest_wait: float = 120.0  # seconds that a peer may wait here for a key to be offered
    open: float = 10.0  # seconds to open a stream


@dataclass(frozen=True)
class Want:
    """Asks for the bytes under `key` from `offset` on, and allows `wait` seconds for them to be offered."""

    key: tuple[str | int, ...]
    offset: int = 0
    wait: float = 0.0


@dataclass(frozen=True)
class Header:
    """What follows: `size` is that of the whole buffer in bytes, `digest` its blake3, or its name while it grows."""

    found: bool
    size: int = 0
    digest: bytes = b""
    dtype: str = ""
