"""What every codec promises, and what all of them share: the checks of what goes in and out, and its memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.mapped import Vector as Vector

# Elements worked on at a time: 512 KiB of float32 and its temporaries stay in a core's cache, and memory beside the
# input and the output stays constant however large the model is. Half as many cost a tenth more in a busy process, for
# each operation of numpy gives up the interpreter's lock and takes it again.
STEP = 128 << 10


class CodecError(ValueError):
    """Values that cannot be encoded (NaN or infinity), or bytes that no encoder makes."""


class Codec(ABC):
    """A stateless encoding of a vector whose length both sides know. A codec says what `_encode` and `_decode` do."""

    name: str  # in `[exchange] codec`
    packs = True  # whether Huffman codes make what it leaves 3 % smaller or more (docs/codecs.md)

    @abstractmethod
    def encoded_size(self, elements: int) -> int:
        """Bytes that `encode` makes of `elements` values, exactly."""

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        """Encode `values`, float32 (n,), into the first `encoded_size(n)` bytes of `out` or of new memory.

        Raises CodecError where a value is NaN or infinite (`out` may then be partly written), ValueError for another
        dtype or shape or an `out` that is too small or read-only.
        """
        if values.dtype != np.float32 or values.ndim != 1:
            raise ValueError(f"a codec takes a float32 vector, not {values.dtype} of shape {values.shape}")
        size = self.encoded_size(values.size)
        if out is None:
            out = np.empty(size, np.uint8).data
        elif out.readonly or out.nbytes < size:
            raise ValueError(f"encoding needs {size} writable bytes, the buffer has {out.nbytes}")
        else:
            out = out.cast("B")[:size]
        self._encode(np.ascontiguousarray(values), out)
        return out

    def decode(self, raw: bytes | bytearray | memoryview, elements: int, out: Vector | None = None) -> Vector:
        """The `elements` values that `raw` stands for, all finite: in `out`, float32 (elements,), or in new memory.

        Raises CodecError for bytes that no encoder makes: another size, or anything that would decode to NaN or
        infinity; `out` may then be partly written.
        """
        view = self._checked(raw, elements)
        values = np.empty(elements, np.float32) if out is None else out
        self._decode(view, values)
        return values

    def take_off(self, raw: memoryview, values: Vector, scratch: Vector | None) -> None:
        """values <- values - decode(raw), in place: what an encoding left out. `scratch`: memory for as many values."""
        np.subtract(values, self.decode(raw, values.size, scratch), out=values)

    @abstractmethod
    def _encode(self, values: Vector, target: memoryview) -> None:
        """Encode `values`, contiguous, into `target`, which has their encoded size. Raises CodecError."""

    @abstractmethod
    def _decode(self, raw: memoryview, values: Vector) -> None:
        """Write into `values` (elements,), contiguous or not, what `raw`, of their encoded size, stands for.

        Raises CodecError.
        """

    def _checked(self, raw: bytes | bytearray | memoryview, elements: int) -> memoryview:
        """`raw` as plain bytes. Raises CodecError where they are not as many as encode so many elements."""
        view, size = memoryview(raw), self.encoded_size(elements)
        if view.nbytes != size:
            raise CodecError(f"{self.name}: {view.nbytes} bytes where {size} were expected")
        return view.cast("B")


class Blockwise(Codec):
    """A codec that gives each block of elements a scale; a shorter last block counts as filled up with zeros.

    bytes = scales, one a block, little-endian ‖ codes, one an element, the first of a byte in its lowest bits
    """

    block: int  # elements that share a scale; divides STEP, and codes of a block fill bytes
    scale: np.dtype[Any]
    in_byte: int  # codes

    def encoded_size(self, elements: int) -> int:
        return self.scale.itemsize * -(-elements // self.block) + -(-elements // self.in_byte)

    def _encode(self, values: Vector, target: memoryview) -> None:
        scales, codes = self._sections(target, values.size)
        scratch = np.empty(min(STEP, -(-values.size // self.block) * self.block), np.float32)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            short = -step.size % self.block
            blocks = (np.pad(step, (0, short)) if short else step).reshape(-1, self.block)
            into = codes[start // self.in_byte : -(-(start + step.size) // self.in_byte)]
            filled = np.empty(blocks.size // self.in_byte, np.uint8) if short else into
            some = scales[start // self.block :][: len(blocks)]
            self._encode_blocks(blocks, step.size, some, filled, scratch[: blocks.size].reshape(blocks.shape))
            if short:
                into[:] = filled[: into.size]

    def _decode(self, raw: memoryview, values: Vector) -> None:
        scales, codes = self._sections(raw, values.size)
        used = values.size % self.in_byte
        if used and codes[-1] >> used * 8 // self.in_byte:
            raise CodecError(f"{self.name}: a code beyond the last element")
        self._check_scales(scales)
        for start in range(0, values.size, STEP):
            step = values[start : start + STEP]
            whole = step.size % self.block == 0 and step.flags.c_contiguous
            blocks = step if whole else np.empty(-(-step.size // self.block) * self.block, np.float32)
            some = codes[start // self.in_byte :][: blocks.size // self.in_byte]
            if some.size < blocks.size // self.in_byte:
                some = np.pad(some, (0, blocks.size // self.in_byte - some.size))
            count = blocks.size // self.block
            self._decode_blocks(scales[start // self.block :][:count], some, blocks.reshape(count, self.block))
            if not whole:
                step[:] = blocks[: step.size]

    def _sections(self, raw: memoryview, elements: int) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """The scales (blocks,) and the packed codes inside encoded bytes."""
        end = self.scale.itemsize * -(-elements // self.block)
        return np.frombuffer(raw[:end], self.scale), np.frombuffer(raw[end:], np.uint8)

    @abstractmethod
    def _encode_blocks(
        self, blocks: Vector, elements: int, scales: NDArray[Any], codes: NDArray[np.uint8], scratch: Vector
    ) -> None:
        """Write the scales (n,) and the packed codes of `blocks` (n, block), the first so many `elements` of which are
        values and not zeros behind them. `scratch` is memory for as many. Raises CodecError."""

    @abstractmethod
    def _check_scales(self, scales: NDArray[Any]) -> None:
        """Raise CodecError for scales that no encoder makes."""

    @abstractmethod
    def _decode_blocks(self, scales: NDArray[Any], codes: NDArray[np.uint8], blocks: Vector) -> None:
        """Write into `blocks` (n, block) what scales (n,) and packed codes stand for. Raises CodecError."""


def check_finite(values: Vector) -> float:
    """The largest absolute value. Raises CodecError unless all values are finite.

    NaN passes through both extremes, so no mask is made.
    """
    if not values.size:
        return 0.0
    highest, lowest = float(values.max()), float(values.min())
    if not (math.isfinite(highest) and math.isfinite(lowest)):
        raise CodecError("values to encode or decoded values contain NaN or infinity")
    return max(highest, -lowest)
