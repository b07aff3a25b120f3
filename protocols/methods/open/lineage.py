"""Asking a member whether its history goes back to the roster that this node's join string names (`chain/lineage.py`).

    chain.path      the ids of the rosters up to where the member stands; the trusted one is among them, or it is not
    chain.before    the chain that the trusted roster builds on, which must have the digest that the roster names
    chain.records   each roster since, with the cuts, scores, commits and reveals that it rests on

The answers are checked as they come; a member that lies in one of them is as one that has another history. No state and
no contribution is fetched here: a history of 64 rounds takes some megabytes, in questions of 256 records each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmnode.crdt.record import Record
from swarmnode.protocols.chain import lineage
from swarmnode.protocols.chain.forks import DEPTH
from swarmnode.protocols.chain.lineage import TrustedRoster
from swarmnode.protocols.chain.rules import InvalidRoster, NotHeld, Quoted, empty_id
from swarmnode.protocols.chain.state import ChainRules, ChainState
from swarmnode.protocols.chain.statements import (
    Commit,
    Cut,
    InvalidStatement,
    Reveal,
    Roster,
    Said,
    Scores,
    read,
)
from swarmnode.protocols.methods.open.sources import Lost, Sources
from swarmnode.protocols.methods.open.wire import MAX_ASKED, Tip
from swarmnode.protocols.network import PeerId

logger = logging.getLogger(__name__)


class OtherLineage(Exception):
    """A member's history does not contain the trusted roster, or does not follow from it. Says why."""


class CannotTell(Exception):
    """A member keeps too few rounds to show whether its history contains the trusted roster, or does not answer."""


@dataclass(frozen=True)
class Shown:
    """A member's history was shown to follow from the trusted roster."""

    rosters: int  # since then
    shrunken: int  # of which fewer than half of the judges decided


@dataclass
class _Told:
    """What a member told of the rounds since, by id; reveals by the commit that they open."""

    rosters: dict[bytes, Said[Roster]] = field(default_factory=dict)
    commits: dict[bytes, Said[Commit]] = field(default_factory=dict)
    cuts: dict[bytes, Said[Cut]] = field(default_factory=dict)
    scores: dict[bytes, Said[Scores]] = field(default_factory=dict)
    reveals: dict[bytes, Reveal] = field(default_factory=dict)


async def show(
    sources: Sources, rules: ChainRules, trusted: TrustedRoster, *, peer: PeerId, tip: Tip, base: ChainState
) -> Shown:
    """Check that `base`, which leads to a member's tip, follows from the trusted roster.

    Raises OtherLineage or CannotTell.
    """
    try:
        path = await sources.path_of(peer, tip.tip)
        if trusted.id not in path.ids:
            oldest = tip.round - len(path.ids)  # the round that the first of these rosters ended
            if trusted.round < oldest:
                raise CannotTell(f"it keeps the rounds since {oldest}")
            if trusted.round >= tip.round:
                raise CannotTell(f"it has done {tip.round} rounds")
            raise OtherLineage(f"round {trusted.round} ended with another roster there")
        steps = list(zip(path.ids, path.empty, strict=True))[path.ids.index(trusted.id) :]
        told = await _ask(sources, peer, [id for id, is_empty in steps if not is_empty])
        if trusted.id not in told.rosters:
            raise Lost("it does not have that roster")
        chain = lineage.begin(trusted, told.rosters[trusted.id], await sources.chain_before(peer, trusted.id))
        rosters = shrunken = 0
        for id, is_empty in steps:
            if lineage.leads_to(chain, base):
                break
            shrunken += lineage.shrunken(chain, rules) and not is_empty
            rosters += 1
            chain = _step(rules, chain, told, id, is_empty)
    except Lost as error:
        raise CannotTell(str(error)) from None
    except (InvalidRoster, InvalidStatement, NotHeld) as error:
        raise OtherLineage(f"what it shows since round {trusted.round} breaks a rule: {error}") from None
    if not lineage.leads_to(chain, base):
        raise OtherLineage("where it says that it stands does not follow from the rosters that it shows")
    return Shown(rosters, shrunken)


async def _ask(sources: Sources, peer: PeerId, rosters: list[bytes]) -> _Told:
    """These rosters and what they rest on, in few questions. Raises InvalidStatement."""
    told = _Told()
    for said in await _all(sources, peer, rosters):
        if isinstance(said.what, Roster):
            told.rosters[said.id] = said
    made = [said.what for said in told.rosters.values()]
    ids = [id for one in made for id in (*one.cuts, *one.scores, *(entry.commit for entry in one.entries))]
    for said in await _all(sources, peer, ids):
        match said.what:
            case Commit():
                told.commits[said.id] = said
            case Cut():
                told.cuts[said.id] = said
            case Scores():
                told.scores[said.id] = said
    accepted = [entry.commit for one in made for entry in one.accepted]
    for said in await _all(sources, peer, (), reveals=accepted):
        if isinstance(said.what, Reveal):
            told.reveals[said.what.commit] = said.what
    return told


