"""Whether and where this node can be reached from outside: what others found out, and what that says about its NAT.

`AutoNat` asks a peer to dial this node back
(https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md):

    asker -> helper   DIAL(addresses of the asker)
    helper           connects anew to those that are at an address from which the asker came, and to no others
    helper -> asker   OK(address), or why not

The helper never answers from a connection that exists (py-libp2p's does, and calls everybody public), and dials no
address but the asker's own, so that it cannot be used to attack a third. Whether the one who answers there holds the
asker's key is checked by the Noise handshake; then the connection is dropped.

`Reachability` is a small state machine fed with these verdicts. Time is an argument, in seconds.

    unknown --(most of those who tried got through)--> public
    unknown --(most did not)-------------------------> private
    public <--(two thirds of the verdicts say so)----> private

Why a node behind a router that was asked for no port is private, and until when, is in docs/nat.md.

One peer never decides while others can be asked: `ENOUGH` verdicts are wanted, fewer count only once nobody else is
left to ask. Peers of the local network prove nothing about the internet: they count only while there are no others.
Verdicts age; a change of the network forgets them all.
The state is that over IPv4, which everybody has and routers translate; over IPv6 only where nobody asked came by IPv4.
What verdicts of one family say for themselves is in `open_at`.

It also keeps where others see this node, as identify tells it. Only connections that left from the listening port say
where that port is mapped to. Two observers at different addresses that see it at one place mean an endpoint-independent
NAT ("cone"), which can be punched through; two that see it at different places mean an address-dependent NAT
("symmetric"), which cannot (RFC 4787, section 4.1). Observers may lie: one address counts once, most of them decide,
and what they say is used for attempts to connect only.
"""

from __future__ import annotations

import enum
import ipaddress
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import trio
from libp2p.abc import IRawConnection
from libp2p.host.autonat.pb import autonat_pb2 as pb
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.host.addresses import parse
from swarmnode.node.host.muxed import MuxedSession
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.host.stream import BadMessage, agree, ask, multiaddrs_of, peer_bytes, places_in, receive, send
from swarmnode.protocols.limits import Allowance, Budget, Recent
from swarmnode.protocols.network import Address, PeerId, Stream
from swarmnode.protocols.peers.diversity import ip_of

logger = logging.getLogger(__name__)

ENOUGH = 3  # verdicts from different hosts before the state is believed
AGE = 900.0  # s after which a verdict no longer counts
MAX_VERDICTS = 16  # the newest
MAX_REACHED_AT = 4  # addresses at which helpers got through, announced beside this node's own

LOCAL = tuple(  # RFC 1918, 6598, 3927, 4193, 4291: where a peer at the other side of a NAT is not
    ipaddress.ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8"),
        *("fc00::/7", "fe80::/10", "::1/128"),
    )
)
AUTONAT = "/libp2p/autonat/1.0.0"
DIAL_WITHIN = 4.0  # s for the dial back; a SYN is sent again after 1 and 3 s
ANSWER_WITHIN = DIAL_WITHIN + 3.0  # s for the helper's answer, and for what it says of itself
AT_ONCE = 8  # dials back under way, for all askers together
EVERY = 10.0  # s between two dials for one asker
MAX_ADDRESSES = 4  # dialled for one question
IDENTIFY = "/ipfs/id/1.0.0"
MAX_IDENTIFY = 16 << 10  # bytes
MAX_HOSTS = 1024  # that this node sent to, and that came uninvited
MAX_OBSERVERS = 32  # the latest, by their own address


class Reach(enum.Enum):
    """What `swarmnode status` shows as reachability."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    PRIVATE = "private"


@dataclass(frozen=True)
class DialVerdict:
    """One peer's try to dial this node."""

    host: str  # where the peer is; verdicts of one host count once
    reached: bool
    at: float  # s, trio time
    place: Address | None = None  # where it got through


@dataclass(frozen=True)
class Mapping:
    """A port of the gateway that leads here, or over IPv6 a hole in its firewall."""

    way: str  # "PCP", "NAT-PMP" or "UPnP"
    host: str  # the gateway's outer address, as it says; over IPv6 this node's own, as a rule
    port: int
    inner_port: int
    udp_port: int = 0  # where UDP is let in too

    @property
    def address(self) -> Address:
        return f"/ip{6 if ':' in self.host else 4}/{self.host}/tcp/{self.port}"

    @property
    def addresses(self) -> tuple[Address, ...]:
        """With that of QUIC."""
        place = self.address.partition("/tcp/")[0]
        return (self.address, *((f"{place}/udp/{self.udp_port}/quic-v1",) if self.udp_port else ()))


