"""Which rosters a leader may have made, and the chain after them: every field counts, and nothing outside it does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from chains import (
    RULES,
    STATE,
    after_rounds,
    block,
    chain_of,
    cut,
    fair,
    hashed,
    lead,
    offer,
    quote,
    say,
    start,
)

from swarmnode.crdt import encoding
from swarmnode.protocols.chain.forks import empty_block
from swarmnode.protocols.chain.rules import NORMS, InvalidRoster, advance, check, checks_seed
from swarmnode.protocols.chain.state import (
    MAX_ENCODED,
    REMEMBERED,
    ChainState,
    HashChain,
    Worked,
    decode,
    leaders,
    step,
)
from swarmnode.protocols.chain.statements import MAX_COMMITS, MAX_ROUND, Entry, Roster, Said

FIVE = start("ABCDE")
OFFERS = [offer(FIVE, "A"), offer(FIVE, "X")]
QUOTED = fair(FIVE, OFFERS)
ROSTER = lead(FIVE, RULES, QUOTED)


def refuses(roster: Said[Roster], quoted: Any = QUOTED, chain: ChainState = FIVE, state: bytes = STATE) -> str:
    with pytest.raises(InvalidRoster) as raised:
        check(chain, RULES, roster, quoted, state=state)
    return str(raised.value)


def test_what_an_honest_leader_makes_is_valid() -> None:
    for attempt in range(5):
        check(FIVE, RULES, lead(FIVE, RULES, QUOTED, attempt=attempt), QUOTED, state=STATE)


def test_every_field_counts() -> None:
    made = ROSTER.what
    entry = made.entries[0]
    wrong: dict[str, Any] = {
        "round": made.round + 1,
        "parent": hashed("other"),
        "attempt": made.attempt + 1,
        "preimage": hashed("made up"),
        "cuts": made.cuts[1:],
        "scores": made.scores[1:],
        "entries": (replace(entry, weight=entry.weight + 1), *made.entries[1:]),
        "total": made.total - 1,
        "revert": True,
        "window": made.window + 1,
        "state": hashed("other"),
        "chain": hashed("other"),
    }
    assert set(wrong) == {one.name for one in fields(Roster)}, "a field of rosters has no case here"
    for name, value in wrong.items():
        refuses(say(ROSTER.author, replace(made, **{name: value})))


@pytest.mark.parametrize("change", [{"verdict": 3}, {"clip": 5}, {"weight": 1 << 40}])
def test_wrong_weights_clip_factors_and_verdicts_are_refused(change: dict[str, int]) -> None:
    entries = (replace(ROSTER.what.entries[0], **change), *ROSTER.what.entries[1:])
    refuses(say(ROSTER.author, replace(ROSTER.what, entries=entries)))


def test_a_commit_that_is_left_out_or_made_up_is_noticed() -> None:
    made = ROSTER.what
    refuses(say(ROSTER.author, replace(made, entries=made.entries[1:])))
    more = tuple(sorted((*made.entries, Entry(hashed("made up"), 1, 0, 0)), key=lambda one: one.commit))
    refuses(say(ROSTER.author, replace(made, entries=more)))


def test_only_the_leader_of_the_attempt_leads() -> None:
    for author in {"A", "B", "C", "D", "E", "X"} - {leaders(FIVE)[0]}:
        refuses(say(author, ROSTER.what))


def test_quotes_are_of_a_majority_of_different_judges_in_this_round() -> None:
    def made_of(cuts: list[Any], scored: list[Any]) -> str:
        quoted = quote(cuts, scored, OFFERS)
        return refuses(lead(FIVE, RULES, quoted), quoted)

    cuts, scored = list(QUOTED.cuts), list(QUOTED.scores)
    assert "at least 3" in made_of(cuts[:2], scored[:2])
    assert "at least 3" in made_of(cuts, scored[:2])
    stranger = cut(FIVE, "X", [])
    assert "different judges" in made_of([*cuts, stranger], scored)
    twice = cut(FIVE, cuts[0].author, [])
    assert "different judges" in made_of([*cuts, twice], scored)
    later = replace(FIVE, round=1)
    old = say(cuts[0].author, replace(cuts[0].what, round=later.round))
    assert "another round" in made_of([old, *cuts[1:]], scored)


def test_a_score_without_the_cut_that_fixed_its_nonce_does_not_count() -> None:
    """So a judge cannot choose the batch on which it measures after it saw what was revealed."""
    cuts, scored = list(QUOTED.cuts), list(QUOTED.scores)
    without = quote([one for one in cuts if one.author != scored[0].author], scored, OFFERS)
    assert "nonce" in refuses(lead(FIVE, RULES, without), without)
    other = say(scored[0].author, replace(scored[0].what, nonce=hashed("better")))
    ground = quote(cuts, [other, *scored[1:]], OFFERS)
    assert "nonce" in refuses(lead(FIVE, RULES, ground), ground)


def test_a_leader_that_registered_a_hash_chain_has_no_choice_of_seed() -> None:
    chain = after_rounds(FIVE, RULES, 1, "ABCDE")
    quoted = fair(chain, [])
    leader = leaders(chain)[0]
    check(chain, RULES, lead(chain, RULES, quoted), quoted, state=STATE)
    assert "withholds" in refuses(lead(chain, RULES, quoted, preimage=b""), quoted, chain)
    second = chain_of(leader).preimage(chain_of(leader).preimage(chain.anchors[leader]))
    assert "next one" in refuses(lead(chain, RULES, quoted, preimage=second), quoted, chain)
    three = after_rounds(start("ABC"), RULES, 1, "ABC")
    few = fair(three, [])
    check(three, RULES, lead(three, RULES, few, preimage=b""), few, state=STATE)


def test_two_leaders_of_one_attempt_cannot_be() -> None:
    order = leaders(FIVE)
    assert len(set(order)) == len(order) == 5


def test_seeds_depend_on_every_preimage_and_are_those_of_the_chain() -> None:
    chain = after_rounds(FIVE, RULES, 1, "ABCDE")
    quoted = fair(chain, [])
    by_attempt = {block(chain, RULES, quoted, attempt=a).chain.seed for a in range(5)}
    assert len(by_attempt | {empty_block(chain).chain.seed, chain.seed}) == 7
    after = block(chain, RULES, quoted).chain
    leader = leaders(chain)[0]
    assert step(after.anchors[leader]) == chain.anchors[leader]


def test_what_draws_checks_is_known_to_no_leader_alone() -> None:
    leader, other, *rest = leaders(FIVE)

    def drawn(**nonces: bytes) -> bytes:
        said = [
            replace(one, what=replace(one.what, nonce=nonces.get(one.author, one.what.nonce))) for one in QUOTED.scores
        ]
        return checks_seed(FIVE, b"after", leader, said)

    assert drawn() == drawn(**{leader: bytes(32)}), "its own nonce is the leader's to choose"
    assert drawn() == drawn(**dict.fromkeys(rest, bytes(32)))
    assert drawn() != drawn(**{other: bytes(32)})
    assert drawn() != checks_seed(FIVE, b"another", leader, QUOTED.scores)


def test_the_chain_after_a_roster_does_not_depend_on_what_else_is_held() -> None:
    more = fair(FIVE, [*OFFERS, offer(FIVE, "Y")])
    spare = replace(QUOTED, commits=more.commits, reveals=more.reveals, norms=more.norms)
    came_to = check(FIVE, RULES, ROSTER, spare, state=STATE)
    assert came_to == check(FIVE, RULES, ROSTER, QUOTED, state=STATE)
    assert advance(FIVE, RULES, ROSTER, spare, came_to) == advance(FIVE, RULES, ROSTER, QUOTED, came_to)


def test_work_of_a_roster_that_is_undone_earned_nobody_anything() -> None:
    after = block(FIVE, RULES, QUOTED).chain
    assert after.undoable and after.history[-1]
    undone = block(after, RULES, fair(after, [], undo=1 << 30))
    assert undone.roster is not None and undone.roster.revert
    assert undone.chain.history == ((),) and undone.chain.reverted == after.round and not undone.chain.undoable


def test_a_quorum_that_shrank_stays_so_until_a_majority_is_quoted_again() -> None:
    chain = FIVE
    for _ in range(3):
        chain = empty_block(chain).chain
    few = block(chain, RULES, fair(chain, [], silent="ABCD")).chain
    assert few.empties == 3
    assert block(few, RULES, fair(few, [], silent="AB")).chain.empties == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tip", {}),
        ("round", "3"),
        ("round", -1),
        ("round", MAX_ROUND + 1),
        ("window", True),
        ("seats", 1 << 60),
        ("validators", ()),
        ("validators", (1,)),
        ("history", 5),
        ("history", (("AB",),)),
        ("history", ((("A", b"5"),),)),
        ("anchors", {"A": 5}),
        ("silent", ()),
        ("norms", ("1",)),
        ("undoable", 1),
        ("norms", (1e308,) * 4),
        ("norms", (-1.0,)),
        ("tip", b"short"),
        ("anchors", {"A": b"short"}),
        ("silent", {"A": -1}),
        ("expelled", {"B": 1 << 60}),
        ("reverted", -2),
        ("history", ((("A", -5),),)),
        ("validators", ("B", "A")),
        ("validators", ("A", "A")),
        ("validators", ("A" * 129,)),
        ("expelled", {"B" * (MAX_ENCODED // 2): 1}),  # it would grow beyond what a state may have
    ],
)
def test_bytes_with_a_field_of_another_type_or_out_of_bounds_are_no_chain_state(name: str, value: Any) -> None:
    told: Any = encoding.decode(FIVE.encode(), max_size=MAX_ENCODED)
    with pytest.raises(ValueError, match="no chain state"):
        decode(encoding.encode({**told, name: value}, max_size=MAX_ENCODED))


def test_a_chain_state_is_read_back_from_its_bytes_and_its_digest_tells_it_from_any_other() -> None:
    chain = after_rounds(FIVE, RULES, 20, "ABCDEXY")
    assert len(chain.norms) == NORMS
    assert decode(chain.encode()) == chain
    other: dict[str, Any] = {
        "run_id": "cd" * 32,
        "round": 1,
        "tip": hashed(1),
        "seed": hashed(2),
        "cohort": hashed(3),
        "validators": ("A",),
        "genesis": ("A",),
        "made": 3,
        "history": (),
        "anchors": {},
        "participation": 1,
        "empties": 1,
        "reverted": 0,
        "undoable": not chain.undoable,
        "window": 1,
        "norms": (1.0, 0.5),
        "seats": 9,
        "silent": {"A": 1},
        "expelled": {"B": 1},
    }
    assert set(other) == set(ChainState.__dataclass_fields__)
    digests = {replace(chain, **{name: value}).digest for name, value in other.items()}
    assert len(digests | {chain.digest}) == len(other) + 1


@pytest.mark.parametrize("raw", [b"", b"\x80", b"\xc0", b"\x01", b"\x81\xa3run\x01"])
def test_other_bytes_are_no_chain_state(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode(raw)


def test_the_largest_chain_state_has_room() -> None:
    """22 rosters of authors who are all different and have the longest names."""
    names = [f"{i:04d}".replace("0", "a") + "Q" * 124 for i in range(MAX_COMMITS * REMEMBERED)]
    worked = tuple(
        tuple(Worked(name, 1000) for name in names[i : i + MAX_COMMITS]) for i in range(0, len(names), MAX_COMMITS)
    )
    chain = replace(FIVE, history=worked, anchors={name: bytes(32) for name in names})
    assert len(chain.encode()) < MAX_ENCODED


def test_preimages_lead_from_the_anchor_to_the_secret_and_no_further() -> None:
    beacon = HashChain(b"secret")
    value, count = beacon.anchor, 0
    while before := beacon.preimage(value):
        assert step(before) == value
        value, count = before, count + 1
        if count == 300:
            break
    assert count == 300
    assert beacon.preimage(hashed("foreign")) == b""
    assert HashChain(b"secret").anchor == beacon.anchor != HashChain(b"other").anchor
