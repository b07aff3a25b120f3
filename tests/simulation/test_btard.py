"""Members that banned somebody go on without it, whoever leads and whether or not that one is still there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from simswarm import RUN, SimSwarm, simulate

from swarmnode.protocols.calls.rpc import CallError
from swarmnode.protocols.methods.btard.method import Btard, Proof
from swarmnode.protocols.methods.btard.statements import LieEvidence, Opening, convicts, seal
from swarmnode.protocols.methods.known.messages import RoundHead, Summon
from swarmnode.protocols.wire import Empty
from swarmnode.testing.simnet import SimWorld, run_with_nursery

HONEST, BANNED = ("a", "b", "c", "d"), "e"
USUAL = 10.0  # virtual seconds in which a round ends, many times over


def test_nobody_is_waited_for_who_would_not_be_let_in() -> None:
    """It answers pings and has a vote, and no leader knows yet how long stragglers take: they took a minute."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.begin((*HONEST, BANNED))
        await swarm.until(lambda: all(node.session.place is not None for node in swarm.nodes.values()), within=60)
        for name in HONEST:
            method = swarm.nodes[name].method
            assert isinstance(method, Btard)
            method.bans.convict(swarm.peer(BANNED), "was seen to lie")
        for round in range(4):
            await swarm.round_done(round, *HONEST, within=USUAL)
            assert len({swarm.nodes[name].rounds[round]["state_hash"] for name in HONEST}) == 1

    simulate(body, world=SimWorld(latency=0.02), method="btard", steps=2)


def test_who_held_no_proof_takes_the_others_word_though_it_alone_has_a_vote_and_the_liar_calls_it() -> None:
    """In the first round only its creator has a vote. The banned one summons it to its own ballots, again and again."""

    async def main(nursery: trio.Nursery) -> None:
        swarm = SimSwarm(nursery, world=SimWorld(latency=0.02), method="btard", steps=2)
        await swarm.begin((*HONEST, BANNED))
        await swarm.until(lambda: all(node.session.place is not None for node in swarm.nodes.values()), within=60)
        nursery.start_soon(summon, swarm)
        for name in HONEST[1:]:
            method = swarm.nodes[name].method
            assert isinstance(method, Btard)
            method.bans.convict(swarm.peer(BANNED), "was seen to lie")
        await swarm.round_done(0, *HONEST, within=2 * USUAL)
        assert len({swarm.nodes[name].rounds[0]["state_hash"] for name in HONEST}) == 1

    run_with_nursery(main)


def test_who_proves_that_a_stranger_lies_has_nobody_banned_and_nothing_written() -> None:
    """Anybody can sign two things with a key that nobody has."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.round_done(0, *HONEST)
        stranger = swarm.world.node("stranger")
        one, two = (seal(Opening(bytes([n] * 32)), stranger.me, b"attempt", b"life", stranger.sign) for n in (1, 2))
        method = swarm.nodes["a"].method
        assert isinstance(method, Btard)
        assert convicts(LieEvidence(one, two), stranger.verify) == stranger.me
        await method._take_proof(swarm.peer("b"), Proof(RUN, LieEvidence(one, two)))
        assert not method.bans.convicted
        one, two = (
            seal(Opening(bytes([n] * 32)), swarm.peer("c"), b"attempt", b"life", swarm.world.node("c").sign)
            for n in (1, 2)
        )
        await method._take_proof(swarm.peer("b"), Proof(RUN, LieEvidence(one, two)))
        assert method.bans.convicted.keys() == {swarm.peer("c")}

    simulate(body, *HONEST, world=SimWorld(latency=0.02), method="btard", steps=2)


@pytest.mark.parametrize("method", ["btard", "diloco"])
def test_one_that_summons_the_others_without_end_holds_up_nobody(method: str) -> None:
    """It is what Paxos calls a duel of proposers, and proves no lie."""

    async def main(nursery: trio.Nursery) -> None:
        swarm = SimSwarm(nursery, world=SimWorld(latency=0.02), method=method, steps=2)
        await swarm.begin((*HONEST, BANNED))
        await swarm.round_done(1, *HONEST, within=60)
        for name in HONEST:
            nursery.start_soon(summon, swarm, name)
        for round in range(2, 6):
            await swarm.round_done(round, *HONEST, within=USUAL)

    run_with_nursery(main)


async def summon(swarm: SimSwarm, name: str = "a") -> None:
    """Call one to the next ballot that the banned one leads, five times a second."""
    acceptor, me = swarm.nodes[name].agreement.acceptor, swarm.peer(BANNED)
    rpc = swarm.nodes[BANNED].method._parts.rpc  # type: ignore[attr-defined]
    while True:
        candidates, ballot = acceptor.candidates(), acceptor.ballot + 1
        if me in candidates:
            ballot += (candidates.index(me) - ballot) % len(candidates)
            call = Summon(acceptor.run_id, acceptor.position.round, ballot)
            with suppress(CallError):
                await rpc.call(swarm.peer(name), "round.summon", call, RoundHead, timeout=1.0)
        await trio.sleep(0.2)


def test_a_liar_that_is_banned_twice_while_members_compute_is_named_once() -> None:
    """By the proof that it gives of itself, and by the record of that: no computation can be cancelled meanwhile."""

    async def slow(work: Callable[[], Any]) -> Any:
        with trio.CancelScope(shield=True):
            await trio.sleep(12)
        return work()

    async def body(swarm: SimSwarm) -> None:
        await swarm.begin((*HONEST, BANNED))
        await swarm.round_done(0, *HONEST)
        reducers = [swarm.nodes[name].method.allreduce for name in HONEST]  # type: ignore[attr-defined]
        usual = [reducer._parts for reducer in reducers]
        for reducer in reducers:
            reducer._parts = replace(reducer._parts, runner=slow)
        with trio.fail_after(60):
            while not all(reducer._pending is not None for reducer in reducers):  # noqa: ASYNC110 (no event tells it)
                await trio.sleep(0.1)
        liar = swarm.nodes[BANNED].method
        assert isinstance(liar, Btard)
        said = (
            seal(Opening(nonce), liar._parts.me, b"a" * 32, b"l" * 16, liar._parts.network.sign)
            for nonce in (b"1", b"2")
        )
        proof = Proof(RUN, LieEvidence(*said))
        for name in HONEST:
            await liar._parts.rpc.call(swarm.peer(name), "btard.proof", proof, Empty, timeout=5)
        await trio.sleep(60)
        for name in HONEST:
            method = swarm.nodes[name].method
            assert isinstance(method, Btard) and swarm.peer(BANNED) in method.bans.convicted
        for reducer, parts in zip(reducers, usual, strict=True):
            reducer._parts = parts
        await swarm.round_done(max(swarm.nodes["a"].rounds) + 1, *HONEST)

    simulate(body, world=SimWorld(latency=0.02), method="btard", steps=2)
