"""Members learn one another's addresses through anybody, and nobody can speak for another."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from itertools import pairwise
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from statenodes import RUN, StateNode

from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.kinds import DAY, KINDS, SECOND
from swarmnode.crdt.law import EVERYBODY
from swarmnode.crdt.record import Record
from swarmnode.protocols.calls.rpc import Refused
from swarmnode.protocols.state import membership
from swarmnode.protocols.state.membership import (
    FEW,
    RENEW_EVERY,
    RENEWALS,
    SHORTEST_LEASE,
    KeyInUse,
    Membership,
    RunListing,
    ask_runs,
    ask_spec,
    lease_end,
    lease_of,
    serve_runs,
)
from swarmnode.protocols.state.wire import Push, Pushed
from swarmnode.testing.simnet import SimNetwork, SimWorld

Simulated = Callable[..., None]


class Node:
    def __init__(self, network: SimNetwork, *, admitted: Container[str] = EVERYBODY, life: int = 0) -> None:
        self.network, self.me = network, network.me
        self.state = StateNode.make(network, admitted=admitted)
        self.rpc = self.state.rpc
        self.membership = Membership(
            network=network,
            state=self.state.state,
            sync=self.state.sync,
            rng=random.Random(f"{life} {network.me}"),
        )
        self.scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.network.run)
            await nursery.start(self.state.run)
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


async def push(liar: Node, victim: Node, *sealed: bytes) -> None:
    await liar.rpc.call(victim.me, "state.push", Push(RUN, sealed), Pushed, timeout=1)


def test_a_chain_of_acquaintances_becomes_a_mesh(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await nodes(world, nursery, 6)
        for one, other in pairwise(members):
            one.network.learn(other.me, other.network.addresses)
            await one.network.connect(other.me)
        await trio.sleep(20)
        for node in members:
            assert set(node.membership.members()) == {m.me for m in members} - {node.me}
            assert len(node.membership.connected()) == 5

    simulated(main)


def test_one_that_arrives_is_known_to_all_within_seconds(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await nodes(world, nursery, 8)
        for one, other in pairwise(members):
            await one.network.connect(other.me)
        await trio.sleep(30)
        (newcomer,) = await nodes(SimWorldView(world), nursery, 1)
        await newcomer.network.connect(members[0].me)
        await newcomer.membership.announce()
        await trio.sleep(1)
        assert len(newcomer.membership.members()) == 8
        assert all(newcomer.me in member.membership.members() for member in members)

    simulated(main)


class SimWorldView:
    """Gives out nodes that have other names than those of `nodes`."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def node(self, name: int) -> SimNetwork:
        return self._world.node(f"newcomer {name}")


