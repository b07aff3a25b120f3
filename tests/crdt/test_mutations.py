"""The promises of `laws` can be broken: each of three wrong merge laws is caught by the very checks of the tests.

The laws are wrong in ways that have happened elsewhere. That the true law passes the same checks is in `test_state`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable

import laws
import pytest
from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample
from laws import Promise

from swarmnode.crdt import law
from swarmnode.crdt.kinds import ElementKind
from swarmnode.crdt.law import Judgement, Merged
from swarmnode.crdt.record import Element, Record

SEARCH = settings(max_examples=1000, deadline=None, database=None, phases=[Phase.generate])
TRUE_LAW = law.judge

CORE = {
    "join": laws.JOIN,
    "order": laws.ORDER,
    "definition": laws.DEFINITION,
    "convergence": laws.CONVERGENCE,
    "signatures": laws.SIGNATURES,
}


def by_time_only(patch: pytest.MonkeyPatch) -> None:
    """Of two records with one stamp, the one that came first stays."""

    def judge(kind: ElementKind, standing: Iterable[Element], new: Element) -> Judgement[Element]:
        every = list(standing)
        same_key = [one for one in every if one.key == new.key]
        if any(one.id == new.id for one in every):
            return Judgement(Merged.KNOWN)
        if same_key and not kind.write_once:
            (one,) = same_key
            return Judgement(Merged.OLDER) if one.hlc >= new.hlc else Judgement(Merged.STORED, gone=one)
        if len(every) < kind.slots:
            return Judgement(Merged.STORED)
        least = min(every, key=lambda one: one.hlc)
        return Judgement(Merged.QUOTA) if least.hlc >= new.hlc else Judgement(Merged.STORED, gone=least)

    patch.setattr(law, "judge", judge)


def first_come_quota(patch: pytest.MonkeyPatch) -> None:
    """Full slots take nothing more, instead of the greatest."""

    def judge(kind: ElementKind, standing: Iterable[Element], new: Element) -> Judgement[Element]:
        every = list(standing)
        full = len(every) >= kind.slots and (kind.write_once or all(one.key != new.key for one in every))
        ruling = TRUE_LAW(kind, every, new)
        return Judgement(Merged.QUOTA) if full and ruling.verdict is Merged.STORED else ruling

    patch.setattr(law, "judge", judge)


def id_over_signature(patch: pytest.MonkeyPatch) -> None:
    """The id names payload and signature, so signing again makes another record."""
    patch.setattr(Record, "id", property(lambda self: hashlib.sha256(self.payload + self.signature).digest()))


def is_caught(promise: Promise) -> bool:
    """Whether an example that breaks `promise` turns up within the examples of `SEARCH`."""
    try:
        find(promise.examples, promise.breaks, settings=SEARCH, random=random.Random(1))
    except NoSuchExample:
        return False
    return True


@pytest.mark.parametrize(
    "mutate, catchers",
    [
        (by_time_only, {"join", "order", "definition", "convergence"}),
        (first_come_quota, {"join", "order", "definition", "convergence"}),
        (id_over_signature, {"signatures"}),
    ],
)
def test_a_broken_law_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], catchers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    missed = {name for name in catchers if not is_caught(CORE[name])}
    assert not missed
