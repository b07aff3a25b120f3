"""What a member computes and fetches in an all-reduce (`allreduce.py`), and what every reduction has in common.

Every chunk goes through the arithmetic while a core's cache holds it, a batch of chunks at a time in a thread, and no
step takes new memory.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import numpy as np
import trio

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.messages import Part, PartsMissing, RoundRoster
from swarmnode.protocols.methods.known.partition import BATCH, CHUNK, ChunkStream
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.peers.liveness import PeerGoneSilent
from swarmnode.protocols.transfer.bulk import Key, StreamingBuffer
from swarmnode.protocols.wire import WireError
from swarmnode.training.codecs import Codec, CodecError, codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.outer import fold_in, shares_of

RATE_FROM = 1 << 20  # bytes; fewer measure the round trip, not the link
SILENT_SHARE = 0.3  # of the usual time of a reduction: what is lost when a frozen peer is noticed
SILENT_LEAST = 0.5  # seconds that a peer may be silent in any case: a lost packet is sent again after half of it

Name = tuple[str | int, ...]  # of what is offered in an attempt

logger = logging.getLogger(__name__)


def silence_allowed(usual: float | None, failed: int) -> float | None:
    """Seconds of silence in a reduction that usually takes `usual` seconds; None before that is known.

    For `Liveness.watching`, which knows what silences are like a peer. A frozen peer costs a round a part of its usual
    time, then; where rounds take long, unanswered pings come first. Each of the attempts of the round that `failed`
    doubles it: what these had under way still fills the links.
    """
    return None if usual is None else math.ldexp(max(SILENT_LEAST, SILENT_SHARE * usual), min(failed, 20))


class Reducer(ABC):
    """What brings the work of all seats to one vector, in one run.

    Until `commit(roster)`, an attempt has left no trace but offers to others: its residuals are pending.
    """

    def __init__(self, parts: Context, parameters: int | None = None, *, decay: float = 1.0) -> None:
        """By the run's codec and deadlines: a peer that keeps answering pings is waited for until their ceiling.

        Of vectors of so many `parameters`; None: the model's. `decay`: of the residuals, each time they are used.
        """
        self._parts = parts
        self._me = parts.me
        self._codec = codec(parts.spec.exchange.codec)
        self._parameters = parts.trainer.layout.parameters if parameters is None else parameters
        self.sent = ErrorFeedback(self._codec, self._parameters, decay=decay)  # the residual of this node's own work
        self._residuals = [self.sent]  # those that live across rounds
        self._pending: str | None = None  # roster id of the attempt whose residuals are
        self._offered: list[RoundRoster] = []  # attempts whose offers stand
        self.rates: dict[PeerId, float] = {}  # bytes per second measured when fetching from each peer

    @abstractmethod
    async def reduce(
        self, roster: RoundRoster, values: Vector, *, within: float = math.inf, silence: float | None = None
    ) -> Vector:
        """Of all seats' `values`, float32 (P,): bit-identical on every seat that gets it. Raises PartsMissing.

        `within`: seconds to wait for others, at most the run's ceiling; `silence`: for how many of them one may give no
        sign of life, None: as always.
        """

    def commit(self, roster: RoundRoster) -> bool:
        """The round of `roster` was decided: keep what its encodings left out.

        False where this node's values are not in that result: its weight was 0, or its attempt was another one.
        """
        counts = self._pending == roster.roster_id
        if counts:
            for residual in self._residuals:
                residual.commit()
        self.rollback()
        self._withdraw(old for old in self._offered if old.round != roster.round)
        return counts and roster.weight_of(self._me) > 0

    def rollback(self) -> None:
        """Forget the pending residuals of an attempt that did not count."""
        for residual in self._residuals:
            residual.rollback()
        self._pending = None

    def give_back(self, work: Vector) -> bool:
        """Send work of this node's, (P,), that is in no result with a later round; False where it is worth nothing."""
        return self.sent.give_back(work)

    def left_over(self) -> Vector:
        """A copy of what later rounds send beside the work that is done in them, (P,)."""
        return self.sent.export()

    def restore(self, left_over: Vector) -> None:
        """Take what a checkpoint has of that. Raises ValueError where it does not fit."""
        self.sent.restore(left_over)

    def encode_by(self, name: str) -> None:
        """Another codec from the next attempt on. Residuals stay: what was left out is sent whatever encodes it."""
        self.rollback()
        self._codec = codec(name)
        for residual in self._residuals:
            residual.codec = self._codec

    def _offer(self, roster: RoundRoster, name: Name, what: bytes | StreamingBuffer, to: Iterable[PeerId]) -> None:
        peers = frozenset(to) - {self._me}
        if peers:
            self._parts.bulk.offer(self._key(roster, *name), what, to=peers, packs=self._codec.packs)

    async def _fetch(
        self,
        roster: RoundRoster,
        peer: PeerId,
        name: Name,
        until: float,
        *,
        max_size: int,
        into: StreamingBuffer | None = None,
        silence: float | None = None,
    ) -> tuple[bytes | memoryview, float | None]:
        """What `peer` offers in an attempt, and at how many bytes a second it came, where enough did to tell.

        Raises PartsMissing where it is not here by `until` (trio time). A peer may wait for others for as long as it
        lives; one that shows no sign of life, for `silence` seconds where that is given, is given up before.
        """
        began: list[tuple[float, int]] = []  # when the first bytes came, and how many: before, it waited for the offer
        wait = max(0.0, until - trio.current_time())

        def moving(done: int) -> None:
            if not began:
                began.append((trio.current_time(), done))
            self._parts.liveness.heard_from(peer)

        key = self._key(roster, *name)
        fetch = partial(
            self._parts.bulk.fetch, peer, key, into=into, max_size=max_size, wait=wait, stall=math.inf, progress=moving
        )
        with trio.move_on_at(until):
            try:
                raw = await self._parts.liveness.unless_gone(peer, fetch, within=silence)
            except (NetworkError, PeerGoneSilent) as error:
                raise PartsMissing((peer,)) from error
            seconds, moved = (trio.current_time() - began[0][0], len(raw) - began[0][1]) if began else (0.0, 0)
            return raw, moved / seconds if moved >= RATE_FROM and seconds > 0 else None
        raise PartsMissing((peer,))

    def _withdraw(self, rosters: Iterable[RoundRoster]) -> None:
        for old in list(rosters):
            self._parts.bulk.withdraw(self._key(old))
            self._offered.remove(old)

    def _key(self, roster: RoundRoster, *name: str | int) -> Key:
        return ("parts", self._parts.run_id, roster.roster_id, *name)


