"""Whom this node serves first, slows, refuses, bans and relays for: all of it is wired here, and nowhere else.

    what comes in    violations, which every protocol notes (`Violations`, in rpc, bulk, shards, state, methods);
                     verified work, which the ledger of the run counts (`protocols/reputation/ledger.py`);
                     receipts for what peers served and relayed
    what follows     peer scoring slows, refuses and bans who broke rules (`protocols/peers/scoring.py`);
                     shards and relays that are full serve those first of whom the ledger thinks well;
                     members' bytes are not held up; a relay carries members, and on `--role relay` all of our kind

Violations count twice: at once against what a peer is given, and in the ledger at the end of the epoch. Whoever did
harm round after round in the ledger's eyes commits a violation by that, and is slowed, refused and banned as well;
this one the ledger does not count again.

`reputation.json` in the run's folder holds what was seen until the last epoch. One that is damaged is put aside with a
warning: then this node knows of its peers what the chain and others tell, as a newcomer does.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.storage.datadir import DataDirError, write_atomic
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.method import Method
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.hello import PROTOCOL as HELLO
from swarmnode.protocols.reputation.ledger import Ledger, Reputation
from swarmnode.protocols.reputation.receipts import Receipts
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.backend import StateBackend
from swarmnode.protocols.state.membership import Membership
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shards import Shards

log = logging.getLogger(__name__)

NAME = "reputation.json"
MEMBERS_FOR = 1.0  # seconds for which the list of members is good enough to pace peers by


class PeerTrust:
    """What decides how one node treats its peers; `wire` once, then `join` and `take_part` where there is a run."""

    def __init__(self, *, relays_for_all: bool) -> None:
        """`relays_for_all`: not only for members of a run."""
        self.receipts = Receipts()
        self.reputation: Reputation | None = None  # in the run, once there is one
        self._relays_for_all = relays_for_all
        self._membership: Membership | None = None
        self._members: frozenset[PeerId] = frozenset()  # as seen at `_members_at`
        self._members_at = -math.inf

    def wire(self, network: Libp2pNetwork, rpc: Rpc, bulk: Bulk, shards: Shards) -> None:
        """Tie the parts of a node that are there without a run. Network and NAT traversal have our answers already."""
        self._network = network
        network.scoring.watch(rpc.violations, bulk.violations, shards.violations)
        shards.server.prefer(self.standing)

    async def join(
        self, folder: Path, *, state: StateBackend, sync: StateSync, membership: Membership, round: Callable[[], int]
    ) -> Reputation:
        """Tie the run: what keeps its ledger, in `folder`. `round`: rounds that this node has done."""
        self._membership = membership
        ledger = await kept_ledger(folder, self._network.me)
        self.reputation = Reputation(
            ledger,
            state=state,
            sync=sync,
            members=lambda: len(self._members_now()) + 1,
            round=round,
            kept=partial(keep_ledger, folder),
        )
        self.reputation.sources.append(self.receipts)
        self._network.scoring.watch(sync.violations, self.reputation.violations)
        self._network.scoring.ledger = ledger
        return self.reputation

    def take_part(self, method: Method) -> None:
        """Tie the exchange method of the run that was joined."""
        assert self.reputation is not None
        self.reputation.sources += method.sources
        self._network.scoring.watch(*method.violations)

    def standing(self, peer: PeerId) -> float:
        """What share of the places of this node a peer may have, 0 to 1; all are equal where there is no run."""
        return self.reputation.ledger.standing(peer) if self.reputation is not None else 1.0

    def relays_for(self, peer: PeerId) -> bool:
        """A node of a run relays for its members, one that only relays for all of our kind; not if they harm."""
        if self.reputation is not None and peer in self.reputation.ledger.to_contain():
            return False
        return self.is_member(peer) or (self._relays_for_all and self._network.speaks(peer, HELLO))

    def is_member(self, peer: PeerId) -> bool:
        """Whether the peer takes part in this node's run, so that its bytes are not held up."""
        return peer in self._members_now()

    def _members_now(self) -> frozenset[PeerId]:
        if self._membership is None:
            return frozenset()
        now = trio.current_time()
        if now - self._members_at > MEMBERS_FOR:
            self._members, self._members_at = frozenset(self._membership.members()), now
        return self._members


async def kept_ledger(folder: Path, me: PeerId) -> Ledger:
    """A ledger with what is kept in `folder`, the run's."""
    ledger = Ledger(me, now=lambda: time.time_ns() // 1_000_000)
    await in_thread(lambda: _restore(ledger, folder / NAME))
    return ledger


async def keep_ledger(folder: Path, ledger: Ledger) -> None:
    """Keep in `folder` what is known; a disk that takes nothing costs a warning."""
    kept = ledger.export()
    try:
        await in_thread(lambda: write_atomic(folder / NAME, json.dumps(kept).encode()))
    except DataDirError as error:
        log.warning("what is known of peers is not kept: %s", error)


def _restore(ledger: Ledger, path: Path) -> None:
    try:
        ledger.restore(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        aside = path.with_suffix(".damaged")
        log.warning("%s cannot be read and is put aside as %s: %s", path, aside.name, error)
        try:
            path.replace(aside)
        except OSError as second:
            log.warning("%s stays where it is: %s", path, second)
