"""The arithmetic of Streaming DiLoCo: fragments, the outer step of one, and what a worker did that is not settled."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.training.gpt import GPT
from swarmnode.training.inner import layout_of
from swarmnode.training.outer import Layout, OuterState, outer_step
from swarmnode.training.sections import ModelSection
from swarmnode.training.streaming import Fragment, Unsettled, ahead, fragments_of, mixed

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


def _random(size: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_fragments_cover_a_model_once_in_layers_of_equal_distance(count: int) -> None:
    layout = layout_of(GPT(ModelSection(layers=4, heads=1, width=16, context=16)))
    fragments = fragments_of(layout, count)
    assert len(fragments) == min(count, 4)
    covered = np.zeros(layout.parameters, int)
    for fragment in fragments:
        for start, stop in fragment.ranges:
            covered[start:stop] += 1
    assert (covered == 1).all()
    for slot in layout.slots:
        at = next(n for n, f in enumerate(fragments) if any(a <= slot.offset < b for a, b in f.ranges))
        if slot.name.startswith("blocks."):
            assert at == int(slot.name.split(".")[1]) % len(fragments), slot.name


def test_tensors_outside_of_layers_go_where_there_is_least() -> None:
    layout = Layout.of([("in", (8,)), ("layers.0.w", (5,)), ("layers.1.w", (6,)), ("out", (8,))])
    first, second = fragments_of(layout, 2)
    assert first.ranges == ((0, 13),) and second.ranges == ((13, 27),)


def test_a_model_without_layers_is_cut_into_equal_runs() -> None:
    layout = Layout.of([("weight", (10,)), ("bias", (1,))])
    assert [f.ranges for f in fragments_of(layout, 3)] == [((0, 3),), ((3, 7),), ((7, 11),)]
    assert len(fragments_of(layout, 64)) == 11


def test_elements_are_taken_and_put_back_in_their_places() -> None:
    vector, fragment = np.arange(10, dtype=np.float32), Fragment(((1, 3), (7, 8)))
    assert fragment.size == 3 and fragment.take(vector).tolist() == [1, 2, 7]
    fragment.put(vector, np.array([-1, -2, -7], np.float32))
    assert vector.tolist() == [0, -1, -2, 3, 4, 5, 6, -7, 8, 9]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_step_of_a_fragment_is_that_of_the_whole_vector_there_and_none_elsewhere(momentum: float) -> None:
    state, fragment = OuterState(_random(10), _random(10, 1)), Fragment(((0, 2), (5, 9)))
    mean = _random(fragment.size, 2)
    after = fragment.step(state, mean, lr=0.4, momentum=momentum)
    whole = np.zeros(10, np.float32)
    fragment.put(whole, mean)
    expected = outer_step(state, whole, lr=0.4, momentum=momentum)
    for got, wanted, before in (
        (after.parameters, expected.parameters, state.parameters),
        (after.momentum, expected.momentum, state.momentum),
    ):
        there = np.zeros(10, bool)
        there[[0, 1, 5, 6, 7, 8]] = True
        assert np.array_equal(got[there], wanted[there]) and np.array_equal(got[~there], before[~there])
        assert momentum == 0 or not got.flags.writeable


def test_a_mean_that_overflows_moves_nothing() -> None:
    state = OuterState(_random(4), np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="NaN or infinity"):
        Fragment(((0, 2),)).step(state, np.full(2, 3e38, np.float32), lr=10, momentum=0)


def test_what_was_mixed_lies_between() -> None:
    local, shared = np.array([4, 0], np.float32), np.array([0, 8], np.float32)
    assert mixed(local, shared, 0.25).tolist() == [1, 6]
    assert mixed(local, shared, 1.0).tolist() == [4, 0] and mixed(local, shared, 0.0).tolist() == [0, 8]


def test_eager_updates_go_on_from_the_own_share_of_the_step() -> None:
    state, fragment = OuterState(np.full(4, 10, np.float32), np.zeros(4, np.float32)), Fragment(((1, 3),))
    own = np.array([4, -4], np.float32)
    assert ahead(fragment, state, own, 0.25, lr=2.0, momentum=0.0).tolist() == [8, 12]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_all_inner_steps_count_once_wherever_parameters_are_moved(alpha: float) -> None:
    """Two workers without inner loops: what each did is what it offers, whatever was mixed into its parameters."""
    fragment, rest = Fragment(((0, 4),)), Fragment(((4, 6),))
    state = OuterState(_random(6), np.zeros(6, np.float32))
    locals_ = [state.parameters.copy() for _ in range(2)]
    works = [Unsettled(state.parameters) for _ in range(2)]
    done = [np.zeros(6, np.float32) for _ in range(2)]
    offered = np.zeros(6, np.float32)
    for turn in range(8):
        part = (fragment, rest)[turn % 2]
        given = []
        for number, (local, work) in enumerate(zip(locals_, works, strict=True)):
            for late in (False, True):
                if late:
                    given.append(part.take(work.of(local)))
                step = _random(6, 100 * turn + 10 * number + late)
                local -= step
                done[number] += step
        mean = (given[0] + given[1]) / 2
        part.put(offered, part.take(offered) + mean)
        state = part.step(state, mean, lr=1.0, momentum=0.0)
        for local, work, own in zip(locals_, works, given, strict=True):
            work.settle(part, own)
            work.move(part, local, mixed(part.take(local), part.take(state.parameters), alpha))
    left = [work.of(local) for work, local in zip(works, locals_, strict=True)]
    np.testing.assert_allclose(offered + (left[0] + left[1]) / 2, (done[0] + done[1]) / 2, atol=1e-5)
    assert np.abs(left[0]).max() > 0.1
