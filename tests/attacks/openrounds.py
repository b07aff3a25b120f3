"""Rounds of an open chain over the clusters of `clusters.py`, as the product computes them, with liars among the peers.

Training and held-out losses are the task's; all else is the product's own: encoded contributions with error feedback,
`chain.derive` for who is accepted with which weight and clip factor, `chain.validity` for the chain after it, and
`apply_contributions`. What is left out is the network. Liars know everything that honest peers offer before they offer
anything, and before they judge what honest judges measured. If a lie says nothing else they refuse in their scores
whatever is honest, praise one another and ask for every roster to be undone; and they say that no honest judge is
there. Rosters quote all judges: who leaves out whom others heard is not followed (`chain/duty.py`). Members audit one
another (`audited.py`): whose lie they found has no standing in honest judges' scores, and all of it in liars'.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from audited import ALL, NONE, Audits, drawn
from chains import RUN, Offer, block, cut, fair, quote, row, scores
from chains import offer as offered
from clusters import SEQUENCE, Floats, Task

from swarmnode.protocols.chain.rules import Quoted, checks_seed, longest_norm
from swarmnode.protocols.chain.state import (
    SILENCE,
    ChainState,
    genesis,
    judges,
    leaders,
    next_silent,
    rules_of,
)
from swarmnode.protocols.chain.statements import FULL_STANDING, MAX_GAIN, MISSING, Refusal
from swarmnode.protocols.methods.open.judge import MICRO, SUSPECT, batch_seed
from swarmnode.protocols.methods.open.store import id_of
from swarmnode.protocols.reputation.account import MEASURED
from swarmnode.training.codecs import Codec, codec, codec_in
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.open_step import (
    CLIP_UNIT,
    Factor,
    apply_contributions,
    clip_units,
    median_norm,
    norm_of,
    opened,
    sequences_for,
)
from swarmnode.training.outer import OuterState, outer_step
from swarmnode.training.sections import TrustSection
from swarmnode.training.verify.replay import DECAY, whom

RULES = rules_of(TrustSection())
WINDOW = 60_000


@dataclass
class Seen:
    """What liars know when they choose what to offer."""

    round: int
    honest: Floats  # (h, P), what honest peers offer
    own: Floats  # (f, P), what the liars trained themselves
    moved: list[Floats]  # of each round before, (P,): how far the shared parameters went down
    rng: np.random.Generator
    task: Task  # with the text that judges draw from, which is public
    phi: Floats  # (P,), the shared parameters
    leads: bool = False  # whether one of them leads this round
    asked: tuple[frozenset[int], ...] = ()  # by liar the stretches that its auditors may repeat, where they know that
    shunned: tuple[bool, ...] = ()  # by liar: whether the last roster refused its work as that of a proven liar


@dataclass(frozen=True)
class Bench:
    """What a liar knows when it judges: it waits until every honest judge has spoken."""

    round: int
    place: int  # of this judge among the liars who judge, from 0
    own: tuple[bytes, ...]  # commits of the liars
    honest: tuple[bytes, ...]  # commits of honest peers
    said: Mapping[str, Mapping[bytes, int]]  # by honest judge: what it measured of each commit, micro-bits


class Lie:
    """What liars offer, when, and what they say as judges. This one offers honest work."""

    late = False  # they commit when honest contributions are revealed: no honest cut has their commits
    joins = 0  # round in which they come; from 0 they are among the first validators, else they must earn that
    sleeps = 0  # rounds in which they behave
    strikes_once = False  # they lie in one round only, the first after they slept that one of them leads …
    claims = 1  # samples, for each that they have
    fools = False  # … and what they offer there is the best that any honest judge measures
    by_heart = False  # they train on the text that judges draw from
    one_name = False  # they are one peer under many names
    begins = 0  # round from which on what they offer lies, where they lie as judges before

    @property
    def first(self) -> int:
        """The round from which on their contributions lie."""
        return max(self.begins, self.sleeps, self.joins)

    def again(self) -> Lie:
        """The same lie, told for the first time."""
        return type(self)()

    def labels(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Labels of the data that liars train on."""
        return labels

    def offer(self, seen: Seen) -> Floats:
        """(f, P)"""
        return seen.own

    def false(self, seen: Seen) -> Sequence[Collection[int]]:
        """By liar: the stretches of its record that are not steps of its own on the data drawn for it.

        All of them where its contribution does not follow from its states, as every audit finds that.
        """
        return [NONE] * len(seen.own)

    def scores(self, bench: Bench) -> Mapping[bytes, int | None]:
        """The gain that one of them claims of each commit, micro-bits; None: it says that it has not seen it."""
        return dict.fromkeys(bench.own, MAX_GAIN) | dict.fromkeys(bench.honest)


