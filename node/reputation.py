"""Whom this node serves first, slows, refuses, bans and relays for: all of it is wired here, and nowhere else.

    what comes in    violations, which every protocol notes (`Violations`, in rpc, bulk, shards, state, methods);
                     verified work, which the ledger of the run counts (`protocols/reputation/ledger.py`);
                     promises of shards, kept and broken
    what follows     peer scoring slows, refuses and bans who broke rules (`protocols/peers/scoring.py`);
                     shards and relays that are full serve those first of whom the ledger thinks well;
                     members' bytes are not held up; a relay carries members, and on `--role relay` all of our kind

Violations count twice: at once against what a peer is given, and, but for strangers of whom it has no account, in the
ledger at the end of the epoch. Whoever did harm round after round in the ledger's eyes commits a violation by that, and
is slowed, refused and banned as well; this one the ledger does not count again.

`reputation.json` in the run's folder holds what was seen until the last epoch. One that is damaged is put aside with a
warning: then this node knows of its peers what the chain and others tell, as a newcomer does.
"""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path

import trio

from swarmnode.crdt.record import Element, InvalidRecord, Record
from swarmnode.node.host.allowances import PeerPolicy
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.storage.datadir import DataDirError, write_atomic
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.method import Method
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.hello import PROTOCOL as HELLO
from swarmnode.protocols.peers.scoring import Kind, Violations
from swarmnode.protocols.reputation.attestation import read
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.observations import Promises
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.backend import AlreadyWritten, StateBackend, StateError
from swarmnode.protocols.state.membership import Membership
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shards import Shards

log = logging.getLogger(__name__)

NAME = "reputation.json"
MEMBERS_FOR = 1.0  # seconds for which the list of members is good enough to pace peers by
EPOCH = 30.0  # seconds
ATTEST_ROUNDS = 4  # rounds from one attestation of a subject to the next: 128 rounds' worth fits into a kind's slots
AT_ONCE = 64  # attestations heard before others have their turn
READ = 16_384  # attestations read at the start; those of the newest rounds come by the feed

KNOWN = Metric("swarmnode_reputation_peers", GAUGE, "peers of whom something is known, by what they are", "what")
TOLD = Metric("swarmnode_attestations_total", COUNTER, "attestations written, heard and refused", "what")


