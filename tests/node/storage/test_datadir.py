"""The data directory: one daemon at a time, nothing half-written, and clear words when the disk is full."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from swarmnode.node.exitcodes import DATADIR_BUSY, DATADIR_VERSION, NO_SPACE
from swarmnode.node.storage import datadir
from swarmnode.node.storage.datadir import (
    DataDir,
    DataDirBusy,
    DataDirError,
    DataDirVersion,
    NoSpace,
    remove,
    weigh,
    write_atomic,
)


def test_a_second_daemon_is_told_which_process_holds_the_directory(tmp_path: Path) -> None:
    home = DataDir(tmp_path / "node")
    with home:
        with pytest.raises(DataDirBusy) as busy:
            DataDir(tmp_path / "node").__enter__()
        assert str(os.getpid()) in str(busy.value) and busy.value.exit_code == DATADIR_BUSY
        assert DataDir(tmp_path / "node").holder() == os.getpid()
    assert DataDir(tmp_path / "node").holder() is None
    with home:
        pass


def test_who_asks_whether_a_daemon_runs_keeps_none_from_starting(tmp_path: Path) -> None:
    home = DataDir(tmp_path / "node")
    with home:
        pass
    looking = os.open(home.lock, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `holder` does
    done = threading.Timer(0.1, os.close, [looking])
    done.start()
    with home:
        assert DataDir(tmp_path / "node").holder() == os.getpid()
    done.join()


def test_a_lock_that_something_else_holds_for_good_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datadir, "LOCK_TRIES", 3)
    home = DataDir(tmp_path / "node")
    with home:
        pass
    with home.lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(DataDirBusy, match="another process"):
            home.__enter__()
    with home:
        pass


def test_the_directory_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir(mode=0o755)
    with DataDir(tmp_path / "node") as home:
        assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
        assert home.logs.is_dir() and home.runs.is_dir()


@pytest.mark.parametrize(("found", "remedy"), [("2", "upgrade swarmnode"), ("0", "run the swarmnode version")])
def test_a_directory_of_another_version_is_left_alone(tmp_path: Path, found: str, remedy: str) -> None:
    home = DataDir(tmp_path)
    home.layout.write_text(found)
    with pytest.raises(DataDirVersion, match=remedy) as refused:
        home.__enter__()
    assert refused.value.exit_code == DATADIR_VERSION
    assert home.holder() is None
    assert home.layout.read_text() == found and not home.runs.exists()


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.json"
    write_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datadir.os, "fsync", full)
    with pytest.raises(NoSpace, match="free some space") as refused:
        write_atomic(path, b"new")
    assert refused.value.exit_code == NO_SPACE
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["book.json"]


def test_what_is_written_is_of_its_owner_alone(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", memoryview(b"content"))
    assert (tmp_path / "x").read_bytes() == b"content"
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_a_run_id_cannot_name_another_place(tmp_path: Path) -> None:
    home = DataDir(tmp_path)
    assert home.run("a" * 64).parent == home.runs
    for wrong in ("..", "a" * 63, "A" * 64, "../" + "a" * 61, ""):
        with pytest.raises(ValueError):
            home.run(wrong)


def test_a_path_too_long_for_a_socket_gets_a_short_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Path(tempfile.mkdtemp())  # short: pytest's own folders may be too long themselves
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    home = DataDir(tmp_path / ("d" * 110))
    home.prepare()
    chosen = home.prepare_socket()
    assert len(os.fsencode(chosen)) <= datadir.SOCKET_PATH_LIMIT
    assert chosen.parent == runtime / "swarmnode" and stat.S_IMODE(chosen.parent.stat().st_mode) == 0o700
    assert home.find_socket() is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(chosen))
        assert DataDir(home.path).find_socket() == chosen
        chosen.parent.chmod(0o755)
        with pytest.raises(DataDirError, match="not a private directory"):
            home.find_socket()


def test_client_finds_the_socket_of_a_service_that_had_no_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    home = DataDir(tmp_path / ("d" * 110))
    home.prepare()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    served = home.prepare_socket()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(served))
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
            assert home.find_socket() == served
    finally:
        served.unlink()


def test_two_directories_never_share_a_short_socket(tmp_path: Path) -> None:
    first, second = (DataDir(tmp_path / (letter * 110)) for letter in "ab")
    assert not set(first.socket_candidates()) & set(second.socket_candidates())


def test_what_a_trainer_makes_too_deep_to_be_walked_is_weighed_and_deleted(tmp_path: Path) -> None:
    """Python 3.11 recurses once for each level, and beyond 4096 characters no path leads there."""
    top = tmp_path / "scratch"
    top.mkdir()
    at = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("a" * 20, 0o700, dir_fd=at)
        below = os.open("a" * 20, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    hidden = os.open("hidden", os.O_CREAT | os.O_WRONLY, dir_fd=at)
    os.write(hidden, bytes(1 << 20))
    os.close(hidden)
    os.close(at)
    assert weigh(tmp_path) >= 1 << 20
    remove(top)
    assert not top.exists()
    assert weigh(top) == 0
