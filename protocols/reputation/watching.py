"""How a node keeps its ledger: it hears others' attestations, ends epochs, attests, and says who is to be kept out.

    watching = Watching(ledger, state=state, sync=sync, members=members)
    watching.sources.append(lambda ledger: …)      # called at the end of each epoch, to observe what was counted
    nursery.start_soon(watching.run)

Every EPOCH it asks its sources what they counted, ends the ledger's epoch, and notes an offence for each peer that
`Ledger.to_contain` names: `conduct` then slows, refuses and at last disconnects it. Every ATTEST_ROUNDS rounds it
attests. What it attests is write-once, so a restart in between says nothing again; where this node may not sign, it
does so later. It waits until a peer told it what it said, which a restored backup does not know by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from swarmnode.crdt.record import Element, Evidence, Record
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.peers.violations import Kind, Offences
from swarmnode.protocols.reputation.attestation import InvalidAttestation, read
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.state.backend import Said, StateBackend, StateError
from swarmnode.protocols.state.sync import StateSync

log = logging.getLogger(__name__)

EPOCH = 30.0  # seconds
ATTEST_ROUNDS = 4  # rounds from one attestation of a subject to the next: 128 rounds' worth fits into a kind's slots
READ = 16_384  # attestations read at the start; those of the newest rounds come by the feed
GUILTY = 4096  # proofs of equivocation read at once

KNOWN = Metric("swarmnode_reputation_peers", GAUGE, "peers of whom something is known, by what they are", "what")
TOLD = Metric("swarmnode_attestations_total", COUNTER, "attestations written, heard and refused", "what")

Source = Callable[[Ledger], None]


class Watching:
    """One node's, in one run. The ledger is public, for whoever asks it."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        state: StateBackend,
        sync: StateSync | None,
        members: Callable[[], int],
        round: Callable[[], int] = lambda: 0,
        kept: Callable[[Ledger], Awaitable[None]] | None = None,
    ) -> None:
        """`round`: of this node, where it has no chain; `kept` is called after each epoch, to keep what is known."""
        self.ledger, self._state, self._sync = ledger, state, sync
        self._members, self._round, self._kept = members, round, kept
        self.sources: list[Source] = []
        self.offences = Offences("reputation")
        self._said_at = -ATTEST_ROUNDS
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
        self.offences.measure(metrics)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        with self._state.watch("attestation") as changes:
            await self._read_all()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_epochs)
                task_status.started()
                async for change in changes:
                    self._hear(change.element)
                    if change.lost:
                        await self._read_all()

    async def _end_epochs(self) -> None:
        while True:
            await trio.sleep(EPOCH)
            await self.end_epoch()

    async def end_epoch(self) -> None:
        """Let what was seen count, and tell it where that is due."""
        for source in self.sources:
            source(self.ledger)
        self.ledger.close(self._round())
        await self._read_guilty()
        for peer in self.ledger.to_contain():
            self.offences.note(peer, "what it makes does not hold up, time after time", Kind.BREACH)
        if self.ledger.round >= self._said_at + ATTEST_ROUNDS:
            await self._attest()
        if self._kept is not None:
            await self._kept(self.ledger)

    async def _attest(self) -> None:
        if self._sync is None or not self._sync.remembered:  # whom nobody heard yet need not speak
            return
        for attestation in self.ledger.to_attest(self._members()):
            self._said_at = self.ledger.round
            try:
                await self._sync.write(attestation.key, attestation.value)
                self._counts["written"] += 1
            except Said:
                log.debug("%s was said before a restart, and nothing else is", attestation.key)
            except StateError as error:
                log.info("nothing can be attested now: %s", error)
                return
            self.ledger.said(attestation)

    async def _read_all(self) -> None:
        try:
            for element in await self._state.select("attestation/", limit=READ):
                self._hear(element)
        except StateError as error:
            log.warning("others' attestations could not be read: %s", error)

    async def _read_guilty(self) -> None:
        try:
            proofs = await self._state.select("evidence/attestation", limit=GUILTY)
        except StateError as error:
            log.warning("who equivocated about attestations could not be read: %s", error)
            return
        self.ledger.mistrust(frozenset(proof.author for proof in proofs if isinstance(proof, Evidence)))

    def _hear(self, element: Element) -> None:
        if not isinstance(element, Record) or element.author == self.ledger.me:
            return
        try:
            self.ledger.hear(read(element))
            self._counts["heard"] += 1
        except InvalidAttestation as error:
            self._counts["refused"] += 1
            log.debug("%s attests what nobody may: %s", element.author, error)
