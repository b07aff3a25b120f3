"""A contribution is had from whoever has it, and nobody who is frozen keeps it from coming."""

from __future__ import annotations

import mmap
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from swarmnode.protocols.methods.open import store
from swarmnode.protocols.methods.open.store import ANSWERS_WITHIN, ENDS_WITHIN, Contributions, Lost
from swarmnode.protocols.methods.open.sync import FETCHES, ChainSync
from swarmnode.protocols.runner import inline
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.testing.simnet import SimWorld
from swarmnode.training import mapped
from swarmnode.training.codecs import codec
from swarmnode.training.open_step import opened

Simulated = Callable[..., None]
RUN = "ab" * 32
ELEMENTS = 8192


async def shelf(world: SimWorld, nursery: trio.Nursery, name: str) -> Contributions:
    """The contributions of a node."""
    bulk = Bulk(world.node(name))
    await nursery.start(world.node(name).run)
    await nursery.start(bulk.run)
    trainer = SimpleNamespace(layout=SimpleNamespace(parameters=ELEMENTS))
    spec = SimpleNamespace(exchange=SimpleNamespace(codec="topk"))
    parts: Any = SimpleNamespace(run_id=RUN, bulk=bulk, runner=inline, spec=spec, trainer=trainer)
    return Contributions(parts)


async def with_one(world: SimWorld, nursery: trio.Nursery, *names: str) -> bytes:
    """The id of a contribution that these nodes serve."""
    raw = bytes(codec("topk").encode(np.random.default_rng(1).standard_normal(ELEMENTS).astype(np.float32)))
    for name in names:
        contributions = await shelf(world, nursery, name)
        id = await contributions.keep(raw, 0)
        contributions.serve(id)
    return id


