"""The exchange method `open`: anybody may take part, nobody is believed, and a chain of rosters says what counts.

    round.py      one round: train, commit, cut, reveal, judge, lead, follow, settle; how this node signs what it says
    timeouts.py   how long each part of a round is waited for
    local.py      local training, error feedback, and the record of that work, where the run has audits
    judge.py      what a judge measures
    recheck.py    whether others measured what they say
    store.py      what is held: contributions, the logs of rounds, the tree of valid rosters, shared states
    sync.py       hearing what is said, and getting what it rests on
    join.py       joining: from where others stand, and how to get there; members on another history
    checks/       audits of others' work; whether it comes of the data that they were to work on

The rules are pure and stand in `protocols/chain`; what it promises, and what not, in docs/architecture.md.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import trio

from swarmnode.crdt.envelope import Domain
from swarmnode.protocols.chain.forks import Block, settled
from swarmnode.protocols.chain.state import SMALL
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.method import Begin, LostPlace, Method, Overtaken, Place, RoundResult, Saved
from swarmnode.protocols.methods.open.checks.audits import Audits
from swarmnode.protocols.methods.open.checks.check import Looks
from swarmnode.protocols.methods.open.checks.unique import UniqueWork
from swarmnode.protocols.methods.open.join import Joining
from swarmnode.protocols.methods.open.local import LocalTrainer, TracedTrainer
from swarmnode.protocols.methods.open.recheck import Rechecks
from swarmnode.protocols.methods.open.round import OpenRounds, Signer
from swarmnode.protocols.methods.open.store import AWAY, ChainStore, Contributions
from swarmnode.protocols.methods.open.sync import ChainSync
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.reputation.account import RoundWork, proved
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.state.backend import StateError

logger = logging.getLogger(__name__)

SECRET = Domain("open/secret", 1, max_size=64)  # what is signed to have a secret; the signature is never told
SETTLED = 4  # rounds on a roster until join strings name it: more than a fork lasts where nodes are connected


class Open(Method):
    """Its parts are public, for tests that look at what it alone promises.

    `rounds_class` and `contributions_class` say what two of them are made of: liars have others (testing/adversary).
    """

    name = "open"
    judges = True
    rounds_class: ClassVar[type[OpenRounds]] = OpenRounds
    contributions_class: ClassVar[type[Contributions]] = Contributions

    def __init__(self, parts: Context) -> None:
        self._parts, self._me, self._state = parts, parts.me, parts.sync
        self.contributions = self.contributions_class(parts)
        self.store = ChainStore(parts, self.contributions)
        self.sync = ChainSync(parts, self.store)
        self.local: LocalTrainer = TracedTrainer(parts) if parts.spec.audited else LocalTrainer(parts)
        self.audits = self.unique = None
        if isinstance(self.local, TracedTrainer):
            self.audits = Audits(parts, self.store, self.local)
        if parts.ledger is not None:  # somebody keeps what comes of it
            self.unique = UniqueWork(parts, self.store, self.local, parts.ledger)
        secret = hashlib.sha256(parts.network.sign(SECRET.message(parts.run_id.encode()))).digest()
        self.signer = Signer(parts.sync, self.sync, secret)
        self.rechecks = Rechecks(parts, self.store, self.local, self.signer)
        self._checks: list[Looks] = [looks for looks in (self.audits, self.unique, self.rechecks) if looks is not None]
        self.rounds = self.rounds_class(parts, self.sync, self.local, self.signer)
        self.places = Joining(parts, self.sync, self.local)
        self._telling = trio.Lock()  # the others whether to wait: who tells them twice is done when they heard it

    def measure(self, metrics: Metrics) -> None:
        self.store.measure(metrics)
        for check in self._checks:
            check.measure(metrics)

    @property
    def phase(self) -> str:
        return self.places.phase or self.rounds.phase

    @property
    def place(self) -> Place | None:
        store = self.store
        if not store.stands:
            return None
        chain = store.block.chain
        lately = {worked.author for roster in chain.history[-2:] for worked in roster}
        members = tuple(sorted(lately.union(chain.validators)))
        elapsed = trio.current_time() - store.arrived
        roster = settled(store.tree.path(chain.tip), SETTLED)
        named = str(roster) if roster is not None else ""
        return Place(chain.round, store.hashes[chain.tip], members, elapsed=elapsed, roster=named)

    async def find_place(self, begin: Begin) -> None:
        if begin.saved is not None:
            self.local.feedback.restore(begin.saved.residual)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sync.run)
            if not await self.places.find(begin):
                self._keep_silent(begin)
            nursery.cancel_scope.cancel()
        self.local.stand(self.store.tip)

    def _keep_silent(self, begin: Begin) -> None:
        """Say nothing in the round of a checkpoint from which this node goes on alone, where the run has others.

        The checkpoint may be a backup's: then the others went on from there with what this identity said, and nobody
        tells it. That round ends empty here, so later ones are of another history, and nothing in them contradicts it.
        """
        saved = begin.saved
        if saved is not None and saved.method == self.name and saved.extra and set(saved.members) - {self._parts.me}:
            self.signer.silent_after = self.store.tip

    async def run_round(self) -> RoundResult:
        if not self.store.stands:
            raise LostPlace("this node stands nowhere yet")
        await self._tell_away(False)
        result = await self.rounds.run_round()
        self._arrive(self.store.block)
        if result is None:
            raise Overtaken("others follow another history, and so does this node now")
        return result

    def _arrive(self, block: Block) -> None:
        """Look at the work that the roster lists to which this node came."""
        self.local.stand(block.id, after=block.parent)
        if self._parts.ledger is not None:
            update_ledger(self._parts.ledger, self.store, block)
        for check in self._checks:
            if check is not self.rechecks or len(block.chain.validators) > SMALL:  # of so few nobody is removed
                check.consider(block)

    async def regain_place(self) -> None:
        await self.places.regain()
        self.local.stand(self.store.tip)

    async def watch(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sync.run)
            nursery.start_soon(self.places.splits.run)
            for check in self._checks:
                nursery.start_soon(check.run)

    async def say_away(self) -> None:
        if self.store.stands:
            await self._tell_away(True)

    async def leave(self) -> None:
        await self.say_away()
        if self.store.stands:
            await self.local.leave()

    def lent(self) -> AbstractAsyncContextManager[Trainer]:
        return self.local.shared()

    def saved(self) -> Saved:
        if self.local.base is None or self.place is None:
            raise RuntimeError("this node stands nowhere yet")
        chain = self.store.block.chain
        residual, kept = self.local.feedback.export(), self.places.kept(chain)
        return Saved(chain.round, self.local.base, residual, self.place.members, self.name, kept)

    async def _tell_away(self, away: bool) -> None:
        """Tell the others whether to wait for this node, where they believe otherwise, as by an earlier life's word."""
        if away == self.store.is_away(self._me) and not self._telling.locked():  # as in most rounds
            return
        async with self._telling:
            if away == self.store.is_away(self._me):
                return
            try:
                self.store.insert(await self._state.write(AWAY, True if away else None))
                with trio.move_on_after(1.0):
                    await self._state.flush()
            except StateError as error:
                logger.warning("the others could not be told whether to wait for this node: %s", error)


