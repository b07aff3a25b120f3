"""`swarmnode local --attack NAME:COUNT`: which attack, the run that is made for it, and what came of it.

The last COUNT nodes lie; this command alone knows which. What became of everybody's contributions is what the first
honest node to end a round says in its event; scores are the median of what all honest nodes say when asked. In a run by
rollouts, where nothing is judged by all, accepted and refused are the groups that honest nodes took and turned down.
What a liar does is in `swarmnode.testing.adversary`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from swarmnode.cli.local.swarm import Attack, NodeProcess
from swarmnode.cli.terminal import UsageMistake
from swarmnode.node.identity import load_or_create, read_passphrase
from swarmnode.node.storage.datadir import DataDir
from swarmnode.training.runspec import RunSpec

EXCHANGING = ("open", "diloco", "btard")  # methods in which pseudo-gradients are exchanged


@dataclass(frozen=True)
class Lie:
    told: str  # what it does, for a person
    methods: tuple[str, ...]  # exchange methods in whose runs it has a meaning


LIES = {
    "sign-flip": Lie("offers the opposite of what it learned", EXCHANGING),
    "sign-flip-1000": Lie("offers a thousand times the opposite of what it learned", EXCHANGING),
    "label-flip": Lie("learns to predict the byte 255 - b where b follows", EXCHANGING),
    "noise": Lie("offers noise as large as what it learned", EXCHANGING),
    "free-ride": Lie("offers what the swarm did in the round before, as its own work", EXCHANGING),
    "slow-drift": Lie("adds a quarter of a step in one direction, in every round the same", EXCHANGING),
    "half-steps": Lie("computes half of its steps, and says that it did all", EXCHANGING),
    "other-data": Lie("trains on other windows of text than those that belong to its name", EXCHANGING),
    "copied": Lie("offers what another did in the round before, with a little noise", ("open",)),
    "stale": Lie("offers its first contribution again and again", ("open",)),
    "nan": Lie("offers bytes that decode to NaN", ("open",)),
    "copy": Lie("offers what another has just revealed", ("open",)),
    "withhold": Lie("commits to its work and never reveals it", ("open",)),
    "slander": Lie("offers the opposite; as a judge it praises that and calls others' work missing", ("open",)),
    "inserted-text": Lie("shares answers with something smuggled in, half of them gibberish", ("sapo",)),
    "forged-reward": Lie("shares wrong answers and says that they are right", ("sapo",)),
    "overlong": Lie("shares answers that are far too long, half of them gibberish", ("sapo",)),
}
# Told by the trainer of a liar: the task of testing/adversary/tasks.py that it learns.
OF_TRAINERS = {"label-flip": "MislabelledByteLM", "half-steps": "HalfByteLM", "other-data": "OthersByteLM"}
ACCEPTED = "accepted"
LONGEST_NAME = 40  # characters of a run's own name that the throw-away run's begins with


def listing() -> str:
    wide = max(map(len, LIES))
    return "\n".join(f"{name:<{wide}}  {lie.told} ({', '.join(lie.methods)})" for name, lie in LIES.items())


def parse_attack(text: str, nodes: int) -> Attack:
    """`NAME` or `NAME:COUNT`. Raises UsageMistake."""
    name, colon, count = text.partition(":")
    if name not in LIES:
        raise UsageMistake(f"--attack {name}: no such attack; there are, each as NAME or NAME:COUNT,\n{listing()}")
    if colon and not re.fullmatch(r"[0-9]{1,3}", count):
        raise UsageMistake(f"--attack {text}: {count!r} is no number of nodes; write for example {name}:2")
    liars = int(count) if colon else 1
    if not 1 <= liars < nodes:
        raise UsageMistake(f"--attack {text}: of {nodes} nodes 1 to {nodes - 1} can lie, as node 0 begins the run")
    return Attack(name, liars)


def make_identities(folder: Path, nodes: int) -> tuple[str, ...]:
    """Give each node of the swarm to come its key; their peer ids. Raises DataDirError or IdentityError."""
    peers, passphrase = [], read_passphrase(os.environ.get("SWARMNODE_PASSPHRASE_FILE", ""), os.environ)
    for number in range(nodes):
        with DataDir(folder / f"node-{number}") as home:
            peers.append(load_or_create(home.identity, passphrase).peer_id)
    return tuple(peers)


def under_attack(spec: RunSpec, attack: Attack) -> RunSpec:
    """The run with a name that is thrown away. Raises UsageMistake where the lie has no meaning in such a run."""
    methods = LIES[attack.lie].methods
    if spec.exchange.method not in methods:
        raise UsageMistake(
            f"--attack {attack.lie}: the run's exchange method is {spec.exchange.method}, and this is an attack on "
            f"{' or '.join(methods)}; name another run file or another attack (--attack help)"
        )
    if attack.lie in OF_TRAINERS and spec.task.name != "byte-lm":
        raise UsageMistake(f"--attack {attack.lie}: there is a trainer that lies so for byte-lm, not {spec.task.name}")
    return spec.updated(run={"name": f"{spec.run.name[:LONGEST_NAME]}-attacked-{secrets.token_hex(4)}"})


class Onlooker:
    """Sees what honest nodes tell of everybody, and keeps the tally of each node."""

    def __init__(self, attack: Attack, nodes: Sequence[NodeProcess]) -> None:
        self.attack = attack
        self._nodes = nodes
        self._honest = [node for node in nodes if not node.lie]
        self._liars = [node for node in nodes if node.lie]
        self._rounds: set[int] = set()
        self._last_lie: int | None = None  # the last round in which a liar's contribution counted

    def saw(self, node: NodeProcess, event: Mapping[str, Any]) -> None:
        """Take in a `round` event. The first honest node's of a round counts; asks for scores then."""
        number = event.get("round")
        if node.lie or not isinstance(number, int) or number in self._rounds:
            return
        self._rounds.add(number)
        if "learned" in event:
            self._ask_pools()
        else:
            self._count(number, event)
        self._ask_scores()

    def _count(self, number: int, event: Mapping[str, Any]) -> None:
        verdicts, counted = event.get("verdicts") or {}, set(event.get("counted") or ())
        for node in self._nodes:
            verdict = str(verdicts.get(node.peer_id, ACCEPTED if node.peer_id in counted else ""))
            node.tally.last = verdict or "nothing"
            if verdict == ACCEPTED:
                node.tally.accepted += 1
                self._last_lie = number if node.lie else self._last_lie
            elif verdict:
                node.tally.refused[verdict] += 1

    def _ask_scores(self) -> None:
        told = [answer for node in self._honest if (answer := node.ask("scores"))]
        for node in self._nodes:
            lines = [line for answer in told for line in answer["peers"] if line["peer_id"] == node.peer_id]
            others = [line for line in lines if not line["me"]]
            if others:
                node.tally.score = median(line["score"] for line in others)
                node.tally.weight = median(line["weight"] for line in others)

    def _ask_pools(self) -> None:
        """Ask the honest nodes whose groups they took and turned down."""
        pools = [answer for node in self._honest if (answer := node.ask("rollouts_pool"))]
        for node in self._nodes:
            of_it = [one for pool in pools for one in pool["authors"] if one["author"] == node.peer_id]
            refused = sum((Counter(one["refused"]) for one in of_it), Counter())
            node.tally.accepted, node.tally.refused = sum(one["came"] for one in of_it), refused
            node.tally.last = max(refused, key=lambda reason: refused[reason], default=ACCEPTED)

    def summary(self) -> dict[str, Any]:
        """What came of the attack, for `--json`."""
        return {
            "attack": self.attack.lie,
            "liars": self.attack.liars,
            "lies_accepted": sum(node.tally.accepted for node in self._liars),
            "lies_refused": sum(node.tally.refused.total() for node in self._liars),
            "honest_accepted": sum(node.tally.accepted for node in self._honest),
            "honest_refused": sum(node.tally.refused.total() for node in self._honest),
            "last_round_with_a_lie": self._last_lie,
            "nodes": [
                {
                    "node": node.label,
                    "peer_id": node.peer_id,
                    "lie": node.lie or None,
                    "accepted": node.tally.accepted,
                    "refused": dict(node.tally.refused),
                    "score": node.tally.score,
                    "weight": node.tally.weight,
                }
                for node in self._nodes
            ],
        }

    def words(self, undefended: bool) -> list[str]:
        """The same, for people."""
        told = self.summary()
        what = "groups" if "sapo" in LIES[self.attack.lie].methods else "contributions"
        lines = [
            f"{self.attack.liars} of {len(self._nodes)} nodes lied ({self.attack.lie}: {LIES[self.attack.lie].told})",
            f"of the liars' {what} {told['lies_accepted']} were accepted and {told['lies_refused']} refused; "
            f"of honest nodes' {told['honest_accepted']} and {told['honest_refused']}",
        ]
        for node in self._liars:
            why = ", ".join(f"{count} × {reason}" for reason, count in node.tally.refused.most_common(3))
            score = "no score" if node.tally.score is None else f"score {node.tally.score:.2f}"
            lines.append(f"node {node.label}: {score}" + (f"; refused: {why}" if why else ""))
        if undefended:
            lines.append("this run believes its members: nothing in it refuses a lie (run.trust = open does)")
        return lines
