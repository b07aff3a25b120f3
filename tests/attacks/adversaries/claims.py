"""What a member of a known swarm says of its own work: `diloco` weighs by samples, which nobody can count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simswarm import SimSwarm

CLAIMED = 10**9  # samples, in a round
LIAR = "e"


class ClaimedSamples:
    """Trains as the others do, and says that it trained on CLAIMED samples."""

    name = "claimed 1e9 samples, in a swarm of known members (diloco)"

    def tell(self, swarm: SimSwarm) -> None:
        trainer = swarm.nodes[LIAR].trainer
        usual = trainer.train

        async def train(**given: Any) -> Any:
            return replace(await usual(**given), samples=CLAIMED)

        trainer.train = train  # type: ignore[method-assign]
