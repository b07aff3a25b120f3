"""The validators of a swarm in which nodes come, leave, die and freeze: how often too few judges are left for a round.

    python bench/attrition.py --nodes 64 --validators 16 --rounds 100 --churn 0.2 [--runs 40]

One JSON line. Only the rules of the chain are run, thousands of times faster than `open_sim.py`: who is there cuts,
scores and leads, and says whom it missed; nine tenths of those who are there have work accepted. `churn` is as there:
of what happens in a round two fifths join, half of whom were here before, and a fifth each leaves, dies, and freezes
for two rounds. A round ends empty where less than a quorum of its judges is there, or none of its leaders.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from dataclasses import replace
from statistics import mean

from swarmnode.protocols.chain.rules import advance_empty
from swarmnode.protocols.chain.state import (
    REMEMBERED,
    ChainState,
    Worked,
    genesis,
    judges,
    leaders,
    majority,
    next_silent,
    places_of,
    quorum,
    reseated,
    rules_of,
)
from swarmnode.protocols.chain.statements import AvailabilityVote, Said
from swarmnode.training.sections import TrustSection

RULES = rules_of(TrustSection())
ACCEPTED = 0.9  # of those who are there, whose work counts in a round
FROZEN = 2  # rounds


class Swarm:
    """Who is there, and the chain that follows."""

    def __init__(self, nodes: int, validators: int, churn: float, seed: int) -> None:
        self._size, self._churn, self._random = nodes, churn, random.Random(seed)
        self._names = [f"n{number}" for number in range(nodes)]
        self._named, self._gone = nodes, list[str]()
        self._frozen, self._joining = dict[str, int](), set[str]()
        self._cut, self._missed = set[str](), set[str]()  # judges of the last round who cut, and who did not
        self.chain: ChainState = genesis("ab" * 32, tuple(self._names[:validators]), window=60_000)

    @property
    def there(self) -> set[str]:
        """Who runs and is not frozen."""
        return set(self._names).difference(self._frozen)

    def round(self) -> bool:
        """One round, and what happens in it; whether it ended with a roster."""
        chain, there = self.chain, self.there
        judging = set(judges(chain))
        held = len(judging & there) >= quorum(chain) and not there.isdisjoint(leaders(chain))
        self.chain = self._after_roster(judging & there, there) if held else advance_empty(chain)
        self._cut, self._missed = judging & there, judging - there
        self._happen()
        return held

    def _after_roster(self, cutting: set[str], there: set[str]) -> ChainState:
        chain, missed = self.chain, places_of(self.chain, self._missed)
        votes = [AvailabilityVote(chain.round, chain.tip, (), b"", 0, missed) for _ in cutting]
        cuts = [Said(judge, b"", vote) for judge, vote in zip(sorted(cutting), votes, strict=True)]
        working = sorted(there - self._joining)
        worked = tuple(Worked(name, 1000) for name in working if self._random.random() < ACCEPTED)
        after = replace(
            chain,
            round=chain.round + 1,
            made=chain.made + 1,
            seed=hashlib.sha256(chain.seed).digest(),
            history=(*chain.history, worked)[-REMEMBERED:],
            empties=0 if len(cutting) >= majority(chain) else chain.empties,
            silent=next_silent(chain, cuts),
        )
        return reseated(after, RULES)

    def _happen(self) -> None:
        self._frozen = {name: left - 1 for name, left in self._frozen.items() if left > 1}
        for _ in range(self._count(0.2)):
            self._frozen[self._one()] = FROZEN
        for _ in range(self._count(0.4)):
            self._names.remove(name := self._one())
            self._gone.append(name)
        self._joining = {self._newcomer() for _ in range(self._count(0.4))}
        self._names.extend(sorted(self._joining))

    def _count(self, share: float) -> int:
        return int(share * self._churn * self._size + self._random.random())

    def _one(self) -> str:
        return self._random.choice(sorted(self.there))

    def _newcomer(self) -> str:
        if self._gone and self._random.random() < 0.5:
            return self._gone.pop(self._random.randrange(len(self._gone)))
        self._named += 1
        return f"n{self._named}"


def attrition(nodes: int, validators: int, churn: float, *, rounds: int, runs: int) -> dict[str, object]:
    """Over so many runs: empty rounds, and how many validators are there."""
    empty, least, late = list[int](), list[int](), list[float]()
    for seed in range(runs):
        swarm = Swarm(nodes, validators, churn, seed)
        held, there = [], []
        for _ in range(rounds):
            held.append(swarm.round())
            there.append(len(swarm.there.intersection(swarm.chain.validators)))
        empty.append(held.count(False))
        least.append(min(there))
        late.append(mean(there[rounds // 2 :]))
    return {
        "empty_rounds_mean": round(mean(empty), 1),
        "empty_rounds_most": max(empty),
        "runs_without": empty.count(0),
        "validators_there_in_the_second_half": round(mean(late), 1),
        "validators_there_at_least": round(mean(least), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the validator set of a swarm that many leave")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--validators", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--churn", type=float, default=0.2)
    parser.add_argument("--runs", type=int, default=40)
    options = parser.parse_args()
    found = attrition(options.nodes, options.validators, options.churn, rounds=options.rounds, runs=options.runs)
    print(json.dumps({"bench": "attrition", **vars(options), **found}))


if __name__ == "__main__":
    main()
