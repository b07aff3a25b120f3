"""Joining by a string that names a roster: only a history that contains it is joined, whatever all neighbours show."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from simswarm import SimSwarm

from swarmnode.protocols.chain.forks import TrustedRoster
from swarmnode.protocols.methods.open import join as open_place
from swarmnode.protocols.methods.open import sync as open_sync
from swarmnode.protocols.methods.open.method import Open
from swarmnode.testing.simnet import SimWorld, run_with_nursery

HONEST, LIARS = ("a", "b"), ("x", "y")


def simulate(body: Callable[[SimSwarm], Awaitable[None]]) -> None:
    """`body` with two swarms of one run that cannot reach one another; the second is made of one person's nodes.

    One validator of the run is on either side, so each side's history keeps all rules: rounds end by half of the judges
    after some empty ones.
    """

    async def main(nursery: trio.Nursery) -> None:
        world = SimWorld(latency=0.02)
        swarm = SimSwarm(nursery, world=world, method="open", validators=("a", "x"))
        world.partition([[world.node(name).me for name in side] for side in (HONEST, (*LIARS, "new"))])
        for side in (HONEST, LIARS):
            await swarm.start(side[0])
            await swarm.start(side[1], join=side[0])
        await body(swarm)

    run_with_nursery(main)


def roster_of(swarm: SimSwarm, name: str) -> str:
    """The roster that the node's join line names."""
    place = swarm.nodes[name].open.place
    assert place is not None
    return place.roster


async def settle(swarm: SimSwarm, *names: str) -> None:
    """Until the join lines of these nodes name a roster."""
    await swarm.until(lambda: all(roster_of(swarm, name) for name in names), within=300)


async def joined(swarm: SimSwarm, roster: str, *, by: str) -> str:
    """What a newcomer that joins by a string with `roster` is told; nothing where it trains two rounds with others."""
    node = await swarm.start("new", join=by, roster=roster)
    told = node.session.warnings
    await swarm.until(lambda: len(node.rounds) >= 2 or "lineage" in told, within=120)
    return told.get("lineage", "")


def test_a_newcomer_joins_the_history_that_contains_the_roster_of_its_join_string() -> None:
    async def body(swarm: SimSwarm) -> None:
        await settle(swarm, "x")
        assert await joined(swarm, roster_of(swarm, "x"), by="x") == ""
        warnings = swarm.nodes["new"].session.warnings
        assert "decided by fewer than half" in warnings["roster"], "each side has one validator of two"

    simulate(body)


def test_a_newcomer_all_of_whose_neighbours_show_a_made_up_history_takes_nothing_from_them() -> None:
    async def body(swarm: SimSwarm) -> None:
        await settle(swarm, "a", "x")
        text = await joined(swarm, roster_of(swarm, "a"), by="x")
        assert "ended with another roster there" in text and "Ask somebody whom you trust" in text
        await trio.sleep(60)
        assert swarm.nodes["new"].open.place is None

    simulate(body)


def test_strangers_with_another_history_keep_a_newcomer_from_nobody_who_answers_later() -> None:
    async def body(swarm: SimSwarm) -> None:
        await settle(swarm, "a", "x")
        new = swarm.world.node("new").me
        assert "this node asks on" in await joined(swarm, roster_of(swarm, "a"), by="x")
        honest, liars = ([swarm.world.node(name).me for name in side] for side in (HONEST, LIARS))
        swarm.world.partition([[*honest, new], liars])
        await swarm.nodes["new"].network.connect(swarm.world.node("a").me)
        node = swarm.nodes["new"]
        await swarm.until(lambda: len(node.rounds) >= 2, within=120)
        assert "lineage" not in node.session.warnings

    simulate(body)


def test_without_a_roster_the_same_newcomer_believes_them() -> None:
    async def body(swarm: SimSwarm) -> None:
        await settle(swarm, "x")
        assert await joined(swarm, "", by="x") == ""

    simulate(body)


@pytest.mark.parametrize("kept", [64, 1])
def test_a_roster_that_nobody_keeps_is_refused_where_it_is_recent_and_else_said_to_be_unchecked(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members show the last two rosters only, as where they joined later; `kept`: how many they are known to keep."""
    monkeypatch.setattr(open_sync, "MAX_PATH", 2)
    monkeypatch.setattr(open_place, "DEPTH", kept)

    async def body(swarm: SimSwarm) -> None:
        await settle(swarm, "x")
        text = await joined(swarm, str(TrustedRoster(0, bytes(32))), by="x")
        if kept == 64:
            assert "nobody who answers shows" in text
        else:
            assert text == ""
            assert "could not be checked" in swarm.nodes["new"].session.warnings["roster"]

    simulate(body)


def test_a_stranger_alone_does_not_make_a_roster_too_old_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom the join string names is believed at once, as above; another has others a minute to be found."""
    monkeypatch.setattr(open_sync, "MAX_PATH", 2)
    monkeypatch.setattr(open_place, "DEPTH", 1)

    async def body(swarm: SimSwarm) -> None:
        await settle(swarm, "x")
        new = await swarm.start("new", join="x", roster=str(TrustedRoster(0, bytes(32))))
        await trio.sleep(1.0)
        new.open.places._named = ()
        await trio.sleep(60.0)
        assert new.open.place is None and "nobody who answers shows" in new.session.warnings["lineage"]
        await swarm.until(lambda: "could not be checked" in new.session.warnings.get("roster", ""), within=60)
        await swarm.until(lambda: len(new.rounds) >= 2, within=120)
        assert "lineage" not in new.session.warnings

    simulate(body)


def test_members_that_all_start_again_by_their_link_go_on(tmp_path: Path) -> None:
    """As units do on an upgrade: nobody then has the rosters from before its checkpoint."""

    async def main(nursery: trio.Nursery) -> None:
        swarm = SimSwarm(nursery, world=SimWorld(latency=0.02), method="open", validators=("a",))
        swarm.checkpoints = tmp_path
        await swarm.start("a")
        await swarm.round_done(8, "a")
        roster = roster_of(swarm, "a")
        assert roster
        for name in "bc":
            await swarm.start(name, join="a", roster=roster)
        await swarm.until(lambda: all(len(swarm.nodes[name].rounds) > 6 for name in "bc"), within=300)
        for name in "abc":
            await swarm.leave(name)
        await swarm.start("a")
        for name in "bc":
            await swarm.start(name, join="a", roster=roster)
        await swarm.until(lambda: all(len(swarm.nodes[name].rounds) > 2 for name in "abc"), within=120)
        assert not any("lineage" in swarm.nodes[name].session.warnings for name in "bc")

    run_with_nursery(main)


def test_a_history_whose_records_are_not_shown_is_not_joined() -> None:
    """A path of ids alone shows nothing."""

    async def body(swarm: SimSwarm) -> None:
        await settle(swarm, "x")
        for name in LIARS:
            hide_cuts(swarm.nodes[name].open)
        text = await joined(swarm, roster_of(swarm, "x"), by="x")
        assert "nobody who answers shows" in text

    simulate(body)


def hide_cuts(method: Open) -> None:
    """Answer no question about cuts."""
    for book in method.store.logs.values():
        for id in book.cuts:
            book.sealed.pop(id, None)
