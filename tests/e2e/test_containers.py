"""The image and deploy/compose.yaml for real, where podman, podman-compose 1.1 or newer and the image are.

    podman build -f deploy/Dockerfile -t swarmnode .
    .venv/bin/pytest tests/e2e/test_containers.py
    CONTAINER_IMAGE=localhost/other .venv/bin/pytest tests/e2e/test_containers.py

The image is not built here: that takes the internet and minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from realnodes import RUN_TOML, until

ROOT = Path(__file__).resolve().parents[2]
IMAGE = os.environ.get("CONTAINER_IMAGE", "localhost/swarmnode")
PLACES = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
COMPOSE = shutil.which("podman-compose", path=PLACES) or ""
PATIENCE = 300.0  # s for a swarm of four to have trained three rounds
STOP_WITHIN = 20.0  # s
NODES = 4


def why_not() -> str | None:
    """Why there are no containers here; None where there are."""
    if shutil.which("podman") is None or not COMPOSE:
        return "podman or podman-compose is not on this machine"
    told = subprocess.run([COMPOSE, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"composer? version\s+(\d+)\.(\d+)", told)
    if version is None or (int(version[1]), int(version[2])) < (1, 1):
        return f"{COMPOSE} is older than 1.1, which knows no profiles: pip install podman-compose"
    if subprocess.run(["podman", "image", "exists", IMAGE], capture_output=True).returncode != 0:
        return f"there is no image {IMAGE}: podman build -f deploy/Dockerfile -t swarmnode ."
    return None


reason = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(reason is not None, reason=reason or "")]


def podman(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, f"{arguments}: {done.returncode} {done.stdout} {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """podman-compose with a project of its own and a small run; everything is deleted afterwards."""
    folder = tmp_path_factory.mktemp("compose")
    (folder / "tiny.toml").write_text(RUN_TOML)
    folder.chmod(0o755)
    more = folder / "more.yaml"
    volumes = ["seed:/var/lib/swarmnode", f"{folder}/tiny.toml:/etc/swarmnode/tiny.toml:ro"]
    more.write_text(json.dumps({"services": {"seed": {"volumes": volumes}}}))
    command = [COMPOSE, "-p", "swarmnodetest", "-f", str(ROOT / "deploy" / "compose.yaml"), "-f", str(more)]

    def run(*arguments: str, file: str = "tiny") -> None:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "RUN": file}
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        yield run
    finally:
        clear(run)


def clear(run: Callable[..., None]) -> None:
    # `down` of podman-compose forgets all workers but the first; the others depend on the seed.
    for name in sorted(containers(), key=lambda name: "_seed_" in name):
        podman("rm", "--force", "--volumes", "--time", "30", name)
    run("down", "--volumes")


def containers() -> list[str]:
    return sorted(podman("ps", "-a", "--filter", "name=swarmnodetest", "--format", "{{.Names}}").split())


def status(container: str) -> dict[str, Any]:
    done = subprocess.run(
        ["podman", "exec", container, "swarmnode", "status", "--json"], capture_output=True, text=True, timeout=60
    )
    told: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"run": None}
    return told


def trained(rounds: int) -> bool:
    """Whether all have that many rounds of one run."""
    told = [status(name)["run"] for name in containers()]
    return len(told) == NODES and all(run and (run["round"] or 0) >= rounds for run in told)


def test_four_containers_train_stop_in_time_and_come_back_with_their_state(compose: Callable[..., None]) -> None:
    compose("up", "-d", "--no-build", "--scale", f"worker={NODES - 1}")
    until(lambda: trained(3), within=PATIENCE)
    names = containers()
    before = {name: status(name) for name in names}
    assert len({told["run"]["run_id"] for told in before.values()}) == 1
    assert len({told["peer_id"] for told in before.values()}) == NODES, "no two share a volume"
    for name in names:
        [inspected] = json.loads(podman("inspect", name))
        assert inspected["RestartCount"] == 0 and inspected["HostConfig"]["ReadonlyRootfs"]
        podman("healthcheck", "run", name)
        last = (
            podman("logs", "--tail", "1", name)
            or subprocess.run(["podman", "logs", "--tail", "1", name], capture_output=True, text=True).stderr
        )
        assert json.loads(last)["run"] == before[name]["run"]["run_id"]

    began = time.monotonic()
    podman("stop", "--time", "90", *names)
    assert time.monotonic() - began <= STOP_WITHIN
    for name in names:
        assert json.loads(podman("inspect", name))[0]["State"]["ExitCode"] == 0

    podman("start", *names)
    until(lambda: trained(max(told["run"]["round"] for told in before.values()) + 1), within=PATIENCE)
    for name in names:
        after = status(name)
        assert after["peer_id"] == before[name]["peer_id"]
        assert after["run"]["run_id"] == before[name]["run"]["run_id"]


@pytest.mark.parametrize(("file", "profile", "nodes"), [("open", (), 2), ("sapo", ("--profile", "rollouts"), 3)])
def test_runs_among_strangers_and_by_rollouts_train_in_containers(
    compose: Callable[..., None], file: str, profile: tuple[str, ...], nodes: int
) -> None:
    clear(compose)
    compose(*profile, "up", "-d", "--no-build", file=file)

    def train() -> bool:
        told = {name: status(name) for name in containers()}
        members = [each["run"] for name, each in told.items() if "sampler" not in name]
        same = {each["run"]["run_id"] for each in told.values() if each["run"]}
        every = len(told) == nodes and all(each["run"] for each in told.values()) and len(same) == 1
        return every and all(run["name"] == file and (run["round"] or 0) >= 2 for run in members)

    until(train, within=PATIENCE)
    assert all(json.loads(podman("inspect", name))[0]["RestartCount"] == 0 for name in containers())


def test_a_node_that_cannot_start_is_given_up(compose: Callable[..., None]) -> None:
    name = "swarmnodetest_mistaken"
    podman("run", "-d", "--name", name, "--restart", "on-failure:10", IMAGE, "run", "--no-such-option")
    try:

        def over() -> bool:
            [told] = json.loads(podman("inspect", name))
            return told["State"]["Status"] == "exited" and told["RestartCount"] == 10

        until(over, within=PATIENCE)
        time.sleep(5)
        assert over() and json.loads(podman("inspect", name))[0]["State"]["ExitCode"] == 2
    finally:
        podman("rm", "-f", "-v", name)
