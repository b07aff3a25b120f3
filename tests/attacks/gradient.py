"""The gradient group: what liars offer, some peers and a small task, with the rules of the open chain.

Sixteen peers, who all judge; and as many as a run comes to have validators, of whom a committee judges each round.
Measured: accuracy after ROUNDS rounds as a share of the same run's without liars and with the plain mean, here and with
the plain mean; how many honest contributions were refused; what share of the weight the liars had.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import claims
import numpy as np
import trio
from adversaries import gradient as adversaries
from clusters import PEERS, Task
from harness import Outcome
from openrounds import RULES, Course, Lie, OpenSwarm, Seen, undefended

from swarmnode.protocols.chain.state import most_validators
from swarmnode.protocols.methods.open.judge import MICRO
from swarmnode.training.open_step import norm_of

ROUNDS = 40
CODEC = "fp32"
TURNS = {"codec_name": "sign3", "lr": 0.7, "momentum": 0.8}
MANY = most_validators(RULES)  # of whom RULES.committee judge


@dataclass(frozen=True)
class Setting:
    """How data lie and how many peers do."""

    name: str
    alpha: float | None  # of the Dirichlet distribution; None: IID
    liars: int
    least: float  # of the accuracy of the run without liars
    peers: int = PEERS
    turns: bool = False  # contributions are those of `sign3`, with outer momentum


SETTINGS = (
    Setting("IID 5/16", None, 5, 0.95),
    Setting("IID 7/16", None, 7, 0.80),
    Setting("Dirichlet 5/16", 0.3, 5, 0.80),
    Setting("Dirichlet 7/16", 0.3, 7, 0.80),
)
IN_TURNS = tuple(replace(setting, turns=True) for setting in SETTINGS)
WITH_COMMITTEE = (
    Setting(f"IID {MANY // 4}/{MANY}", None, MANY // 4, 0.95, MANY),
    Setting(f"Dirichlet {MANY // 4}/{MANY}", 0.3, MANY // 4, 0.80, MANY),
)


@dataclass(frozen=True)
class Damage:
    """What an attack did in one setting."""

    setting: Setting
    clean: float  # accuracy of the plain mean without liars
    accuracy: float
    undefended: float  # accuracy of the plain mean
    course: Course

    @property
    def share(self) -> float:
        return self.accuracy / self.clean

    def failures(self) -> tuple[str, ...]:
        broken = []
        if self.share < self.setting.least:
            least = f"at least {self.setting.least:.0%} promised"
            broken.append(f"{self.setting.name}: {self.share:.0%} of the clean run, {least}")
        if self.course.unseated:
            broken.append(f"{self.setting.name}: {self.course.unseated} honest validators removed as silent")
        return tuple(broken)


def damage(lie: Lie, setting: Setting, *, rounds: int = ROUNDS, seed: int = 0) -> Damage:
    """One run beside two with the plain mean: without liars, and with them."""
    task = Task(seed=seed, alpha=setting.alpha, peers=setting.peers)
    clean = task.accuracy(undefended(task, Lie(), 0, rounds))
    broken = task.accuracy(undefended(task, lie.again(), setting.liars, rounds)) if setting.liars else clean
    how: dict[str, Any] = TURNS if setting.turns else {"codec_name": CODEC}
    course = OpenSwarm(task, lie.again(), setting.liars, **how).run(rounds)
    return Damage(setting, clean, task.accuracy(course.phi), broken, course)


async def outcomes() -> AsyncIterator[Outcome]:
    """Every attack of the group in full."""
    for settings, how in ((SETTINGS, ""), (IN_TURNS, ", with sign3 and outer momentum")):
        yield _without_liars(f"none{how}", PEERS, turns=bool(how))
        for lie in adversaries.everyone():
            found = []
            for setting in settings:
                found.append(damage(lie, setting))
                await trio.lowlevel.checkpoint()
            yield _outcome(f"{lie.name}{how}", found, lie.claims)
    judged = f"where a committee of {RULES.committee} judges"
    yield _without_liars(f"none, {judged}", MANY)
    for lie in adversaries.before_a_committee():
        found = []
        for setting in WITH_COMMITTEE:
            found.append(damage(lie, setting))
            await trio.lowlevel.checkpoint()
        yield _outcome(f"{lie.name}, {judged}", found)
    yield await trio.to_thread.run_sync(claims.outcome)
    for liars in (1, 5, 7):
        yield _struck(liars)


def strike(liars: int) -> tuple[Course, tuple[str, ...]]:
    """What a first strike does before it is noticed, and the promises that it broke."""
    course = OpenSwarm(Task(seed=0, alpha=None), adversaries.FirstStrike(), liars, codec_name=CODEC).run(ROUNDS)
    broken = []
    if course.strike > RULES.norm_growth:  # liars who choose what counts choose the median norm, up to this bound
        broken.append(f"it moved the parameters by {course.strike:.2f} honest steps")
    if course.harm > RULES.revert_above / MICRO and not course.undone:
        broken.append(f"{course.harm:.2f} bits were lost and not undone")
    return course, tuple(broken)


def strike_at_mean(liars: int) -> tuple[float, float]:
    """How far the same strike takes the plain mean, in median norms of honest peers, and the bits that it costs."""
    task, lie = Task(seed=0, alpha=None), adversaries.FirstStrike()
    phi = undefended(task, Lie(), 0, lie.sleeps)
    deltas = task.train(phi, round=lie.sleeps)
    honest, own = deltas[: PEERS - liars], deltas[PEERS - liars :]
    lies = lie.offer(Seen(lie.sleeps, honest, own, [], np.random.default_rng(7)))
    moved = np.concatenate([honest, lies]).mean(axis=0)
    before, after = task.losses(np.stack([phi, phi - moved]), seed=1, samples=4000)
    return norm_of(moved) / median_low([norm_of(each) for each in honest]), float(after - before)


def _struck(liars: int) -> Outcome:
    course, broken = strike(liars)
    told = f"moved by {course.strike:.2f} honest steps, {course.harm:+.3f} bits" + (", undone" * course.undone)
    far, harm = strike_at_mean(liars)
    beside = f"plain mean: moved by {far:.0f} honest steps, {harm:+.3g} bits"
    return Outcome("gradient", f"{adversaries.FirstStrike.name}, {liars}/16", told, beside, broken)


_DATA: tuple[tuple[str, float | None], ...] = (("IID", None), ("Dirichlet", 0.3))


def _without_liars(name: str, peers: int, *, turns: bool = False) -> Outcome:
    settings = [Setting(f"{data} 0/{peers}", alpha, 0, 0.95, peers, turns) for data, alpha in _DATA]
    return _outcome(name, [damage(Lie(), setting) for setting in settings])


def _outcome(name: str, found: list[Damage], claims: int = 1) -> Outcome:
    shares = ", ".join(f"{one.setting.name} {one.share:.0%}" for one in found)
    weights = " / ".join(f"{one.course.weight / ROUNDS:.0%}" for one in found)
    lost = ", ".join(f"{one.undefended / one.clean:.0%}" for one in found)
    told = shares + (f"; liars' weight {weights}" if found[0].setting.liars else "")
    refused = sum(one.course.refused for one in found) / sum(one.course.honest for one in found)
    if any(one.course.lapsed for one in found):
        told += "; honest validators lapsed " + " / ".join(str(one.course.lapsed) for one in found)
    captured = [f"{one.setting.name} from round {one.course.captured}" for one in found if one.course.captured]
    if captured:
        told += f"; liars half of the validators: {', '.join(captured)}"
    failures = tuple(line for one in found for line in one.failures())
    mean = "mean by samples" if claims > 1 else "plain mean"
    return Outcome("gradient", name, f"{told}; honest refused {refused:.0%}", f"{mean}: {lost}", failures)
