"""A node's life in one run: find the others or begin, then round after round until told to stop.

`Session.run` is the whole of it: restore or fetch the shared state, be named in a roster, and take part in rounds;
whenever the node finds itself behind or on a side branch (it was frozen, cut off, or restarted), it catches up from
members and asks to be named again. Nobody else's failure ends it. What a person sees of a run is in `status` and in
the events given to `emit`.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from swarmnode.node.checkpoints import Checkpoint, Checkpoints
from swarmnode.node.datadir import DataDirError
from swarmnode.protocols.catchup import CatchUpFailed
from swarmnode.protocols.exchange.agreement import Agreement, Behind, LeftOut, diverged, prefers
from swarmnode.protocols.exchange.allreduce import AllReduce
from swarmnode.protocols.exchange.diloco import Diloco, RoundResult
from swarmnode.protocols.exchange.messages import Head
from swarmnode.protocols.exchange.outcomes import Abandoned, Outcome, Partial
from swarmnode.protocols.membership import Membership
from swarmnode.protocols.network import Network, PeerId, Traffic
from swarmnode.protocols.rpc import CallError
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.trainer import Trainer
from swarmnode.training.outer import OuterState

logger = logging.getLogger(__name__)

HEAD_TIMEOUT = 3.0  # seconds for a peer to say where it stands
LOOK_AROUND_EVERY = 3.0  # seconds between looks at members outside the roster, to notice a fork or being left behind
LOOK_AT = 3  # members looked at each time
ASK_TO_JOIN_EVERY = 1.0  # seconds
FIND_MEMBERS_FOR = 15.0  # seconds that a node which expects others looks for them before it goes on alone
NOTICE_MEMBERS_FOR = 4.0  # the same for one that goes on from a checkpoint and knows nobody: mDNS may find somebody
LEAVE_WITHIN = 10.0  # seconds for an exchange in hand to end when the node is told to stop
LOSSES_SHOWN = 240  # rounds of the loss curve that `status` gives


@dataclass(frozen=True)
class SessionSettings:
    """How this node takes part; see NodeConfig."""

    rounds: int | None  # stop training after this many rounds of the run; None: go on
    creator: bool  # may begin the run where nobody has it
    wait_peers: int  # a creator begins when this many others asked to join …
    wait_seconds: float  # … or after this long
    checkpoint_every: int


class Session:
    """One node in one run. `run` owns its tasks; the other methods may be called while it runs."""

    def __init__(
        self,
        *,
        run_id: str,
        network: Network,
        trainer: Trainer,
        membership: Membership,
        agreement: Agreement,
        allreduce: AllReduce,
        diloco: Diloco,
        checkpoints: Checkpoints | None,
        runner: Runner,
        settings: SessionSettings,
        emit: Callable[[dict[str, Any]], None],
        rng: random.Random | None = None,
    ) -> None:
        self._run_id = run_id
        self._network = network
        self._trainer = trainer
        self._membership = membership
        self._agreement = agreement
        self._allreduce = allreduce
        self._diloco = diloco
        self._checkpoints = checkpoints
        self._runner = runner
        self._settings = settings
        self._emit = emit
        self._rng = rng or random.Random()
        self._me = network.me
        self._saved_at = -1
        self._traffic = network.traffic()
        self._stopping = trio.Event()
        self._resumed = trio.Event()
        self._resumed.set()
        self._search = trio.CancelScope()  # the search for members at the start, which a stop cuts short
        self._training = trio.CancelScope()  # training or waiting, which a stop or a pause may cut short
        self._better: Behind | None = None  # another history that this node should follow instead of its own
        self.finished = trio.Event()
        self.last: RoundResult | None = None
        self.outcome: Outcome | None = None  # of the last round, also of one that was abandoned
        self.losses: deque[tuple[int, float]] = deque(maxlen=LOSSES_SHOWN)
        self.warnings: dict[str, str] = {}  # what the owner should know, by cause
        self.phase_override: str | None = "waiting"

    # --- the life of a node in a run --------------------------------------------------------------------------------

    async def run(self, *, expect_members: bool) -> None:
        """Take part until `stop` or the last round.

        `expect_members`: others are believed to be in the run (a join address, an address book), so they are looked
        for before this node goes on alone.
        """
        await self._membership.announce()
        await self._take_a_stand(expect_members)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_around)
            while not self._stopping.is_set() and not self._is_over():
                await self._pause_if_asked()
                if self._stopping.is_set():
                    break
                await self._one_round()
            nursery.cancel_scope.cancel()
        if self._stopping.is_set():
            await self._hand_over()
        self.phase_override = "finished"
        self.finished.set()

    async def serve_forever(self) -> None:
        """After the last round: go on serving late comers the final state, until cancelled."""
        while True:
            await self._membership.announce()
            await trio.sleep(30)

    def stop(self) -> None:
        """Leave the run: an exchange in hand may end, training is cut short and its work kept."""
        self._stopping.set()
        self._resumed.set()
        self._search.cancel()
        if self.phase != "exchanging":
            self._training.cancel()
        else:
            self._training.deadline = trio.current_time() + LEAVE_WITHIN

    async def pause(self) -> None:
        """Stop training after the step in hand; the others do not wait for this node."""
        self._agreement.paused = True
        self._resumed = trio.Event()
        if self.phase != "exchanging":
            self._training.cancel()

    def resume(self) -> None:
        """Take part again."""
        self._agreement.paused = False
        self._resumed.set()

    @property
    def paused(self) -> bool:
        return self._agreement.paused

    @property
    def phase(self) -> str:
        """training, exchanging, waiting, catching-up, paused or finished."""
        return self.phase_override or self._diloco.phase

    # --- finding a place --------------------------------------------------------------------------------------------

    async def _take_a_stand(self, expect_members: bool) -> None:
        """Know a state and a place: from members, from a checkpoint, or as the one who begins the run."""
        self.phase_override = "waiting"
        checkpoint = await self._runner(self._checkpoints.newest) if self._checkpoints is not None else None
        residual = checkpoint.residual if checkpoint is not None else None
        if expect_members or checkpoint is not None:
            found_by = trio.current_time() + (FIND_MEMBERS_FOR if expect_members else NOTICE_MEMBERS_FOR)
            alone = checkpoint is not None or self._settings.creator
            with self._search:
                await self._find_members(until=found_by if alone else math.inf)
            if self._stopping.is_set():
                return
        self.warnings.pop("alone", None)
        if self._has_stand():
            pass
        elif checkpoint is not None:
            logger.info("nobody of the run answers; going on from the checkpoint of round %d", checkpoint.round)
            await self._diloco.begin(checkpoint.round, checkpoint.state, (self._me,), ())
        else:
            await self._found_the_run()
        if residual is not None:
            self._allreduce.sent.restore(residual)
        self.phase_override = None

    async def _find_members(self, *, until: float) -> None:
        """Get a place among members, or find out by `until` (trio time) that none answers."""
        while trio.current_time() < until:
            if await self._join_others():
                return
            if self._has_stand():  # members answer; their next roster will name this node
                await self._wait_for_a_place()
                return
            if "alone" not in self.warnings:
                self.warnings["alone"] = "no member of the run answers yet; looking for them"
                logger.info("looking for members of run %s", self._run_id[:12])
            await trio.sleep(ASK_TO_JOIN_EVERY)

    def _has_stand(self) -> bool:
        try:
            return self._agreement.position is not None
        except RuntimeError:
            return False

    async def _found_the_run(self) -> None:
        """Begin at round 0 from the initial parameters, with those who have asked to join so far."""
        state = OuterState.start(self._trainer.parameters())
        await self._diloco.begin(0, state, (self._me,), ())
        waited = trio.current_time() + self._settings.wait_seconds
        while trio.current_time() < waited and not self._stopping.is_set():
            joiners = self._agreement.waiting_to_join()
            if len(joiners) >= self._settings.wait_peers:
                break
            await trio.sleep(0.1)
        await self._diloco.begin(0, state, (self._me,), self._agreement.waiting_to_join())

    async def _join_others(self) -> bool:
        """Ask members to be named; once somebody's roster names this node, fetch the state and stand there.

        A node that stands nowhere yet fetches what the best of them hold at once: it is then close when it is named.
        """
        heads = await self._heads()
        for head, source in heads:
            # after its last round a swarm names nobody any more
            over = self._settings.rounds is not None and head.round >= self._settings.rounds
            if (self._named_in(head) or over) and await self._go_to(head, source):
                return True
        if heads and not self._has_stand():
            await self._go_to(*heads[0])
        return False

    async def _heads(self, *, join: bool = True) -> list[tuple[Head, PeerId]]:
        """Where members stand, the best first; with `join` they are asked to name this node as well."""
        peers = self._membership.connected() or tuple(view.peer for view in self._network.peers())
        heads: list[tuple[Head, PeerId]] = []
        ask = self._agreement.ask_to_join if join else self._agreement.ask_head

        async def look(peer: PeerId) -> None:
            try:
                heads.append((await ask(peer, timeout=HEAD_TIMEOUT), peer))
            except CallError as error:
                logger.debug("%s does not say where it stands: %s", peer, error)

        async with trio.open_nursery() as nursery:
            for peer in peers[:32]:
                nursery.start_soon(look, peer)
        best: list[tuple[Head, PeerId]] = []
        for head, peer in heads:
            position = next((i for i, (other, _) in enumerate(best) if prefers(other, head)), len(best))
            best.insert(position, (head, peer))
        return best

    async def _go_to(self, head: Head, source: PeerId) -> bool:
        """Fetch the state at `head` and stand there. False where that failed for now."""
        phase, self.phase_override = self.phase_override, "catching-up"
        before = self._agreement.position.parent if self._has_stand() else None
        began = trio.current_time()
        sources = tuple(dict.fromkeys((source, *head.voters)))
        try:
            hash = await self._diloco.catch_up(head, tuple(p for p in sources if p != self._me))
        except CatchUpFailed as error:
            logger.warning("catching up with round %d failed, trying again: %s", head.round, error)
            return False
        finally:
            self.phase_override = phase
        if hash == before:
            return True  # it held this state already
        seconds = trio.current_time() - began
        logger.info("caught up with round %d in %.1f s", head.round, seconds)
        self._emit({"event": "caught_up", "round": head.round, "state_hash": hash, "seconds": round(seconds, 3)})
        return True

    # --- rounds -----------------------------------------------------------------------------------------------------

    async def _one_round(self) -> None:
        behind, self._better = self._better, None
        if behind is not None:
            await self._rejoin(behind)
            self._better = None
            return
        result: RoundResult | None = None
        with trio.CancelScope() as self._training:
            try:
                result = await self._diloco.run_round()
            except Behind as error:
                behind = error
            except (CatchUpFailed, LeftOut) as error:
                self._abandon(str(error))
        if result is not None:
            self._tell(result)
            await self._save_if_due()
        elif not self._training.cancelled_caught:
            await self._rejoin(behind)

    async def _rejoin(self, behind: Behind | None) -> None:
        """Stand with the others again: at once where their roster names this node, else when the next one does."""
        with trio.CancelScope() as self._training:
            try:
                if behind is not None:
                    logger.info("others are at round %d; catching up", behind.head.round)
                    if self._named_in(behind.head) and await self._go_to(behind.head, behind.source):
                        return
                self.phase_override = "waiting"
                await self._wait_for_a_place()
            finally:
                self.phase_override = None

    async def _wait_for_a_place(self) -> None:
        """Ask members until one names this node; go on from here where nobody answers, or nobody is better off.

        The last rule ends the wait of nodes that all wait for one another.
        """
        deadline = trio.current_time() + FIND_MEMBERS_FOR
        while not await self._join_others():
            if trio.current_time() > deadline:
                mine = self._agreement.head()
                heads = [head for head, _ in await self._heads(join=False) if not head.paused]
                if not any(head.run_id == self._run_id and prefers(mine, head) for head in heads):
                    here = self._agreement.position
                    answered = f"{len(heads)} members answer and none is further" if heads else "no member answers"
                    logger.warning("%s; going on from round %d", answered, here.round)
                    if not heads:
                        await self._diloco.begin(here.round, self._diloco.state, (self._me,), ())
                    return
            await trio.sleep(ASK_TO_JOIN_EVERY)

    def _named_in(self, head: Head) -> bool:
        return self._me in head.voters or self._me in head.joiners

    async def _look_around(self) -> None:
        """Notice that members outside this node's roster stand on a better history, and follow it."""
        while True:
            await trio.sleep(LOOK_AROUND_EVERY * self._rng.uniform(0.5, 1.5))
            mine = self._agreement.head()
            strangers = [p for p in self._membership.connected() if p not in mine.voters and p not in mine.joiners]
            for peer in self._rng.sample(strangers, min(LOOK_AT, len(strangers))):
                try:
                    theirs = await self._agreement.ask_head(peer, timeout=HEAD_TIMEOUT)
                except CallError:
                    continue
                mine = self._agreement.head()
                apart = diverged(mine, theirs) or theirs.round > mine.round + 1
                if apart and prefers(mine, theirs) and not theirs.paused:
                    logger.warning("%s stands on another history with more members; following it", peer)
                    self._better = Behind(theirs, peer)
                    if self.phase == "training":
                        self._training.cancel()
                    break

    def _is_over(self) -> bool:
        rounds = self._settings.rounds
        return rounds is not None and self._agreement.position.round >= rounds

    async def _pause_if_asked(self) -> None:
        if self._resumed.is_set():
            return
        self.phase_override = "paused"
        await self._diloco.return_local_work()
        await self._agreement.say_goodbye()
        await self._save()
        await self._resumed.wait()  # `stop` sets it as well
        self.phase_override = None
        if not self._stopping.is_set():
            await self._rejoin(None)

    async def _hand_over(self) -> None:
        """Leave cleanly: what was trained goes into the checkpoint, and the others do not wait for this node."""
        if not self._has_stand():
            return
        self._agreement.paused = True  # it leads nobody any more, however long the process still lives
        await self._agreement.say_goodbye()
        await self._diloco.return_local_work()
        await self._save()

    # --- what is kept and told --------------------------------------------------------------------------------------

    async def _save_if_due(self) -> None:
        done = self._agreement.position.round
        if done - self._saved_at >= self._settings.checkpoint_every or self._is_over():
            await self._save()

    async def _save(self) -> None:
        if self._checkpoints is None:
            return
        here = self._agreement.position
        checkpoint = Checkpoint(here.round, here.parent, self._diloco.state, self._allreduce.sent.export(), here.voters)
        checkpoints = self._checkpoints
        try:
            await self._runner(lambda: checkpoints.save(checkpoint))
        except DataDirError as error:
            self.warnings["checkpoint"] = f"no checkpoint could be written: {error}"
            logger.error("no checkpoint of round %d: %s Training goes on.", here.round, error)
        else:
            self.warnings.pop("checkpoint", None)
        self._saved_at = here.round

    def _abandon(self, reason: str) -> None:
        """The round brought no result to this node. No `round` event is told: its state hash is not that round's."""
        round = self._agreement.position.round
        self.outcome = Abandoned(reason)
        logger.warning("round %d brought no result here, its work is kept for a later one: %s", round, reason)
        self._emit({"event": "abandoned", "round": round, "reason": reason})

    def _tell(self, result: RoundResult) -> None:
        self.last, self.outcome = result, result.outcome
        if math.isfinite(result.loss):
            self.losses.append((result.round, result.loss))
        now, before = self._network.traffic(), self._traffic
        self._traffic = now
        spent = Traffic(now.bytes_in - before.bytes_in, now.bytes_out - before.bytes_out)
        outcome = result.outcome
        missing = outcome.missing if isinstance(outcome, Partial) else ()
        logger.info(
            "round %d: %s, held-out loss %.4f bits per byte, %s, %.2g s",
            result.round,
            type(outcome).__name__,
            result.loss,
            "alone" if result.members == 1 else f"{result.members} members",
            result.seconds,
        )
        self._emit(
            {
                "event": "round",
                "round": result.round,
                "loss": result.loss if math.isfinite(result.loss) else None,
                "state_hash": result.state_hash,
                "outcome": type(outcome).__name__,
                "seconds": round(result.seconds, 3),
                "bytes_in": spent.bytes_in,
                "bytes_out": spent.bytes_out,
                "compute_seconds": round(result.worked.seconds, 3),
                "steps": result.worked.steps,
                "tokens": result.worked.tokens,
                "members": result.members,
                "missing": list(missing),
            }
        )
