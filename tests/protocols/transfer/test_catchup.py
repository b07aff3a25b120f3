"""A whole state arrives from whoever has it, and never another one than asked for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.limits import BREATH
from swarmnode.protocols.methods.context import Observer
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.runner import inline
from swarmnode.protocols.transfer.catchup import REST, STATES_KEPT, CatchUp, CatchUpFailed, StateManifest
from swarmnode.protocols.transfer.shard_manifest import CHUNK, ShardManifest
from swarmnode.protocols.transfer.shard_memory import MemoryShards
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.outer import Layout, OuterState, state_hash

Simulated = Callable[..., None]
RUN = "ab" * 32
LAYOUT = Layout.of([("weights", (CHUNK // 4 * 9 + 1000,))])  # each half of a state has ten chunks


def a_state(seed: int) -> OuterState:
    vectors = np.random.default_rng(seed).normal(size=(2, LAYOUT.parameters)).astype("f4")
    return OuterState(vectors[0], vectors[1])


class Seen(Observer):
    """Bytes that had arrived, each time that it was told."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def progress(self, done: int, size: int) -> None:
        self.bytes.append(done)


class Node:
    def __init__(self, network: SimNetwork) -> None:
        self.network, self.me, self.rpc = network, network.me, Rpc(network)
        self.shards = Shards(network, self.rpc, MemoryShards(), runner=inline, seed=1)
        self.liveness = Liveness(self.rpc)
        common = {"run_id": RUN, "runner": inline, "trainer": SimpleNamespace(layout=LAYOUT)}
        parts: Any = SimpleNamespace(rpc=self.rpc, shards=self.shards, liveness=self.liveness, **common)
        self.catch_up = CatchUp(parts)


async def nodes(world: SimWorld, nursery: trio.Nursery, count: int) -> list[Node]:
    found = []
    for i in range(count):
        network = world.node(i)
        node = Node(network)
        for part in (network.run, node.rpc.run, node.shards.run, node.liveness.run):
            await nursery.start(part)
        found.append(node)
    return found


def serve(node: Node, round: int, state: OuterState) -> str:
    hash = state_hash(round, LAYOUT, state)
    node.catch_up.serve_state(round, hash, state)
    return hash


