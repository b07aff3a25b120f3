"""The clock of this node's own records, whose high-water mark is durable before a stamp is used.

A small file beside the database holds a *ceiling*: no stamp above it was ever used. Stamps are reserved in blocks, so
not every record costs a write of its own. After a crash the clock goes on from the ceiling, whatever became of the
database: damaged, deleted, or restored from an older copy, this node never uses a stamp twice.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarmnode.crdt.hlc import COUNTER_BITS, MAX_STAMP, HybridClock
from swarmnode.node.storage.datadir import DataDirError, NoSpace, write_atomic
from swarmnode.node.storage.statedb import StateFull
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.backend import Unwritable

BLOCK = 1_000 << COUNTER_BITS  # stamps: one second. A crash puts the clock ahead by less than that

logger = logging.getLogger(__name__)


class StampFile:
    """A hybrid clock whose ticks outlast crashes. `path` is its file; `load` before anything else."""

    def __init__(self, path: Path, runner: Runner) -> None:
        self.path = path
        self._runner = runner
        self._clock = HybridClock()
        self._ceiling = 0

    @property
    def last(self) -> int:
        return self._clock.last

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
            self._ceiling = own + BLOCK if own else 0
        except OSError as error:
            raise Unwritable(f"{self.path}: cannot be read ({error.strerror}); without it nothing is signed") from error
        self._clock = HybridClock(max(self._ceiling, own))

    async def tick(self, now: int) -> int:
        """A stamp greater than all before it; durable as used when this returns. Raises Unwritable.

        Not for two tasks at once.
        """
        stamp = self._clock.tick(now)
        if stamp > self._ceiling:
            ceiling = min(stamp + BLOCK, MAX_STAMP)
            await self._runner(lambda: self._write(ceiling))
            self._ceiling = ceiling
        return stamp

    def observe(self, stamp: int, now: int) -> None:
        self._clock.observe(stamp, now)

    def release(self) -> None:
        """At an orderly end: leave the last stamp as the ceiling, so that the next start is not ahead. Blocks."""
        if self._ceiling > self._clock.last:
            self._write(self._clock.last)
            self._ceiling = self._clock.last

    def _write(self, ceiling: int) -> None:
        try:
            write_atomic(self.path, f"{ceiling}\n".encode("ascii"))
        except NoSpace as error:
            raise StateFull(str(error)) from error
        except DataDirError as error:
            raise Unwritable(str(error)) from error
