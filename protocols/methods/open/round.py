"""One round of the open exchange as this node takes part in it. What to do when is said by `protocols.chain.duty`.

`OpenRounds.run_round` is the whole of it: train, and whenever something was heard or a wait is over, do what an honest
node does next, until most electors stand behind a roster; then move there.

    train      inner steps from φ, until H are done or the window closes, and on while the rest goes on
    commit     bind oneself to the encoded pseudo-gradient                        }
    cut        (judges) list the commits that are here                            }
    reveal     open the commit once a quorum has cut                              }  open_duties.py
    judge      (judges) measure what was revealed; seal; open once a quorum has   }
    lead       (the leader of the attempt) make the roster                        }
    follow     (electors) sign the head; everybody moves when enough of them stand behind it

How long each wait is stands in `open_waits.py`, what becomes of the work in `open_settling.py`. Who may fail when, and
what is then true: a node that says nothing is left out; a leader that is gone makes the next attempt begin; too few
judges end the round empty, and after some empty rounds fewer are enough. A node that cannot say a thing, as it said
another before a restart, says nothing in that part of the round (`open_turn.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from swarmnode.protocols.chain.duty import duties, follow
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.rules import longest_norm
from swarmnode.protocols.chain.state import volunteers
from swarmnode.protocols.chain.statements import Head
from swarmnode.protocols.methods.method import Overtaken, RoundResult
from swarmnode.protocols.methods.open.duties import Duties
from swarmnode.protocols.methods.open.judge import Bench, Standing, batch_seed, full_standing
from swarmnode.protocols.methods.open.local import Work
from swarmnode.protocols.methods.open.settling import Settling, accepted_in, verdicts_in
from swarmnode.protocols.methods.open.sources import Lost
from swarmnode.protocols.methods.open.store import BURST
from swarmnode.protocols.methods.open.sync import Keeper
from swarmnode.protocols.methods.open.timeouts import Waits
from swarmnode.protocols.methods.open.turn import RoundSettings, Turn, Voice
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.runner import Runner

logger = logging.getLogger(__name__)


class OpenRounds:
    """One node's rounds. The keeper stands on a block before the first."""

    def __init__(
        self,
        *,
        me: PeerId,
        settings: RoundSettings,
        keeper: Keeper,
        work: Work,
        voice: Voice,
        duties: Duties,
        waits: Waits,
        runner: Runner,
        members: Callable[[], int],
        moved: Callable[[Block], None],
        standing: Standing = full_standing,
    ) -> None:
        """`members`: of the swarm, as far as this node sees; `moved` is told every move.

        `standing`: what this node says of authors in its scores.
        """
        self._me, self._settings = me, settings
        self._keeper, self._held, self._work = keeper, keeper.held, work
        self._voice, self._duties, self._waits, self._runner = voice, duties, waits, runner
        self._settling = Settling(me, self._held, work)
        self._members, self._moved, self._standing = members, moved, standing
        self.began = trio.current_time()  # when this node came to where it stands
        self.ended = trio.current_time()  # when its last round ended
        self._offered = float("-inf")  # when it last had work to offer
        self.phase = "waiting"

    async def run_round(self) -> RoundResult | None:
        """Take part until most electors stand behind a roster, and move there; None where that is no later round.

        Raises Overtaken where the others are further than rosters can be replayed.
        """
        held, turn = self._held, self._begin()
        self.phase = "training"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work.run, turn.chain.round, held.ring)
            nursery.start_soon(self._train_until_due, turn)
            nursery.start_soon(self._waits.keep_time, turn)
            nursery.start_soon(self._waits.look_for_electors, turn)
            while (found := await self._followed(turn, nursery)) is None:
                news = held.news
                if held.astray:
                    break
                for action in duties(turn.chain, held.rules, turn.view(self._me, held.norms(turn.book))):
                    await self._duties.carry_out(turn, action, nursery)
                await news.wait()
                await trio.sleep(BURST)
            nursery.cancel_scope.cancel()
        if found is None:
            held.astray = False
            raise Overtaken("others are further than rosters can be replayed")
        return await self._move(turn, found)

    def _begin(self) -> Turn:
        """Take up the round on the present block, with what this node has already said in it."""
        held = self._held
        block = held.block
        bench = Bench(
            self._work,
            self._runner,
            state=held.states[block.id],
            before=held.before(block) if block.chain.undoable else None,
            seed=batch_seed(self._voice.derive("nonce", block.chain), block.chain.seed),
            lr=self._settings.outer_lr,
            codec_name=self._settings.codec,
            samples=self._settings.samples,
            longest=longest_norm(block.chain, held.rules),
            standing=self._standing,
        )
        turn = Turn(block, held.book, self.began, bench)
        turn.recall(self._me, self._work)
        return turn

    async def _train_until_due(self, turn: Turn) -> None:
        """H inner steps, or until the window closes; after an empty round at once, as the work is there already.

        From one offer to the next there is the shortest window at least: in rounds of less, an author would say more
        in a second than neighbours pass on (`statepush.AUTHOR`), and who is late by one would not be in time again.
        """
        closes = turn.began + turn.chain.window / 1000
        if not turn.follows_nothing:
            await self._held.until(lambda: self._work.enough, deadline=closes)
            await trio.sleep_until(self._offered + self._held.rules.shortest_window / 1000)
        self._offered = trio.current_time()
        volunteer = volunteers(turn.chain, self._held.rules, self._me, self._members())
        turn.ready = volunteer and turn.own.commit is None
        self.phase = "exchanging"
        self._held.ring()

    async def _followed(self, turn: Turn, nursery: trio.Nursery) -> Block | None:
        """The block to move to, once enough electors stand behind it. Electors sign the head that they follow."""
        held, chain, attempt = self._held, turn.chain, turn.timers.attempt
        wanted = follow(held.tree, held.rules, held.heads(), me=self._me, tip=chain.tip, attempt=attempt)
        if wanted == chain.tip:
            return None
        try:
            block = await self._keeper.have(wanted, chain.tip)
        except Lost as error:
            logger.warning("round %d: a roster cannot be followed: %s", chain.round, error)
            return None
        if self._me in chain.electors and held.heads().get(self._me) != wanted:
            state = bytes.fromhex(held.states.hashes[wanted])
            if await self._voice.say(Head(wanted, block.chain.round, state)) is not None:
                logger.debug("follows %s of round %d", wanted.hex()[:12], block.chain.round)
        return block if self._waits.is_settled(turn, wanted, nursery) else None

    async def _move(self, turn: Turn, to: Block) -> RoundResult | None:
        """Stand on another block, with this node's work settled; what the round came to, unless it is no later one."""
        held = self._held
        state = await held.states.after(to, held.tree)
        worked = self._work.offered_work
        counted = await self._settling.settle(turn, to)
        loss = await self._work.move(state)
        await self._keeper.move(to)
        self._moved(to)
        self._settling.forget()
        self.began = now = trio.current_time()
        seconds, self.ended = now - self.ended, now
        self.phase = "waiting"
        if to.chain.round <= turn.chain.round:
            return None
        outcome = self._settling.outcome(turn, to, counted)
        return RoundResult(
            to.chain.round - 1,
            outcome,
            held.states.hashes[to.id],
            loss,
            worked,
            seconds,
            outcome.members,
            counted=tuple(sorted(accepted_in(to))),
            roster=to.id.hex(),
            verdicts=verdicts_in(held, to),
        )
