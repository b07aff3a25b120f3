"""What becomes of this node's work when it moves to another block, and what the round came to.

Work that a roster counts is settled; work that it leaves out returns to the residual, and so does, after a switch to
another fork or a revert, what an earlier roster had counted: no local work is lost. See `open_work` for the arithmetic.
"""

from __future__ import annotations

from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.state import participates
from swarmnode.protocols.chain.statements import ACCEPTED, ONE, VERDICTS, Entry
from swarmnode.protocols.methods.method import Completed, Partial
from swarmnode.protocols.methods.open.local import Work
from swarmnode.protocols.methods.open.store import Held
from swarmnode.protocols.methods.open.turn import Turn
from swarmnode.protocols.network import PeerId

NOT_LISTED = "in too few judges' lists"


class Settling:
    """Settles one node's work, block after block."""

    def __init__(self, me: PeerId, held: Held, work: Work) -> None:
        self._me, self._held, self._work = me, held, work
        self._counted: dict[bytes, bytes] = {}  # block -> own contribution that its roster counts

    async def settle(self, turn: Turn, to: Block) -> bool:
        """Settle the work of a turn that ends with a move to this block of the tree; whether the round counted it."""
        held, tree = self._held, self._held.tree
        fork, path = tree.fork_point(turn.chain.tip, to.id), tree.path(to.id)
        first = path[len(tree.path(fork))] if fork == turn.chain.tip else None
        mine = turn.own.commit
        entries = first.roster.entries if first is not None and first.roster is not None else ()
        entry = next((entry for entry in entries if mine is not None and entry.commit == mine.id), None)
        counted = entry is not None and entry.verdict == ACCEPTED and turn.has_offer(self._work)
        if counted and first is not None and self._work.offer is not None:
            self._counted[first.id] = self._work.offer.root
        await self._settle_offer(entry, counted)
        kept = {block.id for block in path}
        reverted = {block.parent for block in path if block.roster is not None and block.roster.revert}
        for id in [id for id in self._counted if id not in kept or id in reverted]:
            root = self._counted.pop(id)
            if root in held.contributions:
                await self._work.return_encoded(held.contributions[root].raw)
        return counted

    async def _settle_offer(self, entry: Entry | None, counted: bool) -> None:
        """What the round made of this node's contribution."""
        if entry is None:
            self._work.take_back()
            return
        root = self._work.offer.root if self._work.offer is not None else b""
        await self._work.settle(accepted=counted)
        if counted and entry.clip < ONE:
            await self._work.return_encoded(self._held.contributions[root].raw, 1 - entry.clip / ONE)

    def forget(self) -> None:
        """Let go of blocks that the tree has forgotten."""
        self._counted = {id: root for id, root in self._counted.items() if id in self._held.tree}

    def outcome(self, turn: Turn, block: Block, counted: bool) -> Completed | Partial:
        """What the round that `block` ended came to: missing is whose work counted before and does not now."""
        before = {worked.author for worked in turn.chain.history[-1]} if turn.chain.history else set()
        accepted = accepted_in(block)
        missing = (before - accepted) if block.roster is not None else set()
        if not counted and participates(turn.chain, self._me):
            missing.add(self._me)
        members = len(accepted)
        return Partial(members, tuple(sorted(missing))) if missing else Completed(members)


def accepted_in(block: Block) -> set[PeerId]:
    """Authors whose work a roster accepted."""
    if block.roster is None or not block.chain.history or not block.roster.accepted:
        return set()
    return {worked.author for worked in block.chain.history[-1]}


def verdicts_in(held: Held, block: Block) -> dict[PeerId, str]:
    """What a roster says of each author's contribution, in words; nothing where the round's book is not here."""
    book = held.books.get(block.parent)
    if book is None or block.roster is None:
        return {}
    found = {said.author: NOT_LISTED for said in book.commits.values()}
    for entry in block.roster.entries:
        if entry.commit in book.commits:
            found[book.commits[entry.commit].author] = VERDICTS[entry.verdict]
    return found
