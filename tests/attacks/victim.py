"""The node under attack, in a process of its own: real sockets, calls and bulk, and all peers are strangers to it.

`--undefended`: a first attempt at one. `--hasty`: it judges peers fifty times as fast, so that an attack sees its end.
`--serial`: broken on purpose, it answers one call after another, whoever calls, so that a bound on delays is seen to
fail.

Prints one JSON line, {"address": …}, and serves until its standard input ends. For each line of it, it prints the
longest stretch since the last, in ms of CPU, in which its loop did nothing but one turn: what others waited for,
however busy the machine was. Methods: `echo`, `sleep` (10 s),
`count` (adds one, answers how often it was called).

The undefended node is py-libp2p as it is installed, and a handler as one writes it first: it believes lengths, reads
msgpack without bounds, unpickles what looks pickled, and answers one call after another.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgpack
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.node.identity import Identity
from swarmnode.protocols.calls.frames import REPLY, Frame
from swarmnode.protocols.calls.rpc import PROTOCOL, Rpc
from swarmnode.protocols.wire import Empty, encode

NAP = 10.0  # seconds that `sleep` takes
LISTEN = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class Blob:
    data: bytes = b""
    count: int = 0


def new_identity() -> Identity:
    return Identity(Ed25519PrivateKey.generate())


class Methods:
    def __init__(self, *, serial: bool = False) -> None:
        self.counted = 0
        self._turn = trio.CapacityLimiter(1) if serial else nullcontext()

    async def echo(self, peer: str, blob: Blob) -> Blob:
        async with self._turn:
            return blob

    async def sleep(self, peer: str, blob: Blob) -> Blob:
        async with self._turn:
            await trio.sleep(NAP)
        return blob

    async def count(self, peer: str, blob: Blob) -> Blob:
        self.counted += 1
        return Blob(count=self.counted)


class Stretches(trio.abc.Instrument):
    """Measures the turns of trio's loop."""

    def __init__(self) -> None:
        self.longest = 0.0  # ms of CPU
        self._since: float | None = None

    def after_io_wait(self, timeout: float) -> None:
        self._since = time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        if self._since is not None:
            self.longest = max(self.longest, 1000 * (time.thread_time() - self._since))


stretches = Stretches()


async def until_input_ends() -> None:
    while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        print(json.dumps(round(stretches.longest, 1)), flush=True)
        stretches.longest = 0.0


async def defended(hasty: bool, serial: bool) -> None:
    from swarmnode.node.host.allowances import PeerPolicy
    from swarmnode.node.host.limits import Limits, RateLimits
    from swarmnode.node.host.network import HostSettings, Libp2pNetwork
    from swarmnode.node.process import rest_what_stays
    from swarmnode.protocols.peers.scoring import ScoringLimits
    from swarmnode.protocols.transfer.bulk import Bulk

    class Strangers(PeerPolicy):
        def is_member(self, peer: str) -> bool:
            return False

    soon = ScoringLimits(load=2.0, load_every=0.04, first_ban=1.0)
    limits = Limits(conduct=soon, rates=RateLimits(slowed=256.0 * 1024)) if hasty else Limits()
    network = Libp2pNetwork(new_identity(), HostSettings(listen=(LISTEN,), limits=limits), Strangers())
    rpc, methods = Rpc(network, limits=limits.rpc), Methods(serial=serial)
    bulk = Bulk(network, limits=limits.bulk)
    network.scoring.watch(rpc.violations, bulk.violations)
    for method in (methods.echo, methods.sleep, methods.count):
        rpc.serve(method.__name__, Blob, method)
    bulk.offer(("block",), bytes(1 << 20))
    async with trio.open_nursery() as nursery:
        for service in (network, rpc, bulk):
            await nursery.start(service.run)
        rest_what_stays()
        print(json.dumps({"address": network.addresses[0]}), flush=True)
        await until_input_ends()
        nursery.cancel_scope.cancel()


async def undefended() -> None:
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.custom_types import TProtocol
    from multiaddr import Multiaddr

    methods = Methods()
    host = new_host(key_pair=create_new_key_pair(), muxer_preference="YAMUX")

    async def exactly(stream: Any, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            got += await stream.read(size - len(got))
        return bytes(got)

    async def handle(stream: Any) -> None:
        while True:
            size = shift = 0
            while True:
                byte = (await exactly(stream, 1))[0]
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            raw = await exactly(stream, size)
            call = pickle.loads(raw) if raw[:1] == b"\x80" and raw[-1:] == b"." else msgpack.unpackb(raw)
            if not isinstance(call, dict):
                continue
            if call["method"] == "ping":
                answer: Any = Empty()
            else:
                body = msgpack.unpackb(call["body"])
                answer = await getattr(methods, call["method"])("", Blob(**body))
            reply = encode(Frame(REPLY, call["id"], body=encode(answer)))
            length, header = len(reply), bytearray()
            while length > 0x7F:
                header.append(length & 0x7F | 0x80)
                length >>= 7
            await stream.write(bytes(header) + bytes([length]) + reply)

    host.set_stream_handler(TProtocol(PROTOCOL), handle)
    async with host.run([Multiaddr(LISTEN)]):
        print(json.dumps({"address": str(host.get_addrs()[0])}), flush=True)
        await until_input_ends()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--undefended", action="store_true")
    parser.add_argument("--hasty", action="store_true")
    parser.add_argument("--serial", action="store_true")
    asked = parser.parse_args()
    if asked.undefended:
        trio.run(undefended, instruments=[stretches])
    else:
        trio.run(defended, asked.hasty, asked.serial, instruments=[stretches])
