"""Real daemons without a run: what one tells of itself, of others, of traffic and of the DHT, and whom it keeps out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from realnodes import Node, swarmnode, until

from swarmnode.node.exitcodes import ERROR, USAGE


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """A relay, and two nodes that joined it."""
    folder = tmp_path_factory.mktemp("three")
    with ExitStack() as stack:
        first = stack.enter_context(Node(folder / "a", "--role", "relay", corpus=None))
        others = [
            stack.enter_context(Node(folder / name, "--role", "relay", "--join", first.ready["multiaddr"], corpus=None))
            for name in ("b", "c")
        ]
        assert all(node.ready for node in others)
        yield [first, *others]


def id_of(node: Node) -> str:
    return str(node.ready["peer_id"])


def test_a_daemon_finds_out_that_it_can_be_dialled(three: list[Node]) -> None:
    for node in three:
        until(lambda node=node: node.command_line("netcheck")["reachability"] == "public")
        answer = node.command_line("netcheck")
        assert answer["reached_by"] >= 1 and answer["failed_for"] == 0
        over_udp = re.sub(r"/tcp/(\d+)", r"/udp/\1/quic-v1", node.ready["multiaddr"])
        assert answer["listens"] == answer["announces"] == [node.ready["multiaddr"], over_udp]
        assert answer["peers"]["connected"] == answer["peers"]["direct"] >= 1 and not answer["peers"]["relayed"]
        assert [problem["problem"] for problem in answer["problems"]] == ["the node listens for this machine only"]
        assert node.command_line("status")["reachability"] == "public"
    shown = swarmnode("netcheck", "--data-dir", three[0].home)
    assert shown.returncode == 0 and "public: peers can dial this node" in shown.stdout
    assert "start it with --listen ::" in shown.stdout and max(map(len, shown.stdout.splitlines())) <= 120


def test_a_peer_is_shown_with_how_it_is_reached_and_why_it_stands_as_it_does(three: list[Node]) -> None:
    a, b, _ = three
    until(lambda: bool(a.command_line("peers", "show", id_of(b))["protocols"]))
    told = a.command_line("peers", "show", id_of(b)[-6:])
    assert (told["peer_id"], told["path"], told["transport"], told["relay"]) == (id_of(b), "direct", "tcp", None)
    assert told["agent"].startswith("swarmnode/") and "/ipfs/kad/1.0.0" in told["protocols"]
    [connection] = [each for each in told["connections"] if each["inbound"]]
    assert connection["address"].startswith("/ip4/127.0.0.1/tcp/")
    assert [change["path"] for change in told["history"]] == ["direct"] and "dialled" in told["history"][0]["why"]
    assert told["scoring"]["standing"] == "good" and told["scoring"]["points"] == 0
    assert told["scoring"]["falls_at"]["banned"] > told["scoring"]["falls_at"]["slowed"]
    assert sum(each["in"] + each["out"] for each in told["traffic"].values()) > 0
    shown = swarmnode("peers", "show", id_of(b), "--data-dir", a.home).stdout
    assert "direct over tcp" in shown and "0 points" in shown and "/ipfs/kad/1.0.0" in shown


def test_id_of_another_node_is_what_it_says_of_itself(three: list[Node]) -> None:
    a, b, _ = three
    told = a.command_line("id", id_of(b))
    assert told["peer_id"] == id_of(b) and told["agent"].startswith("swarmnode/") and len(told["public_key"]) == 64
    assert b.ready["multiaddr"].partition("/p2p/")[0] in [each.partition("/p2p/")[0] for each in told["addresses"]]
    assert told["sees_this_node_at"].startswith("/ip4/127.0.0.1/tcp/") and "/ipfs/id/1.0.0" in told["protocols"]
    refused = swarmnode("id", id_of(b), "--join", "--data-dir", a.home)
    assert refused.returncode == USAGE and "about this node" in refused.stderr


def test_bw_counts_by_protocol_and_by_peer(three: list[Node]) -> None:
    a, b, c = three
    of_b = ("bw", "--interval", "0.2", "--peer", id_of(b))
    until(lambda: any("kad" in name for name in a.command_line(*of_b)["protocols"]))
    told = a.command_line("bw", "--interval", "0.2")
    assert {id_of(b), id_of(c)} <= told["peers"].keys() and told["total"]["in"] > 0
    with_b = a.command_line(*of_b, "--protocol", "kad")
    assert with_b["protocols"] and all("kad" in name for name in with_b["protocols"])
    for name, counted in with_b["protocols"].items():
        assert counted["in"] <= a.command_line("bw", "--interval", "0.2")["protocols"][name]["in"]
    nothing = swarmnode("bw", "--protocol", "nonsense", "--data-dir", a.home)
    assert nothing.returncode == USAGE and "nonsense" in nothing.stderr


def test_ping_ends_at_the_first_direct_reply_unless_a_count_is_named(three: list[Node]) -> None:
    a, b, _ = three
    told = a.command_line("ping", id_of(b))
    assert (told["sent"], len(told["rtts_ms"]), told["path"]) == (1, 1, "direct")
    assert told["relays"] == [None] and told["ways"][0]["transport"] == "tcp"
    [peer] = [each for each in a.command_line("peers")["peers"] if each["peer_id"] == id_of(b)]
    assert (peer["path"], peer["relay"]) == ("direct", None) and peer["rtt_ms"] > 0
    assert len(a.command_line("ping", b.ready["multiaddr"], "--count", "2")["rtts_ms"]) == 2


def test_the_dht_is_asked_for_peers_providers_and_closest_peers(three: list[Node]) -> None:
    _, b, c = three
    until(lambda: bool(b.command_line("dht", "stats")["connected"]))
    found = b.command_line("dht", "find", id_of(c))
    assert c.ready["multiaddr"] in found["addresses"] and found["asked"] >= 1
    assert id_of(three[0]) in [each["peer_id"] for each in b.command_line("dht", "query", "catalogue")["closest"]]
    until(lambda: bool(b.command_line("dht", "providers", "relays")["providers"]))
    for key in ("nonsense", "ab " * 21 + "a"):
        refused = swarmnode("dht", "query", key, "--data-dir", b.home)
        assert refused.returncode == USAGE and "64 hex digits" in refused.stderr


def test_a_blocked_peer_stays_out_also_after_a_restart_until_it_is_unblocked(three: list[Node]) -> None:
    _, b, c = three
    assert c.command_line("peers", "connect", b.ready["multiaddr"])["path"] == "direct"
    gone = c.command_line("peers", "disconnect", id_of(b))
    assert gone["peer_id"] == id_of(b) and not gone["blocked"]
    assert c.command_line("peers", "block", id_of(b)) == {
        **{"peer_id": id_of(b), "blocked": True, "barred_before": False, "path": "none"},
        **{"relay": None, "transport": "", "address": ""},
    }
    refused = swarmnode("peers", "connect", b.ready["multiaddr"], "--data-dir", c.home)
    assert refused.returncode == ERROR and "blocked by this node's owner" in refused.stderr
    c.end()
    c.start()
    assert c.ready and c.command_line("peers")["blocked"] == [id_of(b)]
    assert "is blocked" in swarmnode("peers", "--data-dir", c.home).stderr
    turned_away = swarmnode("peers", "connect", c.ready["multiaddr"], "--data-dir", b.home, "--json")
    assert turned_away.returncode or json.loads(turned_away.stdout)["peer_id"] == id_of(c)
    until(lambda: id_of(c) not in [peer["peer_id"] for peer in b.command_line("peers")["peers"]])
    assert c.command_line("peers", "unblock", id_of(b)[-6:])["blocked"] is False
    assert c.command_line("peers", "connect", b.ready["multiaddr"])["path"] == "direct"
    history = c.command_line("peers", "show", id_of(b))["history"]
    assert history[-1]["path"] == "direct" and "dialled" in history[-1]["why"]  # whichever of the two was first


def test_netcheck_of_a_peer_says_what_was_tried_and_why_nothing_worked(three: list[Node]) -> None:
    a, b, _ = three
    assert a.command_line("netcheck", id_of(b))["advice"].startswith("nothing to mend")
    stranger = "12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP"
    told = a.command_line("netcheck", stranger)
    assert told["path"] == "none" and "nobody says where it is" in told["advice"]
    told = a.command_line("netcheck", f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}")
    assert [step["result"] for step in told["steps"] if step["step"].startswith("dialled")] and (
        "nothing listens" in told["advice"]
    )


def test_the_level_of_the_log_changes_while_the_node_runs(three: list[Node]) -> None:
    a = three[0]
    assert a.command_line("log", "level", "node.nat", "debug")["levels"]["node.nat"] == "DEBUG"
    told = a.command_line("log", "level", "warning")["levels"]
    assert told[""] == "WARNING" and "node.nat" not in told
    refused = swarmnode("log", "level", "node.nonsense", "info", "--data-dir", a.home)
    assert refused.returncode == USAGE and "there are" in refused.stderr


def test_options_before_a_verb_are_refused_and_not_dropped(three: list[Node]) -> None:
    refused = swarmnode("peers", "--data-dir", three[0].home, "show", id_of(three[1]))
    assert refused.returncode == USAGE and "stand at the end" in refused.stderr
