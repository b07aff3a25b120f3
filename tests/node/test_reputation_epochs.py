"""Ledgers that watch one another's attestations in the replicated state, in simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import trio

from swarmnode.crdt.record import write
from swarmnode.node.reputation import AT_ONCE, EPOCH, Reputation
from swarmnode.protocols.methods.method import Place
from swarmnode.protocols.reputation.attestation import Attestation, Saw, read
from swarmnode.protocols.reputation.ledger import Ledger
from swarmnode.protocols.reputation.observations import Promises
from swarmnode.testing.memorystate import MemoryState, clocks_of

pytestmark = pytest.mark.virtual_time

RUN = "cd" * 32
ME, BOB, CAT, ZOE = ("12D3KooW" + letter * 44 for letter in "ABCZ")


def now() -> int:
    return 1_700_000_000_000 + int(1000 * trio.current_time())


def sign(message: bytes) -> bytes:
    return bytes(64)


class Writer:
    """Writes to the state at once, as `StateSync.write` does once peers were asked."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state
        self.remembered = True

    async def write(self, key: str, value: Any) -> Any:
        return await self._state.write(key, value)


class Members:
    """As much of a membership as `Reputation` asks."""

    def members(self) -> tuple[str, ...]:
        return (BOB, CAT, ZOE)


class Sees:
    """As much of a method as `Reputation` asks: in which round it is, and what it saw in an epoch."""

    def __init__(self, round: int, **seen: int) -> None:
        self.place = Place(round, "", ())
        self._seen = seen

    def tell_ledger(self, ledger: Ledger) -> None:
        for peer, worth in self._seen.items():
            name = {"bob": BOB, "zoe": ZOE}[peer]
            ledger.observe(name, Saw.PROOF, good=max(0, worth), bad=max(0, -worth))


def watching(state: MemoryState, ledger: Ledger, method: Sees, sync: Writer | None = None) -> Reputation:
    watch = Reputation(
        ledger,
        state=state,
        sync=sync or Writer(state),  # type: ignore[arg-type]
        membership=Members(),  # type: ignore[arg-type]
        promises=Promises(),
    )
    watch.method = method  # type: ignore[assignment]
    return watch


def new() -> tuple[MemoryState, Ledger]:
    return MemoryState(RUN, me=ME, sign=sign, clocks=clocks_of(now)), Ledger(ME, now=now)


async def says(state: MemoryState, author: str, what: Attestation) -> None:
    hlc = now() << 16
    await state.merge([write(RUN, author, what.key, what.value, hlc=hlc, sign=sign)])


async def test_a_node_attests_what_it_saw_and_says_it_once() -> None:
    state, ledger = new()
    method = Sees(0, bob=8)
    watch = watching(state, ledger, method)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        await trio.sleep(1)
        for _ in range(4):
            method.place = replace(method.place, round=method.place.round + 1)
            await trio.sleep(EPOCH)
        said = [read(record) for record in await state.select("attestation/", limit=100)]  # type: ignore[arg-type]
        assert [(one.what.round, one.what.subject) for one in said] == [(1, BOB)]
        method.place = replace(method.place, round=method.place.round + 1)
        await trio.sleep(EPOCH)
        assert len(await state.select("attestation/", limit=100)) == 2
        nursery.cancel_scope.cancel()


async def test_a_node_without_a_place_keeps_the_round_that_it_knew() -> None:
    state, ledger = new()
    method = Sees(500)
    method.place = None  # type: ignore[assignment]
    ledger.close(499)
    await watching(state, ledger, method).end_epoch()
    assert ledger.round == 499


async def test_a_node_whom_nobody_told_what_it_said_attests_nothing_yet() -> None:
    state, ledger = new()
    writer = Writer(state)
    writer.remembered = False
    watch = watching(state, ledger, Sees(8, bob=8), writer)
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        await trio.sleep(2.5 * EPOCH)
        assert not await state.select("attestation/", limit=100)
        writer.remembered = True
        await trio.sleep(EPOCH)
        assert len(await state.select("attestation/", limit=100)) == 1
        nursery.cancel_scope.cancel()


async def test_others_words_are_heard_before_and_while_a_node_watches() -> None:
    state, ledger = new()
    for _ in range(6):
        for peer in (BOB, CAT):
            ledger.observe(peer, Saw.PROOF, good=8)
        ledger.close(0)
    await says(state, BOB, Attestation(3, ZOE, 900, 900, 40))
    watch = watching(state, ledger, Sees(3))
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        await says(state, CAT, Attestation(4, ZOE, 800, 900, 40))
        await trio.sleep(1)
        assert len(ledger.view()[ZOE].words) == 2
        assert 0.8 <= ledger.view()[ZOE].score <= 0.9
        nursery.cancel_scope.cancel()


async def test_others_have_their_turn_while_a_node_hears_all_that_was_said() -> None:
    state, ledger = new()
    for round in range(400):
        await says(state, BOB, Attestation(round, ZOE, 900, 900, 40))
    watch = watching(state, ledger, Sees(3))
    turns: list[int] = []

    async def take_turns() -> None:
        while True:
            turns.append(watch._counts["heard"])
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        await watch._read_all()
        turns.append(watch._counts["heard"])
        nursery.cancel_scope.cancel()
    assert 0 < max(b - a for a, b in pairwise(turns)) <= 2 * AT_ONCE  # trio draws the order of tasks


async def test_who_equivocates_in_attestations_is_not_heard_from_the_next_epoch_on() -> None:
    state, ledger = new()
    for _ in range(6):
        ledger.observe(BOB, Saw.PROOF, good=8)
        ledger.close(0)
    watch = watching(state, ledger, Sees(3))
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        await says(state, BOB, Attestation(3, ZOE, 900, 900, 40))
        await trio.sleep(1)
        assert ledger.view()[ZOE].score == 0.9
        await trio.sleep(1)
        await says(state, BOB, Attestation(3, ZOE, 0, 0, 40))
        state.select = None  # type: ignore[method-assign, assignment]  # no proof is parsed
        await watch.end_epoch()
        assert ledger.view()[ZOE].score == 0.0
        assert ledger.view()[ZOE].probation
        nursery.cancel_scope.cancel()


async def test_a_peer_that_goes_on_doing_harm_becomes_an_offender() -> None:
    state, ledger = new()
    watch = watching(state, ledger, Sees(0, zoe=-8, bob=8))
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        await trio.sleep(2.5 * EPOCH)
        assert not watch.violations.totals
        await trio.sleep(2 * EPOCH)
        assert watch.violations.count(ZOE) and not watch.violations.count(BOB)
        nursery.cancel_scope.cancel()


async def test_a_name_too_long_to_be_attested_is_passed_over() -> None:
    state, ledger = new()
    ledger.observe("x" * 200, Saw.PROOF, good=9)
    ledger.observe(BOB, Saw.PROOF, good=8)
    watch = watching(state, ledger, Sees(4))
    async with trio.open_nursery() as nursery:
        await nursery.start(state.run)
        await watch.end_epoch()
        assert [one.key.rpartition("/")[2] for one in await state.select("attestation/", limit=9)] == [BOB]
        nursery.cancel_scope.cancel()
