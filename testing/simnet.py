"""A network in memory, on trio's MockClock: latency, bandwidth, partitions, frozen and killed nodes.

    async def main() -> None:
        world = SimWorld(latency=0.02)
        async with trio.open_nursery() as nursery:
            alice, bob = world.node("alice"), world.node("bob")
            for node in (alice, bob):
                await nursery.start(node.run)
            stream = await alice.open_stream(bob.me, "/some/protocol/1")

    run_simulation(main)

How it moves: whatever one node sends another becomes an event in the receiver's heap, due when the link has serialised
it and its latency has passed, in the order of sending. Each node runs one task that carries out its events; links and
connections that nobody uses cost nothing, so thousands of nodes fit in a process.

What the faults mean:
- kill: the node's connections end at once at both ends, its handlers are cancelled, and its `run` returns.
  `node(name)` then gives a new node of the same identity, as a restart would.
- freeze: nothing is delivered to the node or from it, as after SIGSTOP. Nothing breaks; bytes wait within each stream's
  window. What waits is delivered on thaw. The node's own tasks go on and are heard by nobody.
- partition: between groups bytes wait, and connections break after `silence` seconds, as with a keepalive; heal()
  before that, and they go on. New connections run into their timeouts, and a dial that was given up makes no connection
  later, by heal() or thaw().

Deterministic: events due at one time happen in the order in which they were sent, random choices come from the
seed, and `run_simulation` turns off trio's deliberate shuffling of tasks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
import trio.testing

from swarmnode.testing.simnode import SimNetwork
from swarmnode.testing.simworld import SimWorld

__all__ = ["SimNetwork", "SimWorld", "run_simulation"]

T = TypeVar("T")


def run_simulation(main: Callable[..., Awaitable[T]], *args: Any, seed: int = 0) -> T:
    """`trio.run` under a clock that jumps whenever all tasks wait, with tasks run in a fixed order.

    Trio shuffles the tasks of a batch so that nobody relies on their order; here, as in hypothesis's trio support, the
    order is sorted and its coin is seeded.
    """
    from trio._core import _run

    was = _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(seed)
    try:
        return trio.run(main, *args, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = was  # type: ignore[misc]
