"""How simulated workers train: synchronously, alone, by `diloco`, `streaming`, `lowrank`,
`demo`, `async`, `open`, by seeds or in pairs.

    outcome = train(Arm("diloco", steps=480, optimizer="muon", interval=30, grows=True, codec="sign"),
                    workers, start=phi, stream="scratch", every=60, say=print)

Each method is the daemon's arithmetic without its network: the same codecs, residuals, sums, clip and outer step, on
bytes that were really encoded. What is counted are the bytes of contributions and means, not of the messages around
them, sent by a node on average; it receives as many.
"""

from __future__ import annotations

import builtins
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from learned.pairs import Gossip
from learned.workers import DataParallel, Size, Vector, Workers
from swarmnode.crdt.kinds import key_of
from swarmnode.crdt.record import write
from swarmnode.protocols.chain.rules import work_units
from swarmnode.protocols.methods.asynchronous import Aged
from swarmnode.protocols.methods.known.messages import RoundRoster, Seat
from swarmnode.protocols.methods.open.judge import MICRO
from swarmnode.protocols.methods.seed import KIND
from swarmnode.testing.consensus import weighted_sum
from swarmnode.testing.parts import parts
from swarmnode.training.codecs import codec, codec_in
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.demo import BETA, dct, idct, signed_step
from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.lowrank import LowRank
from swarmnode.training.open_step import (
    CLIP_UNIT,
    Factor,
    apply_contributions,
    carries,
    clip_units,
    inner_product,
    norm_of,
    opened,
    sequences_for,
)
from swarmnode.training.outer import OuterState, outer_step
from swarmnode.training.runspec import RunSpec
from swarmnode.training.seed import Tally
from swarmnode.training.streaming import Unsettled, ahead, fragments_of, mixed

JUDGES = 3  # of a round, taking turns; nobody judges what it made itself


@dataclass(frozen=True)
class Arm:
    """One way to spend `steps` steps of every worker."""

    method: str  # of METHODS
    steps: int
    lr: float  # of AdamW, inside
    optimizer: str = "adamw"
    muon_lr: float = 4e-3  # of Muon, where that is the optimizer
    interval: int = 1  # H, inner steps in a round at the most
    grows: bool = False  # whether H grows up to that
    codec: str = "fp32"
    outer_lr: float = 1.0
    momentum: float = 0.0
    decay: float = 1.0  # of the residual
    fragments: int = 1  # of streaming, as the three below
    tau: int = 0
    alpha: float = 0.5
    eager: bool = False
    clip: float = 1.0  # of seed
    after: int = 0  # steps of a synchronous run before, from whose end this one goes on
    rank: int = 0  # of lowrank
    speeds: str = ""  # of async: of the workers in turn, the slowest being 1; tau are steps of the fastest
    eps: float = 1e-8  # of AdamW


@dataclass(frozen=True)
class Outcome:
    """What an arm led to."""

    parameters: Vector
    curve: tuple[tuple[int, float, float], ...]  # steps done, held-out bits per byte, next-word accuracy
    rounds: int
    bytes_per_node: float  # sent, and as many received
    clock: float  # what it lasts but for exchanges, in steps of the slowest worker
    accepted: float  # share of contributions that counted
    wire: tuple[tuple[int, float, int], ...]  # bytes that a node sends, inner steps taken meanwhile, so many exchanges


class Method(Protocol):
    """What happens between two evaluations."""

    sent: int  # bytes of all workers together
    offered: int  # contributions
    counted: int
    overlap: float  # inner steps that a worker takes while an exchange is under way; 0: it waits

    def advance(self, round: int, steps: int) -> Vector:
        """Train so many steps and exchange once; the shared parameters after it."""


def train(
    arm: Arm, workers: Workers, *, start: Vector, stream: str, every: int, say: Callable[[int, float], None]
) -> Outcome:
    """Train from `start` and measure after the round that completes each `every` steps, and at the end."""
    spec = spec_of(arm, workers.size, workers.seed, every=every)
    method = METHODS[arm.method](arm, workers, spec, start, stream)
    curve = [(0, *workers.heldout(start))]
    parameters, done, round = start, 0.0, 0
    wire: Counter[tuple[int, float]] = Counter()
    while done < arm.steps:
        steps = min(spec.inner.steps_in(round), math.ceil(arm.steps - done))
        before = method.sent
        parameters = method.advance(round, steps)
        usual = method.sent - before, method.overlap, steps if arm.method == "synchronous" else 1
        for sent, overlap, times in getattr(method, "met", [usual]):
            wire[builtins.round(sent / workers.size.workers / times), overlap] += times
        measured, done, round = done // every, done + getattr(method, "taken", steps), round + 1
        if done // every > measured or done >= arm.steps:
            curve.append((builtins.round(done), *workers.heldout(parameters)))
            say(*curve[-1][:2])
    share = method.counted / method.offered if method.offered else 1.0
    told = tuple((*what, times) for what, times in sorted(wire.items()))
    clock = getattr(method, "clock", float(arm.steps))
    return Outcome(parameters, tuple(curve), round, method.sent / workers.size.workers, clock, share, told)


