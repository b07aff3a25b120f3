"""What a rollout pool tells the ledger of its authors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swarmnode.protocols.methods.rollouts.pool import AuthorStats
from swarmnode.protocols.methods.rollouts.samplers import SamplerTally
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.observations import STRANGE, RolloutWork


class PoolOfWords:
    """As much of a pool as `RolloutWork` looks at."""

    def __init__(self) -> None:
        self.stats: list[AuthorStats] = []
        self.held: list[Any] = []

    def by_author(self) -> tuple[AuthorStats, ...]:
        return tuple(self.stats)

    def __iter__(self) -> Any:
        return iter(self.held)


def stats(author: str, used: int, **refused: int) -> AuthorStats:
    words = {word.replace("_", "-"): count for word, count in refused.items()}
    return AuthorStats(author, groups=used, bytes=0, came=used, used=used, version=0, refused=words)


def told(*epochs: list[AuthorStats]) -> Ledger:
    ledger, pool = Ledger("me", now=lambda: 0), PoolOfWords()
    pool.held = [SimpleNamespace(signed=SimpleNamespace(author="bob", id=b"g" * 32))]
    work = RolloutWork(pool, SimpleNamespace(tallies=tuple))  # type: ignore[arg-type]
    for number, epoch in enumerate(epochs):
        pool.stats = epoch
        work.tell(ledger)
        ledger.close(number)
    return ledger


def test_what_is_new_since_the_last_epoch_counts_once() -> None:
    ledger = told([stats("bob", 5)], [stats("bob", 5)], [stats("bob", 9)])
    (finding,) = ledger.found("bob")
    assert (finding.saw, finding.good, finding.bad, finding.evidence) == (Saw.PROOF, 9, 0, b"g" * 16)
    assert ledger.view()["bob"].account.rounds == 2


def test_forged_and_refuted_groups_count_against_their_author_and_old_ones_do_not() -> None:
    ledger = told(
        [stats("bob", 8, old=5, stale=2, flood=9, other_difficulty=3), stats("eve", 4, dishonest=3, not_drawn=1)]
    )
    assert [(f.good, f.bad) for f in ledger.found("bob")] == [(8, 0)]
    assert [(f.good, f.bad) for f in ledger.found("eve")] == [(4, 4)]


def test_a_strange_answer_now_and_then_is_no_lie() -> None:
    ledger = told([stats("bob", 8, strange_answer=1)], [stats("bob", 16, strange_answer=2)])
    assert [(f.good, f.bad) for f in ledger.found("bob")] == [(14, 0)]


def test_groups_with_strange_or_slow_answers_in_each_earn_no_standing() -> None:
    ledger = told([stats("eve", 8, strange_answer=STRANGE - 1, too_slow=1), stats("bob", 8)])
    assert [(f.good, f.bad) for f in ledger.found("eve")] == [(0, 1)]
    assert ledger.standing("eve") < 0.5 < ledger.standing("bob")


def test_an_author_that_the_pool_forgot_begins_again() -> None:
    ledger = told([stats("bob", 8)], [stats("bob", 2)])
    assert ledger.found("bob")[0].good == 10


def test_what_audits_found_true_of_a_sampler_counts_once() -> None:
    tallies: list[SamplerTally] = []
    ledger = Ledger("me", now=lambda: 0)
    samplers = SimpleNamespace(tallies=lambda: tuple(tallies))
    work = RolloutWork(PoolOfWords(), samplers)  # type: ignore[arg-type]
    for number, proved in enumerate((10, 10, 14)):
        tallies[:] = [SamplerTally("bob", accepted=4 * proved, proved=proved), SamplerTally("new", accepted=3)]
        work.tell(ledger)
        ledger.close(number)
    (finding,) = ledger.found("bob")
    assert (finding.saw, finding.good, finding.bad) == (Saw.PROOF, 14, 0)
    assert not ledger.found("new"), "nobody looked at what it wrote"
