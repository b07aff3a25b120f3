"""The trainer's sandbox refuses what it promises to, in real processes; without it the same attempts succeed."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from escapes import PERMITTED

from swarmnode.training.sandbox import MissingPart, SandboxReport, landlock, seccomp
from swarmnode.training.worker import Worker

ESCAPES = Path(__file__).parents[1] / "support" / "escapes.py"
OPEN_WITHOUT_LANDLOCK = {  # what seccomp cannot tell from what a trainer needs
    "read a secret",
    "make a file outside",
    "change a file outside",
    "delete a file outside",
    "make a directory outside",
    "link to its own from outside",
    "link from its own to outside",
    "make a FIFO of its own",
    "move its own file outside",
}
needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "victim").write_text("x")
    (outside / "secret").write_bytes(b"secret")
    return {"secret": str(outside / "secret"), "outside": str(outside), "inside": str(inside)}


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = filter(None, (str(ESCAPES.parent), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", f"from swarmnode.training import sandbox\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def escapes(places: dict[str, str], port: int, **rules: Any) -> dict[str, Any]:
    given = {"rules": {"scratch": places["inside"], **rules}, "port": port, **places}
    done = subprocess.run([sys.executable, ESCAPES, json.dumps(given)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@needs_landlock
def test_who_took_over_a_trainer_reaches_nothing_but_its_own_directory(places: dict[str, str], port: int) -> None:
    told = escapes(places, port)
    assert told["report"]["missing"] == []
    done = {name for name, result in told["results"].items() if result == "done"}
    assert done == set(PERMITTED), told["results"]
    assert set(told["results"].values()) <= {"done", "EPERM", "EACCES"}
    assert sorted(os.listdir(places["outside"])) == ["secret", "victim"]


def test_every_attempt_succeeds_without_the_sandbox(places: dict[str, str], port: int) -> None:
    told = escapes(places, port, mode="off")
    assert told["report"]["missing"][0]["part"] == "sandbox"
    failed = {name: result for name, result in told["results"].items() if result != "done"}
    assert set(failed) <= {"trace its parent"}  # some machines forbid it to everybody


@needs_landlock
def test_files_of_the_task_can_be_read_and_not_changed(places: dict[str, str], port: int) -> None:
    results = escapes(places, port, readable=[places["outside"]])["results"]
    assert results["read a secret"] == "done"
    assert {results[name] for name in OPEN_WITHOUT_LANDLOCK - {"read a secret"}} == {"EACCES"}


@needs_landlock
def test_one_of_several_ranks_has_sockets_and_nobody_to_connect_to(places: dict[str, str], port: int) -> None:
    told = escapes(places, port, ranks=2)
    done = {name for name, result in told["results"].items() if result == "done"}
    if told["report"]["missing"]:  # this system gives it no network of its own, and it says so
        (missing,) = told["report"]["missing"]
        assert missing["part"] == "network"
        done -= {"connect to a host"}
    else:
        assert told["results"]["connect to a host"] == "ECONNREFUSED"  # nobody listens in its own network
    assert done == {*PERMITTED, "open a datagram socket"}, told["results"]


def test_ranks_without_a_network_of_their_own_are_named_and_refused_where_all_is_required() -> None:
    code = (
        "def refused():\n    raise PermissionError(1, 'x')\nsandbox.system.make_own_network = refused\n"
        "sandbox.system.has_own_network = lambda: False\n"
        "rules = sandbox.Rules(mode='require', ranks=2)\nsandbox.leave_network(rules)\n"
        "report = sandbox.enter(rules)\nprint(bool(report.missing), [lacking.part for lacking in report.missing])"
    )
    assert python(code).stdout.startswith("True ['network'")


def test_a_kernel_without_landlock_enforces_the_rest_and_the_report_says_what_is_missing(
    places: dict[str, str], port: int
) -> None:
    given = {"rules": {"scratch": places["inside"]}, "port": port, **places}
    code = (
        "import escapes\nfrom swarmnode.training.sandbox import landlock\nlandlock.version = lambda: 0\nescapes.main()"
    )
    told = json.loads(python(code, json.dumps(given)).stdout)
    ((missing),) = told["report"]["missing"]
    assert missing["part"] == "files" and "Landlock" in missing["why"]
    assert "programs, sockets and signals" in told["report"]["enforced"]
    refused = {name for name, result in told["results"].items() if result != "done"}
    assert refused == set(told["results"]) - set(PERMITTED) - OPEN_WITHOUT_LANDLOCK


def test_an_architecture_without_a_filter_is_named() -> None:
    code = (
        "from swarmnode.training.sandbox import seccomp\nseccomp.platform.machine = lambda: 'vax'\n"
        "print([lacking.part for lacking in sandbox.enter(sandbox.Rules()).missing])"
    )
    assert "programs, sockets and signals" in python(code).stdout


def test_threads_that_began_before_are_named() -> None:
    code = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print([lacking.part for lacking in sandbox.enter(sandbox.Rules()).missing])"
    )
    assert python(code).stdout.strip() == "['threads']"


def test_nothing_that_starts_threads_is_imported_before_the_sandbox() -> None:
    code = (
        "import os, sys\nimport swarmnode.training.confined\n"
        "print({'numpy', 'torch'} & set(sys.modules), len(os.listdir('/proc/self/task')))"
    )
    assert python(code).stdout.strip() == "set() 1"


def test_filters_of_both_architectures_refuse_the_same_and_stay_small() -> None:
    for machine in ("x86_64", "aarch64"):
        for tcp in (False, True):
            for cuda in (False, True):
                code = seccomp.program(machine, pid=1234, tcp=tcp, cuda=cuda)
                assert len(code) % 8 == 0 and len(code) // 8 < 4096
    for name, (on_x86, on_arm) in seccomp._REFUSED.items():
        assert on_x86 is not None, name
        assert on_arm is not None or name in {"fork", "vfork", "chmod", "chown", "lchown"} | {
            "inotify_init",
            "utime",
            "utimes",
            "futimesat",
            "iopl",
            "ioperm",
        }, name


BOMB = """
import os, sys
import escapes
if not os.geteuid():  # limits of processes do not hold root
    os.setgid(65534); os.setuid(65534)