def shares_in(roster: RoundRoster) -> dict[PeerId, np.float32]:
    """What the values of each seat count, of those that count at all; in the roster's order."""
    working = [seat for seat in roster.seats if seat.weight > 0]
    return dict(zip((seat.peer for seat in working), shares_of([seat.weight for seat in working]), strict=True))


@contextmanager
def blaming(peer: PeerId) -> Iterator[None]:
    """In the block is read what `peer` sent. Raises PartsMissing where that has no such form."""
    try:
        yield
    except (CodecError, WireError) as error:
        raise PartsMissing((peer,)) from error


@asynccontextmanager
async def all_or_missing() -> AsyncIterator[trio.Nursery]:
    """A nursery for tasks that may raise PartsMissing: the first to do so ends the others, and all are named."""
    missing: set[PeerId] = set()
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except* PartsMissing as group:
        for error in group.exceptions:
            logger.debug("%s: %r", error, error.__cause__)
            missing.update(error.peers if isinstance(error, PartsMissing) else ())
    if missing:
        raise PartsMissing(tuple(sorted(missing)))


async def next_batch(sources: Collection[ChunkStream], done: int, stop: int) -> range:
    """Chunks from `done` on that all sources have, as soon as these are BATCH, or all that remain before `stop`."""
    goal = min(done + BATCH, stop)
    for source in sources:
        await source.reach(source.chunks.offsets[goal])
    return range(done, min(stop, *(source.done for source in sources)))


async def pass_on(pieces: Sequence[StreamingBuffer], whole: StreamingBuffer, step: int) -> None:
    """Let `whole` grow as the pieces do that its memory consists of, in their order, some `step` bytes at a time."""
    before = 0
    for piece in pieces:
        while piece.ready < piece.size:
            await piece.reach(min(piece.ready + step, piece.size))
            whole.grow(before + piece.ready)
        before += piece.size
        whole.grow(before)


class Summing:
    """Adds up what others sent of a part, and encodes the sum: with a residual of its own, that of the part it owns.

    One thread at a time.
    """

    def __init__(self, codec: Codec, parameters: int) -> None:
        self.residual = ErrorFeedback(codec, parameters)  # what the encodings of sums left out
        self._scratch = np.empty((2, min(CHUNK, parameters)), np.float32)

    def own(self, parts: Iterable[Part]) -> None:
        """This node sums these parts now: of its residual, what lies elsewhere is dropped."""
        self.residual.keep_only(*sorted((part.start, part.stop) for part in parts))

    def sum(
        self,
        batch: range,
        sources: Mapping[PeerId, ChunkStream],
        shares: Sequence[np.float32],
        out: ChunkStream,
        into: Vector | None = None,
        first: int = 0,
    ) -> int:
        """Encode the sum of share · source, in their order, for a batch of chunks; decode it `into` (P,).

        `out` begins with the chunk that is the `first` of the sources. Returns how many chunks have a sum that cannot
        be encoded and counts as zeros. Raises PartsMissing where what a peer sent is no encoding.
        """
        lost, codec = 0, self.residual.codec
        for chunk in batch:
            place, raw = out.chunks.elements(chunk - first), out.raw(chunk - first)
            size = place.stop - place.start
            total, decoded = self._scratch[:, :size]
            total.fill(0)
            for share, (peer, source) in zip(shares, sources.items(), strict=True):
                with blaming(peer):
                    codec.decode(source.raw(chunk), size, decoded)
                fold_in(total, share, decoded)
            lost += not encoded(self.residual, place, total, raw)
            if into is not None:
                codec.decode(raw, size, into[place])
        return lost


def encoded(feedback: ErrorFeedback, place: slice, values: Vector, out: memoryview) -> bool:
    """Encode `values`, which stand at `place`, into `out`; zeros, and False, where that is not possible."""
    try:
        feedback.encode_range(place.start, place.stop, values, out)
    except CodecError:
        feedback.drop_range(place.start, place.stop)
        feedback.codec.encode(np.zeros(values.size, np.float32), out)
        return False
    return True
