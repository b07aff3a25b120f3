"""What the defences cost where nobody attacks, as JSON lines.

    python bench/defences.py learning [--seeds 3]      # the final loss, and the CPU time of all nodes together
    python bench/defences.py learning --task text --seeds 1                # the second half of it
    python bench/defences.py growth [--simulate 8]     # what verification takes of a node, as the swarm grows

`learning`, in one process, defences on and off with the same seeds and data: sixteen peers on clusters (IID, and
classes drawn by Dirichlet(0.3); tests/attacks/clusters.py), by the plain mean, by the rules of the open chain, and by
the CenteredClip of `btard`; then eight workers with a small byte-lm, whose contributions are applied as they are, or
judged by every worker, gated and clipped as in an open round. `loss_ratio` is defended / undefended, mean over seeds.

`growth` measures the CPU seconds of an inner step with the model of examples/open.toml, and those that the exchange's
own judging (`open/judge.py`) takes of as many contributions as the chain's rules have a node judge: all of a round
if it is a judge. `--simulate N` counts forward passes in real sessions of N nodes on simnet, to check that. Shares are
of the node's whole compute: of one that judges in every round, and the mean over all nodes. `before` is what judging
took while every contribution was measured on all sixteen sequences.

Times are CPU times of this process, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from swarmnode.protocols.methods.trainer import Capabilities, Trainer
from swarmnode.training.outer import Layout

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "attacks")]

SIZES = (4, 8, 16, 32, 64, 128, 256)  # nodes
CLUSTER_ROUNDS = 40
LM_STEPS, LM_INTERVAL = 480, 80  # as examples/byte-lm.toml has its rounds
TIMED = 30  # steps, and evaluations
BATCHES = (4, 32)  # sequences in an inner step: the example's, and that of a node with an accelerator
LONG_ROUND = 500  # inner steps, as in the DiLoCo paper


def on_clusters(seeds: int) -> Iterator[dict[str, Any]]:
    """The three rules on the task of the gradient attacks."""
    from clusters import PEERS, Task
    from openrounds import Lie, OpenSwarm, undefended

    from swarmnode.training.btard import clipped_centre

    def by_clip(task: Task) -> np.ndarray:
        phi, shares = task.start(), [np.float32(1 / PEERS)] * PEERS
        for number in range(CLUSTER_ROUNDS):
            phi = phi - clipped_centre(task.train(phi, round=number), shares)[0]
        return phi

    rules: dict[str, Callable[[Task], np.ndarray]] = {
        "plain mean": lambda task: undefended(task, Lie(), 0, CLUSTER_ROUNDS),
        "open": lambda task: OpenSwarm(task, Lie(), 0, codec_name="fp32").run(CLUSTER_ROUNDS).phi,
        "btard": by_clip,
    }
    for name, alpha in (("IID", None), ("Dirichlet(0.3)", 0.3)):
        losses: dict[str, list[float]] = {rule: [] for rule in rules}
        for seed in range(seeds):
            for rule, run in rules.items():
                task = Task(seed=seed, alpha=alpha)
                phi = run(task)
                losses[rule].append(float(task.losses(phi[None], seed=0, samples=4000)[0]))
        for rule in ("open", "btard"):
            pairs = zip(losses[rule], losses["plain mean"], strict=True)
            yield {
                "bench": "defences",
                "task": f"clusters, {name}",
                "defences": rule,
                "seeds": seeds,
                "loss": round(fmean(losses[rule]), 4),
                "undefended": round(fmean(losses["plain mean"]), 4),
                "loss_ratio": round(fmean(on / off for on, off in pairs), 4),
            }


def on_text(seeds: int) -> Iterator[dict[str, Any]]:
    """A small byte-lm by sparse contributions, judged and clipped or applied as they are."""
    from learned import methods
    from learned.workers import Size, Workers

    from swarmnode.training.runspec import ModelSection

    spent = [0.0]  # CPU seconds of all judges together

    class Undefended(methods.Open):
        """Everything counts in full."""

        def _units(self, round: int, raws: list[memoryview]) -> list[int]:
            return [1] * len(raws)

    class Judged(methods.Open):
        """Every worker judges."""

        def _units(self, round: int, raws: list[memoryview]) -> list[int]:
            began = time.process_time()
            units = super()._units(round, raws)
            spent[0] += time.process_time() - began
            return units

    arm = methods.Arm("open", steps=LM_STEPS, lr=3e-3, interval=LM_INTERVAL, codec="topk", decay=0.95)
    size = Size(model=ModelSection(layers=2, heads=2, width=64, context=64))
    usual_clip = methods.clip_units
    losses: dict[str, list[float]] = {"on": [], "off": []}
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for seed in range(1, seeds + 1):
        workers = Workers(size, seed)
        for name, method in (("off", Undefended), ("on", Judged)):
            methods.METHODS["open"] = method
            methods.clip_units = usual_clip if name == "on" else lambda norms: usual_clip([1.0] * len(norms))
            began = time.process_time()
            found = methods.train(
                arm, workers, start=workers.initial, stream="defences", every=LM_STEPS, say=lambda steps, loss: None
            )
            seconds[name].append(time.process_time() - began)
            losses[name].append(found.curve[-1][1])
        workers.close()
    pairs = list(zip(losses["on"], losses["off"], strict=True))
    yield {
        "bench": "defences",
        "task": f"byte-lm of {workers.parameters} parameters, {LM_STEPS} steps, H = {LM_INTERVAL}, topk",
        "defences": "open",
        "seeds": seeds,
        "loss": round(fmean(losses["on"]), 4),
        "undefended": round(fmean(losses["off"]), 4),
        "loss_ratio": round(fmean(on / off for on, off in pairs), 4),
        "cpu_seconds": round(fmean(seconds["on"]), 1),
        "cpu_seconds_undefended": round(fmean(seconds["off"]), 1),
        "cpu_ratio": round(sum(seconds["on"]) / sum(seconds["off"]), 3),
        "cpu_seconds_judging": round(spent[0] / seeds, 1),
        "accepted": round(found.accepted, 3),
    }


class InProcess(Trainer):
    """A trainer that judges: one task in this process."""

    capabilities = Capabilities(judges=True)

    def __init__(self, batch: int) -> None:
        import torch

        from swarmnode.training.byte_lm import ByteLM
        from swarmnode.training.inner import InnerLoop, flatten_into, layout_of
        from swarmnode.training.runspec import load_runspec
        from swarmnode.training.tasks import Assignment

        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        spec = load_runspec(ROOT / "examples" / "open.toml")
        spec = replace(spec, inner=replace(spec.inner, batch=batch))
        self.task, self._no_grad = ByteLM(spec, Assignment("ab" * 32, "bench")), torch.no_grad
        self._layout = layout_of(self.task.model)
        self._vector = torch.empty(self._layout.parameters)
        flatten_into(self.task.model, self._vector, keep=False)
        self.loop = InnerLoop(spec, self.task, peer_id="bench", vector=self._vector, keep=True)

    @property
    def layout(self) -> Layout:
        return self._layout

    def parameters(self) -> np.ndarray:
        return self._vector.numpy().copy()

    def load(self, vector: np.ndarray) -> None:
        self._vector.numpy()[:] = vector

    def steps(self, round: int, steps: int) -> None:
        self.loop.train(round=round, steps=steps, seconds=float("inf"), between=lambda: False)

    async def train(self, *, round: int, steps: int, seconds: float) -> Any:
        raise NotImplementedError

    async def sample(self, prompt: bytes, *, length: int, temperature: float, seed: int) -> bytes:
        raise NotImplementedError

    async def interrupt(self) -> None:
        """It trains only when told to."""

    async def evaluate(self, *, thorough: bool, seed: int | None = None, wait: bool = True) -> float:
        return self.task.evaluate(thorough=thorough, seed=seed)

    async def heldout(self, *, seed: int, sequences: int) -> float:
        with self._no_grad():
            return float(self.task.loss(self.task.heldout(seed)[:sequences]))

    async def gradient(self, *, seed: int, first: int, last: int) -> tuple[float, np.ndarray] | None:
        loss, gradient = self.loop.slope(self.task.heldout(seed)[first:last])
        return loss, gradient.numpy().copy()


def step_seconds(batch: int) -> float:
    """CPU seconds of an inner step of the example's model."""
    trainer = InProcess(batch)
    trainer.steps(0, 3)
    steps = TIMED if batch == BATCHES[0] else TIMED // 5
    began = time.process_time()
    trainer.steps(1, steps)
    return (time.process_time() - began) / steps


