"""What proves a lie, and what does not: no honest member is convicted by what it said, whoever puts it together."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols import wire
from swarmnode.protocols.calls.frames import HEADROOM, RpcLimits
from swarmnode.protocols.methods.btard.method import PREFIX, Bans
from swarmnode.protocols.methods.btard.statements import (
    MAX_STATEMENT,
    Bundle,
    Centre,
    Commitment,
    LieEvidence,
    Opening,
    PartAudit,
    Seen,
    Sent,
    Signed,
    Sums,
    attempt_of,
    auditor,
    compare,
    convicts,
    digest,
    is_banned,
    opened,
    seal,
    seed_of,
)
from swarmnode.protocols.methods.known.messages import MAX_SEATS
from swarmnode.training.btard import DIRECTIONS

LIFE = b"life"
ATTEMPT = attempt_of("run", "roster")
CONTRIBUTIONS = [b"part 0", b"part 1", b"part 2"]
NONCE = b"n" * 32


def hash_of(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def sign_as(author: str) -> Any:
    return lambda message: 2 * hash_of(author.encode() + message)  # as long as one of Ed25519


def verify(author: str, message: bytes, signature: bytes) -> bool:
    return signature == 2 * hash_of(author.encode() + message)


def honest(author: str = "a", attempt: bytes = ATTEMPT, life: bytes = LIFE) -> list[Signed]:
    """All that an honest member says in one attempt, as owner of part 1."""
    said = [
        Commitment(tuple(map(hash_of, CONTRIBUTIONS)), hash_of(NONCE)),
        *(Sent(number, hash_of(raw)) for number, raw in enumerate(CONTRIBUTIONS)),
        Centre(1, hash_of(b"centre"), 2.0, 0.1),
        Seen(0, (hash_of(b"all"),)),
        Opening(NONCE),
        Sums((0.5,) * 48, (1.0,) * 3),
        Seen(1, (hash_of(b"more"),)),
        PartAudit(()),
    ]
    return [seal(what, author, attempt, life, sign_as(author)) for what in said]  # type: ignore[arg-type]


def test_nothing_that_an_honest_member_says_convicts_it() -> None:
    everything = honest() + honest(attempt=attempt_of("run", "another roster")) + honest(life=b"after a restart")
    for one in everything:
        for other in everything:
            assert convicts(LieEvidence(one, other), verify) is None, (one.kind, other.kind)


LIES: list[tuple[Any, Any]] = [
    (Commitment((), hash_of(b"1")), Commitment((), hash_of(b"2"))),
    (Commitment((hash_of(b"part"),), b""), Sent(0, hash_of(b"other"))),
    (Commitment((hash_of(b"part"),), b""), Sent(1, hash_of(b"part"))),
    (Commitment((hash_of(b"part"),), b""), Sent(-1, hash_of(b"part"))),
    (Centre(0, b"x", 1.0, 0.0), Centre(0, b"y", 1.0, 0.0)),
    (Centre(0, b"x", 1.0, 0.0), Centre(0, b"x", 2.0, 0.0)),
    (Commitment((), hash_of(b"1")), Opening(b"2")),
    (Sums((0.0,), (1.0,)), Sums((0.1,), (1.0,))),
    (Seen(0, (b"x",)), Seen(0, (b"y",))),
    (PartAudit(()), PartAudit((1,))),
]


@pytest.mark.parametrize(("one", "other"), LIES)
def test_what_contradicts_itself_convicts_its_author_to_anybody(one: Any, other: Any) -> None:
    first, second = (seal(what, "liar", ATTEMPT, LIFE, sign_as("liar")) for what in (one, other))
    assert convicts(LieEvidence(first, second), verify) == "liar"
    assert convicts(LieEvidence(second, first), verify) == "liar"


@pytest.mark.parametrize(("one", "other"), LIES)
def test_nobody_can_forge_a_proof(one: Any, other: Any) -> None:
    """With one statement of the victim's, and whatever a liar signs in its name."""
    mine = seal(one, "victim", ATTEMPT, LIFE, sign_as("victim"))
    forged = seal(other, "victim", ATTEMPT, LIFE, sign_as("liar"))
    assert convicts(LieEvidence(mine, forged), verify) is None
    by_liar = seal(other, "liar", ATTEMPT, LIFE, sign_as("liar"))
    assert convicts(LieEvidence(mine, by_liar), verify) is None


