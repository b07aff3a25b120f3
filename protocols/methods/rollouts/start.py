"""A node's part in sharing rollouts within a run: what who trains a policy and who only samples for one have alike."""

from __future__ import annotations

from functools import partial

from swarmnode.protocols.methods.method import Parts
from swarmnode.protocols.methods.rollouts import Rollouts


def sharing(parts: Parts) -> partial[Rollouts]:
    """`Rollouts` with all that follows from the node and its run; still to be said: with whom, and what it takes."""
    return partial(
        Rollouts,
        me=parts.me,
        run_id=parts.run_id,
        rpc=parts.rpc,
        bulk=parts.bulk,
        sign=parts.sign,
        verify=parts.network.verify,
        runner=parts.runner,
        now=parts.now,
        rng=parts.rng,
        admits=parts.admits,
    )
