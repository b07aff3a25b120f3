"""A swarm against one node, without a network: the held-out loss that a RunSpec buys, in one process.

    python bench/tune_byte_lm.py examples/byte-lm.toml --rounds 20 --seed 1 --set inner.lr=1e-3 --set outer.lr=1.0

Prints a JSON line for every few rounds: the thorough held-out loss in bits per byte of `--nodes` workers that exchange
their full pseudo-gradients (DiLoCo, no codec) and of one worker with the same inner steps. All chance comes from
the seed, so equal commands print equal losses on one machine; the seconds are of this machine and this moment.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tomllib
from pathlib import Path

import torch
from torch import Tensor

from swarmnode.testing.runtext import RunText
from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.inner import InnerLoop, layout_of
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.tasks import Assignment

DEFAULT_SPEC = Path(__file__).parent.parent / "examples" / "byte-lm.toml"


class Worker:
    """One node's task, parameters and inner loop."""

    def __init__(self, text: RunText, peer_id: str) -> None:
        spec = text.spec
        self.task = ByteLM(spec, Assignment(spec.run_id, peer_id, **text.files(peer_id)))
        self.vector = torch.zeros(layout_of(self.task.model).parameters)  # (P,)
        self.loop = InnerLoop(spec, self.task, peer_id=peer_id, vector=self.vector, keep=False)


class Swarm:
    """Workers and the parameters that they share."""

    def __init__(self, text: RunText, peer_ids: list[str]) -> None:
        self.spec = text.spec
        self.workers = [Worker(text, peer_id) for peer_id in peer_ids]
        self.shared = self.workers[0].vector.clone()  # (P,)
        self.momentum = torch.zeros_like(self.shared)  # (P,)
        self.step_seconds = 0.0
        self.steps = 0

    def round(self, number: int) -> None:
        """Inner steps everywhere, then the outer Nesterov step of DiLoCo (2311.08105, algorithm 1)."""
        inner, outer = self.spec.inner, self.spec.outer
        mean = torch.zeros_like(self.shared)
        for worker in self.workers:
            worker.vector.copy_(self.shared)
            worked = worker.loop.train(round=number, steps=inner.steps, seconds=1e9, between=lambda: False)
            self.step_seconds += worked.seconds
            self.steps += worked.steps
            mean += (self.shared - worker.vector) / len(self.workers)
        self.momentum.mul_(outer.momentum).add_(mean)
        self.shared -= outer.lr * (mean + outer.momentum * self.momentum)

    def heldout(self) -> float:
        """Thorough held-out loss of the shared parameters, bits per byte."""
        first = self.workers[0]
        own: Tensor = first.vector.clone()
        first.vector.copy_(self.shared)
        loss = first.task.evaluate(thorough=True)
        first.vector.copy_(own)
        return loss


def changed(path: Path, seed: int, changes: list[str]) -> RunSpec:
    """The RunSpec at `path` with the seed and each `table.key=value` of `changes` put in."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for change in [*changes, f"run.seed={seed}"]:
        name, _, value = change.partition("=")
        table, _, key = name.partition(".")
        tables.setdefault(table, {}).update(tomllib.loads(f"{key} = {value}"))
    return parse_runspec(tables, source=str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, nargs="?", default=DEFAULT_SPEC, help="run file to start from")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--every", type=int, default=4, help="rounds between two measurements")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="change a key of the run file"
    )
    options = parser.parse_args()
    spec = changed(options.spec, options.seed, options.set)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    peers = [f"node-{number}-of-seed-{options.seed}" for number in range(options.nodes + 1)]
    folder = tempfile.TemporaryDirectory(prefix="swarmnode-tune-")
    text = RunText(spec, Path(folder.name))
    swarm, solo = Swarm(text, peers[:-1]), Swarm(text, peers[-1:])
    started = time.perf_counter()
    for number in range(options.rounds):
        swarm.round(number)
        solo.round(number)
        if (number + 1) % options.every == 0 or number + 1 == options.rounds:
            together, alone = swarm.heldout(), solo.heldout()
            line = {
                "changes": options.set,
                "seed": options.seed,
                "parameters": len(swarm.shared),
                "rounds": number + 1,
                "steps": solo.steps,
                "swarm_bits_per_byte": round(together, 4),
                "solo_bits_per_byte": round(alone, 4),
                "gap": round(alone - together, 4),
                "step_ms": round(1e3 * swarm.step_seconds / swarm.steps, 2),
                "seconds": round(time.perf_counter() - started, 1),
            }
            print(json.dumps(line), flush=True)
    folder.cleanup()


if __name__ == "__main__":
    main()