sandbox.system.MORE_THREADS = 20
sandbox.enter(sandbox.Rules(mode=sys.argv[1]))
print(escapes.fork_bomb(200))
"""


@pytest.mark.slow  # beside other tests it counts their threads as well
def test_a_fork_bomb_is_bounded() -> None:
    assert int(python(BOMB, "off").stdout) == 400
    assert int(python(BOMB, "auto").stdout) <= 40


def test_memory_is_capped_where_the_owner_caps_it() -> None:
    code = (
        "import mmap, sys\nsandbox.enter(sandbox.Rules(*sys.argv[2:], memory=int(sys.argv[1])))\n"
        "print(len(mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))"
    )
    assert python(code, "0").stdout.strip() == str(1 << 30)
    assert "Cannot allocate memory" in python(code, str(300 << 20)).stderr
    assert "Cannot allocate memory" in python(code, str(300 << 20), "off").stderr, "it is a cap, whatever the sandbox"


@needs_landlock
def test_a_file_of_its_own_cannot_fill_the_disk(tmp_path: Path) -> None:
    code = (
        f"sandbox.enter(sandbox.Rules(scratch={str(tmp_path)!r}))\nsandbox.cap_files()\n"
        f"open({str(tmp_path / 'full')!r}, 'wb').truncate((1 << 30) + 1)"
    )
    assert "File too large" in python(code).stderr


@pytest.mark.skipif(
    Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"), reason="cores go to a program here"
)
def test_a_crash_leaves_no_core_dump(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("nobody may leave core dumps here")

    def dumped(mode: str) -> bool:
        code = (
            "from swarmnode.training import sandbox\nimport os, resource\n"
            f"os.chdir({str(tmp_path)!r})\nresource.setrlimit(resource.RLIMIT_CORE, ({hard},) * 2)\n"
            f"sandbox.enter(sandbox.Rules(mode={mode!r}, scratch={str(tmp_path)!r}))\nos.abort()"
        )
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
        status = os.waitpid(pid, 0)[1]
        assert os.WTERMSIG(status) == signal.SIGABRT
        return os.WCOREDUMP(status)

    assert dumped("off")
    assert not dumped("auto")


@pytest.mark.parametrize("op", ["weigh", "init"])
def test_a_trainer_that_must_have_all_of_its_sandbox_does_not_start_without(op: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lacking = SandboxReport("require", ("limits",), (MissingPart("files", "this kernel has no Landlock"),))
        worker = Worker(theirs, -1, lacking)
        keep = {"keep": False} if op == "init" else {}
        worker.reply({"id": 0, "op": op, "spec": b"", "run_id": "", "peer_id": "", **keep})
        answer = msgpack.unpackb(ours.recv(1 << 16)[4:])
    assert "no Landlock" in answer["error"] and "sandbox = 'auto'" in answer["error"]


WHAT_CUDA_DOES = """
import os, socket, threading
if not os.geteuid():  # an ordinary user's process that leaves no core has files of root in /proc
    os.setgid(65534); os.setuid(65534)