class PeerTrust(PeerPolicy):
    """What decides how one node treats its peers; `wire` once, then `join` and `take_part` where there is a run."""

    def __init__(self, *, relays_for_all: bool) -> None:
        """`relays_for_all`: not only for members of a run."""
        self.promises = Promises()
        self.reputation: Reputation | None = None  # in the run, once there is one
        self._relays_for_all = relays_for_all
        self._membership: Membership | None = None
        self._members: frozenset[PeerId] = frozenset()  # as seen at `_members_at`
        self._members_at = -math.inf

    def wire(self, network: Libp2pNetwork, rpc: Rpc, bulk: Bulk, shards: Shards) -> None:
        """Tie the parts of a node that are there without a run. Network and NAT traversal have our answers already."""
        self._network = network
        network.scoring.watch(rpc.violations, bulk.violations, shards.violations)

    async def join(self, folder: Path, *, state: StateBackend, sync: StateSync, membership: Membership) -> Reputation:
        """Tie the run: what keeps its ledger, in `folder`."""
        self._membership = membership
        ledger = Ledger(self._network.me, now=lambda: time.time_ns() // 1_000_000)
        file = folder / NAME
        await in_thread(lambda: restore(ledger, file))
        self.reputation = Reputation(
            ledger, state=state, sync=sync, membership=membership, promises=self.promises, file=file
        )
        self._network.scoring.watch(sync.violations, self.reputation.violations)
        self._network.scoring.remember = self._remember
        return self.reputation

    def _remember(self, peer: PeerId, kind: Kind) -> None:
        """Strangers, who are as many as they like, get no account here that others would be forgotten for."""
        if self.reputation is not None and (self.is_member(peer) or peer in self.reputation.ledger):
            self.reputation.ledger.offended(peer, kind)

    def take_part(self, method: Method) -> None:
        """Tie the exchange method of the run that was joined."""
        assert self.reputation is not None
        self.reputation.method = method
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
        if self._membership is None:
            return False
        now = trio.current_time()
        if now - self._members_at > MEMBERS_FOR:
            self._members, self._members_at = frozenset(self._membership.members()), now
        return peer in self._members


class Reputation:
    """Keeps one node's ledger in one run. The ledger is public, for whoever asks it.

    It hears others' attestations. Every EPOCH it has told to the ledger what was counted, ends the ledger's epoch, and
    notes a violation for each peer that `Ledger.to_contain` names: peer scoring then slows, refuses and at last
    disconnects it. Every ATTEST_ROUNDS rounds it attests. What it attests is write-once, so a restart in between says
    nothing again; where this node may not sign, it does so later. It waits until a peer told it what it said, which a
    restored backup does not know by itself.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        state: StateBackend,
        sync: StateSync,
        membership: Membership,
        promises: Promises,
        file: Path | None = None,
    ) -> None:
        """`file`: where the ledger is kept after each epoch; None keeps it in memory alone."""
        self.ledger, self._state, self._sync = ledger, state, sync
        self._membership, self._promises, self._file = membership, promises, file
        self.method: Method | None = None  # once this node takes part
        self.violations = Violations("reputation", in_ledger=False)
        self._attested_at = -ATTEST_ROUNDS
        self._counts = {"written": 0, "heard": 0, "refused": 0}

    def measure(self, metrics: Metrics) -> None:
        def known() -> dict[str, int]:
            view = self.ledger.view().values()
            return {
                "verified": sum(not one.probation for one in view),
                "probation": sum(one.probation and not one.contained for one in view),
                "contained": sum(one.contained for one in view),
            }

        metrics.show(KNOWN, known)
        metrics.show(TOLD, lambda: self._counts)
        self.violations.measure(metrics)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        with self._state.watch("attestation") as changes:
            await self._read_all()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_epochs)
                task_status.started()
                async for change in changes:
                    self._insert(change.element)
                    if change.lost:
                        await self._read_all()

    async def _end_epochs(self) -> None:
        while True:
            await trio.sleep(EPOCH)
            await self.end_epoch()

    async def end_epoch(self) -> None:
        """Let what was seen count, tell it where that is due, and keep it on the disk."""
        self._promises.tell(self.ledger)
        place = None
        if self.method is not None:
            self.method.tell_ledger(self.ledger)
            place = self.method.place
        self.ledger.close(place.round if place is not None else None)
        try:
            self.ledger.mistrust(await self._state.authors("evidence/attestation"))
        except StateError as error:
            log.warning("who equivocated about attestations could not be read: %s", error)
        for peer in self.ledger.to_contain():
            self.violations.note(peer, "what it makes does not hold up, time after time", Kind.BREACH)
        if self.ledger.round >= self._attested_at + ATTEST_ROUNDS:
            await self._attest()
        if (file := self._file) is not None:
            kept = self.ledger.export()
            try:
                await in_thread(lambda: write_atomic(file, json.dumps(kept).encode()))
            except DataDirError as error:
                log.warning("what is known of peers is not kept: %s", error)

    async def _attest(self) -> None:
        if not self._sync.remembered:  # whom nobody heard yet need not speak
            return
        for attestation in self.ledger.to_attest(len(self._membership.members()) + 1):
            self._attested_at = self.ledger.round
            try:
                await self._sync.write(attestation.key, attestation.value)
                self._counts["written"] += 1
            except (AlreadyWritten, InvalidRecord) as error:  # said before a restart; a name that fits no key
                log.debug("%s is not said: %s", attestation.key, error)
            except StateError as error:
                log.info("nothing can be attested now: %s", error)
                return
            self.ledger.published(attestation)

    async def _read_all(self) -> None:
        for number, element in enumerate(await self._state.readable("attestation/", READ, "others' attestations"), 1):
            self._insert(element)
            if number % AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _insert(self, element: Element) -> None:
        if not isinstance(element, Record) or element.author == self.ledger.me:
            return
        try:
            self.ledger.insert(read(element))
            self._counts["heard"] += 1
        except InvalidRecord as error:
            self._counts["refused"] += 1
            log.debug("%s attests what nobody may: %s", element.author, error)


def restore(ledger: Ledger, path: Path) -> None:
    """Take up what was kept, if anything. Blocking."""
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
