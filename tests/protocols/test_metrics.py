"""What a node tells about itself is well-formed, for Prometheus and for people."""

from __future__ import annotations

import math

import pytest

from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics

BYTES = Metric("test_bytes_total", COUNTER, "bytes read", "direction")
PEERS = Metric("test_peers", GAUGE, 'peers that are "here"\nnow')


def test_text_is_what_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.show(BYTES, lambda: {"in": 3, 'o"u\\t\n': 1.5})
    metrics.show(PEERS, lambda: 2)
    assert metrics.text() == (
        "# HELP test_bytes_total bytes read\n"
        "# TYPE test_bytes_total counter\n"
        'test_bytes_total{direction="in"} 3\n'
        'test_bytes_total{direction="o\\"u\\\\t\\n"} 1.5\n'
        '# HELP test_peers peers that are "here"\\nnow\n'
        "# TYPE test_peers gauge\n"
        "test_peers 2\n"
    )


@pytest.mark.parametrize(
    ("value", "shown"), [(math.nan, "NaN"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (1e9, "1000000000")]
)
def test_numbers_that_are_none_are_written_as_prometheus_reads_them(value: float, shown: str) -> None:
    metrics = Metrics()
    metrics.show(PEERS, lambda: value)
    assert metrics.text().splitlines()[-1] == f"test_peers {shown}"


def test_several_parts_share_a_metric_and_its_values_are_read_anew_each_time() -> None:
    metrics, seen = Metrics(), {"in": 1}
    metrics.show(BYTES, lambda: seen)
    metrics.show(BYTES, lambda: {"out": 5})
    seen["in"] = 2
    assert [(sample.of, sample.value) for sample in metrics.samples()] == [("in", 2), ("out", 5)]
    assert metrics.declared() == (BYTES,)


def test_two_metrics_of_one_name_are_refused() -> None:
    metrics = Metrics()
    metrics.show(BYTES, lambda: {})
    with pytest.raises(ValueError, match="test_bytes_total"):
        metrics.show(Metric("test_bytes_total", GAUGE, "something else"), lambda: 0)
