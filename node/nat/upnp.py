"""Asking a router for a way in by UPnP, in threads: a port of its IPv4 address, or a hole in its IPv6 firewall.

Ports are mapped with miniupnpc (WANIPConnection). Its Python module has no IPv6, so `Pinholes` speaks what little is
needed of WANIPv6FirewallControl:1 (UPnP Forum, 2010): find the router by SSDP over IPv6, read where its description
puts the service, and post AddPinhole there. A pinhole is asked for from the address that it is for; a router refuses
any other. What a stranger on the local network answers is bounded, and leads to nobody but that stranger.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from html import escape, unescape
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import miniupnpc
import trio

from swarmnode.node.nat.pcp import LEASE, NUMBERS, Lease, MappingRefused

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
        await _in_thread(partial(self._unmap, transport.upper(), outer))

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

    def _unmap(self, transport: str, outer: int) -> None:
        if self._igd is not None:
            self._igd.deleteportmapping(outer, transport)

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
        source = (self._source, 0)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=HTTP_WITHIN, source_address=source
        )
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
                if (
                    at is not None
                    and (location := at[1].decode(errors="replace"))
                    and _leads_to(location, whence[0], self._source)
                ):
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
