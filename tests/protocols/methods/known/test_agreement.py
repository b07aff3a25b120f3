"""Members agree on one result a round: while they die, lie, linger, or cannot reach one another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio

from swarmnode.protocols.calls.rpc import CallError, PeerGone, Refused, Rpc
from swarmnode.protocols.methods.known.acceptor import diverged, prefers
from swarmnode.protocols.methods.known.agreement import Agreement
from swarmnode.protocols.methods.known.messages import (
    MAX_SECONDS,
    Accepted,
    Behind,
    Decision,
    Goodbye,
    LeaderReply,
    Owner,
    PartsMissing,
    Position,
    Ready,
    Report,
    RoundHead,
    RoundRoster,
    RoundStep,
    Seat,
    Summon,
    leader_order,
)
from swarmnode.protocols.methods.known.reduction import silence_allowed
from swarmnode.protocols.methods.method import LostPlace
from swarmnode.protocols.network import PeerId
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.wire import Empty, WireError
from swarmnode.testing.parts import context_of
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.sections import ExchangeSection

Simulated = Callable[..., None]
RUN, PARENT = "ab" * 32, "00" * 32
FLOOR, CEILING = 2.0, 10.0


class Member:
    """A node that takes part with a make-believe reduction: the hash of the roster is the next state."""

    def __init__(self, network: SimNetwork) -> None:
        self.me = network.me
        self.rpc = Rpc(network)
        self.liveness = Liveness(self.rpc)
        exchange = ExchangeSection(deadline_floor=FLOOR, deadline_ceiling=CEILING)
        self.agreement = Agreement(context_of(RUN, network, self.rpc, self.liveness, exchange))
        self.cannot_reach: set[PeerId] = set()
        self.obtained: list[str] = []
        self.trained = 1.0  # seconds

    async def reduce(self, roster: RoundRoster, within: float, silence: float | None) -> str:
        await trio.sleep(0.1)
        missing = self.cannot_reach & set(roster.peers)
        if missing:
            raise PartsMissing(tuple(sorted(missing)))
        return hashlib.sha256(roster.roster_id.encode()).hexdigest()

    async def obtain(self, state_hash: str, holders: tuple[PeerId, ...]) -> None:
        self.obtained.append(state_hash)
        if not set(holders) - self.cannot_reach:
            raise PartsMissing(holders)

    async def agree(self, *, samples: int = 10) -> Decision:
        return await self.agreement.agree(samples=samples, train_seconds=self.trained, rates={}, exchange=self)


class Swarm:
    def __init__(self, world: SimWorld, nursery: trio.Nursery) -> None:
        self.world, self.nursery = world, nursery
        self.members: list[Member] = []
        self.decisions: dict[PeerId, Decision] = {}
        self.errors: dict[PeerId, Exception] = {}
        self._events: dict[PeerId, trio.Event] = {}

    def _done(self, member: Member) -> trio.Event:
        return self._events.setdefault(member.me, trio.Event())

    async def start(self, size: int, *, window: float = 5.0, voters: int | None = None) -> None:
        """Members in the order in which they lead round 0, fully connected, all standing at round 0."""
        networks = [self.world.node(i) for i in range(size)]
        rank = leader_order(RUN, 0, [n.me for n in networks])
        for network in sorted(networks, key=lambda n: rank.index(n.me)):
            member = Member(network)
            for part in (network.run, member.rpc.run, member.liveness.run):
                await self.nursery.start(part)
            self.members.append(member)
        for member in self.members:
            member.agreement.acceptor.advance(self.position(window=window, voters=voters))

    def position(self, *, round: int = 0, window: float = 5.0, voters: int | None = None) -> Position:
        peers = tuple(m.me for m in self.members)
        return Position(round, PARENT, peers[:voters], (), window)

    def begin(self, *members: Member) -> None:
        for member in members or self.members:
            self.nursery.start_soon(self._take_part, member)

    async def _take_part(self, member: Member) -> None:
        try:
            decision = await member.agree()
        except (Behind, LostPlace) as error:
            self.errors[member.me] = error
            return
        self.decisions[member.me] = decision
        self._done(member).set()
        here = member.agreement.acceptor.position
        roster = decision.roster
        member.agreement.acceptor.advance(
            Position(here.round + 1, decision.state_hash, roster.peers, roster.joiners, 5.0)
        )

    async def decided(self, *members: Member, within: float) -> Decision:
        """The one decision of these members."""
        with trio.fail_after(within):
            for member in members or self.members:
                await self._done(member).wait()
        found = {self.decisions[m.me] for m in members or self.members}
        assert len({d.state_hash for d in found}) == 1
        return found.pop()


def simulate(simulated: Simulated, body: Callable[[Swarm], Any]) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        await body(Swarm(world, nursery))

    simulated(main)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ready_members_have_a_seat_in_one_result(simulated: Simulated, size: int) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(size)
        swarm.begin()
        decision = await swarm.decided(within=5)
        assert len(decision.roster.seats) == size and decision.missing == ()

    simulate(simulated, body)


def test_a_round_ends_though_two_living_members_cannot_exchange(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        one, other = swarm.members[1], swarm.members[2]
        one.cannot_reach, other.cannot_reach = {other.me}, {one.me}
        swarm.begin()
        decision = await swarm.decided(within=10)
        assert len(decision.roster.seats) == 3

    simulate(simulated, body)


def test_a_leader_whom_nobody_can_exchange_with_leaves_the_lead_and_its_seat(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        leader, *others = swarm.members
        for member in others:
            member.cannot_reach = {leader.me}
        swarm.begin()
        decision = await swarm.decided(within=20)
        assert leader.me not in decision.roster.peers and len(decision.roster.seats) == 3

    simulate(simulated, body)


def test_a_member_that_never_becomes_ready_costs_a_deadline(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        swarm.begin(*swarm.members[:3])
        decision = await swarm.decided(*swarm.members[:3], within=CEILING + 1)
        assert decision.missing == (swarm.members[3].me,)

    simulate(simulated, body)


def test_a_living_majority_that_is_not_ready_is_waited_for_longer_than_a_straggler(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(5)
        swarm.begin(*swarm.members[:2])
        await trio.sleep(CEILING + 3)
        assert not swarm.decisions  # two of five must not decide while the others live
        swarm.begin(*swarm.members[2:])
        decision = await swarm.decided(within=10)
        assert len(decision.roster.seats) == 5

    simulate(simulated, body)


def test_a_living_majority_that_never_becomes_ready_does_not_stop_the_others(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(5)
        swarm.begin(*swarm.members[:2])
        await swarm.decided(*swarm.members[:2], within=5 + 3 * CEILING)

    simulate(simulated, body)


def test_a_leader_that_answers_pings_and_never_leads_is_passed_over(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        swarm.begin(*swarm.members[1:])
        decision = await swarm.decided(*swarm.members[1:], within=5 + 4 * CEILING)
        assert swarm.members[0].me in decision.missing

    simulate(simulated, body)


def test_a_leader_that_was_waited_for_in_vain_is_waited_for_less_the_next_time(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        silent, *others = swarm.members
        everybody = [member.me for member in swarm.members]
        its_own = [round for round in range(1, 100) if leader_order(RUN, round, everybody)[0] == silent.me]
        took = []
        for round in (0, *its_own[:2]):
            for member in swarm.members:
                member.agreement.acceptor.advance(swarm.position(round=round))
            began = trio.current_time()
            with trio.fail_after(5 + 4 * CEILING):
                async with trio.open_nursery() as nursery:
                    for member in others:
                        nursery.start_soon(member.agree)
            took.append(trio.current_time() - began)
        straggling = (
            5 + CEILING
        )  # the window in which all may train, and how long the next leader waits for the silent one
        assert took[0] > straggling + 2 * CEILING - 1
        assert max(took[1:]) < straggling + FLOOR + 1

    simulate(simulated, body)


def test_who_leads_while_others_still_train_is_not_to_blame_for_the_wait(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3, window=2000.0)
        slow, one, other = swarm.members
        one.trained = other.trained = 1000.0
        swarm.begin(one, other)  # their calls of the first end after LONGEST_WAIT
        await trio.sleep(600)
        assert not one.agreement._patience.wait(slow.me, 2 * CEILING)
        swarm.begin(slow)
        await swarm.decided(within=2000)

    simulate(simulated, body)


def test_a_round_ends_though_every_leader_used_up_its_patience_and_one_member_is_never_ready(
    simulated: Simulated,
) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(5, window=1.0)
        for member in swarm.members:
            for other in swarm.members:
                member.agreement._patience.overdraw(other.me, 10_000.0)
        swarm.begin(*swarm.members[:4])  # the fifth answers pings; nobody knows yet how long stragglers take
        await swarm.decided(*swarm.members[:4], within=10 * CEILING)

    simulate(simulated, body)


def test_survivors_finish_when_the_leader_dies_and_a_minority_does_not_outvote_the_living(
    simulated: Simulated,
) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(5)
        swarm.begin()
        await trio.sleep(0.12)
        swarm.world.kill(swarm.members[0].me)
        decision = await swarm.decided(*swarm.members[1:], within=15)
        assert len(set(decision.roster.peers) & {m.me for m in swarm.members[1:]}) == 4

    simulate(simulated, body)


def test_what_a_majority_accepted_survives_the_leader_that_decided_it(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        leader, *others = swarm.members
        swarm.begin()
        await swarm.decided(leader, within=5)
        swarm.world.kill(leader.me)  # its rulings are still on the way and are lost
        assert not any(m.me in swarm.decisions for m in others)
        decision = await swarm.decided(*others, within=15)
        assert decision.state_hash == swarm.decisions[leader.me].state_hash

    simulate(simulated, body)


def test_a_promise_outlives_going_to_the_same_position_again(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        leader, *others = swarm.members
        swarm.begin()
        await swarm.decided(leader, within=5)
        for member in others:
            member.agreement.acceptor.advance(swarm.position())  # as after a catch-up with the very same head
            assert member.agreement.acceptor.accepted is not None
            member.agreement.acceptor.advance(Position(0, "11" * 32, swarm.position().voters, (), 5.0))
            assert member.agreement.acceptor.accepted is None

    simulate(simulated, body)


def test_a_member_behind_is_told_the_decision(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        swarm.begin(*swarm.members[:3])
        await swarm.decided(*swarm.members[:3], within=CEILING + 1)
        swarm.begin(swarm.members[3])
        await swarm.decided(within=5)

    simulate(simulated, body)


def test_a_leader_behind_learns_the_decision_from_those_it_summons(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        leader, *others = swarm.members
        swarm.begin(*others)
        await swarm.decided(*others, within=5 + 4 * CEILING)
        swarm.begin(leader)
        await swarm.decided(within=10)
        assert leader.agreement.acceptor.late_by > 0

    simulate(simulated, body)


def test_nobody_goes_back_to_a_leader_that_stands_behind(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        for member in swarm.members[1:]:
            member.agreement.acceptor.advance(swarm.position(round=5))
        ahead = sorted(swarm.members[1:], key=lambda m: m.agreement.acceptor.candidates().index(m.me))
        swarm.begin(*ahead)
        decision = await swarm.decided(*ahead, within=5 + 6 * CEILING)
        assert decision.roster.round == 5 and not swarm.errors
        older = RoundHead(3, "11" * 32, tuple("abcdefg"), (), 1.0, RUN, (), 0.0, False)
        assert not ahead[0].agreement.acceptor.should_follow(older)

    simulate(simulated, body)


def test_one_that_is_no_candidate_is_led_along_and_named_as_joiner(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4, voters=3)
        swarm.begin(swarm.members[3])
        await trio.sleep(0.5)
        swarm.begin(*swarm.members[:3])
        decision = await swarm.decided(within=5)
        assert decision.roster.joiners == (swarm.members[3].me,)

    simulate(simulated, body)


def test_who_is_no_candidate_does_not_make_the_wait_for_stragglers_begin_or_end_early(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(10, voters=5)
        leader, *others = swarm.members[:5]
        leader.agreement._grace = lambda readies: min(ready.train_seconds for ready in readies)  # type: ignore[method-assign]
        hasty = a_ready(0, train_seconds=1e-6)
        for stranger in swarm.members[5:]:
            ask = partial(stranger.rpc.call, leader.me, "round.ready", hasty, LeaderReply, timeout=20)
            swarm.nursery.start_soon(ask)
        await trio.sleep(0.5)
        for member in (leader, *others):  # half are ready after 1.2 s, and the last 0.8 s later
            swarm.begin(member)
            await trio.sleep(0.4)
        decision = await swarm.decided(*swarm.members[:5], within=5)
        assert len(decision.roster.seats) == 5

    simulate(simulated, body)


def test_one_that_is_no_candidate_gives_up_when_no_candidate_answers(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3, voters=2)
        for member in swarm.members[:2]:
            swarm.world.kill(member.me)
        swarm.begin(swarm.members[2])
        await trio.sleep(10)
        assert isinstance(swarm.errors[swarm.members[2].me], LostPlace)

    simulate(simulated, body)


def test_who_says_goodbye_is_not_waited_for_even_a_round_early(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        leaver = swarm.members[3]
        for member in swarm.members[:3]:
            goodbye = Goodbye(RUN, 1)
            await leaver.rpc.call(member.me, "round.goodbye", goodbye, Empty, timeout=1)
            member.agreement.acceptor.advance(swarm.position(round=1))
        swarm.begin(*swarm.members[:3])
        await swarm.decided(*swarm.members[:3], within=1)

    simulate(simulated, body)


# --- peers that break the rules --------------------------------------------------------------------------------------


def a_ready(ballot: int, **changes: Any) -> Ready:
    fields = {"samples": 1, "train_seconds": 1.0, "rates": {}, "joiners": (), "accepted": None, "parent": PARENT}
    return Ready(RUN, 0, ballot, **{**fields, **changes})


def test_no_ballot_is_so_high_that_a_round_cannot_end(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        liar, *honest = swarm.members
        for member in honest:
            for ballot in range(1 << 40, (1 << 40) + 3):
                with pytest.raises(Refused):
                    await liar.rpc.call(member.me, "round.ready", a_ready(ballot), LeaderReply, timeout=1)
                await liar.rpc.call(member.me, "round.summon", Summon(RUN, 0, ballot), RoundHead, timeout=1)
            assert member.agreement.acceptor.ballot <= 3 * 4096
        swarm.begin()
        await swarm.decided(within=30)

    simulate(simulated, body)


def test_one_peer_holds_one_desk(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(5)
        leader, liar, *_ = swarm.members

        async def ask(ballot: int) -> None:
            await liar.rpc.call(leader.me, "round.ready", a_ready(ballot), LeaderReply, timeout=5)

        for turn in range(40):
            swarm.nursery.start_soon(ask, 5 * (turn + 1))
        await trio.sleep(1)
        assert len(leader.agreement.acceptor.boxes) <= 1

    simulate(simulated, body)


def test_joiners_are_counted(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(1)
        standing = swarm.members[0].agreement.acceptor
        for i in range(1000):
            standing._wishes_to_join(f"peer{i}")
        assert len(swarm.members[0].agreement.acceptor.waiting_to_join()) == 64

    simulate(simulated, body)


def test_a_vector_is_cut_by_candidates_only(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        standing = swarm.members[0].agreement.acceptor
        seats = tuple(Seat(m.me, 1, 4) for m in swarm.members[:2])
        gone = Owner(swarm.members[2].me, 4)
        for cut_by, fits in (((), True), ((gone,), True), ((gone, Owner("a stranger", 4)), False)):
            assert standing.is_for(RoundRoster(RUN, 0, 1, PARENT, seats, (), 1.0, cut_by), 1) is fits

    simulate(simulated, body)


def test_a_forged_claim_of_an_accepted_result_stalls_nobody(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        liar = swarm.members[2]
        roster = RoundRoster(RUN, 0, 0, PARENT, (Seat(liar.me, 1, 4),), (), 1.0)
        liar.agreement.acceptor.accepted = Accepted(7, "ee" * 32, roster)
        for member in swarm.members[:2]:
            member.cannot_reach = set()
        swarm.begin()
        decision = await swarm.decided(within=10)
        assert decision.state_hash != "ee" * 32

    simulate(simulated, body)


def test_a_member_that_reports_another_state_is_left_out(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        liar = swarm.members[3]

        async def lie(roster: RoundRoster, within: float, silence: float | None) -> str:
            return "ee" * 32

        liar.reduce = lie  # type: ignore[method-assign]
        swarm.begin()
        decision = await swarm.decided(*swarm.members[:3], within=20)
        assert decision.state_hash != "ee" * 32 and liar.me in decision.missing

    simulate(simulated, body)


def test_a_member_that_says_it_missed_everybody_costs_no_other_its_seat(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(5)
        liar = swarm.members[4]
        liar.cannot_reach = {m.me for m in swarm.members[:4]}
        swarm.begin()
        decision = await swarm.decided(*swarm.members[:4], within=20)
        assert {m.me for m in swarm.members[:4]} <= set(decision.roster.peers)

    simulate(simulated, body)


@pytest.mark.parametrize("whom", ["itself", "a stranger"])
def test_a_member_that_says_it_missed_nobody_who_could_be_left_out_is_left_out(simulated: Simulated, whom: str) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        liar = swarm.members[3]

        async def blame(roster: RoundRoster, within: float, silence: float | None) -> str:
            raise PartsMissing((liar.me if whom == "itself" else liar.me[::-1],))

        liar.reduce = blame  # type: ignore[method-assign]
        swarm.begin()
        decision = await swarm.decided(*swarm.members[:3], within=20)
        assert set(decision.roster.peers) == {m.me for m in swarm.members[:3]}

    simulate(simulated, body)


def test_a_report_of_one_that_was_not_ready_does_not_count(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        leader = swarm.members[0]
        stranger = Member(swarm.world.node("stranger"))
        for part in (swarm.world.node("stranger").run, stranger.rpc.run, stranger.liveness.run):
            await swarm.nursery.start(part)

        async def keep_reporting() -> None:
            while True:
                report = Report(RUN, 0, 0, "ee" * 32, ())
                with trio.move_on_after(0.05):
                    await stranger.rpc.call(leader.me, "round.report", report, LeaderReply, timeout=0.05)

        swarm.nursery.start_soon(keep_reporting)
        swarm.begin()
        decision = await swarm.decided(within=5)
        assert decision.roster.ballot == 0 and len(decision.roster.seats) == 3

    simulate(simulated, body)


def test_calls_for_another_run_or_before_a_position_are_refused(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(2)
        one, other = swarm.members
        with pytest.raises(Refused) as refusal:
            await one.rpc.call(other.me, "round.summon", Summon("cd" * 32, 0, 1), RoundHead, timeout=1)
        assert refusal.value.code == "unknown-run"
        swarm.world.kill(other.me)
        with pytest.raises(PeerGone):
            await one.rpc.call(other.me, "round.summon", Summon(RUN, 0, 1), RoundHead, timeout=1)

    simulate(simulated, body)


def test_of_two_histories_exactly_one_gives_way() -> None:
    heads = [
        RoundHead(
            round, f"{n:064x}", tuple("abcd"[:voters]), (), 1.0, RUN, (RoundStep(round - 1, f"{n:064x}"),), 0.0, False
        )
        for round in (3, 4)
        for voters in (2, 3)
        for n in (1, 2)
    ]
    for mine in heads:
        for theirs in heads:
            assert prefers(mine, theirs) + prefers(theirs, mine) == (mine != theirs)
            if mine.round == theirs.round:
                assert diverged(mine, theirs) == (mine.parent != theirs.parent)


def test_a_roster_counts_for_those_of_it_who_held_its_result() -> None:
    alone = RoundHead(3, "11" * 32, tuple("abcdefg"), (), 1.0, RUN, (), 0.0, False, missing=tuple("bcdefgx"))
    others = RoundHead(3, "22" * 32, tuple("bc"), (), 1.0, RUN, (), 0.0, False)
    assert prefers(alone, others) and not prefers(others, alone)
    assert prefers(others, replace(alone, missing=())), "seven held it"


def test_a_round_that_is_said_to_have_begun_long_ago_is_told_like_others(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(1)
        (member,) = swarm.members
        member.agreement.acceptor.advance(swarm.position(round=7), elapsed=MAX_SECONDS)
        await trio.sleep(10)
        assert member.agreement.acceptor.head().elapsed < MAX_SECONDS / 1000

    simulate(simulated, body)


def test_a_leader_that_sends_all_on_to_its_own_next_ballot_is_soon_not_followed(simulated: Simulated) -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(4)
        liar, *honest = swarm.members
        server, count = liar.rpc._server, len(swarm.members)

        async def again(peer: PeerId, ready: Ready) -> LeaderReply:
            return LeaderReply("again", ballot=ready.ballot + count)

        server.methods["round.ready"] = replace(server.methods["round.ready"], handler=again)
        swarm.begin(*honest)
        await swarm.decided(*honest, within=60)

    simulate(simulated, body)


def test_who_wants_to_be_led_by_one_member_again_and_again_does_not_keep_it_from_another(simulated: Simulated) -> None:
    """With three candidates, one that waits is most of the others."""

    async def body(swarm: Swarm) -> None:
        await swarm.start(3)
        leader, honest, liar = swarm.members

        async def ask() -> None:
            for ballot in range(1, 1000, 3):  # of the second candidate
                with trio.move_on_after(0.3), suppress(CallError):
                    await liar.rpc.call(honest.me, "round.ready", a_ready(ballot), LeaderReply, timeout=1)

        swarm.nursery.start_soon(ask)
        await trio.sleep(1)
        swarm.begin(leader, honest)
        await swarm.decided(leader, honest, within=90)
        swarm.nursery.cancel_scope.cancel()

    simulate(simulated, body)


def test_attempts_without_end_end_nobody() -> None:
    assert silence_allowed(1.0, 5000) == silence_allowed(1.0, 50)


def test_what_an_owner_says_is_no_longer_than_a_record() -> None:
    seats = (Seat("a", 1, 4),)
    with pytest.raises(WireError, match="steering"):
        RoundRoster(RUN, 0, 0, PARENT, seats, (), 1.0, (), bytes(10_000))
    with pytest.raises(WireError, match="seats"):
        RoundRoster(RUN, 0, 0, PARENT, tuple(Seat(str(n), 1, 4) for n in range(257)), (), 1.0)


def test_a_result_names_no_more_absent_ones_than_a_message_may(simulated: Simulated) -> None:
    """Its voters are what a stranger said they were."""

    async def body(swarm: Swarm) -> None:
        await swarm.start(1)
        (member,) = swarm.members
        invented = tuple(f"x{n}" for n in range(1023))
        agreement, roster = member.agreement, RoundRoster(RUN, 0, 0, PARENT, (Seat(member.me, 1, 4),), ("y",), 1.0)
        agreement.acceptor.advance(Position(0, PARENT, (member.me, *invented), ("y", "z"), 5.0))
        box = agreement.acceptor.box(0)
        box.readies = {peer: a_ready(0) for peer in (member.me, "y", "z")}
        box.away.update(invented)
        box.reports[member.me] = Report(RUN, 0, 0, PARENT, ())
        for peer in ("y", "z"):
            member.liveness.suspect(peer)
        seats = tuple(Seat(peer, 1, 4) for peer in (member.me, "y", "z"))
        decision = await agreement._collect(box, LeaderReply("roster", roster=replace(roster, seats=seats)), 1.0)
        assert decision is not None and len(decision.missing) == 1024

    simulate(simulated, body)
