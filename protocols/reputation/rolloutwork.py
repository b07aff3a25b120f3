"""What a node's rollout pool tells of its authors: groups that held up, and groups refused for what their author did.

    watching.sources.append(RolloutWork(pool))

A group holds up once it was given to the trainer. Refused for its author's doing is what is forged, malformed, or
refuted by computing it again. Neither counts what the honest cause as well: what is old, too much, or of another
version. An answer that is strange to this node's policy may be a lie or a better policy: STRANGE of them make one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarmnode.protocols.network import PeerId
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.rollouts.pool import AuthorStats, Pool

# Words of `rollouts.intake`, `checks`, `samplers` and `training.rl` for what no honest author's group is.
REFUTED = frozenset(
    {
        "uninformative",
        "unknown-vocabulary",
        "bad-token",
        "check-failed",
        "unreadable",
        "no-logprobs",
        "logprobs",
        "top-k",
        "not-sampled",
        "no-proof",
        "other-activations",
        "cherry-picked",
        "dishonest",
    }
)
STRANGE_ANSWER, STRANGE = "strange-answer", 8
MAX_AUTHORS = 1024  # remembered, as the pool does


@dataclass(frozen=True)
class _Counted:
    good: int = 0
    bad: int = 0


class RolloutWork:
    """A source for `Watching`: tells the ledger what is new since the last epoch."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._before: OrderedDict[PeerId, _Counted] = OrderedDict()

    def __call__(self, ledger: Ledger) -> None:
        newest = {held.signed.author: held.signed.id for held in self._pool}
        for stats in self._pool.by_author():
            now, before = _counted(stats), self._before.get(stats.author, _Counted())
            if now.good < before.good or now.bad < before.bad:
                before = _Counted()  # the pool forgot the author meanwhile and counts from the beginning
            good, bad = now.good - before.good, now.bad - before.bad
            ledger.observe(stats.author, Saw.PROOF, good=good, bad=bad, evidence=newest.get(stats.author, b""))
            self._before[stats.author] = now
            self._before.move_to_end(stats.author)
        while len(self._before) > MAX_AUTHORS:
            self._before.popitem(last=False)


def _counted(stats: AuthorStats) -> _Counted:
    refuted = sum(count for reason, count in stats.refused.items() if reason in REFUTED)
    return _Counted(stats.used, refuted + stats.refused.get(STRANGE_ANSWER, 0) // STRANGE)
