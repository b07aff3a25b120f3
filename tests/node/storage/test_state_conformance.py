"""What every state backend promises to protocols: in memory and on disk, the same."""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.crdt.encoding import Value
from swarmnode.crdt.hlc import ENOUGH, MAX_AHEAD, MAX_OFF, stamp_at, time_of
from swarmnode.crdt.kinds import DAY, KINDS
from swarmnode.crdt.law import EVERYBODY, Merged
from swarmnode.crdt.ranges import END, START, RankSet
from swarmnode.crdt.record import Element, Evidence, InvalidRecord, Record, write
from swarmnode.node.identity import peer_id_of
from swarmnode.node.storage.statestore import StateStore
from swarmnode.protocols.runner import inline
from swarmnode.protocols.state.backend import AlreadyWritten, StateBackend, StateError
from swarmnode.testing.memorystate import MemoryState, clocks_of
from swarmnode.testing.simnet import run_simulation
from swarmnode.testing.state import State

RUN = "ab" * 32
START_TIME = 1_800_000_000_000  # ms
Make = Callable[..., Any]


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a jumping clock."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_simulation(lambda: test(**fixtures))

    return run


class Author:
    """Somebody with a key, who dates records as told."""

    def __init__(self, seed: int) -> None:
        self.key = Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32, "big"))
        self.id = peer_id_of(self.key.public_key().public_bytes_raw())

    def says(self, key: str, value: Value, time: int = START_TIME, counter: int = 0) -> Record:
        return write(RUN, self.id, key, value, hlc=stamp_at(time, counter), sign=self.key.sign)


ALICE, BOB, CAROL = Author(1), Author(2), Author(3)
ME = Author(9)


class Clock:
    def __init__(self) -> None:
        self.time = START_TIME

    def __call__(self) -> int:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Make]:
    """`async with make() as backend`: a running one; `admitted` may be given."""
    numbers = iter(range(100))

    @asynccontextmanager
    async def made(admitted: Container[str] = EVERYBODY) -> AsyncIterator[StateBackend]:
        backend: StateBackend
        if request.param == "memory":
            backend = MemoryState(RUN, me=ME.id, sign=ME.key.sign, clocks=clocks_of(clock), admitted=admitted)
        else:
            path = tmp_path / str(next(numbers)) / "state.db"
            backend = StateStore(
                path, RUN, me=ME.id, sign=ME.key.sign, clocks=clocks_of(clock), admitted=admitted, runner=inline
            )
        async with trio.open_nursery() as nursery:
            await nursery.start(backend.run)
            yield backend
            nursery.cancel_scope.cancel()

    yield made


def rank(element: Element) -> bytes:
    return element.rank


def mixed(seed: int, number: int) -> list[Element]:
    """Records of three authors and several kinds that displace and contradict one another, some of them expired."""
    draw = random.Random(seed)
    authors = (ALICE, BOB, CAROL)
    made: list[Element] = []
    for _ in range(number):
        author, time = draw.choice(authors), START_TIME - draw.randrange(90_000)
        key = draw.choice(["member", "vote", f"note/{draw.randrange(80)}", f"commit/{draw.randrange(90):08d}/0"])
        value: Value = draw.randrange(3) if key.startswith("commit") else draw.choice([None, draw.randrange(3)])
        made.append(author.says(key, value, time, draw.randrange(3)))
    return made


