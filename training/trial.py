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
from swarmnode.training.rl.tasks import CHECK_SECONDS, Question, TaskRef, regenerate, tasks_of_run, within
from swarmnode.training.runspec import RunSpec
from swarmnode.training.tasks import Assignment, TaskError, load_task

NEEDED = ("model", "tokens_per_sample", "draw", "loss", "evaluate")
SAMPLES = 8  # so many that two draws of few different samples are not alike by chance
CLOSE = 1e-3  # relative: more than one computation differs from itself
REPEATED = "so that no step can be repeated, and audits take honest members for liars"


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
        yield f"it has no {', no '.join(lacking)}, so that nobody can train it: add what docs/tasks.md says of that"
        return
    if type(one.tokens_per_sample) is not int or one.tokens_per_sample < 1:
        yield f"tokens_per_sample is {one.tokens_per_sample!r}, which no speed is counted in: make it an int above 0"
    if why := next(_of_models(dict(trained(one.model)), dict(trained(other.model))), ""):
        yield why
        other = one  # what else differs may follow from that

    def drawn(task: Any, seed: int) -> Any:
        return task.draw(SAMPLES, torch.Generator().manual_seed(seed))

    batch = drawn(one, 1)
    if not isinstance(batch, Tensor) or not batch.dim() or len(batch) != SAMPLES:
        yield (
            f"draw({SAMPLES}, generator) gives {_kind(batch)}, so that no batch can be divided: give a tensor that has "
            f"the {SAMPLES} samples along its first dimension"
        )
        return
    if not _same(batch, drawn(one, 1)):
        yield (
            f"draw gives another batch each time for the same generator, {REPEATED}: draw all chance from the "
            "generator, as in torch.randint(…, generator=generator), and keep nothing from call to call"
        )
    elif _same(batch, drawn(one, 2)) and _same(batch, drawn(one, 3)):
        yield (
            "draw gives the same batch whatever the generator, so that all members train on the same samples in each "
            "step, and many learn no more than one: draw them with the generator, as in torch.randint(…, "
            "generator=generator), which is another one for each member and step"
        )
    elif hasattr(one, "places") and not _same(batch, drawn(other, 1)):
        yield (
            f"draw gives another batch at another member for the same generator, {REPEATED}: take nothing from the "
            "assignment but its texts, or leave out `places`, and with it audits"
        )
    loss, again = one.loss(batch), other.loss(batch)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        flat = " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        yield (
            f"loss gives {_kind(loss)}{flat}, from which nothing can be learned: give the mean over the samples, a "
            "tensor without dimensions that is computed from the model, without .item(), .detach() and no_grad"
        )
        return
    loss.backward()  # type: ignore[no-untyped-call]
    unfit = [name for name, each in trained(one.model) if each.grad is not None and not each.grad.isfinite().all()]
    if unfit or not loss.isfinite():
        what = f"the gradient of {unfit[0]} has nan or inf" if loss.isfinite() else f"the loss is {loss.item():g}"
        yield (
            f"{what} in the first batch, so that one step spoils the model, and an exchange everybody's: look for a "
            "division by 0, a logarithm or root of 0, and for nan in the data"
        )
    elif hasattr(one, "places") and not math.isclose(loss.detach(), again.detach(), rel_tol=CLOSE):
        yield (
            f"loss gives another value each time for the same batch, {REPEATED}: take dropout and other noise out, or "
            "leave out `places`, and with it audits"
        )
    yield from _of_measuring(one, other)


def _of_models(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """What is amiss with the parameters of two members."""
    if not one:
        yield "no parameter of the model needs a gradient, so that nothing is trained: leave requires_grad as it is"
    for name, each in one.items():
        if each.dtype != torch.float32:
            yield f"parameter {name} is {each.dtype}, where float32 is trained and exchanged: call model.float()"
        if not each.isfinite().all():
            yield f"parameter {name} begins with nan or inf, so that all losses are nan: begin with finite numbers"
        if name not in other or not _same(each.data, other[name].data):
            yield (
                f"parameter {name} begins with other values each time, so that members train different models whose "
                "mean is no model: call torch.manual_seed(spec.run.seed) before the model is made, draw nothing "
                "elsewhere, and take nothing from the assignment for it"
            )


def _of_measuring(one: Any, other: Any) -> Iterator[str]:
    """What is amiss with how two members measure the same parameters."""
    for how, asked in (("", {}), (" with a seed", {"seed": 1})):
        found = [task.evaluate(thorough=False, **asked) for task in (one, one, other)]
        if wrong := [each for each in found if not isinstance(each, int | float) or not math.isfinite(each)]:
            yield f"evaluate{how} gives {_kind(wrong[0])}, which nobody can compare: give a finite float"
        elif not all(math.isclose(found[0], each, rel_tol=CLOSE) for each in found):
            yield (
                f"evaluate{how} gives {', '.join(f'{each:g}' for each in found)} for the same parameters, so "
                "that members measure different things: take the same samples each time and everywhere, without dropout"
            )
    if "accuracy" in vars(one) and not 0 <= one.accuracy <= 1:
        yield f"accuracy is {one.accuracy!r}, where people are shown a share: make it 0 to 1"
    if hasattr(one, "heldout"):
        samples = one.heldout(1)
        if not isinstance(samples, Tensor) or not samples.dim() or len(samples) != SEQUENCES:
            yield f"heldout gives {_kind(samples)}, so that judges get no part: give a tensor of {SEQUENCES} samples"
        elif not _same(samples, other.heldout(1)) or not _same(samples, one.heldout(1)):
            yield (
                "heldout gives other samples for the same seed, so that judges of an open run differ about honest "
                "work: draw them from torch.Generator().manual_seed(seed)"
            )


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
    for first in made:
        again = regenerate.__wrapped__(first.ref)
        if (first.prompt, first.key) != (again.prompt, again.key):
            yield (
                f"seed {first.ref.seed} makes {_short(first)}, and then {_short(again)}, so that nodes, which make "
                "each question anew, check answers to another one: let random.Random(seed) draw all that is drawn"
            )
            return
    if len({each.prompt for each in made}) == 1:
        yield (
            f"seeds 0 to {TRIED - 1} all make {_short(made[0])}, so that policies learn one answer by heart: draw the "
            "problem from random.Random(seed)"
        )
    if why := next(filter(None, (_of_key(each) for each in made if each.key)), ""):
        yield why
    elif all(each.reward("") >= (each.reward(each.key) if each.key else 1.0) for each in made):
        yield (
            "an empty answer earns as much as a right one, so that none is better than another, and nothing is "
            "learned: give less in `verify` for what is wrong"
        )


def _of_key(question: Question) -> str:
    """What is amiss with how a right answer is checked; empty where nothing is."""
    begins = f"verify, of the key {question.key[:60]!r} to {_short(question)},"
    try:
        with within(CHECK_SECONDS):
            found = [question.task.verify(question.problem, question.key) for _ in range(2)]
    except Exception as error:
        return f"{begins} raises {type(error).__name__}: {error}, so that right answers earn nothing: mend it"
    if not all(isinstance(each, int | float) and 0 <= each <= 1 for each in found):
        return f"{begins} gives {_kind(found[0])}, and what is not 0 to 1 is cut off: give a number of these"
    if found[0] != found[1]:
        return f"{begins} gives {found[0]:g}, then {found[1]:g}, so that nodes differ about rewards: use no chance"
    return "" if found[0] else f"{begins} gives 0, so that right answers earn nothing: mend it, or `key`"


def _short(question: Question) -> str:
    return repr(question.prompt[:60])
