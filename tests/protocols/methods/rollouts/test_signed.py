"""A rollout group comes back as it was sent, only its author can have sent it, and nothing else passes for one."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutnodes import RUN, group

from swarmnode.crdt import encoding
from swarmnode.crdt.envelope import Envelope
from swarmnode.protocols.methods.rollouts.messages import (
    GROUPS,
    MAX_CONTENT,
    InvalidGroup,
    SignedGroup,
    open_group,
    seal,
)
from swarmnode.protocols.wire import WireError, encode, plain
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.rl.groups import RolloutGroup, dequantised, quantised
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build
from swarmnode.training.rl.tasks import TaskRef

WORLD = SimWorld()
ALICE, BOB = WORLD.node("alice"), WORLD.node("bob")

tokens = st.lists(st.integers(0, (1 << 24) - 1) | st.integers(0, 300), min_size=1, max_size=12)


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    answers = draw(st.lists(tokens, min_size=1, max_size=4))
    logprob = st.floats(-60.0, 0.0)
    logprobs = [draw(st.lists(logprob, min_size=len(a), max_size=len(a))) for a in answers]
    return RolloutGroup(
        TaskRef(draw(st.text(min_size=1, max_size=20)), draw(st.integers(0, 9)), draw(st.integers(0, 2**53 - 1))),
        tuple(map(tuple, answers)),
        draw(st.integers(0, 2**53 - 1)),
        draw(st.text(max_size=64)),
        draw(st.text(max_size=64)),
        tuple(map(tuple, logprobs)) if draw(st.booleans()) else None,
    )


def sealed(rollouts: RolloutGroup, by: SimNetwork = ALICE, **changed: Any) -> SignedGroup:
    options: dict[str, Any] = {"run_id": RUN, "author": by.me, "counter": 7, "made_at": 1000, "sign": by.sign}
    return seal(rollouts, **(options | changed))


def opened(signed: SignedGroup, *, run_id: str = RUN) -> SignedGroup:
    return open_group(Envelope(*signed.sealed), run_id=run_id, verify=ALICE.verify)


@settings(max_examples=50)
@given(groups())
def test_a_group_comes_back_as_it_was_sent(rollouts: RolloutGroup) -> None:
    sent = sealed(rollouts)
    got = opened(sent)
    assert got == sent and got.group == sent.group and got.author == ALICE.me and got.packed.counter == 7
    assert got.size == sum(map(len, sent.sealed))
    assert got.group == replace(rollouts, logprobs=got.group.logprobs)
    assert (got.group.logprobs is None) == (rollouts.logprobs is None)


@given(st.lists(st.floats(-64.0, 0.0)))
def test_log_probabilities_are_off_by_half_a_step_at_the_most(values: list[float]) -> None:
    sent = np.array(values)
    off = np.abs(dequantised(quantised(sent)) - sent)
    assert np.all(off <= 8.0 * np.sqrt(-sent) / 65535 + 1e-8)  # 1.2e-4 nats for a token of probability 1/e


@given(st.lists(st.integers(0, 65535)))
def test_log_probabilities_that_travelled_once_change_no_more(steps: list[int]) -> None:
    assert quantised(dequantised(np.array(steps, np.uint16))).tolist() == steps


def test_log_probabilities_err_less_than_the_check_of_equal_models_is_to_tell() -> None:
    drawn = -np.random.default_rng(1).exponential(1.0, 10_000)
    off = np.abs(dequantised(quantised(drawn)) - drawn).mean()
    assert off < 1e-4 < np.abs(drawn.astype(np.float16) - drawn).mean()


@given(st.binary(max_size=300), st.binary(min_size=64, max_size=64))
def test_bytes_of_strangers_raise_nothing_but_invalid_group(payload: bytes, signature: bytes) -> None:
    with pytest.raises(InvalidGroup):
        open_group(Envelope(payload, signature), run_id=RUN, verify=ALICE.verify)


@settings(max_examples=50)
@given(groups(), st.data())
def test_a_mangled_group_is_refused_whoever_signed_it(rollouts: RolloutGroup, data: st.DataObject) -> None:
    """Even the author's signature makes nothing but a sound group of what is no group."""
    sent = sealed(rollouts)
    raw = bytearray(sent.sealed[0])
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[place]))
    with pytest.raises(InvalidGroup):
        open_group(Envelope(bytes(raw), sent.signature), run_id=RUN, verify=ALICE.verify)
    with suppress(InvalidGroup):
        again = open_group(Envelope(bytes(raw), bytes(64)), run_id=RUN, verify=lambda *_: True).group
        assert RolloutGroup.from_map(again.to_map()) == again


@pytest.mark.parametrize("more", [{"more": 1}, {"policy": "p" * 129}, {"vocabulary": "v" * 129}])
def test_what_could_not_be_passed_on_as_it_was_signed_is_refused_at_once(more: dict[str, Any]) -> None:
    """Whoever passed it on would send what its author did not sign, and be taken for a forger."""
    envelope = GROUPS.seal(plain(sealed(group(1)).packed) | more, ALICE.sign, RUN)
    with pytest.raises(InvalidGroup) as refused:
        open_group(envelope, run_id=RUN, verify=ALICE.verify)
    assert not refused.value.forged


