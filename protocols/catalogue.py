"""The catalogue: runs that want members, and how much of what is said of them holds.

    found = await catalogue.search(within=15.0)

A member of a run signs a *listing*: at most 1 KiB that says which run it is and where to join it, good for an hour. It
announces KEY in the DHT, and answers the call `catalogue`. A node in no run, such as a seed, asks whoever connects to
it, keeps what they sign for themselves, and hands that on; who searches asks its peers and the providers of KEY.

Messages: `catalogue` (no fields) is answered by Listings, each with its author and a sealed envelope (`crdt.envelope`)
of a ListedRun, the most believable first.

What liars can do, and what is then true, is in docs/finding.md: nobody can forge or bring back another's listing, a
keeper gives up listings of the network (/24) that has most of them, and a run is found only when an author answers and
gives a specification with that hash.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from time import time as wall_clock  # seconds since 1970

import trio

from swarmnode.crdt.envelope import SEAL, Domain, InvalidEnvelope, unsealed
from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.limits import Allowance, Budget
from swarmnode.protocols.network import Network, PeerId
from swarmnode.protocols.peers.diversity import network_of, spread
from swarmnode.protocols.peers.scoring import Kind
from swarmnode.protocols.state.membership import RunListing, ask_runs, ask_spec
from swarmnode.protocols.wire import Empty, WireError, decode, plain
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec
from swarmnode.training.runspec import decode as decode_spec

log = logging.getLogger(__name__)

KEY = hashlib.sha256(b"swarmnode catalogue 2").digest()  # under which members of listed runs are found in the DHT
MAX_LISTING = 1024  # bytes, signature included
LISTINGS = Domain("listing", 2, MAX_LISTING - SEAL)  # what members sign
MAX_PLACES = 2  # addresses of its author in a listing
LIFETIME = 3600.0  # seconds
SKEW = 300.0  # seconds that an author's clock may be ahead of ours
SIGN_AGAIN = 60.0  # seconds after which a listing is signed anew for who asks: its addresses may have changed
KEPT = 256  # listings that a node keeps for others, and takes from one source
QUERIES = Allowance(rate=0.5, burst=8)  # of one peer; who searches asks every LOOK_UP_EVERY where nothing was listed
ASK_AGAIN, ASK_SOON = 600.0, 15.0  # seconds until a keeper asks a peer again; and one that had nothing to list yet
LOOK_EVERY = 2.0  # seconds between looks for new peers
SOURCES = 48  # nodes that one search asks
PROBES = 96  # runs that it looks into
WITNESSES = 3  # members of a run whose answers are waited for
TRIES = 5  # listings of a run, where those before did not hold
ENOUGH_IDLE = 4  # looks for more, half a second apart, that find nothing, until a search with a result ends
LOOK_UP_EVERY = 3.0  # seconds between two lookups of KEY, and two questions to a peer who had nothing to say
AT_ONCE = 48  # calls under way
ANSWER = 4.0  # seconds, dialling included


@dataclass(frozen=True)
class ListedRun:
    """What a member says of its run; all else is in the specification, which it gives to whoever asks."""

    run_id: bytes
    parameters: int
    memory: int  # bytes that a member needs, after the author's own machine; 0: not told
    rate: int  # bytes a second that the author sends or receives on average, the larger; 0: not told
    addresses: tuple[str, ...] = ()
    signed: int = 0  # ms since 1970, by the author's clock; it is good for LIFETIME from then on


@dataclass(frozen=True)
class SignedListing:
    author: str
    record: bytes


@dataclass(frozen=True)
class Listings:
    listings: tuple[SignedListing, ...]


@dataclass(frozen=True)
class GenuineListing:
    author: PeerId
    listing: ListedRun
    record: bytes

    def is_good(self, now: float) -> bool:
        """At `now`, seconds since 1970. One from further ahead than SKEW is not; either clock may be wrong."""
        return -SKEW <= now - self.listing.signed / 1000 < LIFETIME


@dataclass
class FoundRun:
    """A run of which at least one member answered. What `spec` says is certain, the rest is what members say."""

    spec: RunSpec
    entry: GenuineListing  # of the first member that answered
    answer: RunListing  # its answer
    witnesses: dict[PeerId, str] = field(default_factory=dict)  # members that answered, and the network of each
    places: list[str] = field(default_factory=list)  # where they may be dialled

    @property
    def by_owner(self) -> bool:
        """Whether the run's owner is among those who answered with a signed listing."""
        return self.spec.owner in self.witnesses


def sealed(network: Network, listing: ListedRun) -> bytes:
    """A listing of one's own, signed now. Raises EncodingError above MAX_LISTING bytes."""
    return LISTINGS.seal(plain(replace(listing, signed=int(wall_clock() * 1000))), network.sign).sealed


