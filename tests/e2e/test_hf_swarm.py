"""Four daemons fine-tune a model of `transformers` by LoRA; what they export is loaded by plain `transformers` and
`peft`, and writes what the swarm's own parameters write."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from realnodes import Node, agree, environment, swarmnode
from tinymodels import bpe_folder

from swarmnode.node.storage.checkpoints import newest_whole
from swarmnode.training.inner import flatten_into, layout_of

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
peft = pytest.importorskip("peft", reason="the extra hf is not installed")

from swarmnode.training.hf_lm import CausalLM, attach_lora, open_model  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

BUSY = 420.0  # s; by itself it takes a sixth of that
RANK, ALPHA = 4, 16.0
AUDIT = "checks.audits: "
NO_STANDING = "its author has no standing with the judges"  # what an audit or a judge that finds a lie leads to
RUN = """
[run]
name = "lora"
seed = 3
{run}
[task]
name = "hf-lm"
[model]
base = "{base}"
context = 32
lora_rank = {rank}
lora_alpha = {alpha}
[inner]
lr = {lr}
batch = 4
steps = {steps}
warmup = 2
[exchange]
deadline_floor = 1.0
deadline_ceiling = 20.0
"""


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers, width 64, with random weights and a tokenizer of the corpus."""
    return bpe_folder(corpus, tmp_path_factory.mktemp("base"))


def run_file(path: Path, base: Path, *, steps: int, lr: float = 1e-3, run: str = "") -> Path:
    path.write_text(RUN.format(base=base, rank=RANK, alpha=ALPHA, steps=steps, lr=lr, run=run))
    return path


def rounds_of(text: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, text.splitlines()) if event["event"] == "round"]


def exported_as_the_swarm_has_it(home: Path, base: Path, folder: Path) -> None:
    """Export what a node has, load it by plain `transformers` and `peft`, and compare with its own checkpoint."""
    done = swarmnode("provenance", "export", folder, "--data-dir", home, "--json")
    assert done.returncode == 0, done.stderr
    assert swarmnode("provenance", "verify", json.loads(done.stdout)["record"]).returncode == 0
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = peft.PeftModel.from_pretrained(load(base), folder)
    inner = open_model(str(base))
    attach_lora(inner, rank=RANK, alpha=ALPHA, seed=0)
    model, (run,) = CausalLM(inner, context=32), (home / "runs").iterdir()
    found = newest_whole(run / "checkpoints", run.name)
    assert found is not None and found[0].table == layout_of(model)
    flatten_into(model, torch.tensor(found[1].state.parameters), keep=True)
    tokens = torch.arange(100).view(5, 20)
    with torch.no_grad():
        logits = plain(tokens).logits
        torch.testing.assert_close(logits, model(tokens))
        assert (logits - load(base)(tokens).logits).abs().max() > 0.05, "nothing was learned"


def test_four_daemons_train_adapters_and_export_them(tmp_path: Path, corpus: Path, base: Path) -> None:
    moved = shutil.copytree(base, tmp_path / "the same elsewhere")
    run = run_file(tmp_path / "run.toml", base, steps=30)
    last = ("--rounds", "4", "--checkpoint-every", "1")
    wait = ("--wait-peers", "3", "--wait-seconds", str(BUSY))
    with Node(tmp_path / "a", run, *wait, *last, "--stay", corpus=corpus) as creator:
        ready = creator.wait_for("ready", within=BUSY)
        join = ("--join", ready["multiaddr"], "--run", ready["run_id"], *last, "--stay")
        more: dict[str, tuple[str, ...]] = {"b": (), "c": (), "d": ("--base", str(moved))}
        nodes = [creator, *(Node(tmp_path / name, *join, *args, corpus=None) for name, args in more.items())]
        for node in nodes[1:]:
            node.start()
        try:
            for node in nodes:
                node.wait_for("finished", within=BUSY)
            assert agree(*nodes) >= 3
            assert {node.ready["parameters"] for node in nodes} == {creator.ready["parameters"]}
            whole = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(base).parameters())
            assert creator.ready["parameters"] < whole / 2, "adapters alone are exchanged"
            losses = [event["loss"] for event in creator.events if event["event"] == "round"]
            assert losses[-1] < losses[0] - 0.1
            assert max(event.get("members", 0) for event in creator.events) == 4
            said = creator.command_line("sample", "the swarm", "--length", "20", "--seed", "1")["text"]
            assert isinstance(said, str)
            exported_as_the_swarm_has_it(tmp_path / "d", base, tmp_path / "adapters")
        finally:
            for node in nodes[1:]:
                node.end()


@pytest.mark.thorough
def test_strangers_train_adapters_and_judge_and_repeat_one_anothers_work(
    tmp_path: Path, corpus: Path, base: Path
) -> None:
    run = run_file(tmp_path / "open.toml", base, steps=60, lr=3e-3, run='trust = "open"')
    options = ("--nodes", "4", "--rounds", "10", "--json", "--report", tmp_path / "report")
    done = swarmnode(
        *("local", run, *options, "--data-dir", tmp_path / "nodes"),
        timeout=BUSY,
        SWARMNODE_CORPUS=str(corpus),
    )
    assert done.returncode == 0, done.stderr
    told = rounds_of(done.stdout)
    assert max(event["members"] for event in told) == 4
    by_round: dict[int, set[str]] = {}
    for event in told:
        by_round.setdefault(event["round"], set()).add(event["state_hash"])
    assert len(by_round) >= 7 and all(len(hashes) == 1 for hashes in by_round.values())
    losses = [event["loss"] for event in told if event["node"] == 0]
    assert losses[-1] < losses[0] - 0.1
    audits = [
        line for log in (tmp_path / "nodes").glob("*.log") for line in log.read_text().splitlines() if AUDIT in line
    ]
    assert NO_STANDING not in {why for event in told for why in (event.get("verdicts") or {}).values()}, audits
    counted = {peer for event in told for peer in event["counted"]}
    assert len(counted) == 4, [(event["round"], event["counted"], event.get("verdicts")) for event in told]
    (first, *_) = sorted((tmp_path / "nodes").glob("node-*"))
    exported_as_the_swarm_has_it(first, base, tmp_path / "adapters")


def test_a_foreign_base_is_refused_before_anything_is_trained(tmp_path: Path, corpus: Path, base: Path) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(shape | {"rms_norm_eps": 1e-5}))
    run = run_file(tmp_path / "run.toml", base, steps=30)
    with Node(tmp_path / "a", run, corpus=corpus) as creator:
        ready = creator.wait_for("ready", within=BUSY)
        join = ("--join", ready["multiaddr"], "--run", ready["run_id"])
        with Node(tmp_path / "b", *join, "--base", str(other), corpus=corpus) as foreign:
            assert foreign.wait(within=BUSY) != 0
            assert re.search(r"is not the base of the run.*name the run's with --base", foreign.log(), re.S)


@pytest.mark.thorough
def test_the_example_of_a_policy_that_is_a_language_model_trains_as_its_comment_says(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    subprocess.run([sys.executable, examples / "tiny_llama.py", "build/tiny-llama"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "swarmnode", "local", "--nodes", "2", examples / "hf.toml", "--rounds", "1"]
    done = subprocess.run([*command, "--no-dashboard"], cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reward of the swarm" in done.stdout
