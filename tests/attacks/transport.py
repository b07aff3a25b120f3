"""The transport group: each adversary against a real node on loopback, with an honest peer calling beside it.

Measured in one run, against this node and against an undefended one (`victim.py`): how far the victim's resident
memory grows, the honest peer's p99 before and during the attack, whether the victim lives, and what was executed.

The machine has other work, so a latency that breaks the promise is measured again, with the attack: what the attack
does shows every time, what the machine does not.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio
from adversaries import transport as adversaries
from harness import MIB, Adversary, Outcome, percentile

from swarmnode.protocols.network import NetworkError

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
MEMORY = 64.0  # MiB that one peer may make the victim grow
P99_FACTOR = 2.0
TURN = 20.0  # ms of CPU that one turn of the victim's loop may take
TRIES = 3
P99_FLOOR = 10.0  # ms: below, a doubled p99 is the scheduler's doing; undefended nodes go beyond it
ANYWHERE = 250.0  # ms: the same on a machine with much else to do, as in CI; who answers one call after another does
LOST = 5000.0  # ms, as in honest.py


@dataclass(frozen=True)
class Cost:
    """What an attack cost a victim."""

    grown: float  # MiB of resident memory, at its highest
    quiet: float  # ms, the honest peer's p99 before
    during: float  # ms, and during
    stretch: float  # ms of CPU, the victim's longest turn of its loop during the attack; `LOST` where it did not say
    alive: bool  # it answers another honest call at the end
    harm: str | None

    def __str__(self) -> str:
        during = "no answers" if self.during >= LOST else f"{self.during:.1f} ms"
        times = "" if self.during >= LOST else f" (× {self.during / max(self.quiet, 0.1):.1f})"
        turn = "" if self.stretch >= LOST else f", turns of ≤ {self.stretch:.0f} ms"
        text = f"+{max(self.grown, 0):.0f} MiB, p99 {self.quiet:.1f} → {during}{times}{turn}"
        return text + ("" if self.alive else ", dead") + (f", {self.harm}" if self.harm else "")

    def slow(self, floor: float) -> bool:
        """Whether the honest p99 more than doubled; one below `floor` ms is never slow."""
        return self.during > max(P99_FACTOR * self.quiet, floor)

    def failures(self, floor: float = P99_FLOOR) -> tuple[str, ...]:
        """Broken promises."""
        broken = []
        if self.grown > MEMORY:
            broken.append(f"memory grew by {self.grown:.0f} MiB")
        if self.slow(floor):
            broken.append(f"p99 went from {self.quiet:.1f} to {self.during:.1f} ms")
        if self.stretch > TURN:
            broken.append(f"one turn of its loop took {self.stretch:.0f} ms of CPU")
        if not self.alive:
            broken.append("the node died")
        if self.harm:
            broken.append(self.harm)
        return tuple(broken)


@contextmanager
def process(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A child that ends with the block, and the JSON it prints."""
    child = subprocess.Popen(
        [sys.executable, str(HERE / program), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what an undefended victim never read
                    pipe.close()


async def line(child: subprocess.Popen[str], *, patience: float = 30.0) -> Any:
    """The next JSON line of a child; None where it has ended or says nothing."""
    assert child.stdout is not None
    with trio.move_on_after(patience):
        text = await trio.to_thread.run_sync(child.stdout.readline, abandon_on_cancel=True)
        return json.loads(text) if text else None
    return None


async def latencies(honest: subprocess.Popen[str], seconds: float) -> list[float]:
    """What the honest peer measures in the next `seconds`."""
    assert honest.stdin is not None
    for wait in (0.0, seconds):
        await trio.sleep(wait)
        honest.stdin.write("\n")
        honest.stdin.flush()
        taken = await line(honest)
    return list(taken or [LOST])


def resident(child: subprocess.Popen[str]) -> float:
    """MiB; 0 where the process is gone."""
    try:
        fields = Path(f"/proc/{child.pid}/statm").read_text().split()
    except OSError:
        return 0.0
    return int(fields[1]) * 4096 / MIB


class Scene:
    """A victim and an honest peer that calls it."""

    def __init__(self, victim: subprocess.Popen[str], honest: subprocess.Popen[str], address: str) -> None:
        self.victim, self.honest, self.address = victim, honest, address

    async def cost(
        self, adversary: Adversary, *, quiet: float, seconds: float, floor: float = P99_FLOOR, tries: int = TRIES
    ) -> Cost:
        """Measure `quiet` s of peace, then `seconds` of the attack; `tries` times at the most until it is not slow."""
        costs = []
        for _ in range(tries):
            costs.append(await self._cost_once(adversary, quiet=quiet, seconds=max(seconds, adversary.seconds)))
            if not costs[-1].slow(floor) or not costs[-1].alive:
                break
        last = costs[-1]
        return replace(
            last, grown=max(cost.grown for cost in costs), harm=next((c.harm for c in costs if c.harm), None)
        )

    async def _cost_once(self, adversary: Adversary, *, quiet: float, seconds: float) -> Cost:
        before = percentile(await latencies(self.honest, quiet), 0.99)
        await self._stretch()
        rss, highest = resident(self.victim), 0.0
        taken: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._attack, adversary)

            async def watch() -> None:
                nonlocal highest
                while True:
                    highest = max(highest, resident(self.victim))
                    await trio.sleep(0.1)

            nursery.start_soon(watch)
            taken = await latencies(self.honest, seconds)
            nursery.cancel_scope.cancel()
        stretch = await self._stretch()
        alive = self.victim.poll() is None and await self._answers()
        return Cost(highest - rss, before, percentile(taken, 0.99), stretch, alive, adversary.harm(self.address))

    async def _attack(self, adversary: Adversary) -> None:
        try:
            await adversary.attack(self.address)
        except* Exception as errors:  # the victim died or will not speak to it any more: the figures say so
            log.debug("%s ended: %r", adversary.name, errors.exceptions)

    async def _stretch(self) -> float:
        """The longest turn of the victim's loop since the last time, in ms of CPU."""
        assert self.victim.stdin is not None
        with suppress(BrokenPipeError):
            self.victim.stdin.write("\n")
            self.victim.stdin.flush()
        longest = await line(self.victim, patience=10.0)
        return LOST if longest is None else float(longest)

    async def _answers(self) -> bool:
        """Whether a new peer is let in and answered, at one try or another: a slow machine is not a dead node."""
        with trio.move_on_after(60):
            while True:
                try:
                    async with adversaries.authenticated() as newcomer:
                        stream = await adversaries.stream_to(newcomer, self.address)
                        await stream.send_all(adversaries.call(1, "echo", adversaries.Blob()))
                        if await stream.receive_some(1 << 16):
                            return True
                except* NetworkError as errors:
                    log.debug("a new peer was not answered: %r", errors.exceptions)
                await trio.sleep(0.5)
        return False


@asynccontextmanager
async def scene(*arguments: str, undefended: bool = False) -> AsyncIterator[Scene]:
    """A victim, started with `arguments` beside the usual, and its honest peer."""
    with process("victim.py", *(["--undefended"] if undefended else arguments)) as victim:
        started = await line(victim)
        with process("honest.py", started["address"]) as honest:
            await line(honest)
            yield Scene(victim, honest, started["address"])


async def outcomes(*, quiet: float = 2.0, seconds: float = 4.0) -> AsyncIterator[Outcome]:
    """All attacks of the group in full, each on fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(adversaries.everyone(Path()))):
            costs = []
            for undefended in (False, True):
                adversary = adversaries.everyone(Path(folder) / f"proof-{undefended}")[number]
                async with scene(*adversary.victim, undefended=undefended) as stage:
                    costs.append(await stage.cost(adversary, quiet=quiet, seconds=seconds))
            shows = "" if costs[1].failures() else adversary.shows
            yield Outcome("transport", adversary.name, str(costs[0]), str(costs[1]), costs[0].failures(), shows)
