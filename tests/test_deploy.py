"""What deploy/ promises, read from its files: images that cache and do not run as root, workers that never share state,
a service that is told when to give up. No container engine is needed.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarmnode.node import exitcodes
from swarmnode.node.config import NodeConfig
from swarmnode.node.host.addresses import Endpoint, parse
from swarmnode.training.options import describe
from swarmnode.training.runspec import load_runspec

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
STATE = "/var/lib/swarmnode"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SEED, WORKER, SAMPLER = (COMPOSE["services"][name] for name in ("seed", "worker", "sampler"))
CUDA: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text(encoding="utf-8"))


def dockerfile() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest) with continued lines joined and comments dropped."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(word.upper(), " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines if line)]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction in dockerfile():
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def service_unit() -> dict[str, list[str]]:
    """The unit's settings by name, in order; a name may stand more than once."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "swarmnode.service").read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def place(stage: list[tuple[str, str]], part: str) -> int:
    [index] = [i for i, (_, rest) in enumerate(stage) if part in rest]
    return index


def options_of(command: str) -> str:
    """The help text of one of our commands."""
    done = subprocess.run(
        [sys.executable, "-m", "swarmnode", command, "--help"],
        env={"PATH": "", "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_image_is_slim_and_leaves_its_compiler_behind() -> None:
    build, final = stages()
    assert all(re.fullmatch(r"python:\$\{PYTHON\}-slim-\w+( AS build)?", stage[0][1]) for stage in (build, final))
    assert not any("gcc" in rest for _, rest in final)
    assert any("--from=build" in rest for word, rest in final if word == "COPY")


def test_the_image_has_its_own_init_and_asks_the_engine_for_none() -> None:
    """Debian's podman has one only among its recommended packages: with `init: true` no container started."""
    final = stages()[1]
    [entry] = [rest for word, rest in final if word == "ENTRYPOINT"]
    assert entry == '["tini", "--", "swarmnode"]'
    assert any("tini" in rest.split() for word, rest in final if word == "RUN")
    assert not any("init" in service for service in COMPOSE["services"].values())


def test_image_runs_as_a_user_that_owns_only_the_state() -> None:
    final = stages()[1]
    words = [word for word, _ in final]
    [user] = [rest for word, rest in final if word == "USER"]
    assert user not in ("root", "0")
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert any(f"--owner={user}" in rest and STATE in rest for _, rest in final)
    assert ("VOLUME", STATE) in final
    assert any(f"SWARMNODE_DATA_DIR={STATE}" in rest for word, rest in final if word == "ENV")


def test_a_change_of_code_installs_no_dependency_again() -> None:
    build = stages()[0]
    order = [
        place(build, "constraints.txt ./"),
        place(build, "--no-deps --index-url"),
        place(build, "pyproject.toml ./"),
        place(build, "--requirement requirements.txt"),
        place(build, "node node"),
        place(build, "--no-build-isolation"),
    ]
    assert order == sorted(order)


def test_torch_wheel_is_chosen_by_a_build_argument_and_is_for_the_cpu_by_default() -> None:
    [default] = [rest for word, rest in dockerfile() if word == "ARG" and rest.startswith("TORCH_INDEX")]
    assert default == "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    assert "TORCH_INDEX" in SEED["build"]["args"]


def test_image_reads_the_dependencies_that_pyproject_declares() -> None:
    [step] = [rest for word, rest in dockerfile() if word == "RUN" and "requirements.txt" in rest]
    [expression] = re.findall(r"python -c '([^']*)'", step)
    ast.parse(expression)
    printed = subprocess.run([sys.executable, "-c", expression], cwd=ROOT, capture_output=True, text=True).stdout
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert printed.splitlines() == declared


def test_everything_the_image_copies_exists_and_reaches_the_builder() -> None:
    admitted = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {
        source
        for word, rest in dockerfile()
        if word == "COPY" and "--from" not in rest
        for source in shlex.split(rest)[:-1]
    }
    assert copied == admitted
    assert all((ROOT / source).exists() for source in copied)
    mapped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert set(mapped) <= copied
    assert load_runspec(ROOT / "examples" / "byte-lm.toml").run.name


def test_workers_can_be_scaled() -> None:
    for service in (SEED, WORKER, SAMPLER):
        assert "container_name" not in service
    for fixed in ("ports", "hostname", "network_mode"):
        assert fixed not in WORKER | SAMPLER


def test_replicas_never_share_a_data_directory() -> None:
    for service in (WORKER, SAMPLER):
        assert service["environment"]["SWARMNODE_DATA_DIR"] == STATE
        assert "volumes" not in service, "each has the image's; podman-compose shares one that is named here"
    assert SEED["volumes"] == [f"seed:{STATE}"]
    volumes = {
        volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service.get("volumes", ())
    }
    assert {volume for volume in volumes if not volume.startswith(".")} == COMPOSE["volumes"].keys()


def test_no_container_tries_for_ever_what_cannot_succeed() -> None:
    for service in (SEED, WORKER, SAMPLER):
        policy, _, tries = service["restart"].partition(":")
        assert policy == "on-failure" and 1 < int(tries) < 100


@pytest.mark.parametrize("run", ["byte-lm", "open", "sapo"])
def test_runs_that_compose_names_are_in_the_image(run: str) -> None:
    assert load_runspec(ROOT / "examples" / f"{run}.toml").run.name
    named = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    assert f"RUN={run} " in named or f"RUN:-{run}" in named


def test_nodes_that_only_sample_join_where_the_profile_asks_for_them() -> None:
    assert SAMPLER["profiles"] == ["rollouts"] and SAMPLER["command"] == WORKER["command"]
    assert SAMPLER["environment"] == WORKER["environment"] | {"SWARMNODE_ROLE": "rollout"}


def test_gpus_come_by_a_file_of_their_own_for_every_node() -> None:
    nodes = {name for name, service in COMPOSE["services"].items() if service["image"] == "swarmnode"}
    assert CUDA["services"].keys() == nodes
    for service in CUDA["services"].values():
        assert service["environment"] == {"SWARMNODE_DEVICE": "cuda"} and service["image"] != "swarmnode"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert CUDA["services"]["seed"]["build"]["args"].keys() == SEED["build"]["args"].keys()


def test_what_watches_the_nodes_starts_only_where_asked_and_finds_its_files() -> None:
    watching = {name for name, service in COMPOSE["services"].items() if service.get("profiles") == ["monitoring"]}
    assert watching == {"prometheus", "grafana"}
    for name in watching:
        for volume in COMPOSE["services"][name]["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file()
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"]["grafana"]["ports"])
    assert COMPOSE["services"]["prometheus"]["network_mode"] == "service:seed", "the metrics are on its loopback"


def test_workers_join_the_seed_by_name_once_it_is_healthy() -> None:
    join = WORKER["command"][WORKER["command"].index("--join") + 1]
    port = describe(NodeConfig)["port"][0].default
    assert join == f"/dns4/seed/tcp/{port}"
    assert parse(join) == Endpoint("dns4", "seed", port, None)
    assert WORKER["depends_on"]["seed"]["condition"] == "service_healthy"
    assert SEED["command"] == ["run", "/etc/swarmnode/${RUN:-byte-lm}.toml"]
    assert ("CMD", '["run", "/etc/swarmnode/byte-lm.toml"]') in stages()[1]


def test_containers_are_asked_for_their_health_and_given_time_to_leave() -> None:
    [image_check] = [rest for word, rest in dockerfile() if word == "HEALTHCHECK"]
    assert image_check.endswith("CMD swarmnode health > /dev/null || exit 1"), "11 is no code that Docker knows"
    for service in (SEED, WORKER, SAMPLER):
        assert image_check.endswith(service["healthcheck"]["test"][1])
        assert service["stop_signal"] == "SIGINT"
        assert int(service["stop_grace_period"].removesuffix("s")) >= 60
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_service_tells_systemd_when_it_is_ready_and_outlives_its_trainer() -> None:
    unit = service_unit()
    assert unit["Type"] == ["notify"] and unit["NotifyAccess"] == ["main"]
    assert 30 <= int(unit["WatchdogSec"][0]) <= 300
    assert unit["OOMPolicy"] == ["continue"]
    assert unit["KillSignal"] == ["SIGINT"]
    assert unit["KillMode"] == ["mixed"]
    assert unit["User"] == ["swarmnode"]


def test_service_does_not_start_again_after_a_mistake_that_stays() -> None:
    codes = {int(code) for code in service_unit()["RestartPreventExitStatus"][0].split()}
    never_mended = {exitcodes.USAGE, exitcodes.CONFIG, exitcodes.DATADIR_BUSY, exitcodes.DATADIR_VERSION}
    assert codes == never_mended | {exitcodes.NO_SPACE}, "a node that was stopped stays stopped, also on a full disk"


def test_service_is_confined() -> None:
    unit = service_unit()
    for setting in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelModules", "RestrictNamespaces"):
        assert unit[setting] == ["yes"], setting
    assert unit["ProtectSystem"] == ["strict"]
    assert "ProtectProc" not in unit, (
        "it would hide the trainer from its own node, and with it the CPU time that it took"
    )
    assert unit["CapabilityBoundingSet"] == [""]
    assert {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"} == set(unit["RestrictAddressFamilies"][0].split())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_service_is_understood_by_systemd(tmp_path: Path) -> None:
    text = (DEPLOY / "swarmnode.service").read_text(encoding="utf-8")
    unit = tmp_path / "swarmnode.service"
    unit.write_text(text.replace("/opt/swarmnode/bin/swarmnode", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert str(unit) not in done.stderr, done.stderr
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_calls_the_service_confined() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", DEPLOY / "swarmnode.service"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"exposure above 2.0: {done.stdout[-200:]}"


def test_variables_are_settings_of_a_node() -> None:
    files = ("Dockerfile", "compose.yaml", "compose.cuda.yaml", "swarmnode.service")
    text = "".join((DEPLOY / name).read_text() for name in files)
    used = {name.lower() for name in re.findall(r"\bSWARMNODE_([A-Z][A-Z_]*)", text)}
    assert used
    assert used <= describe(NodeConfig).keys()


def test_commands_and_options_used_here_exist() -> None:
    commands = [SEED["command"], WORKER["command"], ["health"]]
    commands += [shlex.split(line)[1:] for line in service_unit()["ExecStart"]]
    assert all(command[0] in ("run", "health") for command in commands)
    for command in commands:
        helped = options_of(command[0])
        assert all(word in helped for word in command if word.startswith("--"))
