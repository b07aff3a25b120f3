"""The GPT: causal, reproducible from the seed, and able to learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarmnode.training.gpt import GPT, Rotary
from swarmnode.training.sections import ModelSection

TINY = ModelSection(layers=2, heads=2, width=32, context=16)
OTHERS = (
    replace(TINY, activation="swiglu"),
    replace(TINY, tied=True),
    replace(TINY, value_embeddings=True),
    replace(TINY, activation="swiglu", tied=True, value_embeddings=True, heads=1),
)


def _tiny(seed: int = 0, model: ModelSection = TINY, vocabulary: int = 256) -> GPT:
    torch.manual_seed(seed)
    return GPT(model, vocabulary)


def _moved(model: ModelSection = TINY) -> GPT:
    """One in which every parameter says something, as some do only after the first steps."""
    moved = _tiny(model=model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return moved


@pytest.mark.parametrize("model", [TINY, *OTHERS])
def test_later_bytes_do_not_change_earlier_logits(model: ModelSection) -> None:
    gpt = _moved(model)
    text = torch.randint(256, (2, 16))
    changed = text.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = gpt(text), gpt(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_order_of_bytes_matters() -> None:
    model = _moved()
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
    assert not torch.equal(one["tokens.weight"], _tiny(seed=8).state_dict()["tokens.weight"])


@pytest.mark.parametrize("model", [TINY, *OTHERS])
@pytest.mark.parametrize(("vocabulary", "nats"), [(256, 5.545), (1000, 6.908)])
def test_untrained_model_knows_nothing(model: ModelSection, vocabulary: int, nats: float) -> None:
    text = torch.randint(vocabulary, (8, 17), generator=torch.Generator().manual_seed(1))
    assert _tiny(model=model, vocabulary=vocabulary).loss(text).item() == pytest.approx(nats, abs=0.1)  # ln V


def test_products_of_turned_vectors_depend_on_their_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 8).unbind()
    rotary = Rotary(8, context=16)
    turned_q, turned_k = (rotary(each.expand(1, 16, 1, 8))[0, :, 0] for each in (q, k))  # (16, 8) each
    products = turned_q @ turned_k.T  # (16, 16)
    for distance in (0, 3, -5):
        along = products.diagonal(distance)
        assert torch.allclose(along, along[:1], atol=1e-5)
    assert products[0, 0] == pytest.approx(float(q @ k), abs=1e-5)
    assert not torch.allclose(products[0, 0], products[0, 3], atol=1e-3)


def test_parameters_are_counted_by_what_the_model_has() -> None:
    def parameters(**changes: bool | str) -> int:
        return sum(parameter.numel() for parameter in _tiny(model=replace(TINY, **changes)).parameters())

    plain = 2 * 256 * 32 + 2 * 12 * 32 * 32
    assert parameters() == plain
    assert parameters(tied=True) == plain - 256 * 32
    assert parameters(value_embeddings=True) == plain + 256 * 32 + 2  # in the last of two blocks
    assert parameters(activation="swiglu") == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("model", [TINY, OTHERS[-1]])
def test_checkpointing_changes_no_loss_and_no_gradient(model: ModelSection) -> None:
    text = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(1))
    plain, checkpointed = _moved(model), _moved(model)
    checkpointed.load_state_dict(plain.state_dict())
    checkpointed.checkpointing = True
    for each in (plain, checkpointed):
        each.loss(text).backward()
    assert torch.equal(plain.loss(text), checkpointed.loss(text))
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("model", [TINY, *OTHERS])
def test_learns_a_repeated_text_by_heart(model: ModelSection) -> None:
    gpt = _tiny(model=model)
    text = torch.tensor(list(b"the quick brown fox " * 2))
    windows = text.unfold(0, 17, 1)  # (n, 17)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        gpt.loss(windows).backward()
        optimizer.step()
    written = gpt.continue_text(
        torch.tensor(list(b"the quick brown ")), length=4, temperature=0, generator=torch.Generator()
    )
    assert bytes(written.tolist()) == b"fox "


def test_sampling_past_the_context_goes_on() -> None:
    generator = torch.Generator().manual_seed(3)
    written = _tiny().continue_text(torch.tensor([65]), length=40, temperature=1.0, generator=generator)
    again = _tiny().continue_text(torch.tensor([65]), length=40, temperature=1.0, generator=generator.manual_seed(3))
    assert written.shape == (40,)
    assert torch.equal(written, again)
