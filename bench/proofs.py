"""Whether honest samplers pass audits, and how soon others are found; JSON lines.

    python bench/proofs.py [--groups 2400] [--trials 100] [--seeds 1 2 3] [--kinds gpt gru hf]

Policies are made and taught on the spot: the form of digit tasks' answers, then `--updates` updates by GRPO from their
own answers, with the learner of runs. They are read as samplers get them, rounded to bf16, by `RolloutAudit`. `hf` is a
Llama of two layers and 512 words (`--width`), sampled among the likeliest 50 as runs do.

`honest`: groups of samplers in batches of 1, 8 and 64 questions, in float32 and with the whole policy in bfloat16, by
the product's decoding with a cache, by a prefill for each token, for hf by `transformers`' own `generate`, and where
there is a GPU by the product's on it. Told are how many an audit that looks at every group refused, and the greatest of
what it bounds: `logprobs`, nats a token; `margins`, nats of a group's tokens together; `median`, the statistic of
GRAIL's test, median of exp|Δ log p| − 1 over 32 places drawn anew for each group.

`dishonest`: of `--trials` batches of 8 groups, each of a liar of its own, the share in which he is found: by an audit
with the limits of float32 that looks at all 8 (`found`), or at a quarter, as is the default (`found_by_quarter`), and
by one with the limits of bf16 that looks at all (`found_bf16`). `vouched`: with the log-probabilities that the right
weights give, which is more work than to sample honestly. `median_finds`: the share of groups that GRAIL's test refuses
at its own 0.10. Staleness is by the learning rate of the updates. `same`: the share of batches without a token that an
honest sampler would not have given. No test of tokens finds those: vouched lies are found in 1 − `same` at the most.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sampling import make
from torch import nn

from swarmnode.training.rl.defence import Reading
from swarmnode.training.rl.groups import RolloutGroup, Scored, score
from swarmnode.training.rl.hf import HFPolicy, load
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.noise import streams_of
from swarmnode.training.rl.policies import Policy, PolicySpec, build
from swarmnode.training.rl.proofs import BF16, FP32, RolloutAudit, Tolerance
from swarmnode.training.rl.sampling import Completion, Sampler, Sampling, draw, read, sample
from swarmnode.training.rl.tasks import NAMES, TaskRef, well_formed
from swarmnode.training.rl.trainee import TEXT_SAMPLING

GROUPS = 8  # of a batch
PLACES = 32  # of GRAIL's test
RATES = (1e-3, 1e-4, 1e-5, 1e-6)
STALE = 8  # updates


@dataclass(frozen=True)
class Taught:
    """A policy after each of some updates that taught it something, as it is sent, and how it samples."""

    versions: list[nn.Module]
    how: Sampling

    @property
    def newest(self) -> nn.Module:
        return self.versions[-1]


def taught(kind: str, seed: int, *, rate: float, updates: int, folder: Path) -> Taught:
    how = TEXT_SAMPLING if kind == "hf" else Sampling()
    policy = load(str(folder), seed=seed, lora=False) if kind == "hf" else build(PolicySpec(kind), seed=seed)
    learner = Learner("trainer", policy, Settings(learning_rate=rate, sampling=how), seed=seed)
    learner.warm_up(well_formed)
    versions = deque([as_sent(policy)], maxlen=STALE + 1)
    while updates:
        if learner.learn(learner.sample(), []).informative:
            versions.append(as_sent(policy))
            updates -= 1
    return Taught(list(versions), how)


@torch.no_grad()
def as_sent(policy: nn.Module) -> nn.Module:
    sent = copy.deepcopy(policy)
    for parameter in sent.parameters():
        parameter.copy_(parameter.bfloat16())
    return sent


# -- engines


@torch.no_grad()
def by_prefill(
    policy: Policy, prompts: Sequence[Sequence[int]], how: Sampling, seeds: Sequence[int]
) -> list[Completion]:
    """Without a cache: the whole text is read anew for each token, one prompt at a time."""
    written = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        texts: list[list[int]] = [[] for _ in range(how.copies)]
        chances: list[list[float]] = [[] for _ in range(how.copies)]
        alive = list(range(how.copies))
        while alive:
            logits = policy(torch.tensor([[*prompt, *texts[row]] for row in alive]))[:, -1]
            place = len(texts[alive[0]])
            drawn = draw(logits, how, streams_of([seed] * len(alive), alive, [place] * len(alive)))
            for row, token, chance in zip(alive, *(each.tolist() for each in drawn), strict=True):
                texts[row].append(token)
                chances[row].append(chance)
            alive = [row for row in alive if texts[row][-1] != policy.vocabulary.end and place + 1 < how.max_tokens]
        written += [Completion(tuple(ids), tuple(values)) for ids, values in zip(texts, chances, strict=True)]
    return written


@torch.no_grad()
def by_generate(
    policy: HFPolicy, prompts: Sequence[Sequence[int]], how: Sampling, seeds: Sequence[int]
) -> list[Completion]:
    """`transformers` writes; a logits processor of it leaves only the drawn token."""
    written = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        chances: list[list[float]] = []
        rows = list(range(how.copies))

        def drawn(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            place = ids.shape[1] - len(prompt)  # noqa: B023
            tokens, logprobs = draw(logits, how, streams_of([seed] * len(rows), rows, [place] * len(rows)))  # noqa: B023
            chances.append(logprobs.tolist())  # noqa: B023
            return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)

        ids = policy.model.generate(
            torch.tensor([prompt] * how.copies),
            attention_mask=torch.ones(how.copies, len(prompt), dtype=torch.long),
            logits_processor=[drawn],
            max_new_tokens=how.max_tokens,
            do_sample=False,
            eos_token_id=policy.vocabulary.end,
            pad_token_id=policy.vocabulary.end,
        )[:, len(prompt) :].tolist()
        for row, answer in enumerate(ids):
            ended = answer.index(policy.vocabulary.end) + 1 if policy.vocabulary.end in answer else len(answer)
            written.append(Completion(tuple(answer[:ended]), tuple(each[row] for each in chances[:ended])))
    return written


def on_cuda(
    policy: nn.Module, prompts: Sequence[Sequence[int]], how: Sampling, seeds: Sequence[int]
) -> list[Completion]:
    """By the product's decoding, with a copy of the policy on the GPU."""
    return sample(copy.deepcopy(policy).cuda(), prompts, how, seeds)


