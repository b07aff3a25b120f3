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
from pathlib import Path

import miniupnpc
import trio

from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.nat.reachability import Mapping, Reach, Reachability, is_local

logger = logging.getLogger(__name__)

LEASE = 3600  # s asked for; a router that restarts has forgotten, and is asked again at half of it
ASK_AGAIN = 600.0  # s after a router that did not answer or refused
LOOK_EVERY = 10.0  # s between looks at whether a mapping is needed
ROUTES = Path("/proc/net/route")  # Linux's table
NAT_PMP_PORT = 5351
NAT_PMP_WAITS = (0.25, 0.5, 1.0)  # s for an answer before asking again (RFC 6886, section 3.1, which goes on to 64 s)
DISCOVER_MS = 2000  # ms in which UPnP gateways answer
UPNP_WITHIN = 15.0  # s for finding the gateway and mapping; HTTP requests to it wait 5 s each
GIVE_BACK_WITHIN = 1.5  # s at the end; what is not given back by then ends with its lease
OTHER_PORTS = 3  # tried where another machine has the port already


class MappingRefused(Exception):
    """The gateway does not answer, or does not map. The text says what it said."""


class PortMapping:
    """Keeps `reachability.mapping` while `run` runs. `state` is a text for a person."""

    def __init__(self, network: Libp2pNetwork, reachability: Reachability) -> None:
        self._network = network
        self._reachability = reachability
        self._igd: miniupnpc.UPnP | None = None
        self._router: str | None = None  # who gave the mapping
        self._wake = trio.Event()
        self.state = "not asked for yet"

    def ask_anew(self) -> None:
        """The network changed: whatever was mapped leads elsewhere, and another router may be there."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; then the mapping is given back."""
        try:
            while True:
                self._wake = trio.Event()
                wait = LOOK_EVERY
                if self._reachability.mapping is not None or self._reachability.state is not Reach.PUBLIC:
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
        gateway = default_gateway()
        listens = self._network.dial_source(gateway) if gateway is not None else None
        mapping, wait = None, LOOK_EVERY
        if listens is None or listens[0].startswith("127.") or gateway is None or not is_local(gateway):
            self.state = "no router to ask"
        else:
            try:
                mapping = await self._map(gateway, listens[1])
            except MappingRefused as error:
                self.state, wait = str(error), ASK_AGAIN
                logger.debug("no port mapping: %s", error)
            else:
                self._router, self.state = gateway, "mapped"
                wait = max(1.0, mapping.seconds / 2)
        before = self._reachability.mapping
        if mapping is not None and (before is None or before.address != mapping.address):
            logger.info("the router maps %s to this node (%s)", mapping.address, mapping.way)
        self._reachability.map_to(mapping)
        return wait

    async def _map(self, gateway: str, port: int) -> Mapping:
        before = self._reachability.mapping
        wanted = before.port if before is not None else port
        try:
            return await self._map_by_pmp(gateway, port, wanted)
        except MappingRefused as error:
            refusal = str(error)
        with trio.move_on_after(UPNP_WITHIN):
            return await trio.to_thread.run_sync(self._map_by_upnp, port, wanted, refusal, abandon_on_cancel=True)
        raise MappingRefused(f"{refusal}; UPnP: no answer in time")

    async def _give_back(self) -> None:
        mapping, self._reachability.mapping = self._reachability.mapping, None
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
                await udp.connect((gateway, NAT_PMP_PORT))
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


def default_gateway() -> str | None:
    """The IPv4 gateway of the default route; None where there is none, or where this cannot be found out."""
    try:
        routes = ROUTES.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found: list[tuple[int, str]] = []
    for line in routes:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000" and fields[2] != "00000000":
            found.append((int(fields[6]), socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))))
    return min(found)[1] if found else None
