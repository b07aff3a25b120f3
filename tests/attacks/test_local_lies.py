"""The lies of `swarmnode local --attack`, told by one of five nodes on simnet: refused, and nobody is split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from openswarm import Scene, in_swarm

from swarmnode.cli.local.attack import LIES
from swarmnode.node.session import METHODS
from swarmnode.testing.adversary.disguise import lying_open
from swarmnode.testing.simnet import SimWorld

pytestmark = pytest.mark.slow

LIAR, ROUNDS = "e", 4
# Of the weight, where a fifth is fair. A slanderer offers a flipped sign. Nobody audits here, and four judges are not
# sure in each round: the slanderer is soon removed as a judge, and then holds at most what all on probation may.
MOST = {"nan": 0.0, "copy": 0.0, "withhold": 0.0, "slander": 0.125}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[float, list[int], list[str]]]:
    """The liar's share of the weight, rounds that split honest nodes, and the verdicts on an honest node."""

    def run(lie: str) -> tuple[float, list[int], list[str]]:
        honest, liar = METHODS["open"], lying_open(lie)
        monkeypatch.setitem(
            METHODS, "open", lambda parts: (liar if parts.me == SimWorld().node(LIAR).me else honest)(parts)
        )

        async def body(scene: Scene) -> tuple[float, list[int], list[str]]:
            assert isinstance(scene.method(LIAR), liar)
            scene.bad.add(LIAR)
            first = scene.round
            await scene.done(ROUNDS)
            return scene.weight(LIAR, first), scene.split(), scene.verdicts("b", first)

        return in_swarm(body)

    return run


@pytest.mark.parametrize("lie", MOST)
def test_no_lie_of_one_in_five_counts_and_honest_work_goes_on(
    lie: str, told: Callable[[str], tuple[float, list[int], list[str]]]
) -> None:
    weight, split, honest = told(lie)
    assert weight <= MOST[lie]
    assert not split
    assert honest.count("accepted") >= max(len(honest), ROUNDS) - 1, honest


def test_an_honest_node_in_the_place_of_the_liar_is_accepted(
    told: Callable[[str], tuple[float, list[int], list[str]]],
) -> None:
    """What the test above refuses is the lie, not the place."""
    weight, _, _ = told("label-flip")  # told by the trainer, so that nothing is replaced here
    assert weight >= 0.15


def test_every_lie_about_gradients_has_a_meaning_in_open_runs() -> None:
    assert {name for name, lie in LIES.items() if "open" in lie.methods} >= set(MOST)
