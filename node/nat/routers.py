"""The ways to ask a router for a way in: PCP (RFC 6887), NAT-PMP (RFC 6886), which came before it, and UPnP.

    node   -> router    MAP(seconds, nonce, protocol, inner port, wanted outer port)
    router -> node      MAP(result, seconds, epoch, nonce, protocol, inner port, outer port, outer address)

One datagram each way, to UDP port 5351. NAT-PMP has no nonce, knows IPv4 only, and tells its address in an answer of
its own. Over IPv6 nothing is translated, as a rule: PCP opens the router's firewall at the node's own address.

Asking again renews, and changes nothing else; so it is also how a router is asked whether it still maps so. One that
forgot maps anew by that, whether its epoch (the time since it knew nothing; RFC 6887, section 8.5) tells of it or not,
as where its daemon alone restarted. The nonce follows from the node's key, so a killed node can renew what it has.

UPnP is asked in threads. Ports are mapped with miniupnpc (WANIPConnection). Its Python module has no IPv6, so
`Pinholes` speaks what little is needed of WANIPv6FirewallControl:1 (UPnP Forum, 2010): find the router by SSDP over
IPv6, read where its description puts the service, and post AddPinhole there. A pinhole is asked for from the address
that it is for; a router refuses any other. What a stranger on the local network answers is bounded, and leads to nobody
but that stranger.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from html import escape, unescape
from typing import Protocol, TypeVar
from urllib.parse import urljoin, urlsplit

import miniupnpc
import trio

SERVER_PORT = 5351
WAITS = (0.25, 0.5, 1.0)  # s for an answer before asking again; a router is one step away (RFC 6886, 3.1 goes to 64 s)
LEASE = 3600  # s asked for
ANSWER = 0x80  # in an opcode
MAP = 1  # opcode of PCP, version 2
ADDRESS, MAP_UDP, MAP_TCP = 0, 1, 2  # opcodes of NAT-PMP, version 0
HEADER = struct.Struct("!BBHI16s")  # version, opcode, reserved, seconds, the client's address
MAPPED = struct.Struct("!12sB3xHH16s")  # nonce, protocol, inner and outer port, outer address
NUMBERS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}
LARGEST_DATAGRAM = 1100  # bytes (RFC 6887, section 7)
RESULTS = {
    **{1: "another version", 2: "not allowed", 3: "malformed", 4: "not this opcode", 7: "network failure"},
    **{8: "no resources", 9: "not this protocol", 10: "too many ports", 11: "not this outer port", 12: "another NAT"},
}
DISCOVER_MS = 2000  # ms in which UPnP gateways answer
WITHIN = 15.0  # s for finding the gateway and mapping; HTTP requests to it wait 5 s each
HTTP_WITHIN = 5.0  # s
OTHER_PORTS = 3  # tried where another machine has the port already
FIREWALL = "urn:schemas-upnp-org:service:WANIPv6FirewallControl:1"
SSDP = ("ff02::c", "ff05::c")  # link-local and site-local (UPnP Device Architecture 2.0, annex A)
SSDP_PORT = 1900
LARGEST = 64 << 10  # bytes of a description or an answer
DESCRIPTION = "swarmnode"

T = TypeVar("T")
THREADS = trio.CapacityLimiter(2)  # a router that never ends its answer holds these, and no others


class MappingRefused(Exception):
    """The gateway does not answer, or does not map. The text says what it said."""


@dataclass(frozen=True)
class Lease:
    """A port of the router that leads here."""

    host: str  # the router's outer address; over IPv6 the node's own, as a rule
    port: int
    seconds: float  # for which it holds


class Way(Protocol):
    """One way to ask one router. All three raise MappingRefused where it does not do what was asked."""

    name: str

    async def map(self, transport: str, port: int, wanted: int) -> Lease:
        """Have an outer port, `wanted` if it is free, lead to `port` here; or renew that. `transport`: tcp or udp."""

    async def unmap(self, transport: str, port: int, outer: int) -> None: ...

    async def holds(self, transport: str, port: int, lease: Lease) -> bool:
        """Whether the router still maps so."""


class _Datagrams(Way):
    """What both protocols share: one request, one answer, and asking again."""

    def __init__(self, router: str, source: str) -> None:
        """`source`: this node's address, from which it asks."""
        self._router, self._source = router, source

    async def holds(self, transport: str, port: int, lease: Lease) -> bool:
        there = await self.map(transport, port, lease.port)
        return (there.host, there.port) == (lease.host, lease.port)

    async def _ask(self, request: bytes, size: int, same: slice = slice(0)) -> bytes:
        """The answer, at least `size` bytes; what comes from elsewhere or repeats `same` otherwise is not it."""
        with trio.socket.socket(socket.AF_INET6 if ":" in self._source else socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                await udp.bind((self._source, 0))
                await udp.connect((self._router, SERVER_PORT))
                for wait in WAITS:
                    await udp.send(request)
                    with trio.move_on_after(wait):
                        while True:
                            answer = await udp.recv(LARGEST_DATAGRAM)
                            if len(answer) < 4 or answer[1] != ANSWER | request[1]:
                                continue
                            result = int.from_bytes(answer[2:4], "big")  # of PCP the second of these bytes
                            if answer[0] != request[0]:
                                raise MappingRefused(f"{self.name}: the router speaks version {answer[0]} only")
                            if result:
                                why = f", {RESULTS[result]}" if self.name == "PCP" and result in RESULTS else ""
                                raise MappingRefused(f"{self.name}: the router refuses (result {result}{why})")
                            if len(answer) >= size and answer[same] == request[same]:
                                return answer
            except OSError as error:
                refused = error.errno == errno.ECONNREFUSED
                raise MappingRefused(f"{self.name}: {'not offered' if refused else error.strerror}") from error
        raise MappingRefused(f"{self.name}: no answer")


class Pcp(_Datagrams):
    """PCP, version 2."""

    name = "PCP"

    def __init__(self, router: str, source: str, secret: bytes) -> None:
        """`secret`: nobody else has it, and it is the same tomorrow."""
        super().__init__(router, source)
        self._secret = secret

    async def map(self, transport: str, port: int, wanted: int) -> Lease:
        return await self._map(transport, port, wanted, LEASE)

    async def unmap(self, transport: str, port: int, outer: int) -> None:
        await self._map(transport, port, 0, 0)

    async def _map(self, transport: str, port: int, wanted: int, seconds: int) -> Lease:
        number = NUMBERS[transport]
        nonce = hashlib.sha256(self._secret + struct.pack("!BH", number, port)).digest()[:12]
        version = 6 if ":" in self._source else 4
        anywhere = bytes(16) if version == 6 else _packed("0.0.0.0")
        head = HEADER.pack(2, MAP, 0, seconds, _packed(self._source))
        request = head + MAPPED.pack(nonce, number, port, wanted, anywhere)
        own = slice(HEADER.size, HEADER.size + 18)  # the nonce, the protocol and the inner port
        answer = await self._ask(request, HEADER.size + MAPPED.size, own)
        given = int.from_bytes(answer[4:8], "big")
        *_, outer, packed = MAPPED.unpack_from(answer, HEADER.size)
        address = ipaddress.IPv6Address(packed)
        host = address.ipv4_mapped or address
        if seconds and (not given or not outer or host.is_unspecified or host.version != version):
            raise MappingRefused("PCP: the router answered something else")
        return Lease(str(host), outer, float(given))


class NatPmp(_Datagrams):
    """NAT-PMP, of IPv4."""

    name = "NAT-PMP"

    async def map(self, transport: str, port: int, wanted: int) -> Lease:
        host = socket.inet_ntoa((await self._ask(bytes((0, ADDRESS)), 12))[8:12])
        request = struct.pack("!BBHHHI", 0, MAP_TCP if transport == "tcp" else MAP_UDP, 0, port, wanted, LEASE)
        _, _, _, _, inner, outer, seconds = struct.unpack("!BBHIHHI", (await self._ask(request, 16))[:16])
        if inner != port or not outer or not seconds:
            raise MappingRefused("NAT-PMP: the router answered something else")
        return Lease(host, outer, float(seconds))

    async def unmap(self, transport: str, port: int, outer: int) -> None:
        await self._ask(struct.pack("!BBHHHI", 0, MAP_TCP if transport == "tcp" else MAP_UDP, 0, port, 0, 0), 16)


def _packed(host: str) -> bytes:
    """16 bytes: IPv4 addresses as ::ffff:a.b.c.d."""
    return ipaddress.IPv6Address(host if ":" in host else f"::ffff:{host}").packed


async def _in_thread(work: partial[T]) -> T:
    """Raises MappingRefused for whatever the work does: miniupnpc raises bare Exception for whatever it meets."""
    with trio.move_on_after(WITHIN):
        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=THREADS)
        except Exception as error:
            kind = type(error) if isinstance(error, MappingRefused) else MappingRefused
            raise kind(f"UPnP: {str(error) or type(error).__name__}") from error
    raise MappingRefused("UPnP: no answer in time")


