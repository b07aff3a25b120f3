"""Asking the router for a way in: the listening TCP port, mapped by NAT-PMP (RFC 6886) or UPnP-IGD (miniupnpc).

Asked only while this node is not known to be public and its way to the internet leads through a gateway with a private
address. NAT-PMP goes first, as a router that has it answers at once. A mapping is leased, renewed at half its time, and
given back at the end; whether it lets anybody in is for AutoNAT to say. Nothing waits for any of this.
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import miniupnpc
import trio

from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.nat.reachability import Reach, Reachability, is_local
from swarmnode.protocols.network import Address

logger = logging.getLogger(__name__)

LEASE = 3600  # s asked for; a router that restarts has forgotten, and is asked again at half of it
ASK_AGAIN = 600.0  # s after a router that did not answer or refused
LOOK_EVERY = 10.0  # s between looks at whether a mapping is needed
NAT_PMP_PORT = 5351
NAT_PMP_WAITS = (0.25, 0.5, 1.0)  # s for an answer before asking again (RFC 6886, section 3.1, which goes on to 64 s)
DISCOVER_MS = 2000  # ms in which UPnP gateways answer
UPNP_WITHIN = 15.0  # s for finding the gateway and mapping; HTTP requests to it wait 5 s each
GIVE_BACK_WITHIN = 1.5  # s at the end; what is not given back by then ends with its lease
OTHER_PORTS = 3  # tried where another machine has the port already


@dataclass(frozen=True)
class Mapping:
    """A port of the gateway that leads here."""

    way: str  # "NAT-PMP" or "UPnP"
    host: str  # the gateway's outer address, as it says
    port: int
    inner_port: int
    seconds: float  # for which it holds

    @property
    def address(self) -> Address:
        return f"/ip4/{self.host}/tcp/{self.port}"


class MappingRefused(Exception):
    """The gateway does not answer, or does not map. The text says what it said."""


class PortMapping:
    """Keeps one port mapping while `run` runs. `state` is a text for a person."""

    def __init__(
        self,
        network: Libp2pNetwork,
        reachability: Reachability,
        changed: Callable[[], None],
        *,
        pmp_port: int = NAT_PMP_PORT,
    ) -> None:
        """`changed()` is called when the mapping is another one."""
        self._network = network
        self._reachability = reachability
        self._changed = changed
        self._pmp_port = pmp_port
        self._igd: miniupnpc.UPnP | None = None
        self._router: str | None = None  # who gave the mapping
        self._wake = trio.Event()
        self.mapping: Mapping | None = None
        self.state = "not asked for yet"

    def forget(self) -> None:
        """The network changed: whatever was mapped leads elsewhere, and another router may be there."""
        self.mapping = None
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; then the mapping is given back."""
        try:
            while True:
                self._wake = trio.Event()
                wait = LOOK_EVERY
                if self.mapping is not None or self._reachability.state is not Reach.PUBLIC:
                    wait = await self._keep()
                else:
                    self.state = "not needed"
                with trio.move_on_after(wait):
                    await self._wake.wait()
        finally:
            with trio.move_on_after(GIVE_BACK_WITHIN) as closing:
                closing.shield = True
                await self._give_back()

    async def _keep(self) -> float:
        """Map, or renew; how long to wait until the next time, in seconds."""
        listens, gateway, before = self._network.dial_source(), default_gateway(), self.mapping
        if listens is None or listens[0].startswith("127.") or gateway is None or not is_local(gateway):
            self.mapping, self.state = None, "no router to ask"
            wait = LOOK_EVERY
        else:
            try:
                self.mapping = await self._map(gateway, listens[1])
            except MappingRefused as error:
                self.mapping, self.state = None, str(error)
                logger.debug("no port mapping: %s", error)
                wait = ASK_AGAIN
            else:
                self._router, self.state = gateway, "mapped"
                wait = max(1.0, self.mapping.seconds / 2)
        if (before and before.address) != (self.mapping and self.mapping.address):
            if self.mapping is not None:
                logger.info("the router maps %s to this node (%s)", self.mapping.address, self.mapping.way)
            self._changed()
        return wait

    async def _map(self, gateway: str, port: int) -> Mapping:
        wanted = self.mapping.port if self.mapping is not None else port
        try:
            return await self._map_by_pmp(gateway, port, wanted)
        except MappingRefused as error:
            refusal = str(error)
        with trio.move_on_after(UPNP_WITHIN):
            return await trio.to_thread.run_sync(self._map_by_upnp, port, wanted, refusal, abandon_on_cancel=True)
        raise MappingRefused(f"{refusal}; UPnP: no answer in time")

    async def _give_back(self) -> None:
        mapping, self.mapping = self.mapping, None
        if mapping is None:
            return
        try:
            if mapping.way == "NAT-PMP" and self._router is not None:
                await self._ask_pmp(self._router, struct.pack("!BBHHHI", 0, 2, 0, mapping.inner_port, 0, 0), 16)
            else:
                await trio.to_thread.run_sync(self._unmap_by_upnp, mapping, abandon_on_cancel=True)
        except MappingRefused as error:
            logger.debug("the port mapping stays until its lease ends: %s", error)

    # --- NAT-PMP ----------------------------------------------------------------------------------------------------

    async def _map_by_pmp(self, gateway: str, port: int, wanted: int) -> Mapping:
        outer = await self._ask_pmp(gateway, b"\0\0", 12)
        request = struct.pack("!BBHHHI", 0, 2, 0, port, wanted, LEASE)
        *_head, inner, mapped, seconds = struct.unpack("!BBHIHHI", await self._ask_pmp(gateway, request, 16))
        if inner != port or not mapped or not seconds:
            raise MappingRefused("NAT-PMP: the router answered something else")
        return Mapping("NAT-PMP", socket.inet_ntoa(outer[8:12]), mapped, port, float(seconds))

    async def _ask_pmp(self, gateway: str, request: bytes, size: int) -> bytes:
        """The answer to `request`, `size` bytes long."""
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try:
                await udp.connect((gateway, self._pmp_port))
                for wait in NAT_PMP_WAITS:
                    await udp.send(request)
                    with trio.move_on_after(wait):
                        while True:
                            answer = await udp.recv(64)
                            if len(answer) < 4 or answer[0] != 0 or answer[1] != 128 + request[1]:
                                continue
                            if result := int.from_bytes(answer[2:4], "big"):
                                raise MappingRefused(f"NAT-PMP: the router refuses (result {result})")
                            if len(answer) >= size:
                                return answer[:size]
            except OSError as error:
                refused = error.errno == errno.ECONNREFUSED
                raise MappingRefused(f"NAT-PMP: {'not offered' if refused else error.strerror}") from error
        raise MappingRefused("NAT-PMP: no answer")

    # --- UPnP, in threads -------------------------------------------------------------------------------------------

    def _map_by_upnp(self, port: int, wanted: int, refusal: str) -> Mapping:
        """Blocking. `refusal` is why NAT-PMP did not do."""
        try:
            igd = self._igd or _find_igd()
            outer = igd.externalipaddress()
            for chosen in (wanted, *range(wanted + 1, min(wanted + 1 + OTHER_PORTS, 65536))):
                if _add(igd, chosen, port):
                    self._igd = igd
                    return Mapping("UPnP", outer, chosen, port, float(LEASE))
        except Exception as error:  # miniupnpc raises bare Exception for whatever it meets
            self._igd = None
            raise MappingRefused(f"{refusal}; UPnP: {error}") from error
        raise MappingRefused(f"{refusal}; UPnP: the ports {wanted} to {wanted + OTHER_PORTS} are taken")

    def _unmap_by_upnp(self, mapping: Mapping) -> None:
        try:
            if self._igd is not None:
                self._igd.deleteportmapping(mapping.port, "TCP")
        except Exception as error:  # as above
            raise MappingRefused(f"UPnP: {error}") from error


def _find_igd() -> miniupnpc.UPnP:
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


def _add(igd: miniupnpc.UPnP, outer: int, inner: int) -> bool:
    """Map a port; False where another machine has it. Raises what miniupnpc raises."""
    for lease in (LEASE, 0):  # some gateways map for ever only: given back at the end all the same
        try:
            return bool(igd.addportmapping(outer, "TCP", igd.lanaddr, inner, "swarmnode", "", lease))
        except Exception as error:
            if "Conflict" in str(error):
                return False
            if lease == 0 or "OnlyPermanentLeases" not in str(error):
                raise
    return False


def default_gateway(routes: Iterable[str] | None = None) -> str | None:
    """The IPv4 gateway of the default route; None where there is none, or where this cannot be found out.

    `routes` are the lines of Linux's /proc/net/route.
    """
    if routes is None:
        try:
            routes = Path("/proc/net/route").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
    found: list[tuple[int, str]] = []
    for line in routes:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000" and fields[2] != "00000000":
            found.append((int(fields[6]), socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))))
    return min(found)[1] if found else None
