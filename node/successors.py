"""How a run goes on as another one: its owner says that it ends, or publishes a successor, and nodes may follow.

The owner (`RunSpec.owner`) writes the record `note/successor` in the run's replicated state; nobody else's counts. It
says `end`, or the id of a run whose specification names this run and the hash of one of its states as parent. Notes
live for a week, so an owner who is to be heard by late comers says it again.

A node changes nothing by itself: its `status` tells what the owner said, and the person decides (`swarmnode run --run
ID`). The successor begins at round 0 from the parent's state: parameters, outer momentum, and each node's own residual
move over, whatever the exchange method; what only the parent's method understands is left behind. Who has that state
as a checkpoint of the parent begins from it; who has not fetches the run's state from members, like any joiner.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from swarmnode.crdt.record import Element
from swarmnode.node.exitcodes import RUN_UNAVAILABLE, ExpectedError
from swarmnode.node.storage.checkpoints import Checkpoints, newest_whole
from swarmnode.node.storage.runs import ChosenRun, RunStore
from swarmnode.protocols.methods.method import Saved
from swarmnode.protocols.state.backend import StateBackend
from swarmnode.training.layout import Layout
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, encode

logger = logging.getLogger(__name__)

KEY = "note/successor"
PARENT = "parent"  # folder within the run's: the state that it begins from, as a checkpoint of round 0
MAX_REASON = 400  # characters
LOOK_EVERY = 60.0  # seconds, beside what the state tells at once: notes expire


class ParentMissing(ExpectedError):
    """This node is to begin a run from its parent's state, and does not have that."""

    exit_code = RUN_UNAVAILABLE


@dataclass(frozen=True)
class Succession:
    """What a run's owner said: the run that follows, or "" where this one just ends."""

    run_id: str
    round: int  # rounds of the parent that are in the successor, or that were done when it ended
    reason: str

    def value(self) -> dict[str, Any]:
        """As it is written into the state."""
        return {"run": self.run_id, "round": self.round, "reason": self.reason[:MAX_REASON]}


def read(element: Element | None, spec: RunSpec) -> Succession | None:
    """What an element says about the run `spec`; None where it is not the owner's word, or no word."""
    if element is None or element.key != KEY or element.author != spec.owner or not spec.owner:
        return None
    value = element.value
    if element.tombstone or not isinstance(value, dict):
        return None
    run_id, round, reason = value.get("run"), value.get("round"), value.get("reason")
    if not isinstance(run_id, str) or type(round) is not int or not isinstance(reason, str):
        return None
    if run_id and (len(run_id) != 64 or not set(run_id) <= set("0123456789abcdef") or run_id == spec.run_id):
        return None
    return Succession(run_id, round, "".join(c for c in reason[:MAX_REASON] if c.isprintable()))


class SuccessorWatch:
    """Keeps up with what the owner of one run says."""

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
        if not self.said.run_id:
            return f"the run's owner ended it after round {self.said.round}{why}. This node goes on until it is stopped"
        return (
            f"the run's owner published a successor{why}. This node stays here; to go over: swarmnode stop, then "
            f"swarmnode run --run {self.said.run_id}"
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        if not self._spec.owner:
            return
        with self._state.watch(KEY) as changes:
            while True:
                self.said = read(await self._state.get(self._spec.owner, KEY), self._spec)
                with trio.move_on_after(LOOK_EVERY):
                    await changes.receive()


# --- publishing -----------------------------------------------------------------------------------------------------


def follow(spec: RunSpec, parent: RunSpec, *, state_hash: str, me: str) -> RunSpec:
    """The successor's specification: `spec` as its owner wrote it, with what follows from the parent filled in.

    Raises SettingError where it could not go on from the parent's state.
    """
    for table in ("model", "task"):
        ours, theirs = getattr(spec, table), getattr(parent, table)
        if table == "task":
            ours = dataclasses.replace(ours, heldout_sha256=theirs.heldout_sha256)
        if ours != theirs:
            raise SettingError(
                f"[{table}] differs from that of the run it continues, so its state does not fit; keep [{table}] as it "
                "is there, or begin a new run"
            )
    run = dataclasses.replace(
        spec.run, owner=spec.run.owner or parent.owner, parent=parent.run_id, parent_state=state_hash
    )
    spec = dataclasses.replace(spec, run=run)
    if not spec.data.index:
        spec = spec.resolved(heldout_sha256=parent.task.heldout_sha256, index=parent.data.index)
    return spec.begun_by(me)


def keep_parent(store: RunStore, spec: RunSpec, layout: Layout, saved: Saved) -> None:
    """Keep the successor `spec` and the state that it begins from. Blocking. Raises NoSpace or DataDirError."""
    store.keep(spec)
    _parent_of(store, spec, layout).save(dataclasses.replace(saved, round=0, members=(), extra=b""))


def parent_state(store: RunStore, chosen: ChosenRun, layout: Layout) -> Saved | None:
    """What the chosen run begins from where it continues another one, as a checkpoint of its round 0. Blocking.

    None where it continues none, or where the state has to come from members. Raises ParentMissing, NoSpace or
    DataDirError.
    """
    spec = chosen.spec
    if not spec.run.parent:
        return None
    kept = _parent_of(store, spec, layout).newest()
    if kept is not None:
        return _as_first_checkpoint(store, spec, layout, kept)

    def is_it(manifest: Any) -> bool:
        named = (manifest.run_id, manifest.state_hash, manifest.table)
        return bool(named == (spec.run.parent, spec.run.parent_state, layout))

    found = newest_whole(store.folder(spec.run.parent) / "checkpoints", is_it)
    if found is not None:
        keep_parent(store, spec, layout, found[1])
        return parent_state(store, chosen, layout)
    if chosen.creator:
        raise ParentMissing(
            f"run {spec.run.name} continues run {spec.run.parent[:12]}…, whose state {spec.run.parent_state[:12]}… is "
            "not on this machine. Join a node that has it (--join), or begin where that run was trained."
        )
    logger.info("the state that run %s begins from is not here; members of the run have it", spec.run.name)
    return None


def _as_first_checkpoint(store: RunStore, spec: RunSpec, layout: Layout, parent: Saved) -> Saved:
    """A node that has no checkpoint of the run yet finds its place as one that comes back to round 0."""
    folder = store.folder(spec.run_id) / "checkpoints"
    if newest_whole(folder, lambda manifest: manifest.run_id == spec.run_id) is None:
        Checkpoints(folder, run_id=spec.run_id, layout=layout, keep=1, spec=encode(spec)).save(parent)
    return parent


def _parent_of(store: RunStore, spec: RunSpec, layout: Layout) -> Checkpoints:
    folder: Path = store.folder(spec.run_id) / PARENT
    return Checkpoints(folder, run_id=spec.run_id, layout=layout, keep=1, spec=encode(spec))
