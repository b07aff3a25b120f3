"""What a running daemon answers to `swarmnode shards …`. Shapes are documented in docs/shards.md."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio

from swarmnode.node.control import Declined, absolute_path
from swarmnode.node.exitcodes import ERROR, USAGE
from swarmnode.node.storage.shardstore import Kept, ShardStore
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.transfer.shard_tree import HASH, ShardId, chunk_count, parse_id
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.protocols.transfer.shards import Shards

LONGEST_GET = 24 * 3600.0  # seconds; a fetch that takes longer is asked for again and goes on
SHORTEST_PREFIX = 4  # hex digits by which a shard that is here may be named

Method = Callable[[Mapping[str, Any]], Awaitable[Any]]


class ShardsApi:
    """The control methods for shards. Each raises Declined with a text for a person."""

    def __init__(self, shards: Shards, store: ShardStore, *, runner: Runner) -> None:
        self._shards = shards
        self._store = store
        self._runner = runner

    def methods(self) -> dict[str, Method]:
        """By the names under which the control socket serves them."""
        names = ("shards_ls", "shards_get", "shards_put", "shards_pin", "shards_gc", "shards_providers")
        return {name: getattr(self, name) for name in names}

    async def shards_ls(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """All shards that are here, the one used last first, and the room that they take."""
        await trio.lowlevel.checkpoint()
        return {
            "shards": [_as_json(kept) for kept in self._store.kept()],
            "bytes": self._store.used,
            "cap": self._store.cap,
        }

    async def shards_get(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fetch a shard where it is not here yet; pin it and copy it to a file where that is asked for."""
        shard = self._meant(params)
        timeout = min(float(params.get("within") or LONGEST_GET), LONGEST_GET)
        began = trio.current_time()
        with _declining():
            with trio.move_on_after(timeout if timeout > 0 else math.inf) as scope:
                await self._shards.fetch(shard, providers=_texts(params.get("from")))
            if scope.cancelled_caught:
                raise Declined(
                    f"shard {shard.hex()} did not come within {timeout:g} s; what has arrived is kept, and the next "
                    "get goes on from there"
                )
            took = trio.current_time() - began
            if params.get("pin"):
                await self._runner(lambda: self._store.pin(shard))
            target = absolute_path(params["to"]) if params.get("to") else None
            if target is not None:
                await self._runner(lambda: self._store.export(shard, target))
        size = self._store.holding(shard).size
        return {"id": shard.hex(), "size": size, "seconds": round(took, 3), "path": str(target) if target else None}

    async def shards_put(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Take a file into the store and offer it to peers."""
        source = absolute_path(params.get("path"))
        with _declining():
            shard = await self._shards.put(source)
            if params.get("pin"):
                await self._runner(lambda: self._store.pin(shard))
        return {"id": shard.hex(), "size": self._store.holding(shard).size}

    async def shards_pin(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a shard whatever room is needed, or no longer."""
        shard, pinned = self._meant(params), bool(params.get("pinned", True))
        with _declining():
            await self._runner(lambda: self._store.pin(shard, pinned))
        return {"id": shard.hex(), "pinned": pinned}

    async def shards_gc(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Delete what nobody needs; with `unpinned`, all that is not pinned."""
        unpinned = bool(params.get("unpinned"))
        collected = await self._runner(lambda: self._store.collect(unpinned=unpinned))
        return {"deleted": [shard.hex() for shard in collected.shards], "bytes": collected.size}

    async def shards_providers(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The peers that say they have chunks of a shard."""
        shard = self._meant(params)
        providers = await self._shards.providers(shard)
        return {
            "id": shard.hex(),
            "providers": [
                {"peer_id": found.peer, "chunks": found.chunks, "complete": found.complete} for found in providers
            ],
        }

    def _meant(self, params: Mapping[str, Any]) -> ShardId:
        """The shard of that id; the beginning of an id suffices for one that is here."""
        name = str(params.get("shard", "")).lower()
        if len(name) == 2 * HASH:
            try:
                return parse_id(name)
            except ValueError as error:
                raise Declined(str(error), exit_code=USAGE) from error
        fitting = [kept.shard for kept in self._store.kept() if kept.shard.hex().startswith(name)]
        if len(name) >= SHORTEST_PREFIX and len(fitting) == 1:
            return fitting[0]
        what = "is no shard id" if len(fitting) == 0 or len(name) < SHORTEST_PREFIX else f"fits {len(fitting)} shards"
        raise Declined(
            f"{name[:80]!r} {what}; give all {2 * HASH} hex digits, or, for a shard that is here, the first "
            f"{SHORTEST_PREFIX} or more (swarmnode shards ls)",
            exit_code=USAGE,
        )


def _as_json(kept: Kept) -> dict[str, Any]:
    return {
        "id": kept.shard.hex(),
        "size": kept.size,
        "chunks": kept.chunks,
        "chunks_in_all": chunk_count(kept.size),
        "complete": kept.complete,
        "pinned": kept.pinned,
        "fetching": kept.fetching,
        "used": round(kept.used, 3),
    }


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


@contextmanager
def _declining() -> Iterator[None]:
    """Tell a person what a ShardError says."""
    try:
        yield
    except ShardError as error:
        raise Declined(str(error), exit_code=getattr(error, "exit_code", ERROR)) from error
