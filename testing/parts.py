"""A context for one part of a method alone, such as an all-reduce without agreement: for tests and benchmarks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from swarmnode.protocols.calls.rpc import Rpc
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.known.messages import Part, RoundRoster, cut, owners_of
from swarmnode.protocols.network import Network
from swarmnode.protocols.peers.liveness import Liveness
from swarmnode.protocols.runner import Runner, inline
from swarmnode.protocols.transfer.bulk import Bulk
from swarmnode.training.sections import ExchangeSection, InnerSection


def context_of(
    run_id: str,
    network: Network,
    rpc: Rpc,
    liveness: Liveness,
    exchange: ExchangeSection,
    *,
    bulk: Bulk | None = None,
    runner: Runner = inline,
    parameters: int = 0,
) -> Context:
    """What agreement and reductions use of a context; without `bulk` the first alone. There is no trainer."""
    return cast(
        Context,
        SimpleNamespace(
            me=network.me,
            run_id=run_id,
            network=network,
            rpc=rpc,
            bulk=bulk,
            liveness=liveness,
            runner=runner,
            spec=SimpleNamespace(exchange=exchange, inner=InnerSection()),
            trainer=SimpleNamespace(layout=SimpleNamespace(parameters=parameters)),
            admits=lambda peer: True,
            relayed=tuple,
        ),
    )


def parts(roster: RoundRoster, parameters: int) -> tuple[Part, ...]:
    """How `parameters` elements are cut in the first attempt of a round, one part for each seat that owns any."""
    return cut(owners_of(roster.seats), 0, parameters)