def test_leases_stay_while_members_live_though_pushes_are_lost(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await nodes(world, nursery, 12)
        for member in members:
            member.rpc._loss = 0.2
        for one, other in pairwise(members):
            await one.network.connect(other.me)
        await trio.sleep(60)
        for _ in range(30):
            await trio.sleep(RENEW_EVERY / 2)
            assert all(len(member.membership.members()) == 11 for member in members)

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


def test_two_halves_find_one_another_though_the_cut_outlasted_their_leases(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        found = await nodes(world, nursery, 5)
        for node in found[1:]:
            await found[0].network.connect(node.me)
            await node.membership.announce()
        await trio.sleep(10)
        halves = found[:3], found[3:]
        world.partition([[node.me for node in half] for half in halves])
        await trio.sleep(200)
        for half in halves:
            assert all(set(node.membership.members()) < {other.me for other in half} for node in half)
        world.heal()
        await trio.sleep(40)
        everybody = {node.me for node in found}
        assert all({*node.membership.members(), node.me} == everybody for node in found)

    simulated(main)


def test_one_that_left_in_order_is_not_called(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        stays, leaves, dies = await nodes(world, nursery, 3)
        for node in (leaves, dies):
            await stays.network.connect(node.me)
            await node.membership.announce()
        await trio.sleep(5)
        leaves.scope.cancel()
        await trio.sleep(2)
        world.kill(leaves.me)
        world.kill(dies.me)
        called: list[str] = []
        connect = stays.network.connect

        async def noting(peer: str, *, timeout: float) -> object:
            called.append(peer)
            return await connect(peer, timeout=timeout)

        stays.network.connect = noting  # type: ignore[method-assign, assignment]
        await trio.sleep(180)
        assert dies.me in called and leaves.me not in called

    simulated(main)


@given(st.integers(0, 1 << 20))
def test_leases_last_as_long_as_a_node_hears_no_more_of_them_in_a_larger_swarm(members: int) -> None:
    lasts = lease_of(members)
    assert SHORTEST_LEASE <= lasts <= KINDS["member"].ttl // SECOND
    if members <= 1280:
        assert members / (lasts / RENEWALS) <= FEW / RENEW_EVERY * 1.05  # leases a second
    if members <= FEW:
        assert lasts == SHORTEST_LEASE


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ({"addresses": (), "lasts": 300}, 300),
        ({"addresses": ()}, SHORTEST_LEASE),
        ("not a lease", SHORTEST_LEASE),
        ({"lasts": True}, SHORTEST_LEASE),
        ({"lasts": 0}, SHORTEST_LEASE),
        ({"lasts": 1.5}, SHORTEST_LEASE),
        ({"lasts": 1 << 40}, KINDS["member"].ttl // SECOND),
    ],
)
def test_a_lease_runs_out_when_it_says_and_never_after_its_record(value: Any, seconds: int) -> None:
    lease = Record(1, RUN, "A", "member", stamp_at(DAY), KINDS["member"].ttl, value, bytes(64))
    assert lease_end(lease) == DAY + seconds * SECOND


def test_a_long_lease_is_renewed_in_time_and_new_addresses_are_told_at_once(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        monkeypatch.setattr(membership, "FEW", 1)  # a lease of three members lasts three minutes
        members = await nodes(world, nursery, 3)
        for one, other in pairwise(members):
            await one.network.connect(other.me)
        await trio.sleep(RENEW_EVERY + 5)  # then each has seen how many they are
        written = [0, 0]
        last = await members[0].state.state.get(members[2].me, "member")
        for second in range(600):
            await trio.sleep(1)
            assert all(len(member.membership.members()) == 2 for member in members)
            lease = await members[0].state.state.get(members[2].me, "member")
            written[second > 300] += lease is not last
            last = lease
            if second == 300:
                monkeypatch.setattr(
                    SimNetwork, "addresses", property(lambda network: (f"/dns4/new/tcp/1/p2p/{network.me}",))
                )
            if second == 300 + RENEW_EVERY + 2:
                assert "/dns4/new" in members[0].network.known_addresses(members[2].me)[0]
        assert written[0] <= 300 // 60 + 1 and written[1] <= 300 // 60 + 2

    simulated(main)


def test_nobody_announces_addresses_for_another(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar, third = await nodes(world, nursery, 3)
        honest = third.state.signs("member", {"addresses": ()})
        forged = type(honest)(honest.v, RUN, third.me, "member", honest.hlc, honest.ttl, {"addresses": ("x",)}, b"")
        signed = type(honest)(
            *(getattr(forged, n) for n in ("v", "run", "author", "key", "hlc", "ttl", "value")), b"x" * 64
        )
        for lie in (forged, signed):
            await push(liar, victim, lie.sealed)
        assert third.me not in victim.membership.members()
        assert victim.state.sync.violations.count(liar.me) == 2

    simulated(main)


def test_addresses_of_another_peer_and_names_for_many_in_a_lease_are_not_learned(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await nodes(world, nursery, 2)
        addresses = (
            "/ip4/6.6.6.6/tcp/1/p2p/somebody-else",
            f"/ip4/6.6.6.7/tcp/1/p2p/{liar.me}",
            f"/dnsaddr/many.example/p2p/{liar.me}",
        )
        await push(liar, victim, liar.state.signs("member", {"addresses": addresses}, ahead=1000).sealed)
        await trio.sleep(0.1)
        known = victim.network.known_addresses(liar.me)
        assert set(addresses) & set(known) == {addresses[1]}

    simulated(main)


def test_leases_of_strangers_to_a_closed_run_change_nothing_here(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        closed, stranger = world.node("closed"), Node(world.node("stranger"))
        closed = Node(closed, admitted={closed.me})
        for node in (closed, stranger):
            await nursery.start(node.run)
        await stranger.network.connect(closed.me)
        await stranger.membership.announce()
        await trio.sleep(40)
        assert closed.membership.members() == ()

    simulated(main)


@pytest.mark.parametrize("letter", ["x", "中"])
def test_a_lease_fits_its_record_however_many_addresses_there_are(
    letter: str, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        one, other = await nodes(world, nursery, 2)
        fat = tuple(f"/dns4/{letter * 90}{i}/tcp/1/p2p/{one.me}" for i in range(20))
        monkeypatch.setattr(SimNetwork, "addresses", property(lambda network: fat))
        await one.network.connect(other.me)
        await one.membership.announce()
        await trio.sleep(1)
        assert not one.membership.complaint
        assert one.me in other.membership.members()
        assert 1 <= len([a for a in other.network.known_addresses(one.me) if "dns4" in a]) < len(fat)

    simulated(main)


def test_a_node_that_missed_changes_looks_at_all_leases(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await nodes(world, nursery, 1)
        authors = [world.node(f"author {i}") for i in range(400)]
        leases = [StateNode.make(author).signs("member", {"addresses": ()}) for author in authors]
        await node.state.state.merge(leases)  # at once: more than a feed holds
        await node.state.state.merge([StateNode.make(world.node("last")).signs("member", {"addresses": ()})])
        await trio.sleep(0.1)
        await node.state.state.merge([StateNode.make(world.node("later")).signs("member", {"addresses": ()})])
        await trio.sleep(0.1)
        assert len(node.membership.members()) == 402

    simulated(main)


def test_of_more_leases_than_are_kept_those_known_first_and_of_the_connected_stay(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_LEASES", 8)

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, known, late = await nodes(world, nursery, 3)
        await node.network.connect(known.me)
        await trio.sleep(5)
        flood = [StateNode.make(world.node(f"author {i}")).signs("member", {"addresses": ()}) for i in range(100)]
        await node.state.state.merge(flood)
        await trio.sleep(1)
        assert len(node.membership.members()) == 8 and known.me in node.membership.members()
        kept = node.membership.members()
        await node.network.connect(late.me)
        await late.membership.announce()
        await trio.sleep(1)
        members = node.membership.members()
        assert len(members) == 8 and {known.me, late.me} < {*members} and len({*members} & {*kept}) == 7

    simulated(main)


def test_others_have_their_turn_while_a_node_looks_at_all_leases(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await nodes(world, nursery, 1)
        leases = [StateNode.make(world.node(f"author {i}")).signs("member", {"addresses": ()}) for i in range(400)]
        await node.state.state.merge(leases)
        await trio.sleep(1)
        look, looked, most = node.membership._look_at, 0, 0

        async def counted(element: Any) -> None:
            nonlocal looked
            looked += 1
            await look(element)

        async def take_turns() -> None:
            nonlocal looked, most
            while True:
                most, looked = max(most, looked), 0
                await trio.lowlevel.checkpoint()

        node.membership._look_at = counted  # type: ignore[method-assign]
        nursery.start_soon(take_turns)
        await node.membership._look_at_all()
        assert 0 < most <= 2 * membership.AT_ONCE  # trio draws the order of tasks

    simulated(main)


class Copy:
    """A second daemon with the key of `original`, reached through a network identity of its own."""

    def __init__(self, carrier: SimNetwork, original: SimNetwork) -> None:
        self._carrier = carrier
        self.me, self.sign = original.me, original.sign

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)


def test_of_two_daemons_with_one_key_the_younger_stops(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        older, between = await nodes(world, nursery, 2)
        await older.network.connect(between.me)
        await trio.sleep(100)
        carrier = world.node("carrier")
        younger = Node(Copy(carrier, older.network), life=1)  # type: ignore[arg-type]
        await nursery.start(carrier.run)
        await nursery.start(younger.state.run)
        async with trio.open_nursery() as inner:

            async def live(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                with pytest.raises(KeyInUse, match="since 100 s before"):
                    await younger.membership.run(task_status=task_status)
                inner.cancel_scope.cancel()

            await inner.start(live)
            await carrier.connect(between.me)
            await trio.sleep(10)
            raise AssertionError("the younger one lives")
        await trio.sleep(30)
        assert between.membership.members() == (older.me,)  # the older one has its lease, and goes on

    simulated(main)


def test_a_node_that_starts_again_is_not_taken_for_a_second_one(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        first, peer = await nodes(world, nursery, 2)
        await first.network.connect(peer.me)
        await trio.sleep(30)
        world.kill(first.me)
        first.scope.cancel()
        first.state.scope.cancel()
        await trio.sleep(1)
        again = Node(world.node(0), life=1)
        await nursery.start(again.run)
        await again.network.connect(peer.me)
        await trio.sleep(100)
        assert peer.membership.members() == (again.me,)
        assert again.membership.members() == (peer.me,)

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
