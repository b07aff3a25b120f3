"""A run goes on from the file that another one left: real nodes, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from realnodes import RUN_TOML, Node, agree, swarmnode

pytestmark = pytest.mark.slow
STANDING_STILL = "[outer]\nlr = 0.0\n"  # a round's loss is then that of its start


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, corpus: Path, run_file: Path) -> tuple[Path, float]:
    """The model of a run after two rounds, and its held-out loss."""
    folder = tmp_path_factory.mktemp("before")
    with Node(folder / "node", run_file, "--rounds", "2", corpus=corpus) as node:
        loss = node.wait_for("round", lambda event: event["round"] == 1)["loss"]
        assert node.wait() == 0
    done = swarmnode("provenance", "export", folder / "model.safetensors", "--data-dir", folder / "node")
    assert done.returncode == 0, done.stderr
    return folder / "model.safetensors", loss


@pytest.mark.parametrize("trust", [pytest.param("known", marks=pytest.mark.thorough), "open"])
def test_a_run_from_an_exported_file_has_the_loss_of_the_run_that_it_came_from(
    tmp_path: Path, corpus: Path, exported: tuple[Path, float], trust: str
) -> None:
    model, loss = exported
    new = tmp_path / "new.toml"
    new.write_text(RUN_TOML.replace("[run]", f'[run]\ntrust = "{trust}"') + STANDING_STILL)
    with Node(tmp_path / "creator", new, "--weights", model, "--wait-peers", "1", corpus=corpus) as node:
        join = ("--join", node.ready["multiaddr"], "--run", node.ready["run_id"])
        with Node(tmp_path / "joiner", *join, corpus=corpus) as joiner:
            for each in (node, joiner):
                assert each.wait_for("round")["loss"] == pytest.approx(loss, abs=1e-6)
            joiner.next_round()
            assert agree(node, joiner)


def test_a_file_that_does_not_fit_leaves_no_run_behind(
    tmp_path: Path, corpus: Path, exported: tuple[Path, float]
) -> None:
    wide, home = tmp_path / "wide.toml", tmp_path / "node"
    wide.write_text(RUN_TOML.replace("width = 32", "width = 64"))
    with Node(home, wide, "--weights", exported[0], corpus=corpus) as node:
        assert node.wait() == 3 and "tokens.weight is float32 [256, 32] in place of float32 [256, 64]" in node.log()
    assert not list((home / "runs").iterdir())
