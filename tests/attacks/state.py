"""The state group: each adversary holds two of 16 simulated nodes that keep one replicated state.

Measured, here and on naive nodes that believe what they are sent: elements held that the law forbids, what the
attackers' records take at most, in how many different states the honest nodes are afterwards, and how many of those
attacked shunned the attackers: refused their calls, told them no news and asked them for no repair.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio
from adversaries import state as adversaries
from adversaries.state import StateAdversary
from harness import Outcome
from statenodes import now
from stateswarm import state_swarm

from swarmnode.crdt.hlc import is_ahead
from swarmnode.crdt.kinds import MAX_PER_AUTHOR
from swarmnode.protocols.state.sync import REPAIR_EVERY
from swarmnode.testing.simnet import run_simulation

ATTACKERS = 2
SETTLE = 2 * REPAIR_EVERY  # seconds after the attack


@dataclass(frozen=True)
class Damage:
    """What an attack did to the honest nodes."""

    false: int  # elements held that are forged, from the future, or of authors who are not admitted
    size: int  # bytes that records of attackers take, at the node where they take most
    quota: int  # bytes that they may take
    states: int  # different states, when all has settled
    missing: int  # records of honest nodes that an honest node lacks
    repairs: int  # the fewest that an honest node ended
    shunning: int  # attacked nodes that shunned all attackers, for a while at least
    victims: int  # attacked nodes

    def __str__(self) -> str:
        held = f"{self.false} false, {_human(self.size)}, {_states(self.states)}"
        return f"{held}, shunned by {self.shunning} of {self.victims}"

    def failures(self) -> tuple[str, ...]:
        broken = []
        if self.false:
            broken.append(f"{self.false} elements held that the law forbids")
        if self.size > self.quota:
            broken.append(f"{_human(self.size)} held, at most {_human(self.quota)} are allowed")
        if self.states != 1:
            broken.append(_states(self.states))
        if self.missing:
            broken.append(f"{self.missing} honest records are missing")
        if not self.repairs:
            broken.append("a node ended no repair")
        if self.shunning < self.victims:
            broken.append(f"shunned by {self.shunning} of {self.victims}")
        return tuple(broken)


def _human(size: int) -> str:
    return f"{size / 1024:.0f} KiB"


def _states(count: int) -> str:
    return "one state" if count == 1 else f"{count} states"


async def damage(adversary: StateAdversary) -> Damage:
    """Run one attack to its end, let the honest nodes settle, then look at each."""
    async with state_swarm(ATTACKERS) as swarm:
        before = [node.sync.repairs for node in swarm.honest]
        with trio.fail_after(3600):
            await adversary.attack(swarm)
        await trio.sleep(SETTLE)
        victims, shunning = set(adversary.victims(swarm)), swarm.shunning()
        false = size = missing = 0
        attackers = {attacker.me for attacker in swarm.attackers}
        for node in swarm.honest:
            elements = await node.state.select(limit=1 << 20)
            false += sum(
                not each.is_genuine(node.network.verify)
                or is_ahead(each.hlc, now())
                or each.author not in {peer.network.me for peer in swarm.swarm.peers}
                for each in elements
            )
            size = max(size, sum(len(each.sealed) for each in elements if each.author in attackers))
            missing += sum(not node.state.has(record.rank) for record in swarm.expected)
        return Damage(
            false=false,
            size=size,
            quota=len(attackers) * MAX_PER_AUTHOR,
            states=len({node.hash() for node in swarm.honest}),
            missing=missing,
            repairs=min(node.sync.repairs - old for node, old in zip(swarm.honest, before, strict=True)),
            shunning=len(victims & shunning),
            victims=len(victims),
        )


async def naive_damage(adversary: StateAdversary) -> str:
    """What the same attack does to naive nodes, in words."""
    async with state_swarm(ATTACKERS, undefended=True) as swarm:
        await adversary.attack(swarm)
        await trio.sleep(SETTLE)
        states = {hashlib.sha256(repr(sorted(node.held.items())).encode()).digest() for node in swarm.naive}
        records = max(len(node.held) for node in swarm.naive)
        return f"{records} records believed, {_human(max(node.size for node in swarm.naive))}, {_states(len(states))}"


def undefended(adversary: StateAdversary) -> str:
    """The naive nodes' figures, or why there are none."""
    if isinstance(adversary, adversaries.LyingReconciler):
        return "has no repair to lie in"
    return run_simulation(naive_damage, adversary)


async def outcomes() -> AsyncIterator[Outcome]:
    """All attacks of the group in full, each in a world of its own."""
    logging.getLogger("swarmnode").setLevel(logging.ERROR)  # 14 nodes tell of every offender
    for adversary in adversaries.everyone():
        found, naive = await trio.to_thread.run_sync(_both, adversary)
        shows = "" if "believed" in naive else "that repairs with liars end"
        yield Outcome("state", adversary.name, str(found), naive, found.failures(), shows)


def _both(adversary: StateAdversary) -> tuple[Damage, str]:
    return run_simulation(damage, adversary), undefended(adversary)
