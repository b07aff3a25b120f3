"""Checkpoints of a run's state.

    runs/<run id>/checkpoints/round-00000040.safetensors     parameters, momentum, residual: float32 (P,) each; extra
    runs/<run id>/checkpoints/round-00000040.moments         of the inner optimizer, beside the newest only
    runs/<run id>/checkpoints/round-00000040.json            the manifest
    runs/<run id>/checkpoints/round-00000040-.…              these, while that round is saved once more

A tensor that is all zeros is left out of the file. `extra` are bytes that only the exchange method understands which
wrote them; another method goes on from the rest. Everything is host memory in float32, and nothing says how many nodes
there are, so a checkpoint serves on another device and in a swarm of another size.

What a node needs besides follows from the run's seed, the peer id and the round (`training/inner.py`). Not kept: the
work of the round in hand where the process was killed. The moments are written from the very memory of a trainer that
goes on, so they may be those of one step here and of a later one there; where they cannot be used, fresh ones begin.

Who may fail when, and what is then true: a checkpoint is written whole before its manifest is, and the manifest before
older ones go. So whenever the process or the machine stops, and when the disk is full, the newest manifest that is
there names a complete file. One that does not hash to what its manifest says is reported and left alone, and the one
before is used. Checkpoints of later rounds than the one being saved belong to a history that this node gave up for a
better one; they go, so that nobody restarts from them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.node.storage.datadir import UNFINISHED, DataDirError, DataDirVersion, explaining, write_atomic
from swarmnode.node.storage.tensorfile import read_tensors, write_tensors
from swarmnode.protocols.methods.context import Observer
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.runner import Runner
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.outer import Layout, OuterState, state_hash

logger = logging.getLogger(__name__)

FORMAT = 3
HOUR = 3600.0  # seconds
MOMENTS = ".moments"  # suffix
ASIDE = "-"  # behind a name: what was saved of a round that is being saved again; it sorts before the other


@dataclass(frozen=True)
class CheckpointManifest:
    format: int
    run_id: str
    round: int  # rounds that are in the state; also the position in the data and in all sampling
    state_hash: str
    layout: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of the tensors within `parameters`, in order
    sha256: str  # of the tensors' file
    members: tuple[str, ...]  # peer ids, see `Saved`
    method: str  # that wrote the residual, and `extra`
    moments: str = ""  # sha-256 of their file; empty where there are none
    updates: int = 0  # that the moments are of

    @property
    def table(self) -> Layout:
        return Layout.of([(name, shape) for name, shape in self.layout])


@dataclass
class Checkpoints:
    """The checkpoints of one run in one folder. Blocking."""

    folder: Path
    _: KW_ONLY
    run_id: str
    layout: Layout
    keep: int  # newest ones that stay
    hours: float = 0.0  # back to which older ones stay, further and further apart
    room: float = math.inf  # bytes that they may take, the newest excepted; its owner sets it

    def save(self, saved: Saved) -> Path:
        """Write one and drop what is too old. Raises NoSpace or DataDirError; older ones are then intact."""
        path = self.folder / f"round-{saved.round:08d}.safetensors"
        with explaining(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self.folder.glob(f".*{UNFINISHED}"):  # by a writer that was killed; nobody else writes here
                left.unlink(missing_ok=True)
            stems = [manifest.stem for manifest in _manifests(self.folder)]  # a killed save left files without one
            self._keep_only({*stems, *(stem + ASIDE for stem in stems)}, ".safetensors", MOMENTS)
            self._make_room()
            if path.with_suffix(".json").exists():  # the same round once more: till that is whole, what was saved stays
                for suffix in (MOMENTS, ".safetensors", ".json"):
                    with suppress(FileNotFoundError):
                        os.replace(path.with_suffix(suffix), path.with_stem(path.stem + ASIDE).with_suffix(suffix))
        vectors: dict[str, NDArray[Any]] = {
            "parameters": saved.state.parameters,
            "momentum": saved.state.momentum,
            "residual": saved.residual,
            "extra": np.frombuffer(saved.extra, np.uint8),
        }
        # Vectors whose bits are all zero are left out; -0.0 is another state than 0.0.
        kept = {name: np.ascontiguousarray(vector) for name, vector in vectors.items() if vector.view(np.uint8).any()}
        sha256 = write_tensors(path, kept, {"run": self.run_id, "round": str(saved.round)})
        moments = ""
        if saved.moments is not None:
            moments = write_tensors(path.with_suffix(MOMENTS), {"moments": saved.moments}, {"run": self.run_id})
        manifest = CheckpointManifest(
            FORMAT,
            self.run_id,
            saved.round,
            state_hash(saved.round, self.layout, saved.state),
            tuple((slot.name, slot.shape) for slot in self.layout.slots),
            sha256,
            saved.members,
            saved.method,
            moments,
            saved.updates,
        )
        write_atomic(path.with_suffix(".json"), json.dumps(asdict(manifest), indent=1).encode())
        try:
            self._drop_others_than(path.with_suffix(".json"))
        except OSError as error:
            raise DataDirError(f"{self.folder}: old checkpoints cannot be deleted: {error.strerror}") from error
        return path

    def _make_room(self) -> None:
        """Delete the oldest until one more as large as the newest fits; the newest stays."""
        newest, *older = _manifests(self.folder) or [self.folder]
        files = {m.stem: list(self.folder.glob(f"{m.stem}.*")) for m in (newest, *older)}
        sizes = {stem: sum(file.stat().st_size for file in found) for stem, found in files.items()}
        while older and sum(sizes.values()) + sizes[newest.stem] > self.room:
            oldest = older.pop().stem
            del sizes[oldest]
            for file in sorted(files[oldest]):  # the manifest first: without it the others mean nothing
                file.unlink(missing_ok=True)

    def _drop_others_than(self, newest: Path) -> None:
        """Keep `newest`, what belongs before it by number and age."""
        history = [m for m in _manifests(self.folder) if m.name <= newest.name and not m.stem.endswith(ASIDE)]
        kept = {*history[: self.keep], *self._by_age(history[self.keep :])}
        self._keep_only({manifest.stem for manifest in kept}, ".json", ".safetensors")
        self._keep_only({newest.stem}, MOMENTS)

    def _keep_only(self, stems: set[str], *suffixes: str) -> None:
        for suffix in suffixes:
            for file in self.folder.glob(f"round-*{suffix}"):
                if file.stem not in stems:
                    file.unlink(missing_ok=True)

    def _by_age(self, manifests: list[Path]) -> set[Path]:
        """The first in each of the last two spans of 1, 2, 4, … hours: what begins a long span begins shorter ones."""
        written = sorted((min(m.stat().st_mtime, time.time()), m) for m in manifests)
        kept: set[Path] = set()
        span = HOUR
        while span <= self.hours * HOUR:
            first = {int(at // span): manifest for at, manifest in reversed(written)}
            kept |= {manifest for number, manifest in first.items() if number >= time.time() // span - 1}
            span *= 2
        return kept

    def newest(self) -> Saved | None:
        """The newest checkpoint that is whole; its arrays are read-only. One that is not is skipped with a warning.

        Raises DataDirVersion where it is of another model: what is saved of this one would take its place.
        """
        found = newest_whole(self.folder, self.run_id)
        if found is not None and found[0].table != self.layout:
            raise DataDirVersion(
                f"{self.folder}: holds checkpoints of another model, as of another --policy; name that, or move the "
                "folder elsewhere"
            )
        if found is None and _manifests(self.folder):
            logger.warning(
                "no checkpoint in %s can be used; the state comes from members of the run, or training starts afresh",
                self.folder,
            )
        return None if found is None else self._with_moments(*found)

    def _with_moments(self, manifest: CheckpointManifest, saved: Saved) -> Saved:
        """The checkpoint with the moments beside it, where they are whole, and of this run."""
        path = self.folder / f"round-{saved.round:08d}{MOMENTS}"
        if not manifest.moments:
            return saved
        try:
            moments = _tensors(path, manifest.moments).get("moments")
            if moments is None or moments.dtype != np.float32 or moments.ndim != 1:
                raise ValueError("they are not what was written with the checkpoint")
            if not is_finite(moments) or manifest.updates < 1:
                raise ValueError("they contain NaN or infinity, or are of no update")
        except (OSError, ValueError) as error:
            why = (error.strerror or error) if isinstance(error, OSError) else error
            logger.warning("%s is left out, training goes on with fresh moments: %s", path, why)
            return saved
        return replace(saved, moments=moments, updates=manifest.updates)


def newest_whole(
    folder: Path, run_id: str, *, layout: Layout | None = None, state_hash: str | None = None
) -> tuple[CheckpointManifest, Saved] | None:
    """The newest checkpoint in `folder` that is whole and of that run, and of that layout and state where one is given.

    Blocking. One that is not is skipped with a warning.
    """
    for path in _manifests(folder):
        try:
            manifest = read_manifest(path)
            same_model = layout is None or manifest.table == layout
            if manifest.run_id != run_id or not same_model or state_hash not in (None, manifest.state_hash):
                raise ValueError("it belongs to another run or model")
            return manifest, load(path, manifest)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("checkpoint %s is skipped and the one before it tried: %s", path.stem, error)
    return None


def newest_round(folder: Path) -> int | None:
    """Rounds in the newest checkpoint of `folder`, which is not read for that; None where there is none. Blocking."""
    for path in _manifests(folder):
        with suppress(OSError, ValueError, KeyError, TypeError):
            path.with_suffix(".safetensors").stat()
            return read_manifest(path).round
    return None


def _manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.json"), reverse=True)


def read_manifest(path: Path) -> CheckpointManifest:
    """A manifest as it was written. Raises ValueError, TypeError, KeyError or OSError where it is damaged."""
    fields: dict[str, Any] = json.loads(path.read_bytes())
    if fields["format"] != FORMAT:
        raise ValueError(f"it has format {fields['format']}, this version reads {FORMAT}")
    layout = tuple((str(name), tuple(int(axis) for axis in shape)) for name, shape in fields["layout"])
    fields |= {"members": tuple(fields["members"]), "layout": layout}
    known = CheckpointManifest.__dataclass_fields__  # others were written before, and read by nobody
    manifest = CheckpointManifest(**{name: value for name, value in fields.items() if name in known})
    if type(manifest.round) is not int or manifest.round < 0:
        raise ValueError(f"it names round {manifest.round!r}")
    return manifest


def load(path: Path, manifest: CheckpointManifest) -> Saved:
    """The checkpoint that `manifest`, read from `path`, describes. Raises ValueError or OSError."""
    layout = manifest.table
    tensors = _tensors(path.with_suffix(".safetensors"), manifest.sha256)
    vectors: dict[str, NDArray[np.float32]] = {}
    for name in ("parameters", "momentum", "residual"):
        vector = tensors.get(name)
        if vector is None:
            vector = np.zeros(layout.parameters, np.float32)
        if vector.shape != (layout.parameters,) or vector.dtype != np.float32:
            raise ValueError(f"its {name} are {vector.dtype} {vector.shape}")
        if not is_finite(vector):
            raise ValueError(f"its {name} contain NaN or infinity")
        vector.flags.writeable = False
        vectors[name] = vector
    state = OuterState(vectors["parameters"], vectors["momentum"])
    if state_hash(manifest.round, layout, state) != manifest.state_hash:
        raise ValueError("its parameters do not hash to the state that the manifest names")
    extra = tensors.get("extra", np.zeros(0, np.uint8)).tobytes()
    return Saved(manifest.round, state, vectors["residual"], manifest.members, manifest.method, extra)


def _tensors(path: Path, sha256: str) -> dict[str, NDArray[Any]]:
    """What the file of this hash contains, which may have been moved aside. Raises ValueError or OSError."""
    aside = path.with_stem(path.stem.removesuffix(ASIDE) + ASIDE)
    for each in [each for each in (path, aside) if each.exists()] or [path]:
        tensors, found = read_tensors(each)
        if found == sha256:
            return tensors
    raise ValueError("its file is damaged: it does not hash to what the manifest says")


class CheckpointWriter:
    """Writes checkpoints beside training, one at a time: of those that come while one is written, the last follows."""

    def __init__(self, checkpoints: Checkpoints, *, runner: Runner, observer: Observer) -> None:
        """`observer` is warned that a checkpoint could not be written, until one could."""
        self._checkpoints = checkpoints
        self._runner = runner
        self._observer = observer
        self.failure: DataDirError | None = None  # why the last one could not be written; None where it could
        self.written_at: float | None = None  # trio's time; None while none was written
        self._next: Saved | None = None
        self._busy = trio.Lock()
        self._changed = trio.lowlevel.ParkingLot()

    def put(self, saved: Saved) -> None:
        """Have this written, in place of one that still waits. Returns at once; no array is copied."""
        self._next = saved
        self._changed.unpark_all()

    async def settled(self) -> None:
        """Have on the disk what was put, unless it cannot be written."""
        async with self._busy:
            while self._next is not None:
                saved, self._next = self._next, None
                try:
                    await self._runner(lambda saved=saved: self._checkpoints.save(saved))  # type: ignore[misc]
                except DataDirError as error:
                    self.failure = error
                    self._observer.warn("checkpoint", f"no checkpoint could be written: {error}")
                    logger.error("no checkpoint of round %d: %s Training goes on.", saved.round, error)
                else:
                    self.failure, self.written_at = None, trio.current_time()
                    self._observer.warn("checkpoint", None)

    async def run(self) -> None:
        """Write until cancelled; a write in hand is finished then."""
        while True:
            while self._next is None:
                await self._changed.park()
            await self.settled()
