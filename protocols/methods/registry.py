"""The exchange methods that a run may choose in `[exchange] method`: each one file, and one line here.

A new name also joins the choices of `[exchange] method` in training/runspec.py, and OF_ONE_HISTORY where its members
share one model; the conformance suite then holds the method to what `method.py` says of those.
"""

from __future__ import annotations

from swarmnode.protocols.methods.btard import method as btard
from swarmnode.protocols.methods.known import method as diloco
from swarmnode.protocols.methods.method import Build
from swarmnode.protocols.methods.open import method as open_
from swarmnode.protocols.methods.rollouts import sapo

# Their members go through the same states; with sapo each has a policy of its own.
OF_ONE_HISTORY = ("btard", "diloco", "open")

METHODS: dict[str, Build] = {
    "btard": btard.build,
    "diloco": diloco.build,
    "open": open_.build,
    "sapo": sapo.Sapo,
}
