"""What a wait for heads counts, which is not the time in which this node stood still; and how far a node then goes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
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
from swarmnode.protocols.chain.duty import Own, RoundView, Timers
from swarmnode.protocols.chain.forks import Block, Tree, empty_block
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import ForkChoiceVote
from swarmnode.protocols.methods.open import round as round_module
from swarmnode.protocols.methods.open.round import OpenRounds
from swarmnode.protocols.methods.open.store import ChainStore
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
    context: Any = SimpleNamespace(
        awaited=(0.0, b"block"), had_time=False, timers=Timers(), lockable=b"", lacking=["other"]
    )

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
        assert context.lockable == b"block"
        assert context.timers.locks, "they end before it moves alone"
        assert trio.current_time() - began == pytest.approx(ends, abs=1.5)
        assert context.had_time

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_whoever_is_lacking_now_is_waited_for_and_not_who_was_at_first() -> None:
    """Who came to be locked meanwhile was waited for to the end."""
    waits = Timeouts.__new__(Timeouts)
    context: Any = SimpleNamespace(awaited=(0.0, b"block"), had_time=False, timers=Timers(), lockable=b"")
    context.lacking = ["other"]

    async def main() -> None:
        began = trio.current_time()
        waits._me, waits._refused = "me", set()
        waits._store = SimpleNamespace(is_away=lambda peer: False, notify=lambda: None)  # type: ignore[assignment]
        waits._liveness = SimpleNamespace(  # type: ignore[assignment]
            watching=nullcontext, stalled_since=lambda time: False, is_suspected=lambda peer: False
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits._await_heads, context, b"block", ["other"], began + 3.0)
            await trio.sleep(2.0)
            assert context.lockable == b"block", "long before the wait for it is over"
            await trio.sleep(3.0)
            assert not context.had_time
            context.lacking = []
        assert trio.current_time() - began == pytest.approx(5.0, abs=1.5)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("heads", "locked", "gone", "settled"),
    [
        ("AB", "", "", False),
        ("ABC", "AB", "", False),
        ("ABC", "ABC", "", True),
        ("ABCDE", "", "", True),  # all follow it
        ("AB", "", "CDE", True),  # nobody can be locked, nor need be
        ("ABC", "AB", "DE", False),  # C is about to be
        ("ABC", "BC", "DE", True),  # and so is this node itself, unless its disk is full
        ("ABC", "AB", "CDE", True),
    ],
)
def test_two_of_five_are_not_most_where_they_may_decide_a_round_and_the_others_are_there(
    heads: str, locked: str, gone: str, settled: bool
) -> None:
    """After some empty rounds two are a quorum; two of the others may stand behind another roster, or go there yet."""
    chain = replace(start("ABCDE"), empties=chain_state.PATIENCE)
    assert chain_state.quorum(chain) <= 2
    block = block_of(chain, RULES, fair(chain, [offer(chain, "X")], silent="CDE"))
    tree = Tree(chain)
    tree.add(block)
    waits = Timeouts.__new__(Timeouts)
    waits._me, waits._refused, waits._deadlines = "A", set(), defaultdict(lambda: AdaptiveDeadline(floor=1, ceiling=9))
    waits._liveness = SimpleNamespace(is_suspected=lambda peer: peer in gone, suspected_for=lambda peer: 99.0)  # type: ignore[assignment]
    waits._store = SimpleNamespace(  # type: ignore[assignment]
        tree=tree,
        rules=RULES,
        heads=lambda: dict.fromkeys(heads, block.id),
        locked=lambda: dict.fromkeys(locked, block.id),
        is_away=lambda peer: False,
        notify=list,
    )
    waits._patience = lambda phase: PATIENCE  # type: ignore[method-assign]
    waits._due = lambda context: 0.0  # type: ignore[method-assign]
    context: Any = SimpleNamespace(chain=chain, awaited=(0.0, b""), had_time=False, lockable=b"")
    nursery: Any = SimpleNamespace(start_soon=lambda *call: None)

    async def main() -> None:
        assert waits.is_settled(context, block.id, nursery) is settled
        if locked != "ABC" and heads != "ABCDE":  # not decided
            all_there_follow = not set("ABCDE").difference(heads, gone)
            assert (context.lockable == block.id) is all_there_follow, "it need not wait for who is gone"

    trio.run(main)


def test_an_empty_roster_that_somebody_follows_ends_nobodys_wait_for_a_leader() -> None:
    """One vote for it puts it into the trees of all, long before the attempts of a round are over."""
    chain = start("ABCDE")
    tree = Tree(chain)
    tree.add(empty_block(chain))
    block = block_of(chain, RULES, fair(chain, [offer(chain, "X")]))
    waits = Timeouts.__new__(Timeouts)
    waits._store = SimpleNamespace(tree=tree)  # type: ignore[assignment]
    context: Any = SimpleNamespace(chain=chain, log=SimpleNamespace(rosters={block.id: None}))
    assert waits._without_roster(context, "A") == {"A"}
    tree.add(block)
    assert not waits._without_roster(context, "A")


@pytest.mark.parametrize(("cut", "waits"), [("AB", {}), ("ABC", {"more cuts": (set("DE"), 5.0)})])
def test_who_cuts_after_a_quorum_is_waited_for_for_the_floor_alone(cut: str, waits: dict[str, Any]) -> None:
    """Each learned how long all take by itself: some waited 15 s for who was frozen, and all others for them."""
    made = Timeouts.__new__(Timeouts)
    made._me, made._exchange = "A", SimpleNamespace(deadline_floor=5.0)  # type: ignore[assignment]
    made._set, made._expected = lambda *_, **__: None, lambda context: set()  # type: ignore[method-assign]
    log: Any = SimpleNamespace(quorum=3, leaders=(), judges=tuple("ABCDE"), arrived={}, scores_by_judge=dict)
    log.cut_by, log.quotable = dict.fromkeys(cut), lambda norms: SimpleNamespace(scores=())
    made._store = SimpleNamespace(norms=lambda log: {})  # type: ignore[assignment]
    context: Any = SimpleNamespace(chain=replace(start("ABCDE"), window=1), log=log, began=0.0, own=Own())
    lacked = {}

    async def wait_for(phase: str, lacks: Callable[[], set[str]], until: float = math.inf, **_: float) -> None:
        if phase == "more cuts":
            lacked[phase] = lacks(), until - trio.current_time()

    async def nothing(*_: Any) -> None:
        return None

    made._wait_for, made._wait_for_late = wait_for, nothing  # type: ignore[method-assign]
    made._due, made._patience = lambda context: 0.0, lambda phase: 0.0  # type: ignore[method-assign]
    trio.run(made.keep_time, context, clock=trio.testing.MockClock(autojump_threshold=0))
    assert lacked == waits


def test_nobody_waits_for_scores_that_a_leader_gave_up_once_all_had_the_time_for_them() -> None:
    """Who waited for longer heard them after all, and passed over a roster that lacks them: so votes split."""
    chain = start("ABCDE")
    tree, roster = Tree(chain), block_of(chain, RULES, fair(chain, [offer(chain, "X")], silent="E"))
    waits = Timeouts.__new__(Timeouts)
    waits._store, waits._exchange = SimpleNamespace(tree=tree), SimpleNamespace(deadline_floor=5.0)  # type: ignore[assignment]
    scored = dict.fromkeys("AB")
    said = {0: SimpleNamespace(what=SimpleNamespace(attempt=0)), 1: SimpleNamespace(what=SimpleNamespace(attempt=1))}
    log: Any = SimpleNamespace(chain=chain, rosters={roster.id: said[0]}, quorum=3, cut_by=dict.fromkeys("ABCDE"))
    log.scores_by_judge = lambda: scored
    context = RoundView("A", log)

    async def main() -> None:
        tree.add(roster)
        assert waits._unscored(context) == {*"CDE"}, "a leader alone says nothing of a quorum"
        scored["C"] = None
        assert waits._unscored(context) == {*"DE"}
        await trio.sleep(4.0)
        assert waits._unscored(context) == {*"DE"}, "a leader that lies may be the first"
        await trio.sleep(1.0)
        assert not waits._unscored(context)
        log.rosters[roster.id] = said[1]
        assert waits._unscored(context) == {*"DE"}, "later leaders may be liars too"
        await trio.sleep(5.0)
        assert not waits._unscored(context)
        log.rosters.clear()
        assert waits._unscored(context) == {*"DE"}

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_validator_says_once_that_it_is_locked_where_most_and_not_all_follow_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = start("ABCDE")
    block = block_of(chain, RULES, fair(chain, [offer(chain, "X")]))
    tree, heads, said = Tree(chain), dict.fromkeys("ABC", block.id), list[bool]()
    tree.add(block)
    monkeypatch.setattr(round_module, "follow", lambda *_, **__: block.id)
    rounds = OpenRounds.__new__(OpenRounds)
    store: Any = SimpleNamespace(tree=tree, rules=None, heads=lambda: heads, locked=dict, last_heads={})
    store.hashes = {block.id: "00" * 32}

    async def have(*_: Any) -> Block:
        return block

    async def publish(vote: ForkChoiceVote) -> ForkChoiceVote:
        store.last_heads["A"] = b"", SimpleNamespace(what=vote)
        said.append(vote.locked)
        return vote

    rounds._store, rounds._sync = store, SimpleNamespace(have=have)  # type: ignore[assignment]
    rounds._signer = SimpleNamespace(publish=publish)  # type: ignore[assignment]
    rounds._timeouts = SimpleNamespace(is_settled=lambda *_: False)  # type: ignore[assignment]
    timers = Timers()
    context: Any = SimpleNamespace(
        chain=chain, me="A", timers=timers, omitting=frozenset, lost_since=None, lockable=b""
    )

    async def main() -> None:
        for lockable in (b"", b"", block.id, block.id):
            context.lockable = lockable
            await rounds._followed(context, None)  # type: ignore[arg-type]
        heads.clear()
        await rounds._followed(context, None)  # type: ignore[arg-type]
        assert said == [False, True], "and takes that back nowhere"
        store.last_heads.clear()
        rounds._timeouts = SimpleNamespace(is_settled=lambda *_: True)  # type: ignore[assignment]
        assert await rounds._followed(context, None) is block  # type: ignore[arg-type]
        assert said[2:] == [False, True], "who moves may be all that others lack"

    trio.run(main)


def test_who_waits_for_a_time_looks_again_where_nothing_is_heard() -> None:
    store = ChainStore.__new__(ChainStore)
    store.changed = trio.Event()

    async def main() -> None:
        due = trio.current_time() + 3.0
        assert await store.until(lambda: trio.current_time() >= due, deadline=due + 2.0)
        assert not await store.until(lambda: False, deadline=due + 3.0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_vote_says_whether_its_author_followed_another_roster_of_that_round_before() -> None:
    """Then others may have counted it there; see `Tree.is_decided`."""
    chain = start("ABCDE")
    first, second = (block_of(chain, RULES, fair(chain, [offer(chain, who)])) for who in "XY")
    later = block_of(second.chain, RULES, fair(second.chain, [offer(second.chain, "X")]))
    said = list[ForkChoiceVote]()
    store: Any = SimpleNamespace(last_heads={}, hashes={one.id: "00" * 32 for one in (first, second, later)})

    async def publish(vote: ForkChoiceVote) -> None:
        store.last_heads["A"] = b"", SimpleNamespace(what=vote)
        said.append(vote)

    rounds = OpenRounds.__new__(OpenRounds)
    rounds._store, rounds._signer = store, SimpleNamespace(publish=publish)  # type: ignore[assignment]
    context: Any = SimpleNamespace(chain=chain, me="A")

    async def main() -> None:
        for block, locked in (first, False), (second, False), (second, True), (later, False), (first, False):
            await rounds._vote(context, block, locked)
        assert [vote.moved for vote in said] == [False, True, True, False, True]

    trio.run(main)


@pytest.mark.parametrize("empties", [0, chain_state.PATIENCE - 1])
def test_a_node_moves_as_far_as_most_follow_and_never_back(empties: int) -> None:
    """Also where two of five may decide the later round, as some before it ended empty."""
    chain = replace(start("ABCDE"), empties=empties)
    sibling = block_of(chain, RULES, fair(chain, [offer(chain, "Y")]))
    block = empty_block(chain) if empties else block_of(chain, RULES, fair(chain, [offer(chain, "X")]))
    later = block_of(block.chain, RULES, fair(block.chain, [offer(block.chain, "X")]))
    tree = Tree(chain)
    for one in (block, sibling, later):
        tree.add(one)
    rounds = OpenRounds.__new__(OpenRounds)

    def moves_to(tip: ChainState, locked: str = "ABC", **heads: bytes) -> Block:
        locks = {peer: heads[peer] for peer in locked}
        rounds._store = SimpleNamespace(tree=tree, rules=RULES, heads=lambda: heads, locked=lambda: locks)  # type: ignore[assignment]
        return rounds._as_far_as_most(SimpleNamespace(chain=tip), later)  # type: ignore[arg-type]

    ahead = dict.fromkeys("AB", later.id)
    assert moves_to(chain, C=block.id, **ahead) == block
    assert moves_to(chain, C=later.id, **ahead) == later
    assert moves_to(chain, "AB", C=later.id, **ahead) == block, "who is not locked may go elsewhere"
    assert moves_to(sibling.chain, C=block.id, **ahead) == later, "to go to a round again is no way out of it"
