"""The writer judges a batch as it judges its elements one by one, whatever they do to one another."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.crdt.hlc import stamp_at
from swarmnode.crdt.kinds import KINDS
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import Record, write
from swarmnode.node.storage.statedb import StateDatabase

RUN = "ab" * 32
NOW = 1_800_000_000_000  # ms
FEW = {
    "note": dataclasses.replace(KINDS["note"], slots=2),
    "score": dataclasses.replace(KINDS["score"], slots=2),
}
KEYS = ("note/a", "note/b", "note/c", "score/00000001/0", "score/00000001/1", "score/00000002/0")

records = st.builds(
    lambda author, key, time, value: write(
        RUN, author, key, value, hlc=stamp_at(NOW - time, 0), sign=lambda _: bytes(64)
    ),
    st.sampled_from(("Ann", "Bea")),
    st.sampled_from(KEYS),
    st.integers(0, 5),
    st.integers(0, 1),
)


def state(path: Path, batches: list[list[Record]]) -> tuple[list[Merged], list[tuple[str, bytes]], set[str]]:
    """Verdicts; kinds and ranks of records, as the changes and the database tell; and who is convicted of what."""
    writer = StateDatabase(path, RUN)
    verdicts: list[Merged] = []
    told: set[tuple[str, bytes]] = set()
    for batch in batches:
        applied = writer.apply(batch, now=NOW, horizon=0)
        verdicts += applied.verdicts
        told -= {(kind, rank) for kind, rank in told if rank in applied.removed}
        told |= {(element.kind, rank) for rank, element in applied.added.items()}
    stored = writer._connection.execute("SELECT kind, rank FROM element").fetchall()
    assert set(stored) == told and len(stored) == len(told)
    assert writer.ranks.keys() == sorted(rank for _, rank in stored)
    evidence = "SELECT name, key FROM element JOIN author ON author = number WHERE kind = 'evidence'"
    convicted = {f"{row}" for row in writer._connection.execute(evidence)}
    counts = dict(writer._counts)
    writer._recall()
    assert {slot: count for slot, count in counts.items() if count} == dict(writer._counts)
    writer.close()
    return verdicts, sorted(one for one in stored if one[0] != "evidence"), convicted


@settings(deadline=None, max_examples=60)
@given(st.lists(records, max_size=24), st.integers(0, 24))
def test_a_batch_is_judged_as_its_elements_one_by_one(found: list[Record], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.dict(KINDS, FEW):
        first = state(Path(folder) / "one.db", [[one] for one in found])
        assert state(Path(folder) / "all.db", [found[:cut], found[cut:]]) == first
