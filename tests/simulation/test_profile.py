"""How much of the product one round takes: modules that it enters, and functions that it calls, at four nodes.

A reader has to go through every module that a round enters. Each ceiling is what a round had when it was last lowered,
with some room for the order in which peers are drawn; whoever gets below one lowers it in the same commit. What is
counted is virtual: the simulated network, toy trainers and a state in memory, so nothing depends on the machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from simswarm import SimSwarm, simulate

from swarmnode.testing.simnet import SimWorld

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cli", "crdt", "node", "package", "protocols", "training")  # what volunteers run; testing/ is not
NAMES = ("a", "b", "c", "d")
WARM = 1  # the round before the one that is counted: connections are made, waits have adapted

CEILINGS = {  # modules, calls
    "open": (49, 32_600),
    "diloco": (33, 4_200),
}


class Profile:
    """Counts calls of the product's functions, by module. A coroutine that goes on after a wait is not called again."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._modules: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_lasti <= 2:  # further on where it goes on
            module = self._modules.get(frame.f_code)
            if module is None:
                module = self._modules[frame.f_code] = module_of(frame.f_code)
            if module:
                self.calls[module] += 1


def module_of(code: CodeType) -> str:
    """The file of the product that it is of, from the root; empty for all else."""
    path = Path(code.co_filename).resolve()
    if not path.is_relative_to(ROOT):
        return ""
    inside = path.relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] in ROOMS else ""


def profile_of(method: str) -> Counter[str]:
    """Calls by module in one round of four nodes."""
    profile = Profile()

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(WARM, *NAMES)
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            await swarm.round_done(WARM + 1, *NAMES)
        finally:
            sys.setprofile(before)

    validators = NAMES if method == "open" else ()
    simulate(body, *NAMES, world=SimWorld(latency=0.05), method=method, validators=validators)
    return profile.calls


@pytest.mark.parametrize("method", CEILINGS)
def test_a_round_enters_no_more_modules_and_calls_no_more_functions_than_it_did(method: str) -> None:
    calls = profile_of(method)
    modules, most = CEILINGS[method]
    listed = "\n".join(f"{count:6} {module}" for module, count in calls.most_common())
    print(f"{method}: {len(calls)} modules, {calls.total()} calls\n{listed}")
    assert calls.total() > most / 2, f"what is counted is not the round, or its ceiling is to be lowered:\n{listed}"
    assert len(calls) <= modules, f"one round of {method} enters {len(calls)} modules:\n{listed}"
    assert calls.total() <= most, f"one round of {method} makes {calls.total()} calls:\n{listed}"
