"""What a run would come to on this machine and its link: time of a round, share of computing, bytes a day, memory.

    pace = measure(spec, settings)                               # some steps in a trainer process, and the arithmetic
    for way in ways(spec): predict(way, pace, link, members, machine)

The formulas are those of a swarm of `n` members alike, of which each has this machine and this link:

- inner steps: H times the measured step; and the held-out loss, measured.
- `diloco`: the butterfly all-reduce (Thakur et al. 2005, "Optimization of Collective Communication Operations in
  MPICH"): each member sends and receives 2 (n-1)/n times the encoded vector. Its chunks are encoded, sent, reduced and
  decoded at the same time, so it takes the longer of link and arithmetic; and TRIPS round trips, for a roster, the
  first bytes of values and of means, and the decision.
- `btard` (2106.11257): the same bytes, 1/n of them once more for an auditor, but one step after the other, with the
  arithmetic of CenteredClip and of its checksums, and a broadcast for each of its seven statements.
- `open`: inner steps go on meanwhile. An author publishes once, and who judges or applies fetches n-1, from whoever has
  them: n-1 encoded vectors each way. What takes the trainer is judging by one gradient (docs/results.md), the loss, the
  tests of others' data and audits, each a share of the steps. A round ends no sooner than what is said in it is round.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
import timeit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from swarmnode.node.config import NodeConfig
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.process import reason_of
from swarmnode.node.trainer.child import TrainerSettings, with_base
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.methods.open.checks.unique import SHARE as TESTS_SHARE
from swarmnode.protocols.methods.trainer import TrainerDied
from swarmnode.training.btard import checksum, clipped_centre, residual
from swarmnode.training.codecs import codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.gossip import weights_codec
from swarmnode.training.memory import Keeping, Machine, Weight, needs, refusal
from swarmnode.training.open_step import sequences_for
from swarmnode.training.options import SettingError
from swarmnode.training.outer import Layout, OuterState, outer_step, shares_of, state_hash
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.section import asked_by
from swarmnode.training.rl.tasks import TaskRef, tasks_of_run
from swarmnode.training.rl.vocabulary import BYTES
from swarmnode.training.runspec import BUILT_IN, RunSpec, load_runspec, parse_runspec
from swarmnode.training.tasks import MAY_LACK, needs_text, task_file, task_source
from swarmnode.training.tokens import dtype_of

STEPS_FOR = 6.0  # seconds of inner steps that are measured, after …
WARM_UP = 2  # … steps that are not
TEXT = 1 << 16  # tokens that are trained on, beside eight windows
SAMPLE = 1 << 21  # elements by which the arithmetic is measured
TRIPS = 6  # round trips of a round among known members, slow starts included
STATEMENTS = 7  # of btard, each told to everybody and waited for
PHASES = 6  # of an open round: commit, cut, reveal, seal, scores, roster
PHASE = 0.15  # seconds of each beside a round trip: what is heard is gathered (BURST), signed, kept and passed on
RECORD = 260  # bytes of a record of the state beside what it tells
SIGNS = 1.5e-9  # seconds to add up an element of a direction
FRAMES = 1.01  # bytes on the wire for one of the vector's
DAY = 86_400.0  # seconds
WAYS = (("diloco", "int8"), ("diloco", "fp16"), ("btard", "int8"), ("open", "topk"), ("open", "sign3"))
QUESTIONS = 5  # that are asked to see whether a task can
ALIKE = 0.02  # of the time: so near two ways compute as much


@dataclass(frozen=True)
class Link:
    up: float  # bytes a second
    down: float
    round_trip: float  # seconds


@dataclass(frozen=True)
class Pace:
    """What this machine takes: seconds, and seconds for each element of a vector."""

    weight: Weight
    step: float
    loss: float
    settle: float  # pseudo-gradient, outer step, hash, and parameters to and fro
    encode: dict[str, float]  # with error feedback, by codec
    decode: dict[str, float]
    clip: float  # CenteredClip and what its encoding leaves, for each member
    check: float  # checksums of an own part
    device: float | None = None  # bytes that are free there; None: it trains on the CPU
    has: tuple[str, ...] = ()  # of MAY_LACK


@dataclass(frozen=True)
class Predicted:
    method: str
    codec: str
    round_seconds: float
    computing: float  # share of the time in inner steps
    sent: float  # bytes a day; as many are received
    memory: int  # bytes
    disk: int
    refused: str = ""  # why it does not fit


def ways(spec: RunSpec) -> list[RunSpec]:
    """The run by its own method and codec first, then by others."""
    named = (spec.exchange.method, spec.exchange.codec)
    return [
        spec.updated(run={"trust": "open" if method == "open" else "known"}, exchange={"method": method, "codec": name})
        for method, name in dict.fromkeys((named, *WAYS))
    ]


def predict(spec: RunSpec, pace: Pace, link: Link, n: int, machine: Machine) -> Predicted:
    elements, name = pace.weight.parameters, spec.exchange.codec
    size = codec(name).encoded_size(elements) * FRAMES
    busy = steps = spec.inner.steps * pace.step
    local = pace.loss + pace.settle * elements
    slower, trips = min(link.up, link.down), TRIPS * link.round_trip
    match spec.exchange.method:
        case "open":
            waits, moved = _open(spec, pace, link, n, size)
        case "btard":
            moved = size * (2 * (n - 1) + 1) / n
            audited = pace.decode[name] + pace.clip + pace.check  # a part of everybody's
            work = pace.encode[name] + (1 + 1 / n) * pace.decode[name] + pace.clip + pace.check + audited
            waits = work * elements + moved / slower + STATEMENTS * link.round_trip + trips
        case "async" | "streaming" | "lowrank":
            share, tau = 1.0, spec.exchange.tau
            if spec.exchange.method == "async":  # where all are as fast as this node
                tau = 0
            elif spec.exchange.method == "streaming":
                share = 1 / min(spec.exchange.fragments, spec.model.layers)
            else:  # of square matrices, with no rank below the greatest; others have less
                share = min(1.0, 2 * spec.exchange.rank / spec.model.width)
            moved = size * 2 * (n - 1) / n * share
            work = (2 * pace.encode[name] + 2 * pace.decode[name]) * elements * share
            exchange = max(moved / slower, work) + trips
            hidden = min(exchange, (tau + spec.inner.steps) * pace.step)  # what is longer is waited for
            busy, waits = max(steps, steps - tau * pace.step + hidden), exchange - hidden
        case "demo":
            moved = size * (n - 1)
            waits = moved / slower + (pace.encode[name] + n * pace.decode[name]) * elements + trips
        case "gossip":  # weights travel during the steps; as many fit, nobody waits for them
            weights = weights_codec(name).encoded_size(elements) * FRAMES
            moved = size + weights
            hidden = min(weights, steps * slower)
            work = (pace.encode[name] + 2 * pace.decode[name]) * elements
            waits = work + (moved - hidden) / slower + trips
        case "seed":  # records of all others, and what adding them up takes, beside which nothing is waited for
            moved = n * (RECORD + spec.inner.steps)
            busy = 2 / 3 * steps  # two forward passes, where a step has three times one
            waits = n * spec.inner.steps * SIGNS * elements
        case _:
            moved = size * 2 * (n - 1) / n
            # own values, the others' of the own part, the mean of that, all means
            work = pace.encode[name] * (1 + 1 / n) + pace.decode[name] * (1 + (n - 1) / n)
            waits = max(moved / slower, work * elements) + trips
    seconds = busy + local + waits
    table = needs(spec, pace.weight, Keeping(members=n), on_device=machine.device < float("inf"))
    a_day = DAY / seconds * moved
    return Predicted(
        spec.exchange.method, name, seconds, busy / seconds, a_day, table.memory, table.disk, refusal(table, machine)
    )


def _open(spec: RunSpec, pace: Pace, link: Link, n: int, size: float) -> tuple[float, float]:
    """Seconds of a round beside inner steps, loss and settling, and bytes that a node sends and receives in it."""
    elements, name, inner = pace.weight.parameters, spec.exchange.codec, spec.inner
    moved = (n - 1) * size
    steps = inner.steps * pace.step
    judged = sequences_for(inner.steps * inner.batch) / inner.batch * pace.step + 2 * pace.decode[name] * n * elements
    checked = (TESTS_SHARE + spec.trust.audit_share) * steps
    local = pace.loss + pace.settle * elements
    held = judged + checked + local
    said = PHASES * (PHASE + link.round_trip) + moved / min(link.up, link.down)
    said += (pace.encode[name] + n * pace.decode[name]) * elements + held - checked
    return max(held, max(said, spec.trust.shortest_window) - steps) - local, moved


def recommend(found: Sequence[Predicted], spec: RunSpec) -> tuple[Predicted | None, str]:
    fit = [way for way in found if not way.refused]
    trusted = [way for way in fit if (way.method == "open") == (spec.run.trust == "open")]
    if not trusted:
        return None, "no method fits this machine: " + (found[0].refused if found else "none is known")
    best = max(way.computing for way in trusted)
    chosen = next(way for way in trusted if way.computing >= best - ALIKE)
    why = (
        f"{chosen.method} with {chosen.codec}: of what fits and suits [run] trust = {spec.run.trust!r}, it computes "
        f"for {chosen.computing:.0%} of the time"
    )
    if chosen.computing < 0.5:
        why += "; the exchange takes the rest: more inner steps a round ([inner] steps) or a coarser codec lower that"
    others = [way for way in fit if way not in trusted]
    if others:
        other = max(others, key=lambda way: way.computing)
        why += f". {other.method} with {other.codec} would compute for {other.computing:.0%}"
        why += ", and needs members who trust one another" if other.method != "open" else ", and takes strangers"
    return chosen, why


@dataclass(frozen=True)
class Advice:
    """All ways, the file's own first, and which to take."""

    pace: Pace
    ways: tuple[Predicted, ...]
    chosen: Predicted | None
    why: str


