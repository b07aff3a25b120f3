"""Whether judges measured what they say: their figures follow from public things, so anybody can measure them again.

A judge's sequences follow from its nonce, which its scores open, and from the seed of the round; its figures from
these, the parameters at the parent, and the contributions that it says it measured (`judge.py`). So every validator,

    after each roster     draws one of the other judges whose scores that quotes, with probability CHECKED, by a secret;
                          and takes up whom others disproved, one judge more for each of them
    where there is time   measures again what that judge measured, at the cost of judging a round
    figures that differ   it tells of in its cuts for DISPUTED_FOR rounds, so that others take it up

and whom a majority of all judges disproved loses its place (`state.without`).

The bound is TOLERANCE of what a figure could be at the most, the product of the norms of gradient and step: other
threads move a figure by 5e-10 of that, bfloat16 by 1e-4, and honest judges of one contribution differ by 1e-3 to 4e-3.
Others confirm it from half of that on, so honest nodes are no slanderers. More: docs/open.md, "Who checks the judges".
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import trio

from swarmnode.protocols.chain.duty import PER_AUTHOR, RoundLog
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.statements import JUDGED, PREFIX, Score, Scores
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.checks.check import Looks
from swarmnode.protocols.methods.open.judge import Evaluator
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.round import Signer
from swarmnode.protocols.methods.open.store import DISPUTED_FOR, LOOKED_FOR, ChainStore
from swarmnode.protocols.methods.trainer import TrainerDied
from swarmnode.protocols.metrics import COUNTER, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.training.open_step import sequences_for

logger = logging.getLogger(__name__)

CHECKED = 0.5  # probability that a validator measures some other judge's figures of a round again
TOLERANCE = 1e-4  # of what a figure could be at the most, by which honest ones differ at the most …
ROUNDING = 4  # … and micro-bits per byte
UNDO_TOLERANCE = 2_000  # micro-bits per byte, of what the last roster cost; less than a twentieth of what undoes one
CONFIRMED = 0.5  # of the tolerance, from which on a figure that somebody disproved is false

OUTCOMES = ("right", "false", "untold")
CHECKS = Metric("swarmnode_open_rechecks_total", COUNTER, "scores of judges that were measured again", "outcome")


class Rechecks(Looks):
    def __init__(self, parts: Context, store: ChainStore, local: LocalTrainer, signer: Signer) -> None:
        super().__init__(parts, store, local)
        self._signer = signer
        self._errors: dict[tuple[PeerId, bytes], float] = {}  # by judge and roster: what `_error` found
        self.slanderers = Recent[PeerId, None](LOOKED_FOR)  # who disproved somebody whose figures were found right
        self.counts: Counter[str] = Counter()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(CHECKS, lambda: {outcome: self.counts[outcome] for outcome in OUTCOMES})

    async def _follow(self, block: Block) -> None:
        """Measure whom others disproved in the round that a block ended, and somebody who is drawn."""
        me, log = self._parts.me, self._store.logs.get(block.parent)
        if log is None or block.id not in self._store.tree or me not in block.chain.validators:
            return
        path = self._store.tree.path(block.id)[-DISPUTED_FOR:]
        ended = {one.chain.round - 1: one for one in path}
        rosters = {one.id for one in path}
        self._errors = {key: error for key, error in self._errors.items() if key[1] in rosters}
        for accuser, cut in sorted(log.cut_by.items()):
            for place, round in cut.what.disproved:
                judge = log.chain.validators[place] if place < len(log.chain.validators) else me
                if me in (accuser, judge) or accuser in self.slanderers or accuser == judge or round not in ended:
                    continue
                known = (judge, ended[round].id) in self._errors
                await self._settle(judge, ended[round], accuser)
                if not known:
                    break  # one measurement in a round for each of them
        chosen = drawn(self._signer.derive("recheck", block.chain), sorted(quoted(log, block).keys() - {me}))
        if chosen is not None:
            await self._settle(chosen, block)

    async def _settle(self, judge: PeerId, block: Block, accuser: PeerId = "") -> None:
        """Find out whether the scores that this roster quotes of a judge are false; `accuser` says so."""
        if (judge, block.id) not in self._errors:
            error = await self._error(judge, block)
            untold = error is None or math.isnan(error)
            self.counts["untold" if untold else "false" if error > 1 else "right"] += 1  # type: ignore[operator]
            if error is None:
                return
            self._errors[judge, block.id] = error
        error = self._errors[judge, block.id]
        if error > (CONFIRMED if accuser else 1):
            if judge not in self._store.disproved:
                logger.warning("round %d: %s measured something else than it says", block.chain.round - 1, judge)
            self._store.disproved[judge] = block
        elif accuser and error <= CONFIRMED:
            logger.warning("%s says of %s that it lies, and lies itself; it is listened to no more", accuser, judge)
            self.slanderers[accuser] = None

    async def _error(self, judge: PeerId, block: Block) -> float | None:
        """How far a judge's worst figure is off, in what honest ones may be; None: it cannot be told now, nan: ever."""
        store, log = self._store, self._store.logs.get(block.parent)
        said = quoted(log, block).get(judge) if log is not None else None
        if log is None or said is None or store.state(block.parent) is None:
            return None
        chain, contributions = log.chain, store.contributions
        told = {score.commit for score in said.scores if score.found == JUDGED}
        authors = {id: commit.author for id, commit in log.commits.items() if id[:PREFIX] in told}
        solid = {id for id in authors if authors[id] in chain.validators}  # by their mean all are measured
        several = Counter(commit.author for commit in log.commits.values())
        if len(authors) < len(told) and any(several[validator] >= PER_AUTHOR for validator in chain.validators):
            return None  # what is not known here is a validator's perhaps
        roots = {id: log.reveals[id].what.root for id in authors if id in log.reveals}
        if any(map(contributions.is_malformed, roots.values())):
            return math.inf
        here = {id: contributions[root] for id, root in roots.items() if root in contributions}
        if not solid or not solid <= here.keys() or not self._has_time():
            return None
        suspect = -math.inf if said.undo is not None else math.inf
        evaluator = Evaluator(self._local, self._parts, store, chain, said.nonce, suspect=suspect)
        try:
            found = await evaluator.measure(here, authors, chain.validators)
        except TrainerDied:
            return None
        worst = furthest(said, found.values(), evaluator)
        if worst is not None and worst <= CONFIRMED and len(here) < len(told):
            return math.nan  # what is not here may be what others found false; it is measured once
        return worst

    def _has_time(self) -> bool:
        """Whether the window has room for a measurement beside the steps that are left."""
        local, inner, store = self._local, self._parts.spec.inner, self._store
        steps = inner.steps_in(store.block.chain.round)
        left = inner.batch * max(0, steps - local.since_offer.steps)
        costs = 2 * sequences_for(inner.batch * steps)  # a gradient, and two losses at most
        seconds = (left + costs) * local.trained.seconds / max(1, local.trained.samples)
        return trio.current_time() + seconds <= store.arrived + store.block.chain.window / 1000


def quoted(log: RoundLog, block: Block) -> dict[PeerId, Scores]:
    """The scores that the roster of a block quotes, by judge; `log`: of the round that it ended."""
    ids = block.roster.scores if block.roster is not None else ()
    return {log.scores[id].author: log.scores[id].what for id in ids if id in log.scores}


def furthest(said: Scores, found: Iterable[Score], evaluator: Evaluator) -> float | None:
    """How far the worst of a judge's figures is from what was measured, in what honest ones may be; None: untold."""
    if evaluator.reach is None:
        return None
    told, bound = {score.commit: score.gain for score in said.scores}, TOLERANCE * evaluator.reach + ROUNDING
    errors = [abs(score.gain - told[score.commit]) / bound for score in found]
    if said.undo is not None and evaluator.undo is not None:
        errors.append(abs(said.undo - evaluator.undo) / UNDO_TOLERANCE)
    return max(errors)


def drawn(secret: bytes, judges: Sequence[PeerId]) -> PeerId | None:
    """One of these, each as likely, or with probability 1 - CHECKED none, by what nobody else knows."""
    rng = random.Random(secret)
    return rng.choice(judges) if judges and rng.random() < CHECKED else None
