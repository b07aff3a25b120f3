"""An invitation is one word that leads to a run, and says what is wrong with it where it was mistyped."""

from __future__ import annotations

import pytest

from swarmnode.node.invite import PREFIX, Invitation, NotAnInvitation, decode

PEER = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"
RELAY = "12D3KooWQCWdZeFaeJsopHBjuL14RhzZXuzYNdgfhru2nSEVJ8Qt"
RUN = "3f9c21ab04de" + "0" * 52


@pytest.mark.parametrize(
    ("place", "length"),
    [
        ("/ip4/203.0.113.7/tcp/4077", 120),
        ("/ip6/2001:db8::7/tcp/4077", 140),
        ("/dns4/seed.example.org/tcp/65535", 140),
        (f"/ip4/203.0.113.7/tcp/4077/p2p/{RELAY}/p2p-circuit", 165),
    ],
)
def test_an_invitation_leads_to_place_run_and_roster(place: str, length: int) -> None:
    invited = Invitation(f"{place}/p2p/{PEER}", RUN)
    word = invited.encode()
    assert decode(f" {word}\n") == invited and len(word) <= length and len(word.split()) == 1
    for other in (Invitation(f"{place}/p2p/{PEER}"), Invitation(f"{place}/p2p/{PEER}", RUN, f"1817:{'ab' * 32}")):
        assert decode(other.encode()) == other


def test_each_mistake_in_it_is_noticed() -> None:
    word = Invitation(f"/ip4/203.0.113.7/tcp/4077/p2p/{PEER}", RUN).encode()
    for at in range(len(PREFIX), len(word)):
        other = "2" if word[at] != "2" else "3"
        for wrong in (word[:at] + other + word[at + 1 :], word[:at], word[:at] + "0" + word[at + 1 :]):
            with pytest.raises(NotAnInvitation, match="swarmnode id --join prints it"):
                decode(wrong)


@pytest.mark.parametrize("address", ["/ip4/203.0.113.7/udp/4077", f"/unix/x/p2p/{PEER}", "/ip4/1.2.3.4/tcp/1/p2p/Qm1"])
def test_a_place_without_a_short_form_has_none(address: str) -> None:
    with pytest.raises(ValueError):
        Invitation(address).encode()
