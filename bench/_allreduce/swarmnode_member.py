"""One member of a swarm for `bench/allreduce.py`, which writes commands to it: JSON lines. A daemon's network stack.

`round` is one all-reduce by a roster that all were given; `agree` is one as members of a run do it, who agree on the
roster, on the hash of what they computed, and on a roster without those who failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import trio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pair

from swarmnode.node.process import rest_what_stays
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.agreement import Agreement
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.messages import Position, RoundRoster, Seat
from swarmnode.protocols.peers.liveness import Liveness, LivenessSettings
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.testing.consensus import weighted_sum
from swarmnode.testing.parts import context_of
from swarmnode.training.codecs import codec
from swarmnode.training.sections import ExchangeSection

RUN, PARENT = "ab" * 32, "00" * 32
PATIENCE = 120.0  # seconds that a reduction may wait
DEADLINES = (2.0, 60.0)  # floor and ceiling in seconds: the defaults of a RunSpec
PATIENT = LivenessSettings(timeout=30.0)  # a machine that is busy with other things is no reason to give up on a member
GROUP = 16  # members that exchange directly
WORK = 8  # samples that each claims to have trained on: equal weights

Vector = Any


def contribution(index: int, parameters: int) -> Vector:
    """What member `index` brings, float32 (parameters,): anybody can compute it again."""
    return np.random.default_rng(index).standard_normal(parameters, np.float32)


class Member:
    """This process's node, and what it holds of the round before."""

    def __init__(self, index: int, settings: LivenessSettings | None) -> None:
        self.index = index
        self.network = pair.swarmnode_network()
        self.rpc = Rpc(self.network)
        self.bulk = Bulk(self.network)
        self.liveness = Liveness(self.rpc, settings or LivenessSettings())
        self.members: list[str] = []
        self.rounds = 0
        self.mean = self.values = np.zeros(0, np.float32)
        self.sent_before = 0
        self.held = ""
        self.began = 0.0  # the round at hand, by perf_counter
        self.attempts: list[float] = []  # at it, seconds after it began

    async def start(self, addresses: list[str], **_: Any) -> dict[str, Any]:
        for address in addresses:
            await self.network.connect(address)
        rest_what_stays()
        return {"addresses": [self.network.addresses[0]], "peer": self.network.me, "pid": os.getpid()}

    async def prepare(self, parameters: int, codec_name: str, members: list[str], **_: Any) -> dict[str, Any]:
        self.members = members
        self.values = contribution(self.index, parameters)
        self.codec = codec(codec_name)
        exchange = ExchangeSection(codec=codec_name, group_size=GROUP, deadline_ceiling=PATIENCE)
        self.allreduce = AllReduce(self._parts(exchange, parameters))
        return {"prepared": True}

    def _parts(self, exchange: ExchangeSection, parameters: int = 0) -> Context:
        return context_of(
            RUN,
            self.network,
            self.rpc,
            self.liveness,
            exchange,
            bulk=self.bulk,
            runner=in_thread,
            parameters=parameters,
        )

    async def group(self, **_: Any) -> dict[str, Any]:
        self.sent_before = self.network.traffic().bytes_out
        return {"grouped": True}

    async def round(self, **_: Any) -> dict[str, Any]:
        began = time.perf_counter()
        seats = tuple(Seat(peer, 1, 4) for peer in self.members)
        roster = RoundRoster(RUN, self.rounds, 0, PARENT, seats, (), 1.0)
        self.mean = await self.allreduce.reduce(roster, self.values, within=PATIENCE)
        self.allreduce.commit(roster)
        self.rounds += 1
        return {"seconds": time.perf_counter() - began, "members": len(seats)}

    async def begin(self, **_: Any) -> dict[str, Any]:
        """Stand before round 0 of a run of all members."""
        floor, ceiling = DEADLINES
        exchange = ExchangeSection(weight_cap=4.0, deadline_floor=floor, deadline_ceiling=ceiling)
        self.agreement = Agreement(self._parts(exchange))
        self.agreement.acceptor.advance(Position(0, PARENT, tuple(self.members), (), 1.0))
        return {"begun": True}

    async def reduce(self, roster: RoundRoster, within: float, silence: float | None) -> str:
        self.attempts.append(round(time.perf_counter() - self.began, 3))
        self.mean = mean = await self.allreduce.reduce(roster, self.values, within=within, silence=silence)
        self.held = await in_thread(lambda: hashlib.sha256(mean).hexdigest())
        return self.held

    async def obtain(self, state_hash: str, holders: tuple[str, ...]) -> None:
        """A node would fetch the state; here it is only told."""

    async def agree(self, **_: Any) -> dict[str, Any]:
        self.attempts.clear()
        self.began = began = time.perf_counter()
        decision = await self.agreement.agree(
            samples=WORK, train_seconds=1.0, rates=dict(self.allreduce.rates), exchange=self
        )
        seconds = time.perf_counter() - began
        self.allreduce.commit(decision.roster)
        self.agreement.acceptor.advance(
            Position(decision.roster.round + 1, decision.state_hash, decision.roster.peers, (), 1.0)
        )
        seated = [self.members.index(peer) for peer in decision.roster.peers]
        computed = decision.state_hash == self.held
        return {
            "seconds": seconds,
            "attempts": list(self.attempts),
            "seats": seated,
            "hash": decision.state_hash,
            "computed": computed,
        }

    async def check(self, seats: list[int], **_: Any) -> dict[str, Any]:
        """How far the mean is from that of the seats' values, which this process computes again."""
        exact = weighted_sum([contribution(i, self.values.size) for i in seats], [WORK] * len(seats))
        return {"error": float(np.abs(self.mean - exact).max()), "exact": self.mean.tobytes() == exact.tobytes()}

    async def hash(self, **_: Any) -> dict[str, Any]:
        sent = self.network.traffic().bytes_out - self.sent_before
        return {"bytes_out": sent, "hash": hashlib.sha256(self.mean).hexdigest()}


async def main() -> None:
    member = Member(int(sys.argv[1]), PATIENT if "--patient" in sys.argv else None)
    async with trio.open_nursery() as nursery:
        for part in (member.network, member.rpc, member.bulk, member.liveness):
            await nursery.start(part.run)
        async for line in trio.wrap_file(sys.stdin):
            command = json.loads(line)
            if command["do"] == "end":
                break
            pair.emit(**await getattr(member, command.pop("do"))(**command))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