def test_a_state_arrives_whole_from_several_members(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, *members = await nodes(world, nursery, 4)
        state = a_state(1)
        wanted = {serve(m, 7, state) for m in members}.pop()
        seen = Seen()
        round, hash, got = await late.catch_up.fetch([m.me for m in members], state_hash=wanted, observer=seen)
        assert (round, hash) == (7, wanted)
        assert got.parameters.tobytes() == state.parameters.tobytes()
        assert got.momentum.tobytes() == state.momentum.tobytes()
        assert seen.bytes[-1] == 8 * LAYOUT.parameters

    simulated(main)


def test_a_member_that_dies_costs_its_chunks_another_try(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, *members = await nodes(world, nursery, 3)
        state = a_state(1)
        wanted = {serve(m, 7, state) for m in members}.pop()
        world.link(late.me, members[0].me, bandwidth=1e6)
        world.link(late.me, members[1].me, bandwidth=1e6)

        async def kill() -> None:
            await trio.sleep(1.0)
            world.kill(members[0].me)

        nursery.start_soon(kill)
        _, hash, _ = await late.catch_up.fetch([m.me for m in members], state_hash=wanted)
        assert hash == wanted

    simulated(main)


@pytest.mark.parametrize("same", [True, False])
def test_attempt_that_ended_early_is_taken_up_again_for_the_same_state_only(simulated: Simulated, same: bool) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, first, second = await nodes(world, nursery, 3)
        wanted = serve(first, 7, a_state(1))
        asked = serve(second, 7, a_state(1)) if same else serve(second, 8, a_state(2))
        before, after = Seen(), Seen()

        async def kill() -> None:
            while not any(before.bytes):  # noqa: ASYNC110 (the first chunk has no event)
                await trio.sleep(0.01)
            world.kill(first.me)

        world.link(late.me, first.me, bandwidth=1e6)
        nursery.start_soon(kill)
        with pytest.raises(CatchUpFailed):
            await late.catch_up.fetch([first.me], state_hash=wanted, observer=before)
        _, hash, got = await late.catch_up.fetch([second.me], state_hash=asked, observer=after)
        assert hash == asked and got.parameters.tobytes() == a_state(1 if same else 2).parameters.tobytes()
        assert (after.bytes[0] >= before.bytes[-1]) == same

    simulated(main)


def test_another_state_than_the_one_asked_for_is_not_taken(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, member = await nodes(world, nursery, 2)
        serve(member, 7, a_state(2))
        with pytest.raises(CatchUpFailed):
            await late.catch_up.fetch([member.me], state_hash=state_hash(7, LAYOUT, a_state(1)))
        with pytest.raises(CatchUpFailed):
            await late.catch_up.fetch([], state_hash="00" * 32)

    simulated(main)


@pytest.mark.parametrize("slowly", [False, True])
def test_a_manifest_that_lies_does_not_stand_in_the_way_of_one_that_does_not(
    simulated: Simulated, slowly: bool
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, honest, *liars = await nodes(world, nursery, 4)
        wanted = serve(honest, 7, a_state(1))
        for liar in liars:  # they are more
            liar.catch_up.serve_state(7, wanted, a_state(3))
            if slowly:  # each of their chunks comes before anybody's patience ends
                world.link(late.me, liar.me, bandwidth=CHUNK / 15)
        with trio.fail_after(120):
            _, hash, got = await late.catch_up.fetch([p.me for p in (*liars, honest)], state_hash=wanted)
        assert hash == wanted and got.parameters.tobytes() == a_state(1).parameters.tobytes()

    simulated(main)


def test_who_answers_later_than_all_that_lie_is_asked_once_more(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, honest, *liars = await nodes(world, nursery, 4)
        wanted = serve(honest, 7, a_state(1))
        for liar in liars:
            liar.catch_up.serve_state(7, wanted, a_state(3))

        async def slowly(hash_all: Callable[[], Any]) -> Any:
            await trio.sleep(2 * REST)
            return hash_all()

        honest.catch_up._runner = slowly
        _, hash, got = await late.catch_up.fetch([p.me for p in (*liars, honest)], state_hash=wanted)
        assert hash == wanted and got.parameters.tobytes() == a_state(1).parameters.tobytes()

    simulated(main)


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": ()},
        {"shards": (b"x",) * 2},
        {"shards": (b"x" * 32,)},
        {"layout": "x"},
        {"round": -1},
        {"run_id": "x"},
    ],
    ids=str,
)
def test_a_manifest_that_does_not_fit_the_model_takes_no_memory(
    simulated: Simulated, changes: dict[str, object]
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, liar = await nodes(world, nursery, 2)
        wanted = serve(liar, 7, a_state(1))
        fields = {"round": 7, "layout": LAYOUT.digest, "shards": (b"\0" * 32,) * 2, "run_id": RUN}
        liar.catch_up._served[wanted].manifest = StateManifest(state_hash=wanted, **{**fields, **changes})  # type: ignore[arg-type]
        with pytest.raises(CatchUpFailed, match="no member that answered has the state"):
            await late.catch_up.fetch([liar.me], state_hash=wanted)

    simulated(main)


def test_nan_never_becomes_anybodys_state(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, liar = await nodes(world, nursery, 2)
        state = a_state(1)
        state.parameters[5] = np.nan
        wanted = serve(liar, 7, state)
        with pytest.raises(CatchUpFailed, match="NaN"):
            await late.catch_up.fetch([liar.me], state_hash=wanted)

    simulated(main)


def test_a_shard_of_another_size_than_the_state_takes_no_memory(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, liar = await nodes(world, nursery, 2)
        wanted = serve(liar, 7, a_state(1))
        huge = ShardManifest.of(bytes(4 * LAYOUT.parameters + 1))
        liar.shards.memory.offer(huge, memoryview(bytes(huge.size)))
        liar.catch_up._served[wanted].manifest = StateManifest(RUN, 7, wanted, LAYOUT.digest, (huge.id, huge.id))
        with pytest.raises(CatchUpFailed, match="not expected"):
            await late.catch_up.fetch([liar.me], state_hash=wanted)

    simulated(main)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_a_momentum_of_zeros_or_of_the_same_bytes_as_the_parameters_travels_not(
    simulated: Simulated, momentum: float
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, member = await nodes(world, nursery, 2)
        for round in (7, 8):  # the second shares a shard with the one that is here already
            parameters = a_state(round).parameters
            state = OuterState(parameters, parameters if momentum else np.zeros_like(parameters))
            wanted, before = serve(member, round, state), member.network.traffic().bytes_out
            _, _, got = await late.catch_up.fetch([member.me], state_hash=wanted)
            assert got.parameters.tobytes() == parameters.tobytes()
            assert got.momentum.tobytes() == state.momentum.tobytes()
            assert member.network.traffic().bytes_out - before < 1.1 * parameters.nbytes

    simulated(main)


def test_the_newest_states_are_served_and_older_ones_withdrawn(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, member = await nodes(world, nursery, 2)
        hashes = []
        for round in range(STATES_KEPT + 3):
            hashes.append(serve(member, round, a_state(round)))
            await late.catch_up._ask_manifests([member.me], None, REST)  # so that it is hashed
        manifests = [member.catch_up._served[hash].manifest for hash in hashes[-STATES_KEPT:]]
        assert {shard for manifest in manifests if manifest for shard in manifest.shards} == offered(member)
        assert len(offered(member)) == 2 * STATES_KEPT
        member.catch_up.withdraw(hashes[-1])
        assert len(offered(member)) == 2 * STATES_KEPT - 2
        with pytest.raises(CatchUpFailed):
            await late.catch_up.fetch([member.me], state_hash=hashes[-1])

    simulated(main)


def test_a_state_that_is_fetched_although_it_is_here_takes_no_memory_once_it_is_withdrawn(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, member = await nodes(world, nursery, 2)
        (hash,) = {serve(node, 7, a_state(1)) for node in (late, member)}
        await late.catch_up.fetch([member.me], state_hash=hash)
        assert len(offered(late)) == 2
        late.catch_up.withdraw(hash)
        assert not offered(late)

    simulated(main)


def offered(node: Node) -> set[bytes]:
    return set(node.shards.memory.recent(100))


def test_a_member_that_trickles_is_left_for_another(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, slow, fast = await nodes(world, nursery, 3)
        state = a_state(1)
        wanted = {serve(m, 7, state) for m in (slow, fast)}.pop()
        world.link(late.me, slow.me, bandwidth=CHUNK / 8)  # it moves, so nothing else would end it
        with trio.fail_after(8):
            await late.catch_up.fetch([slow.me, fast.me], state_hash=wanted)

    simulated(main)


def test_a_lone_member_that_freezes_ends_the_attempt_in_seconds(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, member = await nodes(world, nursery, 2)
        wanted = serve(member, 7, a_state(1))
        world.link(late.me, member.me, bandwidth=CHUNK)

        async def freeze() -> None:
            await trio.sleep(3)
            world.freeze(member.me)

        nursery.start_soon(freeze)
        with trio.fail_after(10), pytest.raises(CatchUpFailed, match="no member answers"):
            await late.catch_up.fetch([member.me], state_hash=wanted)

    simulated(main)


def test_a_member_that_exchanges_a_round_serves_little_and_a_joiner_bears_it(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        late, member = await nodes(world, nursery, 2)
        wanted, began = serve(member, 7, a_state(1)), trio.current_time()
        with member.catch_up.eased():
            await late.catch_up.fetch([member.me], state_hash=wanted)
        assert trio.current_time() - began > 6 * BREATH  # of 20 chunks, at most four in an answer; else 0.1 s

    simulated(main)
