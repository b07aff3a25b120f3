"""The run that the owner chooses on the node's page, where the command that started it named none.

    wanted = await choice.made()        the daemon, which waits (`swarmnode run --choose`, `swarmnode open`)
    choice.make(wanted_by(params))      the control method `choose`, which the page asks for

What the page sends is a link or the address of a member, a run of the data directory, one that `swarmnode discover`
finds, a built-in run, or the text of a run file. None of it names a path, a module or code.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import trio

from swarmnode.node.exitcodes import UsageMistake
from swarmnode.node.host.addresses import parse
from swarmnode.node.invite import WHERE, check_named, decode, is_link
from swarmnode.node.storage.datadir import RUN_ID
from swarmnode.training.options import SettingError, read_toml
from swarmnode.training.runspec import BUILT_IN_RUNS, RunSpec, parse_runspec

ADDRESSES = 8  # at the most, of one choice
SOURCE = "the run file"


@dataclass(frozen=True)
class Wanted:
    """A run to begin (`spec`), or one to join or go on with: by `run_id`, or the only one of who answers at `join`."""

    spec: RunSpec | None = None
    run_id: str | None = None  # whole, or the first half that a link has
    join: tuple[str, ...] = ()  # multiaddrs
    roster: str = ""


class Choice:
    """The owner's word on which run it is to be; waited for by one task."""

    def __init__(self) -> None:
        self.refused = ""  # why the last choice came to nothing, for a person
        self._make, self._made = trio.open_memory_channel[Wanted](0)

    @property
    def awaited(self) -> bool:
        return self._made.statistics().tasks_waiting_receive > 0

    async def made(self) -> Wanted:
        """Wait for the next choice."""
        return await self._made.receive()

    def make(self, wanted: Wanted) -> None:
        """Raises UsageMistake where nothing is waited for, or a choice is being followed."""
        try:
            self._make.send_nowait(wanted)
        except trio.WouldBlock:
            raise UsageMistake(
                "this node has its run, or is looking for the one that was chosen: for another one, stop it and start "
                "it anew (swarmnode stop, swarmnode open)"
            ) from None
        self.refused = ""


def wanted_by(params: Mapping[str, Any]) -> Wanted:
    """What the page asks for: `where`, `run_id` with or without `addresses`, `file`, or `task`.

    `file` is the text of a run file; `task` one of BUILT_IN_RUNS, with or without a `name` and whether it is `open` to
    anybody. Raises UsageMistake or SettingError.
    """
    if where := str(params.get("where") or "").strip():
        where = where.removeprefix("swarmnode join")  # the whole line may have been pasted
        if is_link(where):
            found = decode(re.split(r"\s-|[^\w\s-]", where.strip(), maxsplit=1)[0])  # without options or a comment
            return Wanted(run_id=found.run_id or None, join=found.addresses, roster=found.roster)
        where, *options = where.split() or [""]
        named = dict(pairwise(options))
        if parse(where) is None:
            raise UsageMistake(f"{where[:80]!r} is neither a link (swarm1...) nor a multiaddr: {WHERE}")
        run_id, roster = named.get("--run"), named.get("--roster", "")
        check_named(run_id, roster or None)
        return Wanted(run_id=run_id, join=(where,), roster=roster)
    if run_id := str(params.get("run_id") or ""):
        addresses = params.get("addresses") or []
        if not RUN_ID.fullmatch(run_id) or not isinstance(addresses, list):
            raise UsageMistake(f"run_id: {run_id[:80]!r} is no run id; it has 64 hex digits")
        return Wanted(run_id=run_id, join=tuple(str(address) for address in addresses[:ADDRESSES]))
    if text := str(params.get("file") or ""):
        try:
            return Wanted(spec=parse_runspec(tomllib.loads(text), source=SOURCE))
        except tomllib.TOMLDecodeError as error:
            raise SettingError(f"{SOURCE}: not valid TOML: {error}") from error
    task, name = (str(params.get(key) or "") for key in ("task", "name"))
    return Wanted(spec=_built_in(task, name, bool(params.get("open"))))


def _built_in(task: str, name: str, open_to_all: bool) -> RunSpec:
    if task not in BUILT_IN_RUNS:
        raise UsageMistake(f"task: {task[:80]!r} is none of {', '.join(BUILT_IN_RUNS)}")
    tables = read_toml(BUILT_IN_RUNS[task])
    if "nonce" not in tables["run"]:  # and so no swarm of all who name it
        # In a run of known members one who lies can spoil the model, so that only who has its link finds it.
        tables["run"] |= {"trust": "open"} if open_to_all else {"unlisted": True}
    if name and name != tables["run"]["name"]:
        tables["run"] |= {"name": name, "nonce": ""}
    return parse_runspec(tables, source="the new run")
