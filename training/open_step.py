"""The arithmetic of an open round (docs/architecture.md, "apply"): the same roster gives the same bits on every CPU.

    norms   = [norm_of(opened(raw, elements)) for raw in contributions]  # what the clip factors of a roster rest on
    clips   = clip_units(norms)                                          # integers, so that they travel exactly
    state   = apply_contributions(state, contributions, factors, lr=1.0)

A contribution is the encoded pseudo-gradient of one node, bytes of a stranger. A roster lists them in an order, with
an integer weight and an integer clip factor each; from there on nothing is chosen by a machine: factors come from
integers, sums run element by element in the roster's order, and norms are correctly rounded whatever the order.

**What each contribution is worth on held-out text, by one gradient** however many there are. The step of a round takes
φ to φ - s, where s is the sum of what the contributions add. What it gains is the integral of the gradient along it, so

    gain_i = ⟨∇L(φ - s / 2), lr · clip_i · x_i⟩                         (1)

with the midpoint rule in place of the integral: the shares of Aumann and Shapley ("Values of Non-Atomic Games", 1974),
which sum to the gain of the whole step. A contribution is so measured among the others. Alone, honest work on skewed
data does look harmful: it leads past the bottom, where the mean of many does not; and the gradient at φ alone does not
see that a step along the steepest of it goes too far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs import CodecError, codec
from swarmnode.training.codecs.topk import TopK
from swarmnode.training.outer import OuterState, Vector, fold_in, outer_step, steps_of

Raw = bytes | bytearray | memoryview
Sparse = tuple[NDArray[np.int64], Vector]  # places (k,), ascending, and what stands there (k,)

CLIP_UNIT = 1 << 20  # a clip factor of 1: the contribution counts whole
CLIP_AT = 1.25  # times the usual norm: clipped to that norm itself, honest steps are a twentieth shorter on average
DEFAULT_CODEC = TopK.name


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


def carries(codec_name: str, momentum: float) -> bool:
    """Whether nodes train on from where they have come to, with what encodings left out of what they sent.

    Otherwise they begin at the shared parameters, do it again and again, and all of that is sent: of use where most
    elements wait for long, as with `topk` and no outer momentum (SparseLoCo), and harmful elsewhere.
    """
    return momentum > 0 or codec_name != TopK.name


def apply_contributions(
    state: OuterState,
    contributions: Sequence[Raw | Sparse],
    factors: Sequence[Factor],
    *,
    lr: float,
    momentum: float = 0.0,
    codec_name: str = DEFAULT_CODEC,
) -> OuterState:
    """The state after a roster of `contributions` of one codec, in the roster's order, with one factor for each.

        acc = 0;  for i in order: acc <- acc + (f_i * x_i)
        phi', m' = outer_step(phi, m, acc)        without momentum: phi' = phi - (lr * acc)

    Elements of which acc is 0 rest: neither they nor their momentum move (`outer_step`). So momentum counts in the
    turns of an element, not in rounds, whatever share of the vector the contributions of a round name.

    A contribution is its bytes, or what `opened` makes of them. Every product and every sum is rounded to float32 on
    its own. Where x_i is sparse, elements that it does not name are left alone, which gives the bits that adding its
    zeros would give: acc is never -0. Another order may give other bits. An empty roster gives the same state.
    SparseLoCo (2508.15706) is `topk`, lr 1 and no momentum.

    Raises CodecError for a contribution that no encoder makes, naming its place in the roster; ValueError where counts
    differ or the new parameters would not be finite. All of them depend on the arguments alone: all raise alike.
    """
    if len(contributions) != len(factors):
        raise ValueError(f"{len(contributions)} contributions with {len(factors)} factors; one factor for each")
    total: Vector = np.zeros(state.parameters.size, np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # what overflows is refused by outer_step
        for place, (raw, factor) in enumerate(zip(contributions, factors, strict=True)):
            try:
                held = opened(raw, total.size, codec_name=codec_name)
            except CodecError as error:
                raise CodecError(f"contribution {place} of the roster: {error}") from error
            if isinstance(held, tuple):
                total[held[0]] += factor.rounded * held[1]  # places differ, so each is read and written once
            else:
                for part in steps_of(total.size):
                    fold_in(total[part], factor.rounded, held[part])
    return outer_step(state, total, lr=lr, momentum=momentum, resting=True)


def opened(raw: Raw | Sparse, elements: int, *, codec_name: str = DEFAULT_CODEC) -> Sparse | Vector:
    """What a contribution of `elements` values holds: sparse where its codec is. Raises CodecError."""
    if isinstance(raw, tuple):
        return raw
    chosen = codec(codec_name)
    return chosen.decode_sparse(raw, elements) if isinstance(chosen, TopK) else chosen.decode(raw, elements)


def norm_of(held: Sparse | Vector) -> float:
    """The Euclidean norm of finite values: the same float64 on every machine.

    The sum of squares is exact, rounded once; IEEE 754 rounds its root correctly. A square is an integer below 2^48
    times a power of 4 that its exponent gives. Both halves of these integers are added up for each exponent; sums of
    STEP numbers below 2^24 are exact in the float64 that `bincount` adds with.
    """
    values = held[1] if isinstance(held, tuple) else held
    halves = np.zeros((2, 256), np.int64)  # the lower and the upper 24 bits of squares, by exponent
    for part in steps_of(values.size):
        bits = np.ascontiguousarray(values[part]).view(np.uint32) & np.uint32(0x7FFFFFFF)
        exponents = (bits >> np.uint32(23)).astype(np.intp)
        significands = (bits & np.uint32(0x7FFFFF)) | (exponents > 0).astype(np.uint32) << np.uint32(23)
        squares = np.square(significands, dtype=np.uint64)
        for row, half in enumerate((squares & np.uint64(0xFFFFFF), squares >> np.uint64(24))):
            halves[row] += np.bincount(exponents, weights=half, minlength=256).astype(np.int64)
    total = 0
    for exponent, (low, high) in enumerate(halves.T.tolist()):
        total += ((high << 24) + low) << 2 * max(exponent - 1, 0)  # subnormals share the exponent of the smallest
    return math.sqrt(total / (1 << 298))  # the least bit of a float32 is 2^-149


def median_norm(norms: Sequence[float]) -> float:
    """The median of the norms above zero; 0 where there is none.

    Of an even count it is the lower of the two in the middle: an average would round. Raises ValueError for a norm that
    is negative or not finite.
    """
    if not all(math.isfinite(norm) and norm >= 0 for norm in norms):
        raise ValueError(f"norms {list(norms)} must be finite and not negative")
    positive = sorted(norm for norm in norms if norm > 0)
    return positive[(len(positive) - 1) // 2] if positive else 0.0


def clip_units(norms: Sequence[float], usual: float | None = None) -> list[int]:
    """Clip factors in units of 2^-20 that bring norms down to CLIP_AT * `usual`: floor(min(1, that / norm) * 2^20).

    Without `usual` that is their median. A norm of zero has factor 1, and so have all where `usual` is 0: nobody's norm
    says anything. The quotient is that of exact integers, rounded down. Raises ValueError for a norm that is negative
    or not finite.
    """
    middle = median_norm(norms)
    above, below = (CLIP_AT * (middle if usual is None else usual)).as_integer_ratio()
    if not above:
        return [CLIP_UNIT] * len(norms)
    units = []
    for norm in norms:
        numerator, denominator = float(norm).as_integer_ratio()
        units.append(min(CLIP_UNIT, above * denominator * CLIP_UNIT // (below * numerator)) if norm else CLIP_UNIT)
    return units


# --- what a contribution is worth -------------------------------------------------------------------------------------

SEQUENCES = 8  # that a judge draws in a round, at the most; more tell nothing that the median of judges does not
JUDGE_SHARE = 0.03  # of a round's training that a gradient takes at most, where that is a sequence or more
BACKWARD = 3  # passes that a gradient, or a training step, costs on a sequence


def sequences_for(trained: int) -> int:
    """On how many sequences a judge measures that trained on `trained`, by one gradient.

    One at the least: the median of judges bears its noise, as a rule of the chain knows how large that is.
    """
    return max(1, min(SEQUENCES, int(JUDGE_SHARE * trained)))


def inner_product(x: Raw | Sparse, direction: Vector, *, codec_name: str = DEFAULT_CODEC) -> float:
    """⟨direction, x⟩ of a contribution x of as many elements. Raises CodecError."""
    held = opened(x, direction.size, codec_name=codec_name)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(direction.take(held[0]) @ held[1] if isinstance(held, tuple) else direction @ held)


def rise(gradient: Vector, before: Vector, now: Vector) -> float:
    """⟨gradient, now - before⟩, all (P,), without a vector as large as they are."""
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(float(gradient[part] @ (now[part] - before[part])) for part in steps_of(gradient.size))
