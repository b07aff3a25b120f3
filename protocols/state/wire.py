"""What nodes say to one another about the replicated state, and how much of it at once.

Elements travel sealed, as their author signed them. What a node may or may not have is named by *ranks* (see
`backend`), 40 bytes each, one after another in one field.

| call | request | answer |
|---|---|---|
| `state.push` | `Push`: elements, and ranks of others that the sender holds | `Pushed`: those of the ranks it lacks |
| `state.fetch` | `StateFetch`: ranks that the other is known to hold | `Elements`: as many as fit, in that order |
| `state.repair` | `RepairStep`: a frame of `crdt.reconcile` | `RepairAnswer`: the next frame |
| `state.own` | `RunQuery`: what did I sign? | `OwnElements`: the newest records of the caller |

All four are refused with "unknown-run" by a node of another run, and with "refused" to a peer whose conduct was bad.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from swarmnode.crdt.ranges import RANK
from swarmnode.protocols.state.backend import Rank
from swarmnode.protocols.wire import Message, WireError

MAX_BATCH = 256 * 1024  # bytes of elements in one message: four of them are a second's worth of what one peer may send
MAX_RANKS = 512  # in one message: 20 KiB, which name some 200 KiB of elements
MAX_ELEMENTS = 1024  # in one message


def check_ranks(what: str, ranks: bytes) -> None:
    """Raise WireError unless these are whole ranks, and no more than one message may name."""
    if len(ranks) % RANK or len(ranks) > MAX_RANKS * RANK:
        raise WireError(f"{what} has {len(ranks)} bytes, not at most {MAX_RANKS} ranks of {RANK}")


def check_sealed(what: str, sealed: tuple[bytes, ...]) -> None:
    """Raise WireError for more elements than `batches` puts into one message."""
    if len(sealed) > MAX_ELEMENTS or sum(map(len, sealed)) > MAX_BATCH:
        raise WireError(f"{what} has more than {MAX_ELEMENTS} elements, or than {MAX_BATCH} bytes of them")


Ranks = Annotated[bytes, check_ranks]
Sealed = Annotated[tuple[bytes, ...], check_sealed]


@dataclass(frozen=True)
class Push(Message):
    """Elements that are news here, and the ranks of more; both may be empty."""

    run_id: str
    sealed: Sealed = ()
    ranks: Ranks = b""


@dataclass(frozen=True)
class Pushed(Message):
    """The ranks that were offered and are wanted."""

    wanted: Ranks = b""


@dataclass(frozen=True)
class StateFetch(Message):
    run_id: str
    ranks: Ranks


@dataclass(frozen=True)
class Elements(Message):
    sealed: Sealed = ()


@dataclass(frozen=True)
class RepairStep:
    """One half round of a repair; `session` is a number of the caller's choice, the same in all its steps."""

    run_id: str
    session: int
    frame: bytes
    time: int = 0  # ms since the epoch, by the caller's clock; 0 where it does not say


@dataclass(frozen=True)
class RepairAnswer:
    frame: bytes
    time: int  # ms since the epoch, by the clock of who answers


@dataclass(frozen=True)
class OwnElements(Message):
    sealed: Sealed
    time: int  # ms since the epoch, by the clock of who answers


def split(ranks: bytes) -> tuple[Rank, ...]:
    """The ranks in a field of a message, all of which are whole."""
    return tuple(ranks[at : at + RANK] for at in range(0, len(ranks), RANK))


def batches(sealed: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    """All elements in messages that keep the limits, in order."""
    batch: list[bytes] = []
    size = 0
    for raw in sealed:
        if batch and (size + len(raw) > MAX_BATCH or len(batch) == MAX_ELEMENTS):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(raw)
        size += len(raw)
    if batch:
        yield tuple(batch)
