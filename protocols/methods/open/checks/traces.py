"""The record of a node's own work, which its contributions are bound to and which auditors ask for (training/verify).

`TracedWork` is `Work` that takes a mark of its trainer whenever somebody lays hands on it, and writes down what was
taken over between stretches of steps. What it cannot show it says so (`Origin.UNLINKED`): after a restart of the
trainer, a switch to another fork, work that came back from an undone roster, a state that was fetched. Nothing here
waits for others, and a record that cannot be made costs no contribution.

    work.trace             root of the record behind the offer, for its commit
    work.shown(root)       that record, while it is kept; await work.vector(id): what it names
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from swarmnode.protocols.methods.open.local import Work
from swarmnode.protocols.methods.trainer import Trainer, TrainerDied, Vector
from swarmnode.protocols.runner import Runner
from swarmnode.training.outer import OuterState
from swarmnode.training.verify.trace import MAX_LEGS, Leg, Origin, Trace, gap, vector_id

logger = logging.getLogger(__name__)

SHOWN = 3  # records that are kept: an audit needs the one before the one that it looks at
ALL = 1.0  # share of a contribution that comes back where a roster was undone or a fork left


@dataclass(frozen=True)
class Shown:
    """One record, and those of its vectors, (P,) by id, that are not the trainer's."""

    trace: Trace
    raw: bytes
    vectors: dict[bytes, Vector]


class TracedWork(Work):
    """Work that others may audit."""

    def __init__(
        self,
        trainer: Trainer,
        runner: Runner,
        *,
        codec_name: str,
        steps: int,
        texts: Callable[[], tuple[bytes, ...]],
        carries: bool = False,
    ) -> None:
        """`texts`: the shards that the trainer was given, in that order."""
        super().__init__(trainer, runner, codec_name=codec_name, steps=steps, carries=carries)
        self._audited, self._texts = trainer, texts
        self._legs: list[Leg] = [_FIRST]  # since the offer, or the beginning
        self._origin, self._previous, self._began = Origin.UNLINKED, b"", b""
        self._tip = b""  # roster of the shared state
        self._life = b""
        self._trained = False  # by this trainer, ever
        self._start = self._start_before = trainer.parameters()  # of what is being written down, and of the offer
        self._offered: Trace | None = None
        self.trained_seconds, self.trained_steps = 0.0, 0  # that were offered
        self._shown: OrderedDict[bytes, Shown] = OrderedDict()

    # --- what others may ask for --------------------------------------------------------------------------------------

    @property
    def trace(self) -> bytes:
        return self._offered.root if self._offered is not None and self.offer is not None else b""

    def shown(self, root: bytes) -> Shown | None:
        """The record with this root, of one of the last contributions."""
        return self._shown.get(root)

    async def vector(self, id: bytes) -> Vector | None:
        """A vector that a record names, while it is kept. Raises TrainerDied."""
        for shown in self._shown.values():
            if id in shown.vectors:
                return shown.vectors[id]
        return await self._audited.kept(id)

    # --- what is written down -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        async with super().held():
            await self._mark()
            yield

    async def _mark(self) -> None:
        try:
            marked = await self._audited.mark()
        except TrainerDied:
            self.unlink()
            return
        if marked.life != self._life:
            if self._life:
                self.unlink()
            self._life = marked.life
        self._trained = self._trained or bool(marked.stretches)
        last = self._legs[-1]
        self._legs[-1] = replace(last, stretches=(*last.stretches, *marked.stretches))

    def stand(self, roster: bytes, *, follows: bool) -> None:
        """The shared state is that after `roster`; it `follows` on the one before, or else is of another history."""
        if not follows and self._tip and roster != self._tip:
            self.unlink()
        self._tip = roster
        if not self._legs[-1].base and len(self._legs) > 1:
            self._legs[-1] = replace(self._legs[-1], base=roster)
        self._began = self._began or roster

    def unlink(self) -> None:
        """What was trained until now cannot be shown as one."""
        self._origin, self._previous, self._began = Origin.UNLINKED, b"", self._tip
        self._legs = [_FIRST]

    async def contribute(self, parent: bytes, round: int) -> bytes | None:
        residual, self._offered = self.feedback.export(), None
        encoded = await super().contribute(parent, round)
        if encoded is None or self.offer is None:
            self.unlink()
            return None
        local = self.offer.local
        self.trained_seconds += self.offer.worked.seconds
        self.trained_steps += self.offer.worked.steps
        start, end, left = await self._runner(lambda: [vector_id(vector) for vector in (self._start, local, residual)])
        legs = tuple(self._legs)
        trace = Trace(self._origin, self._previous, self._began, start, end, left, legs, self._texts())
        if self._life and not gap(trace):
            self._offered = trace
            self._shown[trace.root] = Shown(trace, trace.encode(), {end: local, left: residual})
            while len(self._shown) > SHOWN:
                self._shown.popitem(last=False)
        self._origin, self._previous = (Origin.AFTER, trace.root) if self._offered else (Origin.UNLINKED, b"")
        self._start_before, self._start = self._start, local
        self._began, self._legs = parent, [_FIRST]
        return encoded

    def take_back(self) -> None:
        before = self._offered if self.offer is not None else None
        if self.offer is not None:
            self.trained_seconds -= self.offer.worked.seconds
            self.trained_steps -= self.offer.worked.steps
        super().take_back()
        self._offered = None
        if before is not None:
            self._shown.pop(before.root, None)
            self._origin, self._previous, self._began = before.origin, before.previous, before.base
            self._start = self._start_before
            joined = replace(before.legs[-1], stretches=(*before.legs[-1].stretches, *self._legs[0].stretches))
            self._legs = [*before.legs[:-1], joined, *self._legs[1:]]

    async def return_encoded(self, raw: bytes, share: float = ALL) -> None:
        await super().return_encoded(raw, share)
        if share == ALL:
            self.unlink()

    async def move(self, state: OuterState) -> float:
        since_offer = self.offer is not None
        loss = await super().move(state)
        self._legs.append(Leg(b"", since_offer, ()))
        if len(self._legs) > MAX_LEGS:
            self.unlink()
        return loss

    async def leave(self) -> None:
        await super().leave()
        self.unlink()

    async def stand_on(self, state: OuterState) -> None:
        await super().stand_on(state)
        self.unlink()
        self._tip = self._began = b""
        self._start = self.start
        if not self._trained and not self.feedback.export().any():
            self._origin = Origin.FRESH


_FIRST = Leg(b"", False, ())
