"""Which members are told to be on another history: those who went on with others' work, and none who was only away.

And who of those that ask where a node stands is about to take part."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

from swarmnode.protocols.chain.forks import DEPTH, Block, Tree
from swarmnode.protocols.chain.state import ChainState, Worked, genesis
from swarmnode.protocols.methods.open.join import Joining, Splits, Tip, TipQuery
from swarmnode.protocols.methods.open.sync import Path

RUN, ME, OTHER = "ab" * 32, "me", "other"
WORK = SimpleNamespace()  # a roster, of which only matters that there is one


def block(chain: ChainState, round: int, author: str | None) -> Block:
    """The roster that ended `round`, in which the work of `author` counted; None: an empty one."""
    id = f"{round}".encode().rjust(32)
    history = (*chain.history, (Worked(author, 1),)) if author is not None else chain.history
    after = replace(chain, round=round + 1, tip=id, history=history)
    return Block(id, chain.tip, after, None if author is None else WORK)  # type: ignore[arg-type]


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
