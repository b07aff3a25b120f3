"""How far one roster may go: its contributions are clipped by their median norm, which the history bounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from chains import RULES, block, fair, offer, start

from swarmnode.protocols.chain.rules import NORM_GROWTH
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import ONE
from swarmnode.training.open_step import CLIP_AT


def clips_of_rounds(norms: Sequence[float], chain: ChainState) -> tuple[ChainState, list[float]]:
    """The chain after rounds in which all validators offer contributions of these norms, and the share kept."""
    shares = []
    for norm in norms:
        offers = [offer(chain, author, norm=norm) for author in chain.validators]
        made = block(chain, RULES, fair(chain, offers))
        assert made.roster is not None
        shares.append(made.roster.accepted[0].clip / ONE)
        chain = made.chain
    return chain, shares


def test_whoever_is_all_that_counts_moves_the_parameters_by_two_and_a_half_usual_steps_at_most() -> None:
    chain, _ = clips_of_rounds([3.0, 4.0, 5.0, 4.0, 3.0, 4.0], start("ABCDE"))
    after, (share,) = clips_of_rounds([4000.0], chain)
    assert share * 4000 <= CLIP_AT * NORM_GROWTH * 4
    assert after.norms[-1] == NORM_GROWTH * 4
    _, again = clips_of_rounds([4000.0] * 3, after)
    assert all(share * 4000 <= CLIP_AT * NORM_GROWTH * 4 for share in again), "three strikes raise the bound"


def test_the_first_rosters_clip_to_what_they_find() -> None:
    chain, shares = clips_of_rounds([1.0, 50.0, 2000.0, 7.0], start("ABCDE"))
    assert shares == [1.0] * 4
    assert chain.norms == (1.0, 50.0, 2000.0, 7.0)


@pytest.mark.parametrize(
    "norms",
    [
        [float(step) for step in range(1, 40)],  # as with a warm-up of the learning rate from nothing
        [1.08**step for step in range(40)],
        [1.0] * 8 + [2.0] * 20,  # a window twice as long, or a residual that comes on top
        [100.0 / step for step in range(1, 40)],
    ],
    ids=["linear", "geometric", "sudden", "falling"],
)
def test_norms_that_honestly_grow_are_not_clipped(norms: list[float]) -> None:
    assert clips_of_rounds(norms, start("ABCDE"))[1] == [1.0] * len(norms)


@pytest.mark.parametrize(("factor", "rounds"), [(4, 8), (11, 24), (100, 48)])
def test_norms_that_grow_at_once_are_let_in_after_eight_rounds_for_each_doubling_beyond_the_first(
    factor: float, rounds: int
) -> None:
    chain, _ = clips_of_rounds([1.0] * 20, start("ABCDE"))
    _, shares = clips_of_rounds([float(factor)] * 60, chain)
    assert shares[0] == pytest.approx(CLIP_AT * 2 / factor, abs=1e-6)
    assert shares.index(1.0) == rounds


def test_whoever_is_most_of_what_counts_cannot_shrink_the_others_steps_at_once() -> None:
    """Free riders offer less and less; clipped to their median, honest work would fall with it."""
    chain, _ = clips_of_rounds([4.0] * 8, start("ABCDE"))
    for _ in range(8):
        offers = [offer(chain, author, norm=0.01 if author in "ABC" else 4.0) for author in chain.validators]
        made = block(chain, RULES, fair(chain, offers))
        assert made.roster is not None
        honest = [entry for entry in made.roster.entries if entry.commit in {one.id for one in offers[3:]}]
        assert all(entry.clip >= 0.75 * ONE - 1 for entry in honest)
        chain = made.chain


def test_a_roster_that_was_undone_does_not_say_how_far_steps_go() -> None:
    chain, _ = clips_of_rounds([1.0] * 6, start("ABCDE"))
    struck, _ = clips_of_rounds([1000.0], chain)
    undone = block(struck, RULES, fair(struck, [], undo=RULES.revert_above + 1)).chain
    assert undone.norms == chain.norms != struck.norms
