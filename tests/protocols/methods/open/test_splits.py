"""Which members are told to be on another history: those who went on with others' work, and none who was only away.

And who of those that ask where a node stands is about to take part; and what is said in rounds that no key can name."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmnode.crdt import record
from swarmnode.protocols.chain.forks import Block, Tree
from swarmnode.protocols.chain.state import ChainState, Worked, decode, genesis
from swarmnode.protocols.chain.statements import MAX_ROUND, Commit, ForkChoiceVote
from swarmnode.protocols.methods.open import join
from swarmnode.protocols.methods.open.join import Joining, Splits, Tip, TipQuery
from swarmnode.protocols.methods.open.round import Signer
from swarmnode.protocols.methods.open.sync import ChainSync, Path
from swarmnode.protocols.runner import inline

RUN, ME, OTHER = "ab" * 32, "me", "other"
WORK = SimpleNamespace()  # a roster, of which only matters that there is one


def block(chain: ChainState, round: int, author: str | None) -> Block:
    """The roster that ended `round`, in which the work of `author` counted; None: an empty one."""
    id = f"{round}".encode().rjust(32)
    history = (*chain.history, (Worked(author, 1),)) if author is not None else chain.history
    after = replace(chain, round=round + 1, tip=id, history=history)
    return Block(id, chain.tip, after, None if author is None else WORK)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("elsewhere", "goes"),
    [("abcde", True), ("abcd", False), ("gh", True), ("fg", False), ("wx", True), ("wy", False)],
)
def test_who_were_validators_before_a_cut_have_a_say_as_most_of_all_and_who_are_now_as_most_of_those_heard(
    elsewhere: str, goes: bool
) -> None:
    """`elsewhere` follow a roster that cannot be had; g, h, i and j judge now, and of them j is not heard. With w, x
    and y this node judged before it was alone for long; w and x signed something since.
    """
    root = genesis(RUN, tuple("abcdefghi"), window=1000)
    now = replace(block(root, 0, OTHER), parent=root.tip)
    tree = Tree(root)
    tree.add(replace(now, chain=replace(now.chain, validators=tuple("ghij"))))
    here = {name: b"x" * 32 if name in elsewhere else now.id for name in {*elsewhere, *"ghi"}}
    sync = ChainSync.__new__(ChainSync)
    sync.store = SimpleNamespace(  # type: ignore[assignment]
        tree=tree,
        block=tree[now.id],
        signed_heads=lambda: here,
        diverged=frozenset(),
        out_of_sync=False,
        notify=list,
        company=frozenset("wxy"),
        gone_on=lambda: set("wx"),
    )
    sync._network, sync._examining = SimpleNamespace(me=ME), {b"x" * 32: 1}  # type: ignore[assignment]
    sync._called = -1
    sync._consider_out_of_sync()
    assert sync.store.out_of_sync is goes
    sync.store.out_of_sync = False
    sync._consider_out_of_sync()
    assert sync.store.out_of_sync is (goes and "w" not in elsewhere), "who call it may have left: once in some rounds"


def looker(blocks: list[Block]) -> Splits:
    """Who looks at members from the last of these blocks."""
    held = SimpleNamespace(stands=True, diverged=frozenset())
    held.tree = Tree(replace(blocks[0].chain, tip=blocks[0].parent, round=blocks[0].chain.round - 1))
    for one in blocks:
        held.tree.add(one)
    held.tip, held.block = blocks[-1].id, blocks[-1]
    parts: Any = SimpleNamespace(me=ME, observer=SimpleNamespace(warn=lambda key, text: None))
    return Splits(parts, SimpleNamespace(store=held))  # type: ignore[arg-type]


def history(rounds: range, author: str | None, after: list[Block] | None = None) -> list[Block]:
    """Rosters that ended these rounds, in which the work of `author` counted, after others."""
    blocks = list(after or ())
    tip = blocks[-1].chain if blocks else genesis(RUN, (OTHER,), window=1000)
    for round in rounds:
        blocks.append(block(tip, round, author))
        tip = blocks[-1].chain
    return blocks


def theirs(splits: Splits, rounds: range) -> Tip:
    """A member stands at the end of these rounds, all of whose rosters are others, and tells the way there."""
    ids = tuple(f"theirs {round}".encode().rjust(32) for round in rounds)

    async def path_of(peer: str, id: bytes) -> Path:
        return Path(ids, (False,) * len(ids))

    splits._sync.path_of = path_of  # type: ignore[method-assign,assignment]
    return Tip(ids[-1], rounds.stop, 0.0, b"", bytes(32))


@pytest.mark.parametrize(
    ("since", "apart"),
    [(OTHER, True), (ME, False), (None, False)],
    ids=["with others", "alone", "in empty rounds"],
)
def test_what_counted_before_the_histories_parted_makes_nobody_stay(since: str | None, apart: bool) -> None:
    """They parted at round 60; this node is at 80, and the others at 140 keep the rounds from 70 on."""
    splits = looker(history(range(60, 80), since, history(range(60), OTHER)))
    assert trio.run(splits.has_diverged, OTHER, theirs(splits, range(70, 140))) is apart


@pytest.mark.parametrize("begin", [100, 1000], ids=["this node is further", "they are further"])
@pytest.mark.parametrize(
    ("author", "here", "there", "apart"),
    [(OTHER, 9, 9, True), (OTHER, 9, 0, False), (OTHER, 0, 9, False), (ME, 9, 9, False)],
    ids=["both go on", "it is behind", "this node is behind", "this node was alone"],
)
def test_who_goes_on_as_this_node_does_without_a_roster_in_common_has_parted(
    begin: int, author: str, here: int, there: int, apart: bool
) -> None:
    """After a cut of a night one side is further than the other by more rounds than are kept."""
    splits = looker(history(range(400, 480), author))
    assert not trio.run(splits.has_diverged, OTHER, theirs(splits, range(begin, begin + 80))), "seen once"
    later = looker(history(range(400, 480 + here), author))
    later._apart = splits._apart
    assert trio.run(later.has_diverged, OTHER, theirs(later, range(begin + there, begin + there + 80))) is apart


def test_who_just_came_tells_of_no_split_with_who_is_a_little_behind() -> None:
    splits = looker(history(range(1000, 1010), OTHER))
    assert not trio.run(splits.has_diverged, OTHER, theirs(splits, range(910, 990)))
    later = looker(history(range(1000, 1016), OTHER))
    later._apart = splits._apart
    assert not trio.run(later.has_diverged, OTHER, theirs(later, range(916, 996)))


@pytest.mark.parametrize(
    ("mine", "workers", "round", "stays"),
    [
        ((ME,), ("a",), 99, True),
        ((ME,), ("a",), 101, False),  # it did more
        ((ME,), ("a",), 100, True),  # of equals, by their names
        ((ME,), ("z",), 100, False),
        ((ME,), ("a", "b"), 99, False),
        ((ME, "b"), ("a",), 99, False),
        ((), ("a",), 99, False),
    ],
)
def test_of_two_who_were_alone_who_did_more_stays(
    mine: tuple[str, ...], workers: tuple[str, ...], round: int, stays: bool
) -> None:
    def remembering(authors: tuple[str, ...]) -> ChainState:
        root = genesis(RUN, (ME,), window=1000)
        return replace(root, round=100, history=tuple((Worked(author, 1000),) for author in authors))

    async def has_diverged(peer: str, tip: Tip) -> bool:
        return False

    joining = Joining.__new__(Joining)
    joining._parts, joining.splits = SimpleNamespace(me=ME), SimpleNamespace(has_diverged=has_diverged)  # type: ignore[assignment]
    joining._store = SimpleNamespace(block=SimpleNamespace(chain=remembering(mine)))  # type: ignore[assignment]
    found: Any = SimpleNamespace(base=remembering(workers), peer=workers[0], tip=SimpleNamespace(round=round))
    assert trio.run(joining._stays, found) is stays


def test_only_who_may_take_part_is_waited_for_when_it_asks_where_to_begin() -> None:
    tip, waited = genesis(RUN, (OTHER,), window=1000), list[str]()
    joining = Joining.__new__(Joining)
    joining._parts = SimpleNamespace(run_id=RUN, admits=OTHER.__eq__)  # type: ignore[assignment]
    tree, hashes = Tree(tip), {tip.tip: "00" * 32}
    joining._store = SimpleNamespace(  # type: ignore[assignment]
        stands=True, tree=tree, tip=tip.tip, hashes=hashes, arrived=0.0, note_newcomer=waited.append
    )

    async def main() -> None:
        for peer in ("stranger", OTHER):
            for joins in (True, False):
                assert (await joining._on_tip(peer, TipQuery(RUN, joins))).tip == tip.tip

    trio.run(main)
    assert waited == [OTHER]


def asking(start: ChainState, call: Any, *peers: str) -> Joining:
    """Who asks these peers where they stand, as `call` answers."""

    async def call_all(asked: tuple[str, ...], *_: Any, **__: Any) -> list[tuple[str, Tip]]:
        return [(peer, await call(peer)) for peer in asked]

    nearby, rpc = (lambda most: peers), SimpleNamespace(call_all=call_all)
    joining = Joining.__new__(Joining)
    joining._genesis, joining._preferred, joining._store = start, (), SimpleNamespace(gone_on=set)  # type: ignore[assignment]
    parts: Any = SimpleNamespace(run_id=RUN, nearby=nearby, rpc=rpc, rng=random.Random(0), runner=inline)
    joining._parts = parts
    return joining


def test_one_member_alone_is_not_first_by_what_it_says_of_the_base_of_the_others() -> None:
    start = genesis(RUN, ("L", OTHER), window=1000)
    honest = Tip(bytes(32), 4, 0.0, replace(start, round=3).encode(), bytes(32))
    lie = replace(honest, round=1000, base=replace(start, round=3, validators=(OTHER,)).encode())

    async def call(peer: str, *_: Any, **__: Any) -> Tip:
        return lie if peer == "z" else honest

    joining = asking(start, call, "a", "b", "z")
    found = trio.run(joining._ask_around)
    assert [each.peer for each in found][2:] == ["z"] and found[0].base.validators == start.validators
    joining._store.gone_on = lambda: {"z"}  # type: ignore[method-assign]
    assert trio.run(joining._ask_around)[0].peer == "z", "who was alone goes to those whom it knew"


def test_what_members_say_of_the_chain_is_not_decoded_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have half a megabyte, which takes 0.7 s, from each of sixteen."""
    start, threads = genesis(RUN, (OTHER,), window=1000), set[int]()

    async def call(*_: Any, **__: Any) -> Tip:
        return Tip(bytes(32), 0, 0.0, start.encode(), bytes(32))

    def noted(raw: bytes) -> ChainState:
        threads.add(threading.get_ident())
        return decode(raw)

    monkeypatch.setattr(join, "decode", noted)
    joining = asking(start, call, OTHER)
    joining._parts.runner = trio.to_thread.run_sync  # type: ignore[assignment]
    assert len(trio.run(joining._ask_around)) == 1
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("round", [5, MAX_ROUND])
def test_a_member_whose_base_lies_beyond_its_tip_is_not_believed(round: int) -> None:
    """It would have who believes it say things in rounds that are still to come."""
    start = genesis(RUN, (OTHER,), window=1000)
    told = Tip(bytes(32), 4, 0.0, replace(start, round=round).encode(), bytes(32))

    async def call(*_: Any, **__: Any) -> Tip:
        return told

    joining = asking(start, call, OTHER)
    assert trio.run(joining._ask_around) == []
    told = replace(told, round=round)
    assert [found.base.round for found in trio.run(joining._ask_around)] == [round]


@pytest.mark.parametrize(
    "statement",
    [Commit(MAX_ROUND + 1, bytes(32), bytes(32), bytes(32)), ForkChoiceVote(bytes(32), MAX_ROUND + 1, bytes(32))],
)
def test_after_the_last_round_that_a_key_can_name_nothing_is_said(statement: Commit | ForkChoiceVote) -> None:
    async def write(key: str, value: Any) -> record.Record:
        return record.write(RUN, "L", key, value, hlc=0, sign=lambda raw: bytes(64))

    said = SimpleNamespace(write=write, hurry=lambda: None), SimpleNamespace(insert_own=lambda record: None)
    signer = Signer(*said, secret=bytes(32))  # type: ignore[arg-type]
    assert trio.run(signer.publish, replace(statement, round=MAX_ROUND)) is not None
    assert trio.run(signer.publish, statement) is None
