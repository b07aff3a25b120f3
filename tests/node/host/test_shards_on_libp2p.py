"""Shards over real libp2p connections on loopback, with worker threads and real files."""

from __future__ import annotations

import random
from pathlib import Path

import hosts
import trio

from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardId
from swarmnode.protocols.transfer.shards import Shards

Scope = trio.CancelScope
CHUNKS = 80  # so many that the liar is heard before the others have sent all
CONTENT = random.Random(2).randbytes(CHUNKS * CHUNK + 5)


class LyingStore(ShardStore):
    def read(self, shard: ShardId, index: int, room: memoryview) -> int:
        size = super().read(shard, index, room)
        room[:size] = bytes(size)
        return size

    def read_now(self, shard: ShardId, index: int, room: memoryview) -> int:
        return 0


def test_a_shard_crosses_real_connections_although_one_provider_lies_and_one_dies(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(CONTENT)

    async def start(nursery: trio.Nursery, name: str, kind: type[ShardStore] = ShardStore) -> tuple[Shards, Scope]:
        network = hosts.network()
        rpc = Rpc(network)
        shards = Shards(network, rpc, kind(tmp_path / name, cap=1 << 30), runner=in_thread)
        scope = Scope()

        async def live(*, task_status: trio.TaskStatus[None]) -> None:
            with scope:
                async with trio.open_nursery() as parts:
                    for part in (network, rpc, shards):
                        await parts.start(part.run)
                    task_status.started()

        await nursery.start(live)
        return shards, scope

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                good, _ = await start(nursery, "good")
                liar, _ = await start(nursery, "liar", LyingStore)
                dying, life = await start(nursery, "dying")
                me, _ = await start(nursery, "me")
                shard = (await good.put(source), await liar.put(source), await dying.put(source))[0]
                for other in (good, liar, dying):
                    await me.network.connect(other.network.addresses[0])

                def progress(done: int, size: int) -> None:
                    if done * 4 > size:
                        life.cancel()

                await me.fetch(shard, progress=progress)
                assert (tmp_path / "me" / f"{shard.hex()}.shard").read_bytes() == CONTENT
                assert me.violations.count(liar.network.me) == 1
                assert me.violations.count(good.network.me) == 0
                late, _ = await start(nursery, "late")  # knows one node, which by now has it as well
                await late.network.connect(me.network.addresses[0])
                await late.fetch(shard)
                assert (tmp_path / "late" / f"{shard.hex()}.shard").read_bytes() == CONTENT
                assert await late.read(me.network.me, shard, CHUNKS) == CONTENT[CHUNKS * CHUNK :]
                nursery.cancel_scope.cancel()

    trio.run(main)
