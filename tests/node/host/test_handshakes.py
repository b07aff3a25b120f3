"""Places for connections that nobody has identified yet: who takes many gives way first."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast

import pytest

from swarmnode.node.host.handshakes import Handshake, Handshakes
from swarmnode.protocols.metrics import Metrics
from swarmnode.protocols.peers.diversity import network_of


class Incoming:
    """A connection that notes its end."""

    handshake: Handshake | None = None

    def __init__(self, host: str, name: str, ended: list[str]) -> None:
        self.get_remote_address = lambda: (host, 4077)
        self.abort = lambda: ended.append(name)


class Waiting:
    """Connections that hold places until they are displaced."""

    def __init__(self, most: int) -> None:
        self.handshakes = Handshakes(most, patience=5.0)
        self.stack = ExitStack()
        self.displaced: list[str] = []

    def come(self, host: str, name: str = "") -> Handshake:
        return self.stack.enter_context(self.handshakes.place(cast(Any, Incoming(host, name or host, self.displaced))))


def test_newcomers_displace_the_oldest_of_the_network_that_has_the_most() -> None:
    waiting = Waiting(4)
    for number in range(3):
        waiting.come("192.0.2.7", f"flood {number}")
    waiting.come("198.51.100.1")
    for number in range(3, 100):
        waiting.come(f"192.0.2.{number}", f"flood {number}")
    assert waiting.displaced == [f"flood {number}" for number in range(97)]
    waiting.come("203.0.113.5")
    assert waiting.displaced[-1] == "flood 97"
    assert len(waiting.handshakes.waiting) == 4


def test_who_has_spoken_is_displaced_after_all_who_are_silent() -> None:
    waiting = Waiting(3)
    waiting.come("192.0.2.1", "spoke").spoke = True
    waiting.come("192.0.2.1", "silent 0")
    waiting.come("192.0.2.1", "silent 1")
    for number in range(2, 50):
        waiting.come("192.0.2.1", f"silent {number}")
    assert waiting.displaced == [f"silent {number}" for number in range(48)]
    for _ in range(2):
        waiting.come("192.0.2.1", "spoke too").spoke = True
    waiting.come("192.0.2.1")
    assert waiting.displaced[48:] == ["silent 48", "silent 49", "spoke"]


def test_places_are_free_again_when_the_peer_is_known_or_the_connection_ends() -> None:
    waiting = Waiting(2)
    known = waiting.come("192.0.2.1")
    known.leave("known")
    assert len(waiting.handshakes.waiting) == 0
    waiting.come("192.0.2.2")
    waiting.come("192.0.2.3")
    waiting.stack.close()
    assert len(waiting.handshakes.waiting) == 0
    assert waiting.displaced == []
    metrics = Metrics()
    waiting.handshakes.measure(metrics)
    assert [(sample.of, sample.value) for sample in metrics.samples()] == [
        ("displaced", 0),
        ("failed", 2),
        ("known", 1),
        ("", 0),
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.254", True),
        ("192.0.2.1", "192.0.3.1", False),
        ("::ffff:192.0.2.1", "192.0.2.9", True),
        ("2001:db8:1::1", "2001:db8:1:ffff::2", True),
        ("2001:db8:1::1", "2001:db8:2::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("", "192.0.2.1", False),
    ],
)
def test_a_network_is_what_one_owner_may_hold(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) == same