@dataclass
class Course:
    """A run so far."""

    phi: Floats
    moved: list[Floats] = field(default_factory=list)
    accepted: int = 0  # contributions of liars in rosters
    refused: int = 0  # contributions of honest peers that rosters refused
    honest: int = 0  # contributions of honest peers that were offered
    shares: list[dict[str, float]] = field(default_factory=list)  # of the weight, by peer, in each round
    worked: list[dict[str, float]] = field(default_factory=list)  # share of each peer's round that was its own work
    reverts: int = 0
    strike: float = 0.0  # how far the one strike took the parameters, by the median norm of what honest peers offered
    harm: float = 0.0  # bits of held-out loss that it cost
    undone: bool = False  # whether the next roster went back
    unseated: int = 0  # honest validators who are none any more as a minority said that they are silent
    lapsed: int = 0  # … or as too little of their work was accepted
    captured: int | None = None  # round from which on liars were half of the validators or more


def undefended(
    task: Task,
    lie: Lie,
    liars: int,
    rounds: int,
    *,
    codec_name: str = "fp32",
    lr: float = 1.0,
    momentum: float = 0.0,
) -> Floats:
    """The parameters after `rounds` of the mean of what everybody offers, by the samples that each says it has.

    What travels, and the outer step, are those of the open swarm with the same arguments.
    """
    rng, lossless = np.random.default_rng(7), codec_name == "fp32" and (lr, momentum) == (1.0, 0.0)
    moving, moved = OuterState.start(task.start()), list[Floats]()
    feedback = [ErrorFeedback(codec(codec_name), task.parameters, decay=DECAY) for _ in range(task.peers)]
    before = _feed(task, lie, liars)
    honest_peers = task.peers - liars
    for number in range(rounds):
        phi, encoding = moving.parameters, codec_in(number, codec_name)
        deltas = task.train(np.stack([each.taken_from(phi) for each in feedback]) if momentum else phi, round=number)
        honest, own = np.split(deltas, [honest_peers])
        if not lossless:
            honest = np.stack([_travelled(each, encoding, x) for each, x in zip(feedback, honest, strict=False)])
        if liars and number >= max(lie.joins, lie.sleeps):
            leads = bool(rng.random() < liars / task.peers)
            foreseen = leads and rng.random() < liars / task.peers
            asked, shunned = (NONE,) * (liars if foreseen else 0), (False,) * liars  # nobody audits
            own = lie.offer(Seen(number, honest, own, moved, rng, task, phi, leads, asked, shunned)).astype(np.float32)
        if not lossless:
            own = np.stack([encoding.decode(encoding.encode(x), task.parameters) for x in own]) if liars else own
        deltas = np.concatenate([honest, own]) if number >= lie.joins else honest
        claimed = np.repeat(np.float32([1, lie.claims]), [honest_peers, len(deltas) - honest_peers])
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.average(deltas, axis=0, weights=claimed / claimed.mean()).astype(np.float32)
        try:
            moving = outer_step(moving, mean, lr=lr, momentum=momentum, resting=True)
        except ValueError:  # the parameters are infinite: there is nothing left to train
            moving = OuterState.start(np.full_like(phi, np.inf))
            break
        moved.append(phi - moving.parameters)
    task.labels, task.by_heart = before, 0
    return moving.parameters


def _travelled(feedback: ErrorFeedback, encoding: Codec, delta: Floats) -> Floats:
    """What others receive of a contribution; what is left out is added to the next one."""
    feedback.codec = encoding
    raw = feedback.encode(delta)
    feedback.commit()
    return encoding.decode(raw, feedback.size)