@simulated
async def test_what_is_merged_is_there(make: Make) -> None:
    async with make() as backend:
        one, two = ALICE.says("note/a", {"x": 1}), BOB.says("note/a", "hello")
        assert await backend.merge([one, two]) == [Merged.STORED, Merged.STORED]
        assert await backend.merge([two]) == [Merged.KNOWN]
        assert await backend.merge([]) == []
        assert await backend.get(ALICE.id, "note/a") == one
        assert await backend.get(ALICE.id, "note/b") is None
        assert [e.author for e in await backend.select("note/", limit=9)] == sorted([ALICE.id, BOB.id])
        assert await backend.select("note/a", author=BOB.id, limit=9) == [two]
        assert len(await backend.select(limit=1)) == 1
        assert await backend.select("not", author=CAROL.id, limit=9) == []
        assert backend.has(rank(one)) and not backend.has(bytes(40))
        assert await backend.sealed([rank(two), bytes(40), rank(one)]) == [two.sealed, one.sealed]
        later = ALICE.says("note/a", None, START_TIME + 1)
        assert await backend.merge([later, one]) == [Merged.STORED, Merged.OLDER]
        assert not backend.has(rank(one)) and await backend.sealed([rank(one)]) == []
        assert await backend.get(ALICE.id, "note/a") == later and later.tombstone
        stats = await backend.stats()
        assert (stats.elements, stats.authors, stats.kinds) == (2, 2, {"note": 2})
        assert stats.size == len(two.sealed) + len(later.sealed)


@simulated
async def test_authors_are_told_by_what_they_wrote_and_what_one_signed_last_by_rank(make: Make, clock: Clock) -> None:
    async with make() as backend:
        once = [BOB.says("commit/00000001/0", 1), BOB.says("commit/00000001/0", 2)]
        lease, vote = BOB.says("member", 1, START_TIME + 2), BOB.says("vote", 1, START_TIME + 3)
        note = BOB.says("note/a", 1, START_TIME + 1)
        await backend.merge([lease, *once, vote, note, ALICE.says("commit/00000001/0", 1)])
        assert await backend.authors("evidence") == {BOB.id} == await backend.authors("member")
        assert await backend.authors("commit/") == {ALICE.id, BOB.id}
        assert not await backend.authors("evidence/score")
        last = await backend.newest(BOB.id, 9)
        assert last[:3] == [rank(vote), rank(lease), rank(note)] and set(last[3:]) == set(map(rank, once))
        assert await backend.newest(BOB.id, 2) == last[:2]
        assert await backend.newest(CAROL.id, 9) == []
        clock.time += KINDS["member"].ttl + 10
        assert not await backend.authors("member")


@simulated
async def test_any_backend_agrees_with_the_law(make: Make, clock: Clock) -> None:
    for seed in range(4):
        heard = mixed(seed, 700)
        reference = State(RUN)
        for element in heard:
            reference.merge(element, clock.time)
        found = []
        for order in range(2):
            shuffled = random.Random(order).sample(heard, len(heard))
            async with make() as backend:
                while shuffled:
                    await backend.merge(shuffled[:97])
                    del shuffled[:90]
                cutoff = clock.time + 5_000
                records = [e for e in await backend.select(limit=10_000) if isinstance(e, Record)]
                assert sorted(records, key=lambda e: e.rank) == list(reference.held(clock.time))
                ranks = [rank(e) for e in await backend.select(limit=10_000) if e.expiry > cutoff]
                assert backend.snapshot(cutoff).keys(START, END) == sorted(ranks)
                held = [e for e in records if e.expiry > cutoff]
                found.append([e.id for e in held])
        assert found[0] == found[1]


@simulated
async def test_equal_states_have_equal_hashes_whatever_the_order(make: Make, clock: Clock) -> None:
    heard = [e for e in mixed(5, 400) if not e.key.startswith("commit")]
    reference = State(RUN)
    for element in heard:
        reference.merge(element, clock.time)
    cutoff = clock.time + 5_000
    hashes = {RankSet(rank(element) for element in reference.held(cutoff)).digest}
    for order in range(3):
        async with make() as backend:
            await backend.merge(random.Random(order).sample(heard, len(heard)))
            hashes.add(backend.snapshot(cutoff).digest)
    assert len(hashes) == 1


