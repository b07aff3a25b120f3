"""The doctor's verdicts: each with what to do, and none that cannot be known."""

from __future__ import annotations

import errno
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode import __version__
from swarmnode.node import doctor
from swarmnode.node.config import NodeConfig

STATUS: dict[str, Any] = {
    "version": __version__,
    "run": {"name": "tiny", "phase": "training"},
    "role": "train",
    "peers": {"connected": 1},
    "problems": [],
    "warnings": [],
    "addresses": ["/ip4/127.0.0.1/tcp/1"],
    "clock_off_s": 0.2,
}
NETCHECK: dict[str, Any] = {"reachability": "public", "nat": "none", "relays": [], "problems": []}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `diagnose` finds, by what it is about; torch is not started."""
    told = '{"torch": "2.9", "gpus": [], "enforced": ["files"], "missing": []}'
    monkeypatch.setattr("swarmnode.node.doctor.subprocess.run", lambda *_, **__: SimpleNamespace(stdout=told))
    monkeypatch.setattr(doctor, "glob", lambda pattern: [])
    monkeypatch.setattr(doctor, "source_towards", lambda host: "192.0.2.7")

    def look(
        status: Any = None, netcheck: Any = None, silent: str = "", **config: Any
    ) -> dict[str, list[doctor.Diagnosis]]:
        there: dict[str, list[doctor.Diagnosis]] = {}
        settings = NodeConfig(**{"data_dir": str(tmp_path / "node"), "port": 0, **config})
        for each in doctor.diagnose(settings, status, netcheck, silent):
            there.setdefault(each.what, []).append(each)
            assert each.verdict == "ok" or each.do or each.what in ("clock", "node"), each
        return there

    return look


def verdicts(there: dict[str, list[doctor.Diagnosis]], what: str) -> list[str]:
    return [each.verdict for each in there[what]]


def test_a_machine_that_is_well_hears_so_with_and_without_a_node(found: Any, tmp_path: Path) -> None:
    for there in (found(), found(STATUS, NETCHECK)):
        for what in ("versions", "node", "port", "network", "device", "sandbox"):
            assert verdicts(there, what) == ["ok"], there[what]
    assert list(tmp_path.iterdir()) == []  # what measured the disk is gone


def test_a_node_that_does_not_answer_is_bad(found: Any) -> None:
    assert [each.says for each in found(silent="it stands still")["node"] if each.verdict == "bad"] == [
        "it stands still"
    ]


def test_what_a_running_node_knows_is_told(found: Any) -> None:
    problem = {"problems": ["the disk is full"], "warnings": ["the disk is full", "few judges"], "clock_off_s": -300.0}
    ways = [{"problem": "the clock is wrong", "advice": "set it"}, {"problem": "no UPnP", "advice": "open the port"}]
    cut_off = NETCHECK | {"reachability": "private", "clock": "the clock is wrong", "problems": ways}
    there = found(STATUS | problem | {"version": "0.0.1"}, cut_off)
    assert verdicts(there, "node") == ["bad", "warn"] and verdicts(there, "versions") == ["warn"]
    assert verdicts(there, "clock") == ["bad"] and "300.0 s ahead of" in there["clock"][0].says
    assert verdicts(there, "network") == ["warn", "warn"] and there["network"][1].do == "open the port"


def test_a_machine_without_a_network_hears_so(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "source_towards", lambda host: None)
    unknown = NETCHECK | {"reachability": "unknown"}
    for there, said in ((found(), ["warn"]), (found(STATUS, unknown), ["warn", "warn"])):
        assert verdicts(there, "network") == said and "no way leads out" in there["network"][0].says


def test_a_port_that_is_taken_a_disk_and_a_memory_that_are_full(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        there = found(listen="127.0.0.1", port=other.getsockname()[1])
        assert verdicts(there, "port") == ["bad"] and "--port" in there["port"][0].do
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        taken = {"listen": "127.0.0.1", "port": other.getsockname()[1]}
        assert verdicts(found(**taken), "port") == ["warn"] and verdicts(found(**taken, quic=False), "port") == ["ok"]
    monkeypatch.setattr(
        "swarmnode.training.memory.Machine.here", lambda folder, device: SimpleNamespace(memory=1e8, disk=3e9)
    )
    there = found()
    assert verdicts(there, "memory") == ["bad"] and verdicts(there, "disk")[0] == "warn"


def test_a_disk_that_takes_nothing_is_told_and_the_other_checks_go_on(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    there = found()
    assert there["disk"][1].says.endswith("cannot be written: Read-only file system") and there["memory"]


def test_how_connections_send_is_told_with_what_would_mend_it(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.node.host.tcp.CONGESTION", b"reno")  # which every Linux allows
    assert verdicts(found(), "sending") == ["ok"]
    monkeypatch.setattr("swarmnode.node.host.tcp.sends_by", lambda tcp: "cubic")
    told = found()["sending"][0]
    assert told.verdict == "warn" and "by cubic" in told.says and "tcp_bbr" in told.do


def test_devices_and_sandbox_are_those_that_a_trainer_finds(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(found(device="cuda"), "device") == ["bad"]
    assert verdicts(found(sandbox="off"), "sandbox") == ["warn"]
    monkeypatch.setattr(doctor, "glob", lambda pattern: ["/dev/nvidia0"])
    assert "/dev/nvidia0 is there" in found()["device"][0].says
    assert "CPU build of torch" in found()["device"][0].do and "nvidia-modprobe" in found()["device"][0].do

    def fails(*_: Any, **__: Any) -> Any:
        raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nModuleNotFoundError: torch")

    monkeypatch.setattr("swarmnode.node.doctor.subprocess.run", fails)
    assert "ModuleNotFoundError: torch" in found()["torch"][0].says
