"""Joining by where a node is, on real loopback: names, addresses that do not say who answers, and what went wrong."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from disconnecting import disconnect
from hosts import identity, network, running, until

from swarmnode.node.discovery.finder import AddressBook, Discovery
from swarmnode.node.host import dialling
from swarmnode.node.host.addresses import public_key
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.protocols.network import Address, Stream, Unreachable
from swarmnode.protocols.runner import in_thread


def port_of(node: Libp2pNetwork) -> int:
    return int(node.addresses[0].split("/")[4])


def loopback_has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("place", ["/ip4/127.0.0.1", "/dns4/localhost", "/dns/localhost"])
async def test_every_kind_of_join_address_connects(place: str, named: bool) -> None:
    a, b = network(), network()
    async with running(a, b):
        address = f"{place}/tcp/{port_of(b)}" + (f"/p2p/{b.me}" if named else "")
        assert await a.connect(address) == b.me
        assert [(view.peer, view.inbound) for view in a.peers()] == [(b.me, False)]
        await until(lambda: [view.peer for view in b.peers()] == [a.me])


async def test_quic_at_a_name_is_dialled_as_such() -> None:
    a, b = network(quic=True), network(quic=True)
    async with running(a, b):
        assert await a.connect(f"/dns4/localhost/udp/{port_of(b)}/quic-v1") == b.me
        assert a.connections.of(b.me)[0].is_quic


@pytest.mark.skipif(not loopback_has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("named", [False, True])
async def test_peers_over_ipv6_are_seen_with_their_addresses(named: bool) -> None:
    a, b = network(), network(listen=("/ip6/::1/tcp/0",))
    async with running(a, b):
        place = f"/ip6/::1/tcp/{port_of(b)}"
        await a.connect(place + (f"/p2p/{b.me}" if named else ""))
        assert a.known_addresses(b.me) == (f"{place}/p2p/{b.me}",)
        await until(lambda: bool(b.peers()))
        assert str(b.connections.of(a.me)[0].conn.get_transport_addresses()[0]).startswith("/ip6/::1/tcp/")


async def test_who_answers_without_being_named_is_a_peer_like_others() -> None:
    a, b = network(), network()
    heard: list[bytes] = []

    async def listen(stream: Stream) -> None:
        heard.append(await stream.receive_some(100))

    b.serve("/test/listen/1", listen)
    async with running(a, b):
        await a.connect(f"/ip4/127.0.0.1/tcp/{port_of(b)}")
        assert a.known_addresses(b.me) == b.addresses
        await until(lambda: bool(a.peers()[0].agent))
        stream = await a.open_stream(b.me, "/test/listen/1")
        await stream.send_all(b"news")
        await until(lambda: heard == [b"news"])
        await stream.aclose()
        await disconnect(a, b.me)
        await until(lambda: a.peers() == b.peers() == () and not b.swarm.get_connections())


async def test_nameless_dials_share_one_connection_and_keep_to_the_one_there_is() -> None:
    a, b = network(), network()
    async with running(a, b):
        place = f"/dns4/localhost/tcp/{port_of(b)}"
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(a.connect, place)
        assert await a.connect(place) == b.me
        assert len(a.connections.of(b.me)) == 1
        await until(lambda: len(b.connections.of(a.me)) == 1)


async def test_failures_to_join_are_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "RESOLVE", 0.1)
    a, b = network(), network()
    real, asked_enough = socket.getaddrinfo, threading.Event()

    def resolve(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "slow":
            asked_enough.wait()
        if name == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *args, **kwargs)

    async def failure(address: Address) -> str:
        with pytest.raises(Unreachable) as failed:
            await a.connect(address, timeout=0.5)
        return str(failed.value)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with running(a, b):
        assert "the name unknown cannot be resolved" in await failure("/dns4/unknown/tcp/4077")
        assert "the name slow was not resolved within 0.1 s" in await failure("/dns4/slow/tcp/4077")
        asked_enough.set()
        told = await failure("/dns4/localhost/tcp/1")
        assert told == "/dns4/localhost/tcp/1 is /ip4/127.0.0.1/tcp/1: connection refused, nothing listens there"
        assert "this node itself" in await failure(f"/ip4/127.0.0.1/tcp/{port_of(a)}")
        nobody = identity().peer_id
        told = await failure(f"/dns4/localhost/tcp/{port_of(b)}/p2p/{nobody}")
        assert f"answers as another peer, {b.me}" in told
        assert "no address" in await failure(f"/dns4/localhost/udp/1/p2p/{identity().peer_id}")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert "did not answer within 0.5 s" in await failure(f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}")


async def test_slow_name_servers_hold_up_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "RESOLVE", 0.5)
    a, answered = network(), threading.Event()

    def resolve(name: str, *_: Any, **__: Any) -> Any:
        answered.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async def fail(address: Address) -> None:
        with pytest.raises(Unreachable):
            await a.connect(address)

    async with running(a):
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        try:
            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(fail, f"/dns4/slow-{number}/tcp/4077")
            with trio.fail_after(2):
                await in_thread(threading.get_ident)
        finally:
            answered.set()
            await until(lambda: dialling.NAMES.borrowed_tokens == 0)


async def test_address_where_something_else_listens_is_no_peer() -> None:
    a = network()

    async def web(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await stream.send_eof()
        while await stream.receive_some():
            pass
        await stream.aclose()

    async with running(a) as nursery:
        listeners = await nursery.start(trio.serve_tcp, web, 0)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(Unreachable, match="no node of this kind answers"):
            await a.connect(f"/ip4/127.0.0.1/tcp/{port}")
        with pytest.raises(Unreachable, match="no node of this kind answers"):
            await a.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity().peer_id}")
        assert a.peers() == ()


async def test_name_is_resolved_anew_for_each_try_until_the_seed_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = network(), network()
    answers: list[str] = []

    def resolve(name: str, port: int, *_: Any, **__: Any) -> Any:
        if name == "seed":
            if not answers:
                answers.append("nothing")
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            answers.append("127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with running(a, b) as nursery:
        join = f"/dns4/seed/tcp/{port_of(b)}"
        discovery = Discovery(a, AddressBook(None), join=(join,))
        await nursery.start(discovery.run)
        await until(lambda: bool(discovery.join_failures))
        assert "cannot be resolved (Temporary failure" in discovery.join_failures[join]
        await until(lambda: [view.peer for view in a.peers()] == [b.me])
        await until(lambda: not discovery.join_failures)
        assert answers == ["nothing", "127.0.0.1"]
        assert f"{join}/p2p/{b.me}" in a.known_addresses(b.me)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """TXT records by name, as this process's resolver finds them."""
    import dns.asyncresolver
    import dns.resolver

    told: dict[str, list[str]] = {}

    async def resolve(name: str, kind: str, **_: Any) -> list[Any]:
        assert kind == "TXT"
        if name not in told:
            raise dns.resolver.NXDOMAIN
        return [SimpleNamespace(strings=(text[:9].encode(), text[9:].encode())) for text in told[name]]

    monkeypatch.setattr(dns.asyncresolver, "resolve", resolve)
    return told


