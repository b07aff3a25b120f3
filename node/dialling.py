"""Where peers may be dialled, and dialling them: one dial a peer at a time, its addresses raced a little apart."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import trio
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node import addresses as multiaddrs
from swarmnode.node.connections import Connections
from swarmnode.node.libp2p_host import UPGRADE
from swarmnode.protocols.network import Address, PeerId, Unreachable

log = logging.getLogger(__name__)

STAGGER = 0.2  # seconds before the next address of a peer is tried beside the first
MAX_ADDRESSES = 16  # remembered per peer
MAX_KNOWN = 2048  # peers whose addresses are remembered
MAX_TEXT = 256  # characters of an address
KEPT = 3600  # seconds that the peer store, from which Kademlia tells others, keeps an address


class Dialler:
    """Dials run in the nursery given to `run_in`; callers that come while a dial is under way share its result."""

    def __init__(self, swarm: Swarm, connections: Connections, mine: Callable[[], tuple[Address, ...]]) -> None:
        self._swarm = swarm
        self._connections = connections
        self._mine = mine
        self._known: OrderedDict[PeerId, tuple[Address, ...]] = OrderedDict()
        self._under_way: dict[PeerId, _Dial] = {}
        self._nursery: trio.Nursery | None = None

    def run_in(self, nursery: trio.Nursery | None) -> None:
        self._nursery = nursery

    def learn(self, peer: PeerId, addresses: tuple[Address, ...]) -> None:
        fresh = [multiaddrs.with_peer(address, peer) for address in addresses if dialable(address)]
        known = tuple(dict.fromkeys(fresh + list(self._known.pop(peer, ()))))[:MAX_ADDRESSES]
        if known:
            self._known[peer] = known
            self._swarm.peerstore.add_addrs(peer_id(peer), [Multiaddr(a.partition("/p2p/")[0]) for a in known], KEPT)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def known(self, peer: PeerId) -> tuple[Address, ...]:
        told = list(self._known.get(peer, ()))
        store = self._swarm.peerstore
        try:
            if store.has_peer(peer_id(peer)):
                told += [multiaddrs.with_peer(str(address), peer) for address in store.addrs(peer_id(peer))]
        except Exception as error:  # PeerStoreError: all its addresses expired
            log.debug("no stored addresses of %s: %s", peer, error)
        return tuple(address for address in dict.fromkeys(told) if dialable(address))[:MAX_ADDRESSES]

    async def dial(self, peer: PeerId) -> None:
        """Connect to `peer`; callers that come while a dial is under way share its result."""
        dial = self._under_way.get(peer)
        if dial is None:
            if self._nursery is None:
                raise Unreachable("the network is not running")
            dial = self._under_way[peer] = _Dial()
            self._nursery.start_soon(self._carry_out, peer, dial)
        dial.waiting += 1
        try:
            await dial.done.wait()
        finally:
            dial.waiting -= 1
            if not dial.waiting:
                dial.scope.cancel()  # nobody wants it any more
                if self._under_way.get(peer) is dial:
                    del self._under_way[peer]
        if dial.error is not None and self._connections.best(peer) is None:
            raise Unreachable(dial.error)

    async def _carry_out(self, peer: PeerId, dial: _Dial) -> None:
        dial.error = f"nobody dialled {peer}"
        try:
            with dial.scope:
                dial.error = await self._race(peer)
        finally:
            if self._under_way.get(peer) is dial:
                del self._under_way[peer]
            dial.done.set()

    async def _race(self, peer: PeerId) -> str | None:
        """Try the known addresses, a little apart; None once connected, else why none worked."""
        mine = {address.partition("/p2p/")[0] for address in self._mine()}
        candidates = [address for address in self.known(peer) if address.partition("/p2p/")[0] not in mine]
        if not candidates:
            return f"no address of {peer} is known"
        reasons: list[str] = []
        connected = False
        async with trio.open_nursery() as nursery:

            async def attempt(address: Address, failed: trio.Event) -> None:
                nonlocal connected
                try:
                    with trio.fail_after(2 * UPGRADE):
                        await self._swarm.dial_addr(Multiaddr(address), peer_id(peer))
                except Exception as error:
                    reasons.append(f"{address.partition('/p2p/')[0]}: {_reason(error)}")
                    failed.set()
                else:
                    connected = True
                    nursery.cancel_scope.cancel()

            for address in candidates:
                failed = trio.Event()
                nursery.start_soon(attempt, address, failed)
                with trio.move_on_after(STAGGER):
                    await failed.wait()
        if connected or self._connections.best(peer) is not None:
            return None
        return f"{peer} could not be reached ({'; '.join(reasons)})"


class _Dial:
    """A dial under way: who waits for it, and why it failed."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.waiting = 0
        self.error: str | None = None


def peer_id(peer: PeerId) -> ID:
    return ID.from_string(peer)


def dialable(address: Address) -> bool:
    parts = address.split("/")
    return (
        len(address) <= MAX_TEXT
        and len(parts) >= 5
        and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6")
        and parts[3] == "tcp"
        and parts[2] not in ("0.0.0.0", "::")
        and (len(parts) == 5 or parts[5] == "p2p")
    )


def _reason(error: BaseException) -> str:
    """The innermost cause in few words."""
    while True:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None:
            break
        error = inner
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if "does not correspond" in str(error):  # the Noise handshake's words
        return "another peer answers there"
    return "no answer" if isinstance(error, trio.TooSlowError) else str(error) or type(error).__name__
