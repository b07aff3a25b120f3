"""What an auditor looks at, and what it finds: pure functions over records of work (`trace.py`).

**Whom it looks at, which stretch of that work, and how often.** Whoever knows the seed draws the same.

    whom(seed, auditor, authors)                     # an author, whom nobody else may ask
    which(seed, auditor, author, trace)              # a stretch, each as likely as it has steps
    budget = AuditBudget(0.05); budget.earn(seconds) # a share of what this node computes …
    budget.spend(cost)                               # … is spent on audits

`seed` follows from the roster that lists the work (`chain.rules.checks_seed`): nobody knew it who committed. It puts
all who took part in a ring, in which each may look at the next.

**How far a replay ends from what its author claims, and how far honest ones do.**

    found = distance(start, claimed, replayed)
    tolerance = calibrated([...])                     # distances of this node's replays of its own work
    found.within(tolerance)

All three are relative: of the step vector (claimed end - start) from the replayed one, and of both moments. Honest
machines differ in the order in which they add; the cheapest lies are far away (docs/reputation.md, "Audits"). LEAST is
between the two, and what a node measures on itself raises it, up to MOST: who would need more cannot audit.

**Whether a contribution is what the record of its author's work leads to:** encoding and error feedback done again.

    check_form(trace, …); check_follows(trace, before, …)       # whether the record is one, and goes on where it says
    check_left_over(residual, offer_before)                     # by what the round before left over
    end = walk(trace, start, ends=…, states=…)                  # through all legs, to what was offered
    explains(raw, start - end, residual, codec)                 # whether the contribution is that

All of it is elementwise arithmetic that the author did as well, so it agrees to the last bit but for one factor: the
norm to which a residual is clipped is a sum, whose order machines choose. NEAR is far above that and far below a lie.
`Wrong` says what does not agree; a state that is not here raises KeyError, and says nothing about the author.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import numpy as np

from swarmnode.training.codecs import Codec
from swarmnode.training.codecs.feedback import ErrorFeedback, norm_in_float64
from swarmnode.training.mapped import Vector
from swarmnode.training.verify.trace import MAX_LEGS, Origin, State, Stretch, Trace, vector_id

SAVED = 4.0  # audits that may be saved up, so that a node which trained alone does not audit in a burst


def whom(seed: bytes, auditor: str, authors: Iterable[str]) -> str | None:
    """The author whom this auditor, one of them, may ask for its work in this round; None where there is no other."""
    return _next(seed, auditor, authors, 1)


def by_whom(seed: bytes, author: str, authors: Iterable[str]) -> str | None:
    """The auditor who may ask this author."""
    return _next(seed, author, authors, -1)


def _next(seed: bytes, peer: str, authors: Iterable[str], step: int) -> str | None:
    ring = sorted(authors, key=lambda author: (_draw(b"author", seed, author), author))
    return ring[(ring.index(peer) + step) % len(ring)] if peer in ring and len(ring) > 1 else None


def which(seed: bytes, auditor: str, author: str, trace: Trace) -> Stretch | None:
    """The stretch that this auditor repeats: that of a step drawn among all; None where there are no steps."""
    if not trace.steps:
        return None
    at = int.from_bytes(_draw(b"step", seed, auditor + " " + author)[:8], "big") % trace.steps
    ends = list(accumulate(stretch.steps for stretch in trace.stretches))
    return trace.stretches[bisect_right(ends, at)]


class AuditBudget:
    """Seconds of computing that may go into audits: a share of those that went into training."""

    def __init__(self, share: float) -> None:
        """`share`: 0 to 1."""
        self._share = share
        self.saved = 0.0
        self.earned = 0.0
        self.spent = 0.0

    def earn(self, seconds: float) -> None:
        self.saved += self._share * seconds
        self.earned += self._share * seconds

    def affords(self, cost: float) -> bool:
        """Whether an audit of so many seconds fits; what is saved is bounded by SAVED of them."""
        self.saved = min(self.saved, SAVED * cost)
        return self.saved >= cost > 0

    def spend(self, seconds: float) -> None:
        """So many seconds were spent, perhaps more than was thought: then the next audit waits for longer."""
        self.saved -= seconds
        self.spent += seconds


def _draw(purpose: bytes, seed: bytes, whose: str) -> bytes:
    digest = hashlib.sha256(b"swarmnode/audit/2\0" + purpose)
    for part in (seed, whose.encode()):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


LEAST = 0.02
MOST = 0.05
MARGIN = 10.0  # times what a node's replays of its own work differ by, as other hardware may add in other orders


@dataclass(frozen=True)
class Distance:
    """Relative Euclidean distances, 0 for equal ones; infinite where one is not finite."""

    parameters: float
    first: float
    second: float

    @property
    def greatest(self) -> float:
        return max(self.parameters, self.first, self.second)

    def within(self, tolerance: float) -> bool:
        """Whether all three are; the second moments, being squares, may be twice as far."""
        return max(self.parameters, self.first, self.second / 2) <= tolerance


def distance(start: State, claimed: State, replayed: State) -> Distance:
    second = start.parameters.size  # where second moments begin, if there are any
    if claimed.updates != replayed.updates or claimed.moments.size != replayed.moments.size:
        return Distance(math.inf, math.inf, math.inf)
    return Distance(
        apart(claimed.parameters - start.parameters, replayed.parameters - start.parameters),
        apart(claimed.moments[:second], replayed.moments[:second]),
        apart(claimed.moments[second:], replayed.moments[second:]),
    )


def calibrated(own: Iterable[Distance]) -> float | None:
    """The tolerance of a node whose replays of its own work ended so far from it; None where it could not tell lies."""
    greatest = max((found.greatest for found in own), default=math.inf)
    return None if MARGIN * greatest > MOST else max(LEAST, MARGIN * greatest)


NEAR = 1e-3  # relative distance
DECAY = 0.95  # of the residual in each round (SparseLoCo)


class Wrong(Exception):
    """The author's own vectors contradict what it signed. The message says where."""


