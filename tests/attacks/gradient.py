"""The gradient group: what liars offer, some peers and a small task, with the rules of the open chain.

Sixteen peers, who all judge; and as many as a run comes to have validators, of whom a committee judges each round. Each
attack is tried at several seeds in each setting, and the worst of them decides. Beside it stand, at the same seed, the
plain mean without liars (clean) and the plain mean with them (undefended). The liars' weight is looked at from 16
rounds after they began to lie, beside the share of verified work that is theirs: of the stretches that are steps of
their authors on the data drawn for them, each counted by the weight that its author has where nobody lies.

    python tests/attacks gradient                       everything; three quarters of an hour on two cores
    python tests/attacks gradient --rounds 40           one of the two horizons
    python tests/attacks gradient --lies flip slander   attacks whose name has one of these words
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median, median_low, stdev
from typing import Any

import claims
import numpy as np
import trio
from adversaries import adaptive
from adversaries import gradient as adversaries
from adversaries.gradient import GradientLie
from clusters import HIDDEN, LARGE, PEERS, Task
from harness import Outcome
from openrounds import RULES, Course, Lie, OpenSwarm, Seen, undefended

from swarmnode.protocols.chain.rules import NORM_GROWTH
from swarmnode.protocols.chain.state import COMMITTEE, most_validators
from swarmnode.protocols.methods.open.judge import MICRO
from swarmnode.training.open_step import norm_of

SEEDS = (0, 1, 2, 3, 4)
HORIZONS = (40, 160)  # rounds
OUTER: dict[str, dict[str, float]] = {"sign3": {"lr": 0.7, "momentum": 0.8}}  # of a codec that is made for them
MANY = most_validators(RULES)  # of whom COMMITTEE judge
NOBODY_AUDITS = "where nobody audits"
WORST = 5  # attacks that are tried with other codecs and with the larger task, …
LONG = 3  # … of them in the longer horizon, in two settings
SETTLED = 16  # rounds of lying after which liars' weight is promised
MOST_WEIGHT = 1.1  # times their share of verified work; …
IDLE = 0.02  # … the share of the weight that they may have without any
MOST_OF_NAMES = 1.05  # times the weight of an honest name, of one peer under all of the liars' names
NEAR = 0.01  # how far a reported loss may be from that on text which nobody saw, as a share of it
HONEST_COUNTS = 0.95  # share of the work that counts where nobody lies


@dataclass(frozen=True)
class Setting:
    """How data lie, how many peers do, what travels, and what is promised."""

    name: str
    alpha: float | None  # of the Dirichlet distribution; None: IID
    liars: int
    least: float | None  # of the accuracy of the run without liars; None: nothing, it is measured for information
    peers: int = PEERS
    codec: str = "fp32"
    hidden: int = HIDDEN
    seeds: tuple[int, ...] = SEEDS
    audits: bool = True

    def task(self, seed: int) -> Task:
        return Task(seed=seed, alpha=self.alpha, peers=self.peers, hidden=self.hidden)

    @property
    def travels(self) -> dict[str, Any]:
        """How contributions travel and are applied."""
        return {"codec_name": self.codec, **OUTER.get(self.codec, {})}

    def swarm(self, lie: Lie, task: Task) -> OpenSwarm:
        return OpenSwarm(task, lie, self.liars, audits=self.audits, **self.travels)


SETTINGS = (
    Setting("IID 5/16", None, 5, 0.95),
    Setting("IID 7/16", None, 7, 0.85),
    Setting("Dirichlet 4/16", 0.3, 4, 0.95),
    Setting("Dirichlet 5/16", 0.3, 5, 0.85),
    Setting("Dirichlet 7/16", 0.3, 7, None),
)
WITHOUT_LIARS = (Setting("IID 0/16", None, 0, 0.95), Setting("Dirichlet 0/16", 0.3, 0, 0.95))
OF_MANY = (
    Setting(f"IID {MANY // 4}/{MANY}", None, MANY // 4, 0.95, MANY),
    Setting(f"Dirichlet {MANY // 4}/{MANY}", 0.3, MANY // 4, 0.85, MANY),
)
TEN_NAMES = (Setting("IID 10/32", None, 10, 0.95, 32), Setting("Dirichlet 10/32", 0.3, 10, 0.85, 32))
BY_HEART = (Setting("IID 3/16", None, 3, 0.95), Setting("Dirichlet 3/16", 0.3, 3, 0.95))
TEN_TIMES = tuple(replace(setting, hidden=LARGE) for setting in SETTINGS[:1])


@dataclass(frozen=True)
class Damage:
    """What an attack did in one setting at one seed."""

    setting: Setting
    rounds: int
    seed: int
    clean: float  # accuracy of the plain mean without liars
    accuracy: float
    undefended: float  # accuracy of the plain mean
    without: float  # accuracy of the plain mean of honest peers alone: of a rule that knows who lies
    spread: float  # standard deviation of `clean` over the setting's seeds
    weight: float  # share of liars, once they have lied for SETTLED rounds
    verified: float  # their share of verified work in these rounds
    most: float  # of the weight that they may have
    refused: float  # share of the honest work
    lapsed: int  # honest validators who lost their seat as too little of their work was accepted …
    unseated: int  # … or as a minority said that they are silent
    captured: int | None  # round from which on liars were half of the validators
    apart: float | None = None  # of those who learn by heart: the reported loss from that on unseen text, as a share

    @property
    def share(self) -> float:
        return self.accuracy / self.clean

    @property
    def harmless(self) -> bool:
        """Whether the plain mean bears the attack without harm."""
        return bool(self.setting.liars) and self.undefended >= self.clean - self.spread

    def failures(self) -> tuple[str, ...]:
        """Promises that were broken: of harm, of the liars' weight, and of the loss that is reported."""
        broken = []
        if self.setting.least is not None and self.weight > self.most:
            broken.append(f"liars' weight {self.weight:.1%}, {self.most:.1%} permitted")
        if self.setting.least is not None and abs(self.apart or 0.0) > NEAR:
            broken.append(f"the reported loss {self.apart:+.1%} from that on unseen text")
        return (*self.harm(), *map(self._told, broken))

    def harm(self) -> tuple[str, ...]:
        """Promises of harm that were broken."""
        setting, broken = self.setting, []
        if setting.least is None:
            return ()
        if self.share < setting.least:
            broken.append(f"{self.share:.1%} of clean, {setting.least:.0%} promised")
        if self.accuracy < self.undefended - self.spread:
            broken.append(f"{self.share:.1%} of clean, {self.undefended / self.clean:.1%} undefended")
        if self.captured is not None:
            broken.append(f"captured from round {self.captured}")
        if self.unseated or (self.lapsed and not setting.liars):
            broken.append(f"{self.unseated + self.lapsed} honest validators lost")
        if not setting.liars and 1 - self.refused < HONEST_COUNTS:
            broken.append(f"{self.refused:.0%} of the honest work refused")
        return tuple(map(self._told, broken))

    def _told(self, broken: str) -> str:
        return f"{self.setting.name}, seed {self.seed}: {broken}"


