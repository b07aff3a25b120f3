"""What netcheck finds wrong, and that it says what to do: a table from reports to problems."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmnode.node.nat.netcheck import (
    ADDRESS_RESTRICTED,
    CLASSES,
    CLOSED,
    DEPENDENT,
    FILTERING,
    FIREWALL,
    FULL_CONE,
    INDEPENDENT,
    MAPPED,
    NO_NAT,
    OPEN,
    OPENED,
    PORT_RESTRICTED,
    SYMMETRIC,
    UNKNOWN,
    advice,
    class_of,
    kind_of_nat,
    path_between,
    problems,
)
from swarmnode.node.nat.reachability import Reachability

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
        "clock": "",
        "peers": {"connected": 4, "direct": 4, "relayed": 0},
        **other,
    }


def mapping(address: str | None = None, *, asked: bool = True, state: str = "NAT-PMP: no answer") -> dict[str, Any]:
    return {"asked": asked, "way": "UPnP" if address else None, "address": address, "state": state}


def told(**other: Any) -> str:
    return "\n".join(f"{what} -> {do}" for what, do in problems(report(**other)))


TWO = [{"peer_id": "a", "rtt_ms": 1.0}, {"peer_id": "b", "rtt_ms": None}]


@pytest.mark.parametrize("nat", [NO_NAT, INDEPENDENT, DEPENDENT, UNKNOWN])
def test_a_public_node_with_peers_has_nothing_to_mend_whatever_the_nat(nat: str) -> None:
    assert told(nat=nat) == told(nat=nat, port_mapping=mapping()) == ""


@pytest.mark.parametrize(
    ("other", "what", "do"),
    [
        ({"peers": {"connected": 0, "direct": 0, "relayed": 0}}, "no peer is connected", "swarmnode peers connect"),
        ({"reachability": "unknown"}, "no peer has tried", "wait a minute"),
        ({"clock": "the clock of this machine is 300 s ahead"}, "300 s ahead", "timedatectl"),
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
    assert FILTERING[reachability] == kind


@pytest.mark.parametrize(
    ("nat", "lets_in", "mapped", "uninvited", "kind"),
    [
        (NO_NAT, OPEN, False, 0, OPENED),
        (NO_NAT, CLOSED, False, 0, FIREWALL),
        (INDEPENDENT, OPEN, True, 0, MAPPED),
        (DEPENDENT, OPEN, True, 0, MAPPED),
        (DEPENDENT, OPEN, False, 0, MAPPED),  # somebody forwards the port by hand
        (INDEPENDENT, OPEN, False, 3, FULL_CONE),
        (INDEPENDENT, OPEN, False, 0, ADDRESS_RESTRICTED),
        (INDEPENDENT, CLOSED, False, 0, PORT_RESTRICTED),
        (INDEPENDENT, CLOSED, True, 0, PORT_RESTRICTED),  # the mapping leads nowhere
        (DEPENDENT, CLOSED, False, 0, SYMMETRIC),
        (UNKNOWN, OPEN, False, 0, UNKNOWN),
        (INDEPENDENT, UNKNOWN, False, 0, UNKNOWN),
    ],
)
def test_a_nat_has_the_class_that_people_know(nat: str, lets_in: str, mapped: bool, uninvited: int, kind: str) -> None:
    told = mapping(OUTSIDE if mapped else None)
    assert class_of(report(nat=nat, filtering=lets_in, port_mapping=told, uninvited=uninvited)) == kind


def test_what_works_with_whom_is_the_same_from_both_sides() -> None:
    for one in CLASSES:
        for other in CLASSES:
            assert path_between(one, other) == path_between(other, one)
    assert {path_between(OPENED, other) for other in CLASSES} == {"direct"}
    assert path_between(PORT_RESTRICTED, PORT_RESTRICTED) == path_between(SYMMETRIC, ADDRESS_RESTRICTED) == "punched"
    assert path_between(SYMMETRIC, PORT_RESTRICTED) == path_between(SYMMETRIC, SYMMETRIC) == "relayed"
    assert path_between(SYMMETRIC, PORT_RESTRICTED, udp=True) == "probed"
    assert path_between(SYMMETRIC, SYMMETRIC, udp=True) == "relayed"


def test_who_comes_from_where_this_node_never_sent_anything_is_uninvited() -> None:
    async def main() -> Reachability:
        reach = Reachability()
        reach.contacted("45.80.10.7")
        for host in ("45.80.10.7", "45.80.10.8", "192.168.1.9"):
            reach.came_in(host)
        return reach

    reach = trio.run(main)
    assert list(reach.uninvited) == ["45.80.10.8"], "neither a host that it sent to, nor one of its own network"
    reach.forget()
    assert not reach.uninvited


@pytest.mark.parametrize(
    ("path", "dialled", "says"),
    [
        ("direct", [""], "nothing to mend"),
        ("relayed", ["no answer"], "one of the two has to be dialable"),
        ("none", [], "ask its owner for swarmnode id --join"),
        ("none", ["connection refused, nothing listens there"], "the node is off"),
        ("none", ["answers as another peer", "no answer"], "somebody else is at its address"),
        ("none", ["no answer within 6 s", "connection refused, nothing listens there"], "run swarmnode netcheck there"),
    ],
)
def test_a_trace_ends_with_what_to_do(path: str, dialled: list[str], says: str) -> None:
    steps = [{"step": "standing here", "ok": True, "result": "good"}]
    steps += [{"step": "dialled /ip4/192.0.2.1/tcp/1", "ok": not why, "result": why} for why in dialled]
    assert says in advice(path, steps)
    kept_out = [{"step": "standing here", "ok": False, "result": "banned"}]
    assert "unblock" in advice("none", kept_out)
