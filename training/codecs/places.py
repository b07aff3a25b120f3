"""Ascending places in chunks of 4096, eight bits each: the code of Elias and Fano (Elias 1974, Fano 1971).

    place = high * 64 + low
    lows  = the low six bits of each place, four in three bytes
    highs = a bitmap for each chunk of k places, 2k bits rounded up to bytes: of its i-th place bit high + i is set

Of `highs` bits, k are set and at most one for each value of `high` is not, so a chunk of 64 places takes 48 + 16 bytes.
Places drawn evenly have 7.36 bits of entropy; a Rice code of the gaps takes 7.5 on the average and makes every size
depend on what is sent, fixed numbers of 12 bits take 12 (docs/codecs.md).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.training.codecs.base import CodecError

LOW_BITS = 6
Bytes = NDArray[np.uint8]


def lows_size(places: int) -> int:
    """Bytes of the lows of so many places."""
    return -(-places * LOW_BITS // 8)


def highs_size(keep: int) -> int:
    """Bytes of the bitmap of one chunk with `keep` places, of `keep` * 64 elements at the most."""
    return -(-2 * keep // 8)


def pack(places: NDArray[np.int64], lows: Bytes, highs: Bytes) -> None:
    """Write `places` (chunks, keep), ascending in each row and below keep * 64, to the first bytes of both."""
    chunks, keep = places.shape
    low = places.reshape(-1).astype(np.uint8) & np.uint8(63)
    a, b, c, d = np.pad(low, (0, -low.size % 4)).reshape(-1, 4).T
    triples = np.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], axis=1).reshape(-1)
    lows[: lows_size(low.size)] = triples[: lows_size(low.size)]
    bits = np.zeros((chunks, 8 * highs_size(keep)), np.bool_)
    np.put_along_axis(bits, (places >> LOW_BITS) + np.arange(keep), True, axis=1)
    highs[: chunks * highs_size(keep)] = np.packbits(bits, bitorder="little")


def unpack(lows: Bytes, highs: Bytes, chunks: int, keep: int, size: int) -> NDArray[np.int64]:
    """The places (chunks, keep) in `lows` and `highs`, ascending in each row and below `size`, elements of a chunk.

    Raises CodecError for bytes that `pack` does not make.
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
