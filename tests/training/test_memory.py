"""The table of memory: what it says of small and of very large models, and that a run that cannot fit is refused."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.gpt import GPT
from swarmnode.training.memory import DAEMON, Keeping, Machine, Weight, in_words, needs, refusal
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment
from swarmnode.training.weigh import weigh

MILLION, BILLION = 10**6, 10**9
METHODS = ("diloco", "gossip", "btard", "open", "seed")


def spec(method: str = "diloco", **tables: dict[str, Any]) -> RunSpec:
    trust = "open" if method == "open" else "known"
    run = {"run": {"name": "r", "trust": trust}, "exchange": {"method": method}, "inner": {"lr": 1e-4}, **tables}
    return parse_runspec(run, source="test")


@pytest.mark.parametrize("method", METHODS)
def test_what_grows_with_the_model_grows_in_proportion(method: str) -> None:
    one, eight = (needs(spec(method), Weight(size * BILLION)) for size in (1, 8))
    assert eight.memory == pytest.approx(8 * one.memory, rel=0.15)
    assert eight.disk == pytest.approx(8 * one.disk, rel=0.35)  # an auditor's states are capped


def test_a_model_of_a_billion_and_of_eight() -> None:
    """4 bytes each: 9 to 11 copies in memory with AdamW on the CPU, of which the trainer has 4."""
    for size, most in ((1, 50), (8, 400)):
        table = needs(spec(), Weight(size * BILLION))
        copies = table.memory / (4 * size * BILLION)
        assert 9 <= copies <= 11
        assert table.memory < most * BILLION
        assert table.of("memory", by="trainer") / (4 * size * BILLION) == pytest.approx(4, rel=0.05)


def test_an_accelerator_takes_the_gradient_off_the_memory_and_has_moments_of_its_own() -> None:
    here, there = (needs(spec(), Weight(BILLION), on_device=on_device) for on_device in (False, True))
    assert there.device == 4 * 4 * BILLION
    assert here.memory - there.memory == 4 * BILLION


def test_vectors_that_are_not_worth_a_file_are_counted_as_memory() -> None:
    small, large = needs(spec("open"), Weight(2 * MILLION)), needs(spec("open"), Weight(20 * MILLION))
    assert small.of("mapped") == 0 < large.of("mapped")
    for table, vector in ((small, 8 * MILLION), (large, 80 * MILLION)):
        held = table.of("memory", "mapped", by="daemon") - DAEMON
        assert 17 < held / vector < 24


def test_muon_has_one_moment_for_each_matrix_where_adamw_has_two() -> None:
    weight = Weight(BILLION, matrices=900 * MILLION)
    adamw, muon = (
        needs(spec(inner={"optimizer": name}, exchange={"codec": "int8"}), weight) for name in ("adamw", "muon")
    )
    assert adamw.memory - muon.memory == pytest.approx(4 * 900 * MILLION, rel=0.05)  # less what it orthogonalises in


def test_ranks_that_divide_the_model_hold_their_part_of_twenty_bytes_a_parameter() -> None:
    alone, divided = (needs(spec(), Weight(BILLION), Keeping(ranks=n, sharded=n > 1), on_device=True) for n in (1, 8))
    assert alone.device == 16 * BILLION
    assert divided.device == 20 * BILLION // 8
    copies = needs(spec(), Weight(BILLION), Keeping(ranks=2)), needs(spec(), Weight(BILLION))
    assert copies[0].memory - copies[1].memory == pytest.approx(16 * BILLION, rel=0.05)  # a whole trainer more


@pytest.mark.parametrize("method", METHODS)
def test_memory_does_not_grow_with_the_peers(method: str) -> None:
    few, many = (needs(spec(method), Weight(BILLION), Keeping(members=n)) for n in (4, 64))
    assert many.memory <= 1.05 * few.memory


def test_of_lora_only_the_trainer_has_the_base() -> None:
    table = needs(spec(), Weight(MILLION, frozen=4 * BILLION))
    assert table.of("memory", by="daemon") < BILLION / 4 < 4 * BILLION < table.of("memory", by="trainer")


def test_who_has_too_little_is_told_what_to_do() -> None:
    table = needs(spec(), Weight(BILLION))
    assert not refusal(table, Machine(64 * BILLION, 200 * BILLION))
    assert "Close other programs" in refusal(table, Machine(16 * BILLION, 200 * BILLION))
    assert "--data-dir" in refusal(table, Machine(64 * BILLION, 10 * BILLION))
    on_gpu = needs(spec(), Weight(BILLION), on_device=True)
    assert "--device cpu" in refusal(on_gpu, Machine(64 * BILLION, 200 * BILLION, 8 * BILLION))
    assert "needs 36.3 GB of memory (trainer 16.2 GB, daemon 20.1 GB)" in in_words(
        table, Machine(64 * BILLION, 200 * BILLION)
    )


def test_this_machine_has_memory_and_disk(tmp_path: Path) -> None:
    machine = Machine.here(str(tmp_path), None)
    assert 0 < machine.memory < float("inf")
    assert machine.disk > 0


def test_a_model_is_weighed_without_taking_its_memory(tmp_path: Path) -> None:
    run = spec(model={"layers": 2, "heads": 2, "width": 32, "context": 16}, inner={"batch": 4})
    weight = weigh(ByteLM, run, Assignment("", ""))
    assert weight is not None
    model = ByteLM.skeleton(run, Assignment("", ""))
    assert weight.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < weight.matrices < weight.parameters
    assert weight.step > 4 * 4 * 16 * 256  # the logits at least
    huge = spec(model={"layers": 64, "heads": 64, "width": 4096, "context": 64}, inner={"batch": 1})
    assert weigh(ByteLM, huge, Assignment("", "")).parameters > 10 * BILLION  # type: ignore[union-attr]


COMPILER = """
import sys
print(sorted(sys.modules.keys() & {"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"}))
"""
WEIGHS = """
from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.runspec import parse_runspec
from swarmnode.training.tasks import Assignment
from swarmnode.training.weigh import weigh
assert weigh(ByteLM, parse_runspec({"run": {"name": "small"}}, source="a test"), Assignment("", "")).step > 0
"""
LEARNS = """
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.tasks import well_formed
assert Learner("me", build(PolicySpec(), seed=1), Settings(), seed=1).warm_up(well_formed, steps=2) > 0
"""


@pytest.mark.parametrize("does", [WEIGHS, LEARNS], ids=["weighs", "learns"])
def test_who_weighs_or_teaches_a_small_model_imports_no_compiler(does: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", does + COMPILER], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def taken_by(model: GPT, batch: torch.Tensor, *, bf16: bool) -> int:
    """Bytes that torch's allocator gave for a step at the most, beside parameters and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.loss(batch)
        loss.backward()
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_weighed_as_torch_takes_memory_for_it(precision: str, checkpointing: bool) -> None:
    inner = {"batch": 8, "precision": precision, "checkpointing": checkpointing}
    run = spec(model={"layers": 3, "heads": 2, "width": 128, "context": 64}, inner=inner)
    weight = weigh(ByteLM, run, Assignment("", ""))
    assert weight is not None
    model = GPT(run.model)
    model.checkpointing = checkpointing
    taken = taken_by(model, torch.randint(256, (8, 65)), bf16=precision == "bf16")
    assert weight.step == pytest.approx(taken, rel=0.05)


def test_no_checkpoint_but_the_newest_and_the_one_before_has_moments() -> None:
    parts = {(part.where, part.what): part.size for part in needs(spec(), Weight(BILLION)).parts}
    assert parts["disk", "a checkpoint, and the one before"] == 2 * 4 * (2 + 2) * BILLION
    assert parts["older", "up to 7 older checkpoints"] == 7 * 4 * 2 * BILLION


def test_a_task_that_does_not_tell_is_trained_all_the_same() -> None:
    assert weigh(torch.nn.Module, spec(), Assignment("", "")) is None
