"""Attacks on the replicated state: false records, more records than anybody may keep, and lies about what one holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar

import trio
from harness import Adversary
from statenodes import RUN, now, signed
from stateswarm import Attacker, StateSwarm

from swarmnode.crdt import encoding
from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.kinds import KINDS
from swarmnode.crdt.ranges import RankSet
from swarmnode.crdt.reconcile import Responder
from swarmnode.crdt.reconcile_frames import NONCE_SIZE
from swarmnode.crdt.record import Record
from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.state.wire import Elements, RepairAnswer, RepairStep, StateFetch

YEAR = 365 * 86_400_000  # ms


class StateAdversary(Adversary):
    """Two attackers push to every honest node in turn, while honest nodes go on writing."""

    rounds: ClassVar[int] = 60

    def victims(self, target: StateSwarm) -> list[str]:
        """Those that are attacked: they must come to have nothing to do with the attackers."""
        return target.targets

    async def attack(self, target: StateSwarm) -> None:
        self.prepare(target)
        for number in range(self.times(self.rounds, 6)):
            await target.write(number)
            for attacker in target.attackers:
                for place, victim in enumerate(target.targets):
                    await attacker.push(victim, *self.elements(target, attacker, number, place))
            await trio.sleep(0.2)

    def prepare(self, target: StateSwarm) -> None:
        """Make what the attack needs."""

    def elements(self, target: StateSwarm, attacker: Attacker, number: int, place: int) -> Iterator[bytes]:
        """What to push to the victim at `place` in round `number`."""
        raise NotImplementedError


def resigned(record: Record, signature: bytes, *, author: str | None = None) -> Record:
    """`record` with another signature, and author."""
    fields = (record.v, record.run, author or record.author, record.key, record.hlc, record.ttl, record.value)
    return Record(*fields, signature)


class Unsigned(StateAdversary):
    name = "records without a signature, or with one of zeros"

    def elements(self, target: StateSwarm, attacker: Attacker, number: int, place: int) -> Iterator[bytes]:
        record = attacker.signs(f"note/{number % 60}", place)
        yield resigned(record, b"" if number % 2 else bytes(64)).sealed


class WrongAuthor(StateAdversary):
    name = "records in the name of another, signed by oneself"

    def elements(self, target: StateSwarm, attacker: Attacker, number: int, place: int) -> Iterator[bytes]:
        record = attacker.signs("member", {"addresses": (f"/ip4/6.6.6.6/tcp/{number}",)}, ahead=1000)
        victim = target.targets[(place + 1) % len(target.targets)]
        yield resigned(record, record.signature, author=victim).sealed


class Equivocation(StateAdversary):
    name = "one thing said to each node, under one write-once key"

    def elements(self, target: StateSwarm, attacker: Attacker, number: int, place: int) -> Iterator[bytes]:
        yield attacker.signs(f"commit/{number:08d}/0", place).sealed


class YearAhead(StateAdversary):
    name = "records dated a year ahead"

    def elements(self, target: StateSwarm, attacker: Attacker, number: int, place: int) -> Iterator[bytes]:
        yield attacker.signs(f"note/{number % 60}", place, ahead=YEAR).sealed


class Oversize(StateAdversary):
    name = "records of 100 KB"

    def elements(self, target: StateSwarm, attacker: Attacker, number: int, place: int) -> Iterator[bytes]:
        note = KINDS["note"]
        fields = {
            "v": 1,
            "run": RUN,
            "author": attacker.me,
            "key": f"note/{number % 60}",
            "hlc": stamp_at(now()),
            "ttl": note.ttl,
            "value": bytes(100_000),
        }
        payload = encoding.encode(fields, max_size=1 << 20)
        signature = attacker.peer.network.sign(b"swarmnode/record/1\0" + payload)
        yield encoding.encode((payload, signature), max_size=1 << 20)


class OneAuthorFloods(StateAdversary):
    name = "100 000 records by one author"
    batch = 500

    def victims(self, target: StateSwarm) -> list[str]:
        return target.targets[: self.times(len(target.targets))]  # in the short form they take as much each

    async def attack(self, target: StateSwarm) -> None:
        """As fast as they are taken, to all nodes in turn, newer and newer ones under new and old keys."""
        attacker, total, victims = target.attackers[0], self.times(100_000), self.victims(target)
        for number in range(total // self.batch):
            if number % 10 == 0:
                await target.write(number)
            many = (attacker.signs(f"note/{number}-{i % 100}", i) for i in range(self.batch))
            victim = victims[number % len(victims)]
            await attacker.push(victim, *(record.sealed for record in many))
        del target.attackers[1:]  # the others did nothing


class ManyAuthors(StateAdversary):
    name = "10 000 authors with a few records each"
    batch = 100  # authors

    async def attack(self, target: StateSwarm) -> None:
        total = self.times(10_000)
        for number in range(total // self.batch):
            if number % 10 == 0:
                await target.write(number)
            authors = [target.swarm.world.node(f"sybil {number} {i}") for i in range(self.batch)]
            sealed = [
                signed(author, key, {"addresses": ()}, at=now()).sealed
                for author in authors
                for key in ("member", "note/a", "note/b")
            ]
            async with trio.open_nursery() as nursery:
                for attacker in target.attackers:
                    for victim in target.targets:
                        nursery.start_soon(attacker.push, victim, *sealed)


class LyingReconciler(StateAdversary):
    name = "names 20 000 records that nobody made, others in each frame, and begins repairs for ever"

    def prepare(self, target: StateSwarm) -> None:
        for attacker in target.attackers:
            self._serve(attacker)

    def _serve(self, attacker: Attacker) -> None:
        rng = random.Random(attacker.me)
        sessions: dict[int, Responder] = {}
        count = self.times(20_000, 1_000)

        def invented() -> RankSet:
            expiry = stamp_at(now() + 60_000)
            stamps = (expiry + rng.getrandbits(30) for _ in range(count))
            return RankSet(sorted(stamp.to_bytes(8, "big") + rng.randbytes(32) for stamp in stamps))

        async def on_step(peer: str, step: RepairStep) -> RepairAnswer:
            new = Responder(RankSet(), cutoff=now(), nonce=bytes(NONCE_SIZE))
            responder = sessions.setdefault(step.session, new)
            responder._ranks = invented()
            return RepairAnswer(responder.receive(step.frame), now())

        async def on_fetch(peer: str, fetch: StateFetch) -> Elements:
            return Elements()

        attacker.peer.rpc.serve("state.repair", RepairStep, on_step)
        attacker.peer.rpc.serve("state.fetch", StateFetch, on_fetch)

    async def attack(self, target: StateSwarm) -> None:
        """Besides answering falsely: begin repairs with everybody, and stay in each."""
        self.prepare(target)
        rng = random.Random(1)
        for number in range(self.times(400, 120)):
            if number % 20 == 0:
                await target.write(number)
            for attacker in target.attackers:
                victim = target.targets[number % len(target.targets)]
                frame = b"\x01" + now().to_bytes(6, "big") + rng.randbytes(NONCE_SIZE) + rng.randbytes(16)
                try:
                    await attacker.peer.rpc.call(
                        victim, "state.repair", RepairStep(RUN, number, frame), RepairAnswer, timeout=5
                    )
                    for _ in range(3):
                        junk = bytes([4]) + rng.randbytes(200)
                        await attacker.peer.rpc.call(
                            victim, "state.repair", RepairStep(RUN, number, junk), RepairAnswer, timeout=5
                        )
                except CallError:
                    continue
            await trio.sleep(0.2)


def everyone() -> list[StateAdversary]:
    return [
        Unsigned(),
        WrongAuthor(),
        Equivocation(),
        YearAhead(),
        Oversize(),
        OneAuthorFloods(),
        ManyAuthors(),
        LyingReconciler(),
    ]
