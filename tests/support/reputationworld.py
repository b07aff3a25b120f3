"""A swarm in numbers, for what reputation promises: peers gain, judges measure with noise and may lie, nodes look on.

    world = World(seed=1)
    world.join("ann", Peer(gain=1.0)); world.join("eve", Peer(gain=-1.0, judge=False))
    world.run(20)
    world.view("ann")["eve"].weight

Everything but the records is real: rounds are `RoundWork`, as `chainwork.proved` makes them, and views are those of
`view.standings`. `World.naive` is what a swarm without these defences would believe: the mean of all that judges say,
a moving mean over rounds in which absence counts as no gain, and full trust in whoever is new.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from swarmnode.protocols.chain.statements import ACCEPTED, Refusal
from swarmnode.protocols.reputation.account import DECAY, Account, Judged, RoundWork, after_roster
from swarmnode.protocols.reputation.attestation import FULL, Attestation, Attested, disproved
from swarmnode.protocols.reputation.view import PeerScore, standings

NOISE = 0.3  # of one judge's measurement, relative to an honest contribution's gain
UNIT = 1000  # micro-bits per byte that an honest contribution gains

Say = Callable[[str, float], float]  # what a judge says of a peer, of what it measured


def truth(subject: str, measured: float) -> float:
    return measured


@dataclass
class Peer:
    """How somebody behaves; `gain` may change from round to round."""

    gain: float | Callable[[int], float] = 1.0  # relative to an honest contribution; 0: does nothing
    judge: bool = True
    says: Say = truth
    away: Callable[[int], bool] = lambda round: False
    side: int = 0  # who is on another side of a cut is neither heard nor measured


@dataclass
class World:
    """Rounds of one swarm, or of several that a cut keeps apart."""

    seed: int = 0
    noise: float = NOISE
    observers: tuple[str, ...] = ()  # whose views are kept
    round: int = 0
    peers: dict[str, Peer] = field(default_factory=dict)
    accounts: dict[str, dict[str, Account]] = field(default_factory=dict)  # by observer
    works: dict[str, list[RoundWork]] = field(default_factory=dict)  # by observer
    naive: dict[str, float] = field(default_factory=dict)  # what an undefended swarm would give as weight

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def join(self, name: str, peer: Peer) -> None:
        self.peers[name] = peer
        self.naive[name] = 1.0

    def leave(self, name: str) -> None:
        del self.peers[name]

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for side in sorted({peer.side for peer in self.peers.values()}):
                self._one_round(side)
            self.round += 1

    def _one_round(self, side: int) -> None:
        here = {name: p for name, p in self.peers.items() if p.side == side and not p.away(self.round)}
        judges = [name for name, p in here.items() if p.judge]
        works = []
        for name, peer in sorted(here.items()):
            true = peer.gain(self.round) if callable(peer.gain) else peer.gain
            said = {
                judge: here[judge].says(name, true + self._rng.gauss(0.0, self.noise))
                for judge in judges
                if judge != name
            }
            gains = {judge: round(UNIT * value) for judge, value in said.items()}
            verdict = ACCEPTED if true > 0 else Refusal.HARMFUL
            works.append(Judged(name, verdict, peer.judge, gains))
            told = sum(said.values()) / max(1, len(said))
            self.naive[name] = DECAY * self.naive[name] + (1 - DECAY) * max(-1.0, min(1.0, told))
        for name, peer in self.peers.items():
            if peer.side == side and name not in here:
                self.naive[name] *= DECAY
        work = RoundWork(self.round, self.round.to_bytes(16, "big") + bytes([side] * 16), tuple(works))
        for observer in self.observers:
            if observer in here:
                before = self.accounts.get(observer, {})
                self.accounts[observer] = after_roster(before, work, me=observer)
                self.works.setdefault(observer, []).append(work)

    def view(self, observer: str, attested: Iterable[Attested] = ()) -> dict[str, PeerScore]:
        """What an observer believes now, given what others attested."""
        attested = tuple(attested)
        liars = disproved(attested, self.works.get(observer, ())[-64:])
        return standings(self.accounts.get(observer, {}), attested, me=observer, round=self.round, liars=liars)

    def attests(self, observer: str) -> list[Attested]:
        """What an observer says of everybody it saw."""
        return [
            Attested(observer, b"", 0, Attestation(self.round, peer, *_thousandths(seen), seen.account.rounds))
            for peer, seen in self.view(observer).items()
            if peer != observer
        ]


def honest(count: int, **changes: object) -> dict[str, Peer]:
    """So many honest peers, by name."""
    return {f"honest{number:02}": Peer(**changes) for number in range(count)}  # type: ignore[arg-type]


def _thousandths(seen: PeerScore) -> tuple[int, int]:
    return round(FULL * seen.score), round(FULL * seen.work)
