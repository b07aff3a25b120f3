"""Where peers may be dialled, and dialling them: one dial a peer at a time, its addresses raced a little apart.

A join address may say where without saying who: then the Noise handshake tells who answered. Names are resolved anew
for each dial, so a seed that moved is found again.
"""

from __future__ import annotations

import logging
import os
import random
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache, partial
from math import inf
from typing import Any

import trio
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import (
    CIRCUIT,
    DNSADDR,
    FAMILIES,
    Endpoint,
    by_turns,
    key_hex,
    parse,
    with_peer,
    without_peer,
)
from swarmnode.node.host.connections import Connections
from swarmnode.node.host.libp2p_host import UPGRADE
from swarmnode.node.host.muxed import RATE_AGE, MuxedSession
from swarmnode.node.host.quic import QuicSession
from swarmnode.node.host.stream import multiaddrs_of
from swarmnode.node.nat.relay import RelayClient
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.network import Address, Network, PeerId, Unreachable
from swarmnode.protocols.peers.scoring import PeerScoring, Standing

log = logging.getLogger(__name__)

TRY_WITHIN = 6.0  # seconds for each place of a peer that is tried by itself
STAGGER = 0.25  # s before the next address of a peer is tried beside the first (RFC 8305, section 8)
HEAD_START = 1.0  # s that TCP has before QUIC, which costs thirty times the CPU and so is for where TCP does not get
RESOLVE = 3.0  # seconds for the system to resolve a name; less than discovery gives a dial, so that it can say so
NAMES = trio.CapacityLimiter(16)  # threads that resolve names: slow name servers hold these, and no others
DNSADDR_DEPTH = 3  # names that may lead to one another
MAX_ADDRESSES = 16  # remembered per peer, and taken from a name
MAX_KNOWN = 2048  # peers whose addresses are remembered
KEPT = 3600  # seconds that the peer store, from which Kademlia tells others, keeps an address

peer_id = lru_cache(1024)(ID.from_string)  # base58 is slow in Python