def spec_of(arm: Arm, size: Size, seed: int, *, every: int = 0) -> RunSpec:
    """The run of an arm. What has no rounds trains `every` so many steps, and is measured."""
    rates = {"lr": arm.lr, "optimizer": arm.optimizer, "muon_lr": arm.muon_lr, "eps": arm.eps}
    if arm.method in ("synchronous", "alone"):
        return size.spec(seed=seed, steps=every, interval="fixed", **rates)
    interval = "growing" if arm.grows else "fixed"
    # Audits can tell lies from rounding only so, and seeds a slope.
    precision = "fp32" if arm.method in ("open", "seed") else size.precision
    clip = {"clip": arm.clip} if arm.method == "seed" else {}
    return size.spec(seed=seed, steps=arm.interval, interval=interval, precision=precision, **rates, **clip).updated(
        run={"trust": "open" if arm.method == "open" else "known"},
        exchange={"method": "gossip" if arm.method == "merge" else arm.method, "codec": arm.codec},
        outer={"lr": arm.outer_lr, "momentum": arm.momentum},
    )


class Synchronous:
    """One data-parallel run: a step on the batches of all workers together, after a ring all-reduce of fp32."""

    overlap = 0

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._nodes = workers.size.workers
        self._vector = torch.from_numpy(start.copy())
        self._loop = InnerLoop(spec, DataParallel(workers), peer_id=f"all/{stream}", vector=self._vector, keep=True)

    def advance(self, round: int, steps: int) -> Vector:
        self._loop.train(round=round, steps=steps, seconds=float("inf"), between=lambda: False)
        self.sent += steps * 2 * (self._nodes - 1) * codec("fp32").encoded_size(len(self._vector))
        return self._vector.numpy().copy()


class Alone:
    """The first worker, on its own batches and its own part of the text: what the others do not bring it."""

    overlap = 0

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._workers, self._parameters = workers, start
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        self._parameters = self._parameters - self._workers.train([self._parameters], round=round, steps=steps)[0]
        return self._parameters


class Butterfly:
    """The all-reduce of protocols/methods/known/allreduce.py, of vectors of one size, among members who all answer."""

    def __init__(self, workers: Workers, name: str, size: int, *, decay: float = 1.0) -> None:
        self.sent = 0  # bytes of all workers together
        self._workers, self._codec, self._size = workers, codec(name), size
        self._left = [ErrorFeedback(self._codec, size, decay=decay) for _ in workers.peers]
        self._left_of_means = [ErrorFeedback(self._codec, size, decay=decay) for _ in workers.peers]
        seats = tuple(Seat(peer, workers.size.batch, 1) for peer in workers.peers)
        self._roster = RoundRoster("0" * 64, 0, 0, "0" * 64, seats, (), 1.0)

    def mean(self, values: list[Vector], weights: Sequence[int] | None = None) -> Vector:
        """Of all workers' values, (size,), as everybody decodes it; they weigh alike where no `weights` are given."""
        workers, roster = self._workers, self._roster
        cut = parts(roster, self._size)

        def encode(given: tuple[ErrorFeedback, Vector]) -> list[memoryview]:
            left, delta = given
            return [left.encode_range(part.start, part.stop, delta[part.start : part.stop]) for part in cut]

        encoded = workers.map(encode, zip(self._left, values, strict=True))
        mean = np.empty(self._size, np.float32)
        for index, part in enumerate(cut):
            size = part.stop - part.start
            decoded = [self._codec.decode(of_worker[index], size) for of_worker in encoded]
            total = weighted_sum(decoded, weights or [seat.weight for seat in roster.seats])
            owner = workers.peers.index(part.owner)
            reduced = self._left_of_means[owner].encode_range(part.start, part.stop, total)
            mean[part.start : part.stop] = self._codec.decode(reduced, size)
            self.sent += sum(len(raws[index]) for number, raws in enumerate(encoded) if number != owner)
            self.sent += len(reduced) * (len(workers.peers) - 1)
        for left in (*self._left, *self._left_of_means):
            left.commit()
        return mean

    def left_over(self) -> list[tuple[Vector, Vector]]:
        """Of each worker: what is left over of its own values, and of the means of its part."""
        return [(own.export(), of_mean.export()) for own, of_mean in zip(self._left, self._left_of_means, strict=True)]


