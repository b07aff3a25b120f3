"""What the defences cost where nobody attacks, as JSON lines.

    python bench/defences.py learning [--seeds 3]      # the final loss, and the CPU time of all nodes together
    python bench/defences.py learning --task text --seeds 1                # the second half of it
    python bench/defences.py growth [--simulate 8]     # what verification takes of a node, as the swarm grows

`learning`, in one process, defences on and off with the same seeds and data: sixteen peers on clusters (IID, and
classes drawn by Dirichlet(0.3); tests/attacks/clusters.py), by the plain mean, by the rules of the open chain, and by
the CenteredClip of `btard`; then eight workers with a small byte-lm, whose contributions are applied as they are, or
judged by every worker, gated and clipped as in an open round. `loss_ratio` is defended / undefended, mean over seeds.

`growth` measures the CPU seconds of an inner step with the model of examples/open.toml, of judging and of measuring
another judge's figures again (`open/judge.py`, `open/recheck.py`), in the trainer process and in this one, with as many
contributions as the chain's rules have a node judge. Audits take the shares that their budgets have. Shares are of the
whole compute: of who judges that round, of a validator, who judges in some, and of the mean node, if a round is so many
steps and no more; and of a validator if a round is a second at least, as the run's `shortest_window` has it.
`--simulate N` counts forward passes in real sessions of N nodes on simnet, to check that.

Times are CPU times, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import trio

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "attacks")]

SIZES = (4, 16, 64)  # nodes
STEPS = (5, 20, 80, 500)  # of a round
CLUSTER_ROUNDS = 40
LM_STEPS, LM_INTERVAL = 480, 80  # as examples/byte-lm.toml has its rounds
TIMED = 30  # steps that warm up
REPEATED = 8  # measurements, of which the first does not count
SUSPECTED = 0.4  # of the rounds in which one sequence calls the last roster suspect: seen with four workers at H = 5


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

    from swarmnode.training.sections import ModelSection

    spent = [0.0]  # CPU seconds of all judges together

    class Undefended(methods.Open):
        """Everything counts in full."""

        def _units(self, round: int, steps: int, raws: list[memoryview]) -> list[int]:
            return [1] * len(raws)

    class Judged(methods.Open):
        """Every worker judges."""

        def _units(self, round: int, steps: int, raws: list[memoryview]) -> list[int]:
            began = time.process_time()
            units = super()._units(round, steps, raws)
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


def cpu_seconds(child: int) -> float:
    """CPU time so far of this process and of one that it started."""
    return time.process_time() + time.clock_gettime((~child << 3) | 2)  # clock_getcpuclockid(3), of a process


class Verified:
    """What a judge does in a round and what a step of training takes, by the daemon's own trainer process."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._round = trainer, 0

    async def step(self, steps: int) -> float:
        """CPU seconds of an inner step, mean over so many."""
        began, self._round = cpu_seconds(self._trainer.pid), self._round + 1
        await self._trainer.train(round=self._round, steps=steps, seconds=float("inf"))
        return (cpu_seconds(self._trainer.pid) - began) / steps

    async def judging(self, contributions: int, trained: int) -> float:
        """CPU seconds of judging a round as one who trained on so many sequences, and of measuring another's again.

        All contributions are decoded as they come, as in a node.
        """
        from dataclasses import replace
        from types import SimpleNamespace

        from swarmnode.protocols.chain.state import genesis, rules_of
        from swarmnode.protocols.methods.open.judge import Evaluator
        from swarmnode.protocols.methods.open.local import LocalTrainer
        from swarmnode.protocols.methods.open.store import Contribution
        from swarmnode.protocols.runner import in_thread
        from swarmnode.training.codecs import codec
        from swarmnode.training.outer import OuterState
        from swarmnode.training.runspec import parse_runspec

        size, rng = self._trainer.layout.parameters, np.random.default_rng(1)
        found = {}
        for number in range(contributions):
            raw = bytes(codec("topk").encode(rng.normal(0, 1e-3, size).astype(np.float32)))
            found[number.to_bytes(32, "big")] = Contribution(raw, 1.0, 0, codec("topk").decode_sparse(raw, size))
        tables = {"inner": {"steps": 1, "batch": trained}, "outer": {"lr": 1.0, "momentum": 0.0}}
        tables["run"] = {"name": "bench", "trust": "open"}
        spec = parse_runspec({**tables, "exchange": {"method": "open", "codec": "topk"}}, source="bench")
        parts: Any = SimpleNamespace(spec=spec, runner=in_thread, ledger=None, trainer=self._trainer)
        local = LocalTrainer(parts)
        chain = replace(genesis("ab" * 32, ("me",), window=60_000), undoable=True)
        state, took = OuterState.start(self._trainer.parameters()), []
        tree: Any = {chain.tip: SimpleNamespace(parent=chain.tip)}
        store: Any = SimpleNamespace(state={chain.tip: state}.get, tree=tree, rules=rules_of(spec.trust))
        for suspect in (-math.inf, math.inf):  # else nothing is measured of the last roster
            began = cpu_seconds(self._trainer.pid)
            judge = Evaluator(local, parts, store, chain, self._round.to_bytes(8, "big"), suspect=suspect)
            await judge.measure(found, dict.fromkeys(found, "peer"), ["peer"])
            took.append(cpu_seconds(self._trainer.pid) - began)
        return SUSPECTED * took[0] + (1 - SUSPECTED) * took[1]


