"""Whom a node asks where the others stand: not only those with the lowest ids, and not one network alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

from openspec import parts_of

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.network import PeerId, PeerView

MOST = 16
HONEST = [f"b{number}" for number in range(8)]
CROWD = [f"a{number:02}" for number in range(40)]  # lower ids than all others have


def context(groups: dict[PeerId, str | None], members: Sequence[PeerId]) -> Context:
    views = [PeerView(peer, "direct", 0.0, True, "", group) for peer, group in groups.items()]
    return parts_of(
        network=SimpleNamespace(peers=lambda: tuple(views)),
        membership=SimpleNamespace(connected=lambda: tuple(sorted(members))),
        admits=lambda peer: peer != HONEST[0],
        rng=random.Random(7),
    )


def test_all_are_asked_where_they_are_few() -> None:
    known = context(dict.fromkeys(HONEST), members=HONEST[:3])
    assert list(known.nearby(MOST)) == HONEST[:3]
    nobody_known = context(dict.fromkeys(HONEST), members=())
    assert list(nobody_known.nearby(MOST)) == HONEST[1:], "the first may not take part"


def test_everybody_is_asked_by_and_by_where_they_are_many() -> None:
    parts = context(dict.fromkeys(CROWD + HONEST), members=CROWD + HONEST)
    asked = [set(parts.nearby(MOST)) for _ in range(40)]
    assert {len(each) for each in asked} == {MOST}
    assert set().union(*asked) == {*CROWD, *HONEST}


def test_a_crowd_with_low_ids_in_one_network_is_not_all_that_a_node_hears() -> None:
    groups = dict.fromkeys(CROWD, "10.0.0.0/24") | {peer: f"10.0.{n + 1}.0/24" for n, peer in enumerate(HONEST)}
    assert set(HONEST) < set(context(groups, members=[*CROWD, *HONEST]).nearby(MOST))
