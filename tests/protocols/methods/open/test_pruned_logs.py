"""What is said in a round is let go of in time; looking at the work of that round afterwards ends nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.protocols.methods.open import store as store_module
from swarmnode.protocols.methods.open.checks.audits import Audits
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.training.verify.replay import whom

ROSTER: Any = SimpleNamespace(scores=(), entries=())
BLOCK: Any = SimpleNamespace(id=b"b", parent=b"p", roster=ROSTER, chain=SimpleNamespace(seed=b"chain", round=8))
LOG: Any = SimpleNamespace(
    chain=None,
    scores={},
    rosters={b"b": SimpleNamespace(author="leader")},
    reveals={b"c": SimpleNamespace(what=SimpleNamespace(trace=b"trace"))},
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ChainStore:
    monkeypatch.setattr(store_module, "checks_seed", lambda *_: b"drawn")
    made = ChainStore.__new__(ChainStore)
    made.rules, made.logs = None, {b"p": LOG}  # type: ignore[assignment]
    return made


def test_nobody_is_drawn_to_look_at_a_round_that_is_forgotten(store: ChainStore) -> None:
    assert store.checks_seed(BLOCK) == b"drawn"
    store.logs.clear()
    assert whom(store.checks_seed(BLOCK), "me", store.measured(BLOCK)) is None


def test_work_that_waits_to_be_looked_at_keeps_the_seed_of_its_draw(store: ChainStore) -> None:
    audits = Audits.__new__(Audits)
    audits._store, audits._parts = store, SimpleNamespace(me="me")  # type: ignore[assignment]
    work = audits._work(BLOCK, "author", b"c")
    store.logs.clear()
    audit = audits._blank(work)
    assert (audit.round, audit.author, audit.trace, work.seed) == (7, "author", b"trace", b"drawn")
    assert b"drawn" in vars(audit).values()
