"""The butterfly group: seven known members, two of whom lie inside the all-reduce, on simnet with `btard`.

Beside it the same lie told to the plain butterfly of `diloco`, whose members check nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import trio
from adversaries import butterfly as adversaries
from adversaries.butterfly import ButterflyLie
from harness import Outcome
from simswarm import SimSwarm

from swarmnode.protocols.methods.btard.method import Btard
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.testing.toy import ToyModel

NAMES = ("a", "b", "c", "d", "e", "f", "g")
LIARS = ("f", "g")
ROUNDS = 4
ROUND_WITHIN = 900.0  # virtual seconds
SPREAD_WITHIN = 30.0  # virtual seconds for records to reach the first node
DIMENSION = 7 * 1024 - 1  # a part for each


@dataclass(frozen=True)
class Harm:
    """What liars did to the honest."""

    split: int  # rounds of which honest nodes have different states
    banned: int  # liars whom all honest nodes banned
    last_ban: int | None  # round by which they had
    victims: int  # honest nodes whom any honest node banned
    loss: float  # held-out, of the honest, at the end; inf where it is not finite
    clean: float  # without liars
    proved: bool  # whether the lie leaves a proof

    def __str__(self) -> str:
        when = f" by round {self.last_ban}" if self.last_ban is not None else ""
        banned = f"{self.banned} of {len(LIARS)} banned{when}" if self.proved else "nothing to prove"
        split = f"{self.split} rounds split, " if self.split else ""
        return f"{banned}, {self.victims} honest banned, {split}loss × {self.loss / self.clean:.2f}"

    @property
    def shows(self) -> str:
        """What is shown beside this, which nodes without a defence came to; empty where that is harm."""
        if self.split or self.victims or not self.loss <= 1.25 * self.clean:
            return ""
        return "who is banned" if self.banned < len(LIARS) else "when; another check finds it as well"

    def failures(self) -> tuple[str, ...]:
        broken = []
        if self.split:
            broken.append(f"honest nodes have different states of {self.split} rounds")
        if self.victims:
            broken.append(f"{self.victims} honest nodes were banned")
        if self.proved and self.banned < len(LIARS):
            broken.append(f"{self.banned} of {len(LIARS)} liars were banned")
        if not self.loss <= 1.25 * self.clean:
            broken.append(f"loss {self.loss:.3g} beside {self.clean:.3g} without liars")
        return tuple(broken)


async def _run(
    lie: ButterflyLie | None, method: str, rounds: int, nursery: trio.Nursery
) -> tuple[SimSwarm, dict[str, int]]:
    """A swarm of which the liars lie from the first round on; and in which round each was banned by all."""
    banned: dict[str, int] = {}
    swarm = SimSwarm(
        nursery,
        world=SimWorld(latency=0.02),
        method=method,
        dimension=DIMENSION,
        model=lambda name, peer: ToyModel(dimension=DIMENSION, peer_id=peer, lr=1e-3, batch=16),
        steps=2,
    )
    await swarm.start(NAMES[0], wait_peers=len(NAMES) - 1)
    for name in NAMES[1:]:
        await swarm.start(name, join=NAMES[0])
        node = swarm.nodes[name].method
        if lie is not None and name in LIARS:
            assert isinstance(node, Diloco)
            lie.tell(node) if isinstance(node, Btard) else lie.undefended(node)
    honest = tuple(name for name in NAMES if name not in LIARS or lie is None)
    for number in range(rounds):
        await swarm.until(partial(_is_past, swarm, honest, number), within=ROUND_WITHIN)
        for name in LIARS if lie is not None else ():
            if all(_bars(swarm, other, name) for other in honest):
                banned.setdefault(name, number)
    if lie is not None and lie.proved:
        with trio.move_on_after(SPREAD_WITHIN):
            await swarm.until(lambda: all(_bars(swarm, other, name) for name in LIARS for other in honest))
        for name in LIARS:  # who was not there when it was proved takes the others' word
            if all(_bars(swarm, other, name) for other in honest):
                banned.setdefault(name, rounds)
    return swarm, banned


def _is_past(swarm: SimSwarm, honest: Sequence[str], number: int) -> bool:
    """Whether the round has ended for all of these. One that a lie kept out of it tells later rounds only."""
    told = [swarm.nodes[name].rounds for name in honest]
    return any(number in rounds for rounds in told) and all(max(rounds, default=-1) >= number for rounds in told)


def _bars(swarm: SimSwarm, name: str, other: str) -> bool:
    """Whether one node keeps another out."""
    method = swarm.nodes[name].method
    return isinstance(method, Btard) and swarm.peer(other) in method.bans


def _loss(swarm: SimSwarm, number: int) -> float:
    told = [node.rounds for name, node in swarm.nodes.items() if name not in LIARS and number in node.rounds]
    found: float | None = told[0][number]["loss"]
    return found if found is not None else float("inf")


@cache
def _clean_loss(method: str, rounds: int) -> float:
    swarm, _ = run_with_nursery(_run, None, method, rounds)
    return _loss(swarm, rounds - 1)


def harm(lie: ButterflyLie | None, *, method: str = "btard", rounds: int = ROUNDS) -> Harm:
    """Run one attack to its end."""
    clean = _clean_loss(method, rounds)
    swarm, banned = run_with_nursery(_run, lie, method, rounds)
    honest = [name for name in NAMES if lie is None or name not in LIARS]
    told: dict[int, set[str]] = {}
    for name in honest:
        for number, event in swarm.nodes[name].rounds.items():
            told.setdefault(number, set()).add(event["state_hash"])
    return Harm(
        split=sum(len(hashes) > 1 for hashes in told.values()),
        banned=len(banned),
        last_ban=max(banned.values(), default=None),
        victims=sum(any(_bars(swarm, name, other) for name in honest) for other in honest),
        loss=_loss(swarm, rounds - 1),
        clean=clean,
        proved=lie is not None and lie.proved,
    )


async def outcomes() -> AsyncIterator[Outcome]:
    """Every attack in full."""
    for lie in adversaries.everyone():
        found = await trio.to_thread.run_sync(partial(harm, lie))
        beside, shows = await trio.to_thread.run_sync(undefended, lie)
        yield Outcome("butterfly", lie.name, str(found), beside, found.failures(), shows)


def undefended(lie: ButterflyLie) -> tuple[str, str]:
    """What the lie does to members who check nothing, or all but what finds it; what is shown where that is no harm."""
    if lie.bites:
        plain = harm(lie, method="diloco")
        return f"diloco: loss × {plain.loss / plain.clean:.3g}", ""
    if lie.lacks is None:
        return lie.pointless, "that it costs no more here"
    with lie.lacks.taken_out():
        try:
            found = harm(lie)
            return lie.lacks.beside(found), found.shows
        except* trio.TooSlowError:
            told = lie.lacks.beside(f"a round does not end in {ROUND_WITHIN:.0f} s")
    return told, ""
