"""What a machine brings for a node, and what is wrong with it: the checks of `swarmnode doctor`.

They need no running node. Where one runs, its answers to `status` and `netcheck` are used, since it has measured what a
look from outside can only guess. Torch and the sandbox are tried in a process of their own, as in a trainer.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from swarmnode import __version__
from swarmnode.node.config import NodeConfig
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.host.addresses import listening, source_towards
from swarmnode.training.memory import Machine
from swarmnode.training.options import number_of

OK, WARN, BAD = "ok", "warn", "bad"
GB = 1e9
DISK_BAD, DISK_WARN = 1 * GB, 5 * GB  # free bytes
MEMORY_BAD, MEMORY_WARN = 0.5 * GB, 2 * GB  # free bytes; a daemon takes 0.2 GB, a small trainer 0.4 GB
SLOW_DISK = 10e6  # bytes/s
SAMPLE = 16 << 20  # bytes that are written to measure that
OUTSIDE = "192.0.2.1", "2001:db8::1"  # addresses of nobody (RFC 5737, RFC 3849), elsewhere in the internet
CLOCK_OFF = 5.0  # s by which peers may see this clock off
SET_CLOCK = "set the clock, or switch on its service: timedatectl set-ntp true"
TIME_ERROR = 5  # adjtimex: nobody sets this clock
PYTHONS = ((3, 11), (3, 13))
TRIAL = 120.0  # s for torch to start
_TRY = """
import json, os
from swarmnode.training.sandbox import Rules, enter
report = enter(Rules(scratch=os.environ["TMPDIR"]))
import torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
missing = [f"{each.part}: {each.why}" for each in report.missing]
told = {"torch": torch.__version__, "gpus": gpus, "enforced": report.enforced, "missing": missing}
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Diagnosis:
    what: str
    verdict: str  # ok, warn or bad
    says: str
    do: str = ""  # what to do about it


def diagnose(
    config: NodeConfig, status: dict[str, Any] | None, netcheck: dict[str, Any] | None, silent: str = ""
) -> Iterator[Diagnosis]:
    """All checks of this machine and the node there, one after another; blocking, some seconds in all.

    `status` and `netcheck`: what the running node answers; None where none runs. `silent`: why one does not answer.
    """
    yield _versions(status)
    yield from [Diagnosis("node", BAD, silent)] if silent else _node(status)
    yield _clock(status)
    yield from _storage(config.directory)
    yield _port(config, status)
    yield _congestion()
    yield from _network(netcheck)
    yield from _trainer(config)


def _versions(status: dict[str, Any] | None) -> Diagnosis:
    says = f"swarmnode {__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    if status is not None and status["version"] != __version__:
        says += f"; the running node is {status['version']}"
        return Diagnosis("versions", WARN, says, "swarmnode stop, then run")
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1] or platform.system() != "Linux":
        return Diagnosis("versions", WARN, says, "tested are Python 3.11 to 3.13 on Linux")
    return Diagnosis("versions", OK, says)


def _node(status: dict[str, Any] | None) -> Iterator[Diagnosis]:
    if status is None:
        yield Diagnosis("node", OK, "none is running here; what only a running one knows is left out")
        return
    run, problems = status["run"], status["problems"]
    doing = f"run {run['name']}, {run['phase']}" if run is not None else f"role {status['role']}, in no run"
    if not problems:
        yield Diagnosis("node", OK, f"running: {doing}, {number_of(status['peers']['connected'], 'peer')}")
    for problem in problems:
        yield Diagnosis("node", BAD, problem, "swarmnode health watches this, swarmnode logs tells more")
    for notice in status["warnings"]:
        if notice not in problems:
            yield Diagnosis("node", WARN, notice)


def _clock(status: dict[str, Any] | None) -> Diagnosis:
    off = status.get("clock_off_s") if status is not None else None
    if off is not None:
        says = f"{abs(off):.1f} s {'behind' if off > 0 else 'ahead of'} the peers' (their median)"
        return Diagnosis("clock", *((BAD, says, SET_CLOCK) if abs(off) > CLOCK_OFF else (OK, says)))
    nobody = "too few peers tell the time" if status is not None else "no node runs that could ask peers"
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        state = -1
    if state == TIME_ERROR:
        says = f"nothing on this machine keeps it right, and {nobody}; a clock that is minutes off keeps a node out"
        return Diagnosis("clock", WARN, says, f"compare {time.strftime('%H:%M:%S')} with another clock; set up NTP")
    says = "the system keeps it right" if state >= 0 else "the system does not say whether it is right"
    return Diagnosis("clock", OK if state >= 0 else WARN, f"{says}; {nobody}")


