"""A run's owner, and nobody else, says how it goes on; what a node learned moves over, and nothing moves by itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.node.storage.datadir import ChosenRun, DataDir, RunStore, RunUnavailable
from swarmnode.node.succession import KEY, SuccessorWatch, first_state, follow, keep_parent
from swarmnode.protocols.methods.method import Saved
from swarmnode.testing.memorystate import MemoryState, clocks_of
from swarmnode.testing.simnet import SimWorld, run_with_nursery
from swarmnode.training.options import SettingError
from swarmnode.training.outer import Layout, OuterState, state_hash
from swarmnode.training.runspec import RunSpec, decode, encode
from swarmnode.training.sections import ExchangeSection, ModelSection, OuterSection, RunSection

LAYOUT = Layout.of([("w", (20,))])
OWNER = "12D3KooWOwner"
PARENT = RunSpec(RunSection(name="parent", owner=OWNER)).resolved(heldout_sha256="ab" * 32, index="cd" * 32)
STATE = OuterState(np.arange(20, dtype=np.float32), np.full(20, 0.5, np.float32))
HASH = state_hash(40, LAYOUT, STATE)
SAVED = Saved(40, STATE, np.full(20, 0.25, np.float32), ("a", "b"), "diloco", b"what only diloco understands")


def new(**run: Any) -> RunSpec:
    return RunSpec(RunSection(name="child", **run), outer=OuterSection(lr=0.7, momentum=0.6))


def test_a_successor_says_what_it_continues_and_may_change_all_but_model_and_task() -> None:
    spec = follow(new(), PARENT, state_hash=HASH, me=OWNER)
    assert (spec.run.parent, spec.run.parent_state, spec.owner) == (PARENT.run_id, HASH, OWNER)
    assert (spec.data.index, spec.task.heldout_sha256) == ("cd" * 32, "ab" * 32)
    assert decode(encode(spec), expected_run_id=spec.run_id) == spec
    open_one = dataclasses.replace(new(trust="open"), exchange=ExchangeSection())
    assert follow(open_one, PARENT, state_hash=HASH, me=OWNER).trust.validators == (OWNER,)
    with pytest.raises(SettingError, match=r"\[model\]"):
        follow(dataclasses.replace(new(), model=ModelSection(layers=2)), PARENT, state_hash=HASH, me=OWNER)


@pytest.mark.parametrize("by", ["diloco", "open"])
def test_state_momentum_and_residual_move_over_to_another_method(tmp_path: Path, by: str) -> None:
    store = RunStore(DataDir(tmp_path))
    folder = store.folder(PARENT.run_id) / "checkpoints"
    kept = Checkpoints(folder, run_id=PARENT.run_id, layout=LAYOUT, keep=5)
    kept.save(dataclasses.replace(SAVED, method=by))
    kept.save(Saved(41, OuterState(STATE.momentum, STATE.parameters), SAVED.residual, ()))  # the parent went on
    spec = follow(new(), PARENT, state_hash=HASH, me=OWNER)
    found = first_state(store, ChosenRun(spec, spec.run_id, False), LAYOUT, "")
    assert found is not None and (found.round, found.extra) == (0, b"")
    first = Checkpoints(store.folder(spec.run_id) / "checkpoints", run_id=spec.run_id, layout=LAYOUT, keep=1).newest()
    for saved in (found, first):
        assert saved is not None and saved.round == 0
        assert saved.state.parameters.tobytes() == STATE.parameters.tobytes()
        assert saved.state.momentum.tobytes() == STATE.momentum.tobytes()
        assert saved.residual.tobytes() == SAVED.residual.tobytes()


def test_a_node_that_went_on_in_the_new_run_does_not_begin_it_again(tmp_path: Path) -> None:
    store = RunStore(DataDir(tmp_path))
    spec = follow(new(), PARENT, state_hash=HASH, me=OWNER)
    keep_parent(store, spec, LAYOUT, SAVED)
    own = Checkpoints(store.folder(spec.run_id) / "checkpoints", run_id=spec.run_id, layout=LAYOUT, keep=1)
    own.save(dataclasses.replace(SAVED, round=7))
    assert first_state(store, ChosenRun(spec, spec.run_id, True), LAYOUT, "") is not None
    newest = own.newest()
    assert newest is not None and newest.round == 7


def test_who_lacks_the_parents_state_joins_those_who_have_it_and_begins_nothing(tmp_path: Path) -> None:
    store = RunStore(DataDir(tmp_path))
    spec = follow(new(), PARENT, state_hash=HASH, me=OWNER)
    assert first_state(store, ChosenRun(spec, spec.run_id, False), LAYOUT, "") is None
    with pytest.raises(RunUnavailable, match="not on this machine"):
        first_state(store, ChosenRun(spec, spec.run_id, True), LAYOUT, "")
    assert first_state(store, ChosenRun(PARENT, PARENT.run_id, True), LAYOUT, "") is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"run": "ef" * 32, "round": 40, "reason": "a better rate\x1b[2J"}, "swarmnode run --run " + "ef" * 32),
        ({"run": "", "round": 40, "reason": "done"}, "ended it after round 40: done"),
        ({"run": "ef" * 32, "round": "40", "reason": ""}, None),
        ({"run": "../../etc", "round": 1, "reason": ""}, None),
        ({"round": 1}, None),
        ("a note", None),
    ],
)
@pytest.mark.parametrize("by_owner", [True, False])
def test_only_what_the_owner_says_counts_and_a_person_is_told(value: Any, told: str | None, by_owner: bool) -> None:
    async def main(nursery: trio.Nursery) -> None:
        world = SimWorld()
        network, owner = world.node("me"), world.node("owner")
        author = network.me if by_owner else owner.me
        spec = dataclasses.replace(PARENT, run=dataclasses.replace(PARENT.run, owner=author))
        state = MemoryState(spec.run_id, me=network.me, sign=network.sign, clocks=clocks_of(lambda: 1_700_000_000_000))
        await nursery.start(network.run)
        await nursery.start(state.run)
        watch = SuccessorWatch(state, spec)
        await nursery.start(watch.run)
        assert watch.warning is None
        await state.write(KEY, value)
        await trio.sleep(1.0)
        if told is None or not by_owner:
            assert watch.warning is None
        else:
            assert watch.warning is not None and told in watch.warning and "\x1b" not in watch.warning
        await state.write(KEY, None)
        await trio.sleep(1.0)
        assert watch.warning is None

    run_with_nursery(main)
