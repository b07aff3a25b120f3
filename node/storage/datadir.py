"""The data directory: everything that a node keeps, behind one lock.

    identity.key       the node's private key                  layout   version of this arrangement
    config.toml        the owner's settings, optional          lock     held by the daemon, contains its pid
    caps.toml          what swarmnode caps changed, optional
    name               what peers see it called, optional      greeted  after the first run
    address-book.json  peers met before                        logs/    one JSON object a line, rotated
    control.sock       where the command line asks             runs/<run_id>/   checkpoints and state of a run
    dashboard.token    with which a browser asks              blocked  peers that the owner keeps out, optional

The directory is 0700. Files are replaced whole: written beside, synced, renamed, and the directory synced, so that a
crash leaves the old content or the new one. The lock is the kernel's (flock): it ends with its process, however that
ends, and never goes stale.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from swarmnode.node.exitcodes import DATADIR_BUSY, DATADIR_VERSION, NO_SPACE, RUN_UNAVAILABLE, ExpectedError
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.training.options import SettingError, as_toml, read_toml
from swarmnode.training.runspec import RunSpec, decode, encode

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
UNFINISHED = ".part"  # how the name of a file ends while it is written
LOCK_TRIES, LOCK_AGAIN = 500, 0.01  # times, seconds between them
SOCKET_PATH_LIMIT = 103  # bytes; sun_path holds 104 on macOS and 108 on Linux, the closing zero included
FREE = Metric("swarmnode_disk_free_bytes", GAUGE, "bytes free for this node on the disk of its data directory")
RUN_ID = re.compile(r"[0-9a-f]{64}")


class DataDirError(ExpectedError):
    """The data directory cannot be created, read or written."""


class DataDirBusy(DataDirError):
    """Another daemon holds the lock."""

    exit_code = DATADIR_BUSY

    def __init__(self, path: Path, pid: int) -> None:
        """`pid`: its process id, 0 where the lock file does not say."""
        who = f"process {pid}" if pid else "another process"
        super().__init__(
            f"{path}: the data directory is in use by {who}: a node runs on it already, and swarmnode status tells in "
            "which run. Two daemons with one key would look like one liar to their peers. To go over to another run, "
            f"stop that one first (swarmnode stop --data-dir {path}); to be in both, give this one its own --data-dir."
        )


class DataDirVersion(DataDirError):
    """What is there was written by another version of swarmnode, or for another run."""

    exit_code = DATADIR_VERSION


class NoSpace(DataDirError):
    """The disk is full, or the owner's quota is used up."""

    exit_code = NO_SPACE


def explain(error: OSError, path: Path) -> DataDirError:
    """`error`, met while working on `path`, in words that say what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(
            f"{path}: no space left on the disk ({error.strerror}). What was saved before is intact; free some space "
            "or name another place with --data-dir, then start again."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DataDirError(
            f"{path}: {error.strerror}. Run as the owner of that directory, or name another place, for a node's own "
            "files with --data-dir."
        )
    if error.errno == errno.ENOENT and not path.parent.exists():
        return DataDirError(f"{path}: there is no directory {path.parent}; make it, or name another path.")
    return DataDirError(f"{path}: {error.strerror or error}. Look at the path, or name another one.")


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """What fails in the block, which works on `path`, in the words of `explain`."""
    try:
        yield
    except OSError as error:
        raise explain(error, path) from error


def unusable(error: OSError, path: Path, what: str) -> DataDirError:
    """`error`, met at a file that a person named. `what` follows its path: "cannot be read" or "cannot be written"."""
    text = f"{path} {what}: {error.strerror or error}"
    return NoSpace(text) if error.errno in (errno.ENOSPC, errno.EDQUOT) else DataDirError(text)


def sync_directory(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def beside(path: Path) -> Iterator[tuple[FileIO, Path]]:
    """A new hidden file of ours alone beside `path`, to be written and synced, and its path.

    It is gone where the block fails. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    try:
        with FileIO(descriptor, "wb") as file:
            yield file, Path(name)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def replacing(path: Path, *, by_owner: bool = False) -> Iterator[FileIO]:
    """A file to be written that takes the place of `path` when the block ends: whole, or not at all where it fails.

    `by_owner`: a person named it, which errors then go by. Raises NoSpace or DataDirError.
    """
    try:
        with beside(path) as (file, written):
            yield file
            os.fsync(file.fileno())
            os.replace(written, path)
        sync_directory(path.parent)
    except OSError as error:
        raise (unusable(error, path, "cannot be written") if by_owner else explain(error, path)) from error


def write_all(file: FileIO, content: bytes | memoryview) -> None:
    """Write all of it to a file without a buffer, which may take a part at a time. Raises OSError."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Replace `path` by `content`, whole or not at all. Raises NoSpace or DataDirError."""
    with replacing(path) as file:
        write_all(file, content)


