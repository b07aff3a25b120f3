"""How a node of an open run finds its place: the roster that the others follow, and the state after it.

1. Members say where they stand, and give a chain from a few rounds before (`chain.tip`). The rosters since then name
   its digest and the state hash there, so who follows them cannot be given another.
2. The state there is fetched by its hash from all who serve it (`catchup`); the initial one is made here.
3. From there on the keeper replays the rosters, checking each.

A newcomer that trusts no roster yet believes the answer that most members give: one whose every neighbour lies cannot
tell, and says so. One whose join string names a roster takes nothing from members whose history was not shown to follow
from it (`open_lineage`); where it is older than what members keep, it says that nothing was checked. A creator that
finds nobody begins the run; a node with a checkpoint goes on from it alone, silent in the first round (`open.py`).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass

import trio

from swarmnode.protocols.calls.rpc import CallError, Refuse, Rpc
from swarmnode.protocols.chain.forks import DEPTH
from swarmnode.protocols.chain.lineage import TrustedRoster
from swarmnode.protocols.chain.state import ChainState, decode, genesis
from swarmnode.protocols.methods.context import Observer
from swarmnode.protocols.methods.method import Begin, OtherHistory
from swarmnode.protocols.methods.open.lineage import (
    CannotTell,
    OtherLineage,
    Shown,
    show,
    told_of_another,
    told_of_few,
    told_of_nobody,
    told_of_too_old,
)
from swarmnode.protocols.methods.open.local import Work
from swarmnode.protocols.methods.open.splits import Splits
from swarmnode.protocols.methods.open.sync import Keeper
from swarmnode.protocols.methods.open.wire import TIMEOUT, TIP, Tip, TipQuery
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.network import Network, PeerId
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.membership import Membership
from swarmnode.protocols.transfer.catchup import CatchUp, CatchUpFailed
from swarmnode.training.outer import OuterState, state_hash

logger = logging.getLogger(__name__)

ASK_EVERY = 0.5  # seconds between two rounds of questions
ASK_AT_ONCE = 16  # members
FIND_MEMBERS_FOR = 30.0  # seconds after which a node that may begin alone does, where others are believed to be there
NOTICE_MEMBERS_FOR = 3.0  # the same, where none are
DOUBT_FOR = 10.0  # seconds that others have to show a history with the trusted roster, once one could not
REPLAY_FOR = 30.0  # seconds in which the rosters since the base should be here
LATELY = 60.0  # seconds
REMEMBERED = 256  # peers that asked
BASE = 2  # rounds before its tip of which a node gives the chain
FAR = 3  # rounds behind from which on a state is fetched instead of replaying


@dataclass(frozen=True)
class Found:
    """Where a member says that it stands."""

    peer: PeerId
    tip: Tip
    base: ChainState


class OpenPlace:
    """Looks for the chain that the others follow."""

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        electors: tuple[PeerId, ...],
        first_window: int,
        network: Network,
        rpc: Rpc,
        runner: Runner,
        membership: Membership,
        trainer: Trainer,
        keeper: Keeper,
        splits: Splits,
        work: Work,
        catch_up: CatchUp,
        observer: Observer,
    ) -> None:
        """`electors`: those of the RunSpec. `first_window`: ms of the first round's training."""
        self._me, self._run_id = me, run_id
        self._network, self._rpc, self._runner = network, rpc, runner
        self._membership, self._trainer = membership, trainer
        self._keeper, self._held, self._work = keeper, keeper.held, work
        self._splits, self._catch_up, self._observer = splits, catch_up, observer
        self._genesis = genesis(run_id, electors or (me,), window=first_window)
        self._initial: OuterState | None = None
        self._trusted: TrustedRoster | None = None  # while this node stands on nothing that follows from it
        self._shown: Shown | None = None  # by the member that was followed
        self._doubted: dict[PeerId, OtherLineage | CannotTell] = {}
        self._furthest = 0  # rounds done where those stand who cannot show it
        self._asked: OrderedDict[PeerId, float] = OrderedDict()  # who asked where this node stands -> trio time
        self.arrived = trio.current_time()  # trio time at which the round of the tip began, as far as is known
        self.phase: str | None = None
        rpc.serve(TIP, TipQuery, self._on_tip)

    async def find(self, begin: Begin) -> bool:
        """Stand somewhere, see `Method.find_place`; whether others showed where. Raises OtherHistory."""
        self._trusted = TrustedRoster.parse(begin.roster) if begin.roster else None
        saved = self._chain_of(begin)
        begins_from = begin.saved.state if saved is self._genesis and begin.saved is not None else None
        self._initial = begins_from or OuterState.start(self._trainer.parameters())
        if saved is not None and begin.saved is not None:
            await self._stand_on(saved, begin.saved.state)
            if self._trusted is not None and self._trusted.round + DEPTH < saved.round:
                self._trusted = None  # this node followed it already, too long ago to be shown again
        may_begin = saved is not None or begin.creator
        patience = FIND_MEMBERS_FOR if begin.expect_members else NOTICE_MEMBERS_FOR
        if begin.creator and saved is None and not begin.expect_members:
            patience = 0.0
        self.phase = "waiting"
        try:
            until = trio.current_time() + (patience if may_begin else float("inf"))
            while not (joined := await self._join_others()):
                if trio.current_time() >= until:
                    break
                if self._doubted:
                    await self._go_on_without_trust()
                    continue
                self._observer.warn("alone", "no member of the run answers yet; looking for them")
                await trio.sleep(ASK_EVERY)
            self._observer.warn("alone", None)
            if not self._held.stands:
                await self._begin_the_run(begin)
            return joined
        finally:
            self.phase = None

    def newcomers(self) -> set[PeerId]:
        """Who asked lately where this node stands, and so is about to take part."""
        since = trio.current_time() - LATELY
        return {peer for peer, at in self._asked.items() if at >= since}

    async def regain(self) -> None:
        """After a pause or a loss: be where the others are, or go on from here."""
        self.phase = "catching-up"
        try:
            await self._join_others()
        finally:
            self.phase = None

    # --- beginning --------------------------------------------------------------------------------------------------

    async def _begin_the_run(self, begin: Begin) -> None:
        assert self._initial is not None
        await self._stand_on(self._genesis, self._initial)
        until = trio.current_time() + begin.wait_seconds
        while trio.current_time() < until:
            if len(self._membership.members()) >= begin.wait_peers:
                break
            await trio.sleep(0.1)
        self.arrived = trio.current_time()

    def _chain_of(self, begin: Begin) -> ChainState | None:
        """The chain of a checkpoint, where it is one of this method's, or what a successor begins from."""
        if begin.saved is None:
            return None
        if not begin.saved.round and not begin.saved.extra:  # the parent run's last state, whatever its method was
            return self._genesis
        if begin.saved.method != "open":
            return None
        try:
            chain = decode(begin.saved.extra)
        except ValueError as error:
            logger.warning("the checkpoint does not tell where in the chain it was; looking for members: %s", error)
            return None
        return chain if chain.run_id == self._run_id else None

    # --- joining ----------------------------------------------------------------------------------------------------

    async def _join_others(self) -> bool:
        """Be where most members are; False where none answers, or what they have cannot be had now."""
        for found in await self._ask_around():
            if not await self._is_trusted(found):
                continue
            if self._held.stands and self._is_near(found):
                await self._catch_up_by_replay(found)
            elif await self._stays_apart(found) or not await self._go_to(found):
                continue
            self._trusted = None  # what follows from where it stands is checked in full
            return True
        return False

    async def _stays_apart(self, found: Found) -> bool:
        """Whether a member is on another history, to which nobody told this node to go over."""
        if not self._held.stands or self._trusted is not None:
            return False
        return await self._splits.is_apart(found.peer, found.tip)

    async def _is_trusted(self, found: Found) -> bool:
        """Whether a member's history was shown to follow from the trusted roster, or none is trusted."""
        if self._trusted is None:
            return True
        rules, trusted = self._held.rules, self._trusted
        try:
            shown = await show(self._keeper.sources, rules, trusted, peer=found.peer, tip=found.tip, base=found.base)
        except (OtherLineage, CannotTell) as doubt:
            if found.peer not in self._doubted:
                logger.warning("%s does not show that its history contains roster %s: %s", found.peer, trusted, doubt)
            self._doubted[found.peer] = doubt
            if isinstance(doubt, CannotTell):
                self._furthest = max(self._furthest, found.tip.round)
            return False
        logger.info("%s shows %d rosters since the trusted one", found.peer, shown.rosters)
        if shown.shrunken:
            self._observer.warn("roster", told_of_few(shown))
        self._shown = shown
        self._doubted.clear()
        return True

    async def _go_on_without_trust(self) -> None:
        """Give others time to answer; then say what could not be checked, or raise OtherHistory."""
        began, trusted = trio.current_time(), self._trusted
        assert trusted is not None
        while trio.current_time() < began + DOUBT_FOR:
            await trio.sleep(ASK_EVERY)
            if await self._join_others():
                return
        if any(isinstance(doubt, OtherLineage) for doubt in self._doubted.values()):
            raise OtherHistory(told_of_another(trusted, self._doubted))
        if self._furthest <= trusted.round + DEPTH:
            raise OtherHistory(told_of_nobody(trusted, self._doubted))
        logger.warning(unchecked := told_of_too_old(trusted, self._furthest))
        self._observer.warn("roster", unchecked)
        self._trusted = None

    def _is_near(self, found: Found) -> bool:
        """Whether what a member follows is here, or so near that replaying rosters leads there."""
        if found.tip.tip in self._held.tree:
            return True
        return found.base.tip in self._held.tree and found.tip.round - self._held.block.chain.round <= FAR

    async def _ask_around(self) -> list[Found]:
        """Where members stand, the answer that most of them give first, then by round."""
        peers = self._membership.connected() or tuple(view.peer for view in self._network.peers())
        answers: list[Found] = []

        async def ask(peer: PeerId) -> None:
            try:
                tip = await self._rpc.call(peer, TIP, TipQuery(self._run_id), Tip, timeout=TIMEOUT)
                base = decode(tip.base)
            except (CallError, ValueError) as error:
                logger.debug("%s does not say where it stands: %s", peer, error)
                return
            if base.run_id == self._run_id and (base.round or base == self._genesis):
                answers.append(Found(peer, tip, base))

        async with trio.open_nursery() as nursery:
            for peer in peers[:ASK_AT_ONCE]:
                nursery.start_soon(ask, peer)
        votes = Counter(found.base.tip for found in answers)
        return sorted(answers, key=lambda found: (votes[found.base.tip], found.tip.round, found.peer), reverse=True)

    async def _go_to(self, found: Found) -> bool:
        """Fetch the state at a member's base, and replay from there. False where that failed for now."""
        self.phase = "catching-up"
        began = trio.current_time()
        try:
            state = await self._state_at(found)
        except CatchUpFailed as error:
            logger.warning("catching up with round %d failed, trying again: %s", found.tip.round, error)
            return False
        self.arrived = began - found.tip.elapsed
        await self._stand_on(found.base, state)
        await self._catch_up_by_replay(found)
        here = self._held.block
        self._observer.caught_up(here.chain.round, self._held.states.hashes[here.id], trio.current_time() - began)
        if self._shown is None:
            logger.warning(
                "stands at round %d with those who answered; were all of them one person's, this node could not tell",
                here.chain.round,
            )
        return True

    async def _catch_up_by_replay(self, found: Found) -> None:
        """Have the rosters up to where a member stands, and go there."""
        held = self._held
        with trio.move_on_after(REPLAY_FOR):
            await self._keeper.look_for(found.tip.tip, found.peer)
        if found.tip.tip in held.tree:
            block = held.tree[found.tip.tip]
            if block.chain.round > held.block.chain.round:
                state = await held.states.after(block, held.tree)
                await self._work.stand_on(state)
                await self._keeper.move(block)
                self._serve(block.id)

    async def _state_at(self, found: Found) -> OuterState:
        """The state at a member's base. Raises CatchUpFailed."""
        base, wanted = found.base, found.tip.base_state
        for held in (self._initial if base.round == 0 else None, self._work.base):
            if held is not None and await self._hash(base.round, held) == wanted:
                return held
        peers = [found.peer, *(peer for peer in self._membership.connected() if peer != found.peer)]
        round, _, state = await self._catch_up.fetch(
            tuple(peers[:ASK_AT_ONCE]), state_hash=wanted, progress=self._observer.progress
        )
        if round != base.round:
            raise CatchUpFailed(f"members have a state of round {round}, and {base.round} was announced")
        return state

    async def _hash(self, round: int, state: OuterState) -> str:
        return await self._runner(lambda: state_hash(round, self._trainer.layout, state))

    async def _stand_on(self, chain: ChainState, state: OuterState) -> None:
        await self._work.stand_on(state)
        await self._keeper.begin(chain, state)
        self._serve(chain.tip)

    def _serve(self, id: bytes) -> None:
        block = self._held.tree[id]
        self._catch_up.serve_state(block.chain.round, self._held.states.hashes[id], self._held.states[id])

    # --- answering --------------------------------------------------------------------------------------------------

    async def _on_tip(self, peer: PeerId, query: TipQuery) -> Tip:
        if query.run_id != self._run_id:
            raise Refuse("unknown-run", "this node does not take part in that run")
        if not self._held.stands:
            raise Refuse("starting", "this node does not know the state of the run yet; ask again later")
        if query.joins:
            self._asked[peer] = trio.current_time()
            self._asked.move_to_end(peer)
            if len(self._asked) > REMEMBERED:
                self._asked.popitem(last=False)
        tree, tip = self._held.tree, self._held.tip
        way = [tree[id] for id in tree.ancestry(tip)[-1 - BASE :]]
        first = way[min(1, len(way) - 1)]  # to undo the roster at the base would take the state before it
        base = first if first.roster is not None and first.roster.revert else way[0]
        elapsed = max(0.0, trio.current_time() - self.arrived)
        hash = self._held.states.hashes[base.id]
        return Tip(tip, tree[tip].chain.round, elapsed, base.chain.encode(), hash)
