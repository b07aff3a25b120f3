"""A peer that lies in a repair makes bounded work, is told nothing more, and keeps nobody from the truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from simnodes import RUN, connect, now
from statenodes import StateNode, start

from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.ranges import RANK, RankSet
from swarmnode.crdt.reconcile import Responder
from swarmnode.crdt.reconcile_frames import NONCE_SIZE
from swarmnode.protocols.calls.rpc import Refused, Rpc
from swarmnode.protocols.state.intake import ELEMENTS
from swarmnode.protocols.state.repair import OPENINGS, SESSIONS
from swarmnode.protocols.state.sync import AT_ONCE, REPAIR_EVERY, REPAIR_WITHIN
from swarmnode.protocols.state.wire import (
    MAX_BATCH,
    MAX_ELEMENTS,
    MAX_RANKS,
    Elements,
    OwnElements,
    Push,
    Pushed,
    RepairAnswer,
    RepairStep,
    StateFetch,
)
from swarmnode.protocols.wire import RunQuery, WireError
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]


class Liar:
    """Answers repairs by `frame(step)`, and fetches by `give(ranks)`, `slow` seconds later."""

    def __init__(
        self,
        world: SimWorld,
        frame: Callable[[RepairStep], bytes],
        give: Callable[[bytes], tuple[bytes, ...]],
        *,
        name: str = "liar",
        slow: float = 0.0,
    ) -> None:
        self.network = world.node(name)
        self.rpc = Rpc(self.network)
        self.steps = self.fetches = 0

        async def on_step(peer: str, step: RepairStep) -> RepairAnswer:
            self.steps += 1
            return RepairAnswer(frame(step), now())

        async def on_fetch(peer: str, fetch: StateFetch) -> Elements:
            self.fetches += 1
            await trio.sleep(slow)
            return Elements(give(fetch.ranks))

        async def on_push(peer: str, push: Push) -> Pushed:
            return Pushed(push.ranks)

        async def on_own(peer: str, query: RunQuery) -> OwnElements:
            return OwnElements((), now())

        self.rpc.serve("state.repair", RepairStep, on_step)
        self.rpc.serve("state.fetch", StateFetch, on_fetch)
        self.rpc.serve("state.push", Push, on_push)
        self.rpc.serve("state.own", RunQuery, on_own)

    async def run(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.network.run)
        await nursery.start(self.rpc.run)

    @property
    def me(self) -> str:
        return self.network.me


def invented(count: int, seed: int = 0) -> RankSet:
    """Ranks of elements that nobody ever made."""
    rng = random.Random(seed)
    expiry = stamp_at(now() + 60_000)
    return RankSet(sorted((expiry + rng.getrandbits(30)).to_bytes(8, "big") + rng.randbytes(32) for _ in range(count)))


def inventing(count: int, *, anew: bool) -> Callable[[RepairStep], bytes]:
    """Answers as an honest responder over invented ranks; `anew`: others in each frame."""
    sessions: dict[int, Responder] = {}
    seeds = iter(range(1 << 30))
    ranks = invented(count)

    def frame(step: RepairStep) -> bytes:
        responder = sessions.setdefault(step.session, Responder(ranks, cutoff=now(), nonce=bytes(NONCE_SIZE)))
        if anew:
            responder._ranks = invented(count, next(seeds))
        return responder.receive(step.frame)

    return frame


LIES: dict[str, Callable[[], Callable[[RepairStep], bytes]]] = {
    "names what it has not": lambda: inventing(5_000, anew=False),
    "names something else each time": lambda: inventing(300, anew=True),
    "says nonsense": lambda: lambda step: b"\xff" * 500,
    "says nothing": lambda: lambda step: b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_responder_ends_is_shunned_and_keeps_nobody_from_the_truth(simulated: Simulated, lie: str) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, honest = await start(nursery, world, 2)
        liar = Liar(world, LIES[lie](), lambda ranks: ())
        await liar.run(nursery)
        await connect([(node, honest)])
        await node.network.connect(liar.me)
        await trio.sleep(60)
        steps = liar.steps
        assert 1 <= steps <= 64
        assert not node.sync.neighbours.trusts(liar.me)
        await trio.sleep(5 * REPAIR_EVERY)
        assert liar.steps == steps
        record = await honest.sync.write("note/a", 1)
        await trio.sleep(2)
        assert node.state.has(record.rank)
        assert node.sync.neighbours.trusts(honest.me)

    simulated(main)


def test_who_once_has_nothing_left_of_what_it_named_is_no_liar(simulated: Simulated) -> None:
    """Newer ones displace all of a round while one of both is frozen: with eight nodes that is forty elements."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await start(nursery, world, 1)
        ranks = [invented(40, 1), invented(0), invented(40, 2), invented(40, 3)]
        sessions: dict[int, Responder] = {}

        def frame(step: RepairStep) -> bytes:
            new = Responder(ranks[0], cutoff=now(), nonce=bytes(NONCE_SIZE))
            return sessions.setdefault(step.session, new).receive(step.frame)

        peer = Liar(world, frame, lambda ranks: ())
        await peer.run(nursery)
        await node.network.connect(peer.me)
        for honest in (True, True, True, False):
            await node.sync.repair_with(peer.me)
            assert (node.sync.violations.count(peer.me) == 0) is honest
            assert node.sync.neighbours.trusts(peer.me) is honest
            ranks.pop(0)

    simulated(main)


