"""The arithmetic of an open round (docs/architecture.md, "apply"): the same roster gives the same bits on every CPU.

    norms   = [exact_norm(raw, elements) for raw in contributions]      # what the clip factors of a roster rest on
    clips   = clip_units(norms)                                         # integers, so that they travel exactly
    state   = apply_contributions(state, contributions, factors, lr=1.0)

A contribution is the encoded pseudo-gradient of one node, bytes of a stranger. A roster lists them in an order, with
an integer weight and an integer clip factor each; from there on nothing is chosen by a machine: factors come from
integers, sums run element by element in the roster's order, and norms are correctly rounded whatever the order.

**What a step is worth on held-out text, measured on few sequences:** one gradient for all steps, and a look at each.

    plan = plan_for(contributions=16, trained=320)        # SamplePlan(gradient=8, each=1), in sequences
    step = trial(raw, elements, lr=1.0, codec_name="topk")        # an eighth of a contribution
    gain = gain_of(before - after, step.derivative(few), step.derivative(correction))  # from `control_variate`

The gain of a step s is the loss before it minus the loss after it, L(φ) - L(φ - s). On k sequences it is measured with
the noise of k, at k passes for each contribution: on sixteen each, a judge of sixty contributions spent as much time on
them as on its own training, in short rounds. Most of that noise is in the part of the gain that is linear in s, and one
gradient on m > k sequences tells that part for all contributions. So, with ∇L_k of the first k of the same sequences,

    gain = L_k(φ) - L_k(φ - s) + ⟨∇L_m(φ) - ∇L_k(φ), s⟩           (1)

which has the expectation of the gain itself, whatever m and k (∇L_k is a control variate of the loss, as in Glasserman,
"Monte Carlo Methods in Financial Engineering", 4.1). The gradient alone would not do: it does not see curvature, and a
step along the steepest of it looks twice as good as an honest one while it does twenty times its good in harm. There
the product on k sequences tells nothing of the loss on them, and (1) is noisier than the loss alone: so where the two
differ by more than CURVED of the linear part, the lesser of both estimates is taken (bench/judging.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs import CodecError, codec
from swarmnode.training.codecs.topk import TopK
from swarmnode.training.outer import OuterState, outer_step

Vector = NDArray[np.float32]
Raw = bytes | bytearray | memoryview

CLIP_UNIT = 1 << 20  # a clip factor of 1: the contribution counts whole
DEFAULT_CODEC = TopK.name

_STEP = 64 << 10  # elements worked on at a time, so that temporaries stay in a core's cache


@dataclass(frozen=True)
class Factor:
    """What a contribution is multiplied with: weight / total * clip / 2^20, from the integers of a roster.

    Raises ValueError unless 0 <= weight <= total, 0 < total and 0 <= clip <= 2^20.
    """

    weight: int
    clip: int  # units of 2^-20
    total: int  # of the weights that the roster gives

    def __post_init__(self) -> None:
        if not (0 <= self.weight <= self.total and self.total > 0 and 0 <= self.clip <= CLIP_UNIT):
            raise ValueError(f"{self}: weights lie between 0 and their total, clip factors between 0 and {CLIP_UNIT}")

    @property
    def rounded(self) -> np.float32:
        """The quotient of the integers, correctly rounded to float64, then to float32."""
        return np.float32(self.weight * self.clip / (self.total * CLIP_UNIT))


def apply_contributions(
    state: OuterState,
    contributions: Sequence[Raw],
    factors: Sequence[Factor],
    *,
    lr: float,
    momentum: float = 0.0,
    codec_name: str = DEFAULT_CODEC,
) -> OuterState:
    """The state after a roster of `contributions`, bytes of one codec in the roster's order, with one factor for each.

        acc = 0;  for i in order: acc <- acc + (f_i * x_i)
        phi', m' = outer_step(phi, m, acc)        without momentum: phi' = phi - (lr * acc)

    Elements of which acc is 0 rest: neither they nor their momentum move (`outer_step`). So momentum counts in the
    turns of an element, not in rounds, whatever share of the vector the contributions of a round name.

    Every product and every sum is rounded to float32 on its own. Where x_i is sparse, elements that it does not name
    are left alone, which gives the bits that adding its zeros would give: acc is never -0. Another order may give other
    bits. An empty roster gives the same state. SparseLoCo (2508.15706) is `topk`, lr 1 and no momentum.

    Raises CodecError for a contribution that no encoder makes, naming its place in the roster; ValueError where counts
    differ or the new parameters would not be finite. All of them depend on the arguments alone: who holds the roster
    raises alike.
    """
    if len(contributions) != len(factors):
        raise ValueError(f"{len(contributions)} contributions with {len(factors)} factors; one factor for each")
    total: Vector = np.zeros(state.parameters.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # what overflows is refused by outer_step
        for place, (raw, factor) in enumerate(zip(contributions, factors, strict=True)):
            try:
                _add(total, raw, factor.rounded, codec_name)
            except CodecError as error:
                raise CodecError(f"contribution {place} of the roster: {error}") from error
    return outer_step(state, total, lr=lr, momentum=momentum, resting=True)


def exact_norm(raw: Raw, elements: int, *, codec_name: str = DEFAULT_CODEC) -> float:
    """The Euclidean norm of a contribution of `elements` values: the same float64 on every machine.

    The sum of squares is exact (`exact_sum_of_squares`), rounded once; IEEE 754 rounds its root correctly. Raises
    CodecError for bytes that no encoder makes.
    """
    chosen = codec(codec_name)
    values = chosen.decode_sparse(raw, elements)[1] if isinstance(chosen, TopK) else chosen.decode(raw, elements)
    return norm_of(values)


def norm_of(values: Vector) -> float:
    """The Euclidean norm of finite `values`, float32 (n,), as `exact_norm` computes it."""
    numerator, denominator = exact_sum_of_squares(values)
    return math.sqrt(numerator / denominator)


def exact_sum_of_squares(values: Vector) -> tuple[int, int]:
    """The sum of the squares of finite `values`, float32 (n,), as numerator and denominator, exactly.

    A square is an integer below 2^48 times a power of 4 that its exponent gives. Both halves of these integers are
    added up for each exponent; sums of 2^16 numbers below 2^24 are exact in the float64 that `bincount` adds with.
    """
    halves = np.zeros((2, 256), np.int64)  # the lower and the upper 24 bits of squares, by exponent
    for start in range(0, values.size, _STEP):
        bits = np.ascontiguousarray(values[start : start + _STEP]).view(np.uint32) & np.uint32(0x7FFFFFFF)
        exponents = (bits >> np.uint32(23)).astype(np.intp)
        significands = (bits & np.uint32(0x7FFFFF)) | (exponents > 0).astype(np.uint32) << np.uint32(23)
        squares = np.square(significands, dtype=np.uint64)
        for row, half in enumerate((squares & np.uint64(0xFFFFFF), squares >> np.uint64(24))):
            halves[row] += np.bincount(exponents, weights=half, minlength=256).astype(np.int64)
    total = 0
    for exponent, (low, high) in enumerate(halves.T.tolist()):
        total += ((high << 24) + low) << 2 * max(exponent - 1, 0)  # subnormals share the exponent of the smallest
    return total, 1 << 298  # the least bit of a float32 is 2^-149


def median_norm(norms: Sequence[float]) -> float:
    """The median of the norms above zero; 0 where there is none.

    Of an even count it is the lower of the two in the middle: an average would round. Raises ValueError for a norm that
    is negative or not finite.
    """
    if not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        raise ValueError(f"norms {list(norms)} must be finite and not negative")
    positive = sorted(norm for norm in norms if norm > 0)
    return positive[(len(positive) - 1) // 2] if positive else 0.0


def clip_units(norms: Sequence[float], to: float | None = None) -> list[int]:
    """Clip factors in units of 2^-20 that bring every norm down to `to`: floor(min(1, to / norm) * 2^20).

    Without `to` that is their median. A norm of zero has factor 1, and so have all where `to` is 0: nobody's norm says
    anything. The quotient is that of exact integers, rounded down. Raises ValueError for a norm that is negative or not
    finite.
    """
    middle = median_norm(norms)
    above, below = (middle if to is None else to).as_integer_ratio()
    if not above:
        return [CLIP_UNIT] * len(norms)
    units = []
    for norm in norms:
        numerator, denominator = float(norm).as_integer_ratio()
        units.append(min(CLIP_UNIT, above * denominator * CLIP_UNIT // (below * numerator)) if norm else CLIP_UNIT)
    return units


def _add(total: Vector, raw: Raw, factor: np.float32, codec_name: str) -> None:
    """total += factor * decoded `raw`, element by element."""
    chosen = codec(codec_name)
    if isinstance(chosen, TopK):
        for places, kept in chosen.decode_steps(raw, total.size):
            total[places] += factor * kept  # places differ, so each is read and written once
        return
    values = chosen.decode(raw, total.size)
    for start in range(0, total.size, _STEP):
        part = slice(start, start + _STEP)
        np.multiply(factor, values[part], out=values[part])
        np.add(total[part], values[part], out=total[part])


# --- what a step is worth ---------------------------------------------------------------------------------------------

TRIAL = 0.125  # of a contribution is tried
SEQUENCES = 16  # that a judge draws in a round; more tell nothing that the median of judges does not
JUDGE_SHARE = 0.036  # of the work of a round's own training that a judge means to spend on judging
ENOUGH = 8  # sequences, of contributions or of a gradient, whose noise the median of judges bears easily …
LEAST_GRADIENT = 4  # … and the fewest of a gradient, which thirty judges bear
CURVED = 0.5  # of the linear part of a gain, that curvature may take off it; a quarter refused work on rare classes
SHORT = 128  # sequences: in a round that trains on fewer, a share says nothing, and nothing is saved
BACKWARD = 3  # passes that a gradient, or a training step, costs on a sequence


@dataclass(frozen=True)
class SamplePlan:
    """On how many of the sequences that it draws a judge measures."""

    gradient: int  # m, of the gradient, and of what the last roster cost; 0: no gradient
    each: int  # k, of every contribution

    @property
    def most(self) -> int:
        return max(self.gradient, self.each)

    def passes(self, contributions: int) -> int:
        """Forward passes of one sequence that measuring so many costs, with what the last roster cost."""
        base = (BACKWARD + 1) * self.gradient if self.gradient else 2 * self.each
        return base + contributions * self.each


def plan_for(*, contributions: int, trained: int) -> SamplePlan:
    """How a judge measures so many contributions who trained on `trained` sequences in the round.

    Each on ENOUGH or more where that costs at most JUDGE_SHARE of its training. Else by a gradient, and each on as many
    as are left beside it, one at the least: nothing counts that was not itself looked at. With one each, sixty cost
    three times the share in rounds of 320 sequences. In rounds of fewer than SHORT they are measured as if nothing
    were to be saved: the share would be less than a look at each.
    """
    if trained < SHORT:
        return SamplePlan(0, SEQUENCES)
    budget = int(JUDGE_SHARE * BACKWARD * trained)
    if (each := budget // (contributions + 2)) >= ENOUGH:
        return SamplePlan(0, min(each, SEQUENCES))
    gradient = min(max((budget - contributions) // (BACKWARD + 1), LEAST_GRADIENT), ENOUGH)
    each = (budget - (BACKWARD + 1) * gradient) // max(1, contributions)
    return SamplePlan(gradient, min(max(each, 1), gradient - 1))


def control_variate(few: Vector, rest: Vector, plan: SamplePlan) -> Vector:
    """∇L_m - ∇L_k, (P,), from the gradients (P,) on the first k sequences and on the m - k others."""
    share = np.float32((plan.gradient - plan.each) / plan.gradient)
    return np.asarray(share * (rest - few), np.float32)


def gain_of(measured: float, linear: float, correction: float) -> float:
    """The gain of a step that on k sequences is `measured`, with a linear part of `linear` there.

    `correction`: of the linear part, from k sequences to m.
    """
    quiet = measured + correction
    return min(measured, quiet) if linear - measured > CURVED * abs(linear + correction) else quiet


@dataclass(frozen=True)
class TrialStep:
    """What is taken off the parameters to try a contribution."""

    values: Vector  # (k,)
    places: NDArray[np.int64] | None = None  # (k,), where they stand; None: everywhere

    def taken_from(self, parameters: Vector) -> Vector:
        """φ - s, (P,)."""
        with np.errstate(over="ignore", invalid="ignore"):
            if self.places is None:
                return parameters - self.values
            after = parameters.copy()
            after[self.places] -= self.values
            return after

    def derivative(self, gradient: Vector) -> float:
        """The directional derivative ⟨gradient, s⟩ for a gradient (P,)."""
        with np.errstate(over="ignore", invalid="ignore"):
            there = gradient if self.places is None else gradient[self.places]
            return float(np.multiply(there, self.values, dtype=np.float64).sum())  # BLAS would wake threads for so few


def trial(raw: Raw, elements: int, *, lr: float, codec_name: str, shrink: float = 1.0) -> TrialStep:
    """lr · x / 8 of the contribution x of `elements` values, shrunk by a factor of at most 1. Raises CodecError."""
    factor, found = np.float32(lr * TRIAL * shrink), codec(codec_name)
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(found, TopK):
            places, values = found.decode_sparse(raw, elements)
            return TrialStep(factor * values, places)
        return TrialStep(factor * found.decode(raw, elements))
