"""What a running daemon answers about what it stores: `swarmnode shards …` and `swarmnode state …`.

Shapes are documented in docs/shards.md and docs/state.md.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import time_of
from swarmnode.crdt.kinds import MAX_KEY, kind_of
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import Element
from swarmnode.node.assembly import Node, now_ms
from swarmnode.node.control import Declined, number_in
from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.storage.shardstore import ShardEntry
from swarmnode.node.storage.statestore import export, import_
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.backend import StateBackend
from swarmnode.protocols.transfer.shard_manifest import HASH, ShardId, chunk_count, parse_id
from swarmnode.protocols.transfer.shard_wire import Unavailable

LONGEST_GET = 24 * 3600.0  # seconds; a fetch that takes longer is asked for again and goes on
SHORTEST_PREFIX = 4  # hex digits by which a shard that is here may be named
WRITABLE = "note"  # the kind that people write; the others are a node's own business
MOST = 10_000  # elements in one answer


class StoresApi:
    """The control methods for shards and for the replicated state. Each raises Declined with a text for a person."""

    def __init__(self, node: Node) -> None:
        self._node = node

    # --- shards -----------------------------------------------------------------------------------------------------

    async def shards_ls(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """All shards that are here, the one used last first, and the room that they take."""
        await trio.lowlevel.checkpoint()
        return {
            "shards": [_as_json(kept) for kept in self._node.shard_store.kept()],
            "bytes": self._node.shard_store.used,
            "cap": self._node.shard_store.cap,
        }

    async def shards_get(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Fetch a shard where it is not here yet; pin it and copy it to a file where that is asked for."""
        shard = self._meant(params)
        timeout = min(number_in(params, "within", LONGEST_GET) or LONGEST_GET, LONGEST_GET)
        began = trio.current_time()
        named = params.get("from")
        asked = named or self._node.shard_store.holding(shard).complete
        if not asked and not await self._node.shards.providers(shard):
            raise Unavailable(f"nobody who can be reached has shard {shard.hex()}: check its id")
        with trio.move_on_after(timeout) as scope:
            await self._node.shards.fetch(shard, providers=tuple(map(str, named)) if isinstance(named, list) else ())
        if scope.cancelled_caught:
            raise Declined(
                f"shard {shard.hex()} did not come within {timeout:g} s; what has arrived is kept, and the next "
                "get goes on from there"
            )
        took = trio.current_time() - began
        if params.get("pin"):
            await in_thread(lambda: self._node.shard_store.pin(shard))
        target = await absolute_path(params["to"]) if params.get("to") else None
        if target is not None:
            await in_thread(lambda: self._node.shard_store.export(shard, target))
        size = self._node.shard_store.holding(shard).size
        return {"id": shard.hex(), "size": size, "seconds": round(took, 3), "path": str(target) if target else None}

    async def shards_put(self, params: Mapping[str, Any]) -> dict[str, Any]:
        source = await absolute_path(params.get("path"))
        shard = await self._node.shards.put(source)
        if params.get("pin"):
            await in_thread(lambda: self._node.shard_store.pin(shard))
        return {"id": shard.hex(), "size": self._node.shard_store.holding(shard).size}

    async def shards_pin(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a shard whatever room is needed, or no longer."""
        shard, pinned = self._meant(params), bool(params.get("pinned", True))
        await in_thread(lambda: self._node.shard_store.pin(shard, pinned))
        return {"id": shard.hex(), "pinned": pinned}

    async def shards_gc(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Delete what nobody needs; with `unpinned`, all that is not pinned."""
        unpinned = bool(params.get("unpinned"))
        gone = await in_thread(lambda: self._node.shard_store.collect(unpinned=unpinned))
        self._node.shards.withdraw_lost()
        return {"deleted": [shard.hex() for shard in gone], "bytes": sum(gone.values())}

    async def shards_providers(self, params: Mapping[str, Any]) -> dict[str, Any]:
        shard = self._meant(params)
        found = await self._node.shards.providers(shard)
        told = [{"peer_id": each.peer, "chunks": each.chunks, "complete": each.complete} for each in found]
        return {"id": shard.hex(), "providers": told}

    def _meant(self, params: Mapping[str, Any]) -> ShardId:
        """The shard of that id; the beginning of an id suffices for one that is here."""
        name = str(params.get("shard", "")).lower()
        if len(name) == 2 * HASH:
            try:
                return parse_id(name)
            except ValueError as error:
                raise UsageMistake(str(error)) from error
        fitting = [kept.shard for kept in self._node.shard_store.kept() if kept.shard.hex().startswith(name)]
        if len(name) >= SHORTEST_PREFIX and len(fitting) == 1:
            return fitting[0]
        what = "is no shard id" if len(fitting) == 0 or len(name) < SHORTEST_PREFIX else f"fits {len(fitting)} shards"
        raise UsageMistake(
            f"{name[:80]!r} {what}; give all {2 * HASH} hex digits, or, for a shard that is here, the first "
            f"{SHORTEST_PREFIX} or more (swarmnode shards ls)"
        )

    # --- replicated state -------------------------------------------------------------------------------------------

    async def state_ls(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The elements under a prefix, in order of key and author; one more than `limit` is looked for."""
        limit = max(1, min(number_in(params, "limit", 0) or 100, MOST))
        prefix = str(params.get("prefix") or "")
        found = await self._open().select(prefix, author=self._author(params), limit=limit + 1)
        return {"elements": [as_json(element) for element in found[:limit]], "more": len(found) > limit}

    async def state_get(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What stands under a key: of one author, or of all that have one. Deleted ones do not count."""
        key, author = str(params.get("key", "")), self._author(params)
        if author is not None:
            element = await self._open().get(author, key)
            found = [] if element is None else [element]
        else:
            found = await self._open().select(key, author=None, limit=MOST)
        elements = [as_json(element) for element in found if element.key == key and not element.tombstone]
        if not elements:
            what = "nobody says anything"
            if author is not None:
                what = f"{'this node' if author == self._node.network.me else author[:80]} says nothing"
            when = " any more" if any(one.key == key for one in found) else ""
            raise Declined(f"{what} under {key[:80]!r}{when}; swarmnode state ls shows what there is")
        return {"key": key, "elements": elements}

    async def state_put(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Write a note of this node's own, or delete it."""
        key = str(params.get("key", ""))
        if kind_of(key) != WRITABLE:
            raise UsageMistake(f"{key[:80]!r} is not a key that people write: those begin with {WRITABLE}/")
        if len(key) > MAX_KEY:
            raise UsageMistake(f"the key has {len(key)} characters; at most {MAX_KEY} are possible")
        value = None if params.get("delete") else from_json(params.get("value"))
        if value is None and not params.get("delete"):
            raise UsageMistake("null is what a deleted key has; to delete it use --delete")
        return as_json(await self._open().write(key, value))

    async def state_stats(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """How much there is of what, and a hash of it that other nodes can be compared by."""
        state = self._open()
        now = state.now()
        cutoff = number_in(params, "cutoff", 0) or now
        if cutoff < now:
            raise UsageMistake(
                f"the cut-off {cutoff} lies in the past, and this node forgot what expired since; take a time "
                f"that no node has passed, such as {now + 60_000}"
            )
        digest, told = state.snapshot(cutoff).digest, asdict(await state.stats())
        ahead = round(max(0, time_of(told.pop("clock")) - now_ms()) / 1000, 3)
        return {"run_id": state.run_id, **told, "clock_ahead_s": ahead, "cutoff": cutoff, "state_hash": digest}

    async def state_export(self, params: Mapping[str, Any]) -> dict[str, Any]:
        target = await absolute_path(params.get("path"))
        count = await export(self._open(), target, now=now_ms())
        return {"path": str(target), "elements": count}

    async def state_import(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the elements of such a file, verified one by one."""
        source = await absolute_path(params.get("path"))
        counts = await import_(self._open(), source, verify=self._node.network.verify)
        return {"path": str(source), "stored": counts[Merged.STORED.value], "verdicts": dict(counts)}

    async def state_watch(self, params: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """What is stored under a prefix from now on; `lost` says how many this reader missed before it."""
        with self._open().watch(str(params.get("prefix") or "")) as changes:
            async for change in changes:
                yield {"lost": change.lost, **as_json(change.element)}

    def _open(self) -> StateBackend:
        state = self._node.state
        if state is None:
            raise Declined("this node is in no run, and so holds no state; swarmnode status says why")
        return state

    def _author(self, params: Mapping[str, Any]) -> str | None:
        author = params.get("author")
        return self._node.network.me if author == "me" else None if not author else str(author)


def _as_json(kept: ShardEntry) -> dict[str, Any]:
    return {
        "id": kept.shard.hex(),
        "size": kept.size,
        "chunks": kept.chunks,
        "chunks_in_all": chunk_count(kept.size),
        "complete": kept.complete,
        "pinned": kept.pinned,
        "fetching": kept.fetches > 0,
        "used": round(kept.used, 3),
    }


def as_json(element: Element) -> dict[str, Any]:
    """An element as JSON: times in seconds since 1970, `size` in bytes."""
    return {
        "key": element.key,
        "author": element.author,
        "value": element.value,
        "deleted": element.tombstone,
        "written": time_of(element.hlc) / 1000,
        "expires": element.expiry / 1000,
        "hlc": element.hlc,
        "id": element.id.hex(),
        "size": len(element.sealed),
    }


def from_json(value: Any) -> Value:
    """The value that JSON stands for. Raises UsageMistake for what no record can hold."""
    match value:
        case {"$bytes": str(digits)} if len(value) == 1:
            try:
                return bytes.fromhex(digits)
            except ValueError as error:
                raise UsageMistake(f"{digits[:80]!r} is not an even number of hex digits") from error
        case dict():
            return {str(key): from_json(item) for key, item in value.items()}
        case list():
            return tuple(from_json(item) for item in value)
        case float() if not math.isfinite(value):
            raise UsageMistake(f"{value} is not a number that a record can hold")
        case _:
            return value


async def absolute_path(value: Any) -> Path:
    """A path that a command gave. Raises Declined for a relative one and for a pipe, which waits for its other end."""
    path = Path(str(value or ""))
    if not path.is_absolute():
        raise Declined(f"{str(path)!r} is not an absolute path; the daemon has a working directory of its own")
    with suppress(OSError):  # who opens it says what is wrong
        if await in_thread(path.is_fifo):
            raise Declined(f"{str(path)!r} is a pipe; name a file")
    return path
