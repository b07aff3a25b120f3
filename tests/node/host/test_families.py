"""IPv4 and IPv6 beside each other: both listened on and announced, dialled by turns, and no matter where one is not."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import hosts
import ifaddr
import pytest
import trio

from swarmnode.node.host import addresses
from swarmnode.node.host.addresses import announced, by_turns, listening, public_key
from swarmnode.node.host.dialling import STAGGER
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.protocols.state.membership import work_of

LOOPBACK = ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0")
PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

no_ipv6 = not Path("/proc/net/if_inet6").exists() or "00000000000000000000000000000001" not in Path(
    "/proc/net/if_inet6"
).read_text(encoding="ascii")
on_ipv6 = pytest.mark.skipif(no_ipv6, reason="this machine has no IPv6, not even ::1")


def network(listen: tuple[str, ...]) -> Libp2pNetwork:
    return hosts.network(listen=listen)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(20):
            await main()

    trio.run(bounded)


def interfaces(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """This machine has interfaces with these addresses."""
    ips = [
        SimpleNamespace(ip=(host, 0, 0) if ":" in host else host, is_IPv4=":" not in host, network_prefix=64)
        for host in hosts
    ]
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: [SimpleNamespace(name="eth0", ips=ips)])


def flagged(monkeypatch: pytest.MonkeyPatch, folder: Path, *rows: tuple[str, int]) -> None:
    """The kernel's table says so of addresses."""
    monkeypatch.setattr(addresses, "FLAGS", folder / "if_inet6")
    lines = (f"{socket.inet_pton(socket.AF_INET6, host).hex()} 02 40 00 {flags:02x}     eth0" for host, flags in rows)
    addresses.FLAGS.write_text("\n".join(lines))


def test_every_interface_is_both_families_where_the_kernel_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("/ip4/0.0.0.0/tcp/4077", "/ip6/::/tcp/4077")
    monkeypatch.setattr(addresses, "_has_ipv6", lambda: True)
    assert listening("::", 4077) == both
    assert listening("0.0.0.0", 4077) == both[:1] and listening("::1", 1) == ("/ip6/::1/tcp/1",)
    monkeypatch.setattr(addresses, "_has_ipv6", lambda: False)
    assert listening("::", 4077) == both[:1] and listening("127.0.0.1", 1) == ("/ip4/127.0.0.1/tcp/1",)


def test_addresses_of_both_families_are_announced_by_turns_and_passing_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lasting, temporary, old, new, ula = "2a10::1", "2a10::7c3a", "2a11::1", "2a12::1", "fd00::2"
    interfaces(
        monkeypatch,
        *("127.0.0.1", "::1", "192.168.1.2", "172.17.0.1"),
        *(temporary, lasting, old, new, "fe80::1", ula, "169.254.1.1"),
    )
    rows = [(lasting, 0x80), (temporary, 0x01), (old, 0x20), (new, 0x40), (ula, 0x80), ("::1", 0x80)]
    flagged(monkeypatch, tmp_path, *rows)
    assert announced(("/ip4/0.0.0.0/tcp/4077", "/ip6/::/tcp/4077")) == (
        "/ip4/192.168.1.2/tcp/4077",
        "/ip6/2a10::1/tcp/4077",
        "/ip4/172.17.0.1/tcp/4077",
        "/ip6/fd00::2/tcp/4077",
    )
    monkeypatch.setattr(addresses, "FLAGS", tmp_path / "nothing")  # another kernel, which does not tell
    assert f"/ip6/{temporary}/tcp/4077" in announced(("/ip6/::/tcp/4077",))


@pytest.mark.parametrize("others", [(), ("fe80::1",), ("::1",)], ids=["none", "link-local only", "loopback only"])
def test_without_ipv6_that_leads_anywhere_only_ipv4_is_announced(
    others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces(monkeypatch, "127.0.0.1", "192.168.1.2", *others)
    assert announced(("/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1")) == ("/ip4/192.168.1.2/tcp/1",)


def test_loopback_is_announced_for_want_of_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, "127.0.0.1", "::1", "fe80::1")
    assert announced(("/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1")) == ("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1")


