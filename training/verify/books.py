"""Whether a contribution is what the record of its author's work leads to: encoding and error feedback done again.

    left = residual_after(offer_before)                         # what the round before left over
    end = walk(trace, start, ends=…, states=…)                  # through all legs, to what was offered
    explains(raw, start - end, residual, codec)                 # whether the contribution is that

All of it is elementwise arithmetic that the author did as well, so it agrees to the last bit but for one factor: the
norm to which a residual is clipped is a sum, whose order machines choose. NEAR is far above that and far below a lie.
`Wrong` says what does not agree; a state that is not here raises KeyError, and says nothing about the author.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swarmnode.training.codecs import Codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.verify.trace import Trace, Vector, vector_id

NEAR = 1e-3  # relative distance
DECAY = 0.95  # of the residual in each round, as in the open round


class Wrong(Exception):
    """The author's own vectors contradict what it signed. The message says where."""


@dataclass(frozen=True)
class Offered:
    """The contribution before, and what its round made of it."""

    residual: Vector  # (P,), before it
    delta: Vector  # (P,), the pseudo-gradient
    raw: bytes  # as it was offered
    codec: Codec  # by which it was to be encoded
    accepted: bool
    returned: float  # share of it that was clipped off, 0 to 1


def residual_after(offer: Offered) -> Vector:
    """What error feedback keeps after that round, (P,). Raises Wrong where the contribution does not follow itself."""
    feedback = _feedback(offer.residual, offer.codec)
    explains(offer.raw, offer.delta, offer.residual, offer.codec)
    feedback.encode(offer.delta)
    if not offer.accepted:
        feedback.rollback()
        feedback.fade()
        _give_back(feedback, offer.delta, _norm(offer.delta))
        return feedback.export()
    feedback.commit()
    if offer.returned > 0:
        sent = feedback.codec.decode(offer.raw, feedback.size)
        _give_back(feedback, sent * np.float32(offer.returned), _norm(sent))
    return feedback.export()


def walk(trace: Trace, start: Vector, *, ends: Mapping[bytes, Vector], states: Mapping[bytes, Vector]) -> Vector:
    """The parameters (P,) that were offered, from those at the trace's beginning.

    `ends`: vectors by id, of the end of each leg at least; `states`: the shared parameters after each roster. Raises
    Wrong; KeyError for what is not there.
    """
    at, base = start, trace.base
    for leg in trace.legs:
        if leg.base:
            since = start if leg.since_offer else states[base]
            at = states[leg.base] + (at - since)
            base = leg.base
        if leg.stretches:
            if vector_id(at) != leg.stretches[0].start.parameters:
                raise Wrong("a leg does not begin where the one before and the shared state lead")
            at = ends[leg.stretches[-1].end.parameters]
    if vector_id(at) != trace.end:
        raise Wrong("what was offered is not where the steps led")
    return at


def explains(raw: bytes, delta: Vector, residual: Vector, codec: Codec) -> None:
    """Whether these bytes encode the pseudo-gradient with what was left over. Raises Wrong."""
    feedback = _feedback(residual, codec)
    expected = feedback.codec.decode(bytes(feedback.encode(delta)), feedback.size)
    told = feedback.codec.decode(raw, feedback.size)
    if apart(told, expected) > NEAR:
        raise Wrong(f"the contribution is {apart(told, expected):.3g} away from what its author's steps come to")


def apart(told: Vector, expected: Vector) -> float:
    """Relative Euclidean distance."""
    off, length = _norm(told - expected), _norm(expected)
    return 0.0 if off == 0 else off / length if length > 0 else float("inf")


def _feedback(residual: Vector, codec: Codec) -> ErrorFeedback:
    feedback = ErrorFeedback(codec, residual.size, decay=DECAY)
    feedback.restore(np.asarray(residual, np.float32))
    return feedback


def _give_back(feedback: ErrorFeedback, work: Vector, norm: float) -> None:
    if norm > 0 and np.isfinite(norm):
        feedback.add(work, norm)


def _norm(vector: Vector) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))
