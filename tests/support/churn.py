"""A swarm of the open exchange whose nodes come, leave, die and freeze, and what its nodes tell of each round.

The trainer is a quadratic bowl: gradients with noise of each node's own, and a held-out loss, in microseconds for
tens of thousands of parameters. What follows from the same bytes alone is remembered for the whole process, as all
nodes are handed the same: verified signatures, elements and statements, contributions decoded, their ids and norms.
Each node computes for itself what those make of the chain: rosters, states and their hashes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import numpy as np
import trio
from numpy.typing import NDArray
from simswarm import SimSwarm

from swarmnode.crdt.record import Record, parse
from swarmnode.protocols.chain.statements import Said, read
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.open.store import id_of
from swarmnode.protocols.network import PeerId
from swarmnode.testing.simnet import SimWorld
from swarmnode.testing.simnode import SimNetwork
from swarmnode.testing.toy import ToyModel
from swarmnode.training.codecs.topk import Places, TopK, Vector
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.outer import Layout

REMEMBERED = 1 << 16  # verified signatures, and parsed elements
TICK = 0.01  # seconds; things arrive at multiples of it
ENTROPY = 1.0  # bits per byte that no parameters take away
STEPS = 5  # inner steps in a round
PERTURBED = 0.02  # of the optimum, in units of its coordinates' size: what a judge's sample shows


class Bowl(ToyModel):
    """Loss ENTROPY + ½ Σ (w − w*)², where few of the coordinates of w* are large, as in gradients of real models."""

    def __init__(self, *, parameters: int, seed: int, peer_id: str, lr: float = 0.1, noise: float = 0.3) -> None:
        """`noise`: of each coordinate of a gradient, as a multiple of the root mean square of w*."""
        self.layout = Layout.of([("weight", (parameters,))])
        self.batch = 4
        self.vector = np.zeros(parameters, np.float32)
        self._seed, self._peer_id, self._lr = seed, peer_id, np.float32(lr)
        self._optimum = optimum(parameters, seed)
        self._noise = np.float32(noise * float(np.sqrt(np.mean(self._optimum**2))))

    def step(self, *, round: int, steps: int) -> float:
        generator = _generator(f"batches {self._seed} {self._peer_id} {round} {self.vector[0]}")
        losses = []
        for _ in range(steps):
            losses.append(self.heldout_loss())
            noise = generator.standard_normal(self.vector.size, dtype=np.float32)
            self.vector -= self._lr * (self.vector - self._optimum + self._noise * noise)
        return float(np.mean(losses)) if losses else float("nan")

    def heldout_loss(self, seed: int | None = None) -> float:
        error = self.vector - self._optimum
        if seed is not None:
            error = error - sample(self.vector.size, self._seed, seed)
        return ENTROPY + 0.5 * float(error @ error)

    def drawn(self, peer_id: str, round: int, steps: Sequence[int]) -> float:
        return self.heldout_loss()

    def slope(self, seed: int, first: int, last: int) -> tuple[float, Vector]:
        error = self.vector - self._optimum - sample(self.vector.size, self._seed, seed, first, last)
        return ENTROPY + 0.5 * float(error @ error), error


@lru_cache(4)
def optimum(parameters: int, seed: int) -> NDArray[np.float32]:
    """(P,), of norm 2: from 3 bits per byte at the start."""
    generator = _generator(f"optimum {seed}")
    values = generator.standard_normal(parameters) * np.arange(1, parameters + 1) ** -0.5
    generator.shuffle(values)
    found: NDArray[np.float32] = (values * (2 / np.linalg.norm(values))).astype(np.float32)
    return found


@lru_cache(256)
def sample(parameters: int, seed: int, drawn: int, first: int = 0, last: int = SEQUENCES) -> NDArray[np.float32]:
    """(P,): how the optimum on these of a judge's sequences differs from that on all text."""
    generator = _generator(f"sample {seed} {drawn} {first} {last}")
    scale = np.float32(PERTURBED * 2 / np.sqrt(parameters) * np.sqrt(SEQUENCES / (last - first)))
    return scale * generator.standard_normal(parameters, dtype=np.float32)


def _generator(purpose: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(sha256(purpose.encode()).digest()[:8], "big"))


