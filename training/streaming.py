"""Streaming DiLoCo (arXiv 2501.18512): the model in fragments of layers, one of which is exchanged at a time.

    fragments = fragments_of(layout, 8)
    work = Unsettled(phi)                               # of one worker, who begins at the shared parameters phi
    g = fragment.take(work.of(theta))                   # what it offers when the fragment's turn comes
    state = fragment.step(state, mean_of_g, lr=0.4, momentum=0.9)
    work.settle(fragment, g)                            # tau steps later
    work.move(fragment, theta, mixed(fragment.take(theta), fragment.take(state.parameters), alpha))

Algorithm 2 of the paper, for each fragment p once in H steps, at a step t that is another for each fragment:

    g_m,p   = phi_p(t - H) - theta_m,p(t)               each worker m sends it in four bits (E3M0), and trains on
    phi_p   <- OuterOpt(phi_p, mean_m g_m,p)            the sum in float32
    theta_m,p(t + tau) <- alpha * theta_m,p(t + tau) + (1 - alpha) * phi_p

With eager updates (2502.12996) a worker does not wait for the others' part to go on from its own: at step t

    theta_m,p(t) <- OuterOpt(phi_p, g_m,p / M)          its own pseudo-gradient fresh, the others' delayed

Departures:

- What a worker offers is what its inner steps did since it offered last (`Unsettled`), not how far it stands from phi.
  Both have the same mean but for the work of the tau steps: in the paper, the mix drops (1 - alpha) of that; here all
  of it counts, once. Where some workers are missing from a mean, how they differed from it is not offered again either.
- With eager updates, the others' part is applied when it comes, not H steps later: theta <- phi less own new work.
- Fragments are strided, as the paper recommends. Tensors outside of layers go to the smallest fragments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swarmnode.training import mapped
from swarmnode.training.outer import Layout, OuterState, Vector, frozen, outer_step

_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")  # the first whole number in a tensor's name is that of its layer


@dataclass(frozen=True)
class Fragment:
    ranges: tuple[tuple[int, int], ...]  # (start, stop) each, ascending

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def take(self, vector: Vector) -> Vector:
        """A copy of its elements of `vector` (P,), one behind the other, (size,)."""
        return np.concatenate([vector[start:stop] for start, stop in self.ranges])

    def put(self, vector: Vector, values: Vector) -> None:
        """Write `values` (size,) over its elements of `vector` (P,)."""
        done = 0
        for start, stop in self.ranges:
            vector[start:stop] = values[done : done + stop - start]
            done += stop - start

    def of(self, state: OuterState) -> OuterState:
        """Its elements of a state, as a state."""
        return OuterState(self.take(state.parameters), self.take(state.momentum))

    def step(self, state: OuterState, mean: Vector, *, lr: float, momentum: float) -> OuterState:
        """One outer step (`outer.outer_step`) of its elements along `mean` (size,); the others stay. Raises ValueError.

        Bit-identical for equal arguments, as that is.
        """
        after = outer_step(self.of(state), mean, lr=lr, momentum=momentum)
        velocity = self._with(state.momentum, after.momentum) if momentum else state.momentum
        return OuterState(self._with(state.parameters, after.parameters), velocity)

    def _with(self, vector: Vector, values: Vector) -> Vector:
        """A copy of `vector` (P,), read-only, in which its elements are `values`."""
        copy = mapped.copied(vector)
        self.put(copy, values)
        return frozen(copy)


def fragments_of(layout: Layout, count: int) -> tuple[Fragment, ...]:
    """Cut a model into `count` fragments: layer i is in fragment i modulo `count`; as many as layers at the most.

    A tensor that is in no layer is whole in the fragment that is smallest then. A model without layers is cut into
    `count` equal runs of elements, or as many as it has elements.
    """
    layer_of = {slot: int(found[1]) if (found := _NUMBER.search(slot.name)) else None for slot in layout.slots}
    layers = sorted({layer for layer in layer_of.values() if layer is not None})
    if len(layers) < 2:
        count = min(count, layout.parameters)
        edges = [layout.parameters * number // count for number in range(count + 1)]
        return tuple(Fragment(((start, stop),)) for start, stop in pairwise(edges))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(min(count, len(layers)))]
    for slot, layer in sorted(layer_of.items(), key=lambda item: item[1] is None):  # what is in no layer comes last
        smallest = min(ranges, key=lambda taken: sum(stop - start for start, stop in taken))
        into = smallest if layer is None else ranges[layers.index(layer) % len(ranges)]
        into.append((slot.place.start, slot.place.stop))
    return tuple(Fragment(_joined(taken)) for taken in ranges)


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges in ascending order, with those that meet made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def mixed(local: Vector, shared: Vector, alpha: float) -> Vector:
    """alpha * local + (1 - alpha) * shared, float32 (n,)."""
    return np.float32(alpha) * local + np.float32(1 - alpha) * shared


def ahead(fragment: Fragment, state: OuterState, own: Vector, share: float, *, lr: float, momentum: float) -> Vector:
    """Where eager updates go on from: the outer step along share * `own` (n,), this worker's part of the mean, alone.

    Raises ValueError where that is not finite.
    """
    return outer_step(fragment.of(state), np.float32(share) * own, lr=lr, momentum=momentum).parameters


class Unsettled:
    """What one worker's inner steps did that is in no shared state yet, as a pseudo-gradient (P,).

    It is the difference of an origin and the local parameters, both of which move together where these are moved by
    anything but inner steps.
    """

    def __init__(self, shared: Vector) -> None:
        """A worker who begins at these parameters."""
        self.origin: Vector = shared.copy()

    def of(self, local: Vector) -> Vector:
        """What led to these local parameters."""
        return np.subtract(self.origin, local)

    def inside(self, fragment: Fragment, local: Vector) -> Vector:
        """The part of that in a fragment, (size,)."""
        return np.subtract(fragment.take(self.origin), fragment.take(local))

    def settle(self, fragment: Fragment, work: Vector) -> None:
        """Some of it, (size,), counts."""
        fragment.put(self.origin, fragment.take(self.origin) - work)

    def move(self, fragment: Fragment, local: Vector, to: Vector) -> None:
        """Have the local parameters (P,) stand at `to` (size,) in a fragment, from where they stood."""
        fragment.put(self.origin, fragment.take(self.origin) + (to - fragment.take(local)))
        fragment.put(local, to)