def test_one_that_is_served_again_has_the_same_name_so_that_a_fetch_goes_on(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        mine = await shelf(world, nursery, "me")
        id = await mine.keep(bytes(codec("topk").encode(np.ones(ELEMENTS, np.float32))), 0)
        for _ in range(2):
            mine.serve(id)
            offer = await mine._bulk.offered(mine._key(id), "anybody", 0.0)
            assert offer is not None and offer.buffer.name == id

    simulated(main)


def test_a_source_that_is_frozen_costs_seconds_and_not_its_patience(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        id = await with_one(world, nursery, "author", "other")
        mine = await shelf(world, nursery, "me")
        world.freeze(world.node("author").me)
        began = trio.current_time()
        await mine.fetch(id, 0, [world.node("author").me, world.node("other").me])
        assert id in mine
        assert trio.current_time() - began < ANSWERS_WITHIN + 1

    simulated(main, latency=0.05)


def test_a_source_that_sends_a_byte_now_and_then_is_left_for_another(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        id = await with_one(world, nursery, "author", "other")
        mine = await shelf(world, nursery, "me")
        fetch = mine._bulk.fetch

        async def trickling(peer: str, *key: Any, progress: Callable[[int], None], **options: Any) -> memoryview:
            while peer == world.node("author").me:
                progress(1)
                await trio.sleep(1)
            return await fetch(peer, *key, progress=progress, **options)

        mine._bulk.fetch = trickling  # type: ignore[method-assign, assignment]
        began = trio.current_time()
        await mine.fetch(id, 0, [world.node("author").me, world.node("other").me])
        assert id in mine
        assert trio.current_time() - began < ENDS_WITHIN + 1

    simulated(main, latency=0.05)


def fetching(world: SimWorld, mine: Contributions, **authors: bytes) -> tuple[ChainSync, Any]:
    """What fetches contributions, and the log of a round in which the node is: by name what these authors reveal."""
    sync = ChainSync.__new__(ChainSync)
    block = SimpleNamespace(chain=SimpleNamespace(round=1))
    sync.store = SimpleNamespace(contributions=mine, counts=Counter(), block=block, notify=lambda: None)  # type: ignore[assignment]
    sync._network = SimpleNamespace(me=world.node("me").me, peers=lambda: ())  # type: ignore[assignment]
    sync._rng, sync._fetching, sync._limit = random.Random(0), set(), trio.CapacityLimiter(FETCHES)
    reveals = {
        name.encode(): SimpleNamespace(author=world.node(name).me, what=SimpleNamespace(root=root))
        for name, root in authors.items()
    }
    return sync, SimpleNamespace(chain=SimpleNamespace(round=1), reveals=reveals)


def test_sources_that_never_come_to_an_end_keep_no_other_contribution_from_coming(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        id = await with_one(world, nursery, "author")
        mine = await shelf(world, nursery, "me")
        fetch = mine._bulk.fetch

        async def trickling(peer: str, *key: Any, progress: Callable[[int], None], **options: Any) -> memoryview:
            while peer != world.node("author").me:
                progress(1)
                await trio.sleep(1)
            return await fetch(peer, *key, progress=progress, **options)

        mine._bulk.fetch = trickling  # type: ignore[method-assign, assignment]
        liars = {f"liar{number}": bytes([number]) * 32 for number in range(FETCHES)}
        sync, log = fetching(world, mine, author=id, **liars)
        for liar in liars:
            nursery.start_soon(sync._fetch, log, liar.encode(), "")
        await trio.sleep(0.5)
        with trio.move_on_after(ENDS_WITHIN + 1):
            await sync._fetch(log, b"author", "")
        assert id in mine

    simulated(main, latency=0.05)


@pytest.mark.parametrize(("needed_by", "comes"), [("", False), ("leader", True)])
def test_of_a_round_that_is_over_only_what_a_roster_needs_is_fetched(
    simulated: Simulated, needed_by: str, comes: bool
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        id = await with_one(world, nursery, "author")
        mine = await shelf(world, nursery, "me")
        sync, log = fetching(world, mine, author=id)
        log.chain.round = 0
        await sync._fetch(log, b"author", needed_by)
        assert (id in mine) is comes and not sync._fetching

    simulated(main, latency=0.05)


def test_a_source_that_thaws_is_still_heard(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        id = await with_one(world, nursery, "author")
        await shelf(world, nursery, "other")
        mine = await shelf(world, nursery, "me")
        world.freeze(world.node("author").me)
        async with trio.open_nursery() as fetching:
            fetching.start_soon(mine.fetch, id, 0, [world.node("author").me, world.node("other").me])
            await trio.sleep(ANSWERS_WITHIN + 1.5)
            world.thaw(world.node("author").me)
        assert id in mine

    simulated(main, latency=0.05)


def test_the_newest_are_kept_decoded_within_a_budget(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        mine, rng = await shelf(world, nursery, "me"), np.random.default_rng(1)
        raws = [bytes(codec("topk").encode(rng.standard_normal(ELEMENTS).astype(np.float32))) for _ in range(3)]
        sparse = opened(raws[0], ELEMENTS)
        assert sparse is not None
        monkeypatch.setattr(store, "OPENED_BUDGET", 2 * sum(part.nbytes for part in sparse))
        monkeypatch.setattr(store, "OPENED_EACH", 0)
        ids = [await mine.keep(raw, 0) for raw in raws]
        assert [mine[id].sparse is not None for id in ids] == [False, True, True]
        assert mine[ids[0]].content == raws[0]
        assert all(np.array_equal(*pair) for pair in zip(mine[ids[1]].content, opened(raws[1], ELEMENTS), strict=True))  # type: ignore[arg-type]

    simulated(main)


def test_what_no_source_has_is_missing(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        await shelf(world, nursery, "author")
        await shelf(world, nursery, "other")
        mine = await shelf(world, nursery, "me")
        with pytest.raises(Lost, match="is with none of 2 peers"):
            await mine.fetch(bytes(32), 0, [world.node("author").me, world.node("other").me])

    simulated(main, latency=0.05)


def test_large_ones_lie_in_mapped_files_and_none_of_a_round_is_let_go_of(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        raws = [bytes(codec("topk").encode(np.full(ELEMENTS, 1.0 + i, np.float32))) for i in range(6)]
        monkeypatch.setattr(store, "CONTRIBUTIONS_BUDGET", len(raws[0]))  # as if a single one had room in memory
        monkeypatch.setattr(store, "LARGE", 1)
        mapped.keep_in(tmp_path)
        mine, theirs = await shelf(world, nursery, "me"), await shelf(world, nursery, "other")
        ids = [await theirs.keep(raw, 0) for raw in raws]
        for id in ids:
            theirs.serve(id)
            await mine.fetch(id, 0, [world.node("other").me])
        mine.forget(0)
        assert [bytes(mine[id].raw) for id in ids] == raws
        assert all(isinstance(mine[id].raw.obj, mmap.mmap) for id in ids)  # type: ignore[union-attr]

    try:
        simulated(main, latency=0.05)
    finally:
        mapped.keep_in(None)
