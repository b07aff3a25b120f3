"""The replicated state on disk: SQLite behind one writer, with the ranks of everything in memory.

    merge, write ─→ jobs ─→ one task: as many jobs as wait become one transaction in a thread
                              └→ then, on the event loop: ranks swapped, clock advanced, readers of feeds told

So what `merge` returned is on disk, what `has` and `snapshot` tell is never more than that, and a burst costs one sync
for many records. Queries run beside the writer on a connection of their own.

Files beside one another: `state.db` (with `-wal` and `-shm` while open), `state.clock` (see `stampfile`).

What may fail: a full or failing disk refuses a batch; its callers get `Unwritable`, the owner a warning, and the next
batch tries again. A damaged database is moved aside and begun anew; the clock goes on from its own file, so nothing is
signed twice, and repair fetches the rest from peers. A SIGKILL at any moment leaves whole transactions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import trio

from swarmnode.crdt import law
from swarmnode.crdt.envelope import Sign
from swarmnode.crdt.kinds import KINDS, ElementKind
from swarmnode.crdt.law import Merged, StrangerPool, everybody
from swarmnode.crdt.ranges import END, START, Lifetimes, Union
from swarmnode.crdt.record import Element
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.storage.datadir import DataDirError, NoSpace
from swarmnode.node.storage.stampfile import StampFile
from swarmnode.node.storage.statedb import Applied, Damaged, StateDatabase, StateFull, set_aside, size_on_disk
from swarmnode.protocols.metrics import GAUGE, Metric, Metrics
from swarmnode.protocols.runner import Runner, in_thread
from swarmnode.protocols.state.backend import Rank, StateBackend, StateError, Stats, Unwritable

BATCH = 2048  # elements, about, that one transaction takes: some 30 ms of the writer
JOBS = 64  # merges in line for the writer; who comes then waits to get in line
SWEEP_EVERY = 30.0  # seconds between two looks at what has expired
SWEEP = 1024  # elements, about, that one transaction forgets
GIVE_BACK = 1024  # pages of 4 KiB, at most, that a sweep gives back to the disk
HLC = 8  # bytes at the beginning of a rank

ELEMENTS = Metric("swarmnode_state_elements", GAUGE, "elements of the replicated state that this node holds")
DISK = Metric("swarmnode_state_disk_bytes", GAUGE, "bytes on disk of the replicated state")
POOLED = Metric("swarmnode_state_pooled", GAUGE, "records in memory of authors who are not admitted to the run")

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Job:
    """Elements of one merge, and what became of them."""

    def __init__(self, elements: Sequence[Element]) -> None:
        self.elements = elements
        self.done = trio.Event()
        self.verdicts: list[Merged] = []
        self.error: StateError | None = None


class _Open:
    """The open database, and what is in memory of it."""

    def __init__(self, path: Path, run_id: str, kinds: Mapping[str, ElementKind]) -> None:
        """Blocks. Raises as `StateDatabase` does."""
        self.database = StateDatabase(path, run_id, kinds)
        try:
            self.ranks = Lifetimes.of(kinds, self.database.load())
        except BaseException:
            self.database.close()
            raise
        self.damaged = False


class StateStore(StateBackend):
    """The state of one run, on disk. `run` opens the files and owns them."""

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        me: str,
        sign: Sign,
        now: Callable[[], int],
        kinds: Mapping[str, ElementKind] = KINDS,
        admitted: Callable[[str], bool] = everybody,
        runner: Runner = in_thread,
    ) -> None:
        """`path` is the database's; `now` gives real time in ms; `admitted` tells whose elements are shared."""
        super().__init__(run_id, me=me, sign=sign, now=now, kinds=kinds, admitted=admitted)
        self.path = path
        self._runner = runner
        self._clock = StampFile(path.with_suffix(".clock"), runner)
        self._pool = StrangerPool(kinds)
        self._horizon = 0  # until when something that expired may have been forgotten, ms
        self._warnings: dict[str, str] = {}  # what the owner should know, by cause
        self._waiting: set[_Job] = set()
        self._opened: _Open | None = None
        self._send, self._jobs = trio.open_memory_channel[_Job](JOBS)
        self._writing = trio.Lock()  # of two locks this is taken first
        self._reading = trio.Lock()

    def measure(self, metrics: Metrics) -> None:
        metrics.show(ELEMENTS, lambda: len(self._opened.ranks) if self._opened is not None else 0)
        metrics.show(DISK, lambda: size_on_disk(self.path))
        metrics.show(POOLED, lambda: len(self._pool))

    @property
    def warning(self) -> str:
        """What the owner should know, "" for nothing."""
        return "; ".join(self._warnings.values())

    @property
    def _open(self) -> _Open:
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
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep_forever)
                task_status.started()
                async for job in self._jobs:
                    await self._take(job)
        finally:
            with trio.CancelScope(shield=True):
                async with self._writing, self._reading:
                    opened, self._opened = self._opened, None
                    await self._runner(opened.database.close)
                    await self._runner(self._settle)
            self._turn_away()

    def _start(self) -> _Open:
        """Blocks."""
        opened = self._open_files()
        self._horizon = opened.database.horizon()
        self._clock.load(own=opened.database.newest(self._me))
        return opened

    def _open_files(self) -> _Open:
        """Blocks. A damaged database is moved aside."""
        try:
            return _Open(self.path, self.run_id, self._kinds)
        except Damaged as error:
            return self._open_new_files(error)

    def _open_new_files(self, error: Damaged) -> _Open:
        aside = set_aside(self.path)
        self._warnings["damage"] = f"{error}; it is now {aside.name}, and the state is fetched again from peers"
        logger.error("%s", self._warnings["damage"])
        return _Open(self.path, self.run_id, self._kinds)

    def _settle(self) -> None:
        try:
            self._clock.settle()
        except Unwritable as error:
            logger.warning("after the next start records are dated up to a second ahead: %s", error)

    def _turn_away(self) -> None:
        """Whoever still waits for the writer hears that it has ended."""
        self._jobs.close()
        for job in self._waiting:
            job.error = Unwritable("the node is ending; nothing was stored")
            job.done.set()

    # -- writing

    async def merge(self, elements: Sequence[Element]) -> list[Merged]:
        """Join verified elements into the state, or into the pool; see StateBackend.

        Raises InvalidRecord for an element of another run or kind, and Unwritable.
        """
        self._check_belongs(elements)
        admitted = [self._admitted(element.author) for element in elements]
        if all(admitted):
            return await self._enqueue(elements)
        verdicts = iter(await self._enqueue([one for one, inside in zip(elements, admitted, strict=True) if inside]))
        return [
            next(verdicts) if inside else self._keep_aside(element)
            for element, inside in zip(elements, admitted, strict=True)
        ]

    async def _enqueue(self, elements: Sequence[Element]) -> list[Merged]:
        """Have the writer take `elements`; returns when they are on disk."""
        if not elements:
            await trio.lowlevel.checkpoint()
            return []
        job = _Job(elements)
        self._waiting.add(job)
        try:
            await self._send.send(job)
            await job.done.wait()
        except trio.BrokenResourceError:
            raise Unwritable("the node is ending; nothing was stored") from None
        finally:
            self._waiting.discard(job)
        if job.error is not None:
            raise job.error
        return job.verdicts

    def _keep_aside(self, element: Element) -> Merged:
        now = self._now()
        horizon = law.advance(self._horizon, now)
        verdict = law.untimely(element.hlc, element.expiry, now=now, horizon=horizon)
        return self._pool.merge(element) if verdict is None else verdict

    async def _take(self, first: _Job) -> None:
        """Write a job, and those that wait behind it, as one transaction."""
        jobs, size = [first], len(first.elements)
        while size < BATCH:
            try:
                jobs.append(self._jobs.receive_nowait())
            except trio.WouldBlock:
                break
            size += len(jobs[-1].elements)
        elements = [element for job in jobs for element in job.elements]
        now = self._now()
        horizon = self._horizon = law.advance(self._horizon, now)

        def work(database: StateDatabase, ranks: Lifetimes) -> Applied:
            applied = database.apply(elements, now=now, horizon=horizon)
            ranks.change(applied.steps)
            return applied

        try:
            applied = await self._change(work)
        except StateError as error:
            for job in jobs:
                job.error = error
                job.done.set()
            return
        if applied.stored:
            self._clock.observe(max(element.hlc for element in applied.stored), now)
        verdicts = iter(applied.verdicts)
        for job in jobs:
            job.verdicts = [next(verdicts) for _ in job.elements]
            job.done.set()
        self._notify(applied.stored)

    async def _tick(self, now: int) -> int:
        return await self._clock.tick(now)

    # -- looking

    def has(self, rank: Rank) -> bool:
        return rank in self._open.ranks

    async def get(self, author: str, key: str) -> Element | None:
        """The greatest element under a key that has not expired, the pool looked at as well; see StateBackend."""
        stored = await self._read(lambda database: database.get(author, key))
        pooled = [one for one in self._pool.of(author) if one.key == key]
        found = [one for one in (stored, *pooled) if one is not None and one.expiry > self._now()]
        return max(found, key=lambda one: one.order, default=None)

    async def select(self, prefix: str = "", *, author: str | None = None, limit: int) -> list[Element]:
        """Elements whose keys begin with `prefix`, in order of (key, author, rank); see StateBackend."""
        now = self._now()
        return await self._read(lambda database: database.select(prefix, author, limit, now))

    async def sealed(self, ranks: Sequence[Rank]) -> list[bytes]:
        """The bytes of those elements that are here, in the order asked for."""
        return await self._read(lambda database: database.sealed(ranks))

    def snapshot(self, cutoff: int) -> Union:
        """The ranks of all that expires after `cutoff` ms, as they are now."""
        return self._open.ranks.after(cutoff)

    def state_hash(self, cutoff: int) -> str:
        """`law.state_hash` of what expires after `cutoff` ms. Raises ValueError for a cut-off in the past."""
        if cutoff < self._horizon:
            raise ValueError(f"cut-off {cutoff} lies {self._horizon - cutoff} ms before what this replica still knows")
        ranks = self.snapshot(cutoff).keys(START, END)
        return law.state_hash(cutoff, (rank[HLC:] for rank in ranks))

    async def stats(self) -> Stats:
        totals, disk = await self._read(lambda database: (database.totals(), size_on_disk(self.path)))
        return Stats(
            elements=sum(totals.kinds.values()),
            authors=totals.authors,
            size=totals.size,
            kinds=totals.kinds,
            pooled=len(self._pool),
            disk=disk,
            clock=self._clock.last,
            warning=self.warning,
        )

    # -- tidying

    async def sweep(self) -> int:
        """Forget what has expired, and give room back to the disk; returns how many elements that were."""
        self._horizon = horizon = law.advance(self._horizon, self._now())
        self._pool.sweep(horizon)
        forgotten = 0
        while expired := self._open.ranks.expired(horizon, SWEEP):

            def work(database: StateDatabase, ranks: Lifetimes, expired: list[Rank] = expired) -> None:
                database.forget(expired, horizon=horizon)
                ranks.discard(expired)

            await self._change(work)
            forgotten += len(expired)
        await self._change(lambda database, _: database.give_back(GIVE_BACK))
        return forgotten

    async def _sweep_forever(self) -> None:
        while True:
            await trio.sleep(SWEEP_EVERY)
            try:
                await self.sweep()
            except StateError as error:
                logger.debug("what has expired stays for now: %s", error)

    # -- the disk

    async def _change(self, work: Callable[[StateDatabase, Lifetimes], T]) -> T:
        """Run `work` in a thread, alone, on a fork of the ranks that is taken over when it has returned.

        Raises Unwritable, and says so to the owner until something works again.
        """
        async with self._writing:
            try:
                if self._open.damaged:
                    await self._begin_anew(self._open, None)
                opened = self._open
                try:
                    done = await self._work(work)
                except Damaged as error:
                    await self._begin_anew(opened, error)
                    done = await self._work(work)
            except StateError as error:
                if str(error) != self._warnings.get("disk"):
                    logger.warning("%s", error)
                self._warnings["disk"] = str(error)
                raise
            self._warnings.pop("disk", None)
            return done

    async def _work(self, work: Callable[[StateDatabase, Lifetimes], T]) -> T:
        opened = self._open
        ranks = opened.ranks.fork()
        with trio.CancelScope(shield=True):  # what is on disk must be in memory as well
            done = await self._runner(lambda: work(opened.database, ranks))
        opened.ranks = ranks
        return done

    async def _read(self, work: Callable[[StateDatabase], T]) -> T:
        """Run a query in a thread, beside the writer. Raises Unwritable where the disk does not answer."""
        opened = self._open
        try:
            return await self._query(opened, work)
        except Damaged as error:
            async with self._writing:
                await self._begin_anew(opened, error)
            return await self._query(self._open, work)

    async def _query(self, opened: _Open, work: Callable[[StateDatabase], T]) -> T:
        async with self._reading:
            if opened is not self._open:  # begun anew while this waited
                opened = self._open
            if opened.damaged:
                raise Unwritable(self.warning)
            return await self._runner(lambda: work(opened.database))

    async def _begin_anew(self, broken: _Open, error: Damaged | None) -> None:
        """Move a damaged database aside and open an empty one, unless that was done; the caller holds `_writing`.

        Raises Unwritable; then it is tried again before the next change.
        """
        async with self._reading:
            if broken is not self._open:
                return
            broken.damaged, broken.ranks = True, Lifetimes(self._kinds)

            def work() -> _Open:
                broken.database.close()
                return self._open_files() if error is None else self._open_new_files(error)

            with trio.CancelScope(shield=True):
                try:
                    self._opened = await self._runner(work)
                except ExpectedError as problem:
                    raise Unwritable(str(problem)) from problem