def opened(network: Network, told: SignedListing) -> GenuineListing:
    """A listing of somebody's, of whatever date. Raises InvalidEnvelope."""
    envelope = unsealed(told.record, max_size=LISTINGS.max_size)
    if envelope is None:
        raise InvalidEnvelope(f"it is no envelope of at most {MAX_LISTING} bytes")
    try:
        listing = decode(ListedRun, envelope.payload)
        LISTINGS.open(envelope, told.author, network.verify)
    except WireError as error:
        raise InvalidEnvelope(str(error)) from None
    numbers = (listing.parameters, listing.memory, listing.rate, listing.signed)
    if len(listing.run_id) != 32 or min(numbers) < 0 or len(listing.addresses) > MAX_PLACES:
        raise InvalidEnvelope("it has a false run id, number or too many addresses")
    return GenuineListing(told.author, listing, told.record)


class Catalogue:
    """One node's part in it: `listing` is what it says of its own run; with `keeps` it keeps those of its peers."""

    def __init__(self, network: Network, rpc: Rpc, *, keeps: bool) -> None:
        self._network, self._rpc, self._keeps = network, rpc, keeps
        self.listing: ListedRun | None = None  # None: there is nothing to list
        self._signed: tuple[SignedListing, float] | None = None  # the last of its own, and when, s since 1970
        self._kept: dict[PeerId, tuple[GenuineListing, str]] = {}  # by author, with the network that it connected from
        self._due: dict[PeerId, float] = {}  # connected peers, and when to ask them; trio time
        self._queries = Budget[PeerId](QUERIES)
        rpc.serve("catalogue", Empty, self._on_listings)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce that there is a listing here, and ask new peers for theirs where they are kept."""
        announced = False
        task_status.started()
        while True:
            if (self.listing is not None) != announced:
                announced = not announced
                if announced:
                    await self._network.provide(KEY)
                else:
                    self._network.withdraw(KEY)
            if self._keeps:
                await self._collect()
            await trio.sleep(LOOK_EVERY)

    # --- keeping ----------------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        now = trio.current_time()
        self._due = {view.peer: self._due.get(view.peer, now) for view in self._network.peers()}
        due = [peer for peer, at in self._due.items() if at <= now][:AT_ONCE]
        async with trio.open_nursery() as nursery:
            for peer in due:
                nursery.start_soon(self._collect_from, peer)

    async def _collect_from(self, peer: PeerId) -> None:
        own = [entry for entry in await self._ask(peer) if entry.author == peer]
        self._due[peer] = trio.current_time() + (ASK_AGAIN if own else ASK_SOON)
        for entry in own:
            self.keep(entry, self._network_of(peer))

    def keep(self, entry: GenuineListing, network: str) -> None:
        """Keep a listing whose author is connected from `network`, if there is room or others have more of it."""
        now = wall_clock()
        self._kept = {author: kept for author, kept in self._kept.items() if kept[0].is_good(now)}
        before = self._kept.get(entry.author)
        if before is not None and before[0].listing.signed >= entry.listing.signed:
            return
        if before is None and len(self._kept) >= KEPT:
            crowds = Counter(network for _, network in self._kept.values())
            most = max(crowds, key=lambda each: crowds[each])
            if crowds[network] + 1 >= crowds[most]:
                return
            del self._kept[next(author for author, (_, of) in self._kept.items() if of == most)]
        self._kept[entry.author] = entry, network

    def _ranked(self) -> list[GenuineListing]:
        """What is kept: one listing of each run before a second, runs listed from most networks first."""
        now = wall_clock()
        kept = [(entry, network) for entry, network in self._kept.values() if entry.is_good(now)]
        networks: dict[bytes, set[str]] = {}
        for entry, network in kept:
            networks.setdefault(entry.listing.run_id, set()).add(network)
        kept = spread(random.sample(kept, len(kept)), lambda each: each[1])
        kept.sort(key=lambda each: -len(networks[each[0].listing.run_id]))
        return [entry for entry, _ in spread(kept, lambda each: each[0].listing.run_id.hex())]

    async def _on_listings(self, peer: PeerId, query: Empty) -> Listings:
        if not self._queries.take(peer, 1):
            raise Refuse("busy", "asked too often for listings")
        own = [self._own()] if self.listing is not None else []
        others = [SignedListing(entry.author, entry.record) for entry in self._ranked() if entry.author != peer]
        return Listings((*own, *others)[:KEPT])

    def _own(self) -> SignedListing:
        assert self.listing is not None
        now = wall_clock()
        if self._signed is None or abs(now - self._signed[1]) > SIGN_AGAIN:
            self._signed = SignedListing(self._network.me, sealed(self._network, self.listing)), now
        return self._signed[0]

    async def _ask(self, peer: PeerId) -> list[GenuineListing]:
        told = await self._rpc.ask(peer, "catalogue", Empty(), Listings, timeout=ANSWER)
        entries: list[GenuineListing] = []
        for each in told.listings[:KEPT] if told is not None else ():
            try:
                entry = opened(self._network, each)
                if entry.is_good(wall_clock()):
                    entries.append(entry)
            except InvalidEnvelope as error:
                self._rpc.violations.note(peer, f"a listing: {error}", Kind.LIE)
                break  # it checks what it hands on, or it lies
            await trio.lowlevel.checkpoint()  # a signature takes 0.1 ms
        return entries

    def _network_of(self, peer: PeerId) -> str:
        """Where a connected peer is: its group, or else its /24 where it is local; "" where it is not connected."""
        view = next((view for view in self._network.peers() if view.peer == peer), None)
        if view is None or view.group is not None:
            return "" if view is None else view.group or ""
        parts = next(iter(self._network.known_addresses(peer)), "").split("/")
        return network_of(parts[2]) if len(parts) > 2 else ""

    # --- searching --------------------------------------------------------------------------------------------------

    async def search(self, *, within: float, wanted: str = "") -> list[FoundRun]:
        """Runs of which a member answered, the best proven first; after `within` seconds at the most.

        It ends before, where somebody was asked and nobody is left to ask; with `wanted`, a run's name or how its id
        begins, only when one such run was found.
        """
        search = _Search(self, self._network, self._rpc)
        with trio.move_on_after(within):
            idle = 0
            while idle < ENOUGH_IDLE or not search.fits(wanted):
                idle = 0 if await search.step(self._ranked()) else idle + 1
                await trio.sleep(0.5)
        return sorted(
            search.found.values(), key=lambda run: (len(set(run.witnesses.values())), len(run.witnesses)), reverse=True
        )


class _Search:
    def __init__(self, catalogue: Catalogue, network: Network, rpc: Rpc) -> None:
        self._catalogue, self._network, self._rpc = catalogue, network, rpc
        self._due: dict[PeerId, float] = {}  # who was asked, and when to ask again, trio time: who had nothing to say
        self._look_up_at = -float("inf")  # trio time
        self._heard: list[tuple[str, GenuineListing]] = []  # with the network of the source, in its order
        self._tried: set[PeerId] = set()  # authors
        self._probed: Counter[bytes] = Counter()  # runs looked into, and how many of their authors were asked
        self.found: dict[bytes, FoundRun] = {}

    def fits(self, wanted: str) -> bool:
        """Whether the run that is wanted was found; any, where none is named."""
        names = ((run.spec.run.name, run.spec.run_id) for run in self.found.values())
        return any(wanted == name or run_id.startswith(wanted) for name, run_id in names)

    async def step(self, kept: list[GenuineListing]) -> bool:
        """Ask new sources and look into what they said; whether there was anything to do."""
        here = [view.peer for view in self._network.peers()]
        if here and trio.current_time() >= self._look_up_at:
            here += await self._network.find_providers(KEY)
            self._look_up_at = trio.current_time() + LOOK_UP_EVERY
        new = [peer for peer in dict.fromkeys(here) if peer not in self._due]
        new = spread(new, self._catalogue._network_of)[: max(0, SOURCES - len(self._due))]
        async with trio.open_nursery() as nursery:
            for peer in (*new, *(peer for peer, at in self._due.items() if at <= trio.current_time())):
                nursery.start_soon(self._ask, peer)
        heard = [*(("kept here", entry) for entry in kept), *self._heard]
        due: dict[bytes, list[GenuineListing]] = {}
        for _, entry in spread(heard, lambda each: each[0]):
            if entry.author not in self._tried and entry.author != self._network.me:
                run = self.found.get(entry.listing.run_id)
                if run is None or len(run.witnesses) < WITNESSES:
                    due.setdefault(entry.listing.run_id, []).append(entry)
        left = [id for id in due if self._probed[id] < TRIES]
        left = [id for id in left if self._probed[id]] + [id for id in left if not self._probed[id]]
        batch = [due[id] for id in left if self._probed[id] or len(self._probed) < PROBES][:AT_ONCE]
        for entries in batch:
            self._probed[entries[0].listing.run_id] += 1
        async with trio.open_nursery() as nursery:
            for entries in batch:
                nursery.start_soon(self._probe, entries[0])
        return bool(new or batch)

    async def _ask(self, peer: PeerId) -> None:
        self._due[peer] = math.inf
        entries = await self._catalogue._ask(peer)
        if not entries:
            self._due[peer] = trio.current_time() + LOOK_UP_EVERY
        source = self._catalogue._network_of(peer)
        self._heard += [(source, entry) for entry in entries]

    async def _probe(self, entry: GenuineListing) -> None:
        self._tried.add(entry.author)
        places = tuple(place for place in entry.listing.addresses if place.endswith(f"/p2p/{entry.author}"))
        self._network.learn(entry.author, places)
        run_id, id = entry.listing.run_id.hex(), entry.listing.run_id
        try:
            with trio.fail_after(ANSWER):
                told = await ask_runs(self._rpc, entry.author)
                answer = next((run for run in told if run.run_id == run_id), None)
                if answer is None:
                    raise CallError("it takes no part in the run that it lists")
                if id not in self.found:
                    spec = decode_spec(await ask_spec(self._rpc, entry.author, run_id), expected_run_id=run_id)
                    if spec.run.unlisted:
                        raise CallError("its run is not to be listed")
                    self.found.setdefault(id, FoundRun(spec, entry, answer))
        except (CallError, SettingError, trio.TooSlowError) as error:
            log.debug("the listing of %s does not hold: %s", entry.author, error)
            return
        self.found[id].places += places[:1]
        self.found[id].witnesses[entry.author] = self._catalogue._network_of(entry.author)
