"""Checks for `Rollouts(check=…)`: what a group must be before a node keeps it or passes it on.

Without one, a node passes on whatever its author signed, and leaves judging to whoever learns from it. With
`informative`, groups of which nobody could learn anything end at the first honest node: answers are verified here, with
the question that the task's name and seed give, and a group whose answers are all equally right is a zero gradient
(SAPO, 2509.08721, drops them after they have travelled).
"""

from __future__ import annotations

from swarmnode.protocols.methods.rollouts.signed import SignedGroup
from swarmnode.training.rl.groups import RefusedGroup, score


def informative(signed: SignedGroup, *, judged: bool = False) -> str:
    """Empty where one can learn from the group; else uninformative, unknown-task, unknown-vocabulary or bad-token.

    `judged`: rewards are multiplied by the question's judge.
    """
    try:
        return "" if score(signed.author, signed.group, judged=judged).informative else "uninformative"
    except RefusedGroup as refused:
        return refused.reason
