"""Learners that begin alike, for tests and benchmarks."""

from __future__ import annotations

import copy

from swarmnode.training.rl.learner import Learner


def start_from(learner: Learner, other: Learner) -> None:
    """Give a learner another's parameters and reference, as nodes have that begin from one checkpoint."""
    learner.policy.load_state_dict(other.policy.state_dict())
    learner.reference = copy.deepcopy(other.reference)
