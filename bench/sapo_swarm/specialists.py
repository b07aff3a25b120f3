"""Whether a policy gets better by others' groups at tasks that it never asks itself: two specialists and a generalist.

    outcome = train_specialists(Arm("together", adaptive=True, correction="taper", rounds=100, warm_up=60), seed=1)

Three policies of two layers and width 48 begin from one checkpoint that knows the form of an answer. Each asks itself
one digit task in base 3 only, and learns in step with the others, as the product does; "alone" it hears of nobody. What
is told is how often the third is right on fresh questions of each task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sapo_swarm.swarm import Arm, settings_of
from swarmnode.testing.learners import start_from
from swarmnode.training.rl.learner import Learner
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.tasks import well_formed

BASE = 3
ASKED = {"sorts": "digits/sort", "swaps": "digits/swap", "generalist": "digits/complement"}
HELD_OUT = 256  # questions of each task


@dataclass(frozen=True)
class Specialised:
    """How often the generalist is right, 0 to 1, by task."""

    beginning: dict[str, float]
    right: dict[str, float]
    reward: float  # mean reward of a round, summed over rounds and nodes: each of its own task


def train_specialists(arm: Arm, seed: int, say: Callable[[int, float], None]) -> Specialised:
    """Run `arm`. All chance comes from `seed`."""
    everything = replace(settings_of(arm), tasks=tuple((task, BASE) for task in ASKED.values()))
    nodes = {
        name: Learner(name, build(PolicySpec(), seed=seed), everything, seed=100 * seed + number)
        for number, name in enumerate(ASKED)
    }
    first, *others = nodes.values()
    first.warm_up(well_formed, steps=arm.warm_up)
    for other in others:
        start_from(other, first)
    generalist = nodes["generalist"]
    beginning = _right(generalist)
    for name, node in nodes.items():
        node.settings = replace(everything, tasks=((ASKED[name], BASE),))
    reward = 0.0
    for round in range(arm.rounds):
        own = {name: node.sample() for name, node in nodes.items()}
        for name, node in nodes.items():
            theirs = [(author, scored.group) for author, groups in own.items() if author != name for scored in groups]
            reward += node.learn(own[name], theirs if arm.external or arm.adaptive else []).reward
        say(round + 1, reward)
    return Specialised(beginning, _right(generalist), reward)


def _right(node: Learner) -> dict[str, float]:
    asked, found = node.settings, {}
    for task in ASKED.values():
        node.settings = replace(asked, tasks=((task, BASE),))
        found[task] = node.heldout(HELD_OUT, seed=1)
    node.settings = asked
    return found
