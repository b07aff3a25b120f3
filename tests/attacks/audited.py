"""Audits of an open run as the product draws and counts them, over work whose truth the harness knows.

The draw of author and stretch (`whom`, `which`), what a node may spend (`AuditBudget`, at the default share), and how
long a proven lie counts (`Ledger`) are the product's. Modelled is what a replay finds: a lie where the drawn stretch is
false, and nothing else; that real replays tell so is shown in tests/e2e and by bench/audit.py. Who finds a lie accuses,
and all others who took part repeat the audit and find it too, at a cost of its own. Liars audit nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from swarmnode.protocols.chain.statements import FULL_STANDING
from swarmnode.protocols.methods.open.checks.audits import WAITING
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.training.sections import TrustSection
from swarmnode.training.verify.recorder import STRETCHES
from swarmnode.training.verify.replay import Audit, AuditBudget, Verdict, which, whom
from swarmnode.training.verify.trace import Leg, Origin, Point, Stretch, Trace

ALL = frozenset(range(STRETCHES))  # stretches of a round
NONE: frozenset[int] = frozenset()
REPLAY = 1 / STRETCHES + 0.0375  # of a round: a stretch, and more than was measured (docs/reputation.md, "Cost")
_POINT = Point(bytes(32), bytes(32), 0)
TRACE = Trace(
    Origin.FRESH,
    b"",
    bytes(32),
    bytes(32),
    bytes(32),
    bytes(32),
    (Leg(b"", False, tuple(Stretch(_POINT, _POINT, 0, step, 1, 0) for step in range(STRETCHES))),),
)


class Audits:
    """What each node has found of the others' work."""

    def __init__(self, members: Iterable[str]) -> None:
        share = TrustSection().audit_share
        self._ledgers = {name: Ledger(name, now=lambda: 0) for name in members}
        self.made = 0  # audits of all nodes
        self._budgets = {name: AuditBudget(share) for name in self._ledgers}
        self._repeated = dict.fromkeys(self._ledgers, 0.0)  # rounds of computing, for audits that others made

    def standing(self, judge: str, author: str) -> int:
        """What a judge says in its scores of an author: all or nothing, as only audits are modelled."""
        return 0 if self._ledgers[judge].owed(author) else FULL_STANDING

    def after(
        self, seed: bytes, auditors: Iterable[str], authors: Collection[str], false: Mapping[str, Collection[int]]
    ) -> None:
        """The audits of one round. `seed`: after its roster; `false`: by author the stretches that are not its work."""
        auditors = sorted(set(auditors).intersection(authors))
        for auditor in auditors:
            self._budgets[auditor].earn(1.0)
        for auditor in auditors:
            author = whom(seed, auditor, authors)
            if author is None or not self._budgets[auditor].affords(1 / STRETCHES):
                continue
            lied = drawn(seed, auditor, author) in false.get(author, NONE)
            self._budgets[auditor].spend(REPLAY)
            self._found(auditor, author, lied)
            for other in auditors if lied else ():
                room = self._budgets[other].earned + WAITING * REPLAY - self._repeated[other]
                if other not in (auditor, author) and not self._ledgers[other].owed(author) and room >= 0:
                    self._repeated[other] += REPLAY
                    self._found(other, author, lied)

    def _found(self, auditor: str, author: str, lied: bool) -> None:
        self.made += 1
        self._ledgers[auditor].audited(Audit(0, author, Verdict.LIED if lied else Verdict.HELD, "", b""), False)


def drawn(seed: bytes, auditor: str, author: str) -> int:
    """The stretch that this auditor repeats, from 0."""
    stretch = which(seed, auditor, author, TRACE)
    assert stretch is not None
    return stretch.step
