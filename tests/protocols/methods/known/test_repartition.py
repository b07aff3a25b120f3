"""Whoever owned a part keeps it when a round is tried again, and nothing is left without an owner."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.methods.known.messages import Owner, Part, RoundRoster, Seat, cut
from swarmnode.protocols.methods.known.partition import CHUNK, Chunks, cut_to_keep, parts_by_owner
from swarmnode.protocols.wire import WireError, decode, encode
from swarmnode.testing.parts import parts
from swarmnode.training.codecs import codec

RUN, PARENT = "ab" * 32, "cd" * 32
SHARES = st.sampled_from([1, 2, 4, 4, 8, 16])
OWNERS = st.dictionaries(st.sampled_from("abcdefgh"), SHARES, min_size=1).map(
    lambda shares: tuple(Owner(peer, share) for peer, share in shares.items())
)
SEATS = st.dictionaries(st.sampled_from("abcdefghij"), st.just(0) | SHARES, min_size=1).filter(
    lambda shares: any(shares.values())
)
SIZES = st.integers(1, 40 * CHUNK) | st.integers(1, 5000)


def a_roster(shares: dict[str, int], cut_by: tuple[Owner, ...] = ()) -> RoundRoster:
    return RoundRoster(
        RUN, 3, 1, PARENT, tuple(Seat(peer, 1, share) for peer, share in shares.items()), (), 1.0, cut_by
    )


def cells_of(pieces: tuple[Part, ...]) -> list[slice]:
    chunks = Chunks(pieces, codec("int8"))
    return [chunks.elements(chunk) for chunk in range(chunks.count)]


@given(SEATS, SIZES)
def test_a_first_attempt_is_cut_by_its_own_owners(shares: dict[str, int], parameters: int) -> None:
    roster = a_roster(shares)
    assert tuple(part for (part,) in parts_by_owner(roster, parameters)) == parts(roster, parameters)


@given(SEATS, OWNERS, SIZES)
def test_every_element_has_one_owner_and_every_cell_is_one_of_before(
    shares: dict[str, int], cut_by: tuple[Owner, ...], parameters: int
) -> None:
    before = cut(sorted(cut_by, key=lambda owner: owner.peer), 0, parameters)
    owned = parts_by_owner(a_roster(shares, cut_by), parameters)
    flat = sorted((part for pieces in owned for part in pieces), key=lambda part: part.start)
    assert flat[0].start == 0 and flat[-1].stop == parameters
    assert all(a.start < a.stop == b.start for a, b in pairwise(flat))
    assert len(flat) <= len(cut_by) + len(shares)
    assert all(len({part.owner for part in pieces}) == 1 for pieces in owned)
    assert [pieces[0].owner for pieces in owned] == sorted({part.owner for part in flat})
    assert all(shares[part.owner] for part in flat)
    known = {(chunk.start, chunk.stop) for part in before for chunk in cells_of((part,))}
    assert {(chunk.start, chunk.stop) for pieces in owned for chunk in cells_of(pieces)} == known


@given(SEATS, OWNERS, SIZES)
def test_who_owned_a_part_has_it_still_and_first(
    shares: dict[str, int], cut_by: tuple[Owner, ...], parameters: int
) -> None:
    owned = {pieces[0].owner: pieces for pieces in parts_by_owner(a_roster(shares, cut_by), parameters)}
    for part in cut(sorted(cut_by, key=lambda owner: owner.peer), 0, parameters):
        if shares.get(part.owner):
            assert owned[part.owner][0] == part


def test_what_is_orphaned_goes_to_all_owners_by_their_shares() -> None:
    roster = a_roster({"a": 4, "c": 4, "new": 8, "listens": 0}, tuple(Owner(peer, 4) for peer in "abcd"))
    owned = parts_by_owner(roster, 32 * CHUNK)
    assert owned == (
        (Part("a", 0, 8 * CHUNK), Part("a", 8 * CHUNK, 12 * CHUNK)),
        (Part("c", 16 * CHUNK, 24 * CHUNK), Part("c", 12 * CHUNK, 16 * CHUNK)),
        (Part("new", 24 * CHUNK, 32 * CHUNK),),
    )


@pytest.mark.parametrize(
    ("before", "now", "stays"),
    [
        ("abcd", "abc", True),
        ("abcd", "ab", True),
        ("abcd", "a", False),  # most of it is orphaned
        ("ab", "abcd", True),
        ("ab", "abcde", False),  # most would own nothing
        ("abcd", "abcd", True),
        ("", "ab", False),
    ],
)
def test_a_cut_is_kept_while_half_of_its_owners_are_there_and_half_of_those_there_own(
    before: str, now: str, stays: bool
) -> None:
    owners = tuple(Owner(peer, 4) for peer in before)
    seats = [*(Seat(peer, 1, 4) for peer in now), Seat("listens", 1, 0)]
    assert cut_to_keep(owners, seats) == (owners if stays else ())


def test_an_owner_that_may_own_nothing_now_counts_as_gone() -> None:
    owners = tuple(Owner(peer, 4) for peer in "abc")
    assert not cut_to_keep(owners, [Seat("a", 1, 4), Seat("b", 1, 0), Seat("c", 1, 0)])


def owner_of(share: int) -> Owner:
    """With a share that its class refuses, as a peer with other code would send it."""
    owner = Owner("a", 4)
    object.__setattr__(owner, "share", share)
    return owner


@pytest.mark.parametrize(
    "cut_by",
    [
        (owner_of(0),),
        (owner_of(17),),
        (Owner("a", 4), Owner("a", 4)),
        (Owner("", 4),),
        (Owner("a" * 200, 4),),
        tuple(Owner(str(i), 4) for i in range(257)),
    ],
    ids=lambda owners: f"{len(owners)} {owners[0]}"[:40],
)
def test_a_roster_is_cut_by_owners_that_there_can_be(cut_by: tuple[Owner, ...]) -> None:
    roster = a_roster({"a": 4})
    object.__setattr__(roster, "cut_by", cut_by)
    with pytest.raises(WireError):
        decode(RoundRoster, encode(roster))


def test_rosters_that_differ_in_their_cut_are_different_rosters() -> None:
    first, again = a_roster({"a": 4}), a_roster({"a": 4}, (Owner("b", 4),))
    assert first.roster_id != again.roster_id
    assert decode(RoundRoster, encode(again)) == again