def test_statements_of_other_attempts_and_of_other_lives_prove_nothing() -> None:
    one, other = Centre(0, b"x", 1.0, 0.0), Centre(0, b"y", 1.0, 0.0)
    first = seal(one, "a", ATTEMPT, LIFE, sign_as("a"))
    assert convicts(LieEvidence(first, seal(other, "a", attempt_of("run", "next"), LIFE, sign_as("a"))), verify) is None
    assert convicts(LieEvidence(first, seal(other, "a", ATTEMPT, b"next life", sign_as("a"))), verify) is None


def test_parts_and_steps_are_different_things() -> None:
    for one, other in ((Centre(0, b"x", 1.0, 0.0), Centre(1, b"y", 1.0, 0.0)), (Seen(0, (b"x",)), Seen(1, (b"y",)))):
        first, second = (seal(what, "a", ATTEMPT, LIFE, sign_as("a")) for what in (one, other))  # type: ignore[arg-type]
        assert convicts(LieEvidence(first, second), verify) is None


def test_members_who_were_told_different_things_find_the_proof() -> None:
    said = [seal(Commitment((), hash_of(nonce)), "liar", ATTEMPT, LIFE, sign_as("liar")) for nonce in (b"1", b"2")]
    common = honest()
    mine, theirs = [*common, said[0]], [*common, said[1]]
    assert digest(mine) != digest(theirs)
    proved, unproved = compare(mine, theirs, verify)
    assert [convicts(each, verify) for each in proved] == ["liar"] and unproved == ()


def test_what_one_member_says_in_the_largest_swarm_can_be_told_to_another() -> None:
    """As what it signed, in a bundle, and as a proof in one call, however long a liar makes it."""
    parts = MAX_SEATS
    said = [
        Commitment((bytes(32),) * parts, bytes(32)),
        Sums((0.1,) * (DIRECTIONS * parts), (0.1,) * parts),
        Seen(0, (bytes(32),) * parts),
    ]
    signed = [seal(what, "a", ATTEMPT, LIFE, sign_as("a")) for what in said]  # type: ignore[arg-type]
    assert all(len(wire.encode(each)) <= MAX_STATEMENT for each in signed)
    longest = seal(Opening(bytes(MAX_STATEMENT)), "a", ATTEMPT, LIFE, sign_as("a"))
    assert len(wire.encode(LieEvidence(longest, longest))) < RpcLimits().frame - HEADROOM
    assert wire.decode(Bundle, wire.encode(Bundle((longest, longest))))


def test_what_a_restarted_member_says_again_is_noticed_and_proves_nothing() -> None:
    said = [seal(Commitment((), hash_of(life)), "a", ATTEMPT, life, sign_as("a")) for life in (b"1", b"2")]
    assert compare(said[:1], said[1:], verify) == ((), ("a",))


def test_what_somebody_made_up_is_passed_over_in_a_comparison() -> None:
    mine = seal(PartAudit(()), "a", ATTEMPT, LIFE, sign_as("a"))
    made_up = seal(PartAudit((1,)), "a", ATTEMPT, LIFE, sign_as("liar"))
    assert compare([mine], [made_up], verify) == ((), ())


def test_a_member_that_tells_many_variants_of_one_statement_has_one_of_them_looked_at() -> None:
    said = [seal(Opening(bytes([number])), "a", ATTEMPT, LIFE, sign_as("a")) for number in range(100)]
    verified = 0

    def counting(*arguments: Any) -> bool:
        nonlocal verified
        verified += 1
        return verify(*arguments)

    proved, _ = compare(said[:1], said[1:], counting)
    assert [convicts(each, verify) for each in proved] == ["a"] and verified == 3, "the variant, and both as a proof"


