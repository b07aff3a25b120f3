"""The reputation group: what whoever lies, splits up, comes back or goes away makes of its own score and of others'."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import trio
from harness import Outcome
from reputationscenarios import SCENARIOS
from reputationscenarios import Outcome as Figures

NOISE = 0.3  # standard deviation of one measurement, as a share of an honest gain
SEEDS = 10


def worst(name: str, seeds: int = SEEDS) -> Figures:
    """Of so many runs of a scenario, the one that comes closest to its bound or goes farthest beyond it."""
    return max((SCENARIOS[name](seed, NOISE) for seed in range(seeds)), key=lambda figures: figures.excess)


async def outcomes() -> AsyncIterator[Outcome]:
    """Every scenario in full."""
    for name, scenario in SCENARIOS.items():
        figures = worst(name)
        await trio.lowlevel.checkpoint()
        assert scenario.__doc__ is not None
        yield Outcome(
            "reputation",
            f"{name}: {_lower(scenario.__doc__)}",
            f"{figures.metric} {figures.defended:.3g}, asked {figures.bound}",
            f"{figures.undefended:.3g}",
            () if figures.passes else (f"{figures.defended:.3g} is not {figures.bound}",),
            "what the defence costs" if replace(figures, defended=figures.undefended).passes else "",
        )


def _lower(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line[0].lower() + line[1:]
