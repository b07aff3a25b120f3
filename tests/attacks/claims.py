"""A line of the gradient group: the weight that a member of a known swarm gets for samples that it only claims.

Five members on simnet; measured is the liar's share of the weights in the roster that honest members exchanged by.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio
from adversaries.claims import LIAR, ClaimedSamples
from harness import Outcome
from simswarm import SimSwarm
from undefended import UNCAPPED

from swarmnode.testing.simnet import SimWorld, run_with_nursery

NAMES = ("a", "b", "c", "d", "e")
ROUNDS = 3


@dataclass(frozen=True)
class Damage:
    """What a claim earned."""

    share: float  # of the weights, the liar's
    cap: float  # what it may be at the most

    def __str__(self) -> str:
        return f"{self.share:.1%} of the weights, where one of {len(NAMES)} may have {self.cap:.1%}"

    def failures(self) -> tuple[str, ...]:
        return (f"it got {self.share:.1%} of the weights",) if self.share > self.cap + 1e-9 else ()


async def _run(adversary: ClaimedSamples, nursery: trio.Nursery) -> Damage:
    swarm = SimSwarm(nursery, world=SimWorld(latency=0.02))
    await swarm.begin(NAMES)
    adversary.tell(swarm)
    await swarm.round_done(ROUNDS, *NAMES)
    seats = swarm.nodes[NAMES[0]].allreduce._offered[-1].seats
    weights = {seat.peer: seat.weight for seat in seats}
    cap = swarm.spec.exchange.weight_cap
    return Damage(weights[swarm.peer(LIAR)] / sum(weights.values()), cap / (cap + len(NAMES) - 1))


def damage(adversary: ClaimedSamples) -> Damage:
    found: Damage = run_with_nursery(_run, adversary)
    return found


def outcome() -> Outcome:
    """The claim beside a swarm that believes it."""
    adversary = ClaimedSamples()
    found = damage(adversary)
    with UNCAPPED.taken_out():
        beside = damage(adversary)
    return Outcome(
        "first strikes", adversary.name, str(found), UNCAPPED.beside(f"{beside.share:.3%}"), found.failures()
    )
