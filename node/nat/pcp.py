"""Asking a router for a way in by PCP (RFC 6887), or by NAT-PMP (RFC 6886), which came before it.

    node   -> router    MAP(seconds, nonce, protocol, inner port, wanted outer port)
    router -> node      MAP(result, seconds, epoch, nonce, protocol, inner port, outer port, outer address)

One datagram each way, to UDP port 5351. NAT-PMP has no nonce, knows IPv4 only, and tells its address in an answer of
its own. Over IPv6 nothing is translated, as a rule: what PCP maps is a hole in the router's firewall at the node's own
address.

Asking again renews, and changes nothing else; so it is also how a router is asked whether it still maps so. One that
forgot maps anew by that, whether its epoch (the time since it knew nothing; RFC 6887, section 8.5) tells of it or not,
as where its daemon alone restarted. The nonce follows from the node's key, so that a node that was killed can renew
what it has.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

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
LARGEST = 1100  # bytes (RFC 6887, section 7)
RESULTS = {
    **{1: "another version", 2: "not allowed", 3: "malformed", 4: "not this opcode", 7: "network failure"},
    **{8: "no resources", 9: "not this protocol", 10: "too many ports", 11: "not this outer port", 12: "another NAT"},
}


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
                            answer = await udp.recv(LARGEST)
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
        anywhere = bytes(16) if ":" in self._source else _packed("0.0.0.0")
        head = HEADER.pack(2, MAP, 0, seconds, _packed(self._source))
        request = head + MAPPED.pack(nonce, number, port, wanted, anywhere)
        own = slice(HEADER.size, HEADER.size + 18)  # the nonce, the protocol and the inner port
        answer = await self._ask(request, HEADER.size + MAPPED.size, own)
        given = int.from_bytes(answer[4:8], "big")
        *_, outer, packed = MAPPED.unpack_from(answer, HEADER.size)
        address = ipaddress.IPv6Address(packed)
        host = address.ipv4_mapped or address
        if seconds and (
            not given or not outer or host.is_unspecified or host.version != (6 if ":" in self._source else 4)
        ):
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
    address = ipaddress.ip_address(host)
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
