"""A rollout group as it travels, and what nodes say to one another about groups, as calls of `protocols.calls`.

    rollouts.offer    these I have for you: ids, authors, sizes     OfferAnswer: send these, I have those
    rollouts.give     the groups that were asked for                Thanks
    rollouts.recent   I have too few: what is recent?               Recent: the ids of some, of many authors
    rollouts.get      send me these                                 Got

A group is a small signed header, with its tokens in it or, where they are many, beside it:

    id        = sha-256 of a domain tag, the run id and the header's bytes
    signature = Ed25519 by the author over the same; beside it, so that signing again makes no new id
    content   = token ids, little-endian, 1 to 3 bytes each; then log-probabilities, 2 bytes each, and the proof of who
                samples for another, where given

Up to INLINE bytes the content stands in the header. Larger content has its shard id there instead, so that the
signature holds for every byte, and who is offered a group can tell by its header alone whether to fetch the rest. It is
offered by `protocols.transfer.bulk` under `content_key`, by whoever passes the group on.

Log-probabilities are quantised: q = round(65535·sqrt(−logp / 64)), so that the error grows with the square root: 6e-5
nats on average for a token of probability 1/e. float16 would be off by 1.2e-4 there and by 5e-4 at e^-3, and the check
of equal models (`training/rl/defence.py`) is to tell 1e-4 from 3e-2.

Nothing here is believed: `open_header` refuses what is malformed or not signed by its author, `SignedHeader.complete`
what is not the content that the header names; both raise InvalidGroup.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from swarmnode.crdt.envelope import SIGNATURE_SIZE, Domain, Envelope, InvalidEnvelope, Sign, Verify
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.bulk import Key
from swarmnode.protocols.transfer.shard_tree import ShardManifest
from swarmnode.protocols.wire import WireError, decode, plain
from swarmnode.training.rl.groups import MAX_ANSWERS, MAX_PROOF, MAX_TOKENS, GroupError, RolloutGroup
from swarmnode.training.rl.tasks import TaskRef

OFFER, GIVE, RECENT, GET = "rollouts.offer", "rollouts.give", "rollouts.recent", "rollouts.get"
MAX_OFFERED = 64  # groups in one offer
MAX_COPIES = 1024  # that may be spoken of; each node allows far fewer
MAX_GIVEN = 512 * 1024  # bytes of headers in one message
TIMEOUT = 5.0  # seconds for an answer
LONGEST_WAIT = 60.0  # seconds that a peer may ask to be left alone

Sealed = tuple[bytes, bytes]  # a header's bytes and its signature

INLINE = 4096  # bytes of content in a header; with more, a batch of headers would be what an offer is to avoid
MAX_HEADER = INLINE + 2048  # bytes
HEADERS = Domain("rollout", 2, MAX_HEADER)  # what authors sign; 1 was not canonical
MAX_CONTENT = 1 << 20  # bytes: 64 answers of 4096 tokens do not fit with 5 bytes each, 51 do
MAX_AUTHOR = 128  # characters; a libp2p peer id of an Ed25519 key has 52
MAX_COUNTER = (1 << 53) - 1
LOGPROB = 2  # bytes of a log-probability
LOWEST = 64.0  # nats: no token is that unlikely and sampled; what is lower travels as −64
_STEPS = 65535

V = TypeVar("V")


class InvalidGroup(InvalidEnvelope):
    """Bytes that are no rollout group of this run, or not their author's. `forged`: proved false, not just broken."""


@dataclass(frozen=True)
class GroupHeader:
    """What the author signs. `lengths` are in tokens; with what follows they fix the size of the content."""

    author: str
    counter: int  # grows with each group of the author: where samplers draw their work from, prompts follow from it
    made_at: int  # ms since the epoch by the author's clock
    task: tuple[str, int, int]  # name, difficulty, seed
    version: int
    policy: str
    vocabulary: str
    lengths: tuple[int, ...]
    width: int  # bytes of a token id
    logprobs: bool = False
    content: bytes = b""
    shard: bytes = b""  # id of the content, where it is not here
    trainer: str = ""  # whose policy wrote it, where that is not the author's own: see `samplers`
    proof: int = 0  # bytes of the proof

    def __post_init__(self) -> None:
        _require(0 < len(self.author) <= MAX_AUTHOR, "author")
        _require(0 <= self.counter <= MAX_COUNTER, "counter")
        _require(0 <= self.made_at <= MAX_COUNTER, "made_at")
        _require(1 <= len(self.lengths) <= MAX_ANSWERS, "lengths")
        _require(all(1 <= length <= MAX_TOKENS for length in self.lengths), "lengths")
        _require(1 <= self.width <= 3, "width")
        _require(len(self.trainer) <= MAX_AUTHOR, "trainer")
        _require(0 <= self.proof <= MAX_PROOF, "proof")
        _require(self.size <= MAX_CONTENT, "size")
        if self.shard:
            _require(len(self.shard) == 32 and not self.content and self.size > INLINE, "shard")
        else:
            _require(len(self.content) == self.size <= INLINE, "content")

    @property
    def size(self) -> int:
        """Bytes of the content, wherever it is."""
        return sum(self.lengths) * (self.width + (LOGPROB if self.logprobs else 0)) + self.proof


