"""How few bytes a policy's updates are as patches, and what a sampler spends on them; JSON lines.

    python bench/patches.py [--rates 1e-6 1e-5 1e-4 1e-3] [--seeds 3] [--updates 8] [--layers 8] [--width 512]

A policy of some 25 million parameters learns from its own answers to digit tasks, by the product's own learner (AdamW,
GRPO), after learning their form. What would go out after each update is made as a trainer makes it, and applied as a
sampler applies it. Told for each learning rate, at the worst of all seeds and updates: the share of words that changed,
the bytes of a patch as a share of those of full bf16 weights, the seconds of making and of applying one, its hash
included, and the latter as a share of the time in which a sampler answers a batch of the run's default size: of digits,
whose answers have some four tokens, and of text, with answers of 64 tokens (the shortest of all seeds). `equal` is
whether what came of all patches, one after another, are the trainer's words, bit for bit; `updates_without_groups`
counts those in which no own group taught anything: they change little but by momentum.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import replace

import numpy as np
import torch

from swarmnode.protocols.methods.rollouts.weights import hash_of
from swarmnode.testing.learners import start_from
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.patches import applied, between, rounded
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.sampling import Sampling, sample
from swarmnode.training.rl.section import RolloutsSection
from swarmnode.training.rl.tasks import NAMES, TaskRef, well_formed
from swarmnode.training.rl.vocabulary import BYTES


def words_of(learner: Learner) -> np.ndarray:
    with torch.no_grad():
        return rounded(torch.nn.utils.parameters_to_vector(learner.policy.parameters()).numpy())


def taught(layers: int, width: int, seed: int) -> Learner:
    """A policy that knows the form of answers, and not yet which are right."""
    policy = build(PolicySpec(layers=layers, width=width, heads=width // 64), seed=seed)
    learner = Learner("trainer", policy, Settings(learning_rate=1e-3), seed=seed)
    learner.warm_up(well_formed, steps=30)
    return learner


def batch_seconds(learner: Learner) -> float:
    """In which a sampler answers the questions of one batch of digits, with proofs."""
    began = time.perf_counter()
    learner.answer([TaskRef(NAMES[n % len(NAMES)], 5, n) for n in range(RolloutsSection().batch)], policy="ab" * 32)
    return time.perf_counter() - began


def text_seconds(layers: int, width: int) -> float:
    """In which it answers a batch of questions in text: as many, of 32 bytes, each by as many answers of 64 tokens."""
    policy = build(PolicySpec("gpt", layers, width, width // 64, 512, BYTES.id), seed=1)
    how = Sampling(max_tokens=64, copies=RolloutsSection().answers)
    began = time.perf_counter()
    batch = RolloutsSection().batch
    sample(policy, [list(range(64, 96))] * batch, how, list(range(batch)))
    return time.perf_counter() - began


def course(beginning: Learner, rate: float, seed: int, updates: int) -> list[dict[str, float]]:
    """What each update came to, at a learning rate."""
    settings = replace(beginning.settings, learning_rate=rate)
    learner = Learner("trainer", copy.deepcopy(beginning.policy), settings, seed=seed)
    start_from(learner, beginning)
    here = there = words_of(learner)
    told = []
    for _ in range(updates):
        report = learner.learn(learner.sample(), [])
        newest = words_of(learner)
        began = time.perf_counter()
        patch = between(here, newest)
        made = time.perf_counter()
        there = applied(there, patch)
        policy_hash = hash_of(there)
        done = time.perf_counter()
        told.append(
            {
                "changed": float((here != newest).mean()),
                "bytes": len(patch) / newest.nbytes,
                "making": made - began,
                "applying": done - made,
                "equal": policy_hash == hash_of(newest),
                "informative": report.informative,
            }
        )
        here = newest
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 1e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    chosen = parser.parse_args()
    beginnings = [taught(chosen.layers, chosen.width, seed) for seed in range(chosen.seeds)]
    digits, text = min(map(batch_seconds, beginnings)), text_seconds(chosen.layers, chosen.width)
    for rate in chosen.rates:
        runs = [course(beginning, rate, seed, chosen.updates) for seed, beginning in enumerate(beginnings)]
        told = [each for run in runs for each in run]
        worst = {key: max(each[key] for each in told) for key in ("changed", "bytes", "making", "applying")}
        print(
            json.dumps(
                {
                    "bench": "patches",
                    "parameters": words_of(beginnings[0]).size,
                    "learning_rate": rate,
                    "updates": len(told),
                    "updates_without_groups": sum(not each["informative"] for each in told),
                    "changed_worst": round(worst["changed"], 5),
                    "patch_of_full_bf16_worst": round(worst["bytes"], 5),
                    "making_seconds_worst": round(worst["making"], 3),
                    "applying_seconds_worst": round(worst["applying"], 3),
                    "applying_of_sampling_digits_worst": round(worst["applying"] / digits, 4),
                    "applying_of_sampling_text_worst": round(worst["applying"] / text, 4),
                    "equal": all(each["equal"] for each in told),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
