"""Finding the swarm and staying in it: join addresses, the address book, and providers of the rendezvous key.

One loop keeps a list of peers worth dialling, each with the time of its next try:

- a join address is tried for as long as the node runs, and why it failed can be asked (`join_failures`); one that does
  not say whom to expect there (no /p2p/ at its end) takes whoever answers, anew after each loss;
- a peer that was lost is tried again at once and then every few seconds for `LOSS` seconds: a process that was frozen,
  or a partition that healed, is back within seconds whichever side notices;
- a seed, which helps to find others, is tried as a join address is while fewer than `FEW` peers are connected;
- peers of the `AddressBook`, where those that answered are kept across restarts, and providers of the rendezvous key
  fill up to `ENOUGH` connections.

Tries back off exponentially with jitter: to `SLOW` seconds while the node has peers, only to `QUICK` while it has none.
Written against `Network` alone, so it runs on simulated networks too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from swarmnode.node.host.addresses import DNSADDR, EXPECTED, key_hex, parse, peer_of, with_peer
from swarmnode.node.invite import RUN_PREFIX
from swarmnode.node.storage.datadir import DataDirError, write_atomic
from swarmnode.protocols.network import Address, Network, NetworkError, PeerEvent, PeerId, Unreachable
from swarmnode.protocols.peers.diversity import Group, crowd, group_of_addresses
from swarmnode.protocols.runner import Runner, inline

log = logging.getLogger(__name__)

ENOUGH = 16  # connected peers above which nobody new is looked for
AT_ONCE = 8  # dials under way
DIAL = 4.0  # seconds for one dial; a SYN is sent again after 1 and 3 s
QUICK = 4.0  # seconds between tries without any peer, and after a loss
SLOW = 60.0  # seconds between tries otherwise, at most
TRIES = 4  # of a join address, until whoever needs an answer gives up: 7 s where it is refused, 23 where all is silent
LOSS = 600.0  # seconds for which a lost peer counts as just lost
BRIEF = 2.0  # seconds below which a connection counts as a failed try: a full node hangs up at once
LOST_PEERS = 32  # lost peers tried quickly; the oldest loss goes first
CANDIDATES = 256
SAVE = 10.0  # seconds between writes of the address book
FEW = 3  # peers below which the rendezvous key is asked for often
MAX_PEERS = 256
MAX_ADDRESSES = 8  # per peer
CROWD = 8  # part of the book above which a group loses its own peers when there is no room
MAX_FILE = 1 << 20  # bytes


@dataclass
class _Candidate:
    target: PeerId | Address  # what is dialled: a peer, or a join address that names none
    peer: PeerId | None  # who that is; None until a nameless join address was answered
    join: Address | None = None  # set for join addresses, which are never given up
    seed: bool = False  # a join address that is only wanted while few peers are connected
    begins: str = ""  # hex digits with which the key of a peer that is not named begins
    due: float = 0.0  # trio.current_time() of the next try
    failures: int = 0
    lost_at: float = -float("inf")
    dialling: bool = False


class Discovery:
    """`run()` looks for peers until cancelled; it never raises for what peers do."""

    def __init__(
        self,
        network: Network,
        book: AddressBook,
        *,
        join: tuple[Address, ...] = (),
        seeds: tuple[Address, ...] = (),
        runner: Runner = inline,
    ) -> None:
        self._network = network
        self._book = book
        self._rendezvous: bytes | None = None
        self._runner = runner
        self._random = random.Random(network.me)
        self._candidates: dict[PeerId | Address, _Candidate] = {}  # by target
        self._came_at: dict[PeerId, float] = {}  # connected peers; trio.current_time()
        self.join_failures: dict[Address, str] = {}  # why, for join addresses that are not connected now
        self._changed = trio.Event()  # there may be something to do: set once, and then another takes its place
        for address in join:
            self._add_join(address)
        for address in seeds:
            self._add_join(address, seed=True)
        for peer, addresses in book.entries():
            network.learn(peer, addresses)
            self._add(peer)

    def set_rendezvous(self, key: bytes | None) -> None:
        """Meet others under `key` (32 bytes, see `rendezvous_of`) from now on."""
        self._rendezvous = key
        self._notify()

    def set_join(self, addresses: tuple[Address, ...]) -> None:
        """Join at these addresses from now on, and no longer at those named before."""
        for target in [target for target, each in self._candidates.items() if each.join is not None and not each.seed]:
            del self._candidates[target]
        self.join_failures.clear()
        for address in addresses:
            self._add_join(address)
        self._notify()

    def __contains__(self, peer: object) -> bool:
        """Whether a join address led to the peer."""
        return any(each.peer == peer and each.join is not None and not each.seed for each in self._candidates.values())

    @property
    def gave_up(self) -> bool:
        """Whether each join address there is was tried TRIES times in vain, or can never work."""
        tried = [candidate.failures for candidate in self._candidates.values() if candidate.join is not None]
        return bool(self.join_failures) and min(tried, default=TRIES) >= TRIES

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self._network.watch_peers() as events:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._follow, events)
                nursery.start_soon(self._meet)
                nursery.start_soon(self._keep_book)
                for view in self._network.peers():
                    self._came(view.peer)
                task_status.started()
                await self._dial_when_due(nursery)

    def _add_join(self, address: Address, *, seed: bool = False) -> None:
        endpoint = parse(address)
        if endpoint is None:
            self.join_failures[address] = f"{address} is not a join address: {EXPECTED}"
            return
        peer: PeerId | None = None
        if endpoint.peer is not None:
            try:
                peer = peer_of(address)
            except ValueError:
                self.join_failures[address] = f"{address} does not end in a peer id: copy it whole, or leave out /p2p/"
                return
            if peer == self._network.me:
                self.join_failures[address] = f"{address} is this node's own address"
                return
            self._network.learn(peer, (address,))
        if seed and (peer or address) in self._candidates:
            return
        candidate = _Candidate(peer or address, peer, join=address, seed=seed, begins=endpoint.begins)
        self._candidates[candidate.target] = candidate

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _add(self, peer: PeerId) -> None:
        if peer != self._network.me and peer not in self._candidates:
            self._make_room()
            self._candidates[peer] = _Candidate(peer, peer)
            self._notify()

    async def _follow(self, events: trio.MemoryReceiveChannel[PeerEvent]) -> None:
        async for event in events:
            if event.moved:
                self._note(event.peer)
            elif event.up:
                self._came(event.peer)
            else:
                self._went(event.peer)
            self._notify()

    def _came(self, peer: PeerId) -> None:
        self._came_at[peer] = trio.current_time()
        for candidate in self._candidates.values():
            if candidate.begins and key_hex(peer).startswith(candidate.begins):
                candidate.peer = peer
            if candidate.peer == peer and candidate.join is not None:
                self.join_failures.pop(candidate.join, None)
        self._note(peer)

    def _note(self, peer: PeerId) -> None:
        if not key_hex(peer):  # of another program, which is in no run
            return
        view = next((view for view in self._network.peers() if view.peer == peer), None)
        self._book.answered(peer, self._network.known_addresses(peer), view.group if view else None)

    def _went(self, peer: PeerId) -> None:
        now = trio.current_time()
        self._add(peer)
        affected = [candidate for candidate in self._candidates.values() if candidate.peer == peer]
        if now - self._came_at.pop(peer, now) < BRIEF:
            for candidate in affected:
                candidate.failures += 1
                candidate.due = now + self._pause(candidate)
            return
        for candidate in affected:
            candidate.lost_at, candidate.failures = now, 0
            candidate.due = now + self._random.uniform(0.2, 1.0)  # apart from the other side, which lost us too
        lost = sorted((c for c in self._candidates.values() if c.lost_at > now - LOSS), key=lambda c: c.lost_at)
        for oldest in lost[:-LOST_PEERS]:
            oldest.lost_at = -float("inf")
        if not self._network.peers():
            for other in self._candidates.values():
                other.failures = min(other.failures, 1)
                other.due = min(other.due, now + self._random.uniform(0.2, 1.0))

    def _make_room(self) -> None:
        """Forget the candidates that failed most often: strangers that come and go must not fill the memory."""
        spare = [c for c in self._candidates.values() if c.join is None and not c.dialling]
        spare.sort(key=lambda c: (c.failures, -c.lost_at))
        while len(self._candidates) >= CANDIDATES and spare:
            del self._candidates[spare.pop().target]

    def _wanted(self, candidate: _Candidate, connected: set[PeerId]) -> bool:
        if candidate.dialling or candidate.peer in connected or (candidate.seed and len(connected) >= FEW):
            return False
        just_lost = candidate.lost_at > trio.current_time() - LOSS
        return candidate.join is not None or just_lost or len(connected) < ENOUGH

    async def _dial_when_due(self, nursery: trio.Nursery) -> None:
        while True:
            changed = self._changed
            connected = {view.peer for view in self._network.peers()}
            wanted = [c for c in self._candidates.values() if self._wanted(c, connected)]
            wanted.sort(key=lambda c: (c.due, c.target))
            free = AT_ONCE - sum(c.dialling for c in self._candidates.values())
            now = trio.current_time()
            for candidate in wanted[:free]:
                if candidate.due <= now:
                    candidate.dialling = True
                    nursery.start_soon(self._try, candidate)
            pending = [c.due for c in wanted if not c.dialling]
            # Without a free dial there is nothing to wake up for before one ends.
            until = min(pending, default=float("inf")) if free else float("inf")
            with trio.move_on_at(max(until, now)):
                await changed.wait()

    async def _try(self, candidate: _Candidate) -> None:
        try:
            # By its address, where it has one: those that are known of a peer are forgotten among thousands of others.
            peer = await self._network.connect(candidate.join or candidate.target, timeout=DIAL)
            if all(view.peer != peer for view in self._network.peers()):
                raise Unreachable(f"{peer} hung up at once: one of the two has enough peers")
            self._answered(candidate, peer)
        except NetworkError as error:
            candidate.failures += 1
            if candidate.join is not None and self._candidates.get(candidate.target) is candidate:
                if candidate.failures == 1:
                    log.info("join address %s: %s", candidate.join, error)
                self.join_failures[candidate.join] = str(error)
            candidate.due = trio.current_time() + self._pause(candidate)
        finally:
            candidate.dialling = False
            self._notify()

    def _answered(self, candidate: _Candidate, peer: PeerId) -> None:
        if candidate.join is not None:
            self.join_failures.pop(candidate.join, None)
        if candidate.join is None or candidate.peer == peer:
            return
        candidate.peer = peer  # a nameless join address
        if candidate.join.startswith(f"/{DNSADDR}/"):
            return
        if not candidate.begins:
            log.warning(
                "join address %s was answered by %s, and nothing says that this is the right node; "
                "to have it checked, end the address in /p2p/%s",
                candidate.join,
                peer,
                peer,
            )
        self._network.learn(peer, (with_peer(candidate.join, peer),))
        self._note(peer)

    def _pause(self, candidate: _Candidate) -> float:
        """Seconds until the next try: 1, 2, 4 … with a quarter of jitter."""
        just_lost = candidate.lost_at > trio.current_time() - LOSS
        longest = QUICK if just_lost or not self._network.peers() else SLOW
        return min(longest, 2.0 ** min(candidate.failures - 1, 10)) * self._random.uniform(0.75, 1.25)

    async def _meet(self) -> None:
        """Announce the rendezvous key and dial the others that did; often, while there are few peers."""
        provided: bytes | None = None
        pause = 1.0
        while True:
            changed = self._changed
            key = self._rendezvous
            peers = len(self._network.peers())
            if key is not None and peers:
                if key != provided:
                    await self._network.provide(key)
                    provided, pause = key, 1.0
                if peers < ENOUGH:
                    for peer in await self._network.find_providers(key):
                        self._add(peer)
                longest = 5.0 if peers < FEW else SLOW
                pause = min(longest, 2 * pause)
                await trio.sleep(pause * self._random.uniform(0.75, 1.25))
            else:
                pause = 1.0
                await changed.wait()

    async def _keep_book(self) -> None:
        """Write the address book a little after it changed, and at the end."""
        try:
            while True:
                await self._changed.wait()
                await trio.sleep(SAVE)
                for view in self._network.peers():  # identify may have told more addresses since
                    self._note(view.peer)
                await self._runner(partial(self._book.save, self._book.entries()))
        finally:
            with trio.CancelScope(shield=True), contextlib.suppress(OSError):
                await self._runner(partial(self._book.save, self._book.entries()))


def rendezvous_of(run_id: str) -> bytes:
    """The key under which members of a run meet in the DHT; the part of the run id that a link has is enough."""
    return hashlib.sha256(b"swarmnode run " + bytes.fromhex(run_id)[:RUN_PREFIX]).digest()


Entries = tuple[tuple[PeerId, tuple[Address, ...]], ...]


class AddressBook:
    """Peers and their addresses, the one that answered last first.

    The file is a cache: what cannot be read in it is left out with a warning, and failing to write it is logged.
    `path` None keeps the book in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._peers: OrderedDict[PeerId, tuple[tuple[Address, ...], Group]] = OrderedDict()  # newest last
        if path is not None and path.exists():
            self._read(path)
        self._saved = self.entries()

    def entries(self) -> Entries:
        return tuple((peer, addresses) for peer, (addresses, _) in reversed(self._peers.items()))

    def answered(self, peer: PeerId, addresses: tuple[Address, ...], group: Group = None) -> None:
        """`peer` was connected just now, from `group`, and may be dialled at `addresses`."""
        known, _ = self._peers.pop(peer, ((), None))
        addresses = tuple(dict.fromkeys(addresses + known))[:MAX_ADDRESSES]
        if addresses:
            self._peers[peer] = (addresses, group or group_of_addresses(addresses))
        if len(self._peers) > MAX_PEERS:
            # The one that answered longest ago goes; of the group that crowds the others, where there is one.
            groups = {peer: group for peer, (_, group) in self._peers.items()}
            crowding = crowd(groups.values(), least=MAX_PEERS // CROWD)
            del self._peers[next(peer for peer, group in groups.items() if crowding is None or group == crowding)]

    def save(self, entries: Entries) -> None:
        """Write these into the file if they changed, atomically; in a thread, where the book itself is not read."""
        if self._path is None or entries == self._saved:
            return
        content = json.dumps({"version": 1, "peers": [list(addresses) for _, addresses in entries]}, indent=1)
        try:
            write_atomic(self._path, content.encode())
            self._saved = entries
        except DataDirError as error:
            log.warning("the address book was not saved: %s", error)

    def _read(self, path: Path) -> None:
        try:
            if path.stat().st_size > MAX_FILE:
                raise ValueError(f"larger than {MAX_FILE} bytes")
            peers = json.loads(path.read_bytes())["peers"]
            for addresses in reversed(peers[:MAX_PEERS]):
                self.answered(peer_of(addresses[0]), tuple(str(address) for address in addresses))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("the address book %s is damaged and was read in part: %r", path, error)