def planned(
    file: Path, config: NodeConfig, given: Mapping[str, Any], *, link: tuple[float, float, float], members: int
) -> Advice:
    """Measure and predict. `given`: settings in place of the node's; `link`: as in `Link`.

    Raises SettingError, ExpectedError.
    """
    spec = load_runspec(file)
    if not spec.needs_data:
        raise SettingError(f"{file}: rollouts are shared as they come, so a run by them has no rounds to plan")
    pace = measure(spec, _settings(replace(config, **given)))
    where = next(path for path in (config.directory, *config.directory.parents) if path.is_dir())
    machine = Machine.here(str(where), pace.device)
    found = tuple(predict(way, pace, Link(*link), members, machine) for way in ways(spec))
    return Advice(pace, found, *recommend(found, spec))


def _settings(config: NodeConfig, **others: Any) -> TrainerSettings:
    """Those of this node's trainer that hold beside a run as well."""
    same = {name: getattr(config, name) for name in ("threads", "nice", "device", "base", "task", "sandbox")}
    return TrainerSettings(**{**same, "readable": config.sandbox_read, **others})


def check_task(task: str, file: Path | None, config: NodeConfig) -> dict[str, Any]:
    """Take some steps of the task FILE.py:CLASS in the trainer's sandbox, with a run file's settings if one is given.

    What `swarmnode task check --json` tells. Raises SettingError, ExpectedError.
    """
    tables = {"run": {"name": "check"}, "task": {"name": task.rpartition(":")[2].lower()}}
    spec = load_runspec(file) if file is not None else parse_runspec(tables, source=task)
    if spec.task.name in BUILT_IN or not spec.needs_data:
        raise SettingError(f"{file or task}: the task {spec.task.name} is built in; give [task] name another one")
    code = hashlib.sha256(task_source(task)).hexdigest()
    pace = measure(spec, _settings(config, task=task, check=True))
    return {
        "task": spec.task.name,
        "parameters": pace.weight.parameters,
        "step_seconds": pace.step,
        "loss_seconds": pace.loss,
        "weight": asdict(pace.weight),
        "code_sha256": code,
        "has": {"needs_text": needs_text("", task)} | {name: name in pace.has for name in MAY_LACK},
    }


