"""What an honest node does next: waits end with a quorum, nothing is said twice, and leaders are fair."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Set
from dataclasses import replace
from typing import Any

import pytest
from chains import RULES, STATE, block, cut, fair, hashed, lead, offer, row, say, scores, start
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.chain.duty import (
    MAX_AUTHORS,
    NAMED,
    Judge,
    Own,
    RoundLog,
    RoundView,
    Timers,
    Write,
    WriteAvailabilityVote,
    WriteRoster,
    WriteSeal,
    commits_to_cut,
    duties,
    follow,
)
from swarmnode.protocols.chain.forks import Block, Tree, empty_block
from swarmnode.protocols.chain.rules import check, compose
from swarmnode.protocols.chain.state import leaders
from swarmnode.protocols.chain.statements import MAX_COMMITS, Said, Seal, nonce_hash

CHAIN = start("ABCDE")
LEADER = leaders(CHAIN)[0]
OTHER = next(peer for peer in CHAIN.validators if peer != LEADER)
X, Y = offer(CHAIN, "X"), offer(CHAIN, "Y")
BOTH = fair(CHAIN, [X, Y])
COMMITS = {one.id: one.commit for one in (X, Y)}
REVEALS = [say(one.commit.author, one.reveal) for one in (X, Y)]
SEALS = [say(said.author, Seal(CHAIN.round, CHAIN.tip, said.what.seal)) for said in BOTH.scores]
JUDGED = {one.id: row(one.id, 5) for one in (X, Y)}
CUT = cut(CHAIN, OTHER, COMMITS).what


def log_of(*said: Said[Any]) -> RoundLog:
    """The log of a round in which this was said."""
    log = RoundLog(CHAIN, RULES)
    for one in said:
        log.insert(one, b"", 0.0)
    return log


def does(*said: Said[Any], norms: Any = BOTH.norms, **view: Any) -> tuple[Any, ...]:
    """What a node does where this was said."""
    return duties(RoundView(**{"me": OTHER, "log": log_of(*said), **view}), norms)


def test_an_author_commits_once_and_not_when_a_quorum_has_cut() -> None:
    assert does(me="X", ready=True) == (Write.COMMIT,)
    assert does(*BOTH.cuts[:2], me="X", ready=True) == (Write.COMMIT,)
    assert does(*BOTH.cuts[:3], me="X", ready=True) == ()
    assert does(me="X", ready=True, own=Own(commit=X.commit)) == ()


def test_an_author_reveals_when_a_quorum_has_cut_and_one_lists_it() -> None:
    mine = Own(commit=X.commit)
    assert does(*BOTH.cuts[:2], me="X", own=mine) == ()
    assert does(*BOTH.cuts[:3], me="X", own=mine) == (Write.REVEAL,)
    assert does(*BOTH.cuts, me="X", own=replace(mine, revealed=True)) == ()
    without = tuple(cut(CHAIN, judge, [Y.id]) for judge in "ABC")
    assert does(*without, me="X", own=mine) == ()


def test_a_judge_cuts_when_its_wait_is_over_or_when_what_comes_may_be_a_copy() -> None:
    listed = WriteAvailabilityVote(tuple(sorted(COMMITS)))
    assert does(*COMMITS.values()) == ()
    assert does(*COMMITS.values(), timers=Timers(commits=True)) == (listed,)
    assert does(*COMMITS.values(), *BOTH.cuts[:3]) == (listed,)
    assert does(*COMMITS.values(), *REVEALS) == (), "whoever opens its own at once would end every round's wait"
    assert does(*COMMITS.values(), me="X", timers=Timers(commits=True)) == ()


def test_a_judge_measures_together_what_was_opened_and_seals_when_it_has_all_or_waited() -> None:
    own = Own(cut=CUT)
    here, both = (*COMMITS.values(), *BOTH.cuts), tuple(sorted(COMMITS))
    assert does(*here, own=own, norms={}) == ()
    assert does(*here, REVEALS[0], own=own, norms={}) == (Judge((X.id,), complete=False),), "to be fetched"
    assert does(*here, *REVEALS, own=own) == (Judge(both, complete=True),)
    (sealed,) = does(*here, *REVEALS, own=own, judged=JUDGED)
    assert isinstance(sealed, WriteSeal) and {one.commit for one in sealed.scores} == {id[:16] for id in COMMITS}
    late = {"own": own, "norms": {X.id: 1.0}, "timers": Timers(contributions=True)}
    assert does(*here, REVEALS[0], **late) == (Judge(both, complete=True),), "what is not here is missing"
    few = (*COMMITS.values(), *BOTH.cuts[:2])
    assert does(*few, own=own, judged=JUDGED, timers=Timers(contributions=True)) == ()


def test_what_one_cut_alone_names_is_not_measured_with_the_rest() -> None:
    """It is in no roster, and would move the point at which all contributions are measured."""
    liar = next(said.author for said in BOTH.cuts if said.author != OTHER)
    more = [offer(CHAIN, liar, salt=bytes([number]) * 16) for number in range(2)]
    cuts = [said for said in BOTH.cuts if said.author != liar]
    cuts.append(cut(CHAIN, liar, [*COMMITS, *(one.id for one in more)]))
    opened = [say(liar, one.reveal) for one in more]
    here = (*COMMITS.values(), *(one.commit for one in more), *cuts, *REVEALS, *opened)
    norms = {**BOTH.norms, **dict.fromkeys((one.id for one in more), 1.0)}
    assert does(*here, own=Own(cut=CUT), norms=norms) == (Judge(tuple(sorted(COMMITS)), complete=True),)


def test_a_judge_opens_only_when_a_quorum_has_sealed() -> None:
    sealed = next(said.what for said in BOTH.scores if said.author == OTHER)
    own = Own(cut=CUT, sealed=sealed)
    strangers = [say(name, Seal(CHAIN.round, CHAIN.tip, bytes(32))) for name in "XY"]
    assert does(*BOTH.cuts, *SEALS[:2], own=own) == ()
    assert does(*BOTH.cuts, *SEALS[:2], *strangers, own=own) == ()
    assert does(*BOTH.cuts, *SEALS[:3], own=own) == (Write.SCORES,)


HERE = (*COMMITS.values(), *BOTH.cuts, *REVEALS, *SEALS)
LEADING: dict[str, Any] = {"me": LEADER, "own": Own(cut=CUT, sealed=BOTH.scores[0].what, opened=True)}


def test_the_leader_of_the_attempt_leads_once_it_has_all_or_waited_and_only_it() -> None:
    (made,) = does(*HERE, *BOTH.scores, **LEADING)
    assert isinstance(made, WriteRoster) and made.attempt == 0
    roster = compose(CHAIN, made.quoted, made.derived, attempt=0, preimage=b"", state=STATE)
    said = lead(CHAIN, RULES, made.quoted)
    assert said.what == roster
    assert check(CHAIN, RULES, said, made.quoted, state=STATE) == made.derived
    assert does(*HERE, *BOTH.scores[:3], **LEADING) == ()
    assert isinstance(does(*HERE, *BOTH.scores[:3], **LEADING, timers=Timers(scores=True))[0], WriteRoster)
    assert does(*HERE, *BOTH.scores[:2], **LEADING, timers=Timers(scores=True)) == ()
    assert does(*HERE, *BOTH.scores, **LEADING, timers=Timers(attempt=1)) == ()
    has_led = {**LEADING, "own": replace(LEADING["own"], led=frozenset({0}))}
    assert does(*HERE, *BOTH.scores, **has_led) == ()
    assert does(*HERE, *BOTH.scores, **{**LEADING, "me": OTHER}) == ()


def test_a_leader_gets_what_it_lacks_first() -> None:
    assert does(*HERE, *BOTH.scores, norms={}, **LEADING) == (Write.FETCH,)


def test_a_leader_quotes_nothing_that_it_cannot_show_to_others() -> None:
    """A cut that lists what nobody has would make a roster that nobody can check."""
    bogus = cut(CHAIN, "A", [*COMMITS, hashed("nowhere")])
    rest = (*COMMITS.values(), *REVEALS)
    quoted = log_of(*rest, *SEALS, bogus, *BOTH.cuts[1:], *BOTH.scores).quotable(BOTH.norms)
    assert "A" not in {said.author for said in (*quoted.cuts, *quoted.scores)}
    unsealed = log_of(*rest, *BOTH.cuts, *BOTH.scores).quotable(BOTH.norms)
    assert unsealed.scores == () and len(unsealed.cuts) == 5
    other = scores(CHAIN, "A", [row(X.id, -9)])
    liar = log_of(*HERE, other, *BOTH.scores[1:]).quotable(BOTH.norms)
    assert other.id not in {said.id for said in liar.scores}, "what was opened is not what was sealed"


def test_of_two_cuts_of_one_judge_the_one_that_its_scores_belong_to_is_quoted() -> None:
    second = replace(BOTH.cuts[0].what, nonce_hash=hashed("ground"))
    twin = replace(BOTH.cuts[0], id=bytes(32), what=second)
    for cuts in ((twin, *BOTH.cuts), (*BOTH.cuts, twin)):
        quoted = log_of(*COMMITS.values(), *REVEALS, *SEALS, *cuts, *BOTH.scores).quotable(BOTH.norms)
        assert BOTH.cuts[0] in quoted.cuts and twin not in quoted.cuts and len(quoted.scores) == 5


def test_all_judges_leave_out_the_same_and_no_validator_where_too_many_commit() -> None:
    many = [offer(CHAIN, f"X{i}").commit for i in range(2 * MAX_COMMITS)]
    validator = offer(CHAIN, "A").commit
    listed = commits_to_cut(CHAIN, [*many, validator])
    assert listed == commits_to_cut(CHAIN, [validator, *reversed(many)])
    assert len(listed) == MAX_COMMITS and validator.id in listed


def test_the_log_of_a_round_takes_nothing_of_another_round_nor_of_who_takes_no_part() -> None:
    foreign, validator = offer(replace(CHAIN, round=7), "X").commit, offer(CHAIN, "A").commit
    assert not RoundLog(CHAIN, RULES).insert(foreign, b"", 0.0)
    few = RoundLog(replace(CHAIN, participation=1), RULES)
    assert not few.insert(X.commit, b"", 0.0) and few.insert(validator, b"", 0.0)


def test_what_cuts_and_rosters_name_is_taken_whoever_was_heard_first() -> None:
    said = [offer(CHAIN, "X", salt=bytes([number] * 16)).commit for number in range(3)]
    log = log_of(*said)
    assert len(log.commits) == 2 and commits_to_cut(CHAIN, log.commits.values()) == ()
    vote = cut(CHAIN, "A", [said[2].id])
    assert log.insert(vote, b"", 0.0) and log.lacking(vote.what) == [said[2].id]
    assert not log.insert(said[2], b"", 0.0) and log.insert(said[2], b"record", 0.0, namer="A")
    assert log.lacking(vote.what) == [] and vote in log.quotable({}).cuts
    assert b"record" in log.records_of(vote.id)


def test_who_names_much_takes_no_room_from_what_others_name() -> None:
    said = [offer(CHAIN, "X", salt=bytes([number] * 16)).commit for number in range(2 * NAMED + 3)]
    log = log_of(*said[:2])
    taken = [log.insert(one, b"", 0.0, namer="A") for one in said[2:]]
    assert sum(taken) == NAMED and not taken[-1]
    assert log.insert(said[-1], b"", 0.0, namer="B")


def test_a_judge_that_cuts_again_and_again_counts_once() -> None:
    log = log_of(*COMMITS.values(), *BOTH.cuts)
    for number in range(33):
        junk = [hashed("junk", place) for place in range(MAX_COMMITS)]
        nonce = nonce_hash(hashed("nonce", number))
        log.insert(say("A", replace(cut(CHAIN, "A", junk).what, nonce_hash=nonce)), b"", 0.0, namer="A")
    assert sum(one.author == "A" for one in log.cuts.values()) > 5
    assert set(log.listed()) == set(COMMITS), "nor is what it alone names measured"


def test_reveals_of_commits_that_are_not_here_are_bounded() -> None:
    log = RoundLog(CHAIN, RULES)
    for number in range(2 * MAX_AUTHORS):
        made = offer(CHAIN, "X", salt=number.to_bytes(16, "big"))
        log.insert(say("X", made.reveal), b"", 0.0)
    assert len(log._loose) == MAX_AUTHORS


# --- following --------------------------------------------------------------------------------------------------------


SILENT: dict[tuple[bytes, tuple[str, ...]], RoundLog] = {}  # by tip and validators: rounds in which nothing was said


def grown(*attempts: int) -> tuple[Tree, list[bytes]]:
    tree = Tree(CHAIN)
    made = [block(CHAIN, RULES, BOTH, attempt=attempt) for attempt in attempts]
    for one in made:
        tree.add(one)
    return tree, [one.id for one in made]


def go(
    tree: Tree,
    heads: dict[str, bytes],
    *,
    me: str = "A",
    tip: bytes = CHAIN.tip,
    attempt: int = 0,
    omitting: Set[bytes] = frozenset(),
    waited: bool = False,
    locked: dict[str, bytes] | None = None,
    unlocked: bool = False,
) -> bytes:
    chain = tree[tip].chain
    key = tip, chain.validators
    if key not in SILENT:
        SILENT[key] = RoundLog(chain, RULES)
    log = SILENT[key]
    view = RoundView(me, log, timers=Timers(attempt=attempt, heads=waited, locks=unlocked))
    view.omitting = lambda: frozenset(omitting)  # type: ignore[method-assign]
    return follow(view, tree, heads, locked or {})


def test_a_validator_moves_first_to_the_roster_of_the_earliest_attempt_that_has_begun() -> None:
    tree, (third, second) = grown(2, 1)
    assert go(tree, {}) == CHAIN.tip
    assert go(tree, {}, attempt=1) == second
    assert go(tree, {}, attempt=2) == second
    assert go(tree, {}, me="X", attempt=2) == CHAIN.tip, "who is no validator follows heads"
    assert third in tree


def test_the_last_leader_cannot_be_the_first_unless_most_validators_follow_it() -> None:
    tree, (early,) = grown(4)
    assert go(tree, {"D": early, "E": early}) == CHAIN.tip
    assert go(tree, {"C": early, "D": early, "E": early}) == early
    assert go(tree, {"E": early}, attempt=4) == early
    assert go(tree, {"E": early}, me="X") == early


def test_who_leaves_out_judges_that_were_heard_is_not_followed_unless_most_validators_do() -> None:
    tree, (few, later) = grown(0, 1)
    assert go(tree, {}, attempt=0, omitting={few}) == CHAIN.tip
    assert go(tree, {"D": few, "E": few}, attempt=1, omitting={few}) == later
    assert go(tree, {"C": few, "D": few, "E": few}, omitting={few}) == few, "others did not hear them"
    assert go(tree, {}, attempt=5, omitting={few, later}) == empty_block(CHAIN).id
    assert go(tree, {"D": few, "E": few, "C": later}, attempt=1, omitting={few}, waited=True) == few, "or two rosters"
    assert go(tree, {"E": few, "C": later}, attempt=1, omitting={few}, waited=True) == later, "a third may be liars"


def test_a_vote_that_was_given_is_not_taken_back_where_a_restarted_node_heard_less_than_before() -> None:
    tree, (late, first) = grown(1, 0)
    assert go(tree, {"A": late}, attempt=0) == late
    assert go(tree, {"A": first}, attempt=0, omitting={first}) == first
    assert go(tree, {"B": late}, attempt=0) == first, "another's vote is no reason"


def test_who_follows_a_roster_that_is_not_followed_here_stands_behind_what_it_builds_on() -> None:
    """Else one head under an old sibling was as much as all others, and who did not follow theirs went back to it."""
    tree, ids = grown(0, 1)
    one, sibling = max(ids), min(ids)  # at a tie the lower id is followed
    chain = tree[one].chain
    later = block(chain, RULES, fair(chain, [offer(chain, "X")]), attempt=1)
    tree.add(later)
    heads = {"A": one, "B": later.id, "C": later.id, "E": sibling}
    assert go(tree, heads, tip=one) == go(tree, heads, tip=one, attempt=1, omitting={later.id}) == one
    assert go(tree, heads, tip=one, attempt=1) == later.id


def test_a_head_is_moved_to_the_middle_of_those_that_came_unless_it_is_locked() -> None:
    tree, (one, other) = grown(0, 1)
    heads = {"A": one, "B": other}
    assert (go(tree, heads, attempt=1), go(tree, heads, me="B", attempt=1)) == (one, other), "few of five came"
    heads["C"] = other
    assert go(tree, heads, attempt=1) == other
    assert go(tree, heads | {"A": bytes(32)}, attempt=1) == other, "its own is so old that it is forgotten"
    locked = {"A": one, "B": other, "C": other}
    assert go(tree, heads, attempt=1, locked=locked) == one, "two of five may go back yet"
    assert go(tree, heads, attempt=1, locked=locked, waited=True) == one, "locks end later"
    assert go(tree, heads, attempt=1, locked=locked, waited=True, unlocked=True) == other
    heads["D"] = other
    assert go(tree, heads, attempt=1, locked=locked) == one, "who is not locked may go back yet"
    assert go(tree, heads, attempt=1, locked=locked | {"D": other}) == other
    chain = tree[one].chain
    above = block(chain, RULES, fair(chain, [offer(chain, "X")]))
    tree.add(above)
    heads["A"] = above.id
    assert go(tree, heads, attempt=1) == above.id, "it went on from there, and so is locked on that"
    assert go(tree, heads, attempt=1, locked=dict.fromkeys("BCD", other)) == other


@pytest.mark.parametrize("there", ["ABC", "ABCD", "ABCDE", "ABCDEF", "ABCDEFGH"])
def test_no_two_nodes_see_a_round_decided_for_two_rosters_however_late_heads_come(there: str) -> None:
    """Some heard one leader's roster first, some another's; where six are there, two of eight are dead."""
    for seed in range(300):
        moved = heads_travel(random.Random(seed), there, of="ABCDEFGH" if there == "ABCDEF" else there)
        assert len(moved) == len(there) and len(set(moved.values())) == 1, seed


def heads_travel(
    rng: random.Random, there: str, *, of: str = "ABCDEFGH", waits: float = 9.0, unlocks: float = 24.0
) -> dict[str, bytes]:
    """Where each of those who are `there`, of these validators, moves when it sees one of three rosters decided.

    Heads take seconds to some and next to none to others, as on a machine that has much to do. `waits`,
    `unlocks`: seconds until validators had the time to vote, and until locks end, as with a wait of 3 s.
    """
    chain = start(of)
    said = fair(chain, [offer(chain, "X"), offer(chain, "Y")])
    tree, rosters = Tree(chain), [block(chain, RULES, said, attempt=attempt) for attempt in range(min(3, len(of)))]
    for one in rosters:
        tree.add(one)
    # When, an order, whose view, of whom, its head; and what that is locked on, b"" where it moved
    events: list[tuple[float, int, str, str, bytes, bytes | None]] = []
    order = itertools.count()
    heads: dict[str, dict[str, bytes]] = {name: {} for name in there}
    locked: dict[str, dict[str, bytes]] = {name: {} for name in there}
    arrives: dict[tuple[str, str], float] = {}
    moved: dict[str, bytes] = {}

    def hears(name: str, author: str, head: bytes, lock: bytes | None) -> None:
        heads[name][author] = head
        locked[name].pop(author, None)
        if lock is not None:
            locked[name][author] = lock

    def follows(at: float, name: str, head: bytes, lock: bytes | None) -> None:
        hears(name, name, head, lock)
        for other in there.replace(name, ""):
            arrives[name, other] = max(at + rng.choice((0.02, 1.0, 8.0)), arrives.get((name, other), 0.0))
            heapq.heappush(events, (arrives[name, other], next(order), other, name, head, lock))

    for name in there:
        heapq.heappush(events, (rng.uniform(0.0, 5.0), next(order), name, name, rng.choice(rosters).id, None))
        for wait in waits, unlocks:
            heapq.heappush(events, (wait + rng.random(), next(order), name, name, b"", None))
    while events:
        now, _, name, author, head, lock = heapq.heappop(events)
        mine, locks = heads[name], locked[name]
        if author != name:
            hears(name, author, head, lock)
        elif head and name not in mine:
            follows(now, name, head, None)
        waited, unlocked = now >= waits, now >= unlocks
        to = go(tree, mine, me=name, tip=chain.tip, attempt=2, waited=waited, locked=locks, unlocked=unlocked)
        if name in moved or to == chain.tip:
            continue
        if mine.get(name, to) != to:
            follows(now, name, to, b"")
        decided = tree.is_decided(to, mine, locks)
        if locks.get(name) != to and (decided or tree.has_most(to, mine | {name: to})):
            follows(now, name, to, to)
        if decided:
            moved[name] = to
    return moved


def test_a_roster_leaves_out_whose_scores_were_here_when_the_wait_for_them_was_over() -> None:
    log, heard = RoundLog(CHAIN, RULES), frozenset("ABCDE")
    for said in (*BOTH.cuts, *BOTH.scores):
        log.insert(said, b"", 0.0)
    quoted = tuple(sorted(said.id for said in BOTH.scores if said.author != "E"))
    roster = say(LEADER, replace(block(CHAIN, RULES, BOTH).roster, scores=quoted))
    log.insert(roster, b"", 0.0)
    view = RoundView("A", log)
    assert view.omitting() == {roster.id}, "before the wait is over only who quotes all is followed"
    assert replace(view, timers=Timers(scores=True), heard=heard).omitting() == {roster.id}
    assert replace(view, timers=Timers(scores=True), heard=heard - {"E"}).omitting() == set()
    assert replace(view, timers=Timers(scores=True, heads=True), heard=heard).omitting() == {roster.id}, "at any time"


def test_when_all_attempts_are_over_the_round_ends_empty() -> None:
    tree, _ = grown()
    assert go(tree, {}, attempt=4) == CHAIN.tip
    assert go(tree, {}, attempt=5) == empty_block(CHAIN).id
    assert go(tree, {}, me="X", attempt=4) == CHAIN.tip
    assert go(tree, {}, me="X", attempt=5) == empty_block(CHAIN).id, "no validator is there"


def test_a_node_goes_where_most_heads_are_and_never_back() -> None:
    tree, (one, other) = grown(0, 1)
    heads = {"A": one, "B": other, "C": other}
    assert go(tree, heads, tip=one) == other
    assert go(tree, {"A": one, "B": other}, tip=one) == one, "the earlier attempt"
    assert go(tree, {"B": CHAIN.tip, "C": CHAIN.tip}, tip=one) == one


@given(st.dictionaries(st.sampled_from("ABCDE"), st.integers(0, 3)), st.sampled_from("ABCDEX"), st.integers(0, 3))
def test_who_heard_the_same_heads_stands_on_the_same_roster(followed: dict[str, int], me: str, at: int) -> None:
    """Wherever a node stood, once attempts were over: the choice is of the heads, not of its own past."""
    tree, ids = grown(0, 1, 2)
    empty = empty_block(CHAIN)
    tree.add(Block(empty.id, empty.parent, empty.chain, None))
    ids.append(empty.id)
    heads = {peer: ids[number] for peer, number in followed.items()}
    if not heads:
        return
    stands = go(tree, heads, me=me, tip=ids[at])
    first = go(tree, heads, me=me, attempt=5, waited=True)
    assert stands == first == tree.best(heads)
