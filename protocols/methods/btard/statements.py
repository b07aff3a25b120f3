"""What members of a BTARD round sign, how it travels, and what follows from it.

    Commitment  the hashes of what a member is going to send, part by part; and of its nonce
    Sent        with the bytes of a part: their hash
    Centre      of a part by its owner: the hash of its bytes, the radius, the residual that encoding left
    Opening     a nonce; all of them together seed the directions, which nobody knew when the centres were signed
    Sums        a member's checksums and distances, part by part
    PartAudit   the parts that a member says are wrong, after it computed one that was drawn for it
    Seen        a hash for each member over its statements: who was told otherwise shows here

A statement is signed together with the run and the roster's id, so that it proves something about one attempt and
nothing about others. Two different ones of a kind (and part) by one author prove that it told members different things.
A `Sent` whose hash is not the committed one proves that it sent something else. A centre that is not what the committed
contributions give proves its owner's lie to whoever computes it again, and then a checksum that differs proves that of
the member. Silence, and bytes that do not have the hash signed with them, prove nothing: the round is tried again
without that member, and nobody is banned for it. Nor do statements of two lives: a process that was restarted in the
middle of an attempt knows nothing of what it signed before, and says so by another `life`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, get_args

import numpy as np

from swarmnode.crdt.envelope import Domain, Envelope, Sign, Verify
from swarmnode.protocols import wire
from swarmnode.protocols.methods.known.messages import Part, RoundRoster
from swarmnode.protocols.network import PeerId
from swarmnode.training.btard import DIRECTIONS

MAX_STATEMENT = 1 << 16  # bytes: sums of 256 parts have 39 KB. What proves a lie must fit a call, so it is no larger
STATEMENTS = Domain("btard", 3, MAX_STATEMENT)

S = TypeVar("S")


@dataclass(frozen=True)
class Commitment:
    hashes: tuple[bytes, ...]  # of the encoded contribution to each part; none from who contributes nothing
    nonce: bytes  # its hash


@dataclass(frozen=True)
class Sent:
    part: int
    hash: bytes


@dataclass(frozen=True)
class Centre:
    part: int
    hash: bytes  # of its encoded bytes
    radius: float
    residual: float


@dataclass(frozen=True)
class Opening:
    nonce: bytes


@dataclass(frozen=True)
class Sums:
    sums: tuple[float, ...]  # DIRECTIONS of each part, one part after another
    distances: tuple[float, ...]  # of each part

    def of(self, part: int) -> tuple[tuple[float, ...], float]:
        return self.sums[part * DIRECTIONS : (part + 1) * DIRECTIONS], self.distances[part]


@dataclass(frozen=True)
class PartAudit:
    wrong: tuple[int, ...]  # parts


@dataclass(frozen=True)
class Seen:
    step: int  # which of the times that members compare what they hold
    hashes: tuple[bytes, ...]  # of what each member said, in the roster's order


Statement = Commitment | Sent | Centre | Opening | Sums | PartAudit | Seen
KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Statement)}
NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Signed:
    author: PeerId
    attempt: bytes  # hash of the run and the roster: `attempt_of`
    life: bytes  # of its process
    kind: str  # of the statement: the name of its class in small letters
    body: bytes
    signature: bytes


@dataclass(frozen=True)
class LieEvidence:
    """Two statements that one author cannot both have made honestly."""

    first: Signed
    second: Signed


@dataclass(frozen=True)
class Bundle:
    """What a member holds of one author's statements, for another that was told others."""

    held: tuple[Signed, ...]


def attempt_of(run_id: str, roster_id: str) -> bytes:
    """What statements of one attempt at a round are bound to."""
    return hashlib.sha256(f"{run_id}/{roster_id}".encode()).digest()


def seal(what: Statement, author: PeerId, attempt: bytes, life: bytes, sign: Sign) -> Signed:
    kind, body = NAMES[type(what)], wire.encode(what)
    return Signed(author, attempt, life, kind, body, sign(STATEMENTS.message(body, _about(attempt, life, kind))))


def opened(signed: Signed, kind: type[S], author: PeerId, attempt: bytes, verify: Verify) -> S:
    """The statement of that kind by that author in that attempt. Raises WireError where it is none."""
    if (signed.author, signed.attempt, signed.kind) != (author, attempt, NAMES[kind]):
        raise wire.WireError(f"a {kind.__name__} by {author} was expected")
    if not is_signed(signed, verify):
        raise wire.WireError(f"{kind.__name__}: no signature of {author}")
    return wire.decode(kind, signed.body, limit=MAX_STATEMENT)


def is_signed(signed: Signed, verify: Verify) -> bool:
    about = _about(signed.attempt, signed.life, signed.kind)
    return STATEMENTS.is_signed(Envelope(signed.body, signed.signature), signed.author, verify, about)


def _about(attempt: bytes, life: bytes, kind: str) -> str:
    """What a statement is bound to besides its body, which is no canonical value: a sum may be no finite number."""
    return f"{attempt.hex()}/{life.hex()}/{kind}"


