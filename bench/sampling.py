"""How fast an `hf` policy writes with vLLM and with the sampler in torch, and whether vLLM's answers pass as honest.

    python bench/sampling.py                              # minutes; --layers 2 --width 128 for a look; needs vLLM
    python bench/sampling.py --engines torch              # without it
    python bench/sampling.py --engines torch --device cuda --layers 12 --width 768 --words 32000 --updates 5

A Llama of random weights with LoRA, made in a temporary directory. Every line is a JSON object: `speed` of an engine,
each the median of runs in turns with the other's, in tokens a second and a second of CPU time (all threads), which says
more where the machine does other work as well; `weights`, what it takes to give vLLM new ones; `honest`, how far apart
its log-probabilities and those of a prefill on the CPU are, and what an audit there and the gate refuse of its answers
and of torch's; `update`, the seconds of an update of the product's learner, the median of `--updates`, and the share of
sampling (with the hash of the weights), learning (the quick measurement after it included), and sync: the patch as a
trainer makes it and as a sampler applies it, one after the other. Rewards are drawn by lot there, as only time counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarmnode.protocols.methods.rollouts.weights import hash_of
from swarmnode.training.rl.engine import VLLMSampler
from swarmnode.training.rl.groups import Scored, score
from swarmnode.training.rl.grpo import Split
from swarmnode.training.rl.hf import HFPolicy, load
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.patches import applied, between, rounded
from swarmnode.training.rl.policies import parameter_hash
from swarmnode.training.rl.proofs import RolloutAudit
from swarmnode.training.rl.sampling import Sampler, Sampling, read, sample
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.trainee import HELDOUT, TEXT_GATE, TEXT_SAMPLING

CHARACTERS = "0123456789abcdefghij=:#! "


def make(into: Path, *, layers: int, width: int, words: int, context: int) -> None:
    """A Llama with heads of 64 and as many words as asked for, most of which no question has."""
    import tokenizers
    import transformers

    listed = [*CHARACTERS, *(f"<{n}>" for n in range(words - len(CHARACTERS) - 1)), "<end>"]
    vocabulary = {word: n for n, word in enumerate(listed)}
    cutter = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    cutter.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, eos_token="<end>").save_pretrained(into)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 128),
        vocab_size=len(vocabulary),
        max_position_embeddings=context,
        initializer_range=0.05,
        bos_token_id=vocabulary["<end>"],
        eos_token_id=vocabulary["<end>"],
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(into)


def changed(policy: HFPolicy, seed: int) -> None:
    """Adapters as learning leaves them and as they are sent, other ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
            parameter.copy_(parameter.bfloat16())  # as samplers get them


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def speed(
    policy: HFPolicy, engines: dict[str, Sampler], prompts: Sequence[list[int]], *, copies: int, tokens: int, runs: int
) -> list[dict[str, Any]]:
    how, taken = Sampling(max_tokens=tokens, copies=copies), {name: [] for name in engines}
    for run in range(runs + 1):  # the first is not counted
        for name, engine in engines.items():
            seeds = [1000 * run + number for number in range(len(prompts))]
            wall, used = time.perf_counter(), time.process_time()
            answers = engine(policy, prompts, how, seeds)
            spent = time.perf_counter() - wall, time.process_time() - used
            taken[name].append((sum(len(answer.tokens) for answer in answers), *spent))
    rows = []
    for name, measured in taken.items():
        a_second, a_cpu_second = (statistics.median(row[0] / row[index] for row in measured[1:]) for index in (1, 2))
        rows.append(
            {
                "what": "speed",
                "engine": name,
                "device": str(next(policy.parameters()).device),
                "answers": len(prompts) * copies,
                "tokens": tokens,
                "tokens_per_second": round(a_second, 1),
                "tokens_per_cpu_second": round(a_cpu_second, 1),
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def weights(policy: HFPolicy, sampler: VLLMSampler, runs: int) -> dict[str, Any]:
    wall, used = [], []
    for run in range(runs):
        changed(policy, seed=100 + run)
        began = time.perf_counter(), time.process_time()
        sampler.give(policy)
        wall.append(time.perf_counter() - began[0])
        used.append(time.process_time() - began[1])
    told = {"seconds": round(statistics.median(wall), 3), "cpu_seconds": round(statistics.median(used), 3)}
    return {"what": "weights", **told}


def update(
    policy: HFPolicy, engine: Sampler, *, questions: int, tokens: int, updates: int, rate: float
) -> dict[str, Any]:
    """What an update of a policy takes, by a node that only learns from itself and whose weights samplers get."""
    rng = np.random.default_rng(1)
    settings = Settings(learning_rate=rate, sampling=replace(TEXT_SAMPLING, max_tokens=tokens))
    learner = Learner("me", policy, settings, seed=1, sampler=engine)
    here = words_of(policy)
    taken: dict[str, list[float]] = {"sampling": [], "learning": [], "making": [], "applying": []}
    written, patched = [], []
    for _ in range(updates + 1):  # the first is not counted
        began = [time.perf_counter()]
        sampled = learner.sample(questions)
        began.append(time.perf_counter())
        learner.learn([replace(each, rewards=rng.random(len(each.rewards))) for each in sampled], [])
        learner.heldout(HELDOUT)
        began.append(time.perf_counter())
        newest = words_of(policy)
        patch = between(here, newest)
        began.append(time.perf_counter())
        there = applied(here, patch)
        assert hash_of(there) == hash_of(newest)
        began.append(time.perf_counter())
        for kind, first, last in zip(taken, began, began[1:], strict=False):
            taken[kind].append(last - first)
        here = newest
        written.append(sum(len(answer) for each in sampled for answer in each.group.answers))
        patched.append(len(patch) / newest.nbytes)
    seconds = {kind: statistics.median(values[1:]) for kind, values in taken.items()}
    whole = sum(seconds.values())
    shares = {"sampling": seconds["sampling"], "learning": seconds["learning"]}
    shares["sync"] = seconds["making"] + seconds["applying"]
    return {
        "what": "update",
        "trained": int(here.size),
        "learning_rate": rate,
        "answers": questions * settings.answers,
        "tokens": round(statistics.median(written[1:])),
        **{f"{kind}_s": round(value, 3) for kind, value in seconds.items()},
        "patch_of_full_bf16": round(max(patched[1:]), 4),
        "shares": {kind: round(value / whole, 3) for kind, value in shares.items()},
    }


def words_of(policy: HFPolicy) -> np.ndarray:
    """The trained parameters as samplers get them."""
    with torch.no_grad():
        return rounded(torch.nn.utils.parameters_to_vector(policy.parameters()).cpu().numpy())


def honest(
    policy: HFPolicy, judge: HFPolicy, name: str, engine: Sampler, *, groups: int, rounds: int
) -> dict[str, Any]:
    """What an audit of all of an honest sampler's groups, and the gate, make of them, with new weights each round."""
    settings = Settings(split=Split(2, 2), sampling=TEXT_SAMPLING)
    learner = Learner(name, policy, settings, seed=2, sampler=engine)
    audit = RolloutAudit(judge, share=1.0, seed=1, how=TEXT_SAMPLING)
    apart: list[float] = []  # nats, the mean of each answer
    worst, refused, strange, answers = 0.0, 0, 0, 0
    for round in range(rounds):
        for each in {policy, judge}:
            changed(each, seed=200 + round)
        called = parameter_hash(policy)
        assert called == parameter_hash(judge)
        audit.remember(called)
        tasks = [TaskRef("digits/swap", 5, round * groups + seed) for seed in range(groups)]
        written: list[Scored] = [score(name, group) for group in learner.answer(tasks, policy=called)]
        refused += groups - len(audit.check(written).passed)
        for scored, reading, raw in zip(
            written, read(judge, written, TEXT_SAMPLING), read(judge, written), strict=True
        ):
            for claimed, seen, plain in zip(scored.group.logprobs or (), reading, raw, strict=True):
                assert seen is not None and plain is not None
                difference = np.abs(np.array(claimed) - seen.logprobs)
                apart.append(float(difference.mean()))
                worst = max(worst, float(difference.max()))
                known = (plain.ranks < TEXT_GATE.top_k) & (plain.logprobs >= np.log(TEXT_GATE.floor))
                strange += float(np.mean(~known)) > TEXT_GATE.tokens
                answers += 1
    return {
        "what": "honest",
        "engine": name,
        "device": str(next(policy.parameters()).device),
        "groups": groups * rounds,
        "refused_by_audit": refused,
        "answers": answers,
        "refused_by_gate": strange,
        "logprob_apart_max": float(f"{worst:.2g}"),
        "logprob_apart_of_an_answer_max": float(f"{max(apart):.2g}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64 (default 512)")
    parser.add_argument("--words", type=int, default=8192, help="of the vocabulary (default 8192)")
    parser.add_argument("--questions", type=int, default=8, help="in a call (default 8)")
    parser.add_argument("--copies", type=int, default=8, help="answers to each question (default 8)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default 64)")
    parser.add_argument("--prompt", type=int, default=5, help="tokens of a question (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="counted for the median (default 3)")
    parser.add_argument("--rounds", type=int, default=8, help="of 16 honest groups; 0: none (default 8)")
    parser.add_argument("--engines", default="torch,vllm", help="(default torch,vllm)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--device", default="cpu", help="of the policy; vLLM's is the CPU (default cpu)")
    parser.add_argument("--trained", default="lora", choices=("lora", "all"), help="(default lora)")
    parser.add_argument("--updates", type=int, default=0, help="of which to tell the shares (default 0)")
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate of these (default 1e-5)")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        make(
            Path(folder),
            layers=chosen.layers,
            width=chosen.width,
            words=chosen.words,
            context=max(64, chosen.prompt + chosen.tokens + 16),
        )
        lora = chosen.trained != "all"
        policy = load(folder, seed=1, lora=lora).to(chosen.device)
        judge = policy if chosen.device == "cpu" else load(folder, seed=1, lora=lora)
        for each in {policy, judge}:
            changed(each, seed=1)
        engines: dict[str, Sampler] = {"torch": sample} if "torch" in chosen.engines.split(",") else {}
        parameters = sum(tensor.numel() for _, tensor in policy.weights())
        told: dict[str, Any] = {"what": "start", "parameters": parameters, "resident_before": resident()}
        if chosen.device == "cuda":
            told["gpu"] = torch.cuda.get_device_name()
        if "vllm" in chosen.engines.split(","):
            began = time.perf_counter()
            engines["vllm"] = sampler = VLLMSampler(policy)
            told |= {"seconds": round(time.perf_counter() - began, 1), "resident": resident()}
        print(json.dumps(told), flush=True)
        asked = torch.randint(25, (chosen.questions, chosen.prompt), generator=torch.Generator().manual_seed(1))
        for row in speed(policy, engines, asked.tolist(), copies=chosen.copies, tokens=chosen.tokens, runs=chosen.runs):
            print(json.dumps(row), flush=True)
        if "vllm" in engines:
            print(json.dumps(weights(policy, sampler, chosen.runs)), flush=True)
        for name, engine in engines.items():
            if chosen.rounds:
                told = honest(policy, judge, name, engine, groups=16, rounds=chosen.rounds)
                print(json.dumps(told), flush=True)
            if chosen.updates:
                each = {"questions": chosen.questions, "tokens": chosen.tokens}
                told = update(policy, engine, **each, updates=chosen.updates, rate=chosen.rate)
                print(json.dumps({"engine": name, "device": chosen.device, **told}), flush=True)


if __name__ == "__main__":
    main()
