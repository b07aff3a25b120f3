"""The same training by real nodes: daemons on loopback, by `swarmnode local`, until they took as many steps.

    found = by_daemons(spec, nodes=4, steps=600)      # {"loss": 2.1, "steps": 612, "rounds": 134, ...}

The loss is what `swarmnode evaluate` says of the shared parameters then, measured as learned/workers.py measures it,
and on the same text: the run file names the hash of what is held out there, and no node begins with any other.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from swarmnode.cli.local.run import ask_for_heldout_loss
from swarmnode.testing.runtext import RunText
from swarmnode.training.runspec import RunSpec, to_toml

NO_END = 10**6  # rounds


def by_daemons(spec: RunSpec, *, nodes: int, steps: int) -> dict[str, Any]:
    """What came of a run after `steps` inner steps of the mean node. Raises RuntimeError where the swarm failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        file = Path(folder) / "run.toml"
        heldout = RunText(spec, Path(folder) / "text").spec.task.heldout_sha256
        file.write_text(to_toml(spec.updated(task={"heldout_sha256": heldout})), encoding="utf-8")
        options = ["--nodes", str(nodes), "--rounds", str(NO_END), "--json"]
        options += ["--report", f"{folder}/report", "--data-dir", f"{folder}/nodes"]
        command = [sys.executable, "-m", "swarmnode", "local", *options, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as swarm:
            assert swarm.stdout is not None
            done, sent, first = 0, 0, Path()
            hashes: defaultdict[int, set[str]] = defaultdict(set)
            losses: dict[int, float] = {}
            for event in map(json.loads, swarm.stdout):
                if event["event"] == "node" and event["node"] == 0:
                    first = Path(event["data_dir"])
                elif event["event"] == "round":
                    done, sent = done + event["steps"], sent + event["bytes_out"]
                    hashes[event["round"]].add(event["state_hash"])
                    if event["loss"] is not None:
                        losses[event["round"]] = event["loss"]
                    if done >= nodes * steps:
                        break
            else:
                raise RuntimeError(
                    f"the swarm ended after {done / nodes:.0f} of {steps} steps; try it by hand: {command}"
                )
            loss = ask_for_heldout_loss(first)
            swarm.send_signal(signal.SIGINT)
    return {
        "heldout": heldout,
        "loss": round(loss, 5),
        "curve": sorted(losses.items()),  # by the quick measurement of rounds
        "rounds": len(hashes),
        "steps": round(done / nodes, 1),
        "bytes_per_node": round(sent / nodes),
        "hashes_agree": all(len(told) == 1 for told in hashes.values()),
        "seconds": round(time.monotonic() - began, 1),
    }
