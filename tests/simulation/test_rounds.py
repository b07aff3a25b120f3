"""Rounds of a whole swarm on virtual time: agreement while members die, freeze, join and are cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from simswarm import SimSwarm, simulate

from swarmnode.protocols.methods.known.messages import PartsMissing, RoundHead, RoundRoster

NAMES = ("a", "b", "c", "d", "e")


def test_relayed_members_are_clients_in_the_exchange_until_they_are_direct() -> None:
    async def body(swarm: SimSwarm) -> None:
        relayed = [("b", "d"), ("b", "e"), ("c", "d"), ("c", "e"), ("d", "e")]  # d and e behind symmetric NATs
        for one, other in relayed:
            swarm.world.relay(swarm.world.node(one).me, swarm.world.node(other).me)
        await swarm.begin(NAMES)
        await swarm.round_done(3, *NAMES)
        assert swarm.owners("d") == swarm.owners("e") == {"a", "b", "c"}
        for one, other in relayed:
            swarm.world.get_direct(swarm.peer(one), swarm.peer(other))
        await swarm.round_done(6, *NAMES)
        assert swarm.owners("d") == swarm.owners("e") == set(NAMES)
        for round in range(7):
            assert len(swarm.hashes(round)) == 1
        assert all(swarm.nodes[n].rounds[6]["members"] == 5 for n in NAMES)

    simulate(body, dimension=8192)  # a part for each


@pytest.mark.parametrize("victim", NAMES)
def test_survivors_finish_every_round_after_a_kill(victim: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES)
        await swarm.round_done(2, *NAMES)
        await trio.sleep(0.5)
        swarm.kill(victim)
        survivors = [n for n in NAMES if n != victim]
        await swarm.round_done(6, *survivors)
        for round in range(7):
            assert len(swarm.hashes(round)) == 1
        usual = swarm.nodes[survivors[0]].rounds[2]["seconds"]
        assert swarm.nodes[survivors[0]].rounds[3]["seconds"] <= 2 * usual + 5.0

    simulate(body)


def test_a_round_in_which_one_of_two_died_is_partial_and_the_next_ones_are_whole() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(("a", "b"))
        await swarm.round_done(2, "a", "b")
        swarm.kill("b")
        await swarm.round_done(5, "a")
        assert swarm.nodes["a"].rounds[3]["outcome"] == "Partial"
        assert swarm.nodes["a"].rounds[5]["outcome"] == "Completed"

    simulate(body)


def test_a_late_joiner_stands_with_the_swarm_within_two_rounds() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES)
        await swarm.round_done(5, *NAMES)
        await swarm.start("late", join="a")
        await swarm.until(lambda: any(e["event"] == "caught_up" for e in swarm.nodes["late"].events))
        caught_up = next(e for e in swarm.nodes["late"].events if e["event"] == "caught_up")
        assert caught_up["round"] <= 8
        await swarm.round_done(9, "late", *NAMES)
        assert min(swarm.nodes["late"].rounds) <= 8
        for round in range(10):
            assert len(swarm.hashes(round)) == 1
        assert swarm.nodes["a"].rounds[9]["members"] == 6

    simulate(body)


@pytest.mark.parametrize("victim", NAMES)
def test_a_frozen_member_costs_one_round_its_deadline_and_comes_back(victim: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES)
        await swarm.round_done(2, *NAMES)
        swarm.world.freeze(swarm.peer(victim))
        others = [n for n in NAMES if n != victim]
        await swarm.round_done(5, *others)
        usual = swarm.nodes[others[0]].rounds[2]["seconds"]
        for name in others:
            assert max(swarm.nodes[name].rounds[r]["seconds"] for r in range(3, 6)) <= 2 * usual + 5.0
        swarm.world.thaw(swarm.peer(victim))
        thawed_in = max(swarm.nodes[others[0]].rounds)
        await swarm.until(
            lambda: any(
                r > thawed_in and e["state_hash"] == swarm.nodes[others[0]].rounds.get(r, e)["state_hash"]
                for r, e in swarm.nodes[victim].rounds.items()
                if r in swarm.nodes[others[0]].rounds
            )
        )
        last = max(swarm.nodes[victim].rounds)
        members = [n for n in (*others, victim) if last in swarm.nodes[n].rounds]
        assert len({swarm.nodes[n].rounds[last]["state_hash"] for n in members}) == 1
        for round in range(6):
            assert len({swarm.nodes[n].rounds[round]["state_hash"] for n in others}) == 1

    simulate(body)


@pytest.mark.parametrize("victim", ["a", "c", "e"])
def test_nobody_follows_one_that_ended_a_round_alone_by_the_roster_of_many(victim: str) -> None:
    """Its cable goes out once it holds the roster's result, which the others miss a part of, and make another."""

    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES)
        await swarm.round_done(1, *NAMES)
        me, others = swarm.peer(victim), [n for n in NAMES if n != victim]

        def interfere(name: str) -> None:
            rounds = swarm.nodes[name].diloco_rounds
            reduce = rounds.reduce

            async def first(roster: RoundRoster, within: float, silence: float | None) -> str:
                hash = await reduce(roster, within, silence)
                if roster.round == 2 and me in roster.peers:
                    if name != victim:
                        raise PartsMissing((me,))
                    swarm.world.partition([[me], map(swarm.peer, others)])
                return hash

            rounds.reduce = first  # type: ignore[method-assign]

        for name in NAMES:
            interfere(name)
        await swarm.round_done(2, *NAMES)
        assert swarm.nodes[victim].rounds[2]["members"] == 5 and swarm.nodes[others[0]].rounds[2]["members"] == 4
        swarm.world.heal()
        await swarm.round_done(9, *NAMES)
        assert len(swarm.hashes(9)) == 1
        for name in others:
            assert 3 not in {e["round"] for e in swarm.nodes[name].events if e["event"] == "caught_up"}

    simulate(body)


def test_a_joiner_that_is_named_by_a_few_who_went_on_apart_waits_for_the_many() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES)
        await swarm.round_done(4, *NAMES)
        joins, me, went = swarm.nodes["a"].diloco, swarm.peer("a"), list[str]()
        many = replace(joins.agreement.acceptor.head(), voters=tuple(map(swarm.peer, NAMES[1:])), joiners=())
        same = replace(many, voters=(swarm.peer("d"),), joiners=(me,), round=many.round + 1)
        (*before, last) = many.history
        apart = replace(same, history=(*before, replace(last, state_hash="00" * 32)))

        liars: list[str] = []  # who do not have the state that they tell of

        async def go_to(head: RoundHead, source: str) -> bool:
            went.append(source)
            return source not in liars

        for few, lies, gone in ((same, "", ["d"]), (apart, "", ["b"]), (apart, "b", ["b", "d"])):
            went.clear()
            liars[:] = lies

            async def heads(*, join: bool, few: RoundHead = few) -> list[tuple[RoundHead, str]]:
                return [(many, "b"), (few, "d")]

            joins._heads, joins.go_to = heads, go_to  # type: ignore[method-assign]
            assert await joins._join_others() is ("d" in gone) and went == gone

    simulate(body)


def test_nobody_goes_to_a_head_without_voters() -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(NAMES[:2])
        await swarm.round_done(1, *NAMES[:2])
        head = replace(swarm.nodes["b"].diloco.agreement.acceptor.head(), voters=())
        assert not await swarm.nodes["a"].diloco.go_to(head, swarm.peer("b"))
        await swarm.round_done(4, *NAMES[:2])

    simulate(body)
