"""A population of learning rates: each member tries one of its own, and the worst quarter takes over the best's.

Population based training (Jaderberg et al., 1711.09846) as a swarm has it for nothing. In a round of diloco all members
begin from one state and have one held-out text: so the loss of each one's own steps, measured before the exchange,
tells whose rate served best. No copies of a model compete, since the round makes one of all. What members tell:

    sync.write(KEY, {"period": 7, "factor": 1.25, "loss": 3.2})       after the rounds of a period, [inner] population

Its factor times the run's rates (or those that the owner steered to) is what a member trains by. In the first round of
a period the words on the last one spread, and it counts for nobody; behind it each member ranks what it heard of the
present members. Who is in the worst quarter, or has no word on that period, as it joined or came back, draws a factor
of the best quarter; then all go on by 0.8 or 1.25 times their own. Who is alone changes nothing.

A rate is each member's own affair: states stay the same bits, and who hears less compares less. A word is believed as
a contribution is, within LEAST and MOST. What a single round's loss favours is not always what a long run needs: near
the end of learning a smaller rate looks better at once (short-horizon bias; Wu et al., 1803.02021).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from swarmnode.crdt.record import InvalidRecord
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.trainer import loss_of
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.state.backend import StateError
from swarmnode.protocols.wire import Message, WireError, received, within
from swarmnode.training.sections import InnerSection

logger = logging.getLogger(__name__)

KEY = "note/population"
STEPS = (0.8, 1.25)  # between a factor and the next (Jaderberg et al., section 4.2)
LEAST, MOST = 1 / 16, 16.0  # factors of the run's rates
WORST = 1e300  # loss, which is finite
SLOWEST, FASTEST = 1e-8, 10.0  # rates, as in a run's file


@dataclass(frozen=True)
class Trial(Message):
    """What a member tried in a period."""

    period: int
    factor: Annotated[float, within(LEAST, MOST)]  # of the run's learning rates
    loss: Annotated[float, within(-WORST, WORST)]  # mean held-out loss after its own steps of a round


def next_factor(me: PeerId, own: float, trials: Mapping[PeerId, Trial], rng: random.Random) -> float:
    """What `me` tries next, who tried `own`, by what was heard of a period."""
    ranked = sorted(trials, key=lambda peer: (trials[peer].loss, peer))
    quarter = max(1, len(ranked) // 4)
    if ranked and (me not in trials or me in ranked[-quarter:]):
        own = trials[rng.choice(ranked[:quarter])].factor
    return min(max(own * rng.choice(STEPS), LEAST), MOST)


class Population:
    def __init__(self, parts: Context) -> None:
        self._parts = parts
        self._every = parts.spec.inner.population  # rounds of a period
        self.factor = 1.0
        self._losses: dict[int, float] = {}  # by round of this period, without its first
        self._period = -1  # the last one that was compared
        self._recalled = False

    def applied(self, inner: InnerSection) -> InnerSection:
        """The run's values with this member's own rates."""
        rates = {key: min(max(getattr(inner, key) * self.factor, SLOWEST), FASTEST) for key in ("lr", "muon_lr")}
        return replace(inner, **rates) if self.factor != 1 else inner

    def told(self, inner: InnerSection) -> dict[str, Any]:
        """This member's own rate, by TABLE.KEY, where it is not the run's."""
        key = "muon_lr" if inner.optimizer == "muon" else "lr"
        return {f"inner.{key}": float(f"{getattr(self.applied(inner), key):.4g}")} if self.factor != 1 else {}

    async def begin(self, round: int, members: Collection[PeerId]) -> None:
        """Find the factor for the steps of `round`, which `members` take."""
        if not self._recalled:  # who comes back goes on as it was, until others' words are compared
            known = await self._heard(self._parts.me)
            self._recalled = True
            if known is not None:
                self.factor = known.factor
        period = round // self._every - 1
        if round % self._every == 1 and period >= self._period and len(members) > 1:
            heard = {peer: trial for peer in members if (trial := await self._heard(peer)) is not None}
            self._period = period + 1  # a round may begin more than once
            trials = {peer: trial for peer, trial in heard.items() if trial.period == period}
            rng = random.Random(f"{self._parts.spec.run.seed} {self._parts.me} {period}")
            if trials or period < 0:
                self.factor = next_factor(self._parts.me, self.factor, trials, rng)
                logger.info("round %d: training at %.3g times the run's learning rate", round, self.factor)

    async def measure(self, round: int) -> None:
        """After the steps of `round`, while the trainer has their result; at the end of a period, tell the others."""
        inner, place = self._parts.spec.inner, round % self._every
        if place == 0:
            self._losses = {}
            return
        due = [each for each in range(round - place + 1, round - place + self._every) if inner.measured_after(each)]
        if round in due:
            self._losses[round] = await loss_of(self._parts.trainer)
        whole = bool(due) and self._losses.keys() == set(due) and all(map(math.isfinite, self._losses.values()))
        if place < self._every - 1 or not whole:  # what diverged is told to nobody, and follows the best
            return
        loss = sum(self._losses.values()) / len(self._losses)
        word = {"period": round // self._every, "factor": self.factor, "loss": loss}
        try:
            await self._parts.sync.write(KEY, word)
        except (StateError, InvalidRecord) as error:
            logger.warning("round %d: the others do not hear of this node's learning rate: %s", round, error)

    async def _heard(self, peer: PeerId) -> Trial | None:
        try:
            said = await self._parts.state.get(peer, KEY)
            return received(Trial, said.value) if said is not None and not said.tombstone else None
        except WireError:  # it is no trial
            return None
        except StateError as error:  # the round does not wait for the disk
            logger.warning("the learning rate of %s cannot be read: %s", peer, error)
            return None
