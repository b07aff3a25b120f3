"""What a run begins from where the seed does not say it: the state of the run that it continues, or a file of weights.

A run goes on as another one where its owner says so in its record `note/successor` (docs/provenance.md).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import trio
from numpy.typing import NDArray

from swarmnode.crdt.record import Element
from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.provenance import MOMENTUM, tokenizer_path
from swarmnode.node.storage.checkpoints import Checkpoints, newest_round, newest_whole
from swarmnode.node.storage.datadir import RUN_ID, ChosenRun, RunStore, RunUnavailable
from swarmnode.node.storage.tensorfile import read_tensors
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.state.backend import StateBackend, StateError
from swarmnode.protocols.wire import WireError, received
from swarmnode.training import mapped
from swarmnode.training.codecs.feedback import is_finite
from swarmnode.training.hub import file_name
from swarmnode.training.options import SettingError
from swarmnode.training.outer import Layout, OuterState
from swarmnode.training.runspec import RunSpec

KEY = "note/successor"
PARENT = "parent"  # folder within the run's: the state that it begins from, as a checkpoint of round 0
MAX_REASON = 400  # characters
FEW = 4  # tensors that an error names
LOOK_EVERY = 60.0  # seconds, beside what the state tells at once: notes expire

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Succession:
    """What a run's owner says, as the record has it."""

    run: str  # id of the one that follows; "" where this one just ends
    round: int  # rounds of the parent that are in the successor, or that were done when it ended
    reason: str  # of which MAX_REASON characters count


def read(element: Element | None, spec: RunSpec) -> Succession | None:
    """What an element says about the run `spec`; None where it is not the owner's word, or no word."""
    if element is None or element.key != KEY or element.author != spec.owner or not spec.owner:
        return None
    try:
        said = received(Succession, element.value)
    except WireError:
        return None
    if said.run and (not RUN_ID.fullmatch(said.run) or said.run == spec.run_id):
        return None
    return replace(said, reason="".join(c for c in said.reason[:MAX_REASON] if c.isprintable()))


