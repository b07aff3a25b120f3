"""topk: of each 4096 elements the 64 greatest, their places in 12 bits and their values in 2: 0.0283 bytes an element.

    bytes = levels, two bf16 a chunk, little-endian (the lesser first)
          ‖ places, 12 bits each, ascending in a chunk, two in three bytes
          ‖ codes, 2 bits each, four a byte: bit 0 chooses the level, bit 1 the sign

SparseLoCo (2508.15706): chunks of 64 x 64, top 64, values of two bits, with error feedback at the sender
(`feedback.ErrorFeedback` with decay 0.95). The two levels of a chunk are the means of its greater and of its lesser
magnitudes, split by two steps of Lloyd's algorithm. Chunks are cut from the flat vector. The last one is shorter and
keeps one of 64 elements, rounded up.

Decoding is the part that every node does with strangers' bytes: `decode_sparse` gives places and values without ever
making the dense vector, `decode` adds them into one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import CodecError, Vector, check_finite, checked_bytes, checked_values, room
from swarmnode.training.codecs.bf16 import from_bf16, to_bf16

CHUNK = 4096  # elements; places within take 12 bits
KEEP = 64  # of a whole chunk
_LARGEST = 0x7F7F  # the largest finite bf16
_SMALLEST = 0x0080  # the smallest normal one
_BATCH = 64  # chunks worked on at a time: 2 MiB of keys

Places = NDArray[np.int64]


class TopK:
    """Implements `Codec`. Stable in values: `decode(encode(decode(raw))) == decode(raw)` for `raw` from `encode`.

    Which of equal magnitudes are kept does not depend on the CPU: the ones that come first.
    """

    name = "topk"

    def encoded_size(self, elements: int) -> int:
        kept = kept_of(elements)
        return 4 * -(-elements // CHUNK) + -(-kept * 3 // 2) + -(-kept // 4)

    def encode(self, values: Vector, out: memoryview | None = None) -> memoryview:
        values = checked_values(values)
        check_finite(values)
        target = room(out, self.encoded_size(values.size))
        kept = kept_of(values.size)
        levels = np.zeros((-(-values.size // CHUNK), 2), "<u2")
        places, codes = np.zeros(kept + kept % 2, np.uint16), np.zeros(kept + -kept % 4, np.uint8)
        whole = values.size - values.size % CHUNK
        for start in range(0, whole, _BATCH * CHUNK):
            stop = min(start + _BATCH * CHUNK, whole)
            chunks = values[start:stop].reshape(-1, CHUNK)
            first, at = start // CHUNK, start // CHUNK * KEEP
            count = chunks.shape[0] * KEEP
            found = _encode_chunks(chunks, KEEP)
            levels[first : first + chunks.shape[0]], places[at : at + count], codes[at : at + count] = found
        if whole < values.size:
            tail = values[None, whole:]
            found = _encode_chunks(tail, kept - whole // CHUNK * KEEP)
            levels[-1:], places[whole // CHUNK * KEEP : kept], codes[whole // CHUNK * KEEP : kept] = found
        low, high = places[0::2].astype(np.uint32), places[1::2].astype(np.uint32)
        triples = np.stack([low & 255, low >> 8 | (high & 15) << 4, high >> 4], axis=1).astype(np.uint8).reshape(-1)
        quads = codes.reshape(-1, 4)
        packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
        end = levels.nbytes + -(-kept * 3 // 2)
        target[: levels.nbytes] = levels.tobytes()
        target[levels.nbytes : end] = triples[: end - levels.nbytes].tobytes()
        target[end:] = packed.tobytes()
        return target

    def decode(self, raw: bytes | bytearray | memoryview, elements: int) -> Vector:
        places, kept = self.decode_sparse(raw, elements)
        values = np.zeros(elements, np.float32)
        values[places] = kept
        return values

    def decode_sparse(self, raw: bytes | bytearray | memoryview, elements: int) -> tuple[Places, Vector]:
        """Places in the vector, ascending, and what stands there: int64 (k,) and float32 (k,), k = `kept_of(elements)`.

        Raises CodecError for bytes that no encoder makes.
        """
        view = checked_bytes(raw, self.encoded_size(elements), self.name)
        chunks, kept = -(-elements // CHUNK), kept_of(elements)
        end = 4 * chunks + -(-kept * 3 // 2)
        halves = np.frombuffer(view[: 4 * chunks], "<u2").reshape(-1, 2)
        if np.any((halves != 0) & (halves < _SMALLEST) | (halves > _LARGEST)) or np.any(halves[:, 0] > halves[:, 1]):
            raise CodecError("topk: a level is negative, not finite, subnormal, or above the greater one")
        places = _unpack_places(np.frombuffer(view[4 * chunks : end], np.uint8), kept)
        codes = _unpack_codes(np.frombuffer(view[end:], np.uint8), kept)
        chunk = np.minimum(np.arange(kept) // KEEP, max(chunks - 1, 0))
        absolute = chunk * CHUNK + places
        if kept and (np.any(np.diff(absolute) <= 0) or absolute[-1] >= elements or np.any(absolute // CHUNK != chunk)):
            raise CodecError("topk: places are not in ascending order, or beyond the vector")
        values = from_bf16(halves)[chunk, codes & 1]
        return absolute, np.where(codes & 2, -values, values)


def kept_of(elements: int) -> int:
    """How many of `elements` values are sent."""
    return elements // CHUNK * KEEP + -(-(elements % CHUNK) * KEEP // CHUNK)


def _encode_chunks(chunks: Vector, keep: int) -> tuple[NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint8]]:
    """Levels (n, 2) as bf16 bits, places (n * keep,) and codes (n * keep,) of `chunks`, (n, size)."""
    size = chunks.shape[1]
    magnitudes = np.ascontiguousarray(chunks).view(np.uint32) & np.uint32(0x7FFFFFFF)
    # One key an element, all different: whatever algorithm sorts them, of equal magnitudes the first are kept.
    keys = magnitudes.astype(np.uint64) << np.uint64(12) | np.arange(size - 1, -1, -1, dtype=np.uint64)
    top = np.partition(keys, size - keep, axis=1)[:, size - keep :]
    places = np.sort(np.uint64(size - 1) - (top & np.uint64(0xFFF)), axis=1).astype(np.int64)
    values = np.take_along_axis(chunks, places, axis=1)
    absolute = np.abs(values).astype(np.float64)
    split = absolute.mean(axis=1, keepdims=True)
    for _ in range(2):
        greater = absolute > split
        lesser_mean, greater_mean = _group_means(absolute, greater)
        split = (lesser_mean + greater_mean) / 2
    greater = absolute > split
    lesser_mean, greater_mean = _group_means(absolute, greater)
    means = np.concatenate([lesser_mean, greater_mean], axis=1).astype(np.float32)
    levels = to_bf16(means)
    levels = np.where(levels < _SMALLEST, np.uint32(0), levels)
    zero = np.take_along_axis(levels, greater.astype(np.int64), axis=1) == 0
    codes = greater.astype(np.uint8) | ((values < 0) & ~zero).astype(np.uint8) << 1
    return levels, places.astype(np.uint16).reshape(-1), codes.reshape(-1)


def _group_means(
    absolute: NDArray[np.float64], greater: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean of the lesser and of the greater of each row, (n, 1) each; an empty group has the other's."""
    counts = greater.sum(axis=1, keepdims=True)
    rest = absolute.shape[1] - counts
    above = np.where(greater, absolute, 0).sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    below = np.where(greater, 0, absolute).sum(axis=1, keepdims=True) / np.maximum(rest, 1)
    return np.where(rest > 0, below, above), np.where(counts > 0, above, below)


def _unpack_places(packed: NDArray[np.uint8], kept: int) -> Places:
    triples = np.pad(packed, (0, -packed.size % 3)).reshape(-1, 3).astype(np.int64)
    places = np.empty((triples.shape[0], 2), np.int64)
    places[:, 0] = triples[:, 0] | (triples[:, 1] & 15) << 8
    places[:, 1] = triples[:, 1] >> 4 | triples[:, 2] << 4
    flat = places.reshape(-1)
    if flat[kept:].any():
        raise CodecError("topk: bits are set beyond the last place")
    return flat[:kept]


def _unpack_codes(packed: NDArray[np.uint8], kept: int) -> NDArray[np.uint8]:
    codes = (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1) & np.uint8(3)
    if codes[kept:].any():
        raise CodecError("topk: bits are set beyond the last value")
    return codes[:kept]
