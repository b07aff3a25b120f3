"""Attacks on the round itself: peers that stop at any moment, judges and committers that lie, a swarm cut in two.

Each acts on running nodes that are all validators (`openswarm.py`). Who misbehaves is chosen by the round: its
leader, where that is who the attack needs. What leaders do is in `leaders.py`, what one key in several lives in
`lives.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trio
from adversaries import leaders, lives
from openswarm import Scene
from roundadversary import AFTER, RoundAdversary
from undefended import FIRST_SEEN, NO_DEADLINES, SEED_OF_COMMITS, seed_of

from swarmnode.protocols.chain.state import leaders as drawn_leaders
from swarmnode.protocols.chain.statements import (
    SALT,
    AvailabilityVote,
    Commit,
    ForkChoiceVote,
    Reveal,
    Roster,
    Scores,
    Seal,
    binding_of,
)

PHASES = (Commit, AvailabilityVote, Reveal, Seal, Scores, Roster, ForkChoiceVote)
MOST_LED = 0.6  # of some eleven rounds, that one of five validators may lead; it leads more by chance once in 500 times


class Stopped(RoundAdversary):
    """A node is killed or frozen just before it says a thing: the leader of the round, or another."""

    lacks = NO_DEADLINES

    def __init__(self, phase: type, how: str, leader: bool) -> None:
        self._phase, self.how, self._leader = phase, how, leader
        self.name = f"{how} of {'the leader' if leader else 'another'} at its {phase.__name__.lower()}"  # type: ignore[misc]

    async def attack(self, target: Scene) -> None:
        fallen = trio.Event()
        rounds = target.round + 2
        self.first = rounds

        def watch(name: str) -> None:
            async def say(usual: Any, statement: Any) -> Any:
                due = isinstance(statement, self._phase) and target.method(name).store.block.chain.round == rounds
                if due and not fallen.is_set() and (target.leader(name) == name) == self._leader:
                    fallen.set()
                    target.bad.add(name)
                    if self.how == "kill":
                        target.swarm.kill(name)
                    else:
                        target.swarm.world.freeze(target.peer(name))
                return await usual(statement)

            target.change_words(name, say)

        for name in target.names:
            watch(name)
        with trio.fail_after(300):
            await fallen.wait()
        await target.done(AFTER)
        if self.how == "freeze":
            await trio.sleep(1.0)

    async def broken(self, target: Scene) -> list[str]:
        idle = [name for name in target.honest if "accepted" not in target.verdicts(name, self.first)]
        return [f"the work of {', '.join(idle)} never counted"] if idle else []


class WithheldCuts(RoundAdversary):
    name = "two of five judges, or seven of sixteen, withhold their cuts"
    lacks = NO_DEADLINES

    async def attack(self, target: Scene) -> None:
        self.first = target.round + 1
        for name in target.minority:
            target.bad.add(name)

            async def say(usual: Any, statement: Any) -> Any:
                return None if isinstance(statement, AvailabilityVote) else await usual(statement)

            target.change_words(name, say)
        await target.done(self.times(6, AFTER))


class LastCommitter(RoundAdversary):
    """Commits when all others have, in every round, and so that it would lead the next, were leaders drawn from that.

    Commits hide what they bind, and seeds do not depend on them: as last one it chooses nothing.
    """

    name = "the last committer chooses among what it could commit"
    lacks = SEED_OF_COMMITS
    liar = "c"
    tries = 32

    async def attack(self, target: Scene) -> None:
        self.first = target.round + 1
        target.bad.add(self.liar)
        method, me = target.method(self.liar), target.peer(self.liar)
        salts: dict[bytes, bytes] = {}

        async def say(usual: Any, statement: Any) -> Any:
            chain, offer = method.store.block.chain, method.local.offer
            if isinstance(statement, Commit) and offer is not None:
                with trio.move_on_after(4.0):
                    await method.store.until(lambda: len(method.store.log.commits) >= len(target.names) - 1)
                others = [said.what.binding for said in method.store.log.commits.values()]
                for number in range(self.tries):
                    salt = number.to_bytes(SALT, "big")
                    bound = binding_of(chain.run_id, chain.round, me, chain.tip, salt, offer.root, method.local.trace)
                    seed = seed_of(chain.seed, sorted([*others, bound]))
                    if drawn_leaders(replace(chain, seed=seed))[0] == me:
                        break
                salts[chain.tip] = salt
                statement = replace(statement, binding=bound)
            if isinstance(statement, Reveal):
                statement = replace(statement, salt=salts.get(chain.tip, statement.salt))
            return await usual(statement)

        target.change_words(self.liar, say)
        await target.done(self.times(12, AFTER))

    def _led(self, target: Scene) -> tuple[int, int]:
        """Rounds that the liar leads, of so many."""
        path = [target.method(target.honest[0]).store.tree[block.parent] for block in target.blocks(self.first + 1)]
        return sum(drawn_leaders(block.chain)[0] == target.peer(self.liar) for block in path), len(path)

    async def broken(self, target: Scene) -> list[str]:
        led, rounds = self._led(target)
        return [f"it leads {led} of {rounds} rounds"] if led > max(MOST_LED * rounds, 1) else []

    async def achieved(self, target: Scene) -> str:
        led, rounds = self._led(target)
        return f"it leads {led} of {rounds} rounds"


class CutInTwo(RoundAdversary):
    name = "two of five, or seven of sixteen, are cut off for five rounds"
    slower = 4.0  # a majority of the judges goes on; each round waits for who is not there until that is known
    lacks = FIRST_SEEN
    _healed = _agreed = -1

    async def attack(self, target: Scene) -> None:
        self.first, self.healing, self._healed, self._agreed = target.round + 1, 0, -1, -1
        sides = (target.names[: -len(target.minority)], target.minority)
        target.swarm.world.partition([[target.peer(name) for name in side] for side in sides])
        before = target.round
        await target.swarm.round_done(before + 5, *sides[0], within=400)
        target.swarm.world.heal()
        self._healed = max(max(target.swarm.nodes[name].rounds) for name in target.names)
        await target.swarm.until(lambda: target.swarm.all_agree(after=self._healed), within=target.patience)
        self._agreed = target.round
        self.healing = self._agreed - self.first
        await target.done(2)

    async def broken(self, target: Scene) -> list[str]:
        late = self._agreed - self._healed
        idle = [name for name in target.minority if "accepted" not in target.verdicts(name, self._healed)]
        broken = [f"one chain {late} rounds after the cut was healed"] if late > 3 else []
        return broken + ([f"the work of {', '.join(idle)} never counted"] if idle else [])

    async def achieved(self, target: Scene) -> str:
        if self._agreed < 0:
            return f"no common chain {target.round - self._healed} rounds after it was healed"
        return f"one chain {self._agreed - self._healed} rounds after it was healed"


def stops(short: bool = False) -> list[RoundAdversary]:
    """Kill and freeze at every statement; in short, four of them."""
    everything: list[RoundAdversary] = [
        Stopped(phase, how, leader)
        for phase in PHASES
        for how in ("kill", "freeze")
        for leader in (True, False)
        if leader or phase is not Roster
    ]
    return everything[::9] if short else everything


def everyone() -> list[RoundAdversary]:
    """A new adversary of every other kind."""
    return [*leaders.everyone(), WithheldCuts(), LastCommitter(), CutInTwo(), *lives.everyone()]
