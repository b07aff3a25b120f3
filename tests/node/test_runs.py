"""Which run a node takes part in, and who judges one that begins here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from swarmnode.node.datadir import DataDir
from swarmnode.node.runs import ChosenRun, NoRun, RunFinder, RunStore
from swarmnode.protocols.runner import inline
from swarmnode.training.runspec import RunSpec

OPEN = '[run]\nname = "t"\ntrust = "open"\n'


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    datadir = DataDir(tmp_path / "data").open()
    yield RunStore(datadir)
    datadir.close()


def choose(store: RunStore, file: Path, *, me: str = "12D3me", joining: bool = False) -> ChosenRun:
    async def publish(spec: RunSpec) -> RunSpec:
        return spec.resolved(heldout_sha256="00", index="00" * 32)

    async def main() -> ChosenRun:
        network = cast(Any, SimpleNamespace(me=me))
        finder = RunFinder(store=store, network=network, rpc=cast(Any, None), runner=inline, publish=publish)
        return await finder.choose(file=file, run_id=None, joining=joining, failures=dict, custom_task=False)

    return trio.run(main)


def test_who_begins_an_open_run_is_its_elector_and_begins_the_same_run_again(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OPEN)
    chosen = choose(store, file)
    assert chosen.spec.trust.electors == ("12D3me",)
    assert chosen.run_id == chosen.spec.run_id
    assert choose(store, file, joining=True) == chosen  # after a restart, with an address to join
    assert choose(store, file, me="12D3other").run_id != chosen.run_id


def test_one_that_joins_by_a_file_without_electors_is_told_to_name_the_run(store: RunStore, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OPEN)
    with pytest.raises(NoRun, match="electors"):
        choose(store, file, joining=True)
    file.write_text(OPEN + '[trust]\nelectors = ["12D3other"]\n')
    assert choose(store, file, joining=True).spec.trust.electors == ("12D3other",)