# -- writing and reading


def asked(first: int, count: int) -> list[TaskRef]:
    return [TaskRef(NAMES[n % len(NAMES)], 5, n) for n in range(first, first + count)]


def written(
    by: nn.Module, tasks: list[TaskRef], how: Sampling, *, author: str, name: str, sampler: Sampler = sample
) -> list[Scored]:
    """What comes of `name`, who lets the noise of `author` draw."""
    groups = Learner(author, by, Settings(sampling=how), seed=1, sampler=sampler).answer(tasks, policy="these")
    return [score(name, RolloutGroup.from_map(group.to_map())) for group in groups]


def an_audit(taught: Taught, limits: Tolerance, *, share: float = 1.0, seed: int = 0) -> RolloutAudit:
    audit = RolloutAudit(copy.deepcopy(taught.newest), share=share, seed=seed, how=taught.how, limits=limits)
    audit.remember("these")
    return audit


def bounded(scored: Scored, reading: Reading, rng: np.random.Generator) -> dict[str, float]:
    """The statistics of one group."""
    known = [each for each in reading if each is not None]
    apart = [
        np.abs(np.array(claimed) - each.logprobs)
        for claimed, each in zip(scored.group.logprobs or (), known, strict=True)
    ]
    margins = np.concatenate([each.margins for each in known if each.margins is not None])
    at = rng.permutation(np.concatenate(apart))[:PLACES]
    return {
        "logprobs": float(np.concatenate(apart).mean()),
        "margins": float(np.minimum(margins, 1.0).sum()),
        "median": float(np.median(np.expm1(at))),
    }


# -- honest