async def test_txt_records_lead_to_seeds(records: dict[str, list[str]]) -> None:
    a, b, c = network(), network(), network()
    async with running(a, b, c):
        records["_dnsaddr.seed.test"] = ["v=spf1 -all", "dnsaddr=/ip4/127.0.0.1/udp/1", "dnsaddr=/dnsaddr/b.test"]
        records["_dnsaddr.b.test"] = [f"dnsaddr={b.addresses[0]}"]
        with pytest.raises(Unreachable, match="no TXT record at _dnsaddr"):
            await a.connect("/dnsaddr/none.test")
        records["_dnsaddr.wrong.test"] = [f"dnsaddr=/ip4/127.0.0.1/tcp/{port_of(b)}/p2p/{c.me}"]
        with pytest.raises(Unreachable, match="answers as another peer"):
            await a.connect("/dnsaddr/wrong.test")
        records["_dnsaddr.loop.test"] = ["dnsaddr=/dnsaddr/loop.test"]
        with pytest.raises(Unreachable, match="the name is behind 3 others"):
            await a.connect("/dnsaddr/loop.test")
        assert not a.peers() and await a.connect("/dnsaddr/seed.test") == b.me


async def test_who_answers_must_have_the_key_that_the_link_names() -> None:
    a, b, c = network(), network(), network()
    async with running(a, b, c):
        place = f"/ip4/127.0.0.1/tcp/{port_of(b)}/key/"
        with pytest.raises(Unreachable, match="answers as another peer than the one that made the link"):
            await a.connect(place + public_key(c.me).public_bytes_raw()[:8].hex())
        assert not a.peers()
        assert await a.connect(place + public_key(b.me).public_bytes_raw()[:8].hex()) == b.me
