"""A `swarmnode` of the future, as far as its peers can tell: the program of today with other bytes on the wire.

    python tests/support/newer.py fields run …     each message has two more fields, which nobody knows yet
    python tests/support/newer.py major run …      it speaks the protocols' next major version

What is hashed or signed stays as it is: it has versions of its own.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import msgpack

from swarmnode.protocols import wire

SENDERS = ("calls.frames", "calls.rpc", "calls.server", "peers.hello")
SENDERS += ("transfer.bulk", "transfer.channels", "transfer.shards")
NUMBERED = ("calls.frames", "state.intake", "transfer.bulk", "transfer.shard_wire")
TAKERS = ("calls.client", "calls.rpc", "state.sync", "transfer.shards")  # of PROTOCOL from the module before, by name


def encode_with_more(message: Any) -> bytes:
    packed = msgpack.unpackb(wire.encode(message), use_list=False)
    more = {"since_version_3": {"names": ["a", "b"], "how_many": 2}, "a_flag": True}
    encoded: bytes = msgpack.packb({**packed, **more}, use_bin_type=True)
    return encoded


def become(what: str) -> None:
    if what == "fields":
        for name in SENDERS:
            vars(import_module(f"swarmnode.protocols.{name}"))["encode"] = encode_with_more
        return
    hello = vars(import_module("swarmnode.protocols.peers.hello"))
    hello["PROTOCOL_MAJOR"] += 1
    for name in (*NUMBERED, *TAKERS):
        module = vars(import_module(f"swarmnode.protocols.{name}"))
        module["PROTOCOL"] = f"{module['PROTOCOL'].rpartition('/')[0]}/{hello['PROTOCOL_MAJOR']}"


if __name__ == "__main__":
    become(sys.argv.pop(1))
    from swarmnode.cli.main import main

    sys.exit(main())
