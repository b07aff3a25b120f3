"""What a wait for heads counts, which is not the time in which this node stood still; and how far a node then goes."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from chains import RULES, fair, offer, start
from chains import block as block_of

from swarmnode.protocols.chain import state as chain_state
from swarmnode.protocols.chain.duty import Timers
from swarmnode.protocols.chain.forks import Block, Tree, empty_block
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.methods.open.round import OpenRounds
from swarmnode.protocols.methods.open.timeouts import QUIET, Timeouts
from swarmnode.protocols.peers.liveness import AdaptiveDeadline

PATIENCE = 5.0  # s


def test_a_round_gets_no_shorter_by_the_commits_of_strangers_whose_names_are_free() -> None:
    rounds = OpenRounds.__new__(OpenRounds)
    rounds._store = SimpleNamespace(rules=SimpleNamespace(shortest_window=1000, longest_window=600_000))  # type: ignore[assignment]
    rounds._parts = SimpleNamespace(spec=SimpleNamespace(inner=SimpleNamespace(steps_in=lambda round: 80)))  # type: ignore[assignment]
    strangers = {f"stranger {number}": 0.1 for number in range(20)}
    log = SimpleNamespace(arrived=strangers | dict.fromkeys("abcd", 30.0))
    chain = SimpleNamespace(window=9000, validators=tuple("abcd"), round=1)
    context: Any = SimpleNamespace(began=0.0, log=log, follows_nothing=False, chain=chain)
    assert rounds._next_window(context) == 60_000
    log.arrived = strangers
    assert rounds._next_window(context) == 1000, "of those who are there"


@pytest.mark.parametrize(("stood_still_at", "ends"), [(-math.inf, 10.0), (3.0, 15.0), (12.0, 20.0)])
def test_who_stood_still_waits_on(stood_still_at: float, ends: float) -> None:
    """A node that was frozen for as long as it was to wait went on alone at once, with the others' votes unread."""
    waits = Timeouts.__new__(Timeouts)
    waits._liveness = SimpleNamespace(stalled_since=lambda time: stood_still_at > time)  # type: ignore[assignment]
    waits._patience = lambda phase: PATIENCE  # type: ignore[method-assign]

    async def main() -> None:
        began = trio.current_time()
        await waits._sleep_awake(began + 10.0)
        assert trio.current_time() - began == pytest.approx(ends + QUIET)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("suspected_for", "away", "ends"),
    [(None, False, 31.0), (0.0, False, 15.0), (13.0, False, 2.0), (16.0, False, 0.0), (0.0, True, 0.0)],
)
def test_who_is_there_or_was_lately_is_waited_for_and_who_is_gone_is_not(
    suspected_for: float | None, away: bool, ends: float
) -> None:
    """A validator that is frozen or cut off for seconds is behind; so is the node that is cut off from all others. Who
    is there may be behind as well: a leader that the others pass over for ten seconds moved alone.
    """
    waits = Timeouts.__new__(Timeouts)
    context: Any = SimpleNamespace(awaited=(0.0, b"block"), had_time=False, timers=Timers())

    async def main() -> None:
        began = trio.current_time()
        waits._me, waits._refused = "me", set()
        waits._store = SimpleNamespace(is_away=lambda peer: away, notify=lambda: None)  # type: ignore[assignment]
        waits._liveness = SimpleNamespace(  # type: ignore[assignment]
            watching=nullcontext,
            stalled_since=lambda time: False,
            is_suspected=lambda peer: suspected_for is not None,
            suspected_for=lambda peer: (suspected_for or 0.0) + trio.current_time() - began,
        )
        await waits._await_heads(context, b"block", ["other"], began + 1.0)
        assert trio.current_time() - began == pytest.approx(ends, abs=1.5)
        assert context.had_time

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(("heads", "settled"), [("AB", False), ("ABC", True)])
def test_two_of_five_are_not_most_where_they_may_decide_a_round_and_the_others_are_there(
    heads: str, settled: bool
) -> None:
    """After some empty rounds two are a quorum; two of the others may stand behind another roster."""
    chain = replace(start("ABCDE"), empties=chain_state.PATIENCE)
    assert chain_state.quorum(chain, RULES) <= 2
    block = block_of(chain, RULES, fair(chain, RULES, [offer(chain, "X")], silent="CDE"))
    tree = Tree(chain)
    tree.add(block)
    waits = Timeouts.__new__(Timeouts)
    waits._me, waits._refused, waits._deadlines = "A", set(), defaultdict(lambda: AdaptiveDeadline(floor=1, ceiling=9))
    waits._liveness = SimpleNamespace(is_suspected=lambda peer: False)  # type: ignore[assignment]
    waits._store = SimpleNamespace(  # type: ignore[assignment]
        tree=tree, rules=RULES, heads=lambda: dict.fromkeys(heads, block.id), is_away=lambda peer: False
    )
    waits._patience = lambda phase: PATIENCE  # type: ignore[method-assign]
    waits._due = lambda context: 0.0  # type: ignore[method-assign]
    context: Any = SimpleNamespace(chain=chain, awaited=(0.0, b""), had_time=False)
    nursery: Any = SimpleNamespace(start_soon=lambda *call: None)

    async def main() -> None:
        assert waits.is_settled(context, block.id, nursery) is settled

    trio.run(main)


def test_an_empty_roster_that_somebody_follows_ends_nobodys_wait_for_a_leader() -> None:
    """One vote for it puts it into the trees of all, long before the attempts of a round are over."""
    chain = start("ABCDE")
    tree = Tree(chain)
    tree.add(empty_block(chain))
    block = block_of(chain, RULES, fair(chain, RULES, [offer(chain, "X")]))
    waits = Timeouts.__new__(Timeouts)
    waits._store = SimpleNamespace(tree=tree)  # type: ignore[assignment]
    context: Any = SimpleNamespace(chain=chain, log=SimpleNamespace(rosters={block.id: None}))
    assert waits._without_roster(context, "A") == {"A"}
    tree.add(block)
    assert not waits._without_roster(context, "A")


@pytest.mark.parametrize("empties", [0, chain_state.PATIENCE - 1])
def test_a_node_moves_as_far_as_most_follow_and_never_back(empties: int) -> None:
    """Also where two of five may decide the later round, as some before it ended empty."""
    chain = replace(start("ABCDE"), empties=empties)
    sibling = block_of(chain, RULES, fair(chain, RULES, [offer(chain, "Y")]))
    block = empty_block(chain) if empties else block_of(chain, RULES, fair(chain, RULES, [offer(chain, "X")]))
    later = block_of(block.chain, RULES, fair(block.chain, RULES, [offer(block.chain, "X")]))
    tree = Tree(chain)
    for one in (block, sibling, later):
        tree.add(one)
    rounds = OpenRounds.__new__(OpenRounds)

    def moves_to(tip: ChainState, **heads: bytes) -> Block:
        rounds._store = SimpleNamespace(tree=tree, rules=RULES, heads=lambda: heads)  # type: ignore[assignment]
        return rounds._as_far_as_most(SimpleNamespace(chain=tip), later)  # type: ignore[arg-type]

    ahead = dict.fromkeys("AB", later.id)
    assert moves_to(chain, C=block.id, **ahead) == block
    assert moves_to(chain, C=later.id, **ahead) == later
    assert moves_to(sibling.chain, C=block.id, **ahead) == later, "to go to a round again is no way out of it"