def _step(rules: ChainRules, chain: ChainState, told: _Told, id: bytes, is_empty: bool) -> ChainState:
    """The chain after one more roster. Raises Lost, InvalidRoster or NotHeld."""
    if is_empty:
        if empty_id(chain) != id:
            raise InvalidRoster("an empty roster with another id")
        return lineage.empty(chain)
    try:
        said = told.rosters[id]
        cuts = tuple(told.cuts[cut] for cut in said.what.cuts)
        scores = tuple(told.scores[scored] for scored in said.what.scores)
        commits = {entry.commit: told.commits[entry.commit] for entry in said.what.entries}
    except KeyError:
        raise Lost(f"it does not have a roster of round {chain.round}, or what that quotes") from None
    reveals = {commit: told.reveals[commit] for commit in commits if commit in told.reveals}
    return lineage.after(chain, rules, said, Quoted(cuts, scores, commits, reveals, {}))


async def _all(
    sources: Sources, peer: PeerId, ids: Iterable[bytes], *, reveals: Iterable[bytes] = ()
) -> list[Said[Any]]:
    """What a peer has of these statements, asked for in as many questions as it takes. Raises InvalidStatement."""
    wanted, opened = list(ids), list(reveals)
    found: list[Said[Any]] = []
    while wanted or opened:
        now = wanted[:MAX_ASKED]
        theirs = opened[: MAX_ASKED - len(now)]
        said = [read(one) for one in await sources.records(peer, now, theirs) if isinstance(one, Record)]
        got = {one.id for one in said if one.id in now}
        shown = {one.what.commit for one in said if isinstance(one.what, Reveal) and one.what.commit in theirs}
        if not got and not shown:
            break
        found += [one for one in said if one.id in got or (isinstance(one.what, Reveal) and one.what.commit in shown)]
        wanted = [id for id in wanted if id not in got]
        opened = [id for id in opened if id not in shown]
    return found


# --- what the owner is told -------------------------------------------------------------------------------------------


def told_of_another(trusted: TrustedRoster, doubts: Mapping[PeerId, Exception]) -> str:
    """The members that were reached show another history."""
    return (
        f"the history of the run that is shown here does not contain roster {trusted}, which your join line names:\n"
        f"{_listed(doubts)}\n"
        "Whoever answers at these addresses shows a history of their own, or the line is from the losing side of a "
        "split of the run. Nothing was taken over from them, and this node does not train.\n"
        "Ask somebody whom you trust for a new line (swarmnode id --join prints it), or join through other addresses. "
        "Without --roster, this node believes whom it reaches."
    )


def told_of_nobody(trusted: TrustedRoster, doubts: Mapping[PeerId, Exception]) -> str:
    """The roster is recent, and none of those who were reached keeps it."""
    return (
        f"nobody who answers can show that the run's history contains roster {trusted}, which your join line names:\n"
        f"{_listed(doubts)}\n"
        "Members keep the last rounds since they joined; where all of them joined later, none can tell, and it looks "
        "the same where all are one person's. Nothing was taken over from them, and this node does not train.\n"
        "Try again with the address of a member that has been there for longer, or ask for a new line (swarmnode id "
        "--join prints it). Without --roster, this node believes whom it reaches."
    )


def told_of_too_old(trusted: TrustedRoster, furthest: int) -> str:
    """Nobody keeps rosters of that age."""
    return (
        f"roster {trusted} of your join line could not be checked: the run is said to have done {furthest} rounds, and "
        f"members keep the last {DEPTH}. This node goes on with the history that most of those who answer show; were "
        "all of them one person's, it could not tell. A line that is newer (swarmnode id --join prints it) would "
        "be checked"
    )


def told_of_few(shown: Shown) -> str:
    """Rounds since the roster were decided by few."""
    return (
        f"{shown.shrunken} of the {shown.rosters} rounds since the roster of your join line were decided by fewer than "
        "half of their judges, as rounds before had ended empty. So it is after an outage, and so it would be in a "
        "history that one judge made up: ask somebody else in the run whether theirs is the same (swarmnode id --join)"
    )


def _listed(doubts: Mapping[PeerId, Exception]) -> str:
    return "\n".join(f"  {peer}: {doubt}" for peer, doubt in doubts.items())
