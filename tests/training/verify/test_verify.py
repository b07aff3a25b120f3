"""The record of somebody's work, what is drawn from it, and how far honest and other replays end from what it says."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarmnode.training.codecs import codec
from swarmnode.training.codecs.feedback import ErrorFeedback
from swarmnode.training.verify.recorder import Recorder, room, stretch_steps
from swarmnode.training.verify.replay import (
    DECAY,
    LEAST,
    MOST,
    SAVED,
    AuditBudget,
    Distance,
    Offered,
    Wrong,
    by_whom,
    calibrated,
    check_form,
    distance,
    explains,
    residual_after,
    walk,
    which,
    whom,
)
from swarmnode.training.verify.trace import (
    MAX_LEGS,
    BadTrace,
    Leg,
    Origin,
    Point,
    State,
    Stretch,
    Trace,
    gap,
    vector_id,
)
from swarmnode.training.verify.vectors import Vectors

SIZE = 4096  # one chunk of top-k
CODEC = "topk"


def point(number: int) -> Point:
    return Point(bytes([number]) * 32, bytes([number, 1] * 16), number)


def stretch(number: int, *, round: int = 3, steps: int = 5, texts: int = 1) -> Stretch:
    return Stretch(point(number), point(number + 1), round, 5 * number, steps, texts)


def trace(**changes: object) -> Trace:
    legs = (Leg(b"", False, (stretch(0), stretch(1))), Leg(b"\x09" * 32, True, (stretch(2),)))
    whole = Trace(
        Origin.AFTER, b"\x01" * 32, b"\x02" * 32, b"\x03" * 32, b"\x04" * 32, b"\x05" * 32, legs, (b"\x06" * 32,)
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_written_and_its_root_names_every_byte() -> None:
    assert Trace.decode(trace().encode()) == trace()
    assert trace().steps == 15
    others = [
        trace(origin=Origin.FRESH),
        trace(residual=bytes(32)),
        trace(legs=trace().legs[:1]),
        trace(texts=(bytes(32),)),
    ]
    assert len({one.root for one in (trace(), *others)}) == 5


def _with_second(wrong: Stretch) -> tuple[Leg, ...]:
    return (Leg(b"", False, (stretch(0), wrong)),)


@pytest.mark.parametrize(
    "legs",
    [
        (),
        (Leg(b"\x09" * 32, False, (stretch(0),)),),
        (Leg(b"", False, (stretch(0),)), Leg(b"", False, (stretch(1),))),
        _with_second(replace(stretch(1), start=point(7))),
        _with_second(replace(stretch(1), step=4)),
        _with_second(replace(stretch(1), step=6)),
        _with_second(replace(stretch(1), round=2)),
        _with_second(replace(stretch(1), round=4)),
        _with_second(replace(stretch(1), texts=0)),
        _with_second(replace(stretch(1), texts=2)),
        (
            Leg(b"", False, (stretch(0),)),
            Leg(b"\x09" * 32, True, (replace(stretch(1), start=replace(point(1), moments=bytes(32))),)),
        ),
    ],
    ids=[
        "no leg",
        "nowhere",
        "untold jump",
        "gap",
        "repeated",
        "left out",
        "back",
        "not from 0",
        "less text",
        "unnamed",
        "other moments",
    ],
)
def test_steps_that_do_not_follow_one_another_are_no_record(legs: tuple[Leg, ...]) -> None:
    wrong = trace(legs=legs)
    assert gap(wrong)
    with pytest.raises(BadTrace):
        Trace.decode(wrong.encode())


ROSTERS = tuple(bytes([number]) * 32 for number in range(1, MAX_LEGS + 4))  # of one chain, from its beginning
MADE_UP = bytes([255]) * 32


@pytest.mark.parametrize(
    ("bases", "way", "fine"),
    [
        ((ROSTERS[3], *ROSTERS[-2:]), ROSTERS, True),
        (ROSTERS[-1:], ROSTERS, True),
        (ROSTERS[:2], ROSTERS[:2], True),
        (ROSTERS[3:5], ROSTERS, False),
        ((ROSTERS[-2], ROSTERS[3], ROSTERS[-1]), ROSTERS, False),
        ((ROSTERS[3], ROSTERS[3], ROSTERS[-1]), ROSTERS, False),
        ((MADE_UP, ROSTERS[-1]), ROSTERS, False),
        ((MADE_UP, ROSTERS[1]), ROSTERS[:2], False),
        ((MADE_UP, ROSTERS[-1]), ROSTERS[-2:], True),
    ],
    ids=["some", "one", "two", "not to the end", "back", "twice", "made up", "made up soon", "before what is known"],
)
def test_a_record_leads_from_one_roster_to_the_next(
    bases: tuple[bytes, ...], way: tuple[bytes, ...], fine: bool
) -> None:
    """Else an old state would do for the same steps again, or one that nobody has for any."""
    legs = (Leg(b"", False, ()), *(Leg(base, False, ()) for base in bases[1:]))
    record = trace(base=bases[0], legs=legs)
    with nullcontext() if fine else pytest.raises(Wrong):
        check_form(record, round=ROSTERS.index(way[-1]), way=way, longest=3)


@given(
    st.binary(max_size=400)
    | st.recursive(
        st.none() | st.booleans() | st.integers(0, 99) | st.binary(max_size=40), lambda x: st.lists(x, max_size=6)
    ).map(msgpack.packb)
)
@example(msgpack.packb([2, 0, [b"", b"", *[bytes(32)] * 3], [{}], []]))  # a map where a leg should be
def test_any_bytes_are_a_record_or_refused(raw: bytes) -> None:
    with suppress(BadTrace):
        assert Trace.decode(raw).encode() == raw


def test_everybody_is_audited_by_one_other_each_round_and_every_step_is_as_likely() -> None:
    names = [f"peer{number}" for number in range(10)]
    pairs = Counter[tuple[str, str | None]]()
    for number in range(90):
        drawn = {name: whom(bytes([number]), name, names) for name in names}
        assert set(drawn.values()) == set(names) and all(name != author for name, author in drawn.items())
        assert all(by_whom(bytes([number]), author, names) == name for name, author in drawn.items() if author)
        pairs.update(drawn.items())
    assert len(pairs) == 90 and max(pairs.values()) < 30  # 10 in the mean
    assert whom(b"seed", "ann", ["ann"]) is whom(b"seed", "bob", ["ann", "cid"]) is None
    uneven = trace(legs=(Leg(b"", False, (stretch(0, steps=5), replace(stretch(1, steps=15), step=5))),))
    longer = sum(which(number.to_bytes(4, "big"), "a", "b", uneven).steps == 15 for number in range(1000))  # type: ignore[union-attr]
    assert 690 < longer < 810
    assert which(b"seed", "a", "b", trace(legs=(Leg(b"", False, ()),))) is None


def test_a_budget_is_a_share_and_saves_up_little() -> None:
    budget = AuditBudget(0.05)
    assert not budget.affords(1.0)
    spent = 0
    for _ in range(1000):
        budget.earn(2.0)
        while budget.affords(1.0):
            budget.spend(1.0)
            spent += 1
    assert spent == pytest.approx(100, abs=1)
    budget.earn(1e6)
    assert sum(budget.affords(1.0) and not budget.spend(1.0) for _ in range(100)) == SAVED


def test_a_recorder_ends_stretches_where_texts_and_rounds_change_and_forgets_the_oldest(tmp_path: Path) -> None:
    counter = [0]

    def capture() -> State:
        return State(np.full(4, counter[0], np.float32), np.full(8, counter[0], np.float32), counter[0])

    vectors = Vectors(tmp_path, budget=2 * 48 + 47)
    recorder = Recorder(capture, vectors, every=3)
    for step in range(7):
        recorder.before(0, step, 1 if step < 4 else 2)
        counter[0] += 1
    assert recorder.is_open
    done = recorder.mark(0, 7)
    assert [(one.step, one.steps, one.texts) for one in done] == [(0, 3, 1), (3, 1, 1), (4, 3, 2)]
    assert [one.start.updates for one in done] == [0, 3, 4]
    assert any(vectors.get(id) is None for id in done[0].start.vectors)
    assert all(vectors.get(id) is not None for id in done[2].end.vectors)
    assert not recorder.is_open and recorder.mark(0, 7) == []
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 48 + 47


def test_what_was_put_into_a_folder_that_was_emptied_is_put_anew(tmp_path: Path) -> None:
    vectors, ones = Vectors(tmp_path / "states"), np.ones(4, np.float32)
    id = vectors.put(ones)
    shutil.rmtree(tmp_path / "states")
    assert not vectors.touch(id)
    assert vectors.put(ones) == id and vectors.get(id) is not None


def test_a_round_that_ends_without_a_mark_leaves_no_gap(tmp_path: Path) -> None:
    counter = [0]

    def view() -> State:
        return State(np.full(4, counter[0], np.float32), np.full(8, counter[0], np.float32), counter[0])

    recorder = Recorder(view, Vectors(tmp_path), every=3)
    life = recorder.life
    for round, step in ((0, 0), (0, 1), (1, 0), (1, 1)):  # others went on to the next round meanwhile
        recorder.before(round, step, 1)
        counter[0] += 1
    done = recorder.mark(1, 2)
    assert [(one.round, one.step, one.steps) for one in done] == [(0, 0, 2), (1, 0, 2)]
    assert done[0].end == done[1].start
    assert recorder.life == life
    assert not gap(trace(legs=(Leg(b"", False, tuple(done)),)))


def test_what_did_not_change_between_two_points_is_written_once(tmp_path: Path) -> None:
    state = State(np.ones(4, np.float32), np.zeros(8, np.float32), 0)
    recorder = Recorder(lambda: state, Vectors(tmp_path), every=3)
    recorder.before(0, 0, 1)
    state = replace(state, parameters=2 * state.parameters, moments=state.moments + 1, updates=3)
    (first,) = recorder.mark(0, 3)
    written = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert len(written) == 4
    recorder.before(0, 3, 1)  # a judge was here, and left all as it was
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == written
    state = replace(state, parameters=state.parameters + 1, updates=4)
    assert recorder.mark(0, 4)[0].start == first.end


def test_a_disk_that_is_full_costs_the_record_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    recorder = Recorder(
        lambda: State(np.ones(4, np.float32), np.ones(8, np.float32), 0), Vectors(tmp_path / "file"), every=1
    )
    life = recorder.life
    for step in range(3):
        recorder.before(0, step, 1)
    assert recorder.mark(0, 3) == []
    assert recorder.life != life


def test_states_take_their_room_again_once_a_disk_is_full_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that was started meanwhile could show nothing for the rest of its life, and was called a liar."""
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    vectors = Vectors(tmp_path, budget=7 * 16, share=0.5)

    def kept(first: int) -> int:
        ids = [vectors.put(np.full(4, number, np.float32)) for number in range(first, first + 9)]
        return sum(vectors.get(id) is not None for id in ids)

    assert kept(0) == 2
    free[0] = 10 * 16
    assert kept(10) == 5
    free[0] = 0  # by what was put there
    assert kept(20) == 5
    free[0] = 100 * 16
    assert kept(30) == 7