class Absent(Lie):
    """Liars who never come."""

    joins = 1 << 30


def damage(lie: Lie, setting: Setting, *, rounds: int, seed: int) -> Damage:
    """One run beside two with the plain mean: without liars, and with them."""
    task, alone = setting.task(seed), _alone(setting)
    broken = clean = _clean(alone, rounds, seed)
    if setting.liars:
        broken = task.accuracy(undefended(task, lie.again(), setting.liars, rounds, **setting.travels))
    course = setting.swarm(lie.again(), task).run(rounds)
    weight, verified, most = weights_of(lie, course, setting, task.names, seed)
    reported, unseen = task.told(course.phi) if lie.by_heart else (1.0, 1.0)
    return Damage(
        setting,
        rounds,
        seed,
        clean,
        task.accuracy(course.phi),
        broken,
        _without(replace(alone, liars=setting.liars), rounds, seed),
        stdev(_clean(alone, rounds, each) for each in SEEDS),
        weight,
        verified,
        most,
        course.refused / course.honest,
        course.lapsed,
        course.unseated,
        course.captured,
        reported / unseen - 1 if lie.by_heart else None,
    )


def weights_of(
    lie: Lie, course: Course, setting: Setting, names: Sequence[str], seed: int
) -> tuple[float, float, float]:
    """The liars' share of the weight, and of verified work, from SETTLED rounds of lying on; and what they may have."""
    rounds = len(course.shares)
    since = min(lie.first + SETTLED, rounds - 1)
    honest, liars = names[: len(names) - setting.liars], set(names[len(names) - setting.liars :])
    fair, shares, worked = _fair(_alone(setting), rounds, seed)[since:], course.shares[since:], course.worked[since:]
    done = [
        {name: one.get(name, 0.0) * true.get(name, 0.0) for name in names}
        for one, true in zip(fair, worked, strict=True)
    ]
    weight, verified = _share(liars, shares), _share(liars, done)
    if lie.one_name:
        return weight, verified, MOST_OF_NAMES * _share(set(honest), shares) / len(honest)
    return weight, verified, max(IDLE, MOST_WEIGHT * verified)


