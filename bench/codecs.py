"""Codecs and the arithmetic of an open round: speed, error, bytes, and what error feedback makes of it; JSON lines.

    python bench/codecs.py [--elements 50000000] [--repeats 5] [--rounds 20] [--only speed error feedback ...]

speed     GB of float32 values a second of CPU time, one thread, the median of the repeats; `copy_gb_s` is that of
          `numpy.copyto` in the same run, to compare machines by.
error     relative RMS, |x - decode(encode(x))| / |x|, of one vector: normal values; heavy-tailed ones (Student's t of
          three degrees in blocks whose scales differ by e each); the pseudo-gradient of 20 inner steps of a byte-lm
          that has trained for 100 (of the parameters in examples/byte-lm.toml).
feedback  the same of sums over rounds, of what was meant and of what was sent, with and without error feedback: of
          `--rounds` pseudo-gradients of that model, one after the other.
places    bits a place that topk sends, by different codes, and the entropy of places that are drawn evenly.
entropy   what is left to gain by coding what codecs leave of such a pseudo-gradient, in percent of its bytes: by the
          Huffman codes that slow links carry, zlib and lzma, and by an ideal code of bytes that knows how often each
          occurs, as a range coder comes near to.
round     CPU seconds to apply 16 topk contributions, and for the exact norm of one.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.protocols.transfer.bulk import WINDOW
from swarmnode.training.codecs import CODECS, codec_in
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.codecs.topk import CHUNK, KEEP, TopK
from swarmnode.training.open_step import CLIP_UNIT, Factor, apply_contributions, norm_of, opened
from swarmnode.training.outer import OuterState

Vector = NDArray[np.float32]
Line = dict[str, Any]

SPEC = Path(__file__).parent.parent / "examples" / "byte-lm.toml"
INNER_STEPS = 20
WARM_UP = 5  # rounds before the first pseudo-gradient that counts
CONTRIBUTIONS = 16


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median CPU time of `work`, which runs in this thread alone, after one run to warm up.

    On a quiet machine that is the wall time; beside other work, the wall time is theirs as well.
    """
    work()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def speed(chosen: argparse.Namespace) -> Iterator[Line]:
    values = normal(chosen.elements)
    gigabytes = values.nbytes / 1e9
    target = np.empty_like(values)
    copy = gigabytes / seconds(lambda: np.copyto(target, values), chosen.repeats)
    for name, codec in CODECS.items():
        out = memoryview(bytearray(codec.encoded_size(values.size)))
        encode = seconds(lambda codec=codec, out=out: codec.encode(values, out), chosen.repeats)  # type: ignore[misc]
        decode = seconds(lambda codec=codec, out=out: codec.decode(out, values.size, target), chosen.repeats)  # type: ignore[misc]
        yield {
            "codec": name,
            "elements": values.size,
            "bytes_per_element": round(len(out) / values.size, 5),
            "encode_gb_s": round(gigabytes / encode, 2),
            "decode_gb_s": round(gigabytes / decode, 2),
            "copy_gb_s": round(copy, 2),
        }


def error(chosen: argparse.Namespace) -> Iterator[Line]:
    kinds = {"normal": normal(1 << 22), "heavy": heavy(1 << 22), "pseudo-gradient": pseudo_gradients(chosen.rounds)[0]}
    for kind, values in kinds.items():
        for name, codec in CODECS.items():
            decoded = codec.decode(codec.encode(values), values.size)
            yield {"codec": name, "values": kind, "relative_rms": round(relative_rms(values, decoded), 5)}


def feedback(chosen: argparse.Namespace) -> Iterator[Line]:
    vectors = pseudo_gradients(chosen.rounds)
    meant = sum(vectors, np.zeros(vectors[0].size))
    for name, codec in CODECS.items():
        line: Line = {
            "codec": name,
            "rounds": len(vectors),
            "plain": round(relative_rms(meant, sent(name, vectors)), 5),
        }
        for decay in (1.0, 0.95):
            carried = ErrorFeedback(codec, meant.size, decay=decay)
            line[f"feedback_{decay:g}"] = round(relative_rms(meant, sent(name, vectors, carried)), 5)
        yield line


def sent(name: str, vectors: list[Vector], carried: ErrorFeedback | None = None) -> NDArray[np.float64]:
    """The sum of what arrives of `vectors`, one a round, with error feedback where there is one."""
    total = np.zeros(vectors[0].size)
    for turn, vector in enumerate(vectors):
        encoding = codec_in(turn, name)
        if carried is None:
            raw = encoding.encode(vector)
        else:
            carried.codec = encoding
            raw = carried.encode(vector)
            carried.commit()
        total += encoding.decode(raw, vector.size)
    return total