class Upnp:
    """A router's IPv4 ports."""

    name = "UPnP"

    def __init__(self) -> None:
        self._igd: miniupnpc.UPnP | None = None

    async def map(self, transport: str, port: int, wanted: int) -> Lease:
        return await _in_thread(partial(self._map, transport.upper(), port, wanted))

    async def unmap(self, transport: str, port: int, outer: int) -> None:
        if self._igd is not None:
            await _in_thread(partial(self._igd.deleteportmapping, outer, transport.upper()))

    async def holds(self, transport: str, port: int, lease: Lease) -> bool:
        return await _in_thread(partial(self._holds, transport.upper(), lease))

    def _map(self, transport: str, port: int, wanted: int) -> Lease:
        igd, self._igd = self._igd or find_igd(), None  # found anew after a failure: a router may be elsewhere then
        outer = str(ipaddress.ip_address(igd.externalipaddress()))
        for chosen in (wanted, *range(wanted + 1, min(wanted + 1 + OTHER_PORTS, 65536))):
            if _add(igd, transport, chosen, port):
                self._igd = igd
                return Lease(outer, chosen, float(LEASE))
        raise MappingRefused(f"the ports {wanted} to {wanted + OTHER_PORTS} are taken")

    def _holds(self, transport: str, lease: Lease) -> bool:
        igd, self._igd = self._igd or find_igd(), None  # as above
        there = igd.getspecificportmapping(lease.port, transport)
        held = bool(there) and there[0] == igd.lanaddr and igd.externalipaddress() == lease.host
        self._igd = igd
        return held