def test_one_that_answers_a_fetch_with_forgeries_is_shunned(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, author = await start(nursery, world, 2)
        genuine = author.signs("note/a", 1)
        fields = (getattr(genuine, name) for name in ("v", "run", "author", "key", "hlc", "ttl", "value"))
        forged = type(genuine)(*fields, b"x" * 64)
        ranks = RankSet([genuine.rank])
        responders: dict[int, Responder] = {}

        def frame(step: RepairStep) -> bytes:
            new = Responder(ranks, cutoff=now(), nonce=bytes(NONCE_SIZE))
            return responders.setdefault(step.session, new).receive(step.frame)

        liar = Liar(world, frame, lambda ranks: (forged.sealed,))
        await liar.run(nursery)
        await node.network.connect(liar.me)
        await trio.sleep(8 * REPAIR_EVERY)
        assert not node.state.has(genuine.rank)
        assert node.sync.violations.count(liar.me) >= 2

    simulated(main)


def test_going_on_with_a_repair_that_was_forgotten_is_no_offence(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await start(nursery, world, 1)
        slow = Liar(world, lambda step: b"", lambda ranks: ())
        await slow.run(nursery)
        await slow.network.connect(node.me)
        with pytest.raises(Refused, match="ended here"):
            await slow.rpc.call(node.me, "state.repair", RepairStep(RUN, 7, b"\x04"), RepairAnswer, timeout=1)
        assert node.sync.violations.count(slow.me) == 0

    simulated(main)


def test_one_that_begins_repairs_for_ever_is_turned_away(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, honest = await start(nursery, world, 2)
        liar = Liar(world, lambda step: b"", lambda ranks: ())
        await liar.run(nursery)
        await liar.network.connect(node.me)
        refused = 0
        for session in range(60):
            try:
                await liar.rpc.call(
                    node.me, "state.repair", RepairStep(RUN, session, hello(session)), RepairAnswer, timeout=1
                )
            except Refused:
                refused += 1
        assert refused >= 60 - OPENINGS.burst - 1
        await connect([(honest, node)])
        await honest.sync.write("note/a", 1)
        await trio.sleep(2)
        assert node.hash() == honest.hash()

    def hello(session: int) -> bytes:
        return b"\x01" + now().to_bytes(6, "big") + session.to_bytes(NONCE_SIZE, "big") + b"f" * 16

    simulated(main)


def test_ranks_that_are_offered_count_against_the_share_of_who_offers_them(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await start(nursery, world, 1)
        liar = Liar(world, lambda step: b"", lambda ranks: ())
        await liar.run(nursery)
        rng, refused = random.Random(0), 0

        async def offer() -> None:
            nonlocal refused
            try:
                push = Push(RUN, (), rng.randbytes(MAX_RANKS * RANK))
                await liar.rpc.call(node.me, "state.push", push, Pushed, timeout=10)
            except Refused:
                refused += 1

        began, pushes = trio.current_time(), 60
        for _ in range(pushes):
            await offer()
        share = ELEMENTS.burst + ELEMENTS.rate * (trio.current_time() - began)
        assert pushes * MAX_RANKS <= share + MAX_RANKS and not refused, "who waits for the answers is slowed only"
        async with trio.open_nursery() as offers:
            for _ in range(20):
                offers.start_soon(offer)
        assert refused and node.sync.violations.count(liar.me)

    simulated(main)


@pytest.mark.parametrize("sealed", [(b"",) * (MAX_ELEMENTS + 1), (bytes(MAX_BATCH // 4),) * 5], ids=["many", "large"])
def test_more_elements_than_a_message_may_hold_are_not_looked_at(
    sealed: tuple[bytes, ...], simulated: Simulated
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await start(nursery, world, 1)
        liar = Liar(world, lambda step: b"", lambda ranks: ())
        await liar.run(nursery)
        push = Push(RUN)
        object.__setattr__(push, "sealed", sealed)
        with pytest.raises(Refused) as refused:
            await liar.rpc.call(node.me, "state.push", push, Pushed, timeout=10)
        assert refused.value.code == "malformed" and node.rpc.violations.count(liar.me)
        assert not node.sync.violations.count(liar.me), "they were parsed"
        for answer in (Elements, partial(OwnElements, time=0)):
            with pytest.raises(WireError, match="more than"):
                answer(sealed)

    simulated(main)


def test_the_session_that_rests_longest_makes_room_and_none_that_is_worked_on(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node,) = await start(nursery, world, 1)
        await node.sync.write("note/a", 1)
        peers = []
        for number in range(SESSIONS + 2):
            network = world.node(f"peer {number}")
            rpc = Rpc(network)
            await nursery.start(network.run)
            await nursery.start(rpc.run)
            peers.append(rpc)
        frame = b"\x01" + now().to_bytes(6, "big") + bytes(NONCE_SIZE) + b"f" * 16

        async def begin(rpc: Rpc, session: int = 1) -> Any:
            return await rpc.call(node.me, "state.repair", RepairStep(RUN, session, frame), RepairAnswer, timeout=5)

        repair, first, last = node.sync._repair, peers[0]._network.me, peers[-1]._network.me
        for rpc in peers[:-1]:
            await begin(rpc)
        assert len(repair._sessions) == SESSIONS and first not in repair._sessions
        inline, go_on = repair._runner, trio.Event()

        async def slow(work: Callable[[], Any]) -> Any:
            await go_on.wait()
            return await inline(work)

        repair._runner = slow
        async with trio.open_nursery() as steps:
            for rpc in peers[:SESSIONS]:
                steps.start_soon(begin, rpc, 2)
            await trio.sleep(1)
            with pytest.raises(Refused) as refused:
                await begin(peers[-1])
            assert refused.value.code == "busy"
            go_on.set()
        assert len(repair._sessions) == SESSIONS
        await begin(peers[-1])
        assert len(repair._sessions) == SESSIONS and last in repair._sessions

    simulated(main)


def test_a_whole_state_travels_in_bounded_messages(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        old, joiner = await start(nursery, world, 2)
        authors = [StateNode.make(world.node(f"author {number}")) for number in range(20)]
        for author in authors:
            await old.state.merge([author.signs(f"note/{i}", "x" * 1000) for i in range(60)])
        await connect([(joiner, old)])
        await trio.sleep(30)
        assert joiner.hash() == old.hash()
        assert (await joiner.state.stats()).elements == 1200

    simulated(main)


def test_those_who_give_at_a_crawl_do_not_keep_a_node_from_repairing_with_others(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, honest = await start(nursery, world, 2, loss=1.0)
        known = (await victim.sync.write("note/known", 1)).sealed

        frame = inventing(5_000, anew=False)
        liars = [Liar(world, frame, lambda ranks: (known,), name=f"liar {n}", slow=15) for n in range(AT_ONCE)]
        for liar in liars:
            await liar.run(nursery)
            await liar.network.connect(victim.me)
        await trio.sleep(3)
        await honest.network.connect(victim.me)
        await trio.sleep(3)
        honest.sync.repair_with = victim_only  # type: ignore[assignment,method-assign]
        record = await honest.sync.write("note/late", 1)
        await trio.sleep(1.3 * REPAIR_EVERY)
        assert victim.state.has(record.rank)
        await trio.sleep(REPAIR_WITHIN)
        assert not any(liar.me in victim.sync._repairing for liar in liars)

    async def victim_only(peer: str) -> None:
        """Whoever is not the victim begins no repair."""

    simulated(main)
