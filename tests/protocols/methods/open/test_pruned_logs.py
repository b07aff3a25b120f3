"""What is said in a round is let go of in time; looking at the work of that round afterwards ends nothing."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from chains import start

from swarmnode.protocols.chain.forks import DEPTH, Block, Tree, empty_block
from swarmnode.protocols.chain.statements import ForkChoiceVote
from swarmnode.protocols.methods.open import round as round_module
from swarmnode.protocols.methods.open import store as store_module
from swarmnode.protocols.methods.open.checks.audits import Audits
from swarmnode.protocols.methods.open.recheck import Rechecks
from swarmnode.protocols.methods.open.round import LOST_FOR, OpenRounds
from swarmnode.protocols.methods.open.store import LOOKED_FOR, ChainStore, Lost
from swarmnode.protocols.methods.open.sync import ChainSync
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
    with pytest.raises(Lost):
        trio.run(made.state_after, back)


def test_what_is_known_of_rosters_and_of_who_said_them_goes_with_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any, **__: Any) -> list[Any]:
        return []

    async def main() -> None:
        sync = ChainSync.__new__(ChainSync)
        monkeypatch.setattr(sync, "_serve_state", lambda: None, raising=False)
        logs = {b"b": SimpleNamespace(rosters={b"here": None})}
        sync.store = SimpleNamespace(move=lambda to: None, logs=logs, stands=False, notify=lambda: None)  # type: ignore[assignment]
        sync._invalid, sync._in_hand = {b"here", b"gone"}, Counter(busy=2, done=0)
        sync._state, sync._own = SimpleNamespace(readable=nothing), {b"said before the feed began"}  # type: ignore[assignment]
        await sync.move(BLOCK)
        await sync._read_all()
        assert sync._invalid == {b"here"} and sync._in_hand.keys() == {"busy"} and not sync._own

    trio.run(main)


def test_of_who_slanders_judges_those_who_did_it_last_are_remembered() -> None:
    async def main() -> None:
        rechecks = Rechecks(SimpleNamespace(me="me"), None, None, None)  # type: ignore[arg-type]
        rechecks._errors["judge", b"b"] = 0.0
        for number in range(LOOKED_FOR + 1):
            await rechecks._settle("judge", BLOCK, f"liar {number}")
        assert len(rechecks.slanderers) == LOOKED_FOR and f"liar {LOOKED_FOR}" in rechecks.slanderers

    trio.run(main)


def test_no_round_is_opened_on_a_block_that_was_let_go_of_while_its_state_was_made() -> None:
    """A later step on the way to a roster looked for each open round's block in the tree, and ended the node."""
    empty = empty_block(start("A"))
    store: Any = SimpleNamespace(tree=Tree(start("B")), logs={}, rules=None)
    sync = ChainSync.__new__(ChainSync)
    sync.store = store
    trio.run(sync._open_round, empty)
    assert not store.logs


def test_an_empty_roster_is_had_that_is_let_go_of_while_the_state_after_it_is_made() -> None:
    """As one on a fork that is as old as the oldest round that is kept, where this node goes on meanwhile."""
    root = start("A")
    empty = empty_block(root)
    store: Any = SimpleNamespace(tree=Tree(root))

    async def compute(block: Block) -> None:
        store.tree._blocks.pop(block.id)

    sync = ChainSync.__new__(ChainSync)
    sync.store, sync._compute = store, compute  # type: ignore[method-assign]
    assert trio.run(sync.have, empty.id, root.tip) == empty


async def at_once(work: Any) -> Any:
    return work()


def test_states_that_are_the_same_after_empty_rounds_push_out_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validator's vote for what 64 empty rounds lead to has them all made; they take no memory."""
    monkeypatch.setattr(store_module, "state_hash", lambda *_: "00" * 32)
    monkeypatch.setattr(store_module, "STATES_BUDGET", 0)
    store = ChainStore.__new__(ChainStore)
    store.hashes, store._states, store.tip, store._layout = {}, OrderedDict(), b"0", SimpleNamespace(parameters=1)  # type: ignore[assignment]
    store._runner = at_once
    states: list[Any] = [object() for _ in range(store_module.FEWEST)]

    async def main() -> None:
        for number, state in enumerate(states):
            await store._put_state(b"%d" % number, number, state)
        for number in range(64):
            await store._put_state(b"empty %d" % number, 9, states[-1])
        assert all(store.state(b"%d" % number) is state for number, state in enumerate(states))
        await store._put_state(b"new", 9, object())  # type: ignore[arg-type]
        assert store.state(b"0") is states[0], "it stands there"
        assert store.state(b"1") is None

    trio.run(main)


