"""Values in the DHT that nobody but their author can make, alter, roll back or keep alive.

A key is `/swarmnode/<author's peer id>/<name>`, so whoever holds a record knows whose signature to ask for. The stored
bytes are an envelope (`crdt.envelope`) of expiry, sequence number and value, which the author signed with the key.

What each side checks, storers before they keep a record and readers before they believe one:
- form: key and value within their sizes; integers where integers belong (so no NaN), bounds before decoding;
- origin: the signature is that of the author in the key, so a record moved to another key is a forgery;
- time: it has not expired, and it expires at most `MAX_LIFETIME` from now;
- order, against the record in hand (`supersedes`): a greater sequence number that expires no earlier. As expiry never
  moves back, a record that was replaced has expired by the time its replacement is forgotten: replaying it is useless
  even then.

Not promised: that a reader sees the newest value. Whoever asks only nodes that never saw it gets an older one, still
unexpired and genuine. A reader that asks many nodes and remembers what it has seen (`node.discovery.dht_values`) makes
that unlikely.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError, Value
from swarmnode.crdt.envelope import SEAL, Domain, Sign, Verify, unsealed
from swarmnode.protocols.network import PeerId

NAMESPACE = "swarmnode"
MAX_VALUE = 16 * 1024  # bytes; larger things are shards, and a record names them
DOMAIN = Domain("dht", 2, MAX_VALUE + 64)  # a value, its sequence, expiry and their names; version 1 had another form
MAX_SEALED = DOMAIN.max_size + SEAL  # bytes
MAX_LIFETIME = 24 * 3600.0  # seconds; a record whose author is gone must not stay for ever
SKEW = 300.0  # seconds that the author's clock may be ahead of ours
MAX_NUMBER = 1 << 62  # of sequences and times: far beyond any clock

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # 64 characters: go-libp2p refuses keys above 128 bytes
_PEER = re.compile(r"[1-9A-HJ-NP-Za-km-z]{46,60}")


class BadRecord(ValueError):
    """Bytes that are no valid record; `why` is one of malformed, oversize, forged, expired, too-far."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(text)
        self.why = why


@dataclass(frozen=True)
class DhtRecord:
    author: PeerId
    name: str
    value: bytes
    sequence: int
    expires: int  # milliseconds since 1970, by the author's clock

    @property
    def key(self) -> bytes:
        return record_key(self.author, self.name)


def record_key(author: PeerId, name: str) -> bytes:
    """The DHT key of an author's record. Raises ValueError for a name that is none."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no record name: 1 to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first")
    return f"/{NAMESPACE}/{author}/{name}".encode()


def seal(sign: Sign, record: DhtRecord) -> bytes:
    """The bytes of a record of one's own. Raises BadRecord("oversize") above MAX_VALUE."""
    if len(record.value) > MAX_VALUE:
        raise BadRecord("oversize", f"a record's value has at most {MAX_VALUE} bytes, not {len(record.value)}")
    stored: Value = {"expires": record.expires, "sequence": record.sequence, "value": record.value}
    return DOMAIN.seal(stored, sign, record.key.decode()).sealed


def unseal(key: bytes, raw: bytes, *, verify: Verify, now: float) -> DhtRecord:
    """The record that `raw` holds for `key`. `now` is in seconds since 1970. Raises BadRecord."""
    author, name = _owner(key)
    if len(raw) > MAX_SEALED:
        raise BadRecord("oversize", f"a record has at most {MAX_SEALED} bytes, not {len(raw)}")
    envelope = unsealed(raw, max_size=DOMAIN.max_size)
    if envelope is None:
        raise BadRecord("malformed", "it is no envelope")
    try:
        stored = encoding.decode(envelope.payload, max_size=DOMAIN.max_size)
    except EncodingError as error:
        raise BadRecord("malformed", str(error)) from None
    match stored:
        case {"expires": int() as expires, "sequence": int() as sequence, "value": bytes() as value, **rest} if (
            not rest
        ):
            record = DhtRecord(author, name, value, sequence, expires)
        case _:
            raise BadRecord("malformed", "it does not have an expiry, a sequence number and a value")
    if len(value) > MAX_VALUE:
        raise BadRecord("oversize", f"a record's value has at most {MAX_VALUE} bytes, not {len(value)}")
    if isinstance(sequence, bool) or isinstance(expires, bool):
        raise BadRecord("malformed", "its expiry or its sequence number is no number")
    if not (0 <= sequence < MAX_NUMBER and 0 <= expires < MAX_NUMBER):
        raise BadRecord("malformed", f"sequence {sequence}, expiry {expires}")
    if expires <= now * 1000:
        raise BadRecord("expired", f"it expired {now - expires / 1000:.0f} s ago")
    if expires > (now + MAX_LIFETIME + SKEW) * 1000:
        raise BadRecord("too-far", f"it would live {expires / 1000 - now:.0f} s, at most {MAX_LIFETIME:.0f}")
    if not DOMAIN.is_signed(envelope, author, verify, key.decode()):
        raise BadRecord("forged", f"it is not signed by {author}")
    return record


def supersedes(new: DhtRecord, old: DhtRecord | None) -> bool:
    """Whether `new` may take the place of `old`, a record of the same key; so may an equal one (it is republished).

    Among two values under one sequence number, which only a faulty author makes, every node prefers the same one.
    """
    if old is None or new == old:
        return True
    return new.expires >= old.expires and rank(new) > rank(old)


def rank(record: DhtRecord) -> tuple[int, int, bytes]:
    """Orders the records of one key; a reader believes the greatest."""
    return record.sequence, record.expires, record.value


def _owner(key: bytes) -> tuple[PeerId, str]:
    try:
        empty, namespace, author, name = key.decode("ascii").split("/")
    except ValueError:  # includes UnicodeDecodeError
        raise BadRecord("malformed", "the key is not /swarmnode/<peer id>/<name>") from None
    if empty or namespace != NAMESPACE or not _PEER.fullmatch(author) or not _NAME.fullmatch(name):
        raise BadRecord("malformed", "the key is not /swarmnode/<peer id>/<name>")
    return author, name
