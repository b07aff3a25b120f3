"""What Rpc promises to callers and to the callee's resources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import trio

from swarmnode.protocols.calls.frames import CALL, FAIL, REPLY, Frame
from swarmnode.protocols.calls.rpc import (
    PROTOCOL,
    CallError,
    DeadlineExceeded,
    PeerGone,
    Refuse,
    Refused,
    Rpc,
    RpcLimits,
)
from swarmnode.protocols.frames import FrameReader, frame
from swarmnode.protocols.network import PeerId, Stream
from swarmnode.protocols.wire import Empty, decode, encode
from swarmnode.testing.simnet import SimNetwork, SimWorld

Simulated = Callable[..., None]
DEFAULT = RpcLimits()


@dataclass(frozen=True)
class Job:
    seconds: float = 0.0
    load: bytes = b""


class Callee:
    """A node whose method "work" sleeps as told and keeps a diary."""

    def __init__(self, network: SimNetwork, limits: RpcLimits = DEFAULT) -> None:
        self.network = network
        self.rpc = Rpc(network, limits=limits)
        self.diary: list[str] = []
        self.rpc.serve("work", Job, self.work)

    async def work(self, _peer: PeerId, job: Job) -> Job:
        self.diary.append("began")
        try:
            await trio.sleep(job.seconds)
        except trio.Cancelled:
            self.diary.append("cancelled")
            raise
        self.diary.append("done")
        return job


async def pair(world: SimWorld, nursery: trio.Nursery, limits: RpcLimits = DEFAULT) -> tuple[Callee, Callee]:
    nodes = Callee(world.node("alice"), limits), Callee(world.node("bob"), limits)
    for node in nodes:
        await nursery.start(node.network.run)
        await nursery.start(node.rpc.run)
    return nodes


async def failure_of(rpc: Rpc, peer: PeerId, job: Job, timeout: float) -> tuple[type[CallError], float]:
    """Which error the call ends with, and after how many seconds."""
    began = trio.current_time()
    with pytest.raises(CallError) as caught:
        await rpc.call(peer, "work", job, Job, timeout=timeout)
    return caught.type, round(trio.current_time() - began, 6)


def test_answers_come_as_they_are_done_not_as_they_were_asked(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        order: list[float] = []

        async def ask(seconds: float) -> None:
            await alice.rpc.call(bob.network.me, "work", Job(seconds), Job, timeout=10)
            order.append(seconds)

        began = trio.current_time()
        async with trio.open_nursery() as asking:
            for seconds in (3.0, 1.0, 2.0):
                asking.start_soon(ask, seconds)
        assert order == [1.0, 2.0, 3.0]
        assert trio.current_time() - began < 3.2

    simulated(main)


@pytest.mark.parametrize(("names", "seconds"), [("bob carol dave", 1.0), ("bob frank dave", 5.0)])
def test_all_are_waited_for_until_half_answered_and_then_the_rest_for_a_while(
    simulated: Simulated, names: str, seconds: float
) -> None:
    """`dave` is silent and `frank` refuses: who refuses may do so for many, while those who have it still look."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        await nursery.start(world.node("frank").run)  # it serves no calls
        for name in ("carol", "dave"):
            node = Callee(world.node(name))
            await nursery.start(node.network.run)
            await nursery.start(node.rpc.run)
            await alice.rpc.ping(node.network.me, timeout=1)
        world.freeze(world.node("dave").me)
        began = trio.current_time()
        peers = [world.node(name).me for name in names.split()]
        answers = await alice.rpc.call_all(peers, "work", Job(), Job, timeout=5.0, rest=1.0)
        assert bob.network.me in dict(answers)
        assert trio.current_time() - began == pytest.approx(seconds, abs=0.2)

    simulated(main)