def judging_seconds(trainer: InProcess, contributions: int, trained: int) -> float:
    """CPU seconds in which a judge who trained on so many sequences measures a round."""
    from types import SimpleNamespace

    import trio

    from swarmnode.protocols.methods.open.judge import Evaluator
    from swarmnode.protocols.methods.open.local import LocalTrainer
    from swarmnode.protocols.methods.open.store import Contribution
    from swarmnode.protocols.runner import inline
    from swarmnode.training.codecs import codec
    from swarmnode.training.outer import OuterState
    from swarmnode.training.runspec import parse_runspec

    size, rng = trainer.layout.parameters, np.random.default_rng(1)
    raw = bytes(codec("topk").encode(rng.normal(0, 1e-3, size).astype(np.float32)))
    found = {number.to_bytes(32, "big"): Contribution(raw, 1.0, 0) for number in range(contributions)}

    async def measure() -> None:
        state = OuterState.start(trainer.parameters())
        tables = {"inner": {"steps": 1, "batch": trained}, "outer": {"lr": 1.0, "momentum": 0.0}}
        tables["run"] = {"name": "bench", "trust": "open"}
        spec = parse_runspec({**tables, "exchange": {"method": "open", "codec": "topk"}}, source="bench")
        parts: Any = SimpleNamespace(spec=spec, runner=inline, ledger=None)
        local = LocalTrainer(trainer, inline, spec)  # type: ignore[arg-type]
        judge = Evaluator(local, parts, state=state, before=state, seed=1)
        await judge.measure(found, dict.fromkeys(found, "peer"), ["peer"])

    began = time.process_time()
    trio.run(measure)
    return time.process_time() - began


