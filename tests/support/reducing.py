"""Nodes that do nothing but all-reduces, by rosters that a test makes."""

from __future__ import annotations

import numpy as np
import trio

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.messages import Owner, PartsMissing, RoundRoster, Seat
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.testing.parts import context_of
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.sections import ExchangeSection

RUN, PARENT, P = "ab" * 32, "00" * 32, 5000


class Peer:
    def __init__(self, network: SimNetwork, codec_name: str, size: int, group_size: int) -> None:
        self.me, self.network, self.rpc = network.me, network, Rpc(network)
        self.bulk, self.liveness = Bulk(network), Liveness(self.rpc)
        self._made = codec_name, size, group_size
        self.start_again()
        self.values: Vector = (
            np.random.default_rng(len(network.me) + ord(network.me[-1])).normal(size=size).astype("f4")
        )

    def start_again(self) -> None:
        """As a process that remembers nothing."""
        codec_name, size, group_size = self._made
        self.bulk.withdraw(("parts",))
        exchange = ExchangeSection(codec=codec_name, group_size=group_size, deadline_ceiling=30.0)
        parts = context_of(RUN, self.network, self.rpc, self.liveness, exchange, bulk=self.bulk, parameters=size)
        self.allreduce = AllReduce(parts)


async def peers(
    world: SimWorld,
    nursery: trio.Nursery,
    count: int,
    codec_name: str = "int8",
    size: int = P,
    group_size: int = 16,
) -> list[Peer]:
    found = []
    for i in range(count):
        network = world.node(i)
        peer = Peer(network, codec_name, size, group_size)
        for part in (network.run, peer.rpc.run, peer.bulk.run, peer.liveness.run):
            await nursery.start(part)
        found.append(peer)
    return found


def a_roster(
    members: list[Peer],
    *,
    round: int = 0,
    ballot: int = 0,
    weights: tuple[int, ...] = (),
    cut_by: tuple[Owner, ...] = (),
) -> RoundRoster:
    seats = tuple(Seat(p.me, w, 4) for p, w in zip(members, weights or (1,) * len(members), strict=True))
    return RoundRoster(RUN, round, ballot, PARENT, seats, (), 1.0, cut_by)


async def reduce_all(
    members: list[Peer],
    roster: RoundRoster,
    within: float = 10.0,
    results: dict[str, Vector | PartsMissing] | None = None,
) -> dict[str, Vector | PartsMissing]:
    results = {} if results is None else results

    async def reduce(peer: Peer) -> None:
        try:
            results[peer.me] = await peer.allreduce.reduce(roster, peer.values, within=within)
        except PartsMissing as error:
            results[peer.me] = error

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(reduce, member)
    return results
