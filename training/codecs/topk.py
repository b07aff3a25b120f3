"""topk: of each 4096 elements the 64 greatest, their places in 8 bits and their values in 2: 0.0205 bytes an element.

    bytes = levels, two bf16 a chunk, little-endian (the lesser first)
          ‖ codes, 2 bits each, four a byte: bit 0 chooses the level, bit 1 the sign
          ‖ places, ascending in a chunk: the lows of all, then the highs (`pack_places`)

SparseLoCo (2508.15706): chunks of 64 x 64, top 64, values of two bits, with error feedback at the sender
(`feedback.ErrorFeedback` with decay 0.95). The two levels of a chunk are the means of its greater and of its lesser
magnitudes, split by two steps of Lloyd's algorithm. Chunks are cut from the flat vector. The last one is shorter and
keeps one of 64 elements, rounded up.

Places are ascending in their chunk, eight bits each: the code of Elias and Fano (Elias 1974, Fano 1971).

    place = high * 64 + low
    lows  = the low six bits of each place, four in three bytes
    highs = a bitmap for each chunk of k places, 2k bits rounded up to bytes: of its i-th place bit high + i is set

Of `highs` bits, k are set and at most one for each value of `high` is not, so a chunk of 64 places takes 48 + 16 bytes.
Places drawn evenly have 7.36 bits of entropy; a Rice code of the gaps takes 7.5 on the average and makes every size
depend on what is sent, fixed numbers of 12 bits take 12 (docs/codecs.md).

Decoding is the part that every node does with strangers' bytes: `decode_sparse` gives places and values without ever
making the dense vector, `decode` writes them into one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import Codec, CodecError, Vector
from swarmnode.training.codecs.floats import from_bf16, to_bf16

LOW_BITS = 6
Bytes = NDArray[np.uint8]


def lows_size(places: int) -> int:
    """Bytes of the lows of so many places."""
    return -(-places * LOW_BITS // 8)


def highs_size(keep: int) -> int:
    """Bytes of the bitmap of one chunk with `keep` places, of `keep` * 64 elements at the most."""
    return -(-2 * keep // 8)


def pack_places(places: NDArray[np.int64], lows: Bytes, highs: Bytes) -> None:
    """Write `places` (chunks, keep), ascending in each row and below keep * 64, to the first bytes of both."""
    chunks, keep = places.shape
    low = places.reshape(-1).astype(np.uint8) & np.uint8(63)
    a, b, c, d = np.pad(low, (0, -low.size % 4)).reshape(-1, 4).T
    triples = np.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], axis=1).reshape(-1)
    lows[: lows_size(low.size)] = triples[: lows_size(low.size)]
    bits = np.zeros((chunks, 8 * highs_size(keep)), np.bool_)
    np.put_along_axis(bits, (places >> LOW_BITS) + np.arange(keep), True, axis=1)
    highs[: chunks * highs_size(keep)] = np.packbits(bits, bitorder="little")


def unpack_places(lows: Bytes, highs: Bytes, chunks: int, keep: int, size: int) -> NDArray[np.int64]:
    """The places (chunks, keep) in `lows` and `highs`, ascending in each row and below `size`, elements of a chunk.

    Raises CodecError for bytes that `pack_places` does not make.
    """
    count = chunks * keep
    a, b, c = np.pad(lows, (0, -lows.size % 3)).reshape(-1, 3).T
    low = np.stack([a, a >> 6 | b << 2, b >> 4 | c << 4, c >> 2], axis=1).reshape(-1) & np.uint8(63)
    if low[count:].any():
        raise CodecError("topk: bits are set beyond the last place")
    width = 8 * highs_size(keep)
    set_bits = np.flatnonzero(np.unpackbits(highs, bitorder="little"))
    if set_bits.size != count:
        raise CodecError(f"topk: {set_bits.size} places where {count} were expected")
    at = set_bits.reshape(chunks, keep)
    starts = np.arange(0, chunks * width, width)
    if np.any(at[:, 0] < starts) or np.any(at[:, -1] >= starts + width):
        raise CodecError(f"topk: a chunk has more than {keep} places, another one fewer")
    high = at - (starts[:, None] + np.arange(keep))
    places = (high << LOW_BITS) + low[:count].reshape(chunks, keep)
    if np.any(places[:, 1:] <= places[:, :-1]) or np.any(places[:, -1] >= size):
        raise CodecError("topk: places are not in ascending order, or beyond the chunk")
    return places


CHUNK = 4096  # elements
KEEP = 64  # of a whole chunk
_LARGEST = 0x7F7F  # the largest finite bf16
_SMALLEST = 0x0080  # the smallest normal one
_INFINITY = np.uint32(0x7F800000)  # magnitudes from here on are infinite or NaN

# Work is done on so many chunks at a time that its temporaries stay in a core's second cache, and below the size from
# which malloc asks the kernel for fresh pages each time: beyond, page faults cost several times the arithmetic.
_SELECT = 16  # whole chunks: 256 KiB of magnitudes
_STEP = 128  # chunks of which only the kept are looked at: 64 KiB of places

Places = NDArray[np.int64]


class TopK(Codec):
    """Stable in values: `decode(encode(decode(raw))) == decode(raw)` for `raw` from `encode`.

    Which of equal magnitudes are kept does not depend on the CPU: the ones that come first.
    """

    name = "topk"
    packs = False

    def encoded_size(self, elements: int) -> int:
        kept = kept_of(elements)
        tail = kept_of(elements % CHUNK)
        highs = elements // CHUNK * highs_size(KEEP) + highs_size(tail)
        return 4 * -(-elements // CHUNK) + -(-kept // 4) + lows_size(kept) + highs

    def _encode(self, values: Vector, target: memoryview) -> None:
        levels, codes, lows, highs = _sections(target, values.size)
        for first, count, size, keep in _batches(values.size):
            chunks = values[first * CHUNK : first * CHUNK + count * size].reshape(count, size)
            chosen = np.concatenate([_greatest(chunks[i : i + _SELECT], keep) for i in range(0, len(chunks), _SELECT)])
            kept = np.take_along_axis(chunks, chosen, axis=1)
            levels[first : first + count], picked = _quantise(kept)
            _pack_codes(picked, codes[first * KEEP // 4 :])
            pack_places(chosen, lows[lows_size(first * KEEP) :], highs[first * highs_size(KEEP) :])

    def _decode(self, raw: memoryview, values: Vector) -> None:
        places, kept = self.decode_sparse(raw, values.size)
        values.fill(0)
        values[places] = kept

    def take_off(self, raw: memoryview, values: Vector, scratch: Vector | None) -> None:
        places, sent = self.decode_sparse(raw, values.size)
        values[places] -= sent

    def decode_sparse(self, raw: bytes | bytearray | memoryview, elements: int) -> tuple[Places, Vector]:
        """Places in the vector, ascending, and what stands there: int64 (k,) and float32 (k,), k = `kept_of(elements)`.

        Raises CodecError for bytes that no encoder makes.
        """
        halves, codes, lows, highs = _sections(self._checked(raw, elements), elements)
        if np.any((halves != 0) & (halves < _SMALLEST) | (halves > _LARGEST)) or np.any(halves[:, 0] > halves[:, 1]):
            raise CodecError("topk: a level is negative, not finite, subnormal, or above the greater one")
        # Four values a chunk, by code: lesser, greater, minus lesser, minus greater.
        table = from_bf16(np.concatenate([halves, halves | np.uint16(0x8000)], axis=1)).reshape(-1)
        places, values = np.empty(kept_of(elements), np.int64), np.empty(kept_of(elements), np.float32)
        for first, count, size, keep in _batches(elements):
            at, stop = first * KEEP, first * KEEP + count * keep
            low = lows[lows_size(at) : lows_size(stop)]
            high = highs[first * highs_size(KEEP) :][: count * highs_size(keep)]
            inside = unpack_places(low, high, count, keep, size)
            chunk = np.arange(first, first + count)[:, None]
            code = _unpack_codes(codes[at // 4 : -(-stop // 4)], stop - at).reshape(count, keep)
            places[at:stop] = (chunk * CHUNK + inside).reshape(-1)
            values[at:stop] = table[chunk * 4 + code].reshape(-1)
        return places, values


def kept_of(elements: int) -> int:
    """How many of `elements` values are sent."""
    return elements // CHUNK * KEEP + -(-(elements % CHUNK) * KEEP // CHUNK)


def _sections(raw: memoryview, elements: int) -> tuple[NDArray[np.uint16], Bytes, Bytes, Bytes]:
    """Levels (chunks, 2), codes, and the lows and highs of places inside encoded bytes."""
    kept = kept_of(elements)
    levels = 4 * -(-elements // CHUNK)
    codes = levels + -(-kept // 4)
    lows = codes + lows_size(kept)
    pairs = np.frombuffer(raw[:levels], "<u2").reshape(-1, 2)
    packed = np.frombuffer(raw, np.uint8)
    return pairs, packed[levels:codes], packed[codes:lows], packed[lows:]


def _batches(elements: int) -> Iterator[tuple[int, int, int, int]]:
    """Number of the first chunk, how many chunks of one size, that size, and how many of each are kept."""
    whole, tail = divmod(elements, CHUNK)
    for first in range(0, whole, _STEP):
        yield first, min(_STEP, whole - first), CHUNK, KEEP
    if tail:
        yield whole, 1, tail, kept_of(tail)


def _greatest(chunks: Vector, keep: int) -> Places:
    """Places (n, keep) of the greatest magnitudes of each row of (n, size), ascending; of equal ones, the first.

    Raises CodecError for NaN and infinity, whose bits are the greatest of all.
    """
    size = chunks.shape[1]
    magnitudes = chunks.view(np.uint32) & np.uint32(0x7FFFFFFF)
    ranked = np.partition(magnitudes, size - keep, axis=1)
    if (ranked[:, size - keep :] >= _INFINITY).any():
        raise CodecError("topk: values to encode contain NaN or infinity")
    least = ranked[:, size - keep, None]
    chosen = magnitudes >= least
    flat = np.flatnonzero(chosen)
    if flat.size > chosen.shape[0] * keep:
        equal = magnitudes == least
        surplus = np.count_nonzero(chosen, axis=1) - keep
        rank = np.cumsum(equal, axis=1, dtype=np.int16)  # at most 4096
        chosen &= ~equal | (rank <= (rank[:, -1] - surplus)[:, None])
        flat = np.flatnonzero(chosen)
    return flat.reshape(-1, keep) % size


def _quantise(kept: Vector) -> tuple[NDArray[np.uint32], Bytes]:
    """Two levels (n, 2) as bf16 bits for each row of (n, keep), and the codes (n, keep)."""
    absolute = np.abs(kept).astype(np.float64)
    split = absolute.mean(axis=1, keepdims=True)
    for _ in range(2):
        split = _group_means(absolute, absolute > split).mean(axis=1, keepdims=True)
    greater = absolute > split
    levels = to_bf16(_group_means(absolute, greater).astype(np.float32))
    levels = np.where(levels < _SMALLEST, np.uint32(0), levels)
    zero = np.take_along_axis(levels, greater.astype(np.int64), axis=1) == 0
    return levels, greater.astype(np.uint8) | ((kept < 0) & ~zero).astype(np.uint8) << 1


def _group_means(absolute: NDArray[np.float64], greater: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Means of the lesser and of the greater of each row, (n, 2); an empty group has the other's."""
    counts = np.count_nonzero(greater, axis=1)
    rest = absolute.shape[1] - counts
    above = np.where(greater, absolute, 0).sum(axis=1) / np.maximum(counts, 1)
    below = np.where(greater, 0, absolute).sum(axis=1) / np.maximum(rest, 1)
    return np.stack([np.where(rest > 0, below, above), np.where(counts > 0, above, below)], axis=1)


def _pack_codes(codes: Bytes, packed: Bytes) -> None:
    """Write `codes`, below 4, into the first bytes of `packed`: four in one, the first lowest."""
    quads = np.pad(codes.reshape(-1), (0, -codes.size % 4)).reshape(-1, 4)
    packed[: len(quads)] = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6


def _unpack_codes(packed: Bytes, kept: int) -> Bytes:
    codes = (packed[:, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1) & np.uint8(3)
    if codes[kept:].any():
        raise CodecError("topk: bits are set beyond the last value")
    return codes[:kept]
