"""Records in the DHT: what is refused, what survives, and that readers get the newest; on real loopback hosts."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.crdt.envelope import Envelope, unsealed
from swarmnode.node.discovery import dht_values
from swarmnode.node.discovery.dht_values import REPUBLISH, DhtRecords, put_message
from swarmnode.node.discovery.kademlia import Kademlia
from swarmnode.node.host.addresses import public_key
from swarmnode.node.host.limits import DhtLimits
from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity, peer_id_of
from swarmnode.protocols.dht.records import (
    MAX_LIFETIME,
    MAX_SEALED,
    MAX_VALUE,
    BadRecord,
    DhtRecord,
    rank,
    record_key,
    seal,
    supersedes,
    unseal,
)

NOW = 1_800_000_000.0  # seconds since 1970


class Author:
    """A key pair, without a node."""

    def __init__(self) -> None:
        self.private_key = Ed25519PrivateKey.generate()
        self.peer_id = peer_id_of(self.private_key.public_key().public_bytes_raw())

    def record(self, value: bytes = b"v", *, sequence: int = 1, lives: float = 3600.0, now: float = NOW) -> DhtRecord:
        return DhtRecord(self.peer_id, "head", value, sequence, int((now + lives) * 1000))

    def sealed(self, record: DhtRecord) -> bytes:
        return seal(self.private_key.sign, record)


def verify(peer: str, message: bytes, signature: bytes) -> bool:
    try:
        public_key(peer).verify(signature, message)
    except Exception:
        return False
    return True


def fields_of(raw: bytes) -> dict[str, Any]:
    """What is signed in a stored record."""
    envelope = unsealed(raw, max_size=MAX_SEALED)
    assert envelope is not None
    return dict(msgpack.unpackb(envelope.payload))


def with_fields(raw: bytes, fields: dict[str, Any]) -> bytes:
    """A stored record with other fields and its old signature."""
    envelope = unsealed(raw, max_size=MAX_SEALED)
    assert envelope is not None
    return Envelope(msgpack.packb(fields), envelope.signature).sealed


def why(key: bytes, raw: bytes) -> str:
    with pytest.raises(BadRecord) as refusal:
        unseal(key, raw, verify=verify, now=NOW)
    return refusal.value.why


def test_what_an_author_seals_everyone_can_open() -> None:
    author = Author()
    record = author.record(b"x" * MAX_VALUE)
    assert unseal(record.key, author.sealed(record), verify=verify, now=NOW) == record


def test_forged_moved_and_altered_records_are_refused() -> None:
    author, other = Author(), Author()
    record = author.record()
    raw = author.sealed(record)
    assert why(record_key(other.peer_id, "head"), raw) == "forged"  # moved to another author's key
    assert why(record_key(author.peer_id, "tail"), raw) == "forged"  # moved to another name
    assert why(record.key, other.sealed(record)) == "forged"  # signed by another
    fields = fields_of(raw)
    for field, value in (("value", b"w"), ("sequence", 2), ("expires", record.expires + 1)):
        assert why(record.key, with_fields(raw, {**fields, field: value})) == "forged", field


def test_expiries_that_never_come_are_refused() -> None:
    author = Author()
    record = author.record()
    assert why(record.key, author.sealed(author.record(lives=-1))) == "expired"
    assert why(record.key, author.sealed(author.record(lives=MAX_LIFETIME + 600))) == "too-far"
    raw = author.sealed(record)
    for nonsense in (math.nan, math.inf, -5, 1 << 63, "soon", True):
        assert why(record.key, with_fields(raw, {**fields_of(raw), "expires": nonsense})) == "malformed", nonsense
    assert why(record.key, with_fields(raw, {**fields_of(raw), "more": 1})) == "malformed"
    assert why(record.key, with_fields(raw, dict(reversed(fields_of(raw).items())))) == "malformed"


def test_records_above_the_size_limit_are_refused_on_both_sides() -> None:
    author = Author()
    with pytest.raises(BadRecord, match=str(MAX_VALUE)):
        author.sealed(author.record(b"x" * (MAX_VALUE + 1)))
    record = author.record()
    raw = author.sealed(record)
    assert why(record.key, with_fields(raw, {**fields_of(raw), "value": b"x" * (MAX_VALUE + 1)})) == "oversize"
    assert why(record.key, b"\x00" * (1 << 20)) == "oversize"


def test_keys_that_name_no_author_are_refused() -> None:
    raw = Author().sealed(Author().record())
    for key in (b"", b"/swarmnode/x/head", b"/other/" + b"1" * 52 + b"/head", b"/swarmnode/" + b"1" * 52, b"\xff/"):
        assert why(key, raw) == "malformed", key


def test_order_admits_no_rollback_and_no_shorter_life() -> None:
    author = Author()
    old = author.record(b"1", sequence=1)
    new = author.record(b"2", sequence=2)
    assert supersedes(new, old) and not supersedes(old, new)
    assert supersedes(old, old)  # republished
    # Were this allowed, `old` could be replayed once the shorter-lived one is forgotten.
    assert not supersedes(author.record(b"2", sequence=2, lives=60), old)
    twins = [author.record(value, sequence=3) for value in (b"a", b"b")]
    assert supersedes(max(twins, key=rank), min(twins, key=rank))
    assert not supersedes(min(twins, key=rank), max(twins, key=rank))


class Node:
    """A libp2p host with records."""

    def __init__(self) -> None:
        key = Ed25519PrivateKey.generate()
        identity = Identity(key, peer_id_of(key.public_key().public_bytes_raw()))
        self.network = Libp2pNetwork(identity, HostSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
        # Its own: nobody renews these records by itself, and who stores bad ones is not refused.
        self.kademlia = Kademlia(self.network._host, self.network, self.network.connections)
        self.records = DhtRecords(self.kademlia)
        self.scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            await self.network.run(task_status=task_status)

    @property
    def me(self) -> str:
        return self.network.me

    def holds(self, key: bytes) -> bytes | None:
        record = self.records.store.held(key)
        return record.value if record else None


class Clock:
    def __init__(self) -> None:
        self.time = NOW

    def read(self) -> float:
        return self.time


@asynccontextmanager
async def nodes_in_a_ring(count: int, clock: Clock) -> AsyncIterator[list[Node]]:
    """`count` nodes, each connected to the next three; all have identified one another, and have `clock`."""
    with trio.fail_after(30), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dht_values, "wall_clock", clock.read)
        nodes = [Node() for _ in range(count)]
        async with trio.open_nursery() as nursery:
            for node in nodes:
                await nursery.start(node.run)
            for index, node in enumerate(nodes):
                for step in range(1, min(4, count)):
                    await node.network.connect(nodes[(index + step) % count].network.addresses[0])
            for node in nodes:
                while len(node.kademlia.speakers()) < len(node.network.peers()):  # noqa: ASYNC110 (no event upstream)
                    await trio.sleep(0.02)
                await node.kademlia.fill_table()
            yield nodes
            nursery.cancel_scope.cancel()


def run(main: Any) -> None:
    trio.run(main)


def test_every_reader_gets_the_newest_value_and_put_says_how_many_keep_it() -> None:
    async def main() -> None:
        clock = Clock()
        async with nodes_in_a_ring(8, clock) as nodes:
            author, readers = nodes[0], nodes[1:]
            stored = await author.records.put("head", b"one")
            assert stored.nodes == stored.asked == 7
            for reader in readers:
                record = await reader.records.get(author.me, "head")
                assert record is not None and record.value == b"one"
            await author.records.put("head", b"two")  # upstream's readers answer from their own store for a day
            for reader in readers:
                record = await reader.records.get(author.me, "head")
                assert record is not None and record.value == b"two"
            assert await readers[0].records.get(author.me, "nothing") is None
            with pytest.raises(BadRecord, match="at most"):
                await author.records.put("big", b"x" * (MAX_VALUE + 1))
            assert await readers[0].records.get(author.me, "big") is None

    run(main)


def test_refused_stores_leave_the_live_value_alone() -> None:
    async def main() -> None:
        clock = Clock()
        async with nodes_in_a_ring(3, clock) as (author, storer, attacker):
            first = await author.records.put("head", b"one")
            old = seal(author.network.sign, first.record)
            stored = await author.records.put("head", b"two")
            live = stored.record
            key = live.key
            forged = seal(attacker.network.sign, DhtRecord(author.me, "head", b"lie", 1 << 61, live.expires))
            bad = [forged, old, b"", b"\xff" * 100, b"x" * (1 << 15), b"x" * (1 << 18)]
            for raw in bad:
                try:
                    assert not await attacker.kademlia.tell(storer.me, put_message(key, raw))
                except Exception as error:
                    assert "answer" in str(error) or "stream" in str(error), error
                assert storer.holds(key) == b"two"
            assert await attacker.kademlia.tell(
                storer.me, put_message(key, seal(author.network.sign, live))
            )  # the same again
            refusals = storer.records.store.refusals
            assert refusals["forged"] and refusals["older"] and refusals["malformed"] and refusals["oversize"]

    run(main)


def test_a_full_store_refuses_and_keeps_what_lives() -> None:
    async def main() -> None:
        clock = Clock()
        async with nodes_in_a_ring(2, clock) as (storer, _):
            author, store = Author(), storer.records.store
            for number in range(DhtLimits().records_per_author + 3):
                record = DhtRecord(author.peer_id, f"n{number}", b"v", 1, int((NOW + 60) * 1000))
                if number < DhtLimits().records_per_author:
                    store.keep(record.key, author.sealed(record))
                    continue
                with pytest.raises(BadRecord, match="no room"):
                    store.keep(record.key, author.sealed(record))
            assert store.held(record_key(author.peer_id, "n0")) is not None
            clock.time += 61
            assert store.held(record_key(author.peer_id, "n0")) is None
            late = DhtRecord(author.peer_id, "late", b"v", 1, int((clock.time + 60) * 1000))
            store.keep(late.key, author.sealed(late))  # the expired made room

    run(main)


def test_records_outlive_nodes_that_die_and_go_with_their_author() -> None:
    async def main() -> None:
        clock = Clock()
        async with nodes_in_a_ring(9, clock) as nodes:
            author, reader = nodes[0], nodes[4]
            await author.records.put("head", b"here", lifetime=3600)
            for dead in (nodes[1], nodes[2], nodes[3]):
                dead.scope.cancel()
            with trio.fail_after(6):
                record = await reader.records.get(author.me, "head")
            assert record is not None and record.value == b"here"
            clock.time += 3601
            assert await reader.records.get(author.me, "head") is None

    run(main)


def test_own_records_are_renewed_until_dropped() -> None:
    async def main() -> None:
        clock = Clock()
        async with nodes_in_a_ring(3, clock) as (author, storer, _), trio.open_nursery() as nursery:
            await nursery.start(author.records.run)
            first = await author.records.put("head", b"here")
            clock.time += REPUBLISH
            storer.records.store.remove(first.record.key)  # as a restart would
            author.records.peer_arrived()
            while storer.holds(first.record.key) is None:  # noqa: ASYNC110 (the store has no event)
                await trio.sleep(0.02)
            renewed = storer.records.store.held(first.record.key)
            assert renewed is not None and renewed.expires > first.record.expires
            author.records.drop("head")
            clock.time += MAX_LIFETIME
            author.records.peer_arrived()
            assert await author.records.get(author.me, "head") is None
            nursery.cancel_scope.cancel()

    run(main)


def test_a_restarted_author_goes_on_above_its_old_record() -> None:
    async def main() -> None:
        clock = Clock()
        async with nodes_in_a_ring(3, clock) as (author, storer, _):
            old = await author.records.put("head", b"before", lifetime=MAX_LIFETIME)
            author.records.store.remove(old.record.key)
            reborn = DhtRecords(author.kademlia)
            clock.time -= 100  # it is late
            new = await reborn.put("head", b"after", lifetime=60)
            assert new.nodes == 2
            assert storer.holds(new.record.key) == b"after"

    run(main)


def test_a_reader_does_not_go_back_when_all_others_are_rolled_back() -> None:
    async def main() -> None:
        clock = Clock()
        async with nodes_in_a_ring(4, clock) as (author, reader, *others):
            first = await author.records.put("head", b"one")
            await author.records.put("head", b"two")
            await reader.records.get(author.me, "head")
            for node in (author, reader, *others):
                node.records.store.remove(first.record.key)
                node.records.store.keep(first.record.key, seal(author.network.sign, first.record))
            record = await reader.records.get(author.me, "head")
            assert record is not None and record.value == b"two"

    run(main)
