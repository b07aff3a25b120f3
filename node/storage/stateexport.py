"""The replicated state as one file, to look at elsewhere or to begin from without peers.

    "swarmnode-state/1 <run id>\\n", then for each element its length as u32 big-endian and its sealed bytes

Elements carry their signatures, so a file needs no trust: importing verifies each one, as if a peer had sent it.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import BinaryIO

from swarmnode.crdt.envelope import Verify
from swarmnode.crdt.ranges import END, START
from swarmnode.crdt.record import MAX_SEALED, Element, InvalidRecord, open_element
from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.storage.datadir import replacing, unusable, write_all
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.backend import StateBackend

BATCH = 256  # elements read, verified and merged at once
_HEAD = "swarmnode-state/1 "


async def export(backend: StateBackend, target: Path, *, now: int, runner: Runner) -> int:
    """Write all that has not expired by `now`, ms; how many elements. The file appears whole or not at all.

    Raises DataDirError, Unwritable.
    """
    ranks, written = backend.snapshot(now).keys(START, END), 0
    with replacing(target, by_owner=True) as file:
        write_all(file, f"{_HEAD}{backend.run_id}\n".encode())
        for at in range(0, len(ranks), BATCH):
            sealed = await backend.sealed(ranks[at : at + BATCH])
            written += len(sealed)
            framed = b"".join(len(raw).to_bytes(4, "big") + raw for raw in sealed)
            await runner(partial(write_all, file, framed))
        await runner(partial(os.fsync, file.fileno()))  # so that closing it holds up nothing
    return written


async def import_(backend: StateBackend, source: Path, *, verify: Verify, runner: Runner) -> Counter[str]:
    """Merge the elements of a file; counts by verdict, and "invalid" for those that do not verify.

    Raises UsageMistake, DataDirError, Unwritable; what was merged until then stays.
    """
    counts: Counter[str] = Counter()
    try:
        with source.open("rb") as file:
            head = await runner(lambda: file.readline(len(_HEAD) + 65))
            if head != f"{_HEAD}{backend.run_id}\n".encode():
                if not head.startswith(_HEAD.encode()):
                    raise UsageMistake(f"{source} is no file that swarmnode state export wrote")
                run = head[len(_HEAD) :].decode(errors="replace").strip()
                raise UsageMistake(
                    f"{source} holds the state of run {run[:12]}…, and this node takes part in {backend.run_id[:12]}…"
                )
            while batch := await runner(lambda: _read(file, source, verify, backend.run_id)):
                elements = [element for element in batch if element is not None]
                counts["invalid"] += len(batch) - len(elements)
                counts.update(verdict.value for verdict in await backend.merge(elements))
    except OSError as error:
        raise unusable(error, source, "read") from error
    return +counts


def _read(file: BinaryIO, source: Path, verify: Verify, run_id: str) -> list[Element | None]:
    """The next elements of a file; None for each that is invalid."""
    found: list[Element | None] = []
    while len(found) < BATCH and (head := file.read(4)):
        size = int.from_bytes(head, "big")
        raw = file.read(size) if len(head) == 4 and size <= MAX_SEALED else b""
        if not raw or len(raw) != size:
            raise UsageMistake(f"{source} is cut off or damaged; what came before that was taken")
        try:
            element = open_element(raw, verify)
        except InvalidRecord:
            found.append(None)
        else:
            found.append(element if element.run == run_id else None)
    return found
