"""Who takes part in a run, and where they can be dialled.

Each member signs a *lease*: a record of kind `member` with its addresses, renewed every 20 s and gone 60 s after its
last renewal. Leases spread by exchange: every few seconds a node sends all it holds to one connected member and gets
what that one holds; a new connection is an occasion as well, and so is `publish` when a node arrives. A lease is
signed by its author, so nobody can announce addresses for another; what is malformed or forged is counted against who
sent it. What is then true: members that can reach one another, through anybody, learn one another's addresses within
a few exchanges, and connect; one that died is forgotten by everybody within a minute.

Also here: `runs`, which tells a newcomer the runs of a peer, and `spec`, which gives it their specifications; the
newcomer checks them against their hash.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import trio

from swarmnode.crdt.hlc import HybridClock, StampAhead
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import InvalidRecord, Record, open_record, seal, write
from swarmnode.crdt.registers import Registers
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId
from swarmnode.protocols.rpc import CallError, Refuse, Rpc

logger = logging.getLogger(__name__)

RENEW_EVERY = 20.0  # seconds; three renewals fit into a lease
EXCHANGE_EVERY = 5.0  # seconds, jittered by half
CALL_TIMEOUT = 5.0  # seconds
MAX_LEASES = 512  # in one exchange
MAX_LEASE_BYTES = 512 * 1024  # in one exchange, half a control message; at ~400 bytes each, more than MAX_LEASES
MAX_SENDERS = 1024  # senders of invalid leases that are told apart
MAX_ADDRESSES = 8  # in a lease
CONNECT_TO = 48  # members to keep connections to; beyond that a round's group is reached when it is needed


@dataclass(frozen=True)
class RunsQuery:
    pass


@dataclass(frozen=True)
class RunListing:
    run_id: str
    name: str
    round: int
    members: int


@dataclass(frozen=True)
class Runs:
    runs: tuple[RunListing, ...]


@dataclass(frozen=True)
class SpecQuery:
    run_id: str


@dataclass(frozen=True)
class Spec:
    encoded: bytes


@dataclass(frozen=True)
class Leases:
    """`members.exchange`: all leases that a node holds, sealed; answered with the other's."""

    run_id: str
    sealed: tuple[bytes, ...]


