"""A whole swarm in one process: real sessions, rounds and membership on simnet, with toy trainers, on virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import trio
from memoryshards import UnboundedShards
from simnodes import RUN, Run, now

from swarmnode.crdt.law import EVERYBODY
from swarmnode.crdt.record import Element
from swarmnode.node.session import RunSession
from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.history import HISTORY, History
from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.agreement import Agreement
from swarmnode.protocols.methods.known.allreduce import AllReduce
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.known.round import DilocoRounds
from swarmnode.protocols.methods.method import Begin, Method
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.trainer import Trainer
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.runner import inline
from swarmnode.protocols.state.membership import Membership, admitted
from swarmnode.protocols.state.sync import StateSync
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.protocols.transfer.shards import Shards
from swarmnode.testing.memorystate import MemoryState, clocks_of
from swarmnode.testing.parts import parts
from swarmnode.testing.simnet import SimNetwork, SimWorld, run_with_nursery
from swarmnode.testing.toy import ToyModel
from swarmnode.testing.toytrainer import SimTrainer
from swarmnode.training.outer import Layout
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.verify.recorder import stretch_steps

INNER: dict[str, dict[str, Any]] = {"demo": {"optimizer": "sgd", "lr": 0.05}, "seed": {"lr": 1e-4}}  # beside steps


@dataclass(frozen=True)
class Held:
    """What a whole swarm holds at a moment."""

    offers: int
    boxes: int
    tasks: int


async def bare(doing: Awaitable[Any]) -> Any:
    """In place of a session's net for defects: in a simulation a defect fails the test."""
    return await doing


@asynccontextmanager
async def _running(part: Run) -> AsyncIterator[None]:
    """A part of a node that runs for as long as the block does."""
    async with trio.open_nursery() as nursery:
        await nursery.start(part)
        yield
        nursery.cancel_scope.cancel()


@dataclass
class SimNode:
    name: str
    network: SimNetwork
    session: RunSession
    trainer: Trainer
    bulk: Bulk
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rounds(self) -> dict[int, dict[str, Any]]:
        return {e["round"]: e for e in self.events if e["event"] == "round"}

    @property
    def method(self) -> Method:
        return self.session.method

    @property
    def done(self) -> int:
        """Rounds of the run up to here: where nodes count from those they meet, they need not have told each."""
        return -1 if self.method.place is None else self.method.place.round

    @property
    def diloco(self) -> Diloco:
        """The method, where it is that one; what follows `open` are its parts."""
        assert isinstance(self.session.method, Diloco)
        return self.session.method

    @property
    def open(self) -> Open:
        """The method, where it is that one."""
        assert isinstance(self.session.method, Open)
        return self.session.method

    @property
    def diloco_rounds(self) -> DilocoRounds:
        return self.diloco.rounds

    @property
    def agreement(self) -> Agreement:
        return self.diloco.agreement

    @property
    def allreduce(self) -> AllReduce:
        return self.diloco.allreduce


