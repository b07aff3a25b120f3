"""What reputation does to whoever lies for it, in a swarm of numbers, as JSON lines.

    python bench/reputation_sim.py [--seeds 5] [--noise 0.3] [--only slander]

Each line is one scenario: what it comes to without defence (the mean of what everybody says, a newcomer trusted like
anybody, absence counted as no gain), with the defences of `protocols/reputation`, and the bound that is asked. The
worst of `--seeds` runs is shown. No network and no training: peers have a true gain, judges measure it with `--noise`
(standard deviation of one measurement, relative to an honest contribution's gain). 16 peers unless a line says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from reputationscenarios import SCENARIOS, Outcome


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    scenario: str
    metric: str
    undefended: float
    defended: float
    bound: str
    passes: bool
    seconds: float


def worst(name: str, scenario: Callable[[int, float], Outcome], seeds: int, noise: float) -> Line:
    began = time.perf_counter()
    outcomes = [scenario(seed, noise) for seed in range(seeds)]
    last = max(outcomes, key=lambda outcome: outcome.excess)
    seconds = round(time.perf_counter() - began, 2)
    return Line(name, last.metric, round(last.undefended, 4), round(last.defended, 4), last.bound, last.passes, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--only", choices=sorted(SCENARIOS))
    chosen = parser.parse_args()
    for name, scenario in SCENARIOS.items():
        if chosen.only in (None, name):
            print(json.dumps(asdict(worst(name, scenario, chosen.seeds, chosen.noise))), flush=True)


if __name__ == "__main__":
    main()
