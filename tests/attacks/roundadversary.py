"""What every adversary of the round group is: something that happens to a running swarm, and what must be true then."""

from __future__ import annotations

from typing import ClassVar

from harness import Adversary
from openswarm import Scene
from undefended import Lacking

AFTER = 3  # rounds that survivors do after the fault, at least


class RoundAdversary(Adversary):
    """What happens to a running swarm, and what must be true afterwards beside one state in every round."""

    first = 0  # round in which it happened
    slower = 2.0  # of the usual round, that a round may take
    healing = 0  # rounds from `first` on until all must have one state
    lacks: ClassVar[Lacking]  # what the undefended nodes beside it have not

    async def attack(self, target: Scene) -> None:
        raise NotImplementedError

    async def broken(self, target: Scene) -> list[str]:
        """Promises of this attack's own that were broken."""
        return []

    async def achieved(self, target: Scene) -> str:
        """What it came to beside split and slow rounds, for the table; also where rounds do not end."""
        return ""

    def undefended(self) -> RoundAdversary:
        """What does the same to nodes that lack this."""
        return self