@simulated
async def test_verdicts_are_those_of_the_law(make: Make) -> None:
    async with make() as backend:
        ahead = ALICE.says("note/a", 1, START_TIME + MAX_AHEAD + 1)
        expired = ALICE.says("note/a", 1, START_TIME - KINDS["note"].ttl)
        assert await backend.merge([ahead, expired]) == [Merged.AHEAD, Merged.EXPIRED]
        slots = KINDS["note"].slots
        notes = [ALICE.says(f"note/{i}", i, START_TIME, i + 1) for i in range(slots)]
        assert set(await backend.merge(notes)) == {Merged.STORED}
        assert await backend.merge([ALICE.says("note/x", 1, START_TIME, 0)]) == [Merged.QUOTA]
        assert await backend.merge([ALICE.says("note/x", 1, START_TIME, 999)]) == [Merged.STORED]
        assert not backend.has(rank(notes[0])) and backend.has(rank(notes[1]))


@simulated
async def test_equivocation_becomes_evidence_by_itself(make: Make) -> None:
    one, two = ALICE.says("commit/00000001/0", 1), ALICE.says("commit/00000001/0", 2, counter=5)
    for batches in ([[one], [two]], [[one, two]], [[two], [one]]):
        async with make() as backend:
            with backend.watch("evidence/") as changes:
                for batch in batches:
                    assert set(await backend.merge(batch)) == {Merged.STORED}
                evidence = (await changes.receive()).element
            assert isinstance(evidence, Evidence) and (evidence.greater, evidence.lesser) == (two, one)
            assert await backend.get(ALICE.id, "evidence/commit") == evidence
            assert backend.has(rank(evidence))
            assert await backend.merge([evidence]) == [Merged.KNOWN]
            third = ALICE.says("commit/00000001/0", 3, counter=9)
            await backend.merge([third])
            assert (await backend.stats()).kinds == {"commit": 3, "evidence": 1}  # one proof is enough
        async with make() as backend:
            assert await backend.merge([evidence]) == [Merged.STORED]


@simulated
async def test_what_expired_is_gone_and_does_not_come_back(make: Make, clock: Clock) -> None:
    async with make() as backend:
        lease, note = ALICE.says("member", {"addresses": ()}), ALICE.says("note/a", 1)
        await backend.merge([lease, note])
        assert len(backend.snapshot(lease.expiry - 1)) == 2
        assert len(backend.snapshot(lease.expiry)) == 1
        before = backend.snapshot(clock.time)
        clock.time = lease.expiry
        assert await backend.get(ALICE.id, "member") is None
        assert await backend.select(limit=9) == [note]
        assert await backend.sweep() == 1
        assert not backend.has(rank(lease)) and backend.has(rank(note))
        clock.time -= 30_000
        assert await backend.merge([lease]) == [Merged.EXPIRED]
        clock.time -= DAY
        assert await backend.merge([lease]) == [Merged.AHEAD]
        assert before.keys(START, END) == sorted([rank(lease), rank(note)]), "a snapshot stays as it was"
        clock.time = note.expiry
        assert await backend.sweep() == 1
        assert (await backend.stats()).elements == 0


@simulated
async def test_a_clock_that_was_ahead_and_is_set_right_takes_every_lease(make: Make, clock: Clock) -> None:
    async with make() as backend:
        clock.time += 45 * 60_000
        await backend.merge([ALICE.says("note/a", 1)])
        await backend.sweep()
        clock.time -= 45 * 60_000
        assert await backend.merge([ALICE.says("member", 1)]) == [Merged.STORED]
        assert backend.has(rank(await backend.write("member", 1)))


@simulated
async def test_sweeping_needs_nobody(make: Make, clock: Clock) -> None:
    async with make() as backend:
        await backend.merge([ALICE.says("member", 1)])
        clock.time += DAY
        await trio.sleep(61)
        assert len(backend.snapshot(0)) == 0


