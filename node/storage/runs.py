"""What a node keeps of each run: `runs/<run id>/` in the data directory.

    run.spec          the RunSpec in canonical encoding, checked against the run id whenever it is read
    checkpoints/      see `checkpoints.py`

A run's data are shards (`datasets.py`); `data-sets/<index>` beside `runs/` marks those that are pinned for a run;
in it stands the id of their tokenizer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from swarmnode.node.exitcodes import RUN_UNAVAILABLE, ExpectedError
from swarmnode.node.storage.datadir import DataDir, explaining, write_atomic
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, decode, encode

logger = logging.getLogger(__name__)


class RunUnavailable(ExpectedError):
    """The run or its data cannot be had: nobody answers, nobody has it, or what they sent is not it."""

    exit_code = RUN_UNAVAILABLE


@dataclass(frozen=True)
class ChosenRun:
    spec: RunSpec
    run_id: str
    creator: bool  # the specification is this node's own, so it may begin the run


class RunStore:
    """The runs in a data directory. Blocking."""

    def __init__(self, datadir: DataDir) -> None:
        self._datadir = datadir

    def folder(self, run_id: str) -> Path:
        return self._datadir.run(run_id)

    def known(self) -> tuple[str, ...]:
        return tuple(r for r in self._datadir.known_runs() if (self.folder(r) / "run.spec").exists())

    def encoded(self, run_id: str) -> bytes | None:
        """The encoded specification; None where there is none."""
        try:
            return (self.folder(run_id) / "run.spec").read_bytes()
        except (OSError, ValueError):
            return None

    def load(self, run_id: str) -> RunSpec | None:
        """Raises SettingError where the file was damaged."""
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
        if spec.data.index:
            _write(self._marks / spec.data.index, spec.data.tokenizer.encode())
        _write(self.folder(spec.run_id) / "run.spec", encode(spec))

    def specs(self) -> tuple[RunSpec, ...]:
        """Those of the known runs, but for damaged ones."""
        found = []
        for run_id in self.known():
            try:
                found.append(self.load(run_id))
            except SettingError as error:
                logger.warning("%s", error)
        return tuple(spec for spec in found if spec is not None)

    def forgotten(self) -> tuple[tuple[str, str], ...]:
        """Ids of index and tokenizer ("" where there is none) of data that no run here needs any more."""
        needed = {spec.data.index for spec in self.specs()}
        try:
            marks = sorted(mark for mark in self._marks.iterdir() if mark.name not in needed)
            return tuple((mark.name, mark.read_text(errors="replace")) for mark in marks)
        except FileNotFoundError:
            return ()

    def forget(self, index: str) -> None:
        """The shards of that index are pinned no longer."""
        (self._marks / index).unlink(missing_ok=True)

    @property
    def _marks(self) -> Path:
        return self._datadir.path / "data-sets"


def _write(path: Path, content: bytes) -> None:
    with explaining(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, content)
