"""This node's part in one round, and how it says things there.

`RoundContext` is what it said and which of its waits are over, `Signer` how one identity signs what it says.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swarmnode.protocols.chain.duty import (
    Own,
    Timers,
    View,
)
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.state import ChainState, HashChain
from swarmnode.protocols.chain.statements import (
    HASH,
    SALT,
    AvailabilityVote,
    Commit,
    ForkChoiceVote,
    Reveal,
    Roster,
    Said,
    Score,
    Scores,
    Seal,
    read,
)
from swarmnode.protocols.methods.open.judge import Evaluator
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import RoundLog
from swarmnode.protocols.methods.open.sync import ChainSync
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.state.backend import AlreadyWritten, StateError
from swarmnode.protocols.state.sync import StateSync

logger = logging.getLogger(__name__)

S = TypeVar("S", Commit, AvailabilityVote, Reveal, Seal, Scores, Roster, ForkChoiceVote)


@dataclass
class RoundContext:
    """This node's part in the round on one block, while it lasts: what it said, and which of its waits are over.

    It begins when the node comes to a block, also after a restart in the middle of a round: then what the node said
    before is read from the log (`recall`), and it says nothing else in that part of the round.
    """

    block: Block
    log: RoundLog
    began: float  # trio time
    evaluator: Evaluator
    ready: bool = False  # it has a contribution to commit to
    timers: Timers = field(default_factory=Timers)
    own: Own = field(default_factory=Own)
    judged: dict[bytes, Score] = field(default_factory=dict)
    waited_for: tuple[float, bytes] = (0.0, b"")  # since when others are waited for to stand behind a block, and which
    measuring: bool = False
    fetching: bool = False

    def __post_init__(self) -> None:
        self.chain: ChainState = self.block.chain

    @property
    def follows_nothing(self) -> bool:
        """Whether the round before ended empty: its contributions wait to be offered again."""
        return self.block.roster is None and self.chain.empties > 0

    def has_offer(self, local: LocalTrainer) -> bool:
        """Whether this node has a contribution to this round in hand."""
        offer = local.offer
        return offer is not None and offer.parent == self.chain.tip and bool(offer.root)

    def recall(self, me: PeerId, local: LocalTrainer) -> None:
        """Take up what this node has already said in this round, before a restart or on another fork."""
        commit = self.log.own_commit(me)
        self.own = Own(
            commit=commit,
            cut=next((said.what for said in self.log.cuts.values() if said.author == me), None),
            revealed=commit is not None and not self.has_offer(local),
        )
        if me in self.log.seals:  # what it sealed is known no more: it says nothing else
            nothing = Scores(self.chain.round, self.chain.tip, bytes(HASH), bytes(SALT), None, ())
            self.own = replace(self.own, sealed=nothing, opened=True)

    def view(self, me: PeerId, norms: dict[bytes, float]) -> View:
        """What `duty.duties` is asked about. `norms`: by commit, of contributions that are here."""
        log = self.log
        return View(
            me=me,
            ready=self.ready,
            timers=self.timers,
            own=self.own,
            commits=log.commits,
            cuts=tuple(log.cuts.values()),
            reveals={id: said.what for id, said in log.reveals.items()},
            judged=self.judged,
            seals={judge: said.what.seal for judge, said in log.seals.items()},
            scores=tuple(log.scores.values()),
            norms=norms,
        )


class Signer:
    """How one identity says things in rounds, and the secrets that only it can make, the same in each of its lives.

    So a restarted node contradicts itself nowhere.
    """

    def __init__(self, state: StateSync, sync: ChainSync, secret: bytes) -> None:
        """`secret`: 32 bytes that this identity has in this run, in every life."""
        self._state, self._sync, self._secret = state, sync, secret
        self.beacon = HashChain(secret)
        self.silent_after = b""  # a block; only others may know what an earlier life said in the round after it

    async def publish(self, statement: S) -> Said[S] | None:
        """Sign a statement and pass it on; None where this node said something else before, or may not sign now."""
        if not isinstance(statement, ForkChoiceVote) and statement.parent == self.silent_after:
            logger.info("%s is not said: an earlier life may have, and nobody was there to tell", statement.key)
            return None
        try:
            record = await self._state.write(statement.key, statement.value)
        except AlreadyWritten:
            logger.info("%s was said in an earlier life, with another value; nothing else is said", statement.key)
            return None
        except StateError as error:
            logger.warning("%s could not be said: %s", statement.key, error)
            return None
        said: Said[S] = self._sync.insert_own(record) or read(record)
        self._state.hurry()
        return said

    def derive(self, purpose: str, chain: ChainState) -> bytes:
        """32 secret bytes for one purpose in one round."""
        text = f"swarmnode/open/{purpose}/1\0{chain.round:08d}".encode()
        return hashlib.sha256(self._secret + text + chain.tip).digest()
