"""Real daemons without a run: what netcheck, peers and ping say of the way between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from realnodes import PATIENCE, Node, swarmnode


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """A relay, and another node that joined it."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        first = stack.enter_context(Node(folder / "a", "--role", "relay", corpus=None))
        second = Node(folder / "b", "--role", "relay", "--join", first.ready["multiaddr"], corpus=None)
        yield [first, stack.enter_context(second)]


def waited_for(node: Node, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    give_up = time.monotonic() + PATIENCE
    while not found(answer := node.command_line("netcheck")):
        assert time.monotonic() < give_up, answer
        time.sleep(0.2)
    return answer


def test_a_daemon_finds_out_that_it_can_be_dialled(pair: list[Node]) -> None:
    for node in pair:
        answer = waited_for(node, lambda answer: answer["reachability"] == "public")
        assert (answer["reached_by"], answer["failed_for"]) == (1, 0)
        over_udp = re.sub(r"/tcp/(\d+)", r"/udp/\1/quic-v1", node.ready["multiaddr"])
        assert answer["listens"] == answer["announces"] == [node.ready["multiaddr"], over_udp]
        assert answer["peers"] == {"connected": 1, "direct": 1, "relayed": 0}
        assert [problem["problem"] for problem in answer["problems"]] == ["the node listens for this machine only"]
        assert node.command_line("status")["reachability"] == "public"


def test_a_direct_path_is_called_direct(pair: list[Node]) -> None:
    other = pair[1].ready["peer_id"]
    answer = pair[0].command_line("ping", other, "--count", "2")
    assert answer["relays"] == [None, None] and answer["path"] == "direct" and len(answer["rtts_ms"]) == 2
    [peer] = pair[0].command_line("peers")["peers"]
    assert (peer["peer_id"], peer["path"], peer["relay"]) == (other, "direct", None) and peer["rtt_ms"] > 0


def test_people_can_read_it(pair: list[Node]) -> None:
    waited_for(pair[0], lambda answer: answer["reachability"] == "public")
    shown = swarmnode("netcheck", "--data-dir", pair[0].home)
    assert shown.returncode == 0 and "public: peers can dial this node" in shown.stdout
    assert "start it with --listen ::" in shown.stdout and max(map(len, shown.stdout.splitlines())) <= 120