def test_every_size_of_model_can_be_audited_and_its_disk_is_known_before() -> None:
    assert stretch_steps(80, 800_000) == stretch_steps(80, 35_000_000) == 3
    assert stretch_steps(80, 70_000_000) == 5
    assert stretch_steps(80, 135_000_000) == 14
    assert (stretch_steps(500, 1000), stretch_steps(3, 1000), stretch_steps(2, 1000)) == (16, 3, 2)
    assert stretch_steps(80, 10**9) == 20
    assert room(80, 135_000_000) == 2 * 10 * 12 * 135_000_000
    assert room(80, 1000) == 1 << 30


def test_a_name_that_leads_elsewhere_or_to_other_bytes_is_no_vector(tmp_path: Path) -> None:
    vectors, elsewhere = Vectors(tmp_path / "states"), tmp_path / "key"
    ones = np.ones(4, np.float32)
    id = vectors.put(ones)
    np.testing.assert_array_equal(vectors.get(id), ones)
    elsewhere.write_bytes(b"secret  ")
    (vectors.folder / bytes(32).hex()).symlink_to(elsewhere)
    assert vectors.get(bytes(32)) is None
    (vectors.folder / (b"\1" * 32).hex()).mkdir()
    assert vectors.get(b"\1" * 32) is None
    np.testing.assert_array_equal(vectors.copied(id, 16), ones)
    assert vectors.copied(id, 12) is vectors.copied(bytes(32), 16) is vectors.copied(b"\1" * 32, 16) is None
    empty = vectors.put(np.zeros(0, np.float32))
    assert vectors.get(empty).size == vectors.copied(empty, 16).size == 0  # type: ignore[union-attr]


