"""What netcheck finds wrong, and that it says what to do: a table from reports to problems."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.node.nat.netcheck import (
    CLOSED,
    DEPENDENT,
    INDEPENDENT,
    NO_NAT,
    OPEN,
    UNKNOWN,
    filtering,
    kind_of_nat,
    problems,
)

OWN = ("/ip4/192.168.1.2/tcp/4088/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN",)
OUTSIDE = "/ip4/45.80.10.3/tcp/4088"


def report(**other: Any) -> dict[str, Any]:
    """Of a node that is public through its router."""
    return {
        "reachability": "public",
        "listens": list(OWN),
        "observed": [OUTSIDE],
        "nat": INDEPENDENT,
        "port_mapping": mapping(OUTSIDE),
        "relays": [],
        "peers": {"connected": 4, "direct": 4, "relayed": 0},
        **other,
    }


def mapping(address: str | None = None, *, asked: bool = True, state: str = "NAT-PMP: no answer") -> dict[str, Any]:
    return {"asked": asked, "way": "UPnP" if address else None, "address": address, "state": state}


def told(**other: Any) -> str:
    return "\n".join(f"{problem.what} -> {problem.do}" for problem in problems(report(**other)))


TWO = [{"peer_id": "a", "rtt_ms": 1.0}, {"peer_id": "b", "rtt_ms": None}]


@pytest.mark.parametrize("nat", [NO_NAT, INDEPENDENT, DEPENDENT, UNKNOWN])
def test_a_public_node_with_peers_has_nothing_to_mend_whatever_the_nat(nat: str) -> None:
    assert told(nat=nat) == told(nat=nat, port_mapping=mapping()) == ""


@pytest.mark.parametrize(
    ("other", "what", "do"),
    [
        ({"peers": {"connected": 0, "direct": 0, "relayed": 0}}, "no peer is connected", "swarmnode join LINK"),
        ({"reachability": "unknown"}, "no peer has tried", "wait a minute"),
        ({"listens": ["/ip4/127.0.0.1/tcp/4088"]}, "this machine only", "--listen ::"),
        ({"reachability": "private"}, "no relay has a place", "--role relay"),
        ({"reachability": "relayed", "relays": TWO[:1]}, "one relay only", "--role relay"),
        (
            {"reachability": "relayed", "relays": TWO, "port_mapping": mapping()},
            "opens no port (NAT-PMP: no answer)",
            "switch on UPnP, NAT-PMP or PCP in the router, or forward TCP port 4088",
        ),
        (
            {"reachability": "relayed", "relays": TWO, "port_mapping": mapping(asked=False)},
            "not asked for a port",
            "upnp = true",
        ),
        (
            {
                "reachability": "relayed",
                "relays": TWO,
                "observed": [],
                "port_mapping": mapping("/ip4/100.64.0.9/tcp/4088"),
            },
            "two NATs: the router's own outer address, 100.64.0.9",
            "bridge mode",
        ),
        (
            {"reachability": "relayed", "relays": TWO, "port_mapping": mapping("/ip4/45.80.99.9/tcp/4088")},
            "two NATs",
            "bridge mode",
        ),
        ({"reachability": "relayed", "relays": TWO}, "mapped a port, and peers still cannot", "firewall"),
        ({"reachability": "relayed", "relays": TWO, "nat": DEPENDENT}, "another port to each peer", "forward TCP"),
    ],
)
def test_each_problem_comes_with_what_to_do(other: dict[str, Any], what: str, do: str) -> None:
    lines = [line for line in told(**other).split("\n") if what in line]
    assert len(lines) == 1 and do in lines[0].partition("->")[2], told(**other)


def test_two_places_at_relays_are_enough() -> None:
    assert "one relay only" not in told(reachability="relayed", relays=TWO)


@pytest.mark.parametrize(
    ("own", "observed", "independent", "kind"),
    [
        (OWN, (), None, UNKNOWN),
        (OWN, (OUTSIDE,), None, UNKNOWN),
        (OWN, (OUTSIDE,), True, INDEPENDENT),
        (OWN, (OUTSIDE, "/ip4/45.80.10.3/tcp/61000"), False, DEPENDENT),
        (("/ip4/45.80.10.3/tcp/4088",), (OUTSIDE,), True, NO_NAT),
        (("/ip4/45.80.10.3/tcp/4088",), (OUTSIDE,), None, NO_NAT),
        ((*OWN, "/ip6/2a10::2/tcp/4088"), (OUTSIDE, "/ip6/2a10::2/tcp/4088"), True, INDEPENDENT),
        (("/ip6/2a10::2/tcp/4088",), ("/ip6/2a10::2/tcp/4088",), True, NO_NAT),
    ],
)
def test_the_kind_of_nat_is_told(
    own: tuple[str, ...], observed: tuple[str, ...], independent: bool | None, kind: str
) -> None:
    reach: Any = SimpleNamespace(observed=lambda: observed, endpoint_independent=lambda: independent)
    assert kind_of_nat(own, reach) == kind


@pytest.mark.parametrize(
    ("reachability", "kind"),
    [("public", OPEN), ("private", CLOSED), ("relayed", CLOSED), ("unknown", UNKNOWN)],
)
def test_what_the_way_in_lets_through_follows_from_the_dials_back(reachability: str, kind: str) -> None:
    assert filtering(reachability) == kind
