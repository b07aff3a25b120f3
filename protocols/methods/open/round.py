"""One round of the open exchange as this node takes part in it. What to do when is said by `protocols.chain.duty`.

`OpenRounds.run_round` is the whole of it: train, and whenever something was heard or a wait is over, do what an honest
node does next (`duty.py` tells of commit, cut, reveal, judge, lead and follow), until a roster is decided, or the wait
for those who are lacking is over; then move there. Around that,

    train      inner steps from φ, until H are done or the window closes, and on while the rest goes on
    settle     work that a roster counts is committed; what it leaves out returns to the residual, and so does, after a
               switch to another fork or a revert, what an earlier roster had counted: no local work is lost

What takes long runs in the round's nursery, one of each at a time; `duties` offers again what cannot be done now.
Who may fail when, and what is then true: a node that says nothing is left out, as is one that said another thing before
a restart; a leader that is gone makes the next attempt begin; too few judges end the round empty, and after some empty
rounds fewer are enough; a trainer that dies while judging costs a second and another attempt.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import trio

from swarmnode.crdt.record import InvalidRecord
from swarmnode.protocols.chain.duty import (
    Judge,
    Own,
    RoundView,
    Write,
    WriteAvailabilityVote,
    WriteRoster,
    WriteSeal,
    duties,
    follow,
)
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.rules import compose
from swarmnode.protocols.chain.state import ChainState, HashChain, participates, places_of, volunteers
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    HASH,
    JUDGED,
    MALFORMED,
    MISSING,
    ONE,
    PREFIX,
    SALT,
    VERDICTS,
    AvailabilityVote,
    Commit,
    ForkChoiceVote,
    Reveal,
    Roster,
    Said,
    Score,
    Scores,
    Seal,
    binding_of,
    nonce_hash,
    read,
)
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.method import Overtaken, RoundResult
from swarmnode.protocols.methods.open.judge import Evaluator
from swarmnode.protocols.methods.open.local import LocalTrainer
from swarmnode.protocols.methods.open.store import BURST, ChainStore, Lost
from swarmnode.protocols.methods.open.sync import ChainSync
from swarmnode.protocols.methods.open.timeouts import Timeouts
from swarmnode.protocols.methods.trainer import NOTHING, TrainerDied
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.runner import surely
from swarmnode.protocols.state.backend import AlreadyWritten, StateError
from swarmnode.protocols.state.sync import StateSync

logger = logging.getLogger(__name__)

WINDOW_SLACK = 2.0  # a round's training may take this multiple of what the median author needed in the last
AGAIN = 1.0  # seconds until what was not here is looked for again
LOST_FOR = 10.0  # seconds for which a node trains on where the state after a roster to follow cannot be made
NOT_LISTED = "in too few judges' lists"

S = TypeVar("S", Commit, AvailabilityVote, Reveal, Seal, Scores, Roster, ForkChoiceVote)


@dataclass(kw_only=True)
class RoundContext(RoundView):
    """This node's part in the round on one block, while it lasts."""

    evaluator: Evaluator
    measuring: bool = False
    fetching: bool = False
    lost_since: float | None = None  # trio time, while the roster to follow cannot be
    stages: dict[str, float] = field(default_factory=dict)  # trio's times when this node first did its part in each


