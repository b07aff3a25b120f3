"""Checkpoints of a run: the shared state, this node's residual, and a small manifest beside each.

    runs/<run id>/checkpoints/round-00000040.safetensors     parameters, momentum, residual: float32 (P,) each
    runs/<run id>/checkpoints/round-00000040.json            round, state hash, sha-256 of the other file, members

A checkpoint is written whole before its manifest is, and the manifest before older ones go: whenever the machine
stops, the newest manifest that is there names a complete file. A checkpoint that does not hash to what its manifest
says is reported and left alone, and the one before is used. Checkpoints of later rounds than the one being saved belong
to a history that this node gave up for a better one; they go, so that nobody restarts from them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from swarmnode.node.datadir import DataDirError, write_atomic
from swarmnode.training.layout import Layout
from swarmnode.training.outer import OuterState, state_hash

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    format: int
    run_id: str
    round: int  # rounds that are in the state
    state_hash: str
    layout: str  # digest of the layout table
    sha256: str  # of the tensors' file
    voters: tuple[str, ...]  # seats of the last roster


@dataclass(frozen=True)
class Checkpoint:
    round: int
    state_hash: str
    state: OuterState
    residual: NDArray[np.float32]  # (P,), work that no round contains yet
    voters: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run in one folder; `keep` of them stay."""

    def __init__(self, folder: Path, *, run_id: str, layout: Layout, keep: int) -> None:
        self._folder = folder
        self._run_id = run_id
        self._layout = layout
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write one and drop the oldest. Blocking. Raises NoSpace or DataDirError; older ones are then intact."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataDirError(f"{self._folder}: cannot be created: {error.strerror}") from error
        content = save(
            {
                "parameters": checkpoint.state.parameters,
                "momentum": checkpoint.state.momentum,
                "residual": checkpoint.residual,
            }
        )
        path = self._folder / f"round-{checkpoint.round:08d}.safetensors"
        manifest = Manifest(
            FORMAT,
            self._run_id,
            checkpoint.round,
            checkpoint.state_hash,
            self._layout.digest,
            hashlib.sha256(content).hexdigest(),
            checkpoint.voters,
        )
        write_atomic(path, content)
        write_atomic(path.with_suffix(".json"), json.dumps(asdict(manifest), indent=1).encode())
        try:
            self._drop_others_than(path)
        except OSError as error:
            raise DataDirError(f"{self._folder}: old checkpoints cannot be deleted: {error.strerror}") from error
        return path

    def _drop_others_than(self, newest: Path) -> None:
        """Keep `newest`, the `keep` - 1 before it, and no tensors without a manifest."""
        manifest = newest.with_suffix(".json")
        later = [m for m in self._manifests() if m.name > manifest.name]
        kept = [m for m in self._manifests() if m not in later][: self._keep]
        for old in self._manifests():
            if old not in kept:
                old.unlink(missing_ok=True)
        stems = {m.stem for m in kept}
        for tensors in self._folder.glob("round-*.safetensors"):
            if tensors.stem not in stems:
                tensors.unlink(missing_ok=True)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole. Blocking. One that is not is skipped with a warning."""
        for path in self._manifests():
            try:
                return self._load(path)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                logger.warning("checkpoint %s is skipped and the one before it tried: %s", path.stem, error)
        if self._manifests():
            logger.warning(
                "no checkpoint in %s can be used; the state comes from members of the run, or training starts afresh",
                self._folder,
            )
        return None

    def _manifests(self) -> list[Path]:
        return sorted(self._folder.glob("round-*.json"), reverse=True)

    def _load(self, path: Path) -> Checkpoint:
        fields = json.loads(path.read_bytes())
        manifest = Manifest(**{**fields, "voters": tuple(fields["voters"])})
        if type(manifest.round) is not int or manifest.round < 0:
            raise ValueError(f"it names round {manifest.round!r}")
        if manifest.format != FORMAT:
            raise ValueError(f"it has format {manifest.format}, this version reads {FORMAT}")
        if manifest.run_id != self._run_id or manifest.layout != self._layout.digest:
            raise ValueError("it belongs to another run or model")
        content = path.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(content).hexdigest() != manifest.sha256:
            raise ValueError("its file is damaged: it does not hash to what the manifest says")
        tensors = load(content)
        for name in ("parameters", "momentum", "residual"):
            vector = tensors[name]
            if vector.shape != (self._layout.parameters,) or vector.dtype != np.float32:
                raise ValueError(f"its {name} are {vector.dtype} {vector.shape}")
            if not np.isfinite(vector).all():
                raise ValueError(f"its {name} contain NaN or infinity")
        state = OuterState(tensors["parameters"], tensors["momentum"])
        if state_hash(manifest.round, self._layout, state) != manifest.state_hash:
            raise ValueError("its parameters do not hash to the state that the manifest names")
        return Checkpoint(manifest.round, manifest.state_hash, state, tensors["residual"], manifest.voters)
