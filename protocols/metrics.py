"""Numbers that a running node tells about itself, in Prometheus' text format.

A module declares its metrics beside what they measure, as constants; each object that keeps such a number shows it in
its node's `Metrics`. Nothing is counted twice: a metric is read from the object when somebody asks, so it costs nothing
before, and two nodes in one process do not mix.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

COUNTER = "counter"  # grows until the node ends
GAUGE = "gauge"  # goes up and down

Value = float | Mapping[str, float] | None  # with a label, by its value; None while it is not known


@dataclass(frozen=True)
class Metric:
    """What is measured; `help` is one line and names the unit, where it is not a number of things."""

    name: str
    kind: str
    help: str
    label: str = ""  # what tells the samples of the metric apart; "" where there is one


@dataclass(frozen=True)
class Sample:
    """A metric's value now; `of` is the label's, "" without one."""

    metric: Metric
    of: str
    value: float


class Metrics:
    def __init__(self) -> None:
        self._shown: dict[Metric, list[Callable[[], Value]]] = {}

    def show(self, metric: Metric, read: Callable[[], Value]) -> None:
        """Read `metric` by `read()` from now on; several who show the same metric each give their own label values.

        Raises ValueError where another metric has the name.
        """
        if any(other.name == metric.name and other != metric for other in self._shown):
            raise ValueError(f"two metrics are called {metric.name}")
        self._shown.setdefault(metric, []).append(read)

    def declared(self) -> tuple[Metric, ...]:
        return tuple(sorted(self._shown, key=lambda metric: metric.name))

    def samples(self) -> Iterator[Sample]:
        """All values now, by name and label."""
        for metric in self.declared():
            values: dict[str, float] = {}
            for read in self._shown[metric]:
                value = read()
                for label, number in value.items() if isinstance(value, Mapping) else (("", value),):
                    if number is not None:
                        values[label] = values.get(label, 0) + number
            for label in sorted(values):
                yield Sample(metric, label, values[label])

    def text(self) -> str:
        """All values now, as Prometheus reads them."""
        lines: list[str] = []
        for metric, samples in groupby(self.samples(), lambda sample: sample.metric):
            lines += [f"# HELP {metric.name} {_escaped(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
            for sample in samples:
                label = f'{{{metric.label}="{_escaped(sample.of, quotes=True)}"}}' if metric.label else ""
                lines.append(f"{metric.name}{label} {_number(sample.value)}")
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
