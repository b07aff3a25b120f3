"""A rollout group as it travels, and what nodes say to one another about groups, as calls of `protocols.calls`.

    rollouts.offer    these I have for you: ids, authors, sizes     OfferAnswer: send these, I have those
    rollouts.give     the groups that were asked for                Empty
    rollouts.recent   I have too few: offer me what is recent       Empty

A group is small fields about it and its content, signed together:

    id        = sha-256 of a domain tag, the run id and the bytes that are signed
    signature = Ed25519 by the author over the same; beside it, so that signing again makes no new id
    content   = token ids and log-probabilities, packed by `RolloutGroup.to_map`

Nothing here is believed: `open_group` raises InvalidGroup for what is malformed or not signed by its author.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Annotated

from swarmnode.crdt import encoding
from swarmnode.crdt.envelope import SIGNATURE_SIZE, Domain, Envelope, InvalidEnvelope, Sign, Verify
from swarmnode.crdt.record import MAX_AUTHOR
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.wire import Message, WireError, decode, plain, within
from swarmnode.training.rl.groups import MAX_ANSWERS, GroupError, RolloutGroup

OFFER, GIVE, RECENT = "rollouts.offer", "rollouts.give", "rollouts.recent"
MAX_OFFERED = 64  # groups in one offer
MAX_COPIES = 1024  # that may be spoken of; each node allows far fewer
MAX_GIVEN = 512 * 1024  # bytes of groups in one message, unless it is a single one
TIMEOUT = 5.0  # seconds for an answer
SLOWEST = 16 * 1024  # bytes a second that a peer is given time for, who gives groups
LONGEST_WAIT = 60.0  # seconds that a peer may ask to be left alone

Sealed = tuple[bytes, bytes]  # the bytes that are signed, and the signature

MAX_CONTENT = 1008 << 10  # bytes: as fit into one frame. 64 answers of 4096 tokens do not with 5 bytes each, 50 do
MAX_FIELDS = 2048  # bytes of what is beside the content
GROUPS = Domain("rollout", 4, MAX_FIELDS + MAX_CONTENT)  # what authors sign
LARGEST = GROUPS.max_size + SIGNATURE_SIZE  # bytes of a group
MAX_COUNTER = (1 << 53) - 1
Digest = Annotated[bytes, within(32, 32)]


class InvalidGroup(InvalidEnvelope):
    """Bytes that are no rollout group of this run, or not their author's. `forged`: proved false, not just broken."""


@dataclass(frozen=True)
class PackedAnswers(Message):
    """As `RolloutGroup.to_map` has them. `lengths` are in tokens."""

    task: tuple[str, int, int]  # name, difficulty, seed
    version: int
    policy: str
    vocabulary: str
    lengths: Annotated[tuple[int, ...], within(1, MAX_ANSWERS)]
    width: Annotated[int, within(1, 3)]  # bytes of a token id
    logprobs: bool
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class PackedGroup(PackedAnswers):
    author: Annotated[str, within(1, MAX_AUTHOR)]
    # grows with each group of the author: where samplers draw their work from, prompts follow from it
    counter: Annotated[int, within(0, MAX_COUNTER)]
    made_at: Annotated[int, within(0, MAX_COUNTER)]  # ms since the epoch by the author's clock
    content: Annotated[bytes, within(1, MAX_CONTENT)] = field(repr=False)
    # whose policy wrote it, where that is not the author's own: see `samplers`
    trainer: Annotated[str, within(0, MAX_AUTHOR)] = ""


@dataclass(frozen=True)
class SignedGroup:
    """A rollout group, its author and what proves it. Made by `seal` and `open_group`, which check all of it."""

    id: bytes
    packed: PackedGroup
    signature: bytes
    size: int  # bytes of what is signed and the signature, here and on the wire

    @property
    def author(self) -> PeerId:
        return self.packed.author

    @property
    def group(self) -> RolloutGroup:
        """Unpacked anew each time: tuples of tokens take nineteen times the bytes, and a pool holds many groups."""
        return RolloutGroup.from_map(vars(self.packed))

    @property
    def sealed(self) -> Sealed:
        """What travels of it. Encoded anew each time: kept beside what it encodes, it would double what is held."""
        return encoding.encode(plain(self.packed), max_size=GROUPS.max_size), self.signature


