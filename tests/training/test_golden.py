"""Golden vectors: this machine computes what the swarm computes, and one that does not is told so and kept apart."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.process import reason_of
from swarmnode.training import golden, open_step, outer
from swarmnode.training.codecs import CODECS
from swarmnode.training.codecs.topk import TopK


def test_this_machine_computes_what_the_swarm_computes() -> None:
    golden.check_golden()
    assert golden.computed() == golden.EXPECTED


def test_every_codec_has_an_expected_hash() -> None:
    assert {f"codec {name}" for name in CODECS} <= set(golden.EXPECTED)


def test_inputs_hold_what_machines_may_differ_on() -> None:
    x = golden.vector("inputs")
    assert x.dtype == np.float32 and np.isfinite(x).all()
    magnitudes = np.abs(x)
    assert ((magnitudes > 0) & (magnitudes < np.finfo(np.float32).tiny)).any()
    assert (np.signbit(x) & (x == 0)).any() and (magnitudes > 1000).any() and (x == 0.5).any()


def test_a_cpu_told_to_flush_subnormals_to_zero_is_found() -> None:
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU always keeps subnormals")
    try:
        with pytest.raises(golden.GoldenMismatch, match="outer_step"):
            golden.check_golden()
    finally:
        torch.set_flush_denormal(False)
    golden.check_golden()


def test_a_fused_multiply_add_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """acc + f * x with one rounding instead of two, as a compiler might contract it."""

    def fused(total: np.ndarray, factor: np.float32, values: np.ndarray) -> None:
        total[:] = (total.astype(np.float64) + np.float64(factor) * values.astype(np.float64)).astype(np.float32)

    monkeypatch.setattr(open_step, "fold_in", fused)
    with pytest.raises(golden.GoldenMismatch, match=r"bits than the swarm: open_step int8"):
        golden.check_golden()


def test_a_sum_in_another_order_and_another_choice_of_ties_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turned, given, shares = {"part 0": "part 2", "part 2": "part 0"}, golden.vector, outer.shares_of
    monkeypatch.setattr(golden, "vector", lambda name, *size: given(turned.get(name, name), *size))
    monkeypatch.setattr(golden, "shares_of", lambda weights: shares(weights)[::-1])
    with pytest.raises(golden.GoldenMismatch, match="swarm: weighted_sum"):
        golden.check_golden()
    monkeypatch.undo()
    encode = TopK.encode
    monkeypatch.setattr(TopK, "encode", lambda self, values: encode(self, np.ascontiguousarray(values[::-1])))
    with pytest.raises(golden.GoldenMismatch, match="codec topk, open_step topk"):
        golden.check_golden()


def test_the_daemon_ends_with_words_for_a_person() -> None:
    mismatch = golden.GoldenMismatch("this machine computes other bits than the swarm: outer_step")
    reason = reason_of(BaseExceptionGroup("", [ExceptionGroup("", [mismatch])]))
    assert isinstance(reason, ExpectedError) and "other bits" in str(reason)
