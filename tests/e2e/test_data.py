"""The run's text travels: who has no corpus trains on what peers have, also when the creator is gone."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from realnodes import RUN_TOML, Node, agree, swarmnode, until, warnings_of

pytestmark = pytest.mark.slow


@pytest.fixture
def nothing(tmp_path: Path) -> Path:
    """A corpus without text."""
    folder = tmp_path / "nothing"
    folder.mkdir()
    return folder


def here(node: Node) -> dict[str, int]:
    told: dict[str, int] = node.command_line("status")["run"]["data"]
    return told


def test_text_reaches_those_without_a_corpus_and_outlives_its_creator(
    tmp_path: Path, corpus: Path, nothing: Path, run_file: Path
) -> None:
    with Node(tmp_path / "creator", run_file, "--wait-peers", "1", corpus=corpus) as creator, ExitStack() as stack:
        second = stack.enter_context(
            Node(tmp_path / "second", "--join", creator.ready["multiaddr"], corpus=nothing),
        )
        complete = second.wait_for("data", lambda event: event["shards"] == event["wanted"])
        assert complete["bytes"] == complete["fetched"] > 40_000
        second.wait_for("round", lambda event: event["steps"] > 0)
        until(lambda: agree(creator, second) > 0)
        creator.command_line("stop")
        assert creator.wait() == 0
        third = stack.enter_context(Node(tmp_path / "third", "--join", second.ready["multiaddr"], corpus=nothing))
        trained = third.wait_for("round", lambda event: event["steps"] > 0)
        second.wait_for("round", lambda event: event["round"] > trained["round"])
        assert agree(second, third) > 0
        third.wait_for("data", lambda event: event["shards"] == event["wanted"])
        assert here(third)["fetched"] == here(third)["bytes"] > 0
        until(lambda: warnings_of(third) == [])
        kept = {shard["id"]: shard for shard in third.command_line("shards", "ls")["shards"]}
        assert set(kept) == {shard["id"] for shard in second.command_line("shards", "ls")["shards"]}
        assert all(shard["pinned"] for shard in kept.values())
        third.command_line("leave", "--yes")
        assert third.wait() == 0
        assert "Traceback" not in third.log() + second.log()


def test_restarted_node_has_its_text_without_its_corpus_and_without_peers(
    tmp_path: Path, corpus: Path, run_file: Path
) -> None:
    with Node(tmp_path / "node", run_file, "--rounds", "1", corpus=corpus) as node:
        assert node.wait() == 0, node.log()
    moved = corpus.rename(corpus.with_name("moved"))
    try:
        run_id = node.ready["run_id"]
        with Node(tmp_path / "node", "--run", run_id, "--rounds", "2", corpus=corpus) as node:
            assert node.wait() == 0, node.log()
    finally:
        moved.rename(corpus)
    assert [event["steps"] for event in node.events if event["event"] == "round"] == [100]


def test_loss_on_sealed_text_is_measured_by_anybody_and_on_no_other_text(tmp_path: Path, corpus: Path) -> None:
    kept_back, forged, model = tmp_path / "sealed.txt", tmp_path / "forged.txt", tmp_path / "model.safetensors"
    text = " ".join(f"unseen{number}" for number in range(300))
    kept_back.write_text(text)
    forged.write_text(text.replace("unseen7 ", "unseen8 "))
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'{RUN_TOML}[data]\nsealed = "{hashlib.sha256(text.encode()).hexdigest()}"\n')
    with Node(tmp_path / "node", run_file, "--rounds", "1", corpus=corpus) as node:
        assert node.wait() == 0, node.log()
    assert swarmnode("provenance", "export", model, "--data-dir", tmp_path / "node").returncode == 0

    def verified(sealed: Path) -> tuple[int, str]:
        done = swarmnode("provenance", "verify", model, "--sealed", sealed, "--json", "--data-dir", tmp_path / "other")
        checks = json.loads(done.stdout)["checks"]
        return done.returncode, next(check["detail"] for check in checks if check["what"] == "sealed text")

    code, said = verified(kept_back)
    assert code == 0 and 0 < float(said.removesuffix(" bits per byte").split()[-1]) < 8
    code, said = verified(forged)
    assert code == 1 and said.startswith("forged.txt has sha-256") and "it is another file" in said
    nowhere = swarmnode("provenance", "verify", model, "--sealed", tmp_path / "nowhere")
    assert nowhere.returncode == 1 and "nowhere: cannot be read" in nowhere.stderr


@pytest.mark.parametrize("said_by", [pytest.param("run", marks=pytest.mark.thorough), "node"])
def test_node_with_text_of_its_own_fetches_the_held_out_part_only(
    tmp_path: Path, corpus: Path, other_corpus: Path, said_by: str
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_TOML + ('[data]\nsource = "local"\n' if said_by == "run" else ""))
    own = ("--data", "local") if said_by == "node" else ()
    with Node(tmp_path / "creator", run_file, "--wait-peers", "1", corpus=corpus) as creator:
        join = ("--join", creator.ready["multiaddr"])
        with Node(tmp_path / "node", *join, *own, corpus=other_corpus) as node:
            first = node.wait_for("round", lambda event: event["steps"] > 0)
            creator.wait_for("round", lambda event: event["round"] >= first["round"])
            assert agree(node, creator) > 0
            assert "joining the only run there: tiny" in node.log()
            assert here(node) == {
                "source": "local",
                "shards": 0,
                "wanted": 0,
                "in_run": 0,
                "bytes": 0,
                "of": here(node)["of"],
                "fetched": 0,
            }
            assert len(node.command_line("shards", "ls")["shards"]) == 2
