"""One state on all nodes: news spreads, repair mends, and what a peer sends is believed only where it is proved."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import trio
from simnodes import RUN, connect, now
from statenodes import StateNode, start

from swarmnode.crdt.hlc import MAX_OFF
from swarmnode.crdt.kinds import DAY
from swarmnode.crdt.law import Merged
from swarmnode.protocols.calls.rpc import Refused
from swarmnode.protocols.limits import Allowance
from swarmnode.protocols.peers.scoring import Standing
from swarmnode.protocols.state import intake
from swarmnode.protocols.state.backend import AlreadyWritten, StateError, Unwritable
from swarmnode.protocols.state.push import AUTHOR, EAGER, FIRST, LARGE
from swarmnode.protocols.state.sync import RECOVER_WITHIN, REPAIR_EVERY
from swarmnode.protocols.state.wire import OwnElements, Push, Pushed
from swarmnode.protocols.wire import RunQuery
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]


def rank(record: Any) -> bytes:
    return record.rank


def listen(node: StateNode) -> list[tuple[str, str, Any]]:
    """All calls that `node` makes from now on: method, peer, request."""
    calls: list[tuple[str, str, Any]] = []
    inner = node.rpc.call

    async def call(peer: str, method: str, request: Any, reply: type[Any], *, timeout: float) -> Any:
        calls.append((method, peer, request))
        return await inner(peer, method, request, reply, timeout=timeout)

    node.rpc.call = call  # type: ignore[method-assign]
    return calls


def sent(calls: list[tuple[str, str, Any]]) -> int:
    """Elements pushed whole."""
    return sum(len(request.sealed) for method, _, request in calls if method == "state.push")


async def push(liar: StateNode, victim: StateNode, *sealed: bytes) -> Pushed:
    return await liar.rpc.call(victim.me, "state.push", Push(RUN, sealed), Pushed, timeout=10)


def test_news_goes_along_a_chain_and_never_back(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 4)
        await connect(pairwise(nodes))
        await trio.sleep(5)
        calls = [listen(node) for node in nodes]
        record = await nodes[0].sync.write("note/a", 1)
        await trio.sleep(2)
        assert all(node.state.has(rank(record)) for node in nodes)
        assert [sent(each) for each in calls] == [1, 1, 1, 0]

    simulated(main)


def test_what_is_flushed_has_arrived_also_while_a_push_is_under_way(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        one, other = await start(nursery, world, 2)
        await connect([(one, other)])
        for number in range(10):
            await trio.sleep(5)
            before = await one.sync.write(f"note/{number}/before", 1)
            await trio.sleep(0.21)  # it is on its way
            last = await one.sync.write(f"note/{number}/last", 1)
            await one.sync.flush()
            assert other.state.has(rank(before)) and other.state.has(rank(last))

    simulated(main)


def test_a_lease_is_offered_to_its_own_author_who_may_be_two(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        author, other = await start(nursery, world, 2)
        await connect([(author, other)])
        await trio.sleep(5)
        calls = listen(other)
        lease = await author.sync.write("member", {"addresses": ()})
        await author.sync.write("note/a", 1)
        await trio.sleep(2)
        assert [request.ranks for method, _, request in calls if method == "state.push"] == [rank(lease)]
        assert sent(calls) == 0

    simulated(main)


def test_what_was_written_together_travels_together(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        author, other = await start(nursery, world, 2)
        await connect([(author, other)])
        await trio.sleep(5)
        calls = listen(author)
        for number in range(30):
            await author.sync.write(f"note/{number}", number)
        await trio.sleep(2)
        assert [len(request.sealed) for method, _, request in calls if method == "state.push"] == [30]
        assert author.hash() == other.hash()

    simulated(main)


def test_an_element_goes_whole_to_few_and_by_rank_to_others(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        author, *others = await start(nursery, world, 9)
        await connect((author, other) for other in others)  # the others do not know one another
        await trio.sleep(5)
        calls = listen(author)
        record = await author.sync.write("note/a", 1)
        await trio.sleep(2)
        first = [request for method, _, request in calls if method == "state.push"][: len(others)]
        assert sum(len(request.sealed) for request in first) == FIRST
        assert sum(bool(request.ranks) for request in first) == len(others) - FIRST
        assert all(other.state.has(rank(record)) for other in others)  # who was offered it asked for it

    simulated(main)


@pytest.mark.parametrize(("size", "copies"), [(100, EAGER), (LARGE, 1)])
def test_what_another_said_is_passed_on_whole_to_fewer_and_what_is_large_to_one(
    simulated: Simulated, size: int, copies: int
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        author, middle, *others = await start(nursery, world, 8)
        await connect([(author, middle), *((middle, other) for other in others)])
        await trio.sleep(5)
        calls = listen(middle)
        record = await author.sync.write("note/a", bytes(size))
        await trio.sleep(2)
        first = [request for method, _, request in calls if method == "state.push"][: len(others)]
        assert sum(len(request.sealed) for request in first) == copies
        assert sum(bool(request.ranks) for request in first) == len(others) - copies
        assert all(other.state.has(rank(record)) for other in others)

    simulated(main)


def test_a_joiner_holds_everything_at_once(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        old, joiner = await start(nursery, world, 2)
        for number in range(60):
            await old.sync.write(f"note/{number}", number)
        await joiner.sync.write("note/mine", 1)
        await trio.sleep(30)
        await connect([(joiner, old)])
        await trio.sleep(1)
        assert joiner.hash() == old.hash()
        assert (await joiner.state.stats()).elements == 61

    simulated(main)


def test_repair_brings_what_pushes_lost(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        one, other = await start(nursery, world, 2, loss=1.0)
        await connect([(one, other)])
        await trio.sleep(5)
        record = await one.sync.write("note/a", 1)
        await trio.sleep(3)
        assert not other.state.has(rank(record))
        await trio.sleep(1.2 * REPAIR_EVERY)
        assert other.state.has(rank(record))  # got by its own repair: one's repair would push, which is lost

    simulated(main)


def test_a_frozen_neighbour_holds_nobody_up(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        author, frozen, other = await start(nursery, world, 3)
        await connect([(author, frozen), (author, other)])
        await trio.sleep(5)
        world.freeze(frozen.me)
        for number in range(3):
            record = await author.sync.write(f"note/{number}", number)
            await trio.sleep(1)
            assert other.state.has(rank(record))
        world.thaw(frozen.me)
        await trio.sleep(2 * REPAIR_EVERY)
        assert frozen.hash() == other.hash()

    simulated(main)


def test_a_forged_element_is_not_stored_and_its_sender_is_refused(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar, third = await start(nursery, world, 3)
        await connect([(victim, liar), (victim, third)])
        await trio.sleep(5)
        with pytest.raises(Refused):
            for number in range(4):
                genuine = third.signs(f"note/{number}", 1)
                forged = genuine.__class__(**{**vars_of(genuine), "signature": liar.network.sign(b"x")})
                await push(liar, victim, forged.sealed)
                assert not victim.state.has(rank(genuine))
        assert victim.scoring.standing(liar.me) >= Standing.REFUSED
        assert victim.scoring.standing(third.me) is Standing.GOOD
        honest = await third.sync.write("note/honest", 1)
        await trio.sleep(1)
        assert victim.state.has(rank(honest))

    simulated(main)


def vars_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("v", "run", "author", "key", "hlc", "ttl", "value", "signature")}


def test_a_false_element_ends_its_batch(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await start(nursery, world, 2)
        await connect([(victim, liar)])
        before, after = liar.signs("note/before", 1), liar.signs("note/after", 1)
        await push(liar, victim, before.sealed, b"junk", after.sealed)
        assert victim.state.has(rank(before)) and not victim.state.has(rank(after))

    simulated(main)


def test_what_is_known_is_not_verified_again(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, peer = await start(nursery, world, 2)
        await connect([(node, peer)])
        old, new = peer.signs("note/a", 1), peer.signs("note/a", 2, ahead=5)
        await push(peer, node, new.sealed)
        await push(peer, node, old.sealed, new.sealed)
        verified = node.sync.intake.verified
        assert verified == 2
        for _ in range(3):
            await push(peer, node, old.sealed, new.sealed)
        assert node.sync.intake.verified == verified

    simulated(main)


def test_a_record_from_the_future_waits_outside_until_its_time(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        fast = StateNode.make(world.node("fast"), clock=lambda: now() + 50_000)
        await nursery.start(fast.network.run)
        await nursery.start(fast.run)
        node, third = await start(nursery, world, 2)
        await connect([(fast, node), (node, third)])
        record = fast.signs("note/a", 1, ahead=40_000)
        await fast.state.merge([record])
        await trio.sleep(2)
        assert not node.state.has(rank(record)) and not third.state.has(rank(record))
        assert not node.sync.intake.lacks(rank(record))  # who offers it is not asked for it
        mine = await node.sync.write("note/mine", 1)
        assert mine.hlc < record.hlc
        assert fast.scoring.standing(node.me) is node.scoring.standing(fast.me) is Standing.GOOD
        await trio.sleep(30 + 4 * REPAIR_EVERY)
        assert node.state.has(rank(record)) and third.state.has(rank(record))

    simulated(main)


def test_what_came_while_this_clock_was_behind_is_taken_when_it_is_set_right(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        off = [-DAY]
        node = StateNode.make(world.node("behind"), clock=lambda: now() + off[0])
        await nursery.start(node.network.run)
        await nursery.start(node.run)
        (author,) = await start(nursery, world, 1)
        await connect([(node, author)])
        await trio.sleep(5)
        record = await author.sync.write("note/a", 1)
        await push(author, node, record.sealed)
        assert not node.state.has(rank(record)) and not node.sync.intake.lacks(rank(record))
        off[0] = 0
        await trio.sleep(2 * REPAIR_EVERY)
        assert node.state.has(rank(record))

    simulated(main)


def test_who_pushes_too_much_waits_and_is_then_refused(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, flooder = await start(nursery, world, 2)
        await connect([(victim, flooder)])
        known = flooder.signs("note/a", 1).sealed
        began, refused = trio.current_time(), 0
        for _ in range(40):
            try:
                await push(flooder, victim, *[known] * 1000)
            except Refused as error:
                assert error.code == "busy"
                refused += 1
        assert refused or trio.current_time() - began > 10  # 40 000 elements, of which 8000 at once and 2000 a second
        async with trio.open_nursery() as pushes:  # now without waiting for answers
            for _ in range(40):
                pushes.start_soon(attempt, flooder, victim, known)
        assert victim.sync.violations.count(flooder.me) > 0

    async def attempt(flooder: StateNode, victim: StateNode, sealed: bytes) -> None:
        with contextlib.suppress(Refused):
            await push(flooder, victim, *[sealed] * 1000)

    simulated(main)


def test_one_author_cannot_make_the_swarm_carry_more_than_its_share(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        flooder, neighbour, far = await start(nursery, world, 3)
        await connect([(flooder, neighbour), (neighbour, far)])
        await trio.sleep(5)
        calls = listen(neighbour)
        for number in range(2000):
            if number % 100 == 0:
                await push(flooder, neighbour, *[flooder.signs(f"note/{i % 64}", i).sealed for i in range(100)])
                await trio.sleep(0.5)
        assert sent(calls) <= AUTHOR.burst + AUTHOR.rate * 15
        await trio.sleep(2 * REPAIR_EVERY)
        assert neighbour.hash() == far.hash()

    simulated(main)


def test_two_records_under_a_write_once_key_convict_their_author_everywhere(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        *honest, liar = await start(nursery, world, 5)
        await connect(pairwise(honest))
        await connect([(liar, honest[0]), (liar, honest[3])])
        await trio.sleep(5)
        await push(liar, honest[0], liar.signs("commit/00000001/0", 1).sealed)
        await push(liar, honest[3], liar.signs("commit/00000001/0", 2).sealed)
        await trio.sleep(5)
        assert len({node.hash() for node in honest}) == 1
        assert all(node.sync.neighbours.equivocators == {liar.me} for node in honest)
        with pytest.raises(Refused):
            await push(liar, honest[0])

    simulated(main)


def test_who_equivocated_or_asks_for_its_own_is_answered_without_an_element_parsed(simulated: Simulated) -> None:
    """An offender's proofs, and all that one author signed, would take the memory of the node at once."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liar, node = (StateNode.make(world.node(name)) for name in ("liar", "node"))
        await node.state.merge([liar.signs("commit/00000001/0", value) for value in (1, 2)])

        async def select(prefix: str = "", *, author: str | None = None, limit: int) -> Any:
            pytest.fail(f"{limit} elements are read at once")

        node.state.select = select  # type: ignore[method-assign]
        for each in (liar, node):
            await nursery.start(each.network.run)
            await nursery.start(each.run)
        await connect([(liar, node)])
        assert node.sync.neighbours.equivocators == {liar.me}
        own = await liar.rpc.call(node.me, "state.own", RunQuery(RUN), OwnElements, timeout=5)
        assert len(own.sealed) == 2

    simulated(main)


