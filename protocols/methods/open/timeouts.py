"""How long this node waits in a round: for commits, cuts, reveals, scores, a roster, and heads behind it.

Each wait ends when nobody who is there is lacking, and at the latest after as long as this swarm was seen to need
(`deadlines.AdaptiveDeadline`): nobody waits for who is dead, away or paused. Too few judges end the round empty, at
once where they are known to be gone. `Timers` tells `chain.duty` which waits are over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import trio

from swarmnode.protocols.chain.state import leaders, participates, quorum
from swarmnode.protocols.deadlines import AdaptiveDeadline
from swarmnode.protocols.methods.open.store import Held
from swarmnode.protocols.methods.open.turn import RoundSettings, Turn
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness

logger = logging.getLogger(__name__)

QUIET = 0.3  # seconds in which what is waited for usually comes; only then are its authors pinged
SHORTEST_EMPTY = 1.0  # seconds of a round that ends empty as too few judges are there: they may come back
WAITS = 4  # of electors for judges, in a round; each takes the floor where one is silent: others give them that time
WATCHED = 16  # electors of whom one must be there for those who are none to wait


class Waits:
    """The waits of one node's rounds, with what they took so far."""

    def __init__(
        self,
        *,
        me: PeerId,
        settings: RoundSettings,
        held: Held,
        liveness: Liveness,
        newcomers: Callable[[], set[PeerId]],
    ) -> None:
        """`newcomers`: peers that are about to take part for the first time."""
        self._me, self._settings, self._held = me, settings, held
        self._liveness, self._newcomers = liveness, newcomers
        self._deadlines = {
            phase: AdaptiveDeadline(floor=settings.floor, ceiling=settings.ceiling)
            for phase in ("commits", "cuts", "reveals", "scores", "roster", "heads", "electors")
        }
        liveness.on_suspicion(held.ring)

    async def keep_time(self, turn: Turn) -> None:
        """Say which waits of the round are over; see `duty.Timers`. Only electors need to know."""
        if self._me not in turn.chain.electors:
            return
        book, chain = turn.book, turn.chain
        needed, order = quorum(chain, self._held.rules), leaders(chain, self._held.rules)
        closes = turn.began + chain.window / 1000 + self._settings.floor
        expected, judges = self._expected(turn), set(book.judges)
        await self._wait_for("commits", lambda: expected - book.arrived.keys(), since=turn.began, until=closes)
        self._set(turn, commits=True)
        cut = trio.current_time()
        await self._wait_for("cuts", lambda: judges - book.cuts_by_judge().keys())
        if len(book.cuts_by_judge()) < needed:
            latest = self._due(turn) + self._patience("cuts")
            await self._wait_for_late(judges, book.cuts_by_judge, needed, latest)
        if len(book.cuts_by_judge()) >= needed:
            await self._wait_for("reveals", lambda: self._unjudged(turn))
            self._set(turn, contributions=True)
            await self._wait_for("scores", lambda: book.cuts_by_judge().keys() - book.scores_by_judge().keys())
            if len(book.scores_by_judge()) < needed:  # others may have waited for contributions for longer than this
                latest = trio.current_time() + self._patience("reveals") + self._patience("scores")
                await self._wait_for_late(set(book.cuts_by_judge()), book.scores_by_judge, needed, latest)
            self._set(turn, scores=True)
        if len(book.scores_by_judge()) >= needed:
            for attempt, leader in enumerate(order):
                self._set(turn, attempt=attempt)
                await self._wait_for("roster", partial(self._without_roster, turn, leader))
                if not self._is_open(turn):
                    await trio.sleep(self._patience("heads"))  # for heads; the round ends meanwhile
        else:
            logger.info("round %d: too few judges are there", chain.round)
            await trio.sleep_until(cut + SHORTEST_EMPTY)
        self._set(turn, attempt=len(order))

    async def _wait_for_late(
        self, judges: set[PeerId], heard: Callable[[], Mapping[PeerId, object]], needed: int, latest: float
    ) -> None:
        """Wait until as many as needed are heard, while judges are there for that; `latest` in trio time.

        They may have begun the round, or a wait in it, later than this node.
        """

        def settled() -> bool:
            there = {judge for judge in judges if self._is_there(judge)}
            return len(heard()) >= needed or len(there | heard().keys()) < needed

        with self._liveness.watching(judges - {self._me}):
            await self._held.until(settled, deadline=latest)

    async def look_for_electors(self, turn: Turn) -> None:
        """Notice that nobody will end the round: electors are gone, or there and silent; for who is no elector."""
        electors = turn.chain.electors[:WATCHED]
        if self._me in turn.chain.electors:
            return
        due, latest = self._due(turn), self._given_up(turn)
        await trio.sleep_until(due)
        with self._liveness.watching(electors):
            gone = await self._held.until(lambda: not any(map(self._is_there, electors)), deadline=latest)
        why = "no elector is there" if gone else f"its electors have been silent for {latest - due:.0f} s"
        logger.warning("round %d: %s, so it ends empty", turn.chain.round, why)
        self._set(turn, attempt=len(leaders(turn.chain, self._held.rules)))

    def _due(self, turn: Turn) -> float:
        """When a round's roster may be expected, in trio time, by who is no elector."""
        floor = self._settings.floor
        return turn.began + (floor if turn.follows_nothing else turn.chain.window / 1000 + 2 * floor)

    def _given_up(self, turn: Turn) -> float:
        """From when on a round may end empty although electors are there who have not said so, in trio time."""
        return self._due(turn) + max(self._patience("electors"), WAITS * self._settings.floor)

    # --- heads ------------------------------------------------------------------------------------------------------

    def is_settled(self, turn: Turn, wanted: bytes, nursery: trio.Nursery) -> bool:
        """Whether enough electors stand behind what this node follows, or those that do not will not soon."""
        tree, tip = self._held.tree, turn.chain.tip
        fork = tree.fork_point(tip, wanted)
        first = tree.path(wanted)[len(tree.path(fork))]
        at = tree[fork].chain
        heads, now, deadline = self._held.heads(), trio.current_time(), self._deadlines["heads"]
        since, waiting = turn.waited_for
        if tree.support(first.id, heads) >= quorum(at, self._held.rules):
            deadline.observe(now - since if waiting == first.id else 0.0)
            if first.roster is not None:
                self._deadlines["electors"].observe(max(0.0, now - self._due(turn)))
            return True
        patience = self._patience("heads")
        elsewhere = [peer for peer in at.electors if first.id not in tree.ancestry(heads.get(peer, b""))]
        if not any(self._is_there(peer) for peer in elsewhere):
            return True
        latest = (now if waiting != first.id else since) + patience
        if self._me not in at.electors and first.roster is None and fork == tip:  # a few electors who gave up early
            latest = max(latest, self._given_up(turn))
        if waiting != first.id:
            turn.waited_for = now, first.id
            nursery.start_soon(self._await_heads, elsewhere, latest)
        return now >= latest

    async def _await_heads(self, electors: list[PeerId], latest: float) -> None:
        """Notice when electors that are waited for are gone, or when they had their time."""
        with self._liveness.watching([peer for peer in electors if peer != self._me]):
            await trio.sleep_until(latest)
        self._held.ring()

    # --- who is lacking ---------------------------------------------------------------------------------------------

    def _expected(self, turn: Turn) -> set[PeerId]:
        """Whose commits are worth waiting for: who had work accepted lately; where nobody had, who may begin."""
        lately = {worked.author for roster in turn.chain.history[-2:] for worked in roster}
        if not lately:
            lately = {self._me, *turn.chain.electors, *self._newcomers()}
        return {peer for peer in lately if participates(turn.chain, peer)}

    def _unjudged(self, turn: Turn) -> set[PeerId]:
        """Authors of listed commits that this judge has no score for, and judges without a cut."""
        book = turn.book
        lacking = {book.commits[id].author for id in book.listed() if id not in turn.judged and id in book.commits}
        return lacking if self._me in book.judges else set()

    def _without_roster(self, turn: Turn, leader: PeerId) -> set[PeerId]:
        """The leader, while no roster of this round is here whose rules hold."""
        return {leader} if self._is_open(turn) else set()

    def _is_open(self, turn: Turn) -> bool:
        """Whether no roster of this round is here whose rules hold."""
        return not self._held.tree.children(turn.chain.tip)

    def _is_there(self, peer: PeerId) -> bool:
        return peer == self._me or not (self._liveness.is_suspected(peer) or self._held.is_away(peer))

    # --- waiting ----------------------------------------------------------------------------------------------------

    async def _wait_for(
        self,
        phase: str,
        lacking: Callable[[], set[PeerId]],
        *,
        since: float | None = None,
        until: float = float("inf"),
    ) -> None:
        """Wait until nobody is lacking who is there, or as long as the phase may take; learn how long it took.

        Where many who are there are lacking at its end, the network is slower than it was, and the whole wait is
        learned from. A few who keep silent, as who joins anew does, would so make every round longer than the last:
        then it is what the others took. A roster has one who is lacking.

        `since`: when it began, in trio time; `until`: it ends then in any case.
        """
        began = trio.current_time() if since is None else since
        deadline = min(began + self._patience(phase), until)
        left, came = lacking(), began  # who is lacking, and when the last of those who came did
        crowd, there = max(len(left), len(self._held.block.chain.electors)), len(left)

        def whole() -> bool:
            nonlocal left, came
            if len(now := lacking()) < len(left):
                came = trio.current_time()
            left = now
            return not left

        if not await self._held.until(whole, deadline=min(deadline, trio.current_time() + QUIET)):
            with self._liveness.watching(peer for peer in left if peer != self._me):
                await self._held.until(lambda: whole() or not any(map(self._is_there, left)), deadline=deadline)
                there = sum(map(self._is_there, left))
        few = phase != "roster" and 2 * there < crowd
        if not left or few:
            self._deadlines[phase].observe(came - began)
        elif trio.current_time() >= deadline:  # else who is gone made it short
            self._deadlines[phase].observe(trio.current_time() - began)

    def _patience(self, phase: str) -> float:
        """Seconds that a phase may take. Who has waited for none yet, as a new judge, allows the round's window."""
        return self._deadlines[phase].seconds(first=self._held.block.chain.window / 1000)

    def _set(self, turn: Turn, **timers: bool | int) -> None:
        turn.timers = replace(turn.timers, **timers)  # type: ignore[arg-type]
        self._held.ring()
