"""The replicated state on disk: SQLite behind one writer, with the ranks of everything in memory.

    merge, write ─→ in line for the writer's lock ─→ who has it writes all that wait, as one transaction in a thread
                                                       └→ then, on the event loop: clock advanced, readers told

So what `merge` returned is on disk, what `has` and `snapshot` tell is never more than that, and a burst costs one sync
for many records. Queries run beside the writer on a connection of their own.
What is promised where the disk or the process fails is in docs/state.md.

`export` writes the state into a file, to look at elsewhere or to begin from without peers; `import_` merges it:

    "swarmnode-state/1 <run id>\\n", then for each element its length as u32 big-endian and its sealed bytes

Elements carry their signatures, so a file needs no trust: importing verifies each one, as if a peer had sent it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import trio

from swarmnode.crdt import law
from swarmnode.crdt.envelope import Sign, Verify
from swarmnode.crdt.hlc import COUNTER_BITS, MAX_STAMP, HybridClock, PeerClocks
from swarmnode.crdt.law import EVERYBODY, Merged
from swarmnode.crdt.ranges import END, START, RankSet
from swarmnode.crdt.record import MAX_SEALED, Element, InvalidRecord, open_element
from swarmnode.node.exitcodes import ExpectedError, UsageMistake
from swarmnode.node.storage.datadir import DataDirError, NoSpace, replacing, unusable, write_all, write_atomic
from swarmnode.node.storage.statedb import Damaged, StateDatabase, StateFull, set_aside, size_on_disk
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.runner import Runner, in_thread
from swarmnode.protocols.state.backend import Rank, StateBackend, StateError, Stats, Unwritable

BATCH = 2048  # elements, about, that one transaction takes: some 30 ms of the writer
SWEEP_EVERY = 30.0  # seconds between two looks at what has expired
SWEEP = 1024  # elements, about, that one transaction forgets
GIVE_BACK = 1024  # pages of 4 KiB, at most, that a sweep gives back to the disk
STAMPS = 1_000 << COUNTER_BITS  # that are reserved at once: one second. A crash puts the clock ahead by less than that
PORTION = 256  # elements of an export that are read, verified and merged at once
EXPORT = "swarmnode-state/1 "  # what it begins with

ELEMENTS = Metric("swarmnode_state_elements", GAUGE, "elements of the replicated state that this node holds")
DISK = Metric("swarmnode_state_disk_bytes", GAUGE, "bytes on disk of the replicated state")
CLOCK = Metric("swarmnode_clock_behind_seconds", GAUGE, "seconds that this clock is behind the median of three peers'")

T = TypeVar("T")
logger = logging.getLogger(__name__)


class StampFile:
    """A hybrid clock whose high-water mark is durable before a stamp is used; `load` before anything else.

    Its file holds a *ceiling*: no stamp above it was ever used. Stamps are reserved in blocks, so not every record
    costs a write of its own. After a crash the clock goes on from the ceiling, whatever became of the database:
    damaged, deleted, or restored from an older copy, this node never uses a stamp twice.
    """

    def __init__(self, path: Path, runner: Runner) -> None:
        self.path = path
        self._runner = runner
        self.clock = HybridClock()
        self._ceiling = 0

    def load(self, *, own: int) -> None:
        """Go on from the file's ceiling, or from `own`, the greatest stamp of this node's that is known otherwise.

        Blocks. Raises Unwritable where the file is there and cannot be read.
        """
        try:
            text = self.path.read_text(encoding="ascii")
            self._ceiling = int(text)
            if not 0 <= self._ceiling <= MAX_STAMP:
                raise ValueError(f"{text.strip()} is no stamp")
        except FileNotFoundError:
            self._ceiling = 0
        except ValueError:
            logger.warning("%s is damaged; the clock goes on from the newest record of this node's own", self.path)
            self._ceiling = own + STAMPS if own else 0
        except OSError as error:
            raise Unwritable(f"{self.path}: cannot be read ({error.strerror}); without it nothing is signed") from error
        self.clock = HybridClock(max(self._ceiling, own))

    async def tick(self, now: int) -> int:
        """A stamp greater than all before it; durable as used when this returns. Raises Unwritable.

        Not for two tasks at once.
        """
        stamp = self.clock.tick(now)
        if stamp > self._ceiling:
            ceiling = min(stamp + STAMPS, MAX_STAMP)
            await self._runner(lambda: self._write(ceiling))
            self._ceiling = ceiling
        return stamp

    def release(self) -> None:
        """At an orderly end: leave the last stamp as the ceiling, so that the next start is not ahead. Blocks."""
        if self._ceiling > self.clock.last:
            self._write(self.clock.last)
            self._ceiling = self.clock.last

    def _write(self, ceiling: int) -> None:
        try:
            write_atomic(self.path, f"{ceiling}\n".encode("ascii"))
        except NoSpace as error:
            raise StateFull(str(error)) from error
        except DataDirError as error:
            raise Unwritable(str(error)) from error


class _Merge:
    """Elements that wait to be written, and what became of them."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self.elements = elements
        self.verdicts: list[Merged] = []
        self.error: StateError | None = None


