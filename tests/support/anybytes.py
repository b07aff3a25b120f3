"""Every decoder that strangers' bytes reach, and what it promises for any bytes: a sound value, or its own refusal.

For the fuzzer (tests/fuzz/fuzz_decoders.py) and for the property tests (tests/fuzz/test_any_bytes.py). A target raises
only its `refusal`; whatever else it raises, AssertionError among them, is a finding. Seeds are valid bytes to start
mutations from.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np

from swarmnode.crdt import encoding, record
from swarmnode.crdt.encoding import EncodingError
from swarmnode.crdt.envelope import Envelope, InvalidEnvelope
from swarmnode.crdt.kinds import KINDS
from swarmnode.crdt.ranges import END, START
from swarmnode.crdt.reconcile_frames import MARK_SIZE, Compare, Malformed, RangeReader, RangeWriter
from swarmnode.crdt.record import InvalidRecord, Record, open_element
from swarmnode.protocols import catalogue, wire
from swarmnode.protocols.calls import frames as rpc_frames
from swarmnode.protocols.chain import state as chainstate
from swarmnode.protocols.chain import statements
from swarmnode.protocols.methods.known import messages
from swarmnode.protocols.methods.known.messages import RoundHead, RoundStep
from swarmnode.protocols.methods.open import join as open_join
from swarmnode.protocols.methods.open import sync as open_sync
from swarmnode.protocols.methods.rollouts import messages as rollout_messages
from swarmnode.protocols.methods.rollouts.messages import InvalidGroup, open_group
from swarmnode.protocols.methods.rollouts.messages import seal as seal_group
from swarmnode.protocols.network import Network
from swarmnode.protocols.peers import hello
from swarmnode.protocols.state import membership
from swarmnode.protocols.state import wire as statewire
from swarmnode.protocols.transfer import bulk, shard_wire
from swarmnode.protocols.wire import WireError
from swarmnode.training import runspec
from swarmnode.training.codecs import CODECS, Codec, CodecError
from swarmnode.training.codecs.topk import TopK
from swarmnode.training.options import SettingError
from swarmnode.training.rl.groups import RolloutGroup
from swarmnode.training.rl.tasks import TaskRef

MAX_ELEMENTS = 2 * 4096 + 300  # two whole chunks of topk and a part of one; several blocks of the others
PEER = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
RUN = "ab" * 32
ID = bytes(range(32))


@dataclass(frozen=True)
class Target:
    """One decoder: `run` returns for bytes that it takes, raises `refusal` for others."""

    name: str
    run: Callable[[bytes], None]
    refusal: type[Exception] | tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]

    def takes(self, raw: bytes) -> bool:
        """Whether the bytes were taken; raises what is neither taking nor refusing."""
        try:
            self.run(raw)
        except self.refusal:
            return False
        return True


# --- codecs: two bytes choose the number of elements, the rest is what they are decoded from


def _codec(codec: Codec, raw: bytes) -> None:
    elements = int.from_bytes(raw[:2], "little") % MAX_ELEMENTS
    body = raw[2:]
    if raw[:1] != b"\xff":  # mostly of the right size, so that something is decoded at all
        body = body[: codec.encoded_size(elements)].ljust(codec.encoded_size(elements), b"\0")
    values = codec.decode(body, elements)
    assert values.shape == (elements,) and values.dtype == np.float32 and np.isfinite(values).all()
    if isinstance(codec, TopK):
        places, kept = codec.decode_sparse(body, elements)
        assert (np.diff(places) > 0).all() and (places >= 0).all() and (places < elements).all()
        assert values[places].tobytes() == kept.tobytes() and np.count_nonzero(values) == np.count_nonzero(kept)
    codec.encode(values)


def _codec_seed(codec: Codec, elements: int) -> bytes:
    return elements.to_bytes(2, "little") + bytes(codec.encode(np.sin(np.arange(elements, dtype=np.float32))))


# --- messages, records, statements


@dataclass(frozen=True)
class _Everything:
    """A field of each type that a message may have."""

    number: int
    ratio: float
    text: str
    raw: bytes
    flag: bool
    maybe: str | None = None
    either: int | str = 0
    many: tuple[int, ...] = ()
    pair: tuple[int, bytes] = (0, b"")
    table: dict[str, float] = field(default_factory=dict)
    nested: RoundStep | None = None


def _message(kind: type, raw: bytes) -> None:
    again = wire.encode(wire.decode(kind, raw))
    assert wire.encode(wire.decode(kind, again)) == again  # not the messages: NaN differs from itself


def _any_message(raw: bytes) -> None:
    """The first byte chooses the kind of message."""
    _message(_MESSAGES[raw[0] % len(_MESSAGES)] if raw else _MESSAGES[0], raw[1:])


def _message_kinds(*modules: ModuleType) -> list[type]:
    """The message dataclasses that these modules define."""
    found = []
    for module in modules:
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__ or kind.__name__.endswith("Limits"):
                continue
            if is_dataclass(kind) and not kind.__name__.startswith("_"):
                try:
                    wire.decode(kind, b"\x80")  # a map without fields
                except WireError:
                    found.append(kind)
                except TypeError:
                    continue  # its fields have no form on the wire, so it is no message
                else:
                    found.append(kind)
    return found


def _example(annotation: Any) -> Any:
    """A value of a field's type, as plain as most messages take it."""
    if is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return annotation(**{field.name: _example(hints[field.name]) for field in fields(annotation)})  # type: ignore[operator]
    plain = {int: 1, float: 1.0, str: RUN, bytes: ID, bool: True}
    if annotation in plain:
        return plain[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and arguments[-1] is not ...:
        return tuple(_example(part) for part in arguments)
    if origin in (tuple, dict):
        return origin()
    return None if type(None) in arguments else _example(arguments[0])


def _message_seeds() -> Iterator[bytes]:
    """An example of each kind of message that takes one so plain."""
    for number, kind in enumerate(_MESSAGES):
        with suppress(ValueError):
            yield bytes([number]) + wire.encode(_example(kind))


_MESSAGES = _message_kinds(
    messages, open_join, open_sync, hello, membership, shard_wire, statewire, rpc_frames, bulk, rollout_messages
)


def _rollout_group(raw: bytes) -> None:
    """A group, as if it were signed."""
    signed = open_group(Envelope(raw, bytes(64)), run_id=RUN, verify=lambda *_: True)
    group = signed.group
    assert group == RolloutGroup.from_map(group.to_map())
    assert [len(answer) for answer in group.answers] == list(signed.packed.lengths)


def _rollout_seed(tokens: int) -> bytes:
    answers = tuple(tuple(range(1, 1 + tokens)) for _ in range(4))
    logprobs = tuple(tuple(-0.5 for _ in answer) for answer in answers)
    group = RolloutGroup(TaskRef("digits/swap", 5, 7), answers, 3, "cd" * 32, "characters", logprobs)
    made = seal_group(group, run_id=RUN, author=PEER, counter=1, made_at=1 << 40, sign=lambda _: bytes(64))
    return made.sealed[0]


def _canonical(raw: bytes) -> None:
    assert encoding.encode(encoding.decode(raw)) == raw


def _record(raw: bytes) -> None:
    assert open_element(raw, lambda *_: True).sealed == raw


def _sealed(key: str, value: encoding.Value) -> bytes:
    return record.write(RUN, PEER, key, value, hlc=1 << 20, sign=lambda _: bytes(64)).sealed


def _statement(raw: bytes) -> None:
    """The first byte chooses the key, the rest is the value of a record that was found valid."""
    known = _STATEMENTS[raw[0] % len(_STATEMENTS)] if raw else _STATEMENTS[0]
    value = encoding.decode(raw[1:], max_size=8192)
    key = known.key
    read = statements.read(Record(1, RUN, PEER, key, 1 << 20, KINDS[key.partition("/")[0]].ttl, value, bytes(64)))
    assert read.what.key == key and read.what.value == value


_STATEMENTS: tuple[statements.Statement, ...] = (
    statements.Commit(3, ID, ID, ID),
    statements.AvailabilityVote(3, ID, (ID,), ID, 5, (1,), ((1, 2),)),
    statements.Reveal(3, ID, ID, bytes(16), ID),
    statements.Seal(3, ID, ID),
    statements.Scores(3, ID, ID, bytes(16), None, (statements.Score(bytes(16), 0, 7),)),
    statements.Roster(3, ID, 0, b"", (ID,), (ID,), (statements.Entry(ID, 0, 1, 1),), 1, False, 5, ID, ID),
    statements.ForkChoiceVote(ID, 3, ID, True, True),
)


def _chain_state(raw: bytes) -> None:
    assert len(chainstate.decode(raw).digest) == 32


def _frame(raw: bytes) -> None:
    """What a stranger asks, and the answers to an ask of one's own."""
    if raw[:1] == b"\0":
        RangeReader(raw[1:]).asks()
    else:
        RangeReader(raw[1:]).answers([Compare(START, END, bytes(MARK_SIZE))])


def _asks() -> bytes:
    writer = RangeWriter(b"\0")
    writer.asks([Compare(START, END, bytes(MARK_SIZE))])
    return writer.frame()


def _listing(raw: bytes) -> None:
    anybody = cast(Network, SimpleNamespace(verify=lambda *_: True))
    catalogue.opened(anybody, catalogue.SignedListing(PEER, raw))


_LISTED = catalogue.ListedRun(bytes(32), 1, 2, 3, ("/ip4/192.0.2.1/tcp/1",))


def _spec(raw: bytes) -> None:
    assert runspec.encode(runspec.decode(raw)) == raw


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *(
            Target(
                f"codec {name}",
                partial(_codec, codec),
                CodecError,
                (_codec_seed(codec, 100), _codec_seed(codec, 4096 + 70)),
            )
            for name, codec in CODECS.items()
        ),
        Target(
            "wire message",
            partial(_message, _Everything),
            WireError,
            (
                wire.encode(
                    _Everything(1, 0.5, "t", b"b", True, "m", "e", (1,), (2, b""), {"k": 1.0}, RoundStep(1, RUN))
                ),
            ),
        ),
        Target(
            "wire head",
            partial(_message, RoundHead),
            WireError,
            (wire.encode(RoundHead(1, RUN, (PEER,), (), 2.0, RUN, (RoundStep(0, RUN),), 1.0, False)),),
        ),
        Target("wire, any message", _any_message, WireError, tuple(_message_seeds())),
        Target(
            "canonical value", _canonical, EncodingError, (encoding.encode({"a": (1, b"2", None), "b": {"c": 0.5}}),)
        ),
        Target("rollout group", _rollout_group, InvalidGroup, (_rollout_seed(6), _rollout_seed(600))),
        Target("record", _record, InvalidRecord, (_sealed("member", {"a": 1}), _sealed("commit/00000003/0", b"x"))),
        Target(
            "statement of the chain",
            _statement,
            (InvalidRecord, EncodingError),
            tuple(bytes([i]) + encoding.encode(said.value) for i, said in enumerate(_STATEMENTS)),
        ),
        Target("chain state", _chain_state, ValueError, (chainstate.genesis(RUN, (PEER,), window=5).encode(),)),
        Target("reconciliation frame", _frame, Malformed, (_asks(),)),
        Target(
            "listing",
            _listing,
            InvalidEnvelope,
            (catalogue.LISTINGS.seal(wire.plain(_LISTED), lambda _: bytes(64)).sealed,),
        ),
        Target(
            "run specification",
            _spec,
            SettingError,
            (runspec.encode(runspec.parse_runspec({"run": {"name": "fuzz"}}, source="here")),),
        ),
    )
}


def all_seeds() -> list[bytes]:
    """Inputs for `choose`: each seed behind the byte that chooses its target."""
    return [struct.pack("B", i) + seed for i, target in enumerate(TARGETS.values()) for seed in target.seeds]


def choose(raw: bytes) -> tuple[Target, bytes]:
    """The target that the first byte chooses, and what is left for it."""
    targets = list(TARGETS.values())
    return targets[raw[0] % len(targets) if raw else 0], raw[1:]
