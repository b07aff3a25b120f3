"""Swarms of strangers on simnet that repeat slices of one another's work: who did it is believed, others are found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import simswarm
import trio
from hypothesis import settings
from ledgers import LEDGERS, keep_ledgers
from simswarm import SimSwarm

from swarmnode.protocols.methods.open.checks import audits as checks
from swarmnode.protocols.methods.open.local import TracedTrainer
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.trainer import Replayed, Slice, Trainer, TrainerHeld, Vector
from swarmnode.protocols.reputation.attestation import Saw
from swarmnode.protocols.transfer.bulk import Key, StreamingBuffer
from swarmnode.testing.simnet import SimWorld
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.runspec import RunSpec
from swarmnode.training.verify.recorder import SPARE, WINDOWS, stretch_steps
from swarmnode.training.verify.replay import DECAY, SAVED, Audit, Verdict
from swarmnode.training.verify.trace import Leg, Trace, vector_id

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c", "d")
STEPS = 32
QUICK = settings.default.max_examples < 1000  # what `make thorough` tries beyond: other cheats, other places
LIAR = "d"
Body = Callable[["AuditedSwarm"], Awaitable[None]]
Cheat = Callable[[Open], None]
Toys = dict[str, Callable[[str], ToyModel]]
NOISY = (Saw.GAIN, Saw.ASSIGNED)  # measured on few samples: now and then bad of who is honest


class FewerSteps(ToyModel):
    """Does every second step, and counts all of them."""

    def step(self, *, round: int, steps: int) -> float:
        loss = float("nan")
        for number in range(steps):
            before = self.vector.copy()
            loss = super().step(round=round, steps=1)
            if number % 2:
                self.vector[:] = before
        return loss


class AuditedSwarm(SimSwarm):
    """A swarm whose run has audits; `toys` are the models of those who train otherwise than they say."""

    share = 0.5
    liar = ""

    def __init__(
        self,
        nursery: trio.Nursery,
        toys: dict[str, Callable[[str], ToyModel]],
        turns: bool,
        step: float,
        latency: float,
    ) -> None:
        self._turns = turns

        def trainer(name: str, peer: str) -> Trainer:
            toy = toys.get(name, lambda peer: ToyModel(dimension=64, peer_id=peer))(peer)
            made = SimTrainer(toy, seconds_per_step=step)
            made.record(stretch_steps(STEPS, made.layout.parameters))
            return made

        world = SimWorld(latency=latency)
        self.liar = next(iter(toys), "")
        super().__init__(nursery, world=world, method="open", validators=NAMES, steps=STEPS, trainer=trainer)

    @cached_property
    def spec(self) -> RunSpec:
        spec = super().spec
        spec = replace(spec, trust=replace(spec.trust, audit_share=self.share))
        if not self._turns:
            return spec
        exchange = replace(spec.exchange, codec="sign3")
        return replace(spec, exchange=exchange, outer=replace(spec.outer, lr=0.7, momentum=0.8))

    def audits(self, name: str) -> list[Audit]:
        """What the honest among the others found of a node's work."""
        others = [LEDGERS[self.peer(other)] for other in self.nodes if other not in (name, self.liar)]
        return [audit for ledger in others for audit in ledger.audits(self.peer(name))]

    def verdicts(self, name: str, *, after: int = -1) -> Counter[Verdict]:
        """The same in numbers, of the rounds after this one."""
        return Counter(audit.verdict for audit in self.audits(name) if audit.round > after)


