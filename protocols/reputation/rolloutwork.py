"""What a node's rollout pool tells of its authors: groups that held up, and groups refused for what their author did.

    watching.sources += [RolloutWork(pool), AuditWork(samplers)]

A group holds up once it was given to the trainer; one that a sampler wrote for this node's policy, once an audit found
that its weights wrote it, for of what was not looked at nobody knows. Refused for its author's doing is what is forged,
malformed, or refuted by computing it again. Neither counts what the honest cause as well: what is old, too much, or of
unknown weights. An answer that is strange to this node's policy may be a lie or a better policy: STRANGE of them make
one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarmnode.protocols.methods.rollouts.pool import AuthorStats, Pool
from swarmnode.protocols.methods.rollouts.samplers import Samplers
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import Ledger

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
        "other-version",
        "dishonest",
    }
)
STRANGE_ANSWER, STRANGE = "strange-answer", 8
MAX_AUTHORS = 1024  # remembered, as the pool does


@dataclass(frozen=True)
class _Counted:
    good: int = 0
    bad: int = 0


class _News:
    """What was counted of authors since it was asked last."""

    def __init__(self) -> None:
        self._before: OrderedDict[PeerId, _Counted] = OrderedDict()

    def since(self, author: PeerId, now: _Counted) -> _Counted:
        before = self._before.get(author, _Counted())
        if now.good < before.good or now.bad < before.bad:
            before = _Counted()  # the author was forgotten meanwhile, and is counted from the beginning
        self._before[author] = now
        self._before.move_to_end(author)
        while len(self._before) > MAX_AUTHORS:
            self._before.popitem(last=False)
        return _Counted(now.good - before.good, now.bad - before.bad)


class RolloutWork:
    """A source for `Watching`: tells the ledger what is new in the pool since the last epoch."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._news = pool, _News()

    def __call__(self, ledger: Ledger) -> None:
        newest = {held.signed.author: held.signed.id for held in self._pool}
        for stats in self._pool.by_author():
            new = self._news.since(stats.author, _counted(stats))
            evidence = newest.get(stats.author, b"")
            ledger.observe(stats.author, Saw.PROOF, good=new.good, bad=new.bad, evidence=evidence)


class AuditWork:
    """A source for `Watching`: tells the ledger what audits found true of those who sample for this node's policy.

    What they found false is in the pool's counts, where `RolloutWork` finds it.
    """

    def __init__(self, samplers: Samplers) -> None:
        self._samplers, self._news = samplers, _News()

    def __call__(self, ledger: Ledger) -> None:
        for tally in self._samplers.tallies():
            new = self._news.since(tally.sampler, _Counted(tally.proved))
            if new.good:
                ledger.observe(tally.sampler, Saw.PROOF, good=new.good)


def _counted(stats: AuthorStats) -> _Counted:
    refuted = sum(count for reason, count in stats.refused.items() if reason in REFUTED)
    return _Counted(stats.used, refuted + stats.refused.get(STRANGE_ANSWER, 0) // STRANGE)