class StateStore(StateBackend):
    """The state of one run, on disk. `run` opens the files and owns them."""

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        me: str,
        sign: Sign,
        clocks: PeerClocks,
        admitted: Container[str] = EVERYBODY,
        runner: Runner = in_thread,
    ) -> None:
        """`path` is the database's; `admitted` are those whose elements are shared."""
        super().__init__(run_id, me=me, sign=sign, clocks=clocks, admitted=admitted)
        self.path = path
        self._runner = runner
        self._stamps = StampFile(path.with_suffix(".clock"), runner)
        self._horizon = 0  # until when something that expired may have been forgotten, ms
        self._warnings: dict[str, str] = {}  # what the owner should know, by cause
        self._waiting: deque[_Merge] = deque()
        self._opened: StateDatabase | None = None
        self._writing = trio.Lock()  # of two locks this is taken first
        self._reading = trio.Lock()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(ELEMENTS, lambda: len(self._opened.ranks) if self._opened is not None else 0)
        metrics.show(DISK, lambda: size_on_disk(self.path))
        metrics.show(CLOCK, lambda: None if self.clocks.off is None else self.clocks.off / 1000)

    @property
    def warning(self) -> str:
        """What the owner should know, "" for nothing."""
        return "; ".join(self._warnings.values())

    @property
    def _database(self) -> StateDatabase:
        if self._opened is None:
            raise RuntimeError("the state store is not running")
        return self._opened

    # -- its life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open, write, expire and tidy until cancelled.

        Raises ExpectedError where the database is of another version, or the disk does not let it be opened.
        """
        try:
            self._opened = await self._runner(self._start)
        except Unwritable as error:
            raise (NoSpace if isinstance(error, StateFull) else DataDirError)(str(error)) from error
        try:
            task_status.started()
            while True:
                await trio.sleep(SWEEP_EVERY)
                try:
                    await self.sweep()
                except StateError as error:
                    logger.debug("what has expired stays for now: %s", error)
        finally:
            with trio.CancelScope(shield=True):
                async with self._writing, self._reading:
                    database, self._opened = self._opened, None
                    await self._runner(database.close)
                    try:
                        await self._runner(self._stamps.release)
                    except Unwritable as error:
                        logger.warning("after the next start records are dated up to a second ahead: %s", error)

    def _start(self) -> StateDatabase:
        """Blocks."""
        database = self._open()
        self._horizon = database.horizon()
        self._stamps.load(own=max(database.newest(self._me), default=(0, b""))[0])
        return database

    def _open(self) -> StateDatabase:
        """Blocks. A damaged database is moved aside."""
        try:
            return StateDatabase(self.path, self.run_id)
        except Damaged as error:
            self._set_aside(error)
        return StateDatabase(self.path, self.run_id)

    def _set_aside(self, error: Damaged) -> None:
        """Blocks."""
        aside = set_aside(self.path)
        self._warnings["damage"] = f"{error}; it is now {aside.name}, and the state is fetched again from peers"
        logger.error("%s", self._warnings["damage"])

    # -- writing

    async def merge(self, elements: Sequence[Element]) -> list[Merged]:
        """Join verified elements into the state; see StateBackend. Raises Unwritable."""
        shared = _Merge([element for element in elements if element.author in self.admitted])
        if shared.elements:
            await self._enqueue(shared)
        else:
            await trio.lowlevel.checkpoint()
        verdicts = iter(shared.verdicts)
        return [next(verdicts) if one.author in self.admitted else Merged.STRANGER for one in elements]

    async def _enqueue(self, merge: _Merge) -> None:
        """Returns when it is on disk. Raises Unwritable."""
        self._waiting.append(merge)
        try:
            async with self._writing:
                while merge in self._waiting:  # nobody who was first took it along
                    if self._opened is None:
                        raise Unwritable("the node is ending; nothing was stored")
                    await self._write_waiting()
        finally:
            if merge in self._waiting:
                self._waiting.remove(merge)
        if merge.error is not None:
            raise merge.error

    async def _write_waiting(self) -> None:
        """Write those that have waited longest as one transaction; the caller holds the writer's lock."""
        merges: list[_Merge] = []
        elements: list[Element] = []
        while self._waiting and len(elements) < BATCH:
            merges.append(self._waiting.popleft())
            elements += merges[-1].elements
        now = self.now()
        horizon = self._horizon = law.advance(self._horizon, now)
        try:
            applied = await self._change(lambda: self._database.apply(elements, now=now, horizon=horizon))
        except StateError as error:
            for merge in merges:
                merge.error = error
            return
        if applied.added:
            self._stamps.clock.observe(max(element.hlc for element in applied.added.values()), now)
        verdicts = iter(applied.verdicts)
        for merge in merges:
            merge.verdicts = [next(verdicts) for _ in merge.elements]
        self._notify(applied.added.values())

    async def _tick(self, now: int) -> int:
        return await self._stamps.tick(now)

    # -- looking

    def has(self, rank: Rank) -> bool:
        return rank in self._database.ranks

    async def get(self, author: str, key: str) -> Element | None:
        found = await self._read(lambda: self._database.get(author, key))
        return found if found is not None and found.expiry > self.now() else None

    async def select(self, prefix: str = "", *, author: str | None = None, limit: int) -> list[Element]:
        now = self.now()
        return await self._read(lambda: self._database.select(prefix, author, limit, now))

    async def authors(self, prefix: str) -> frozenset[str]:
        now = self.now()
        return await self._read(lambda: self._database.authors(prefix, now))

    async def newest(self, author: str, limit: int) -> list[Rank]:
        return [rank for _, rank in (await self._read(lambda: self._database.newest(author)))[:limit]]

    async def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        # Most that are told news want none of it: no thread for that.
        return await self._read(lambda: self._database.sealed(ranks)) if ranks else []

    def snapshot(self, cutoff: int) -> RankSet:
        return self._database.ranks.after(cutoff)

    async def stats(self) -> Stats:
        kinds, authors, size = await self._read(lambda: self._database.totals())
        return Stats(
            elements=sum(kinds.values()),
            authors=authors,
            size=size,
            kinds=kinds,
            disk=size_on_disk(self.path),
            clock=self._stamps.clock.last,
            warning=self.warning,
        )

    # -- tidying

    async def sweep(self) -> int:
        self._horizon = horizon = law.advance(self._horizon, self.now())
        forgotten, some = 0, 1
        while some:  # in between, merges go on
            async with self._writing:
                some = await self._change(lambda: self._database.forget(horizon, SWEEP))
            forgotten += some
        async with self._writing:
            await self._change(lambda: self._database.give_back(GIVE_BACK))
        return forgotten

    # -- the disk

    async def _change(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread; the caller holds the writer's lock. A damaged database is begun anew first.

        Raises Unwritable, and says so to the owner until something works again.
        """
        try:
            with trio.CancelScope(shield=True):  # who waits with the caller hears what became of it
                if self._database.closed:
                    await self._begin_anew(None)
                try:
                    done = await self._runner(work)
                except Damaged as error:
                    await self._begin_anew(error)
                    done = await self._runner(work)
        except StateError as error:
            if str(error) != self._warnings.get("disk"):
                logger.warning("%s", error)
            self._warnings["disk"] = str(error)
            raise
        self._warnings.pop("disk", None)
        return done

    async def _read(self, work: Callable[[], T]) -> T:
        """Run a query in a thread, beside the writer. Raises Unwritable where the disk does not answer."""
        while True:
            async with self._reading:
                database = self._database
                if database.closed:
                    raise Unwritable(self.warning)
                try:
                    return await self._runner(work)
                except Damaged as error:
                    damage = error
            async with self._writing:
                if database is self._database:  # nobody has begun anew meanwhile
                    await self._begin_anew(damage)

    async def _begin_anew(self, damage: Damaged | None) -> None:
        """Move a damaged database aside and open an empty one; the caller holds the writer's lock.

        Raises Unwritable; then it is tried again before the next change, with None where the old one is aside.
        """

        def work() -> StateDatabase:
            self._database.close()
            if damage is not None:
                self._set_aside(damage)
            return self._open()

        async with self._reading:
            with trio.CancelScope(shield=True):
                try:
                    self._opened = await self._runner(work)
                except ExpectedError as problem:
                    raise Unwritable(str(problem)) from problem


# --- the state as one file -------------------------------------------------------------------------------------------


async def export(backend: StateBackend, target: Path, *, now: int) -> int:
    """Write all that has not expired by `now`, ms; how many elements. The file appears whole or not at all.

    Raises DataDirError, Unwritable.
    """
    ranks, written = backend.snapshot(now).keys(START, END), 0
    with replacing(target, by_owner=True) as file:
        write_all(file, f"{EXPORT}{backend.run_id}\n".encode())
        for at in range(0, len(ranks), PORTION):
            sealed = await backend.sealed(ranks[at : at + PORTION])
            written += len(sealed)
            framed = b"".join(len(raw).to_bytes(4, "big") + raw for raw in sealed)
            await in_thread(partial(write_all, file, framed))
        await in_thread(partial(os.fsync, file.fileno()))  # so that closing it holds up nothing
    return written


async def import_(backend: StateBackend, source: Path, *, verify: Verify) -> Counter[str]:
    """Merge the elements of a file; counts by verdict, and "invalid" for those that do not verify.

    Raises UsageMistake, DataDirError, Unwritable; what was merged until then stays.
    """
    counts: Counter[str] = Counter()
    try:
        with await in_thread(lambda: source.open("rb")) as file:
            head = await in_thread(lambda: file.readline(len(EXPORT) + 65))
            if head != f"{EXPORT}{backend.run_id}\n".encode():
                if not head.startswith(EXPORT.encode()):
                    raise UsageMistake(f"{source} is no file that swarmnode state export wrote")
                run = head[len(EXPORT) :].decode(errors="replace").strip()
                raise UsageMistake(
                    f"{source} holds the state of run {run[:12]}…, and this node takes part in {backend.run_id[:12]}…"
                )
            while batch := await in_thread(lambda: _next_of(file, source, verify, backend.run_id)):
                elements = [element for element in batch if element is not None]
                counts["invalid"] += len(batch) - len(elements)
                counts.update(verdict.value for verdict in await backend.merge(elements))
    except OSError as error:
        raise unusable(error, source, "cannot be read") from error
    return +counts


def _next_of(file: BinaryIO, source: Path, verify: Verify, run_id: str) -> list[Element | None]:
    """The next elements of a file; None for each that is invalid."""
    found: list[Element | None] = []
    while len(found) < PORTION and (head := file.read(4)):
        size = int.from_bytes(head, "big")
        raw = file.read(size) if len(head) == 4 and size <= MAX_SEALED else b""
        if not raw or len(raw) != size:
            if found:  # to be taken first; the next call comes here again
                file.seek(-len(head) - len(raw), os.SEEK_CUR)
                break
            raise UsageMistake(f"{source} is cut off or damaged; what came before that was taken")
        try:
            element = open_element(raw, verify)
        except InvalidRecord:
            found.append(None)
        else:
            found.append(element if element.run == run_id else None)
    return found