@dataclass(frozen=True)
class Offered:
    """The contribution before, and what its round made of it."""

    residual: Vector  # (P,), before it
    delta: Vector  # (P,), the pseudo-gradient
    raw: bytes | bytearray | memoryview  # as it was offered
    codec: Codec  # by which it was to be encoded
    accepted: bool
    returned: float  # share of it that was clipped off, 0 to 1


def residual_after(offer: Offered) -> Vector:
    """What error feedback keeps after that round, (P,). Raises Wrong where the contribution does not follow itself."""
    feedback = explains(offer.raw, offer.delta, offer.residual, offer.codec)
    if not offer.accepted:
        feedback.rollback()
        feedback.fade()
        feedback.give_back(offer.delta)
    else:
        feedback.commit()
        if offer.returned > 0:
            sent = feedback.codec.decode(offer.raw, feedback.size)
            feedback.give_back(sent * np.float32(offer.returned), norm_in_float64(sent))
    return feedback.export()


def check_left_over(residual: Vector, before: Offered) -> None:
    """Raises Wrong where a residual (P,) is not what the round before left."""
    if not apart(residual, residual_after(before)) <= NEAR:
        raise Wrong("what it says was left over is not what the round before left")


def walk(trace: Trace, start: Vector, *, ends: Mapping[bytes, Vector], states: Mapping[bytes, Vector]) -> Vector:
    """The parameters (P,) that were offered, from those at the trace's beginning.

    `ends`: vectors by id, of the end of each leg at least; `states`: the shared parameters after each roster. Raises
    Wrong; KeyError for what is not there.
    """
    at, base = start, trace.base
    for leg in trace.legs:
        if leg.base:
            since = start if leg.since_offer else states[base]
            at = states[leg.base] + (at - since)
            base = leg.base
        if leg.stretches:
            if vector_id(at) != leg.stretches[0].start.parameters:
                raise Wrong("a leg does not begin where the one before and the shared state lead")
            at = ends[leg.stretches[-1].end.parameters]
    if vector_id(at) != trace.end:
        raise Wrong("what was offered is not where the steps led")
    return at


