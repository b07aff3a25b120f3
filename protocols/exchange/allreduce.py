"""Butterfly all-reduce: every owner reduces one part of the vector and hands the same bytes of it to everybody.

Order, for a roster with parts cut by `roster.parts`:

1. each member encodes its values part by part, error feedback added, and offers each part to its owner;
2. each owner fetches its part from all seats, decodes, takes the weighted mean in the roster's order, encodes the mean
   *once* (with a residual of its own, dropped when ownership moves) and offers it to all seats;
3. each member fetches all reduced parts and decodes them: all hold the same bytes, so all compute the same state.

All of it goes on at once, cell by cell (`cells.py`): what is offered and fetched grows (`growing.py`), so a cell is on
its way while the next is encoded, reduced while the next arrives, and its mean offered while the next is reduced. The
arithmetic (`reduction.py`) runs in the runner's threads, where numpy lets the others go on, a batch of cells at a time.

Nobody pushes: a member fetches what it needs (`bulk.py`), so no peer can fill its memory. When a peer dies, freezes,
sends what cannot be decoded or is too slow, whoever needs its part raises PartsMissing with its name, and nothing was
changed: the residuals of the attempt are pending until `commit`. A peer that shows no sign of life is given up within a
part of a reduction's usual time, whatever it is waited for (`arrivals.py`). Where it lives, owners give up on members
first, after `within` seconds, and members on owners after twice that, so that the first complaint names the one that
held all up. In cells
whose values cannot be encoded, because they and the residual overflow, the values count as zeros and the residual ends.

What was offered stays until the next attempt of the round, and that of a decided round until the next one is decided.
Wire, per parameter and member: 2 (N−1)/N times the codec's bytes. Memory: beside values, mean and residuals, the
encoded vector and the encoded means twice, for two rounds; all of it is used again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio

from swarmnode.protocols.bulk import Bulk, Key
from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.exchange.arrivals import Arrivals, silence_allowed
from swarmnode.protocols.exchange.cells import BATCH, Cells, Pool
from swarmnode.protocols.exchange.outcomes import PartsMissing
from swarmnode.protocols.exchange.reduction import Reduction, Undecodable, Vector
from swarmnode.protocols.exchange.roster import Part, Roster, parts
from swarmnode.protocols.growing import Growing
from swarmnode.protocols.liveness import Liveness, PeerGoneSilent
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.training.codecs import Codec, CodecError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Attempt:
    """One reduction under way."""

    roster: Roster
    cut: tuple[Part, ...]
    values: Vector
    mean: Vector
    sent: tuple[Growing, ...]  # this node's values, encoded, one a part; none where it has no weight
    sent_by: float  # trio time
    means_by: float


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
        self._pace = AdaptiveDeadline(floor=0.0, ceiling=patience)  # of reductions that succeeded
        self._silence: float | None = None  # seconds without a sign of life in the attempt at hand
        self._failed: list[int] = []  # the round at hand, once for each attempt at it that failed
        self._reduction = Reduction(codec, parameters)
        self.sent = self._reduction.sent  # the residual of this node's own work
        self.reduced = self._reduction.reduced  # that of the means it computed
        self._attempt: str | None = None  # roster id of what is pending
        self._offered: list[Roster] = []  # attempts whose offers stand
        self._lent: dict[str, list[memoryview]] = {}  # by roster id, what is offered
        self._pool = Pool()
        self._mean = np.empty(0, np.float32)
        self.rates: dict[PeerId, float] = {}  # bytes per second measured when fetching from each peer

    async def reduce(self, roster: Roster, values: Vector, *, within: float | None = None) -> Vector:
        """The weighted mean of all seats' `values`, float32 (P,): bit-identical on every seat that gets it.

        It is valid until the next call, which writes over it. `within`: seconds for each member's values to reach
        their owners, and again for the means to come back. Raises PartsMissing. Until `commit(roster)`, the attempt
        has left no trace but offers to others.
        """
        self.rollback()
        self._withdraw(lambda old: old.round >= roster.round)
        self._attempt = roster.roster_id
        self._offered.append(roster)
        self.rates = {p: rate for p, rate in self.rates.items() if p in roster.peers}
        if not any(seat.weight for seat in roster.seats):
            return np.zeros(self._parameters, np.float32)  # nobody trained: nothing to send, nothing moves
        attempt = self._begin(roster, values, min(self._patience, within if within is not None else self._patience))
        began = trio.current_time()
        self._failed = [round for round in self._failed if round == roster.round]
        self._silence = silence_allowed(self._pace.usual, len(self._failed))
        self._failed.append(roster.round)
        async with _all_or_missing() as start:
            for work in self._work_of(attempt):
                start(work)
        self._failed.pop()
        self._pace.observe(trio.current_time() - began)
        return attempt.mean

    def _begin(self, roster: Roster, values: Vector, allowed: float) -> _Attempt:
        """Offer what is going to be encoded."""
        now = trio.current_time()
        cut = parts(roster, self._parameters)
        sent: tuple[Growing, ...] = ()
        if self._weight_in(roster):
            sent = tuple(self._lend(roster, self._cells(part).size) for part in cut)
        for index, (part, growing) in enumerate(zip(cut, sent, strict=False)):
            if part.owner != self._me:
                key = self._key(roster, "sent", index)
                self._bulk.offer(key, growing, dtype=self._codec.name, to=frozenset([part.owner]))
        if self._mean.size != self._parameters:
            self._mean = np.empty(self._parameters, np.float32)
        return _Attempt(roster, cut, values, self._mean, sent, now + allowed, now + 2 * allowed)

    def _work_of(self, attempt: _Attempt) -> Iterator[Callable[[], Awaitable[None]]]:
        """What has to be done at once."""
        if attempt.sent:
            yield partial(self._encode, attempt)
        for index, part in enumerate(attempt.cut):
            if part.owner == self._me:
                means = self._lend(attempt.roster, self._cells(part).size)
                key = self._key(attempt.roster, "mean", index)
                self._bulk.offer(key, means, dtype=self._codec.name, to=frozenset(attempt.roster.peers))
                yield partial(self._reduce, attempt, index, self._cells(part), means)
            else:
                yield partial(self._gather, attempt, index, part.owner, self._cells(part))

    # -- this node's values

    async def _encode(self, attempt: _Attempt) -> None:
        """Encode the parts side by side, so that all owners have something to reduce from the start."""
        mine = next((i for i, part in enumerate(attempt.cut) if part.owner == self._me), 0)
        order = [(mine + 1 + i) % len(attempt.cut) for i in range(len(attempt.cut))]
        cut = [self._cells(part) for part in attempt.cut]
        lost = 0
        for first in range(0, max(cells.count for cells in cut), BATCH):
            for cells, growing in ((cut[i], attempt.sent[i]) for i in order):
                batch = range(first, min(first + BATCH, cells.count))
                if batch:
                    lost += await self._runner(
                        partial(self._reduction.encode, cells, batch, attempt.values, growing.buffer)
                    )
                    growing.grow(cells.bytes_until(batch.stop))
        if lost:
            logger.error("round %d: %d cells of this node's work cannot be sent", attempt.roster.round, lost)

    # -- my part

    async def _reduce(self, attempt: _Attempt, index: int, cells: Cells, means: Growing) -> None:
        """Fetch everybody's values of my part; reduce, hand out and keep the mean of each cell that all have sent."""
        roster = attempt.roster
        self._reduction.own(cells)
        working = [seat for seat in roster.seats if seat.weight > 0]
        others = [seat.peer for seat in working if seat.peer != self._me]
        with self._borrow(cells.size, len(others)) as borrowed:
            place = dict(zip(others, borrowed, strict=True))
            arriving = [place[seat.peer] if seat.peer in place else attempt.sent[index] for seat in working]

            raw = [growing.buffer for growing in arriving]
            weights = [seat.weight for seat in working]

            async def reduce() -> None:
                done = lost = 0
                while done < cells.count:
                    goal = cells.bytes_until(min(done + BATCH, cells.count))
                    for growing in arriving:
                        await growing.reach(goal)
                    batch = range(done, min(cells.whole_in(growing.ready) for growing in arriving))
                    reduce_batch = partial(
                        self._reduction.reduce, cells, batch, raw, weights, means.buffer, attempt.mean
                    )
                    try:
                        lost += await self._runner(reduce_batch)
                    except Undecodable as error:
                        raise PartsMissing((working[error.index].peer,)) from error
                    means.grow(cells.bytes_until(batch.stop))
                    done = batch.stop
                if lost:
                    logger.error("round %d: the mean of %d cells moves nothing", roster.round, lost)

            async with _all_or_missing() as start:
                key = self._key(roster, "sent", index)
                for peer, growing in place.items():
                    start(partial(self._fetch, peer, key, growing, attempt.sent_by, measured=True))
                start(reduce)

    # -- the others' parts

    async def _gather(self, attempt: _Attempt, index: int, owner: PeerId, cells: Cells) -> None:
        """Fetch a reduced part from its owner, and keep each cell as it comes."""
        with self._borrow(cells.size, 1) as (arriving,):

            async def decode() -> None:
                done = 0
                while done < cells.count:
                    await arriving.reach(cells.bytes_until(min(done + BATCH, cells.count)))
                    batch = range(done, cells.whole_in(arriving.ready))
                    try:
                        await self._runner(partial(self._reduction.decode, cells, batch, arriving.buffer, attempt.mean))
                    except CodecError as error:
                        raise PartsMissing((owner,)) from error
                    done = batch.stop

            async with _all_or_missing() as start:
                key = self._key(attempt.roster, "mean", index)
                start(partial(self._fetch, owner, key, arriving, attempt.means_by))
                start(decode)

    async def _fetch(self, peer: PeerId, key: Key, into: Growing, until: float, *, measured: bool = False) -> None:
        """Fetch the part under `key`, by `until` (trio time). Raises PartsMissing.

        A peer may wait for others for as long as it lives; one that shows no sign of life is given up soon. `measured`:
        the rate is that of the peer's link; that of means tells about the slowest member.
        """
        arrivals = Arrivals(into.size)
        wait = max(0.0, until - trio.current_time())

        def moving(done: int) -> None:
            arrivals.moving(done)
            self._liveness.heard_from(peer)

        async def fetch() -> None:
            await self._bulk.fetch(peer, key, into=into, max_size=into.size, wait=wait, stall=math.inf, progress=moving)

        failure: Exception | None = None
        with trio.move_on_at(until):
            try:
                await self._liveness.unless_gone(peer, fetch, within=self._silence)
            except (NetworkError, PeerGoneSilent) as error:
                failure = error
        if failure is not None or into.ready < into.size:
            raise PartsMissing((peer,)) from failure
        rate = arrivals.rate()
        if measured and rate is not None:
            self.rates[peer] = rate

    # -- how it ended

    def commit(self, roster: Roster) -> bool:
        """The round of `roster` was decided: keep what its encodings left out.

        False where this node's values are not in that result: its weight was 0, or its attempt was another one.
        """
        reduced = self._attempt == roster.roster_id
        if reduced:
            self._reduction.commit()
        else:
            self.rollback()
        self._attempt = None
        self._withdraw(lambda old: old.round != roster.round)
        self._pool.next_round()
        return reduced and self._weight_in(roster) > 0

    def rollback(self) -> None:
        """Forget the pending residuals of an attempt that did not count."""
        self._reduction.rollback()
        self._attempt = None

    def _withdraw(self, which: Callable[[Roster], bool]) -> None:
        for old in [r for r in self._offered if which(r)]:
            self._bulk.withdraw(("parts", self._run_id, old.roster_id))
            self._offered.remove(old)
            for memory in self._lent.pop(old.roster_id, []):
                self._pool.give(memory)

    # -- memory and names

    def _lend(self, roster: Roster, size: int) -> Growing:
        """Memory that is offered until the offers of `roster` are withdrawn."""
        memory = self._pool.take(size)
        self._lent.setdefault(roster.roster_id, []).append(memory)
        return Growing(memory)

    @contextmanager
    def _borrow(self, size: int, count: int) -> Iterator[list[Growing]]:
        """Memory for the block alone."""
        taken = [self._pool.take(size) for _ in range(count)]
        try:
            yield [Growing(memory) for memory in taken]
        finally:
            for memory in taken:
                self._pool.give(memory)

    def _cells(self, part: Part) -> Cells:
        return Cells(part.start, part.stop, self._codec)

    def _weight_in(self, roster: Roster) -> int:
        return sum(seat.weight for seat in roster.seats if seat.peer == self._me)

    def _key(self, roster: Roster, stage: str, index: int) -> Key:
        return ("parts", self._run_id, roster.roster_id, stage, index)


@asynccontextmanager
async def _all_or_missing() -> AsyncIterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    """A nursery for tasks that may raise PartsMissing: the first to do so ends the others, and all are named."""
    failed: list[PeerId] = []
    async with trio.open_nursery() as nursery:

        async def run(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except PartsMissing as error:
                logger.debug("%s: %r", error, error.__cause__)
                failed.extend(error.peers)
                nursery.cancel_scope.cancel()

        yield lambda work: nursery.start_soon(run, work)
    if failed:
        raise PartsMissing(tuple(sorted(set(failed))))