def _share(of: set[str], parts: Sequence[Mapping[str, float]]) -> float:
    """Of these names, in the sum over rounds of everybody's."""
    total = sum(sum(one.values()) for one in parts)
    return sum(part for one in parts for name, part in one.items() if name in of) / total if total else 0.0


def _alone(setting: Setting) -> Setting:
    """The same without liars, and alike for all settings that differ in them only."""
    return replace(setting, name="", liars=0, least=None, seeds=(), audits=True)


@cache  # the same for all attacks
def _clean(setting: Setting, rounds: int, seed: int) -> float:
    task = setting.task(seed)
    return task.accuracy(undefended(task, Lie(), 0, rounds, **setting.travels))


@cache
def _without(setting: Setting, rounds: int, seed: int) -> float:
    task = setting.task(seed)
    return task.accuracy(undefended(task, Absent(), setting.liars, rounds, **setting.travels))


@cache
def _fair(setting: Setting, rounds: int, seed: int) -> Sequence[Mapping[str, float]]:
    """Weight of each peer where nobody lies, in each round."""
    return setting.swarm(Lie(), setting.task(seed)).run(rounds).shares


# --- lines of the table -----------------------------------------------------------------------------------------------

HEADER = (
    "| attack | task | rounds | codec | seeds | setting | worst, % of clean | median | undefended | liars left out "
    "| liars' weight (verified work), % | honest refused, % | validators lost | captured | |"
)


@dataclass(frozen=True)
class Line:
    """One attack at one horizon with one codec, in some settings."""

    attack: str
    found: tuple[Damage, ...]  # of one setting after another

    @property
    def settings(self) -> dict[Setting, list[Damage]]:
        by: dict[Setting, list[Damage]] = {}
        for one in self.found:
            by.setdefault(one.setting, []).append(one)
        return by

    @property
    def key(self) -> str:
        """The cells that say what was done: such a row takes the place of an earlier one."""
        first = self.found[0]
        parameters = first.setting.task(0).parameters
        return f"| {self.attack} | {parameters} parameters | {first.rounds} | {first.setting.codec} |"

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(failure for one in self.found for failure in one.failures())

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def margin(self) -> float:
        """How far the worst run is above what is promised, as a share of clean; below 0 the promise is broken."""
        kept = [one for one in self.found if one.setting.least is not None]
        return min(min(one.share - (one.setting.least or 0), _above_undefended(one)) for one in kept)

    def row(self) -> str:
        """Values of the settings apart by slashes; those of one seed are the worst one's."""
        each = list(self.settings.items())
        worst = [min(found, key=lambda one: one.share) for _, found in each]
        columns = [
            " / ".join(f"{one.share * 100:.0f}" for one in worst),
            " / ".join(f"{median([one.share for one in found]) * 100:.0f}" for _, found in each),
            " / ".join(f"{one.undefended / one.clean * 100:.0f}" for one in worst),
            " / ".join(f"{one.without / one.clean * 100:.0f}" for one in worst),
            " / ".join(_weights(found) for _, found in each),
            " / ".join(f"{fmean(one.refused for one in found) * 100:.0f}" for _, found in each),
            " / ".join(str(max(one.lapsed + one.unseated for one in found)) for _, found in each),
            " / ".join(_captured(found) for _, found in each),
        ]
        seeds = ", ".join(str(seed) for seed in sorted({one.seed for one in self.found}))
        names = " / ".join(setting.name for setting, _ in each) if len(each) < len(SETTINGS) else "all five"
        return f"{self.key} {seeds} | {names} | {' | '.join(columns)} | {self._verdict()} |"

    def _verdict(self) -> str:
        if self.failures:
            return "MISSED: " + "; ".join(_shortest(self.failures))
        bound = [one for one in self.found if one.setting.least is not None and one.setting.liars]
        told = [abs(one.apart) for one in self.found if one.apart is not None]
        if not bound and self.found[0].setting.liars:
            return "for information"
        verdict = f"holds; the reported loss {max(told):.1%} from that on unseen text at most" if told else "holds"
        return verdict + (
            "; no harm undefended: what is shown is the weight" if bound and all(one.harmless for one in bound) else ""
        )


