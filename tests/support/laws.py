"""What the replicated state promises, as properties: for each, examples to draw and a check that raises AssertionError.

Apart from the tests, so that `test_mutations` can run the same checks against broken laws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from swarmnode.crdt.hlc import MAX_AHEAD, stamp_at
from swarmnode.crdt.kinds import EVIDENCE, ElementKind, key_of, kind_of
from swarmnode.crdt.law import Merged
from swarmnode.crdt.record import Element, Evidence, Record, evidence_of
from swarmnode.testing.state import State

RUN = "ab" * 32
T0 = 10_000_000  # ms
TTL = 1_000  # ms, of all kinds but evidence: short enough for the clocks of a test to pass
KINDS = {
    "member": ElementKind("member", TTL, 1, 512),
    "note": ElementKind("note", TTL, 2, 512),
    "commit": ElementKind("commit", TTL, 3, 512, write_once=True),
    "score": ElementKind("score", TTL, 2, 512, write_once=True),
    "evidence": EVIDENCE,
}
REPLACEABLE_KEYS = ("member", "note/a", "note/b", "note/c")
MOMENTS = (*(key_of("commit", round, 0) for round in range(4)), key_of("score", 0, "x"))


def make_record(
    author: str, key: str, time: int, value: int | None = 1, counter: int = 0, signature: bytes = bytes(64)
) -> Record:
    ttl = KINDS[kind_of(key)].ttl
    return Record(1, RUN, author, key, stamp_at(time, counter), ttl, value, signature)


# Few authors, keys, times and values, so that clashes, ties, tombstones and full slots are common.
times = st.sampled_from([T0, T0 + 1, T0 + 300, T0 + 600])
authors, counters = st.sampled_from("AB"), st.integers(0, 1)
registers = st.builds(
    make_record, authors, st.sampled_from(REPLACEABLE_KEYS), times, st.none() | st.integers(0, 2), counters
)
moments = st.builds(make_record, authors, st.sampled_from(MOMENTS), times, st.integers(0, 2), counters)
records = registers | moments
proofs = st.builds(
    lambda author, key, time, later, value: evidence_of(
        make_record(author, key, time, value), make_record(author, key, time + later, 9)
    ),
    authors,
    st.sampled_from(MOMENTS),
    times,
    st.sampled_from([0, 300]),
    st.integers(0, 2),
)
elements = st.one_of(records, records, records, proofs)
heard = st.lists(elements, max_size=16)


@dataclass(frozen=True)
class Promise:
    """`check` raises AssertionError for an example of `examples` that breaks the promise."""

    examples: st.SearchStrategy[Any]
    check: Callable[[Any], None]

    def breaks(self, example: Any) -> bool:
        try:
            self.check(example)
        except AssertionError:
            return True
        return False


def joined(*sets: Iterable[Element], now: int = T0) -> State:
    state = State(RUN, kinds=KINDS)
    for elements in sets:
        for element in elements:
            state.merge(element, now)
    return state


def assert_same(one: State, other: State, cutoff: int = T0) -> None:
    ids = [[element.id for element in state.held(cutoff)] for state in (one, other)]
    assert ids[0] == ids[1]


def by_definition(heard: Iterable[Element]) -> set[bytes]:
    """The ids that stand, straight from the first lines of `law`, all at once instead of one by one."""
    groups: defaultdict[tuple[str, str], dict[bytes, Element]] = defaultdict(dict)
    for element in heard:
        groups[element.author, element.kind][element.id] = element
    standing: set[bytes] = set()
    for (_, name), group in groups.items():
        ranked = sorted(group.values(), key=lambda one: one.rank, reverse=True)
        if not KINDS[name].write_once:
            ranked = [one for i, one in enumerate(ranked) if one.key not in {r.key for r in ranked[:i]}]
        standing.update(one.id for one in ranked[: KINDS[name].slots])
    return standing


# --- merging is a join --------------------------------------------------------------------------------------------


def _three_states_join(example: tuple[list[Element], list[Element], list[Element]]) -> None:
    def join(*states: State) -> State:
        return joined(*(state.held(T0) for state in states))

    x, y, z = map(joined, example)
    assert_same(join(x, y), join(y, x))
    assert_same(join(join(x, y), z), join(x, join(y, z)))
    assert_same(join(x, x), x)


JOIN = Promise(st.tuples(heard, heard, heard), _three_states_join)


@st.composite
def _told_twice(draw: st.DrawFn) -> tuple[list[Element], list[Element]]:
    """What one replica hears, and the same in another order with repetitions."""
    first = draw(heard)
    again = draw(st.lists(st.sampled_from(first), max_size=6)) if first else []
    return first, draw(st.permutations(first + again))


def _order_does_not_matter(example: tuple[list[Element], list[Element]]) -> None:
    assert_same(joined(example[0]), joined(example[1]))


ORDER = Promise(_told_twice(), _order_does_not_matter)


def _as_defined(example: list[Element]) -> None:
    assert {element.id for element in joined(example).held(T0)} == by_definition(example)


DEFINITION = Promise(heard, _as_defined)


def _resigning_is_no_news(example: list[tuple[Element, bool]]) -> None:
    """One replica hears each record as signed once, another as signed again; a third hears both."""
    firsts = [element for element, _ in example]
    others = [replace(e, signature=b"\1" * 64) if again and isinstance(e, Record) else e for e, again in example]
    both = joined(firsts)
    assert_same(both, joined(others))
    assert all(both.merge(twin, T0).verdict is not Merged.STORED for twin in others)
    assert_same(both, joined(firsts))
    once = joined(firsts)
    accused = [{(proof.author, proof.key) for proof, _ in state.convict(T0)} for state in (both, once)]
    assert accused[0] == accused[1]


SIGNATURES = Promise(st.lists(st.tuples(elements, st.booleans()), max_size=10), _resigning_is_no_news)


# --- quotas, expiry, clocks ---------------------------------------------------------------------------------------


def _quotas_hold(example: list[Element]) -> None:
    state = State(RUN, kinds=KINDS)
    for element in example:
        state.merge(element, T0)
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for one in state.held(T0):
            counts[one.author, one.kind] += 1
        assert all(count <= KINDS[kind].slots for (_, kind), count in counts.items())


QUOTAS = Promise(heard, _quotas_hold)

Step = tuple[Element, int, bool]  # (element, ms by which the clock moves before it comes, whether to sweep after it)
steps = st.tuples(elements, st.integers(-300, 600), st.booleans())


def _nothing_comes_back(example: list[Step]) -> None:
    """Under a clock that also steps back: neither what left, nor what is older than something seen under its key."""
    state, now, latest = State(RUN, kinds=KINDS), T0, T0
    here: set[bytes] = set()
    left: set[bytes] = set()
    greatest: dict[tuple[str, str], tuple[int, bytes]] = {}
    for element, pause, sweep in example:
        now += pause
        latest = max(latest, now)
        state.merge(element, now)
        if sweep:
            state.sweep(now)
        read = (state.get(one.author, one.key, now) for one, _, _ in example)
        assert all(one is None or one.expiry > latest for one in read)
        held = {one.id for one in state.held(latest)}
        assert not held & left
        left |= here - held
        here = held
        for one in state.held(latest):
            if not KINDS[one.kind].write_once:
                assert greatest.get((one.author, one.key), b"") <= one.rank
                greatest[one.author, one.key] = one.rank


NO_RETURN = Promise(st.lists(steps, max_size=16), _nothing_comes_back)


# --- replicas that lose, sweep and repair -------------------------------------------------------------------------


Life = list[tuple[int, int, bool]]  # (index of the element it hears, ms its clock moves before, whether to sweep after)
Meeting = tuple[int, int]  # two replicas that repair with each other


@st.composite
def _lives(draw: st.DrawFn) -> tuple[list[Element], list[Life], list[Meeting]]:
    """Elements; what three replicas hear of them, in any order, with loss and repetition; who meets in between."""
    every = draw(st.lists(elements, min_size=1, max_size=12))
    step = st.tuples(st.integers(0, len(every) - 1), st.integers(-100, 300), st.booleans())
    lives = [draw(st.lists(step, max_size=14)) for _ in range(3)]
    return every, lives, draw(st.lists(st.sampled_from([(0, 1), (1, 2), (2, 0)]), max_size=4))


def _replicas_converge(example: tuple[list[Element], list[Life], list[Meeting]]) -> None:
    """After a last round of repair all agree, with each other and with one that heard everything at once."""
    every, lives, meetings = example
    states, clocks, heard, latest = [State(RUN, kinds=KINDS) for _ in lives], [T0 for _ in lives], set[int](), T0
    for i, life in enumerate(lives):
        for index, pause, sweep in life:
            clocks[i] += pause
            latest = max(latest, clocks[i])
            heard.add(index)
            states[i].merge(every[index], clocks[i])
            if sweep:
                states[i].sweep(clocks[i])
    for i, j in [*meetings, (0, 1), (1, 2), (0, 1)]:
        offered = [(i, states[j].held(clocks[j])), (j, states[i].held(clocks[i]))]
        for one, elements in offered:
            for element in elements:
                states[one].merge(element, clocks[one])
    assert_same(states[0], states[1], latest)
    assert_same(states[1], states[2], latest)
    assert_same(states[0], joined(every[index] for index in heard), latest)


CONVERGENCE = Promise(_lives(), _replicas_converge)


def _ahead_is_only_late(example: list[tuple[Element, int]]) -> None:
    """A replica whose clock is behind refuses what is AHEAD, stays as it is, and takes it when it is offered again."""
    state, now = State(RUN, kinds=KINDS), T0 - MAX_AHEAD - 700
    for element, pause in example:
        now = min(T0, now + pause)
        before = [one.id for one in state.held(now)]
        if state.merge(element, now).verdict is Merged.AHEAD:
            assert [one.id for one in state.held(now)] == before
    for element, _ in reversed(example):
        state.merge(element, T0)
    assert_same(state, joined(element for element, _ in example))


AHEAD = Promise(st.lists(st.tuples(elements, st.integers(0, 400)), max_size=12), _ahead_is_only_late)


# --- equivocation -------------------------------------------------------------------------------------------------


@st.composite
def _contradictions(draw: st.DrawFn) -> tuple[list[Element], list[bool]]:
    """Records, many of which contradict others, and after which of them the replica makes evidence."""
    said = draw(st.lists(moments | moments | records, min_size=2, max_size=14))
    return said, draw(st.lists(st.booleans(), min_size=len(said), max_size=len(said)))


def _equivocation_ends_in_evidence(example: tuple[list[Element], list[bool]]) -> None:
    """Whoever saw two records under one write-once key, and whoever was only sent the evidence, holds evidence."""
    state, guilty = State(RUN, kinds=KINDS), set[tuple[str, str]]()
    for element, convict in zip(*example, strict=True):
        if KINDS[element.kind].write_once:
            contradicted = [one for one in state.held(T0) if (one.author, one.key) == (element.author, element.key)]
            if any(one.id != element.id for one in contradicted):
                guilty.add((element.author, element.kind))
        state.merge(element, T0)
        if convict:
            state.convict(T0)
    state.convict(T0)
    proofs = [one for one in state.held(T0) if isinstance(one, Evidence)]
    assert {(proof.author, proof.greater.kind) for proof in proofs} == guilty
    told = joined(proofs)
    for author, kind in guilty:
        assert told.get(author, f"evidence/{kind}", T0) == state.get(author, f"evidence/{kind}", T0) is not None


EQUIVOCATION = Promise(_contradictions(), _equivocation_ends_in_evidence)


def _judges_agree(example: tuple[list[Element], list[Element]]) -> None:
    """Two that heard records in different orders may make different evidence; once exchanged, they hold the same."""
    states = [State(RUN, kinds=KINDS), State(RUN, kinds=KINDS)]
    for state, told in zip(states, example, strict=True):
        for element in told:
            state.merge(element, T0)
            state.convict(T0)
    one, other = states
    assert_same(joined(one.held(T0), other.held(T0)), joined(other.held(T0), one.held(T0)))


EXCHANGED_EVIDENCE = Promise(_told_twice(), _judges_agree)
