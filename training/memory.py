"""What a node of a run holds, in bytes: a table of all that grows with the model, by arithmetic alone.

    table = needs(spec, Weight(parameters=134_515_008), Keeping(checkpoints=3))
    table.memory, table.device, table.disk          # bytes; `parts` says what each is for
    refusal(table, Machine(memory, disk, device))   # why it cannot fit, and what to do; empty where it does

P are the parameters that are trained and exchanged, n the members. `memory` is what processes hold for themselves and
cannot give back. What is mapped (`mapped.py`) lies on the disk, and in as much memory as nobody else needs; of small
models, whose vectors have less than LARGE bytes, it lies in memory. Nothing here grows with the number of peers but
contributions on the disk, and those up to a cap.

Who checks that it is true: bench/large.py, by the kernel's figures of a daemon and its trainer.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.training.codecs import codec
from swarmnode.training.codecs.topk import TopK, kept_of
from swarmnode.training.gossip import weights_codec
from swarmnode.training.mapped import LARGE
from swarmnode.training.runspec import RunSpec
from swarmnode.training.verify.recorder import room as states_room
from swarmnode.training.verify.recorder import shown_room

FLOAT = 4  # bytes
TOGETHER = 1 << 24  # elements that Muon orthogonalises at once; each takes 8 bytes meanwhile
DAEMON, TRAINER = 120_000_000, 160_000_000  # bytes of the two processes around a model of nothing
STATES_SERVED = 4  # rounds whose states are kept for late comers, or …
STATES_OF_CHAIN = 8  # … to go back to, in open runs
CONTRIBUTIONS = 256  # of an open run that are kept
IN_MEMORY = 1 << 28  # bytes of contributions, where each is small, and of decoded ones
FETCHED_FOR_AUDITS, OFFERS = 12, 8  # vectors of 2 P that an auditor fetches, and that an author keeps to be fetched


@dataclass(frozen=True)
class Weight:
    """A model, as far as memory goes."""

    parameters: int  # P
    frozen: int = 0  # bytes of others, which only the trainer has
    matrices: int = 0  # of P, those that Muon updates
    step: int = 0  # bytes that a step takes beside parameters, gradient and moments, freed at its end


@dataclass(frozen=True)
class Keeping:
    checkpoints: int = 3
    hours: float = 24.0  # as `checkpoint_hours`
    members: int = 2  # n
    ranks: int = 1  # processes that train
    sharded: bool = False  # they divide the model among them


@dataclass(frozen=True)
class Machine:
    """Bytes that are free."""

    memory: float
    disk: float
    device: float = math.inf

    @classmethod
    def here(cls, folder: str, device: float | None) -> Machine:
        """This machine's memory, or what its cgroup leaves of it, and the disk of a folder."""
        free = math.inf
        with suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        with suppress(OSError, ValueError, StopIteration):
            named = next(n for n in Path("/proc/self/cgroup").read_text().splitlines() if n.startswith("0::"))
            group = Path("/sys/fs/cgroup") / named.removeprefix("0::/")
            limit, used = int((group / "memory.max").read_text()), (group / "memory.stat").read_text().split()
            free = min(free, limit - sum(float(used[used.index(name) + 1]) for name in ("anon", "shmem")))
        return cls(free, shutil.disk_usage(folder).free, math.inf if device is None else device)


@dataclass(frozen=True)
class Held:
    by: str  # trainer or daemon
    where: str  # memory, device, mapped (the disk, and spare memory), disk, or older (disk that a run takes in time)
    what: str
    size: int  # bytes


@dataclass(frozen=True)
class Needs:
    parts: tuple[Held, ...]

    def of(self, *where: str, by: str = "") -> int:
        """Bytes in these places."""
        return sum(part.size for part in self.parts if part.where in where and by in ("", part.by))

    @property
    def memory(self) -> int:
        return self.of("memory")

    @property
    def device(self) -> int:
        return self.of("device")

    @property
    def disk(self) -> int:
        return self.of("mapped", "disk", "older")

    def told(self) -> dict[str, object]:
        rows = [{"by": p.by, "where": p.where, "what": p.what, "bytes": p.size} for p in self.parts if p.size]
        return {"memory": self.memory, "device": self.device, "disk": self.disk, "parts": rows}