class Diloco:
    """All workers begin each round at the shared parameters, and move them along the mean of how far they came."""

    overlap = 0

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._arm, self._workers = arm, workers
        self._state = OuterState.start(start)
        self._butterfly = Butterfly(workers, arm.codec, workers.parameters, decay=arm.decay)
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        workers, butterfly = self._workers, self._butterfly
        deltas = workers.train([self._state.parameters] * len(workers.peers), round=round, steps=steps)
        mean = butterfly.mean(deltas)
        self.sent = butterfly.sent
        self.offered += len(deltas)
        self.counted += len(deltas)
        self._state = outer_step(self._state, mean, lr=self._arm.outer_lr, momentum=self._arm.momentum)
        return self._state.parameters


class Factored:
    """The two all-reduces of protocols/methods/lowrank.py."""

    def __init__(self, workers: Workers, arm: Arm) -> None:
        self.sent = 0
        self._workers, self._codec = workers, arm.codec
        self._factors = LowRank(layout_of(workers.tasks[0].model), arm.rank)
        self.left: list[Vector] = [np.zeros(workers.parameters, np.float32) for _ in workers.peers]
        self._round = 0

    def mean(self, values: list[Vector]) -> Vector:
        """As in `Butterfly`."""
        factors, count = self._factors, len(values)
        works = [left + value for left, value in zip(self.left, values, strict=True)]
        first = Butterfly(self._workers, self._codec, factors.left)
        bases = factors.bases(first.mean([factors.sketch(work, self._round) for work in works]))
        second = Butterfly(self._workers, self._codec, factors.right(bases))
        given = self._workers.map(lambda work: factors.project(work, bases), works)
        mean = factors.expand(second.mean(given), bases)
        self.left = [
            work - factors.expand(sent - rounded - count * of_mean, bases)
            for work, sent, (rounded, of_mean) in zip(works, given, second.left_over(), strict=True)
        ]
        self.sent += first.sent + second.sent
        self._round += 1
        return mean


class Streaming:
    """One fragment a round (training/streaming.py): sent `tau` steps before the round ends, and applied at its end.

    With `lowrank` all is one fragment, sent as factors.
    """

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self.overlap = arm.tau
        self._arm, self._workers = arm, workers
        self._state = OuterState.start(start)
        self._fragments = fragments_of(layout_of(workers.tasks[0].model), arm.fragments)
        self._butterflies: Sequence[Butterfly | Factored]
        if arm.method == "lowrank":
            self._butterflies = [Factored(workers, arm)]
        else:
            self._butterflies = [Butterfly(workers, arm.codec, fragment.size) for fragment in self._fragments]
        self._local = [start.copy() for _ in workers.peers]
        self._work = [Unsettled(start) for _ in workers.peers]
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        arm, turn = self._arm, round % len(self._fragments)
        fragment, butterfly = self._fragments[turn], self._butterflies[turn]
        outer = {"lr": arm.outer_lr, "momentum": arm.momentum}
        self._train(round, max(1, steps - arm.tau))
        given = [
            work.inside(fragment, local) for work, local in zip(self._work, self._local, strict=True)
        ]  # fmt: skip
        if arm.eager:
            for work, local, own in zip(self._work, self._local, given, strict=True):
                work.move(fragment, local, ahead(fragment, self._state, own, 1 / len(given), **outer))
        if steps > 1:
            self._train(round, min(arm.tau, steps - 1))
        mean = butterfly.mean(given)
        self.sent = sum(each.sent for each in self._butterflies)
        self.offered += len(given)
        self.counted += len(given)
        self._state = fragment.step(self._state, mean, **outer)
        shared = fragment.take(self._state.parameters)
        left = butterfly.left if isinstance(butterfly, Factored) else [np.float32(0)] * len(given)
        for work, local, own, over in zip(self._work, self._local, given, left, strict=True):
            work.settle(fragment, own)
            new = shared - work.inside(fragment, local) - over if arm.eager or arm.method == "lowrank" else None
            work.move(fragment, local, mixed(fragment.take(local), shared, arm.alpha) if new is None else new)
        return self._state.parameters

    def _train(self, round: int, steps: int) -> None:
        for local, delta in zip(
            self._local, self._workers.train(self._local, round=round, steps=steps), strict=True
        ):  # fmt: skip
            local -= delta


