#!/usr/bin/env python3
"""Six nodes on this machine, five of them behind NATs, train a model together; you watch.

    sudo .venv/bin/python deploy/netlab/swarm.py [RUN.toml]

One node is on the laboratory's internet and relays, two are behind cones, two behind symmetric NATs, and one behind
two NATs. Needs root and Debian's iproute2, nftables, conntrack and ethtool; nothing leaves the machine. Every few
seconds a table says how each node can be reached, and how it reaches the others. Ctrl-C ends and removes everything;
the data directories stay in the folder that is named at the start, with a log beside each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "netlab"))

from lab import Host, Lab, Link, why_not  # noqa: E402 (found in the folder above)

RUN = ROOT / "examples" / "byte-lm.toml"
PROGRAM = Path(sys.executable).with_name("swarmnode")
PORT = 4077
HOME = Link(delay=0.01, rate=100)  # 20 ms to the public node and back, 100 Mbit/s
LOOK_EVERY = 5.0  # s
END_WITHIN = 15.0  # s for all nodes to leave in order
START_WITHIN = 120.0  # s until a node answers
HEADER = f"{'node':<12}{'behind':<14}{'reachability':<14}{'direct':>7}{'relayed':>9}{'round':>7}{'loss':>8}"


def build(lab: Lab) -> dict[str, tuple[Host, str]]:
    """The six machines, by name, and what each is behind; the public one first."""
    carrier = lab.nat("carrier", link=HOME)
    return {
        "public": (lab.public("public", HOME), "nothing"),
        "cone-1": (lab.private("cone-1", lab.nat("router1", link=HOME)), "cone"),
        "cone-2": (lab.private("cone-2", lab.nat("router2", link=HOME)), "cone"),
        "symmetric-1": (lab.private("symmetric-1", lab.nat("router3", "symmetric", link=HOME)), "symmetric"),
        "symmetric-2": (lab.private("symmetric-2", lab.nat("router4", "symmetric", link=HOME)), "symmetric"),
        "double": (lab.private("double", lab.nat("router5", behind=carrier)), "two cones"),
    }


def start(host: Host, folder: Path, *arguments: str | Path) -> subprocess.Popen[bytes]:
    """A node on a machine; its log is beside its data directory."""
    command = [*host.enter, PROGRAM, "run", *arguments, "--data-dir", folder / host.name, "--port", str(PORT)]
    command += ["--threads", "1", "--nice", "0", "--no-mdns"]
    with (folder / f"{host.name}.log").open("wb") as log:
        return subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for this program, which then ends the nodes in order
        )


def end(nodes: list[subprocess.Popen[bytes]]) -> None:
    """Let all leave in order; whoever takes too long is killed with the laboratory."""
    for node in nodes:
        node.send_signal(signal.SIGINT)
    give_up = time.monotonic() + END_WITHIN
    for node in nodes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(max(0.0, give_up - time.monotonic()))


def status(home: Path) -> dict[str, Any] | None:
    """What `swarmnode status` says of the node there; None where it does not answer."""
    command = [str(PROGRAM), "status", "--json", "--data-dir", str(home)]
    done = subprocess.run(command, capture_output=True, text=True)
    told: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return told


def await_run(process: subprocess.Popen[bytes], home: Path) -> dict[str, Any]:
    """The node's status once it has a run."""
    give_up = time.monotonic() + START_WITHIN
    while time.monotonic() < give_up and process.poll() is None:
        told = status(home)
        if told is not None and told["run"] is not None and told["addresses"]:
            return told
        time.sleep(0.5)
    raise SystemExit(f"the first node did not start:\n{home.with_suffix('.log').read_text()[-2000:]}")


def line(name: str, behind: str, told: dict[str, Any] | None) -> str:
    if told is None:
        return f"{name:<12}{behind:<14}does not answer (yet)"
    run, peers = told["run"] or {}, told["peers"]
    round, loss = run.get("round"), run.get("loss")
    return (
        f"{name:<12}{behind:<14}{told['reachability']:<14}{peers['direct']:>7}{peers['relayed']:>9}"
        f"{round if round is not None else '–':>7}{f'{loss:.3f}' if loss is not None else '–':>8}"
    )


def main(run: Path) -> None:
    if (reason := why_not()) is not None:
        raise SystemExit(f"no network laboratory here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="swarmnode-netlab-"))
    print(f"data directories and logs are in {folder}")
    with ExitStack() as stack:
        machines = build(stack.enter_context(Lab()))
        seed = machines["public"][0]
        nodes: list[subprocess.Popen[bytes]] = []
        stack.callback(end, nodes)
        first = start(seed, folder, run.absolute(), "--wait-peers", str(len(machines) - 1), "--wait-seconds", "120")
        nodes.append(first)
        told = await_run(first, folder / seed.name)
        join = f"/ip4/{seed.address}/tcp/{PORT}/p2p/{told['peer_id']}"
        for host, _ in machines.values():
            if host is not seed:
                nodes.append(start(host, folder, "--join", join, "--run", told["run"]["run_id"]))
        cone = machines["cone-1"][0]
        print(f"look closer:\n  {PROGRAM} peers --data-dir {folder / cone.name}\n  {' '.join(cone.enter)} bash")
        while True:
            print(f"\n{HEADER}")
            for name, (_, behind) in machines.items():
                print(line(name, behind, status(folder / name)), flush=True)
            time.sleep(LOOK_EVERY)


if __name__ == "__main__":
    os.environ.pop("SWARMNODE_DATA_DIR", None)
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else RUN)
    except KeyboardInterrupt:
        print("\neverything is taken down")
