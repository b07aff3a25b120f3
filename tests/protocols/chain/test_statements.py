"""What is said in a round survives its encoding, nothing else is read, and the largest of it fits its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from chains import RUN, hashed, record_of
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.crdt import encoding
from swarmnode.crdt.encoding import EncodingError
from swarmnode.crdt.kinds import KINDS, kind_of
from swarmnode.crdt.record import MAX_AUTHOR, InvalidRecord, Record, parse_record
from swarmnode.protocols.chain.statements import (
    ACCEPTED,
    FULL_STANDING,
    HASH,
    JUDGED,
    MALFORMED,
    MAX_COMMITS,
    MAX_GAIN,
    MAX_JUDGES,
    MAX_ROUND,
    MAX_VALIDATORS,
    MAX_WINDOW,
    MISSING,
    ONE,
    PREFIX,
    SALT,
    VERDICTS,
    AvailabilityVote,
    Commit,
    Entry,
    ForkChoiceVote,
    Reveal,
    Roster,
    Said,
    Score,
    Scores,
    Seal,
    binding_of,
    opens,
    read,
)
from swarmnode.training.open_step import CLIP_UNIT

hashes = st.binary(min_size=HASH, max_size=HASH)
rounds = st.integers(0, MAX_ROUND)
windows = st.integers(0, MAX_WINDOW)


def ascending(size: int, most: int) -> st.SearchStrategy[tuple[bytes, ...]]:
    return st.sets(st.binary(min_size=size, max_size=size), max_size=most).map(lambda ids: tuple(sorted(ids)))


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[Score, ...]:
    rows = []
    for commit in draw(ascending(PREFIX, 5)):
        found = draw(st.sampled_from([JUDGED, MISSING, MALFORMED]))
        gain = draw(st.integers(-MAX_GAIN, MAX_GAIN)) if found == JUDGED else 0
        rows.append(Score(commit, found, gain, draw(st.integers(0, FULL_STANDING))))
    return tuple(rows)


@st.composite
def entries(draw: st.DrawFn) -> tuple[Entry, ...]:
    return tuple(
        Entry(id, draw(st.integers(0, len(VERDICTS) - 1)), draw(st.integers(0, 1 << 40)), draw(st.integers(0, ONE)))
        for id in draw(ascending(HASH, 5))
    )


places = st.sets(st.integers(0, MAX_VALIDATORS - 1), max_size=5).map(lambda some: tuple(sorted(some)))
statements: st.SearchStrategy[Any] = st.one_of(
    st.builds(Commit, rounds, hashes, hashes, hashes),
    st.builds(AvailabilityVote, rounds, hashes, ascending(HASH, 5), hashes, windows, places),
    st.builds(Reveal, rounds, hashes, hashes, st.binary(min_size=SALT, max_size=SALT), hashes),
    st.builds(Seal, rounds, hashes, hashes),
    st.builds(
        Scores,
        rounds,
        hashes,
        hashes,
        st.binary(min_size=SALT, max_size=SALT),
        st.none() | st.integers(-MAX_GAIN, MAX_GAIN),
        score_rows(),
    ),
    st.builds(
        Roster,
        rounds,
        hashes,
        st.integers(0, MAX_JUDGES),
        st.just(b"") | hashes,
        ascending(HASH, 4),
        ascending(HASH, 4),
        entries(),
        st.integers(0, 1 << 53),
        st.booleans(),
        windows,
        hashes,
        hashes,
    ),
    st.builds(ForkChoiceVote, hashes, rounds, hashes, st.booleans(), st.booleans()),
)


@given(statements)
def test_what_is_said_is_read_back_from_the_bytes_of_its_record(statement: Any) -> None:
    made = record_of("author", statement)
    record = parse_record(made.payload, made.signature)
    assert read(record) == Said("author", made.id, statement)


def changed(value: Any, draw: st.DrawFn) -> Any:
    """`value` with one thing in it replaced by another, of this type or not."""
    if isinstance(value, Mapping) and value:
        key = draw(st.sampled_from(sorted(value)))
        how = draw(st.sampled_from(["drop", "add", "in"]))
        rest = {name: one for name, one in value.items() if name != key}
        return (
            rest if how == "drop" else {**value, "x": 1} if how == "add" else {**rest, key: changed(value[key], draw)}
        )
    if isinstance(value, tuple) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        how = draw(st.sampled_from(["drop", "twice", "in"]))
        if how == "drop":
            return (*value[:place], *value[place + 1 :])
        if how == "twice":
            return (*value[: place + 1], *value[place:])
        return (*value[:place], changed(value[place], draw), *value[place + 1 :])
    other = st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.binary(max_size=40) | st.text(max_size=2)
    return draw(other | st.just(()) | st.just({}) | st.just((b"",)))


@given(statements, st.data())
def test_whatever_a_record_says_it_is_read_as_itself_or_refused(statement: Any, data: st.DataObject) -> None:
    """What is read is written again as the same record: no two say the same, and none says more than is read."""
    made = record_of("author", statement)
    value = data.draw(st.composite(lambda draw: changed(statement.value, draw))())
    try:
        said = read(replace(made, value=value))
    except InvalidRecord:
        return
    assert (said.what.key, said.what.value) == (made.key, value)


@given(statements, st.sampled_from(["parent", "kind", "junk"]))
def test_a_key_that_does_not_fit_what_is_said_is_refused(statement: Any, wrong: str) -> None:
    made = record_of("author", statement)
    kind, _, rest = made.key.partition("/")
    if kind == "vote":
        return
    key = {
        "parent": f"{kind}/{rest[:9]}{hashed('other').hex()[:16]}{rest[25:]}",
        "kind": f"attestation/{rest}",
        "junk": f"{kind}/{rest}-",
    }[wrong]
    with pytest.raises(InvalidRecord):
        read(replace(made, key=key))


@given(
    st.tuples(rounds, st.sampled_from("AB"), hashes, st.binary(min_size=SALT, max_size=SALT), hashes),
    st.integers(0, 4),
    hashes,
)
def test_a_commit_opens_to_what_its_author_bound_and_to_nothing_else(
    bound: tuple[int, str, bytes, bytes, bytes], place: int, other: bytes
) -> None:
    round, author, parent, salt, root = bound
    commit = Said(author, hashed("id"), Commit(round, parent, binding_of(RUN, *bound[:2], *bound[2:]), bytes(HASH)))
    reveal = Reveal(round, parent, commit.id, salt, root)
    assert opens(reveal, commit, RUN)
    copied = replace(commit, author="AB".replace(author, ""))
    assert not opens(reveal, copied, RUN), "a copied commit opens for who copied it"
    assert not opens(reveal, commit, "cd" * 32)
    wrong = [replace(reveal, round=round + 1), replace(reveal, salt=other[:SALT]), replace(reveal, root=other)]
    wrong += [replace(reveal, commit=other), replace(reveal, parent=other)]
    if wrong[place] != reveal:
        assert not opens(wrong[place], commit, RUN)


def largest() -> list[Any]:
    """The largest that an honest node says of each kind."""
    commits = tuple(sorted(hashed("commit", i) for i in range(MAX_COMMITS)))
    judges = tuple(sorted(hashed("judge", i) for i in range(MAX_JUDGES)))
    rows = tuple(Score(id[:PREFIX], JUDGED, -MAX_GAIN, FULL_STANDING) for id in commits)
    listed = tuple(Entry(id, ACCEPTED, 1000 << 10, ONE) for id in commits)
    of, total = (MAX_ROUND, bytes(HASH)), MAX_COMMITS * 1000 << 10
    return [
        Commit(*of, bytes(HASH), bytes(HASH)),
        AvailabilityVote(
            *of,
            commits,
            bytes(HASH),
            MAX_WINDOW,
            tuple(range(MAX_VALIDATORS - MAX_JUDGES, MAX_VALIDATORS)),
            tuple((place, MAX_ROUND) for place in range(MAX_VALIDATORS - MAX_JUDGES, MAX_VALIDATORS)),
        ),
        Reveal(*of, bytes(HASH), bytes(SALT), bytes(HASH)),
        Seal(*of, bytes(HASH)),
        Scores(*of, bytes(HASH), bytes(SALT), -MAX_GAIN, rows),
        Roster(*of, 4, bytes(HASH), judges, judges, listed, total, False, MAX_WINDOW, bytes(HASH), bytes(HASH)),
        ForkChoiceVote(bytes(HASH), MAX_ROUND, bytes(HASH)),
    ]


@pytest.mark.parametrize("statement", largest(), ids=lambda one: type(one).__name__)
def test_the_largest_of_each_kind_fits_its_record_whoever_says_it(statement: Any) -> None:
    made = record_of("Q" * MAX_AUTHOR, statement, hlc=(1 << 63) - 1)
    assert len(made.payload) <= KINDS[kind_of(made.key)].max_size
    assert read(parse_record(made.payload, made.signature)).what == statement


def shortest_rows() -> list[Any]:
    """What has the most lists for its size."""
    commits = tuple(i.to_bytes(HASH, "little") for i in range(MAX_COMMITS))
    none = (0, bytes(HASH))
    return [
        AvailabilityVote(*none, (), bytes(HASH), 0, (), tuple((place, 0) for place in range(MAX_JUDGES))),
        Scores(*none, bytes(HASH), bytes(SALT), None, tuple(Score(id[:PREFIX], MISSING, 0, 0) for id in commits)),
        Roster(*none, 0, b"", (), (), tuple(Entry(id, 1, 0, 0) for id in commits), 0, False, 0, *2 * [bytes(HASH)]),
    ]


@pytest.mark.parametrize("statement", shortest_rows(), ids=lambda one: type(one).__name__)
def test_a_record_has_room_for_all_the_rows_that_may_be_said_however_short(statement: Any) -> None:
    made = record_of("a", statement)
    assert read(parse_record(made.payload, made.signature)).what == statement


def test_one_commit_more_than_the_most_is_refused() -> None:
    too_many = tuple(sorted(hashed("commit", i) for i in range(MAX_COMMITS + 1)))
    with pytest.raises(InvalidRecord):
        read(record_of("author", AvailabilityVote(0, bytes(HASH), too_many, bytes(HASH), 0)))


@pytest.mark.parametrize(
    "absent", [(1, 0), (1, 1), (-1,), (MAX_VALIDATORS,), (True,), ("a",), tuple(range(MAX_JUDGES + 1)), None]
)
def test_who_was_missed_is_named_by_ascending_places_and_by_few(absent: Any) -> None:
    with pytest.raises(InvalidRecord):
        read(record_of("author", AvailabilityVote(0, bytes(HASH), (), bytes(HASH), 0, absent)))


@pytest.mark.parametrize(
    "disproved",
    [((1, 0), (0, 0)), ((1, 0), (1, 0)), ((1,),), ((1, 2, 3),), (1,), ((MAX_VALIDATORS, 0),), ((0, MAX_ROUND + 1),),
     ((True, 0),), tuple((place, 0) for place in range(MAX_JUDGES + 1)), None],
)  # fmt: skip
def test_who_was_disproved_is_named_by_ascending_places_with_rounds_and_by_few(disproved: Any) -> None:
    with pytest.raises(InvalidRecord):
        read(record_of("author", AvailabilityVote(0, bytes(HASH), (), bytes(HASH), 0, (), disproved)))


def test_a_seal_is_the_hash_of_one_list_of_scores() -> None:
    scores = largest()[4]
    assert scores.seal == replace(scores).seal
    for other in (replace(scores, undo=0), replace(scores, salt=bytes(15) + b"1"), replace(scores, scores=())):
        assert other.seal != scores.seal
    assert encoding.decode(encoding.encode(scores.value)) == scores.value


def test_clip_factors_have_the_unit_of_the_arithmetic() -> None:
    assert ONE == CLIP_UNIT


@pytest.mark.parametrize("value", [None, 1, (), {}, {"parent": b""}])
def test_records_of_other_forms_are_refused(value: Any) -> None:
    for key in ("commit/00000000/x", "roster/00000000/x-0", "vote", "note/x", "score/00000000/x-seal"):
        with pytest.raises(InvalidRecord):
            read(Record(1, RUN, "author", key, 0, 1, value, b""))


def test_bytes_that_are_no_record_are_no_statement() -> None:
    with pytest.raises((InvalidRecord, EncodingError)):
        parse_record(b"\x80", bytes(64))