class Reachability:
    """The state, the verdicts behind it, and every place at which this node may be met.

    `changed` is set when what was found out no longer holds; who asks again puts a new event there.
    """

    def __init__(self) -> None:
        self.state = Reach.UNKNOWN
        self.changed = trio.Event()
        self.mappings: dict[str, Mapping] = {}  # ports that the router opened, by family: ip4, ip6
        self._verdicts = Recent[str, DialVerdict](MAX_VERDICTS)  # by host
        self._contacted, self.uninvited = Recent[str, None](MAX_HOSTS), Recent[str, None](MAX_HOSTS)
        self.seen = Recent[str, Address](MAX_OBSERVERS)  # where the listening port is, by host of the observer

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def record(self, verdict: DialVerdict) -> None:
        """Count a verdict in the next decision."""
        self._verdicts[verdict.host] = verdict

    def decide(self, now: float, *, others: int, own: tuple[Address, ...] = ()) -> Reach:
        """The state by the verdicts that are not too old.

        `others` is how many more hosts could be asked, `own` where this node listens.
        """
        self._disregard(host for host, verdict in self._verdicts.items() if verdict.at <= now - AGE)
        verdicts = [self._verdicts[host] for host in _decisive(self._verdicts)]
        if verdicts and (len(verdicts) >= ENOUGH or not others):
            self.state = self._by_majority(verdicts)
            if self.state is Reach.PUBLIC and self._may_be_restricted(own):
                self.state = Reach.PRIVATE
        return self.state

    def _may_be_restricted(self, own: tuple[Address, ...]) -> bool:
        """Whether only those may get in to whom this node has sent something, as who dials back has been.

        A router that translates, was asked for no port, and has let in nobody uninvited yet may filter by address.
        """
        outside = (e.host for e in map(parse, self.observed()) if e and e.kind == "ip4" and not is_local(e.host))
        seen = next(outside, None)
        translates = seen is not None and all(e.host != seen and not e.is_name for e in map(parse, own) if e)
        return translates and not self.uninvited and not self.mappings

    def disregard_local(self) -> None:
        """Forget the verdicts of the local network: peers outside it can be asked now."""
        if self.only_local:
            self.state = Reach.UNKNOWN
        self._disregard(filter(is_local, self._verdicts))

    def _disregard(self, hosts: Iterable[str]) -> None:
        for host in tuple(hosts):
            del self._verdicts[host]

    @property
    def only_local(self) -> bool:
        """Whether all that is known comes from the local network."""
        return bool(self._verdicts) and all(map(is_local, self._verdicts))

    @property
    def tried_over_ipv6(self) -> bool:
        return any(":" in host for host in self._verdicts)

    def forget(self) -> None:
        """The network changed: nothing is known."""
        self.mappings.clear()
        self.seen.clear()
        self._contacted.clear()
        self.uninvited.clear()
        self._forget_verdicts()

    def map_to(self, family: str, mapping: Mapping | None) -> None:
        """The router maps so now. A new way in, or one less: earlier verdicts are about other places."""
        before = self.mappings.pop(family, None)
        if mapping is not None:
            self.mappings[family] = mapping
        if (before and before.addresses) == (mapping and mapping.addresses):
            return
        if before is not None and mapping is not None and before.host != mapping.host:
            self.seen.clear()  # at the router's former address
        of_ipv6 = [host for host in self._verdicts if ":" in host]
        if family == "ip6" and len(of_ipv6) < len(self._verdicts):  # those over IPv4 say what they said
            self._disregard(of_ipv6)
            self.changed.set()
        else:
            self._forget_verdicts()

    def _forget_verdicts(self) -> None:
        self._verdicts.clear()
        self.state = Reach.UNKNOWN
        self.changed.set()

    def counts(self) -> tuple[int, int]:
        """How many hosts got through to this node, and how many did not."""
        reached = sum(v.reached for v in self._verdicts.values())
        return reached, len(self._verdicts) - reached

    def _by_majority(self, verdicts: list[DialVerdict]) -> Reach:
        reached = sum(v.reached for v in verdicts)
        failed = len(verdicts) - reached
        if self.state is Reach.PUBLIC:
            return Reach.PRIVATE if failed >= 2 * reached else Reach.PUBLIC
        if self.state is Reach.PRIVATE:
            return Reach.PUBLIC if reached >= 2 * failed else Reach.PRIVATE
        return Reach.PUBLIC if reached > failed else Reach.PRIVATE if failed > reached else Reach.UNKNOWN

    # --- places -----------------------------------------------------------------------------------------------------

    def open_at(self, now: float, family: str) -> tuple[Address, ...]:
        """Where helpers got through over `family` (ip4, ip6), the newest first; nothing where most of them did not."""
        tried = [v.reached for host, v in self._verdicts.items() if (":" in host) == (family == "ip6")]
        places = [place for place in self.reached_at(now) if place.startswith(f"/{family}/")]
        return tuple(places) if 2 * sum(tried) > len(tried) else ()

    def contacted(self, host: str) -> None:
        """This node sends something to `host` from its listening port: what comes from there is no longer uninvited."""
        self._contacted[host] = None

    def came_in(self, host: str) -> None:
        """Somebody at `host` dialled this node."""
        if host not in self._contacted and not is_local(host):
            if not self.uninvited and self.state is Reach.PRIVATE:
                self.changed.set()  # what kept the state from being public is no more
            self.uninvited[host] = None

    def reached_at(self, now: float) -> tuple[Address, ...]:
        """Where helpers got through lately, the newest first."""
        fresh = [v.place for v in reversed(self._verdicts.values()) if v.place is not None and v.at > now - AGE]
        over_udp = {mapping.address: mapping.addresses for mapping in self.mappings.values()}  # mapped beside TCP
        return tuple(dict.fromkeys(at for place in fresh for at in over_udp.get(place, (place,))))[:MAX_REACHED_AT]

    def places(self, own: tuple[Address, ...]) -> tuple[Address, ...]:
        """Where this node may be reached, the likeliest first; `own` is where it listens."""
        mapped = [address for family in sorted(self.mappings) for address in self.mappings[family].addresses]
        return tuple(dict.fromkeys((*mapped, *self.observed(), *own)))

    @property
    def mapped_udp(self) -> tuple[Address, ...]:
        """Where the router passes UDP on, over IPv4; nothing where its own address is behind another router."""
        mapping = self.mappings.get("ip4")
        return mapping.addresses[1:] if mapping is not None and not is_local(mapping.host) else ()

    def observed(self) -> tuple[Address, ...]:
        """Where the listening port is seen, the most often seen first."""
        return tuple(place for place, _ in Counter(self.seen.values()).most_common())

    def endpoint_independent(self) -> bool | None:
        """Whether most see the listening port at one place; None where fewer than two observers know."""
        observers = _decisive(self.seen)
        if len(observers) < 2:
            return None
        (_, most), *_rest = Counter(self.seen[host] for host in observers).most_common(1)
        return most > len(observers) / 2


