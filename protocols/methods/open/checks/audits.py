"""Audits in the open round: whom a node audits after a roster, what it looks at, and what it concludes.

    after each roster that lists work         draw an author (`ChainStore.checks_seed`)
    where the budget allows it                have the record of its work; draw a stretch
    residual                                  the contribution must follow from the ends of the legs, exactly
    replay                                    the stretch must end where the author says, within the tolerance
    verdict                                   to the ledger, with the evidence
    where it is a lie, or nothing is shown    accuse: all others repeat it, from what the auditor or the author shows

What audits cost, and what follows from a verdict or an accusation: docs/reputation.md, "Audits".

On the wire an auditor asks an author for the record of its work and for states that the record names:

    audit.show    ShowQuery -> Showing      which of these things the author will give; from then on they can be fetched
    audit.accuse  Accusation -> Showing     what the draw had me look at is a lie: all of it is here; or was not shown
    bulk          ("audit", run, auditor, roster, id)    each of them, by who was told, until it asks for nothing more,
                                            for SHOWN_FOR seconds, or until newer ones take their room (`shown_room`)

The author answers whom the round's draw names as its auditor, and others of that round who heard that nothing is shown
to that one, a few times for each. Nobody else costs it anything but a call. What is fetched is checked by its id, so an
author can show what it signed or nothing. An author that did not hear of the roster yet waits for it before it answers,
so that who is slow is not taken for a liar. It keeps states until its next steps need their room, so an auditor first
asks for these, and what is gone where it comes too late to ask counts for nobody, unless the author said that it would
send it. An author that answers nothing, shows nothing or is too slow has not lied, it has *not shown*; what it shows
and what contradicts it is a lie; what the auditor lacks or gets wrong says nothing of the author.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

import numpy as np
import trio

from swarmnode.protocols.calls.rpc import CallError, Refuse
from swarmnode.protocols.chain.forks import Block
from swarmnode.protocols.chain.statements import ACCEPTED, ONE, Entry, Reveal
from swarmnode.protocols.limits import Recent
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.open.checks.check import WorkCheck
from swarmnode.protocols.methods.open.checks.texts import TrainingText
from swarmnode.protocols.methods.open.local import TracedTrainer
from swarmnode.protocols.methods.open.store import ChainStore
from swarmnode.protocols.methods.trainer import Batches, Slice, TrainerDied, Vector
from swarmnode.protocols.metrics import COUNTER, GAUGE, Metric, Metrics
from swarmnode.protocols.network import NetworkError, PeerId
from swarmnode.protocols.transfer.bulk import Key, Stalled
from swarmnode.protocols.transfer.shard_wire import ShardError
from swarmnode.protocols.wire import Message, within
from swarmnode.training.codecs import codec_in
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.verify.recorder import shown_room, stretch_steps
from swarmnode.training.verify.replay import (
    Audit,
    Distance,
    Offered,
    Verdict,
    Wrong,
    by_whom,
    calibrated,
    check_follows,
    check_form,
    check_left_over,
    explains,
    has_moments,
    walk,
    which,
    whom,
)
from swarmnode.training.verify.trace import MAX_TRACE, BadTrace, Origin, Stretch, Trace, root_of, vector_id
from swarmnode.training.verify.vectors import Vectors

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHOW = "audit.show"
ACCUSE = "audit.accuse"
TIMEOUT = 20.0  # seconds for an answer: the author's trainer gives what it keeps between two of its steps
BEHIND = 15.0  # of them, in which an author hears of the roster that an auditor followed before it did
FETCH_WITHIN = 600.0  # seconds for all that an audit fetches, and …
SLOWEST = 1e6  # … bytes a second at the least, of a dozen vectors
STALL = 60.0  # seconds without a byte: the author hashes what it shows first
SHOWN_FOR = 300.0  # seconds in which what was asked for can be fetched, beyond those that an audit may take
TO_ACCUSE = 5.0  # seconds to take note of an accusation
WAITING = 8  # accusations that are not looked at yet, and replays in advance of the share of these
MAX_ASKED = 32  # ids in one question, and of one auditor in one round: an audit takes a dozen
AT_ONCE = 64  # auditors whom something is shown: one a round, and all where that one says that nothing is
DONE_WITHIN = 5.0  # seconds for an author to hear that its auditor needs nothing more
PATIENCE = 2  # audits in a row in which an author may show nothing
PROMPT = 1  # rosters since the one that lists the work, up to which an author must send what it was asked for before
CALIBRATIONS = 2  # of the own replays that are remembered
REMEMBERED = 1024  # authors who did not show something, and accusations

AUDITS = Metric("swarmnode_audits_total", COUNTER, "contributions whose work this node looked at", "verdict")
SECONDS = Metric("swarmnode_audit_seconds_total", COUNTER, "seconds of replays, of others' steps and of own to compare")
SHOWN = Metric("swarmnode_audit_shown_bytes_total", COUNTER, "bytes of this node's own work that auditors could fetch")
HELD = Metric("swarmnode_audit_held_bytes", GAUGE, "bytes of this node's own work that auditors can fetch now")


class NotShown(Exception):
    """The author does not show what it should. The message says what."""


class Withheld(NotShown):
    """It does not give what its record names."""


@dataclass(frozen=True)
class ShowQuery(Message):
    run_id: str
    roster: bytes  # that lists the work, and whose seed drew the auditor
    trace: bytes
    ids: Annotated[tuple[bytes, ...], within(0, MAX_ASKED)]  # of vectors, and of records; none: all is here


@dataclass(frozen=True)
class Showing:
    """For each id, whether it can be fetched."""

    found: tuple[bool, ...]


@dataclass(frozen=True)
class Accusation:
    """What the draw of this roster had the sender look at is a lie, or not shown. Answer: whether it is looked at."""

    run_id: str
    roster: bytes
    shown: bool  # by the sender, as it is a lie


@dataclass
class _Shown:
    """What one auditor may fetch."""

    until: float  # trio time
    drawn: bool = True  # and not one of those who ask because the one drawn was shown nothing
    asked: int = 0  # ids, so far
    held: dict[bytes, int] = field(default_factory=dict)  # id -> bytes


class Unknown(Exception):
    """This node cannot tell, for a reason of its own. The message says which."""


@dataclass(frozen=True)
class _Work:
    """What is audited: one accepted contribution."""

    block: Block  # its roster
    author: PeerId
    commit: bytes
    reveal: Reveal
    auditor: PeerId  # whom the draw names
    source: PeerId  # who shows the work: the author, or the auditor who says that it lied
    seed: bytes  # of the draw, whose log may be gone before this is looked at


def _kept(found: T | None) -> T:
    if found is None:
        raise Unknown("a shared state or a contribution is kept no more")
    return found


class Audits(WorkCheck):
    """One node's audits of others, and its answers to theirs."""

    def __init__(self, parts: Context, store: ChainStore, local: TracedTrainer) -> None:
        super().__init__(parts, store, local, parts.spec.trust.audit_share)
        self._local: TracedTrainer = local
        self.budget.saved = math.inf  # as much as may be saved up
        self._longest = stretch_steps(parts.spec.inner.steps, parts.trainer.layout.parameters)  # steps of one stretch
        self._repeated = 0.0  # seconds of replays that others asked for
        self._own: deque[Distance] = deque(maxlen=CALIBRATIONS)
        self._silent = Recent[PeerId, int](REMEMBERED)  # audits in a row in which an author showed nothing
        self.counts: Counter[Verdict] = Counter()
        self._shown: OrderedDict[tuple[PeerId, bytes], _Shown] = OrderedDict()  # by auditor and roster
        self._shown_bytes = 0
        self._vectors_here, self._have = Vectors(parts.trainer.states[2]), dict[bytes, Vector]()  # of the audit in hand
        self._records: dict[bytes, bytes] = {}  # likewise
        self._promised = set[bytes]()  # likewise: ids of vectors that the author offers
        self._until = 0.0  # likewise: trio time until which something may be fetched
        self._one = trio.Lock()  # audit at a time
        self._bare = Recent[PeerId, int](REMEMBERED)  # contributions in a row that are bound to no record
        self._accusations, self._accused = trio.open_memory_channel[_Work](WAITING)
        self._taken: deque[tuple[PeerId, bytes]] = deque(maxlen=REMEMBERED)  # accuser, roster
        self._misled = Recent[tuple[PeerId, PeerId], float](REMEMBERED)  # seconds for nothing, by accuser and source
        self._others = Recent[tuple[PeerId, PeerId | None], int](REMEMBERED)  # rounds: asked by whom, as by_whom had to
        parts.rpc.serve(SHOW, ShowQuery, self._on_show)
        parts.rpc.serve(ACCUSE, Accusation, self._on_accuse)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            async for work in self._accused:
                known = self._parts.ledger is None or self._parts.ledger.owed(work.author)
                may_cost = self._repeated <= self.budget.earned + WAITING * self._cost
                if may_cost and not known and self._heeds(work):
                    await self._look_at(work)

    def measure(self, metrics: Metrics) -> None:
        metrics.show(AUDITS, lambda: {verdict.name.lower(): self.counts[verdict] for verdict in Verdict})
        metrics.show(SECONDS, lambda: self.budget.spent + self._repeated)
        metrics.show(SHOWN, lambda: self._shown_bytes)
        metrics.show(HELD, lambda: self.held)

    # --- answering ----------------------------------------------------------------------------------------------------

    def _may_ask(self, peer: PeerId, query: ShowQuery) -> bool:
        if query.roster not in self._store.tree or not self._local.keeps(query.trace):
            return False
        block = self._store.tree[query.roster]
        measured, whose = self._store.measured(block), (peer, query.roster)
        drawn = by_whom(self._store.checks_seed(block), self._parts.me, measured)
        if peer == drawn or peer not in measured or whose in self._shown:
            return peer in measured
        self._others[peer, drawn] = rounds = self._others.get((peer, drawn), 0) + 1  # the one drawn was shown nothing
        if rounds <= PATIENCE + 1:
            self._shown[whose] = _Shown(0.0, drawn=False)
        return rounds <= PATIENCE + 1

    async def _on_show(self, peer: PeerId, query: ShowQuery) -> Showing:
        store = self._store
        asked = query.run_id == self._parts.run_id and store.stands and self._local.keeps(query.trace)
        chain = store.block.chain if asked else None  # not everybody is waited for: a call takes room from others
        if chain and peer in {*chain.validators, *(each.author for roster in chain.history for each in roster)}:
            await store.until(lambda: query.roster in store.tree, deadline=trio.current_time() + BEHIND)
        now, whose = trio.current_time(), (peer, query.roster)
        if not asked or not self._may_ask(peer, query):
            raise Refuse("not-drawn", "no draw names you as the auditor of this work")
        shown = self._shown.setdefault(whose, _Shown(0.0))
        self._shown.move_to_end(whose)
        shown.until = now + SHOWN_FOR + self._within
        shown.asked += len(query.ids)
        if not query.ids:
            self._let_go(whose, shown)
        self._tidy(now)
        if shown.asked > MAX_ASKED:
            raise Refuse("enough", f"{MAX_ASKED} things of this round were shown to you")
        found = []
        for id in query.ids:
            content = await self._local.show(id)
            if content is not None and self._shown.get(whose) is shown:
                self._parts.bulk.offer((*self._prefix(*whose), id.hex()), content, to=frozenset({peer}))
                shown.held[id] = content.nbytes
                self._shown_bytes += content.nbytes
                self._tidy(now)
            if self._shown.get(whose) is not shown:  # let go of by now: nothing would withdraw the next
                raise Refuse("enough", "others who look at this node's work took its place")
            found.append(content is not None)
        return Showing(tuple(found))

    def _tidy(self, now: float) -> None:
        """Let go of what was shown for long enough; where they are many, of the oldest that has all, but never of the
        last; where they take too much of the disk, of the oldest who was not drawn, as anybody may be such a one."""
        room = shown_room(self._local.feedback.size)
        for whose in [whose for whose, shown in self._shown.items() if shown.until <= now]:
            self._let_go(whose, self._shown.pop(whose))
        while True:
            some = [whose for whose, shown in self._shown.items() if shown.held]
            if len(self._shown) > AT_ONCE:
                some = list(self._shown)[:-1]
            elif len(some) < 2 or self.held <= room:
                break
            whose = min(some, key=lambda each: (bool(self._shown[each].held), self._shown[each].drawn))
            self._let_go(whose, self._shown.pop(whose))

    @property
    def held(self) -> int:
        """Bytes of this node's own work that auditors can fetch now."""
        return sum({id: size for shown in self._shown.values() for id, size in shown.held.items()}.values())

    def _let_go(self, whose: tuple[PeerId, bytes], shown: _Shown) -> None:
        shown.held.clear()
        self._parts.bulk.withdraw(self._prefix(*whose))

    @property
    def _within(self) -> float:  # seconds for all that one audit fetches: a dozen vectors, moments among them
        return FETCH_WITHIN + 12 * 8 * self._local.feedback.size / SLOWEST

    def _prefix(self, auditor: PeerId, roster: bytes) -> Key:
        return ("audit", self._parts.run_id, auditor, roster.hex())

    # --- asking -------------------------------------------------------------------------------------------------------

    def consider(self, block: Block) -> None:
        self._tidy(trio.current_time())
        for author, commit in self._store.measured(block).items():
            work = self._work(block, author, commit)
            self._bare[author] = bare = 0 if work.reveal.trace else self._bare.get(author, 0) + 1
            if bare > PATIENCE and author != self._parts.me and self._local.records:
                self._conclude(self._blank(work, Verdict.LIED, f"no record of {bare} contributions in a row"))
        super().consider(block)

    def _work(self, block: Block, author: PeerId, commit: bytes, by: PeerId = "", shown: bool = False) -> _Work:
        """What this node looks at, or what another one accuses an author of, and perhaps shows."""
        reveal = self._store.logs[block.parent].reveals[commit].what
        source, seed = by if shown else author, self._store.checks_seed(block)
        return _Work(block, author, commit, reveal, by or self._parts.me, source, seed)

    async def _look(self, block: Block, author: PeerId, measured: Mapping[PeerId, bytes]) -> None:
        if self.budget.affords(self._cost):
            await self._look_at(self._work(block, author, measured[author]))

    @property
    def _cost(self) -> float:  # seconds of one replay
        return self._longest * self._local.trained.seconds / max(1, self._local.trained.steps)

    async def _look_at(self, work: _Work) -> None:
        mine, shown = work.auditor == self._parts.me, work.source != work.author
        async with self._one:
            try:
                audit = await self._audit(work)
                if mine or audit.verdict is Verdict.LIED or (audit.verdict is Verdict.NOT_SHOWN and not shown):
                    self._conclude(audit)
                    self._misled.pop((work.auditor, work.source), None)
                elif audit.verdict is Verdict.HELD:
                    self._misled[work.auditor, work.source] = math.inf
                if mine and audit.verdict is Verdict.LIED:
                    await self._accuse(work, shown=True)
            except (Unknown, TrainerDied, OSError) as reason:  # OSError: the disk takes no states
                logger.info("round %d: the work of %s is not audited: %s", work.block.chain.round, work.author, reason)
            except ValueError:
                logger.exception("round %d: the work of %s is not audited", work.block.chain.round, work.author)
            finally:
                if self._records and not shown:
                    with suppress(NotShown), trio.move_on_after(DONE_WITHIN):
                        await self._ask(work, ())
                self._have.clear()
                self._records.clear()
                self._promised.clear()
                await self._parts.runner(self._vectors_here.clear)

    async def _accuse(self, work: _Work, *, shown: bool) -> None:
        """Have all others who took part repeat an audit, from what was `shown` here or, where nothing is, by asking."""
        roster, me = work.block.id, self._parts.me
        others = frozenset(self._store.measured(work.block)) - {me, work.author}
        ours = self._shown[me, roster] = _Shown(trio.current_time() + SHOWN_FOR + self._within)
        have = self._records | {id: vector.view(np.uint8).data for id, vector in self._have.items()}
        for id, content in (have if shown else {}).items():
            self._parts.bulk.offer((*self._prefix(me, roster), id.hex()), content, to=others)
            ours.held[id] = len(content)
        accusation = Accusation(self._parts.run_id, roster, shown)
        await self._parts.rpc.call_all(others, ACCUSE, accusation, Showing, timeout=TO_ACCUSE)

    async def _on_accuse(self, peer: PeerId, accusation: Accusation) -> Showing:
        """Whom the draw named as an auditor may have the others look as well, once for each roster."""
        store, whose = self._store, (peer, accusation.roster)
        known = accusation.run_id == self._parts.run_id and store.stands and accusation.roster in store.tree
        if not known or whose in self._taken:
            return Showing((False,))
        block = store.tree[accusation.roster]
        measured = store.measured(block)
        author = whom(store.checks_seed(block), peer, measured)
        if author in (None, self._parts.me) or not {peer, self._parts.me} <= set(measured):
            return Showing((False,))
        self._taken.append(whose)
        work = self._work(block, author, measured[author], peer, accusation.shown)
        heard = self._heeds(work) and self._accusations.statistics().current_buffer_used < WAITING
        if heard:
            self._accusations.send_nowait(work)
        return Showing((heard,))

    def _heeds(self, work: _Work) -> bool:  # a slow line is forgiven for as long as one audit may fetch
        return self._misled.get((work.auditor, work.source), 0.0) < self._within

    def _blank(self, work: _Work, verdict: Verdict = Verdict.HELD, why: str = "") -> Audit:
        return Audit(work.block.chain.round - 1, work.author, verdict, why, work.commit, work.reveal.trace, work.seed)

    async def _audit(self, work: _Work) -> Audit:
        """Look at one contribution. Raises Unknown, TrainerDied."""
        audit, tolerance = self._blank(work), await self._tolerance()
        self._until = trio.current_time() + self._within
        in_time = work.source != work.author or self._store.block.chain.round <= work.block.chain.round
        try:
            if not work.reveal.trace:
                raise NotShown("its contribution is bound to no record of its work")
            trace = await self._record(work, work.reveal.trace)
            stretch = which(work.seed, work.auditor, work.author, trace)
            way = self._store.tree.ancestry(work.block.parent) or (work.block.parent,)
            check_form(trace, round=work.reveal.round, way=way, longest=self._longest)
            if stretch is not None:
                await self._reserve(work, {*stretch.start.vectors, *stretch.end.vectors})
            linked = await self._check_residual(work, trace)
            if stretch is not None:
                place = stretch.round, stretch.step, stretch.steps
                start, end = stretch.start.parameters, stretch.end.parameters
                audit = replace(audit, stretch=place, start=start, end=end, tolerance=tolerance)
                found = await self._replay(work, trace, stretch)
                audit = replace(audit, distance=found.greatest)
                if not found.within(tolerance):
                    raise Wrong(f"its steps lead {found.greatest:.3g} away from where it says")
            if not linked:
                raise NotShown("it does not show what its work follows from")
        except NotShown as error:
            late = not in_time or self._store.block.chain.round > work.block.chain.round + PROMPT
            if late and not (work.source == work.author and isinstance(error.__cause__, Stalled)):  # it promised it
                raise Unknown(f"this node was too slow to ask in time: {error}") from error
            if isinstance(error, Withheld) and work.auditor == self._parts.me:
                await self._accuse(work, shown=False)
            return replace(audit, verdict=Verdict.NOT_SHOWN, why=str(error))
        except (Wrong, BadTrace) as error:
            return replace(audit, verdict=Verdict.LIED, why=str(error))
        return audit

    def _conclude(self, audit: Audit) -> None:
        silent = self._silent.get(audit.author, 0) + 1 if audit.verdict is Verdict.NOT_SHOWN else 0
        self._silent[audit.author] = silent
        self.counts[audit.verdict] += 1
        what = audit.why or f"{audit.distance:.2g} apart where {audit.tolerance:.2g} is tolerated"
        logger.info("round %d: the work of %s: %s, %s", audit.round, audit.author, audit.verdict.value, what)
        if self._parts.ledger is not None:
            self._parts.ledger.audited(audit, silent > PATIENCE)

    async def _tolerance(self) -> float:
        """How far a replay may end from what is claimed. Raises Unknown where this node cannot tell."""
        if len(self._own) < CALIBRATIONS:
            async with self._local.lent() as trainer:
                with trio.CancelScope(shield=True):
                    own = await trainer.calibrate()
            self.budget.spend(own.seconds)
            self._own.extend(own.distances)
            self.budget.saved = math.inf  # who lies from the start is found soon
        if not self._own:
            raise Unknown("nothing of its own to calibrate by")
        if (tolerance := calibrated(self._own)) is None:
            raise Unknown("its own replays differ too much to tell a lie")
        return tolerance

    # --- what the author shows ----------------------------------------------------------------------------------------

    async def _record(self, work: _Work, root: bytes) -> Trace:
        """The record with this root. Raises NotShown, and BadTrace where the author signed what is none."""
        await self._ask(work, (root,))
        raw = bytes(await self._fetch(work, root, MAX_TRACE))
        if root_of(raw) != root:
            raise NotShown("it sent another record than the one that it signed")
        self._records[root] = raw
        return Trace.decode(raw)

    async def _vectors(self, work: _Work, parameters: set[bytes], moments: Iterable[bytes] = ()) -> dict[bytes, Vector]:
        """Parameters (P,) and moments (P to 2 P,) or (0,) by their ids, all finite, mapped. Raises NotShown, Wrong."""
        found, size = {}, self._local.feedback.size
        ids = parameters.union(moments)
        await self._reserve(work, ids)
        for id in sorted(ids - self._have.keys()):
            into = await self._parts.runner(lambda: self._vectors_here.room(8 * size))
            came = await self._fetch(work, id, 8 * size, into=into)
            vector = np.frombuffer(came[: len(came) // 4 * 4], "<f4")
            if await self._parts.runner(lambda vector=vector: self._vectors_here.put(vector)) != id:  # type: ignore[misc]
                raise NotShown("it sent another state than the one that it signed")
            self._have[id] = vector
        for id in ids:
            vector = found[id] = self._have[id]
            most = size if id in parameters else 2 * size
            if not size <= vector.size <= most and (vector.size or id in parameters):
                raise Wrong("states of another model")
            if not await self._parts.runner(lambda vector=vector: is_finite(vector)):  # type: ignore[misc]
                raise Wrong("states that are not finite")
        return found

    async def _reserve(self, work: _Work, ids: set[bytes]) -> None:
        """Have the author offer these vectors before its next steps take their room. Raises NotShown."""
        if missing := ids - self._have.keys() - self._promised:
            await self._ask(work, tuple(sorted(missing)))
            self._promised |= missing

    async def _ask(self, work: _Work, ids: tuple[bytes, ...]) -> None:
        """Have the author offer what it signed; who accuses it offers all it has. Raises NotShown."""
        if work.source != work.author:
            return
        query = ShowQuery(self._parts.run_id, work.block.id, work.reveal.trace, ids)
        try:
            showing = await self._parts.rpc.call(work.author, SHOW, query, Showing, timeout=TIMEOUT)
        except CallError as error:
            raise Withheld(f"it does not answer: {error}") from error
        if len(showing.found) != len(ids) or not all(showing.found):
            raise Withheld("it has what it signed no more")

    async def _fetch(self, work: _Work, id: bytes, most: int, *, into: memoryview | None = None) -> memoryview:
        """What is offered under an id, of at most so many bytes. Raises NotShown."""
        key = (*self._prefix(self._parts.me if work.source == work.author else work.auditor, work.block.id), id.hex())
        began, whose = trio.current_time(), (work.auditor, work.source)
        try:
            with trio.fail_at(self._until):
                return await self._parts.bulk.fetch(work.source, key, into=into, max_size=max(1, most), stall=STALL)
        except NetworkError as error:
            raise Withheld(f"it does not send what it shows: {error}") from error
        except trio.TooSlowError as error:
            raise Withheld(f"it took more than {self._within:.0f} s to send what it shows") from error
        finally:
            self._misled[whose] = self._misled.get(whose, 0.0) + trio.current_time() - began

    # --- what the record says -----------------------------------------------------------------------------------------

    async def _check_residual(self, work: _Work, trace: Trace) -> bool:
        """Whether the contribution is linked to what came before; raises Wrong where it contradicts itself."""
        if trace.origin is Origin.UNLINKED:
            return False
        raw = _kept(self._store.contributions.get(work.reveal.root)).raw
        ends = {leg.stretches[-1].end.parameters for leg in trace.legs if leg.stretches}
        await self._reserve(work, ends)
        before = await self._before(work, trace)
        wanted = {trace.start, trace.residual} | ends | ({before[1].residual} if before is not None else set())
        vectors = await self._vectors(work, wanted)
        bases = {trace.base, *(leg.base for leg in trace.legs)} - {b""}
        states = {base: _kept(self._store.state(base)).parameters for base in bases}
        residual, codec_name = vectors[trace.residual], self._parts.spec.exchange.codec

        def check() -> None:
            if before is not None:
                revealed, record, entry = before
                kept, accepted = vectors[record.residual], entry.verdict == ACCEPTED
                earlier = Offered(
                    kept,
                    self._start(states[trace.base], kept) - vectors[trace.start],
                    _kept(self._store.contributions.get(revealed.root)).raw,
                    codec_in(revealed.round, codec_name),
                    accepted,
                    1 - entry.clip / ONE if accepted else 0.0,
                )
                check_left_over(residual, earlier)
            elif vector_id(states[trace.base]) != trace.start or residual.any() or has_moments(trace):
                raise Wrong("it does not begin as new")
            starts = {base: self._start(shared, residual) for base, shared in states.items()}
            offered = walk(trace, vectors[trace.start], ends=vectors, states=starts)
            explains(raw, starts[work.reveal.parent] - offered, residual, codec_in(work.reveal.round, codec_name))

        try:
            await self._parts.runner(check)
        except ValueError as error:  # numbers that end in infinity
            raise Wrong(str(error)) from error
        return True

    async def _before(self, work: _Work, trace: Trace) -> tuple[Reveal, Trace, Entry] | None:
        """The contribution that a record follows on, and what became of it; None where it begins as new.

        Raises Unknown, Wrong, NotShown.
        """
        tree, fresh = self._store.tree, trace.origin is Origin.FRESH
        if work.block.parent not in tree:
            raise Unknown("the round was let go of")
        listed = self._store.last_listed(work.block.parent, work.author)
        if fresh and (listed is None or listed[0] in tree.ancestry(trace.base)):
            return None
        if fresh or listed is None or listed[1].trace != trace.previous:  # else one work would do for many rounds
            raise NotShown("it does not follow on its author's last contribution in a roster")
        _, revealed, entry = listed
        record = await self._record(work, trace.previous)
        check_follows(trace, record, parent=revealed.parent)
        return revealed, record, entry

    def _start(self, shared: Vector, residual: Vector) -> Vector:
        """Where training from a shared state began, as in `LocalTrainer`."""
        return shared - residual if self._local.carries else shared

    # --- doing it again -----------------------------------------------------------------------------------------------

    async def _replay(self, work: _Work, trace: Trace, stretch: Stretch) -> Distance:
        start, end = stretch.start, stretch.end
        await self._vectors(work, {start.parameters, end.parameters}, {start.moments, end.moments})
        slice = Slice(work.author, stretch)
        if stretch.texts and not self._parts.texts.shared:
            raise Unknown("this node has no access to the run's text")
        if stretch.texts:
            slice = await self._with_text(slice, trace.texts[: stretch.texts])
        elif self._parts.texts.shared:
            raise NotShown("it names no text")
        async with self._local.lent() as trainer:  # its parameters, which a paused or killed replay leaves moved …
            with trio.CancelScope(shield=True):  # … are put back, and move no more then
                replayed = await trainer.replay(slice)
        if not replayed.distances:
            raise Unknown("the trainer was started again, and has the states that were shown no more")
        if work.auditor == self._parts.me:
            self.budget.spend(replayed.seconds)
        else:
            self._repeated += replayed.seconds
        return replayed.distances[0]

    async def _with_text(self, slice: Slice, texts: tuple[bytes, ...]) -> Slice:
        """The slice with those parts of its author's text that its steps read."""
        stretch = slice.stretch
        try:
            text = TrainingText(self._parts.texts, texts)
        except ValueError as error:
            raise Wrong(str(error)) from error
        steps = tuple(range(stretch.step, stretch.step + stretch.steps))
        places = await self._trainer.places(Batches(slice.author, stretch.round, steps, text.size))
        if not places:
            raise Wrong("text that is too short to train on")
        try:
            return replace(slice, size=text.size, pieces=await text.pieces(slice.author, places))
        except ShardError as error:
            raise NotShown(f"the text that it trained on cannot be had: {error}") from error
