"""`swarmnode shards` against two nodes with real stores: what a person does with shards, and what goes wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import typer

from swarmnode.cli import shards
from swarmnode.node.control.client import ControlError, NotRunning
from swarmnode.node.control.server import ControlServer, served
from swarmnode.node.control.stores_api import StoresApi
from swarmnode.node.exitcodes import NO_SPACE, USAGE
from swarmnode.node.storage.datadir import DataDir
from swarmnode.node.storage.shardstore import ShardStore
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.transfer.shard_manifest import CHUNK
from swarmnode.protocols.transfer.shard_wire import ShardLimits
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.testing.simnet import SimWorld

CONTENT = random.Random(5).randbytes(3 * CHUNK + 77)
CAP = 8 * CHUNK
Ask = Callable[..., Any]


@pytest.fixture
def app() -> typer.Typer:
    return shards.shards


@pytest.fixture
def homes(tmp_path: Path, in_a_thread: Any) -> Iterator[tuple[Path, Path]]:
    """The data directories of two connected nodes that answer on their control sockets."""
    folders = (tmp_path / "a", tmp_path / "b")
    limits = ShardLimits(refresh=0.1, search=0.2, patience=60)

    async def start(nursery: trio.Nursery) -> None:
        world = SimWorld(latency=0.001)
        for folder in folders:
            network = world.node(folder.name)
            rpc = Rpc(network)
            store = ShardStore(folder / "shards", cap=CAP)
            shards = Shards(network, rpc, store, runner=in_thread, limits=limits)
            node: Any = SimpleNamespace(shards=shards, shard_store=store)
            methods = served(StoresApi(node))
            for part in (network, rpc, shards, ControlServer(DataDir(folder).prepare_socket(), methods)):
                await nursery.start(part.run)
        await world.node("a").connect(world.node("b").me)

    with in_a_thread(start):
        yield folders


def test_a_file_put_here_is_got_there(homes: tuple[Path, Path], ask: Ask, tmp_path: Path) -> None:
    here, there = homes
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(CONTENT)
    shard = ask(here, "put", str(source), "--pin")["id"]
    assert ask(there, "providers", shard)["providers"][0]["complete"] is True
    got = ask(there, "get", shard, "--to", str(target))
    assert (got["id"], got["size"], got["path"]) == (shard, len(CONTENT), str(target))
    assert target.read_bytes() == CONTENT
    listed = ask(there, "ls")
    assert listed["bytes"] == len(CONTENT) and listed["cap"] == CAP
    (found,) = listed["shards"]
    assert found["id"] == shard and found["complete"] and not found["pinned"] and found["chunks"] == 4
    assert ask(here, "ls")["shards"][0]["pinned"] is True
    assert ask(there, "pin", shard[:8]) == {"id": shard, "pinned": True}
    assert ask(there, "gc", "--all") == {"deleted": [], "bytes": 0}
    assert ask(there, "pin", shard[:8], "--remove")["pinned"] is False
    assert ask(there, "gc", "--all") == {"deleted": [shard], "bytes": len(CONTENT)}
    words = ask(there, "get", shard, words=True)
    assert shard in words and "787 kB" in words
    assert "1 shard, 787 kB of" in ask(there, "ls", words=True)
    assert "all" in ask(there, "providers", shard, words=True)
    assert ask(here, "put", str(source), words=True).strip() == shard


def test_what_goes_wrong_is_said_in_words(homes: tuple[Path, Path], ask: Ask, tmp_path: Path) -> None:
    here, _ = homes
    for name, said in (("abc", "no shard id"), ("x" * 64, "not a shard id"), ("ab" * 16, "no shard id")):
        with pytest.raises(ControlError, match=said) as caught:
            ask(here, "get", name)
        assert caught.value.exit_code == USAGE
    began = time.monotonic()
    with pytest.raises(ControlError, match="nobody who can be reached"):
        ask(here, "get", "ab" * 32)
    assert time.monotonic() - began < 30, "a fetch waits for 60 s here"
    with pytest.raises(ControlError, match="not here"):
        ask(here, "pin", "ab" * 32)
    with pytest.raises(ControlError, match="missing"):
        ask(here, "put", str(tmp_path / "missing"))
    large = tmp_path / "large"
    large.write_bytes(bytes(CAP + 1))
    with pytest.raises(ControlError, match="do not fit") as caught:
        ask(here, "put", str(large))
    assert caught.value.exit_code == NO_SPACE
    with pytest.raises(NotRunning):
        ask(tmp_path / "nowhere", "ls")
    assert "nobody" in ask(here, "providers", "ab" * 32, words=True)
