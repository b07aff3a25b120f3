"""The exchange method `diloco`: known peers train apart and take the mean of how far they moved (arXiv 2311.08105).

    method.py      the method; finding a place among the members, and noticing that others have a better history
    round.py       train, agree, reduce, step
    agreement.py   one result per round, though any member may die or freeze at any moment; `acceptor.py` is its memory
    messages.py    what members say to one another in it
    allreduce.py   the mean of all pseudo-gradients, bit-identical on all members
    partition.py   who reduces which part of the vector; `reduction.py` is the arithmetic on it

What it promises: members that end a round with one hash hold the same bits; while a majority of the last roster is
connected all go through the same states; a member that falls behind or onto a side branch finds back. What it does not:
everybody's work is believed, so a member that lies can spoil the model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import trio

from swarmnode.protocols.calls.rpc import CallError, Refused
from swarmnode.protocols.methods.context import STARTING, Context
from swarmnode.protocols.methods.known.acceptor import diverged, prefers, rank
from swarmnode.protocols.methods.known.agreement import Agreement
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.messages import Behind, HeadQuery, RoundHead
from swarmnode.protocols.methods.known.reduction import Reducer
from swarmnode.protocols.methods.known.round import DilocoRounds
from swarmnode.protocols.methods.method import (
    FIND_MEMBERS_FOR,
    Begin,
    LostPlace,
    Method,
    Overtaken,
    Place,
    RoundResult,
    Saved,
)
from swarmnode.protocols.methods.steering import REFUSED, SteeringWatch
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.transfer.catchup import CatchUpFailed
from swarmnode.training.outer import OuterState

logger = logging.getLogger(__name__)

HEAD_TIMEOUT = 3.0  # seconds for a peer to say where it stands
LOOK_AROUND_EVERY = 3.0  # seconds between looks at members outside the roster, to notice a fork or being left behind
LOOK_AT = 3  # members looked at each time
ASK_AT_ONCE = 32  # peers asked where they stand at the same time
ASK_TO_JOIN_EVERY = 1.0  # seconds
COME_WITHIN = 3 * ASK_TO_JOIN_EVERY  # seconds for those who looked for members as well to ask who begins


class Diloco(Method):
    """One node's part in a DiLoCo run: how it comes to stand in it, and to notice that it should stand elsewhere.

    A node asks members to be named (`round.head`) and, once somebody's roster names it, fetches that state and stands
    there. One that stands nowhere yet fetches what the best of them hold at once: it is then close when it is named.
    Where several histories exist, all nodes order them alike (`acceptor.prefers`), so one of them is left in the end.

    Nobody's silence holds a node up for ever: one that holds a checkpoint, or may begin the run, goes on alone where no
    member answers; one that waits to be named goes on from where it stands where none is further. What is fetched is
    checked against its hash before this node stands on it, and what it trained before goes to its residual.

    Its parts are public, for tests that look at what DiLoCo alone promises.
    """

    name = "diloco"
    steering: SteeringWatch

    agreement_class: ClassVar[type[Agreement]] = Agreement  # what brings members to one result a round
    reducer_class: ClassVar[type[Reducer]] = AllReduce  # what brings the members' work to one vector
    rounds_class: ClassVar[type[DilocoRounds]] = DilocoRounds  # what trains, and does what members agree on

    def __init__(self, parts: Context) -> None:
        self._parts, self._trainer = parts, parts.trainer
        self.agreement = self.agreement_class(parts)
        self.allreduce = self.reducer_class(parts)
        self.steering = self.agreement.acceptor.steering
        self.rounds = self.rounds_class(parts, self.agreement, self.allreduce)
        self._last_round: int | None = None
        self._better: Behind | None = None  # another history that this node should follow instead of its own
        self._round = trio.CancelScope()  # of the round in hand
        self._looking: set[PeerId] = set()  # who stood nowhere yet either, when it was asked last

    @property
    def phase(self) -> str:
        return self.rounds.phase

    @property
    def place(self) -> Place | None:
        if not self.rounds.stands:
            return None
        head = self.agreement.acceptor.head()
        return Place(head.round, head.parent, head.voters, head.joiners, head.elapsed)

    @property
    def paused(self) -> bool:
        return self.agreement.acceptor.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self.agreement.acceptor.paused = paused

    async def find_place(self, begin: Begin) -> None:
        self.rounds.phase = "waiting"
        self._last_round = begin.last_round
        if begin.saved is not None:
            self.allreduce.restore(begin.saved.residual)
            if begin.saved.method == self.name:
                self.steering.take(begin.saved.extra, begin.saved.round)
        if begin.patience:
            last = {*begin.saved.members} - {self._parts.me} if begin.saved is not None else set()
            await self._find_members(until=trio.current_time() + begin.patience, last=last)
            if not self.rounds.stands and any(peer < self._parts.me for peer in self._parts.membership.connected()):
                # They came back with this node and look for members as well: one of them begins, and is then found.
                await self._find_members(until=trio.current_time() + FIND_MEMBERS_FOR)
        self._parts.observer.warn("alone", None)
        if not self.rounds.stands:
            await self._begin(begin)

    async def run_round(self) -> RoundResult:
        if self._better is None:
            with trio.CancelScope() as self._round:
                try:
                    return await self.rounds.run_round()
                except Behind as error:
                    self._better = error
                except CatchUpFailed as error:
                    raise LostPlace(str(error)) from error
        raise Overtaken(str(self._better))

    async def regain_place(self) -> None:
        """Stand with the others again: at once where their roster names this node, else when the next one does."""
        self.rounds.phase = "waiting"
        better, self._better = self._better, None
        if better is not None:
            logger.info("others are at round %d; catching up", better.head.round)
        if better is None or not self._named_in(better.head) or not await self.go_to(better.head, better.source):
            await self._wait_to_be_named()
        self._better = None

    def status(self) -> Mapping[str, Any]:
        population = self.rounds.population
        return {"population": {"factor": population.factor}} if population is not None else {}

    def measure(self, metrics: Metrics) -> None:
        metrics.show(REFUSED, lambda: dict(self.steering.refused))

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.steering.watch)
            while True:
                self._better = await self._find_better()
                if self.phase == "training":
                    self._round.cancel()

    async def leave(self) -> None:
        if self.rounds.stands:
            await self.agreement.say_goodbye()
            await self.rounds.return_local_work()

    def saved(self) -> Saved:
        here = self.agreement.acceptor.position
        residual = self.allreduce.left_over()
        return Saved(here.round, self.rounds.state, residual, here.voters, self.name, here.steering)

    async def go_to(self, head: RoundHead, source: PeerId) -> bool:
        """Fetch the state at `head` and stand there. False where that failed for now; nothing is then changed."""
        before = self.agreement.acceptor.position.parent if self.rounds.stands else None
        began = trio.current_time()
        sources = tuple(p for p in dict.fromkeys((source, *head.voters)) if p != self._parts.me)
        try:
            await self.rounds.catch_up(head, sources)
        except CatchUpFailed as error:
            logger.warning("catching up with round %d failed, trying again: %s", head.round, error)
            return False
        finally:
            self.rounds.phase = "waiting"
        if head.parent != before:  # else it held this state already
            seconds = trio.current_time() - began
            logger.info("caught up with round %d in %.1f s", head.round, seconds)
            self._parts.observer.caught_up(head.round, head.parent, seconds)
        return True

    async def _find_better(self) -> Behind:
        """Wait until members outside this node's roster stand on a better history than its own."""
        query = HeadQuery(self._parts.run_id)
        while True:
            await trio.sleep(LOOK_AROUND_EVERY * self._parts.rng.uniform(0.5, 1.5))
            if not self.rounds.stands:
                continue
            mine = self.agreement.acceptor.head()
            others = [p for p in self._parts.membership.connected() if p not in mine.voters and p not in mine.joiners]
            for peer in self._parts.rng.sample(others, min(LOOK_AT, len(others))):
                theirs = await self._parts.rpc.ask(peer, "round.head", query, RoundHead, timeout=HEAD_TIMEOUT)
                if theirs is None:
                    continue
                mine = self.agreement.acceptor.head()
                apart = diverged(mine, theirs) or theirs.round > mine.round + 1
                if apart and prefers(mine, theirs) and not theirs.paused:
                    logger.warning("%s has a history with more members: rounds made apart from it are given up", peer)
                    return Behind(theirs, peer)

    # --- getting a place --------------------------------------------------------------------------------------------

    async def _find_members(self, *, until: float, last: Collection[PeerId] = ()) -> None:
        """Get a place among members, or find out by `until` (trio time) that none answers.

        Sooner where all the other members of the `last` roster look for members as well: there is nobody to be found.
        """
        began = trio.current_time()
        while trio.current_time() < until:
            if await self._join_others():
                return
            if self.rounds.stands:  # members answer; their next roster will name this node
                await self._wait_to_be_named()
                return
            if last and self._looking.issuperset(last):
                return
            await self._parts.look_again(began, every=ASK_TO_JOIN_EVERY)

    async def _begin(self, begin: Begin) -> None:
        """Begin at the checkpoint, else at round 0, with those who have asked to join so far."""
        if begin.saved is not None:
            logger.info("nobody of the run answers; going on from the checkpoint of round %d", begin.saved.round)
            round, state = begin.saved.round, begin.saved.state
        else:
            round, state = 0, OuterState.start(self._parts.trainer.parameters())
        await self.rounds.begin(round, state, (self._parts.me,), ())
        began, looking = trio.current_time(), len(self._looking)
        while (asked := len(self.agreement.acceptor.waiting_to_join())) < max(begin.wait_peers, looking):
            if trio.current_time() >= began + (begin.wait_seconds if asked < begin.wait_peers else COME_WITHIN):
                break
            await trio.sleep(0.1)
        await self.rounds.begin(round, state, (self._parts.me,), self.agreement.acceptor.waiting_to_join())

    async def _join_others(self) -> bool:
        """Ask members to be named; once somebody's roster names this node, fetch the state and stand there."""
        heads = await self._heads(join=True)
        best = next((found for found in heads if not found[0].paused), None)
        # Who went on apart from more give up their rounds when they meet these, so nobody joins them …
        apart = [found for found in heads if best is not None and diverged(best[0], found[0])]
        if apart and best is not None and not self._named_in(best[0]) and not await self.go_to(*best):
            apart = []  # … unless these have no such state: who says so keeps nobody from the others
        for head, source in heads:
            # after its last round a swarm names nobody any more
            over = self._last_round is not None and head.round >= self._last_round
            if (self._named_in(head) or over) and (head, source) not in apart and await self.go_to(head, source):
                return True
        if heads and not self.rounds.stands:
            await self.go_to(*heads[0])
        return False

    async def _heads(self, *, join: bool) -> list[tuple[RoundHead, PeerId]]:
        """Where members stand, the best first; with `join` they are asked to name this node as well."""
        heads: list[tuple[RoundHead, PeerId]] = []
        query = HeadQuery(self._parts.run_id, join)
        self._looking.clear()

        async def look(peer: PeerId) -> None:
            try:
                head = await self._parts.rpc.call(peer, "round.head", query, RoundHead, timeout=HEAD_TIMEOUT)
                heads.append((head, peer))
            except CallError as error:
                logger.debug("%s does not say where it stands: %s", peer, error)
                if isinstance(error, Refused) and error.code == STARTING:
                    self._looking.add(peer)

        async with trio.open_nursery() as nursery:
            for peer in self._parts.nearby(ASK_AT_ONCE):
                nursery.start_soon(look, peer)
        return sorted(heads, key=lambda found: rank(found[0]), reverse=True)

    async def _wait_to_be_named(self) -> None:
        """Ask members until one names this node; go on from here where nobody answers, or nobody is better off.

        The last rule ends the wait of nodes that all wait for one another.
        """
        deadline = trio.current_time() + FIND_MEMBERS_FOR
        while not await self._join_others():
            if trio.current_time() > deadline:
                mine = self.agreement.acceptor.head()
                heads = [head for head, _ in await self._heads(join=False) if not head.paused]
                if not any(head.run_id == self._parts.run_id and prefers(mine, head) for head in heads):
                    here = self.agreement.acceptor.position
                    if heads:
                        logger.info("round %d lasts; training in it meanwhile, for one that counts it", here.round)
                    else:
                        logger.warning("no member answers; going on from round %d", here.round)
                        await self.rounds.begin(here.round, self.rounds.state, (self._parts.me,), ())
                    return
            await trio.sleep(ASK_TO_JOIN_EVERY)

    def _named_in(self, head: RoundHead) -> bool:
        return self._parts.me in head.voters or self._parts.me in head.joiners
