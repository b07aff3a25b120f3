"""Daemons by each method of low communication: one is killed and comes back, all go on, and send what the docs say."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from realnodes import Event, Node, agree, until

pytestmark = pytest.mark.slow

ROUNDS = 4  # whose bytes are counted: so many, that `streaming` sends each of its fragments once
BUTTERFLY = 2 * 2 / 3  # times the codec's bytes, among three: docs/allreduce.md
INT8, E3M0, TOPK = 1.0039, 0.5313, 0.0205  # bytes an element: docs/codecs.md
TALK = 15_000.0  # bytes a round that are no work: to agree, pings, leases, look-ups
RUN = """
[run]
name = "low"
seed = 3
[exchange]
method = "{method}"
deadline_floor = 2.0
deadline_ceiling = 20.0
[model]
layers = 4
heads = 4
width = 128
context = 32
[inner]
batch = 2
warmup = 2
"""


@pytest.mark.parametrize(
    "method, inner, most",  # bytes a parameter and round that a node sends of its work, at the most
    [
        pytest.param("streaming", "steps = 20", BUTTERFLY * E3M0 / 4, id="streaming"),
        pytest.param("async", "steps = 20", BUTTERFLY * INT8, id="async"),
        pytest.param("gossip", "steps = 20", 2 + INT8, id="gossip"),  # docs/gossip.md
        pytest.param("lowrank", "steps = 20", BUTTERFLY * INT8 / 4, id="lowrank"),  # a quarter of what diloco sends
        pytest.param("demo", 'optimizer = "sgd"\nsteps = 1', 2 * TOPK, id="demo"),  # to each of two others
        pytest.param("seed", "steps = 20\nlr = 1e-4\nclip = 2.0", 0.0, id="seed"),  # a record of some hundred bytes
    ],
)
def test_one_is_killed_and_comes_back_and_all_go_on_at_the_bytes_that_are_promised(
    tmp_path: Path, corpus: Path, method: str, inner: str, most: float
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.format(method=method) + inner)
    options = ("--checkpoint-every", "1")
    with ExitStack() as stack:
        first = stack.enter_context(Node(tmp_path / "first", run, "--wait-peers", "2", *options, corpus=corpus))
        join = ("--join", first.ready["multiaddr"], "--run", first.ready["run_id"], *options)
        second, victim = (stack.enter_context(Node(tmp_path / name, *join, corpus=corpus)) for name in ("b", "c"))
        nodes = (first, second, victim)
        peers = {node.ready["peer_id"] for node in nodes}
        before = victim.wait_for("round")["round"]
        victim.send(signal.SIGKILL)
        victim.process.wait(10)
        for node in (first, second):
            node.next_round(after=1)
        since = {first: len(first.events), second: len(second.events), victim: 0}
        victim.start()
        assert victim.wait_for("round")["round"] > before, "it went on, and did not begin anew"
        for node in nodes:  # until each has work of the others that is newer
            for peer in peers - {node.ready["peer_id"]}:
                node.wait_for("round", lambda event, peer=peer: peer in event["counted"], since=since[node])
        since = {node: len(node.events) for node in nodes}
        until(lambda: all(len(_rounds(node, since[node])) > ROUNDS for node in nodes))
        if method not in ("gossip", "seed"):  # in the one all states differ, in the other until records have arrived
            assert agree(*nodes) >= ROUNDS
        told = [event for node in nodes for event in _rounds(node, since[node])]
        sent, work = sum(event["bytes_out"] for event in told) / len(told), first.ready["parameters"] * most
        assert work / 4 < sent < 1.02 * work + TALK, f"{sent:.0f} bytes a round, of which work may be {work:.0f}"


def _rounds(node: Node, since: int) -> list[Event]:
    return [event for event in node.events[since:] if event["event"] == "round"]