class Dialler:
    """Dials run in the nursery of `connections`; callers that come while a dial is under way share its result."""

    def __init__(
        self, network: Network, swarm: Swarm, connections: Connections, scoring: PeerScoring, relays: RelayClient
    ) -> None:
        self._network = network
        self._swarm = swarm
        self._connections = connections
        self._scoring = scoring
        self._relays = relays
        self._known = Recent[PeerId, tuple[Address, ...]](MAX_KNOWN)
        self._under_way: dict[PeerId | Address, _Dial] = {}
        self._looked = Recent[PeerId, float](MAX_KNOWN)  # when a faster way was looked for, trio time

    def learn(self, peer: PeerId, addresses: tuple[Address, ...], *, hearsay: bool = False) -> None:
        if peer == self._network.me:
            return
        before = self.known(peer)[: MAX_ADDRESSES // 2] if hearsay else ()
        fresh = [with_peer(address, peer) for address in addresses if parse(address)]
        known = tuple(dict.fromkeys((*before, *fresh, *self._known.get(peer, ()))))[:MAX_ADDRESSES]
        if known:
            self._known[peer] = known
            self._swarm.peerstore.add_addrs(peer_id(peer), multiaddrs_of(map(without_peer, known)), KEPT)

    def known(self, peer: PeerId) -> tuple[Address, ...]:
        """Where a peer may be dialled; first where it was, if this node dialled it."""
        oldest = self._connections.of(peer)[:1]
        places = [with_peer(each.address, peer) for each in oldest if not each.inbound]
        places += self._known.get(peer, ())
        with suppress(PeerStoreError, ValueError):  # nothing is stored, all of it expired, or that is no peer id
            places += [with_peer(str(address), peer) for address in self._swarm.peerstore.addrs(peer_id(peer))]
        return tuple(address for address in dict.fromkeys(places) if parse(address))[:MAX_ADDRESSES]

    async def dial(self, target: PeerId | Address) -> PeerId:
        """Connect to a peer where it is known to be, or to whoever answers at a multiaddr without a peer.

        Returns the peer. Raises Unreachable, also where the peer is banned.
        """
        await trio.lowlevel.checkpoint()
        self._check_standing(target)
        dial = self._under_way.get(target)
        if dial is None:
            if self._connections.nursery is None:
                raise Unreachable("the network is not running")
            dial = self._under_way[target] = _Dial()
            self._connections.nursery.start_soon(self._carry_out, target, dial)
        dial.waiting += 1
        try:
            await dial.done.wait()
        finally:
            dial.waiting -= 1
            if not dial.waiting:
                dial.scope.cancel()  # nobody wants it any more
                self._forget(target, dial)
        if dial.answered is not None:
            return dial.answered
        if self._connections.best(target) is not None:  # it dialled this node meanwhile
            return target
        raise Unreachable(dial.error)

    async def dial_each(self, peer: PeerId) -> dict[Address, str]:
        """Dial every place where the peer may be, for itself: why each failed, "" where it did not.

        All at once, but those through relays only where none else answered.
        """
        results: dict[Address, str] = {}

        async def attempt(address: Address) -> None:
            try:
                with trio.fail_after(TRY_WITHIN):
                    await self._race([address], peer)
                results[address] = ""
            except _Failed as failed:
                results[address] = str(failed)
            except trio.TooSlowError:
                results[address] = f"no answer within {TRY_WITHIN:g} s"

        candidates = self._candidates(peer)
        for relayed in (False, True):
            if "" in results.values():
                break
            async with trio.open_nursery() as nursery:
                for address in candidates:
                    if (CIRCUIT in address) == relayed:
                        nursery.start_soon(attempt, address)
        return results

    async def _carry_out(self, target: PeerId | Address, dial: _Dial) -> None:
        nameless = target.startswith("/")
        candidates = [target] if nameless else self._candidates(target)
        try:
            with dial.scope:
                dial.answered = await self._race(candidates, None if nameless else target)
        except _Failed as failed:
            if nameless:
                dial.error = str(failed)
            elif candidates:
                dial.error = f"{target} could not be reached ({failed})"
            else:
                dial.error = f"no address of {target} is known"
        finally:
            self._forget(target, dial)
            dial.done.set()
        best = self._connections.best(dial.answered) if dial.answered is not None else None
        if best is not None and best.is_quic:  # TCP mostly carries more with less work
            await self.dial_beside(best.session.peer, best.host, "tcp")

    def look_for_faster(self, peer: PeerId) -> None:
        """Where TCP brings little, have a connection over QUIC beside it; by what both bring, streams then go."""
        slow, now = self._connections.slow(peer), trio.current_time()
        if slow is None or now - self._looked.get(peer, -inf) < RATE_AGE or self._connections.nursery is None:
            return
        self._looked[peer] = now
        self._connections.nursery.start_soon(self.dial_beside, peer, slow.host, "quic")

    async def dial_beside(
        self, peer: PeerId, host: str | None, over: str, source: tuple[str, int] | None = None
    ) -> MuxedSession | None:
        """One more connection to a peer, over "tcp" or "quic", at those of its addresses that are at `host`.

        That is the IP address of a direct connection. From `source`, an address and port of this machine, where that is
        given. None where it failed.
        """
        for address in self.known(peer):
            endpoint = parse(address)
            if endpoint is None or (endpoint.host, endpoint.over, endpoint.relay) != (host, over, None):
                continue
            try:
                with trio.fail_after(2 * UPGRADE):
                    conn = await self._swarm.dial_addr(Multiaddr(endpoint.place), peer_id(peer), source=source)
            except Exception as error:  # libp2p raises many kinds for what strangers answer; the next place is tried
                log.debug("not over %s to %s at %s: %s", over, peer, address, _reason(error))
                continue
            return next((each.session for each in self._connections.of(peer) if each.conn is conn), None)
        return None

    def _forget(self, target: PeerId | Address, dial: _Dial) -> None:
        if self._under_way.get(target) is dial:
            del self._under_way[target]

    def _candidates(self, peer: PeerId) -> list[Address]:
        """Where to dial the peer: nobody else is where this node listens, but others are behind the same relays."""
        own = {without_peer(address) for address in self._network.addresses if CIRCUIT not in address}
        return [address for address in self.known(peer) if without_peer(address) not in own]

    async def _race(self, addresses: Iterable[Address], peer: PeerId | None, depth: int = 0) -> PeerId:
        """Dial `addresses` STAGGER apart and return with the first that works. Raises _Failed with a reason for each.

        Direct ways go before relayed ones, and in each the families by turns, IPv6 first (RFC 8305, section 4); TCP has
        HEAD_START s before QUIC, or until all of it failed. A name is replaced by what it resolves to, raced the same
        way, `depth` names behind one another. `peer` is who must answer; None takes anybody whom the address allows.
        """
        reasons: list[str] = []
        begun: list[trio.Event] = []  # each set where that attempt ended
        waited = False
        answered: PeerId | None = None

        async def attempt(address: Address, ended: trio.Event) -> None:
            nonlocal answered
            endpoint = parse(address)
            assert endpoint is not None
            try:
                if endpoint.is_name:
                    answered = await self._race(await _resolve(address, endpoint, depth), peer, depth + 1)
                else:
                    with trio.fail_after(2 * UPGRADE):
                        answered = await self._dial_at(address, endpoint, peer)
                nursery.cancel_scope.cancel()
            except _Failed as failed:
                reasons.extend(f"{endpoint.place} is {reason}" for reason in failed.reasons)
            except Exception as error:  # as above; told to who dials, and logged where `_reason` has no words
                reasons.append(f"{endpoint.place}: {_reason(error)}")
            finally:
                ended.set()

        async with trio.open_nursery() as nursery:
            turns = by_turns(addresses, first="6")
            for address in sorted(turns, key=lambda address: (CIRCUIT in address, "/quic-v1" in address)):
                if "/quic-v1" in address and not waited:
                    waited = True
                    with trio.move_on_after(HEAD_START - STAGGER):
                        for other in begun:
                            await other.wait()
                ended = trio.Event()
                begun.append(ended)
                nursery.start_soon(attempt, address, ended)
                with trio.move_on_after(STAGGER):
                    await ended.wait()
        if answered is None:
            raise _Failed(reasons)
        return answered

    async def _dial_at(self, address: Address, endpoint: Endpoint, peer: PeerId | None) -> PeerId:
        peer = peer or endpoint.peer
        if peer is None:
            return await self._dial_whoever(endpoint)
        if endpoint.relay is not None:
            self.learn(endpoint.relay, (f"{endpoint.place}/p2p/{endpoint.relay}",), hearsay=True)
            await self._relays.dial(endpoint.relay, peer)
        else:
            await self._swarm.dial_addr(Multiaddr(address), peer_id(peer))
        return peer

    async def _dial_whoever(self, endpoint: Endpoint) -> PeerId:
        """As `Swarm.dial_addr`, which cannot do without a peer id: connect, secure, multiplex, register."""
        where = Multiaddr(endpoint.place)
        transport = self._swarm.transport_manager.transport_for_dialing(where)
        assert transport is not None
        raw: Any = await transport.dial(where)
        is_done = isinstance(raw, QuicSession)  # its handshake told who is there
        try:
            upgrader = self._swarm.upgrader
            with trio.fail_after(UPGRADE):
                secured: Any = raw if is_done else await upgrader.security_multistream.secure_outbound(raw, None)
                peer = raw.peer if is_done else str(secured.get_remote_peer())
                self._check(peer, endpoint)
                if self._connections.best(peer) is not None:
                    await secured.close()
                    return peer
                self.learn(peer, (endpoint.place,))
                muxed = raw if is_done else await upgrader.upgrade_connection(secured, peer_id(peer))
            await self._swarm.add_conn(muxed, direction="outbound")
        except BaseException:
            with trio.CancelScope(shield=True):
                await raw.close()
            raise
        return peer

    def _check(self, peer: PeerId, endpoint: Endpoint) -> None:
        """Raises Unreachable where whoever answered is not to be connected."""
        if peer == self._network.me:
            raise Unreachable("it is this node itself")
        if not key_hex(peer).startswith(endpoint.begins):
            raise Unreachable(f"answers as another peer than the one that made the link, {peer}")
        self._check_standing(peer)

    def _check_standing(self, peer: PeerId) -> None:
        if peer in self._scoring.blocked:
            raise Unreachable(f"{peer} is blocked by this node's owner: swarmnode peers unblock")
        if self._scoring.standing(peer) is Standing.BANNED:
            raise Unreachable(f"{peer} broke rules, and this node keeps away from it for a while: see swarmnode peers")


class _Dial:
    """A dial under way: who waits for it, who answered, or why nobody did."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.waiting = 0
        self.answered: PeerId | None = None
        self.error = "the dial was cancelled"


class _Failed(Exception):
    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


async def _resolve(address: Address, name: Endpoint, depth: int) -> list[Address]:
    """`address` at what its name stands for, in the system's order; or what TXT records list. Raises Unreachable."""
    try:
        with trio.fail_after(RESOLVE):
            if name.kind == DNSADDR:
                places = await _dnsaddr(name, depth)
            else:
                ask = partial(socket.getaddrinfo, name.host, name.port, FAMILIES[name.kind], socket.SOCK_STREAM)
                found = await trio.to_thread.run_sync(ask, abandon_on_cancel=True, limiter=NAMES)
                hosts = [("ip6" if family == socket.AF_INET6 else "ip4", host[0]) for family, _, _, _, host in found]
                places = [address.replace(f"/{name.kind}/{name.host}", f"/{kind}/{host}", 1) for kind, host in hosts]
    except trio.TooSlowError:
        raise Unreachable(f"the name {name.host} was not resolved within {RESOLVE:g} s") from None
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"the name {name.host} cannot be resolved ({error.args[-1]})") from None
    dialable = [place for place in dict.fromkeys(places) if parse(place)]
    if not dialable:
        raise Unreachable(f"the name {name.host} has no address of this kind that can be dialled")
    return dialable[:MAX_ADDRESSES]