class SimSwarm:
    """`await start(…)` adds nodes; `rounds_done` waits; events are kept per node."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        world: SimWorld | None = None,
        steps: int = 5,
        seconds_per_step: float = 0.4,
        floor: float = 5.0,
        dimension: int = 64,
        seed: int = 0,
        method: str = "diloco",
        validators: tuple[str, ...] = (),
        participants: int | None = None,
        model: Callable[[str, PeerId], ToyModel] | None = None,
        trainer: Callable[[str, PeerId], Trainer] | None = None,
        rollouts: dict[str, Any] | None = None,
        identity_bits: int = 0,
        exchange: dict[str, Any] | None = None,
        inner: dict[str, Any] | None = None,
    ) -> None:
        """`validators`: names of those who judge, where the method has judges; `participants`: in a round, None: as by
        default; `rollouts`, `exchange`: of the run file; `inner` as well, whatever it may say there. `model` makes
        a node's, by name and id, or `trainer` all."""
        self._seed = seed
        self.world = world or SimWorld(latency=0.02)
        self._method, self._validators, self._participants = method, validators, participants
        self._rollouts = rollouts or {}
        self._identity_bits = identity_bits
        self._exchange, self._inner = exchange or {}, inner or {}
        self.trusting: set[str] = set()  # names of nodes that take part as if everybody were admitted
        model = model or (lambda name, peer: ToyModel(dimension=dimension, seed=0, peer_id=peer))
        self._trainer = trainer or (lambda name, peer: SimTrainer(model(name, peer), seconds_per_step=seconds_per_step))
        self.nodes: dict[str, SimNode] = {}
        self._nursery = nursery
        self._steps, self._floor = steps, floor
        self._lives = 0  # nodes started so far
        self._news = trio.Event()
        self.checkpoints: Path | None = None  # where nodes save, each in a folder of its own; None: nowhere
        self.told: list[tuple[str, dict[str, Any]]] = []  # every round event: node, event with its roster

    async def begin(self, names: Sequence[str], **options: Any) -> None:
        """Start all of these in one run: the first waits for the others, and they join it."""
        for name in names:
            first = name == names[0]
            await self.start(name, join=None if first else names[0], wait_peers=first * (len(names) - 1), **options)

    async def start(
        self,
        name: str,
        *,
        rounds: int | None = None,
        join: str | None = None,
        wait_peers: int = 0,
        roster: str = "",
        samples: bool = False,
        creator: bool | None = None,
        holds: Sequence[Element] = (),
    ) -> SimNode:
        """Start a node that creates the run, or joins it through the node called `join`, by a string with `roster`.

        `samples`: it does nothing else, as with --role rollout. `creator`: it has the run's file, as by default who
        joins nobody. `holds`: what its state begins with, as on a disk.
        """
        network = self.world.node(name)
        trainer = self._trainer(name, network.me)
        audited = self.spec.exchange.method == "open" and self.spec.trust.audit_share > 0
        if audited and isinstance(trainer, SimTrainer) and not trainer.records:
            trainer.record(stretch_steps(self._steps, trainer.layout.parameters))
        rpc = Rpc(network)
        bulk = Bulk(network)
        liveness = Liveness(rpc)
        shards = Shards(network, rpc, UnboundedShards(), runner=inline, seed=self._lives)
        self._lives += 1
        rng = random.Random(f"membership {self._lives} {name}")
        members = EVERYBODY if name in self.trusting else admitted(self.spec)
        state = MemoryState(RUN, me=network.me, sign=network.sign, clocks=clocks_of(now), admitted=members)
        if holds:
            await state.merge(holds)
        sync = StateSync(state, network=network, rpc=rpc, runner=inline, rng=rng)
        membership = Membership(network=network, state=state, sync=sync, rng=rng)
        events: list[dict[str, Any]] = []

        def emit(event: dict[str, Any]) -> None:
            events.append(event)
            if event["event"] == "round":
                place = session.place
                voters = "/".join(sorted(place.members)) if place is not None else ""
                bits = sha256(session.method.saved().state.parameters).hexdigest()
                self.told.append((name, {**event, "roster": voters, "bits": bits}))
            self._news.set()
            self._news = trio.Event()

        context = Context(
            run_id=RUN,
            spec=self.spec,
            network=network,
            rpc=rpc,
            bulk=bulk,
            liveness=liveness,
            runner=inline,
            trainer=trainer,
            membership=membership,
            state=state,
            sync=sync,
            shards=shards,
            admits=members.__contains__,
            now=now,
            rng=random.Random(f"session {self._seed} {name}"),
        )
        session = RunSession(
            context,
            Begin(
                creator=join is None if creator is None else creator,
                expect_members=join is not None,
                wait_peers=wait_peers,
                wait_seconds=60.0,
                last_round=rounds,
                roster=roster,
                named={self.nodes[join].network.me} if join is not None else (),
            ),
            emit=emit,
            samples=samples,
            checkpoints=self._checkpoints_of(name, trainer.layout),
            history=None if self.checkpoints is None else History(self.checkpoints / name / HISTORY),
        )
        session._kept = bare  # type: ignore[method-assign]
        node = SimNode(name, network, session, trainer, bulk, events=events)
        self.nodes[name] = node
        parts = (network.run, rpc.run, bulk.run, liveness.run, shards.run)
        await self._nursery.start(self._live, node, parts, (state.run, sync.run, membership.run), join)
        return node

    async def _live(
        self,
        node: SimNode,
        first: tuple[Run, ...],
        then: tuple[Run, ...],
        join: str | None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        with node.scope:
            async with AsyncExitStack() as stack:  # as in the daemon, nothing ends before what depends on it
                for part in first:
                    await stack.enter_async_context(_running(part))
                if join is not None:
                    other = self.nodes[join].network
                    node.network.learn(other.me, other.addresses)
                    await node.network.connect(other.me)
                for part in then:
                    await stack.enter_async_context(_running(part))
                task_status.started()
                await node.session.run()
                await node.session.serve_forever()

    @cached_property
    def spec(self) -> RunSpec:
        """The run, as its file would say it."""
        trust = "open" if self._method == "open" else "known"
        tables = {
            "run": {"name": "simulated", "trust": trust},
            "task": {"name": "digits-rl" if self._method == "sapo" else "byte-lm"},
            "inner": {"steps": self._steps, **INNER.get(self._method, {})},
            "rollouts": self._rollouts,
            "exchange": {
                "method": self._method,
                "deadline_floor": self._floor,
                "deadline_ceiling": 60.0,
                **self._exchange,
            },
        }
        if trust == "open":
            tables["trust"] = {"audit_share": 0.0}  # audits have swarms of their own: test_open_audits.py
        spec = parse_runspec(tables, source="simulation").begun_by(self.world.node("a").me)
        spec = spec.updated(inner=self._inner)
        if self._validators and spec.trust.validators:
            validators = tuple(self.world.node(name).me for name in self._validators)
            spec = replace(spec, trust=replace(spec.trust, validators=validators))
        if self._participants is not None:
            spec = replace(spec, trust=replace(spec.trust, participants=self._participants))
        if self._identity_bits:
            spec = replace(spec, trust=replace(spec.trust, identity_bits=self._identity_bits))
        return spec

    def kill(self, name: str) -> None:
        """The process is gone: no goodbye, connections end."""
        node = self.nodes[name]
        self.world.kill(node.network.me)
        node.scope.cancel()

    def _checkpoints_of(self, name: str, layout: Layout) -> Checkpoints | None:
        if self.checkpoints is None:
            return None
        return Checkpoints(self.checkpoints / name, run_id=RUN, layout=layout, keep=3)

    async def leave(self, name: str) -> None:
        """Stop the node as one SIGINT does, and wait until it is gone."""
        node = self.nodes[name]
        node.session.stop()
        with trio.move_on_after(20.0):
            await node.session.finished.wait()
        node.scope.cancel()
        await trio.sleep(0.1)

    def all_stand_together(self) -> bool:
        """Whether all living nodes told the same last round, with one hash, and are its members."""
        living = [n for n in self.nodes.values() if not n.scope.cancel_called]
        last = [n.rounds[max(n.rounds)] if n.rounds else None for n in living]
        told = [e for e in last if e is not None]
        return (
            len(told) == len(living) == told[0]["members"] and len({(e["round"], e["state_hash"]) for e in told}) == 1
        )

    def all_agree(self, *, after: int = -1) -> bool:
        """Whether all living nodes told one round later than `after`, and last, with one hash."""
        living = [n for n in self.nodes.values() if not n.scope.cancel_called]
        last = {max(n.rounds, default=-1) for n in living}
        return len(last) == 1 and min(last) > after and len({n.rounds[max(last)]["state_hash"] for n in living}) == 1

    def held(self) -> Held:
        living = [n for n in self.nodes.values() if not n.scope.cancel_called]
        return Held(
            offers=sum(len(n.bulk._offers) for n in living),
            boxes=sum(len(n.agreement.acceptor.boxes) for n in living if isinstance(n.method, Diloco)),
            tasks=trio.lowlevel.current_statistics().tasks_living,
        )

    def owners(self, name: str) -> set[str]:
        """Who owns a part by the last roster that a node exchanged by."""
        roster = self.nodes[name].allreduce._offered[-1]
        cut = {part.owner for part in parts(roster, self.nodes[name].method.saved().residual.size)}
        return {n for n in self.nodes if self.peer(n) in cut}

    def peer(self, name: str) -> PeerId:
        return self.nodes[name].network.me

    async def until(self, done: Callable[[], bool], *, within: float = 600.0) -> None:
        """Wait, in virtual time, until `done()` after some event."""
        with trio.fail_after(within):
            while not done():
                await self._news.wait()

    async def round_done(self, round: int, *names: str, within: float = 600.0) -> None:
        """Wait until these nodes have told the end of `round`."""
        await self.until(lambda: all(round in self.nodes[n].rounds for n in names), within=within)

    async def past(self, round: int, *names: str, within: float = 600.0) -> None:
        """Wait until these nodes are behind `round`, whether or not they told its end."""
        await self.until(lambda: all(self.nodes[n].done > round for n in names), within=within)

    def assert_equal_hashes_are_equal_bits(self) -> None:
        by_hash: dict[str, set[str]] = {}
        for _, told in self.told:
            by_hash.setdefault(told["state_hash"], set()).add(told["bits"])
        assert all(len(bits) == 1 for bits in by_hash.values())

    def hashes(self, round: int) -> set[str]:
        """Different state hashes that nodes told for `round`."""
        return {n.rounds[round]["state_hash"] for n in self.nodes.values() if round in n.rounds}


Body = Callable[[SimSwarm], Awaitable[None]]


def simulate(body: Body, *names: str, swarm: Callable[..., Any] = SimSwarm, **options: Any) -> None:
    """`body` with a swarm of these options in which these nodes have been started, on a clock that jumps."""

    async def main(nursery: trio.Nursery) -> None:
        made = swarm(nursery, **options)
        await made.begin(names)
        await body(made)

    run_with_nursery(main)
