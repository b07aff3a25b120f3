"""What the matrix of routers is said to come to follows from its attempts."""

from __future__ import annotations

import pytest
from matrix import KINDS, OTHER, PUBLIC, SHARES, SYMMETRIC, Table, collect, holds, page, weighted
from topologies import Attempt

MET, RELAYED = Attempt(0.0, 0.5, 1.2, "direct"), Attempt(0.0, 0.5, None, "relayed", packets=1800)


def table(*, symmetric: Attempt = RELAYED, late: float = 1.2) -> Table:
    """Everybody is direct after `late` s, but two symmetric ones come to what is said."""
    met = Attempt(0.0, 0.5, late, "direct")
    return {(a.name, b.name): [symmetric if a.group == b.group == SYMMETRIC else met] * 2 for a in KINDS for b in KINDS}


def test_the_weighted_share_is_that_of_two_peers_drawn_by_the_published_mix() -> None:
    assert sum(SHARES.values()) == pytest.approx(1.0)
    lost_to_other = 2 * SHARES[OTHER] * (1 - SHARES[PUBLIC]) - SHARES[OTHER] ** 2
    assert weighted(table(symmetric=MET)) == pytest.approx(1 - lost_to_other)
    assert weighted(table()) == pytest.approx(1 - lost_to_other - SHARES[SYMMETRIC] ** 2)


def test_the_page_says_what_was_missed() -> None:
    assert holds(table()) and "0 of 8, with at most 1800 packets" in page(table())
    assert not holds(table(late=2.5)) and "2.50, at most 2.50 | **missed**" in page(table(late=2.5))
    broken = table() | {("port-restricted", "full cone"): [RELAYED] * 2}
    assert not holds(broken) and "30 of 32: 93.8 % | **missed**" in page(broken)


def test_rounds_add_up() -> None:
    assert [len(found) for found in collect([table(), table()]).values()] == [4] * len(KINDS) ** 2