def explains(raw: bytes | bytearray | memoryview, delta: Vector, residual: Vector, codec: Codec) -> ErrorFeedback:
    """The error feedback that made these bytes of the pseudo-gradient and what was left over. Raises Wrong."""
    feedback = ErrorFeedback(codec, residual.size, decay=DECAY)
    feedback.restore(np.asarray(residual, np.float32))
    expected = feedback.codec.decode(bytes(feedback.encode(delta)), feedback.size)
    told = feedback.codec.decode(raw, feedback.size)
    if apart(told, expected) > NEAR:
        raise Wrong(f"the contribution is {apart(told, expected):.3g} away from what its author's steps come to")
    return feedback


def check_form(trace: Trace, *, round: int, way: Sequence[bytes], longest: int) -> None:
    """Raises Wrong for what no honest node records of its work for a round.

    `way`: rosters up to the one that the round is on, as many as are known; `longest`: steps of a stretch in this run.
    """
    if any(stretch.steps > longest for stretch in trace.stretches):
        raise Wrong("stretches of more steps than the run has")
    if any(stretch.round > round for stretch in trace.stretches):
        raise Wrong("steps of rounds to come")
    if trace.origin is Origin.UNLINKED:
        return
    if not trace.base:
        raise Wrong("it begins nowhere")
    bases = [trace.base, *(leg.base for leg in trace.legs if leg.base)]
    whole = len(way) > min(round, MAX_LEGS)  # else it may begin before what is known
    if bases[-1] != way[-1] or (whole and bases != [id for id in way if id in bases]):
        raise Wrong("its steps do not lead from one shared state to the next, up to that of the round")


def has_moments(trace: Trace) -> bool:
    """Whether the first step began with moments of steps before."""
    none = vector_id(np.zeros(0, np.float32))
    return any(first.start.updates > 0 or first.start.moments != none for first in trace.stretches[:1])


def check_follows(trace: Trace, before: Trace, *, parent: bytes) -> None:
    """Raises Wrong where a record does not go on where the one before ended, whose round was on `parent`."""
    if before.end != trace.start or trace.base != parent:
        raise Wrong("it does not begin where its contribution before ended")
    if before.stretches and trace.stretches:
        last, first = before.stretches[-1], trace.stretches[0]
        if (last.end.moments, last.end.updates) != (first.start.moments, first.start.updates):
            raise Wrong("its moments are not those that its contribution before ended with")
        goes_on = last.step + last.steps if first.round == last.round else 0
        if first.round < last.round or first.step != goes_on:
            raise Wrong("steps that were left out or repeated")


def apart(told: Vector, expected: Vector) -> float:
    """Relative Euclidean distance; infinite where one is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        off, length = norm_in_float64(told - expected), norm_in_float64(expected)
    if not math.isfinite(off) or not math.isfinite(length):
        return math.inf
    return 0.0 if off == 0 else off / length if length > 0 else math.inf


class Verdict(Enum):
    HELD = "held up"
    LIED = "does not hold up"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True)
class Audit:
    """One audit with its evidence: whoever is shown the same states can repeat it."""

    round: int
    author: str
    verdict: Verdict
    why: str
    commit: bytes  # id of the record that binds the author
    trace: bytes = b""  # root of the record of its work
    seed: bytes = b""  # which drew author and stretch
    stretch: tuple[int, int, int] = (0, 0, 0)  # round, first step, steps
    start: bytes = b""  # id of the parameters before
    end: bytes = b""  # and of those after
    distance: float = 0.0  # relative, the greatest of parameters and moments
    tolerance: float = 0.0
