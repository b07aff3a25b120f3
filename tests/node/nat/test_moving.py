"""What happens to work under way when a direct connection replaces a relayed one, between real hosts on loopback."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hosts import network, running, until
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmnode.node.control.peers_api import PeersApi
from swarmnode.node.host.limits import RelayLimits
from swarmnode.node.host.network import Libp2pNetwork
from swarmnode.node.nat import traversal
from swarmnode.node.nat.relay import RelayServer
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.calls.rpc import Rpc, RpcLimits
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.transfer.bulk import CHUNK, Bulk
from swarmnode.protocols.transfer.shards import Shards

MIB = 1 << 20


@dataclass(frozen=True)
class Text:
    body: bytes


@dataclass
class End:
    network: Libp2pNetwork
    rpc: Rpc
    bulk: Bulk


@dataclass
class Pair:
    """Two nodes that are connected through a relay; `near` dialled `far`."""

    near: End
    far: End
    at: Libp2pNetwork
    relay: RelayServer

    async def get_direct(self) -> None:
        near, far = self.near.network, self.far.network
        await near.swarm.dial_addr(Multiaddr(far.own_addresses[0]), ID.from_string(far.me))
        await until(lambda: far.is_direct(near.me))

    def circuits(self) -> list[Any]:
        return [c for c in self.near.network.connections.of(self.far.network.me) if not c.direct]


@asynccontextmanager
async def relayed_pair(**limits: Any) -> AsyncIterator[Pair]:
    at = network()
    relay = RelayServer(at, at.policy, RelayLimits(**limits))
    near, far = (End(behind, Rpc(behind), Bulk(behind)) for behind in (network(), network()))
    async with running(at, relay, *(part for end in (near, far) for part in (end.network, end.rpc, end.bulk))):
        for end in (near, far):
            await end.network.connect(at.addresses[0])
        place = await far.network.relay_client.reserve(at.me)
        far.network.announce_instead(place.addresses)  # as a private node does, so that nobody else's dial is direct
        near.network.learn(far.network.me, place.addresses)
        await near.network.relay_client.dial(at.me, far.network.me)
        yield Pair(near, far, at, relay)


async def settled(pair: Pair) -> int:
    """Bytes relayed so far, once no more come."""
    before = -1
    while before != pair.relay.bytes_relayed:
        before = pair.relay.bytes_relayed
        await trio.sleep(0.1)
    return before


async def test_calls_move_and_those_in_flight_are_answered_once_where_they_were_made() -> None:
    release, served = trio.Event(), []

    async def slow(_peer: str, request: Text) -> Text:
        served.append(request.body)
        await release.wait()
        return request

    async def quick(_peer: str, request: Text) -> Text:
        served.append(request.body)
        return request

    async with relayed_pair() as pair:
        pair.far.rpc.serve("slow", Text, slow)
        pair.far.rpc.serve("quick", Text, quick)
        target, answers = pair.far.network.me, []

        async def call(method: str, body: bytes) -> None:
            answers.append((await pair.near.rpc.call(target, method, Text(body), Text, timeout=20)).body)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "slow", b"in flight")
            await until(lambda: served)
            await pair.get_direct()
            relayed = await settled(pair)
            await call("quick", bytes(300_000))
            assert pair.relay.bytes_relayed < relayed + 10_000
            assert pair.circuits()[0].session.open_streams == 1
            release.set()
        assert answers == [bytes(300_000), b"in flight"] and served == [b"in flight", bytes(300_000)]
        await until(lambda: pair.circuits()[0].session.open_streams == 0)


async def test_calls_that_wait_for_room_during_a_move_are_carried_out_once_each() -> None:
    release, served = trio.Event(), []

    async def slow(_peer: str, request: Text) -> Text:
        served.append(request.body)
        await release.wait()
        return request

    async with relayed_pair() as pair:
        pair.far.rpc.serve("slow", Text, slow)
        bodies = [b"%d" % number for number in range(2 * RpcLimits().calls)]
        answers = []

        async def call(body: bytes) -> None:
            answer = await pair.near.rpc.call(pair.far.network.me, "slow", Text(body), Text, timeout=20)
            answers.append(answer.body)

        async with trio.open_nursery() as nursery:
            for body in bodies:
                nursery.start_soon(call, body)
            await until(lambda: len(served) == RpcLimits().calls)
            await pair.get_direct()
            await settled(pair)
            await pair.near.rpc.ping(pair.far.network.me, timeout=5)  # it has the new line for itself
            release.set()
        assert sorted(answers) == sorted(served) == sorted(bodies)
        await until(lambda: pair.circuits()[0].session.open_streams == 0)


async def test_a_line_without_calls_is_closed_when_the_peer_moves() -> None:
    async with relayed_pair() as pair:
        await pair.near.rpc.ping(pair.far.network.me, timeout=5)
        await pair.far.rpc.ping(pair.near.network.me, timeout=5)
        assert pair.circuits()[0].session.open_streams == 2
        await pair.get_direct()
        await until(lambda: pair.circuits()[0].session.open_streams == 0)


async def test_a_transfer_moves_at_a_whole_chunk_and_no_byte_is_lost_or_delivered_twice() -> None:
    buffer = os.urandom(64 * MIB)
    async with relayed_pair() as pair:
        pair.far.bulk.offer(("big",), buffer)
        progress: list[int] = []
        under_way = trio.Event()

        def moving(done: int) -> None:
            progress.append(done)
            under_way.set()

        async def replace() -> None:
            await under_way.wait()
            await pair.get_direct()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            got = await pair.near.bulk.fetch(pair.far.network.me, ("big",), max_size=len(buffer), progress=moving)
        assert got == buffer
        assert progress == sorted(set(progress)) and progress[-1] == len(buffer)
        assert pair.relay.bytes_relayed < len(buffer) // 2
        await until(lambda: pair.circuits()[0].session.open_streams == 0)


async def test_streams_of_bulk_that_are_idle_are_not_used_after_a_move() -> None:
    async with relayed_pair() as pair:
        pair.far.bulk.offer(("small",), bytes(2 * CHUNK))
        await pair.near.bulk.fetch(pair.far.network.me, ("small",), max_size=MIB)
        await pair.get_direct()
        await until(lambda: pair.circuits()[0].session.open_streams == 0)
        relayed = await settled(pair)
        await pair.near.bulk.fetch(pair.far.network.me, ("small",), max_size=MIB)
        assert pair.relay.bytes_relayed < relayed + 10_000


async def test_a_fetch_that_waits_for_its_offer_during_a_move_ends_where_it_is_and_its_stream_with_it() -> None:
    async with relayed_pair() as pair, trio.open_nursery() as nursery:
        got = []

        async def fetch() -> None:
            got.append(await pair.near.bulk.fetch(pair.far.network.me, ("late",), max_size=MIB, wait=20))

        nursery.start_soon(fetch)
        await until(lambda: pair.circuits()[0].session.open_streams == 1)
        await pair.get_direct()
        pair.far.bulk.offer(("late",), b"here")
        await until(lambda: got == [b"here"])
        await until(lambda: pair.circuits()[0].session.open_streams == 0)


async def test_a_transfer_outlives_circuits_that_end_at_their_limit_of_bytes() -> None:
    buffer = os.urandom(12 * MIB)
    async with relayed_pair(circuit_bytes=2 * MIB) as pair:
        pair.far.bulk.offer(("big",), buffer)
        progress: list[int] = []
        got = await pair.near.bulk.fetch(pair.far.network.me, ("big",), max_size=len(buffer), progress=progress.append)
        assert got == buffer and progress[-1] == len(buffer)
        assert pair.relay.bytes_relayed > len(buffer)
        await until(lambda: pair.relay.open_circuits <= 1)


async def test_a_shard_is_drawn_over_the_direct_path_after_a_move(tmp_path: Path) -> None:
    content = os.urandom(48 * MIB)
    (tmp_path / "content").write_bytes(content)
    async with relayed_pair() as pair, trio.open_nursery() as nursery:
        ends = []
        for name, end in (("near", pair.near), ("far", pair.far)):
            store = ShardStore(tmp_path / name, cap=1 << 30)
            ends.append(Shards(end.network, end.rpc, store, runner=in_thread))
            await nursery.start(ends[-1].run)
        near, far = ends
        shard = await far.put(tmp_path / "content")
        under_way = trio.Event()

        async def replace() -> None:
            await under_way.wait()
            await pair.get_direct()

        nursery.start_soon(replace)
        await near.fetch(shard, providers=(pair.far.network.me,), progress=lambda done, size: under_way.set())
        assert near.counts["duplicates"] == near.counts["sources_lost"] == 0
        assert near.counts["bytes_fetched"] == len(content)
        assert pair.relay.bytes_relayed < len(content) // 2
        await until(lambda: pair.circuits()[0].session.open_streams == 0)
        nursery.cancel_scope.cancel()


async def test_the_circuit_is_let_go_of_once_unused_and_the_direct_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traversal, "LOOK", 0.02)
    async with relayed_pair() as pair, trio.open_nursery() as nursery:
        near, far = pair.near.network, pair.far.network
        monkeypatch.setattr(traversal, "UNUSED", 0.1)
        nursery.start_soon(traversal.let_go_of_circuits, near)
        await trio.sleep(0.2)
        assert pair.relay.open_circuits == 1  # there is no other way yet
        await pair.get_direct()
        with near.watch_peers() as events:
            await until(lambda: pair.relay.open_circuits == 0 and not pair.circuits())
            assert near.is_direct(far.me)
            assert events.statistics().current_buffer_used == 0
        await pair.near.rpc.ping(far.me, timeout=5)
        await near.relay_client.dial(pair.at.me, far.me)  # one that comes after the direct connection
        await until(lambda: pair.relay.open_circuits == 0)
        nursery.cancel_scope.cancel()


async def test_a_circuit_in_use_is_closed_after_the_bound_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traversal, "LOOK", 0.02)
    async with relayed_pair() as pair, trio.open_nursery() as nursery:
        near, far = pair.near.network, pair.far.network
        far.serve("/test/hold/1", hold)
        stream = await near.open_stream(far.me, "/test/hold/1")
        await pair.get_direct()
        began = trio.current_time()
        monkeypatch.setattr(traversal, "UNUSED", 0.05)
        monkeypatch.setattr(traversal, "BOUND", 0.5)
        nursery.start_soon(traversal.let_go_of_circuits, near)
        await trio.sleep(0.2)
        await stream.send_all(b"still open")
        await until(lambda: pair.relay.open_circuits == 0)
        assert trio.current_time() - began >= 0.5 and near.is_direct(far.me)
        nursery.cancel_scope.cancel()


async def hold(stream: Any) -> None:
    while await stream.receive_some(100):
        pass


async def test_each_ping_says_its_way_and_the_history_why_the_path_changed() -> None:
    async with relayed_pair() as pair:
        near, far = pair.near.network, pair.far.network
        asked: list[str] = []
        node: Any = SimpleNamespace(
            network=near,
            rpc=pair.near.rpc,
            nat=SimpleNamespace(try_direct=asked.append),
            liveness=SimpleNamespace(rtts={}),
        )
        api = PeersApi(node)
        way = (await api.ping({"peer": far.me}))["way"]
        assert (way["path"], way["relay"]) == ("relayed", pair.at.me) and not asked
        assert way["transport"] == "tcp", "what carries the connection to the relay"
        await api.ping({"peer": far.me, "punch": True})
        assert asked == [far.me]
        await pair.get_direct()
        way = (await api.ping({"peer": far.me}))["way"]
        assert (way["path"], way["relay"]) == ("direct", None)
        relayed, direct = near.connections.history(far.me)
        assert relayed.path == "relayed" and f"through the relay {pair.at.me}" in relayed.why
        assert direct.path == "direct" and "in the place of a relayed connection" in direct.why
        for connection in near.connections.of(far.me):
            if connection.direct:
                await connection.conn.close()
        await until(lambda: len(near.connections.history(far.me)) == 3)
        back = near.connections.history(far.me)[-1]
        assert back.path == "relayed" and back.why == "the direct connection ended: closed here"
