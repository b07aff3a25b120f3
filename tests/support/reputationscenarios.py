"""What ATTACKS.md asks of reputation, as scenarios in `reputationworld`: each gives a figure without and with defence.

outcome = SCENARIOS["slander"](seed, noise)        # outcome.defended <= outcome.limit
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

import numpy as np
from reputationworld import Peer, World, honest

from swarmnode.protocols.reputation.attestation import FULL, Attestation, Attested
from swarmnode.protocols.reputation.view import PeerScore, standings
from swarmnode.training.open_step import SEQUENCES

sys.path.append(str(Path(__file__).parents[1] / "attacks"))

import clusters

ME = "honest00"
SETTLED = 40  # rounds after which weights no longer rise
CONTAINED = 0.01  # of a fair share
AN_EIGHTH = 0.125  # of the weight: what names without verified work may have of it together


@dataclass(frozen=True)
class Outcome:
    """One scenario's figures. `limit` is asked of `defended`: at the most, or at least where `least`."""

    metric: str
    undefended: float
    defended: float
    limit: float
    least: bool = False

    @property
    def excess(self) -> float:
        return self.limit - self.defended if self.least else self.defended - self.limit

    @property
    def passes(self) -> bool:
        return self.excess <= 1e-9

    @property
    def bound(self) -> str:
        return f"{'>=' if self.least else '<='} {self.limit:g}"


def settled(seed: int, noise: float, peers: dict[str, Peer], rounds: int = SETTLED, **more: object) -> World:
    """A swarm after some rounds, seen by the first honest peer."""
    world = World(seed=seed, noise=noise, observers=(ME,), **more)  # type: ignore[arg-type]
    for name, peer in peers.items():
        world.join(name, peer)
    world.run(rounds)
    return world


def total(view: dict[str, PeerScore], names: list[str]) -> float:
    return sum(view[name].weight for name in names if name in view)


def whitewash(seed: int, noise: float) -> Outcome:
    """Works for three rounds, strikes, and comes back under a new name: what it holds when it strikes."""
    lives = 16
    washer, plain = settled(seed, noise, honest(15)), settled(seed, noise, honest(15))
    held, trusted, bound = [], [], []
    for life in range(lives):
        began, name = washer.round, f"eve{life}"
        washer.join(name, Peer(gain=lambda r, began=began: 1.0 if r < began + 3 else -1.0, judge=False))
        plain.join(name, Peer(judge=False))
        for world in (washer, plain):
            world.run(3)
        held.append(washer.view(ME)[name].weight)
        trusted.append(washer.naive[name])
        bound.append(plain.view(ME)[name].weight)
        for world in (washer, plain):
            world.run(1)
            world.leave(name)
    return Outcome(
        "weight at its strikes / a newcomer's of the same age",
        sum(trusted) / sum(bound),
        sum(held) / sum(bound),
        1.05,
    )


def fresh_name(seed: int, noise: float) -> Outcome:
    """Harms, and takes a new name in every round: what such a name ever holds, as a share of the whole."""
    world = settled(seed, noise, honest(15))
    most, trusted = 0.0, 0.0
    for life in range(10):
        name = f"eve{life}"
        world.join(name, Peer(gain=-1.0, judge=False))
        trusted = max(trusted, world.naive[name] / sum(world.naive.values()))
        world.run(1)
        most = max(most, world.view(ME)[name].weight)
        world.leave(name)
    return Outcome("verified weight of any of the names", trusted * 16, most, 0.0)


@cache
def measured_part(seed: int, steps: int, batch: int, names: int) -> float:
    """What judges measure of a name that trains so many steps and samples, in units of an honest contribution's gain.

    The mean over `names` that share one peer's data, by numpy training on the sixteen peers' clusters of the gradient
    attacks, after 20 rounds, as judges measure: the product with the loss's gradients before and after the step.
    """
    task = clusters.Task(seed=seed, alpha=None)
    phi = task.start()
    for round in range(20):
        phi = phi - task.train(phi, round=round).mean(axis=0)
    whole = task.train(phi, round=20)
    with patch.multiple(clusters, STEPS=steps, BATCH=batch):
        parts = np.stack([task.train(phi, round=21 + number)[0] for number in range(names)])
    points = (phi, phi - whole.mean(axis=0))
    slope = sum(task.slope(at, judge, 0, SEQUENCES).astype(np.float64) for at in points for judge in range(8))
    return float((parts @ slope).mean() / np.median(whole @ slope))


