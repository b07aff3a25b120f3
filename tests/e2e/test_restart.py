"""All daemons of a swarm stop or are killed, and start again: training goes on as if nothing had been."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from realnodes import Event, Node, agree

pytestmark = pytest.mark.slow

BEFORE, AFTER = 5, 5  # rounds
NOISE = 0.06  # bits per byte; with other keys, and so other text, the losses of swarms that ran through are 0.03 apart
NAMES = "one", "two"
RUN = """
[run]
name = "restarted"
seed = 3
nonce = "07"
[model]
layers = 1
heads = 2
width = 32
context = 32
[inner]
optimizer = "muon"
interval = "fixed"
batch = 2
steps = 60
warmup = 2
[exchange]
deadline_floor = 5.0
deadline_ceiling = 20.0
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def swarm(folder: Path, corpus: Path, keys: Path | None = None) -> Iterator[list[Node]]:
    """Two nodes until the last round, with the keys of the nodes in `keys`: so they draw the same text."""
    run = folder / "run.toml"
    folder.mkdir()
    run.write_text(RUN)
    for name in NAMES if keys is not None else ():
        (folder / name).mkdir(mode=0o700)
        shutil.copy2(keys / name / "identity.key", folder / name)
    options = ("--rounds", str(BEFORE + AFTER), "--checkpoint-every", "1", "--wait-peers", "1")
    with ExitStack() as stack:
        first = Node(folder / "one", run, *options, corpus=corpus, port=_free_port())
        stack.enter_context(first)
        join = ("--join", first.ready["multiaddr"], "--run", first.ready["run_id"])
        second = Node(folder / "two", *join, *options, corpus=corpus, port=_free_port())
        stack.enter_context(second)
        yield [first, second]


def rounds_of(node: Node) -> dict[int, Event]:
    return {event["round"]: event for event in list(node.events) if event["event"] == "round"}


def ends(nodes: list[Node]) -> tuple[float, int]:
    """Held-out loss after the last round, and how often the moments were updated until then."""
    for node in nodes:
        assert node.wait() == 0, node.log()
    assert agree(*nodes) > 0
    manifest = max(nodes[0].home.glob("runs/*/checkpoints/*.json"))
    return rounds_of(nodes[0])[BEFORE + AFTER - 1]["loss"], json.loads(manifest.read_text())["updates"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, float]:
    """Where the keys of its nodes lie, and the loss that it comes to."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "swarm"
    with swarm(folder, corpus) as nodes:
        loss, updates = ends(nodes)
        assert updates == sum(event["steps"] for event in rounds_of(nodes[0]).values())
    return folder, loss


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, id="stopped", marks=pytest.mark.thorough),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_a_swarm_that_starts_again_learns_what_one_that_never_stopped_does(
    tmp_path: Path, corpus: Path, uninterrupted: tuple[Path, float], how: signal.Signals
) -> None:
    keys, expected = uninterrupted
    with swarm(tmp_path / "swarm", corpus, keys) as nodes:
        for node in nodes:
            node.wait_for("round", lambda event: event["round"] == BEFORE - 1)
        for node in nodes:
            node.send(how)
        for node in nodes:
            node.process.wait(10)
        told = rounds_of(nodes[0])
        for node in nodes:
            node.start()
        loss, updates = ends(nodes)
        first = nodes[0].wait_for("round")
        assert first["members"] == 2, "they began together"
        assert first["round"] >= BEFORE - 2, "they began from a checkpoint of the last rounds, not anew"
        told |= rounds_of(nodes[0])
    assert updates >= sum(event["steps"] for event in told.values()), "the moments were kept"
    assert abs(loss - expected) < NOISE
