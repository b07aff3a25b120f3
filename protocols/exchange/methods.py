"""The exchange methods that a run may choose in `[exchange] method`: each one file, and one line here.

A new name also joins the choices of `[exchange] method` in training/runspec.py; the conformance suite then holds the
method to what `method.py` says.
"""

from __future__ import annotations

from swarmnode.protocols.exchange import diloco
from swarmnode.protocols.exchange import open as open_
from swarmnode.protocols.exchange.method import Build

METHODS: dict[str, Build] = {
    "diloco": diloco.build,
    "open": open_.build,
}
