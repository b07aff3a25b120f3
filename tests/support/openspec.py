"""The RunSpec of an open run, for tests of its parts alone."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

from swarmnode.protocols.chain.state import ChainState, genesis, rules_of
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.runner import inline
from swarmnode.training.outer import OuterState
from swarmnode.training.runspec import RunSpec, parse_runspec
from swarmnode.training.sections import TrustSection


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


def parts_of(spec: RunSpec | None = None, **given: Any) -> Context:
    """The parts of a node, of which there are those that are given: what one part of the method reads."""
    needed = [part.name for part in fields(Context) if part.default is part.default_factory is MISSING]
    parts: dict[str, Any] = {**dict.fromkeys(needed), "spec": spec, "runner": inline, **given}
    return Context(**parts)


def judged_at(state: OuterState, before: OuterState, **changes: Any) -> tuple[Any, ChainState]:
    """What a judge reads of a store where these are the states after the last two rosters, and the chain there."""
    chain = replace(genesis("ab" * 32, ("me",), window=60_000), undoable=True, **changes)
    states, block = {chain.tip: state, b"before": before}, SimpleNamespace(parent=b"before")
    return SimpleNamespace(state=states.get, tree={chain.tip: block}, rules=rules_of(TrustSection())), chain
