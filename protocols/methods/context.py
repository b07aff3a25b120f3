"""What an exchange method is built from: the node, its run, and whom to tell what."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from swarmnode.protocols.calls.rpc import Refuse, Rpc
from swarmnode.protocols.methods.open.checks.texts import NO_TEXTS, Texts
from swarmnode.protocols.methods.rollouts.pool import RolloutLimits
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.network import Network, PeerId
from swarmnode.protocols.peers.diversity import sample
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.backend import StateBackend
from swarmnode.protocols.state.membership import Membership
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.training.codecs.base import Vector
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.runspec import RunSpec

logger = logging.getLogger(__name__)

STARTING = "starting"  # the code by which a node refuses that stands nowhere yet
TELL_AFTER = 1.0  # seconds of looking for members in vain, until the owner hears of it


class Observer:
    """Whom a method tells what is to be shown or recorded: here nobody. All return at once; none raises."""

    def caught_up(self, at: int, state_hash: str, seconds: float) -> None:
        """This node stands on a state that it fetched, that of round `at`."""

    def progress(self, done: int, size: int) -> None:
        """Bytes of a state that have arrived, and its size."""

    def warn(self, cause: str, text: str | None) -> None:
        """What the owner should know, by its cause; None: it is over."""


NOBODY = Observer()
DIVERGED = "training here diverges to NaN or infinity, and its work is dropped: a learning rate may be too high"


@dataclass(frozen=True)
class Context:
    """What a method may be built from. The trainer has told its layout; all parts outlive the method."""

    run_id: str
    spec: RunSpec  # without "auto" in it
    network: Network
    rpc: Rpc
    bulk: Bulk
    liveness: Liveness
    runner: Runner
    trainer: Trainer
    membership: Membership
    state: StateBackend  # to read and watch records
    sync: StateSync  # to write records: `sync.write` signs, keeps and pushes
    shards: Shards
    admits: Callable[[PeerId], bool]  # who may take part
    now: Callable[[], int]  # real time in ms since the epoch
    rng: random.Random
    observer: Observer = NOBODY
    ledger: Ledger | None = None  # of what this node sees of its peers' work; None believes everybody alike
    policy: str = ""  # of this node in a run by rollouts; empty takes the run's
    rollouts: RolloutLimits = field(default_factory=RolloutLimits)  # what others' rollouts may take of this node
    texts: Texts = NO_TEXTS  # what trainers read, for who looks at their work

    @property
    def me(self) -> PeerId:
        return self.network.me

    async def is_whole(self, work: Vector) -> bool:
        """Whether local work is finite. Where it is not its owner is told, and whoever asks drops it."""
        whole = await self.runner(lambda: is_finite(work))
        if not whole:
            logger.warning("%s", DIVERGED)
        self.observer.warn("diverged", None if whole else DIVERGED)
        return whole

    def nearby(self, most: int) -> Sequence[PeerId]:
        """At most so many members that are connected; before one is known, peers who may take part.

        Of more a lot decides, network by network: many identities in one, or the lowest, are not all that a node hears.
        """
        groups = {view.peer: view.group for view in self.network.peers()}
        peers = self.membership.connected() or tuple(peer for peer in groups if self.admits(peer))
        return peers if len(peers) <= most else sample(self.rng, peers, most, groups.get)

    async def look_again(self, began: float, *, every: float) -> None:
        """Wait between two looks for members, which began at this trio time; the owner hears that nobody answers."""
        if trio.current_time() > began + TELL_AFTER:
            self.observer.warn("alone", "no member of the run answers yet; looking for them")
        await trio.sleep(every)


def admit(parts: Context, peer: PeerId | None, run_id: str, *, stands: bool = True) -> None:
    """Raises Refuse for a call about another run, of whom the run does not admit, or while this node stands nowhere."""
    if run_id != parts.run_id:
        raise Refuse("unknown-run", "this node does not take part in that run")
    if peer is not None and not parts.admits(peer):  # None: anybody may ask
        raise Refuse("not-a-member", "this run does not admit you: it lists its members, or asks work of their keys")
    if not stands:
        raise Refuse(STARTING, "this node does not know the state of the run yet; ask again later")
