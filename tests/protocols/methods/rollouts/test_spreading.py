"""Groups reach others by way of peers that check them; who lies or floods is dealt with where he is met."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from rolloutnodes import RolloutNode, all_teach, everybody, group, start
from simnodes import RUN, connect, now

from swarmnode.protocols.calls.rpc import Refused
from swarmnode.protocols.limits import Allowance
from swarmnode.protocols.methods.rollouts.intake import GRANTED_FOR, HELD_FOR, MAX_GRANTS
from swarmnode.protocols.methods.rollouts.messages import (
    GIVE,
    MAX_GIVEN,
    OFFER,
    RECENT,
    Give,
    GroupOffer,
    OfferAnswer,
    OfferedGroup,
    RecentQuery,
    SignedGroup,
    seal,
)
from swarmnode.protocols.methods.rollouts.pool import PoolLimits, Rates, RolloutLimits
from swarmnode.protocols.methods.trainer import TrainerDied, TrainerHeld
from swarmnode.protocols.runner import TimedRunner, in_thread, inline
from swarmnode.protocols.wire import Empty
from swarmnode.testing.simnet import SimWorld

Main = Callable[[SimWorld, trio.Nursery], Awaitable[None]]
Simulated = Callable[..., None]
WIDE = Rates(groups=Allowance(1e6, 1e6), bytes=Allowance(1e9, 1e9))
TIGHT = Rates(groups=Allowance(0.5, 4), bytes=Allowance(1e6, 4 << 20))


def made_by(node: RolloutNode, seed: int, **options: Any) -> SignedGroup:
    """A group of that node's which it has published to nobody."""
    made = group(seed, **options)
    return seal(made, run_id=RUN, author=node.me, counter=seed, made_at=now(), sign=node.network.sign)


def offer_of(*groups: SignedGroup, copies: int = 1) -> GroupOffer:
    return GroupOffer(RUN, tuple(OfferedGroup(each.id, each.author, each.size, copies) for each in groups))


def give_of(*groups: SignedGroup) -> Give:
    return Give(RUN, tuple(each.sealed for each in groups))


@dataclass
class Liar:
    """A node that shares nothing by itself, and says what a test makes it say."""

    node: RolloutNode

    async def offers(self, victim: RolloutNode, offer: GroupOffer) -> OfferAnswer:
        return await self.node.rpc.call(victim.me, OFFER, offer, OfferAnswer, timeout=5)

    async def gives(self, victim: RolloutNode, give: Give) -> None:
        await self.node.rpc.call(victim.me, GIVE, give, Empty, timeout=5)

    async def brings(self, victim: RolloutNode, *groups: SignedGroup) -> None:
        """GroupOffer, and give what is wanted."""
        answer = await self.offers(victim, offer_of(*groups))
        if answer.wants:
            await self.gives(victim, give_of(*(groups[index] for index in answer.wants)))


async def pair(world: SimWorld, nursery: trio.Nursery, **options: Any) -> tuple[RolloutNode, Liar]:
    victim, other = await start(nursery, world, 2, **options)
    await connect([(other, victim)])
    await trio.sleep(3)
    return victim, Liar(other)


def held_by(node: RolloutNode) -> set[bytes]:
    return {held.signed.id for held in node.rollouts.pool}


def test_everybody_in_a_small_swarm_hears_of_everything(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 6)
        await connect(everybody(nodes))
        published = {
            node.me: await node.rollouts.publish([group(10 * n), group(10 * n + 1)]) for n, node in enumerate(nodes)
        }
        await trio.sleep(15)
        for node in nodes:
            others = {each.id for author, groups in published.items() if author != node.me for each in groups}
            assert held_by(node) == others
            assert {own.id for own in node.rollouts.pool.own()} == {each.id for each in published[node.me]}
            assert not node.rollouts.violations.totals.total() and not node.rollouts.stats()["waiting"]

    simulated(main)


def test_a_large_group_goes_on_from_whoever_has_it(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 4)
        await connect(itertools.pairwise(nodes))  # a line: the last knows the third only
        large = group(1, answers=16, tokens=500, logprobs=True)
        (published,) = await nodes[0].rollouts.publish([large])
        await trio.sleep(20)
        got = nodes[3].rollouts.pool.get(published.id)
        assert got is not None and got.group == published.group and len(got.packed.content) == 16 * 500 * 3

    simulated(main)


