"""Members learn one another's addresses through anybody, and nobody can speak for another."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import trio

from swarmnode.crdt.hlc import HybridClock
from swarmnode.crdt.record import seal, write
from swarmnode.node.simnet import SimNetwork, SimWorld
from swarmnode.protocols.membership import (
    MAX_LEASE_BYTES,
    MAX_SENDERS,
    Leases,
    Membership,
    RunListing,
    ask_runs,
    ask_spec,
    serve_runs,
)
from swarmnode.protocols.rpc import Refused, Rpc

Simulated = Callable[..., None]
RUN = "ab" * 32
EPOCH = 1_700_000_000_000


def now() -> int:
    return EPOCH + int(1000 * trio.current_time())


class Node:
    def __init__(self, network: SimNetwork, admits: Callable[[str], bool] = lambda peer: True) -> None:
        self.network, self.me, self.rpc = network, network.me, Rpc(network)
        self.membership = Membership(
            run_id=RUN,
            network=network,
            rpc=self.rpc,
            clock=HybridClock(),
            now=now,
            admits=admits,
            rng=random.Random(network.me),
        )
        self.scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.network.run)
            await nursery.start(self.rpc.run)
            with self.scope:
                async with trio.open_nursery() as inner:
                    await inner.start(self.membership.run)
                    task_status.started()
                    await trio.sleep_forever()


async def nodes(world: SimWorld, nursery: trio.Nursery, count: int) -> list[Node]:
    found = [Node(world.node(i)) for i in range(count)]
    for node in found:
        await nursery.start(node.run)
    return found


def test_a_chain_of_acquaintances_becomes_a_mesh(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await nodes(world, nursery, 6)
        for one, other in pairwise(members):
            one.network.learn(other.me, other.network.addresses)
            await one.network.connect(other.me)
        await trio.sleep(60)
        for node in members:
            assert set(node.membership.members()) == {m.me for m in members} - {node.me}
            assert len(node.membership.connected()) == 5

    simulated(main)


def test_one_that_leaves_is_gone_at_once_and_one_that_dies_within_a_minute(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        stays, leaves, dies = await nodes(world, nursery, 3)
        for node in (leaves, dies):
            await stays.network.connect(node.me)
            await node.membership.announce()
        await trio.sleep(10)
        assert set(stays.membership.members()) == {leaves.me, dies.me}
        leaves.scope.cancel()
        world.kill(dies.me)
        await trio.sleep(2)
        assert stays.membership.members() == (dies.me,)
        await trio.sleep(61)
        assert stays.membership.members() == ()

    simulated(main)


def test_nobody_announces_addresses_for_another(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar, third = await nodes(world, nursery, 3)
        record = write(
            RUN, third.me, "member", {"addresses": ()}, hlc=HybridClock().tick(now()), sign=liar.network.sign
        )
        for _ in range(3):
            await liar.rpc.call(victim.me, "members.exchange", Leases(RUN, (seal(record), b"junk")), Leases, timeout=1)
        assert third.me not in victim.membership.members()
        assert victim.membership.refused[liar.me] == 6

    simulated(main)


def test_addresses_of_another_peer_in_a_lease_are_not_learned(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await nodes(world, nursery, 2)
        addresses = ("/ip4/6.6.6.6/tcp/1/p2p/somebody-else", f"/ip4/6.6.6.7/tcp/1/p2p/{liar.me}")
        hlc = HybridClock().tick(now() + 1000)
        record = write(RUN, liar.me, "member", {"addresses": addresses}, hlc=hlc, sign=liar.network.sign)
        await liar.rpc.call(victim.me, "members.exchange", Leases(RUN, (seal(record),)), Leases, timeout=1)
        known = victim.network.known_addresses(liar.me)
        assert addresses[1] in known and addresses[0] not in known

    simulated(main)


def test_leases_of_strangers_to_a_closed_run_change_nothing_here(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        closed, stranger = Node(world.node("closed"), admits=lambda peer: False), Node(world.node("stranger"))
        for node in (closed, stranger):
            await nursery.start(node.run)
        await stranger.network.connect(closed.me)
        await stranger.membership.announce()
        assert closed.membership.members() == ()

    simulated(main)


def test_an_exchange_fits_a_message_however_many_leases_there_are(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await nodes(world, nursery, 1)
        fat = tuple(f"/dns4/{'x' * 90}/tcp/{i}" for i in range(8))
        for i in range(700):
            author = world.node(f"author {i}")
            hlc = HybridClock().tick(now())
            record = write(RUN, author.me, "member", {"addresses": fat}, hlc=hlc, sign=author.sign)
            node.membership._take("sender", Leases(RUN, (seal(record),)))
        ours = node.membership._ours()
        assert len(node.membership.members()) == 700
        assert sum(map(len, ours.sealed)) <= MAX_LEASE_BYTES
        assert any(node.me.encode() in raw for raw in ours.sealed)  # its own is always among them

    simulated(main)


def test_senders_of_invalid_leases_are_counted_up_to_a_bound(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await nodes(world, nursery, 1)
        for i in range(2 * MAX_SENDERS):
            node.membership._take(f"peer{i}", Leases(RUN, (b"junk",)))
        assert len(node.membership.refused) == MAX_SENDERS

    simulated(main)


def test_a_newcomer_is_told_the_runs_and_their_specifications(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        host, newcomer = await nodes(world, nursery, 2)
        listing = RunListing(RUN, "demo", 3, 2)
        serve_runs(host.rpc, lambda: (listing,), lambda run_id: b"spec" if run_id == RUN else None)
        assert await ask_runs(newcomer.rpc, host.me) == (listing,)
        assert await ask_spec(newcomer.rpc, host.me, RUN) == b"spec"
        with pytest.raises(Refused):
            await ask_spec(newcomer.rpc, host.me, "cd" * 32)

    simulated(main)
