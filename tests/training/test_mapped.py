"""Large vectors lie in mapped files: no memory of the process's own, no name on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swarmnode.training import mapped
from swarmnode.training.outer import OuterState, outer_step

SIZE = mapped.LARGE  # elements: four times as many bytes as is large


def own_memory() -> int:
    """Bytes of this process's anonymous memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    mapped.keep_in(tmp_path)
    yield tmp_path
    mapped.keep_in(None)


def test_states_of_several_rounds_take_no_memory_of_the_process(folder: Path) -> None:
    gradient = np.full(SIZE, 0.5, np.float32)
    state = OuterState.start(gradient)
    before = own_memory()
    states = [state := outer_step(state, gradient, lr=1.0, momentum=0.9) for _ in range(3)]
    assert own_memory() - before < SIZE  # a quarter of one of the six vectors
    assert not list(folder.iterdir())
    assert len({float(each.parameters[-1]) for each in states}) == 3


def test_where_the_disk_has_no_room_a_vector_lies_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped.os, "posix_fallocate", full)
    vector = mapped.zeros(SIZE)
    vector[-1] = 1.0
    assert vector.sum() == 1.0


def test_small_vectors_lie_in_memory(folder: Path) -> None:
    mapped.keep_in(folder / "nowhere")
    assert mapped.zeros(1000).sum() == 0
