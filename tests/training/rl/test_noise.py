"""The same seed draws the same tokens, whatever stands beside them, and whoever reads them knows which they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.training.rl.noise import gumbel, noise_seed, numbers, streams_of
from swarmnode.training.rl.policies import PolicySpec, TinyGPT, TinyGRU, build
from swarmnode.training.rl.sampling import Completion, Sampling, draw, read_tokens, sample
from swarmnode.training.rl.tasks import TaskRef
from swarmnode.training.rl.vocabulary import DIGITS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
POLICIES = [build(PolicySpec("gpt", layers=2, width=48), seed=1), build(PolicySpec("gru", layers=1, width=48), seed=1)]
PROMPTS = [DIGITS.encode(text) for text in ("a304=", "b1=", "c222=", "d43=", "e000=")]
SEEDS = [11, 12, 13, 14, 15]
HOW = Sampling(max_tokens=8, copies=4)


def split_mix(state: int, count: int) -> list[int]:
    """The reference, in Python's integers."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        found.append(mixed ^ mixed >> 31)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_the_numbers_are_those_of_splitmix64(device: str) -> None:
    assert split_mix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    for state in (0, 1234567, 2**63 - 1):
        found = numbers(torch.tensor([state], device=device), torch.arange(50, device=device)).cpu()
        assert [value % 2**64 for value in found.tolist()] == split_mix(state, 50)


@pytest.mark.parametrize("device", DEVICES)
def test_noise_has_the_same_bits_on_every_device_and_is_gumbels(device: str) -> None:
    streams = streams_of([7] * 400, list(range(400)), [0] * 400)
    noise = gumbel(streams.to(device), 500).cpu().numpy()
    u = np.array([value >> 12 for value in split_mix(int(streams[3]), 500)], np.float64)
    np.testing.assert_array_equal(noise[3], (-np.log(-np.log((u + 0.5) / 2**52))).astype(np.float32))
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.02)


def test_seeds_answers_and_positions_have_noise_of_their_own() -> None:
    def place(*changed: int) -> list[float]:
        seed, answer, position = changed
        return gumbel(streams_of([seed], [answer], [position]), 8)[0].tolist()

    places = [place(seed, answer, position) for seed in (1, 2) for answer in range(3) for position in range(3)]
    assert len({tuple(each) for each in places}) == 18
    ref = TaskRef("digits/swap", 5, 7)
    others = [TaskRef("digits/swap", 5, 8), TaskRef("digits/sort", 5, 7), TaskRef("digits/swap", 6, 7)]
    assert len({noise_seed("a", ref), noise_seed("b", ref), *(noise_seed("a", other) for other in others)}) == 5
    assert 0 <= noise_seed("a", ref) < 2**63


@pytest.mark.parametrize("policy", POLICIES, ids=["gpt", "gru"])
def test_what_stands_beside_an_answer_changes_nothing(policy: TinyGPT | TinyGRU) -> None:
    together = sample(policy, PROMPTS, HOW, SEEDS)
    alone = [
        answer for prompt, seed in zip(PROMPTS, SEEDS, strict=True) for answer in sample(policy, [prompt], HOW, [seed])
    ]
    backwards = sample(policy, PROMPTS[::-1], HOW, SEEDS[::-1])
    fewer = sample(policy, PROMPTS, replace(HOW, copies=2), SEEDS)
    assert tokens(together) == tokens(alone)
    assert tokens(together[:4]) == tokens(backwards[-4:])
    assert tokens(together[:2]) == tokens(fewer[:2])
    assert tokens(together) != tokens(sample(policy, PROMPTS, HOW, [1, 2, 3, 4, 5]))


def tokens(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("how", [HOW, replace(HOW, temperature=0.6), replace(HOW, top_k=5)], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=["gpt", "gru"])
def test_a_reader_finds_each_token_to_be_the_drawn_one(policy: TinyGPT | TinyGRU, how: Sampling) -> None:
    answers = sample(policy, PROMPTS, how, SEEDS)
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    drawn = [(seed, answer) for seed in SEEDS for answer in range(4)]
    for reading in read_tokens(policy, prompts, tokens(answers), how, drawn, edge=0.0):
        assert reading.margins is not None and reading.margins.max() < 1e-4
    others = [(seed + 100, answer) for seed, answer in drawn]
    readings = read_tokens(policy, prompts, tokens(answers), how, others, edge=0.0)
    apart = np.concatenate([each.margins for each in readings])
    assert np.mean(apart > 0.01) > 0.5


def test_a_margin_is_what_a_token_falls_short_of_the_best_and_infinite_out_of_the_top_k() -> None:
    policy, prompt = POLICIES[0], PROMPTS[0]
    with torch.no_grad():
        logprobs = policy(torch.tensor([prompt]))[0, -1].log_softmax(-1)
        scores = (logprobs + gumbel(streams_of([5], [2], [0]), DIGITS.size)[0]).numpy()
        best, _ = draw(policy(torch.tensor([prompt]))[:, -1], Sampling(), streams_of([5], [2], [0]))
    assert int(best) == int(scores.argmax())
    for token in range(DIGITS.size):
        (reading,) = read_tokens(policy, [prompt], [[token]], noise=[(5, 2)], edge=0.0)
        assert reading.margins is not None
        np.testing.assert_allclose(reading.margins, [scores.max() - scores[token]], atol=1e-5)
    (reading,) = read_tokens(policy, [prompt], [[int(logprobs.argmin())]], Sampling(top_k=3), [(5, 2)], edge=0.1)
    assert reading.margins is not None and np.isinf(reading.margins[0])


def test_readings_without_seeds_have_no_margins() -> None:
    (reading,) = read_tokens(POLICIES[0], [PROMPTS[0]], [[1, 2]])
    assert reading.margins is None


class Says:
    """A policy that always has these logits."""

    vocabulary, context = DIGITS, 16

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*tokens.shape, -1)


def test_who_finds_another_token_to_be_the_last_of_the_top_k_is_borne() -> None:
    """The third and the fourth token are all but equally likely, and the sampler saw them the other way round."""
    sampler, reader = Says([1.0, 0.5, 0.2, 0.21, -3.0]), Says([1.0, 0.5, 0.21, 0.2, -3.0])
    how, drawn = Sampling(top_k=3), []
    for seed in range(300):
        token, _ = draw(sampler.logits[None], how, streams_of([seed], [0], [0]))
        drawn.append(int(token))
    asked, answers, noise = [[0]] * 300, [[token] for token in drawn], [(seed, 0) for seed in range(300)]

    def worst(edge: float) -> float:
        readings = read_tokens(reader, asked, answers, how, noise, edge=edge)  # type: ignore[arg-type]
        return float(np.concatenate([reading.margins for reading in readings]).max())

    assert 3 in drawn and np.isinf(worst(0.0)) and worst(0.05) < 0.05
    cannot = read_tokens(reader, [[0]], [[4]], how, [(1, 0)], edge=0.05)  # type: ignore[arg-type]
    assert np.isinf(cannot[0].margins)