def _storage(directory: Path) -> Iterator[Diagnosis]:
    folder = next(each for each in (directory, *directory.parents) if each.is_dir())
    machine = Machine.here(str(folder), None)
    free = f"{machine.disk / GB:.1f} GB free in {folder}"
    verdict = BAD if machine.disk < DISK_BAD else WARN if machine.disk < DISK_WARN else OK
    yield Diagnosis("disk", verdict, free, "" if verdict == OK else "free some, or name another place: --data-dir")
    try:
        began = time.monotonic()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(SAMPLE))
            file.flush()
            os.fsync(file.fileno())
        rate = SAMPLE / max(time.monotonic() - began, 1e-9)
        slow = "checkpoints take long; write them less often (--checkpoint-every) or use another disk (--data-dir)"
        says = f"writes {rate / 1e6:.0f} MB/s"
        yield Diagnosis("disk", OK, says) if rate >= SLOW_DISK else Diagnosis("disk", WARN, says, slow)
    except OSError as error:
        yield Diagnosis("disk", BAD, f"{folder} cannot be written: {error.strerror}", "name another one: --data-dir")
    verdict = BAD if machine.memory < MEMORY_BAD else WARN if machine.memory < MEMORY_WARN else OK
    advice = "" if verdict == OK else "close other programs; swarmnode plan RUN.toml says what a run needs"
    yield Diagnosis("memory", verdict, f"{machine.memory / GB:.1f} GB free", advice)


def _port(config: NodeConfig, status: dict[str, Any] | None) -> Diagnosis:
    if status is not None:
        told = len(status["addresses"])
        return Diagnosis("port", OK, f"the node listens; it tells others {told} address{'es' * (told != 1)}")
    from swarmnode.node.host.libp2p_host import check_free  # which loads the network library

    try:
        for place in (places := listening(config.listen, config.port)):
            check_free(place)
    except ExpectedError as error:
        return Diagnosis("port", BAD, *str(error).split("; ", 1))
    try:
        for place in places if config.quic else ():
            check_free(place.replace("/tcp/", "/udp/"))
    except ExpectedError:
        says = f"UDP port {config.port} is in use by another program, so a node does without QUIC here"
        return Diagnosis("port", WARN, says, "choose another with --port")
    return Diagnosis("port", OK, f"port {config.port} on {config.listen} is free")


def _congestion() -> Diagnosis:
    from swarmnode.node.host.tcp import CONGESTION, sends_by  # which loads the network library

    with socket.socket() as trial:
        control = sends_by(trial)
    if control in ("", CONGESTION.decode()):
        return Diagnosis("sending", OK, f"paced by {control}" if control else "by what the system chooses")
    says = f"by {control}, which uses a part only of a long link that loses packets: BBR is not to be had here"
    allow = 'sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'
    return Diagnosis("sending", WARN, says, f"as root: modprobe tcp_bbr && {allow}")


def _network(netcheck: dict[str, Any] | None) -> Iterator[Diagnosis]:
    if not any(map(source_towards, OUTSIDE)):
        says = "no way leads out of this machine: it has no network, or no route to the internet"
        yield Diagnosis("network", WARN, says, "connect it; until then a node meets only those of its own network")
    elif netcheck is None:
        yield Diagnosis("network", OK, "whether others can dial in is known once a node runs: swarmnode netcheck")
    if netcheck is None:
        return
    says = f"{netcheck['reachability']}, NAT {netcheck['nat']}, {number_of(len(netcheck['relays']), 'relay')}"
    reached = netcheck["reachability"] in ("public", "relayed")
    yield Diagnosis("network", OK if reached else WARN, says, "" if reached else "swarmnode netcheck tells more")
    for each in netcheck["problems"]:
        if each["problem"] != netcheck.get("clock"):  # which has a line of its own
            yield Diagnosis("network", WARN, each["problem"], each["advice"])


def _trainer(config: NodeConfig) -> Iterator[Diagnosis]:
    """Torch, devices and sandbox, as a trainer would find them."""
    try:
        with tempfile.TemporaryDirectory(prefix="swarmnode-doctor-") as scratch:
            environ = {**os.environ, "TMPDIR": scratch}
            trial = [sys.executable, "-P", "-c", _TRY]
            done = subprocess.run(trial, capture_output=True, text=True, timeout=TRIAL, check=True, env=environ)
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        yield Diagnosis("torch", BAD, f"does not start: {lines[-1] if lines else error}", "install swarmnode again")
        return
    seen = ", ".join(told["gpus"])
    says = f"torch {told['torch']}, {os.cpu_count()} CPU cores, {seen or 'no GPU that torch sees'}"
    there = glob("/dev/nvidia[0-9]*")
    if there and not told["gpus"]:
        advice = "this is a CPU build of torch, or the driver is too old for it: pytorch.org tells which one fits"
        advice += "; or /dev/nvidia-uvm is missing, which nvidia-modprobe -u -c=0 makes after each start of the machine"
        yield Diagnosis("device", WARN, f"{says}, though {', '.join(sorted(there))} is there", advice)
    elif config.device == "cuda" and not told["gpus"]:
        yield Diagnosis("device", BAD, f"{says}, and --device cuda asks for one", "leave it out, or install a driver")
    else:
        yield Diagnosis("device", OK, says)
    missing = "; ".join(told["missing"])
    if config.sandbox == "off":
        yield Diagnosis("sandbox", WARN, "switched off by --sandbox off", "leave that out, unless you must")
    elif missing:
        verdict = BAD if config.sandbox == "require" else WARN
        yield Diagnosis("sandbox", verdict, f"not whole: {missing}", "a newer kernel has it; containers may forbid it")
    else:
        yield Diagnosis("sandbox", OK, f"the kernel enforces {', '.join(told['enforced'])}")
