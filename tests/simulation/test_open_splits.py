"""Parts of a swarm that were cut off from one another for longer than rosters are kept: owners are told, and choose."""

from __future__ import annotations

from pathlib import Path

import pytest
import simswarm
import trio
from simswarm import Body, SimSwarm

from swarmnode.protocols.chain import forks
from swarmnode.protocols.methods.open import join as open_place
from swarmnode.protocols.methods.open import store as open_store
from swarmnode.testing.simnet import SimWorld

pytestmark = pytest.mark.slow

KEPT = 12  # rounds, in place of 64

NAMES = ("a", "b", "c", "d")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forks, open_place, open_store):
        monkeypatch.setattr(module, "DEPTH", KEPT)
    monkeypatch.setattr(open_place, "LOOK_EVERY", 10.0)


def warning(swarm: SimSwarm, name: str) -> str:
    return swarm.nodes[name].session.warnings.get("split", "")


def simulate(body: Body, folder: Path) -> None:
    """`body` with a swarm of four that saves into a folder and has done three rounds."""

    async def begun(swarm: SimSwarm) -> None:
        swarm.checkpoints = folder
        await swarm.begin(NAMES)
        await swarm.round_done(2, *NAMES)
        await body(swarm)

    simswarm.simulate(begun, world=SimWorld(latency=0.05), method="open", validators=NAMES)


async def cut(swarm: SimSwarm, *sides: str, rounds: int) -> int:
    """Until all sides have done so many rounds by themselves; then the links are there again. The rounds done."""
    swarm.world.partition([[swarm.peer(name) for name in side] for side in sides])
    before = {side: max(swarm.nodes[side[0]].rounds) for side in sides}
    await swarm.until(lambda: all(max(swarm.nodes[s[0]].rounds) > before[s] + rounds for s in sides), within=3600)
    swarm.world.heal()
    return max(max(swarm.nodes[side[0]].rounds) for side in sides)


def test_after_a_cut_that_is_too_old_to_heal_the_owner_is_told_and_can_have_a_node_go_over(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        await cut(swarm, "ab", "cd", rounds=KEPT + KEPT // 2)
        await swarm.until(lambda: warning(swarm, "a") != "" and warning(swarm, "c") != "", within=120)
        told = warning(swarm, "c")
        assert "another history" in told
        roster = told.rpartition("--roster ")[2]
        await swarm.leave("d")
        await swarm.start("d", join="c", roster=roster)  # its checkpoint and the node that it asks are of this side
        await swarm.until(lambda: len(swarm.nodes["d"].rounds) >= 2, within=120)
        last = max(swarm.nodes["d"].rounds)
        await swarm.round_done(last, "a")
        hashes = {name: swarm.nodes[name].rounds[last]["state_hash"] for name in "ad"}
        assert hashes["d"] == hashes["a"]

    simulate(body, tmp_path)


def test_a_cut_that_heals_by_itself_is_no_split(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        done = await cut(swarm, "ab", "cd", rounds=2)
        await swarm.until(lambda: swarm.all_agree(after=done + 3), within=120)
        await trio.sleep(30)
        assert not any(warning(swarm, name) for name in "abcd")

    simulate(body, tmp_path)


def test_a_side_that_removed_the_others_from_its_validators_comes_back_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of nine went on by themselves: after three empty rounds they are enough, and those who are not there go."""

    names = tuple("abcdefghi")

    async def body(swarm: SimSwarm) -> None:
        await swarm.begin(names)
        await swarm.round_done(2, *names)
        done = await cut(swarm, "abcde", "fghi", rounds=12)
        await swarm.until(lambda: swarm.all_agree(after=done + 3), within=180)

    for module in (forks, open_place, open_store):
        monkeypatch.setattr(module, "DEPTH", 64)
    simswarm.simulate(body, world=SimWorld(latency=0.05), method="open", validators=names)


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [2 * KEPT, 8 * KEPT], ids=["so that it knows the others", "for long"])
def test_who_was_alone_for_longer_than_rosters_are_kept_goes_over_to_the_others(tmp_path: Path, rounds: int) -> None:
    """As a machine does whose link was down over night, though it is a validator and had rounds of its own."""

    async def body(swarm: SimSwarm) -> None:
        def whole() -> list[int]:
            """Rounds since then that d ended with all others; it may have told later ones while it was alone."""
            return [e["round"] for name, e in swarm.told[together:] if name == "d" and e["members"] == 4]

        await cut(swarm, "abc", "d", rounds=rounds)
        together = len(swarm.told)
        await swarm.until(lambda: bool(whole()), within=300)
        last = whole()[-1]
        await swarm.round_done(last, "a")
        assert swarm.nodes["a"].rounds[last]["state_hash"] == swarm.nodes["d"].rounds[last]["state_hash"]
        await swarm.until(lambda: not any(warning(swarm, name) for name in "abcd"), within=30)  # by the next look

    simulate(body, tmp_path)


@pytest.mark.thorough
def test_of_two_who_were_alone_each_who_did_less_goes_over(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        await swarm.begin("ab")
        await swarm.round_done(2, *"ab")
        done = await cut(swarm, "a", "b", rounds=8 * KEPT)
        await swarm.until(lambda: swarm.all_agree(after=done + 3), within=600)
        told = [[event["round"] for name, event in swarm.told if name == one] for one in "ab"]
        assert any(rounds == [*range(rounds[0], rounds[-1] + 1)] for rounds in told), "the work of one stays whole"

    simswarm.simulate(body, world=SimWorld(latency=0.05), method="open", validators=("a", "b"))
