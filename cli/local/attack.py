"""`swarmnode local --attack NAME:COUNT`: which attack, the run that is made for it, and what came of it.

The last COUNT nodes lie; this command alone knows which. What became of everybody's contributions is what the first
honest node to end a round says in its event; scores are the median of what all honest nodes say when asked. In a run by
rollouts, where nothing is judged by all, accepted and refused are the groups that honest nodes took and turned down.
What a liar does is in `swarmnode.testing.adversary`.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from swarmnode.cli.terminal import UsageMistake
from swarmnode.node.control.client import ControlClient, ControlError, NotRunning
from swarmnode.node.identity import load_or_create
from swarmnode.node.storage.datadir import DataDir

if TYPE_CHECKING:
    from swarmnode.cli.local.swarm import NodeProcess
    from swarmnode.training.runspec import RunSpec

THROWAWAY = r"[a-z0-9._-]*-attacked-[0-9a-f]{8}"  # names of runs that are made for one local swarm
EXCHANGING = ("open", "diloco", "btard")  # methods in which pseudo-gradients are exchanged


@dataclass(frozen=True)
class Lie:
    """One lie."""

    name: str
    told: str  # what it does, for a person
    methods: tuple[str, ...]  # exchange methods in whose runs it has a meaning


LIES = {
    lie.name: lie
    for lie in (
        Lie("sign-flip", "offers the opposite of what it learned", EXCHANGING),
        Lie("sign-flip-1000", "the same, a thousand times as large", EXCHANGING),
        Lie("label-flip", "learns to predict the byte 255 - b where b follows", EXCHANGING),
        Lie("noise", "offers noise as large as what it learned", EXCHANGING),
        Lie("free-ride", "offers what the swarm did in the round before, as its own work", EXCHANGING),
        Lie("slow-drift", "adds a quarter of a step in one direction, in every round the same", EXCHANGING),
        Lie("nan", "offers bytes that decode to NaN", ("open",)),
        Lie("copy", "offers what another has just revealed", ("open",)),
        Lie("withhold", "commits to its work and never reveals it", ("open",)),
        Lie("slander", "offers the opposite; as a judge it praises that and calls others' work missing", ("open",)),
        Lie("inserted-text", "shares answers with something smuggled in, half of them gibberish", ("sapo",)),
        Lie("forged-reward", "shares wrong answers and says that they are right", ("sapo",)),
        Lie("overlong", "shares answers that are far too long, half of them gibberish", ("sapo",)),
    )
}
ACCEPTED = "accepted"
ASK_WITHIN = 2.0  # s for a node to tell its scores; a frozen one tells none
LONGEST_NAME = 40  # characters of a run's own name that the throw-away run's begins with


class AttackError(UsageMistake):
    """The attack cannot be shown. The message says what can."""


@dataclass(frozen=True)
class Attack:
    """So many of the nodes, the last ones, tell this lie."""

    lie: str
    liars: int


def listing() -> str:
    """Every lie with what it does, a line each."""
    wide = max(map(len, LIES))
    return "\n".join(f"{name:<{wide}}  {lie.told} ({', '.join(lie.methods)})" for name, lie in LIES.items())


def parse_attack(text: str, nodes: int) -> Attack:
    """`NAME` or `NAME:COUNT`. Raises AttackError."""
    name, colon, count = text.partition(":")
    if name not in LIES:
        raise AttackError(f"--attack {name}: no such attack; there are, each as NAME or NAME:COUNT,\n{listing()}")
    if colon and not re.fullmatch(r"[0-9]{1,3}", count):
        raise AttackError(f"--attack {text}: {count!r} is no number of nodes; write for example {name}:2")
    liars = int(count) if colon else 1
    if not 1 <= liars < nodes:
        raise AttackError(f"--attack {text}: of {nodes} nodes 1 to {nodes - 1} can lie, as node 0 begins the run")
    return Attack(name, liars)


def make_identities(folder: Path, nodes: int) -> list[str]:
    """Give each node of the swarm to come its key; their peer ids. Raises DataDirError or IdentityError."""
    peers = []
    for number in range(nodes):
        home = DataDir(folder / f"node-{number}")
        home.open()
        try:
            peers.append(load_or_create(home.identity, None).peer_id)
        finally:
            home.close()
    return peers


def under_attack(spec: RunSpec, attack: Attack, peers: Sequence[str]) -> RunSpec:
    """The run with a name that is thrown away and, where it has validators and lists none, all nodes as validators.

    Raises AttackError where the lie has no meaning in such a run.
    """
    methods = LIES[attack.lie].methods
    if spec.exchange.method not in methods:
        raise AttackError(
            f"--attack {attack.lie}: the run's exchange method is {spec.exchange.method}, and this is an attack on "
            f"{' or '.join(methods)}; name another run file or another attack (--attack help)"
        )
    if attack.lie == "label-flip" and spec.task.name != "byte-lm":
        raise AttackError(f"--attack label-flip: the task {spec.task.name} has no labels that this command knows")
    name = f"{spec.run.name[:LONGEST_NAME]}-attacked-{secrets.token_hex(4)}"
    spec = spec.updated(run={"name": name})
    if spec.exchange.method == "open" and not spec.trust.validators:
        spec = spec.updated(trust={"validators": tuple(peers)})
    return spec


@dataclass
class WorkTally:
    """What became of one node's work so far."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    last: str = ""  # what the last round said of it
    score: float | None = None  # median of what honest nodes say
    weight: float | None = None