@dataclass(frozen=True)
class SignedHeader:
    """A header with its author's signature, verified; the content may still be elsewhere."""

    id: bytes
    header: GroupHeader
    envelope: Envelope = field(repr=False)

    @property
    def author(self) -> PeerId:
        return self.header.author

    @property
    def sealed(self) -> Sealed:
        """What travels of it."""
        return self.envelope.payload, self.envelope.signature

    @property
    def size(self) -> int:
        """Bytes that header, signature and content take, here and on the wire."""
        return sum(map(len, self.envelope)) + (self.header.size if self.header.shard else 0)

    def complete(self, content: bytes = b"") -> SignedGroup:
        """The group with its content, which is given where it is not in the header. Raises InvalidGroup."""
        if self.header.shard:
            if len(content) != self.header.size or content_id(content) != self.header.shard:
                raise InvalidGroup("the content is not the one that the header names", forged=True)
        else:
            content = self.header.content
        _unpack(self.header, content)
        return SignedGroup(self.id, self.header, self.envelope, content)


@dataclass(frozen=True)
class SignedGroup(SignedHeader):
    """A rollout group, its author and what proves it. Made by `complete`, which has checked the content."""

    content: bytes = field(repr=False)

    @property
    def group(self) -> RolloutGroup:
        """Unpacked anew each time: tuples of tokens take nineteen times the bytes, and a pool holds many groups."""
        return _unpack(self.header, self.content)

    @property
    def version(self) -> int:
        return self.header.version

    @property
    def made_at(self) -> int:
        """ms since the epoch by the author's clock."""
        return self.header.made_at


def seal(
    group: RolloutGroup,
    *,
    run_id: str,
    author: PeerId,
    counter: int,
    made_at: int,
    sign: Sign,
    trainer: PeerId = "",
) -> SignedGroup:
    """Sign a group that this node wrote; `made_at` in ms, `trainer`: whose policy it was, where not its own.

    Raises InvalidGroup where it is too large to travel.

    The group in the result has log-probabilities as others will read them.
    """
    greatest = max(map(max, group.answers))
    width = 1 if greatest < 1 << 8 else 2 if greatest < 1 << 16 else 3
    content = _pack(group, width)
    inside = len(content) <= INLINE
    task = group.task
    try:
        header = GroupHeader(
            author=author,
            counter=counter,
            made_at=made_at,
            task=(task.name, task.difficulty, task.seed),
            version=group.version,
            policy=group.policy,
            vocabulary=group.vocabulary,
            lengths=tuple(map(len, group.answers)),
            width=width,
            logprobs=group.logprobs is not None,
            content=content if inside else b"",
            shard=b"" if inside else content_id(content),
            trainer=trainer,
            proof=len(group.proof),
        )
    except WireError as error:
        raise InvalidGroup(f"a group of {len(content)} bytes cannot be shared: {error}") from error
    return _signed_header(header, HEADERS.seal(plain(header), sign, run_id), run_id).complete(content)


def open_header(envelope: Envelope, *, run_id: str, verify: Verify) -> SignedHeader:
    """The header in bytes from a peer, signed by its author for this run. Raises InvalidGroup."""
    try:
        header = decode(GroupHeader, envelope.payload, limit=MAX_HEADER)
    except WireError as error:
        raise InvalidGroup(f"no header of a rollout group: {error}") from error
    try:
        HEADERS.open(envelope, header.author, verify, run_id)
    except InvalidEnvelope as error:
        raise InvalidGroup(f"a header of a rollout group is refused: {error}", forged=error.forged) from error
    return _signed_header(header, envelope, run_id)


def _signed_header(header: GroupHeader, envelope: Envelope, run_id: str) -> SignedHeader:
    id = hashlib.sha256(HEADERS.message(envelope.payload, run_id)).digest()
    return SignedHeader(id, header, envelope)


def content_id(content: bytes) -> bytes:
    """The shard id of these bytes."""
    return ShardManifest.of(content).id


