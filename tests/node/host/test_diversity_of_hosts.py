"""Where a node keeps peers, no network has more than its share: routing table, beginners of lookups, places, book."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import hosts
import pytest
import trio
from hosts import identity, network, running, until
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.discovery.finder import MAX_PEERS, AddressBook
from swarmnode.node.discovery.kademlia import ANCHORS, CLOSER, PER_PREFIX, PER_RELAY, Kademlia
from swarmnode.node.host.connections import Connection, Connections


def connected_from(group_of: Any) -> Connections:
    return cast(Any, SimpleNamespace(group_of=group_of))


def filled(group: str | None, count: int = 18) -> tuple[Kademlia, int]:
    """A routing table that was offered so many peers of one group, and how many it took."""

    async def main() -> tuple[Kademlia, int]:
        network = hosts.network()
        table = network.kademlia
        table._connections = connected_from(lambda peer: group)
        taken = 0
        for number in range(count):
            peer = ID.from_base58(identity().peer_id)
            table.host.get_peerstore().add_addrs(peer, [Multiaddr(f"/ip4/127.0.0.1/tcp/{2000 + number}")], 3600)
            taken += await table.add_peer(peer, skip_server_mode_check=True)
        return table, taken

    return trio.run(main)


def test_a_bucket_takes_few_of_one_network_and_all_of_no_network() -> None:
    assert filled("8.8.8.0/24")[1] == PER_PREFIX
    assert filled("via 12D3KooWRelay")[1] == PER_RELAY
    assert filled(None)[1] == 18


def test_what_a_peer_claims_counts_only_where_it_is_not_connected() -> None:
    table, _ = filled(None, count=0)
    claims = {"a": ("/ip4/8.8.8.8/tcp/1",), "b": ("/ip4/9.9.9.9/tcp/1",)}
    table.network = cast(Any, SimpleNamespace(known_addresses=lambda peer: claims[peer]))
    table._connections = connected_from({"a": "1.1.1.0/24", "b": None}.__getitem__)
    assert (table._group_of("a"), table._group_of("b")) == ("1.1.1.0/24", "9.9.9.0/24")


def test_who_makes_room_for_another_gets_no_second_place_by_dialling_again(monkeypatch: pytest.MonkeyPatch) -> None:
    full, *crowd, newcomer = (network(max_peers=3) for _ in range(5))
    places = {peer.me: "8.8.8.0/24" for peer in crowd}
    monkeypatch.setattr(Connection, "group", property(lambda self: places.get(self.session.peer, "elsewhere")))
    ending: list[Any] = []

    async def main() -> None:
        async with running(full, *crowd, newcomer):
            for peer in crowd:
                await peer.connect(full.addresses[0])
                await until(lambda peer=peer: peer.me in full.connections)
            monkeypatch.setattr(full.connections, "_close", ending.append)  # closing takes a while
            await newcomer.connect(full.addresses[0])
            await until(lambda: newcomer.me in full.connections)
            assert ending == [each.conn for each in full.connections.of(crowd[-1].me)]
            assert await crowd[-1].connect_from_listening_port(full.me) is not None
            await until(lambda: len(ending) == 2)
            assert len(full.connections.of(crowd[-1].me)) == 1

    trio.run(main)


def test_the_book_forgets_the_crowd_before_anybody_else_and_else_the_oldest() -> None:
    book, many = AddressBook(None), MAX_PEERS
    for number in range(many):
        book.answered(f"far {number}", (f"/ip4/{1 + number % 200}.{number % 250}.8.8/tcp/1",), f"group {number}")
    book.answered("one more", ("/ip4/8.8.8.8/tcp/1",), "8.8.8.0/24")
    assert {"far 0"} == {f"far {n}" for n in range(many)} - {peer for peer, _ in book.entries()}
    for number in range(2 * many):
        book.answered(f"near {number}", ("/ip4/8.8.8.8/tcp/1",), "8.8.8.0/24")
    kept = [peer for peer, _ in book.entries()]
    assert len(kept) == many
    assert sum(peer.startswith("near") for peer in kept) < many // 4


def test_lookups_begin_with_every_network() -> None:
    table, _ = filled(None, count=0)
    attackers = [identity().peer_id for _ in range(2 * (ANCHORS + 2 * CLOSER))]
    honest = [identity().peer_id for _ in range(5)]
    groups = dict.fromkeys(attackers, "8.8.8.0/24") | {peer: f"group {n}" for n, peer in enumerate(honest)}
    views = [SimpleNamespace(peer=peer, group=groups[peer], connected_at=n) for n, peer in enumerate(groups)]
    table.network = cast(Any, SimpleNamespace(peers=lambda: views, known_addresses=lambda peer: ()))
    table._connections = connected_from(groups.get)
    table.speakers = lambda: list(groups)  # type: ignore[method-assign]

    async def nothing() -> None:
        return

    table.fill_table = nothing  # type: ignore[method-assign]
    first = trio.run(table.first_hand, b"key")
    assert set(honest) <= set(first) and len(first) == ANCHORS + 2 * CLOSER
    assert set(honest) <= set(table.anchors())
