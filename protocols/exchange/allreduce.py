"""Butterfly all-reduce: every owner reduces one part of the vector and hands the same bytes of it to everybody.

Order, for a roster with parts cut by `roster.parts`:

1. each member encodes its values part by part, error feedback added, and offers each part to its owner;
2. each owner fetches its part from all seats, decodes, takes the weighted mean in the roster's order, encodes the mean
   *once* (with a residual of its own, dropped when ownership moves) and offers it to all seats;
3. each member fetches all reduced parts and decodes them: all hold the same bytes, so all compute the same state.

Nobody pushes: a member fetches what it needs (`bulk.py`), so no peer can fill its memory. When a peer dies, freezes,
sends what cannot be decoded or is too slow, whoever needs its part raises PartsMissing with its name, and nothing was
changed: the residuals of the attempt are pending until `commit`. Owners give up on members first, after `within`
seconds, and members on owners after twice that, so that the first complaint names the one that held all up. Values
that cannot be encoded, because they and the residual overflow, count as zeros and end the residual.

What was offered stays until the next attempt of the round, and that of a decided round until the next one is decided.
Wire, per parameter and member: 2 (N−1)/N times the codec's bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.protocols.bulk import Bulk, Key
from swarmnode.protocols.exchange.outcomes import PartsMissing
from swarmnode.protocols.exchange.roster import Part, Roster, parts
from swarmnode.protocols.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.training.codecs import Codec, CodecError
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.outer import weighted_sum

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]

RATE_FROM = 1 << 20  # bytes; smaller fetches measure the round trip, not the link


class AllReduce:
    """One node's all-reduces in one run, with the two residuals that live across rounds."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        bulk: Bulk,
        liveness: Liveness,
        runner: Runner,
        codec: Codec,
        parameters: int,
        patience: float,
    ) -> None:
        """`patience`: seconds to wait at the most for a part of a peer that keeps answering pings."""
        self._me = me
        self._run_id = run_id
        self._bulk = bulk
        self._liveness = liveness
        self._runner = runner
        self._codec = codec
        self._parameters = parameters
        self._patience = patience
        self.sent = ErrorFeedback(codec, parameters)  # what this node's own encoded parts left out
        self.reduced = ErrorFeedback(codec, parameters)  # what the re-encoding of its reduced part left out
        self._owned: tuple[int, int] | None = None  # range that `reduced` belongs to
        self._attempt: str | None = None  # roster id of what is pending
        self._offered: list[Roster] = []  # attempts whose offers stand
        self.rates: dict[PeerId, float] = {}  # bytes per second measured when fetching from each peer

    async def reduce(self, roster: Roster, values: Vector, *, within: float | None = None) -> Vector:
        """The weighted mean of all seats' `values`, float32 (P,): bit-identical on every seat that gets it.

        `within`: seconds for each member's values to reach their owners, and again for the means to come back. Raises
        PartsMissing. Until `commit(roster)`, the attempt has left no trace but offers to others.
        """
        self.rollback()
        self._withdraw(lambda old: old.round >= roster.round)
        self._attempt = roster.roster_id
        self._offered.append(roster)
        self.rates = {p: rate for p, rate in self.rates.items() if p in roster.peers}
        allowed = min(self._patience, within if within is not None else self._patience)
        sent_by = trio.current_time() + allowed
        means_by = sent_by + allowed
        cut = parts(roster, self._parameters)
        if not any(seat.weight for seat in roster.seats):
            return np.zeros(self._parameters, np.float32)  # nobody trained: nothing to send, nothing moves

        def encode() -> list[memoryview]:
            try:
                return [self.sent.encode_range(p.start, p.stop, values[p.start : p.stop]) for p in cut]
            except CodecError as error:
                logger.error("round %d: this node's work cannot be sent and is dropped: %s", roster.round, error)
                self.sent.restore(np.zeros(self._parameters, np.float32))
                return [self._codec.encode(np.zeros(p.stop - p.start, np.float32)) for p in cut]

        encoded = await self._runner(encode) if self._weight_in(roster) else []
        for index, (part, raw) in enumerate(zip(cut, encoded, strict=False)):
            if part.owner != self._me:
                key = self._key(roster, "sent", index)
                self._bulk.offer(key, raw, dtype=self._codec.name, to=frozenset([part.owner]))
        mean = np.empty(self._parameters, np.float32)
        failed: list[PeerId] = []
        async with trio.open_nursery() as nursery:

            async def part_of(work: Callable[[], Awaitable[None]]) -> None:
                try:
                    await work()
                except PartsMissing as error:
                    failed.extend(error.peers)
                    nursery.cancel_scope.cancel()

            for index, part in enumerate(cut):
                if part.owner == self._me:
                    mine = encoded[index] if encoded else None
                    nursery.start_soon(part_of, self._own_part(roster, index, part, mine, mean, sent_by))
                else:
                    nursery.start_soon(part_of, self._others_part(roster, index, part, mean, means_by))
        if failed:
            raise PartsMissing(tuple(sorted(set(failed))))
        return mean

    def _own_part(
        self, roster: Roster, index: int, part: Part, mine: memoryview | None, mean: Vector, until: float
    ) -> Callable[[], Awaitable[None]]:
        """Fetch everybody's values of my part, reduce, offer the result to all, and write it into `mean`."""

        async def work() -> None:
            size = part.stop - part.start
            contributions: dict[PeerId, memoryview] = {} if mine is None else {self._me: mine}
            failed: list[PeerId] = []
            async with trio.open_nursery() as nursery:

                async def take(peer: PeerId) -> None:
                    try:
                        contributions[peer] = await self._fetch(peer, self._key(roster, "sent", index), size, until)
                    except PartsMissing as error:
                        failed.extend(error.peers)
                        nursery.cancel_scope.cancel()

                for seat in roster.seats:
                    if seat.peer != self._me and seat.weight > 0:
                        nursery.start_soon(take, seat.peer)
            if failed:
                raise PartsMissing(tuple(failed))

            def reduce() -> memoryview:
                working = [seat for seat in roster.seats if seat.weight > 0]
                decoded = []
                for seat in working:
                    try:
                        decoded.append(self._codec.decode(contributions[seat.peer], size))
                    except CodecError as error:
                        raise PartsMissing((seat.peer,)) from error
                if self._owned != (part.start, part.stop):
                    self.reduced.keep_only(part.start, part.stop)
                    self._owned = (part.start, part.stop)
                total = weighted_sum(decoded, [seat.weight for seat in working])
                try:
                    return self.reduced.encode_range(part.start, part.stop, total)
                except CodecError as error:
                    logger.error("round %d: the mean of part %d moves nothing: %s", roster.round, index, error)
                    self.reduced.restore(np.zeros(self._parameters, np.float32))
                    return self._codec.encode(np.zeros(size, np.float32))

            encoded = await self._runner(reduce)
            key = self._key(roster, "mean", index)
            self._bulk.offer(key, encoded, dtype=self._codec.name, to=frozenset(roster.peers))
            mean[part.start : part.stop] = self._codec.decode(encoded, size)

        return work

    def _others_part(
        self, roster: Roster, index: int, part: Part, mean: Vector, until: float
    ) -> Callable[[], Awaitable[None]]:
        """Fetch a reduced part from its owner and write it into `mean`."""

        async def work() -> None:
            size = part.stop - part.start
            raw = await self._fetch(part.owner, self._key(roster, "mean", index), size, until)
            try:
                mean[part.start : part.stop] = await self._runner(lambda: self._codec.decode(raw, size))
            except CodecError as error:
                raise PartsMissing((part.owner,)) from error

        return work

    async def _fetch(self, peer: PeerId, key: Key, elements: int, until: float) -> memoryview:
        """The part under `key`, by `until` (trio time). Raises PartsMissing."""
        size = self._codec.encoded_size(elements)
        buffer = memoryview(bytearray(size))
        began = trio.current_time()

        def moving(done: int) -> None:
            nonlocal began
            if not first:
                began = trio.current_time()  # the wait for the offer says nothing about the link
            first.append(done)

        first: list[int] = []
        arrived = False
        wait = max(0.0, until - trio.current_time())
        try:
            with trio.move_on_at(until):
                got = await self._liveness.unless_gone(
                    peer,
                    lambda: self._bulk.fetch(peer, key, into=buffer, max_size=size, wait=wait, progress=moving),
                )
                arrived = len(got) == size
        except (NetworkError, PeerGoneSilent) as error:
            raise PartsMissing((peer,)) from error
        if not arrived:
            raise PartsMissing((peer,))
        seconds, moved = trio.current_time() - began, size - first[0] if first else 0
        if moved >= RATE_FROM and seconds > 0:
            self.rates[peer] = moved / seconds
        return buffer

    def commit(self, roster: Roster) -> bool:
        """The round of `roster` was decided: keep what its encodings left out.

        False where this node's values are not in that result: its weight was 0, or its attempt was another one.
        """
        reduced = self._attempt == roster.roster_id
        if reduced:
            self.sent.commit()
            self.reduced.commit()
        else:
            self.rollback()
        self._attempt = None
        self._withdraw(lambda old: old.round != roster.round)
        return reduced and self._weight_in(roster) > 0

    def _withdraw(self, which: Callable[[Roster], bool]) -> None:
        for old in [r for r in self._offered if which(r)]:
            self._bulk.withdraw(("parts", self._run_id, old.roster_id))
            self._offered.remove(old)

    def rollback(self) -> None:
        """Forget the pending residuals of an attempt that did not count."""
        self.sent.rollback()
        self.reduced.rollback()
        self._attempt = None

    def _weight_in(self, roster: Roster) -> int:
        return sum(seat.weight for seat in roster.seats if seat.peer == self._me)

    def _key(self, roster: Roster, stage: str, index: int) -> Key:
        return ("parts", self._run_id, roster.roster_id, stage, index)