def weigh(directory: Path) -> int:
    """Bytes of disk that it takes, by du(1): a trainer may make it deeper than Python walks, or paths are long.

    0 where that cannot be asked now, as without descriptors.
    """
    with suppress(OSError):
        asked = subprocess.run(["du", "-sk", "--", directory], capture_output=True, check=False)
        return 1024 * int(asked.stdout.partition(b"\t")[0] or 0)
    return 0


def remove(directory: Path | str) -> None:
    """Delete it and all in it, by rm(1), for the same reason. What cannot be deleted stays."""
    with suppress(OSError):
        subprocess.run(["rm", "-rf", "--", directory], capture_output=True, check=False)


def caps_with(path: Path, changes: Mapping[str, Any]) -> bytes:
    """What the file of caps at `path` says after these changes, None of which takes one out. Raises SettingError."""
    kept = {**(read_toml(path) if path.exists() else {}), **changes}
    lines = [f"{key} = {as_toml(value)}\n" for key, value in sorted(kept.items()) if value is not None]
    return "".join(["# Written by swarmnode caps\n", *lines]).encode()


class DataDir:
    """The paths of one data directory, and its lock while a daemon has it open.

    Making a DataDir touches nothing. `prepare` creates the directory; a `with` block also locks it, for a daemon alone.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()
        self.identity = self.path / "identity.key"
        self.address_book = self.path / "address-book.json"
        self.dashboard_token = self.path / "dashboard.token"
        self.layout = self.path / "layout"
        self.blocked = self.path / "blocked"
        self.name = self.path / "name"
        self.lock = self.path / "lock"
        self.logs = self.path / "logs"
        self.runs = self.path / "runs"
        self._held = ExitStack()  # the lock

    def measure(self, metrics: Metrics) -> None:
        metrics.show(FREE, lambda: float(shutil.disk_usage(self.path).free))

    def run(self, run_id: str) -> Path:
        """The directory of one run. Raises ValueError for what is no run id, as it would name another place."""
        if not RUN_ID.fullmatch(run_id):
            raise ValueError(f"{run_id!r} is not a run id; expected 64 hex digits")
        return self.runs / run_id

    def known_runs(self) -> tuple[str, ...]:
        """Ids of the runs that have a directory here, sorted. Raises DataDirError."""
        with explaining(self.path), suppress(FileNotFoundError):
            return tuple(sorted(p.name for p in self.runs.iterdir() if RUN_ID.fullmatch(p.name) and p.is_dir()))
        return ()

    def prepare(self) -> None:
        """Create the directory where it is missing and close it to other users. Raises DataDirError."""
        with explaining(self.path):
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except FileExistsError as error:
                raise DataDirError(f"{self.path}: is a file; name a directory with --data-dir.") from error
            if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
                self.path.chmod(0o700)

    def __enter__(self) -> DataDir:
        """Create, lock and check the directory. Raises DataDirBusy, DataDirVersion, NoSpace or DataDirError."""
        self.prepare()
        with explaining(self.path), ExitStack() as failing:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            failing.callback(os.close, descriptor)
            self._take(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            self._check_layout()
            for folder in (self.logs, self.runs):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._held = failing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back. The lock file stays: removing it would let two daemons lock two files of one name."""
        self._held.close()

    def _take(self, descriptor: int) -> None:
        """Lock the file. Who asks for its holder has it for a moment. Raises DataDirBusy or OSError."""
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                self.check_free()
                time.sleep(LOCK_AGAIN)
        raise DataDirBusy(self.path, 0)

    def check_free(self) -> None:
        """Raises DataDirBusy where a daemon holds the lock now: said at once, before one that starts comes to it."""
        if (pid := self.holder()) is not None:
            raise DataDirBusy(self.path, pid)

    def holder(self) -> int | None:
        """The pid of the daemon that holds the lock (0 where the file does not say), or None where nobody does."""
        try:
            descriptor = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with suppress(OSError, ValueError):
                return int(self.lock.read_text(encoding="ascii"))
            return 0
        finally:
            os.close(descriptor)
        return None

    def _check_layout(self) -> None:
        try:
            found = self.layout.read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            write_atomic(self.layout, f"{LAYOUT_VERSION}\n".encode())
            return
        if found == str(LAYOUT_VERSION):
            return
        newer = found.isdigit() and int(found) > LAYOUT_VERSION
        remedy = "upgrade swarmnode" if newer else "run the swarmnode version that wrote it"
        raise DataDirVersion(
            f"{self.path}: the data directory has layout {found[:20]!r}, this swarmnode reads layout {LAYOUT_VERSION}; "
            f"nothing was changed. Either {remedy}, or start afresh with another --data-dir (copy identity.key there "
            "to keep the peer id)."
        )

    def socket_candidates(self) -> tuple[Path, ...]:
        """Where the control socket may be, best first.

        One path where it fits into a socket address; else short ones named by a hash of the directory, under
        XDG_RUNTIME_DIR and under /tmp. A service and a login shell may differ in XDG_RUNTIME_DIR, and clients try all.
        """
        direct = self.path / "control.sock"
        if len(os.fsencode(direct)) <= SOCKET_PATH_LIMIT:
            return (direct,)
        name = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16] + ".sock"
        try:
            owner = self.path.stat().st_uid
        except OSError:
            owner = os.getuid()
        bases = [Path("/tmp") / f"swarmnode-{owner}"]
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if runtime and Path(runtime).is_dir():
            bases.insert(0, Path(runtime) / "swarmnode")
        return tuple(base / name for base in bases if len(os.fsencode(base / name)) <= SOCKET_PATH_LIMIT)

    def prepare_socket(self) -> Path:
        """The path to bind the control socket to; its directory exists, is 0700 and ours. Raises DataDirError."""
        chosen = self.socket_candidates()[0]
        if chosen.parent != self.path:
            with explaining(chosen.parent):
                chosen.parent.mkdir(mode=0o700, exist_ok=True)
            self._check_private(chosen.parent)
        return chosen

    def find_socket(self) -> Path | None:
        """The control socket of a daemon on this directory, or None. Raises DataDirError where it may be a trap."""
        for candidate in self.socket_candidates():
            try:
                exists = stat.S_ISSOCK(candidate.lstat().st_mode)
            except OSError:
                continue
            if exists:
                if candidate.parent != self.path:
                    self._check_private(candidate.parent)
                return candidate
        return None

    def _check_private(self, folder: Path) -> None:
        """A folder in /tmp can be made by anyone: use it only where it is closed and ours."""
        found = folder.lstat()
        owner = self.path.stat().st_uid
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or stat.S_IMODE(found.st_mode) & 0o077:
            raise DataDirError(
                f"{folder}: is not a private directory of user {owner}, so the control socket is not safe there. "
                "Remove it, or choose a --data-dir with a path below 90 characters."
            )