def check_questions(task: str, file: Path | None, config: NodeConfig) -> dict[str, Any]:
    """Ask text:FILE.jsonl or FILE.py:CLASS a few questions in the trainer's sandbox, and check the keys as answers.

    What `swarmnode task check --json` tells: `seconds` are the mean to make a question and check two answers; a key
    `earns` NaN where there is none. Raises SettingError, ExpectedError.
    """
    label = f"text:{task_file(task).name}" if task.startswith("text:") else f"x.py:{task.rpartition(':')[2]}"
    tables = {"run": {"name": "check"}, "task": {"name": "rollouts"}, "rollouts": {"task": label}}
    spec = load_runspec(file) if file is not None else parse_runspec(tables, source=task)
    if asked_by(spec.rollouts.task).kind != asked_by(task).kind:
        raise SettingError(f"{file}: [rollouts] task = {spec.rollouts.task!r} is no file such as {task}")
    spec = spec.updated(rollouts={"warm_up": min(1, spec.rollouts.warm_up)})
    settings = _settings(config, task=task, threads=1, check=True)
    code = hashlib.sha256(task_source(task)).hexdigest()
    ((name, difficulty),) = tasks_of_run(spec.rollouts)

    async def main() -> dict[str, Any]:
        trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="check", settings=settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(trainer.run)

            async def answered(seed: int, text: str) -> dict[str, Any]:
                tokens = (*BYTES.encode(text), BYTES.end)
                group = RolloutGroup(TaskRef(name, difficulty, seed), (tokens,), 0, "check", BYTES.id)
                (told,) = await trainer.score([("check", group)], texts=True)
                if "answers" not in told:
                    raise ExpectedError(f"{task}: {told['why']}")
                return told

            began = trio.current_time()
            asked = []
            for seed in range(QUESTIONS):
                told = await answered(seed, "")
                right = (await answered(seed, told["key"]))["answers"][0]["reward"] if told["key"] else math.nan
                asked.append({"question": told["question"], "key": told["key"], "earns": right})
            took = (trio.current_time() - began) / QUESTIONS
            nursery.cancel_scope.cancel()
        return {"task": name, "code_sha256": code, "seconds": took, "asked": asked}

    with _told_why(f"{task}: "):
        return trio.run(main)


