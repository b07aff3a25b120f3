"""A link is one word that leads to a run, and says what is wrong with it where it was mistyped."""

from __future__ import annotations

import pytest

from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.invite import PREFIX, Invitation, decode, invite

PEER = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"
RELAY = "12D3KooWQCWdZeFaeJsopHBjuL14RhzZXuzYNdgfhru2nSEVJ8Qt"
RUN = "3f9c21ab04de" + "0" * 52
FIRST, SECOND = "/ip4/203.0.113.7/tcp/4077", "/ip4/192.168.1.7/tcp/4077"
BEGINS = "/key/2041b26570637c9f"  # of PEER


@pytest.mark.parametrize(
    ("places", "end", "length"),
    [
        ((FIRST,), BEGINS, 64),
        ((FIRST, SECOND), BEGINS, 75),
        (("/ip6/2001:db8::7/tcp/4077",), BEGINS, 84),
        (("/dns4/seed.example.org/tcp/65535",), BEGINS, 84),
        ((f"{FIRST}/p2p/{RELAY}/p2p-circuit",), f"/p2p/{PEER}", 155),
    ],
)
def test_a_link_leads_to_places_run_and_roster(places: tuple[str, ...], end: str, length: int) -> None:
    named, found = (tuple(place + who for place in places) for who in (f"/p2p/{PEER}", end))
    word = Invitation(named, RUN).encode()
    assert decode(f" {word.upper()[:20]}-{word[20:]}\n") == Invitation(found, RUN[:32])
    assert len(word) <= length and word == word.lower() and word.isalnum()
    for run_id, roster in (("", ""), (RUN, f"1817:{'ab' * 32}")):
        assert decode(Invitation(named, run_id, roster).encode()) == Invitation(found, run_id[:32], roster)


def test_each_mistake_in_it_is_noticed() -> None:
    word = Invitation((f"{FIRST}/p2p/{PEER}",), RUN).encode()
    for at in range(len(PREFIX), len(word)):
        other = "2" if word[at] != "2" else "3"
        for wrong in (word[:at] + other + word[at + 1 :], word[:at], word[:at] + "b" + word[at + 1 :]):
            with pytest.raises(UsageMistake, match="swarmnode id --join prints it"):
                decode(wrong)


@pytest.mark.parametrize("address", ["/ip4/203.0.113.7/udp/4077", f"/unix/x/p2p/{PEER}", "/ip4/1.2.3.4/tcp/1/p2p/Qm1"])
def test_a_place_without_a_short_form_has_none(address: str) -> None:
    with pytest.raises(ValueError):
        Invitation((address,)).encode()


def test_a_node_names_its_best_address_and_another_that_strangers_can_use() -> None:
    ours = [f"{place}/p2p/{PEER}" for place in (FIRST, "/ip4/203.0.113.7/tcp/9", "/ip4/127.0.0.1/tcp/4077", SECOND)]
    assert decode(invite(ours, RUN, "")).addresses == (FIRST + BEGINS, SECOND + BEGINS)
    assert decode(invite(ours[2:], RUN, "")).addresses == ("/ip4/127.0.0.1/tcp/4077" + BEGINS,)