class OpenSwarm:
    """The same peers on an open chain, all of them validators but who joins later; the last `liars` of them lie."""

    def __init__(
        self,
        task: Task,
        lie: Lie,
        liars: int,
        *,
        codec_name: str,
        lr: float = 1.0,
        momentum: float = 0.0,
        audits: bool = True,
    ) -> None:
        """`lr`, `momentum`: of the outer step; with momentum, local parameters carry residuals, as they do in nodes."""
        self._task, self._lie, self._codec = task, lie, codec_name
        self._lr, self._momentum = lr, momentum
        self._everybody = task.names  # the liars are the last of them
        self._liars = set(self._everybody[task.peers - liars :])
        self._names = self._present(0)
        self._audits = Audits(self._everybody) if audits else None
        self._shunned: set[str] = set()  # whose work the last roster refused as that of a proven liar
        self._chain: ChainState = genesis(RUN, tuple(self._names), window=WINDOW)
        self._feedback = {
            name: ErrorFeedback(codec(codec_name), task.parameters, decay=DECAY) for name in self._everybody
        }
        self._rng = np.random.default_rng(7)
        self._before: OuterState | None = None
        self._struck = -1  # round of the one strike
        self.course = Course(task.start())
        self._moving = OuterState.start(self.course.phi)

    def run(self, rounds: int) -> Course:
        before = _feed(self._task, self._lie, len(self._liars))
        for number in range(rounds):
            self._round(number)
        self._task.labels, self._task.by_heart = before, 0
        return self.course

    def _round(self, number: int) -> None:
        chain, course = self._chain, self.course
        self._names, lying = self._present(number), self._lying(number)
        starts = [self._feedback[n].taken_from(course.phi) if self._momentum else course.phi for n in self._everybody]
        deltas = self._task.train(np.stack(starts), round=number)
        raws, false = self._encode(deltas, lying, number)
        offers = {name: self._offer(name, raws[name]) for name in self._names}
        values = {offers[name].id: codec(self._codec).decode(raws[name], self._task.parameters) for name in offers}
        quoted = self._quoted(offers, values, lying)
        made = block(chain, RULES, quoted)
        assert made.roster is not None
        by_id = {offers[name].id: name for name in offers}
        counted = [(by_id[entry.commit], entry) for entry in made.roster.accepted]
        was = self._moving
        if made.roster.revert:
            assert self._before is not None
            self._moving, course.reverts = self._before, course.reverts + 1
        else:
            self._moving = apply_contributions(
                self._moving,
                [raws[name] for name, _ in counted],
                [Factor(entry.weight, entry.clip, made.roster.total) for _, entry in counted],
                lr=self._lr,
                momentum=self._momentum,
                codec_name=self._codec,
            )
        course.phi = self._moving.parameters
        self._note_strike(
            number, was.parameters, [offers[name].norm for name in offers if name not in lying], made.roster.revert
        )
        self._before = was
        course.moved.append(was.parameters - course.phi)
        self._settle({name for name, _ in counted}, deltas, lying)
        course.accepted += sum(name in lying for name, _ in counted)
        course.honest += len(self._names) - len(lying)
        course.refused += len(self._names) - len(lying) - sum(name not in lying for name, _ in counted)
        course.shares.append({name: entry.weight / max(1, made.roster.total) for name, entry in counted})
        course.worked.append({name: 1 - len(false.get(name, NONE)) / len(ALL) for name in self._names})
        verdicts = {by_id[entry.commit]: entry.verdict for entry in made.roster.entries}
        self._shunned = {name for name, verdict in verdicts.items() if verdict == Refusal.NO_STANDING}
        if self._audits is not None:
            measured = [name for name, verdict in verdicts.items() if verdict in MEASURED]
            seed = checks_seed(chain, made.chain.seed, leaders(chain)[0], quoted.scores)
            self._audits.after(seed, set(self._names) - self._liars, measured, false)
        silent = {validator for validator, times in next_silent(chain, quoted.cuts).items() if times >= SILENCE}
        if 2 * len(self._liars.intersection(chain.validators)) >= len(chain.validators) and course.captured is None:
            course.captured = number
        course.unseated += len(silent - self._liars) if course.captured is None else 0
        course.lapsed += len(set(chain.validators).difference(made.chain.validators, self._liars, silent))
        self._chain = made.chain

    def _present(self, number: int) -> list[str]:
        """Who takes part in this round: liars, who are the last, once they have joined."""
        return [name for name in self._everybody if number >= self._lie.joins or name not in self._liars]

    def _lying(self, number: int) -> set[str]:
        """Who lies in this round."""
        if number < max(self._lie.joins, self._lie.sleeps):
            return set()
        if self._lie.strikes_once:
            if self._struck >= 0 or leaders(self._chain)[0] not in self._liars:
                return set()
            self._struck = number
        return self._liars

    def _note_strike(self, number: int, was: Floats, norms: list[float], reverted: bool) -> None:
        """What the one strike did, and whether the round after it was a revert."""
        if number == self._struck:
            self.course.strike = norm_of(was - self.course.phi) / sorted(norms)[(len(norms) - 1) // 2]
            before, after = self._task.losses(np.stack([was, self.course.phi]), seed=1, samples=4000)
            self.course.harm = float(after - before)
        if number == self._struck + 1 and self._struck >= 0:
            self.course.undone = reverted

    def _encode(
        self, deltas: Floats, lying: set[str], number: int
    ) -> tuple[dict[str, bytes], dict[str, Collection[int]]]:
        """What each peer offers, as bytes, and which stretches of the liars' records are false."""
        honest = [name for name in self._names if name not in lying]
        encoding = codec_in(number, self._codec)
        for feedback in self._feedback.values():
            feedback.codec = encoding
        raws = {name: bytes(self._feedback[name].encode(deltas[self._names.index(name)])) for name in honest}
        false: dict[str, Collection[int]] = {}
        if lying:
            theirs = np.stack([codec(self._codec).decode(raws[name], self._task.parameters) for name in honest])
            moved, leads = self.course.moved, leaders(self._chain)[0] in lying
            own = deltas[len(honest) :]
            asked = self._asked(sorted(lying))
            shunned = tuple(name in self._shunned for name in sorted(lying))
            seen = Seen(number, theirs, own, moved, self._rng, self._task, self.course.phi, leads, asked, shunned)
            with np.errstate(over="ignore"):
                lies = self._lie.offer(seen).astype(np.float32)
            raws |= {name: bytes(encoding.encode(lie)) for name, lie in zip(sorted(lying), lies, strict=True)}
            false = dict(zip(sorted(lying), self._lie.false(seen), strict=True))
        return raws, false

    def _asked(self, lying: Sequence[str]) -> tuple[frozenset[int], ...]:
        """By liar the stretches that audits may repeat, where both who know what draws them lie; else nothing."""
        chain, (leader, other, *_) = self._chain, leaders(self._chain)
        if not {leader, other} <= self._liars:
            return ()
        seed = block(chain, RULES, fair(chain, [])).chain.seed
        seed = checks_seed(chain, seed, leader, [scores(chain, other, [])])
        auditors = [name for name in self._names if name not in self._liars]
        draws = {auditor: whom(seed, auditor, self._names) for auditor in auditors}
        return tuple(
            frozenset(drawn(seed, auditor, author) for auditor in auditors if draws[auditor] == author)
            for author in lying
        )

    def _offer(self, name: str, raw: bytes) -> Offer:
        norm = norm_of(opened(raw, self._task.parameters, codec_name=self._codec))
        return offered(self._chain, name, root=id_of(raw), norm=norm)

    def _quoted(self, offers: dict[str, Offer], values: dict[bytes, Floats], lying: set[str]) -> Quoted:
        """What the leader quotes: all who were heard, liars and honest."""
        chain = self._chain
        false, true = [offers[name].id for name in sorted(lying)], [offers[n].id for n in offers if n not in lying]
        everything, authors = sorted(values), {one.id: name for name, one in offers.items()}
        clipped, halfway = self._step(offers, values)
        cuts, scored, said = {}, {}, {}
        for judge in judges(chain):
            if judge in lying:
                continue
            gains, undo = self._measure(judge, list(values), clipped, halfway)
            if self._lie.fools:
                gains |= dict.fromkeys(false, max(gains.values()))
            cuts[judge] = cut(chain, judge, true if self._lie.late else everything)
            rows = [row(id, gain, standing=self._standing(judge, authors[id])) for id, gain in gains.items()]
            scored[judge] = scores(chain, judge, rows, undo=undo)
            said[judge] = gains
        others = [name for name in self._names if name not in lying]
        for place, judge in enumerate(name for name in judges(chain) if name in lying):
            told = self._lie.scores(Bench(chain.round, place, tuple(false), tuple(true), said))
            cuts[judge] = cut(chain, judge, false if self._lie.late else everything, absent=others)
            rows = [row(id, 0, found=MISSING) if gain is None else row(id, gain) for id, gain in told.items()]
            scored[judge] = scores(chain, judge, rows, undo=MAX_GAIN)
        return quote(list(cuts.values()), list(scored.values()), offers.values())

    def _standing(self, judge: str, author: str) -> int:
        """What an honest judge says of an author in its scores."""
        return FULL_STANDING if self._audits is None else self._audits.standing(judge, author)

    def _step(self, offers: dict[str, Offer], values: dict[bytes, Floats]) -> tuple[Floats, Floats]:
        """Each contribution as it is clipped, (n, P) in the order of `values`; halfway along the step of all, (P,)."""
        norms = {one.id: one.norm for one in offers.values()}
        solid = {one.id for name, one in offers.items() if name in self._chain.validators} or set(norms)
        norm = min(median_norm([norms[id] for id in solid]), longest_norm(self._chain))
        units = np.array(clip_units([norms[id] for id in values], norm))
        with np.errstate(over="ignore", invalid="ignore"):
            clipped = (self._lr * units / CLIP_UNIT).astype(np.float32)[:, None] * np.stack(list(values.values()))
            return clipped, self.course.phi - clipped[[id in solid for id in values]].mean(axis=0) / 2

    def _measure(
        self, judge: str, ids: Sequence[bytes], clipped: Floats, halfway: Floats
    ) -> tuple[dict[bytes, int], int | None]:
        """What an honest judge measures: the share of each contribution; and what the last roster cost, if suspect."""
        task, phi = self._task, self.course.phi
        before = self._before.parameters if self._before is not None else phi
        seed, count = batch_seed(judge.encode(), self._chain.seed), sequences_for(task.trained)
        with np.errstate(over="ignore", invalid="ignore"):
            direction = task.slope(halfway, seed, 0, count)
            unsuspected = MICRO * float(direction @ (phi - before)) < SUSPECT * RULES.revert_above
            gains = _micro(clipped @ direction)
            if unsuspected:
                return dict(zip(ids, gains, strict=True)), None
            now, was = task.losses(np.stack([phi, before]), seed=seed, samples=count * SEQUENCE)
            return dict(zip(ids, gains, strict=True)), _micro(np.array([now - was]))[0]

    def _settle(self, accepted: set[str], deltas: Floats, lying: set[str]) -> None:
        """Work that did not count goes back to the residual, at most one norm of it."""
        for place, name in enumerate(self._names):
            feedback = self._feedback[name]
            if name in accepted and feedback.pending:
                feedback.commit()
            elif feedback.pending:
                feedback.rollback()
                feedback.fade()
                feedback.give_back(deltas[place], norm_of(deltas[place]))


def _feed(task: Task, lie: Lie, liars: int) -> np.ndarray:
    """Give the liars the labels that they want, or the text that judges draw from; the labels before."""
    before = task.labels
    if liars:
        task.by_heart = liars if lie.by_heart else 0
        task.labels = before.copy()
        task.labels[task.peers - liars :] = lie.labels(before[task.peers - liars :], task.classes)
    return before


def _micro(bits: np.ndarray) -> list[int]:
    """As scores say it."""
    found = np.nan_to_num(MICRO * bits.astype(np.float64), nan=-MAX_GAIN, posinf=-MAX_GAIN)
    return [int(one) for one in found.clip(-MAX_GAIN, MAX_GAIN).round()]