@contextmanager
def _told_why(of: str = "") -> Iterator[None]:
    """What ends a trainer in the block as one error for a person, which begins with what it is `of` where it died."""
    try:
        yield
    except BaseExceptionGroup as error:
        why = reason_of(error)
        raise ExpectedError(f"{of}{why}") if isinstance(why, TrainerDied) else why from error


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(spec: RunSpec, settings: TrainerSettings) -> Pace:
    """Run some steps of the run's own model, and the arithmetic of its exchange. Raises ExpectedError.

    They are taken on tokens by chance, of which none takes longer than another.
    """

    async def main(text: Path) -> tuple[tuple[Weight, float, float], dict[str, Any]]:
        based, _ = await with_base(spec, settings.base)
        told = replace(settings, heldout=str(text), texts=(str(text),))
        trainer = TrainerProcess(_on_chance(based, text), run_id=spec.run_id, peer_id="plan", settings=told)
        async with trio.open_nursery() as nursery:
            await nursery.start(trainer.run)
            await trainer.train(round=0, steps=WARM_UP, seconds=float("inf"))
            done = await trainer.train(round=0, steps=10**9, seconds=STEPS_FOR)
            await trainer.evaluate(thorough=False)
            began = time.perf_counter()
            lost = await trainer.evaluate(thorough=False)
            if not math.isfinite(done.loss + lost):
                raise ExpectedError(
                    f"after {WARM_UP + done.steps} steps the loss is {done.loss:g}, and {lost:g} held out, so that "
                    "nothing is learned: lower [inner] lr or clip, or look for what makes nan in the task"
                )
            weight = trainer.weight or Weight(trainer.layout.parameters)
            measured = weight, done.seconds / max(1, done.steps), time.perf_counter() - began
            nursery.cancel_scope.cancel()
        return measured, {"device": trainer.free, "has": trainer.has}

    with _told_why(), tempfile.TemporaryDirectory(prefix="swarmnode-plan-") as folder:
        (weight, step, loss), here = trio.run(main, Path(folder, "text"))
    return Pace(weight, step, loss, **_arithmetic(spec, min(weight.parameters, SAMPLE)), **here)


def _on_chance(spec: RunSpec, file: Path) -> RunSpec:
    tokens = np.random.default_rng(0).integers(spec.data.vocabulary, size=TEXT + 8 * spec.model.context)
    text = tokens.astype(dtype_of(spec.data.vocabulary)).tobytes()
    file.write_bytes(text)
    return spec.resolved(heldout_sha256=hashlib.sha256(text).hexdigest(), index="")


def _arithmetic(spec: RunSpec, size: int) -> dict[str, Any]:
    """The rest of a Pace, by vectors of `size` elements."""
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    layout, state = Layout.of([("all", (size,))]), OuterState.start(values)
    momentum = spec.outer.momentum
    warm = partial(timeit.repeat, repeat=2, number=1)  # the second time, once its memory is warm
    encode: dict[str, float] = {}
    decode: dict[str, float] = {}
    for name in dict.fromkeys((*(way for _, way in WAYS), spec.exchange.codec)):
        feedback, out = ErrorFeedback(codec(name), size), np.empty(size, np.float32)
        raw = bytes(feedback.encode(values))
        encode[name] = warm(partial(feedback.encode, values))[1] / size
        decode[name] = warm(partial(codec(name).decode, raw, size, out))[1] / size
    stepped = warm(lambda: outer_step(state, values, lr=1.0, momentum=momentum))[1]
    hashed, copied = warm(lambda: state_hash(0, layout, state))[1], warm(values.copy)[1]
    rows = values[: size // 2 // 4 * 4].reshape(4, -1)
    part = rows[0]
    shares = shares_of([1] * 4)
    centre, radius = clipped_centre(rows, shares)
    clip = warm(lambda: residual(rows, shares, *clipped_centre(rows, shares)))[1] / rows.size
    check = warm(lambda: checksum(part, centre, radius, b"", 0))[1] / part.size
    settle = (stepped + hashed + 4 * copied) / size
    return {"settle": settle, "encode": encode, "decode": decode, "clip": clip, "check": check}