class Membership:
    """This node's lease and those of others, in one run."""

    def __init__(
        self,
        *,
        run_id: str,
        network: Network,
        rpc: Rpc,
        clock: HybridClock,
        now: Callable[[], int],
        admits: Callable[[PeerId], bool] = lambda peer: True,
        rng: random.Random | None = None,
    ) -> None:
        """`now` gives real time in ms; `clock` is this node's own, which must never run backwards."""
        self._run_id = run_id
        self._network = network
        self._rpc = rpc
        self._clock = clock
        self._now = now
        self._admits = admits
        self._rng = rng or random.Random()
        self._leases = Registers(run_id)
        self.refused: dict[PeerId, int] = {}  # invalid leases received, by who sent them
        rpc.serve("members.exchange", Leases, self._on_exchange)
        network.subscribe(self._topic, self._on_published)

    @property
    def _topic(self) -> str:
        return f"/swarmnode/{self._run_id}/members"

    def members(self) -> tuple[PeerId, ...]:
        """Everybody with a lease that has not run out, this node left out, in order of peer id."""
        return tuple(r.author for r in self._leases.live(self._now()) if r.author != self._network.me)

    def connected(self) -> tuple[PeerId, ...]:
        """Members that this node has a connection to."""
        here = {view.peer for view in self._network.peers()}
        return tuple(p for p in self.members() if p in here)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Renew the lease, exchange, and keep connections to members until cancelled; then give the lease up."""
        self._renew()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._renew_forever)
                nursery.start_soon(self._greet_newly_connected)
                while True:
                    await trio.sleep(EXCHANGE_EVERY * self._rng.uniform(0.5, 1.5))
                    connected = self.connected() or tuple(view.peer for view in self._network.peers())
                    if connected:
                        await self._exchange_with(self._rng.choice(connected))
                    await self._connect_to_members(nursery)
        finally:
            with trio.move_on_after(1.0) as scope:
                scope.shield = True
                self._write(None)
                await self._publish_own()

    async def announce(self) -> None:
        """Tell everybody who listens that this node is here, and exchange with all connected peers at once."""
        self._renew()
        await self._publish_own()
        async with trio.open_nursery() as nursery:
            for view in self._network.peers():
                nursery.start_soon(self._exchange_with, view.peer)

    # --- own lease --------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        self._write({"addresses": tuple(self._network.addresses[:MAX_ADDRESSES])})

    def _write(self, value: dict[str, tuple[Address, ...]] | None) -> None:
        now = self._now()
        stamp = self._clock.tick(now)
        me = self._network.me
        self._leases.merge(write(self._run_id, me, "member", value, hlc=stamp, sign=self._network.sign), now)

    async def _renew_forever(self) -> None:
        while True:
            await trio.sleep(RENEW_EVERY)
            self._renew()
            self._leases.sweep(self._now())

    async def _publish_own(self) -> None:
        mine = [r for r in self._leases.held(self._now()) if r.author == self._network.me]
        for record in mine:
            await self._network.publish(self._topic, seal(record))

    # --- others' leases ---------------------------------------------------------------------------------------------

    async def _greet_newly_connected(self) -> None:
        with self._network.watch_peers() as events:
            async with trio.open_nursery() as nursery:
                async for event in events:
                    if event.up:
                        nursery.start_soon(self._exchange_with, event.peer)

    async def _exchange_with(self, peer: PeerId) -> None:
        try:
            theirs = await self._rpc.call(peer, "members.exchange", self._ours(), Leases, timeout=CALL_TIMEOUT)
        except CallError as error:
            logger.debug("no exchange of members with %s: %s", peer, error)
            return
        self._take(peer, theirs)

    async def _connect_to_members(self, nursery: trio.Nursery) -> None:
        here = {view.peer for view in self._network.peers()}
        if len(here) >= CONNECT_TO:
            return
        lacking = [p for p in self.members() if p not in here]

        async def dial(peer: PeerId) -> None:
            try:
                await self._network.connect(peer, timeout=CALL_TIMEOUT)
            except NetworkError as error:
                logger.debug("member %s cannot be reached: %s", peer, error)

        for peer in self._rng.sample(lacking, min(len(lacking), 4)):
            nursery.start_soon(dial, peer)

    def _ours(self) -> Leases:
        """This node's own and the newest others', as many as fit."""
        held = sorted(reversed(self._leases.held(self._now())), key=lambda r: r.author != self._network.me)
        sealed: list[bytes] = []
        room = MAX_LEASE_BYTES
        for record in held[:MAX_LEASES]:
            raw = seal(record)
            room -= len(raw)
            if room < 0:
                break
            sealed.append(raw)
        return Leases(self._run_id, tuple(sealed))

    async def _on_exchange(self, peer: PeerId, theirs: Leases) -> Leases:
        if theirs.run_id != self._run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        self._take(peer, theirs)
        return self._ours()

    async def _on_published(self, author: PeerId, sealed: bytes) -> None:
        self._take(author, Leases(self._run_id, (sealed,)))

    def _take(self, sender: PeerId, leases: Leases) -> None:
        now = self._now()
        for sealed in leases.sealed[:MAX_LEASES]:
            try:
                record = open_record(sealed, self._network.verify)
                if not self._admits(record.author) or record.author == self._network.me:
                    continue
                self._clock.observe(record.hlc, now)
                if self._leases.merge(record, now) is Merged.STORED:
                    self._learn(record)
            except (InvalidRecord, StampAhead) as error:
                if sender not in self.refused:
                    logger.warning("%s sent a lease that is not valid: %s", sender, error)
                    while len(self.refused) >= MAX_SENDERS:
                        del self.refused[next(iter(self.refused))]
                self.refused[sender] = self.refused.get(sender, 0) + 1

    def _learn(self, record: Record) -> None:
        match record.value:
            case {"addresses": (*addresses,)}:
                known = tuple(a for a in addresses[:MAX_ADDRESSES] if isinstance(a, str))
                self._network.learn(record.author, tuple(a for a in known if a.endswith(f"/p2p/{record.author}")))


def serve_runs(rpc: Rpc, runs: Callable[[], tuple[RunListing, ...]], spec: Callable[[str], bytes | None]) -> None:
    """Answer `runs` and `spec` from these callables; `spec(run_id)` is the encoded RunSpec or None."""

    async def on_runs(peer: PeerId, query: RunsQuery) -> Runs:
        return Runs(runs())

    async def on_spec(peer: PeerId, query: SpecQuery) -> Spec:
        encoded = spec(query.run_id)
        if encoded is None:
            raise Refuse("unknown-run", "this node does not know that run")
        return Spec(encoded)

    rpc.serve("runs", RunsQuery, on_runs)
    rpc.serve("spec", SpecQuery, on_spec)


async def ask_runs(rpc: Rpc, peer: PeerId) -> tuple[RunListing, ...]:
    """The runs that `peer` takes part in. Raises CallError."""
    return (await rpc.call(peer, "runs", RunsQuery(), Runs, timeout=CALL_TIMEOUT)).runs


async def ask_spec(rpc: Rpc, peer: PeerId, run_id: str) -> bytes:
    """The encoded specification of a run, as the peer sends it: check it with `runspec.decode`. Raises CallError."""
    return (await rpc.call(peer, "spec", SpecQuery(run_id), Spec, timeout=CALL_TIMEOUT)).encoded