def test_groups_that_do_not_fit_one_message_come_one_after_another(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        first, second = await start(nursery, world, 2)
        await connect([(first, second)])
        await trio.sleep(3)
        large = [group(tokens, answers=64, tokens=tokens, logprobs=True) for tokens in (2000, 4000)]
        published = await first.rollouts.publish([*large, *(group(seed) for seed in range(4))])
        assert published[0].size < MAX_GIVEN < published[1].size
        await trio.sleep(20)
        assert held_by(second) == {each.id for each in published}
        assert not second.rollouts.violations.totals.total() and not first.rollouts.stats()["waiting"]

    simulated(main)


def test_a_node_alone_keeps_its_own_says_so_and_is_heard_when_others_come(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alone, other = await start(nursery, world, 2)
        published = await alone.rollouts.publish([group(1), group(2)])
        await trio.sleep(60)
        told = alone.rollouts.stats()
        assert told["alone"] and told["waiting"] == 2 and len(alone.rollouts.pool.own()) == 2
        await connect([(alone, other)])
        await trio.sleep(5)
        assert held_by(other) == {each.id for each in published} and not alone.rollouts.stats()["alone"]

    simulated(main)


def test_whoever_comes_hears_of_what_is_recent_by_asking_one_neighbour(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 4)
        await connect(everybody(nodes[:3]))
        for number, node in enumerate(nodes[:3]):
            await node.rollouts.publish([group(10 * number + k) for k in range(3)])
        await trio.sleep(60)
        assert not any(node.rollouts.stats()["waiting"] for node in nodes[:3])  # nothing spreads any more
        await connect([(nodes[3], nodes[0])])
        await trio.sleep(5)
        assert len(held_by(nodes[3])) == 9 and nodes[3].rollouts.counts["asked_recent"] == 1

    simulated(main)


def test_a_group_is_handed_over_no_more_often_than_it_has_copies(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 24, limits=RolloutLimits(copies=8))
        await connect(everybody(nodes))
        await trio.sleep(5)
        (published,) = await nodes[0].rollouts.publish([group(1)])
        await trio.sleep(30)
        assert sum(published.id in held_by(node) for node in nodes[1:]) == 7
        assert sum(node.rollouts.counts["given"] for node in nodes) == 7

    simulated(main)


@pytest.mark.parametrize("spoil", ["signature", "author", "run", "bytes"])
def test_what_is_not_its_authors_is_neither_kept_nor_passed_on_and_costs_who_brought_it(
    simulated: Simulated, spoil: str
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await pair(world, nursery)
        node = liar.node
        honest = made_by(node, 1)
        run, author = ("cd" * 32 if spoil == "run" else RUN), (victim.me if spoil == "author" else node.me)
        false = seal(group(1), run_id=run, author=author, counter=1, made_at=now(), sign=node.network.sign)
        payload, signature = false.sealed
        if spoil == "signature":
            signature = bytes(64)
        if spoil == "bytes":
            payload = payload[:-1]
        assert (await liar.offers(victim, offer_of(honest))).wants == (0,)
        await liar.gives(victim, Give(RUN, ((payload, signature),)))
        assert not held_by(victim) and victim.rollouts.counts["invalid"] == 1
        assert victim.rollouts.violations.count(node.me) == 1 and not victim.rollouts.stats()["waiting"]

    simulated(main)


def test_groups_nobody_asked_for_are_not_kept(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await pair(world, nursery)
        await liar.gives(victim, give_of(made_by(liar.node, 1)))
        assert not held_by(victim) and victim.rollouts.counts["unasked"] == 1
        small, large = made_by(liar.node, 2), made_by(liar.node, 3, tokens=100)
        offer = GroupOffer(RUN, (OfferedGroup(large.id, large.author, small.size, 1),))
        assert (await liar.offers(victim, offer)).wants == (0,)
        await liar.gives(victim, give_of(large))
        assert not held_by(victim) and victim.rollouts.counts["invalid"] == 1

    simulated(main)


def test_nobody_has_more_verified_than_it_was_asked_for(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        looked: list[str] = []

        def verify(author: str, message: bytes, signature: bytes) -> bool:
            looked.append(author)
            return world.node("anybody").verify(author, message, signature)

        victim, liar = await pair(world, nursery, verify=verify)
        made = made_by(liar.node, 1)
        await liar.brings(victim, made)
        assert held_by(victim) == {made.id} and len(looked) == 1
        for _ in range(5):
            await liar.gives(victim, give_of(*[made] * 64))
        assert len(looked) == 1 and victim.rollouts.counts["unasked"] == 5 * 64
        assert victim.rollouts.violations.count(liar.node.me) == 5

    simulated(main)


def test_offers_that_are_not_kept_block_nobody_else_and_are_counted(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, other, honest = await start(nursery, world, 3)
        await connect([(other, victim)])
        await trio.sleep(3)
        made = made_by(honest, 1)
        liar = Liar(other)
        for _ in range(3):
            assert (await liar.offers(victim, offer_of(made))).wants in ((0,), ())
            await trio.sleep(1)
        await connect([(honest, victim)])
        await trio.sleep(6)
        await liar.offers(victim, offer_of(made))
        assert await Liar(honest).offers(victim, offer_of(made)) == OfferAnswer()  # neither wanted nor here: try again
        await trio.sleep(6)
        await Liar(honest).brings(victim, made)
        assert made.id in held_by(victim) and victim.rollouts.violations.count(other.me)

    simulated(main)


def test_who_offers_a_group_first_and_does_not_give_it_keeps_it_from_a_node_for_seconds(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        limits = RolloutLimits(author=Rates(groups=Allowance(1e-6, 2), bytes=Allowance(1e6, 4 << 20)))
        victim, other, honest = await start(nursery, world, 3, limits=limits)
        await connect([(other, victim), (honest, victim)])
        await trio.sleep(3)
        made, liar = made_by(honest, 1), Liar(other)
        slow = OfferedGroup(made.id, honest.me, 1 << 19, 1)  # for which half a minute is granted
        assert (await liar.offers(victim, GroupOffer(RUN, (slow,)))).wants == (0,)
        await trio.sleep(HELD_FOR - 1)
        assert await Liar(honest).offers(victim, offer_of(made)) == OfferAnswer()
        await trio.sleep(1)
        await Liar(honest).brings(victim, made)
        assert held_by(victim) == {made.id}
        await trio.sleep(GRANTED_FOR)
        another = made_by(honest, 2, tokens=4000)  # for which seconds more are granted
        for first in (honest, other):  # both give it, the first late
            assert (await Liar(first).offers(victim, offer_of(another))).wants == (0,)
            await trio.sleep(HELD_FOR)
        for giver in (other, honest):
            await Liar(giver).gives(victim, give_of(another))
        assert another.id in held_by(victim) and not victim.rollouts.violations.count(honest.me)
        assert not victim.rollouts.pool.refused, "each counts once against its author's two"

    simulated(main)


def test_those_who_offer_much_and_give_nothing_keep_nobody_else_out(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        limits = RolloutLimits(total=WIDE, sender=WIDE, author=WIDE)
        victim, honest, *liars = await start(nursery, world, 5, limits=limits)
        await connect((other, victim) for other in (honest, *liars))
        await trio.sleep(3)
        ids = (number.to_bytes(32, "big") for number in itertools.count())
        for liar in liars:
            wanted = 0
            for _ in range(7):
                offered = tuple(OfferedGroup(next(ids), liar.me, 400, 1) for _ in range(64))
                answer = await Liar(liar).offers(victim, GroupOffer(RUN, offered))
                wanted += len(answer.wants)
            assert wanted == MAX_GRANTS and answer.wait >= 1.0
        made = [made_by(honest, seed) for seed in range(64)]
        await Liar(honest).brings(victim, *made[:32])
        await Liar(honest).brings(victim, *made[32:])
        assert victim.rollouts.counts["received"] == 64

    simulated(main)


def test_nobody_uses_up_the_allowance_of_another_by_naming_it(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, other, honest = await start(nursery, world, 3, limits=RolloutLimits(author=TIGHT))
        await connect([(other, victim), (honest, victim)])
        await trio.sleep(3)
        liar = Liar(other)
        await liar.offers(
            victim, GroupOffer(RUN, tuple(OfferedGroup(bytes([n] * 32), honest.me, 400, 1) for n in range(60)))
        )
        await Liar(honest).brings(victim, made_by(honest, 1))
        assert len(held_by(victim)) == 1
        stats = {each.author: each.refused for each in victim.rollouts.pool.by_author()}
        assert not stats[honest.me]

    simulated(main)


def test_a_flooding_author_gets_in_what_its_allowance_is_and_others_all_of_theirs(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        limits = RolloutLimits(author=TIGHT, pool=PoolLimits(few=1000))
        victim, flooder, honest = await start(nursery, world, 3, limits=limits)
        await connect([(flooder, victim), (honest, victim)])
        await trio.sleep(3)
        for step in range(20):
            made = [made_by(flooder, 100 * step + k) for k in range(20)]
            answers = [await Liar(flooder).offers(victim, offer_of(each)) for each in made]
            wanted = [each for each, answer in zip(made, answers, strict=True) if answer.wants]
            await Liar(flooder).gives(victim, give_of(*wanted))
            await Liar(flooder).brings(victim, *(made_by(flooder, 100 * step + k) for k in range(20, 40)))
            if step % 4 == 0:
                await Liar(honest).brings(victim, made_by(honest, step))
            await trio.sleep(1)
        stats = {each.author: each for each in victim.rollouts.pool.by_author()}
        assert stats[flooder.me].came <= 5 + 0.5 * trio.current_time() and stats[honest.me].came == 5
        assert stats[flooder.me].refused["flood"] > 300
        assert victim.rollouts.counts["declined"] > 200  # before their bytes came

    simulated(main)


def test_many_who_flood_together_do_not_crowd_out_who_sends_little(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        total = Rates(groups=Allowance(4, 40), bytes=Allowance(1e6, 4 << 20))
        author = Rates(groups=Allowance(2, 16), bytes=Allowance(1e6, 4 << 20))
        limits = RolloutLimits(total=total, author=author, sender=author, pool=PoolLimits(few=1000))
        victim, honest, *flooders = await start(nursery, world, 8, limits=limits)
        await connect((other, victim) for other in (honest, *flooders))
        await trio.sleep(3)
        for step in range(20):
            for flooder in flooders:
                await Liar(flooder).brings(victim, *(made_by(flooder, 100 * step + k) for k in range(8)))
            if step % 2 == 0:  # half a group a second: less than a seventh of what may come in
                await Liar(honest).brings(victim, made_by(honest, step))
            await trio.sleep(1)
        came = {each.author: each.came for each in victim.rollouts.pool.by_author()}
        assert came[honest.me] == 10 and 80 <= sum(came.values()) <= 40 + 4 * 24

    simulated(main)


def test_who_has_no_room_says_for_how_long_and_is_left_alone(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        limits = RolloutLimits(author=WIDE, sender=WIDE, total=TIGHT)
        victim, liar = await pair(world, nursery, limits=limits)
        sent = [made_by(liar.node, seed) for seed in range(20)]
        answer = await liar.offers(victim, offer_of(*sent))
        assert answer.wants in ((0, 1, 2), (0, 1, 2, 3)) and 1.0 <= answer.wait <= 4.0
        await liar.gives(victim, give_of(*(sent[index] for index in answer.wants)))
        before = victim.rollouts.counts.copy()
        await liar.node.rollouts.publish([group(100 + seed) for seed in range(20)])
        await trio.sleep(30)
        came = victim.rollouts.counts["received"] - before["received"]
        asked = victim.rollouts.counts["no_room"] - before["no_room"]
        assert 8 <= came <= 16 and asked <= 20 * 30 / 2  # half a group a second, and at most an offer in two seconds
        assert not victim.rollouts.violations.totals.total()

    simulated(main)


def test_strangers_to_the_run_are_refused_and_their_groups_are_not_taken_from_others(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        stranger = world.node("node 2").me
        nodes = await start(nursery, world, 3, admits=lambda peer: peer != stranger)
        await connect([(nodes[1], nodes[0]), (nodes[2], nodes[0])])
        await trio.sleep(3)
        made = made_by(nodes[2], 1)
        with pytest.raises(Refused, match="does not admit"):
            await Liar(nodes[2]).offers(nodes[0], offer_of(made))
        assert (await Liar(nodes[1]).offers(nodes[0], offer_of(made))).wants == ()
        with pytest.raises(Refused) as refused:
            await Liar(nodes[1]).offers(nodes[0], GroupOffer("cd" * 32, offer_of(made).groups))
        assert refused.value.code == "unknown-run"

    simulated(main)


def test_what_the_check_refuses_is_counted_by_its_word_and_goes_no_further(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        def check(signed: SignedGroup) -> str:
            return "uninformative" if signed.group.task.seed % 2 else ""

        victim, liar = await pair(world, nursery, check=check)
        made = [made_by(liar.node, seed) for seed in range(6)]
        await liar.brings(victim, *made)
        assert (await liar.offers(victim, offer_of(*made))).has == tuple(range(6))  # none comes again
        assert len(held_by(victim)) == 3 and victim.rollouts.pool.refused == {"uninformative": 3}
        assert {each.author: each.refused for each in victim.rollouts.pool.by_author()} == {
            liar.node.me: {"uninformative": 3}
        }

    simulated(main)


def test_a_check_that_fails_costs_the_group_and_nothing_else(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        def check(signed: SignedGroup) -> str:
            if signed.group.task.seed == 1:
                raise RecursionError("a verifier met what it was not made for")
            return ""

        nodes = await start(nursery, world, 2, check=check)
        for node in nodes:
            await node.rollouts.publish([group(1, tokens=600), group(2, tokens=600)])
        await connect([(nodes[0], nodes[1])])
        await trio.sleep(10)
        for node in nodes:
            assert [held.signed.group.task.seed for held in node.rollouts.pool] == [2]
            assert node.rollouts.pool.refused.keys() == {"check-failed"}

    simulated(main)


def test_nobody_asks_for_what_is_recent_on_and_on(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await pair(world, nursery, limits=RolloutLimits(copies=1))  # nothing spreads by itself
        await victim.rollouts.publish([group(seed) for seed in range(100)])

        async def ask() -> None:
            await liar.node.rpc.call(victim.me, RECENT, RecentQuery(RUN), Empty, timeout=5)

        await ask()
        await trio.sleep(1)
        assert 0 < len(held_by(liar.node)) <= 64
        with pytest.raises(Refused) as refused:
            for _ in range(10):
                await ask()
        assert refused.value.code == "busy"

    simulated(main)


def test_who_asks_for_what_is_recent_has_no_more_offers_of_what_spreads_at_once(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, other = await pair(world, nursery)
        call, offers = victim.rpc.call, 0

        async def slow_at_first(peer: str, method: str, *args: Any, **options: Any) -> Any:
            nonlocal offers
            offers += method == OFFER
            await trio.sleep(10 if method == OFFER and offers == 1 else 0)
            return await call(peer, method, *args, **options)

        victim.rpc.call = slow_at_first  # type: ignore[method-assign]
        await victim.rollouts.publish([group(1)])
        await trio.sleep(2)
        await other.node.rpc.call(victim.me, RECENT, RecentQuery(RUN), Empty, timeout=5)
        await trio.sleep(1)
        assert offers == 2
        await victim.rollouts.publish([group(2)])
        await trio.sleep(4)
        assert offers == 2, "the first has not ended"
        await trio.sleep(10)
        assert len(held_by(other.node)) == 2

    simulated(main)


def test_who_has_too_few_to_draw_from_asks_a_neighbour_now_and_then(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        first, second = await start(nursery, world, 2, limits=RolloutLimits(copies=1))  # nothing spreads by itself
        await connect([(first, second)])
        await trio.sleep(3)
        await first.rollouts.publish([group(seed) for seed in range(8)])
        await trio.sleep(30)
        pool = second.rollouts.pool
        assert pool.candidates(4, random.Random(1)) == ()
        await trio.sleep(3)
        assert len(pool.candidates(1, random.Random(1))) == 1
        for _ in range(30):
            pool.candidates(99, random.Random(1))
            await trio.sleep(1)
        assert second.rollouts.counts["asked_recent"] <= 1 + 1 + 30 / 10 + 1
        assert not first.rollouts.violations.totals.total()

    simulated(main)


def test_a_silent_peer_holds_up_nobody(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 5)
        await connect(everybody(nodes))
        await trio.sleep(3)
        world.freeze(nodes[4].me)
        published = await nodes[0].rollouts.publish([group(seed) for seed in range(4)])
        await trio.sleep(20)
        assert all(held_by(node) >= {each.id for each in published} for node in nodes[1:4])

    simulated(main)


def test_watching_may_end_and_begin_again(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        first, second = await start(nursery, world, 2)
        await connect([(first, second)])
        await trio.sleep(3)
        second.scope.cancel()
        await trio.sleep(1)
        published = await first.rollouts.publish([group(1)])
        await trio.sleep(10)
        assert not held_by(second)
        second.scope = trio.CancelScope()
        await nursery.start(second.run)
        await trio.sleep(10)
        assert held_by(second) == {each.id for each in published}

    simulated(main)


def test_draws_are_repeatable(simulated: Simulated) -> None:
    drawn: list[tuple[bytes, ...]] = []

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 5)
        await connect(everybody(nodes))
        for number, node in enumerate(nodes):
            await node.rollouts.publish([group(10 * number + k) for k in range(3)])
        await trio.sleep(10)
        drawn.append(tuple(each.id for each in nodes[0].rollouts.pool.candidates(6, random.Random(3))))

    simulated(main)
    simulated(main)
    assert drawn[0] == drawn[1] and len(drawn[0]) == 6


def test_what_sharing_takes_of_a_processor_is_counted_where_it_is_taken() -> None:
    timed = TimedRunner(in_thread)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(timed, lambda: sum(range(300_000)))
            nursery.start_soon(trio.sleep, 0.2)
        with_work = timed.seconds
        assert 0 < with_work < 0.2, "waiting costs nothing"
        with timed.counted():
            sum(range(300_000))
        assert timed.seconds > with_work
        with pytest.raises(ZeroDivisionError):
            await TimedRunner(inline)(lambda: 1 / 0)

    trio.run(main)


def test_a_node_that_shares_counts_what_that_takes(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        nodes = await start(nursery, world, 2)
        await connect(everybody(nodes))
        await nodes[0].rollouts.publish([group(seed) for seed in range(20)])
        await trio.sleep(10)
        assert all(node.rollouts.runner.seconds > 0 for node in nodes)

    simulated(main)


@pytest.mark.parametrize("error", [TrainerHeld, TrainerDied])
def test_what_a_trainer_dies_of_is_not_given_to_it_again(simulated: Simulated, error: type[TrainerDied]) -> None:
    given: list[int] = []

    async def trainer(groups: Sequence[SignedGroup]) -> list[dict[str, Any]]:
        await trio.lowlevel.checkpoint()
        given.append(len(groups))
        raise error("the simulation says so")

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await pair(world, nursery, trainer=trainer)
        await liar.brings(victim, made_by(liar.node, 1, task="gym/chain_sum"))
        await trio.sleep(10)
        assert given == [1] if error is TrainerDied else len(given) > 5
        assert bool(held_by(victim)) == (error is TrainerHeld)
        assert not victim.rollouts.violations.totals, "that a trainer died is nobody's fault"

    simulated(main)


def test_what_is_being_checked_when_sharing_pauses_is_checked_when_it_goes_on(simulated: Simulated) -> None:
    given: list[list[bytes]] = []

    async def trainer(groups: Sequence[SignedGroup]) -> list[dict[str, Any]]:
        given.append([each.id for each in groups])
        await trio.sleep_forever()
        raise AssertionError

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar = await pair(world, nursery, trainer=trainer)
        brought = made_by(liar.node, 1, task="gym/chain_sum")
        await liar.brings(victim, brought)
        await trio.sleep(3)
        victim.scope.cancel()
        await trio.sleep(1)
        await nursery.start(victim.rollouts.watch)
        await trio.sleep(3)
        assert given == [[brought.id], [brought.id]]

    simulated(main)


def test_what_is_not_checked_yet_is_told_to_nobody_who_asks_for_what_is_recent(simulated: Simulated) -> None:
    seen = trio.Event()

    async def trainer(groups: Sequence[SignedGroup]) -> list[dict[str, Any]]:
        await seen.wait()
        return await all_teach(groups)

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        victim, liar, other = await start(nursery, world, 3, trainer=trainer, limits=RolloutLimits(copies=1))
        await connect([(liar, victim), (other, victim)])
        await trio.sleep(3)
        for seed in (1, 2):  # the second while the first is in the trainer's hands
            await Liar(liar).brings(victim, made_by(liar, seed, task="gym/chain_sum"))
            await trio.sleep(3)
        assert len(held_by(victim)) == 2
        for count in (0, 2):
            await other.rpc.call(victim.me, RECENT, RecentQuery(RUN), Empty, timeout=5)
            await trio.sleep(3)
            assert len(held_by(other)) == count
            seen.set()
            await trio.sleep(3)

    simulated(main)


def test_what_waits_for_a_busy_trainer_is_no_more_than_the_pool_holds(simulated: Simulated) -> None:
    async def trainer(groups: Sequence[SignedGroup]) -> list[dict[str, Any]]:
        await trio.sleep_forever()
        raise AssertionError

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        limits = RolloutLimits(pool=PoolLimits(groups=8, few=8))
        victim, liar = await pair(world, nursery, trainer=trainer, limits=limits)
        for first in range(0, 64, 8):
            await liar.brings(victim, *(made_by(liar.node, first + n, task="gym/chain_sum") for n in range(8)))
            await trio.sleep(2)
        assert victim.rollouts.counts["received"] == 64
        assert len(held_by(victim)) <= 8 and len(victim.rollouts._unchecked) <= 8

    simulated(main)
