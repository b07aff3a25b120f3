"""A ledger for each node of a simulated swarm, by peer id: what it thinks of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.node.session import METHODS
from swarmnode.protocols.methods.context import Context
from swarmnode.protocols.methods.method import Method
from swarmnode.protocols.reputation.ledger import Ledger

LEDGERS: dict[str, Ledger] = {}


def keep_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a ledger to every node of method `open` that is started until the test ends."""
    LEDGERS.clear()
    plain = METHODS["open"]

    def build(parts: Context) -> Method:
        LEDGERS[parts.me] = Ledger(parts.me, now=parts.now)
        return plain(replace(parts, ledger=LEDGERS[parts.me]))

    monkeypatch.setitem(METHODS, "open", build)