def judged(nodes: int) -> tuple[int, int]:
    """Judges of a round, and contributions, where all contribute and all are validators who may be."""
    from swarmnode.protocols.chain.state import VALIDATORS_SHARE, ChainRules, genesis, judges

    rules = ChainRules()
    validators = min(nodes, max(4, rules.participants * VALIDATORS_SHARE // 1_000_000))
    chain = genesis("ab" * 32, tuple(f"peer-{number:03d}" for number in range(validators)), window=60_000)
    return len(judges(chain, rules)), min(nodes, rules.participants)


def growth() -> Iterator[dict[str, Any]]:
    """Verification's share of a node's compute."""
    from swarmnode.training.open_step import sequences_for

    steps = {batch: step_seconds(batch) for batch in BATCHES}
    trainer = InProcess(BATCHES[0])
    judging_seconds(trainer, 1, 80 * 4)
    yield {"bench": "defences", "cpu_seconds": {f"step_{batch}": round(steps[batch], 4) for batch in BATCHES}}
    known: dict[tuple[int, int], float] = {}
    for nodes in SIZES:
        count, contributions = judged(nodes)
        line: dict[str, Any] = {"nodes": nodes, "judges": count, "contributions": contributions}
        for name, number, batch in (
            ("5 steps of 4", 5, 4),
            ("20 steps of 4", 20, 4),
            ("example: 80 steps of 4", 80, 4),
            ("500 steps of 4", LONG_ROUND, 4),
            ("500 steps of 32", LONG_ROUND, 32),
        ):
            trained = number * steps[batch]
            if (contributions, number * batch) not in known:
                known[contributions, number * batch] = judging_seconds(trainer, contributions, number * batch)
            spent = known[contributions, number * batch]
            line[name] = {
                "sequences": sequences_for(number * batch),
                "cpu_seconds": round(spent, 3),
                "judge": _share(spent, trained),
                "mean": _share(spent * count / nodes, trained),
            }
        yield {"bench": "defences", **line}


def _share(spent: float, trained: float) -> float:
    return round(spent / (spent + trained), 4)


def simulated(nodes: int, rounds: int = 8) -> dict[str, Any]:
    """What the average node judges in a round of real sessions on simnet, all of them validators, in forward passes."""
    import trio
    from simswarm import SimSwarm

    from swarmnode.testing.simnet import run_simulation
    from swarmnode.testing.toytrainer import SimTrainer
    from swarmnode.training.open_step import BACKWARD, sequences_for

    counted, trained = [0], [0]
    usual_heldout, usual_gradient = SimTrainer.heldout, SimTrainer.gradient

    async def heldout(self: Any, *, seed: int, sequences: int) -> float:
        counted[0] += sequences
        return await usual_heldout(self, seed=seed, sequences=sequences)

    async def gradient(self: Any, *, seed: int, first: int, last: int) -> Any:
        counted[0] += BACKWARD * (last - first)
        return await usual_gradient(self, seed=seed, first=first, last=last)

    async def body() -> None:
        names = tuple(f"{number:03d}" if number else "a" for number in range(nodes))
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, method="open", validators=names, seconds_per_step=2.0)
            trained[0] = swarm.spec.inner.steps * swarm.spec.inner.batch
            await swarm.start(names[0], wait_peers=nodes - 1)
            for name in names[1:]:
                await swarm.start(name, join=names[0])
            await swarm.round_done(1, *names)
            before = counted[0]
            await swarm.round_done(1 + rounds, *names)
            counted[0] -= before
            nursery.cancel_scope.cancel()

    SimTrainer.heldout, SimTrainer.gradient = heldout, gradient  # type: ignore[method-assign]
    run_simulation(body)
    return {
        "bench": "defences",
        "simulated_nodes": nodes,
        "sequences_trained": trained[0],
        "passes_of_a_node_in_a_round": round(counted[0] / nodes / rounds, 2),
        "by_the_rules": (2 * BACKWARD + 1) * sequences_for(trained[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="what the defences cost where nobody attacks")
    parser.add_argument("what", choices=("learning", "growth"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--task", choices=("clusters", "text", "both"), default="both", help="of learning")
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="count in a simulated swarm of N nodes")
    options = parser.parse_args()
    lines: list[Iterator[dict[str, Any]]] = []
    if options.what == "learning":
        tasks = {"clusters": on_clusters, "text": on_text}
        lines = [tasks[name](options.seeds) for name in tasks if options.task in (name, "both")]
    elif options.simulate:
        lines = [iter([simulated(options.simulate)])]
    else:
        lines = [growth()]
    for source in lines:
        for line in source:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
