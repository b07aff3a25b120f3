"""Who takes part in a run, and where they can be dialled.

Each member signs a *lease*: a record of kind `member` with its addresses and how long it lasts, in the replicated
state (`sync`); this module writes this node's and folds those of others. How long leases last, and how they spread:
docs/architecture.md, "Membership and discovery". Whose lease ran out without a goodbye is called now and then for an
hour yet: both parts of a swarm that was cut in two for longer than leases last would else wait for one another.

A lease also tells two daemons with one key apart, see `DuplicateIdentity`.

Who may take part is for the run to say (`admitted`): anybody, those that it lists, or those whose key cost work, by
S/Kademlia's static puzzle (Baumgart and Mies 2007, section 4.1; docs/identities.md). Records of authors who are not
admitted are in no state that nodes share (`crdt/law.py`), so such an author has no lease, no commit and no vote.

Also here: `runs`, which tells a newcomer the runs of a peer, and `spec`, which gives it their specifications; the
newcomer checks them against their hash.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import lru_cache

import base58
import trio

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import time_of
from swarmnode.crdt.kinds import KINDS, SECOND
from swarmnode.crdt.law import EVERYBODY
from swarmnode.crdt.record import Element, Record
from swarmnode.protocols.calls.rpc import Refuse, Rpc
from swarmnode.protocols.network import Address, Network, NetworkError, PeerId
from swarmnode.protocols.state.backend import Change, StateBackend, StateError
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.wire import Empty, RunQuery
from swarmnode.training.runspec import RunSpec

logger = logging.getLogger(__name__)

KIND = "member"
SHORTEST_LEASE = 60  # seconds
FEW = 64  # members up to which leases are the shortest
RENEWALS = 3  # of a lease, until it runs out
RENEW_EVERY = SHORTEST_LEASE / RENEWALS  # seconds, of the shortest; as often addresses that changed are told
CONNECT_EVERY = 5.0  # seconds, jittered by half
CALL_TIMEOUT = 5.0  # seconds
ANSWERED_AFTER = (1.0, 2.0, 4.0, 8.0)  # seconds between looks for the answer of another daemon with this key
MAX_LEASES = 4096  # kept: of more members, those that this node is connected to or knew first
AT_ONCE = 64  # leases looked at before others have their turn: 10 ms
MAX_ADDRESSES = 8  # in a lease
MAX_ADDRESS_BYTES = 600  # of all addresses in a lease: it has 1 KiB for everything
CALLED_FOR = 3600.0  # seconds after its lease ran out, that one who said no goodbye is called now and then
MAX_GONE = 256  # of them at the most, those who went last
MAX_RIVALS = 16  # earlier lives of this node whose leases are answered once
CONNECT_TO = 48  # members to keep connections to; beyond that a round's group is reached when it is needed
_ED25519 = bytes.fromhex("002408011220")  # identity multihash of a protobuf Ed25519 public key (libp2p spec, peer-ids)


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
class Spec:
    encoded: bytes


class KeyInUse(Exception):
    """Another daemon with this node's key is alive and older. The text is fit for a person."""