def quantised(logprobs: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Log-probabilities in nats as the 16 bits that travel, uint16; `dequantised` goes back."""
    depth: NDArray[np.float64] = np.clip(-logprobs, 0.0, LOWEST)
    steps: NDArray[np.uint16] = np.rint(_STEPS * np.sqrt(depth / LOWEST)).astype("<u2")
    return steps


def dequantised(steps: NDArray[np.uint16]) -> NDArray[np.float64]:
    """What `quantised` made, in nats, float64."""
    roots: NDArray[np.float64] = np.asarray(steps, np.float64) / _STEPS
    return np.negative(LOWEST * np.square(roots))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise WireError(f"GroupHeader.{what}: out of range")


def _pack(group: RolloutGroup, width: int) -> bytes:
    tokens = np.array([token for answer in group.answers for token in answer], "<u4")
    packed = tokens.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    if group.logprobs is None:
        return packed + group.proof
    values = np.array([value for each in group.logprobs for value in each], np.float64)
    return packed + quantised(values).tobytes() + group.proof


def _unpack(header: GroupHeader, content: bytes) -> RolloutGroup:
    total, width = sum(header.lengths), header.width
    wide = np.zeros((total, 4), np.uint8)
    wide[:, :width] = np.frombuffer(content, np.uint8, total * width).reshape(total, width)
    tokens = wide.reshape(-1).view("<u4").tolist()
    logprobs = None
    if header.logprobs:
        values = dequantised(np.frombuffer(content, "<u2", total, total * width)).tolist()
        logprobs = tuple(_cut(values, header.lengths))
    name, difficulty, seed = header.task
    try:
        return RolloutGroup(
            TaskRef(name, difficulty, seed),
            tuple(_cut(tokens, header.lengths)),
            header.version,
            header.policy,
            header.vocabulary,
            logprobs,
            bytes(content[header.size - header.proof :]),
        )
    except GroupError as error:
        raise InvalidGroup(f"no rollout group: {error}") from error


def _cut(values: list[V], lengths: tuple[int, ...]) -> list[tuple[V, ...]]:
    cut: list[tuple[V, ...]] = []
    at = 0
    for length in lengths:
        cut.append(tuple(values[at : at + length]))
        at += length
    return cut


# -- what nodes say about groups


@dataclass(frozen=True)
class OfferedGroup:
    """One group. `size` is that of header and content; `copies` is for how many nodes it would be handed over."""

    id: bytes
    author: str
    size: int
    copies: int

    def __post_init__(self) -> None:
        if len(self.id) != 32 or not 0 < len(self.author) <= MAX_AUTHOR:
            raise WireError("OfferedGroup: no id and author of a group")
        if not 0 < self.size <= MAX_CONTENT + MAX_HEADER + SIGNATURE_SIZE or not 0 < self.copies <= MAX_COPIES:
            raise WireError(f"OfferedGroup: {self.copies} copies of {self.size} bytes")


@dataclass(frozen=True)
class GroupOffer:
    run_id: str
    groups: tuple[OfferedGroup, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.groups) <= MAX_OFFERED:
            raise WireError(f"GroupOffer: {len(self.groups)} groups, 1 to {MAX_OFFERED} allowed")


@dataclass(frozen=True)
class OfferAnswer:
    """Indices into the offer: `wants` to be given now, `has` here already; all others it has no room for.

    `wait`: seconds after which it has room again; until then it is left alone.
    """

    wants: tuple[int, ...] = ()
    has: tuple[int, ...] = ()
    wait: float = 0.0

    def __post_init__(self) -> None:
        both = self.wants + self.has
        if len(both) > MAX_OFFERED or len(set(both)) != len(both) or any(not 0 <= i < MAX_OFFERED for i in both):
            raise WireError("OfferAnswer: not indices of an offer")
        if not math.isfinite(self.wait) or not 0 <= self.wait <= LONGEST_WAIT:
            raise WireError(f"OfferAnswer: a wait of {self.wait} s")


@dataclass(frozen=True)
class Give:
    run_id: str
    groups: tuple[Sealed, ...]

    def __post_init__(self) -> None:
        _check_given(self.groups)


@dataclass(frozen=True)
class Thanks:
    pass


@dataclass(frozen=True)
class RecentQuery:
    run_id: str
    count: int = MAX_OFFERED

    def __post_init__(self) -> None:
        if not 0 < self.count <= MAX_OFFERED:
            raise WireError(f"RecentQuery: {self.count} groups, 1 to {MAX_OFFERED} allowed")


@dataclass(frozen=True)
class Recent:
    ids: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_ids(self.ids)


@dataclass(frozen=True)
class Get:
    run_id: str
    ids: tuple[bytes, ...]

    def __post_init__(self) -> None:
        _check_ids(self.ids)


@dataclass(frozen=True)
class Got:
    """As many of those as are here and fit."""

    groups: tuple[Sealed, ...]

    def __post_init__(self) -> None:
        _check_given(self.groups)


def content_key(run_id: str, id: bytes) -> Key:
    """Where the content of a group is offered."""
    return ("rollout", run_id, id.hex())


def _check_ids(ids: tuple[bytes, ...]) -> None:
    if len(ids) > MAX_OFFERED or any(len(id) != 32 for id in ids):
        raise WireError(f"{len(ids)} ids, or such as are none; at most {MAX_OFFERED} of 32 bytes")


def _check_given(groups: tuple[Sealed, ...]) -> None:
    size = sum(len(payload) + len(signature) for payload, signature in groups)
    if len(groups) > MAX_OFFERED or size > MAX_GIVEN:
        raise WireError(f"{len(groups)} groups of {size} bytes in one message")
