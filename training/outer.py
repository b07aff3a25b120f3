"""What members of a run share: the layout of a model in one flat vector, the outer optimizer (DiLoCo, arXiv 2311.08105,
algorithm 1), and the hash that proves that nodes agree.

Members of a round apply the same mean pseudo-gradient to the same state and must end bit-identical. So the arithmetic
here is only float32 multiplication, addition and subtraction of single elements, each rounded on its own, in the
order that the docstrings write: nothing whose order or fusing a machine may choose.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
from numpy.typing import NDArray

from swarmnode.training import mapped
from swarmnode.training.mapped import Vector as Vector

_STATE_TAG = b"swarmnode/state/1\0"
WHOLE_BITS = 22
STEP = 1 << 16  # elements worked on at a time; temporaries stay in a core's cache and do not grow with the model


@dataclass(frozen=True)
class Slot:
    """One tensor: `vector[place].reshape(shape)`; offset and size in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class Layout:
    """The table of all tensors, in the model's own order, without gaps; the same on every node."""

    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, shapes: list[tuple[str, tuple[int, ...]]]) -> Layout:
        """Lay tensors of these names and shapes one behind the other."""
        slots, offset = [], 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), offset)
            slots.append(slot)
            offset += slot.size
        return cls(tuple(slots))

    @property
    def parameters(self) -> int:
        """Elements of the flat vector."""
        return self.slots[-1].place.stop if self.slots else 0

    def encode(self) -> bytes:
        """Canonical bytes, part of every state hash."""
        return msgpack.packb([[s.name, list(s.shape), s.offset] for s in self.slots])

    @property
    def digest(self) -> str:
        """sha-256 of `encode()`, 64 hex digits."""
        return hashlib.sha256(self.encode()).hexdigest()


@dataclass(frozen=True)
class OuterState:
    """What members of a run share: parameters phi and outer momentum, float32 (P,) each. Never written to in place.

    Large ones lie in mapped files: a node keeps those of several rounds, and reads each but a few times.
    """

    parameters: Vector
    momentum: Vector

    @classmethod
    def start(cls, parameters: Vector) -> OuterState:
        """The state before round 0: a copy of these parameters, (P,), and no momentum."""
        return cls(frozen(mapped.copied(parameters)), frozen(np.zeros(parameters.size, np.float32)))


def pseudo_gradient(start: Vector, local: Vector, settled: Vector | None) -> Vector:
    """What led from `start` to `local` (P,), less what of it is `settled` already. Written over `local`."""
    gradient = np.subtract(start, local, out=local)
    return gradient if settled is None else np.subtract(gradient, settled, out=gradient)


def outer_step(
    state: OuterState, mean_pseudo_gradient: Vector, *, lr: float, momentum: float, resting: bool = False
) -> OuterState:
    """One outer step along g = `mean_pseudo_gradient` (P,), mean of phi - theta over members.

    With mu = `momentum`, Nesterov's as in torch.optim.SGD(nesterov=True); lr and mu are rounded to float32 first:

        mu > 0:  m <- (mu * m) + g;  phi <- phi - (lr * (g + (mu * m)))
        mu = 0:  phi <- phi - (lr * g);  m stays

    With `resting`, elements whose g is 0 stay as they are, and so does their m: of a sparse g, the others had no turn.

    Returns a new state with read-only arrays; the old one stays valid for readers. Raises ValueError where shapes or
    dtypes differ, or new parameters would not be finite.
    """
    for name, vector in (("momentum", state.momentum), ("pseudo-gradient", mean_pseudo_gradient)):
        if vector.shape != state.parameters.shape or vector.dtype != np.float32:
            raise ValueError(f"{name} is {vector.dtype} {vector.shape}, parameters are {state.parameters.shape}")
    rate, mu = np.float32(lr), np.float32(momentum)
    parameters = mapped.zeros(state.parameters.size)
    velocity = mapped.zeros(state.momentum.size) if mu else state.momentum
    scratch = np.empty(min(STEP, parameters.size), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        for part in steps_of(parameters.size):
            g, delta = mean_pseudo_gradient[part], scratch[: part.stop - part.start]
            if mu:
                m = velocity[part]
                np.multiply(mu, state.momentum[part], out=m)
                np.add(m, g, out=m)
                np.multiply(mu, m, out=delta)
                np.add(g, delta, out=delta)
                np.multiply(rate, delta, out=delta)
                if resting:
                    still = g == 0
                    np.copyto(m, state.momentum[part], where=still)
                    np.copyto(delta, np.float32(0), where=still)
            else:
                np.multiply(rate, g, out=delta)
            np.subtract(state.parameters[part], delta, out=parameters[part])
            if not np.isfinite(parameters[part]).all():
                raise ValueError(
                    "the outer step leads to NaN or infinity; the old state stays, the round does not count"
                )
    return OuterState(frozen(parameters), frozen(velocity) if mu else velocity)


def shares_of(weights: Sequence[int]) -> list[np.float32]:
    """What each part of a weighted mean is multiplied with: w_i / sum w in float64, rounded to float32."""
    total = sum(weights)
    return [np.float32(weight / total) for weight in weights]


def fold_in(total: Vector, share: np.float32, part: Vector) -> None:
    """Add one part of a weighted mean in place: total <- total + (share * part), both (n,); `part` is overwritten.

    Each product and sum is rounded to float32 on its own. Another order of parts may give other bits: callers add them
    in the roster's.
    """
    np.add(total, np.multiply(share, part, out=part), out=total)


def state_hash(round: int, layout: Layout, state: OuterState) -> str:
    """sha-256 of the shared state after `round`, 64 hex digits: equal on two nodes exactly when their bits are.

    Over: tag "swarmnode/state/1" and a zero byte ‖ round as u64 ‖ length of layout.encode() as u64 ‖ layout.encode() ‖
    parameters ‖ momentum; integers and float32 little-endian. Raises ValueError where the layout has another size.
    """
    if not layout.parameters == state.parameters.size == state.momentum.size:
        raise ValueError(f"layout of {layout.parameters} elements, state of {state.parameters.size}")
    table = layout.encode()
    digest = hashlib.sha256(_STATE_TAG)
    digest.update(round.to_bytes(8, "little"))
    digest.update(len(table).to_bytes(8, "little"))
    digest.update(table)
    for vector in (state.parameters, state.momentum):
        digest.update(np.ascontiguousarray(vector, "<f4").data)
    return digest.hexdigest()


def whole_numbers(rows: Vector) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Finite rows (n, m) as whole numbers of WHOLE_BITS, times two to exponents (n, 1).

    Sums of products of such numbers are exact in float64 in any order, while they stay below 2^53.
    """
    greatest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    exponents = np.frexp(greatest)[1] - WHOLE_BITS
    return np.rint(np.ldexp(rows.astype(np.float64), -exponents)), exponents


def steps_of(size: int) -> Iterator[slice]:
    """0 to `size` in parts of STEP."""
    return (slice(start, min(start + STEP, size)) for start in range(0, size, STEP))


def frozen(vector: Vector) -> Vector:
    """The same vector, read-only from now on."""
    vector.flags.writeable = False
    return vector