def test_who_follows_a_roster_that_is_not_here_counts_for_the_last_that_was() -> None:
    """Else the heads of all who are a moment ahead were none, and that of one who is behind made a node go back."""
    root = start("A")
    empty = empty_block(root)
    store = ChainStore.__new__(ChainStore)
    store.tree, store.tip, store.last_heads = Tree(root), root.tip, {}
    store._heads, store._locked, store._new_heads = {}, {}, {}

    def follows(roster: bytes, rank: bytes, locked: bool = False) -> None:
        head: Any = SimpleNamespace(author="A", what=ForkChoiceVote(roster, 1, bytes(32), False, locked))
        store.last_heads["A"], store._new_heads["A"] = (rank, head), roster

    follows(b"nowhere", b"1")
    assert store.heads() == {}
    follows(root.tip, b"2")
    assert store.heads() == {"A": root.tip}
    follows(empty.id, b"3")
    assert store.heads() == {"A": root.tip} and store.signed_heads() == {"A": empty.id}
    assert store.locked() == {"A": b""}, "what it follows now may be another of the same round"
    store.tree.add(empty)
    assert store.heads() == {"A": empty.id} and store.locked() == {}
    follows(empty.id, b"4", locked=True)
    follows(b"nowhere", b"5")
    assert store.heads() == {"A": empty.id} and store.locked() == {"A": b""}, "the locked vote was looked at by nobody"
    follows(empty.id, b"6", locked=True)
    assert store.heads() == store.locked() == {"A": empty.id}
    follows(b"nowhere", b"7")
    assert store.heads() == store.locked() == {"A": empty.id}, "it went on from there"


def test_those_with_whom_a_node_last_judged_are_remembered_while_it_is_alone() -> None:
    """Its own history forgets them: who was alone for long heard nobody who could tell it where the others went."""
    root = start("ABC")
    store = ChainStore.__new__(ChainStore)
    store._me, store.tree, store.last_heads, store._new_heads = "A", Tree(root), {}, {}
    store._heads, store._locked, store.logs, store.hashes = {}, {}, {}, {}
    store._together, store.company = 0, frozenset()
    store.contributions = SimpleNamespace(forget=lambda before: None)  # type: ignore[assignment]

    def stand(round: int, validators: str, judges: int) -> None:
        """At the end of a round that so many judges decided."""
        roster: Any = SimpleNamespace(scores=(b"",) * judges) if judges else None
        chain = replace(root, round=round, validators=tuple(validators), tip=b"%032d" % round)
        block = Block(chain.tip, root.tip, chain, roster)
        store.tree._blocks[block.id], store.tree._ways[block.id] = block, (root.tip, block.id)
        store.move(block)

    def follows(peer: str, roster: bytes, round: int) -> None:
        head: Any = SimpleNamespace(author=peer, what=ForkChoiceVote(roster, round, bytes(32)))
        store.last_heads[peer], store._new_heads[peer] = (b"", head), roster
        store.heads()

    async def main() -> None:
        stand(5, "ABC", 0)
        assert store.company == set("BC"), "also where they were gone from the first"
        stand(10, "ABCD", 3)
        stand(11, "AX", 1)  # its own word decides, and a newcomer does not change with whom it was
        stand(12, "AX", 0)
        assert store.company == set("BCD")
        follows("B", b"nowhere", 10)  # as before they parted
        follows("C", b"nowhere", 11)
        follows("D", store.tip, 20)  # which is here, or was once
        follows("X", b"nowhere", 20)
        assert store.gone_on() == set(), "its own history knows them still"
        stand(11 + DEPTH, "A", 1)
        assert store.gone_on() == {"C"}
        stand(12 + DEPTH, "AC", 2)
        assert store.gone_on() == set()

    trio.run(main)


@pytest.mark.parametrize(("lost_for", "gives_up"), [(LOST_FOR / 2, False), (2 * LOST_FOR, True)])
def test_who_cannot_follow_for_a_moment_does_not_leave_its_round(
    lost_for: float, gives_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it can, others may still be to say what they follow; it stays for that."""
    monkeypatch.setattr(round_module, "follow", lambda *_, **__: b"wanted")
    woken = trio.Event()
    store: Any = SimpleNamespace(tree=None, rules=None, heads=dict, locked=dict, out_of_sync=False, notify=woken.set)
    store.last_heads, store.hashes = {}, {b"wanted": "00" * 32}
    chain = SimpleNamespace(round=1, tip=b"tip", validators=())
    timers = SimpleNamespace(attempt=0, heads=False)
    context: Any = SimpleNamespace(chain=chain, me="me", timers=timers, omitting=frozenset, lost_since=None)
    context.lockable = b""

    async def main() -> None:
        began = trio.current_time()

        async def have(wanted: bytes, tip: bytes) -> Any:
            if trio.current_time() < began + lost_for:
                raise Lost("not now")
            return SimpleNamespace(id=wanted, chain=SimpleNamespace(round=2))

        here = OpenRounds.__new__(OpenRounds)
        here._store, here._sync = store, SimpleNamespace(have=have)  # type: ignore[assignment]
        here._timeouts = SimpleNamespace(is_settled=lambda *_: False)  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            await here._followed(context, nursery)
            await trio.sleep(LOST_FOR * 0.75)
            await here._followed(context, nursery)  # as something was heard
            await woken.wait()
            await here._followed(context, nursery)
        assert store.out_of_sync is gives_up

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