@pytest.fixture(autouse=True)
def ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger for each node that is started."""
    keep_ledgers(monkeypatch)


def simulate(
    body: Body,
    toys: Toys | None = None,
    *,
    turns: bool = False,
    step: float = 0.2,
    latency: float = 0.05,
) -> None:
    """`turns`: with `sign3` and outer momentum, so that local parameters carry residuals. Times are in seconds."""

    given = {"toys": toys or {}, "turns": turns, "step": step, "latency": latency}
    simswarm.simulate(body, *NAMES, swarm=AuditedSwarm, **given)


@pytest.mark.parametrize("every", [3] if QUICK else [3, 5, 7])
def test_the_work_of_a_round_that_was_cut_and_is_begun_anew_holds_up(every: int) -> None:
    """It is cut, as by a pause that is over by then, as work is given to a thread."""

    async def body(swarm: AuditedSwarm) -> None:
        local, session, calls = swarm.nodes["c"].open.local, swarm.nodes["c"].session, 0

        async def cutting(work: Callable[[], Any]) -> Any:
            nonlocal calls
            calls += 1
            if not calls % every:
                session._training.cancel()
            await trio.lowlevel.checkpoint()
            return work()

        local._runner = cutting
        await swarm.round_done(12, *NAMES)
        found = swarm.verdicts("c")
        assert not found[Verdict.LIED], [audit.why for audit in swarm.audits("c")]
        assert found[Verdict.HELD] >= 3

    simulate(body)


@pytest.mark.parametrize("turns", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_honest_work_holds_up_and_costs_no_more_than_the_share(turns: bool) -> None:
    async def body(swarm: AuditedSwarm) -> None:
        await swarm.round_done(12, *NAMES)
        for name in NAMES:
            found = swarm.verdicts(name)
            assert not found[Verdict.LIED], [audit.why for audit in swarm.audits(name)]
            assert found[Verdict.HELD] >= 3
            assert found[Verdict.NOT_SHOWN] <= 2  # after a round that was undone: its work came back
            told = [LEDGERS[swarm.peer(other)].found(swarm.peer(name)) for other in NAMES if other != name]
            assert not any(finding.bad for found_of in told for finding in found_of if finding.saw not in NOISY)
            audits, longest = swarm.nodes[name].open.audits, 0.2 * stretch_steps(STEPS, 64)
            assert audits is not None
            assert audits.budget.spent <= audits.budget.earned + (SAVED + 2) * longest  # what it begins with
            assert audits.held <= 2 * 12 * 4 * 64, "of the audit that goes on: others said when they were done"

    simulate(body, turns=turns)


def test_who_does_many_steps_while_others_talk_is_no_liar() -> None:
    """A record takes MAX_STRETCHES: here rounds would come to thousands of steps."""

    async def body(swarm: AuditedSwarm) -> None:
        await swarm.round_done(8, *NAMES)
        for name in NAMES:
            found = swarm.verdicts(name)
            assert found[Verdict.HELD] >= 3 and not found[Verdict.LIED], {audit.why for audit in swarm.audits(name)}
            assert found[Verdict.NOT_SHOWN] <= 2  # after a round that was undone: its work came back

    simulate(body, step=0.0005, latency=0.1)


class LateTree:
    """A tree of blocks in which this node finds each of them some seconds after it was first asked for it."""

    LATE = 3.0

    def __init__(self, tree: Any) -> None:
        self._tree, self._since = tree, dict[bytes, float]()

    def __contains__(self, id: bytes) -> bool:
        now = trio.current_time()
        return id in self._tree and now >= self._since.setdefault(id, now) + self.LATE

    def __getitem__(self, id: bytes) -> Any:
        return self._tree[id]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)


def test_who_hears_of_rosters_later_than_its_auditors_is_no_liar() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        slow = swarm.nodes["d"].open.audits
        assert slow is not None
        store = slow._store

        class Late:
            @cached_property
            def tree(self) -> LateTree:
                return LateTree(store.tree)

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        slow._store = Late()  # type: ignore[assignment]
        await swarm.round_done(8, *NAMES)
        found = swarm.verdicts("d")
        assert found[Verdict.HELD] >= 3 and not found[Verdict.LIED], found
        refused = {audit.why for audit in swarm.audits("d") if audit.verdict is Verdict.NOT_SHOWN}
        assert refused <= {"it does not show what its work follows from"}, "as of all, where a roster was undone"

    simulate(body)


@pytest.mark.parametrize("seconds", [pytest.param(1.0, marks=pytest.mark.thorough), 4.0])
def test_who_keeps_states_of_two_contributions_is_no_liar_to_a_slow_auditor(seconds: float) -> None:
    """As of a large model, where the steps after the next contribution take the room of the first one's states."""

    async def body(swarm: AuditedSwarm) -> None:
        for name in NAMES:
            trainer = swarm.nodes[name].trainer
            assert isinstance(trainer, SimTrainer) and trainer._recorder is not None
            trainer._recorder._vectors.budget = 4 * 64 * WINDOWS * (-(-STEPS // stretch_steps(STEPS, 64)) + SPARE)
        slow = swarm.nodes["a"].open.audits
        assert slow is not None
        fetch = slow._fetch

        async def late(*arguments: Any, **options: Any) -> memoryview:
            await trio.sleep(seconds)
            return await fetch(*arguments, **options)

        slow._fetch = late  # type: ignore[method-assign]
        await swarm.round_done(12, *NAMES)
        assert all(swarm.verdicts(name)[Verdict.HELD] >= 3 for name in NAMES)
        refused = {audit.why for name in NAMES for audit in swarm.audits(name) if audit.verdict is not Verdict.HELD}
        assert refused <= {"it does not show what its work follows from"}, refused

    simulate(body)


def offers(lie: Callable[[np.ndarray, list[np.ndarray]], np.ndarray]) -> Cheat:
    """Offers something else than what its steps came to."""

    def cheat(method: Open) -> None:
        work = method.local
        contribute, before = work.contribute, list[np.ndarray]()

        async def lying(parent: bytes, round: int) -> bytes | None:
            raw = await contribute(parent, round)
            if raw is None:
                return None
            own = work.feedback.codec.decode(raw, work.feedback.size)
            told = lie(own, before)
            before.append(own)
            return bytes(work.feedback.codec.encode(told.astype(np.float32)))

        work.contribute = lying  # type: ignore[method-assign]

    return cheat


def noise(own: np.ndarray, before: list[np.ndarray]) -> np.ndarray:
    random = np.random.default_rng(len(before)).standard_normal(own.size)
    return random * np.linalg.norm(own) / np.linalg.norm(random)


OFFERS: dict[str, Cheat] = {
    "noise": offers(noise),
    "stale": offers(lambda own, before: before[0] if before else own),
    "scaled": offers(lambda own, before: 2 * own),
}
TOYS: dict[str, Callable[[str], ToyModel]] = {
    "other data": lambda peer: ToyModel(dimension=64, peer_id="somebody else"),
    "fewer steps": lambda peer: FewerSteps(dimension=64, peer_id=peer),
    "other learning rate": lambda peer: ToyModel(dimension=64, peer_id=peer, lr=0.025),
}


@pytest.mark.parametrize(
    ("cheat", "turns"),
    [
        *((cheat, False) for cheat in (["stale", "other data"] if QUICK else [*OFFERS, *TOYS])),
        ("fewer steps", True),
        pytest.param("scaled", True, marks=pytest.mark.thorough),
    ],
)
def test_who_did_not_do_the_work_is_found_and_nobody_else(cheat: str, turns: bool) -> None:
    async def body(swarm: AuditedSwarm) -> None:
        if cheat in OFFERS:
            OFFERS[cheat](swarm.nodes[LIAR].open)
        await swarm.round_done(12, *NAMES)
        found = {name: swarm.verdicts(name) for name in NAMES}
        assert found[LIAR][Verdict.LIED] >= 3
        # It began to lie in one of the first two rounds. A stretch that a mark cut short may be the one step it did.
        least = 2 if cheat == "fewer steps" else 0
        held = [audit for audit in swarm.audits(LIAR) if audit.round > 1 and audit.verdict is Verdict.HELD]
        assert not [audit for audit in held if audit.stretch[2] >= least], held
        assert not any(found[name][Verdict.LIED] for name in NAMES if name != LIAR)
        if cheat == "other data":  # found by replays alone, and what others repeat does not cost the looks of their own
            audits = [swarm.nodes[name].open.audits for name in NAMES[:3]]
            assert any(one is not None and one._repeated > 0 and one.budget.saved > 0 for one in audits)
        for name in NAMES[:3]:
            ledger = LEDGERS[swarm.peer(name)]
            ledger.close()
            seen = {finding.saw: finding for finding in ledger.found(swarm.peer(LIAR))}
            if any(audit.verdict is Verdict.LIED for audit in ledger.audits(swarm.peer(LIAR))):
                assert seen[Saw.AUDIT].bad
                assert seen[Saw.AUDIT].evidence
                assert ledger.roster_standing(swarm.peer(LIAR)) == 0

    simulate(body, {LIAR: TOYS[cheat]} if cheat in TOYS else None, turns=turns)


def offers_again(method: Open) -> list[int]:
    """From its third contribution on, offers what was trained for the second: by the record of that, with one leg more.

    In these rounds, once it did.
    """
    work, store, rounds = method.local, method.store, list[int]()
    assert isinstance(work, TracedTrainer)
    contribute, traces, vectors = work.contribute, list[Trace](), dict[bytes, Vector]()

    def shared(roster: bytes) -> Vector:
        state = store.state(roster)
        assert state is not None
        return state.parameters

    async def lying(parent: bytes, round: int) -> bytes | None:
        raw, trace = await contribute(parent, round), work._offered
        if raw is None or len(traces) < 2:
            if raw is not None and trace is not None:
                if traces and trace.previous != traces[0].root:
                    traces.clear()
                traces.append(trace)
                found = {id: work._offers.get(id) for id in (trace.end, trace.residual)}
                vectors.update({id: vector.copy() for id, vector in found.items() if vector is not None})
            return raw
        last = traces[-1]
        base = next((leg.base for leg in reversed(last.legs) if leg.base), last.base)
        end = shared(parent) + (vectors[last.end] - shared(base))
        again = replace(last, legs=(*last.legs, Leg(parent, False, ())), end=vector_id(end))
        for vector in (*vectors.values(), end):
            work._offers.put(vector)
        for shown in (traces[0], again):
            work._shown[shown.root] = shown.encode()
        work._offered = again
        feedback = ErrorFeedback(work.feedback.codec, work.feedback.size, decay=DECAY)
        feedback.restore(vectors[last.residual])
        rounds.append(round)
        return bytes(feedback.encode(shared(parent) - end))

    work.contribute = lying  # type: ignore[method-assign]
    return rounds


def test_what_was_trained_once_holds_up_in_one_round() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        rounds = offers_again(swarm.nodes[LIAR].open)
        await swarm.round_done(16, *NAMES)
        found = [audit for audit in swarm.audits(LIAR) if audit.round in rounds[1:]]
        assert len(found) >= 3, rounds
        assert not [audit for audit in found if audit.verdict is Verdict.HELD], found
        assert any(LEDGERS[swarm.peer(name)].roster_standing(swarm.peer(LIAR)) == 0 for name in NAMES[:3])
        assert all(not swarm.verdicts(name)[Verdict.LIED] for name in NAMES[:3])

    simulate(body)


def look_at_nobody(method: Open) -> None:
    """This node audits nobody by itself."""
    assert method.audits is not None
    method.audits.budget.affords = lambda cost: False  # type: ignore[method-assign]


def test_a_lie_that_one_auditor_finds_is_found_by_all_from_what_it_shows() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        for name in (*NAMES[1:3], LIAR):
            look_at_nobody(swarm.nodes[name].open)
        OFFERS["scaled"](swarm.nodes[LIAR].open)
        await swarm.until(lambda: swarm.verdicts(LIAR)[Verdict.LIED] >= 3, within=400)  # until its auditor is drawn
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 6, *NAMES)
        for name in NAMES[:3]:
            found = [audit for audit in LEDGERS[swarm.peer(name)].audits(swarm.peer(LIAR))]
            assert Verdict.LIED in {audit.verdict for audit in found}, name
            assert LEDGERS[swarm.peer(name)].roster_standing(swarm.peer(LIAR)) == 0
            assert not any(swarm.verdicts(other)[Verdict.LIED] for other in NAMES[:3])
        store = swarm.nodes["a"].open.store
        accepted = [{worked.author for worked in roster} for roster in store.block.chain.history[-4:]]
        assert all(swarm.peer(LIAR) not in authors for authors in accepted)
        assert all(any(swarm.peer(name) in authors for authors in accepted) for name in NAMES[:3])

    simulate(body)


def test_a_false_accusation_convicts_nobody_and_is_heard_once() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        liar = swarm.nodes[LIAR].open.audits
        assert liar is not None
        audit = liar._audit

        async def slander(work: Any) -> Audit:
            return replace(await audit(work), verdict=Verdict.LIED)

        liar._audit = slander  # type: ignore[method-assign]
        for name in NAMES[:3]:
            look_at_nobody(swarm.nodes[name].open)
        await swarm.round_done(12, *NAMES)
        assert liar.counts[Verdict.LIED] >= 3
        for name in NAMES[:3]:
            audits = swarm.nodes[name].open.audits
            assert audits is not None
            assert audits.counts[Verdict.LIED] == 0
            assert audits._misled.keys() <= {(swarm.peer(LIAR), swarm.peer(LIAR))}
        assert any(math.inf in swarm.nodes[name].open.audits._misled.values() for name in NAMES[:3])  # type: ignore[union-attr]

    simulate(body)


def test_an_accuser_that_shows_its_evidence_without_end_stops_nobodys_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FETCH_WITHIN", 40.0)

    async def body(swarm: AuditedSwarm) -> None:
        liar, bulk = swarm.nodes[LIAR].open.audits, swarm.nodes[LIAR].bulk
        assert liar is not None
        audit, offer = liar._audit, bulk.offer

        def is_muted(audits: checks.Audits) -> bool:
            return audits._misled.get((swarm.peer(LIAR), swarm.peer(LIAR)), 0.0) >= audits._within

        async def slander(work: Any) -> Audit:
            return replace(await audit(work), verdict=Verdict.LIED)

        def trickle(key: Key, buffer: Any, *, to: frozenset[str] | None = None) -> None:
            size = memoryview(buffer).nbytes if to is not None and len(to) > 1 else 0  # for all who are to repeat it
            offer(key, StreamingBuffer(bytearray(size)) if size else buffer, to=to)

        liar._audit = slander  # type: ignore[method-assign]
        bulk.offer = trickle  # type: ignore[method-assign]
        honest = [audits for name in NAMES[:3] if (audits := swarm.nodes[name].open.audits) is not None]
        await swarm.until(lambda: all(map(is_muted, honest)), within=900)
        assert all(audits._repeated <= audits.budget.earned + checks.WAITING * audits._cost for audits in honest)
        before = [sum(audits.counts.values()) for audits in honest]
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 12, *NAMES)
        assert all(sum(audits.counts.values()) > told + 2 for audits, told in zip(honest, before, strict=True))
        assert not any(audits.counts[Verdict.LIED] for audits in honest)

    simulate(body)