def test_who_need_not_answer_and_does_not_gives_nothing(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        assert await alice.rpc.ask(bob.network.me, "work", Job(), Job, timeout=1) is not None
        assert await alice.rpc.ask(bob.network.me, "no such thing", Job(), Job, timeout=1) is None
        world.freeze(bob.network.me)
        assert await alice.rpc.ask(bob.network.me, "work", Job(), Job, timeout=1) is None

    simulated(main)


def test_ping_measures_the_round_trip(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        await alice.rpc.ping(bob.network.me, timeout=1)
        assert await alice.rpc.ping(bob.network.me, timeout=1) == pytest.approx(0.06)

    simulated(main, latency=0.03)


def test_one_stream_carries_all_calls_to_a_peer(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        opened = []
        open_stream = alice.network.open_stream

        async def counting(peer: PeerId, protocol: str, *, timeout: float = 10.0) -> Stream:
            opened.append(protocol)
            return await open_stream(peer, protocol, timeout=timeout)

        alice.network.open_stream = counting  # type: ignore[method-assign]
        async with trio.open_nursery() as asking:
            for _ in range(200):
                asking.start_soon(lambda: alice.rpc.call(bob.network.me, "work", Job(0.1), Job, timeout=10))
        assert opened == [PROTOCOL]

    simulated(main)


def test_lone_calls_and_crowds_of_them_take_turns(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)

        async def ask(load: bytes) -> None:
            assert await alice.rpc.call(bob.network.me, "work", Job(0.0, load), Job, timeout=10) == Job(0.0, load)

        for crowd in (1, 1, 5, 1, 60, 1):
            for size in (1, 1000, 300_000):
                async with trio.open_nursery() as asking:
                    for number in range(crowd):
                        asking.start_soon(ask, bytes([number]) * size)
        assert bob.diary.count("done") == 3 * (1 + 1 + 5 + 1 + 60 + 1)

    simulated(main)


def test_each_refusal_says_why(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)

        async def shy(_peer: PeerId, _job: Job) -> Job:
            raise Refuse("shy", "not today")

        async def broken(_peer: PeerId, _job: Job) -> Job:
            raise KeyError("secret")

        bob.rpc.serve("shy", Job, shy)
        bob.rpc.serve("broken", Job, broken)
        reasons = {}
        for method, request in (("shy", Job()), ("broken", Job()), ("none", Job()), ("work", Frame(0, 0, body=b"x"))):
            with pytest.raises(Refused) as caught:
                await alice.rpc.call(bob.network.me, method, request, Frame, timeout=1)
            reasons[method] = caught.value.code
            assert "secret" not in str(caught.value)
        assert reasons == {"shy": "shy", "broken": "internal", "none": "unknown-method", "work": "bad-reply"}

    simulated(main)


def test_a_refusal_is_cut_where_the_callee_did_not(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, _ = await pair(world, nursery)
        mallory = world.node("mallory")

        async def lie(stream: Stream) -> None:
            await FrameReader(stream).frame()
            await stream.send_all(frame(encode(Frame(FAIL, 1, code="c" * 100_000, text="t" * 100_000))))
            await trio.sleep_forever()

        mallory.serve(PROTOCOL, lie)
        await nursery.start(mallory.run)
        with pytest.raises(Refused) as caught:
            await alice.rpc.call(mallory.me, "work", Job(), Job, timeout=5)
        assert caught.value.code == "c" * 80 and len(str(caught.value)) < 1000

    simulated(main)


def test_cancelling_the_caller_cancels_the_handler(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        with trio.move_on_after(1):
            await alice.rpc.call(bob.network.me, "work", Job(100), Job, timeout=200)
        await trio.sleep(0.05)
        assert bob.diary == ["began", "cancelled"]

    simulated(main)


def test_a_frozen_peer_costs_each_call_its_own_deadline_and_others_nothing(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        carol = Callee(world.node("carol"))
        await nursery.start(carol.network.run)
        await nursery.start(carol.rpc.run)
        frozen = bob.network.me
        await alice.rpc.ping(frozen, timeout=1)
        world.freeze(frozen)
        endings: dict[float, tuple[type[CallError], float]] = {}

        async def ask(timeout: float) -> None:  # more than a window: the writes block
            endings[timeout] = await failure_of(alice.rpc, frozen, Job(0, bytes(500_000)), timeout)

        async with trio.open_nursery() as asking:
            for timeout in (1.0, 2.0, 3.0):
                asking.start_soon(ask, timeout)
            await trio.sleep(0.1)
            assert await alice.rpc.ping(carol.network.me, timeout=1) < 0.2
        assert endings == {timeout: (DeadlineExceeded, timeout) for timeout in (1.0, 2.0, 3.0)}
        await trio.sleep(30)
        assert (await failure_of(alice.rpc, frozen, Job(), 4))[1] == 4
        world.thaw(frozen)
        assert await alice.rpc.call(frozen, "work", Job(0, b"x"), Job, timeout=1) == Job(0, b"x")

    simulated(main)


def test_calls_fail_at_once_when_the_peer_dies_and_work_when_it_is_back(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        endings: list[tuple[type[CallError], float]] = []

        async def ask() -> None:
            endings.append(await failure_of(alice.rpc, bob.network.me, Job(50), 100))

        async with trio.open_nursery() as asking:
            for _ in range(100):  # more than may be in flight
                asking.start_soon(ask)
            await trio.sleep(1)
            world.kill(bob.network.me)
        assert endings == [(PeerGone, 1.0)] * 100
        with pytest.raises(PeerGone):
            await alice.rpc.ping(bob.network.me, timeout=5)
        again = Callee(world.node("bob"))
        await nursery.start(again.network.run)
        await nursery.start(again.rpc.run)
        await alice.rpc.ping(bob.network.me, timeout=1)

    simulated(main)


def test_a_stopped_rpc_fails_its_calls(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        _, bob = await pair(world, nursery)
        caller = Rpc(world.node("carol"))
        await nursery.start(world.node("carol").run)
        async with trio.open_nursery() as inner:
            await inner.start(caller.run)
            async with trio.open_nursery() as asking:

                async def ask() -> None:
                    with pytest.raises(PeerGone):
                        await caller.call(bob.network.me, "work", Job(50), Job, timeout=100)

                asking.start_soon(ask)
                await trio.sleep(1)
                inner.cancel_scope.cancel()
        with pytest.raises(PeerGone):
            await caller.ping(bob.network.me, timeout=1)

    simulated(main)


# -- peers that break the rules


async def raw_caller(world: SimWorld, nursery: trio.Nursery, bob: Callee) -> Stream:
    mallory = world.node("mallory")
    await nursery.start(mallory.run)
    return await mallory.open_stream(bob.network.me, PROTOCOL)


@pytest.mark.parametrize(
    "attack",
    [
        b"\xff\xff\xff\xff\x7f",  # a frame of 32 GiB
        b"\xff" * 10,
        b"\x05hello",
        frame(b"\x91" * 5000),
        frame(encode(Frame(REPLY, 1))),
        frame(encode(Frame(4, 1))),  # a kind that there is not
        frame(encode(Frame(CALL, -1, "work", 1.0))),
        frame(encode(Frame(CALL, 1, "work", float("nan"), encode(Job())))),
        frame(encode(Frame(CALL, 1, "work", 5.0, encode(Job(3.0))))) * 2,
    ],
)
def test_a_caller_that_breaks_the_rules_loses_only_its_stream(simulated: Simulated, attack: bytes) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        stream = await raw_caller(world, nursery, bob)
        await stream.send_all(attack)
        with trio.fail_after(1), pytest.raises(Exception, match="closed"):
            while await stream.receive_some(1000):
                pass
        assert bob.rpc.violations.count(world.node("mallory").me) == 1
        await alice.rpc.ping(bob.network.me, timeout=1)
        assert "done" not in bob.diary

    simulated(main)


def test_a_thousand_calls_are_refused_beyond_the_limit(simulated: Simulated, caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery, RpcLimits(serves=10))
        stream = await raw_caller(world, nursery, bob)
        for number in range(1, 1001):
            await stream.send_all(frame(encode(Frame(CALL, number, "work", 5.0, encode(Job(1.0))))))
        reader, codes = FrameReader(stream), []
        for _ in range(1000):
            raw = await reader.frame()
            assert raw is not None
            message = decode(Frame, raw)
            codes.append(message.code if message.kind == FAIL else "answered")
        assert codes.count("busy") == 990
        assert codes.count("answered") == 10
        await alice.rpc.ping(bob.network.me, timeout=1)

    simulated(main)
    assert len([record for record in caplog.records if "asks too much" in record.message]) == 1


def test_others_have_their_turn_between_calls_that_arrive_together(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        _, bob = await pair(world, nursery, RpcLimits(serves=10))
        refused = [0]  # calls, at each turn of the loop

        class Turns(trio.abc.Instrument):
            def before_io_wait(self, timeout: float) -> None:
                refused.append(bob.rpc._server.refused.total())

        stream = await raw_caller(world, nursery, bob)
        trio.lowlevel.add_instrument(Turns())
        calls = (Frame(CALL, number, "work", 5.0, encode(Job(1.0))) for number in range(1, 1001))
        await stream.send_all(b"".join(frame(encode(call)) for call in calls))
        await trio.sleep(0.9)
        assert refused[-1] == 990
        assert max(later - before for before, later in pairwise(refused)) <= DEFAULT.calls

    simulated(main)


def test_others_have_their_turn_between_calls_that_take_long(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        _, bob = await pair(world, nursery)
        answered = [0]  # calls, at each turn of the loop

        async def think(_peer: PeerId, _query: Empty) -> Empty:
            trio.lowlevel.current_clock().jump(0.002)  # type: ignore[attr-defined]
            answered[-1] += 1
            return Empty()

        class Turns(trio.abc.Instrument):
            def before_io_wait(self, timeout: float) -> None:
                answered.append(0)

        bob.rpc.serve("think", Empty, think)
        stream = await raw_caller(world, nursery, bob)
        trio.lowlevel.add_instrument(Turns())
        calls = (Frame(CALL, number, "think", 5.0, encode(Empty())) for number in range(1, 61))
        await stream.send_all(b"".join(frame(encode(call)) for call in calls))
        await trio.sleep(0.9)
        assert sum(answered) == 60
        assert max(answered) <= 3
        calls = (Frame(CALL, number, "think", 5.0, encode(Empty())) for number in range(61, 121))
        await stream.send_all(b"".join(frame(encode(call)) for call in calls))
        await stream.aclose()
        await trio.sleep(0.9)
        assert sum(answered) < 120  # it left before all were answered, and those that are left count for nothing
        assert bob.rpc._server.carried_out.total() == bob.rpc._server.held.total() == 0

    simulated(main)


def test_requests_and_answers_that_one_peer_leaves_here_are_bounded_in_bytes(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        limits = RpcLimits(held=1_000_000, queued=200_000)
        alice, bob = await pair(world, nursery, limits)
        kept = 0

        async def keep(_peer: PeerId, job: Job) -> Job:
            nonlocal kept
            kept += len(job.load)
            await trio.sleep(20)
            return job

        async def spend(_peer: PeerId, _job: Job) -> Job:
            return Job(0.0, bytes(90_000))

        bob.rpc.serve("keep", Job, keep)
        bob.rpc.serve("spend", Job, spend)
        stream = await raw_caller(world, nursery, bob)
        for number in range(1, 51):
            await stream.send_all(frame(encode(Frame(CALL, number, "keep", 60.0, encode(Job(0.0, bytes(90_000)))))))
        await trio.sleep(10)
        assert 800_000 < kept < 1_000_000
        assert await alice.rpc.call(bob.network.me, "work", Job(), Job, timeout=1) == Job()
        await trio.sleep(20)
        calls = b"".join(frame(encode(Frame(CALL, n, "spend", 60.0, encode(Job())))) for n in range(51, 151))
        await stream.send_all(calls)
        await trio.sleep(1)
        assert bob.rpc._server.held[world.node("mallory").me] < 1_000_000
        reader, codes = FrameReader(stream), []
        for _ in range(150):
            raw = await reader.frame()
            assert raw is not None
            codes.append(decode(Frame, raw).code)
        assert codes[50:].count("busy") > 50
        assert not bob.rpc._server.held

    simulated(main)


def test_the_calls_of_all_peers_together_have_a_limit_of_their_own(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery, RpcLimits(serves=20, serves_in_all=25))
        endings = []

        async def ask(node: Callee) -> None:
            try:
                await node.rpc.call(bob.network.me, "work", Job(3.0), Job, timeout=10)
                endings.append("answered")
            except Refused as refusal:
                endings.append(refusal.code)

        carol = Callee(world.node("carol"))
        await nursery.start(carol.network.run)
        await nursery.start(carol.rpc.run)
        async with trio.open_nursery() as asking:
            for node in (alice, carol):
                for _ in range(15):
                    asking.start_soon(ask, node)
        assert (endings.count("answered"), endings.count("busy")) == (25, 5)

    simulated(main)


def test_a_caller_that_never_reads_is_not_read_from_and_then_dropped(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        limits = RpcLimits(queued=200_000, write_stall=20)
        alice, bob = await pair(world, nursery, limits)
        stream = await raw_caller(world, nursery, bob)
        call = encode(Job(0.0, bytes(100_000)))
        with trio.fail_after(60), pytest.raises(Exception, match="closed"):
            for number in range(1, 1000):
                await stream.send_all(frame(encode(Frame(CALL, number, "work", 5.0, call))))
        assert bob.diary.count("began") < 30
        await alice.rpc.ping(bob.network.me, timeout=1)

    simulated(main)


@pytest.mark.parametrize("answer", [Frame(REPLY, 77), Frame(CALL, 1), Frame(REPLY, 0)])
def test_answers_to_calls_never_made_end_the_stream(simulated: Simulated, answer: Frame) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, _ = await pair(world, nursery)
        mallory = world.node("mallory")

        async def lie(stream: Stream) -> None:
            await stream.send_all(frame(encode(answer)))
            await trio.sleep_forever()

        mallory.serve(PROTOCOL, lie)
        await nursery.start(mallory.run)
        assert (await failure_of(alice.rpc, mallory.me, Job(), 5))[0] is PeerGone
        assert alice.rpc.violations.count(mallory.me) == 1

    simulated(main)


def test_a_slow_link_delivers_large_calls_that_have_time(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob = await pair(world, nursery)
        job = Job(0.0, bytes(900_000))
        assert await alice.rpc.call(bob.network.me, "work", job, Job, timeout=30) == job
        with pytest.raises(CallError, match="does not fit"):
            await alice.rpc.call(bob.network.me, "work", Job(0.0, bytes(1 << 20)), Job, timeout=30)

    simulated(main, bandwidth=100_000)


@pytest.mark.parametrize("turns", range(8))
def test_who_calls_in_any_turn_of_the_end_is_told_that_no_calls_are_made(simulated: Simulated, turns: int) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        alice, bob, carol = (world.node(name) for name in ("alice", "bob", "carol"))
        for part in (alice, bob, carol, Rpc(bob)):
            await nursery.start(part.run)
        for _ in range(20):  # trio draws the order within a turn
            caller = Rpc(alice)
            async with trio.open_nursery() as node:
                await node.start(caller.run)
                await caller.ping(bob.me, timeout=5)
                node.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    with pytest.raises((PeerGone, DeadlineExceeded)):
                        await caller.call(carol.me, "work", Job(), Job, timeout=0)

    simulated(main)
