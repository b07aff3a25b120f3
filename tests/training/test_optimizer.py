"""Muon is torch's, on the matrices that it is for; its steps can be repeated closely enough to tell a lie."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim._muon import muon

from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.optimizer import COEFFICIENTS, MOMENTUM, Adam, hidden_matrices, orthogonal
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.verify.replay import LEAST, MARGIN, distance
from swarmnode.training.verify.trace import State

WIDTH = 48


class Wide(nn.Module):
    """Embedding, hidden layers and a head, as in any language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes = nn.Embedding(64, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.again = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.lora_A = nn.Linear(WIDTH, 4, bias=False)
        self.tied = nn.Linear(WIDTH, 64, bias=False)
        self.tied.weight = self.bytes.weight
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens)
        hidden = F.relu(self.up(self.norm(x)))
        x = x + self.down(hidden) + self.again(hidden)
        x = x + F.linear(self.lora_A(x), self.lora_A.weight.T)
        logits: Tensor = self.head(x)
        return logits


class Sums:
    """The task of telling what follows (13 x + 5) mod 64."""

    tokens_per_sample = 16

    def __init__(self) -> None:
        self.model = Wide()

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        return torch.randint(64, (samples, 16), generator=generator)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1), (13 * batch.flatten() + 5) % 64)


def spec_of(*, audited: bool = False, **inner: object) -> RunSpec:
    run = {"name": "t", "trust": "open" if audited else "known"}
    return parse_runspec({"run": run, "inner": {"warmup": 0, "optimizer": "muon", **inner}}, source="test")


def loop_of(spec: RunSpec) -> InnerLoop:
    task = Sums()
    vector = torch.zeros(layout_of(task.model).parameters)
    return InnerLoop(spec, task, peer_id="p", vector=vector, keep=False)  # type: ignore[arg-type]


def end_of(loop: InnerLoop, start: State, *, steps: int = 3) -> State:
    with loop.replayed(start, peer_id="p", round=0, step=0, steps=steps) as end:
        return State(end.parameters.copy(), end.moments.copy(), end.updates)


def test_muon_updates_what_is_hidden_and_adamw_everything_else() -> None:
    model = Wide()
    assert hidden_matrices(model) == {model.up.weight, model.down.weight, model.again.weight}


def test_a_matrix_of_muon_has_one_moment() -> None:
    model = Wide()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(parameter.numel() for parameter in hidden_matrices(model))
    loop = loop_of(spec_of())
    loop.train(round=0, steps=1, seconds=60, between=lambda: False)
    assert loop.state().moments.size == 2 * parameters - matrices
    assert matrices > parameters // 2


def test_a_step_is_that_of_torchs_muon() -> None:
    spec = spec_of(clip=0)
    loop, model = loop_of(spec), Wide()
    start = loop.state()
    whole = end_of(loop, start, steps=1)
    loop.train(round=0, steps=1, seconds=60, between=lambda: False)  # leaves the gradients of that step
    layout = {slot.name: slot for slot in layout_of(model).slots}
    for name in ("up.weight", "down.weight", "again.weight"):
        slot = layout[name]
        part = slice(slot.offset, slot.offset + slot.size)
        before, after = (torch.from_numpy(state.parameters[part]).view(slot.shape) for state in (start, whole))
        momentum = torch.from_numpy(whole.moments[part]).view(slot.shape)
        gradient, expected, kept = momentum / (1 - MOMENTUM), before.clone(), torch.zeros(slot.shape)
        muon(
            [expected],
            [gradient],
            [kept],
            lr=spec.inner.muon_lr,
            weight_decay=spec.inner.weight_decay,
            momentum=MOMENTUM,
            nesterov=True,
            ns_coefficients=COEFFICIENTS,
            eps=1e-7,
            ns_steps=5,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )
        torch.testing.assert_close(kept, momentum)
        step = expected - before
        assert float((after - expected).norm() / step.norm()) < 0.05, "both round to bfloat16"


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 32, 96), (2, 96, 32)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_muon_learns() -> None:
    loop = loop_of(spec_of(lr=3e-3))
    losses = [loop.train(round=round, steps=8, seconds=60, between=lambda: False).loss for round in range(5)]
    assert losses[-1] < losses[0] / 3


def test_honest_steps_of_muon_are_never_convicted_and_a_lie_is_seen() -> None:
    spec = spec_of(audited=True)
    loop = loop_of(spec)
    threads = torch.get_num_threads()
    try:
        for _ in range(3):
            start, ends = loop.state(), []
            for count in (1, 2):
                torch.set_num_threads(count)
                ends.append(end_of(loop, start))
            honest = distance(start, *ends)
            assert MARGIN * honest.greatest < LEAST / 10
            other = loop_of(spec.updated(inner={"muon_lr": 1.1 * spec.inner.muon_lr}))
            assert distance(start, end_of(other, start), ends[0]).parameters > 2 * LEAST
            loop.train(round=0, steps=10, seconds=60, between=lambda: False)
    finally:
        torch.set_num_threads(threads)


def test_plain_descent_goes_along_the_gradient_and_keeps_nothing() -> None:
    inner = {"optimizer": "sgd", "warmup": 0, "clip": 0, "lr": 0.5, "weight_decay": 0.3}
    loop = loop_of(parse_runspec({"run": {"name": "o"}, "inner": inner, "exchange": {"method": "demo"}}, source="test"))
    before = loop.state().parameters
    loop.train(round=0, steps=1, seconds=60, between=lambda: False)
    after = loop.state()
    np.testing.assert_allclose(before - after.parameters, 0.5 * loop._gradients.numpy(), atol=1e-6)
    assert after.updates == 1 and after.moments.size == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_replay_leaves_no_trace_and_begins_where_it_is_told(optimizer: str) -> None:
    loop = loop_of(spec_of(optimizer=optimizer, audited=True))
    fresh = loop.state()
    assert fresh.moments.size == fresh.updates == 0, "without updates there are no moments"
    first = end_of(loop, fresh)
    loop.train(round=0, steps=3, seconds=60, between=lambda: False)
    now = loop.state()
    assert distance(fresh, now, first).greatest == 0
    assert distance(fresh, end_of(loop, fresh), first).greatest == 0
    assert distance(fresh, loop.state(), now).greatest == 0
    assert not loop.fits(replace(now, moments=now.moments[1:]))


def test_adam_is_torchs_bit_for_bit() -> None:
    def trained(make: Any) -> nn.Module:
        model = Wide()
        optimizer = make(model.parameters(), lr=1e-3)
        tokens = torch.randint(64, (40, 8), generator=torch.Generator().manual_seed(1))
        for step in tokens:
            F.cross_entropy(model(step[None])[0], step).backward()
            model.norm.weight.grad = None  # as of what a loss does not depend on
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
        return model

    ours, theirs = trained(Adam), trained(partial(torch.optim.Adam, fused=True))
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