def test_a_replay_that_does_not_end_leaves_the_own_parameters_as_they_were() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        audits = swarm.nodes["a"].open.audits
        assert audits is not None
        trainer, replay, seen = audits._trainer, audits._replay, list[tuple[Vector, Vector]]()

        async def cut_short(slice: Slice) -> Replayed:
            own = trainer.parameters()
            trainer.load(np.full_like(own, 7.0))  # the audited author's
            seen.append((own, own))
            raise TrainerHeld("training is paused")

        async def looks(*given: Any) -> Any:
            try:
                return await replay(*given)
            finally:
                seen[-1] = seen[-1][0], trainer.parameters()

        trainer.replay = cut_short  # type: ignore[method-assign]
        audits._replay = looks  # type: ignore[method-assign]
        await swarm.until(lambda: len(seen) >= 3, within=120)
        assert all(np.array_equal(before, after) for before, after in seen)

    simulate(body)


def test_a_node_convicts_itself_of_nothing() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        local, me = swarm.nodes[LIAR].open.local, swarm.peer(LIAR)
        assert isinstance(local, TracedTrainer)

        def full(vector: Vector) -> bytes:
            raise OSError("the disk is full")

        local._offers.put = full  # type: ignore[method-assign]
        await swarm.round_done(8, *NAMES)
        assert LEDGERS[swarm.peer("a")].roster_standing(me) == 0
        assert LEDGERS[me].roster_standing(me), "its own judgement would be the last to forgive it"

    simulate(body)


