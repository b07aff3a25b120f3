"""Whether a task of one's own keeps to what docs/tasks.md and docs/rollouts.md ask of it, before others join its run.

`swarmnode task check` has the trainer look, in its sandbox. What a swarm needs shows in two members side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarmnode.training.inner import trained
from swarmnode.training.open_step import SEQUENCES
from swarmnode.training.rl.section import asked_by
from swarmnode.training.rl.sources import TRIED, known_to_this_process
from swarmnode.training.rl.tasks import CHECK_SECONDS, TaskRef, regenerate, tasks_of_run, within
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment, TaskError, load_task

NEEDED = ("model", "tokens_per_sample", "draw", "loss", "evaluate")
SAMPLES = 8  # so many that two draws of few different samples are not alike by chance
CLOSE = 1e-3  # relative: more than one computation differs from itself


def look(run: RunSpec, assignment: Assignment, local: str, device: str) -> None:
    """Raises TaskError with a line for each thing about the task `local` that would harm a swarm."""
    found: list[str] = []
    try:
        for each in _of_data(run, assignment, local, device) if run.needs_data else _of_questions(run, local):
            found.append(each)
    except Exception:  # what was found explains it, if anything was
        if not found:
            raise
    if found:
        raise TaskError("\n- ".join([f"{local} would harm a swarm:", *found]))


def _of_data(run: RunSpec, assignment: Assignment, local: str, device: str) -> Iterator[str]:
    members = (assignment, replace(assignment, peer_id=f"not {assignment.peer_id}"))
    one, other = (load_task(run.task.name, local)(run, each, device) for each in members)
    if lacking := [name for name in NEEDED if not hasattr(one, name)]:
        yield f"it has no {', no '.join(lacking)}, so that nobody can train it: docs/tasks.md says what that is"
        return
    if type(one.tokens_per_sample) is not int or one.tokens_per_sample < 1:
        yield f"tokens_per_sample is {one.tokens_per_sample!r}, which counts no speed: make it a whole number above 0"
    if why := next(_of_models(dict(trained(one.model)), dict(trained(other.model))), ""):
        yield why
        other = one  # what else differs may follow from that
    audited = hasattr(one, "places")
    for name in ("feed", "on") if getattr(one, "needs_text", False) else ():
        if not hasattr(one, name) and (name == "feed" or audited):
            yield f"it has needs_text and no {name}, so that its trainer ends once text comes or is audited: add {name}"
    batch, again, second, third = (one.draw(SAMPLES, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2, 3))
    if not isinstance(batch, Tensor) or not batch.dim() or len(batch) != SAMPLES:
        yield f"draw({SAMPLES}, …) gives {_kind(batch)}, which cannot be divided: give a tensor of {SAMPLES} samples"
        return
    if not _same(batch, again):
        yield "draw differs for the same generator, so that audits cannot repeat a step: draw all chance from it"
    elif _same(batch, second) and _same(batch, third):
        yield "draw ignores its generator, so that all members train on the same samples: draw them by it"
    elif audited and not _same(batch, other.draw(SAMPLES, torch.Generator().manual_seed(1))):
        yield "draw differs at another member for the same generator, so that audits fail: use no peer_id, or no places"
    loss, again = one.loss(batch), other.loss(batch)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        yield f"loss gives {_kind(loss)}, from which nothing is learned: give the mean, a scalar tensor with a gradient"
        return
    loss.backward()
    unfit = [name for name, each in trained(one.model) if each.grad is not None and not each.grad.isfinite().all()]
    if unfit or not loss.isfinite():
        what = f"the gradient of {unfit[0]} has nan or inf" if loss.isfinite() else f"the loss is {loss.item():g}"
        yield f"{what} in a first batch, which spoils everybody's model: look for log(0), x / 0, and nan in the data"
    elif audited and not math.isclose(loss.detach(), again.detach(), rel_tol=CLOSE):
        yield "loss differs for the same batch, so that audits take members for liars: use no dropout, or no places"
    yield from _of_measuring(one, other)


def _of_models(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    if not one:
        yield "no parameter needs a gradient, so that nothing is trained: leave requires_grad of the model as it is"
    for name, each in one.items():
        if each.dtype != torch.float32:
            yield f"parameter {name} is {each.dtype}, where float32 is trained and exchanged: call model.float()"
        if not each.isfinite().all():
            yield f"parameter {name} begins with nan or inf, so that each loss is nan: begin with finite numbers"
        if name not in other or not _same(each.data, other[name].data):
            yield (
                f"parameter {name} begins with other values each time, so that members train models without a mean: "
                "call torch.manual_seed(spec.run.seed) before the model is made, and take nothing from the assignment"
            )


def _of_measuring(one: Any, other: Any) -> Iterator[str]:
    for how, asked in (("", {}), (" with a seed", {"seed": 1})):
        found = [task.evaluate(thorough=False, **asked) for task in (one, one, other)]
        if not all(isinstance(each, int | float) and math.isclose(found[0], each, rel_tol=CLOSE) for each in found):
            yield (
                f"evaluate{how} gives {', '.join(map(_kind, found))} of one model, so that no losses compare: "
                "give a finite float, of the same samples each time, without dropout"
            )
    if "accuracy" in vars(one) and not 0 <= one.accuracy <= 1:
        yield f"accuracy is {one.accuracy!r}, where people are shown a share: make it 0 to 1"
    if hasattr(one, "heldout"):
        samples = one.heldout(1)
        if not isinstance(samples, Tensor) or not samples.dim() or len(samples) != SEQUENCES:
            yield f"heldout gives {_kind(samples)}, which judges cannot share: give a tensor of {SEQUENCES} samples"
        elif not all(_same(samples, task.heldout(1)) for task in (one, other)):
            yield "heldout differs for the same seed, so that judges do: draw from torch.Generator().manual_seed(seed)"


def _same(one: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and torch.equal(one.nan_to_num(), other.nan_to_num())


def _kind(value: Any) -> str:
    """What a method gave, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def _of_questions(run: RunSpec, local: str) -> Iterator[str]:
    if asked_by(local).kind != "own":
        return
    asked = tasks_of_run(run.rollouts)
    known_to_this_process(run.rollouts, local, asked)
    made = [regenerate(TaskRef(*asked[0], seed)) for seed in range(TRIED)]
    for first, again in ((each, regenerate.__wrapped__(each.ref)) for each in made):
        if (first.prompt, first.key) != (again.prompt, again.key):
            yield (
                f"generate makes {first.prompt[:60]!r}, and then {again.prompt[:60]!r} of the same seed, so that nodes "
                "check answers to another question: draw all chance from random.Random(seed)"
            )
            return
    if len({each.prompt for each in made}) == 1:
        yield f"generate makes {made[0].prompt[:60]!r} of each seed, so that one answer is all: use random.Random(seed)"
    for each in (each for each in made if each.key):
        try:
            with within(CHECK_SECONDS):
                earned = [each.task.verify(each.problem, each.key) for _ in range(2)]
            if all(isinstance(reward, int | float) and 0 < reward <= 1 for reward in earned) and len({*earned}) == 1:
                continue
            gives = f"gives {_kind(earned[0])}, then {_kind(earned[1])}"
        except Exception as error:
            gives = f"raises {type(error).__name__}: {error}"
        yield (
            f"verify of the key {each.key[:60]!r} to {each.prompt[:60]!r} {gives}, where all nodes "
            "are to find one reward above 0, at most 1: mend it, or key"
        )
        return
    if all(each.reward("") >= (each.reward(each.key) if each.key else 1.0) for each in made):
        yield "verify gives an empty answer as much as a right one, so that nothing is learned: give it less"
