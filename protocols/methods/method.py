"""The seam for exchange methods: what a session needs of whatever moves a run from round to round.

A method is one folder beside this file, built from a `Context`, and named in METHODS of node/session.py and in the
choices of `[exchange] method` in the RunSpec. A session drives it:

    await method.find_place(begin)         once: know a state and a place among the members
    while rounds remain:
        result = await method.run_round()  or LostPlace, then `await method.regain_place()`
    await method.leave()                   the others wait for this node no longer, its work is in the residual

and runs `method.watch()` beside it for as long as it takes part. To pause, it sets `method.paused`, cancels what waits
or trains, and calls `leave`; afterwards it clears `paused` and calls `regain_place`. A method answers its peers from
the moment it is built. What else the daemon needs of it are attributes that every method has (`violations`,
`rollouts`), `tell_ledger()`, and `status()` for the control API; nobody asks which method it is. The conformance suite
(tests/protocols/methods/test_exchange_conformance.py) holds every method to what stands here:

- every round ends, whoever dies, freezes, lies or leaves, and at whichever message;
- nodes whose results name the same round and `state_hash` hold the same bits. In most methods all that are connected
  come to one; in `gossip` each has its own, and these are near one another (test_pair_conformance.py);
- local work is never lost: what no result contains is in the residual, at most one norm of a round's work, or still
  in the local parameters;
- `run_round`, `find_place` and `regain_place` may be cancelled at any point; the method can then go on or leave.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.rollouts.sharing import Rollouts
from swarmnode.protocols.methods.steering import SteeringWatch
from swarmnode.protocols.methods.trainer import Sampled, Trainer, TrainStats, Vector
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.scoring import Violations
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.training.outer import OuterState
from swarmnode.training.rl.groups import Learned

FIND_MEMBERS_FOR = 15.0  # seconds that a node which expects others looks for them before it goes on alone
FIRST_WINDOW = 10.0  # times the deadlines' ceiling: the first round's training, before anything was measured
NOTICE_MEMBERS_FOR = 4.0  # the same for one that goes on from a checkpoint and knows nobody: mDNS may find somebody


@dataclass(frozen=True)
class Place:
    """Where a node stands: about to do `round` from the shared state with this hash."""

    round: int  # rounds done before
    state_hash: str
    members: tuple[PeerId, ...]  # whose work counted in the last round, or who may decide the next one
    newcomers: tuple[PeerId, ...] = ()  # who takes part from this round on
    elapsed: float = 0.0  # seconds since this round began
    roster: str = ""  # a recent one that is settled, for join strings, where the method has a chain of them


@dataclass(frozen=True)
class Saved:
    """What a checkpoint gives back, and what is kept in one. Parameters, momentum and `residual` are (P,)."""

    round: int
    state: OuterState
    residual: Vector  # work that no result contains yet, as a pseudo-gradient: where it began minus where it led
    members: tuple[PeerId, ...]
    method: str = ""  # whose `extra` this is
    extra: bytes = b""  # what the method alone understands; another method leaves it out
    moments: Vector | None = None  # of the inner optimizer; they may change while they are written
    updates: int = 0  # that they are of


@dataclass(frozen=True)
class Begin:
    """What a node knows when it looks for its place."""

    creator: bool  # may begin the run where nobody has it
    expect_members: bool  # others are believed to be in the run: look for them before going on alone
    wait_peers: int  # who finds nobody begins or resumes when this many others asked to join …
    wait_seconds: float  # … or after this long
    last_round: int | None  # this node stops after so many rounds of the run; a swarm that did them names nobody more
    saved: Saved | None = None  # from the newest checkpoint
    roster: str = ""  # of the run's history, which the join string named: only what contains it is joined
    named: Container[PeerId] = ()  # peers that the join string names

    @property
    def patience(self) -> float:
        """Seconds to look for members before going on alone: 0 where none are expected, inf where it may not begin."""
        if self.saved is None and not self.expect_members:
            return 0.0
        if self.saved is None and not self.creator:
            return math.inf
        return FIND_MEMBERS_FOR if self.expect_members else NOTICE_MEMBERS_FOR


@dataclass(frozen=True)
class RoundResult:
    """One round as this node saw it end."""

    round: int
    state_hash: str  # of the shared state after the round
    loss: float  # held-out loss of that state, bits per byte; nan where that is not what is measured
    worked: TrainStats
    seconds: float  # wall time from the end of the round before
    members: int
    missing: tuple[PeerId, ...] = ()  # whose work is not in that state and might be, ascending; this node's perhaps
    counted: tuple[PeerId, ...] = ()  # whose work is in that state and was not in the one before
    roster: str = ""  # id of the roster that led there, where the method has a chain of them
    verdicts: Mapping[PeerId, str] = field(default_factory=dict)  # what became of each one's work, where it is judged
    stages: Mapping[str, float] = field(default_factory=dict)  # s: exchange (the all-reduce); or commit, reveal, judge
    share: float | None = None  # of the weights that this node's work has in the result, where that is told
    learned: Learned | None = None  # from rollouts, where the method shares those
    sampled: Sampled | None = None  # for another's policy, where this node does nothing else
    apart: float | None = None  # of these parameters from a member's, by their norm; None where all have the same
    steered: Mapping[str, Any] = field(default_factory=dict)  # values that were not as in the run's file, by TABLE.KEY


class LostPlace(Exception):
    """The round brought no result here, and this node must find its place again; says why. Its work is kept."""


class Overtaken(LostPlace):
    """Nothing went wrong: others are further, or on a better history, and `regain_place` leads there."""


Build = Callable[[Context], "Method"]


class Method(ABC):
    """One node's part in a run. What is not abstract a method may lack, and then has nothing of it, as stands here."""

    name: str
    judges: ClassVar[bool] = False  # whether scores decide what of others' work counts
    paused: bool = False  # whether this node takes no part for now, and says so to others
    _trainer: Trainer
    violations: Sequence[Violations] = ()  # what peers did against its rules: for bans and the ledger
    rollouts: Rollouts | None = None  # its exchange of rollouts, for the owner to look at
    steering: SteeringWatch | None = None  # what the run's owner changes while it is trained, where that is possible

    def measure(self, metrics: Metrics) -> None:  # noqa: B027 (most methods count nothing)
        """Show what this method counts, if anything."""

    def tell_ledger(self, ledger: Ledger) -> None:  # noqa: B027 (an open run's chain tells it)
        """Observe what was learned of the work of peers since the last call; at the end of each epoch."""

    def status(self) -> Mapping[str, Any]:
        """What this method alone can tell its owner, by the names under which the control API shows it."""
        return {}

    @property
    @abstractmethod
    def phase(self) -> str:
        """waiting, catching-up, training or exchanging."""

    @property
    @abstractmethod
    def place(self) -> Place | None:
        """None before `find_place` knew one; then never None again."""

    @abstractmethod
    async def find_place(self, begin: Begin) -> None:
        """Stand on a state and have a place: from members, from `begin.saved`, or by beginning the run.

        Looks for members for as long as it takes where this node may not begin. The residual of `begin.saved` is taken
        over first, whatever else happens. Takes nothing from members that show no history with `begin.roster`.
        """

    @abstractmethod
    async def run_round(self) -> RoundResult:
        """Take part in one round. Raises LostPlace; ends early only so or by cancellation."""

    @abstractmethod
    async def regain_place(self) -> None:
        """After LostPlace or a pause: catch up with the members and be one of them again.

        Ends also where nobody answers or nobody is better off: this node then goes on from where it stands.
        """

    @abstractmethod
    async def watch(self) -> None:
        """Answer others and notice better histories, until cancelled."""

    async def say_away(self) -> None:  # noqa: B027 (in most methods nobody waits for another's trainer)
        """The trainer is held: tell the others not to wait for what this node needs it for in the round under way."""

    @abstractmethod
    async def leave(self) -> None:
        """Tell the others not to wait for this node, and put what it trained since the last round into the residual.

        Takes seconds at most. Local parameters are then the shared state's. Does nothing before there is a place.
        """

    def lent(self) -> AbstractAsyncContextManager[Trainer]:
        """The trainer, for its owner to ask the model: `evaluate` and `sample` are to answer for the shared state.

        Where local training goes on beside the shared state, as in `open` and `streaming`, the trainer holds that state
        meanwhile and trains afterwards. In a round of the other methods the answer is of the local parameters, which
        are the shared ones between two rounds and after the last.
        """
        return nullcontext(self._trainer)

    @abstractmethod
    def saved(self) -> Saved:
        """What a checkpoint of this moment contains. The arrays are never written to afterwards.

        Raises RuntimeError before this node has a place.
        """