def sybils(seed: int, noise: float) -> Outcome:
    """One peer's work under ten names, each of a tenth of its steps and samples, against the same under one."""
    each = measured_part(seed, 1, clusters.STEPS * clusters.BATCH // 10, 10)
    split = settled(seed, noise, honest(15) | {f"eve{n}": Peer(gain=each, judge=False) for n in range(10)})
    whole = settled(seed, noise, honest(15) | {"eve0": Peer(judge=False)})
    names = [f"eve{n}" for n in range(10)]
    one = whole.view(ME)["eve0"].weight
    # Where names are counted, as a vote or an equal weight does, ten count ten times.
    return Outcome("weight of ten names / of one", 10.0, total(split.view(ME), names) / one, 1.05)


def rich_sybils(seed: int, noise: float) -> Outcome:
    """Three peers' work under ten names, each of two steps of 24: their share of the weight, against that of work."""
    names = [f"eve{n}" for n in range(10)]
    each = measured_part(seed, 2, 3 * clusters.STEPS * clusters.BATCH // 20, 10)
    world = settled(seed, noise, honest(13) | {name: Peer(gain=each, judge=False) for name in names})
    view = world.view(ME)
    everybody = total(view, list(view))
    return Outcome(
        "share of weight / share of audited work", 10 / 23 / (3 / 16), total(view, names) / everybody / (3 / 16), 1.0
    )


def idle_sybils(seed: int, noise: float) -> Outcome:
    """A hundred names that do nothing, seen for forty rounds: their share of the verified weight, by chance."""
    names = [f"eve{n}" for n in range(100)]
    world = settled(seed, noise, honest(15) | {name: Peer(gain=0.0, judge=False) for name in names})
    view = world.view(ME)
    return Outcome("share of a hundred idle names", 100 / 115, total(view, names) / total(view, list(view)), AN_EIGHTH)


def slander(seed: int, noise: float) -> Outcome:
    """Six of fifteen do honest work and say that all others harm: how far honest scores move."""

    def lie(subject: str, measured: float) -> float:
        return 1.0 if subject.startswith("eve") else -1.0

    liars = {f"eve{n}": Peer(says=lie) for n in range(6)}
    after = settled(seed, noise, honest(9) | liars)
    before = settled(seed, noise, honest(9) | {name: Peer() for name in liars})
    moved = [
        abs(after.view(ME)[name].score - before.view(ME)[name].score) / before.view(ME)[name].score
        for name in honest(9)
    ]
    naive = [abs(after.naive[name] - before.naive[name]) / before.naive[name] for name in honest(9)]
    return Outcome("greatest move of an honest score", max(naive), max(moved), 0.05)


def slander_worlds(seed: int, noise: float) -> tuple[World, World]:
    """Nine honest peers and six who do honest work; and the same where the six slander one of the nine."""

    def lie(subject: str, measured: float) -> float:
        return -1.0 if subject == "honest01" else measured

    slanderers = {f"eve{n}": Peer(says=lie) for n in range(6)}
    plain = {name: Peer() for name in slanderers}
    return settled(seed, noise, honest(9) | plain), settled(seed, noise, honest(9) | slanderers)


def slander_of_one(seed: int, noise: float) -> Outcome:
    """The same six say that of one peer alone: how far its weight moves, which has work in it."""
    before, after = slander_worlds(seed, noise)
    moved = 1 - after.view(ME)["honest01"].weight / before.view(ME)["honest01"].weight
    return Outcome("loss of the victim's weight", 1 - after.naive["honest01"] / before.naive["honest01"], moved, 0.05)


def slander_of_ones_score(seed: int, noise: float) -> Outcome:
    """The same: how far the score of that one peer moves, which says how surely its work is better than none."""
    told = slander_worlds(seed, noise)
    before, after = (world.view(ME)["honest01"].score for world in told)
    naive = 1 - told[1].naive["honest01"] / told[0].naive["honest01"]
    return Outcome("fall of the victim's score", naive, 1 - after / before, 0.05)


def slander_of_strangers(seed: int, noise: float) -> Outcome:
    """What a node believes of peers that it never saw, where 40 % of those it trusts slander them."""
    world = settled(seed, noise, honest(15))
    accounts = world.accounts[ME]
    attested = []
    for number, attester in enumerate(honest(15)):
        lies = 1 <= number <= 6
        for victim in ("ann", "bob"):
            true = Attestation(world.round, victim, 0 if lies else 960 + number, 0 if lies else 900, 30)
            attested.append(Attested(attester, b"", 0, true))
    view = standings(accounts, attested, me=ME, round=world.round)
    said = [one.what.score / FULL for one in attested if one.what.subject == "ann" and one.attester != ME]
    return Outcome("greatest move of an honest score", 1 - fmean(said) / 0.967, 1 - view["ann"].score / 0.967, 0.05)


def ring(seed: int, noise: float) -> Outcome:
    """Twelve names without verified work attest the best to one another."""
    world = settled(seed, noise, honest(4))
    names = [f"eve{n:02}" for n in range(12)]
    attested = [
        Attested(one, b"", 0, Attestation(world.round, other, FULL, FULL, 1000))
        for one in names
        for other in names
        if one != other
    ]
    view = world.view(ME, attested)
    return Outcome("greatest weight in the ring", 1.0, max(view[name].weight for name in names), 0.0)


def on_off(seed: int, noise: float) -> Outcome:
    """Works some rounds, strikes in one, again and again: weight lost by a strike, for each weight used in one."""
    ratios, naive = [], []
    for good in (1, 3, 8, 24):
        plain = settled(seed, noise, honest(15) | {"eve": Peer(judge=False)})
        world = settled(seed, noise, honest(15) | {"eve": Peer(judge=False)})
        begun = world.round
        world.peers["eve"].gain = lambda r, good=good, begun=begun: -1.0 if (r - begun) % (good + 1) == good else 1.0
        used = lost = used_naive = lost_naive = 0.0
        for _ in range(3 * (good + 1)):
            strikes = (world.round - begun) % (good + 1) == good
            held, could = world.view(ME)["eve"].weight, plain.view(ME)["eve"].weight
            used, lost = used + (held if strikes else 0.0), lost + could - held
            used_naive += world.naive["eve"] if strikes else 0.0
            lost_naive += plain.naive["eve"] - world.naive["eve"]
            world.run(1)
            plain.run(1)
        ratios.append(lost / used if used else float("inf"))
        naive.append(lost_naive / used_naive if used_naive > 0 else float("inf"))
    return Outcome("weight lost / weight used to strike", min(naive), min(ratios), 1.0, least=True)


def outage(seed: int, noise: float) -> Outcome:
    """Five of sixteen honest peers vanish for twenty rounds: how far scores and weights are off, three rounds after."""
    world = settled(seed, noise, honest(16))
    gone = [f"honest{n:02}" for n in range(11, 16)]
    before, trusted = world.view(ME), dict(world.naive)
    for name in gone:
        world.peers[name].away = lambda r: SETTLED <= r < SETTLED + 20
    world.run(23)
    after = world.view(ME)
    moved = max(1 - after[name].score / before[name].score for name in gone)
    return Outcome("greatest fall of a score", max(1 - world.naive[n] / trusted[n] for n in gone), moved, 0.05)


def outage_of_work(seed: int, noise: float) -> Outcome:
    """The same, of the weight that they have together, which moves with every round's noise as well."""
    world = settled(seed, noise, honest(16))
    gone = [f"honest{n:02}" for n in range(11, 16)]
    before, trusted = total(world.view(ME), gone), sum(world.naive[name] for name in gone)
    for name in gone:
        world.peers[name].away = lambda r: SETTLED <= r < SETTLED + 20
    world.run(23)
    naive = 1 - sum(world.naive[name] for name in gone) / trusted
    return Outcome("fall of their weight together", naive, 1 - total(world.view(ME), gone) / before, 0.05)


def _rounds_until(world: World, true: Callable[[World], bool], most: int = 60) -> int:
    for rounds in range(most):
        if true(world):
            return rounds
        world.run(1)
    return most


def contain(seed: int, noise: float) -> Outcome:
    """A newcomer harms from its first round on: the greatest weight that it ever has, and when it has none."""
    slowest, naive = 0, 0
    for harm in (-1.0, -0.5, -0.3):
        world = settled(seed, noise, honest(15))
        world.join("eve", Peer(gain=harm, judge=False))
        naive = max(naive, _rounds_until(world, lambda world: world.naive["eve"] <= CONTAINED))
        world = settled(seed, noise, honest(15))
        world.join("eve", Peer(gain=harm, judge=False))
        slowest = max(slowest, _rounds_until(world, _is_contained))
    return Outcome("rounds", naive, slowest, 5)


def contain_trusted(seed: int, noise: float) -> Outcome:
    """The same of a peer that did honest work before."""
    slowest, naive = 0, 0
    for harm in (-1.0, -0.5):
        world = settled(seed, noise, honest(15) | {"eve": Peer(judge=False)})
        world.peers["eve"].gain = harm
        naive = max(naive, _rounds_until(world, lambda world: world.naive["eve"] <= CONTAINED))
        world = settled(seed, noise, honest(15) | {"eve": Peer(judge=False)})
        world.peers["eve"].gain = harm
        slowest = max(slowest, _rounds_until(world, _is_contained))
    return Outcome("rounds", naive, slowest, 5)


def _is_contained(world: World) -> bool:
    view = world.view(ME)
    weight = view["eve"].weight if "eve" in view else 0.0
    return weight <= CONTAINED * median(view[name].weight for name in honest(15))


def newcomer(seed: int, noise: float) -> Outcome:
    """An honest peer joins: rounds until it has 80 % of what the others have."""
    world = settled(seed, noise, honest(15))
    world.join("new", Peer(judge=False))

    def has_its_share(world: World) -> bool:
        view = world.view(ME)
        return "new" in view and view["new"].weight >= 0.8 * fmean(view[name].weight for name in honest(15))

    return Outcome("rounds", 0, _rounds_until(world, has_its_share), 10)


def merge(seed: int, noise: float) -> Outcome:
    """Two swarms that met different attackers meet: rounds until two nodes' scores differ by 5 points at the most."""
    world, other = _merged(seed, noise)

    def agree(world: World) -> bool:
        return _apart(world, other) <= 0.05

    rounds = _rounds_until(world, agree)
    alone, other = _merged(seed, noise)
    naive = _rounds_until(alone, lambda w: max(w.naive[f"eve{n}"] for n in range(4)) <= 0.05)
    return Outcome("rounds until scores are equal", naive, rounds, 5)


def merge_worst(seed: int, noise: float) -> Outcome:
    """The same: what honest peers of the other side weigh, against honest newcomers who join just then."""
    world, other = _merged(seed, noise)
    for number in range(8):
        world.join(f"new{number}", Peer(judge=False))
    theirs = news = 0.0
    for _ in range(8):
        world.run(1)
        view = world.view(ME, world.attests(other))
        theirs += total(view, _side(8, 16))
        news += total(view, [f"new{number}" for number in range(8)])
    return Outcome("weight / newcomers' weight", 1.0, theirs / news, 0.95, least=True)


def _side(first: int, last: int) -> list[str]:
    return [f"honest{n:02}" for n in range(first, last)]


def _merged(seed: int, noise: float) -> tuple[World, str]:
    other = "honest08"
    world = World(seed=seed, noise=noise, observers=(ME, other))
    for number, name in enumerate(honest(16)):
        world.join(name, Peer(side=number // 8))
    for number in range(4):
        world.join(f"eve{number}", Peer(gain=-1.0, judge=False, side=number // 2))
    world.run(30)
    for peer in world.peers.values():
        peer.side = 0
    return world, other


def _apart(world: World, other: str) -> float:
    here, there = world.view(ME, world.attests(other)), world.view(other, world.attests(ME))
    both = set(here) & set(there) - {ME, other}
    missing = (set(here) ^ set(there)) - {ME, other}
    if missing:
        return 1.0
    return max(abs(here[name].score - there[name].score) for name in both)


# What the bounds of today's rules miss, at the worst seed, where that is known: said in docs/reputation.md.
MISSED = frozenset({"sybils-below-cap", "sybils-above-cap", "slander-of-one"})
SCENARIOS: dict[str, Callable[[int, float], Outcome]] = {
    "whitewash": whitewash,
    "fresh-name": fresh_name,
    "sybils-below-cap": sybils,
    "sybils-above-cap": rich_sybils,
    "sybils-idle": idle_sybils,
    "slander": slander,
    "slander-of-one": slander_of_one,
    "slander-of-one-score": slander_of_ones_score,
    "slander-of-strangers": slander_of_strangers,
    "collusion-ring": ring,
    "on-off": on_off,
    "outage": outage,
    "outage-weight": outage_of_work,
    "contain-newcomer": contain,
    "contain-trusted": contain_trusted,
    "newcomer": newcomer,
    "merge": merge,
    "merge-worst-off": merge_worst,
}