class Onlooker:
    """Sees what honest nodes tell of everybody, and keeps the tally of each node."""

    def __init__(self, attack: Attack, nodes: Sequence[NodeProcess]) -> None:
        self.attack = attack
        self._nodes = nodes
        self.tallies = [WorkTally() for _ in nodes]
        self._rounds: set[int] = set()
        self.by_rollouts = False
        self.lies: list[tuple[int, int]] = []  # by round, how many of the liars' contributions counted

    @property
    def honest(self) -> list[NodeProcess]:
        return [node for node in self._nodes if not node.lie]

    def saw(self, node: NodeProcess, event: Mapping[str, Any]) -> None:
        """Take in a `round` event. The first honest node's of a round counts; asks for scores then."""
        number = event.get("round")
        if node.lie or not isinstance(number, int) or number in self._rounds:
            return
        self._rounds.add(number)
        self.by_rollouts = "learned" in event
        if not self.by_rollouts:
            self._tally(number, event)
        self.ask()

    def _tally(self, number: int, event: Mapping[str, Any]) -> None:
        verdicts, counted = event.get("verdicts") or {}, set(event.get("counted") or ())
        lies = 0
        for node, tally in zip(self._nodes, self.tallies, strict=True):
            peer = _peer_of(node)
            verdict = str(verdicts.get(peer, ACCEPTED if peer in counted else ""))
            tally.last = verdict or "nothing"
            if verdict == ACCEPTED:
                tally.accepted += 1
                lies += bool(node.lie)
            elif verdict:
                tally.refused[verdict] += 1
        self.lies.append((number, lies))

    def ask(self) -> None:
        """Ask the honest nodes how they score everybody."""
        said = [answer for node in self.honest if node.alive and not node.frozen and (answer := _ask(node, "scores"))]
        for node, tally in zip(self._nodes, self.tallies, strict=True):
            lines = [line for answer in said for line in answer["peers"] if line["peer_id"] == _peer_of(node)]
            others = [line for line in lines if not line["me"]]
            if others:
                tally.score = median(line["score"] for line in others)
                tally.weight = median(line["weight"] for line in others)
        if self.by_rollouts:
            self._ask_pools()

    def _ask_pools(self) -> None:
        pools = [answer for node in self.honest if node.alive and (answer := _ask(node, "rollouts_pool"))]
        for node, tally in zip(self._nodes, self.tallies, strict=True):
            of_it = [one for pool in pools for one in pool["authors"] if one["author"] == _peer_of(node)]
            tally.accepted = sum(one["came"] for one in of_it)
            tally.refused = sum((Counter(one["refused"]) for one in of_it), Counter())
            tally.last = max(tally.refused, key=lambda reason: tally.refused[reason], default=ACCEPTED)

    def summary(self) -> dict[str, Any]:
        """What came of the attack, for `--json`."""
        return {
            "attack": self.attack.lie,
            "liars": self.attack.liars,
            "lies_accepted": sum(t.accepted for n, t in self._pairs() if n.lie),
            "lies_refused": sum(t.refused.total() for n, t in self._pairs() if n.lie),
            "honest_accepted": sum(t.accepted for n, t in self._pairs() if not n.lie),
            "honest_refused": sum(t.refused.total() for n, t in self._pairs() if not n.lie),
            "last_round_with_a_lie": max((number for number, lies in self.lies if lies), default=None),
            "nodes": [
                {
                    "node": node.label,
                    "peer_id": _peer_of(node),
                    "lie": node.lie or None,
                    "accepted": tally.accepted,
                    "refused": dict(tally.refused),
                    "score": tally.score,
                    "weight": tally.weight,
                }
                for node, tally in self._pairs()
            ],
        }

    def words(self, undefended: bool) -> list[str]:
        """The same, for people."""
        told = self.summary()
        what = "groups" if self.by_rollouts else "contributions"
        lines = [
            f"{self.attack.liars} of {len(self._nodes)} nodes lied ({self.attack.lie}: {LIES[self.attack.lie].told})",
            f"of the liars' {what} {told['lies_accepted']} were accepted and {told['lies_refused']} refused; "
            f"of honest nodes' {told['honest_accepted']} and {told['honest_refused']}",
        ]
        for node, tally in self._pairs():
            if node.lie:
                why = ", ".join(f"{count} × {reason}" for reason, count in tally.refused.most_common(3))
                score = "no score" if tally.score is None else f"score {tally.score:.2f}"
                lines.append(f"node {node.label}: {score}" + (f"; refused: {why}" if why else ""))
        if undefended:
            lines.append("this run believes its members: nothing in it refuses a lie (run.trust = open does)")
        return lines

    def _pairs(self) -> list[tuple[NodeProcess, WorkTally]]:
        return list(zip(self._nodes, self.tallies, strict=True))


def _peer_of(node: NodeProcess) -> str:
    return str((node.ready or {}).get("peer_id", ""))


def _ask(node: NodeProcess, method: str) -> dict[str, Any] | None:
    """None where the node does not say."""
    try:
        answer: dict[str, Any] = ControlClient(node.data_dir).call(method, timeout=ASK_WITHIN)
    except (ControlError, NotRunning, OSError):
        return None
    return answer
