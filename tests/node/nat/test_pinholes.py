"""Holes in an IPv6 firewall by UPnP, at a router on ::1 that answers as it should, and at others that do not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio

from swarmnode.node.nat import routers
from swarmnode.node.nat.routers import FIREWALL, LARGEST, LEASE, Lease, MappingRefused, Pinholes

PORT = 4077
DESCRIPTION = f"""<root><device><serviceList>
<service><serviceType>urn:schemas-upnp-org:service:WANIPConnection:2</serviceType><controlURL>/ip</controlURL></service>
<service><serviceType>{FIREWALL}</serviceType><controlURL>/firewall?a=1&amp;b=2</controlURL></service>
</serviceList></device></root>"""
ERROR = "<s:Fault><errorCode>{}</errorCode><errorDescription>{}</errorDescription></s:Fault>"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6, not even ::1")


class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True


class Router:
    """SSDP and HTTP on ::1. `holes` are those that are there, as protocol and port by number."""

    def __init__(self) -> None:
        self.description = DESCRIPTION
        self.location = "http://[::1]:{port}/rootDesc.xml"
        self.answer: tuple[int, str] | None = None  # to every action, instead of the right one
        self.holes: dict[str, tuple[str, str]] = {}
        self.asked: list[str] = []

    def act(self, action: str, body: str) -> tuple[int, str]:
        def told(name: str) -> str:
            return body.partition(f"<{name}>")[2].partition("<")[0]

        self.asked.append(action)
        if self.answer is not None:
            return self.answer
        if action == "AddPinhole":
            if told("InternalClient") != "::1":
                return 500, ERROR.format(606, "Action not authorized")
            assert told("LeaseTime") == str(LEASE) and told("RemoteHost") == ""
            hole = (told("Protocol"), told("InternalPort"))
            number = next((n for n, there in self.holes.items() if there == hole), str(len(self.holes) + 7))
            self.holes[number] = hole
            return 200, f"<u:AddPinholeResponse><UniqueID>{number}</UniqueID></u:AddPinholeResponse>"
        if told("UniqueID") not in self.holes:
            return 500, ERROR.format(704, "NoSuchEntry")
        if action == "DeletePinhole":
            del self.holes[told("UniqueID")]
        return 200, ""

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(200, router.description)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                assert self.path == "/firewall?a=1&b=2"
                self.say(*router.act(self.headers["SOAPAction"].strip('"').partition("#")[2], body))

            def say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None: ...

        server = Server(("::1", 0), Handler)
        ssdp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        ssdp.bind(("::1", 0))
        location = self.location.format(port=server.server_address[1])

        def answer() -> None:
            while True:
                request, whence = ssdp.recvfrom(2048)
                if request == b"end":
                    return
                assert request.startswith(b"M-SEARCH * HTTP/1.1\r\n") and FIREWALL.encode() in request
                ssdp.sendto(b"\xff\0 nonsense", whence)
                ssdp.sendto(f"HTTP/1.1 200 OK\r\nLOCATION: {location}\r\n\r\n".encode(), whence)

        threads = [threading.Thread(target=work, daemon=True) for work in (server.serve_forever, answer)]
        for thread in threads:
            thread.start()
        monkeypatch.setattr(routers, "SSDP", ("::1",))
        monkeypatch.setattr(routers, "SSDP_PORT", ssdp.getsockname()[1])
        monkeypatch.setattr(routers, "DISCOVER_MS", 300)
        try:
            yield
        finally:
            ssdp.sendto(b"end", ssdp.getsockname())
            server.shutdown()
            server.server_close()
            for thread in threads:
                thread.join()
            ssdp.close()


def test_holes_are_opened_renewed_asked_about_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()

    async def main() -> None:
        asked = Pinholes("::1")
        for transport in ("tcp", "udp"):
            assert await asked.map(transport, PORT, PORT) == Lease("::1", PORT, LEASE)
            assert await asked.map(transport, PORT, PORT) == Lease("::1", PORT, LEASE)
        assert sorted(router.holes.values()) == [("17", str(PORT)), ("6", str(PORT))]
        assert await asked.holds("tcp", PORT, Lease("::1", PORT, LEASE))
        router.holes.clear()  # it restarted
        assert not await asked.holds("tcp", PORT, Lease("::1", PORT, LEASE))
        await asked.map("tcp", PORT, PORT)
        await asked.unmap("tcp", PORT, PORT)
        assert router.holes == {}

    with router.running(monkeypatch):
        trio.run(main)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"location": "http://[2a10::5]:80/rootDesc.xml"}, "no router answers"),  # a third's
        ({"location": "http://127.0.0.1:{port}/rootDesc.xml"}, "no router answers"),
        ({"location": "ftp://[::1]:{port}/"}, "no router answers"),
        ({"location": "http://[::1]:1/rootDesc.xml"}, "refused"),
        ({"location": "http://[::1]:99999/rootDesc.xml"}, "UPnP: "),
        ({"description": ""}, "opens no pinholes"),
        ({"description": "<root>" + "x" * LARGEST + DESCRIPTION}, "opens no pinholes"),
        ({"description": DESCRIPTION.replace("/firewall", "http://[2a10::5]/")}, "opens no pinholes"),
        ({"answer": (200, "")}, "something else"),
        ({"answer": (200, "<UniqueID>&lt;1</UniqueID>")}, "something else"),
        ({"answer": (500, ERROR.format(606, "Action not authorized"))}, "error 606, Action not authorized"),
        ({"answer": (500, "\x00" * 1000)}, "HTTP status 500"),
    ],
)
def test_a_router_that_does_otherwise_is_a_refusal_in_words(
    wrong: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    for name, value in wrong.items():
        setattr(router, name, value)

    async def main() -> None:
        with pytest.raises(MappingRefused, match=says):
            await Pinholes("::1").map("tcp", PORT, PORT)

    with router.running(monkeypatch):
        trio.run(main)
