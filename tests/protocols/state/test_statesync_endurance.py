"""No peer, no disk and no moment of a call ends what keeps the state in step, or holds it up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from simnodes import RUN, connect, now
from statenodes import StateNode, start

from swarmnode.crdt.hlc import ENOUGH, MAX_OFF, PeerClocks
from swarmnode.protocols.calls.rpc import Refused
from swarmnode.protocols.state.backend import Unwritable
from swarmnode.protocols.state.sync import REPAIR_EVERY
from swarmnode.protocols.state.wire import Elements, OwnElements, Push, Pushed, StateFetch
from swarmnode.protocols.wire import RunQuery
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]


def test_calls_before_the_state_is_open_and_after_it_is_closed_are_refused(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        peer, late = (StateNode.make(world.node(name)) for name in ("peer", "late"))
        for node in (peer, late):
            await nursery.start(node.network.run)
        await nursery.start(peer.run)
        await nursery.start(late.rpc.run)
        has, merge = late.state.has, late.state.merge
        merging = trio.Event()

        def closed(rank: bytes) -> bool:
            raise RuntimeError("the state store is not running")

        async def slow_merge(elements: Any) -> Any:
            merging.set()
            await trio.sleep(5)
            return await merge(elements)

        async def push(number: int) -> None:
            sealed = (peer.signs(f"note/{number}", number).sealed,)
            await peer.rpc.call(late.me, "state.push", Push(RUN, sealed), Pushed, timeout=10)

        async def pushes_in_vain(number: int) -> None:
            with pytest.raises(Refused) as refused:
                await push(number)
            assert refused.value.code == "busy"

        late.state.has = closed  # type: ignore[method-assign]
        await connect([(peer, late)])
        await pushes_in_vain(1)
        late.state.has = has  # type: ignore[method-assign]
        with trio.CancelScope() as life:
            async with trio.open_nursery() as inner:
                await inner.start(late.sync.run)
                await push(2)
                late.state.merge = slow_merge  # type: ignore[method-assign]
                nursery.start_soon(pushes_in_vain, 3)
                await merging.wait()
                life.cancel()
        late.state.has = closed  # type: ignore[method-assign]
        await trio.sleep(6)  # the call that was in hand did not go on
        with pytest.raises(Refused):
            await peer.rpc.call(late.me, "state.own", RunQuery(RUN), OwnElements, timeout=5)

    simulated(main)


def test_what_a_liar_sends_behind_a_forgery_is_not_lost_to_who_sends_it_truly(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, liar, honest = await start(nursery, world, 3)
        await connect([(liar, node), (honest, node)])
        await trio.sleep(5)
        genuine, other = honest.signs("note/a", 1), honest.signs("note/b", 2)
        fields = (getattr(other, name) for name in ("v", "run", "author", "key", "hlc", "ttl", "value"))
        forged = type(other)(*fields, b"x" * 64)
        inner = node.sync.intake._runner

        async def slow(work: Callable[[], Any]) -> Any:
            await trio.sleep(1)
            return await inner(work)

        node.sync.intake._runner = slow  # type: ignore[assignment]
        push = Push(RUN, (forged.sealed, genuine.sealed))
        nursery.start_soon(partial(liar.rpc.call, node.me, "state.push", push, Pushed, timeout=10))
        await trio.sleep(0.5)
        push = Push(RUN, (genuine.sealed,))
        await honest.rpc.call(node.me, "state.push", push, Pushed, timeout=10)
        assert node.state.has(genuine.rank)
        assert not node.state.has(other.rank)

    simulated(main)


def test_a_disk_that_cannot_be_read_ends_nothing(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        author, *others = await start(nursery, world, 9)
        await connect((author, other) for other in others)
        await trio.sleep(5)
        sealed = author.state.sealed

        async def unreadable(ranks: Any) -> Any:
            raise Unwritable("the database is damaged")

        author.state.sealed = unreadable  # type: ignore[method-assign]
        record = await author.sync.write("note/a", 1)  # some get it whole, others ask for it by rank
        await trio.sleep(2)
        with pytest.raises(Refused) as refused:
            rank = record.rank
            await others[0].rpc.call(author.me, "state.fetch", StateFetch(RUN, rank), Elements, timeout=5)
        assert refused.value.code == "unwritable"
        await author.sync.repair_with_all()
        author.state.sealed = sealed  # type: ignore[method-assign]
        await trio.sleep(2 * REPAIR_EVERY)
        assert {other.hash() for other in others} == {author.hash()}

    simulated(main)


class Clocks:
    """A clock that its owner sets, ms, beside a steady one, s."""

    def __init__(self) -> None:
        self.passed, self.set = 0.0, 1_000_000
        self.peers = PeerClocks(lambda: self.set + round(1000 * self.passed), lambda: self.passed)

    def tell(self, ahead: int, names: str = "abc") -> None:
        """So many ms ahead are the clocks of these peers of what this one was at first."""
        for name in names:
            self.peers.record(name, 1_000_000 + round(1000 * self.passed) + ahead)


def test_the_clocks_of_peers_that_left_do_not_count() -> None:
    clocks = Clocks()
    clocks.tell(2 * MAX_OFF)
    assert clocks.peers.complaint
    for name in "abc":
        clocks.peers.forget(name)
    assert clocks.peers.off is None and not clocks.peers.complaint


def test_one_peer_with_another_time_is_told_and_keeps_nobody_from_signing() -> None:
    clocks = Clocks()
    clocks.tell(-300_000, "a")
    assert "300 s ahead of that of 1 peer" in clocks.peers.doubt and not clocks.peers.complaint
    clocks.tell(2_000, "a")
    assert not clocks.peers.doubt
    clocks.tell(-300_000)
    assert clocks.peers.complaint and not clocks.peers.doubt


@pytest.mark.parametrize("step", [-90_000, 90_000])
def test_a_clock_that_is_set_wrong_under_a_running_node_changes_nothing(step: int) -> None:
    clocks = Clocks()
    clocks.tell(2_000)
    assert clocks.peers.time() == 1_000_000
    clocks.set += step
    clocks.passed = 10.0
    assert clocks.peers.time() == 1_010_000 and not clocks.peers.complaint
    assert "goes by the time that it had before" in clocks.peers.doubt
    clocks.set -= step - 3_000  # right again, and better than before
    assert clocks.peers.time() == 1_013_000 and not clocks.peers.doubt


def test_a_clock_that_was_set_wrong_is_not_gone_by_where_peers_leave() -> None:
    clocks = Clocks()
    clocks.tell(0)
    assert clocks.peers.time() == 1_000_000
    clocks.set += 90_000
    for name in "cb":
        clocks.peers.forget(name)
        assert clocks.peers.time() == 1_000_000 and not clocks.peers.complaint
        assert "goes by the time that it had before" in clocks.peers.doubt
    clocks.tell(90_000, "a")
    assert clocks.peers.time() == 1_090_000 and not clocks.peers.doubt
    clocks.tell(0, "a")
    assert clocks.peers.time() == 1_000_000
    clocks.peers.forget("a")
    assert clocks.peers.time() == 1_090_000, "nobody is left who would know better"


def test_peers_do_not_move_the_time_of_a_node() -> None:
    clocks = Clocks()
    clocks.tell(0)
    assert clocks.peers.time() == 1_000_000
    clocks.tell(2 * MAX_OFF)
    assert clocks.peers.time() == 1_000_000 and clocks.peers.complaint
    clocks.set += 2 * MAX_OFF + 1_000  # its owner follows them
    assert clocks.peers.time() == 1_061_000 and not clocks.peers.complaint


def test_nodes_whose_clocks_are_all_set_right_follow_them(simulated: Simulated) -> None:
    """Each goes by the old time until most show the new one: nobody tells another what its own clock does not show."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        set_by = [0]
        nodes = [StateNode.make(world.node(f"node {n}"), clock=lambda: now() + set_by[0]) for n in range(5)]
        for node in nodes:
            await nursery.start(node.network.run)
            await nursery.start(node.run)
        await connect((a, b) for a in nodes for b in nodes if a.me < b.me)
        await trio.sleep(5)
        set_by[0] = -2 * MAX_OFF
        before = now()
        assert abs(nodes[0].state.now() - before) < 1_000 and nodes[0].state.clocks.doubt
        await trio.sleep(10 * REPAIR_EVERY)
        for node in nodes:
            assert abs(node.state.now() - now() - set_by[0]) < 1_000 and not node.state.clocks.doubt

    simulated(main)


def test_what_a_peer_says_of_the_time_is_forgotten_with_its_connection(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node = (await start(nursery, world, 1))[0]
        wrong = [StateNode.make(world.node(f"wrong {n}"), clock=lambda: now() + 2 * MAX_OFF) for n in range(ENOUGH)]
        for peer in wrong:
            await nursery.start(peer.network.run)
            await nursery.start(peer.run)
        await connect((peer, node) for peer in wrong)
        await trio.sleep(5)
        assert node.state.clocks.complaint
        for peer in wrong:
            world.kill(peer.me)
        await trio.sleep(60)
        assert not node.state.clocks.complaint

    simulated(main)