def test_a_group_of_another_author_or_run_is_refused_as_forged() -> None:
    honest = sealed(group(1))
    for forged, run_id in (
        (replace(honest, signature=BOB.sign(b"anything")), RUN),
        (sealed(group(1), BOB, author=ALICE.me), RUN),
        (honest, "cd" * 32),
    ):
        with pytest.raises(InvalidGroup) as refused:
            opened(forged, run_id=run_id)
        assert refused.value.forged
    assert opened(honest) == honest


def test_a_small_group_takes_the_bytes_that_its_tokens_and_a_header_take() -> None:
    assert sealed(group(1)).size < 420
    assert sealed(group(1, tokens=60)).size == sealed(group(1)).size + 8 * 54 + 1  # and a longer length of them


def test_a_samplers_group_has_no_byte_for_a_proof_beyond_the_name_of_its_trainer() -> None:
    """What an audit asks for, log-probabilities, is in the groups of those who train as well."""
    learner = Learner("alice", build(PolicySpec(), seed=1), Settings(), seed=1)
    (own,) = (scored.group for scored in learner.sample(1))
    (given,) = learner.answer([own.task], policy=own.policy)
    sampled = sealed(given, trainer=BOB.me)
    assert own.logprobs is not None and sampled.size - len(BOB.me) - sealed(own).size in range(17)


@pytest.mark.parametrize("tokens", [6, 64])
def test_log_probabilities_take_two_bytes_a_token(tokens: int) -> None:
    with_them, without = (sealed(group(1, tokens=tokens, logprobs=told)).size for told in (True, False))
    assert with_them - without in range(16 * tokens, 16 * tokens + 3), "and a longer length of the content"


def test_a_group_too_large_to_travel_says_so_to_its_author() -> None:
    answer = (70_000,) * 4096
    with pytest.raises(InvalidGroup, match="cannot be shared"):
        sealed(RolloutGroup(TaskRef("t", 0, 0), (answer,) * 64, 0, "", "", ((-1.0,) * 4096,) * 64))
    assert len(sealed(RolloutGroup(TaskRef("t", 0, 0), (answer,) * 64, 0, "", "")).packed.content) <= MAX_CONTENT


PACKED = sealed(group(1)).packed


@pytest.mark.parametrize(
    "change",
    [
        {"author": ""},
        {"author": "x" * 200},
        {"counter": -1},
        {"made_at": 1 << 60},
        {"lengths": ()},
        {"lengths": (1,) * 65},
        {"width": 0},
        {"width": 4},
        {"content": b""},
        {"content": bytes(4096 * 64 * 5), "lengths": (4096,) * 64, "width": 3, "logprobs": True},  # too large
    ],
)
def test_groups_beyond_their_limits_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        replace(PACKED, **change)
    payload = msgpack.packb(dict(sorted((vars(PACKED) | change).items())))
    with pytest.raises(InvalidGroup):
        open_group(Envelope(payload, ALICE.sign(payload)), run_id=RUN, verify=lambda *_: True)


@pytest.mark.parametrize(
    "change",
    [
        {"task": ("", 0, 0)},
        {"task": ("t", -1, 0)},
        {"task": ("t", 0, 1 << 60)},
        {"version": -1},
        {"lengths": (0, 48)},
        {"lengths": (4097,)},
        {"lengths": (7,) * 8},
        {"lengths": (49, -1)},
        {"logprobs": True},
        {"content": bytes(47)},
        {"content": bytes(49)},  # with something beside it
    ],
)
def test_what_names_no_group_is_refused(change: dict[str, Any]) -> None:
    payload = encoding.encode(plain(replace(PACKED, **change)))
    with pytest.raises(InvalidGroup):
        open_group(Envelope(payload, bytes(64)), run_id=RUN, verify=lambda *_: True)


def test_a_group_that_is_not_in_canonical_form_is_refused() -> None:
    payload = encode(PACKED)
    assert payload != encoding.encode(plain(PACKED))
    with pytest.raises(InvalidGroup, match="canonical"):
        open_group(Envelope(payload, bytes(64)), run_id=RUN, verify=lambda *_: True)


@pytest.mark.parametrize("logprobs", [True, False])
def test_what_is_held_of_a_group_takes_little_more_memory_than_its_bytes(logprobs: bool) -> None:
    chance = tuple(tuple(-0.5 for _ in range(1000)) for _ in range(16)) if logprobs else None
    tokens = tuple(tuple(range(1000 * n, 1000 * n + 1000)) for n in range(16))
    sent = sealed(RolloutGroup(TaskRef("digits/swap", 5, 1), tokens, 0, "", "", chance))
    tracemalloc.start()
    try:
        held = opened(sent)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held.size > 32_000 and taken < 1.5 * held.size