class OpenRounds:
    """One node's rounds. It stands on a block before the first."""

    def __init__(self, parts: Context, sync: ChainSync, local: LocalTrainer, signer: Signer) -> None:
        self._parts, self._sync, self._store, self._local = parts, sync, sync.store, local
        self._signer, self._timeouts = signer, Timeouts(parts, sync.store)
        self.ended = trio.current_time()  # when its last round ended
        self._offered = float("-inf")  # when it last had work to offer
        self.phase = "waiting"

    async def run_round(self) -> RoundResult | None:
        """Take part until the round is decided or waited for long enough, and move; None where that is no later round.

        Raises Overtaken where the others are further than rosters can be replayed.
        """
        store = self._store
        context = self._begin()
        self.phase = "training"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._local.run, context.chain.round)
            nursery.start_soon(self._train_until_due, context)
            nursery.start_soon(self._timeouts.keep_time, context)
            nursery.start_soon(self._timeouts.look_for_validators, context)
            while (found := await self._followed(context, nursery)) is None and not store.out_of_sync:
                changed = store.changed
                for action in duties(context, store.norms(context.log)):
                    match action:
                        case Write.COMMIT:
                            context.stages.setdefault("commit", trio.current_time())
                            await self._parts.sync.until_recovered()  # till this node knows what it said before
                            await surely(self.commit(context))
                        case WriteAvailabilityVote(commits):
                            await self.cut(context, commits)
                        case Write.REVEAL:
                            context.stages.setdefault("reveal", trio.current_time())
                            await self.reveal(context)
                        case Judge(commits, complete) if not context.measuring:
                            context.measuring = True
                            context.stages.setdefault("judge", trio.current_time())
                            nursery.start_soon(self.judge, context, commits, complete)
                        case WriteSeal(scores):
                            await self.seal(context, scores)
                        case Write.SCORES:
                            await self.open_scores(context)
                        case WriteRoster():
                            await self.lead(context, action)
                        case Write.FETCH if not context.fetching:
                            context.fetching = True
                            nursery.start_soon(self.fetch, context)
                await changed.wait()
                await trio.sleep(BURST)
            nursery.cancel_scope.cancel()
        if found is None:
            store.out_of_sync = False
            raise Overtaken("others are further than rosters can be replayed")
        return await surely(self._move(context, found))

    def _begin(self) -> RoundContext:
        """Take up the round on the present block, with what this node has already said in it."""
        store, parts = self._store, self._parts
        block = store.block
        evaluator = Evaluator(self._local, parts, store, block.chain, self._signer.derive("nonce", block.chain))
        after_empty = block.roster is None and block.chain.empties > 0
        me, log, began = parts.network.me, store.log, store.arrived
        context = RoundContext(me, log, began, follows_nothing=after_empty, evaluator=evaluator)
        self._recall(context)
        return context

    def _recall(self, context: RoundContext) -> None:
        """Take up what this node has already said in this round, before a restart or on another fork."""
        me, log = context.me, context.log
        commit, offered = log.own_commit(me), self._local.offered_for(context.chain.tip)
        cut = next((said.what for said in log.cuts.values() if said.author == me), None)
        context.own = Own(commit, revealed=commit is not None and not offered, cut=cut)
        if me in log.seals:  # what it sealed is known no more: it says nothing else
            context.own.sealed = Scores(context.chain.round, context.chain.tip, bytes(HASH), bytes(SALT), None, ())
            context.own.opened = True

    async def _train_until_due(self, context: RoundContext) -> None:
        """H inner steps, or until the window closes; after an empty round at once, as the work is there already.

        From one offer to the next there is the shortest window at least: in rounds of less, an author would say more
        in a second than neighbours pass on (`state/push.py`, AUTHOR), and who is late by one would stay late.
        """
        store, chain = self._store, context.chain
        if not context.follows_nothing:
            with trio.move_on_at(context.began + chain.window / 1000):
                await self._local.until_enough(chain.round)
            await trio.sleep_until(self._offered + store.rules.shortest_window / 1000)
        self._offered = trio.current_time()
        members = len(self._parts.membership.members()) + 1
        context.ready = volunteers(chain, store.rules, context.me, members) and context.own.commit is None
        self.phase = "exchanging"
        store.notify()

    # --- author -----------------------------------------------------------------------------------------------------

    async def commit(self, context: RoundContext) -> None:
        """Encode what was trained, and say that this node is bound to that."""
        context.ready = False
        chain, local = context.chain, self._local
        encoded = await self.contribution(context)
        if encoded is None:
            return
        root = await self._store.contributions.keep(encoded, chain.round)
        local.offered(root)
        binding = binding_of(chain.run_id, chain.round, context.me, chain.tip, self._salt(chain), root, local.trace)
        commit = Commit(chain.round, chain.tip, binding, self._signer.beacon.anchor)
        context.own.commit = await self._signer.publish(commit)

    async def contribution(self, context: RoundContext) -> bytes | None:
        """What this node offers, encoded; None where it trained nothing."""
        return await self._local.contribute(context.chain.tip, context.chain.round)

    async def reveal(self, context: RoundContext) -> None:
        """Open the commit and serve the contribution, where this life still has it."""
        context.own.revealed = True
        chain, commit, contributions = context.chain, context.own.commit, self._store.contributions
        root = self._local.offered_for(chain.tip)
        if commit is None or not root:
            return
        contributions.serve(root)
        opened = (self._salt(chain), root, self._local.trace)
        await self._signer.publish(Reveal(chain.round, chain.tip, commit.id, *opened))

    def _salt(self, chain: ChainState) -> bytes:
        return self._signer.derive("salt", chain)[:SALT]

    # --- judge ------------------------------------------------------------------------------------------------------

    async def cut(self, context: RoundContext, commits: tuple[bytes, ...]) -> None:
        """List these commits, once; with the hash of the nonce that draws what this judge measures on."""
        chain, nonce = context.chain, self._signer.derive("nonce", context.chain)
        before = self._store.logs.get(self._store.tree[chain.tip].parent)  # who is missed is not known without it
        missed = set(before.judges) - before.cut_by.keys() if before is not None else set()
        window, absent = self._next_window(context), places_of(chain, missed)
        told = absent, self._store.accusations()
        cut = AvailabilityVote(chain.round, chain.tip, commits, nonce_hash(nonce), window, *told)
        context.own.cut = cut
        await self._signer.publish(cut)

    def _next_window(self, context: RoundContext) -> int:
        """The window that this judge proposes for the next round, ms: twice what the median validator needed in this.

        More where the next one has more steps.
        """
        arrived = context.log.arrived  # strangers' names are free: they count where no validator is here
        took = sorted(arrived[peer] - context.began for peer in arrived.keys() & {*context.chain.validators} or arrived)
        if not took or context.follows_nothing:
            return context.chain.window
        rules, inner, round = self._store.rules, self._parts.spec.inner, context.chain.round
        longer = inner.steps_in(round + 1) / inner.steps_in(round)
        wanted = int(1000 * WINDOW_SLACK * longer * took[(len(took) - 1) // 2])
        return min(max(wanted, rules.shortest_window), rules.longest_window)

    async def judge(self, context: RoundContext, commits: tuple[bytes, ...], complete: bool) -> None:
        """Measure these contributions if `complete`, those that are here; else get what is not here yet."""
        contributions, reveals = self._store.contributions, context.log.reveals
        roots = {id: reveals[id].what.root for id in commits if id in reveals}
        for id, root in roots.items():
            if contributions.is_malformed(root):
                context.judged[id] = Score(id[:PREFIX], MALFORMED, 0)
        left = [id for id in commits if id not in context.judged]
        if complete:
            again = [id for id, score in context.judged.items() if score.found == JUDGED]  # all are measured together
            roots |= {id: reveals[id].what.root for id in again}
            found = {i: contributions[roots[i]] for i in (*again, *left) if i in roots and roots[i] in contributions}
            authors = {id: context.log.commits[id].author for id in found}
            try:
                context.judged.update(await context.evaluator.measure(found, authors, context.chain.validators))
                context.judged.update({id: Score(id[:PREFIX], MISSING, 0) for id in left if id not in found})
            except TrainerDied:
                await trio.sleep(AGAIN)
        elif left:
            self._sync.fetch_listed(context.log)
            await self._store.until(
                lambda: any(roots[id] in contributions or contributions.is_malformed(roots[id]) for id in left),
                deadline=trio.current_time() + AGAIN,
            )
        context.measuring = False
        self._store.notify()

    async def seal(self, context: RoundContext, scores: tuple[Score, ...]) -> None:
        """Say the hash of these scores, so that they cannot be others when the judges' are opened."""
        chain, signer = context.chain, self._signer
        nonce, salt = signer.derive("nonce", chain), signer.derive("seal", chain)[:SALT]
        sealed = Scores(chain.round, chain.tip, nonce, salt, context.evaluator.undo, scores)
        context.own.sealed = sealed
        if await signer.publish(Seal(chain.round, chain.tip, sealed.seal)) is None:
            context.own.opened = True

    async def open_scores(self, context: RoundContext) -> None:
        context.own.opened = True
        if context.own.sealed is not None:
            await self._signer.publish(context.own.sealed)

    # --- leader -----------------------------------------------------------------------------------------------------

    async def lead(self, context: RoundContext, action: WriteRoster) -> None:
        chain, signer = context.chain, self._signer
        context.own.led |= {action.attempt}
        anchor = chain.anchors.get(context.me)
        preimage = signer.beacon.preimage(anchor) if anchor is not None else b""
        signer.beacon.anchor = preimage or signer.beacon.anchor  # in this life on what nobody has read
        state = bytes.fromhex(self._store.hashes[chain.tip])
        attempt, quoted, derived = action.attempt, action.quoted, action.derived
        roster = compose(chain, quoted, derived, attempt=attempt, preimage=preimage, state=state)
        context.log.derived[roster.cuts, roster.scores] = derived
        await signer.publish(roster)

    async def fetch(self, context: RoundContext) -> None:
        """Get the contributions that a roster needs, and look again."""
        self._sync.fetch_listed(context.log)
        await trio.sleep(AGAIN)
        context.fetching = False
        self._store.notify()

    # --- following --------------------------------------------------------------------------------------------------

    async def _followed(self, context: RoundContext, nursery: trio.Nursery) -> Block | None:
        """The block to move to, once enough validators stand behind it. Validators sign the head that they follow."""
        store, chain = self._store, context.chain
        wanted = follow(context, store.tree, store.heads(), store.locked())
        since, context.lost_since = context.lost_since, None
        if wanted == chain.tip:
            return None
        try:
            block = await self._sync.have(wanted, chain.tip)
        except Lost as error:
            context.lost_since = trio.current_time() if since is None else since
            if since is None:
                logger.warning("round %d: a roster cannot be followed: %s", chain.round, error)
                nursery.start_soon(self._look_again)
            elif trio.current_time() >= since + LOST_FOR:
                store.out_of_sync = True  # replaying leads nowhere: it catches up from a state of others
            return None
        await self._vote(context, block, False)
        settled = self._timeouts.is_settled(context, wanted, nursery)
        if not settled and context.lockable == wanted and store.tree.has_most(wanted, store.heads()):
            await self._vote(context, block, True)
            settled = self._timeouts.is_settled(context, wanted, nursery)
        to = self._as_far_as_most(context, block) if settled else None
        if to is block and context.lockable:  # who moves goes nowhere else: who is behind may need its lock
            await self._vote(context, block, True)
        return to

    async def _vote(self, context: RoundContext, block: Block, locked: bool) -> None:
        """Sign what this node follows, if it is a validator and did not say as much."""
        store, me = self._store, context.me
        said = store.last_heads[me][1].what if me in store.last_heads else None
        moved = said is not None and (said.moved if said.roster == block.id else said.round >= block.chain.round)
        head = ForkChoiceVote(block.id, block.chain.round, bytes.fromhex(store.hashes[block.id]), moved, locked)
        if me in context.chain.validators and said not in (head, replace(head, locked=True)):
            await self._signer.publish(head)

    def _as_far_as_most(self, context: RoundContext, to: Block) -> Block:
        """The last block on the way there that is decided, or the first; later than the present one."""
        tree, heads, locked = self._store.tree, self._store.heads(), self._store.locked()
        way = tree.path(to.id)[len(tree.path(tree.fork_point(context.chain.tip, to.id))) :]
        for before, block in pairwise(way):
            if before.chain.round > context.chain.round and not tree.is_decided(block.id, heads, locked):
                return before
        return to

    async def _look_again(self) -> None:
        await trio.sleep(LOST_FOR)
        self._store.notify()

    async def _move(self, context: RoundContext, to: Block) -> RoundResult | None:
        """Stand on another block, with this node's work settled; what the round came to, unless it is no later one."""
        store = self._store
        state = await store.state_after(to)
        worked = self._local.offer.worked if self._local.offer is not None else NOTHING
        counted = await self._settle(context, to)
        loss = await self._local.move(state, to.chain.round - 1)
        await self._sync.move(to)
        store.counted = {id: root for id, root in store.counted.items() if id in store.tree}
        seconds, self.ended = store.arrived - self.ended, store.arrived
        self.phase = "waiting"
        if to.chain.round <= context.chain.round:
            return None
        accepted = accepted_in(to)
        ended = to.chain.round - 1, store.hashes[to.id], loss, worked, seconds, len(accepted)
        return RoundResult(
            *ended,
            missing=self._missing(context, to, counted),
            counted=tuple(sorted(accepted)),
            roster=to.id.hex(),
            verdicts=verdicts_in(store, to),
            stages=_lengths(context.stages, store.arrived),
            share=self._share(context, to),
        )

    # --- what becomes of this node's work ---------------------------------------------------------------------------

    async def _settle(self, context: RoundContext, to: Block) -> bool:
        """Settle the work of a round that ends with a move to this block of the tree; whether the round counted it."""
        store, tree, local = self._store, self._store.tree, self._local
        fork, path = tree.fork_point(context.chain.tip, to.id), tree.path(to.id)
        first = path[len(tree.path(fork))] if fork == context.chain.tip else None
        mine = context.own.commit
        entries = first.roster.entries if first is not None and first.roster is not None else ()
        entry = next((entry for entry in entries if mine is not None and entry.commit == mine.id), None)
        root = local.offered_for(context.chain.tip)
        counted = entry is not None and entry.verdict == ACCEPTED and bool(root)
        if counted and first is not None:
            store.counted[first.id] = root
        if entry is None:
            local.take_back()
        else:
            await local.settle(accepted=counted)
            if counted and entry.clip < ONE:
                await local.return_encoded(store.contributions[root].raw, 1 - entry.clip / ONE)
        kept = {block.id for block in path}
        reverted = {block.parent for block in path if block.roster is not None and block.roster.revert}
        for id in [id for id in store.counted if id not in kept or id in reverted]:
            contribution = store.contributions.get(store.counted.pop(id))
            if contribution is not None:
                await local.return_encoded(contribution.raw)
        return counted

    def _missing(self, context: RoundContext, block: Block, counted: bool) -> tuple[PeerId, ...]:
        """Whose work counted before, and does not in the round that `block` ended."""
        before = {one.author for one in context.chain.history[-1] if one.units} if context.chain.history else set()
        missing = (before - accepted_in(block)) if block.roster is not None else set()
        if not counted and participates(context.chain, context.me):
            missing.add(context.me)
        return tuple(sorted(missing))

    def _share(self, context: RoundContext, block: Block) -> float:
        """Of the roster's weights, what this node's contribution has."""
        mine, roster = context.own.commit, block.roster
        if mine is None or roster is None or not roster.total:
            return 0.0
        return sum(entry.weight for entry in roster.accepted if entry.commit == mine.id) / roster.total


def _lengths(began: Mapping[str, float], ended: float) -> dict[str, float]:
    """Seconds from each stage to the next one, the last of which ends with the round."""
    order = [*sorted(began.items(), key=lambda stage: stage[1]), ("", ended)]
    return {name: max(0.0, end - at) for (name, at), (_, end) in pairwise(order)}


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
            said: Said[S] = self._sync.insert_own(record) or read(record)
        except AlreadyWritten:
            logger.info("%s was said in an earlier life, with another value; nothing else is said", statement.key)
            return None
        except (StateError, InvalidRecord) as error:  # the latter after MAX_ROUND
            logger.warning("%s could not be said: %s", statement.key, error)
            return None
        self._state.hurry()
        return said

    def derive(self, purpose: str, chain: ChainState) -> bytes:
        """32 secret bytes for one purpose in one round."""
        text = f"swarmnode/open/{purpose}/1\0{chain.round:08d}".encode()
        return hashlib.sha256(self._secret + text + chain.tip).digest()


def accepted_in(block: Block) -> set[PeerId]:
    if block.roster is None or not block.roster.accepted:
        return set()
    return {one.author for one in block.chain.history[-1] if one.units}


def verdicts_in(store: ChainStore, block: Block) -> dict[PeerId, str]:
    """What a roster says of each author's contribution, in words; nothing where the round's log is not here."""
    log = store.logs.get(block.parent)
    if log is None or block.roster is None:
        return {}
    found = {said.author: NOT_LISTED for said in log.commits.values()}
    for entry in block.roster.entries:
        if entry.commit in log.commits:
            found[log.commits[entry.commit].author] = VERDICTS[entry.verdict]
    return found
