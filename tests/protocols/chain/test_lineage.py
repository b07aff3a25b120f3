"""A newcomer that trusts one roster folds the history since from anybody's records, and notices what was made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chains import RULES, after_rounds, fair, lead, offer, say, start
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.chain.forks import (
    Block,
    TrustedRoster,
    empty_block,
    is_shrunken,
    leads_to,
    light_after,
    settled,
    trusted_chain,
)
from swarmnode.protocols.chain.rules import InvalidRoster, Quoted, advance, derive
from swarmnode.protocols.chain.state import ChainState
from swarmnode.protocols.chain.statements import Roster, Said

FIVE = after_rounds(start("ABCDE"), RULES, 4, "ABCDEX")


def rounds(chain: ChainState, count: int) -> list[tuple[ChainState, Said[Roster], Quoted]]:
    """Honest rounds: the chain before, the roster and what it quotes."""
    made = []
    for _ in range(count):
        quoted = fair(chain, [offer(chain, author, norm=1.5) for author in "ABCDEX"])
        roster = lead(chain, RULES, quoted)
        made.append((chain, roster, quoted))
        chain = advance(chain, RULES, roster, quoted, derive(chain, RULES, quoted))
    return made


HISTORY = rounds(FIVE, 20)
TRUSTED = TrustedRoster(FIVE.round, HISTORY[0][1].id)


def test_the_history_since_a_trusted_roster_leads_to_where_members_stand() -> None:
    """Through a change of validators, without the bytes of any contribution."""
    chain = trusted_chain(TRUSTED, HISTORY[0][1], FIVE.encode())
    for before, roster, quoted in HISTORY:
        assert leads_to(chain, before)
        chain = light_after(chain, RULES, roster, replace(quoted, norms={}))
    assert "X" in chain.validators and "X" not in FIVE.validators


@given(st.integers(0, 10**8 - 1), st.binary(min_size=32, max_size=32))
def test_a_trusted_roster_is_read_back_from_its_text(round: int, id: bytes) -> None:
    assert TrustedRoster.parse(str(TrustedRoster(round, id))) == TrustedRoster(round, id)


@pytest.mark.parametrize(
    "text",
    ["", "5", "5:", ":" + "ab" * 32, "-1:" + "ab" * 32, "5:" + "ab" * 31, "5:" + "zz" * 32, "5:" + "ab " * 20 + "abab"],
)
def test_what_is_no_roster_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        TrustedRoster.parse(text)


def test_another_chain_before_the_trusted_roster_is_refused() -> None:
    made_up = replace(FIVE, validators=("L",))
    for raw in (made_up.encode(), b"nothing"):
        with pytest.raises(InvalidRoster):
            trusted_chain(TRUSTED, HISTORY[0][1], raw)


def test_another_roster_than_the_trusted_one_is_refused() -> None:
    with pytest.raises(InvalidRoster):
        trusted_chain(TRUSTED, HISTORY[1][1], HISTORY[1][0].encode())


def test_a_roster_by_liars_on_top_of_the_trusted_one_is_refused() -> None:
    chain = trusted_chain(TRUSTED, HISTORY[0][1], FIVE.encode())
    _, _, quoted = HISTORY[0]
    few = fair(FIVE, [offer(FIVE, "L")], silent="ABC")  # two of five judges
    for signed_by, what in (("L", quoted), (HISTORY[0][1].author, few)):
        roster = say(signed_by, replace(HISTORY[0][1].what, cuts=tuple(sorted(cut.id for cut in what.cuts))))
        with pytest.raises(InvalidRoster):
            light_after(chain, RULES, roster, what)


def test_a_roster_that_accepts_what_its_quotes_do_not_is_refused() -> None:
    chain = trusted_chain(TRUSTED, HISTORY[0][1], FIVE.encode())
    _, roster, quoted = HISTORY[0]
    entries = tuple(replace(entry, weight=entry.weight * 2) for entry in roster.what.entries)
    forged = say(roster.author, replace(roster.what, entries=entries))
    with pytest.raises(InvalidRoster):
        light_after(chain, RULES, forged, quoted)


def test_rounds_that_few_judges_may_decide_are_told_apart() -> None:
    chain = FIVE
    assert not is_shrunken(chain)
    for _ in range(3):
        chain = empty_block(chain).chain
    assert is_shrunken(chain)


def test_join_strings_name_the_newest_roster_with_enough_rounds_on_it() -> None:
    path = [
        Block(roster.id, before.tip, advance(before, RULES, roster, quoted, derive(before, RULES, quoted)), roster.what)
        for before, roster, quoted in HISTORY[:6]
    ]
    assert settled(path, 4) == TrustedRoster(FIVE.round + 1, path[1].id)
    assert settled(path[:4], 4) is None
    path.append(empty_block(path[-1].chain))
    assert settled(path, 0) == TrustedRoster(FIVE.round + 5, path[5].id)