class DeMo:
    """The all-gather and the outer step of protocols/methods/demo.py, after each step."""

    overlap = 0

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._workers, self._spec, self._codec = workers, spec, codec(arm.codec)
        self._layout = layout_of(workers.tasks[0].model)
        self._state = OuterState.start(start)
        self._left = [ErrorFeedback(self._codec, workers.parameters, decay=BETA) for _ in workers.peers]
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        workers, inner = self._workers, self._spec.inner
        deltas = workers.train([self._state.parameters] * len(workers.peers), round=round, steps=steps)
        raws = workers.map(lambda pair: pair[0].encode(dct(pair[1])), zip(self._left, deltas, strict=True))
        decoded = workers.map(lambda raw: self._codec.decode(raw, workers.parameters), raws)
        for left in self._left:
            left.commit()
        mean = idct(weighted_sum(decoded, [workers.size.batch] * len(decoded)))
        lr = inner.lr * inner.rate_at(round, 0) * self._spec.outer.lr
        self._state = signed_step(self._state, mean, self._layout, lr=lr, decay=inner.weight_decay)
        self.offered += len(raws)
        self.counted += len(raws)
        self.sent += sum(len(raw) for raw in raws) * (len(raws) - 1)
        return self._state.parameters


class Async:
    """Rounds of `async` on a virtual clock (protocols/methods/asynchronous.py), of workers as fast as `speeds` say.

    A round lasts as long as the fastest's `interval` steps; who is slower takes fewer. The last `tau` steps of the
    fastest are taken while the round's contributions are on the wire, so that they are in the next round's.
    """

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self.taken = self.clock = 0.0  # steps of a worker in the last round, on average; steps of the slowest, so far
        speeds = [int(speed) for speed in arm.speeds.split(":")]
        self._speeds = [speeds[number % len(speeds)] for number in range(len(workers.peers))]
        self._fastest = max(self._speeds)
        self.overlap = arm.tau / self._fastest
        self._arm, self._workers = arm, workers
        self._state = OuterState.start(start)
        (self._whole,) = fragments_of(layout_of(workers.tasks[0].model), 1)
        self._butterfly = Butterfly(workers, arm.codec, workers.parameters, decay=arm.decay)
        self._local = [start.copy() for _ in workers.peers]
        self._work = [Unsettled(start) for _ in workers.peers]
        self._samples = [Aged() for _ in workers.peers]
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        arm, whole, fastest = self._arm, self._whole, self._fastest
        share = sum(self._speeds) / len(self._speeds) / fastest
        pace = min(arm.interval, builtins.round(steps / share))  # steps of the fastest; fewer at the end of the run
        all = [max(1, pace * speed // fastest) for speed in self._speeds]
        beside = [min(arm.tau * speed // fastest, steps - 1) for speed, steps in zip(self._speeds, all, strict=True)]
        self._train(round, [steps - later for steps, later in zip(all, beside, strict=True)])
        given = [work.of(local) for work, local in zip(self._work, self._local, strict=True)]
        weights = [samples.weigh() for samples in self._samples]
        self._train(round, beside)
        mean = self._butterfly.mean(given, weights)
        self.sent, self.taken = self._butterfly.sent, sum(all) / len(all)
        self.clock += pace / fastest
        self.offered += len(given)
        self.counted += len(given)
        self._state = outer_step(self._state, mean, lr=arm.outer_lr, momentum=arm.momentum)
        for work, local, own, samples in zip(self._work, self._local, given, self._samples, strict=True):
            work.settle(whole, own)
            samples.offer()
            samples.decided(counted=True)
            work.move(whole, local, self._state.parameters - work.of(local))
        return self._state.parameters

    def _train(self, round: int, steps: Sequence[int]) -> None:
        deltas = self._workers.train(self._local, round=round, steps=steps)
        for local, delta, samples, taken in zip(self._local, deltas, self._samples, steps, strict=True):
            local -= delta
            samples.add(taken * self._workers.size.batch)


class Open:
    """Rounds of the open exchange among honest nodes: contribute, gate, clip, apply in the roster's order.

    Workers begin where their residual has them, but with topk (`open_step.carries`). Every
    contribution is fetched by everybody else, so that a node sends and receives R - 1 of them on average.
    """

    overlap = 0

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._arm, self._workers, self._stream = arm, workers, stream
        self._state = OuterState.start(start)
        self._norms: list[float] = []  # of the round's contributions
        self._left = [ErrorFeedback(codec(arm.codec), workers.parameters, decay=arm.decay) for _ in workers.peers]
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        workers, size, arm = self._workers, self._workers.parameters, self._arm
        shared = self._state.parameters
        carried = carries(arm.codec, arm.momentum)
        starts = [left.taken_from(shared) if carried else shared for left in self._left]
        deltas = workers.train(starts, round=round, steps=steps)
        for left in self._left:
            left.codec = codec_in(round, arm.codec)
        raws = workers.map(lambda pair: pair[0].encode(pair[1]), zip(self._left, deltas, strict=True))
        self._norms = workers.map(lambda raw: norm_of(opened(raw, size, codec_name=arm.codec)), raws)
        units = self._units(round, steps, raws)
        accepted = [unit > 0 for unit in units]
        roster = [raw for raw, good in zip(raws, accepted, strict=True) if good]
        clips = clip_units([norm for norm, good in zip(self._norms, accepted, strict=True) if good])
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
                clip = next(clip_of)
                if clip < CLIP_UNIT:
                    sent = left.codec.decode(raw, size)
                    left.give_back(sent * np.float32(1 - clip / CLIP_UNIT), norm_of(sent))  # what was clipped
            else:  # work that did not count is offered again
                left.rollback()
                left.fade()
                left.give_back(delta, norm_of(delta))
        self.offered += len(raws)
        self.counted += len(roster)
        self.sent += sum(len(raw) for raw in raws) * (len(workers.peers) - 1)
        return self._state.parameters

    def _units(self, round: int, steps: int, raws: list[memoryview]) -> list[int]:
        """Work of each contribution by the rules of the chain; each judge draws windows of its own."""
        workers, state, arm, count = self._workers, self._state, self._arm, len(self._workers.peers)
        clips = clip_units(self._norms)
        equal = [Factor(1, clip, len(raws)) for clip in clips]
        halfway = apply_contributions(state, raws, equal, lr=arm.outer_lr / 2, codec_name=arm.codec).parameters
        sequences = sequences_for(steps * workers.size.batch)

        def judge(number: int) -> list[int]:
            seed = _seed(f"judge {number} of {workers.seed} {self._stream} {round}")
            slope = workers.slope_on(number, halfway, seed=seed, first=0, last=sequences)
            direction = slope * np.float32(arm.outer_lr / CLIP_UNIT)
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


class Seed:
    """A byte a step (training/seed.py): what a round tells, a record of each worker, is added at its end."""

    overlap = 0

    def __init__(self, arm: Arm, workers: Workers, spec: RunSpec, start: Vector, stream: str) -> None:
        self.sent = self.offered = self.counted = 0
        self._workers, self._spec, self._stream, self._tally = workers, spec, stream, Tally(start)
        workers.begin(spec, stream=stream)

    def advance(self, round: int, steps: int) -> Vector:
        workers, rates = self._workers, {"lr": self._spec.inner.lr, "clip": self._spec.inner.clip}
        told = workers.probe(self._tally.parameters(**rates), round=round, steps=steps)
        for peer, each in zip(workers.peers, told, strict=True):
            self._tally.add(self._spec.run.seed, f"{peer}/{self._stream}", round, each)
            value = (round - 1, each)
            record = write("0" * 64, "1" * 52, key_of(KIND, round, 0), value, hlc=1, sign=lambda _: bytes(64))
            self.sent += (len(workers.peers) - 1) * len(record.sealed)
        self.offered += len(told)
        self.counted += len(told)
        return self._tally.parameters(**rates)


METHODS: dict[str, Callable[[Arm, Workers, RunSpec, Vector, str], Method]] = {
    "synchronous": Synchronous,
    "alone": Alone,
    "diloco": Diloco,
    "streaming": Streaming,
    "lowrank": Streaming,
    "demo": DeMo,
    "async": Async,
    "gossip": Gossip,
    "merge": Gossip,
    "open": Open,
    "seed": Seed,
}
