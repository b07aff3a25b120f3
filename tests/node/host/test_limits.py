"""What one peer can make a node keep stays within the promise, and every limit says what it is for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import swarmnode.node.host.limits
from swarmnode.node.host.limits import KIB, MIB, ConnectionLimits, Limits
from swarmnode.protocols.transfer.bulk import CHUNK as BULK_CHUNK
from swarmnode.protocols.transfer.shard_wire import RUN_BYTES, ShardLimits

PROMISED = 64 * MIB  # a peer
SOCKET = 1 * MIB  # bytes that one connection keeps beside its streams: outbox, batch, its ciphertext, what was read
STREAM = 12 * KIB  # bytes of an open stream: 6 KiB were measured with the least handler, others have a task more
WANT = 4 * KIB  # bytes of a bulk or shard request
ROOMS = Path(swarmnode.node.host.limits.__file__).parents[2]


def parts_per_peer(limits: Limits) -> dict[str, int]:
    """Bytes that one peer can make a node keep at once, by where."""
    conn, rpc, bulk, shards, dht = limits.connections, limits.rpc, limits.bulk, limits.shards, limits.dht
    pool = limits.rollouts.pool
    return {
        "sockets": conn.per_peer * SOCKET,
        "streams": conn.streams * STREAM,
        "unread": conn.unread,
        "calls: half a frame each": rpc.streams * rpc.frame,
        "calls: requests, and answers without room": rpc.held,
        "calls: answers queued, and one beyond": rpc.streams * (rpc.queued + rpc.frame),
        "bulk: a chunk each": bulk.serves * (BULK_CHUNK + WANT),
        "shards: an answer each": shards.streams * (RUN_BYTES + WANT),
        "DHT: a question and its answer each": dht.streams * 2 * dht.message,
        "rollouts: an author's part of the pool": int(pool.share * pool.bytes),
    }


def test_a_peer_that_does_its_worst_everywhere_costs_at_most_64_mib() -> None:
    parts = parts_per_peer(Limits())
    assert sum(parts.values()) <= PROMISED
    assert all(parts.values())


def test_one_provider_can_serve_all_that_is_fetched_at_once() -> None:
    limits = ShardLimits()
    assert limits.fetches + 1 <= limits.streams, "the shards on disk, and a state in memory"


def test_unread_bytes_of_all_peers_are_bounded_however_many_there_are() -> None:
    limits = ConnectionLimits()
    share = limits.unread_in_all // 2 // limits.peers
    most = limits.unread_in_all // 2 + limits.unread + limits.peers * share
    assert most <= 1.2 * limits.unread_in_all
    assert share >= MIB  # enough for a round trip of an honest peer while others fill the rest


@pytest.mark.parametrize("part", dataclasses.fields(Limits), ids=lambda part: part.name)
def test_every_limit_has_its_unit_or_reason_beside_it(part: Any) -> None:
    limits = getattr(Limits(), part.name)
    source = (ROOMS / Path(*type(limits).__module__.split(".")[1:])).with_suffix(".py").read_text()
    body = source.partition(f"class {type(limits).__name__}:")[2].partition("\n\n\n")[0]
    for field in dataclasses.fields(limits):
        line = re.search(rf"^(    # .*\n)?    {field.name}: .*= .*$", body, re.MULTILINE)
        assert line is not None and (line[1] or "  # " in line[0]), f"{type(limits).__name__}.{field.name}"
