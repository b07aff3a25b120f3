"""Carrying out what `protocols.chain.duty` says is to be done in a round: as an author, a judge and a leader.

    author   commit to the encoded pseudo-gradient; reveal it
    judge    cut; measure what was revealed; seal the scores; open them
    leader   make the roster of what is here; get what it lacks for that

What takes long (measuring, fetching) runs in the round's nursery, one of each at a time; all else is done at once. What
cannot be done now is offered again by `duties`. A trainer that dies while judging costs a second and another attempt.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import trio

from swarmnode.protocols.chain.duty import (
    Action,
    Fetch,
    Judge,
    WriteCommit,
    WriteCut,
    WriteReveal,
    WriteRoster,
    WriteScores,
    WriteSeal,
)
from swarmnode.protocols.chain.rules import compose
from swarmnode.protocols.chain.state import places_of
from swarmnode.protocols.chain.statements import (
    SALT,
    Commit,
    Cut,
    Reveal,
    Score,
    Scores,
    Seal,
    binding_of,
    nonce_hash,
)
from swarmnode.protocols.methods.open.local import Work
from swarmnode.protocols.methods.open.sync import Keeper
from swarmnode.protocols.methods.open.turn import Turn, Voice
from swarmnode.protocols.methods.trainer import TrainerDied
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.runner import Runner

logger = logging.getLogger(__name__)

WINDOW_SLACK = 2.0  # a round's training may take this multiple of what the median author needed in the last
AGAIN = 1.0  # seconds until what was not here is looked for again


class Duties:
    """What one node does in rounds, apart from following rosters."""

    def __init__(self, *, me: PeerId, run_id: str, keeper: Keeper, work: Work, voice: Voice, runner: Runner) -> None:
        self._me, self._run_id = me, run_id
        self._keeper, self._held, self._work = keeper, keeper.held, work
        self._voice, self._runner = voice, runner

    async def carry_out(self, turn: Turn, action: Action, nursery: trio.Nursery) -> None:
        """Do one thing. `nursery` ends with the round."""
        match action:
            case WriteCommit():
                await self.commit(turn)
            case WriteCut(commits):
                await self.cut(turn, commits)
            case WriteReveal():
                await self.reveal(turn)
            case Judge(commits) if not turn.measuring:
                turn.measuring = True
                nursery.start_soon(self.judge, turn, commits)
            case WriteSeal(scores):
                await self.seal(turn, scores)
            case WriteScores() if (sealed := turn.own.sealed) is not None:
                turn.own = replace(turn.own, opened=True)
                await self._voice.say(sealed)
            case Fetch() if not turn.fetching:
                turn.fetching = True
                nursery.start_soon(self.fetch, turn)
            case WriteRoster():
                await self.lead(turn, action)

    # --- author -----------------------------------------------------------------------------------------------------

    async def commit(self, turn: Turn) -> None:
        """Encode what was trained, and say that it is bound to that."""
        turn.ready = False
        chain = turn.chain
        encoded = await self._work.contribute(chain.tip, chain.round)
        if encoded is None:
            return
        root = await self._held.contributions.keep(encoded, chain.round)
        self._work.offered(root)
        bound = (self._salt(turn), root, self._work.trace)
        binding = binding_of(self._run_id, chain.round, self._me, chain.tip, *bound)
        said = await self._voice.say(Commit(chain.round, chain.tip, binding, self._voice.beacon.anchor))
        if said is None:
            await self._work.settle(accepted=False)
        else:
            turn.own = replace(turn.own, commit=said)

    async def reveal(self, turn: Turn) -> None:
        """Open the commit and serve the contribution, where this life still has it."""
        turn.own = replace(turn.own, revealed=True)
        offer, commit = self._work.offer, turn.own.commit
        if offer is None or commit is None or not turn.has_offer(self._work):
            return
        contributions, chain = self._held.contributions, turn.chain
        contributions.serve(offer.root)
        told = (self._salt(turn), offer.root, contributions.size, self._work.trace)
        await self._voice.say(Reveal(chain.round, chain.tip, commit.id, *told))

    def _salt(self, turn: Turn) -> bytes:
        return self._voice.derive("salt", turn.chain)[:SALT]

    # --- judge ------------------------------------------------------------------------------------------------------

    async def cut(self, turn: Turn, commits: tuple[bytes, ...]) -> None:
        """List these commits, once; with the hash of the nonce that draws what this judge measures on."""
        chain, nonce = turn.chain, self._voice.derive("nonce", turn.chain)
        cut = Cut(chain.round, chain.tip, commits, nonce_hash(nonce), self._proposal(turn), self._absent(turn))
        turn.own = replace(turn.own, cut=cut)
        await self._voice.say(cut)

    def _absent(self, turn: Turn) -> tuple[int, ...]:
        """Judges of the round before of whom no cut came; nobody, where this node holds nothing of it."""
        before = self._held.books.get(turn.block.parent)
        if before is None:
            return ()
        return places_of(turn.chain, set(before.judges) - before.cuts_by_judge().keys())

    def _proposal(self, turn: Turn) -> int:
        """The window that this judge proposes for the next round, ms: twice what the median author needed in this."""
        took = sorted(at - turn.began for at in turn.book.arrived.values())
        if not took or turn.follows_nothing:
            return turn.chain.window
        rules = self._held.rules
        wanted = int(1000 * WINDOW_SLACK * took[(len(took) - 1) // 2])
        return min(max(wanted, rules.shortest_window), rules.longest_window)

    async def judge(self, turn: Turn, commits: tuple[bytes, ...]) -> None:
        """Measure those of these contributions that are here; the others are being fetched."""
        contributions, reveals = self._held.contributions, turn.book.reveals
        roots = {id: reveals[id].what.root for id in commits if id in reveals}
        for id, root in roots.items():
            if contributions.is_malformed(root) or reveals[id].what.size != contributions.size:
                turn.judged[id] = turn.bench.malformed(id)
        found = {id: contributions[root] for id, root in roots.items() if root in contributions}
        authors = {id: turn.book.commits[id].author for id in found}
        listed = len(turn.own.cut.commits) if turn.own.cut is not None else len(commits)
        try:
            turn.judged.update(await turn.bench.measure(found, authors, among=listed))
        except TrainerDied as error:
            logger.warning("round %d: the trainer died while judging: %s", turn.chain.round, error)
            await trio.sleep(AGAIN)
        left = [id for id in roots if id not in turn.judged]
        if left:  # some are not here yet
            self._keeper.fetch_listed(turn.book)
            await self._held.until(
                lambda: any(roots[id] in contributions or contributions.is_malformed(roots[id]) for id in left),
                deadline=trio.current_time() + AGAIN,
            )
        turn.measuring = False
        self._held.ring()

    async def seal(self, turn: Turn, scores: tuple[Score, ...]) -> None:
        """Say the hash of these scores, so that they cannot be others when the judges' are opened."""
        chain = turn.chain
        nonce, salt = self._voice.derive("nonce", chain), self._voice.derive("seal", chain)[:SALT]
        sealed = Scores(chain.round, chain.tip, nonce, salt, turn.bench.undo, scores)
        turn.own = replace(turn.own, sealed=sealed)
        if await self._voice.say(Seal(chain.round, chain.tip, sealed.seal)) is None:
            turn.own = replace(turn.own, opened=True)

    # --- leader -----------------------------------------------------------------------------------------------------

    async def lead(self, turn: Turn, action: WriteRoster) -> None:
        """Make the roster of an attempt."""
        chain, voice = turn.chain, self._voice
        turn.own = replace(turn.own, led=turn.own.led | {action.attempt})
        anchor = chain.anchors.get(self._me)
        preimage = voice.beacon.preimage(anchor) if anchor is not None else b""
        state = bytes.fromhex(self._held.states.hashes[chain.tip])
        quoted, derived = action.quoted, action.derived
        roster = compose(chain, quoted, derived, attempt=action.attempt, preimage=preimage, state=state)
        turn.book.derived[roster.cuts, roster.scores] = derived
        await voice.say(roster)

    async def fetch(self, turn: Turn) -> None:
        """Get the contributions that a roster needs, and look again."""
        self._keeper.fetch_listed(turn.book)
        await trio.sleep(AGAIN)
        turn.fetching = False
        self._held.ring()
