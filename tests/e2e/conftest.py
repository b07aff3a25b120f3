"""Text, a run file, and a swarm of three real nodes with a fourth one that things happen to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from realnodes import RUN_TOML, Node, swarmnode

WORDS = ("the", "swarm", "trains", "a", "model", "together", "peer", "round")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 kB of text in ten files."""
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(1)
    for number in range(10):
        text = " ".join(f"{words.choice(WORDS)}{words.randrange(1000)}" for _ in range(4000))
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def other_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another text, as another version of Python would have."""
    path = tmp_path_factory.mktemp("other") / "corpus.txt"
    path.write_bytes(random.Random(2).randbytes(200_000))
    return path


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RUN_TOML)
    return path


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, corpus: Path, run_file: Path) -> Iterator[list[Node]]:
    """Three nodes that train until the module's tests are over."""
    folder = tmp_path_factory.mktemp("swarm")
    with ExitStack() as stack:
        creator = Node(folder / "creator", run_file, "--wait-peers", "2", corpus=corpus)
        stack.enter_context(creator)
        join = ("--join", creator.ready["multiaddr"], "--run", creator.ready["run_id"])
        others = [Node(folder / name, *join, corpus=corpus) for name in ("second", "third")]
        for node in others:
            stack.enter_context(node)
        for node in (creator, *others):
            node.wait_for("round")
        yield [creator, *others]


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory, corpus: Path, swarm: list[Node]) -> Iterator[Node]:
    """A fourth node, joined by the line that the creator's owner reads on the screen."""
    printed = swarmnode("id", "--join", "--data-dir", swarm[0].home).stdout.split()
    assert printed[:2] == ["swarmnode", "join"], printed
    home = tmp_path_factory.mktemp("victim") / "fourth"
    with Node(home, "--join", *printed[2:], "--checkpoint-every", "1", corpus=corpus) as node:
        yield node