# --- runs ------------------------------------------------------------------------------------------------------------


class RunUnavailable(ExpectedError):
    """The run or its data cannot be had: nobody answers, nobody has it, or what they sent is not it."""

    exit_code = RUN_UNAVAILABLE


@dataclass(frozen=True)
class ChosenRun:
    spec: RunSpec
    run_id: str
    creator: bool  # the specification is this node's own, so it may begin the run


class RunStore:
    """What a node keeps of each run, in `runs/<run id>/`. Blocking.

    `run.spec` is the RunSpec in canonical encoding, checked against the run id whenever it is read; `checkpoints/` see
    `checkpoints.py`. A run's data are shards (`datasets.py`); `data-sets/<index>` beside `runs/` marks those that are
    pinned for a run; in it stands the id of their tokenizer.
    """

    def __init__(self, datadir: DataDir) -> None:
        self._datadir = datadir
        self.folder = datadir.run
        self._marks = datadir.path / "data-sets"

    def known(self) -> tuple[str, ...]:
        return tuple(r for r in self._datadir.known_runs() if (self.folder(r) / "run.spec").exists())

    def encoded(self, run_id: str) -> bytes | None:
        """The encoded specification; None where there is none. Raises DataDirError where it cannot be read."""
        if run_id not in self.known():
            return None
        path = self.folder(run_id) / "run.spec"
        with explaining(path):
            return path.read_bytes()

    def load(self, run_id: str) -> RunSpec | None:
        """None where there is none. Raises SettingError where the file was damaged; DataDirError."""
        encoded = self.encoded(run_id)
        if encoded is None:
            return None
        try:
            return decode(encoded, expected_run_id=run_id)
        except SettingError as error:
            path = self.folder(run_id) / "run.spec"
            raise SettingError(
                f"{path}: cannot be used ({error}). Remove it, and start again with the run file or with --join."
            ) from error

    def keep(self, spec: RunSpec) -> None:
        """Raises NoSpace or DataDirError."""
        mark = [(self._marks / spec.data.index, spec.data.tokenizer.encode())] if spec.data.index else []
        for path, content in (*mark, (self.folder(spec.run_id) / "run.spec", encode(spec))):
            with explaining(path.parent):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, content)

    def specs(self) -> tuple[RunSpec, ...]:
        """Those of the known runs, but for damaged ones. Raises DataDirError."""
        found = []
        for run_id in self.known():
            try:
                found.append(self.load(run_id))
            except SettingError as error:
                logger.warning("%s", error)
        return tuple(spec for spec in found if spec is not None)

    def forgotten(self) -> tuple[tuple[str, str], ...]:
        """Ids of index and tokenizer ("" where there is none) of data that no run here needs any more.

        None, where what a run needs cannot be told. Raises DataDirError.
        """
        specs = self.specs()
        if len(specs) < len(self.known()):
            return ()
        needed = {spec.data.index for spec in specs}
        with suppress(FileNotFoundError):
            marks = sorted(mark for mark in self._marks.iterdir() if mark.name not in needed)
            return tuple((mark.name, mark.read_text(errors="replace")) for mark in marks)
        return ()

    def forget(self, index: str) -> None:
        """The shards of that index are pinned no longer."""
        (self._marks / index).unlink(missing_ok=True)
