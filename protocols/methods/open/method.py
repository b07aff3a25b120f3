"""The exchange method `open`: anybody may take part, nobody is believed, and a chain of rosters says what counts.

    open_round.py          one round: train, do what is due, follow, move
    open_duties.py         commit, cut, reveal, judge, lead
    open_waits.py          how long each of them is waited for
    open_turn.py           this node's part in one round, and how it says things
    open_scoring.py        what a judge measures
    open_work.py           local training, error feedback
    open_traces.py         the record of that work, where the run has audits
    open_audits.py         audits of others' work, and answers to theirs
    open_unique.py         whether others' work comes of the data that they were to work on
    open_settling.py       what becomes of work that counted, and of work that did not
    open_place.py          joining: from where others stand, and how to get there
    open_lineage.py        asking members whether their history contains the roster that a join string names
    open_splits.py         telling the owner of members whose history parted from this node's for good
    open_keeper.py         listening to what is said, and beginning what follows from it
    open_held.py           what is held: books, rosters in the tree of forks, heads; the bell that rings at news
    open_book.py           what was said in one round
    open_states.py         the shared states along the chain
    open_contributions.py  encoded pseudo-gradients, held and served
    open_examine.py        how a roster comes into the tree
    open_sources.py        asking peers for what is missing, and answering them
    open_wire.py           their questions and answers
    open_witness.py        what rosters prove of everybody's work, for this node's ledger

The rules are pure and stand in `protocols/chain`. What it promises: the same roster gives the same bits; local training
never stops; no local work is lost; while a majority of electors is honest and connected, all connected honest nodes
agree within a few rounds. What it does not: finality, one chain during a partition, protection from who has most of the
audited compute, and below four electors anything against a liar. While no elector is there, rounds end empty until
those whose work counted have succeeded them.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import AbstractAsyncContextManager
from functools import partial

import trio

from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.lineage import settled
from swarmnode.protocols.chain.state import rules_of
from swarmnode.protocols.methods.context import Parts
from swarmnode.protocols.methods.method import (
    Begin,
    LostPlace,
    Method,
    OtherHistory,
    Overtaken,
    Place,
    RoundResult,
    Saved,
)
from swarmnode.protocols.methods.open.checks.audits import Audits
from swarmnode.protocols.methods.open.checks.traces import TracedWork
from swarmnode.protocols.methods.open.checks.unique import UniqueWork
from swarmnode.protocols.methods.open.checks.verification import Audit, Desk
from swarmnode.protocols.methods.open.checks.witness import witness
from swarmnode.protocols.methods.open.contributions import Contributions
from swarmnode.protocols.methods.open.duties import Duties
from swarmnode.protocols.methods.open.join import OpenPlace
from swarmnode.protocols.methods.open.judge import full_standing
from swarmnode.protocols.methods.open.local import Work
from swarmnode.protocols.methods.open.round import OpenRounds
from swarmnode.protocols.methods.open.splits import Splits
from swarmnode.protocols.methods.open.states import States
from swarmnode.protocols.methods.open.store import AWAY, Held
from swarmnode.protocols.methods.open.sync import Keeper
from swarmnode.protocols.methods.open.timeouts import Waits
from swarmnode.protocols.methods.open.turn import RoundSettings, Voice
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.state.backend import StateError
from swarmnode.protocols.transfer.catchup import CatchUp
from swarmnode.training.codecs import codec
from swarmnode.training.verify.recorder import stretch_steps

logger = logging.getLogger(__name__)

FIRST_WINDOW = 10.0  # times the deadlines' ceiling: the first round's training, before anything was measured
STATES_BUDGET = 1 << 29  # bytes of shared states of the last rounds
CONTRIBUTIONS_BUDGET = 1 << 28  # bytes of contributions
SETTLED = 4  # rounds on a roster until join strings name it: more than a fork lasts where nodes are connected


def build(parts: Parts) -> Open:
    """The method of one node, from the run's `[trust]`, `[exchange]`, `[inner]` and `[outer]`."""
    return Open(parts)


