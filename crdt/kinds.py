"""Kinds: what all elements of a kind have in common. They bound what one author can make every node keep.

Two disciplines:
- replaceable: a later value replaces the earlier one. Keys are `<kind>/<name>`, or just `<kind>` with one slot;
- write-once: a key names one moment, `<kind>/<round, 8 digits>/<attempt or subject>`, and nobody may say two things
  about it. A second record under it proves that its author equivocates.

The ttl is fixed by the kind, for tombstones as well, so nothing outlives what replaced it. All of one author's slots
together hold at most `MAX_PER_AUTHOR` bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarmnode.crdt.envelope import SEAL

SECOND = 1_000  # ms
DAY = 86_400 * SECOND

KEPT_ROUNDS = 80  # the 64 that a round may still refer to, and a quarter more
MAX_KEY = 128  # characters
MAX_RECORD = 8192  # bytes of payload, the greatest of any kind of record


@dataclass(frozen=True)
class ElementKind:
    name: str
    ttl: int  # ms that an element lives, and a tombstone as well
    slots: int  # elements that one author may hold at a time
    max_size: int  # bytes of payload
    write_once: bool = False  # or else replaceable


def once(name: str, *, slots: int, max_size: int) -> ElementKind:
    """A write-once kind. Its records live for a week: KEPT_ROUNDS of up to two hours each."""
    return ElementKind(name, 7 * DAY, slots, max_size, write_once=True)


WRITE_ONCE = (
    once("commit", slots=KEPT_ROUNDS, max_size=512),
    once("availability", slots=KEPT_ROUNDS, max_size=4096),  # a vote: some 110 ids of commits
    once("reveal", slots=KEPT_ROUNDS, max_size=512),
    once("score", slots=2 * KEPT_ROUNDS, max_size=4096),  # first the hash of the scores, then the scores
    once("roster", slots=KEPT_ROUNDS, max_size=MAX_RECORD),  # the ids of 33 cuts and scores, 110 commits with weights
    once("attestation", slots=512, max_size=512),  # six subjects in each of those rounds
    once("probe", slots=512, max_size=1536),  # a round of a run by seeds: some 1 200 bytes, each of one step
)
REPLACEABLE = (
    # A vote outlasts an outage of a night. A lease says itself how long it lasts (`membership.lease_end`),
    # longer in large swarms and never longer than this.
    ElementKind("member", ttl=1200 * SECOND, slots=1, max_size=1024),
    ElementKind("vote", ttl=DAY, slots=1, max_size=512),  # for the roster that its author follows
    ElementKind("note", ttl=7 * DAY, slots=64, max_size=2048),
)
# Outlives by far every record that it accuses, so that whoever comes back after weeks learns of it. A slot for each
# write-once kind: accusations never displace one another.
EVIDENCE = ElementKind("evidence", ttl=30 * DAY, slots=len(WRITE_ONCE), max_size=2 * (MAX_RECORD + SEAL))

KINDS: dict[str, ElementKind] = {kind.name: kind for kind in (*REPLACEABLE, *WRITE_ONCE, EVIDENCE)}
MAX_PER_AUTHOR = 3_100_000  # bytes; the slots of all kinds of record, each full, and their signatures

_KEY = re.compile(r"[!-~]+")  # keys are shown in terminals
_MOMENT = re.compile(r"[0-9]{8}/[0-9A-Za-z._-]{1,64}")


def key_of(kind: str, round: int, subject: str | int) -> str:
    """The key of a write-once record, as in `commit/00000042/0`; `subject` may be the number of an attempt."""
    return f"{kind}/{round:08d}/{subject}"


def kind_of(key: str) -> str:
    return key.partition("/")[0]


def wrong_key(kind: ElementKind, key: str) -> str | None:
    """What is wrong with `key` for a record of `kind`; None where nothing is."""
    if len(key) > MAX_KEY or not _KEY.fullmatch(key):
        return f"key {key!r} is not 1 to {MAX_KEY} printable ASCII characters without spaces"
    rest = key.removeprefix(kind.name)
    if kind.write_once:
        fits, form = rest.startswith("/") and bool(_MOMENT.fullmatch(rest[1:])), "/ROUND (8 digits)/SUBJECT"
    elif kind.slots == 1:
        fits, form = not rest, ""
    else:
        fits, form = rest.startswith("/") and len(rest) > 1, "/NAME"
    return None if fits else f"key {key!r} is not of the form {kind.name}{form}"
