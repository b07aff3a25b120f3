"""A member that freezes at any moment of an exchange is given up within a part of its usual time; a slow one is not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.known.agreement import Agreement
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.messages import Decision, Position, RoundRoster
from swarmnode.protocols.methods.known.partition import CHUNK
from swarmnode.protocols.methods.known.reduction import SILENT_LEAST, SILENT_SHARE
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.testing.parts import context_of
from swarmnode.testing.simnet import SimNetwork, SimWorld, run_with_nursery
from swarmnode.training.sections import ExchangeSection

RUN, PARENT, P = "ab" * 32, "00" * 32, 24 * CHUNK
BANDWIDTH = 1_000_000  # bytes a second of each link: a round of four takes 1.6 s
WARM = 3  # rounds that teach members what is usual
NOTICED_IN = 0.75  # seconds beyond the silence allowed: three pauses between chunks here, pings, and a new ballot


class Member:
    """A node that exchanges the same values in every round, and nothing else."""

    def __init__(self, network: SimNetwork, number: int) -> None:
        self.network, self.me = network, network.me
        self.rpc = Rpc(network)
        self.bulk, self.liveness = Bulk(network), Liveness(self.rpc)
        exchange = ExchangeSection(codec="int8", deadline_floor=2.0, deadline_ceiling=60.0)
        parts = context_of(RUN, network, self.rpc, self.liveness, exchange, bulk=self.bulk, parameters=P)
        self.agreement, self.allreduce = Agreement(parts), AllReduce(parts)
        self.values = np.random.default_rng(number).normal(size=P).astype("f4")
        self.attempts: list[float] = []  # trio times at which those of the present round began
        self.held = ""
        self.decision: Decision | None = None

    async def reduce(self, roster: RoundRoster, within: float, silence: float | None) -> str:
        self.attempts.append(trio.current_time())
        mean = await self.allreduce.reduce(roster, self.values, within=within, silence=silence)
        self.held = hashlib.sha256(mean).hexdigest()
        return self.held

    async def obtain(self, state_hash: str, holders: tuple[PeerId, ...]) -> None:
        assert state_hash == self.held, "every survivor computes the result itself"

    async def round(self) -> None:
        self.attempts.clear()
        self.decision = await self.agreement.agree(samples=8, train_seconds=1.0, rates={}, exchange=self)
        self.allreduce.commit(self.decision.roster)
        roster = self.decision.roster
        self.agreement.acceptor.advance(Position(roster.round + 1, self.decision.state_hash, roster.peers, (), 1.0))


async def swarm_of(world: SimWorld, nursery: trio.Nursery, count: int) -> list[Member]:
    members = [Member(world.node(number), number) for number in range(count)]
    for member in members:
        for part in (member.network.run, member.rpc.run, member.bulk.run, member.liveness.run):
            await nursery.start(part)
    for member in members:
        member.agreement.acceptor.advance(Position(0, PARENT, tuple(m.me for m in members), (), 1.0))
    return members


async def round_of(members: list[Member]) -> float:
    """One round; how many seconds it took."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.round)
    return trio.current_time() - began


def simulate(body: Callable[[SimWorld, trio.Nursery], Awaitable[None]]) -> None:
    run_with_nursery(body, SimWorld(bandwidth=BANDWIDTH))


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("moment", [0.02, 0.4, 0.95])
def test_a_member_that_freezes_in_an_exchange_costs_it_a_part_of_its_time(moment: float, leads: bool) -> None:
    async def body(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await swarm_of(world, nursery, 4)
        usual = min([await round_of(members) for _ in range(WARM)])
        leader = members[0].agreement.acceptor.candidates()[0]
        victim = next(m for m in members if (m.me == leader) is leads)
        rest = [m for m in members if m is not victim]
        nursery.start_soon(victim.round)
        frozen_at = trio.current_time() + moment * usual

        async def freeze() -> None:
            await trio.sleep_until(frozen_at)
            world.freeze(victim.me)

        nursery.start_soon(freeze)
        await round_of(rest)
        silence = max(SILENT_LEAST, SILENT_SHARE * usual)
        assert all(m.attempts[-1] - frozen_at < silence + NOTICED_IN for m in rest)
        ends = {(m.decision.state_hash, m.decision.roster.peers) for m in rest if m.decision is not None}
        assert len(ends) == 1
        peers = set(*(peers for _, peers in ends)) if ends else set()
        assert peers - {victim.me} == {m.me for m in rest}  # the victim counts where it had given all it had to give

    simulate(body)


@pytest.mark.parametrize(("moment", "most"), [(0.5, 1.2), (0.65, 0.85), (0.8, 0.85)])
def test_after_a_late_freeze_the_others_go_on_from_what_they_have(moment: float, most: float) -> None:
    """All over again without the frozen one would take 1.3 usual rounds or more, as its links cannot be used."""

    async def body(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await swarm_of(world, nursery, 4)
        usual = min([await round_of(members) for _ in range(WARM)])
        victim, *rest = members
        known = [m.agreement._reducing.usual for m in rest]
        nursery.start_soon(victim.round)

        async def freeze() -> None:
            await trio.sleep(moment * usual)
            world.freeze(victim.me)

        nursery.start_soon(freeze)
        await round_of(rest)
        for member in rest:
            assert member.decision is not None and len(member.attempts) == 2
            roster = member.decision.roster
            assert {owner.peer for owner in roster.cut_by} == {m.me for m in members}
            assert set(roster.peers) == {m.me for m in rest}
        assert trio.current_time() - rest[0].attempts[-1] < most * usual
        assert known == [m.agreement._reducing.usual for m in rest]  # it was not usual

    simulate(body)


def test_a_member_behind_a_slow_link_with_jitter_is_never_given_up() -> None:
    """A quarter of the others' bandwidth, 20 to 150 ms of latency, and now and then a packet that is sent again."""

    async def body(world: SimWorld, nursery: trio.Nursery) -> None:
        members = await swarm_of(world, nursery, 4)
        slow, *others = members
        rng = random.Random(1)
        for other in others:
            world.link(slow.me, other.me, bandwidth=BANDWIDTH / 4)

        async def jitter() -> None:
            while True:
                for other in others:
                    again = 0.35 if rng.random() < 0.02 else 0.0
                    world.link(slow.me, other.me, latency=rng.uniform(0.02, 0.15) + again)
                await trio.sleep(0.1)

        nursery.start_soon(jitter)
        for _ in range(6):
            await round_of(members)
            assert all(m.decision is not None and len(m.decision.roster.seats) == 4 for m in members)
            assert all(len(m.attempts) == 1 for m in members)

    simulate(body)