def judged(nodes: int) -> tuple[int, int, int]:
    """Validators, judges of a round, and contributions, where all contribute and all are validators who may be."""
    from swarmnode.protocols.chain.state import genesis, judges, most_validators, rules_of
    from swarmnode.training.sections import TrustSection

    rules = rules_of(TrustSection())
    validators = min(nodes, max(4, most_validators(rules)))
    chain = genesis("ab" * 32, tuple(f"peer-{number:03d}" for number in range(validators)), window=60_000)
    return validators, len(judges(chain)), min(nodes, rules.participants)


async def growth() -> None:
    """Print verification's share of a node's compute: judging, checks of judges, and audits together."""
    from swarmnode.node.trainer.child import TrainerSettings
    from swarmnode.node.trainer.supervisor import TrainerProcess
    from swarmnode.protocols.methods.open.checks.unique import SHARE
    from swarmnode.protocols.methods.open.recheck import CHECKED
    from swarmnode.testing.runtext import RunText
    from swarmnode.training.open_step import sequences_for
    from swarmnode.training.runspec import load_runspec

    folder = tempfile.TemporaryDirectory(prefix="swarmnode-defences-")
    text = RunText(load_runspec(ROOT / "examples" / "open.toml"), Path(folder.name))
    spec, settings = text.spec, TrainerSettings(threads=1, nice=0, **text.files("bench"))
    audits, shortest = spec.trust.audit_share + SHARE, spec.trust.shortest_window
    trainer = TrainerProcess(spec, run_id=spec.run_id, peer_id="bench", settings=settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(trainer.run)
        verified, batch = Verified(trainer), spec.inner.batch
        await verified.step(TIMED)
        for nodes in SIZES:
            validators, count, contributions = judged(nodes)
            for steps in STEPS:
                took: list[tuple[float, float]] = []
                for _ in range(REPEATED):  # in turns, so that what else the machine does falls on both
                    took.append((await verified.step(5), await verified.judging(contributions, steps * batch)))
                step, judging = (median(times) for times in zip(*took[1:], strict=True))
                of_validator = judging * (count / validators + CHECKED)
                trained = steps * step
                known = {
                    "judge_seconds": round(judging, 4),
                    "step_seconds": round(step, 4),
                    "judging": _share(judging, trained),
                    "checking": _share(CHECKED * judging, trained),
                    "audits": round(audits, 4),
                    "all, a judge of the round": _share(judging * (1 + CHECKED) + audits * trained, trained),
                    "all, a validator": _share(of_validator + audits * trained, trained),
                    "all, a node": _share(of_validator * validators / nodes + audits * trained, trained),
                }
                longer = max(trained, shortest)  # offers are that far apart at least, and training goes on
                known["all, a validator, as offers are a second apart"] = _share(of_validator + audits * longer, longer)
                shape = {"nodes": nodes, "judges": count, "steps": steps, "sequences": sequences_for(steps * batch)}
                print(json.dumps({"bench": "defences", **shape, **known}), flush=True)
        nursery.cancel_scope.cancel()
    folder.cleanup()


def _share(spent: float, trained: float) -> float:
    return round(spent / (spent + trained), 4)


def simulated(nodes: int, rounds: int = 8) -> dict[str, Any]:
    """What the average node judges in a round of real sessions on simnet, all of them validators, in forward passes."""
    from simswarm import SimSwarm

    from swarmnode.protocols.methods.open.recheck import CHECKED
    from swarmnode.testing.simnet import run_with_nursery
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

    async def body(nursery: trio.Nursery) -> None:
        names = tuple(f"{number:03d}" if number else "a" for number in range(nodes))
        swarm = SimSwarm(nursery, method="open", validators=names, seconds_per_step=2.0)
        trained[0] = swarm.spec.inner.steps * swarm.spec.inner.batch
        await swarm.start(names[0], wait_peers=nodes - 1)
        for name in names[1:]:
            await swarm.start(name, join=names[0])
        await swarm.round_done(1, *names)
        before = counted[0]
        await swarm.round_done(1 + rounds, *names)
        counted[0] -= before

    SimTrainer.heldout, SimTrainer.gradient = heldout, gradient  # type: ignore[method-assign]
    run_with_nursery(body)
    return {
        "bench": "defences",
        "simulated_nodes": nodes,
        "sequences_trained": trained[0],
        "passes_of_a_node_in_a_round": round(counted[0] / nodes / rounds, 2),
        "by_the_rules": (1 + CHECKED) * BACKWARD * sequences_for(trained[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="what the defences cost where nobody attacks")
    parser.add_argument("what", nargs="?", default="learning", choices=("learning", "growth"))
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
        trio.run(growth)
    for source in lines:
        for line in source:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