def update_ledger(ledger: Ledger, store: ChainStore, to: Block) -> None:
    """Stand on a block of the tree, by way of all rosters since the last on which the ledger stood.

    Where that is none, as after catching up, it begins at the oldest block that is kept. A roster whose quotes are no
    longer here proves nothing, and the way goes on behind it.
    """
    way = store.tree.ancestry(to.id)
    known = next((index for index in reversed(range(len(way))) if ledger.stands(way[index])), None)
    if known is None:
        ledger.begin(store.tree[way[0]].chain)
        known = 0
    for parent, id in zip(way[known:], way[known + 1 :], strict=False):
        block = store.tree[id]
        ledger.follow(id, parent, _proved(store, block), round=block.chain.round)
    if known == len(way) - 1:
        ledger.go_to(to.id)
    for author, (_, said) in store.last_heads.items():  # the state hash that each signed, against this node's replay
        own = store.hashes.get(said.what.roster)
        if own is not None and author in store.block.chain.validators:
            same = said.what.state == bytes.fromhex(own)
            ledger.observe_once(said.id, author, Saw.SYNC, good=int(same), bad=int(not same), evidence=said.what.roster)


def _proved(store: ChainStore, block: Block) -> RoundWork | None:
    log = store.logs.get(block.parent)
    if block.roster is None or log is None:
        return None
    try:
        quoted = log.quoted(block.roster, {})
        return proved(log.chain, block.id, block.roster, quoted)
    except KeyError as error:
        logger.debug("a roster of round %d cannot be read again: %s", block.roster.round, error)
        return None
