"""How simulated workers train together: synchronously, by `diloco`, or by `open`.

    outcome = train(Arm("diloco", steps=480, lr=1e-3, interval=30, codec="int8", outer_lr=0.7, momentum=0.6),
                    workers, start=phi, stream="continued", every=60, say=print)

Each method is the daemon's arithmetic without its network: the same codecs, residuals, sums, clip and outer step, on
bytes that were really encoded. What is counted are the bytes of contributions and means, not of the messages around
them, sent by a node on average; it receives as many.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from learned.workers import DataParallel, Vector, Workers
from swarmnode.protocols.chain.rules import work_units
from swarmnode.protocols.methods.known.messages import RoundRoster, Seat, parts
from swarmnode.protocols.methods.open.judge import MICRO
from swarmnode.training.codecs import codec, codec_in
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.inner import InnerLoop
from swarmnode.training.open_step import (
    CLIP_UNIT,
    Factor,
    apply_contributions,
    clip_units,
    exact_norm,
    inner_product,
    norm_of,
    sequences_for,
)
from swarmnode.training.outer import OuterState, outer_step, weighted_sum
from swarmnode.training.runspec import RunSpec

JUDGES = 3  # of a round, taking turns; nobody judges what it made itself


@dataclass(frozen=True)
class Arm:
    """One way to spend `steps` steps of every worker."""

    method: str  # synchronous, diloco, open
    steps: int
    lr: float  # of the inner optimizer
    interval: int = 1  # H, inner steps in a round
    codec: str = "fp32"
    outer_lr: float = 1.0
    momentum: float = 0.0
    decay: float = 1.0  # of the residual


@dataclass(frozen=True)
class Outcome:
    """What an arm led to."""

    parameters: Vector
    curve: tuple[tuple[int, float], ...]  # steps done, held-out bits per byte
    bytes_per_node: float  # sent, and as many received
    accepted: float  # share of contributions that counted


class Method(Protocol):
    """What happens between two evaluations."""

    sent: int  # bytes of all workers together
    offered: int  # contributions
    counted: int

    def advance(self, round: int) -> Vector:
        """Train and exchange once; the shared parameters after it."""


def train(
    arm: Arm, workers: Workers, *, start: Vector, stream: str, every: int, say: Callable[[int, float], None]
) -> Outcome:
    """Train from `start` and measure each `every` steps, a multiple of the interval, and at the end."""
    spec = workers.size.spec(seed=workers.seed, lr=arm.lr, steps=every if arm.method == "synchronous" else arm.interval)
    method = METHODS[arm.method](arm, workers, spec, start, stream)
    curve = [(0, workers.heldout(start))]
    parameters = start
    for round in range(arm.steps // spec.inner.steps):
        parameters = method.advance(round)
        done = (round + 1) * spec.inner.steps
        if done % every == 0 or done == arm.steps:
            curve.append((done, workers.heldout(parameters)))
            say(*curve[-1])
    share = method.counted / method.offered if method.offered else 1.0
    return Outcome(parameters, tuple(curve), method.sent / workers.size.workers, share)


class Synchronous:
    """One data-parallel run: AdamW with the mean gradient of all workers in every step, a ring all-reduce of fp32."""

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._spec = spec
        self._nodes = workers.size.workers
        self._vector = torch.from_numpy(start.copy())
        task = DataParallel(workers, self._vector)
        self._loop = InnerLoop(spec, task, peer_id=f"all/{stream}", vector=self._vector, keep=True)

    def advance(self, round: int) -> Vector:
        steps = self._spec.inner.steps
        self._loop.train(round=round, steps=steps, seconds=float("inf"), between=lambda: False)
        self.sent += steps * 2 * (self._nodes - 1) * codec("fp32").encoded_size(len(self._vector))
        return self._vector.numpy().copy()


class Diloco:
    """The butterfly of protocols/methods/known/allreduce.py among members who all answer."""

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._arm, self._workers = arm, workers
        self._state = OuterState.start(start)
        self._codec = codec(arm.codec)
        self._left = [ErrorFeedback(self._codec, workers.parameters, decay=arm.decay) for _ in workers.peers]
        self._left_of_means = [ErrorFeedback(self._codec, workers.parameters, decay=arm.decay) for _ in workers.peers]
        seats = tuple(Seat(peer, arm.interval * workers.size.batch, 1) for peer in workers.peers)
        self._roster = RoundRoster("0" * 64, 0, 0, "0" * 64, seats, (), 1.0)
        workers.begin(spec, stream=stream)

    def advance(self, round: int) -> Vector:
        workers, roster = self._workers, self._roster
        deltas = workers.train([self._state.parameters] * len(workers.peers), round=round, steps=self._arm.interval)
        cut = parts(roster, workers.parameters)

        def encode(given: tuple[ErrorFeedback, Vector]) -> list[memoryview]:
            left, delta = given
            return [left.encode_range(part.start, part.stop, delta[part.start : part.stop]) for part in cut]

        encoded = workers.map(encode, zip(self._left, deltas, strict=True))
        mean = np.empty(workers.parameters, np.float32)
        for index, part in enumerate(cut):
            size = part.stop - part.start
            decoded = [self._codec.decode(of_worker[index], size) for of_worker in encoded]
            total = weighted_sum(decoded, [seat.weight for seat in roster.seats])
            owner = workers.peers.index(part.owner)
            reduced = self._left_of_means[owner].encode_range(part.start, part.stop, total)
            mean[part.start : part.stop] = self._codec.decode(reduced, size)
            self.sent += sum(len(raws[index]) for number, raws in enumerate(encoded) if number != owner)
            self.sent += len(reduced) * (len(workers.peers) - 1)
        for left in (*self._left, *self._left_of_means):
            left.commit()
        self.offered += len(deltas)
        self.counted += len(deltas)
        self._state = outer_step(self._state, mean, lr=self._arm.outer_lr, momentum=self._arm.momentum)
        return self._state.parameters


class Open:
    """Rounds of the open exchange among honest nodes: contribute, gate, clip, apply in the roster's order.

    With outer momentum, workers begin where their residual has them (protocols/methods/open/local.py). Every
    contribution is fetched by everybody else, so that a node sends and receives R - 1 of them on average.
    """

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._arm, self._workers, self._stream = arm, workers, stream
        self._state = OuterState.start(start)
        self._left = [ErrorFeedback(codec(arm.codec), workers.parameters, decay=arm.decay) for _ in workers.peers]
        workers.begin(spec, stream=stream)

    def advance(self, round: int) -> Vector:
        workers, size, arm = self._workers, self._workers.parameters, self._arm
        shared = self._state.parameters
        starts = [left.taken_from(shared) if arm.momentum > 0 else shared for left in self._left]
        deltas = workers.train(starts, round=round, steps=arm.interval)
        for left in self._left:
            left.codec = codec_in(round, arm.codec)
        raws = workers.map(lambda pair: pair[0].encode(pair[1]), zip(self._left, deltas, strict=True))
        units = self._units(round, raws)
        accepted = [unit > 0 for unit in units]
        roster = [raw for raw, good in zip(raws, accepted, strict=True) if good]
        clips = clip_units([exact_norm(raw, size, codec_name=arm.codec) for raw in roster])
        self._state = apply_contributions(
            self._state,
            roster,
            [Factor(unit, clip, sum(units)) for unit, clip in zip(filter(None, units), clips, strict=True)],
            lr=arm.outer_lr,
            momentum=arm.momentum,
            codec_name=arm.codec,
        )
        clip_of = iter(clips)
        for left, raw, delta, good in zip(self._left, raws, deltas, accepted, strict=True):
            if good:
                left.commit()
                sent = left.codec.decode(raw, size)
                left.add(sent * np.float32(1 - next(clip_of) / CLIP_UNIT), norm_of(sent))  # what was clipped
            else:  # work that did not count is offered again
                left.rollback()
                left.fade()
                left.add(delta, norm_of(delta))
        self.offered += len(raws)
        self.counted += len(roster)
        self.sent += sum(len(raw) for raw in raws) * (len(workers.peers) - 1)
        return self._state.parameters

    def _units(self, round: int, raws: list[memoryview]) -> list[int]:
        """Work of each contribution by the rules of the chain; each judge draws windows of its own."""
        workers, state, arm, count = self._workers, self._state, self._arm, len(self._workers.peers)
        clips = clip_units([exact_norm(raw, workers.parameters, codec_name=arm.codec) for raw in raws])
        equal = [Factor(1, clip, len(raws)) for clip in clips]
        after = apply_contributions(state, raws, equal, lr=arm.outer_lr, codec_name=arm.codec).parameters
        sequences = sequences_for(arm.interval * workers.size.batch)

        def judge(number: int) -> list[int]:
            seed = _seed(f"judge {number} of {workers.seed} {self._stream} {round}")
            slopes = [
                workers.slope_on(number, at, seed=seed, first=0, last=sequences) for at in (state.parameters, after)
            ]
            direction = sum(slopes) * np.float32(arm.outer_lr / 2 / CLIP_UNIT)
            return [
                builtins.round(MICRO * clip * inner_product(raw, direction, codec_name=arm.codec))
                for raw, clip in zip(raws, clips, strict=True)
            ]

        judges = [(round * JUDGES + k) % count for k in range(min(JUDGES, count))]
        rows = dict(zip(judges, workers.map(judge, judges), strict=True))
        gains = {bytes([i]): [row[i] for number, row in rows.items() if number != i] for i in range(len(raws))}
        return list(work_units(gains, list(gains)).values())


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


METHODS: dict[str, Callable[[Arm, Workers, RunSpec, Vector, str], Method]] = {
    "synchronous": Synchronous,
    "diloco": Diloco,
    "open": Open,
}