def digest(statements: Iterable[Signed]) -> bytes:
    """A hash over what was said, whoever's signature bytes it came with."""
    lines = sorted(f"{s.author}/{s.life.hex()}/{s.kind}/{hashlib.sha256(s.body).hexdigest()}" for s in statements)
    return hashlib.sha256("\n".join(lines).encode()).digest()


def seed_of(nonces: Mapping[PeerId, bytes]) -> bytes:
    """What all nonces together draw: random as long as one member's is."""
    return hashlib.sha256(b"".join(nonces[peer] for peer in sorted(nonces))).digest()


def auditor(seed: bytes, members: Sequence[PeerId], parts: int) -> tuple[PeerId, int]:
    """Who computes which part again, whether or not anything is suspected."""
    drawn = hashlib.sha256(seed + b"audit").digest()
    order = sorted(members)
    return order[int.from_bytes(drawn[:8], "big") % len(order)], int.from_bytes(drawn[8:16], "big") % parts


def convicts(evidence: LieEvidence, verify: Verify) -> PeerId | None:
    """Whose lie it proves to anybody; None where it proves nothing."""
    one, other = evidence.first, evidence.second
    if (one.author, one.attempt, one.life) != (other.author, other.attempt, other.life) or one.body == other.body:
        return None
    if not is_signed(one, verify) or not is_signed(other, verify):
        return None
    with suppress(wire.WireError):  # what is no statement is refused where it arrives
        return one.author if _contradict(one, other) else None
    return None


def _contradict(one: Signed, other: Signed) -> bool:
    first, second = _read(one), _read(other)
    if one.kind == other.kind:
        return _number(first) == _number(second)
    match first, second:
        case (Commitment() as commitment, Sent() as sent) | (Sent() as sent, Commitment() as commitment):
            return not 0 <= sent.part < len(commitment.hashes) or commitment.hashes[sent.part] != sent.hash
        case (Commitment(nonce=sealed), Opening(nonce=nonce)) | (Opening(nonce=nonce), Commitment(nonce=sealed)):
            return hashlib.sha256(nonce).digest() != sealed
    return False


def _read(signed: Signed) -> Statement:
    if signed.kind not in KINDS:
        raise wire.WireError(f"unknown kind {signed.kind!r}")
    read: Statement = wire.decode(KINDS[signed.kind], signed.body, limit=MAX_STATEMENT)
    return read


def compare(
    mine: Iterable[Signed], theirs: Iterable[Signed], verify: Verify
) -> tuple[tuple[LieEvidence, ...], tuple[PeerId, ...]]:
    """Of what two members hold: what proves that an author told them different things; and who did without a proof."""
    held = {_place(signed): signed for signed in mine}
    proved, unproved = [], set()
    for signed in theirs:
        other = held.pop(_place(signed), None)  # of many for one place, the first is looked at
        if other is None or (other.body, other.life) == (signed.body, signed.life) or not is_signed(signed, verify):
            continue
        evidence = LieEvidence(other, signed)
        if convicts(evidence, verify) is not None:
            proved.append(evidence)
        else:
            unproved.add(signed.author)
    return tuple(proved), tuple(sorted(unproved))


def _place(signed: Signed) -> tuple[PeerId, bytes, str, int]:
    """What one author says one thing about."""
    try:
        number = _number(_read(signed))
    except wire.WireError:
        number = -1
    return signed.author, signed.attempt, signed.kind, number


def _number(statement: Statement) -> int:
    """Of the part or the step that it is about, where there is one of its kind for each."""
    match statement:
        case Sent(part=number) | Centre(part=number) | Seen(step=number):
            return number
    return 0


def is_banned(accusers: Iterable[PeerId], members: Sequence[PeerId]) -> bool:
    """Whether records say so: by more than half of those who may take part. Fewer may be liars."""
    return 2 * len(set(accusers) & set(members)) > len(members)


LATER = 0.15  # of the time allowed: a step may end so much after the one before, so that the first complaint is right


@dataclass
class BtardAttempt:
    """One reduction under way, and what members told in it."""

    roster: RoundRoster
    id: bytes
    parts: tuple[Part, ...]
    shares: dict[PeerId, np.float32]  # of those who contribute, in the roster's order
    allowed: float  # seconds for a step
    until: float  # trio time by which to give up on who is silent in the step at hand
    own: dict[tuple[str | int, ...], bytes] = field(default_factory=dict)  # what this node offers
    signed: dict[str, dict[PeerId, Signed]] = field(default_factory=dict)  # by kind and author
    commitments: dict[PeerId, Commitment] = field(default_factory=dict)
    centres: dict[int, tuple[Centre, bytes]] = field(default_factory=dict)
    seed: bytes = b""  # what all nonces together drew
    sums: dict[PeerId, Sums] = field(default_factory=dict)
    fetched: dict[int, list[bytes]] = field(default_factory=dict)  # contributions to a part, in the order of shares

    def later(self) -> None:
        """The next step has a little longer."""
        self.until += LATER * self.allowed

    def said(self, *kinds: str) -> list[tuple[Signed, ...]]:
        """The statements of these kinds by each seat, in the roster's order."""
        told = [self.signed.get(kind, {}) for kind in kinds]
        return [tuple(by[peer] for by in told if peer in by) for peer in self.roster.peers]