def seal(
    group: RolloutGroup, *, run_id: str, author: PeerId, counter: int, made_at: int, sign: Sign, trainer: PeerId = ""
) -> SignedGroup:
    """Sign a group that this node wrote; `made_at` in ms, `trainer`: whose policy it was, where not its own.

    Raises InvalidGroup where it is too large to travel.

    The group in the result has log-probabilities as others will read them.
    """
    fields = RolloutGroup.to_map(group)
    try:
        packed = PackedGroup(author=author, counter=counter, made_at=made_at, trainer=trainer, **fields)
    except WireError as error:
        raise InvalidGroup(f"a group of {len(fields['content'])} bytes cannot be shared: {error}") from error
    return _signed_group(packed, GROUPS.seal(plain(packed), sign, run_id), run_id)


def open_group(envelope: Envelope, *, run_id: str, verify: Verify) -> SignedGroup:
    """The group in bytes from a peer, signed by its author for this run. Raises InvalidGroup."""
    try:
        packed = decode(PackedGroup, envelope.payload, limit=GROUPS.max_size)
        if GROUPS.open(envelope, packed.author, verify, run_id) != plain(packed):
            raise InvalidEnvelope("it has what nobody could pass on as it was signed")
        RolloutGroup.from_map(vars(packed))
    except (GroupError, InvalidEnvelope, WireError) as error:
        forged = isinstance(error, InvalidEnvelope) and error.forged
        raise InvalidGroup(f"a rollout group is refused: {error}", forged=forged) from error
    return _signed_group(packed, envelope, run_id)


def _signed_group(packed: PackedGroup, envelope: Envelope, run_id: str) -> SignedGroup:
    id = hashlib.sha256(GROUPS.message(envelope.payload, run_id)).digest()
    return SignedGroup(id, packed, envelope.signature, sum(map(len, envelope)))


# -- what nodes say about groups


@dataclass(frozen=True)
class OfferedGroup(Message):
    """One group. `size` is that of all its bytes; `copies` is for how many nodes it would be handed over."""

    id: Digest
    author: Annotated[str, within(1, MAX_AUTHOR)]
    size: Annotated[int, within(1, LARGEST)]
    copies: Annotated[int, within(1, MAX_COPIES)]


@dataclass(frozen=True)
class GroupOffer(Message):
    run_id: str
    groups: Annotated[tuple[OfferedGroup, ...], within(1, MAX_OFFERED)]


@dataclass(frozen=True)
class OfferAnswer(Message):
    """Indices into the offer: `wants` to be given now, `has` here already; all others it has no room for.

    `wait`: seconds after which it has room again; until then it is left alone.
    """

    wants: tuple[int, ...] = ()
    has: tuple[int, ...] = ()
    wait: Annotated[float, within(0.0, LONGEST_WAIT)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.wants + self.has
        if len(both) > MAX_OFFERED or len(set(both)) != len(both) or any(not 0 <= i < MAX_OFFERED for i in both):
            raise WireError("OfferAnswer: not indices of an offer")


@dataclass(frozen=True)
class Give:
    run_id: str
    groups: tuple[Sealed, ...]

    def __post_init__(self) -> None:
        size = sum(len(payload) + len(signature) for payload, signature in self.groups)
        if len(self.groups) > MAX_OFFERED or (size > MAX_GIVEN and len(self.groups) > 1):
            raise WireError(f"Give: {len(self.groups)} groups of {size} bytes in one message")


@dataclass(frozen=True)
class RecentQuery(Message):
    run_id: str
    count: Annotated[int, within(1, MAX_OFFERED)] = MAX_OFFERED
