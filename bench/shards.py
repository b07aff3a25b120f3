"""A shard from several providers beside one plain stream of the same bytes, on loopback, as JSON lines.

    python bench/shards.py [--size 67108864] [--providers 3] [--repeats 3]

Every node is a process of its own (py-libp2p, Noise, Yamux). Each repeat measures, one after the other:
- `stream`: one unencumbered stream, sent by one of the providers from its memory: no hashes, no disk, no requests;
- `streams`: as many such streams as there are providers, each with its part of the bytes: what so many processes can do
  at most on this machine's cores, and so the bound of `shard`;
- `saved`: the one stream, written to a file and synced, for what the disk costs on this machine;
- `shard`: the shard from all providers, verified, written and synced to disk; `ratio` is its rate over the stream's,
  `ratio_streams` that over all streams';
- `troubled`: the same while one provider is killed in the middle and another one sends bytes that are wrong.

Everything is done once before, unmeasured, and what was fetched is deleted each time: a virtual machine pays much for
memory that it never used before, which here is the cache of files. A line each, and last the medians. `mb_s` is 10^6
bytes a second, `cpu_s` the processor seconds of the fetching process and `providers_cpu_s` those of all providers. The
exit code is 1 where a shard did not arrive whole and right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import trio
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pair import cpu_seconds

from swarmnode.node.host.network import HostSettings, Libp2pNetwork
from swarmnode.node.identity import Identity
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.network import PeerId, Stream
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.transfer.shard_manifest import ShardId
from swarmnode.protocols.transfer.shards import Shards

PLAIN = "/bench/plain/1"  # 8 bytes, big-endian, ask for so many bytes
PIECE = 256 * 1024  # bytes a write of the plain stream
MEDIANS = (  # (measurement, value) in the last line
    ("stream", "mb_s"),
    ("streams", "mb_s"),
    ("saved", "mb_s"),
    ("shard", "mb_s"),
    ("shard", "ratio"),
    ("shard", "ratio_streams"),
    ("shard", "ratio_saved"),
    ("troubled", "mb_s"),
)
DEADLINE = 300.0  # seconds for one measurement
ACQUAINTED = 0.5  # seconds in which new connections introduce themselves before anything is measured


class LyingStore(ShardStore):
    """Gives wrong bytes for every chunk."""

    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
        size = super().read(shard, index, room)
        room[:size] = bytes(size)
        return size

    def read_now(self, shard: ShardId, index: int, room: memoryview) -> int:
        return 0


class OnlyTheNamed(Libp2pNetwork):
    """Finds nobody in the DHT: a measurement is about the providers that it names."""

    async def find_providers(self, key: bytes, *, limit: int = 20) -> tuple[PeerId, ...]:
        await trio.lowlevel.checkpoint()
        return ()


def new_node(folder: Path, *, lies: bool = False) -> tuple[Libp2pNetwork, Rpc, ShardStore, Shards]:
    identity = Identity(Ed25519PrivateKey.generate())
    network = OnlyTheNamed(identity, HostSettings(listen=("/ip4/127.0.0.1/tcp/0",), mdns=False))
    rpc = Rpc(network)
    store = (LyingStore if lies else ShardStore)(folder / "shards", cap=1 << 40)
    return network, rpc, store, Shards(network, rpc, store, runner=in_thread)


async def provide(folder: Path, source: Path, lies: bool) -> None:
    """Serve the file until standard input ends; says the address and the shard's id first."""
    network, rpc, _, shards = new_node(folder, lies=lies)
    content = memoryview(await trio.to_thread.run_sync(source.read_bytes))

    async def plain(stream: Stream) -> None:
        while request := await stream.receive_some(8):
            size = int.from_bytes(request, "big")
            for at in range(0, size, PIECE):
                await stream.send_all(content[at : min(at + PIECE, size)])

    network.serve(PLAIN, plain)
    async with trio.open_nursery() as nursery:
        for part in (network, rpc, shards):
            await nursery.start(part.run)
        shard = await shards.put(source)
        print(json.dumps({"address": network.addresses[0], "shard": shard.hex()}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


class Provider:
    """A provider's process."""

    def __init__(self, folder: Path, source: Path, *, lies: bool = False) -> None:
        command = [sys.executable, __file__, "--provide", str(folder), "--source", str(source)]
        self.process = subprocess.Popen(
            command + ["--lies"] * lies, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.address, self.shard = said["address"], bytes.fromhex(said["shard"])

    def cpu(self) -> float:
        return cpu_seconds(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


async def timed_streams(
    network: Libp2pNetwork, providers: list[Provider], size: int, save: Path | None = None
) -> dict[str, float]:
    """`size` bytes in all, an equal part from each provider."""
    streams = [await network.open_stream(await network.connect(provider.address), PLAIN) for provider in providers]
    await trio.sleep(ACQUAINTED)

    async def receive(stream: Stream, file: BinaryIO, left: int) -> None:
        await stream.send_all(left.to_bytes(8, "big"))
        while left:
            piece = await stream.receive_some(1 << 16)
            left -= len(piece)
            if save is not None:
                file.write(piece)

    with (save or Path(os.devnull)).open("wb", buffering=PIECE) as file:
        began, cpu, theirs = (
            time.perf_counter(),
            time.process_time(),
            sum(provider.cpu() for provider in providers),
        )
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(receive, stream, file, size // len(streams))
        if save is not None:
            file.flush()
            os.fsync(file.fileno())
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    theirs = sum(provider.cpu() for provider in providers) - theirs
    for stream in streams:
        await stream.aclose()
    return {"seconds": took, "mb_s": size / took / 1e6, "cpu_s": cpu, "providers_cpu_s": theirs}


async def timed_shard(
    folder: Path, providers: list[Provider], digest: bytes, kill: Provider | None
) -> dict[str, float]:
    """Fetch with a fresh node; `kill` dies when a third of the shard is there."""
    network, rpc, store, shards = new_node(folder)
    shard = providers[0].shard
    doomed = kill

    def progress(done: int, size: int) -> None:
        nonlocal doomed
        if doomed is not None and done * 3 > size:
            doomed.end()
            doomed = None

    async with trio.open_nursery() as nursery:
        for part in (network, rpc, shards):
            await nursery.start(part.run)
        peers = [await network.connect(provider.address) for provider in providers]
        await trio.sleep(ACQUAINTED)
        alive = [provider for provider in providers if provider is not kill]
        began, cpu, theirs = (
            time.perf_counter(),
            time.process_time(),
            sum(provider.cpu() for provider in alive),
        )
        await shards.fetch(shard, providers=peers, progress=progress)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        theirs = sum(provider.cpu() for provider in alive) - theirs
        content = store.path(shard).read_bytes()
        nursery.cancel_scope.cancel()
    shutil.rmtree(folder)
    counts = shards.counts
    return {
        "seconds": took,
        "mb_s": len(content) / took / 1e6,
        "cpu_s": cpu,
        "providers_cpu_s": theirs,
        "right": blake3(content).digest() == digest,
        "duplicates": counts["duplicates"],
        "lies": counts["lies"],
        "providers_lost": counts["sources_lost"],
    }


async def measure(
    folder: Path, honest: list[Provider], liar: Provider, victim: Provider, size: int, digest: bytes
) -> dict[str, dict[str, float]]:
    network, *_ = new_node(folder / "plain")
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        stream = await timed_streams(network, honest[:1], size)
        streams = await timed_streams(network, honest, size)
        saved = await timed_streams(network, honest[:1], size, folder / "saved")
        (folder / "saved").unlink()
        nursery.cancel_scope.cancel()
    shard = await timed_shard(folder / "fetched", honest, digest, None)
    shard["ratio"] = shard["mb_s"] / stream["mb_s"]
    shard["ratio_streams"] = shard["mb_s"] / streams["mb_s"]
    shard["ratio_saved"] = shard["mb_s"] / saved["mb_s"]
    troubled = await timed_shard(folder / "troubled", [victim, liar, *honest[2:]], digest, victim)
    troubled["ratio"] = troubled["mb_s"] / stream["mb_s"]
    return {"stream": stream, "streams": streams, "saved": saved, "shard": shard, "troubled": troubled}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="A shard from several providers beside one plain stream.")
    parser.add_argument("--size", type=int, default=64 << 20, help="bytes of the shard")
    parser.add_argument("--providers", type=int, default=3, help="provider processes, at least 3")
    parser.add_argument("--repeats", type=int, default=3, help="measurements")
    parser.add_argument("--provide", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lies", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.provide is not None:
        trio.run(provide, chosen.provide, chosen.source, chosen.lies)
        return 0
    if chosen.providers < 3:
        parser.error("--providers: at least 3, for in the end one of them is killed and one lies")
    results: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        content = random.Random(0).randbytes(chosen.size)
        source.write_bytes(content)
        digest = blake3(content).digest()
        honest = [Provider(folder / f"provider-{number}", source) for number in range(chosen.providers)]
        liar = Provider(folder / "liar", source, lies=True)
        try:
            for repeat in range(-1, chosen.repeats):
                victim = Provider(folder / "victim", source)

                async def bounded(victim: Provider = victim) -> dict[str, dict[str, float]]:
                    with trio.fail_after(DEADLINE):
                        return await measure(folder, honest, liar, victim, chosen.size, digest)

                try:
                    result = trio.run(bounded)
                finally:
                    victim.end()
                    shutil.rmtree(folder / "victim")
                if repeat < 0:
                    continue
                results.append(result)
                for what, values in result.items():
                    load = round(os.getloadavg()[0], 2)
                    print(json.dumps({"bench": "shards", "what": what, **rounded(values), "load": load}), flush=True)
        finally:
            for provider in (*honest, liar):
                provider.end()
    medians = {
        f"{what}_{key}": round(statistics.median(result[what][key] for result in results), 3) for what, key in MEDIANS
    }
    right = all(result[what]["right"] for result in results for what in ("shard", "troubled"))
    summary = {"providers": chosen.providers, "bytes": chosen.size, "repeats": chosen.repeats, **medians}
    print(json.dumps({"bench": "shards", "what": "median", **summary, "right": right}), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