def honest(kind: str, seed: int, found: Taught, groups: int, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    engines: dict[str, Sampler] = {"cache": sample, "prefill": by_prefill}
    if kind == "hf":
        engines["generate"] = by_generate
    if torch.cuda.is_available():
        engines["cuda"] = on_cuda
    engines = {name: engine for name, engine in engines.items() if not only or name in only}
    half = copy.deepcopy(found.newest).bfloat16()
    arms = [
        (dtype, engine, batch)
        for dtype in ("float32", "bfloat16")
        for engine in engines
        for batch in ((1, 8, 64) if engine in ("cache", "cuda") else (8,))
    ]
    for number, (dtype, engine, batch) in enumerate(arms):
        limits = FP32 if dtype == "float32" else BF16
        audit, rng = an_audit(found, limits), np.random.default_rng(seed)
        seen: list[dict[str, float]] = []
        refused = 0
        while len(seen) < groups // len(arms):
            first = 10**9 * seed + 10**7 * number + len(seen)
            name = f"s{len(seen) // 512}"
            by = found.newest if dtype == "float32" else half
            came = written(by, asked(first, batch), found.how, author=name, sampler=engines[engine], name=name)
            refused += len(came) - len(audit.check(came).passed)
            readings = read(found.newest, came, found.how, edge=BF16.edge)
            seen += [bounded(scored, reading, rng) for scored, reading in zip(came, readings, strict=True)]
        yield {
            "what": "honest",
            "policy": kind,
            "seed": seed,
            "dtype": dtype,
            "engine": engine,
            "batch": batch,
            "groups": len(seen),
            "refused": refused,
            **{name: float(f"{max(each[name] for each in seen):.2g}") for name in seen[0]},
        }


# -- dishonest


def quantised(policy: nn.Module, bits: int) -> nn.Module:
    """Weights rounded to so many bits, one scale for each matrix."""
    rounded = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in rounded.parameters():
            step = parameter.abs().max() / (2 ** (bits - 1) - 1)
            parameter.copy_((parameter / step).round() * step)
    return rounded


def vouched(found: Taught, groups: list[Scored]) -> list[Scored]:
    """With the log-probabilities that the right weights give; −64 for what cannot be drawn."""
    return [
        score(
            scored.author,
            replace(
                scored.group,
                logprobs=tuple(
                    tuple(np.clip(each.logprobs, -64.0, 0.0).tolist()) for each in reading if each is not None
                ),
            ),
        )
        for scored, reading in zip(groups, read(found.newest, groups, found.how), strict=True)
    ]


def edited(scored: Scored, rng: np.random.Generator) -> Scored:
    """One token of one answer is another digit."""
    answers = [list(answer) for answer in scored.group.answers]
    answer = answers[int(rng.integers(len(answers)))]
    place = int(rng.integers(len(answer)))
    digits = [token for token in range(10) if token != answer[place]]
    answer[place] = int(rng.choice(digits))
    if place == len(answer) - 1:  # no end any more: one has to follow
        answer.append(scored.vocabulary.end)
    return score(scored.author, replace(scored.group, answers=tuple(map(tuple, answers)), logprobs=None))


Lie = Callable[[str, list[TaskRef]], list[Scored]]  # what a liar of that name gives


def lies(found: Taught, other: Taught, stale: dict[float, Taught]) -> dict[str, tuple[Taught, Lie]]:
    """By name, each with the policy that it is to have been sampled with."""

    def by(weights: nn.Module, of: Taught, how: Sampling | None = None, *, vouches: bool = False) -> Lie:
        def lie(name: str, tasks: list[TaskRef]) -> list[Scored]:
            groups = written(weights, tasks, how or of.how, author=name, name=name)
            return vouched(of, groups) if vouches else groups

        return lie

    def best(name: str, tasks: list[TaskRef]) -> list[Scored]:
        tries = [written(found.newest, tasks, found.how, author=f"draw {n}", name=name) for n in range(4)]
        return [max(each, key=lambda scored: float(scored.rewards.sum())) for each in zip(*tries, strict=True)]

    def edits(name: str, tasks: list[TaskRef]) -> list[Scored]:
        rng = np.random.default_rng(tasks[0].seed)
        honestly = written(found.newest, tasks, found.how, author=name, name=name)
        return vouched(found, [edited(scored, rng) for scored in honestly])

    def copies(name: str, tasks: list[TaskRef]) -> list[Scored]:
        return written(found.newest, tasks, found.how, author="somebody honest", name=name)

    of = found.how
    told: dict[str, tuple[Taught, Lie]] = {}
    for rate, course in stale.items():
        for vouches in (False, True):
            name = f"{STALE} updates old, rate {rate:g}" + (", vouched" if vouches else "")
            told[name] = course, by(course.versions[-1 - STALE], course, vouches=vouches)
    for bits in (8, 4):
        told[f"{bits} bits"] = found, by(quantised(found.newest, bits), found)
    told["4 bits, vouched"] = found, by(quantised(found.newest, 4), found, vouches=True)
    told["another model"] = found, by(other.newest, found)
    told["another model, vouched"] = found, by(other.newest, found, vouches=True)
    told["one token of each group edited, vouched"] = found, edits
    told["the best of 4 draws"] = found, best
    told["copied from somebody honest"] = found, copies
    for temperature in (0.7, 0.9):
        cooler = replace(of, temperature=temperature)
        told[f"temperature {temperature}, vouched"] = found, by(found.newest, found, cooler, vouches=True)
    return told


def dishonest(kind: str, seed: int, told: dict[str, tuple[Taught, Lie]], trials: int) -> Iterator[dict[str, Any]]:
    for name, (found, lie) in told.items():
        audits = {
            "found": an_audit(found, FP32),
            "found_by_quarter": an_audit(found, FP32, share=0.25, seed=seed),
            "found_bf16": an_audit(found, BF16),
        }
        caught, same = dict.fromkeys(audits, 0), 0
        refused_by_median, rng = [], np.random.default_rng(seed)
        for trial in range(trials):
            author, tasks = f"s{trial}", asked(10**9 * seed + GROUPS * trial, GROUPS)
            groups = lie(author, tasks)
            drawn = written(found.newest, tasks, found.how, author=author, name=author)
            same += [each.group.answers for each in groups] == [each.group.answers for each in drawn]
            for which, audit in audits.items():
                caught[which] += bool(audit.check(groups).caught)
            if trial < 25:
                readings = read(found.newest, groups, found.how, edge=BF16.edge)
                refused_by_median += [
                    bounded(scored, reading, rng)["median"] > 0.10
                    for scored, reading in zip(groups, readings, strict=True)
                ]
        shares = {which: round(count / trials, 4) for which, count in caught.items()}
        shares["same"] = round(same / trials, 4)
        line = {"what": "dishonest", "policy": kind, "seed": seed, "lie": name, "trials": trials, **shares}
        yield line | {"median_finds": round(float(np.mean(refused_by_median)), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2400, help="of honest samplers, for each policy and seed")
    parser.add_argument("--trials", type=int, default=100, help="batches of 8 groups of each liar")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kinds", nargs="+", default=["gpt", "gru", "hf"])
    parser.add_argument("--engines", nargs="+", default=[], help="of honest samplers; all there are")
    parser.add_argument("--updates", type=int, default=40, help="of the policy before")
    parser.add_argument("--width", type=int, default=64, help="of the hf policy")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, layers=2, width=chosen.width, words=512, context=64)
        for seed in chosen.seeds:
            for kind in chosen.kinds:
                began = time.process_time()
                courses = {
                    rate: taught(
                        kind, seed, rate=rate, updates=chosen.updates if rate == RATES[0] else STALE, folder=folder
                    )
                    for rate in RATES
                }
                found = courses[RATES[0]]
                other = taught(kind, seed + 100, rate=RATES[0], updates=STALE, folder=folder)
                if chosen.groups:
                    for line in honest(kind, seed, found, chosen.groups, chosen.engines):
                        print(json.dumps(line), flush=True)
                if chosen.trials:
                    for line in dishonest(kind, seed, lies(found, other, courses), chosen.trials):
                        print(json.dumps(line), flush=True)
                spent = {"what": "cost", "policy": kind, "seed": seed}
                print(json.dumps({**spent, "cpu_seconds": round(time.process_time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
