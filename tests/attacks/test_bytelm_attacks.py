"""The group byte-lm in short, and that its peers do what the product's trainers do."""

from __future__ import annotations

import bytelm
import numpy as np
import pytest
import torch
from adversaries import gradient as adversaries
from bytelm import ByteTask
from openrounds import Lie, OpenSwarm, undefended

from swarmnode.training.byte_lm import ByteLM
from swarmnode.training.inner import InnerLoop
from swarmnode.training.outer import OuterState
from swarmnode.training.tasks import Assignment


@pytest.mark.slow
def test_a_peer_trains_as_the_products_trainer_does_and_keeps_its_moments() -> None:
    task, text, place = ByteTask(seed=3, alpha=None, peers=4), bytelm.text_of(3), 2
    spec = text.spec
    own = ByteLM(spec, Assignment(spec.run_id, task.names[place], **text.files(task.names[place])))
    vector = torch.from_numpy(np.array(task.start()))
    loop = InnerLoop(spec, own, peer_id=task.names[place], vector=vector, keep=True)
    phi = OuterState.start(task.start()).parameters
    for number in range(2):
        vector.copy_(torch.from_numpy(np.array(phi)))
        loop.train(round=number, steps=spec.inner.steps, seconds=60, between=lambda: False)
        deltas = task.train(phi, round=number)
        assert np.array_equal(deltas[place], phi - vector.numpy())
        phi = phi - deltas.mean(axis=0)
    assert not np.array_equal(task.train(phi, round=0)[place], deltas[place])


def test_a_judge_measures_on_what_its_seed_draws_for_the_product() -> None:
    task, text = ByteTask(seed=0, alpha=None, peers=1), bytelm.text_of(0)
    own = ByteLM(text.spec, Assignment("", "", **text.files("")))
    loop = InnerLoop(text.spec, own, peer_id="", vector=torch.from_numpy(task.start()), keep=True)
    loss, slope = loop.slope(own.heldout(7)[1:3])
    assert np.array_equal(task.slope(task.start(), 7, 1, 3), slope.numpy())
    both = task.losses(task.start()[None], seed=7, samples=3 * bytelm.CONTEXT)[0] * 3
    first = task.losses(task.start()[None], seed=7, samples=bytelm.CONTEXT)[0]
    assert both - first == pytest.approx(2 * loss, rel=1e-5)
    assert task.slope(task.start(), 7, 0, 16).any()


def test_nobody_trains_on_or_judges_by_what_is_tested_and_peers_have_texts_of_their_own() -> None:
    alike, skewed = ByteTask(seed=0, alpha=None, peers=4), ByteTask(seed=0, alpha=0.3, peers=4)
    tested = bytelm.text_of(0).tested
    pieces = {tested[at : at + 256] for at in range(0, 1 << 16, 8192)}
    for text in (*alike.texts, *skewed.texts, bytelm.text_of(0).heldout):
        assert not any(piece in text for piece in pieces)
    assert len(set(alike.texts)) == len(set(skewed.texts)) == 4
    assert _largest_section(skewed.texts[0]) > 2 * _largest_section(alike.texts[0])


def _largest_section(text: bytes) -> float:
    """Share of its documents that are of one section."""
    documents = bytelm.documents(0)
    places = [place for place, document in enumerate(documents) if document in text]
    return float(np.bincount([place * bytelm.SECTIONS // len(documents) for place in places]).max() / len(places))


def test_who_flips_labels_trains_on_true_text_to_say_something_else() -> None:
    task = ByteTask(seed=0, alpha=None, peers=2)
    task.texts[1], task.names[1] = task.texts[0], task.names[0]
    task.labels[1:] = adversaries.LabelFlip().labels(task.labels[1:], task.classes)
    theta = np.stack([task.start()] * 2)
    for number in range(6):
        theta = theta - task.train(theta, round=number)
    before, work, lie = task.losses(np.stack([task.start(), *theta]), seed=1)
    assert work < before - 1 and lie > before + 1


@pytest.mark.slow
def test_six_peers_learn_python_though_two_liars_of_them_ruin_the_plain_mean() -> None:
    task, lie, rounds = ByteTask(seed=0, alpha=None, peers=6), adversaries.LargeSignFlip(), 6
    clean, ruined = undefended(task, Lie(), 0, rounds), undefended(task, lie, 2, rounds)
    course = OpenSwarm(task, lie, 2, codec_name="fp32").run(rounds)
    before, *after = task.losses(np.stack([task.start(), clean, course.phi]), seed=1)
    assert before - after[0] > 1.5
    assert before - after[1] > 0.7 * (before - after[0])
    assert task.losses(ruined[None], seed=1)[0] > before or not np.isfinite(ruined).all()
    assert (course.unseated, course.lapsed, course.captured) == (0, 0, None)
