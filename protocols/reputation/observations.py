"""What else the ledger learns at the end of each epoch: promises kept and broken, and rollouts.

    promises = Promises()
    Shards(…, promises=promises)                                     # each fetch tells who kept one, and who broke one
    nursery.start_soon(PromiseChecks(shards, store, promises).run)   # and now and then a promise is tested
    promises.tell(ledger)                                            # at the end of each epoch …
    RolloutWork(pool, samplers).tell(ledger)                         # … and so does a method whose rollouts are shared

Promises and their tests: docs/reputation.md. Who fails a test, and what is then true:

- a provider loses its connection, is slow, or dropped the shard meanwhile and says so: that breaks no promise;
- one that still says that it has all chunks, and twice does not send the one asked for, broke it;
- a wrong chunk is a violation besides (`Shards.read`).

A group of rollouts holds up once the trainer was given it; one that a sampler wrote for this node's policy, once an
audit found that its weights wrote it. Refused for its author's doing is what is forged, malformed, or refuted by
computing it again; not what is old, too much, or of unknown weights, which the honest cause as well. STRANGE answers
that are strange to this node's policy, or slow to check, make one, and each takes back one group that held up.
"""

from __future__ import annotations

import random
from collections import Counter

import trio

from swarmnode.protocols.limits import Recent
from swarmnode.protocols.methods.rollouts.pool import RolloutPool
from swarmnode.protocols.methods.rollouts.samplers import Samplers
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.transfer.shard_manifest import ShardId
from swarmnode.protocols.transfer.shard_wire import Store, Unavailable
from swarmnode.protocols.transfer.shards import Shards

MAX_PROMISES = 1024  # that are counted between two epochs
EVERY = 300.0  # seconds between two tests, give or take a half
AGAIN = 20.0  # seconds after which a provider that failed is asked once more
OF_THE_NEWEST = 64  # own shards, one of which is asked for


class Promises:
    """Counts until an epoch ends, also before there is a ledger."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[PeerId, ShardId, bool]]()

    def note(self, peer: PeerId, shard: ShardId, kept: bool) -> None:
        """A provider had what it said it had of a shard, or had not."""
        if len(self._counts) < MAX_PROMISES or (peer, shard, kept) in self._counts:
            self._counts[peer, shard, kept] += 1

    def tell(self, ledger: Ledger) -> None:
        """Tell the ledger of what was counted."""
        for (peer, shard, kept), count in self._counts.items():
            ledger.observe(peer, Saw.KEPT, good=count if kept else 0, bad=0 if kept else count, evidence=shard)
        self._counts.clear()


class PromiseChecks:
    """Tests from time to time whether somebody has what it says it has."""

    def __init__(self, shards: Shards, store: Store, promises: Promises, *, seed: int | None = None) -> None:
        """`store`: with this node's own shards."""
        self._shards, self._store, self._promises = shards, store, promises
        self._random = random.Random(seed)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Test until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(EVERY * self._random.uniform(0.5, 1.5))
            await self.test_one()

    async def test_one(self) -> None:
        """Ask one provider of one of the own shards for one chunk."""
        own = self._store.recent(OF_THE_NEWEST)
        if not own:
            return
        shard = self._random.choice(own)
        complete = [provider for provider in await self._shards.providers(shard) if provider.complete]
        if not complete:
            return
        chosen = self._random.choice(complete)
        index = self._random.randrange(chosen.chunks)
        for last in (False, True):
            try:
                await self._shards.read(chosen.peer, shard, index)
            except Unavailable:
                if not last:
                    await trio.sleep(AGAIN)
                    continue
                (holding,) = await self._shards.ask_holdings(chosen.peer, shard)
                if holding.complete:
                    self._promises.note(chosen.peer, shard, kept=False)
            else:
                self._promises.note(chosen.peer, shard, kept=True)
            return


# Words of `rollouts.intake`, `samplers` and `training.rl` for what no honest author's group is.
REFUTED = {"uninformative", "unknown-vocabulary", "bad-token", "check-failed", "unreadable", "no-logprobs", "logprobs"}
REFUTED |= {"unfinished", "not-drawn", "cherry-picked", "dishonest"}
STRANGE_ANSWER, TOO_SLOW, STRANGE = "strange-answer", "too-slow", 8
MAX_AUTHORS = 1024  # remembered, as the pool does


class RolloutWork:
    """Tells the ledger what is new in the pool, and what audits found true of samplers, since it was told last.

    What audits found false is in the pool's counts.
    """

    def __init__(self, pool: RolloutPool, samplers: Samplers) -> None:
        self._pool, self._samplers = pool, samplers
        self._told = Recent[tuple[str, PeerId], int](4 * MAX_AUTHORS)  # by what is counted, and of whom

    def tell(self, ledger: Ledger) -> None:
        newest = {held.signed.author: held.signed.id for held in self._pool}
        for stats in self._pool.by_author():
            author = stats.author
            refuted = sum(count for reason, count in stats.refused.items() if reason in REFUTED)
            strange = stats.refused.get(STRANGE_ANSWER, 0) + stats.refused.get(TOO_SLOW, 0)
            refuted += strange // STRANGE
            good = max(0, self._news("used", author, stats.used) - self._news("strange", author, strange))
            bad = self._news("refuted", author, refuted)
            ledger.observe(author, Saw.PROOF, good=good, bad=bad, evidence=newest.get(author, b""))
        for tally in self._samplers.tallies():
            ledger.observe(tally.sampler, Saw.PROOF, good=self._news("proved", tally.sampler, tally.proved))

    def _news(self, what: str, author: PeerId, now: int) -> int:
        """How many more were counted of an author than when the ledger was told last."""
        before = self._told.get((what, author), 0)
        self._told[what, author] = now
        return now - before if now >= before else now  # the author was forgotten meanwhile: it is counted anew