def test_a_fault_of_an_auditor_makes_nobody_a_liar() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        audits = swarm.nodes["a"].open.audits
        assert audits is not None
        replay, faults = audits._trainer.replay, list[Replayed]()

        async def faulty(slice: Slice) -> Replayed:
            faults.append(await replay(slice))
            raise ValueError("a fault of this node's own")

        audits._trainer.replay = faulty  # type: ignore[method-assign]
        await swarm.until(lambda: len(faults) >= 2, within=120)
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 2, *NAMES)
        assert not any(swarm.verdicts(name)[Verdict.LIED] for name in NAMES)

    simulate(body)


def test_who_shows_its_record_and_no_states_is_convicted_by_all_after_three_rounds() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        for name in (*NAMES[1:3], LIAR):
            look_at_nobody(swarm.nodes[name].open)
        local = swarm.nodes[LIAR].open.local
        show, records = local.show, local._shown  # type: ignore[attr-defined]

        async def withhold(id: bytes) -> memoryview | None:
            return await show(id) if id in records else None

        local.show = withhold  # type: ignore[attr-defined]
        await swarm.round_done(24, *NAMES)  # a looks at it in one round of three
        for name in NAMES[:3]:
            assert LEDGERS[swarm.peer(name)].roster_standing(swarm.peer(LIAR)) == 0, name
            assert all(LEDGERS[swarm.peer(name)].roster_standing(swarm.peer(other)) for other in NAMES[:3])

    simulate(body)


