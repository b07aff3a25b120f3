"""What a node shows of its work to auditors: nothing before it stands, and no more than it can let go of again.

And what shows that it lies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from chains import RULES, fair, offer, start
from chains import block as block_of
from openspec import open_spec
from trio.testing import MockClock

from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.chain.forks import Tree, empty_block
from swarmnode.protocols.methods.open.checks import audits as checks
from swarmnode.protocols.methods.open.checks.audits import (
    MAX_ASKED,
    Accusation,
    Audits,
    NotShown,
    Showing,
    ShowQuery,
    Unknown,
    Withheld,
)
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.protocols.runner import inline
from swarmnode.protocols.transfer.bulk import Stalled
from swarmnode.training.outer import OuterState
from swarmnode.training.verify.recorder import shown_room
from swarmnode.training.verify.replay import Verdict, Wrong
from swarmnode.training.verify.trace import MAX_TRACE, Leg, Origin, Trace, vector_id

RUN, ROSTER, TRACE, STATE = "ab" * 32, b"r" * 32, b"t" * 32, b"s" * 32


class Offers(dict[tuple[Any, ...], Any]):
    def offer(self, key: tuple[Any, ...], content: memoryview, *, to: frozenset[str]) -> None:
        self[key] = content

    def withdraw(self, prefix: tuple[Any, ...]) -> None:
        for key in [key for key in self if key[: len(prefix)] == prefix]:
            del self[key]


def audits(store: Any, **local: Any) -> Audits:
    made = Audits.__new__(Audits)
    made._store, made._parts = store, SimpleNamespace(me="me", run_id=RUN, bulk=Offers())  # type: ignore[assignment]
    made._local = SimpleNamespace(keeps=lambda root: True, feedback=SimpleNamespace(size=1), **local)  # type: ignore[assignment]
    made._shown, made._shown_bytes = OrderedDict(), 0
    made._misled, made._taken, made._others = {}, (), {}  # type: ignore[assignment]
    made._have, made._promised = {}, set()
    return made


def test_who_asks_before_this_node_stands_is_refused() -> None:
    async def main() -> None:
        asked = audits(ChainStore.__new__(ChainStore))
        with pytest.raises(Refuse):
            await asked._on_show("peer", ShowQuery(RUN, ROSTER, TRACE, (STATE,)))
        assert await asked._on_accuse("peer", Accusation(RUN, ROSTER, True)) == Showing((False,))

    trio.run(main)


def test_what_was_let_go_of_while_it_was_read_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def show(id: bytes) -> memoryview:
            for whose, shown in [*asked._shown.items()]:  # as when others take its room
                asked._let_go(whose, shown)
                del asked._shown[whose]
            return memoryview(b"state")

        stands = SimpleNamespace(stands=True, block=SimpleNamespace(chain=SimpleNamespace(history=(), validators=())))
        asked = audits(stands, show=show)
        monkeypatch.setattr(asked, "_may_ask", lambda peer, query: True)
        with pytest.raises(Refuse):
            await asked._on_show("peer", ShowQuery(RUN, ROSTER, TRACE, (STATE,)))
        assert not asked._parts.bulk

    trio.run(main)


@pytest.mark.parametrize(("validators", "shown"), [(("peer",), True), ((), False)])
def test_a_validator_that_ended_the_first_round_before_this_node_is_waited_for(
    validators: tuple[str, ...], shown: bool
) -> None:
    """No roster names anybody yet who worked; whoever is refused takes the work for not shown."""

    async def main() -> None:
        tree: dict[bytes, Any] = {}

        async def until(true: Callable[[], bool], *, deadline: float) -> None:
            assert not true()
            tree[ROSTER] = None

        chain = SimpleNamespace(history=(), validators=validators)
        store = SimpleNamespace(stands=True, block=SimpleNamespace(chain=chain), tree=tree, until=until)
        asked = audits(store)
        asked._may_ask = lambda peer, query: query.roster in tree  # type: ignore[method-assign]
        with nullcontext() if shown else pytest.raises(Refuse):
            await asked._on_show("peer", ShowQuery(RUN, ROSTER, TRACE, ()))

    trio.run(main)


def test_there_is_room_for_the_records_of_two_audits_of_a_small_model() -> None:
    """A record of thousands of steps took all that there was for a model of 65 parameters."""
    assert shown_room(65) >= 2 * MAX_TRACE


def ids(first: int, count: int) -> tuple[bytes, ...]:
    return tuple(bytes([number]) * 32 for number in range(first, first + count))


def test_who_is_not_drawn_takes_no_room_from_who_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies no more than there is room for either, and what it holds goes before what older auditors do."""
    later, peers, most = b"l" * 32, ("me", "drawn", "other"), shown_room(1)

    async def show(id: bytes) -> memoryview:
        return memoryview(bytes(most // 24))

    async def main() -> None:
        store = SimpleNamespace(
            stands=True,
            block=SimpleNamespace(chain=SimpleNamespace(history=(), validators=())),
            tree={ROSTER: None, later: None},
            measured=lambda block: dict.fromkeys(peers, b"commit"),
            checks_seed=lambda block: b"seed",
        )
        asked = audits(store, show=show)
        offers: Any = asked._parts.bulk
        monkeypatch.setattr(checks, "by_whom", lambda *_: "drawn")
        await asked._on_show("drawn", ShowQuery(RUN, ROSTER, TRACE, ids(0, 12)))
        drawn = dict(offers)
        with pytest.raises(Refuse):
            await asked._on_show("other", ShowQuery(RUN, ROSTER, TRACE, ids(100, MAX_ASKED)))
        assert offers == drawn and asked.held <= most
        await asked._on_show("other", ShowQuery(RUN, later, TRACE, ids(100, 8)))
        assert asked.held == 20 * (most // 24)
        await asked._on_show("drawn", ShowQuery(RUN, later, TRACE, ids(200, 12)))
        assert drawn.items() <= offers.items() and asked.held == 24 * (most // 24)

    trio.run(main)


def test_who_repeats_an_accusation_is_shown_the_work_however_many_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async def show(id: bytes) -> memoryview:
        return memoryview(b"state")

    async def main() -> None:
        rosters = [bytes([number]) * 32 for number in range(checks.AT_ONCE + 2)]
        store = SimpleNamespace(
            stands=True,
            block=SimpleNamespace(chain=SimpleNamespace(history=(), validators=())),
            tree=dict.fromkeys(rosters),
            measured=lambda block: dict.fromkeys(("me", "drawn", "other"), b"commit"),
            checks_seed=lambda block: b"seed",
        )
        asked = audits(store, show=show)
        monkeypatch.setattr(checks, "by_whom", lambda *_: "drawn")
        for roster in rosters:
            await asked._on_show("drawn", ShowQuery(RUN, roster, TRACE, (STATE,)))
            await asked._on_show("drawn", ShowQuery(RUN, roster, TRACE, ()))  # it has all
        assert await asked._on_show("other", ShowQuery(RUN, rosters[0], TRACE, (STATE,))) == Showing((True,))
        assert len(asked._shown) == checks.AT_ONCE and asked.held

    trio.run(main)


def test_all_that_an_audit_fetches_has_one_deadline() -> None:
    async def main() -> None:
        asked = audits(None)
        asked._until = trio.current_time() + asked._within

        async def slowly(*_: object, **__: object) -> memoryview:
            await trio.sleep(asked._within * 0.6)
            return memoryview(b"")

        parts: Any = asked._parts
        parts.bulk = SimpleNamespace(fetch=slowly)
        work: Any = SimpleNamespace(source="author", author="author", auditor="me", block=SimpleNamespace(id=ROSTER))
        await asked._fetch(work, STATE, 8)
        with pytest.raises(Withheld):
            await asked._fetch(work, TRACE, 8)
        assert trio.current_time() == pytest.approx(asked._until)

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_states_are_looked_through_where_that_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as large as the model, and lie on the disk."""
    aside = False

    async def runner(work: Any) -> Any:
        nonlocal aside
        aside = True
        try:
            return work()
        finally:
            aside = False

    def looked(vector: np.ndarray) -> bool:
        assert aside
        return False

    asked = audits(None)
    asked._parts.runner, asked._have = runner, {STATE: np.ones(1, np.float32)}
    monkeypatch.setattr(checks, "is_finite", looked)
    work: Any = None
    with pytest.raises(Wrong, match="finite"):
        trio.run(asked._vectors, work, {STATE})


def test_states_whose_differences_are_infinite_are_a_lie() -> None:
    """They are finite themselves; what they come to is not, and no codec takes it."""
    low, high, none = (np.full(8, value, np.float32) for value in (-3e38, 3e38, 0))
    vectors = {vector_id(vector): vector for vector in (low, high, none)}

    async def shown(*_: object) -> dict[bytes, np.ndarray]:
        return vectors

    state = OuterState(high, none)
    store = SimpleNamespace(state=lambda roster: state, tree={ROSTER: None}, last_listed=lambda *_: None)
    asked = audits(store, carries=False)
    asked._parts.runner, asked._parts.spec = inline, open_spec()
    asked._store.contributions = {b"": SimpleNamespace(raw=bytes(4 * 8))}  # type: ignore[assignment]
    asked._vectors = shown  # type: ignore[assignment, method-assign]
    record = Trace(Origin.FRESH, b"", ROSTER, vector_id(high), vector_id(low), vector_id(none), ())
    work: Any = SimpleNamespace(
        reveal=SimpleNamespace(root=b"", round=0, parent=ROSTER), block=SimpleNamespace(parent=ROSTER), author="author"
    )
    with np.errstate(over="ignore"), pytest.MonkeyPatch.context() as patched, pytest.raises(Wrong, match="infinity"):
        patched.setattr(checks, "walk", lambda *_, **__: low)
        trio.run(asked._check_residual, work, record)


LAST, EARLIER = ids(1, 2)  # roots of records: of what a roster listed last, and of what one listed before


@pytest.mark.parametrize(
    ("origin", "previous", "base", "follows"),
    [
        (Origin.AFTER, LAST, 0, True),
        (Origin.AFTER, EARLIER, 0, False),
        (Origin.FRESH, b"", 1, True),
        (Origin.FRESH, b"", 2, True),
        (Origin.FRESH, b"", 0, False),
        (Origin.FRESH, LAST, 0, False),
    ],
)
def test_what_was_trained_counts_in_one_round_and_in_no_later_one(
    origin: Origin, previous: bytes, base: int, follows: bool
) -> None:
    """An author whose record begins before its last contribution in a roster shows the steps of that once more."""
    chain = start("ABCDE")
    offered = offer(chain, "X")
    listing = block_of(chain, RULES, fair(chain, [offered]))
    empty = empty_block(listing.chain)
    store = ChainStore.__new__(ChainStore)
    store.tree, way = Tree(chain), (chain.tip, listing.id, empty.id)
    for one in (listing, empty):
        store.tree.add(one)
    revealed = replace(offered.reveal, trace=LAST)
    said: Any = SimpleNamespace(author="X", what=revealed)
    store.logs = {chain.tip: SimpleNamespace(reveals={offered.id: said})}  # type: ignore[dict-item]
    record = Trace(origin, previous, way[base], STATE, STATE, STATE, (Leg(b"", False, ()),))
    work: Any = SimpleNamespace(block=SimpleNamespace(parent=empty.id), author="X")
    before = replace(record, end=record.start)

    async def shown(work: Any, root: bytes) -> Trace:
        return before

    asked = audits(store)
    asked._record = shown  # type: ignore[method-assign]
    if not follows:
        with pytest.raises(NotShown):
            trio.run(asked._before, work, record)
    elif origin is Origin.FRESH:
        assert trio.run(asked._before, work, record) is None
    else:
        assert listing.roster is not None
        assert trio.run(asked._before, work, record) == (revealed, before, listing.roster.entries[0])


def audit_of(asked: Audits, **work: Any) -> Verdict:
    """What comes of looking at this work, where the roster that lists it ended round 6."""
    block = SimpleNamespace(chain=SimpleNamespace(round=7), parent=work.pop("parent", b""))
    looked_at: Any = SimpleNamespace(
        block=block, author="author", source="author", auditor="peer", commit=b"", seed=b"", **work
    )

    async def tolerance() -> float:
        return 0.02

    asked._tolerance, asked._longest = tolerance, 3  # type: ignore[method-assign]
    return trio.run(asked._audit, looked_at).verdict


def test_a_record_that_begins_at_a_roster_which_nobody_made_is_a_lie() -> None:
    """No state is found for that, as for one that was let go of, and so nothing would ever be concluded."""
    root = start("A")
    asked = audits(SimpleNamespace(block=SimpleNamespace(chain=SimpleNamespace(round=7)), tree=Tree(root)))
    legs = Leg(b"", False, ()), Leg(root.tip, False, ())

    async def shown(work: Any, root: bytes) -> Trace:
        return Trace(Origin.FRESH, b"", b"?" * 32, STATE, STATE, STATE, legs)

    asked._record = shown  # type: ignore[method-assign]
    reveal = SimpleNamespace(trace=TRACE, round=0, parent=root.tip)
    assert audit_of(asked, reveal=reveal, parent=root.tip) is Verdict.LIED


GONE, SILENT = None, Stalled("nothing came")


@pytest.mark.parametrize(
    ("begun", "ended", "why", "tells"),
    [
        (7, 7, GONE, True),
        (7, 8, GONE, True),
        (7, 9, GONE, False),
        (8, 8, GONE, False),
        (7, 9, SILENT, True),
        (8, 8, SILENT, True),
    ],
)
def test_what_is_gone_counts_where_it_was_asked_for_in_time(
    begun: int, ended: int, why: Exception | None, tells: bool
) -> None:
    """The roster ended round 6, so the next one ends round 7: from then on an author needs the room of its states.

    But for what it says that it will send.
    """
    chain = SimpleNamespace(round=begun)
    asked = audits(SimpleNamespace(block=SimpleNamespace(chain=chain)))

    async def gone(work: Any, root: bytes) -> Trace:
        chain.round = ended
        raise Withheld("it has what it signed no more") from why

    asked._record = gone  # type: ignore[method-assign]
    if tells:
        assert audit_of(asked, reveal=SimpleNamespace(trace=TRACE)) is Verdict.NOT_SHOWN
    else:
        with pytest.raises(Unknown):
            audit_of(asked, reveal=SimpleNamespace(trace=TRACE))
