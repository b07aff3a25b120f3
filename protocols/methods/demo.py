"""The exchange method `demo`: after each step, the largest coefficients of everybody's momentum (training/demo.py).

A round is one of `diloco`, as a rule of a single inner step by plain SGD, with another exchange and another outer step:

    g <- phi - theta                            the step of this member, its learning rate times its gradient
    m <- beta * m + dct(g)                      `sent`, the residual: an error feedback that fades
    q <- topk(m), m <- m - q
    mean <- sum_i share_i * q_i                 everybody fetches everybody's q, and adds them up in the roster's order
    phi <- phi - eta * sign(idct(mean))         eta = [outer] lr times the inner learning rate of the step

An all-gather in place of an all-reduce: q is so small that encoding sums anew would save little, and means are exact.
A member sends and receives N - 1 encodings in a round, of 0.02 bytes for each parameter.

Who may fail when, and what is then true, is as in `diloco`: an attempt that lacks one q fails and names its author, and
m stays what it was until a result counts. Work that never counted returns to m, and fades there. As signs are taken,
the shared parameters do not tell how much work is in them.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import trio

from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.messages import RoundRoster
from swarmnode.protocols.methods.known.method import Diloco
from swarmnode.protocols.methods.known.reduction import Reducer, all_or_missing, blaming, encoded, shares_in
from swarmnode.protocols.methods.known.round import DilocoRounds
from swarmnode.protocols.methods.trainer import Vector
from swarmnode.protocols.network import PeerId
from swarmnode.training.codecs.feedback import is_finite, norm_in_float64
from swarmnode.training.demo import BETA, dct, idct, signed_step
from swarmnode.training.outer import OuterState, fold_in


class Gather(Reducer):
    """Everybody's encoding to everybody; the residual is the momentum, as coefficients."""

    def __init__(self, parts: Context) -> None:
        super().__init__(parts, decay=BETA)

    async def reduce(
        self, roster: RoundRoster, values: Vector, *, within: float = math.inf, silence: float | None = None
    ) -> Vector:
        """As in `Reducer`: what all sent comes to, in the parameters' own space."""
        self._withdraw(old for old in self._offered if old.round >= roster.round)
        self.rates = {p: rate for p, rate in self.rates.items() if p in roster.peers}
        self.rollback()
        self._pending = roster.roster_id
        self._offered.append(roster)
        shares, size = shares_in(roster), self._codec.encoded_size(self._parameters)
        found: dict[PeerId, bytes | memoryview] = {}
        if self._me in shares:
            found[self._me] = raw = await self._parts.runner(partial(self._encode, values))
            self._offer(roster, ("q",), raw, roster.peers)
        until = trio.current_time() + min(self._parts.spec.exchange.deadline_ceiling, within)

        async def fetch(peer: PeerId) -> None:
            raw, rate = await self._fetch(roster, peer, ("q",), until, max_size=size, silence=silence)
            found[peer] = raw
            if rate is not None:
                self.rates[peer] = rate

        async with all_or_missing() as nursery:
            for peer in shares:
                if peer != self._me:
                    nursery.start_soon(fetch, peer)

        def add_up() -> Vector:
            total, scratch = np.zeros((2, self._parameters), np.float32)
            for peer, share in shares.items():
                with blaming(peer):
                    self._codec.decode(found[peer], self._parameters, scratch)
                fold_in(total, share, scratch)
            return idct(total)

        return await self._parts.runner(add_up)

    def _encode(self, values: Vector) -> bytes:
        raw = bytearray(self._codec.encoded_size(self._parameters))
        encoded(self.sent, slice(0, self._parameters), dct(values), memoryview(raw))  # zeros where beyond float32
        return bytes(raw)

    def give_back(self, work: Vector) -> bool:
        """As in `Reducer`, but all of it: a momentum is the longer the more steps are in it."""
        if not is_finite(work):
            return False
        return self.sent.give_back(dct(work), norm_in_float64(self.sent.export()) + norm_in_float64(work))

    def left_over(self) -> Vector:
        return idct(super().left_over())

    def restore(self, left_over: Vector) -> None:
        super().restore(dct(left_over))


class DeMoRounds(DilocoRounds):
    """One node's rounds, each of which moves every parameter by the same distance."""

    def _outer_step(self, round: int, before: OuterState, mean: Vector) -> OuterState:
        inner, layout = self._spec.inner, self._trainer.layout
        lr = self._spec.outer.lr * inner.lr * inner.rate_at(round, 0)
        return signed_step(before, mean, layout, lr=lr, decay=inner.weight_decay)


class DeMo(Diloco):
    """One node's part in a run by decoupled momentum; all that is not about the exchange is as in `Diloco`."""

    name = "demo"
    reducer_class = Gather
    rounds_class = DeMoRounds