def test_a_node_of_another_run_is_refused_and_left_alone(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, peer = await start(nursery, world, 2)
        await connect([(node, peer)])
        with pytest.raises(Refused) as refused:
            await peer.rpc.call(node.me, "state.push", Push("cd" * 32), Pushed, timeout=1)
        assert refused.value.code == "unknown-run"

    simulated(main)


def test_a_full_disk_acknowledges_nothing_and_repair_brings_it_later(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "OWN", Allowance(rate=0.1, burst=100))

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        author, full = await start(nursery, world, 2)
        await connect([(author, full)])
        await trio.sleep(5)
        merge = full.state.merge

        async def refuse(elements: Any) -> list[Merged]:
            raise Unwritable("the disk is full")

        full.state.merge = refuse  # type: ignore[method-assign]
        record = await author.sync.write("note/a", 1)
        await trio.sleep(5)
        assert not full.state.has(rank(record))
        for number in range(60):
            await author.sync.write(f"note/{number}", number)
        await trio.sleep(10 * REPAIR_EVERY)
        assert not full.sync.violations.count(author.me), "that it brings them again and again is this node's fault"
        full.state.merge = merge  # type: ignore[method-assign]
        await trio.sleep(1.2 * REPAIR_EVERY)
        assert full.state.has(rank(record))

    simulated(main)


# --- this node's own past and clock ---------------------------------------------------------------------------------


def test_a_restored_node_signs_nothing_twice(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        node, *peers = await start(nursery, world, 4)
        await connect((node, peer) for peer in peers)
        await trio.sleep(RECOVER_WITHIN)
        said = await node.sync.write("commit/00000007/0", "first")
        note = await node.sync.write("note/a", 1)
        await trio.sleep(2)
        world.kill(node.me)
        node.scope.cancel()
        await trio.sleep(1)
        restored = StateNode.make(
            world.node("node 0"), clock=lambda: now() - 20_000
        )  # an empty state, and a late clock
        await nursery.start(restored.network.run)
        await nursery.start(restored.run)
        async with trio.open_nursery() as writes:

            async def contradict() -> None:
                with pytest.raises(AlreadyWritten):
                    await restored.sync.write("commit/00000007/0", "second")

            writes.start_soon(contradict)  # before it has met anybody: it waits
            await trio.sleep(1)
            await connect((restored, peer) for peer in peers)
        assert restored.state.has(rank(said))
        assert (await restored.sync.write("note/a", 2)).hlc > note.hlc
        assert not any(peer.sync.neighbours.equivocators for peer in peers)

    simulated(main)


def test_a_node_alone_signs_after_a_while(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (alone,) = await start(nursery, world, 1)
        began = trio.current_time()
        await alone.sync.write("note/a", 1)  # what can be replaced does not wait
        assert trio.current_time() == began
        await alone.sync.write("commit/00000001/0", 1)
        assert trio.current_time() == pytest.approx(began + RECOVER_WITHIN)

    simulated(main)


@pytest.mark.parametrize("off", [-2 * MAX_OFF, 2 * MAX_OFF])
def test_a_node_whose_clock_is_wrong_signs_nothing_and_says_so(simulated: Simulated, off: int) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        shift = [off]
        wrong = StateNode.make(world.node("wrong"), clock=lambda: now() + shift[0])
        await nursery.start(wrong.network.run)
        await nursery.start(wrong.run)
        peers = await start(nursery, world, 3)
        await connect((wrong, peer) for peer in peers)
        await trio.sleep(2)
        with pytest.raises(StateError, match=r"60 s (behind|ahead)"):
            await wrong.sync.write("note/a", 1)
        assert wrong.state.clocks.complaint
        assert not any(peer.state.clocks.complaint for peer in peers)
        shift[0] = 0
        await trio.sleep(8 * REPAIR_EVERY)
        await wrong.sync.write("note/a", 1)
        assert not wrong.state.clocks.complaint

    simulated(main)


def test_two_peers_cannot_talk_a_node_out_of_its_clock(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        (node, *right) = await start(nursery, world, 4)
        wrong = [StateNode.make(world.node(f"wrong {i}"), clock=lambda: now() + 50_000) for i in range(2)]
        for each in wrong:
            await nursery.start(each.network.run)
            await nursery.start(each.run)
        await connect((node, peer) for peer in (*right, *wrong))
        await trio.sleep(5)
        await node.sync.write("note/a", 1)
        assert not node.state.clocks.complaint

    simulated(main)


def test_random_partitions_and_losses_end_in_one_state(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        rng = random.Random(3)
        nodes = await start(nursery, world, 8, loss=0.3)
        await connect(pairwise(nodes))
        for step in range(20):
            await rng.choice(nodes).sync.write(f"note/{rng.randrange(5)}", step)
            await trio.sleep(rng.uniform(0, 3))
            if step % 5 == 4:
                world.partition([[node.me for node in rng.sample(nodes, 3)]])
                await trio.sleep(rng.uniform(1, 20))
                world.heal()
                await connect(pairwise(nodes))
        await trio.sleep(10 * REPAIR_EVERY)
        assert len({node.hash() for node in nodes}) == 1

    simulated(main)