@simulated
async def test_records_of_strangers_are_not_kept(make: Make) -> None:
    members = {ALICE.id}
    async with make(admitted=members) as backend:
        note, lease = BOB.says("note/a", 1), BOB.says("member", 1)
        mine = ALICE.says("note/a", 1)
        assert await backend.merge([note, mine, lease]) == [Merged.STRANGER, Merged.STORED, Merged.STRANGER]
        assert await backend.get(BOB.id, "note/a") is None
        assert not backend.has(rank(note)) and len(backend.snapshot(0)) == 1
        with pytest.raises(StateError, match="not admitted"):
            await backend.write("note/a", 1)


@simulated
async def test_own_records_are_later_than_all_that_was_seen(make: Make, clock: Clock) -> None:
    async with make() as backend:
        one = await backend.write("note/a", {"x": 1})
        assert one.author == ME.id and time_of(one.hlc) == clock.time
        await backend.merge([ALICE.says("note/a", 1, START_TIME + 40_000)])
        two = await backend.write("note/a", {"x": 2})
        assert time_of(two.hlc) == START_TIME + 40_000
        clock.time -= 10_000
        three = await backend.write("note/a", None)
        assert one.hlc < two.hlc < three.hlc
        assert await backend.get(ME.id, "note/a") == three and three.tombstone
        assert (await backend.stats()).clock == three.hlc
        with pytest.raises(InvalidRecord):
            await backend.write("nothing/a", 1)
        with pytest.raises(InvalidRecord):
            await backend.write("note/a", "x" * 4000)
        clock.time -= 30_000
        with pytest.raises(StateError, match="set back"):
            await backend.write("note/a", 1)


@simulated
async def test_a_node_says_one_thing_under_a_write_once_key(make: Make) -> None:
    async with make() as backend:
        said = await backend.write("commit/00000003/0", {"x": (1, 2)})
        assert await backend.write("commit/00000003/0", {"x": [1, 2]}) == said
        with pytest.raises(AlreadyWritten):
            await backend.write("commit/00000003/0", {"x": (1, 3)})
        async with trio.open_nursery() as nursery:

            async def say(value: int) -> None:
                try:
                    await backend.write("commit/00000004/0", value)
                except AlreadyWritten:
                    refused.append(value)

            refused: list[int] = []
            for value in range(5):
                nursery.start_soon(say, value)
        assert len(refused) == 4
        assert (await backend.stats()).kinds == {"commit": 2}


@simulated
async def test_a_node_whose_clock_peers_do_not_confirm_signs_nothing(make: Make) -> None:
    async with make() as backend:
        for number in range(ENOUGH):
            backend.clocks.record(f"peer {number}", backend.now() + 2 * MAX_OFF)
        with pytest.raises(StateError, match="60 s behind"):
            await backend.write("note/a", 1)
        for number in range(ENOUGH):
            backend.clocks.record(f"peer {number}", backend.now())
        await backend.write("note/a", 1)


@simulated
async def test_a_watcher_hears_what_is_stored_and_how_much_it_missed(make: Make) -> None:
    async with make() as backend:
        with backend.watch("note/") as notes, backend.watch() as everything:
            await backend.merge([ALICE.says("note/a", 1), ALICE.says("member", 1)])
            await backend.merge([ALICE.says("note/a", 1), ALICE.says("note/a", 0, START_TIME - 1)])
            mine = await backend.write("note/b", 1)
            assert [(await notes.receive()).element.key for _ in range(2)] == ["note/a", "note/b"]
            assert [(await everything.receive()).element.key for _ in range(3)] == ["note/a", "member", "note/b"]
            for count in range(400):
                await backend.merge([BOB.says("note/x", count, START_TIME, count)])
            lost = 0
            while lost == 0:
                change = await notes.receive()
                lost = change.lost
                if change.element.value == 255:
                    await backend.merge([BOB.says("note/x", -1, START_TIME + 1)])
            assert lost == 400 - 256 and change.element.value == -1
        with pytest.raises(trio.ClosedResourceError):
            await notes.receive()
        assert mine.key == "note/b"
