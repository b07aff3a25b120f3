"""The RunSpec of an open run, for tests of its parts alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from swarmnode.protocols.chain.state import ChainRules, ChainState, genesis
from swarmnode.protocols.runner import inline
from swarmnode.training.outer import OuterState
from swarmnode.training.runspec import RunSpec, parse_runspec


def open_spec(*, codec: str = "fp32", steps: int = 80, samples: int = 0, momentum: float = 0.0) -> RunSpec:
    """`samples`: sequences of a round, a multiple of `steps`; 0: as many as by default."""
    tables: dict[str, Any] = {
        "run": {"name": "alone", "trust": "open"},
        "task": {"name": "byte-lm"},
        "inner": {"steps": steps, **({"batch": samples // steps} if samples else {})},
        "outer": {"lr": 1.0, "momentum": momentum},
        "exchange": {"method": "open", "codec": codec},
    }
    return parse_runspec(tables, source="test")


def parts_of(spec: RunSpec, **more: Any) -> Any:
    """What a part of the method reads of the parts of a node."""
    return SimpleNamespace(spec=spec, runner=inline, ledger=None, **more)


def judged_at(state: OuterState, before: OuterState, **changes: Any) -> tuple[Any, ChainState]:
    """What a judge reads of a store where these are the states after the last two rosters, and the chain there."""
    chain = replace(genesis("ab" * 32, ("me",), window=60_000), undoable=True, **changes)
    states, block = {chain.tip: state, b"before": before}, SimpleNamespace(parent=b"before")
    return SimpleNamespace(state=states.get, tree={chain.tip: block}, rules=ChainRules()), chain