def test_without_a_descriptor_for_it_addresses_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    interfaces(monkeypatch, "192.168.1.2", "2a10::1")
    before = announced(("/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1"))
    monkeypatch.setattr(ifaddr, "get_adapters", refused)
    for _ in range(3):
        assert announced(("/ip4/0.0.0.0/tcp/1", "/ip6/::/tcp/1")) == before
    assert len(before) == 2 and caplog.text.count("Too many open files") == 1


def test_families_take_turns_and_keep_their_order() -> None:
    given = ["/ip4/1.0.0.1", "/ip4/1.0.0.2", "/dns4/a", "/ip6/2a10::1", "/dns6/b"]
    assert by_turns(given, first="6") == ["/ip6/2a10::1", "/ip4/1.0.0.1", "/dns6/b", "/ip4/1.0.0.2", "/dns4/a"]
    assert by_turns(given[:2], first="6") == given[:2] and by_turns([], first="4") == []


@on_ipv6
def test_a_node_listens_on_one_port_of_both_families_and_is_reached_at_each() -> None:
    async def main() -> None:
        a = network(LOOPBACK)
        async with trio.open_nursery() as nursery:
            await nursery.start(a.run)
            fourth, sixth = a.addresses
            assert fourth.split("/")[4] == sixth.split("/")[4] != "0"
            for address, host in ((fourth, "127.0.0.1"), (sixth, "::1")):
                b = network(LOOPBACK)
                await nursery.start(b.run)
                await b.connect(address)
                assert b.host_of(a.me) == host and a.dial_source(host) == (host, int(fourth.split("/")[4]))
            nursery.cancel_scope.cancel()

    run(main)


@on_ipv6
@pytest.mark.parametrize("silent", ["6", "4"])
def test_where_one_family_leads_nowhere_the_other_is_dialled_after_a_quarter_of_a_second(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        a, b = network(LOOPBACK), network(LOOPBACK)
        async with hosts.running(a, b):
            dial, began = a.swarm.dial_addr, []

            async def slow(address: object, *more: object) -> object:
                began.append((str(address).split("/")[1], trio.current_time()))
                if str(address).startswith(f"/ip{silent}"):
                    await trio.sleep_forever()
                return await dial(address, *more)  # type: ignore[arg-type]

            monkeypatch.setattr(a.swarm, "dial_addr", slow)
            a.learn(b.me, tuple(reversed(b.addresses)) if silent == "4" else b.addresses)
            await a.connect(b.me)
            assert a.host_of(b.me) == ("127.0.0.1" if silent == "6" else "::1")
            assert began[0][0] == "ip6"  # it goes first, whatever the peer says
            if silent == "6":
                assert [family for family, _ in began] == ["ip6", "ip4"]
                assert began[1][1] - began[0][1] >= STAGGER

    run(main)


@pytest.mark.parametrize("spelled", [" {}", "{} ", "{}\n", "\t{}", "{}\u00a0", "{}é"])
def test_a_peer_id_has_one_spelling(spelled: str) -> None:
    peer = "12D3KooWSvTx5sQewsu9AeeReYzxc4CHzFv3dDLKxSKaVMPx5tTr"
    assert public_key(peer) and work_of(peer) >= 0
    with pytest.raises(ValueError, match="is not the id of an Ed25519 key"):
        public_key(spelled.format(peer))
    assert work_of(spelled.format(peer)) == -1


@pytest.mark.timeout(20)
def test_what_is_much_too_long_for_a_peer_id_is_refused_without_being_decoded() -> None:
    with pytest.raises(ValueError, match="is not the id of an Ed25519 key"):
        public_key("1" * 1_000_000)