class DuplicateIdentity:
    """Two daemons with one key find each other, and the younger stops.

    They cannot meet: to the network they are one peer. But each reads the leases that the other signs in their common
    name. A lease carries the number that its daemon drew when it started and since when it runs; whoever reads a lease
    of its own name and another number answers with a lease that names that number as its rival. A lease that names
    *this* daemon as its rival was signed after this one started, so the other is alive: no clock and no message of a
    dead life can feign it. The older goes on, the younger raises KeyInUse; what it signed until then may have been
    replaced.

    `instance` is a random number, `since` the ms at which this daemon started.
    """

    def __init__(self, instance: int, since: int) -> None:
        self._instance = instance
        self._since = since
        self._rival: int | None = None
        self._answered: set[int] = set()

    @property
    def mark(self) -> dict[str, int]:
        """What a lease of this daemon says about it."""
        return {"instance": self._instance, "since": self._since, **({"rival": self._rival} if self._rival else {})}

    def saw(self, lease: Value) -> bool:
        """Look at a lease in this node's name; whether it is to be answered by another. Raises KeyInUse."""
        match lease:
            case None:
                return True  # another life gave up the lease, and this one goes on
            case {"instance": int() as other, "since": int() as since, **rest} if other != self._instance:
                named = rest.get("rival") == self._instance
            case _:
                return False
        self._rival = other
        if not named:
            first = other not in self._answered and len(self._answered) < MAX_RIVALS
            if first:
                self._answered.add(other)
            return first
        if (since, other) < (self._since, self._instance):
            seconds = (self._since - since) // 1000
            raise KeyInUse(
                f"another daemon runs with this node's key, since {seconds} s before this one. Two with one key are "
                "taken for one that lies. Stop the other first, or give this one a key of its own (another --data-dir)"
            )
        return True


