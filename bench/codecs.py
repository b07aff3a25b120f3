"""Speed and error of the codecs beside a plain numpy copy of the same vector, as JSON lines.

    python bench/codecs.py [--elements 16777216] [--repeats 5]

`encode_gb_s` and `decode_gb_s` are GB of float32 values a second, one thread, the median of the repeats; `copy_gb_s` is
that of `numpy.copyto` in the same run, to compare machines by. `rms_error` is of normal values of sigma 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from swarmnode.training.codecs import CODECS


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of `work` after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and error of the codecs, as JSON lines.")
    parser.add_argument("--elements", type=int, default=1 << 24, help="float32 values in the vector")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    chosen = parser.parse_args()
    values = np.random.default_rng(0).standard_normal(chosen.elements, np.float32)
    gigabytes = values.nbytes / 1e9
    target = np.empty_like(values)
    copy = gigabytes / seconds(lambda: np.copyto(target, values), chosen.repeats)
    for codec in CODECS.values():
        out = memoryview(bytearray(codec.encoded_size(values.size)))
        encode = seconds(lambda codec=codec, out=out: codec.encode(values, out), chosen.repeats)  # type: ignore[misc]
        decode = seconds(lambda codec=codec, out=out: codec.decode(out, values.size), chosen.repeats)  # type: ignore[misc]
        error = codec.decode(out, values.size) - values
        line = {
            "codec": codec.name,
            "elements": values.size,
            "bytes_per_element": len(out) / values.size,
            "rms_error": float(np.sqrt(np.mean(np.square(error, dtype=np.float64)))),
            "encode_gb_s": round(gigabytes / encode, 2),
            "decode_gb_s": round(gigabytes / decode, 2),
            "copy_gb_s": round(copy, 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
