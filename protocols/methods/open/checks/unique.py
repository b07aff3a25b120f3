"""Whether contributions come of the data that their authors were to work on: a test of what somebody really trained.

    after each roster that lists work         draw an author (`ChainStore.checks_seed`)
    where the budget allows it                draw some of its steps, and have the text that these read
    gain(own)                                 of the contribution, on what those steps trained on
    gain(control)                             on as much that other steps would have read of the same text

What was trained on gets better than its like; how sure that is, and what follows: docs/reputation.md, "Unique work".
What comes of it goes to the ledger, in which single tests count for nothing.

Nobody but the auditor computes, and an author is asked for no more than text that the auditor lacks. Steps are drawn
after the work was committed, among all that a round asks for, so who does a part of them passes in part.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace

import trio

from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.rules import longest_norm
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.checks.check import WorkCheck
from swarmnode.protocols.methods.open.checks.texts import TrainingText
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.protocols.methods.trainer import Batches, TrainerDied, Vector
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.training.open_step import BACKWARD, Factor, apply_contributions, clip_units

logger = logging.getLogger(__name__)

SHARE = 0.005  # of the compute, in addition to judging
PARTS = 8  # of a contribution one is tried: whole and alone, work on rare data leads past the bottom
SAMPLES = 16  # on which a gain is measured
OWN = 16  # tests of the own contributions that are remembered; others are told of from half as many on …
TELLING = 0.8  # … of which this share passed
NEVER = 1 << 40  # steps from here on are taken by nobody: the control is drawn by them

OUTCOMES = ("passed", "failed", "untold", "own passed", "own failed")
TESTS = Metric("swarmnode_unique_work_total", COUNTER, "contributions held against their authors' data", "outcome")
SECONDS = Metric("swarmnode_unique_work_seconds_total", COUNTER, "seconds spent on tests of unique work")


class UniqueWork(WorkCheck):
    def __init__(self, parts: Context, store: ChainStore, local: LocalTrainer, ledger: Ledger) -> None:
        super().__init__(parts, store, local, SHARE)
        self._ledger = ledger
        self._able = True  # the trainer draws batches of others
        self._own: deque[bool] = deque(maxlen=OWN)
        self.counts: Counter[str] = Counter()
        self._tests = 0

    def measure(self, metrics: Metrics) -> None:
        metrics.show(TESTS, lambda: {outcome: self.counts[outcome] for outcome in OUTCOMES})
        metrics.show(SECONDS, lambda: self.budget.spent)

    async def _look(self, block: Block, author: PeerId, measured: Mapping[PeerId, bytes]) -> None:
        inner, trained = self._parts.spec.inner, self._local.trained
        count = min(inner.steps_in(block.chain.round - 1), -(-SAMPLES // inner.batch))
        passes = 4 * count * inner.batch  # own and control, before and after
        cost = passes * trained.seconds / max(1, trained.samples) / BACKWARD
        if not self._able or not self.budget.affords(cost):
            return
        self._tests += 1
        telling = 2 * len(self._own) >= OWN and sum(self._own) >= TELLING * len(self._own)  # own work passes
        if not telling or self._tests % 2:
            author = self._parts.me
        try:
            passed = await self._test(block, author, measured[author], count, cost)
        except (ShardError, TrainerDied, ValueError) as reason:  # ValueError: shards that the run does not name
            logger.info("round %d: the data of %s cannot be looked at: %s", block.chain.round, author, reason)
            passed = None
        self._conclude(author, measured[author], passed)

    def _conclude(self, author: PeerId, commit: bytes, passed: bool | None) -> None:
        outcome = "untold" if passed is None else "passed" if passed else "failed"
        if author == self._parts.me and passed is not None:
            self._own.append(passed)
            outcome = f"own {outcome}"
        elif passed is not None:
            self._ledger.drew(author, passed, commit)
        self.counts[outcome] += 1
        logger.debug("the work of %s, on its own data: %s", author, outcome)

    async def _test(self, block: Block, author: PeerId, commit: bytes, count: int, cost: float) -> bool | None:
        """Whether a contribution is better on its author's data; None where that cannot be told.

        Raises ShardError, TrainerDied. Takes `cost` seconds of computing, as far as one can know before.
        """
        store, spec = self._store, self._parts.spec
        reveal, state = store.logs[block.parent].reveals[commit].what, store.state(block.parent)
        contribution = store.contributions.get(reveal.root)
        if contribution is None or state is None or block.parent not in store.tree:
            return None
        longest = longest_norm(store.tree[block.parent].chain)
        round = block.chain.round - 1
        among = spec.inner.steps_in(round)
        steps = drawn_steps(store.checks_seed(block), self._parts.me, author, among, count)
        never = tuple(NEVER + step for step in steps)
        text = await self._parts.runner(lambda: TrainingText(self._parts.texts, self._parts.texts.assigned(author)))
        own, control = [await self._with_text(Batches(author, round, each), text) for each in (steps, never)]
        raw, (clip,) = contribution.raw, clip_units([contribution.norm], min(longest, contribution.norm))
        lr, codec_name = spec.outer.lr, spec.exchange.codec
        step = [Factor(1, clip, PARTS)]
        after = await self._parts.runner(
            lambda: apply_contributions(state, [raw], step, lr=lr, codec_name=codec_name).parameters
        )
        async with self._local.lent():
            began = trio.current_time()
            gains = [
                await self._loss(state.parameters, batches) - await self._loss(after, batches)
                for batches in (own, control)
            ]
            self.budget.spend(max(cost, trio.current_time() - began))
        return gains[0] > gains[1] if gains[0] != gains[1] and math.isfinite(gains[0] - gains[1]) else None

    async def _loss(self, parameters: Vector, batches: Batches) -> float:
        """Of these parameters (P,) on what was drawn; nan where this trainer draws none of others."""
        self._trainer.load(parameters)
        loss = await self._trainer.drawn(batches)
        self._able = loss is not None
        return math.nan if loss is None else loss

    async def _with_text(self, batches: Batches, text: TrainingText) -> Batches:
        """These with what they read of their author's text, if it is known. Raises ShardError, TrainerDied."""
        if not text.size:
            return batches
        sized = replace(batches, size=text.size)
        return replace(sized, pieces=await text.pieces(batches.author, await self._trainer.places(sized)))


def drawn_steps(seed: bytes, auditor: PeerId, author: PeerId, steps: int, count: int) -> tuple[int, ...]:
    """`count` of the steps of a round, drawn when its work is committed, for each auditor others; ascending."""
    digest = hashlib.sha256(b"swarmnode/unique/1\0" + seed + f"{auditor} {author}".encode()).digest()
    return tuple(sorted(random.Random(digest).sample(range(steps), count)))
