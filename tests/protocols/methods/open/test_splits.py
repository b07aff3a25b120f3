"""Which members are told to be on another history: those who went on with others' work, and none who was only away.

And who of those that ask where a node stands is about to take part; and what is said in rounds that no key can name."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmnode.crdt import record
from swarmnode.protocols.chain.forks import DEPTH, Block, Tree
from swarmnode.protocols.chain.state import ChainState, Worked, genesis
from swarmnode.protocols.chain.statements import MAX_ROUND, Commit, ForkChoiceVote
from swarmnode.protocols.methods.open.join import Joining, Splits, Tip, TipQuery
from swarmnode.protocols.methods.open.round import Signer
from swarmnode.protocols.methods.open.sync import ChainSync, Path

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
    [("abcde", True), ("abcd", False), ("gh", True), ("fg", False)],
)
def test_who_were_validators_before_a_cut_have_a_say_as_most_of_all_and_who_are_now_as_most_of_those_heard(
    elsewhere: str, goes: bool
) -> None:
    """`elsewhere` follow a roster that cannot be had; g, h, i and j judge now, and of them j is not heard."""
    root = genesis(RUN, tuple("abcdefghi"), window=1000)
    now = replace(block(root, 0, OTHER), parent=root.tip)
    tree = Tree(root)
    tree.add(replace(now, chain=replace(now.chain, validators=tuple("ghij"))))
    here = {name: b"x" * 32 if name in elsewhere else now.id for name in {*elsewhere, *"ghi"}}
    sync = ChainSync.__new__(ChainSync)
    sync.store = SimpleNamespace(  # type: ignore[assignment]
        tree=tree, block=tree[now.id], signed_heads=lambda: here, diverged=frozenset(), out_of_sync=False, notify=list
    )
    sync._network, sync._examining = SimpleNamespace(me=ME), {b"x" * 32: 1}  # type: ignore[assignment]
    sync._consider_out_of_sync()
    assert sync.store.out_of_sync is goes


@pytest.mark.parametrize(
    ("since", "apart"),
    [(OTHER, True), (ME, False), (None, False)],
    ids=["with others", "alone", "in empty rounds"],
)
def test_what_counted_before_the_histories_parted_makes_nobody_stay(since: str | None, apart: bool) -> None:
    """They parted at round 60; this node is at 80, and the others at 140 keep the rounds from 70 on."""
    root = genesis(RUN, (OTHER,), window=1000)
    tree, tip = Tree(root), root
    for round in range(80):
        made = block(tip, round, OTHER if round < 60 else since)
        tree.add(made)
        tip = made.chain
    held = SimpleNamespace(tree=tree, tip=tip.tip, block=tree[tip.tip], stands=True, diverged=frozenset())
    theirs = tuple(f"theirs {round}".encode().rjust(32) for round in range(70, 140))

    class Told:
        store = held

        async def path_of(self, peer: str, id: bytes) -> Path:
            return Path(theirs, (False,) * len(theirs))

    splits = Splits(
        SimpleNamespace(me=ME, observer=SimpleNamespace(warn=lambda key, text: None)),  # type: ignore[arg-type]
        Told(),  # type: ignore[arg-type]
    )
    told = Tip(theirs[-1], 140, 0.0, b"", bytes(32))
    assert len(theirs) > DEPTH and trio.run(splits.has_diverged, OTHER, told) is apart


def test_only_who_may_take_part_is_waited_for_when_it_asks_where_to_begin() -> None:
    tip, waited = genesis(RUN, (OTHER,), window=1000), list[str]()
    joining = Joining.__new__(Joining)
    joining._parts = SimpleNamespace(admits=OTHER.__eq__)  # type: ignore[assignment]
    joining._sync = SimpleNamespace(admit=lambda run_id: None)  # type: ignore[assignment]
    joining._store = SimpleNamespace(  # type: ignore[assignment]
        tree=Tree(tip), tip=tip.tip, hashes={tip.tip: "00" * 32}, arrived=0.0, note_newcomer=waited.append
    )

    async def main() -> None:
        for peer in ("stranger", OTHER):
            for joins in (True, False):
                assert (await joining._on_tip(peer, TipQuery(RUN, joins))).tip == tip.tip

    trio.run(main)
    assert waited == [OTHER]


def parts_of(call: Any, *peers: str) -> Any:
    nearby, rpc = (lambda most: peers), SimpleNamespace(call=call)
    return SimpleNamespace(run_id=RUN, nearby=nearby, rpc=rpc, rng=random.Random(0))


def test_one_member_alone_is_not_first_by_what_it_says_of_the_base_of_the_others() -> None:
    start = genesis(RUN, ("L", OTHER), window=1000)
    honest = Tip(bytes(32), 4, 0.0, replace(start, round=3).encode(), bytes(32))
    lie = replace(honest, round=1000, base=replace(start, round=3, validators=(OTHER,)).encode())

    async def call(peer: str, *_: Any, **__: Any) -> Tip:
        return lie if peer == "z" else honest

    joining = Joining.__new__(Joining)
    joining._genesis, joining._parts, joining._preferred = start, parts_of(call, "a", "b", "z"), ()
    found = trio.run(joining._ask_around)
    assert [each.peer for each in found][2:] == ["z"] and found[0].base.validators == start.validators


@pytest.mark.parametrize("round", [5, MAX_ROUND])
def test_a_member_whose_base_lies_beyond_its_tip_is_not_believed(round: int) -> None:
    """It would have who believes it say things in rounds that are still to come."""
    start = genesis(RUN, (OTHER,), window=1000)
    told = Tip(bytes(32), 4, 0.0, replace(start, round=round).encode(), bytes(32))

    async def call(*_: Any, **__: Any) -> Tip:
        return told

    joining = Joining.__new__(Joining)
    joining._genesis, joining._parts, joining._preferred = start, parts_of(call, OTHER), ()
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