class Membership:
    """This node's lease and those of others, in one run."""

    def __init__(
        self, *, network: Network, state: StateBackend, sync: StateSync, rng: random.Random | None = None
    ) -> None:
        """`state` and `sync` run for as long as this does, and a little longer."""
        self._network = network
        self._state = state
        self._sync = sync
        self._rng = rng or random.Random()
        self._duplicates = DuplicateIdentity(self._rng.getrandbits(63), state.now())
        self._leases: dict[PeerId, Record] = {}
        self._gone: dict[PeerId, float] = {}  # whose leases ran out, in that order, and when, trio time
        self._lasts, self._renewed = SHORTEST_LEASE, 0  # own lease: seconds, and ms on the state's clock, as it ends
        self._published: tuple[Address, ...] = ()  # addresses in it
        self._displaced: KeyInUse | None = None
        self._seen_duplicate = trio.Event()  # another life of this node signed a lease
        self.complaint = ""  # why this node has no lease now, for its owner

    def members(self) -> tuple[PeerId, ...]:
        """Everybody with a lease that has not run out, this node left out, in order of peer id."""
        now = self._state.now()
        return tuple(sorted(peer for peer, lease in self._leases.items() if lease_end(lease) > now))

    def connected(self) -> tuple[PeerId, ...]:
        here = {view.peer for view in self._network.peers()}
        return tuple(p for p in self.members() if p in here)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Renew the lease, follow those of others, keep connections to members until cancelled; then give it up.

        Raises KeyInUse where an older daemon has this node's key.
        """
        with self._state.watch(KIND) as changes:
            await self._look_at_all()
            await self._renew()
            task_status.started()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._renew_forever)
                    nursery.start_soon(self._look_for_answers)
                    nursery.start_soon(self._follow, changes, nursery.cancel_scope)
                    while True:
                        await trio.sleep(CONNECT_EVERY * self._rng.uniform(0.5, 1.5))
                        self._connect_to_members(nursery)
            finally:
                if self._displaced is None:
                    with trio.move_on_after(1.0) as scope:
                        scope.shield = True
                        await self._write(None)
                        await self._sync.flush()
            assert self._displaced is not None
            raise self._displaced

    async def announce(self) -> None:
        """Tell the swarm that this node is here, and repair with all connected peers at once."""
        await self._renew()
        with trio.move_on_after(CALL_TIMEOUT):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sync.flush)
                nursery.start_soon(self._sync.repair_with_all)

    # --- own lease --------------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        self._lasts, self._renewed = lease_of(len(self.members()) + 1), self._state.now()
        self._published = self._addresses()
        await self._write({"addresses": self._published, "lasts": self._lasts, **self._duplicates.mark})

    def _addresses(self) -> tuple[Address, ...]:
        addresses: list[Address] = []
        for address in self._network.addresses[:MAX_ADDRESSES]:
            if sum(len(each.encode()) for each in (*addresses, address)) <= MAX_ADDRESS_BYTES:
                addresses.append(address)
        return tuple(addresses)

    async def _write(self, value: dict[str, tuple[Address, ...] | int] | None) -> None:
        try:
            await self._sync.write(KIND, value)
            self.complaint = ""
        except StateError as error:
            if not self.complaint:
                logger.warning("this node cannot renew its lease: %s", error)
            self.complaint = str(error)

    async def _renew_forever(self) -> None:
        while True:
            await trio.sleep(RENEW_EVERY)
            age = abs(self._state.now() - self._renewed) / 1000  # a machine that slept finds it old
            due = age >= self._lasts / RENEWALS - RENEW_EVERY / 2
            if due or self.complaint or self._addresses() != self._published:
                await self._renew()
            self._let_go()

    def _let_go(self) -> None:
        """Leases that have run out are no more; their authors are called now and then."""
        now, moment = self._state.now(), trio.current_time()
        for peer in [peer for peer, lease in self._leases.items() if lease_end(lease) <= now]:
            del self._leases[peer]
            self._gone[peer] = moment
        recent = [(peer, at) for peer, at in self._gone.items() if moment - at < CALLED_FOR]
        self._gone = dict(recent[-MAX_GONE:])

    async def _look_for_answers(self) -> None:
        """Fetch what another daemon with this key answers: to peers both are one, and what they push reaches one."""
        while True:
            await self._seen_duplicate.wait()
            self._seen_duplicate = trio.Event()
            for wait in ANSWERED_AFTER:
                await trio.sleep(wait)
                await self._sync.repair_with_all()

    # --- others' leases ---------------------------------------------------------------------------------------------

    async def _follow(self, changes: trio.MemoryReceiveChannel[Change], life: trio.CancelScope) -> None:
        try:
            async for change in changes:
                await self._look_at(change.element)
                if change.lost:
                    await self._look_at_all()
        except KeyInUse as error:
            self._displaced = error
            life.cancel()

    async def _look_at_all(self) -> None:
        for number, element in enumerate(await self._state.readable(KIND, MAX_LEASES, "leases"), 1):
            await self._look_at(element)
            if number % AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    async def _look_at(self, element: Element) -> None:
        if not isinstance(element, Record):
            return
        if element.author == self._network.me:
            if self._duplicates.saw(element.value):
                self._seen_duplicate.set()
                await self._renew()
        elif element.author in self._state.admitted:
            standing = self._leases.get(element.author)
            news = self._has_room(element.author) if standing is None else standing.rank <= element.rank
            if news:
                self._gone.pop(element.author, None)
                self._leases[element.author] = element
                self._learn(element)
                if element.tombstone:
                    del self._leases[element.author]

    def _has_room(self, peer: PeerId) -> bool:
        """Whether one more lease may be kept; where there are MAX_LEASES, who is connected displaces one who is not."""
        if len(self._leases) < MAX_LEASES:
            return True
        here = {view.peer for view in self._network.peers()}
        last = next((each for each in reversed(self._leases) if each not in here), None)
        if peer in here and last is not None:
            del self._leases[last]
        return len(self._leases) < MAX_LEASES

    def _learn(self, record: Record) -> None:
        match record.value:
            case {"addresses": (*addresses,)}:
                known = (a for a in addresses[:MAX_ADDRESSES] if isinstance(a, str))
                own = (a for a in known if a.endswith(f"/p2p/{record.author}"))
                # A name may stand for hundreds of addresses, of anybody, that all members would dial.
                self._network.learn(record.author, tuple(a for a in own if not a.startswith("/dnsaddr/")))

    def _connect_to_members(self, nursery: trio.Nursery) -> None:
        here = {view.peer for view in self._network.peers()}
        lacking = [p for p in self.members() if p not in here] if len(here) < CONNECT_TO else []
        gone = [p for p in self._gone if p not in here]

        async def dial(peer: PeerId) -> None:
            try:
                await self._network.connect(peer, timeout=CALL_TIMEOUT)
            except NetworkError as error:
                logger.debug("member %s cannot be reached: %s", peer, error)

        for peer in (*self._rng.sample(lacking, min(len(lacking), 4)), *self._rng.sample(gone, min(len(gone), 1))):
            nursery.start_soon(dial, peer)


def lease_of(members: int) -> int:
    """Seconds that a lease lasts in a swarm of so many."""
    return min(SHORTEST_LEASE * max(members, FEW) // FEW, KINDS[KIND].ttl // SECOND)


def lease_end(record: Record) -> int:
    """The first ms at which a lease has run out: as long after it was signed as it says, and no later than its ttl.

    One that says nothing of the kind lasts SHORTEST_LEASE.
    """
    lasts = record.value.get("lasts") if isinstance(record.value, Mapping) else None
    seconds = lasts if isinstance(lasts, int) and not isinstance(lasts, bool) and lasts > 0 else SHORTEST_LEASE
    return min(record.expiry, time_of(record.hlc) + seconds * SECOND)


def admitted(spec: RunSpec) -> Container[str]:
    """Who may take part in the run. Those whom the run names need no work: its author vouches for them."""
    if spec.run.members:
        return frozenset(spec.run.members)
    bits, named = spec.trust.identity_bits, frozenset((*spec.trust.validators, spec.owner)) - {""}
    return _Worked(bits, named) if bits else EVERYBODY


@dataclass(frozen=True)
class _Worked:
    """Those with so many bits of work in their ids, and those who are named."""

    bits: int
    named: frozenset[str]

    def __contains__(self, peer: object) -> bool:
        return peer in self.named or work_of(str(peer)) >= self.bits


@lru_cache(maxsize=8192)
def work_of(peer: str) -> int:
    """Bits of work in a peer id; -1 where it is not that of an Ed25519 key."""
    try:
        raw = base58.b58decode(peer) if peer.isascii() and peer.isalnum() else b""
    except ValueError:
        return -1
    if len(raw) != len(_ED25519) + 32 or not raw.startswith(_ED25519):
        return -1
    return work_of_key(raw[len(_ED25519) :])


def work_of_key(public_key: bytes) -> int:
    """Zero bits at the front of sha-256(sha-256(key)), of a raw public key of 32 bytes; 256 at the most."""
    hashed = hashlib.sha256(hashlib.sha256(public_key).digest()).digest()
    return 256 - int.from_bytes(hashed, "big").bit_length()


def serve_runs(rpc: Rpc, runs: Callable[[], tuple[RunListing, ...]], spec: Callable[[str], bytes | None]) -> None:
    """Answer `runs` and `spec` from these callables; `spec(run_id)` is the encoded RunSpec or None."""

    async def on_runs(peer: PeerId, query: Empty) -> Runs:
        return Runs(runs())

    async def on_spec(peer: PeerId, query: RunQuery) -> Spec:
        encoded = spec(query.run_id)
        if encoded is None:
            raise Refuse("unknown-run", "this node does not know that run")
        return Spec(encoded)

    rpc.serve("runs", Empty, on_runs)
    rpc.serve("spec", RunQuery, on_spec)


async def ask_runs(rpc: Rpc, peer: PeerId) -> tuple[RunListing, ...]:
    """The runs that `peer` takes part in. Raises CallError."""
    return (await rpc.call(peer, "runs", Empty(), Runs, timeout=CALL_TIMEOUT)).runs


async def ask_spec(rpc: Rpc, peer: PeerId, run_id: str) -> bytes:
    """The encoded specification of a run, as the peer sends it: check it with `runspec.decode`. Raises CallError."""
    return (await rpc.call(peer, "spec", RunQuery(run_id), Spec, timeout=CALL_TIMEOUT)).encoded
