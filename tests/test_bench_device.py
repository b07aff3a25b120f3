"""bench/device.py in miniature, on the CPU: all of its figures, and an int8 in torch that makes the codec's bytes."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import device

from swarmnode.training.codecs import codec


def test_every_part_is_measured() -> None:
    shape = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 300, "context": 16, "batch": 2}
    told = device.measure(Namespace(**shape, steps=2, repeats=2, optimizer="muon", precision="fp32", device="cpu"))
    assert told["parameters"] > 300 * 16
    assert told["training"]["tokens_per_s"] > 0 and 0 < told["training"]["share_of_measured"] < 1
    assert told["exchange"]["bytes_equal"]
    assert all(value >= 0 for name, value in told["exchange"].items() if name != "device_saves_ms")
    assert told["judging"]["gradient_ms"] > 0
    assert told["audit"]["distance"] == 0.0  # the same steps by the same device


@pytest.mark.parametrize(
    "where",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
    ],
)
def test_int8_in_torch_makes_the_bytes_of_the_codec(where: str) -> None:
    random = np.random.default_rng(1)
    for size in (1, 1023, 1024, 5000, 300_000):
        values = random.standard_normal(size, np.float32) * np.exp(random.normal(0, 12, size)).astype(np.float32)
        values[: size // 3] *= np.float32(1e-38)  # subnormal, and blocks that become zero
        scales, integers = device.encode_int8(torch.from_numpy(values).to(where))
        assert device.same_bytes(codec("int8"), values, scales, integers)