def needs(spec: RunSpec, weight: Weight, keeping: Keeping = Keeping(), *, on_device: bool = False) -> Needs:
    """The table of one node; `on_device`: it trains on an accelerator with memory of its own."""
    rows = (*_trainer(spec, weight, keeping, on_device), *_daemon(spec, weight.parameters, keeping.members))
    if FLOAT * weight.parameters < LARGE:  # such vectors are not worth a file
        rows = tuple(replace(row, where="memory") if row.where == "mapped" else row for row in rows)
    return Needs((*rows, *_disk(spec, weight, keeping)))


def _trainer(spec: RunSpec, weight: Weight, keeping: Keeping, on_device: bool) -> Iterator[Held]:
    vector, there = FLOAT * weight.parameters, "device" if on_device else "memory"
    here = 1 if on_device else keeping.ranks  # of the ranks, whose memory this is; a device is one rank's
    share = here / (keeping.ranks if keeping.sharded else 1)  # copies of what ranks may divide
    beside = share if on_device or keeping.sharded else share - 1  # the shared ones
    own = beside + (share if keeping.sharded else 0)
    yield Held("trainer", "memory", "the process", TRAINER * keeping.ranks)
    yield Held("trainer", "memory", "parameters, shared with the daemon", vector)
    yield Held("trainer", there, "parameters", int(own * vector))
    what = "parameters while a step tries others" if spec.exchange.method == "seed" else "gradient"
    yield Held("trainer", there, what, int(share * vector))
    yield Held("trainer", "memory", "moments of the optimizer, shared with the daemon", moments_of(spec, weight))
    yield Held("trainer", there, "moments of the optimizer", int(beside * moments_of(spec, weight)))
    if spec.inner.optimizer == "muon":
        updated = here * 2 * FLOAT * min(weight.matrices, TOGETHER)
        yield Held("trainer", there, "matrices while Muon updates them", updated)
    yield Held("trainer", there, "parameters that are not trained", int(share * weight.frozen))
    yield Held("trainer", there, "a step", weight.step * here // keeping.ranks)
    if spec.exchange.method == "open":
        yield Held("trainer", "memory", "gradient of a judge, shared with the daemon", vector)
        if spec.audited:
            state = vector + moments_of(spec, weight)
            yield Held("trainer", there, "where the last steps ended", vector)
            yield Held("trainer", "mapped", "own state while another's steps are repeated", state)


def moments_of(spec: RunSpec, weight: Weight) -> int:
    """Bytes of the optimizer's moments: two of each parameter, one of those that Muon updates; by sgd or seeds none."""
    if spec.exchange.method == "seed" or spec.inner.optimizer == "sgd":
        return 0
    return FLOAT * (2 * weight.parameters - (weight.matrices if spec.inner.optimizer == "muon" else 0))


def _daemon(spec: RunSpec, parameters: int, n: int) -> Iterator[Held]:
    vector, sent = FLOAT * parameters, codec(spec.exchange.codec).encoded_size(parameters)
    momentum = vector if spec.outer.momentum > 0 or spec.exchange.method == "seed" else 0
    states = STATES_SERVED
    yield Held("daemon", "memory", "the process", DAEMON)
    if spec.exchange.method != "seed":
        yield Held("daemon", "memory", "residual, and the one after the round", 2 * vector)
    yield Held("daemon", "mapped", "copies of parameters, pseudo-gradient", 2 * vector)
    match spec.exchange.method:
        case "async" | "diloco" | "streaming" | "lowrank":
            if spec.exchange.method != "diloco":
                yield Held("daemon", "memory", "where unsettled work began", vector)
            if spec.exchange.method == "lowrank":
                yield Held("daemon", "memory", "own work, and what its factors leave over", 3 * vector)
            part = min(n, spec.exchange.group_size)
            yield Held("daemon", "memory", "mean", vector)
            yield Held("daemon", "memory", "residuals of the part that it reduces", 2 * vector // part)
            buffers = sent * (2 + (part - 1) / part + 2 / part + (part - 1) / part)
            yield Held("daemon", "memory", "encoded: sent and taken, of two rounds", int(buffers))
        case "demo":
            yield Held("daemon", "memory", "sum, and one encoding decoded", 2 * vector)
            yield Held("daemon", "memory", "encoded: sent and taken, of two rounds", 2 * n * sent)
        case "gossip":
            travels = 2 * (sent + weights_codec(spec.exchange.codec).encoded_size(parameters))
            yield Held("daemon", "memory", "of a pair: both pseudo-gradients, the other's weights", 3 * vector)
            yield Held("daemon", "memory", "encoded: offered and taken", travels)
        case "seed":
            yield Held("daemon", "memory", "where the run began, and the sum of directions", 2 * vector)
        case "btard":
            yield Held("daemon", "memory", "mean", vector)
            yield Held("daemon", "memory", "contributions to its part, decoded and sorted", 3 * vector)
            yield Held("daemon", "memory", "encoded: sent and taken", 4 * sent)
        case "open":
            states = STATES_OF_CHAIN
            yield Held("daemon", "memory", "sum of contributions", vector)
            yield Held("daemon", "memory", "gradient while it judges", vector)
            counted = min(CONTRIBUTIONS, 64 * n)
            decoded = min(12 * kept_of(parameters) * counted, max(IN_MEMORY, vector))
            small = CONTRIBUTIONS * sent <= IN_MEMORY
            where = "memory" if small else "mapped"
            yield Held("daemon", where, "contributions", min(counted * sent, max(IN_MEMORY, CONTRIBUTIONS * sent)))
            yield Held("daemon", "memory", "contributions, decoded", decoded if spec.exchange.codec == TopK.name else 0)
            yield Held("daemon", "mapped", "where the offer and training stand", 2 * vector)
    yield Held("daemon", "mapped", f"shared states of {states} rounds", states * (vector + momentum))


def _disk(spec: RunSpec, weight: Weight, keeping: Keeping) -> Iterator[Held]:
    vector = FLOAT * weight.parameters
    momentum = vector if spec.outer.momentum > 0 or spec.exchange.method == "seed" else 0
    older = int(keeping.hours).bit_length()
    count = keeping.checkpoints + older + 1  # one is written before another goes
    each = 2 * vector + momentum
    both = 2 * (each + moments_of(spec, weight))  # until a checkpoint is whole, the one before keeps its moments
    yield Held("daemon", "disk", "a checkpoint, and the one before", both)
    yield Held("daemon", "older", f"up to {count - 2} older checkpoints", (count - 2) * each)
    if spec.audited:
        kept = states_room(spec.inner.steps, weight.parameters)
        yield Held("trainer", "disk", "states that others may ask for", kept)
        yield Held("daemon", "older", "copies that auditors fetch, at the most", shown_room(weight.parameters))
        yield Held("daemon", "disk", "offers, and states that it fetches", 2 * vector * (FETCHED_FOR_AUDITS + OFFERS))


def in_words(table: Needs, machine: Machine) -> str:
    on_device = f" and {_gb(table.device)} on the device" if table.device else ""
    return (
        f"this run needs {_gb(table.memory)} of memory (trainer {_gb(table.of('memory', by='trainer'))}, daemon "
        f"{_gb(table.of('memory', by='daemon'))}){on_device}, and {_gb(table.disk)} of disk here; "
        f"{_gb(machine.memory)} and {_gb(machine.disk)} are free"
    )


def refusal(table: Needs, machine: Machine) -> str:
    """Why a run cannot fit, and what to do; empty where it can."""
    if table.memory > machine.memory:
        return (
            f"{in_words(table, machine)}. Close other programs, use a machine with more memory, or begin a run with a "
            "smaller model, fewer tokens in a step ([inner] batch, [model] context) or LoRA"
        )
    if table.device > machine.device:
        return (
            f"this run needs {_gb(table.device)} on the device, of which {_gb(machine.device)} are free. Close what "
            "else uses it, train with --device cpu, or begin a run with a smaller model or fewer tokens in a step"
        )
    if table.of("mapped", "disk") > machine.disk:
        return (
            f"{in_words(table, machine)}. Make room on that disk, name another place with --data-dir, or keep fewer "
            "checkpoints (--checkpoint-keep, --checkpoint-hours)"
        )
    return ""


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
