"""What a node shows of its work to auditors: nothing before it stands, and no more than it can let go of again.

And what shows that it lies."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from openspec import open_spec

from swarmnode.protocols.calls.rpc import Refuse
from swarmnode.protocols.methods.open.checks import audits as checks
from swarmnode.protocols.methods.open.checks.audits import Accusation, Audits, Showing, ShowQuery, Unknown, Withheld
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.protocols.runner import inline
from swarmnode.training.outer import OuterState
from swarmnode.training.verify.replay import Verdict, Wrong
from swarmnode.training.verify.trace import Origin, Trace, vector_id

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
    made._unheard, made._taken = {}, ()  # type: ignore[assignment]
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

        stands = SimpleNamespace(stands=True, block=SimpleNamespace(chain=SimpleNamespace(history=())))
        asked = audits(stands, show=show)
        monkeypatch.setattr(asked, "_may_ask", lambda peer, query: True)
        with pytest.raises(Refuse):
            await asked._on_show("peer", ShowQuery(RUN, ROSTER, TRACE, (STATE,)))
        assert not asked._parts.bulk

    trio.run(main)


def test_states_whose_differences_are_infinite_are_a_lie() -> None:
    """They are finite themselves; what they come to is not, and no codec takes it."""
    low, high, none = (np.full(8, value, np.float32) for value in (-3e38, 3e38, 0))
    vectors = {vector_id(vector): vector for vector in (low, high, none)}

    async def shown(*_: object) -> dict[bytes, np.ndarray]:
        return vectors

    asked = audits(SimpleNamespace(state=lambda roster: OuterState(high, none)), carries=False)
    asked._parts.runner, asked._parts.spec = inline, open_spec()
    asked._contribution = lambda root: bytes(4 * 8)  # type: ignore[method-assign]
    asked._vectors = shown  # type: ignore[assignment, method-assign]
    record = Trace(Origin.FRESH, b"", ROSTER, vector_id(high), vector_id(low), vector_id(none), ())
    work: Any = SimpleNamespace(reveal=SimpleNamespace(root=b"", round=0, parent=ROSTER))
    with np.errstate(over="ignore"), pytest.MonkeyPatch.context() as patched, pytest.raises(Wrong, match="infinity"):
        patched.setattr(checks, "walk", lambda *_, **__: low)
        trio.run(asked._check_residual, work, record)


@pytest.mark.parametrize(("begun", "ended", "tells"), [(7, 7, True), (7, 8, True), (7, 9, False), (8, 8, False)])
def test_what_is_gone_counts_where_it_was_asked_for_in_time(begun: int, ended: int, tells: bool) -> None:
    """The roster ended round 6, so the next one ends round 7: from then on an author needs the room of its states."""
    chain = SimpleNamespace(round=begun)
    asked = audits(SimpleNamespace(block=SimpleNamespace(chain=chain)))
    block, reveal = SimpleNamespace(chain=SimpleNamespace(round=7)), SimpleNamespace(trace=TRACE)
    work: Any = SimpleNamespace(
        block=block, reveal=reveal, author="author", source="author", auditor="peer", commit=b"", seed=b""
    )

    async def tolerance() -> float:
        return 0.02

    async def gone(*_: object) -> Trace:
        chain.round = ended
        raise Withheld("it has what it signed no more")

    asked._tolerance, asked._record = tolerance, gone  # type: ignore[method-assign, assignment]
    if tells:
        assert trio.run(asked._audit, work).verdict is Verdict.NOT_SHOWN
    else:
        with pytest.raises(Unknown):
            trio.run(asked._audit, work)
