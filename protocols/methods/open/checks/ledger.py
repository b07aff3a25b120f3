"""How a ledger follows the chain that this node follows: each roster on the way, with what its quotes prove."""

from __future__ import annotations

import logging

from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.protocols.reputation.account import RoundWork, proved
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import Ledger

logger = logging.getLogger(__name__)


def update_ledger(ledger: Ledger, store: ChainStore, to: Block) -> None:
    """Stand on a block of the tree, by way of all rosters since the last on which the ledger stood.

    Where that is none, as after catching up, it begins at the oldest block that is kept. A roster whose quotes are no
    longer here proves nothing, and the way goes on behind it.
    """
    way = store.tree.ancestry(to.id)
    known = next((index for index in reversed(range(len(way))) if ledger.stands(way[index])), None)
    if known is None:
        ledger.begin(store.tree[way[0]].chain)
        known = 0
    for parent, id in zip(way[known:], way[known + 1 :], strict=False):
        block = store.tree[id]
        ledger.follow(id, parent, _proved(store, block), round=block.chain.round)
    if known == len(way) - 1:
        ledger.go_to(to.id)
    _compare_heads(ledger, store)


def _compare_heads(ledger: Ledger, store: ChainStore) -> None:
    """Hold the state hash that each validator signed against that of this node's own replay, once for each head."""
    for author, (_, said) in store.last_heads.items():
        own = store.hashes.get(said.what.roster)
        if own is not None and author in store.block.chain.validators:
            same = said.what.state == bytes.fromhex(own)
            ledger.observe_once(said.id, author, Saw.SYNC, good=int(same), bad=int(not same), evidence=said.what.roster)


def _proved(store: ChainStore, block: Block) -> RoundWork | None:
    log = store.logs.get(block.parent)
    if block.roster is None or log is None:
        return None
    try:
        quoted = log.quoted(block.roster, {})
        return proved(log.chain, block.id, block.roster, quoted)
    except KeyError as error:
        logger.debug("a roster of round %d cannot be read again: %s", block.roster.round, error)
        return None
