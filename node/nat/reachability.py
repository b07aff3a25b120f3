"""Whether this node can be dialled from outside: a small state machine fed with verdicts of peers.

    unknown --(most of those who tried got through)--> public
    unknown --(most did not)-------------------------> private
    public <--(two thirds of the verdicts say so)----> private

One peer never decides while others can be asked: `ENOUGH` verdicts are wanted, fewer count only once nobody else is
left to ask. Verdicts age; a change of the network forgets them all. Pure: time is an argument, in seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

ENOUGH = 3  # verdicts from different hosts before the state is believed
AGE = 900.0  # s after which a verdict no longer counts
MAX_VERDICTS = 16  # the newest


class Reach(enum.Enum):
    """What `swarmnode status` shows as reachability."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    PRIVATE = "private"


@dataclass(frozen=True)
class Verdict:
    """One peer's try to dial this node."""

    host: str  # where the peer is; verdicts of one host count once
    reached: bool
    at: float  # s


class Reachability:
    """The state and the verdicts behind it."""

    def __init__(self) -> None:
        self.state = Reach.UNKNOWN
        self._verdicts: dict[str, Verdict] = {}  # by host

    def heard(self, verdict: Verdict, *, others: int) -> Reach:
        """Take a verdict into account; `others` is how many more hosts could be asked. The state then."""
        self._verdicts.pop(verdict.host, None)
        self._verdicts[verdict.host] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]
        fresh = [v for v in self._verdicts.values() if v.at > verdict.at - AGE]
        if len(fresh) >= ENOUGH or not others:
            self.state = self._decide(fresh)
        return self.state

    def forget(self) -> None:
        """The network changed: nothing is known."""
        self._verdicts.clear()
        self.state = Reach.UNKNOWN

    def counts(self) -> tuple[int, int]:
        """How many hosts got through to this node, and how many did not."""
        reached = sum(v.reached for v in self._verdicts.values())
        return reached, len(self._verdicts) - reached

    def _decide(self, verdicts: list[Verdict]) -> Reach:
        reached = sum(v.reached for v in verdicts)
        failed = len(verdicts) - reached
        if self.state is Reach.PUBLIC:
            return Reach.PRIVATE if failed >= 2 * reached else Reach.PUBLIC
        if self.state is Reach.PRIVATE:
            return Reach.PUBLIC if reached >= 2 * failed else Reach.PRIVATE
        return Reach.PUBLIC if reached > failed else Reach.PRIVATE if failed > reached else Reach.UNKNOWN
