"""Whether a history goes back to a roster that a newcomer trusts: rosters on rosters, each by enough of its validators.

A newcomer without such a roster believes whom it reaches. One whose join string names a recent roster takes the
`ChainState` before it from anybody, as the roster has its digest, and folds what follows:

    chain = begin(trusted, said, state)          the roster with the trusted id, and the state before it
    chain = after(chain, rules, roster, quoted)  or `advance_empty`; until the chain that a member gives as its base

That checks all that does not rest on the bytes of contributions: who leads, which judges cut and scored, that there are
enough of them, which work counts, who is a validator next. What does rest on bytes, clip factors and state hashes, is
left to the rosters that are replayed in full afterwards, as the history of norms is (`ChainState.norms` is empty here).

What it proves: that more than half of the validators took part in each round, but for `shrunken` ones, where several
empty rounds before let fewer decide. A newcomer that sees only one validator's forgery sees such rounds.
"""

from __future__ import annotations

from dataclasses import replace

from swarmnode.protocols.chain.forks import TrustedRoster
from swarmnode.protocols.chain.rules import InvalidRoster, Quoted, advance, check_derived, check_quotes, derive
from swarmnode.protocols.chain.state import ChainRules, ChainState, decode, majority, quorum
from swarmnode.protocols.chain.statements import Roster, Said


def begin(trusted: TrustedRoster, said: Said[Roster], state: bytes) -> ChainState:
    """The chain before a trusted roster, from its bytes by anybody. Raises InvalidRoster where it is not that one."""
    if said.id != trusted.id or said.what.round != trusted.round:
        raise InvalidRoster("another roster than the trusted one")
    try:
        chain = decode(state)
    except ValueError as error:
        raise InvalidRoster(str(error)) from None
    if chain.digest != said.what.chain or chain.tip != said.what.parent:
        raise InvalidRoster("another history before the trusted roster than it has the digest of")
    return _light(chain)


def after(chain: ChainState, rules: ChainRules, roster: Said[Roster], quoted: Quoted) -> ChainState:
    """The chain after a roster, without its norms. Raises InvalidRoster, or NotHeld."""
    check_quotes(chain, rules, roster, quoted)
    unmeasured = replace(quoted, norms=dict.fromkeys(quoted.commits, 1.0))
    derived = derive(chain, rules, unmeasured)
    told, found = (tuple(replace(entry, clip=0) for entry in one.entries) for one in (roster.what, derived))
    check_derived(replace(roster.what, entries=told), replace(derived, entries=found))
    return _light(advance(chain, rules, roster, unmeasured, derived))


def shrunken(chain: ChainState, rules: ChainRules) -> bool:
    """Whether fewer than half of the judges may decide this round, as several rounds before it ended empty."""
    return quorum(chain, rules) < majority(chain, rules)


def leads_to(chain: ChainState, other: ChainState) -> bool:
    """Whether this is the chain of a member, but for the norms, which only bytes of contributions tell."""
    return chain == _light(other)


def _light(chain: ChainState) -> ChainState:
    return replace(chain, norms=())