def _above_undefended(one: Damage) -> float:
    return (one.accuracy - one.undefended + one.spread) / one.clean if one.setting.liars else math.inf


def _weights(found: Sequence[Damage]) -> str:
    worst = max(found, key=lambda one: one.weight - one.most)
    return f"{worst.weight * 100:.1f} ({worst.verified * 100:.0f})"


def _captured(found: Sequence[Damage]) -> str:
    rounds = [one.captured for one in found if one.captured is not None]
    return f"{len(rounds)} seeds from {min(rounds)}" if rounds else "no"


def _shortest(failures: Sequence[str]) -> list[str]:
    """The first three, and how many more there are."""
    return [*failures[:3], *([f"{len(failures) - 3} more"] if len(failures) > 3 else [])]


# --- the whole group --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """One line that is to be measured."""

    attack: str
    lie: Lie
    settings: tuple[Setting, ...]
    rounds: int

    def jobs(self) -> Iterator[tuple[Lie, Setting, int, int]]:
        return ((self.lie, setting, self.rounds, seed) for setting in self.settings for seed in setting.seeds)


def _job(lie: Lie, setting: Setting, rounds: int, seed: int) -> Damage:
    return damage(lie, setting, rounds=rounds, seed=seed)


def everyone(rounds: int) -> list[GradientLie]:
    """All attacks of the group that have time to do harm."""
    return [*adversaries.everyone(), *adaptive.everyone(rounds)]


def measured(wanted: Iterable[Wanted]) -> Iterator[Line]:
    """Each line as soon as it is there, in order, computed by all cores; tells on standard error how far it is."""
    wanted, began = list(wanted), time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers: they are as many as there are cores
    total, done = sum(len(list(one.jobs())) for one in wanted), 0
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [(one, [pool.submit(_job, *job) for job in one.jobs()]) for one in wanted]
        for one, futures in running:
            found = []
            for future in futures:
                found.append(future.result())
                done += 1
                spent = time.monotonic() - began
                left = spent / done * (total - done)
                print(f"\r{done} of {total} runs, {left / 60:.0f} min left ", end="", file=sys.stderr, flush=True)
            yield Line(one.attack, tuple(found))
    print(file=sys.stderr)


def lines(horizons: Sequence[int] = HORIZONS, words: Sequence[str] = ()) -> Iterator[Line]:
    """The attacks whose names have one of these words, or all; at each horizon the worst of them also otherwise."""
    for rounds in horizons:
        lies = [lie for lie in everyone(rounds) if not words or any(word in lie.name for word in words)]
        usual = [Wanted("nobody lies", Lie(), WITHOUT_LIARS, rounds)] if not words else []
        usual += [Wanted(lie.name, lie, SETTINGS, rounds) for lie in lies]
        found: list[Line] = []
        for line in measured(usual):
            found.append(line)
            yield line
        yield from measured(one for one in _elsewhere(rounds) if not words or any(word in one.attack for word in words))
        worst = sorted((line for line in found if line.found[0].setting.liars), key=lambda line: line.margin)[:WORST]
        named = {lie.name: lie for lie in lies}
        yield from measured(_otherwise([named[line.attack] for line in worst], rounds))
    if not words:
        judged = f"where a committee of {COMMITTEE} judges"
        many = adversaries.before_a_committee()
        yield from measured(Wanted(f"{lie.name}, {judged}", lie, OF_MANY, HORIZONS[0]) for lie in many)