class SuccessorWatch:
    def __init__(self, state: StateBackend, spec: RunSpec) -> None:
        self._state = state
        self._spec = spec
        self.said: Succession | None = None

    @property
    def warning(self) -> str | None:
        """What the person at this node should know; None where nothing was said."""
        if self.said is None:
            return None
        why = f": {self.said.reason}" if self.said.reason else ""
        if not self.said.run:
            return f"the run's owner ended it after round {self.said.round}{why}. This node goes on until it is stopped"
        return (
            f"the run's owner published a successor{why}. This node stays here; to go over: swarmnode stop, then "
            f"swarmnode run --run {self.said.run}"
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        if not self._spec.owner:
            return
        with self._state.watch(KEY) as changes:
            while True:
                try:
                    self.said = read(await self._state.get(self._spec.owner, KEY), self._spec)
                except StateError as error:
                    logger.warning("what the run's owner says of it cannot be read now: %s", error)
                with trio.move_on_after(LOOK_EVERY):
                    await changes.receive()


# --- beginning from a file ------------------------------------------------------------------------------------------


class Unfit(ExpectedError):
    """A run cannot begin, as the file that it begins from is not here, or does not fit its model."""

    exit_code = CONFIG

    def __init__(self, text: str, folder: Path) -> None:
        """`folder`: what is kept of the run, which is of no use."""
        super().__init__(text)
        self.folder = folder


def begun_from(spec: RunSpec, weights: str) -> RunSpec:
    """The specification in a run file with the hash of the file that the run begins from, if one is named. Blocking.

    Raises SettingError.
    """
    if not weights:
        return spec
    if spec.run.parent or not spec.needs_data:
        why = "continues another one" if spec.run.parent else "is learned from rollouts"
        raise SettingError(
            f"--weights {weights}: the run {spec.run.name} {why}, so it begins from no file; leave it out"
        )
    try:
        with Path(weights).expanduser().open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingError(f"--weights {weights}: cannot be read: {error.strerror}; name a safetensors file") from error
    if spec.run.weights not in ("", found):
        raise SettingError(
            f"--weights {weights}: has sha-256 {found}, and the run file says [run] weights = {spec.run.weights}: name "
            "that file, or leave the key out of the run file"
        )
    return spec.updated(run={"weights": found})


def tokenizer_beside(weights: str) -> str:
    """The tokenizer that was exported with a file of weights; empty where none was, or no file is named."""
    beside = tokenizer_path(Path(weights).expanduser()) if weights else None
    return str(beside) if beside is not None and beside.exists() else ""


def _fitting(path: Path, spec: RunSpec, layout: Layout, folder: Path) -> NDArray[np.float32]:
    """The tensors of a file as the run's parameters, (P,). Raises Unfit."""
    try:
        tensors, sha256 = read_tensors(path)
        if sha256 != spec.run.weights:
            raise ValueError(f"it changed: its sha-256 is now {sha256}, and the run's is {spec.run.weights}")
        tensors.pop(MOMENTUM, None)
        slots = {file_name(spec.model, slot.name): slot for slot in layout.slots}
        shapes = [
            f"{name} is {tensors[name].dtype} {list(tensors[name].shape)} in place of float32 {list(slot.shape)}"
            for name, slot in slots.items()
            if name in tensors and (tensors[name].shape != slot.shape or tensors[name].dtype != np.float32)
        ]
        wrong = [("it lacks", sorted(slots.keys() - tensors)), ("the model has no", sorted(tensors.keys() - slots))]
        said = [f"{what} {_some(names)}" for what, names in (*wrong, ("its", shapes)) if names]
        if said:
            raise ValueError("; ".join(said))
        parameters: NDArray[np.float32] = mapped.zeros(layout.parameters)
        for name, slot in slots.items():
            parameters[slot.place] = tensors[name].reshape(-1)
        if not is_finite(parameters):
            raise ValueError("it contains NaN or infinity")
    except (OSError, ValueError) as error:
        raise Unfit(
            f"--weights {path}: the run {spec.run.name} cannot begin from it: {error}. A file fits where it has the "
            "tensors of the run's [model] and [data] vocabulary by the same names, in float32, as swarmnode provenance "
            "export writes them",
            folder,
        ) from error
    return parameters


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(name[:200] for name in names[:FEW]) + more


# --- publishing -----------------------------------------------------------------------------------------------------


def follow(spec: RunSpec, parent: RunSpec, *, state_hash: str, me: str) -> RunSpec:
    """The successor's specification: `spec` as its owner wrote it, with what follows from the parent filled in.

    Raises SettingError where it could not go on from the parent's state.
    """
    if spec.model.base and not spec.model.base_sha256:
        spec = spec.updated(model={"base_sha256": parent.model.base_sha256})
    task = replace(spec.task, heldout_sha256=parent.task.heldout_sha256)
    for table, same in (("model", spec.model == parent.model), ("task", task == parent.task)):
        if not same:
            raise SettingError(
                f"[{table}] differs from that of the run it continues, so its state does not fit; keep [{table}] as it "
                "is there, or begin a new run"
            )
    owner = spec.run.owner or parent.owner
    begins = {"parent": parent.run_id, "parent_state": state_hash, "weights": ""}
    spec = spec.updated(run={"owner": owner, **begins})
    if not spec.data.index:
        spec = spec.updated(task={"heldout_sha256": parent.task.heldout_sha256})
        spec = replace(spec, data=replace(parent.data, source=spec.data.source, sealed=spec.data.sealed))
    return spec.begun_by(me)


def keep_parent(store: RunStore, spec: RunSpec, layout: Layout, saved: Saved) -> None:
    """Keep the successor `spec` and the state that it begins from. Blocking. Raises NoSpace or DataDirError."""
    store.keep(spec)
    _checkpoints(store, spec, layout, PARENT).save(replace(saved, round=0, members=(), extra=b""))


def first_state(store: RunStore, chosen: ChosenRun, layout: Layout, weights: str) -> Saved | None:
    """What the chosen run begins from where the seed does not say it, as a checkpoint of its round 0. Blocking.

    That is the state of the run that it continues, or `weights`, the file that this node's owner named. None where it
    is the seed, or has to come from members. Raises ExpectedError, of these Unfit where the file is amiss.
    """
    spec, folder = chosen.spec, store.folder(chosen.run_id)
    if not (spec.run.parent or spec.run.weights):
        return None
    kept, own = _checkpoints(store, spec, layout, PARENT).newest(), _checkpoints(store, spec, layout, "checkpoints")
    if kept is not None:
        if newest_whole(own.folder, spec.run_id) is None:  # it finds its place as one that comes back to round 0
            own.save(kept)
        return kept
    if spec.run.parent:
        of_parent = store.folder(spec.run.parent) / "checkpoints"
        found = newest_whole(of_parent, spec.run.parent, layout=layout, state_hash=spec.run.parent_state)
        if found is None and chosen.creator:
            raise RunUnavailable(
                f"run {spec.run.name} continues run {spec.run.parent[:12]}…, whose state {spec.run.parent_state[:12]}… "
                "is not on this machine. Join a node that has it (--join), or begin where that run was trained."
            )
        if found is None:
            logger.info("the state that run %s begins from is not here; members of the run have it", spec.run.name)
            return None
        begun = found[1]
    elif not chosen.creator or newest_round(own.folder) is not None:
        return None
    elif not weights:
        raise Unfit(
            f"run {spec.run.name} begins from the file with sha-256 {spec.run.weights}, which this node was not given: "
            "add --weights FILE, or join a member of the run (--join)",
            folder,
        )
    else:
        zeros = np.zeros(layout.parameters, np.float32)
        begun = Saved(0, OuterState(_fitting(Path(weights).expanduser(), spec, layout, folder), zeros), zeros, ())
    keep_parent(store, spec, layout, begun)
    return first_state(store, chosen, layout, weights)


def _checkpoints(store: RunStore, spec: RunSpec, layout: Layout, name: str) -> Checkpoints:
    """Those in a folder of the run's own, of which the newest stays."""
    return Checkpoints(store.folder(spec.run_id) / name, run_id=spec.run_id, layout=layout, keep=1)