@given(st.binary(max_size=60), st.sampled_from(["commitment", "sent", "centre", "partaudit", "seen", "nonsense"]))
def test_bytes_that_are_no_statement_convict_nobody(body: bytes, kind: str) -> None:
    made = []
    for raw in (body, body + b"\0"):
        empty = seal(PartAudit(()), "a", ATTEMPT, LIFE, sign_as("a"))
        made.append(Signed(empty.author, empty.attempt, empty.life, kind, raw, empty.signature))
    assert convicts(LieEvidence(*made), verify) is None


def test_a_statement_is_read_as_what_it_was_signed_as() -> None:
    signed = seal(PartAudit((2,)), "a", ATTEMPT, LIFE, sign_as("a"))
    assert opened(signed, PartAudit, "a", ATTEMPT, verify) == PartAudit((2,))
    for kind, author, attempt in (
        (Sent, "a", ATTEMPT),
        (PartAudit, "b", ATTEMPT),
        (PartAudit, "a", b"other"),
    ):
        with pytest.raises(wire.WireError):
            opened(signed, kind, author, attempt, verify)


def test_one_honest_nonce_changes_what_is_drawn() -> None:
    assert seed_of({"a": b"1", "b": b"2"}) == seed_of({"b": b"2", "a": b"1"}) != seed_of({"a": b"1", "b": b"3"})
    drawn = {auditor(seed_of({"a": bytes([n])}), ["a", "b", "c"], 3) for n in range(200)}
    assert drawn == {(who, part) for who in "abc" for part in range(3)}


@pytest.mark.parametrize(("accusers", "banned"), [("", False), ("ab", False), ("abc", True), ("xyzab", False)])
def test_records_ban_by_more_than_half_of_the_members(accusers: str, banned: bool) -> None:
    assert is_banned(accusers, ["a", "b", "c", "d"]) is banned


def test_who_was_restarted_bans_by_its_own_word_and_renews_it() -> None:
    written: list[tuple[str, str]] = []

    async def select(prefix: str, *, limit: int) -> list[Any]:
        return [SimpleNamespace(key=f"{PREFIX}liar", author="me", value="was seen to lie")]

    async def write(key: str, value: str) -> None:
        written.append((key, value))

    async def main() -> None:
        run = SimpleNamespace(members=())
        state, sync = SimpleNamespace(select=select), SimpleNamespace(write=write)
        bans = Bans(SimpleNamespace(me="me", spec=SimpleNamespace(run=run), state=state, sync=sync))  # type: ignore[arg-type]
        for _ in range(2):
            await bans.look(("me", "other", "liar"))
        assert "liar" in bans and written == [(f"{PREFIX}liar", "was seen to lie")]

    trio.run(main)


@pytest.mark.parametrize("members", [(), ("a", "b", "c")])
def test_what_most_members_recorded_lasts_only_where_the_run_lists_who_may_be_a_member(
    members: tuple[str, ...],
) -> None:
    """Where it does not, two liars of seven would have an honest one banned by whoever was alone with them once."""
    written: list[str] = []

    async def select(prefix: str, *, limit: int) -> list[Any]:
        return [SimpleNamespace(key=f"{PREFIX}liar", author=who, value="was seen to lie") for who in "ab"]

    async def write(key: str, value: str) -> None:
        written.append(key)

    async def main() -> None:
        run = SimpleNamespace(members=members)
        state, sync = SimpleNamespace(select=select), SimpleNamespace(write=write)
        bans = Bans(SimpleNamespace(me="c", spec=SimpleNamespace(run=run), state=state, sync=sync))  # type: ignore[arg-type]
        await bans.look(("a", "b", "c"))
        assert "liar" in bans
        await bans.look(("a", "b", "c", "d", "e"))
        assert ("liar" in bans) == bool(members) and written == [f"{PREFIX}liar"] * bool(members)

    trio.run(main)