def find_igd() -> miniupnpc.UPnP:
    """Blocking. Raises MappingRefused where none answers, and what miniupnpc raises."""
    igd = miniupnpc.UPnP()
    igd.discoverdelay = DISCOVER_MS
    try:
        found = igd.discover()
    except Exception as error:
        if str(error) != "Success":
            raise
        found = 0  # what miniupnpc 2.3 raises when nothing answered in time
    if not found:
        raise MappingRefused("no router answers")
    igd.selectigd()
    return igd


def _add(igd: miniupnpc.UPnP, transport: str, outer: int, inner: int) -> bool:
    """Map a port; False where another machine has it. Raises what miniupnpc raises."""
    for lease in (LEASE, 0):  # some gateways map for ever only: given back at the end all the same
        try:
            return bool(igd.addportmapping(outer, transport, igd.lanaddr, inner, DESCRIPTION, "", lease))
        except Exception as error:
            if "Conflict" in str(error):
                return False
            if lease == 0 or "OnlyPermanentLeases" not in str(error):
                raise
    return False


class Pinholes:
    """Holes in a router's IPv6 firewall that lead to `source`, one of this machine's addresses."""

    name = "UPnP"

    def __init__(self, source: str) -> None:
        self._source = source
        self._control = ""  # the URL that the router takes actions at
        self._holes: dict[str, str] = {}  # the router's number for the hole, by transport

    async def map(self, transport: str, port: int, wanted: int) -> Lease:
        return await _in_thread(partial(self._map, transport, port))

    async def unmap(self, transport: str, port: int, outer: int) -> None:
        if (hole := self._holes.pop(transport, None)) is not None:
            await _in_thread(partial(self._act, "DeletePinhole", (("UniqueID", hole),)))

    async def holds(self, transport: str, port: int, lease: Lease) -> bool:
        hole = (("UniqueID", self._holes.get(transport, "")),)
        try:
            await _in_thread(partial(self._act, "GetPinholePackets", hole))
        except _NoSuchEntry:
            return False
        return True

    def _map(self, transport: str, port: int) -> Lease:
        asked = (
            *(("RemoteHost", ""), ("RemotePort", "0"), ("InternalClient", self._source), ("InternalPort", str(port))),
            *(("Protocol", str(int(NUMBERS[transport]))), ("LeaseTime", str(LEASE))),
        )
        answer = self._act("AddPinhole", asked)
        hole = re.search(r"<UniqueID[^>]*>\s*([0-9]{1,5})\s*</UniqueID>", answer)
        if hole is None:
            raise MappingRefused("the router answered something else")
        self._holes[transport] = hole[1]
        return Lease(self._source, port, float(LEASE))

    def _act(self, action: str, arguments: Sequence[tuple[str, str]]) -> str:
        """Blocking: what the router answers to an action. Raises MappingRefused."""
        inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in arguments)
        envelope = (
            '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f'<u:{action} xmlns:u="{FIREWALL}">{inner}</u:{action}></s:Body></s:Envelope>'
        )
        heads = {"Content-Type": 'text/xml; charset="utf-8"', "SOAPAction": f'"{FIREWALL}#{action}"'}
        control, self._control = self._control or self._find(), ""  # found anew after a failure, as above
        status, answer = self._http("POST", control, envelope.encode(), heads)
        if status == 200:
            self._control = control
            return answer
        code = re.search(r"<errorCode>\s*([0-9]+)", answer)
        what = re.search(r"<errorDescription>([^<]{0,100})", answer)
        said = f"error {code[1]}" if code else f"HTTP status {status}"
        failure = _NoSuchEntry if code and code[1] == "704" else MappingRefused
        raise failure(said + (f", {unescape(what[1])}" if what else ""))

    def _http(self, method: str, url: str, body: bytes = b"", heads: dict[str, str] | None = None) -> tuple[int, str]:
        parts = urlsplit(url)
        host, port, source = parts.hostname or "", parts.port, (self._source, 0)
        connection = http.client.HTTPConnection(host, port, timeout=HTTP_WITHIN, source_address=source)
        with closing(connection):
            target = parts._replace(scheme="", netloc="", fragment="").geturl()
            connection.request(method, target or "/", body, heads or {})
            answer = connection.getresponse()
            return answer.status, answer.read(LARGEST).decode(errors="replace")

    def _find(self) -> str:
        """Blocking: where the router that answers first takes actions of its firewall."""
        location = self._search()
        service = re.search(
            rf"<serviceType>\s*{re.escape(FIREWALL)}\s*</serviceType>.*?<controlURL>\s*([^<\s]+)\s*</controlURL>",
            self._http("GET", location)[1],
            re.DOTALL,
        )
        control = urljoin(location, unescape(service[1])) if service else ""
        if urlsplit(control).netloc != urlsplit(location).netloc:
            raise MappingRefused("the router opens no pinholes")
        return control

    def _search(self) -> str:
        """The description's URL, at whoever answers first."""
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as udp:
            udp.bind((self._source, 0))
            udp.settimeout(DISCOVER_MS / 1000)
            udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 2)
            for group in SSDP:
                udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, _interface_of(self._source))
                heads = (f"HOST: [{group}]:{SSDP_PORT}", 'MAN: "ssdp:discover"', "MX: 1", f"ST: {FIREWALL}")
                udp.sendto("\r\n".join(("M-SEARCH * HTTP/1.1", *heads, "", "")).encode(), (group, SSDP_PORT))
            while True:
                try:
                    answer, whence = udp.recvfrom(2048)
                except TimeoutError:
                    raise MappingRefused("no router answers") from None
                at = re.search(rb"(?im)^location:\s*(http://\S+)\s*$", answer)
                location = at[1].decode(errors="replace") if at is not None else ""
                if _leads_to(location, whence[0], self._source):
                    return location


class _NoSuchEntry(MappingRefused):
    """The router knows no such pinhole."""


def _interface_of(source: str) -> int:
    """The number of the interface that has an address; 0 lets the kernel choose."""
    import ifaddr

    for adapter in ifaddr.get_adapters():
        if any(not entry.is_IPv4 and entry.ip[0] == source for entry in adapter.ips):
            return adapter.index or 0
    return 0


def _leads_to(location: str, whence: str, source: str) -> bool:
    """Whether a URL is on the machine that sent it, or at least on the same network as this one: a router has several
    addresses."""
    try:
        host = ipaddress.IPv6Address(urlsplit(location).hostname or "")
    except ValueError:
        return False
    return str(host) == whence or host in ipaddress.IPv6Network((source, 64), strict=False)