def test_no_link_of_whoever_writes_there_too_has_another_file_overwritten(tmp_path: Path) -> None:
    vectors, elsewhere, ones = Vectors(tmp_path / "states"), tmp_path / "key", np.ones(4, np.float32)
    elsewhere.write_bytes(b"secret")
    vectors.folder.mkdir()
    for name in (f"{vector_id(ones).hex()}.part", vector_id(ones).hex()):
        (vectors.folder / name).symlink_to(elsewhere)
    np.testing.assert_array_equal(vectors.get(vectors.put(ones)), ones)
    assert elsewhere.read_bytes() == b"secret"


def test_a_trainer_that_shortens_a_state_while_its_daemon_shows_it_kills_nobody(tmp_path: Path) -> None:
    vectors = Vectors(tmp_path)
    id = vectors.put(np.ones(1 << 16, np.float32))
    shown, child = vectors.copied(id, 1 << 18), os.fork()
    if not child:
        os.truncate(tmp_path / id.hex(), 0)
        os._exit(int(shown.sum() != 1 << 16))  # type: ignore[union-attr]
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_not_finite_or_of_another_count_is_infinitely_far() -> None:
    ones = np.ones(4, np.float32)
    start, end = State(0 * ones, np.zeros(8, np.float32), 0), State(ones, np.ones(8, np.float32), 5)
    assert distance(start, end, end) == Distance(0, 0, 0)
    for lie in (
        replace(end, updates=4),
        replace(end, parameters=ones * np.nan),
        replace(end, moments=end.moments * np.inf),
    ):
        assert not distance(start, lie, end).within(MOST)
    assert distance(start, replace(end, parameters=1.1 * ones), end).parameters == pytest.approx(0.1)