class Open(Method):
    """Its parts are public, for tests that look at what it alone promises."""

    name = "open"

    def __init__(self, parts: Parts) -> None:
        """Raises ValueError where there is no replicated state: what is said in rounds travels in it."""
        if parts.state is None or parts.sync is None:
            raise ValueError("the open exchange needs the replicated state")
        spec, exchange, layout = parts.spec, parts.spec.exchange, parts.trainer.layout
        self._me, self._sync, self._ledger = parts.me, parts.sync, parts.ledger
        rules = rules_of(spec.trust)
        self.catch_up = CatchUp(
            run_id=parts.run_id,
            rpc=parts.rpc,
            bulk=parts.bulk,
            liveness=parts.liveness,
            runner=parts.runner,
            layout=layout,
        )
        self.contributions = Contributions(
            run_id=parts.run_id,
            bulk=parts.bulk,
            runner=parts.runner,
            codec=exchange.codec,
            elements=layout.parameters,
            size=codec(exchange.codec).encoded_size(layout.parameters),
            budget=CONTRIBUTIONS_BUDGET,
        )
        self.held = Held(
            rules,
            self.contributions,
            lambda contribution: States(
                layout=layout,
                runner=parts.runner,
                lr=spec.outer.lr,
                momentum=spec.outer.momentum,
                codec=exchange.codec,
                budget=STATES_BUDGET,
                contribution=contribution,
            ),
            admits=parts.admits,
        )
        self.keeper = Keeper(
            run_id=parts.run_id,
            held=self.held,
            network=parts.network,
            rpc=parts.rpc,
            state=parts.state,
            rng=parts.rng,
        )
        self.audits: Audits | None = None
        self.work = self._make_work(parts)
        self.unique = self._make_tests(parts)
        settings = RoundSettings(
            spec.outer.lr,
            exchange.codec,
            exchange.deadline_floor,
            exchange.deadline_ceiling,
            samples=spec.inner.steps * spec.inner.batch,
        )
        self.voice = Voice(parts.sync, self.keeper, _secret(parts))
        self.duties = Duties(
            me=parts.me,
            run_id=parts.run_id,
            keeper=self.keeper,
            work=self.work,
            voice=self.voice,
            runner=parts.runner,
        )
        self.rounds = OpenRounds(
            me=parts.me,
            settings=settings,
            keeper=self.keeper,
            work=self.work,
            voice=self.voice,
            duties=self.duties,
            waits=Waits(
                me=parts.me,
                settings=settings,
                held=self.held,
                liveness=parts.liveness,
                newcomers=lambda: self.places.newcomers(),
            ),
            runner=parts.runner,
            members=lambda: len(parts.membership.members()) + 1,
            moved=self._moved,
            standing=parts.ledger.roster_standing if parts.ledger is not None else full_standing,
        )
        self.splits = Splits(
            me=parts.me,
            run_id=parts.run_id,
            held=self.held,
            sources=self.keeper.sources,
            rpc=parts.rpc,
            members=parts.membership.connected,
            observer=parts.observer,
            rng=parts.rng,
        )
        self.places = OpenPlace(
            me=parts.me,
            run_id=parts.run_id,
            electors=spec.trust.electors,
            first_window=round(1000 * min(FIRST_WINDOW * exchange.deadline_ceiling, rules.longest_window / 1000)),
            network=parts.network,
            rpc=parts.rpc,
            runner=parts.runner,
            membership=parts.membership,
            trainer=parts.trainer,
            keeper=self.keeper,
            splits=self.splits,
            work=self.work,
            catch_up=self.catch_up,
            observer=parts.observer,
        )
        self._paused = False
        self._said_away = False
        self._stood = b""  # the block before, as far as `_moved` was told

    def _make_work(self, parts: Parts) -> Work:
        """Local training; with a record of it, and audits of others', where the run has them and the trainer can."""
        spec, trainer, codec_name = parts.spec, parts.trainer, parts.spec.exchange.codec
        carries = spec.outer.momentum > 0
        longest = stretch_steps(spec.inner.steps, trainer.layout.parameters) if spec.trust.audit_share > 0 else 0
        if not longest or not trainer.capabilities.replays:
            if spec.trust.audit_share > 0:
                logger.warning("the model is too large for audits, or this trainer cannot take part in them")
            return Work(trainer, parts.runner, codec_name=codec_name, steps=spec.inner.steps, carries=carries)
        work = TracedWork(
            trainer,
            parts.runner,
            codec_name=codec_name,
            steps=spec.inner.steps,
            texts=parts.texts.given,
            carries=carries,
        )
        self.audits = Audits(
            me=parts.me,
            run_id=parts.run_id,
            share=spec.trust.audit_share,
            longest=longest,
            codec_name=codec_name,
            held=self.held,
            work=work,
            trainer=trainer,
            texts=parts.texts,
            runner=parts.runner,
            desk=partial(Desk, run_id=parts.run_id, rpc=parts.rpc, bulk=parts.bulk, runner=parts.runner),
            told=parts.ledger.audited if parts.ledger is not None else _untold,
        )
        return work

    def _make_tests(self, parts: Parts) -> UniqueWork | None:
        """Whether others work on their own data; nothing, where nobody keeps what comes of it or the trainer cannot."""
        spec, trainer, ledger = parts.spec, parts.trainer, parts.ledger
        if ledger is None or not trainer.capabilities.draws:
            return None
        return UniqueWork(
            me=parts.me,
            steps=spec.inner.steps,
            batch=spec.inner.batch,
            lr=spec.outer.lr,
            codec_name=spec.exchange.codec,
            held=self.held,
            work=self.work,
            trainer=trainer,
            texts=parts.texts,
            runner=parts.runner,
            told=ledger.drew,
        )

    def measure(self, metrics: Metrics) -> None:
        self.held.measure(metrics)
        if self.unique is not None:
            self.unique.measure(metrics)
        if self.audits is not None:
            self.audits.measure(metrics)

    @property
    def phase(self) -> str:
        return self.places.phase or self.rounds.phase

    @property
    def place(self) -> Place | None:
        if not self.held.stands:
            return None
        chain = self.held.block.chain
        lately = {worked.author for roster in chain.history[-2:] for worked in roster}
        members = tuple(sorted(lately.union(chain.electors)))
        elapsed = trio.current_time() - self.rounds.began
        roster = settled(self.held.tree.path(chain.tip), SETTLED)
        told = str(roster) if roster is not None else ""
        return Place(chain.round, self.held.states.hashes[chain.tip], members, elapsed=elapsed, roster=told)

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused

    async def find_place(self, begin: Begin) -> None:
        if begin.saved is not None:
            self.work.feedback.restore(begin.saved.residual)
        refused: OtherHistory | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            try:
                if not await self.places.find(begin):
                    self._keep_silent(begin)
            except OtherHistory as error:
                refused = error
            nursery.cancel_scope.cancel()
        if refused is not None:
            raise refused
        self.rounds.began = self.places.arrived
        self._note_place()

    def _keep_silent(self, begin: Begin) -> None:
        """Say nothing in the round of a checkpoint from which this node goes on alone, where the run has others.

        The checkpoint may be a backup's: then the others went on from there with what this identity said, and nobody
        tells it. That round ends empty here, so later ones are of another history, and nothing in them contradicts it.
        """
        saved = begin.saved
        if saved is not None and saved.method == self.name and saved.extra and set(saved.members) - {self._me}:
            self.voice.silent_after = self.held.tip

    def _note_place(self) -> None:
        """Tell the record of this node's work where it stands."""
        if isinstance(self.work, TracedWork) and self.held.stands:
            self.work.stand(self.held.tip, follows=False)
            self._stood = self.held.tip

    async def run_round(self) -> RoundResult:
        if not self.held.stands:
            raise LostPlace("this node stands nowhere yet")
        await self._say_away(False)
        result = await self.rounds.run_round()
        if result is None:
            raise Overtaken("others follow another history, and so does this node now")
        return result

    async def regain_place(self) -> None:
        await self.places.regain()
        self._note_place()

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            nursery.start_soon(self.splits.run)
            for looking in (self.audits, self.unique):
                if looking is not None:
                    nursery.start_soon(looking.run)

    async def leave(self) -> None:
        if self.held.stands:
            await self._say_away(True)
            await self.work.leave()

    def lent(self) -> AbstractAsyncContextManager[Trainer]:
        return self.work.shared()

    def saved(self) -> Saved:
        if self.work.base is None or self.place is None:
            raise RuntimeError("this node stands nowhere yet")
        chain = self.held.block.chain
        return Saved(
            chain.round, self.work.base, self.work.feedback.export(), self.place.members, self.name, chain.encode()
        )

    def _moved(self, block: Block) -> None:
        """Serve the state of a block that this node came to."""
        states = self.held.states
        self.catch_up.serve_state(block.chain.round, states.hashes[block.id], states[block.id])
        self.places.arrived = trio.current_time()
        if isinstance(self.work, TracedWork):
            self.work.stand(block.id, follows=block.parent == self._stood)
        self._stood = block.id
        if self._ledger is not None:
            witness(self._ledger, self.held, block)
        for looking in (self.audits, self.unique):
            if looking is not None:
                looking.consider(block)

    async def _say_away(self, away: bool) -> None:
        """Tell the others whether to wait for this node."""
        if away == self._said_away:
            return
        try:
            await self._sync.write(AWAY, True if away else None)
            self._said_away = away
            with trio.move_on_after(1.0):
                await self._sync.flush()
        except StateError as error:
            logger.warning("the others could not be told whether to wait for this node: %s", error)


def _untold(audit: Audit, broken: bool) -> None:
    """Nobody keeps what audits find where there is no ledger; they are logged all the same."""


def _secret(parts: Parts) -> bytes:
    """32 bytes that only this identity can make, the same in each of its lives in this run."""
    return hashlib.sha256(parts.sign(b"swarmnode/open/secret/1\0" + parts.run_id.encode())).digest()
