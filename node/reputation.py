"""How a daemon keeps its ledger of peers: where it lies on disk, what feeds it, and whom it is asked about.

`reputation.json` in the run's folder holds what was seen until the last epoch. One that is damaged is put aside with a
warning: then this node knows of its peers what the chain and others tell, as a newcomer does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from swarmnode.node.storage.datadir import DataDirError, write_atomic
from swarmnode.protocols.peers.violations import Offences
from swarmnode.protocols.reputation.ledger import Ledger, Reputation
from swarmnode.protocols.runner import Runner
from swarmnode.protocols.state.backend import StateBackend
from swarmnode.protocols.state.sync import StateSync

log = logging.getLogger(__name__)

NAME = "reputation.json"


async def make_watching(
    folder: Path,
    *,
    me: str,
    now: Callable[[], int],
    runner: Runner,
    state: StateBackend,
    sync: StateSync | None,
    members: Callable[[], int],
    round: Callable[[], int],
) -> Reputation:
    """A ledger with what is kept in `folder`, the run's, and what keeps it from now on."""
    ledger = Ledger(me, now=now)
    await runner(lambda: _restore(ledger, folder / NAME))

    async def keep(ledger: Ledger) -> None:
        kept = ledger.export()
        try:
            await runner(lambda: write_atomic(folder / NAME, json.dumps(kept).encode()))
        except DataDirError as error:
            log.warning("what is known of peers is not kept: %s", error)

    return Reputation(ledger, state=state, sync=sync, members=members, round=round, kept=keep)


def feed(ledger: Ledger, *offences: Offences) -> None:
    """Have these offences count in the ledger."""
    for each in offences:
        each.tell(ledger.offended)


def _restore(ledger: Ledger, path: Path) -> None:
    try:
        ledger.restore(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        aside = path.with_suffix(".damaged")
        log.warning("%s cannot be read and is put aside as %s: %s", path, aside.name, error)
        try:
            path.replace(aside)
        except OSError as second:
            log.warning("%s stays where it is: %s", path, second)