def test_a_node_whose_own_replays_scatter_audits_nobody() -> None:
    assert calibrated([]) is None
    assert calibrated([Distance(1e-6, 1e-6, 1e-6)]) == LEAST
    assert calibrated([Distance(1e-6, 1e-6, 1e-6), Distance(0.004, 0, 0)]) == pytest.approx(0.04)
    assert calibrated([Distance(0.01, 0, 0)]) is None


class Author:
    """An honest one, and its books."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.feedback = ErrorFeedback(codec(CODEC), SIZE, decay=DECAY)

    def vector(self) -> np.ndarray:
        return self.rng.standard_normal(SIZE).astype(np.float32)

    def offer(self, delta: np.ndarray) -> bytes:
        return bytes(self.feedback.encode(delta))


@pytest.mark.parametrize(("accepted", "returned"), [(True, 0.0), (True, 0.25), (False, 0.0)])
def test_what_a_round_left_over_can_be_computed_by_anybody(accepted: bool, returned: float) -> None:
    author = Author(1)
    for _ in range(3):
        residual, delta = author.feedback.export(), author.vector()
        raw = author.offer(delta)
        if accepted:
            author.feedback.commit()
        else:
            author.feedback.rollback()
            author.feedback.fade()
            author.feedback.give_back(delta, float(np.linalg.norm(delta.astype(np.float64))))
        if accepted and returned:
            sent = author.feedback.codec.decode(raw, SIZE)
            author.feedback.give_back(sent * np.float32(returned), float(np.linalg.norm(sent.astype(np.float64))))
        left = residual_after(Offered(residual, delta, raw, author.feedback.codec, accepted, returned))
        np.testing.assert_allclose(left, author.feedback.export(), rtol=1e-6, atol=1e-7)


def test_a_contribution_that_is_not_the_work_does_not_follow_from_it() -> None:
    author = Author(2)
    author.feedback.restore(author.vector())
    residual, delta = author.feedback.export(), author.vector()
    raw = author.offer(delta)
    explains(raw, delta, residual, codec(CODEC))
    told = author.feedback.codec.decode(raw, SIZE)
    lies = {"scaled": 1.1 * told, "noise": author.vector(), "flipped": -told, "nothing": 0 * told}
    for lie in lies.values():
        with pytest.raises(Wrong):
            explains(bytes(codec(CODEC).encode(lie.astype(np.float32))), delta, residual, codec(CODEC))
    with pytest.raises(Wrong):
        explains(raw, delta, 0 * residual, codec(CODEC))


def test_the_legs_lead_to_what_was_offered_and_nowhere_else() -> None:
    author = Author(3)
    states = {b"\x02" * 32: author.vector(), b"\x09" * 32: author.vector(), b"\x0a" * 32: author.vector()}
    start, first, last = author.vector(), author.vector(), author.vector()
    second = states[b"\x09" * 32] + (first - start)
    third = states[b"\x0a" * 32] + (second - states[b"\x09" * 32])

    def at(vector: np.ndarray) -> Point:
        return Point(vector_id(vector), bytes(32), 0)

    legs = (
        Leg(b"", False, (Stretch(at(start), at(first), 3, 0, 5, 0),)),
        Leg(b"\x09" * 32, True, ()),
        Leg(b"\x0a" * 32, False, (Stretch(at(third), at(last), 4, 0, 5, 0),)),
    )
    whole = trace(legs=legs, start=vector_id(start), end=vector_id(last))
    ends = {vector_id(vector): vector for vector in (first, last)}
    np.testing.assert_array_equal(walk(whole, start, ends=ends, states=states), last)
    with pytest.raises(Wrong):
        walk(replace(whole, end=vector_id(first)), start, ends=ends, states=states)
    with pytest.raises(Wrong):
        walk(
            replace(whole, legs=(legs[0], replace(legs[1], since_offer=False), legs[2])),
            start,
            ends=ends,
            states=states,
        )
    with pytest.raises(KeyError):
        walk(whole, start, ends=ends, states={})


def test_room_for_a_state_is_taken_at_once_and_refused_where_the_disk_has_not_so_much(tmp_path: Path) -> None:
    """Else a disk that fills up while a state comes would kill the daemon, which writes into a map."""
    vectors = Vectors(tmp_path)
    room = vectors.room(1 << 20)
    held = {each: os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
    (file,) = (each for each, path in held.items() if str(tmp_path) in path)
    assert len(room) == 1 << 20 <= 512 * file.stat().st_blocks
    with pytest.raises(OSError):
        vectors.room(1 << 60)
    assert not list(tmp_path.iterdir())