sandbox.landlock.CUDA = ("/dev/null",)
print([lacking.part for lacking in sandbox.enter(sandbox.Rules()).missing])
thread = threading.Thread(target=threading.Event().wait, daemon=True)
thread.start()
with open(f"/proc/self/task/{thread.native_id}/comm", "w") as name:
    name.write("cuda")
for told in ("maps", "status"):
    open(f"/proc/self/{told}").read()
os.readlink(f"/proc/{os.getpid()}/exe")
os.stat(f"/proc/{os.getpid()}/ns/pid")
asking, serving = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
print(asking.connect_ex("/tmp/nvidia-mps/control"))
serving.bind(f"\\0cuda-uvmfd-test-{os.getpid()}")
serving.listen()
print("listens")
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try:
        socket.socket(socket.AF_UNIX, kind)
    except PermissionError:
        print("refused")
serving.setblocking(False)
for answer in (
    serving.accept,
    lambda: asking.sendto(b"x", "/run/udev/control"),
    lambda: open(f"/proc/self/task/{thread.native_id}/oom_score_adj", "w"),
):
    try:
        answer()
    except OSError as error:
        print(error.errno)
"""


SCHEDULING = """
import os, subprocess, sys
from swarmnode.training.sandbox import system
if not os.geteuid():  # the kernel keeps a process without root's capabilities from one that has them
    os.setgid(65534); os.setuid(65534)
other = subprocess.Popen(["cat"], stdin=subprocess.PIPE).pid
sandbox.enter(sandbox.Rules(mode=sys.argv[1]))
ioprio = {"x86_64": (251, 252), "aarch64": (30, 31)}[os.uname().machine]  # set, get
for attempt in (
    lambda: os.sched_setscheduler(other, os.SCHED_BATCH, os.sched_param(0)),
    lambda: os.sched_setparam(other, os.sched_param(0)),
    lambda: system.call(ioprio[0], 1, other, 3 << 13),
    lambda: os.sched_setaffinity(other, []),
    lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
):
    try:
        attempt()
    except OSError as error:
        print(error.errno)
    else:
        print("done")
print(os.sched_getscheduler(other) == os.SCHED_BATCH, system.call(ioprio[1], 1, other) == 3 << 13)
"""


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("off", f"done done done {errno.EINVAL} done True True"),  # EINVAL: it cannot be without any core
        ("auto", f"{errno.EPERM} {errno.EPERM} {errno.EPERM} done done False False"),  # the fourth did nothing
    ],
)
def test_when_and_where_other_processes_run_is_not_for_a_trainer_to_say(mode: str, told: str) -> None:
    done = python(SCHEDULING, mode)
    assert done.stdout.split() == told.split(), done.stderr


@needs_landlock
def test_where_there_is_a_gpu_cuda_may_do_what_it_fails_without() -> None:
    done = python(WHAT_CUDA_DOES)
    refused = [str(number) for number in (errno.EPERM, errno.ENOTCONN, errno.EACCES)]
    assert done.stdout.split("\n")[:-1] == ["[]", str(errno.ENOENT), "listens", "refused", "refused", *refused], (
        done.stderr
    )


@needs_landlock
def test_where_there_is_a_gpu_nothing_more_is_reached(places: dict[str, str], port: int) -> None:
    given = {"rules": {"scratch": places["inside"]}, "port": port, **places}
    code = "import escapes\nsandbox.landlock.CUDA = ('/dev/null',)\nescapes.main()"
    results = json.loads(python(code, json.dumps(given)).stdout)["results"]
    assert {name for name, result in results.items() if result == "done"} == set(PERMITTED), results


@needs_landlock
def test_files_of_a_gpu_that_are_there_can_be_opened_for_reading_and_writing(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "other").touch()
    code = (
        f"sandbox.landlock.ACCELERATORS = ({str(tmp_path / 'nvidia*')!r},)\nsandbox.enter(sandbox.Rules())\n"
        f"open({str(tmp_path / 'nvidia0')!r}, 'r+b').close()\nprint('opened')\nopen({str(tmp_path / 'other')!r}, 'r+b')"
    )
    done = python(code)
    assert done.stdout.strip() == "opened" and "PermissionError" in done.stderr


def test_a_gpu_without_room_is_said_with_what_to_do() -> None:
    import torch

    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(theirs, -1, SandboxReport("off"))
        worker.do_stop = fails  # type: ignore[method-assign]
        worker.reply({"id": 0, "op": "stop"})
        answer = msgpack.unpackb(ours.recv(1 << 16)[4:])
    assert "CUDA out of memory" in answer["error"] and "--device cpu" in answer["error"]