def _elsewhere(rounds: int) -> Iterator[Wanted]:
    """Attacks that have settings of their own; and some where nobody audits, in the shorter horizon."""
    lies: list[tuple[GradientLie, tuple[Setting, ...]]] = [
        (adversaries.ManyNames(), TEN_NAMES),
        (adversaries.LearnsByHeart(), BY_HEART),
    ]
    named = [(f"{lie.name}, {settings[0].name.split()[-1]}", lie, settings) for lie, settings in lies]
    yield from (Wanted(name, lie, settings, rounds) for name, lie, settings in named)
    if rounds == HORIZONS[0]:
        named += [(lie.name, lie, SETTINGS) for lie in adversaries.without_audits()]
        for name, lie, settings in named:
            bare = tuple(replace(setting, audits=False, least=None) for setting in settings)
            yield Wanted(f"{name}, {NOBODY_AUDITS}", lie, bare, rounds)


def _otherwise(lies: Sequence[GradientLie], rounds: int) -> Iterator[Wanted]:
    """The same attacks with other codecs, and on the task ten times as large; less of that in the longer horizon."""
    few, lies = (SETTINGS, lies) if rounds == HORIZONS[0] else ((SETTINGS[0], SETTINGS[3]), lies[:LONG])
    for codec in ("topk", "sign3"):
        without = tuple(replace(setting, codec=codec) for setting in WITHOUT_LIARS)
        yield Wanted("nobody lies", Lie(), without, rounds)
        settings = tuple(replace(setting, codec=codec) for setting in few)
        yield from (Wanted(lie.name, lie, settings, rounds) for lie in lies)
    yield from (Wanted(lie.name, lie, TEN_TIMES, rounds) for lie in lies)


async def outcomes(horizons: Sequence[int] = HORIZONS, words: Sequence[str] = ()) -> AsyncIterator[Outcome | Line]:
    """Every attack of the group in full."""
    found = lines(horizons, words)
    while (line := await trio.to_thread.run_sync(next, found, None)) is not None:
        yield line
    if words:
        return
    yield await trio.to_thread.run_sync(claims.outcome)
    for liars in (1, 5, 7):
        yield _struck(liars)


# --- the first strike -------------------------------------------------------------------------------------------------

STRUCK_ROUNDS = 40


def strike(liars: int) -> tuple[Course, tuple[str, ...]]:
    """What a first strike does before it is noticed, and the promises that it broke."""
    swarm = OpenSwarm(Task(seed=0, alpha=None), adversaries.FirstStrike(), liars, codec_name="fp32")
    course = swarm.run(STRUCK_ROUNDS)
    broken = []
    if course.strike > NORM_GROWTH:  # liars who choose what counts choose the median norm, up to this bound
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
    lies = lie.offer(Seen(lie.sleeps, honest, own, [], np.random.default_rng(7), task, phi))
    moved = np.concatenate([honest, lies]).mean(axis=0)
    before, after = task.losses(np.stack([phi, phi - moved]), seed=1, samples=4000)
    return norm_of(moved) / median_low([norm_of(each) for each in honest]), float(after - before)


def _struck(liars: int) -> Outcome:
    course, broken = strike(liars)
    told = f"moved by {course.strike:.2f} honest steps, {course.harm:+.3f} bits" + (", undone" * course.undone)
    far, harm = strike_at_mean(liars)
    beside = f"plain mean: moved by {far:.0f} honest steps, {harm:+.3g} bits"
    return Outcome("first strikes", f"{adversaries.FirstStrike.name}, {liars}/16", told, beside, broken)