@contextmanager
def one_answer_for_all() -> Iterator[None]:
    """Verify a signature, and read an element or a contribution, once in this process, whichever nodes ask."""
    verify = SimNetwork.verify
    known: dict[tuple[PeerId, bytes, bytes], bool] = {}

    def remembered(self: SimNetwork, peer: PeerId, message: bytes, signature: bytes) -> bool:
        asked = (peer, message, signature)
        if asked not in known:
            if len(known) >= REMEMBERED:
                known.clear()
            known[asked] = verify(self, peer, message, signature)
        return known[asked]

    @lru_cache(REMEMBERED // 16)
    def decoded(codec: TopK, raw: bytes, elements: int) -> tuple[Places, Vector]:
        sparse = decode_sparse(codec, raw, elements)
        for array in sparse:
            array.flags.writeable = False
        return sparse

    def decoded_once(self: TopK, raw: bytes | memoryview, elements: int) -> tuple[Places, Vector]:
        return decoded(self, bytes(raw), elements)

    statements: dict[bytes, Said[Any]] = {}

    def read_once(record: Record) -> Said[Any]:
        if record.id not in statements:
            if len(statements) >= REMEMBERED:
                statements.clear()
            statements[record.id] = read(record)
        return statements[record.id]

    decode_sparse, contributions = TopK.decode_sparse, "swarmnode.protocols.methods.open.store"
    with (
        patch.object(SimNetwork, "verify", remembered),
        patch("swarmnode.protocols.state.intake.parse", lru_cache(REMEMBERED)(parse)),
        patch("swarmnode.protocols.methods.open.store.read", read_once),
        patch(f"{contributions}.id_of", lru_cache(REMEMBERED // 16)(id_of)),
        patch.object(TopK, "decode_sparse", decoded_once),
    ):
        yield


@dataclass(frozen=True)
class Churn:
    """Shares of the nodes in each round. Who comes back has the identity that it left with, and has forgotten all."""

    join: float = 0.0
    leave: float = 0.0
    die: float = 0.0
    freeze: float = 0.0  # for two rounds
    returning: float = 0.5  # of who joins, those who were here before

    @classmethod
    def of(cls, share: float) -> Churn:
        """As many come as go: two fifths of `share` join, and a fifth each leaves, dies and freezes."""
        return cls(join=0.4 * share, leave=0.2 * share, die=0.2 * share, freeze=0.2 * share)


@dataclass(frozen=True)
class Round:
    """What the nodes told of one round."""

    round: int
    seconds: float  # virtual, since the last of the rounds that were looked at
    living: int  # nodes that run and are not frozen
    told: int  # of these, those who told the end of this round
    hashes: int  # different ones among them
    members: int  # whose work counted, as most of them tell
    loss: float  # mean of theirs, bits per byte


@dataclass
class ChurnSwarm:
    """`begin`, then `next_round` again and again, with `churn` between."""

    nursery: trio.Nursery
    nodes: int
    validators: int
    parameters: int
    seed: int = 0
    floor: float = 2.0  # seconds, of deadlines
    latency: float = 0.05  # seconds
    participants: int = 64  # contributions aimed at
    window: float = 2.0  # seconds of training in a round
    names: list[str] = field(default_factory=list)  # of who runs, frozen ones included
    frozen: dict[str, int] = field(default_factory=dict)  # name -> rounds until it thaws
    gone: list[str] = field(default_factory=list)
    history: list[Round] = field(default_factory=list)
    happened: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)  # who is frozen -> events that it had told when it froze
    rosters: dict[str, dict[int, bytes]] = field(default_factory=dict)  # name -> round -> id of what ended it

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        first = ["a", *(f"n{number}" for number in range(1, self.nodes))]
        self.swarm = SimSwarm(
            self.nursery,
            world=SimWorld(seed=self.seed, latency=self.latency, tick=TICK),
            method="open",
            validators=tuple(first[: self.validators]),
            floor=self.floor,
            seed=self.seed,
            participants=self.participants,
            seconds_per_step=self.window / STEPS,
            steps=STEPS,
            model=lambda name, peer: Bowl(parameters=self.parameters, seed=self.seed, peer_id=peer),
        )
        self.names = first
        self._named = len(first)
        self._since = 0.0
        self._sent_before = 0  # by nodes whose places others took

    async def begin(self) -> None:
        """Start all nodes; each joins through one that runs, as many at once as run by then."""
        first, *others = self.names
        await self.swarm.start(first, wait_peers=self.nodes - 1)
        running = [first]
        while others:
            joining, others = others[: len(running)], others[len(running) :]
            async with trio.open_nursery() as nursery:
                for name in joining:
                    nursery.start_soon(partial(self.swarm.start, name, join=self.random.choice(running)))
            running += joining
        self._since = trio.current_time()

    @property
    def living(self) -> list[str]:
        return [name for name in self.names if name not in self.frozen]

    def _told(self, name: str, round: int) -> dict[str, Any] | None:
        return self.swarm.nodes[name].rounds.get(round)

    def height(self) -> int:
        """The latest round that most of the living nodes have told the end of; -1 before the first."""
        told = sorted(max(self.swarm.nodes[name].rounds, default=-1) for name in self.living)
        return told[(len(told) - 1) // 2] if told else -1

    async def next_round(self, *, within: float = 300.0) -> Round:
        """Wait until most living nodes are past the round after the last one. Raises trio.TooSlowError."""
        round = self.history[-1].round + 1 if self.history else 0
        await self.swarm.until(lambda: self.height() >= round, within=within)
        await trio.sleep(0.5)  # who was told a moment later than most
        now = trio.current_time()
        found = self.look_at(round, now - self._since)
        self._since = now
        self.history.append(found)
        self._note_rosters()
        return found

    def _note_rosters(self) -> None:
        """Note by which rosters the living nodes came to where they stand now, whatever they told before."""
        for name in self.living:
            method = self.swarm.nodes[name].method
            if not isinstance(method, Open) or not method.store.stands:
                continue
            path = method.store.tree.path(method.store.tip)
            if not path:
                continue
            before, first = self.rosters.get(name, {}), path[0].chain.round - 1
            same = before.get(first - 1) == path[0].parent
            older = {round: id for round, id in before.items() if round < first and same}
            self.rosters[name] = older | {block.chain.round - 1: block.id for block in path}

    def histories(self, round: int) -> int:
        """How many different rosters ended a round, as the histories of those living nodes have it that know it."""
        return len({self.rosters[name][round] for name in self.living if round in self.rosters.get(name, {})})

    def sent(self) -> int:
        """Bytes that all nodes sent since they began; those of earlier lives too."""
        return self._sent_before + sum(node.network.bytes_out for node in self.swarm.nodes.values())

    def validators_there(self) -> int:
        """How many of the validators run and are not frozen, as one of the living nodes has it."""
        for name in self.living:
            method = self.swarm.nodes[name].method
            if isinstance(method, Open) and method.store.stands:
                living = {self.swarm.peer(each) for each in self.living}
                return len(living.intersection(method.store.block.chain.validators))
        return 0

    def look_at(self, round: int, seconds: float = 0.0) -> Round:
        """What the living nodes tell of a round as of now."""
        events = [event for name in self.living if (event := self._told(name, round)) is not None]
        members = sorted(event["members"] for event in events)
        return Round(
            round,
            seconds,
            len(self.living),
            len(events),
            len({event["state_hash"] for event in events}),
            members[len(members) // 2] if members else 0,
            float(np.mean([event["loss"] for event in events])) if events else float("nan"),
        )

    def agree(self) -> bool:
        """Whether no living node is more than a round behind most, and all told one hash of the last common round."""
        told = [self.swarm.nodes[name].rounds for name in self.living]
        lowest = min((max(rounds, default=-1) for rounds in told), default=-1)
        return lowest >= self.height() - 1 and self.look_at(lowest).hashes == 1

    async def churn(self, churn: Churn) -> None:
        """What happens to the swarm in one round."""
        for name in list(self.frozen):
            self.frozen[name] -= 1
            if not self.frozen[name]:
                del self.frozen[name]
                self._thaw(name)
        for _ in range(self._count(churn.freeze)):
            name = self.random.choice(self.living)
            self.frozen[name] = 2
            self._before[name] = len(self.swarm.nodes[name].events)
            self.swarm.world.freeze(self.swarm.peer(name))
            self._note("freeze")
        for _ in range(self._count(churn.die)):
            name = self._go()
            self.swarm.kill(name)
            self._note("die")
        for _ in range(self._count(churn.leave)):
            name = self._go()
            self.nursery.start_soon(self.swarm.leave, name)
            self._note("leave")
        for _ in range(self._count(churn.join)):
            self.nursery.start_soon(self._join, self._newcomer(churn), self.random.choice(self.living))
            self._note("join")

    def thaw_all(self) -> None:
        for name in self.frozen:
            self._thaw(name)
        self.frozen.clear()

    def _thaw(self, name: str) -> None:
        """Let a node go on. A frozen process tells nothing; here it was only cut off, so what it told is struck out."""
        events, before = self.swarm.nodes[name].events, self._before.pop(name)
        events[before:] = [event for event in events[before:] if event["event"] != "round"]
        self.swarm.world.thaw(self.swarm.peer(name))

    def _count(self, share: float) -> int:
        """`share` of the nodes: rounded up or down by chance."""
        return int(share * self.nodes + self.random.random())

    def _go(self) -> str:
        name = self.random.choice(self.living)
        self.names.remove(name)
        self.gone.append(name)
        return name

    def _newcomer(self, churn: Churn) -> str:
        back = [name for name in self.gone if self.swarm.nodes[name].network.ended]
        if back and self.random.random() < churn.returning:
            name = self.random.choice(back)
            self.gone.remove(name)
            return name
        self._named += 1
        return f"n{self._named}"

    async def _join(self, name: str, through: str) -> None:
        if name in self.swarm.nodes:
            self._sent_before += self.swarm.nodes[name].network.bytes_out
            self.rosters.pop(name, None)
        await self.swarm.start(name, join=through)
        self.names.append(name)

    def _note(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1
