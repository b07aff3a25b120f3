"""How a ledger follows the chain that this node follows: each roster on the way, with what its quotes prove."""

from __future__ import annotations

import logging

from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.methods.open.store import Held
from swarmnode.protocols.reputation.account import RoundWork, proved
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import Ledger

logger = logging.getLogger(__name__)


def witness(ledger: Ledger, held: Held, to: Block) -> None:
    """Stand on a block of the tree, by way of all rosters since the last on which the ledger stood.

    Where that is none, as after catching up, it begins at the oldest block that is kept. A roster whose quotes are no
    longer here proves nothing, and the way goes on behind it.
    """
    way = held.tree.ancestry(to.id)
    known = next((index for index in reversed(range(len(way))) if ledger.stands(way[index])), None)
    if known is None:
        ledger.begin(held.tree[way[0]].chain)
        known = 0
    for parent, id in zip(way[known:], way[known + 1 :], strict=False):
        block = held.tree[id]
        ledger.follow(id, parent, _proved(held, block), round=block.chain.round)
    if known == len(way) - 1:
        ledger.go_to(to.id)
    _compare_heads(ledger, held)


def _compare_heads(ledger: Ledger, held: Held) -> None:
    """Hold the state hash that each elector signed against that of this node's own replay, once for each head."""
    for author, (_, said) in held.last_heads.items():
        own = held.states.hashes.get(said.what.roster)
        if own is not None and author in held.block.chain.electors:
            same = said.what.state == bytes.fromhex(own)
            ledger.observe_once(said.id, author, Saw.SYNC, good=int(same), bad=int(not same), evidence=said.what.roster)


def _proved(held: Held, block: Block) -> RoundWork | None:
    book = held.books.get(block.parent)
    if block.roster is None or book is None:
        return None
    try:
        quoted = book.quoted(block.roster.cuts, block.roster.scores, {})
        return proved(book.chain, block.id, block.roster, quoted)
    except KeyError as error:
        logger.debug("a roster of round %d cannot be read again: %s", block.roster.round, error)
        return None