async def _dnsaddr(name: Endpoint, depth: int) -> list[Address]:
    """The multiaddrs in the TXT records of _dnsaddr.NAME that lead to whoever is expected, in any order.

    Raises Unreachable.
    """
    import dns.asyncresolver
    import dns.exception

    if depth >= DNSADDR_DEPTH:
        raise Unreachable(f"{name.host}: the name is behind {DNSADDR_DEPTH} others")
    try:
        answer = await dns.asyncresolver.resolve(f"_dnsaddr.{name.host}", "TXT", lifetime=RESOLVE)
    except (dns.exception.DNSException, OSError) as error:
        raise Unreachable(f"no TXT record at _dnsaddr.{name.host} ({str(error) or type(error).__name__})") from None
    texts = [b"".join(record.strings).decode(errors="replace") for record in answer]
    places = [text.removeprefix("dnsaddr=") for text in texts if text.startswith("dnsaddr=/")]
    random.shuffle(places)  # so that each of several seeds has its part
    return [place for place in places if name.peer is None or place.endswith(f"/p2p/{name.peer}")]


def _reason(error: BaseException) -> str:
    """The innermost cause in few words."""
    while True:
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
        if inner is None:
            break
        error = inner
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nothing listens there"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    if "does not correspond" in str(error):  # the Noise handshake's words
        other = re.search(r"remote_peer_id_from_pubkey=(\w+)", str(error))
        return f"answers as another peer{', ' + other[1] if other else ''}"
    if isinstance(error, trio.TooSlowError):
        return "no answer"
    if isinstance(error, (SwarmException, OpenConnectionError, Unreachable)):
        return str(error)
    log.debug("a handshake that made no sense: %r", error, exc_info=error)
    return "no node of this kind answers, another program perhaps"