def _decisive(hosts: Iterable[str]) -> list[str]:
    """The IPv4 addresses among `hosts`, as that is where NATs are; all for want of any."""
    found = list(hosts)
    return [host for host in found if ":" not in host] or found


def is_local(host: str) -> bool:
    """Whether an IP address has a meaning only within a network that a NAT or a carrier's NAT stands in front of."""
    return local_network(host) is not None


def local_network(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    return next((network for network in LOCAL if ip_of(host) in network), None)


class AutoNat:
    """Both sides of AutoNAT."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network
        self._under_way = 0
        self._asked = Budget[PeerId](Allowance(rate=1 / EVERY, burst=1))
        network.serve(AUTONAT, self._serve)

    async def ask(self, helper: PeerId, host: str, places: tuple[Address, ...]) -> DialVerdict | None:
        """Whether and at which of `places` `helper`, who is at `host`, reached this node; None where it did not try.

        Raises NetworkError where it does not answer sensibly.
        """
        asked = tuple(dict.fromkeys(place.partition("/p2p/")[0] for place in places if "/tcp/" in place))
        readable = [place.to_bytes() for place in multiaddrs_of(asked)]
        me = pb.Message.PeerInfo(id=peer_bytes(self._network.me), addrs=readable)
        question = pb.Message(type=pb.Message.DIAL, dial=pb.Message.Dial(peer=me))
        answer = await ask(self._network, helper, AUTONAT, question, pb.Message, within=ANSWER_WITHIN)
        if answer.type != pb.Message.DIAL_RESPONSE:
            raise BadMessage(f"{helper} answered no DIAL_RESPONSE")
        status = answer.dialResponse.status
        if status != pb.Message.OK:
            failed = status == pb.Message.E_DIAL_ERROR
            return DialVerdict(host, False, trio.current_time()) if failed else None
        reached = places_in([answer.dialResponse.addr])
        if not {*reached} & {*asked}:
            raise BadMessage(f"{helper} reached {reached}, where it was not asked to dial")
        return DialVerdict(host, True, trio.current_time(), reached[0])

    async def _serve(self, stream: Stream) -> None:
        response = await self._answer(stream.peer, await receive(stream, pb.Message))
        await send(stream, pb.Message(type=pb.Message.DIAL_RESPONSE, dialResponse=response))

    async def _answer(self, asker: PeerId, request: pb.Message) -> pb.Message.DialResponse:
        if request.type != pb.Message.DIAL:
            return pb.Message.DialResponse(status=pb.Message.E_BAD_REQUEST)
        hosts = {each.host for each in self._network.connections.of(asker) if each.host is not None}
        places = _at(hosts, [bytes(raw) for raw in request.dial.peer.addrs])
        if not places or self._under_way >= AT_ONCE or not self._asked.take(asker, 1.0):
            return pb.Message.DialResponse(status=pb.Message.E_DIAL_REFUSED)
        self._under_way += 1
        try:
            reached = await self._reach(asker, places)
        finally:
            self._under_way -= 1
        if reached is None:
            return pb.Message.DialResponse(status=pb.Message.E_DIAL_ERROR)
        return pb.Message.DialResponse(status=pb.Message.OK, addr=Multiaddr(reached).to_bytes())

    async def _reach(self, asker: PeerId, places: tuple[Address, ...]) -> Address | None:
        """The first of `places` at which `asker` answers a connection made for this."""
        found: list[Address] = []

        async def dial(place: Address, done: trio.CancelScope) -> None:
            if await self._answers(asker, place):
                found.append(place)
                done.cancel()

        with trio.move_on_after(DIAL_WITHIN):
            async with trio.open_nursery() as nursery:
                for place in places:
                    nursery.start_soon(dial, place, nursery.cancel_scope)
        return found[0] if found else None

    async def _answers(self, asker: PeerId, place: Address) -> bool:
        where = Multiaddr(place)
        transport = self._network.swarm.transport_manager.transport_for_dialing(where)
        if transport is None:
            return False
        try:
            raw = await transport.dial(where)
        except Exception as error:  # whatever a stranger's address does to a dial, it was not reached
            logger.debug("dial back to %s at %s failed: %s", asker, place, error)
            return False
        assert isinstance(raw, IRawConnection)
        try:
            secured = await self._network.swarm.upgrader.upgrade_security(raw, True, ID.from_string(asker))
            return str(secured.get_remote_peer()) == asker
        except Exception as error:
            logger.debug("whoever answers at %s is not %s: %s", place, asker, error)
            return False
        finally:
            with trio.move_on_after(1.0, shield=True):
                await raw.close()


def _at(hosts: Collection[str], packed: list[bytes]) -> tuple[Address, ...]:
    """Those of the asker's addresses that are at one of `hosts`, over TCP.

    QUIC is dialled from the socket that listens, so a connection that exists may have opened the way.
    """
    endpoints = ((place, parse(place)) for place in places_in(packed[:16]))
    return tuple(
        place for place, endpoint in endpoints if endpoint and endpoint.host in hosts and endpoint.over == "tcp"
    )[:MAX_ADDRESSES]


async def identified(session: MuxedSession) -> Identify:
    """What the other end says of itself now (https://github.com/libp2p/specs/tree/master/identify).

    Raises NetworkError where it does not answer.
    """
    with trio.move_on_after(ANSWER_WITHIN):
        stream = await session.open_stream()
        try:
            await agree(stream, IDENTIFY)
            return await receive(stream, Identify, limit=MAX_IDENTIFY)
        finally:
            stream.abort()
    raise BadMessage(f"{session.peer} did not say who it is within {ANSWER_WITHIN:g} s")


async def seen_by(session: MuxedSession) -> Address | None:
    """The address from which the other end sees the connection come, /ip4/…/tcp/…; None where it names none.

    Raises NetworkError where it does not answer.
    """
    places = places_in([(await identified(session)).observed_addr])
    endpoint = parse(places[0]) if places else None
    return endpoint.place if endpoint is not None and not endpoint.is_name else None
