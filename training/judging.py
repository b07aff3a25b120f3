"""What a step is worth on held-out text, measured on few sequences: one gradient for all steps, and a look at each.

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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs import codec
from swarmnode.training.codecs.topk import TopK
from swarmnode.training.open_step import Raw, Vector

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
