"""Nodes of the open swarm without one of their defences: the product, of which one part is replaced for a while.

    with NO_DEADLINES.taken_out():
        …                     all nodes of this process wait for whoever is lacking, however long that takes

Each is as small as it can be and still be that node; nothing in the product knows of them. Which of them stands beside
an attack is said by the adversary (`lacks`), so that the page shows what the attack does where nobody stops it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from swarmnode.protocols.chain import duty, statements
from swarmnode.protocols.chain import rules as chain_rules
from swarmnode.protocols.chain.duty import Action, RoundView, Write
from swarmnode.protocols.chain.forks import Tree
from swarmnode.protocols.chain.state import ChainRules, ChainState
from swarmnode.protocols.chain.statements import ACCEPTED, FULL_STANDING, JUDGED, PREFIX, Score
from swarmnode.protocols.methods.known import agreement
from swarmnode.protocols.methods.open import round as open_round
from swarmnode.protocols.methods.open import sync as open_sync
from swarmnode.protocols.methods.open.judge import Evaluator
from swarmnode.protocols.methods.open.method import Open
from swarmnode.protocols.methods.open.round import OpenRounds, Signer
from swarmnode.protocols.methods.open.store import Contribution, Contributions
from swarmnode.protocols.methods.open.sync import ChainSync
from swarmnode.protocols.methods.open.timeouts import Timeouts
from swarmnode.protocols.state.backend import StateBackend
from swarmnode.protocols.state.membership import DuplicateIdentity
from swarmnode.training.codecs import CodecError

ANY_SIZE = 1 << 30  # bytes
SOME_GAIN = 1000


@dataclass(frozen=True)
class Lacking:
    """What is not there, and what stands in its place: owner, name, replacement."""

    told: str  # in the table
    parts: tuple[tuple[Any, str, Any], ...]

    def beside(self, found: object | None) -> str:
        """What the table says of nodes without it; None where that was not tried."""
        return f"{self.told}: {found if found is not None else 'as with fewer nodes, above'}"

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """While it lasts, no node of this process has the defence."""
        with ExitStack() as stack:
            for owner, name, instead in self.parts:
                stack.enter_context(patch.object(owner, name, instead))
            yield


# --- who is lacking is waited for -----------------------------------------------------------------------------------


async def _wait_for_all(
    self: Timeouts, phase: str, lacking: Callable[[], set[str]], *, since: float | None = None, until: float = 0.0
) -> None:
    await self._store.until(lambda: not lacking())


NO_DEADLINES = Lacking(
    "no deadlines",
    (
        (Timeouts, "_wait_for", _wait_for_all),
        (Timeouts, "_patience", lambda self, phase: float("inf")),
        (Timeouts, "_is_there", lambda self, peer: True),
    ),
)

# --- leaders ----------------------------------------------------------------------------------------------------------


def _first_seen(view: RoundView, tree: Tree, heads: object, locked: object) -> bytes:
    """The roster of the round that came first, whatever others follow."""
    after = [block.id for block in tree._blocks.values() if block.parent == view.chain.tip]
    over = view.timers.attempt >= len(view.log.leaders)
    return after[0] if after else chain_rules.empty_id(view.chain) if over else view.chain.tip


FIRST_SEEN = Lacking(
    "the first roster seen is taken, others' heads are not asked",
    (
        (open_round, "follow", _first_seen),
        (Timeouts, "is_settled", lambda self, turn, wanted, nursery: True),
        (ChainSync, "_consider_out_of_sync", lambda self: None),
    ),
)

ANY_QUORUM = Lacking(
    "a roster may leave out judges who were heard",
    ((RoundView, "omitting", lambda self: frozenset()),),
)

BELIEVED_LEADER = Lacking(
    "rosters are not checked",
    ((open_sync, "check", lambda chain, rules, said, quoted, **more: chain_rules.derive(chain, rules, quoted)),),
)


def _one_wants_it(chain: ChainState, rules: ChainRules, scores: Any) -> bool:
    return chain.undoable and any((said.what.undo or 0) > rules.revert_above for said in scores)


ONE_REVERTS = Lacking("one judge can undo a round", ((chain_rules, "_reverts", _one_wants_it),))


def _seed_of_commits(*given: Any) -> ChainState:
    """As `rules.advance`; the next seed is drawn from what was committed."""
    chain, _, roster, quoted, _ = given
    bindings = sorted(quoted.commits[entry.commit].what.binding for entry in roster.what.entries)
    return replace(chain_rules.advance(*given), seed=seed_of(chain.seed, bindings))


def seed_of(seed: bytes, bindings: list[bytes]) -> bytes:
    """The next seed, where it is drawn from what was committed in this round, ascending."""
    return hashlib.sha256(seed + b"".join(bindings)).digest()


SEED_OF_COMMITS = Lacking("the next leader is drawn from the commits", ((open_sync, "advance", _seed_of_commits),))

# --- contributions ----------------------------------------------------------------------------------------------------


def _hold_anything(self: Contributions, raw: bytes, round: int) -> Contribution:
    try:
        return _opened(self, raw, round)
    except CodecError:
        return Contribution(raw, 1.0, round)


async def _fetch_any_size(self: Contributions, peer: str, id: bytes, heard: Any) -> bytes:
    return bytes(await self._bulk.fetch(peer, self._key(id), max_size=ANY_SIZE, wait=1.0, progress=heard))


async def _praise(self: Evaluator, contributions: Mapping[bytes, Any], *given: Any, **more: Any) -> dict[bytes, Score]:
    return {id: Score(id[:PREFIX], JUDGED, SOME_GAIN, FULL_STANDING) for id in contributions}


_opened = Contributions._opened
UNCHECKED_BYTES = Lacking(
    "bytes are neither checked nor measured",
    (
        (Contributions, "_opened", _hold_anything),
        (Contributions, "_fetch_from", _fetch_any_size),
        (Evaluator, "measure", _praise),
    ),
)


def _of_nobody(run_id: str, round: int, author: str, parent: bytes, *opened: bytes) -> bytes:
    return _binding_of(run_id, round, "", parent, *opened)


_binding_of = statements.binding_of
UNBOUND = Lacking(
    "commits do not bind their author",
    ((statements, "binding_of", _of_nobody), (open_round, "binding_of", _of_nobody)),
)


def _reveal_at_once(view: RoundView, norms: Mapping[bytes, float]) -> tuple[Action, ...]:
    """As `duty.duties`; who has committed reveals."""
    actions = list(duty.duties(view, norms))
    if view.own.commit is not None and not view.own.revealed:
        actions = [*(action for action in actions if action is not Write.REVEAL), Write.REVEAL]
    return tuple(actions)


REVEALED_AT_ONCE = Lacking("work is revealed before judges cut", ((open_round, "duties", _reveal_at_once),))


def _one_judge(chain: ChainState, id: bytes, author: str, rows: Any) -> Any:
    given = [row.get(id[:PREFIX]) for row in rows.values()]
    gains = tuple(score.gain for score in given if score is not None and score.found == JUDGED)
    if gains:
        return chain_rules._Verdict(ACCEPTED, gains, FULL_STANDING)
    return _judge(chain, id, author, rows)


_judge = chain_rules._judge


async def _keep_own(self: Contributions, raw: bytes, round: int) -> bytes:
    id = await _keep(self, raw, round)
    vars(self).setdefault("own", set()).add(id)
    return id


def _serve_own(self: Contributions, id: bytes) -> None:
    if id in vars(self).get("own", ()):
        _serve(self, id)


_keep, _serve = Contributions.keep, Contributions.serve
ONE_JUDGES_WORD = Lacking(
    "one judge's word is enough, and only its author has a contribution",
    ((chain_rules, "_judge", _one_judge), (Contributions, "keep", _keep_own), (Contributions, "serve", _serve_own)),
)

BELIEVED_AUTHOR = Lacking(
    "what was committed counts unseen",
    ((chain_rules, "_judge", lambda *given: chain_rules._Verdict(ACCEPTED, (SOME_GAIN,), FULL_STANDING)),),
)

UNCAPPED = Lacking("claims are believed", ((agreement, "capped_weights", lambda samples, cap: dict(samples)),))

# --- identities -------------------------------------------------------------------------------------------------------


async def _sign_again(self: StateBackend, key: str, value: Any) -> Any:
    """As `StateBackend.write`, whatever was signed under this key before."""
    async with self._signing:
        return await self._write(key, value)


def _of_this_life(self: Signer, purpose: str, chain: ChainState) -> bytes:
    life = vars(self).setdefault("life", next(_lives))
    return hashlib.sha256(f"{life} {purpose} {chain.round}".encode() + chain.tip).digest()


_lives = itertools.count()
NO_MEMORY = Lacking(
    "nobody looks up what it said before",
    (
        (StateBackend, "write", _sign_again),
        (OpenRounds, "_recall", lambda self, context: None),
        (Signer, "derive", _of_this_life),
    ),
)
NEVER_SILENT = Lacking(
    "who finds nobody goes on as if its checkpoint were its last", ((Open, "_keep_silent", lambda self, begin: None),)
)
NO_TWINS = Lacking(
    "leases are not compared, and nobody looks up what it said before",
    (*NO_MEMORY.parts, (DuplicateIdentity, "saw", lambda self, lease: False)),
)