def places(chosen: argparse.Namespace) -> Iterator[Line]:
    """Of whole chunks; what a code adds for the last, shorter one does not count."""
    even = (math.lgamma(CHUNK + 1) - math.lgamma(KEEP + 1) - math.lgamma(CHUNK - KEEP + 1)) / math.log(2) / KEEP
    for kind, values in (("normal", normal(1 << 22)), ("pseudo-gradient", pseudo_gradients(chosen.rounds)[0])):
        whole = values[: values.size // CHUNK * CHUNK]
        kept, _ = TopK().decode_sparse(TopK().encode(whole), whole.size)
        gaps = np.diff(kept.reshape(-1, KEEP) % CHUNK, axis=1, prepend=-1)  # at least 1
        rice = np.stack([(gaps - 1 >> k) + 1 + k for k in range(9)]).sum(axis=2)  # (parameter, chunk)
        length = np.floor(np.log2(gaps))
        shares = np.unique(gaps, return_counts=True)[1] / gaps.size
        bits = {
            "fixed": 12.0,
            "elias_fano": 8.0,
            "rice_best": rice.sum(axis=1).min() / gaps.size,
            "rice_best_of_chunk": (rice.min(axis=0) + 4).sum() / gaps.size,  # and four bits to say which
            "elias_gamma": (2 * length + 1).mean(),
            "elias_delta": (length + 1 + 2 * np.floor(np.log2(length + 1))).mean(),
            "entropy_of_gaps": -(shares * np.log2(shares)).sum(),
            "entropy_if_even": even,
        }
        yield {"values": kind, "bits_per_place": {name: round(float(cost), 2) for name, cost in bits.items()}}


def entropy(chosen: argparse.Namespace) -> Iterator[Line]:
    values = pseudo_gradients(chosen.rounds)[0]
    for name, codec in CODECS.items():
        raw = np.frombuffer(codec.encode(values), np.uint8)
        packs = zlib.compressobj(1, zlib.DEFLATED, WINDOW, strategy=zlib.Z_HUFFMAN_ONLY)
        sizes = {
            "huffman": len(packs.compress(raw) + packs.flush()),
            "zlib": len(zlib.compress(raw, 9)),
            "lzma": len(lzma.compress(raw, preset=6)),
            "bytes": information(raw) / 8,
        }
        gains = {by: round(100 * (1 - size / raw.size), 2) for by, size in sizes.items()}
        yield {"codec": name, "bytes_per_element": round(raw.size / values.size, 4), "saved_percent": gains}


def information(symbols: NDArray[np.uint8]) -> float:
    """Bits of all symbols, each by how often it occurs among them."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-(counts * np.log2(counts / symbols.size)).sum())


def round_(chosen: argparse.Namespace) -> Iterator[Line]:
    values = normal(chosen.elements)
    raw = bytes(TopK().encode(values))
    state = OuterState.start(values)
    factors = [Factor(1, CLIP_UNIT, CONTRIBUTIONS)] * CONTRIBUTIONS
    applied = seconds(lambda: apply_contributions(state, [raw] * CONTRIBUTIONS, factors, lr=1.0), chosen.repeats)
    norm = seconds(lambda: norm_of(opened(raw, values.size)), chosen.repeats)
    yield {
        "elements": values.size,
        "contributions": CONTRIBUTIONS,
        "apply_s": round(applied, 3),
        "exact_norm_s": round(norm, 4),
    }


def relative_rms(wanted: NDArray[Any], got: NDArray[Any]) -> float:
    """|wanted - got| / |wanted|."""
    return float(np.linalg.norm(wanted - got.astype(np.float64)) / np.linalg.norm(wanted))


@cache
def normal(elements: int) -> Vector:
    return np.random.default_rng(0).standard_normal(elements, np.float32)


@cache
def heavy(elements: int) -> Vector:
    rng = np.random.default_rng(0)
    scales = np.exp(rng.standard_normal(-(-elements // CHUNK))).repeat(CHUNK)[:elements]
    return (rng.standard_t(3, elements) * scales).astype(np.float32)


@cache
def pseudo_gradients(rounds: int) -> list[Vector]:
    """What one worker's parameters move by in each of so many rounds in a row, float32 (P,) each."""
    import torch

    from swarmnode.testing.runtext import RunText
    from swarmnode.training.byte_lm import ByteLM
    from swarmnode.training.inner import InnerLoop, layout_of
    from swarmnode.training.runspec import load_runspec
    from swarmnode.training.tasks import Assignment

    torch.set_num_threads(1)  # beside other work a second one costs more than it brings
    with tempfile.TemporaryDirectory() as folder:
        text = RunText(load_runspec(SPEC), Path(folder))
        task = ByteLM(text.spec, Assignment(text.spec.run_id, "bench", **text.files("bench")))
        vector = torch.zeros(layout_of(task.model).parameters)
        loop = InnerLoop(text.spec, task, peer_id="bench", vector=vector, keep=False)
        moved = []
        for round in range(WARM_UP + rounds):
            before = vector.numpy().copy()
            loop.train(round=round, steps=INNER_STEPS, seconds=1e9, between=lambda: False)
            moved.append(before - vector.numpy())
    return moved[WARM_UP:]


PARTS = {"speed": speed, "error": error, "feedback": feedback, "places": places, "entropy": entropy, "round": round_}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and error of the codecs, as JSON lines.")
    parser.add_argument("--elements", type=int, default=50_000_000, help="float32 values in the vectors that are timed")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each")
    parser.add_argument("--rounds", type=int, default=20, help="pseudo-gradients with error feedback")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    chosen = parser.parse_args()
    for name in chosen.only:
        for line in PARTS[name](chosen):
            print(json.dumps({"part": name, **line}), flush=True)


if __name__ == "__main__":
    main()
