"""What is said in a round is let go of in time; looking at the work of that round afterwards ends nothing."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from chains import start

from swarmnode.protocols.chain.forks import Block, Tree, empty_block
from swarmnode.protocols.methods.open import store as store_module
from swarmnode.protocols.methods.open.checks.audits import Audits
from swarmnode.protocols.methods.open.store import ChainStore, NoState
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


def test_a_state_whose_rounds_are_let_go_of_while_it_is_made_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this node goes over to another history meanwhile. The last of these rosters goes back by one."""
    monkeypatch.setattr(store_module, "state_hash", lambda *_: "hash")
    root = start("A")
    made = ChainStore.__new__(ChainStore)
    made.tree, made.tip, made.hashes = Tree(root), root.tip, {}
    made._states, made._layout = OrderedDict({root.tip: None}), SimpleNamespace(parameters=1)  # type: ignore[assignment]
    empty = empty_block(root)
    roster: Any = SimpleNamespace(revert=True, round=1, parent=empty.id)
    back = Block(b"back", empty.id, empty.chain, roster)
    made.tree.add(empty)
    made.tree.add(back)

    async def runner(work: Any) -> Any:
        made.tree = Tree(start("B"))
        return work()

    made._runner = runner
    with pytest.raises(NoState):
        trio.run(made.state_after, back)
