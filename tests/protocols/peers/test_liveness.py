"""Frozen and dead peers are suspected within seconds; a node that stood still itself accuses nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
import trio.testing

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.peers.liveness import PEERS_REMEMBERED, Liveness, LivenessSettings, PeerGoneSilent
from swarmnode.testing.simnet import SimWorld

Simulated = Callable[..., None]
NORMAL = LivenessSettings()


async def pair(world: SimWorld, nursery: trio.Nursery, settings: LivenessSettings = NORMAL) -> tuple[Liveness, str]:
    watcher, watched = world.node("watcher"), world.node("watched")
    liveness = Liveness(rpc := Rpc(watcher), settings)
    for part in (watcher.run, watched.run, rpc.run, Rpc(watched).run, liveness.run):
        await nursery.start(part)
    return liveness, watched.me


@pytest.mark.parametrize(("fault", "seconds"), [("kill", 2.0), ("freeze", 6.0)])
def test_who_waits_for_a_lost_peer_is_told_within_seconds(simulated: Simulated, fault: str, seconds: float) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer = await pair(world, nursery)
        nursery.start_soon(_later, 3.0, lambda: getattr(world, fault)(peer))
        with trio.fail_after(3.0 + seconds), pytest.raises(PeerGoneSilent):
            await liveness.unless_gone(peer, trio.sleep_forever)

    simulated(main)


async def three(world: SimWorld, nursery: trio.Nursery) -> tuple[Liveness, str, str]:
    """A watcher that knows how two peers answer."""
    liveness, peer = await pair(world, nursery)
    third = world.node("third")
    for part in (third.run, Rpc(third).run):
        await nursery.start(part)
    with liveness.watching([peer, third.me], within=0.5):
        await trio.sleep(2.0)
    return liveness, peer, third.me


@pytest.mark.parametrize("moment", [0.0, 0.3, 2.0])
def test_who_hurries_is_told_of_a_frozen_peer_after_the_silence_it_allows(simulated: Simulated, moment: float) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer, _ = await three(world, nursery)
        nursery.start_soon(_later, moment, lambda: world.freeze(peer))
        with trio.fail_after(moment + 0.5 + 0.3), pytest.raises(PeerGoneSilent):
            await liveness.unless_gone(peer, trio.sleep_forever, within=0.5)

    simulated(main)


def test_who_hears_nobody_at_all_accuses_nobody_before_pings_do(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer, third = await three(world, nursery)
        world.freeze(peer)
        world.freeze(third)  # as when this node's own link is dead
        with liveness.watching([peer], within=0.5):
            await trio.sleep(2.0)
            assert not liveness.is_suspected(peer)
            await trio.sleep(4.0)
            assert liveness.is_suspected(peer)

    simulated(main)


def test_a_peer_that_answers_slowly_is_given_the_time_it_was_seen_to_need(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer, _ = await three(world, nursery)
        heard: list[float] = []
        liveness.on_suspicion(lambda: heard.append(trio.current_time()))
        with liveness.watching([peer], within=0.5):
            for pause in (0.4, 0.4, 1.2, 1.2):  # it answers after the pause; 0.4 is within what is allowed
                world.freeze(peer)
                await trio.sleep(pause)
                world.thaw(peer)
                await trio.sleep(0.6)
        assert not heard

    simulated(main)


@pytest.mark.parametrize("moment", [0.1, 0.45, 0.7])
def test_who_stood_still_in_a_hurry_accuses_nobody(simulated: Simulated, moment: float) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer, _ = await three(world, nursery)
        heard: list[float] = []
        liveness.on_suspicion(lambda: heard.append(trio.current_time()))
        with liveness.watching([peer], within=0.5):
            for _ in range(10):
                await trio.sleep(moment)
                stand_still(1.4)
        assert not heard

    simulated(main)


def test_bytes_are_a_sign_of_life(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer, _ = await three(world, nursery)
        world.freeze(peer)
        with liveness.watching([peer], within=0.5):
            for _ in range(10):
                await trio.sleep(0.1)
                liveness.heard_from(peer)
            assert not liveness.is_suspected(peer)

    simulated(main)


async def _later(seconds: float, action: Callable[[], None]) -> None:
    await trio.sleep(seconds)
    action()


def test_a_living_peer_is_never_suspected_and_results_and_errors_come_through(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer = await pair(world, nursery)

        async def answer() -> str:
            await trio.sleep(60.0)
            return "done"

        async def fail() -> None:
            raise KeyError("as it is, in no group")

        assert await liveness.unless_gone(peer, answer) == "done"
        with pytest.raises(KeyError):
            await liveness.unless_gone(peer, fail)
        assert liveness.rtts[peer] == pytest.approx(0.04)

    simulated(main)


def test_a_thawed_peer_is_suspected_no_more(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer = await pair(world, nursery)
        heard: list[float] = []
        liveness.on_suspicion(lambda: heard.append(trio.current_time()))
        with liveness.watching([peer]):
            await trio.sleep(2.0)
            world.freeze(peer)
            await trio.sleep(8.0)
            assert liveness.is_suspected(peer) and len(heard) == 1
            world.thaw(peer)
            await trio.sleep(3.0)
            assert not liveness.is_suspected(peer)
        assert not liveness.is_suspected(peer)

    simulated(main)


def test_a_suspicion_is_remembered_for_a_while_and_ends_with_any_answer(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer = await pair(world, nursery)
        world.freeze(peer)
        with liveness.watching([peer]):
            await trio.sleep(8.0)
        with trio.fail_after(0.01), pytest.raises(PeerGoneSilent):
            await liveness.unless_gone(peer, trio.sleep_forever)
        liveness.heard_from(peer)
        with trio.move_on_after(0.5) as scope:
            await liveness.unless_gone(peer, trio.sleep_forever)
        assert scope.cancelled_caught

    simulated(main)


def test_a_goodbye_is_as_good_as_silence(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer = await pair(world, nursery)
        nursery.start_soon(_later, 0.1, lambda: liveness.suspect(peer))
        with trio.fail_after(0.2), pytest.raises(PeerGoneSilent):
            await liveness.unless_gone(peer, trio.sleep_forever)

    simulated(main)


def test_a_node_that_stood_still_itself_accuses_nobody() -> None:
    clock = trio.testing.MockClock()

    async def main() -> None:
        world = SimWorld()
        async with trio.open_nursery() as nursery:
            liveness, peer = await pair(world, nursery)
            world.freeze(peer)
            with liveness.watching([peer]):
                await trio.testing.wait_all_tasks_blocked()
                for _ in range(6):
                    clock.jump(100.0)  # as after SIGSTOP: all deadlines have passed at once
                    await trio.testing.wait_all_tasks_blocked()
                assert liveness.stalled_since(0.0)
                assert not liveness.is_suspected(peer)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)


def stand_still(seconds: float) -> None:
    """As after SIGSTOP: this node's own time jumps."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, trio.testing.MockClock)
    clock.jump(seconds)


