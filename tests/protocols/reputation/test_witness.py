"""A ledger that follows a node along its chain, also over forks and after catching up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from chains import RULES, block, fair, offer, say, start

from swarmnode.protocols.chain.duty import RoundLog
from swarmnode.protocols.chain.forks import Block, Tree, empty_block
from swarmnode.protocols.chain.rules import Quoted
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import ForkChoiceVote
from swarmnode.protocols.methods.open.method import update_ledger
from swarmnode.protocols.reputation.attestation import Finding, Saw
from swarmnode.protocols.reputation.ledger import Ledger

JUDGES = ("ann", "bob", "cat", "dan", "eli", "fay", "gus")


class Chain:
    """A tree with the logs of its rounds, as `ChainStore` has them."""

    def __init__(self) -> None:
        self.chain = start(JUDGES)
        self.store: Any = SimpleNamespace(
            tree=Tree(self.chain),
            logs={self.chain.tip: RoundLog(self.chain, RULES)},
            last_heads={},
            hashes={},
            block=SimpleNamespace(chain=self.chain),
        )

    def hears_head(self, author: str, at: Block, state: bytes) -> None:
        self.store.last_heads[author] = ((1, b""), say(author, ForkChoiceVote(at.id, at.chain.round, state)))

    def grow(self, at: ChainState, gains: dict[str, int]) -> Block:
        offers = [offer(at, author, gain=gain) for author, gain in gains.items()]
        quoted = fair(at, offers)
        return self._add(block(at, RULES, quoted), quoted)

    def empty(self, at: ChainState) -> Block:
        return self._add(empty_block(at), None)

    def _add(self, new: Block, quoted: Quoted | None) -> Block:
        if quoted is not None:
            book = self.store.logs[new.parent]
            book.commits.update(quoted.commits)
            book.cuts.update({cut.id: cut for cut in quoted.cuts})
            book.scores.update({scores.id: scores for scores in quoted.scores})
        self.store.tree.add(new)
        self.store.logs[new.id] = RoundLog(new.chain, RULES)
        return new


def ledger() -> Ledger:
    return Ledger("ann", now=lambda: 0)


def test_all_rosters_on_the_way_count_and_empty_ones_do_not() -> None:
    chain, mine = Chain(), ledger()
    first = chain.grow(chain.chain, {"ann": 1000, "zoe": 1000})
    update_ledger(mine, chain.store, first)
    last = chain.grow(chain.empty(chain.grow(first.chain, {"ann": 1000, "zoe": 1000}).chain).chain, {"zoe": 1000})
    update_ledger(mine, chain.store, last)
    assert mine.accounts()["zoe"].rounds == 3
    assert mine.round == last.chain.round == 4


def test_a_node_that_goes_back_to_another_fork_has_the_accounts_of_that_fork() -> None:
    chain, mine = Chain(), ledger()
    root = chain.grow(chain.chain, {"ann": 1000, "zoe": 1000})
    here, there = chain.grow(root.chain, {"ann": 1000, "zoe": -1000}), chain.empty(root.chain)
    for stop, strikes in ((here, 1), (there, 0), (here, 1)):
        update_ledger(mine, chain.store, stop)
        assert mine.accounts()["zoe"].strikes == strikes


def test_two_nodes_that_measured_nothing_themselves_make_the_same_of_a_chain() -> None:
    chain = Chain()
    last = chain.grow(chain.grow(chain.chain, {"bob": 1000, "zoe": -500}).chain, {"bob": 800, "zoe": 1200})
    views = []
    for name in ("watcher", "joiner"):
        mine = Ledger(name, now=lambda: 0)
        update_ledger(mine, chain.store, last)
        views.append(mine.accounts())
    assert views[0] == views[1]


def test_a_roster_whose_quotes_are_gone_proves_nothing_and_stops_nobody() -> None:
    chain, mine = Chain(), ledger()
    last = chain.grow(chain.grow(chain.chain, {"zoe": 1000}).chain, {"zoe": 1000})
    chain.store.logs[chain.chain.tip].scores.clear()
    update_ledger(mine, chain.store, last)
    assert mine.accounts()["zoe"].rounds == 1


def test_a_validator_who_signs_another_state_than_the_replay_gives_offends_once() -> None:
    chain, mine = Chain(), ledger()
    last = chain.grow(chain.chain, {"ann": 1000, "bob": 1000, "cat": 1000})
    chain.store.hashes[last.id] = (b"\1" * 32).hex()
    chain.hears_head("bob", last, b"\1" * 32)
    chain.hears_head("cat", last, b"\2" * 32)
    chain.hears_head("stranger", last, b"\2" * 32)
    for _ in range(3):
        update_ledger(mine, chain.store, last)
    mine.close()
    assert Finding(Saw.SYNC, 1, 0, last.id[:16]) in mine.found("bob")
    assert Finding(Saw.SYNC, 0, 1, last.id[:16]) in mine.found("cat")
    assert mine.found("stranger") == ()
    assert mine.view()["cat"].score < mine.view()["bob"].score
