"""Zeroth-order training from shared randomness: a step is one signed byte, whatever the size of the model.

SPSA as in MeZO (arXiv 2305.17333), shared as in Just One Byte (2306.10015) and FedKSeed (2312.06353). A node draws a
direction z of random signs and a batch of its own, and measures the batch's loss on both sides of where it stands:

    g = (L(theta + eps z) - L(theta - eps z)) / (2 eps)
    b = round(127 * g / clip), between -127 and 127

It tells others b, as z follows from who draws it and when. Then everybody who knows the same bytes has the same

    theta = theta_0 - (lr * clip / 127) * S,    S = sum of b z over all bytes of all nodes

S is a vector of integers, so the order in which bytes arrive does not matter: the shared state is a function of the
*set* of bytes, the same bits wherever that is known. `lr` and `clip` are those of [inner].

Departures from the papers: z are signs and not normal, so that they take a bit each and are the same on all machines; g
is clipped, as one byte has an end; nobody waits for others' bytes, so g may be of a theta that others have left. What
is summed is not divided by the number of nodes: each byte moves by its own lr, as in FedKSeed. The schedule of [inner]
scales g before it is rounded, as S must stay whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swarmnode.training import mapped
from swarmnode.training.outer import Vector, frozen, steps_of

EPSILON = 1e-3  # MeZO's
LARGEST = 127  # of a byte, either way


def bits_of(run_seed: int, author: str, round: int, step: int, size: int) -> NDArray[np.uint8]:
    """The signs of z, a bit each, (ceil(size / 8),): 1 is plus; the first is the lowest bit. SHAKE128 (FIPS 202)."""
    text = f"direction {run_seed} {author} {round} {step}"
    return np.frombuffer(hashlib.shake_128(text.encode()).digest(-(-size // 8)), np.uint8)


def blocks(bits: NDArray[np.uint8], size: int) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
    """Parts of 0 .. size, and their bits as one element each, 0 or 1."""
    for part in steps_of(size):
        packed = bits[part.start // 8 : -(-part.stop // 8)]
        yield part, np.unpackbits(packed, count=part.stop - part.start, bitorder="little")


def byte_of(slope: float, clip: float) -> bytes:
    """b of a slope g, of two's complement; 0 where it is not finite, so that it moves nothing."""
    if not np.isfinite(slope):
        return b"\0"
    return round(LARGEST * min(1.0, max(-1.0, slope / clip))).to_bytes(signed=True)


class Tally:
    """S over theta_0, both (P,): all that a node holds of a run by seeds."""

    def __init__(self, initial: Vector, sums: NDArray[np.int32] | None = None) -> None:
        self.initial = initial
        self.sums = np.zeros(initial.size, np.int32) if sums is None else sums

    def add(self, run_seed: int, author: str, round: int, told: bytes) -> None:
        """Add b z of the steps 0, 1, ... of an author's round, whose bytes, each b of two's complement, are `told`."""
        values = np.frombuffer(told, np.int8).tolist()
        for step, value in enumerate(values):
            if value:
                bits = bits_of(run_seed, author, round, step, self.sums.size)
                for part, ones in blocks(bits, self.sums.size):
                    self.sums[part] += np.multiply(ones, 2 * value, dtype=np.int32)
        self.sums -= sum(values)  # z is 2 * bit - 1

    def whole(self) -> Vector:
        """S as float32, read-only; exact below 2 ** 24, which takes 132 000 bytes that all push one element alike."""
        return frozen(self.sums.astype(np.float32))

    def parameters(self, *, lr: float, clip: float) -> Vector:
        """theta, float32 (P,), each product and difference rounded on its own."""
        scale = np.float32(lr * clip / LARGEST)
        found = mapped.zeros(self.sums.size)
        for part in steps_of(self.sums.size):
            np.subtract(self.initial[part], scale * self.sums[part].astype(np.float32), out=found[part])
        return found