@pytest.mark.parametrize(
    ("settings", "gap_seen"),
    [
        pytest.param(LivenessSettings(interval=10.0, timeout=1.0, failures=1), False, id="the ping is overdue"),
        pytest.param(LivenessSettings(interval=0.5, timeout=10.0, failures=1), True, id="the gap lies within the ping"),
    ],
)
def test_a_ping_that_a_standstill_swallowed_does_not_count(
    simulated: Simulated, settings: LivenessSettings, gap_seen: bool
) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer = await pair(world, nursery, settings)
        began = trio.current_time()
        world.freeze(peer)
        with liveness.watching([peer]):
            await trio.sleep(0.2)
            stand_still(5.0)
            await trio.sleep(5.0)  # the first ping has failed, by one guard or the other without a trace
            assert liveness.stalled_since(began) is gap_seen
            assert not liveness.is_suspected(peer)
            await trio.sleep(settings.interval + settings.timeout)
            assert liveness.is_suspected(peer)  # the second fails in this node's own time, and one is enough

    simulated(main)


def test_what_was_missed_before_a_standstill_does_not_add_to_what_is_missed_after_it(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, peer = await pair(world, nursery)
        with liveness.watching([peer]):
            await trio.sleep(0.5)
            assert peer in liveness.rtts
            world.freeze(peer)
            await trio.sleep(2.1)  # one ping has failed and the next has not begun
            stand_still(3.0)
            await trio.sleep(2.4)  # one more has failed
            assert not liveness.is_suspected(peer)
            await trio.sleep(2.0)
            assert liveness.is_suspected(peer)

    simulated(main)


def test_what_is_remembered_of_peers_is_bounded(simulated: Simulated) -> None:
    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, _ = await pair(world, nursery)
        for i in range(3 * PEERS_REMEMBERED):
            with liveness.watching([f"peer{i}"]):
                liveness.suspect(f"peer{i}")
        assert len(liveness._suspicions) == PEERS_REMEMBERED and not liveness._watched

    simulated(main)


def test_how_long_a_peer_is_suspected_counts_from_the_first_of_failures_that_follow_one_another(
    simulated: Simulated,
) -> None:
    """Who was frozen, and well for a minute in which nobody looked, is not gone for long when it is frozen again."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        liveness, _ = await pair(world, nursery)

        def suspected_for() -> float:
            with liveness.watching(["other"]):
                liveness.suspect("other")
                return liveness.suspected_for("other")

        assert liveness.suspected_for("other") == suspected_for() == 0
        await trio.sleep(50)
        assert suspected_for() == pytest.approx(50)
        await trio.sleep(50)
        assert suspected_for() == pytest.approx(100)
        await trio.sleep(70)
        assert suspected_for() == 0

    simulated(main)


def test_who_begins_to_wait_as_the_node_ends_gets_no_error_for_it(simulated: Simulated) -> None:
    """A task that was woken in the moment of the end goes on to its next checkpoint, and may begin to watch there."""

    async def main(world: SimWorld, nursery: trio.Nursery) -> None:
        async with trio.open_nursery() as node:
            liveness, peer = await pair(world, node)
            node.cancel_scope.cancel()
        with liveness.watching([peer]):
            pass

    simulated(main)
