"""The same promises with vLLM itself, where it is installed, in a process that may start no program and open no socket.

`test_engine.py` has those that need no vLLM. One process for all, since an engine takes half a minute to start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tinymodels import folder_of

pytest.importorskip("vllm", reason="vLLM is not installed")

TRIAL = """
import json, sys, tempfile
from swarmnode.training import sandbox
scratch, folder, trained = sys.argv[1:4]
report = sandbox.enter(sandbox.Rules(scratch=scratch, readable=(folder,)))
import numpy as np, torch
from dataclasses import replace
from swarmnode.training.rl.proofs import RolloutAudit
from swarmnode.training.rl.groups import score
from swarmnode.training.rl.hf import load
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.sampling import read_tokens
from swarmnode.training.rl.sampling import Sampling, sample
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.engine import VLLMSampler
torch.set_num_threads(1)
policy = load(folder, seed=1, lora=trained == "hf")
torch.manual_seed(7)
sampler = VLLMSampler(policy)
told = {"missing": list(report.missing), "threads": torch.get_num_threads(), "apart": [], "checks": []}
told["chance"] = [float(torch.rand(())), float(torch.rand((), generator=torch.Generator().manual_seed(7)))]
prompts = [policy.vocabulary.prompt(question) for question in ("a304=", "b1=", "c22=")]
asked = [prompt for prompt in prompts for _ in range(40)]

def moved(seed):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))

def written(by, how, seed=1):
    return by(policy, prompts, replace(how, copies=40), [seed, seed + 10, seed + 20])

hows = Sampling(6), Sampling(6, top_k=3), Sampling(6, temperature=0.5), Sampling(6, temperature=0)
for seed, how in enumerate(hows):
    moved(seed)
    answers, end = written(sampler, how), policy.vocabulary.end
    of = how if how.temperature else Sampling()
    readings = read_tokens(policy, asked, [answer.tokens for answer in answers], of)
    told["apart"].append(max(float(np.abs(r.logprobs - a.logprobs).max()) for r, a in zip(readings, answers)))
    told["checks"] += [
        written(sampler, how) == answers,
        (written(sampler, how, seed=2) != answers) == (how.temperature > 0),
        all(end not in answer.tokens[:-1] for answer in answers),
        all(answer.tokens[-1] == end or len(answer.tokens) == 6 for answer in answers),
        all(r.ranks.max() < (how.top_k or 99) for r in readings),
        [answer.tokens for answer in written(sample, how)] == [answer.tokens for answer in answers],
    ]
with torch.no_grad():
    for parameter in policy.parameters():  # as they are sent
        parameter.copy_(parameter.bfloat16())
audit = RolloutAudit(policy, share=1.0, seed=1, how=hows[0])
audit.remember("these")
node = Learner("h", policy, Settings(sampling=hows[0]), seed=2, sampler=sampler)
groups = node.answer([TaskRef("digits/swap", 5, seed) for seed in range(24)], policy="these")
told["passed"] = len(audit.check([score("h", group) for group in groups]).passed)
print(json.dumps(told))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "trained"), [("gpt2", "hf"), ("llama", "hf"), ("gpt2", "hf-full")])
def test_vllm_samples_as_torch_does_within_the_sandbox(kind: str, trained: str, tmp_path: Path) -> None:
    folder, scratch = folder_of(kind, tmp_path / "model"), tmp_path / "own"
    scratch.mkdir()
    told = trial(folder, scratch, trained)
    assert told["missing"] == [] or os.geteuid() != 0
    assert told["threads"] == 1 and len(set(told["chance"])) == 1  # as they were before it started
    assert max(told["apart"]) < 1e-4 and all(told["checks"]) and told["passed"] == 24


def trial(folder: Path, scratch: Path, trained: str) -> dict[str, Any]:
    environment = {**os.environ, "TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TRIAL, str(scratch), str(folder), trained]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
