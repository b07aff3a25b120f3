"""Members of a `btard` swarm without one of their defences: `undefended.py` says what that is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from undefended import Lacking

from swarmnode.protocols.methods.btard import method as btard_method
from swarmnode.protocols.methods.btard.method import BtardReduce, Lies
from swarmnode.protocols.methods.known import agreement


async def _nothing(*given: Any) -> None:
    return None


class _Whatever:
    """Commitments that nothing breaks."""

    def __getitem__(self, key: object) -> _Whatever:
        return self

    @property
    def hashes(self) -> _Whatever:
        return self

    def __ne__(self, other: object) -> bool:
        return False


_fetch_part = BtardReduce._fetch_part


async def _fetch_what_comes(self: BtardReduce, attempt: Any, number: int) -> None:
    await _fetch_part(self, replace(attempt, commitments=_Whatever()), number)


async def _condemn(self: BtardReduce, attempt: Any, number: int, *given: Any) -> None:
    raise Lies({attempt.parts[number].owner: "somebody said so"})


UNWATCHED = Lacking(
    "no checksums and no audits",
    (
        (btard_method, "auditor", lambda seed, members, parts: ("", 0)),
        (BtardReduce, "_suspects", lambda self, attempt: []),
    ),
)
UNCOMMITTED = Lacking(
    "what is sent is not compared with commitments", ((BtardReduce, "_fetch_part", _fetch_what_comes),)
)
UNCOMPARED = Lacking("members do not compare what they were told", ((BtardReduce, "_compare", _nothing),))
UNTRIED = Lacking("who is accused is banned untried", ((BtardReduce, "_try", _condemn),))
ANY_NONCE = Lacking("nonces are not checked", ((BtardReduce, "_check_openings", lambda *given: None),))
PATIENT = Lacking("leaders are waited for as long each time", ((agreement, "PATIENCE_BACK", 1e9),))
