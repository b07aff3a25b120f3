"""The GPT: causal, reproducible from the seed, and able to learn."""

from __future__ import annotations

import pytest
import torch

from swarmnode.training.gpt import GPT
from swarmnode.training.runspec import ModelSection

TINY = ModelSection(layers=2, heads=2, width=32, context=16)


def _tiny(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(TINY)


def test_later_bytes_do_not_change_earlier_logits() -> None:
    model = _tiny()
    text = torch.randint(256, (2, 16))
    changed = text.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_order_of_bytes_matters() -> None:
    model = _tiny()
    swapped = model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(model(torch.tensor([[1, 2, 3]]))[0, -1], swapped, atol=1e-6)


def test_same_seed_gives_the_same_parameters_on_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _tiny(seed=7).state_dict()
        torch.set_num_threads(2)
        two = _tiny(seed=7).state_dict()
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["head.weight"], _tiny(seed=8).state_dict()["head.weight"])


def test_untrained_model_knows_nothing() -> None:
    loss = _tiny().loss(torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(1)))
    assert loss.item() == pytest.approx(5.545, abs=0.1)  # ln 256


def test_learns_a_repeated_text_by_heart() -> None:
    model = _tiny()
    text = torch.tensor(list(b"the quick brown fox " * 2))
    windows = text.unfold(0, 17, 1)  # (n, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(windows).backward()
        optimizer.step()
    written = model.continue_text(
        torch.tensor(list(b"the quick brown ")), length=4, temperature=0, generator=torch.Generator()
    )
    assert bytes(written.tolist()) == b"fox "


def test_sampling_past_the_context_goes_on() -> None:
    generator = torch.Generator().manual_seed(3)
    written = _tiny().continue_text(torch.tensor([65]), length=40, temperature=1.0, generator=generator)
    again = _tiny().continue_text(torch.tensor([65]), length=40, temperature=1.0, generator=generator.manual_seed(3))
    assert written.shape == (40,)
    assert torch.equal(written, again)
