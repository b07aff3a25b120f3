"""Whom an auditor looks at, which stretch of that work, and how often. Pure: whoever knows the seed draws the same.

    whom(seed, auditor, authors)                     # an author, who can check that it was drawn
    which(seed, auditor, author, trace)              # a stretch, each as likely as it has steps
    budget = Budget(0.05); budget.earn(seconds)      # a share of what this node computes …
    budget.spend(cost)                               # … is spent on audits

`seed` is that of the chain after the roster that lists the work: nobody knew it when the work was committed. Each
auditor draws one author a round, however many there are, so what audits cost does not grow with the swarm, and neither
does what an author has to serve: one auditor in the mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from swarmnode.training.verify.trace import Stretch, Trace

SAVED = 4.0  # audits that may be saved up, so that a node which trained alone does not audit in a burst


def whom(seed: bytes, auditor: str, authors: Iterable[str]) -> str | None:
    """The author whom this auditor may ask for its work in this round; None where there is no other."""
    others = [author for author in authors if author != auditor]
    return min(others, key=lambda author: (_draw(b"author", seed, auditor, author), author), default=None)


def which(seed: bytes, auditor: str, author: str, trace: Trace) -> Stretch | None:
    """The stretch that this auditor repeats: that of a step drawn among all; None where there are no steps."""
    if not trace.steps:
        return None
    at = int.from_bytes(_draw(b"step", seed, auditor, author)[:8], "big") % trace.steps
    for stretch in trace.stretches:
        if at < stretch.steps:
            return stretch
        at -= stretch.steps
    raise AssertionError("a step beyond the last")


class Budget:
    """Seconds of computing that may go into audits: a share of those that went into training."""

    def __init__(self, share: float) -> None:
        """`share`: 0 to 1."""
        self._share = share
        self._saved = 0.0
        self.earned = 0.0
        self.spent = 0.0

    def earn(self, seconds: float) -> None:
        """So many seconds were trained."""
        self._saved += self._share * seconds
        self.earned += self._share * seconds

    def affords(self, cost: float) -> bool:
        """Whether an audit of so many seconds fits; what is saved is bounded by SAVED of them."""
        self._saved = min(self._saved, SAVED * cost)
        return self._saved >= cost > 0

    def spend(self, seconds: float) -> None:
        """So many seconds were spent, perhaps more than was thought: then the next audit waits for longer."""
        self._saved -= seconds
        self.spent += seconds


def _draw(purpose: bytes, seed: bytes, auditor: str, author: str) -> bytes:
    digest = hashlib.sha256(b"swarmnode/audit/1\0" + purpose)
    for part in (seed, auditor.encode(), author.encode()):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()