def test_who_promises_its_work_and_sends_nothing_is_convicted_by_each_auditor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rounds are much shorter than what an auditor waits for, which meanwhile looks at nobody else."""
    monkeypatch.setattr(checks, "STALL", 30.0)

    async def body(swarm: AuditedSwarm) -> None:
        bulk = swarm.nodes[LIAR].bulk
        offer = bulk.offer

        def silent(key: Key, buffer: Any, *, to: frozenset[str] | None = None) -> None:
            size = memoryview(buffer).nbytes if key[0] == "audit" else 0
            offer(key, StreamingBuffer(bytearray(size)) if size else buffer, to=to)

        bulk.offer = silent  # type: ignore[method-assign]
        ledgers = [LEDGERS[swarm.peer(name)] for name in NAMES[:3]]
        await swarm.until(lambda: not any(one.roster_standing(swarm.peer(LIAR)) for one in ledgers), within=900)
        assert all(one.roster_standing(swarm.peer(name)) for one in ledgers for name in NAMES[:3])
        assert all(swarm.verdicts(name)[Verdict.HELD] for name in NAMES[:3])

    simulate(body)


def test_who_says_falsely_that_nothing_is_shown_convicts_nobody() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        liar = swarm.nodes[LIAR].open.audits
        assert liar is not None
        audit = liar._audit

        async def slander(work: Any) -> Audit:
            await liar._accuse(work, shown=False)
            return await audit(work)

        liar._audit = slander  # type: ignore[method-assign]
        for name in NAMES[:3]:
            look_at_nobody(swarm.nodes[name].open)
        await swarm.round_done(12, *NAMES)
        heard = [swarm.nodes[name].open.audits for name in NAMES[:3]]
        assert all(audits.counts[Verdict.LIED] == 0 for audits in heard if audits)
        assert any(math.inf in audits._misled.values() for audits in heard if audits)

    simulate(body)


def test_whose_work_is_never_bound_to_a_record_lies() -> None:
    async def body(swarm: AuditedSwarm) -> None:
        trainer = swarm.nodes[LIAR].trainer
        assert isinstance(trainer, SimTrainer)
        trainer._recorder = None
        await swarm.round_done(8, *NAMES)
        for name in NAMES[:3]:
            ledger = LEDGERS[swarm.peer(name)]
            assert ledger.roster_standing(swarm.peer(LIAR)) == 0
            assert all(ledger.roster_standing(swarm.peer(other)) for other in NAMES[:3])

    simulate(body)
